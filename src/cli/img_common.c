/* Formats, creation options and the making of new images: see img.h. */
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include "base/bits.h"
#include "cli/img.h"

int img_format_check(const char *format, struct err *err)
{
    if (!format || !strcmp(format, "qcow2") || !strcmp(format, "raw"))
        return 0;
    return err_set(err, -EINVAL, "unknown format '%s' (qcow2 or raw)", format);
}

int img_output(const struct args *args, bool *ret_json, struct err *err)
{
    const char *output = args_value(args, "output", "human");

    *ret_json = !strcmp(output, "json");
    if (!*ret_json && strcmp(output, "human") != 0)
        return err_set(err, -EINVAL, "--output takes human or json, not '%s'", output);
    return 0;
}

void img_create_fini(struct img_create *c)
{
    free(c->text);
}

static int parse_prealloc(const char *value, enum qcow2_prealloc *ret, struct err *err)
{
    static const char *const names[] = {"off", "metadata", "falloc", "full"};

    for (unsigned i = 0; i < ARRAY_SIZE(names); i++) {
        if (!strcmp(value, names[i])) {
            *ret = (enum qcow2_prealloc)i;
            return 0;
        }
    }
    return err_set(err, -EINVAL, "preallocation is off, metadata, falloc or full, not '%s'", value);
}

static int parse_number(const char *value, unsigned *ret, struct err *err)
{
    char *end;
    unsigned long v = strtoul(value, &end, 10);

    if (end == value || *end || v > UINT32_MAX)
        return err_set(err, -EINVAL, "'%s' is no number", value);
    *ret = (unsigned)v;
    return 0;
}

static int set_compat(struct img_create *c, const char *value, struct err *err)
{
    bool v2 = !strcmp(value, "0.10") || !strcmp(value, "v2");

    if (!v2 && strcmp(value, "1.1") != 0 && strcmp(value, "v3") != 0)
        return err_set(err, -EINVAL, "compat is 0.10 or 1.1, not '%s'", value);
    c->qcow2.version = v2 ? 2 : 3;
    return 0;
}

static int set_compression(struct img_create *c, const char *value, struct err *err)
{
    if (strcmp(value, "zlib") != 0 && strcmp(value, "zstd") != 0)
        return err_set(err, -EINVAL, "compression_type is zlib or zstd, not '%s'", value);
    c->qcow2.compression = value[1] == 's' ? QCOW2_ZSTD : QCOW2_ZLIB;
    return 0;
}

static int set_option(struct img_create *c, const char *key, const char *value, struct err *err)
{
    struct image_create_opts *q = &c->qcow2;

    if (!strcmp(key, "cluster_size"))
        return parse_cluster_size(value, &q->cluster_size, err);
    if (!strcmp(key, "extended_l2"))
        return parse_bool(value, &q->extended_l2, err);
    if (!strcmp(key, "lazy_refcounts"))
        return parse_bool(value, &q->lazy_refcounts, err);
    if (!strcmp(key, "refcount_bits"))
        return parse_number(value, &q->refcount_bits, err);
    if (!strcmp(key, "preallocation"))
        return parse_prealloc(value, &q->prealloc, err);
    if (!strcmp(key, "compat"))
        return set_compat(c, value, err);
    if (!strcmp(key, "compression_type"))
        return set_compression(c, value, err);
    if (!strcmp(key, "size")) {
        c->has_size = true;
        return parse_size(value, &c->size, err);
    }
    if (!strcmp(key, "backing_file"))
        q->backing_name = value;
    else if (!strcmp(key, "backing_fmt"))
        q->backing_format = value;
    else
        return err_set(err, -EINVAL, "unknown option");
    return 0;
}

int img_create_options(struct img_create *c, const char *text, struct err *err)
{
    char *save = NULL;

    c->text = strdup(text);
    if (!c->text)
        return -ENOMEM;
    for (char *key = strtok_r(c->text, ",", &save); key; key = strtok_r(NULL, ",", &save)) {
        char *eq = strchr(key, '=');

        if (!eq)
            return err_set(err, -EINVAL, "option '%s' has no value", key);
        *eq = '\0';
        int rc = set_option(c, key, eq + 1, err);
        if (rc < 0)
            return err_prefix(err, rc, "option %s", key);
    }
    return 0;
}

SUSPENDS static int format_raw(struct blk *blk, const struct img_create *c, struct err *err)
{
    uint64_t len = c->size;
    int rc = 0;

    if (c->qcow2.prealloc == PREALLOC_METADATA)
        return err_set(err, -EINVAL, "a raw image has no metadata to preallocate");
    if (blk->fixed_len)
        return len <= blk->len ? 0
                               : err_set(err, -ENOSPC, "the device has only %llu bytes",
                                         (unsigned long long)blk->len);
    if (c->qcow2.prealloc == PREALLOC_OFF)
        rc = blk_resize(blk, len);
    else if (c->qcow2.prealloc == PREALLOC_FALLOC)
        rc = blk_preallocate(blk, 0, len);
    else
        for (uint64_t off = 0; off < len && rc == 0; off += BUF_ZERO_LEN)
            rc = blk_write(blk, off, buf_zeroes(), MIN(len - off, (uint64_t)BUF_ZERO_LEN));
    if (rc == 0)
        rc = blk_flush(blk);
    return rc < 0 ? err_errno(err, rc, "reserve %llu bytes", (unsigned long long)len) : 0;
}

SUSPENDS static int format_blk(struct blk *blk, const struct img_create *c, struct err *err)
{
    struct image_create_opts opts = c->qcow2;

    opts.virtual_len = c->size;
    return !strcmp(c->format, "raw") ? format_raw(blk, c, err) : image_create(blk, &opts, err);
}

int img_hold_target(const char *path, struct blk **ret, struct err *err)
{
    struct blk_file_opts held = {.writable = true, .lock = BLK_LOCK_WRITE};
    struct stat st;

    *ret = NULL;
    if (stat(path, &st) < 0 || !S_ISREG(st.st_mode))
        return 0;
    return blk_file_open(path, &held, ret, err);
}

static char unfinished[PATH_MAX];

static void on_signal(int sig)
{
    if (unfinished[0])
        unlink(unfinished);
    raise(sig); /* reset to its default: ends the program */
}

void img_remove_on_signal(const char *path)
{
    static const int signals[] = {SIGINT, SIGTERM, SIGHUP};
    struct sigaction act = {.sa_handler = on_signal, .sa_flags = (int)SA_RESETHAND};

    unfinished[0] = '\0';
    if (!path || strlen(path) >= sizeof(unfinished))
        return;
    memcpy(unfinished, path, strlen(path) + 1);
    for (unsigned i = 0; i < ARRAY_SIZE(signals); i++)
        sigaction(signals[i], &act, NULL);
}

SUSPENDS static int create_device(const char *path, const struct img_create *c, struct err *err)
{
    struct blk_file_opts opts = {.writable = true, .direct = true, .lock = BLK_LOCK_WRITE};
    struct blk *blk;
    int rc = blk_file_open(path, &opts, &blk, err);

    if (rc < 0)
        return rc;
    rc = format_blk(blk, c, err);
    blk_close(blk);
    return rc;
}

int img_put_in_place(const char *tmp, const char *path, struct err *err)
{
    if (rename(tmp, path) < 0)
        return err_errno(err, -errno, "rename '%s' to '%s'", tmp, path);
    _cleanup_(freep) char *dir = strdup(path);
    char *slash = dir ? strrchr(dir, '/') : NULL;
    if (slash)
        slash[slash == dir] = '\0';
    _cleanup_(closep) int fd = open(slash ? dir : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0 || fsync(fd) < 0)
        return err_errno(err, -errno, "sync the directory of '%s'", path);
    return 0;
}

int img_create_new(const char *path, const struct img_create *c, struct err *err)
{
    struct blk_file_opts opts = {
        .writable = true, .create = true, .direct = true, .lock = BLK_LOCK_WRITE};
    struct blk *blk;
    int rc = blk_file_open(path, &opts, &blk, err);

    if (rc < 0)
        return rc;
    rc = format_blk(blk, c, err);
    blk_close(blk);
    if (rc < 0)
        unlink(path);
    return rc;
}

SUSPENDS static int create_regular(const char *path, const struct img_create *c, struct err *err)
{
    _cleanup_(freep) char *tmp = NULL;

    if (asprintf(&tmp, "%s.new-%d", path, (int)getpid()) < 0)
        return -ENOMEM;
    img_remove_on_signal(tmp);
    int rc = img_create_new(tmp, c, err);
    if (rc == 0 && (rc = img_put_in_place(tmp, path, err)) < 0)
        unlink(tmp);
    img_remove_on_signal(NULL);
    return rc;
}

SUSPENDS int img_create_file(const char *path, const struct img_create *c, struct err *err)
{
    struct stat st;
    struct blk *old;

    if (stat(path, &st) == 0 && S_ISBLK(st.st_mode))
        return create_device(path, c, err);
    int rc = img_hold_target(path, &old, err);
    if (rc < 0)
        return rc;
    rc = create_regular(path, c, err);
    blk_close(old);
    return rc;
}
