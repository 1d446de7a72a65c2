/*
 * Images by QEMU: damaged mappings, internal snapshots, compressed clusters. Nothing may be written
 * where it does not belong, and what QEMU says afterwards is the judge.
 */
#include "base/bits.h"
#include "engine.h"
#include "rt/sim.h"
#include "util.h"

SUSPENDS static int open_image(struct engine *e, const char *name, bool writable)
{
    struct image_opts opts = {.writable = writable, .prealloc_step = UINT64_MAX};
    struct blk *blk = t_open(name);
    int rc = image_open(blk, &opts, &e->img, NULL);

    if (rc < 0)
        blk_close(blk);
    return rc;
}

SUSPENDS static void make_good(struct qcow2_header *hdr)
{
    struct blk *blk;

    test_need("qemu-img");
    test_sh(
        "qemu-img create -q -f qcow2 %s 64M && qemu-io -f qcow2 -c 'write -q -P 0x11 0 128k' %s",
        t_path("good.qcow2"), t_path("good.qcow2"));
    blk = t_open("good.qcow2");
    CHECK_EQ(qcow2_header_read(blk, hdr, NULL), 0);
    blk_close(blk);
}

/* One entry of the L2 table (or the L1 entry) of a copy is changed; a write there is refused. */
SUSPENDS static void refuse(const struct qcow2_header *hdr, uint64_t value, bool in_l1)
{
    struct engine e = {0};

    test_sh("cp %s %s", t_path("good.qcow2"), t_path("bad.qcow2"));
    struct blk *blk = t_open("bad.qcow2");
    uint64_t meta = blk->len;
    t_put(blk, in_l1 ? hdr->l1_off : t_l2_pos(blk, hdr, 0), 8, value);
    blk_close(blk);
    test_sh("cp %s %s", t_path("bad.qcow2"), t_path("before.qcow2"));

    CHECK_EQ(open_image(&e, "bad.qcow2", true), 0);
    CHECK(engine_write(&e, 0, 512, 0x2a, 0, NULL) < 0);
    CHECK(image_is_corrupt(e.img));
    CHECK_EQ(engine_read(&e, 0, 512), -EIO);
    CHECK(image_zero(e.img, 0, 65536, 0, NULL) < 0);
    CHECK(engine_write(&e, MIB, 512, 0x2a, 0, NULL) < 0);
    CHECK_EQ(image_close(e.img, NULL), 0);
    /* nothing but the feature bits (72..79) has changed */
    test_sh("cmp -l %s %s | awk '$1 < 73 || $1 > 80 { exit 1 }'", t_path("bad.qcow2"),
            t_path("before.qcow2"));
    CHECK(meta > 0);
    CHECK_EQ(open_image(&e, "bad.qcow2", true), -EUCLEAN);
    CHECK_EQ(open_image(&e, "bad.qcow2", false), 0);
    CHECK_EQ(image_close(e.img, NULL), 0);
}

CO_TEST(mappings_into_metadata_are_refused)
{
    struct qcow2_header hdr;

    make_good(&hdr);
    struct blk *blk = t_open("good.qcow2");
    uint64_t l2 = t_get64(blk, hdr.l1_off) & L1_OFFSET_MASK;
    uint64_t block = t_get64(blk, hdr.reftable_off);
    blk_close(blk);
    refuse(&hdr, ENTRY_COPIED | hdr.reftable_off, false);
    refuse(&hdr, ENTRY_COPIED | block, false);
    refuse(&hdr, ENTRY_COPIED | hdr.l1_off, false);
    refuse(&hdr, ENTRY_COPIED | l2, false);
    refuse(&hdr, ENTRY_COPIED | 0x1234000, false);      /* misaligned, outside */
    refuse(&hdr, ENTRY_COPIED | (1ull << 40), false);   /* outside */
    refuse(&hdr, ENTRY_COPIED | l2 | 0x10, false);      /* reserved bits */
    refuse(&hdr, ENTRY_COMPRESSED | hdr.l1_off, false); /* would free metadata */
    refuse(&hdr, ENTRY_COMPRESSED | (1ull << 40), false);
    refuse(&hdr, ENTRY_COPIED | hdr.l1_off, true);
    refuse(&hdr, ENTRY_COPIED | (1ull << 40), true);
    refuse(&hdr, ENTRY_COPIED | (l2 + 512), true);
    qcow2_header_fini(&hdr);
}

CO_TEST(clusters_of_an_internal_snapshot_keep_their_content)
{
    struct engine e = {0};

    test_need("qemu-img");
    test_sh(
        "qemu-img create -q -f qcow2 %s 4M && qemu-io -f qcow2 -c 'write -q -P 0x55 0 2M' %s && "
        "qemu-img snapshot -c s1 %s",
        t_path("sn.qcow2"), t_path("sn.qcow2"), t_path("sn.qcow2"));
    CHECK_EQ(open_image(&e, "sn.qcow2", true), 0);
    CHECK_EQ(engine_write(&e, 4096, 4096, 0x66, 0, NULL), 0); /* copy on write */
    CHECK_EQ(engine_write(&e, 128 * KIB, 64 * KIB, 0x66, 0, NULL), 0);
    CHECK_EQ(image_discard(e.img, 256 * KIB, 128 * KIB, NULL), 0);
    CHECK_EQ(image_zero(e.img, 512 * KIB, 70 * KIB, 0, NULL), 0);
    CHECK_EQ(image_flush(e.img), 0);
    CHECK_EQ(engine_write(&e, 4096, 512, 0x77, 0, NULL), 0); /* now its own */
    engine_expect(&e, 0, 4096, 0x55, NULL);
    engine_expect(&e, 4096, 512, 0x77, NULL);
    engine_expect(&e, 8192, 120 * KIB, 0x55, NULL);
    engine_expect(&e, 256 * KIB, 128 * KIB, 0, NULL);
    engine_expect(&e, 512 * KIB, 70 * KIB, 0, NULL);
    engine_expect(&e, 582 * KIB, 58 * KIB, 0x55, NULL);
    CHECK_EQ(image_close(e.img, NULL), 0);
    t_qemu_check("sn.qcow2", 0, 0);
    test_sh("qemu-img snapshot -a s1 %s && qemu-io -r -f qcow2 -c 'read -q -P 0x55 0 2M' %s",
            t_path("sn.qcow2"), t_path("sn.qcow2"));
    t_qemu_check("sn.qcow2", 0, 0);
}

/* The model of compressed clusters: overwritten at random, no leaks, neighbours unharmed. */
SUSPENDS static void overwrite_compressed(const char *type, const char *extra)
{
    const unsigned clusters = 48;
    uint64_t rng = test_seed(), len = clusters * 65536ull;
    uint8_t *model = malloc(len), *buf = malloc(len);
    struct engine e = {0};
    FILE *f = fopen(t_path("src.raw"), "w");

    for (uint64_t i = 0; i < len; i++) /* half of each cluster is noise */
        model[i] = i % 65536 < 30000 + i / 65536 * 500 ? (uint8_t)rng_next(&rng) : 7;
    CHECK(f && fwrite(model, 1, len, f) == len);
    fclose(f);
    test_sh("qemu-img convert -q -c -f raw -O qcow2 -o compression_type=%s%s %s %s", type, extra,
            t_path("src.raw"), t_path("comp.qcow2"));
    CHECK_EQ(open_image(&e, "comp.qcow2", true), 0);
    for (unsigned i = 0; i < 40; i++) {
        uint64_t off = 512 * rng_below(&rng, len / 512), n = 512 << rng_below(&rng, 8);

        n = MIN(n, len - off);
        switch (rng_below(&rng, 4)) {
        case 0:
            CHECK_EQ(image_zero(e.img, off, n, BLK_MAY_UNMAP, NULL), 0);
            memset(model + off, 0, n);
            break;
        case 1:
            CHECK_EQ(image_discard(e.img, align_down(off, 131072), 131072, NULL), 0);
            memset(model + align_down(off, 131072), 0, 131072);
            break;
        default:
            CHECK_EQ(engine_write(&e, off, n, (uint8_t)i, 0, NULL), 0);
            memset(model + off, (int)(uint8_t)i, n);
        }
        IOV_ITER_BUF(it, vec, buf, len);
        CHECK_EQ(image_read(e.img, 0, len, &it, NULL), 0);
        CHECK(memcmp(buf, model, len) == 0);
    }
    CHECK_EQ(image_close(e.img, NULL), 0);
    t_qemu_check("comp.qcow2", 0, 0);
    f = fopen(t_path("want.raw"), "w");
    CHECK(f && fwrite(model, 1, len, f) == len);
    fclose(f);
    test_sh("qemu-img compare -q -f qcow2 -F raw %s %s", t_path("comp.qcow2"), t_path("want.raw"));
    free(model);
    free(buf);
}

CO_TEST(compressed_clusters_are_overwritten_without_leaks)
{
    test_need("qemu-img");
    overwrite_compressed("zlib", "");
    overwrite_compressed("zstd", "");
    overwrite_compressed("zlib", ",extended_l2=on");
}
