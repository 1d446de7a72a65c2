/* What the files of this folder share. Private to src/job (and its own tests). */
#ifndef VARVE_JOB_INTERNAL_H
#define VARVE_JOB_INTERNAL_H

#include "base/list.h"
#include "chain/chain.h"
#include "chain/merge.h"
#include "job/job.h"
#include "job/ranges.h"
#include "rt/wait.h"

/* ---- copy.c: the one copy loop ---- */
struct copy_loop {
    uint64_t off, end;
    uint64_t chunk;    /* bytes of a step; power of two */
    unsigned parallel; /* steps at once */
    /* What comes at off: *ret_skip, and for how many bytes. */
    int (*scan)(void *ctx, uint64_t off, uint64_t len, bool *ret_skip, uint64_t *ret_len);
    int (*copy)(void *ctx, uint64_t off, uint64_t len);
    /* Before each step: pause, cancel, rate (bytes of the step; 0: only looked at). May be NULL. */
    int (*pace)(void *ctx, uint64_t bytes);
    void (*progress)(void *ctx, uint64_t bytes); /* skipped or copied; may be NULL */
    void *ctx;
};
#define COPY_STEP_MAX     ((uint64_t)2 << 20) /* longest read at once */
#define COPY_PARALLEL     8u
#define COPY_PARALLEL_MAX 64u
/* Returns once all steps have ended; the first error wins. */
SUSPENDS int copy_run(struct copy_loop *loop);
/* Steps for a target of this cluster size: a cluster is written by one step. */
uint64_t copy_chunk(uint64_t cluster_size);
/* Holes of a source's file that are not copied to this target: whole units of its map, and not so
 * small that copying around them costs more than they do. */
uint64_t copy_hole_unit(const struct layer *target);

/* ---- job.c ---- */
struct job_ops {
    int (*start)(struct job *job, struct err *err);  /* before the first step; may wait */
    int (*run)(struct job *job);                     /* copies; until READY and back for active */
    int (*finish)(struct job *job, struct err *err); /* switches; on failure nothing changed */
    void (*clean)(struct job *job);                  /* after failure or cancel */
};

struct jobs {
    struct list list; /* oldest first */
    job_event_fn *fn;
    void *ctx;
};

struct job {
    struct list link;
    struct jobs *jobs;
    char *id;
    enum job_type type;
    enum job_state state;
    const struct job_ops *ops;
    struct chain *chain;
    struct layer *top, *base; /* base: NULL for a stream of everything */
    char *backing_name;       /* owned; NULL: made from the paths */
    bool auto_finalize, auto_dismiss;

    /* control: set by verbs, `kick` tells the job */
    bool pause_wanted, cancel_wanted, complete_wanted, finalize_wanted, finishing;
    struct co_cond kick;
    struct co_cond ended; /* concluded */
    unsigned waiters;

    uint64_t done, total, speed, next_ns /* when the rate allows the next step */;
    uint64_t max_stall_ns;
    int rc;
    struct err err;

    /* the merge; see commit.c and stream.c */
    bool active, started, synced;
    bool base_was_writable, top_was_writable;
    struct chain_watch watch;
    struct ranges ranges;
    uint64_t frontier; /* active commit: writes below it go to both */
    int mirror_rc;     /* first failure of the second write */
};

/* Waits while paused; -ECANCELED when cancelled, or the mirror's failure. */
SUSPENDS int job_checkpoint(struct job *job);
/* copy_loop.pace and .progress for a job. */
SUSPENDS int job_pace(void *ctx, uint64_t bytes);
void job_progress(void *ctx, uint64_t bytes);
void job_set_state(struct job *job, enum job_state state);
void job_event(struct job *job, enum job_event event);
void job_note_stall(struct job *job, uint64_t ns);
/* One step of a merge: copy() inside the chain's work gate; in the live top with the range locked
 * against guest writes, and the time that takes is noted as a stall. */
SUSPENDS int job_step(struct job *job, uint64_t off, uint64_t len,
                      int (*copy)(struct job *job, uint64_t off, uint64_t len));
/* Explains a failure of I/O at a range; returns rc. */
int job_fail(struct job *job, int rc, const char *what, const struct layer *layer, uint64_t off);
/* Checks options, makes and starts the job's coroutine. Layers are pinned by the caller; on failure
 * the caller unpins. */
SUSPENDS int job_start(struct jobs *jobs, const struct job *proto, const struct job_opts *opts,
                       struct err *err);
/* Name for the header of `changed` when `to` becomes its backing file (NULL: none, *ret = NULL). */
SUSPENDS int job_backing_name(const struct job *job, const struct layer *changed,
                              const struct layer *to, char **ret, struct err *err);
/* Takes layers first..last out of a frozen chain, thaws it and closes them. */
SUSPENDS void job_drop_layers(struct job *job, struct layer *first, struct layer *last);
/* -EBUSY if a view of one of first..last has been opened meanwhile. */
int job_check_unused(const struct layer *first, const struct layer *last, struct err *err);

#endif
