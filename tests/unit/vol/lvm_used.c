/*
 * What processes of a host have activated: who ends sees what others need, and takes over what a
 * killed one has left.
 */
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include "test.h"
#include "../../../src/vol/lvm_used.h"

static const char *const uuids[] = {
    "aaaaaa-aaaa-aaaa-aaaa-aaaa-aaaa-aaaaaa",
    "bbbbbb-bbbb-bbbb-bbbb-bbbb-bbbb-bbbbbb",
    "cccccc-cccc-cccc-cccc-cccc-cccc-cccccc",
};

struct other {
    pid_t pid;
    int end; /* closed: it ends in good order */
};

static void set_up(void)
{
    test_sh("rm -rf %s/lock", test_dir());
    char dir[200];
    snprintf(dir, sizeof(dir), "%s/lock", test_dir());
    setenv("VARVE_LOCK_DIR", dir, 1);
}

/* Another process that uses the LVs from first on. */
static struct other start(unsigned first, unsigned nr)
{
    int ready[2], end[2];
    char byte;

    CHECK(pipe(ready) == 0 && pipe(end) == 0);
    pid_t pid = fork();
    if (pid == 0) {
        struct lvm_used u;

        close(end[1]);
        lvm_used_init(&u, "vg");
        for (unsigned i = first; i < first + nr; i++)
            CHECK_EQ(lvm_used_add(&u, uuids[i], NULL), 0);
        CHECK_EQ(write(ready[1], "", 1), 1);
        (void)!read(end[0], &byte, 1);
        while (u.list.len)
            lvm_used_remove(&u, 0);
        lvm_used_write(&u);
        _exit(0);
    }
    close(ready[1]);
    close(end[0]);
    CHECK_EQ(read(ready[0], &byte, 1), 1);
    close(ready[0]);
    return (struct other){pid, end[1]};
}

static void stop(struct other o, bool by_kill)
{
    if (by_kill)
        kill(o.pid, SIGKILL);
    close(o.end);
    CHECK_EQ(waitpid(o.pid, NULL, 0), o.pid);
}

static bool mine(const struct lvm_used *u, const char *uuid)
{
    vec_for_each(it, &u->list)
        if (strcmp(*it, uuid) == 0)
            return true;
    return false;
}

static unsigned nb_files(void)
{
    unsigned nr = 0;
    char text[16], cmd[300];

    snprintf(cmd, sizeof(cmd), "ls %s/lock | grep -c used-", test_dir());
    FILE *f = popen(cmd, "r");
    if (f && fgets(text, sizeof(text), f))
        nr = (unsigned)atoi(text);
    if (f)
        pclose(f);
    return nr;
}

TEST(those_that_live_are_left_alone)
{
    struct lvm_used u;

    set_up();
    lvm_used_init(&u, "vg");
    struct other o = start(0, 2);
    CHECK(!lvm_used_any_dead(&u));
    CHECK_EQ(lvm_used_add(&u, uuids[1], NULL), 0);
    CHECK_EQ(lvm_used_adopt(&u, NULL), 0);
    CHECK_EQ(u.list.len, 1);
    CHECK(lvm_used_by_other(&u, uuids[0]) && lvm_used_by_other(&u, uuids[1]));
    CHECK(!lvm_used_by_other(&u, uuids[2]));
    stop(o, false);
    CHECK_EQ(lvm_used_adopt(&u, NULL), 0);
    CHECK_EQ(u.list.len, 1);
    CHECK(!lvm_used_by_other(&u, uuids[1]));
    lvm_used_remove(&u, 0);
    lvm_used_write(&u);
    CHECK_EQ(nb_files(), 0);
    lvm_used_fini(&u);
}

TEST(what_a_killed_one_has_left_is_taken_over)
{
    struct lvm_used u, third;

    set_up();
    lvm_used_init(&u, "vg");
    struct other dead = start(0, 2), alive = start(1, 2);
    stop(dead, true);
    CHECK(lvm_used_any_dead(&u));
    CHECK_EQ(lvm_used_adopt(&u, NULL), 0);
    CHECK(mine(&u, uuids[0]) && lvm_used_by_other(&u, uuids[1]) && !mine(&u, uuids[2]));
    CHECK(!lvm_used_any_dead(&u));
    CHECK_EQ(nb_files(), 2);
    /* not twice */
    lvm_used_init(&third, "vg");
    CHECK_EQ(lvm_used_adopt(&third, NULL), 0);
    CHECK_EQ(third.list.len, 0);
    lvm_used_fini(&third);
    /* of another group nothing is known */
    lvm_used_init(&third, "v");
    CHECK_EQ(lvm_used_adopt(&third, NULL), 0);
    CHECK_EQ(third.list.len + third.other.len, 0);
    stop(alive, false);
    while (u.list.len)
        lvm_used_remove(&u, 0);
    lvm_used_write(&u);
    CHECK_EQ(nb_files(), 0);
    lvm_used_fini(&third);
    lvm_used_fini(&u);
}

TEST(lines_that_are_cut_off_are_none)
{
    struct lvm_used u;

    set_up();
    test_sh("mkdir -p %s/lock && printf '%s\\n%.20s' >%s/lock/vg.used-x", test_dir(), uuids[0],
            uuids[1], test_dir());
    lvm_used_init(&u, "vg");
    CHECK_EQ(lvm_used_adopt(&u, NULL), 0);
    CHECK_EQ(u.list.len, 1);
    lvm_used_remove(&u, 0);
    lvm_used_write(&u);
    lvm_used_fini(&u);
}
