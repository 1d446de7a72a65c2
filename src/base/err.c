/* Error values: see err.h. Text that does not fit is cut, never overrun. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include "base/err.h"

static void set_text(struct err *err, int rc, const char *fmt, va_list ap)
{
    err->rc = rc;
    vsnprintf(err->text, sizeof(err->text), fmt, ap);
}

int err_set(struct err *err, int rc, const char *fmt, ...)
{
    va_list ap;

    if (!err)
        return rc;
    va_start(ap, fmt);
    set_text(err, rc, fmt, ap);
    va_end(ap);
    return rc;
}

int err_errno(struct err *err, int rc, const char *fmt, ...)
{
    va_list ap;

    if (!err)
        return rc;
    va_start(ap, fmt);
    set_text(err, rc, fmt, ap);
    va_end(ap);
    size_t used = strlen(err->text);
    snprintf(err->text + used, sizeof(err->text) - used, ": %s", strerror(-rc));
    return rc;
}

int err_prefix(struct err *err, int rc, const char *fmt, ...)
{
    char old[sizeof(err->text)];
    va_list ap;

    if (!err)
        return rc;
    snprintf(old, sizeof(old), "%s", err->rc ? err->text : strerror(-rc));
    va_start(ap, fmt);
    set_text(err, rc, fmt, ap);
    va_end(ap);
    size_t used = strlen(err->text);
    snprintf(err->text + used, sizeof(err->text) - used, ": %s", old);
    return rc;
}

const char *err_text(const struct err *err)
{
    return err->text[0] ? err->text : strerror(-err->rc);
}
