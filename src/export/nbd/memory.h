/*
 * Payload memory of one NBD server: a fixed number of bytes over all connections, whatever reactors
 * they are on. A share is its connection's alone; what they have in common is atomic.
 *
 * Every connection owns a small slice that nobody else can take, so one that reads slowly, or
 * announces data and does not send it, never stops another. The rest is shared, first come,
 * first served; with more than one connection none takes more than half of it.
 *
 * Invariants: bytes handed out <= whole; only a connection's receiver waits for memory, and what it
 * waits for is given back by requests that need nothing further from it.
 */
#ifndef VARVE_EXPORT_NBD_MEMORY_H
#define VARVE_EXPORT_NBD_MEMORY_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "rt/wait.h"

/* The most one read holds; longer ones are answered in pieces. */
#define NBD_PIECE_LEN ((size_t)2 << 20)

struct nbd_memory {
    uint64_t whole;      /* fixed after init */
    size_t slice_len;    /* fixed after init: bytes each connection owns */
    uint64_t shared_len; /* fixed after init */
    /* atomic */
    atomic_ulong shared_left;
    atomic_ulong used, used_max;
    atomic_uint nr_shares;
    atomic_uint nr_waiting; /* set and looked at around shared_left: no wake is missed */
    pthread_mutex_t lock;   /* never held over a wait */
    struct list waiting;    /* under lock */
};

/* A connection's part. */
struct nbd_share {
    struct nbd_memory *memory;
    size_t slice_left;
    uint64_t shared_used;
};

/* A buffer and where its bytes were taken. data NULL: nothing is held. */
struct nbd_grant {
    void *data;
    size_t len; /* of data; a power of two up to 2 MiB, else whole pages */
    bool shared;
};

void nbd_memory_init(struct nbd_memory *m, uint64_t whole, unsigned max_shares);
void nbd_memory_fini(struct nbd_memory *m);
void nbd_share_init(struct nbd_share *s, struct nbd_memory *m);
void nbd_share_fini(struct nbd_share *s);
/*
 * Gets a buffer of `want` bytes; less (at least 4 KiB, at most NBD_PIECE_LEN) when that much is not
 * free. Waits until the connection's own slice has room. 0 or -ENOMEM (the heap is out).
 */
SUSPENDS
int nbd_share_take(struct nbd_share *s, size_t want, struct nbd_grant *ret);
/* Gives it back and clears it; harmless when nothing is held. */
void nbd_share_give(struct nbd_share *s, struct nbd_grant *g);

#endif
