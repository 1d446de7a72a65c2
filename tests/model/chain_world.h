/* The world of the chain model: devices, the array and its history, power cuts. See chain.c. */
#ifndef VARVE_TESTS_CHAIN_WORLD_H
#define VARVE_TESTS_CHAIN_WORLD_H

#include "base/bits.h"
#include "base/vec.h"
#include "job/job.h"
#include "rig.h"
#include "rt/timer.h"
#include "rt/wait.h"

#define LEN_MAX   (3 * MIB)
#define DEPTH_MAX 7u
#define NAME_LEN  16u

/* ---- what a sector may hold after a power cut ---- */

struct value {
    uint64_t stamp;
    uint64_t done; /* when the write had been answered; 0 while under way */
};
struct sector {
    uint64_t stamp;            /* as read while the power is on */
    VEC(struct value) history; /* since the last flush that covered it, oldest first */
};

struct disk { /* one layer's device */
    char name[NAME_LEN];
    struct blk *dev; /* owned; NULL: a file of this name in the test's directory */
    bool qcow2;
    uint64_t len;
    uint8_t *view; /* content of the frozen view; NULL while top */
};

enum {
    OP_READ,
    OP_WRITE,
    OP_ZERO,
    OP_DISCARD,
    OP_FLUSH,
    OP_PUSH,
    OP_COMMIT,
    OP_ACTIVE,
    OP_STREAM,
    OP_RESIZE,
    OP_ROLLBACK,
    OP_REOPEN,
    OP_CUT,
    OP_CANCEL,
    OPS
};

struct world {
    uint64_t rng;
    bool files; /* real files, checked with QEMU's tools */
    bool cuts;
    struct chain *chain;
    struct jobs *jobs;
    VEC(struct disk *) disks; /* of the chain, top first */
    unsigned last_name;
    struct sector *sectors; /* LEN_MAX of them */
    uint64_t len, clock, next_stamp;
    uint64_t cut_len; /* of the chain that a cut leaves, where it is not len; else 0 */
    struct ranges ranges;
    struct gate gate; /* guests inside an operation */
    bool stop, job_ready, careful;
    bool no_cuts; /* length or current disk are about to change outside the chain */
    uint64_t ops, ops_wanted, cuts_done, leaks_seen, unflushed_seen, counts[OPS];
};

extern const char *const op_names[OPS];

#define MUST(call)                                                                                 \
    do {                                                                                           \
        struct err err = {0};                                                                      \
        int must_rc_ = (call);                                                                     \
        if (must_rc_ < 0)                                                                          \
            test_fail(__FILE__, __LINE__, "%s: %d %s", #call, must_rc_, err_text(&err));           \
    } while (0)

/* ---- what happened last, for a failure's message ---- */
void trail_add(unsigned op, uint64_t first, uint64_t nr, uint64_t stamp);
/* What concerns a sector, newest first; changes of shape concern all. */
void trail_print(uint64_t sector);

static inline uint64_t rnd(struct world *w, uint64_t n)
{
    return rng_below(&w->rng, n);
}

/* ---- what sectors may hold (history is kept only where the power is cut) ---- */
void sector_set(struct world *w, uint64_t i, uint64_t stamp);
/* A write is under way, then answered. */
void history_begin(struct world *w, uint64_t first, uint64_t nr, uint64_t stamp);
void history_done(struct world *w, uint64_t first, uint64_t nr);
/* A flush issued at `since` is done: of what was answered before it only the newest may remain. */
void history_flushed(struct world *w, uint64_t since);
/* From this sector on only what is there now may be found. */
void history_reset(struct world *w, uint64_t first);
void history_check(const struct world *w, uint64_t i, uint64_t stamp);

/* ---- devices ---- */
const char *path_of(const struct world *w, const struct disk *d);
SUSPENDS struct disk *disk_new(struct world *w, const struct rig_shape *shape,
                               const struct disk *backing);
SUSPENDS void disk_drop(struct world *w, struct disk *d);
SUSPENDS struct layer *disk_open(struct world *w, struct disk *d, bool writable);
SUSPENDS void open_chain(struct world *w);
SUSPENDS void check_clean(struct world *w);

/* ---- power cuts ---- */
void free_sectors(struct sector *sectors);
/* Looks at what a cut at this instant leaves. */
SUSPENDS void do_cut(struct world *w);
/* A child that cuts at any moment: in the middle of a push, of the end of a job, of a flush. */
SUSPENDS int cutter(void *arg);

#endif
