/*
 * A reactor: one thread, one ring, a run queue of coroutines, a mailbox from other threads.
 *
 * Backends: io_uring; a thread pool when the kernel refuses io_uring (or VARVE_IO=threads); the
 * simulator (sim.h). All I/O calls below suspend the calling coroutine and return >= 0 or -errno.
 * Buffers and iovecs belong to the caller and stay valid until the call returns.
 */
#ifndef VARVE_RT_REACTOR_H
#define VARVE_RT_REACTOR_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>
#include "base/err.h"
#include "rt/co.h"

struct reactor;

/* Runs fn(arg) as the main coroutine of a fresh reactor on this thread and returns its result
 * once it and every coroutine it spawned have ended. The backend is chosen by VARVE_IO
 * ("uring", "threads"; default: uring if the kernel allows it). */
int reactor_run(int (*fn)(void *arg), void *arg);
/* The reactor of this thread, NULL outside reactor_run. */
struct reactor *reactor_self(void);
/* "io_uring", "threads" or "sim". */
const char *reactor_backend(void);

/* Starts a coroutine on this reactor; it runs at the next turn of the loop. 0 or -ENOMEM.
 * Prefer co_group_spawn (wait.h): nothing is detached. */
int reactor_spawn(co_fn *fn, void *arg);
/* Puts a suspended coroutine on its reactor's run queue; any thread, once a suspension. */
void reactor_wake(struct co *co);
/* Suspends until reactor_wake(). A wake from another thread that comes first is not lost: the
 * coroutine then returns at the next turn. Callers re-check their condition. */
SUSPENDS void reactor_sleep(void);
/* Goes to the end of the run queue: lets others run and batches of I/O be submitted. */
SUSPENDS void reactor_yield(void);
/* Nanoseconds of a monotonic clock; virtual in the simulator. Read anew at every call. */
uint64_t reactor_now(void);
/* Runs fn(arg) at every turn of the loop after the run queue is empty and before it waits for
 * completions: where writers of batches (NBD replies) flush. One list a reactor. */
struct reactor_hook {
    void (*fn)(void *arg);
    void *arg;
    struct reactor_hook *next, **pprev; /* reactor's own */
};
void reactor_hook_add(struct reactor_hook *hook);
void reactor_hook_remove(struct reactor_hook *hook);

/* ---- I/O (rt/uring.c; the only caller of liburing) ---- */
#define IO_DSYNC 1u /* RWF_DSYNC: durable when done (FUA) */
/* One preadv/pwritev: may be short. Read at the end of a file returns 0. */
SUSPENDS ssize_t io_readv(int fd, const struct iovec *iov, unsigned nr, uint64_t off);
SUSPENDS ssize_t io_writev(int fd, const struct iovec *iov, unsigned nr, uint64_t off,
                           unsigned flags);
SUSPENDS int io_fsync(int fd, bool data_only);
SUSPENDS int io_fallocate(int fd, int mode, uint64_t off, uint64_t len);
SUSPENDS int io_accept(int fd); /* new descriptor, CLOEXEC; -EINVAL after shutdown() */
SUSPENDS ssize_t io_recv(int fd, void *buf, size_t len); /* 0 at the end of the stream */
SUSPENDS ssize_t io_sendmsg(int fd, const struct msghdr *msg, int flags); /* MSG_NOSIGNAL added */
SUSPENDS int io_connect(int fd, const struct sockaddr *addr, socklen_t len);
SUSPENDS int io_poll(int fd, short events); /* revents; works on eventfd, signalfd, pidfd */
/* From here to its end, or the next call of this, the coroutine's reads and writes go through the
 * ring of r, which must outlive it; it itself stays where it is. NULL: its own ring again. */
void io_route(struct reactor *r);
/* Cancels the I/O in which `co` is suspended, if any: that call returns -ECANCELED (or its
 * result if it was just done). Same reactor only. */
void io_cancel(struct co *co);
/* A point where devices that do no real I/O (memory) act as if they did: a yield on real
 * backends, a random delay and reordering in the simulator. */
SUSPENDS void io_point(void);

#endif
