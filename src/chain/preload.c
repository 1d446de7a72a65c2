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

/* Turns of the clock that the map survives unused while lower slices survive none. */
#define MAP_LIVES 4u
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
    chain->fmap.lives = fits ? 1 : MAP_LIVES;
    for (size_t i = 0; i < chain->layers.len; i++)
        if (chain->layers.data[i]->image)
            image_map_is_passing(chain->layers.data[i]->image, !fits && i > 0);
}

struct loading {
    uint64_t off;       /* the map is loaded up to here */
    uint64_t evictions; /* of the flattened map, when it began */
};

/* More would only push out what was loaded. */
static bool is_full(const struct chain *chain, const struct loading *l)
{
    uint64_t slices = chain->bound.bytes - chain->fmap.member.bytes;

    if (chain->layers.len > 1 && !chain->bound.first)
        return chain->fmap.evictions != l->evictions;
    return slices > chain->bound.limit / 8 * 7;
}

/* One piece of the map. What cannot be read is left to the request that needs it. */
SUSPENDS static void load_piece(struct chain *chain, struct loading *l)
{
    struct layer *top = chain_top(chain);
    uint64_t slice_end = MIN(layer_len(top), fmap_slice_end(&chain->fmap, l->off));
    uint64_t end = layer_len(top);
    struct fmap_entry e = {0};
    int rc = 0;

    if (top->lower) {
        rc = chain_resolve(chain, top, l->off, slice_end - l->off, &e);
        end = l->off + e.len;
    } else if (top->image) {
        rc = image_load_map(top->image, l->off, &end);
    }
    l->off = rc < 0 ? slice_end : end;
}

/* Pieces for a while. True: there is more. */
SUSPENDS static bool load_step(struct chain *chain, struct loading *l)
{
    uint64_t until = reactor_now() + STEP_NS;
    bool more = true;

    gate_enter(&chain->gate);
    if (chain_depth(chain) > 1)
        chain_weigh(chain);
    do {
        more = l->off < layer_len(chain_top(chain)) && !is_full(chain, l);
        if (more)
            load_piece(chain, l);
    } while (more && reactor_now() < until);
    gate_leave(&chain->gate);
    return more;
}

int chain_preload(struct chain *chain, const bool *stop)
{
    struct loading l = {.evictions = chain->fmap.evictions};

    chain->stats.preloads_running++;
    while (!*stop && load_step(chain, &l)) {
        chain->stats.preloaded_bytes = l.off;
        reactor_yield(); /* guests first */
    }
    chain->stats.preloaded_bytes = l.off;
    chain->stats.preloads_running--;
    return *stop ? -ECANCELED : 0;
}
