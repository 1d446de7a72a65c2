/*
 * Filling a new volume from an image file or from standard input.
 *
 * What is imported may come from anybody: an image that names a backing file or a data file is
 * refused, it would make this host read what its author chose. Formats other than qcow2 that are
 * known by their first bytes are refused rather than taken as raw data.
 */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include "base/bits.h"
#include "base/check.h"
#include "job/job.h"
#include "vol/create.h"
#include "vol/store_lvm.h"

#define SPOOL_BYTES    (1u << 20)
#define SPOOL_LV_BYTES (256 * MIB) /* an LV begins with */
#define SPOOL_BLOCK    65536u      /* a run of zeroes this long becomes a hole */

static const struct {
    const char *magic;
    size_t off;
    const char *name;
} foreign[] = {
    {"KDMV", 0, "vmdk"},         {"# Disk DescriptorFile", 0, "vmdk"},
    {"vhdxfile", 0, "vhdx"},     {"conectix", 0, "vpc"},
    {"QED\0", 0, "qed"},         {"\x7f\x10\xda\xbe", 64, "vdi"},
    {"LUKS\xba\xbe", 0, "luks"},
};

static int refuse_foreign(const char *file, struct err *err)
{
    char head[128] = {0};
    _cleanup_(closep) int fd = open(file, O_RDONLY | O_CLOEXEC | O_NONBLOCK);

    if (fd < 0)
        return err_errno(err, -errno, "open '%s'", file);
    if (pread(fd, head, sizeof(head), 0) < 0)
        return err_errno(err, -errno, "read '%s'", file);
    for (unsigned i = 0; i < ARRAY_SIZE(foreign); i++) {
        size_t n = strlen(foreign[i].magic);

        if (memcmp(head + foreign[i].off, foreign[i].magic, n) == 0)
            return err_set(
                err, -ENOTSUP,
                "'%s' looks like a %s image: convert it first, or say --source-format raw", file,
                foreign[i].name);
    }
    return 0;
}

static bool ends_in_raw(const char *file)
{
    size_t len = strlen(file);

    return len > 4 && strcmp(file + len - 4, ".raw") == 0;
}

SUSPENDS static int open_source(const char *file, const char *format, struct chain **ret,
                                struct err *err)
{
    struct chain_opts opts = {.format = format, .buffered = true, .no_backing = true};
    struct chain *chain;
    int rc = format || ends_in_raw(file) ? 0 : refuse_foreign(file, err);

    if (rc == 0)
        rc = chain_open(file, &opts, &chain, err);
    if (rc < 0)
        return rc;
    struct image *img = layer_image(chain_layer(chain, 0));
    if (img && image_header(img)->backing_name) {
        rc = err_set(err, -EINVAL, "'%s' has a backing file ('%.200s'): merge it first", file,
                     image_header(img)->backing_name);
        chain_close(chain, NULL);
        return rc;
    }
    *ret = chain;
    return 0;
}

/* Reads what comes; fewer bytes than asked mean the end. */
static ssize_t read_full(int fd, char *buf, size_t len)
{
    size_t done = 0;

    while (done < len) {
        ssize_t n = read(fd, buf + done, len - done);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return -errno;
        if (n == 0)
            break;
        done += (size_t)n;
    }
    return (ssize_t)done;
}

/* Zeroes are left out where there are some already. */
SUSPENDS static int write_blocks(struct blk *blk, const char *buf, size_t len, uint64_t off)
{
    int rc = 0;

    for (size_t pos = 0; pos < len && rc == 0;) {
        size_t n = MIN(len - pos, (size_t)SPOOL_BLOCK);

        if (!blk->fresh_zero || !buf_is_zero(buf + pos, n))
            rc = blk_write(blk, off + pos, buf + pos, n);
        pos += n;
    }
    return rc;
}

/* An LV is made longer as it comes; its last extent is zero behind the end. */
SUSPENDS static int spool_piece(struct blk *blk, char *buf, size_t len, uint64_t off,
                                struct err *err)
{
    int rc = 0;

    if (blk->fixed_len && off + len > blk->len)
        rc = blk_extend(blk, MAX(off + len, 2 * blk->len), err);
    if (rc < 0)
        return rc;
    rc = write_blocks(blk, buf, len, off);
    return rc < 0 ? err_errno(err, rc, "write '%s'", blk->name) : 0;
}

/* The length it has been found to have; what a device held behind it is zeroed. */
SUSPENDS static int spool_end(struct blk *blk, uint64_t len, struct err *err)
{
    struct lvm_store *vg = lvm_store_of(blk->name);
    uint64_t end = align_up(len, 512);
    int rc = 0;

    if (len == 0)
        return err_set(err, -EINVAL, "standard input is empty");
    if (vg)
        rc = blk_zero(blk, len, blk->len - len, BLK_MAY_UNMAP);
    else
        rc = blk_resize(blk, end);
    if (rc == 0)
        rc = blk_flush(blk);
    if (rc < 0)
        return err_errno(err, rc, "write '%s'", blk->name);
    return vg ? lvm_store_reduce(vg, lvm_store_name(vg, blk->name), end, err) : 0;
}

/* Standard input into a raw image at `path`, sparse where it is a file. */
SUSPENDS static int spool(const struct vol_ctx *ctx, const char *path, uint64_t *ret_len,
                          struct err *err)
{
    _cleanup_(freep) char *buf = malloc(SPOOL_BYTES);
    uint64_t len = 0;
    ssize_t n = SPOOL_BYTES;
    struct blk *blk;
    int rc = buf ? store_create(path, SPOOL_LV_BYTES, &blk, err)
                 : err_set(err, -ENOMEM, "out of memory");

    if (rc < 0)
        return rc;
    while (rc == 0 && n == SPOOL_BYTES) {
        n = read_full(STDIN_FILENO, buf, SPOOL_BYTES);
        rc = n < 0 ? err_errno(err, (int)n, "read standard input")
                   : spool_piece(blk, buf, (size_t)n, len, err);
        len += n > 0 ? (uint64_t)n : 0;
        if (ctx->progress)
            ctx->progress(ctx->ctx, len, 0);
    }
    if (rc == 0)
        rc = spool_end(blk, len, err);
    blk_close(blk);
    *ret_len = align_up(len, 512);
    return rc;
}

SUSPENDS static int import_file(struct new_volume *nv, const char *file, const char *format,
                                struct err *err)
{
    struct chain *src;
    int rc = open_source(file, format, &src, err);

    if (rc < 0)
        return rc;
    rc = new_volume_fill(nv, src, err);
    chain_close(src, NULL);
    return rc;
}

/* A stream's length is not known before its end: it is spooled in the pool, as the volume itself if
 * that is raw. */
SUSPENDS static int import_stream(struct new_volume *nv, struct err *err)
{
    uint64_t len;

    if (strcmp(nv->format, "raw") == 0)
        return spool(nv->op->ctx, nv->tmp, &len, err);
    _cleanup_(freep) char *path = op_tmp_path(nv->op, nv->dir, "spool");
    int rc =
        path ? spool(nv->op->ctx, path, &nv->len, err) : err_set(err, -ENOMEM, "out of memory");
    crash_point("import-spooled");
    if (rc == 0)
        rc = import_file(nv, path, "raw", err);
    if (path)
        store_unlink(path, NULL);
    return rc;
}

SUSPENDS static int run(struct new_volume *nv, const char *file, const char *format,
                        struct err *err)
{
    int rc = new_volume_begin(nv, err);

    if (rc == 0)
        rc = strcmp(file, "-") == 0 ? import_stream(nv, err) : import_file(nv, file, format, err);
    if (rc == 0)
        rc = new_volume_publish(nv, err);
    if (rc < 0)
        new_volume_undo(nv);
    return rc;
}

/* Refused before anything is made. */
SUSPENDS static int check_source(const char *file, const char *format, struct err *err)
{
    struct chain *src;

    if (strcmp(file, "-") == 0)
        return format && strcmp(format, "raw") != 0
                   ? err_set(err, -EINVAL, "standard input is read as raw data, not as %s", format)
                   : 0;
    int rc = open_source(file, format, &src, err);
    if (rc == 0 && chain_len(src) == 0)
        rc = err_set(err, -EINVAL, "'%s' is empty", file);
    else if (rc < 0)
        return rc;
    chain_close(src, NULL);
    return rc;
}

int vol_import(const struct vol_ctx *ctx, const char *file, const char *format,
               const struct vol_name *name, const struct vol_create_opts *opts, struct err *err)
{
    struct new_volume nv = {0};
    struct op op;
    int rc = check_source(file, format, err);

    if (rc == 0)
        rc = op_begin(ctx, name->pool, name, 1, &op, err);
    if (rc < 0)
        return rc;
    rc = new_volume_plan(&op, name, opts, &nv, err);
    if (rc == 0 && ctx->dry_run)
        op_say(ctx, "would import '%s' as '%s'", file, nv.path);
    else if (rc == 0)
        rc = run(&nv, file, format, err);
    if (rc == 0 && !ctx->dry_run)
        op_say(ctx, "'%s' imported", nv.path);
    new_volume_fini(&nv);
    op_end(&op);
    return rc;
}
