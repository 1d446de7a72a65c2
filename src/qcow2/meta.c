/*
 * Which host clusters hold metadata, and where guest data may lie.
 *
 * A writable image knows the place of every table it uses, so that neither a broken L2 entry nor
 * a broken refcount leads a write into them. Entries are checked when a slice is loaded; what
 * this code maps itself comes from the allocator, which checks too.
 */
#include <stdio.h>
#include <string.h>
#include "base/bits.h"
#include "qcow2/format.h"
#include "qcow2/internal.h"

#define FILL_IOVS 4u /* zeroes are written so many BUF_ZERO_LEN at once */

/* Clusters in a chunk: most linear slices lie in chunks without metadata, which one look tells. */
#define CHUNK_BITS 8u

/* How many metadata clusters a chunk has. */
static int chunk_count(struct image *img, uint64_t cluster, int by)
{
    uint64_t chunk = cluster >> CHUNK_BITS;
    uintptr_t count = (uintptr_t)table_get(&img->meta_chunks, chunk) + (uintptr_t)by;

    if (count)
        return table_put(&img->meta_chunks, chunk, (void *)count);
    table_remove(&img->meta_chunks, chunk);
    return 0;
}

int meta_add(struct image *img, uint64_t first, uint64_t nr, enum meta_kind kind)
{
    for (uint64_t c = first; c < first + nr; c++) {
        bool is_new = meta_get(img, c) == META_NONE;
        int rc = is_new ? chunk_count(img, c, 1) : 0;

        if (rc == 0)
            rc = table_put(&img->meta, c, (void *)(uintptr_t)kind);
        if (rc < 0)
            return rc;
    }
    return 0;
}

void meta_remove(struct image *img, uint64_t first, uint64_t nr)
{
    for (uint64_t c = first; c < first + nr; c++)
        if (table_remove(&img->meta, c))
            (void)chunk_count(img, c, -1); /* there: no memory needed */
}

bool meta_none_in(const struct image *img, uint64_t first, uint64_t nr)
{
    for (uint64_t chunk = first >> CHUNK_BITS; chunk <= (first + nr - 1) >> CHUNK_BITS; chunk++) {
        if (!table_get(&img->meta_chunks, chunk))
            continue;
        uint64_t from = MAX(first, chunk << CHUNK_BITS);
        uint64_t to = MIN(first + nr, (chunk + 1) << CHUNK_BITS);
        for (uint64_t c = from; c < to; c++)
            if (meta_get(img, c) != META_NONE)
                return false;
    }
    return true;
}

enum meta_kind meta_get(const struct image *img, uint64_t cluster)
{
    return (enum meta_kind)(uintptr_t)table_get(&img->meta, cluster);
}

void meta_clear(struct image *img)
{
    table_fini(&img->meta);
    table_fini(&img->meta_chunks);
}

uint64_t image_host_limit(const struct image *img)
{
    uint64_t in_file = div_up(img->blk->len, img->hdr.cluster_size);

    return MAX(in_file, img->end);
}

bool meta_may_hold_data(const struct image *img, uint64_t cluster)
{
    return cluster < image_host_limit(img) && meta_get(img, cluster) == META_NONE;
}

static uint64_t clusters_of(const struct image *img, uint64_t bytes)
{
    return div_up(bytes, img->hdr.cluster_size);
}

/* An L2 table whose place is impossible, or taken by something else, another L2 table included. */
static bool l1_entry_is_bad(const struct image *img, uint64_t entry)
{
    uint64_t off = entry & L1_OFFSET_MASK;
    uint64_t cluster = off >> img->hdr.cluster_bits;

    if (entry & QCOW2_L1_RESERVED_MASK || !is_aligned(off, img->hdr.cluster_size))
        return true;
    return off && (cluster >= image_host_limit(img) || meta_get(img, cluster) != META_NONE);
}

void meta_check_l1(struct image *img)
{
    for (uint32_t i = 0; i < img->hdr.l1_entries; i++)
        if (!(img->l1[i] & L1_BAD) && l1_entry_is_bad(img, img->l1[i]))
            img->l1[i] |= L1_BAD;
}

static int load_l2_places(struct image *img)
{
    for (uint32_t i = 0; i < img->hdr.l1_entries; i++) {
        uint64_t entry = img->l1[i];

        if (entry & L1_BAD || l1_entry_is_bad(img, entry)) {
            img->l1[i] |= L1_BAD;
            continue;
        }
        int rc = entry & L1_OFFSET_MASK
                     ? meta_add(img, (entry & L1_OFFSET_MASK) >> img->hdr.cluster_bits, 1, META_L2)
                     : 0;
        if (rc < 0)
            return rc;
    }
    return 0;
}

static int load_refblock_places(struct image *img)
{
    for (uint64_t i = 0; i < img->reftable_entries; i++) {
        uint64_t off = img->reftable[i] & QCOW2_REFTABLE_OFFSET_MASK;

        if (!off || !is_aligned(off, img->hdr.cluster_size))
            continue; /* refcount.c refuses to use it */
        int rc = meta_add(img, off >> img->hdr.cluster_bits, 1, META_REFBLOCK);
        if (rc < 0)
            return rc;
    }
    return 0;
}

int meta_load(struct image *img, struct err *err)
{
    const struct qcow2_header *hdr = &img->hdr;
    unsigned bits = hdr->cluster_bits;

    meta_clear(img);
    int rc = load_refblock_places(img);
    if (rc == 0)
        rc = meta_add(img, hdr->l1_off >> bits, clusters_of(img, hdr->l1_entries * 8ull), META_L1);
    if (rc == 0)
        rc = meta_add(img, hdr->reftable_off >> bits, hdr->reftable_clusters, META_REFTABLE);
    if (rc == 0 && hdr->nb_snapshots)
        rc = meta_add(img, hdr->snapshots_off >> bits, 1, META_SNAPSHOTS);
    if (rc == 0)
        rc = meta_add(img, 0, 1, META_HEADER);
    if (rc == 0)
        rc = load_l2_places(img);
    return rc < 0 ? err_errno(err, rc, "read the places of tables") : 0;
}

int meta_write_zeroes(struct blk *blk, uint64_t off, uint64_t end)
{
    struct iovec iov[FILL_IOVS];

    for (unsigned i = 0; i < FILL_IOVS; i++)
        iov[i] = (struct iovec){(void *)(uintptr_t)buf_zeroes(), BUF_ZERO_LEN};
    while (off < end) {
        struct iov_iter it;
        uint64_t len = MIN(end - off, (uint64_t)FILL_IOVS * BUF_ZERO_LEN);

        iov_iter_init(&it, iov, FILL_IOVS);
        int rc = blk_writev(blk, off, len, &it, 0);

        if (rc < 0)
            return rc;
        off += len;
    }
    return 0;
}

/* Holes of [off, end) are written as the zeroes that they read as. */
SUSPENDS static int fill_holes(struct image *img, uint64_t off, uint64_t end)
{
    int rc = 0;

    while (rc == 0 && off < end) {
        bool data = true;
        uint64_t n;

        rc = blk_status(img->blk, off, end - off, &data, &n);
        n = MIN(align_up(n, 512), end - off);
        if (rc == 0 && !data)
            rc = meta_write_zeroes(img->blk, off, off + n);
        off += n;
    }
    return rc;
}

void meta_back_tables(struct image *img)
{
    const struct qcow2_header *hdr = &img->hdr;
    uint64_t limit = img->blk->len, l1_end = hdr->l1_off + align_up(hdr->l1_entries * 8ull, 512);
    uint64_t ref_end = hdr->reftable_off + ((uint64_t)hdr->reftable_clusters << hdr->cluster_bits);

    if (img->blk->fixed_len)
        return;
    (void)fill_holes(img, hdr->l1_off, MIN(l1_end, limit));
    (void)fill_holes(img, hdr->reftable_off, MIN(ref_end, limit));
}
