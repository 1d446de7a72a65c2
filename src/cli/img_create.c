/* varve img create: a new image file, also as an overlay. */
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include "cli/img.h"
#include "rt/reactor.h"

struct create {
    const struct args *args;
    struct img_create img;
};

/* The backing file's path as the image will see it: relative to the image's directory. */
static char *below_path(const char *image, const char *backing)
{
    const char *slash = strrchr(image, '/');
    char *path = NULL;

    if (!strncmp(backing, "file:", 5))
        backing += 5;
    if (backing[0] == '/' || !slash)
        return strdup(backing);
    return asprintf(&path, "%.*s/%s", (int)(slash - image), image, backing) < 0 ? NULL : path;
}

/* Opens the backing file: is it there, is it sound, how long is its disk? */
SUSPENDS static int look_below(struct create *c, const char *file, struct err *err)
{
    _cleanup_(freep) char *path = below_path(file, c->img.qcow2.backing_name);
    struct chain_opts opts = {.format = c->img.qcow2.backing_format, .buffered = true};
    struct stat a, b;
    struct chain *chain;

    if (!path)
        return -ENOMEM;
    if (stat(path, &a) == 0 && stat(file, &b) == 0 && a.st_dev == b.st_dev && a.st_ino == b.st_ino)
        return err_set(err, -EINVAL, "'%s' cannot be its own backing file", file);
    int rc = chain_open(path, &opts, &chain, err);
    if (rc < 0)
        return err_prefix(err, rc, "backing file");
    if (!c->img.has_size)
        c->img.size = chain_len(chain);
    c->img.has_size = true;
    return chain_close(chain, err);
}

static int take_backing(struct create *c, struct err *err)
{
    struct image_create_opts *q = &c->img.qcow2;

    q->backing_name = args_value(c->args, "backing", q->backing_name);
    q->backing_format = args_value(c->args, "backing-format", q->backing_format);
    if (!q->backing_name)
        return 0;
    if (!strcmp(c->img.format, "raw"))
        return err_set(err, -EINVAL, "a raw image cannot have a backing file");
    if (!q->backing_format)
        return err_set(err, -EINVAL, "the format of the backing file must be given (-F)");
    return img_format_check(q->backing_format, err);
}

static int take_options(struct create *c, struct err *err)
{
    const char *size = args_operand(c->args, 1), *options = args_value(c->args, "options", NULL);
    int rc;

    c->img.format = args_value(c->args, "format", "qcow2");
    rc = img_format_check(c->img.format, err);
    if (rc == 0 && options)
        rc = img_create_options(&c->img, options, err);
    if (rc == 0 && size) {
        rc = parse_size(size, &c->img.size, err);
        c->img.has_size = true;
    }
    return rc < 0 ? rc : take_backing(c, err);
}

SUSPENDS static int create(struct create *c, struct err *err)
{
    const char *file = args_operand(c->args, 0);
    int rc = take_options(c, err);

    if (rc < 0)
        return rc;
    if (c->img.qcow2.backing_name && !args_flag(c->args, "unsafe")) {
        rc = look_below(c, file, err);
        if (rc < 0)
            return rc;
    }
    if (!c->img.has_size)
        return err_set(err, -EINVAL, "the size of '%s' is missing", file);
    if (!strcmp(c->img.format, "qcow2"))
        c->img.size = (c->img.size + 511) & ~511ull; /* a sector is the least a guest can address */
    return img_create_file(file, &c->img, err);
}

SUSPENDS static int create_main(void *arg)
{
    struct create *c = arg;
    struct err err = {0};
    char size[32];
    int rc = create(c, &err);

    if (rc < 0)
        return fail(c->args, err_prefix(&err, rc, "'%s'", args_operand(c->args, 0)) ? &err : NULL);
    if (!args_flag(c->args, "quiet"))
        printf("created '%s', %s, %s\n", args_operand(c->args, 0), c->img.format,
               render_size(c->img.size, size, sizeof(size)));
    return EXIT_DONE;
}

static int run_create(const struct args *args)
{
    struct create c = {.args = args};
    int status = reactor_run(create_main, &c);

    img_create_fini(&c.img);
    return status;
}

#define CREATE_OPTIONS_HELP                                                                        \
    "Options of -o for qcow2: cluster_size (512 to 2M, default 64k), extended_l2 (on, off; "       \
    "subclusters, clusters of 16k and more), preallocation (off, metadata, falloc, full; with a "  \
    "backing file only with extended_l2), compat (0.10, 1.1), refcount_bits (1 to 64), "           \
    "lazy_refcounts (on, off), compression_type (zlib, zstd), backing_file, backing_fmt, size. "   \
    "For raw: preallocation (off, falloc, full), size."

const struct command command_img_create = {
    .name = "img create",
    .summary = "make a new image",
    .text = "Makes an empty image of SIZE bytes (suffixes k, M, G, T). With -b it is an overlay: "
            "what it does not hold is read from the backing file, and SIZE may be left out. A file "
            "that was there is replaced once the new image is complete.\n\n" CREATE_OPTIONS_HELP,
    .operands = (const struct operand[]){{"FILE", COMPLETE_FILE}, {"[SIZE]"}, {0}},
    .options =
        (const struct option[]){
            {'f', "format", "FORMAT", "qcow2 (default) or raw", COMPLETE_WORDS, "qcow2 raw"},
            {'o', "options", "K=V,...", "options of the format"},
            {'b', "backing", "FILE", "backing file", COMPLETE_FILE},
            {'F', "backing-format", "FORMAT", "its format", COMPLETE_WORDS, "qcow2 raw"},
            {'u', "unsafe", NULL, "do not look whether the backing file is there"},
            {0}},
    .example =
        "  varve img create -o extended_l2=on,cluster_size=128k -b base.qcow2 -F qcow2 top.qcow2",
    .run = run_create,
};
