/* Steps of the model in journal.c: the disk, the process, kills and ways back, others. */
#include <stdarg.h>
#include <stdio.h>
#include "base/bits.h"
#include "base/own.h"
#include "journal_model.h"
#include "qcow2/replay.h"
#include "test.h"

struct model model;

PRINTF_LIKE(1, 2) static void wrong(const char *fmt, ...)
{
    va_list ap;

    if (model.wrong[0])
        return;
    va_start(ap, fmt);
    vsnprintf(model.wrong, sizeof(model.wrong), fmt, ap);
    va_end(ap);
}

/* ---- the disk ---- */

static void put(struct loc *l, unsigned value)
{
    l->cur = (uint8_t)value;
    l->may |= (uint16_t)(1u << value);
}

static void settle(struct loc *l)
{
    l->may = (uint16_t)(1u << l->cur);
}

static void device_flush(struct state *s)
{
    settle(&s->l1);
    settle(&s->block);
    for (unsigned i = 0; i < G; i++)
        settle(&s->l2[i]);
    for (unsigned i = 0; i < H_MAX; i++) {
        settle(&s->data[i]);
        settle(&s->ref[i]);
    }
}

static int host_of(unsigned value)
{
    if (value < V_DATA || value >= V_JUNK)
        return -1;
    return (int)(value < V_KEPT ? value - V_DATA : value - V_KEPT);
}

static unsigned content_of(const struct state *s, unsigned value)
{
    if (value == V_NONE)
        return C_BASE;
    if (value == V_JUNK)
        return C_JUNK;
    return value >= V_DATA && value < V_KEPT ? s->data[value - V_DATA].cur : C_ZERO;
}

static unsigned disk_value(const struct state *s, unsigned g)
{
    return s->l1.cur ? s->l2[g].cur : V_NONE;
}

/* ---- judging ---- */

/* Any content that cluster g may have after a power cut with this value of its entry. */
static void judge_value(const struct state *s, unsigned g, unsigned value)
{
    unsigned contents = 1u << content_of(s, value);
    int h = host_of(value);

    if (value >= V_DATA && value < V_KEPT)
        contents = s->data[h].may;
    if (contents & ~(unsigned)s->flushed[g])
        wrong("power cut: guest cluster %u reads content set %#x, not in %#x", g, contents,
              s->flushed[g]);
    if (h >= 0 && (s->ref[h].may | s->block.may) & 1)
        wrong("power cut: host cluster %d is mapped and may not be counted", h);
}

void model_judge(const struct state *s)
{
    unsigned hosts[G] = {0};

    for (unsigned l1 = 0; l1 < 2; l1++) {
        if (!(s->l1.may >> l1 & 1))
            continue;
        for (unsigned g = 0; g < G; g++)
            for (unsigned v = 0; v <= V_JUNK; v++) {
                if (l1 ? !(s->l2[g].may >> v & 1) : v != V_NONE)
                    continue;
                judge_value(s, g, v);
                if (host_of(v) >= 0)
                    hosts[g] |= 1u << host_of(v);
            }
    }
    for (unsigned h = 0; h < H_MAX; h++)
        if (s->block.may & 2 && s->ref[h].may >> REF_JUNK & 1)
            wrong("power cut: the refcount table may name what is no block");
    if (hosts[0] & hosts[1])
        wrong("power cut: host clusters %#x may be mapped twice", hosts[0] & hosts[1]);
    for (unsigned g = 0; g < G && s->phase == BACKING; g++)
        if (!(s->last[g] >> content_of(s, disk_value(s, g)) & 1))
            wrong("the backing file shows guest cluster %u as it was", g);
}

struct state model_first(const struct scenario *sc)
{
    struct state s;

    memset(&s, 0, sizeof(s));
    s.bit = s.hdr_epoch = s.j_epoch = 1;
    s.next_epoch = 2;
    s.l1.cur = s.m_l1 = sc->has_table;
    s.block.cur = s.m_block = sc->has_block;
    for (unsigned g = 0; g < G; g++) {
        s.l2[g].cur = sc->has_table ? V_NONE : V_JUNK;
        s.last[g] = s.flushed[g] = s.since[g] = 1u << C_BASE;
    }
    for (unsigned h = 0; h < H_MAX; h++)
        s.data[h].cur = C_JUNK;
    s.ref[0].cur = s.pool = s.j_unused = sc->has_block;
    for (unsigned h = 0; h < H_MAX && !sc->has_block; h++)
        s.ref[h].cur = REF_JUNK;
    device_flush(&s);
    s.writes_left = (uint8_t)sc->writes;
    s.zeroes_left = (uint8_t)sc->zeroes;
    s.runs_left = (uint8_t)sc->runs;
    s.kills_left = (uint8_t)sc->kills;
    s.others_left = (uint8_t)sc->others;
    s.next_content = C_FIRST;
    return s;
}

/* ---- the process: changes of the map ---- */

static void append(struct state *s, struct rec rec)
{
    CHECK(s->nr_recs < RING);
    s->rec[s->nr_recs++] = rec;
}

static void trim(struct state *s, unsigned nr)
{
    memmove(s->rec, s->rec + nr, (RING - nr) * sizeof(*s->rec));
    memset(s->rec + RING - nr, 0, nr * sizeof(*s->rec));
    s->nr_recs = (uint8_t)(s->nr_recs - nr);
}

static unsigned op_value(const struct op *op)
{
    switch (op->kind) {
    case OP_DISCARD:
        return V_ZERO;
    case OP_KEEP:
        return V_KEPT + op->host;
    default:
        return V_DATA + op->host;
    }
}

static void begin_op(struct state *s, unsigned g, struct op op)
{
    s->op[g] = op;
    s->flushed[g] |= (uint16_t)(1u << op.content);
    s->since[g] |= (uint16_t)(1u << op.content);
}

static bool can_begin(const struct state *s, unsigned g)
{
    return s->phase == RUNNING && s->op[g].kind == OP_NONE && s->m_l1;
}

static bool begin_write(struct state *s, unsigned g)
{
    struct op op = {.content = s->next_content};
    int h = host_of(s->m[g]);

    if (!can_begin(s, g) || !s->writes_left || (h < 0 && !s->pool))
        return false;
    op.kind = h < 0 ? OP_ALLOC : s->m[g] >= V_KEPT ? OP_REUSE : OP_IN_PLACE;
    if (h < 0) {
        h = __builtin_ctz(s->pool);
        s->pool &= (uint8_t) ~(1u << h);
        if (model.mut != RUN_NOTED_LATE)
            s->j_unused &= (uint8_t) ~(1u << h);
        if (s->reused >> h & 1)
            model.reuses++;
    }
    op.host = (uint8_t)h;
    s->writes_left--;
    s->next_content++;
    begin_op(s, g, op);
    return true;
}

static bool begin_zero(struct state *s, unsigned g, bool keep)
{
    int h = host_of(s->m[g]);

    if (!can_begin(s, g) || !s->zeroes_left || s->m[g] == V_ZERO)
        return false;
    if (keep && (h < 0 || s->m[g] >= V_KEPT))
        return false;
    s->zeroes_left--;
    begin_op(s, g,
             (struct op){.kind = keep ? OP_KEEP : OP_DISCARD,
                         .stage = DO_RECORD,
                         .host = (uint8_t)(h < 0 ? 0 : h),
                         .content = C_ZERO});
    return true;
}

static void do_record(struct state *s, unsigned g)
{
    struct op *op = &s->op[g];
    unsigned old = s->m[g], new = op_value(op);

    if (op->kind == OP_IN_PLACE)
        return;
    append(s, (struct rec){JOURNAL_ENTRIES, (uint8_t)g, (uint8_t)old, (uint8_t) new});
    s->m[g] = (uint8_t) new;
    if (op->kind == OP_DISCARD && host_of(old) >= 0) {
        *(model.mut == REUSE_AT_ONCE ? &s->ready : &s->freed) |= (uint8_t)(1u << host_of(old));
        s->reused |= (uint8_t)(1u << host_of(old));
    }
}

static bool step_op(struct state *s, unsigned g)
{
    static const uint8_t order[] = {DO_DATA, DO_RECORD, DO_ANSWER};
    static const uint8_t record_first[] = {DO_RECORD, DO_DATA, DO_ANSWER};
    static const uint8_t answer_first[] = {DO_DATA, DO_ANSWER, DO_RECORD};
    struct op *op = &s->op[g];
    bool zero = op->kind == OP_DISCARD || op->kind == OP_KEEP;
    const uint8_t *steps = model.mut == ANSWER_BEFORE_RECORD          ? answer_first
                           : model.mut == RECORD_BEFORE_DATA && !zero ? record_first
                                                                      : order;

    if (s->phase != RUNNING || op->kind == OP_NONE)
        return false;
    switch (steps[op->stage]) {
    case DO_DATA:
        put(&s->data[op->host], op->content);
        break;
    case DO_RECORD:
        do_record(s, g);
        break;
    case DO_ANSWER:
        s->last[g] = (uint16_t)(1u << op->content);
        if (op->kind == OP_ALLOC)
            s->j_unused &= (uint8_t) ~(1u << op->host);
        break;
    }
    if (++op->stage == DO_END)
        *op = (struct op){0};
    return true;
}

/* A new L2 table: its content is written, then the change is recorded. */
static bool step_link(struct state *s)
{
    if (s->phase != RUNNING || s->m_l1 || !s->m_block)
        return false;
    if (s->link_stage++ == 0) {
        for (unsigned g = 0; g < G; g++)
            put(&s->l2[g], V_NONE);
        return true;
    }
    if (model.mut != TABLE_NOT_RECORDED)
        append(s, (struct rec){JOURNAL_TABLE, 0, 0, 1});
    s->m_l1 = 1;
    return true;
}

/* ---- the process: host clusters ---- */

static bool release(struct state *s)
{
    if (s->phase != RUNNING || !s->ready)
        return false;
    int h = __builtin_ctz(s->ready);
    s->ready &= (uint8_t) ~(1u << h);
    put(&s->ref[h], 0);
    return true;
}

/* A new refcount block: whole in the file, then named in memory. */
static bool cover(struct state *s)
{
    if (s->phase != RUNNING || s->m_block)
        return false;
    for (unsigned h = 0; h < H_MAX; h++)
        put(&s->ref[h], 0);
    if (model.mut != BLOCK_NOT_RECORDED)
        append(s, (struct rec){JOURNAL_BLOCK, 0, 0, 1});
    s->m_block = 1;
    return true;
}

static bool refill(struct state *s)
{
    if (s->phase != RUNNING || s->pool || !s->m_block)
        return false;
    for (unsigned h = 0; h < model.sc->hosts; h++) {
        if (s->ref[h].cur)
            continue;
        put(&s->ref[h], 1);
        s->pool |= (uint8_t)(1u << h);
        s->j_unused |= (uint8_t)(1u << h);
        return true;
    }
    return false;
}

/* ---- the process: flush ---- */

static bool run_begin(struct state *s)
{
    if (s->run != RUN_IDLE || s->phase != RUNNING || !s->runs_left)
        return false;
    s->runs_left--;
    s->run = RUN_FLUSH1;
    s->run_recs = s->nr_recs;
    s->run_l1 = s->m_l1;
    s->run_block = s->m_block;
    memcpy(s->run_l2, s->m, G);
    s->run_freed = s->freed;
    s->freed = 0;
    for (unsigned g = 0; g < G; g++)
        s->since[g] = (uint16_t)(s->last[g] | (s->op[g].kind ? 1u << s->op[g].content : 0));
    if (model.mut == L1_BEFORE_FLUSH)
        put(&s->l1, s->run_l1);
    if (model.mut == BLOCK_BEFORE_FLUSH)
        put(&s->block, s->run_block);
    if (model.mut == TRIM_AT_BEGIN) {
        trim(s, s->run_recs);
        s->run_recs = 0;
    }
    return true;
}

static void run_end(struct state *s)
{
    s->run = RUN_IDLE;
    s->ready |= s->run_freed;
    s->run_freed = 0;
    memcpy(s->flushed, s->since, sizeof(s->flushed));
    trim(s, s->run_recs);
    s->run_recs = s->run_l1 = s->run_block = 0;
    memset(s->run_l2, 0, G);
}

static bool run_step(struct state *s)
{
    bool links = s->run_l1 != s->l1.cur, blocks = s->run_block != s->block.cur;

    switch (s->run) {
    case RUN_IDLE:
        return false;
    case RUN_FLUSH1:
        if (model.mut != NO_FLUSH_BEFORE_L2)
            device_flush(s);
        break;
    case RUN_BLOCK:
        if (blocks)
            put(&s->block, s->run_block);
        else
            s->run = RUN_FLUSH_BLOCK; /* nothing to flush */
        break;
    case RUN_FLUSH_BLOCK:
        device_flush(s);
        break;
    case RUN_FLUSH2:
        if (model.mut != NO_FLUSH_AFTER_L2 && !(links && model.mut == L2_WITH_L1))
            device_flush(s);
        break;
    case RUN_L1:
        if (links)
            put(&s->l1, s->run_l1);
        else
            s->run = RUN_FLUSH3; /* nothing to flush */
        break;
    case RUN_FLUSH3:
        device_flush(s);
        break;
    case RUN_DONE:
        run_end(s);
        return true;
    default: /* an L2 entry */
        if (s->run_l1 && s->run_l2[s->run - RUN_L2] != s->l2[s->run - RUN_L2].cur)
            put(&s->l2[s->run - RUN_L2], s->run_l2[s->run - RUN_L2]);
    }
    s->run++;
    return true;
}

/* ---- kill, and the way back ---- */

static bool kill_it(struct state *s)
{
    if ((s->phase != RUNNING && s->phase != REPLAYED) || !s->kills_left)
        return false;
    if (s->phase == REPLAYED)
        model.second_kills++;
    s->kills_left--;
    for (unsigned g = 0; g < G; g++)
        s->last[g] |= (uint16_t)(s->op[g].kind ? 1u << s->op[g].content : 0);
    s->phase = DEAD;
    s->m_l1 = s->m_block = s->link_stage = s->pool = s->freed = s->run_freed = s->ready = 0;
    s->run = s->run_recs = s->run_l1 = s->run_block = s->session_step = s->adopt = 0;
    s->nr_sets = s->next_set = 0;
    memset(s->set, 0, sizeof(s->set));
    memset(s->m, 0, sizeof(s->m));
    memset(s->op, 0, sizeof(s->op));
    memset(s->run_l2, 0, sizeof(s->run_l2));
    return true;
}

#define CLUSTER_BITS   16u
#define TABLE_WORD     (8ull << CLUSTER_BITS | ENTRY_COPIED)
#define BLOCK_WORD     (9ull << CLUSTER_BITS)
#define HOST_FIRST     16u
#define BLOCK_INDEX    (HOST_FIRST >> 3)
#define OLD_BLOCK_WORD (7ull << CLUSTER_BITS)

static const struct qcow2_header header = {
    .version = 3,
    .cluster_bits = CLUSTER_BITS,
    .cluster_size = 1ull << CLUSTER_BITS,
    .l1_entries = 1,
    .l2_entry_size = 8,
    .l2_bits = 13,
    .subclusters = 1,
    .subcluster_bits = CLUSTER_BITS,
    .reftable_clusters = 1,
    .refcount_block_bits = 3, /* tables and blocks are counted elsewhere than data */
};

static struct l2_entry encode(unsigned value)
{
    uint64_t cluster = HOST_FIRST + (unsigned)host_of(value);

    if (value == V_JUNK)
        cluster = 99;
    else if (host_of(value) < 0)
        return (struct l2_entry){value == V_ZERO ? L2_ZERO_FLAG : 0, 0};
    return (struct l2_entry){cluster << CLUSTER_BITS | ENTRY_COPIED |
                                 (value >= V_KEPT && value < V_JUNK ? L2_ZERO_FLAG : 0),
                             0};
}

static unsigned decode(struct l2_entry e)
{
    for (unsigned v = 0; v < V_JUNK; v++)
        if (encode(v).word == e.word)
            return v;
    return V_JUNK;
}

static int map_get_l1(void *ctx, uint64_t index, uint64_t *ret)
{
    *ret = ((struct state *)ctx)->l1.cur ? TABLE_WORD : 0;
    return 0;
}

static int map_get_block(void *ctx, uint64_t index, uint64_t *ret)
{
    *ret = index != BLOCK_INDEX               ? OLD_BLOCK_WORD
           : ((struct state *)ctx)->block.cur ? BLOCK_WORD
                                              : 0;
    return 0;
}

static int map_get(void *ctx, uint64_t l1_word, uint64_t g, struct l2_entry *ret)
{
    CHECK_EQ(l1_word, TABLE_WORD);
    *ret = encode(((struct state *)ctx)->l2[g].cur);
    return 0;
}

static int map_refcount(void *ctx, uint64_t block_word, uint64_t cluster, uint64_t *ret)
{
    CHECK_EQ(block_word, cluster < HOST_FIRST ? OLD_BLOCK_WORD : BLOCK_WORD);
    *ret = cluster < HOST_FIRST ? 1 : ((struct state *)ctx)->ref[cluster - HOST_FIRST].cur;
    return 0;
}

static int add_set(struct state *s, struct set set)
{
    CHECK(s->nr_sets < SETS);
    s->set[s->nr_sets++] = set;
    return 0;
}

static int map_set_block(void *ctx, uint64_t index, uint64_t word)
{
    CHECK(index == BLOCK_INDEX && word == BLOCK_WORD);
    return add_set(ctx, (struct set){.what = SET_BLOCK});
}

static int map_set(void *ctx, uint64_t l1_word, uint64_t g, struct l2_entry e)
{
    CHECK_EQ(l1_word, TABLE_WORD);
    return add_set(ctx, (struct set){SET_ENTRY, (uint8_t)g, (uint8_t)decode(e), 0});
}

static int map_set_l1(void *ctx, uint64_t index, uint64_t word)
{
    CHECK_EQ(word, TABLE_WORD);
    return add_set(ctx, (struct set){.what = SET_L1});
}

static int map_flush(void *ctx)
{
    return model.mut == REPLAY_UNFLUSHED ? 0 : add_set(ctx, (struct set){.what = SET_FLUSH});
}

/* One of the things that replay does to the disk. */
static bool step_replay(struct state *s)
{
    const struct set *set = &s->set[s->next_set];

    if (s->phase != REPLAYED || s->next_set == s->nr_sets)
        return false;
    s->next_set++;
    switch (set->what) {
    case SET_ENTRY:
        put(&s->l2[set->g], set->value);
        break;
    case SET_L1:
        put(&s->l1, 1);
        break;
    case SET_BLOCK:
        put(&s->block, 1);
        break;
    case SET_FLUSH:
        device_flush(s);
        break;
    }
    return true;
}

/* The map as it will be when replay has done all that. */
static void load_map(struct state *s)
{
    s->m_l1 = s->l1.cur;
    s->m_block = s->block.cur;
    for (unsigned i = 0; i < s->nr_sets; i++) {
        s->m_l1 |= s->set[i].what == SET_L1;
        s->m_block |= s->set[i].what == SET_BLOCK;
    }
    for (unsigned g = 0; g < G; g++)
        s->m[g] = s->m_l1 ? s->l2[g].cur : V_NONE;
    for (unsigned i = 0; i < s->nr_sets; i++)
        if (s->set[i].what == SET_ENTRY)
            s->m[s->set[i].g] = s->set[i].value;
}

/* The records as the product keeps them, with what the mutation does to them. */
static size_t make_records(struct state *s, struct journal_rec *recs)
{
    size_t nr = s->nr_recs;

    for (size_t i = 0; i < nr; i++) {
        const struct rec *r = &s->rec[i];

        recs[i] = (struct journal_rec){.seq = i, .nr = 1};
        recs[i].first = r->kind == JOURNAL_BLOCK ? BLOCK_INDEX : r->g;
        recs[i].kind = r->kind;
        recs[i].new.word = r->kind == JOURNAL_TABLE ? TABLE_WORD : BLOCK_WORD;
        if (r->kind == JOURNAL_ENTRIES) {
            recs[i].old = encode(r->old);
            recs[i].new = encode(r->new);
        }
    }
    for (size_t i = 0; i + 1 < nr && model.mut == RECORDS_SWAPPED; i++) {
        if (s->rec[i].kind != JOURNAL_ENTRIES || s->rec[i + 1].kind != JOURNAL_ENTRIES ||
            s->rec[i].g != s->rec[i + 1].g)
            continue;
        struct journal_rec r = recs[i];
        recs[i] = recs[i + 1];
        recs[i + 1] = r;
    }
    if (nr > 1 && model.mut == RECORD_LOST)
        memmove(recs, recs + 1, --nr * sizeof(*recs));
    return nr;
}

SUSPENDS static void replay(struct state *s)
{
    struct replay_map map = {map_get_l1,   map_get_block, map_get,
                             map_refcount, map_set_block, map_set,
                             map_set_l1,   map_flush,     s};
    struct journal_rec recs[RING];
    struct replay_result res;
    size_t nr = make_records(s, recs);

    CHECK_EQ(replay_run(&header, recs, nr, &map, &res), 0);
    model.replays++;
    model.changed += res.nr_set > 0;
    if (res.is_void && model.mut != SKIP_BIT && model.mut != SKIP_EPOCH && model.mut != SKIP_BOOT)
        wrong("a journal with the right guard is void: %s", res.why);
    for (size_t i = 0; i < res.nr_unused; i++) {
        unsigned h = (unsigned)res.unused[i] - HOST_FIRST;

        s->adopt |= (uint8_t)(1u << h);
        if (model.mut != REPLAY_DECREMENTS)
            continue;
        if (!s->ref[h].cur)
            wrong("host cluster %u is counted down below 0", h);
        put(&s->ref[h], 0);
    }
    s->adopt |= s->j_unused;
    load_map(s);
    for (unsigned h = 0; h < H_MAX; h++)
        if (!s->ref[h].cur || !s->m_block)
            s->adopt &= (uint8_t) ~(1u << h);
    replay_result_fini(&res);
}

SUSPENDS static bool open_image(struct state *s)
{
    bool guard = (s->bit || model.mut == SKIP_BIT) &&
                 (s->hdr_epoch == s->j_epoch || model.mut == SKIP_EPOCH);

    if (s->phase != DEAD)
        return false;
    load_map(s);
    s->phase = REPLAYED;
    if (guard && s->j_epoch)
        replay(s);
    else
        model.voids++;
    for (unsigned g = 0; g < G; g++) {
        unsigned c = content_of(s, s->m[g]);

        if (!(s->last[g] >> c & 1))
            wrong("opened: guest cluster %u reads content %u, not one of %#x", g, c, s->last[g]);
        s->last[g] = (uint16_t)(1u << c);
        if (host_of(s->m[g]) >= 0 && (!s->ref[host_of(s->m[g])].cur || !s->m_block))
            wrong("opened: the host cluster of guest cluster %u is not counted", g);
        if (host_of(s->m[g]) >= 0 && s->adopt >> host_of(s->m[g]) & 1)
            wrong("opened: the host cluster of guest cluster %u is taken for unused", g);
    }
    if (host_of(s->m[0]) >= 0 && host_of(s->m[0]) == host_of(s->m[1]))
        wrong("opened: a host cluster is mapped twice");
    return true;
}

/* Replayed and flushed: an empty journal with a new epoch, then the header has it, too. */
static bool step_session(struct state *s)
{
    bool done = s->next_set == s->nr_sets;

    if (s->phase != REPLAYED || (!done && (s->session_step || model.mut != SESSION_BEFORE_REPLAY)))
        return false;
    if (s->session_step++ == 0) {
        s->j_epoch = s->next_epoch++;
        s->j_unused = s->adopt;
        trim(s, s->nr_recs);
        return true;
    }
    s->bit = 1;
    s->hdr_epoch = s->j_epoch;
    s->pool = s->adopt;
    s->reused = s->adopt;
    s->session_step = s->adopt = s->nr_sets = s->next_set = 0;
    memset(s->set, 0, sizeof(s->set));
    s->phase = RUNNING;
    return true;
}

/* ---- others ---- */

/* Opens, looks, writes cluster g (G: none), flushes and closes. What it sees is the truth. */
static void write_by_others(struct state *s, unsigned g)
{
    if (g < G && !s->l1.cur) {
        put(&s->l1, 1);
        for (unsigned i = 0; i < G; i++)
            put(&s->l2[i], V_NONE);
    }
    for (unsigned h = 0; g < G && !s->block.cur && h < H_MAX; h++)
        put(&s->ref[h], 0);
    if (g < G)
        put(&s->block, 1);
    for (unsigned h = 0; g < G && h < model.sc->hosts && host_of(s->l2[g].cur) < 0; h++) {
        if (s->ref[h].cur)
            continue;
        put(&s->ref[h], 1);
        put(&s->l2[g], V_DATA + h);
    }
    if (g < G && host_of(s->l2[g].cur) >= 0) {
        unsigned h = (unsigned)host_of(s->l2[g].cur);

        put(&s->l2[g], V_DATA + h);
        put(&s->data[h], s->next_content);
    }
    s->next_content++;
    device_flush(s);
    for (unsigned i = 0; i < G; i++)
        s->last[i] = s->flushed[i] = s->since[i] =
            (uint16_t)(1u << content_of(s, disk_value(s, i)));
}

static bool others(struct state *s, unsigned g, bool knows_bit)
{
    if (s->phase != DEAD || !s->others_left)
        return false;
    s->others_left--;
    write_by_others(s, g);
    s->bit = knows_bit;
    if (knows_bit)
        s->hdr_epoch = EPOCH_OTHER;
    return true;
}

/* A snapshot is taken: everything is in the image, the bit is clear, the journal is gone. */
static bool drain(struct state *s)
{
    if (s->phase != RUNNING || s->run != RUN_IDLE || s->op[0].kind || s->op[1].kind ||
        !s->others_left || !s->m_l1)
        return false;
    if (model.mut != NO_DRAIN) {
        device_flush(s);
        put(&s->block, s->m_block);
        device_flush(s);
        for (unsigned g = 0; g < G; g++)
            put(&s->l2[g], s->m[g]);
        device_flush(s);
        put(&s->l1, s->m_l1);
        device_flush(s);
        memcpy(s->flushed, s->last, sizeof(s->flushed));
        s->bit = 0;
        trim(s, s->nr_recs);
        s->j_epoch = s->j_unused = 0;
    }
    s->kills_left++; /* not a kill, but the same forgetting */
    (void)kill_it(s);
    s->phase = BACKING;
    return true;
}

/* QEMU writes into its backing file: it leaves the bit as it is. */
static bool write_backing(struct state *s, unsigned g)
{
    if (s->phase != BACKING || !s->others_left)
        return false;
    s->others_left--;
    write_by_others(s, g);
    s->phase = DEAD;
    return true;
}

/* ---- all that can happen ---- */

static bool act_on_cluster(struct state *s, unsigned i, const char **how)
{
    static const char *const names[] = {"begin write", "begin discard", "begin zero", "step of op"};
    unsigned g = i % G;

    *how = names[i / G];
    switch (i / G) {
    case 0:
        return begin_write(s, g);
    case 1:
        return begin_zero(s, g, false);
    case 2:
        return begin_zero(s, g, true);
    default:
        return step_op(s, g);
    }
}

bool model_act(struct state *s, unsigned i, const char **how)
{
    static const char *const names[] = {
        "link",   "release", "refill",  "flush begins", "flush",
        "kill",   "open",    "session", "drain",        "cover",
        "replay", "",        "QEMU",    "other varve",  "QEMU into its backing file"};

    if (i < ACT_OP)
        return act_on_cluster(s, i, how);
    i -= ACT_OP;
    *how = names[MIN(i, 11u)];
    switch (i) {
    case 0:
        return step_link(s);
    case 1:
        return release(s);
    case 2:
        return refill(s);
    case 3:
        return run_begin(s);
    case 4:
        return run_step(s);
    case 5:
        return kill_it(s);
    case 6:
        return open_image(s);
    case 7:
        return step_session(s);
    case 8:
        return drain(s);
    case 9:
        return cover(s);
    case 10:
        return step_replay(s);
    case 11:
        return false;
    }
    i -= ACT_REST;
    *how = names[12 + i / (G + 1)];
    if (i / (G + 1) == 2)
        return write_backing(s, i % (G + 1));
    return others(s, i % (G + 1), i / (G + 1) == 1);
}

/* Without the boot id a journal would be believed after a power cut: any of what the disk may hold.
 */
void model_cut_and_open(const struct state *s)
{
    struct loc *locs;
    struct state cut = *s;
    unsigned nr = 1 + G + H_MAX, choice[1 + G + H_MAX] = {0};

    if (s->phase != DEAD)
        return;
    locs = &cut.l1; /* l1, l2, data lie side by side */
    for (;;) {
        unsigned i = 0;

        for (unsigned k = 0; k < nr; k++) {
            unsigned may = (&s->l1)[k].may, skip = choice[k];

            while (skip--)
                may &= may - 1;
            locs[k].cur = (uint8_t)__builtin_ctz(may);
        }
        memcpy(cut.last, s->flushed, sizeof(cut.last));
        struct state opened = cut;
        (void)open_image(&opened);
        while (i < nr && ++choice[i] == (unsigned)__builtin_popcount((&s->l1)[i].may))
            choice[i++] = 0;
        if (i == nr)
            return;
    }
}
