/* Devices that a provider looks after: opening, identity, growing, the length of raw disks. */
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include "../../model/loopvol.h"
#include "base/bits.h"
#include "blk/internal.h"
#include "rt/timer.h"
#include "rt/wait.h"
#include "test.h"

static struct loopvol *new_volume(const char *name, uint64_t len)
{
    struct loopvol *v;

    if (!loopvol_new(test_dir(), name, len, &v)) {
        printf("SKIP: no loop devices\n");
        exit(77);
    }
    return v;
}

SUSPENDS static struct blk *open_volume(const struct loopvol *v, bool writable)
{
    struct blk_file_opts opts = {.writable = writable, .direct = true, .lock = BLK_LOCK_READ};
    struct err err = {0};
    struct blk *blk;

    if (blk_file_open(v->path, &opts, &blk, &err) < 0)
        test_fail(__FILE__, __LINE__, "%s", err_text(&err));
    return blk;
}

CO_TEST(volumes_are_found_by_their_provider_alone)
{
    struct loopvol *v = new_volume("found", 8 * MIB);
    struct blk_file_opts opts = {.writable = true, .create = true, .lock = BLK_LOCK_WRITE};
    struct err err = {0};
    struct blk *blk;

    CHECK(access(v->path, F_OK) < 0);
    blk = open_volume(v, true);
    CHECK(blk->fixed_len && blk_is_extendable(blk) && blk->len == 8 * MIB);
    CHECK_STR(blk->name, v->path);
    blk_close(blk);
    /* opening makes none */
    CHECK_EQ(blk_file_open(v->path, &opts, &blk, &err), -EEXIST);
    opts.truncate = true;
    CHECK_EQ(blk_file_open(v->path, &opts, &blk, &err), 0);
    blk_close(blk);
    CHECK(access(v->path, F_OK) < 0);
    /* others are as ever */
    opts.lock = BLK_LOCK_NONE;
    CHECK_EQ(blk_file_open(v->dev, &opts, &blk, &err), 0);
    CHECK(blk->fixed_len && !blk_is_extendable(blk));
    CHECK_EQ(blk_extend(blk, 16 * MIB, &err), -ENOTSUP);
    CHECK_EQ(blk_resize(blk, 16 * MIB), -ENOTSUP);
    blk_close(blk);
    loopvol_drop(v);
}

CO_TEST(the_identity_is_the_volumes_and_not_the_devices)
{
    struct loopvol *v = new_volume("a", 4 * MIB), *w;
    struct blk *blk = open_volume(v, false);
    uint64_t dev[4], ino[4];
    char device[32];

    CHECK_EQ(blk_identity(blk, &dev[0], &ino[0]), 0);
    blk_close(blk);
    memcpy(device, v->dev, sizeof(device));
    loopvol_drop(v);
    /* another one takes its number; or so it mostly is, when no other test takes it */
    w = new_volume("b", 4 * MIB);
    blk = open_volume(w, false);
    CHECK_EQ(blk_identity(blk, &dev[1], &ino[1]), 0);
    CHECK(dev[0] != dev[1] && ino[0] != ino[1]);
    blk_close(blk);
    /* and it is found again on whatever device */
    CHECK(loopvol_attach(test_dir(), "a", &v));
    CHECK(strcmp(device, w->dev) != 0 || strcmp(device, v->dev) != 0);
    blk = open_volume(v, false);
    CHECK_EQ(blk_identity(blk, &dev[2], &ino[2]), 0);
    CHECK(dev[2] == dev[0] && ino[2] == ino[0]);
    blk_handle_identity(v->file, &dev[3], &ino[3]);
    CHECK(dev[3] == dev[0] && ino[3] == ino[0]);
    CHECK(dev[0] > UINT32_MAX && dev[0] != UINT64_MAX); /* no file system's, no plain device's */
    blk_close(blk);
    loopvol_drop(v);
    loopvol_drop(w);
}

/* As LVM prints them, and as device-mapper has them. */
TEST(a_logical_volume_is_the_same_however_it_is_opened)
{
    static const char group[] = "mD3TQ3pRq8Lj0ZxKfYc1Vb6Nn2Wh5Gu7";
    char uuid[200];
    uint64_t dev[2], ino[2];

    blk_handle_identity("vg/abcdef-ABCD-1234-efgh-EFGH-5678-ijklmn", &dev[0], &ino[0]);
    snprintf(uuid, sizeof(uuid), "LVM-%s%s", group, "abcdefABCD1234efghEFGH5678ijklmn");
    CHECK(provider_dm_identity(uuid, &dev[1], &ino[1]));
    CHECK(dev[0] == dev[1] && ino[0] == ino[1]);
    blk_handle_identity("renamed/abcdef-ABCD-1234-efgh-EFGH-5678-ijklmn", &dev[1], &ino[1]);
    CHECK(dev[0] == dev[1] && ino[0] == ino[1]);
    snprintf(uuid, sizeof(uuid), "LVM-%s%s", group, "abcdefABCD1234efghEFGH5678ijklmo");
    CHECK(provider_dm_identity(uuid, &dev[1], &ino[1]));
    CHECK(dev[0] != dev[1] && ino[0] != ino[1]);
    snprintf(uuid, sizeof(uuid), "LVM-%s%s-tpool", group, "abcdefABCD1234efghEFGH5678ijklmn");
    CHECK(!provider_dm_identity(uuid, &dev[1], &ino[1]));
    CHECK(!provider_dm_identity("CRYPT-LUKS2-0123", &dev[1], &ino[1]));
    CHECK(!provider_dm_identity("", &dev[1], &ino[1]));
}

CO_TEST(an_extension_gives_at_least_what_was_asked_for)
{
    struct loopvol *v = new_volume("grow", 4 * MIB);
    struct blk *blk = open_volume(v, true);
    struct err err = {0};
    uint8_t buf[4096];

    memset(buf, 7, sizeof(buf));
    CHECK_EQ(blk_write(blk, 4 * MIB, buf, sizeof(buf)), -ENOSPC);
    CHECK_EQ(blk_extend(blk, 5 * MIB, &err), 0);
    CHECK_EQ(blk->len, 8 * MIB);
    CHECK_EQ(blk_write(blk, 8 * MIB - 4096, buf, sizeof(buf)), 0);
    CHECK_EQ(blk_flush(blk), 0);
    CHECK_EQ(blk_extend(blk, 6 * MIB, &err), 0); /* it has that */
    CHECK_EQ(blk->len, 8 * MIB);
    v->room = 8 * MIB;
    CHECK_EQ(blk_extend(blk, 9 * MIB, &err), -ENOSPC);
    CHECK(strstr(err_text(&err), "room"));
    CHECK_EQ(blk->len, 8 * MIB);
    loopvol_set_len(v, 4 * MIB); /* cut by its manager */
    CHECK_EQ(blk_extend(blk, 0, &err), 0);
    CHECK_EQ(blk->len, 4 * MIB);
    CHECK_EQ(blk_write(blk, 4 * MIB, buf, sizeof(buf)), -ENOSPC);
    blk_close(blk);
    loopvol_drop(v);
}

/* What was there before somebody else's file went is not to be seen. */
static void fill_file(const struct loopvol *v, uint64_t from, uint64_t to)
{
    test_sh("tr '\\0' x </dev/zero | dd of=%s bs=1M count=%u seek=%u iflag=fullblock "
            "conv=notrunc,fsync 2>/dev/null",
            v->dev, (unsigned)((to - from) / MIB), (unsigned)(from / MIB));
}

CO_TEST(a_raw_disk_has_the_length_that_was_asked_for_and_nobodys_data)
{
    struct loopvol *v = new_volume("raw", 16 * MIB);
    uint8_t buf[4096], zero[4096] = {0};
    struct err err = {0};

    fill_file(v, 0, 16 * MIB);
    struct blk *blk = open_volume(v, true);
    blk->len = 4 * MIB; /* the rest is room of an earlier, longer disk */
    CHECK_EQ(blk_resize(blk, 9 * MIB + 1000), 0);
    CHECK_EQ(blk->len, 9 * MIB + 1024);
    CHECK_EQ(blk_read(blk, 4 * MIB - 4096, buf, sizeof(buf)), 0);
    CHECK(buf[0] == 'x' && buf[4095] == 'x');
    for (uint64_t off = 4 * MIB; off < 9 * MIB; off += sizeof(buf)) {
        CHECK_EQ(blk_read(blk, off, buf, sizeof(buf)), 0);
        CHECK(memcmp(buf, zero, sizeof(buf)) == 0);
    }
    CHECK_EQ(blk_write(blk, 9 * MIB, buf, 1024), 0);
    CHECK_EQ(blk_write(blk, 9 * MIB + 1024, buf, 512), -ENOSPC);
    /* the long part first: it shows when it is done */
    CHECK_EQ(blk_resize_prepare(blk, 18 * MIB, &err), 0);
    CHECK_EQ(loopvol_len(v), 20 * MIB);
    CHECK_EQ(blk->len, 9 * MIB + 1024);
    uint64_t zeroes = blk->stats.zeroes;
    CHECK_EQ(blk_resize(blk, 18 * MIB), 0);
    CHECK_EQ(blk->stats.zeroes, zeroes);
    CHECK_EQ(blk->len, 18 * MIB);
    CHECK_EQ(blk_resize(blk, 4 * MIB), -ENOTSUP); /* that is its manager's */
    v->room = 20 * MIB;
    CHECK_EQ(blk_resize(blk, 21 * MIB), -ENOSPC);
    CHECK_EQ(blk->len, 18 * MIB);
    blk_close(blk);
    blk = open_volume(v, true);
    CHECK_EQ(blk->len, 20 * MIB); /* all of it, when it is opened again */
    blk_close(blk);
    loopvol_drop(v);
}

CO_TEST(the_lock_is_on_the_device)
{
    struct loopvol *v = new_volume("lock", 4 * MIB);
    struct blk_file_opts opts = {.writable = true, .lock = BLK_LOCK_WRITE};
    struct err err = {0};
    struct blk *a, *b;

    CHECK_EQ(blk_file_open(v->path, &opts, &a, &err), 0);
    CHECK_EQ(blk_file_open(v->path, &opts, &b, &err), -EBUSY);
    CHECK_EQ(blk_file_reopen(a, false, BLK_LOCK_READ, &err), 0);
    CHECK_EQ(blk_file_reopen(a, true, BLK_LOCK_WRITE, &err), 0);
    CHECK(blk_is_extendable(a));
    CHECK_EQ(blk_extend(a, 8 * MIB, &err), 0);
    CHECK_EQ(a->len, 8 * MIB);
    blk_close(a);
    loopvol_drop(v);
}
