/* varve img resize: grow or shrink the disk of an image. */
#include <stdio.h>
#include <string.h>
#include "base/bits.h"
#include "cli/img.h"
#include "rt/reactor.h"

/* SIZE, +SIZE or -SIZE against the present length. */
static int target_len(const char *text, uint64_t now, uint64_t *ret, struct err *err)
{
    bool plus = text[0] == '+', minus = text[0] == '-';
    uint64_t size;
    int rc = parse_size(text + (plus || minus), &size, err);

    if (rc < 0)
        return rc;
    if (minus && size > now)
        return err_set(err, -EINVAL, "the disk has only %llu bytes", (unsigned long long)now);
    if (plus && size > INT64_MAX - now)
        return err_set(err, -ERANGE, "the size is too large");
    *ret = plus ? now + size : minus ? now - size : size;
    return 0;
}

SUSPENDS static int resize_chain(const struct args *args, struct chain *chain, struct err *err)
{
    uint64_t now = chain_len(chain), len = 0;
    int rc = target_len(args_operand(args, 1), now, &len, err);

    if (rc < 0)
        return rc;
    if (layer_image(chain_layer(chain, 0)))
        len = align_up(len, 512);
    if (len < now && !args_flag(args, "shrink"))
        return err_set(err, -EINVAL,
                       "the new size is smaller and data behind it would be lost; --shrink says "
                       "that this is meant");
    return chain_resize(chain, len, err);
}

SUSPENDS static int resize_main(void *arg)
{
    const struct args *args = arg;
    struct chain_opts opts = {.format = args_value(args, "format", NULL), .writable = true};
    struct err err = {0};
    struct chain *chain;
    int rc = img_format_check(opts.format, &err);

    if (rc == 0)
        rc = chain_open(args_operand(args, 0), &opts, &chain, &err);
    if (rc < 0)
        return fail(args, &err);
    rc = resize_chain(args, chain, &err);
    struct err close_err = {0};
    int close_rc = chain_close(chain, &close_err);
    if (rc < 0 || close_rc < 0)
        return fail(args, rc < 0 ? &err : &close_err);
    if (!args_flag(args, "quiet"))
        printf("resized '%s'\n", args_operand(args, 0));
    return EXIT_DONE;
}

static int run_resize(const struct args *args)
{
    return reactor_run(resize_main, (void *)(uintptr_t)args);
}

const struct command command_img_resize = {
    .name = "img resize",
    .summary = "grow or shrink the disk of an image",
    .text = "Sets the size of the guest's disk to SIZE, or changes it by +SIZE. New space reads as "
            "zero, also where a backing file is longer. A shrinking change needs --shrink; a "
            "relative one is written as -- -SIZE.",
    .operands = (const struct operand[]){{"FILE", COMPLETE_FILE}, {"SIZE"}, {0}},
    .options =
        (const struct option[]){IMG_OPT_FORMAT, {0, "shrink", NULL, "allow a smaller size"}, {0}},
    .example = "  varve img resize vm-100-disk-0.qcow2 +10G",
    .run = run_resize,
};
