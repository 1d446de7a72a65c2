/*
 * Intents: what an operation of several steps is about to do, kept in the pool from before its
 * first step until after its last. A file of a directory pool (intent.c), tags of a volume group
 * (intent_tags.c): there, all functions that take `images` or change something wait for LVM's
 * commands, and are called in coroutines.
 */
#ifndef VARVE_VOL_INTENT_H
#define VARVE_VOL_INTENT_H

#include <jansson.h>
#include <stdbool.h>
#include <time.h>
#include "base/err.h"
#include "base/vec.h"

struct lvm_store;
/* What somebody who wants to take intents over knows of other hosts. */
enum intent_proof {
    PROOF_NONE,
    PROOF_LOCKS, /* it holds the intent's volumes' locks, and those exclude all hosts */
    PROOF_USER,  /* somebody has said that no other host is at work */
};
struct intent_tags {
    VEC(char *) list;
};
struct intent {
    char id[24];
    char *path; /* for a person: the file, or "<vg>: intent <id>" */
    int fd;     /* flock'ed by its operation as long as that lives */
    json_t *json;
    struct timespec begun;
    enum intent_proof proof; /* with which it was taken over: holds for a partner, too */
    bool foreign;            /* written on another host: fd tells nothing until it is taken over */
    struct lvm_store *store; /* the rest only of tags: where they are; NULL: a file */
    char *lock_path;         /* of fd */
    struct intent_tags tags; /* as they stand in the volume group */
};
/* Writes {"version", "op", "id", ...}; body is taken. Durable on return. */
int intent_begin(const char *images, const char *id, const char *op, json_t *body,
                 struct intent **ret, struct err *err);
/* Removes it, durably, and frees. -ESTALE: another host has taken it over. */
int intent_end(struct intent *intent, struct err *err);
/* Frees and leaves it for recovery. */
void intent_leave(struct intent *intent);
void intent_new_id(char id[24]);
/* May there be any, or anything to tidy up? As of the report that is loaded, of a volume group. */
bool intents_any(const char *images);
/* All intents of a pool. Without `claim` none is locked: a look, at the report that is loaded if it
 * is a volume group. With it those of dead operations of this host are locked, and fd is -1 of
 * those that run and of other hosts'. */
struct intents {
    VEC(struct intent *) list;
};
int intents_load(const char *images, bool claim, struct intents *ret, struct err *err);
void intents_fini(struct intents *list);
/* One by its id. *ret NULL: it is not there, or *ret_live: its operation runs. Another host's is
 * returned with fd -1. */
int intent_claim(const char *images, const char *id, struct intent **ret, bool *ret_live,
                 struct err *err);

/* ---- whose is it? ---- */

enum intent_life {
    INTENT_LIVE, /* its operation runs */
    INTENT_DEAD, /* it does not: the intent may be finished or undone */
    INTENT_UNKNOWN,
};
/* Of an intent that was loaded to be claimed: the only place where this is decided. */
enum intent_life intent_life(const struct intent *intent, enum intent_proof proof);
/*
 * Makes a dead operation's intent this process's, for good: called with its volumes' locks held and
 * before anything is done for it. Of another host's the tags are exchanged, by one command, for
 * such as say that this host is at it.
 *
 *   *ret_gone   somebody has finished it since it was read: nothing is left to do
 *
 * Errors   -EBUSY its operation lives, for all that is known, or another host was faster.
 */
int intent_take_over(struct intent *intent, enum intent_proof proof, bool *ret_gone,
                     struct err *err);
/* -EBUSY: whose operation on `vol` is in the way, and what to do about it. */
int intent_refuse(const struct intent *intent, const char *pool_id, const char *vmid,
                  const char *stem, struct err *err);
/* "host 'a', since 2026-01-31 12:00:00"; cut at the end if too long. */
void intent_describe(const struct intent *intent, char *text, size_t len);

/* ---- what is in it ---- */
const char *intent_op(const struct intent *intent);
/* Is the volume one of {"vols": [{"vmid", "stem"}, ...]}? */
bool intent_concerns(const struct intent *intent, const char *vmid, const char *stem);
/* Members; "" or NULL when absent. */
const char *intent_str(const json_t *obj, const char *key);
/* A member that must be a plain file name; NULL otherwise. */
const char *intent_name(const json_t *obj, const char *key);
/* The directory of a volume recorded as {"vmid"}; NULL: invalid. The caller frees. */
char *intent_dir(const char *images, const json_t *vol);

#endif
