/*
 * nbdload: load on an NBD server, with as little work in the client as can be.
 *
 * A thread a connection, DEPTH slots a thread. Requests that are due are sent with one call,
 * replies are taken as many as there are, so that the server, not the client, is what a figure says
 * something about. Latencies go into a histogram of 64 steps an octave (error below 2 %).
 *
 * With --rate the arrivals are scheduled and a latency counts from the scheduled moment: a stall is
 * seen by every request that it held up, not by the DEPTH ones that were on their way.
 *
 * With --fsync=N each slot is a program of its own that flushes behind N of its writes and waits
 * for the answer.
 *
 * Prints one JSON object. SIGINT and SIGTERM end the load early and print it, too.
 */
#include <endian.h>
#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { CMD_READ = 0, CMD_WRITE = 1, CMD_DISC = 2, CMD_FLUSH = 3 };
enum { MAGIC_REQUEST = 0x25609513, MAGIC_REPLY = 0x67446698 };
enum {
    DEPTH_MAX = 256,
    THREADS_MAX = 16,
    INPUT_LEN = 256 << 10,
    HIST_STEPS = 64,
    HIST_LEN = 64 * 40
};

struct options {
    const char *sock, *export;
    const char *rw; /* randread, randwrite, read, write, randrw, rw */
    uint64_t bs, depth, conns, fsync, seed;
    uint64_t from, span;      /* the range of the disk that is used */
    uint64_t slots, slot_len; /* instead: that many places of slot_len, evenly over the range */
    uint64_t count;           /* requests at most, 0: no bound */
    double secs, rate, read_share;
    bool once, random, final_flush;
};
static struct options opt = {
    .export = "",
    .rw = "randread",
    .bs = 4096,
    .depth = 32,
    .conns = 1,
    .seed = 7,
    .secs = 1,
    .read_share = .5,
    .final_flush = true,
};

struct hist {
    uint64_t n[HIST_LEN], count, max, sum;
};

struct slot {
    uint64_t start_ns, writes;
    uint16_t cmd;
};

struct thread {
    pthread_t id;
    unsigned nr;
    int fd;
    uint64_t disk_len, rng, next;
    struct slot slots[DEPTH_MAX];
    unsigned idle[DEPTH_MAX], nb_idle;
    struct hist io, flush;
    uint64_t bytes, errors, begin_ns, end_ns, gap_ns, last_ns, final_flush_ns;
    uint8_t *in;
    size_t in_len;
    uint64_t skip; /* payload of a read that is still to come */
    unsigned skip_slot;
};

struct request {
    uint32_t magic;
    uint16_t flags, cmd;
    uint64_t cookie, off;
    uint32_t len;
} __attribute__((packed));

struct reply {
    uint32_t magic, error;
    uint64_t cookie;
} __attribute__((packed));

static atomic_bool ended;
static atomic_uint_fast64_t started;
static uint8_t *payload;

static void die(const char *what)
{
    fprintf(stderr, "nbdload: %s: %s\n", what, errno ? strerror(errno) : "protocol error");
    exit(1);
}

static uint64_t now_ns(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static unsigned hist_index(uint64_t ns)
{
    if (ns < HIST_STEPS)
        return (unsigned)ns;
    unsigned octave = 63u - (unsigned)__builtin_clzll(ns) - 6;
    unsigned i = HIST_STEPS * (octave + 1) + (unsigned)(ns >> octave) - HIST_STEPS;
    return i < HIST_LEN ? i : HIST_LEN - 1;
}

static uint64_t hist_value(unsigned i)
{
    if (i < HIST_STEPS)
        return i;
    unsigned octave = i / HIST_STEPS - 1;
    return (uint64_t)(i % HIST_STEPS + HIST_STEPS) << octave;
}

static void hist_add(struct hist *h, uint64_t ns)
{
    h->n[hist_index(ns)]++;
    h->count++;
    h->sum += ns;
    if (ns > h->max)
        h->max = ns;
}

static double hist_us(const struct hist *h, double share)
{
    uint64_t want = (uint64_t)ceil((double)h->count * share), seen = 0;

    for (unsigned i = 0; i < HIST_LEN; i++) {
        seen += h->n[i];
        if (seen >= want && seen)
            return (double)hist_value(i) / 1e3;
    }
    return 0;
}

static uint64_t mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* a permutation of 0..n-1: Feistel rounds on the next even number of bits, walked until inside */
static uint64_t permute(uint64_t i, uint64_t n, uint64_t seed)
{
    unsigned half = 1;

    while ((1ull << (2 * half)) < n)
        half++;
    uint64_t mask = (1ull << half) - 1;
    do {
        uint64_t l = i >> half, r = i & mask;
        for (unsigned k = 0; k < 4; k++) {
            uint64_t t = l ^ (mix(r + seed * 4 + k) & mask);
            l = r;
            r = t;
        }
        i = l << half | r;
    } while (i >= n);
    return i;
}

/* where the i-th of `places` places begins */
static uint64_t place_off(uint64_t i, uint64_t range)
{
    if (!opt.slots)
        return opt.from + i * opt.bs;
    uint64_t each = opt.slot_len / opt.bs, stride = range / opt.slots / opt.bs * opt.bs;
    return opt.from + i / each * stride + i % each * opt.bs;
}

static uint64_t next_off(struct thread *t)
{
    uint64_t range = opt.span ? opt.span : t->disk_len - opt.from;
    uint64_t places = opt.slots ? opt.slots * (opt.slot_len / opt.bs) : range / opt.bs;
    uint64_t i = t->next++ * opt.conns + t->nr; /* the connections share one order */

    if (opt.random && !opt.once) {
        t->rng = mix(t->rng);
        return place_off(t->rng % places, range);
    }
    return place_off(opt.random ? permute(i % places, places, opt.seed) : i % places, range);
}

static bool once_done(const struct thread *t)
{
    uint64_t range = opt.span ? opt.span : t->disk_len - opt.from;
    uint64_t places = opt.slots ? opt.slots * (opt.slot_len / opt.bs) : range / opt.bs;

    return opt.once && t->next * opt.conns + t->nr >= places;
}

static void take_input(struct thread *t);

/* past what was sent; the parts that are left */
static size_t advance(struct iovec **iov, size_t nb, size_t n)
{
    for (; nb > 0 && n >= (*iov)->iov_len; nb--, (*iov)++)
        n -= (*iov)->iov_len;
    if (nb > 0) {
        (*iov)->iov_base = (uint8_t *)(*iov)->iov_base + n;
        (*iov)->iov_len -= n;
    }
    return nb;
}

/* takes replies while the server does not take requests: both may be waiting for the other to read
 */
static void send_requests(struct thread *t, struct iovec *iov, size_t nb)
{
    while (nb > 0) {
        struct msghdr msg = {.msg_iov = iov, .msg_iovlen = nb};
        ssize_t n = sendmsg(t->fd, &msg, MSG_NOSIGNAL | MSG_DONTWAIT);

        if (n >= 0) {
            nb = advance(&iov, nb, (size_t)n);
        } else if (errno == EAGAIN) {
            struct pollfd p = {.fd = t->fd, .events = POLLIN | POLLOUT};
            if (poll(&p, 1, -1) > 0 && (p.revents & POLLIN))
                take_input(t);
        } else if (errno != EINTR) {
            die("send");
        }
    }
}

static void send_all(int fd, struct iovec *iov, size_t nb)
{
    while (nb > 0) {
        struct msghdr msg = {.msg_iov = iov, .msg_iovlen = nb};
        ssize_t n = sendmsg(fd, &msg, MSG_NOSIGNAL);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            die("send");
        nb = advance(&iov, nb, (size_t)n);
    }
}

static void get_all(int fd, void *buf, size_t len)
{
    for (ssize_t n; len > 0; len -= (size_t)n, buf = (uint8_t *)buf + n) {
        n = recv(fd, buf, len, 0);
        if (n == 0)
            errno = ECONNRESET;
        if (n <= 0)
            die("receive");
    }
}

/* EXPORT_NAME: simple replies, nothing else is asked for */
static void connect_to(struct thread *t)
{
    struct sockaddr_un sa = {.sun_family = AF_UNIX};
    uint8_t hello[18], info[10], zeroes[124];
    uint32_t name_len = (uint32_t)strlen(opt.export);
    struct {
        uint32_t flags;
        char magic[8];
        uint32_t option, len;
    } __attribute__((packed)) ask = {htobe32(3), "", htobe32(1), htobe32(name_len)};

    memcpy(ask.magic, "IHAVEOPT", 8);
    if (strlen(opt.sock) >= sizeof(sa.sun_path)) {
        errno = ENAMETOOLONG;
        die(opt.sock);
    }
    memcpy(sa.sun_path, opt.sock, strlen(opt.sock));
    t->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (t->fd < 0 || connect(t->fd, (struct sockaddr *)&sa, sizeof(sa)) < 0)
        die(opt.sock);
    get_all(t->fd, hello, sizeof(hello));
    errno = 0;
    if (memcmp(hello, "NBDMAGICIHAVEOPT", 16))
        die("not an NBD server");
    struct iovec iov[2] = {{&ask, sizeof(ask)}, {(void *)(uintptr_t)opt.export, name_len}};
    send_all(t->fd, iov, name_len ? 2 : 1);
    get_all(t->fd, info, sizeof(info));
    if (!(hello[17] & 2))
        get_all(t->fd, zeroes, sizeof(zeroes));
    uint64_t len;
    memcpy(&len, info, sizeof(len));
    t->disk_len = be64toh(len);
    int big = 4 << 20;
    setsockopt(t->fd, SOL_SOCKET, SO_SNDBUF, &big, sizeof(big));
    setsockopt(t->fd, SOL_SOCKET, SO_RCVBUF, &big, sizeof(big));
}

static uint16_t next_cmd(struct thread *t, const struct slot *s)
{
    if (opt.fsync && s->writes >= opt.fsync)
        return CMD_FLUSH;
    if (strstr(opt.rw, "read"))
        return CMD_READ;
    if (strstr(opt.rw, "write"))
        return CMD_WRITE;
    t->rng = mix(t->rng);
    return (double)(t->rng >> 11) * 0x1p-53 < opt.read_share ? CMD_READ : CMD_WRITE;
}

/* a request that may not be started any more leaves its slot idle; 0: nothing is due before
 * *ret_wait_ns */
static bool may_start(struct thread *t, uint64_t now, uint64_t *ret_due_ns)
{
    *ret_due_ns = now;
    if (atomic_load_explicit(&ended, memory_order_relaxed) || once_done(t))
        return false;
    if (opt.secs > 0 && (double)(now - t->begin_ns) > opt.secs * 1e9)
        return false;
    if (opt.rate > 0) {
        double each = 1e9 * (double)opt.conns / opt.rate;
        *ret_due_ns = t->begin_ns + (uint64_t)((double)t->next * each);
        if (*ret_due_ns > now)
            return false;
    }
    return !opt.count || atomic_fetch_add(&started, 1) < opt.count;
}

/* starts what is due on the idle slots; when the next one is due, 0: never */
static uint64_t start_requests(struct thread *t)
{
    static _Thread_local struct request reqs[DEPTH_MAX];
    static _Thread_local struct iovec iov[2 * DEPTH_MAX];
    size_t nb = 0, nb_reqs = 0;
    uint64_t now = now_ns(), due = now, next_due = 0;

    while (t->nb_idle > 0) {
        unsigned nr = t->idle[t->nb_idle - 1];
        struct slot *s = &t->slots[nr];
        uint16_t cmd = next_cmd(t, s);

        if (cmd == CMD_FLUSH) {
            due = now;
        } else if (!may_start(t, now, &due)) {
            next_due = due > now ? due : 0;
            break;
        }
        t->nb_idle--;
        s->cmd = cmd;
        s->start_ns = opt.rate > 0 && cmd != CMD_FLUSH ? due : now;
        s->writes = cmd == CMD_FLUSH ? 0 : s->writes + (cmd == CMD_WRITE);
        uint64_t off = cmd == CMD_FLUSH ? 0 : next_off(t);
        reqs[nb_reqs] = (struct request){
            htobe32(MAGIC_REQUEST), 0,
            htobe16(cmd),           htobe64(nr),
            htobe64(off),           htobe32(cmd == CMD_FLUSH ? 0 : (uint32_t)opt.bs),
        };
        iov[nb++] = (struct iovec){&reqs[nb_reqs++], sizeof(struct request)};
        if (cmd == CMD_WRITE)
            iov[nb++] = (struct iovec){payload, opt.bs};
    }
    send_requests(t, iov, nb);
    return next_due;
}

static void answered(struct thread *t, unsigned nr, uint64_t now)
{
    struct slot *s = &t->slots[nr];

    hist_add(s->cmd == CMD_FLUSH ? &t->flush : &t->io, now - s->start_ns);
    if (s->cmd != CMD_FLUSH)
        t->bytes += opt.bs;
    if (now - t->last_ns > t->gap_ns)
        t->gap_ns = now - t->last_ns;
    t->last_ns = now;
    t->idle[t->nb_idle++] = nr;
}

static void take_replies(struct thread *t)
{
    uint64_t now = now_ns();
    size_t pos = 0;

    for (;;) {
        if (t->skip > 0) {
            size_t n = t->in_len - pos < t->skip ? t->in_len - pos : t->skip;
            pos += n;
            t->skip -= n;
            if (t->skip > 0)
                break;
            answered(t, t->skip_slot, now);
        }
        struct reply r;
        if (t->in_len - pos < sizeof(r))
            break;
        memcpy(&r, t->in + pos, sizeof(r));
        pos += sizeof(r);
        unsigned nr = (unsigned)be64toh(r.cookie);
        errno = 0;
        if (be32toh(r.magic) != MAGIC_REPLY || nr >= opt.depth)
            die("reply");
        t->errors += r.error != 0;
        if (t->slots[nr].cmd == CMD_READ && !r.error) {
            t->skip = opt.bs;
            t->skip_slot = nr;
        } else {
            answered(t, nr, now);
        }
    }
    t->in_len -= pos;
    memmove(t->in, t->in + pos, t->in_len);
}

static void take_input(struct thread *t)
{
    ssize_t n = recv(t->fd, t->in + t->in_len, INPUT_LEN - t->in_len, 0);
    if (n < 0 && errno == EINTR)
        return;
    if (n == 0)
        errno = ECONNRESET;
    if (n <= 0)
        die("receive");
    t->in_len += (size_t)n;
    take_replies(t);
}

static void wait_replies(struct thread *t, uint64_t due_ns)
{
    if (due_ns) {
        uint64_t now = now_ns(), left = due_ns > now ? due_ns - now : 0;
        struct timespec ts = {(time_t)(left / 1000000000u), (long)(left % 1000000000u)};
        struct pollfd p = {.fd = t->fd, .events = POLLIN};
        if (ppoll(&p, 1, &ts, NULL) <= 0)
            return;
    }
    take_input(t);
}

static void flush_at_end(struct thread *t)
{
    struct request r = {htobe32(MAGIC_REQUEST), 0, htobe16(CMD_FLUSH), 0, 0, 0};
    struct iovec iov = {&r, sizeof(r)};
    struct reply reply;
    uint64_t from = now_ns();

    send_all(t->fd, &iov, 1);
    get_all(t->fd, &reply, sizeof(reply));
    t->errors += reply.error != 0;
    t->final_flush_ns = now_ns() - from;
}

static void *load(void *arg)
{
    struct thread *t = arg;

    t->begin_ns = t->last_ns = now_ns();
    for (;;) {
        uint64_t due = start_requests(t);
        if (t->nb_idle == opt.depth && !due)
            break;
        wait_replies(t, t->nb_idle > 0 ? due : 0);
    }
    t->end_ns = now_ns();
    if (t->nr == 0 && opt.final_flush && !strstr(opt.rw, "read"))
        flush_at_end(t);
    struct request bye = {htobe32(MAGIC_REQUEST), 0, htobe16(CMD_DISC), 0, 0, 0};
    send_all(t->fd, &(struct iovec){&bye, sizeof(bye)}, 1);
    close(t->fd);
    return NULL;
}

static void print_hist(const char *name, const struct hist *h)
{
    printf(", \"%s\": {\"count\": %llu, \"mean_us\": %.1f, \"p50_us\": %.1f, \"p99_us\": %.1f, "
           "\"p999_us\": %.1f, \"max_us\": %.1f, \"octaves\": [",
           name, (unsigned long long)h->count,
           h->count ? (double)h->sum / 1e3 / (double)h->count : 0, hist_us(h, .5), hist_us(h, .99),
           hist_us(h, .999), (double)h->max / 1e3);
    /* the histogram by octaves of microseconds: below 1, 2, 4, ... */
    for (unsigned o = 0, i = 0; o < 26; o++) {
        uint64_t n = 0;
        for (; i < HIST_LEN && hist_value(i) < 1000ull << o; i++)
            n += h->n[i];
        printf("%s%llu", o ? "," : "", (unsigned long long)n);
    }
    printf("]}");
}

static void print_result(const struct thread *threads)
{
    static struct hist io, flush;
    uint64_t bytes = 0, errors = 0, begin = UINT64_MAX, end = 0, gap = 0;

    for (unsigned k = 0; k < opt.conns; k++) {
        const struct thread *t = &threads[k];
        for (unsigned i = 0; i < HIST_LEN; i++) {
            io.n[i] += t->io.n[i];
            flush.n[i] += t->flush.n[i];
        }
        io.count += t->io.count, io.sum += t->io.sum, flush.count += t->flush.count,
            flush.sum += t->flush.sum;
        io.max = io.max > t->io.max ? io.max : t->io.max;
        flush.max = flush.max > t->flush.max ? flush.max : t->flush.max;
        bytes += t->bytes, errors += t->errors;
        begin = begin < t->begin_ns ? begin : t->begin_ns;
        end = end > t->end_ns ? end : t->end_ns;
        gap = gap > t->gap_ns ? gap : t->gap_ns;
    }
    double secs = (double)(end - begin) / 1e9;
    printf("{\"rw\": \"%s\", \"bs\": %llu, \"depth\": %llu, \"conns\": %llu, \"secs\": %.6f, "
           "\"ios\": %llu, \"iops\": %.1f, \"bytes\": %llu, "
           "\"errors\": %llu, \"gap_us\": %.1f, \"final_flush_us\": %.1f",
           opt.rw, (unsigned long long)opt.bs, (unsigned long long)opt.depth,
           (unsigned long long)opt.conns, secs, (unsigned long long)io.count,
           secs > 0 ? (double)io.count / secs : 0, (unsigned long long)bytes,
           (unsigned long long)errors, (double)gap / 1e3, (double)threads[0].final_flush_ns / 1e3);
    print_hist("lat", &io);
    print_hist("flush", &flush);
    printf("}\n");
}

static void on_signal(int nr)
{
    (void)nr;
    atomic_store(&ended, true);
}

static void usage(void)
{
    fprintf(stderr, "usage: nbdload SOCKET [--export NAME] [--rw "
                    "read|write|rw|randread|randwrite|randrw] [--bs N] [--depth N] [--conns N]\n"
                    "  [--secs S] [--count N] [--rate N] [--fsync N] [--once] [--from N] [--span "
                    "N] [--slots N --slot-len N]\n"
                    "  [--read-share X] [--seed N] [--no-final-flush]\n"
                    "--once: no place twice; --rate: requests a second, latencies from the "
                    "scheduled moment.\n");
    exit(2);
}

static void parse(int argc, char **argv)
{
    static const struct option names[] = {
        {"export", 1, 0, 'e'},
        {"rw", 1, 0, 'w'},
        {"bs", 1, 0, 'b'},
        {"depth", 1, 0, 'd'},
        {"conns", 1, 0, 'c'},
        {"secs", 1, 0, 't'},
        {"count", 1, 0, 'n'},
        {"rate", 1, 0, 'r'},
        {"fsync", 1, 0, 'f'},
        {"once", 0, 0, 'o'},
        {"from", 1, 0, 'F'},
        {"span", 1, 0, 'S'},
        {"slots", 1, 0, 'p'},
        {"slot-len", 1, 0, 'l'},
        {"read-share", 1, 0, 'm'},
        {"seed", 1, 0, 's'},
        {"no-final-flush", 0, 0, 'x'},
        {0},
    };
    for (int c; (c = getopt_long(argc, argv, "", names, NULL)) != -1;) {
        uint64_t n = optarg ? strtoull(optarg, NULL, 0) : 0;
        switch (c) {
        case 'e':
            opt.export = optarg;
            break;
        case 'w':
            opt.rw = optarg;
            break;
        case 'b':
            opt.bs = n;
            break;
        case 'd':
            opt.depth = n;
            break;
        case 'c':
            opt.conns = n;
            break;
        case 't':
            opt.secs = strtod(optarg, NULL);
            break;
        case 'n':
            opt.count = n;
            break;
        case 'r':
            opt.rate = strtod(optarg, NULL);
            break;
        case 'f':
            opt.fsync = n;
            break;
        case 'o':
            opt.once = true;
            break;
        case 'F':
            opt.from = n;
            break;
        case 'S':
            opt.span = n;
            break;
        case 'p':
            opt.slots = n;
            break;
        case 'l':
            opt.slot_len = n;
            break;
        case 'm':
            opt.read_share = strtod(optarg, NULL);
            break;
        case 's':
            opt.seed = n;
            break;
        case 'x':
            opt.final_flush = false;
            break;
        default:
            usage();
        }
    }
    if (optind != argc - 1 || !opt.depth || opt.depth > DEPTH_MAX || !opt.conns ||
        opt.conns > THREADS_MAX || !opt.bs)
        usage();
    if (opt.slots && (!opt.slot_len || opt.slot_len % opt.bs))
        usage();
    opt.sock = argv[optind];
    opt.random = strncmp(opt.rw, "rand", 4) == 0;
}

int main(int argc, char **argv)
{
    static struct thread threads[THREADS_MAX];

    parse(argc, argv);
    signal(SIGINT, on_signal);
    signal(SIGTERM, on_signal);
    payload = malloc(opt.bs);
    if (!payload)
        die("memory");
    for (uint64_t i = 0; i < opt.bs; i++)
        payload[i] = (uint8_t)(mix(i / 8 + opt.seed) >> (i % 8 * 8));
    for (unsigned k = 0; k < opt.conns; k++) {
        struct thread *t = &threads[k];
        t->nr = k;
        t->rng = mix(opt.seed * 1000 + k);
        t->in = malloc(INPUT_LEN);
        if (!t->in)
            die("memory");
        for (unsigned i = 0; i < opt.depth; i++)
            t->idle[t->nb_idle++] = i;
        connect_to(t);
    }
    for (unsigned k = 0; k < opt.conns; k++)
        if (pthread_create(&threads[k].id, NULL, load, &threads[k]))
            die("thread");
    for (unsigned k = 0; k < opt.conns; k++)
        pthread_join(threads[k].id, NULL);
    print_result(threads);
    for (unsigned k = 0; k < opt.conns; k++)
        free(threads[k].in);
    free(payload);
    return 0;
}
