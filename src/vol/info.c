/* The public view of the catalog: vol_info_get, vol_list_get. */
#include <stdio.h>
#include <string.h>
#include "vol/internal.h"

static void elem_fini(struct vol_elem *e)
{
    free(e->snap);
    free(e->file);
    free(e->path);
    free(e->format);
    free(e->parent_file);
    free(e->parent_snap);
}

void vol_info_free(struct vol_info *info)
{
    if (!info)
        return;
    for (unsigned i = 0; i < info->nb_elems; i++)
        elem_fini(&info->elems[i]);
    for (unsigned i = 0; i < info->nb_clones; i++)
        free(info->clones[i]);
    free(info->elems);
    free(info->clones);
    free(info->id);
    free(info->pool);
    free(info->vmid);
    free(info->name);
    free(info->format);
    free(info->path);
    free(info->kind);
    free(info->broken);
    free(info->qmp_path);
    free(info);
}

void vol_list_free(struct vol_list *list)
{
    if (!list)
        return;
    for (unsigned i = 0; i < list->nb_vols; i++)
        vol_info_free(list->vols[i]);
    for (unsigned i = 0; i < list->nb_orphans; i++)
        free(list->orphans[i]);
    free(list->vols);
    free(list->orphans);
    free(list);
}

static unsigned depth_of(const struct cfile *f)
{
    unsigned depth = 0;

    for (const struct cfile *p = f->parent; p && p->vol == f->vol; p = p->parent)
        depth++;
    return depth;
}

static char *dup_or_null(const char *s)
{
    return s ? strdup(s) : NULL;
}

static int fill_elem(struct vol_elem *e, const struct cfile *f)
{
    const struct cfile *p = f->parent;
    const char *below = p ? p->path : f->backing_path;
    const char *snap = p && p->vol == f->vol ? p->snap : NULL;

    *e = (struct vol_elem){.snap = dup_or_null(f->snap),
                           .file = strdup(f->name),
                           .path = strdup(f->path),
                           .format = strdup(f->format),
                           .parent_file = dup_or_null(below),
                           .parent_snap = dup_or_null(snap),
                           .virtual_len = f->virtual_len,
                           .file_len = (uint64_t)f->st.st_size,
                           .allocated = (uint64_t)f->st.st_blocks * 512,
                           .when = f->snap ? f->st.st_mtime : f->made,
                           .deleting = f->deleting,
                           .depth = depth_of(f)};
    bool whole = e->file && e->path && e->format && (e->snap || !f->snap) &&
                 (e->parent_file || !below) && (e->parent_snap || !snap);
    return whole ? 0 : -ENOMEM;
}

static int by_depth(const void *a, const void *b)
{
    const struct vol_elem *x = a, *y = b;

    if (!x->snap != !y->snap)
        return x->snap ? -1 : 1;
    if (x->depth != y->depth)
        return x->depth < y->depth ? -1 : 1;
    if (x->when != y->when)
        return x->when < y->when ? -1 : 1;
    return x->snap ? strcmp(x->snap, y->snap) : 0;
}

static void mark_current_line(struct vol_info *info, const struct cvol *vol)
{
    for (const struct cfile *f = vol->current; f && f->vol == vol; f = f->parent)
        for (unsigned i = 0; i < info->nb_elems; i++)
            if (strcmp(info->elems[i].path, f->path) == 0)
                info->elems[i].current_line = true;
}

static int fill_elems(struct vol_info *info, const struct cvol *vol)
{
    size_t max = vol->snaps.len + 1;
    int rc = 0;

    info->elems = calloc(max, sizeof(*info->elems));
    if (!info->elems)
        return -ENOMEM;
    vec_for_each(it, &vol->snaps) {
        if (rc == 0)
            rc = fill_elem(&info->elems[info->nb_elems++], *it);
    }
    if (rc == 0 && vol->current)
        rc = fill_elem(&info->elems[info->nb_elems++], vol->current);
    if (rc < 0)
        return rc;
    sort_items(info->elems, info->nb_elems, sizeof(info->elems[0]), by_depth);
    mark_current_line(info, vol);
    for (unsigned i = 0; i < info->nb_elems; i++)
        info->allocated += info->elems[i].allocated;
    return 0;
}

static int add_clone(struct vol_info *info, char *id)
{
    char **grown = id ? reallocarray(info->clones, info->nb_clones + 1, sizeof(*grown)) : NULL;

    if (!grown) {
        free(id);
        return -ENOMEM;
    }
    info->clones = grown;
    grown[info->nb_clones++] = id;
    return 0;
}

static int fill_clones(struct vol_info *info, const struct catalog *cat, const struct cvol *vol)
{
    const struct cvol *last = NULL;
    int rc = 0;

    vec_for_each(it, &cat->files) {
        const struct cfile *f = *it;

        if (!f->parent || f->parent->vol != vol || f->vol == vol || rc < 0)
            continue;
        if (f->vol && f->vol == last)
            continue; /* elements of one volume are neighbours */
        last = f->vol;
        rc = add_clone(info, f->vol ? cvol_id(cat, f->vol) : strdup(f->path));
    }
    return rc;
}

static int fill_names(struct vol_info *info, const struct catalog *cat, const struct cvol *vol)
{
    _cleanup_(freep) char *file = file_join(cat->images, vol->stem, vol->format);
    char *path = NULL;

    if (vol->current)
        path = strdup(vol->current->path);
    else if (file &&
             asprintf(&path, "%s/%s%s%s", cat->images, vol->vmid, *vol->vmid ? "/" : "", file) < 0)
        path = NULL;
    info->path = path;
    info->id = cvol_id(cat, vol);
    info->pool = strdup(cat->pool->id);
    info->vmid = strdup(vol->vmid);
    info->name = strdup(vol->stem);
    info->format = strdup(vol->format);
    info->kind = strdup(vol->base ? "base" : "vol");
    info->qmp_path = cvol_qmp_path(cat, vol);
    info->broken = dup_or_null(vol->broken);
    bool whole = info->path && info->id && info->pool && info->vmid && info->name && info->format &&
                 info->kind && info->qmp_path && (info->broken || !vol->broken);
    return whole ? 0 : -ENOMEM;
}

static int make_info(const struct catalog *cat, const struct cvol *vol, struct vol_info **ret)
{
    struct vol_info *info = calloc(1, sizeof(*info));
    int rc = info ? fill_names(info, cat, vol) : -ENOMEM;

    if (rc == 0)
        rc = fill_elems(info, vol);
    if (rc == 0)
        rc = fill_clones(info, cat, vol);
    if (rc < 0) {
        vol_info_free(info);
        return rc;
    }
    info->virtual_len = vol->current ? vol->current->virtual_len : 0;
    info->served = socket_is_served(info->qmp_path);
    *ret = info;
    return 0;
}

int vol_info_get(const struct config *cfg, const struct vol_name *name, struct vol_info **ret,
                 struct err *err)
{
    _cleanup_(catalog_freep) struct catalog *cat = NULL;
    const struct pool *pool;
    struct cvol *vol;
    int rc = config_pool(cfg, name->pool, &pool, err);

    if (rc == 0)
        rc = catalog_scan(pool, &cat, err);
    if (rc == 0)
        rc = catalog_find(cat, name, &vol, err);
    if (rc < 0)
        return rc;
    if (vol->broken)
        return err_set(err, -EUCLEAN, "%s:%s%s%s is broken: %s; see 'varve pool check %s'",
                       name->pool, name->vmid, *name->vmid ? "/" : "", name->name, vol->broken,
                       name->pool);
    if (*name->snap && !cvol_snap(vol, name->snap))
        return err_set(err, -ENOENT, "%s:%s%s%s has no snapshot '%s'", name->pool, name->vmid,
                       *name->vmid ? "/" : "", name->name, name->snap);
    rc = make_info(cat, vol, ret);
    return rc < 0 ? err_set(err, rc, "out of memory") : 0;
}

static int fill_list(struct vol_list *list, const struct catalog *cat)
{
    int rc = 0;

    list->vols = calloc(cat->vols.len + 1, sizeof(*list->vols));
    list->orphans = calloc(cat->strays.len + 1, sizeof(*list->orphans));
    if (!list->vols || !list->orphans)
        return -ENOMEM;
    vec_for_each(it, &cat->vols) {
        if (rc == 0)
            rc = make_info(cat, *it, &list->vols[list->nb_vols]);
        list->nb_vols += rc == 0;
    }
    vec_for_each(it, &cat->strays) {
        list->orphans[list->nb_orphans] = strdup(*it);
        if (!list->orphans[list->nb_orphans])
            return -ENOMEM;
        list->nb_orphans++;
    }
    return rc;
}

int vol_list_get(const struct config *cfg, const struct pool *pool, struct vol_list **ret,
                 struct err *err)
{
    _cleanup_(catalog_freep) struct catalog *cat = NULL;
    struct vol_list *list = calloc(1, sizeof(*list));
    int rc = list ? config_pool(cfg, pool->id, &pool, err) : err_set(err, -ENOMEM, "out of memory");

    if (rc == 0)
        rc = catalog_scan(pool, &cat, err);
    if (rc == 0 && fill_list(list, cat) < 0)
        rc = err_set(err, -ENOMEM, "out of memory");
    if (rc < 0) {
        vol_list_free(list);
        return rc;
    }
    *ret = list;
    return 0;
}
