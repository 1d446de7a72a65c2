/* What the model of journal.c knows and does: a state, what may happen to it, what must hold. */
#ifndef VARVE_TESTS_MODEL_JOURNAL_MODEL_H
#define VARVE_TESTS_MODEL_JOURNAL_MODEL_H

#include <stdbool.h>
#include <stdint.h>
#include "rt/co.h"

enum { G = 2, H_MAX = 3, RING = 8, SETS = 8, EPOCH_OTHER = 99 };

enum mutation {
    AS_IS,
    NO_FLUSH_BEFORE_L2,   /* dropped flushes: data may come behind its entry */
    NO_FLUSH_AFTER_L2,    /* ... records and freed clusters go though L2 is volatile */
    L1_BEFORE_FLUSH,      /* ... an L1 entry may come before its table */
    RECORD_BEFORE_DATA,   /* reordered: the map names a cluster not written yet */
    ANSWER_BEFORE_RECORD, /* ... the client knows first */
    RECORDS_SWAPPED,      /* ... of one cluster, the later one stands first */
    RECORD_LOST,          /* one in the middle of the ring is not there */
    TABLE_NOT_RECORDED,   /* a change of the map without a record */
    BLOCK_NOT_RECORDED,   /* ... of the refcount table */
    BLOCK_BEFORE_FLUSH,   /* the refcount table names a block that may not be there */
    TRIM_AT_BEGIN,        /* records go before what they say is in the image */
    REUSE_AT_ONCE,        /* a freed cluster is used before its unmapping is on the device */
    RUN_NOTED_LATE,       /* a cluster counts as unused while a record names it */
    SKIP_BIT,             /* skipped guards */
    SKIP_EPOCH,
    SKIP_BOOT,
    REPLAY_DECREMENTS,     /* replay counts down what it unmaps */
    SESSION_BEFORE_REPLAY, /* the journal is emptied before replay's work is in the image */
    REPLAY_UNFLUSHED,      /* ... or before it is durable */
    NO_DRAIN,              /* a layer becomes a backing file with its journal full */
    NR_MUTATIONS,
    /* not a broken rule: L2 entries and the L1 entry of their table become durable together */
    L2_WITH_L1,
};
/* Values of an entry; DATA and KEPT (zero flag, cluster keeps its place) with a host cluster. */
enum { V_NONE, V_ZERO, V_DATA, V_KEPT = V_DATA + H_MAX, V_JUNK = V_KEPT + H_MAX };
/* Contents: what a read gives. Each write has its own. */
enum { C_BASE, C_ZERO, C_JUNK, C_FIRST };
/* Refcounts are 0, 1, or what lies where no block was written. */
enum { REF_JUNK = 2 };

struct loc {     /* a place on the disk */
    uint8_t cur; /* what the system sees */
    uint8_t pad;
    uint16_t may; /* bits: what a power cut may leave */
};
struct rec {
    uint8_t kind, g, old, new; /* enum journal_kind */
};
/* What replay does to the disk, in its order. */
enum { SET_NONE, SET_ENTRY, SET_L1, SET_BLOCK, SET_FLUSH };
struct set {
    uint8_t what, g, value, pad;
};
enum op_kind { OP_NONE, OP_IN_PLACE, OP_REUSE, OP_ALLOC, OP_DISCARD, OP_KEEP };
enum { DO_DATA, DO_RECORD, DO_ANSWER, DO_END };
struct op {
    uint8_t kind, stage, host, content;
};
enum phase { RUNNING, DEAD, REPLAYED, BACKING };
/* Steps of a flush. */
enum {
    RUN_IDLE,
    RUN_FLUSH1,
    RUN_BLOCK,
    RUN_FLUSH_BLOCK,
    RUN_L2,
    RUN_FLUSH2 = RUN_L2 + G,
    RUN_L1,
    RUN_FLUSH3,
    RUN_DONE
};

struct state { /* hashed as bytes; padding stays 0 as it was made */
    /* disk */
    struct loc l1, l2[G], data[H_MAX], block, ref[H_MAX]; /* ref: in the block, if that is named */
    uint8_t bit, hdr_epoch;
    /* journal */
    uint8_t j_epoch, j_unused, nr_recs, phase;
    struct rec rec[RING];
    /* process */
    uint8_t m_l1, m_block, m[G], link_stage;
    uint8_t pool, freed, run_freed, ready; /* sets of host clusters */
    struct op op[G];
    uint8_t run, run_recs, run_l1, run_block, run_l2[G], session_step, adopt;
    struct set set[SETS]; /* what replay still has to do, from its end */
    uint8_t nr_sets, next_set;
    /* what may be read: sets of contents */
    uint16_t last[G], flushed[G], since[G];
    /* what may still happen */
    uint8_t writes_left, zeroes_left, runs_left, kills_left, others_left, next_content;
    uint8_t next_epoch, reused;
} __attribute__((aligned(8)));

struct scenario {
    const char *name;
    unsigned hosts;
    bool has_table, has_block;
    unsigned writes, zeroes, runs, kills, others;
};

/* The search that is under way. */
struct model {
    const struct scenario *sc;
    enum mutation mut;
    char wrong[200]; /* the first violation */
    /* what was met on the way: a model that never gets there proves nothing */
    uint64_t replays, changed, voids, second_kills, reuses;
};
extern struct model model;

struct state model_first(const struct scenario *sc);
/* Lets the i-th thing happen, i < MODEL_ACTS: false if it cannot happen now. */
SUSPENDS bool model_act(struct state *s, unsigned i, const char **ret_how);
/* Notes a violation in model.wrong: in this state, and in any that a power cut makes of it. */
void model_judge(const struct state *s);
/* Opens what any power cut makes of it with its journal, as if that were of the same boot. */
SUSPENDS void model_cut_and_open(const struct state *s);

enum { ACT_OP = 4 * G, ACT_REST = 12, ACT_OTHERS = 3 * (G + 1) };
#define MODEL_ACTS (ACT_OP + ACT_REST + ACT_OTHERS)

#endif
