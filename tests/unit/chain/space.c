/* Writes of zeroes, discards that keep their place: counted in bytes that reach the file. */
#include <string.h>
#include "base/bits.h"
#include "chain/internal.h"
#include "rig.h"

#define CLUSTER 65536ull
#define LEN     (16 * MIB)

struct disk {
    struct blk *dev[2]; /* top, base */
    struct chain *chain;
    struct blk *top; /* as the chain has it */
};

SUSPENDS static void start(struct disk *d, const struct rig_shape *shape, bool below,
                           const struct space_opts *space)
{
    const struct layer_opts opts = {.writable = true, .prealloc_step = UINT64_MAX, .space = *space};
    struct layer *layers[2] = {0};
    struct err err = {0};

    for (unsigned i = 0; i < 2; i++)
        CHECK_EQ(blk_mem_new(0, 1, &d->dev[i]), 0);
    if (below) {
        struct rig_shape base = {.raw = true, .len = LEN};

        rig_create(d->dev[1], &base, NULL, NULL);
        bool raw = false;
        struct chain *chain = rig_chain(&d->dev[1], &raw, 1);
        CHECK_EQ(rig_write(chain, 0, LEN, 9), 0);
        CHECK_EQ(chain_close(chain, NULL), 0);
        layers[1] = rig_open(d->dev[1], false, false, NULL);
    }
    rig_create(d->dev[0], shape, below ? "below" : NULL, "raw");
    layers[0] = rig_open_as(d->dev[0], !shape->raw, &opts, NULL);
    CHECK_EQ(chain_from_layers(layers, below ? 2 : 1, 0, &d->chain, &err), 0);
    d->top = layer_blk(chain_layer(d->chain, 0));
}

SUSPENDS static void end(struct disk *d, bool qcow2)
{
    CHECK_EQ(chain_close(d->chain, NULL), 0);
    if (qcow2)
        CHECK_EQ(rig_check(d->dev[0], "at the end"), 0);
    blk_close(d->dev[0]);
    blk_close(d->dev[1]);
}

/* Bytes that a write of zeroes over [off, +len) brings to the file, metadata aside. */
SUSPENDS static uint64_t cost_of_zeroes(struct disk *d, uint64_t off, uint64_t len)
{
    uint64_t before = d->top->stats.write_bytes;

    CHECK_EQ(rig_write(d->chain, off, len, 0), 0);
    rig_expect(d->chain, off, len, 0);
    return d->top->stats.write_bytes - before;
}

static const struct rig_shape plain = {.len = LEN, .cluster_size = CLUSTER};
static const struct rig_shape extended = {
    .len = LEN, .cluster_size = 128 * KIB, .extended_l2 = true};
static const struct rig_shape raw_file = {.raw = true, .len = LEN};

CO_TEST(zeroes_into_an_empty_disk_take_nothing)
{
    for (enum detect_zeroes mode = DETECT_ZEROES_ON; mode <= DETECT_ZEROES_UNMAP; mode++) {
        struct space_opts space = {.detect_zeroes = mode};
        struct disk d;

        start(&d, &plain, false, &space);
        CHECK_EQ(cost_of_zeroes(&d, 0, 4 * MIB), 0);
        CHECK_EQ(cost_of_zeroes(&d, 5 * MIB + 512, 100 * KIB), 0); /* no whole units needed */
        end(&d, true);
    }
}

CO_TEST(zeroes_over_a_backing_file_are_marks)
{
    struct space_opts space = {.detect_zeroes = DETECT_ZEROES_ON};
    const struct rig_shape *shapes[] = {&plain, &extended};

    for (unsigned i = 0; i < ARRAY_SIZE(shapes); i++) {
        struct disk d;

        start(&d, shapes[i], true, &space);
        CHECK_EQ(rig_write(d.chain, 8 * MIB, CLUSTER, 1), 0); /* the tables are there */
        uint64_t allocated = 0, unit = layer_unit(chain_layer(d.chain, 0));
        CHECK_EQ(cost_of_zeroes(&d, 4 * unit, 3 * unit), 0);
        CHECK_EQ(image_allocated_bytes(layer_image(chain_layer(d.chain, 0)), &allocated), 0);
        CHECK_EQ(allocated, CLUSTER);
        rig_expect(d.chain, 0, 4 * unit, 9);
        rig_expect(d.chain, 7 * unit, unit, 9);
        end(&d, true);
    }
}

/* Off: the zeroes are data. One byte that is not zero: the same in each mode. */
CO_TEST(what_is_not_zero_is_written)
{
    struct space_opts space = {.detect_zeroes = DETECT_ZEROES_UNMAP};
    struct disk d;
    char *buf = calloc(1, CLUSTER);

    start(&d, &plain, false, &(struct space_opts){0});
    CHECK(cost_of_zeroes(&d, 0, 4 * MIB) >= 4 * MIB);
    end(&d, true);
    start(&d, &plain, false, &space);
    for (uint64_t at = 0; at < CLUSTER; at += 4095) {
        uint64_t before = d.top->stats.write_bytes;
        IOV_ITER_BUF(it, vec, buf, CLUSTER);

        buf[at] = 1;
        CHECK_EQ(chain_write(d.chain, at % 7 * CLUSTER, CLUSTER, &it, 0), 0);
        CHECK(d.top->stats.write_bytes - before >= CLUSTER);
        buf[at] = 0;
    }
    free(buf);
    end(&d, true);
}

SUSPENDS static uint64_t mapped(struct disk *d)
{
    uint64_t bytes;

    CHECK_EQ(image_allocated_bytes(layer_image(chain_layer(d->chain, 0)), &bytes), 0);
    return bytes;
}

CO_TEST(unmap_frees_what_on_leaves_its_place)
{
    for (enum detect_zeroes mode = DETECT_ZEROES_ON; mode <= DETECT_ZEROES_UNMAP; mode++) {
        struct space_opts space = {.detect_zeroes = mode};
        struct image_stats stats;
        struct disk d;

        start(&d, &plain, false, &space);
        CHECK_EQ(rig_write(d.chain, 0, 2 * MIB, 1), 0);
        CHECK_EQ(cost_of_zeroes(&d, MIB, MIB), 0);
        CHECK_EQ(mapped(&d), MIB);
        image_get_stats(layer_image(chain_layer(d.chain, 0)), &stats);
        CHECK_EQ(stats.clusters_freed, mode == DETECT_ZEROES_UNMAP ? MIB / CLUSTER : 0);
        end(&d, true);
    }
}

CO_TEST(a_raw_disk_takes_zeroes_as_such)
{
    for (enum detect_zeroes mode = DETECT_ZEROES_ON; mode <= DETECT_ZEROES_UNMAP; mode++) {
        struct space_opts space = {.detect_zeroes = mode};
        struct disk d;

        start(&d, &raw_file, false, &space);
        CHECK_EQ(rig_write(d.chain, 0, 2 * MIB, 1), 0);
        CHECK_EQ(cost_of_zeroes(&d, MIB, MIB), 0);
        CHECK_EQ(d.top->stats.zeroes, 1);
        end(&d, false);
    }
}

CO_TEST(ignored_discards_change_nothing)
{
    struct space_opts space = {.ignore_discard = true};
    const struct rig_shape *shapes[] = {&plain, &raw_file};

    for (unsigned i = 0; i < ARRAY_SIZE(shapes); i++) {
        struct disk d;

        start(&d, shapes[i], false, &space);
        CHECK_EQ(rig_write(d.chain, 0, 2 * MIB, 1), 0);
        CHECK_EQ(chain_discard(d.chain, 0, 2 * MIB), 0);
        CHECK_EQ(d.top->stats.discards, 0);
        rig_expect(d.chain, 0, 2 * MIB, 1);
        CHECK_EQ(chain_zero(d.chain, 0, 2 * MIB, BLK_MAY_UNMAP), 0);
        rig_expect(d.chain, 0, 2 * MIB, 0);
        if (layer_image(chain_layer(d.chain, 0))) {
            struct image_stats stats;

            image_get_stats(layer_image(chain_layer(d.chain, 0)), &stats);
            CHECK_EQ(stats.clusters_freed, 0);
        }
        end(&d, i == 0);
    }
}

/* ---- discards that keep their place ---- */

/* Host offset of a cluster's place, whatever the mark says. */
SUSPENDS static uint64_t place_of(struct disk *d, uint64_t off)
{
    struct extent ext;

    CHECK_EQ(image_map(layer_image(chain_layer(d->chain, 0)), off, 512, &ext), 0);
    return ext.host_valid ? ext.host_off : 0;
}

CO_TEST(a_discarded_cluster_keeps_its_place_and_gives_its_space_back)
{
    struct space_opts space = {.discard = IMAGE_DISCARD_KEEP};
    const struct rig_shape *shapes[] = {&plain, &extended};

    for (unsigned i = 0; i < 4; i++) {
        struct disk d;
        bool below = i >= 2;

        start(&d, shapes[i % 2], below, &space);
        CHECK_EQ(rig_write(d.chain, 0, 4 * MIB, 1), 0);
        uint64_t at = place_of(&d, MIB), len = d.top->len, discards = d.top->stats.discards;
        bool data;
        uint64_t n;
        CHECK_EQ(chain_discard(d.chain, MIB, MIB), 0);
        CHECK_EQ(d.top->stats.discards, discards + 1); /* one hole for a run */
        CHECK_EQ(blk_status(d.top, at, MIB, &data, &n), 0);
        CHECK(!data && n == MIB);
        CHECK_EQ(mapped(&d), 3 * MIB);
        rig_expect(d.chain, MIB, MIB, 0); /* never what is below */
        CHECK_EQ(chain_discard(d.chain, MIB, MIB), 0);
        CHECK_EQ(d.top->stats.discards, discards + 1); /* nothing to give back */
        CHECK_EQ(rig_write(d.chain, 3 * MIB / 2, 4096, 2), 0);
        CHECK_EQ(place_of(&d, 3 * MIB / 2), at + MIB / 2);
        rig_expect(d.chain, MIB, MIB / 2, 0);
        rig_expect(d.chain, 3 * MIB / 2, 4096, 2);
        rig_expect(d.chain, 3 * MIB / 2 + 4096, MIB / 2 - 4096, 0);
        CHECK_EQ(chain_zero(d.chain, 0, MIB, BLK_MAY_UNMAP), 0);
        CHECK_EQ(place_of(&d, 0), at - MIB);
        CHECK_EQ(d.top->len, len);
        end(&d, true);
    }
}

CO_TEST(an_image_of_version_2_ignores_discards_then)
{
    struct space_opts space = {.discard = IMAGE_DISCARD_KEEP};
    struct rig_shape v2 = {.len = LEN, .cluster_size = CLUSTER, .version = 2};
    struct disk d;

    start(&d, &v2, false, &space);
    CHECK_EQ(rig_write(d.chain, 0, MIB, 1), 0);
    CHECK_EQ(chain_discard(d.chain, 0, MIB), 0);
    rig_expect(d.chain, 0, MIB, 1);
    CHECK_EQ(chain_zero(d.chain, 0, MIB, BLK_MAY_UNMAP), 0);
    rig_expect(d.chain, 0, MIB, 0);
    end(&d, true);
}

/* Discards and writes in any order for long: no file longer than it may get when it is full, and
 * every cluster where it was put first. */
CO_TEST(no_rewriting_outgrows_the_measured_size)
{
    struct space_opts space = {.discard = IMAGE_DISCARD_KEEP, .detect_zeroes = DETECT_ZEROES_UNMAP};
    const struct rig_shape *shapes[] = {&plain, &extended};
    uint64_t rng = 77;

    for (unsigned i = 0; i < ARRAY_SIZE(shapes); i++) {
        struct image_create_opts create = {.virtual_len = LEN,
                                           .cluster_size = shapes[i]->cluster_size,
                                           .extended_l2 = shapes[i]->extended_l2};
        uint64_t required, full, cs = shapes[i]->cluster_size;
        struct disk d;

        CHECK_EQ(image_measure(&create, 0, &required, &full, NULL), 0);
        start(&d, shapes[i], false, &space);
        CHECK_EQ(rig_write(d.chain, 0, LEN, 1), 0);
        uint64_t first = place_of(&d, 0);
        for (unsigned n = 0; n < 4000; n++) {
            uint64_t off = rng_below(&rng, LEN / 4096) * 4096;
            uint64_t len = MIN((1 + rng_below(&rng, 64)) * 4096, LEN - off);

            if (rng_below(&rng, 2))
                CHECK_EQ(rig_write(d.chain, off, len, rng_below(&rng, 3)), 0);
            else
                CHECK_EQ(chain_discard(d.chain, off, len), 0);
            CHECK(d.top->len <= full);
            if (n % 500 == 0)
                CHECK_EQ(chain_flush(d.chain), 0);
        }
        for (uint64_t off = 0; off < LEN; off += cs)
            CHECK_EQ(place_of(&d, off), first + off);
        end(&d, true);
    }
}

TEST(words_are_qemus)
{
    struct space_opts space = {0};
    struct err err = {0};

    CHECK_EQ(space_parse_discard("keep", &space), -EINVAL);
    CHECK_EQ(space_parse_detect_zeroes("yes", &space), -EINVAL);
    CHECK_EQ(space_parse_discard("off", &space), 0);
    CHECK(space.ignore_discard);
    CHECK_EQ(space_parse_detect_zeroes("unmap", &space), 0);
    CHECK_EQ(space_check(&space, &err), -EINVAL);
    CHECK_EQ(space_parse_discard("on", &space), 0);
    CHECK_EQ(space_check(&space, &err), 0);
    CHECK_STR(space_detect_zeroes_name(&space), "unmap");
}
