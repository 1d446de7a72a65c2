/*
 * What was answered survives kills; a power cut takes the last second at most.
 *
 * A walk is one image through many sessions in durability `ack`. Each ends at any I/O: killed (what
 * completed is in the file, the journal stays, the device keeps its unflushed cache), cut off from
 * power (any subset of what was not flushed is lost; the journal with it, or it is of an earlier
 * boot), or closed. Many end while they are opening: a kill or a cut in the middle of replay. Now
 * and then another program has the image meanwhile, which knows no journal.
 *
 *  1. Behind kills, however many, everything answered is there, in a read-only view and after
 *     replay; the file alone is consistent, too.
 *  2. Behind a power cut everything flushed is there, and everything that was answered BOUND_NS
 *     before the session ended, by its own clock.
 *  3. Behind others: what was flushed, or old enough, before they came, and nothing of two owners.
 *
 * Each rule is broken once, and must be seen to be. VARVE_WALKS: walks of a configuration.
 */
#include "base/bits.h"
#include "qcow2/internal.h"
#include "test.h"
#include "walk.h"

static const struct config configs[] = {
    {"64k", {.virtual_len = 2 * MIB}, 0, false, 0, 64},
    {"64k over", {.virtual_len = 2 * MIB}, 0, true, 0, 64},
    {"4k", {.virtual_len = MIB, .cluster_size = 4096}, 64 * KIB, false, 0, 32},
    {"volume grows",
     {.virtual_len = 2 * MIB},
     0,
     true,
     24 * MIB,
     64,
     .chunk = 320 * KIB,
     .legs = 4},
    {"volume grows 4k",
     {.virtual_len = 2 * MIB, .cluster_size = 4096},
     64 * KIB,
     false,
     24 * MIB,
     64,
     .chunk = 128 * KIB,
     .legs = 4},
    {"4k cached", {.virtual_len = MIB, .cluster_size = 4096}, 0, true, 0, 32},
    {"512 over",
     {.virtual_len = 512 * KIB, .cluster_size = 512, .refcount_bits = 64},
     0,
     true,
     0,
     32},
    {"ext 128k",
     {.virtual_len = 2 * MIB, .cluster_size = 128 * KIB, .extended_l2 = true},
     0,
     true,
     0,
     64},
    {"ext 16k",
     {.virtual_len = MIB, .cluster_size = 16 * KIB, .extended_l2 = true, .refcount_bits = 1},
     64 * KIB,
     true,
     0,
     32},
    {"volume", {.virtual_len = 2 * MIB}, 0, false, 16 * MIB, 64},
    {"volume 512",
     {.virtual_len = MIB, .cluster_size = 512, .refcount_bits = 64},
     0,
     false,
     12 * MIB,
     32},
    {"volume ext",
     {.virtual_len = 2 * MIB,
      .cluster_size = 32 * KIB,
      .extended_l2 = true,
      .prealloc = PREALLOC_METADATA},
     0,
     true,
     16 * MIB,
     64},
};

/* Many new tables and a volume with old data: where a step of the flush left out shows soonest. */
static const struct config young_configs[] = {
    {"volume 512",
     {.virtual_len = 4 * MIB, .cluster_size = 512, .refcount_bits = 64},
     64 * KIB,
     false,
     16 * MIB,
     32,
     2},
    {"volume 4k", {.virtual_len = 2 * MIB, .cluster_size = 4096}, 64 * KIB, true, 8 * MIB, 32, 2},
    {"file 512",
     {.virtual_len = 4 * MIB, .cluster_size = 512, .refcount_bits = 64},
     64 * KIB,
     false,
     0,
     256,
     2},
};

static unsigned walks_wanted(unsigned usual)
{
    const char *s = getenv("VARVE_WALKS");

    return s ? (unsigned)atoi(s) : usual;
}

static void print_totals(const char *name, const struct totals *t)
{
    printf("  %-10s %llu sessions: %llu kills (%llu while opening; %llu with records, %llu of "
           "them), %llu cuts (%llu in replay; %llu sectors at risk, %llu lost, the oldest answer "
           "%llu ms), %llu closed, %llu by others, %llu views\n",
           name, (unsigned long long)t->legs, (unsigned long long)t->kills,
           (unsigned long long)t->in_open_kills, (unsigned long long)t->kills_with_records,
           (unsigned long long)t->records, (unsigned long long)t->cuts,
           (unsigned long long)t->in_open_cuts, (unsigned long long)t->at_risk,
           (unsigned long long)t->lost, (unsigned long long)(t->oldest_ns / NSEC_PER_MSEC),
           (unsigned long long)t->closed, (unsigned long long)t->foreign,
           (unsigned long long)t->views);
}

static void add(struct totals *sum, const struct totals *t)
{
    const uint64_t *from = (const uint64_t *)t;
    uint64_t *to = (uint64_t *)sum, oldest = MAX(sum->oldest_ns, t->oldest_ns);

    for (unsigned i = 0; i < sizeof(*t) / sizeof(uint64_t); i++)
        to[i] += from[i];
    sum->oldest_ns = oldest;
}

TEST(answered_writes_survive)
{
    unsigned walks = walks_wanted(12);
    struct totals sum = {0};

    flush_mutation = FLUSH_AS_IS;
    for (const struct config *c = configs; c < configs + ARRAY_SIZE(configs); c++) {
        struct totals t = {0};

        for (unsigned i = 0; i < walks; i++)
            walk(c, test_seed() + i, AS_IS, false, &t);
        print_totals(c->name, &t);
        add(&sum, &t);
    }
    print_totals("all", &sum);
    CHECK(sum.kills_with_records * 3 > sum.kills - sum.in_open_kills);
    CHECK(sum.in_open_kills > 0 && sum.in_open_cuts > 0 && sum.views > 0);
    CHECK(sum.lost > 0 && sum.oldest_ns > BOUND_NS / 3 && sum.oldest_ns <= BOUND_NS);
}

/* ---- each rule broken ---- */

static void expect_noticed(enum mutation m, enum flush_mutation product, const char *name)
{
    struct totals t = {0};
    unsigned i = 0;

    flush_mutation = product;
    for (; i < 10000 && t.violations == 0; i++)
        walk(product && product < ACK_SKIP_ENTRY ? &young_configs[i % ARRAY_SIZE(young_configs)]
                                                 : &configs[i % ARRAY_SIZE(configs)],
             test_seed() + i, m, true, &t);
    flush_mutation = FLUSH_AS_IS;
    fflush(stdout);
    printf("  %-32s noticed after %u walks, %llu sessions\n", name, i, (unsigned long long)t.legs);
    CHECK(t.violations > 0);
}

TEST(a_broken_rule_is_noticed)
{
    expect_noticed(NO_WRITE_BACK, FLUSH_AS_IS, "no write-back by age");
    expect_noticed(NO_JOURNAL, FLUSH_AS_IS, "no journal");
    expect_noticed(ANY_BOOT, FLUSH_AS_IS, "boot id not looked at");
    expect_noticed(ANY_EPOCH, FLUSH_AS_IS, "epoch not looked at");
    expect_noticed(UNFLUSHED_OPEN, FLUSH_AS_IS, "replay does not flush");
    expect_noticed(AS_IS, ACK_SKIP_ENTRY, "an entry without a record");
    expect_noticed(AS_IS, ACK_SKIP_TABLE, "a table without a record");
    expect_noticed(AS_IS, ACK_SKIP_BLOCK, "a refcount block without a record");
    expect_noticed(AS_IS, ACK_TRIM_EARLY, "trimmed when the flush begins");
    expect_noticed(AS_IS, ACK_STALE_RUNS, "used clusters noted as unused");
    expect_noticed(AS_IS, FLUSH_SKIP_BEFORE_L2, "no flush before L2");
    expect_noticed(AS_IS, FLUSH_L1_FIRST, "L1 before its new table");
    expect_noticed(AS_IS, FLUSH_SKIP_REFCOUNTS, "refcounts not written");
    expect_noticed(AS_IS, FLUSH_SKIP_QUARANTINE, "no quarantine");
    expect_noticed(AS_IS, FLUSH_SKIP_BEFORE_REFTABLE, "no flush before reftable");
}
