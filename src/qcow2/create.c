/*
 * New images.
 *
 * Layout, each part a whole number of clusters:
 *
 *   header | refcount table | refcount blocks | L1 | L2 tables | data
 *            `------------- all of it -------------'  `- preallocated -'
 *
 * so that a preallocated image maps guest offset x to data + x: one linear run.
 *
 * 1. What a table's cluster held before never counts: tables are written whole unless the space
 *    is known to read as zero.
 * 2. A preallocated cluster never shows what the device held before, nor hides a backing file.
 *
 * Order of writes: header cluster wiped, flush; data, tables; flush; header; flush. Until the
 * header is written the file is no image.
 */
#include <string.h>
#include "base/be.h"
#include "base/bits.h"
#include "base/own.h"
#include "qcow2/entry.h"
#include "qcow2/image.h"
#include "qcow2/internal.h"
#include "qcow2/layout.h"
#include "qcow2/refbits.h"

#define CHUNK_LEN      ((size_t)2 << 20) /* tables are written in pieces of this length */
#define ROOMY_REFTABLE MIB

/* How guest clusters are preallocated. */
enum data_state {
    DATA_NONE,   /* not at all */
    DATA_HIDDEN, /* place only: reads as zero, or as the backing file */
    DATA_ZEROED, /* the host space reads as zero */
};

struct layout {
    struct qcow2_header hdr; /* names borrowed from the options */
    enum data_state state;
    uint64_t blocks; /* clusters of refcount blocks */
    uint64_t blocks_off, l2_off, data_off;
    uint64_t l1_clusters, l2_clusters, data_clusters;
    uint64_t end;    /* bytes */
    bool known_zero; /* space never written here reads as zero */
};

/* ---- options ---- */

static unsigned log2_of(uint64_t pow2)
{
    return (unsigned)__builtin_ctzll(pow2);
}

void qcow2_create_header(const struct image_create_opts *opts, struct qcow2_header *ret)
{
    *ret = (struct qcow2_header){
        .version = opts->version ? opts->version : 3,
        .cluster_bits = opts->cluster_size ? log2_of(opts->cluster_size) : 16,
        .virtual_len = align_up(opts->virtual_len, 512),
        .refcount_order = opts->refcount_bits ? log2_of(opts->refcount_bits) : 4,
        .compression = opts->compression,
        .backing_name = (char *)opts->backing_name,
        .backing_format = (char *)opts->backing_format,
    };
    if (opts->compression != QCOW2_ZLIB)
        ret->incompatible |= QCOW2_INCOMPAT_COMPRESSION;
    if (opts->extended_l2)
        ret->incompatible |= QCOW2_INCOMPAT_EXTENDED_L2;
    if (opts->lazy_refcounts)
        ret->compatible |= QCOW2_COMPAT_LAZY_REFCOUNTS;
    qcow2_header_derive(ret);
    ret->l1_entries = MAX((uint32_t)ret->l1_needed, 1u);
}

static int check_version(const struct image_create_opts *opts, struct err *err)
{
    unsigned version = opts->version ? opts->version : 3;

    if (version != 2 && version != 3)
        return err_set(err, -EINVAL, "qcow2 version %u cannot be created", version);
    if (version == 3)
        return 0;
    if (opts->extended_l2)
        return err_set(err, -EINVAL, "extended L2 entries need qcow2 version 3");
    if (opts->refcount_bits && opts->refcount_bits != 16)
        return err_set(err, -EINVAL, "refcounts of %u bits need qcow2 version 3",
                       opts->refcount_bits);
    if (opts->lazy_refcounts)
        return err_set(err, -EINVAL, "lazy refcounts need qcow2 version 3");
    if (opts->compression != QCOW2_ZLIB)
        return err_set(err, -EINVAL, "compression other than zlib needs qcow2 version 3");
    return 0;
}

static int check_geometry(const struct image_create_opts *opts, struct err *err)
{
    uint64_t cs = opts->cluster_size ? opts->cluster_size : 64 * KIB;
    unsigned refcount_bits = opts->refcount_bits ? opts->refcount_bits : 16;

    if (!is_pow2(cs) || cs < 1u << QCOW2_CLUSTER_BITS_MIN || cs > 1u << QCOW2_CLUSTER_BITS_MAX)
        return err_set(err, -EINVAL, "cluster size %llu is no power of two between 512 and 2097152",
                       (unsigned long long)cs);
    if (opts->extended_l2 && cs < 16 * KIB)
        return err_set(err, -EINVAL, "extended L2 entries need clusters of 16384 bytes or more");
    if (!is_pow2(refcount_bits) || refcount_bits > 64)
        return err_set(err, -EINVAL, "refcount width %u is no power of two between 1 and 64",
                       refcount_bits);
    if (opts->compression != QCOW2_ZLIB && opts->compression != QCOW2_ZSTD)
        return err_set(err, -EINVAL, "compression type %d is unknown", (int)opts->compression);
    /* An L2 table maps cs / 8 or cs / 16 clusters; the L1 table's length is limited. */
    uint64_t per_table = cs / (opts->extended_l2 ? 16 : 8) * cs;

    if (div_up(opts->virtual_len, per_table) > QCOW2_L1_BYTES_MAX / 8)
        return err_set(err, -EINVAL, "size %llu is too large for clusters of %llu bytes",
                       (unsigned long long)opts->virtual_len, (unsigned long long)cs);
    return 0;
}

static int check_backing(const struct image_create_opts *opts, struct err *err)
{
    struct qcow2_header hdr;

    if (!opts->backing_name) {
        if (opts->backing_format)
            return err_set(err, -EINVAL, "a backing format was given without a backing file");
        return 0;
    }
    if (opts->backing_name[0] == '\0' || strlen(opts->backing_name) > QCOW2_BACKING_NAME_MAX)
        return err_set(err, -EINVAL, "the backing file's name must have 1 to %u bytes",
                       QCOW2_BACKING_NAME_MAX);
    if (opts->prealloc != PREALLOC_OFF && !opts->extended_l2)
        return err_set(err, -EINVAL,
                       "preallocation of an image with a backing file needs extended_l2: a plain "
                       "entry cannot say 'allocated here, read the backing file'");
    qcow2_create_header(opts, &hdr);
    if (!qcow2_header_fits(&hdr))
        return err_set(err, -EINVAL,
                       "the backing file's name does not fit into a cluster of %llu bytes",
                       (unsigned long long)hdr.cluster_size);
    return 0;
}

int image_create_check(const struct image_create_opts *opts, struct err *err)
{
    int rc = check_version(opts, err);

    if (rc == 0)
        rc = check_geometry(opts, err);
    if (rc == 0)
        rc = check_backing(opts, err);
    return rc;
}

/* ---- placing ---- */

static enum data_state plan_data(const struct image_create_opts *opts, bool known_zero)
{
    if (opts->prealloc == PREALLOC_OFF)
        return DATA_NONE;
    if (opts->backing_name)
        return DATA_HIDDEN;
    if (known_zero || opts->prealloc == PREALLOC_FULL)
        return DATA_ZEROED;
    /* Version 2 has no zero flag: only written zeroes hide what the device held. */
    return opts->version == 2 ? DATA_ZEROED : DATA_HIDDEN;
}

static int plan_layout(const struct blk *blk, const struct image_create_opts *opts,
                       struct layout *ret, struct err *err)
{
    struct layout l = {.known_zero = !blk->fixed_len && blk->fresh_zero && blk->zero_tail};
    struct qcow2_header *hdr = &l.hdr;
    uint64_t table, guest_clusters;

    qcow2_create_header(opts, hdr);
    guest_clusters = div_up(hdr->virtual_len, hdr->cluster_size);
    l.state = plan_data(opts, l.known_zero);
    l.l1_clusters = div_up((uint64_t)hdr->l1_entries * 8, hdr->cluster_size);
    if (l.state != DATA_NONE) {
        l.data_clusters = guest_clusters;
        l.l2_clusters = hdr->l1_needed;
    }
    /* The table is made for the full image where that is little: it then never has to move. */
    qcow2_refcount_clusters(hdr, 1 + l.l1_clusters + hdr->l1_needed + guest_clusters, 0, &l.blocks,
                            &table);
    if (table << hdr->cluster_bits > MAX(ROOMY_REFTABLE, hdr->cluster_size))
        table = 0;
    qcow2_refcount_clusters(hdr, 1 + l.l1_clusters + l.l2_clusters + l.data_clusters, table,
                            &l.blocks, &table);
    if (table << hdr->cluster_bits > QCOW2_REFTABLE_BYTES_MAX)
        return err_set(err, -EINVAL, "the size needs a refcount table of more than %u bytes",
                       QCOW2_REFTABLE_BYTES_MAX);
    hdr->reftable_clusters = (uint32_t)table;
    hdr->reftable_off = hdr->cluster_size;
    l.blocks_off = hdr->reftable_off + (table << hdr->cluster_bits);
    hdr->l1_off = l.blocks_off + (l.blocks << hdr->cluster_bits);
    l.l2_off = hdr->l1_off + (l.l1_clusters << hdr->cluster_bits);
    l.data_off = l.l2_off + (l.l2_clusters << hdr->cluster_bits);
    l.end = l.data_off + (l.data_clusters << hdr->cluster_bits);
    *ret = l;
    return 0;
}

SUSPENDS
static int make_it_fit(struct blk *blk, uint64_t end, struct err *err)
{
    if (!blk->fixed_len || end <= blk->len)
        return 0;
    if (blk_is_extendable(blk))
        return blk_extend(blk, end, err);
    return err_set(err, -ENOSPC, "the image needs %llu bytes, the device has %llu",
                   (unsigned long long)end, (unsigned long long)blk->len);
}

/* ---- writing tables ---- */

/* Fills buf with len bytes of a table, from its byte `off` on; buf is zeroed before. */
typedef void fill_fn(const struct layout *l, uint64_t off, void *buf, size_t len);

static void fill_reftable(const struct layout *l, uint64_t off, void *buf, size_t len)
{
    be64 *entry = buf;
    uint64_t i = off / 8;

    for (size_t n = len / 8; n > 0 && i < l->blocks; n--, i++)
        *entry++ = be64_make(l->blocks_off + (i << l->hdr.cluster_bits));
}

static void fill_refblocks(const struct layout *l, uint64_t off, void *buf, size_t len)
{
    unsigned order = l->hdr.refcount_order;
    uint64_t first = off * 8 >> order, clusters = l->end >> l->hdr.cluster_bits;
    uint64_t left = first < clusters ? clusters - first : 0;
    uint64_t nr = MIN((uint64_t)len * 8 >> order, left);

    for (uint64_t i = 0; i < nr; i++)
        refbits_set(buf, order, i, 1);
}

static void fill_l1(const struct layout *l, uint64_t off, void *buf, size_t len)
{
    be64 *entry = buf;
    uint64_t i = off / 8;

    for (size_t n = len / 8; n > 0 && i < l->l2_clusters; n--, i++)
        *entry++ = be64_make((l->l2_off + (i << l->hdr.cluster_bits)) | ENTRY_COPIED);
}

static void fill_l2(const struct layout *l, uint64_t off, void *buf, size_t len)
{
    const struct qcow2_header *hdr = &l->hdr;
    uint64_t cluster = off / hdr->l2_entry_size;
    uint64_t left = cluster < l->data_clusters ? l->data_clusters - cluster : 0;
    uint64_t nr = MIN(len / hdr->l2_entry_size, left);
    bool hide_old = l->state == DATA_HIDDEN && !hdr->backing_name;

    for (unsigned i = 0; i < nr; i++, cluster++) {
        struct l2_entry e = {(l->data_off + (cluster << hdr->cluster_bits)) | ENTRY_COPIED, 0};

        if (hdr->extended_l2)
            e = l2_make_ext(e.word, l->state == DATA_ZEROED ? UINT32_MAX : 0,
                            hide_old ? UINT32_MAX : 0);
        else if (hide_old)
            e.word |= L2_ZERO_FLAG;
        l2_put(hdr, buf, i, e);
    }
}

SUSPENDS
static int write_table(struct blk *blk, const struct layout *l, uint64_t host_off, uint64_t len,
                       fill_fn *fill, const char *what, struct err *err)
{
    _cleanup_(buf_drop) struct buf chunk = {buf_get(CHUNK_LEN), CHUNK_LEN};

    if (!chunk.data)
        return err_set(err, -ENOMEM, "out of memory");
    for (uint64_t off = 0; off < len; off += CHUNK_LEN) {
        size_t n = MIN(len - off, CHUNK_LEN);

        memset(chunk.data, 0, n);
        fill(l, off, chunk.data, n);
        /* zeroes too: a table in a hole of the file could not be written when the disk is full */
        int rc = blk_write(blk, host_off + off, chunk.data, n);

        if (rc < 0)
            return err_errno(err, rc, "write %s", what);
    }
    return 0;
}

SUSPENDS
static int write_tables(struct blk *blk, const struct layout *l, struct err *err)
{
    const struct qcow2_header *hdr = &l->hdr;
    int rc = write_table(blk, l, hdr->reftable_off, l->blocks_off - hdr->reftable_off,
                         fill_reftable, "refcount table", err);

    if (rc == 0)
        rc = write_table(blk, l, l->blocks_off, hdr->l1_off - l->blocks_off, fill_refblocks,
                         "refcount blocks", err);
    if (rc == 0)
        rc = write_table(blk, l, hdr->l1_off, l->l2_off - hdr->l1_off, fill_l1, "L1 table", err);
    if (rc == 0)
        rc = write_table(blk, l, l->l2_off, l->data_off - l->l2_off, fill_l2, "L2 tables", err);
    return rc;
}

/* ---- data ---- */

SUSPENDS
static int prepare_data(struct blk *blk, const struct image_create_opts *opts,
                        const struct layout *l, struct err *err)
{
    int rc = 0;

    if (l->state == DATA_NONE || l->end == l->data_off)
        return 0;
    if (opts->prealloc == PREALLOC_FULL)
        rc = meta_write_zeroes(blk, l->data_off, l->end);
    else if (l->state == DATA_ZEROED && !l->known_zero)
        rc = blk_zero(blk, l->data_off, l->end - l->data_off, 0);
    if (rc < 0)
        return err_errno(err, rc, "write zeroes");
    if (opts->prealloc == PREALLOC_FALLOC) {
        rc = blk_preallocate(blk, l->data_off, l->end - l->data_off);
        if (rc < 0 && rc != -ENOTSUP && rc != -EOPNOTSUPP)
            return err_errno(err, rc, "preallocate %llu bytes",
                             (unsigned long long)(l->end - l->data_off));
    }
    return 0;
}

/* Empties a file; on a device, wipes what could be taken for an image. */
SUSPENDS
static int clear_target(struct blk *blk, const struct layout *l, struct err *err)
{
    int rc = 0;

    if (!blk->fixed_len) {
        rc = blk_resize(blk, 0);
        if (rc == 0)
            rc = blk_resize(blk, l->end);
        return rc < 0 ? err_errno(err, rc, "resize to %llu bytes", (unsigned long long)l->end) : 0;
    }
    rc = meta_write_zeroes(blk, 0, l->hdr.cluster_size);
    if (rc == 0)
        rc = blk_flush(blk);
    return rc < 0 ? err_errno(err, rc, "wipe the old header") : 0;
}

SUSPENDS
static int create_at(struct blk *blk, const struct image_create_opts *opts, const struct layout *l,
                     struct err *err)
{
    int rc = clear_target(blk, l, err);

    if (rc == 0)
        rc = prepare_data(blk, opts, l, err);
    if (rc == 0)
        rc = write_tables(blk, l, err);
    if (rc < 0)
        return rc;
    rc = blk_flush(blk);
    if (rc < 0)
        return err_errno(err, rc, "flush");
    rc = qcow2_header_write(blk, &l->hdr, err);
    if (rc < 0)
        return rc;
    /* If this one fails the image is complete, but not known to be durable: the device takes no
     * more writes, and the caller is told. */
    rc = blk_flush(blk);
    return rc < 0 ? err_errno(err, rc, "flush") : 0;
}

int image_create(struct blk *blk, const struct image_create_opts *opts, struct err *err)
{
    struct layout layout;
    int rc = image_create_check(opts, err);

    if (rc == 0)
        rc = plan_layout(blk, opts, &layout, err);
    if (rc == 0)
        rc = make_it_fit(blk, layout.end, err);
    if (rc < 0)
        return rc;
    rc = create_at(blk, opts, &layout, err);
    /* A file that could not be completed takes no space. */
    if (rc < 0 && !blk->fixed_len)
        (void)blk_resize(blk, 0);
    return rc;
}
