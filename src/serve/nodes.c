/*
 * Nodes: the disk's layers by name, and images that blockdev-add opens for a later
 * blockdev-snapshot or rollback.
 */
#include <ctype.h>
#include <string.h>
#include "serve/internal.h"

#define NODE_NAME_MAX 31u /* as QEMU's */

bool serve_name_ok(const char *name, size_t max_len)
{
    if (!isalpha((unsigned char)name[0]) || strlen(name) > max_len)
        return false;
    for (; *name; name++)
        if (!isalnum((unsigned char)*name) && !strchr("-._", *name))
            return false;
    return true;
}

int serve_find_layer(const struct serve *s, const char *name)
{
    int index = chain_find_layer(s->chain, name);

    if (index < 0 && s->opts->volume && strcmp(name, s->opts->volume) == 0)
        return 0;
    return index;
}

/* Index of the node's layer with this name, or -ENOENT. */
static int node_find(const struct serve_node *node, const char *name)
{
    if (node->chain)
        return chain_find_layer(node->chain, name);
    return strcmp(layer_node_name(node->layer), name) == 0 ? 0 : -ENOENT;
}

static struct layer *node_layer(const struct serve_node *node, unsigned index)
{
    return node->chain ? chain_layer(node->chain, index) : node->layer;
}

struct serve_node *serve_find_node(struct serve *s, const char *name)
{
    list_for_each(it, &s->nodes) {
        struct serve_node *node = list_entry(it, struct serve_node, link);

        if (node_find(node, name) == 0)
            return node;
    }
    return NULL;
}

struct layer *serve_any_layer(struct serve *s, const char *name)
{
    int index = chain_find_layer(s->chain, name);

    if (index >= 0)
        return chain_layer(s->chain, (unsigned)index);
    list_for_each(it, &s->nodes) {
        const struct serve_node *node = list_entry(it, struct serve_node, link);

        index = node_find(node, name);
        if (index >= 0)
            return node_layer(node, (unsigned)index);
    }
    return NULL;
}

int serve_no_node(const char *device, const char *name, struct err *err)
{
    return err_set(err, -ENOENT, "Cannot find device='%s' nor node-name='%s'", device, name);
}

void serve_node_free(struct serve_node *node)
{
    list_remove(&node->link);
    free(node);
}

SUSPENDS int serve_node_close(struct serve_node *node, struct err *err)
{
    list_remove(&node->link);
    int rc = node->chain ? chain_close(node->chain, err) : layer_close(node->layer, err);

    free(node);
    return rc;
}

/* ---- blockdev-add ---- */
struct add {
    const char *driver, *name, *filename;
    bool writable, buffered;
    bool alone; /* what is below is not opened */
    struct space_opts space;
};

static int bad_value(const char *name, const char *value, struct err *err)
{
    return err_set(err, -EINVAL, "Parameter '%s' does not accept value '%s'", name, value);
}

static int parse_file(json_t *file, struct add *add, struct err *err)
{
    const char *driver = json_string_value(json_object_get(file, "driver"));
    const char *key;
    json_t *value;

    json_object_foreach(file, key, value)
    {
        if (strcmp(key, "driver") != 0 && strcmp(key, "filename") != 0)
            return err_set(err, -EINVAL, "Parameter 'file.%s' is unexpected", key);
        if (!json_is_string(value))
            return err_set(err, -EINVAL, "Invalid parameter type for 'file.%s', expected: string",
                           key);
    }
    if (!driver)
        return err_set(err, -EINVAL, "Parameter 'file.driver' is missing");
    if (strcmp(driver, "file") != 0 && strcmp(driver, "host_device") != 0)
        return bad_value("file.driver", driver, err);
    add->filename = arg_str(file, "filename");
    if (!add->filename)
        return err_set(err, -EINVAL, "Parameter 'file.filename' is missing");
    return 0;
}

static int parse_cache(json_t *cache, struct add *add, struct err *err)
{
    const char *key;
    json_t *value;

    json_object_foreach(cache, key, value)
    {
        if (strcmp(key, "direct") != 0 && strcmp(key, "no-flush") != 0)
            return err_set(err, -EINVAL, "Parameter 'cache.%s' is unexpected", key);
        if (!json_is_boolean(value))
            return err_set(err, -EINVAL, "Invalid parameter type for 'cache.%s', expected: boolean",
                           key);
    }
    if (arg_bool(cache, "no-flush", false))
        return err_set(err, -ENOTSUP, "cache.no-flush=on is not supported");
    add->buffered = !arg_bool(cache, "direct", !add->buffered);
    return 0;
}

/* What is not said is as the server was told. */
static int parse_space(json_t *args, struct space_opts *space, struct err *err)
{
    const char *discard = arg_str(args, "discard"), *detect = arg_str(args, "detect-zeroes");

    if (discard && space_parse_discard(discard, space) < 0)
        return bad_value("discard", discard, err);
    if (detect && space_parse_detect_zeroes(detect, space) < 0)
        return bad_value("detect-zeroes", detect, err);
    if (json_object_get(args, "discard-no-unref"))
        space->discard =
            arg_bool(args, "discard-no-unref", false) ? IMAGE_DISCARD_KEEP : IMAGE_DISCARD_UNMAP;
    return space_check(space, err);
}

static int parse_add(struct serve *s, json_t *args, struct add *add, struct err *err)
{
    const char *backing = arg_str(args, "backing");

    *add = (struct add){
        .driver = arg_str(args, "driver"),
        .name = arg_str(args, "node-name"),
        .writable = !arg_bool(args, "read-only", false),
        .buffered = s->opts->buffered,
        .alone = json_object_get(args, "backing") != NULL,
        .space = s->opts->space,
    };
    if (strcmp(add->driver, "qcow2") != 0 && strcmp(add->driver, "raw") != 0)
        return bad_value("driver", add->driver, err);
    if (!add->name)
        return err_set(err, -EINVAL, "'node-name' must be specified for the root node");
    if (!serve_name_ok(add->name, NODE_NAME_MAX))
        return err_set(err, -EINVAL, "Invalid node-name: '%s'", add->name);
    if (serve_any_layer(s, add->name))
        return err_set(err, -EEXIST, "Duplicate nodes with node-name='%s'", add->name);
    if (backing && chain_find_layer(s->chain, backing) != 0)
        return err_set(err, -EINVAL, "backing must be null or the top of the disk ('%s'), not '%s'",
                       layer_node_name(chain_layer(s->chain, 0)), backing);
    int rc = parse_space(args, &add->space, err);
    if (rc == 0)
        rc = parse_file(json_object_get(args, "file"), add, err);
    if (rc == 0 && json_object_get(args, "cache"))
        rc = parse_cache(json_object_get(args, "cache"), add, err);
    return rc;
}

SUSPENDS static int open_chain(struct serve *s, const struct add *add, struct serve_node *node,
                               struct err *err)
{
    struct chain_opts opts = {
        .format = add->driver,
        .writable = add->writable,
        .buffered = add->buffered,
        .cache_bytes = s->opts->cache_bytes,
        .prealloc_step = s->opts->prealloc_step,
        .space = add->space,
        .grow = serve_grow_opts(s),
    };
    int rc = chain_open(add->filename, &opts, &node->chain, err);

    if (rc == 0)
        layer_set_node_name(chain_layer(node->chain, 0), add->name);
    return rc;
}

SUSPENDS static int open_alone(struct serve *s, const struct add *add, struct serve_node *node,
                               struct err *err)
{
    struct layer_opts opts = {
        .format = add->driver,
        .writable = add->writable,
        .buffered = add->buffered,
        .prealloc_step = s->opts->prealloc_step,
        .space = add->space,
        .grow = serve_grow_opts(s),
        .ack = add->writable && s->opts->durability == SERVE_ACK,
    };
    int rc = layer_open(add->filename, &opts, &node->layer, err);

    if (rc == 0)
        layer_set_node_name(node->layer, add->name);
    return rc;
}

/* Opened alone at first: only then is it known whether something is below. */
SUSPENDS static int open_node(struct serve *s, const struct add *add, struct serve_node *node,
                              struct err *err)
{
    _cleanup_(freep) char *below = NULL;
    int rc = open_alone(s, add, node, err);

    if (rc < 0 || add->alone)
        return rc;
    rc = layer_backing_path(node->layer, &below, err);
    if (rc == 0 && !below)
        return 0;
    int close_rc = layer_close(node->layer, rc < 0 ? NULL : err);
    node->layer = NULL;
    if (rc == 0)
        rc = close_rc;
    return rc < 0 ? rc : open_chain(s, add, node, err);
}

SUSPENDS int cmd_blockdev_add(void *ctx, json_t *args, json_t **ret, struct err *err)
{
    struct serve *s = ctx;
    struct add add;
    int rc = parse_add(s, args, &add, err);

    if (rc < 0)
        return rc;
    struct serve_node *node = calloc(1, sizeof(*node));
    if (!node)
        return err_errno(err, -ENOMEM, "add node '%s'", add.name);
    rc = open_node(s, &add, node, err);
    if (rc < 0) {
        free(node);
        return rc;
    }
    list_push_back(&s->nodes, &node->link);
    return 0;
}

SUSPENDS int cmd_blockdev_del(void *ctx, json_t *args, json_t **ret, struct err *err)
{
    struct serve *s = ctx;
    const char *name = arg_str(args, "node-name");
    struct serve_node *node = serve_find_node(s, name);

    if (node)
        return serve_node_close(node, err);
    if (serve_any_layer(s, name))
        return err_set(err, -EBUSY, "Node %s is in use", name);
    return err_set(err, -ENOENT, "Failed to find node with node-name='%s'", name);
}
