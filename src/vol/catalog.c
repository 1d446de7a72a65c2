/*
 * The catalog of a pool, made anew from its files (catalog_lvm.c: its LVs) at every use: names say
 * what a file is, headers say what it stands on. There is no second record that could disagree.
 *
 * A file <vmid>/<stem>.<fmt> is a volume, snap-<S>-<stem>.<fmt> a snapshot of it, base-* a base
 * image. A snapshot's file name can be read in several ways ("snap-a-b-vm-100-disk-0": a-b of
 * vm-100-disk-0, or a of b-vm-100-disk-0). Of the readings whose volume exists, the one whose chain
 * contains the file counts; else the one that Proxmox would take: the shortest volume name of its
 * form.
 */
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include "base/bits.h"
#include "vol/internal.h"

void cfile_free(struct cfile *f)
{
    if (!f)
        return;
    free(f->dir);
    free(f->name);
    free(f->path);
    free(f->vmid);
    free(f->stem);
    free(f->bad);
    free(f->backing);
    free(f->backing_format);
    free(f->backing_path);
    free(f->link_bad);
    free(f->snap);
    free(f);
}

static void cvol_free(struct cvol *v)
{
    if (!v)
        return;
    free(v->vmid);
    free(v->stem);
    free(v->broken);
    vec_free(&v->snaps);
    free(v);
}

void catalog_free(struct catalog *cat)
{
    if (!cat)
        return;
    vec_for_each(f, &cat->files)
        cfile_free(*f);
    vec_for_each(v, &cat->vols)
        cvol_free(*v);
    vec_for_each(s, &cat->strays)
        free(*s);
    vec_for_each(s, &cat->leftovers)
        free(*s);
    vec_free(&cat->files);
    vec_free(&cat->vols);
    vec_free(&cat->strays);
    vec_free(&cat->leftovers);
    free(cat->images);
    free(cat);
}

/* ---- files ---- */

int catalog_add_stray(struct catalog *cat, const char *path, const char *why)
{
    char *text = NULL;

    if (asprintf(&text, "%s: %s", path, why) < 0)
        return -ENOMEM;
    int rc = vec_push(&cat->strays, text);
    if (rc < 0)
        free(text);
    return rc;
}

int catalog_add_leftover(struct catalog *cat, char *path)
{
    int rc = vec_push(&cat->leftovers, path);

    if (rc < 0)
        free(path);
    return rc;
}

/* Nothing but zeroes, and small: an image whose first write never reached the disk. */
static bool is_blank(int fd, off_t len)
{
    uint8_t buf[512];

    if (len > (off_t)(4 * MIB))
        return false;
    for (off_t pos = 0; pos < len;) {
        ssize_t n = pread(fd, buf, sizeof(buf), pos);

        if (n <= 0)
            return false;
        for (ssize_t i = 0; i < n; i++)
            if (buf[i])
                return false;
        pos += n;
    }
    return true;
}

int cfile_resolve_backing(struct cfile *f)
{
    const char *name = f->backing;
    _cleanup_(freep) char *joined = NULL;

    if (strncmp(name, "file:", 5) == 0)
        name += 5;
    const char *colon = strchr(name, ':'), *slash = strchr(name, '/');
    if (colon && (!slash || colon < slash)) {
        f->link_bad = strdup("its backing file is given by a protocol, not as a path");
        return f->link_bad ? 0 : -ENOMEM;
    }
    if (name[0] != '/')
        joined = path_join(f->dir, name);
    f->backing_path = path_normal(joined ? joined : name);
    return f->backing_path ? 0 : -ENOMEM;
}

static int read_qcow2(struct cfile *f, int fd)
{
    struct err err = {0};
    struct head head;

    if (head_read(fd, &head, &err) < 0) {
        f->unfinished = is_blank(fd, f->st.st_size);
        f->bad = strdup(f->st.st_size == 0 ? "the file is empty" : err_text(&err));
        return f->bad ? 0 : -ENOMEM;
    }
    f->virtual_len = head.virtual_len;
    f->special = head.special;
    f->backing = TAKE_PTR(head.backing);
    f->backing_format = TAKE_PTR(head.backing_format);
    if ((uint64_t)f->st.st_size < head.tables_end) {
        f->bad = strdup("the file ends before its own tables");
        f->unfinished = (uint64_t)f->st.st_size <= head.first_guest;
    }
    head_fini(&head);
    return f->backing ? cfile_resolve_backing(f) : 0;
}

static int read_file(struct catalog *cat, int dir_fd, struct cfile *f)
{
    _cleanup_(closep) int fd =
        openat(dir_fd, f->name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY);

    if (fd < 0 || fstat(fd, &f->st) < 0) {
        f->bad = strdup(strerror(errno));
        return f->bad ? 0 : -ENOMEM;
    }
    struct statx more;
    if (statx(fd, "", AT_EMPTY_PATH, STATX_BTIME, &more) == 0 && more.stx_mask & STATX_BTIME)
        f->made = more.stx_btime.tv_sec;
    f->virtual_len = (uint64_t)f->st.st_size;
    return strcmp(f->format, "qcow2") == 0 ? read_qcow2(f, fd) : 0;
}

int catalog_add(struct catalog *cat, struct cfile *f)
{
    int rc = vec_push(&cat->files, f);

    if (rc < 0)
        cfile_free(f);
    return rc;
}

static int add_file(struct catalog *cat, int dir_fd, const char *dir, const char *vmid,
                    const char *name, const char *stem, const char *format)
{
    struct cfile *f = calloc(1, sizeof(*f));

    if (!f)
        return -ENOMEM;
    f->dir = strdup(dir);
    f->name = strdup(name);
    f->path = path_join(dir, name);
    f->vmid = strdup(vmid);
    f->stem = strdup(stem);
    f->format = format;
    int rc =
        f->dir && f->name && f->path && f->vmid && f->stem ? read_file(cat, dir_fd, f) : -ENOMEM;
    if (rc == 0)
        return catalog_add(cat, f);
    cfile_free(f);
    return rc;
}

static int scan_entry(struct catalog *cat, int dir_fd, const char *dir, const char *vmid,
                      const char *name)
{
    char stem[256];
    const char *format;
    struct stat st;

    if (fstatat(dir_fd, name, &st, AT_SYMLINK_NOFOLLOW) < 0)
        return errno == ENOENT ? 0 : -errno;
    if (S_ISDIR(st.st_mode))
        return 0;
    _cleanup_(freep) char *path = path_join(dir, name);
    if (!path)
        return -ENOMEM;
    if (strncmp(name, OWN_PREFIX, strlen(OWN_PREFIX)) == 0)
        return catalog_add_leftover(cat, TAKE_PTR(path));
    if (!S_ISREG(st.st_mode))
        return catalog_add_stray(cat, path, "not a plain file");
    if (!file_split(FORM_FILE, name, stem, sizeof(stem), &format))
        return catalog_add_stray(cat, path, "not a .raw or .qcow2 file");
    if (!stem_ok(stem) && strncmp(stem, "snap-", 5) != 0)
        return catalog_add_stray(cat, path, "not a valid volume name");
    return add_file(cat, dir_fd, dir, vmid, name, stem, format);
}

static int scan_dir(struct catalog *cat, const char *dir, const char *vmid)
{
    DIR *d = opendir(dir);
    int rc = 0;

    if (!d)
        return errno == ENOENT ? 0 : -errno;
    for (struct dirent *e; rc == 0 && (e = readdir(d));) {
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0)
            continue;
        if (!*vmid && vmid_ok(e->d_name) && e->d_type != DT_REG) {
            _cleanup_(freep) char *sub = path_join(dir, e->d_name);

            rc = sub ? scan_dir(cat, sub, e->d_name) : -ENOMEM;
        } else {
            rc = scan_entry(cat, dirfd(d), dir, vmid, e->d_name);
        }
    }
    closedir(d);
    return rc;
}

static int by_path(const void *a, const void *b)
{
    return strcmp((*(struct cfile *const *)a)->path, (*(struct cfile *const *)b)->path);
}

struct cfile *catalog_file(const struct catalog *cat, const char *path)
{
    size_t lo = 0, hi = cat->files.len;

    while (lo < hi) {
        size_t mid = (lo + hi) / 2;
        int c = strcmp(path, cat->files.data[mid]->path);

        if (c == 0)
            return cat->files.data[mid];
        if (c < 0)
            hi = mid;
        else
            lo = mid + 1;
    }
    return NULL;
}

/* ---- volumes ---- */

static int compare_vol(const char *vmid, const char *stem, const char *format, const struct cvol *v)
{
    size_t la = strlen(vmid), lb = strlen(v->vmid);
    int c = la != lb ? (la < lb ? -1 : 1) : strcmp(vmid, v->vmid);

    if (c == 0)
        c = strcmp(stem, v->stem);
    return c || !format ? c : strcmp(format, v->format);
}

static int by_name(const void *a, const void *b)
{
    const struct cvol *v = *(struct cvol *const *)a;

    return compare_vol(v->vmid, v->stem, v->format, *(struct cvol *const *)b);
}

static void sort_vols(struct catalog *cat)
{
    if (cat->vols.len)
        sort_items(cat->vols.data, cat->vols.len, sizeof(cat->vols.data[0]), by_name);
}

/* Without a format: the qcow2 one if both are there ("qcow2" sorts first). */
struct cvol *catalog_vol(const struct catalog *cat, const char *vmid, const char *stem,
                         const char *format)
{
    size_t lo = 0, hi = cat->vols.len;

    while (lo < hi) {
        size_t mid = (lo + hi) / 2;

        if (compare_vol(vmid, stem, format, cat->vols.data[mid]) <= 0)
            hi = mid;
        else
            lo = mid + 1;
    }
    if (lo < cat->vols.len && compare_vol(vmid, stem, format, cat->vols.data[lo]) == 0)
        return cat->vols.data[lo];
    return NULL;
}

static struct cvol *add_vol(struct catalog *cat, const char *vmid, const char *stem,
                            const char *format)
{
    struct cvol *v = calloc(1, sizeof(*v));

    if (!v)
        return NULL;
    v->vmid = strdup(vmid);
    v->stem = strdup(stem);
    v->format = format;
    v->base = stem_is_base(stem);
    if (!v->vmid || !v->stem || vec_push(&cat->vols, v) < 0) {
        cvol_free(v);
        return NULL;
    }
    return v;
}

static bool is_snap_file(const struct catalog *cat, const struct cfile *f)
{
    return stem_is_snap(cat->form, f->stem);
}

static int add_volumes(struct catalog *cat)
{
    vec_for_each(it, &cat->files) {
        struct cfile *f = *it;
        struct err err = {0};

        if (is_snap_file(cat, f))
            continue;
        if (cat->form == FORM_FILE && !*f->vmid &&
            stem_check_new(cat->images, "", f->stem, &err) < 0) {
            if (catalog_add_stray(cat, f->path,
                                  "a guest's volume outside of the guest's directory") < 0)
                return -ENOMEM;
            continue;
        }
        f->vol = add_vol(cat, f->vmid, f->stem, f->format);
        if (!f->vol)
            return -ENOMEM;
        f->vol->current = f;
    }
    sort_vols(cat);
    return 0;
}

/* ---- reading a snapshot's file name ---- */

static bool chain_contains(const struct cvol *v, const struct cfile *file)
{
    unsigned steps = 0;

    for (const struct cfile *f = v->current; f && steps < 4096; f = f->parent, steps++)
        if (f == file)
            return true;
    return false;
}

static struct cvol *best_reading(const struct catalog *cat, const char *vmid, const char *stem,
                                 const struct cfile *file, char **ret_snap)
{
    char snap[SNAP_NAME_MAX + 1], best_snap[SNAP_NAME_MAX + 1] = "", buf[256];
    struct cvol *best = NULL;
    size_t pos = 0;
    int best_score = 0;

    for (const char *v; (v = snap_reading(cat->form, stem, &pos, buf, snap));) {
        struct cvol *vol = catalog_vol(cat, vmid, v, NULL);
        int score = !vol                                ? 0
                    : file && chain_contains(vol, file) ? 3
                    : stem_is_proxmox(v, vmid)          ? 2
                                                        : 1;

        if (score > best_score) {
            best = vol;
            best_score = score;
            memcpy(best_snap, snap, sizeof(snap));
        }
    }
    if (!best)
        return NULL;
    *ret_snap = strdup(best_snap);
    return *ret_snap ? best : NULL;
}

struct cvol *catalog_read_snap_name(const struct catalog *cat, const char *vmid, const char *stem,
                                    char **ret_snap)
{
    return best_reading(cat, vmid, stem, NULL, ret_snap);
}

/* The volume whose current image is lost, as far as a snapshot's name tells; false: it does not. */
static bool lost_volume(const struct catalog *cat, const struct cfile *f, char name[256],
                        char snap[SNAP_NAME_MAX + 1])
{
    char other_name[256], other[SNAP_NAME_MAX + 1], buf[256];
    bool guests = cat->form == FORM_LV || *f->vmid; /* names have a form that tells their start */
    size_t pos = 0;
    struct err err = {0};

    for (const char *v; (v = snap_reading(cat->form, f->stem, &pos, buf, snap));) {
        bool fits = stem_is_proxmox(v, f->vmid);

        if (!guests || (cat->form == FORM_LV && !fits))
            fits = stem_check_new(cat->images, "", v, &err) == 0;
        if (!fits)
            continue;
        snprintf(name, 256, "%s", v);
        /* free names have no such form: one reading only */
        return stem_is_proxmox(v, f->vmid) ||
               !snap_reading(cat->form, f->stem, &pos, other_name, other);
    }
    return false;
}

static int adopt(struct cvol *v, struct cfile *f, char *snap)
{
    f->vol = v;
    f->snap = snap;
    return snap ? vec_push(&v->snaps, f) : -ENOMEM;
}

/* Snapshots whose volume has no current image make up a volume without one. */
static int add_lost(struct catalog *cat, struct cfile *f)
{
    char snap[SNAP_NAME_MAX + 1], stem[256];

    if (!lost_volume(cat, f, stem, snap))
        return catalog_add_stray(cat, f->path, "a snapshot of no volume that is here");
    struct cvol *v = NULL;
    vec_for_each(it, &cat->vols)
        if (!(*it)->current && strcmp((*it)->vmid, f->vmid) == 0 && strcmp((*it)->stem, stem) == 0)
            v = *it;
    if (!v)
        v = add_vol(cat, f->vmid, stem, "qcow2");
    return v ? adopt(v, f, strdup(snap)) : -ENOMEM;
}

static int add_snapshots(struct catalog *cat)
{
    int rc = 0;

    /* all readings are taken before a lost volume is added: those are no candidates */
    vec_for_each(it, &cat->files) {
        char *snap = NULL;
        struct cvol *v;

        if (!is_snap_file(cat, *it))
            continue;
        v = best_reading(cat, (*it)->vmid, (*it)->stem, *it, &snap);
        if (v && (rc = adopt(v, *it, snap)) < 0)
            return rc;
    }
    vec_for_each(it, &cat->files)
        if (is_snap_file(cat, *it) && !(*it)->vol && (rc = add_lost(cat, *it)) < 0)
            return rc;
    sort_vols(cat);
    return 0;
}

/* ---- scan ---- */

static void link_parents(struct catalog *cat)
{
    vec_for_each(it, &cat->files) {
        if ((*it)->backing_path)
            (*it)->parent = catalog_file(cat, (*it)->backing_path);
    }
}

static void mark_deleting(struct catalog *cat)
{
    struct intents list = {0};

    if (intents_load(cat->images, false, &list, NULL) < 0)
        return; /* whoever is to change something hears of it from recovery */
    vec_for_each(it, &list.list) {
        const char *name = intent_name((*it)->json, "snap_file");
        _cleanup_(freep) char *dir = intent_dir(cat->images, (*it)->json);
        _cleanup_(freep) char *path = dir && name ? path_join(dir, name) : NULL;
        struct cfile *f = path ? catalog_file(cat, path) : NULL;

        if (f && strcmp(intent_op(*it), "destroy-snapshot") == 0)
            f->deleting = true;
    }
    intents_fini(&list);
}

int catalog_scan(const struct pool *pool, struct catalog **ret, struct err *err)
{
    struct catalog *cat = calloc(1, sizeof(*cat));

    if (!cat)
        return err_set(err, -ENOMEM, "out of memory");
    cat->pool = pool;
    int rc = store_open(pool, &cat->images, err);
    if (rc < 0) {
        catalog_free(cat);
        return rc;
    }
    cat->form = name_form(cat->images);
    rc = cat->form == FORM_LV ? catalog_scan_lvm(cat, err) : scan_dir(cat, cat->images, "");
    if (cat->files.len)
        sort_items(cat->files.data, cat->files.len, sizeof(cat->files.data[0]), by_path);
    link_parents(cat);
    if (rc == 0)
        rc = add_volumes(cat);
    if (rc == 0)
        rc = add_snapshots(cat);
    if (rc == 0)
        rc = catalog_link(cat);
    if (rc < 0) {
        if (cat->form == FORM_FILE || !err || !err->rc) /* LVM has said more */
            rc = err_errno(err, rc, "storage '%s': list '%s'", pool->id, cat->images);
        catalog_free(cat);
        return rc;
    }
    mark_deleting(cat);
    *ret = cat;
    return 0;
}
