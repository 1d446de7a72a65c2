/*
 * LVs that are active: devices, their nodes, what is in use. Without device-mapper in the kernel
 * the stand-in of tests/lib/lvm/loops.py has to behave the same, as far as it goes.
 */
#include <fcntl.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <unistd.h>
#include "lvm_bench.h"
#include "rt/reactor.h"
#include "rt/timer.h"

static SUSPENDS void begin(void)
{
    bench_begin();
    if (!bench_has_dm())
        bench_stand_in();
}

/* With the real one only. */
static SUSPENDS bool begin_real(void)
{
    bench_begin();
    if (!bench_has_dm())
        printf("  the kernel has no device-mapper\n");
    return bench_has_dm();
}

static SUSPENDS char *device_of(const char *name)
{
    char *path = NULL;

    CHECK_RC(lvm_device(&lvm, name, 2000, &path, &err), 0);
    return path;
}

static SUSPENDS int open_lv(const char *name)
{
    char *path = device_of(name);
    int fd = open(path, O_RDWR | O_CLOEXEC);

    CHECK(fd >= 0);
    free(path);
    return fd;
}

static uint64_t device_len(int fd)
{
    uint64_t len = 0;

    CHECK_EQ(ioctl(fd, BLKGETSIZE64, &len), 0);
    return len;
}

static SUSPENDS void check_state(const char *name, enum lvm_state active, enum lvm_state open)
{
    struct lvm_vg *vg = bench_report();
    const struct lvm_lv *lv = lvm_vg_find(vg, name);

    if (!lv || lv->active != active || lv->open != open)
        test_fail(__FILE__, __LINE__, "%s: %s", name, lv ? lv->attr : "gone");
    CHECK(!lv->suspended);
    lvm_vg_free(vg);
}

CO_TEST(an_lv_is_active_where_it_is_asked_for)
{
    begin();
    char *path = NULL;
    const struct lvm_new lv = {.name = "vm-1-disk-0.qcow2", .len = EXTENT, .mode = LVM_EXCLUSIVE};

    CHECK_RC(bench_make("a-b", EXTENT), 0);
    check_state("a-b", LVM_NO, LVM_NO);
    CHECK_RC(lvm_device(&lvm, "a-b", 0, &path, &err), -ENOENT);
    CHECK_RC(lvm_create(&lvm, &lv, &err), 0);
    check_state(lv.name, LVM_YES, LVM_NO);
    path = device_of(lv.name);
    CHECK(strstr(path, "/dev/vt/vm-1-disk-0.qcow2"));
    free(path);
    CHECK_RC(lvm_activate(&lvm, NAMES("a-b", lv.name), LVM_PLAIN, &err), 0);
    free(device_of("a-b"));
    CHECK_RC(lvm_deactivate(&lvm, NAMES("a-b", lv.name), &err), 0);
    CHECK_RC(lvm_deactivate(&lvm, NAMES("a-b"), &err), 0); /* once more */
    check_state("a-b", LVM_NO, LVM_NO);
    CHECK_RC(lvm_device(&lvm, "a-b", 0, &path, &err), -ENOENT);
}

CO_TEST(what_is_open_stays)
{
    begin();
    CHECK_RC(bench_make("a", EXTENT), 0);
    CHECK_RC(bench_make("b", EXTENT), 0);
    CHECK_RC(lvm_activate(&lvm, NAMES("a", "b"), LVM_PLAIN, &err), 0);
    int fd = open_lv("a");
    check_state("a", LVM_YES, LVM_YES);
    CHECK_RC(lvm_deactivate(&lvm, NAMES("a", "b"), &err), -EBUSY);
    CHECK_RC(lvm_remove(&lvm, NAMES("a", "gone"), &err), -EBUSY);
    CHECK_EQ(bench_len_of("a"), EXTENT);
    close(fd);
    CHECK_RC(lvm_remove(&lvm, NAMES("a"), &err), 0); /* active, not open */
    CHECK_EQ(bench_len_of("a"), 0);
}

CO_TEST(an_open_lv_is_renamed_and_grows)
{
    begin();
    CHECK_RC(bench_make("a", EXTENT), 0);
    CHECK_RC(lvm_activate(&lvm, NAMES("a"), LVM_PLAIN, &err), 0);
    int fd = open_lv("a");
    CHECK_EQ(pwrite(fd, "12345678", 8, 4096), 8);
    CHECK_RC(lvm_rename(&lvm, "a", "c", &err), 0);
    CHECK_RC(lvm_extend(&lvm, "c", 3 * EXTENT, false, &err), 0);
    CHECK_EQ(device_len(fd), 3 * EXTENT);
    char got[8], *path = NULL;
    int other = open_lv("c");
    CHECK_EQ(fsync(fd), 0);
    CHECK(pread(other, got, 8, 4096) == 8 && memcmp(got, "12345678", 8) == 0);
    CHECK_RC(lvm_device(&lvm, "a", 0, &path, &err), -ENOENT);
    CHECK_RC(lvm_reduce(&lvm, "c", 2 * EXTENT, &err), 0);
    CHECK_EQ(device_len(fd), 2 * EXTENT);
    CHECK_RC(lvm_refresh(&lvm, NAMES("c"), &err), 0);
    close(fd);
    close(other);
}

CO_TEST(nothing_is_wiped)
{
    char got[8];

    if (!begin_real())
        return;

    for (unsigned i = 0; i < 2; i++) {
        const struct lvm_new lv = {.name = i ? "b" : "a", .len = EXTENT, .mode = LVM_PLAIN};

        CHECK_RC(lvm_create(&lvm, &lv, &err), 0);
        int fd = open_lv(lv.name);
        if (i == 0) {
            CHECK_EQ(pwrite(fd, "QFI\373old!", 8, 0), 8);
            CHECK_EQ(fsync(fd), 0);
        } else {
            CHECK(pread(fd, got, 8, 0) == 8 && memcmp(got, "QFI\373old!", 8) == 0);
        }
        close(fd);
        CHECK_RC(lvm_remove(&lvm, NAMES(lv.name), &err), 0);
    }
}

/* Links that somebody left behind, or that were never made. */
CO_TEST(nodes_are_made_and_stale_ones_seen)
{
    if (!begin_real())
        return;
    CHECK_RC(bench_make("a", EXTENT), 0);
    CHECK_RC(bench_make("b", EXTENT), 0);
    CHECK_RC(lvm_activate(&lvm, NAMES("a", "b"), LVM_PLAIN, &err), 0);
    test_sh("rm -f /dev/vt/a /dev/mapper/vt-a");
    char *path = device_of("a"), *real = realpath(path, NULL);
    CHECK(real);
    test_sh("ln -sf $(readlink -f /dev/vt/b) /dev/vt/a");
    char *again = device_of("a"), *real_again = realpath(again, NULL);
    CHECK_STR(real_again, real);
    free(path);
    free(real);
    free(again);
    free(real_again);
    /* the other's link alone: its device is not ours */
    CHECK_RC(lvm_deactivate(&lvm, NAMES("a"), &err), 0);
    test_sh("ln -sf $(readlink -f /dev/vt/b) /dev/vt/a");
    CHECK_RC(lvm_device(&lvm, "a", 0, &path, &err), -ENOENT);
    test_sh("rm -f /dev/vt/a");
}

/* Killed between suspend and resume an LV would stay suspended: SIGTERM is put off there. */
CO_TEST(a_time_limit_leaves_nothing_suspended)
{
    if (!begin_real())
        return;
    CHECK_RC(bench_make("a", EXTENT), 0);
    CHECK_RC(lvm_activate(&lvm, NAMES("a"), LVM_PLAIN, &err), 0);
    unsigned late = 0;

    for (unsigned i = 2; i < 14; i++) {
        lvm.limit_ms = i * 60; /* slow under emulation: all stages are met */
        int rc = lvm_extend(&lvm, "a", i * EXTENT, false, NULL);

        CHECK(rc == 0 || rc == -ETIMEDOUT);
        late += rc < 0;
        lvm.limit_ms = 0;
        struct lvm_vg *vg = bench_report();
        const struct lvm_lv *lv = lvm_vg_find(vg, "a");
        CHECK(lv && !lv->suspended);
        CHECK(rc < 0 || lv->len == i * EXTENT);
        lvm_vg_free(vg);
    }
    CHECK_RC(lvm_refresh(&lvm, NAMES("a"), &err), 0);
    int fd = open_lv("a");
    CHECK_EQ(device_len(fd), bench_len_of("a"));
    close(fd);
    printf("  %u of 12 were ended at their limit\n", late);
}
