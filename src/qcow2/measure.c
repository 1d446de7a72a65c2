/*
 * How many bytes a new image takes.
 *
 * The figures are those of `qemu-img measure`: a volume of the full size holds the image whatever
 * the order in which it is written. They count a whole L1 table, whole L2 tables for every guest
 * cluster, and refcounts for all of it.
 */
#include "base/bits.h"
#include "base/own.h"
#include "qcow2/image.h"
#include "qcow2/layout.h"

void qcow2_refcount_clusters(const struct qcow2_header *hdr, uint64_t clusters, uint64_t min_table,
                             uint64_t *ret_blocks, uint64_t *ret_table)
{
    uint64_t per_block = 1ull << hdr->refcount_block_bits;
    uint64_t per_table = hdr->cluster_size / 8;
    uint64_t blocks = 0, table = min_table, before;

    /* Blocks and table are counted too; it settles, since a block counts at least 64 clusters. */
    do {
        before = blocks + table;
        blocks = div_up(clusters + before, per_block);
        table = MAX(min_table, div_up(blocks, per_table));
    } while (blocks + table != before);
    *ret_blocks = blocks;
    *ret_table = table;
}

static uint64_t meta_clusters(const struct qcow2_header *hdr)
{
    uint64_t data = div_up(hdr->virtual_len, hdr->cluster_size);
    uint64_t l2 = div_up(data, 1ull << hdr->l2_bits);
    uint64_t l1 = div_up(l2 * 8, hdr->cluster_size);
    uint64_t meta = 1 + l1 + l2, blocks, table;

    qcow2_refcount_clusters(hdr, meta + data, 0, &blocks, &table);
    return meta + blocks + table;
}

uint64_t qcow2_full_clusters(const struct qcow2_header *hdr)
{
    return meta_clusters(hdr) + div_up(hdr->virtual_len, hdr->cluster_size);
}

int image_measure(const struct image_create_opts *opts, uint64_t data_len, uint64_t *ret_required,
                  uint64_t *ret_full, struct err *err)
{
    struct qcow2_header hdr;
    int rc = image_create_check(opts, err);

    if (rc < 0)
        return rc;
    qcow2_create_header(opts, &hdr);
    uint64_t data = div_up(hdr.virtual_len, hdr.cluster_size);
    uint64_t used = MIN(div_up(data_len, hdr.cluster_size), data);

    if (opts->prealloc == PREALLOC_FALLOC || opts->prealloc == PREALLOC_FULL)
        used = data;
    *ret_full = qcow2_full_clusters(&hdr) << hdr.cluster_bits;
    *ret_required = (meta_clusters(&hdr) + used) << hdr.cluster_bits;
    return 0;
}
