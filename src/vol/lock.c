/*
 * Locks of the manager, by flock() on files in <pool>/images/.varve: they go with their process,
 * also over NFS and cluster file systems.
 *
 *   pool         held for milliseconds: while names are looked at and an intent is written
 *   vol-...      held for a whole operation on a volume
 *
 * Order: recovery takes intents; an operation takes the pool's lock, then volumes'. Lock files are
 * removed when released: who gets a lock looks whether the path still is the file it locked.
 */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include "rt/reactor.h"
#include "rt/timer.h"
#include "vol/internal.h"

#define POOL_LOCK_WAIT_NS (10 * NSEC_PER_SEC)

static bool takes_locks(const struct pool *pool)
{
    return !pool->lock || strcmp(pool->lock, "none") != 0;
}

/* 0, -EAGAIN held by another, or another error. */
static int try_lock(const char *path, int *ret_fd)
{
    for (;;) {
        struct stat mine, there;
        int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644);

        if (fd < 0)
            return -errno;
        if (flock(fd, LOCK_EX | LOCK_NB) < 0) {
            int rc = errno == EWOULDBLOCK ? -EAGAIN : -errno;

            close(fd);
            return rc;
        }
        if (fstat(fd, &mine) == 0 && lstat(path, &there) == 0 && mine.st_ino == there.st_ino) {
            *ret_fd = fd;
            return 0;
        }
        close(fd); /* its last owner has just removed it */
    }
}

static int own_dir(const char *images, char **ret, struct err *err)
{
    _cleanup_(freep) char *dir = path_join(images, OWN_DIR);
    int rc = dir ? store_mkdir(images, err) : -ENOMEM;

    if (rc == 0)
        rc = store_mkdir(dir, err);
    if (rc == 0)
        *ret = TAKE_PTR(dir);
    return rc;
}

int lock_pool(const struct pool *pool, const char *images, struct flock_file *ret, struct err *err)
{
    _cleanup_(freep) char *dir = NULL;
    int fd = -1, rc = own_dir(images, &dir, err);

    if (rc < 0)
        return rc;
    _cleanup_(freep) char *path = path_join(dir, "pool");
    if (!path)
        return err_set(err, -ENOMEM, "out of memory");
    uint64_t deadline = reactor_now() + POOL_LOCK_WAIT_NS;
    while (takes_locks(pool)) {
        rc = try_lock(path, &fd);
        if (rc != -EAGAIN)
            break;
        if (reactor_now() > deadline)
            return err_set(err, -EBUSY, "storage '%s' is locked by another process", pool->id);
        timer_sleep(2 * NSEC_PER_MSEC);
    }
    if (rc < 0)
        return err_errno(err, rc, "lock '%s'", path);
    *ret = (struct flock_file){fd, TAKE_PTR(path)};
    return 0;
}

int lock_volume(const struct pool *pool, const char *images, const char *vmid, const char *stem,
                struct flock_file *ret, struct err *err)
{
    _cleanup_(freep) char *dir = NULL, *path = NULL;
    int fd = -1, rc = own_dir(images, &dir, err);

    if (rc < 0)
        return rc;
    if (asprintf(&path, "%s/vol-%s-%s", dir, vmid, stem) < 0)
        return err_set(err, -ENOMEM, "out of memory");
    rc = takes_locks(pool) ? try_lock(path, &fd) : 0;
    if (rc == -EAGAIN)
        return err_set(err, -EBUSY, "%s:%s%s%s: another operation on it is under way", pool->id,
                       vmid, *vmid ? "/" : "", stem);
    if (rc < 0)
        return err_errno(err, rc, "lock '%s'", path);
    *ret = (struct flock_file){fd, TAKE_PTR(path)};
    return 0;
}

void lock_release(struct flock_file *lock)
{
    if (lock->path && lock->fd >= 0) {
        unlink(lock->path);
        close(lock->fd);
    }
    free(lock->path);
    *lock = (struct flock_file){-1, NULL};
}
