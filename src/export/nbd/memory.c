/* Payload memory of an NBD server: see memory.h. Counted by what the buffer pool really takes. */
#include <errno.h>
#include "base/bits.h"
#include "base/check.h"
#include "export/nbd/memory.h"
#include "rt/buf.h"
#include "rt/reactor.h"

#define SLICE_MIN ((size_t)64 << 10)
#define SLICE_MAX ((size_t)256 << 10)

/* What a buffer of so many bytes takes from the pool. */
static size_t held_len(size_t want)
{
    size_t len = BUF_ALIGN;

    if (want > NBD_PIECE_LEN)
        return align_up(want, BUF_ALIGN);
    while (len < want)
        len <<= 1;
    return len;
}

void nbd_memory_init(struct nbd_memory *m, uint64_t whole, unsigned max_shares)
{
    size_t slice = SLICE_MAX;

    while (slice > SLICE_MIN && slice * max_shares > whole / 4)
        slice >>= 1;
    /* a bound too small for one slice a connection is raised to that */
    whole = MAX(whole, (uint64_t)slice * max_shares);
    *m = (struct nbd_memory){.whole = whole, .slice_len = slice};
    m->shared_len = whole - (uint64_t)slice * max_shares;
    atomic_init(&m->shared_left, m->shared_len);
    pthread_mutex_init(&m->lock, NULL);
    list_init(&m->waiting);
}

void nbd_memory_fini(struct nbd_memory *m)
{
    pthread_mutex_destroy(&m->lock);
}

void nbd_share_init(struct nbd_share *s, struct nbd_memory *m)
{
    *s = (struct nbd_share){.memory = m, .slice_left = m->slice_len};
    atomic_fetch_add(&m->nr_shares, 1);
}

void nbd_share_fini(struct nbd_share *s)
{
    struct nbd_memory *m = s->memory;

    CHECK_THAT(s->slice_left == m->slice_len && s->shared_used == 0);
    atomic_fetch_sub(&m->nr_shares, 1);
}

/* ---- taking ---- */

static bool take_shared(struct nbd_share *s, size_t len, struct nbd_grant *ret)
{
    struct nbd_memory *m = s->memory;
    uint64_t limit = atomic_load(&m->nr_shares) > 1 ? m->shared_len / 2 : m->shared_len;
    unsigned long left = atomic_load(&m->shared_left);

    if (s->shared_used + len > limit)
        return false;
    do {
        if (len > left)
            return false;
    } while (!atomic_compare_exchange_weak(&m->shared_left, &left, left - len));
    s->shared_used += len;
    *ret = (struct nbd_grant){.len = len, .shared = true};
    return true;
}

static bool take_slice(struct nbd_share *s, size_t len, struct nbd_grant *ret)
{
    len = MIN(len, s->memory->slice_len);
    if (len > s->slice_left)
        return false;
    s->slice_left -= len;
    *ret = (struct nbd_grant){.len = len};
    return true;
}

static bool try_take(struct nbd_share *s, size_t len, struct nbd_grant *ret)
{
    return take_shared(s, len, ret) ||
           (len > NBD_PIECE_LEN && take_shared(s, NBD_PIECE_LEN, ret)) || take_slice(s, len, ret);
}

/* ---- waiting ---- */

/* One that waits for the shared part; in the frame of its receiver. */
struct waiter {
    struct list link; /* under lock */
    struct co *co;
    bool woken; /* under lock */
};

static void wake_all(struct nbd_memory *m)
{
    struct list *node;

    pthread_mutex_lock(&m->lock);
    while ((node = list_pop_front(&m->waiting))) {
        struct waiter *w = list_entry(node, struct waiter, link);
        struct co *co = w->co; /* w may be gone as soon as the lock is */

        w->woken = true;
        reactor_wake(co);
    }
    pthread_mutex_unlock(&m->lock);
}

/* In or out of the list; true if it was woken. */
static bool set_waiting(struct nbd_memory *m, struct waiter *w, bool on)
{
    pthread_mutex_lock(&m->lock);
    bool woken = w->woken;
    if (on)
        list_push_back(&m->waiting, &w->link);
    else if (!woken)
        list_remove(&w->link);
    pthread_mutex_unlock(&m->lock);
    return woken;
}

static bool was_woken(struct nbd_memory *m, const struct waiter *w)
{
    pthread_mutex_lock(&m->lock);
    bool woken = w->woken;
    pthread_mutex_unlock(&m->lock);
    return woken;
}

/* Tries once more after it is known to be waiting: what is given back from then on wakes it. */
SUSPENDS
static void wait_and_take(struct nbd_share *s, size_t len, struct nbd_grant *ret)
{
    struct nbd_memory *m = s->memory;
    bool taken = false;

    atomic_fetch_add(&m->nr_waiting, 1);
    while (!taken) {
        struct waiter w = {.co = co_self()};

        set_waiting(m, &w, true);
        while (!(taken = try_take(s, len, ret)) && !was_woken(m, &w))
            reactor_sleep();
        set_waiting(m, &w, false);
    }
    atomic_fetch_sub(&m->nr_waiting, 1);
}

static void count_used(struct nbd_memory *m, size_t len)
{
    unsigned long used = atomic_fetch_add_explicit(&m->used, len, memory_order_relaxed) + len;
    unsigned long max = atomic_load_explicit(&m->used_max, memory_order_relaxed);

    while (used > max && !atomic_compare_exchange_weak(&m->used_max, &max, used))
        ;
}

static void give_bytes(struct nbd_share *s, const struct nbd_grant *g)
{
    struct nbd_memory *m = s->memory;

    if (g->shared) {
        s->shared_used -= g->len;
        atomic_fetch_add(&m->shared_left, g->len);
    } else {
        s->slice_left += g->len;
    }
    atomic_fetch_sub_explicit(&m->used, g->len, memory_order_relaxed);
    if (atomic_load(&m->nr_waiting) > 0)
        wake_all(m);
}

int nbd_share_take(struct nbd_share *s, size_t want, struct nbd_grant *ret)
{
    struct nbd_grant g;

    if (!try_take(s, held_len(want), &g))
        wait_and_take(s, held_len(want), &g);
    count_used(s->memory, g.len);
    g.data = buf_get(g.len);
    if (!g.data) {
        give_bytes(s, &g);
        return -ENOMEM;
    }
    *ret = g;
    return 0;
}

void nbd_share_give(struct nbd_share *s, struct nbd_grant *g)
{
    if (!g->data)
        return;
    buf_put(g->data, g->len);
    give_bytes(s, g);
    *g = (struct nbd_grant){0};
}
