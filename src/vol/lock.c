/*
 * Locks of the manager: byte ranges of one file, by open file (F_OFD): they go with their process,
 * also over NFS and cluster file systems.
 *
 *   directory pools   <pool>/images/.varve/lock: of all hosts, as far as the file system's locks go
 *   volume groups     <lock folder>/<vg>.lock: of this host alone
 *   with leases       the same folder: processes of a host queue here, one of them meets the other
 *                     hosts (lock_lease.c)
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
#include "rt/offload.h"
#include "rt/reactor.h"
#include "rt/timer.h"
#include "vol/internal.h"

#define LOCK_FILE          "lock"
#define POOL_LOCK_WAIT_NS  (10 * NSEC_PER_SEC)
#define POOL_LEASE_POLL_NS (20 * NSEC_PER_MSEC)
#define POOL_BYTE          0
#define VOLUME_BYTES       (1ull << 62)
#define TURN_BYTE          ((off_t)(VOLUME_BYTES + 1)) /* who is the next to have the pool's */

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

static int busy_here(const struct pool *pool, const char *vmid, const char *stem, struct err *err)
{
    return err_set(err, -EBUSY, "%s:%s%s%s: another operation on it is under way", pool->id, vmid,
                   *vmid ? "/" : "", stem);
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

/* The same file for all processes of this host, whatever the storage is called. */
static int host_lock_path(const struct pool *pool, const char *images, char **ret, struct err *err)
{
    int rc = check_lock_dir(lock_dir(), err);

    if (rc < 0)
        return rc;
    if (pool->type == POOL_LVM)
        rc = asprintf(ret, "%s/%s.lock", lock_dir(), pool->vgname);
    else
        rc =
            asprintf(ret, "%s/dir-%016llx.lock", lock_dir(), (unsigned long long)text_hash(images));
    return rc < 0 ? err_set(err, -ENOMEM, "out of memory") : 0;
}

static int lock_path(const struct pool *pool, const char *images, char **ret, struct err *err)
{
    if (pool->type == POOL_LVM && !takes_locks(pool))
        return 0;
    if (pool->type == POOL_LVM || (pool->lock && strcmp(pool->lock, "sanlock") == 0))
        return host_lock_path(pool, images, ret, err);

    _cleanup_(freep) char *dir = path_join(images, OWN_DIR);
    int rc = dir ? store_mkdir(images, err) : err_set(err, -ENOMEM, "out of memory");

    if (rc == 0)
        rc = store_mkdir(dir, err);
    if (rc < 0)
        return rc;
    *ret = path_join(dir, LOCK_FILE);
    return *ret ? 0 : err_set(err, -ENOMEM, "out of memory");
}

/* ---- the pool's ---- */

SUSPENDS static int wait_for_byte(const struct pool *pool, const char *path, off_t byte,
                                  uint64_t deadline, int *ret_fd, struct err *err)
{
    int rc;

    while ((rc = try_lock(path, byte, ret_fd)) == -EAGAIN) {
        if (reactor_now() > deadline)
            return err_set(err, -EBUSY, "storage '%s' is locked by another process", pool->id);
        timer_sleep(2 * NSEC_PER_MSEC);
    }
    return rc < 0 ? err_errno(err, rc, "lock '%s'", path) : 0;
}

/* In turn: an operation of many steps lets go between them for no longer than it takes to ask
 * again, and would keep everybody else out. */
SUSPENDS static int wait_for_pool(const struct pool *pool, const char *path, uint64_t deadline,
                                  int *ret_fd, struct err *err)
{
    _cleanup_(closep) int turn = -1;
    int rc = wait_for_byte(pool, path, TURN_BYTE, deadline, &turn, err);

    return rc < 0 ? rc : wait_for_byte(pool, path, POOL_BYTE, deadline, ret_fd, err);
}

/* Processes of this host queue by their own lock: here one of them meets other hosts. */
SUSPENDS static int wait_for_hosts(const struct pool *pool, struct lease_space *space,
                                   uint64_t deadline, struct lease **ret, struct err *err)
{
    char hosts[300];
    bool here, silent;
    int rc;

    while ((rc = lease_try(space, LEASE_POOL, LEASE_EXCLUSIVE, ret, &here, err)) == -EBUSY &&
           reactor_now() < deadline)
        timer_sleep(POOL_LEASE_POLL_NS);
    if (rc != -EBUSY)
        return rc;
    lease_others(space, LEASE_POOL, hosts, sizeof(hosts), &silent, NULL);
    return err_set(
        err, -EBUSY, "storage '%s' is locked by host %s%s", pool->id, *hosts ? hosts : "(unknown)",
        silent && *hosts
            ? ", which does not renew its lease: the lock can be taken once that has ended"
            : "");
}

int lock_pool(const struct pool *pool, const char *images, struct pool_lock *ret, struct err *err)
{
    _cleanup_(freep) char *path = NULL;
    struct pool_lock lock = {.fd = -1};
    struct locking how;
    int rc = lock_path(pool, images, &path, err);

    if (rc == 0)
        rc = locking_of(pool, images, &how, err);
    if (rc < 0)
        return rc;
    uint64_t deadline = reactor_now() + POOL_LOCK_WAIT_NS;
    if (takes_locks(pool))
        rc = wait_for_pool(pool, path, deadline, &lock.fd, err);
    if (rc == 0 && how.space)
        rc = wait_for_hosts(pool, how.space, deadline, &lock.lease, err);
    if (rc < 0)
        lock_release(&lock);
    else
        *ret = lock;
    return rc;
}

/* ---- volumes' ---- */

SUSPENDS static int lock_among_hosts(const struct pool *pool, const struct locking *how,
                                     const char *vmid, const char *stem, struct lease **ret,
                                     struct err *err)
{
    static const struct {
        const char *lease, *what;
    } uses[] = {{"disk", "is open on"}, {"copy", "is being copied on"}};
    const char *slash = *vmid ? "/" : "", *what = "is being changed on";
    char name[LEASE_NAME_MAX + 1], hosts[300] = "";
    bool here, silent = false;

    lease_name("op", vmid, stem, name);
    int rc = lease_try(how->space, name, LEASE_EXCLUSIVE, ret, &here, err);
    if (rc == -EBUSY && here)
        return busy_here(pool, vmid, stem, err);
    if (rc == -EBUSY) {
        lease_others(how->space, name, hosts, sizeof(hosts), &silent, NULL);
    }
    for (unsigned i = 0; rc == 0 && how->disks && i < ARRAY_SIZE(uses); i++) {
        lease_name(uses[i].lease, vmid, stem, name);
        what = uses[i].what;
        rc = lease_others(how->space, name, hosts, sizeof(hosts), &silent, err);
        if (rc == 0 && *hosts)
            rc = -EBUSY;
    }
    if (rc < 0 && *ret)
        lease_put(TAKE_PTR(*ret));
    if (rc != -EBUSY)
        return rc;
    return err_set(err, -EBUSY, "%s:%s%s%s %s host %s%s", pool->id, vmid, slash, stem, what,
                   *hosts ? hosts : "(unknown)",
                   silent && *hosts ? ", which does not renew its lease: wait until that has ended"
                                    : "");
}

int lock_volume(const struct pool *pool, const char *images, const char *vmid, const char *stem,
                struct pool_lock *ret, struct err *err)
{
    _cleanup_(freep) char *path = NULL;
    struct pool_lock lock = {.fd = -1};
    struct locking how;
    int rc = lock_path(pool, images, &path, err);

    if (rc == 0)
        rc = locking_of(pool, images, &how, err);
    if (rc < 0)
        return rc;
    rc = takes_locks(pool) ? try_lock(path, volume_byte(vmid, stem), &lock.fd) : 0;
    if (rc == -EAGAIN)
        return busy_here(pool, vmid, stem, err);
    if (rc < 0)
        return err_errno(err, rc, "lock '%s'", path);
    if (how.space)
        rc = lock_among_hosts(pool, &how, vmid, stem, &lock.lease, err);
    if (rc < 0)
        lock_release(&lock);
    else
        *ret = lock;
    return rc;
}

bool lock_is_held(const struct pool *pool, const char *images, const char *vmid, const char *stem)
{
    struct flock fl = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_len = 1};
    _cleanup_(freep) char *path = NULL;

    if (lock_path(pool, images, &path, NULL) < 0 || !path)
        return false;
    _cleanup_(closep) int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    fl.l_start = stem ? volume_byte(vmid, stem) : POOL_BYTE;
    return fd >= 0 && fcntl(fd, F_OFD_GETLK, &fl) == 0 && fl.l_type != F_UNLCK;
}

void lock_forget(struct pool_lock *lock, const char *vmid, const char *stem)
{
    char name[LEASE_NAME_MAX + 1];

    if (!lock->lease || lock->gone)
        return;
    lease_name("op", vmid, stem, name);
    if (strcmp(lock->lease->name, name) != 0)
        return;
    /* without memory they stay, for a volume of that name */
    if (asprintf(&lock->gone, "%s%s%s", vmid, *vmid ? "/" : "", stem) < 0)
        lock->gone = NULL;
}

static void drop_all(struct pool_lock *lock)
{
    static const char *const others[] = {"disk", "copy"};
    char name[LEASE_NAME_MAX + 1];

    for (unsigned i = 0; i < ARRAY_SIZE(others); i++) {
        lease_name(others[i], "", lock->gone, name);
        lease_drop_name(lock->lease->space, name);
    }
    lease_drop(lock->lease);
}

void lock_release(struct pool_lock *lock)
{
    if (lock->lease && lock->gone)
        drop_all(lock);
    else
        lease_put(lock->lease);
    free(lock->gone);
    if (lock->fd >= 0)
        close(lock->fd);
    *lock = (struct pool_lock){.fd = -1};
}

static int call_release(void *arg)
{
    lock_release(arg);
    return 0;
}

void lock_give_back(struct pool_lock *lock)
{
    if (lock->lease)
        offload(call_release, lock);
    else
        lock_release(lock);
}
