/* The list of all commands, in the order of the help. Each is described beside its code. */
#include "cli/command.h"
#include "cli/all.h"

const struct option common_options[] = {
    {'q', "quiet", NULL, "print nothing but errors and what was asked for"},
    {'h', "help", NULL, "show this help"},
    {0},
};

const struct command *const commands[] = {
    &command_pool_list,
    &command_pool_status,
    &command_pool_check,
    &command_pool_wipe,
    &command_pool_init_locks,
    &command_list,
    &command_info,
    &command_tree,
    &command_create,
    &command_import,
    &command_snapshot,
    &command_rollback,
    &command_destroy,
    &command_resize,
    &command_clone,
    &command_template,
    &command_rename,
    &command_move,
    &command_serve,
    &command_stats,
    &command_handover,
    &command_takeover,
    &command_job_list,
    &command_job_pause,
    &command_job_resume,
    &command_job_cancel,
    &command_job_set_speed,
    &command_img_info,
    &command_img_map,
    &command_img_check,
    &command_img_create,
    &command_img_convert,
    &command_img_resize,
    NULL,
};
