#include "engine.h"
#include "../../model/keep.h"
#include "base/bits.h"

void engine_start(struct engine *e, const struct image_create_opts *create, uint64_t fixed_len)
{
    struct err err = {0};
    uint8_t *old = malloc(MIB);

    CHECK_EQ(blk_mem_new(fixed_len, 512, &e->mem), 0);
    memset(old, 0xdd, MIB);
    for (uint64_t off = 0; off < fixed_len; off += MIB)
        CHECK_EQ(blk_write(e->mem, off, old, MIN((uint64_t)MIB, fixed_len - off)), 0);
    free(old);
    e->fixed_len = fixed_len;
    CHECK_EQ(blk_fault_new(keep_new(e->mem, fixed_len), &e->fault), 0);
    if (image_create(e->fault, create, &err) < 0)
        test_fail(__FILE__, __LINE__, "create: %s", err_text(&err));
    e->opts.writable = true;
    if (!e->opts.prealloc_step)
        e->opts.prealloc_step = UINT64_MAX;
    engine_open(e);
}

void engine_open(struct engine *e)
{
    struct err err = {0};

    if (image_open(keep_new(e->fault, e->fixed_len), &e->opts, &e->img, &err) < 0)
        test_fail(__FILE__, __LINE__, "open: %s", err_text(&err));
}

void engine_close(struct engine *e)
{
    struct err err = {0};

    if (image_close(e->img, &err) < 0)
        test_fail(__FILE__, __LINE__, "close: %s", err_text(&err));
    e->img = NULL;
}

void engine_reopen(struct engine *e)
{
    engine_close(e);
    engine_open(e);
}

void engine_kill(struct engine *e)
{
    e->img->failed = -EIO; /* nothing is written any more */
    CHECK(image_close(e->img, NULL) < 0);
    engine_open(e);
}

static void print_finding(void *ctx, const char *line)
{
    fprintf(stderr, "  %s\n", line);
}

uint64_t engine_leaks(struct engine *e)
{
    struct image_check res;

    CHECK_EQ(image_check(e->img, &res, NULL, NULL, NULL), 0);
    if (res.corruptions || res.check_errors) {
        image_check(e->img, &res, print_finding, NULL, NULL);
        test_fail(__FILE__, __LINE__, "%llu corruptions", (unsigned long long)res.corruptions);
    }
    return res.leaks;
}

void engine_end(struct engine *e)
{
    engine_close(e);
    e->opts.writable = false;
    engine_open(e);
    CHECK_EQ(engine_leaks(e), 0);
    engine_close(e);
    blk_close(e->fault);
    blk_close(e->mem);
}

int engine_write(struct engine *e, uint64_t off, uint64_t len, uint8_t value, unsigned flags,
                 const struct image_below *below)
{
    uint8_t *buf = malloc(len);

    memset(buf, value, len);
    IOV_ITER_BUF(it, vec, buf, len);
    int rc = image_write(e->img, off, len, &it, flags, below);
    free(buf);
    return rc;
}

int engine_read(struct engine *e, uint64_t off, uint64_t len)
{
    uint8_t *buf = malloc(len);
    IOV_ITER_BUF(it, vec, buf, len);
    int rc = image_read(e->img, off, len, &it, NULL);

    free(buf);
    return rc;
}

void engine_expect(struct engine *e, uint64_t off, uint64_t len, uint8_t value,
                   const struct image_below *below)
{
    uint8_t *buf = malloc(len);
    IOV_ITER_BUF(it, vec, buf, len);

    CHECK_EQ(image_read(e->img, off, len, &it, below), 0);
    for (uint64_t i = 0; i < len; i++)
        if (buf[i] != value)
            test_fail(__FILE__, __LINE__, "byte %llu is %02x, not %02x",
                      (unsigned long long)(off + i), buf[i], value);
    free(buf);
}

struct image_stats engine_stats(const struct engine *e)
{
    struct image_stats stats;

    image_get_stats(e->img, &stats);
    return stats;
}

SUSPENDS static int below_read(void *ctx, uint64_t off, uint64_t len, struct iov_iter *iov)
{
    struct engine_below *b = ctx;
    uint8_t bytes[512];

    b->reads++;
    b->read_bytes += len;
    memset(bytes, 0xbb, sizeof(bytes));
    while (len > 0) {
        uint64_t n = MIN(len, (uint64_t)sizeof(bytes));

        iov_iter_write(iov, bytes, n);
        len -= n;
    }
    return 0;
}

void engine_below_init(struct engine_below *b)
{
    *b = (struct engine_below){.below = {.read = below_read, .ctx = b}};
}
