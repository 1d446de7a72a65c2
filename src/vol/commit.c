/*
 * Deleting a snapshot by putting its child's data into it: the snapshot's file then takes the
 * child's name. Everything above the child finds what it stood on under the same name; only where
 * the snapshot is raw and the child is not does the name change, and with it the backing names of
 * those above.
 *
 *   idle                                        a kill after it leaves
 *   1 commit child into snapshot                the child reads as before; the snapshot is no
 * longer one 2 rename snapshot over child                done (raw: link snapshot as the new name,
 * rewrite the children's headers, unlink child, unlink snapshot)
 *
 *   served, the child below the disk's top: the server's job does 1 and names the child's name in
 * the header of the image above; 2 follows. Nobody writes to either file between.
 *
 *   served, the child is the disk itself:
 *   1 job until READY: every write goes to both files, a flush flushes both
 *   2 link the child under a hidden name
 *   3 rename snapshot over child                whoever opens the name reads everything
 *   4 tell the server the names
 *   5 job-complete                              the server is on the snapshot's file, under its
 * name 6 unlink the child's hidden name
 *
 * 3 before 5: after 5 the guest writes to the snapshot's file alone, and the child, by its name,
 * would lay old data over that at the next start. From 1 on the snapshot is not to be read any
 * more: the intent says so until it is gone, and every state is brought to the end, never back.
 */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include "base/check.h"
#include "blk/blk.h"
#include "vol/internal.h"

int commit_plan_fill(struct commit_plan *cp, const char *dir, const char *id, const char *stem,
                     const char *name, const char *snap_file, const char *child_file,
                     const char *child_snap, const char *final_file)
{
    snprintf(cp->id, sizeof(cp->id), "%.20s", id);
    cp->snap = path_join(dir, snap_file);
    cp->child = path_join(dir, child_file);
    cp->final = path_join(dir, final_file);
    cp->stem = strdup(stem);
    cp->name = strdup(name);
    cp->child_snap = child_snap && *child_snap ? strdup(child_snap) : NULL;
    if (asprintf(&cp->old, "%s/" OWN_PREFIX "%s-old", dir, cp->id) < 0)
        cp->old = NULL;
    bool whole = cp->snap && cp->child && cp->final && cp->stem && cp->name && cp->old &&
                 (cp->child_snap || !child_snap || !*child_snap);
    return whole ? 0 : -ENOMEM;
}

void commit_plan_fini(struct commit_plan *cp)
{
    free(cp->snap);
    free(cp->child);
    free(cp->final);
    free(cp->old);
    free(cp->stem);
    free(cp->name);
    free(cp->child_snap);
    *cp = (struct commit_plan){0};
}

static bool same_name(const struct commit_plan *cp)
{
    return strcmp(cp->child, cp->final) == 0;
}

/* The merged file is writable again, belongs to whom the child belonged, and is as old as that. */
static int inherit(const struct commit_plan *cp, struct err *err)
{
    struct stat st;

    if (store_stat(cp->child, &st) < 0)
        return 0;
    int rc = store_copy_owner(cp->snap, &st, err);
    if (rc == 0)
        taken_set(cp->snap, st.st_mtim);
    return rc;
}

/* ---- names ---- */

/* What stands on the child gets the new name and format into its header. */
SUSPENDS static int relink_children(const struct commit_plan *cp, struct err *err)
{
    _cleanup_(catalog_freep) struct catalog *cat = NULL;
    unsigned nr = 0;
    int rc = catalog_scan(cp->pool, &cat, err);
    const struct cfile *child = rc == 0 ? catalog_file(cat, cp->child) : NULL;

    if (!child)
        return rc;
    _cleanup_(freep) struct cfile **kids = cfile_children(cat, child, &nr);
    if (!kids)
        return err_set(err, -ENOMEM, "out of memory");
    for (unsigned i = 0; i < nr && rc == 0; i++) {
        _cleanup_(freep) char *name = path_relative(kids[i]->dir, cp->final);
        const char *format = "raw";
        char stem[256];

        file_split(name_form(cp->final), strrchr(cp->final, '/') + 1, stem, sizeof(stem), &format);
        rc = name ? merge_set_backing(kids[i]->path, name, format, err)
                  : err_set(err, -ENOMEM, "out of memory");
        crash_point("commit-relinked");
    }
    return rc;
}

/* Step 2 of the idle order; may be repeated from any state in it. */
SUSPENDS static int take_name(const struct commit_plan *cp, struct err *err)
{
    int rc = store_exists(cp->snap) ? inherit(cp, err) : 0;

    if (rc < 0 || !store_exists(cp->snap))
        return rc;
    if (same_name(cp)) {
        rc = store_rename(cp->snap, cp->final, err);
        crash_point("commit-renamed");
        return rc;
    }
    if (!store_exists(cp->final))
        rc = store_link(cp->snap, cp->final, err);
    crash_point("commit-linked");
    if (rc == 0 && cp->child_snap)
        rc = relink_children(cp, err);
    if (rc == 0)
        rc = store_unlink(cp->child, err);
    crash_point("commit-child-unlinked");
    return rc == 0 ? store_unlink(cp->snap, err) : rc;
}

/* ---- idle ---- */

/* The new name is there, but what bears it is not (or no longer) all that the child is. */
static int withdraw_name(const struct commit_plan *cp, struct err *err)
{
    return same_name(cp) || !store_exists(cp->snap) ? 0 : store_unlink(cp->final, err);
}

/* A server that died while its disk was being switched: once the child's name is gone or the merged
 * file's, both were the same; before that the child goes on as it was. */
static int settle_switch(const struct commit_plan *cp, struct err *err)
{
    int rc = store_same_file(cp->child, cp->old) ? withdraw_name(cp, err) : 0;

    return rc == 0 ? store_unlink(cp->old, err) : rc;
}

/* Is nothing left to copy? Where the names differ the merged file gets its new one when all is
 * copied, and the child's time with it: a current image that was opened and written since has
 * another. */
static bool is_merged(const struct commit_plan *cp)
{
    struct stat child, snap;

    if (store_stat(cp->snap, &snap) < 0)
        return true;
    if (same_name(cp) || !store_exists(cp->final))
        return false;
    if (cp->child_snap) /* nobody writes to it */
        return true;
    if (name_form(cp->child) == FORM_LV) /* has no time of its last write */
        return !store_exists(cp->child);
    return store_stat(cp->child, &child) < 0 || (child.st_mtim.tv_sec == snap.st_mtim.tv_sec &&
                                                 child.st_mtim.tv_nsec == snap.st_mtim.tv_nsec);
}

/* From here to the new name nobody may open the child: who did would write to a file without a
 * name. */
SUSPENDS static int take_name_held(const struct commit_plan *cp, struct err *err)
{
    struct blk *hold = NULL;
    int rc =
        store_exists(cp->child) && store_exists(cp->snap) ? overlay_hold(cp->child, &hold, err) : 0;

    if (rc == 0)
        rc = take_name(cp, err);
    blk_close(hold);
    return rc;
}

SUSPENDS static int run_idle(struct commit_plan *cp, bool long_too, bool *ret_left, struct err *err)
{
    int rc = store_exists(cp->old) ? settle_switch(cp, err) : 0;

    if (rc < 0)
        return rc;
    if (is_merged(cp))
        return take_name_held(cp, err);
    rc = withdraw_name(cp, err);
    if (rc == 0 && !long_too) {
        *ret_left = true;
        return 0;
    }
    if (rc == 0)
        rc = inherit(cp, err);
    if (rc == 0)
        rc = merge_commit(cp->ctx, cp->pool, cp->child, &cp->begun, err);
    crash_point("commit-merged");
    return rc == 0 ? take_name_held(cp, err) : rc;
}

/* ---- served ---- */

struct served {
    struct commit_plan *cp;
    struct remote *r;
    char job[40];
    char *top, *snap_node, *child_node; /* NULL: not in the disk (any more) */
};

static void served_fini(struct served *s)
{
    free(s->top);
    free(s->snap_node);
    free(s->child_node);
}

/* A server that was not told yet knows the files by their former names. */
SUSPENDS static int find_nodes(struct served *s, struct err *err)
{
    struct commit_plan *cp = s->cp;
    int rc = remote_top(s->r, &s->top, err);

    if (rc == 0)
        rc = remote_node_called(s->r, cp->old, NULL, &s->child_node, err);
    if (rc == 0)
        rc = remote_node_called(s->r, cp->snap, NULL, &s->snap_node, err);
    if (rc == 0 && s->child_node && !s->snap_node)
        rc = remote_node_called(s->r, cp->final, s->child_node, &s->snap_node, err);
    else if (rc == 0 && s->snap_node && !s->child_node)
        rc = remote_node_called(s->r, cp->child, s->snap_node, &s->child_node, err);
    else if (rc == 0 && !s->snap_node && (!same_name(cp) || !store_exists(cp->snap)))
        /* merged, and told so: only the new name is left */
        rc = remote_node_called(s->r, cp->final, NULL, &s->snap_node, err);
    return rc;
}

/* Has the server any of the files open? An element of another branch is not in its disk. */
SUSPENDS static int in_servers_disk(struct commit_plan *cp, bool *ret, struct err *err)
{
    const char *paths[] = {cp->child, cp->snap, cp->final, cp->old};
    int rc = 0;

    *ret = false;
    for (unsigned i = 0; i < ARRAY_SIZE(paths) && rc == 0 && !*ret; i++) {
        _cleanup_(freep) char *node = NULL;

        rc = remote_node(cp->remote, paths[i], NULL, &node, err);
        *ret = node != NULL;
    }
    return rc;
}

/* The header of the image above is to name a file that has to be there by then. */
static bool needs_new_name(const struct commit_plan *cp)
{
    return cp->child_snap && !same_name(cp);
}

SUSPENDS static int start_job(struct served *s, struct err *err)
{
    struct commit_plan *cp = s->cp;
    json_t *args =
        json_pack("{s:s, s:s, s:s, s:s, s:b}", "job-id", s->job, "device", s->top, "top-node",
                  s->child_node, "base-node", s->snap_node, "auto-dismiss", 0);

    if (args && cp->child_snap)
        json_object_set_new(args, "backing-file", json_string(strrchr(cp->final, '/') + 1));
    if (args && needs_new_name(cp))
        json_object_set_new(args, "auto-finalize", json_false());
    if (args && cp->pool->bwlimit)
        json_object_set_new(args, "speed", json_integer((json_int_t)cp->pool->bwlimit));
    return remote_command(s->r, "block-commit", args, NULL, err);
}

/* Asked right before the name changes: a server that was started anew meanwhile writes to the child
 * alone. */
SUSPENDS static int check_ready(struct served *s, struct err *err)
{
    _cleanup_(freep) char *state = NULL;
    int rc = remote_job_state(s->r, s->job, &state, err);

    if (rc < 0 || (state && strcmp(state, "ready") == 0))
        return rc;
    return err_set(err, -ECANCELED, "the merge is %s before the disk was switched",
                   state ? state : "gone");
}

/* Steps 2 to 4 of the switch of a running disk. */
SUSPENDS static int publish(struct served *s, struct err *err)
{
    struct commit_plan *cp = s->cp;
    int rc = 0;

    if (!store_exists(cp->old))
        rc = store_link(cp->child, cp->old, err);
    crash_point("commit-old-linked");
    if (rc == 0 && !same_name(cp) && !store_exists(cp->final))
        rc = store_link(cp->snap, cp->final, err);
    crash_point("commit-final-linked");
    if (rc == 0)
        rc = check_ready(s, err);
    if (rc == 0)
        rc = take_name(cp, err);
    crash_point("commit-published");
    if (rc == 0)
        rc = remote_rename(s->r, s->child_node, cp->old, err);
    if (rc == 0)
        rc = remote_rename(s->r, s->snap_node, cp->final, err);
    return rc;
}

/* The job would not complete: the disk still is the child. */
SUSPENDS static int unpublish(struct served *s, struct err *err)
{
    struct commit_plan *cp = s->cp;
    int rc = 0;

    if (!store_exists(cp->old))
        return 0;
    if (!store_exists(cp->snap))
        rc = store_link(cp->final, cp->snap, err);
    if (rc == 0)
        rc = store_rename(cp->old, cp->child, err);
    if (rc == 0 && !same_name(cp))
        rc = store_unlink(cp->final, err);
    if (rc == 0)
        rc = remote_rename(s->r, s->snap_node, cp->snap, err);
    return rc == 0 ? remote_rename(s->r, s->child_node, cp->child, err) : rc;
}

/* The job has been completed already, or was told to leave the disk on the child. */
SUSPENDS static int settle_completed(struct served *s, struct err *err)
{
    struct commit_plan *cp = s->cp;

    served_fini(s);
    s->top = s->snap_node = s->child_node = NULL;
    int rc = find_nodes(s, err);
    if (rc == 0 && s->child_node) {
        rc = unpublish(s, err);
        return rc < 0 ? rc : err_set(err, -ECANCELED, "the merge was cancelled");
    }
    if (rc == 0)
        rc = take_name(cp, err);
    if (rc == 0 && s->snap_node)
        rc = remote_rename(s->r, s->snap_node, cp->final, err);
    return rc == 0 || rc == -EPIPE ? store_unlink(cp->old, err) : rc;
}

/* The server knows which file its disk is on, whatever the job has answered. */
SUSPENDS static int settle_failed(struct served *s, int rc)
{
    bool ready;

    remote_job_wait(s->r, s->cp->ctx, s->job, false, &ready, NULL);
    if (ready)
        unpublish(s, NULL);
    else if (settle_completed(s, NULL) == 0)
        return 0;
    return rc;
}

/* A job that is READY: switch names, then the server. */
SUSPENDS static int switch_disk(struct served *s, struct err *err)
{
    bool ready;
    int rc = publish(s, err);

    if (rc == 0)
        rc = remote_command(s->r, "job-complete", json_pack("{s:s}", "id", s->job), NULL, err);
    crash_point("commit-complete-asked");
    while (rc == 0) {
        rc = remote_job_wait(s->r, s->cp->ctx, s->job, false, &ready, err);
        if (rc < 0 || !ready)
            break;
    }
    crash_point("commit-completed");
    if (rc ==
        -EPIPE) /* the server has died: its files were the same, the name is the merged one's */
        rc = store_same_file(s->cp->old, s->cp->child) ? rc : 0;
    else if (rc < 0)
        rc = settle_failed(s, rc);
    return rc == 0 ? store_unlink(s->cp->old, err) : rc;
}

/* All is copied and durable: the new name, then the header of the image above. */
SUSPENDS static int finalize(struct served *s, struct err *err)
{
    struct commit_plan *cp = s->cp;
    bool ready;
    int rc = inherit(cp, err);

    if (rc == 0 && !store_exists(cp->final))
        rc = store_link(cp->snap, cp->final, err);
    crash_point("commit-final-linked");
    if (rc == 0)
        rc = remote_command(s->r, "job-finalize", json_pack("{s:s}", "id", s->job), NULL, err);
    if (rc == 0)
        rc = remote_job_wait(s->r, cp->ctx, s->job, false, &ready, err);
    crash_point("commit-finalized");
    return rc;
}

SUSPENDS static int wait_and_finish(struct served *s, struct err *err)
{
    struct commit_plan *cp = s->cp;
    bool ready;
    int rc = remote_job_wait(s->r, cp->ctx, s->job, needs_new_name(cp), &ready, err);

    crash_point("commit-job-done");
    if (rc < 0)
        return rc;
    if (!cp->child_snap)
        return ready ? switch_disk(s, err) : settle_completed(s, err);
    if (ready)
        rc = finalize(s, err);
    if (rc == 0)
        rc = take_name(cp, err);
    if (rc < 0)
        return rc;
    if (s->snap_node)
        rc = remote_rename(s->r, s->snap_node, cp->final, err);
    if (rc == 0 && s->snap_node)
        remote_export_snap(s->r, NULL, s->snap_node, cp->stem, cp->child_snap);
    return rc == -EPIPE ? 0 : rc; /* the files are as they should be */
}

/* Views of the two images end: the one is no snapshot any more, the other's layer goes. */
SUSPENDS static int end_views(struct served *s, struct err *err)
{
    unsigned nr;
    int rc = remote_unexport(s->r, s->snap_node, &nr, err);

    return rc == 0 && s->cp->child_snap ? remote_unexport(s->r, s->child_node, &nr, err) : rc;
}

/* Nothing was merged: what was exported is exported again. */
SUSPENDS static void restore_views(struct served *s)
{
    struct commit_plan *cp = s->cp;

    remote_export_snap(s->r, NULL, s->snap_node, cp->stem, cp->name);
    if (cp->child_snap)
        remote_export_snap(s->r, NULL, s->child_node, cp->stem, cp->child_snap);
}

/* No such job: it was never started, has ended, or its server was started anew. */
SUSPENDS static int run_without_job(struct served *s, bool long_too, bool *ret_left,
                                    struct err *err)
{
    struct commit_plan *cp = s->cp;

    if (!s->child_node && !s->snap_node && store_exists(cp->snap)) /* under names of its own */
        return err_set(err, -ESTALE, "the volume's server has neither '%s' nor '%s' open",
                       cp->child, cp->snap);
    if (!s->child_node) { /* merged: what is open is the snapshot's file */
        int rc = take_name(cp, err);

        if (rc == 0 && s->snap_node)
            rc = remote_rename(s->r, s->snap_node, cp->final, err);
        return rc == 0 ? store_unlink(cp->old, err) : rc;
    }
    int rc = unpublish(s, err);
    if (rc == 0 && !long_too) {
        *ret_left = true;
        return 0;
    }
    if (rc == 0)
        rc = inherit(cp, err);
    if (rc == 0)
        rc = end_views(s, err);
    if (rc == 0)
        rc = start_job(s, err);
    cp->begun = rc == 0 || rc == -EPIPE;
    crash_point("commit-job-started");
    if (!cp->begun)
        restore_views(s);
    return rc == 0 ? wait_and_finish(s, err) : rc;
}

SUSPENDS static int run_served(struct commit_plan *cp, bool long_too, bool *ret_left,
                               struct err *err)
{
    struct served s = {.cp = cp, .r = cp->remote};
    _cleanup_(freep) char *state = NULL;

    snprintf(s.job, sizeof(s.job), "destroy-%.20s", cp->id);
    int rc = find_nodes(&s, err);
    if (rc == 0)
        rc = remote_job_state(s.r, s.job, &state, err);
    bool soon = state && (strcmp(state, "ready") == 0 || strcmp(state, "concluded") == 0 ||
                          strcmp(state, "pending") == 0);
    if (rc == 0 && state && !long_too && !soon)
        *ret_left = true;
    else if (rc == 0 && state)
        rc = wait_and_finish(&s, err);
    else if (rc == 0)
        rc = run_without_job(&s, long_too, ret_left, err);
    served_fini(&s);
    return rc;
}

int commit_run(struct commit_plan *cp, bool long_too, bool *ret_left, struct err *err)
{
    *ret_left = false;
    crash_point("commit-begin");
    bool served = false;
    int rc = cp->remote ? in_servers_disk(cp, &served, err) : 0;

    if (rc < 0)
        return rc;
    return served ? run_served(cp, long_too, ret_left, err) : run_idle(cp, long_too, ret_left, err);
}
