/* Alignment, overflow-checked ranges, bit ranges in 32- and 64-bit words. */
#ifndef VARVE_BASE_BITS_H
#define VARVE_BASE_BITS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define KIB (1ull << 10)
#define MIB (1ull << 20)
#define GIB (1ull << 30)
#define TIB (1ull << 40)

static inline uint64_t align_down(uint64_t v, uint64_t pow2)
{
    return v & ~(pow2 - 1);
}
/* The caller knows that v + pow2 does not wrap. */
static inline uint64_t align_up(uint64_t v, uint64_t pow2)
{
    return (v + pow2 - 1) & ~(pow2 - 1);
}
static inline bool is_aligned(uint64_t v, uint64_t pow2)
{
    return (v & (pow2 - 1)) == 0;
}
static inline bool is_pow2(uint64_t v)
{
    return v && !(v & (v - 1));
}
static inline uint64_t div_up(uint64_t v, uint64_t by)
{
    return v / by + (v % by != 0);
}
/* [off, off + len) lies inside [0, limit); never wraps. */
static inline bool range_ok(uint64_t off, uint64_t len, uint64_t limit)
{
    return off <= limit && len <= limit - off;
}
/* The two ranges share a byte. Neither may wrap. */
static inline bool ranges_overlap(uint64_t a, uint64_t alen, uint64_t b, uint64_t blen)
{
    return a < b + blen && b < a + alen;
}
/* A word with bits [first, first + nr) set; first + nr <= 32. */
static inline uint32_t mask32(unsigned first, unsigned nr)
{
    return nr == 0 ? 0 : (nr >= 32 ? UINT32_MAX : ((1u << nr) - 1)) << first;
}
static inline uint64_t hash64(uint64_t v)
{
    v ^= v >> 33;
    v *= 0xff51afd7ed558ccdull;
    v ^= v >> 33;
    v *= 0xc4ceb9fe1a85ec53ull;
    return v ^ (v >> 33);
}

#endif
