/*
 * The runtime directory: one control socket a served volume, <runtime>/<pool>/<volume>.qmp.
 *
 * The volume's name stands without its suffix: a raw volume keeps its socket when its first
 * snapshot makes the top a qcow2 image. '/' is written as %2f; no name holds a '%'. A path that
 * would not fit into a socket address ends in a hash of the name instead.
 */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include "base/bits.h"
#include "vol/internal.h"

#define SOCKET_PATH_MAX (sizeof(((struct sockaddr_un *)0)->sun_path) - 1)

const char *runtime_dir(void)
{
    const char *dir = getenv("VARVE_RUNTIME");

    return dir && *dir ? dir : "/run/varve";
}

uint64_t text_hash(const char *s)
{
    uint64_t h = 0xcbf29ce484222325ull;

    for (; *s; s++)
        h = (h ^ (unsigned char)*s) * 0x100000001b3ull;
    return hash64(h);
}

static char *qmp_path(const char *pool, const char *vmid, const char *stem)
{
    const char *slash = *vmid ? "%2f" : "";
    char *ret = NULL;

    if (asprintf(&ret, "%s/%s/%s%s%s.qmp", runtime_dir(), pool, vmid, slash, stem) < 0)
        return NULL;
    if (strlen(ret) <= SOCKET_PATH_MAX)
        return ret;
    uint64_t hash = text_hash(ret);
    free(ret);
    if (asprintf(&ret, "%s/%s/%s%s%.16s~%016llx.qmp", runtime_dir(), pool, vmid, slash, stem,
                 (unsigned long long)hash) < 0)
        return NULL;
    return ret;
}

char *vol_qmp_path(const struct vol_name *name)
{
    return qmp_path(name->pool, name->vmid, name->name);
}

char *cvol_qmp_path(const struct catalog *cat, const struct cvol *vol)
{
    return qmp_path(cat->pool->id, vol->vmid, vol->stem);
}

/* connect() takes paths of 107 bytes; longer ones go through their directory's descriptor. */
static int fill_address(const char *path, struct sockaddr_un *addr, int *ret_dir_fd)
{
    const char *slash = strrchr(path, '/');

    *addr = (struct sockaddr_un){.sun_family = AF_UNIX};
    *ret_dir_fd = -1;
    if (strlen(path) <= SOCKET_PATH_MAX) {
        memcpy(addr->sun_path, path, strlen(path) + 1);
        return 0;
    }
    _cleanup_(freep) char *dir = slash ? strndup(path, (size_t)(slash - path)) : NULL;
    int fd = dir ? open(dir, O_PATH | O_DIRECTORY | O_CLOEXEC) : -1;
    if (fd < 0)
        return -ENAMETOOLONG;
    int n = snprintf(addr->sun_path, sizeof(addr->sun_path), "/proc/self/fd/%d/%s", fd, slash + 1);
    if (n < 0 || (size_t)n >= sizeof(addr->sun_path)) {
        close(fd);
        return -ENAMETOOLONG;
    }
    *ret_dir_fd = fd;
    return 0;
}

bool socket_is_served(const char *path)
{
    struct sockaddr_un addr;
    int dir_fd;

    if (access(path, F_OK) < 0 || fill_address(path, &addr, &dir_fd) < 0)
        return false;
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    /* EAGAIN: somebody listens whose queue is full */
    bool served =
        fd >= 0 && (connect(fd, (struct sockaddr *)&addr, sizeof(addr)) == 0 || errno == EAGAIN);
    if (fd >= 0)
        close(fd);
    if (dir_fd >= 0)
        close(dir_fd);
    return served;
}
