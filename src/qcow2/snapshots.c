/*
 * The table of internal snapshots: entries of variable length, one behind the other.
 *
 * Nothing is allocated or read before its length was held against the file and the limits.
 */
#include <stdlib.h>
#include <string.h>
#include "base/bits.h"
#include "base/own.h"
#include "base/vec.h"
#include "qcow2/format.h"
#include "qcow2/snapshots.h"

#define WINDOW_LEN (256u << 10) /* longer than any entry */

static_assert(WINDOW_LEN > sizeof(struct qcow2_disk_snapshot) + QCOW2_SNAPSHOT_EXTRA_MAX +
                               2 * UINT16_MAX + 8,
              "an entry fits into the window");

/* A piece of the table in memory, so that thousands of small entries are few reads. */
struct reader {
    struct blk *blk;
    uint8_t *data; /* owned */
    uint64_t off;  /* of data in the file */
    size_t len;
};

/* Makes [off, off + len) available; len <= WINDOW_LEN. */
SUSPENDS
static int reader_need(struct reader *r, uint64_t off, size_t len, const uint8_t **ret,
                       struct err *err)
{
    if (!range_ok(off, len, r->blk->len))
        return err_set(err, -EINVAL, "the snapshot table runs past the end of the file");
    if (off < r->off || !range_ok(off - r->off, len, r->len)) {
        size_t n = MIN(r->blk->len - off, (uint64_t)WINDOW_LEN);
        int rc = blk_read(r->blk, off, r->data, n);

        if (rc < 0)
            return err_errno(err, rc, "read the snapshot table");
        r->off = off;
        r->len = n;
    }
    *ret = r->data + (off - r->off);
    return 0;
}

static void decode_extra(const uint8_t *data, size_t len, struct qcow2_snapshot *snap)
{
    struct qcow2_disk_snapshot_extra extra;

    memset(&extra, 0, sizeof(extra));
    memcpy(&extra, data, MIN(len, sizeof(extra)));
    if (len >= offsetof(struct qcow2_disk_snapshot_extra, disk_len))
        snap->vm_state_len = be64_get(extra.vm_state_len);
    if (len >= offsetof(struct qcow2_disk_snapshot_extra, icount))
        snap->disk_len = be64_get(extra.disk_len);
    if (len >= sizeof(extra))
        snap->icount = be64_get(extra.icount);
}

/* Reads the entry at *off and moves *off behind it, unaligned. */
SUSPENDS
static int read_entry(struct reader *r, const struct qcow2_header *hdr, uint64_t *off,
                      struct qcow2_snapshot *ret, struct err *err)
{
    struct qcow2_disk_snapshot disk;
    const uint8_t *data;
    int rc = reader_need(r, *off, sizeof(disk), &data, err);

    if (rc < 0)
        return rc;
    memcpy(&disk, data, sizeof(disk));
    uint32_t extra_len = be32_get(disk.extra_len);
    uint16_t id_len = be16_get(disk.id_len), name_len = be16_get(disk.name_len);

    if (extra_len > QCOW2_SNAPSHOT_EXTRA_MAX)
        return err_set(err, -EINVAL, "a snapshot has too much extra data (%u bytes)", extra_len);
    size_t rest = (size_t)extra_len + id_len + name_len;

    rc = reader_need(r, *off + sizeof(disk), rest, &data, err);
    if (rc < 0)
        return rc;
    *ret = (struct qcow2_snapshot){
        .l1_off = be64_get(disk.l1_off),
        .l1_entries = be32_get(disk.l1_size),
        .date_sec = be32_get(disk.date_sec),
        .date_nsec = be32_get(disk.date_nsec),
        .vm_clock_nsec = be64_get(disk.vm_clock_nsec),
        .vm_state_len = be32_get(disk.vm_state_len),
        .disk_len = hdr->virtual_len,
        .icount = UINT64_MAX,
    };
    decode_extra(data, extra_len, ret);
    ret->id = strndup((const char *)data + extra_len, id_len);
    ret->name = strndup((const char *)data + extra_len + id_len, name_len);
    *off += sizeof(disk) + rest;
    return 0;
}

SUSPENDS
static int read_table(struct reader *r, const struct qcow2_header *hdr, struct qcow2_snapshots *ret,
                      struct err *err)
{
    uint64_t off = hdr->snapshots_off;

    while (ret->nr < hdr->nb_snapshots) {
        off = align_up(off, 8);
        int rc = read_entry(r, hdr, &off, &ret->list[ret->nr], err);

        if (rc < 0)
            return err_prefix(err, rc, "snapshot %u", ret->nr + 1);
        struct qcow2_snapshot *snap = &ret->list[ret->nr++];

        if (!snap->id || !snap->name)
            return err_set(err, -ENOMEM, "out of memory");
        if (off - hdr->snapshots_off > QCOW2_SNAPSHOT_TABLE_MAX)
            return err_set(err, -EINVAL, "the snapshot table is longer than %u bytes",
                           QCOW2_SNAPSHOT_TABLE_MAX);
    }
    ret->table_len = off - hdr->snapshots_off;
    return 0;
}

int qcow2_snapshots_read(struct blk *blk, const struct qcow2_header *hdr,
                         struct qcow2_snapshots *ret, struct err *err)
{
    struct qcow2_snapshots snaps = {0};

    if (hdr->nb_snapshots == 0) {
        *ret = snaps;
        return 0;
    }
    if (!range_ok(hdr->snapshots_off,
                  (uint64_t)hdr->nb_snapshots * sizeof(struct qcow2_disk_snapshot), blk->len))
        return err_set(err, -EINVAL, "the snapshot table runs past the end of the file");
    _cleanup_(freep) uint8_t *window = malloc(WINDOW_LEN);
    struct reader r = {.blk = blk, .data = window};

    snaps.list = calloc(hdr->nb_snapshots, sizeof(*snaps.list));
    if (!window || !snaps.list) {
        free(snaps.list);
        return err_set(err, -ENOMEM, "out of memory");
    }
    int rc = read_table(&r, hdr, &snaps, err);

    if (rc < 0)
        qcow2_snapshots_fini(&snaps);
    else
        *ret = snaps;
    return rc;
}

void qcow2_snapshots_fini(struct qcow2_snapshots *snaps)
{
    for (unsigned i = 0; i < snaps->nr; i++) {
        free(snaps->list[i].id);
        free(snaps->list[i].name);
    }
    free(snaps->list);
    *snaps = (struct qcow2_snapshots){0};
}

int qcow2_snapshots_check(struct blk *blk, const struct qcow2_header *hdr, struct err *err)
{
    struct qcow2_snapshots snaps;
    int rc = qcow2_snapshots_read(blk, hdr, &snaps, err);

    if (rc == 0)
        qcow2_snapshots_fini(&snaps);
    return rc;
}

int qcow2_snapshot_check_l1(const struct qcow2_header *hdr, const struct qcow2_snapshot *snap,
                            uint64_t file_len, struct err *err)
{
    uint64_t len = (uint64_t)snap->l1_entries * 8;

    if (len > QCOW2_L1_BYTES_MAX)
        return err_set(err, -EUCLEAN, "L1 table of snapshot '%s' is too large (%u entries)",
                       snap->name, snap->l1_entries);
    if (!is_aligned(snap->l1_off, hdr->cluster_size))
        return err_set(err, -EUCLEAN,
                       "L1 table of snapshot '%s' is not aligned to a cluster (offset 0x%llx)",
                       snap->name, (unsigned long long)snap->l1_off);
    if (!range_ok(snap->l1_off, len, file_len))
        return err_set(err, -EUCLEAN, "L1 table of snapshot '%s' lies beyond the end of the file",
                       snap->name);
    return 0;
}
