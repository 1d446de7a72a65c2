/*
 * Intents of a volume group: tags of the group itself, of the form told in intent_text.c.
 *
 * 1. All tags of an intent come and go by one command each, under the pool's lock: it is there
 * whole, or not at all. One of which a tag is missing was damaged by hand, and is not used.
 * 2. Tags cannot be locked. An operation holds a flock on <runtime>/.intents/<vg>:<id> instead,
 * from before the tags are there until after they have gone: so a file without tags, or one whose
 * lock is free, means nothing, and tags whose file is missing belong to nobody that lives.
 * 3. That says nothing on another host. So the intent records its host and that host's boot, and
 * whoever takes it over writes itself there. Owners are compared as a whole: a host is known by its
 * name and its machine id, since names are given twice.
 */
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/utsname.h>
#include "base/check.h"
#include "rt/timer.h"
#include "vol/intent_tags.h"

#define LOCK_TRIES   100u
#define LOCK_POLL_NS NSEC_PER_MSEC

/* ---- owners ---- */

/* The first line of a file, without what JSON or a terminal would not take; "": there is none. */
static void read_line(const char *path, char *to, size_t len)
{
    FILE *f = fopen(path, "re");

    to[0] = '\0';
    if (f && !fgets(to, (int)len, f))
        to[0] = '\0';
    if (f)
        fclose(f);
    to[strcspn(to, "\n")] = '\0';
}

static json_t *hash_text(const char *text)
{
    char hex[17];

    snprintf(hex, sizeof(hex), "%016llx", (unsigned long long)text_hash(text));
    return json_string(*text ? hex : "");
}

/* This process as an owner. The machine id is nobody else's business: its hash is as good. */
static json_t *own_record(void)
{
    char boot[64], machine[64];
    struct utsname uts = {0};

    uname(&uts);
    for (char *c = uts.nodename; *c; c++)
        if (*c <= ' ' || *c > '~')
            *c = '?';
    read_line("/proc/sys/kernel/random/boot_id", boot, sizeof(boot));
    read_line("/etc/machine-id", machine, sizeof(machine));
    return json_pack("{s:s, s:o, s:s, s:o}", "host", uts.nodename, "machine", hash_text(machine),
                     "boot", boot, "runtime", hash_text(runtime_dir()));
}

static bool same(const json_t *a, const json_t *b, const char *key)
{
    return strcmp(intent_str(a, key), intent_str(b, key)) == 0;
}

/* Does the file of its lock tell? Of an earlier boot of this host it is free or missing. */
static bool is_foreign(const json_t *json)
{
    const json_t *owner = json_object_get(json, "owner");
    json_t *own = own_record();
    bool ours = own && same(owner, own, "host") && same(owner, own, "machine") &&
                (!same(owner, own, "boot") || same(owner, own, "runtime"));

    json_decref(own);
    return !ours;
}

/* ---- the file ---- */

static int make_dir(const char *path, mode_t mode)
{
    return mkdir(path, mode) < 0 && errno != EEXIST ? -errno : 0;
}

static char *lock_dir_path(void)
{
    char *ret = NULL;

    return asprintf(&ret, "%s/.intents", runtime_dir()) < 0 ? NULL : ret;
}

static int fill_names(struct intent *in, struct err *err)
{
    const char *vg = in->store->dir.lvm.vg;

    if (asprintf(&in->path, "%s: intent %s", vg, in->id) < 0)
        in->path = NULL;
    if (asprintf(&in->lock_path, "%s/.intents/%s:%s", runtime_dir(), vg, in->id) < 0)
        in->lock_path = NULL;
    return in->path && in->lock_path ? 0 : err_set(err, -ENOMEM, "out of memory");
}

static int make_lock_dir(void)
{
    _cleanup_(freep) char *dir = lock_dir_path(), *runtime = strdup(runtime_dir());

    if (!dir || !runtime)
        return -ENOMEM;
    for (char *p = strchr(runtime + 1, '/'); p; p = strchr(p + 1, '/')) {
        *p = '\0';
        make_dir(runtime, 0755); /* a failure shows below */
        *p = '/';
    }
    make_dir(runtime, 0755);
    return make_dir(dir, 0700);
}

/* 0, -EAGAIN its operation has it, or another error. */
static int try_lock(const char *path, int *ret_fd)
{
    for (;;) {
        int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);

        if (fd < 0)
            return -errno;
        if (flock(fd, LOCK_EX | LOCK_NB) < 0) {
            int rc = errno == EWOULDBLOCK ? -EAGAIN : -errno;

            close(fd);
            return rc;
        }
        if (intent_fd_is_named(fd, path)) {
            *ret_fd = fd;
            return 0;
        }
        close(fd); /* it has just been tidied away */
    }
}

static int lock_file(struct intent *in, struct err *err)
{
    int rc = make_lock_dir();

    if (rc == 0)
        rc = try_lock(in->lock_path, &in->fd);
    if (rc < 0 && rc != -EAGAIN)
        return err_errno(err, rc, "lock '%s'", in->lock_path);
    return rc;
}

/* Of an intent that nobody knows yet: whoever tidies up holds the file for a moment. */
SUSPENDS static int lock_new_file(struct intent *in, struct err *err)
{
    int rc = -EAGAIN;

    for (unsigned i = 0; i < LOCK_TRIES && (rc = lock_file(in, err)) == -EAGAIN; i++)
        timer_sleep(LOCK_POLL_NS);
    return rc == -EAGAIN ? err_set(err, -EBUSY, "'%s' is locked by another process", in->lock_path)
                         : rc;
}

static void drop_file(struct intent *in)
{
    if (in->fd < 0)
        return;
    unlink(in->lock_path);
    close(TAKE_FD(in->fd));
}

/* The files of a volume group's intents, one each call; NULL: no more. */
static const char *next_file(DIR *d, const char *vg)
{
    for (struct dirent *e; (e = readdir(d));)
        if (strncmp(e->d_name, vg, strlen(vg)) == 0 && e->d_name[strlen(vg)] == ':')
            return e->d_name + strlen(vg) + 1;
    return NULL;
}

static DIR *open_files(void)
{
    _cleanup_(freep) char *dir = lock_dir_path();

    return dir ? opendir(dir) : NULL;
}

static bool has_text(const struct intent_tags *list, const char *text)
{
    vec_for_each(it, &list->list)
        if (strcmp(*it, text) == 0)
            return true;
    return false;
}

/* Files without tags, of an operation that was killed before it wrote them or after they went. */
static void tidy_files(const struct lvm_store *s, const struct intent_tags *ids)
{
    const char *vg = s->dir.lvm.vg, *id;
    DIR *d = open_files();

    while (d && (id = next_file(d, vg))) {
        _cleanup_(freep) char *path = NULL;
        int fd;

        if (has_text(ids, id) || asprintf(&path, "%s/.intents/%s:%s", runtime_dir(), vg, id) < 0)
            continue;
        if (try_lock(path, &fd) < 0)
            continue; /* its operation is about to write them */
        unlink(path);
        close(fd);
    }
    if (d)
        closedir(d);
}

/* ---- tags ---- */

static const char *const *as_list(struct intent_tags *tags)
{
    return vec_push(&tags->list, NULL) < 0 ? NULL : (const char *const *)tags->list.data;
}

static void note_change(struct lvm_vg *vg, const char *const *add, const char *const *del)
{
    for (; *del; del++)
        for (size_t i = vg->tags.len; i-- > 0;)
            if (strcmp(vg->tags.data[i], *del) == 0) {
                free(vg->tags.data[i]);
                vec_remove_at(&vg->tags, i);
            }
    for (; *add; add++) {
        char *copy = strdup(*add);

        if (!copy || vec_push(&vg->tags, copy) < 0)
            abort();
    }
}

static int say_full(const struct lvm_store *s, const char *why, struct err *err)
{
    return err_set(err, -ENOSPC,
                   "the metadata area of volume group '%s' is full, there is no room to record an "
                   "operation: destroy whole volumes, which needs none, or move to a group made "
                   "with a larger one (pvcreate --metadatasize 64m); %s",
                   s->dir.lvm.vg, why);
}

/* What a command has done that was ended, or of which nobody knows. */
SUSPENDS static bool is_done(struct lvm_store *s, const char *const *add, const char *const *del)
{
    lvm_dir_forget(&s->dir);
    if (lvm_dir_load(&s->dir, NULL) < 0)
        return false;
    struct intent_tags now = {{s->dir.vg->tags.data, s->dir.vg->tags.len, 0}};
    for (; *add; add++)
        if (!has_text(&now, *add))
            return false;
    for (; *del; del++)
        if (has_text(&now, *del))
            return false;
    return true;
}

/* One command. Tags that are in both lists stay. The lists end with NULL afterwards. */
SUSPENDS static int change(struct lvm_store *s, struct intent_tags *add, struct intent_tags *del,
                           struct err *err)
{
    struct err why = {0};

    for (size_t i = add->list.len; i-- > 0;)
        for (size_t j = del->list.len; j-- > 0;)
            if (strcmp(add->list.data[i], del->list.data[j]) == 0) {
                free(add->list.data[i]);
                free(del->list.data[j]);
                vec_remove_at(&add->list, i);
                vec_remove_at(&del->list, j);
                break;
            }
    const char *const *new = as_list(add), *const *old = as_list(del);
    if (!new || !old)
        return err_set(err, -ENOMEM, "out of memory");
    int rc = lvm_change_tags(&s->dir.lvm, NULL, new, old, &why);
    if (rc == 0)
        note_change(s->dir.vg, new, old);
    else if ((rc == -ETIMEDOUT || rc == -EIO) && is_done(s, new, old))
        rc = 0;
    if (rc < 0)
        lvm_dir_forget(&s->dir);
    if (rc == -ENOSPC)
        return say_full(s, err_text(&why), err);
    return rc < 0 ? err_set(err, rc, "%s", err_text(&why)) : 0;
}

static int copy_tags(const struct intent_tags *from, struct intent_tags *to)
{
    vec_for_each(it, &from->list) {
        char *copy = strdup(*it);

        if (!copy || vec_push(&to->list, copy) < 0) {
            free(copy);
            return -ENOMEM;
        }
    }
    return 0;
}

/* ---- writing ---- */

static int encode(struct intent *in, struct intent_tags *ret, struct err *err)
{
    _cleanup_(freep) char *text = json_dumps(in->json, JSON_COMPACT | JSON_SORT_KEYS);
    int rc = text ? intent_tags_encode(in->id, text, ret) : -ENOMEM;

    if (rc == -E2BIG)
        return err_set(err, rc,
                       "an operation on so many elements at once cannot be recorded in "
                       "a volume group (%zu KiB)",
                       strlen(text) >> 10);
    if (rc == -EINVAL)
        return err_set(err, rc, "'%s' cannot be an operation's number", in->id);
    return rc < 0 ? err_set(err, rc, "out of memory") : 0;
}

/* Writes what is in json in place of the tags that are there. The flock is held. */
SUSPENDS static int exchange(struct intent *in, struct intent_tags *old, struct err *err)
{
    struct intent_tags add = {0}, kept = {0};
    int rc = encode(in, &add, err);

    if (rc == 0 && copy_tags(&add, &kept) < 0)
        rc = err_set(err, -ENOMEM, "out of memory");
    if (rc == 0)
        rc = change(in->store, &add, old, err);
    if (rc == 0) {
        struct intent_tags was = in->tags;

        in->tags = kept;
        kept = was;
    }
    intent_tags_fini(&add);
    intent_tags_fini(&kept);
    return rc;
}

static int fill_owner(struct intent *in, struct err *err)
{
    if (json_object_set_new(in->json, "owner", own_record()) == 0)
        return 0;
    return err_set(err, -ENOMEM, "out of memory");
}

int tags_begin(struct intent *in, struct err *err)
{
    struct intent_tags none = {0};
    int rc = fill_names(in, err);

    if (rc == 0)
        rc = fill_owner(in, err);
    clock_gettime(CLOCK_REALTIME, &in->begun);
    json_object_set_new(
        in->json, "begun",
        json_pack("[I, I]", (json_int_t)in->begun.tv_sec, (json_int_t)in->begun.tv_nsec));
    if (rc == 0)
        rc = lvm_store_begin(in->store, err);
    if (rc < 0)
        return rc;
    rc = lock_new_file(in, err);
    crash_point("intent-locked");
    if (rc == 0)
        rc = exchange(in, &none, err);
    if (rc < 0)
        drop_file(in);
    lvm_store_end(in->store);
    intent_tags_fini(&none);
    return rc;
}

/* Those that are there and not ours: whoever took it over has written them. */
static bool is_lost(const struct intent *in, const struct intent_tags *now)
{
    vec_for_each(it, &now->list)
        if (!has_text(&in->tags, *it))
            return true;
    return false;
}

int tags_end(struct intent *in, struct err *err)
{
    struct lvm_store *s = in->store;
    struct intent_tags now = {0}, none = {0};
    int rc = lvm_store_begin(s, err);

    if (rc < 0)
        return rc;
    rc = intent_tags_of(s->dir.vg, in->id, &now);
    if (rc < 0)
        err_set(err, rc, "out of memory");
    else if (is_lost(in, &now))
        rc = err_set(err, -ESTALE, "%s was taken over by another host", in->path);
    else if (now.list.len) /* none: somebody has finished it */
        rc = change(s, &none, &now, err);
    crash_point("intent-untagged");
    if (rc == 0)
        drop_file(in);
    lvm_store_end(s);
    intent_tags_fini(&now);
    intent_tags_fini(&none);
    return rc;
}

/* ---- reading ---- */

static int say_damaged(const struct intent *in, const struct err *why, struct err *err)
{
    return err_set(err, -EUCLEAN,
                   "%s is damaged: %s; what it was about is unknown: look at the volumes, then "
                   "remove its tags, '" INTENT_TAG "%s/...' (vgs -o vg_tags, vgchange --deltag)",
                   in->path, err_text(why), in->id);
}

static int parse(struct intent *in, struct err *err)
{
    _cleanup_(freep) char *text = NULL;
    struct err why = {0};
    json_error_t bad = {0};
    int rc = intent_tags_decode(&in->tags, &text, &why);

    if (rc == -ENOMEM)
        return err_set(err, rc, "out of memory");
    if (rc == 0) {
        in->json = json_loads(text, 0, &bad);
        if (!json_is_object(in->json))
            rc = err_set(&why, -EUCLEAN, "%s", bad.text);
        else if (strcmp(intent_str(in->json, "id"), in->id) != 0)
            rc = err_set(&why, -EUCLEAN, "it is of another operation");
    }
    if (rc < 0)
        return say_damaged(in, &why, err);
    return intent_check_json(in, "", err);
}

/* *ret NULL: there is none of this id. */
static int read_tags(struct lvm_store *s, const char *id, struct intent **ret, struct err *err)
{
    struct intent *in = calloc(1, sizeof(*in));

    *ret = NULL;
    if (!in)
        return err_set(err, -ENOMEM, "out of memory");
    in->fd = -1;
    in->store = s;
    snprintf(in->id, sizeof(in->id), "%s", id);
    int rc = fill_names(in, err);
    if (rc == 0 && intent_tags_of(s->dir.vg, id, &in->tags) < 0)
        rc = err_set(err, -ENOMEM, "out of memory");
    if (rc == 0 && in->tags.list.len)
        rc = parse(in, err);
    if (rc < 0 || !in->tags.list.len) {
        intent_leave(in);
        return rc;
    }
    const json_t *begun = json_object_get(in->json, "begun");
    in->begun.tv_sec = (time_t)json_integer_value(json_array_get(begun, 0));
    in->begun.tv_nsec = (long)json_integer_value(json_array_get(begun, 1));
    in->foreign = is_foreign(in->json);
    *ret = in;
    return 0;
}

/* Those of this host: fd stays -1 if the operation runs. */
static int claim_own(struct intent *in, struct err *err)
{
    int rc = in->foreign ? 0 : lock_file(in, err);

    return rc == -EAGAIN ? 0 : rc;
}

static int load_all(struct lvm_store *s, const struct intent_tags *ids, bool claim,
                    struct intents *ret, struct err *err)
{
    vec_for_each(id, &ids->list) {
        struct intent *in = NULL;
        int rc = read_tags(s, *id, &in, err);

        if (rc == 0 && in && claim)
            rc = claim_own(in, err);
        if (rc == 0 && in && vec_push(&ret->list, in) < 0)
            rc = err_set(err, -ENOMEM, "out of memory");
        if (rc < 0) {
            intent_leave(in);
            return rc;
        }
    }
    return 0;
}

int tags_load(struct lvm_store *s, bool claim, struct intents *ret, struct err *err)
{
    struct intent_tags ids = {0};
    struct intents list = {0};
    int rc = claim ? lvm_store_begin(s, err) : lvm_store_look(s, err);

    if (rc < 0)
        return rc;
    rc = intent_tags_ids(s->dir.vg, &ids, err);
    if (rc == 0)
        rc = load_all(s, &ids, claim, &list, err);
    if (rc == 0 && claim)
        tidy_files(s, &ids);
    if (claim)
        lvm_store_end(s);
    intent_tags_fini(&ids);
    if (rc < 0)
        intents_fini(&list);
    else
        *ret = list;
    return rc;
}

int tags_claim(struct lvm_store *s, const char *id, struct intent **ret, struct err *err)
{
    int rc = lvm_store_begin(s, err);

    if (rc < 0)
        return rc;
    rc = read_tags(s, id, ret, err);
    if (rc == 0 && *ret)
        rc = claim_own(*ret, err);
    if (rc < 0)
        intent_leave(TAKE_PTR(*ret));
    lvm_store_end(s);
    return rc;
}

bool tags_any(struct lvm_store *s)
{
    DIR *d = open_files();
    bool found = d && next_file(d, s->dir.lvm.vg);

    if (d)
        closedir(d);
    if (lvm_store_look(s, NULL) < 0)
        return true; /* whoever loads them says why */
    vec_for_each(tag, &s->dir.vg->tags)
        found |= strncmp(*tag, INTENT_TAG, strlen(INTENT_TAG)) == 0;
    return found;
}

/* ---- taking over ---- */

/* Under the pool's lock, with a fresh report. */
SUSPENDS static int take_over(struct intent *in, bool *ret_gone, struct err *err)
{
    struct intent_tags now = {0};
    int rc = intent_tags_of(in->store->dir.vg, in->id, &now);

    if (rc < 0)
        err_set(err, rc, "out of memory");
    *ret_gone = rc == 0 && now.list.len == 0;
    if (rc == 0 && !*ret_gone && (is_lost(in, &now) || now.list.len != in->tags.list.len))
        rc = err_set(err, -EBUSY, "%s was taken over by another host", in->path);
    if (rc == 0 && !*ret_gone && in->foreign) {
        rc = lock_file(in, err);
        if (rc == -EAGAIN)
            err_set(err, rc = -EBUSY, "%s is being taken over by another process", in->path);
        if (rc == 0)
            rc = fill_owner(in, err);
        crash_point("intent-take-over");
        if (rc == 0)
            rc = exchange(in, &now, err);
        if (rc == 0)
            in->foreign = false;
        else
            drop_file(in);
        crash_point("intent-taken-over");
    }
    intent_tags_fini(&now);
    return rc;
}

int tags_take_over(struct intent *in, bool *ret_gone, struct err *err)
{
    int rc = lvm_store_begin(in->store, err);

    if (rc < 0)
        return rc;
    rc = take_over(in, ret_gone, err);
    lvm_store_end(in->store);
    return rc;
}
