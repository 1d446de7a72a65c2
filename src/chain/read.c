/*
 * Where a range lives, and reading it. Invariants:
 *
 * 1. A result of the flattened map or of a walk is used only inside the gate (or a job's step):
 *    layers do not come or go meanwhile.
 * 2. Data of the top is read through its image, never by host offset: the top's clusters move
 *    and are reused under running writes, and the image knows who is using them. The mapping of a
 *    layer below moves only where a layer above hides it, so its file is read directly.
 * 3. A walk notes the range's generation before its first look and enters its result only if no
 *    mapping there changed since.
 * 4. An entry of the map names the first layer that decides; it holds for every view that starts
 *    at that layer or above it.
 */
#include "base/bits.h"
#include "base/check.h"
#include "chain/internal.h"

/* Misses of the map. */
#define WEIGH_EVERY 256u

/* Raw layers count as data throughout: a hole reads as well as it is looked up. */
SUSPENDS static int walk_map(struct layer *layer, uint64_t off, uint64_t len, struct extent *ret)
{
    if (layer->image)
        return image_map(layer->image, off, len, ret);
    *ret = (struct extent){EXTENT_DATA, len, off, true};
    return 0;
}

static enum fmap_kind kind_of_extent(enum extent_kind kind)
{
    switch (kind) {
    case EXTENT_DATA:
        return FMAP_DATA;
    case EXTENT_COMPRESSED:
        return FMAP_COMPRESSED;
    case EXTENT_ZERO:
        return FMAP_ZERO;
    case EXTENT_UNALLOCATED:
        break;
    }
    return FMAP_HOLE;
}

/* First extent of the view from `from` downwards. */
SUSPENDS static int walk(struct layer *from, uint64_t off, uint64_t len, struct fmap_entry *ret)
{
    *ret = (struct fmap_entry){.guest_off = off, .len = len};
    for (struct layer *l = from; l; l = l->lower) {
        uint64_t end = layer_len(l);
        struct extent ext;

        ret->slot = l->slot;
        if (off >= end) {
            ret->kind = FMAP_EOF;
            return 0;
        }
        int rc = walk_map(l, off, MIN(ret->len, end - off), &ext);
        if (rc < 0)
            return rc;
        ret->len = ext.len;
        ret->kind = kind_of_extent(ext.kind);
        ret->host_off = ext.kind == EXTENT_DATA ? ext.host_off : 0;
        if (ext.kind != EXTENT_UNALLOCATED)
            return 0;
    }
    return 0;
}

/* Cuts an entry that covers off so that it starts there and has at most len bytes. */
static void entry_cut(struct fmap_entry *e, uint64_t off, uint64_t len)
{
    uint64_t front = off - e->guest_off;

    e->guest_off = off;
    e->len = MIN(e->len - front, len);
    if (e->kind == FMAP_DATA)
        e->host_off += front;
}

/* Walks from the top as far as the slice goes, so that one walk serves later requests too. */
SUSPENDS static int walk_and_insert(struct chain *chain, uint64_t off, struct fmap_entry *ret)
{
    uint64_t start = align_down(off, chain->unit);
    uint64_t end = MIN(fmap_slice_end(&chain->fmap, off), layer_len(chain_top(chain)));
    uint32_t gen = fmap_gen(&chain->fmap, start);
    int rc = walk(chain_top(chain), start, end - start, ret);

    /* an extent that ends before off: a layer's end inside the unit */
    while (rc == 0 && ret->guest_off + ret->len <= off)
        rc =
            walk(chain_top(chain), ret->guest_off + ret->len, end - ret->guest_off - ret->len, ret);
    if (rc < 0)
        return rc;
    if (chain->walk_hook)
        chain->walk_hook(chain->walk_hook_arg);
    fmap_insert(&chain->fmap, gen, ret);
    return 0;
}

int chain_resolve(struct chain *chain, struct layer *from, uint64_t off, uint64_t len,
                  struct fmap_entry *ret)
{
    if (!from->lower)
        return walk(from, off, len, ret);
    if (off < layer_len(chain_top(chain)) && fmap_lookup(&chain->fmap, off, ret) &&
        chain->slots.data[ret->slot]->index >= from->index) {
        entry_cut(ret, off, len);
        return 0;
    }
    if (from->index > 0 || off >= layer_len(from))
        return walk(from, off, len, ret);
    if (chain->fmap.misses % WEIGH_EVERY == 1)
        chain_weigh(chain);
    int rc = walk_and_insert(chain, off, ret);
    if (rc == 0)
        entry_cut(ret, off, len);
    return rc;
}

/* Reads the next n bytes into iov, which moves on by n. */
SUSPENDS static int read_entry(struct chain *chain, const struct fmap_entry *e,
                               struct iov_iter *iov)
{
    struct layer *layer = chain->slots.data[e->slot];
    struct iov_iter part = *iov;
    int rc = 0;

    part.left = e->len;
    switch (e->kind) {
    case FMAP_DATA:
        if (layer->index > 0 || !layer->image) {
            rc = blk_readv(layer_blk(layer), e->host_off, e->len, &part);
            break;
        }
        rc = image_read(layer->image, e->guest_off, e->len, &part, &layer->below);
        break;
    case FMAP_COMPRESSED:
        rc = image_read(layer->image, e->guest_off, e->len, &part, &layer->below);
        break;
    case FMAP_ZERO:
    case FMAP_EOF:
    case FMAP_HOLE:
        iov_iter_zero(&part, e->len);
        break;
    }
    iov_iter_advance(iov, e->len);
    return rc;
}

/* ---- ranges of several extents: a few of them are read at once ---- */

#define PARTS 8u

struct part {
    struct chain *chain;
    struct fmap_entry entry;
    struct iov_iter iov;
    bool busy;
};

SUSPENDS static int read_part(void *arg)
{
    struct part *part = arg;
    int rc = read_entry(part->chain, &part->entry, &part->iov);

    part->busy = false;
    return rc;
}

static struct part *free_part(struct part *parts)
{
    while (parts->busy)
        parts++;
    return parts;
}

static bool reads_nothing(const struct fmap_entry *e)
{
    return e->kind != FMAP_DATA && e->kind != FMAP_COMPRESSED;
}

/* Reads e beside others, once there is room; iov moves on. */
SUSPENDS static int start_part(struct chain *chain, struct co_group *group, struct part *parts,
                               const struct fmap_entry *e, struct iov_iter *iov)
{
    if (reads_nothing(e)) {
        iov_iter_zero(iov, e->len);
        return 0;
    }
    co_group_wait_below(group, PARTS);
    struct part *part = free_part(parts);
    *part = (struct part){chain, *e, *iov, true};
    iov_iter_advance(iov, e->len);
    if (group->rc < 0 || co_group_spawn(group, read_part, part) == 0)
        return group->rc;
    return read_part(part); /* no memory for a child: by ourselves */
}

/* The first extent is known already. */
SUSPENDS static int read_parts(struct chain *chain, struct layer *from, struct fmap_entry *e,
                               uint64_t end, struct iov_iter *iov)
{
    struct part parts[PARTS] = {0};
    struct co_group group;
    int rc;

    co_group_init(&group);
    for (;;) {
        uint64_t next = e->guest_off + e->len;

        rc = start_part(chain, &group, parts, e, iov);
        if (rc < 0 || next == end)
            break;
        rc = chain_resolve(chain, from, next, end - next, e);
        if (rc < 0)
            break;
    }
    int parts_rc = co_group_wait(&group);
    return rc < 0 ? rc : parts_rc;
}

int chain_read_from(struct chain *chain, struct layer *from, uint64_t off, uint64_t len,
                    struct iov_iter *iov)
{
    struct fmap_entry e;

    if (!from || len == 0) {
        iov_iter_zero(iov, len);
        return 0;
    }
    int rc = chain_resolve(chain, from, off, len, &e);
    if (rc < 0)
        return rc;
    if (e.len == len)
        return read_entry(chain, &e, iov);
    return read_parts(chain, from, &e, off + len, iov);
}

/* ---- what writes to a layer see below it ---- */

SUSPENDS static int below_read(void *ctx, uint64_t guest_off, uint64_t len, struct iov_iter *iov)
{
    struct layer *layer = ctx;
    uint64_t end = layer_len(layer);
    uint64_t inside = guest_off < end ? MIN(len, end - guest_off) : 0;

    /* what a longer layer below holds behind our end must not come into our last cluster */
    int rc = chain_read_from(layer->chain, inside ? layer->lower : NULL, guest_off, inside, iov);
    if (rc == 0)
        iov_iter_zero(iov, len - inside);
    return rc;
}

static uint64_t below_is_zero(void *ctx, uint64_t guest_off, uint64_t len, bool *ret_zero)
{
    struct layer *layer = ctx;
    struct layer *lower = layer->lower;
    uint64_t end = layer_len(layer);
    struct fmap_entry e;

    *ret_zero = true;
    if (!lower || guest_off >= layer_len(lower) || guest_off >= end)
        return len;
    *ret_zero = false;
    len = MIN(len, end - guest_off);
    if (!fmap_lookup(&layer->chain->fmap, guest_off, &e) ||
        layer->chain->slots.data[e.slot]->index < lower->index)
        return len;
    *ret_zero = e.kind == FMAP_ZERO || e.kind == FMAP_EOF || e.kind == FMAP_HOLE;
    return MIN(e.len, len);
}

void layer_init_below(struct layer *layer)
{
    layer->below = (struct image_below){below_read, below_is_zero, layer};
    layer->below_unsure = (struct image_below){below_read, NULL, layer};
}
