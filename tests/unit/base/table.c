/* The hash table against a plain array; keys chosen so that probe sequences collide and wrap. */
#include "base/bits.h"
#include "base/own.h"
#include "base/table.h"
#include "rt/sim.h"
#include "test.h"

enum { KEYS = 600 };

static struct {
    uint64_t key;
    void *value;
} model[KEYS];

/* Half of the keys have their home in the last or first slots of any table up to 1024. */
static void choose_keys(uint64_t *state)
{
    for (unsigned i = 0; i < KEYS; i++) {
        uint64_t key;

        do {
            key = i == 0 ? 0 : i == 1 ? UINT64_MAX : rng_next(state);
        } while (i > 1 && i % 2 && (hash64(key) & 1023) > 3 && (hash64(key) & 1023) < 1020);
        model[i].key = key;
        model[i].value = NULL;
    }
}

static void check_same(const struct table *t)
{
    size_t used = 0, pos = 0, seen = 0;

    for (unsigned i = 0; i < KEYS; i++) {
        CHECK(table_get(t, model[i].key) == model[i].value);
        used += model[i].value != NULL;
    }
    CHECK_EQ(t->used, used);
    for (struct table_slot *s; (s = table_next(t, &pos)); seen++)
        CHECK(s->value && table_get(t, s->key) == s->value);
    CHECK_EQ(seen, used);
    CHECK(t->cap == 0 || (is_pow2(t->cap) && t->used < t->cap));
}

TEST(table_equals_a_plain_array)
{
    struct table t = {0};
    uint64_t state = test_seed();

    choose_keys(&state);
    CHECK(table_get(&t, 5) == NULL && table_remove(&t, 5) == NULL);
    for (unsigned i = 0; i < 30000; i++) {
        unsigned k = (unsigned)rng_below(&state, KEYS);
        /* Phases of growth and of emptying. */
        bool put = rng_below(&state, 10) < ((i / 3000) % 2 ? 3u : 7u);

        if (put) {
            void *value = (void *)(uintptr_t)(1 + rng_below(&state, 1000));

            CHECK_EQ(table_put(&t, model[k].key, value), 0);
            model[k].value = value;
        } else {
            CHECK(table_remove(&t, model[k].key) == model[k].value);
            model[k].value = NULL;
        }
        if (i % 100 == 0)
            check_same(&t);
    }
    check_same(&t);
    table_fini(&t);
    CHECK(t.cap == 0 && table_get(&t, 0) == NULL);
}
