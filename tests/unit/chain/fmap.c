/* The flattened map against a plain array, its bound, its generations and its epochs. */
#include "base/bits.h"
#include "chain/fmap.h"
#include "rt/sim.h"
#include "test.h"

#define UNIT  4096u
#define CELLS 4096u /* 16 MiB of guest space: four slices */
#define SLOTS 5u

struct cell { /* what the map may say of a unit; layer 0: nothing */
    bool known;
    unsigned slot, kind;
    uint64_t host;
};

struct model {
    struct bound bound;
    struct fmap map;
    struct cell cells[CELLS];
    uint64_t rng;
};

static struct model *model_new(uint64_t bound)
{
    struct model *m = calloc(1, sizeof(*m));

    CHECK(m);
    bound_init(&m->bound, bound);
    fmap_init(&m->map, UNIT, &m->bound);
    for (unsigned i = 0; i < SLOTS; i++)
        CHECK_EQ(fmap_add_layer(&m->map, i), 0);
    m->rng = test_seed();
    return m;
}

static void model_free(struct model *m)
{
    fmap_check_invariants(&m->map);
    fmap_fini(&m->map);
    CHECK_EQ(m->map.member.bytes, 0);
    free(m);
}

/* The map may have forgotten, it may not say anything else. Returns whether it knew. */
static bool check_cell(struct model *m, unsigned i)
{
    struct fmap_entry e;
    const struct cell *c = &m->cells[i];

    if (!fmap_lookup(&m->map, (uint64_t)i * UNIT, &e))
        return false;
    CHECK(c->known);
    CHECK_EQ(e.slot, c->slot);
    CHECK_EQ(e.kind, c->kind);
    CHECK_EQ(e.guest_off, (uint64_t)i * UNIT);
    CHECK(e.len >= UNIT && is_aligned(e.len, UNIT));
    if (e.kind == FMAP_DATA)
        CHECK_EQ(e.host_off, c->host);
    return true;
}

static void insert_random(struct model *m)
{
    unsigned first = (unsigned)rng_below(&m->rng, CELLS);
    unsigned nr = 1 + (unsigned)rng_below(&m->rng, rng_below(&m->rng, 4) ? 8 : 900);
    struct fmap_entry e = {
        .kind = (enum fmap_kind)rng_below(&m->rng, FMAP_HOLE + 1),
        .slot = (unsigned)rng_below(&m->rng, SLOTS),
        .guest_off = (uint64_t)first * UNIT,
        .host_off = rng_below(&m->rng, 4) * GIB + (uint64_t)first * UNIT,
    };

    nr = MIN(nr, CELLS - first);
    e.len = (uint64_t)nr * UNIT;
    CHECK(fmap_insert(&m->map, fmap_gen(&m->map, e.guest_off), &e));
    unsigned end =
        (unsigned)(MIN(fmap_slice_end(&m->map, e.guest_off), e.guest_off + e.len) / UNIT);
    for (unsigned i = first; i < end; i++)
        m->cells[i] =
            (struct cell){true, e.slot, e.kind, e.host_off + (uint64_t)(i - first) * UNIT};
}

static void forget_random(struct model *m)
{
    unsigned first = (unsigned)rng_below(&m->rng, CELLS);
    unsigned nr = MIN(1 + (unsigned)rng_below(&m->rng, 2000), CELLS - first);

    fmap_forget(&m->map, (uint64_t)first * UNIT, (uint64_t)nr * UNIT);
    for (unsigned i = first; i < first + nr; i++)
        m->cells[i].known = false;
}

static void confirm_random(struct model *m)
{
    unsigned first = (unsigned)rng_below(&m->rng, CELLS);
    unsigned nr = MIN(1 + (unsigned)rng_below(&m->rng, 4), CELLS - first);
    uint64_t host = m->cells[first].known ? m->cells[first].host : GIB;
    unsigned slot = m->cells[first].slot;

    fmap_confirm(&m->map, (uint64_t)first * UNIT, (uint64_t)nr * UNIT, slot, host);
    for (unsigned i = first; i < first + nr; i++) {
        struct cell *c = &m->cells[i];
        if (c->slot != slot || c->kind != FMAP_DATA || c->host != host + (i - first) * UNIT)
            c->known = false;
    }
}

static void drop_random(struct model *m)
{
    unsigned slot = (unsigned)rng_below(&m->rng, SLOTS);

    fmap_drop_layer(&m->map, slot);
    for (unsigned i = 0; i < CELLS; i++)
        if (m->cells[i].slot == slot)
            m->cells[i].known = false;
}

static void run_random(struct model *m, unsigned steps)
{
    for (unsigned i = 0; i < steps; i++) {
        unsigned what = (unsigned)rng_below(&m->rng, 100);

        if (what < 60)
            insert_random(m);
        else if (what < 85)
            confirm_random(m);
        else if (what < 99)
            forget_random(m);
        else
            drop_random(m);
        for (unsigned k = 0; k < 20; k++)
            check_cell(m, (unsigned)rng_below(&m->rng, CELLS));
        if (i % 64 == 0)
            fmap_check_invariants(&m->map);
    }
}

TEST(agrees_with_an_array)
{
    struct model *m = model_new(64 * MIB);
    unsigned known = 0, told = 0;

    run_random(m, 20000);
    for (unsigned i = 0; i < CELLS; i++) {
        known += m->cells[i].known;
        told += check_cell(m, i);
    }
    /* nothing is evicted, and confirm drops no more than it must by whole ranges */
    CHECK(known > 100 && told * 10 > known * 5);
    model_free(m);
}

TEST(stays_inside_its_bound)
{
    struct model *m = model_new(24 * KIB);

    for (unsigned i = 0; i < 20000; i++) {
        insert_random(m);
        CHECK(m->map.member.bytes <= 24 * KIB || m->map.slices.used == 1);
        check_cell(m, (unsigned)rng_below(&m->rng, CELLS));
    }
    model_free(m);
}

TEST(linear_run_is_one_extent_in_any_order)
{
    struct model *m = model_new(MIB);

    for (unsigned i = 0; i < 1024; i++) {
        unsigned at = (i * 389) % 1024; /* coprime: each once */
        struct fmap_entry e = {FMAP_DATA, 1, (uint64_t)at * UNIT, UNIT, MIB + (uint64_t)at * UNIT};
        CHECK(fmap_insert(&m->map, fmap_gen(&m->map, e.guest_off), &e));
    }
    struct fmap_entry e;
    CHECK(fmap_lookup(&m->map, 5 * UNIT + 512, &e));
    CHECK_EQ(e.len, 1024ull * UNIT - 5 * UNIT - 512);
    CHECK_EQ(e.host_off, MIB + 5 * UNIT + 512);
    model_free(m);
}

TEST(insert_after_a_change_is_refused)
{
    struct model *m = model_new(MIB);
    struct fmap_entry e = {FMAP_ZERO, 0, 8 * UNIT, UNIT, 0}, got;
    uint32_t gen = fmap_gen(&m->map, e.guest_off);

    fmap_forget(&m->map, 8 * UNIT, UNIT);
    CHECK(!fmap_insert(&m->map, gen, &e));
    gen = fmap_gen(&m->map, e.guest_off);
    fmap_confirm(&m->map, 8 * UNIT, UNIT, 0, MIB);
    CHECK(!fmap_insert(&m->map, gen, &e));
    CHECK(!fmap_lookup(&m->map, 8 * UNIT, &got));
    CHECK_EQ(m->map.stale_inserts, 2);
    gen = fmap_gen(&m->map, e.guest_off);
    fmap_forget(&m->map, 1 * GIB, UNIT); /* elsewhere */
    CHECK(fmap_insert(&m->map, gen, &e));
    CHECK(fmap_lookup(&m->map, 8 * UNIT, &got));
    model_free(m);
}

TEST(slot_used_again_finds_nothing_of_its_earlier_owner)
{
    struct model *m = model_new(MIB);
    struct fmap_entry e = {FMAP_DATA, 2, 0, MIB, 0}, got;

    CHECK(fmap_insert(&m->map, fmap_gen(&m->map, 0), &e));
    fmap_drop_layer(&m->map, 2);
    CHECK(!fmap_lookup(&m->map, 0, &got));
    CHECK_EQ(fmap_add_layer(&m->map, 2), 0);
    CHECK(!fmap_lookup(&m->map, 0, &got));
    model_free(m);
}

TEST(huge_forget_reaches_every_slice)
{
    struct model *m = model_new(MIB);
    struct fmap_entry e = {FMAP_DATA, 2, 0, MIB, 0}, got;

    for (unsigned i = 0; i < 4; i++) {
        e.guest_off = i * 100 * GIB;
        CHECK(fmap_insert(&m->map, fmap_gen(&m->map, e.guest_off), &e));
    }
    uint32_t gen = fmap_gen(&m->map, 200 * GIB);
    fmap_forget(&m->map, 100 * GIB + 4096, 8000 * TIB);
    CHECK(gen != fmap_gen(&m->map, 200 * GIB));
    CHECK(fmap_lookup(&m->map, 0, &got));
    CHECK(fmap_lookup(&m->map, 100 * GIB, &got));
    CHECK_EQ(got.len, 4096);
    CHECK(!fmap_lookup(&m->map, 200 * GIB, &got));
    CHECK(!fmap_lookup(&m->map, 300 * GIB, &got));
    model_free(m);
}

/* ---- what an extent is ---- */

static bool insert(struct model *m, enum fmap_kind kind, unsigned slot, uint64_t off, uint64_t len,
                   uint64_t host_off)
{
    struct fmap_entry e = {kind, slot, off, len, host_off};

    return fmap_insert(&m->map, fmap_gen(&m->map, off), &e);
}

TEST(fragments_take_a_dozen_bytes)
{
    struct model *m = model_new(64 * MIB);
    uint64_t nr = 64 * MIB / UNIT;

    for (uint64_t i = 0; i < nr; i++) {
        uint64_t at = i * 389 % nr;

        CHECK(insert(m, FMAP_DATA, (unsigned)(at % SLOTS), at * UNIT, UNIT, GIB + at * 3 * UNIT));
    }
    CHECK(m->map.member.bytes < nr * 14);
    for (uint64_t at = 0; at < nr; at++) {
        struct fmap_entry e;

        CHECK(fmap_lookup(&m->map, at * UNIT + 512, &e));
        CHECK(e.slot == at % SLOTS && e.len == UNIT - 512);
        CHECK_EQ(e.host_off, GIB + at * 3 * UNIT + 512);
    }
    model_free(m);
}

/* Rule (f): the layer reads what is compressed by guest offset; clusters of it are one extent. */
TEST(compressed_extents_have_no_place)
{
    struct model *m = model_new(MIB);
    struct fmap_entry e;

    CHECK(insert(m, FMAP_COMPRESSED, 1, 0, 4 * UNIT, 12345));
    CHECK(insert(m, FMAP_COMPRESSED, 1, 4 * UNIT, 4 * UNIT, 777));
    CHECK(fmap_lookup(&m->map, UNIT, &e));
    CHECK(e.kind == FMAP_COMPRESSED && e.len == 7 * UNIT && e.host_off == 0);
    /* a write in place elsewhere does not make it data */
    fmap_confirm(&m->map, 0, UNIT, 1, 12345 * UNIT);
    CHECK(!fmap_lookup(&m->map, 0, &e));
    model_free(m);
}

/* Rule (c): the end of a shorter layer is a kind of its own, and not of the lowest layer. */
TEST(the_end_of_a_layer_is_not_a_hole)
{
    struct model *m = model_new(MIB);
    struct fmap_entry e;

    CHECK(insert(m, FMAP_HOLE, 4, 0, 4 * UNIT, 0));
    CHECK(insert(m, FMAP_EOF, 1, 4 * UNIT, 4 * UNIT, 0));
    CHECK(fmap_lookup(&m->map, 0, &e));
    CHECK(e.kind == FMAP_HOLE && e.len == 4 * UNIT);
    CHECK(fmap_lookup(&m->map, 4 * UNIT, &e));
    CHECK(e.kind == FMAP_EOF && e.slot == 1);
    fmap_forget(&m->map, 6 * UNIT, 1000 * TIB); /* it grew */
    CHECK(fmap_lookup(&m->map, 5 * UNIT, &e) && e.len == UNIT);
    CHECK(!fmap_lookup(&m->map, 6 * UNIT, &e));
    model_free(m);
}

TEST(what_is_not_on_grains_is_not_kept)
{
    struct model *m = model_new(MIB);
    struct fmap_entry e;

    CHECK(!insert(m, FMAP_DATA, 1, 100, UNIT, 0));
    CHECK(!insert(m, FMAP_DATA, 1, UNIT, UNIT, 100));
    CHECK(!insert(m, FMAP_ZERO, 1, UNIT, 100, 0));
    CHECK(!insert(m, FMAP_DATA, 1, UNIT, UNIT, 1ull << 56));
    CHECK(!fmap_lookup(&m->map, UNIT, &e));
    /* an end inside a grain: that grain is asked for again */
    CHECK(insert(m, FMAP_DATA, 1, UNIT, UNIT + 100, (1ull << 56) - GIB));
    CHECK(fmap_lookup(&m->map, UNIT + 3, &e));
    CHECK(e.len == UNIT - 3 && e.host_off == (1ull << 56) - GIB + 3);
    CHECK(!fmap_lookup(&m->map, 2 * UNIT, &e));
    /* changes reach every grain that they touch */
    fmap_forget(&m->map, UNIT + 700, 1);
    CHECK(fmap_lookup(&m->map, UNIT, &e) && e.len == 512);
    CHECK(!fmap_lookup(&m->map, UNIT + 512, &e));
    CHECK(fmap_lookup(&m->map, UNIT + 1024, &e));
    fmap_confirm(&m->map, UNIT + 1100, 100, 1, (1ull << 56) - GIB + 1100);
    CHECK(!fmap_lookup(&m->map, UNIT + 1024, &e));
    model_free(m);
}

TEST(a_layer_that_goes_takes_its_extents_wherever_they_are)
{
    struct model *m = model_new(8 * MIB);
    struct fmap_entry e;

    for (uint64_t i = 0; i < 2000; i++) /* in many slices */
        CHECK(insert(m, FMAP_DATA, (unsigned)(i % SLOTS), i * 3 * MIB, UNIT, GIB + i * UNIT));
    fmap_drop_layer(&m->map, 2);
    CHECK(insert(m, FMAP_DATA, 3, 2 * 3 * MIB, UNIT, 0)); /* its place is free */
    CHECK_EQ(fmap_add_layer(&m->map, 2), 0);
    CHECK(insert(m, FMAP_DATA, 2, 7 * 3 * MIB, UNIT, 5 * UNIT));
    for (uint64_t i = 0; i < 2000; i++) {
        bool found = fmap_lookup(&m->map, i * 3 * MIB, &e);

        CHECK_EQ(found, i % SLOTS != 2 || i == 2 || i == 7);
        CHECK(i != 7 || e.host_off == 5 * UNIT);
    }
    model_free(m);
}
