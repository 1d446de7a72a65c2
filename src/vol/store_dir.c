/*
 * The steps that operations are made of, on files of a directory pool; what lies in a volume group
 * goes to store_lvm.c. Each is durable when it
 * returns: a change of names ends with an fsync of its directory. They block: the manager's process
 * has nothing to run meanwhile.
 */
#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include "base/bits.h"
#include "chain/chain.h"
#include "blk/blk.h"
#include "vol/store_lvm.h"

/* ---- paths as text ---- */

char *path_join(const char *dir, const char *name)
{
    char *ret = NULL;

    return asprintf(&ret, "%s/%s", dir, name) < 0 ? NULL : ret;
}

char *path_dir(const char *path)
{
    const char *slash = strrchr(path, '/');

    if (!slash)
        return strdup(".");
    return slash == path ? strdup("/") : strndup(path, (size_t)(slash - path));
}

char *path_normal(const char *path)
{
    char *ret = malloc(strlen(path) + 2), *out = ret;

    if (!ret)
        return NULL;
    *out = '\0';
    while (*path) {
        path += strspn(path, "/");
        size_t n = strcspn(path, "/");

        if (n == 2 && memcmp(path, "..", 2) == 0) {
            char *slash = strrchr(ret, '/');

            out = slash ? slash : ret;
        } else if (n && !(n == 1 && *path == '.')) {
            *out++ = '/';
            memcpy(out, path, n);
            out += n;
        }
        *out = '\0';
        path += n;
    }
    if (out == ret)
        memcpy(ret, "/", 2);
    return ret;
}

char *path_relative(const char *dir, const char *path)
{
    size_t common = 0, up = 0;

    for (size_t i = 0;; i++) {
        bool end_a = !dir[i] || dir[i] == '/', end_b = !path[i] || path[i] == '/';

        if (end_a && end_b)
            common = i;
        if (!dir[i] || !path[i] || dir[i] != path[i])
            break;
    }
    for (const char *c = dir + common; *c; c++)
        up += *c == '/' && c[1];
    const char *rest = path + common + strspn(path + common, "/");
    char *ret = malloc(up * 3 + strlen(rest) + 1);
    if (!ret)
        return NULL;
    for (size_t i = 0; i < up; i++)
        memcpy(ret + i * 3, "../", 3);
    memcpy(ret + up * 3, rest, strlen(rest) + 1);
    return ret;
}

/* ---- questions ---- */

bool store_exists(const char *path) SUSPENDS_UNCHECKED
{
    struct lvm_store *vg = lvm_store_of(path);
    struct stat st;

    if (vg)
        return lvm_store_exists(vg, lvm_store_name(vg, path));
    return lstat(path, &st) == 0;
}

bool store_same_file(const char *a, const char *b) SUSPENDS_UNCHECKED
{
    struct lvm_store *vg = lvm_store_of(a);
    struct stat sa, sb;

    if (vg)
        return lvm_store_of(b) == vg &&
               lvm_store_same(vg, lvm_store_name(vg, a), lvm_store_name(vg, b));
    return lstat(a, &sa) == 0 && lstat(b, &sb) == 0 && sa.st_dev == sb.st_dev &&
           sa.st_ino == sb.st_ino;
}

static int check_mount_point(const struct pool *pool, struct err *err)
{
    struct stat st, up;
    _cleanup_(freep) char *above = path_join(pool->mountpoint, "..");

    if (!above)
        return err_set(err, -ENOMEM, "out of memory");
    if (stat(pool->mountpoint, &st) < 0 || stat(above, &up) < 0)
        return err_errno(err, -errno, "storage '%s': mount point '%s'", pool->id, pool->mountpoint);
    if (st.st_dev == up.st_dev && st.st_ino != up.st_ino)
        return err_set(err, -ENODEV, "storage '%s': nothing is mounted on '%s'", pool->id,
                       pool->mountpoint);
    return 0;
}

int store_open(const struct pool *pool, char **ret_images, struct err *err)
{
    struct lvm_store *vg;
    struct stat st;

    if (pool->type == POOL_LVM) {
        int rc = lvm_store_open(pool, &vg, err);

        if (rc < 0)
            return rc;
        *ret_images = strdup(vg->root);
        return *ret_images ? 0 : err_set(err, -ENOMEM, "out of memory");
    }
    int rc = pool->mountpoint ? check_mount_point(pool, err) : 0;

    if (rc < 0)
        return rc;
    if (stat(pool->path, &st) < 0)
        return err_errno(err, -errno, "storage '%s': path '%s'", pool->id, pool->path);
    if (!S_ISDIR(st.st_mode))
        return err_set(err, -ENOTDIR, "storage '%s': '%s' is not a directory", pool->id,
                       pool->path);
    _cleanup_(freep) char *normal = path_normal(pool->path);
    *ret_images = normal ? path_join(normal, "images") : NULL;
    return *ret_images ? 0 : err_set(err, -ENOMEM, "out of memory");
}

/* ---- steps ---- */

static int sync_path(const char *path, int flags, struct err *err)
{
    _cleanup_(closep) int fd = open(path, flags | O_RDONLY | O_CLOEXEC);

    if (fd < 0)
        return err_errno(err, -errno, "open '%s'", path);
    /* some network file systems know no fsync of a directory: their renames are synchronous */
    if (fsync(fd) < 0 && errno != EINVAL)
        return err_errno(err, -errno, "fsync '%s'", path);
    return 0;
}

int store_sync_dir(const char *dir, struct err *err)
{
    if (lvm_store_of(dir))
        return 0; /* each command is durable */
    return sync_path(dir, O_DIRECTORY, err);
}

int store_sync_file(const char *path, struct err *err)
{
    if (lvm_store_of(path))
        return 0; /* whoever wrote has flushed the device */
    return sync_path(path, O_NOFOLLOW, err);
}

static int sync_parent(const char *path, struct err *err)
{
    _cleanup_(freep) char *dir = path_dir(path);

    return dir ? store_sync_dir(dir, err) : err_set(err, -ENOMEM, "out of memory");
}

int store_link(const char *old, const char *new, struct err *err) SUSPENDS_UNCHECKED
{
    struct lvm_store *vg = lvm_store_of(new);

    if (vg)
        return lvm_store_link(vg, lvm_store_name(vg, old), lvm_store_name(vg, new), err);
    if (link(old, new) < 0)
        return err_errno(err, -errno, "link '%s' to '%s'", old, new);
    return sync_parent(new, err);
}

int store_rename(const char *old, const char *new, struct err *err) SUSPENDS_UNCHECKED
{
    struct lvm_store *vg = lvm_store_of(new);

    if (vg)
        return lvm_store_rename(vg, lvm_store_name(vg, old), lvm_store_name(vg, new), err);
    /* rename() of two names of one file does nothing: the old one would stay */
    if (store_same_file(old, new))
        return store_unlink(old, err);
    if (rename(old, new) < 0)
        return err_errno(err, -errno, "rename '%s' to '%s'", old, new);
    return sync_parent(new, err);
}

int store_publish(const char *tmp, const char *new, struct err *err) SUSPENDS_UNCHECKED
{
    struct lvm_store *vg = lvm_store_of(new);

    if (vg)
        return lvm_store_publish(vg, lvm_store_name(vg, tmp), lvm_store_name(vg, new), err);
    if (link(tmp, new) < 0)
        return err_errno(err, -errno, "create '%s'", new);
    if (unlink(tmp) < 0)
        return err_errno(err, -errno, "remove '%s'", tmp);
    return sync_parent(new, err);
}

int store_unlink(const char *path, struct err *err) SUSPENDS_UNCHECKED
{
    struct lvm_store *vg = lvm_store_of(path);
    struct stat st;

    if (vg)
        return lvm_store_unlink(vg, lvm_store_name(vg, path), err);
    bool is_last = lstat(path, &st) == 0 && S_ISREG(st.st_mode) && st.st_nlink == 1;

    if (unlink(path) < 0) {
        if (errno == ENOENT)
            return 0;
        return err_errno(err, -errno, "remove '%s'", path);
    }
    if (is_last) /* a killed server's answers for an image that is not wanted any more */
        layer_forget_journal(st.st_dev, st.st_ino);
    return sync_parent(path, err);
}

/* Names that go while the directory is read do no harm. */
int store_unlink_all(const char *dir, const char *prefix, struct err *err) SUSPENDS_UNCHECKED
{
    struct lvm_store *vg = lvm_store_of(dir);

    if (vg)
        return lvm_store_unlink_all(vg, prefix, err);
    DIR *d = opendir(dir);
    int rc = 0;

    if (!d)
        return errno == ENOENT ? 0 : err_errno(err, -errno, "open '%s'", dir);
    for (struct dirent *e; rc == 0 && (e = readdir(d));) {
        if (strncmp(e->d_name, prefix, strlen(prefix)) != 0)
            continue;
        _cleanup_(freep) char *path = path_join(dir, e->d_name);
        rc = path ? store_unlink(path, err) : err_set(err, -ENOMEM, "out of memory");
    }
    closedir(d);
    return rc;
}

int store_create(const char *path, uint64_t len, struct blk **ret, struct err *err)
{
    struct lvm_store *vg = lvm_store_of(path);
    struct blk_file_opts opts = {
        .writable = true, .create = !vg, .direct = true, .lock = BLK_LOCK_WRITE};
    int rc = vg ? lvm_store_create(vg, lvm_store_name(vg, path), len, err) : 0;

    if (rc == 0)
        rc = blk_file_open(path, &opts, ret, err);
    if (rc == -ENOENT && !vg) { /* the folder of a guest goes with its last volume: that was now */
        _cleanup_(freep) char *dir = path_dir(path);

        rc = dir ? store_mkdir(dir, err) : err_set(err, -ENOMEM, "out of memory");
        if (rc == 0)
            rc = blk_file_open(path, &opts, ret, err);
    }
    return rc;
}

static uint64_t thin_chunk(const struct pool *pool)
{
    return pool->type != POOL_LVM ? 0 : pool->thin_given ? pool->thin_chunk : THIN_CHUNK;
}

struct image_grow_opts store_grow_opts(const struct pool *pool)
{
    return (struct image_grow_opts){.chunk = thin_chunk(pool)};
}

bool store_is_thin(const struct pool *pool)
{
    return thin_chunk(pool) > 0;
}

int store_image_len(const struct pool *pool, const struct image_create_opts *opts, uint64_t *ret,
                    struct err *err)
{
    uint64_t chunk = thin_chunk(pool);

    *ret = 0;
    if (pool->type != POOL_LVM)
        return 0;
    int rc = lvm_image_len_of(opts, ret, err);
    if (rc == 0 && chunk && opts->prealloc < PREALLOC_FALLOC)
        *ret = MIN(*ret, chunk);
    return rc;
}

int store_set_mode(const char *path, mode_t mode, struct err *err)
{
    if (!lvm_store_of(path) && chmod(path, mode) < 0)
        return err_errno(err, -errno, "change the mode of '%s'", path);
    return 0;
}

int store_stat(const char *path, struct stat *ret) SUSPENDS_UNCHECKED
{
    struct lvm_store *vg = lvm_store_of(path);

    if (vg)
        return lvm_store_stat(vg, lvm_store_name(vg, path), ret);
    return lstat(path, ret) < 0 ? -errno : 0;
}

int store_mkdir(const char *path, struct err *err)
{
    if (lvm_store_of(path))
        return 0;
    if (mkdir(path, 0755) < 0) {
        if (errno == EEXIST)
            return 0;
        return err_errno(err, -errno, "make directory '%s'", path);
    }
    return sync_parent(path, err);
}

int store_copy_owner(const char *path, const struct stat *like, struct err *err)
{
    if (lvm_store_of(path))
        return 0;
    _cleanup_(closep) int fd = open(path, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
    struct stat st;

    if (fd < 0 || fstat(fd, &st) < 0)
        return err_errno(err, -errno, "open '%s'", path);
    if ((st.st_uid != like->st_uid || st.st_gid != like->st_gid) &&
        fchown(fd, like->st_uid, like->st_gid) < 0 && errno != EPERM)
        return err_errno(err, -errno, "change the owner of '%s'", path);
    /* whoever may read the parent may read the overlay; an owner can always write */
    if (fchmod(fd, (like->st_mode & 0777) | 0600) < 0)
        return err_errno(err, -errno, "change the mode of '%s'", path);
    return 0;
}
