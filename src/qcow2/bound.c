/* One bound of bytes over several caches: see bound.h. */
#include "qcow2/bound.h"
#include "base/check.h"

/* Steps of a call; after the first ones what was used lately is not spared any more. */
#define STEPS_MAX   4096u
#define STEPS_SPARE 256u

void bound_init(struct bound *b, uint64_t limit)
{
    *b = (struct bound){.limit = limit};
    list_init(&b->members);
}

static void count(struct bound *b, int64_t bytes)
{
    DEBUG_CHECK(bytes >= 0 || b->bytes >= (uint64_t)-bytes);
    b->bytes += (uint64_t)bytes;
    b->bytes_max = MAX(b->bytes_max, b->bytes);
}

void bound_join(struct bound *b, struct bound_member *m)
{
    list_push_back(&b->members, &m->link);
    count(b, (int64_t)m->bytes);
}

void bound_part(struct bound *b, struct bound_member *m)
{
    list_remove(&m->link);
    if (b->first == m)
        b->first = NULL;
    count(b, -(int64_t)m->bytes);
}

void bound_add(struct bound *b, struct bound_member *m, int64_t bytes)
{
    m->bytes += (uint64_t)bytes;
    count(b, bytes);
}

void bound_add_fixed(struct bound *b, int64_t bytes)
{
    b->fixed += (uint64_t)bytes;
    count(b, bytes);
}

uint64_t bound_left(const struct bound *b)
{
    uint64_t most = MAX(b->limit, b->fixed + b->limit / 2);

    return b->bytes < most ? most - b->bytes : 0;
}

static struct bound_member *next_member(struct bound *b)
{
    if (b->first && b->first->bytes > b->limit / 16)
        return b->first;
    return list_empty(&b->members) ? NULL : list_entry(b->members.next, struct bound_member, link);
}

void bound_make_room(struct bound *b, uint64_t need)
{
    for (unsigned i = 0; i < STEPS_MAX && bound_left(b) < need; i++) {
        struct bound_member *m = next_member(b);
        uint64_t before = b->bytes;

        if (!m)
            return;
        if (m->step(m, i >= STEPS_SPARE)) {
            list_remove(&m->link);
            list_push_back(&b->members, &m->link);
        }
        b->evictions += b->bytes < before;
    }
}
