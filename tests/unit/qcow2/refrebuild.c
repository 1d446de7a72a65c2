/* Rebuilding refcounts: after any loss of them, at any crash, where the file cannot grow. */
#include "base/bits.h"
#include "base/own.h"
#include "qcow2/refbits.h"
#include "qcow2/refrebuild.h"
#include "qcow2/refscan.h"
#include "util.h"

SUSPENDS static struct image_check check_blk(struct blk *blk)
{
    struct qcow2_header hdr;
    struct image_check res;
    struct err err = {0};

    if (qcow2_header_read(blk, &hdr, &err) < 0)
        test_fail(__FILE__, __LINE__, "%s", err_text(&err));
    CHECK_EQ(qcow2_check(blk, &hdr, &res, NULL, NULL, NULL), 0);
    qcow2_header_fini(&hdr);
    return res;
}

/* Sets the dirty bit and makes every refcount what it is not. */
SUSPENDS static void spoil(struct blk *blk, bool lose_blocks)
{
    struct qcow2_header hdr;

    CHECK_EQ(qcow2_header_read(blk, &hdr, NULL), 0);
    _cleanup_(freep) uint8_t *block = malloc(hdr.cluster_size);

    for (uint64_t i = 0; i < hdr.reftable_clusters * hdr.cluster_size / 8; i++) {
        uint64_t off = t_get64(blk, hdr.reftable_off + 8 * i);

        if (off == 0)
            continue;
        CHECK_EQ(blk_read(blk, off, block, hdr.cluster_size), 0);
        for (uint64_t k = 0; k < 1ull << hdr.refcount_block_bits; k++)
            refbits_set(block, hdr.refcount_order, k, k % 3 == 0);
        CHECK_EQ(blk_write(blk, off, block, hdr.cluster_size), 0);
        if (lose_blocks)
            t_put(blk, hdr.reftable_off + 8 * i, 8, 0);
    }
    if (hdr.version == 3)
        t_put(blk, 72, 8, hdr.incompatible | QCOW2_INCOMPAT_DIRTY);
    qcow2_header_fini(&hdr);
}

SUSPENDS static int rebuild(struct blk *blk)
{
    struct qcow2_header hdr;

    CHECK_EQ(qcow2_header_read(blk, &hdr, NULL), 0);
    int rc = qcow2_rebuild_refcounts(blk, &hdr, NULL);

    if (rc == 0)
        CHECK(!(hdr.incompatible & QCOW2_INCOMPAT_DIRTY));
    qcow2_header_fini(&hdr);
    return rc;
}

CO_TEST(all_kinds_of_images)
{
    static const char *const options[] = {
        "cluster_size=64k",
        "cluster_size=512,refcount_bits=64",
        "cluster_size=2M,refcount_bits=2",
        "cluster_size=4k,refcount_bits=8,lazy_refcounts=on",
        "cluster_size=16k,extended_l2=on",
        "compat=0.10,cluster_size=1k",
    };

    test_need("qemu-img");
    test_need("qemu-io");
    for (unsigned i = 0; i < 2 * sizeof(options) / sizeof(options[0]); i++) {
        test_sh("qemu-img create -q -f qcow2 -o %s %s 40M && "
                "qemu-io -f qcow2 -c 'write -P 1 0 3M' -c 'write -P 2 32M 100k' %s >/dev/null && "
                "qemu-img snapshot -c s %s && qemu-io -f qcow2 -c 'write -P 3 1M 1M' %s >/dev/null",
                options[i / 2], t_path("r.qcow2"), t_path("r.qcow2"), t_path("r.qcow2"),
                t_path("r.qcow2"));
        struct blk *blk = t_open("r.qcow2");

        spoil(blk, i % 2);
        CHECK_EQ(rebuild(blk), 0);
        struct image_check res = check_blk(blk);

        CHECK_EQ(res.corruptions + res.leaks + res.check_errors, 0);
        blk_close(blk);
        t_qemu_check("r.qcow2", 0, 0);
        test_sh("qemu-io -f qcow2 -c 'read -P 1 0 1M' -c 'read -P 3 1M 1M' -c 'read -P 1 2M 1M' "
                "-c 'read -P 2 32M 100k' -c 'write -P 4 10M 1M' %s | grep -q failed; test $? = 1",
                t_path("r.qcow2"));
        t_qemu_check("r.qcow2", 0, 0);
    }
}

/* A preallocated image with unused clusters in the middle, on a device of just its length. */
SUSPENDS static struct blk *full_device(bool room)
{
    struct image_create_opts o = {
        .virtual_len = 4 * MIB, .cluster_size = 4096, .prealloc = PREALLOC_METADATA};
    struct blk *blk;
    struct qcow2_header hdr;

    CHECK_EQ(blk_mem_new(16 * MIB, 1, &blk), 0);
    CHECK_EQ(image_create(blk, &o, NULL), 0);
    blk->fixed_len = true;
    CHECK_EQ(qcow2_header_read(blk, &hdr, NULL), 0);
    for (uint64_t i = 0; room && i < 8; i++)
        t_put(blk, t_l2_pos(blk, &hdr, MIB + 8192 * i), 8, 0);
    qcow2_header_fini(&hdr);
    return blk;
}

CO_TEST(device_that_cannot_grow)
{
    struct blk *blk = full_device(true);

    spoil(blk, false);
    CHECK_EQ(rebuild(blk), 0);
    struct image_check res = check_blk(blk);

    CHECK_EQ(res.corruptions + res.leaks, 0);
    blk_close(blk);
    blk = full_device(false);
    spoil(blk, false);
    CHECK_EQ(rebuild(blk), -ENOSPC);
    blk_close(blk);
}

/* Power goes after any write: the image still says that it is dirty, or is repaired. */
CO_TEST(crash_at_any_write)
{
    bool done = false;

    test_need("qemu-img");
    for (uint64_t n = 1; !done; n++) {
        struct image_create_opts o = {
            .virtual_len = 4 * MIB, .cluster_size = 1024, .prealloc = PREALLOC_METADATA};
        struct blk *mem, *fault;

        CHECK_EQ(blk_mem_new(16 * MIB, 1, &mem), 0);
        CHECK_EQ(image_create(mem, &o, NULL), 0);
        spoil(mem, n % 2);
        CHECK_EQ(blk_fault_new(mem, &fault), 0);
        blk_fault_fail(fault, BLK_REQ_WRITE | BLK_REQ_FLUSH, n, -EIO, true);
        done = rebuild(fault) == 0;
        blk_fault_clear(fault);
        struct qcow2_header hdr;

        CHECK_EQ(qcow2_header_read(mem, &hdr, NULL), 0);
        bool dirty = hdr.incompatible & QCOW2_INCOMPAT_DIRTY;

        qcow2_header_fini(&hdr);
        if (dirty)
            CHECK_EQ(rebuild(mem), 0);
        struct image_check res = check_blk(mem);

        CHECK_EQ(res.corruptions + res.leaks + res.check_errors, 0);
        CHECK_EQ(res.allocated_clusters, 4096);
        CHECK(n < 200);
        blk_close(fault);
    }
}

CO_TEST(other_damage_is_left_alone)
{
    struct blk *blk = full_device(true);
    struct qcow2_header hdr;
    _cleanup_(freep) uint8_t *before = malloc(blk->len), *after = malloc(blk->len);

    spoil(blk, false);
    CHECK_EQ(qcow2_header_read(blk, &hdr, NULL), 0);
    t_put(blk, t_l2_pos(blk, &hdr, 0), 8, hdr.l1_off | ENTRY_COPIED);
    qcow2_header_fini(&hdr);
    CHECK_EQ(blk_read(blk, 0, before, blk->len), 0);
    CHECK_EQ(rebuild(blk), -EUCLEAN);
    CHECK_EQ(blk_read(blk, 0, after, blk->len), 0);
    CHECK(memcmp(before, after, blk->len) == 0);
    blk_close(blk);
}
