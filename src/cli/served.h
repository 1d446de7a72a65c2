/* Disks that are served, as a user names them: a volume, or the path of a control socket. */
#ifndef VARVE_CLI_SERVED_H
#define VARVE_CLI_SERVED_H

#include "cli/volcmd.h"
#include "qmp/qmp.h"

#define SERVED_OPERAND "POOL:VOLUME|SOCKET"

struct served {
    char *id, *socket;      /* owned; id as given, or the volume's */
    struct qmp_client *qmp; /* owned */
};
/* Connects. -ENOENT: it is not served. The caller closes in any case. */
SUSPENDS int served_open(struct volcmd *cmd, const char *text, struct served *ret, struct err *err);
void served_close(struct served *d);
/* Calls fn for the disk that operand 0 names, or for every served volume of all pools. A disk whose
 * server ends meanwhile is passed by; a server that does not answer, and a pool that cannot be read,
 * are told and make the result EXIT_FAILED. */
typedef int served_fn(struct served *d, void *ctx, struct err *err);
SUSPENDS int served_each(struct volcmd *cmd, served_fn *fn, void *ctx, struct err *err);

/* Members of an answer; "" and 0 where there is none. */
const char *json_str(const json_t *obj, const char *key);
uint64_t json_num(const json_t *obj, const char *key);

#endif
