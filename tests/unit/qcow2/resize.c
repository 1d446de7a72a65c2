/* Growing over a longer backing file, shrinking, a larger L1 table, backing names. */
#include "base/bits.h"
#include "engine.h"

SUSPENDS static void grow_over_below(const struct image_create_opts *create, uint64_t to)
{
    struct engine_below b;
    struct engine e = {0};
    uint64_t old = create->virtual_len;

    engine_below_init(&b);
    engine_start(&e, create, 0);
    CHECK_EQ(engine_write(&e, old - 1024, 512, 1, 0, &b.below), 0);
    CHECK_EQ(image_resize(e.img, to, &b.below, NULL), 0);
    CHECK_EQ(image_len(e.img), to);
    engine_expect(&e, 0, old - 1024, 0xbb, &b.below);
    engine_expect(&e, old - 1024, 512, 1, &b.below);
    engine_expect(&e, old - 512, 512, 0xbb, &b.below);
    engine_expect(&e, old, to - old, 0, &b.below);
    engine_reopen(&e);
    engine_expect(&e, old, to - old, 0, &b.below);
    engine_end(&e);
}

CO_TEST(new_space_never_shows_a_longer_backing_file)
{
    grow_over_below(&(struct image_create_opts){.virtual_len = MIB}, 3 * MIB);
    grow_over_below(&(struct image_create_opts){.virtual_len = MIB + 512}, 3 * MIB + 1024);
    grow_over_below(&(struct image_create_opts){.virtual_len = MIB + 512, .extended_l2 = true},
                    3 * MIB);
    grow_over_below(&(struct image_create_opts){.virtual_len = MIB + 512, .version = 2}, 2 * MIB);
    grow_over_below(&(struct image_create_opts){.virtual_len = 64 * KIB + 512, .cluster_size = 512},
                    2 * MIB);
}

CO_TEST(shrinking_and_growing_again_gives_zeroes)
{
    struct engine e = {0};

    engine_start(&e, &(struct image_create_opts){.virtual_len = 4 * MIB}, 0);
    CHECK_EQ(engine_write(&e, 0, 4 * MIB, 9, 0, NULL), 0);
    CHECK_EQ(image_resize(e.img, MIB + 512, NULL, NULL), 0);
    CHECK_EQ(engine_write(&e, MIB, 1024, 1, 0, NULL), -EINVAL);
    engine_reopen(&e);
    CHECK_EQ(image_len(e.img), MIB + 512);
    CHECK_EQ(image_resize(e.img, 4 * MIB, NULL, NULL), 0);
    engine_expect(&e, 0, MIB + 512, 9, NULL);
    engine_expect(&e, MIB + 512, 3 * MIB - 512, 0, NULL);
    CHECK_EQ(image_resize(e.img, 1000, NULL, NULL), -EINVAL);
    engine_end(&e);
}

CO_TEST(the_l1_table_grows)
{
    struct engine e = {0};

    engine_start(&e, &(struct image_create_opts){.virtual_len = 64 * KIB, .cluster_size = 512}, 0);
    for (uint64_t len = 128 * KIB; len <= 16 * MIB; len *= 2) {
        CHECK_EQ(engine_write(&e, image_len(e.img) - 4096, 4096, 5, 0, NULL), 0);
        CHECK_EQ(image_resize(e.img, len, NULL, NULL), 0);
    }
    for (uint64_t len = 64 * KIB; len < 16 * MIB; len *= 2)
        engine_expect(&e, len - 4096, 4096, 5, NULL);
    engine_reopen(&e);
    for (uint64_t len = 64 * KIB; len < 16 * MIB; len *= 2)
        engine_expect(&e, len - 4096, 4096, 5, NULL);
    CHECK_EQ(image_resize(e.img, 1ull << 50, NULL, NULL), -EFBIG);
    engine_end(&e);
}

CO_TEST(the_backing_name_changes)
{
    struct engine e = {0};

    engine_start(&e,
                 &(struct image_create_opts){
                     .virtual_len = MIB, .backing_name = "a", .backing_format = "raw"},
                 0);
    CHECK_EQ(image_set_backing(e.img, "some-longer-name.qcow2", "qcow2", NULL), 0);
    engine_reopen(&e);
    CHECK_STR(image_header(e.img)->backing_name, "some-longer-name.qcow2");
    CHECK_STR(image_header(e.img)->backing_format, "qcow2");
    CHECK_EQ(image_set_backing(e.img, NULL, NULL, NULL), 0);
    engine_reopen(&e);
    CHECK(image_header(e.img)->backing_name == NULL);
    engine_end(&e);
}

CO_TEST(reopened_read_only_and_back)
{
    struct engine e = {0};

    engine_start(&e, &(struct image_create_opts){.virtual_len = MIB}, 0);
    CHECK_EQ(engine_write(&e, 0, 4096, 5, 0, NULL), 0);
    CHECK_EQ(image_reopen(e.img, false, NULL), 0);
    CHECK_EQ(engine_leaks(&e), 0); /* as after a close */
    CHECK_EQ(engine_write(&e, 0, 4096, 6, 0, NULL), -EROFS);
    CHECK_EQ(image_discard(e.img, 0, 65536, NULL), -EROFS);
    engine_expect(&e, 0, 4096, 5, NULL);
    CHECK_EQ(image_reopen(e.img, true, NULL), 0);
    CHECK_EQ(engine_write(&e, 65536, 4096, 6, 0, NULL), 0);
    uint64_t bytes;
    CHECK_EQ(image_allocated_bytes(e.img, &bytes), 0);
    CHECK_EQ(bytes, 2 * 65536);
    engine_end(&e);
}
