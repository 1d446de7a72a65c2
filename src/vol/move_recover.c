/*
 * Settling a move that was cut off: see move.c. Begun from either of its two intents, which the
 * caller has claimed and will remove; the partner is claimed, used and removed here.
 */
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "base/check.h"
#include "vol/internal.h"

/* One side of it. */
struct side {
    const struct pool *pool;
    char *images, *dir;
    struct intent *intent;
    struct intent *own; /* the partner's: to be removed here */
    bool partner;
    struct pool_lock lock;
};

SUSPENDS static void side_fini(struct side *s)
{
    intent_leave(s->own);
    if (s->partner)
        pool_close(s->images); /* the caller closes its own */
    lock_release(&s->lock);
    free(s->dir);
    free(s->images);
}

static const json_t *first_vol(const struct intent *in)
{
    return json_array_get(json_object_get(in->json, "vols"), 0);
}

static int fill_side(struct side *s, const struct pool *pool, const char *images,
                     struct intent *intent, struct err *err)
{
    s->pool = pool;
    s->intent = intent;
    if (!s->images)
        s->images = strdup(images);
    s->dir = s->images ? intent_dir(s->images, first_vol(intent)) : NULL;
    return s->dir && !strchr(intent->id, '/') ? 0 : err_set(err, -EUCLEAN, "the intent is damaged");
}

/* The partner's side. s->intent NULL: it has no intent of this id. */
SUSPENDS static int find_partner(const struct vol_ctx *ctx, const struct intent *in,
                                 const char *pool_id, const char *op, struct side *s,
                                 struct err *err)
{
    const json_t *vol;
    bool live, gone;
    int rc = config_pool(ctx->cfg, pool_id, &s->pool, err);

    if (rc == -ENOENT) /* a storage that is no more */
        return 0;
    if (rc == 0)
        rc = store_open(s->pool, &s->images, err);
    s->partner = rc == 0;
    if (rc == 0)
        rc = intent_claim(s->images, in->id, &s->own, &live, err);
    if (rc < 0 || (!s->own && !live))
        return rc;
    if (live)
        return err_set(err, -EBUSY, "a move to or from '%s' is being settled by another process",
                       pool_id);
    vol = first_vol(s->own);
    if (!intent_name(vol, "stem") || strchr(intent_str(vol, "vmid"), '/'))
        return err_set(err, -EUCLEAN, "'%s' is damaged", s->own->path);
    if (intent_life(s->own, in->proof) == INTENT_UNKNOWN)
        return intent_refuse(s->own, pool_id, intent_str(vol, "vmid"), intent_str(vol, "stem"),
                             err);
    if (strcmp(intent_op(s->own), op) != 0)
        return err_set(err, -EUCLEAN, "'%s' is not of this move", s->own->path);
    rc = lock_volume(s->pool, s->images, intent_str(vol, "vmid"), intent_str(vol, "stem"), &s->lock,
                     err);
    if (rc == 0)
        rc = intent_take_over(s->own, in->proof, &gone, err);
    if (rc == 0 && gone)
        intent_leave(TAKE_PTR(s->own));
    else if (rc == 0)
        rc = fill_side(s, s->pool, NULL, s->own, err);
    return rc;
}

/* ---- the target ---- */

struct target_file {
    char *tmp, *to;
};

static int target_file(const struct side *dst, size_t i, struct target_file *ret, struct err *err)
{
    const char *name =
        json_string_value(json_array_get(json_object_get(dst->intent->json, "files"), i));

    if (!name || !*name || strchr(name, '/'))
        return err_set(err, -EUCLEAN, "the intent is damaged");
    ret->to = path_join(dst->dir, name);
    if (asprintf(&ret->tmp, "%s/" OWN_PREFIX "%s-%zu", dst->dir, dst->intent->id, i) < 0)
        ret->tmp = NULL;
    if (ret->to && ret->tmp)
        return 0;
    free(ret->to);
    free(ret->tmp);
    return err_set(err, -ENOMEM, "out of memory");
}

/* The current element comes last: with it under its name all are. */
static int is_published(const struct side *dst, bool *ret, struct err *err)
{
    size_t nr = json_array_size(json_object_get(dst->intent->json, "files"));
    struct target_file f;
    int rc =
        nr ? target_file(dst, nr - 1, &f, err) : err_set(err, -EUCLEAN, "the intent is damaged");

    if (rc < 0)
        return rc;
    *ret = store_exists(f.to) && (!store_exists(f.tmp) || store_same_file(f.tmp, f.to));
    free(f.tmp);
    free(f.to);
    return 0;
}

SUSPENDS static int settle_target(const struct vol_ctx *ctx, const struct side *dst, bool finish,
                                  struct err *err)
{
    size_t nr = json_array_size(json_object_get(dst->intent->json, "files"));
    struct target_file f;
    int rc = 0;

    for (size_t i = 0; i < nr && rc == 0; i++) {
        rc = target_file(dst, i, &f, err);
        if (rc < 0)
            return rc;
        if (!finish && store_same_file(f.tmp, f.to))
            rc = store_unlink(f.to, err);
        if (rc == 0)
            rc = store_unlink(f.tmp, err);
        if (rc == 0 && finish)
            tail_cut(ctx, dst->pool, f.to, i + 1 < nr);
        free(f.tmp);
        free(f.to);
    }
    return rc;
}

/* ---- the source ---- */

/* Somebody may have opened one of the files directly: then it stays for now. */
SUSPENDS static int delete_source(const struct side *src, struct err *err)
{
    const json_t *files = json_object_get(src->intent->json, "files"), *file;
    struct held_files held = {0};
    int rc = 0;
    size_t i;

    json_array_foreach(files, i, file)
    {
        const char *name = json_string_value(file);
        _cleanup_(freep) char *path = name && !strchr(name, '/') ? path_join(src->dir, name) : NULL;

        if (rc == 0 && !path)
            rc = err_set(err, -EUCLEAN, "the intent is damaged");
        if (rc == 0 && store_exists(path))
            rc = held_add(&held, path, err);
    }
    if (rc == 0)
        rc = destroy_files(src->dir, files, &held, err);
    held_drop(&held);
    return rc;
}

/* How many of the source's files are there; *ret_all: so many there were. */
static size_t count_source(const struct side *src, size_t *ret_all)
{
    const json_t *files = json_object_get(src->intent->json, "files"), *file;
    size_t i, nr = 0;

    json_array_foreach(files, i, file)
    {
        const char *name = json_string_value(file);
        _cleanup_(freep) char *path = name ? path_join(src->dir, name) : NULL;

        nr += path && store_exists(path);
    }
    *ret_all = json_array_size(files);
    return nr;
}

/* ---- both ---- */

SUSPENDS static int settle(const struct vol_ctx *ctx, struct side *src, struct side *dst,
                           struct err *err)
{
    bool finish;
    int rc = is_published(dst, &finish, err);

    if (rc == 0 && finish && src->intent)
        rc = delete_source(src, err);
    if (rc == 0 && src->own)
        rc = intent_end(TAKE_PTR(src->own), err);
    crash_point("move-source-settled");
    if (rc == 0)
        rc = settle_target(ctx, dst, finish, err);
    if (rc < 0)
        return rc;
    op_say(ctx, "an interrupted move of %s to '%s' was %s",
           intent_str(first_vol(dst->intent), "stem"), dst->pool->id,
           finish ? "finished" : "undone");
    return dst->own ? intent_end(TAKE_PTR(dst->own), err) : 0;
}

SUSPENDS static int recover_in(const struct vol_ctx *ctx, struct side *dst, struct side *src,
                               struct err *err)
{
    const json_t *json = dst->intent->json;
    int rc = 0;

    if (json_is_true(json_object_get(json, "delete")))
        rc = find_partner(ctx, dst->intent, intent_str(json, "source"), "move-out", src, err);
    return rc == 0 ? settle(ctx, src, dst, err) : rc;
}

/* Without a partner: the target was settled, which begins with the source; or it cannot be reached.
 */
SUSPENDS static int settle_alone(const struct vol_ctx *ctx, const struct side *src, struct err *why,
                                 struct err *err)
{
    size_t all, nr = count_source(src, &all);
    const char *target = intent_str(src->intent->json, "target");

    if (nr > 0 && nr < all)
        return err_set(err, -EUCLEAN, "%s",
                       why->rc ? err_text(why)
                               : "a part of the volume is gone, and its target too");
    if (nr)
        op_say(ctx, "an interrupted move of %s to '%s': the volume stays here",
               intent_str(first_vol(src->intent), "stem"), target);
    return 0;
}

SUSPENDS static int recover_out(const struct vol_ctx *ctx, struct side *src, struct side *dst,
                                struct err *err)
{
    struct err why = {0};
    int rc = find_partner(ctx, src->intent, intent_str(src->intent->json, "target"), "move-in", dst,
                          &why);

    if (rc == 0 && dst->intent)
        return settle(ctx, src, dst, err);
    if (rc == -EBUSY)
        return err_set(err, rc, "%s", err_text(&why));
    return settle_alone(ctx, src, &why, err);
}

int move_recover(const struct vol_ctx *ctx, const struct pool *pool, const char *images,
                 struct intent *intent, struct err *err)
{
    bool in = strcmp(intent_op(intent), "move-in") == 0;
    struct side src = {.lock = {-1}}, dst = {.lock = {-1}};
    int rc = fill_side(in ? &dst : &src, pool, images, intent, err);

    if (rc == 0)
        rc = in ? recover_in(ctx, &dst, &src, err) : recover_out(ctx, &src, &dst, err);
    side_fini(&src);
    side_fini(&dst);
    return rc;
}
