/*
 * What follows from the scan of a pool: who stands on whom, which volumes are broken and how, and
 * the questions that operations ask of it.
 */
#include <stdio.h>
#include <string.h>
#include "vol/store_lvm.h"

/* A backing file that goes by another path: through a link, an absolute name of a moved pool. */
static int link_by_inode(struct catalog *cat, struct cfile *f)
{
    struct stat st;

    if (stat(f->backing_path, &st) < 0)
        return asprintf(&f->link_bad, "its backing file '%s' cannot be used: %s", f->backing_path,
                        strerror(errno)) < 0
                   ? -ENOMEM
                   : 0;
    vec_for_each(it, &cat->files) {
        if ((*it)->st.st_ino == st.st_ino && (*it)->st.st_dev == st.st_dev) {
            f->parent = *it;
            break;
        }
    }
    return 0;
}

static int mark_loops(struct catalog *cat)
{
    vec_for_each(it, &cat->files) {
        size_t steps = 0;

        for (struct cfile *f = *it; f && steps <= cat->files.len; f = f->parent)
            steps++;
        if (steps <= cat->files.len)
            continue;
        /* cut here, so that every later walk ends */
        (*it)->parent = NULL;
        free((*it)->link_bad);
        (*it)->link_bad = strdup("its backing files form a loop");
        if (!(*it)->link_bad)
            return -ENOMEM;
    }
    return 0;
}

static int set_broken(struct cvol *v, const struct cfile *f, const char *why)
{
    if (v->broken)
        return 0;
    return asprintf(&v->broken, "%s%s%s: %s", f && f->snap ? "snapshot '" : "current image",
                    f && f->snap ? f->snap : "", f && f->snap ? "'" : "", why) < 0
               ? -ENOMEM
               : 0;
}

static int judge_file(struct cvol *v, const struct cfile *f)
{
    if (f->bad)
        return set_broken(v, f, f->bad);
    if (f->link_bad)
        return set_broken(v, f, f->link_bad);
    /* what stands under the volume but in another one counts too */
    for (const struct cfile *p = f->parent; p; p = p->parent)
        if (p->bad || p->link_bad)
            return set_broken(v, p, p->bad ? p->bad : p->link_bad);
    return 0;
}

static int judge(struct cvol *v)
{
    int rc = v->current ? judge_file(v, v->current) : set_broken(v, NULL, "missing");

    vec_for_each(it, &v->snaps) {
        if (rc == 0)
            rc = judge_file(v, *it);
    }
    return rc;
}

int catalog_link(struct catalog *cat)
{
    int rc = 0;

    vec_for_each(it, &cat->files) {
        if ((*it)->backing_path && !(*it)->parent && !(*it)->link_bad)
            rc = link_by_inode(cat, *it);
        if (rc < 0)
            return rc;
    }
    rc = mark_loops(cat);
    vec_for_each(it, &cat->files) {
        if ((*it)->parent)
            (*it)->parent->nb_children++;
    }
    vec_for_each(it, &cat->vols) {
        if (rc == 0)
            rc = judge(*it);
    }
    return rc;
}

/* ---- questions ---- */

struct cfile **cfile_children(const struct catalog *cat, const struct cfile *file, unsigned *ret_nr)
{
    struct cfile **ret = calloc(file->nb_children + 1, sizeof(*ret));
    unsigned nr = 0;

    if (!ret)
        return NULL;
    vec_for_each(it, &cat->files) {
        if ((*it)->parent == file)
            ret[nr++] = *it;
    }
    *ret_nr = nr;
    return ret;
}

struct cfile *cvol_snap(const struct cvol *vol, const char *snap)
{
    vec_for_each(it, &vol->snaps) {
        if (strcmp((*it)->snap, snap) == 0)
            return *it;
    }
    return NULL;
}

struct cfile *cvol_last_leaf(const struct catalog *cat, const struct cvol *vol)
{
    struct cfile *found = NULL;
    unsigned nr = 0;

    if (vol->current && vol->current->parent && vol->current->parent->vol == vol)
        return vol->current->parent;
    vec_for_each(it, &vol->snaps) {
        bool has_child = false;

        vec_for_each(other, &vol->snaps)
            has_child |= (*other)->parent == *it;
        if (has_child || (*it)->bad || (*it)->link_bad)
            continue;
        found = *it;
        nr++;
    }
    return nr == 1 ? found : NULL;
}

/* The base image a linked clone stands on; NULL: it is none. */
static const struct cfile *clone_base(const struct cvol *vol)
{
    const struct cfile *f = vol->current;

    while (f && f->vol == vol)
        f = f->parent;
    return f && f->vol && f->vol->base && !f->snap ? f : NULL;
}

char *cvol_id(const struct catalog *cat, const struct cvol *vol)
{
    const char *slash = *vol->vmid ? "/" : "";
    const struct cfile *base = clone_base(vol);
    char *ret = NULL;
    _cleanup_(freep) char *file = file_join(cat->images, vol->stem, vol->format);
    int n = -1;

    if (file && base && *base->vmid && *vol->vmid)
        n = asprintf(&ret, "%s:%s/%s/%s%s%s", cat->pool->id, base->vmid, base->name, vol->vmid,
                     slash, file);
    else if (file)
        n = asprintf(&ret, "%s:%s%s%s", cat->pool->id, vol->vmid, slash, file);
    return n < 0 ? NULL : ret;
}

char *cfile_id(const struct catalog *cat, const struct cfile *file)
{
    char *ret = NULL;

    if (!file->vol)
        return strdup(file->path);
    _cleanup_(freep) char *vol = cvol_id(cat, file->vol);
    if (!vol || !file->snap)
        return TAKE_PTR(vol);
    return asprintf(&ret, "%s@%s", vol, file->snap) < 0 ? NULL : ret;
}

static int check_base(const struct vol_name *name, const struct cvol *vol, struct err *err)
{
    const struct cfile *base = clone_base(vol);
    char text[256] = "";

    if (!*name->base)
        return 0;
    if (base)
        snprintf(text, sizeof(text), "%s/%.200s", base->vmid, base->name);
    size_t n = strlen(name->base);
    if (strncmp(text, name->base, n) == 0 && (!text[n] || text[n] == '.'))
        return 0;
    return err_set(err, -ENOENT, "%s:%s%s%s is not a linked clone of %s", name->pool, name->vmid,
                   *name->vmid ? "/" : "", name->name, name->base + (*name->base == '/'));
}

/* The raw name stays an alias after the first snapshot has made the top a qcow2 image. */
static bool is_alias(const struct cvol *vol, const char *format)
{
    if (strcmp(format, "raw") != 0 || strcmp(vol->format, "qcow2") != 0)
        return false;
    vec_for_each(it, &vol->snaps) {
        if (strcmp((*it)->format, "raw") == 0)
            return true;
    }
    return false;
}

int catalog_find(const struct catalog *cat, const struct vol_name *name, struct cvol **ret,
                 struct err *err)
{
    const char *slash = *name->vmid ? "/" : "";
    struct cvol *raw = catalog_vol(cat, name->vmid, name->name, "raw");
    struct cvol *any = catalog_vol(cat, name->vmid, name->name, NULL);
    struct cvol *vol = *name->format ? catalog_vol(cat, name->vmid, name->name, name->format) : any;

    if (!*name->format && raw && any != raw)
        return err_set(err, -EINVAL, "%s:%s%s%s exists as .raw and as .qcow2: give the suffix",
                       name->pool, name->vmid, slash, name->name);
    if (!vol && any && is_alias(any, name->format))
        vol = any;
    if (!vol && any)
        return err_set(err, -ENOENT, "%s:%s%s%s has the format %s, not %s", name->pool, name->vmid,
                       slash, name->name, any->format, name->format);
    if (!vol)
        return err_set(err, -ENOENT, "there is no volume %s:%s%s%s", name->pool, name->vmid, slash,
                       name->name);
    int rc = check_base(name, vol, err);
    if (rc == 0)
        *ret = vol;
    return rc;
}

/* ---- new names ---- */

/* By what is no image of ours, a volume group's LV of somebody else: it is in no catalog. */
static int check_untaken(const struct catalog *cat, const char *vmid, const char *stem,
                         struct err *err)
{
    static const char *const formats[] = {"qcow2", "raw"};
    _cleanup_(freep) char *dir = *vmid ? path_join(cat->images, vmid) : strdup(cat->images);

    for (unsigned i = 0; i < ARRAY_SIZE(formats); i++) {
        _cleanup_(freep) char *file = dir ? file_join(dir, stem, formats[i]) : NULL;
        _cleanup_(freep) char *path = file ? path_join(dir, file) : NULL;

        if (!path)
            return err_set(err, -ENOMEM, "out of memory");
        if (store_exists(path))
            return err_set(err, -EEXIST, "'%s' exists already, and is none of ours", path);
    }
    return 0;
}

int catalog_check_new_snap_file(const struct catalog *cat, const char *vmid, const char *stem,
                                const char *snap, struct err *err)
{
    _cleanup_(freep) char *file = snap_stem(cat->form, snap, stem), *other_snap = NULL;

    if (!file)
        return err_set(err, -ENOMEM, "out of memory");
    if (cat->form == FORM_LV) {
        int rc = lvm_store_check_name(cat->images, file, err);

        if (rc < 0)
            return rc;
    }
    vec_for_each(it, &cat->files) {
        if (strcmp((*it)->vmid, vmid) == 0 && strcmp((*it)->stem, file) == 0)
            return err_set(err, -EEXIST, "the file of a snapshot '%s' is there already: '%s'", snap,
                           (*it)->path);
    }
    struct cvol *other = catalog_read_snap_name(cat, vmid, file, &other_snap);
    if (other && strcmp(other->stem, stem) != 0)
        return err_set(err, -EEXIST, "its file would read as snapshot '%s' of the volume '%s'",
                       other_snap, other->stem);
    return check_untaken(cat, vmid, file, err);
}

int catalog_check_new_snap(const struct catalog *cat, const struct cvol *vol, const char *snap,
                           struct err *err)
{
    if (cvol_snap(vol, snap))
        return err_set(err, -EEXIST, "the volume has a snapshot '%s' already", snap);
    return catalog_check_new_snap_file(cat, vol->vmid, vol->stem, snap, err);
}

int catalog_check_new_vol(const struct catalog *cat, const char *vmid, const char *stem,
                          struct err *err)
{
    const struct cvol *there = catalog_vol(cat, vmid, stem, NULL);

    if (there)
        return err_set(err, -EEXIST, "the volume %s:%s%s%s.%s exists already", cat->pool->id, vmid,
                       *vmid ? "/" : "", stem, there->format);
    vec_for_each(it, &cat->files) {
        const struct cfile *f = *it;
        char snap[SNAP_NAME_MAX + 1], buf[256];
        size_t pos = 0;

        if (!stem_is_snap(cat->form, f->stem) || strcmp(f->vmid, vmid) != 0)
            continue;
        for (const char *v; (v = snap_reading(cat->form, f->stem, &pos, buf, snap));)
            if (strcmp(v, stem) == 0)
                return err_set(err, -EEXIST, "'%s' would read as a snapshot of the new volume '%s'",
                               f->path, stem);
    }
    return check_untaken(cat, vmid, stem, err);
}
