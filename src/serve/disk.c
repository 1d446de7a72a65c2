/*
 * Changes of the disk's shape: snapshot, transaction, resize, rollback, rename.
 *
 * A failed command leaves disk, nodes and exports as they were.
 */
#include <string.h>
#include "serve/internal.h"

/* ---- snapshot ---- */
/* Finds and checks both sides; nothing is changed. */
static int find_snapshot(struct serve *s, json_t *args, struct serve_node **ret, struct err *err)
{
    const char *name = arg_str(args, "node"), *overlay = arg_str(args, "overlay");
    int index = serve_find_layer(s, name);
    struct serve_node *node = serve_find_node(s, overlay);

    if (index < 0)
        return serve_no_node(name, name, err);
    if (!node && !serve_any_layer(s, overlay))
        return serve_no_node(overlay, overlay, err);
    if (index > 0)
        return err_set(err, -EINVAL, "Node '%s' is not the top of the disk", name);
    if (!node || node->chain)
        return err_set(err, -EINVAL, "The overlay already has a backing image");
    if (!layer_image(node->layer))
        return err_set(err, -EINVAL, "The overlay does not support backing images");
    if (!chain_is_writable(s->chain))
        return err_set(err, -EROFS, "The disk is served read-only");
    if (!layer_blk(node->layer)->writable)
        return err_set(err, -EROFS, "The overlay '%s' is read-only", overlay);
    *ret = node;
    return 0;
}

SUSPENDS static int take_snapshot(struct serve *s, struct serve_node *node, struct err *err)
{
    _cleanup_(freep) char *name = strdup(layer_node_name(chain_layer(s->chain, 0)));
    struct layer *overlay = node->layer;
    struct pivot_stats st = {0};

    if (!name)
        return err_errno(err, -ENOMEM, "snapshot");
    int rc = serve_is_held(s) ? serve_hold_push(s, overlay, &st, err)
                              : chain_push(s->chain, overlay, &st, err);
    if (rc < 0)
        return rc;
    serve_node_free(node);
    s->last_pivot = st;
    serve_event(s, "X_VARVE_PIVOT",
                json_pack("{s:s, s:s, s:I, s:I, s:I}", "node", name, "overlay",
                          layer_node_name(overlay), "gate-closed-ns", (json_int_t)st.gate_closed_ns,
                          "drain-ns", (json_int_t)st.drain_ns, "flush-ns",
                          (json_int_t)st.flush_ns));
    return 0;
}

SUSPENDS int cmd_snapshot(void *ctx, json_t *args, json_t **ret, struct err *err)
{
    struct serve_node *node;
    int rc = find_snapshot(ctx, args, &node, err);

    if (rc == 0 && arg_bool(args, "x-varve-held", false) && !serve_is_held(ctx))
        rc = err_set(err, -ETIMEDOUT, "The disk is not held any more");
    return rc < 0 ? rc : take_snapshot(ctx, node, err);
}

/* ---- transaction ---- */
static const struct qmp_arg snapshot_args[] = {{"node", 's'}, {"overlay", 's'}, {NULL}};

static int check_members(json_t *obj, const struct qmp_arg *schema, struct err *err)
{
    const char *key;
    json_t *value;

    json_object_foreach(obj, key, value) if (strcmp(key, schema[0].name) != 0 &&
                                             strcmp(key, schema[1].name) !=
                                                 0) return err_set(err, -EINVAL,
                                                                   "Parameter '%s' is unexpected",
                                                                   key);
    for (const struct qmp_arg *arg = schema; arg->name; arg++) {
        value = json_object_get(obj, arg->name);
        if (!value)
            return err_set(err, -EINVAL, "Parameter '%s' is missing", arg->name);
        if (arg->type == 's' ? !json_is_string(value) : !json_is_object(value))
            return err_set(err, -EINVAL, "Invalid parameter type for '%s', expected: %s", arg->name,
                           arg->type == 's' ? "string" : "object");
    }
    return 0;
}

static int check_action(json_t *action, struct err *err)
{
    static const struct qmp_arg schema[] = {{"type", 's'}, {"data", 'o'}, {NULL}};
    int rc = json_is_object(action) ? check_members(action, schema, err)
                                    : err_set(err, -EINVAL,
                                              "Invalid parameter type for "
                                              "'actions[]', expected: object");

    if (rc < 0)
        return rc;
    const char *type = arg_str(action, "type");
    if (strcmp(type, "blockdev-snapshot") != 0)
        return err_set(err, -EINVAL, "Parameter 'type' does not accept value '%s'", type);
    return check_members(json_object_get(action, "data"), snapshot_args, err);
}

/*
 * All or none: this process has one disk, and a disk takes one snapshot a transaction, so with
 * every action checked first the only step that can fail is the only one there is.
 */
SUSPENDS int cmd_transaction(void *ctx, json_t *args, json_t **ret, struct err *err)
{
    json_t *actions = json_object_get(args, "actions");
    struct serve_node *node = NULL;
    size_t i;
    json_t *action;

    json_array_foreach(actions, i, action)
    {
        int rc = check_action(action, err);

        if (rc == 0)
            rc = find_snapshot(ctx, json_object_get(action, "data"), &node, err);
        if (rc < 0)
            return rc;
    }
    if (json_array_size(actions) > 1)
        return err_set(err, -EINVAL, "A transaction takes one snapshot of a disk");
    return node ? take_snapshot(ctx, node, err) : 0;
}

/* ---- resize ---- */
static int refuse_busy(struct serve *s, const char *name, struct err *err)
{
    int rc = serve_refuse_held(s, err);

    if (rc < 0)
        return rc;
    if (jobs_busy(s->jobs, s->chain))
        return err_set(err, -EBUSY, "Node '%s' is busy: block device is in use by a block job",
                       name);
    return 0;
}

SUSPENDS int cmd_resize(void *ctx, json_t *args, json_t **ret, struct err *err)
{
    struct serve *s = ctx;
    const char *device = arg_str(args, "device"), *name = arg_str(args, "node-name");
    int64_t len = arg_int(args, "size", 0);

    if (device && name)
        return err_set(err, -EINVAL, "Use only one of 'device' and 'node-name'");
    const char *which = device ? device : name ? name : "";
    int index = *which ? serve_find_layer(s, which) : -ENOENT;
    if (index < 0)
        return serve_no_node(device ? device : "", name ? name : "", err);
    if (index > 0)
        return err_set(err, -EINVAL, "Node '%s' is not the top of the disk", which);
    if (len <= 0)
        return err_set(err, -EINVAL, "Parameter 'size' expects a >0 size");
    int rc = refuse_busy(s, which, err);
    return rc < 0 ? rc : chain_resize(s->chain, (uint64_t)len, err);
}

/* ---- rollback ---- */
static int check_rollback(struct serve *s, const char *name, const struct serve_node *node,
                          bool force, struct err *err)
{
    unsigned writers = serve_writers(s);

    if (!node)
        return err_set(err, -ENOENT, "Failed to find node with node-name='%s'", name);
    bool writable = layer_blk(node->chain ? chain_layer(node->chain, 0) : node->layer)->writable;
    if (chain_is_writable(s->chain) && !writable)
        return err_set(err, -EROFS, "Node '%s' is read-only", name);
    int rc = refuse_busy(s, layer_node_name(chain_layer(s->chain, 0)), err);
    if (rc < 0)
        return rc;
    if (writers > 0 && !force)
        return err_set(err, -EBUSY, "The disk is in use: %u connected client%s may write", writers,
                       writers == 1 ? "" : "s");
    return 0;
}

SUSPENDS int cmd_rollback(void *ctx, json_t *args, json_t **ret, struct err *err)
{
    struct serve *s = ctx;
    const char *name = arg_str(args, "node-name");
    struct serve_node *node = serve_find_node(s, name);
    struct chain *old = s->chain;
    int rc = check_rollback(s, name, node, arg_bool(args, "force", false), err);

    if (rc == 0 && !node->chain) {
        rc = chain_from_layers(&node->layer, 1, s->opts->cache_bytes, &node->chain, err);
        if (rc == 0)
            node->layer = NULL;
        if (rc == 0) /* a client may have come meanwhile */
            rc = check_rollback(s, name, node, arg_bool(args, "force", false), err);
    }
    if (rc == 0 && s->opts->durability == SERVE_ACK)
        rc = chain_start_ack(node->chain, err); /* no client is in it yet */
    if (rc < 0)
        return rc;
    chain_stop_waits(old); /* for good */
    serve_exports_suspend(s);
    serve_exports_switch(s, node->chain);
    serve_node_free(node);
    serve_event(s, "X_VARVE_ROLLBACK", json_pack("{s:s}", "node-name", name));
    /* The switch is done; what the old chain could not write any more is what is thrown away. */
    struct err close_err = {0};
    serve_preload_end(s); /* it is in the old chain */
    if (chain_close(old, &close_err) < 0)
        serve_warn(s, "close of the disk before the rollback: %s", err_text(&close_err));
    serve_preload_start(s);
    return 0;
}

/* ---- rename ---- */
int cmd_rename(void *ctx, json_t *args, json_t **ret, struct err *err)
{
    const char *name = arg_str(args, "node-name"), *path = arg_str(args, "filename");
    struct layer *layer = serve_any_layer(ctx, name);

    if (!layer)
        return err_set(err, -ENOENT, "Failed to find node with node-name='%s'", name);
    if (path[0] != '/')
        return err_set(err, -EINVAL, "'filename' must be an absolute path");
    layer_set_path(layer, path);
    return 0;
}
