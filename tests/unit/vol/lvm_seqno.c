/* The number of a VG's metadata, read past LVM, against what LVM says. */
#include <fcntl.h>
#include <unistd.h>
#include "../../../src/vol/lvm_seqno.h"
#include "lvm_bench.h"

/* What is on disk now, by both. */
static SUSPENDS uint64_t check_same(void)
{
    struct lvm_vg *vg = bench_report();
    uint64_t seqno = 0;

    CHECK_EQ(lvm_seqno_read(vg, &seqno), 0);
    CHECK_EQ(seqno, vg->seqno);
    lvm_vg_free(vg);
    return seqno;
}

CO_TEST(each_change_of_the_metadata_is_seen)
{
    bench_begin();
    struct lvm_vg *old = bench_report();
    uint64_t before = check_same(), now = 0;

    CHECK_RC(bench_make("a", EXTENT), 0);
    CHECK_EQ(lvm_seqno_read(old, &now), 0); /* by the report of before */
    CHECK(now > before);
    CHECK_EQ(check_same(), now);
    CHECK_RC(lvm_change_tags(&lvm, NAMES("a"), NAMES("t"), NULL, &err), 0);
    CHECK(check_same() > now);
    now = check_same();
    CHECK_RC(lvm_rename(&lvm, "a", "b", &err), 0);
    CHECK(check_same() > now);
    now = check_same();
    CHECK_EQ(check_same(), now); /* a report changes nothing */
    lvm_vg_free(old);
}

/* The area is a ring: the text comes to stand at every place in it. */
CO_TEST(wherever_the_text_stands)
{
    uint64_t first, last = 0;

    bench_begin();
    bench_use(bench_devices[1]);
    test_sh("(lvm pvcreate -q -ff --yes --metadatasize 64k %s && lvm vgcreate -q small %s) "
            ">/dev/null 2>&1",
            bench_devices[1], bench_devices[1]);
    lvm.vg = "small";
    CHECK_RC(bench_make("a", EXTENT), 0);
    first = check_same();
    for (unsigned i = 0; i < 40; i++) { /* texts of several lengths, 2 KiB and more */
        char name[100];

        snprintf(name, sizeof(name), "lv%0*u", 1 + (int)i * 2, i);
        CHECK_RC(lvm_rename(&lvm, "a", name, &err), 0);
        CHECK(check_same() > last);
        CHECK_RC(lvm_rename(&lvm, name, "a", &err), 0);
        last = check_same();
    }
    printf("  %llu commits in an area of 64 KiB\n", (unsigned long long)(last - first));
    test_sh("lvm vgremove -q --yes small >/dev/null 2>&1");
}

/* One that has none, or of another VG, tells nothing: the next one does, or nobody. */
CO_TEST(a_pv_that_does_not_tell)
{
    uint64_t seqno = 0;

    bench_begin();
    struct lvm_vg *vg = bench_report();
    struct lvm_vg odd = *vg;
    struct lvm_pv pvs[2] = {{.name = bench_devices[1]}, {.name = "/does/not/exist"}};

    test_sh("dd if=/dev/zero of=%s bs=1M count=2 conv=fsync 2>/dev/null", bench_devices[1]);
    memset(&odd.pvs, 0, sizeof(odd.pvs));
    for (unsigned i = 0; i < 2; i++)
        CHECK_EQ(vec_push(&odd.pvs, pvs[i]), 0);
    CHECK_EQ(lvm_seqno_read(&odd, &seqno), -ENODATA);
    bench_use(bench_devices[1]);
    test_sh("lvm pvcreate -q -ff --yes --metadatacopies 0 %s >/dev/null 2>&1", bench_devices[1]);
    CHECK_EQ(lvm_seqno_read(&odd, &seqno), -ENODATA);
    CHECK_EQ(vec_push(&odd.pvs, vg->pvs.data[0]), 0);
    CHECK_EQ(lvm_seqno_read(&odd, &seqno), 0);
    CHECK_EQ(seqno, vg->seqno);
    odd.name = "v"; /* "vt" begins so */
    CHECK_EQ(lvm_seqno_read(&odd, &seqno), -ENODATA);
    vec_free(&odd.pvs);
    lvm_vg_free(vg);
}
