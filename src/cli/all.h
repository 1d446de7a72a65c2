/* Every command's description, defined in the file that runs it. */
#ifndef VARVE_CLI_ALL_H
#define VARVE_CLI_ALL_H

#include "cli/command.h"

/* pool.c */
extern const struct command cmd_pool_list, cmd_pool_status, cmd_pool_check;
/* show.c */
extern const struct command cmd_list, cmd_info, cmd_tree;
/* volume.c */
extern const struct command cmd_create, cmd_import, cmd_snapshot, cmd_rollback, cmd_destroy,
    cmd_resize;
/* serve_cmd.c */
extern const struct command cmd_serve;
/* img_*.c */
extern const struct command cmd_img_info, cmd_img_map, cmd_img_check, cmd_img_create,
    cmd_img_convert, cmd_img_resize;

#endif
