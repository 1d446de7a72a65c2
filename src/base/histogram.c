/* Counts by duration: see histogram.h. Bucket 0 is below a microsecond; bucket 1 + 4 * o + f holds
 * [2^o * (4 + f) / 4, 2^o * (5 + f) / 4) microseconds. */
#include "base/histogram.h"

void histogram_add(struct histogram *h, uint64_t ns)
{
    uint64_t us4 = ns / 250; /* quarters of a microsecond: the two bits below the octave matter */
    unsigned i = 0;

    if (us4 >= 4) {
        unsigned octave = 61u - (unsigned)__builtin_clzll(us4);

        i = 1 + 4 * octave + (unsigned)(us4 >> octave & 3);
    }
    h->counts[i < HISTOGRAM_BUCKETS ? i : HISTOGRAM_BUCKETS - 1]++;
    h->sum_ns += ns;
}

void histogram_merge(struct histogram *h, const struct histogram *other)
{
    for (unsigned i = 0; i < HISTOGRAM_BUCKETS; i++)
        h->counts[i] += other->counts[i];
    h->sum_ns += other->sum_ns;
}

uint64_t histogram_end(unsigned i)
{
    if (i >= HISTOGRAM_BUCKETS - 1)
        return UINT64_MAX;
    if (i == 0)
        return 1000;
    return ((5ull + (i - 1) % 4) << (i - 1) / 4) * 250;
}

uint64_t histogram_total(const struct histogram *h)
{
    uint64_t sum = 0;

    for (unsigned i = 0; i < HISTOGRAM_BUCKETS; i++)
        sum += h->counts[i];
    return sum;
}

uint64_t histogram_quantile(const struct histogram *h, double q)
{
    uint64_t total = histogram_total(h), sum = 0;

    if (!total)
        return 0;
    for (unsigned i = 0; i < HISTOGRAM_BUCKETS; i++) {
        sum += h->counts[i];
        if ((double)sum >= q * (double)total)
            return histogram_end(i);
    }
    return UINT64_MAX;
}
