/*
 * LVM's tools on a real VG on loop devices. Without device-mapper in the kernel metadata is all
 * there is: what activation does is then not seen, only that its commands are taken (lvm_dm.c).
 */
#include <fcntl.h>
#include <unistd.h>
#include "lvm_bench.h"
#include "rt/reactor.h"
#include "rt/timer.h"

/* ---- each function ---- */

CO_TEST(a_vg_is_reported_with_one_command)
{
    bench_begin();
    struct lvm_vg *vg = bench_report();

    CHECK_EQ(lvm.counts.commands, 1);
    CHECK_EQ(lvm.counts.reports, 1);
    CHECK_STR(vg->name, "vt");
    CHECK_EQ(strlen(vg->uuid), 38);
    CHECK_EQ(vg->extent_len, EXTENT);
    CHECK(vg->len > 1900 * MIB && vg->free == vg->len && vg->len % EXTENT == 0);
    CHECK(vg->seqno > 0 && !vg->shared && !vg->unlocked && vg->nb_missing == 0);
    CHECK(vg->metadata_len > 8 * MIB && vg->metadata_free < vg->metadata_len);
    CHECK_EQ(vg->pvs.len, 1);
    CHECK_STR(vg->pvs.data[0].name, bench_devices[0]);
    CHECK_EQ(vg->lvs.len, 0);
    CHECK_EQ(lvm_vg_check(vg, &err), 0);
    lvm_vg_free(vg);
}

CO_TEST(lvs_come_and_go)
{
    bench_begin();
    const struct lvm_new lv = {
        .name = "vm-100-disk-0.qcow2",
        .len = 8 * MIB + 1,
        .tags = NAMES("pve-vm-100", "varve-parent=a/b:c#d&e!f"),
    };
    CHECK_RC(lvm_create(&lvm, &lv, &err), 0);
    CHECK_RC(bench_make("other", 1), 0);
    CHECK_EQ(lvm.counts.commands, 2);
    struct lvm_vg *vg = bench_report();
    CHECK_EQ(vg->lvs.len, 2);
    const struct lvm_lv *got = lvm_vg_find(vg, lv.name);
    CHECK(got && got->len == 3 * EXTENT && got->tags.len == 2 && got->made > 1700000000);
    CHECK(lvm_lv_has_tag(got, lv.tags[0]) && lvm_lv_has_tag(got, lv.tags[1]));
    CHECK_STR(got->layout, "linear");
    CHECK(got->active != LVM_YES && got->open != LVM_YES && !got->partial);
    CHECK_EQ(vg->free, vg->len - 4 * EXTENT);
    lvm_vg_free(vg);
    test_sh(
        "lvm lvs --noheadings -o autoactivation vt/%s 2>/dev/null | grep -qw enabled; test $? = 1",
        lv.name);
    CHECK_RC(lvm_remove(&lvm, NAMES(lv.name, "other"), &err), 0);
    vg = bench_report();
    CHECK(vg->lvs.len == 0 && vg->free == vg->len);
    lvm_vg_free(vg);
}

CO_TEST(removing_what_is_partly_gone)
{
    bench_begin();
    CHECK_RC(bench_make("a", EXTENT), 0);
    CHECK_RC(bench_make("b", EXTENT), 0);
    CHECK_RC(lvm_remove(&lvm, NAMES("a", "gone", "b"), &err), -ENOENT);
    CHECK(strstr(err.text, "vt/gone"));
    CHECK_EQ(bench_len_of("a") + bench_len_of("b"), 0);
}

CO_TEST(renames)
{
    bench_begin();
    CHECK_RC(bench_make("a", EXTENT), 0);
    CHECK_RC(bench_make("b", 2 * EXTENT), 0);
    CHECK_RC(lvm_rename(&lvm, "a", "c", &err), 0);
    CHECK_EQ(bench_len_of("c"), EXTENT);
    CHECK_RC(lvm_rename(&lvm, "c", "b", &err), -EEXIST);
    CHECK_RC(lvm_rename(&lvm, "a", "d", &err), -ENOENT);
    CHECK_RC(lvm_rename(&lvm, "c", "snapshot1", &err), -EINVAL);
    CHECK_EQ(bench_len_of("b"), 2 * EXTENT);
}

CO_TEST(lengths_change_and_repeat)
{
    bench_begin();
    CHECK_RC(bench_make("a", EXTENT), 0);
    CHECK_RC(lvm_extend(&lvm, "a", 2 * EXTENT + 5, false, &err), 0);
    CHECK_EQ(bench_len_of("a"), 3 * EXTENT);
    CHECK_RC(lvm_extend(&lvm, "a", 3 * EXTENT, true, &err), 0); /* not shared: no --lockopt */
    CHECK_RC(lvm_extend(&lvm, "a", EXTENT, false, &err), 0);
    CHECK_EQ(bench_len_of("a"), 3 * EXTENT);
    CHECK_RC(lvm_reduce(&lvm, "a", EXTENT + 1, &err), 0);
    CHECK_EQ(bench_len_of("a"), 2 * EXTENT);
    CHECK_RC(lvm_reduce(&lvm, "a", 2 * EXTENT, &err), 0);
    CHECK_RC(lvm_reduce(&lvm, "a", 5 * EXTENT, &err), 0);
    CHECK_EQ(bench_len_of("a"), 2 * EXTENT);
    CHECK_RC(lvm_extend(&lvm, "a", TIB, false, &err), -ENOSPC);
    CHECK_RC(lvm_extend(&lvm, "b", EXTENT, false, &err), -ENOENT);
    CHECK_RC(lvm_reduce(&lvm, "b", EXTENT, &err), -ENOENT);
    CHECK_RC(lvm_reduce(&lvm, "a", 0, &err), -EINVAL);
    CHECK_RC(lvm_extend(&lvm, "a", UINT64_MAX, false, &err), -EINVAL);
}

CO_TEST(tags_change_at_once)
{
    bench_begin();
    CHECK_RC(bench_make("a", EXTENT), 0);
    CHECK_RC(bench_make("b", EXTENT), 0);
    lvm.counts.commands = 0;
    CHECK_RC(lvm_change_tags(&lvm, NAMES("a", "b"), NAMES("x", "y"), NULL, &err), 0);
    CHECK_RC(lvm_change_tags(&lvm, NAMES("a"), NAMES("z", "y"), NAMES("x", "none"), &err), 0);
    CHECK_RC(lvm_change_tags(&lvm, NULL, NAMES("varve-intent=1:2"), NAMES("none"), &err), 0);
    CHECK_RC(lvm_change_tags(&lvm, NAMES("a"), NULL, NULL, &err), 0);
    CHECK_EQ(lvm.counts.commands, 3);
    struct lvm_vg *vg = bench_report();
    const struct lvm_lv *a = lvm_vg_find(vg, "a"), *b = lvm_vg_find(vg, "b");
    CHECK(a->tags.len == 2 && lvm_lv_has_tag(a, "y") && lvm_lv_has_tag(a, "z"));
    CHECK(b->tags.len == 2 && lvm_lv_has_tag(b, "x") && lvm_lv_has_tag(b, "y"));
    CHECK_EQ(vg->tags.len, 1);
    CHECK_STR(vg->tags.data[0], "varve-intent=1:2");
    lvm_vg_free(vg);
    CHECK_RC(lvm_change_tags(&lvm, NAMES("a"), NAMES("a b"), NULL, &err), -EINVAL);
    CHECK_RC(lvm_change_tags(&lvm, NAMES("c"), NAMES("x"), NULL, &err), -ENOENT);
}

CO_TEST(activation_is_asked_for)
{
    bench_begin();
    CHECK_RC(bench_make("a", EXTENT), 0);
    CHECK_RC(bench_make("b", EXTENT), 0);
    lvm.counts.commands = 0;
    CHECK_RC(lvm_activate(&lvm, NAMES("a", "b"), LVM_PLAIN, &err), 0);
    CHECK_RC(lvm_activate(&lvm, NAMES("a"), LVM_EXCLUSIVE, &err), 0);
    CHECK_RC(lvm_activate(&lvm, NAMES("a"), LVM_SHARED, &err), 0);
    CHECK_RC(lvm_refresh(&lvm, NAMES("a", "b"), &err), 0);
    CHECK_RC(lvm_deactivate(&lvm, NAMES("a", "b"), &err), 0);
    CHECK_EQ(lvm.counts.commands, 5);
    CHECK_RC(lvm_activate(&lvm, NAMES("c"), LVM_PLAIN, &err), -ENOENT);
    CHECK_RC(lvm_refresh(&lvm, NAMES("c"), &err), -ENOENT);
}

/* What reaches LVM under lvmlockd, which cannot run here. */
CO_TEST(lock_modes_are_named_under_lvmlockd_only)
{
    static const char *const want[] = {"lvchange .* -aey vt/a$", "lvchange .* -asy vt/a$",
                                       "lvchange .* -ay vt/a$", "lvcreate .* -aey ",
                                       "lvextend .* --lockopt shupdate vt/a$"};
    char log[128];

    bench_begin();
    snprintf(log, sizeof(log), "%s/log", test_dir());
    setenv("VARVE_TEST_LVM_LOG", log, 1);
    bench_before("exit 0");
    for (unsigned shared = 0; shared < 2; shared++) {
        const struct lvm_new lv = {.name = "a", .len = 1, .mode = LVM_EXCLUSIVE};

        test_sh("rm -f %s", log);
        lvm.shared = shared;
        CHECK_RC(lvm_activate(&lvm, NAMES("a"), LVM_EXCLUSIVE, &err), 0);
        CHECK_RC(lvm_activate(&lvm, NAMES("a"), LVM_SHARED, &err), 0);
        CHECK_RC(lvm_activate(&lvm, NAMES("a"), LVM_PLAIN, &err), 0);
        CHECK_RC(lvm_extend(&lvm, "a", 512, true, &err), 0);
        CHECK_RC(lvm_create(&lvm, &lv, &err), 0);
        for (size_t i = 0; shared && i < ARRAY_SIZE(want); i++)
            test_sh("grep -qE '%s' %s", want[i], log);
        test_sh("test $(grep -cE -- '-a[es]y|shupdate' %s) = %u", log, shared ? 4u : 0u);
    }
    unsetenv("VARVE_TEST_LVM_LOG");
}

CO_TEST(the_pools_devices_are_named)
{
    char log[128];

    bench_begin();
    snprintf(log, sizeof(log), "%s/log", test_dir());
    test_sh("rm -f %s", log);
    setenv("VARVE_TEST_LVM_LOG", log, 1);
    bench_before("exit 0");
    lvm.devices = "/dev/a,/dev/b";
    CHECK_RC(lvm_remove(&lvm, NAMES("a"), &err), 0);
    lvm.devices = NULL;
    lvm.devices_file = "san.devices";
    CHECK_RC(lvm_remove(&lvm, NAMES("a"), &err), 0);
    unsetenv("VARVE_TEST_LVM_LOG");
    test_sh("sed -n 1p %s | grep -q -- ' --devices /dev/a,/dev/b '", log);
    test_sh("sed -n 2p %s | grep -q -- ' --devicesfile san.devices '", log);
    test_sh("! sed -n 2p %s | grep -q -- '--devices '", log);
}

/* ---- each error ---- */

CO_TEST(the_vg_is_not_there)
{
    struct lvm_vg *vg;

    bench_begin();
    lvm.vg = "novg";
    CHECK_RC(lvm_report(&lvm, &vg, &err), -ENOENT);
    CHECK_STR(err.text, "fullreport: Volume group \"novg\" not found");
    CHECK_RC(bench_make("a", EXTENT), -ENOENT);
    CHECK_RC(lvm_remove(&lvm, NAMES("a"), &err), -ENOENT);
    CHECK_RC(lvm_change_tags(&lvm, NULL, NAMES("x"), NULL, &err), -ENOENT);
    lvm.vg = "--help";
    CHECK_RC(lvm_report(&lvm, &vg, &err), -EINVAL);
    CHECK_RC(lvm_change_tags(&lvm, NULL, NAMES("x"), NULL, &err), -EINVAL);
    lvm.vg = "@tag";
    CHECK_RC(lvm_remove(&lvm, NAMES("a"), &err), -EINVAL);
}

CO_TEST(names_are_taken_or_the_vg_is_full)
{
    bench_begin();
    CHECK_RC(bench_make("a", EXTENT), 0);
    CHECK_RC(bench_make("a", EXTENT), -EEXIST);
    CHECK_STR(err.text, "lvcreate: Logical Volume \"a\" already exists in volume group \"vt\"");
    CHECK_RC(bench_make("b", TIB), -ENOSPC);
    CHECK(strstr(err.text, "insufficient free space"));
    CHECK_EQ(lvm.counts.commands, 3);
    CHECK_EQ(lvm.counts.failed, 2);
}

CO_TEST(awkward_names_are_lvms_own_answer)
{
    static const char *const names[] = {
        "+a",        "_a",       ".a",     "a.b",
        "a-b",       "a__b",     "a-",     "snap_vm-1-x_y.qcow2",
        "snapshot",  "pvmovex",  "a_mlog", "a_cvol.qcow2",
        "a_pmspare", "a_tdataq", "-a",     "--yes",
        "a b",       "a@b",      ".",      "..",
        "a:b",       "a=b",      "",       "a$(id)",
        "'",         "a,b",      "a\\b",   "a%20",
        "\xc3\xa4",
    };
    char name[200];

    bench_begin();
    for (size_t i = 0; i < ARRAY_SIZE(names) + 4; i++) {
        const char *n = i < ARRAY_SIZE(names) ? names[i] : name;

        memset(name, 'x', sizeof(name));
        name[i < ARRAY_SIZE(names) ? 0 : 121 + i - ARRAY_SIZE(names)] = 0; /* 121 to 124 */
        setenv("N", n, 1);
        bool lvm_takes =
            test_sh_rc("lvm lvcreate --yes -an -Zn -Wn -l1 \"--name=$N\" vt >/dev/null 2>&1") == 0;
        if (lvm_lv_name_ok("vt", n) != lvm_takes)
            test_fail(__FILE__, __LINE__, "'%s': LVM %s it", n, lvm_takes ? "takes" : "refuses");
        CHECK_RC(bench_make(n, EXTENT), lvm_takes ? -EEXIST : -EINVAL);
        if (lvm_takes)
            CHECK_RC(lvm_remove(&lvm, NAMES(n), &err), 0);
    }
}

/* Fills it with long tags, 100 a command. */
CO_TEST(the_metadata_area_is_full)
{
    static char text[100][LVM_TAG_MAX + 1];
    const char *tags[ARRAY_SIZE(text) + 1] = {NULL};
    struct err why = {0};
    int rc = 0;

    bench_begin();
    bench_use(bench_devices[1]);
    test_sh("(lvm pvcreate -q -ff --yes %s && lvm vgcreate -q small %s) >/dev/null 2>&1",
            bench_devices[1], bench_devices[1]);
    lvm.vg = "small";
    CHECK_RC(bench_make("a", EXTENT), 0);
    for (unsigned n = 0; n < 20 && rc == 0; n++) {
        for (unsigned i = 0; i < ARRAY_SIZE(text); i++) {
            memset(text[i], 'x', LVM_TAG_MAX);
            snprintf(text[i], 16, "%015u", n * 100 + i);
            text[i][15] = 'x';
            tags[i] = text[i];
        }
        rc = lvm_change_tags(&lvm, NAMES("a"), tags, NULL, &why);
    }
    if (rc != -ENOSPC)
        test_fail(__FILE__, __LINE__, "%d: %s", rc, err_text(&why));
    CHECK_RC(lvm_remove(&lvm, NAMES("a"), &err), 0);
    test_sh("lvm vgremove -q --yes small >/dev/null 2>&1");
}

CO_TEST(a_pv_is_missing)
{
    char both[80];
    struct lvm_vg *vg;

    bench_begin();
    snprintf(both, sizeof(both), "%s,%s", bench_devices[0], bench_devices[1]);
    bench_use(both);
    test_sh(
        "lvm vgextend -q vt %s >/dev/null 2>&1 || (lvm pvcreate -q -ff --yes %s && lvm vgextend -q "
        "vt %s) >/dev/null 2>&1",
        bench_devices[1], bench_devices[1], bench_devices[1]);
    CHECK_RC(bench_make("a", EXTENT), 0);
    test_sh("lvm lvcreate -q --yes -an -Zn -Wn -l1 -n b vt %s >/dev/null 2>&1", bench_devices[1]);
    bench_use(bench_devices[0]);
    CHECK_RC(lvm_report(&lvm, &vg, &err), 0);
    CHECK_EQ(vg->nb_missing, 1);
    CHECK_EQ(lvm_vg_check(vg, &err), -ENODEV);
    CHECK(!lvm_vg_find(vg, "a")->partial && lvm_vg_find(vg, "b")->partial);
    lvm_vg_free(vg);
    unsigned commands = lvm.counts.commands;
    for (unsigned known = 0; known < 2; known++) {
        CHECK_RC(bench_make("c", EXTENT), -ENODEV);
        CHECK_RC(lvm_rename(&lvm, "a", "c", &err), -ENODEV);
        CHECK_RC(lvm_extend(&lvm, "a", 2 * EXTENT, false, &err), -ENODEV);
        CHECK_RC(lvm_reduce(&lvm, "a", 1, &err), -ENODEV);
        if (known == 0) {
            /* what LVM would do even so */
            CHECK_RC(lvm_remove(&lvm, NAMES("a"), &err), -ENODEV);
            CHECK_RC(lvm_remove(&lvm, NAMES("b"), &err), -ENODEV);
            CHECK_RC(lvm_change_tags(&lvm, NAMES("a"), NAMES("x"), NULL, &err), -ENODEV);
            CHECK_EQ(lvm.counts.commands, commands);
            CHECK_RC(lvm_activate(&lvm, NAMES("a"), LVM_PLAIN, &err), 0);
            CHECK_RC(lvm_deactivate(&lvm, NAMES("a"), &err), 0);
            lvm.nb_missing = 0; /* the others are refused by LVM */
        }
    }
    bench_use(both);
    lvm_vg_free(bench_report());
    CHECK_RC(lvm_remove(&lvm, NAMES("a", "b"), &err), 0);
    test_sh("lvm vgreduce -q vt %s >/dev/null 2>&1", bench_devices[1]);
}

/* What only a kernel or a cluster would say is put into LVM's mouth. */
CO_TEST(in_use_and_locked)
{
    bench_begin();
    bench_before("echo '  Logical volume vt/a in use.' >&2; exit 5");
    CHECK_RC(lvm_deactivate(&lvm, NAMES("a"), &err), -EBUSY);
    CHECK_STR(err.text, "lvchange: Logical volume vt/a in use");
    bench_before("echo '  LV locked by other host: vt/a' >&2; exit 5");
    CHECK_RC(lvm_activate(&lvm, NAMES("a"), LVM_EXCLUSIVE, &err), -EBUSY);
    bench_before("echo '  VG vt lock failed: held by other host.' >&2; exit 5");
    CHECK_RC(bench_make("a", 1), -EAGAIN);
    bench_before("echo '  nobody knows what' >&2; exit 5");
    CHECK_RC(bench_make("a", 1), -EIO);
    CHECK_STR(err.text, "lvcreate: nobody knows what");
    bench_before("kill -9 $$");
    CHECK_RC(bench_make("a", 1), -EIO);
    CHECK_STR(err.text, "lvm lvcreate was killed by signal 9");
    bench_before("printf '  WARNING: Reading VG vt without a lock.\\n' >&2");
    struct lvm_vg *vg = bench_report();
    CHECK(vg->unlocked);
    lvm_vg_free(vg);
}

CO_TEST(a_tool_that_hangs_is_ended)
{
    bench_begin();
    lvm.limit_ms = 300;
    bench_before("sleep 20");
    uint64_t start = reactor_now();
    CHECK_RC(bench_make("a", EXTENT), -ETIMEDOUT);
    CHECK(reactor_now() - start < 10 * NSEC_PER_SEC);
    CHECK_EQ(lvm.counts.timed_out, 1);
    /* LVM itself, waiting for another command's lock on the VG */
    unsetenv("VARVE_TEST_LVM_BEFORE");
    test_sh("flock %s/lvm/V_vt sleep 4 & sleep 0.3", test_dir());
    CHECK_RC(bench_make("a", EXTENT), -ETIMEDOUT);
    lvm.limit_ms = 0;
    CHECK_EQ(bench_len_of("a"), 0);
    CHECK_RC(bench_make("a", EXTENT), 0);
}

/* LVM's I/O as it is by default: asynchronous, which tests/lib/lvm turns off where it can. */
static void as_by_default(void)
{
    test_sh("true >%s/lvm/lvmlocal.conf", test_dir());
}

/* ---- kill -9 ---- */

/* What is there is whole: LV and tags or neither; the next command works. */
static SUSPENDS void check_whole(const char *name, unsigned *done)
{
    struct lvm_vg *vg = bench_report();
    const struct lvm_lv *lv = lvm_vg_find(vg, name);

    CHECK_EQ(vg->nb_missing, 0);
    CHECK(!lv || (lv->len == 2 * EXTENT && lv->tags.len == 2));
    CHECK_EQ(vg->free, vg->len - (lv ? 2 * EXTENT : 0));
    *done += lv != NULL;
    lvm_vg_free(vg);
    if (lv)
        CHECK_RC(lvm_remove(&lvm, NAMES(name), &err), 0);
}

CO_TEST(killed_at_any_time_the_metadata_is_whole)
{
    const struct lvm_new lv = {.name = "a", .len = 2 * EXTENT, .tags = NAMES("x", "y")};
    unsigned done = 0, tries = 30;
    char text[64];

    bench_begin();
    as_by_default();
    for (unsigned i = 0; i < tries; i++) {
        snprintf(text, sizeof(text), "(sleep 0.%03u; kill -9 $$) & ", i * 4);
        bench_before(text);
        lvm_create(&lvm, &lv, NULL);
        unsetenv("VARVE_TEST_LVM_BEFORE");
        check_whole("a", &done);
    }
    printf("  %u of %u killed commands had done their work\n", done, tries);
}

CO_TEST(killed_at_any_write_the_metadata_is_whole)
{
    const struct lvm_new lv = {.name = "a", .len = 2 * EXTENT, .tags = NAMES("x", "y")};
    unsigned n = 0, done = 0;
    char text[160];
    int rc = -EIO;

    bench_begin();
    as_by_default();
    if (test_sh_rc("strace -qq -o /dev/null true 2>/dev/null") != 0) {
        printf("  strace cannot be used here\n");
        return;
    }
    while (rc == -EIO && n < 100) {
        snprintf(text, sizeof(text),
                 "strace -qq -o /dev/null -e "
                 "inject=io_submit,pwrite64,pwritev,io_uring_enter:signal=KILL:when=%u",
                 ++n);
        setenv("VARVE_TEST_LVM_UNDER", text, 1);
        rc = lvm_create(&lvm, &lv, &err);
        unsetenv("VARVE_TEST_LVM_UNDER");
        check_whole("a", &done);
    }
    CHECK_EQ(rc, 0);
    CHECK(n > 3 && done > 0);
    printf("  %u writes, the LV was there after %u of the kills\n", n - 1, done - 1);
}

/* ---- device nodes ---- */

CO_TEST(nodes_are_found_or_asked_for)
{
    char dir[128], *path = NULL;

    bench_begin();
    snprintf(dir, sizeof(dir), "%s/dev", test_dir());
    setenv("DM_DEV_DIR", dir, 1);
    bench_before("exit 0"); /* vgmknodes */
    test_sh("mkdir -p %s/vt %s/mapper", dir, dir);
    CHECK_RC(lvm_device(&lvm, "a-b", 0, &path, &err), -ENOENT);
    CHECK_EQ(lvm.counts.commands, 1);
    test_sh("touch %s/mapper/vt-a--b", dir);
    CHECK_RC(lvm_device(&lvm, "a-b", 0, &path, &err), 0);
    CHECK_STR(path + strlen(dir), "/mapper/vt-a--b");
    free(path);
    test_sh("touch %s/vt/a-b", dir);
    CHECK_RC(lvm_device(&lvm, "a-b", 0, &path, &err), 0);
    CHECK_STR(path + strlen(dir), "/vt/a-b");
    free(path);
    bench_before("mkdir -p $DM_DEV_DIR/vt; touch $DM_DEV_DIR/vt/c; exit 0");
    CHECK_RC(lvm_device(&lvm, "c", 0, &path, &err), 0);
    free(path);
    CHECK_EQ(lvm.counts.commands, 2);
    unsetenv("DM_DEV_DIR");
}

/* Under /dev a node that is not that LV's is not believed. */
CO_TEST(foreign_nodes_are_not_believed)
{
    char *path = NULL;

    bench_begin();
    lvm.vg = "varve-test-vg";
    if (access("/dev/varve-test-vg", F_OK) == 0)
        return;
    bench_before("exit 0");
    test_sh(
        "mkdir /dev/varve-test-vg && ln -s %s /dev/varve-test-vg/a && touch /dev/varve-test-vg/b",
        bench_devices[0]);
    int rc_a = lvm_device(&lvm, "a", 0, &path, &err);
    int rc_b = lvm_device(&lvm, "b", 0, &path, &err);
    test_sh("rm -r /dev/varve-test-vg");
    CHECK_EQ(rc_a, -ENOENT);
    CHECK_EQ(rc_b, -ENOENT);
}

/* ---- how long it takes ---- */

static void write_big(const char *path, const char *head, unsigned nr)
{
    FILE *f = fopen(path, "w");

    CHECK(f);
    fprintf(f, "%s\nlogical_volumes {\n", head);
    for (unsigned i = 0; i < nr; i++)
        fprintf(f,
                "snap_vm-100-disk-0_s%u.qcow2 {\nid = \"AAAAAA-AAAA-AAAA-AAAA-AAAA-AAAA-%06u\"\n"
                "status = [\"READ\", \"WRITE\", \"VISIBLE\"]\nflags = [\"NOAUTOACTIVATE\"]\n"
                "tags = [\"pve-vm-100\", \"varve-parent=snap_vm-100-disk-0_s%u.qcow2\"]\n"
                "creation_time = 1796065905\ncreation_host = \"h\"\nsegment_count = 1\n"
                "segment1 {\nstart_extent = 0\nextent_count = 1\ntype = \"striped\"\n"
                "stripe_count = 1\nstripes = [ \"pv0\", %u ]\n}\n}\n",
                i, i, i + 1, i);
    fprintf(f, "}\n}\n");
    fclose(f);
}

CO_TEST(a_thousand_lvs_are_reported)
{
    const unsigned nr = 1000;
    char head[4096], path[128];

    bench_begin();
    as_by_default();
    bench_loop(2, "8G");
    bench_use(bench_devices[2]);
    test_sh("cd %s && (lvm pvcreate -q --metadatasize 16m %s && lvm vgcreate -q big %s && "
            "lvm vgcfgbackup -f base big) >/dev/null 2>&1 && "
            "sed -n '/^}/q;p' base >head",
            test_dir(), bench_devices[2], bench_devices[2]);
    snprintf(path, sizeof(path), "%s/head", test_dir());
    FILE *f = fopen(path, "r");
    CHECK(f);
    head[fread(head, 1, sizeof(head) - 1, f)] = 0;
    fclose(f);
    snprintf(path, sizeof(path), "%s/big", test_dir());
    write_big(path, head, nr);
    test_sh("lvm vgcfgrestore -q -f %s big >/dev/null 2>&1", path);
    lvm = (struct lvm){.vg = "big"};
    struct lvm_vg *vg = bench_report();
    CHECK_EQ(vg->lvs.len, nr);
    CHECK_EQ(vg->free, vg->len - nr * EXTENT);
    CHECK(lvm_lv_has_tag(lvm_vg_find(vg, "snap_vm-100-disk-0_s999.qcow2"), "pve-vm-100"));
    printf("  a report of %u LVs: %llu ms\n", nr,
           (unsigned long long)(lvm.counts.ns / NSEC_PER_MSEC));
    lvm.counts.ns = 0;
    CHECK_RC(bench_make("one-more", 1), 0);
    printf("  one LV more: %llu ms\n", (unsigned long long)(lvm.counts.ns / NSEC_PER_MSEC));
    lvm_vg_free(vg);
}

CO_TEST(how_long_each_takes)
{
    bench_begin();
    as_by_default();
    const struct {
        const char *what;
        int rc;
    } steps[] = {
        {"create", 0}, {"extend", 0}, {"reduce", 0}, {"tags", 0}, {"rename", 0}, {"remove", 0},
    };
    for (size_t i = 0; i < ARRAY_SIZE(steps); i++) {
        lvm.counts = (struct lvm_counts){0};
        int rc = i == 0   ? bench_make("a", EXTENT)
                 : i == 1 ? lvm_extend(&lvm, "a", 2 * EXTENT, false, &err)
                 : i == 2 ? lvm_reduce(&lvm, "a", EXTENT, &err)
                 : i == 3 ? lvm_change_tags(&lvm, NAMES("a"), NAMES("x"), NULL, &err)
                 : i == 4 ? lvm_rename(&lvm, "a", "b", &err)
                          : lvm_remove(&lvm, NAMES("b"), &err);
        CHECK_EQ(rc, steps[i].rc);
        CHECK(lvm.counts.commands == 1 || (i == 2 && lvm.counts.commands == 2));
        printf("  %s: %llu ms\n", steps[i].what,
               (unsigned long long)(lvm.counts.ns / NSEC_PER_MSEC));
    }
}
