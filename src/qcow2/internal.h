/*
 * The open image from inside. Private to this folder.
 *
 * Everything here belongs to one reactor. What may change over a wait is said at each group.
 * Guest side: a cluster's mapping changes only under a claim on it (claim.c), by
 * cow.c/write.c/zero.c. Host side: clusters are given out and taken back by alloc.c, counted in
 * refcount.c.
 */
#ifndef VARVE_QCOW2_INTERNAL_H
#define VARVE_QCOW2_INTERNAL_H

#include <stdbool.h>
#include <stdint.h>
#include "base/list.h"
#include "base/table.h"
#include "base/vec.h"
#include "qcow2/ack.h"
#include "qcow2/cache.h"
#include "qcow2/entry.h"
#include "qcow2/header.h"
#include "qcow2/image.h"
#include "rt/wait.h"

/* Kept in the low, reserved bits of an L1 entry in memory; never written. */
#define L1_BAD         1ull /* contradicts the rest of the metadata: using it is an error */
#define L1_PENDING     2ull /* the table on disk does not have this entry yet */
#define L1_MEMORY_BITS (L1_BAD | L1_PENDING)

/* What a host cluster that holds metadata holds; values of img->meta. */
enum meta_kind {
    META_NONE,
    META_HEADER,
    META_L1,
    META_L2,
    META_REFTABLE,
    META_REFBLOCK,
    META_SNAPSHOTS,
};

/* Host clusters [first, first + nr), by cluster number. */
struct host_run {
    uint64_t first, nr;
    bool fresh;     /* never used and known to read as zero */
    unsigned place; /* in the journal, plus 1; 0: it is not noted there */
};
/* Clusters whose reference is gone from the map in memory. */
struct host_free {
    uint64_t first, nr;
    uint64_t seq; /* requests up to this one may still use them */
    bool discard; /* give the space back to the device too */
};
/* A write that goes along with the one that holds its clusters: see claim.c. On its own stack. */
struct join {
    struct list link;
    uint64_t guest_off, len;
    const struct iov_iter *iov;
    bool taken; /* its data is part of the other's write */
    bool done;  /* and that has succeeded */
};
/* One allocating request's hold on guest clusters: see claim.c. */
struct claim {
    struct list link;
    uint64_t first, last; /* guest cluster numbers, both included */
    struct wait_queue waiters;
    bool open;           /* writes may join */
    uint64_t start, end; /* guest bytes that the holder writes itself; while open */
    struct list joins;   /* struct join by guest offset; no two of them overlap */
};

/* A device that can be made longer: see grow.c. */
#define GROW_MARKS 16u
struct grow_mark {
    uint64_t ns, end; /* when the allocator's end moved on from there; bytes */
};
struct grow {
    uint64_t need; /* bytes that the allocator could have used, since the last extension */
    uint64_t step; /* asked for at once; less than a chunk while there is little room */
    struct grow_mark marks[GROW_MARKS];
    unsigned nr_marks;                 /* ever */
    uint64_t extend_ns, extend_avg_ns; /* how long an extension takes */
    uint64_t full_until, ahead_at;     /* times: see grow.c */
    enum image_room room;
    bool late; /* somebody had to wait since an extension began last */
    bool running, stopping;
    struct list waiters;   /* struct room_wait */
    struct co_group group; /* the one coroutine that extends */
    struct co_cond kick;   /* it need not wait for the next try */
};

struct image {
    /* fixed after open (hdr but for resize and set_backing, l1 and reftable places) */
    struct blk *blk; /* owned */
    struct qcow2_header hdr;
    struct image_opts opts;
    size_t slice_bytes;      /* a metadata slice: at most a cluster */
    unsigned slice_bits;     /* log2 of L2 entries in a slice */
    unsigned ref_slice_bits; /* log2 of refcounts in a slice */

    /* state */
    bool writable;
    bool corrupt; /* metadata contradicts itself: no writes any more */
    int failed;   /* sticky error of a metadata write or flush: no writes any more */
    char corrupt_why[120];

    /* the map: L1 in host order with L1_MEMORY_BITS; the rest of the tables in slices */
    uint64_t *l1;            /* hdr.l1_entries */
    struct co_mutex l1_lock; /* linking or copying an L2 table */
    struct cache cache;
    struct table meta;        /* host cluster -> enum meta_kind; filled while writable */
    struct table meta_chunks; /* how many of them lie near each other: meta.c */
    struct list claims;       /* struct claim */
    struct list reqs;         /* struct image_req inside, oldest first */
    uint64_t req_seq;
    struct packed {       /* the last compressed cluster that was read, unpacked */
        uint64_t cluster; /* guest; UINT64_MAX: none */
        uint8_t *data;
    } packed;

    /* host space: alloc.c and refcount.c; where it waits, under alloc_lock */
    struct co_mutex alloc_lock;
    uint64_t *reftable; /* host order; NULL while never writable */
    uint64_t reftable_entries;
    uint64_t end;                 /* no cluster from here on was ever counted */
    uint64_t full_end;            /* clusters that the image has when all of it is allocated */
    uint64_t fresh_from;          /* clusters from here on were never written: see host_run.fresh */
    uint64_t scan_pos, scan_stop; /* where to look for free clusters below `end` */
    uint64_t scan_again;          /* then once from 0 up to here */
    uint64_t prealloc_end;        /* bytes; file space reserved so far */
    bool no_prealloc;             /* the file system cannot */
    bool allocated;               /* since the image became writable: trim the file at close */
    VEC(struct host_run) pool;    /* counted (refcount 1 on disk), not used yet */
    VEC(struct host_free) freed;  /* not yet unmapped on disk */
    VEC(struct host_free) ready;  /* unmapped on disk; requests may still be inside */

    /* flushing: flush.c */
    bool unflushed; /* something was written since the last device flush began */
    bool flush_running;
    uint64_t flush_started, flush_done; /* runs */
    int flush_rc;                       /* of the last run */
    struct wait_queue flush_wait;
    VEC(uint32_t) l1_dirty;       /* indices */
    VEC(uint32_t) reftable_dirty; /* indices */
    uint64_t reftable_making;     /* index + 1 of a block that is not on disk yet; 0: none */

    struct ack ack;            /* the journal of changes, if there is one */
    struct recover_view *view; /* read-only: what a killed process's journal lays over; owned */
    uint64_t old_seq;          /* records below were there at the last image_write_back_old */
    bool was_unwritten;        /* something else was */
    uint64_t old_run;          /* the last flush run that had begun then */
    struct wait_queue journal_room;

    struct grow grow; /* of the device */

    struct image_stats stats;
};

/* ---- guest addresses ---- */
static inline uint64_t guest_cluster(const struct image *img, uint64_t guest_off)
{
    return guest_off >> img->hdr.cluster_bits;
}
static inline uint64_t in_cluster(const struct image *img, uint64_t off)
{
    return off & (img->hdr.cluster_size - 1);
}
static inline uint64_t l1_index(const struct image *img, uint64_t guest_off)
{
    return guest_off >> (img->hdr.cluster_bits + img->hdr.l2_bits);
}
static inline uint64_t slice_key(const struct image *img, uint64_t guest_off)
{
    return guest_off >> (img->hdr.cluster_bits + img->slice_bits);
}
static inline unsigned slice_index(const struct image *img, uint64_t guest_off)
{
    return (unsigned)(guest_cluster(img, guest_off) & ((1u << img->slice_bits) - 1));
}
/* First guest byte behind the slice. */
static inline uint64_t slice_end(const struct image *img, uint64_t guest_off)
{
    return (slice_key(img, guest_off) + 1) << (img->hdr.cluster_bits + img->slice_bits);
}
/* The next len bytes of an iterator as one of their own. */
static inline struct iov_iter iter_sub(const struct iov_iter *it, size_t len)
{
    struct iov_iter sub = *it;

    sub.left = len;
    return sub;
}
static inline unsigned sub_index(const struct image *img, uint64_t guest_off)
{
    return (unsigned)(in_cluster(img, guest_off) >> img->hdr.subcluster_bits);
}

/* ---- image.c ---- */
/* Metadata contradicts itself: stops all writes, sets the corrupt bit in the header on disk.
 * Returns -EUCLEAN. */
SUSPENDS int image_corrupt(struct image *img, const char *fmt, ...) PRINTF_LIKE(2, 3);
/* A metadata write or flush failed: the image takes no more writes. Returns -EIO. */
int image_fail(struct image *img, int rc);
/* 0, or why this image takes no writes now: -EROFS, -EUCLEAN, -EIO. */
int image_check_writable(const struct image *img);
/* Writes bytes of the header in place; no flush. */
SUSPENDS int image_poke_header(struct image *img, unsigned off, const void *buf, size_t len);

/* ---- record.c: changes of the map into the journal ---- */
/* Places in the journal that a step has reserved; unused while changes are not recorded. */
struct room {
    unsigned left;
};
/* Room for the entries of clusters in [guest_off, +len), and for a table. Holding nothing. */
SUSPENDS int room_take(struct image *img, uint64_t guest_off, uint64_t len, struct room *ret);
void room_drop(struct image *img, struct room *room);
/* One entry more; rec->nr is 0 at first. Like changes gather in rec until record_put. */
void record_entry(struct image *img, struct room *room, struct journal_rec *rec, uint64_t guest_off,
                  struct l2_entry old, struct l2_entry new);
void record_put(struct image *img, struct room *room, struct journal_rec *rec);
void record_table(struct image *img, struct room *room, uint64_t index, uint64_t old, uint64_t new);
/* A refcount block that the table on disk does not name yet; its place first. Under alloc_lock. */
SUSPENDS int room_for_block(struct image *img);
void record_block(struct image *img, uint64_t index, uint64_t old);
/* The run in the pool has changed: see journal_run_set. */
void record_run(struct image *img, struct host_run *run);
/* Records below seq are on the device. */
void record_trim(struct image *img, uint64_t seq);

/* ---- meta.c: which clusters hold metadata ---- */
int meta_add(struct image *img, uint64_t first, uint64_t nr, enum meta_kind kind);
void meta_remove(struct image *img, uint64_t first, uint64_t nr);
bool meta_none_in(const struct image *img, uint64_t first, uint64_t nr);
enum meta_kind meta_get(const struct image *img, uint64_t cluster);
SUSPENDS int meta_load(struct image *img,
                       struct err *err); /* all of the image's; marks bad L1 entries */
void meta_clear(struct image *img);
/* Writes zeroes to [off, end): nothing is unmapped, the space is to be there. New tables need that:
 * the file must reach that far before something points there, and reserved space is not enough.
 * Writing into that later takes room of a file system that may be full then, when the writes that
 * need the table were answered. */
SUSPENDS int meta_write_zeroes(struct blk *blk, uint64_t off, uint64_t end);
/* The same for L1 and refcount table of an image that others made; best effort. Nothing else
 * writes now. */
SUSPENDS void meta_back_tables(struct image *img);
/* Marks L1 entries that no image may have: all that a read-only image looks at. */
void meta_check_l1(struct image *img);
/* Clusters from here on are outside of the file: nothing may point there. */
uint64_t image_host_limit(const struct image *img);
/* Guest data may lie in this host cluster. */
bool meta_may_hold_data(const struct image *img, uint64_t cluster);

/* ---- claim.c ---- */
/* Takes the clusters if nobody has one of them: true. Else sleeps until the first one in the way
 * is given back: false, and the caller looks at the map again. */
SUSPENDS bool claim_take(struct image *img, struct claim *claim, uint64_t first, uint64_t last);
/* Writes to parts of the clusters that [start, end) does not cover may join from now on. */
void claim_open(struct claim *claim, uint64_t start, uint64_t end);
/* Goes along with the open claim on the clusters of join->guest_off, as far as it reaches: sleeps
 * until it is dropped and returns true; join->done tells whether join->len bytes are written, else
 * the caller looks at the map again. False at once where there is no such claim. */
SUSPENDS bool claim_join(struct image *img, struct join *join);
/* Wakes those who wait and those who joined. */
void claim_drop(struct claim *claim);

/* ---- map.c ---- */
/* Needs the slice of guest_off, pinned. -ENOENT: there is no L2 table (all unallocated). */
SUSPENDS int map_pin(struct image *img, uint64_t guest_off, struct slice **ret);
/* First extent of [guest_off, +len) as this slice tells it. -EUCLEAN. */
int map_in_slice(struct image *img, const struct slice *slice, uint64_t guest_off, uint64_t len,
                 struct extent *ret);
/* The first extent without waiting: 0, -EUCLEAN, or -EAGAIN if a slice has to be loaded. */
int map_cached(struct image *img, uint64_t guest_off, uint64_t len, struct extent *ret);
/* An entry that points where no data may be, checked where it counts. */
bool map_entry_is_sane(struct image *img, struct l2_entry e);
/* In-place prefix of a write in this slice: see image_map_in_place. */
uint64_t map_in_place(struct image *img, const struct slice *slice, uint64_t guest_off,
                      uint64_t len, uint64_t *ret_host);
/* Makes the L2 table of guest_off exist and belong to this image alone. */
SUSPENDS int map_own_table(struct image *img, uint64_t guest_off, struct room *room);

/* ---- alloc.c ---- */
SUSPENDS int alloc_open(struct image *img, struct err *err);
/* Up to `want` clusters in one run: refcount 1 on disk, content undefined unless fresh. -ENOSPC;
 * -ENOBUFS: not before the device is longer, see grow.c. */
SUSPENDS int alloc_clusters(struct image *img, uint64_t want, struct host_run *ret);
/* Unused after all: back into the pool, no longer fresh. */
void alloc_give_back(struct image *img, uint64_t first, uint64_t nr);
/* A reference was taken out of the map in memory; counted down once that is safe. */
void alloc_free(struct image *img, uint64_t first, uint64_t nr, bool discard);
/* For tables: nr clusters in one piece, at the end; -ENOSPC, -ENOBUFS. */
SUSPENDS int alloc_contiguous(struct image *img, uint64_t nr, struct host_run *ret);
/* Counts down what nobody can reach any more. */
SUSPENDS int alloc_release(struct image *img);
/* Gives back unused parts of runs and cuts the file's end off. */
SUSPENDS int alloc_finish(struct image *img);
/* The end of all that is counted, in bytes. */
SUSPENDS int alloc_end(struct image *img, uint64_t *ret);
/* Nothing below the end is left to be looked through for free clusters. */
bool alloc_knows_all(const struct image *img);

/* ---- grow.c: devices that can be made longer; nothing to do for others ---- */
void grow_init(struct image *img);
/* Ends the coroutine; who waits looks again. */
SUSPENDS void grow_stop(struct image *img);
/* The end has moved on. */
void grow_note_end(struct image *img, uint64_t old_end);
/* Why the allocator cannot go up to there: -ENOSPC, or -ENOBUFS. */
int grow_no_room(struct image *img, uint64_t clusters);
/* An extension may make room: no need to look hard for it elsewhere. */
bool grow_may_help(const struct image *img);
/* Space below the end has become free. */
void grow_look_again(struct image *img);
/* After -ENOBUFS, holding nothing: 0, look again, or -ENOSPC. patient: waits while there is no
 * room.
 */
SUSPENDS int grow_wait(struct image *img, bool patient);
/* Test hook, as flush_mutation. */
enum grow_mutation {
    GROW_AS_IS,
    GROW_NOT_AHEAD, /* nothing is asked for before somebody waits */
    GROW_NO_WAKE,   /* who waits is not told */
};
extern enum grow_mutation grow_mutation;

/* ---- refcount.c: all under alloc_lock ---- */
SUSPENDS int refcount_get(struct image *img, uint64_t cluster, uint64_t *ret);
/* Free clusters become counted, on disk; *ret_done tells how far it came. */
SUSPENDS int refcount_take(struct image *img, uint64_t first, uint64_t nr, uint64_t *ret_done);
/* One reference less each; the list is sorted. -EUCLEAN where there is none. */
SUSPENDS int refcount_drop(struct image *img, const struct host_free *list, size_t nr);
/* First run of free clusters at or behind `cluster`, in its slice (nr 0: none) and where to look
 * on. */
SUSPENDS int refcount_find_free(struct image *img, uint64_t cluster, uint64_t limit,
                                struct host_run *ret, uint64_t *ret_next);
/* The end of what is counted, looking down from limit. */
SUSPENDS int refcount_find_last(struct image *img, uint64_t limit, uint64_t *ret_end);
/* 0: the refcount block for `cluster` is there. 1: something was made for that at the image's end,
 * which has moved: ask again, for the end first. */
SUSPENDS int refcount_cover(struct image *img, uint64_t cluster);
/* Makes a refcount block for an area known to be free, in `cluster`, which lies in it. */
SUSPENDS int refcount_block_in(struct image *img, uint64_t index, uint64_t cluster);

/* ---- cow.c ---- */
/* Everything in the range is known to read as zero without I/O. */
bool cow_is_zero(struct image *img, uint64_t guest_off, uint64_t len,
                 const struct image_below *below);
/* A write of [guest_off, +len) at host_off, widened by what it leaves open of its first and last
 * unit: `head` bytes before and `tail` bytes behind it. `fresh`: the host space reads as zero.
 * Joins of the claim that are taken lie in head and tail; others are taken on the way if they do,
 * then the claim is closed. */
struct cow_write {
    uint64_t guest_off, len, host_off;
    uint64_t head, tail;
    bool fresh;
    struct claim *claim;
};
SUSPENDS int cow_write(struct image *img, const struct cow_write *w, struct iov_iter *iov,
                       const struct image_below *below);

/* ---- read.c ---- */
SUSPENDS int read_range(struct image *img, uint64_t guest_off, uint64_t len, struct iov_iter *iov,
                        const struct image_below *below);
void read_forget_packed(struct image *img, uint64_t first, uint64_t nr);

/* ---- write.c ---- */
/* A write as image_write does it, inside a request. *ret_durable is cleared if the mapping is not
 * on disk yet */
SUSPENDS int write_range(struct image *img, uint64_t guest_off, uint64_t len, struct iov_iter *iov,
                         unsigned flags, const struct image_below *below, bool *ret_durable);
/* The references of an entry that is no longer in the map. */
void write_free_old(struct image *img, uint64_t guest_off, struct l2_entry e, bool discard);
/* Subclusters of the cluster that starts at guest_off which [start, end) touches. */
uint32_t write_sub_mask(const struct image *img, uint64_t guest_off, uint64_t start, uint64_t end);
/* Holding nothing, where rc is -ENOBUFS: waits for room unless flags say
 * IMAGE_NO_WAIT. 0: look again; else the error. */
SUSPENDS int write_wait_room(struct image *img, unsigned flags, int rc);
/* Lets dirty metadata be written back before it takes the whole cache. Holding nothing. */
SUSPENDS int write_throttle(struct image *img);

/* ---- zero.c ---- */
/* Empties the entries of whole clusters, for shrinking. */
SUSPENDS int zero_unmap(struct image *img, uint64_t guest_off, uint64_t len);

/* ---- flush.c ---- */
/* As image_flush, but what was unmapped is not counted down: under alloc_lock, too. */
SUSPENDS int flush_to_disk(struct image *img);
/* Test hook: leave a step of the order out. The tests prove with it that they would notice. */
enum flush_mutation {
    FLUSH_AS_IS,
    FLUSH_SKIP_BEFORE_L2,       /* no device flush between data and L2 */
    FLUSH_L1_FIRST,             /* a new L2 table is named before it is flushed */
    FLUSH_SKIP_REFCOUNTS,       /* refcounts of a run are not written */
    FLUSH_SKIP_QUARANTINE,      /* freed clusters are reused at once */
    FLUSH_SKIP_BEFORE_REFTABLE, /* the table points to a refcount block that is not there yet */
    ACK_SKIP_ENTRY,             /* some changes of entries are not recorded */
    ACK_SKIP_TABLE,             /* new L2 tables are not */
    ACK_SKIP_BLOCK,             /* new refcount blocks are not */
    ACK_TRIM_EARLY,             /* records go when the flush begins */
    ACK_STALE_RUNS,             /* clusters that are in use stay noted as unused */
};
extern enum flush_mutation flush_mutation;

#endif
