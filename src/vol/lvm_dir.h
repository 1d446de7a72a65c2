/*
 * A VG as a directory: LVs under names that can be linked, renamed over each other and unlinked, as
 * the operations on files of a directory pool are. LVM has none of that: a name is one LV's, and
 * nothing can be renamed over something. Two tags make up for it:
 *
 *   varve-also=NAME    the LV has this name, too (a link)
 *   varve-takes=NAME   the LV has this name, whoever still bears it, and no longer its own: a
 * rename over another LV is decided
 *
 * A rename over a name is decided by one command, which sets the second tag; what follows only
 * makes LVM's own names agree, and is finished by whoever comes next (lvm_dir_settle). So at any
 * instant, whatever was killed, every name of the directory is that of one LV, before or after.
 *
 *   rename(new, cur), where A is cur and, by a link, snap:
 *     1 tag new: takes cur           cur is the new one from here on, A is snap
 *     2 LVM renames A to snap        (without a link A is removed)
 *     3 LVM renames new to cur
 *     4 both tags go
 *
 * Names are looked up in one report, in which successful changes are noted; it is read again after
 * a failed one. Callers hold the pool's lock from the report to the last change. LVs without our
 * tags are never changed, but their names are taken.
 */
#ifndef VARVE_VOL_LVM_DIR_H
#define VARVE_VOL_LVM_DIR_H

#include "vol/lvm.h"

#define LVM_DIR_TAG   "varve"
#define LVM_DIR_GUEST "pve-vm-" /* + the guest's number: Proxmox's tag */
#define LVM_DIR_CHAIN "pve-"    /* + the volume's name with its suffix: of all its elements */
#define LVM_DIR_ALSO  "varve-also="
#define LVM_DIR_TAKES "varve-takes="
#define LVM_DIR_GONE  ".varve-gone-" /* + host + UUID: unlinked while it was open */
#define LVM_DIR_WIPE                                                                               \
    ".varve-wipe-" /* + host + UUID: unlinked, to be overwritten before it goes                    \
                    */
#define LVM_DIR_WIPED                                                                              \
    "varve-wiped=" /* tag of such an LV: so many bytes from its front are zero                     \
                    */

struct lvm_dir {
    struct lvm lvm;    /* filled by the caller */
    bool wipe;         /* by the caller: no LV is removed before it was overwritten */
    struct lvm_vg *vg; /* the last report, and what was changed since; NULL: it has to be read */
    VEC(char *) owned; /* names of LVs, and what steps are made of */
    VEC(struct lvm_lv *) takers; /* of the report: LVs that take a name over; hardly ever any */
};

/* Reads the report if there is none. */
SUSPENDS int lvm_dir_load(struct lvm_dir *dir, struct err *err);
/* Forgets it: others may have changed something. */
void lvm_dir_forget(struct lvm_dir *dir);
/* The LV of this name, NULL if there is none. Loaded. */
struct lvm_lv *lvm_dir_find(const struct lvm_dir *dir, const char *name);
/* The n-th name of an LV, NULL when there are no more. Loaded; borrowed until the report goes. */
const char *lvm_dir_name(const struct lvm_dir *dir, const struct lvm_lv *lv, unsigned n);
/* The tag of a guest's volume or snapshot, by its name: Proxmox finds them so. false: it is no
 * guest's. Renames to such a name set it. */
bool lvm_dir_owner(const char *name, char *tag, size_t len);
/* The tag by which Proxmox activates a qcow2 volume with its snapshots. false: it has none. */
bool lvm_dir_chain(const char *name, char *tag, size_t len);
/* By our tag, or by Proxmox's "pve-vm-<vmid>". */
bool lvm_dir_is_ours(const struct lvm_lv *lv);

/* Errors of all of these: those of lvm.h; -EPERM the LV is not ours. */
/* One name more. -ENOENT, -EEXIST. */
SUSPENDS int lvm_dir_link(struct lvm_dir *dir, const char *old, const char *new, struct err *err);
/* `old` becomes `new`, which an LV may have: it keeps its other names, or is removed without one.
 * Two names of one LV: `old` goes. -ENOENT. */
SUSPENDS int lvm_dir_rename(struct lvm_dir *dir, const char *old, const char *new, struct err *err);
/* The name goes, with its last one the LV; one that is open is renamed to a hidden name until
 * nobody has it open (lvm_dir_sweep), and with dir->wipe each is until it was wiped
 * (pool_wipe.c). Of none it is success. */
SUSPENDS int lvm_dir_unlink(struct lvm_dir *dir, const char *name, struct err *err);
/* Removes what was unlinked on this host while it was open, and is no longer. */
SUSPENDS int lvm_dir_sweep(struct lvm_dir *dir, struct err *err);
/* "the LV is such a one", or waits to be wiped: no volume any more. */
bool lvm_dir_is_gone(const struct lvm_lv *lv);
/* It waits to be wiped; by this host, which knows whether it is open. */
bool lvm_dir_is_to_wipe(const struct lvm_lv *lv);
bool lvm_dir_is_to_wipe_here(const struct lvm_lv *lv);
/* So many bytes of it are zero already. */
uint64_t lvm_dir_wiped(const struct lvm_lv *lv);
/* Notes that in a tag. The LV is one of the report's. */
SUSPENDS int lvm_dir_set_wiped(struct lvm_dir *dir, struct lvm_lv *lv, uint64_t bytes,
                               struct err *err);
/* Finishes renames that were cut off. */
SUSPENDS int lvm_dir_settle(struct lvm_dir *dir, struct err *err);

#endif
