/*
 * A stack of layers as one disk: opening, requests, status. Invariants:
 *
 * 1. layers[0] is the top and the only layer a guest writes; index, lower and slot of each layer
 *    agree with the array.
 * 2. Every request stands inside the gate from its first look at a layer to its last.
 * 3. After a change of the top's mapping, and before the request is answered, the flattened map
 *    is told (chain of depth 1: there is none).
 */
#include "base/bits.h"
#include "base/check.h"
#include "chain/internal.h"

#define CACHE_DEFAULT_MAX (32 * MIB)
#define CACHE_DEFAULT_MIN (4 * MIB)
#define CACHE_MIN         (256 * KIB)

/* ---- opening ---- */

static uint64_t table_bytes(const struct layer *layer)
{
    if (!layer->image)
        return 0;
    const struct qcow2_header *hdr = image_header(layer->image);
    return div_up(hdr->virtual_len, hdr->cluster_size) * hdr->l2_entry_size;
}

/* Covers the disk: the tables of all layers, and as much again for the map and refcounts; the top's
 * twice more, as it will have snapshots. */
static uint64_t default_cache(struct layer *const *layers, unsigned nr)
{
    uint64_t tables = table_bytes(layers[0]);

    for (unsigned i = 0; i < nr; i++)
        tables += table_bytes(layers[i]);
    return MIN(CACHE_DEFAULT_MAX, MAX(CACHE_DEFAULT_MIN, 2 * tables));
}

static int check_layers(struct layer *const *layers, unsigned nr, struct err *err)
{
    if (nr == 0 || nr > CHAIN_DEPTH_MAX)
        return err_set(err, -EINVAL, "a chain has 1 to %u layers", CHAIN_DEPTH_MAX);
    for (unsigned i = 0; i + 1 < nr; i++)
        if (!layers[i]->image)
            return err_set(err, -EINVAL, "'%s' is raw and cannot have a layer below",
                           layers[i]->path);
    return 0;
}

int chain_from_layers(struct layer *const *layers, unsigned nr, uint64_t cache_bytes,
                      struct chain **ret, struct err *err)
{
    int rc = check_layers(layers, nr, err);

    if (rc < 0)
        return rc;
    struct chain *chain = calloc(1, sizeof(*chain));
    if (!chain)
        return err_errno(err, -ENOMEM, "chain");
    gate_init(&chain->gate);
    gate_init(&chain->work);
    wait_queue_init(&chain->no_wait);
    co_mutex_init(&chain->shape, RANK_CHAIN);
    chain->writable = layers[0]->writable;
    chain->unit = UINT64_MAX;
    for (unsigned i = 0; i < nr; i++)
        chain->unit = MIN(chain->unit, layer_unit(layers[i]));
    bound_init(&chain->bound,
               cache_bytes ? MAX(cache_bytes, CACHE_MIN) : default_cache(layers, nr));
    fmap_init(&chain->fmap, chain->unit, &chain->bound);
    for (unsigned i = nr; i-- > 0;) {
        rc = chain_reserve(chain);
        if (rc < 0)
            break;
        chain_attach(chain, 0, layers[i]);
    }
    if (rc < 0) {
        while (chain->layers.len > 0)
            chain_detach(chain, chain_top(chain));
        chain_free(chain);
        return err_errno(err, rc, "chain");
    }
    *ret = chain;
    return 0;
}

void chain_free(struct chain *chain)
{
    fmap_fini(&chain->fmap);
    vec_free(&chain->layers);
    vec_free(&chain->slots);
    free(chain);
}

struct opening { /* layers opened so far, top first */
    VEC(struct layer *) layers;
};

SUSPENDS static void close_all(struct opening *o)
{
    for (size_t i = 0; i < o->layers.len; i++)
        layer_close(o->layers.data[i], NULL);
    vec_free(&o->layers);
}

/* Looks before it opens: a file already open above is a loop, whatever it is called here. */
SUSPENDS static int check_loop(const struct opening *o, const char *path, struct err *err)
{
    struct file_id id;
    int rc = file_id_get(path, &id);

    if (rc < 0)
        return err_errno(err, rc, "open '%s'", path);
    for (size_t i = 0; i < o->layers.len; i++) {
        const struct layer *l = o->layers.data[i];

        if (l->has_id && l->dev == id.dev && l->ino == id.ino)
            return err_set(err, -ELOOP, "backing files form a loop: '%s' is '%s' again", path,
                           l->path);
    }
    if (o->layers.len >= CHAIN_DEPTH_MAX)
        return err_set(err, -ELOOP, "more than %u backing files", CHAIN_DEPTH_MAX);
    return 0;
}

SUSPENDS static int open_layer(struct opening *o, const char *path, const struct layer_opts *opts,
                               struct err *err)
{
    struct layer *layer;
    int rc = vec_reserve(&o->layers, o->layers.len + 1);

    if (rc < 0)
        return err_errno(err, rc, "chain");
    rc = layer_open(path, opts, &layer, err);
    if (rc == 0)
        o->layers.data[o->layers.len++] = layer;
    return rc;
}

/* Opens what the last opened layer names as backing file; *ret_end: it names none. */
SUSPENDS static int open_next(struct opening *o, struct layer_opts *opts, bool *ret_end,
                              struct err *err)
{
    const struct layer *last = o->layers.data[o->layers.len - 1];
    _cleanup_(freep) char *path = NULL;
    int rc = layer_backing_path(last, &path, err);

    *ret_end = !path;
    if (rc < 0 || !path)
        return rc;
    opts->format = image_header(last->image)->backing_format;
    rc = check_loop(o, path, err);
    if (rc == 0)
        rc = open_layer(o, path, opts, err);
    return rc < 0 ? err_prefix(err, rc, "backing file of '%s'", last->path) : 0;
}

/* The kill fell into a snapshot: the image is not the top any more. Where it cannot be written now
 * (others read it, too) the journal is laid over what is read, as in a read-only chain. */
SUSPENDS static int settle_below(struct layer *layer, struct err *err)
{
    int rc = layer_settle(layer, err);

    return rc == -EBUSY || rc == -EACCES || rc == -EPERM || rc == -EROFS ? 0 : rc;
}

SUSPENDS static int open_all(struct opening *o, const char *path, const struct chain_opts *opts,
                             struct err *err)
{
    struct layer_opts layer_opts = {
        .format = opts->format,
        .writable = opts->writable,
        .buffered = opts->buffered,
        .no_lock = opts->no_lock,
        .prealloc_step = opts->prealloc_step,
        .space = opts->space,
        .grow = opts->grow,
    };
    bool end = opts->no_backing;
    int rc = open_layer(o, path, &layer_opts, err);

    layer_opts.writable = false;
    while (rc == 0 && !end) {
        rc = open_next(o, &layer_opts, &end, err);
        if (rc == 0 && !end && opts->writable)
            rc = settle_below(o->layers.data[o->layers.len - 1], err);
    }
    return rc;
}

int chain_open(const char *path, const struct chain_opts *opts, struct chain **ret, struct err *err)
{
    struct opening o = {0};
    int rc = open_all(&o, path, opts, err);

    if (rc == 0)
        rc = chain_from_layers(o.layers.data, (unsigned)o.layers.len, opts->cache_bytes, ret, err);
    if (rc < 0)
        close_all(&o);
    else
        vec_free(&o.layers);
    return rc;
}

int chain_settle(const char *path, const char *format, struct err *err)
{
    const struct chain_opts opts = {.format = format};
    struct opening o = {0};
    int rc = open_all(&o, path, &opts, err);

    for (size_t i = 0; i < o.layers.len && rc == 0; i++)
        rc = i == 0 ? layer_settle(o.layers.data[i], err) : settle_below(o.layers.data[i], err);
    close_all(&o);
    return rc;
}

int chain_close(struct chain *chain, struct err *err)
{
    int first_rc = 0;

    if (!chain)
        return 0;
    chain_stop_waits(chain);
    while (chain->waits)
        wait_queue_sleep(&chain->no_wait);
    chain_freeze(chain);
    while (chain->layers.len > 0) {
        struct layer *layer = chain_top(chain);

        chain_detach(chain, layer);
        int rc = layer_close(layer, first_rc < 0 ? NULL : err);
        if (rc < 0 && first_rc == 0)
            first_rc = rc;
    }
    chain_thaw(chain);
    chain_free(chain);
    return first_rc;
}

/* ---- what a chain is ---- */

uint64_t chain_len(const struct chain *chain)
{
    return layer_len(chain_top(chain));
}

bool chain_is_writable(const struct chain *chain)
{
    return chain->writable;
}

unsigned chain_depth(const struct chain *chain)
{
    return (unsigned)chain->layers.len;
}

struct layer *chain_layer(const struct chain *chain, unsigned index)
{
    return index < chain->layers.len ? chain->layers.data[index] : NULL;
}

int chain_find_layer(const struct chain *chain, const char *node_name)
{
    for (size_t i = 0; i < chain->layers.len; i++)
        if (strcmp(chain->layers.data[i]->node_name, node_name) == 0)
            return (int)i;
    return -ENOENT;
}

void chain_get_stats(const struct chain *chain, struct chain_stats *ret)
{
    *ret = chain->stats;
    ret->map_hits = chain->fmap.hits;
    ret->map_misses = chain->fmap.misses;
    ret->map_bytes = chain->fmap.member.bytes;
    ret->map_bytes_max = chain->fmap.bytes_max;
    ret->map_stale_inserts = chain->fmap.stale_inserts;
    ret->cache_bytes = chain->bound.bytes;
    ret->cache_bytes_max = chain->bound.bytes_max;
    ret->cache_limit = chain->bound.limit;
    ret->cache_evictions = chain->bound.evictions;
    for (size_t i = 0; i < chain->layers.len; i++) {
        struct image_stats st;

        if (!chain->layers.data[i]->image)
            continue;
        image_get_stats(chain->layers.data[i]->image, &st);
        ret->cache_hits += st.cache_hits;
        ret->cache_misses += st.cache_misses;
    }
}

void chain_set_walk_hook(struct chain *chain, void (*fn)(void *arg), void *arg)
{
    chain->walk_hook = fn;
    chain->walk_hook_arg = arg;
}

/* ---- reading ---- */

int chain_read(struct chain *chain, uint64_t off, uint64_t len, struct iov_iter *iov)
{
    int rc;

    gate_enter(&chain->gate);
    struct layer *top = chain_top(chain);
    chain->stats.reads++;
    chain->stats.read_bytes += len;
    if (!range_ok(off, len, layer_len(top)))
        rc = -EINVAL;
    else if (top->lower)
        rc = chain_read_from(chain, top, off, len, iov);
    else if (top->image)
        rc = image_read(top->image, off, len, iov, NULL);
    else
        rc = blk_readv(top->blk, off, len, iov);
    gate_leave(&chain->gate);
    return rc;
}

int chain_read_layer(struct chain *chain, struct layer *layer, uint64_t off, uint64_t len,
                     struct iov_iter *iov)
{
    int rc = -EINVAL;

    gate_enter(&chain->gate);
    if (!layer)
        layer = chain_top(chain);
    if (range_ok(off, len, layer_len(layer)))
        rc = chain_read_from(chain, layer, off, len, iov);
    gate_leave(&chain->gate);
    return rc;
}

static void fill_status(const struct layer *from, const struct layer *decides,
                        const struct extent *ext, bool hole, struct chain_status *ret)
{
    ret->depth = decides->index - from->index;
    ret->len = ext->len;
    ret->host_off = ext->host_off;
    ret->host_valid = ext->host_valid;
    ret->kind = ext->kind == EXTENT_UNALLOCATED  ? CHAIN_HOLE
                : ext->kind == EXTENT_ZERO       ? CHAIN_ZERO
                : ext->kind == EXTENT_COMPRESSED ? CHAIN_COMPRESSED
                                                 : CHAIN_DATA;
    ret->zero = hole || ret->kind == CHAIN_HOLE || ret->kind == CHAIN_ZERO;
}

/* The first layer of from..until (without) that decides, and what it says. Data in a hole of that
 * layer's file reads as zero, and still hides what is below. */
SUSPENDS static int status_walk(struct layer *from, const struct layer *until, uint64_t off,
                                uint64_t len, uint64_t hole_unit, struct extent *ret,
                                bool *ret_hole, struct layer **ret_layer)
{
    *ret_hole = false;
    for (struct layer *l = from; l != until; l = l->lower) {
        uint64_t end = layer_len(l);

        *ret_layer = l;
        if (off >= end) {
            *ret = (struct extent){.kind = EXTENT_ZERO, .len = len};
            return 0;
        }
        int rc = layer_map(l, off, MIN(len, end - off), ret);
        if (rc == 0 && ret->kind == EXTENT_DATA && hole_unit)
            rc = layer_split_at_hole(l, off, hole_unit, ret, ret_hole);
        if (rc < 0 || ret->kind != EXTENT_UNALLOCATED)
            return rc;
        len = ret->len;
    }
    return 0;
}

int chain_status(struct chain *chain, struct layer *layer, uint64_t off, uint64_t len,
                 struct chain_status *ret)
{
    struct extent ext;
    struct layer *decides = NULL;
    bool hole;
    int rc = -EINVAL;

    gate_enter(&chain->gate);
    if (!layer)
        layer = chain_top(chain);
    if (len > 0 && range_ok(off, len, layer_len(layer)))
        rc = status_walk(layer, NULL, off, len, HOLES_TO_TELL, &ext, &hole, &decides);
    if (rc == 0)
        fill_status(layer, decides, &ext, hole, ret);
    gate_leave(&chain->gate);
    return rc;
}

int chain_merge_map(struct chain *chain, struct layer *from, const struct layer *until,
                    uint64_t off, uint64_t len, uint64_t hole_unit, struct extent *ret)
{
    struct layer *decides;
    bool hole;
    int rc = status_walk(from, until, off, len, hole_unit, ret, &hole, &decides);

    if (rc == 0 && hole)
        ret->kind = EXTENT_ZERO;
    return rc;
}

int chain_merge_is_zero(struct chain *chain, struct layer *from, uint64_t off, uint64_t len,
                        uint64_t hole_unit, bool *ret_zero, uint64_t *ret_len)
{
    struct extent ext = {.kind = EXTENT_ZERO, .len = len};
    int rc = from ? chain_merge_map(chain, from, NULL, off, len, hole_unit, &ext) : 0;

    if (rc < 0)
        return rc;
    *ret_zero = ext.kind == EXTENT_UNALLOCATED || ext.kind == EXTENT_ZERO;
    *ret_len = ext.len;
    return 0;
}

int chain_merge_read(struct chain *chain, struct layer *from, uint64_t off, uint64_t len,
                     struct iov_iter *iov)
{
    return chain_read_from(chain, from, off, len, iov);
}
