/* Bytes that a first-touch write moves, of all cluster sizes: no more than its (sub)clusters. */
#include "base/bits.h"
#include "engine.h"
#include "rt/sim.h"

static struct engine e;
static struct engine_below below;

struct moved {
    uint64_t read, written; /* from below, to the device */
};

SUSPENDS static struct moved write_one(uint64_t off, uint64_t len)
{
    uint64_t read = below.read_bytes, written = e.mem->stats.write_bytes;

    CHECK_EQ(engine_write(&e, off, len, 1, 0, &below.below), 0);
    return (struct moved){below.read_bytes - read, e.mem->stats.write_bytes - written};
}

/* The table and the run's refcounts are made by the first write of an area, now. */
SUSPENDS static void warm_up(const struct image_create_opts *create)
{
    uint64_t len = create->virtual_len;

    for (uint64_t off = 0; off < len; off += len / 8)
        CHECK_EQ(engine_write(&e, off, create->cluster_size, 1, 0, &below.below), 0);
}

SUSPENDS static void check_shape(const struct image_create_opts *create, uint64_t len)
{
    uint64_t unit = create->extended_l2 ? create->cluster_size / 32 : create->cluster_size;
    uint64_t rng = 5, meta = 0, reads = 0, n = 0;
    /* what a write may meet of metadata: refcounts of a new run, new tables for what it covers */
    uint64_t table = create->cluster_size * create->cluster_size / (create->extended_l2 ? 16 : 8);
    uint64_t meta_max = (4 + 2 * div_up(len, table)) * create->cluster_size + 8192;

    e = (struct engine){0};
    engine_below_init(&below);
    engine_start(&e, create, 0);
    warm_up(create);
    for (unsigned i = 0; i < 200; i++) {
        uint64_t off = align_down(rng_below(&rng, create->virtual_len - len), 512);
        uint64_t first = align_down(off, unit), end = align_up(off + len, unit);
        struct extent ext;

        CHECK_EQ(image_map(e.img, first, end - first, &ext), 0);
        if (ext.kind != EXTENT_UNALLOCATED || ext.len < end - first)
            continue; /* not a first touch */
        uint64_t tables = engine_stats(&e).refcount_writes + engine_stats(&e).l2_writes;
        uint64_t end_before = e.img->end, l2_tables = e.img->cache.tables;
        struct moved m = write_one(off, len);
        bool only_data = engine_stats(&e).refcount_writes + engine_stats(&e).l2_writes == tables &&
                         e.img->end == end_before && e.img->cache.tables == l2_tables;
        CHECK(m.read <= (is_aligned(off | len, unit) ? 0 : end - first)); /* in one go */
        CHECK(m.written <= end - first + (only_data ? 0 : meta_max));
        meta += !only_data;
        reads += m.read != 0;
        n++;
    }
    printf("  %8llu%s, %6llu bytes: %llu first touches, %llu with metadata, %llu with a copy\n",
           (unsigned long long)create->cluster_size, create->extended_l2 ? " ext" : "    ",
           (unsigned long long)len, (unsigned long long)n, (unsigned long long)meta,
           (unsigned long long)reads);
    if (8 * table >= create->virtual_len) /* else many a write makes a table */
        CHECK(meta < MAX(n / 4, 16ull));
    engine_end(&e);
}

CO_TEST(a_first_touch_moves_its_units_and_no_more)
{
    for (uint64_t cluster = 512; cluster <= 2 * MIB; cluster *= 2) {
        for (unsigned extended = 0; extended < 2; extended++) {
            struct image_create_opts create = {.virtual_len = MAX(16 * MIB, 64 * cluster),
                                               .cluster_size = cluster,
                                               .extended_l2 = extended};

            if (extended && cluster < 16 * KIB)
                continue;
            check_shape(&create, 4096);
            check_shape(&create, 512);
            check_shape(&create, 20 * KIB);
        }
    }
}

/* A whole (sub)cluster: nothing is read at all, nothing else written. */
CO_TEST(whole_units_are_not_copied)
{
    struct image_create_opts create = {
        .virtual_len = 16 * MIB, .cluster_size = 128 * KIB, .extended_l2 = true};

    e = (struct engine){0};
    engine_below_init(&below);
    engine_start(&e, &create, 0);
    warm_up(&create);
    for (uint64_t off = 9 * MIB; off < 9 * MIB + MIB / 2; off += 4096) {
        uint64_t end = e.img->end;
        struct moved m = write_one(off, 4096);

        CHECK_EQ(m.read, 0);
        CHECK(m.written == 4096 || e.img->end != end);
    }
    engine_end(&e);
}
