/*
 * Could Proxmox VE take this pool as it is? What it does not know of volumes with external
 * snapshots, or keeps differently, is named; nothing is changed.
 *
 * Its snapshots of a volume are one line below the current image; it has no volumes of no guest; in
 * a volume group it activates a volume with its snapshots by their tag, gives each LV the length of
 * a full image, and has neither base images nor clones.
 */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include "base/bits.h"
#include "vol/store_lvm.h"

struct looking {
    const struct vol_ctx *ctx;
    const struct catalog *cat;
    const struct lvm_store *s; /* NULL: files */
    const char *id;            /* of the volume looked at */
    unsigned found;
};

static void PRINTF_LIKE(2, 3) tell(struct looking *l, const char *fmt, ...)
{
    char text[400];
    va_list ap;

    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    op_say(l->ctx, "%s: Proxmox: %s", l->id, text);
    l->found++;
}

/* "snapshot 's'" or "the current image" */
static const char *what(const struct cfile *f, char buf[64])
{
    snprintf(buf, 64, f->snap ? "snapshot '%s'" : "the current image", f->snap ? f->snap : "");
    return buf;
}

/* ---- any kind of pool ---- */

static bool is_guests(const struct cvol *vol)
{
    const char *digits = strchr(vol->stem, '-');
    char vmid[16] = "";

    if (*vol->vmid)
        return stem_is_proxmox(vol->stem, vol->vmid);
    if (digits)
        snprintf(vmid, sizeof(vmid), "%.*s", (int)MIN(strspn(digits + 1, "0123456789"), 15ul),
                 digits + 1);
    return *vmid && stem_is_proxmox(vol->stem, vmid);
}

static bool in_line(const struct cvol *vol, const struct cfile *snap)
{
    for (const struct cfile *f = vol->current; f; f = f->parent)
        if (f == snap)
            return true;
    return false;
}

static void check_backing(struct looking *l, const struct cfile *f)
{
    char buf[64];

    if (!f->backing)
        return;
    if (f->backing[0] == '/' || strncmp(f->backing, "file:", 5) == 0)
        tell(l, "%s names what it stands on with its whole path ('%s')", what(f, buf), f->backing);
    if (f->parent && f->backing_format && strcmp(f->backing_format, f->parent->format) != 0)
        tell(l, "%s takes what it stands on for %s, but that is %s", what(f, buf),
             f->backing_format, f->parent->format);
    if (f->parent && f->vol == f->parent->vol && strcmp(f->parent->format, "raw") == 0)
        tell(l, "%s stands on a raw snapshot ('%s')", what(f, buf), f->parent->snap);
}

static void check_children(struct looking *l, const struct cfile *f)
{
    char buf[64];

    if (f->snap && f->nb_children > 1)
        tell(l, "%s has %u children: a branch", what(f, buf), f->nb_children);
}

static void check_line(struct looking *l, const struct cvol *vol)
{
    vec_for_each(it, &vol->snaps) {
        const struct cfile *f = *it;

        if (!in_line(vol, f))
            tell(l, "snapshot '%s' does not lie below the current image", f->snap);
        if (strlen(f->snap) < 2)
            tell(l, "'%s' is too short as the name of a snapshot", f->snap);
    }
}

/* What stands below the volume's own elements. */
static void check_origin(struct looking *l, const struct cvol *vol)
{
    const struct cfile *f = vol->current;

    while (f && f->vol == vol)
        f = f->parent;
    if (!f || !f->vol)
        return;
    if (f->snap)
        tell(l, "it is a clone of a snapshot ('%s@%s')", f->vol->stem, f->snap);
    else if (l->s)
        tell(l, "it is a linked clone, in a volume group");
    else if (!f->vol->base)
        tell(l, "it stands on '%s', which is no base image", f->vol->stem);
}

/* ---- volume groups ---- */

static void check_tag(struct looking *l, const struct lvm_lv *lv, const char *tag)
{
    if (*tag && !lvm_lv_has_tag(lv, tag))
        tell(l, "LV '%s' lacks the tag '%s'", lv->name, tag);
}

static void check_tags(struct looking *l, const struct cvol *vol, const struct cfile *f,
                       const struct lvm_lv *lv)
{
    _cleanup_(freep) char *name = file_join(f->dir, vol->stem, "qcow2");
    char owner[64] = "", chain[LVM_NAME_MAX + 8] = "";

    if (!name || !lvm_dir_owner(f->name, owner, sizeof(owner)))
        return; /* told by its name */
    if (strcmp(f->format, "qcow2") == 0 && !lvm_dir_chain(name, chain, sizeof(chain)))
        chain[0] = '\0';
    check_tag(l, lv, owner);
    check_tag(l, lv, chain);
    vec_for_each(tag, &lv->tags)
        if (strncmp(*tag, LVM_DIR_ALSO, strlen(LVM_DIR_ALSO)) == 0 ||
            strncmp(*tag, LVM_DIR_TAKES, strlen(LVM_DIR_TAKES)) == 0)
            tell(l, "LV '%s' has a name in a tag: '%s'", lv->name, *tag);
}

static void check_len(struct looking *l, const struct cfile *f, const struct lvm_lv *lv)
{
    uint64_t full;
    char buf[64];

    if (strcmp(f->format, "qcow2") != 0 || f->bad ||
        lvm_image_len(f->virtual_len, f->backing, &full, NULL) < 0 || lv->len >= full)
        return;
    tell(l, "%s has %llu MiB, a full one takes %llu MiB: it could not be written to its end",
         what(f, buf), (unsigned long long)(lv->len / MIB),
         (unsigned long long)(align_up(full, MIB) / MIB));
}

static void check_lv(struct looking *l, const struct cvol *vol, const struct cfile *f)
{
    const struct lvm_lv *lv = l->s ? lvm_dir_find(&l->s->dir, f->name) : NULL;

    if (!lv)
        return;
    check_tags(l, vol, f, lv);
    check_len(l, f, lv);
}

/* ---- all of it ---- */

static void check_element(struct looking *l, const struct cvol *vol, const struct cfile *f)
{
    check_backing(l, f);
    check_children(l, f);
    check_lv(l, vol, f);
}

static void check_volume(struct looking *l, const struct cvol *vol)
{
    if (!is_guests(vol))
        tell(l, "it belongs to no guest: 'vm-<number>-...' would");
    if (l->s && vol->base)
        tell(l, "it is a base image, in a volume group");
    if (vol->current)
        check_element(l, vol, vol->current);
    vec_for_each(it, &vol->snaps)
        check_element(l, vol, *it);
    check_line(l, vol);
    check_origin(l, vol);
}

static int check_operations(struct looking *l, struct err *err)
{
    struct intents list = {0};
    int rc = intents_load(l->cat->images, false, &list, err);

    l->id = l->cat->pool->id;
    vec_for_each(it, &list.list)
        tell(l, "an operation has not ended: %s", intent_op(*it));
    intents_fini(&list);
    return rc;
}

int vol_pool_check_proxmox(const struct vol_ctx *ctx, const struct pool *pool, unsigned *ret,
                           struct err *err)
{
    _cleanup_(catalog_freep) struct catalog *cat = NULL;
    int rc = catalog_scan(pool, &cat, err);

    if (rc < 0)
        return rc;
    struct looking l = {.ctx = ctx, .cat = cat, .s = lvm_store_of(cat->images)};
    rc = check_operations(&l, err);
    vec_for_each(it, &cat->vols) {
        _cleanup_(freep) char *id = cvol_id(cat, *it);

        l.id = id ? id : (*it)->stem;
        check_volume(&l, *it);
    }
    *ret = l.found;
    return rc;
}
