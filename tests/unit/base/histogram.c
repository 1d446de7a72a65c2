/* Every duration lies in the bucket whose end is the next one above it. */
#include "base/histogram.h"
#include "test.h"

static unsigned bucket_of(uint64_t ns)
{
    struct histogram h = {0};

    histogram_add(&h, ns);
    CHECK_EQ(histogram_total(&h), 1);
    CHECK_EQ(h.sum_ns, ns);
    for (unsigned i = 0; i < HISTOGRAM_BUCKETS; i++)
        if (h.counts[i])
            return i;
    return HISTOGRAM_BUCKETS;
}

TEST(a_duration_lies_below_the_end_of_its_bucket_alone)
{
    for (unsigned i = 0; i + 1 < HISTOGRAM_BUCKETS; i++) {
        uint64_t end = histogram_end(i);

        CHECK_EQ(bucket_of(end - 1), i);
        CHECK_EQ(bucket_of(end), i + 1);
        CHECK(end < histogram_end(i + 1));
    }
    CHECK_EQ(bucket_of(0), 0);
    CHECK_EQ(bucket_of(UINT64_MAX), HISTOGRAM_BUCKETS - 1);
}

TEST(buckets_are_at_most_a_quarter_wide)
{
    for (unsigned i = 1; i + 1 < HISTOGRAM_BUCKETS; i++)
        CHECK(4 * histogram_end(i) <= 5 * histogram_end(i - 1));
    CHECK(histogram_end(HISTOGRAM_BUCKETS - 2) > 20ull * 1000000000);
}

TEST(quantiles_are_the_ends_of_buckets)
{
    struct histogram h = {0};

    CHECK_EQ(histogram_quantile(&h, .5), 0);
    for (unsigned i = 0; i < 99; i++)
        histogram_add(&h, 1500);
    histogram_add(&h, 1000000);
    CHECK_EQ(histogram_quantile(&h, .5), 1750);
    CHECK_EQ(histogram_quantile(&h, .99), 1750);
    CHECK_EQ(histogram_quantile(&h, 1), 1024000);
}
