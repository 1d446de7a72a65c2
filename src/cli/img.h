/* What the `img` verbs share. */
#ifndef VARVE_CLI_IMG_H
#define VARVE_CLI_IMG_H

#include <jansson.h>
#include "chain/chain.h"
#include "cli/command.h"
#include "cli/render.h"

/* A format name of the command line: "qcow2" or "raw"; NULL passes (probe). -EINVAL with text. */
int img_format_check(const char *format, struct err *err);
/* --output: *ret_json; usage error text otherwise. */
int img_output(const struct args *args, bool *ret_json, struct err *err);

/* Options of a new image, from -o k=v,... and friends. */
struct img_create {
    const char *format; /* "qcow2" or "raw" */
    struct image_create_opts qcow2;
    uint64_t size;
    bool has_size;
    char *text; /* owned: what the strings point into */
};
void img_create_fini(struct img_create *c);
/* Adds "cluster_size=64k,extended_l2=on,..."; -EINVAL names the option. May be called once. */
int img_create_options(struct img_create *c, const char *text, struct err *err);
/* Makes the image. A file that was there is replaced only when the new one is complete; nothing is
 * left of a failed one. */
SUSPENDS int img_create_file(const char *path, const struct img_create *c, struct err *err);
/* The same for a file that must not be there yet, under its own name at once. */
SUSPENDS int img_create_new(const char *path, const struct img_create *c, struct err *err);
/* Before a file is replaced: *ret holds its locks, so that nobody has it open (NULL: there is no
 * such regular file). blk_close() lets go. -EBUSY names who has it. */
SUSPENDS int img_hold_target(const char *path, struct blk **ret, struct err *err);
/* Renames tmp to path, durably. */
int img_put_in_place(const char *tmp, const char *path, struct err *err);
/* A file in the making: removed when SIGINT, SIGTERM or SIGHUP ends the program. NULL: none. */
void img_remove_on_signal(const char *path);

/* The option every reading verb has. */
#define IMG_OPT_FORMAT                                                                             \
    {                                                                                              \
        'f', "format", "FORMAT",                                                                   \
            "format of the image (default: by its content; a .raw file is raw)", COMPLETE_WORDS,   \
            "qcow2 raw"                                                                            \
    }
#define IMG_OPT_OUTPUT                                                                             \
    {                                                                                              \
        0, "output", "FORMAT", "human or json", COMPLETE_WORDS, "human json"                       \
    }
#define IMG_OPT_FORCE_SHARE                                                                        \
    {                                                                                              \
        'U', "force-share", NULL, "open although another program is writing the image"             \
    }

#endif
