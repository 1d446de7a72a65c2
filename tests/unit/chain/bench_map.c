/*
 * What a lookup of a mapping takes, and what a cached one costs: `meson test --benchmark`.
 * Figures of docs/qcow2.md and docs/chain.md come from here.
 */
#include <stdio.h>
#include <time.h>
#include "base/bits.h"
#include "blk/blk.h"
#include "chain/internal.h"
#include "qcow2/internal.h"
#include "rig.h"
#include "rt/sim.h"

#define LOOKUPS 4000000u

static uint64_t now_ns(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &ts); /* others may be at work */
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static uint64_t resident(void)
{
    unsigned long pages = 0;
    FILE *f = fopen("/proc/self/statm", "r");

    if (f && fscanf(f, "%*u %lu", &pages) != 1)
        pages = 0;
    if (f)
        fclose(f);
    return pages * 4096ull;
}

struct layout {
    const char *name;
    struct image_create_opts create;
    unsigned percent; /* of the clusters that have a place; 0: all, in order */
    bool bitmaps;     /* random ones */
};

/* Places in random order instead of those that preallocation gave. */
SUSPENDS static void scatter(struct image *img, struct blk *mem, const struct layout *l)
{
    const struct qcow2_header *hdr = &img->hdr;
    uint64_t nr = hdr->virtual_len / hdr->cluster_size, rng = 1;
    unsigned per = 1u << hdr->l2_bits;
    uint32_t *perm = malloc(nr * sizeof(*perm));
    char *table = malloc(hdr->cluster_size);

    for (uint64_t i = 0; i < nr; i++) {
        uint64_t j = rng_below(&rng, i + 1);

        perm[i] = perm[j];
        perm[j] = (uint32_t)i;
    }
    for (uint64_t i = 0; i < nr; i += per) {
        for (unsigned k = 0; k < per; k++) {
            /* a part of the places, as an image has them that was written in random order */
            uint64_t place = 1 + (uint64_t)perm[i + k] * l->percent / 100;
            bool has = rng_below(&rng, 100) < l->percent;
            uint32_t bits = l->bitmaps ? (uint32_t)rng_below(&rng, UINT32_MAX) + 1 : UINT32_MAX;
            struct l2_entry e = {place << hdr->cluster_bits | ENTRY_COPIED,
                                 hdr->extended_l2 ? bits : 0};

            l2_put(hdr, table, k, has ? e : (struct l2_entry){0});
        }
        CHECK_EQ(blk_write(mem, img->l1[i / per] & L1_OFFSET_MASK, table, hdr->cluster_size), 0);
    }
    free(table);
    free(perm);
}

SUSPENDS static void touch_all(struct image *img)
{
    uint64_t slice = (uint64_t)img->hdr.cluster_size << img->slice_bits;
    struct extent ext;

    for (uint64_t off = 0; off < img->hdr.virtual_len; off += slice)
        CHECK_EQ(image_map(img, off, 4096, &ext), 0);
}

SUSPENDS static void measure(const struct layout *l)
{
    struct blk *mem;
    struct image *img;
    struct image_opts opts = {.cache_bytes = 32 * MIB};
    struct extent ext;
    uint64_t rng = 7;

    CHECK_EQ(blk_mem_new(0, 512, &mem), 0);
    CHECK_EQ(image_create(mem, &l->create, NULL), 0);
    CHECK_EQ(image_open(mem, &opts, &img, NULL), 0);
    if (l->percent)
        scatter(img, mem, l);
    uint64_t before = resident();
    touch_all(img);
    uint64_t misses = img->cache.misses, rss = resident() - before;
    uint64_t start = now_ns();
    for (unsigned i = 0; i < LOOKUPS; i++)
        CHECK_EQ(
            image_map(img, rng_below(&rng, l->create.virtual_len - 4096) & ~4095ull, 4096, &ext),
            0);
    uint64_t ns = now_ns() - start;
    uint64_t entries = l->create.virtual_len / img->hdr.cluster_size;
    printf("%-36s %5.2f MiB, %5.2f bytes an entry, resident %5.2f MiB, misses %llu, then %llu, "
           "%llu ns a lookup\n",
           l->name, (double)img->cache.member.bytes / MIB,
           (double)img->cache.member.bytes / (double)entries, (double)rss / MIB,
           (unsigned long long)misses, (unsigned long long)(img->cache.misses - misses),
           (unsigned long long)(ns / LOOKUPS));
    image_close(img, NULL);
}

CO_TEST(slices)
{
    static const struct layout layouts[] = {
        {"1 TiB, in order", {.virtual_len = TIB, .prealloc = PREALLOC_METADATA}, 0, false},
        {"256 GiB, 4 million random",
         {.virtual_len = 256 * GIB, .prealloc = PREALLOC_METADATA},
         100,
         false},
        {"1 TiB, 4 million random", {.virtual_len = TIB, .prealloc = PREALLOC_METADATA}, 25, false},
        {"1 TiB, 128k extended, in order",
         {.virtual_len = TIB,
          .cluster_size = 128 * KIB,
          .extended_l2 = true,
          .prealloc = PREALLOC_METADATA},
         0,
         false},
        {"256 GiB, 128k extended, random",
         {.virtual_len = 256 * GIB,
          .cluster_size = 128 * KIB,
          .extended_l2 = true,
          .prealloc = PREALLOC_METADATA},
         100,
         false},
        {"256 GiB, the same, random bitmaps",
         {.virtual_len = 256 * GIB,
          .cluster_size = 128 * KIB,
          .extended_l2 = true,
          .prealloc = PREALLOC_METADATA},
         100,
         true},
    };

    for (unsigned i = 0; i < ARRAY_SIZE(layouts); i++)
        measure(&layouts[i]);
}

CO_TEST(packing)
{
    struct qcow2_header hdr = {.version = 3,
                               .cluster_bits = 16,
                               .cluster_size = 65536,
                               .l2_entry_size = 8,
                               .subclusters = 1,
                               .subcluster_bits = 16};
    static char table[4096];
    uint64_t rng = 3, start, ns[2] = {0}, sum = 0;

    for (unsigned i = 0; i < 512; i++)
        l2_put(&hdr, table, i,
               (struct l2_entry){(1 + rng_below(&rng, 4 << 20)) << 16 | ENTRY_COPIED, 0});
    for (unsigned n = 0; n < 20000; n++) {
        start = now_ns();
        struct packed_slice *p = pack_slice(&hdr, table, 512);
        ns[0] += now_ns() - start;
        start = now_ns();
        for (unsigned i = 0; i < 512; i++)
            sum += packed_get(p, i).word;
        ns[1] += now_ns() - start;
        free(p);
    }
    printf("packing a slice %llu ns, decoding it whole %llu ns (%llu)\n",
           (unsigned long long)ns[0] / 20000, (unsigned long long)ns[1] / 20000,
           (unsigned long long)sum % 10);
}

/* The same map, a number of layers: what a request pays to find its place. */
SUSPENDS static void measure_depth(unsigned depth)
{
    static struct layer *layers[64];
    static struct blk *mem[64];
    struct layer_opts opts = {0};
    struct chain *chain;
    struct fmap_entry e;
    uint64_t rng = 9, len = 4 * GIB;

    for (unsigned i = 0; i < depth; i++) {
        struct layout l = {.create = {.virtual_len = len, .prealloc = PREALLOC_METADATA},
                           .percent = i + 1 == depth ? 100 : 5};
        struct image *img;

        CHECK_EQ(blk_mem_new(0, 512, &mem[i]), 0);
        CHECK_EQ(image_create(mem[i], &l.create, NULL), 0);
        CHECK_EQ(image_open(rig_borrow(mem[i]), &(struct image_opts){0}, &img, NULL), 0);
        scatter(img, mem[i], &l);
        image_close(img, NULL);
        CHECK_EQ(layer_from_blk(mem[i], true, &opts, &layers[i], NULL), 0);
    }
    CHECK_EQ(chain_from_layers(layers, depth, 32 * MIB, &chain, NULL), 0);
    CHECK_EQ(chain_preload(chain, &(bool){false}), 0);
    uint64_t start = now_ns();
    for (unsigned i = 0; i < LOOKUPS; i++)
        CHECK_EQ(chain_resolve(chain, chain_top(chain), rng_below(&rng, len - 4096) & ~4095ull,
                               4096, &e),
                 0);
    uint64_t ns = now_ns() - start;
    printf("%2u layers: %llu ns a lookup, %5.2f MiB\n", depth, (unsigned long long)(ns / LOOKUPS),
           (double)chain->bound.bytes / MIB);
    CHECK_EQ(chain_close(chain, NULL), 0);
}

CO_TEST(depths)
{
    for (unsigned depth = 1; depth <= 64; depth *= 8)
        measure_depth(depth);
}

TEST(flattened)
{
    static struct fmap m;
    struct bound b;
    struct fmap_entry e;
    uint64_t rng = 5, len = 8 * GIB, nr = len / 4096;

    bound_init(&b, GIB);
    fmap_init(&m, 4096, &b);
    for (unsigned i = 0; i < 64; i++)
        CHECK_EQ(fmap_add_layer(&m, i), 0);
    uint64_t start = now_ns();
    for (uint64_t i = 0; i < nr; i++) { /* each unit once, in a scattered order */
        uint64_t off = i * 1000003 % nr * 4096;

        e = (struct fmap_entry){FMAP_DATA, (unsigned)rng_below(&rng, 64), off, 4096,
                                rng_below(&rng, TIB) & ~4095ull};
        CHECK(fmap_insert(&m, fmap_gen(&m, off), &e));
    }
    uint64_t insert = now_ns() - start;
    start = now_ns();
    for (unsigned i = 0; i < LOOKUPS; i++)
        CHECK(fmap_lookup(&m, rng_below(&rng, nr) * 4096, &e));
    uint64_t ns = now_ns() - start;
    printf(
        "64 layers scattered by 4k: %5.2f bytes an extent, %llu ns an insert, %llu ns a lookup\n",
        (double)m.member.bytes / (double)nr, (unsigned long long)(insert / nr),
        (unsigned long long)(ns / LOOKUPS));
    fmap_fini(&m);
}
