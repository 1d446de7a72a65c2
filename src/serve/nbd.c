/* NBD servers and exports over QMP. */
#include <string.h>
#include "serve/internal.h"

static struct serve_nbd *qmp_server_of(struct serve *s)
{
    list_for_each(it, &s->nbds) {
        struct serve_nbd *n = list_entry(it, struct serve_nbd, link);

        if (n->by_qmp)
            return n;
    }
    return NULL;
}

static int get_str(json_t *data, const char *key, const char **ret, struct err *err)
{
    json_t *value = json_object_get(data, key);

    if (!value)
        return err_set(err, -EINVAL, "Parameter 'addr.data.%s' is missing", key);
    if (!json_is_string(value))
        return err_set(err, -EINVAL, "Invalid parameter type for 'addr.data.%s', expected: string",
                       key);
    *ret = json_string_value(value);
    return 0;
}

static int parse_addr(json_t *addr, struct nbd_server_opts *opts, struct err *err)
{
    const char *type = arg_str(addr, "type");
    json_t *data = json_object_get(addr, "data");

    if (!type)
        return err_set(err, -EINVAL, "Parameter 'addr.type' is missing");
    if (!json_is_object(data))
        return err_set(err, -EINVAL,
                       data ? "Invalid parameter type for 'addr.data', expected: object"
                            : "Parameter 'addr.data' is missing");
    if (strcmp(type, "unix") == 0)
        return get_str(data, "path", &opts->unix_path, err);
    if (strcmp(type, "inet") != 0)
        return err_set(err, -EINVAL, "Parameter 'type' does not accept value '%s'", type);
    int rc = get_str(data, "host", &opts->host, err);
    return rc < 0 ? rc : get_str(data, "port", &opts->port, err);
}

SUSPENDS int cmd_nbd_start(void *ctx, json_t *args, json_t **ret, struct err *err)
{
    struct serve *s = ctx;
    int64_t max = arg_int(args, "max-connections", 0);
    struct nbd_server_opts opts = {0};

    if (qmp_server_of(s))
        return err_set(err, -EEXIST, "NBD server already running");
    if (max < 0 || max > 65535)
        return err_set(err, -EINVAL, "Parameter 'max-connections' expects a number up to 65535");
    opts.max_connections = max ? (unsigned)max : s->opts->max_connections;
    int rc = parse_addr(json_object_get(args, "addr"), &opts, err);
    return rc < 0 ? rc : serve_nbd_start(s, &opts, true, err);
}

SUSPENDS int cmd_nbd_stop(void *ctx, json_t *args, json_t **ret, struct err *err)
{
    struct serve *s = ctx;
    struct serve_nbd *n = qmp_server_of(s);

    if (!n)
        return err_set(err, -ENOENT, "NBD server not running");
    serve_nbd_stop(s, n);
    if (!list_empty(&s->nbds))
        return 0;
    list_for_each_safe(it, &s->exports) { /* as in QEMU, they go with the last server */
        struct serve_export *e = list_entry(it, struct serve_export, link);

        if (e->by_qmp)
            serve_export_remove(s, e, true, NULL);
    }
    return 0;
}

/* Names of snapshots hold an @; otherwise as QEMU's ids. */
static bool id_ok(const char *id)
{
    _cleanup_(freep) char *copy = strdup(id);
    char *at = copy ? strchr(copy, '@') : NULL;

    if (at)
        *at = '-';
    return copy && serve_name_ok(copy, 255);
}

SUSPENDS int cmd_export_add(void *ctx, json_t *args, json_t **ret, struct err *err)
{
    struct serve *s = ctx;
    const char *type = arg_str(args, "type"), *id = arg_str(args, "id");
    const char *node = arg_str(args, "node-name"), *name = arg_str(args, "name");
    bool writable = arg_bool(args, "writable", false);
    struct serve_export *e;

    if (strcmp(type, "nbd") != 0)
        return err_set(err, -EINVAL, "Parameter 'type' does not accept value '%s'", type);
    if (!id_ok(id))
        return err_set(err, -EINVAL, "Invalid block export id: '%s'", id);
    int index = serve_find_layer(s, node);
    if (index < 0)
        return serve_no_node("", node, err);
    if (list_empty(&s->nbds))
        return err_set(err, -ENOTCONN, "NBD server not running");
    if (writable && (index > 0 || !chain_is_writable(s->chain)))
        return err_set(err, -EROFS, "Node '%s' is read-only", node);
    struct layer *layer = index > 0 ? chain_layer(s->chain, (unsigned)index) : NULL;
    int rc = serve_export_add(s, id, name ? name : node, arg_str(args, "description"), layer,
                              writable, &e, err);
    if (rc == 0)
        e->by_qmp = true;
    return rc;
}

SUSPENDS int cmd_export_del(void *ctx, json_t *args, json_t **ret, struct err *err)
{
    struct serve *s = ctx;
    const char *id = arg_str(args, "id"), *mode = arg_str(args, "mode");
    struct serve_export *e = serve_export_find(s, id);
    bool hard = mode && strcmp(mode, "hard") == 0;

    if (mode && !hard && strcmp(mode, "safe") != 0)
        return err_set(err, -EINVAL, "Parameter 'mode' does not accept value '%s'", mode);
    if (!e)
        return err_set(err, -ENOENT, "Export '%s' is not found", id);
    return serve_export_remove(s, e, hard, err);
}

int cmd_query_exports(void *ctx, json_t *args, json_t **ret, struct err *err)
{
    struct serve *s = ctx;
    json_t *list = json_array();

    list_for_each(it, &s->exports) {
        const struct serve_export *e = list_entry(it, struct serve_export, link);
        const struct layer *layer = e->layer ? e->layer : chain_layer(s->chain, 0);

        json_array_append_new(list,
                              json_pack("{s:s, s:s, s:s, s:b, s:s, s:b, s:i}", "id", e->id, "type",
                                        "nbd", "node-name", layer_node_name(layer), "shutting-down",
                                        0, "x-varve-name", e->name, "x-varve-writable", e->writable,
                                        "x-varve-connections", (int)serve_export_clients(e)));
    }
    *ret = list;
    return 0;
}
