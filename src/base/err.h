/*
 * An error as a value: a negative errno and a text for a person.
 *
 * A `struct err` lives in the caller's frame; setting it allocates nothing. The return code
 * decides what the program does, the text only explains. Every function takes NULL for err.
 */
#ifndef VARVE_BASE_ERR_H
#define VARVE_BASE_ERR_H

#include <errno.h>
#include "base/own.h"

struct err {
    int rc;         /* negative errno; 0 while nothing was set */
    char text[508]; /* one line, no newline; cut at the end if too long */
};

/* Sets code and text; returns rc, so that `return err_set(...)` reads well. rc < 0. */
int err_set(struct err *err, int rc, const char *fmt, ...) PRINTF_LIKE(3, 4);
/* The same, and ": strerror(-rc)" is put behind the text. */
int err_errno(struct err *err, int rc, const char *fmt, ...) PRINTF_LIKE(3, 4);
/* Puts "fmt: " before the text that is there (strerror if there is none); returns rc. */
int err_prefix(struct err *err, int rc, const char *fmt, ...) PRINTF_LIKE(3, 4);
/* The text, or strerror of the code when no text was set. Never NULL. */
const char *err_text(const struct err *err);

#endif
