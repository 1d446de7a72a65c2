/*
 * Copying an image file as it is, within a file system or across: all of its data and none of its
 * holes. The file system shares the blocks where it can (reflink), or copies them itself (NFS,
 * copy_file_range); else they are read and written here.
 *
 * The caller holds the source: nobody writes to it. Blocking calls: the manager's process has
 * nothing to run meanwhile but the display of what is done, which each piece updates.
 */
#include <fcntl.h>
#include <linux/fs.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>
#include "base/bits.h"
#include "base/check.h"
#include "rt/buf.h"
#include "rt/reactor.h"
#include "rt/timer.h"
#include "vol/copyfile.h"

#define PIECE_BYTES (8 * MIB)
#define BUF_BYTES   MIB
#define HOLE_BYTES  (64 * KIB) /* a run of zeroes this long becomes a hole */

struct copying {
    int from, to;
    bool by_hand; /* copy_file_range does not work between the two */
    char *buf;
    struct copy_meter *meter;
};

void copy_meter_add(struct copy_meter *meter, uint64_t bytes)
{
    meter->done += bytes;
    if (meter->ctx->progress)
        meter->ctx->progress(meter->ctx->ctx, MIN(meter->done, meter->total), meter->total);
}

SUSPENDS static void pace(struct copy_meter *meter, uint64_t bytes)
{
    if (!meter->speed)
        return;
    timer_sleep_until(meter->next_ns);
    meter->next_ns = MAX(meter->next_ns, reactor_now()) +
                     (uint64_t)((double)bytes * (double)NSEC_PER_SEC / (double)meter->speed);
}

static int write_full(int fd, const char *buf, size_t len, off_t off)
{
    while (len > 0) {
        ssize_t n = pwrite(fd, buf, len, off);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return -errno;
        buf += n;
        len -= (size_t)n;
        off += n;
    }
    return 0;
}

static int write_data(const struct copying *c, size_t len, off_t off)
{
    int rc = 0;

    for (size_t pos = 0, n; pos < len && rc == 0; pos += n) {
        n = MIN(len - pos, HOLE_BYTES);
        if (!buf_is_zero(c->buf + pos, n))
            rc = write_full(c->to, c->buf + pos, n, off + (off_t)pos);
    }
    return rc;
}

/* Copies some of the range: the number of bytes, 0 at the end of the source. */
static ssize_t copy_some(struct copying *c, off_t off, size_t len)
{
    if (!c->by_hand) {
        off_t in = off, out = off;
        ssize_t n = copy_file_range(c->from, &in, c->to, &out, len, 0);

        if (n >= 0)
            return n;
        if (errno == EINTR)
            return copy_some(c, off, len);
        if (errno != EXDEV && errno != EINVAL && errno != ENOSYS && errno != EOPNOTSUPP)
            return -errno;
        c->by_hand = true;
    }
    ssize_t n;
    do
        n = pread(c->from, c->buf, MIN(len, BUF_BYTES), off);
    while (n < 0 && errno == EINTR);
    if (n <= 0)
        return n < 0 ? -errno : 0;
    int rc = write_data(c, (size_t)n, off);
    return rc < 0 ? rc : n;
}

SUSPENDS static int copy_range(struct copying *c, off_t off, off_t end)
{
    while (off < end) {
        size_t len = (size_t)MIN((uint64_t)(end - off), PIECE_BYTES);

        pace(c->meter, len);
        for (size_t pos = 0; pos < len;) {
            ssize_t n = copy_some(c, off + (off_t)pos, len - pos);

            if (n <= 0)
                return n < 0 ? (int)n : -EIO; /* it became shorter under our hands */
            pos += (size_t)n;
        }
        copy_meter_add(c->meter, len);
        /* neither file is read again soon: they must not push out what guests use */
        sync_file_range(c->to, off, (off_t)len, SYNC_FILE_RANGE_WRITE);
        posix_fadvise(c->from, off, (off_t)len, POSIX_FADV_DONTNEED);
        off += (off_t)len;
    }
    return 0;
}

SUSPENDS static int copy_data(struct copying *c, off_t len)
{
    int rc = 0;

    for (off_t off = 0; off < len && rc == 0;) {
        off_t start = lseek(c->from, off, SEEK_DATA);

        if (start < 0 && errno == ENXIO)
            break;
        bool all = start < 0; /* a file system that knows no holes */
        off_t end = all ? len : lseek(c->from, start, SEEK_HOLE);
        if (end < 0)
            return -errno;
        end = MIN(end, len);
        rc = copy_range(c, all ? off : start, end);
        off = end;
    }
    return rc;
}

SUSPENDS static int copy_contents(struct copying *c, struct err *err)
{
    struct stat st;

    if (fstat(c->from, &st) < 0)
        return err_errno(err, -errno, "read the source's size");
    if (ioctl(c->to, FICLONE, c->from) == 0) {
        copy_meter_add(c->meter, (uint64_t)st.st_blocks * 512);
        return 0;
    }
    int rc = ftruncate(c->to, st.st_size) < 0 ? -errno : 0;
    crash_point("file-copy-begun");
    if (rc == 0)
        rc = copy_data(c, st.st_size);
    return rc < 0 ? err_errno(err, rc, "copy") : 0;
}

int file_copy(const char *from, const char *to, struct copy_meter *meter, struct err *err)
{
    _cleanup_(closep) int in = open(from, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    _cleanup_(freep) char *buf = malloc(BUF_BYTES);

    if (in < 0 || !buf)
        return err_errno(err, in < 0 ? -errno : -ENOMEM, "open '%s'", from);
    _cleanup_(closep) int out = open(to, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (out < 0)
        return err_errno(err, -errno, "create '%s'", to);
    struct copying c = {.from = in, .to = out, .buf = buf, .meter = meter};
    int rc = copy_contents(&c, err);
    crash_point("file-copied");
    if (rc == 0 && fsync(out) < 0)
        rc = err_errno(err, -errno, "fsync");
    return rc < 0 ? err_prefix(err, rc, "'%s' to '%s'", from, to) : 0;
}

bool file_share(const char *from, const char *to)
{
    _cleanup_(closep) int in = open(from, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    _cleanup_(closep) int out = in < 0 ? -1 : open(to, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);

    if (out < 0)
        return false;
    if (ioctl(out, FICLONE, in) == 0)
        return true;
    unlink(to);
    return false;
}
