/*
 * What processes of this host have activated: see lvm_used.h.
 *
 *  1. An LV is in the file before it is activated, and until it is not active or somebody else's.
 *  2. Of a dead process' file the entries are in another one before it goes.
 * A line is a UUID; others, cut off, are none.
 */
#include "vol/lvm_used.h"
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/check.h"
#include "vol/internal.h"
#include "vol/intent_tags.h"

#define UUID_LEN   38u /* LVM's, with its dashes */
#define MARK       ".used-"
#define OPEN_TRIES 4u

void lvm_used_init(struct lvm_used *u, const char *vg)
{
    *u = (struct lvm_used){.vg = vg, .fd = -1};
}

static void free_texts(char **list, size_t nr)
{
    for (size_t i = 0; i < nr; i++)
        free(list[i]);
}

void lvm_used_fini(struct lvm_used *u)
{
    free_texts(u->list.data, u->list.len);
    free_texts(u->other.data, u->other.len);
    vec_free(&u->list);
    vec_free(&u->other);
    if (u->fd >= 0)
        close(u->fd);
    free(u->path);
    *u = (struct lvm_used){.fd = -1};
}

static bool has(char *const *list, size_t nr, const char *uuid)
{
    for (size_t i = 0; i < nr; i++)
        if (strcmp(list[i], uuid) == 0)
            return true;
    return false;
}

bool lvm_used_by_other(const struct lvm_used *u, const char *uuid)
{
    return has(u->other.data, u->other.len, uuid);
}

/* ---- our file ---- */

/* Without it nothing is wrong as long as nobody is killed. */
static bool open_own(struct lvm_used *u)
{
    char id[24];

    intent_new_id(id);
    mkdir(lock_dir(), 0700); /* a failure shows below */
    if (asprintf(&u->path, "%s/%s" MARK "%s", lock_dir(), u->vg, id) < 0)
        u->path = NULL;
    if (u->path)
        u->fd = open(u->path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    /* who takes it for a dead one's in this instant finds it empty, and removes it */
    if (u->fd >= 0 && flock(u->fd, LOCK_EX | LOCK_NB) == 0 && intent_fd_is_named(u->fd, u->path))
        return true;
    if (u->fd >= 0)
        close(TAKE_FD(u->fd));
    free(TAKE_PTR(u->path));
    return false;
}

void lvm_used_write(struct lvm_used *u)
{
    size_t line = UUID_LEN + 1, len = u->list.len * line;
    _cleanup_(freep) char *text = malloc(len + 1);

    if (u->list.len == 0 && u->fd >= 0) {
        unlink(u->path);
        close(TAKE_FD(u->fd));
        free(TAKE_PTR(u->path));
    }
    if (u->list.len == 0 || !text)
        return;
    for (unsigned i = 0; u->fd < 0 && i < OPEN_TRIES && !open_own(u); i++)
        ;
    for (size_t i = 0; i < u->list.len; i++)
        snprintf(text + i * line, line + 1, "%-38.38s\n", u->list.data[i]);
    if (u->fd >= 0 && pwrite(u->fd, text, len, 0) == (ssize_t)len)
        (void)!ftruncate(u->fd, (off_t)len);
}

static int add(struct lvm_used *u, const char *uuid, struct err *err)
{
    char *copy = strdup(uuid);

    if (!copy || vec_push(&u->list, copy) < 0) {
        free(copy);
        return err_set(err, -ENOMEM, "out of memory");
    }
    return 0;
}

int lvm_used_add(struct lvm_used *u, const char *uuid, struct err *err)
{
    if (has(u->list.data, u->list.len, uuid))
        return 0;
    int rc = add(u, uuid, err);
    if (rc == 0)
        lvm_used_write(u);
    crash_point("lvm-used-noted");
    return rc;
}

void lvm_used_remove(struct lvm_used *u, size_t index)
{
    free(u->list.data[index]);
    vec_remove_at(&u->list, index);
}

/* ---- those of others ---- */

/* One each call; NULL: no more. Our own is left out. */
static char *next_path(const struct lvm_used *u, DIR *d)
{
    size_t n = strlen(u->vg);

    for (struct dirent *e; (e = readdir(d));) {
        if (strncmp(e->d_name, u->vg, n) != 0 || strncmp(e->d_name + n, MARK, strlen(MARK)) != 0)
            continue;
        char *path = path_join(lock_dir(), e->d_name);

        if (path && !(u->path && strcmp(path, u->path) == 0))
            return path;
        free(path);
    }
    return NULL;
}

/* Its descriptor, locked; -1: its process lives, or it has gone. */
static int lock_dead(const char *path)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);

    if (fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) == 0 && intent_fd_is_named(fd, path))
        return fd;
    if (fd >= 0)
        close(fd);
    return -1;
}

bool lvm_used_any_dead(const struct lvm_used *u)
{
    DIR *d = opendir(lock_dir());
    bool found = false;
    char *path;

    while (d && !found && (path = next_path(u, d))) {
        _cleanup_(closep) int fd = lock_dead(path);

        found = fd >= 0;
        free(path);
    }
    if (d)
        closedir(d);
    return found;
}

static int read_file(const char *path, struct lvm_used *into, bool live)
{
    char line[UUID_LEN + 2];
    FILE *f = fopen(path, "re");
    int rc = 0;

    while (f && rc == 0 && fgets(line, sizeof(line), f)) {
        if (strlen(line) != UUID_LEN + 1 || line[UUID_LEN] != '\n')
            continue;
        line[UUID_LEN] = '\0';
        char *copy = live ? strdup(line) : NULL;
        if (live)
            rc = copy ? vec_push(&into->other, copy) : -ENOMEM;
        else if (!has(into->list.data, into->list.len, line))
            rc = add(into, line, NULL);
    }
    if (f)
        fclose(f);
    return rc;
}

/* First what lives. Nobody comes to need an LV of a dead one unseen: it would note it, and open it
 * again should it have been deactivated. */
static int read_all(struct lvm_used *u, bool live)
{
    DIR *d = opendir(lock_dir());
    int rc = 0;
    char *path;

    while (d && rc == 0 && (path = next_path(u, d))) {
        _cleanup_(closep) int fd = lock_dead(path);

        if ((fd < 0) == live)
            rc = read_file(path, u, live);
        if (rc == 0 && fd >= 0 && !live) {
            lvm_used_write(u);
            unlink(path);
        }
        free(path);
    }
    if (d)
        closedir(d);
    return rc;
}

int lvm_used_adopt(struct lvm_used *u, struct err *err)
{
    vec_for_each(it, &u->other)
        free(*it);
    vec_free(&u->other);
    int rc = read_all(u, true);
    if (rc == 0)
        rc = read_all(u, false);
    return rc < 0 ? err_set(err, rc, "out of memory") : 0;
}
