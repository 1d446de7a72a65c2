/*
 * Unpacking of compressed clusters.
 *
 * 1. Output never passes one cluster, whatever the stream says.
 * 2. A cluster is complete or an error: no byte of the buffer's old content is ever shown.
 */
#include <zlib.h>
#include <zstd.h>
#include "base/own.h"
#include "qcow2/compress.h"
#include "rt/buf.h"
#include "rt/offload.h"

#define DEFLATE_WINDOW  (-12)       /* raw deflate, 4 KiB window */
#define ZSTD_WINDOW_LOG 24          /* bounds what a hostile frame can make us allocate */
#define OFFLOAD_LEN     (64u << 10) /* from here on the work outweighs the hand-off */

struct unpack {
    enum qcow2_compression type;
    const void *src;
    size_t src_len;
    void *dst;
    size_t dst_len;
};

static int unpack_zlib(struct unpack *u)
{
    z_stream z = {
        .next_in = (Bytef *)(uintptr_t)u->src,
        .avail_in = (uInt)u->src_len,
        .next_out = u->dst,
        .avail_out = (uInt)u->dst_len,
    };

    if (inflateInit2(&z, DEFLATE_WINDOW) != Z_OK)
        return -ENOMEM;
    int rc = inflate(&z, Z_FINISH);

    inflateEnd(&z);
    /* A stream that would give more than the cluster ends with Z_BUF_ERROR. */
    if (rc != Z_STREAM_END && rc != Z_BUF_ERROR)
        return -EIO;
    return z.avail_out == 0 ? 0 : -EIO;
}

static void dctx_freep(ZSTD_DCtx **dctx)
{
    ZSTD_freeDCtx(*dctx);
}

static int unpack_zstd(struct unpack *u)
{
    _cleanup_(dctx_freep) ZSTD_DCtx *dctx = ZSTD_createDCtx();
    ZSTD_inBuffer in = {u->src, u->src_len, 0};
    ZSTD_outBuffer out = {u->dst, u->dst_len, 0};

    if (!dctx)
        return -ENOMEM;
    if (ZSTD_isError(ZSTD_DCtx_setParameter(dctx, ZSTD_d_windowLogMax, ZSTD_WINDOW_LOG)))
        return -EIO;
    while (out.pos < out.size) {
        size_t in_before = in.pos, out_before = out.pos;

        if (ZSTD_isError(ZSTD_decompressStream(dctx, &out, &in)))
            return -EIO;
        if (in.pos == in_before && out.pos == out_before)
            return -EIO;
    }
    return 0;
}

static int unpack(void *arg)
{
    struct unpack *u = arg;

    return u->type == QCOW2_ZSTD ? unpack_zstd(u) : unpack_zlib(u);
}

int qcow2_decompress(const struct qcow2_header *hdr, const void *src, size_t src_len, void *dst)
{
    struct unpack u = {hdr->compression, src, src_len, dst, hdr->cluster_size};

    return u.dst_len >= OFFLOAD_LEN ? offload(unpack, &u) : unpack(&u);
}

int qcow2_read_compressed(struct blk *blk, const struct qcow2_header *hdr, struct l2_entry e,
                          void *dst)
{
    uint64_t off, len;

    l2_compressed_range(hdr, e, &off, &len);
    if (off >= blk->len)
        return -EIO;
    /* The last stream may end with the file, in the middle of a sector. */
    len = MIN(len, blk->len - off);
    _cleanup_(buf_drop) struct buf src = {buf_get(len), len};

    if (!src.data)
        return -ENOMEM;
    int rc = blk_read(blk, off, src.data, len);

    return rc < 0 ? rc : qcow2_decompress(hdr, src.data, len, dst);
}
