/*
 * What each sector of a disk may hold while operations run, and after a cut.
 *
 * A sector may show what any operation left there, but nothing that was over before another one
 * began which is durable. Every sector carries the number of the operation that wrote it, so data
 * of another place, or of an earlier owner of the host cluster, is seen as such. Zeroes and
 * discards have number 0.
 */
#ifndef VARVE_TESTS_SECTORS_H
#define VARVE_TESTS_SECTORS_H

#include "base/vec.h"
#include "qcow2/image.h"

#define SECTOR   512u
#define NEVER    UINT64_MAX
#define BELOW_ID (1ull << 63)

struct op {
    uint64_t id;        /* what its sectors hold; 0: zeroes */
    uint64_t first, nr; /* sectors */
    uint64_t start, end;
    uint64_t end_ns;  /* for tests with a clock */
    bool settled;     /* durable, or nothing is claimed of it any more */
    unsigned lost_by; /* then: what may have taken it; 0: nothing */
};
typedef VEC(struct op *) op_vec;

struct sectors {
    uint64_t nr;
    op_vec *may; /* by sector: operations that may still show */
    op_vec ops;
    uint64_t tick, next_id;
};

/* has_below: at first every sector shows what sectors_below has there; else zeroes. */
void sectors_init(struct sectors *s, uint64_t nr, bool has_below);
void sectors_fini(struct sectors *s);
extern const struct image_below sectors_below;

struct op *op_begin(struct sectors *s, uint64_t id, uint64_t first, uint64_t nr);
/* It was answered. */
void op_end(struct sectors *s, struct op *op, uint64_t now_ns);
/* What was over before it began can never come back. */
void op_is_durable(struct sectors *s, struct op *op);
/* A flush that began at `start` (a tick) is done. */
void ops_flushed(struct sectors *s, uint64_t start);
/* Everything that was answered by then is durable. */
void ops_durable_until(struct sectors *s, uint64_t ns);
/* Those that are not settled by now may be lost, by event number `by`: they rule nothing out. */
void ops_claim_nothing(struct sectors *s, unsigned by);
/* The newest operation that a sector with this content may show; NULL: none. */
struct op *op_shown(const struct sectors *s, uint64_t sector, uint64_t id);
/* This one is what the sector holds, for good. */
void op_stays(struct sectors *s, uint64_t sector, struct op *op);
/* The earliest moment at which an operation was answered that this sector does not show: it began
 * after the one that is shown was over. Of those that event `by` may have taken; 0: of those of
 * which something is claimed. NEVER: there is none. */
uint64_t ops_lost_since(const struct sectors *s, uint64_t sector, const struct op *shown,
                        unsigned by);
/* To stderr. */
void ops_print(const struct sectors *s, uint64_t sector);

#endif
