/*
 * What stands for device-mapper in tests (tests/lib/lvm/loops.py) is itself tested: content is
 * never lost, whatever was killed, and several commands at once do no harm.
 */
#include <fcntl.h>
#include "lvm_bench.h"
#include "rt/reactor.h"
#include "rt/timer.h"

#define ROUNDS 16u

static char root[160];

static SUSPENDS bool begin(void)
{
    bench_begin();
    if (bench_has_dm()) {
        printf("  the kernel has device-mapper\n");
        return false;
    }
    bench_stand_in();
    snprintf(root, sizeof(root), "%s/vt", getenv("DM_DEV_DIR"));
    return true;
}

/* The first bytes of an LV, wherever they are now. */
static SUSPENDS void get_text(const char *name, char text[16])
{
    static _Alignas(4096) char buf[4096];
    struct lvm_vg *vg = bench_report();
    const struct lvm_lv *lv = lvm_vg_find(vg, name);

    CHECK(lv);
    CHECK_RC(lvm_head_read(lv, root, buf, sizeof(buf), &err), 0);
    memcpy(text, buf, 15);
    text[15] = 0;
    lvm_vg_free(vg);
}

static SUSPENDS void check_text(const char *name, const char *want)
{
    char text[16];

    get_text(name, text);
    CHECK_STR(text, want);
}

static SUSPENDS void put_text(const char *name, const char *text)
{
    char path[256];

    snprintf(path, sizeof(path), "%s/%s", root, name);
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    CHECK(fd >= 0 && pwrite(fd, text, strlen(text) + 1, 0) > 0 && fsync(fd) == 0);
    close(fd);
}

/* Nodes and the report agree. */
static SUSPENDS bool check_state(const char *name)
{
    struct lvm_vg *vg = bench_report();
    const struct lvm_lv *lv = lvm_vg_find(vg, name);

    CHECK(lv && lv->active != LVM_UNKNOWN);
    bool active = lv->active == LVM_YES;
    CHECK_EQ(test_sh_rc("test -b %s/%s", root, name) == 0, active);
    lvm_vg_free(vg);
    return active;
}

static void kill_after(unsigned ms)
{
    char text[64];

    snprintf(text, sizeof(text), "(sleep 0.%03u; kill -9 $$) & ", ms);
    bench_before(text);
}

CO_TEST(the_first_bytes_stay_on_the_disk)
{
    if (!begin())
        return;
    CHECK_RC(bench_make("a", EXTENT), 0);
    CHECK_RC(lvm_activate(&lvm, NAMES("a"), LVM_PLAIN, &err), 0);
    put_text("a", "first");
    CHECK_RC(lvm_remove(&lvm, NAMES("a"), &err), 0);
    CHECK_RC(bench_make("b", EXTENT), 0); /* in the same place */
    check_text("b", "first");
    CHECK_RC(lvm_activate(&lvm, NAMES("b"), LVM_PLAIN, &err), 0);
    check_text("b", "first");
    put_text("b", "second");
    /* its device goes by other means, as if the host had */
    test_sh("losetup -d $(readlink %s/b); lvm vgmknodes vt >/dev/null 2>&1", root);
    CHECK(!check_state("b"));
    check_text("b", "second");
    CHECK_RC(lvm_activate(&lvm, NAMES("b"), LVM_PLAIN, &err), 0);
    CHECK_RC(lvm_rename(&lvm, "b", "c", &err), 0);
    CHECK(check_state("c"));
    test_sh("test ! -e %s/b", root);
    test_sh("lvm vgchange -an vt >/dev/null 2>&1");
    CHECK(!check_state("c"));
    check_text("c", "second");
}

CO_TEST(commands_that_are_killed)
{
    char text[16];
    unsigned done = 0;

    if (!begin())
        return;
    CHECK_RC(bench_make("a", EXTENT), 0);
    uint64_t start = reactor_now();
    CHECK_RC(lvm_activate(&lvm, NAMES("a"), LVM_PLAIN, &err), 0);
    /* from its begin to a little after its end */
    const unsigned step = (unsigned)((reactor_now() - start) / NSEC_PER_MSEC * 5 / 4 / ROUNDS) + 1;
    for (unsigned i = 0; i < ROUNDS; i++) {
        snprintf(text, sizeof(text), "round %u", i);
        put_text("a", text);
        kill_after(i * step);
        lvm_deactivate(&lvm, NAMES("a"), NULL);
        bench_before(":");
        done += !check_state("a");
        check_text("a", text);
        kill_after(i * step);
        lvm_activate(&lvm, NAMES("a"), LVM_PLAIN, NULL);
        bench_before(":");
        check_state("a");
        check_text("a", text);
        CHECK_RC(lvm_activate(&lvm, NAMES("a"), LVM_PLAIN, &err), 0);
        CHECK(check_state("a"));
        check_text("a", text);
        /* a rename that was done is seen in the nodes at the next report */
        kill_after(i * step);
        lvm_rename(&lvm, "a", "b", NULL);
        bench_before(":");
        if (bench_len_of("b")) {
            CHECK(check_state("b"));
            check_text("b", text);
            CHECK_RC(lvm_rename(&lvm, "b", "a", &err), 0);
        }
        CHECK(check_state("a"));
    }
    printf("  %u of %u killed deactivations were done\n", done, ROUNDS);
}

CO_TEST(many_commands_at_once)
{
    if (!begin())
        return;
    test_sh("cd %s; for i in 1 2 3 4 5 6; do (lvm lvcreate -q --yes -an -Zn -Wn -l1 -n x$i vt && "
            "lvm lvchange -ay vt/x$i && for k in 1 2; do "
            "echo $i.$k | dd of=%s/x$i bs=512 conv=sync,fsync && lvm lvchange -an vt/x$i && "
            "lvm lvrename vt x$i y$i && lvm lvchange -ay vt/y$i && "
            "test \"$(head -n 1 %s/y$i)\" = $i.$k && lvm lvrename vt y$i x$i || exit 1; done; "
            "lvm lvchange -an vt/x$i && echo done >done$i) >out$i 2>&1 & done; wait; "
            "test $(cat done* | wc -l) = 6 || { cat out*; exit 1; }",
            test_dir(), root, root);
    for (unsigned i = 1; i <= 6; i++) {
        char name[8], want[16];

        snprintf(name, sizeof(name), "x%u", i);
        snprintf(want, sizeof(want), "%u.2\n           ", i);
        char text[16];
        CHECK(!check_state(name));
        get_text(name, text);
        CHECK(strncmp(text, want, 4) == 0);
    }
    test_sh("test -z \"$(losetup -O BACK-FILE -n | grep %s/dev)\"", test_dir());
}
