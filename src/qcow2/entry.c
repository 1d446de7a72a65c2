/* Decode and encode of L1 and L2 entries: pure, no I/O, no trust in the input. */
#include "qcow2/entry.h"
#include "base/be.h"
#include "qcow2/format.h"

struct disk_ext_entry {
    be64 word;
    be64 bits;
};

static bool has_data_file(const struct qcow2_header *hdr)
{
    return hdr->incompatible & QCOW2_INCOMPAT_DATA_FILE;
}

/* In an external data file offset 0 is a place like any other; then only the flag tells. */
static bool is_mapped(const struct qcow2_header *hdr, struct l2_entry e)
{
    return l2_host_off(e) || (has_data_file(hdr) && e.word & ENTRY_COPIED);
}

static enum cluster_kind std_kind(const struct qcow2_header *hdr, struct l2_entry e)
{
    bool zero = e.word & L2_ZERO_FLAG;

    if (e.word & QCOW2_L2_STD_RESERVED_MASK || !is_aligned(l2_host_off(e), hdr->cluster_size) ||
        (zero && hdr->version < 3))
        return CLUSTER_INVALID;
    if (is_mapped(hdr, e))
        return zero ? CLUSTER_ZERO_ALLOC : CLUSTER_NORMAL;
    return zero ? CLUSTER_ZERO_PLAIN : CLUSTER_UNALLOCATED;
}

static bool ext_is_valid(const struct qcow2_header *hdr, struct l2_entry e)
{
    if (e.word & QCOW2_L2_EXT_RESERVED_MASK || !is_aligned(l2_host_off(e), hdr->cluster_size))
        return false;
    if (l2_alloc_bits(e) & l2_zero_bits(e))
        return false;
    return !l2_alloc_bits(e) || is_mapped(hdr, e);
}

enum cluster_kind l2_kind(const struct qcow2_header *hdr, struct l2_entry e, unsigned sub)
{
    if (l2_is_compressed(e))
        return has_data_file(hdr) ? CLUSTER_INVALID : CLUSTER_COMPRESSED;
    if (!hdr->extended_l2)
        return std_kind(hdr, e);
    if (!ext_is_valid(hdr, e))
        return CLUSTER_INVALID;
    if (l2_alloc_bits(e) >> sub & 1)
        return CLUSTER_NORMAL;
    if (l2_zero_bits(e) >> sub & 1)
        return is_mapped(hdr, e) ? CLUSTER_ZERO_ALLOC : CLUSTER_ZERO_PLAIN;
    return CLUSTER_UNALLOCATED;
}

unsigned l2_run(const struct qcow2_header *hdr, struct l2_entry e, unsigned sub)
{
    uint32_t same;

    if (!hdr->extended_l2)
        return 1;
    switch (l2_kind(hdr, e, sub)) {
    case CLUSTER_NORMAL:
        same = l2_alloc_bits(e);
        break;
    case CLUSTER_ZERO_ALLOC:
    case CLUSTER_ZERO_PLAIN:
        same = l2_zero_bits(e);
        break;
    case CLUSTER_UNALLOCATED:
        same = ~(l2_alloc_bits(e) | l2_zero_bits(e));
        break;
    default: /* the whole cluster */
        return hdr->subclusters - sub;
    }
    uint32_t other = ~(same >> sub);
    unsigned left = hdr->subclusters - sub;
    unsigned run = other ? (unsigned)__builtin_ctz(other) : 32;

    return run < left ? run : left;
}

void l2_compressed_range(const struct qcow2_header *hdr, struct l2_entry e, uint64_t *ret_off,
                         uint64_t *ret_len)
{
    unsigned shift = 62 - (hdr->cluster_bits - 8);
    uint64_t off = e.word & ((1ull << shift) - 1);
    uint64_t more = e.word >> shift & ((1ull << (hdr->cluster_bits - 8)) - 1);

    *ret_off = off;
    *ret_len = (more + 1) * 512 - (off & 511);
}

struct l2_entry l2_get(const struct qcow2_header *hdr, const void *table, unsigned index)
{
    if (hdr->extended_l2) {
        const struct disk_ext_entry *e = (const struct disk_ext_entry *)table + index;

        return (struct l2_entry){be64_get(e->word), be64_get(e->bits)};
    }
    return (struct l2_entry){be64_get(((const be64 *)table)[index]), 0};
}

void l2_put(const struct qcow2_header *hdr, void *table, unsigned index, struct l2_entry e)
{
    if (hdr->extended_l2)
        ((struct disk_ext_entry *)table)[index] =
            (struct disk_ext_entry){be64_make(e.word), be64_make(e.bits)};
    else
        ((be64 *)table)[index] = be64_make(e.word);
}
