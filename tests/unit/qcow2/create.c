/* Created images against those of qemu-img: information, checks, contents, preallocation. */
#include "base/bits.h"
#include "base/own.h"
#include "qcow2/refscan.h"
#include "util.h"

static const char *const prealloc_names[] = {"off", "metadata", "falloc", "full"};

static const char *compare_info =
    "import json, sys\n"
    "def load(f):\n"
    "    d = json.load(open(f))\n"
    "    for k in ('filename', 'actual-size', 'full-backing-filename', 'children'):\n"
    "        d.pop(k, None)\n"
    "    return d\n"
    "a, b = load(sys.argv[1]), load(sys.argv[2])\n"
    "if a != b: sys.exit('%s\\n%s' % (a, b))\n";

static void write_script(void)
{
    FILE *f = fopen(t_path("info.py"), "w");

    CHECK(f && fputs(compare_info, f) >= 0 && fclose(f) == 0);
}

static void qemu_create(const char *name, const struct image_create_opts *o)
{
    char backing[300] = "";

    if (o->backing_name)
        snprintf(backing, sizeof(backing), "-u -b %s -F %s", o->backing_name, o->backing_format);
    test_sh("qemu-img create -q -f qcow2 -o compat=%s,cluster_size=%llu,extended_l2=%s,"
            "refcount_bits=%u,lazy_refcounts=%s%s,preallocation=%s %s %s %llu >/dev/null",
            o->version == 2 ? "0.10" : "1.1", (unsigned long long)o->cluster_size,
            o->extended_l2 ? "on" : "off", o->refcount_bits, o->lazy_refcounts ? "on" : "off",
            o->compression == QCOW2_ZSTD ? ",compression_type=zstd" : "",
            prealloc_names[o->prealloc], backing, t_path(name), (unsigned long long)o->virtual_len);
}

static void compare_figures(void)
{
    test_sh("qemu-img info -U --output=json %s > %s", t_path("ours.qcow2"), t_path("a.json"));
    test_sh("qemu-img info -U --output=json %s > %s", t_path("theirs.qcow2"), t_path("b.json"));
    test_sh("python3 %s %s %s", t_path("info.py"), t_path("a.json"), t_path("b.json"));
}

SUSPENDS static void against_qemu(const struct image_create_opts *o)
{
    unlink(t_path("ours.qcow2"));
    unlink(t_path("theirs.qcow2"));
    t_image("ours.qcow2", o);
    qemu_create("theirs.qcow2", o);
    compare_figures();
    t_qemu_check("ours.qcow2", 0, 0);
    test_sh("qemu-img compare -q %s %s", t_path("ours.qcow2"), t_path("theirs.qcow2"));
    struct image_check res;

    CHECK_EQ(t_check("ours.qcow2", &res), 0);
    CHECK_EQ(res.corruptions + res.leaks + res.check_errors, 0);
}

CO_TEST(every_geometry)
{
    test_need("qemu-img");
    test_need("python3");
    write_script();
    for (unsigned bits = 9; bits <= 21; bits++) {
        for (unsigned k = bits % 3; k < 7; k += 3) {
            struct image_create_opts o = {
                .virtual_len = k % 3 == 0 ? 0 : (k % 3 == 1 ? MIB + 512 : 9 * MIB),
                .version = k == 6 ? 2 : 3,
                .cluster_size = 1ull << bits,
                .refcount_bits = k == 6 ? 16 : 1u << (bits + k) % 7,
                .lazy_refcounts = k == 1,
                .compression = k == 2 ? QCOW2_ZSTD : QCOW2_ZLIB,
                .extended_l2 = bits >= 14 && (k == 3 || k == 4),
                .prealloc = (enum qcow2_prealloc)((bits + k) % 4),
            };

            against_qemu(&o);
        }
    }
}

CO_TEST(every_refcount_width)
{
    test_need("qemu-img");
    write_script();
    for (unsigned order = 0; order < 7; order++) {
        for (int prealloc = (int)order % 2; prealloc <= PREALLOC_FULL; prealloc += 2) {
            struct image_create_opts o = {.virtual_len = MIB + 1536,
                                          .version = 3,
                                          .cluster_size = order % 2 ? 1024 : 16384,
                                          .extended_l2 = order % 2 == 0,
                                          .refcount_bits = 1u << order,
                                          .prealloc = (enum qcow2_prealloc)prealloc};

            against_qemu(&o);
        }
    }
}

CO_TEST(overlays)
{
    test_need("qemu-img");
    test_need("qemu-io");
    write_script();
    test_sh("qemu-img create -q -f raw %s 3M && qemu-io -f raw -c 'write -P 7 0 3M' %s >/dev/null",
            t_path("base.raw"), t_path("base.raw"));
    for (int prealloc = PREALLOC_OFF; prealloc <= PREALLOC_FULL; prealloc++) {
        struct image_create_opts o = {.virtual_len = 4 * MIB,
                                      .version = 3,
                                      .cluster_size = 128 * KIB,
                                      .extended_l2 = true,
                                      .refcount_bits = 16,
                                      .prealloc = (enum qcow2_prealloc)prealloc,
                                      .backing_name = "base.raw",
                                      .backing_format = "raw"};

        against_qemu(&o);
        test_sh("qemu-io -f qcow2 -c 'read -P 7 0 3M' -c 'read -P 0 3M 1M' -c 'write -P 8 1M 4k' "
                "-c 'read -P 8 1M 4k' -c 'read -P 7 1028k 100k' %s | grep -q failed; test $? = 1",
                t_path("ours.qcow2"));
        t_qemu_check("ours.qcow2", 0, 0);
    }
}

/* Data lies in one piece behind the tables: what a linear map needs. */
CO_TEST(preallocated_image_is_one_run)
{
    struct image_create_opts o = {.virtual_len = 2 * GIB + 512, .prealloc = PREALLOC_METADATA};
    struct qcow2_header hdr;

    t_image("run.qcow2", &o);
    struct blk *blk = t_open("run.qcow2");

    CHECK_EQ(qcow2_header_read(blk, &hdr, NULL), 0);
    uint64_t first = t_get64(blk, t_l2_pos(blk, &hdr, 0));

    for (uint64_t off = 0; off < o.virtual_len; off += 3 * MIB + 64 * KIB)
        CHECK_EQ(t_get64(blk, t_l2_pos(blk, &hdr, off)), first + align_down(off, 64 * KIB));
    qcow2_header_fini(&hdr);
    blk_close(blk);
    struct image_check res;

    CHECK_EQ(t_check("run.qcow2", &res), 0);
    CHECK_EQ(res.allocated_clusters, 32769);
    CHECK_EQ(res.fragmented_clusters, 0);
    t_qemu_check("run.qcow2", 0, 0);
}

/* ---- devices that held other data ---- */

SUSPENDS static struct blk *used_device(uint64_t len)
{
    struct blk *blk;
    _cleanup_(freep) uint8_t *junk = malloc(MIB);

    CHECK(junk);
    memset(junk, 0xee, MIB);
    CHECK_EQ(blk_mem_new(len, 512, &blk), 0);
    for (uint64_t off = 0; off < len; off += MIB)
        CHECK_EQ(blk_write(blk, off, junk, MIB), 0);
    blk->fixed_len = true;
    blk->fresh_zero = blk->zero_tail = false;
    return blk;
}

SUSPENDS static void save(struct blk *blk, const char *name)
{
    struct blk *file = t_create(name);
    _cleanup_(freep) uint8_t *buf = malloc(MIB);

    CHECK(buf);
    for (uint64_t off = 0; off < blk->len; off += MIB) {
        CHECK_EQ(blk_read(blk, off, buf, MIB), 0);
        CHECK_EQ(blk_write(file, off, buf, MIB), 0);
    }
    blk_close(file);
}

CO_TEST(old_content_of_a_device_never_shows)
{
    test_need("qemu-io");
    test_sh("qemu-img create -q -f raw %s 8M && qemu-io -f raw -c 'write -P 7 0 8M' %s >/dev/null",
            t_path("base.raw"), t_path("base.raw"));
    for (unsigned i = 0; i < 32; i++) {
        struct image_create_opts o = {
            .virtual_len = 8 * MIB,
            .version = i & 8 ? 2 : 3,
            .cluster_size = i & 4 ? MIB : 32 * KIB,
            .extended_l2 = i & 16,
            .prealloc = (enum qcow2_prealloc)(i & 3),
        };

        if (image_create_check(&o, NULL) < 0)
            continue;
        for (int overlay = 0; overlay <= o.extended_l2; overlay++) {
            struct blk *blk = used_device(24 * MIB);

            if (overlay) {
                o.backing_name = "base.raw";
                o.backing_format = "raw";
            }
            CHECK_EQ(image_create(blk, &o, NULL), 0);
            save(blk, "dev.qcow2");
            blk_close(blk);
            t_qemu_check("dev.qcow2", 0, 0);
            test_sh("qemu-io -f qcow2 -c 'read -P %d 0 8M' %s | grep -q failed; test $? = 1",
                    overlay ? 7 : 0, t_path("dev.qcow2"));
        }
    }
}

CO_TEST(a_device_that_is_too_small)
{
    struct image_create_opts o = {.virtual_len = 8 * MIB, .prealloc = PREALLOC_METADATA};
    struct blk *blk = used_device(8 * MIB);
    uint64_t required, full;

    CHECK_EQ(image_create(blk, &o, NULL), -ENOSPC);
    CHECK_EQ(t_get64(blk, 0), 0xeeeeeeeeeeeeeeee); /* not touched */
    blk_close(blk);
    CHECK_EQ(image_measure(&o, 0, &required, &full, NULL), 0);
    blk = used_device(align_up(full, MIB));
    CHECK_EQ(image_create(blk, &o, NULL), 0);
    blk_close(blk);
}

/* ---- failures ---- */

SUSPENDS static bool is_sound(struct blk *blk)
{
    struct qcow2_header hdr;
    struct image_check res = {.corruptions = 1};

    if (qcow2_header_read(blk, &hdr, NULL) == 0)
        CHECK_EQ(qcow2_check(blk, &hdr, &res, NULL, NULL, NULL), 0);
    qcow2_header_fini(&hdr);
    return res.corruptions + res.leaks + res.check_errors == 0;
}

/* Whichever request fails: what is left is no image, an old one included. The exception is the
 * very last flush: everything is there then, only not known to be durable. */
CO_TEST(nothing_valid_is_left_after_an_error)
{
    struct image_create_opts o = {.virtual_len = 8 * MIB, .prealloc = PREALLOC_FULL};

    for (unsigned fixed = 0; fixed < 2; fixed++) {
        int rc = -1, still_image = 0;

        for (uint64_t n = 1; rc < 0; n++) {
            struct blk *child, *blk;
            uint8_t magic[4];

            CHECK_EQ(blk_mem_new(16 * MIB, 1, &child), 0);
            CHECK_EQ(image_create(child, &(struct image_create_opts){.virtual_len = MIB}, NULL), 0);
            CHECK_EQ(blk_resize(child, 16 * MIB), 0);
            CHECK_EQ(blk_fault_new(child, &blk), 0);
            blk->fixed_len = fixed;
            blk_fault_fail(blk, BLK_REQ_WRITE | BLK_REQ_FLUSH | BLK_REQ_RESIZE, n, -EIO, false);
            rc = image_create(blk, &o, NULL);
            blk_fault_clear(blk);
            /* the very first request fails: the old image stands untouched */
            if (rc < 0 && n > 1) {
                CHECK_EQ(blk_read(child, 0, magic, 4), 0);
                CHECK(!qcow2_probe(magic, 4) || (blk->flush_failed && is_sound(child)));
                still_image += qcow2_probe(magic, 4);
            }
            CHECK(n < 100);
            blk_close(blk);
        }
        CHECK(still_image <= 1);
    }
}

TEST(options_that_cannot_be)
{
    static const struct image_create_opts cases[] = {
        {.virtual_len = MIB, .version = 1},
        {.virtual_len = MIB, .version = 4},
        {.virtual_len = MIB, .cluster_size = 256},
        {.virtual_len = MIB, .cluster_size = 4 * MIB},
        {.virtual_len = MIB, .cluster_size = 65535},
        {.virtual_len = MIB, .refcount_bits = 3},
        {.virtual_len = MIB, .refcount_bits = 128},
        {.virtual_len = MIB, .version = 2, .refcount_bits = 8},
        {.virtual_len = MIB, .version = 2, .lazy_refcounts = true},
        {.virtual_len = MIB, .version = 2, .extended_l2 = true},
        {.virtual_len = MIB, .version = 2, .compression = QCOW2_ZSTD},
        {.virtual_len = MIB, .extended_l2 = true, .cluster_size = 8192},
        {.virtual_len = MIB, .compression = (enum qcow2_compression)2},
        {.virtual_len = UINT64_MAX},
        {.virtual_len = 1ull << 62, .cluster_size = 2 * MIB},
        {.virtual_len = 129 * GIB, .cluster_size = 512},
        {.virtual_len = MIB, .backing_format = "raw"},
        {.virtual_len = MIB, .backing_name = ""},
        {.virtual_len = MIB, .backing_name = "b", .prealloc = PREALLOC_METADATA},
        {.virtual_len = MIB, .backing_name = "b", .prealloc = PREALLOC_FALLOC},
        {.virtual_len = MIB, .backing_name = "b", .prealloc = PREALLOC_FULL},
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct err err = {0};

        CHECK_EQ(image_create_check(&cases[i], &err), -EINVAL);
        CHECK(err.text[0]);
    }
}

/* Tables of a large disk are streamed: no time, no memory, no data written. */
CO_TEST(one_tebibyte_preallocated)
{
    struct image_create_opts o = {.virtual_len = TIB, .prealloc = PREALLOC_METADATA};
    struct blk *blk = t_create("huge.qcow2");

    CHECK_EQ(image_create(blk, &o, NULL), 0);
    CHECK(blk->stats.write_bytes < 200 * MIB);
    CHECK(blk->stats.writes < 200);
    blk_close(blk);
    struct image_check res;

    CHECK_EQ(t_check("huge.qcow2", &res), 0);
    CHECK_EQ(res.corruptions + res.leaks, 0);
    CHECK_EQ(res.allocated_clusters, 1 << 24);
    unlink(t_path("huge.qcow2"));
}
