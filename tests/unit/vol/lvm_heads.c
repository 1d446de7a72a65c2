/*
 * First bytes of LVs that are not active, on their physical volumes. With device-mapper this shows
 * that the place is right in reality; without, the stand-in puts them there (tests/lib/lvm).
 */
#include "../../../src/vol/lvm_head.h"
#include <fcntl.h>
#include <sys/mman.h>
#include "lvm_bench.h"
#include "qcow2/format.h"
#include "rt/reactor.h"
#include "rt/timer.h"

#define LEN 4096u

static _Alignas(4096) uint8_t buf[1 << 20];
static char root[160];

static void make_vg(void)
{
    test_sh("(lvm pvcreate -q -ff --yes --dataalignment 3m %s && lvm vgextend -q vt %s) >/dev/null "
            "2>&1",
            bench_devices[1], bench_devices[1]);
}

/* "vt" is empty, and on two devices. */
static SUSPENDS void begin(void)
{
    static char both[80];

    if (both[0]) {
        bench_use(both);
        test_sh("lvm vgchange -q -an vt >/dev/null 2>&1; for lv in $(lvm lvs --noheadings -o "
                "lv_name vt 2>/dev/null); do lvm lvremove -q --yes vt/$lv >/dev/null 2>&1; done");
        lvm = (struct lvm){.vg = "vt"};
        return;
    }
    bench_begin();
    if (!bench_has_dm())
        bench_stand_in();
    snprintf(root, sizeof(root), "%s/vt", bench_has_dm() ? "/dev" : getenv("DM_DEV_DIR"));
    snprintf(both, sizeof(both), "%s,%s", bench_devices[0], bench_devices[1]);
    bench_use(both);
    make_vg();
}

static SUSPENDS void activate(const char *name)
{
    CHECK_RC(lvm_activate(&lvm, NAMES(name), LVM_PLAIN, &err), 0);
}

static SUSPENDS void deactivate(const char *name)
{
    CHECK_RC(lvm_deactivate(&lvm, NAMES(name), &err), 0);
}

static SUSPENDS void make_active(const char *name, unsigned extents)
{
    CHECK_RC(bench_make(name, extents * EXTENT), 0);
    activate(name);
}

static void write_image(const char *name, const char *args)
{
    test_need("qemu-img");
    test_sh("qemu-img create -q -f qcow2 %s/%s %s", root, name, args);
}

/* Through lvm_heads_read; a fresh report each time. */
static SUSPENDS int read_head(const char *name, struct head *ret)
{
    struct lvm_heads scan;
    struct lvm_vg *vg = bench_report();
    struct lvm_head h = {.lv = lvm_vg_find(vg, name)};

    CHECK(h.lv);
    lvm_heads_init(&scan, root);
    CHECK_EQ(lvm_heads_read(&scan, &h, 1), 0);
    lvm_heads_fini(&scan);
    err = h.err;
    *ret = h.head;
    lvm_vg_free(vg);
    return h.rc;
}

static SUSPENDS void check_head(const char *name, uint64_t virtual_len, const char *backing)
{
    struct head head;

    CHECK_RC(read_head(name, &head), 0);
    CHECK_EQ(head.virtual_len, virtual_len);
    CHECK(!head.backing == !backing);
    if (backing) {
        CHECK_STR(head.backing, backing);
        CHECK_STR(head.backing_format, "qcow2");
    }
    head_fini(&head);
}

/* The first bytes as lvm_head_read gives them. */
static SUSPENDS int read_bytes(const char *name, size_t len)
{
    struct lvm_vg *vg = bench_report();
    const struct lvm_lv *lv = lvm_vg_find(vg, name);

    CHECK(lv);
    err = (struct err){0};
    int rc = lvm_head_read(lv, root, buf, len, &err);
    lvm_vg_free(vg);
    return rc;
}

/* A pattern that tells its place, written through the LV. */
static void write_pattern(const char *name, uint8_t seed, size_t len)
{
    char path[256];

    for (size_t i = 0; i < len; i++)
        buf[i] = (uint8_t)(seed + i / 512 * 7 + i);
    snprintf(path, sizeof(path), "%s/%s", root, name);
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    CHECK(fd >= 0);
    CHECK_EQ(pwrite(fd, buf, len, 0), (ssize_t)len);
    CHECK_EQ(fsync(fd), 0);
    close(fd);
    memset(buf, 0, len);
}

static SUSPENDS void check_pattern(const char *name, uint8_t seed, size_t len)
{
    CHECK_RC(read_bytes(name, len), 0);
    for (size_t i = 0; i < len; i++)
        if (buf[i] != (uint8_t)(seed + i / 512 * 7 + i))
            test_fail(__FILE__, __LINE__, "%s: byte %zu is 0x%02x", name, i, buf[i]);
}

/* ---- the place ---- */

CO_TEST(an_lv_begins_where_the_report_says)
{
    begin();
    make_active("a", 1);
    make_active("b", 2);
    CHECK_RC(lvm_extend(&lvm, "a", 3 * EXTENT, false, &err), 0);
    test_sh("lvm lvextend -q -L 32m vt/a %s >/dev/null 2>&1", bench_devices[1]);
    test_sh("lvm lvcreate -q --yes -an -Zn -Wn -l2 -n c vt %s >/dev/null 2>&1", bench_devices[1]);
    activate("c");
    test_sh("lvm lvcreate -q --yes -an -Zn -Wn -i2 -I64k -L16m -n s vt >/dev/null 2>&1");
    activate("s");
    write_pattern("a", 1, 64 * KIB);
    write_pattern("b", 2, 64 * KIB);
    write_pattern("c", 3, 64 * KIB);
    write_pattern("s", 4, 64 * KIB);
    for (unsigned active = 2; active-- > 0;) {
        check_pattern("a", 1, 64 * KIB);
        check_pattern("b", 2, 64 * KIB);
        check_pattern("c", 3, 64 * KIB);
        check_pattern("s", 4, 64 * KIB);
        if (active)
            CHECK_RC(lvm_deactivate(&lvm, NAMES("a", "b", "c", "s"), &err), 0);
    }
    struct lvm_vg *vg = bench_report();
    const struct lvm_lv *a = lvm_vg_find(vg, "a"), *c = lvm_vg_find(vg, "c");
    const struct lvm_lv *s = lvm_vg_find(vg, "s");
    CHECK_STR(a->head_pv, bench_devices[0]);
    CHECK_STR(c->head_pv, bench_devices[1]);
    CHECK(a->head_off % MIB == 0 && a->head_len == EXTENT && a->active == LVM_NO);
    CHECK((c->head_off - 3 * MIB) % EXTENT == 0 && c->head_len == 2 * EXTENT);
    CHECK_EQ(s->head_len, 64 * KIB);
    /* with the tool of everybody */
    test_sh("dd if=%s bs=4096 count=1 skip=%llu iflag=direct,skip_bytes of=%s/dd 2>/dev/null",
            a->head_pv, (unsigned long long)a->head_off, test_dir());
    test_sh("test $(od -An -tu1 -N1 %s/dd) = 1", test_dir());
    lvm_vg_free(vg);
    /* what moves it is followed, what does not leaves it */
    CHECK_RC(lvm_rename(&lvm, "a", "z", &err), 0);
    CHECK_RC(lvm_reduce(&lvm, "z", EXTENT, &err), 0);
    check_pattern("z", 1, 64 * KIB);
}

CO_TEST(an_lv_that_has_to_be_activated)
{
    begin();
    test_sh("lvm lvcreate -q --yes -an -Zn -Wn -i2 -I4k -L16m -n s vt >/dev/null 2>&1");
    test_sh("lvm lvcreate -q --yes -an -Zn -Wn --type zero -L16m -n v vt >/dev/null 2>&1");
    activate("s");
    write_pattern("s", 9, 8192);
    check_pattern("s", 9, 8192);
    deactivate("s");
    check_pattern("s", 9, 4096);
    CHECK_EQ(read_bytes("s", 8192), -ENODATA);
    CHECK_STR(err.text, "LV 's' can be read only while it is active: its first 8192 bytes are in "
                        "several places");
    CHECK_EQ(read_bytes("v", 4096), -ENODATA);
    CHECK_STR(err.text, "LV 'v' can be read only while it is active: it is no plain one");
    CHECK_EQ(read_bytes("s", 4095), -EINVAL);
    test_sh("lvm lvcreate -q --yes -an -Zn -Wn -l1 -n far vt %s >/dev/null 2>&1", bench_devices[1]);
    bench_use(bench_devices[0]);
    CHECK_EQ(read_bytes("far", 4096), -ENODATA);
    CHECK_STR(err.text,
              "LV 'far' can be read only while it is active: a physical volume is missing");
    struct head head;
    CHECK_EQ(read_head("far", &head), -ENODATA);
    CHECK(!head.backing && err.text[0]);
}

/* ---- images ---- */

CO_TEST(headers_of_images)
{
    begin();
    make_active("base.qcow2", 1);
    write_image("base.qcow2", "10M");
    check_head("base.qcow2", 10 * MIB, NULL);
    make_active("top.qcow2", 1);
    write_image("top.qcow2", "-u -b base.qcow2 -F qcow2 -o cluster_size=128k 3G");
    check_head("top.qcow2", 3072 * MIB, "base.qcow2");
    deactivate("top.qcow2");
    deactivate("base.qcow2");
    check_head("base.qcow2", 10 * MIB, NULL);
    check_head("top.qcow2", 3072 * MIB, "base.qcow2");
    CHECK_RC(lvm_rename(&lvm, "top.qcow2", "up.qcow2", &err), 0);
    check_head("up.qcow2", 3072 * MIB, "base.qcow2");
    activate("up.qcow2");
    test_sh("qemu-img rebase -u -f qcow2 -b other.qcow2 -F qcow2 %s/up.qcow2", root);
    check_head("up.qcow2", 3072 * MIB, "other.qcow2");
    CHECK_RC(lvm_rename(&lvm, "up.qcow2", "down.qcow2", &err), 0);
    check_head("down.qcow2", 3072 * MIB, "other.qcow2");
    deactivate("down.qcow2");
    check_head("down.qcow2", 3072 * MIB, "other.qcow2");
}

/* Buffered readers here, as blkid is one, leave in the cache what another host then changes. */
CO_TEST(what_another_host_writes_is_seen)
{
    begin();
    make_active("a.qcow2", 1);
    write_image("a.qcow2", "10M");
    deactivate("a.qcow2");
    check_head("a.qcow2", 10 * MIB, NULL);
    struct lvm_vg *vg = bench_report();
    const struct lvm_lv *lv = lvm_vg_find(vg, "a.qcow2");
    int cached = open(lv->head_pv, O_RDONLY | O_CLOEXEC);
    CHECK(cached >= 0);
    CHECK_EQ(pread(cached, buf, LEN, (off_t)lv->head_off), LEN);
    test_sh("qemu-img create -q -f qcow2 %s/i 77M && dd if=%s/i of=%s/pv0 bs=4096 count=16 "
            "seek=%llu oflag=seek_bytes conv=notrunc 2>/dev/null",
            test_dir(), test_dir(), test_dir(), (unsigned long long)lv->head_off);
    check_head("a.qcow2", 77 * MIB, NULL);
    CHECK_RC(read_bytes("a.qcow2", LEN), 0);
    CHECK_EQ(be64_get(((struct qcow2_disk_header *)buf)->size), 77 * MIB);
    /* the cache is old: the test would see it */
    CHECK_EQ(pread(cached, buf, LEN, (off_t)lv->head_off), LEN);
    CHECK_EQ(be64_get(((struct qcow2_disk_header *)buf)->size), 10 * MIB);
    close(cached);
    lvm_vg_free(vg);
    activate("a.qcow2");
    check_head("a.qcow2", 77 * MIB, NULL);
}

/* Headers that no tool writes. */
static void write_odd(const char *name, uint64_t l1_off, uint64_t backing_off)
{
    static const char backing[] = "far-behind.qcow2";
    char path[256];
    struct qcow2_disk_header h = {
        .magic = be32_make(QCOW2_MAGIC),
        .version = be32_make(2),
        .backing_off = be64_make(backing_off),
        .backing_len = be32_make(sizeof(backing) - 1),
        .cluster_bits = be32_make(16),
        .size = be64_make(GIB),
        .l1_size = be32_make(2),
        .l1_off = be64_make(l1_off),
        .reftable_off = be64_make(64 * KIB),
        .reftable_clusters = be32_make(1),
    };

    memset(buf, 0, 64 * KIB);
    memcpy(buf, &h, QCOW2_V2_HEADER_LEN);
    memcpy(buf + backing_off, backing, sizeof(backing) - 1);
    snprintf(path, sizeof(path), "%s/%s", root, name);
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    CHECK(fd >= 0 && pwrite(fd, buf, 64 * KIB, 0) == 64 * KIB && fsync(fd) == 0);
    close(fd);
}

CO_TEST(odd_headers)
{
    struct head head;

    begin();
    make_active("a", 1);
    for (uint64_t off = 4000; off <= 60000; off += 14000) {
        write_odd("a", 128 * KIB, off);
        CHECK_RC(read_head("a", &head), 0);
        CHECK_STR(head.backing, "far-behind.qcow2");
        head_fini(&head);
        /* the same of a file, and of one that ends before the name does */
        _cleanup_(closep) int fd = memfd_create("head", 0);
        CHECK_EQ(write(fd, buf, 64 * KIB), 64 * KIB);
        CHECK_RC(head_read(fd, &head, &err), 0);
        CHECK_STR(head.backing, "far-behind.qcow2");
        head_fini(&head);
        CHECK_EQ(ftruncate(fd, off + 3), 0);
        CHECK_RC(head_read(fd, &head, &err), -EUCLEAN);
        CHECK_STR(err.text, "the name of the backing file is cut off");
    }
    deactivate("a");
    CHECK_RC(read_head("a", &head), 0);
    CHECK_STR(head.backing, "far-behind.qcow2");
    head_fini(&head);
    activate("a");
    write_odd("a", EXTENT - 8, 4096);
    CHECK_RC(read_head("a", &head), -EUCLEAN);
    CHECK_STR(err.text, "the volume ends before its own tables");
    write_odd("a", EXTENT - 16, 4096);
    CHECK_RC(read_head("a", &head), 0);
    head_fini(&head);
    write_odd("a", 128 * KIB, 64 * KIB - 8); /* not in the first cluster */
    CHECK_RC(read_head("a", &head), -EUCLEAN);
    memset(buf, 0xa5, LEN);
    write_pattern("a", 0, LEN);
    CHECK_RC(read_head("a", &head), -EINVAL);
    CHECK_STR(err.text, "not a qcow2 image");
}

/* ---- many ---- */

/* One LV under many names: what counts is the number of reads. */
CO_TEST(thousands_are_read_at_once)
{
    const size_t nr = 6000;
    struct lvm_heads scan;

    begin();
    make_active("a.qcow2", 1);
    write_image("a.qcow2", "-u -b base.qcow2 -F qcow2 10M");
    deactivate("a.qcow2");
    struct lvm_vg *vg = bench_report();
    struct lvm_head *heads = calloc(nr, sizeof(*heads));
    struct lvm_lv *lvs = calloc(nr, sizeof(*lvs));
    for (size_t i = 0; i < nr; i++) {
        lvs[i] = *lvm_vg_find(vg, "a.qcow2");
        heads[i].lv = &lvs[i];
    }
    lvm_heads_init(&scan, root);
    uint64_t start = reactor_now();
    CHECK_EQ(lvm_heads_read(&scan, heads, nr), 0);
    uint64_t ns = reactor_now() - start;
    CHECK_EQ(scan.pvs.len, 1);
    lvm_heads_fini(&scan);
    for (size_t i = 0; i < nr; i++) {
        CHECK_EQ(heads[i].rc, 0);
        CHECK_EQ(heads[i].head.virtual_len, 10 * MIB);
        CHECK_STR(heads[i].head.backing, "base.qcow2");
        head_fini(&heads[i].head);
    }
    printf("  %zu heads: %llu ms\n", nr, (unsigned long long)(ns / NSEC_PER_MSEC));
    CHECK(ns < 20 * NSEC_PER_SEC);
    free(lvs);
    free(heads);
    lvm_vg_free(vg);
}
