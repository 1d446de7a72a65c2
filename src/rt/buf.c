/*
 * Pooled aligned buffers and iterators over iovecs: see buf.h.
 *
 * A reactor's first buffers are cut from its arena, which is registered with its ring chunk by
 * chunk as it is used up: the kernel then need not look up and pin the pages of each request. They
 * stay in the pool until the reactor ends. Further ones are of the heap, and the pool keeps at most
 * POOL_LEN bytes of those. A free buffer holds the link to the next one of its class in its first
 * word.
 *
 * All arenas are in one region of addresses, so that a buffer tells by itself what it is. Under
 * AddressSanitizer nothing is pooled and there is no arena, so that a use after buf_put() is seen.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include "base/check.h"
#include "rt/buf.h"
#include "rt/internal.h"

#define CLASS_MIN_BITS 12u
#define CLASS_MAX_BITS 21u
#define CLASSES        (CLASS_MAX_BITS - CLASS_MIN_BITS + 1)
#ifdef HAVE_ASAN
#define POOL_LEN  ((size_t)0)
#define HAS_ARENA false
#else
#define HAS_ARENA true
#define POOL_LEN  ((size_t)8 << 20)
#endif

struct free_buf {
    struct free_buf *next;
};
static _Thread_local struct free_buf *fixed_pool[CLASSES]; /* of the arena */
static _Thread_local struct free_buf *heap_pool[CLASSES];
static _Thread_local size_t pooled; /* bytes in heap_pool */

/* ---- arenas ---- */

#define ARENA_LEN (ARENA_CHUNKS * ARENA_CHUNK_LEN)
#define ARENAS    16u

static _Atomic(char *) region; /* ARENAS of them; NULL: not yet, or there is no room for it */
static atomic_uint used_slots; /* a bit each */
static _Thread_local struct arena {
    char *base; /* NULL: none yet */
    unsigned slot;
    unsigned chunks;  /* registered */
    size_t next, end; /* what is not handed out yet of the last chunk */
    bool full;        /* no slot, or the kernel registers no more: the heap has to do */
} arena;

static void map_region(void)
{
    size_t len = ARENAS * ARENA_LEN + ARENA_CHUNK_LEN;
    char *map =
        mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    if (map != MAP_FAILED)
        region = (char *)(((uintptr_t)map + ARENA_CHUNK_LEN - 1) & ~(ARENA_CHUNK_LEN - 1));
}

static bool take_slot(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    unsigned used = atomic_load(&used_slots), slot;

    pthread_once(&once, map_region);
    if (!region)
        return false;
    do {
        slot = (unsigned)__builtin_ctz(~used);
        if (slot >= ARENAS)
            return false;
    } while (!atomic_compare_exchange_weak(&used_slots, &used, used | 1u << slot));
    arena = (struct arena){.base = region + slot * ARENA_LEN, .slot = slot};
    return true;
}

/* What was left of the chunk before is given up. */
static bool add_chunk(struct reactor *r)
{
    if ((!arena.base && !take_slot()) || arena.chunks == ARENA_CHUNKS)
        return false;
    char *chunk = arena.base + arena.chunks * ARENA_CHUNK_LEN;
    madvise(chunk, ARENA_CHUNK_LEN, MADV_HUGEPAGE);
    if (r->backend->fix_buffers(r, arena.chunks, chunk, ARENA_CHUNK_LEN) < 0)
        return false;
    arena.next = arena.chunks++ * ARENA_CHUNK_LEN;
    arena.end = arena.next + ARENA_CHUNK_LEN;
    return true;
}

static void *arena_get(size_t size)
{
    struct reactor *r = reactor_self();

    if (!HAS_ARENA || arena.full || !r || !r->backend->fix_buffers)
        return NULL;
    if (arena.end - arena.next < size && !add_chunk(r)) {
        arena.full = true;
        return NULL;
    }
    arena.next += size;
    return arena.base + arena.next - size;
}

void buf_arena_end(void)
{
    for (unsigned i = 0; i < CLASSES; i++)
        fixed_pool[i] = NULL;
    if (arena.base) {
        madvise(arena.base, ARENA_LEN, MADV_DONTNEED);
        atomic_fetch_and(&used_slots, ~(1u << arena.slot));
    }
    arena = (struct arena){0};
}

static inline bool in_region(const void *buf)
{
    char *base = atomic_load_explicit(&region, memory_order_relaxed);

    return base && (uintptr_t)buf - (uintptr_t)base < ARENAS * ARENA_LEN;
}

static inline bool in_arena(const void *buf)
{
    return arena.base && (uintptr_t)buf - (uintptr_t)arena.base < ARENA_LEN;
}

/* ---- the pool ---- */

static unsigned class_of(size_t len)
{
    if (len <= (size_t)1 << CLASS_MIN_BITS)
        return 0;
    return 64 - (unsigned)__builtin_clzll(len - 1) - CLASS_MIN_BITS;
}

static inline size_t class_len(unsigned class)
{
    return (size_t)1 << (class + CLASS_MIN_BITS);
}

static inline void *pop(struct free_buf **pool)
{
    struct free_buf *buf = *pool;

    if (buf)
        *pool = buf->next;
    return buf;
}

static inline void push(struct free_buf **pool, struct free_buf *buf)
{
    buf->next = *pool;
    *pool = buf;
}

void *buf_get_kept(size_t len)
{
    unsigned class = class_of(len);

    if (class >= CLASSES)
        return aligned_alloc(BUF_ALIGN, (len + BUF_ALIGN - 1) / BUF_ALIGN * BUF_ALIGN);
    void *buf = pop(&heap_pool[class]);
    if (!buf)
        return aligned_alloc(BUF_ALIGN, class_len(class));
    pooled -= class_len(class);
    return buf;
}

void *buf_get(size_t len)
{
    unsigned class = class_of(len);
    void *buf = NULL;

    if (class < CLASSES)
        buf = pop(&fixed_pool[class]);
    if (!buf && class < CLASSES)
        buf = arena_get(class_len(class));
    return buf ? buf : buf_get_kept(len);
}

void buf_put(void *buf, size_t len)
{
    unsigned class = class_of(len);

    if (!buf)
        return;
    if (in_region(buf)) {
        DEBUG_CHECK(in_arena(buf));
        if (in_arena(buf)) /* of another thread, which may have ended: lost until then */
            push(&fixed_pool[class], buf);
    } else if (class >= CLASSES || pooled + class_len(class) > POOL_LEN) {
        free(buf);
    } else {
        push(&heap_pool[class], buf);
        pooled += class_len(class);
    }
}

void buf_pool_trim(void)
{
    for (unsigned i = 0; i < CLASSES; i++) {
        for (void *buf; (buf = pop(&heap_pool[i]));)
            free(buf);
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
