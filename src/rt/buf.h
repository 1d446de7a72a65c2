/*
 * Aligned buffers from per-reactor pools, and iterators over iovecs. A buffer is given back on the
 * thread it was got on.
 *
 * Every pooled buffer is aligned to BUF_ALIGN. Size classes are powers of two from 4 KiB to
 * 2 MiB; larger requests are served by the heap. A pool keeps a bounded number of free buffers.
 */
#ifndef VARVE_RT_BUF_H
#define VARVE_RT_BUF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>
#include "base/own.h"

#define BUF_ALIGN 4096u

/* An aligned buffer of at least len bytes, content undefined; NULL when memory is out. */
void *buf_get(size_t len);
/* The same for what is kept for long, or never read from or written to a file: it takes none of the
 * memory that is registered for that. */
void *buf_get_kept(size_t len);
/* Gives it back; len as in buf_get. NULL is fine. */
void buf_put(void *buf, size_t len);
void buf_pool_trim(void); /* gives what is free and of the heap back to it */
/* A read-only page range of zeroes, BUF_ZERO_LEN long, shared by all. */
#define BUF_ZERO_LEN ((size_t)1 << 20)
const void *buf_zeroes(void);
/* All zero? Any alignment. */
bool buf_is_zero(const void *buf, size_t len);

/* For _cleanup_(buf_drop): struct buf b = {buf_get(n), n}. */
struct buf {
    void *data;
    size_t len;
};
static inline void buf_drop(struct buf *b)
{
    buf_put(b->data, b->len);
}

/* A position in an array of iovecs. Borrows array and memory. */
struct iov_iter {
    const struct iovec *iov; /* current element */
    unsigned nr;             /* elements from the current one on */
    size_t skip;             /* bytes of the current element already used */
    size_t left;             /* bytes from here to the end */
};
void iov_iter_init(struct iov_iter *it, const struct iovec *iov, unsigned nr);
void iov_iter_advance(struct iov_iter *it, size_t len); /* len <= left */
/* Copy between memory and the iterator; the iterator advances by len (len <= left). */
void iov_iter_write(struct iov_iter *it, const void *src, size_t len); /* src -> iov */
void iov_iter_read(struct iov_iter *it, void *dst, size_t len);        /* iov -> dst */
void iov_iter_zero(struct iov_iter *it, size_t len);
/* Fills out[] with up to max elements covering at most len bytes from here; does not advance.
 * Returns the number of elements, *ret_len the bytes they cover. */
unsigned iov_iter_peek(const struct iov_iter *it, size_t len, struct iovec *out, unsigned max,
                       size_t *ret_len);
/* All addresses and lengths of the next len bytes are multiples of align (a power of two)? */
bool iov_iter_is_aligned(const struct iov_iter *it, size_t len, size_t align);
/* The next len bytes are all zero? */
bool iov_iter_is_zero(const struct iov_iter *it, size_t len);

#define IOV_ITER_BUF(it, iov_var, buf, n)                                                          \
    struct iovec iov_var = {(void *)(uintptr_t)(buf), (n)};                                        \
    struct iov_iter it = {&iov_var, 1, 0, (n)}

#endif
