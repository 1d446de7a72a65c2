/*
 * How long things take: counts by duration, four buckets an octave from a microsecond to half a
 * minute, so a quantile is told within a fifth of itself. Adding is a handful of instructions.
 * One thread; a copy is a snapshot, and the difference of two is what happened between them.
 */
#ifndef VARVE_BASE_HISTOGRAM_H
#define VARVE_BASE_HISTOGRAM_H

#include <stdint.h>

#define HISTOGRAM_BUCKETS 100u

struct histogram {
    uint64_t counts[HISTOGRAM_BUCKETS];
    uint64_t sum_ns;
};

void histogram_add(struct histogram *h, uint64_t ns);
void histogram_merge(struct histogram *h, const struct histogram *other);
/* Where bucket i ends, in ns: durations below it that are not in an earlier one. The last has no
 * end: UINT64_MAX. */
uint64_t histogram_end(unsigned i);
uint64_t histogram_total(const struct histogram *h);
/* The end of the bucket in which the share q (0..1] of all is reached; 0 if there is nothing. */
uint64_t histogram_quantile(const struct histogram *h, double q);

#endif
