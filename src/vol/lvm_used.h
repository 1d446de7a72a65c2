/*
 * What the processes of this host have activated in a volume group.
 *
 * A process notes an LV's UUID in a file of its own, <lock folder>/<vg>.used-<id>, before it
 * activates it, and holds the file's lock while it lives. So whoever ends knows which LVs others
 * still need, and what a killed process has left active is found and deactivated by the next.
 * Nothing here fails but for want of memory: an LV without a note stays active after a kill.
 */
#ifndef VARVE_VOL_LVM_USED_H
#define VARVE_VOL_LVM_USED_H

#include <stdbool.h>
#include "base/err.h"
#include "base/vec.h"

struct lvm_used {
    const char *vg;    /* borrowed */
    VEC(char *) list;  /* UUIDs that this process looks after */
    VEC(char *) other; /* those of processes that live; as of lvm_used_adopt() */
    char *path;        /* of our file; NULL: there is none */
    int fd;
};

void lvm_used_init(struct lvm_used *u, const char *vg);
/* Forgets all; the file stays as it is, as when the process ends. */
void lvm_used_fini(struct lvm_used *u);
int lvm_used_add(struct lvm_used *u, const char *uuid, struct err *err); /* there is fine */
void lvm_used_remove(struct lvm_used *u, size_t index);
/* Has a process ended without having looked after its own? One look at a folder. */
bool lvm_used_any_dead(const struct lvm_used *u);
/* Takes over what dead processes have left, unless one that lives needs it; fills `other`. Under
 * the pool's lock. */
int lvm_used_adopt(struct lvm_used *u, struct err *err);
bool lvm_used_by_other(const struct lvm_used *u, const char *uuid);
/* The file is as the list; goes with its last entry. */
void lvm_used_write(struct lvm_used *u);

#endif
