/*
 * LVM's tools: the only place that runs them.
 *
 * A `struct lvm` says how the tools are called for one volume group. Each function below is one
 * command (exceptions are named), run on a helper thread with LC_ALL=C and a time limit, never
 * through a shell. VG and LVs are named in full; no tag and no --select is ever an argument, since
 * those take lvmlockd's global lock. A command whose process was killed left the VG's metadata as
 * before or as after it: look with lvm_report().
 *
 * Every command ends with one of these (the text is LVM's own first complaint):
 *   -EEXIST    the name is taken          -ENOENT  no such VG, or LV
 *   -ENOSPC    no free extents, or the metadata area (or lvmlock) is full
 *   -EBUSY     open, mounted, or used by another host
 *   -ENODEV    physical volumes are missing
 *   -EAGAIN    a lock could not be had, lvmlockd is not ready: later perhaps
 *   -EINVAL    a name or tag that LVM does not take
 *   -ETIMEDOUT ended at its limit; what it has done is unknown
 *   -EACCES    not root                   -ENOPKG  lvm2 is not installed
 *   -EIO       anything else
 * LVM itself would remove LVs and change tags in a VG with missing PVs, and the metadata of those
 * that come back would be stale: so after a report that shows one missing, changes are refused here
 * (activation of LVs that are whole is not). A VG that loses a PV later is noticed by the next
 * report. With several complaints the one further up in the table of lvm_run.c decides; -ENOENT is
 * returned only if nothing else went wrong.
 */
#ifndef VARVE_VOL_LVM_H
#define VARVE_VOL_LVM_H

#include <stdbool.h>
#include <stdint.h>
#include "base/err.h"
#include "base/vec.h"
#include "rt/co.h"

#define LVM_LIMIT_MS 60000u /* a healthy VG takes less than a second */
#define LVM_NAME_MAX 127u   /* bytes of a VG's or LV's name, and of the two joined for the kernel */
#define LVM_TAG_MAX  1024u

struct lvm_counts { /* reactor's own; commands includes all others */
    unsigned commands, reports, failed, timed_out;
    uint64_t ns; /* from start to end */
};
/* How a VG is worked on. Filled by the caller (zeroes but for `vg` are fine); strings borrowed. */
struct lvm {
    const char *vg;
    const char *devices;      /* the only devices to look at, separated by commas: --devices */
    const char *devices_file; /* name of a file in /etc/lvm/devices: --devicesfile */
    bool shared;       /* under lvmlockd (lvm_vg.shared); else lock modes are not asked for */
    unsigned limit_ms; /* 0: LVM_LIMIT_MS */
    struct lvm_counts counts;
    unsigned nb_missing; /* PVs, in the last report: changes are refused while it is not 0 */
};

/* ---- lvm_report.c: what there is ---- */
enum lvm_state {
    LVM_NO,
    LVM_YES,
    LVM_UNKNOWN
}; /* UNKNOWN: also of an LV extended elsewhere and
       not refreshed here: it may be active */
struct lvm_lv {
    const char *name, *uuid;
    uint64_t len;       /* bytes */
    const char *attr;   /* LVM's lv_attr, ten letters */
    const char *layout; /* "linear", "thin,sparse", ... */
    VEC(char *) tags;
    int64_t made;                /* seconds since 1970; 0: unknown */
    enum lvm_state active, open; /* on this host */
    bool partial, suspended;
    /* Where its first bytes are on disk, for who has it not active: from head_off of the PV on,
     * head_len contiguous bytes (the first segment, or stripe). NULL: the PV is missing, or the LV
     * is no plain one (linear, striped). */
    const char *head_pv;
    uint64_t head_off, head_len;
};
struct lvm_pv {
    const char *name; /* the device; "[unknown]" */
    bool missing;
    uint64_t data_off; /* of its first extent */
};
struct lvm_vg {
    const char *name, *uuid, *attr;
    const char *lock_type; /* "" , "none", "sanlock", "dlm" */
    bool shared;           /* the last two */
    bool unlocked;         /* read without lvmlockd's lock: may be in the middle of a change */
    uint64_t extent_len, len, free;
    uint64_t seqno;                       /* each change of the metadata adds one */
    uint64_t metadata_len, metadata_free; /* of the smallest area; about 500 bytes an LV */
    unsigned nb_missing;
    VEC(char *) tags;
    VEC(struct lvm_pv) pvs;
    VEC(struct lvm_lv) lvs; /* by name; also those of others, without LVM's hidden ones */
    void *source;           /* what the strings point into */
};
/* Everything about the VG in one read. Also of a VG with missing PVs (lvm_vg_check). */
SUSPENDS int lvm_report(struct lvm *lvm, struct lvm_vg **ret, struct err *err);
void lvm_vg_free(struct lvm_vg *vg);
static inline void lvm_vg_freep(struct lvm_vg **vg)
{
    lvm_vg_free(*vg);
}
/* Parses the text of such a report; -EUCLEAN if it is none, -ENOENT without the VG. */
int lvm_report_parse(const char *text, const char *vg, struct lvm_vg **ret, struct err *err);
/* -ENODEV with their number if PVs are missing: nothing must be built on such a VG. */
int lvm_vg_check(const struct lvm_vg *vg, struct err *err);
struct lvm_lv *lvm_vg_find(const struct lvm_vg *vg, const char *name); /* NULL: none */
bool lvm_lv_has_tag(const struct lvm_lv *lv, const char *tag);

/* ---- lvm.c: changes ---- */
/* Lists of names and tags end with NULL. */
enum lvm_mode {
    LVM_INACTIVE,
    LVM_PLAIN,     /* as the VG has it: exclusive under lvmlockd */
    LVM_EXCLUSIVE, /* these two are the same as plain without lvmlockd: nothing keeps others away */
    LVM_SHARED,
};
struct lvm_new {
    const char *name;
    uint64_t len; /* bytes > 0; rounded up to extents */
    const char *const *tags;
    enum lvm_mode mode;
};
/* Its content is whatever the disks held before: nothing is wiped. Not activated at boot. */
SUSPENDS int lvm_create(struct lvm *lvm, const struct lvm_new *lv, struct err *err);
/* Deactivates them first. Those that are not there are -ENOENT, the others are gone even so; an
 * open one is -EBUSY and may leave the rest of the list. */
SUSPENDS int lvm_remove(struct lvm *lvm, const char *const *names, struct err *err);
/* Open LVs may be renamed, their device nodes too. */
SUSPENDS int lvm_rename(struct lvm *lvm, const char *name, const char *new_name, struct err *err);
/* To at least / at most `len` bytes, rounded up to extents; what is so already is success. Extend
 * with `held_shared`: this host has it active shared, perhaps others too: each of them has
 * to lvm_refresh() before it uses what was added. Reduce never looks for a file system; on
 * lvm2 before 2.03.17 its first run in a process is preceded by one that is refused. */
SUSPENDS int lvm_extend(struct lvm *lvm, const char *name, uint64_t len, bool held_shared,
                        struct err *err);
SUSPENDS int lvm_reduce(struct lvm *lvm, const char *name, uint64_t len, struct err *err);
/* Adds and deletes tags at once, of every LV named; names NULL: of the VG itself. Adding one that
 * is there, or deleting one that is not, is success; one in both lists is deleted. */
SUSPENDS int lvm_change_tags(struct lvm *lvm, const char *const *names, const char *const *add,
                             const char *const *del, struct err *err);
SUSPENDS int lvm_activate(struct lvm *lvm, const char *const *names, enum lvm_mode mode,
                          struct err *err);
SUSPENDS int lvm_deactivate(struct lvm *lvm, const char *const *names, struct err *err);
/* The kernel's device of an LV that the VG has no longer: another host has removed it while it was
 * active here. There is none, mostly. -EBUSY somebody has it open. */
SUSPENDS int lvm_drop_device(struct lvm *lvm, const char *vg_uuid, const char *lv_uuid,
                             struct err *err);
/* Loads what the metadata says now into active LVs of this host. */
SUSPENDS int lvm_refresh(struct lvm *lvm, const char *const *names, struct err *err);

/* ---- lvm_head.c: the first bytes of LVs that need not be active (many: lvm_head.h) ---- */
/*
 * Reads len bytes (a multiple of 4096, buf aligned to 4096) as they are on disk now: through the
 * node root/NAME if there is one that is this LV's, else from its PV. Never from a cache: another
 * host may have written there.
 *
 * Errors   -ENODATA neither is possible: the LV has to be activated.   -EIO and the like of reads.
 */
SUSPENDS int lvm_head_read(const struct lvm_lv *lv, const char *root, void *buf, size_t len,
                           struct err *err);

/* ---- lvm_name.c: names, device nodes, lengths; no command but where said ---- */
/* Would LVM take it? Characters, reserved words, and the length together with the VG's name as
 * LVM and the kernel count it. */
bool lvm_lv_name_ok(const char *vg, const char *name);
bool lvm_vg_name_ok(const char *vg);
bool lvm_tag_ok(const char *tag);
/* LVM's own variable (DM_DEV_DIR) for another place than /dev; NULL: it is not set. */
const char *lvm_other_dev_dir(void);
const char *lvm_dev_dir(void); /* that, or /dev */
/* The device-mapper name: "vg-lv" with inner dashes doubled. The caller frees; NULL: no memory. */
char *lvm_dm_name(const char *vg, const char *name);
/*
 * The path of an active LV's block device, once it is there and is that LV's: /dev/VG/LV, else
 * /dev/mapper/NAME. Nodes are waited for up to wait_ms (udev makes them); where udev does not run,
 * or has not made them by then, one `vgmknodes`. The caller frees *ret.
 *
 * Errors   -ENOENT no node: not active here, or filtered by lvm.conf's volume_list.
 */
SUSPENDS int lvm_device(struct lvm *lvm, const char *name, unsigned wait_ms, char **ret,
                        struct err *err);
/* Bytes that hold a qcow2 image of this virtual length fully allocated, in whatever order it is
 * written: a base (64 KiB clusters) or an overlay (128 KiB, extended L2). -EINVAL too long. */
int lvm_image_len(uint64_t virtual_len, bool overlay, uint64_t *ret, struct err *err);
/* The same of any options; their backing name is not looked at. */
struct image_create_opts;
int lvm_image_len_of(const struct image_create_opts *opts, uint64_t *ret, struct err *err);
/* Rounds up to extents. -EINVAL extent_len is 0, -EOVERFLOW. */
int lvm_round_up(uint64_t len, uint64_t extent_len, uint64_t *ret, struct err *err);

#endif
