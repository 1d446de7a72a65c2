/* Copying image files as they are: clones and moves. */
#ifndef VARVE_VOL_COPYFILE_H
#define VARVE_VOL_COPYFILE_H

#include "vol/internal.h"

struct copy_meter { /* of one operation, over all of its files */
    const struct vol_ctx *ctx;
    uint64_t done, total; /* bytes */
    uint64_t speed;       /* bytes a second; 0 = unlimited */
    uint64_t next_ns;     /* when the rate allows the next piece */
};
void copy_meter_add(struct copy_meter *meter, uint64_t bytes);
/* Makes `to`, which must not be there, the same as `from`: data and holes; durable, mode 0600. What
 * a failure leaves at `to` is the caller's to remove. */
SUSPENDS int file_copy(const char *from, const char *to, struct copy_meter *meter, struct err *err);

/* The same by sharing all blocks, at once, or not at all: whether it was done. */
bool file_share(const char *from, const char *to);

#endif
