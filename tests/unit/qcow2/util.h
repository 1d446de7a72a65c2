/* Files in the test's directory and what qemu-img says about them. */
#ifndef VARVE_TESTS_QCOW2_UTIL_H
#define VARVE_TESTS_QCOW2_UTIL_H

#include "blk/blk.h"
#include "qcow2/entry.h"
#include "qcow2/header.h"
#include "qcow2/image.h"
#include "test.h"

/* Path of a file in the test's directory; four of them stay valid. */
const char *t_path(const char *name);
/* Opens it buffered, without locks. */
SUSPENDS struct blk *t_open(const char *name);
SUSPENDS struct blk *t_create(const char *name);
/* Creates an image with our code and closes it. */
SUSPENDS void t_image(const char *name, const struct image_create_opts *opts);
/* `qemu-img check` exits with one of these statuses (rc2 may repeat rc1). */
void t_qemu_check(const char *name, int rc1, int rc2);
/* Single values of an open image, in host order. */
SUSPENDS uint64_t t_get64(struct blk *blk, uint64_t off);
SUSPENDS void t_put(struct blk *blk, uint64_t off, unsigned bytes, uint64_t value);
/* Host offset of the L2 entry of a guest offset; the table must exist. */
SUSPENDS uint64_t t_l2_pos(struct blk *blk, const struct qcow2_header *hdr, uint64_t guest_off);
/* Opens, reads the header (must work), checks; figures in *ret. */
SUSPENDS int t_check(const char *name, struct image_check *ret);

#endif
