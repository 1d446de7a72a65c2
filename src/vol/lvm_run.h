/* Private to lvm*.c: one command of LVM's tools. */
#ifndef VARVE_VOL_LVM_RUN_H
#define VARVE_VOL_LVM_RUN_H

#include "vol/lvm.h"

struct lvm_cmd {
    const char *verb; /* "lvcreate" */
    VEC(char *) args;
    bool no_memory;
};
void lvm_cmd_init(struct lvm_cmd *cmd, const struct lvm *lvm, const char *verb);
void lvm_cmd_add(struct lvm_cmd *cmd, const char *arg);
void lvm_cmd_addf(struct lvm_cmd *cmd, const char *fmt, ...) PRINTF_LIKE(2, 3);
/* Runs it; ret_out, ret_said (its stderr) may be NULL. Out of memory while it was put together
 * shows here. */
SUSPENDS int lvm_cmd_run(struct lvm_cmd *cmd, struct lvm *lvm, char **ret_out, char **ret_said,
                         struct err *err);
void lvm_cmd_fini(struct lvm_cmd *cmd);
/* What stderr says went wrong: a code and the line that says it, without LVM's margins. */
int lvm_complaint(const char *said, char *line, size_t line_len);
/* udev makes device nodes on this host. */
bool lvm_udev_runs(void);

#endif
