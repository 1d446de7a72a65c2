/*
 * libsanlock: the only place that calls it.
 *
 * The space, in areas of 1 MiB:
 *
 *   0      the lockspace: a sector a host, which its daemon renews (unused with LVM's lockspace)
 *   1      names of the hosts: a sector a host; nothing depends on them but texts
 *   2      the pool's lease: written last but for the lockspace
 *   3, 4   sanlock's index of the other leases' names, with the lease that guards it
 *   5 ...  those leases, made as they are needed
 *
 * Invariants
 *   1. Names are added to the index, and taken out, by who has the pool's lease: sanlock itself
 * would take one name twice, and then two hosts could have "it".
 *   2. A lease that goes loses its name before its place is free, so that who has looked it up
 *      before does not get another's.
 */
#include "vol/lock_sanlock.h"
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <time.h>
/* they need <stdint.h> before them */
#include <sanlock.h>
#include <sanlock_admin.h>
#include <sanlock_resource.h>
#include <sanlock_rv.h>
#include "base/own.h"
#include "vol/lock_host.h"

#define AREA_HOSTS      1u
#define AREA_POOL       2u
#define AREA_INDEX      3u
#define AREA_FIRST      5u
#define NAME_GONE       "gone" /* of a lease whose place becomes free */
#define POOL_WAIT_MS    10000u
#define POOL_POLL_MS    20u
#define TAKE_TRIES      3u
#define SHARED_TRIES    20u
#define SHARED_PAUSE_MS 25u

static_assert(LEASE_NAME_MAX == SANLK_NAME_LEN, "names of sanlock");

/* The connection by which the daemon knows this process; one call at a time. */
static pthread_mutex_t connection_lock = PTHREAD_MUTEX_INITIALIZER;
static int connection = -1; /* under connection_lock */

static void pause_ms(unsigned ms)
{
    struct timespec ts = {.tv_sec = ms / 1000, .tv_nsec = (long)(ms % 1000) * 1000000};

    nanosleep(&ts, NULL);
}

static const char *reason(int rv)
{
    return rv <= SANLK_ERROR ? sanlock_strerror(rv) : strerror(-rv);
}

static int fail(struct err *err, int rv, const char *what, const char *path)
{
    return err_set(err, rv <= SANLK_ERROR ? -EIO : rv, "%s in '%s': sanlock says: %s (%d)", what,
                   path, reason(rv), rv);
}

/* ---- what sanlock's calls take ---- */

static uint32_t geometry(const struct lease_space *s)
{
    static_assert(SANLK_RES_ALIGN1M == SANLK_LSF_ALIGN1M && SANLK_RES_ALIGN1M == SANLK_RIF_ALIGN1M,
                  "one set of flags");
    return SANLK_RES_ALIGN1M | (s->sector_len == 4096 ? SANLK_RES_SECTOR4K : SANLK_RES_SECTOR512);
}

static void put_name(char *field, const char *name)
{
    memset(field, 0, SANLK_NAME_LEN);
    memcpy(field, name, strnlen(name, SANLK_NAME_LEN));
}

/* Heap: a path of 1 KiB is in each. The caller frees. */
static struct sanlk_resource *new_resource(const struct lease_space *s, const char *name,
                                           uint64_t off, enum lease_mode mode)
{
    struct sanlk_resource *res = calloc(1, sizeof(*res) + sizeof(struct sanlk_disk));

    if (!res)
        return NULL;
    put_name(res->lockspace_name, s->name);
    put_name(res->name, name);
    res->flags = geometry(s) | (mode == LEASE_SHARED ? SANLK_RES_SHARED : 0);
    res->num_disks = 1;
    snprintf(res->disks[0].path, SANLK_PATH_LEN, "%s", s->path);
    res->disks[0].offset = off;
    return res;
}

static struct sanlk_rindex *new_index(const struct lease_space *s)
{
    struct sanlk_rindex *rx = calloc(1, sizeof(*rx));

    if (!rx)
        return NULL;
    rx->flags = geometry(s);
    put_name(rx->lockspace_name, s->name);
    snprintf(rx->disk.path, SANLK_PATH_LEN, "%s", s->path);
    rx->disk.offset = AREA_INDEX * LEASES_AREA_LEN;
    return rx;
}

/* ---- the lockspace ---- */

static int sector_of(const char *path, unsigned *ret, struct err *err)
{
    _cleanup_(closep) int fd = open(path, O_RDONLY | O_CLOEXEC | O_DIRECT);
    _cleanup_(freep) void *buf = NULL;
    struct stat st;
    int len = 512;

    if (fd < 0 || fstat(fd, &st) < 0)
        return err_errno(err, -errno, "open '%s'", path);
    if (S_ISBLK(st.st_mode) && ioctl(fd, BLKSSZGET, &len) < 0)
        return err_errno(err, -errno, "sector length of '%s'", path);
    if (posix_memalign(&buf, 4096, 4096))
        return err_set(err, -ENOMEM, "out of memory");
    if (S_ISREG(st.st_mode) && pread(fd, buf, 512, 0) < 0)
        len = 4096; /* the file system's direct I/O wants more */
    *ret = len > 512 ? 4096 : 512;
    return 0;
}

/* The one of that name, else at that path. */
static bool find_joined(const char *name, const char *path, struct sanlk_lockspace *ret)
{
    _cleanup_(freep) struct sanlk_lockspace *list = NULL;
    int nr = 0;

    if (sanlock_get_lockspaces(&list, &nr, 0) < 0)
        return false;
    for (int i = 0; i < nr; i++) {
        if (name ? strncmp(list[i].name, name, SANLK_NAME_LEN) != 0
                 : strcmp(list[i].host_id_disk.path, path) != 0)
            continue;
        *ret = list[i];
        return true;
    }
    return false;
}

bool leases_is_joined(const char *name, const char *path)
{
    _cleanup_(freep) struct sanlk_lockspace *ls = calloc(1, sizeof(*ls));

    return ls && find_joined(name, path, ls) && sanlock_inq_lockspace(ls, 0) == 0;
}

static int register_process(struct err *err)
{
    int rv = 0;

    pthread_mutex_lock(&connection_lock);
    if (connection < 0) {
        rv = sanlock_register();
        if (rv >= 0) {
            connection = rv;
            fcntl(connection, F_SETFD, FD_CLOEXEC);
        }
    }
    pthread_mutex_unlock(&connection_lock);
    if (rv >= 0)
        return 0;
    return err_set(err, -ENOTCONN,
                   "no connection to the sanlock daemon (%s): start it on this host, and see that "
                   "this user may use it",
                   reason(rv));
}

static int join_error(int rv, const struct lease_space *s, struct err *err)
{
    if (rv == SANLK_ADDLS_INVALID_HOSTID)
        return err_set(err, -EINVAL, "the host id %llu is too high for '%s'",
                       (unsigned long long)s->host_id, s->path);
    if (rv == SANLK_HOSTID_BUSY || rv == SANLK_DBLOCK_LVER || rv == SANLK_RENEW_DIFF)
        return err_set(err, -EBUSY,
                       "another host uses the host id %llu in '%s': each host needs its own in %s",
                       (unsigned long long)s->host_id, s->path, HOST_ID_FILE);
    return fail(err, rv, "join the lockspace", s->path);
}

/* ls: its name and path are known. */
static int join(struct lease_space *s, struct sanlk_lockspace *ls, const struct lease_opts *opts,
                struct err *err)
{
    int rv, rc = host_id(&s->host_id, err);

    if (rc < 0)
        return rc;
    ls->host_id = s->host_id;
    ls->flags = geometry(s);
    while ((rv = sanlock_add_lockspace_timeout(ls, 0, opts->io_timeout)) == -EINPROGRESS ||
           rv == -EAGAIN)
        pause_ms(200); /* another process joins, or it is being left */
    return rv < 0 && rv != -EEXIST ? join_error(rv, s, err) : 0;
}

static int read_name(struct lease_space *s, struct sanlk_lockspace *ls, struct err *err)
{
    uint32_t io_timeout = 0;

    memset(ls, 0, sizeof(*ls));
    snprintf(ls->host_id_disk.path, SANLK_PATH_LEN, "%s", s->path);
    ls->flags = SANLK_LSF_ALIGN1M;
    int rv = sanlock_read_lockspace(ls, 0, &io_timeout);
    if (rv == SANLK_LEADER_MAGIC)
        return err_set(err, -ENOENT, "there are no leases in '%s' yet", s->path);
    if (rv < 0)
        return fail(err, rv, "read the lockspace", s->path);
    snprintf(s->name, sizeof(s->name), "%.*s", SANLK_NAME_LEN, ls->name);
    return 0;
}

/* ---- the index ---- */

/* -ENOENT: no such name. */
static int look_up(const struct lease_space *s, const char *name, uint64_t *ret)
{
    _cleanup_(freep) struct sanlk_rindex *rx = new_index(s);
    struct sanlk_rentry re = {0};

    if (!rx)
        return -ENOMEM;
    put_name(re.name, name);
    int rv = sanlock_lookup_rindex(rx, 0, &re);
    if (rv == 0)
        *ret = re.offset;
    return rv;
}

static int take_out(const struct lease_space *s, const char *name, uint64_t off)
{
    _cleanup_(freep) struct sanlk_rindex *rx = new_index(s);
    struct sanlk_rentry re = {.offset = off};

    if (!rx)
        return -ENOMEM;
    put_name(re.name, name);
    return sanlock_delete_resource(rx, 0, &re);
}

static int acquire_at(const struct lease_space *s, const char *name, uint64_t off,
                      enum lease_mode mode)
{
    _cleanup_(freep) struct sanlk_resource *res = new_resource(s, name, off, mode);
    struct sanlk_resource *args[] = {res};
    int rv;

    if (!res)
        return -ENOMEM;
    for (unsigned i = 0; i < SHARED_TRIES; i++) {
        pthread_mutex_lock(&connection_lock);
        rv = sanlock_acquire(connection, -1, SANLK_ACQUIRE_OWNER_NOWAIT, 1, args, NULL);
        pthread_mutex_unlock(&connection_lock);
        if (rv != SANLK_ACQUIRE_SHRETRY)
            break;
        pause_ms(SHARED_PAUSE_MS); /* others take it shared at the same moment */
    }
    return rv;
}

/* Another host, or another process here. */
static bool is_owned(int rv)
{
    return rv == -EEXIST || rv == -EBUSY || rv == -EAGAIN ||
           (rv <= SANLK_ACQUIRE_IDLIVE && rv >= SANLK_ACQUIRE_OWNED_RETRY);
}

/* What lies at that place is another lease by now, or none. */
static bool is_elsewhere(int rv)
{
    return rv == SANLK_LEADER_RESOURCE || rv == SANLK_LEADER_MAGIC || rv == SANLK_LEADER_LOCKSPACE;
}

static void release_at(const struct lease_space *s, const char *name, uint64_t off,
                       enum lease_mode mode, const char *new_name)
{
    _cleanup_(freep) struct sanlk_resource *res = new_resource(s, name, off, mode);
    _cleanup_(freep) struct sanlk_resource *to =
        new_resource(s, new_name ? new_name : name, off, mode);
    struct sanlk_resource *args[] = {res, to};

    if (!res || !to)
        return; /* it goes with the process */
    pthread_mutex_lock(&connection_lock);
    sanlock_release(connection, -1, new_name ? SANLK_REL_RENAME : 0, new_name ? 2 : 1, args);
    pthread_mutex_unlock(&connection_lock);
}

/* The right to change the index (invariant 1). *ret_taken: to be given back. */
static int hold_index(struct lease_space *s, bool *ret_taken, struct err *err)
{
    *ret_taken = false;
    if (__atomic_load_n(&s->pool_depth, __ATOMIC_ACQUIRE))
        return 0;
    for (unsigned ms = 0;; ms += POOL_POLL_MS) {
        int rv = acquire_at(s, LEASE_POOL, s->pool_off, LEASE_EXCLUSIVE);

        *ret_taken = rv == 0;
        if (rv == 0 || !is_owned(rv))
            return rv < 0 ? fail(err, rv, "take the pool's lease", s->path) : 0;
        if (ms >= POOL_WAIT_MS)
            return err_set(err, -EBUSY, "the leases in '%s' are being changed by another host",
                           s->path);
        pause_ms(POOL_POLL_MS);
    }
}

static void let_index_go(struct lease_space *s, bool taken)
{
    if (taken)
        release_at(s, LEASE_POOL, s->pool_off, LEASE_EXCLUSIVE, NULL);
}

static int make_here(const struct lease_space *s, const char *name, uint64_t *ret, struct err *err)
{
    _cleanup_(freep) struct sanlk_rindex *rx = new_index(s);
    struct sanlk_rentry re = {0};

    if (!rx)
        return err_set(err, -ENOMEM, "out of memory");
    put_name(re.name, name);
    int rv = sanlock_create_resource(rx, 0, &re, 0, 0);
    if (rv == -ENOSPC || rv == -ENOENT)
        return err_set(
            err, -ENOSPC,
            "no lease is left in '%s': destroy volumes, or make new leases with a greater "
            "lock-leases",
            s->path);
    if (rv < 0)
        return fail(err, rv, "make a lease", s->path);
    *ret = re.offset;
    return 0;
}

/* The name's place, made if there is none; `stale`: one that has turned out to be another's. */
static int place_of(struct lease_space *s, const char *name, uint64_t stale, uint64_t *ret,
                    struct err *err)
{
    bool taken;
    int rc, rv = look_up(s, name, ret);

    if (rv == 0 && *ret != stale)
        return 0;
    if (rv < 0 && rv != -ENOENT)
        return fail(err, rv, "look a lease up", s->path);
    rc = hold_index(s, &taken, err);
    if (rc < 0)
        return rc;
    rv = look_up(s, name, ret);
    if (rv == 0 && *ret == stale) { /* whoever dropped it was cut off in between */
        take_out(s, name, stale);
        rv = -ENOENT;
    }
    if (rv == -ENOENT)
        rc = make_here(s, name, ret, err);
    else if (rv < 0)
        rc = fail(err, rv, "look a lease up", s->path);
    let_index_go(s, taken);
    return rc;
}

/* ---- names of hosts ---- */

static uint64_t host_name_off(const struct lease_space *s, uint64_t host_id)
{
    return AREA_HOSTS * LEASES_AREA_LEN + (host_id - 1) * s->sector_len;
}

#define HOST_MARK "varve host "

static void read_host_name(const struct lease_space *s, uint64_t host_id,
                           char ret[LEASE_HOST_MAX + 1])
{
    _cleanup_(closep) int fd = open(s->path, O_RDONLY | O_CLOEXEC | O_DIRECT);
    _cleanup_(freep) char *buf = NULL;

    snprintf(ret, LEASE_HOST_MAX + 1, "host %llu", (unsigned long long)host_id);
    if (fd < 0 || posix_memalign((void **)&buf, 4096, 4096))
        return;
    if (pread(fd, buf, s->sector_len, (off_t)host_name_off(s, host_id)) != (ssize_t)s->sector_len ||
        strncmp(buf, HOST_MARK, strlen(HOST_MARK)) != 0)
        return;
    buf[s->sector_len - 1] = '\0';
    snprintf(ret, LEASE_HOST_MAX + 1, "%.*s", (int)strcspn(buf + strlen(HOST_MARK), "\n"),
             buf + strlen(HOST_MARK));
}

static void write_host_name(const struct lease_space *s)
{
    char there[LEASE_HOST_MAX + 1], mine[LEASE_HOST_MAX + 1] = "";
    _cleanup_(freep) char *buf = NULL;

    if (gethostname(mine, sizeof(mine) - 1) < 0 || !*mine)
        return;
    read_host_name(s, s->host_id, there);
    if (strcmp(there, mine) == 0)
        return;
    _cleanup_(closep) int fd = open(s->path, O_WRONLY | O_CLOEXEC | O_DIRECT | O_DSYNC);
    if (fd < 0 || posix_memalign((void **)&buf, 4096, 4096))
        return;
    memset(buf, 0, 4096);
    snprintf(buf, s->sector_len, HOST_MARK "%s\n", mine);
    /* a name for texts: without it they say "host 7" */
    (void)!pwrite(fd, buf, s->sector_len, (off_t)host_name_off(s, s->host_id));
}

/* ---- spaces ---- */

static void leases_free(struct lease_space *s)
{
    if (s)
        free(s->path);
    free(s);
}

static void leases_freep(struct lease_space **s)
{
    leases_free(*s);
}

static int new_space(const char *path, const char *lockspace, struct lease_space **ret,
                     struct err *err)
{
    struct lease_space *s = calloc(1, sizeof(*s));

    if (s)
        s->path = strdup(path);
    if (!s || !s->path) {
        leases_free(s);
        return err_set(err, -ENOMEM, "out of memory");
    }
    snprintf(s->name, sizeof(s->name), "%s", lockspace ? lockspace : "");
    int rc = strlen(path) >= SANLK_PATH_LEN ? err_set(err, -ENAMETOOLONG, "'%s' is too long", path)
                                            : sector_of(path, &s->sector_len, err);
    if (rc < 0) {
        leases_free(s);
        return rc;
    }
    *ret = s;
    return 0;
}

static int enter(struct lease_space *s, const struct lease_opts *opts, struct err *err)
{
    _cleanup_(freep) struct sanlk_lockspace *ls = calloc(1, sizeof(*ls));
    int rc = 0;

    if (!ls)
        return err_set(err, -ENOMEM, "out of memory");
    if (find_joined(opts->lockspace, s->path, ls)) {
        s->host_id = ls->host_id;
        snprintf(s->name, sizeof(s->name), "%.*s", SANLK_NAME_LEN, ls->name);
        /* it may be in the making */
        return sanlock_inq_lockspace(ls, SANLK_INQ_WAIT) == 0 || opts->lockspace
                   ? 0
                   : err_set(err, -EAGAIN, "the lockspace %s could not be joined", s->name);
    }
    if (opts->lockspace)
        return err_set(err, -EAGAIN, "the lockspace %s is not started on this host", s->name);
    rc = read_name(s, ls, err);
    return rc < 0 ? rc : join(s, ls, opts, err);
}

static int check_pool_lease(struct lease_space *s, struct err *err)
{
    _cleanup_(freep) struct sanlk_resource *res = NULL;

    s->pool_off = AREA_POOL * LEASES_AREA_LEN;
    res = new_resource(s, LEASE_POOL, s->pool_off, LEASE_EXCLUSIVE);
    int rv = res ? sanlock_read_resource(res, 0) : -ENOMEM;
    if (rv == SANLK_LEADER_MAGIC)
        return err_set(err, -ENOENT, "there are no leases in '%s' yet", s->path);
    return rv < 0 ? fail(err, rv, "read the pool's lease", s->path) : 0;
}

int leases_open(const char *path, const struct lease_opts *opts, struct lease_space **ret,
                struct err *err)
{
    _cleanup_(leases_freep) struct lease_space *s = NULL;
    int rc = register_process(err);

    if (rc == 0)
        rc = new_space(path, opts->lockspace, &s, err);
    if (rc == 0)
        rc = enter(s, opts, err);
    if (rc < 0)
        return rc;
    rc = check_pool_lease(s, err);
    if (rc < 0)
        return rc;
    write_host_name(s);
    *ret = TAKE_PTR(s);
    return 0;
}

static int clear_names(const struct lease_space *s, struct err *err)
{
    _cleanup_(closep) int fd = open(s->path, O_WRONLY | O_CLOEXEC | O_DIRECT | O_DSYNC);
    _cleanup_(freep) void *buf = NULL;

    if (fd < 0)
        return err_errno(err, -errno, "open '%s'", s->path);
    if (posix_memalign(&buf, 4096, LEASES_AREA_LEN))
        return err_set(err, -ENOMEM, "out of memory");
    memset(buf, 0, LEASES_AREA_LEN);
    for (unsigned area = 0; area < AREA_FIRST; area++)
        if (pwrite(fd, buf, LEASES_AREA_LEN, (off_t)(area * LEASES_AREA_LEN)) !=
            (ssize_t)LEASES_AREA_LEN)
            return err_errno(err, -EIO, "write '%s'", s->path);
    return 0;
}

/* The lockspace comes last: what is not complete is none. */
int leases_format(const char *path, const char *lockspace, bool own_lockspace, unsigned leases,
                  unsigned io_timeout, struct err *err)
{
    _cleanup_(leases_freep) struct lease_space *s = NULL;
    _cleanup_(freep) struct sanlk_lockspace *ls = calloc(1, sizeof(*ls));
    int rc = ls ? register_process(err) : err_set(err, -ENOMEM, "out of memory");

    if (rc == 0)
        rc = new_space(path, lockspace, &s, err);
    if (rc == 0)
        rc = clear_names(s, err);
    if (rc < 0)
        return rc;
    _cleanup_(freep) struct sanlk_rindex *rx = new_index(s);
    if (!rx)
        return err_set(err, -ENOMEM, "out of memory");
    rx->max_resources = leases;
    int rv = sanlock_format_rindex(rx, 0);
    if (rv < 0)
        return fail(err, rv, "write the index", path);
    _cleanup_(freep) struct sanlk_resource *res =
        new_resource(s, LEASE_POOL, AREA_POOL * LEASES_AREA_LEN, LEASE_EXCLUSIVE);
    rv = res ? sanlock_write_resource(res, 0, 0, 0) : -ENOMEM;
    if (rv < 0)
        return fail(err, rv, "make the pool's lease", path);
    if (!own_lockspace)
        return 0;
    put_name(ls->name, lockspace);
    ls->flags = geometry(s);
    snprintf(ls->host_id_disk.path, SANLK_PATH_LEN, "%s", path);
    rv = sanlock_write_lockspace(ls, 0, 0, io_timeout);
    return rv < 0 ? fail(err, rv, "write the lockspace", path) : 0;
}

int leases_count(struct lease_space *s, unsigned *ret_room, unsigned *ret_used, struct err *err)
{
    _cleanup_(freep) struct sanlk_rindex *rx = new_index(s);
    struct stat st;
    _cleanup_(closep) int fd = open(s->path, O_RDONLY | O_CLOEXEC);
    off_t len = fd < 0 || fstat(fd, &st) < 0 ? -1 : lseek(fd, 0, SEEK_END);

    if (!rx)
        return err_set(err, -ENOMEM, "out of memory");
    if (len < 0)
        return err_errno(err, -errno, "open '%s'", s->path);
    *ret_room = *ret_used = 0;
    for (uint64_t off = LEASES_HEAD_LEN; off + LEASES_AREA_LEN <= (uint64_t)len;
         off += LEASES_AREA_LEN) {
        struct sanlk_rentry re = {.offset = off};
        int rv = sanlock_lookup_rindex(rx, 0, &re);

        if (rv == SANLK_RINDEX_OFFSET || rv == -EINVAL)
            break; /* beyond the last */
        (*ret_room)++;
        *ret_used += rv == 0 && re.name[0];
    }
    return 0;
}

/* ---- leases ---- */

int lease_take(struct lease_space *s, const char *name, enum lease_mode mode, struct lease **ret,
               bool *ret_here, struct err *err)
{
    struct lease *lease = calloc(1, sizeof(*lease));
    bool pool = strcmp(name, LEASE_POOL) == 0;
    uint64_t off = s->pool_off, stale = 0;
    int rc = lease ? 0 : err_set(err, -ENOMEM, "out of memory"), rv = 0;

    *ret_here = false;
    for (unsigned i = 0; rc == 0 && i < TAKE_TRIES; i++) {
        if (!pool)
            rc = place_of(s, name, stale, &off, err);
        if (rc == 0)
            rv = acquire_at(s, name, off, mode);
        if (rc < 0 || !is_elsewhere(rv))
            break;
        stale = off;
    }
    if (rc == 0 && is_owned(rv)) {
        *ret_here = rv == -EEXIST || rv == -EBUSY;
        rc = err_set(err, -EBUSY, "'%s' is leased by another", name);
    } else if (rc == 0 && rv < 0) {
        rc = fail(err, rv, "take a lease", s->path);
    }
    if (rc < 0) {
        free(lease);
        return rc;
    }
    *lease = (struct lease){.space = s, .off = off, .mode = mode};
    snprintf(lease->name, sizeof(lease->name), "%s", name);
    if (pool)
        __atomic_add_fetch(&s->pool_depth, 1, __ATOMIC_RELEASE);
    *ret = lease;
    return 0;
}

int lease_change(struct lease *lease, enum lease_mode mode, struct err *err)
{
    _cleanup_(freep) struct sanlk_resource *res =
        new_resource(lease->space, lease->name, lease->off, mode);

    if (!res)
        return err_set(err, -ENOMEM, "out of memory");
    if (mode == lease->mode)
        return 0;
    pthread_mutex_lock(&connection_lock);
    int rv = sanlock_convert(connection, -1, SANLK_CONVERT_OWNER_NOWAIT, res);
    pthread_mutex_unlock(&connection_lock);
    if (is_owned(rv) || rv == SANLK_ACQUIRE_SHRETRY)
        return err_set(err, -EBUSY, "'%s' is leased by another host too", lease->name);
    if (rv < 0)
        return fail(err, rv, "change a lease", lease->space->path);
    lease->mode = mode;
    return 0;
}

static void put(struct lease *lease, const char *new_name)
{
    if (strcmp(lease->name, LEASE_POOL) == 0)
        __atomic_sub_fetch(&lease->space->pool_depth, 1, __ATOMIC_RELEASE);
    release_at(lease->space, lease->name, lease->off, lease->mode, new_name);
}

void lease_put(struct lease *lease)
{
    if (lease)
        put(lease, NULL);
    free(lease);
}

void lease_drop(struct lease *lease)
{
    struct lease_space *s = lease->space;
    bool taken;

    if (hold_index(s, &taken, NULL) < 0) {
        lease_put(lease); /* its place stays, for a volume of that name */
        return;
    }
    put(lease, NAME_GONE);
    take_out(s, lease->name, lease->off);
    let_index_go(s, taken);
    free(lease);
}

void lease_drop_name(struct lease_space *s, const char *name)
{
    struct lease *lease;
    uint64_t off;
    bool here;

    if (look_up(s, name, &off) == 0 &&
        lease_take(s, name, LEASE_EXCLUSIVE, &lease, &here, NULL) == 0)
        lease_drop(lease);
}

/* ---- owners ---- */

static int find(const struct lease_space *s, const char *name, uint64_t *ret)
{
    if (strcmp(name, LEASE_POOL) != 0)
        return look_up(s, name, ret);
    *ret = s->pool_off;
    return 0;
}

/* Could it still be using what it has? */
static bool is_dead(const struct sanlk_host *owner, const struct sanlk_host *hosts, int nr,
                    bool *ret_silent)
{
    for (int i = 0; i < nr; i++) {
        uint32_t state = hosts[i].flags & SANLK_HOST_MASK;

        if (hosts[i].host_id != owner->host_id)
            continue;
        *ret_silent = state == SANLK_HOST_FAIL || state == SANLK_HOST_UNKNOWN;
        return hosts[i].generation != owner->generation || state == SANLK_HOST_FREE ||
               state == SANLK_HOST_DEAD;
    }
    return true;
}

int lease_owners(struct lease_space *s, const char *name, struct lease_owner **ret,
                 unsigned *ret_nr, struct err *err)
{
    _cleanup_(freep) struct sanlk_resource *res = NULL;
    _cleanup_(freep) struct sanlk_host *owners = NULL, *hosts = NULL;
    int nr = 0, nr_hosts = 0;
    uint64_t off;

    *ret = NULL;
    *ret_nr = 0;
    int rv = find(s, name, &off);
    if (rv == -ENOENT)
        return 0;
    if (rv < 0)
        return fail(err, rv, "look a lease up", s->path);
    res = new_resource(s, name, off, LEASE_EXCLUSIVE);
    rv = res ? sanlock_read_resource_owners(res, 0, &owners, &nr) : -ENOMEM;
    if (is_elsewhere(rv))
        return 0;
    if (rv == 0 && nr)
        rv = sanlock_get_hosts(s->name, 0, &hosts, &nr_hosts, 0);
    if (rv < 0)
        return fail(err, rv, "read a lease", s->path);
    struct lease_owner *list = calloc((size_t)nr + 1, sizeof(*list));
    if (!list)
        return err_set(err, -ENOMEM, "out of memory");
    for (int i = 0; i < nr; i++) {
        struct lease_owner *o = &list[*ret_nr];

        *o = (struct lease_owner){.host_id = (unsigned)owners[i].host_id,
                                  .here = owners[i].host_id == s->host_id,
                                  .shared = res->flags & SANLK_RES_SHARED};
        if (is_dead(&owners[i], hosts, nr_hosts, &o->silent))
            continue;
        read_host_name(s, o->host_id, o->name);
        (*ret_nr)++;
    }
    *ret = list;
    return 0;
}
