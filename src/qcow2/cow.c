/*
 * Filling what a partial write leaves open of a (sub)cluster: one read of the missing parts at
 * most, one write of everything.
 *
 *   unit:   | head | data ............ | tail |
 *
 * What is known to be zero is not read; where the host space is fresh it is not written either,
 * but for the rest of a device block (a read-modify-write there would cost a read).
 * Where other writes have joined (claim.c), head or tail is put together in a buffer: what is left
 * between them is read, or zeroed, then their data goes over it.
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
    /* DATA: put together here from what is read of the gaps (as one range; 0: nothing; else zeroes)
     * and from joins */
    char *data;
    uint64_t read_off, read_len;
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

/* What joins leave open of [off, end), as one range: [*ret_off, *ret_end); and what they take. */
struct gaps {
    uint64_t start, end;                /* start >= end: none */
    uint64_t first_join, last_join_end; /* equal: no joins */
};

static struct gaps find_gaps(const struct claim *claim, uint64_t off, uint64_t end)
{
    struct gaps g = {.start = end, .end = off, .first_join = end, .last_join_end = end};
    uint64_t at = off;

    list_for_each(it, &claim->joins) {
        const struct join *j = list_entry(it, struct join, link);

        if (!j->taken || j->guest_off < off || j->guest_off >= end)
            continue;
        if (j->guest_off > at) {
            g.start = MIN(g.start, at);
            g.end = j->guest_off;
        }
        at = j->guest_off + j->len;
        g.first_join = MIN(g.first_join, j->guest_off);
        g.last_join_end = at;
    }
    if (at < end) {
        g.start = MIN(g.start, at);
        g.end = end;
    }
    return g;
}

static struct part part_of(struct image *img, const struct cow_write *w, uint64_t off, uint64_t len,
                           const struct image_below *below)
{
    struct part p = {.guest_off = off, .len = len, .kind = PART_DATA};
    struct gaps g = find_gaps(w->claim, off, off + len);
    bool joined = g.first_join < g.last_join_end;

    if (g.start < g.end && !cow_is_zero(img, g.start, g.end - g.start, below)) {
        p.read_off = g.start;
        p.read_len = g.end - g.start;
        return p;
    }
    if (!joined || len == 0) {
        p.kind = w->fresh || len == 0 ? PART_SKIP : PART_ZERO;
        return p;
    }
    if (w->fresh) { /* no more than from the first to the last of them, in whole device blocks */
        uint64_t block = img->blk->align, host = w->host_off + g.first_join - w->guest_off;
        uint64_t host_end = w->host_off + g.last_join_end - w->guest_off;

        if (off < w->guest_off) {
            p.guest_off = MAX(off, g.first_join - MIN(g.first_join - off, host & (block - 1)));
            p.len = off + len - p.guest_off;
        } else {
            p.len = MIN(off + len, g.last_join_end + align_up(host_end, block) - host_end) - off;
        }
    }
    return p;
}

/* A skipped part keeps what shares a device block with the data, as zeroes. */
static void round_to_blocks(const struct image *img, const struct cow_write *w, struct part *head,
                            struct part *tail)
{
    uint64_t align = img->blk->align, end = w->host_off + w->len;

    if (head->kind == PART_SKIP) {
        uint64_t n = MIN(head->len, w->host_off & (align - 1));

        *head = (struct part){.guest_off = w->guest_off - n, .len = n, .kind = PART_ZERO};
    }
    if (tail->kind == PART_SKIP)
        *tail = (struct part){.guest_off = tail->guest_off,
                              .len = MIN(tail->len, align_up(end, align) - end),
                              .kind = PART_ZERO};
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
static bool reads_through(const struct part *head, const struct part *tail)
{
    uint64_t middle = tail->read_off - head->read_off - head->read_len;

    return head->read_len && tail->read_len && middle <= head->read_len + tail->read_len;
}

/* Fills the gaps of the DATA parts; buf holds head and tail, and the middle if it is read too. */
SUSPENDS static int read_parts(struct image *img, const struct cow_write *w, struct part *head,
                               struct part *tail, char *buf, const struct image_below *below)
{
    struct part *parts[] = {head, tail};
    bool through = reads_through(head, tail);

    head->data = buf;
    tail->data = buf + head->len + (through ? w->len : 0);
    if (through)
        return read_old(img, head->read_off, buf + (head->read_off - head->guest_off),
                        tail->read_off + tail->read_len - head->read_off, below);
    for (unsigned i = 0; i < 2; i++) {
        const struct part *p = parts[i];
        int rc = 0;

        if (p->kind != PART_DATA)
            continue;
        if (p->read_len)
            rc = read_old(img, p->read_off, p->data + (p->read_off - p->guest_off), p->read_len,
                          below);
        else
            memset(p->data, 0, p->len);
        if (rc < 0)
            return rc;
    }
    return 0;
}

/* Puts the data of joins in its place, also of those that came while something was read; returns
 * its length. */
static uint64_t copy_joins(const struct cow_write *w, const struct part *part)
{
    uint64_t bytes = 0;

    if (part->kind != PART_DATA)
        return 0;
    list_for_each(it, &w->claim->joins) {
        struct join *j = list_entry(it, struct join, link);
        struct iov_iter data = *j->iov;

        if (j->guest_off < part->guest_off || j->guest_off + j->len > part->guest_off + part->len)
            continue;
        iov_iter_read(&data, part->data + (j->guest_off - part->guest_off), j->len);
        j->taken = true;
        bytes += j->len;
    }
    return bytes;
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
    int rc = blk_writev(img->blk, w->host_off - head->len, it.left, &it, 0);
    if (all != few)
        free(all);
    return rc;
}

int cow_write(struct image *img, const struct cow_write *w, struct iov_iter *iov,
              const struct image_below *below)
{
    struct part head = part_of(img, w, w->guest_off - w->head, w->head, below);
    struct part tail = part_of(img, w, w->guest_off + w->len, w->tail, below);
    struct buf b = {0};
    int rc = 0;

    round_to_blocks(img, w, &head, &tail);
    if (head.kind == PART_DATA || tail.kind == PART_DATA) {
        b.len = head.len + tail.len + (reads_through(&head, &tail) ? w->len : 0);
        b.data = buf_get(b.len);
        rc = b.data ? read_parts(img, w, &head, &tail, b.data, below) : -ENOMEM;
    }
    if (rc == 0) {
        uint64_t joined = copy_joins(w, &head) + copy_joins(w, &tail);

        w->claim->open = false;
        img->stats.cow_write_bytes += head.len + tail.len - joined;
        rc = write_parts(img, w, &head, &tail, iov);
    }
    buf_drop(&b);
    img->unflushed = true;
    return rc;
}
