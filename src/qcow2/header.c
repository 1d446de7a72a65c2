/*
 * Reading and checking of the header cluster; writing is in header_write.c.
 *
 * 1. No value leaves here unchecked: what header_read returns is bounded, and every offset is
 *    aligned and below QCOW2_HOST_OFF_MAX. Whether tables lie inside the file is the opener's
 *    question, since check, info and repair must be able to look at such images.
 * 2. Extensions and header fields that are not understood are kept, to be written back.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/bits.h"
#include "base/own.h"
#include "qcow2/format.h"
#include "qcow2/header.h"

/* The part of the header cluster that was read so far. */
struct window {
    struct blk *blk;
    uint8_t *data; /* owned */
    size_t have;   /* bytes read */
    size_t max;    /* end of the header cluster */
};

/* Makes bytes [0, end) available; end <= w->max. Bytes past the file's end are zero. */
SUSPENDS
static int window_need(struct window *w, size_t end)
{
    if (end <= w->have)
        return 0;
    size_t target = MIN(align_up(MAX(end, 2 * w->have), 4096), MAX(w->max, (size_t)4096));
    uint8_t *grown = realloc(w->data, target);

    if (!grown)
        return -ENOMEM;
    w->data = grown;
    int rc = blk_read(w->blk, w->have, grown + w->have, target - w->have);

    if (rc < 0)
        return rc;
    w->have = target;
    return 0;
}

/* ---- the fixed part ---- */

static int decode_version(const struct qcow2_disk_header *disk, uint64_t file_len,
                          struct qcow2_header *hdr, struct err *err)
{
    if (be32_get(disk->magic) != QCOW2_MAGIC)
        return err_set(err, -EINVAL, "not a qcow2 image (magic 0x%08x)", be32_get(disk->magic));
    hdr->version = be32_get(disk->version);
    if (hdr->version != 2 && hdr->version != 3)
        return err_set(err, -ENOTSUP, "qcow2 version %u is not supported", hdr->version);
    uint32_t min_len = hdr->version == 2 ? QCOW2_V2_HEADER_LEN : QCOW2_V3_HEADER_LEN;

    if (file_len < min_len)
        return err_set(err, -EINVAL, "the file ends inside the qcow2 header");
    hdr->cluster_bits = be32_get(disk->cluster_bits);
    if (hdr->cluster_bits < QCOW2_CLUSTER_BITS_MIN || hdr->cluster_bits > QCOW2_CLUSTER_BITS_MAX)
        return err_set(err, -EINVAL, "cluster_bits %u is out of range (%u to %u)",
                       hdr->cluster_bits, QCOW2_CLUSTER_BITS_MIN, QCOW2_CLUSTER_BITS_MAX);
    hdr->header_len = min_len;
    hdr->refcount_order = 4;
    if (hdr->version == 2)
        return 0;
    hdr->header_len = be32_get(disk->header_len);
    if (hdr->header_len < min_len || hdr->header_len > 1u << hdr->cluster_bits ||
        !is_aligned(hdr->header_len, 8))
        return err_set(err, -EINVAL, "header length %u is invalid", hdr->header_len);
    hdr->incompatible = be64_get(disk->incompatible);
    hdr->compatible = be64_get(disk->compatible);
    hdr->autoclear = be64_get(disk->autoclear);
    hdr->refcount_order = be32_get(disk->refcount_order);
    if (hdr->refcount_order > 6)
        return err_set(err, -EINVAL, "refcount order %u is out of range (0 to 6)",
                       hdr->refcount_order);
    if (hdr->header_len > offsetof(struct qcow2_disk_header, compression))
        hdr->compression = disk->compression;
    return 0;
}

static int check_table(const struct qcow2_header *hdr, const char *what, uint64_t off, uint64_t len,
                       uint64_t max_len, struct err *err)
{
    if (len > max_len)
        return err_set(err, -EINVAL, "%s is too large (%llu bytes)", what, (unsigned long long)len);
    if (!is_aligned(off, hdr->cluster_size))
        return err_set(err, -EINVAL, "%s is not aligned to a cluster (offset 0x%llx)", what,
                       (unsigned long long)off);
    if (!range_ok(off, len, QCOW2_HOST_OFF_MAX))
        return err_set(err, -EINVAL, "%s has an invalid offset (0x%llx)", what,
                       (unsigned long long)off);
    return 0;
}

static int decode_tables(const struct qcow2_disk_header *disk, struct qcow2_header *hdr,
                         struct err *err)
{
    int rc;

    hdr->virtual_len = be64_get(disk->size);
    hdr->crypt_method = be32_get(disk->crypt_method);
    hdr->l1_off = be64_get(disk->l1_off);
    hdr->l1_entries = be32_get(disk->l1_size);
    hdr->reftable_off = be64_get(disk->reftable_off);
    hdr->reftable_clusters = be32_get(disk->reftable_clusters);
    hdr->nb_snapshots = be32_get(disk->nb_snapshots);
    hdr->snapshots_off = be64_get(disk->snapshots_off);
    qcow2_header_derive(hdr);
    if (hdr->crypt_method > 2)
        return err_set(err, -ENOTSUP, "encryption method %u is not supported", hdr->crypt_method);
    if (hdr->l1_needed > QCOW2_L1_BYTES_MAX / 8)
        return err_set(err, -EINVAL, "disk size %llu is too large for clusters of %llu bytes",
                       (unsigned long long)hdr->virtual_len, (unsigned long long)hdr->cluster_size);
    rc = check_table(hdr, "L1 table", hdr->l1_off, (uint64_t)hdr->l1_entries * 8,
                     QCOW2_L1_BYTES_MAX, err);
    if (rc < 0)
        return rc;
    if (hdr->l1_entries < hdr->l1_needed)
        return err_set(err, -EUCLEAN, "L1 table has %u entries, the disk size needs %llu",
                       hdr->l1_entries, (unsigned long long)hdr->l1_needed);
    rc = check_table(hdr, "refcount table", hdr->reftable_off,
                     (uint64_t)hdr->reftable_clusters << hdr->cluster_bits,
                     QCOW2_REFTABLE_BYTES_MAX, err);
    if (rc < 0 || hdr->nb_snapshots == 0)
        return rc;
    return check_table(hdr, "snapshot table", hdr->snapshots_off,
                       (uint64_t)hdr->nb_snapshots * sizeof(struct qcow2_disk_snapshot),
                       (uint64_t)QCOW2_SNAPSHOTS_MAX * sizeof(struct qcow2_disk_snapshot), err);
}

/* ---- features ---- */

#define KNOWN_INCOMPATIBLE                                                                         \
    (QCOW2_INCOMPAT_DIRTY | QCOW2_INCOMPAT_CORRUPT | QCOW2_INCOMPAT_DATA_FILE |                    \
     QCOW2_INCOMPAT_COMPRESSION | QCOW2_INCOMPAT_EXTENDED_L2)

/* Names the unknown incompatible features, from the image's own table where it has the name. */
static int refuse_features(uint64_t unknown, const uint8_t *table, size_t len, struct err *err)
{
    char text[400] = "";
    size_t used = 0;

    for (unsigned bit = 0; bit < 64 && used < sizeof(text); bit++) {
        const char *name = NULL;

        if (!(unknown >> bit & 1))
            continue;
        for (size_t i = 0; table && (i + 1) * sizeof(struct qcow2_disk_feature) <= len; i++) {
            const struct qcow2_disk_feature *f = (const struct qcow2_disk_feature *)table + i;

            if (f->type == 0 && f->bit == bit && f->name[0])
                name = f->name;
        }
        int n = name
                    ? snprintf(text + used, sizeof(text) - used, "%s%.46s", used ? ", " : "", name)
                    : snprintf(text + used, sizeof(text) - used, "%sbit %u", used ? ", " : "", bit);

        used += (size_t)n;
    }
    for (char *c = text; *c; c++) {
        if ((unsigned char)*c < 0x20 || *c == 0x7f)
            *c = '?';
    }
    return err_set(err, -ENOTSUP, "the image uses unknown features: %s", text);
}

static int check_features(const struct qcow2_header *hdr, const uint8_t *names, size_t names_len,
                          struct err *err)
{
    uint64_t unknown = hdr->incompatible & ~KNOWN_INCOMPATIBLE;
    bool typed = hdr->incompatible & QCOW2_INCOMPAT_COMPRESSION;

    if (unknown)
        return refuse_features(unknown, names, names_len, err);
    if (typed != (hdr->compression != QCOW2_ZLIB))
        return err_set(err, -EUCLEAN, "compression type %d contradicts its feature bit",
                       (int)hdr->compression);
    if (hdr->compression > QCOW2_ZSTD)
        return err_set(err, -ENOTSUP, "compression type %d is not supported",
                       (int)hdr->compression);
    if (hdr->extended_l2 && hdr->cluster_bits < 14)
        return err_set(err, -EINVAL, "extended L2 entries need clusters of 16 KiB or more");
    return 0;
}

/* ---- extensions and backing name ---- */

static char *copy_string(const uint8_t *data, size_t len)
{
    return strndup((const char *)data, len);
}

static int keep_string(char **slot, const char *what, const uint8_t *data, size_t len,
                       struct err *err)
{
    if (*slot)
        return err_set(err, -EINVAL, "the header has two extensions for the %s", what);
    *slot = copy_string(data, len);
    return *slot ? 0 : err_set(err, -ENOMEM, "out of memory");
}

static int keep_ext(struct qcow2_header *hdr, uint32_t magic, const uint8_t *data, uint32_t len,
                    struct err *err)
{
    struct qcow2_ext *grown = reallocarray(hdr->exts, hdr->nb_exts + 1, sizeof(*grown));

    if (!grown)
        return err_set(err, -ENOMEM, "out of memory");
    hdr->exts = grown;
    uint8_t *copy = malloc(len ? len : 1);

    if (!copy)
        return err_set(err, -ENOMEM, "out of memory");
    memcpy(copy, data, len);
    grown[hdr->nb_exts++] = (struct qcow2_ext){magic, len, copy};
    return 0;
}

struct names {
    size_t off, len; /* of the feature name table in the window; len 0: none */
};

static int take_ext(struct qcow2_header *hdr, struct window *w, uint32_t magic, size_t off,
                    uint32_t len, struct names *names, struct err *err)
{
    const uint8_t *data = w->data + off;

    switch (magic) {
    case QCOW2_EXT_BACKING_FORMAT:
        return keep_string(&hdr->backing_format, "backing file format", data, len, err);
    case QCOW2_EXT_DATA_FILE:
        return keep_string(&hdr->data_file, "external data file", data, len, err);
    case QCOW2_EXT_FEATURE_NAMES:
        *names = (struct names){off, len};
        return 0;
    case QCOW2_EXT_BITMAPS:
    case QCOW2_EXT_CRYPT:
    case QCOW2_EXT_GUARD:
        if (qcow2_header_ext(hdr, magic))
            return err_set(err, -EINVAL, "header extension 0x%08x stands twice", magic);
        break;
    }
    return keep_ext(hdr, magic, data, len, err);
}

SUSPENDS
static int read_exts(struct qcow2_header *hdr, struct window *w, size_t end, struct names *names,
                     struct err *err)
{
    size_t off = hdr->header_len;

    while (range_ok(off, sizeof(struct qcow2_disk_ext), end)) {
        struct qcow2_disk_ext disk;
        int rc = window_need(w, off + sizeof(disk));

        if (rc < 0)
            return err_errno(err, rc, "read header extensions");
        memcpy(&disk, w->data + off, sizeof(disk));
        uint32_t magic = be32_get(disk.magic), len = be32_get(disk.len);

        if (magic == QCOW2_EXT_END)
            break;
        off += sizeof(disk);
        if (!range_ok(off, len, end))
            return err_set(err, -EINVAL, "header extension 0x%08x is too long (%u bytes)", magic,
                           len);
        rc = window_need(w, off + len);
        if (rc < 0)
            return err_errno(err, rc, "read header extensions");
        rc = take_ext(hdr, w, magic, off, len, names, err);
        if (rc < 0)
            return rc;
        off += align_up(len, 8);
    }
    return 0;
}

SUSPENDS
static int read_backing_name(struct qcow2_header *hdr, struct window *w, uint64_t off, uint32_t len,
                             struct err *err)
{
    if (len > QCOW2_BACKING_NAME_MAX)
        return err_set(err, -EINVAL, "the backing file's name is too long (%u bytes)", len);
    if (off < hdr->header_len || !range_ok(off, len, w->max))
        return err_set(err, -EINVAL, "the backing file's name lies outside the header cluster");
    if (!range_ok(off, len, w->blk->len))
        return err_set(err, -EINVAL, "the backing file's name lies beyond the end of the file");
    int rc = window_need(w, off + len);

    if (rc < 0)
        return err_errno(err, rc, "read the backing file's name");
    hdr->backing_name = copy_string(w->data + off, len);
    return hdr->backing_name ? 0 : err_set(err, -ENOMEM, "out of memory");
}

SUSPENDS
static int read_variable_part(struct qcow2_header *hdr, struct window *w,
                              const struct qcow2_disk_header *disk, struct err *err)
{
    uint64_t backing_off = be64_get(disk->backing_off);
    struct names names = {0};
    int rc = window_need(w, hdr->header_len);

    if (rc < 0)
        return err_errno(err, rc, "read header");
    if (hdr->header_len > sizeof(*disk)) {
        size_t len = hdr->header_len - sizeof(*disk);

        hdr->unknown_fields = malloc(len);
        if (!hdr->unknown_fields)
            return err_set(err, -ENOMEM, "out of memory");
        memcpy(hdr->unknown_fields, w->data + sizeof(*disk), len);
    }
    if (backing_off && be32_get(disk->backing_len)) {
        rc = read_backing_name(hdr, w, backing_off, be32_get(disk->backing_len), err);
        if (rc < 0)
            return rc;
    }
    rc = read_exts(hdr, w, backing_off ? backing_off : w->max, &names, err);
    if (rc < 0)
        return rc;
    return check_features(hdr, names.len ? w->data + names.off : NULL, names.len, err);
}

SUSPENDS
static int read_into(struct window *w, struct qcow2_header *hdr, struct err *err)
{
    struct qcow2_disk_header disk;
    int rc = window_need(w, sizeof(disk));

    if (rc < 0)
        return err_errno(err, rc, "read header");
    memcpy(&disk, w->data, sizeof(disk));
    rc = decode_version(&disk, w->blk->len, hdr, err);
    if (rc < 0)
        return rc;
    w->max = 1u << hdr->cluster_bits;
    /* Unknown features first: they may give the other fields another meaning. */
    if (!(hdr->incompatible & ~KNOWN_INCOMPATIBLE)) {
        rc = decode_tables(&disk, hdr, err);
        if (rc < 0)
            return rc;
    }
    return read_variable_part(hdr, w, &disk, err);
}

int qcow2_header_read(struct blk *blk, struct qcow2_header *ret, struct err *err)
{
    struct window w = {.blk = blk};
    struct qcow2_header hdr = {0};
    int rc = read_into(&w, &hdr, err);

    free(w.data);
    if (rc < 0)
        qcow2_header_fini(&hdr);
    else
        *ret = hdr;
    return rc;
}

void qcow2_header_fini(struct qcow2_header *hdr)
{
    free(hdr->backing_name);
    free(hdr->backing_format);
    free(hdr->data_file);
    free(hdr->unknown_fields);
    for (unsigned i = 0; i < hdr->nb_exts; i++)
        free(hdr->exts[i].data);
    free(hdr->exts);
    *hdr = (struct qcow2_header){0};
}

void qcow2_header_derive(struct qcow2_header *hdr)
{
    hdr->cluster_size = 1ull << hdr->cluster_bits;
    hdr->extended_l2 = hdr->incompatible & QCOW2_INCOMPAT_EXTENDED_L2;
    hdr->l2_entry_size = hdr->extended_l2 ? 16 : 8;
    hdr->l2_bits = hdr->cluster_bits - (hdr->extended_l2 ? 4 : 3);
    hdr->subclusters = hdr->extended_l2 ? 32 : 1;
    hdr->subcluster_bits = hdr->cluster_bits - (hdr->extended_l2 ? 5 : 0);
    hdr->refcount_block_bits = hdr->cluster_bits + 3 - hdr->refcount_order;
    hdr->l1_needed = div_up(hdr->virtual_len, 1ull << (hdr->cluster_bits + hdr->l2_bits));
}

const struct qcow2_ext *qcow2_header_ext(const struct qcow2_header *hdr, uint32_t magic)
{
    for (unsigned i = 0; i < hdr->nb_exts; i++) {
        if (hdr->exts[i].magic == magic)
            return &hdr->exts[i];
    }
    return NULL;
}

int qcow2_header_set_ext(struct qcow2_header *hdr, uint32_t magic, const void *data, uint32_t len)
{
    struct qcow2_ext *ext = NULL;

    for (unsigned i = 0; i < hdr->nb_exts && !ext; i++)
        ext = hdr->exts[i].magic == magic ? &hdr->exts[i] : NULL;
    if (!ext)
        return keep_ext(hdr, magic, data, len, NULL);
    uint8_t *copy = len == ext->len ? ext->data : realloc(ext->data, len ? len : 1);
    if (!copy)
        return -ENOMEM;
    memcpy(copy, data, len);
    ext->data = copy;
    ext->len = len;
    return 0;
}

void qcow2_header_drop_ext(struct qcow2_header *hdr, uint32_t magic)
{
    unsigned kept = 0;

    for (unsigned i = 0; i < hdr->nb_exts; i++) {
        if (hdr->exts[i].magic == magic)
            free(hdr->exts[i].data);
        else
            hdr->exts[kept++] = hdr->exts[i];
    }
    hdr->nb_exts = kept;
}

bool qcow2_probe(const void *buf, size_t len)
{
    be32 magic;

    if (len < sizeof(magic))
        return false;
    memcpy(&magic, buf, sizeof(magic));
    return be32_get(magic) == QCOW2_MAGIC;
}
