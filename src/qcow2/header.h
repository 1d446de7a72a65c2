/*
 * The qcow2 header and its extensions, in host order.
 * Spec: docs/interop/qcow2.txt, "Header", "Header extensions", "Feature name table",
 * "Backing file format name", "Header padding", "Full disk encryption header pointer".
 */
#ifndef VARVE_QCOW2_HEADER_H
#define VARVE_QCOW2_HEADER_H

#include <stdbool.h>
#include <stdint.h>
#include "base/err.h"
#include "blk/blk.h"

#define QCOW2_CLUSTER_BITS_MIN   9u
#define QCOW2_CLUSTER_BITS_MAX   21u
#define QCOW2_BACKING_NAME_MAX   1023u
#define QCOW2_L1_BYTES_MAX       (32u << 20) /* as QEMU: an L1 table is at most 32 MiB */
#define QCOW2_REFTABLE_BYTES_MAX (8u << 20)  /* as QEMU */
#define QCOW2_SNAPSHOTS_MAX      65536u

/* incompatible_features */
#define QCOW2_INCOMPAT_DIRTY       (1ull << 0)
#define QCOW2_INCOMPAT_CORRUPT     (1ull << 1)
#define QCOW2_INCOMPAT_DATA_FILE   (1ull << 2)
#define QCOW2_INCOMPAT_COMPRESSION (1ull << 3)
#define QCOW2_INCOMPAT_EXTENDED_L2 (1ull << 4)
/* compatible_features */
#define QCOW2_COMPAT_LAZY_REFCOUNTS (1ull << 0)
/* autoclear_features */
#define QCOW2_AUTOCLEAR_BITMAPS  (1ull << 0)
#define QCOW2_AUTOCLEAR_RAW_DATA (1ull << 1)

enum qcow2_compression { QCOW2_ZLIB = 0, QCOW2_ZSTD = 1 };

struct qcow2_ext { /* a header extension this version does not interpret, kept as it is */
    uint32_t magic;
    uint32_t len;
    uint8_t *data; /* owned by the header */
};

struct qcow2_header {
    unsigned version;      /* 2 or 3 */
    unsigned cluster_bits; /* 9..21; at least 14 with extended L2 */
    uint64_t cluster_size; /* bytes, 1 << cluster_bits */
    uint64_t virtual_len;  /* bytes, as in the header: need not be a multiple of anything */
    unsigned crypt_method; /* 0 none, 1 AES, 2 LUKS */
    uint64_t l1_off;       /* host byte offset of the active L1 table */
    uint32_t l1_entries;
    uint64_t reftable_off;
    uint32_t reftable_clusters;
    uint32_t nb_snapshots;
    uint64_t snapshots_off;
    uint64_t incompatible, compatible, autoclear;
    unsigned refcount_order; /* refcount width is 1 << order bits, 0..6 */
    uint32_t header_len;     /* bytes as found on disk: 72 for v2, >= 104 for v3 */
    uint8_t *unknown_fields; /* owned: header bytes from 112 to header_len, kept; NULL if none */
    enum qcow2_compression compression;
    char *backing_name;   /* owned; NULL: no backing file */
    char *backing_format; /* owned; NULL: not given */
    char *data_file;      /* owned; name from the external data file extension */
    struct qcow2_ext *exts;
    unsigned nb_exts;

    /* derived */
    bool extended_l2;
    unsigned l2_entry_size;       /* 8 or 16 bytes */
    unsigned l2_bits;             /* log2 of entries in an L2 table (one cluster) */
    unsigned subclusters;         /* in a cluster: 1 or 32 */
    unsigned subcluster_bits;     /* log2 of its bytes */
    unsigned refcount_block_bits; /* log2 of refcounts in a block (one cluster) */
    uint64_t l1_needed;           /* entries that virtual_len needs */
};

/* Reads and checks the header. Refuses (-EINVAL bad values, -ENOTSUP unknown incompatible
 * features with their names from the feature table, -EUCLEAN contradictions). Every size and
 * offset is bounded against sane limits and, where the spec asks, against alignment and the file's
 * length. *ret is filled on success; release with qcow2_header_fini. */
SUSPENDS int qcow2_header_read(struct blk *blk, struct qcow2_header *ret, struct err *err);
/* Encodes and writes the header (extensions kept, names of the incompatible features for v3). A
 * power cut leaves the old header or the new one where their first 512 bytes hold all but the
 * backing file's name, which then goes to a free place first, with a flush in between. No flush
 * at the end. -ENOSPC when it does not fit into one cluster. */
SUSPENDS int qcow2_header_write(struct blk *blk, const struct qcow2_header *hdr, struct err *err);
void qcow2_header_fini(struct qcow2_header *hdr);
/* Fills the derived members from version, bits, features and virtual_len. */
void qcow2_header_derive(struct qcow2_header *hdr);
/* Does it fit into one cluster? */
bool qcow2_header_fits(const struct qcow2_header *hdr);
/* The same, and a power cut never tears it: its first 512 bytes hold all but the backing name. */
bool qcow2_header_fits_sector(const struct qcow2_header *hdr);
/* The extension kept under this magic, NULL if there is none. */
const struct qcow2_ext *qcow2_header_ext(const struct qcow2_header *hdr, uint32_t magic);
/* Adds it or changes its content (in memory); 0 or -ENOMEM, then nothing has changed. */
int qcow2_header_set_ext(struct qcow2_header *hdr, uint32_t magic, const void *data, uint32_t len);
void qcow2_header_drop_ext(struct qcow2_header *hdr, uint32_t magic);
/* True if the first bytes are a qcow2 image (magic and a known version or not). */
bool qcow2_probe(const void *buf, size_t len);

#endif
