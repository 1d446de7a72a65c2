/*
 * Growable array of any element type: VEC(int) v = {0}; vec_push(&v, 3); v.data[0]; vec_free(&v).
 * vec_push returns 0 or -ENOMEM. The vector owns its storage, not what elements point at.
 */
#ifndef VARVE_BASE_VEC_H
#define VARVE_BASE_VEC_H

#include <errno.h>
#include <string.h>
#include "base/own.h"

#define VEC(type)                                                                                  \
    struct {                                                                                       \
        type *data;                                                                                \
        size_t len, cap;                                                                           \
    }
#define vec_push(v, ...)                                                                           \
    ({                                                                                             \
        int vec_rc_ = vec_grow_((void **)&(v)->data, &(v)->cap, (v)->len + 1, sizeof(*(v)->data)); \
        if (vec_rc_ == 0)                                                                          \
            (v)->data[(v)->len++] = (__typeof__(*(v)->data))__VA_ARGS__;                           \
        vec_rc_;                                                                                   \
    })
#define vec_reserve(v, n) vec_grow_((void **)&(v)->data, &(v)->cap, (n), sizeof(*(v)->data))
#define vec_free(v)                                                                                \
    do {                                                                                           \
        free((v)->data);                                                                           \
        (v)->data = NULL;                                                                          \
        (v)->len = (v)->cap = 0;                                                                   \
    } while (0)
#define vec_remove_at(v, i)                                                                        \
    do {                                                                                           \
        memmove(&(v)->data[i], &(v)->data[(i) + 1],                                                \
                ((v)->len - (size_t)(i)-1) * sizeof(*(v)->data));                                  \
        (v)->len--;                                                                                \
    } while (0)
#define vec_for_each(it, v)                                                                        \
    for (__typeof__(*(v)->data) *it = (v)->data; (v)->len && it < (v)->data + (v)->len; it++)

/* qsort() that takes an empty array without storage. */
static inline void sort_items(void *items, size_t nr, size_t item_len,
                              int (*compare)(const void *a, const void *b))
{
    if (nr > 1)
        qsort(items, nr, item_len, compare);
}

static inline int vec_grow_(void **data, size_t *cap, size_t need, size_t elem)
{
    if (need <= *cap)
        return 0;
    size_t new_cap = *cap ? *cap * 2 : 8;
    if (new_cap < need)
        new_cap = need;
    void *grown = reallocarray(*data, new_cap, elem);
    if (!grown)
        return -ENOMEM;
    *data = grown;
    *cap = new_cap;
    return 0;
}

#endif
