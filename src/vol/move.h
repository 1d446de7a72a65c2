/* A volume on its way to another storage: shared by move.c and move_files.c. */
#ifndef VARVE_VOL_MOVE_H
#define VARVE_VOL_MOVE_H

#include "chain/chain.h"
#include "vol/copyfile.h"

struct moved_file {
    const struct cfile *src;
    char *tmp, *to; /* paths in the target: while it is made, and at last */
    char *backing;  /* as it is to be recorded; NULL: as it is, or nothing (flattened) */
    bool flatten;   /* what it shows, not what it has */
    struct blk *hold;
};
struct move {
    const struct vol_ctx *ctx;
    struct op src, dst;
    struct cvol *vol;
    char *dir; /* in the target */
    bool delete, flatten;
    VEC(struct moved_file) files; /* snapshots, then the current element */
    VEC(struct chain *) compared; /* of the target, what the volume will stand on: held open */
    struct copy_meter meter;
};

/* What the volume stands on outside of itself has to be in the target, or is flattened. */
int move_plan_files(struct move *m, struct err *err);
/* Nobody has the volume's files open, and nobody opens them. */
SUSPENDS int move_hold_files(struct move *m, struct err *err);
/* What is in the target under the name of what the volume stands on is the same. It is held. */
SUSPENDS int move_compare_bases(struct move *m, struct err *err);
/* All files under hidden names, durable. */
SUSPENDS int move_copy_files(struct move *m, struct err *err);
SUSPENDS void move_files_fini(struct move *m);

#endif
