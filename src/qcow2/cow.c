/*
 * Filling what a partial write leaves open of a (sub)cluster: one read of the missing parts at
 * most, one write of everything.
 *
 *   unit:   | head | data ............ | tail |
 *
 * What is known to be zero is not read; where the host space is fresh it is not written either,
 * but for the rest of a device block (a read-modify-write there would cost a read).
 * The caller holds a claim on the clusters, so their old content does not move meanwhile.
 */
#include <string.h>
#include "base/bits.h"
#include "base/check.h"
#include "qcow2/internal.h"

#define COW_IOVS 24u

enum part_kind { PART_SKIP, PART_ZERO, PART_DATA };
struct part {
    uint64_t guest_off, len;
    enum part_kind kind;
    char *data; /* DATA: old content */
};

/* Below, from the layers under this one. */
static bool below_is_zero(uint64_t guest_off, uint64_t len, const struct image_below *below)
{
    while (below && len > 0) {
        bool zero = false;
        uint64_t n = below->is_zero ? below->is_zero(below->ctx, guest_off, len, &zero) : 0;

        if (!n || !zero)
            return false;
        n = MIN(n, len);
        guest_off += n;
        len -= n;
    }
    return true;
}

bool cow_is_zero(struct image *img, uint64_t guest_off, uint64_t len,
                 const struct image_below *below)
{
    uint64_t end = MIN(guest_off + len, img->hdr.virtual_len);

    while (guest_off < end) {
        struct extent ext;

        if (map_cached(img, guest_off, end - guest_off, &ext) < 0)
            return false;
        /* with a backing file that the caller does not have at hand it is not known */
        bool zero = ext.kind == EXTENT_ZERO ||
                    (ext.kind == EXTENT_UNALLOCATED && (below || !img->hdr.backing_name) &&
                     below_is_zero(guest_off, ext.len, below));
        if (!zero)
            return false;
        guest_off += ext.len;
    }
    return true;
}

static struct part part_of(struct image *img, uint64_t guest_off, uint64_t len, bool fresh,
                           const struct image_below *below)
{
    enum part_kind kind = PART_DATA;

    if (len == 0 || cow_is_zero(img, guest_off, len, below))
        kind = fresh ? PART_SKIP : PART_ZERO;
    return (struct part){guest_off, len, kind, NULL};
}

/* A skipped part keeps what shares a device block with the data, as zeroes. */
static void round_to_blocks(const struct image *img, const struct cow_write *w, struct part *head,
                            struct part *tail)
{
    uint64_t align = img->blk->align, end = w->host_off + w->len;

    if (head->kind == PART_SKIP) {
        uint64_t n = MIN(head->len, w->host_off & (align - 1));

        *head = (struct part){w->guest_off - n, n, PART_ZERO, NULL};
    }
    if (tail->kind == PART_SKIP)
        *tail = (struct part){tail->guest_off, MIN(tail->len, align_up(end, align) - end),
                              PART_ZERO, NULL};
}

/* Old content; zeroes behind the end of the image. */
SUSPENDS static int read_old(struct image *img, uint64_t guest_off, char *data, uint64_t len,
                             const struct image_below *below)
{
    uint64_t inside =
        guest_off < img->hdr.virtual_len ? MIN(len, img->hdr.virtual_len - guest_off) : 0;

    memset(data + inside, 0, len - inside);
    img->stats.cow_reads++;
    img->stats.cow_read_bytes += inside;
    IOV_ITER_BUF(it, vec, data, inside);
    return read_range(img, guest_off, inside, &it, below);
}

/* One read through the middle is cheaper than two, while the middle is small. */
static bool reads_through(const struct cow_write *w, const struct part *head,
                          const struct part *tail)
{
    return head->kind == PART_DATA && tail->kind == PART_DATA && w->len <= head->len + tail->len;
}

/* Fills the DATA parts; buf holds head and tail, and the middle if it is read too. */
SUSPENDS static int read_parts(struct image *img, const struct cow_write *w, struct part *head,
                               struct part *tail, char *buf, const struct image_below *below)
{
    bool through = reads_through(w, head, tail);

    head->data = buf;
    tail->data = buf + head->len + (through ? w->len : 0);
    if (through)
        return read_old(img, head->guest_off, buf, head->len + w->len + tail->len, below);
    int rc =
        head->kind == PART_DATA ? read_old(img, head->guest_off, head->data, head->len, below) : 0;
    if (rc == 0 && tail->kind == PART_DATA)
        rc = read_old(img, tail->guest_off, tail->data, tail->len, below);
    return rc;
}

static unsigned put_part(struct iovec *iov, unsigned nr, const struct part *p)
{
    uint64_t done = 0;

    if (p->kind == PART_DATA && p->len) {
        iov[nr++] = (struct iovec){p->data, p->len};
        return nr;
    }
    while (done < p->len) {
        uint64_t n = MIN(p->len - done, (uint64_t)BUF_ZERO_LEN);

        iov[nr++] = (struct iovec){(void *)(uintptr_t)buf_zeroes(), n};
        done += n;
    }
    return nr;
}

SUSPENDS static int write_parts(struct image *img, const struct cow_write *w,
                                const struct part *head, const struct part *tail,
                                const struct iov_iter *iov)
{
    unsigned room = iov->nr + 8, nr;
    struct iovec few[COW_IOVS], *all = few;
    struct iov_iter it;
    size_t data_len;

    if (room > COW_IOVS && !(all = calloc(room, sizeof(*all))))
        return -ENOMEM;
    nr = put_part(all, 0, head);
    nr += iov_iter_peek(iov, w->len, all + nr, iov->nr, &data_len);
    DEBUG_CHECK(data_len == w->len);
    nr = put_part(all, nr, tail);
    DEBUG_CHECK(nr <= room);
    iov_iter_init(&it, all, nr);
    img->stats.cow_write_bytes += head->len + tail->len;
    int rc = blk_writev(img->blk, w->host_off - head->len, it.left, &it, 0);
    if (all != few)
        free(all);
    return rc;
}

int cow_write(struct image *img, const struct cow_write *w, struct iov_iter *iov,
              const struct image_below *below)
{
    struct part head = part_of(img, w->guest_off - w->head, w->head, w->fresh, below);
    struct part tail = part_of(img, w->guest_off + w->len, w->tail, w->fresh, below);
    struct buf b = {0};
    int rc = 0;

    round_to_blocks(img, w, &head, &tail);
    if (head.kind == PART_DATA || tail.kind == PART_DATA) {
        b.len = head.len + tail.len + (reads_through(w, &head, &tail) ? w->len : 0);
        b.data = buf_get(b.len);
        rc = b.data ? read_parts(img, w, &head, &tail, b.data, below) : -ENOMEM;
    }
    if (rc == 0)
        rc = write_parts(img, w, &head, &tail, iov);
    buf_drop(&b);
    img->unflushed = true;
    return rc;
}
