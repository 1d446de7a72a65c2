/* Images with random damage: whatever the bytes, reading and checking them ends with an answer. */
#include "base/bits.h"
#include "base/own.h"
#include "qcow2/refrebuild.h"
#include "qcow2/refscan.h"
#include "qcow2/snapshots.h"
#include "rt/sim.h"
#include "util.h"

#define ROUNDS 400

/* The file's content in memory. */
SUSPENDS static struct blk *load(const char *name)
{
    struct blk *file = t_open(name), *mem;
    _cleanup_(freep) uint8_t *buf = malloc(file->len);

    CHECK_EQ(blk_read(file, 0, buf, file->len), 0);
    CHECK_EQ(blk_mem_new(file->len, 1, &mem), 0);
    CHECK_EQ(blk_write(mem, 0, buf, file->len), 0);
    blk_close(file);
    return mem;
}

/* Words that tables and headers find hard to take, or noise. */
static uint64_t nasty(uint64_t *seed)
{
    static const uint64_t words[] = {
        0,
        1,
        UINT64_MAX,
        1ull << 63,
        1ull << 62,
        0xffffffffffff0000,
        0x7fffffffffff0000,
        0x00fffffffffffe00,
        0x8000000000001000,
        0x2000,
        0x3000,
        0xffffffff00000000,
        0x00000000ffffffff,
    };
    uint64_t n = rng_below(seed, 2 * ARRAY_SIZE(words));

    return n < ARRAY_SIZE(words) ? words[n] : rng_next(seed);
}

SUSPENDS static void damage(struct blk *blk, uint64_t *seed)
{
    for (uint64_t n = 1 + rng_below(seed, 4); n > 0; n--) {
        /* half of it in the header, the rest where tables are */
        uint64_t off = rng_below(seed, 2) ? rng_below(seed, 256) : rng_below(seed, blk->len - 8);
        unsigned bytes = 1u << rng_below(seed, 4);

        t_put(blk, off & ~(uint64_t)(bytes - 1), bytes,
              nasty(seed) & (UINT64_MAX >> (64 - 8 * bytes)));
    }
}

SUSPENDS static bool survive(struct blk *blk)
{
    struct qcow2_header hdr;
    struct qcow2_snapshots snaps;
    struct image_check res = {0};
    struct err err = {0};

    if (qcow2_header_read(blk, &hdr, &err) < 0) {
        CHECK(err.text[0]);
        return false;
    }
    if (qcow2_snapshots_read(blk, &hdr, &snaps, &err) == 0)
        qcow2_snapshots_fini(&snaps);
    CHECK_EQ(qcow2_check(blk, &hdr, &res, NULL, NULL, &err), 0);
    int rc = qcow2_rebuild_refcounts(blk, &hdr, &err);

    if (rc == 0) {
        CHECK_EQ(qcow2_check(blk, &hdr, &res, NULL, NULL, &err), 0);
        CHECK_EQ(res.corruptions + res.leaks, 0);
    }
    qcow2_header_fini(&hdr);
    return true;
}

CO_TEST(random_damage)
{
    static const char *const options[] = {"cluster_size=512", "cluster_size=4k,refcount_bits=1",
                                          "cluster_size=16k,extended_l2=on"};
    uint64_t seed = test_seed(), opened = 0;

    test_need("qemu-img");
    test_need("qemu-io");
    for (unsigned i = 0; i < ARRAY_SIZE(options); i++) {
        test_sh("qemu-img create -q -f qcow2 -o %s %s 1M && "
                "qemu-io -f qcow2 -c 'write -P 1 0 64k' -c 'write -P 2 500k 20k' %s > /dev/null",
                options[i], t_path("h.qcow2"), t_path("h.qcow2"));
        if (i != 1) /* needs refcounts above one */
            test_sh("qemu-img snapshot -c s %s && qemu-img bitmap --add -g 4096 %s b",
                    t_path("h.qcow2"), t_path("h.qcow2"));
        for (unsigned round = 0; round < ROUNDS; round++) {
            struct blk *blk = load("h.qcow2");

            damage(blk, &seed);
            opened += survive(blk);
            blk_close(blk);
        }
    }
    CHECK(opened > ROUNDS / 2);
}

/* An L1 table whose entries all name one L2 table of a large cluster. */
CO_TEST(one_table_named_many_times)
{
    struct image_create_opts o = {.virtual_len = 1ull << 50, .cluster_size = 2 * MIB};
    struct qcow2_header hdr;
    struct image_check res;
    struct blk *blk;

    CHECK_EQ(blk_mem_new(0, 1, &blk), 0);
    CHECK_EQ(image_create(blk, &o, NULL), 0);
    CHECK_EQ(qcow2_header_read(blk, &hdr, NULL), 0);
    uint64_t end = blk->len;

    CHECK_EQ(blk_resize(blk, end + 2 * MIB), 0);
    for (uint64_t i = 0; i < hdr.l1_entries; i++)
        t_put(blk, hdr.l1_off + 8 * i, 8, end);
    CHECK_EQ(qcow2_check(blk, &hdr, &res, NULL, NULL, NULL), 0);
    CHECK(res.corruptions >= hdr.l1_entries - 1);
    CHECK(blk->stats.read_bytes < 64 * MIB);
    qcow2_header_fini(&hdr);
    blk_close(blk);
}
