/* See devices.h. */
#include <fcntl.h>
#include <unistd.h>
#include "base/bits.h"
#include "devices.h"
#include "rt/offload.h"
#include "rt/reactor.h"
#include "rt/sim.h"

#define ARRAY_LEN (3 * MIB)
#define MAX_REQ   (300 * KIB)

static char loop_path[64], loop_file[200];

struct blk *new_file(const char *dir, const char *name, uint64_t len, bool direct)
{
    struct blk_file_opts opts = {
        .writable = true, .direct = direct, .create = true, .lock = BLK_LOCK_WRITE};
    char path[300];
    struct blk *blk;
    struct err err = {0};

    snprintf(path, sizeof(path), "%s/%s", dir ? dir : test_dir(), name);
    if (blk_file_open(path, &opts, &blk, &err) < 0)
        test_fail(__FILE__, __LINE__, "%s", err_text(&err));
    CHECK_EQ(blk->len, 0);
    CHECK_EQ(blk_resize(blk, len), 0);
    return blk;
}

struct blk *new_loop(uint64_t len, unsigned sector)
{
    struct blk_file_opts opts = {.writable = true, .direct = true, .lock = BLK_LOCK_WRITE};
    struct blk *blk;
    struct err err = {0};

    snprintf(loop_file, sizeof(loop_file), "%s/loop.img", test_dir());
    test_sh("truncate -s %llu %s", (unsigned long long)len, loop_file);
    if (test_sh_rc("losetup -f --show -b %u %s >%s.dev 2>/dev/null", sector, loop_file,
                   loop_file) != 0)
        return NULL;
    char name[220];
    snprintf(name, sizeof(name), "%s.dev", loop_file);
    FILE *file = fopen(name, "r");
    CHECK(file && fscanf(file, "%63s", loop_path) == 1);
    fclose(file);
    if (blk_file_open(loop_path, &opts, &blk, &err) < 0)
        test_fail(__FILE__, __LINE__, "%s", err_text(&err));
    return blk;
}

void drop_loop(void)
{
    test_sh("losetup -d %s", loop_path);
    unlink(loop_file);
}

/* ---- one at a time, against an array ---- */

struct model {
    struct blk *blk;
    uint8_t *want; /* bytes behind len are zero */
    uint64_t len, rng;
    void *buf; /* MAX_REQ + BUF_ALIGN, for requests of any memory alignment */
};

static uint64_t pick(struct model *m, uint64_t n)
{
    return rng_below(&m->rng, n);
}

/* Offsets and lengths that are aligned as often as not. */
static void pick_range(struct model *m, uint64_t limit, uint64_t *ret_off, uint64_t *ret_len)
{
    static const unsigned steps[] = {1, 1, 512, 4096};
    uint64_t step = steps[pick(m, 4)];

    *ret_len = MIN(limit, align_up(1 + pick(m, pick(m, 4) ? 9000 : MAX_REQ - 4096), step));
    *ret_off = align_down(pick(m, limit - *ret_len + 1), step);
}

/* A vector of up to five pieces over memory of any alignment. */
static unsigned pick_vector(struct model *m, uint64_t len, struct iovec *iov)
{
    char *at = (char *)m->buf + (pick(m, 2) ? 0 : pick(m, BUF_ALIGN));
    uint64_t step = pick(m, 2) ? 1 : 512;
    unsigned nr = 0;

    while (len > 0) {
        uint64_t n = nr == 4 ? len : MIN(len, align_up(1 + pick(m, len), step));

        iov[nr++] = (struct iovec){at, n};
        at += n;
        len -= n;
    }
    return nr;
}

static void compare(struct model *m, uint64_t off, uint64_t len, const struct iovec *iov)
{
    for (uint64_t done = 0; done < len; done += iov->iov_len, iov++)
        if (memcmp(iov->iov_base, m->want + off + done, iov->iov_len) != 0)
            test_fail(__FILE__, __LINE__, "wrong data in %llu+%llu", (unsigned long long)off,
                      (unsigned long long)len);
}

SUSPENDS static void do_read(struct model *m)
{
    uint64_t off, len;
    struct iovec iov[5];
    struct iov_iter it;

    pick_range(m, ARRAY_LEN, &off, &len); /* also behind the end */
    iov_iter_init(&it, iov, pick_vector(m, len, iov));
    memset(m->buf, 0x5a, MAX_REQ + BUF_ALIGN);
    CHECK_EQ(blk_readv(m->blk, off, len, &it), 0);
    CHECK_EQ(it.left, 0);
    compare(m, off, len, iov);
}

SUSPENDS static void do_write(struct model *m, uint64_t limit)
{
    uint64_t off, len;
    struct iovec iov[5];
    struct iov_iter it;

    pick_range(m, limit, &off, &len);
    unsigned nr = pick_vector(m, len, iov);
    iov_iter_init(&it, iov, nr);
    for (uint64_t i = 0, done = 0; i < nr; done += iov[i++].iov_len) {
        uint64_t x = rng_next(&m->rng);

        for (size_t j = 0; j < iov[i].iov_len; j++)
            ((uint8_t *)iov[i].iov_base)[j] = (uint8_t)(x >> (j % 7 * 8)) ^ (uint8_t)(j >> 8);
        memcpy(m->want + off + done, iov[i].iov_base, iov[i].iov_len);
    }
    CHECK_EQ(blk_writev(m->blk, off, len, &it, pick(m, 8) ? 0 : BLK_FUA), 0);
    m->len = MAX(m->len, off + len);
    CHECK_EQ(m->blk->len, m->len);
}

SUSPENDS static void do_zero(struct model *m, uint64_t limit)
{
    uint64_t off, len;

    pick_range(m, limit, &off, &len);
    CHECK_EQ(blk_zero(m->blk, off, len, pick(m, 2) ? BLK_MAY_UNMAP : pick(m, 2) ? BLK_FUA : 0), 0);
    memset(m->want + off, 0, len);
    m->len = MAX(m->len, off + len);
    CHECK_EQ(m->blk->len, m->len);
}

/* Discarded bytes are old or zero; then they are made zero. */
SUSPENDS static void do_discard(struct model *m)
{
    uint64_t off, len;

    pick_range(m, ARRAY_LEN, &off, &len);
    CHECK_EQ(blk_discard(m->blk, off, len), 0);
    CHECK_EQ(blk_read(m->blk, off, m->buf, len), 0);
    for (uint64_t i = 0; i < len; i++) {
        uint8_t got = ((uint8_t *)m->buf)[i];

        CHECK(got == 0 || got == m->want[off + i]);
        m->want[off + i] = got;
    }
}

SUSPENDS static void do_resize(struct model *m)
{
    uint64_t len = pick(m, ARRAY_LEN + 1);

    if (pick(m, 2))
        len = align_up(len, 4096);
    CHECK_EQ(blk_resize(m->blk, len), 0);
    if (len < m->len)
        memset(m->want + len, 0, m->len - len);
    m->len = len;
    CHECK_EQ(m->blk->len, len);
}

SUSPENDS static void do_preallocate(struct model *m)
{
    uint64_t off, len;

    pick_range(m, ARRAY_LEN, &off, &len);
    int rc = blk_preallocate(m->blk, off, len);
    CHECK(rc == 0 || rc == -ENOTSUP);
    if (rc == 0)
        m->len = MAX(m->len, off + len);
    CHECK_EQ(m->blk->len, m->len);
}

SUSPENDS static void check_status(struct model *m)
{
    for (uint64_t off = 0; off < ARRAY_LEN;) {
        uint64_t len = 0;
        bool data;

        CHECK_EQ(blk_status(m->blk, off, ARRAY_LEN - off, &data, &len), 0);
        CHECK(len > 0 && off + len <= ARRAY_LEN);
        CHECK(data || buf_is_zero(m->want + off, len));
        off += len;
    }
}

/* An own descriptor sees the length and content that the blk claims. */
SUSPENDS static void check_file(struct model *m)
{
    int fd = blk_file_fd(m->blk);

    if (fd < 0 || m->blk->fixed_len)
        return;
    CHECK_EQ(lseek(fd, 0, SEEK_END), m->len);
}

void check_against_array(struct blk *blk, unsigned nr_ops)
{
    struct model m = {.blk = blk, .len = blk->len, .rng = test_seed()};

    m.want = calloc(1, ARRAY_LEN);
    m.buf = aligned_alloc(BUF_ALIGN, MAX_REQ + BUF_ALIGN);
    CHECK(m.want && m.buf && blk->len <= ARRAY_LEN);
    for (unsigned i = 0; i < nr_ops; i++) {
        uint64_t limit = blk->fixed_len ? blk->len : ARRAY_LEN, what = pick(&m, 20);

        if (what < 7)
            do_read(&m);
        else if (what < 14)
            do_write(&m, limit);
        else if (what < 16)
            do_zero(&m, limit);
        else if (what == 16)
            do_discard(&m);
        else if (what == 17)
            CHECK_EQ(blk_flush(blk), 0);
        else if (what == 18 && !blk->fixed_len)
            do_resize(&m);
        else if (!blk->fixed_len)
            do_preallocate(&m);
        if (i % 64 == 0)
            check_status(&m);
        check_file(&m);
    }
    free(m.want);
    free(m.buf);
}

/* ---- neighbours ---- */

#define NR_WRITERS 24u
#define STRIPE     100u
#define AREA       (64 * KIB)

struct writer {
    struct blk *blk;
    uint8_t *want; /* of the whole area; each writer owns every NR_WRITERS-th stripe */
    unsigned nr;
    uint64_t rng;
};

/* Its own stripes, some by zeroing them. */
SUSPENDS static int write_stripes(void *arg)
{
    struct writer *w = arg;

    for (unsigned round = 0; round < 40; round++) {
        uint64_t nr_stripes = AREA / STRIPE / NR_WRITERS;
        uint64_t off = (rng_below(&w->rng, nr_stripes) * NR_WRITERS + w->nr) * STRIPE;
        uint8_t data[STRIPE];

        memset(data, round % 5 ? (int)rng_next(&w->rng) : 0, STRIPE);
        memcpy(w->want + off, data, STRIPE);
        int rc = round % 5 ? blk_write(w->blk, off, data, STRIPE)
                           : blk_zero(w->blk, off, STRIPE, round % 10 ? BLK_MAY_UNMAP : 0);
        if (rc < 0)
            return rc;
        if (rng_below(&w->rng, 4) == 0)
            reactor_yield();
    }
    return 0;
}

/* Whole blocks of the second area, */
SUSPENDS static int write_blocks(void *arg)
{
    struct writer *w = arg;
    void *block = buf_get(4096);
    int rc = 0;

    for (unsigned round = 0; round < 100 && rc == 0; round++) {
        uint64_t off = AREA + rng_below(&w->rng, 8) * 4096;
        int fill = (int)(rng_next(&w->rng) & 0xff);

        memset(block, fill, 4096);
        memset(w->want + off, fill, 4096);
        rc = blk_write(w->blk, off, block, 4096);
    }
    buf_put(block, 4096);
    return rc;
}

/* and at the same time their first bytes: the rest must stay as the whole block had it. */
SUSPENDS static int write_block_heads(void *arg)
{
    struct writer *w = arg;
    uint8_t data[STRIPE] = {0};
    int rc = 0;

    for (unsigned round = 0; round < 100 && rc == 0; round++)
        rc = blk_write(w->blk, AREA + rng_below(&w->rng, 8) * 4096, data, STRIPE);
    return rc;
}

static bool is_block_head(uint64_t off)
{
    return off >= AREA && off < AREA + 8 * 4096 && off % 4096 < STRIPE;
}

void check_neighbours(struct blk *blk)
{
    struct writer w[NR_WRITERS];
    uint8_t *want = calloc(1, 16 * AREA), *got = malloc(16 * AREA);
    struct co_group group;

    CHECK(want && got);
    CHECK_EQ(blk_zero(blk, 0, MIN(blk->len, 16 * AREA), 0), 0);
    co_group_init(&group);
    for (unsigned i = 0; i < NR_WRITERS; i++) {
        w[i] = (struct writer){blk, want, i, test_seed() + i};
        CHECK_EQ(co_group_spawn(&group,
                                i == 0   ? write_blocks
                                : i == 1 ? write_block_heads
                                         : write_stripes,
                                &w[i]),
                 0);
    }
    CHECK_EQ(co_group_wait(&group), 0);
    CHECK_EQ(blk_read(blk, 0, got, 16 * AREA), 0);
    for (uint64_t i = 0; i < 16 * AREA; i++)
        if (got[i] != want[i] && !is_block_head(i))
            test_fail(__FILE__, __LINE__, "a write was lost at %llu (%02x, not %02x)",
                      (unsigned long long)i, got[i], want[i]);
    CHECK(list_empty(&blk->changes) && blk->nr_rmw == 0);
    free(want);
    free(got);
}
