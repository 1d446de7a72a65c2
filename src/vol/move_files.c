/*
 * The files of a volume that is moved: what each becomes in the target, and the copying.
 *
 * Between directories a file is copied as it is, with its own data only; its backing name stays, as
 * directories are laid out in the same way, or is written anew. What the volume stands on outside
 * of itself, a base image or another volume's snapshot, has to be in the target under the same name
 * and with the same contents, which are compared: a wrong base image would damage the clone
 * silently. Else the lowest of the volume's own files are flattened: they get everything that they
 * show.
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
#include "vol/store_lvm.h"

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

/* ---- names ---- */

int move_name_there(const struct pool *from, const struct pool *to, const char *vmid,
                    const char *stem, struct vol_name *ret, struct err *err)
{
    bool base = stem_is_base(stem);

    snprintf(ret->vmid, sizeof(ret->vmid), "%s", to->type == POOL_LVM ? "" : vmid);
    if (to->type == POOL_LVM || from->type != POOL_LVM || (!base && strncmp(stem, "vm-", 3) != 0))
        return 0;
    const char *number = strchr(stem, '-') + 1;
    size_t n = strspn(number, "0123456789");
    if (!base && (!n || number[n] != '-'))
        return 0;
    snprintf(ret->vmid, sizeof(ret->vmid), "%.*s", (int)MIN(n, (size_t)15), number);
    if (vmid_ok(ret->vmid) && number[n] == '-' && number[n + 1])
        return 0;
    return err_set(err, -EINVAL,
                   "a volume of a directory cannot be called '%s': guests have numbers of 3 to 9 "
                   "digits; see 'varve rename'",
                   stem);
}

/* Between storages of one kind names stay; a snapshot's is put together in another way. */
static char *name_there(const struct move *m, const struct cfile *f)
{
    if (!m->as_images)
        return strdup(f->name);
    return f->snap ? snap_file(m->dir, f->snap, f->vol->stem, f->format)
                   : file_join(m->dir, f->stem, f->format);
}

static int check_name(const struct move *m, const struct cfile *f, struct err *err)
{
    _cleanup_(freep) char *stem =
        f->snap ? snap_stem(FORM_LV, f->snap, f->vol->stem) : strdup(f->stem);

    if (!stem)
        return err_set(err, -ENOMEM, "out of memory");
    return m->dst.pool->type == POOL_LVM ? lvm_store_check_name(m->dst.images, stem, err) : 0;
}

/* ---- plan ---- */

static struct cfile *find_element(const struct move *m, const struct cfile *f)
{
    _cleanup_(freep) struct vol_name *name = calloc(1, sizeof(*name));

    if (!name || !f->vol ||
        move_name_there(m->src.pool, m->dst.pool, f->vol->vmid, f->vol->stem, name, NULL) < 0)
        return NULL;
    const struct cvol *vol = catalog_vol(m->dst.cat, name->vmid, f->vol->stem, NULL);
    return !vol ? NULL : f->snap ? cvol_snap(vol, f->snap) : vol->current;
}

static struct cfile *find_file(const struct move *m, const struct cfile *f)
{
    size_t n = strlen(m->src.images);
    _cleanup_(freep) char *path = NULL;

    if (strncmp(f->path, m->src.images, n) != 0 ||
        asprintf(&path, "%s%s", m->dst.images, f->path + n) < 0)
        return NULL;
    return catalog_file(m->dst.cat, path);
}

/* The element of the target that bears the name of what a file stands on. */
static struct cfile *find_base(const struct move *m, const struct cfile *parent)
{
    struct cfile *f = !parent        ? NULL
                      : m->as_images ? find_element(m, parent)
                                     : find_file(m, parent);

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
    f->backing_format = base->format;
    return f->backing ? 0 : err_set(err, -ENOMEM, "out of memory");
}

static int plan_file(struct move *m, const struct cfile *src, unsigned i, struct err *err)
{
    _cleanup_(freep) char *name = name_there(m, src);
    struct moved_file f = {.src = src, .to = name ? path_join(m->dir, name) : NULL};
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
    int rc = check_name(m, src, err);
    if (rc < 0)
        return rc;
    struct moved_file *added = &m->files.data[m->files.len - 1];
    if (src->backing && !(src->parent && src->parent->vol == m->vol))
        return plan_base(m, added, err);
    if (src->backing) {
        added->backing = name_there(m, src->parent);
        added->backing_format = src->parent->format;
    }
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
        m->meter.total += f->flatten     ? 0
                          : m->as_images ? f->src->virtual_len
                                         : (uint64_t)f->src->st.st_blocks * 512;
    return rc;
}

int move_hold_files(struct move *m, struct err *err)
{
    int rc = 0;

    vec_for_each(f, &m->files) { /* with all below it: a kill leaves a journal in a topmost one */
        if (rc == 0 && f->src->nb_children == 0)
            rc = overlay_settle(f->src->path, f->src->format, err);
    }
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
    uint64_t len = MIN(chain_len(a), chain_len(b)) - off;
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

/* Behind the end of the shorter one the longer one has to be zero: so it reads to what stands on
 * it.
 */
SUSPENDS static int compare_rest(struct chain *a, struct chain *b, bool *ret_same)
{
    struct chain *longer = chain_len(a) > chain_len(b) ? a : b;
    uint64_t off = MIN(chain_len(a), chain_len(b)), len = chain_len(longer);
    int rc = 0;

    for (uint64_t n; rc == 0 && *ret_same && off < len; off += n) {
        _cleanup_(buf_drop) struct buf x = {buf_get(COMPARE_BYTES), COMPARE_BYTES};

        if (!x.data)
            return -ENOMEM;
        n = MIN(len - off, COMPARE_BYTES);
        IOV_ITER_BUF(it, v, x.data, n);
        rc = chain_read(longer, off, n, &it);
        if (rc == 0)
            *ret_same = buf_is_zero(x.data, n);
    }
    return rc;
}

SUSPENDS static int compare(const struct move *m, struct chain *a, struct chain *b, bool *ret_same)
{
    uint64_t len = MIN(chain_len(a), chain_len(b));
    int rc = 0;

    *ret_same = true;
    for (uint64_t off = 0, skip; rc == 0 && *ret_same && off < len; off += skip) {
        rc = both_zero(a, b, off, &skip);
        if (rc == 0 && skip == 0) {
            skip = MIN(len - off, COMPARE_BYTES);
            rc = compare_piece(a, b, off, (size_t)skip, ret_same);
        }
        if (rc == 0 && m->ctx->progress)
            m->ctx->progress(m->ctx->ctx, off + skip, len);
    }
    return rc == 0 ? compare_rest(a, b, ret_same) : rc;
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

/* Owner, mode and the time at which a snapshot was taken are the source's. */
static int copy_file_attributes(const struct moved_file *f, struct err *err)
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

/* An LV has none but the time. */
static int copy_image_attributes(const struct move *m, const struct moved_file *f, struct err *err)
{
    const struct cfile *src = f->src;
    mode_t mode = m->src.pool->type != POOL_LVM ? src->st.st_mode & 0777
                  : src->vol->base || (src->snap && !strcmp(src->format, "raw")) ? 0444
                                                                                 : NEW_MODE;
    int rc = store_set_mode(f->tmp, mode, err);

    if (rc == 0 && src->snap)
        taken_set(f->tmp, (struct timespec){src->st.st_mtim.tv_sec, src->st.st_mtim.tv_nsec});
    return rc == 0 ? store_sync_file(f->tmp, err) : rc;
}

SUSPENDS static int copy_one(struct move *m, struct moved_file *f, struct err *err)
{
    bool same = !f->backing || strcmp(f->backing, f->src->backing) == 0;
    int rc = f->flatten     ? flatten_file(m, f, err)
             : m->as_images ? move_copy_image(m, f, err)
                            : file_copy(f->src->path, f->tmp, &m->meter, err);

    crash_point("move-copied");
    if (rc == 0 && !f->flatten && !m->as_images && !same)
        rc = merge_set_backing(f->tmp, f->backing, f->backing_format, err);
    if (rc == 0)
        rc = m->as_images ? copy_image_attributes(m, f, err) : copy_file_attributes(f, err);
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
