/*
 * qcow2 headers of many LVs, without activating one.
 *
 * A scan opens each PV once. What is read is what is on disk at that moment: the report, and with
 * it where an LV begins, must be fresh, or the pool's lock be held since it was read.
 */
#ifndef VARVE_VOL_LVM_HEAD_H
#define VARVE_VOL_LVM_HEAD_H

#include "vol/internal.h"
#include "vol/lvm.h"

struct lvm_head {
    const struct lvm_lv *lv; /* by the caller */
    int rc;                  /* 0: head holds (head_fini). -ENODATA: it has to be activated; else
                              * what lvm_head_read, head_parse say; -EUCLEAN also of an LV that ends
                              * before its own tables */
    struct head head;
    struct err err; /* why rc is not 0 */
};

struct lvm_heads_pv {
    const char *name; /* of the report: it must outlive the scan */
    int fd;           /* or -errno */
};
struct lvm_heads {
    const char *root; /* where the nodes of active LVs are: <dev>/<vg> */
    VEC(struct lvm_heads_pv) pvs;
};
void lvm_heads_init(struct lvm_heads *scan, const char *root);
/* Fills all of them, on helper threads. -ENOMEM: none was. May be called again with the same scan.
 */
SUSPENDS int lvm_heads_read(struct lvm_heads *scan, struct lvm_head *heads, size_t nr);
void lvm_heads_fini(struct lvm_heads *scan);

#endif
