/*
 * Running a program from a helper thread: see offload.h.
 *
 * Its output is read as it comes, so that it never waits for us. At the time limit it gets SIGTERM,
 * which programs in a critical section put off; after the grace SIGKILL; and if even that does not
 * end it (it hangs in the kernel, on a device that does not answer) the caller is let go and a
 * thread of its own waits for the end.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include "rt/internal.h"
#include "rt/offload.h"

#define CHUNK          ((size_t)16 << 10)
#define NEVER          INT64_MAX
#define LOOK_MS        20  /* how often an end is looked for once the pipes are closed */
#define KILLED_WAIT_MS 500 /* a killed program that is still there then hangs in the kernel */

struct output {
    int fd;     /* our end of the pipe, -1 at its end */
    char *text; /* always terminated */
    size_t len, cap, max;
};
struct exec {
    const char *const *argv;
    const struct exec_opts *opts;
    struct output out[2]; /* stdout, stderr */
    bool want[2];
    pid_t pid;
    bool ended;
    int status;   /* of waitpid, once ended */
    int64_t next; /* when the next of `signals` is due, in ms; NEVER: no limit */
    unsigned nb_signals;
};

static int64_t now_ms(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (int64_t)ts.tv_sec * 1000 + ts.tv_nsec / 1000000;
}

/* When `ms` have passed for certain: now_ms() is the begun millisecond, not the exact time. */
static int64_t ms_from_now(int64_t ms)
{
    return now_ms() + ms + 1;
}

/* ---- start ---- */

static bool is_overridden(const char *entry, const char *const *env)
{
    const char *eq = strchr(entry, '=');

    for (; eq && *env; env++)
        if (strncmp(*env, entry, (size_t)(eq - entry) + 1) == 0)
            return true;
    return false;
}

/* This process's environment with `env` over it; the caller frees the array only. */
static const char **merge_env(const char *const *env)
{
    size_t nr = 1;

    for (char **e = environ; *e; e++)
        nr++;
    for (const char *const *e = env; *e; e++)
        nr++;
    const char **ret = calloc(nr, sizeof(*ret));
    if (!ret)
        return NULL;
    size_t n = 0;
    for (char **e = environ; *e; e++)
        if (!is_overridden(*e, env))
            ret[n++] = *e;
    for (; *env; env++)
        ret[n++] = *env;
    return ret;
}

/* The program's end of each wanted pipe replaces its descriptor, the others get /dev/null. */
static int spawn(struct exec *e, const int ends[2])
{
    static const char *const no_env[] = {NULL};
    posix_spawn_file_actions_t fa;
    posix_spawnattr_t attr;
    short flags = POSIX_SPAWN_SETSIGMASK;
    sigset_t none;
    _cleanup_(freep) const char **env = merge_env(e->opts->env ? e->opts->env : no_env);

    if (!env)
        return -ENOMEM;
    posix_spawn_file_actions_init(&fa);
    posix_spawnattr_init(&attr);
    posix_spawn_file_actions_addopen(&fa, 0, "/dev/null", O_RDONLY, 0);
    for (int i = 0; i < 2; i++) {
        if (ends[i] >= 0)
            posix_spawn_file_actions_adddup2(&fa, ends[i], i + 1);
        else
            posix_spawn_file_actions_addopen(&fa, i + 1, "/dev/null", O_WRONLY, 0);
    }
    sigemptyset(&none); /* this thread blocks all signals, the program must not */
    posix_spawnattr_setsigmask(&attr, &none);
    if (e->opts->own_group)
        flags |= POSIX_SPAWN_SETPGROUP;
    posix_spawnattr_setflags(&attr, flags);
    int rc = posix_spawnp(&e->pid, e->argv[0], &fa, &attr, (char *const *)(uintptr_t)e->argv,
                          (char *const *)(uintptr_t)env);
    posix_spawnattr_destroy(&attr);
    posix_spawn_file_actions_destroy(&fa);
    return -rc;
}

static int start(struct exec *e)
{
    int ends[2] = {-1, -1}, rc = 0;

    for (int i = 0; i < 2 && rc == 0; i++) {
        int fds[2];

        if (!e->want[i])
            continue;
        e->out[i].text = calloc(1, 1);
        if (!e->out[i].text)
            rc = -ENOMEM;
        else if (pipe2(fds, O_CLOEXEC) < 0)
            rc = -errno;
        else
            e->out[i].fd = fds[0], ends[i] = fds[1];
    }
    if (rc == 0)
        rc = spawn(e, ends);
    closep(&ends[0]);
    closep(&ends[1]);
    return rc;
}

/* ---- output ---- */

/* Takes what is in the pipe; what exceeds max, or memory, is read and dropped, so that the program
 * ends. */
static void take_output(struct output *o)
{
    char dropped[1024];
    char *to = dropped;
    size_t room = MIN(o->max - o->len, CHUNK);

    if (room && o->len + room + 1 > o->cap) {
        size_t cap = MAX(o->cap * 2, o->len + room + 1);
        char *grown = realloc(o->text, cap);

        if (grown)
            o->text = grown, o->cap = cap;
        else
            room = 0;
    }
    if (room)
        to = o->text + o->len;
    ssize_t n = read(o->fd, to, room ? room : sizeof(dropped));
    if (n < 0 && errno == EINTR)
        return;
    if (n <= 0) {
        close(TAKE_FD(o->fd));
        return;
    }
    if (room) {
        o->len += (size_t)n;
        o->text[o->len] = 0;
    }
}

/* ---- end ---- */

static void *wait_for_end(void *arg)
{
    while (waitpid((pid_t)(intptr_t)arg, NULL, 0) < 0 && errno == EINTR)
        ;
    return NULL;
}

static void leave_behind(const struct exec *e)
{
    pthread_t id;

    /* Without a thread it stays a zombie: no more than a number. */
    if (pthread_create(&id, NULL, wait_for_end, (void *)(intptr_t)e->pid) == 0)
        pthread_detach(id);
}

static void look_for_end(struct exec *e, int flags)
{
    pid_t pid;

    while ((pid = waitpid(e->pid, &e->status, flags)) < 0 && errno == EINTR)
        ;
    e->ended = pid != 0;
    if (pid < 0)
        e->status = 127 << 8; /* somebody else has waited for it: SIGCHLD is ignored */
}

/* The limit has passed: the next signal. false: all were sent and it is still there. */
static bool press(struct exec *e)
{
    static const int signals[] = {SIGTERM, SIGKILL};

    if (e->nb_signals == ARRAY_SIZE(signals))
        return false;
    int sig = signals[e->nb_signals++];
    kill(e->opts->own_group ? -e->pid : e->pid, sig);
    e->next = ms_from_now(sig == SIGKILL ? KILLED_WAIT_MS : (int64_t)e->opts->grace_ms);
    return true;
}

/* How long to sleep: to the next signal; shorter when only the program's end is missing, for which
 * there is no descriptor to wait on. */
static int sleep_ms(const struct exec *e, bool piped)
{
    int64_t left = e->next == NEVER ? INT64_MAX : MAX(e->next - now_ms(), (int64_t)0);

    if (!piped || e->ended)
        left = MIN(left, (int64_t)LOOK_MS);
    return left > INT32_MAX ? -1 : (int)left;
}

/* Reads the output and waits for the end. -ETIMEDOUT: it goes on without us. */
static int follow(struct exec *e)
{
    for (;;) {
        struct pollfd p[2] = {{.fd = e->out[0].fd, .events = POLLIN},
                              {.fd = e->out[1].fd, .events = POLLIN}};
        bool piped = p[0].fd >= 0 || p[1].fd >= 0;

        if (!piped && !e->ended)
            look_for_end(e, e->next == NEVER ? 0 : WNOHANG);
        if (!piped && e->ended)
            return 0;
        if (poll(p, 2, sleep_ms(e, piped)) < 0 && errno != EINTR)
            return -errno;
        for (int i = 0; i < 2; i++)
            if (p[i].fd >= 0 && p[i].revents)
                take_output(&e->out[i]);
        if (now_ms() < e->next)
            continue;
        if (!e->ended)
            look_for_end(e, WNOHANG);
        if (e->ended)
            return 0; /* what it has started holds the pipes */
        if (!press(e)) {
            leave_behind(e);
            return -ETIMEDOUT;
        }
    }
}

static int exec_child(struct exec *e)
{
    int rc = start(e);

    e->next = e->opts->limit_ms ? ms_from_now(e->opts->limit_ms) : NEVER;
    if (rc == 0)
        rc = follow(e);
    closep(&e->out[0].fd);
    closep(&e->out[1].fd);
    if (rc < 0)
        return rc;
    /* One that has put off SIGTERM and got its work done has not failed. */
    if (e->nb_signals && e->status != 0)
        return -ETIMEDOUT;
    return WIFEXITED(e->status) ? WEXITSTATUS(e->status) : 128 + WTERMSIG(e->status);
}

static int exec_work(void *arg)
{
    return exec_child(arg);
}

int offload_exec_with(const char *const argv[], const struct exec_opts *opts, char **ret_out,
                      char **ret_err, size_t max)
{
    struct exec e = {
        .argv = argv,
        .opts = opts,
        .out = {{.fd = -1, .max = max}, {.fd = -1, .max = max}},
        .want = {ret_out != NULL, ret_err != NULL},
    };
    int rc = offload(exec_work, &e);

    if (rc < 0 && rc != -ETIMEDOUT) {
        free(e.out[0].text);
        free(e.out[1].text);
        return rc;
    }
    if (ret_out)
        *ret_out = e.out[0].text;
    if (ret_err)
        *ret_err = e.out[1].text;
    return rc;
}

int offload_exec(const char *const argv[], char **ret_out, char **ret_err, size_t max)
{
    return offload_exec_with(argv, &(struct exec_opts){0}, ret_out, ret_err, max);
}
