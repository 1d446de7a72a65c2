/* Assertions and named crash points: see check.h. The environment is read once. */
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include "base/check.h"

void check_failed(const char *cond, const char *file, int line, const char *func)
{
    fprintf(stderr, "varve: %s:%d: %s: promise broken: %s\n", file, line, func, cond);
    abort();
}

static void list_point(const char *file, const char *name)
{
    int fd = open(file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);

    if (fd < 0)
        return;
    dprintf(fd, "%s\n", name);
    close(fd);
}

void crash_point(const char *name)
{
    static unsigned long passes;
    const char *list = getenv("VARVE_CRASH_LIST");
    const char *want = getenv("VARVE_CRASH_AT");

    if (list)
        list_point(list, name);
    if (!want)
        return;
    const char *colon = strchr(want, ':');
    size_t len = colon ? (size_t)(colon - want) : strlen(want);
    if (strlen(name) != len || strncmp(want, name, len) != 0)
        return;
    if (++passes >= (colon ? strtoul(colon + 1, NULL, 10) : 1))
        kill(getpid(), SIGKILL);
}
