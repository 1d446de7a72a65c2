/*
 * A regular file or block device: opening, what direct I/O asks of us, change of access.
 *
 * Opening runs as one call on a helper thread: open, lock, then (and only then) empty the file,
 * then look at its geometry. Who had the file locked while we waited may have put another file
 * under its name: what is locked is used only if it still is what the path names. O_DIRECT is set
 * on the open descriptor, so that a file system that refuses it has not created a file already.
 *
 * Alignment of direct I/O, in this order: statx (Linux 6.1), for devices the logical block size,
 * else trial reads. The metadata unit is the physical block of the device, of a file's device if
 * sysfs tells, else 4096.
 */
#include <fcntl.h>
#include <linux/fs.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include "base/bits.h"
#include "blk/internal.h"
#include "rt/offload.h"

#define UNKNOWN_UNIT 4096u /* safe where nothing tells */
#define OPEN_TRIES   16u   /* of a path that names another file each time */

/* ---- geometry (on a helper thread) ---- */

/* 0 if sysfs does not tell (network and multi-device file systems). */
static uint32_t physical_block_of(dev_t dev)
{
    static const char *const dirs[] = {"", "../"}; /* whole disk; partition */

    for (size_t i = 0; i < ARRAY_SIZE(dirs); i++) {
        char path[80];
        unsigned unit = 0;

        snprintf(path, sizeof(path), "/sys/dev/block/%u:%u/%squeue/physical_block_size", major(dev),
                 minor(dev), dirs[i]);
        FILE *file = fopen(path, "re");
        if (!file)
            continue;
        if (fscanf(file, "%u", &unit) != 1 || !is_pow2(unit))
            unit = 0;
        fclose(file);
        return unit;
    }
    return 0;
}

static int set_fd_flags(int fd, bool direct)
{
    int flags = fcntl(fd, F_GETFL);

    if (flags < 0)
        return -errno;
    flags = (flags & ~(O_NONBLOCK | O_DIRECT)) | (direct ? O_DIRECT : 0);
    return fcntl(fd, F_SETFL, flags) < 0 ? -errno : 0;
}

/* Smallest block that a direct read takes; a file that is empty takes anything and tells nothing.
 */
static uint32_t probe_align(int fd, uint64_t len)
{
    _cleanup_(freep) void *buf = aligned_alloc(UNKNOWN_UNIT, UNKNOWN_UNIT);

    for (uint32_t align = 512; buf && len > 0 && align < UNKNOWN_UNIT; align *= 2)
        if (pread(fd, buf, align, 0) >= 0)
            return align;
    return UNKNOWN_UNIT;
}

/* Sets align and mem_align, or clears f->direct if the file system has no direct I/O after all. */
static int find_direct_align(struct file_blk *f, uint32_t logical)
{
    struct statx sx = {0};
    bool told =
        statx(f->fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &sx) == 0 && (sx.stx_mask & STATX_DIOALIGN);

    if (told && sx.stx_dio_offset_align == 0) {
        f->direct = false;
        return set_fd_flags(f->fd, false);
    }
    if (told) {
        f->blk.align = sx.stx_dio_offset_align;
        f->blk.mem_align = sx.stx_dio_mem_align;
    } else {
        f->blk.align = f->blk.mem_align = logical ? logical : probe_align(f->fd, f->blk.len);
    }
    return 0;
}

static int look_at_device(struct file_blk *f, uint32_t *ret_logical)
{
    int logical = 0, read_only = 0;
    unsigned physical = 0;

    if (ioctl(f->fd, BLKGETSIZE64, &f->blk.len) < 0 || ioctl(f->fd, BLKSSZGET, &logical) < 0)
        return -errno;
    if (f->blk.writable && ioctl(f->fd, BLKROGET, &read_only) == 0 && read_only)
        return -EROFS;
    if (ioctl(f->fd, BLKPBSZGET, &physical) < 0 || !is_pow2(physical))
        physical = UNKNOWN_UNIT;
    f->is_dev = true;
    f->blk.fixed_len = true;
    f->blk.extendable = f->handle;
    f->blk.io_unit = MAX(512u, physical);
    *ret_logical = (uint32_t)logical;
    return 0;
}

/* f->fd is open and locked: fills the rest. */
static int look_at(struct file_blk *f)
{
    uint32_t logical = 0;
    struct stat st;
    int rc = 0;

    if (fstat(f->fd, &st) < 0)
        return -errno;
    if (S_ISBLK(st.st_mode)) {
        rc = look_at_device(f, &logical);
        if (!f->handle && !provider_find_identity(st.st_rdev, &f->id_dev, &f->id_ino))
            f->id_dev = 0;
    } else {
        uint32_t physical = physical_block_of(st.st_dev);

        f->blk.len = (uint64_t)st.st_size;
        f->blk.zero_tail = f->blk.fresh_zero = true;
        f->blk.io_unit = physical ? MAX(512u, physical) : UNKNOWN_UNIT;
    }
    if (rc == 0 && set_fd_flags(f->fd, f->direct) < 0) {
        f->direct = false;
        rc = set_fd_flags(f->fd, false);
    }
    if (rc == 0 && f->direct)
        rc = find_direct_align(f, logical);
    f->blk.io_unit = MAX(f->blk.io_unit, f->blk.align);
    return rc;
}

/* ---- opening ---- */

struct open_call {
    const char *path; /* NULL: f->fd is open already */
    const struct blk_file_opts *opts;
    struct file_blk *f;
    struct err *err;
};

static int open_path(const char *path, const struct blk_file_opts *opts)
{
    /* O_NONBLOCK: a FIFO must not hold us up */
    int flags = O_CLOEXEC | O_NOCTTY | O_NONBLOCK | (opts->writable ? O_RDWR : O_RDONLY);

    if (opts->create)
        flags |= O_CREAT | (opts->truncate ? 0 : O_EXCL);
    int fd = open(path, flags, 0644);
    return fd < 0 ? -errno : fd;
}

static int check_kind(int fd)
{
    struct stat st;

    if (fstat(fd, &st) < 0)
        return -errno;
    return S_ISREG(st.st_mode) || S_ISBLK(st.st_mode) ? 0 : -EINVAL;
}

/* A lock holds by file, not by name. */
static bool is_named(int fd, const char *path)
{
    struct stat mine, there;

    return fstat(fd, &mine) == 0 && stat(path, &there) == 0 && mine.st_dev == there.st_dev &&
           mine.st_ino == there.st_ino;
}

/* Opened: lock, empty, look. -ESTALE: the path (may be NULL) names another file by now. */
static int set_up(struct file_blk *f, const char *path, const struct blk_file_opts *opts,
                  struct err *err)
{
    const char *name = f->blk.name;
    int rc = check_kind(f->fd);

    if (rc == -EINVAL)
        return err_set(err, rc, "open '%s': neither a regular file nor a block device", name);
    if (rc == 0) {
        rc = blk_lock_fd(f->fd, opts->lock, name, err);
        if (rc < 0)
            return rc;
        f->lock = opts->lock;
        if (path && opts->lock != BLK_LOCK_NONE && !is_named(f->fd, path))
            return err_set(err, -ESTALE, "open '%s': it is another file each time", name);
    }
    /* a device is not emptied: -EINVAL of ftruncate */
    if (rc == 0 && opts->create && opts->truncate && ftruncate(f->fd, 0) < 0 && errno != EINVAL)
        rc = -errno;
    if (rc == 0)
        rc = look_at(f);
    return rc < 0 ? err_errno(err, rc, "open '%s'", name) : 0;
}

static int open_once(struct open_call *c)
{
    c->f->fd = open_path(c->path, c->opts);
    if (c->f->fd < 0)
        return err_errno(c->err, c->f->fd, "open '%s'", c->path);
    int rc = set_up(c->f, c->path, c->opts, c->err);
    if (rc < 0) {
        close(c->f->fd);
        if (c->opts->create && !c->opts->truncate)
            unlink(c->path); /* ours: O_EXCL */
    }
    return rc;
}

static int do_open(void *arg)
{
    struct open_call *c = arg;
    int rc = -ESTALE;

    if (!c->path)
        return set_up(c->f, NULL, c->opts, c->err);
    for (unsigned i = 0; rc == -ESTALE && i < OPEN_TRIES; i++)
        rc = open_once(c);
    return rc;
}

/* handle is the caller's until it succeeds. */
SUSPENDS static int file_new(struct open_call *c, int fd, const char *name, char *handle,
                             struct blk **ret)
{
    _cleanup_(freep) struct file_blk *f = calloc(1, sizeof(*f));

    if (!f || blk_init(&f->blk, &file_ops, name) < 0)
        return err_errno(c->err, -ENOMEM, "open '%s'", name);
    f->fd = fd;
    f->handle = handle;
    f->blk.writable = c->opts->writable;
    f->direct = c->opts->direct;
    c->f = f;
    int rc = offload(do_open, c);
    if (rc < 0) {
        free(f->blk.name);
        return rc;
    }
    *ret = &TAKE_PTR(f)->blk;
    return 0;
}

/* Whether the path still is the device that was opened. */
SUSPENDS static int still_provided(const char *path, const char *node, const char *handle,
                                   struct err *err)
{
    _cleanup_(freep) char *node_now = NULL, *handle_now = NULL;
    int rc = provider_provide(path, &node_now, &handle_now, err);

    if (rc == 0 && (strcmp(node, node_now) != 0 || strcmp(handle, handle_now) != 0))
        rc = err_set(err, -ESTALE, "open '%s': it is another volume each time", path);
    return rc;
}

/* *ret_gone: the device was there, the manager said, and could not be opened. */
SUSPENDS static int open_volume_once(struct open_call *c, const char *path, bool *ret_gone,
                                     struct blk **ret)
{
    _cleanup_(freep) char *node = NULL, *handle = NULL, *copy = NULL;
    struct blk *blk = NULL;
    int rc = provider_provide(path, &node, &handle, c->err);

    if (rc < 0)
        return rc;
    copy = strdup(handle);
    if (!copy)
        return err_errno(c->err, -ENOMEM, "open '%s'", path);
    c->path = node;
    rc = file_new(c, -1, path, handle, &blk);
    *ret_gone = rc == -ENOENT || rc == -ENXIO;
    if (rc < 0)
        return rc;
    handle = NULL;
    rc = still_provided(path, node, copy, c->err);
    if (rc < 0)
        blk_close(blk);
    else
        *ret = blk;
    return rc;
}

/* A volume is made by its manager: open() would put a file where it is to appear. Between the
 * manager's answer and the open the name can go to another volume, whose handle is another, and the
 * device can go when another process that used it, too, has ended. */
SUSPENDS static int open_volume(const char *path, const struct blk_file_opts *opts,
                                struct blk **ret, struct err *err)
{
    struct blk_file_opts no_create = *opts;
    int rc = -ESTALE;
    bool gone = false;

    if (opts->create && !opts->truncate)
        return err_set(err, -EEXIST, "open '%s': volumes are not made by opening them", path);
    no_create.create = no_create.truncate = false;
    for (unsigned i = 0; (rc == -ESTALE || gone) && i < OPEN_TRIES; i++) {
        struct open_call c = {.opts = &no_create, .err = err};

        gone = false;
        rc = open_volume_once(&c, path, &gone, ret);
    }
    return rc;
}

int blk_file_open(const char *path, const struct blk_file_opts *opts, struct blk **ret,
                  struct err *err)
{
    struct open_call c = {.path = path, .opts = opts, .err = err};

    return provider_owns(path) ? open_volume(path, opts, ret, err)
                               : file_new(&c, -1, path, NULL, ret);
}

int blk_file_from_fd(int fd, const char *name, const struct blk_file_opts *opts, struct blk **ret,
                     struct err *err)
{
    struct blk_file_opts no_create = *opts;
    struct open_call c = {.opts = &no_create, .err = err};

    no_create.create = no_create.truncate = false;
    return file_new(&c, fd, name, NULL, ret);
}

int blk_file_fd(const struct blk *blk)
{
    return blk->ops == &file_ops ? file_of(blk)->fd : -1;
}

void blk_file_set_name(struct blk *blk, const char *path)
{
    char *name = strdup(path);

    if (!name)
        return; /* it only serves messages */
    free(blk->name);
    blk->name = name;
}

/* ---- change of access ---- */

struct reopen_call {
    struct file_blk *f;
    bool writable;
    enum blk_lock lock;
    struct err *err;
};

/*
 * Locks belong to the open file, and the new one conflicts with the old one. So the old one
 * first takes what the new one is to hold, the new one then takes the same bytes without looking,
 * and replaces the old one under its number: requests under way keep their file.
 */
static int swap_fd(struct reopen_call *c)
{
    struct file_blk *f = c->f;
    char path[40];

    snprintf(path, sizeof(path), "/proc/self/fd/%d", f->fd);
    _cleanup_(closep) int fd = open(path, O_CLOEXEC | (c->writable ? O_RDWR : O_RDONLY));
    if (fd < 0)
        return err_errno(c->err, -errno, "open '%s' again", f->blk.name);
    int rc = set_fd_flags(fd, f->direct);
    if (rc < 0)
        return err_errno(c->err, rc, "open '%s' again", f->blk.name);

    rc = lock_change(f->fd, f->lock, c->lock, f->blk.name, c->err);
    if (rc < 0)
        return rc;
    rc = lock_copy(fd, c->lock);
    if (rc == 0 && dup3(fd, f->fd, O_CLOEXEC) < 0)
        rc = -errno;
    if (rc < 0) {
        lock_change(f->fd, c->lock, f->lock, f->blk.name, NULL);
        return err_errno(c->err, rc, "open '%s' again", f->blk.name);
    }
    return 0;
}

static int do_reopen(void *arg)
{
    struct reopen_call *c = arg;
    struct file_blk *f = c->f;
    int rc = c->writable == f->blk.writable
                 ? lock_change(f->fd, f->lock, c->lock, f->blk.name, c->err)
                 : swap_fd(c);

    if (rc == 0) {
        f->lock = c->lock;
        f->blk.writable = c->writable;
    }
    return rc;
}

int blk_file_reopen(struct blk *blk, bool writable, enum blk_lock lock, struct err *err)
{
    struct reopen_call c = {file_of(blk), writable, lock, err};

    if (blk->ops != &file_ops)
        return err_set(err, -ENOTSUP, "'%s' is no file", blk->name);
    return offload(do_reopen, &c);
}
