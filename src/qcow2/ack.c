/* The life of a journal beside its image: see ack.h. */
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include "base/check.h"
#include "qcow2/ack.h"
#include "rt/timer.h"

#define PATH_MAX_BYTES 512u
/* The kernel gives a dead process's journal back a moment after its image's lock. */
#define BUSY_TRIES 100u
#define BUSY_WAIT  (10 * NSEC_PER_MSEC)

/* With its parents; if it cannot be made, opening the journal tells. */
static void make_dir(const char *dir)
{
    char path[PATH_MAX_BYTES];

    if ((size_t)snprintf(path, sizeof(path), "%s", dir) >= sizeof(path))
        return;
    for (char *p = strchr(path + 1, '/'); p; p = strchr(p + 1, '/')) {
        *p = '\0';
        (void)mkdir(path, 0700);
        *p = '/';
    }
    (void)mkdir(path, 0700);
}

/* The journal of the file or device that blk is; a->journal stays NULL where there is none. */
SUSPENDS static int open_journal(struct ack *a, const char *dir, struct blk *blk, bool readonly,
                                 bool make, struct err *err)
{
    char path[PATH_MAX_BYTES];
    struct stat st;
    int rc = dir && !a->journal ? blk_identity(blk, &a->id.dev, &a->id.ino) : -ENOTSUP;

    if (rc == -ENOTSUP)
        return 0;
    if (rc == 0)
        rc = journal_path(dir, &a->id, path, sizeof(path));
    if (rc < 0)
        return err_errno(err, rc, "journal in '%s'", dir);
    if (make)
        make_dir(dir);
    if (!make && stat(path, &st) < 0)
        return errno == ENOENT ? 0 : err_errno(err, -errno, "journal '%s'", path);
    struct journal_opts opts = {.readonly = readonly};
    rc = journal_open(path, &opts, &a->journal, err);
    for (unsigned i = 0; rc == -EBUSY && i < BUSY_TRIES; i++) {
        timer_sleep(BUSY_WAIT);
        rc = journal_open(path, &opts, &a->journal, err);
    }
    return rc == -ENOENT ? 0 : rc;
}

/* What a guard without its journal means. */
static void note_lost(struct ack *a, const char *why)
{
    snprintf(a->note, sizeof(a->note),
             "the image was not closed, and writes that were not flushed may be lost: %s", why);
}

int ack_recover(struct ack *a, const char *dir, struct blk *blk, const struct qcow2_header *hdr,
                struct recovery *ret, struct err *err)
{
    *ret = (struct recovery){0};
    a->note[0] = 0;
    if (!guard_get(hdr, &a->id.epoch) || !dir)
        return 0;
    int rc = open_journal(a, dir, blk, false, false, err);
    if (rc < 0)
        return rc;
    if (!a->journal) {
        note_lost(a, "its journal is gone");
        return 0;
    }
    rc = recover_image(blk, hdr, a->journal, &a->id, ret, err);
    if (rc == 0 && ret->is_void)
        note_lost(a, ret->why);
    if (rc == 0)
        crash_point("ack_recovered");
    return rc;
}

static void drop_journal(struct ack *a)
{
    journal_remove(TAKE_PTR(a->journal));
    a->is_on = false;
}

/* Not recorded after all. */
SUSPENDS static int go_without(struct ack *a, struct blk *blk, struct qcow2_header *hdr,
                               const struct err *why, struct err *err)
{
    snprintf(a->note, sizeof(a->note),
             "answered writes survive a kill only once they are flushed: %s", err_text(why));
    return ack_stop(a, blk, hdr, err);
}

int ack_start(struct ack *a, const char *dir, struct blk *blk, struct qcow2_header *hdr,
              const struct journal_run *runs, size_t nr, struct err *err)
{
    struct err why = {0};
    int rc = open_journal(a, dir, blk, false, true, &why);

    if (rc == 0 && !a->journal)
        rc = err_set(&why, -ENOTSUP, "the image is not a file, or there is no place for a journal");
    if (rc == 0)
        rc = guard_epoch_make(&a->id.epoch);
    if (rc < 0)
        return go_without(a, blk, hdr, &why, err);
    /* an epoch that stands in no header yet: until it does, this journal is of nobody */
    journal_begin(a->journal, &a->id, runs, nr);
    crash_point("ack_begun");
    rc = guard_set(blk, hdr, a->id.epoch, &why);
    if (rc == -ENOTSUP || rc == -ENOSPC)
        return go_without(a, blk, hdr, &why, err);
    if (rc < 0)
        return err_set(err, rc, "%s", err_text(&why));
    a->is_on = true;
    crash_point("ack_started");
    return 0;
}

int ack_stop(struct ack *a, struct blk *blk, struct qcow2_header *hdr, struct err *err)
{
    DEBUG_CHECK(!a->is_on || journal_oldest(a->journal) == journal_next(a->journal));
    int rc = guard_clear(blk, hdr);
    if (rc < 0)
        return err_errno(err, rc, "clear autoclear features");
    crash_point("ack_cleared");
    drop_journal(a);
    return 0;
}

void ack_fini(struct ack *a)
{
    journal_close(TAKE_PTR(a->journal));
    a->is_on = false;
}

int ack_view(struct ack *a, const char *dir, struct blk *blk, const struct qcow2_header *hdr,
             struct recover_view **ret, struct err *err)
{
    struct recovery found = {0};

    *ret = NULL;
    a->note[0] = 0;
    if (!guard_get(hdr, &a->id.epoch) || !dir)
        return 0;
    int rc = open_journal(a, dir, blk, true, false, err);
    if (rc == 0 && a->journal)
        rc = recover_view_new(blk, hdr, a->journal, &a->id, &found, ret, err);
    else if (rc == 0)
        note_lost(a, "its journal is gone");
    if (rc == 0 && found.is_void)
        note_lost(a, found.why);
    recovery_fini(&found);
    ack_fini(a);
    return rc;
}

int ack_preview(struct ack *a, const char *dir, struct blk *blk, const struct qcow2_header *hdr,
                struct blk **ret_over, struct recovery *ret, struct err *err)
{
    struct blk *over = NULL;

    *ret_over = NULL;
    *ret = (struct recovery){0};
    a->note[0] = 0;
    if (!guard_get(hdr, &a->id.epoch) || !dir)
        return 0;
    int rc = open_journal(a, dir, blk, true, false, err);
    if (rc == 0 && !a->journal)
        note_lost(a, "its journal is gone");
    if (rc == 0 && a->journal)
        rc = blk_over_new(blk, &over);
    if (rc == 0 && over)
        rc = recover_image(over, hdr, a->journal, &a->id, ret, err);
    if (rc == 0 && ret->is_void)
        note_lost(a, ret->why);
    if (rc < 0 || ret->is_void)
        blk_close(TAKE_PTR(over));
    *ret_over = over;
    ack_fini(a);
    return rc;
}
