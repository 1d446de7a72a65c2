/*
 * In steady state nothing is allocated: coroutines, children, I/O, timers, locks, offloaded calls
 * and buffers come from pools. The linker leads the allocator's calls of rt through the counters
 * here (--wrap).
 */
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>
#include "rt/buf.h"
#include "rt/offload.h"
#include "rt/reactor.h"
#include "rt/timer.h"
#include "rt/wait.h"
#include "test.h"

static unsigned long calls; /* atomic */

#define WRAP(name, params, args)                                                                   \
    void *__real_##name params;                                                                    \
    void *__wrap_##name params;                                                                    \
    void *__wrap_##name params                                                                     \
    {                                                                                              \
        __atomic_fetch_add(&calls, 1, __ATOMIC_RELAXED);                                           \
        return __real_##name args;                                                                 \
    }
WRAP(malloc, (size_t len), (len))
WRAP(calloc, (size_t nr, size_t len), (nr, len))
WRAP(aligned_alloc, (size_t align, size_t len), (align, len))
WRAP(reallocarray, (void *old, size_t nr, size_t len), (old, nr, len))

struct bench {
    int file, sp[2];
    struct co_mutex lock;
    unsigned i;
};

static int answer(void *arg)
{
    return 42;
}

SUSPENDS static int receive_one(void *arg)
{
    struct bench *b = arg;
    char c;

    return io_recv(b->sp[0], &c, 1) == 1 ? 0 : -EIO;
}

SUSPENDS static int use_all(void *arg)
{
    struct bench *b = arg;
    size_t len = (size_t)4096 << b->i++ % 4;
    void *buf = buf_get(len);
    struct iovec iov = {buf, 512};

    memset(buf, 1, 512);
    co_mutex_lock(&b->lock);
    CHECK_EQ(io_writev(b->file, &iov, 1, 0, 0), 512);
    co_mutex_unlock(&b->lock);
    CHECK_EQ(io_readv(b->file, &iov, 1, 0), 512);
    timer_sleep(NSEC_PER_MSEC / 100);
    CHECK_EQ(offload(answer, NULL), 42);
    buf_put(buf, len);
    return 0;
}

SUSPENDS static void one_round(struct bench *b)
{
    struct co_group g;
    struct iovec iov = {"0123456789012345678901234567890", 8};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};

    co_group_init(&g);
    for (unsigned i = 0; i < 8; i++) {
        co_group_spawn(&g, use_all, b);
        co_group_spawn(&g, receive_one, b);
    }
    reactor_yield();
    CHECK_EQ(io_sendmsg(b->sp[1], &msg, 0), 8);
    CHECK_EQ(co_group_wait(&g), 0);
}

CO_TEST(steady_state_allocates_nothing)
{
    struct bench b = {.i = 0};
    char path[128];

    snprintf(path, sizeof(path), "%s/file", test_dir());
    b.file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    CHECK(b.file >= 0);
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, b.sp), 0);
    co_mutex_init(&b.lock, RANK_BLK);
    for (unsigned i = 0; i < 20; i++)
        one_round(&b);
    unsigned long before = __atomic_load_n(&calls, __ATOMIC_RELAXED);
    CHECK(before > 0); /* the counters do count */
    for (unsigned i = 0; i < 200; i++)
        one_round(&b);
    CHECK_EQ(__atomic_load_n(&calls, __ATOMIC_RELAXED), before);
    close(b.file);
    close(b.sp[0]);
    close(b.sp[1]);
}
