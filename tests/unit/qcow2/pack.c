/* Packed slices: every entry comes back, whatever the slice holds; what one takes. */
#include "base/bits.h"
#include "qcow2/format.h"
#include "qcow2/pack.h"
#include "rt/sim.h"
#include "test.h"

#define ENTRIES_MAX 512u

enum mix { /* what the entries of a slice are */
           MIX_HOLES = 1,
           MIX_ZERO_PLAIN = 2,
           MIX_ZERO_ALLOC = 4,
           MIX_DATA = 8,
           MIX_SHARED = 16, /* data that an internal snapshot has, too */
           MIX_COMPRESSED = 32,
           MIX_ALL = 63,
};
enum bitmaps { BITMAPS_FULL, BITMAPS_FEW, BITMAPS_RANDOM, BITMAPS_ZEROES, BITMAPS_NR };

struct geometry {
    struct qcow2_header hdr;
    unsigned nr; /* entries of a slice */
};

static struct geometry geometry(unsigned cluster_bits, bool extended)
{
    struct geometry g = {.hdr = {.version = 3,
                                 .cluster_bits = cluster_bits,
                                 .cluster_size = 1u << cluster_bits,
                                 .extended_l2 = extended,
                                 .l2_entry_size = extended ? 16 : 8,
                                 .subclusters = extended ? 32 : 1,
                                 .subcluster_bits = extended ? cluster_bits - 5 : cluster_bits}};

    g.nr = (unsigned)(MIN(4096u, g.hdr.cluster_size) / g.hdr.l2_entry_size);
    return g;
}

/* Of an entry that has a place, or none. */
static uint64_t random_bits(uint64_t *rng, enum bitmaps how, bool host)
{
    uint32_t alloc = host ? UINT32_MAX : 0, zero = 0;

    if (how == BITMAPS_FEW && host)
        alloc = 0xffu << 8 * rng_below(rng, 4);
    if (how >= BITMAPS_RANDOM && host)
        alloc = (uint32_t)rng_below(rng, 1ull << 32);
    if (how == BITMAPS_ZEROES)
        zero = (uint32_t)rng_below(rng, 1ull << 32) & ~alloc;
    return (uint64_t)zero << 32 | alloc;
}

static struct l2_entry random_entry(const struct geometry *g, uint64_t *rng, unsigned mix,
                                    enum bitmaps how, uint64_t clusters)
{
    uint64_t host = (1 + rng_below(rng, clusters)) << g->hdr.cluster_bits;
    bool ext = g->hdr.extended_l2;
    unsigned kind;

    do
        kind = 1u << rng_below(rng, 6);
    while (!(kind & mix));
    switch (kind) {
    case MIX_HOLES:
        return (struct l2_entry){0, ext ? random_bits(rng, how, false) : 0};
    case MIX_ZERO_PLAIN:
        return ext ? l2_make_ext(0, 0, UINT32_MAX) : (struct l2_entry){L2_ZERO_FLAG, 0};
    case MIX_ZERO_ALLOC:
        return ext ? l2_make_ext(host | ENTRY_COPIED, 0, UINT32_MAX)
                   : (struct l2_entry){host | ENTRY_COPIED | L2_ZERO_FLAG, 0};
    case MIX_COMPRESSED:
        return (struct l2_entry){ENTRY_COMPRESSED |
                                     rng_below(rng, 1ull << (g->hdr.cluster_bits - 8))
                                         << (62 - (g->hdr.cluster_bits - 8)) |
                                     (host + rng_below(rng, g->hdr.cluster_size)),
                                 0};
    case MIX_SHARED:
        return (struct l2_entry){host, ext ? random_bits(rng, how, true) : 0};
    default:
        return (struct l2_entry){host | ENTRY_COPIED, ext ? random_bits(rng, how, true) : 0};
    }
}

static void expect_same(const struct geometry *g, const struct packed_slice *p, const void *table)
{
    for (unsigned i = 0; i < g->nr; i++) {
        struct l2_entry want = l2_get(&g->hdr, table, i), got = packed_get(p, i);

        if (want.word != got.word || want.bits != got.bits)
            test_fail(__FILE__, __LINE__, "entry %u: %016llx %016llx, not %016llx %016llx", i,
                      (unsigned long long)got.word, (unsigned long long)got.bits,
                      (unsigned long long)want.word, (unsigned long long)want.bits);
    }
}

static void fill_random(const struct geometry *g, uint64_t *rng, void *table, unsigned mix,
                        enum bitmaps how, uint64_t clusters)
{
    for (unsigned i = 0; i < g->nr; i++)
        l2_put(&g->hdr, table, i, random_entry(g, rng, mix, how, clusters));
}

/* Returns how many of the slices paid. */
static unsigned pack_many(const struct geometry *g, uint64_t *rng, unsigned rounds)
{
    unsigned packed = 0;
    void *table = malloc(4096);

    for (unsigned i = 0; i < rounds; i++) {
        unsigned mix = 1 + (unsigned)rng_below(rng, MIX_ALL),
                 how = (unsigned)rng_below(rng, BITMAPS_NR);
        uint64_t clusters = 1ull << rng_below(rng, 57 - g->hdr.cluster_bits);

        if (mix & MIX_COMPRESSED) /* the descriptor has that many bits for the offset */
            clusters = MIN(clusters, 1ull << (69 - 2 * g->hdr.cluster_bits));
        fill_random(g, rng, table, mix, (enum bitmaps)how, clusters);
        struct packed_slice *p = pack_slice(&g->hdr, table, g->nr);
        if (!p)
            continue;
        CHECK(p->len <= g->nr * g->hdr.l2_entry_size * 3 / 4);
        expect_same(g, p, table);
        packed++;
        free(p);
    }
    free(table);
    return packed;
}

TEST(slices_of_all_kinds_come_back_as_they_were)
{
    uint64_t rng = test_seed();

    for (unsigned bits = 9; bits <= 21; bits++) {
        struct geometry plain = geometry(bits, false);
        CHECK(pack_many(&plain, &rng, 400) > 200);
        if (bits < 14)
            continue;
        struct geometry extended = geometry(bits, true);
        CHECK(pack_many(&extended, &rng, 400) > 200);
    }
}

static unsigned packed_len(const struct geometry *g, unsigned mix, enum bitmaps how,
                           uint64_t clusters)
{
    uint64_t rng = test_seed();
    void *table = malloc(4096);

    fill_random(g, &rng, table, mix, how, clusters);
    struct packed_slice *p = pack_slice(&g->hdr, table, g->nr);
    unsigned len = p ? p->len : UINT32_MAX;
    if (p)
        expect_same(g, p, table);
    free(p);
    free(table);
    return len;
}

TEST(a_fragment_takes_what_its_place_takes)
{
    struct geometry plain = geometry(16, false), ext = geometry(17, true);

    /* 22 bits each, and no more than 100 bytes beside */
    CHECK(packed_len(&plain, MIX_DATA, BITMAPS_FULL, 4 << 20) <= 512 * 22 / 8 + 100);
    /* three of four entries unallocated: nothing but a bit each for them */
    unsigned sparse = packed_len(&plain, MIX_DATA | MIX_HOLES, BITMAPS_FULL, 4 << 20);
    CHECK(sparse <= 290 * 22 / 8 + 200);
    CHECK(packed_len(&ext, MIX_DATA, BITMAPS_FULL, 4 << 20) <= 256 * 22 / 8 + 100);
    CHECK(packed_len(&ext, MIX_DATA, BITMAPS_FEW, 4 << 20) <= 256 * 24 / 8 + 200);
    /* bitmaps that are all different: 4 bytes more, not 8 */
    CHECK(packed_len(&ext, MIX_DATA, BITMAPS_RANDOM, 4 << 20) <= 256 * (22 + 32) / 8 + 100);
    /* zeroes and holes without a place */
    CHECK(packed_len(&plain, MIX_HOLES | MIX_ZERO_PLAIN, BITMAPS_FULL, 1) <= 150);
}

TEST(what_does_not_pay_stays_a_table)
{
    struct geometry plain = geometry(16, false), ext = geometry(17, true);

    CHECK_EQ(packed_len(&plain, MIX_COMPRESSED, BITMAPS_FULL, 1ull << 37), UINT32_MAX);
    CHECK_EQ(packed_len(&ext, MIX_DATA, BITMAPS_ZEROES, 1ull << 39), UINT32_MAX);
}
