/* Alignment, ranges at the edges of 64 bits, masks, and integers in disk order. */
#include "base/be.h"
#include "base/bits.h"
#include "test.h"

TEST(align_rounds_to_powers_of_two)
{
    CHECK_EQ(align_down(4097, 4096), 4096);
    CHECK_EQ(align_up(4097, 4096), 8192);
    CHECK_EQ(align_up(4096, 4096), 4096);
    CHECK_EQ(align_up(0, 4096), 0);
    CHECK(align_down(UINT64_MAX, 1ull << 63) == 1ull << 63);
    CHECK(is_aligned(8192, 4096) && !is_aligned(8191, 4096) && is_aligned(0, 512));
    CHECK(is_pow2(1) && is_pow2(1ull << 63) && !is_pow2(0) && !is_pow2(12));
}

TEST(div_up_never_wraps)
{
    CHECK_EQ(div_up(0, 8), 0);
    CHECK_EQ(div_up(1, 8), 1);
    CHECK_EQ(div_up(16, 8), 2);
    CHECK(div_up(UINT64_MAX, 2) == 1ull << 63);
    CHECK(div_up(UINT64_MAX, 1) == UINT64_MAX);
}

TEST(range_ok_never_wraps)
{
    CHECK(range_ok(0, 0, 0) && range_ok(10, 0, 10) && range_ok(0, 10, 10));
    CHECK(!range_ok(11, 0, 10) && !range_ok(1, 10, 10));
    CHECK(!range_ok(UINT64_MAX, 2, UINT64_MAX) && !range_ok(2, UINT64_MAX, UINT64_MAX));
    CHECK(range_ok(1, UINT64_MAX - 1, UINT64_MAX));
}

TEST(ranges_overlap_when_they_share_a_byte)
{
    CHECK(ranges_overlap(0, 10, 9, 1) && ranges_overlap(9, 1, 0, 10));
    CHECK(!ranges_overlap(0, 10, 10, 5) && !ranges_overlap(10, 5, 0, 10));
    CHECK(ranges_overlap(5, 1, 0, 10));
}

TEST(mask32_covers_the_bits)
{
    for (unsigned first = 0; first < 32; first++) {
        for (unsigned nr = 0; first + nr <= 32; nr++) {
            uint32_t want = 0;

            for (unsigned i = first; i < first + nr; i++)
                want |= UINT32_C(1) << i;
            CHECK_EQ(mask32(first, nr), want);
        }
    }
}

TEST(hash64_has_no_collisions_among_neighbours)
{
    for (uint64_t i = 0; i < 2000; i++)
        CHECK(hash64(i) != hash64(i + 1));
}

TEST(be_integers_are_in_disk_order)
{
    be16 a = be16_make(0x0102);
    be32 b = be32_make(0x01020304);
    be64 c = be64_make(0x0102030405060708);

    CHECK(memcmp(&a, "\1\2", 2) == 0 && be16_get(a) == 0x0102);
    CHECK(memcmp(&b, "\1\2\3\4", 4) == 0 && be32_get(b) == 0x01020304);
    CHECK(memcmp(&c, "\1\2\3\4\5\6\7\x08", 8) == 0 && be64_get(c) == 0x0102030405060708);
}
