/* image_measure against qemu-img measure, figure by figure. */
#include "base/bits.h"
#include "util.h"

static const char *const prealloc_names[] = {"off", "metadata", "falloc", "full"};

static void qemu_measure(const struct image_create_opts *o, unsigned long long *ret_required,
                         unsigned long long *ret_full)
{
    const char *out = t_path("measure.json");

    *ret_required = *ret_full = 0;
    test_sh("qemu-img measure --output=json --size %llu -O qcow2 -o compat=%s,cluster_size=%llu,"
            "extended_l2=%s,refcount_bits=%u,preallocation=%s > %s",
            (unsigned long long)o->virtual_len, o->version == 2 ? "0.10" : "1.1",
            (unsigned long long)o->cluster_size, o->extended_l2 ? "on" : "off", o->refcount_bits,
            prealloc_names[o->prealloc], out);
    FILE *f = fopen(out, "r");
    char line[200];

    CHECK(f);
    while (fgets(line, sizeof(line), f)) {
        sscanf(line, " \"required\": %llu", ret_required);
        sscanf(line, " \"fully-allocated\": %llu", ret_full);
    }
    fclose(f);
    CHECK(*ret_full);
}

static void compare(const struct image_create_opts *o)
{
    unsigned long long required, full;
    uint64_t our_required, our_full;
    struct err err = {0};

    qemu_measure(o, &required, &full);
    if (image_measure(o, 0, &our_required, &our_full, &err) < 0)
        test_fail(__FILE__, __LINE__, "%s", err_text(&err));
    CHECK_EQ(our_required, required);
    CHECK_EQ(our_full, full);
}

TEST(equals_qemu_img)
{
    static const uint64_t sizes[] = {0, 512, MIB + 512, 100 * GIB, 3 * TIB + 4096};

    test_need("qemu-img");
    for (unsigned bits = 9; bits <= 21; bits++) {
        for (unsigned i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
            struct image_create_opts o = {.virtual_len = sizes[i],
                                          .version = i % 2 ? 2 : 3,
                                          .cluster_size = 1ull << bits,
                                          .refcount_bits = i % 2 ? 16 : 1u << (bits + i) % 7,
                                          .extended_l2 = i == 4 && bits >= 14,
                                          .prealloc = (enum qcow2_prealloc)((bits + i) % 4)};

            if (image_create_check(&o, NULL) == 0)
                compare(&o);
            else /* more than the L1 table can map */
                CHECK(sizes[i] > (1ull << (2 * bits - 3)) * (4 << 20));
        }
    }
}

/* Sizes of logical volumes that a shared volume manager computes for these disks. */
TEST(sizes_of_logical_volumes)
{
    static const struct {
        uint64_t len, base, overlay;
    } cases[] = {
        {4 * MIB, 4521984, 4849664},
        {8 * GIB, 8591507456, 8591638528},
        {100 * GIB, 107390828544, 107389386752},
        {TIB, 1099679662080, 1099663147008},
    };

    for (unsigned i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct image_create_opts base = {.virtual_len = cases[i].len};
        struct image_create_opts overlay = {.virtual_len = cases[i].len,
                                            .cluster_size = 128 * KIB,
                                            .extended_l2 = true,
                                            .backing_name = "base",
                                            .prealloc = PREALLOC_METADATA};
        uint64_t required, full;

        CHECK_EQ(image_measure(&base, 0, &required, &full, NULL), 0);
        CHECK_EQ(full, cases[i].base);
        CHECK_EQ(image_measure(&overlay, 0, &required, &full, NULL), 0);
        CHECK_EQ(full, cases[i].overlay);
    }
}

TEST(data_counts_in_whole_clusters)
{
    struct image_create_opts o = {.virtual_len = MIB};
    uint64_t none, one, all, full;

    CHECK_EQ(image_measure(&o, 0, &none, &full, NULL), 0);
    CHECK_EQ(image_measure(&o, 1, &one, &full, NULL), 0);
    CHECK_EQ(one, none + 64 * KIB);
    CHECK_EQ(image_measure(&o, 10 * MIB, &all, &full, NULL), 0);
    CHECK_EQ(all, full);
    o.virtual_len = UINT64_MAX;
    CHECK_EQ(image_measure(&o, 0, &none, &full, NULL), -EINVAL);
}
