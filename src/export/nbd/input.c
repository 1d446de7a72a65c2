/*
 * Receiving: one recv fills a buffer that holds many requests; long payloads go straight to where
 * they belong. Invariant: between requests less than one header is left over, so moving the rest
 * to the front is cheap.
 */
#include <errno.h>
#include <string.h>
#include "base/check.h"
#include "export/nbd/internal.h"
#include "rt/reactor.h"

/* From this length on a payload is received in place; below, a full buffer saves calls. */
#define DIRECT_LEN ((size_t)32 << 10)

SUSPENDS
static int receive(struct nbd_input *in, void *buf, size_t len, size_t *ret)
{
    if (in->stop && *in->stop)
        return -ECANCELED;
    ssize_t n = io_recv(in->fd, buf, len);

    if (n < 0)
        return (int)n;
    if (n == 0)
        return -ECONNRESET;
    *ret = (size_t)n;
    return 0;
}

SUSPENDS
static int fill(struct nbd_input *in)
{
    size_t got = 0;

    if (in->pos > 0) {
        memmove(in->buf, in->buf + in->pos, in->end - in->pos);
        in->end -= in->pos;
        in->pos = 0;
    }
    int rc = receive(in, in->buf + in->end, NBD_INPUT_LEN - in->end, &got);
    if (rc == 0)
        in->end += got;
    return rc;
}

int nbd_input_need(struct nbd_input *in, size_t n)
{
    CHECK_THAT(n <= NBD_INPUT_LEN);
    while (in->end - in->pos < n) {
        int rc = fill(in);

        if (rc < 0)
            return rc;
    }
    return 0;
}

int nbd_input_copy(struct nbd_input *in, void *dst, size_t n)
{
    uint8_t *to = dst;
    int rc = 0;

    while (n > 0 && rc == 0) {
        size_t got = MIN(n, in->end - in->pos);

        memcpy(to, in->buf + in->pos, got);
        in->pos += got;
        to += got;
        n -= got;
        if (n >= DIRECT_LEN) {
            rc = receive(in, to, n, &got);
            if (rc == 0) {
                to += got;
                n -= got;
            }
        } else if (n > 0) {
            rc = fill(in);
        }
    }
    return rc;
}

int nbd_input_skip(struct nbd_input *in, uint64_t n)
{
    for (;;) {
        size_t got = (size_t)MIN(n, (uint64_t)(in->end - in->pos));

        in->pos += got;
        n -= got;
        if (n == 0)
            return 0;
        int rc = fill(in);
        if (rc < 0)
            return rc;
    }
}
