/* Compressed clusters: those of qemu-img unpacked, and every way in which a stream can be wrong. */
#include <zlib.h>
#include <zstd.h>
#include "base/bits.h"
#include "base/own.h"
#include "qcow2/compress.h"
#include "rt/sim.h"
#include "util.h"

static struct qcow2_header header(unsigned bits, enum qcow2_compression type)
{
    struct qcow2_header hdr = {.version = 3, .cluster_bits = bits, .compression = type};

    qcow2_header_derive(&hdr);
    return hdr;
}

/* Half pattern, half noise. */
static void fill(uint8_t *buf, size_t len, uint64_t seed)
{
    memset(buf, (int)(seed & 0xff), len);
    for (size_t i = len / 2; i < len; i++)
        buf[i] = (uint8_t)rng_next(&seed);
}

static size_t pack(enum qcow2_compression type, void *dst, size_t cap, const void *src, size_t len)
{
    if (type == QCOW2_ZSTD) {
        size_t n = ZSTD_compress(dst, cap, src, len, 3);

        CHECK(!ZSTD_isError(n));
        return n;
    }
    z_stream z = {.next_in = (Bytef *)(uintptr_t)src,
                  .avail_in = (uInt)len,
                  .next_out = dst,
                  .avail_out = (uInt)cap};

    CHECK_EQ(deflateInit2(&z, 9, Z_DEFLATED, -12, 9, Z_DEFAULT_STRATEGY), Z_OK);
    CHECK_EQ(deflate(&z, Z_FINISH), Z_STREAM_END);
    deflateEnd(&z);
    return z.total_out;
}

#define BOTH_TYPES(t)                                                                              \
    for (enum qcow2_compression t = QCOW2_ZLIB; t <= QCOW2_ZSTD;                                   \
         t = (enum qcow2_compression)(t + 1))

CO_TEST(round_trip)
{
    BOTH_TYPES(type)
    {
        for (unsigned bits = 9; bits <= 21; bits++) {
            struct qcow2_header hdr = header(bits, type);
            size_t len = hdr.cluster_size, cap = 2 * len + 1024;
            _cleanup_(freep) uint8_t *src = malloc(len), *packed = calloc(1, cap),
                                     *dst = malloc(len);

            fill(src, len, bits);
            size_t n = pack(type, packed, cap, src, len);

            CHECK_EQ(qcow2_decompress(&hdr, packed, n, dst), 0);
            CHECK(memcmp(src, dst, len) == 0);
            memset(dst, 0, len);
            /* sectors end behind the stream: zeroes or a neighbour's bytes follow */
            memset(packed + n, 0xa5, 512);
            CHECK_EQ(qcow2_decompress(&hdr, packed, n + 511, dst), 0);
            CHECK(memcmp(src, dst, len) == 0);
            CHECK_EQ(qcow2_decompress(&hdr, packed, n / 2, dst), -EIO);
            CHECK_EQ(qcow2_decompress(&hdr, packed, 0, dst), -EIO);
        }
    }
}

CO_TEST(short_and_long_streams)
{
    BOTH_TYPES(type)
    {
        struct qcow2_header hdr = header(16, type);
        size_t len = hdr.cluster_size, big = 16 << 20;
        _cleanup_(freep) uint8_t *src = calloc(1, big), *packed = calloc(1, 2 * len);
        _cleanup_(freep) uint8_t *dst = calloc(1, len + 16);
        size_t n = pack(type, packed, 2 * len, src, 1000);

        CHECK_EQ(qcow2_decompress(&hdr, packed, n, dst), -EIO);
        CHECK_EQ(qcow2_decompress(&hdr, packed, n + 400, dst), -EIO);
        n = pack(type, packed, 2 * len, src, len - 1);
        CHECK_EQ(qcow2_decompress(&hdr, packed, n, dst), -EIO);
        memset(src, 0x77, big);
        n = pack(type, packed, 2 * len, src, big);
        memset(dst + len, 0x11, 16);
        (void)qcow2_decompress(&hdr, packed, n, dst);
        for (unsigned i = 0; i < 16; i++) /* nothing behind the cluster */
            CHECK_EQ(dst[len + i], 0x11);
    }
}

CO_TEST(noise)
{
    uint64_t seed = test_seed();

    BOTH_TYPES(type)
    {
        struct qcow2_header hdr = header(12, type);
        _cleanup_(freep) uint8_t *packed = malloc(8192), *dst = malloc(4096), *src = malloc(4096);

        for (unsigned round = 0; round < 500; round++) {
            fill(src, 4096, round);
            size_t n = pack(type, packed, 8192, src, 4096);

            for (unsigned k = 0; k < 3; k++)
                packed[rng_below(&seed, n)] ^= (uint8_t)(1 + rng_below(&seed, 255));
            int rc = qcow2_decompress(&hdr, packed, n, dst);

            CHECK(rc == 0 || rc == -EIO);
            for (size_t i = 0; i < n; i++)
                packed[i] = (uint8_t)rng_next(&seed);
            rc = qcow2_decompress(&hdr, packed, n, dst);
            CHECK(rc == 0 || rc == -EIO);
        }
    }
}

CO_TEST(clusters_of_qemu_img)
{
    test_need("qemu-img");
    static const char *const types[] = {"zlib", "zstd"};
    static const char *const sizes[] = {"512", "4k", "64k", "2M"};
    size_t total = 4 << 20;
    _cleanup_(freep) uint8_t *src = malloc(total), *dst = malloc(2 << 20);

    for (size_t off = 0; off < total; off += 65536)
        fill(src + off, 65536, off + 1);
    FILE *f = fopen(t_path("src.raw"), "w");

    CHECK(f && fwrite(src, total, 1, f) == 1 && fclose(f) == 0);
    for (unsigned t = 0; t < 2; t++) {
        for (unsigned k = 0; k < 4; k++) {
            struct qcow2_header hdr;
            unsigned compressed = 0;

            test_sh("qemu-img convert -q -c -f raw -O qcow2 -o compression_type=%s,cluster_size=%s"
                    " %s %s",
                    types[t], sizes[k], t_path("src.raw"), t_path("c.qcow2"));
            struct blk *blk = t_open("c.qcow2");

            CHECK_EQ(qcow2_header_read(blk, &hdr, NULL), 0);
            for (uint64_t off = 0; off < total; off += hdr.cluster_size) {
                struct l2_entry e = {t_get64(blk, t_l2_pos(blk, &hdr, off)), 0};

                if (!l2_is_compressed(e))
                    continue;
                CHECK_EQ(qcow2_read_compressed(blk, &hdr, e, dst), 0);
                CHECK(memcmp(dst, src + off, hdr.cluster_size) == 0);
                compressed++;
            }
            CHECK(compressed > 0);
            struct l2_entry beyond = {ENTRY_COMPRESSED | align_up(blk->len, 512), 0};

            CHECK_EQ(qcow2_read_compressed(blk, &hdr, beyond, dst), -EIO);
            qcow2_header_fini(&hdr);
            blk_close(blk);
        }
    }
}
