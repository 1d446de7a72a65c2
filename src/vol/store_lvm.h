/*
 * A volume group as a storage: what operations do with paths of a directory pool, done with LVs.
 *
 * The "directory" is <dev>/<vg> (dev: /dev, or LVM's DM_DEV_DIR), flat, and a path in it is an LV's
 * name. store_open() of an LVM pool enters it here; from then on the functions of store_dir.c know
 * its paths by their root and come here. Names can be linked and renamed over each other
 * (lvm_dir.h). Opening such a path in any layer (blk.h, provider) activates the LV first; what this
 * process has activated is deactivated by lvm_store_close().
 *
 * Each change reads the report anew and is made under the pool's lock, which a caller may hold
 * already. All functions wait for LVM's commands: they are called in coroutines of the manager or
 * of a server.
 */
#ifndef VARVE_VOL_STORE_LVM_H
#define VARVE_VOL_STORE_LVM_H

#include "rt/wait.h"
#include "vol/internal.h"
#include "vol/lvm_dir.h"
#include "vol/lvm_used.h"

struct lvm_store {
    char *root; /* absolute, normal */
    const struct pool *pool;
    struct lvm_dir dir;
    char owner[64]; /* tags of LVs under hidden names: whose volume the operation is on */
    char chain[LVM_NAME_MAX + 8]; /* and which; "": it has none */
    struct lvm_used used;
    unsigned locked;   /* depth: the pool's lock is held by this process */
    uint64_t seqno;    /* of the metadata that the report, with what was noted in it, stands for; 0:
                          unknown */
    unsigned commands; /* run when the report was read */
    bool fresh;        /* what it says of this host (active, open) is of now, too */
    struct pool_lock lock;
    struct co_mutex mutex; /* of owner, depth times: lvm_store_enter */
    struct co *mutex_owner;
    unsigned depth;
};

/* Enters the pool if it is not there yet; no command is run. Lives until the process ends. -EINVAL
 * the VG's name. */
int lvm_store_open(const struct pool *pool, struct lvm_store **ret, struct err *err);
/* The storage a path lies in (or is the root of); NULL: none, a path like any other. Text only. */
struct lvm_store *lvm_store_of(const char *path);
/* The LV's name in a path of it. */
const char *lvm_store_name(const struct lvm_store *s, const char *path);

/* The pool's lock and a fresh report with no rename half done; nests. -ENODEV with PVs missing. */
SUSPENDS int lvm_store_begin(struct lvm_store *s, struct err *err);
SUSPENDS void lvm_store_end(struct lvm_store *s);
/* The pool's lock for longer: others of this process may work under it, too, meanwhile (an image
 * that grows). */
SUSPENDS int lvm_store_hold(struct lvm_store *s, struct err *err);
SUSPENDS void lvm_store_let_go(struct lvm_store *s);
/* The report is one coroutine's at a time, from lvm_store_begin() to its end or between these;
 * nests. */
SUSPENDS void lvm_store_enter(struct lvm_store *s);
SUSPENDS void lvm_store_leave(struct lvm_store *s);
/* The report as of now; not settled, no lock: for looking. */
SUSPENDS int lvm_store_look(struct lvm_store *s, struct err *err);

/* The volume that an operation is on. Nothing where `images` is a directory. */
void lvm_store_set_owner(const char *images, const char *stem);
/* A new LV of at least len bytes with the tag of its guest, by its name, or ours; active. Its
 * content is anything. -EEXIST. */
SUSPENDS int lvm_store_create(struct lvm_store *s, const char *name, uint64_t len, struct err *err);
SUSPENDS int lvm_store_link(struct lvm_store *s, const char *old, const char *new, struct err *err);
SUSPENDS int lvm_store_rename(struct lvm_store *s, const char *old, const char *new,
                              struct err *err);
/* -EEXIST if `new` is there. */
SUSPENDS int lvm_store_publish(struct lvm_store *s, const char *old, const char *new,
                               struct err *err);
SUSPENDS int lvm_store_unlink(struct lvm_store *s, const char *name, struct err *err);
SUSPENDS bool lvm_store_exists(struct lvm_store *s, const char *name);
SUSPENDS bool lvm_store_same(struct lvm_store *s, const char *a, const char *b);
SUSPENDS int lvm_store_unlink_all(struct lvm_store *s, const char *prefix, struct err *err);
/* st_size its length, st_mtim when it was taken (else made), st_ino a hash of its UUID. */
SUSPENDS int lvm_store_stat(struct lvm_store *s, const char *name, struct stat *ret);
void lvm_store_fill_stat(const struct lvm_lv *lv, struct stat *ret);
/* Noted in a tag; an LV that is not there, or a failure, is no matter. */
SUSPENDS void lvm_store_set_taken(struct lvm_store *s, const char *name, time_t when);
/* Would LVM take the names of a volume (or a snapshot's element) with this stem? Text only. */
int lvm_store_check_name(const char *dir, const char *stem, struct err *err);
/* At most so long, in extents. */
SUSPENDS int lvm_store_reduce(struct lvm_store *s, const char *name, uint64_t len, struct err *err);
/* All of them with one command; those that are active are fine. */
SUSPENDS int lvm_store_activate(struct lvm_store *s, const char *const *names, struct err *err);
/* Deactivates what this process has activated and nobody has open. */
SUSPENDS void lvm_store_close(struct lvm_store *s);

#endif
