/*
 * One open file: its format, its locks, its backing name.
 *
 * Format: as told; else raw for a name that ends in .raw, else by the first bytes. A guest may
 * write a qcow2 header into a raw disk, so whoever records or knows the format must pass it.
 */
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include "base/bits.h"
#include "base/check.h"
#include "chain/internal.h"
#include "qcow2/journal.h"
#include "rt/offload.h"
#include "rt/reactor.h"

#define RAW_UNIT     512u /* a raw disk's length is rounded up to it, as QEMU does */
#define SPLIT_LOOKS  64u  /* holes smaller than a unit that are passed at once */
#define LOOKS_A_TURN 64u

const char *path_strip_protocol(const char *path)
{
    return strncmp(path, "file:", 5) == 0 ? path + 5 : path;
}

struct stat_call {
    const char *path;
    struct stat st;
};

static int call_stat(void *arg)
{
    struct stat_call *call = arg;

    return stat(call->path, &call->st) < 0 ? -errno : 0;
}

int file_id_get(const char *path, struct file_id *ret)
{
    struct stat_call call = {.path = path};
    uint64_t id;

    if (blk_path_is_provided(path, &id)) { /* until it is opened there may be no node */
        *ret = (struct file_id){UINT64_MAX, id};
        return 0;
    }
    int rc = offload(call_stat, &call);

    if (rc < 0)
        return rc;
    /* all names of a block device have its number in common, not their inode */
    if (S_ISBLK(call.st.st_mode))
        *ret = (struct file_id){call.st.st_rdev, 0};
    else
        *ret = (struct file_id){call.st.st_dev, call.st.st_ino};
    return 0;
}

static bool name_is_raw(const char *path)
{
    size_t n = strlen(path);

    return n > 4 && strcmp(path + n - 4, ".raw") == 0;
}

SUSPENDS static int probe_format(struct blk *blk, const char *path, bool *ret_is_qcow2,
                                 struct err *err)
{
    uint8_t head[512] = {0};

    *ret_is_qcow2 = false;
    if (name_is_raw(path) || blk->len < 4)
        return 0;
    int rc = blk_read(blk, 0, head, sizeof(head));
    if (rc < 0)
        return err_errno(err, rc, "read the first block");
    *ret_is_qcow2 = qcow2_probe(head, sizeof(head));
    return 0;
}

static void make_node_name(struct layer *layer)
{
    static unsigned last;

    snprintf(layer->node_name, sizeof(layer->node_name), "#varve%03u",
             __atomic_add_fetch(&last, 1, __ATOMIC_RELAXED));
}

static void layer_free(struct layer *layer)
{
    if (!layer)
        return;
    free(layer->path);
    free(layer);
}
static void layer_freep(struct layer **layer)
{
    layer_free(*layer);
}

static const char *journal_dir(void)
{
    static char dir[256];
    const char *runtime = getenv("VARVE_RUNTIME");

    snprintf(dir, sizeof(dir), "%s/journal", runtime && *runtime ? runtime : "/run/varve");
    return dir;
}

void layer_forget_journal(uint64_t dev, uint64_t ino)
{
    journal_forget(journal_dir(), &(struct journal_id){.dev = dev, .ino = ino});
}

void layer_sweep_journals(void)
{
    journal_sweep(journal_dir());
}

/* Takes blk on success. */
SUSPENDS static int layer_make(struct blk *blk, const char *path, bool is_qcow2,
                               const struct layer_opts *opts, struct layer **ret, struct err *err)
{
    bool use_journal = blk_file_fd(blk) >= 0 && !opts->no_lock;
    _cleanup_(layer_freep) struct layer *layer = calloc(1, sizeof(*layer));

    if (!layer)
        return err_errno(err, -ENOMEM, "layer");
    layer->path = strdup(path);
    if (!layer->path)
        return err_errno(err, -ENOMEM, "layer");
    layer->blk = blk;
    layer->writable = opts->writable;
    layer->locked = !opts->no_lock;
    layer->space = opts->space;
    make_node_name(layer);
    layer_init_below(layer);
    if (is_qcow2) {
        struct image_opts img_opts = {
            .writable = opts->writable,
            .no_open_checks = opts->no_open_checks,
            .cache_bytes = opts->cache_bytes,
            .prealloc_step = opts->prealloc_step,
            .discard = opts->space.discard,
            .grow = opts->grow,
            .journal_dir = use_journal ? journal_dir() : NULL,
            .ack = opts->ack,
        };
        int rc = image_open(blk, &img_opts, &layer->image, err);
        if (rc < 0)
            return rc;
    }
    *ret = TAKE_PTR(layer);
    return 0;
}

int layer_from_blk(struct blk *blk, bool is_qcow2, const struct layer_opts *opts,
                   struct layer **ret, struct err *err)
{
    struct layer *layer;
    int rc = layer_make(blk, blk->name, is_qcow2, opts, &layer, err);

    if (rc < 0)
        return rc;
    layer->from_blk = true;
    *ret = layer;
    return 0;
}

static int check_format(const char *format, struct err *err)
{
    if (format && strcmp(format, "qcow2") != 0 && strcmp(format, "raw") != 0)
        return err_set(err, -ENOTSUP, "format '%s' is not supported (qcow2, raw)", format);
    return 0;
}

SUSPENDS static int open_on_blk(struct blk *blk, const char *path, const struct layer_opts *opts,
                                struct layer **ret, struct err *err)
{
    bool is_qcow2 = opts->format && strcmp(opts->format, "qcow2") == 0;
    int rc = 0;

    if (!opts->format)
        rc = probe_format(blk, path, &is_qcow2, err);
    if (rc == 0)
        rc = layer_make(blk, path, is_qcow2, opts, ret, err);
    return rc;
}

/* One line that names the file, whichever part of the open failed. */
static int name_file(struct err *err, int rc, const char *path)
{
    if (err && strstr(err_text(err), path))
        return rc;
    return err_prefix(err, rc, "open '%s'", path);
}

int layer_open(const char *path, const struct layer_opts *opts, struct layer **ret, struct err *err)
{
    struct blk_file_opts file_opts = {
        .writable = opts->writable,
        .direct = !opts->buffered,
        .lock = opts->no_lock    ? BLK_LOCK_NONE
                : opts->writable ? BLK_LOCK_WRITE
                                 : BLK_LOCK_READ,
    };
    struct blk *blk;
    struct layer *layer = NULL;
    struct file_id id;

    path = path_strip_protocol(path);
    int rc = check_format(opts->format, err);
    if (rc == 0)
        rc = blk_file_open(path, &file_opts, &blk, err);
    if (rc < 0)
        return name_file(err, rc, path);
    rc = open_on_blk(blk, path, opts, &layer, err);
    if (rc < 0) {
        blk_close(blk);
        return name_file(err, rc, path);
    }
    if (file_id_get(path, &id) == 0) {
        layer->dev = id.dev;
        layer->ino = id.ino;
        layer->has_id = true;
    }
    *ret = layer;
    return 0;
}

int layer_close(struct layer *layer, struct err *err)
{
    int rc = 0;

    if (!layer)
        return 0;
    DEBUG_CHECK(!layer->chain);
    if (layer->image) {
        rc = image_close(layer->image, err);
    } else {
        if (layer->writable)
            rc = blk_flush(layer->blk);
        if (rc < 0)
            err_errno(err, rc, "flush");
        blk_close(layer->blk);
    }
    if (rc < 0)
        err_prefix(err, rc, "close '%s'", layer->path);
    layer_free(layer);
    return rc;
}

/* ---- what a layer is ---- */

const char *layer_path(const struct layer *layer)
{
    return layer->path;
}

void layer_set_path(struct layer *layer, const char *path)
{
    char *copy = strdup(path_strip_protocol(path));

    CHECK_THAT(copy);
    free(layer->path);
    layer->path = copy;
    if (!layer->from_blk)
        blk_file_set_name(layer->blk, layer->path);
}

const char *layer_format(const struct layer *layer)
{
    return layer->image ? "qcow2" : "raw";
}

const char *layer_node_name(const struct layer *layer)
{
    return layer->node_name;
}

void layer_set_node_name(struct layer *layer, const char *name)
{
    snprintf(layer->node_name, sizeof(layer->node_name), "%s", name);
}

struct image *layer_image(const struct layer *layer)
{
    return layer->image;
}

struct blk *layer_blk(const struct layer *layer)
{
    return layer->image ? image_blk(layer->image) : layer->blk;
}

uint64_t layer_len(const struct layer *layer)
{
    return layer->image ? image_len(layer->image) : align_up(layer->blk->len, RAW_UNIT);
}

int layer_end(struct layer *layer, uint64_t *ret, struct err *err)
{
    if (layer->image)
        return image_end(layer->image, ret, err);
    *ret = layer->blk->len;
    return 0;
}

const struct space_opts *layer_space(const struct layer *layer)
{
    return &layer->space;
}

struct layer *layer_lower(const struct layer *layer)
{
    return layer->lower;
}

struct layer *layer_upper(const struct layer *layer)
{
    return layer->index > 0 ? layer->chain->layers.data[layer->index - 1] : NULL;
}

struct chain *layer_chain(const struct layer *layer)
{
    return layer->chain;
}

uint64_t layer_cluster(const struct layer *layer)
{
    return layer->image ? image_header(layer->image)->cluster_size : 64 * KIB;
}

uint64_t layer_unit(const struct layer *layer)
{
    return layer->image ? 1ull << image_header(layer->image)->subcluster_bits : 4096;
}

bool layer_is_writable(const struct layer *layer)
{
    return layer->writable;
}

void layer_use(struct layer *layer)
{
    layer->users++;
}

void layer_unuse(struct layer *layer)
{
    DEBUG_CHECK(layer->users > 0);
    layer->users--;
}

bool layer_in_use(const struct layer *layer)
{
    return layer->users > 0;
}

bool layer_is_pinned(const struct layer *layer)
{
    return layer->pinned;
}

/* ---- backing names ---- */

/* A colon before the first slash names a protocol, as QEMU reads it. */
static bool has_protocol(const char *name)
{
    return name[strcspn(name, ":/")] == ':';
}

int layer_backing_path(const struct layer *layer, char **ret, struct err *err)
{
    const char *name = layer->image ? image_header(layer->image)->backing_name : NULL;

    *ret = NULL;
    if (!name || !*name)
        return 0;
    if (strncmp(name, "file:", 5) == 0)
        name += 5;
    else if (has_protocol(name))
        return err_set(err, -ENOTSUP, "'%s': backing file '%.200s': only plain files are supported",
                       layer->path, name);
    const char *slash = strrchr(layer->path, '/');
    int dir_len = name[0] == '/' || !slash ? 0 : (int)(slash + 1 - layer->path);
    if (asprintf(ret, "%.*s%s", dir_len, layer->path, name) < 0) {
        *ret = NULL;
        return err_errno(err, -ENOMEM, "backing file name");
    }
    return 0;
}

struct dirs_call {
    const char *from, *to;
    char *ret_from, *ret_to; /* absolute directories, owned by the caller */
};

static char *real_dir(const char *path)
{
    const char *slash = strrchr(path, '/');
    char *dir = slash ? strndup(path, (size_t)(slash + 1 - path)) : strdup(".");
    char *real = dir ? realpath(dir, NULL) : NULL;

    free(dir);
    return real;
}

static int call_real_dirs(void *arg)
{
    struct dirs_call *call = arg;

    call->ret_from = real_dir(call->from);
    call->ret_to = real_dir(call->to);
    return call->ret_from && call->ret_to ? 0 : -ENOENT;
}

/* Both absolute; writes ../ for each directory of `from` that is not above `to`, then the rest. */
static char *relative_dir(const char *from, const char *to)
{
    size_t same = 0, ups = 0;

    for (size_t i = 0;; i++) {
        bool from_ends = from[i] == 0 || from[i] == '/', to_ends = to[i] == 0 || to[i] == '/';

        if (from_ends && to_ends)
            same = i;
        if (from[i] != to[i] || from[i] == 0)
            break;
    }
    for (const char *p = from + same; *p; p++)
        ups += *p == '/' && p[1];
    const char *rest = to[same] == '/' ? to + same + 1 : to + same;
    char *ret = calloc(1, ups * 3 + strlen(rest) + 2);
    if (!ret)
        return NULL;
    for (size_t i = 0; i < ups; i++)
        strcat(ret, "../");
    strcat(ret, rest);
    if (*rest && ret[strlen(ret) - 1] != '/')
        strcat(ret, "/");
    return ret;
}

int layer_relative_name(const struct layer *from, const struct layer *to, char **ret)
{
    struct dirs_call call = {.from = from->path, .to = to->path};
    const char *slash = strrchr(to->path, '/');
    const char *base = slash ? slash + 1 : to->path;
    char *dir = NULL;

    *ret = NULL;
    if (from->from_blk || to->from_blk || offload(call_real_dirs, &call) < 0) {
        *ret = strdup(to->path);
    } else {
        dir = relative_dir(call.ret_from, call.ret_to);
        if (dir && asprintf(ret, "%s%s", dir, base) < 0)
            *ret = NULL;
    }
    free(dir);
    free(call.ret_from);
    free(call.ret_to);
    return *ret ? 0 : -ENOMEM;
}

int layer_set_backing(struct layer *layer, const char *name, const char *format, struct err *err)
{
    if (!layer->image)
        return err_set(err, -ENOTSUP, "'%s' is raw and has no backing file", layer->path);
    int rc = image_set_backing(layer->image, name, format, err);
    return rc < 0 ? err_prefix(err, rc, "write the header of '%s'", layer->path) : 0;
}

/* ---- what a layer holds ---- */

SUSPENDS static int map_raw(struct layer *layer, uint64_t off, uint64_t len, struct extent *ret)
{
    bool data = false;
    uint64_t n = len;
    int rc = 0;

    if (off < layer->blk->len)
        rc = blk_status(layer->blk, off, MIN(len, layer->blk->len - off), &data, &n);
    if (rc < 0)
        return rc;
    *ret = (struct extent){data ? EXTENT_DATA : EXTENT_ZERO, n, off, true};
    return 0;
}

int layer_map(struct layer *layer, uint64_t off, uint64_t len, struct extent *ret)
{
    return layer->image ? image_map(layer->image, off, len, ret) : map_raw(layer, off, len, ret);
}

/* Where much was never written the image was preallocated, and its holes are told exactly. In
 * others they are the rest of clusters that were written in part: telling those would only cut
 * extents to pieces. The bounds are QEMU's. */
SUSPENDS static uint64_t unit_to_tell(struct layer *layer)
{
    uint64_t cs = layer_cluster(layer), len = layer_blk(layer)->len;
    uint64_t used = (len - MIN(blk_hole_bytes(layer_blk(layer)), len)) / cs;

    return div_up(len, cs) >= MAX(used * 10 / 9, used + 2) ? RAW_UNIT : MAX(cs, 64 * KIB);
}

int layer_split_at_hole(struct layer *layer, uint64_t off, uint64_t unit, struct extent *ext,
                        bool *ret_hole)
{
    *ret_hole = false;
    if (!layer->image || ext->kind != EXTENT_DATA || !ext->host_valid ||
        !blk_hole_bytes(layer_blk(layer)))
        return 0;
    if (unit == HOLES_TO_TELL)
        unit = unit_to_tell(layer);
    uint64_t pos = 0;
    for (unsigned looks = 0; pos < ext->len && looks < SPLIT_LOOKS; looks++) {
        bool data;
        uint64_t n;
        int rc = blk_status(layer_blk(layer), ext->host_off + pos, ext->len - pos, &data, &n);

        if (rc < 0)
            return rc;
        uint64_t start = align_up(off + pos, unit), end = align_down(off + pos + n, unit);
        if (!data && start < end) {
            *ret_hole = start == off;
            ext->len = start == off ? end - off : start - off;
            return 0;
        }
        pos += n;
    }
    ext->len = MIN(ext->len, align_up(pos, unit));
    return 0;
}

/* Not all of it need have been written: what a sparse file says. */
SUSPENDS static int count_data(struct layer *layer, uint64_t *ret)
{
    uint64_t sum = 0, len = layer_len(layer), off = 0;

    for (unsigned looks = 1; off < len; looks++) {
        struct extent ext;
        bool hole = false;
        int rc = layer_map(layer, off, len - off, &ext);

        if (rc == 0)
            rc = layer_split_at_hole(layer, off, HOLES_TO_TELL, &ext, &hole);
        if (rc < 0)
            return rc;
        if ((ext.kind == EXTENT_DATA && !hole) || ext.kind == EXTENT_COMPRESSED)
            sum += ext.len;
        off += ext.len;
        if (looks % LOOKS_A_TURN == 0)
            reactor_yield();
    }
    *ret = sum;
    return 0;
}

int layer_allocated_bytes(struct layer *layer, uint64_t *ret)
{
    if (layer->image && !blk_hole_bytes(layer_blk(layer)))
        return image_allocated_bytes(layer->image, ret);
    return count_data(layer, ret);
}

SUSPENDS static int reopen_raw(struct layer *layer, bool writable, struct err *err)
{
    int rc = layer->writable ? blk_flush(layer->blk) : 0;

    if (rc < 0)
        return err_errno(err, rc, "flush");
    if (layer->from_blk)
        return 0;
    enum blk_lock lock = !layer->locked ? BLK_LOCK_NONE : writable ? BLK_LOCK_WRITE : BLK_LOCK_READ;
    return blk_file_reopen(layer->blk, writable, lock, err);
}

int layer_reopen(struct layer *layer, bool writable, struct err *err)
{
    int rc = 0;

    if (layer->writable == writable)
        return 0;
    if (layer->image)
        rc = image_reopen(layer->image, writable, err);
    else
        rc = reopen_raw(layer, writable, err);
    if (rc < 0)
        return err_prefix(err, rc, "open '%s' %s", layer->path,
                          writable ? "for writing" : "read-only");
    layer->writable = writable;
    if (layer->image && !writable)
        image_want_ack(layer->image, false); /* no longer the top */
    return 0;
}

int layer_settle(struct layer *layer, struct err *err)
{
    if (!layer->image || layer->writable || !image_has_journal(layer->image))
        return 0;
    int rc = layer_reopen(layer, true, err);
    return rc < 0 ? rc : layer_reopen(layer, false, err);
}
