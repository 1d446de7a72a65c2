/*
 * Overwriting a device before its space is given away.
 *
 * In steps, from the front: it can be stopped between two, and go on from there in another process;
 * memory is bounded, no thread is held. Writing zeroes is left to the device where it can (it then
 * also gives the space back, if it is thin), else to the kernel, else done here.
 */
#ifndef VARVE_VOL_WIPE_H
#define VARVE_VOL_WIPE_H

#include <stdbool.h>
#include <stdint.h>
#include "base/err.h"
#include "rt/co.h"

struct wipe_opts {
    uint64_t from;  /* bytes that an earlier run has done */
    bool by_writes; /* zeroes are sent as data: for devices whose own zeroing is not trusted */
    bool discard;   /* what was zeroed, and flushed, is then discarded too */
    uint64_t rate;  /* bytes a second; 0: as fast as it goes */
    uint64_t step;  /* bytes at a time, a multiple of 1 MiB; 0: what suits the rate */
    /* After each step, and while the rate is waited for: false ends it. May be NULL. `done` may
     * still be in the device's cache. */
    bool (*go_on)(void *ctx, uint64_t done, uint64_t total);
    void *ctx;
};
/*
 * Zeroes a block device (or file) that nobody else has open.
 *
 *   ret_done   set on every way out: so much from the front is zero, whatever happens
 *
 * Errors   -ECANCELED go_on said so; -EBUSY somebody has it open; -EIO and others of the device:
 * the text says where; -EINVAL `from` lies behind the end.
 */
SUSPENDS int wipe(const char *path, const struct wipe_opts *opts, uint64_t *ret_done,
                  struct err *err);

#endif
