/* Decoding of L2 entries: tables of words and what they mean. */
#include "qcow2/entry.h"
#include "rt/sim.h"
#include "test.h"

static struct qcow2_header header(unsigned version, unsigned cluster_bits, uint64_t incompatible)
{
    struct qcow2_header hdr = {
        .version = version, .cluster_bits = cluster_bits, .incompatible = incompatible};

    qcow2_header_derive(&hdr);
    return hdr;
}

TEST(standard_entries)
{
    static const struct {
        uint64_t word;
        enum cluster_kind v3, v2;
    } cases[] = {
        {0, CLUSTER_UNALLOCATED, CLUSTER_UNALLOCATED},
        {ENTRY_COPIED, CLUSTER_UNALLOCATED, CLUSTER_UNALLOCATED},
        {1, CLUSTER_ZERO_PLAIN, CLUSTER_INVALID},
        {ENTRY_COPIED | 1, CLUSTER_ZERO_PLAIN, CLUSTER_INVALID},
        {0x50000, CLUSTER_NORMAL, CLUSTER_NORMAL},
        {ENTRY_COPIED | 0x50000, CLUSTER_NORMAL, CLUSTER_NORMAL},
        {0x50001, CLUSTER_ZERO_ALLOC, CLUSTER_INVALID},
        {ENTRY_COPIED | 0x50001, CLUSTER_ZERO_ALLOC, CLUSTER_INVALID},
        {0x00ffffffffff0000, CLUSTER_NORMAL, CLUSTER_NORMAL},
        {0x50200, CLUSTER_INVALID, CLUSTER_INVALID},
        {0x50002, CLUSTER_INVALID, CLUSTER_INVALID},
        {0x50100, CLUSTER_INVALID, CLUSTER_INVALID},
        {1ull << 56, CLUSTER_INVALID, CLUSTER_INVALID},
        {1ull << 61 | 0x50000, CLUSTER_INVALID, CLUSTER_INVALID},
        {ENTRY_COMPRESSED, CLUSTER_COMPRESSED, CLUSTER_COMPRESSED},
        {ENTRY_COMPRESSED | 0x12345, CLUSTER_COMPRESSED, CLUSTER_COMPRESSED},
    };
    struct qcow2_header v3 = header(3, 16, 0), v2 = header(2, 16, 0);

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct l2_entry e = {cases[i].word, 0};

        CHECK_EQ(l2_kind(&v3, e, 0), cases[i].v3);
        CHECK_EQ(l2_kind(&v2, e, 0), cases[i].v2);
        CHECK_EQ(l2_run(&v3, e, 0), 1);
    }
}

TEST(external_data_file_maps_offset_zero)
{
    struct qcow2_header hdr = header(3, 16, QCOW2_INCOMPAT_DATA_FILE);

    CHECK_EQ(l2_kind(&hdr, (struct l2_entry){ENTRY_COPIED, 0}, 0), CLUSTER_NORMAL);
    CHECK_EQ(l2_kind(&hdr, (struct l2_entry){0, 0}, 0), CLUSTER_UNALLOCATED);
    CHECK_EQ(l2_kind(&hdr, (struct l2_entry){ENTRY_COMPRESSED, 0}, 0), CLUSTER_INVALID);
}

/* Every subcluster of random bitmaps against the definition, runs included. */
TEST(extended_entries)
{
    struct qcow2_header hdr = header(3, 17, QCOW2_INCOMPAT_EXTENDED_L2);
    uint64_t seed = test_seed();

    CHECK_EQ(hdr.subclusters, 32);
    CHECK_EQ(hdr.subcluster_bits, 12);
    for (unsigned round = 0; round < 2000; round++) {
        uint32_t alloc = (uint32_t)rng_next(&seed), zero = (uint32_t)rng_next(&seed);
        bool mapped = round % 3 != 0;

        zero &= ~alloc;
        if (round % 5 == 0)
            alloc &= zero << 1; /* longer runs of nothing */
        alloc &= ~zero;
        if (!mapped)
            alloc = 0;
        struct l2_entry e = l2_make_ext(mapped ? ENTRY_COPIED | 0x60000 : 0, alloc, zero);
        enum cluster_kind kinds[33] = {0};

        for (unsigned sub = 0; sub < 32; sub++) {
            kinds[sub] = alloc >> sub & 1 ? CLUSTER_NORMAL : CLUSTER_UNALLOCATED;
            if (zero >> sub & 1)
                kinds[sub] = mapped ? CLUSTER_ZERO_ALLOC : CLUSTER_ZERO_PLAIN;
            CHECK_EQ(l2_kind(&hdr, e, sub), kinds[sub]);
        }
        for (unsigned sub = 0; sub < 32; sub++) {
            unsigned run = 1;

            while (sub + run < 32 && kinds[sub + run] == kinds[sub])
                run++;
            CHECK_EQ(l2_run(&hdr, e, sub), run);
        }
    }
}

TEST(extended_entries_that_contradict_themselves)
{
    struct qcow2_header hdr = header(3, 17, QCOW2_INCOMPAT_EXTENDED_L2);

    for (unsigned sub = 0; sub < 32; sub++) {
        CHECK_EQ(l2_kind(&hdr, l2_make_ext(0x60000, 4, 4), sub), CLUSTER_INVALID);
        CHECK_EQ(l2_kind(&hdr, l2_make_ext(0, 1, 0), sub), CLUSTER_INVALID);
        CHECK_EQ(l2_kind(&hdr, l2_make_ext(0x60001, 1, 0), sub), CLUSTER_INVALID);
        CHECK_EQ(l2_kind(&hdr, l2_make_ext(0x10000, 1, 0), sub), CLUSTER_INVALID);
        CHECK_EQ(l2_kind(&hdr, l2_make_ext(ENTRY_COMPRESSED | 512, 0, 0), sub), CLUSTER_COMPRESSED);
        CHECK_EQ(l2_run(&hdr, l2_make_ext(ENTRY_COMPRESSED | 512, 0, 0), sub), 32 - sub);
    }
}

TEST(compressed_ranges)
{
    uint64_t off, len;
    struct qcow2_header hdr = header(3, 16, 0); /* 54 bits of offset, 8 of sectors */

    l2_compressed_range(&hdr, (struct l2_entry){ENTRY_COMPRESSED | 0x50000, 0}, &off, &len);
    CHECK_EQ(off, 0x50000);
    CHECK_EQ(len, 512);
    l2_compressed_range(&hdr, (struct l2_entry){ENTRY_COMPRESSED | 3ull << 54 | 0x50123, 0}, &off,
                        &len);
    CHECK_EQ(off, 0x50123);
    CHECK_EQ(len, 4 * 512 - 0x123);
    hdr = header(3, 21, 0); /* 49 bits of offset, 13 of sectors */
    l2_compressed_range(&hdr, (struct l2_entry){UINT64_MAX, 0}, &off, &len);
    CHECK_EQ(off, (1ull << 49) - 1);
    CHECK_EQ(len, 8192 * 512 - 511);
    hdr = header(3, 9, 0); /* 61 bits of offset, 1 of sectors */
    l2_compressed_range(&hdr, (struct l2_entry){ENTRY_COMPRESSED | 1ull << 61 | 1024, 0}, &off,
                        &len);
    CHECK_EQ(off, 1024);
    CHECK_EQ(len, 1024);
}

TEST(tables_keep_their_order)
{
    _Alignas(8) uint8_t table[64] = {0};
    struct qcow2_header std = header(3, 16, 0), ext = header(3, 16, QCOW2_INCOMPAT_EXTENDED_L2);

    l2_put(&std, table, 1, (struct l2_entry){0x8000000000050000, 0});
    CHECK(table[8] == 0x80 && table[13] == 0x05 && table[16] == 0);
    CHECK_EQ(l2_get(&std, table, 1).word, 0x8000000000050000);
    l2_put(&ext, table, 2, l2_make_ext(0x60000, 0x1, 0x80000000));
    CHECK(table[32 + 5] == 0x06 && table[40] == 0x80 && table[47] == 0x01);
    struct l2_entry e = l2_get(&ext, table, 2);

    CHECK_EQ(e.word, 0x60000);
    CHECK_EQ(l2_alloc_bits(e), 1);
    CHECK_EQ(l2_zero_bits(e), 0x80000000u);
}
