/*
 * One open qcow2 file: its mapping, its allocator, reads and writes of guest data.
 *
 * The image knows nothing of other files: where a write must fill what it leaves open of a
 * (sub)cluster, it reads the old content through `struct image_below`, which the chain gives.
 * All calls on one image come from one reactor. Guest ranges lie inside the image's length.
 */
#ifndef VARVE_QCOW2_IMAGE_H
#define VARVE_QCOW2_IMAGE_H

#include <stdbool.h>
#include <stdint.h>
#include "base/err.h"
#include "base/list.h"
#include "blk/blk.h"
#include "qcow2/header.h"
#include "rt/buf.h"

struct image;
struct bound;

/* Reads what the layers below show of a guest range into iov (zeroes past their end). */
struct image_below {
    int (*read)(void *ctx, uint64_t guest_off, uint64_t len, struct iov_iter *iov); /* may wait */
    /* May say that a range below is known to read as zero without I/O (then COW needs no read);
     * returns the length of the prefix for which *ret_zero holds. NULL: unknown. */
    uint64_t (*is_zero)(void *ctx, uint64_t guest_off, uint64_t len, bool *ret_zero);
    void *ctx;
};

enum image_discard {
    IMAGE_DISCARD_UNMAP, /* clusters are freed */
    IMAGE_DISCARD_KEEP   /* they keep their place, marked as zero; their file space is given back.
                            Version 2 has no such mark: a discard does nothing */
};

/* The device's room, when more was asked for. */
enum image_room {
    IMAGE_ROOM_OK,
    IMAGE_ROOM_SHORT, /* there was none, but some is left of what it has */
    IMAGE_ROOM_FULL   /* writes wait or fail */
};
enum image_on_full { IMAGE_FULL_FAIL, IMAGE_FULL_WAIT };
/* Of images on devices that can be made longer (blk_is_extendable). */
struct image_grow_opts {
    uint64_t chunk;             /* the device has up to so much more than is used; 0: 1 GiB */
    enum image_on_full on_full; /* what image_wait_room does while there is no room */
    /* When that changes, with the reason; may be NULL. Does not wait. */
    void (*told)(void *ctx, enum image_room room, const char *why);
    void *ctx;
};

struct image_opts {
    bool writable;
    bool no_open_checks;    /* open what check and info may look at: corrupt bit, bad tables */
    uint64_t cache_bytes;   /* 0: covers the image, at most 32 MiB */
    uint64_t prealloc_step; /* file growth in steps of so many bytes; 0: 128 MiB on files, none on
                               devices; UINT64_MAX: none */
    enum image_discard discard;
    struct image_grow_opts grow;
    const char *journal_dir; /* where journals of killed processes are; NULL: none is looked for */
    bool ack;                /* while writable keep one: answered writes survive a kill */
};

/*
 * Opens an image. `blk` is taken on success: closed by image_close.
 * Writable opens refuse an image whose corrupt bit is set (-EUCLEAN); a dirty bit (lazy
 * refcounts) is repaired first by rebuilding refcounts in memory and storing them.
 * Encrypted images and external data files are refused with -ENOTSUP (info may still read them
 * with no_open_checks). An image with a backing file opens whatever that file is.
 * Refuses an L1 table that does not lie in the file, a refcount table likewise when writable.
 */
SUSPENDS int image_open(struct blk *blk, const struct image_opts *opts, struct image **ret,
                        struct err *err);
/* Flushes, gives unused runs back, trims the file's end, closes the blk, frees. Frees in any case.
 */
SUSPENDS int image_close(struct image *img, struct err *err);
const struct qcow2_header *image_header(const struct image *img);
struct blk *image_blk(const struct image *img);
/* The metadata cache counts in this bound, together with others (bound.h); NULL: in its own. */
void image_share_bound(struct image *img, struct bound *bound);
/* What was looked up is not expected to be again: slices go as if they were never used. */
void image_map_is_passing(struct image *img, bool passing);
/* Bytes that the whole map would take in the cache, going by what is there. */
uint64_t image_map_estimate(const struct image *img);
uint64_t image_len(const struct image *img); /* virtual size in bytes */
bool image_is_writable(const struct image *img);
bool image_is_corrupt(const struct image *img);
/* true while metadata changes are in memory only */
bool image_is_unwritten(const struct image *img);

/* ---- mapping ---- */
enum extent_kind {
    EXTENT_UNALLOCATED, /* look below */
    EXTENT_ZERO,
    EXTENT_DATA,       /* at host_off in the image's file */
    EXTENT_COMPRESSED, /* read through image_read */
};
struct extent {
    enum extent_kind kind;
    uint64_t len; /* bytes of this kind from the asked offset; DATA: contiguous on the host too */
    uint64_t host_off; /* DATA; ZERO with a kept cluster: its place; else 0 */
    bool host_valid;   /* host_off means something */
};
/* First extent of a range; 0 < ret->len <= len. Never crosses what is needed to know; merges
 * neighbouring clusters while that needs no further wait. -EIO, -EUCLEAN. */
SUSPENDS int image_map(struct image *img, uint64_t guest_off, uint64_t len, struct extent *ret);
/* Brings the mapping of guest_off into memory; *ret_end: how far it is known then. */
SUSPENDS int image_load_map(struct image *img, uint64_t guest_off, uint64_t *ret_end);
/* True if a write of this range would go in place: mapped, owned by this layer alone; then
 * *ret_host is where and returns the length of the prefix (0: no). Never waits: false on a cache
 * miss. */
uint64_t image_map_in_place(struct image *img, uint64_t guest_off, uint64_t len,
                            uint64_t *ret_host);
/* Host space that an extent names is not reused while a request that was inside when it was mapped
 * still is. The calls below enter by themselves; whoever does I/O on image_blk() with mapped
 * extents enters before the lookup and leaves after the I/O. Never waits. */
struct image_req {
    struct list link;
    uint64_t seq;
};
void image_enter(struct image *img, struct image_req *req);
void image_leave(struct image *img, struct image_req *req);
/* After a write that went to image_blk() directly: the next image_flush must reach the device. */
void image_note_write(struct image *img);
/* Bytes of guest data this layer holds itself (allocated, not zero): for choosing a merge
 * direction. Walks all L2 tables once; waits. */
SUSPENDS int image_allocated_bytes(struct image *img, uint64_t *ret);

/* ---- data ---- */
/* Reads guest data that this layer holds; unallocated parts come from below (NULL: zeroes). */
SUSPENDS int image_read(struct image *img, uint64_t guest_off, uint64_t len, struct iov_iter *iov,
                        const struct image_below *below);
/* flags: BLK_FUA (data and mapping durable on return). Errors: -ENOSPC, -EIO, -EROFS, -EUCLEAN. */
SUSPENDS int image_write(struct image *img, uint64_t guest_off, uint64_t len, struct iov_iter *iov,
                         unsigned flags, const struct image_below *below);
/* Makes the range read as zero. flags: BLK_FUA; BLK_MAY_UNMAP frees clusters. Partial (sub)clusters
 * at the edges are written. v2 images: unallocated without a backing file, else data zeroes are
 * written. */
SUSPENDS int image_zero(struct image *img, uint64_t guest_off, uint64_t len, unsigned flags,
                        const struct image_below *below);
/* Flag of image_write and image_zero: -ENOBUFS instead of waiting for a longer device. A part may
 * be done; after image_wait_room(), outside of all gates, the whole is asked for again. Without it
 * a request waits for one extension, and fails with -ENOSPC if there is no room. */
#define IMAGE_NO_WAIT 0x100u
/* Waits until there may be room: 0; -ENOSPC: there is none, and by the options or
 * image_fail_waits() it is not to be waited for. The image may be closed meanwhile. */
SUSPENDS int image_wait_room(struct image *img);
/* Those that wait now fail with -ENOSPC. */
void image_fail_waits(struct image *img);

/* Advisory: whole clusters inside the range stop to hold data and read as zero (never as older
 * data from below); edges are left alone. */
SUSPENDS int image_discard(struct image *img, uint64_t guest_off, uint64_t len,
                           const struct image_below *below);
/* Makes everything that returned before durable: data, refcounts, L2, L1, in this order. */
SUSPENDS int image_flush(struct image *img);
/* Writes dirty metadata back, as flush does, while other requests go on; what a later flush then
 * finds is little. */
SUSPENDS int image_write_back(struct image *img);

/* How many bytes of its device the image uses: up to the end of the highest cluster in use, all of
 * it written. What lies behind can be given back while nobody writes: see docs/thin.md. -EUCLEAN,
 * -EBUSY: that cannot be told before it was opened for writing and closed. */
SUSPENDS int image_end(struct image *img, uint64_t *ret, struct err *err);

/* About the same, at once; 0: not known. Of an image that is written it is where the next cluster
 * comes to lie. */
uint64_t image_used_hint(const struct image *img);

/* ---- slow operations: the caller has drained all requests ---- */
/* Grows or shrinks. New space reads as zero even over a longer backing file: `below` (NULL: no
 * backing file) is read where the old end lies inside a cluster. */
SUSPENDS int image_resize(struct image *img, uint64_t len, const struct image_below *below,
                          struct err *err);
/* Rewrites the backing file name and format in the header, durably. NULL name: none. */
SUSPENDS int image_set_backing(struct image *img, const char *name, const char *format,
                               struct err *err);
/* Switches between writable and read-only for a pivot: to read-only flushes first and gives unused
 * runs back; the file's descriptor and locks change with blk_file_reopen when it is a file. */
SUSPENDS int image_reopen(struct image *img, bool writable, struct err *err);

/* Whether it keeps a journal when it next becomes writable: only a top layer may. */
void image_want_ack(struct image *img, bool on);
/* A writable image begins to keep one now. The caller has drained all requests. */
SUSPENDS int image_start_ack(struct image *img, struct err *err);
/* It keeps one now. */
bool image_is_recorded(const struct image *img);
/* Changes in it that are not written back. */
uint64_t image_records(const struct image *img);
/* Its header says that it has one: it is open with one, or its server was killed. */
bool image_has_journal(const struct image *img);
/* What the user should know about answered writes that were not flushed; "" if nothing. */
const char *image_ack_note(const struct image *img);
/* For a timer: writes back what was changed before the last call of this, and with a journal what
 * was written. */
SUSPENDS int image_write_back_old(struct image *img);

/* Counters for statistics and tests. */
struct image_stats {
    uint64_t cache_hits, cache_misses, cache_bytes, cache_bytes_max;
    uint64_t cow_reads, cow_read_bytes, cow_write_bytes;
    uint64_t clusters_allocated, clusters_freed, runs_allocated, refcount_writes, l2_writes;
    uint64_t claim_waits, write_joins, flushes;
    /* of a device that can be made longer: extensions, those asked for before anybody waited, and
     * their time; requests that waited for room, and how long */
    uint64_t extensions, extensions_ahead, extend_failures, extend_ns;
    uint64_t room_waits, room_wait_ns;
};
void image_get_stats(const struct image *img, struct image_stats *ret);

/* ---- creating (create.c) ---- */
enum qcow2_prealloc { PREALLOC_OFF, PREALLOC_METADATA, PREALLOC_FALLOC, PREALLOC_FULL };
struct image_create_opts {
    uint64_t virtual_len;
    unsigned version;      /* 2 or 3; 0 = 3 */
    uint64_t cluster_size; /* 0 = 64 KiB */
    bool extended_l2;
    unsigned refcount_bits; /* 1..64, a power of two; 0 = 16 */
    bool lazy_refcounts;
    enum qcow2_compression compression;
    enum qcow2_prealloc prealloc;
    const char *backing_name, *backing_format; /* NULL: none */
};
/* Writes a new empty image to blk (a file is emptied first; a device keeps its other content) and
 * flushes it. Preallocation modes of an image with a backing file need extended L2 (-EINVAL
 * otherwise). On a device whose space is not known to read as zero, preallocated clusters carry
 * zero marks. Nothing is left behind as a valid image on failure. */
SUSPENDS int image_create(struct blk *blk, const struct image_create_opts *opts, struct err *err);
/* Checks options alone (same errors as image_create), before any file is touched. */
int image_create_check(const struct image_create_opts *opts, struct err *err);
/* Host bytes a new image needs: empty (required_len is what it takes for `data_len` bytes of data)
 * and fully allocated; QEMU's `measure` figures. */
int image_measure(const struct image_create_opts *opts, uint64_t data_len, uint64_t *ret_required,
                  uint64_t *ret_full, struct err *err);

/* ---- checking (check.c) ---- */
struct image_check {
    uint64_t corruptions, leaks, check_errors;
    uint64_t total_clusters, allocated_clusters, fragmented_clusters, compressed_clusters;
    uint64_t image_end_off;
    bool bitmap_clusters_seen;
    /* Of an image whose server was killed */
    bool has_journal; /* its journal was counted in: what the next writable open will make of
                         the file; clusters that it will reuse are no leaks */
    uint64_t journal_records; /* changes that wait there */
    char journal_note[240];   /* why there is none, where there ought to be; else "" */
};
/* Full consistency check, no repair: every reference counted, compared with the refcounts, overlaps
 * and reserved bits reported. report (may be NULL) is called with one line a finding. Memory is
 * bounded by the file's length. Works on what image_open(no_open_checks) gives, read-only; if it
 * was opened with a journal_dir, the changes in the image's journal are counted in, in memory. */
SUSPENDS int image_check(struct image *img, struct image_check *ret,
                         void (*report)(void *ctx, const char *line), void *ctx, struct err *err);

#endif
