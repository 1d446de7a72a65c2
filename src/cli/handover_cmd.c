/* varve handover, takeover: a served disk goes to another host, with its guest. */
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "cli/served.h"
#include "rt/reactor.h"
#include "rt/timer.h"

#define TAKEOVER_WAIT_NS (10 * NSEC_PER_SEC)
#define TAKEOVER_POLL_NS (50 * NSEC_PER_MSEC)

/* ---- handover ---- */

/* A server that waits for the disk has nothing to give. */
SUSPENDS static int refuse_incoming(const struct served *d, struct err *err)
{
    json_t *list = NULL, *one;
    size_t i;
    int rc = qmp_execute(d->qmp, "query-commands", NULL, &list, err);

    json_array_foreach(list, i, one)
    {
        if (rc == 0 && strcmp(json_str(one, "name"), "x-varve-takeover") == 0)
            rc = err_set(err, -EINVAL,
                         "%s is not served here yet: its server waits for it (--incoming); hand it "
                         "over on the host that has it",
                         d->id);
    }
    json_decref(list);
    return rc;
}

/* The disk is free when its server is gone: the image closed, its locks and LVs given up. */
SUSPENDS static int wait_for_end(int pidfd, struct err *err)
{
    for (;;) {
        int rc = io_poll(pidfd, POLLIN);

        if (rc > 0)
            return 0;
        if (rc < 0 && rc != -EINTR)
            return err_errno(err, rc, "wait for the server's end");
    }
}

SUSPENDS static int handover(struct volcmd *cmd, struct err *err)
{
    struct served d;
    int rc = served_open(cmd, args_operand(cmd->args, 0), &d, err);

    if (rc == 0) {
        pid_t pid = qmp_peer_pid(d.qmp);
        _cleanup_(closep) int pidfd = pid > 0 ? (int)syscall(SYS_pidfd_open, pid, 0) : -1;

        rc = refuse_incoming(&d, err);
        if (rc == 0 && pidfd < 0)
            rc = err_errno(err, -errno, "find the server of %s", d.id);
        if (rc == 0)
            rc = qmp_execute(d.qmp, "quit", NULL, NULL, err);
        if (rc == 0)
            rc = wait_for_end(pidfd, err);
        if (rc == 0)
            cmd->ctx.say(cmd->ctx.ctx, "handed over: no server has it open here any more");
    }
    served_close(&d);
    if (rc == 0)
        volcmd_done(cmd);
    return rc;
}

static int run_handover(const struct args *args)
{
    return volcmd_run(args, "handover", handover);
}

/* ---- takeover ---- */

/* The other host may not be through with it: it is asked again for a while. */
SUSPENDS static int take(struct served *d, struct err *err)
{
    uint64_t deadline = reactor_now() + TAKEOVER_WAIT_NS;
    int rc;

    for (;;) {
        struct err why = {0};

        rc = qmp_execute(d->qmp, "x-varve-takeover", NULL, NULL, &why);
        if (rc != -EBUSY || reactor_now() >= deadline)
            return rc < 0 ? err_set(err, rc, "%s", err_text(&why)) : 0;
        timer_sleep(TAKEOVER_POLL_NS);
    }
}

SUSPENDS static int takeover(struct volcmd *cmd, struct err *err)
{
    struct served d;
    int rc = served_open(cmd, args_operand(cmd->args, 0), &d, err);

    if (rc == 0) {
        rc = take(&d, err);
        if (rc == -EOPNOTSUPP)
            rc = err_set(err, rc, "%s is served here already", d.id);
        if (rc == 0)
            cmd->ctx.say(cmd->ctx.ctx, "taken over: its requests are answered here");
    }
    served_close(&d);
    if (rc == 0)
        volcmd_done(cmd);
    return rc;
}

static int run_takeover(const struct args *args)
{
    return volcmd_run(args, "takeover", takeover);
}

const struct command command_handover = {
    .name = "handover",
    .summary = "give a served disk up, for another host",
    .text =
        "For a guest that moves to another host. Its server here answers what it has been asked, "
        "writes "
        "everything, closes the disk and ends; when the command returns, the other host may have "
        "it. "
        "There 'varve serve --incoming' has been started before, for the guest's new QEMU to "
        "connect to, "
        "and 'varve takeover' follows. Between the two the guest must be paused for good "
        "(migration with pause-before-switchover: handover and takeover come before "
        "migrate-continue). "
        "A migration that fails after this is undone with 'varve serve' on this host.",
    .operands = (const struct operand[]){{SERVED_OPERAND, COMPLETE_VOLUME}, {0}},
    .options = (const struct option[]){VOL_OPT_CONFIG, VOL_OPT_JSON, {0}},
    .example = "  varve handover san:vm-100-disk-0",
    .run = run_handover,
};

const struct command command_takeover = {
    .name = "takeover",
    .summary = "take a disk that another host has handed over",
    .text =
        "Its server here was started with --incoming. The disk is opened, with its locks, and "
        "clients, which are "
        "dropped once and come again, are answered from then on. If the other host still has it, "
        "it is waited for, up to ten seconds. Until then every request to the disk fails.",
    .operands = (const struct operand[]){{SERVED_OPERAND, COMPLETE_VOLUME}, {0}},
    .options = (const struct option[]){VOL_OPT_CONFIG, VOL_OPT_JSON, {0}},
    .example = "  varve takeover san:vm-100-disk-0",
    .run = run_takeover,
};
