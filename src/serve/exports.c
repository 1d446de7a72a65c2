/*
 * NBD servers and the exports they offer. Every export of the disk is offered by every server.
 *
 * Invariants:
 * 1. An export holds its layer in use, so no job merges it away, with or without a server.
 * 2. e->on has one entry a running server, or fewer while an add is being undone.
 */
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include "serve/internal.h"

#define START_TRIES   20u
#define START_WAIT_NS (50 * NSEC_PER_MSEC)

/* ---- exports ---- */
struct serve_export *serve_export_find(struct serve *s, const char *id)
{
    list_for_each(it, &s->exports) {
        struct serve_export *e = list_entry(it, struct serve_export, link);

        if (strcmp(e->id, id) == 0)
            return e;
    }
    return NULL;
}

static int attach(struct serve *s, struct serve_export *e, struct serve_nbd *n, struct err *err)
{
    struct nbd_export_opts opts = {
        .name = e->name,
        .description = e->description,
        .chain = s->chain,
        .layer = e->layer,
        .writable = e->writable,
        .depth_context = true,
    };
    struct nbd_export *exp;
    int rc = vec_reserve(&e->on, e->on.len + 1);

    if (rc == 0)
        rc = nbd_export_add(n->nbd, &opts, &exp, err);
    if (rc == -EEXIST)
        return err_set(err, rc, "NBD server already has export named '%s'", e->name);
    if (rc == 0)
        nbd_export_set_away(exp, s->incoming);
    if (rc == 0)
        rc = vec_push(&e->on, (struct serve_export_on){n, exp});
    return rc;
}

/* Its clients' requests end first, those that wait for room by failing. */
SUSPENDS static void detach(struct serve *s, struct serve_export *e)
{
    struct chain *chain = e->layer ? NULL : s->chain; /* whose writes it carries */

    if (chain)
        chain_stop_waits(chain);
    while (e->on.len > 0)
        nbd_export_remove(e->on.data[--e->on.len].exp, true, NULL);
    if (chain)
        chain_resume_waits(chain);
}

static void export_free(struct serve_export *e)
{
    if (!e)
        return;
    vec_free(&e->on);
    free(e->id);
    free(e->name);
    free(e->description);
    free(e);
}

static struct serve_export *export_new(const char *id, const char *name, const char *description)
{
    struct serve_export *e = calloc(1, sizeof(*e));

    if (!e)
        return NULL;
    e->id = strdup(id);
    e->name = strdup(name);
    e->description = description ? strdup(description) : NULL;
    if (e->id && e->name && (e->description || !description))
        return e;
    export_free(e);
    return NULL;
}

static bool name_taken(const struct serve *s, const char *name)
{
    list_for_each(it, &s->exports)
        if (strcmp(list_entry(it, struct serve_export, link)->name, name) == 0)
            return true;
    return false;
}

SUSPENDS int serve_export_add(struct serve *s, const char *id, const char *name,
                              const char *description, struct layer *layer, bool writable,
                              struct serve_export **ret, struct err *err)
{
    if (serve_export_find(s, id))
        return err_set(err, -EEXIST, "Block export id '%s' is already in use", id);
    if (name_taken(s, name))
        return err_set(err, -EEXIST, "NBD server already has export named '%s'", name);
    if (layer && layer_is_pinned(layer))
        return err_set(err, -EBUSY, "Node '%s' is busy: a job is merging it",
                       layer_node_name(layer));
    struct serve_export *e = export_new(id, name, description);
    int rc = 0;
    if (!e)
        return err_errno(err, -ENOMEM, "export '%s'", id);
    e->layer = layer;
    e->writable = writable;
    list_for_each(it, &s->nbds) {
        rc = attach(s, e, list_entry(it, struct serve_nbd, link), err);
        if (rc < 0)
            break;
    }
    if (rc < 0) {
        detach(s, e);
        export_free(e);
        return rc;
    }
    if (layer)
        layer_use(layer);
    list_push_back(&s->exports, &e->link);
    if (ret)
        *ret = e;
    return 0;
}

void serve_export_stats(const struct serve_export *e, struct export_stats *ret)
{
    *ret = (struct export_stats){0};
    vec_for_each(on, &e->on) {
        struct export_stats one;

        nbd_export_get_stats(on->exp, &one);
        ret->reads += one.reads;
        ret->writes += one.writes;
        ret->flushes += one.flushes;
        ret->trims += one.trims;
        ret->zeroes += one.zeroes;
        ret->status += one.status;
        ret->errors += one.errors;
        ret->read_bytes += one.read_bytes;
        ret->write_bytes += one.write_bytes;
        ret->connections += one.connections;
        ret->connections_total += one.connections_total;
    }
}

unsigned serve_export_clients(const struct serve_export *e)
{
    struct export_stats stats;

    serve_export_stats(e, &stats);
    return stats.connections;
}

unsigned serve_writers(const struct serve *s)
{
    unsigned nr = 0;

    list_for_each(it, &s->exports)
        vec_for_each(on, &list_entry(it, struct serve_export, link)->on)
            nr += nbd_export_writers(on->exp);
    return nr;
}

SUSPENDS int serve_export_remove(struct serve *s, struct serve_export *e, bool force,
                                 struct err *err)
{
    if (!force && serve_export_clients(e) > 0)
        return err_set(err, -EBUSY, "export '%s' still in use", e->id);
    list_remove(&e->link);
    detach(s, e);
    if (e->layer)
        layer_unuse(e->layer);
    serve_event(s, "BLOCK_EXPORT_DELETED", json_pack("{s:s}", "id", e->id));
    export_free(e);
    return 0;
}

/* ---- servers ---- */
SUSPENDS int serve_nbd_start(struct serve *s, const struct nbd_server_opts *opts, bool by_qmp,
                             struct err *err)
{
    struct serve_nbd *n = calloc(1, sizeof(*n));
    struct nbd_server_opts all = *opts;

    if (!n)
        return err_errno(err, -ENOMEM, "start the NBD server");
    n->by_qmp = by_qmp;
    all.reactors = s->reactors;
    int rc = nbd_server_start(&all, &n->nbd, err);
    if (rc < 0) {
        free(n);
        return rc;
    }
    list_push_back(&s->nbds, &n->link);
    list_for_each(it, &s->exports) {
        rc = attach(s, list_entry(it, struct serve_export, link), n, err);
        if (rc < 0) {
            serve_nbd_stop(s, n);
            return rc;
        }
    }
    return 0;
}

SUSPENDS void serve_nbd_stop(struct serve *s, struct serve_nbd *n)
{
    struct chain *chain = s->chain;

    list_remove(&n->link);
    list_for_each(it, &s->exports) {
        struct serve_export *e = list_entry(it, struct serve_export, link);

        for (size_t i = e->on.len; i-- > 0;)
            if (e->on.data[i].server == n)
                vec_remove_at(&e->on, i);
    }
    chain_stop_waits(chain);
    nbd_server_stop(n->nbd);
    chain_resume_waits(chain);
    free(n);
}

/* ---- "nbd,unix=PATH[,name=N]", "nbd,host=H,port=P[,name=N]" ---- */
struct spec {
    char *text; /* owned; the values point into it */
    const char *unix_path, *host, *port, *name;
};

static void spec_fini(struct spec *spec)
{
    free(spec->text);
}

/* Cuts the next element off; ",," stands for a comma. */
static char *next_part(char **pos)
{
    char *start = *pos, *out = *pos;

    if (!start)
        return NULL;
    for (char *in = start;; in++) {
        if (in[0] == ',' && in[1] == ',') {
            in++;
        } else if (*in == ',' || *in == '\0') {
            *pos = *in ? in + 1 : NULL;
            *out = '\0';
            return start;
        }
        *out++ = *in;
    }
}

static int spec_set(struct spec *spec, char *part, const char *text, struct err *err)
{
    const struct {
        const char *key;
        const char **value;
    } keys[] = {
        {"unix", &spec->unix_path},
        {"host", &spec->host},
        {"port", &spec->port},
        {"name", &spec->name},
    };
    char *value = strchr(part, '=');

    if (!value || value == part)
        return err_set(err, -EINVAL, "export '%s': '%s' is not KEY=VALUE", text, part);
    *value++ = '\0';
    for (size_t i = 0; i < ARRAY_SIZE(keys); i++) {
        if (strcmp(keys[i].key, part) != 0)
            continue;
        if (*keys[i].value)
            return err_set(err, -EINVAL, "export '%s': '%s' is given twice", text, part);
        if (*value == '\0')
            return err_set(err, -EINVAL, "export '%s': '%s' is empty", text, part);
        *keys[i].value = value;
        return 0;
    }
    return err_set(err, -EINVAL, "export '%s': '%s' is unknown", text, part);
}

static int spec_parse(const char *text, struct spec *spec, struct err *err)
{
    char *pos = spec->text = strdup(text);
    const char *type = next_part(&pos);
    char *part;

    if (!type)
        return err_errno(err, -ENOMEM, "export '%s'", text);
    if (strcmp(type, "nbd") != 0)
        return err_set(err, -EINVAL, "export '%s': type '%s' is unknown (nbd)", text, type);
    while ((part = next_part(&pos))) {
        int rc = spec_set(spec, part, text, err);

        if (rc < 0)
            return rc;
    }
    if (!spec->unix_path == !spec->port || (spec->unix_path && spec->host))
        return err_set(err, -EINVAL,
                       "export '%s': either unix=PATH or port=P with host=H is needed", text);
    return 0;
}

SUSPENDS static int start_spec(struct serve *s, const char *text, struct err *err)
{
    _cleanup_(spec_fini) struct spec spec = {0};
    int rc = spec_parse(text, &spec, err);

    if (rc < 0)
        return rc;
    struct nbd_server_opts opts = {
        .unix_path = spec.unix_path,
        .host = spec.host,
        .port = spec.port,
        .max_connections = s->opts->max_connections,
    };
    /* The kernel closes the sockets of a server that was killed some time after its end. */
    for (unsigned i = 0; (rc = serve_nbd_start(s, &opts, false, err)) == -EADDRINUSE; i++) {
        if (i == START_TRIES)
            break;
        timer_sleep(START_WAIT_NS);
    }
    if (rc == 0 && spec.name && !name_taken(s, spec.name))
        rc = serve_export_add(s, spec.name, spec.name, s->opts->volume_id, NULL,
                              chain_is_writable(s->chain), NULL, err);
    return rc < 0 ? err_prefix(err, rc, "export '%s'", text) : 0;
}

/* ---- start and stop ---- */
static bool same_file(const struct layer *layer, const char *path)
{
    struct stat a, b;

    if (strcmp(layer_path(layer), path) == 0)
        return true;
    return stat(layer_path(layer), &a) == 0 && stat(path, &b) == 0 && a.st_dev == b.st_dev &&
           a.st_ino == b.st_ino;
}

static struct layer *layer_of_file(const struct chain *chain, const char *path)
{
    for (unsigned i = 0; i < chain_depth(chain); i++)
        if (same_file(chain_layer(chain, i), path))
            return chain_layer(chain, i);
    return NULL;
}

int serve_add_snapshot(struct serve *s, const struct serve_snapshot *snap, struct err *err)
{
    struct layer *layer = layer_of_file(s->chain, snap->path);

    if (!layer)
        return err_set(err, -ENOENT, "snapshot '%s': '%s' is not below the disk", snap->name,
                       snap->path);
    return serve_export_add(s, snap->name, snap->name, NULL, layer, false, NULL, err);
}

SUSPENDS int serve_exports_start(struct serve *s, struct err *err)
{
    const struct serve_opts *o = s->opts;
    bool writable = chain_is_writable(s->chain);
    int rc = serve_export_add(s, "#disk", "", o->volume_id, NULL, writable, NULL, err);

    if (rc == 0 && o->volume)
        rc = serve_export_add(s, o->volume, o->volume, o->volume_id, NULL, writable, NULL, err);
    for (unsigned i = 0; rc == 0 && !s->incoming && i < o->nb_snapshots; i++)
        rc = serve_add_snapshot(s, &o->snapshots[i], err);
    for (unsigned i = 0; rc == 0 && i < o->nb_exports; i++)
        rc = start_spec(s, o->exports[i], err);
    return rc;
}

SUSPENDS void serve_exports_stop(struct serve *s)
{
    while (!list_empty(&s->nbds))
        serve_nbd_stop(s, list_entry(s->nbds.next, struct serve_nbd, link));
    while (!list_empty(&s->exports)) {
        struct serve_export *e = list_entry(s->exports.next, struct serve_export, link);

        list_remove(&e->link);
        if (e->layer)
            layer_unuse(e->layer);
        export_free(e);
    }
}

/* NBD's URI form; what may stand in a path or a query of a URI stays readable. */
static void print_quoted(const char *text)
{
    for (; *text; text++) {
        unsigned char c = (unsigned char)*text;

        if ((c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') ||
            strchr("-._~/@:", c))
            putchar(c);
        else
            printf("%%%02X", c);
    }
}

void serve_exports_print(const struct serve *s)
{
    list_for_each(it, &s->nbds) {
        const char *where = nbd_server_address(list_entry(it, struct serve_nbd, link)->nbd);
        bool is_unix = where[0] == '/' || !strchr(where, ':');

        list_for_each(exp_it, &s->exports) {
            const struct serve_export *e = list_entry(exp_it, struct serve_export, link);

            printf(is_unix ? "nbd+unix:///" : "nbd://%s/", where);
            print_quoted(e->name);
            if (is_unix) {
                printf("?socket=");
                print_quoted(where);
            }
            printf("%s\n", e->writable ? "" : " (read-only)");
        }
    }
    fflush(stdout);
}

/* ---- rollback ---- */
SUSPENDS void serve_exports_suspend(struct serve *s)
{
    list_for_each(it, &s->exports) {
        struct serve_export *e = list_entry(it, struct serve_export, link);

        for (size_t i = 0; !e->layer && i < e->on.len; i++)
            nbd_export_suspend(e->on.data[i].exp);
    }
}

/* Puts a snapshot's export on the new chain's layer of the same file; false: there is none. */
SUSPENDS static bool move_snapshot(struct serve *s, struct serve_export *e, struct layer *layer)
{
    detach(s, e);
    layer_unuse(e->layer);
    layer_use(layer);
    e->layer = layer;
    list_for_each(it, &s->nbds)
        if (attach(s, e, list_entry(it, struct serve_nbd, link), NULL) < 0)
            return false;
    return true;
}

SUSPENDS void serve_exports_switch(struct serve *s, struct chain *chain)
{
    s->chain = chain;
    list_for_each_safe(it, &s->exports) {
        struct serve_export *e = list_entry(it, struct serve_export, link);

        if (e->layer) {
            struct layer *layer = layer_of_file(chain, layer_path(e->layer));

            if (!layer || !move_snapshot(s, e, layer))
                serve_export_remove(s, e, true, NULL);
            continue;
        }
        vec_for_each(on, &e->on) {
            nbd_export_set_chain(on->exp, chain);
            nbd_export_set_away(on->exp, false);
            nbd_export_resume(on->exp);
        }
    }
}
