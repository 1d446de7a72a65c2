/* Checks a command's arguments against its table of qmp_arg. Private to this folder. */
#ifndef VARVE_QMP_SCHEMA_H
#define VARVE_QMP_SCHEMA_H

#include <jansson.h>
#include "base/err.h"
#include "qmp/qmp.h"

/* args is an object. 0, or -EINVAL with a text as QEMU words it: missing, mistyped or unexpected
 * members. */
int qmp_check_args(const struct qmp_arg *schema, const json_t *args, struct err *err);

#endif
