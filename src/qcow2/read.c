/*
 * Reads: map, then each extent straight into the caller's memory.
 */
#include <string.h>
#include "base/bits.h"
#include "base/check.h"
#include "qcow2/compress.h"
#include "qcow2/internal.h"

void read_forget_packed(struct image *img, uint64_t first, uint64_t nr)
{
    if (img->packed.cluster - first < nr)
        img->packed.cluster = UINT64_MAX;
}

/* Unpacks the cluster at guest_off. A wait lies between: the entry is read again behind it, and
 * only what still is so is kept for the next reader. */
SUSPENDS static int unpack(struct image *img, uint64_t guest_off, uint8_t *data)
{
    struct slice *slice;
    int rc = map_pin(img, guest_off, &slice);

    if (rc < 0)
        return rc;
    unsigned index = slice_index(img, guest_off);
    struct l2_entry e = slice_entry(&img->hdr, slice, index);
    rc = -EAGAIN; /* rewritten while the slice was loaded */
    if (l2_is_compressed(e)) {
        rc = qcow2_read_compressed(img->blk, &img->hdr, e, data);
        if (rc == 0 && slice_entry(&img->hdr, slice, index).word != e.word)
            rc = -EAGAIN;
    }
    cache_put(img, slice);
    return rc;
}

SUSPENDS static int read_compressed(struct image *img, uint64_t guest_off, uint64_t len,
                                    struct iov_iter *iov)
{
    uint64_t cluster = guest_cluster(img, guest_off), cs = img->hdr.cluster_size;

    if (img->packed.cluster != cluster) {
        uint8_t *data = buf_get(cs);
        int rc = data ? unpack(img, guest_off, data) : -ENOMEM;

        if (rc < 0) {
            buf_put(data, cs);
            return rc;
        }
        buf_put(img->packed.data, cs);
        img->packed.data = data;
        img->packed.cluster = cluster;
    }
    iov_iter_write(iov, img->packed.data + in_cluster(img, guest_off), len);
    return 0;
}

SUSPENDS static int read_extent(struct image *img, uint64_t guest_off, struct extent *ext,
                                struct iov_iter *iov, const struct image_below *below)
{
    struct iov_iter sub = iter_sub(iov, ext->len);
    int rc;

    switch (ext->kind) {
    case EXTENT_DATA:
        return blk_readv(img->blk, ext->host_off, ext->len, &sub);
    case EXTENT_COMPRESSED:
        ext->len = MIN(ext->len, img->hdr.cluster_size - in_cluster(img, guest_off));
        rc = read_compressed(img, guest_off, ext->len, &sub);
        if (rc == -EAGAIN)
            ext->len = rc = 0; /* rewritten meanwhile: map again */
        return rc;
    case EXTENT_UNALLOCATED:
        if (below)
            return below->read(below->ctx, guest_off, ext->len, &sub);
        break;
    case EXTENT_ZERO:
        break;
    }
    iov_iter_zero(&sub, ext->len);
    return 0;
}

int read_range(struct image *img, uint64_t guest_off, uint64_t len, struct iov_iter *iov,
               const struct image_below *below)
{
    while (len > 0) {
        struct extent ext;
        int rc = image_map(img, guest_off, len, &ext);

        if (rc == 0)
            rc = read_extent(img, guest_off, &ext, iov, below);
        if (rc < 0)
            return rc;
        iov_iter_advance(iov, ext.len);
        guest_off += ext.len;
        len -= ext.len;
    }
    return 0;
}

int image_read(struct image *img, uint64_t guest_off, uint64_t len, struct iov_iter *iov,
               const struct image_below *below)
{
    struct image_req req;

    if (!range_ok(guest_off, len, img->hdr.virtual_len))
        return -EINVAL;
    image_enter(img, &req);
    int rc = read_range(img, guest_off, len, iov, below);
    image_leave(img, &req);
    return rc == -EUCLEAN ? -EIO : rc; /* to the guest a medium that lost its data */
}
