/* Chains on memory: lengths, resolution, snapshots, resize; no jobs. */
#include "base/bits.h"
#include "chain/internal.h"
#include "rig.h"

#define MAX_DEVS 70u

struct stack { /* devices, top first as the chain has them */
    struct blk *dev[MAX_DEVS];
    bool qcow2[MAX_DEVS];
    unsigned nr;
};

SUSPENDS static struct blk *add_device(struct stack *s, const struct rig_shape *shape)
{
    struct blk *dev;

    CHECK(s->nr < MAX_DEVS);
    CHECK_EQ(blk_mem_new(0, 1, &dev), 0);
    rig_create(dev, shape, s->nr ? "below" : NULL, "qcow2");
    memmove(s->dev + 1, s->dev, s->nr * sizeof(*s->dev));
    memmove(s->qcow2 + 1, s->qcow2, s->nr * sizeof(*s->qcow2));
    s->dev[0] = dev;
    s->qcow2[0] = !shape->raw;
    s->nr++;
    return dev;
}

SUSPENDS static void drop_devices(struct stack *s)
{
    for (unsigned i = 0; i < s->nr; i++)
        blk_close(s->dev[i]);
}

/* Writes into the top layer through a chain of its own. */
SUSPENDS static void write_top(struct stack *s, uint64_t off, uint64_t len, uint64_t stamp)
{
    struct chain *chain = rig_chain(s->dev, s->qcow2, s->nr);

    CHECK_EQ(rig_write(chain, off, len, stamp), 0);
    CHECK_EQ(chain_close(chain, NULL), 0);
}

CO_TEST(shorter_layer_reads_zero_past_its_end)
{
    struct stack s = {0};

    add_device(&s, &(struct rig_shape){.raw = true, .len = 4 * MIB});
    write_top(&s, 0, 4 * MIB, 1);
    add_device(&s, &(struct rig_shape){.len = MIB, .cluster_size = 65536});
    add_device(&s, &(struct rig_shape){.len = 3 * MIB, .cluster_size = 4096});
    struct chain *chain = rig_chain(s.dev, s.qcow2, s.nr);
    for (unsigned round = 0; round < 3; round++) { /* the second from the map */
        rig_expect(chain, 0, MIB, 1);
        rig_expect(chain, MIB, 2 * MIB, 0);
        struct buf b = {buf_get(8192), 8192};
        CHECK_EQ(rig_read(chain, MIB - 4096, b.data, 8192), 0);
        CHECK_EQ(rig_stamp(b.data, MIB - 4096), 1);
        CHECK_EQ(rig_stamp((char *)b.data + 4096, MIB), 0);
        buf_drop(&b);
    }
    struct chain_status st;
    CHECK_EQ(chain_status(chain, NULL, 0, 3 * MIB, &st), 0);
    CHECK_EQ(st.kind, CHAIN_DATA);
    CHECK_EQ(st.depth, 2);
    CHECK_EQ(st.len, MIB);
    CHECK_EQ(chain_status(chain, NULL, MIB, 2 * MIB, &st), 0);
    CHECK_EQ(st.kind, CHAIN_ZERO);
    CHECK_EQ(st.depth, 1);
    CHECK_EQ(st.len, 2 * MIB);
    CHECK_EQ(chain_status(chain, chain_layer(chain, 1), MIB, 512, &st), -EINVAL);
    CHECK_EQ(chain_close(chain, NULL), 0);
    drop_devices(&s);
}

/* The old end in the middle of a cluster, of a slice, at 0; every kind of overlay. */
CO_TEST(growth_never_exposes_a_longer_backing_file)
{
    static const struct rig_shape shapes[] = {
        {.len = MIB, .cluster_size = 65536},
        {.len = MIB + 512, .cluster_size = 65536},
        {.len = 1049088, .cluster_size = 4096},
        {.len = MIB + 512, .cluster_size = 65536, .version = 2},
        {.len = MIB + 1536, .cluster_size = 131072, .extended_l2 = true},
        {.len = MIB, .cluster_size = 131072, .extended_l2 = true, .prealloc = PREALLOC_METADATA},
        {.len = MIB, .cluster_size = 2 * MIB},
    };

    for (unsigned i = 0; i < ARRAY_SIZE(shapes); i++) {
        struct stack s = {0};
        struct err err = {0};

        add_device(&s, &(struct rig_shape){.raw = i % 2, .len = 4 * MIB, .cluster_size = 65536});
        write_top(&s, 0, 4 * MIB, 7);
        add_device(&s, &shapes[i]);
        struct chain *chain = rig_chain(s.dev, s.qcow2, s.nr);
        rig_expect(chain, 0, shapes[i].len, 7); /* the map knows the old end now */
        if (chain_resize(chain, 3 * MIB, &err) < 0)
            test_fail(__FILE__, __LINE__, "shape %u: %s", i, err_text(&err));
        rig_expect(chain, 0, shapes[i].len, 7);
        rig_expect(chain, shapes[i].len, 3 * MIB - shapes[i].len, 0);
        CHECK_EQ(rig_write(chain, 2 * MIB + 512, 512, 9), 0);
        rig_expect(chain, 2 * MIB + 1024, MIB - 1024, 0);
        /* and back: what was cut off does not come back */
        CHECK_EQ(chain_resize(chain, MIB / 2, &err), 0);
        CHECK_EQ(chain_resize(chain, 3 * MIB, &err), 0);
        rig_expect(chain, 0, MIB / 2, 7);
        rig_expect(chain, MIB / 2, 3 * MIB - MIB / 2, 0);
        CHECK_EQ(chain_close(chain, NULL), 0);
        CHECK_EQ(rig_check(s.dev[0], "grown overlay"), 0);
        drop_devices(&s);
    }
}

CO_TEST(partial_write_at_the_end_takes_nothing_from_behind_it)
{
    struct stack s = {0};

    add_device(&s, &(struct rig_shape){.raw = true, .len = 4 * MIB});
    write_top(&s, 0, 4 * MIB, 3);
    add_device(&s, &(struct rig_shape){.len = MIB + 1024, .cluster_size = 65536});
    write_top(&s, MIB, 512, 4); /* copies the rest of the cluster */
    struct chain *chain = rig_chain(s.dev, s.qcow2, s.nr);
    CHECK_EQ(chain_resize(chain, 2 * MIB, NULL), 0);
    rig_expect(chain, MIB, 512, 4);
    rig_expect(chain, MIB + 512, 512, 3);
    rig_expect(chain, MIB + 1024, MIB - 1024, 0);
    CHECK_EQ(chain_close(chain, NULL), 0);
    drop_devices(&s);
}

CO_TEST(depth_64_reads_each_layer_and_warm_reads_walk_no_more)
{
    struct stack s = {0};
    struct chain_stats before, after;

    add_device(&s, &(struct rig_shape){.raw = true, .len = 8 * MIB});
    write_top(&s, 0, 8 * MIB, 100);
    for (unsigned i = 1; i < 64; i++) {
        add_device(&s, &(struct rig_shape){.len = 8 * MIB, .cluster_size = 4096u << i % 5});
        write_top(&s, i * 64 * KIB, 64 * KIB, 100 + i);
    }
    struct chain *chain = rig_chain(s.dev, s.qcow2, s.nr);
    CHECK_EQ(chain_depth(chain), 64);
    for (unsigned round = 0; round < 2; round++) {
        chain_get_stats(chain, &before);
        for (unsigned i = 0; i < 128; i++)
            rig_expect(chain, i * 64 * KIB, 64 * KIB, i < 64 ? 100 + i : 100);
        chain_get_stats(chain, &after);
    }
    CHECK_EQ(after.map_misses - before.map_misses, 0);
    /* the view of a layer in the middle */
    uint8_t *view = rig_view(chain, chain_layer(chain, 32));
    CHECK_EQ(rig_stamp(view + 31 * 64 * KIB, 31 * 64 * KIB), 131);
    CHECK_EQ(rig_stamp(view + 32 * 64 * KIB, 32 * 64 * KIB), 100);
    free(view);
    CHECK_EQ(chain_close(chain, NULL), 0);
    drop_devices(&s);
}

CO_TEST(push_keeps_the_map_and_the_view)
{
    struct stack s = {0};
    struct chain_stats before, after;
    struct pivot_stats ps;
    struct err err = {0};

    add_device(&s, &(struct rig_shape){.raw = true, .len = 4 * MIB});
    write_top(&s, 0, 4 * MIB, 1);
    add_device(&s, &(struct rig_shape){.len = 4 * MIB, .cluster_size = 65536});
    struct chain *chain = rig_chain(s.dev, s.qcow2, s.nr);
    CHECK_EQ(rig_write(chain, MIB, 64 * KIB, 2), 0);
    rig_expect(chain, 0, MIB, 1);
    rig_expect(chain, MIB, 64 * KIB, 2);
    struct blk *dev = add_device(&s, &(struct rig_shape){.len = 4 * MIB, .cluster_size = 65536});
    struct layer *layer = rig_open(dev, true, true, NULL);
    CHECK_EQ(chain_push(chain, layer, &ps, &err), 0);
    chain_get_stats(chain, &before);
    rig_expect(chain, 0, MIB, 1);
    rig_expect(chain, MIB, 64 * KIB, 2);
    chain_get_stats(chain, &after);
    CHECK_EQ(after.map_misses, before.map_misses);
    CHECK_EQ(rig_write(chain, MIB, 4096, 3), 0);
    rig_expect(chain, MIB, 4096, 3);
    rig_expect(chain, MIB + 4096, 60 * KIB, 2);
    uint8_t *view = rig_view(chain, chain_layer(chain, 1));
    CHECK_EQ(rig_stamp(view + MIB, MIB), 2);
    free(view);
    /* refused, and nothing changed: a shorter layer, a read-only one */
    struct blk *bad;
    CHECK_EQ(blk_mem_new(0, 1, &bad), 0);
    rig_create(bad, &(struct rig_shape){.len = MIB}, NULL, NULL);
    layer = rig_open(bad, true, true, NULL);
    CHECK_EQ(chain_push(chain, layer, NULL, &err), -EINVAL);
    CHECK_EQ(layer_close(layer, NULL), 0);
    CHECK_EQ(chain_depth(chain), 3);
    CHECK_EQ(rig_write(chain, MIB, 4096, 4), 0);
    CHECK_EQ(chain_close(chain, NULL), 0);
    blk_close(bad);
    drop_devices(&s);
}

/* A chain that was one layer deep for a while did not keep its map: nothing of it may come back. */
CO_TEST(map_is_forgotten_at_depth_one)
{
    struct stack s = {0};

    add_device(&s, &(struct rig_shape){.len = 4 * MIB, .cluster_size = 65536});
    add_device(&s, &(struct rig_shape){.len = 4 * MIB, .cluster_size = 65536});
    struct chain *chain = rig_chain(s.dev, s.qcow2, s.nr);
    CHECK_EQ(chain_zero(chain, 0, MIB, 0), 0);
    rig_expect(chain, 0, MIB, 0);
    struct layer *base = chain_layer(chain, 1);
    CHECK_EQ(chain_remove(chain, base, NULL), 0);
    CHECK_EQ(layer_close(base, NULL), 0);
    CHECK_EQ(rig_write(chain, 0, MIB, 5), 0);
    struct blk *dev = add_device(&s, &(struct rig_shape){.len = 4 * MIB, .cluster_size = 65536});
    CHECK_EQ(chain_push(chain, rig_open(dev, true, true, NULL), NULL, NULL), 0);
    rig_expect(chain, 0, MIB, 5);
    CHECK_EQ(chain_close(chain, NULL), 0);
    drop_devices(&s);
}

CO_TEST(requests_past_the_end_or_read_only_are_refused)
{
    struct stack s = {0};

    add_device(&s, &(struct rig_shape){.len = MIB, .cluster_size = 65536});
    struct chain *chain = rig_chain(s.dev, s.qcow2, s.nr);
    CHECK_EQ(rig_write(chain, MIB - 512, 1024, 1), -EINVAL);
    CHECK_EQ(chain_zero(chain, UINT64_MAX - 10, 100, 0), -EINVAL);
    CHECK_EQ(chain_close(chain, NULL), 0);
    struct layer *layer = rig_open(s.dev[0], true, false, NULL);
    CHECK_EQ(chain_from_layers(&layer, 1, 0, &chain, NULL), 0);
    CHECK_EQ(rig_write(chain, 0, 512, 1), -EROFS);
    CHECK_EQ(chain_discard(chain, 0, MIB), -EROFS);
    CHECK_EQ(chain_close(chain, NULL), 0);
    drop_devices(&s);
}

/* The n-th request of the old top fails: the push fails, and the chain is what it was. */
SUSPENDS static bool push_fails(unsigned reqs, uint64_t nth)
{
    struct stack s = {0};
    struct blk *fault[2];
    struct err err = {0};

    add_device(&s, &(struct rig_shape){.raw = true, .len = 2 * MIB});
    write_top(&s, 0, 2 * MIB, 1);
    add_device(&s, &(struct rig_shape){.len = 2 * MIB, .cluster_size = 4096});
    for (unsigned i = 0; i < 2; i++)
        CHECK_EQ(blk_fault_new(rig_borrow(s.dev[i]), &fault[i]), 0);
    struct chain *chain = rig_chain(fault, s.qcow2, 2);
    for (uint64_t off = 0; off < MIB; off += 128 * KIB)
        CHECK_EQ(rig_write(chain, off, 4096, 2), 0);
    struct blk *dev = add_device(&s, &(struct rig_shape){.len = 2 * MIB, .cluster_size = 65536});
    struct layer *layer = rig_open(dev, true, true, NULL);
    blk_fault_fail(fault[0], reqs, nth, -EIO, false);
    bool failed = chain_push(chain, layer, NULL, &err) < 0;
    blk_fault_clear(fault[0]);
    CHECK_EQ(chain_depth(chain), failed ? 2 : 3);
    for (uint64_t off = 0; off < MIB; off += 128 * KIB) {
        rig_expect(chain, off, 4096, 2);
        rig_expect(chain, off + 4096, 124 * KIB, 1);
    }
    if (failed) {
        CHECK(strlen(err_text(&err)) > 10);
        CHECK_EQ(layer_close(layer, NULL), 0);
    } else {
        CHECK_EQ(rig_write(chain, 0, 4096, 3), 0);
    }
    chain_close(chain, NULL); /* the old top may have failed for good */
    rig_check(s.dev[1], "old top");
    for (unsigned i = 0; i < 2; i++)
        blk_close(fault[i]);
    drop_devices(&s);
    return failed;
}

CO_TEST(push_that_fails_changes_nothing)
{
    static const unsigned kinds[] = {BLK_REQ_WRITE, BLK_REQ_FLUSH, BLK_REQ_ANY};

    for (unsigned k = 0; k < ARRAY_SIZE(kinds); k++) {
        uint64_t nth = 1;

        while (push_fails(kinds[k], nth))
            nth++;
        CHECK(nth > 1);
    }
}
