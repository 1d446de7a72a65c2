/* Internal snapshot tables of qemu-img, read; and broken ones, refused. */
#include "base/bits.h"
#include "qcow2/format.h"
#include "qcow2/refscan.h"
#include "qcow2/snapshots.h"
#include "util.h"

static void make_image(void)
{
    test_need("qemu-img");
    test_need("qemu-io");
    test_sh("qemu-img create -q -f qcow2 %s 64M && qemu-io -c 'write -P 1 0 64k' %s >/dev/null && "
            "qemu-img snapshot -c first %s && qemu-io -c 'write -P 2 0 64k' %s >/dev/null && "
            "qemu-img snapshot -c 'second one' %s",
            t_path("s.qcow2"), t_path("s.qcow2"), t_path("s.qcow2"), t_path("s.qcow2"),
            t_path("s.qcow2"));
}

CO_TEST(table_of_qemu)
{
    struct qcow2_header hdr;
    struct qcow2_snapshots snaps;

    make_image();
    struct blk *blk = t_open("s.qcow2");

    CHECK_EQ(qcow2_header_read(blk, &hdr, NULL), 0);
    CHECK_EQ(qcow2_snapshots_read(blk, &hdr, &snaps, NULL), 0);
    CHECK_EQ(snaps.nr, 2);
    CHECK_STR(snaps.list[0].id, "1");
    CHECK_STR(snaps.list[0].name, "first");
    CHECK_STR(snaps.list[1].name, "second one");
    CHECK_EQ(snaps.list[0].disk_len, 64 * MIB);
    CHECK_EQ(snaps.list[0].vm_state_len, 0);
    CHECK(snaps.list[0].date_sec > 1600000000);
    for (unsigned i = 0; i < 2; i++)
        CHECK_EQ(qcow2_snapshot_check_l1(&hdr, &snaps.list[i], blk->len, NULL), 0);
    qcow2_snapshots_fini(&snaps);
    CHECK_EQ(qcow2_snapshots_check(blk, &hdr, NULL), 0);
    qcow2_header_fini(&hdr);
    blk_close(blk);
    struct image_check res;

    CHECK_EQ(t_check("s.qcow2", &res), 0);
    CHECK_EQ(res.corruptions + res.leaks + res.check_errors, 0);
}

/* A changed value of the first entry; what the open check says and what check finds. */
CO_TEST(broken_entries)
{
    static const struct {
        size_t off;
        unsigned bytes;
        uint64_t value;
        int open_rc;
    } cases[] = {
        {offsetof(struct qcow2_disk_snapshot, extra_len), 4, UINT32_MAX, -EINVAL},
        {offsetof(struct qcow2_disk_snapshot, extra_len), 4, 1025, -EINVAL},
        {offsetof(struct qcow2_disk_snapshot, id_len), 4, UINT32_MAX, -EINVAL},
        {offsetof(struct qcow2_disk_snapshot, l1_off), 8, 0x400200, 0},
        {offsetof(struct qcow2_disk_snapshot, l1_off), 8, 1ull << 50, 0},
        {offsetof(struct qcow2_disk_snapshot, l1_off), 8, 0xffffffffffff0000, 0},
        {offsetof(struct qcow2_disk_snapshot, l1_size), 4, 0x10000000, 0},
        {offsetof(struct qcow2_disk_snapshot, l1_size), 4, UINT32_MAX, 0},
    };

    make_image();
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct qcow2_header hdr;
        struct image_check res;

        test_sh("cp %s %s", t_path("s.qcow2"), t_path("bad.qcow2"));
        struct blk *blk = t_open("bad.qcow2");

        CHECK_EQ(qcow2_header_read(blk, &hdr, NULL), 0);
        t_put(blk, hdr.snapshots_off + cases[i].off, cases[i].bytes, cases[i].value);
        CHECK_EQ(qcow2_snapshots_check(blk, &hdr, NULL), cases[i].open_rc);
        CHECK_EQ(qcow2_check(blk, &hdr, &res, NULL, NULL, NULL), 0);
        CHECK(res.corruptions > 0);
        hdr.nb_snapshots = 65536; /* more than the file holds */
        CHECK_EQ(qcow2_snapshots_check(blk, &hdr, NULL), -EINVAL);
        hdr.snapshots_off = 1ull << 40;
        CHECK_EQ(qcow2_snapshots_check(blk, &hdr, NULL), -EINVAL);
        qcow2_header_fini(&hdr);
        blk_close(blk);
    }
}
