/* The list of all commands, in the order of the help. Each is described beside its code. */
#include "cli/command.h"
#include "cli/all.h"

const struct option common_options[] = {
    {'q', "quiet", NULL, "print nothing but errors and what was asked for"},
    {'h', "help", NULL, "show this help"},
    {0},
};

const struct command *const commands[] = {
    &cmd_pool_list,    &cmd_pool_status, &cmd_pool_check, &cmd_list,     &cmd_info,
    &cmd_tree,         &cmd_create,      &cmd_import,     &cmd_snapshot, &cmd_rollback,
    &cmd_destroy,      &cmd_resize,      &cmd_serve,      &cmd_img_info, &cmd_img_map,
    &cmd_img_check,    &cmd_img_create,  &cmd_img_convert, &cmd_img_resize, NULL,
};
