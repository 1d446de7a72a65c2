/* varve pool status: a row a pool, and of one that is named everything that is known. */
#include <stdio.h>
#include <string.h>
#include "cli/all.h"
#include "cli/pool_locks.h"
#include "cli/volcmd.h"

struct listing {
    struct volcmd *cmd;
    struct table_out table;
    json_t *list;
    struct vol_pool_status **all; /* of the rows */
    const struct pool **pools;
    unsigned nr;
};

static const char *life_text(enum vol_op_life life)
{
    static const char *const texts[] = {
        [VOL_OP_RUNS] = "under way",
        [VOL_OP_CUT_OFF] = "cut off",
        [VOL_OP_ELSEWHERE] = "another host's",
    };

    return texts[life];
}

/* ---- JSON ---- */

static json_t *ops_json(const struct vol_pool_status *st)
{
    json_t *list = json_array();

    for (unsigned i = 0; i < st->nb_ops; i++)
        json_array_append_new(list, json_pack("{s:s, s:s, s:s, s:s}", "operation", st->ops[i].op,
                                              "volume", st->ops[i].volume, "state",
                                              life_text(st->ops[i].life), "by", st->ops[i].who));
    return list;
}

static json_t *wipes_json(const struct vol_pool_status *st)
{
    json_t *list = json_array();

    for (unsigned i = 0; i < st->nb_wipes; i++)
        json_array_append_new(list,
                              json_pack("{s:s, s:I, s:I, s:b}", "lv", st->wipes[i].lv, "size",
                                        (json_int_t)st->wipes[i].len, "wiped",
                                        (json_int_t)st->wipes[i].wiped, "here", st->wipes[i].here));
    return list;
}

static json_t *vg_json(const struct pool *pool, const struct vol_pool_status *st)
{
    return json_pack("{s:s, s:I, s:I, s:I, s:i, s:i, s:i, s:b, s:o}", "name", pool->vgname,
                     "extent-size", (json_int_t)st->extent_len, "metadata-size",
                     (json_int_t)st->metadata_len, "metadata-free", (json_int_t)st->metadata_free,
                     "physical-volumes", (int)st->nb_pvs, "missing", (int)st->nb_missing, "active",
                     (int)st->active, "wiping", st->wiping, "to-wipe", wipes_json(st));
}

static json_t *status_json(const struct pool *pool, const struct vol_pool_status *st)
{
    json_t *warnings = json_array();

    for (unsigned i = 0; i < st->nb_warnings; i++)
        json_array_append_new(warnings, json_string(st->warnings[i]));
    json_t *o =
        json_pack("{s:s, s:I, s:I, s:I, s:I, s:I, s:i, s:i, s:i, s:i, s:o, s:o}", "id", pool->id,
                  "total", (json_int_t)st->total, "available", (json_int_t)st->avail, "allocated",
                  (json_int_t)st->allocated, "promised", (json_int_t)st->promised, "may-grow",
                  (json_int_t)st->growth, "volumes", (int)st->vols, "snapshots", (int)st->snaps,
                  "orphans", (int)st->orphans, "served", (int)st->served, "operations",
                  ops_json(st), "warnings", warnings);
    if (st->is_vg)
        json_object_set_new(o, "volume-group", vg_json(pool, st));
    return o;
}

/* ---- for people ---- */

static void add_row(struct table_out *table, const struct pool *pool,
                    const struct vol_pool_status *st)
{
    char s[5][32], n[4][16];

    snprintf(n[0], sizeof(n[0]), "%u", st->vols);
    snprintf(n[1], sizeof(n[1]), "%u", st->snaps);
    snprintf(n[2], sizeof(n[2]), "%u", st->orphans);
    snprintf(n[3], sizeof(n[3]), "%u", st->served);
    table_out_row(table, pool->id, render_size(st->total, s[0], 32),
                  render_size(st->avail, s[1], 32), render_size(st->allocated, s[2], 32),
                  render_size(st->promised, s[3], 32), render_size(st->growth, s[4], 32), n[0],
                  n[1], n[3], n[2]);
}

static void print_vg(const struct pool *pool, const struct vol_pool_status *st)
{
    char a[32], b[32];

    printf("volume group: %s, extents of %s, %u physical volumes, %u missing\n", pool->vgname,
           render_size(st->extent_len, a, 32), st->nb_pvs, st->nb_missing);
    printf("metadata area: %s, %s free\n", render_size(st->metadata_len, a, 32),
           render_size(st->metadata_free, b, 32));
    printf("active here: %u logical volumes\n", st->active);
    for (unsigned i = 0; i < st->nb_wipes; i++) {
        const struct vol_pool_lv *w = &st->wipes[i];

        printf("to be wiped%s: %s, %s of %s done\n", w->here ? "" : " by another host", w->lv,
               render_size(w->wiped, a, 32), render_size(w->len, b, 32));
    }
}

static void print_details(const struct pool *pool, const struct vol_pool_status *st)
{
    if (st->is_vg)
        print_vg(pool, st);
    for (unsigned i = 0; i < st->nb_ops; i++)
        printf("operation %s: %s of %s, %s\n", life_text(st->ops[i].life), st->ops[i].op,
               st->ops[i].volume, st->ops[i].who);
}

static void print_all(const struct listing *l, bool details)
{
    table_out_print(&l->table, "lrrrrrrrrr");
    for (unsigned i = 0; i < l->nr; i++) {
        if (details)
            print_details(l->pools[i], l->all[i]);
        for (unsigned k = 0; k < l->all[i]->nb_warnings; k++)
            printf("%s: warning: %s\n", l->pools[i]->id, l->all[i]->warnings[k]);
    }
}

/* ---- the command ---- */

SUSPENDS static int look(const struct pool *pool, void *ctx, struct err *err)
{
    struct listing *l = ctx;
    struct vol_pool_status *st;
    int rc = vol_pool_status(l->cmd->cfg, pool, &st, err);

    if (rc < 0)
        return rc;
    json_array_append_new(l->list, status_json(pool, st));
    add_row(&l->table, pool, st);
    l->pools[l->nr] = pool;
    l->all[l->nr++] = st;
    return 0;
}

SUSPENDS static int pool_status(struct volcmd *cmd, struct err *err)
{
    const char *only = args_operand(cmd->args, 0);
    struct listing l = {.cmd = cmd, .table = {.cols = 10}, .list = json_array()};
    const struct pool *pool;
    int rc;

    l.all = calloc(cmd->cfg->nb_pools + 1, sizeof(struct vol_pool_status *));
    l.pools = calloc(cmd->cfg->nb_pools + 1, sizeof(const struct pool *));
    if (!l.all || !l.pools)
        abort();
    table_out_row(&l.table, "POOL", "TOTAL", "FREE", "USED", "PROMISED", "MAY-GROW", "VOLUMES",
                  "SNAPSHOTS", "SERVED", "ORPHANS");
    if (only) {
        rc = config_pool(cmd->cfg, only, &pool, err);
        if (rc == 0)
            rc = look(pool, &l, err);
    } else {
        rc = volcmd_each_pool(cmd, look, &l, err);
    }
    if (rc >= 0 && cmd->json && only)
        json_object_set_new(json_array_get(l.list, 0), "locks", pool_locks_json(pool));
    if (rc >= 0 && cmd->json)
        render_json(json_incref(l.list));
    else if (rc >= 0)
        print_all(&l, only);
    if (rc >= 0 && !cmd->json && only)
        rc = pool_locks_print(cmd, only, err);
    for (unsigned i = 0; i < l.nr; i++)
        vol_pool_status_free(l.all[i]);
    free(l.all);
    free(l.pools);
    json_decref(l.list);
    table_out_fini(&l.table);
    return rc;
}

static int run_pool_status(const struct args *args)
{
    return volcmd_run(args, "pool status", pool_status);
}

const struct command command_pool_status = {
    .name = "pool status",
    .summary = "show how full pools are, what is in them and what is under way",
    .text =
        "USED is what the volumes and their snapshots occupy, PROMISED the sum of the disks' "
        "sizes, MAY-GROW what they could still come to take, with metadata, over what they have: "
        "more than FREE means that the pool is overcommitted, as is usual where space is given "
        "when it is written to.\n\n"
        "With POOL also its operations that have not ended and, of a volume group, its physical "
        "volumes, what is free of its metadata area, the logical volumes that are active on this "
        "host, and deleted ones that wait to be wiped; which locks it has, whom they exclude, and "
        "who holds them.\n\n"
        "It warns if less than a tenth is free, if the disks that are served could not each have "
        "one more chunk (`thin-chunk`), if the metadata area has room for fewer than 200 more "
        "logical volumes, if physical volumes are missing, an operation was cut off, or deleted "
        "volumes wait and nobody wipes them. The exit status is 0 all the same; it is 1 if a pool "
        "cannot be looked at.\n\n"
        "--json: an array of objects with id, total, available, allocated, promised, may-grow "
        "(bytes), volumes, snapshots, orphans, served; operations (operation, volume, state, by) "
        "and warnings (texts); of a volume group also volume-group: name, extent-size, "
        "metadata-size, metadata-free, physical-volumes, missing, active, wiping (a process is at "
        "it), to-wipe (lv, size, wiped, here); with POOL also locks: by, excluded, joined, held "
        "(what, name, host, mode, this-host, silent: not renewed).",
    .operands = (const struct operand[]){{"[POOL]", COMPLETE_POOL}, {0}},
    .options = (const struct option[]){VOL_OPT_CONFIG, VOL_OPT_JSON, {0}},
    .run = run_pool_status,
};
