/* varve img map: where the guest's data lies, layer by layer. */
#include <stdio.h>
#include <string.h>
#include "cli/img.h"
#include "rt/reactor.h"

struct map_out {
    const struct args *args;
    bool json;
    unsigned nb;
};

struct map_extent { /* neighbours with the same answer, put together */
    uint64_t off;
    struct chain_status st;
    const char *file;
};

static bool holds_data(const struct chain_status *st)
{
    return st->kind == CHAIN_DATA || st->kind == CHAIN_COMPRESSED;
}

static int print_extent(struct map_out *out, const struct map_extent *e)
{
    const struct chain_status *st = &e->st;

    if (!out->json) {
        if (st->kind == CHAIN_DATA && !st->zero)
            printf("%#-16llx%#-16llx%#-16llx%s\n", (unsigned long long)e->off,
                   (unsigned long long)st->len, (unsigned long long)st->host_off, e->file);
        else if (st->kind == CHAIN_COMPRESSED)
            return -ENOTSUP;
        return 0;
    }
    printf("%s{ \"start\": %llu, \"length\": %llu, \"depth\": %u, \"present\": %s, \"zero\": %s, "
           "\"data\": %s",
           out->nb++ ? ",\n" : "[", (unsigned long long)e->off, (unsigned long long)st->len,
           st->depth, st->kind == CHAIN_HOLE ? "false" : "true", st->zero ? "true" : "false",
           holds_data(st) ? "true" : "false");
    if (st->host_valid)
        printf(", \"offset\": %llu", (unsigned long long)st->host_off);
    printf("}");
    return 0;
}

static bool continues(const struct map_extent *a, const struct chain_status *b)
{
    return a->st.kind == b->kind && a->st.depth == b->depth && a->st.zero == b->zero &&
           a->st.host_valid == b->host_valid &&
           (!b->host_valid || a->st.host_off + a->st.len == b->host_off);
}

SUSPENDS static int map_chain(struct map_out *out, struct chain *chain, struct err *err)
{
    struct map_extent pending = {0};
    uint64_t len = chain_len(chain);
    int rc = 0;

    for (uint64_t off = 0; off < len && rc == 0;) {
        struct chain_status st;

        rc = chain_status(chain, NULL, off, len - off, &st);
        if (rc < 0)
            return err_errno(err, rc, "map at %llu", (unsigned long long)off);
        if (pending.st.len && continues(&pending, &st)) {
            pending.st.len += st.len;
        } else {
            if (pending.st.len)
                rc = print_extent(out, &pending);
            pending = (struct map_extent){off, st, layer_path(chain_layer(chain, st.depth))};
        }
        off += st.len;
    }
    if (rc == 0 && pending.st.len)
        rc = print_extent(out, &pending);
    if (rc == -ENOTSUP)
        return err_set(err, rc, "the image has compressed clusters: only --output=json shows them");
    return rc;
}

SUSPENDS static int map_main(void *arg)
{
    struct map_out *out = arg;
    struct chain_opts opts = {.format = args_value(out->args, "format", NULL),
                              .buffered = true,
                              .no_lock = args_flag(out->args, "force-share")};
    struct err err = {0};
    struct chain *chain;
    int rc = img_output(out->args, &out->json, &err);

    if (rc == 0)
        rc = img_format_check(opts.format, &err);
    if (rc == 0)
        rc = chain_open(args_operand(out->args, 0), &opts, &chain, &err);
    if (rc < 0)
        return fail(out->args, &err);
    if (!out->json)
        printf("%-16s%-16s%-16s%s\n", "Offset", "Length", "Mapped to", "File");
    rc = map_chain(out, chain, &err);
    if (out->json)
        printf(out->nb ? "]\n" : "[]\n");
    chain_close(chain, NULL);
    return rc < 0 ? fail(out->args, &err) : EXIT_DONE;
}

static int run_map(const struct args *args)
{
    struct map_out out = {.args = args};

    return reactor_run(map_main, &out);
}

const struct command command_img_map = {
    .name = "img map",
    .summary = "show where the data of an image and its backing files lies",
    .text = "Prints the extents of the guest's disk: which layer decides (depth 0 is the image), "
            "whether it holds data or reads as zero, and where in that layer's file it lies. The "
            "JSON output has the field names of qemu-img.",
    .operands = (const struct operand[]){{"FILE", COMPLETE_FILE}, {0}},
    .options = (const struct option[]){IMG_OPT_FORMAT, IMG_OPT_OUTPUT, IMG_OPT_FORCE_SHARE, {0}},
    .example = "  varve img map --output=json vm-100-disk-0.qcow2",
    .run = run_map,
};
