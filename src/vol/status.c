/*
 * What a pool has, what is in it, and what it may still need: vol_pool_status().
 *
 * Of a volume group all of it comes from one report and the images' heads, of a directory from
 * statvfs() and the scan. Nothing is locked, so the figures may be those of the middle of an
 * operation.
 *
 * Warnings come before it is too late: less than a tenth is free; the disks that are served could
 * not each have one more chunk; the metadata area of a volume group is nearly full.
 */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/statvfs.h>
#include "base/bits.h"
#include "vol/store_lvm.h"

#define LV_METADATA  500u /* bytes that an LV takes in its VG's metadata, about */
#define METADATA_LVS 200u /* fewer LVs that there is still room for are worth a warning */
#define FREE_PART    10u  /* so is less than one part of so many of the space */

void vol_pool_status_free(struct vol_pool_status *st)
{
    if (!st)
        return;
    for (unsigned i = 0; i < st->nb_warnings; i++)
        free(st->warnings[i]);
    for (unsigned i = 0; i < st->nb_ops; i++) {
        free(st->ops[i].op);
        free(st->ops[i].volume);
        free(st->ops[i].who);
    }
    for (unsigned i = 0; i < st->nb_wipes; i++)
        free(st->wipes[i].lv);
    free(st->warnings);
    free(st->ops);
    free(st->wipes);
    free(st);
}

static int PRINTF_LIKE(2, 3) warn(struct vol_pool_status *st, const char *fmt, ...)
{
    char **grown = reallocarray(st->warnings, st->nb_warnings + 1, sizeof(*grown));
    va_list ap;

    if (!grown)
        return -ENOMEM;
    st->warnings = grown;
    va_start(ap, fmt);
    int n = vasprintf(&grown[st->nb_warnings], fmt, ap);
    va_end(ap);
    if (n < 0)
        return -ENOMEM;
    st->nb_warnings++;
    return 0;
}

/* ---- volumes ---- */

/* What the current element may still come to take; snapshots take no more. */
static uint64_t growth_of(const struct cfile *f)
{
    uint64_t now =
                 S_ISBLK(f->st.st_mode) ? (uint64_t)f->st.st_size : (uint64_t)f->st.st_blocks * 512,
             full = f->virtual_len;

    if (strcmp(f->format, "qcow2") == 0 &&
        lvm_image_len(f->virtual_len, f->backing, &full, NULL) < 0)
        full = f->virtual_len;
    return full > now ? full - now : 0;
}

static int count_volumes(struct vol_pool_status *st, const struct catalog *cat)
{
    vec_for_each(it, &cat->vols) {
        const struct cvol *vol = *it;
        _cleanup_(freep) char *qmp = cvol_qmp_path(cat, vol);

        if (!qmp)
            return -ENOMEM;
        st->vols++;
        st->snaps += (unsigned)vol->snaps.len;
        st->served += socket_is_served(qmp);
        if (vol->current && !vol->current->bad) {
            st->promised += vol->current->virtual_len;
            st->growth += vol->base ? 0 : growth_of(vol->current);
        }
    }
    vec_for_each(it, &cat->files)
        st->allocated += (*it)->vol ? (uint64_t)(*it)->st.st_blocks * 512 : 0;
    st->orphans = (unsigned)cat->strays.len;
    return 0;
}

static int add_op(struct vol_pool_status *st, const struct intent *in)
{
    struct vol_pool_op *grown = reallocarray(st->ops, st->nb_ops + 1, sizeof(*grown));
    const json_t *vol = json_array_get(json_object_get(in->json, "vols"), 0);
    const char *stem = intent_str(vol, "stem"), *snap = intent_str(in->json, "snap");
    const char *one = *snap ? snap : intent_str(vol, "snap"); /* of several volumes each has it */
    char who[200];

    if (!grown)
        return -ENOMEM;
    st->ops = grown;
    intent_describe(in, who, sizeof(who));
    struct vol_pool_op op = {.op = strdup(intent_op(in)), .who = strdup(who)};
    if (asprintf(&op.volume, "%s%s%s", stem, *one ? "@" : "", one) < 0)
        op.volume = NULL;
    op.life = in->foreign ? VOL_OP_ELSEWHERE : in->fd < 0 ? VOL_OP_RUNS : VOL_OP_CUT_OFF;
    st->ops[st->nb_ops++] = op;
    return op.op && op.who && op.volume ? 0 : -ENOMEM;
}

SUSPENDS static int list_ops(struct vol_pool_status *st, const char *images, struct err *err)
{
    struct intents list = {0};
    int rc = intents_load(images, true, &list, err);

    if (rc == -EROFS || rc == -EACCES || st->nb_missing)
        rc = 0; /* whoever may only look is told nothing of them */
    vec_for_each(it, &list.list) {
        if (rc == 0 && add_op(st, *it) < 0)
            rc = err_set(err, -ENOMEM, "out of memory");
    }
    intents_fini(&list);
    return rc;
}

/* ---- the volume group ---- */

static int add_wipe(struct vol_pool_status *st, const struct lvm_lv *lv)
{
    struct vol_pool_lv *grown = reallocarray(st->wipes, st->nb_wipes + 1, sizeof(*grown));

    if (!grown)
        return -ENOMEM;
    st->wipes = grown;
    grown[st->nb_wipes] = (struct vol_pool_lv){.lv = strdup(lv->name),
                                               .len = lv->len,
                                               .wiped = lvm_dir_wiped(lv),
                                               .here = lvm_dir_is_to_wipe_here(lv)};
    return grown[st->nb_wipes++].lv ? 0 : -ENOMEM;
}

static int look_at_vg(struct vol_pool_status *st, const struct lvm_store *s)
{
    const struct lvm_vg *vg = s->dir.vg;
    int rc = 0;

    st->is_vg = true;
    st->total = vg->len;
    st->avail = vg->free;
    st->extent_len = vg->extent_len;
    st->metadata_len = vg->metadata_len;
    st->metadata_free = vg->metadata_free;
    st->nb_pvs = (unsigned)vg->pvs.len;
    st->nb_missing = vg->nb_missing;
    vec_for_each(lv, &vg->lvs) {
        st->active += lvm_dir_is_ours(lv) && lv->active == LVM_YES;
        if (rc == 0 && lvm_dir_is_to_wipe(lv))
            rc = add_wipe(st, lv);
    }
    if (st->nb_wipes)
        st->wiping = pool_wipe_runs(s->pool);
    return rc;
}

/* ---- warnings ---- */

static int warn_vg(struct vol_pool_status *st, const struct pool *pool)
{
    uint64_t lvs = st->metadata_free / LV_METADATA;
    int rc = 0;

    if (st->nb_missing)
        rc = warn(
            st, "%u of %u physical volumes are missing: nothing can be changed until they are back",
            st->nb_missing, st->nb_pvs);
    if (rc == 0 && lvs < METADATA_LVS)
        rc = warn(st,
                  "the metadata area has room for about %llu more logical volumes; a larger one "
                  "(vgcreate --metadatasize 64m) can only be made with the volume group, or with "
                  "a physical volume that is added to it",
                  (unsigned long long)lvs);
    uint64_t chunk = pool->thin_given ? pool->thin_chunk : THIN_CHUNK;
    if (rc == 0 && chunk && st->served && st->avail / st->served < chunk)
        rc = warn(st, "the %u disks that are served could not have one more chunk each (%llu MiB)",
                  st->served, (unsigned long long)(chunk / MIB));
    return rc;
}

static int add_warnings(struct vol_pool_status *st, const struct pool *pool)
{
    int rc = 0;

    if (st->total && st->avail < st->total / FREE_PART)
        rc = warn(st, "less than a tenth is free");
    if (rc == 0 && st->is_vg)
        rc = warn_vg(st, pool);
    for (unsigned i = 0; i < st->nb_ops && rc == 0; i++)
        if (st->ops[i].life == VOL_OP_CUT_OFF)
            rc = warn(st, "an operation on %s was cut off: the next one finishes or undoes it",
                      st->ops[i].volume);
    unsigned others = 0, mine = 0;
    for (unsigned i = 0; i < st->nb_wipes; i++)
        st->wipes[i].here ? mine++ : others++;
    if (rc == 0 && mine && !st->wiping)
        rc = warn(
            st,
            "%u deleted logical volumes wait to be wiped and nobody does it: varve pool wipe %s",
            mine, pool->id);
    return rc;
}

SUSPENDS static int fill(struct vol_pool_status *st, const struct pool *pool,
                         const struct catalog *cat, struct err *err)
{
    const struct lvm_store *s = lvm_store_of(cat->images);
    struct statvfs fs;
    int rc = count_volumes(st, cat);

    if (rc == 0 && s)
        rc = look_at_vg(st, s);
    if (!s && statvfs(pool->path, &fs) == 0) {
        st->total = (uint64_t)fs.f_blocks * fs.f_frsize;
        st->avail = (uint64_t)fs.f_bavail * fs.f_frsize;
    }
    if (rc < 0)
        return err_set(err, rc, "out of memory");
    rc = list_ops(st, cat->images, err);
    if (rc == 0 && add_warnings(st, pool) < 0)
        rc = err_set(err, -ENOMEM, "out of memory");
    return rc;
}

int vol_pool_status(const struct config *cfg, const struct pool *pool, struct vol_pool_status **ret,
                    struct err *err)
{
    _cleanup_(catalog_freep) struct catalog *cat = NULL;
    struct vol_pool_status *st = calloc(1, sizeof(*st));
    int rc = st ? config_pool(cfg, pool->id, &pool, err) : err_set(err, -ENOMEM, "out of memory");

    if (rc == 0)
        rc = catalog_scan(pool, &cat, err);
    if (rc == 0)
        rc = fill(st, pool, cat, err);
    if (rc < 0) {
        vol_pool_status_free(st);
        return rc;
    }
    *ret = st;
    return 0;
}
