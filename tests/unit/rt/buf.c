/* Buffers: classes, reuse, zero detection; iterators against flat copies. */
#include "base/own.h"
#include "rt/buf.h"
#include "rt/sim.h"
#include "test.h"

TEST(buf_is_aligned_in_every_class)
{
    static const size_t lens[] = {1,     511,     4095,    4096,          4097,   65536,
                                  65537, 1 << 20, 2 << 20, (2 << 20) + 1, 5 << 20};

    for (unsigned round = 0; round < 2; round++) {
        void *bufs[ARRAY_SIZE(lens)];

        for (unsigned i = 0; i < ARRAY_SIZE(lens); i++) {
            bufs[i] = buf_get(lens[i]);
            CHECK(bufs[i] && (uintptr_t)bufs[i] % BUF_ALIGN == 0);
            memset(bufs[i], (int)i, lens[i]);
        }
        for (unsigned i = 0; i < ARRAY_SIZE(lens); i++) {
            CHECK_EQ(((unsigned char *)bufs[i])[lens[i] - 1], i);
            buf_put(bufs[i], lens[i]);
        }
    }
    buf_put(NULL, 4096);
    buf_pool_trim();
}

TEST(buf_drop_gives_back_at_the_end_of_the_scope)
{
    for (unsigned i = 0; i < 10000; i++) {
        _cleanup_(buf_drop) struct buf b = {buf_get(1 << 20), 1 << 20};

        CHECK(b.data);
    }
    buf_pool_trim();
}

TEST(buf_zeroes_are_zero)
{
    CHECK(buf_is_zero(buf_zeroes(), BUF_ZERO_LEN));
    CHECK(buf_zeroes() == buf_zeroes());
}

TEST(buf_is_zero_sees_any_byte)
{
    char data[400] = {0};

    for (size_t start = 0; start < 33; start++) {
        for (size_t len = 0; len + start < 300; len += 1 + len / 16) {
            CHECK(buf_is_zero(data + start, len));
            for (size_t at = 0; at < len; at++) {
                data[start + at] = (char)0x80;
                CHECK(!buf_is_zero(data + start, len));
                data[start + at] = 0;
            }
            /* Neighbours do not count. */
            data[start + len] = 1;
            if (start > 0)
                data[start - 1] = 1;
            CHECK(buf_is_zero(data + start, len));
            data[start + len] = 0;
            if (start > 0)
                data[start - 1] = 0;
        }
    }
}

enum { FLAT = 4096 };

/* Cuts mem into random pieces, empty ones among them. */
static unsigned cut(uint64_t *state, char *mem, struct iovec *iov, unsigned max)
{
    size_t at = 0;
    unsigned nr = 0;

    for (; nr < max - 1 && at < FLAT; nr++) {
        size_t n = rng_below(state, 5) == 0 ? 0 : rng_below(state, 600);

        n = MIN(n, FLAT - at);
        iov[nr] = (struct iovec){mem + at, n};
        at += n;
    }
    iov[nr] = (struct iovec){mem + at, FLAT - at};
    return nr + 1;
}

TEST(iov_iter_equals_a_flat_copy)
{
    static char mem[FLAT], model[FLAT], chunk[FLAT], back[FLAT];
    uint64_t state = test_seed();
    struct iovec iov[40];

    for (unsigned round = 0; round < 300; round++) {
        unsigned nr = cut(&state, mem, iov, ARRAY_SIZE(iov));
        struct iov_iter w, r;

        iov_iter_init(&w, iov, nr);
        iov_iter_init(&r, iov, nr);
        CHECK_EQ(w.left, FLAT);
        for (size_t at = 0; at < FLAT;) {
            size_t n = MIN(rng_below(&state, 900), FLAT - at);
            unsigned what = (unsigned)rng_below(&state, 3);

            for (size_t i = 0; i < n; i++)
                chunk[i] = (char)rng_next(&state);
            if (what == 0) {
                iov_iter_write(&w, chunk, n);
                memcpy(model + at, chunk, n);
            } else if (what == 1) {
                iov_iter_zero(&w, n);
                memset(model + at, 0, n);
                struct iov_iter z = r;
                CHECK(iov_iter_is_zero(&z, n));
                if (n > 0) {
                    mem[at + n - 1] = 1;
                    CHECK(!iov_iter_is_zero(&z, n));
                    mem[at + n - 1] = 0;
                }
            } else {
                iov_iter_advance(&w, n);
            }
            iov_iter_read(&r, back, n);
            CHECK(memcmp(back, model + at, n) == 0);
            at += n;
            CHECK_EQ(w.left, FLAT - at);
        }
        CHECK(memcmp(mem, model, FLAT) == 0);
    }
}

TEST(iov_iter_peek_covers_the_range)
{
    static char mem[FLAT];
    uint64_t state = test_seed();
    struct iovec iov[40], out[8];

    for (unsigned round = 0; round < 300; round++) {
        unsigned nr = cut(&state, mem, iov, ARRAY_SIZE(iov));
        struct iov_iter it;

        iov_iter_init(&it, iov, nr);
        for (size_t at = 0; at < FLAT;) {
            size_t want = 1 + rng_below(&state, 3000), got = 0, sum = 0;
            unsigned n = iov_iter_peek(&it, want, out, ARRAY_SIZE(out), &got);

            CHECK(n > 0 && got > 0 && got <= want);
            CHECK(got == MIN(want, FLAT - at) || n == ARRAY_SIZE(out));
            for (unsigned i = 0; i < n; i++) {
                CHECK(out[i].iov_base == mem + at + sum);
                sum += out[i].iov_len;
            }
            CHECK_EQ(sum, got);
            iov_iter_advance(&it, got);
            at += got;
        }
        size_t none = 1;
        CHECK_EQ(iov_iter_peek(&it, 100, out, 8, &none), 0);
        CHECK_EQ(none, 0);
    }
}

TEST(iov_iter_knows_its_alignment)
{
    char *mem = buf_get(16384);
    struct iovec iov[2] = {{mem, 4096}, {mem + 8192, 4096}};
    struct iov_iter it;

    iov_iter_init(&it, iov, 2);
    CHECK(iov_iter_is_aligned(&it, 8192, 4096));
    CHECK(iov_iter_is_aligned(&it, 4608, 512));
    CHECK(!iov_iter_is_aligned(&it, 4608, 4096));
    iov_iter_advance(&it, 512);
    CHECK(iov_iter_is_aligned(&it, 7680, 512));
    CHECK(!iov_iter_is_aligned(&it, 3584, 4096));
    buf_put(mem, 16384);
    IOV_ITER_BUF(one, vec, mem, 100);
    CHECK_EQ(one.left, 100);
    buf_pool_trim();
}
