/*
 * Long work on a chain: commit (merge a layer into the one below) and stream (merge what is
 * below into a layer), while guests go on reading and writing.
 *
 * States as QEMU's jobs:
 *
 *   CREATED -> RUNNING <-> PAUSED                      (any state) -> ABORTING -> CONCLUDED ->
 * (gone)
 *                 |
 *                 +-> READY <-> STANDBY  (active commit only) -> WAITING/PENDING -> CONCLUDED
 *                 +-> WAITING -> PENDING -> CONCLUDED
 *
 * A job is a coroutine on the chain's reactor. It never changes what the guest sees: at any
 * instant the chain reads the same with the merge half done, so a crash or cancel needs no undo.
 */
#ifndef VARVE_JOB_JOB_H
#define VARVE_JOB_JOB_H

#include <stdbool.h>
#include <stdint.h>
#include "base/err.h"
#include "chain/chain.h"

enum job_type { JOB_COMMIT, JOB_STREAM };
enum job_state {
    JOB_CREATED,
    JOB_RUNNING,
    JOB_PAUSED,
    JOB_READY,
    JOB_STANDBY,
    JOB_WAITING,
    JOB_PENDING,
    JOB_ABORTING,
    JOB_CONCLUDED,
    JOB_NULL,
};
const char *job_type_name(enum job_type type);    /* "commit", "stream" */
const char *job_state_name(enum job_state state); /* QMP spelling */

struct job_info { /* a snapshot of a job's figures */
    const char *id;
    enum job_type type;
    enum job_state state;
    bool paused, cancelled;
    uint64_t done_bytes, total_bytes; /* of work; total may grow under guest writes */
    uint64_t speed;                   /* bytes a second; 0 = unlimited */
    uint64_t max_stall_ns;            /* longest time the job kept the gate or a range closed */
    int rc;                           /* when concluded */
    char error[256];
};
enum job_event {
    JOB_EVENT_STATE,
    JOB_EVENT_READY,
    JOB_EVENT_COMPLETED,
    JOB_EVENT_CANCELLED,
    JOB_EVENT_ERROR
};

struct job;
struct jobs; /* all jobs of a process; owns them */
typedef void job_event_fn(void *ctx, const struct job_info *info, enum job_event event);

int jobs_new(job_event_fn *fn, void *ctx, struct jobs **ret);
/* Cancels and waits for all, then frees. */
SUSPENDS void jobs_free(struct jobs *jobs);

struct job_opts {
    const char *id;     /* unique; required */
    uint64_t speed;     /* bytes a second, 0 = unlimited */
    bool auto_finalize; /* false: waits in PENDING for job_finalize */
    bool auto_dismiss;  /* false: stays CONCLUDED until job_dismiss */
    /* The name written as backing file when a header has to change (NULL: the path of the new
     * backing layer relative to the directory of the changed one), and its format. */
    const char *backing_name;
};
/*
 * Commit: merges `top` and every layer down to, but without, `base` into `base`; layers between are
 * removed from the chain and the image above `top` gets `base` as backing file. base grows first if
 * it is shorter. With `top` == the chain's top it is an active commit: guest writes go to both once
 * the job is READY; job_complete pivots to base. The removed layers are closed; files are not
 * deleted.
 */
SUSPENDS int job_commit(struct jobs *jobs, struct chain *chain, struct layer *top,
                        struct layer *base, const struct job_opts *opts, struct err *err);
/*
 * Stream: copies into `top` what the layers between it and `base` (excluded; NULL: everything
 * below) hold and top does not; then `top` gets base as backing file and the layers between are
 * removed.
 */
SUSPENDS int job_stream(struct jobs *jobs, struct chain *chain, struct layer *top,
                        struct layer *base, const struct job_opts *opts, struct err *err);

/* By id; -ENOENT; -EBUSY where the state does not allow it (text says so). */
int job_pause(struct jobs *jobs, const char *id, struct err *err);
int job_resume(struct jobs *jobs, const char *id, struct err *err);
int job_cancel(struct jobs *jobs, const char *id, bool force, struct err *err);
int job_complete(struct jobs *jobs, const char *id, struct err *err);
int job_finalize(struct jobs *jobs, const char *id, struct err *err);
int job_dismiss(struct jobs *jobs, const char *id, struct err *err);
int job_set_speed(struct jobs *jobs, const char *id, uint64_t speed, struct err *err);
/* Calls fn for every job, oldest first. */
void jobs_each(struct jobs *jobs, void (*fn)(void *ctx, const struct job_info *info), void *ctx);
bool jobs_busy(const struct jobs *jobs, const struct chain *chain);
/* Waits until the job is concluded (or gone); its result. */
SUSPENDS int job_wait(struct jobs *jobs, const char *id, struct err *err);

/* Which way is cheaper to merge away the layer at `index` (> 0) with its child at index - 1:
 * commit the child into it, or stream it into the child, by bytes to copy. */
struct job_direction {
    bool commit;
    uint64_t commit_bytes, stream_bytes;
};
SUSPENDS int job_direction(struct chain *chain, unsigned index, struct job_direction *ret);

/* The one copy loop, also used by convert: copies what `chain` shows from `layer` downwards (NULL:
 * top) into `dst` (a writable chain at least as long), zeroes kept as zeroes. */
struct copy_opts {
    unsigned parallel;   /* requests at once; 0 = 8 */
    bool target_is_zero; /* zero ranges need no write */
    struct layer
        *until;        /* what this one and those below it have is in dst already; NULL: nothing */
    bool keep_holes;   /* what src has nothing of shows what dst stands on, and is left alone */
    uint64_t min_zero; /* detect runs of zero bytes in data of at least so many; 0 = off */
    uint64_t speed;    /* bytes a second; 0 = unlimited */
    void (*progress)(void *ctx, uint64_t done, uint64_t total);
    void *ctx;
};
SUSPENDS int copy_chain(struct chain *src, struct layer *layer, struct chain *dst,
                        const struct copy_opts *opts, struct err *err);

#endif
