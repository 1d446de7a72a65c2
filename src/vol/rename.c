/*
 * Giving an idle volume, with all its snapshots, another name, also another guest's.
 *
 *   1 intent with all names                       nothing done                     undo
 *   2 link every file under its new name          both names of some files         undo
 *   3 in each header: the new backing name        both names of all files          finish
 *   4 unlink the old names                        some files' old names            finish
 *   5 intent removed
 *
 * A backing name changes where the file below is the volume's own, and where the directory changes,
 * as it is relative. The file below may be another volume's then: that one keeps its name meanwhile
 * (a base image never changes it; a snapshot that is stood on is not renamed).
 *
 * In step 3 a header may name the old or the new name of the file below, in whichever directory it
 * is opened: if there are two, each has both names of the snapshots until step 4. So at any instant
 * the volume reads right by its old name or by its new one.
 */
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "base/check.h"
#include "blk/blk.h"
#include "vol/internal.h"

struct element {
    char *old, *new;                 /* paths */
    char *alias[2];                  /* the new name in the old directory, the old in the new one;
                                        NULL: it is one directory, or nothing is to stand on it */
    char *old_backing, *new_backing; /* as recorded; NULL: stands on nothing */
    char *backing_format;
    struct blk *hold;
};
struct renaming {
    VEC(struct element) elems;
};

SUSPENDS static void renaming_fini(struct renaming *r)
{
    vec_for_each(e, &r->elems) {
        blk_close(e->hold);
        free(e->old);
        free(e->new);
        free(e->alias[0]);
        free(e->alias[1]);
        free(e->old_backing);
        free(e->new_backing);
        free(e->backing_format);
    }
    vec_free(&r->elems);
}

/* The current element comes last. */
static int fill_aliases(struct renaming *r)
{
    for (size_t i = 0; i + 1 < r->elems.len; i++) {
        struct element *e = &r->elems.data[i];
        _cleanup_(freep) char *old_dir = path_dir(e->old), *new_dir = path_dir(e->new);

        if (!old_dir || !new_dir)
            return -ENOMEM;
        if (strcmp(old_dir, new_dir) == 0)
            continue;
        e->alias[0] = path_join(old_dir, strrchr(e->new, '/') + 1);
        e->alias[1] = path_join(new_dir, strrchr(e->old, '/') + 1);
        if (!e->alias[0] || !e->alias[1])
            return -ENOMEM;
    }
    return 0;
}

/* ---- plan ---- */

static char *new_file(const struct cfile *f, const char *stem)
{
    return f->snap ? snap_file(f->dir, f->snap, stem, f->format)
                   : file_join(f->dir, stem, f->format);
}

/* What the header names from now on. *ret NULL: nothing, or out of memory (rc). */
static int new_backing(const struct cfile *f, const char *dir, const char *stem, char **ret,
                       struct err *err)
{
    bool moves = strcmp(f->dir, dir) != 0;

    if (!f->backing)
        return 0;
    if (f->parent && f->parent->vol == f->vol)
        *ret = new_file(f->parent, stem);
    else if (!moves || f->backing[0] == '/')
        *ret = strdup(f->backing);
    else if (f->parent)
        *ret = path_relative(dir, f->parent->path);
    else
        return err_set(err, -EINVAL,
                       "'%s' stands on a file outside of the storage: the volume cannot change its "
                       "directory",
                       f->path);
    return *ret ? 0 : err_set(err, -ENOMEM, "out of memory");
}

static int add_element(struct renaming *r, const struct cfile *f, const char *dir, const char *stem,
                       struct err *err)
{
    _cleanup_(freep) char *file = new_file(f, stem);
    struct element e = {.old = strdup(f->path), .new = file ? path_join(dir, file) : NULL};

    if (f->backing) {
        e.old_backing = strdup(f->backing);
        e.backing_format = strdup(f->backing_format   ? f->backing_format
                                  : f->parent != NULL ? f->parent->format
                                                      : "qcow2");
    }
    int rc = vec_push(&r->elems, e);
    if (rc < 0) {
        free(e.old);
        free(e.new);
        free(e.old_backing);
        free(e.backing_format);
    }
    if (rc < 0 || !e.old || !e.new || (f->backing && (!e.old_backing || !e.backing_format)))
        return err_set(err, -ENOMEM, "out of memory");
    return new_backing(f, dir, stem, &r->elems.data[r->elems.len - 1].new_backing, err);
}

static int add_elements(struct renaming *r, const struct cvol *vol, const char *dir,
                        const char *stem, struct err *err)
{
    int rc = 0;

    vec_for_each(it, &vol->snaps) {
        if (rc == 0)
            rc = add_element(r, *it, dir, stem, err);
    }
    if (rc == 0)
        rc = add_element(r, vol->current, dir, stem, err);
    if (rc == 0 && fill_aliases(r) < 0)
        rc = err_set(err, -ENOMEM, "out of memory");
    return rc;
}

static int check_new(struct op *op, const struct cvol *vol, const struct vol_name *new,
                     struct err *err)
{
    int rc = 0;

    if (*new->snap || *new->base)
        rc = err_set(err, -EINVAL, "a new name is written [<vmid>/]<name>");
    else if (*new->format && strcmp(new->format, vol->format) != 0)
        rc = err_set(err, -EINVAL, "the new name says .%s, the format is %s", new->format,
                     vol->format);
    if (rc == 0)
        rc = stem_check_new(op->images, new->vmid, new->name, err);
    if (rc == 0)
        rc = catalog_check_new_vol(op->cat, new->vmid, new->name, err);
    vec_for_each(it, &vol->snaps) {
        if (rc == 0)
            rc = catalog_check_new_snap_file(op->cat, new->vmid, new->name, (*it)->snap, err);
    }
    return rc;
}

SUSPENDS static int plan(struct op *op, const struct vol_name *name, const struct vol_name *new,
                         struct renaming *r, struct cvol **ret, struct err *err)
{
    _cleanup_(freep) char *dir = *new->vmid ? path_join(op->images, new->vmid) : strdup(op->images);
    int rc = dir ? op_volume_to_change(op, name, "renamed", ret, err)
                 : err_set(err, -ENOMEM, "out of memory");

    if (rc == 0)
        rc = op_refuse_used(op, *ret, "renamed", err);
    if (rc == 0)
        rc = op_refuse_served(op, *ret, "renamed", err);
    if (rc == 0)
        rc = check_new(op, *ret, new, err);
    return rc == 0 ? add_elements(r, *ret, dir, new->name, err) : rc;
}

/* ---- steps ---- */

SUSPENDS static int hold_all(struct renaming *r, struct err *err)
{
    int rc = 0;

    vec_for_each(e, &r->elems) {
        if (rc == 0)
            rc = overlay_hold(store_exists(e->new) ? e->new : e->old, &e->hold, err);
    }
    return rc;
}

/* A name that is taken by something else is left alone: what it is for is lost for that moment. */
static int link_aliases(const struct element *e, struct err *err)
{
    int rc = 0;

    for (unsigned i = 0; i < 2 && rc == 0; i++)
        if (e->alias[i] && !store_exists(e->alias[i]))
            rc = store_link(e->new, e->alias[i], err);
    crash_point("rename-aliased");
    return rc;
}

static int unlink_aliases(const struct element *e, struct err *err)
{
    const char *file = store_exists(e->new) ? e->new : e->old;
    int rc = 0;

    for (unsigned i = 0; i < 2 && rc == 0; i++)
        if (e->alias[i] && store_same_file(file, e->alias[i]))
            rc = store_unlink(e->alias[i], err);
    return rc;
}

static int link_all(struct renaming *r, struct err *err)
{
    int rc = 0;

    vec_for_each(e, &r->elems) {
        if (rc == 0)
            rc = store_link(e->old, e->new, err);
        crash_point("rename-linked");
    }
    return rc;
}

/* Held but for the moment in which the header is written, under a lock of its own. */
SUSPENDS static int set_backing(struct element *e, const char *name, struct err *err)
{
    if (!name || strcmp(e->old_backing, e->new_backing) == 0)
        return 0;
    blk_close(TAKE_PTR(e->hold));
    int rc = merge_set_backing(e->new, name, e->backing_format, err);
    crash_point("rename-header");
    return rc == 0 ? overlay_hold(e->new, &e->hold, err) : rc;
}

SUSPENDS static int rewrite_all(struct renaming *r, struct err *err)
{
    int rc = 0;

    vec_for_each(e, &r->elems) {
        if (rc == 0)
            rc = link_aliases(e, err);
    }
    vec_for_each(e, &r->elems) {
        if (rc == 0)
            rc = set_backing(e, e->new_backing, err);
    }
    return rc;
}

static int unlink_old(struct renaming *r, struct err *err)
{
    int rc = 0;

    vec_for_each(e, &r->elems) {
        if (rc == 0)
            rc = unlink_aliases(e, err);
        if (rc == 0)
            rc = store_unlink(e->old, err);
        crash_point("rename-unlinked");
    }
    return rc;
}

static int unlink_new(struct renaming *r, struct err *err)
{
    int rc = 0;

    vec_for_each(e, &r->elems) {
        if (rc == 0)
            rc = unlink_aliases(e, err);
        if (rc == 0 && store_same_file(e->old, e->new))
            rc = store_unlink(e->new, err);
    }
    return rc;
}

/* A failure before the old names go: the headers first, then the new names. */
SUSPENDS static int undo(struct renaming *r)
{
    int rc = 0;

    vec_for_each(e, &r->elems) {
        if (rc == 0 && store_same_file(e->old, e->new))
            rc = set_backing(e, e->old_backing, NULL);
    }
    return rc == 0 ? unlink_new(r, NULL) : rc;
}

static json_t *record(const struct renaming *r)
{
    json_t *files = json_array();

    vec_for_each(e, &r->elems) {
        json_t *one = json_pack("{s:s, s:s}", "old", strrchr(e->old, '/') + 1, "new",
                                strrchr(e->new, '/') + 1);

        if (e->old_backing) {
            json_object_set_new(one, "old_backing", json_string(e->old_backing));
            json_object_set_new(one, "new_backing", json_string(e->new_backing));
            json_object_set_new(one, "backing_format", json_string(e->backing_format));
        }
        json_array_append_new(files, one);
    }
    return files;
}

static int write_intent(struct op *op, const struct cvol *vol, const struct vol_name *new,
                        const struct renaming *r, struct err *err)
{
    json_t *taken = json_array();

    for (size_t i = 0; i < vol->snaps.len; i++) {
        const struct cfile *f = vol->snaps.data[i];

        taken_add(taken, f, f->vmid, f->name);
        taken_add(taken, f, new->vmid, strrchr(r->elems.data[i].new, '/') + 1);
    }
    return op_intent(op, "rename",
                     json_pack("{s:[{s:s, s:s}, {s:s, s:s}], s:o, s:o}", "vols", "vmid", vol->vmid,
                               "stem", vol->stem, "vmid", new->vmid, "stem", new->name, "files",
                               record(r), "taken", taken),
                     err);
}

SUSPENDS static int run(struct op *op, const struct cvol *vol, const struct vol_name *new,
                        struct renaming *r, struct err *err)
{
    _cleanup_(freep) char *dir = path_dir(r->elems.data[0].new);
    int rc = dir ? overlay_settle(vol->current->path, vol->current->format, err) : -ENOMEM;

    if (rc == 0)
        rc = hold_all(r, err);
    if (rc == 0)
        rc = store_mkdir(dir, err);
    if (rc == 0)
        rc = write_intent(op, vol, new, r, err);
    if (rc < 0)
        return rc;
    rc = link_all(r, err);
    if (rc == 0)
        rc = rewrite_all(r, err);
    if (rc < 0 && undo(r) < 0)
        return err_prefix(err, rc, "the next operation finishes it");
    if (rc == 0)
        rc = unlink_old(r, err);
    taken_restore(op->images, op->intent);
    int done_rc = op_done(op, rc < 0 ? NULL : err);
    if (rc == 0 && done_rc == 0)
        op_forget_volume(op, vol->vmid, vol->stem);
    if (rc == 0 && *vol->vmid)
        rmdir(vol->current->dir); /* stays if anything is in it */
    return rc < 0 ? rc : done_rc;
}

static void say_done(struct op *op, const struct vol_name *name, const struct vol_name *new)
{
    _cleanup_(catalog_freep) struct catalog *cat = NULL;
    _cleanup_(freep) char *id = NULL;
    struct cvol *vol;

    if (catalog_scan(op->pool, &cat, NULL) == 0 && catalog_find(cat, new, &vol, NULL) == 0)
        id = cvol_id(cat, vol);
    op_say(op->ctx, "%s is now %s", name->name, id ? id : new->name);
}

int vol_rename(const struct vol_ctx *ctx, const struct vol_name *name, const struct vol_name *new,
               struct err *err)
{
    _cleanup_(freep) struct vol_name *names = calloc(2, sizeof(*names));
    struct renaming r = {0};
    struct cvol *vol;
    struct op op;

    if (!names)
        return err_set(err, -ENOMEM, "out of memory");
    if (strcmp(name->pool, new->pool) != 0)
        return err_set(err, -EINVAL, "a volume is renamed within its storage: see 'varve move'");
    if (strcmp(name->vmid, new->vmid) == 0 && strcmp(name->name, new->name) == 0)
        return err_set(err, -EEXIST, "that is its name already");
    names[0] = *name;
    names[1] = *new;
    int rc = op_begin(ctx, name->pool, names, 2, &op, err);
    if (rc < 0)
        return rc;
    rc = plan(&op, name, new, &r, &vol, err);
    if (rc == 0 && ctx->dry_run)
        op_say(ctx, "would rename '%s' and %zu snapshots to '%s'", vol->current->path,
               vol->snaps.len, r.elems.data[r.elems.len - 1].new);
    else if (rc == 0)
        rc = run(&op, vol, new, &r, err);
    if (rc == 0 && !ctx->dry_run)
        say_done(&op, name, new);
    renaming_fini(&r);
    op_end(&op);
    return rc;
}

/* ---- recovery ---- */

static char *dup_name(const json_t *obj, const char *key)
{
    const char *s = json_string_value(json_object_get(obj, key));

    return s ? strdup(s) : NULL;
}

static int read_element(const json_t *one, const char *old_dir, const char *new_dir,
                        struct renaming *r)
{
    const char *old = intent_name(one, "old"), *new = intent_name(one, "new");
    struct element e = {.old = old ? path_join(old_dir, old) : NULL,
                        .new = new ? path_join(new_dir, new) : NULL,
                        .old_backing = dup_name(one, "old_backing"),
                        .new_backing = dup_name(one, "new_backing"),
                        .backing_format = dup_name(one, "backing_format")};

    if (vec_push(&r->elems, e) == 0)
        return e.old && e.new && !e.old_backing == !e.new_backing ? 0 : -EUCLEAN;
    free(e.old);
    free(e.new);
    free(e.old_backing);
    free(e.new_backing);
    free(e.backing_format);
    return -ENOMEM;
}

static int read_elements(const char *images, const json_t *json, struct renaming *r)
{
    const json_t *vols = json_object_get(json, "vols"), *one;
    _cleanup_(freep) char *old_dir = intent_dir(images, json_array_get(vols, 0));
    _cleanup_(freep) char *new_dir = intent_dir(images, json_array_get(vols, 1));
    int rc = old_dir && new_dir ? 0 : -EUCLEAN;
    size_t i;

    json_array_foreach(json_object_get(json, "files"), i, one)
    {
        if (rc == 0)
            rc = read_element(one, old_dir, new_dir, r);
    }
    return rc == 0 ? fill_aliases(r) : rc;
}

SUSPENDS static int settle(struct renaming *r, const char **ret_how, struct err *err)
{
    bool all = true;

    vec_for_each(e, &r->elems) {
        bool old = store_exists(e->old), new = store_exists(e->new);

        if (old && new && !store_same_file(e->old, e->new))
            return err_set(err, -EUCLEAN, "'%s' has come beside '%s'", e->new, e->old);
        all &= new;
    }
    *ret_how = all ? "finished" : "undone";
    if (!all)
        return unlink_new(r, err);
    int rc = hold_all(r, err);
    if (rc == 0)
        rc = rewrite_all(r, err);
    return rc == 0 ? unlink_old(r, err) : rc;
}

int rename_recover(const struct vol_ctx *ctx, const char *images, struct intent *intent,
                   struct err *err)
{
    struct renaming r = {0};
    const char *how = "";
    int rc = read_elements(images, intent->json, &r);

    if (rc < 0)
        err_set(err, rc, rc == -ENOMEM ? "out of memory" : "the intent is damaged");
    if (rc == 0)
        rc = settle(&r, &how, err);
    if (rc == 0) {
        taken_restore(images, intent);
        op_say(ctx, "an interrupted renaming of %s was %s",
               intent_str(json_array_get(json_object_get(intent->json, "vols"), 0), "stem"), how);
    }
    renaming_fini(&r);
    return rc;
}
