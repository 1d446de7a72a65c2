/*
 * States, control and accounting of jobs. Invariants:
 *
 * 1. A job's coroutine alone changes its state; verbs set a wish and kick it.
 * 2. Layers a job merges are pinned from before it exists until it is concluded.
 * 3. A concluded job is off its chain; it is freed when dismissed and nobody waits for it.
 */
#include <stdio.h>
#include <string.h>
#include "base/bits.h"
#include "base/check.h"
#include "job/internal.h"
#include "rt/reactor.h"
#include "rt/timer.h"

const char *job_type_name(enum job_type type)
{
    return type == JOB_COMMIT ? "commit" : "stream";
}

const char *job_state_name(enum job_state state)
{
    static const char *const names[] = {
        [JOB_CREATED] = "created", [JOB_RUNNING] = "running",   [JOB_PAUSED] = "paused",
        [JOB_READY] = "ready",     [JOB_STANDBY] = "standby",   [JOB_WAITING] = "waiting",
        [JOB_PENDING] = "pending", [JOB_ABORTING] = "aborting", [JOB_CONCLUDED] = "concluded",
        [JOB_NULL] = "null",
    };

    return names[state];
}

static void fill_info(const struct job *job, struct job_info *ret)
{
    *ret = (struct job_info){
        .id = job->id,
        .type = job->type,
        .state = job->state,
        .paused = job->pause_wanted,
        .cancelled = job->cancel_wanted,
        .done_bytes = job->done,
        .total_bytes = job->total,
        .speed = job->speed,
        .max_stall_ns = job->max_stall_ns,
        .rc = job->rc,
    };
    if (job->rc < 0)
        snprintf(ret->error, sizeof(ret->error), "%s", err_text(&job->err));
}

void job_event(struct job *job, enum job_event event)
{
    struct job_info info;

    if (!job->jobs->fn)
        return;
    fill_info(job, &info);
    job->jobs->fn(job->jobs->ctx, &info, event);
}

void job_set_state(struct job *job, enum job_state state)
{
    if (job->state == state)
        return;
    job->state = state;
    job_event(job, JOB_EVENT_STATE);
}

void job_note_stall(struct job *job, uint64_t ns)
{
    job->max_stall_ns = MAX(job->max_stall_ns, ns);
}

int job_step(struct job *job, uint64_t off, uint64_t len,
             int (*copy)(struct job *job, uint64_t off, uint64_t len))
{
    struct range range;
    int rc;

    chain_work_enter(job->chain);
    if (job->active) {
        range_lock(&job->ranges, &range, off, len);
        uint64_t start = reactor_now();
        rc = copy(job, off, len);
        job_note_stall(job, reactor_now() - start);
        range_unlock(&range);
    } else {
        rc = copy(job, off, len);
    }
    chain_work_leave(job->chain);
    return rc;
}

int job_fail(struct job *job, int rc, const char *what, const struct layer *layer, uint64_t off)
{
    if (job->err.rc == 0)
        err_errno(&job->err, rc, "%s '%s' at byte %llu", what, layer_path(layer),
                  (unsigned long long)off);
    return rc;
}

/* ---- the job's side of control ---- */

int job_checkpoint(struct job *job)
{
    enum job_state running = job->state;

    while (job->pause_wanted && !job->cancel_wanted && job->mirror_rc == 0) {
        job_set_state(job, job->synced ? JOB_STANDBY : JOB_PAUSED);
        co_cond_wait(&job->kick, NULL);
    }
    if (job->cancel_wanted)
        return -ECANCELED;
    if (job->mirror_rc < 0)
        return job->mirror_rc;
    job_set_state(job, running);
    return 0;
}

int job_pace(void *ctx, uint64_t bytes)
{
    struct job *job = ctx;
    int rc = job_checkpoint(job);

    if (bytes == 0)
        return rc;
    while (rc == 0 && job->speed > 0 && reactor_now() < job->next_ns) {
        co_cond_wait_until(&job->kick, NULL, job->next_ns);
        rc = job_checkpoint(job);
    }
    if (rc == 0 && job->speed > 0)
        job->next_ns = MAX(job->next_ns, reactor_now()) +
                       (uint64_t)((double)bytes * (double)NSEC_PER_SEC / (double)job->speed);
    return rc;
}

void job_progress(void *ctx, uint64_t bytes)
{
    struct job *job = ctx;

    job->done += bytes;
}

static void job_free(struct job *job)
{
    list_remove(&job->link);
    free(job->backing_name);
    free(job->id);
    free(job);
}

/* Concluded, wanted by nobody: goes away once the last waiter has left. */
static void job_dismiss_now(struct job *job)
{
    job_set_state(job, JOB_NULL);
    list_remove(&job->link);
    if (job->waiters == 0)
        job_free(job);
}

static void conclude(struct job *job, int rc)
{
    job->rc = rc;
    if (rc < 0 && job->err.rc == 0)
        err_errno(&job->err, rc, "%s", job_type_name(job->type));
    job->finishing = true;
    job_event(job, rc == 0            ? JOB_EVENT_COMPLETED
                   : rc == -ECANCELED ? JOB_EVENT_CANCELLED
                                      : JOB_EVENT_ERROR);
    job_set_state(job, JOB_CONCLUDED);
    co_cond_broadcast(&job->ended);
    if (job->auto_dismiss)
        job_dismiss_now(job);
}

SUSPENDS static int wait_finalize(struct job *job)
{
    job_set_state(job, JOB_WAITING);
    job_set_state(job, JOB_PENDING);
    while (!job->auto_finalize && !job->finalize_wanted) {
        if (job->cancel_wanted)
            return -ECANCELED;
        if (job->mirror_rc < 0)
            return job->mirror_rc;
        co_cond_wait(&job->kick, NULL);
    }
    return 0;
}

SUSPENDS static void job_main(void *arg)
{
    struct job *job = arg;

    job_set_state(job, JOB_RUNNING);
    int rc = job_checkpoint(job);
    if (rc == 0)
        rc = job->ops->start(job, &job->err);
    if (rc == 0)
        rc = job->ops->run(job);
    if (rc == 0)
        rc = wait_finalize(job);
    if (rc == 0) {
        job->finishing = true;
        rc = job->ops->finish(job, &job->err);
    }
    if (rc < 0) {
        job_set_state(job, JOB_ABORTING);
        job->ops->clean(job);
    }
    conclude(job, rc);
}

/* ---- starting ---- */

static struct job *find(const struct jobs *jobs, const char *id)
{
    for (struct list *it = jobs->list.next; it != &jobs->list; it = it->next) {
        struct job *job = list_entry(it, struct job, link);
        if (strcmp(job->id, id) == 0)
            return job;
    }
    return NULL;
}

int job_start(struct jobs *jobs, const struct job *proto, const struct job_opts *opts,
              struct err *err)
{
    if (!opts->id || !*opts->id)
        return err_set(err, -EINVAL, "a job needs an id");
    if (find(jobs, opts->id))
        return err_set(err, -EEXIST, "job '%s' exists already", opts->id);
    struct job *job = calloc(1, sizeof(*job));
    if (!job)
        return err_errno(err, -ENOMEM, "job");
    *job = *proto;
    job->jobs = jobs;
    job->state = JOB_CREATED;
    job->speed = opts->speed;
    job->auto_finalize = opts->auto_finalize;
    job->auto_dismiss = opts->auto_dismiss;
    co_cond_init(&job->kick);
    co_cond_init(&job->ended);
    ranges_init(&job->ranges);
    list_init(&job->link);
    job->id = strdup(opts->id);
    job->backing_name = opts->backing_name ? strdup(opts->backing_name) : NULL;
    int rc = !job->id || (opts->backing_name && !job->backing_name) ? -ENOMEM : 0;
    if (rc == 0)
        rc = reactor_spawn(job_main, job);
    if (rc < 0) {
        job_free(job);
        return err_errno(err, rc, "job '%s'", opts->id);
    }
    list_push_back(&jobs->list, &job->link);
    job_event(job, JOB_EVENT_STATE);
    return 0;
}

int jobs_new(job_event_fn *fn, void *ctx, struct jobs **ret)
{
    struct jobs *jobs = calloc(1, sizeof(*jobs));

    if (!jobs)
        return -ENOMEM;
    list_init(&jobs->list);
    jobs->fn = fn;
    jobs->ctx = ctx;
    *ret = jobs;
    return 0;
}

SUSPENDS static void wait_ended(struct job *job)
{
    job->waiters++;
    while (job->state != JOB_CONCLUDED && job->state != JOB_NULL)
        co_cond_wait(&job->ended, NULL);
    job->waiters--;
}

/* The last waiter of a job that is gone from the list frees it. */
static void leave_ended(struct job *job)
{
    if (job->waiters == 0 && job->state == JOB_NULL)
        job_free(job);
}

void jobs_free(struct jobs *jobs)
{
    if (!jobs)
        return;
    while (!list_empty(&jobs->list)) {
        struct job *job = list_entry(jobs->list.next, struct job, link);

        job->cancel_wanted = !job->finishing;
        co_cond_broadcast(&job->kick);
        job->auto_dismiss = false;
        wait_ended(job);
        job_dismiss_now(job);
    }
    free(jobs);
}

/* ---- verbs ---- */

static int lookup(struct jobs *jobs, const char *id, struct job **ret, struct err *err)
{
    *ret = find(jobs, id);
    return *ret ? 0 : err_set(err, -ENOENT, "no job '%s'", id);
}

static int refuse(const struct job *job, const char *verb, struct err *err)
{
    return err_set(err, -EBUSY, "job '%s' in state '%s' cannot accept command verb '%s'", job->id,
                   job_state_name(job->state), verb);
}

static bool is_copying(const struct job *job)
{
    return job->state <= JOB_STANDBY;
}

int job_pause(struct jobs *jobs, const char *id, struct err *err)
{
    struct job *job;
    int rc = lookup(jobs, id, &job, err);

    if (rc < 0)
        return rc;
    if (!is_copying(job))
        return refuse(job, "pause", err);
    if (job->pause_wanted)
        return err_set(err, -EBUSY, "job '%s' is already paused", id);
    job->pause_wanted = true;
    co_cond_broadcast(&job->kick);
    return 0;
}

int job_resume(struct jobs *jobs, const char *id, struct err *err)
{
    struct job *job;
    int rc = lookup(jobs, id, &job, err);

    if (rc < 0)
        return rc;
    if (!job->pause_wanted)
        return err_set(err, -EBUSY, "job '%s' is not paused", id);
    job->pause_wanted = false;
    co_cond_broadcast(&job->kick);
    return 0;
}

int job_cancel(struct jobs *jobs, const char *id, bool force, struct err *err)
{
    struct job *job;
    int rc = lookup(jobs, id, &job, err);

    if (rc < 0)
        return rc;
    if (job->finishing || job->state > JOB_PENDING)
        return refuse(job, "cancel", err);
    job->cancel_wanted = true;
    co_cond_broadcast(&job->kick);
    return 0;
}

int job_complete(struct jobs *jobs, const char *id, struct err *err)
{
    struct job *job;
    int rc = lookup(jobs, id, &job, err);

    if (rc < 0)
        return rc;
    if (job->state != JOB_READY)
        return refuse(job, "complete", err);
    job->complete_wanted = true;
    co_cond_broadcast(&job->kick);
    return 0;
}

int job_finalize(struct jobs *jobs, const char *id, struct err *err)
{
    struct job *job;
    int rc = lookup(jobs, id, &job, err);

    if (rc < 0)
        return rc;
    if (job->state != JOB_PENDING)
        return refuse(job, "finalize", err);
    job->finalize_wanted = true;
    co_cond_broadcast(&job->kick);
    return 0;
}

int job_dismiss(struct jobs *jobs, const char *id, struct err *err)
{
    struct job *job;
    int rc = lookup(jobs, id, &job, err);

    if (rc < 0)
        return rc;
    if (job->state != JOB_CONCLUDED)
        return refuse(job, "dismiss", err);
    job_dismiss_now(job);
    return 0;
}

int job_set_speed(struct jobs *jobs, const char *id, uint64_t speed, struct err *err)
{
    struct job *job;
    int rc = lookup(jobs, id, &job, err);

    if (rc < 0)
        return rc;
    if (!is_copying(job))
        return refuse(job, "set-speed", err);
    job->speed = speed;
    job->next_ns = 0;
    co_cond_broadcast(&job->kick);
    return 0;
}

void jobs_each(struct jobs *jobs, void (*fn)(void *ctx, const struct job_info *info), void *ctx)
{
    list_for_each(it, &jobs->list) {
        struct job_info info;

        fill_info(list_entry(it, struct job, link), &info);
        fn(ctx, &info);
    }
}

bool jobs_busy(const struct jobs *jobs, const struct chain *chain)
{
    for (struct list *it = jobs->list.next; it != &jobs->list; it = it->next) {
        const struct job *job = list_entry(it, struct job, link);

        if (job->chain == chain && job->state < JOB_CONCLUDED)
            return true;
    }
    return false;
}

int job_wait(struct jobs *jobs, const char *id, struct err *err)
{
    struct job *job;
    int rc = lookup(jobs, id, &job, err);

    if (rc < 0)
        return rc;
    wait_ended(job);
    rc = job->rc;
    if (rc < 0 && err)
        *err = job->err;
    leave_ended(job);
    return rc;
}

/* ---- shared by the kinds of jobs ---- */

int job_backing_name(const struct job *job, const struct layer *changed, const struct layer *to,
                     char **ret, struct err *err)
{
    int rc = 0;

    *ret = NULL;
    if (!to)
        return 0;
    if (job->backing_name)
        rc = (*ret = strdup(job->backing_name)) ? 0 : -ENOMEM;
    else
        rc = layer_relative_name(changed, to, ret);
    return rc < 0 ? err_errno(err, rc, "backing file name") : 0;
}

int job_check_unused(const struct layer *first, const struct layer *last, struct err *err)
{
    for (const struct layer *l = first; l; l = layer_lower(l)) {
        if (layer_in_use(l))
            return err_set(err, -EBUSY, "'%s' is in use", layer_path(l));
        if (l == last)
            break;
    }
    return 0;
}

/* The image is left as it should be; that closing failed changes nothing of the result. */
void job_drop_layers(struct job *job, struct layer *first, struct layer *last)
{
    struct layer *l = chain_cut(job->chain, first, last);

    chain_top_changed(job->chain);
    job_note_stall(job, chain_thaw(job->chain));
    while (l) {
        struct layer *next = layer_lower(l);

        layer_close(l, NULL);
        l = next;
    }
}
