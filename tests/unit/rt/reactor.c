/* The reactor on its real backends: turns, wakes, hooks, I/O, cancellation. */
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <stddef.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>
#include "base/own.h"
#include "rt/reactor.h"
#include "rt/timer.h"
#include "rt/wait.h"
#include "test.h"

static int add(void *arg)
{
    ++*(unsigned *)arg;
    return 0;
}

CO_TEST(reactor_runs_children)
{
    unsigned count = 0;
    struct co_group g;

    co_group_init(&g);
    for (unsigned i = 0; i < 1000; i++)
        CHECK_EQ(co_group_spawn(&g, add, &count), 0);
    CHECK_EQ(count, 0);
    CHECK_EQ(co_group_wait(&g), 0);
    CHECK_EQ(count, 1000);
}

static int return_arg(void *arg)
{
    return *(int *)arg;
}

TEST(reactor_run_returns_the_result)
{
    int rc = -EXDEV;

    CHECK_EQ(reactor_run(return_arg, &rc), -EXDEV);
    rc = 7;
    CHECK_EQ(reactor_run(return_arg, &rc), 7);
    CHECK(reactor_self() == NULL);
}

CO_TEST(reactor_reads_what_it_wrote)
{
    char path[128], text[10] = {0};

    snprintf(path, sizeof(path), "%s/file", test_dir());
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    CHECK(fd >= 0);
    struct iovec one = {"abcdef", 6}, two[2] = {{"gh", 2}, {"ij", 2}};
    CHECK_EQ(io_writev(fd, &one, 1, 5, IO_DSYNC), 6);
    CHECK_EQ(io_writev(fd, two, 2, 11, 0), 4);
    CHECK_EQ(io_fsync(fd, true), 0);
    CHECK_EQ(io_fsync(fd, false), 0);
    struct iovec in[2] = {{text, 4}, {text + 4, 6}};
    CHECK_EQ(io_readv(fd, in, 2, 5), 10);
    CHECK(memcmp(text, "abcdefghij", 10) == 0);
    CHECK_EQ(io_readv(fd, in, 1, 1000), 0);
    CHECK_EQ(io_fallocate(fd, 0, 0, (uint64_t)5 << 30), 0);
    CHECK_EQ(lseek(fd, 0, SEEK_END), (off_t)5 << 30);
    CHECK_EQ(io_fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 5, 4), 0);
    CHECK_EQ(io_readv(fd, in, 2, 5), 10);
    CHECK(memcmp(text, "\0\0\0\0efghij", 10) == 0);
    CHECK_EQ(io_readv(-1, in, 1, 0), -EBADF);
    close(fd);
}

CO_TEST(reactor_sleeps_on_time)
{
    uint64_t start = reactor_now();

    timer_sleep(20 * NSEC_PER_MSEC);
    uint64_t took = reactor_now() - start;
    CHECK(took >= 20 * NSEC_PER_MSEC && took < 2 * NSEC_PER_SEC);
}

struct wake_call {
    struct co *co;
    bool set;
};

static void *wake_from_thread(void *arg)
{
    struct wake_call *w = arg;

    usleep(2000);
    __atomic_store_n(&w->set, true, __ATOMIC_RELEASE);
    reactor_wake(w->co);
    return NULL;
}

CO_TEST(reactor_is_woken_by_other_threads)
{
    for (unsigned i = 0; i < 20; i++) {
        struct wake_call w = {co_self(), false};
        pthread_t id;

        CHECK_EQ(pthread_create(&id, NULL, wake_from_thread, &w), 0);
        if (i & 1)
            usleep(4000); /* the wake comes before the sleep */
        while (!__atomic_load_n(&w.set, __ATOMIC_ACQUIRE))
            reactor_sleep();
        pthread_join(id, NULL);
    }
}

struct hook_state {
    unsigned calls;
    struct co *co;
    bool woken;
};

static void wake_in_hook(void *arg)
{
    struct hook_state *h = arg;

    h->calls++;
    if (h->co && !h->woken) {
        h->woken = true;
        reactor_wake(h->co);
    }
}

CO_TEST(reactor_calls_hooks_before_it_waits)
{
    struct hook_state h = {.co = co_self()};
    struct reactor_hook hook = {.fn = wake_in_hook, .arg = &h};

    reactor_hook_add(&hook);
    while (!h.woken)
        reactor_sleep();
    CHECK_EQ(h.calls, 1);
    unsigned before = h.calls;
    reactor_yield();
    CHECK(h.calls > before);
    reactor_hook_remove(&hook);
    before = h.calls;
    reactor_yield();
    CHECK_EQ(h.calls, before);
}

/* ---- sockets ---- */

struct server {
    int fd;
    unsigned served;
    struct co *acceptor;
};

static SUSPENDS int serve_one(void *arg)
{
    int fd = (int)(intptr_t)arg;
    char buf[64];

    for (;;) {
        ssize_t n = io_recv(fd, buf, sizeof(buf));

        if (n <= 0)
            break;
        struct iovec iov = {buf, (size_t)n};
        struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};
        CHECK_EQ(io_sendmsg(fd, &msg, 0), n);
    }
    close(fd);
    return 0;
}

static SUSPENDS int serve(void *arg)
{
    struct server *s = arg;
    struct co_group g;
    int fd;

    s->acceptor = co_self();
    co_group_init(&g);
    while ((fd = io_accept(s->fd)) >= 0) {
        s->served++;
        CHECK_EQ(co_group_spawn(&g, serve_one, (void *)(intptr_t)fd), 0);
    }
    co_group_wait(&g);
    return fd;
}

CO_TEST(reactor_serves_many_sockets)
{
    enum { CLIENTS = 300 };
    static int fds[CLIENTS];
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    struct server s = {.fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)};
    struct co_group g;

    snprintf(addr.sun_path, sizeof(addr.sun_path), "%s/sock", test_dir());
    CHECK_EQ(bind(s.fd, (struct sockaddr *)&addr, sizeof(addr)), 0);
    CHECK_EQ(listen(s.fd, 100), 0);
    co_group_init(&g);
    co_group_spawn(&g, serve, &s);
    for (unsigned i = 0; i < CLIENTS; i++) {
        fds[i] = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        CHECK_EQ(io_connect(fds[i], (struct sockaddr *)&addr, sizeof(addr)), 0);
    }
    for (unsigned round = 0; round < 3; round++) {
        for (unsigned i = 0; i < CLIENTS; i++) {
            char in[8] = {0};

            CHECK_EQ(send(fds[i], "hello", 5, MSG_NOSIGNAL), 5);
            CHECK_EQ(io_recv(fds[i], in, sizeof(in)), 5);
            CHECK_STR(in, "hello");
        }
    }
    for (unsigned i = 0; i < CLIENTS; i++)
        close(fds[i]);
    shutdown(s.fd, SHUT_RDWR);
    CHECK_EQ(co_group_wait(&g), -EINVAL);
    CHECK_EQ(s.served, CLIENTS);
    close(s.fd);
}

struct receiver {
    int fd;
    struct co *co;
};

static SUSPENDS int receive(void *arg)
{
    struct receiver *r = arg;
    char c;

    r->co = co_self();
    return (int)io_recv(r->fd, &c, 1);
}

CO_TEST(reactor_cancels_a_receive)
{
    int sp[2];
    struct co_group g;

    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, sp), 0);
    struct receiver r = {.fd = sp[0]};
    co_group_init(&g);
    co_group_spawn(&g, receive, &r);
    timer_sleep(NSEC_PER_MSEC);
    io_cancel(r.co);
    CHECK_EQ(co_group_wait(&g), -ECANCELED);
    /* And at once, before it was submitted. */
    co_group_spawn(&g, receive, &r);
    reactor_yield();
    io_cancel(r.co);
    CHECK_EQ(co_group_wait(&g), -ECANCELED);
    close(sp[0]);
    close(sp[1]);
}

CO_TEST(reactor_polls_an_eventfd)
{
    int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);

    CHECK_EQ(io_poll(fd, POLLOUT), POLLOUT);
    eventfd_write(fd, 1);
    CHECK_EQ(io_poll(fd, POLLIN), POLLIN);
    close(fd);
}

/* A socket in non-blocking mode waits like any other. */
CO_TEST(reactor_waits_on_non_blocking_sockets)
{
    int sp[2];
    struct co_group g;

    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, sp), 0);
    struct receiver r = {.fd = sp[0]};
    co_group_init(&g);
    co_group_spawn(&g, receive, &r);
    timer_sleep(NSEC_PER_MSEC);
    CHECK_EQ(g.running, 1);
    CHECK_EQ(send(sp[1], "x", 1, 0), 1);
    co_group_wait_below(&g, 1);
    CHECK_EQ(co_group_wait(&g), 0);
    close(sp[0]);
    close(sp[1]);
}

/* More requests at once than either queue of a ring holds. */
static SUSPENDS int read_byte(void *arg)
{
    int fd = *(int *)arg;
    char c = 0;
    struct iovec iov = {&c, 1};

    for (unsigned i = 0; i < 3; i++) {
        CHECK_EQ(io_readv(fd, &iov, 1, i), 1);
        CHECK_EQ(c, "abc"[i]);
    }
    return 0;
}

CO_TEST(reactor_takes_more_requests_than_its_queues)
{
    char path[128];
    struct co_group g;

    snprintf(path, sizeof(path), "%s/abc", test_dir());
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    CHECK_EQ(write(fd, "abc", 3), 3);
    co_group_init(&g);
    for (unsigned i = 0; i < 6000; i++)
        CHECK_EQ(co_group_spawn(&g, read_byte, &fd), 0);
    CHECK_EQ(co_group_wait(&g), 0);
    close(fd);
}

/* The same with requests that stay: 6000 receives, all answered late. */
CO_TEST(reactor_keeps_thousands_of_receives)
{
    enum { NR = 6000 };
    static struct receiver receivers[NR];
    struct co_group g;
    int sp[2];

    CHECK_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sp), 0);
    co_group_init(&g);
    for (unsigned i = 0; i < NR; i++) {
        receivers[i] = (struct receiver){.fd = sp[0]};
        co_group_spawn(&g, receive, &receivers[i]);
    }
    timer_sleep(NSEC_PER_MSEC);
    CHECK_EQ(g.running, NR);
    for (unsigned i = 0; i < NR; i++) {
        struct iovec iov = {"x", 1};
        struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};

        CHECK_EQ(io_sendmsg(sp[1], &msg, 0), 1);
    }
    CHECK_EQ(co_group_wait(&g), 0);
    close(sp[0]);
    close(sp[1]);
}

CO_TEST(reactor_cancels_thousands_at_once)
{
    enum { NR = 3000 };
    static struct receiver receivers[NR];
    struct co_group g;
    int sp[2];

    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sp), 0);
    co_group_init(&g);
    for (unsigned i = 0; i < NR; i++) {
        receivers[i] = (struct receiver){.fd = sp[0]};
        co_group_spawn(&g, receive, &receivers[i]);
    }
    timer_sleep(NSEC_PER_MSEC);
    for (unsigned i = 0; i < NR; i++)
        io_cancel(receivers[i].co);
    CHECK_EQ(co_group_wait(&g), -ECANCELED);
    close(sp[0]);
    close(sp[1]);
}

static int tcp_socket(struct sockaddr_in *addr, bool listening)
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    socklen_t len = sizeof(*addr);

    *addr = (struct sockaddr_in){.sin_family = AF_INET};
    addr->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    CHECK_EQ(bind(fd, (struct sockaddr *)addr, len), 0);
    CHECK_EQ(getsockname(fd, (struct sockaddr *)addr, &len), 0);
    if (listening)
        CHECK_EQ(listen(fd, 10), 0);
    return fd;
}

CO_TEST(reactor_connects_by_tcp)
{
    struct sockaddr_in addr, closed;
    int server = tcp_socket(&addr, true), idle = tcp_socket(&closed, false);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

    CHECK_EQ(io_connect(fd, (struct sockaddr *)&addr, sizeof(addr)), 0);
    int peer = io_accept(server);
    CHECK(peer >= 0 && (fcntl(peer, F_GETFD) & FD_CLOEXEC));
    CHECK((fcntl(fd, F_GETFL) & O_NONBLOCK) == 0);
    CHECK_EQ(send(peer, "x", 1, 0), 1);
    char c;
    CHECK_EQ(io_recv(fd, &c, 1), 1);
    close(peer);
    CHECK_EQ(io_recv(fd, &c, 1), 0);
    close(fd);
    fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK_EQ(io_connect(fd, (struct sockaddr *)&closed, sizeof(closed)), -ECONNREFUSED);
    close(fd);
    close(idle);
    close(server);
}

/* A filter that refuses io_uring_setup(), as container run times install it. */
static int refuse_io_uring(void)
{
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_io_uring_setup, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog prog = {.len = 4, .filter = code};

    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
        return -errno;
    return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &prog) < 0 ? -errno : 0;
}

static int is_on_threads(void *arg)
{
    return strcmp(reactor_backend(), "threads") == 0;
}

TEST(reactor_uses_threads_where_io_uring_is_refused)
{
    pid_t pid = fork();
    int status;

    CHECK(pid >= 0);
    if (pid == 0) {
        unsetenv("VARVE_IO");
        if (refuse_io_uring() < 0)
            _exit(77);
        _exit(reactor_run(is_on_threads, NULL));
    }
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    CHECK(WIFEXITED(status));
    if (WEXITSTATUS(status) == 77)
        printf("no seccomp here: not tested\n");
    else
        CHECK_EQ(WEXITSTATUS(status), 1);
}

static int backend_is_right(void *arg)
{
    const char *want = getenv("VARVE_IO");

    return !want || strcmp(want, "threads") != 0 || is_on_threads(NULL);
}

TEST(reactor_obeys_the_environment)
{
    CHECK_EQ(reactor_run(backend_is_right, NULL), 1);
}

static int wake_self_and_end(void *arg)
{
    reactor_wake(co_self());
    reactor_wake(co_self());
    return 0;
}

/* What ends while it is on the run queue is not run again. */
CO_TEST(reactor_forgets_wakes_of_what_ended)
{
    struct co_group g;

    co_group_init(&g);
    for (unsigned i = 0; i < 200; i++) {
        CHECK_EQ(co_group_spawn(&g, wake_self_and_end, NULL), 0);
        if (i % 3 == 0)
            reactor_yield();
    }
    CHECK_EQ(co_group_wait(&g), 0);
    reactor_wake(co_self());
}

CO_TEST(reactor_sends_no_sigpipe)
{
    int sp[2];
    struct iovec iov = {"x", 1};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};

    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sp), 0);
    close(sp[1]);
    CHECK_EQ(io_sendmsg(sp[0], &msg, 0), -EPIPE);
    close(sp[0]);
}
