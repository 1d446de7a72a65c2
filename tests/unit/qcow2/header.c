/* Header: every field out of its bounds, what must be kept, names that just fit. */
#include <stddef.h>
#include "base/be.h"
#include "base/own.h"
#include "qcow2/format.h"
#include "qcow2/snapshots.h"
#include "util.h"

#define FIELD(name) offsetof(struct qcow2_disk_header, name)

SUSPENDS static struct blk *fresh_image(const struct image_create_opts *opts)
{
    struct blk *blk;
    struct err err = {0};

    CHECK_EQ(blk_mem_new(16 << 20, 1, &blk), 0);
    if (image_create(blk, opts, &err) < 0)
        test_fail(__FILE__, __LINE__, "create: %s", err_text(&err));
    return blk;
}

CO_TEST(bad_fields_are_refused)
{
    static const struct {
        size_t off;
        unsigned bytes;
        uint64_t value;
        int rc;
    } cases[] = {
        {FIELD(magic), 4, 0x514649fa, -EINVAL},
        {FIELD(version), 4, 1, -ENOTSUP},
        {FIELD(version), 4, 4, -ENOTSUP},
        {FIELD(backing_off), 8, 64, -EINVAL},    /* inside the header */
        {FIELD(backing_off), 8, 65536, -EINVAL}, /* behind the cluster */
        {FIELD(backing_off), 8, 65530, -EINVAL}, /* its end is */
        {FIELD(backing_off), 8, UINT64_MAX, -EINVAL},
        {FIELD(cluster_bits), 4, 8, -EINVAL},
        {FIELD(cluster_bits), 4, 22, -EINVAL},
        {FIELD(cluster_bits), 4, UINT32_MAX, -EINVAL},
        {FIELD(size), 8, UINT64_MAX, -EINVAL},
        {FIELD(size), 8, 1ull << 62, -EINVAL},
        {FIELD(size), 8, 1ull << 40, -EUCLEAN}, /* more than the L1 table maps */
        {FIELD(crypt_method), 4, 3, -ENOTSUP},
        {FIELD(l1_size), 4, 0, -EUCLEAN},
        {FIELD(l1_size), 4, UINT32_MAX, -EINVAL},
        {FIELD(l1_size), 4, 0x7fffffff, -EINVAL},
        {FIELD(l1_size), 4, (32 << 20) / 8 + 1, -EINVAL},
        {FIELD(l1_off), 8, 0x1234567890abcdef, -EINVAL},
        {FIELD(l1_off), 8, 0x7fffffffffff0000, -EINVAL},
        {FIELD(reftable_off), 8, 0x1234567890abcdef, -EINVAL},
        {FIELD(reftable_off), 8, 0xffffffffffff0000, -EINVAL},
        {FIELD(reftable_clusters), 4, UINT32_MAX, -EINVAL},
        {FIELD(reftable_clusters), 4, 0x20001, -EINVAL},
        {FIELD(nb_snapshots), 4, UINT32_MAX, -EINVAL},
        {FIELD(nb_snapshots), 4, 65537, -EINVAL},
        {FIELD(incompatible), 8, 1ull << 5, -ENOTSUP},
        {FIELD(incompatible), 8, 1ull << 63, -ENOTSUP},
        {FIELD(incompatible), 8, QCOW2_INCOMPAT_COMPRESSION, -EUCLEAN},
        {FIELD(refcount_order), 4, 7, -EINVAL},
        {FIELD(refcount_order), 4, UINT32_MAX, -EINVAL},
        {FIELD(header_len), 4, 96, -EINVAL},
        {FIELD(header_len), 4, 108, -EINVAL},
        {FIELD(header_len), 4, 65544, -EINVAL},
        {FIELD(header_len), 4, UINT32_MAX, -EINVAL},
        {FIELD(compression), 1, 1, -EUCLEAN},
    };
    struct image_create_opts opts = {.virtual_len = 64 << 20, .backing_name = "base.qcow2"};

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct blk *blk = fresh_image(&opts);
        struct qcow2_header hdr;
        struct err err = {0};

        t_put(blk, cases[i].off, cases[i].bytes, cases[i].value);
        int rc = qcow2_header_read(blk, &hdr, &err);

        if (rc != cases[i].rc || !err.text[0])
            test_fail(__FILE__, __LINE__, "case %zu: %d, expected %d (%s)", i, rc, cases[i].rc,
                      err_text(&err));
        blk_close(blk);
    }
}

CO_TEST(bad_snapshot_table_places)
{
    struct image_create_opts opts = {.virtual_len = 64 << 20};
    static const uint64_t offs[] = {0x1234567890abcdef, 0xffffffffffff0000};

    for (unsigned i = 0; i < 2; i++) {
        struct blk *blk = fresh_image(&opts);
        struct qcow2_header hdr;

        t_put(blk, FIELD(nb_snapshots), 4, 1);
        t_put(blk, FIELD(snapshots_off), 8, offs[i]);
        CHECK_EQ(qcow2_header_read(blk, &hdr, NULL), -EINVAL);
        blk_close(blk);
    }
}

CO_TEST(extended_l2_needs_large_clusters)
{
    struct image_create_opts opts = {.virtual_len = 1 << 20, .cluster_size = 8192};
    struct blk *blk = fresh_image(&opts);
    struct qcow2_header hdr;

    t_put(blk, FIELD(incompatible), 8, QCOW2_INCOMPAT_EXTENDED_L2);
    CHECK_EQ(qcow2_header_read(blk, &hdr, NULL), -EINVAL);
    blk_close(blk);
}

CO_TEST(short_files)
{
    struct image_create_opts opts = {.virtual_len = 1 << 20};
    static const size_t lens[] = {0, 3, 71, 72, 103};

    for (size_t i = 0; i < sizeof(lens) / sizeof(lens[0]); i++) {
        struct blk *blk = fresh_image(&opts), *cut;
        uint8_t bytes[112];
        struct qcow2_header hdr;

        CHECK_EQ(blk_read(blk, 0, bytes, sizeof(bytes)), 0);
        CHECK_EQ(blk_mem_new(lens[i], 1, &cut), 0);
        if (lens[i])
            CHECK_EQ(blk_write(cut, 0, bytes, lens[i]), 0);
        CHECK_EQ(qcow2_header_read(cut, &hdr, NULL), -EINVAL);
        blk_close(cut);
        blk_close(blk);
    }
}

SUSPENDS static void put_ext(struct blk *blk, uint64_t off, uint32_t magic, uint32_t len)
{
    t_put(blk, off, 4, magic);
    t_put(blk, off + 4, 4, len);
}

CO_TEST(bad_extensions_are_refused)
{
    static const struct {
        uint32_t magic, len, second, len2;
    } cases[] = {
        {0x12345678, UINT32_MAX, 0, 0},
        {0x12345678, 65536, 0, 0},
        {0x12345678, 65536 - 112 - 8 + 1, 0, 0},
        {QCOW2_EXT_BACKING_FORMAT, 8, QCOW2_EXT_BACKING_FORMAT, 8},
        {QCOW2_EXT_DATA_FILE, 8, QCOW2_EXT_DATA_FILE, 8},
        {QCOW2_EXT_BITMAPS, 8, QCOW2_EXT_BITMAPS, 8},
    };
    struct image_create_opts opts = {.virtual_len = 1 << 20};

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct blk *blk = fresh_image(&opts);
        struct qcow2_header hdr;

        put_ext(blk, 112, cases[i].magic, cases[i].len);
        put_ext(blk, 128, cases[i].second, cases[i].len2);
        t_put(blk, 136, 8, 0x6161616161616161);
        put_ext(blk, 144, 0, 0);
        CHECK_EQ(qcow2_header_read(blk, &hdr, NULL), -EINVAL);
        blk_close(blk);
    }
}

CO_TEST(unknown_features_are_named)
{
    struct image_create_opts opts = {.virtual_len = 1 << 20};
    struct blk *blk = fresh_image(&opts);
    struct qcow2_header hdr;
    struct err err = {0};
    static const struct qcow2_disk_feature name = {0, 40, "time travel\n"};

    put_ext(blk, 112, QCOW2_EXT_FEATURE_NAMES, sizeof(name));
    CHECK_EQ(blk_write(blk, 120, &name, sizeof(name)), 0);
    put_ext(blk, 120 + sizeof(name), 0, 0);
    t_put(blk, FIELD(incompatible), 8, 1ull << 40 | 1ull << 41);
    CHECK_EQ(qcow2_header_read(blk, &hdr, &err), -ENOTSUP);
    CHECK(strstr(err_text(&err), "time travel?"));
    CHECK(strstr(err_text(&err), "bit 41"));
    blk_close(blk);
}

CO_TEST(what_is_not_understood_is_kept)
{
    struct image_create_opts opts = {
        .virtual_len = 1 << 20, .backing_name = "b", .backing_format = "raw"};
    struct blk *blk = fresh_image(&opts);
    struct qcow2_header hdr, again;

    CHECK_EQ(qcow2_header_read(blk, &hdr, NULL), 0);
    hdr.compatible |= 1ull << 50;
    hdr.autoclear |= 1ull << 51;
    hdr.header_len = 128;
    hdr.unknown_fields = malloc(16);
    memcpy(hdr.unknown_fields, "0123456789abcdef", 16);
    hdr.exts = calloc(2, sizeof(*hdr.exts));
    hdr.nb_exts = 2;
    hdr.exts[0] = (struct qcow2_ext){0xaabbccdd, 5, (uint8_t *)strdup("hello")};
    hdr.exts[1] = (struct qcow2_ext){0xaabbccee, 0, malloc(1)};
    free(hdr.backing_name);
    hdr.backing_name = malloc(QCOW2_BACKING_NAME_MAX + 1);
    memset(hdr.backing_name, 'n', QCOW2_BACKING_NAME_MAX);
    hdr.backing_name[QCOW2_BACKING_NAME_MAX] = '\0';
    CHECK_EQ(qcow2_header_write(blk, &hdr, NULL), 0);
    CHECK_EQ(qcow2_header_read(blk, &again, NULL), 0);
    CHECK_EQ(again.compatible, hdr.compatible);
    CHECK_EQ(again.autoclear, hdr.autoclear);
    CHECK_EQ(again.header_len, 128);
    CHECK(memcmp(again.unknown_fields, "0123456789abcdef", 16) == 0);
    CHECK_EQ(again.nb_exts, 2);
    CHECK_EQ(again.exts[0].magic, 0xaabbccdd);
    CHECK_EQ(again.exts[0].len, 5);
    CHECK(memcmp(again.exts[0].data, "hello", 5) == 0);
    CHECK_EQ(again.exts[1].len, 0);
    CHECK_STR(again.backing_name, hdr.backing_name);
    CHECK_STR(again.backing_format, "raw");
    CHECK(qcow2_header_ext(&again, 0xaabbccee) == &again.exts[1]);
    CHECK(!qcow2_header_ext(&again, 0xaabbccff));
    qcow2_header_fini(&hdr);
    qcow2_header_fini(&again);
    blk_close(blk);
}

/* Extensions that go on behind the first 4 KiB, in a large header cluster. */
CO_TEST(long_extensions)
{
    struct image_create_opts opts = {.virtual_len = 1 << 20, .cluster_size = 2 << 20};
    struct blk *blk = fresh_image(&opts);
    struct qcow2_header hdr, again;
    size_t len = 1500000;

    CHECK_EQ(qcow2_header_read(blk, &hdr, NULL), 0);
    hdr.exts = calloc(1, sizeof(*hdr.exts));
    hdr.nb_exts = 1;
    hdr.exts[0] = (struct qcow2_ext){0xaabbccdd, (uint32_t)len, malloc(len)};
    memset(hdr.exts[0].data, 0x5a, len);
    CHECK_EQ(qcow2_header_write(blk, &hdr, NULL), 0);
    CHECK_EQ(qcow2_header_read(blk, &again, NULL), 0);
    CHECK_EQ(again.exts[0].len, len);
    CHECK(memcmp(again.exts[0].data, hdr.exts[0].data, len) == 0);
    qcow2_header_fini(&again);
    hdr.exts[0].data = realloc(hdr.exts[0].data, 2 << 20);
    hdr.exts[0].len = 2 << 20;
    CHECK_EQ(qcow2_header_write(blk, &hdr, NULL), -ENOSPC);
    qcow2_header_fini(&hdr);
    blk_close(blk);
}

/* 512 bytes: the feature names give way to the backing file's name, until nothing fits. */
CO_TEST(names_in_the_smallest_cluster)
{
    char name[600];

    for (size_t len = 1; len < 520; len++) {
        memset(name, 'x', len);
        name[len] = '\0';
        struct image_create_opts opts = {.virtual_len = 65536,
                                         .cluster_size = 512,
                                         .backing_name = name,
                                         .backing_format = "qcow2"};
        bool fits = 112 + 16 + 8 + len <= 512;

        CHECK_EQ(image_create_check(&opts, NULL), fits ? 0 : -EINVAL);
        if (!fits)
            continue;
        struct blk *blk = fresh_image(&opts);
        struct qcow2_header hdr;

        CHECK_EQ(qcow2_header_read(blk, &hdr, NULL), 0);
        CHECK_STR(hdr.backing_name, name);
        qcow2_header_fini(&hdr);
        blk_close(blk);
    }
}

/* Power goes while the backing name is changed: the old name or the new one, and a sound header. */
SUSPENDS static void change_name_under_cuts(struct blk *blk, const char *old, const char *new)
{
    struct qcow2_header hdr;

    CHECK_EQ(qcow2_header_read(blk, &hdr, NULL), 0);
    CHECK_STR(hdr.backing_name, old);
    CHECK_EQ(blk_flush(blk), 0);
    free(hdr.backing_name);
    hdr.backing_name = strdup(new);
    CHECK_EQ(qcow2_header_write(blk, &hdr, NULL), 0);
    for (uint64_t seed = 1; seed < 40; seed++) {
        struct blk_crash_report report;
        struct qcow2_header after;
        struct blk *cut;

        CHECK_EQ(blk_crash_cut(blk, seed, &cut, &report), 0);
        CHECK_EQ(qcow2_header_read(cut, &after, NULL), 0);
        CHECK(strcmp(after.backing_name, old) == 0 || strcmp(after.backing_name, new) == 0);
        CHECK_STR(after.backing_format, "qcow2");
        qcow2_header_fini(&after);
        blk_close(cut);
    }
    qcow2_header_fini(&hdr);
}

CO_TEST(a_power_cut_leaves_one_of_two_names)
{
    static const size_t lens[] = {10, 600, 601, 1023, 1000, 5, 1022, 700, 690};
    static char names[ARRAY_SIZE(lens)][1024];

    for (unsigned i = 0; i < ARRAY_SIZE(lens); i++) {
        memset(names[i], 'a' + (int)i, lens[i]);
        names[i][lens[i]] = '\0';
    }
    struct image_create_opts opts = {.virtual_len = 1 << 20,
                                     .cluster_size = 4096,
                                     .backing_name = names[0],
                                     .backing_format = "qcow2"};
    struct blk *blk;

    CHECK_EQ(blk_crash_new(0, &blk), 0);
    CHECK_EQ(image_create(blk, &opts, NULL), 0);
    for (unsigned i = 0; i + 1 < ARRAY_SIZE(lens); i++)
        change_name_under_cuts(blk, names[i], names[i + 1]);
    blk_close(blk);
}

/* A header of QEMU's has extensions behind byte 512: a new name must not hit them. */
CO_TEST(a_power_cut_on_a_header_of_qemu)
{
    struct blk *file, *blk;
    static uint8_t head[4096];

    test_need("qemu-img");
    test_sh("qemu-img create -q -u -f qcow2 -b old.qcow2 -F qcow2 %s 1M", t_path("q.qcow2"));
    file = t_open("q.qcow2");
    CHECK_EQ(blk_read(file, 0, head, sizeof(head)), 0);
    CHECK_EQ(blk_crash_new(0, &blk), 0);
    CHECK_EQ(blk_resize(blk, file->len), 0);
    CHECK_EQ(blk_write(blk, 0, head, sizeof(head)), 0);
    change_name_under_cuts(blk, "old.qcow2", "a-new-one-that-is-longer-than-the-old-one.qcow2");
    blk_close(blk);
    blk_close(file);
}

TEST(probe)
{
    CHECK(qcow2_probe("QFI\xfb....", 8));
    CHECK(!qcow2_probe("QFI\xfb", 3));
    CHECK(!qcow2_probe("QFI\xfa....", 8));
}
