/* Private to vol: names, the scan of a directory pool, intents, locks, durable steps, frames. */
#ifndef VARVE_VOL_INTERNAL_H
#define VARVE_VOL_INTERNAL_H

#include <jansson.h>
#include <sys/stat.h>
#include "base/vec.h"
#include "qcow2/image.h"
#include "vol/intent.h"
#include "vol/lock.h"
#include "vol/vol.h"

#define SNAP_NAME_MAX 40u          /* bytes */
#define STEM_MAX      200u         /* "snap-<S>-<stem>.qcow2" fits into a file name */
#define OWN_DIR       ".varve"     /* beside the volumes: locks and intents */
#define OWN_PREFIX    ".varve-"    /* temporary files beside the volumes */
#define THIN_CHUNK    (1ull << 30) /* bytes that an LV begins with */

/* ---- name.c ---- */
bool pool_id_ok(const char *id);
bool vmid_ok(const char *vmid);
bool stem_ok(const char *stem);
bool snap_name_ok(const char *snap);
/* "vm-<vmid>-x" or "base-<vmid>-x" */
bool stem_is_proxmox(const char *stem, const char *vmid);
bool stem_is_base(const char *stem);
/* A name a new volume may have. */
int stem_check_new(const char *dir, const char *vmid, const char *stem, struct err *err);
/* How names look depends on the storage that the directory lies in (name_form). */
enum name_form {
    FORM_FILE, /* <stem>.<raw|qcow2>, snap-<S>-<stem>.<format> */
    FORM_LV,   /* <stem>[.qcow2], snap_<stem>_<S>[.qcow2] */
};
enum name_form name_form(const char *dir);
/* Splits off the format; *ret_format is a constant. false: a suffix that no image of ours has. */
bool file_split(enum name_form form, const char *file, char *stem, size_t stem_len,
                const char **ret_format);
bool stem_is_snap(enum name_form form, const char *stem);
/* Walks the readings of a snapshot's stem, from the shortest volume name on: *pos begins with 0.
 * NULL: no more; else the volume's stem, valid until the next call, and its snapshot's name. */
const char *snap_reading(enum name_form form, const char *stem, size_t *pos, char buf[256],
                         char snap[SNAP_NAME_MAX + 1]);
/* All freed by the caller; NULL: out of memory. */
char *file_join(const char *dir, const char *stem, const char *format);
char *snap_file(const char *dir, const char *snap, const char *stem, const char *format);
/* The stem of a snapshot's file. */
char *snap_stem(enum name_form form, const char *snap, const char *stem);

/* ---- head.c: what a listing needs of a qcow2 header ---- */
struct head {
    uint64_t virtual_len;
    uint64_t tables_end;  /* the file must at least reach this far */
    uint64_t first_guest; /* lowest host offset at which guest data could lie */
    const char *special;  /* what an overlay or a merge would break; NULL: nothing */
    char *backing, *backing_format;
};
/* Reads at most the first cluster. -EINVAL not qcow2, -EUCLEAN contradictions; err has the reason.
 */
int head_read(int fd, struct head *ret, struct err *err);
/* The same from the first len bytes of an image: HEAD_LEN (or what there is) do for nearly every
 * one. -ENOBUFS: *ret_need bytes do for this one (no more than a cluster). data: aligned to 8. */
#define HEAD_LEN 4096u
int head_parse(const void *data, size_t len, struct head *ret, size_t *ret_need, struct err *err);
void head_fini(struct head *head);

/* ---- catalog.c: one scan of a pool's directory ---- */
struct cvol;
struct cfile { /* one .raw or .qcow2 file */
    char *dir, *name, *path;
    char *vmid; /* "" for the top directory */
    char *stem;
    const char *format; /* by suffix: that never lies */
    struct stat st;
    int64_t made;    /* seconds since 1970: when the file was created; 0: unknown */
    char *bad;       /* why it cannot be used as an image; NULL: readable */
    bool unfinished; /* bad, and provably without guest data: created and never completed */
    uint64_t virtual_len;
    const char *special;            /* head.special */
    char *backing, *backing_format; /* as recorded */
    char *backing_path;             /* absolute, without . and .. */
    char *link_bad;                 /* why the backing file cannot be used */
    struct cfile *parent;           /* in this pool; NULL: none or elsewhere */
    struct cvol *vol;               /* whose element it is; NULL: stray */
    char *snap;                     /* NULL: the current element */
    bool deleting;
    unsigned nb_children;
};
struct cvol {
    char *vmid, *stem;
    const char *format;
    struct cfile *current; /* NULL: missing */
    VEC(struct cfile *) snaps;
    char *broken;
    bool base;
};
struct catalog {
    const struct pool *pool;
    char *images; /* absolute directory */
    enum name_form form;
    VEC(struct cfile *) files; /* by path */
    VEC(struct cvol *) vols;   /* by vmid and stem */
    VEC(char *) strays;        /* "path: why" of files that are no image of ours */
    VEC(char *) leftovers;     /* paths of own temporary files */
};
/* Blocks on the file system (a listing of 200 images is a few milliseconds). */
int catalog_scan(const struct pool *pool, struct catalog **ret, struct err *err);
/* ---- catalog_lvm.c: the same of a volume group, from its report and the images' heads ---- */
int catalog_scan_lvm(struct catalog *cat, struct err *err);
/* The LVs of a volume, and of what it stands on, are active: one command. Nothing where they are
 * files. */
SUSPENDS int cvol_activate(const struct catalog *cat, const struct cvol *vol, struct err *err);
/* catalog.c, for it: takes the file; what stands in a header is in it. */
int catalog_add(struct catalog *cat, struct cfile *f);
int catalog_add_stray(struct catalog *cat, const char *path, const char *why);
int catalog_add_leftover(struct catalog *cat, char *path); /* takes the path */
void cfile_free(struct cfile *f);
int cfile_resolve_backing(struct cfile *f);
void catalog_free(struct catalog *cat);
static inline void catalog_freep(struct catalog **cat)
{
    catalog_free(*cat);
}
struct cfile *catalog_file(const struct catalog *cat, const char *path);
/* By name as a user gives it: alias ids, clone ids, missing suffix. -ENOENT, -EINVAL ambiguous. */
int catalog_find(const struct catalog *cat, const struct vol_name *name, struct cvol **ret,
                 struct err *err);
struct cvol *catalog_vol(const struct catalog *cat, const char *vmid, const char *stem,
                         const char *format);
struct cfile *cvol_snap(const struct cvol *vol, const char *snap);
/* The canonical id; the caller frees. */
char *cvol_id(const struct catalog *cat, const struct cvol *vol);
/* "VOL" or "VOL@SNAP" of an element; the caller frees. */
char *cfile_id(const struct catalog *cat, const struct cfile *file);
/* Which volume a file name "snap-..." belongs to: NULL: none. *ret_snap points into `stem`'s copy:
 * freed by the caller. */
struct cvol *catalog_read_snap_name(const struct catalog *cat, const char *vmid, const char *stem,
                                    char **ret_snap);
/* -EEXIST if the new snapshot's file name is taken or reads as another volume's. */
int catalog_check_new_snap(const struct catalog *cat, const struct cvol *vol, const char *snap,
                           struct err *err);
/* The same for a snapshot of a volume that is to come. */
int catalog_check_new_snap_file(const struct catalog *cat, const char *vmid, const char *stem,
                                const char *snap, struct err *err);
/* -EEXIST if a new volume's name is taken or would take over existing snapshot files. */
int catalog_check_new_vol(const struct catalog *cat, const char *vmid, const char *stem,
                          struct err *err);
/* links.c: fills parents, children, broken volumes */
int catalog_link(struct catalog *cat);
/* Children of an element in the whole pool; the caller frees the array only. */
struct cfile **cfile_children(const struct catalog *cat, const struct cfile *file,
                              unsigned *ret_nr);
/* The only snapshot on which a lost current element can have stood; NULL: none or several. */
struct cfile *cvol_last_leaf(const struct catalog *cat, const struct cvol *vol);

/* ---- runtime.c ---- */
const char *runtime_dir(void);
uint64_t text_hash(const char *s);
/* Does somebody answer on this socket? */
bool socket_is_served(const char *path);
char *cvol_qmp_path(const struct catalog *cat, const struct cvol *vol);

/* ---- store_dir.c: the steps on files, each durable when it returns ---- */
/* The directory of volumes; checks mount point and existence. */
int store_open(const struct pool *pool, char **ret_images, struct err *err);
int store_sync_dir(const char *dir, struct err *err);
int store_sync_file(const char *path, struct err *err);
int store_link(const char *old, const char *new, struct err *err);    /* -EEXIST */
int store_rename(const char *old, const char *new, struct err *err);  /* over new */
int store_publish(const char *tmp, const char *new, struct err *err); /* never over new */
int store_unlink(const char *path, struct err *err);                  /* missing is fine */
/* All names in a directory that begin so. */
int store_unlink_all(const char *dir, const char *prefix, struct err *err);
/* A new image, opened for writing: a file that grows, or an LV of len bytes with any content. */
struct blk;
SUSPENDS int store_create(const char *path, uint64_t len, struct blk **ret, struct err *err);
/* So long an LV is made for a new image: in full, or a first chunk of a pool with thin LVs. Of
 * files 0. */
struct image_create_opts;
int store_image_len(const struct pool *pool, const struct image_create_opts *opts, uint64_t *ret,
                    struct err *err);
/* How an image there grows while it is written. */
struct image_grow_opts store_grow_opts(const struct pool *pool);
bool store_is_thin(
    const struct pool *pool); /* an image there begins with less than its full length */
int store_set_mode(const char *path, mode_t mode, struct err *err); /* LVs have none */
/* lstat; of an LV its length and when it was taken. 0 or -errno. */
int store_stat(const char *path, struct stat *ret);
int store_mkdir(const char *path, struct err *err); /* there is fine */
bool store_same_file(const char *a, const char *b);
bool store_exists(const char *path);
/* Mode and owner of `like`. */
int store_copy_owner(const char *path, const struct stat *like, struct err *err);
char *path_join(const char *dir, const char *name);
/* Without "." and ".." and double slashes; text only. */
char *path_normal(const char *path);
char *path_dir(const char *path);
/* `path` as seen from directory `dir`: "snap.qcow2", "../100/base.qcow2". Both normal. */
char *path_relative(const char *dir, const char *path);

/* ---- op.c: the pool's lock, and with it what is known of a volume group ---- */
struct lvm_store;
struct pool_hold {
    struct pool_lock lock;
    struct lvm_store *vg; /* then that one holds it */
};
SUSPENDS int pool_hold(const struct pool *pool, const char *images, struct pool_hold *ret,
                       struct err *err);
void pool_let_go(struct pool_hold *hold); /* harmless when not held */
/* What was activated in a volume group for an operation or a listing is no longer needed. */
SUSPENDS void pool_close(const char *images);

/* ---- pool_wipe.c: LVs that are overwritten before their space is free ---- */
struct lvm_vg;
bool pool_wipe_is_due(const struct lvm_vg *vg); /* by this host */
bool pool_wipe_runs(const struct pool *pool);   /* on this host */
/* As the program wishes (vol_set_wiper); nothing if it has none. */
void pool_wipe_start(const struct pool *pool);

/* ---- tails.c ---- */
/* Gives back what an image's LV has behind its end: of a snapshot's all, of a current one's what is
 * more than two chunks. Not of one that is being written; a failure is told only. Nothing for
 * files, raw images, pools with LVs in their full length. The image is not held by the caller. */
SUSPENDS void tail_cut(const struct vol_ctx *ctx, const struct pool *pool, const char *path,
                       bool is_snap);

/* ---- taken.c: when snapshots were taken, as the time of their files ---- */
struct timespec taken_now(void);
void taken_set(const char *path, struct timespec when);
/* An image that nobody has written to since then was taken when its operation began. */
void taken_set_not_before(const char *path, const struct intent *intent);
/* For an intent, as "taken": times of the snapshots among `kids`, and of those that stand on them
 * if they are to get the name `final` (NULL: they keep theirs). */
json_t *taken_record(const struct catalog *cat, struct cfile *const *kids, unsigned nr,
                     const char *final);
/* One snapshot's, for such a list, under a name that its file will have. */
void taken_add(json_t *list, const struct cfile *f, const char *vmid, const char *name);
void taken_restore(const char *images, const struct intent *intent);

/* ---- op.c: the frame of an operation on one pool ---- */
struct op {
    const struct vol_ctx *ctx;
    const struct pool *pool;
    char id[24];
    char *images;
    struct catalog *cat;
    struct pool_hold pool_lock;
    VEC(struct pool_lock) vol_locks;
    struct intent *intent;
};
/* Opens the pool; with `name` finishes what is left of that volume; takes pool lock and volume
 * lock; scans. */
SUSPENDS int op_begin(const struct vol_ctx *ctx, const char *pool_id, const struct vol_name *names,
                      unsigned nr, struct op *ret, struct err *err);
SUSPENDS void op_end(struct op *op);
/* The volume, sound; -EUCLEAN with what to do when broken. */
int op_volume(struct op *op, const struct vol_name *name, struct cvol **ret, struct err *err);
/* The same, and not a base image: `what` says what is refused. */
int op_volume_to_change(struct op *op, const struct vol_name *name, const char *what,
                        struct cvol **ret, struct err *err);
SUSPENDS int op_lock_volume(struct op *op, const char *vmid, const char *stem, struct err *err);
/* A locked volume is gone, or has another name now: its leases are given back at the end. */
void op_forget_volume(struct op *op, const char *vmid, const char *stem);
/* -EBUSY, with their names, if elements of other volumes stand on one of this volume's. */
int op_refuse_used(struct op *op, const struct cvol *vol, const char *what, struct err *err);
/* -EBUSY if a server has it. */
SUSPENDS int op_refuse_served(struct op *op, const struct cvol *vol, const char *what,
                              struct err *err);
/* Writes the intent and gives the pool lock back. */
int op_intent(struct op *op, const char *name, json_t *body, struct err *err);
int op_done(struct op *op, struct err *err); /* removes the intent */
void op_say(const struct vol_ctx *ctx, const char *fmt, ...) PRINTF_LIKE(2, 3);
/* Hidden name for a file in the making: "<dir>/.varve-<id>-<what>". */
char *op_tmp_path(const struct op *op, const char *dir, const char *what);

/* ---- overlay.c ---- */
/* Creates an empty overlay at `path` on `parent` (as it will be named), at least as long as it;
 * durable; mode and owner of `like`. */
SUSPENDS int overlay_create(const struct pool *pool, const char *path, const char *backing_name,
                            const char *backing_format, uint64_t virtual_len,
                            const struct stat *like, struct err *err);
/* What a killed server left in journals goes into the image and those below it (a kill while a
 * snapshot was taken leaves one there): before anything stands on it. */
SUSPENDS int overlay_settle(const char *path, const char *format, struct err *err);
/* Nobody else has the image open; keeps it so until blk_close. */
struct blk;
SUSPENDS int overlay_hold(const char *path, struct blk **ret, struct err *err);
SUSPENDS int overlay_refuse_open(const char *path, struct err *err); /* somebody has it open */
/* Files that nobody has open, and nobody opens before they are dropped. */
struct held_files {
    VEC(struct blk *) list;
};
SUSPENDS int held_add(struct held_files *held, const char *path, struct err *err);
/* All elements of a volume; what was added before a failure stays. */
SUSPENDS int held_add_volume(struct held_files *held, const struct cvol *vol, struct err *err);
SUSPENDS void held_drop(struct held_files *held);
/* Before it is removed, if it is a device: one that is open can only be renamed, which takes room.
 * Whoever opens it in this instant keeps it from being removed. */
SUSPENDS void held_drop_device(struct held_files *held, const char *path);
/* Nothing in it was ever written, zeroed or discarded. -errno when it cannot be read. */
SUSPENDS int overlay_is_empty(const char *path, bool *ret, struct err *err);

/* ---- merge.c: the two ways to merge a snapshot away ---- */
/* In this process: `child` into the file below it; or what that file holds into `child`, which then
 * stands on `backing_name` (NULL: nothing). */
/* *ret_begun: the lower file may have been changed. */
SUSPENDS int merge_commit(const struct vol_ctx *ctx, const struct pool *pool, const char *child,
                          bool *ret_begun, struct err *err);
SUSPENDS int merge_stream(const struct vol_ctx *ctx, const struct pool *pool, const char *child,
                          const char *backing_name, struct err *err);
/* Bytes to copy each way; child's chain is not locked. */
struct job_direction;
SUSPENDS int merge_direction(const struct cfile *child, const struct cfile *snap, bool served,
                             struct job_direction *ret, struct err *err);
SUSPENDS int merge_set_backing(const char *path, const char *name, const char *format,
                               struct err *err);

/* ---- remote.c: a disk served by a process, through QMP ---- */
struct remote;
/* A peer that is gone is -EPIPE. *ret NULL: nobody serves it. */
SUSPENDS int remote_open(const struct catalog *cat, const struct cvol *vol, struct remote **ret,
                         struct err *err);
SUSPENDS int remote_open_path(const char *qmp_path, struct remote **ret, struct err *err);
void remote_close(struct remote *r);
static inline void remote_closep(struct remote **r)
{
    remote_close(*r);
}
/* Node, other than `except` (may be NULL), that has this file open: by its path, else by its inode.
 * NULL: none. The caller frees. */
SUSPENDS int remote_node(struct remote *r, const char *path, const char *except, char **ret,
                         struct err *err);
/* The same by the text of the path alone: the server may know a file by a name it has no longer. */
/* Bytes that a node's image takes, as its server sees it; 0: it does not tell. */
SUSPENDS int remote_node_size(struct remote *r, const char *node, uint64_t *ret, struct err *err);
SUSPENDS int remote_node_called(struct remote *r, const char *path, const char *except, char **ret,
                                struct err *err);
/* The name of the disk's top node; the caller frees. */
SUSPENDS int remote_top(struct remote *r, char **ret, struct err *err);
/* Is there a node of this name, and is it part of the disk (not only added)? */
SUSPENDS int remote_node_state(struct remote *r, const char *node, bool *ret_there,
                               bool *ret_linked, struct err *err);
SUSPENDS int remote_command(struct remote *r, const char *command, json_t *args, json_t **ret,
                            struct err *err);
/* Adds an overlay: backing_chain opens what is below it too. */
SUSPENDS int remote_add_node(struct remote *r, const char *node, const char *path,
                             bool backing_chain, struct err *err);
SUSPENDS void remote_del_node(struct remote *r, const char *node);
SUSPENDS int remote_rename(struct remote *r, const char *node, const char *path, struct err *err);
SUSPENDS int remote_rollback(struct remote *r, const char *node, bool force, struct err *err);
SUSPENDS int remote_snapshot(struct remote *r, const char *top, const char *overlay, bool held,
                             struct err *err);
/* The disk answers nothing until remote_snapshot(held), remote_release, or two seconds from now. */
SUSPENDS int remote_hold(struct remote *r, struct err *err);
SUSPENDS void remote_release(struct remote *r);
/* A read-only export "<vol>@<snap>" of a node; a server without NBD exports none. ctx NULL:
 * quietly. */
SUSPENDS void remote_export_snap(struct remote *r, const struct vol_ctx *ctx, const char *node,
                                 const char *vol, const char *snap);
/* Removes the read-only exports of a node; *ret_nr tells how many. -EBUSY while one has clients. */
SUSPENDS int remote_unexport(struct remote *r, const char *node, unsigned *ret_nr, struct err *err);
/* Waits until a job is READY, or PENDING if it was started without auto-finalize (`manual`), or has
 * ended. *ret_ready: it has not ended. */
SUSPENDS int remote_job_wait(struct remote *r, const struct vol_ctx *ctx, const char *job,
                             bool manual, bool *ret_ready, struct err *err);
/* The first job whose name starts so; NULL: none. The caller frees. */
SUSPENDS int remote_job_find(struct remote *r, const char *prefix, char **ret, struct err *err);
/* A job's state, NULL: no such job. The caller frees. */
SUSPENDS int remote_job_state(struct remote *r, const char *job, char **ret, struct err *err);

/* ---- recover.c ---- */
/* Finishes or undoes the intents of dead operations. `vmid`, `stem`: of this volume only the long
 * ones; NULL: long merges are left, with a line. */
SUSPENDS int recover_pool(const struct vol_ctx *ctx, const struct pool *pool, const char *images,
                          const char *vmid, const char *stem, struct err *err);
/* The same for one who says that no other host is at work: what others have begun is taken over. */
SUSPENDS int recover_alone(const struct vol_ctx *ctx, const struct pool *pool, const char *images,
                           const char *vmid, const char *stem, struct err *err);

/* ---- parts of recovery; the intent is claimed ---- */
SUSPENDS int snapshot_recover(const struct vol_ctx *ctx, const struct pool *pool,
                              const char *images, struct intent *intent, struct err *err);
SUSPENDS int rollback_recover(const struct vol_ctx *ctx, const struct pool *pool,
                              const char *images, struct intent *intent, struct err *err);
/* commit.c: a snapshot is merged with its child's data, then takes the child's name; all in one
 * directory */
struct commit_plan {
    const struct vol_ctx *ctx;
    const struct pool *pool;
    char id[24];
    char *snap, *child, *final, *old; /* paths: the snapshot's file, the child's, the name it gets,
                                         the child's hidden name while a served disk is switched */
    char *stem, *name;                /* name: the snapshot's */
    char *child_snap;                 /* NULL: the child is the current element */
    bool begun;                       /* the snapshot may have been changed */
    struct remote *remote;            /* NULL: idle; its disk need not contain the files */
};
/* Paths from plain names. -ENOMEM. */
int commit_plan_fill(struct commit_plan *cp, const char *dir, const char *id, const char *stem,
                     const char *name, const char *snap_file, const char *child_file,
                     const char *child_snap, const char *final_file);
void commit_plan_fini(struct commit_plan *cp);
/* From any state that an earlier run left. long_too false: *ret_left if something long is to be
 * done. */
SUSPENDS int commit_run(struct commit_plan *cp, bool long_too, bool *ret_left, struct err *err);

/* destroy_volume.c */
SUSPENDS int destroy_volume(struct op *op, const struct vol_name *name, struct err *err);
/* The steps of a recorded destruction: any of the files may have gone already. held: of them; may
 * be NULL. */
int destroy_files(const char *dir, const json_t *files, struct held_files *held, struct err *err);
SUSPENDS int destroy_recover(const struct vol_ctx *ctx, const struct pool *pool, const char *images,
                             struct intent *intent, bool long_too, bool *ret_left, struct err *err);
SUSPENDS int rename_recover(const struct vol_ctx *ctx, const char *images, struct intent *intent,
                            struct err *err);
SUSPENDS int move_recover(const struct vol_ctx *ctx, const struct pool *pool, const char *images,
                          struct intent *intent, struct err *err);
SUSPENDS int template_recover(const char *images, struct intent *intent, struct err *err);
/* create, import, clone, repair: drops the temporary file */
int create_recover(const char *images, struct intent *intent, struct err *err);

#endif
