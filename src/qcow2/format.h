/*
 * qcow2 as it lies on disk: structs in disk order, magic numbers, limits. No code.
 * Spec: "Header", "Header extensions", "Feature name table", "Bitmaps extension",
 * "Full disk encryption header pointer", "Snapshots", "Bitmap directory".
 */
#ifndef VARVE_QCOW2_FORMAT_H
#define VARVE_QCOW2_FORMAT_H

#include <assert.h>
#include <stddef.h>
#include "base/be.h"

#define QCOW2_MAGIC 0x514649fbu

/* Host offsets are at most 56 bits wide; every offset from a file is held against this. */
#define QCOW2_HOST_OFF_MAX (1ull << 56)

#define QCOW2_EXT_END            0u
#define QCOW2_EXT_BACKING_FORMAT 0xe2792acau
#define QCOW2_EXT_FEATURE_NAMES  0x6803f857u
#define QCOW2_EXT_BITMAPS        0x23852875u
#define QCOW2_EXT_CRYPT          0x0537be77u
#define QCOW2_EXT_DATA_FILE      0x44415441u
#define QCOW2_EXT_GUARD          0x76617276u /* our own: see guard.h */

struct qcow2_disk_header {
    be32 magic;
    be32 version;
    be64 backing_off;
    be32 backing_len;
    be32 cluster_bits;
    be64 size;
    be32 crypt_method;
    be32 l1_size;
    be64 l1_off;
    be64 reftable_off;
    be32 reftable_clusters;
    be32 nb_snapshots;
    be64 snapshots_off;
    /* version 3 */
    be64 incompatible;
    be64 compatible;
    be64 autoclear;
    be32 refcount_order;
    be32 header_len;
    /* additional fields */
    uint8_t compression;
    uint8_t padding[7];
};
#define QCOW2_V2_HEADER_LEN 72u
#define QCOW2_V3_HEADER_LEN 104u
static_assert(sizeof(struct qcow2_disk_header) == 112, "header");
static_assert(offsetof(struct qcow2_disk_header, incompatible) == 72, "version 3 fields");
static_assert(offsetof(struct qcow2_disk_header, compression) == 104, "additional fields");

struct qcow2_disk_ext {
    be32 magic;
    be32 len; /* of the data; what follows is padded to 8 bytes */
};
static_assert(sizeof(struct qcow2_disk_ext) == 8, "extension");

struct qcow2_disk_feature {
    uint8_t type; /* 0 incompatible, 1 compatible, 2 autoclear */
    uint8_t bit;
    char name[46]; /* padded with zeroes, not terminated at full length */
};
static_assert(sizeof(struct qcow2_disk_feature) == 48, "feature name");

struct qcow2_disk_bitmaps_ext {
    be32 nb_bitmaps;
    be32 reserved;
    be64 dir_len;
    be64 dir_off;
};
static_assert(sizeof(struct qcow2_disk_bitmaps_ext) == 24, "bitmaps extension");

struct qcow2_disk_crypt_ext {
    be64 off;
    be64 len;
};
static_assert(sizeof(struct qcow2_disk_crypt_ext) == 16, "encryption header pointer");

struct qcow2_disk_guard_ext { /* epoch of the map journal */
    be64 hi;
    be64 lo;
};
static_assert(sizeof(struct qcow2_disk_guard_ext) == 16, "guard");

/* Followed by extra data, id, name; padded to 8 bytes. */
struct qcow2_disk_snapshot {
    be64 l1_off;
    be32 l1_size;
    be16 id_len;
    be16 name_len;
    be32 date_sec;
    be32 date_nsec;
    be64 vm_clock_nsec;
    be32 vm_state_len;
    be32 extra_len;
};
static_assert(sizeof(struct qcow2_disk_snapshot) == 40, "snapshot");

struct qcow2_disk_snapshot_extra {
    be64 vm_state_len;
    be64 disk_len;
    be64 icount;
};
static_assert(sizeof(struct qcow2_disk_snapshot_extra) == 24, "snapshot's extra data");

/* Followed by extra data and name; padded to 8 bytes. */
struct qcow2_disk_bitmap {
    be64 table_off;
    be32 table_entries;
    be32 flags;
    uint8_t type;
    uint8_t granularity_bits;
    be16 name_len;
    be32 extra_len;
};
static_assert(sizeof(struct qcow2_disk_bitmap) == 24, "bitmap directory entry");

#define QCOW2_BITMAPS_MAX          65535u
#define QCOW2_BITMAP_OFFSET_MASK   0x00fffffffffffe00ull
#define QCOW2_BITMAP_RESERVED_MASK 0xff000000000001feull
#define QCOW2_BITMAP_ALL_ONES      1ull

#define QCOW2_REFTABLE_OFFSET_MASK   0xfffffffffffffe00ull
#define QCOW2_REFTABLE_RESERVED_MASK 0x1ffull
#define QCOW2_L1_RESERVED_MASK       0x7f000000000001ffull
#define QCOW2_L2_STD_RESERVED_MASK   0x3f000000000001feull
#define QCOW2_L2_EXT_RESERVED_MASK   0x3f000000000001ffull

#endif
