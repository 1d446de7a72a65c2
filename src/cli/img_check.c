/* varve img check: consistency of a qcow2 image, reported with the exit codes of qemu-img. */
#include <stdio.h>
#include <string.h>
#include "cli/img.h"
#include "rt/reactor.h"

enum {
    CHECK_CLEAN = 0,
    CHECK_FAILED = 1,
    CHECK_CORRUPT = 2,
    CHECK_LEAKS = 3,
    CHECK_NO_FORMAT = 63
};

struct check {
    const struct args *args;
    bool json;
};

static void report_line(void *ctx, const char *line)
{
    const struct check *check = ctx;

    if (!args_flag(check->args, "quiet"))
        fprintf(check->json ? stderr : stdout, "%s\n", line);
}

static json_t *check_json(const char *file, const struct image_check *r)
{
    json_t *o =
        json_pack("{s:I, s:I, s:I, s:s, s:s}", "image-end-offset", (json_int_t)r->image_end_off,
                  "total-clusters", (json_int_t)r->total_clusters, "check-errors",
                  (json_int_t)r->check_errors, "filename", file, "format", "qcow2");
    const struct {
        const char *name;
        uint64_t value;
    } some[] = {{"corruptions", r->corruptions},
                {"leaks", r->leaks},
                {"allocated-clusters", r->allocated_clusters},
                {"fragmented-clusters", r->fragmented_clusters},
                {"compressed-clusters", r->compressed_clusters},
                {"journal-changes", r->journal_records}};

    for (unsigned i = 0; i < ARRAY_SIZE(some); i++)
        if (some[i].value)
            json_object_set_new(o, some[i].name, json_integer((json_int_t)some[i].value));
    return o;
}

static double percent(uint64_t part, uint64_t whole)
{
    return whole ? 100.0 * (double)part / (double)whole : 0;
}

static void print_human(const struct image_check *r)
{
    if (!r->corruptions && !r->leaks && !r->check_errors)
        printf("No errors were found on the image.\n");
    if (r->corruptions)
        printf("\n%llu errors were found on the image.\n"
               "Data may be corrupted, or further writes to the image may corrupt it.\n",
               (unsigned long long)r->corruptions);
    if (r->leaks)
        printf("\n%llu leaked clusters were found on the image.\n"
               "They waste space on the disk and do no harm to data.\n",
               (unsigned long long)r->leaks);
    if (r->check_errors)
        printf("\n%llu internal errors have occurred during the check.\n",
               (unsigned long long)r->check_errors);
    if (r->total_clusters && r->allocated_clusters)
        printf("%llu/%llu = %.2f%% allocated, %.2f%% fragmented, %.2f%% compressed clusters\n",
               (unsigned long long)r->allocated_clusters, (unsigned long long)r->total_clusters,
               percent(r->allocated_clusters, r->total_clusters),
               percent(r->fragmented_clusters, r->allocated_clusters),
               percent(r->compressed_clusters, r->allocated_clusters));
    if (r->image_end_off)
        printf("Image end offset: %llu\n", (unsigned long long)r->image_end_off);
}

static int verdict(const struct image_check *r)
{
    if (r->corruptions)
        return CHECK_CORRUPT;
    if (r->check_errors)
        return CHECK_FAILED;
    return r->leaks ? CHECK_LEAKS : CHECK_CLEAN;
}

/* What was looked at, if that is not simply the file. */
static void say_journal(const struct check *check, struct layer *layer, const struct image_check *r)
{
    const char *file = args_operand(check->args, 0);

    if (args_flag(check->args, "quiet") || !image_has_journal(layer_image(layer)))
        return;
    if (r->has_journal)
        fprintf(stderr,
                "varve img check: %s was not closed: checked as the next open for writing will "
                "leave it, with %llu changes that wait in its journal\n",
                file, (unsigned long long)r->journal_records);
    else if (r->journal_note[0])
        fprintf(stderr, "varve img check: %s: %s; checked as it is\n", file, r->journal_note);
    else
        fprintf(stderr,
                "varve img check: %s is open, or was not closed: checked as it is, without the "
                "changes in its journal\n",
                file);
}

SUSPENDS static int check_layer(struct check *check, struct layer *layer, struct err *err)
{
    struct image_check result = {0};
    int rc;

    if (!layer_image(layer)) {
        err_set(err, -ENOTSUP, "a %s image has nothing to check", layer_format(layer));
        fail(check->args, err);
        return CHECK_NO_FORMAT;
    }
    rc = image_check(layer_image(layer), &result, report_line, check, err);
    if (rc < 0)
        return fail(check->args, err);
    say_journal(check, layer, &result);
    if (check->json)
        render_json(check_json(args_operand(check->args, 0), &result));
    else if (!args_flag(check->args, "quiet"))
        print_human(&result);
    return verdict(&result);
}

SUSPENDS static int check_main(void *arg)
{
    struct check *check = arg;
    struct layer_opts opts = {.format = args_value(check->args, "format", NULL),
                              .buffered = true,
                              .no_open_checks = true,
                              .no_lock = args_flag(check->args, "force-share")};
    struct err err = {0};
    struct layer *layer;
    int rc = img_output(check->args, &check->json, &err);

    if (rc == 0)
        rc = img_format_check(opts.format, &err);
    if (rc == 0)
        rc = layer_open(args_operand(check->args, 0), &opts, &layer, &err);
    if (rc < 0)
        return fail(check->args, &err);
    int status = check_layer(check, layer, &err);
    layer_close(layer, NULL);
    return status;
}

static int run_check(const struct args *args)
{
    struct check check = {.args = args};

    return reactor_run(check_main, &check);
}

const struct command command_img_check = {
    .name = "img check",
    .summary = "check a qcow2 image for corruption and leaks",
    .text =
        "Counts every reference in the image and compares them with the stored reference "
        "counts. Nothing is changed.\n\n"
        "An image whose server was killed is checked as the next open for writing will leave it: "
        "with the changes that wait in its journal. "
        "With --force-share the file is checked as it is.\n\n"
        "Exit status: 0 sound, 1 the check could not be done, 2 corrupt, 3 leaked clusters only, "
        "63 the format has no check.",
    .operands = (const struct operand[]){{"FILE", COMPLETE_FILE}, {0}},
    .options = (const struct option[]){IMG_OPT_FORMAT, IMG_OPT_OUTPUT, IMG_OPT_FORCE_SHARE, {0}},
    .example = "  varve img check vm-100-disk-0.qcow2",
    .run = run_check,
};
