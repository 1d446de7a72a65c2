/* Client and server against each other, and against peers that misbehave. */
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include "qmp/qmp.h"
#include "qmp/wire.h"
#include "rt/reactor.h"
#include "rt/timer.h"
#include "rt/wait.h"
#include "test.h"

struct world {
    struct qmp_server *server;
    char path[300];
    int runs, most_runs; /* commands inside slow */
    uint64_t served;
};

SUSPENDS static int cmd_slow(void *ctx, json_t *args, json_t **ret, struct err *err)
{
    struct world *w = ctx;

    w->runs++;
    w->most_runs = MAX(w->most_runs, w->runs);
    timer_sleep(5 * NSEC_PER_MSEC);
    w->runs--;
    *ret = json_pack("{s:I}", "n", (json_int_t)++w->served);
    return 0;
}

static int cmd_fail(void *ctx, json_t *args, json_t **ret, struct err *err)
{
    const char *how = json_string_value(json_object_get(args, "how"));

    if (strcmp(how, "device") == 0)
        return err_set(err, -ENODEV, "Device 'x' not found");
    if (strcmp(how, "active") == 0)
        return err_set(err, -ESRCH, "Block job 'x' not found");
    if (strcmp(how, "busy") == 0)
        return err_errno(err, -EBUSY, "image");
    return err_set(err, -EIO, "something else");
}

static int cmd_event(void *ctx, json_t *args, json_t **ret, struct err *err)
{
    struct world *w = ctx;

    qmp_event(w->server, "THING",
              json_pack("{s:s}", "id", json_string_value(json_object_get(args, "id"))));
    return 0;
}

static const struct qmp_arg fail_args[] = {{"how", 's'}, {NULL}};
static const struct qmp_arg event_args[] = {{"id", 's'}, {NULL}};
static const struct qmp_command commands[] = {
    {"slow", cmd_slow, NULL, false},
    {"slow-oob", cmd_slow, NULL, true},
    {"fail", cmd_fail, fail_args, false},
    {"event", cmd_event, event_args, true},
    {NULL},
};

SUSPENDS static void start(struct world *w)
{
    struct err err = {0};

    *w = (struct world){0};
    snprintf(w->path, sizeof(w->path), "%s/qmp", test_dir());
    if (qmp_server_start(w->path, commands, w, &w->server, &err) < 0)
        test_fail(__FILE__, __LINE__, "%s", err.text);
}

SUSPENDS static struct qmp_client *client(struct world *w)
{
    struct qmp_client *qmp;
    struct err err = {0};

    if (qmp_connect(w->path, &qmp, &err) < 0)
        test_fail(__FILE__, __LINE__, "%s", err.text);
    return qmp;
}

CO_TEST(commands_errors_and_events)
{
    struct world w;
    struct err err = {0};
    json_t *ret;

    start(&w);
    struct qmp_client *qmp = client(&w);
    CHECK_EQ(qmp_execute(qmp, "query-commands", NULL, &ret, &err), 0);
    CHECK_EQ(json_array_size(ret), 7);
    json_decref(ret);
    CHECK_EQ(qmp_execute(qmp, "query-version", NULL, &ret, &err), 0);
    CHECK(json_object_get(json_object_get(ret, "qemu"), "major"));
    json_decref(ret);
    CHECK_EQ(qmp_execute(qmp, "fail", json_pack("{s:s}", "how", "device"), NULL, &err), -ENOENT);
    CHECK_STR(err.text, "Device 'x' not found");
    CHECK_EQ(qmp_execute(qmp, "fail", json_pack("{s:s}", "how", "active"), NULL, &err), -ENOENT);
    CHECK_EQ(qmp_execute(qmp, "fail", json_pack("{s:s}", "how", "busy"), NULL, &err), -EBUSY);
    CHECK_EQ(qmp_execute(qmp, "fail", json_pack("{s:s}", "how", "?"), NULL, &err), -EREMOTEIO);
    CHECK_EQ(qmp_execute(qmp, "nope", NULL, NULL, &err), -EOPNOTSUPP);
    CHECK_STR(err.text, "The command nope has not been found");
    CHECK_EQ(qmp_execute(qmp, "slow", json_pack("{s:i}", "x", 1), NULL, &err), -EREMOTEIO);
    CHECK_STR(err.text, "Parameter 'x' is unexpected");

    CHECK_EQ(qmp_wait_event(qmp, NULL, NULL, NULL, NSEC_PER_MSEC, &ret, &err), -ETIMEDOUT);
    CHECK_EQ(qmp_execute(qmp, "event", json_pack("{s:s}", "id", "one"), NULL, &err), 0);
    CHECK_EQ(qmp_execute(qmp, "event", json_pack("{s:s}", "id", "two"), NULL, &err), 0);
    CHECK_EQ(qmp_wait_event(qmp, "THING", "id", "two", NSEC_PER_SEC, &ret, &err), 0);
    json_decref(ret);
    CHECK_EQ(qmp_wait_event(qmp, "THING", NULL, NULL, NSEC_PER_SEC, &ret, &err), 0);
    CHECK_STR(json_string_value(json_object_get(json_object_get(ret, "data"), "id")), "one");
    CHECK(json_object_get(json_object_get(ret, "timestamp"), "microseconds"));
    json_decref(ret);
    qmp_client_free(qmp);
    qmp_server_stop(w.server);
    CHECK(access(w.path, F_OK) < 0);
}

struct caller {
    struct world *w;
    const char *command;
    json_int_t last;
};

SUSPENDS static int call_many(void *arg)
{
    struct caller *c = arg;
    struct qmp_client *qmp = client(c->w);

    for (int i = 0; i < 5; i++) {
        json_t *ret;
        struct err err;

        CHECK_EQ(qmp_execute(qmp, c->command, NULL, &ret, &err), 0);
        json_int_t n = json_integer_value(json_object_get(ret, "n"));
        CHECK(n > c->last);
        c->last = n;
        json_decref(ret);
    }
    qmp_client_free(qmp);
    return 0;
}

CO_TEST(one_command_at_a_time_unless_safe)
{
    struct world w;
    struct co_group group;

    start(&w);
    for (int oob = 0; oob < 2; oob++) {
        struct caller callers[4];

        co_group_init(&group);
        w.most_runs = 0;
        for (int i = 0; i < 4; i++) {
            callers[i] = (struct caller){&w, oob ? "slow-oob" : "slow", 0};
            CHECK_EQ(co_group_spawn(&group, call_many, &callers[i]), 0);
        }
        CHECK_EQ(co_group_wait(&group), 0);
        if (oob)
            CHECK(w.most_runs > 1);
        else
            CHECK_EQ(w.most_runs, 1);
    }
    qmp_server_stop(w.server);
}

SUSPENDS static void send_text(int fd, const char *text)
{
    CHECK_EQ(qmp_send_all(fd, text, strlen(text)), 0);
}

/* Reads lines until one holds `want`. */
SUSPENDS static void expect_line(int fd, struct qmp_framer *f, const char *want)
{
    for (;;) {
        const char *text;
        size_t len;

        if (qmp_framer_next(f, &text, &len) == 1) {
            _cleanup_(freep) char *line = strndup(text, len);
            if (!strstr(line, want))
                test_fail(__FILE__, __LINE__, "got %s, not %s", line, want);
            return;
        }
        char *room = qmp_framer_room(f);
        ssize_t n = io_recv(fd, room, QMP_RECV);
        if (n <= 0)
            test_fail(__FILE__, __LINE__, "connection ended, not %s", want);
        qmp_framer_added(f, (size_t)n);
    }
}

CO_TEST(negotiation_and_malformed_input)
{
    static const struct {
        const char *send, *want;
    } steps[] = {
        {"{\"execute\":\"slow\"}\n", "Expecting capabilities negotiation with 'qmp_capabilities'"},
        {"{\"execute\":\"qmp_capabilities\",\"arguments\":{\"x\":1}}",
         "Parameter 'x' is unexpected"},
        {"{\"execute\":\"qmp_capabilities\",\"arguments\":{\"enable\":[\"zz\"]}}",
         "Capability 'zz' is not available"},
        {"{\"execute\":\"qmp_capabilities\",\"arguments\":{\"enable\":[]}}", "{\"return\": {}}"},
        {"{\"execute\":\"qmp_capabilities\",\"id\":7}", "\"id\": 7"},
        {"garbage\n", "JSON parse error, "},
        {"[1]", "QMP input must be a JSON object"},
        {"{\"execute\":1}", "QMP input member 'execute' must be a string"},
        {"{\"exec\":1}", "QMP input member 'exec' is unexpected"},
        {"{\"arguments\":{}}", "QMP input lacks member 'execute'"},
        {"{\"execute\":\"slow\",\"arguments\":[]}",
         "QMP input member 'arguments' must be an object"},
        {"{\"execute\":\"query-version\",\"id\":{\"a\":[1]}}", "\"id\": {\"a\": [1]}"},
    };
    struct world w;
    struct qmp_framer f;

    start(&w);
    int fd = qmp_connect_unix(w.path, NULL);
    CHECK(fd >= 0);
    qmp_framer_init(&f, 1 << 20);
    expect_line(fd, &f, "{\"QMP\": {\"version\": {\"qemu\": {");
    for (size_t i = 0; i < ARRAY_SIZE(steps); i++) {
        send_text(fd, steps[i].send);
        expect_line(fd, &f, steps[i].want);
    }
    qmp_framer_fini(&f);
    close(fd);
    qmp_server_stop(w.server);
}

CO_TEST(deep_nesting_ends_the_connection_only)
{
    struct world w;
    struct qmp_framer f;
    static char deep[3000];

    start(&w);
    int fd = qmp_connect_unix(w.path, NULL);
    qmp_framer_init(&f, 1 << 20);
    expect_line(fd, &f, "QMP");
    memset(deep, '[', sizeof(deep));
    CHECK_EQ(qmp_send_all(fd, deep, sizeof(deep)), 0);
    expect_line(fd, &f, "too long or too deep");
    char c;
    CHECK(io_recv(fd, &c, 1) <= 0);
    close(fd);
    qmp_framer_fini(&f);
    qmp_client_free(client(&w)); /* others are served */
    qmp_server_stop(w.server);
}

CO_TEST(a_client_that_does_not_read_is_dropped)
{
    struct world w;
    json_t *ret;

    start(&w);
    struct qmp_client *deaf = client(&w), *good = client(&w);
    char big[1000];
    memset(big, 'x', sizeof(big) - 1);
    big[sizeof(big) - 1] = '\0';
    for (int i = 0; i < 3000; i++) {
        qmp_event(w.server, "BIG", json_pack("{s:s}", "id", big));
        CHECK_EQ(qmp_wait_event(good, "BIG", NULL, NULL, NSEC_PER_SEC, &ret, NULL), 0);
        json_decref(ret);
    }
    int got = 0, rc;
    while ((rc = qmp_wait_event(deaf, "BIG", NULL, NULL, NSEC_PER_SEC, &ret, NULL)) == 0) {
        json_decref(ret);
        got++;
    }
    CHECK_EQ(rc, -EPIPE);
    CHECK(got < 3000);
    CHECK_EQ(qmp_execute(good, "slow", NULL, NULL, NULL), 0);
    qmp_client_free(deaf);
    qmp_client_free(good);
    qmp_server_stop(w.server);
}

CO_TEST(sockets_are_private_and_stale_ones_replaced)
{
    struct world w;
    struct qmp_server *second;
    struct stat st;
    struct err err = {0};

    start(&w);
    CHECK_EQ(stat(w.path, &st), 0);
    CHECK_EQ(st.st_mode & 07777, 0600);
    CHECK_EQ(qmp_server_start(w.path, commands, &w, &second, &err), -EADDRINUSE);
    CHECK(strstr(err.text, "another server listens there"));
    char stale[320];
    snprintf(stale, sizeof(stale), "%s.stale", w.path);
    CHECK_EQ(link(w.path, stale), 0);
    qmp_server_stop(w.server);

    CHECK_EQ(rename(stale, w.path), 0); /* as a killed server leaves it */
    CHECK_EQ(qmp_connect(w.path, &(struct qmp_client *){NULL}, &err), -ECONNREFUSED);
    start(&w);
    qmp_client_free(client(&w));
    qmp_server_stop(w.server);
    CHECK_EQ(qmp_connect(w.path, &(struct qmp_client *){NULL}, &err), -ENOENT);

    int fd = open(w.path, O_CREAT | O_WRONLY, 0600);
    close(fd);
    CHECK_EQ(qmp_server_start(w.path, commands, &w, &second, &err), -EADDRINUSE);
    CHECK_EQ(access(w.path, F_OK), 0);
    unlink(w.path);
}

CO_TEST(long_socket_paths_work)
{
    struct world w = {0};
    char dir[260];

    snprintf(dir, sizeof(dir), "%s/%0120d", test_dir(), 1);
    CHECK_EQ(mkdir(dir, 0700), 0);
    snprintf(w.path, sizeof(w.path), "%s/q.qmp", dir);
    CHECK_EQ(qmp_server_start(w.path, commands, &w, &w.server, NULL), 0);
    qmp_client_free(client(&w));
    qmp_server_stop(w.server);
}

SUSPENDS static int call_once(void *arg)
{
    struct caller *c = arg;
    struct qmp_client *qmp = client(c->w);
    json_t *ret;

    CHECK_EQ(qmp_execute(qmp, c->command, NULL, &ret, NULL), 0);
    c->last = json_integer_value(json_object_get(ret, "n"));
    json_decref(ret);
    qmp_client_free(qmp);
    return 0;
}

CO_TEST(stop_lets_a_running_command_answer)
{
    struct world w;
    struct co_group group;
    struct caller c = {&w, "slow", 0};

    start(&w);
    co_group_init(&group);
    CHECK_EQ(co_group_spawn(&group, call_once, &c), 0);
    while (w.runs == 0)
        timer_sleep(NSEC_PER_MSEC);
    struct qmp_client *idle = client(&w);
    qmp_server_stop(w.server);
    CHECK_EQ(co_group_wait(&group), 0);
    CHECK_EQ(c.last, 1);
    CHECK_EQ(qmp_execute(idle, "slow", NULL, NULL, NULL), -EPIPE);
    CHECK_EQ(qmp_execute(idle, "slow", NULL, NULL, NULL), -EPIPE);
    qmp_client_free(idle);
}
