/*
 * Length, backing file: what rewrites the header. The caller has drained all requests.
 *
 * Order for growing: a larger L1 table is written and flushed, then the header names it; zeroes
 * over what a longer backing file would show are flushed before the header has the new length.
 * Order for shrinking: entries behind the new end are emptied and flushed, then the header.
 */
#include <string.h>
#include "base/be.h"
#include "base/bits.h"
#include "base/check.h"
#include "qcow2/format.h"
#include "qcow2/internal.h"
#include "rt/reactor.h"

#define SLICES_A_TURN 16u

SUSPENDS static int write_header(struct image *img, struct err *err)
{
    int rc = qcow2_header_write(img->blk, &img->hdr, err);

    if (rc < 0)
        return rc;
    rc = blk_flush(img->blk);
    return rc < 0 ? err_errno(err, image_fail(img, rc), "flush header") : 0;
}

/* ---- a larger L1 table ---- */

SUSPENDS static int store_l1(struct image *img, const uint64_t *l1, uint64_t bytes, uint64_t off)
{
    struct buf b = {buf_get(bytes), bytes};

    if (!b.data)
        return -ENOMEM;
    for (uint64_t i = 0; i < bytes / 8; i++)
        ((be64 *)b.data)[i] = be64_make(l1[i] & ~L1_MEMORY_BITS);
    int rc = blk_write(img->blk, off, b.data, bytes);
    if (rc == 0)
        rc = blk_flush(img->blk);
    buf_drop(&b);
    return rc;
}

/* Spec: l1_size, then (8 bytes on) l1_table_offset: one sector, one write. */
SUSPENDS static int switch_l1(struct image *img, uint64_t off, uint32_t entries)
{
    struct {
        be32 entries;
        be64 off;
    } __attribute__((packed)) field = {be32_make(entries), be64_make(off)};
    int rc =
        image_poke_header(img, offsetof(struct qcow2_disk_header, l1_size), &field, sizeof(field));

    if (rc == 0)
        rc = blk_flush(img->blk);
    return rc < 0 ? image_fail(img, rc) : 0;
}

SUSPENDS static int grow_l1(struct image *img, uint64_t entries, struct err *err)
{
    unsigned bits = img->hdr.cluster_bits;
    uint64_t old_nr = div_up(img->hdr.l1_entries * 8ull, img->hdr.cluster_size);
    uint64_t nr = div_up(entries * 8, img->hdr.cluster_size), bytes = nr << bits;
    _cleanup_(freep) uint64_t *l1 = calloc(bytes, 1);
    struct host_run run;

    if (!l1)
        return err_errno(err, -ENOMEM, "grow L1 table");
    int rc = image_flush(img); /* then no entry is pending in the old place */
    while (rc == 0 && (rc = alloc_contiguous(img, nr, &run)) == -ENOBUFS)
        if ((rc = grow_wait(img, false)) < 0)
            return err_errno(err, rc, "grow L1 table");
    if (rc < 0)
        return err_errno(err, rc, "grow L1 table");
    memcpy(l1, img->l1, img->hdr.l1_entries * 8ull);
    rc = store_l1(img, l1, bytes, run.first << bits);
    if (rc == 0)
        rc = meta_add(img, run.first, nr, META_L1);
    if (rc < 0) {
        alloc_give_back(img, run.first, nr);
        return err_errno(err, rc, "grow L1 table");
    }
    rc = switch_l1(img, run.first << bits, (uint32_t)entries);
    if (rc < 0)
        return err_errno(err, rc, "grow L1 table");
    meta_remove(img, img->hdr.l1_off >> bits, old_nr);
    alloc_free(img, img->hdr.l1_off >> bits, old_nr, false);
    img->hdr.l1_off = run.first << bits;
    img->hdr.l1_entries = (uint32_t)entries;
    free(img->l1);
    img->l1 = TAKE_PTR(l1);
    return 0;
}

/* ---- length ---- */

SUSPENDS static int grow(struct image *img, uint64_t len, const struct image_below *below,
                         struct err *err)
{
    uint64_t old_len = img->hdr.virtual_len;
    struct qcow2_header longer = img->hdr;

    longer.virtual_len = len;
    qcow2_header_derive(&longer);
    if (longer.l1_needed > QCOW2_L1_BYTES_MAX / 8)
        return err_set(err, -EFBIG, "%llu bytes are too many for clusters of %llu bytes",
                       (unsigned long long)len, (unsigned long long)img->hdr.cluster_size);
    int rc = longer.l1_needed > img->hdr.l1_entries ? grow_l1(img, longer.l1_needed, err) : 0;
    if (rc < 0)
        return rc;
    img->hdr.virtual_len = len;
    /* where the old end lies inside a cluster the file may hold anything behind it */
    uint64_t zero_end = below ? len : MIN(len, align_up(old_len, img->hdr.cluster_size));
    if (zero_end > old_len)
        rc = image_zero(img, old_len, zero_end - old_len, 0, below);
    if (rc == 0)
        rc = image_flush(img);
    if (rc < 0) {
        img->hdr.virtual_len = old_len;
        return err_errno(err, rc, "zero the new space");
    }
    return 0;
}

SUSPENDS static int shrink(struct image *img, uint64_t len, struct err *err)
{
    uint64_t cs = img->hdr.cluster_size, from = align_up(len, cs);
    uint64_t end = align_up(img->hdr.virtual_len, cs);
    int rc = from < end ? zero_unmap(img, from, end - from) : 0;

    if (rc == 0)
        rc = image_flush(img);
    if (rc < 0)
        return err_errno(err, rc, "free what lies behind the new end");
    img->hdr.virtual_len = len;
    return 0;
}

int image_resize(struct image *img, uint64_t len, const struct image_below *below, struct err *err)
{
    uint64_t old_len = img->hdr.virtual_len;
    int rc = image_check_writable(img);

    DEBUG_CHECK(list_empty(&img->reqs));
    if (rc < 0)
        return err_errno(err, rc, "resize");
    if (img->hdr.nb_snapshots && img->hdr.version < 3)
        return err_set(err, -ENOTSUP, "a version 2 image with internal snapshots keeps its size");
    if (len % 512)
        return err_set(err, -EINVAL, "the size %llu is no multiple of 512",
                       (unsigned long long)len);
    if (len == old_len)
        return 0;
    rc = len > old_len ? grow(img, len, below, err) : shrink(img, len, err);
    if (rc < 0)
        return rc;
    qcow2_header_derive(&img->hdr);
    rc = write_header(img, err);
    if (rc < 0) {
        img->hdr.virtual_len = old_len;
        qcow2_header_derive(&img->hdr);
    }
    return rc;
}

/* ---- backing file ---- */

int image_set_backing(struct image *img, const char *name, const char *format, struct err *err)
{
    char *old_name = img->hdr.backing_name, *old_format = img->hdr.backing_format;
    int rc = image_check_writable(img);

    if (rc < 0)
        return err_errno(err, rc, "set backing file");
    if (name && strlen(name) > QCOW2_BACKING_NAME_MAX)
        return err_set(err, -EINVAL, "the backing file's name is longer than %u bytes",
                       QCOW2_BACKING_NAME_MAX);
    img->hdr.backing_name = name ? strdup(name) : NULL;
    img->hdr.backing_format = name && format ? strdup(format) : NULL;
    if ((name && !img->hdr.backing_name) || (name && format && !img->hdr.backing_format))
        rc = err_errno(err, -ENOMEM, "set backing file");
    if (rc == 0) /* what the guest sees from now on must not be older than the new name */
        rc = image_flush(img) < 0 ? err_set(err, -EIO, "flush image") : write_header(img, err);
    if (rc < 0) {
        free(img->hdr.backing_name);
        free(img->hdr.backing_format);
        img->hdr.backing_name = old_name;
        img->hdr.backing_format = old_format;
        return rc;
    }
    free(old_name);
    free(old_format);
    return 0;
}

/* ---- counting ---- */

static uint64_t allocated_in(struct image *img, const struct slice *s, uint64_t guest_off,
                             uint64_t end)
{
    uint64_t sum = 0;

    while (guest_off < end) {
        struct extent ext;

        if (map_in_slice(img, s, guest_off, end - guest_off, &ext) < 0)
            return sum; /* the read of it will tell */
        if (ext.kind == EXTENT_DATA || ext.kind == EXTENT_COMPRESSED)
            sum += ext.len;
        guest_off += ext.len;
    }
    return sum;
}

int image_allocated_bytes(struct image *img, uint64_t *ret)
{
    uint64_t at = 0, sum = 0;
    unsigned steps = 0;

    while (at < img->hdr.virtual_len) {
        uint64_t end = MIN(img->hdr.virtual_len, slice_end(img, at));
        struct slice *s;
        int rc = map_pin(img, at, &s);

        if (rc == -ENOENT) { /* the next table */
            at = (l1_index(img, at) + 1) << (img->hdr.cluster_bits + img->hdr.l2_bits);
            continue;
        }
        if (rc < 0)
            return rc;
        sum += allocated_in(img, s, at, end);
        cache_put(img, s);
        at = end;
        if (++steps % SLICES_A_TURN == 0)
            reactor_yield();
    }
    *ret = sum;
    return 0;
}
