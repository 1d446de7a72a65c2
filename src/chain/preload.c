/*
 * What is kept in memory of a chain's metadata, and loading it ahead of requests.
 *
 * The same mapping can be there twice: in the slices of the layers and in the flattened map. Where
 * the slices of all layers fit into the bound they are worth more: with them a miss of the map
 * costs no I/O. Where they do not (many layers), the map holds the answer for all of them in one
 * place.
 */
#include "base/bits.h"
#include "base/check.h"
#include "chain/internal.h"
#include "rt/reactor.h"

/* A step of preloading is inside the gate for about so long: a pivot waits for it. */
#define STEP_NS 200000ull

void chain_weigh(struct chain *chain)
{
    uint64_t slices = 0;

    for (size_t i = 0; i < chain->layers.len; i++)
        if (chain->layers.data[i]->image)
            slices += image_map_estimate(chain->layers.data[i]->image);
    bool fits = slices <= chain->bound.limit / 4 * 3;
    chain->bound.first = fits ? &chain->fmap.member : NULL;
    for (size_t i = 0; i < chain->layers.len; i++)
        if (chain->layers.data[i]->image)
            image_map_is_passing(chain->layers.data[i]->image, !fits && i > 0);
}

/* What is worth keeping takes nearly all of the bound: more would only push it out. */
static bool is_full(const struct chain *chain)
{
    uint64_t map = chain->fmap.member.bytes, worth = chain->bound.bytes;
    struct image_stats top = {0};

    if (chain->bound.first)
        worth -= map;
    else if (chain->layers.len > 1) {
        image_get_stats(chain_top(chain)->image, &top);
        worth = map + top.cache_bytes;
    }
    return worth > chain->bound.limit / 8 * 7;
}

/* One piece of the map; *off moves on. What cannot be read is left to the request that needs it. */
SUSPENDS static void load_piece(struct chain *chain, uint64_t *off)
{
    struct layer *top = chain_top(chain);
    uint64_t len = layer_len(top), end = len;
    struct fmap_entry e;
    int rc = 0;

    if (top->lower) {
        rc = chain_resolve(chain, top, *off, MIN(len, fmap_slice_end(&chain->fmap, *off)) - *off,
                           &e);
        end = rc < 0 ? *off + chain->unit : *off + e.len;
    } else if (top->image) {
        rc = image_load_map(top->image, *off, &end);
        if (rc < 0)
            end = *off + image_header(top->image)->cluster_size;
    }
    *off = end;
}

/* Pieces for a while. True: there is more. */
SUSPENDS static bool load_step(struct chain *chain, uint64_t *off)
{
    uint64_t until = reactor_now() + STEP_NS;
    bool more = true;

    gate_enter(&chain->gate);
    if (chain_depth(chain) > 1)
        chain_weigh(chain);
    do {
        more = *off < layer_len(chain_top(chain)) && !is_full(chain);
        if (more)
            load_piece(chain, off);
    } while (more && reactor_now() < until);
    gate_leave(&chain->gate);
    return more;
}

int chain_preload(struct chain *chain, const bool *stop)
{
    uint64_t off = 0;

    chain->stats.preloads_running++;
    while (!*stop && load_step(chain, &off)) {
        chain->stats.preloaded_bytes = off;
        reactor_yield(); /* guests first */
    }
    chain->stats.preloaded_bytes = off;
    chain->stats.preloads_running--;
    return *stop ? -ECANCELED : 0;
}
