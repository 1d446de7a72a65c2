/*
 * Named volumes, snapshots and rollback on a storage ("pool") of storage.cfg.
 *
 * Every operation: create the new, make it durable, switch, then drop the old. Operations of
 * several steps write an intent into the pool first (intent.c); whoever comes next finishes or
 * undoes it. Parentage is the backing name alone. A served disk is found by its QMP socket in the
 * runtime directory (vol_qmp_path) and changed through QMP; an idle one is changed in this process.
 * All SUSPENDS functions run in a reactor; none keeps the caller's memory.
 */
#ifndef VARVE_VOL_VOL_H
#define VARVE_VOL_VOL_H

#include <stdbool.h>
#include <stdint.h>
#include "base/err.h"
#include "rt/co.h"

/* ---- storage.cfg ---- */
enum pool_type { POOL_DIR, POOL_NFS, POOL_CIFS, POOL_CEPHFS, POOL_LVM, POOL_OTHER };
struct pool {
    char *id;
    enum pool_type type;
    char *type_name;
    char *path;           /* directory types */
    char *vgname;         /* lvm */
    unsigned line;        /* of the section header */
    bool disabled;        /* `disable`, or an error in its section */
    char *error;          /* why an erroneous section is disabled: "file:line: ..."; NULL: sound */
    bool images, rootdir; /* content allows volumes */
    bool snapext;         /* snapext / snapshot-as-volume-chain */
    char *content;
    char *mountpoint; /* must be a mount point before anything is done; NULL: no such demand */
    /* own keys; 0/NULL = default */
    uint64_t cluster_size, snapshot_cluster_size, cache_size, bwlimit;
    int extended_l2;     /* -1 unset, 0, 1 */
    char *preallocation; /* off metadata falloc full */
    char *lock;
    uint64_t lock_leases, lease_timeout; /* of lock sanlock: how many; seconds for one access */
    bool thin_given;
    uint64_t thin_chunk; /* bytes an LV begins with and grows by; 0: it has its full length */
    bool saferemove;     /* lvm: what is removed is overwritten with zeroes first */
    uint64_t saferemove_rate; /* bytes a second; 0: as fast as it goes */
    uint64_t saferemove_step; /* bytes at a time; 0: what suits the rate */
};
struct config {
    char *file;
    struct pool *pools;
    unsigned nb_pools;
    char **warnings; /* "file:line: warning: ..." */
    unsigned nb_warnings;
    char **errors; /* "file:line: ..." of all broken sections */
    unsigned nb_errors;
};
/* path NULL: $VARVE_CONFIG, /etc/varve/storage.cfg, /etc/pve/storage.cfg, the first that is there.
 * -ENOENT names all that were tried. Broken sections are no failure: they are disabled and listed
 * in errors. */
int config_load(const char *path, struct config **ret, struct err *err);
void config_free(struct config *cfg);
/* -ENOENT unknown; -EINVAL disabled or broken (text says why); -ENOTSUP a type we cannot use. */
int config_pool(const struct config *cfg, const char *id, const struct pool **ret, struct err *err);

/* ---- names ---- */
struct vol_name {
    char pool[64];
    char vmid[16];  /* "" for a free name */
    char name[256]; /* without suffix */
    char format[8]; /* "qcow2", "raw" or "" when not given */
    char snap[64];  /* "" = the volume itself */
    char base[256]; /* "<basevmid>/<base>" of a Proxmox linked-clone id, else "" */
};
/* Parses POOL:[<vmid>/]<name>[.raw|.qcow2][@SNAP] and Proxmox's clone form. -EINVAL with the
 * reason. */
int vol_parse(const char *text, struct vol_name *ret, struct err *err);
/* The same as the storage has it: in a volume group a guest's number stands in the volume's name
 * only, and may be given before it as well. */
int vol_parse_in(const struct config *cfg, const char *text, struct vol_name *ret, struct err *err);
int vol_snap_name_check(const char *snap, struct err *err);

/* ---- catalog ---- */
struct vol_elem { /* one file of a volume: the current one or a snapshot */
    char *snap;   /* NULL: the current element */
    char *file;   /* name in its directory */
    char *path;   /* absolute */
    char *format;
    char *parent_file; /* backing file's path, absolute; NULL: none */
    char *parent_snap; /* its snapshot name if it belongs to the same volume, else NULL */
    uint64_t virtual_len, file_len, allocated; /* bytes; allocated = disk usage */
    int64_t when;  /* seconds since 1970: snapshot: when it was taken (taken.c), current: when its
                      file was made; 0:  unknown */
    bool deleting; /* its deletion was begun and is not finished: not to be used as a snapshot */
    bool current_line; /* on the path from current to the root */
    unsigned depth;    /* in the tree, root = 0 */
};
struct vol_info {
    char *id; /* canonical POOL:[vmid/]name.fmt */
    char *pool, *vmid, *name, *format, *path;
    char *kind; /* "vol", "base" */
    uint64_t virtual_len, allocated;
    char *broken;   /* why operations on it are refused until `pool check --repair`; NULL: sound.
                       Without a   current element path says where it should be */
    bool served;    /* a varve serve has it */
    char *qmp_path; /* where it would be or is controlled */
    struct vol_elem *elems; /* parents before children; current last */
    unsigned nb_elems;
    char **clones; /* ids of volumes elsewhere in the pool backed by one of the elements */
    unsigned nb_clones;
};
void vol_info_free(struct vol_info *info);
SUSPENDS int vol_info_get(const struct config *cfg, const struct vol_name *name,
                          struct vol_info **ret, struct err *err);
struct vol_list {
    struct vol_info **vols;
    unsigned nb_vols;
    char **orphans; /* paths of files that belong to no volume, with the reason: "path: why" */
    unsigned nb_orphans;
};
void vol_list_free(struct vol_list *list);
SUSPENDS int vol_list_get(const struct config *cfg, const struct pool *pool, struct vol_list **ret,
                          struct err *err);
/* ---- space ---- */
enum vol_op_life { VOL_OP_RUNS, VOL_OP_CUT_OFF, VOL_OP_ELSEWHERE };
struct vol_pool_op { /* an operation that has not ended */
    char *op, *volume, *who;
    enum vol_op_life life;
};
struct vol_pool_lv { /* one that was deleted and waits to be wiped */
    char *lv;
    uint64_t len, wiped;
    bool here; /* this host does it */
};
struct vol_pool_status { /* bytes */
    uint64_t total, avail;
    uint64_t allocated; /* by volumes and their snapshots */
    uint64_t promised;  /* the disks' sizes */
    uint64_t growth;    /* what current elements may come to take, with metadata, over what they have */
    unsigned vols, snaps, orphans, served;
    struct vol_pool_op *ops;
    unsigned nb_ops;
    char **warnings;
    unsigned nb_warnings;
    bool is_vg; /* the rest is of a volume group */
    uint64_t extent_len, metadata_len, metadata_free;
    unsigned nb_pvs, nb_missing;
    unsigned active; /* LVs of ours, on this host */
    struct vol_pool_lv *wipes;
    unsigned nb_wipes;
    bool wiping; /* somebody here is at it */
};
void vol_pool_status_free(struct vol_pool_status *st);
SUSPENDS int vol_pool_status(const struct config *cfg, const struct pool *pool,
                             struct vol_pool_status **ret, struct err *err);
/* The control socket of a volume: <runtime>/<pool>/<escaped volume>.qmp. The caller frees. */
char *vol_qmp_path(const struct vol_name *name);

/* ---- operations ---- */
struct vol_ctx { /* how an operation runs */
    const struct config *cfg;
    bool dry_run;
    void (*say)(void *ctx, const char *line);                   /* what happens; may be NULL */
    void (*progress)(void *ctx, uint64_t done, uint64_t total); /* bytes; may be NULL */
    void *ctx;
};
struct vol_create_opts {
    uint64_t len;
    const char *format;        /* "qcow2", "raw"; NULL: qcow2 */
    uint64_t cluster_size;     /* 0: pool's, else 64 KiB */
    int extended_l2;           /* -1: default */
    const char *preallocation; /* NULL: pool's, else default of the design */
};
SUSPENDS int vol_create(const struct vol_ctx *ctx, const struct vol_name *name,
                        const struct vol_create_opts *opts, struct err *err);
/* file "-": standard input, taken as raw. format NULL: probe; raw images are never probed as
 * something else when they end in .raw. An untrusted image with a backing or data file is refused.
 */
SUSPENDS int vol_import(const struct vol_ctx *ctx, const char *file, const char *format,
                        const struct vol_name *name, const struct vol_create_opts *opts,
                        struct err *err);
/* One snapshot name, several volumes of one guest at once. */
SUSPENDS int vol_snapshot(const struct vol_ctx *ctx, const struct vol_name *names, unsigned nr,
                          struct err *err);
SUSPENDS int vol_rollback(const struct vol_ctx *ctx, const struct vol_name *name, const char *keep,
                          bool force, struct err *err);
SUSPENDS int vol_destroy(const struct vol_ctx *ctx, const struct vol_name *name, bool flatten,
                         struct err *err);
/* A new volume with the contents of a base image or a snapshot: linked, an overlay on it in the
 * same storage; full, a copy of its own, in any storage and also of an idle volume's current state.
 */
struct vol_clone_opts {
    bool full;
    struct vol_create_opts create; /* of a full clone; len is not used */
};
SUSPENDS int vol_clone(const struct vol_ctx *ctx, const struct vol_name *from,
                       const struct vol_name *to, const struct vol_clone_opts *opts,
                       struct err *err);
/* vm-<vmid>-x becomes base-<vmid>-x, which is never changed again. */
SUSPENDS int vol_template(const struct vol_ctx *ctx, const struct vol_name *name, struct err *err);
/* With all its snapshots, within its storage; also to another guest. */
SUSPENDS int vol_rename(const struct vol_ctx *ctx, const struct vol_name *name,
                        const struct vol_name *new, struct err *err);
/* To another storage, with all its snapshots, under the same name; the source stays unless it is to
 * be deleted. flatten: what it stands on outside of itself is copied into it. */
struct vol_move_opts {
    bool delete, flatten;
};
SUSPENDS int vol_move(const struct vol_ctx *ctx, const struct vol_name *name, const char *pool,
                      const struct vol_move_opts *opts, struct err *err);
SUSPENDS int vol_resize(const struct vol_ctx *ctx, const struct vol_name *name, uint64_t len,
                        bool relative, struct err *err);
/* Before a volume's files are opened by name: waits for operations on it, finishes what such have
 * left, and keeps new ones away until vol_opening_end(), so that the names stay what they are. An
 * operation that takes long is not waited for, long merges are left, and so is another volume's
 * trouble: told through ctx->say. */
struct vol_opening;
SUSPENDS int vol_opening_begin(const struct vol_ctx *ctx, const struct vol_name *name,
                               struct vol_opening **ret, struct err *err);
/* What keeps other hosts from the disk while it is open: taken before its files are opened. -EBUSY
 * names the host that has it; several may have it read-only. vol/lock.h has the rest. */
struct disk_lease;
SUSPENDS int vol_opening_lease(struct vol_opening *opening, bool read_only, struct disk_lease **ret,
                               struct err *err);
void vol_opening_end(struct vol_opening *opening); /* NULL is harmless */
/* At the end of a process that had volumes of a storage open: what was activated for it, and nobody
 * has open, is deactivated. Nothing where files are not activated. */
SUSPENDS void vol_pool_close(const struct pool *pool);
/* The same for a server that has closed its disk: space that was taken ahead is given back. */
SUSPENDS void vol_close_disk(const struct vol_ctx *ctx, const struct pool *pool, const char *path);
/* Of a storage with `saferemove`: overwrites with zeroes, and then removes, the LVs that operations
 * of this host have unlinked. One process at a time: -EBUSY after a wait of two seconds. An LV that
 * somebody still has open is left, one that fails too, with a line. */
struct vol_wipe_result {
    unsigned wiped, left; /* LVs */
    uint64_t bytes;       /* that were overwritten now */
};
struct vol_wipe_opts {
    bool all_hosts; /* also what others have unlinked: none of them has it open */
};
SUSPENDS int vol_pool_wipe(const struct vol_ctx *ctx, const struct pool *pool,
                           const struct vol_wipe_opts *opts, struct vol_wipe_result *ret,
                           struct err *err);
/* What starts that in the background at the end of an operation that has left something to wipe;
 * NULL: nothing. Does not wait. */
void vol_set_wiper(void (*start)(const struct pool *pool));
/* Makes the leases of a storage with `lock sanlock`, or of a volume group under lvmlockd. Those
 * that are there stay. */
SUSPENDS int vol_pool_init_locks(const struct vol_ctx *ctx, const char *pool_id, struct err *err);
struct vol_findings {    /* that are left */
    unsigned repairable; /* --repair puts them right, or will when what hinders it is gone */
    unsigned hopeless;   /* only a person can say what to do */
    unsigned notes;      /* harmless: stray files, operations under way */
};
/* What Proxmox VE could not handle in the pool as it is, one line each through ctx->say; *ret
 * counts them. */
SUSPENDS int vol_pool_check_proxmox(const struct vol_ctx *ctx, const struct pool *pool,
                                    unsigned *ret, struct err *err);
/* Reports debris and broken chains, one line a finding through ctx->say; repairs them if asked. */
SUSPENDS int vol_pool_check(const struct vol_ctx *ctx, const struct pool *pool, bool repair,
                            struct vol_findings *ret, struct err *err);

#endif
