/* Layers on memory; see rig.h. */
#include "rig.h"
#include "base/bits.h"
#include "qcow2/image.h"

/* ---- a device that outlives its image ---- */

struct borrow {
    struct blk blk;
    struct blk *inner;
};

static struct blk *inner_of(struct blk *blk)
{
    return container_of(blk, struct borrow, blk)->inner;
}

SUSPENDS static int borrow_readv(struct blk *blk, uint64_t off, uint64_t len, struct iov_iter *iov)
{
    return blk_readv(inner_of(blk), off, len, iov);
}

SUSPENDS static int borrow_writev(struct blk *blk, uint64_t off, uint64_t len, struct iov_iter *iov,
                                  unsigned flags)
{
    return blk_writev(inner_of(blk), off, len, iov, flags);
}

SUSPENDS static int borrow_flush(struct blk *blk)
{
    return blk_flush(inner_of(blk));
}

SUSPENDS static int borrow_zero(struct blk *blk, uint64_t off, uint64_t len, unsigned flags)
{
    return blk_zero(inner_of(blk), off, len, flags);
}

SUSPENDS static int borrow_discard(struct blk *blk, uint64_t off, uint64_t len)
{
    return blk_discard(inner_of(blk), off, len);
}

SUSPENDS static int borrow_resize(struct blk *blk, uint64_t len)
{
    return blk_resize(inner_of(blk), len);
}

SUSPENDS static int borrow_status(struct blk *blk, uint64_t off, uint64_t len, bool *ret_data,
                                  uint64_t *ret_len)
{
    return blk_status(inner_of(blk), off, len, ret_data, ret_len);
}

SUSPENDS static int borrow_preallocate(struct blk *blk, uint64_t off, uint64_t len)
{
    return blk_preallocate(inner_of(blk), off, len);
}

static void borrow_close(struct blk *blk)
{
    free(container_of(blk, struct borrow, blk));
}

static const struct blk_ops borrow_ops = {
    .name = "borrow",
    .readv = borrow_readv,
    .writev = borrow_writev,
    .flush = borrow_flush,
    .zero = borrow_zero,
    .discard = borrow_discard,
    .resize = borrow_resize,
    .status = borrow_status,
    .preallocate = borrow_preallocate,
    .close = borrow_close,
};

struct blk *rig_borrow(struct blk *inner)
{
    struct borrow *b = calloc(1, sizeof(*b));

    CHECK(b);
    CHECK_EQ(blk_init(&b->blk, &borrow_ops, inner->name), 0);
    b->inner = inner;
    b->blk.len = inner->len;
    b->blk.align = inner->align;
    b->blk.mem_align = inner->mem_align;
    b->blk.io_unit = inner->io_unit;
    b->blk.writable = inner->writable;
    b->blk.zero_tail = inner->zero_tail;
    b->blk.fresh_zero = inner->fresh_zero;
    return &b->blk;
}

/* ---- layers ---- */

struct rig_shape rig_random_shape(uint64_t *rng, uint64_t len, bool is_base)
{
    struct rig_shape s = {.len = len};

    if (is_base && rng_below(rng, 4) == 0) {
        s.raw = true;
        return s;
    }
    s.extended_l2 = rng_below(rng, 3) == 0;
    s.cluster_size = s.extended_l2 ? 16384ull << rng_below(rng, 4) : 512ull << rng_below(rng, 9);
    s.version = !s.extended_l2 && rng_below(rng, 6) == 0 ? 2 : 3;
    if (rng_below(rng, 4) == 0 && (is_base || s.extended_l2))
        s.prealloc = PREALLOC_METADATA;
    return s;
}

void rig_create(struct blk *inner, const struct rig_shape *shape, const char *backing,
                const char *backing_format)
{
    struct image_create_opts opts = {
        .virtual_len = shape->len,
        .version = shape->version,
        .cluster_size = shape->cluster_size,
        .extended_l2 = shape->extended_l2,
        .prealloc = shape->prealloc,
        .backing_name = backing,
        .backing_format = backing ? backing_format : NULL,
    };
    struct err err = {0};

    if (shape->raw) {
        CHECK_EQ(blk_resize(inner, shape->len), 0);
        return;
    }
    struct blk *b = rig_borrow(inner);
    if (image_create(b, &opts, &err) < 0)
        test_fail(__FILE__, __LINE__, "create: %s", err_text(&err));
    blk_close(b);
}

struct layer *rig_open(struct blk *inner, bool is_qcow2, bool writable, const char *name)
{
    /* odd ones grow in steps, even ones as they need */
    static unsigned turn;
    struct layer_opts opts = {.writable = writable,
                              .prealloc_step = turn++ % 2 ? 256 * KIB : UINT64_MAX};

    return rig_open_as(inner, is_qcow2, &opts, name);
}

struct layer *rig_open_as(struct blk *inner, bool is_qcow2, const struct layer_opts *opts,
                          const char *name)
{
    struct layer *layer;
    struct err err = {0};

    if (layer_from_blk(rig_borrow(inner), is_qcow2, opts, &layer, &err) < 0)
        test_fail(__FILE__, __LINE__, "open: %s", err_text(&err));
    if (name)
        layer_set_path(layer, name);
    return layer;
}

struct chain *rig_chain(struct blk *const *inner, const bool *is_qcow2, unsigned nr)
{
    struct layer *layers[80];
    struct chain *chain;
    struct err err = {0};

    CHECK(nr <= ARRAY_SIZE(layers));
    for (unsigned i = 0; i < nr; i++)
        layers[i] = rig_open(inner[i], is_qcow2[i], i == 0, NULL);
    if (chain_from_layers(layers, nr, 0, &chain, &err) < 0)
        test_fail(__FILE__, __LINE__, "chain: %s", err_text(&err));
    return chain;
}

/* ---- patterns ---- */

#define MIX 0x9e3779b97f4a7c15ull

void rig_fill(void *buf, uint64_t off, uint64_t len, uint64_t stamp)
{
    CHECK(is_aligned(off | len, RIG_SECTOR));
    if (stamp == 0) {
        memset(buf, 0, len);
        return;
    }
    for (uint64_t *w = buf; len > 0; off += RIG_SECTOR, len -= RIG_SECTOR) {
        *w++ = stamp;
        for (unsigned i = 1; i < RIG_SECTOR / 8; i++)
            *w++ = stamp * MIX + off + i;
    }
}

uint64_t rig_stamp(const void *sector, uint64_t off)
{
    uint64_t want[RIG_SECTOR / 8], stamp;

    memcpy(&stamp, sector, sizeof(stamp));
    rig_fill(want, off, RIG_SECTOR, stamp);
    if (memcmp(want, sector, RIG_SECTOR) != 0)
        test_fail(__FILE__, __LINE__, "sector at %llu is torn or misplaced (stamp %llu)",
                  (unsigned long long)off, (unsigned long long)stamp);
    return stamp;
}

int rig_write(struct chain *chain, uint64_t off, uint64_t len, uint64_t stamp)
{
    struct buf b = {buf_get(len), len};

    CHECK(b.data);
    rig_fill(b.data, off, len, stamp);
    IOV_ITER_BUF(it, vec, b.data, len);
    int rc = chain_write(chain, off, len, &it, 0);
    buf_drop(&b);
    return rc;
}

int rig_read(struct chain *chain, uint64_t off, void *buf, uint64_t len)
{
    IOV_ITER_BUF(it, vec, buf, len);
    return chain_read(chain, off, len, &it);
}

void rig_expect(struct chain *chain, uint64_t off, uint64_t len, uint64_t stamp)
{
    struct buf b = {buf_get(len), len};

    CHECK(b.data);
    CHECK_EQ(rig_read(chain, off, b.data, len), 0);
    for (uint64_t i = 0; i < len; i += RIG_SECTOR)
        CHECK_EQ(rig_stamp((char *)b.data + i, off + i), stamp);
    buf_drop(&b);
}

uint8_t *rig_view(struct chain *chain, struct layer *layer)
{
    uint64_t len = layer ? layer_len(layer) : chain_len(chain);
    uint8_t *view = malloc(len + 1);

    CHECK(view);
    IOV_ITER_BUF(it, vec, view, len);
    int rc = layer ? chain_read_layer(chain, layer, 0, len, &it) : chain_read(chain, 0, len, &it);
    CHECK_EQ(rc, 0);
    return view;
}

static void print_line(void *ctx, const char *line)
{
    fprintf(stderr, "%s: %s\n", (const char *)ctx, line);
}

/* For a look at it with other tools. */
SUSPENDS static void dump_image(struct blk *inner, const char *what)
{
    char path[512];
    struct buf b = {buf_get(inner->len), inner->len};

    snprintf(path, sizeof(path), "%s/%s.qcow2", test_dir(), what);
    FILE *f = fopen(path, "w");
    if (f && b.data && blk_read(inner, 0, b.data, b.len) == 0)
        (void)!fwrite(b.data, 1, b.len, f);
    if (f)
        fclose(f);
    buf_drop(&b);
}

uint64_t rig_check(struct blk *inner, const char *what)
{
    struct image_opts opts = {.no_open_checks = true};
    struct image_check res = {0};
    struct image *img;
    struct err err = {0};
    struct blk *b = rig_borrow(inner);

    if (image_open(b, &opts, &img, &err) < 0)
        test_fail(__FILE__, __LINE__, "%s: open for check: %s", what, err_text(&err));
    if (image_check(img, &res, NULL, NULL, &err) < 0)
        test_fail(__FILE__, __LINE__, "%s: check: %s", what, err_text(&err));
    if (res.corruptions + res.check_errors > 0) {
        image_check(img, &res, print_line, (void *)(uintptr_t)what, NULL);
        dump_image(inner, what);
        test_fail(__FILE__, __LINE__, "%s: %llu corruptions", what,
                  (unsigned long long)res.corruptions);
    }
    image_close(img, NULL);
    return res.leaks;
}
