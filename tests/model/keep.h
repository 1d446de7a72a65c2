/* A device that outlives the image opened on it: forwards to a child and does not close it. */
#ifndef VARVE_TESTS_KEEP_H
#define VARVE_TESTS_KEEP_H

#include "blk/blk.h"

/* The child stays the caller's. fixed_len: the device does not grow (as a volume). */
struct blk *keep_new(struct blk *child, bool fixed_len);

#endif
