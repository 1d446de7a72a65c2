/*
 * Integers in disk and wire order. They are structs of one member so that arithmetic on them
 * does not compile; a read or a write costs one byte swap.
 */
#ifndef VARVE_BASE_BE_H
#define VARVE_BASE_BE_H

#include <endian.h>
#include <stdint.h>

typedef struct {
    uint16_t raw;
} be16;
typedef struct {
    uint32_t raw;
} be32;
typedef struct {
    uint64_t raw;
} be64;

static inline uint16_t be16_get(be16 v)
{
    return be16toh(v.raw);
}
static inline uint32_t be32_get(be32 v)
{
    return be32toh(v.raw);
}
static inline uint64_t be64_get(be64 v)
{
    return be64toh(v.raw);
}
static inline be16 be16_make(uint16_t v)
{
    return (be16){htobe16(v)};
}
static inline be32 be32_make(uint32_t v)
{
    return (be32){htobe32(v)};
}
static inline be64 be64_make(uint64_t v)
{
    return (be64){htobe64(v)};
}

#endif
