/*
 * Refcounts inside a refcount block in disk order: 1 to 64 bits wide, big-endian, and below a
 * byte the lowest bits first. Spec: "Host cluster management".
 */
#ifndef VARVE_QCOW2_REFBITS_H
#define VARVE_QCOW2_REFBITS_H

#include "base/be.h"

static inline uint64_t refbits_max(unsigned order)
{
    return order == 6 ? UINT64_MAX : (1ull << (1u << order)) - 1;
}

static inline uint64_t refbits_get(const void *block, unsigned order, uint64_t index)
{
    switch (order) {
    case 4:
        return be16_get(((const be16 *)block)[index]);
    case 5:
        return be32_get(((const be32 *)block)[index]);
    case 6:
        return be64_get(((const be64 *)block)[index]);
    case 3:
        return ((const uint8_t *)block)[index];
    default: {
        uint64_t bit = index << order;

        return ((const uint8_t *)block)[bit >> 3] >> (bit & 7) & refbits_max(order);
    }
    }
}

/* value <= refbits_max(order) */
static inline void refbits_set(void *block, unsigned order, uint64_t index, uint64_t value)
{
    switch (order) {
    case 4:
        ((be16 *)block)[index] = be16_make((uint16_t)value);
        break;
    case 5:
        ((be32 *)block)[index] = be32_make((uint32_t)value);
        break;
    case 6:
        ((be64 *)block)[index] = be64_make(value);
        break;
    case 3:
        ((uint8_t *)block)[index] = (uint8_t)value;
        break;
    default: {
        uint64_t bit = index << order;
        uint8_t *byte = (uint8_t *)block + (bit >> 3);
        unsigned mask = (unsigned)refbits_max(order) << (bit & 7);

        *byte = (uint8_t)((*byte & ~mask) | (unsigned)value << (bit & 7));
    }
    }
}

#endif
