/*
 * The life of a server: open the disk, offer it, wait until told to stop, close cleanly.
 *
 * Order of the start: the disk is opened and locked; the control socket listens, so that whoever
 * finds the disk locked finds its server, too; clients are let in; commands are taken.
 *
 * Order of the end: no further commands; clients dropped once their requests are answered; jobs
 * cancelled; control socket closed; nodes and disk closed, top first. Whatever was opened is
 * closed, on a failed start too.
 */
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/signalfd.h>
#include <poll.h>
#include <unistd.h>
#include "rt/reactor.h"
#include "rt/reactors.h"
#include "serve/internal.h"

#define WATCH_NS NSEC_PER_SEC
/* What is there at one tick and the next is written back: old at most two of them and the flush. */
#define WRITE_BACK_NS (400 * NSEC_PER_MSEC)

static const char *serve_name(const struct serve *s)
{
    return s->opts->volume_id ? s->opts->volume_id : s->opts->path;
}

void serve_warn(const struct serve *s, const char *fmt, ...)
{
    char text[512];
    va_list ap;

    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    fprintf(stderr, "varve serve: %s: %s\n", serve_name(s), text);
}

void serve_event(struct serve *s, const char *name, json_t *data)
{
    if (s->qmp)
        qmp_event(s->qmp, name, data);
    else
        json_decref(data);
}

void serve_ask_stop(struct serve *s, const char *reason)
{
    if (!s->stop_reason)
        s->stop_reason = reason;
    wait_queue_wake_all(&s->stop_wait);
}

/* ---- damage ---- */
static const char *damage(const struct serve *s)
{
    for (unsigned i = 0; i < chain_depth(s->chain); i++) {
        const struct layer *layer = chain_layer(s->chain, i);

        if (layer_image(layer) && image_is_corrupt(layer_image(layer)))
            return "image is corrupt; writes are refused";
        if (layer_blk(layer)->flush_failed)
            return "a flush failed; writes are refused";
    }
    return NULL;
}

/* What was lost when the disk was opened, or why answered writes are not recorded: once each. */
static void tell_ack_note(struct serve *s)
{
    struct image *img = layer_image(chain_layer(s->chain, 0));
    const char *note = img ? image_ack_note(img) : "";

    if (*note && strcmp(note, s->ack_note) != 0) {
        snprintf(s->ack_note, sizeof(s->ack_note), "%s", note);
        serve_warn(s, "%s", note);
    }
}

/* Says it once when the engine has stopped writes. */
static void watch(struct timer *t)
{
    struct serve *s = container_of(t, struct serve, watch);
    const char *what = s->damage_told ? NULL : damage(s);

    tell_ack_note(s); /* the top may be another one */
    if (what) {
        s->damage_told = true;
        serve_warn(s, "%s", what);
        serve_event(s, "BLOCK_IMAGE_CORRUPTED",
                    json_pack("{s:s, s:s, s:s, s:b}", "device", "", "node-name",
                              layer_node_name(chain_layer(s->chain, 0)), "msg", what, "fatal", 1));
    }
    timer_arm(t, reactor_now() + WATCH_NS);
}

/* ---- room ---- */

/* When there is none for the disk's volume, and when there is again. */
static void tell_room(void *ctx, enum image_room room, const char *why)
{
    static const char *const names[] = {"ok", "short", "full"};
    static const char *const words[] = {"there is room again", "it can hardly grow any more",
                                        "it cannot grow: new space is not there"};
    struct serve *s = ctx;
    if (s->stop_reason)
        return;
    bool waits = room == IMAGE_ROOM_FULL && s->opts->on_full == IMAGE_FULL_WAIT;

    serve_warn(s, "%s%s%s%s", words[room], waits ? ", writes that need it wait" : "",
               *why ? ": " : "", why);
    serve_event(
        s, "X_VARVE_ROOM",
        json_pack("{s:s, s:b, s:s}", "room", names[room], "writes-wait", waits, "msg", why));
}

struct image_grow_opts serve_grow_opts(struct serve *s)
{
    return (struct image_grow_opts){
        .chunk = s->opts->grow_chunk, .on_full = s->opts->on_full, .told = tell_room, .ctx = s};
}

/* ---- signals ---- */
SUSPENDS static int signal_main(void *arg)
{
    struct serve *s = arg;
    struct signalfd_siginfo info;

    s->signal_co = co_self();
    while (!s->stop_reason) {
        if (io_poll(s->signal_fd, POLLIN) == -ECANCELED)
            break;
        if (read(s->signal_fd, &info, sizeof(info)) == (ssize_t)sizeof(info))
            serve_ask_stop(s, "host-signal");
    }
    s->signal_co = NULL;
    return 0;
}

static int signals_start(struct serve *s, struct err *err)
{
    sigset_t set;

    signal(SIGPIPE, SIG_IGN);
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    sigprocmask(SIG_BLOCK, &set, NULL);
    s->signal_fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    if (s->signal_fd < 0)
        return err_errno(err, -errno, "signalfd");
    int rc = co_group_spawn(&s->group, signal_main, s);
    return rc < 0 ? err_errno(err, rc, "start") : 0;
}

SUSPENDS static void signals_stop(struct serve *s)
{
    serve_ask_stop(s, "start-failed"); /* it may not have run yet */
    if (s->signal_co)
        io_cancel(s->signal_co);
    co_group_wait(&s->group);
    if (s->signal_fd >= 0)
        close(s->signal_fd);
}

/* ---- start ---- */
/* A guest that may write could give a raw disk the header of an image that names any file of the
 * host: the next start would open that. */
static int refuse_guess(const struct serve *s, struct err *err)
{
    const char *path = s->opts->path;
    size_t len = strlen(path);

    if (s->opts->format || s->opts->read_only || layer_image(chain_layer(s->chain, 0)) ||
        (len > 4 && strcmp(path + len - 4, ".raw") == 0))
        return 0;
    return err_set(
        err, -EINVAL,
        "'%s' has no format that is known: say --format raw if it is a raw disk (what its "
        "guest writes must not decide that)",
        path);
}

int serve_open_chain(struct serve *s, const char *path, const char *format, struct chain **ret,
                     struct err *err)
{
    const struct serve_opts *o = s->opts;
    struct chain_opts opts = {
        .format = format,
        .writable = !o->read_only,
        .buffered = o->buffered,
        .cache_bytes = o->cache_bytes,
        .prealloc_step = o->prealloc_step,
        .space = o->space,
        .grow = serve_grow_opts(s),
    };

    return chain_open(path, &opts, ret, err);
}

SUSPENDS static int open_disk(struct serve *s, struct err *err)
{
    const struct serve_opts *o = s->opts;
    int rc = o->incoming_len ? serve_open_incoming(s, err)
                             : serve_open_chain(s, o->path, o->format, &s->chain, err);

    if (rc == 0 && !s->incoming)
        rc = refuse_guess(s, err);
    if (rc == 0)
        rc = jobs_new(serve_job_event, s, &s->jobs);
    return rc;
}

SUSPENDS static int write_back_main(void *arg)
{
    struct serve *s = arg;

    while (!s->write_back_stop) {
        (void)co_cond_wait_until(&s->write_back_kick, NULL, reactor_now() + WRITE_BACK_NS);
        if (!s->write_back_stop && s->chain)
            (void)chain_write_back_old(s->chain); /* an error is the next request's, too */
    }
    return 0;
}

SUSPENDS static void write_back_end(struct serve *s)
{
    s->write_back_stop = true;
    co_cond_broadcast(&s->write_back_kick);
    co_group_wait(&s->write_back_group);
}

/* Last, so that a start that fails changes nothing; no client was answered before. */
SUSPENDS static int start_ack(struct serve *s, struct err *err)
{
    tell_ack_note(s);
    if (s->opts->durability != SERVE_ACK || s->incoming)
        return 0;
    int rc = chain_start_ack(s->chain, err);
    if (rc == 0)
        tell_ack_note(s);
    return rc;
}

SUSPENDS static int serve_start(struct serve *s, struct err *err)
{
    int rc = signals_start(s, err);

    s->reactors = reactors_new(s->opts->threads ? s->opts->threads : 1);
    if (rc == 0 && !s->reactors)
        rc = err_errno(err, -ENOMEM, "start");
    if (rc == 0)
        rc = open_disk(s, err);
    bool is_held = rc == 0;
    if (is_held)
        chain_hold(s->chain);
    if (rc == 0 && (rc = co_group_spawn(&s->write_back_group, write_back_main, s)) < 0)
        err_errno(err, rc, "start");
    if (rc == 0 && s->opts->qmp_path)
        rc = qmp_server_listen(s->opts->qmp_path,
                               s->incoming ? serve_incoming_commands : serve_commands, s, &s->qmp,
                               err);
    if (rc == 0 && s->opts->opened && !s->incoming)
        s->opts->opened(s->opts->opened_ctx);
    if (rc == 0)
        rc = serve_exports_start(s, err);
    if (rc == 0)
        rc = start_ack(s, err);
    if (rc == 0 && s->qmp)
        rc = qmp_server_accept(s->qmp, err);
    if (is_held)
        chain_release(s->chain);
    return rc;
}

static void announce(struct serve *s)
{
    char text[512];

    serve_exports_print(s);
    snprintf(text, sizeof(text), "READY=1\nSTATUS=%s %s, %u layer%s\n",
             s->incoming ? "waiting for" : "serving", serve_name(s), chain_depth(s->chain),
             chain_depth(s->chain) == 1 ? "" : "s");
    serve_notify(text);
    timer_init(&s->watch, watch);
    timer_arm(&s->watch, reactor_now() + WATCH_NS);
}

/* ---- end ---- */
SUSPENDS static void refuse_and_drop(struct serve *s)
{
    if (s->qmp)
        qmp_server_quiesce(s->qmp);
    serve_hold_end(s);
    serve_event(
        s, "SHUTDOWN",
        json_pack("{s:b, s:s}", "guest", 0, "reason", s->stop_reason ? s->stop_reason : ""));
    if (s->chain)
        chain_stop_waits(s->chain);
    serve_exports_stop(s);
    if (s->jobs)
        jobs_free(s->jobs);
    while (!list_empty(&s->job_notes))
        serve_job_note_free(list_entry(s->job_notes.next, struct serve_job, link));
    if (s->qmp)
        qmp_server_stop(s->qmp);
    s->qmp = NULL;
}

SUSPENDS static int serve_stop(struct serve *s, struct err *err)
{
    struct err close_err = {0};
    int rc = 0;

    refuse_and_drop(s);
    serve_preload_end(s);
    write_back_end(s);
    while (!list_empty(&s->nodes))
        serve_node_close(list_entry(s->nodes.next, struct serve_node, link), NULL);
    if (s->chain)
        rc = chain_close(s->chain, &close_err);
    s->chain = NULL;
    signals_stop(s);
    reactors_free(TAKE_PTR(s->reactors));
    if (rc < 0)
        return err_set(err, rc, "close '%s': %s", serve_name(s), err_text(&close_err));
    return 0;
}

SUSPENDS int serve_run(const struct serve_opts *opts, struct err *err)
{
    struct serve s = {.opts = opts, .signal_fd = -1};

    list_init(&s.nbds);
    list_init(&s.exports);
    list_init(&s.nodes);
    list_init(&s.job_notes);
    co_group_init(&s.group);
    co_group_init(&s.write_back_group);
    co_cond_init(&s.write_back_kick);
    co_group_init(&s.preload.group);
    co_group_init(&s.hold.group);
    co_cond_init(&s.hold.changed);
    wait_queue_init(&s.stop_wait);
    int rc = serve_start(&s, err);
    if (rc < 0) {
        serve_stop(&s, NULL);
        return rc;
    }
    announce(&s);
    if (!s.incoming)
        serve_preload_start(&s);
    while (!s.stop_reason)
        wait_queue_sleep(&s.stop_wait);
    serve_notify("STOPPING=1\n");
    timer_disarm(&s.watch);
    return serve_stop(&s, err);
}
