/* Every command's description, defined in the file that runs it. */
#ifndef VARVE_CLI_ALL_H
#define VARVE_CLI_ALL_H

#include "cli/command.h"

/* pool.c */
extern const struct command command_pool_list, command_pool_check;
/* pool_status.c */
extern const struct command command_pool_status;
/* pool_wipe.c */
extern const struct command command_pool_wipe;
/* pool_locks.c */
extern const struct command command_pool_init_locks;
/* show.c */
extern const struct command command_list, command_info, command_tree;
/* volume.c */
extern const struct command command_create, command_import, command_snapshot, command_rollback,
    command_destroy, command_resize;
/* derive.c */
extern const struct command command_clone, command_template;
/* relocate.c */
extern const struct command command_rename, command_move;
/* job_cmd.c */
extern const struct command command_handover, command_takeover;
extern const struct command command_job_list, command_job_pause, command_job_resume,
    command_job_cancel, command_job_set_speed;
/* stats_cmd.c */
extern const struct command command_stats;
/* serve_cmd.c */
extern const struct command command_serve;
/* img_*.c */
extern const struct command command_img_info, command_img_map, command_img_check,
    command_img_create, command_img_convert, command_img_resize;

#endif
