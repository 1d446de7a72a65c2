/*
 * A regular file or block device through the ring: the requests. Opening is in file_open.c.
 *
 * Reads and writes go on after a short count. A file that ends inside a read gives zeroes; a
 * device that does is an error. With direct I/O a short count that is no multiple of `align` can
 * only be the end of the file.
 */
#include <fcntl.h>
#include <limits.h>
#include <linux/falloc.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include "base/bits.h"
#include "blk/internal.h"
#include "rt/offload.h"
#include "rt/reactor.h"
#include "rt/timer.h"

/* Elements of a vector that is built on the stack when the caller's cannot be used as it is. */
#define PART_IOVS 64u
/* How long -EAGAIN is put up with: a second. */
#define AGAIN_WAIT (1 * NSEC_PER_MSEC)
#define AGAIN_MAX  1000u

/* Waits and returns true if the call that returned rc should be repeated. */
SUSPENDS static bool call_again(ssize_t rc, unsigned *tries)
{
    if ((rc != -EINTR && rc != -EAGAIN) || ++*tries > AGAIN_MAX)
        return false;
    if (rc == -EAGAIN)
        timer_sleep(AGAIN_WAIT);
    else
        reactor_yield();
    return true;
}

static bool ends_with_vector(const struct iov_iter *iov)
{
    size_t sum = 0;

    for (unsigned i = 0; i < iov->nr; i++)
        sum += iov->iov[i].iov_len;
    return sum == iov->left;
}

/* The next len bytes as a vector: the caller's own if both end there (an iterator may stop short of
 * its vector's end), else a part of it in part[]. */
static const struct iovec *vector_of(const struct iov_iter *iov, uint64_t len, struct iovec *part,
                                     unsigned *ret_nr)
{
    if (iov->skip == 0 && iov->left == len && iov->nr <= IOV_MAX && ends_with_vector(iov)) {
        *ret_nr = iov->nr;
        return iov->iov;
    }
    size_t covered;
    *ret_nr = iov_iter_peek(iov, len, part, PART_IOVS, &covered);
    return part;
}

SUSPENDS static int file_readv(struct blk *blk, uint64_t off, uint64_t len, struct iov_iter *iov)
{
    struct file_blk *f = file_of(blk);
    unsigned tries = 0;

    while (len > 0) {
        struct iovec part[PART_IOVS];
        unsigned nr;
        const struct iovec *vec = vector_of(iov, len, part, &nr);
        ssize_t n = io_readv(f->fd, vec, nr, off);

        if (n < 0 && call_again(n, &tries))
            continue;
        if (n < 0)
            return (int)n;
        iov_iter_advance(iov, (size_t)n);
        off += (uint64_t)n;
        len -= (uint64_t)n;
        if (len > 0 && (n == 0 || !is_aligned((uint64_t)n, blk->align))) {
            if (f->is_dev)
                return -EIO;
            iov_iter_zero(iov, len);
            return 0;
        }
    }
    return 0;
}

/* ---- what is known of holes ---- */

/* Before the write is answered: whoever asks from then on must not be told of a hole. */
static void forget_hole(struct file_blk *f, uint64_t off, uint64_t len)
{
    f->writes++;
    if (!f->seen.data && off < f->seen.end && f->seen.off < off + len)
        f->seen.end = 0;
}

/* Data may have become a hole. That need not be told at once, but should be. */
static void forget_data(struct file_blk *f)
{
    f->writes++;
    f->seen.end = 0;
    f->hole_bytes_at = 0;
}

/* ---- writing ---- */

SUSPENDS static int write_all(struct blk *blk, uint64_t off, uint64_t len, struct iov_iter *iov,
                              unsigned flags)
{
    struct file_blk *f = file_of(blk);
    unsigned tries = 0;

    while (len > 0) {
        struct iovec part[PART_IOVS];
        unsigned nr;
        const struct iovec *vec = vector_of(iov, len, part, &nr);
        ssize_t n = io_writev(f->fd, vec, nr, off, flags & BLK_FUA ? IO_DSYNC : 0);

        if (n < 0 && call_again(n, &tries))
            continue;
        if (n < 0)
            return (int)n;
        uint64_t done = align_down((uint64_t)n, blk->align);
        if (done == 0)
            return -EIO;
        iov_iter_advance(iov, done);
        off += done;
        len -= done;
    }
    return 0;
}

SUSPENDS static int file_writev(struct blk *blk, uint64_t off, uint64_t len, struct iov_iter *iov,
                                unsigned flags)
{
    int rc = write_all(blk, off, len, iov, flags);

    forget_hole(file_of(blk), off, len); /* a part of a failed one may be there, too */
    return rc;
}

SUSPENDS static int file_flush(struct blk *blk)
{
    unsigned tries = 0;
    int rc;

    do {
        rc = io_fsync(file_of(blk)->fd, true);
    } while (rc == -EINTR && call_again(rc, &tries));
    return rc;
}

/* Positive numbers never come back; -EOPNOTSUPP becomes -ENOTSUP on every libc. */
SUSPENDS static int file_fallocate(struct file_blk *f, int mode, uint64_t off, uint64_t len)
{
    unsigned tries = 0;
    int rc;

    do {
        rc = io_fallocate(f->fd, mode, off, len);
    } while (call_again(rc, &tries));
    return rc == -EOPNOTSUPP || rc == -ENOSYS || rc == -ENODEV ? -ENOTSUP : rc;
}

SUSPENDS static int punch(struct file_blk *f, uint64_t off, uint64_t len)
{
    if (f->no_punch)
        return -ENOTSUP;
    int rc = file_fallocate(f, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, off, len);
    forget_data(f);
    f->no_punch = rc == -ENOTSUP;
    return rc;
}

SUSPENDS static int zero_in_place(struct file_blk *f, uint64_t off, uint64_t len)
{
    if (f->no_zero_range)
        return -ENOTSUP;
    int mode = FALLOC_FL_ZERO_RANGE | (f->is_dev ? FALLOC_FL_KEEP_SIZE : 0);
    int rc = file_fallocate(f, mode, off, len);
    forget_data(f);
    f->no_zero_range = rc == -ENOTSUP;
    return rc;
}

/* A range that may be deallocated lies inside the file (blk.c grows files by resize then). */
SUSPENDS static int file_zero(struct blk *blk, uint64_t off, uint64_t len, unsigned flags)
{
    struct file_blk *f = file_of(blk);

    if ((flags & BLK_MAY_UNMAP)) {
        int rc = punch(f, off, len);

        return rc == -ENOTSUP ? zero_in_place(f, off, len) : rc;
    }
    int rc = zero_in_place(f, off, len);
    /* tmpfs and NFS: no ZERO_RANGE, but holes, which can be filled again */
    if (rc == -ENOTSUP && !f->is_dev) {
        rc = punch(f, off, len);
        if (rc == 0)
            rc = file_fallocate(f, 0, off, len);
    }
    return rc;
}

SUSPENDS static int file_preallocate(struct blk *blk, uint64_t off, uint64_t len)
{
    return file_fallocate(file_of(blk), 0, off, len);
}

/* ---- calls that the ring does not have: on a helper thread ---- */

struct file_call {
    int fd;
    uint64_t off, len;
};

static int do_blkdiscard(void *arg)
{
    struct file_call *c = arg;
    uint64_t range[2] = {c->off, c->len};

    return ioctl(c->fd, BLKDISCARD, range) < 0 ? -errno : 0;
}

SUSPENDS static int file_discard(struct blk *blk, uint64_t off, uint64_t len)
{
    struct file_blk *f = file_of(blk);

    if (!f->is_dev)
        return punch(f, off, len);
    if (f->no_discard)
        return -ENOTSUP;
    struct file_call c = {.fd = f->fd, .off = off, .len = len};
    int rc = offload(do_blkdiscard, &c);
    if (rc == -EOPNOTSUPP || rc == -ENOTTY) {
        f->no_discard = true;
        return -ENOTSUP;
    }
    return rc;
}

static int do_ftruncate(void *arg)
{
    struct file_call *c = arg;
    int rc;

    do {
        rc = ftruncate(c->fd, (off_t)c->len) < 0 ? -errno : 0;
    } while (rc == -EINTR);
    return rc;
}

SUSPENDS static int file_resize(struct blk *blk, uint64_t len)
{
    struct file_call c = {.fd = file_of(blk)->fd, .len = len};
    int rc = offload(do_ftruncate, &c);

    forget_data(file_of(blk));
    return rc;
}

/* ---- holes ---- */

#ifndef XFS_SUPER_MAGIC
#define XFS_SUPER_MAGIC 0x58465342
#endif

#define HOLE_BYTES_TTL (100 * NSEC_PER_MSEC)

/* enum file_place. File systems that are not in the list may be anywhere. */
static int do_find_place(void *arg)
{
    static const uint32_t local[] = {EXT4_SUPER_MAGIC, XFS_SUPER_MAGIC,  BTRFS_SUPER_MAGIC,
                                     TMPFS_MAGIC,      F2FS_SUPER_MAGIC, OVERLAYFS_SUPER_MAGIC};
    const struct file_blk *f = arg;
    struct statfs fs;

    if (fstatfs(f->fd, &fs) < 0)
        return PLACE_NETWORK;
    for (size_t i = 0; i < ARRAY_SIZE(local); i++)
        if ((uint32_t)fs.f_type == local[i])
            return PLACE_LOCAL;
    return PLACE_NETWORK;
}

struct seek_call {
    int fd;
    uint64_t off, end; /* end: of the file, as far as we know */
    struct file_seen ret;
};

static int do_seek(void *arg)
{
    struct seek_call *c = arg;
    off_t at = lseek(c->fd, (off_t)c->off, SEEK_DATA);
    bool data = at == (off_t)c->off;

    if (data)
        at = lseek(c->fd, (off_t)c->off, SEEK_HOLE);
    if (at < 0 && errno != ENXIO)
        return -errno;
    c->ret = (struct file_seen){c->off, at < 0 ? c->end : (uint64_t)at, data};
    /* the file may have changed between the two calls: never answer nothing */
    if (c->ret.end <= c->off)
        c->ret = (struct file_seen){c->off, c->off + 1, true};
    return 0;
}

/* A call that a local file system answers from memory is not worth two switches of thread. */
SUSPENDS static int call_near(struct file_blk *f, int (*fn)(void *arg), void *arg)
{
    if (f->place == PLACE_UNKNOWN)
        f->place = (enum file_place)offload(do_find_place, f);
    return f->place == PLACE_LOCAL ? fn(arg) : offload(fn, arg);
}

/* The kind of the whole extent at off. Kept, unless a write ended while we waited for the answer:
 * the answer may be older than it. */
SUSPENDS static int look_for_hole(struct file_blk *f, uint64_t off, struct file_seen *ret)
{
    struct seek_call c = {.fd = f->fd, .off = off, .end = f->blk.len};
    uint32_t writes = f->writes;
    int rc = call_near(f, do_seek, &c);

    if (rc < 0)
        return rc;
    if (writes == f->writes)
        f->seen = c.ret;
    *ret = c.ret;
    return 0;
}

SUSPENDS static int file_status(struct blk *blk, uint64_t off, uint64_t len, bool *ret_data,
                                uint64_t *ret_len)
{
    struct file_blk *f = file_of(blk);
    struct file_seen seen = f->seen;

    if (!f->is_dev && !f->no_seek && (off < seen.off || off >= seen.end))
        f->no_seek = look_for_hole(f, off, &seen) < 0;
    if (f->is_dev || f->no_seek) /* then all of it is data */
        seen = (struct file_seen){off, off + len, true};
    *ret_data = seen.data;
    *ret_len = MIN(len, seen.end - off);
    return 0;
}

static int do_fstat(void *arg)
{
    struct file_blk *f = arg;
    struct stat st;

    if (fstat(f->fd, &st) < 0)
        return -errno;
    uint64_t len = (uint64_t)st.st_size, used = (uint64_t)st.st_blocks * 512;
    f->hole_bytes = len > used ? len - used : 0;
    return 0;
}

SUSPENDS static uint64_t file_hole_bytes(struct blk *blk)
{
    struct file_blk *f = file_of(blk);
    uint64_t now = reactor_now();

    if (f->is_dev || f->no_seek)
        return 0;
    if (f->hole_bytes_at && now - f->hole_bytes_at < HOLE_BYTES_TTL)
        return f->hole_bytes;
    if (call_near(f, do_fstat, f) < 0)
        f->hole_bytes = 0;
    f->hole_bytes_at = now;
    return f->hole_bytes;
}

static int file_identity(struct blk *blk, uint64_t *ret_dev, uint64_t *ret_ino)
{
    struct stat st;

    if (file_of(blk)->handle) {
        blk_handle_identity(file_of(blk)->handle, ret_dev, ret_ino);
        return 0;
    }
    if (file_of(blk)->id_dev) {
        *ret_dev = file_of(blk)->id_dev;
        *ret_ino = file_of(blk)->id_ino;
        return 0;
    }
    if (fstat(file_of(blk)->fd, &st) < 0)
        return -errno;
    *ret_dev = S_ISBLK(st.st_mode) ? UINT64_MAX : st.st_dev;
    *ret_ino = S_ISBLK(st.st_mode) ? st.st_rdev : st.st_ino;
    return 0;
}

static int do_close(void *arg)
{
    return close(((struct file_blk *)arg)->fd) < 0 ? -errno : 0;
}

SUSPENDS static void file_close(struct blk *blk)
{
    offload(do_close, file_of(blk));
    free(file_of(blk)->handle);
    free(file_of(blk));
}

const struct blk_ops file_ops = {
    .name = "file",
    .readv = file_readv,
    .writev = file_writev,
    .flush = file_flush,
    .zero = file_zero,
    .discard = file_discard,
    .resize = file_resize,
    .status = file_status,
    .hole_bytes = file_hole_bytes,
    .preallocate = file_preallocate,
    .extend = provider_extend,
    .identity = file_identity,
    .close = file_close,
};
