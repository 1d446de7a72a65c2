/*
 * Image locks on byte ranges of the file, as QEMU takes them.
 *
 * Each permission is a bit. Who holds it has a shared OFD lock on byte 100 + bit; who does not
 * suffer that others hold it has one on byte 200 + bit. Taking them never conflicts; after taking
 * its bytes a program looks whether somebody else has the opposite byte, and gives up if so.
 * Two that start at the same moment may both give up (and try again a few times), never both go
 * on.
 *
 *              reader   writer         reader: what a QEMU with a read-only image or a backing
 *   read        held     held                  file takes
 *   write       unshared held+unshared writer: QEMU's, and the two forms of writing that leave
 *   unchanged            held+unshared         the content alone
 *   resize      unshared held+unshared
 *
 * A writer shares consistent reads, so that `qemu-img info -U` can look on; ordinary readers do
 * not share writing. (QEMU's read-only raw images do: as beside QEMU, so beside us.)
 */
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include "blk/internal.h"

#define LOCK_HELD_BASE     100
#define LOCK_UNSHARED_BASE 200
/* A visitor of a moment (`img info`, somebody who is refused) is waited for, and so is the kernel
 * ending the I/O of a killed server, which holds its locks that long. */
#define LOCK_TRIES    20u
#define LOCK_RETRY_US 10000u

enum lock_perm {
    PERM_READ = 1,
    PERM_WRITE = 2,
    PERM_WRITE_UNCHANGED = 4,
    PERM_RESIZE = 8,
    PERM_WRITES = PERM_WRITE | PERM_WRITE_UNCHANGED | PERM_RESIZE,
};
#define NR_PERMS 4u

struct lock_set { /* enum lock_perm bits */
    unsigned held, unshared;
};

static const struct lock_set lock_sets[] = {
    [BLK_LOCK_NONE] = {0, 0},
    [BLK_LOCK_READ] = {PERM_READ, PERM_WRITE | PERM_RESIZE},
    [BLK_LOCK_WRITE] = {PERM_READ | PERM_WRITES, PERM_WRITES},
};

/* ---- who has it ---- */

/* Does the descriptor /proc/PID/fd/FD have file locks? */
static bool fd_has_locks(const char *pid, const char *fd)
{
    char path[600], line[256];
    bool found = false;

    snprintf(path, sizeof(path), "/proc/%s/fdinfo/%s", pid, fd);
    FILE *file = fopen(path, "re");
    while (file && !found && fgets(line, sizeof(line), file))
        found = strncmp(line, "lock:", 5) == 0;
    if (file)
        fclose(file);
    return found;
}

static bool process_locks(const char *pid, const struct stat *want)
{
    char path[300];
    bool found = false;

    snprintf(path, sizeof(path), "/proc/%s/fd", pid);
    DIR *fds = opendir(path);
    for (struct dirent *e; fds && !found && (e = readdir(fds));) {
        struct stat st;

        found = fstatat(dirfd(fds), e->d_name, &st, 0) == 0 && st.st_dev == want->st_dev &&
                st.st_ino == want->st_ino && fd_has_locks(pid, e->d_name);
    }
    if (fds)
        closedir(fds);
    return found;
}

static void name_process(const char *pid, char *out, size_t size)
{
    char path[300], comm[32] = "";

    snprintf(path, sizeof(path), "/proc/%s/comm", pid);
    FILE *file = fopen(path, "re");
    if (file) {
        if (fgets(comm, sizeof(comm), file))
            comm[strcspn(comm, "\n")] = '\0';
        fclose(file);
    }
    snprintf(out, size, "%s (process %s)", comm[0] ? comm : "another program", pid);
}

/* The first other process with locks on the file; this one if there is no other. */
static void find_holder(int fd, char *out, size_t size)
{
    struct stat st;
    char self[24];
    DIR *proc = opendir("/proc");
    bool found = false;

    snprintf(self, sizeof(self), "%d", getpid());
    snprintf(out, size, "another program");
    for (struct dirent *e; proc && !found && fstat(fd, &st) == 0 && (e = readdir(proc));) {
        if (e->d_name[0] < '1' || e->d_name[0] > '9' || strcmp(e->d_name, self) == 0)
            continue;
        found = process_locks(e->d_name, &st);
        if (found)
            name_process(e->d_name, out, size);
    }
    if (proc)
        closedir(proc);
}

/* ---- bytes ---- */

static int byte_lock(int fd, short type, unsigned byte)
{
    struct flock fl = {.l_type = type, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};
    int rc;

    do {
        rc = fcntl(fd, F_OFD_SETLK, &fl) < 0 ? -errno : 0;
    } while (rc == -EINTR);
    return rc == -EACCES ? -EAGAIN : rc;
}

/* 1 if another open file has the byte, 0 if not, or -errno. */
static int byte_is_taken(int fd, unsigned byte)
{
    struct flock fl = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};

    if (fcntl(fd, F_OFD_GETLK, &fl) < 0)
        return -errno;
    return fl.l_type != F_UNLCK;
}

static int set_bytes(int fd, short type, struct lock_set bits)
{
    int rc = 0;

    for (unsigned i = 0; i < NR_PERMS && rc == 0; i++) {
        if (bits.held & 1u << i)
            rc = byte_lock(fd, type, LOCK_HELD_BASE + i);
        if (rc == 0 && (bits.unshared & 1u << i))
            rc = byte_lock(fd, type, LOCK_UNSHARED_BASE + i);
    }
    return rc;
}

static int check_others(int fd, struct lock_set bits, const char *name, struct err *err)
{
    int rc = 0, written = 0;

    for (unsigned i = 0; i < NR_PERMS && rc == 0; i++) {
        if (bits.unshared & 1u << i)
            rc = written = byte_is_taken(fd, LOCK_HELD_BASE + i);
        if (rc == 0 && (bits.held & 1u << i))
            rc = byte_is_taken(fd, LOCK_UNSHARED_BASE + i);
    }
    if (rc <= 0)
        return rc < 0 ? err_errno(err, rc, "look at the locks of '%s'", name) : 0;
    char who[384]; /* a program's name and what readdir may give as its number */
    find_holder(fd, who, sizeof(who));
    return err_set(err, -EBUSY, "'%s' is %s by %s", name, written > 0 ? "being written" : "in use",
                   who);
}

/* ---- locks ---- */

static struct lock_set bits_without(struct lock_set a, struct lock_set b)
{
    return (struct lock_set){a.held & ~b.held, a.unshared & ~b.unshared};
}

/* Takes `add` if others let us hold `all`, else leaves nothing behind. */
static int try_lock(int fd, struct lock_set add, struct lock_set all, const char *name,
                    struct err *err)
{
    int rc = set_bytes(fd, F_RDLCK, add);

    if (rc < 0)
        err_errno(err, rc, "lock '%s'", name);
    else
        rc = check_others(fd, all, name, err);
    if (rc < 0)
        set_bytes(fd, F_UNLCK, add);
    return rc;
}

int lock_change(int fd, enum blk_lock from, enum blk_lock to, const char *name, struct err *err)
{
    struct lock_set add = bits_without(lock_sets[to], lock_sets[from]);
    int rc = 0;

    if (add.held || add.unshared)
        rc = try_lock(fd, add, lock_sets[to], name, err);
    for (unsigned i = 1; rc == -EBUSY && i < LOCK_TRIES; i++) {
        /* not the same time for two that met */
        usleep(LOCK_RETRY_US + (unsigned)getpid() % 8 * LOCK_RETRY_US / 8);
        rc = try_lock(fd, add, lock_sets[to], name, err);
    }
    if (rc == 0)
        set_bytes(fd, F_UNLCK, bits_without(lock_sets[from], lock_sets[to]));
    return rc;
}

int lock_copy(int fd, enum blk_lock lock)
{
    return set_bytes(fd, F_RDLCK, lock_sets[lock]);
}

int blk_lock_fd(int fd, enum blk_lock lock, const char *name, struct err *err)
{
    return lock_change(fd, BLK_LOCK_NONE, lock, name, err);
}
