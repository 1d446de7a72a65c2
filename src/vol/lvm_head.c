/*
 * The first bytes of LVs, as they are on disk: see lvm_head.h.
 *
 *  1. Every read is O_DIRECT. This host's page cache of a PV knows nothing of what others wrote,
 * and nothing of what was written here through an LV either.
 *  2. A node counts only if its device is that LV, by the UUID that the kernel knows it by: names
 *     change hands, and links of LVs that are gone stay behind where udev does not run.
 *  3. PVs are opened for reading only, and only those that the report names.
 */
#include "vol/lvm_head.h"
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/sysmacros.h>
#include "base/bits.h"
#include "rt/buf.h"
#include "rt/offload.h"
#include "rt/wait.h"

#define ALIGN       4096u
#define NR_THREADS  8u  /* reads under way: a SAN answers many as fast as one */
#define DM_UUID_LEN 68u /* "LVM-", VG and LV without dashes */

/* ---- one device ---- */

/* The kernel's UUID of an active LV ends with the LV's, without dashes. */
static bool uuid_matches(const char *dm_uuid, const char *lv_uuid)
{
    size_t i = strlen(dm_uuid);

    if (i != DM_UUID_LEN || strncmp(dm_uuid, "LVM-", 4) != 0)
        return false;
    for (size_t k = strlen(lv_uuid); k > 0; k--)
        if (lv_uuid[k - 1] != '-' && (i == 0 || dm_uuid[--i] != lv_uuid[k - 1]))
            return false;
    return true;
}

/* Under LVM's DM_DEV_DIR there may be nodes of another kind. */
static bool is_node_of(int fd, const struct lvm_lv *lv)
{
    char path[64], uuid[DM_UUID_LEN + 8];
    struct stat st;

    if (fstat(fd, &st) < 0 || !S_ISBLK(st.st_mode))
        return false;
    snprintf(path, sizeof(path), "/sys/dev/block/%u:%u/dm/uuid", major(st.st_rdev),
             minor(st.st_rdev));
    _cleanup_(closep) int sys = open(path, O_RDONLY | O_CLOEXEC);
    if (sys < 0)
        return lvm_other_dev_dir() != NULL;
    ssize_t n = read(sys, uuid, sizeof(uuid) - 1);
    uuid[MAX(n, (ssize_t)0)] = 0;
    uuid[strcspn(uuid, "\n")] = 0;
    return uuid_matches(uuid, lv->uuid);
}

static int open_direct(const char *path)
{
    int fd = open(path, O_RDONLY | O_DIRECT | O_CLOEXEC | O_NONBLOCK);

    return fd < 0 ? -errno : fd;
}

/* The LV's own device; -ENOENT if it has none here, or one that would never answer (suspended).
 * What the report says of its activity may be of before it was activated. */
static int open_node(const struct lvm_lv *lv, const char *root)
{
    _cleanup_(freep) char *path = NULL;

    if (lv->suspended)
        return -ENOENT;
    if (asprintf(&path, "%s/%s", root, lv->name) < 0) {
        path = NULL;
        return -ENOMEM;
    }
    _cleanup_(closep) int fd = open_direct(path);
    if (fd < 0 || !is_node_of(fd, lv))
        return -ENOENT;
    return TAKE_FD(fd);
}

static int read_at(int fd, uint64_t off, void *buf, size_t len, struct err *err)
{
    for (size_t done = 0; done < len;) {
        ssize_t n = pread(fd, (char *)buf + done, len - done, (off_t)(off + done));

        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return err_errno(err, n < 0 ? -errno : -EIO, "read header");
        done += (size_t)n;
    }
    return 0;
}

/* Can len bytes be had from the PV? */
static int check_place(const struct lvm_lv *lv, size_t len, struct err *err)
{
    if (!lv->head_pv)
        return err_set(err, -ENODATA, "LV '%s' can be read only while it is active: %s", lv->name,
                       lv->partial ? "a physical volume is missing" : "it is no plain one");
    if (len > lv->head_len)
        return err_set(err, -ENODATA,
                       "LV '%s' can be read only while it is active: its first %zu bytes are in "
                       "several places",
                       lv->name, len);
    return 0;
}

static bool is_aligned_to(const void *buf, size_t len)
{
    return (uintptr_t)buf % ALIGN == 0 && len % ALIGN == 0 && len > 0;
}

/* ---- one LV ---- */

struct one {
    const struct lvm_lv *lv;
    const char *root;
    void *buf;
    size_t len;
    struct err *err;
};

static int read_one(void *arg)
{
    const struct one *one = arg;
    const struct lvm_lv *lv = one->lv;
    _cleanup_(closep) int node = open_node(lv, one->root);

    if (node >= 0)
        return read_at(node, 0, one->buf, one->len, one->err);
    int rc = node == -ENOMEM ? err_errno(one->err, node, "read header")
                             : check_place(lv, one->len, one->err);
    if (rc < 0)
        return rc;
    _cleanup_(closep) int pv = open_direct(lv->head_pv);
    if (pv < 0)
        return err_errno(one->err, pv, "open '%s'", lv->head_pv);
    return read_at(pv, lv->head_off, one->buf, one->len, one->err);
}

int lvm_head_read(const struct lvm_lv *lv, const char *root, void *buf, size_t len, struct err *err)
{
    if (!is_aligned_to(buf, len))
        return err_set(err, -EINVAL, "%zu bytes cannot be read so", len);
    return offload(read_one, &(struct one){lv, root, buf, len, err});
}

/* ---- many ---- */

void lvm_heads_init(struct lvm_heads *scan, const char *root)
{
    *scan = (struct lvm_heads){.root = root};
}

void lvm_heads_fini(struct lvm_heads *scan)
{
    vec_for_each(pv, &scan->pvs)
        closep(&pv->fd);
    vec_free(&scan->pvs);
}

static const struct lvm_heads_pv *find_pv(const struct lvm_heads *scan, const char *name)
{
    vec_for_each(pv, &scan->pvs)
        if (pv->name == name || strcmp(pv->name, name) == 0)
            return pv;
    return NULL;
}

struct batch {
    struct lvm_heads *scan;
    struct lvm_head *heads;
    size_t nr;
    size_t next; /* atomic: of the threads */
};

/* Before there are threads. */
static int open_pvs(void *arg)
{
    struct batch *batch = arg;
    struct lvm_heads *scan = batch->scan;

    for (size_t i = 0; i < batch->nr; i++) {
        const char *name = batch->heads[i].lv->head_pv;

        if (!name || find_pv(scan, name))
            continue;
        struct lvm_heads_pv pv = {.name = name, .fd = open_direct(name)};
        if (vec_push(&scan->pvs, pv) < 0) {
            closep(&pv.fd);
            return -ENOMEM;
        }
    }
    return 0;
}

/* Where to read from: *own is the LV's node, closed by the caller. */
static int find_place(const struct lvm_heads *scan, const struct lvm_lv *lv, size_t len, int *own,
                      uint64_t *ret_off, struct err *err)
{
    *own = open_node(lv, scan->root);
    *ret_off = 0;
    if (*own >= 0)
        return *own;
    int rc = check_place(lv, len, err);
    if (rc < 0)
        return rc;
    int fd = find_pv(scan, lv->head_pv)->fd;
    *ret_off = lv->head_off;
    return fd < 0 ? err_errno(err, fd, "open '%s'", lv->head_pv) : fd;
}

static int read_head(const struct lvm_heads *scan, struct lvm_head *h, void *buf, size_t len,
                     size_t *ret_need)
{
    _cleanup_(closep) int own = -1;
    uint64_t off;
    int fd = find_place(scan, h->lv, len, &own, &off, &h->err);
    int rc = fd < 0 ? fd : read_at(fd, off, buf, len, &h->err);

    if (rc == 0)
        rc = head_parse(buf, len, &h->head, ret_need, &h->err);
    if (rc == 0 && h->head.tables_end > h->lv->len) {
        head_fini(&h->head);
        rc = err_set(&h->err, -EUCLEAN, "the volume ends before its own tables");
    }
    return rc;
}

/* Once more with a longer buffer, for a name that lies further behind. */
static int read_long_head(const struct lvm_heads *scan, struct lvm_head *h, size_t len)
{
    _cleanup_(freep) void *buf = NULL;
    size_t need;

    len = align_up(len, ALIGN);
    if (posix_memalign(&buf, ALIGN, len) != 0)
        return err_set(&h->err, -ENOMEM, "out of memory");
    int rc = read_head(scan, h, buf, len, &need);
    return rc == -ENOBUFS ? err_set(&h->err, -EUCLEAN, "the header changes while it is read") : rc;
}

static int read_some(void *arg)
{
    struct batch *batch = arg;
    _cleanup_(freep) void *buf = NULL;
    size_t i, need;

    if (posix_memalign(&buf, ALIGN, HEAD_LEN) != 0)
        return -ENOMEM;
    while ((i = __atomic_fetch_add(&batch->next, 1, __ATOMIC_RELAXED)) < batch->nr) {
        struct lvm_head *h = &batch->heads[i];

        h->rc = read_head(batch->scan, h, buf, HEAD_LEN, &need);
        if (h->rc == -ENOBUFS)
            h->rc = read_long_head(batch->scan, h, need);
    }
    return 0;
}

SUSPENDS static int read_thread(void *arg)
{
    return offload(read_some, arg);
}

int lvm_heads_read(struct lvm_heads *scan, struct lvm_head *heads, size_t nr)
{
    struct batch batch = {scan, heads, nr, 0};
    struct co_group threads;

    for (size_t i = 0; i < nr; i++) {
        heads[i].head = (struct head){0};
        heads[i].err = (struct err){0};
    }
    int rc = offload(open_pvs, &batch);
    if (rc < 0)
        return rc;
    co_group_init(&threads);
    for (size_t i = 0; i < MIN(nr, (size_t)NR_THREADS) && rc == 0; i++)
        rc = co_group_spawn(&threads, read_thread, &batch);
    /* one that runs does the work of all */
    int all = co_group_wait(&threads);
    if (rc == 0)
        rc = all;
    if (batch.next >= nr)
        return 0;
    for (size_t i = 0; i < nr; i++)
        head_fini(&heads[i].head);
    return rc;
}
