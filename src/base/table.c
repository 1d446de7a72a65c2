/* Hash table with linear probing and backward-shift deletion: see table.h. Load stays under 3/4. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "base/bits.h"
#include "base/table.h"

#define CAP_MIN ((size_t)16)

void table_fini(struct table *t)
{
    free(t->slots);
    *t = (struct table){0};
}

static size_t find_slot(const struct table *t, uint64_t key)
{
    size_t i = hash64(key) & (t->cap - 1);

    while (t->slots[i].value && t->slots[i].key != key)
        i = (i + 1) & (t->cap - 1);
    return i;
}

void *table_get(const struct table *t, uint64_t key)
{
    return t->cap ? t->slots[find_slot(t, key)].value : NULL;
}

static int move_to(struct table *t, size_t cap)
{
    struct table other = {.cap = cap, .used = t->used};

    other.slots = calloc(cap, sizeof(*other.slots));
    if (!other.slots)
        return -ENOMEM;
    for (size_t i = 0; i < t->cap; i++)
        if (t->slots[i].value)
            other.slots[find_slot(&other, t->slots[i].key)] = t->slots[i];
    free(t->slots);
    *t = other;
    return 0;
}

void table_trim(struct table *t)
{
    if (t->cap > CAP_MIN && t->used * 8 <= t->cap)
        (void)move_to(t, t->cap / 2);
}

static bool is_full(const struct table *t)
{
    return (t->used + 1) * 4 > t->cap * 3;
}

size_t table_growth(const struct table *t)
{
    return is_full(t) ? (t->cap ? t->cap * 2 : CAP_MIN) * sizeof(*t->slots) : 0;
}

int table_put(struct table *t, uint64_t key, void *value)
{
    if (is_full(t)) {
        int rc = move_to(t, t->cap ? t->cap * 2 : CAP_MIN);

        if (rc < 0)
            return rc;
    }
    struct table_slot *slot = &t->slots[find_slot(t, key)];
    t->used += !slot->value;
    *slot = (struct table_slot){key, value};
    return 0;
}

void *table_remove(struct table *t, uint64_t key)
{
    if (!t->cap)
        return NULL;
    size_t hole = find_slot(t, key);
    void *value = t->slots[hole].value;
    if (!value)
        return NULL;
    for (size_t i = hole;;) {
        i = (i + 1) & (t->cap - 1);
        if (!t->slots[i].value)
            break;
        size_t home = hash64(t->slots[i].key) & (t->cap - 1);
        /* an entry may move into the hole if its home is not between hole and i */
        if (((i - home) & (t->cap - 1)) >= ((i - hole) & (t->cap - 1))) {
            t->slots[hole] = t->slots[i];
            hole = i;
        }
    }
    t->slots[hole].value = NULL;
    t->used--;
    return value;
}

struct table_slot *table_next(const struct table *t, size_t *pos)
{
    while (*pos < t->cap) {
        struct table_slot *slot = &t->slots[(*pos)++];

        if (slot->value)
            return slot;
    }
    return NULL;
}
