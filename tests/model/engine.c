/*
 * Random operations on one image against a plain array.
 *
 * A round is a handful of operations at once. Disjoint ones must leave exactly their data; of
 * overlapping ones each byte must be what one of those that cover it left. In the simulator on
 * memory (as a file and as a volume of fixed length with old data in it), and on a real file, where
 * qemu-img checks and compares, a journal is kept, and the process seems to be killed now and then.
 *
 * VARVE_MODEL_ROUNDS multiplies the rounds.
 */
#include "base/bits.h"
#include "keep.h"
#include "qcow2/image.h"
#include "rt/reactor.h"
#include "rt/sim.h"
#include "rt/timer.h"
#include "rt/wait.h"
#include "test.h"

#define ROUND_OPS 6u

struct config {
    const char *name;
    struct image_create_opts create;
    uint64_t cache_bytes;
    uint64_t below_len; /* 0: nothing below */
    uint32_t align;     /* of the memory device */
    bool fixed_len;
    uint64_t chunk; /* a volume that grows by so much; then and when it cannot */
    bool real_file;
    enum image_discard discard;
    bool fresh_unknown;
    unsigned rounds;
};

enum op_kind { OP_WRITE, OP_ZERO, OP_DISCARD, OP_READ, OP_FLUSH };
struct op {
    struct world *w;
    enum op_kind kind;
    uint64_t off, len;
    uint8_t value;
    unsigned flags;
    bool overlaps; /* its result is looked at after the round */
};

struct world {
    const struct config *cfg;
    uint64_t rng;
    struct blk *dev; /* memory; NULL with a real file */
    char path[200], raw[200], below_path[200], journals[200];
    unsigned kills; /* they may leave leaks */
    struct image *img;
    uint8_t *model, *below;
    uint64_t len, max_len;
    uint64_t hot, hot_len; /* where this round's operations are */
    struct image_below layers;
    struct op ops[ROUND_OPS];
    unsigned nr_ops;
    uint64_t nr_done, claim_waits, write_joins;
    uint64_t dev_len; /* of a volume that grows */
    struct image_stats grown;
};

static uint64_t pick(struct world *w, uint64_t n)
{
    return rng_below(&w->rng, n);
}

/* ---- below ---- */

SUSPENDS static int below_read(void *ctx, uint64_t off, uint64_t len, struct iov_iter *iov)
{
    struct world *w = ctx;
    uint64_t inside = off < w->cfg->below_len ? MIN(len, w->cfg->below_len - off) : 0;

    io_point();
    iov_iter_write(iov, w->below + off, inside);
    iov_iter_zero(iov, len - inside);
    return 0;
}

static uint64_t below_is_zero(void *ctx, uint64_t off, uint64_t len, bool *ret_zero)
{
    struct world *w = ctx;

    *ret_zero = off >= w->cfg->below_len;
    return *ret_zero ? len : MIN(len, w->cfg->below_len - off);
}

static const struct image_below *below_of(struct world *w)
{
    return w->cfg->below_len ? &w->layers : NULL;
}

/* ---- operations ---- */

/* What a discard does for certain; the rest stays as it is. */
static void discard_range(const struct world *w, const struct op *op, uint64_t *ret_start,
                          uint64_t *ret_end)
{
    uint64_t cs = image_header(w->img)->cluster_size, end = op->off + op->len;

    *ret_start = align_up(op->off, cs);
    *ret_end = end == w->len ? end : align_down(end, cs);
    if (*ret_start >= *ret_end || (image_header(w->img)->version < 3 && w->cfg->below_len))
        *ret_start = *ret_end = op->off;
}

static void check_bytes(struct world *w, const uint8_t *got, uint64_t off, uint64_t len)
{
    for (uint64_t i = 0; i < len; i++)
        if (got[i] != w->model[off + i])
            test_fail(__FILE__, __LINE__, "%s: byte %llu of [%llu, +%llu) is %02x, not %02x",
                      w->cfg->name, (unsigned long long)(off + i), (unsigned long long)off,
                      (unsigned long long)len, got[i], w->model[off + i]);
}

SUSPENDS static void read_back(struct world *w, uint64_t off, uint64_t len, uint8_t *buf)
{
    struct iovec iov[2] = {{buf, len / 3}, {buf + len / 3, len - len / 3}};
    struct iov_iter it;

    iov_iter_init(&it, iov, 2);
    memset(buf, 0xee, len);
    CHECK_EQ(image_read(w->img, off, len, &it, below_of(w)), 0);
}

/* True: there may be room now, it is to be done again. */
SUSPENDS static bool wait_room(struct world *w, int *rc)
{
    return *rc == -ENOBUFS && (*rc = image_wait_room(w->img)) == 0;
}

SUSPENDS static int do_write(struct world *w, const struct op *op, uint8_t *buf)
{
    struct iovec iov[3] = {{buf, op->len / 4}, {buf + op->len / 4, op->len / 2}};
    int rc;

    memset(buf, op->value, op->len);
    iov[2].iov_base = buf + op->len / 4 + op->len / 2;
    iov[2].iov_len = op->len - op->len / 4 - op->len / 2;
    do {
        struct iov_iter it;

        iov_iter_init(&it, iov, 3);
        rc = image_write(w->img, op->off, op->len, &it, op->flags | IMAGE_NO_WAIT, below_of(w));
    } while (wait_room(w, &rc));
    return rc;
}

SUSPENDS static int do_zero(struct world *w, const struct op *op)
{
    int rc;

    do {
        rc = image_zero(w->img, op->off, op->len, op->flags | IMAGE_NO_WAIT, below_of(w));
    } while (wait_room(w, &rc));
    return rc;
}

SUSPENDS static int run_op(void *arg)
{
    struct op *op = arg;
    struct world *w = op->w;
    uint8_t *buf = malloc(op->len + 1);
    int rc = 0;

    switch (op->kind) {
    case OP_WRITE:
        rc = do_write(w, op, buf);
        break;
    case OP_ZERO:
        rc = do_zero(w, op);
        break;
    case OP_DISCARD:
        rc = image_discard(w->img, op->off, op->len, below_of(w));
        break;
    case OP_READ:
        read_back(w, op->off, op->len, buf);
        if (!op->overlaps)
            check_bytes(w, buf, op->off, op->len);
        break;
    case OP_FLUSH:
        rc = image_flush(w->img);
        break;
    }
    free(buf);
    if (rc < 0)
        test_fail(__FILE__, __LINE__, "%s: operation %d at %llu +%llu gave %d", w->cfg->name,
                  (int)op->kind, (unsigned long long)op->off, (unsigned long long)op->len, rc);
    w->nr_done++;
    return 0;
}

static void pick_range(struct world *w, struct op *op)
{
    uint64_t cs = image_header(w->img)->cluster_size, len = w->hot_len,
             max = MIN(len, 4 * cs + 8192);

    switch (pick(w, 4)) {
    case 0: /* any bytes */
        op->len = 1 + pick(w, MIN(max, 20000ull));
        op->off = pick(w, len - op->len + 1);
        break;
    case 1: /* sectors */
        op->len = MIN(512 * (1 + pick(w, 64)), align_down(max, 512));
        op->off = align_down(pick(w, len - op->len + 1), 512);
        break;
    case 2: /* 4k */
        op->len = MIN(4096ull, len);
        op->off = align_down(pick(w, len - op->len + 1), MIN(4096ull, op->len));
        break;
    default: /* whole clusters */
        op->len = MIN(cs * (1 + pick(w, 5)), len);
        op->off = align_down(pick(w, len - op->len + 1), cs);
        if (pick(w, 8) == 0)
            op->off = len - op->len;
    }
    op->off += w->hot;
}

/* Operations that may overlap are kept together, so that they meet. */
static void pick_hot(struct world *w, bool overlapping)
{
    uint64_t cs = image_header(w->img)->cluster_size;

    w->hot = 0;
    w->hot_len = w->len;
    if (!overlapping || w->len <= 4 * cs)
        return;
    w->hot_len = (1 + pick(w, 3)) * MAX(cs, 4096ull);
    if (w->hot_len >= w->len)
        w->hot_len = w->len;
    w->hot = align_down(pick(w, w->len - w->hot_len + 1), cs);
}

static bool meets_earlier(struct world *w, const struct op *op)
{
    for (struct op *o = w->ops; o < w->ops + w->nr_ops; o++)
        if (o->len && ranges_overlap(o->off, o->len, op->off, op->len))
            return true;
    return false;
}

static void make_op(struct world *w, struct op *op, bool may_overlap)
{
    static const enum op_kind kinds[] = {OP_WRITE, OP_WRITE,   OP_WRITE, OP_WRITE, OP_ZERO,
                                         OP_ZERO,  OP_DISCARD, OP_READ,  OP_READ,  OP_FLUSH};

    *op = (struct op){
        .w = w, .kind = kinds[pick(w, ARRAY_SIZE(kinds))], .value = (uint8_t)(1 + pick(w, 255))};
    if (op->kind == OP_FLUSH)
        return;
    for (unsigned tries = 0; tries < 20; tries++) {
        pick_range(w, op);
        if (may_overlap || !meets_earlier(w, op))
            break;
        op->len = 0;
    }
    if (op->len == 0)
        op->kind = OP_FLUSH;
    op->overlaps = may_overlap;
    if (op->kind == OP_ZERO)
        op->flags = pick(w, 2) ? BLK_MAY_UNMAP : 0;
    if (op->kind != OP_FLUSH && pick(w, 6) == 0)
        op->flags |= BLK_FUA;
}

/* ---- what a round leaves ---- */

static void apply(struct world *w, const struct op *op)
{
    uint64_t start, end;

    if (op->kind == OP_WRITE)
        memset(w->model + op->off, op->value, op->len);
    else if (op->kind == OP_ZERO)
        memset(w->model + op->off, 0, op->len);
    else if (op->kind == OP_DISCARD) {
        discard_range(w, op, &start, &end);
        memset(w->model + start, 0, end - start);
    }
}

static bool may_be(struct world *w, uint64_t at, uint8_t got)
{
    bool was_covered = false;
    uint64_t start, end;

    for (struct op *op = w->ops; op < w->ops + w->nr_ops; op++) {
        if (at < op->off || at >= op->off + op->len || op->kind == OP_READ || op->kind == OP_FLUSH)
            continue;
        discard_range(w, op, &start, &end);
        if (op->kind == OP_DISCARD && (at < start || at >= end))
            continue;
        was_covered = true;
        if (got == (op->kind == OP_WRITE ? op->value : 0))
            return true;
    }
    return !was_covered && got == w->model[at];
}

SUSPENDS static void settle_overlaps(struct world *w)
{
    for (struct op *op = w->ops; op < w->ops + w->nr_ops; op++) {
        uint8_t *buf = malloc(op->len + 1);

        if (op->len)
            read_back(w, op->off, op->len, buf);
        for (uint64_t i = 0; i < op->len; i++)
            if (!may_be(w, op->off + i, buf[i]))
                test_fail(__FILE__, __LINE__, "%s: byte %llu is %02x, which nobody left",
                          w->cfg->name, (unsigned long long)(op->off + i), buf[i]);
        for (struct op *o = w->ops; o < w->ops + w->nr_ops; o++)
            o->overlaps = true;
        free(buf);
    }
    for (struct op *op = w->ops; op < w->ops + w->nr_ops; op++)
        if (op->len)
            read_back(w, op->off, op->len, w->model + op->off);
}

SUSPENDS static void play_round(struct world *w)
{
    bool overlapping = pick(w, 3) == 0;
    struct co_group group;

    co_group_init(&group);
    pick_hot(w, overlapping);
    w->nr_ops = 0;
    for (unsigned i = 0; i < ROUND_OPS; i++) {
        make_op(w, &w->ops[i], overlapping);
        w->nr_ops++;
    }
    for (unsigned i = 0; i < w->nr_ops; i++)
        CHECK_EQ(co_group_spawn(&group, run_op, &w->ops[i]), 0);
    CHECK_EQ(co_group_wait(&group), 0);
    if (overlapping)
        settle_overlaps(w);
    else
        for (unsigned i = 0; i < w->nr_ops; i++)
            apply(w, &w->ops[i]);
}

SUSPENDS static void verify_all(struct world *w)
{
    uint64_t piece = 1 * MIB;
    uint8_t *buf = malloc(piece);

    for (uint64_t off = 0; off < w->len; off += piece) {
        uint64_t n = MIN(piece, w->len - off);

        read_back(w, off, n, buf);
        check_bytes(w, buf, off, n);
    }
    free(buf);
}

/* ---- the image ---- */

/* Now and then there is no room for a while. */
SUSPENDS_UNCHECKED static int extend(void *ctx, uint64_t *len)
{
    struct world *w = ctx;

    if (*len) {
        timer_sleep(pick(w, 20 * NSEC_PER_MSEC));
        if (pick(w, 3) == 0)
            return -ENOSPC;
        w->dev_len = MAX(w->dev_len, align_up(*len, 64 * KIB));
        CHECK(w->dev_len <= w->dev->len);
    }
    *len = w->dev_len;
    return 0;
}

SUSPENDS static struct blk *device(struct world *w, bool create)
{
    struct blk_file_opts opts = {
        .writable = true, .create = create, .truncate = create, .lock = BLK_LOCK_NONE};
    struct err err = {0};
    struct blk *blk;

    if (w->cfg->chunk)
        return keep_new_as(
            w->dev,
            &(struct keep_opts){.fixed_len = true, .len = w->dev_len, .extend = extend, .ctx = w});
    if (!w->cfg->real_file)
        return keep_new(w->dev, w->cfg->fixed_len);
    if (blk_file_open(w->path, &opts, &blk, &err) < 0)
        test_fail(__FILE__, __LINE__, "%s", err_text(&err));
    return blk;
}

SUSPENDS static void open_image(struct world *w)
{
    struct image_opts opts = {.writable = true,
                              .journal_dir = w->journals,
                              .ack = w->cfg->real_file,
                              .cache_bytes = w->cfg->cache_bytes,
                              .grow = {.chunk = w->cfg->chunk, .on_full = IMAGE_FULL_WAIT},
                              .prealloc_step = 256 * KIB,
                              .discard = w->cfg->discard};
    struct err err = {0};

    if (image_open(device(w, false), &opts, &w->img, &err) < 0)
        test_fail(__FILE__, __LINE__, "%s: open: %s", w->cfg->name, err_text(&err));
    CHECK_EQ(image_len(w->img), w->len);
}

static void print_finding(void *ctx, const char *line)
{
    fprintf(stderr, "  %s\n", line);
}

SUSPENDS static void check_image(struct world *w, bool closed)
{
    struct image_check res;
    struct err err = {0};

    CHECK_EQ(image_flush(w->img), 0);
    CHECK_EQ(image_check(w->img, &res, closed ? print_finding : NULL, NULL, &err), 0);
    CHECK_EQ(res.corruptions, 0);
    CHECK_EQ(res.check_errors, 0);
    if (closed && !w->kills)
        CHECK_EQ(res.leaks, 0);
}

static void dump_model(struct world *w)
{
    FILE *f = fopen(w->raw, "w");

    CHECK(f && fwrite(w->model, 1, w->len, f) == w->len);
    fclose(f);
}

/* To what the image uses; what was behind that is another one's. */
SUSPENDS static void cut_device(struct world *w)
{
    uint8_t old[4096];

    CHECK_EQ(image_open(device(w, false), &(struct image_opts){0}, &w->img, NULL), 0);
    CHECK_EQ(image_end(w->img, &w->dev_len, NULL), 0);
    CHECK_EQ(image_close(w->img, NULL), 0);
    memset(old, 0xee, sizeof(old));
    for (uint64_t off = align_up(w->dev_len, 4096); off + 4096 <= w->dev->len; off += 4096)
        CHECK_EQ(blk_write(w->dev, off, old, sizeof(old)), 0);
}

/* Closes, checks, opens again. */
SUSPENDS static void reopen(struct world *w)
{
    struct image_stats stats;
    struct err err = {0};

    image_get_stats(w->img, &stats);
    w->claim_waits += stats.claim_waits;
    w->write_joins += stats.write_joins;
    w->grown.extensions += stats.extensions;
    w->grown.room_waits += stats.room_waits;
    if (image_close(w->img, &err) < 0)
        test_fail(__FILE__, __LINE__, "%s: close: %s", w->cfg->name, err_text(&err));
    if (w->cfg->real_file) {
        dump_model(w);
        int rc = test_sh_rc("qemu-img check -q -f qcow2 %s", w->path);
        CHECK(rc == 0 || (rc == 3 && w->kills));
        test_sh("qemu-img compare -q -f qcow2 -F raw %s %s", w->path, w->raw);
    }
    if (w->cfg->chunk)
        cut_device(w);
    open_image(w);
    check_image(w, true);
}

/* As if the process had been killed between two rounds: file and journal are put back to what they
 * were, and all is there again. */
SUSPENDS static void kill_between_rounds(struct world *w)
{
    if (!image_is_recorded(w->img))
        return;
    test_sh("cp --sparse=always %s %s.killed && cp -r %s %s.killed", w->path, w->path, w->journals,
            w->journals);
    CHECK_EQ(image_close(w->img, NULL), 0);
    test_sh("cp %s.killed %s && rm -r %s && mv %s.killed %s", w->path, w->path, w->journals,
            w->journals, w->journals);
    w->kills++;
    open_image(w);
    CHECK_STR(image_ack_note(w->img), "");
    verify_all(w);
    check_image(w, false);
}

SUSPENDS static void resize(struct world *w)
{
    uint64_t cs = image_header(w->img)->cluster_size;
    uint64_t len = pick(w, 2) ? 512 * (1 + pick(w, w->max_len / 512)) : w->max_len;
    struct err err = {0};

    if (pick(w, 3) == 0)
        len = MIN(align_up(len, cs), w->max_len);
    int rc = image_resize(w->img, len, below_of(w), &err);
    while (rc == -ENOSPC && w->cfg->chunk) {
        timer_sleep(2 * NSEC_PER_SEC);
        rc = image_resize(w->img, len, below_of(w), &err);
    }
    if (rc < 0)
        test_fail(__FILE__, __LINE__, "%s: resize: %s", w->cfg->name, err_text(&err));
    if (len > w->len)
        memset(w->model + w->len, 0, len - w->len);
    w->len = len;
    CHECK_EQ(image_len(w->img), len);
}

SUSPENDS static void fill_below(struct world *w)
{
    w->layers = (struct image_below){below_read, pick(w, 2) ? below_is_zero : NULL, w};
    w->below = malloc(w->cfg->below_len + 1);
    for (uint64_t i = 0; i < w->cfg->below_len; i++)
        w->below[i] = (uint8_t)(0x80 | (i >> 9) * 7);
    memcpy(w->model, w->below, MIN(w->cfg->below_len, w->len));
    if (!w->cfg->real_file)
        return;
    FILE *f = fopen(w->below_path, "w");
    CHECK(f && fwrite(w->below, 1, w->cfg->below_len, f) == w->cfg->below_len);
    fclose(f);
}

/* A volume comes with somebody's old data in it. */
SUSPENDS static void make_device(struct world *w)
{
    uint64_t len = w->max_len * 2 + 4 * MIB + 64 * w->cfg->create.cluster_size;
    uint8_t *old = malloc(MIB);

    if (w->cfg->real_file) {
        free(old);
        return;
    }
    CHECK_EQ(blk_mem_new(w->cfg->fixed_len ? len : 0, w->cfg->align, &w->dev), 0);
    memset(old, 0xdd, MIB);
    for (uint64_t off = 0; w->cfg->fixed_len && off + MIB <= len; off += MIB)
        CHECK_EQ(blk_write(w->dev, off, old, MIB), 0);
    free(old);
}

SUSPENDS static void setup(struct world *w)
{
    struct image_create_opts create = w->cfg->create;
    struct err err = {0};

    snprintf(w->path, sizeof(w->path), "%s/img.qcow2", test_dir());
    snprintf(w->raw, sizeof(w->raw), "%s/model.raw", test_dir());
    snprintf(w->journals, sizeof(w->journals), "%s/journal", test_dir());
    snprintf(w->below_path, sizeof(w->below_path), "%s/below.raw", test_dir());
    w->len = create.virtual_len;
    w->max_len = align_down(w->len + w->len / 2, 512);
    w->model = calloc(w->max_len, 1);
    fill_below(w);
    make_device(w);
    if (w->cfg->below_len) {
        create.backing_name = w->below_path;
        create.backing_format = "raw";
    }
    w->dev_len = w->cfg->chunk;
    struct blk *blk = device(w, true);
    int rc;
    while ((rc = image_create(blk, &create, &err)) == -ENOSPC && w->cfg->chunk)
        ;
    if (rc < 0)
        test_fail(__FILE__, __LINE__, "%s: create: %s", w->cfg->name, err_text(&err));
    blk_close(blk);
    open_image(w);
    /* a discard that would need a table, and there is no room for it, is left out */
    struct op first = {.w = w, .kind = OP_WRITE, .len = 512, .value = 1};
    if (w->cfg->chunk) {
        CHECK_EQ(run_op(&first), 0);
        memset(w->model, 1, 512);
    }
}

SUSPENDS static int play(void *arg)
{
    const struct config *cfg = arg;
    const char *times = getenv("VARVE_MODEL_ROUNDS");
    struct world w = {.cfg = cfg, .rng = test_seed() + cfg->create.cluster_size + cfg->below_len};
    unsigned rounds = cfg->rounds * (times ? (unsigned)atoi(times) : 1);

    setup(&w);
    for (unsigned i = 0; i < rounds; i++) {
        play_round(&w);
        if (i % 64 == 63)
            check_image(&w, false);
        if (i % 100 == 99)
            verify_all(&w);
        if (i % (cfg->chunk ? 12 : 90) == 11)
            reopen(&w);
        if (i % 75 == 74)
            resize(&w);
        if (i % 20 == 19)
            kill_between_rounds(&w);
    }
    verify_all(&w);
    reopen(&w);
    verify_all(&w);
    CHECK_EQ(image_close(w.img, NULL), 0);
    if (w.dev)
        blk_close(w.dev);
    if (cfg->chunk)
        printf("  %-16s %llu extensions, %llu waits for room\n", cfg->name,
               (unsigned long long)w.grown.extensions, (unsigned long long)w.grown.room_waits);
    CHECK(!cfg->chunk || (w.grown.extensions > 0 && w.grown.room_waits > 0));
    printf("  %-16s %llu operations, %llu waits for claims, %llu writes joined others, %u kills\n",
           cfg->name, (unsigned long long)w.nr_done, (unsigned long long)w.claim_waits,
           (unsigned long long)w.write_joins, w.kills);
    free(w.model);
    free(w.below);
    return 0;
}

static void play_sim(const struct config *cfg)
{
    struct sim_opts opts = {.seed = test_seed()};

    CHECK_EQ(sim_run(&opts, play, (void *)(uintptr_t)cfg), 0);
}

/* ---- configurations ---- */

TEST(random_operations_on_memory)
{
    static const struct config configs[] = {
        {"512",
         {.virtual_len = 640 * KIB + 512, .cluster_size = 512},
         64 * KIB,
         0,
         1,
         .rounds = 400},
        {"4k",
         {.virtual_len = 3 * MIB + 1536, .cluster_size = 4096},
         64 * KIB,
         0,
         512,
         .rounds = 400},
        {"64k", {.virtual_len = 8 * MIB}, 0, 0, 4096, .rounds = 400},
        {"64k over", {.virtual_len = 8 * MIB - 512}, 0, 5 * MIB + 512, 1, .rounds = 400},
        {"64k over long", {.virtual_len = 6 * MIB - 512}, 64 * KIB, 16 * MIB, 1, .rounds = 400},
        {"64k keep",
         {.virtual_len = 8 * MIB},
         0,
         0,
         1,
         .discard = IMAGE_DISCARD_KEEP,
         .rounds = 400},
        {"2M", {.virtual_len = 40 * MIB, .cluster_size = 2 * MIB}, 0, 20 * MIB, 512, .rounds = 100},
        {"ext 16k",
         {.virtual_len = 4 * MIB + 512, .cluster_size = 16 * KIB, .extended_l2 = true},
         64 * KIB,
         3 * MIB,
         512,
         .rounds = 400},
        {"ext 128k",
         {.virtual_len = 12 * MIB, .cluster_size = 128 * KIB, .extended_l2 = true},
         0,
         9 * MIB,
         512,
         .rounds = 400},
        {"ext 128k keep",
         {.virtual_len = 12 * MIB, .cluster_size = 128 * KIB, .extended_l2 = true},
         0,
         9 * MIB,
         4096,
         .discard = IMAGE_DISCARD_KEEP,
         .rounds = 300},
        {"ext prealloc",
         {.virtual_len = 12 * MIB,
          .cluster_size = 128 * KIB,
          .extended_l2 = true,
          .prealloc = PREALLOC_METADATA},
         0,
         9 * MIB,
         512,
         .rounds = 300},
        {"v2", {.virtual_len = 8 * MIB, .version = 2}, 0, 0, 1, .rounds = 200},
        {"v2 over", {.virtual_len = 8 * MIB, .version = 2}, 0, 6 * MIB, 1, .rounds = 200},
        {"volume", {.virtual_len = 8 * MIB}, 0, 0, 512, .fixed_len = true, .rounds = 300},
        {"volume over",
         {.virtual_len = 8 * MIB},
         0,
         8 * MIB,
         512,
         .fixed_len = true,
         .rounds = 300},
        {"volume ext",
         {.virtual_len = 8 * MIB, .cluster_size = 64 * KIB, .extended_l2 = true},
         0,
         8 * MIB,
         4096,
         .fixed_len = true,
         .rounds = 300},
        {"volume grows",
         {.virtual_len = 8 * MIB},
         0,
         8 * MIB,
         512,
         .fixed_len = true,
         .chunk = 256 * KIB,
         .rounds = 400},
        {"volume grows 4k",
         {.virtual_len = 4 * MIB, .cluster_size = 4096},
         64 * KIB,
         0,
         512,
         .fixed_len = true,
         .chunk = 128 * KIB,
         .rounds = 400},
        {"volume grows ext",
         {.virtual_len = 8 * MIB, .cluster_size = 64 * KIB, .extended_l2 = true},
         0,
         8 * MIB,
         4096,
         .fixed_len = true,
         .chunk = MIB,
         .discard = IMAGE_DISCARD_KEEP,
         .rounds = 300},
        {"volume grows 512",
         {.virtual_len = 1 * MIB, .cluster_size = 512, .refcount_bits = 64},
         64 * KIB,
         0,
         512,
         .fixed_len = true,
         .chunk = 64 * KIB,
         .rounds = 300},
        {"volume prealloc",
         {.virtual_len = 8 * MIB, .prealloc = PREALLOC_METADATA},
         0,
         0,
         512,
         .fixed_len = true,
         .rounds = 300},
        {"refcount 1",
         {.virtual_len = 2 * MIB, .cluster_size = 4096, .refcount_bits = 1},
         0,
         0,
         1,
         .rounds = 200},
        {"refcount 2",
         {.virtual_len = 2 * MIB, .cluster_size = 512, .refcount_bits = 2},
         0,
         0,
         1,
         .rounds = 200},
        {"refcount 8",
         {.virtual_len = 2 * MIB, .cluster_size = 4096, .refcount_bits = 8},
         0,
         0,
         1,
         .rounds = 200},
        {"refcount 64",
         {.virtual_len = 1 * MIB, .cluster_size = 512, .refcount_bits = 64},
         64 * KIB,
         0,
         1,
         .rounds = 300},
    };

    for (const struct config *c = configs; c < configs + ARRAY_SIZE(configs); c++)
        play_sim(c);
}

TEST(random_operations_on_files)
{
    static const struct config configs[] = {
        {"file 64k", {.virtual_len = 8 * MIB + 512}, 0, 0, 1, .real_file = true, .rounds = 300},
        {"file 4k over",
         {.virtual_len = 4 * MIB, .cluster_size = 4096},
         64 * KIB,
         3 * MIB,
         1,
         .real_file = true,
         .rounds = 300},
        {"file ext over",
         {.virtual_len = 8 * MIB, .cluster_size = 128 * KIB, .extended_l2 = true},
         0,
         10 * MIB,
         1,
         .real_file = true,
         .rounds = 300},
        {"file 512",
         {.virtual_len = 1 * MIB, .cluster_size = 512, .refcount_bits = 32},
         64 * KIB,
         0,
         1,
         .real_file = true,
         .rounds = 200},
        {"file v2",
         {.virtual_len = 4 * MIB, .version = 2},
         0,
         3 * MIB,
         1,
         .real_file = true,
         .rounds = 200},
    };

    test_need("qemu-img");
    for (const struct config *c = configs; c < configs + ARRAY_SIZE(configs); c++)
        reactor_run(play, (void *)(uintptr_t)c);
}
