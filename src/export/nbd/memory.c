/* Payload memory of an NBD server: see memory.h. Counted by what the buffer pool really takes. */
#include <errno.h>
#include "base/bits.h"
#include "base/check.h"
#include "export/nbd/memory.h"
#include "rt/buf.h"

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
    m->shared_len = m->shared_left = whole - (uint64_t)slice * max_shares;
    wait_queue_init(&m->waiting);
}

void nbd_share_init(struct nbd_share *s, struct nbd_memory *m)
{
    *s = (struct nbd_share){.memory = m, .slice_left = m->slice_len};
    m->nr_shares++;
}

void nbd_share_fini(struct nbd_share *s)
{
    struct nbd_memory *m = s->memory;

    CHECK_THAT(s->slice_left == m->slice_len && s->shared_used == 0);
    m->nr_shares--;
}

static bool take_shared(struct nbd_share *s, size_t len, struct nbd_grant *ret)
{
    struct nbd_memory *m = s->memory;
    uint64_t limit = m->nr_shares > 1 ? m->shared_len / 2 : m->shared_len;

    if (len > m->shared_left || s->shared_used + len > limit)
        return false;
    m->shared_left -= len;
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

static void give_bytes(struct nbd_share *s, const struct nbd_grant *g)
{
    struct nbd_memory *m = s->memory;

    if (g->shared) {
        m->shared_left += g->len;
        s->shared_used -= g->len;
    } else {
        s->slice_left += g->len;
    }
    m->used -= g->len;
    wait_queue_wake_all(&m->waiting);
}

int nbd_share_take(struct nbd_share *s, size_t want, struct nbd_grant *ret)
{
    struct nbd_memory *m = s->memory;
    struct nbd_grant g;

    while (!try_take(s, held_len(want), &g))
        wait_queue_sleep(&m->waiting);
    m->used += g.len;
    m->used_max = MAX(m->used_max, m->used);
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
