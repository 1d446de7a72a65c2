/*
 * Hash table keyed by u64, values are pointers (never NULL). Open addressing, grows by itself.
 * Owns its slots, not the values. Pointers to slots do not survive a put or a remove.
 */
#ifndef VARVE_BASE_TABLE_H
#define VARVE_BASE_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct table_slot {
    uint64_t key;
    void *value; /* NULL: empty */
};
struct table {
    struct table_slot *slots;
    size_t cap;  /* 0 or a power of two */
    size_t used; /* filled slots */
};

void table_fini(struct table *t);
/* The value, or NULL. */
void *table_get(const struct table *t, uint64_t key);
/* Adds or replaces; 0 or -ENOMEM. */
int table_put(struct table *t, uint64_t key, void *value);
/* Removes and returns the value, NULL if there was none. */
void *table_remove(struct table *t, uint64_t key);
/* Bytes that the next put may add; most add none. */
size_t table_growth(const struct table *t);
/* Gives memory back if few slots are in use; best effort. */
void table_trim(struct table *t);
/* Iterates: *pos starts at 0; returns the next slot or NULL. No put/remove in between. */
struct table_slot *table_next(const struct table *t, size_t *pos);

#endif
