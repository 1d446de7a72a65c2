/*
 * provider.c: a volume whose name goes to another one, or whose device goes, between the manager's
 * answer and the open.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "devices.h"

/* Nodes are files; each file holds its handle. What a name is follows from a link. */
static unsigned calls, disturb_until;
static bool take_away;

static bool owns(const char *path)
{
    return strncmp(path, "/volumes/", 9) == 0;
}

static void disturb(void)
{
    if (take_away)
        test_sh("cd %s && rm -f node", test_dir());
    else
        test_sh("cd %s && mv one x && mv two one && mv x two", test_dir());
}

static int provide(const char *path, char **ret_node, char **ret_handle, struct err *err)
{
    char handle[16] = "", file[200];

    (void)path;
    (void)err;
    snprintf(file, sizeof(file), "%s/%s", test_dir(), take_away ? "node" : "one");
    if (take_away)
        test_sh("cd %s && cp one node", test_dir());
    FILE *f = fopen(file, "re");
    CHECK(f && fread(handle, 1, 3, f) == 3);
    fclose(f);
    if (calls++ < disturb_until)
        disturb();
    CHECK(asprintf(ret_node, "%s", file) > 0 && asprintf(ret_handle, "%s", handle) > 0);
    return 0;
}

static void set_up(unsigned until, bool away)
{
    static const struct blk_provider provider = {owns, provide, NULL};

    test_sh("cd %s && rm -f * && for n in one two; do echo $n >$n; truncate -s 64K $n; done",
            test_dir());
    calls = 0;
    disturb_until = until;
    take_away = away;
    blk_set_provider(&provider);
}

SUSPENDS static int open_it(struct blk **ret)
{
    struct blk_file_opts opts = {.writable = true, .lock = BLK_LOCK_WRITE};

    return blk_file_open("/volumes/v", &opts, ret, NULL);
}

/* What is open is what the handle says. */
SUSPENDS static void check_is_one(struct blk *blk)
{
    uint64_t dev, ino, want_dev, want_ino;
    char text[513] = "";

    CHECK_EQ(blk_read(blk, 0, text, 512), 0);
    text[3] = '\0';
    blk_handle_identity(text, &want_dev, &want_ino);
    CHECK_EQ(blk_identity(blk, &dev, &ino), 0);
    CHECK_EQ(dev, want_dev);
    CHECK_EQ(ino, want_ino);
}

CO_TEST(a_name_that_goes_to_another_volume_is_asked_for_again)
{
    for (unsigned until = 0; until < 4; until++) {
        struct blk *blk;

        set_up(until, false);
        CHECK_EQ(open_it(&blk), 0);
        check_is_one(blk);
        blk_close(blk);
    }
}

CO_TEST(a_device_that_goes_is_asked_for_again)
{
    for (unsigned until = 0; until < 4; until++) {
        struct blk *blk;

        set_up(until, true);
        CHECK_EQ(open_it(&blk), 0);
        check_is_one(blk);
        blk_close(blk);
    }
}

CO_TEST(it_is_not_asked_for_without_end)
{
    struct blk *blk;

    set_up(10000, false);
    CHECK_EQ(open_it(&blk), -ESTALE);
    set_up(10000, true);
    CHECK_EQ(open_it(&blk), -ENOENT);
    CHECK(calls < 200);
}
