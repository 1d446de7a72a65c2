/* The cache of slices: memory, one load a slice, failed loads, compaction. */
#include "base/bits.h"
#include "engine.h"
#include "rt/reactor.h"
#include "rt/sim.h"

CO_TEST(a_preallocated_tebibyte_costs_a_few_mebibytes)
{
    struct image_create_opts create = {.virtual_len = TIB, .prealloc = PREALLOC_METADATA};
    struct engine e = {.opts.cache_bytes = 32 * MIB};
    uint64_t rng = test_seed(), host = 0;
    struct extent ext;

    engine_start(&e, &create, 0);
    for (uint64_t off = 0; off < TIB; off += 4 * MIB) {
        CHECK_EQ(image_map(e.img, off, 4 * MIB, &ext), 0);
        CHECK(ext.kind == EXTENT_DATA && (off == 0 || ext.host_off == host));
        host = ext.host_off + 4 * MIB;
    }
    struct image_stats cold = engine_stats(&e);
    CHECK(cold.cache_bytes_max < 8 * MIB);
    CHECK(cold.cache_misses <= TIB / (512 * MIB) + 64); /* a read of 64 KiB for each table */
    for (unsigned i = 0; i < 100000; i++)
        CHECK_EQ(image_map(e.img, align_down(rng_below(&rng, TIB), 4096), 4096, &ext), 0);
    CHECK_EQ(engine_stats(&e).cache_misses, cold.cache_misses);
    /* cached extents merge as far as they go */
    CHECK_EQ(image_map(e.img, 0, TIB, &ext), 0);
    CHECK(ext.len >= 16 * GIB);
    engine_end(&e);
}

static struct engine shared;

SUSPENDS static int map_first(void *arg)
{
    struct extent ext;

    return image_map(shared.img, 0, 4096, &ext);
}

SUSPENDS static void start_shared(void)
{
    shared = (struct engine){0};
    engine_start(&shared, &(struct image_create_opts){.virtual_len = 64 * MIB}, 0);
    CHECK_EQ(engine_write(&shared, 0, 4096, 1, 0, NULL), 0);
    CHECK_EQ(engine_write(&shared, 2 * 65536, 4096, 1, 0, NULL), 0);
    engine_reopen(&shared);
}

SUSPENDS static int map_many(unsigned nr)
{
    struct co_group group;

    co_group_init(&group);
    for (unsigned i = 0; i < nr; i++)
        CHECK_EQ(co_group_spawn(&group, map_first, NULL), 0);
    return co_group_wait(&group);
}

CO_TEST(a_slice_is_loaded_once)
{
    start_shared();
    uint64_t before = blk_fault_count(shared.fault, BLK_REQ_READ);
    CHECK_EQ(map_many(32), 0);
    CHECK_EQ(blk_fault_count(shared.fault, BLK_REQ_READ) - before, 1);
    engine_end(&shared);
}

CO_TEST(a_failed_load_fails_all_that_wait_and_is_tried_again)
{
    start_shared();
    blk_fault_fail(shared.fault, BLK_REQ_READ, 1, -EIO, false);
    CHECK_EQ(map_many(8), -EIO);
    CHECK_EQ(map_many(8), 0);
    engine_end(&shared);
}

CO_TEST(memory_stays_under_the_bound)
{
    struct engine e = {.opts.cache_bytes = 256 * KIB};
    uint64_t len = 64 * MIB, rng = test_seed();

    engine_start(&e, &(struct image_create_opts){.virtual_len = len, .cluster_size = 4096}, 0);
    for (unsigned i = 0; i < 6000; i++)
        CHECK_EQ(engine_write(&e, align_down(rng_below(&rng, len), 4096), 4096, 7, 0, NULL), 0);
    CHECK_EQ(image_flush(e.img), 0);
    struct image_stats s = engine_stats(&e);
    CHECK(s.cache_bytes_max <= 256 * KIB + 32 * KIB);
    CHECK(s.l2_writes > 100); /* it had to write back on the way */
    engine_end(&e);
}

CO_TEST(a_slice_written_in_order_becomes_a_descriptor)
{
    struct engine e = {0};
    uint64_t slice = 512 * 65536;

    engine_start(&e, &(struct image_create_opts){.virtual_len = 8 * slice}, 0);
    for (uint64_t off = 0; off < 4 * slice; off += MIB)
        CHECK_EQ(engine_write(&e, off, MIB, 3, 0, NULL), 0);
    uint64_t dirty = engine_stats(&e).cache_bytes;
    CHECK_EQ(image_flush(e.img), 0);
    CHECK(engine_stats(&e).cache_bytes + 3 * 4096 <= dirty);
    /* and a table again when it stops to be regular */
    CHECK_EQ(image_discard(e.img, 2 * slice + 5 * 65536, 65536, NULL), 0);
    engine_expect(&e, 2 * slice + 4 * 65536, 65536, 3, NULL);
    engine_expect(&e, 2 * slice + 5 * 65536, 65536, 0, NULL);
    engine_expect(&e, 2 * slice + 6 * 65536, 65536, 3, NULL);
    engine_end(&e);
}

CO_TEST(a_range_of_zeroes_costs_descriptors)
{
    struct engine_below b;
    struct engine e = {.opts.cache_bytes = 8 * MIB};

    engine_below_init(&b);
    engine_start(&e, &(struct image_create_opts){.virtual_len = 64 * GIB}, 0);
    CHECK_EQ(image_zero(e.img, 0, 64 * GIB, BLK_MAY_UNMAP, &b.below), 0);
    CHECK_EQ(image_flush(e.img), 0);
    struct image_stats s = engine_stats(&e);
    CHECK(s.cache_bytes < MIB);
    engine_expect(&e, 63 * GIB, 65536, 0, &b.below);
    CHECK_EQ(b.reads, 0);
    engine_end(&e);
}
