/* What sectors may hold: see sectors.h. */
#include "sectors.h"
#include "rt/reactor.h"
#include "test.h"

void sectors_init(struct sectors *s, uint64_t nr, bool has_below)
{
    *s = (struct sectors){.nr = nr, .may = calloc(nr, sizeof(*s->may))};
    for (uint64_t i = 0; i < nr; i++) {
        struct op *op = op_begin(s, has_below ? BELOW_ID | i : 0, i, 1);

        op->start = op->end = 0;
        op->settled = true;
    }
    s->tick = 1;
}

void sectors_fini(struct sectors *s)
{
    vec_for_each(op, &s->ops)
        free(*op);
    vec_free(&s->ops);
    for (uint64_t i = 0; i < s->nr; i++)
        vec_free(&s->may[i]);
    free(s->may);
}

struct op *op_begin(struct sectors *s, uint64_t id, uint64_t first, uint64_t nr)
{
    struct op *op = calloc(1, sizeof(*op));

    *op = (struct op){id, first, nr, ++s->tick, NEVER, 0, false, 0};
    CHECK_EQ(vec_push(&s->ops, op), 0);
    for (uint64_t i = first; i < first + nr; i++)
        CHECK_EQ(vec_push(&s->may[i], op), 0);
    return op;
}

void op_end(struct sectors *s, struct op *op, uint64_t now_ns)
{
    op->end = ++s->tick;
    op->end_ns = now_ns;
}

void op_is_durable(struct sectors *s, struct op *op)
{
    op->settled = true;
    for (uint64_t i = op->first; i < op->first + op->nr; i++)
        for (size_t k = s->may[i].len; k-- > 0;)
            if (s->may[i].data[k]->end < op->start)
                vec_remove_at(&s->may[i], k);
}

void ops_flushed(struct sectors *s, uint64_t start)
{
    vec_for_each(op, &s->ops)
        if (!(*op)->settled && (*op)->end <= start)
            op_is_durable(s, *op);
}

void ops_durable_until(struct sectors *s, uint64_t ns)
{
    vec_for_each(op, &s->ops)
        if (!(*op)->settled && (*op)->end != NEVER && (*op)->end_ns <= ns)
            op_is_durable(s, *op);
}

void ops_claim_nothing(struct sectors *s, unsigned by)
{
    vec_for_each(op, &s->ops)
        if (!(*op)->settled) {
            (*op)->settled = true;
            (*op)->lost_by = by;
        }
}

struct op *op_shown(const struct sectors *s, uint64_t sector, uint64_t id)
{
    struct op *shown = NULL;

    vec_for_each(op, &s->may[sector])
        if ((*op)->id == id)
            shown = *op;
    return shown;
}

void op_stays(struct sectors *s, uint64_t sector, struct op *op)
{
    s->may[sector].len = 0;
    CHECK_EQ(vec_push(&s->may[sector], op), 0);
}

uint64_t ops_lost_since(const struct sectors *s, uint64_t sector, const struct op *shown,
                        unsigned by)
{
    uint64_t since = NEVER;

    vec_for_each(op, &s->may[sector])
        if ((*op)->end != NEVER && (*op)->start > shown->end && (*op)->lost_by == by &&
            (by || !(*op)->settled))
            since = MIN(since, (*op)->end_ns);
    return since;
}

void ops_print(const struct sectors *s, uint64_t sector)
{
    vec_for_each(o, &s->ops) {
        const struct op *op = *o;

        if (sector >= op->first && sector < op->first + op->nr)
            fprintf(stderr, "  %#llx [%llu, +%llu) from %llu to %lld%s\n",
                    (unsigned long long)op->id, (unsigned long long)op->first,
                    (unsigned long long)op->nr, (unsigned long long)op->start, (long long)op->end,
                    op->settled ? " settled" : "");
    }
}

/* ---- below ---- */

SUSPENDS static int below_read(void *ctx, uint64_t off, uint64_t len, struct iov_iter *iov)
{
    uint64_t words[SECTOR / 8];

    while (len > 0) {
        size_t in = off % SECTOR, n = MIN(len, SECTOR - in);

        for (unsigned i = 0; i < ARRAY_SIZE(words); i++)
            words[i] = BELOW_ID | off / SECTOR;
        iov_iter_write(iov, (char *)words + in, n);
        off += n;
        len -= n;
    }
    io_point();
    return 0;
}

const struct image_below sectors_below = {.read = below_read};
