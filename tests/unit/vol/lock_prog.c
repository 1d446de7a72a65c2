/*
 * Locks of a pool by hand, for tests on several hosts: one line of standard input is one step, one
 * line of output its result, "ok" or the error's text.
 *
 *   lock_prog POOL          the configuration is $VARVE_CONFIG
 *
 *   op [VMID/]STEM | copy [VMID/]STEM | disk [VMID/]STEM exclusive|shared | change exclusive|shared
 * | pool release                 all of it; one of each can be held times N                 N times
 * the pool's lock: "ok MEDIAN MAX", microseconds
 */
#include <stdio.h>
#include <string.h>
#include "rt/reactor.h"
#include "../../../src/vol/internal.h"

static const struct pool *pool;
static char *images;
static struct pool_lock lock = {.fd = -1}, pool_lock = {.fd = -1};
static struct disk_lease *disk;

static void split(char *name, const char **vmid, const char **stem)
{
    char *slash = strchr(name, '/');

    *vmid = slash ? name : "";
    *stem = slash ? slash + 1 : name;
    if (slash)
        *slash = '\0';
}

static enum lease_mode mode_of(const char *word)
{
    return word && strcmp(word, "shared") == 0 ? LEASE_SHARED : LEASE_EXCLUSIVE;
}

static int by_value(const void *a, const void *b)
{
    const uint64_t *x = a, *y = b;

    return *x < *y ? -1 : *x > *y;
}

SUSPENDS static int times(unsigned nr, struct err *err)
{
    uint64_t *us = calloc(nr + 1, sizeof(*us));
    int rc = 0;

    for (unsigned i = 0; i < nr && rc == 0; i++) {
        uint64_t begin = reactor_now();

        rc = lock_pool(pool, images, &pool_lock, err);
        lock_release(&pool_lock);
        us[i] = (reactor_now() - begin) / 1000;
    }
    qsort(us, nr, sizeof(*us), by_value);
    if (rc == 0)
        printf("ok %llu %llu\n", (unsigned long long)us[nr / 2], (unsigned long long)us[nr - 1]);
    free(us);
    return rc;
}

SUSPENDS static int step(char *verb, char *name, char *mode, struct err *err)
{
    const char *vmid, *stem;

    if (strcmp(verb, "release") == 0) {
        lock_release(&pool_lock);
        lock_release(&lock);
        disk_lease_release(TAKE_PTR(disk));
        return 0;
    }
    if (strcmp(verb, "pool") == 0)
        return lock_pool(pool, images, &pool_lock, err);
    if (strcmp(verb, "times") == 0)
        return times((unsigned)atoi(name), err);
    if (strcmp(verb, "change") == 0)
        return disk_lease_change(disk, mode_of(name), err);
    split(name, &vmid, &stem);
    if (strcmp(verb, "copy") == 0) {
        int rc = lock_volume(pool, images, vmid, stem, &lock, err);

        if (rc == 0)
            rc = copy_lease_take(pool, images, vmid, stem, &disk, err);
        lock_release(&lock);
        return rc;
    }
    if (strcmp(verb, "op") == 0)
        return lock_volume(pool, images, vmid, stem, &lock, err);
    if (strcmp(verb, "disk") == 0)
        return disk_lease_take(pool, images, vmid, stem, mode_of(mode), &disk, err);
    return err_set(err, -EINVAL, "no such step: %s", verb);
}

static void say(void *ctx, const char *line)
{
    fprintf(stderr, "%s\n", line);
}

SUSPENDS static int steps(void *arg)
{
    char line[400], *save = NULL;
    struct vol_ctx ctx = {.say = say};
    struct err err = {0};

    if (store_open(pool, &images, &err) < 0) {
        fprintf(stderr, "%s\n", err_text(&err));
        return 1;
    }
    lock_tell(&ctx);
    while (fgets(line, sizeof(line), stdin)) {
        char *verb = strtok_r(line, " \n", &save);
        char *name = verb ? strtok_r(NULL, " \n", &save) : NULL;
        char *mode = name ? strtok_r(NULL, " \n", &save) : NULL;

        if (!verb)
            continue;
        err = (struct err){0};
        int rc = step(verb, name, mode, &err);
        if (rc < 0)
            printf("%s: %s\n", strerrorname_np(-rc), err_text(&err));
        else if (strcmp(verb, "times") != 0)
            printf("ok\n");
        fflush(stdout);
    }
    free(images);
    return 0;
}

int main(int argc, char **argv)
{
    struct config *cfg;
    struct err err = {0};

    if (argc != 2)
        return 2;
    if (config_load(NULL, &cfg, &err) < 0 || config_pool(cfg, argv[1], &pool, &err) < 0) {
        fprintf(stderr, "%s\n", err_text(&err));
        return 1;
    }
    int status = reactor_run(steps, NULL);
    config_free(cfg);
    return status;
}
