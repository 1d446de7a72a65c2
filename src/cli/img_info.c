/* varve img info: what an image is, by its header alone (or its chain's headers). */
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include "cli/img.h"
#include "qcow2/snapshots.h"
#include "rt/reactor.h"

struct info {
    const struct args *args;
    bool json;
    json_t *list;
};

static uint64_t disk_usage(const char *path)
{
    struct stat st;

    return stat(path, &st) == 0 ? (uint64_t)st.st_blocks * 512 : 0;
}

static json_t *qcow2_details(const struct qcow2_header *hdr)
{
    json_t *d = json_object();

    json_object_set_new(d, "compat", json_string(hdr->version == 2 ? "0.10" : "1.1"));
    json_object_set_new(d, "compression-type",
                        json_string(hdr->compression == QCOW2_ZSTD ? "zstd" : "zlib"));
    if (hdr->version >= 3)
        json_object_set_new(d, "lazy-refcounts",
                            json_boolean(hdr->compatible & QCOW2_COMPAT_LAZY_REFCOUNTS));
    json_object_set_new(d, "refcount-bits", json_integer(1 << hdr->refcount_order));
    if (hdr->version >= 3) {
        json_object_set_new(d, "corrupt", json_boolean(hdr->incompatible & QCOW2_INCOMPAT_CORRUPT));
        json_object_set_new(d, "extended-l2", json_boolean(hdr->extended_l2));
    }
    if (hdr->data_file) {
        json_object_set_new(d, "data-file", json_string(hdr->data_file));
        json_object_set_new(d, "data-file-raw",
                            json_boolean(hdr->autoclear & QCOW2_AUTOCLEAR_RAW_DATA));
    }
    if (hdr->crypt_method)
        json_object_set_new(d, "encrypt",
                            json_pack("{s:s}", "format", hdr->crypt_method == 2 ? "luks" : "aes"));
    return d;
}

static void put_backing(json_t *o, const struct layer *layer, const struct qcow2_header *hdr)
{
    _cleanup_(freep) char *full = NULL;

    if (!hdr->backing_name)
        return;
    if (layer_backing_path(layer, &full, NULL) == 0 && full)
        json_object_set_new(o, "full-backing-filename", json_string(full));
    json_object_set_new(o, "backing-filename", json_string(hdr->backing_name));
    if (hdr->backing_format)
        json_object_set_new(o, "backing-filename-format", json_string(hdr->backing_format));
}

static json_t *snapshot_json(const struct qcow2_snapshot *s)
{
    return json_pack("{s:s, s:s, s:I, s:I, s:I, s:I, s:I}", "id", s->id, "name", s->name,
                     "vm-state-size", (json_int_t)s->vm_state_len, "date-sec",
                     (json_int_t)s->date_sec, "date-nsec", (json_int_t)s->date_nsec, "vm-clock-sec",
                     (json_int_t)(s->vm_clock_nsec / 1000000000ull), "vm-clock-nsec",
                     (json_int_t)(s->vm_clock_nsec % 1000000000ull));
}

SUSPENDS static int put_snapshots(json_t *o, struct layer *layer, const struct qcow2_header *hdr,
                                  struct err *err)
{
    struct qcow2_snapshots snaps;

    if (!hdr->nb_snapshots)
        return 0;
    int rc = qcow2_snapshots_read(layer_blk(layer), hdr, &snaps, err);
    if (rc < 0)
        return rc;
    json_t *list = json_array();
    for (unsigned i = 0; i < snaps.nr; i++)
        json_array_append_new(list, snapshot_json(&snaps.list[i]));
    json_object_set_new(o, "snapshots", list);
    qcow2_snapshots_fini(&snaps);
    return 0;
}

SUSPENDS static int layer_json(struct layer *layer, const char *name, json_t **ret, struct err *err)
{
    struct image *img = layer_image(layer);
    const struct qcow2_header *hdr = img ? image_header(img) : NULL;
    json_t *o = json_object();

    if (hdr) {
        int rc = put_snapshots(o, layer, hdr, err);

        if (rc < 0) {
            json_decref(o);
            return rc;
        }
    }
    json_object_set_new(o, "virtual-size", json_integer((json_int_t)layer_len(layer)));
    json_object_set_new(o, "filename", json_string(name));
    if (hdr)
        json_object_set_new(o, "cluster-size", json_integer((json_int_t)hdr->cluster_size));
    json_object_set_new(o, "format", json_string(layer_format(layer)));
    json_object_set_new(o, "actual-size", json_integer((json_int_t)disk_usage(name)));
    if (hdr) {
        json_object_set_new(o, "format-specific",
                            json_pack("{s:s, s:o}", "type", "qcow2", "data", qcow2_details(hdr)));
        put_backing(o, layer, hdr);
    }
    json_object_set_new(o, "dirty-flag",
                        json_boolean(hdr && hdr->incompatible & QCOW2_INCOMPAT_DIRTY));
    *ret = o;
    return 0;
}

static const char *str(const json_t *o, const char *key)
{
    return json_string_value(json_object_get(o, key));
}

static void print_details(const json_t *details)
{
    const char *key;
    json_t *value;

    printf("Format specific information:\n");
    json_object_foreach((json_t *)(uintptr_t)details, key, value)
    {
        printf("    ");
        for (const char *p = key; *p; p++)
            putchar(*p == '-' && strcmp(key, "data-file-raw") != 0 ? ' ' : *p);
        if (json_is_string(value))
            printf(": %s\n", json_string_value(value));
        else if (json_is_integer(value))
            printf(": %lld\n", (long long)json_integer_value(value));
        else if (json_is_object(value))
            printf(": %s\n", str(value, "format"));
        else
            printf(": %s\n", json_is_true(value) ? "true" : "false");
    }
}

static void print_human(const json_t *o)
{
    uint64_t len = (uint64_t)json_integer_value(json_object_get(o, "virtual-size"));
    uint64_t used = (uint64_t)json_integer_value(json_object_get(o, "actual-size"));
    const json_t *cluster = json_object_get(o, "cluster-size");
    const char *backing = str(o, "backing-filename"), *full = str(o, "full-backing-filename");
    char a[32], b[32];
    size_t i;
    json_t *snap;

    printf("image: %s\nfile format: %s\n", str(o, "filename"), str(o, "format"));
    printf("virtual size: %s (%llu bytes)\n", render_size(len, a, sizeof(a)),
           (unsigned long long)len);
    printf("disk size: %s\n", render_size(used, b, sizeof(b)));
    if (cluster)
        printf("cluster_size: %lld\n", (long long)json_integer_value(cluster));
    if (backing && full && strcmp(backing, full) != 0)
        printf("backing file: %s (actual path: %s)\n", backing, full);
    else if (backing)
        printf("backing file: %s\n", backing);
    if (str(o, "backing-filename-format"))
        printf("backing file format: %s\n", str(o, "backing-filename-format"));
    json_array_foreach(json_object_get(o, "snapshots"), i, snap)
        printf("%ssnapshot %s: %s\n", i ? "" : "internal snapshots:\n  ", str(snap, "id"),
               str(snap, "name"));
    if (json_object_get(o, "format-specific"))
        print_details(json_object_get(json_object_get(o, "format-specific"), "data"));
}

/* One file: opened, described, closed. *ret_backing is the path below it. */
SUSPENDS static int add_file(struct info *info, const char *path, const char *format,
                             char **ret_backing, char **ret_format, struct err *err)
{
    struct layer_opts opts = {.format = format,
                              .buffered = true,
                              .no_open_checks = true,
                              .no_lock = args_flag(info->args, "force-share")};
    struct layer *layer;
    json_t *o = NULL;
    int rc = layer_open(path, &opts, &layer, err);

    if (rc < 0)
        return rc;
    rc = layer_json(layer, path, &o, err);
    if (rc == 0) {
        json_array_append_new(info->list, o);
        if (args_flag(info->args, "backing-chain"))
            rc = layer_backing_path(layer, ret_backing, err);
        if (rc == 0 && *ret_backing && str(o, "backing-filename-format"))
            *ret_format = strdup(str(o, "backing-filename-format"));
    }
    layer_close(layer, NULL);
    return rc;
}

static bool same_file(const struct stat *seen, unsigned nr, const struct stat *st)
{
    for (unsigned i = 0; i < nr; i++)
        if (seen[i].st_dev == st->st_dev && seen[i].st_ino == st->st_ino)
            return true;
    return false;
}

enum { INFO_CHAIN_MAX = 1024 };

SUSPENDS static int walk(struct info *info, struct err *err)
{
    _cleanup_(freep) char *path = strdup(args_operand(info->args, 0));
    _cleanup_(freep) char *format = NULL;
    _cleanup_(freep) struct stat *seen = calloc(INFO_CHAIN_MAX, sizeof(*seen));
    const char *given = args_value(info->args, "format", NULL);

    if (!path || !seen)
        return -ENOMEM;
    if (given)
        format = strdup(given);
    for (unsigned depth = 0; path; depth++) {
        char *next = NULL, *next_format = NULL;

        if (depth == INFO_CHAIN_MAX)
            return err_set(err, -ELOOP, "'%s': more than %d layers", path, INFO_CHAIN_MAX);
        if (stat(path, &seen[depth]) == 0 && same_file(seen, depth, &seen[depth]))
            return err_set(err, -ELOOP, "'%s' is its own backing file, directly or over others",
                           path);
        int rc = add_file(info, path, format, &next, &next_format, err);
        free(path);
        free(format);
        path = next;
        format = next_format;
        if (rc < 0)
            return rc;
    }
    return 0;
}

SUSPENDS static int info_main(void *arg)
{
    struct info *info = arg;
    struct err err = {0};
    size_t i;
    json_t *o;

    int rc = img_output(info->args, &info->json, &err);
    if (rc == 0)
        rc = img_format_check(args_value(info->args, "format", NULL), &err);
    if (rc == 0)
        rc = walk(info, &err);
    if (rc < 0)
        return fail(info->args, &err);
    if (info->json) {
        bool chain = args_flag(info->args, "backing-chain");
        render_json(json_incref(chain ? info->list : json_array_get(info->list, 0)));
        return EXIT_DONE;
    }
    json_array_foreach(info->list, i, o)
    {
        if (i)
            putchar('\n');
        print_human(o);
    }
    return EXIT_DONE;
}

static int run_info(const struct args *args)
{
    struct info info = {.args = args, .list = json_array()};
    int status = reactor_run(info_main, &info);

    json_decref(info.list);
    return status;
}

const struct command command_img_info = {
    .name = "img info",
    .summary = "describe an image file",
    .text = "Prints format, size, backing file and features of an image, from its header alone. "
            "No other file is opened unless --backing-chain asks for it; a data file never is. "
            "The JSON output has the field names of qemu-img.",
    .operands = (const struct operand[]){{"FILE", COMPLETE_FILE}, {0}},
    .options = (const struct option[]){IMG_OPT_FORMAT,
                                       IMG_OPT_OUTPUT,
                                       IMG_OPT_FORCE_SHARE,
                                       {0, "backing-chain", NULL, "also the backing files"},
                                       {0}},
    .example = "  varve img info --backing-chain vm-100-disk-0.qcow2",
    .run = run_info,
};
