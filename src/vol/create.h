/* A volume in the making: shared by create.c and import.c. */
#ifndef VARVE_VOL_CREATE_H
#define VARVE_VOL_CREATE_H

#include "chain/chain.h"
#include "vol/internal.h"

#define NEW_MODE 0640

struct new_volume {
    bool prealloc_chosen; /* by the user or the pool, not a default */
    bool filled;          /* what it is filled with is written over all of its length */
    struct op *op;
    char vmid[16], stem[256];
    const char *format;             /* "qcow2" or "raw" */
    struct image_create_opts image; /* preallocation also for raw */
    char *dir, *tmp, *path;         /* directory, hidden name, the volume's name */
    uint64_t len; /* of the disk where the source is longer, a spool on whole extents; 0: the
                     source's */
};
/* All that can be refused; touches nothing. Release with new_volume_fini. */
int new_volume_plan(struct op *op, const struct vol_name *name, const struct vol_create_opts *opts,
                    struct new_volume *ret, struct err *err);
void new_volume_fini(struct new_volume *nv);
int new_volume_dirs(struct new_volume *nv, struct err *err);
int new_volume_begin(struct new_volume *nv, struct err *err); /* directories, intent */
SUSPENDS int new_volume_make(struct new_volume *nv, uint64_t len, struct err *err);
/* Makes it and copies what the chain shows, at the pool's rate. */
SUSPENDS int new_volume_fill(struct new_volume *nv, struct chain *src, struct err *err);
/* Its image is a copy of the chain's lowest file: copies what those above it have. */
SUSPENDS int new_volume_fill_above(struct new_volume *nv, struct chain *src, struct err *err);
/* The same for one image under a hidden name of an operation, as the pool makes new ones. */
SUSPENDS int new_image_fill(struct op *op, const char *tmp, const char *format, struct chain *src,
                            struct err *err);
/* What a new volume's image has allocated from the start: as chosen (NULL: nothing), else as the
 * pool says, else what suits it. */
int pool_preallocation(const struct pool *pool, const char *chosen, enum qcow2_prealloc *ret,
                       struct err *err);
int new_volume_publish(struct new_volume *nv, struct err *err); /* and the intent is gone */
void new_volume_undo(struct new_volume *nv);
/* "<id> <what>", the id as it is listed from now on. */
void new_volume_say(const struct new_volume *nv, const char *what);

#endif
