/*
 * `saferemove`: an LV whose last name goes is renamed (lvm_dir.h, LVM_DIR_WIPE), so that its name
 * is free at once, and overwritten with zeroes and removed by a process of its own, started by
 * whatever operation comes to its end and sees such LVs (pool_wipe_start).
 *
 *  1. One process a VG and host wipes (flock on <lock folder>/<vg>.wipe), one LV at a time.
 *  2. How far it came stands in a tag, which never says more than what is on the medium: noted
 * after a second, two, four, up to a minute. A process that was killed costs what it did since.
 *  3. An LV is removed only under its hidden name, wiped to its end.
 *  4. The pool's lock is held for a choice, a note and the removal, never while zeroes are written.
 *
 * A process that ends looks once more after it gave its lock back: LVs that came meanwhile may have
 * found it taken.
 */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include "base/check.h"
#include "rt/reactor.h"
#include "rt/timer.h"
#include "vol/store_lvm.h"
#include "vol/wipe.h"

#define LOCK_WAIT_NS  (2 * NSEC_PER_SEC)
#define LOCK_POLL_NS  (20 * NSEC_PER_MSEC)
#define NOTE_FIRST_NS (1 * NSEC_PER_SEC)
#define NOTE_MAX_NS   (60 * NSEC_PER_SEC)

static void (*start_wiper)(const struct pool *pool);

void vol_set_wiper(void (*start)(const struct pool *pool))
{
    start_wiper = start;
}

void pool_wipe_start(const struct pool *pool)
{
    if (start_wiper)
        start_wiper(pool);
}

bool pool_wipe_is_due(const struct lvm_vg *vg)
{
    vec_for_each(lv, &vg->lvs)
        if (lvm_dir_is_to_wipe_here(lv))
            return true;
    return false;
}

struct wiper {
    const struct vol_ctx *ctx;
    struct lvm_store *s;
    bool all_hosts;
    struct vol_wipe_result res;
    VEC(char *) left; /* UUIDs of those that cannot be wiped now */
    uint64_t before;  /* bytes of LVs that are done */
    uint64_t total;   /* and of all that were there when the last one was chosen */
    uint64_t note_ns; /* when to note how far it came */
};
struct victim {
    char uuid[64], name[LVM_NAME_MAX + 1];
    uint64_t len, wiped;
};

/* ---- one at a time ---- */

static int try_lock(const char *path, struct err *err)
{
    _cleanup_(closep) int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);

    if (fd < 0)
        return err_errno(err, -errno, "open '%s'", path);
    if (flock(fd, LOCK_EX | LOCK_NB) < 0)
        return errno == EWOULDBLOCK ? -EBUSY : err_errno(err, -errno, "lock '%s'", path);
    return TAKE_FD(fd);
}

static char *lock_path(const struct pool *pool)
{
    char *path = NULL;

    return asprintf(&path, "%s/%s.wipe", lock_dir(), pool->vgname) < 0 ? NULL : path;
}

bool pool_wipe_runs(const struct pool *pool)
{
    _cleanup_(freep) char *path = lock_path(pool);
    _cleanup_(closep) int fd = path ? open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW) : -1;

    return fd >= 0 && flock(fd, LOCK_SH | LOCK_NB) < 0 && errno == EWOULDBLOCK;
}

/* Another one that is about to end may not have seen what is there now. */
SUSPENDS static int lock_wiper(const struct wiper *w, int *ret_fd, struct err *err)
{
    uint64_t deadline = reactor_now() + LOCK_WAIT_NS;
    _cleanup_(freep) char *path = lock_path(w->s->pool);
    int fd;

    if (!path)
        return err_set(err, -ENOMEM, "out of memory");
    if (mkdir(lock_dir(), 0700) < 0 && errno != EEXIST)
        return err_errno(err, -errno, "make the folder of this host's locks, '%s'", lock_dir());
    while ((fd = try_lock(path, err)) == -EBUSY && reactor_now() < deadline)
        timer_sleep(LOCK_POLL_NS);
    if (fd == -EBUSY)
        return err_set(err, fd, "storage '%s' is being wiped by another process already",
                       w->s->pool->id);
    if (fd < 0)
        return fd;
    *ret_fd = fd;
    return 0;
}

/* ---- which ---- */

static bool is_due(const struct wiper *w, const struct lvm_lv *lv)
{
    bool due = w->all_hosts ? lvm_dir_is_gone(lv) && lvm_dir_is_ours(lv) && lv->open != LVM_YES
                            : lvm_dir_is_to_wipe_here(lv);

    vec_for_each(uuid, &w->left)
        due = due && strcmp(*uuid, lv->uuid) != 0;
    return due;
}

/* 1: *ret is the next one; 0: there is none. */
SUSPENDS static int choose(struct wiper *w, struct victim *ret, struct err *err)
{
    int found = 0, rc = lvm_store_begin(w->s, err);

    if (rc < 0)
        return rc;
    w->total = w->before;
    vec_for_each(lv, &w->s->dir.vg->lvs) {
        if (!is_due(w, lv))
            continue;
        w->total += lv->len;
        if (found++)
            continue;
        *ret = (struct victim){.len = lv->len, .wiped = lvm_dir_wiped(lv)};
        snprintf(ret->uuid, sizeof(ret->uuid), "%s", lv->uuid);
        snprintf(ret->name, sizeof(ret->name), "%s", lv->name);
    }
    lvm_store_end(w->s);
    return found > 0;
}

/* As it is now; NULL: gone, or no longer hidden. The pool's lock is held. */
static struct lvm_lv *find_victim(const struct wiper *w, const struct victim *v)
{
    vec_for_each(lv, &w->s->dir.vg->lvs)
        if (strcmp(lv->uuid, v->uuid) == 0 && lvm_dir_is_gone(lv) && lvm_dir_is_ours(lv))
            return lv;
    return NULL;
}

/* ---- one LV ---- */

SUSPENDS static int note(struct wiper *w, const struct victim *v, uint64_t done, struct err *err)
{
    int rc = lvm_store_begin(w->s, err);

    if (rc < 0)
        return rc;
    struct lvm_lv *lv = find_victim(w, v);
    rc = lv ? lvm_dir_set_wiped(&w->s->dir, lv, done, err)
            : err_set(err, -ENOENT, "the LV '%s' that is wiped has gone", v->name);
    lvm_store_end(w->s);
    return rc;
}

SUSPENDS static int remove_wiped(struct wiper *w, const struct victim *v, struct err *err)
{
    int rc = lvm_store_begin(w->s, err);

    if (rc < 0)
        return rc;
    crash_point("wipe-remove");
    struct lvm_lv *lv = find_victim(w, v);
    if (lv && lv->len != v->len)
        rc = err_set(err, -EBUSY, "the LV '%s' has another length now", v->name);
    else if (lv)
        rc = lvm_remove(&w->s->dir.lvm, (const char *const[]){lv->name, NULL}, err);
    lvm_dir_forget(&w->s->dir);
    lvm_store_end(w->s);
    return rc;
}

struct round {
    const struct wiper *w;
    uint64_t end_ns;
    bool over;
};

static bool go_on(void *ctx, uint64_t done, uint64_t total)
{
    struct round *round = ctx;
    const struct vol_ctx *vc = round->w->ctx;

    (void)total;
    if (vc->progress)
        vc->progress(vc->ctx, round->w->before + done, round->w->total);
    round->over = reactor_now() >= round->end_ns;
    return !round->over;
}

/* Until it is time to note how far it came, or to its end. */
SUSPENDS static int wipe_some(struct wiper *w, const char *path, struct victim *v, struct err *err)
{
    struct round round = {.w = w, .end_ns = reactor_now() + w->note_ns};
    const struct wipe_opts opts = {
        .from = v->wiped,
        .rate = w->s->pool->saferemove_rate,
        .step = w->s->pool->saferemove_step,
        .go_on = go_on,
        .ctx = &round,
    };
    uint64_t done;
    int rc = wipe(path, &opts, &done, err);

    w->res.bytes += done - v->wiped;
    v->wiped = done;
    w->note_ns = MIN(2 * w->note_ns, NOTE_MAX_NS);
    return rc == -ECANCELED && round.over ? 0 : rc;
}

SUSPENDS static int wipe_one(struct wiper *w, struct victim *v, struct err *err)
{
    _cleanup_(freep) char *path = path_join(w->s->root, v->name);
    int rc = path ? 0 : err_set(err, -ENOMEM, "out of memory");

    w->note_ns = NOTE_FIRST_NS;
    while (rc == 0 && v->wiped < v->len) {
        rc = wipe_some(w, path, v, err);
        if (rc == 0 && v->wiped < v->len) {
            rc = note(w, v, v->wiped, err);
            crash_point("wipe-noted");
        }
    }
    return rc < 0 ? rc : remove_wiped(w, v, err);
}

static int pass_over(struct wiper *w, const struct victim *v)
{
    char *uuid = strdup(v->uuid);

    if (uuid && vec_push(&w->left, uuid) == 0)
        return 0;
    free(uuid);
    return -ENOMEM;
}

SUSPENDS static int wipe_all(struct wiper *w, struct err *err)
{
    struct victim v;
    int rc;

    while ((rc = choose(w, &v, err)) > 0) {
        struct err why = {0};

        if (w->ctx->dry_run) {
            op_say(w->ctx, "would wipe and remove LV '%s/%s'", w->s->dir.lvm.vg, v.name);
            rc = pass_over(w, &v);
        } else if (wipe_one(w, &v, &why) < 0) {
            op_say(w->ctx, "LV '%s/%s' is left for later: %s", w->s->dir.lvm.vg, v.name,
                   err_text(&why));
            rc = pass_over(w, &v);
            w->res.left++;
        } else {
            w->before += v.len;
            w->res.wiped++;
        }
        if (rc < 0)
            return err_set(err, rc, "out of memory");
    }
    return rc;
}

SUSPENDS static int wipe_locked(struct wiper *w, struct err *err)
{
    _cleanup_(closep) int fd = -1;
    int rc = lock_wiper(w, &fd, err);

    return rc < 0 ? rc : wipe_all(w, err);
}

int vol_pool_wipe(const struct vol_ctx *ctx, const struct pool *pool,
                  const struct vol_wipe_opts *opts, struct vol_wipe_result *ret, struct err *err)
{
    struct wiper w = {.ctx = ctx, .all_hosts = opts->all_hosts};
    struct victim more;
    int rc = 0;

    if (pool->type != POOL_LVM)
        return err_set(err, -ENOTSUP,
                       "storage '%s' is no volume group: its files are not wiped when removed",
                       pool->id);
    rc = lvm_store_open(pool, &w.s, err);
    do {
        if (rc >= 0)
            rc = wipe_locked(&w, err);
        if (rc == 0)
            rc = choose(&w, &more, err);
    } while (rc > 0);
    if (w.s)
        lvm_store_close(w.s);
    vec_for_each(uuid, &w.left)
        free(*uuid);
    vec_free(&w.left);
    *ret = w.res;
    return rc;
}
