/* varve list, info, tree: what is in the pools. */
#include <stdio.h>
#include <string.h>
#include <time.h>
#include "cli/volcmd.h"

static const char *date_text(int64_t when, char *buf, size_t len)
{
    time_t t = (time_t)when;
    struct tm tm;

    if (!when)
        return "?";
    localtime_r(&t, &tm);
    strftime(buf, len, "%Y-%m-%d %H:%M:%S", &tm);
    return buf;
}

static json_t *elem_json(const struct vol_elem *e)
{
    json_t *o =
        json_pack("{s:s, s:s, s:s, s:I, s:I, s:I, s:I, s:b, s:i, s:b}", "file", e->file, "path",
                  e->path, "format", e->format, "virtual-size", (json_int_t)e->virtual_len,
                  "file-size", (json_int_t)e->file_len, "allocated", (json_int_t)e->allocated,
                  e->snap ? "taken" : "created", (json_int_t)e->when, "in-current", e->current_line,
                  "depth", (int)e->depth, "deleting", e->deleting);

    json_object_set_new(o, "snapshot", e->snap ? json_string(e->snap) : json_null());
    json_object_set_new(o, "parent", e->parent_snap ? json_string(e->parent_snap) : json_null());
    json_object_set_new(o, "backing-file",
                        e->parent_file ? json_string(e->parent_file) : json_null());
    return o;
}

static json_t *info_json(const struct vol_info *v)
{
    json_t *elems = json_array(), *clones = json_array();

    for (unsigned i = 0; i < v->nb_elems; i++)
        json_array_append_new(elems, elem_json(&v->elems[i]));
    for (unsigned i = 0; i < v->nb_clones; i++)
        json_array_append_new(clones, json_string(v->clones[i]));
    return json_pack("{s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:I, s:I, s:b, s:s, s:o, s:o}", "id",
                     v->id, "pool", v->pool, "vmid", v->vmid ? v->vmid : "", "name", v->name,
                     "format", v->format, "kind", v->kind, "path", v->path, "virtual-size",
                     (json_int_t)v->virtual_len, "allocated", (json_int_t)v->allocated, "served",
                     v->served, "qmp", v->qmp_path ? v->qmp_path : "", "elements", elems, "clones",
                     clones);
}

struct list_out {
    struct volcmd *cmd;
    struct table_out table;
    json_t *json;
    bool vols, snaps, bases, orphans;
};

static void add_row(struct list_out *out, const char *name, const char *kind, const char *format,
                    uint64_t virtual_len, uint64_t allocated, const char *state)
{
    char size[32], used[32];

    table_out_row(&out->table, name, kind, format, render_size(virtual_len, size, sizeof(size)),
                  render_size(allocated, used, sizeof(used)), state);
    json_array_append_new(out->json,
                          json_pack("{s:s, s:s, s:s, s:I, s:I, s:b, s:b}", "id", name, "kind", kind,
                                    "format", format, "virtual-size", (json_int_t)virtual_len,
                                    "allocated", (json_int_t)allocated, "served",
                                    !strcmp(state, "served"), "broken", !strcmp(state, "broken")));
}

static void list_volume(struct list_out *out, const struct vol_info *v)
{
    bool base = !strcmp(v->kind, "base");

    if (base ? out->bases : out->vols)
        add_row(out, v->id, v->kind, v->format, v->virtual_len, v->allocated,
                v->broken   ? "broken"
                : v->served ? "served"
                            : "idle");
    for (unsigned i = 0; out->snaps && i < v->nb_elems; i++) {
        const struct vol_elem *e = &v->elems[i];
        _cleanup_(freep) char *name = NULL;

        if (e->snap && asprintf(&name, "%s@%s", v->id, e->snap) > 0)
            add_row(out, name, "snap", e->format, e->virtual_len, e->allocated,
                    e->deleting ? "being deleted" : "-");
    }
}

static void list_orphan(struct list_out *out, const char *orphan)
{
    table_out_row(&out->table, orphan, "orphan", "-", "-", "-", "-");
    json_array_append_new(out->json, json_pack("{s:s, s:s}", "id", orphan, "kind", "orphan"));
}

SUSPENDS_UNCHECKED static int list_pool(const struct pool *pool, void *ctx, struct err *err)
{
    struct list_out *out = ctx;
    struct vol_list *list;
    int rc = vol_list_get(out->cmd->cfg, pool, &list, err);

    if (rc < 0)
        return rc;
    for (unsigned i = 0; i < list->nb_vols; i++)
        list_volume(out, list->vols[i]);
    for (unsigned i = 0; out->orphans && i < list->nb_orphans; i++)
        list_orphan(out, list->orphans[i]);
    vol_list_free(list);
    return 0;
}

static int take_kinds(struct list_out *out, struct err *err)
{
    const char *kinds = args_value(out->cmd->args, "types", "vol,base,snap");
    char copy[128], *save = NULL;

    snprintf(copy, sizeof(copy), "%s", kinds);
    for (char *k = strtok_r(copy, ",", &save); k; k = strtok_r(NULL, ",", &save)) {
        out->vols |= !strcmp(k, "vol");
        out->snaps |= !strcmp(k, "snap");
        out->bases |= !strcmp(k, "base");
        out->orphans |= !strcmp(k, "orphan");
        if (strcmp(k, "vol") != 0 && strcmp(k, "snap") != 0 && strcmp(k, "base") != 0 &&
            strcmp(k, "orphan") != 0)
            return err_set(err, -EINVAL, "-t takes vol, snap, base, orphan, not '%s'", k);
    }
    return 0;
}

SUSPENDS static int list_pools(struct list_out *out, struct err *err)
{
    const char *only = args_operand(out->cmd->args, 0);
    const struct pool *pool;

    if (!only)
        return volcmd_each_pool(out->cmd, list_pool, out, err);
    int rc = config_pool(out->cmd->cfg, only, &pool, err);
    return rc < 0 ? rc : list_pool(pool, out, err);
}

SUSPENDS static int list(struct volcmd *cmd, struct err *err)
{
    struct list_out out = {.cmd = cmd, .table = {.cols = 6}, .json = json_array()};
    int rc = take_kinds(&out, err);

    table_out_row(&out.table, "NAME", "KIND", "FORMAT", "SIZE", "USED", "STATE");
    if (rc == 0)
        rc = list_pools(&out, err);
    if (rc >= 0 && cmd->json)
        render_json(json_incref(out.json));
    else if (rc >= 0)
        table_out_print(&out.table, "lllrrl");
    json_decref(out.json);
    table_out_fini(&out.table);
    return rc;
}

static int run_list(const struct args *args)
{
    return volcmd_run(args, "list", list);
}

const struct command command_list = {
    .name = "list",
    .summary = "list volumes, snapshots, bases and stray files",
    .text = "Lists one pool, or all. Only headers are read.",
    .operands = (const struct operand[]){{"[POOL]", COMPLETE_POOL}, {0}},
    .options = (const struct option[]){{'t', "types", "KINDS",
                                        "of vol, snap, base, orphan (default vol,base,snap)",
                                        COMPLETE_WORDS, "vol snap base orphan"},
                                       VOL_OPT_CONFIG,
                                       VOL_OPT_JSON,
                                       {0}},
    .example = "  varve list local -t vol,orphan",
    .run = run_list,
};

static const struct vol_elem *find_elem(const struct vol_info *v, const char *snap)
{
    for (unsigned i = 0; i < v->nb_elems; i++)
        if (snap[0] ? v->elems[i].snap && !strcmp(v->elems[i].snap, snap) : !v->elems[i].snap)
            return &v->elems[i];
    return NULL;
}

static void print_elem(const struct vol_elem *e)
{
    char a[32], b[32], when[32];

    printf("  file:      %s\n  format:    %s\n  size:      %s (%llu bytes)\n  allocated: %s\n",
           e->path, e->format, render_size(e->virtual_len, a, sizeof(a)),
           (unsigned long long)e->virtual_len, render_size(e->allocated, b, sizeof(b)));
    printf("  %s%s\n",
           e->snap ? "taken:     " : "made:      ", date_text(e->when, when, sizeof(when)));
    if (e->parent_file)
        printf("  backing:   %s%s%s%s\n", e->parent_file, e->parent_snap ? " (snapshot " : "",
               e->parent_snap ? e->parent_snap : "", e->parent_snap ? ")" : "");
}

static void print_volume(const struct vol_info *v)
{
    char used[32];

    printf("%s (%s)\n", v->id, v->kind);
    if (v->served)
        printf("  served, control socket %s\n", v->qmp_path);
    else
        printf("  idle\n");
    printf("  in all:    %s allocated, %u snapshots\n",
           render_size(v->allocated, used, sizeof(used)), v->nb_elems ? v->nb_elems - 1 : 0);
    for (unsigned i = 0; i < v->nb_clones; i++)
        printf("  clone:     %s\n", v->clones[i]);
}

SUSPENDS static int info(struct volcmd *cmd, struct err *err)
{
    struct vol_name name;
    struct vol_info *v;
    int rc = volcmd_name(cmd, 0, &name, err);

    if (rc == 0)
        rc = vol_info_get(cmd->cfg, &name, &v, err);
    if (rc < 0)
        return rc;
    const struct vol_elem *elem = find_elem(v, name.snap);
    if (!elem)
        rc = err_set(err, -ENOENT, "%s has no snapshot '%s'", v->id, name.snap);
    else if (cmd->json)
        render_json(name.snap[0] ? elem_json(elem) : info_json(v));
    else {
        if (name.snap[0])
            printf("%s@%s (snap)%s\n", v->id, name.snap,
                   elem->deleting ? " (being deleted: 'varve destroy' goes on with it)" : "");
        else
            print_volume(v);
        print_elem(elem);
    }
    vol_info_free(v);
    return rc;
}

static int run_info(const struct args *args)
{
    return volcmd_run(args, "info", info);
}

const struct command command_info = {
    .name = "info",
    .summary = "describe a volume or a snapshot",
    .operands = (const struct operand[]){{"POOL:VOLUME[@SNAPSHOT]", COMPLETE_SNAPSHOT}, {0}},
    .options = (const struct option[]){VOL_OPT_CONFIG, VOL_OPT_JSON, {0}},
    .example = "  varve info local:100/vm-100-disk-0",
    .run = run_info,
};

static void print_tree(const struct vol_info *v)
{
    char used[32], when[32];

    printf("%s\n", v->id);
    for (unsigned i = 0; i < v->nb_elems; i++) {
        const struct vol_elem *e = &v->elems[i];

        printf("  %*s%s%s  %s  %s%s\n", (int)(2 * e->depth), "", e->snap ? "@" : "",
               e->snap ? e->snap : "* current", render_size(e->allocated, used, sizeof(used)),
               date_text(e->when, when, sizeof(when)), e->deleting ? "  (being deleted)" : "");
    }
}

SUSPENDS static int tree(struct volcmd *cmd, struct err *err)
{
    struct vol_name name;
    struct vol_info *v;
    int rc = volcmd_name(cmd, 0, &name, err);

    if (rc == 0)
        rc = vol_info_get(cmd->cfg, &name, &v, err);
    if (rc < 0)
        return rc;
    if (cmd->json)
        render_json(info_json(v));
    else
        print_tree(v);
    vol_info_free(v);
    return 0;
}

static int run_tree(const struct args *args)
{
    return volcmd_run(args, "tree", tree);
}

const struct command command_tree = {
    .name = "tree",
    .summary = "show the snapshots of a volume as a tree",
    .text = "Each line is indented under the snapshot it is based on. After a rollback the later "
            "snapshots stay and can be rolled back to.",
    .operands = (const struct operand[]){{"POOL:VOLUME", COMPLETE_VOLUME}, {0}},
    .options = (const struct option[]){VOL_OPT_CONFIG, VOL_OPT_JSON, {0}},
    .run = run_tree,
};
