/*
 * Names of LVs as those of files: see lvm_dir.h.
 *
 *  1. No two LVs have one name. A tag of ours is set only for a name that is free, or, to take it
 *     over, by one LV at a time (the pool's lock).
 *  2. LVM's names and ours differ only where a tag says so.
 */
#include "vol/lvm_dir.h"
#include <stdio.h>
#include <string.h>
#include <sys/utsname.h>
#include "base/check.h"
#include "vol/internal.h"

/* ---- names ---- */

static const char *tag_value(const char *tag, const char *key)
{
    size_t len = strlen(key);

    return strncmp(tag, key, len) == 0 ? tag + len : NULL;
}

static const char *takes(const struct lvm_lv *lv)
{
    vec_for_each(tag, &lv->tags) {
        const char *name = tag_value(*tag, LVM_DIR_TAKES);

        if (name)
            return name;
    }
    return NULL;
}

/* Another LV that takes this name over. */
static struct lvm_lv *taker(const struct lvm_dir *dir, const char *name)
{
    vec_for_each(lv, &dir->takers)
        if (strcmp(takes(*lv), name) == 0)
            return *lv;
    return NULL;
}

/* The LV has the name unless somebody else takes it. */
static bool keeps(const struct lvm_dir *dir, const struct lvm_lv *lv, const char *name)
{
    const struct lvm_lv *other = taker(dir, name);

    return !other || other == lv;
}

const char *lvm_dir_name(const struct lvm_dir *dir, const struct lvm_lv *lv, unsigned n)
{
    const char *first = takes(lv) ? takes(lv) : lv->name;

    if (keeps(dir, lv, first) && n-- == 0)
        return first;
    vec_for_each(tag, &lv->tags) {
        const char *also = tag_value(*tag, LVM_DIR_ALSO);

        if (also && strcmp(also, first) != 0 && keeps(dir, lv, also) && n-- == 0)
            return also;
    }
    return NULL;
}

static bool has_name(const struct lvm_dir *dir, const struct lvm_lv *lv, const char *name)
{
    const char *own;

    for (unsigned n = 0; (own = lvm_dir_name(dir, lv, n)); n++)
        if (strcmp(own, name) == 0)
            return true;
    return false;
}

struct lvm_lv *lvm_dir_find(const struct lvm_dir *dir, const char *name)
{
    vec_for_each(lv, &dir->vg->lvs)
        if (has_name(dir, lv, name))
            return lv;
    return NULL;
}

bool lvm_dir_is_ours(const struct lvm_lv *lv)
{
    vec_for_each(tag, &lv->tags)
        if (strcmp(*tag, LVM_DIR_TAG) == 0 || tag_value(*tag, LVM_DIR_GUEST))
            return true;
    return false;
}

static int check_ours(const struct lvm_dir *dir, const struct lvm_lv *lv, struct err *err)
{
    if (lvm_dir_is_ours(lv))
        return 0;
    return err_set(err, -EPERM, "LV '%s/%s' has no tag of ours: it is left alone", dir->lvm.vg,
                   lv->name);
}

bool lvm_dir_owner(const char *name, char *tag, size_t len)
{
    static const char *const forms[] = {"vm-", "base-", "snap_vm-", "snap_base-"};

    for (unsigned i = 0; i < ARRAY_SIZE(forms); i++) {
        size_t n = strlen(forms[i]);

        if (strncmp(name, forms[i], n) != 0)
            continue;
        size_t digits = strspn(name + n, "0123456789");
        if (digits > 0 && digits < 20 && name[n + digits] == '-') {
            snprintf(tag, len, LVM_DIR_GUEST "%.*s", (int)digits, name + n);
            return true;
        }
    }
    return false;
}

/* "snap_vm-100-disk-0_s.qcow2": of the ways to read it, that with the shortest volume's name. */
bool lvm_dir_chain(const char *name, char *tag, size_t len)
{
    static const char suffix[] = ".qcow2";
    char owner[64];
    size_t n = strlen(name), tail = strlen(suffix);

    if (!lvm_dir_owner(name, owner, sizeof(owner)) || n < tail ||
        strcmp(name + n - tail, suffix) != 0)
        return false;
    n -= tail;
    if (strncmp(name, "snap_", 5) == 0) {
        name += 5;
        n = strcspn(name, "_");
    }
    return (size_t)snprintf(tag, len, LVM_DIR_CHAIN "%.*s%s", (int)n, name, suffix) < len;
}

/* ---- the report ---- */

/* Every name is asked of them. */
static void find_takers(struct lvm_dir *dir)
{
    dir->takers.len = 0;
    vec_for_each(lv, &dir->vg->lvs)
        if (takes(lv) && vec_push(&dir->takers, lv) < 0)
            abort();
}

int lvm_dir_load(struct lvm_dir *dir, struct err *err)
{
    if (dir->vg)
        return 0;
    int rc = lvm_report(&dir->lvm, &dir->vg, err);
    if (rc == 0)
        find_takers(dir);
    return rc;
}

void lvm_dir_forget(struct lvm_dir *dir)
{
    vec_free(&dir->takers);
    lvm_vg_free(TAKE_PTR(dir->vg));
    vec_for_each(text, &dir->owned)
        free(*text);
    vec_free(&dir->owned);
}

static char *own(struct lvm_dir *dir, const char *text)
{
    char *copy = strdup(text);

    if (!copy || vec_push(&dir->owned, copy) < 0)
        abort();
    return copy;
}

/* ---- one command each, and what it did to the report ---- */

struct step { /* LVs and tags; each list ends with NULL */
    struct lvm_lv *lvs[3];
    char *add[3], *del[5];
};

static void put(struct lvm_dir *dir, char **list, const char *key, const char *value)
{
    _cleanup_(freep) char *text = NULL;

    while (*list)
        list++;
    if (asprintf(&text, "%s%s", key, value) < 0)
        abort();
    *list = own(dir, text);
}

/* The report owns its tags. */
static void note_tags(struct lvm_lv *lv, const struct step *s)
{
    for (char *const *del = s->del; *del; del++)
        for (size_t i = lv->tags.len; i-- > 0;)
            if (strcmp(lv->tags.data[i], *del) == 0) {
                free(lv->tags.data[i]);
                vec_remove_at(&lv->tags, i);
            }
    for (char *const *add = s->add; *add; add++) {
        char *copy = strdup(*add);

        if (!copy || vec_push(&lv->tags, copy) < 0)
            abort();
    }
}

SUSPENDS static int run_tags(struct lvm_dir *dir, const struct step *s, struct err *err)
{
    const char *names[ARRAY_SIZE(s->lvs)] = {NULL};

    for (unsigned i = 0; s->lvs[i]; i++)
        names[i] = s->lvs[i]->name;
    crash_point("lvm-dir-tags");
    int rc = lvm_change_tags(&dir->lvm, names, (const char *const *)s->add,
                             (const char *const *)s->del, err);
    if (rc < 0)
        lvm_dir_forget(dir);
    for (unsigned i = 0; rc == 0 && s->lvs[i]; i++)
        note_tags(s->lvs[i], s);
    if (rc == 0)
        find_takers(dir);
    return rc;
}

static bool tells_owner(const char *tag)
{
    return tag_value(tag, LVM_DIR_GUEST) || tag_value(tag, LVM_DIR_CHAIN "base-") ||
           strcmp(tag, LVM_DIR_TAG) == 0;
}

/* Its tags follow the name. One that was cut off here is ours all the same. */
SUSPENDS static int set_owner(struct lvm_dir *dir, struct lvm_lv *lv, struct err *err)
{
    struct step s = {.lvs = {lv}};
    char owner[64], chain[LVM_NAME_MAX + 8] = "";
    unsigned nr = 0;

    if (!lvm_dir_owner(lv->name, owner, sizeof(owner)))
        return 0;
    bool has_chain = lvm_dir_chain(lv->name, chain, sizeof(chain));
    if (!lvm_lv_has_tag(lv, owner))
        put(dir, s.add, "", owner);
    if (has_chain && !lvm_lv_has_tag(lv, chain))
        put(dir, s.add, "", chain);
    vec_for_each(it, &lv->tags)
        if (tells_owner(*it) && strcmp(*it, owner) != 0 && strcmp(*it, chain) != 0 &&
            ++nr < ARRAY_SIZE(s.del))
            put(dir, s.del, "", *it);
    return *s.add || *s.del ? run_tags(dir, &s, err) : 0;
}

SUSPENDS static int run_rename(struct lvm_dir *dir, struct lvm_lv *lv, const char *new,
                               struct err *err)
{
    char *name = own(dir, new);

    crash_point("lvm-dir-rename");
    int rc = lvm_rename(&dir->lvm, lv->name, name, err);
    if (rc < 0) {
        lvm_dir_forget(dir);
        return rc;
    }
    lv->name = name;
    return set_owner(dir, lv, err);
}

/* "open" is what the kernel of one host knows. */
static void hidden_prefix(const char *kind, char text[48])
{
    struct utsname host = {0};

    (void)uname(&host);
    snprintf(text, 48, "%s%08x-", kind, (unsigned)text_hash(host.nodename));
}

bool lvm_dir_is_gone(const struct lvm_lv *lv)
{
    return tag_value(lv->name, LVM_DIR_GONE) || lvm_dir_is_to_wipe(lv);
}

/* ---- what is to be wiped ---- */

bool lvm_dir_is_to_wipe(const struct lvm_lv *lv)
{
    return tag_value(lv->name, LVM_DIR_WIPE) && lvm_dir_is_ours(lv);
}

bool lvm_dir_is_to_wipe_here(const struct lvm_lv *lv)
{
    char prefix[48];

    hidden_prefix(LVM_DIR_WIPE, prefix);
    return tag_value(lv->name, prefix) && lvm_dir_is_ours(lv);
}

static const char *wiped_tag(const struct lvm_lv *lv)
{
    vec_for_each(tag, &lv->tags)
        if (tag_value(*tag, LVM_DIR_WIPED))
            return *tag;
    return NULL;
}

/* Nothing that is odd is believed: it would leave data where it is. */
uint64_t lvm_dir_wiped(const struct lvm_lv *lv)
{
    const char *tag = wiped_tag(lv);
    char *end = NULL;
    uint64_t v = tag ? strtoull(tag + strlen(LVM_DIR_WIPED), &end, 10) : 0;

    return tag && !*end && v <= lv->len ? v : 0;
}

int lvm_dir_set_wiped(struct lvm_dir *dir, struct lvm_lv *lv, uint64_t bytes, struct err *err)
{
    struct step s = {.lvs = {lv}};
    const char *old = wiped_tag(lv);
    char text[24];

    if (old && lvm_dir_wiped(lv) == bytes)
        return 0;
    snprintf(text, sizeof(text), "%llu", (unsigned long long)bytes);
    put(dir, s.add, LVM_DIR_WIPED, text);
    if (old)
        put(dir, s.del, "", old);
    return run_tags(dir, &s, err);
}

/* ---- LVs that go ---- */

/* As a file that is unlinked while somebody has it open. */
SUSPENDS static int hide(struct lvm_dir *dir, struct lvm_lv *lv, struct err *err)
{
    char name[80];

    hidden_prefix(dir->wipe ? LVM_DIR_WIPE : LVM_DIR_GONE, name);
    size_t used = strlen(name);
    snprintf(name + used, sizeof(name) - used, "%.16s", lv->uuid);
    return run_rename(dir, lv, name, err);
}

SUSPENDS static int run_remove(struct lvm_dir *dir, struct lvm_lv *lv, struct err *err)
{
    crash_point("lvm-dir-remove");
    if (lv->open == LVM_YES || dir->wipe)
        return hide(dir, lv, err);
    _cleanup_(freep) char *uuid = strdup(lv->uuid);
    int rc = lvm_remove(&dir->lvm, (const char *const[]){lv->name, NULL}, err);
    lvm_dir_forget(dir); /* there is more room, too */
    if (rc != -EBUSY || !uuid || lvm_dir_load(dir, NULL) < 0)
        return rc;
    vec_for_each(it, &dir->vg->lvs) /* opened since the report was made */
        if (strcmp(it->uuid, uuid) == 0 && it->open == LVM_YES)
            return hide(dir, it, err);
    return rc;
}

int lvm_dir_sweep(struct lvm_dir *dir, struct err *err)
{
    VEC(const char *) names = {0};
    char prefix[48];
    int rc = lvm_dir_load(dir, err);

    hidden_prefix(LVM_DIR_GONE, prefix);
    if (rc < 0)
        return rc;
    vec_for_each(lv, &dir->vg->lvs) {
        if (tag_value(lv->name, prefix) && lvm_dir_is_ours(lv) && lv->open != LVM_YES && rc == 0)
            rc = vec_push(&names, lv->name);
    }
    if (rc == 0 && names.len)
        rc = vec_push(&names, NULL);
    if (rc < 0)
        rc = err_set(err, rc, "out of memory");
    else if (names.len)
        rc = lvm_remove(&dir->lvm, names.data, err);
    if (names.len)
        lvm_dir_forget(dir);
    vec_free(&names);
    return rc;
}

/* ---- finishing what is decided ---- */

/* The LV gets out of the way of a name that is no longer its own. */
SUSPENDS static int give_way(struct lvm_dir *dir, struct lvm_lv *lv, struct err *err)
{
    const char *other = lvm_dir_name(dir, lv, 0);
    int rc = check_ours(dir, lv, err);

    if (rc < 0)
        return rc;
    return other ? run_rename(dir, lv, other, err) : run_remove(dir, lv, err);
}

/* A link whose name is the LV's own now, or another's, is none. */
static const char *stale_link(const struct lvm_dir *dir, const struct lvm_lv *lv)
{
    vec_for_each(tag, &lv->tags) {
        const char *also = tag_value(*tag, LVM_DIR_ALSO);

        if (also && (strcmp(also, lv->name) == 0 || !keeps(dir, lv, also)))
            return *tag;
    }
    return NULL;
}

/* Drops a tag of an LV, and a link that has become stale of another one, in one command. */
SUSPENDS static int drop_tags(struct lvm_dir *dir, struct lvm_lv *lv, const char *tag,
                              struct err *err)
{
    struct step s = {0};

    s.lvs[0] = lv;
    put(dir, s.del, "", tag);
    vec_for_each(other, &dir->vg->lvs) {
        const char *link = other == lv || !lvm_dir_is_ours(other) ? NULL : stale_link(dir, other);

        if (link && !s.lvs[1]) {
            s.lvs[1] = other;
            put(dir, s.del, "", link);
        }
    }
    return run_tags(dir, &s, err);
}

/* By LVM's own name. Renames that were noted have left the report unsorted. */
static struct lvm_lv *bearer_of(const struct lvm_dir *dir, const char *name)
{
    vec_for_each(lv, &dir->vg->lvs)
        if (strcmp(lv->name, name) == 0)
            return lv;
    return NULL;
}

/* One step of a takeover that was begun. */
SUSPENDS static int take_step(struct lvm_dir *dir, struct lvm_lv *lv, struct err *err)
{
    const char *name = takes(lv);
    struct lvm_lv *bearer = bearer_of(dir, name);
    _cleanup_(freep) char *tag = NULL;

    if (bearer && bearer != lv)
        return give_way(dir, bearer, err);
    if (bearer != lv)
        return run_rename(dir, lv, name, err);
    if (asprintf(&tag, LVM_DIR_TAKES "%s", name) < 0)
        return err_set(err, -ENOMEM, "out of memory");
    return drop_tags(dir, lv, tag, err);
}

int lvm_dir_settle(struct lvm_dir *dir, struct err *err)
{
    for (;;) {
        struct lvm_lv *next = NULL, *linked = NULL;
        int rc = lvm_dir_load(dir, err);

        if (rc < 0)
            return rc;
        vec_for_each(lv, &dir->vg->lvs) {
            if (!next && takes(lv) && lvm_dir_is_ours(lv))
                next = lv;
            if (!linked && lvm_dir_is_ours(lv) && stale_link(dir, lv))
                linked = lv;
        }
        if (!next && !linked)
            return 0;
        if (next)
            rc = take_step(dir, next, err);
        else
            rc = drop_tags(dir, linked, stale_link(dir, linked), err);
        if (rc < 0)
            return rc;
    }
}

/* ---- changes ---- */

SUSPENDS static int find_ours(struct lvm_dir *dir, const char *name, struct lvm_lv **ret,
                              struct err *err)
{
    int rc = lvm_dir_settle(dir, err);

    if (rc < 0)
        return rc;
    *ret = lvm_dir_find(dir, name);
    if (!*ret)
        return err_set(err, -ENOENT, "there is no LV '%s/%s'", dir->lvm.vg, name);
    return check_ours(dir, *ret, err);
}

int lvm_dir_link(struct lvm_dir *dir, const char *old, const char *new, struct err *err)
{
    struct step s = {0};
    struct lvm_lv *lv;
    int rc = find_ours(dir, old, &lv, err);

    if (rc < 0)
        return rc;
    if (lvm_dir_find(dir, new))
        return err_set(err, -EEXIST, "there is an LV '%s/%s' already", dir->lvm.vg, new);
    if (!lvm_lv_name_ok(dir->lvm.vg, new))
        return err_set(err, -EINVAL, "'%s' cannot be a logical volume's name", new);
    s.lvs[0] = lv;
    put(dir, s.add, LVM_DIR_ALSO, new);
    return run_tags(dir, &s, err);
}

int lvm_dir_unlink(struct lvm_dir *dir, const char *name, struct err *err)
{
    struct step s = {0};
    struct lvm_lv *lv;
    int rc = find_ours(dir, name, &lv, err);

    if (rc == -ENOENT)
        return 0;
    if (rc < 0)
        return rc;
    const char *other = lvm_dir_name(dir, lv, 1);
    if (!other)
        return run_remove(dir, lv, err);
    if (strcmp(lv->name, name) == 0) { /* then its link becomes its name, and is none any more */
        rc = run_rename(dir, lv, other, err);
        return rc < 0 ? rc : lvm_dir_settle(dir, err);
    }
    s.lvs[0] = lv;
    put(dir, s.del, LVM_DIR_ALSO, name);
    return run_tags(dir, &s, err);
}

/* A link gets another name; nobody has that. */
SUSPENDS static int rename_link(struct lvm_dir *dir, struct lvm_lv *lv, const char *old,
                                const char *new, struct err *err)
{
    struct step s = {0};

    s.lvs[0] = lv;
    put(dir, s.add, LVM_DIR_ALSO, new);
    put(dir, s.del, LVM_DIR_ALSO, old);
    return run_tags(dir, &s, err);
}

int lvm_dir_rename(struct lvm_dir *dir, const char *old, const char *new, struct err *err)
{
    struct step s = {0};
    struct lvm_lv *lv, *other;
    int rc = find_ours(dir, old, &lv, err);

    if (rc < 0)
        return rc;
    other = lvm_dir_find(dir, new);
    if (other == lv)
        return strcmp(old, new) == 0 ? 0 : lvm_dir_unlink(dir, old, err);
    bool is_link = strcmp(lv->name, old) != 0;
    if (!other)
        return is_link ? rename_link(dir, lv, old, new, err) : run_rename(dir, lv, new, err);
    rc = check_ours(dir, other, err);
    if (rc == 0 && is_link)
        rc = err_set(err, -ENOTSUP, "'%s' is a second name of LV '%s/%s'", old, dir->lvm.vg,
                     lv->name);
    if (rc < 0)
        return rc;
    s.lvs[0] = lv;
    put(dir, s.add, LVM_DIR_TAKES, new);
    rc = run_tags(dir, &s, err);
    return rc < 0 ? rc : lvm_dir_settle(dir, err);
}
