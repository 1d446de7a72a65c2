/* varve serve: find what is to be served, then hand over to serve_run(). */
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include "base/vec.h"
#include "chain/chain.h"
#include "cli/volcmd.h"
#include "cli/wiper.h"
#include "rt/reactor.h"
#include "rt/reactors.h"
#include "serve/serve.h"
#include "vol/lock.h"

#define THREADS_DEFAULT_MAX 4u

struct target {
    const struct args *args;
    struct config *cfg;
    const struct pool *pool; /* NULL: a file is served */
    struct vol_name name;
    struct vol_info *vol;           /* NULL: a plain file */
    VEC(struct vol_info *) earlier; /* before the disk came; options point into them */
    struct vol_opening *opening;    /* keeps operations away until the disk is open */
    struct disk_lease *lease;       /* keeps other hosts away as long as it is */
    struct serve_opts opts;
    struct serve_snapshot *snaps;
    char **strings; /* owned texts of opts */
    unsigned nb_strings;
};

/* A path is what has a slash at its start, ./ or ../, or no colon; all else is POOL:VOLUME. */
static bool is_path(const char *text)
{
    return text[0] == '/' || text[0] == '.' || !strchr(text, ':');
}

static const char *keep(struct target *t, char *text)
{
    t->strings = reallocarray(t->strings, t->nb_strings + 1, sizeof(*t->strings));
    if (!t->strings || !text)
        abort();
    t->strings[t->nb_strings++] = text;
    return text;
}

/* The volume's name as exports show it: without pool, vmid and suffix. */
static void take_snapshots(struct target *t)
{
    const struct vol_info *v = t->vol;

    t->snaps = calloc(v->nb_elems, sizeof(*t->snaps));
    if (!t->snaps)
        abort();
    for (unsigned i = 0; i < v->nb_elems; i++) {
        char *name = NULL;

        /* elements of other branches are not below the one served; one whose deletion was cut off
         * is no snapshot any more */
        if (!v->elems[i].snap || !v->elems[i].current_line || v->elems[i].deleting)
            continue;
        if (asprintf(&name, "%s@%s", v->name, v->elems[i].snap) < 0)
            abort();
        t->snaps[t->opts.nb_snapshots++] = (struct serve_snapshot){keep(t, name), v->elems[i].path};
    }
    t->opts.snapshots = t->snaps;
}

/* The folder of a volume's control socket: <runtime>/<pool>, for its owner alone. */
static int make_runtime_dir(const char *socket, struct err *err)
{
    _cleanup_(freep) char *dir = strdup(socket);

    if (!dir)
        return -ENOMEM;
    for (char *p = strchr(dir + 1, '/'); p; p = strchr(p + 1, '/')) {
        *p = '\0';
        if (mkdir(dir, 0700) < 0 && errno != EEXIST)
            return err_errno(err, -errno, "make the runtime directory '%s'", dir);
        *p = '/';
    }
    return 0;
}

static void say(void *ctx, const char *line)
{
    struct target *t = ctx;

    fprintf(stderr, "varve serve: %s: %s\n", args_operand(t->args, 0), line);
}

static void opened(void *ctx)
{
    struct target *t = ctx;

    vol_opening_end(TAKE_PTR(t->opening));
}

/* Nobody changes its names from here to opened(). */
SUSPENDS static int begin_opening(struct target *t, struct err *err)
{
    struct vol_ctx ctx = {.cfg = t->cfg, .say = say, .ctx = t};
    int rc = vol_opening_begin(&ctx, &t->name, &t->opening, err);

    if (rc == 0)
        rc = vol_info_get(t->cfg, &t->name, &t->vol, err);
    if (rc < 0)
        return rc;
    disk_lease_release(TAKE_PTR(t->lease)); /* of a takeover that failed */
    t->opts.read_only |= !strcmp(t->vol->kind, "base");
    return vol_opening_lease(t->opening, t->opts.read_only, &t->lease, err);
}

/* The disk has come: as it is now, with snapshots that were taken meanwhile. */
SUSPENDS static int take(void *ctx, struct err *err)
{
    struct target *t = ctx;
    int rc = vec_push(&t->earlier, t->vol);

    if (rc < 0)
        return err_errno(err, rc, "take the disk over");
    t->vol = NULL;
    rc = begin_opening(t, err);
    if (rc < 0) {
        vol_info_free(t->vol);
        t->vol = t->earlier.data[--t->earlier.len];
        return rc;
    }
    t->opts.path = t->vol->path;
    t->opts.format = t->vol->format;
    free(t->snaps);
    t->snaps = NULL;
    t->opts.snapshots = NULL;
    t->opts.nb_snapshots = 0;
    take_snapshots(t);
    return 0;
}

SUSPENDS static int find_volume(struct target *t, struct err *err)
{
    bool incoming = args_flag(t->args, "incoming");
    const struct pool *pool;
    struct vol_name name;
    int rc = vol_parse_in(t->cfg, args_operand(t->args, 0), &name, err);

    if (rc == 0 && name.snap[0])
        rc = err_set(err, -EINVAL, "a snapshot is served with its volume, not alone");
    if (rc == 0)
        rc = config_pool(t->cfg, name.pool, &pool, err);
    t->name = name;
    if (rc == 0)
        rc = incoming ? vol_info_get(t->cfg, &name, &t->vol, err) : begin_opening(t, err);
    if (rc < 0)
        return rc;
    t->pool = pool;
    if (incoming) {
        t->opts.incoming_len = t->vol->virtual_len;
        t->opts.take = take;
    }
    t->opts.path = t->vol->path;
    t->opts.format = t->vol->format;
    t->opts.volume = t->vol->name;
    t->opts.volume_id = t->vol->id;
    t->opts.qmp_path = t->vol->qmp_path;
    t->opts.opened = opened;
    t->opts.opened_ctx = t;
    t->opts.read_only |= !strcmp(t->vol->kind, "base");
    if (!t->opts.cache_bytes)
        t->opts.cache_bytes = pool->cache_size;
    t->opts.grow_chunk = pool->thin_chunk;
    if (!incoming)
        take_snapshots(t);
    return make_runtime_dir(t->vol->qmp_path, err);
}

static int take_size(const struct args *args, const char *name, uint64_t *ret, struct err *err)
{
    const char *text = args_value(args, name, NULL);
    int rc = text ? parse_size(text, ret, err) : 0;

    if (rc == 0 && text && !*ret)
        rc = err_set(err, -EINVAL, "must be more than 0");
    return rc < 0 ? err_prefix(err, rc, "--%s", name) : 0;
}

static int take_space(const struct args *args, struct space_opts *ret, struct err *err)
{
    const char *discard = args_value(args, "discard", "unmap");
    const char *detect = args_value(args, "detect-zeroes", "off");

    if (space_parse_discard(discard, ret) < 0)
        return err_set(err, -EINVAL, "--discard takes unmap or ignore, not '%s'", discard);
    if (space_parse_detect_zeroes(detect, ret) < 0)
        return err_set(err, -EINVAL, "--detect-zeroes takes off, on or unmap, not '%s'", detect);
    if (args_flag(args, "discard-no-unref"))
        ret->discard = IMAGE_DISCARD_KEEP;
    return space_check(ret, err);
}

static int take_on_full(const struct args *args, enum image_on_full *ret, struct err *err)
{
    const char *word = args_value(args, "on-full", "wait");

    if (strcmp(word, "wait") != 0 && strcmp(word, "fail") != 0)
        return err_set(err, -EINVAL, "--on-full takes wait or fail, not '%s'", word);
    *ret = strcmp(word, "wait") ? IMAGE_FULL_FAIL : IMAGE_FULL_WAIT;
    return 0;
}

/* Half of the CPUs are left to those who use the disk: on the same host they are as busy. */
static int take_threads(struct target *t, struct err *err)
{
    const char *text = args_value(t->args, "threads", NULL);
    char *end = NULL;

    if (!text) {
        long half = sysconf(_SC_NPROCESSORS_ONLN) / 2;

        t->opts.threads = (unsigned)MIN(MAX(half, 1L), (long)THREADS_DEFAULT_MAX);
        return 0;
    }
    unsigned long nr = strtoul(text, &end, 10);
    if (!*text || *end || nr < 1 || nr > REACTORS_MAX)
        return err_set(err, -EINVAL, "--threads takes 1 to %u, not '%s'", REACTORS_MAX, text);
    t->opts.threads = (unsigned)nr;
    return 0;
}

static int take_options(struct target *t, struct err *err)
{
    const struct args *args = t->args;
    const char *durability = args_value(args, "durability", "ack");
    const char *clients = args_value(args, "max-connections", "16");
    unsigned nr = 0;
    int rc;

    while (args_nth(args, "export", nr))
        nr++;
    const char **exports = calloc(nr + 1, sizeof(*exports));
    if (!exports)
        return -ENOMEM;
    for (unsigned i = 0; i < nr; i++)
        exports[i] = args_nth(args, "export", i);
    t->opts = (struct serve_opts){.exports = exports, .nb_exports = nr};
    t->opts.format = args_value(args, "format", NULL);
    t->opts.read_only = args_flag(args, "read-only");
    t->opts.buffered = args_flag(args, "buffered");
    t->opts.preload = args_flag(args, "preload");
    t->opts.max_connections = (unsigned)strtoul(clients, NULL, 10);
    if (strcmp(durability, "flush") != 0 && strcmp(durability, "ack") != 0)
        return err_set(err, -EINVAL, "--durability takes ack or flush, not '%s'", durability);
    t->opts.durability = strcmp(durability, "ack") ? SERVE_FLUSH : SERVE_ACK;
    if (!t->opts.max_connections || t->opts.max_connections > 1024)
        return err_set(err, -EINVAL, "--max-connections takes 1 to 1024, not '%s'", clients);
    rc = take_space(args, &t->opts.space, err);
    if (rc == 0)
        rc = take_on_full(args, &t->opts.on_full, err);
    if (rc == 0)
        rc = take_threads(t, err);
    if (rc == 0)
        rc = take_size(args, "cache-size", &t->opts.cache_bytes, err);
    if (rc == 0 && !strcmp(args_value(args, "preallocate", ""), "off"))
        t->opts.prealloc_step = UINT64_MAX;
    else if (rc == 0)
        rc = take_size(args, "preallocate", &t->opts.prealloc_step, err);
    return rc;
}

SUSPENDS static int serve(struct target *t, struct err *err)
{
    const char *what = args_operand(t->args, 0);
    int rc = take_options(t, err);

    if (rc < 0)
        return rc;
    if (args_flag(t->args, "incoming") && (is_path(what) || args_value(t->args, "qmp", NULL)))
        return err_set(err, -EINVAL,
                       "--incoming is for volumes, under their own control socket: there the other "
                       "host hands them over");
    if (is_path(what)) {
        t->opts.path = what;
    } else if (t->opts.format) {
        rc = err_set(err, -EINVAL, "--format is for files: a volume's name says its format");
    } else {
        rc = config_load(args_value(t->args, "config", NULL), &t->cfg, err);
        if (rc == 0)
            wiper_allow(t->cfg);
        if (rc == 0)
            rc = find_volume(t, err);
    }
    if (rc < 0)
        return rc;
    if (args_value(t->args, "qmp", NULL))
        t->opts.qmp_path = args_value(t->args, "qmp", NULL);
    layer_sweep_journals();
    rc = serve_run(&t->opts, err);
    if (t->pool)
        vol_close_disk(&(struct vol_ctx){.cfg = t->cfg}, t->pool, t->vol->path);
    disk_lease_release(TAKE_PTR(t->lease));
    return rc;
}

SUSPENDS static int serve_main(void *arg)
{
    struct target *t = arg;
    struct err err = {0};

    return serve(t, &err) < 0 ? fail(t->args, &err) : EXIT_DONE;
}

static int run_serve(const struct args *args)
{
    struct target t = {.args = args};
    int status = reactor_run(serve_main, &t);

    for (unsigned i = 0; i < t.nb_strings; i++)
        free(t.strings[i]);
    free(t.strings);
    free(t.snaps);
    free((void *)(uintptr_t)t.opts.exports);
    vol_opening_end(t.opening);
    disk_lease_release(t.lease);
    vol_info_free(t.vol);
    vec_for_each(it, &t.earlier)
        vol_info_free(*it);
    vec_free(&t.earlier);
    config_free(t.cfg);
    return status;
}

const struct command command_serve = {
    .name = "serve",
    .summary = "give a disk to guests over NBD",
    .text =
        "Serves one volume of a pool, or one image file, until SIGTERM. The disk is the export "
        "with "
        "the empty name and the one with the volume's name; every snapshot below it is the "
        "read-only "
        "export VOLUME@SNAPSHOT. A volume's control socket (QMP) is <runtime>/<pool>/<volume>.qmp, "
        "where the other commands find it; the runtime directory is $VARVE_RUNTIME or "
        "/run/varve.\n\n"
        "--export nbd,unix=PATH or --export nbd,host=H,port=P, with ,name=N for one more name, may "
        "be given several times. A guest survives a restart of the server if its QEMU was started "
        "with reconnect-delay.",
    .operands = (const struct operand[]){{"POOL:VOLUME|FILE", COMPLETE_VOLUME}, {0}},
    .options =
        (const struct option[]){
            {0, "export", "SPEC", "how a guest gets in: nbd,unix=PATH or nbd,host=H,port=P"},
            {'f', "format", "FORMAT",
             "format of FILE (default: by its content; a .raw file is raw)", COMPLETE_WORDS,
             "qcow2 raw"},
            {0, "qmp", "SOCKET", "control socket (default: the volume's; none for a file)",
             COMPLETE_FILE},
            {0, "cache-size", "BYTES",
             "bound of the metadata cache (default: covers the disk, at most 32M)"},
            {0, "preload", NULL,
             "load the disk's map in the background after the start, as far as the cache goes"},
            {0, "preallocate", "BYTES",
             "step in which the file grows (default 128M); off: as each write needs"},
            {0, "on-full", "HOW",
             "wait (default): with no room in the volume group, writes that need new space wait "
             "until there is; fail: they fail",
             COMPLETE_WORDS, "wait fail"},
            {0, "discard", "HOW",
             "unmap (default): space that a guest discards is given back; ignore: it is not",
             COMPLETE_WORDS, "unmap ignore"},
            {0, "discard-no-unref", NULL,
             "discarded clusters keep their place in the image: it never outgrows its measured "
             "size "
             "and does not fragment"},
            {0, "detect-zeroes", "HOW",
             "off (default); on: what is written as zeroes takes no space; unmap: it gives space "
             "back, too",
             COMPLETE_WORDS, "off on unmap"},
            {0, "durability", "MODE",
             "ack (default): answered writes survive a kill of the server; flush: flushed ones "
             "only",
             COMPLETE_WORDS, "ack flush"},
            {0, "max-connections", "N", "NBD clients at once (default 16)"},
            {0, "threads", "N",
             "threads that NBD clients are spread over, started as they come (default: one for two "
             "CPUs, at most 4)"},
            {'r', "read-only", NULL, "serve read-only"},
            {0, "incoming", NULL,
             "the disk is served on another host, and comes from there with its guest: wait for "
             "'varve takeover'"},
            {0, "buffered", NULL, "use the host's page cache instead of direct I/O"},
            VOL_OPT_CONFIG,
            {0}},
    .example = "  varve serve local:100/vm-100-disk-0 --export nbd,unix=/run/varve/100-0.nbd",
    .run = run_serve,
};
