/*
 * Locks of the manager: byte ranges of one file, by open file (F_OFD): they go with their process,
 * also over NFS and cluster file systems.
 *
 *   directory pools   <pool>/images/.varve/lock: of all hosts, as far as the file system's locks go
 *   volume groups     <lock folder>/<vg>.lock: of this host alone
 *
 *   byte 0            the pool: held for milliseconds, while names are looked at and an intent is
 *                     written
 *   1 + hash of name  a volume: held for a whole operation on it, and while its server starts
 *
 * Order: recovery takes intents; an operation takes the pool's lock, then volumes'. Nobody waits
 * for a volume's lock while holding the pool's. The file stays: on a full storage a lock that is to
 * precede a deletion needs no room. Two names of one hash merely exclude each other.
 */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include "rt/reactor.h"
#include "rt/timer.h"
#include "vol/internal.h"

#define LOCK_FILE         "lock"
#define POOL_LOCK_WAIT_NS (10 * NSEC_PER_SEC)
#define POOL_BYTE         0
#define VOLUME_BYTES      (1ull << 62)

static bool takes_locks(const struct pool *pool)
{
    return !pool->lock || strcmp(pool->lock, "none") != 0;
}

static off_t volume_byte(const char *vmid, const char *stem)
{
    char name[300];

    snprintf(name, sizeof(name), "%s/%s", vmid, stem);
    return (off_t)(1 + text_hash(name) % VOLUME_BYTES);
}

/* 0, -EAGAIN held by another, or another error. */
static int try_lock(const char *path, off_t byte, int *ret_fd)
{
    struct flock fl = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};

    for (;;) {
        struct stat mine, there;
        int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644);

        if (fd < 0)
            return -errno;
        if (fcntl(fd, F_OFD_SETLK, &fl) < 0) {
            int rc = errno == EACCES ? -EAGAIN : -errno;

            close(fd);
            return rc;
        }
        if (fstat(fd, &mine) == 0 && lstat(path, &there) == 0 && mine.st_ino == there.st_ino) {
            *ret_fd = fd;
            return 0;
        }
        close(fd); /* somebody has just tidied it away */
    }
}

/* ---- where the file is ---- */

const char *lock_dir(void)
{
    const char *dir = getenv("VARVE_LOCK_DIR");

    return dir && *dir ? dir : "/run/lock/varve";
}

/* Anybody may write to /run/lock: a folder that is not ours is somebody's trap. */
static int check_lock_dir(const char *dir, struct err *err)
{
    struct stat st;

    if (mkdir(dir, 0700) < 0 && errno != EEXIST)
        return err_errno(err, -errno,
                         "make the folder of this host's locks, '%s' ($VARVE_LOCK_DIR)", dir);
    if (lstat(dir, &st) < 0)
        return err_errno(err, -errno, "look at '%s'", dir);
    if (!S_ISDIR(st.st_mode) || (st.st_uid != geteuid() && st.st_uid != 0) || (st.st_mode & 022))
        return err_set(
            err, -EPERM,
            "the folder of this host's locks, '%s', must belong to this user or root and "
            "be writable for nobody else",
            dir);
    return 0;
}

/* The same file for all processes of this host, whatever storage names the volume group. */
static int host_lock_path(const char *vg, char **ret, struct err *err)
{
    int rc = check_lock_dir(lock_dir(), err);

    if (rc < 0)
        return rc;
    if (asprintf(ret, "%s/%s.lock", lock_dir(), vg) < 0)
        return err_set(err, -ENOMEM, "out of memory");
    return 0;
}

static int lock_path(const struct pool *pool, const char *images, char **ret, struct err *err)
{
    if (pool->type == POOL_LVM)
        return takes_locks(pool) ? host_lock_path(pool->vgname, ret, err) : 0;

    _cleanup_(freep) char *dir = path_join(images, OWN_DIR);
    int rc = dir ? store_mkdir(images, err) : err_set(err, -ENOMEM, "out of memory");

    if (rc == 0)
        rc = store_mkdir(dir, err);
    if (rc < 0)
        return rc;
    *ret = path_join(dir, LOCK_FILE);
    return *ret ? 0 : err_set(err, -ENOMEM, "out of memory");
}

/* ---- locks ---- */

SUSPENDS static int wait_for_pool(const struct pool *pool, const char *path, int *ret_fd,
                                  struct err *err)
{
    uint64_t deadline = reactor_now() + POOL_LOCK_WAIT_NS;
    int rc;

    while ((rc = try_lock(path, POOL_BYTE, ret_fd)) == -EAGAIN) {
        if (reactor_now() > deadline)
            return err_set(err, -EBUSY, "storage '%s' is locked by another process", pool->id);
        timer_sleep(2 * NSEC_PER_MSEC);
    }
    return rc < 0 ? err_errno(err, rc, "lock '%s'", path) : 0;
}

int lock_pool(const struct pool *pool, const char *images, struct pool_lock *ret, struct err *err)
{
    _cleanup_(freep) char *path = NULL;
    int fd = -1, rc = lock_path(pool, images, &path, err);

    if (rc < 0)
        return rc;
    if (takes_locks(pool))
        rc = wait_for_pool(pool, path, &fd, err);
    if (rc == 0)
        *ret = (struct pool_lock){fd};
    return rc;
}

int lock_volume(const struct pool *pool, const char *images, const char *vmid, const char *stem,
                struct pool_lock *ret, struct err *err)
{
    _cleanup_(freep) char *path = NULL;
    int fd = -1, rc = lock_path(pool, images, &path, err);

    if (rc < 0)
        return rc;
    rc = takes_locks(pool) ? try_lock(path, volume_byte(vmid, stem), &fd) : 0;
    if (rc == -EAGAIN)
        return err_set(err, -EBUSY, "%s:%s%s%s: another operation on it is under way", pool->id,
                       vmid, *vmid ? "/" : "", stem);
    if (rc < 0)
        return err_errno(err, rc, "lock '%s'", path);
    *ret = (struct pool_lock){fd};
    return 0;
}

void lock_release(struct pool_lock *lock)
{
    if (lock->fd >= 0)
        close(lock->fd);
    lock->fd = -1;
}
