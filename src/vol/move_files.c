/*
 * The files of a volume that is moved: what each becomes in the target, and the copying.
 *
 * A file is copied as it is, with its own data only; its backing name stays, as directories are
 * laid out in the same way, or is written anew. What the volume stands on outside of itself, a base
 * image or another volume's snapshot, has to be in the target under the same name and with the same
 * contents, which are compared: a wrong base image would damage the clone silently. Else the lowest
 * of the volume's own files are flattened: they get everything that they show.
 */
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/bits.h"
#include "base/check.h"
#include "blk/blk.h"
#include "rt/buf.h"
#include "vol/create.h"
#include "vol/move.h"

#define COMPARE_BYTES MIB

void move_files_fini(struct move *m)
{
    vec_for_each(f, &m->files) {
        blk_close(f->hold);
        free(f->tmp);
        free(f->to);
        free(f->backing);
    }
    vec_free(&m->files);
    vec_for_each(it, &m->compared)
        chain_close(*it, NULL);
    vec_free(&m->compared);
}

/* ---- plan ---- */

/* The element of the target that bears the name of what a file stands on. */
static struct cfile *find_base(const struct move *m, const struct cfile *parent)
{
    size_t n = strlen(m->src.images);
    _cleanup_(freep) char *path = NULL;

    if (!parent || strncmp(parent->path, m->src.images, n) != 0 ||
        asprintf(&path, "%s%s", m->dst.images, parent->path + n) < 0)
        return NULL;
    struct cfile *f = catalog_file(m->dst.cat, path);
    return f && f->vol && !f->vol->broken && !f->deleting && (f->snap || f->vol->base) ? f : NULL;
}

static int plan_base(struct move *m, struct moved_file *f, struct err *err)
{
    const struct cfile *base = find_base(m, f->src->parent);

    f->flatten = m->flatten;
    if (m->flatten)
        return 0;
    if (!base)
        return err_set(err, -ENOENT,
                       "'%s' stands on '%s', which is not in the storage '%s': move that first, or "
                       "copy its data into the volume with --flatten",
                       f->src->name, f->src->backing_path, m->dst.pool->id);
    f->backing = path_relative(m->dir, base->path);
    return f->backing ? 0 : err_set(err, -ENOMEM, "out of memory");
}

static int plan_file(struct move *m, const struct cfile *src, unsigned i, struct err *err)
{
    struct moved_file f = {.src = src, .to = path_join(m->dir, src->name)};
    char what[16];

    snprintf(what, sizeof(what), "%u", i);
    f.tmp = op_tmp_path(&m->dst, m->dir, what);
    if (!f.tmp || !f.to || vec_push(&m->files, f) < 0) {
        free(f.tmp);
        free(f.to);
        return err_set(err, -ENOMEM, "out of memory");
    }
    if (src->special)
        return err_set(err, -ENOTSUP, "'%s' %s: it cannot be moved", src->path, src->special);
    struct moved_file *added = &m->files.data[m->files.len - 1];
    if (src->backing && !(src->parent && src->parent->vol == m->vol))
        return plan_base(m, added, err);
    if (src->backing)
        added->backing = strdup(src->parent->name);
    return src->backing && !added->backing ? err_set(err, -ENOMEM, "out of memory") : 0;
}

int move_plan_files(struct move *m, struct err *err)
{
    unsigned i = 0;
    int rc = 0;

    vec_for_each(it, &m->vol->snaps) {
        if (rc == 0)
            rc = plan_file(m, *it, i++, err);
    }
    if (rc == 0)
        rc = plan_file(m, m->vol->current, i, err);
    vec_for_each(f, &m->files)
        m->meter.total += f->flatten ? 0 : (uint64_t)f->src->st.st_blocks * 512;
    return rc;
}

int move_hold_files(struct move *m, struct err *err)
{
    int rc = overlay_settle(m->vol->current->path, m->vol->current->format, err);

    vec_for_each(f, &m->files) {
        if (rc == 0)
            rc = overlay_hold(f->src->path, &f->hold, err);
    }
    return rc;
}

/* ---- comparing what it stands on ---- */

/* Bytes from `off` on that are zero in both, by their maps. */
SUSPENDS static int both_zero(struct chain *a, struct chain *b, uint64_t off, uint64_t *ret)
{
    struct chain_status sa, sb;
    uint64_t len = chain_len(a) - off;
    int rc = chain_status(a, NULL, off, len, &sa);

    if (rc == 0)
        rc = chain_status(b, NULL, off, len, &sb);
    if (rc == 0)
        *ret = sa.zero && sb.zero ? MIN(sa.len, sb.len) : 0;
    return rc;
}

SUSPENDS static int compare_piece(struct chain *a, struct chain *b, uint64_t off, size_t len,
                                  bool *ret_same)
{
    _cleanup_(buf_drop) struct buf x = {buf_get(len), len}, y = {buf_get(len), len};

    if (!x.data || !y.data)
        return -ENOMEM;
    IOV_ITER_BUF(ix, vx, x.data, len);
    IOV_ITER_BUF(iy, vy, y.data, len);
    int rc = chain_read(a, off, len, &ix);
    if (rc == 0)
        rc = chain_read(b, off, len, &iy);
    if (rc == 0)
        *ret_same = memcmp(x.data, y.data, len) == 0;
    return rc;
}

SUSPENDS static int compare(const struct move *m, struct chain *a, struct chain *b, bool *ret_same)
{
    uint64_t len = chain_len(a);
    int rc = 0;

    *ret_same = len == chain_len(b);
    for (uint64_t off = 0, skip; rc == 0 && *ret_same && off < len; off += skip) {
        rc = both_zero(a, b, off, &skip);
        if (rc == 0 && skip == 0) {
            skip = MIN(len - off, COMPARE_BYTES);
            rc = compare_piece(a, b, off, (size_t)skip, ret_same);
        }
        if (rc == 0 && m->ctx->progress)
            m->ctx->progress(m->ctx->ctx, off + skip, len);
    }
    return rc;
}

SUSPENDS static int compare_base(struct move *m, const struct cfile *here,
                                 const struct cfile *there, struct err *err)
{
    struct chain_opts opts = {.format = here->format};
    struct chain *a, *b;
    bool same = false;
    int rc = chain_open(there->path, &(struct chain_opts){.format = there->format}, &b, err);

    if (rc == 0 && vec_push(&m->compared, b) < 0) {
        chain_close(b, NULL);
        rc = err_set(err, -ENOMEM, "out of memory");
    }
    if (rc == 0)
        rc = chain_open(here->path, &opts, &a, err);
    if (rc < 0)
        return rc;
    rc = compare(m, a, b, &same);
    chain_close(a, NULL);
    if (rc < 0)
        return err_errno(err, rc, "compare '%s' and '%s'", here->path, there->path);
    if (!same)
        return err_set(err, -EINVAL,
                       "'%s' and '%s' have the same name and differ: the volume can be moved with "
                       "--flatten only",
                       here->path, there->path);
    return 0;
}

int move_compare_bases(struct move *m, struct err *err)
{
    int rc = 0;

    for (size_t i = 0; i < m->files.len && rc == 0; i++) {
        const struct cfile *here = m->files.data[i].src->parent;
        bool seen = false;

        if (m->files.data[i].flatten || !here || here->vol == m->vol)
            continue;
        for (size_t j = 0; j < i; j++)
            seen |= m->files.data[j].src->parent == here;
        const struct cfile *there = find_base(m, here);
        if (!seen && there)
            rc = compare_base(m, here, there, err);
    }
    return rc;
}

/* ---- copying ---- */

/* Its own lock would be in the way of the chain's: nobody can write to it in either case. */
SUSPENDS static int flatten_file(struct move *m, struct moved_file *f, struct err *err)
{
    struct chain_opts opts = {.format = f->src->format};
    struct chain *chain;

    blk_close(TAKE_PTR(f->hold));
    int rc = chain_open(f->src->path, &opts, &chain, err);
    if (rc < 0)
        return rc;
    rc = new_image_fill(&m->dst, f->tmp, f->src->format, chain, err);
    chain_close(chain, NULL);
    return rc == 0 ? overlay_hold(f->src->path, &f->hold, err) : rc;
}

static const char *backing_format(const struct cfile *f)
{
    return f->parent ? f->parent->format : f->backing_format;
}

/* Owner, mode and the time at which a snapshot was taken are the source's. */
static int copy_attributes(const struct moved_file *f, struct err *err)
{
    const struct stat *st = &f->src->st;
    struct timespec when = {.tv_sec = st->st_mtim.tv_sec, .tv_nsec = st->st_mtim.tv_nsec};

    if (lchown(f->tmp, st->st_uid, st->st_gid) < 0 && errno != EPERM)
        return err_errno(err, -errno, "change the owner of '%s'", f->tmp);
    if (chmod(f->tmp, st->st_mode & 0777) < 0)
        return err_errno(err, -errno, "change the mode of '%s'", f->tmp);
    taken_set(f->tmp, when);
    return store_sync_file(f->tmp, err);
}

SUSPENDS static int copy_one(struct move *m, struct moved_file *f, struct err *err)
{
    bool same = !f->backing || strcmp(f->backing, f->src->backing) == 0;
    int rc = f->flatten ? flatten_file(m, f, err) : file_copy(f->src->path, f->tmp, &m->meter, err);

    crash_point("move-copied");
    if (rc == 0 && !f->flatten && !same)
        rc = merge_set_backing(f->tmp, f->backing, backing_format(f->src), err);
    if (rc == 0)
        rc = copy_attributes(f, err);
    crash_point("move-durable");
    return rc;
}

int move_copy_files(struct move *m, struct err *err)
{
    int rc = 0;

    vec_for_each(f, &m->files) {
        if (rc == 0)
            rc = copy_one(m, f, err);
    }
    return rc;
}
