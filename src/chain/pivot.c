/*
 * Changes of shape under live I/O: push a layer, take layers out, resize.
 *
 * Order of a push: dirty metadata of the old top is written back while requests go on; the gate
 * closes and requests inside finish; the old top is flushed and made read-only; the new layer is
 * attached; the gate opens. Everything that can fail comes before the attaching.
 *
 * Order of gates: `shape`, `work`, `gate`. A step of a job may wait for guest requests, so steps
 * are drained first. A push lets them run: it only attaches at the top, and a walk goes by links.
 */
#include "base/bits.h"
#include "base/check.h"
#include "chain/internal.h"
#include "rt/reactor.h"

/* ---- attaching and detaching ---- */

static unsigned free_slot(const struct chain *chain)
{
    unsigned slot = 0;

    while (slot < chain->slots.len && chain->slots.data[slot])
        slot++;
    return slot;
}

int chain_reserve(struct chain *chain)
{
    unsigned slot = free_slot(chain);
    int rc = vec_reserve(&chain->layers, chain->layers.len + 1);

    if (rc == 0 && slot == chain->slots.len)
        rc = vec_push(&chain->slots, NULL);
    if (rc == 0)
        rc = fmap_add_layer(&chain->fmap, slot);
    return rc;
}

/* Index and lower of every layer, from the array. */
static void relink(struct chain *chain)
{
    size_t nr = chain->layers.len;

    for (size_t i = 0; i < nr; i++) {
        struct layer *l = chain->layers.data[i];

        l->index = (unsigned)i;
        l->lower = i + 1 < nr ? chain->layers.data[i + 1] : NULL;
    }
}

void chain_attach(struct chain *chain, unsigned index, struct layer *layer)
{
    size_t nr = chain->layers.len;

    DEBUG_CHECK(!layer->chain && nr < chain->layers.cap && index <= nr);
    layer->slot = free_slot(chain);
    layer->chain = chain;
    chain->slots.data[layer->slot] = layer;
    chain->unit = MIN(chain->unit, layer_unit(layer));
    if (layer->image)
        image_share_bound(layer->image, &chain->bound);
    memmove(chain->layers.data + index + 1, chain->layers.data + index,
            (nr - index) * sizeof(*chain->layers.data));
    chain->layers.data[index] = layer;
    chain->layers.len++;
    relink(chain);
}

void chain_detach(struct chain *chain, struct layer *layer)
{
    DEBUG_CHECK(layer->chain == chain);
    fmap_drop_layer(&chain->fmap, layer->slot);
    if (layer->image)
        image_share_bound(layer->image, NULL);
    chain->slots.data[layer->slot] = NULL;
    vec_remove_at(&chain->layers, layer->index);
    layer->chain = NULL;
    layer->lower = NULL;
    relink(chain);
}

/* ---- closing and opening ---- */

void chain_work_enter(struct chain *chain)
{
    gate_enter(&chain->work);
}

void chain_work_leave(struct chain *chain)
{
    gate_leave(&chain->work);
}

SUSPENDS static uint64_t close_gate(struct chain *chain)
{
    uint64_t start = reactor_now();

    gate_close(&chain->gate);
    chain->frozen_at = start;
    return reactor_now() - start;
}

static uint64_t open_gate(struct chain *chain)
{
    uint64_t ns = reactor_now() - chain->frozen_at;

    gate_open(&chain->gate);
    chain->stats.last_gate_closed_ns = ns;
    chain->stats.max_gate_closed_ns = MAX(chain->stats.max_gate_closed_ns, ns);
    return ns;
}

void chain_freeze(struct chain *chain)
{
    co_mutex_lock(&chain->shape);
    gate_close(&chain->work);
    close_gate(chain);
}

uint64_t chain_thaw(struct chain *chain)
{
    uint64_t ns = open_gate(chain);

    gate_open(&chain->work);
    co_mutex_unlock(&chain->shape);
    return ns;
}

void chain_set_watch(struct chain *chain, struct chain_watch *watch)
{
    chain->watch = watch;
}

/* ---- push ---- */

static int check_push(const struct chain *chain, const struct layer *layer, struct err *err)
{
    const struct layer *top = chain_top(chain);

    if (!chain->writable)
        return err_set(err, -EROFS, "'%s' is open read-only", top->path);
    if (!layer->image || !layer->writable)
        return err_set(err, -EINVAL, "'%s' is no writable qcow2 image", layer->path);
    if (layer->chain)
        return err_set(err, -EBUSY, "'%s' is part of a chain already", layer->path);
    if (layer_len(layer) < layer_len(top))
        return err_set(err, -EINVAL, "'%s' is shorter than '%s'", layer->path, top->path);
    if (chain->layers.len >= CHAIN_DEPTH_MAX)
        return err_set(err, -EINVAL, "more than %u layers", CHAIN_DEPTH_MAX);
    if (top->pinned)
        return err_set(err, -EBUSY, "a job is merging '%s'", top->path);
    return 0;
}

/* With the gate closed. On failure nothing has changed. */
SUSPENDS static int push_drained(struct chain *chain, struct layer *layer, struct pivot_stats *ps,
                                 struct err *err)
{
    uint64_t start = reactor_now();
    int rc = layer_reopen(chain_top(chain), false, err);

    ps->flush_ns = reactor_now() - start;
    if (rc < 0)
        return rc;
    chain_attach(chain, 0, layer);
    chain->stats.pivots++;
    return 0;
}

/* The long part of a push, while requests go on. */
SUSPENDS static int write_out(struct layer *top, struct err *err)
{
    int rc = top->image ? image_write_back(top->image) : 0;

    if (rc == 0)
        rc = chain_merge_flush(top);
    return rc < 0 ? err_errno(err, rc, "flush '%s'", top->path) : 0;
}

SUSPENDS static int push_locked(struct chain *chain, struct layer *layer, struct pivot_stats *ps,
                                struct err *err)
{
    int rc = check_push(chain, layer, err);

    if (rc == 0)
        rc = write_out(chain_top(chain), err);
    if (rc == 0 && (rc = chain_reserve(chain)) < 0)
        err_errno(err, rc, "chain");
    if (rc < 0)
        return rc;
    ps->drain_ns = close_gate(chain);
    rc = push_drained(chain, layer, ps, err);
    ps->gate_closed_ns = open_gate(chain);
    return rc;
}

int chain_push(struct chain *chain, struct layer *layer, struct pivot_stats *ret, struct err *err)
{
    struct pivot_stats ps = {0};

    co_mutex_lock(&chain->shape);
    int rc = push_locked(chain, layer, &ps, err);
    co_mutex_unlock(&chain->shape);
    if (ret)
        *ret = ps;
    return rc;
}

/* ---- taking out ---- */

struct layer *chain_cut(struct chain *chain, struct layer *first, struct layer *last)
{
    struct layer *prev = NULL;

    for (struct layer *l = first, *next; l; prev = l, l = next) {
        next = l == last ? NULL : l->lower;
        chain_detach(chain, l);
        if (prev)
            prev->lower = l;
    }
    DEBUG_CHECK(chain->layers.len > 0);
    /* the map of a single layer is not kept up to date: it must be empty when the next one comes */
    if (chain->layers.len == 1)
        fmap_drop_layer(&chain->fmap, chain_top(chain)->slot);
    chain->writable = chain_top(chain)->writable;
    return first;
}

int chain_remove(struct chain *chain, struct layer *layer, struct err *err)
{
    int rc = 0;

    chain_freeze(chain);
    if (layer->chain != chain || layer->index == 0)
        rc = err_set(err, -EINVAL, "'%s' cannot be taken out of the chain", layer->path);
    else if (layer->pinned || layer->users > 0)
        rc = err_set(err, -EBUSY, "'%s' is in use", layer->path);
    else
        chain_cut(chain, layer, layer);
    chain_thaw(chain);
    return rc;
}

int chain_pin(struct chain *chain, struct layer *first, struct layer *last, struct err *err)
{
    for (struct layer *l = first; l; l = l->lower) {
        if (l->pinned)
            return err_set(err, -EBUSY, "another job is merging '%s'", l->path);
        if (l == last)
            break;
    }
    for (struct layer *l = first; l; l = l->lower) {
        l->pinned = true;
        if (l == last)
            break;
    }
    return 0;
}

void chain_unpin(struct layer *first, struct layer *last)
{
    for (struct layer *l = first; l; l = l->lower) {
        l->pinned = false;
        if (l == last)
            break;
    }
}

/* ---- length ---- */

int chain_grow_layer(struct chain *chain, struct layer *layer, uint64_t len, struct err *err)
{
    uint64_t old_len = layer_len(layer);
    int rc;

    if (layer->image)
        rc = image_resize(layer->image, len, layer->lower ? &layer->below : NULL, err);
    else if ((rc = blk_resize(layer->blk, len)) < 0)
        err_errno(err, rc, "resize");
    if (rc < 0)
        return err_prefix(err, rc, "resize '%s'", layer->path);
    /* from the lower of both ends on nothing is as it was */
    uint64_t from = MIN(old_len, layer_len(layer));
    fmap_forget(&chain->fmap, align_down(from, chain->unit), UINT64_MAX / 4);
    return 0;
}

void chain_hold(struct chain *chain)
{
    chain_freeze(chain);
}

int chain_hold_flushed(struct chain *chain, struct err *err)
{
    co_mutex_lock(&chain->shape);
    int rc = write_out(chain_top(chain), err);

    if (rc < 0) {
        co_mutex_unlock(&chain->shape);
        return rc;
    }
    gate_close(&chain->work);
    close_gate(chain);
    return 0;
}

int chain_push_held(struct chain *chain, struct layer *layer, struct pivot_stats *ret,
                    struct err *err)
{
    struct pivot_stats ps = {0};
    int rc = check_push(chain, layer, err);

    if (rc == 0 && (rc = chain_reserve(chain)) < 0)
        err_errno(err, rc, "chain");
    if (rc == 0)
        rc = push_drained(chain, layer, &ps, err);
    ps.gate_closed_ns = reactor_now() - chain->frozen_at;
    *ret = ps;
    return rc;
}

void chain_release(struct chain *chain)
{
    (void)chain_thaw(chain);
}

int chain_ack_layer(struct chain *chain, struct layer *layer, struct err *err)
{
    if (!chain->keeps_ack || !layer->writable || !layer->image)
        return 0;
    int rc = image_start_ack(layer->image, err);
    return rc < 0 ? err_prefix(err, rc, "journal of '%s'", layer->path) : 0;
}

int chain_start_ack(struct chain *chain, struct err *err)
{
    chain->keeps_ack = true;
    return chain_ack_layer(chain, chain_top(chain), err);
}

void chain_top_changed(struct chain *chain)
{
    (void)chain_ack_layer(chain, chain_top(chain), NULL); /* else it goes on without */
}

bool chain_is_ack(const struct chain *chain)
{
    const struct layer *top = chain_top(chain);

    /* a raw disk has no map that could be lost */
    return chain->writable && chain->keeps_ack && (!top->image || image_is_recorded(top->image));
}

int chain_ready_layer(struct layer *layer, uint64_t len, struct err *err)
{
    if (layer->image || !blk_is_extendable(layer->blk) || len <= layer->blk->len)
        return 0;
    int rc = blk_resize_prepare(layer->blk, len, err);
    return rc < 0 ? err_prefix(err, rc, "resize '%s'", layer->path) : 0;
}

static int check_resize(const struct chain *chain, struct err *err)
{
    const struct layer *top = chain_top(chain);

    if (!chain->writable)
        return err_set(err, -EROFS, "'%s' is open read-only", top->path);
    if (top->pinned)
        return err_set(err, -EBUSY, "a job is merging '%s'", top->path);
    return 0;
}

int chain_resize(struct chain *chain, uint64_t len, struct err *err)
{
    co_mutex_lock(&chain->shape);
    int rc = check_resize(chain, err);

    if (rc == 0)
        rc = chain_ready_layer(chain_top(chain), len, err);
    if (rc < 0) {
        co_mutex_unlock(&chain->shape);
        return rc;
    }
    gate_close(&chain->work);
    close_gate(chain);
    rc = check_resize(chain, err); /* a job may have begun */
    if (rc == 0)
        rc = chain_grow_layer(chain, chain_top(chain), len, err);
    chain_thaw(chain);
    return rc;
}
