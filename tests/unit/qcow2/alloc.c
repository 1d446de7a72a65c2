/* Host space: growth of refcount structures, full devices, leaks after a kill, the file's end. */
#include "base/be.h"
#include "base/bits.h"
#include "engine.h"
#include "rt/sim.h"
#include "util.h"

CO_TEST(refcount_table_and_blocks_grow)
{
    static const unsigned bits[] = {1, 2, 4, 8, 16, 32, 64};
    struct image_opts opts = {.writable = true, .prealloc_step = UINT64_MAX};
    struct image *img;

    test_need("qemu-img");
    for (unsigned i = 0; i < ARRAY_SIZE(bits); i++) {
        struct engine e = {.opts = opts};

        t_image("grow.qcow2", &(struct image_create_opts){.virtual_len = 24 * MIB,
                                                          .cluster_size = 512,
                                                          .refcount_bits = bits[i]});
        CHECK_EQ(image_open(t_open("grow.qcow2"), &opts, &img, NULL), 0);
        e.img = img;
        for (uint64_t off = 0; off < 24 * MIB; off += MIB)
            CHECK_EQ(engine_write(&e, off, MIB, (uint8_t)(off / MIB), 0, NULL), 0);
        CHECK(bits[i] < 64 || image_header(img)->reftable_clusters > 8);
        CHECK_EQ(image_close(img, NULL), 0);
        t_qemu_check("grow.qcow2", 0, 0);
        CHECK_EQ(image_open(t_open("grow.qcow2"), &opts, &img, NULL), 0);
        e.img = img;
        for (uint64_t off = 0; off < 24 * MIB; off += MIB)
            engine_expect(&e, off, MIB, (uint8_t)(off / MIB), NULL);
        CHECK_EQ(image_close(img, NULL), 0);
    }
}

CO_TEST(a_full_volume_says_so_and_takes_what_was_freed)
{
    struct engine e = {0};
    uint64_t off = 0;
    int rc;

    engine_start(&e, &(struct image_create_opts){.virtual_len = 64 * MIB}, 8 * MIB);
    while ((rc = engine_write(&e, off, 64 * KIB, 1, 0, NULL)) == 0)
        off += 64 * KIB;
    CHECK_EQ(rc, -ENOSPC);
    CHECK(off > 7 * MIB); /* all but the metadata */
    CHECK_EQ(engine_write(&e, off, 64 * KIB, 1, 0, NULL), -ENOSPC);
    engine_expect(&e, off, 64 * KIB, 0, NULL);
    CHECK_EQ(engine_write(&e, 0, 64 * KIB, 2, 0, NULL), 0); /* in place */
    CHECK_EQ(image_discard(e.img, MIB, MIB, NULL), 0);
    for (uint64_t i = 0; i < 16; i++) /* flushes by itself to get at them */
        CHECK_EQ(engine_write(&e, 32 * MIB + i * 64 * KIB, 64 * KIB, 3, 0, NULL), 0);
    CHECK_EQ(engine_write(&e, 40 * MIB, 64 * KIB, 3, 0, NULL), -ENOSPC);
    engine_expect(&e, MIB, MIB, 0, NULL);
    engine_expect(&e, 32 * MIB, MIB, 3, NULL);
    engine_end(&e);
}

CO_TEST(a_kill_leaks_at_most)
{
    struct engine e = {0};
    uint64_t rng = test_seed();

    engine_start(&e, &(struct image_create_opts){.virtual_len = 16 * MIB, .cluster_size = 4096}, 0);
    for (unsigned k = 0; k < 20; k++) {
        for (unsigned i = 0; i < 40; i++) {
            uint64_t off = align_down(rng_below(&rng, 15 * MIB), 512);

            CHECK_EQ(engine_write(&e, off, 512 * (1 + rng_below(&rng, 40)), 1, 0, NULL), 0);
            CHECK_EQ(image_discard(e.img, off ^ 65536, 16384, NULL), 0);
        }
        if (k % 3 == 0)
            CHECK_EQ(image_flush(e.img), 0);
        engine_kill(&e);
        engine_leaks(&e);
    }
    engine_close(&e);
    blk_close(e.fault);
    blk_close(e.mem);
}

CO_TEST(the_file_grows_in_steps_and_is_trimmed_at_close)
{
    struct engine e = {.opts.prealloc_step = 4 * MIB};

    engine_start(&e, &(struct image_create_opts){.virtual_len = 64 * MIB}, 0);
    uint64_t before = e.mem->len;
    CHECK_EQ(engine_write(&e, 0, 4096, 1, 0, NULL), 0);
    CHECK(e.mem->len >= before + 4 * MIB);
    engine_close(&e);
    CHECK_EQ(e.mem->len, align_up(before, 64 * KIB) + 2 * 64 * KIB); /* L2 table, cluster */
    engine_open(&e);
    CHECK_EQ(image_discard(e.img, 0, 64 * KIB, NULL), 0);
    CHECK_EQ(engine_write(&e, MIB, 4096, 1, 0, NULL), 0);
    CHECK_EQ(image_discard(e.img, MIB, 64 * KIB, NULL), 0);
    engine_end(&e);
}

CO_TEST(refcounts_that_free_a_table_stop_the_allocator)
{
    struct engine e = {0};
    be16 zero = be16_make(0);

    engine_start(&e, &(struct image_create_opts){.virtual_len = 16 * MIB}, 0);
    CHECK_EQ(engine_write(&e, 0, 4096, 1, 0, NULL), 0);
    uint64_t l2 = (e.img->l1[0] & L1_OFFSET_MASK) >> 16, block = e.img->reftable[0];
    engine_close(&e);
    CHECK_EQ(blk_write(e.mem, block + 2 * l2, &zero, 2), 0);
    engine_open(&e);
    CHECK_EQ(engine_write(&e, MIB, 4096, 2, 0, NULL), -EUCLEAN);
    CHECK(image_is_corrupt(e.img));
    engine_expect(&e, 0, 4096, 1, NULL);
    CHECK_EQ(engine_write(&e, 0, 4096, 2, 0, NULL), -EUCLEAN);
    engine_close(&e);
    CHECK_EQ(image_open(e.fault, &e.opts, &e.img, NULL), -EUCLEAN);
    blk_close(e.fault);
    blk_close(e.mem);
}
