/* One bound over the map and the slices of all layers: what stays in it; loading ahead. */
#include "base/bits.h"
#include "chain/internal.h"
#include "qcow2/internal.h"
#include "rig.h"
#include "rt/reactor.h"

#define LAYERS_MAX 48u
#define CLUSTER    65536ull

struct stack { /* top first */
    struct blk *dev[LAYERS_MAX];
    unsigned nr;
    struct chain *chain;
};

/* `percent` of the clusters have a place, in no order. */
SUSPENDS static void scatter(struct blk *dev, unsigned percent, uint64_t *rng)
{
    struct layer *layer = rig_open(dev, true, false, NULL);
    const struct image *img = layer->image;
    uint64_t nr = img->hdr.virtual_len / CLUSTER;
    unsigned per = 1u << img->hdr.l2_bits;
    char *table = malloc(CLUSTER);

    for (uint64_t i = 0; i < nr; i++) {
        uint64_t host = (1 + rng_below(rng, nr)) * CLUSTER;
        bool has = rng_below(rng, 100) < percent && meta_none_in(img, host / CLUSTER, 1);

        l2_put(&img->hdr, table, (unsigned)(i % per),
               (struct l2_entry){has ? host | ENTRY_COPIED : 0, 0});
        if (i % per == per - 1)
            CHECK_EQ(blk_write(dev, img->l1[i / per] & L1_OFFSET_MASK, table, CLUSTER), 0);
    }
    free(table);
    CHECK_EQ(layer_close(layer, NULL), 0);
}

/* The lowest layer has base_percent, each one above it over_percent of the disk. */
SUSPENDS static void stack_start(struct stack *s, unsigned nr, uint64_t len, uint64_t cache_bytes,
                                 unsigned base_percent, unsigned over_percent)
{
    struct layer *layers[LAYERS_MAX];
    uint64_t rng = test_seed();

    *s = (struct stack){.nr = nr};
    for (unsigned i = 0; i < nr; i++) {
        unsigned percent = i + 1 == nr ? base_percent : over_percent;
        struct rig_shape shape = {.len = len,
                                  .cluster_size = CLUSTER,
                                  .prealloc = percent ? PREALLOC_METADATA : PREALLOC_OFF};

        CHECK_EQ(blk_mem_new(0, 1, &s->dev[i]), 0);
        rig_create(s->dev[i], &shape, NULL, NULL);
        if (percent)
            scatter(s->dev[i], percent, &rng);
        layers[i] = rig_open(s->dev[i], true, false, NULL);
    }
    CHECK_EQ(chain_from_layers(layers, nr, cache_bytes, &s->chain, NULL), 0);
}

SUSPENDS static void stack_end(struct stack *s)
{
    fmap_check_invariants(&s->chain->fmap);
    CHECK_EQ(chain_close(s->chain, NULL), 0);
    for (unsigned i = 0; i < s->nr; i++)
        blk_close(s->dev[i]);
}

SUSPENDS static void resolve(struct stack *s, uint64_t off, struct fmap_entry *ret)
{
    gate_enter(&s->chain->gate);
    CHECK_EQ(chain_resolve(s->chain, chain_top(s->chain), off, 4096, ret), 0);
    gate_leave(&s->chain->gate);
}

/* Whatever was kept and let go, the answers are the layers' own. */
SUSPENDS static void expect_right(struct stack *s)
{
    struct fmap_entry e;
    struct extent ext = {0};

    for (uint64_t off = 0; off < chain_len(s->chain); off += 63 * CLUSTER) {
        struct layer *l = chain_top(s->chain);

        resolve(s, off, &e);
        do
            CHECK_EQ(image_map(l->image, off, 4096, &ext), 0);
        while (ext.kind == EXTENT_UNALLOCATED && (l = l->lower));
        CHECK_EQ(e.kind, l ? FMAP_DATA : FMAP_HOLE);
        CHECK_EQ(e.host_off, ext.host_off);
        CHECK(!l || e.slot == l->slot);
    }
}

SUSPENDS static void resolve_all(struct stack *s)
{
    struct fmap_entry e;

    for (uint64_t off = 0; off < chain_len(s->chain); off += CLUSTER)
        resolve(s, off, &e);
}

SUSPENDS static void resolve_some(struct stack *s, unsigned nr, uint64_t seed)
{
    uint64_t rng = test_seed() + seed;
    struct fmap_entry e;

    for (unsigned i = 0; i < nr; i++)
        resolve(s, rng_below(&rng, chain_len(s->chain) / CLUSTER) * CLUSTER, &e);
}

static struct chain_stats stats(const struct stack *s)
{
    struct chain_stats st;

    chain_get_stats(s->chain, &st);
    return st;
}

/* Half a million random clusters in the base: packed 1.4 MiB, in the map 6 MiB. */
CO_TEST(the_map_gives_way_where_all_slices_fit)
{
    struct stack s;

    stack_start(&s, 2, 32 * GIB, 3 * MIB, 100, 0);
    resolve_all(&s);
    struct chain_stats cold = stats(&s);
    resolve_some(&s, 100000, 1);
    struct chain_stats warm = stats(&s);
    CHECK_EQ(warm.cache_misses, cold.cache_misses); /* no I/O */
    CHECK(warm.map_misses > cold.map_misses);
    CHECK(warm.cache_bytes_max <= 3 * MIB);
    CHECK(warm.cache_evictions > 0);
    stack_end(&s);
}

/* 48 layers with slices of 2 MiB altogether; the map takes less than half of it. */
CO_TEST(lower_slices_go_where_they_do_not_fit)
{
    struct stack s;

    stack_start(&s, LAYERS_MAX, 4 * GIB, 1536 * KIB, 5, 5);
    resolve_all(&s);
    resolve_some(&s, 100000, 1);
    struct chain_stats before = stats(&s);
    resolve_some(&s, 100000, 2);
    struct chain_stats after = stats(&s);
    CHECK_EQ(after.map_misses, before.map_misses);
    CHECK_EQ(after.cache_misses, before.cache_misses);
    CHECK(after.cache_bytes_max <= 1536 * KIB);
    stack_end(&s);
}

CO_TEST(the_bound_holds_when_nothing_fits)
{
    static const unsigned depths[] = {1, 2, 8, 48};

    for (unsigned i = 0; i < ARRAY_SIZE(depths); i++) {
        struct stack s;

        stack_start(&s, depths[i], 8 * GIB, 256 * KIB, 50, 30);
        resolve_some(&s, 5000, 1);
        struct chain_stats st = stats(&s);
        CHECK_EQ(st.cache_limit, 256 * KIB);
        CHECK(st.cache_bytes_max <= 256 * KIB + 16 * KIB);
        CHECK(st.cache_evictions > 0 || depths[i] == 1);
        expect_right(&s);
        stack_end(&s);
    }
}

/* ---- loading ahead ---- */

CO_TEST(nothing_is_missed_after_loading_ahead)
{
    static const unsigned depths[] = {1, 2, 3, 20};

    for (unsigned i = 0; i < ARRAY_SIZE(depths); i++) {
        struct stack s;
        bool stop = false;

        stack_start(&s, depths[i], 4 * GIB, 8 * MIB, 60, 20);
        CHECK_EQ(chain_preload(s.chain, &stop), 0);
        struct chain_stats before = stats(&s);
        CHECK_EQ(before.preloaded_bytes, 4 * GIB);
        CHECK_EQ(before.preloads_running, 0);
        CHECK(before.cache_misses > 0);
        resolve_some(&s, 50000, 1);
        struct chain_stats after = stats(&s);
        CHECK_EQ(after.cache_misses, before.cache_misses);
        CHECK(depths[i] == 1 || after.map_misses == before.map_misses);
        expect_right(&s);
        stack_end(&s);
    }
}

CO_TEST(loading_ahead_ends_where_the_bound_is_full)
{
    struct stack s;
    bool stop = false;

    stack_start(&s, 1, 16 * GIB, 256 * KIB, 100, 0);
    CHECK_EQ(chain_preload(s.chain, &stop), 0);
    struct chain_stats st = stats(&s);
    CHECK(st.preloaded_bytes > GIB && st.preloaded_bytes < 16 * GIB);
    CHECK(st.cache_bytes_max <= 256 * KIB);
    CHECK_EQ(st.cache_evictions, 0);
    /* the rest is loaded as it is asked for; in many layers it never gets round either */
    stack_end(&s);
    stack_start(&s, 24, 16 * GIB, 512 * KIB, 20, 20);
    CHECK_EQ(chain_preload(s.chain, &stop), 0);
    st = stats(&s);
    CHECK(st.preloaded_bytes > 0 && st.preloaded_bytes < 16 * GIB);
    CHECK(st.cache_bytes_max <= 512 * KIB + 16 * KIB);
    stack_end(&s);
}

struct loading {
    struct chain *chain;
    bool stop, is_waiting, pushed;
    int rc;
};

/* In the middle of a walk. */
SUSPENDS static void wait_for_push(void *arg)
{
    struct loading *l = arg;

    l->is_waiting = true;
    while (!l->pushed)
        reactor_yield();
}

SUSPENDS static int load_main(void *arg)
{
    struct loading *l = arg;

    l->rc = chain_preload(l->chain, &l->stop);
    return 0;
}

CO_TEST(loading_ahead_goes_on_beside_requests_and_a_push)
{
    struct rig_shape shape = {.len = 8 * GIB, .cluster_size = 4096};
    struct stack s = {.nr = 3};
    struct loading loading = {0};
    struct co_group group;
    bool qcow2[3] = {true, true, true};

    for (unsigned i = 0; i < 3; i++) {
        CHECK_EQ(blk_mem_new(0, 1, &s.dev[i]), 0);
        rig_create(s.dev[i], &shape, NULL, NULL);
    }
    loading.chain = s.chain = rig_chain(s.dev + 1, qcow2, 2);
    CHECK_EQ(rig_write(s.chain, 0, 64 * KIB, 1), 0);
    CHECK_EQ(rig_write(s.chain, 5 * GIB, 64 * KIB, 2), 0);
    co_group_init(&group);
    chain_set_walk_hook(s.chain, wait_for_push, &loading);
    CHECK_EQ(co_group_spawn(&group, load_main, &loading), 0);
    while (!loading.is_waiting)
        reactor_yield();
    CHECK_EQ(stats(&s).preloads_running, 1);
    loading.pushed = true;
    CHECK_EQ(chain_push(s.chain, rig_open(s.dev[0], true, true, NULL), NULL, NULL), 0);
    CHECK_EQ(rig_write(s.chain, 5 * GIB, 4 * KIB, 3), 0);
    CHECK_EQ(co_group_wait(&group), 0);
    CHECK_EQ(loading.rc, 0);
    CHECK_EQ(stats(&s).preloaded_bytes, 8 * GIB);
    rig_expect(s.chain, 0, 64 * KIB, 1);
    rig_expect(s.chain, 5 * GIB, 4 * KIB, 3);
    rig_expect(s.chain, 5 * GIB + 4 * KIB, 60 * KIB, 2);
    /* and it can be ended */
    chain_set_walk_hook(s.chain, NULL, NULL);
    loading.stop = true;
    CHECK_EQ(co_group_spawn(&group, load_main, &loading), 0);
    CHECK_EQ(co_group_wait(&group), 0);
    CHECK_EQ(loading.rc, -ECANCELED);
    stack_end(&s);
}
