/*
 * A volume group as a storage: see store_lvm.h.
 *
 *  1. Names are changed under the pool's lock, on a report that was read under it.
 *  2. An LV that this process has opened is noted by its UUID, whatever it is renamed to; at the
 * end those that nobody has open are deactivated, in one command.
 *  3. The report that is kept between two changes serves questions about volumes whose lock is
 * held: nobody else changes those.
 */
#include "vol/store_lvm.h"
#include <fcntl.h>
#include <linux/fs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include "base/check.h"
#include "blk/blk.h"
#include "vol/lvm_seqno.h"

#define TAKEN_TAG    "varve-taken=" /* seconds since 1970 */
#define NODE_WAIT_MS 5000u          /* for udev */

static VEC(struct lvm_store *) stores;

/* ---- the storages ---- */

static struct lvm_store *find_store(const char *vg)
{
    vec_for_each(it, &stores)
        if (strcmp((*it)->dir.lvm.vg, vg) == 0)
            return *it;
    return NULL;
}

static bool owns(const char *path)
{
    const struct lvm_store *s = lvm_store_of(path);

    return s && path[strlen(s->root)];
}

SUSPENDS static int provide(const char *path, char **ret_node, char **ret_handle, struct err *err);
SUSPENDS static int extend(const char *handle, uint64_t len, struct err *err);

static const struct blk_provider provider = {owns, provide, extend};

int lvm_store_open(const struct pool *pool, struct lvm_store **ret, struct err *err)
{
    struct lvm_store *s = find_store(pool->vgname);
    _cleanup_(freep) char *joined = NULL;

    if (s) {
        *ret = s;
        return 0;
    }
    if (!lvm_vg_name_ok(pool->vgname))
        return err_set(err, -EINVAL, "storage '%s': '%s' cannot be a volume group's name", pool->id,
                       pool->vgname);
    s = calloc(1, sizeof(*s));
    joined = path_join(lvm_dev_dir(), pool->vgname);
    if (s && joined) {
        s->root = path_normal(joined);
        s->dir.lvm.vg = strdup(pool->vgname);
    }
    if (!s || !s->root || !s->dir.lvm.vg || vec_push(&stores, s) < 0)
        return err_set(err, -ENOMEM, "out of memory");
    s->pool = pool;
    s->dir.wipe = pool->saferemove;
    s->lock.fd = -1;
    co_mutex_init(&s->mutex, RANK_VOLUMES);
    lvm_used_init(&s->used, s->dir.lvm.vg);
    blk_set_provider(&provider);
    *ret = s;
    return 0;
}

struct lvm_store *lvm_store_of(const char *path)
{
    vec_for_each(it, &stores) {
        size_t len = strlen((*it)->root);

        if (strncmp(path, (*it)->root, len) == 0 && (!path[len] || path[len] == '/'))
            return *it;
    }
    return NULL;
}

const char *lvm_store_name(const struct lvm_store *s, const char *path)
{
    const char *name = path + strlen(s->root);

    return name + strspn(name, "/");
}

/* ---- one coroutine at a time ---- */

void lvm_store_enter(struct lvm_store *s)
{
    if (s->mutex_owner == co_self()) {
        s->depth++;
        return;
    }
    co_mutex_lock(&s->mutex);
    s->mutex_owner = co_self();
    s->depth = 1;
}

void lvm_store_leave(struct lvm_store *s)
{
    CHECK_THAT(s->mutex_owner == co_self() && s->depth > 0);
    if (--s->depth > 0)
        return;
    s->mutex_owner = NULL;
    co_mutex_unlock(&s->mutex);
}

/* ---- the report ---- */

/* What the report says of the VG concerns every command after it. */
SUSPENDS static int load(struct lvm_store *s, struct err *err)
{
    bool there = s->dir.vg;
    int rc = lvm_dir_load(&s->dir, err);

    if (rc < 0)
        return err_prefix(err, rc, "storage '%s'", s->pool->id);
    if (!there) {
        s->dir.lvm.shared = s->dir.vg->shared;
        s->seqno = s->dir.vg->seqno;
        s->commands = s->dir.lvm.counts.commands;
        s->fresh = true;
    }
    return 0;
}

/* The report is kept if nothing has changed since, by the metadata on disk. */
SUSPENDS static int load_again(struct lvm_store *s, struct err *err)
{
    uint64_t now;

    s->fresh = false;
    if (!s->dir.vg || !s->seqno || lvm_seqno_read(s->dir.vg, &now) < 0 || now != s->seqno)
        lvm_dir_forget(&s->dir);
    return load(s, err);
}

/* At the end of a section under the lock: its changes are in the report. */
SUSPENDS static void note_seqno(struct lvm_store *s)
{
    if (!s->dir.vg || s->dir.lvm.counts.commands == s->commands)
        return;
    s->commands = s->dir.lvm.counts.commands;
    if (lvm_seqno_read(s->dir.vg, &s->seqno) < 0)
        s->seqno = 0;
}

int lvm_store_look(struct lvm_store *s, struct err *err)
{
    lvm_store_enter(s);
    int rc = s->locked ? load(s, err) : load_again(s, err);
    lvm_store_leave(s);
    return rc;
}

/* A tool that was killed while it changed an active LV has left it suspended, and whoever reads it
 * waits. The report was made under LVM's own lock: nobody is about to resume it. */
SUSPENDS static int resume(struct lvm_store *s, struct err *err)
{
    VEC(const char *) names = {0};
    int rc = 0;

    vec_for_each(lv, &s->dir.vg->lvs)
        if (rc == 0 && lv->suspended && lvm_dir_is_ours(lv))
            rc = vec_push(&names, lv->name);
    if (rc == 0 && names.len)
        rc = vec_push(&names, NULL);
    if (rc < 0)
        rc = err_set(err, rc, "out of memory");
    else if (names.len && !s->dir.vg->unlocked) {
        rc = lvm_refresh(&s->dir.lvm, names.data, err);
        lvm_dir_forget(&s->dir);
    }
    vec_free(&names);
    return rc < 0 ? rc : load(s, err);
}

int lvm_store_begin(struct lvm_store *s, struct err *err)
{
    int rc = 0;

    lvm_store_enter(s);
    if (s->locked == 0) {
        rc = lock_pool(s->pool, s->root, &s->lock, err);
        if (rc < 0) {
            lvm_store_leave(s);
            return rc;
        }
    }
    rc = s->locked++ == 0 ? load_again(s, err) : load(s, err);
    if (rc == 0)
        rc = lvm_vg_check(s->dir.vg, err);
    if (rc == 0)
        rc = resume(s, err);
    if (rc == 0)
        rc = lvm_dir_settle(&s->dir, err);
    if (rc == 0 && s->fresh)
        rc = lvm_dir_sweep(&s->dir, err);
    if (rc == 0)
        rc = load(s, err);
    if (rc < 0)
        lvm_store_end(s);
    return rc;
}

void lvm_store_end(struct lvm_store *s)
{
    CHECK_THAT(s->locked > 0);
    if (s->locked == 1)
        note_seqno(s);
    if (--s->locked == 0)
        lock_give_back(&s->lock);
    lvm_store_leave(s);
}

int lvm_store_hold(struct lvm_store *s, struct err *err)
{
    int rc = lvm_store_begin(s, err);

    if (rc == 0)
        lvm_store_leave(s);
    return rc;
}

void lvm_store_let_go(struct lvm_store *s)
{
    lvm_store_enter(s);
    lvm_store_end(s);
}

bool lvm_store_exists(struct lvm_store *s, const char *name)
{
    lvm_store_enter(s);
    bool there = load(s, NULL) == 0 && lvm_dir_find(&s->dir, name);
    lvm_store_leave(s);
    return there;
}

bool lvm_store_same(struct lvm_store *s, const char *a, const char *b)
{
    lvm_store_enter(s);
    const struct lvm_lv *lv = load(s, NULL) == 0 ? lvm_dir_find(&s->dir, a) : NULL;
    bool same = lv && lv == lvm_dir_find(&s->dir, b);
    lvm_store_leave(s);
    return same;
}

static struct lvm_lv *find_uuid(const struct lvm_store *s, const char *uuid)
{
    vec_for_each(lv, &s->dir.vg->lvs)
        if (strcmp(lv->uuid, uuid) == 0)
            return lv;
    return NULL;
}

/* ---- what this process uses ---- */

/* An older report may have been true once. */
static bool is_active(const struct lvm_store *s, const struct lvm_lv *lv)
{
    _cleanup_(freep) char *node = s->fresh ? NULL : path_join(s->root, lv->name);
    struct stat st;

    return lv->active == LVM_YES && (s->fresh || (node && stat(node, &st) == 0));
}

static void note_active(struct lvm_store *s, const char *const *names, size_t nr)
{
    for (size_t i = 0; i + 1 < nr; i++)
        vec_for_each(lv, &s->dir.vg->lvs)
            if (strcmp(lv->name, names[i]) == 0)
                lv->active = LVM_YES;
}

SUSPENDS static void deactivate_idle(struct lvm_store *s, size_t from);

/* Before LVs are activated: what a killed process has left active here may be in another place by
 * now, or under a name that is another LV's, if another host has changed it. */
SUSPENDS static int drop_left(struct lvm_store *s, struct err *err)
{
    size_t own = s->used.list.len;

    if (!lvm_used_any_dead(&s->used))
        return 0;
    lvm_dir_forget(&s->dir); /* what is open now counts */
    int rc = lvm_store_begin(s, err);
    if (rc < 0)
        return rc;
    rc = lvm_used_adopt(&s->used, err);
    if (rc == 0)
        deactivate_idle(s, own);
    lvm_dir_forget(&s->dir);
    lvm_store_end(s);
    return rc;
}

SUSPENDS static int activate(struct lvm_store *s, const char *const *names, struct err *err)
{
    VEC(const char *) wanted = {0};
    int rc = drop_left(s, err);

    if (rc == 0)
        rc = s->locked ? load(s, err) : load_again(s, err);
    for (; rc == 0 && *names; names++) {
        const struct lvm_lv *lv = lvm_dir_find(&s->dir, *names);

        if (!lv)
            rc = err_set(err, -ENOENT, "there is no LV '%s/%s'", s->dir.lvm.vg, *names);
        else
            rc = lvm_used_add(&s->used, lv->uuid, err);
        if (rc == 0 && !is_active(s, lv) && vec_push(&wanted, lv->name) < 0)
            rc = err_set(err, -ENOMEM, "out of memory");
    }
    if (rc == 0 && wanted.len && vec_push(&wanted, NULL) < 0)
        rc = err_set(err, -ENOMEM, "out of memory");
    if (rc == 0 && wanted.len)
        rc = lvm_activate(&s->dir.lvm, wanted.data, LVM_PLAIN, err);
    crash_point("lvm-activated");
    if (rc == 0)
        note_active(s, wanted.data, wanted.len);
    vec_free(&wanted);
    return rc;
}

int lvm_store_activate(struct lvm_store *s, const char *const *names, struct err *err)
{
    lvm_store_enter(s);
    int rc = activate(s, names, err);
    lvm_store_leave(s);
    return rc;
}

/* As of the last report: something was unlinked while it was open. */
static bool has_gone(const struct lvm_store *s)
{
    if (!s->dir.vg)
        return true;
    vec_for_each(lv, &s->dir.vg->lvs)
        if (lvm_dir_is_gone(lv))
            return true;
    return false;
}

/* Still open: by this process, or by another, which looks after it if it has noted that. */
static bool is_needed(const struct lvm_store *s, const struct lvm_lv *lv)
{
    return lv->open == LVM_YES && !lvm_used_by_other(&s->used, lv->uuid);
}

/* Those noted by this process from the from-th on, or by one that was killed. One that another host
 * has removed meanwhile is known to the kernel alone. */
SUSPENDS static void deactivate_idle(struct lvm_store *s, size_t from)
{
    VEC(const char *) idle = {0};

    for (size_t i = s->used.list.len; i-- > from;) {
        const struct lvm_lv *lv = find_uuid(s, s->used.list.data[i]);

        if (lv && is_needed(s, lv))
            continue;
        if (!lv)
            (void)lvm_drop_device(&s->dir.lvm, s->dir.vg->uuid, s->used.list.data[i], NULL);
        if (!lv || lv->active == LVM_NO || lvm_used_by_other(&s->used, lv->uuid))
            lvm_used_remove(&s->used, i);
        else if (vec_push(&idle, lv->name) < 0)
            break;
    }
    crash_point("lvm-deactivate");
    bool some = idle.len > 0 && vec_push(&idle, NULL) == 0;
    bool done = some && lvm_deactivate(&s->dir.lvm, idle.data, NULL) == 0;
    crash_point("lvm-deactivated");
    /* one that somebody has opened meanwhile, if only to look what it is, is left to the next */
    for (size_t i = s->used.list.len; done && i-- > from;) {
        const struct lvm_lv *lv = find_uuid(s, s->used.list.data[i]);

        if (!lv || !is_needed(s, lv))
            lvm_used_remove(&s->used, i);
    }
    lvm_used_write(&s->used);
    vec_free(&idle);
}

SUSPENDS static void close_entered(struct lvm_store *s)
{
    struct err err = {0};

    bool swept = s->used.list.len > 0 || has_gone(s) || lvm_used_any_dead(&s->used);
    lvm_dir_forget(&s->dir); /* what is open now counts */
    if (!swept || lvm_store_begin(s, &err) < 0)
        return; /* they stay active: harmless on one host, and told by `pool status` */
    bool wipes = pool_wipe_is_due(s->dir.vg);
    if (lvm_used_adopt(&s->used, &err) == 0)
        deactivate_idle(s, 0);
    lvm_dir_forget(&s->dir);
    lvm_store_end(s);
    if (wipes)
        pool_wipe_start(s->pool);
}

void lvm_store_close(struct lvm_store *s)
{
    lvm_store_enter(s);
    close_entered(s);
    lvm_store_leave(s);
}

/* ---- the provider of devices ---- */

/* Of an LV that was active here while another host has extended it: the kernel has the old length.
 */
static uint64_t device_len(const char *node)
{
    _cleanup_(closep) int fd = open(node, O_RDONLY | O_CLOEXEC);
    uint64_t len = 0;

    return fd >= 0 && ioctl(fd, BLKGETSIZE64, &len) == 0 ? len : 0;
}

SUSPENDS static int provide_from(struct lvm_store *s, const char *path, char **ret_node,
                                 char **ret_handle, struct err *err)
{
    const char *name = lvm_store_name(s, path);
    const char *const names[] = {name, NULL};
    int rc = lvm_store_activate(s, names, err);

    if (rc < 0)
        return rc;
    const struct lvm_lv *lv = lvm_dir_find(&s->dir, name);
    if (asprintf(ret_handle, "%s/%s", s->dir.lvm.vg, lv->uuid) < 0)
        return err_set(err, -ENOMEM, "out of memory");
    rc = lvm_device(&s->dir.lvm, lv->name, NODE_WAIT_MS, ret_node, err);
    if (rc == 0 && device_len(*ret_node) != lv->len)
        rc = lvm_refresh(&s->dir.lvm, (const char *const[]){lv->name, NULL}, err);
    if (rc < 0) {
        free(TAKE_PTR(*ret_handle));
        free(TAKE_PTR(*ret_node));
    }
    return rc;
}

static int provide(const char *path, char **ret_node, char **ret_handle, struct err *err)
{
    struct lvm_store *s = lvm_store_of(path);

    lvm_store_enter(s);
    int rc = provide_from(s, path, ret_node, ret_handle, err);
    lvm_store_leave(s);
    return rc;
}

SUSPENDS static int extend_once(struct lvm_store *s, const char *uuid, uint64_t len,
                                struct err *err)
{
    int rc = lvm_store_begin(s, err);

    if (rc < 0)
        return rc;
    const struct lvm_lv *lv = find_uuid(s, uuid);
    crash_point("lvm-grow");
    rc = lv ? lvm_extend(&s->dir.lvm, lv->name, len, false, err)
            : err_set(err, -ENOENT, "the LV that is to grow has gone");
    crash_point("lvm-grown");
    lvm_dir_forget(&s->dir);
    lvm_store_end(s);
    return rc;
}

static int extend(const char *handle, uint64_t len, struct err *err)
{
    const char *slash = strchr(handle, '/');
    _cleanup_(freep) char *vg = strndup(handle, (size_t)(slash - handle));
    struct lvm_store *s = vg ? find_store(vg) : NULL;

    if (!s)
        return err_set(err, -ENOENT, "the LV that is to grow lies in no storage of ours");
    return extend_once(s, slash + 1, len, err);
}

/* ---- changes ---- */

void lvm_store_set_owner(const char *images, const char *stem)
{
    struct lvm_store *s = lvm_store_of(images);

    _cleanup_(freep) char *name = NULL;

    if (!s)
        return;
    if (!lvm_dir_owner(stem, s->owner, sizeof(s->owner)))
        snprintf(s->owner, sizeof(s->owner), "%s", LVM_DIR_TAG);
    name = file_join(images, stem, "qcow2");
    if (!name || !lvm_dir_chain(name, s->chain, sizeof(s->chain)))
        s->chain[0] = '\0';
}

int lvm_store_create(struct lvm_store *s, const char *name, uint64_t len, struct err *err)
{
    char owner[64], chain[sizeof(s->chain)];
    const char *tags[] = {owner, NULL, NULL};
    struct lvm_new lv = {.name = name, .len = len, .tags = tags, .mode = LVM_PLAIN};
    int rc = lvm_store_begin(s, err);

    if (rc < 0)
        return rc;
    bool is_guests = lvm_dir_owner(name, owner, sizeof(owner));
    if (!is_guests)
        snprintf(owner, sizeof(owner), "%s", *s->owner ? s->owner : LVM_DIR_TAG);
    if (is_guests ? lvm_dir_chain(name, chain, sizeof(chain)) : *s->chain)
        tags[1] = is_guests ? chain : s->chain;
    if (lvm_dir_find(&s->dir, name))
        rc = err_set(err, -EEXIST, "there is an LV '%s/%s' already", s->dir.lvm.vg, name);
    if (rc == 0) {
        crash_point("lvm-create");
        rc = lvm_create(&s->dir.lvm, &lv, err);
        crash_point("lvm-created");
        lvm_dir_forget(&s->dir);
    }
    if (rc == 0)
        rc = load(s, err);
    if (rc == 0)
        rc = lvm_used_add(&s->used, lvm_dir_find(&s->dir, name)->uuid, err);
    lvm_store_end(s);
    return rc;
}

int lvm_store_link(struct lvm_store *s, const char *old, const char *new, struct err *err)
{
    int rc = lvm_store_begin(s, err);

    if (rc < 0)
        return rc;
    rc = lvm_dir_link(&s->dir, old, new, err);
    lvm_store_end(s);
    return rc;
}

int lvm_store_rename(struct lvm_store *s, const char *old, const char *new, struct err *err)
{
    int rc = lvm_store_begin(s, err);

    if (rc < 0)
        return rc;
    rc = lvm_dir_rename(&s->dir, old, new, err);
    lvm_store_end(s);
    return rc;
}

int lvm_store_publish(struct lvm_store *s, const char *old, const char *new, struct err *err)
{
    int rc = lvm_store_begin(s, err);

    if (rc < 0)
        return rc;
    rc = lvm_dir_find(&s->dir, new)
             ? err_set(err, -EEXIST, "there is an LV '%s/%s' already", s->dir.lvm.vg, new)
             : lvm_dir_rename(&s->dir, old, new, err);
    lvm_store_end(s);
    return rc;
}

int lvm_store_unlink(struct lvm_store *s, const char *name, struct err *err)
{
    int rc = lvm_store_begin(s, err);

    if (rc < 0)
        return rc;
    rc = lvm_dir_unlink(&s->dir, name, err);
    lvm_store_end(s);
    return rc;
}

int lvm_store_reduce(struct lvm_store *s, const char *name, uint64_t len, struct err *err)
{
    int rc = lvm_store_begin(s, err);

    if (rc < 0)
        return rc;
    const struct lvm_lv *lv = lvm_dir_find(&s->dir, name);
    rc = lv ? lvm_reduce(&s->dir.lvm, lv->name, len, err)
            : err_set(err, -ENOENT, "there is no LV '%s/%s'", s->dir.lvm.vg, name);
    crash_point("lvm-resized");
    lvm_dir_forget(&s->dir);
    lvm_store_end(s);
    return rc;
}

int lvm_store_unlink_all(struct lvm_store *s, const char *prefix, struct err *err)
{
    int rc = lvm_store_begin(s, err);

    if (rc < 0)
        return rc;
    for (bool found = true; found && rc == 0;) { /* each removal makes the report a new one */
        found = false;
        rc = load(s, err);
        for (size_t i = 0; rc == 0 && !found && i < s->dir.vg->lvs.len; i++) {
            const struct lvm_lv *lv = &s->dir.vg->lvs.data[i];
            const char *name;

            for (unsigned n = 0; !found && (name = lvm_dir_name(&s->dir, lv, n)); n++)
                found = lvm_dir_is_ours(lv) && strncmp(name, prefix, strlen(prefix)) == 0;
            if (found) {
                _cleanup_(freep) char *copy = strdup(name);

                rc = copy ? lvm_dir_unlink(&s->dir, copy, err)
                          : err_set(err, -ENOMEM, "out of memory");
            }
        }
    }
    lvm_store_end(s);
    return rc;
}

/* ---- what a directory has in its inodes ---- */

static const char *taken_tag(const struct lvm_lv *lv)
{
    vec_for_each(tag, &lv->tags)
        if (strncmp(*tag, TAKEN_TAG, strlen(TAKEN_TAG)) == 0)
            return *tag;
    return NULL;
}

void lvm_store_fill_stat(const struct lvm_lv *lv, struct stat *ret)
{
    const char *taken = taken_tag(lv);

    *ret = (struct stat){.st_mode = S_IFBLK | 0660,
                         .st_nlink = 1,
                         .st_ino = text_hash(lv->uuid),
                         .st_size = (off_t)lv->len,
                         .st_blocks = (blkcnt_t)(lv->len / 512)};
    ret->st_mtim.tv_sec = taken ? strtoll(taken + strlen(TAKEN_TAG), NULL, 10) : lv->made;
}

int lvm_store_stat(struct lvm_store *s, const char *name, struct stat *ret)
{
    lvm_store_enter(s);
    int rc = load(s, NULL);
    const struct lvm_lv *lv = rc == 0 ? lvm_dir_find(&s->dir, name) : NULL;
    if (lv)
        lvm_store_fill_stat(lv, ret);
    lvm_store_leave(s);
    return rc == 0 && !lv ? -ENOENT : rc;
}

void lvm_store_set_taken(struct lvm_store *s, const char *name, time_t when)
{
    char tag[64];

    if (lvm_store_begin(s, NULL) < 0)
        return;
    snprintf(tag, sizeof(tag), TAKEN_TAG "%lld", (long long)when);
    const struct lvm_lv *lv = lvm_dir_find(&s->dir, name);
    const char *old = lv ? taken_tag(lv) : NULL;
    const char *const names[] = {lv ? lv->name : NULL, NULL}, *const add[] = {tag, NULL},
                      *const del[] = {old, NULL};
    if (lv && lvm_dir_is_ours(lv) && !(old && strcmp(old, tag) == 0))
        (void)lvm_change_tags(&s->dir.lvm, names, add, del, NULL);
    lvm_dir_forget(&s->dir);
    lvm_store_end(s);
}

int lvm_store_check_name(const char *dir, const char *stem, struct err *err)
{
    const struct lvm_store *s = lvm_store_of(dir);
    _cleanup_(freep) char *name = file_join(dir, stem, "qcow2");

    if (!name)
        return err_set(err, -ENOMEM, "out of memory");
    if (strncmp(stem, "varve-", 6) == 0)
        return err_set(err, -EINVAL, "'%s': names that begin with varve- are kept for locks", stem);
    if (!lvm_lv_name_ok(s->dir.lvm.vg, name))
        return err_set(err, -EINVAL,
                       "'%s' cannot be a logical volume's name in VG '%s': too long, or of a form "
                       "that LVM keeps for itself",
                       name, s->dir.lvm.vg);
    return 0;
}
