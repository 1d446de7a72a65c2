/* The cache of slices: memory, one load a slice, failed loads, forms. */
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

/* ---- packed ---- */

/* L2 tables as random writes leave them: `percent` of the clusters have a place, in no order. The
 * image is closed by then. */
SUSPENDS static void scatter(struct engine *e, unsigned percent, uint32_t *ret_place)
{
    const struct qcow2_header *hdr = &e->img->hdr;
    uint64_t nr = hdr->virtual_len / hdr->cluster_size, rng = test_seed();
    unsigned per = 1u << hdr->l2_bits;
    char *table = malloc(hdr->cluster_size);

    for (uint64_t i = 0; i < nr; i++) {
        uint64_t j = rng_below(&rng, i + 1);

        ret_place[i] = ret_place[j];
        ret_place[j] = (uint32_t)i + 1;
    }
    for (uint64_t i = 0; i < nr; i++) {
        if (rng_below(&rng, 100) >= percent)
            ret_place[i] = 0;
        uint64_t host = (uint64_t)ret_place[i] << hdr->cluster_bits;
        struct l2_entry entry = {host ? host | ENTRY_COPIED : 0, 0};

        l2_put(hdr, table, (unsigned)(i % per), entry);
        if (i % per == per - 1)
            CHECK_EQ(
                blk_write(e->mem, e->img->l1[i / per] & L1_OFFSET_MASK, table, hdr->cluster_size),
                0);
    }
    free(table);
}

/* A sixteenth of 1 TiB with 4 million clusters, in a sixteenth of 32 MiB. */
CO_TEST(a_fragmented_image_stays_in_memory)
{
    struct image_create_opts create = {.virtual_len = 64 * GIB, .prealloc = PREALLOC_METADATA};
    struct engine e = {0};
    uint64_t nr = create.virtual_len / 65536, rng = test_seed();
    uint32_t *place = calloc(nr, sizeof(*place));
    struct extent ext;

    engine_start(&e, &create, 0);
    scatter(&e, 25, place);
    engine_close(&e);
    e.opts = (struct image_opts){.cache_bytes = 2 * MIB};
    engine_open(&e);
    for (uint64_t off = 0; off < create.virtual_len; off += 512 * 65536)
        CHECK_EQ(image_map(e.img, off, 4096, &ext), 0);
    uint64_t cold = engine_stats(&e).cache_misses;
    for (unsigned i = 0; i < 200000; i++) {
        uint64_t at = rng_below(&rng, nr);

        CHECK_EQ(image_map(e.img, at * 65536 + 4096, 4096, &ext), 0);
        CHECK_EQ(ext.kind, place[at] ? EXTENT_DATA : EXTENT_UNALLOCATED);
        CHECK_EQ(ext.host_off, place[at] ? place[at] * 65536ull + 4096 : 0);
    }
    struct image_stats s = engine_stats(&e);
    CHECK_EQ(s.cache_misses, cold);
    CHECK(cold <= nr / 2048 + 16); /* 16 KiB of a table a read */
    CHECK(s.cache_bytes_max <= 2 * MIB);
    CHECK_EQ(image_close(e.img, NULL), 0);
    free(place);
    blk_close(e.fault);
    blk_close(e.mem);
}

CO_TEST(a_slice_written_at_random_is_packed_once_memory_is_short)
{
    struct engine e = {.opts.cache_bytes = 64 * KIB};
    uint64_t rng = test_seed();

    engine_start(&e, &(struct image_create_opts){.virtual_len = 12 * 512 * 65536ull}, 0);
    for (unsigned i = 0; i < 4500; i++)
        CHECK_EQ(engine_write(&e, rng_below(&rng, 12 * 512) * 65536, 4096, 3, 0, NULL), 0);
    CHECK_EQ(image_flush(e.img), 0);
    unsigned packed = 0, tables = 0;
    for (uint64_t key = 0; key < 12; key++) {
        const struct slice *s = cache_peek(e.img, key);

        packed += s && s->form == SLICE_PACKED && s->packed->len < 1200;
        tables += s && s->form == SLICE_TABLE;
    }
    CHECK(packed >= 8); /* down to half of the bound: tables may stay */
    CHECK(tables <= 32 * KIB / 4096);
    engine_end(&e);

    /* with plenty of room it stays as it is */
    e = (struct engine){0};
    engine_start(&e, &(struct image_create_opts){.virtual_len = 512 * 65536ull}, 0);
    for (unsigned i = 0; i < 300; i++)
        CHECK_EQ(engine_write(&e, rng_below(&rng, 512) * 65536, 4096, 3, 0, NULL), 0);
    CHECK_EQ(image_flush(e.img), 0);
    CHECK(cache_peek(e.img, 0)->form == SLICE_TABLE);
    engine_end(&e);
}

SUSPENDS static void make_fragments(struct engine *e, uint64_t len, uint64_t *rng)
{
    uint64_t unit = MAX(512ull, e->img->hdr.cluster_size / 32);

    for (unsigned i = 0; i < 400; i++) {
        uint64_t off = align_down(rng_below(rng, len - 2 * unit), unit);

        switch (rng_below(rng, 8)) {
        case 0:
            CHECK_EQ(image_zero(e->img, off, unit * 2, BLK_MAY_UNMAP, NULL), 0);
            break;
        case 1:
            CHECK_EQ(image_discard(e->img, off, MIN(len - off, e->img->hdr.cluster_size), NULL), 0);
            break;
        default:
            CHECK_EQ(engine_write(e, off, unit, 5, 0, NULL), 0);
        }
    }
    CHECK_EQ(image_flush(e->img), 0);
}

/* Small form, table, small form: no entry changes. Counts what is packed. */
SUSPENDS static unsigned turn_round(struct image *img, uint64_t key)
{
    unsigned nr = 1u << img->slice_bits;
    struct l2_entry *was = calloc(nr, sizeof(*was));
    struct slice *s;

    CHECK_EQ(cache_get(img, key, &s), 0);
    bool packed = s->form == SLICE_PACKED;
    for (unsigned i = 0; i < nr; i++)
        was[i] = slice_entry(&img->hdr, s, i);
    CHECK_EQ(cache_expand(img, s), 0);
    cache_compact(img, s);
    CHECK_EQ(s->form, SLICE_TABLE); /* the pin keeps it */
    for (unsigned i = 0; i < nr; i++)
        CHECK_EQ(l2_get(&img->hdr, s->table, i).word, was[i].word);
    cache_put(img, s);
    uint64_t limit = img->cache.bound->limit;
    img->cache.bound->limit = KIB; /* memory is short */
    cache_compact(img, s);
    img->cache.bound->limit = limit;
    CHECK(!packed || s->form == SLICE_PACKED);
    for (unsigned i = 0; i < nr; i++) {
        struct l2_entry is = slice_entry(&img->hdr, s, i);

        CHECK(is.word == was[i].word && is.bits == was[i].bits);
    }
    free(was);
    return packed;
}

CO_TEST(slices_change_their_form_and_nothing_else)
{
    static const struct {
        uint64_t cluster_size;
        bool extended_l2;
    } shapes[] = {{512, false},  {4096, false}, {65536, false}, {2 * MIB, false},
                  {16384, true}, {65536, true}, {131072, true}, {2 * MIB, true}};
    uint64_t rng = test_seed();

    for (unsigned i = 0; i < ARRAY_SIZE(shapes); i++) {
        struct engine e = {.opts.cache_bytes = 64 * KIB};
        uint64_t len = shapes[i].cluster_size * 600;
        unsigned packed = 0;

        engine_start(&e,
                     &(struct image_create_opts){.virtual_len = len,
                                                 .cluster_size = shapes[i].cluster_size,
                                                 .extended_l2 = shapes[i].extended_l2},
                     0);
        make_fragments(&e, len, &rng);
        for (unsigned round = 0; round < 2; round++) {
            for (uint64_t off = 0; off < len; off = slice_end(e.img, off))
                packed += turn_round(e.img, slice_key(e.img, off));
            make_fragments(&e, len, &rng); /* on what is packed now */
            engine_reopen(&e);
        }
        CHECK(packed > 0);
        engine_end(&e);
    }
}

CO_TEST(what_is_pinned_stays)
{
    struct image_create_opts create = {.virtual_len = 16 * GIB, .prealloc = PREALLOC_METADATA};
    struct engine e = {.opts.cache_bytes = 64 * KIB};
    uint64_t nr = create.virtual_len / 65536, slices = nr / 512;
    uint32_t *place = calloc(nr, sizeof(*place));
    struct slice *pinned[8];
    struct extent ext;

    engine_start(&e, &create, 0);
    scatter(&e, 100, place);
    engine_close(&e);
    e.opts.writable = false;
    engine_open(&e);
    for (unsigned i = 0; i < ARRAY_SIZE(pinned); i++)
        CHECK_EQ(cache_get(e.img, i * 7, &pinned[i]), 0);
    for (unsigned round = 0; round < 3; round++)
        for (uint64_t i = 0; i < slices; i++)
            CHECK_EQ(image_map(e.img, i * 512 * 65536, 4096, &ext), 0);
    struct image_stats s = engine_stats(&e);
    CHECK(s.cache_bytes_max <= 64 * KIB);
    CHECK(s.cache_misses > slices); /* it is far too small */
    for (unsigned i = 0; i < ARRAY_SIZE(pinned); i++) {
        CHECK(cache_peek(e.img, i * 7) == pinned[i]);
        CHECK_EQ(l2_host_off(slice_entry(&e.img->hdr, pinned[i], 3)),
                 (uint64_t)place[i * 7 * 512 + 3] * 65536);
        cache_put(e.img, pinned[i]);
    }
    CHECK_EQ(image_close(e.img, NULL), 0);
    free(place);
    blk_close(e.fault);
    blk_close(e.mem);
}
