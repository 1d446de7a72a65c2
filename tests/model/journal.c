/*
 * Exhaustive model of durability `ack`: every interleaving of a few operations on very small
 * images.
 *
 * An image has 2 guest clusters, 2 or 3 host clusters and perhaps no L2 table yet. The process
 * writes, zeroes, discards, allocates, frees, flushes step by step; it is killed at any moment; the
 * image is then opened again (running the product's own replay_run), killed again in the middle of
 * that, or opened by QEMU (which clears the autoclear bit), by another host's varve (which sets
 * another epoch), or becomes QEMU's backing file. The disk has a volatile cache: of each place it
 * is known what may be there after a power cut, and that is judged in every state.
 *
 *   what is judged                                             when
 *   answered writes are there, nothing else is                 behind each replay
 *   flushed data is there, or what was written later           in each state: power cut, or QEMU
 * looks no cluster is mapped twice, or mapped and not counted      in each state
 *
 * Each rule that the argument in docs/durability.md uses can be broken by a mutation; the search
 * must then find a violation, and none without.
 */
#include <assert.h>
#include "base/bits.h"
#include "base/vec.h"
#include "journal_model.h"
#include "test.h"

static const char *const mutation_names[] = {
    [AS_IS] = "as it is",
    [NO_FLUSH_BEFORE_L2] = "no flush before L2",
    [NO_FLUSH_AFTER_L2] = "no flush after L2",
    [L1_BEFORE_FLUSH] = "L1 before the flush",
    [RECORD_BEFORE_DATA] = "record before data",
    [ANSWER_BEFORE_RECORD] = "answer before record",
    [RECORDS_SWAPPED] = "records swapped",
    [RECORD_LOST] = "record lost",
    [TABLE_NOT_RECORDED] = "table not recorded",
    [BLOCK_NOT_RECORDED] = "refcount block not recorded",
    [BLOCK_BEFORE_FLUSH] = "refcount block before the flush",
    [TRIM_AT_BEGIN] = "trim at begin",
    [REUSE_AT_ONCE] = "reuse at once",
    [RUN_NOTED_LATE] = "run noted late",
    [SKIP_BIT] = "bit not looked at",
    [SKIP_EPOCH] = "epoch not looked at",
    [SKIP_BOOT] = "boot not looked at",
    [REPLAY_DECREMENTS] = "replay decrements",
    [SESSION_BEFORE_REPLAY] = "session before replay's end",
    [REPLAY_UNFLUSHED] = "replay not flushed",
    [NO_DRAIN] = "no drain",
};

struct frame {
    struct state s;
    unsigned next; /* to try */
    const char *how;
};
static struct {
    VEC(struct frame) stack; /* the way to the state that is looked at */
    uint64_t *seen;          /* pairs of words; 0: empty */
    size_t seen_cap, nr_seen;
} space;

/* ---- the search ---- */

static void grow_seen(void)
{
    size_t cap = space.seen_cap ? space.seen_cap * 2 : 1 << 16;
    uint64_t *old = space.seen, *grown = calloc(cap, 16);

    CHECK(grown != NULL);
    for (size_t i = 0; i < space.seen_cap; i++) {
        size_t at = old[2 * i] & (cap - 1);

        while (old[2 * i] && grown[2 * at])
            at = (at + 1) & (cap - 1);
        if (old[2 * i])
            memcpy(grown + 2 * at, old + 2 * i, 16);
    }
    free(old);
    space.seen = grown;
    space.seen_cap = cap;
}

/* True if it is new. Two words of hash a state: a collision would hide a state, not make one. */
static bool note_seen(const struct state *s)
{
    uint64_t a = 1, b = 2, w;

    for (size_t i = 0; i < sizeof(*s); i += 8) {
        memcpy(&w, (const char *)s + i, 8);
        a = hash64(a ^ w);
        b = hash64(b + w * 0x9e3779b97f4a7c15ull);
    }
    a |= 1; /* 0 is empty */
    if (space.nr_seen * 2 >= space.seen_cap)
        grow_seen();
    size_t at = a & (space.seen_cap - 1);
    for (; space.seen[2 * at]; at = (at + 1) & (space.seen_cap - 1))
        if (space.seen[2 * at] == a && space.seen[2 * at + 1] == b)
            return false;
    space.seen[2 * at] = a;
    space.seen[2 * at + 1] = b;
    space.nr_seen++;
    return true;
}
static_assert(sizeof(struct state) % 8 == 0, "hashed in words");

static void print_path(void)
{
    for (size_t i = 1; i < space.stack.len; i++) {
        const struct state *s = &space.stack.data[i].s;

        printf("  %-14s l1 %u/%x l2 %u/%x %u/%x map %u %u records %u pool %x unused %x phase %u\n",
               space.stack.data[i].how, s->l1.cur, s->l1.may, s->l2[0].cur, s->l2[0].may,
               s->l2[1].cur, s->l2[1].may, s->m[0], s->m[1], s->nr_recs, s->pool, s->j_unused,
               s->phase);
    }
}

/* Depth first over everything; true if nothing was wrong. */
SUSPENDS static bool search(const struct scenario *sc, enum mutation mut)
{
    uint64_t *seen = space.seen;

    if (seen)
        memset(seen, 0, space.seen_cap * 16);
    model.sc = sc;
    model.mut = mut;
    model.wrong[0] = 0;
    space.nr_seen = 0;
    space.stack.len = 0;
    CHECK_EQ(vec_push(&space.stack, {model_first(sc), 0, ""}), 0);
    while (space.stack.len > 0 && !model.wrong[0]) {
        struct frame *f = &space.stack.data[space.stack.len - 1];

        if (f->next == MODEL_ACTS) {
            space.stack.len--;
            continue;
        }
        struct state s = f->s;
        const char *how = "";
        if (!model_act(&s, f->next++, &how) || (!note_seen(&s) && !model.wrong[0]))
            continue;
        model_judge(&s);
        if (mut == SKIP_BOOT)
            model_cut_and_open(&s);
        CHECK_EQ(vec_push(&space.stack, {s, 0, how}), 0);
    }
    return !model.wrong[0];
}

static const struct scenario scenarios[] = {
    {"3 host clusters, others", 3, true, true, 2, 0, 1, 2, 1},
    {"2 host clusters", 2, true, true, 2, 1, 1, 2, 0},
    {"no table, others", 3, false, true, 1, 1, 1, 2, 1},
    {"no refcount block", 2, true, false, 2, 1, 1, 2, 0},
    {"neither, others", 2, false, false, 1, 0, 1, 2, 1},
};

CO_TEST(no_order_loses_or_maps_wrongly)
{
    for (size_t i = 0; i < ARRAY_SIZE(scenarios); i++) {
        bool ok = search(&scenarios[i], AS_IS);

        printf("%s: %zu states\n", scenarios[i].name, space.nr_seen);
        if (!ok)
            print_path();
        if (!ok)
            test_fail(__FILE__, __LINE__, "%s: %s", scenarios[i].name, model.wrong);
    }
    printf("%llu replays, %llu with changes, %llu void, %llu kills in them, %llu reuses\n",
           (unsigned long long)model.replays, (unsigned long long)model.changed,
           (unsigned long long)model.voids, (unsigned long long)model.second_kills,
           (unsigned long long)model.reuses);
    CHECK(model.changed > 1000 && model.voids > 1000 && model.second_kills > 1000 &&
          model.reuses > 1000);
}

CO_TEST(every_broken_rule_is_found)
{
    for (enum mutation mut = AS_IS + 1; mut < NR_MUTATIONS; mut++) {
        bool found = false;

        for (size_t i = 0; i < ARRAY_SIZE(scenarios) && !found; i++) {
            found = !search(&scenarios[i], mut);
            if (found)
                printf("%s: %s (%zu states)\n", mutation_names[mut], model.wrong, space.nr_seen);
        }
        if (!found)
            test_fail(__FILE__, __LINE__, "not noticed: %s", mutation_names[mut]);
    }
}

/* A flush that is not needed: the first content of the table is durable before either. */
CO_TEST(l2_and_l1_may_share_a_flush)
{
    for (size_t i = 0; i < ARRAY_SIZE(scenarios); i++)
        if (!scenarios[i].has_table && !search(&scenarios[i], L2_WITH_L1))
            test_fail(__FILE__, __LINE__, "%s: %s", scenarios[i].name, model.wrong);
}
