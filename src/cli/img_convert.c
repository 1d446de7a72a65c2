/* varve img convert: copy what an image shows into a new one. */
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include "base/bits.h"
#include "cli/img.h"
#include "job/job.h"
#include "rt/reactor.h"

struct convert {
    const struct args *args;
    struct img_create target;
    uint64_t min_zero;
    unsigned parallel;
    bool existing; /* -n: into an image that is there */
};

static int take_options(struct convert *c, struct err *err)
{
    const char *options = args_value(c->args, "options", NULL);
    const char *sparse = args_value(c->args, "S", "4k"), *par = args_value(c->args, "m", "8");
    char *end;
    int rc;

    c->target.format = args_value(c->args, "output-format", "raw");
    c->existing = args_flag(c->args, "n");
    rc = img_format_check(args_value(c->args, "format", NULL), err);
    if (rc == 0)
        rc = img_format_check(c->target.format, err);
    if (rc == 0 && options)
        rc = img_create_options(&c->target, options, err);
    if (rc == 0)
        rc = parse_size(sparse, &c->min_zero, err);
    if (rc < 0)
        return rc;
    c->parallel = (unsigned)strtoul(par, &end, 10);
    if (end == par || *end || c->parallel < 1 || c->parallel > 64)
        return err_set(err, -EINVAL, "-m takes 1 to 64, not '%s'", par);
    if (c->existing && options)
        return err_set(err, -EINVAL, "-o says how to make the target, -n not to make it");
    if (c->target.qcow2.backing_name)
        return err_set(err, -EINVAL, "a backing file of the target is not supported by convert");
    return 0;
}

static bool same_file(const char *a, const char *b)
{
    struct stat sa, sb;

    return stat(a, &sa) == 0 && stat(b, &sb) == 0 && sa.st_dev == sb.st_dev &&
           sa.st_ino == sb.st_ino;
}

SUSPENDS static int copy(struct convert *c, struct chain *src, const char *target, struct err *err)
{
    struct chain_opts opts = {.format = c->target.format, .writable = true, .no_backing = true};
    struct progress progress;
    struct chain *dst;
    int rc = chain_open(target, &opts, &dst, err);

    if (rc < 0)
        return rc;
    bool device = layer_blk(chain_layer(dst, 0))->fixed_len && !layer_image(chain_layer(dst, 0));
    progress_init(&progress, "convert", c->args, args_flag(c->args, "p"));
    struct copy_opts copy_opts = {.parallel = c->parallel,
                                  .target_is_zero = args_flag(c->args, "target-is-zero") ||
                                                    (!c->existing && !device),
                                  .min_zero = c->min_zero,
                                  .progress = progress_update,
                                  .ctx = &progress};
    if (chain_len(dst) < chain_len(src))
        rc = err_set(err, -ENOSPC, "'%s' is smaller than the source (%llu of %llu bytes)", target,
                     (unsigned long long)chain_len(dst), (unsigned long long)chain_len(src));
    else
        rc = copy_chain(src, NULL, dst, &copy_opts, err);
    if (rc == 0)
        rc = chain_flush(dst) < 0 ? err_set(err, -EIO, "flush of '%s' failed", target) : 0;
    progress_end(&progress);
    int close_rc = chain_close(dst, rc < 0 ? NULL : err);
    return rc < 0 ? rc : close_rc;
}

SUSPENDS static int convert_into(struct convert *c, struct chain *src, const char *tmp,
                                 const char *target, struct err *err)
{
    img_remove_on_signal(tmp);
    int rc = img_create_new(tmp, &c->target, err);
    if (rc == 0)
        rc = copy(c, src, tmp, err);
    if (rc == 0)
        rc = img_put_in_place(tmp, target, err);
    if (rc < 0)
        unlink(tmp);
    img_remove_on_signal(NULL);
    return rc;
}

/* Makes the target beside its name and renames it when it is complete and durable. */
SUSPENDS static int convert_new(struct convert *c, struct chain *src, const char *target,
                                struct err *err)
{
    _cleanup_(freep) char *tmp = NULL;
    struct blk *old;
    struct stat st;

    c->target.size = align_up(chain_len(src), 512);
    if (!strcmp(c->target.format, "raw"))
        c->target.size = chain_len(src);
    if (stat(target, &st) == 0 && !S_ISREG(st.st_mode)) {
        int rc = img_create_file(target, &c->target, err);
        return rc < 0 ? rc : copy(c, src, target, err);
    }
    if (asprintf(&tmp, "%s.part-%d", target, (int)getpid()) < 0)
        return -ENOMEM;
    int rc = img_hold_target(target, &old, err);
    if (rc < 0)
        return rc;
    rc = convert_into(c, src, tmp, target, err);
    blk_close(old);
    return rc;
}

SUSPENDS static int convert(struct convert *c, struct err *err)
{
    const char *source = args_operand(c->args, 0), *target = args_operand(c->args, 1);
    struct chain_opts opts = {.format = args_value(c->args, "format", NULL),
                              .no_lock = args_flag(c->args, "force-share")};
    struct chain *src;
    int rc = take_options(c, err);

    if (rc < 0)
        return rc;
    if (same_file(source, target))
        return err_set(err, -EINVAL, "'%s' and '%s' are the same file", source, target);
    rc = chain_open(source, &opts, &src, err);
    if (rc < 0)
        return rc;
    rc = c->existing ? copy(c, src, target, err) : convert_new(c, src, target, err);
    chain_close(src, NULL);
    return rc;
}

SUSPENDS static int convert_main(void *arg)
{
    struct convert *c = arg;
    struct err err = {0};

    return convert(c, &err) < 0 ? fail(c->args, &err) : EXIT_DONE;
}

static int run_convert(const struct args *args)
{
    struct convert c = {.args = args};
    int status = reactor_run(convert_main, &c);

    img_create_fini(&c.target);
    return status;
}

const struct command command_img_convert = {
    .name = "img convert",
    .summary = "copy an image and what lies below it into a new image",
    .text = "Reads SOURCE with its backing files and writes what a guest would see into TARGET. "
            "Ranges of zeroes are not written. TARGET gets its name when it is complete; a failed "
            "conversion leaves nothing behind.",
    .operands = (const struct operand[]){{"SOURCE", COMPLETE_FILE}, {"TARGET", COMPLETE_FILE}, {0}},
    .options =
        (const struct option[]){
            IMG_OPT_FORMAT,
            {'O', "output-format", "FORMAT", "raw (default) or qcow2", COMPLETE_WORDS, "qcow2 raw"},
            {'o', "options", "K=V,...", "options of the new image (see img create)"},
            {'n', NULL, NULL, "do not make the target: write into the image that is there"},
            {'S', NULL, "SIZE",
             "find runs of zeroes of at least SIZE (default 4k; 0: do not look)"},
            {'m', NULL, "N", "requests at once (default 8)"},
            {'p', NULL, NULL, "show progress even if stderr is no terminal"},
            {0, "target-is-zero", NULL, "with -n: the target reads as zero already"},
            IMG_OPT_FORCE_SHARE,
            {0}},
    .example = "  varve img convert -O qcow2 -o cluster_size=128k disk.raw disk.qcow2",
    .run = run_convert,
};
