/* Internal snapshots: reading of their table. Spec: "Snapshots". */
#ifndef VARVE_QCOW2_SNAPSHOTS_H
#define VARVE_QCOW2_SNAPSHOTS_H

#include "qcow2/header.h"

#define QCOW2_SNAPSHOT_TABLE_MAX (64u << 20) /* bytes; as QEMU */
#define QCOW2_SNAPSHOT_EXTRA_MAX 1024u       /* bytes of extra data; as QEMU */

struct qcow2_snapshot {
    uint64_t l1_off; /* unchecked: see qcow2_snapshot_check_l1 */
    uint32_t l1_entries;
    char *id, *name; /* owned */
    uint32_t date_sec, date_nsec;
    uint64_t vm_clock_nsec;
    uint64_t vm_state_len;
    uint64_t disk_len; /* bytes; the image's length when the entry does not say */
    uint64_t icount;   /* UINT64_MAX: not recorded */
};

struct qcow2_snapshots {
    struct qcow2_snapshot *list; /* owned */
    unsigned nr;
    uint64_t table_len; /* bytes of the whole table */
};

/* Reads the table; *ret is filled on success, release with qcow2_snapshots_fini. Every count and
 * length is bounded, and the table lies inside the file (-EINVAL). The L1 tables of the snapshots
 * are not looked at: one bad snapshot must not keep the disk from being read. */
SUSPENDS
int qcow2_snapshots_read(struct blk *blk, const struct qcow2_header *hdr,
                         struct qcow2_snapshots *ret, struct err *err);
void qcow2_snapshots_fini(struct qcow2_snapshots *snaps);
/* The check of an open: reads the table and forgets it. Cheap without snapshots. */
SUSPENDS
int qcow2_snapshots_check(struct blk *blk, const struct qcow2_header *hdr, struct err *err);
/* -EUCLEAN unless the snapshot's L1 table is aligned, not too long and inside a file of file_len.
 */
int qcow2_snapshot_check_l1(const struct qcow2_header *hdr, const struct qcow2_snapshot *snap,
                            uint64_t file_len, struct err *err);

#endif
