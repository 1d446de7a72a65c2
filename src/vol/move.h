/* A volume on its way to another storage: shared by move.c, move_files.c and move_image.c. */
#ifndef VARVE_VOL_MOVE_H
#define VARVE_VOL_MOVE_H

#include "chain/chain.h"
#include "vol/copyfile.h"

struct moved_file {
    const struct cfile *src;
    char *tmp, *to; /* paths in the target: while it is made, and at last */
    char *backing;  /* as it is to be recorded; NULL: nothing */
    const char *backing_format;
    bool flatten; /* what it shows, not what it has */
    struct blk *hold;
};
struct move {
    const struct vol_ctx *ctx;
    struct op src, dst;
    struct cvol *vol;
    struct vol_name *there; /* its name in the target */
    char *dir;              /* in the target */
    bool delete, flatten;
    bool as_images;               /* one side is a volume group: images are copied, not files */
    VEC(struct moved_file) files; /* snapshots, then the current element */
    VEC(struct chain *) compared; /* of the target, what the volume will stand on: held open */
    struct copy_meter meter;
};

/* What a volume of the source is called in the target: a guest's number is a directory, or just a
 * part of the name. -EINVAL: it can have no such name there. */
int move_name_there(const struct pool *from, const struct pool *to, const char *vmid,
                    const char *stem, struct vol_name *ret, struct err *err);
/* What the volume stands on outside of itself has to be in the target, or is flattened. */
int move_plan_files(struct move *m, struct err *err);
/* Nobody has the volume's files open, and nobody opens them. */
SUSPENDS int move_hold_files(struct move *m, struct err *err);
/* What is in the target under the name of what the volume stands on is the same. It is held. */
SUSPENDS int move_compare_bases(struct move *m, struct err *err);
/* All files under hidden names, durable. */
SUSPENDS int move_copy_files(struct move *m, struct err *err);
/* move_image.c: one of them, by what it has; under its hidden name. */
SUSPENDS int move_copy_image(struct move *m, struct moved_file *f, struct err *err);
SUSPENDS void move_files_fini(struct move *m);

#endif
