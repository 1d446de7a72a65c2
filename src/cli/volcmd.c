/* Running a command on pools and volumes: see volcmd.h. */
#include <stdio.h>
#include <string.h>
#include "cli/volcmd.h"
#include "cli/wiper.h"
#include "rt/reactor.h"

struct run {
    struct volcmd cmd;
    int (*fn)(struct volcmd *cmd, struct err *err);
};

static void say(void *ctx, const char *line)
{
    struct volcmd *cmd = ctx;

    if (cmd->json)
        json_array_append_new(cmd->messages, json_string(line));
    else if (!args_flag(cmd->args, "quiet"))
        printf("%s\n", line);
}

static void update(void *ctx, uint64_t done, uint64_t total)
{
    struct volcmd *cmd = ctx;

    progress_update(&cmd->progress, done, total);
}

static void show_config_troubles(const struct volcmd *cmd)
{
    const struct config *cfg = cmd->cfg;

    if (args_flag(cmd->args, "quiet"))
        return;
    for (unsigned i = 0; i < cfg->nb_warnings; i++)
        fprintf(stderr, "varve: %s\n", cfg->warnings[i]);
    for (unsigned i = 0; i < cfg->nb_errors; i++)
        fprintf(stderr, "varve: %s (this pool is not used)\n", cfg->errors[i]);
}

static int volcmd_main(void *arg)
{
    struct run *run = arg;
    struct err err = {0};
    int rc = run->fn(&run->cmd, &err);

    progress_end(&run->cmd.progress);
    return rc < 0 ? fail(run->cmd.args, &err) : rc;
}

/* Who names a control socket needs no pools. */
static bool names_socket(const struct args *args)
{
    const struct operand *first = args->command->operands;
    const char *given = args_operand(args, 0);

    return first && first->name && strstr(first->name, "SOCKET") && given &&
           (given[0] == '/' || given[0] == '.');
}

int volcmd_run(const struct args *args, const char *what,
               int (*fn)(struct volcmd *cmd, struct err *err))
{
    struct run run = {.cmd = {.args = args, .json = args_flag(args, "json")}, .fn = fn};
    struct volcmd *cmd = &run.cmd;
    struct err err = {0};
    int rc = config_load(args_value(args, "config", NULL), &cmd->cfg, &err);

    if (rc == -ENOENT && names_socket(args))
        rc = (cmd->cfg = calloc(1, sizeof(*cmd->cfg))) ? 0 : -ENOMEM;
    if (rc < 0)
        return fail(args, &err);
    show_config_troubles(cmd);
    if (strcmp(args->command->name, "pool wipe") != 0 && cmd->cfg->file)
        wiper_allow(cmd->cfg);
    cmd->messages = json_array();
    cmd->ctx = (struct vol_ctx){.cfg = cmd->cfg,
                                .dry_run = args_flag(args, "dry-run"),
                                .say = say,
                                .progress = update,
                                .ctx = cmd};
    progress_init(&cmd->progress, what, args, false);
    int status = reactor_run(volcmd_main, &run);
    json_decref(cmd->messages);
    config_free(cmd->cfg);
    return status;
}

int volcmd_name(const struct volcmd *cmd, unsigned n, struct vol_name *ret, struct err *err)
{
    return vol_parse_in(cmd->cfg, args_operand(cmd->args, n), ret, err);
}

int volcmd_each_pool(struct volcmd *cmd, volcmd_pool_fn *fn, void *ctx, struct err *err)
{
    const struct config *cfg = cmd->cfg;
    const struct pool *pool;
    int status = EXIT_DONE;

    for (unsigned i = 0; i < cfg->nb_pools; i++) {
        if (config_pool(cfg, cfg->pools[i].id, &pool, NULL) < 0)
            continue;
        if (fn(pool, ctx, err) < 0) {
            fprintf(stderr, "varve %s: %s: %s\n", cmd->args->command->name, pool->id,
                    err_text(err));
            status = EXIT_FAILED;
        }
    }
    return status;
}

void volcmd_done(struct volcmd *cmd)
{
    if (!cmd->json)
        return;
    json_t *operands = json_array();
    for (unsigned i = 0; i < cmd->args->nb_operands; i++)
        json_array_append_new(operands, json_string(cmd->args->operands[i]));
    render_json(json_pack("{s:s, s:o, s:b, s:O}", "command", cmd->args->command->name, "operands",
                          operands, "dry-run", cmd->ctx.dry_run, "messages", cmd->messages));
}

int volcmd_create_options(const struct args *args, char *text, struct vol_create_opts *ret,
                          struct err *err)
{
    char *save = NULL;
    int rc = 0;

    *ret = (struct vol_create_opts){.extended_l2 = -1, .format = args_value(args, "format", NULL)};
    if (ret->format && strcmp(ret->format, "qcow2") != 0 && strcmp(ret->format, "raw") != 0)
        return err_set(err, -EINVAL, "unknown format '%s' (qcow2 or raw)", ret->format);
    for (char *key = strtok_r(text, ",", &save); key && rc == 0; key = strtok_r(NULL, ",", &save)) {
        char *eq = strchr(key, '=');
        bool on = false;

        if (!eq)
            return err_set(err, -EINVAL, "option '%s' has no value", key);
        *eq = '\0';
        if (!strcmp(key, "cluster_size") || !strcmp(key, "cluster-size"))
            rc = parse_cluster_size(eq + 1, &ret->cluster_size, err);
        else if (!strcmp(key, "extended_l2") || !strcmp(key, "extended-l2")) {
            rc = parse_bool(eq + 1, &on, err);
            ret->extended_l2 = on;
        } else if (!strcmp(key, "preallocation"))
            ret->preallocation = eq + 1;
        else
            rc = err_set(err, -EINVAL, "unknown option '%s'", key);
    }
    return rc;
}
