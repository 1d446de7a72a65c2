/* varve stats: what served disks do, once or again and again, for people and for collectors. */
#include <stdio.h>
#include <string.h>
#include "base/histogram.h"
#include "base/vec.h"
#include "cli/served.h"
#include "rt/reactor.h"
#include "rt/timer.h"

enum { KIND_READ, KIND_WRITE, KIND_FLUSH, KINDS };
static const char *const kind_names[KINDS] = {"read", "write", "flush"};

struct sample {    /* of one disk */
    char *id;      /* owned */
    json_t *stats; /* owned */
    uint64_t ns;   /* when it was taken */
};
struct samples {
    VEC(struct sample) list;
};

static void samples_fini(struct samples *s)
{
    vec_for_each(one, &s->list) {
        free(one->id);
        json_decref(one->stats);
    }
    vec_free(&s->list);
    *s = (struct samples){0};
}

SUSPENDS_UNCHECKED static int take_sample(struct served *d, void *ctx, struct err *err)
{
    struct samples *s = ctx;
    json_t *stats = NULL;
    int rc = qmp_execute(d->qmp, "x-varve-stats", NULL, &stats, err);

    if (rc < 0)
        return rc;
    rc = vec_push(&s->list, (struct sample){TAKE_PTR(d->id), stats, reactor_now()});
    if (rc < 0)
        json_decref(stats);
    return rc < 0 ? err_set(err, rc, "out of memory") : 0;
}

static const json_t *chain_of(const struct sample *s)
{
    return json_object_get(s->stats, "chain");
}

static const json_t *top_of(const struct sample *s)
{
    return json_object_get(json_array_get(json_object_get(s->stats, "layers"), 0), "image");
}

/* Over all exports. A server that knows none of a kind leaves it empty. */
static struct histogram latency_of(const struct sample *s, unsigned kind)
{
    struct histogram h = {0};
    json_t *export;
    size_t i;

    json_array_foreach(json_object_get(s->stats, "exports"), i, export)
    {
        const json_t *lat = json_object_get(json_object_get(export, "latency"), kind_names[kind]);
        const json_t *counts = json_object_get(lat, "counts");

        h.sum_ns += json_num(lat, "sum-ns");
        for (unsigned b = 0; b < HISTOGRAM_BUCKETS; b++)
            h.counts[b] += (uint64_t)json_integer_value(json_array_get(counts, b));
    }
    return h;
}

static void subtract(struct histogram *h, const struct histogram *old)
{
    h->sum_ns -= MIN(old->sum_ns, h->sum_ns);
    for (unsigned b = 0; b < HISTOGRAM_BUCKETS; b++)
        h->counts[b] -= MIN(old->counts[b], h->counts[b]);
}

static const struct sample *find_sample(const struct samples *s, const char *id)
{
    vec_for_each(one, &s->list)
        if (strcmp(one->id, id) == 0)
            return one;
    return NULL;
}

/* ---- lines of an interval ---- */

static const char *time_text(uint64_t ns, char *buf, size_t len)
{
    if (ns == 0)
        return "-";
    if (ns == UINT64_MAX)
        return ">16s";
    snprintf(buf, len,
             ns < 1000000      ? "%.0fus"
             : ns < 1000000000 ? "%.1fms"
                               : "%.1fs",
             (double)ns / (ns < 1000000      ? 1e3
                           : ns < 1000000000 ? 1e6
                                             : 1e9));
    return buf;
}

static void quantile_cell(const struct sample *now, const struct sample *old, unsigned kind,
                          char *ret, size_t len)
{
    struct histogram h = latency_of(now, kind), before = {0};
    char half[16], most[16];

    if (old)
        before = latency_of(old, kind);
    subtract(&h, &before);
    snprintf(ret, len, "%s/%s", time_text(histogram_quantile(&h, .5), half, sizeof(half)),
             time_text(histogram_quantile(&h, .99), most, sizeof(most)));
}

/* What was counted since `old`; since the server's start if there is none, or another server. */
static uint64_t since(const struct sample *now, const struct sample *old, const char *key)
{
    uint64_t n = json_num(chain_of(now), key), before = old ? json_num(chain_of(old), key) : 0;

    return n >= before ? n - before : n;
}

static void add_line(struct table_out *t, const struct sample *now, const struct sample *old)
{
    double secs = old ? (double)(now->ns - old->ns) / 1e9 : 1;
    uint64_t hits = since(now, old, "cache_hits"), misses = since(now, old, "cache_misses");
    char cells[4][32], read[40], written[40], lat[2][40], records[24], depth[24], hit[16] = "-";

    snprintf(cells[0], 32, "%.0f", (double)since(now, old, "reads") / secs);
    snprintf(cells[1], 32, "%.0f", (double)since(now, old, "writes") / secs);
    render_size((uint64_t)((double)since(now, old, "read_bytes") / secs), read, sizeof(read));
    render_size((uint64_t)((double)since(now, old, "write_bytes") / secs), written,
                sizeof(written));
    quantile_cell(now, old, KIND_READ, lat[0], sizeof(lat[0]));
    quantile_cell(now, old, KIND_WRITE, lat[1], sizeof(lat[1]));
    if (hits + misses)
        snprintf(hit, sizeof(hit), "%.1f%%", 100. * (double)hits / (double)(hits + misses));
    render_size(json_num(chain_of(now), "cache_bytes"), cells[2], 32);
    snprintf(records, sizeof(records), "%llu",
             (unsigned long long)json_num(top_of(now), "records"));
    snprintf(depth, sizeof(depth), "%llu", (unsigned long long)json_num(chain_of(now), "depth"));
    table_out_row(t, now->id, cells[0], cells[1], read, written, lat[0], lat[1], hit, cells[2],
                  records, depth);
}

static void print_lines(const struct samples *now, const struct samples *old)
{
    struct table_out t = {.cols = 11};
    bool totals = old->list.len == 0;

    table_out_row(&t, "DISK", totals ? "READS" : "READS/s", totals ? "WRITES" : "WRITES/s",
                  totals ? "READ" : "READ/s", totals ? "WRITTEN" : "WRITTEN/s", "READ P50/P99",
                  "WRITE P50/P99", "MAP HITS", "MAP", "RECORDS", "LAYERS");
    vec_for_each(one, &now->list)
        add_line(&t, one, find_sample(old, one->id));
    table_out_print(&t, "lrrrrrrrrrr");
    table_out_fini(&t);
}

static json_t *as_json(const struct samples *s)
{
    json_t *list = json_array();

    vec_for_each(one, &s->list)
        json_array_append_new(list, json_pack("{s:s, s:O}", "disk", one->id, "stats", one->stats));
    return list;
}

/* ---- OpenMetrics ---- */

struct metric {
    const char *name, *type, *help;
    const char *key; /* in the chain's figures */
};
static const struct metric metrics[] = {
    {"varve_reads", "counter", "Read requests to the disk", "reads"},
    {"varve_writes", "counter", "Write requests to the disk", "writes"},
    {"varve_read_bytes", "counter", "Bytes read from the disk", "read_bytes"},
    {"varve_written_bytes", "counter", "Bytes written to the disk", "write_bytes"},
    {"varve_map_hits", "counter", "Lookups of the map answered from memory", "cache_hits"},
    {"varve_map_misses", "counter", "Lookups that read tables", "cache_misses"},
    {"varve_map_bytes", "gauge", "Memory of map and tables", "cache_bytes"},
    {"varve_map_limit_bytes", "gauge", "Its bound", "cache_limit"},
    {"varve_layers", "gauge", "Layers of the disk, snapshots and current one", "depth"},
    {"varve_size_bytes", "gauge", "Length of the disk", "length"},
    {"varve_snapshots", "counter", "Snapshots taken since the start", "pivots"},
};

/* Spec: OpenMetrics, "Escaping" of label values. */
static void print_label(const char *text)
{
    printf("{disk=\"");
    for (; *text; text++)
        if (*text == '\n')
            printf("\\n");
        else
            printf(*text == '"' || *text == '\\' ? "\\%c" : "%c", *text);
    printf("\"");
}

static void print_metric(const struct metric *m, const struct samples *s)
{
    bool counter = strcmp(m->type, "counter") == 0;

    printf("# TYPE %s %s\n# HELP %s %s.\n", m->name, m->type, m->name, m->help);
    vec_for_each(one, &s->list) {
        printf("%s%s", m->name, counter ? "_total" : "");
        print_label(one->id);
        printf("} %llu\n", (unsigned long long)json_num(chain_of(one), m->key));
    }
}

/* Every fourth bucket: an octave each. */
static void print_histogram(const struct sample *s, unsigned kind, const char *name)
{
    struct histogram h = latency_of(s, kind);
    uint64_t sum = 0;

    for (unsigned b = 0; b < HISTOGRAM_BUCKETS; b++) {
        sum += h.counts[b];
        if (b % 4 && b != HISTOGRAM_BUCKETS - 1)
            continue;
        printf("%s_bucket", name);
        print_label(s->id);
        if (b == HISTOGRAM_BUCKETS - 1)
            printf(",le=\"+Inf\"} %llu\n", (unsigned long long)sum);
        else
            printf(",le=\"%.6f\"} %llu\n", (double)histogram_end(b) / 1e9, (unsigned long long)sum);
    }
    printf("%s_count", name);
    print_label(s->id);
    printf("} %llu\n%s_sum", (unsigned long long)sum, name);
    print_label(s->id);
    printf("} %.9f\n", (double)h.sum_ns / 1e9);
}

static void print_metrics(const struct samples *s)
{
    for (size_t i = 0; i < ARRAY_SIZE(metrics); i++)
        print_metric(&metrics[i], s);
    for (unsigned kind = 0; kind < KINDS; kind++) {
        char name[64];

        snprintf(name, sizeof(name), "varve_%s_duration_seconds", kind_names[kind]);
        printf("# TYPE %s histogram\n# UNIT %s seconds\n# HELP %s Time from a %s request's arrival "
               "to its answer.\n",
               name, name, name, kind_names[kind]);
        vec_for_each(one, &s->list)
            print_histogram(one, kind, name);
    }
    printf("# EOF\n");
}

/* ---- the command ---- */

struct plan {
    double interval; /* seconds; 0: once */
    uint64_t count;  /* 0: until interrupted */
    bool metrics;
};

static int parse_plan(const struct args *args, struct plan *ret, struct err *err)
{
    const char *interval = args_value(args, "interval", "0"),
               *count = args_value(args, "count", "");
    char *end;

    *ret = (struct plan){.metrics = args_flag(args, "openmetrics")};
    ret->interval = strtod(interval, &end);
    if (*end || !(ret->interval >= 0 && ret->interval <= 86400))
        return err_set(err, -EINVAL, "--interval takes seconds, not '%s'", interval);
    ret->count = *count ? strtoull(count, &end, 10) : ret->interval > 0 ? 0 : 1;
    if (*count && (*end || !ret->count))
        return err_set(err, -EINVAL, "--count takes a number above 0, not '%s'", count);
    if (ret->count != 1 && !(ret->interval > 0))
        return err_set(err, -EINVAL, "--count needs --interval");
    if (ret->metrics && ret->count != 1)
        return err_set(err, -EINVAL, "--openmetrics prints once");
    return 0;
}

static void print(const struct volcmd *cmd, const struct plan *plan, const struct samples *now,
                  const struct samples *old)
{
    if (plan->metrics)
        print_metrics(now);
    else if (cmd->json)
        render_json(as_json(now));
    else
        print_lines(now, old);
    fflush(stdout);
}

SUSPENDS static int stats(struct volcmd *cmd, struct err *err)
{
    struct samples old = {0}, now = {0};
    struct plan plan;
    int rc = parse_plan(cmd->args, &plan, err);

    if (rc == 0 && plan.interval > 0) /* so that the first line tells an interval, too */
        rc = served_each(cmd, take_sample, &old, err);
    for (uint64_t n = 0; rc >= 0 && (plan.count == 0 || n < plan.count) && !ferror(stdout); n++) {
        if (plan.interval > 0)
            timer_sleep((uint64_t)(plan.interval * 1e9));
        rc = served_each(cmd, take_sample, &now, err);
        if (rc >= 0)
            print(cmd, &plan, &now, &old);
        samples_fini(&old);
        old = now;
        now = (struct samples){0};
    }
    samples_fini(&old);
    samples_fini(&now);
    return rc;
}

static int run_stats(const struct args *args)
{
    return volcmd_run(args, "stats", stats);
}

const struct command command_stats = {
    .name = "stats",
    .summary = "show what served disks do",
    .text =
        "Of one disk, or of all served volumes of all pools: requests, bytes, the time from a "
        "request's arrival to its answer (half of them, and 99 of 100, took less), how often the "
        "map was answered from memory and how much of it there is, records of changed mappings "
        "that the image does not have yet, layers.\n\n"
        "Without --interval the figures are those since the server's start. --openmetrics prints "
        "them for a collector; its output can go to a file that one reads.",
    .operands = (const struct operand[]){{"[" SERVED_OPERAND "]", COMPLETE_VOLUME}, {0}},
    .options = (const struct option[]){{'i', "interval", "SECONDS",
                                        "again and again, what happened in between"},
                                       {'c', "count", "N", "end after so many lines"},
                                       {0, "openmetrics", NULL, "print OpenMetrics text"},
                                       VOL_OPT_CONFIG,
                                       VOL_OPT_JSON,
                                       {0}},
    .example = "  varve stats -i 1\n  varve stats --openmetrics "
               ">/var/lib/prometheus/node-exporter/varve.prom",
    .run = run_stats,
};
