#include "loopvol.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/loop.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/bits.h"
#include "base/check.h"
#include "base/own.h"
#include "blk/blk.h"
#include "rt/offload.h"
#include "rt/timer.h"

#define VOLUMES_MAX  8u
#define ATTACH_TRIES 20u /* others take free devices, too */

static struct loopvol *volumes[VOLUMES_MAX];

/* ---- devices ---- */

static int attach(struct loopvol *v)
{
    _cleanup_(closep) int control = open("/dev/loop-control", O_RDWR | O_CLOEXEC);
    _cleanup_(closep) int file = open(v->file, O_RDWR | O_CLOEXEC);

    for (unsigned i = 0; control >= 0 && file >= 0 && i < ATTACH_TRIES; i++) {
        int nr = ioctl(control, LOOP_CTL_GET_FREE);
        struct loop_config config = {.fd = (uint32_t)file, .block_size = 512};

        if (nr < 0)
            return -errno;
        snprintf(v->dev, sizeof(v->dev), "/dev/loop%d", nr);
        _cleanup_(closep) int dev = open(v->dev, O_RDWR | O_CLOEXEC);
        if (dev >= 0 && ioctl(dev, LOOP_CONFIGURE, &config) == 0)
            return 0;
        if (errno != EBUSY)
            return -errno;
    }
    return -ENODEV;
}

static int set_len(const struct loopvol *v, uint64_t len)
{
    _cleanup_(closep) int dev = open(v->dev, O_RDWR | O_CLOEXEC);

    if (truncate(v->file, (off_t)align_up(len, LOOPVOL_EXTENT)) < 0)
        return -errno;
    return dev < 0 || ioctl(dev, LOOP_SET_CAPACITY, 0) < 0 ? -errno : 0;
}

uint64_t loopvol_len(const struct loopvol *v)
{
    struct stat st;

    CHECK_THAT(stat(v->file, &st) == 0);
    return (uint64_t)st.st_size;
}

void loopvol_set_len(struct loopvol *v, uint64_t len)
{
    CHECK_THAT(set_len(v, len) == 0);
}

/* ---- the provider ---- */

static struct loopvol *find(const char *path, const char *file)
{
    for (unsigned i = 0; i < VOLUMES_MAX; i++)
        if (volumes[i] && (!path || strcmp(volumes[i]->path, path) == 0) &&
            (!file || strcmp(volumes[i]->file, file) == 0))
            return volumes[i];
    return NULL;
}

static bool owns(const char *path)
{
    return find(path, NULL);
}

static int provide(const char *path, char **ret_node, char **ret_handle, struct err *err)
{
    const struct loopvol *v = find(path, NULL);

    *ret_node = strdup(v->dev);
    *ret_handle = strdup(v->file);
    return 0;
}

struct extend_call {
    struct loopvol *v;
    uint64_t len;
};

static uint64_t room_of(const struct loopvol *v)
{
    unsigned long long room = v->room;
    FILE *f = v->room_file ? fopen(v->room_file, "re") : NULL;

    if (f && fscanf(f, "%llu", &room) != 1)
        room = 0;
    if (f)
        fclose(f);
    return room;
}

static int do_extend(void *arg)
{
    struct extend_call *c = arg;

    return c->len > loopvol_len(c->v) ? set_len(c->v, c->len) : 0;
}

SUSPENDS static int extend(const char *handle, uint64_t len, struct err *err)
{
    struct extend_call c = {find(NULL, handle), len};

    c.v->extends++;
    timer_sleep(c.v->delay_ns);
    uint64_t room = room_of(c.v);
    if (align_up(len, LOOPVOL_EXTENT) <= room)
        return offload(do_extend, &c);
    c.v->failed++;
    return err_set(err, -ENOSPC, "there is room for %llu bytes", (unsigned long long)room);
}

static const struct blk_provider provider = {owns, provide, extend};

/* A test that fails leaves none behind. */
static void drop_all(void)
{
    for (unsigned i = 0; i < VOLUMES_MAX; i++) {
        int dev = volumes[i] ? open(volumes[i]->dev, O_RDWR | O_CLOEXEC) : -1;

        if (dev >= 0)
            (void)ioctl(dev, LOOP_CLR_FD, 0);
    }
}

bool loopvol_attach(const char *folder, const char *name, struct loopvol **ret)
{
    struct loopvol *v = calloc(1, sizeof(*v));
    unsigned i = 0;

    CHECK_THAT(v);
    snprintf(v->path, sizeof(v->path), "%s/%s", folder, name);
    snprintf(v->file, sizeof(v->file), "%s/.%s.file", folder, name);
    v->room = UINT64_MAX;
    if (attach(v) < 0) {
        free(v);
        return false;
    }
    static bool is_registered;
    if (!is_registered)
        is_registered = atexit(drop_all) == 0;
    while (volumes[i])
        CHECK_THAT(++i < VOLUMES_MAX);
    volumes[i] = v;
    blk_set_provider(&provider);
    *ret = v;
    return true;
}

bool loopvol_new(const char *folder, const char *name, uint64_t len, struct loopvol **ret)
{
    char file[300];

    snprintf(file, sizeof(file), "%s/.%s.file", folder, name);
    int fd = open(file, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    CHECK_THAT(fd >= 0 && ftruncate(fd, (off_t)align_up(len, LOOPVOL_EXTENT)) == 0);
    close(fd);
    return loopvol_attach(folder, name, ret);
}

void loopvol_drop(struct loopvol *v)
{
    _cleanup_(closep) int dev = open(v->dev, O_RDWR | O_CLOEXEC);

    for (unsigned i = 0; i < VOLUMES_MAX; i++)
        if (volumes[i] == v)
            volumes[i] = NULL;
    CHECK_THAT(dev >= 0 && ioctl(dev, LOOP_CLR_FD, 0) == 0);
    free(v);
}
