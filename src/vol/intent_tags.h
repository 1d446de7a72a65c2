/* Private to intent*.c: intents of a volume group. See intent_tags.c. */
#ifndef VARVE_VOL_INTENT_TAGS_H
#define VARVE_VOL_INTENT_TAGS_H

#include "vol/intent.h"
#include "vol/store_lvm.h"

#define INTENT_VERSION   1
#define INTENT_TAG       "varve-intent="
#define INTENT_TAGS_MAX  512u /* twice as many fit into one command of LVM */
#define INTENT_TAG_BYTES 732u /* of the text, in one tag */

/* ---- intent_text.c: a text as tags ---- */
void intent_tags_fini(struct intent_tags *tags);
/* -E2BIG, -ENOMEM, -EINVAL the id. What is in *ret stays with the caller in any case. */
int intent_tags_encode(const char *id, const char *text, struct intent_tags *ret);
/* All tags of an id; -ENOMEM. */
int intent_tags_of(const struct lvm_vg *vg, const char *id, struct intent_tags *ret);
/* Each id once. -EUCLEAN: a tag that begins so and is none of ours. */
int intent_tags_ids(const struct lvm_vg *vg, struct intent_tags *ret, struct err *err);
/* The text again; -EUCLEAN with what is wrong: a part is missing, there twice, or not readable. */
int intent_tags_decode(const struct intent_tags *tags, char **ret, struct err *err);

/* ---- intent_tags.c: what intent.c's functions do there; the intent's id and json are filled ----
 */
SUSPENDS int tags_begin(struct intent *in, struct err *err);
SUSPENDS int tags_end(struct intent *in, struct err *err);
SUSPENDS bool tags_any(struct lvm_store *s);
SUSPENDS int tags_load(struct lvm_store *s, bool claim, struct intents *ret, struct err *err);
SUSPENDS int tags_claim(struct lvm_store *s, const char *id, struct intent **ret, struct err *err);
SUSPENDS int tags_take_over(struct intent *in, bool *ret_gone, struct err *err);

/* ---- intent.c ---- */
/* Does the path still name what is open? */
bool intent_fd_is_named(int fd, const char *path);
/* -EUCLEAN, -ENOTSUP: what was read is no intent; fills in->id. */
int intent_check_json(struct intent *in, const char *why, struct err *err);

#endif
