/*
 * LVs under names like those of files: links, renames over, and each step at which a rename can be
 * cut off. A command that fails is as good as a process killed before it.
 */
#include "../../../src/vol/lvm_dir.h"
#include "lvm_bench.h"

static struct lvm_dir dir;

SUSPENDS static void begin(void)
{
    bench_begin();
    lvm_dir_forget(&dir);
    dir = (struct lvm_dir){.lvm = lvm};
}

/* An LV of ours, told from others by its length in extents. */
SUSPENDS static void make(const char *name, unsigned extents)
{
    const struct lvm_new lv = {
        .name = name, .len = extents * EXTENT, .tags = NAMES("pve-vm-100", "varve")};

    CHECK_RC(lvm_create(&lvm, &lv, &err), 0);
    lvm_dir_forget(&dir);
}

/* Which LV has the name, as its length in extents; 0: none. In a fresh report, as another host sees
 * it. */
SUSPENDS static unsigned who(const char *name)
{
    lvm_dir_forget(&dir);
    CHECK_RC(lvm_dir_load(&dir, &err), 0);
    const struct lvm_lv *lv = lvm_dir_find(&dir, name);

    return lv ? (unsigned)(lv->len / EXTENT) : 0;
}

/* Nothing is left of a rename: our names are LVM's, but for links. */
SUSPENDS static void check_settled(unsigned nr_lvs, unsigned nr_links)
{
    unsigned links = 0;

    lvm_dir_forget(&dir);
    CHECK_RC(lvm_dir_load(&dir, &err), 0);
    CHECK_EQ(dir.vg->lvs.len, nr_lvs);
    vec_for_each(lv, &dir.vg->lvs) {
        CHECK_STR(lvm_dir_name(&dir, lv, 0), lv->name);
        for (unsigned n = 1; lvm_dir_name(&dir, lv, n); n++)
            links++;
        vec_for_each(tag, &lv->tags)
            CHECK(strncmp(*tag, LVM_DIR_TAKES, strlen(LVM_DIR_TAKES)) != 0);
    }
    CHECK_EQ(links, nr_links);
}

CO_TEST(a_link_is_a_second_name)
{
    begin();
    make("cur", 1);
    make("other", 2);
    CHECK_RC(lvm_dir_link(&dir, "cur", "snap", &err), 0);
    CHECK(who("cur") == 1 && who("snap") == 1 && who("other") == 2 && who("none") == 0);
    CHECK_RC(lvm_dir_link(&dir, "other", "snap", &err), -EEXIST);
    CHECK_RC(lvm_dir_link(&dir, "other", "cur", &err), -EEXIST);
    CHECK_RC(lvm_dir_link(&dir, "none", "x", &err), -ENOENT);
    CHECK_RC(lvm_dir_link(&dir, "other", "-x", &err), -EINVAL);
    check_settled(2, 1);
    CHECK_RC(lvm_dir_unlink(&dir, "snap", &err), 0);
    CHECK(who("cur") == 1 && who("snap") == 0);
    CHECK_RC(lvm_dir_link(&dir, "cur", "snap", &err), 0);
    CHECK_RC(lvm_dir_unlink(&dir, "cur", &err), 0);
    CHECK(who("cur") == 0 && who("snap") == 1);
    check_settled(2, 0);
    CHECK_RC(lvm_dir_unlink(&dir, "snap", &err), 0);
    CHECK_RC(lvm_dir_unlink(&dir, "snap", &err), 0);
    check_settled(1, 0);
}

CO_TEST(renames_as_of_files)
{
    begin();
    make("a", 1);
    make("b", 2);
    CHECK_RC(lvm_dir_rename(&dir, "a", "c", &err), 0);
    CHECK(who("a") == 0 && who("c") == 1);
    CHECK_RC(lvm_dir_rename(&dir, "a", "d", &err), -ENOENT);
    CHECK_RC(lvm_dir_rename(&dir, "c", "c", &err), 0);
    /* over one without another name: it goes */
    CHECK_RC(lvm_dir_rename(&dir, "c", "b", &err), 0);
    CHECK(who("b") == 1 && who("c") == 0);
    check_settled(1, 0);
    /* two names of one LV: the first goes */
    CHECK_RC(lvm_dir_link(&dir, "b", "l", &err), 0);
    CHECK_RC(lvm_dir_rename(&dir, "l", "m", &err), 0);
    CHECK(who("l") == 0 && who("m") == 1 && who("b") == 1);
    CHECK_RC(lvm_dir_rename(&dir, "b", "m", &err), 0);
    CHECK(who("b") == 0 && who("m") == 1);
    check_settled(1, 0);
}

CO_TEST(a_snapshot_changes_who_is_current)
{
    begin();
    make("cur", 1);
    make("new", 2);
    CHECK_RC(lvm_dir_link(&dir, "cur", "snap", &err), 0);
    unsigned before = dir.lvm.counts.commands;
    CHECK_RC(lvm_dir_rename(&dir, "new", "cur", &err), 0);
    /* a report before, a tag, two renames, the tags of both */
    CHECK_EQ(dir.lvm.counts.commands - before, 4);
    CHECK(who("cur") == 2 && who("snap") == 1 && who("new") == 0);
    check_settled(2, 0);
}

CO_TEST(others_are_left_alone_and_their_names_are_taken)
{
    begin();
    make("cur", 1);
    CHECK_RC(bench_make("theirs", 3 * EXTENT), 0);
    lvm_dir_forget(&dir);
    CHECK_RC(lvm_dir_link(&dir, "cur", "theirs", &err), -EEXIST);
    CHECK_RC(lvm_dir_rename(&dir, "cur", "theirs", &err), -EPERM);
    CHECK_RC(lvm_dir_rename(&dir, "theirs", "x", &err), -EPERM);
    CHECK_RC(lvm_dir_unlink(&dir, "theirs", &err), -EPERM);
    CHECK(who("theirs") == 3 && who("cur") == 1);
    check_settled(2, 0);
}

/* ---- cut off ---- */

/* From the n-th command that changes something on, none works. */
static void fail_from(unsigned n)
{
    static char text[512];

    test_sh("echo 0 >%s/count", test_dir());
    snprintf(
        text, sizeof(text),
        "case $verb in lvchange|lvrename|lvremove) n=$(($(cat %s/count) + 1)); echo $n >%s/count; "
        "[ $n -lt %u ] || exit 5;; esac",
        test_dir(), test_dir(), n);
    bench_before(text);
}

static void work_again(void)
{
    bench_before(":");
}

struct names {
    unsigned cur, snap, new;
};

SUSPENDS static struct names look(void)
{
    return (struct names){who("cur"), who("snap"), who("new")};
}

static bool same(struct names a, unsigned cur, unsigned snap, unsigned new)
{
    return a.cur == cur && a.snap == snap && a.new == new;
}

/* Whatever was done of a rename over: all names are as before or as after, at once and for good. */
SUSPENDS static void cut_off(bool linked, const char *what)
{
    unsigned cuts = 0, forward = 0;

    for (int rc = -1; rc < 0; cuts++) {
        work_again();
        begin();
        make("cur", 1);
        make("new", 2);
        if (linked)
            CHECK_RC(lvm_dir_link(&dir, "cur", "snap", &err), 0);
        fail_from(cuts + 1);
        rc = lvm_dir_rename(&dir, "new", "cur", &err);
        work_again();
        struct names now = look();
        bool before = same(now, 1, linked, 2), after = same(now, 2, linked, 0);

        if (!before && !after)
            test_fail(__FILE__, __LINE__, "%s, cut at %u: cur %u, snap %u, new %u", what, cuts,
                      now.cur, now.snap, now.new);
        CHECK(rc < 0 || after);
        forward += after;
        CHECK_RC(lvm_dir_settle(&dir, &err), 0);
        now = look();
        CHECK(before ? same(now, 1, linked, 2) : same(now, 2, linked, 0));
        check_settled(before || linked ? 2 : 1, before && linked);
    }
    CHECK(cuts > 3 && forward > 2);
    printf("%s: cut off at %u commands, %u times behind the decision\n", what, cuts - 1,
           forward - 1);
}

CO_TEST(a_rename_over_a_linked_name_can_be_cut_off_anywhere)
{
    cut_off(true, "linked");
}

CO_TEST(a_rename_over_a_name_can_be_cut_off_anywhere)
{
    cut_off(false, "not linked");
}

CO_TEST(dropping_the_first_of_two_names_can_be_cut_off)
{
    for (unsigned cut = 1; cut <= 2; cut++) {
        work_again();
        begin();
        make("cur", 1);
        CHECK_RC(lvm_dir_link(&dir, "cur", "snap", &err), 0);
        fail_from(cut);
        CHECK(lvm_dir_unlink(&dir, "cur", &err) < 0);
        work_again();
        CHECK(who("snap") == 1 && who("cur") == (cut == 1));
        CHECK_RC(lvm_dir_settle(&dir, &err), 0);
        check_settled(1, cut == 1);
    }
}
