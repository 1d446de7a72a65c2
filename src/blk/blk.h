/*
 * A flat array of bytes: read, write, zero, discard, flush.
 *
 * A `struct blk` is one file, block device, memory or wrapper of another blk. Requests of any
 * offset and length are taken; where the device needs alignment (direct I/O), blk.c reads and
 * writes through bounce buffers and serialises read-modify-write of the same device block.
 * Reading past the end of the device, inside the caller's range, gives zeroes; writing past the end
 * grows a file and is refused (-ENOSPC) on a device of fixed length.
 *
 * A write is in the device's volatile cache when it returns; blk_flush makes all writes that
 * returned before it durable. A failed flush (or BLK_FUA write, unless for lack of space) is
 * sticky: every later flush and write is -EIO.
 */
#ifndef VARVE_BLK_BLK_H
#define VARVE_BLK_BLK_H

#include <stdbool.h>
#include <stdint.h>
#include "base/err.h"
#include "rt/buf.h"
#include "rt/co.h"
#include "rt/wait.h"

struct blk;

enum blk_flags {
    BLK_FUA = 1,      /* durable when the call returns */
    BLK_MAY_UNMAP = 2 /* blk_zero may deallocate */
};

struct blk_stats { /* requests that reached the device, and bytes */
    uint64_t reads, read_bytes, writes, write_bytes, flushes, zeroes, discards, bounced;
};

/* What a device implements. Offsets and lengths are multiples of `align` (of status: any) and
 * buffers are aligned to `mem_align`, each piece a multiple of `align`, when these ops are called.
 * A range ends less than `align` behind `len` at most, but for writev, zero and preallocate of
 * devices that grow: blk.c then sets `len`. readv and writev advance iov by len on success. All
 * may wait. Those behind writev, and writev of a device never writable, may be NULL. */
struct blk_ops {
    const char *name;
    int (*readv)(struct blk *blk, uint64_t off, uint64_t len, struct iov_iter *iov);
    int (*writev)(struct blk *blk, uint64_t off, uint64_t len, struct iov_iter *iov,
                  unsigned flags);
    int (*flush)(struct blk *blk);
    int (*zero)(struct blk *blk, uint64_t off, uint64_t len,
                unsigned flags);                                 /* -ENOTSUP: written */
    int (*discard)(struct blk *blk, uint64_t off, uint64_t len); /* -ENOTSUP: ignored */
    int (*resize)(struct blk *blk, uint64_t len);
    /* data or hole at off: *ret_len > 0 bytes of the same kind, at most len */
    int (*status)(struct blk *blk, uint64_t off, uint64_t len, bool *ret_data, uint64_t *ret_len);
    /* see blk_hole_bytes; NULL: all of it may be, if there is a status */
    uint64_t (*hole_bytes)(struct blk *blk);
    /* reserves space for [off, off+len) without changing content; grows the file; -ENOTSUP ok */
    int (*preallocate)(struct blk *blk, uint64_t off, uint64_t len);
    /* it has len bytes or more when it returns, *ret_len of them; len 0: only tells. NULL: cannot
     */
    int (*extend)(struct blk *blk, uint64_t len, uint64_t *ret_len, struct err *err);
    /* which file or device it is, for as long as the host is up: a file as its file system numbers
     * it; a block device: dev is UINT64_MAX, ino its number; one with a handle: both are a hash of
     * that. NULL: it is nowhere to be found again */
    int (*identity)(struct blk *blk, uint64_t *ret_dev, uint64_t *ret_ino);
    void (*close)(struct blk *blk); /* frees the struct around blk, not its name */
};

struct blk {
    const struct blk_ops *ops;
    char *name;         /* for messages: the path; owned */
    uint64_t len;       /* bytes now */
    uint64_t ready_len; /* extendable: bytes that blk_resize_prepare has made ready */
    uint32_t align;     /* offset and length of a device request; power of two, >= 1 */
    uint32_t mem_align; /* buffer address */
    uint32_t io_unit;   /* metadata unit: max(512, physical block) */
    bool writable;
    bool fixed_len;      /* block device: cannot grow by writing */
    bool extendable;     /* with fixed_len: but by blk_extend */
    bool zero_tail;      /* space gained by growing reads as zero (files) */
    bool fresh_zero;     /* space never written reads as zero (files; not block devices) */
    bool flush_failed;   /* sticky */
    struct list changes; /* blk.c's own: writes under way that others may have to wait for */
    struct wait_queue changes_wait;
    unsigned nr_rmw; /* of them, those that read first */
    struct blk_stats stats;
};

/* ---- for devices ---- */
/* Fills the common part; name is copied. */
int blk_init(struct blk *blk, const struct blk_ops *ops, const char *name);

/* ---- for users; all may wait, none keeps the caller's memory. readv and writev advance iov by
 * len on success; after an error its position is anywhere. Not writable: -EROFS. ---- */
SUSPENDS int blk_readv(struct blk *blk, uint64_t off, uint64_t len, struct iov_iter *iov);
SUSPENDS int blk_writev(struct blk *blk, uint64_t off, uint64_t len, struct iov_iter *iov,
                        unsigned flags);
SUSPENDS int blk_read(struct blk *blk, uint64_t off, void *buf, size_t len);
SUSPENDS int blk_write(struct blk *blk, uint64_t off, const void *buf, size_t len);
SUSPENDS int blk_zero(struct blk *blk, uint64_t off, uint64_t len, unsigned flags);
SUSPENDS int blk_discard(struct blk *blk, uint64_t off, uint64_t len);
SUSPENDS int blk_flush(struct blk *blk);
SUSPENDS int blk_resize(struct blk *blk, uint64_t len);
/* The long part of growing a device that is extendable, beside other requests: it is extended, and
 * zeroes are written to what is new of it, which blk_resize then shows. -ENOTSUP: it is not. */
SUSPENDS int blk_resize_prepare(struct blk *blk, uint64_t len, struct err *err);
SUSPENDS int blk_preallocate(struct blk *blk, uint64_t off, uint64_t len);
/* Holes read as zero. A write that was answered before the call is seen; one under way need not be.
 */
SUSPENDS int blk_status(struct blk *blk, uint64_t off, uint64_t len, bool *ret_data,
                        uint64_t *ret_len);
/* About how much of the device takes no space; 0: blk_status is not worth asking for holes. Cheap,
 * and not always of this very moment. */
SUSPENDS uint64_t blk_hole_bytes(struct blk *blk);
/* See blk_ops.identity. -ENOTSUP: it has none. */
int blk_identity(struct blk *blk, uint64_t *ret_dev, uint64_t *ret_ino);
/* Waits for nothing in flight: the caller has drained it. Frees blk. NULL is fine. */
SUSPENDS void blk_close(struct blk *blk);

/* ---- file.c ---- */
enum blk_lock {                 /* see lock.c; what other programs may do while we have it open */
                BLK_LOCK_NONE,  /* takes no lock (img info -U) */
                BLK_LOCK_READ,  /* we read; others may read, not write */
                BLK_LOCK_WRITE, /* we write; others may only look on, as `qemu-img info -U` does */
};
struct blk_file_opts {
    bool writable;
    bool direct;   /* O_DIRECT; falls back to buffered where the file system refuses it */
    bool create;   /* O_CREAT|O_EXCL, mode 0644 */
    bool truncate; /* with create: an existing file is emptied instead of refused */
    enum blk_lock lock;
};
/* Opens a regular file or block device (others are refused). Errors: -errno of open; -EBUSY when
 * another program holds it. The text of err names the path. */
SUSPENDS int blk_file_open(const char *path, const struct blk_file_opts *opts, struct blk **ret,
                           struct err *err);
/* From a descriptor (taken on success). */
SUSPENDS int blk_file_from_fd(int fd, const char *name, const struct blk_file_opts *opts,
                              struct blk **ret, struct err *err);
int blk_file_fd(const struct blk *blk); /* -1 if it is no file */
/* Changes access of an open file: write -> read and back (a layer that becomes a backing file, or
 * a commit target). Re-opens through /proc/self/fd; 0 or -errno, then nothing changed. */
SUSPENDS int blk_file_reopen(struct blk *blk, bool writable, enum blk_lock lock, struct err *err);
void blk_file_set_name(struct blk *blk, const char *path); /* the file was renamed */

/* ---- provider.c: block devices that a volume manager looks after ---- */
/* All but owns() may wait; called on the reactor of whoever opens or writes. */
struct blk_provider {
    bool (*owns)(const char *path); /* text only */
    /* The device is there when it returns, and open()ed as *ret_node: a path may be a second name
     * that has no node of its own. *ret_handle tells it from the others whatever it is renamed to.
     * The caller frees both. */
    int (*provide)(const char *path, char **ret_node, char **ret_handle, struct err *err);
    /* It has `len` bytes or more when it returns. -ENOSPC: there is no room, as yet. */
    int (*extend)(const char *handle, uint64_t len, struct err *err);
};
/* One a process, before the first device is opened; stays the caller's. NULL: none. blk_file_open()
 * calls provide() for the paths it owns. */
void blk_set_provider(const struct blk_provider *provider);
/* Is the path one of the provider's, whose node may not be there yet? *ret_id: as good as a file's
 * number to tell paths apart, though two names of one device have two. */
bool blk_path_is_provided(const char *path, uint64_t *ret_id);
/* Can a device of fixed length be made longer? */
bool blk_is_extendable(const struct blk *blk);
/* Asks for at least `len` bytes and takes note of the length the device has then; 0: takes note of
 * it alone, which may be less than before. -ENOTSUP; -ENOSPC: there is no room, as yet. */
SUSPENDS int blk_extend(struct blk *blk, uint64_t len, struct err *err);
/* What blk_identity() says of the device with this handle: of what stands behind its last slash,
 * which is never given twice. Of a logical volume: its UUID, so that it is the same however it is
 * opened. */
void blk_handle_identity(const char *handle, uint64_t *ret_dev, uint64_t *ret_ino);

/* ---- lock.c: byte-range OFD locks as QEMU takes them ---- */
/* 0, -EBUSY with who in err if /proc tells (after a few tries, some 50 ms), or -errno. Blocks: for
 * helper threads and plain code. Locks go with the descriptor. */
int blk_lock_fd(int fd, enum blk_lock lock, const char *name, struct err *err);

/* ---- mem.c ---- */
/* Sparse memory of `len` bytes (64 KiB pages on demand). align as given (1 = any). */
int blk_mem_new(uint64_t len, uint32_t align, struct blk **ret);

/* ---- over.c: writes kept in memory, over a child that is not changed ---- */
/* The child stays the caller's, and open for as long. */
int blk_over_new(struct blk *child, struct blk **ret);

/* ---- fault.c: errors, delays and breakpoints on chosen requests of a child ---- */
enum blk_req {
    BLK_REQ_READ = 1,
    BLK_REQ_WRITE = 2,
    BLK_REQ_FLUSH = 4,
    BLK_REQ_ZERO = 8,
    BLK_REQ_DISCARD = 16,
    BLK_REQ_RESIZE = 32,
    BLK_REQ_ANY = 63
};
/* Wraps child (taken: closed with the wrapper). */
int blk_fault_new(struct blk *child, struct blk **ret);
/* The n-th (from 1) request of these kinds from now on fails with rc, once or from then on. */
void blk_fault_fail(struct blk *blk, unsigned reqs, uint64_t nth, int rc, bool sticky);
void blk_fault_clear(struct blk *blk);
/* The next request of these kinds overlapping [off, off+len) stops before it reaches the child
 * until blk_fault_resume(). */
void blk_fault_break(struct blk *blk, unsigned reqs, uint64_t off, uint64_t len);
SUSPENDS void
blk_fault_wait_stopped(struct blk *blk); /* until a request stands at the breakpoint */
void blk_fault_resume(struct blk *blk);
uint64_t blk_fault_count(const struct blk *blk, unsigned reqs); /* requests seen of these kinds */

/* ---- crash.c: memory with a volatile cache ---- */
/* Keeps what was not flushed apart from the stable content. A power cut applies any subset of
 * the unflushed writes, in any order that a device could take, torn at 512 bytes. Requests pass
 * io_point(). Length may grow (resize is metadata: lost or kept likewise). */
int blk_crash_new(uint64_t len, struct blk **ret);
/* The device as it is after a power cut with this seed: a new blk_mem with the surviving content.
 * The crash device itself stays usable, also in plain code and after the simulation was stopped;
 * what survived is then read in another run. Also tells how many unflushed 512-byte sectors there
 * were and how many of them were lost. */
struct blk_crash_report {
    uint64_t unflushed_sectors, lost_sectors, torn_writes;
};
int blk_crash_cut(struct blk *blk, uint64_t seed, struct blk **ret,
                  struct blk_crash_report *report);
/* The same, and the power is on again: the device holds what survived, and nothing else. */
int blk_crash_restart(struct blk *blk, uint64_t seed, struct blk_crash_report *report);
/* The process that used it was killed, behind a stopped simulation; the device never lost power.
 * What had completed is there, as unflushed as it was; what was under way took effect, did not, or
 * in parts. */
int blk_crash_kill(struct blk *blk, uint64_t seed);

#endif
