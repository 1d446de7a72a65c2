/*
 * query-named-block-nodes: the disk's layers from the top down, then what blockdev-add opened.
 *
 * The fields are QEMU's. `file` and image.filename are always the path. Without "flat" an image
 * shows what is below it, at most NESTED_MAX images deep: the answer must not grow with the
 * square of the chain's depth.
 */
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include "serve/internal.h"

#define NESTED_MAX 8u

/* Where layers stand in a stack; index 0 is the top. */
struct stack {
    const struct chain *chain; /* NULL: layer alone */
    struct layer *layer;
};

static unsigned stack_depth(const struct stack *st)
{
    return st->chain ? chain_depth(st->chain) : 1;
}

static struct layer *stack_layer(const struct stack *st, unsigned index)
{
    return st->chain ? chain_layer(st->chain, index) : st->layer;
}

/* Bytes on disk, without asking a file server: this must not wait. */
static uint64_t disk_usage(const struct layer *layer)
{
    const struct blk *blk = layer_blk(layer);
    struct statx st;
    int fd = blk_file_fd(layer_blk(layer));

    if (fd < 0 ||
        statx(fd, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, STATX_BLOCKS | STATX_TYPE, &st) < 0)
        return 0;
    if (S_ISBLK(st.stx_mode)) { /* it is all allocated: what of it is used? */
        uint64_t used = layer_image(layer) ? image_used_hint(layer_image(layer)) : 0;

        return used ? MIN(used, blk->len) : blk->len;
    }
    return st.stx_blocks * 512u;
}

static void set(json_t *obj, const char *key, json_t *value)
{
    json_object_set_new(obj, key, value);
}

static void set_str(json_t *obj, const char *key, const char *value)
{
    if (value)
        json_object_set_new(obj, key, json_string(value));
}

static json_t *qcow2_data(const struct image *img)
{
    const struct qcow2_header *hdr = image_header(img);
    json_t *data = json_object();

    set_str(data, "compat", hdr->version >= 3 ? "1.1" : "0.10");
    set_str(data, "compression-type", hdr->compression == QCOW2_ZSTD ? "zstd" : "zlib");
    set(data, "refcount-bits", json_integer(1 << hdr->refcount_order));
    if (hdr->version >= 3) {
        set(data, "lazy-refcounts", json_boolean(hdr->compatible & QCOW2_COMPAT_LAZY_REFCOUNTS));
        set(data, "corrupt", json_boolean(image_is_corrupt(img)));
        set(data, "extended-l2", json_boolean(hdr->extended_l2));
    }
    return json_pack("{s:s, s:o}", "type", "qcow2", "data", data);
}

static void add_qcow2(json_t *obj, const struct layer *layer)
{
    const struct image *img = layer_image(layer);
    const struct qcow2_header *hdr = image_header(img);
    _cleanup_(freep) char *below = NULL;

    set(obj, "cluster-size", json_u64(hdr->cluster_size));
    set_str(obj, "backing-filename", hdr->backing_name);
    set_str(obj, "backing-filename-format", hdr->backing_format);
    if (layer_backing_path(layer, &below, NULL) == 0)
        set_str(obj, "full-backing-filename", below);
    set(obj, "format-specific", qcow2_data(img));
}

static json_t *image_info(const struct layer *layer)
{
    json_t *obj = json_object();

    set_str(obj, "filename", layer_path(layer));
    set_str(obj, "format", layer_format(layer));
    set(obj, "virtual-size", json_u64(layer_len(layer)));
    set(obj, "actual-size", json_u64(disk_usage(layer)));
    set(obj, "dirty-flag", json_false());
    if (layer_image(layer))
        add_qcow2(obj, layer);
    return obj;
}

/* Hangs the images below into each other. */
static void nest_images(json_t *obj, const struct stack *st, unsigned index)
{
    for (unsigned i = index + 1; i < stack_depth(st) && i <= index + NESTED_MAX; i++) {
        json_t *below = image_info(stack_layer(st, i));

        set(obj, "backing-image", below);
        obj = below;
    }
}

static json_t *node_info(const struct serve *s, const struct stack *st, unsigned index, bool flat)
{
    static const char *const unlimited[] = {"bps",     "bps_rd",  "bps_wr",         "iops",
                                            "iops_rd", "iops_wr", "write_threshold"};
    struct layer *layer = stack_layer(st, index);
    json_t *obj = json_object(), *image = image_info(layer);
    bool in_disk = st->chain == s->chain;

    set_str(obj, "file", layer_path(layer));
    set_str(obj, "node-name", layer_node_name(layer));
    set_str(obj, "drv", layer_format(layer));
    set(obj, "ro", json_boolean(!layer_blk(layer)->writable));
    set(obj, "encrypted", json_false());
    set_str(obj, "detect_zeroes", space_detect_zeroes_name(layer_space(layer)));
    set(obj, "backing_file_depth", json_u64(flat ? 0 : stack_depth(st) - 1 - index));
    if (index + 1 < stack_depth(st))
        set_str(obj, "backing_file", layer_path(stack_layer(st, index + 1)));
    for (size_t i = 0; i < ARRAY_SIZE(unlimited); i++)
        set(obj, unlimited[i], json_integer(0));
    set(obj, "cache",
        json_pack("{s:b, s:b, s:b}", "writeback", 1, "direct", !s->opts->buffered, "no-flush", 0));
    if (!flat)
        nest_images(image, st, index);
    set(obj, "image", image);
    if (in_disk)
        set(obj, "x-varve-depth", json_u64(index));
    if (in_disk && index == 0)
        set_str(obj, "x-varve-volume", s->opts->volume_id);
    return obj;
}

static void add_stack(json_t *list, const struct serve *s, const struct stack *st, bool flat)
{
    for (unsigned i = 0; i < stack_depth(st); i++)
        json_array_append_new(list, node_info(s, st, i, flat));
}

int cmd_query_nodes(void *ctx, json_t *args, json_t **ret, struct err *err)
{
    struct serve *s = ctx;
    bool flat = arg_bool(args, "flat", false);
    json_t *list = json_array();

    add_stack(list, s, &(struct stack){.chain = s->chain}, flat);
    list_for_each(it, &s->nodes) {
        const struct serve_node *node = list_entry(it, struct serve_node, link);

        add_stack(list, s, &(struct stack){node->chain, node->layer}, flat);
    }
    *ret = list;
    return 0;
}

/* ---- x-varve-stats ---- */
#define STAT(obj, from, field) json_object_set_new(obj, #field, json_u64((from).field))

static json_t *chain_figures(const struct serve *s)
{
    struct chain_stats st;
    json_t *obj = json_object();

    chain_get_stats(s->chain, &st);
    STAT(obj, st, cache_bytes);
    STAT(obj, st, cache_bytes_max);
    STAT(obj, st, cache_limit);
    STAT(obj, st, cache_hits);
    STAT(obj, st, cache_misses);
    STAT(obj, st, cache_evictions);
    STAT(obj, st, preloaded_bytes);
    set(obj, "preloading", json_boolean(st.preloads_running > 0));
    STAT(obj, st, map_hits);
    STAT(obj, st, map_misses);
    STAT(obj, st, map_bytes);
    STAT(obj, st, map_bytes_max);
    STAT(obj, st, map_stale_inserts);
    STAT(obj, st, reads);
    STAT(obj, st, writes);
    STAT(obj, st, read_bytes);
    STAT(obj, st, write_bytes);
    STAT(obj, st, pivots);
    STAT(obj, st, last_gate_closed_ns);
    STAT(obj, st, max_gate_closed_ns);
    set_str(obj, "durability", chain_is_ack(s->chain) ? "ack" : "flush");
    set(obj, "depth", json_u64(chain_depth(s->chain)));
    set(obj, "length", json_u64(chain_len(s->chain)));
    return obj;
}

static json_t *image_figures(const struct image *img)
{
    struct image_stats st;
    json_t *obj = json_object();

    image_get_stats(img, &st);
    STAT(obj, st, cache_hits);
    STAT(obj, st, cache_misses);
    STAT(obj, st, cache_bytes);
    STAT(obj, st, cache_bytes_max);
    STAT(obj, st, cow_reads);
    STAT(obj, st, cow_read_bytes);
    STAT(obj, st, cow_write_bytes);
    STAT(obj, st, clusters_allocated);
    STAT(obj, st, clusters_freed);
    STAT(obj, st, runs_allocated);
    STAT(obj, st, refcount_writes);
    STAT(obj, st, l2_writes);
    STAT(obj, st, claim_waits);
    STAT(obj, st, write_joins);
    STAT(obj, st, flushes);
    if (blk_is_extendable(image_blk(img))) {
        STAT(obj, st, extensions);
        STAT(obj, st, extensions_ahead);
        STAT(obj, st, extend_failures);
        STAT(obj, st, extend_ns);
        STAT(obj, st, room_waits);
        STAT(obj, st, room_wait_ns);
    }
    set(obj, "unwritten", json_boolean(image_is_unwritten(img)));
    set(obj, "records", json_u64(image_records(img)));
    return obj;
}

static json_t *device_figures(const struct blk *blk)
{
    json_t *obj = json_object();

    STAT(obj, blk->stats, reads);
    STAT(obj, blk->stats, read_bytes);
    STAT(obj, blk->stats, writes);
    STAT(obj, blk->stats, write_bytes);
    STAT(obj, blk->stats, flushes);
    STAT(obj, blk->stats, zeroes);
    STAT(obj, blk->stats, discards);
    STAT(obj, blk->stats, bounced);
    return obj;
}

static json_t *latency_figures(const struct histogram *h)
{
    json_t *counts = json_array();

    for (unsigned i = 0; i < HISTOGRAM_BUCKETS; i++)
        json_array_append_new(counts, json_u64(h->counts[i]));
    return json_pack("{s:I, s:o}", "sum-ns", (json_int_t)h->sum_ns, "counts", counts);
}

static json_t *latencies_figures(const struct serve_export *e)
{
    _cleanup_(freep) struct export_latency *sum = calloc(1, sizeof(*sum));

    if (!sum)
        return json_object();
    vec_for_each(on, &e->on)
        nbd_export_add_latency(on->exp, sum);
    return json_pack("{s:o, s:o, s:o}", "read", latency_figures(&sum->read_ns), "write",
                     latency_figures(&sum->write_ns), "flush", latency_figures(&sum->flush_ns));
}

static json_t *export_figures(const struct serve_export *e)
{
    struct export_stats st;
    json_t *obj = json_pack("{s:s, s:s}", "id", e->id, "name", e->name);

    serve_export_stats(e, &st);
    STAT(obj, st, reads);
    STAT(obj, st, writes);
    STAT(obj, st, flushes);
    STAT(obj, st, trims);
    STAT(obj, st, zeroes);
    STAT(obj, st, status);
    STAT(obj, st, errors);
    STAT(obj, st, read_bytes);
    STAT(obj, st, write_bytes);
    STAT(obj, st, connections);
    STAT(obj, st, connections_total);
    set(obj, "latency", latencies_figures(e));
    return obj;
}

static json_t *layer_figures(const struct layer *layer)
{
    json_t *obj = json_object();

    set_str(obj, "node-name", layer_node_name(layer));
    set_str(obj, "file", layer_path(layer));
    set(obj, "in-use", json_boolean(layer_in_use(layer)));
    set(obj, "device", device_figures(layer_blk(layer)));
    if (layer_image(layer))
        set(obj, "image", image_figures(layer_image(layer)));
    return obj;
}

static json_t *pivot_figures(const struct pivot_stats *st)
{
    return json_pack("{s:I, s:I, s:I}", "gate-closed-ns", (json_int_t)st->gate_closed_ns,
                     "drain-ns", (json_int_t)st->drain_ns, "flush-ns", (json_int_t)st->flush_ns);
}

int cmd_stats(void *ctx, json_t *args, json_t **ret, struct err *err)
{
    struct serve *s = ctx;
    json_t *obj = json_object(), *layers = json_array(), *exports = json_array();

    for (unsigned i = 0; i < chain_depth(s->chain); i++)
        json_array_append_new(layers, layer_figures(chain_layer(s->chain, i)));
    list_for_each(it, &s->exports)
        json_array_append_new(exports, export_figures(list_entry(it, struct serve_export, link)));
    set_str(obj, "volume", s->opts->volume_id);
    set(obj, "chain", chain_figures(s));
    set(obj, "layers", layers);
    set(obj, "exports", exports);
    set(obj, "last-pivot", pivot_figures(&s->last_pivot));
    *ret = obj;
    return 0;
}
