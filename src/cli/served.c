/* Finding served disks: see served.h. */
#include <stdio.h>
#include <string.h>
#include "cli/served.h"

const char *json_str(const json_t *obj, const char *key)
{
    const char *s = json_string_value(json_object_get(obj, key));

    return s ? s : "";
}

uint64_t json_num(const json_t *obj, const char *key)
{
    return (uint64_t)json_integer_value(json_object_get(obj, key));
}

void served_close(struct served *d)
{
    qmp_client_free(d->qmp);
    free(d->id);
    free(d->socket);
}

SUSPENDS static int find_socket(struct volcmd *cmd, const char *text, struct served *ret,
                                struct err *err)
{
    struct vol_name name;
    struct vol_info *info;

    if (text[0] == '/' || text[0] == '.') {
        ret->id = strdup(text);
        ret->socket = strdup(text);
        return ret->id && ret->socket ? 0 : err_set(err, -ENOMEM, "out of memory");
    }
    int rc = vol_parse_in(cmd->cfg, text, &name, err);
    if (rc == 0 && name.snap[0])
        rc = err_set(err, -EINVAL, "'%s' is a snapshot, not a disk", text);
    if (rc == 0)
        rc = vol_info_get(cmd->cfg, &name, &info, err);
    if (rc < 0)
        return rc;
    ret->id = TAKE_PTR(info->id);
    if (info->served)
        ret->socket = TAKE_PTR(info->qmp_path);
    else
        rc = err_set(err, -ENOENT, "%s is not served", ret->id);
    vol_info_free(info);
    return rc;
}

int served_open(struct volcmd *cmd, const char *text, struct served *ret, struct err *err)
{
    *ret = (struct served){0};
    int rc = find_socket(cmd, text, ret, err);

    if (rc == 0 && (rc = qmp_connect(ret->socket, &ret->qmp, err)) < 0)
        err_prefix(err, rc, "%s", text);
    return rc;
}

SUSPENDS static int one(struct volcmd *cmd, const char *text, served_fn *fn, void *ctx,
                        struct err *err)
{
    struct served d;
    int rc = served_open(cmd, text, &d, err);

    if (rc == 0)
        rc = fn(&d, ctx, err);
    served_close(&d);
    return rc;
}

struct each {
    struct volcmd *cmd;
    served_fn *fn;
    void *ctx;
    unsigned silent; /* disks that are served and do not answer */
};

SUSPENDS_UNCHECKED static int each_of_pool(const struct pool *pool, void *ctx, struct err *err)
{
    struct each *each = ctx;
    struct vol_list *list;
    int rc = vol_list_get(each->cmd->cfg, pool, &list, err);

    if (rc < 0)
        return rc;
    for (unsigned i = 0; i < list->nb_vols; i++) {
        struct err why = {0};

        if (!list->vols[i]->served)
            continue;
        int one_rc = one(each->cmd, list->vols[i]->id, each->fn, each->ctx, &why);
        if (one_rc == 0 || one_rc == -ENOENT || one_rc == -ECONNREFUSED || one_rc == -EPIPE)
            continue; /* its server has ended meanwhile */
        fprintf(stderr, "varve %s: %s\n", each->cmd->args->command->name, err_text(&why));
        each->silent++;
    }
    vol_list_free(list);
    return 0;
}

int served_each(struct volcmd *cmd, served_fn *fn, void *ctx, struct err *err)
{
    struct each each = {.cmd = cmd, .fn = fn, .ctx = ctx};
    const char *only = args_operand(cmd->args, 0);

    if (only)
        return one(cmd, only, fn, ctx, err);
    int status = volcmd_each_pool(cmd, each_of_pool, &each, err);
    return each.silent ? EXIT_FAILED : status;
}
