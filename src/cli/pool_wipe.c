/* varve pool wipe, and how other commands start it in the background. */
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include "cli/all.h"
#include "cli/volcmd.h"
#include "cli/wiper.h"

extern char **environ;

/* ---- the command ---- */

/* Guests come first. Not every scheduler of the kernel knows an idle class: a rate helps anywhere
 * (saferemove_throughput). */
static void be_unimportant(void)
{
    enum { WHO_PROCESS = 1, CLASS_IDLE = 3, CLASS_SHIFT = 13 }; /* linux/ioprio.h */

    (void)setpriority(PRIO_PROCESS, 0, 19);
    (void)syscall(SYS_ioprio_set, WHO_PROCESS, 0, CLASS_IDLE << CLASS_SHIFT);
}

SUSPENDS static int pool_wipe(struct volcmd *cmd, struct err *err)
{
    const struct vol_wipe_opts opts = {.all_hosts = args_flag(cmd->args, "all-hosts")};
    const char *id = args_operand(cmd->args, 0);
    struct vol_wipe_result res = {0};
    const struct pool *pool;
    char size[32];
    int rc = config_pool(cmd->cfg, id, &pool, err);

    if (rc == 0)
        rc = vol_pool_wipe(&cmd->ctx, pool, &opts, &res, err);
    if (rc < 0)
        return rc;
    progress_end(&cmd->progress);
    if (cmd->json)
        render_json(json_pack("{s:s, s:s, s:b, s:i, s:i, s:I, s:O}", "command", "pool wipe", "pool",
                              id, "dry-run", cmd->ctx.dry_run, "wiped", (int)res.wiped, "left",
                              (int)res.left, "bytes", (json_int_t)res.bytes, "messages",
                              cmd->messages));
    else if (!args_flag(cmd->args, "quiet") && !cmd->ctx.dry_run)
        printf("%s: %u wiped and removed (%s), %u left\n", id, res.wiped,
               render_size(res.bytes, size, sizeof(size)), res.left);
    return res.left ? EXIT_FAILED : EXIT_DONE;
}

static int run_pool_wipe(const struct args *args)
{
    if (args_flag(args, "background")) {
        fflush(NULL);
        if (daemon(1, 0) < 0)
            return usage_error(args->command, "cannot go into the background: %s", strerror(errno));
    }
    be_unimportant();
    return volcmd_run(args, "pool wipe", pool_wipe);
}

const struct command command_pool_wipe = {
    .name = "pool wipe",
    .summary = "overwrite and remove what was deleted in a volume group",
    .text =
        "In a volume group with `saferemove 1` a deleted logical volume is first renamed to a "
        "hidden name, then overwritten with zeroes, then removed. Every command that leaves such "
        "volumes starts this one in the background at its end, so it is needed by hand only after "
        "a restart of the host (any other operation on the pool does as well), or to see an "
        "error. One process at a time wipes a volume group; it runs with the lowest priority, "
        "`saferemove_throughput` bounds its rate, and one that was killed is gone on from where it "
        "last noted how far it was. `varve pool status` shows what waits.\n\n"
        "--all-hosts also takes what other hosts have left: say it only when none of them has it "
        "open, as after one was lost.\n\n"
        "The exit status is 1 if something could not be wiped now.",
    .operands = (const struct operand[]){{"POOL", COMPLETE_POOL}, {0}},
    .options =
        (const struct option[]){
            {0, "background", NULL, "return at once, go on in the background"},
            {0, "all-hosts", NULL, "also what other hosts have deleted and left"},
            VOL_OPT_CONFIG,
            VOL_OPT_JSON,
            VOL_OPT_DRY_RUN,
            {0}},
    .run = run_pool_wipe,
};

/* ---- from other commands ---- */

static const char *config_file;

/* What is started detaches itself at once. Its output goes nowhere: `pool status` tells what is
 * left. */
static void start(const struct pool *pool)
{
    char *const argv[] = {"varve",
                          "pool",
                          "wipe",
                          "--background",
                          "--quiet",
                          "--config",
                          (char *)(uintptr_t)config_file,
                          pool->id,
                          NULL};
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attr;
    sigset_t none, defaults;
    pid_t pid;

    sigemptyset(&none);
    sigemptyset(&defaults);
    sigaddset(&defaults, SIGTERM);
    sigaddset(&defaults, SIGINT);
    sigaddset(&defaults, SIGHUP);
    posix_spawn_file_actions_init(&actions);
    posix_spawnattr_init(&attr);
    for (int fd = 0; fd <= STDERR_FILENO; fd++)
        posix_spawn_file_actions_addopen(&actions, fd, "/dev/null", O_RDWR, 0);
    posix_spawnattr_setsigmask(&attr, &none);
    posix_spawnattr_setsigdefault(&attr, &defaults);
    posix_spawnattr_setflags(&attr,
                             POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETSID);
    if (posix_spawn(&pid, "/proc/self/exe", &actions, &attr, argv, environ) == 0)
        (void)waitpid(pid, NULL, 0);
    posix_spawnattr_destroy(&attr);
    posix_spawn_file_actions_destroy(&actions);
}

void wiper_allow(const struct config *cfg)
{
    config_file = cfg->file;
    vol_set_wiper(start);
}
