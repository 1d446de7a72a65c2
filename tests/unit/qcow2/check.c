/* Check against qemu-img check: figures of sound images, and damage of every kind found. */
#include "base/bits.h"
#include "qcow2/format.h"
#include "qcow2/refscan.h"
#include "util.h"

/* A figure of qemu-img check's JSON, 0 when it is absent. */
static unsigned long long qemu_figure(const char *key)
{
    FILE *f = fopen(t_path("check.json"), "r");
    unsigned long long value = 0;
    char line[200], pattern[64];

    CHECK(f);
    snprintf(pattern, sizeof(pattern), " \"%s\": %%llu", key);
    while (fgets(line, sizeof(line), f)) {
        if (sscanf(line, pattern, &value) == 1)
            break;
    }
    fclose(f);
    return value;
}

SUSPENDS static void same_figures(const char *name)
{
    struct image_check res;

    test_sh("qemu-img check -f qcow2 --output=json %s > %s", t_path(name), t_path("check.json"));
    CHECK_EQ(t_check(name, &res), 0);
    CHECK_EQ(res.corruptions, 0);
    CHECK_EQ(res.leaks, 0);
    CHECK_EQ(res.check_errors, 0);
    CHECK_EQ(res.total_clusters, qemu_figure("total-clusters"));
    CHECK_EQ(res.allocated_clusters, qemu_figure("allocated-clusters"));
    CHECK_EQ(res.fragmented_clusters, qemu_figure("fragmented-clusters"));
    CHECK_EQ(res.compressed_clusters, qemu_figure("compressed-clusters"));
    CHECK_EQ(res.image_end_off, qemu_figure("image-end-offset"));
}

CO_TEST(sound_images)
{
    static const char *const options[] = {
        "cluster_size=64k",
        "compat=0.10",
        "cluster_size=512",
        "cluster_size=2M",
        "extended_l2=on,cluster_size=128k",
        "extended_l2=on,cluster_size=16k,preallocation=metadata",
        "refcount_bits=1",
        "refcount_bits=2,cluster_size=4k",
        "refcount_bits=64,cluster_size=1k",
        "compression_type=zstd,refcount_bits=8",
        "lazy_refcounts=on,preallocation=falloc",
    };

    test_need("qemu-img");
    test_need("qemu-io");
    for (unsigned i = 0; i < sizeof(options) / sizeof(options[0]); i++) {
        test_sh("qemu-img create -q -f qcow2 -o %s %s 33M", options[i], t_path("a.qcow2"));
        test_sh("qemu-io -f qcow2 -c 'write -P 1 5M 300k' -c 'write -P 2 1M 70k' "
                "-c 'write -z 20M 2M' -c 'write -P 3 20M 4k' -c 'discard 5M 128k' "
                "-c 'write -P 3 32M 1M' %s > /dev/null",
                t_path("a.qcow2"));
        same_figures("a.qcow2");
        test_sh("qemu-img convert -q -c -O qcow2 -o %s %s %s",
                i == 5 || i == 10 ? "cluster_size=16k" : options[i], t_path("a.qcow2"),
                t_path("c.qcow2"));
        same_figures("c.qcow2");
    }
}

CO_TEST(snapshots_bitmaps_encryption)
{
    test_need("qemu-img");
    test_need("qemu-io");
    test_sh("qemu-img create -q -f qcow2 -o cluster_size=4k %s 64M && "
            "qemu-io -c 'write -P 1 0 1M' %s >/dev/null && qemu-img snapshot -c a %s && "
            "qemu-io -c 'write -P 2 512k 1M' %s >/dev/null && qemu-img snapshot -c b %s && "
            "qemu-img bitmap --add -g 4096 %s m && qemu-img bitmap --add %s n && "
            "qemu-io -c 'write -P 3 10M 1M' %s >/dev/null",
            t_path("x.qcow2"), t_path("x.qcow2"), t_path("x.qcow2"), t_path("x.qcow2"),
            t_path("x.qcow2"), t_path("x.qcow2"), t_path("x.qcow2"), t_path("x.qcow2"));
    same_figures("x.qcow2");
    struct image_check res;

    CHECK_EQ(t_check("x.qcow2", &res), 0);
    CHECK(res.bitmap_clusters_seen);
    /* on a busy machine qemu-img may fail to measure how fast it hashes */
    test_sh("for i in $(seq 50); do qemu-img create -q -f qcow2 --object secret,id=s,data=abc "
            "-o encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10 %s 8M 2>/dev/null && "
            "exit 0; done; exit 1",
            t_path("luks.qcow2"));
    CHECK_EQ(t_check("luks.qcow2", &res), 0);
    CHECK_EQ(res.corruptions + res.leaks + res.check_errors, 0);
}

/* ---- damage ---- */

struct open_image {
    struct blk *blk;
    struct qcow2_header hdr;
};

/* A copy of a sound image: 64k clusters, data at 0-1M and 32M-33M. */
SUSPENDS static struct open_image damaged(void)
{
    struct open_image img;

    if (access(t_path("good.qcow2"), F_OK) < 0)
        test_sh("qemu-img create -q -f qcow2 %s 64M && "
                "qemu-io -f qcow2 -c 'write -P 1 0 1M' -c 'write -P 2 32M 1M' %s > /dev/null",
                t_path("good.qcow2"), t_path("good.qcow2"));
    test_sh("cp %s %s", t_path("good.qcow2"), t_path("bad.qcow2"));
    img.blk = t_open("bad.qcow2");
    CHECK_EQ(qcow2_header_read(img.blk, &img.hdr, NULL), 0);
    return img;
}

SUSPENDS static struct image_check finish(struct open_image *img)
{
    struct image_check res;

    CHECK_EQ(qcow2_check(img->blk, &img->hdr, &res, NULL, NULL, NULL), 0);
    qcow2_header_fini(&img->hdr);
    blk_close(img->blk);
    return res;
}

SUSPENDS static uint64_t l2_pos(struct open_image *img, uint64_t guest_off)
{
    return t_l2_pos(img->blk, &img->hdr, guest_off);
}

SUSPENDS static uint64_t refcount_pos(struct open_image *img, uint64_t host_off)
{
    return t_get64(img->blk, img->hdr.reftable_off) + 2 * (host_off >> 16);
}

SUSPENDS static uint64_t data_off(struct open_image *img, uint64_t guest_off)
{
    return t_get64(img->blk, l2_pos(img, guest_off)) & L2_OFFSET_MASK;
}

/* Corrupt for us and for qemu-img. */
SUSPENDS static void expect_corrupt(struct open_image *img)
{
    struct image_check res = finish(img);

    CHECK(res.corruptions > 0);
    t_qemu_check("bad.qcow2", 2, 2);
}

CO_TEST(entries_that_point_into_metadata)
{
    test_need("qemu-io");
    for (unsigned i = 0; i < 5; i++) {
        struct open_image img = damaged();
        uint64_t l2 = t_get64(img.blk, img.hdr.l1_off) & L1_OFFSET_MASK;
        uint64_t targets[] = {img.hdr.reftable_off, t_get64(img.blk, img.hdr.reftable_off),
                              img.hdr.l1_off,       l2,
                              l2 + 65536,           img.hdr.l1_off};

        if (i == 4)
            t_put(img.blk, img.hdr.l1_off, 8, targets[i] | ENTRY_COPIED);
        else
            t_put(img.blk, l2_pos(&img, 0), 8, targets[i] | ENTRY_COPIED);
        expect_corrupt(&img);
    }
}

/* The refcounts agree with the double use: only the overlap itself shows it. */
CO_TEST(overlap_with_matching_refcounts)
{
    struct open_image img = damaged();
    uint64_t l2 = t_get64(img.blk, img.hdr.l1_off) & L1_OFFSET_MASK;
    uint64_t old = data_off(&img, 0);

    t_put(img.blk, l2_pos(&img, 0), 8, l2);
    t_put(img.blk, img.hdr.l1_off, 8, l2);
    t_put(img.blk, refcount_pos(&img, l2), 2, 2);
    t_put(img.blk, refcount_pos(&img, old), 2, 0);
    CHECK(finish(&img).corruptions > 0);
}

CO_TEST(wrong_refcounts)
{
    struct open_image img = damaged();

    t_put(img.blk, refcount_pos(&img, data_off(&img, 0)), 2, 0);
    t_put(img.blk, refcount_pos(&img, data_off(&img, 32 * MIB)), 2, 0);
    expect_corrupt(&img);

    img = damaged(); /* the copied flag contradicts it: more than a leak */
    t_put(img.blk, refcount_pos(&img, data_off(&img, 0)), 2, 9);
    expect_corrupt(&img);

    img = damaged();
    uint64_t end = img.blk->len;

    CHECK_EQ(blk_resize(img.blk, end + 3 * 65536), 0);
    for (unsigned i = 0; i < 3; i++)
        t_put(img.blk, refcount_pos(&img, end + i * 65536), 2, 1);
    struct image_check res = finish(&img);

    CHECK_EQ(res.corruptions, 0);
    CHECK_EQ(res.leaks, 3);
    t_qemu_check("bad.qcow2", 3, 3);
}

CO_TEST(copied_flags)
{
    struct open_image img = damaged();

    t_put(img.blk, l2_pos(&img, 0), 8, data_off(&img, 0));
    expect_corrupt(&img);
    img = damaged();
    t_put(img.blk, img.hdr.l1_off, 8, t_get64(img.blk, img.hdr.l1_off) & ~ENTRY_COPIED);
    expect_corrupt(&img);
    img = damaged(); /* two guest clusters on one host cluster */
    t_put(img.blk, l2_pos(&img, 65536), 8, t_get64(img.blk, l2_pos(&img, 0)));
    expect_corrupt(&img);
}

CO_TEST(entries_out_of_order)
{
    static const uint64_t words[] = {
        0x8000000000000000 | 1ull << 40, /* beyond the end */
        0x8000000000050200,              /* misaligned */
        0x9000000000050000,              /* reserved */
        ENTRY_COMPRESSED | 1ull << 40,
        ENTRY_COMPRESSED | ENTRY_COPIED | 0x50000,
    };

    for (unsigned i = 0; i < sizeof(words) / sizeof(words[0]); i++) {
        struct open_image img = damaged();

        t_put(img.blk, l2_pos(&img, 0), 8, words[i]);
        expect_corrupt(&img);
    }
    for (unsigned i = 0; i < 3; i++) {
        struct open_image img = damaged();

        t_put(img.blk, img.hdr.l1_off, 8, words[i]);
        CHECK(finish(&img).corruptions > 0);
    }
}

CO_TEST(extended_entries)
{
    static const struct {
        uint64_t word, bits;
    } cases[] = {{0, 1}, {0x8000000000050000, 1ull << 32 | 1}, {0x8000000000050001, 1}};

    test_need("qemu-io");
    for (unsigned i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct image_check res;
        struct open_image img;

        test_sh("qemu-img create -q -f qcow2 -o extended_l2=on %s 8M && "
                "qemu-io -f qcow2 -c 'write 0 64k' %s > /dev/null",
                t_path("ext.qcow2"), t_path("ext.qcow2"));
        img.blk = t_open("ext.qcow2");
        CHECK_EQ(qcow2_header_read(img.blk, &img.hdr, NULL), 0);
        uint64_t pos = l2_pos(&img, 0);

        t_put(img.blk, pos, 8, cases[i].word ? t_get64(img.blk, pos) | (cases[i].word & 1) : 0);
        t_put(img.blk, pos + 8, 8, cases[i].bits);
        res = finish(&img);
        CHECK(res.corruptions > 0);
    }
}

CO_TEST(refcount_structure)
{
    struct open_image img = damaged(); /* no table */

    img.hdr.reftable_off = 0;
    CHECK(finish(&img).corruptions > 0);
    img = damaged(); /* no block */
    t_put(img.blk, img.hdr.reftable_off, 8, 0);
    CHECK(finish(&img).corruptions > 0);
    img = damaged(); /* a block full of zeroes */
    CHECK_EQ(blk_zero(img.blk, t_get64(img.blk, img.hdr.reftable_off), 65536, 0), 0);
    expect_corrupt(&img);
    static const uint64_t words[] = {0x7fffffff0000, 0x20200, 0x20001, 0x10000};

    for (unsigned i = 0; i < 4; i++) {
        img = damaged();
        t_put(img.blk, img.hdr.reftable_off, 8, words[i]);
        CHECK(finish(&img).corruptions > 0);
        img = damaged();
        t_put(img.blk, img.hdr.reftable_off + 8 * 700, 8, words[i]);
        CHECK(finish(&img).corruptions > 0);
    }
}

CO_TEST(l1_beyond_the_end)
{
    struct open_image img = damaged();

    img.hdr.l1_off = 0x10000000;
    CHECK(finish(&img).corruptions > 0);
}

CO_TEST(bitmap_directories)
{
    static const struct {
        size_t off; /* in the extension */
        unsigned bytes;
        uint64_t value;
    } cases[] = {{0, 4, 0}, {0, 4, 2},       {0, 4, 65536},       {8, 8, UINT64_MAX},
                 {8, 8, 8}, {16, 8, 0x1234}, {16, 8, 1ull << 60}, {16, 8, 1ull << 30}};

    test_need("qemu-img");
    test_sh("qemu-img create -q -f qcow2 %s 64M && qemu-img bitmap --add %s m", t_path("m.qcow2"),
            t_path("m.qcow2"));
    for (unsigned i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct open_image img = {.blk = t_open("m.qcow2")};
        struct image_check res;

        CHECK_EQ(qcow2_header_read(img.blk, &img.hdr, NULL), 0);
        struct qcow2_ext *ext =
            (struct qcow2_ext *)(uintptr_t)qcow2_header_ext(&img.hdr, QCOW2_EXT_BITMAPS);

        CHECK(ext && ext->len == 24);
        CHECK_EQ(qcow2_check(img.blk, &img.hdr, &res, NULL, NULL, NULL), 0);
        CHECK(res.corruptions == 0 && res.leaks == 0 && res.bitmap_clusters_seen);
        be64 word = be64_make(cases[i].value << (64 - 8 * cases[i].bytes));

        memcpy(ext->data + cases[i].off, &word, cases[i].bytes);
        CHECK(finish(&img).corruptions > 0);
        /* without the autoclear bit the bitmaps own nothing */
        img.blk = t_open("m.qcow2");
        CHECK_EQ(qcow2_header_read(img.blk, &img.hdr, NULL), 0);
        img.hdr.autoclear = 0;
        res = finish(&img);
        CHECK(res.corruptions == 0 && res.leaks >= 2 && !res.bitmap_clusters_seen);
    }
}

/* Thousands of references to one cluster: more than a packed counter holds. */
CO_TEST(many_references)
{
    struct open_image img = damaged();
    uint64_t word = data_off(&img, 0);

    t_put(img.blk, l2_pos(&img, 0), 8, word);
    for (uint64_t off = 64 * KIB; off < 64 * MIB; off += 64 * KIB)
        t_put(img.blk, l2_pos(&img, off), 8, word);
    t_put(img.blk, refcount_pos(&img, word), 2, 1024);
    struct image_check res = finish(&img);

    CHECK_EQ(res.corruptions, 0);
    CHECK_EQ(res.leaks, 31);
    t_qemu_check("bad.qcow2", 3, 3);
}

/* Read errors are counted, not taken for damage or for soundness. */
CO_TEST(unreadable_tables)
{
    for (uint64_t n = 1; n < 8; n++) {
        struct open_image img = damaged();
        struct image_check res;
        struct blk *fault;

        CHECK_EQ(blk_fault_new(img.blk, &fault), 0);
        blk_fault_fail(fault, BLK_REQ_READ, n, -EIO, false);
        CHECK_EQ(qcow2_check(fault, &img.hdr, &res, NULL, NULL, NULL), 0);
        CHECK(res.check_errors == (blk_fault_count(fault, BLK_REQ_READ) >= n));
        qcow2_header_fini(&img.hdr);
        blk_close(fault);
    }
}
