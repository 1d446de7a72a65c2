/*
 * Makes the leases of a storage: an LV varve-leases, or a file images/.varve/leases. Once, by one
 * host; what is there is never written over, whether anybody uses it or not.
 */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include "rt/offload.h"
#include "vol/internal.h"
#include "vol/lvm.h"

#define NODE_WAIT_MS 5000u

struct format_call {
    const char *path, *lockspace;
    bool own;
    unsigned leases, io_timeout;
    struct err *err;
};

static int call_format(void *arg)
{
    const struct format_call *c = arg;

    return leases_format(c->path, c->lockspace, c->own, c->leases, c->io_timeout, c->err);
}

struct count_call {
    struct lease_space *space;
    unsigned room, used;
    struct err *err;
};

static int call_count(void *arg)
{
    struct count_call *c = arg;

    return leases_count(c->space, &c->room, &c->used, c->err);
}

struct making {
    const struct vol_ctx *ctx;
    const struct pool *pool;
    const char *images;
    struct format_call format;
    char lockspace[160];
};

static uint64_t space_len(const struct making *m)
{
    return LEASES_HEAD_LEN + m->format.leases * LEASES_AREA_LEN;
}

static void say_done(const struct making *m, const char *verb)
{
    op_say(m->ctx, "%s %u leases, %llu MiB", verb, m->format.leases,
           (unsigned long long)(space_len(m) / LEASES_AREA_LEN));
}

/* Those that are there: joins, and says so. */
SUSPENDS static int show_there(struct making *m, struct err *err)
{
    struct locking how;
    int rc = locking_of(m->pool, m->images, &how, err);
    struct count_call call = {.err = err};

    if (rc < 0)
        return rc;
    call.space = how.space;
    rc = offload(call_count, &call);
    if (rc == 0)
        op_say(m->ctx, "the leases of '%s' are there: %u, of which %u have a name; nothing done",
               m->pool->id, call.room, call.used);
    return rc;
}

/* ---- a volume group ---- */

SUSPENDS static int format_lv(struct making *m, struct lvm *lvm, struct err *err)
{
    static const char *const tags[] = {"varve", NULL}, *const names[] = {LEASES_LV, NULL};
    struct lvm_new lv = {LEASES_LV, space_len(m), tags, lvm->shared ? LVM_SHARED : LVM_PLAIN};
    _cleanup_(freep) char *node = NULL;
    struct err ignored = {0};
    int rc = lvm_create(lvm, &lv, err);

    if (rc < 0)
        return rc;
    rc = lvm_device(lvm, LEASES_LV, NODE_WAIT_MS, &node, err);
    if (rc == 0) {
        m->format.path = node;
        rc = offload(call_format, &m->format);
    }
    m->format.path = NULL;
    if (rc < 0)
        lvm_remove(lvm, names, &ignored);
    return rc;
}

SUSPENDS static int make_in_vg(struct making *m, struct err *err)
{
    struct lvm lvm = {.vg = m->pool->vgname};
    _cleanup_(lvm_vg_freep) struct lvm_vg *vg = NULL;
    int rc = lvm_report(&lvm, &vg, err);

    if (rc == 0 && lvm_vg_find(vg, LEASES_LV)) {
        rc = show_there(m, err);
        return rc == -ENOENT
                   ? err_set(err, -EUCLEAN,
                             "'%s/" LEASES_LV
                             "' holds no leases: another host is at it, or was cut "
                             "off; if no host is, 'lvremove %s/" LEASES_LV "' and make them again",
                             lvm.vg, lvm.vg)
                   : rc;
    }
    if (rc == 0)
        rc = lvm_vg_check(vg, err);
    if (rc < 0)
        return rc;
    lvm.shared = vg->shared;
    if (vg->shared && strcmp(vg->lock_type, "sanlock") != 0)
        return err_set(err, -ENOTSUP, "'%s' is locked by lvmlockd with %s: leases need sanlock",
                       lvm.vg, vg->lock_type);
    if (!vg->shared && (!m->pool->lock || strcmp(m->pool->lock, "sanlock") != 0))
        return err_set(err, -EINVAL, "storage '%s' has no 'lock sanlock': it would not use leases",
                       m->pool->id);
    m->format.own = !vg->shared;
    if (vg->shared)
        snprintf(m->lockspace, sizeof(m->lockspace), "lvm_%s", lvm.vg);
    if (m->ctx->dry_run) {
        say_done(m, "would make");
        return 0;
    }
    rc = format_lv(m, &lvm, err);
    if (rc == 0)
        say_done(m, "made");
    return rc;
}

/* ---- a directory ---- */

/* Made under another name: what is there under the right one is complete. */
SUSPENDS static int make_file(struct making *m, const char *path, struct err *err)
{
    _cleanup_(freep) char *tmp = NULL;
    char id[24];

    intent_new_id(id);
    if (asprintf(&tmp, "%s.%s", path, id) < 0)
        return err_set(err, -ENOMEM, "out of memory");
    _cleanup_(closep) int fd = open(tmp, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0660);
    if (fd < 0)
        return err_errno(err, -errno, "make '%s'", tmp);
    int rc = ftruncate(fd, (off_t)space_len(m)) < 0 ? err_errno(err, -errno, "make '%s'", tmp) : 0;
    if (rc == 0) {
        m->format.path = tmp;
        rc = offload(call_format, &m->format);
    }
    if (rc == 0)
        rc = store_sync_file(tmp, err);
    if (rc == 0)
        rc = store_link(tmp, path, err);
    unlink(tmp);
    m->format.path = NULL;
    return rc;
}

SUSPENDS static int make_in_dir(struct making *m, struct err *err)
{
    _cleanup_(freep) char *dir = path_join(m->images, OWN_DIR);
    _cleanup_(freep) char *path = dir ? path_join(dir, LEASES_FILE) : NULL;

    if (!path)
        return err_set(err, -ENOMEM, "out of memory");
    if (!m->pool->lock || strcmp(m->pool->lock, "sanlock") != 0)
        return err_set(err, -EINVAL, "storage '%s' has no 'lock sanlock': it would not use leases",
                       m->pool->id);
    if (access(path, F_OK) == 0)
        return show_there(m, err);
    if (m->ctx->dry_run) {
        say_done(m, "would make");
        return 0;
    }
    int rc = store_mkdir(m->images, err);
    if (rc == 0)
        rc = store_mkdir(dir, err);
    if (rc == 0)
        rc = make_file(m, path, err);
    if (rc == -EEXIST) /* another host was first */
        return show_there(m, err);
    if (rc == 0)
        say_done(m, "made");
    return rc;
}

int vol_pool_init_locks(const struct vol_ctx *ctx, const char *pool_id, struct err *err)
{
    struct making m = {.ctx = ctx};
    _cleanup_(freep) char *images = NULL;
    uint32_t number = 0;
    int rc = config_pool(ctx->cfg, pool_id, &m.pool, err);

    if (rc == 0)
        rc = store_open(m.pool, &images, err);
    if (rc < 0)
        return rc;
    lock_tell(ctx);
    m.images = images;
    (void)!getrandom(&number, sizeof(number), 0);
    snprintf(m.lockspace, sizeof(m.lockspace), "varve-%.24s-%08x", m.pool->id, number);
    m.format = (struct format_call){.lockspace = m.lockspace,
                                    .own = true,
                                    .leases = m.pool->lock_leases ? (unsigned)m.pool->lock_leases
                                                                  : LEASES_DEFAULT,
                                    .io_timeout = (unsigned)m.pool->lease_timeout,
                                    .err = err};
    return m.pool->type == POOL_LVM ? make_in_vg(&m, err) : make_in_dir(&m, err);
}
