/*
 * Pooled aligned buffers and iterators over iovecs: see buf.h.
 *
 * A thread's pool keeps at most POOL_LEN bytes; a free buffer holds the link to the next one of
 * its class in its first word. Under AddressSanitizer nothing is pooled, so that a use after
 * buf_put() is seen.
 */
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include "base/check.h"
#include "rt/buf.h"
#include "rt/internal.h"

#define CLASS_MIN_BITS 12u
#define CLASS_MAX_BITS 21u
#define CLASSES        (CLASS_MAX_BITS - CLASS_MIN_BITS + 1)
#ifdef HAVE_ASAN
#define POOL_LEN ((size_t)0)
#else
#define POOL_LEN ((size_t)8 << 20)
#endif

struct free_buf {
    struct free_buf *next;
};
static _Thread_local struct free_buf *pool[CLASSES];
static _Thread_local size_t pooled; /* bytes in all classes */

static unsigned class_of(size_t len)
{
    if (len <= (size_t)1 << CLASS_MIN_BITS)
        return 0;
    return 64 - (unsigned)__builtin_clzll(len - 1) - CLASS_MIN_BITS;
}

void *buf_get(size_t len)
{
    unsigned class = class_of(len);

    if (class >= CLASSES)
        return aligned_alloc(BUF_ALIGN, (len + BUF_ALIGN - 1) / BUF_ALIGN * BUF_ALIGN);
    size_t size = (size_t)1 << (class + CLASS_MIN_BITS);
    struct free_buf *buf = pool[class];
    if (!buf)
        return aligned_alloc(BUF_ALIGN, size);
    pool[class] = buf->next;
    pooled -= size;
    return buf;
}

void buf_put(void *buf, size_t len)
{
    unsigned class = class_of(len);
    struct free_buf *f = buf;

    if (!buf)
        return;
    if (class >= CLASSES || pooled + ((size_t)1 << (class + CLASS_MIN_BITS)) > POOL_LEN) {
        free(buf);
        return;
    }
    f->next = pool[class];
    pool[class] = f;
    pooled += (size_t)1 << (class + CLASS_MIN_BITS);
}

void buf_pool_trim(void)
{
    for (unsigned i = 0; i < CLASSES; i++) {
        while (pool[i]) {
            struct free_buf *f = pool[i];

            pool[i] = f->next;
            free(f);
        }
    }
    pooled = 0;
}

static const void *zeroes;

static void map_zeroes(void)
{
    void *map =
        mmap(NULL, BUF_ZERO_LEN, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    CHECK_THAT(map != MAP_FAILED);
    zeroes = map;
}

const void *buf_zeroes(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    pthread_once(&once, map_zeroes);
    return zeroes;
}

typedef uint64_t zero_vec __attribute__((vector_size(32), aligned(1), may_alias));

bool buf_is_zero(const void *buf, size_t len)
{
    const char *p = buf;
    uint64_t word = 0;

    /* Most data that is not zero shows it at once. */
    for (; len >= 128; p += 128, len -= 128) {
        const zero_vec *v = (const void *)p;
        zero_vec any = (v[0] | v[1]) | (v[2] | v[3]);

        if (any[0] | any[1] | any[2] | any[3])
            return false;
    }
    for (; len >= 8; p += 8, len -= 8) {
        memcpy(&word, p, 8);
        if (word)
            return false;
    }
    word = 0;
    memcpy(&word, p, len);
    return word == 0;
}

/* ---- iterators ---- */

void iov_iter_init(struct iov_iter *it, const struct iovec *iov, unsigned nr)
{
    size_t left = 0;

    for (unsigned i = 0; i < nr; i++)
        left += iov[i].iov_len;
    *it = (struct iov_iter){.iov = iov, .nr = nr, .left = left};
}

/* The next piece of at most len bytes in one element; moves past it. NULL never: len > 0. */
static char *next_piece(struct iov_iter *it, size_t len, size_t *ret_len)
{
    DEBUG_CHECK(len > 0 && len <= it->left);
    while (it->skip == it->iov->iov_len) {
        it->iov++;
        it->nr--;
        it->skip = 0;
    }
    char *at = (char *)it->iov->iov_base + it->skip;
    *ret_len = MIN(len, it->iov->iov_len - it->skip);
    it->skip += *ret_len;
    it->left -= *ret_len;
    return at;
}

void iov_iter_advance(struct iov_iter *it, size_t len)
{
    for (size_t n; len > 0; len -= n)
        next_piece(it, len, &n);
}

void iov_iter_write(struct iov_iter *it, const void *src, size_t len)
{
    const char *from = src;

    for (size_t n; len > 0; len -= n, from += n) {
        char *to = next_piece(it, len, &n);

        memcpy(to, from, n);
    }
}

void iov_iter_read(struct iov_iter *it, void *dst, size_t len)
{
    char *to = dst;

    for (size_t n; len > 0; len -= n, to += n) {
        const char *from = next_piece(it, len, &n);

        memcpy(to, from, n);
    }
}

void iov_iter_zero(struct iov_iter *it, size_t len)
{
    for (size_t n; len > 0; len -= n) {
        char *to = next_piece(it, len, &n);

        memset(to, 0, n);
    }
}

unsigned iov_iter_peek(const struct iov_iter *it, size_t len, struct iovec *out, unsigned max,
                       size_t *ret_len)
{
    struct iov_iter at = *it;
    unsigned nr = 0;
    size_t total = 0;

    len = MIN(len, it->left);
    for (size_t n; len > 0 && nr < max; len -= n, nr++) {
        out[nr].iov_base = next_piece(&at, len, &n);
        out[nr].iov_len = n;
        total += n;
    }
    *ret_len = total;
    return nr;
}

bool iov_iter_is_aligned(const struct iov_iter *it, size_t len, size_t align)
{
    struct iov_iter at = *it;

    for (size_t n; len > 0; len -= n) {
        const char *p = next_piece(&at, len, &n);

        if (((uintptr_t)p | n) & (align - 1))
            return false;
    }
    return true;
}

bool iov_iter_is_zero(const struct iov_iter *it, size_t len)
{
    struct iov_iter at = *it;

    for (size_t n; len > 0; len -= n) {
        const char *p = next_piece(&at, len, &n);

        if (!buf_is_zero(p, n))
            return false;
    }
    return true;
}
