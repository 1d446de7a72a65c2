/*
 * Writing of the header cluster.
 *
 *   0 ......................... 512                                    cluster
 *   | fixed part | extensions | | backing name: one place, or another |
 *
 * 1. The first 512 bytes are what a device writes whole. They hold everything but a long backing
 *    name; for their sake the names of features are left out if need be: a help for readers only.
 * 2. A name behind them never overwrites the one that the header on disk refers to.
 * 3. Where this is not possible (many extensions, small clusters) all is written at once.
 *
 * Order of writes: name; flush; first 512 bytes.
 */
#include <stdlib.h>
#include <string.h>
#include "base/bits.h"
#include "base/own.h"
#include "qcow2/format.h"
#include "qcow2/header.h"

#define ATOMIC_LEN 512u

/* Those that a reader may have to refuse. */
static const struct qcow2_disk_feature feature_names[] = {
    {0, 0, "dirty bit"},        {0, 1, "corrupt bit"},         {0, 2, "external data file"},
    {0, 3, "compression type"}, {0, 4, "extended L2 entries"},
};

/* Where the parts of a header go. */
struct plan {
    bool with_names;             /* feature names */
    size_t body_len;             /* fixed part and extensions, end marker included */
    uint64_t name_off, name_len; /* backing file's name; off 0: none */
};

/* What the header on disk uses behind its first 512 bytes. */
struct old_header {
    uint64_t name_off, name_len; /* len 0: none */
    bool exts_inside;            /* no extension there */
};

/* ---- encoding ---- */

/* Appends to a buffer that may be NULL: then only the length is counted. */
struct writer {
    uint8_t *data;
    size_t len;
};

static void put(struct writer *w, const void *data, size_t len)
{
    if (w->data && len)
        memcpy(w->data + w->len, data, len);
    w->len += len;
}

static void put_ext(struct writer *w, uint32_t magic, const void *data, size_t len)
{
    static const uint8_t zeroes[8];
    struct qcow2_disk_ext disk = {be32_make(magic), be32_make((uint32_t)len)};

    put(w, &disk, sizeof(disk));
    put(w, data, len);
    put(w, zeroes, align_up(len, 8) - len);
}

static uint32_t written_header_len(const struct qcow2_header *hdr)
{
    if (hdr->version == 2)
        return QCOW2_V2_HEADER_LEN;
    return MAX(hdr->header_len, (uint32_t)sizeof(struct qcow2_disk_header));
}

static void put_fixed(struct writer *w, const struct qcow2_header *hdr, const struct plan *plan)
{
    uint32_t header_len = written_header_len(hdr);
    struct qcow2_disk_header disk = {
        .magic = be32_make(QCOW2_MAGIC),
        .version = be32_make(hdr->version),
        .backing_off = be64_make(plan->name_off),
        .backing_len = be32_make((uint32_t)plan->name_len),
        .cluster_bits = be32_make(hdr->cluster_bits),
        .size = be64_make(hdr->virtual_len),
        .crypt_method = be32_make(hdr->crypt_method),
        .l1_size = be32_make(hdr->l1_entries),
        .l1_off = be64_make(hdr->l1_off),
        .reftable_off = be64_make(hdr->reftable_off),
        .reftable_clusters = be32_make(hdr->reftable_clusters),
        .nb_snapshots = be32_make(hdr->nb_snapshots),
        .snapshots_off = be64_make(hdr->snapshots_off),
        .incompatible = be64_make(hdr->incompatible),
        .compatible = be64_make(hdr->compatible),
        .autoclear = be64_make(hdr->autoclear),
        .refcount_order = be32_make(hdr->refcount_order),
        .header_len = be32_make(header_len),
        .compression = (uint8_t)hdr->compression,
    };

    put(w, &disk, MIN(header_len, (uint32_t)sizeof(disk)));
    if (hdr->unknown_fields && header_len > sizeof(disk))
        put(w, hdr->unknown_fields, header_len - sizeof(disk));
}

static void put_body(struct writer *w, const struct qcow2_header *hdr, const struct plan *plan)
{
    put_fixed(w, hdr, plan);
    if (hdr->backing_format)
        put_ext(w, QCOW2_EXT_BACKING_FORMAT, hdr->backing_format, strlen(hdr->backing_format));
    if (hdr->data_file)
        put_ext(w, QCOW2_EXT_DATA_FILE, hdr->data_file, strlen(hdr->data_file));
    if (plan->with_names)
        put_ext(w, QCOW2_EXT_FEATURE_NAMES, feature_names, sizeof(feature_names));
    for (unsigned i = 0; i < hdr->nb_exts; i++)
        put_ext(w, hdr->exts[i].magic, hdr->exts[i].data, hdr->exts[i].len);
    put_ext(w, QCOW2_EXT_END, NULL, 0);
}

/* ---- placing ---- */

/* A place for the name behind the first 512 bytes, apart from all that the old header uses; 0:
 * there is none. */
static uint64_t place_apart(uint64_t len, uint64_t max, const struct old_header *old)
{
    uint64_t off = ATOMIC_LEN, behind = align_up(old->name_off + old->name_len, 8);

    if (!old->exts_inside && !old->name_len)
        return 0;
    if (!old->exts_inside ||
        (old->name_len && ranges_overlap(off, len, old->name_off, old->name_len)))
        off = MAX(off, behind); /* extensions end before the name */
    return range_ok(off, len, max) ? off : 0;
}

/* False if it does not fit in this way. */
static bool try_plan(const struct qcow2_header *hdr, bool with_names, bool atomic,
                     const struct old_header *old, struct plan *ret)
{
    uint64_t max = 1ull << hdr->cluster_bits;
    struct plan plan = {.with_names = with_names};
    struct writer count = {0};

    put_body(&count, hdr, &plan);
    plan.body_len = count.len;
    plan.name_len = hdr->backing_name ? strlen(hdr->backing_name) : 0;
    if (plan.body_len > (atomic ? ATOMIC_LEN : max))
        return false;
    if (plan.name_len) {
        plan.name_off = plan.body_len;
        if (atomic && plan.body_len + plan.name_len > ATOMIC_LEN)
            plan.name_off = place_apart(plan.name_len, max, old);
        if (!plan.name_off || !range_ok(plan.name_off, plan.name_len, max))
            return false;
    }
    *ret = plan;
    return true;
}

static bool make_plan(const struct qcow2_header *hdr, const struct old_header *old,
                      struct plan *ret)
{
    bool v3 = hdr->version >= 3;

    return (v3 && try_plan(hdr, true, true, old, ret)) || try_plan(hdr, false, true, old, ret) ||
           (v3 && try_plan(hdr, true, false, old, ret)) || try_plan(hdr, false, false, old, ret);
}

bool qcow2_header_fits(const struct qcow2_header *hdr)
{
    struct old_header none = {.exts_inside = true};
    struct plan plan;

    return make_plan(hdr, &none, &plan);
}

bool qcow2_header_fits_sector(const struct qcow2_header *hdr)
{
    struct old_header none = {.exts_inside = true};
    struct plan plan;

    return try_plan(hdr, false, true, &none, &plan);
}

/* ---- writing ---- */

/* True if the end marker stands in these first bytes of a header. */
static bool end_is_inside(const uint8_t *head, const struct qcow2_disk_header *disk)
{
    uint64_t off = be32_get(disk->version) == 2 ? QCOW2_V2_HEADER_LEN : be32_get(disk->header_len);
    struct qcow2_disk_ext ext;

    while (range_ok(off, sizeof(ext), ATOMIC_LEN)) {
        memcpy(&ext, head + off, sizeof(ext));
        if (be32_get(ext.magic) == QCOW2_EXT_END)
            return true;
        off += sizeof(ext) + align_up(be32_get(ext.len), 8);
    }
    return false;
}

SUSPENDS static int read_old(struct blk *blk, const struct qcow2_header *hdr,
                             struct old_header *ret)
{
    struct qcow2_disk_header disk;
    uint8_t head[ATOMIC_LEN];
    int rc = blk_read(blk, 0, head, sizeof(head));

    if (rc < 0)
        return rc;
    memcpy(&disk, head, sizeof(disk));
    *ret = (struct old_header){.exts_inside = true};
    if (be32_get(disk.magic) != QCOW2_MAGIC)
        return 0;
    uint64_t off = be64_get(disk.backing_off), len = be32_get(disk.backing_len);

    ret->exts_inside = end_is_inside(head, &disk);
    if (off && range_ok(off, len, 1ull << hdr->cluster_bits)) {
        ret->name_off = off;
        ret->name_len = len;
    }
    return 0;
}

SUSPENDS static int write_atomic(struct blk *blk, const struct plan *plan, const uint8_t *buf)
{
    if (plan->name_off >= ATOMIC_LEN) {
        int rc = blk_write(blk, plan->name_off, buf + plan->name_off, plan->name_len);

        if (rc == 0)
            rc = blk_flush(blk);
        return rc < 0 ? rc : blk_write(blk, 0, buf, plan->body_len);
    }
    return blk_write(blk, 0, buf, plan->body_len + plan->name_len);
}

/* The name stays where it is if it is the same. */
SUSPENDS static int keep_name(struct blk *blk, const struct qcow2_header *hdr,
                              const struct old_header *old, struct plan *plan)
{
    char name[QCOW2_BACKING_NAME_MAX];

    if (plan->body_len > ATOMIC_LEN || plan->name_off < ATOMIC_LEN || old->name_off < ATOMIC_LEN ||
        old->name_len != plan->name_len)
        return 0;
    int rc = blk_read(blk, old->name_off, name, old->name_len);

    if (rc == 0 && memcmp(name, hdr->backing_name, old->name_len) == 0)
        plan->name_off = old->name_off;
    return rc;
}

SUSPENDS static int write_planned(struct blk *blk, const struct qcow2_header *hdr,
                                  const struct plan *plan)
{
    size_t len = MAX(plan->body_len, plan->name_off + plan->name_len);
    _cleanup_(freep) uint8_t *buf = calloc(1, len);
    struct writer w = {.data = buf};

    if (!buf)
        return -ENOMEM;
    put_body(&w, hdr, plan);
    if (plan->name_len)
        memcpy(buf + plan->name_off, hdr->backing_name, plan->name_len);
    return plan->body_len <= ATOMIC_LEN ? write_atomic(blk, plan, buf)
                                        : blk_write(blk, 0, buf, len);
}

int qcow2_header_write(struct blk *blk, const struct qcow2_header *hdr, struct err *err)
{
    struct plan plan;
    struct old_header old;

    if (hdr->backing_name && strlen(hdr->backing_name) > QCOW2_BACKING_NAME_MAX)
        return err_set(err, -EINVAL, "the backing file's name is longer than %u bytes",
                       QCOW2_BACKING_NAME_MAX);
    int rc = read_old(blk, hdr, &old);

    if (rc == 0 && !make_plan(hdr, &old, &plan))
        return err_set(err, -ENOSPC, "the header does not fit into a cluster of %llu bytes",
                       1ull << hdr->cluster_bits);
    if (rc == 0)
        rc = keep_name(blk, hdr, &old, &plan);
    if (rc == 0)
        rc = write_planned(blk, hdr, &plan);
    return rc < 0 ? err_errno(err, rc, "write header") : 0;
}
