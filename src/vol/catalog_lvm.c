/*
 * The catalog of a volume group: one report, and the head of each image, read from where the report
 * says that it lies on its PV: nothing is activated, no command is run but the report.
 *
 * An LV is ours by its tag. Each of its names is a file of the catalog: while an operation is cut
 * off between two steps an LV has two, as a file has with a link.
 */
#include <string.h>
#include "vol/lvm_head.h"
#include "vol/store_lvm.h"

static bool is_own(const struct lvm_lv *lv)
{
    static const char *const own[] = {"varve-leases", "varve-lock"};

    for (unsigned i = 0; i < ARRAY_SIZE(own); i++)
        if (strcmp(lv->name, own[i]) == 0)
            return true;
    return lvm_dir_is_gone(lv);
}

/* The file of one name. *ret NULL: it is no image's, and noted as what it is. */
static int make_file(struct catalog *cat, const struct lvm_lv *lv, const char *name,
                     struct cfile **ret)
{
    char stem[256];
    const char *format;
    _cleanup_(freep) char *path = path_join(cat->images, name);

    *ret = NULL;
    if (!path)
        return -ENOMEM;
    if (strncmp(name, OWN_PREFIX, strlen(OWN_PREFIX)) == 0)
        return catalog_add_leftover(cat, TAKE_PTR(path));
    if (strncmp(name, "del-", 4) == 0)
        return catalog_add_stray(cat, path, "Proxmox VE is removing it");
    if (!file_split(FORM_LV, name, stem, sizeof(stem), &format))
        return catalog_add_stray(cat, path, "a raw image's name has no suffix in a volume group");
    if (!stem_ok(stem))
        return catalog_add_stray(cat, path, "not a valid volume name");
    struct cfile *f = calloc(1, sizeof(*f));
    if (!f)
        return -ENOMEM;
    f->dir = strdup(cat->images);
    f->name = strdup(name);
    f->path = TAKE_PTR(path);
    f->vmid = strdup("");
    f->stem = strdup(stem);
    f->format = format;
    f->virtual_len = lv->len;
    f->made = lv->made;
    lvm_store_fill_stat(lv, &f->st);
    if (!f->dir || !f->name || !f->vmid || !f->stem) {
        cfile_free(f);
        return -ENOMEM;
    }
    *ret = f;
    return 0;
}

static int fill_head(struct cfile *f, struct lvm_head *h)
{
    if (h->rc < 0) {
        f->bad = strdup(err_text(&h->err));
        return f->bad ? 0 : -ENOMEM;
    }
    f->virtual_len = h->head.virtual_len;
    f->special = h->head.special;
    f->backing = h->head.backing ? strdup(h->head.backing) : NULL;
    f->backing_format = h->head.backing_format ? strdup(h->head.backing_format) : NULL;
    if ((h->head.backing && !f->backing) || (h->head.backing_format && !f->backing_format))
        return -ENOMEM;
    return f->backing ? cfile_resolve_backing(f) : 0;
}

struct lv_files {
    struct lvm_head *heads;
    size_t nr; /* of them */
};

/* Heads of all LVs that may be qcow2: one a name of that form, few have two. */
SUSPENDS static int read_heads(const struct catalog *cat, const struct lvm_dir *dir,
                               struct lv_files *ret, struct err *err)
{
    struct lvm_heads scan;

    ret->heads = calloc(dir->vg->lvs.len + 1, sizeof(*ret->heads));
    if (!ret->heads)
        return err_set(err, -ENOMEM, "out of memory");
    vec_for_each(lv, &dir->vg->lvs) {
        const char *name = lvm_dir_name(dir, lv, 0);
        size_t n = name ? strlen(name) : 0;

        if (lvm_dir_is_ours(lv) && n > 6 && strcmp(name + n - 6, ".qcow2") == 0)
            ret->heads[ret->nr++].lv = lv;
    }
    lvm_heads_init(&scan, cat->images);
    int rc = lvm_heads_read(&scan, ret->heads, ret->nr);
    lvm_heads_fini(&scan);
    return rc < 0 ? err_set(err, rc, "out of memory") : 0;
}

static int add_names(struct catalog *cat, const struct lvm_dir *dir, const struct lvm_lv *lv,
                     struct lvm_head *head)
{
    const char *name;
    int rc = 0;

    for (unsigned n = 0; rc == 0 && (name = lvm_dir_name(dir, lv, n)); n++) {
        struct cfile *f;

        rc = make_file(cat, lv, name, &f);
        if (rc == 0 && f && head && strcmp(f->format, "qcow2") == 0)
            rc = fill_head(f, head);
        if (rc == 0 && f)
            rc = catalog_add(cat, f);
        else if (rc < 0 && f)
            cfile_free(f);
    }
    return rc;
}

static int add_all(struct catalog *cat, const struct lvm_dir *dir, struct lv_files *files)
{
    size_t next = 0; /* heads are in the order of LVs */
    int rc = 0;

    vec_for_each(lv, &dir->vg->lvs) {
        struct lvm_head *head =
            next < files->nr && files->heads[next].lv == lv ? &files->heads[next++] : NULL;

        if (rc == 0 && lvm_dir_is_ours(lv) && !is_own(lv))
            rc = add_names(cat, dir, lv, head);
    }
    return rc;
}

int catalog_scan_lvm(struct catalog *cat, struct err *err) SUSPENDS_UNCHECKED
{
    struct lvm_store *s = lvm_store_of(cat->images);
    struct lv_files files = {0};

    lvm_store_enter(s);
    int rc = lvm_store_look(s, err);
    if (rc == 0)
        rc = read_heads(cat, &s->dir, &files, err);
    if (rc == 0 && add_all(cat, &s->dir, &files) < 0)
        rc = err_set(err, -ENOMEM, "out of memory");
    for (size_t i = 0; i < files.nr; i++)
        if (files.heads[i].rc == 0)
            head_fini(&files.heads[i].head);
    free(files.heads);
    lvm_store_leave(s);
    return rc;
}

int cvol_activate(const struct catalog *cat, const struct cvol *vol, struct err *err)
{
    struct lvm_store *s = lvm_store_of(cat->images);
    VEC(const char *) names = {0};
    size_t steps = 0;
    int rc = 0;

    if (!s)
        return 0;
    for (const struct cfile *f = vol->current; f && rc == 0 && steps < cat->files.len;
         f = f->parent, steps++)
        rc = vec_push(&names, f->name);
    vec_for_each(it, &vol->snaps)
        if (rc == 0)
            rc = vec_push(&names, (*it)->name);
    if (rc == 0)
        rc = vec_push(&names, NULL);
    rc = rc < 0 ? err_set(err, rc, "out of memory") : lvm_store_activate(s, names.data, err);
    vec_free(&names);
    return rc;
}
