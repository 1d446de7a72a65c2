/*
 * Sparse memory as a device, for tests and benchmarks.
 *
 * Content lives in 64 KiB pages, made on the first write; a page that is not there reads as
 * zeroes. A request takes effect at once after its I/O point, so that in the simulator requests
 * take effect in an order drawn from the seed.
 */
#include <string.h>
#include "base/bits.h"
#include "base/check.h"
#include "blk/internal.h"
#include "rt/reactor.h"
#include "rt/sim.h"

/* ---- pages ---- */

void mem_pages_fini(struct mem_pages *m)
{
    size_t pos = 0;

    for (struct table_slot *s; (s = table_next(&m->table, &pos));)
        free(s->value);
    table_fini(&m->table);
}

/* Bytes from off to the end of its page, at most len. */
static size_t page_piece(uint64_t off, uint64_t len)
{
    return MIN(len, MEM_PAGE_LEN - off % MEM_PAGE_LEN);
}

void mem_pages_read(const struct mem_pages *m, uint64_t off, uint64_t len, struct iov_iter *iov)
{
    while (len > 0) {
        size_t n = page_piece(off, len);
        const char *page = table_get(&m->table, off / MEM_PAGE_LEN);

        if (page)
            iov_iter_write(iov, page + off % MEM_PAGE_LEN, n);
        else
            iov_iter_zero(iov, n);
        off += n;
        len -= n;
    }
}

static char *page_make(struct mem_pages *m, uint64_t off)
{
    char *page = table_get(&m->table, off / MEM_PAGE_LEN);

    if (page)
        return page;
    page = calloc(1, MEM_PAGE_LEN);
    if (page && table_put(&m->table, off / MEM_PAGE_LEN, page) < 0) {
        free(page);
        page = NULL;
    }
    return page;
}

int mem_pages_write(struct mem_pages *m, uint64_t off, uint64_t len, struct iov_iter *iov)
{
    while (len > 0) {
        size_t n = page_piece(off, len);
        char *page = page_make(m, off);

        if (!page)
            return -ENOMEM;
        iov_iter_read(iov, page + off % MEM_PAGE_LEN, n);
        off += n;
        len -= n;
    }
    return 0;
}

void mem_pages_zero(struct mem_pages *m, uint64_t off, uint64_t len)
{
    while (len > 0) {
        size_t n = page_piece(off, len);
        char *page = table_get(&m->table, off / MEM_PAGE_LEN);

        if (page && n < MEM_PAGE_LEN)
            memset(page + off % MEM_PAGE_LEN, 0, n);
        else if (page)
            free(table_remove(&m->table, off / MEM_PAGE_LEN));
        off += n;
        len -= n;
    }
}

int mem_pages_copy(struct mem_pages *dst, const struct mem_pages *src)
{
    size_t pos = 0;

    for (struct table_slot *s; (s = table_next(&src->table, &pos));) {
        char *page = page_make(dst, s->key * MEM_PAGE_LEN);

        if (!page)
            return -ENOMEM;
        memcpy(page, s->value, MEM_PAGE_LEN);
    }
    return 0;
}

uint64_t mem_pages_status(const struct mem_pages *m, uint64_t off, uint64_t len, bool *ret_data)
{
    uint64_t done = page_piece(off, len);

    *ret_data = table_get(&m->table, off / MEM_PAGE_LEN) != NULL;
    while (done < len) {
        uint64_t at = off + done;

        if ((table_get(&m->table, at / MEM_PAGE_LEN) != NULL) != *ret_data)
            break;
        done += page_piece(at, len - done);
    }
    return done;
}

bool mem_stopped(void)
{
    return strcmp(reactor_backend(), "sim") == 0 && sim_stopped();
}

int mem_point(void)
{
    io_point();
    return mem_stopped() ? -EIO : 0;
}

/* ---- the device ---- */

struct mem_blk {
    struct blk blk;
    struct mem_pages pages;
};

static struct mem_blk *mem_of(struct blk *blk)
{
    return container_of(blk, struct mem_blk, blk);
}

SUSPENDS static int mem_readv(struct blk *blk, uint64_t off, uint64_t len, struct iov_iter *iov)
{
    int rc = mem_point();

    if (rc == 0)
        mem_pages_read(&mem_of(blk)->pages, off, len, iov);
    return rc;
}

SUSPENDS static int mem_writev(struct blk *blk, uint64_t off, uint64_t len, struct iov_iter *iov,
                               unsigned flags)
{
    int rc = mem_point();

    return rc < 0 ? rc : mem_pages_write(&mem_of(blk)->pages, off, len, iov);
}

SUSPENDS static int mem_flush(struct blk *blk)
{
    return mem_point();
}

SUSPENDS static int mem_zero(struct blk *blk, uint64_t off, uint64_t len, unsigned flags)
{
    int rc = mem_point();

    if (rc == 0)
        mem_pages_zero(&mem_of(blk)->pages, off, len);
    return rc;
}

SUSPENDS static int mem_discard(struct blk *blk, uint64_t off, uint64_t len)
{
    return mem_zero(blk, off, len, 0);
}

SUSPENDS static int mem_resize(struct blk *blk, uint64_t len)
{
    int rc = mem_point();

    if (rc == 0 && len < blk->len)
        mem_pages_zero(&mem_of(blk)->pages, len, align_up(blk->len, blk->align) - len);
    return rc;
}

static int mem_status(struct blk *blk, uint64_t off, uint64_t len, bool *ret_data,
                      uint64_t *ret_len)
{
    *ret_len = mem_pages_status(&mem_of(blk)->pages, off, len, ret_data);
    return 0;
}

SUSPENDS static int mem_preallocate(struct blk *blk, uint64_t off, uint64_t len)
{
    return mem_point();
}

static void mem_close(struct blk *blk)
{
    mem_pages_fini(&mem_of(blk)->pages);
    free(mem_of(blk));
}

void mem_free(struct blk *blk)
{
    char *name = blk->name;

    mem_close(blk);
    free(name);
}

static const struct blk_ops mem_ops = {
    .name = "mem",
    .readv = mem_readv,
    .writev = mem_writev,
    .flush = mem_flush,
    .zero = mem_zero,
    .discard = mem_discard,
    .resize = mem_resize,
    .status = mem_status,
    .preallocate = mem_preallocate,
    .close = mem_close,
};

int blk_mem_new(uint64_t len, uint32_t align, struct blk **ret)
{
    CHECK_THAT(is_pow2(align));
    struct mem_blk *m = calloc(1, sizeof(*m));

    if (!m)
        return -ENOMEM;
    if (blk_init(&m->blk, &mem_ops, "memory") < 0) {
        free(m);
        return -ENOMEM;
    }
    m->blk.len = len;
    m->blk.align = align;
    m->blk.io_unit = MAX(512u, align);
    m->blk.writable = true;
    m->blk.zero_tail = true;
    m->blk.fresh_zero = true;
    *ret = &m->blk;
    return 0;
}

struct mem_pages *mem_pages_of(struct blk *blk)
{
    return &mem_of(blk)->pages;
}
