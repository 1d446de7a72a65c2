/*
 * Intents: what an operation of several steps is about to do. Of a volume group they are tags
 * (intent_tags.c); of a directory pool, below, each is a file
 * <pool>/images/.varve/intent-<id>.json, durable before the first step and removed after the last.
 *
 * 1. The file is flock'ed by its operation for as long as that lives: an intent whose lock is free
 * is what a killed operation left.
 * 2. It holds plain file names and guests' numbers, never paths: a name with '/' is refused when it
 * is read, so an intent can not lead out of its pool. (Backing names are text for headers.)
 * 3. Beside them lies <pool>/images/.varve/spare, written in full long before it is needed: where
 * there is no room for a file, an intent is written over it and takes it by its name, so that
 * deletions work on a full storage. It goes back to its place at the end.
 */
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <time.h>
#include "vol/intent_tags.h"

#define INTENT_BYTES_MAX (1u << 20)
#define SPARE_BYTES      (64u << 10)

void intent_new_id(char id[24])
{
    uint64_t r = 0;

    if (getrandom(&r, sizeof(r), 0) != sizeof(r))
        r = (uint64_t)time(NULL) ^ ((uint64_t)getpid() << 32);
    snprintf(id, 24, "%016llx", (unsigned long long)r);
}

static int write_text(int fd, const char *text, size_t len)
{
    for (size_t pos = 0; pos < len;) {
        ssize_t n = write(fd, text + pos, len - pos);

        if (n < 0)
            return -errno;
        pos += (size_t)n;
    }
    return fsync(fd) < 0 ? -errno : 0;
}

static int write_json(int fd, const json_t *json)
{
    _cleanup_(freep) char *text = json_dumps(json, JSON_INDENT(1) | JSON_SORT_KEYS);

    return text ? write_text(fd, text, strlen(text)) : -ENOMEM;
}

bool intent_fd_is_named(int fd, const char *path)
{
    struct stat mine, there;

    return fstat(fd, &mine) == 0 && lstat(path, &there) == 0 && mine.st_dev == there.st_dev &&
           mine.st_ino == there.st_ino;
}

/* ---- the spare ---- */

static char *spare_path(const char *images)
{
    char *path = NULL;

    return asprintf(&path, "%s/" OWN_DIR "/spare", images) < 0 ? NULL : path;
}

/* While there is room; without it nothing fails before the storage is full. */
static void make_spare(const char *images, const char *id)
{
    _cleanup_(freep) char *spare = spare_path(images), *tmp = NULL;
    _cleanup_(freep) char *blank = malloc(SPARE_BYTES);

    if (!spare || !blank || store_exists(spare) ||
        asprintf(&tmp, "%s/" OWN_DIR "/new-spare-%s", images, id) < 0)
        return;
    _cleanup_(closep) int fd = open(tmp, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    memset(blank, ' ', SPARE_BYTES);
    if (fd < 0)
        return;
    if (flock(fd, LOCK_EX | LOCK_NB) < 0 || write_text(fd, blank, SPARE_BYTES) < 0 ||
        store_publish(tmp, spare, NULL) < 0)
        unlink(tmp);
}

/* Overwrites it in place and gives it the intent's name; what stands behind the text is blank. */
static int take_spare(struct intent *in, const char *images)
{
    _cleanup_(freep) char *spare = spare_path(images), *dir = path_dir(in->path);
    _cleanup_(freep) char *text = json_dumps(in->json, JSON_INDENT(1) | JSON_SORT_KEYS);
    size_t len = text ? strlen(text) : 0;
    struct stat st;

    _cleanup_(freep) char *whole = malloc(SPARE_BYTES);
    if (!spare || !dir || !text || !whole)
        return -ENOMEM;
    _cleanup_(closep) int fd = open(spare, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0 || len > SPARE_BYTES)
        return -ENOSPC;
    memset(whole, ' ', SPARE_BYTES);
    memcpy(whole, text, len);
    if (flock(fd, LOCK_EX | LOCK_NB) < 0 || !intent_fd_is_named(fd, spare) || fstat(fd, &st) < 0 ||
        st.st_size != SPARE_BYTES)
        return -ENOSPC;
    int rc = write_text(fd, whole, SPARE_BYTES);
    if (rc == 0 && rename(spare, in->path) < 0)
        rc = -errno;
    if (rc == 0)
        rc = store_sync_dir(dir, NULL);
    if (rc == 0)
        in->fd = TAKE_FD(fd);
    return rc;
}

static bool give_spare_back(const struct intent *in, struct err *err, int *ret)
{
    _cleanup_(freep) char *dir = path_dir(in->path);
    _cleanup_(freep) char *spare = dir ? path_join(dir, "spare") : NULL;
    struct stat st;

    if (!spare || lstat(in->path, &st) < 0 || st.st_size != SPARE_BYTES ||
        renameat2(AT_FDCWD, in->path, AT_FDCWD, spare, RENAME_NOREPLACE) < 0)
        return false;
    *ret = store_sync_dir(dir, err);
    return true;
}

/* ---- writing ---- */

/* Written under another name first: what bears an intent's name is whole. */
static int write_file(struct intent *in, const char *tmp, struct err *err)
{
    in->fd = open(tmp, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (in->fd < 0)
        return err_errno(err, -errno, "create '%s'", tmp);
    int rc = flock(in->fd, LOCK_EX | LOCK_NB) < 0 ? -errno : write_json(in->fd, in->json);
    if (rc == 0 && rename(tmp, in->path) < 0)
        rc = -errno;
    if (rc < 0) {
        close(TAKE_FD(in->fd));
        unlink(tmp);
        return err_errno(err, rc, "write '%s'", in->path);
    }
    _cleanup_(freep) char *dir = path_dir(in->path);
    return dir ? store_sync_dir(dir, err) : err_set(err, -ENOMEM, "out of memory");
}

static int file_begin(struct intent *in, const char *images, struct err *err)
{
    _cleanup_(freep) char *tmp = NULL;
    int rc = -ENOMEM;
    struct stat st;

    if (asprintf(&in->path, "%s/" OWN_DIR "/intent-%s.json", images, in->id) >= 0 &&
        asprintf(&tmp, "%s/" OWN_DIR "/new-%s", images, in->id) >= 0)
        rc = write_file(in, tmp, err);
    if (rc == 0)
        make_spare(images, in->id);
    if ((rc == -ENOSPC || rc == -EDQUOT) && take_spare(in, images) == 0)
        rc = 0;
    if (rc == 0 && fstat(in->fd, &st) == 0)
        in->begun = st.st_mtim;
    if (rc < 0 && in->path)
        unlink(in->path);
    return rc == -ENOMEM ? err_set(err, rc, "out of memory") : rc;
}

SUSPENDS_UNCHECKED int intent_begin(const char *images, const char *id, const char *op,
                                    json_t *body, struct intent **ret, struct err *err)
{
    struct intent *in = calloc(1, sizeof(*in));
    int rc = 0;

    if (!in || !body) {
        free(in);
        json_decref(body);
        return err_set(err, -ENOMEM, "out of memory");
    }
    in->fd = -1;
    in->json = body;
    in->store = lvm_store_of(images);
    snprintf(in->id, sizeof(in->id), "%s", id);
    json_object_set_new(body, "version", json_integer(INTENT_VERSION));
    json_object_set_new(body, "op", json_string(op));
    json_object_set_new(body, "id", json_string(id));
    rc = in->store ? tags_begin(in, err) : file_begin(in, images, err);
    if (rc < 0)
        intent_leave(in);
    else
        *ret = in;
    return rc;
}

void intent_leave(struct intent *intent)
{
    if (!intent)
        return;
    if (intent->fd >= 0)
        close(intent->fd);
    json_decref(intent->json);
    intent_tags_fini(&intent->tags);
    free(intent->lock_path);
    free(intent->path);
    free(intent);
}

SUSPENDS_UNCHECKED int intent_end(struct intent *intent, struct err *err)
{
    int rc = 0;

    if (intent && intent->store)
        rc = tags_end(intent, err);
    else if (intent && !give_spare_back(intent, err, &rc))
        rc = store_unlink(intent->path, err);
    intent_leave(intent);
    return rc;
}

/* ---- whose is it? ---- */

enum intent_life intent_life(const struct intent *intent, enum intent_proof proof)
{
    if (!intent->foreign) /* by its flock, which is this process's now or that of its operation */
        return intent->fd >= 0 ? INTENT_DEAD : INTENT_LIVE;
    /* An operation has its volumes' locks while it lives. If they are of all hosts, and now the
     * caller's, it does not. */
    return proof == PROOF_NONE ? INTENT_UNKNOWN : INTENT_DEAD;
}

SUSPENDS_UNCHECKED int intent_take_over(struct intent *intent, enum intent_proof proof,
                                        bool *ret_gone, struct err *err)
{
    *ret_gone = false;
    if (intent_life(intent, proof) != INTENT_DEAD)
        return err_set(err, -EBUSY, "%s: its operation may be at work", intent->path);
    intent->proof = proof;
    return intent->store ? tags_take_over(intent, ret_gone, err) : 0;
}

void intent_describe(const struct intent *intent, char *text, size_t len)
{
    const char *host = intent_str(json_object_get(intent->json, "owner"), "host");
    char since[64] = "?";
    struct tm tm;

    if (localtime_r(&intent->begun.tv_sec, &tm))
        strftime(since, sizeof(since), "%Y-%m-%d %H:%M:%S", &tm);
    snprintf(text, len, "'%s' on host '%s' since %s", intent_op(intent), *host ? host : "?", since);
}

int intent_refuse(const struct intent *intent, const char *pool_id, const char *vmid,
                  const char *stem, struct err *err)
{
    char what[200];

    if (!intent->foreign)
        return err_set(err, -EBUSY, "%s:%s%s%s: another operation on it is under way", pool_id,
                       vmid, *vmid ? "/" : "", stem);
    intent_describe(intent, what, sizeof(what));
    return err_set(err, -EBUSY,
                   "%s:%s%s%s: another operation on it is under way, %s; if that host is down: "
                   "varve pool check %s --repair",
                   pool_id, vmid, *vmid ? "/" : "", stem, what, pool_id);
}

/* ---- reading ---- */

const char *intent_op(const struct intent *intent)
{
    return intent_str(intent->json, "op");
}

bool intent_concerns(const struct intent *intent, const char *vmid, const char *stem)
{
    const json_t *vols = json_object_get(intent->json, "vols"), *vol;
    size_t i;

    json_array_foreach(vols, i, vol)
    {
        if (strcmp(intent_str(vol, "vmid"), vmid) == 0 &&
            strcmp(intent_str(vol, "stem"), stem) == 0)
            return true;
    }
    return false;
}

const char *intent_str(const json_t *obj, const char *key)
{
    const char *s = json_string_value(json_object_get(obj, key));

    return s ? s : "";
}

const char *intent_name(const json_t *obj, const char *key)
{
    const char *s = intent_str(obj, key);

    if (!*s || strchr(s, '/') || strcmp(s, ".") == 0 || strcmp(s, "..") == 0)
        return NULL;
    return s;
}

char *intent_dir(const char *images, const json_t *vol)
{
    const char *vmid = intent_str(vol, "vmid");

    if (!*vmid)
        return strdup(images);
    return vmid_ok(vmid) ? path_join(images, vmid) : NULL;
}

int intent_check_json(struct intent *in, const char *why, struct err *err)
{
    if (!json_is_object(in->json))
        return err_set(err, -EUCLEAN, "'%s' is damaged: %s", in->path, why);
    if (json_integer_value(json_object_get(in->json, "version")) != INTENT_VERSION)
        return err_set(err, -ENOTSUP, "'%s' was written by another version of this program",
                       in->path);
    snprintf(in->id, sizeof(in->id), "%s", intent_str(in->json, "id"));
    return 0;
}

static int read_intent(int fd, struct intent *in, struct err *err)
{
    struct stat st;
    json_error_t why;

    if (fstat(fd, &st) < 0 || st.st_size > INTENT_BYTES_MAX)
        return err_set(err, -EUCLEAN, "'%s' is not an intent", in->path);
    _cleanup_(freep) char *text = malloc((size_t)st.st_size + 1);
    ssize_t n = text ? pread(fd, text, (size_t)st.st_size, 0) : -1;
    if (n < 0)
        return err_errno(err, text ? -errno : -ENOMEM, "read '%s'", in->path);
    in->begun = st.st_mtim;
    in->json = json_loadb(text, (size_t)n, 0, &why);
    return intent_check_json(in, why.text, err);
}

/* *ret NULL: it has gone meanwhile. */
static int load_one(char *path, bool claim, struct intent **ret, struct err *err)
{
    struct intent *in = calloc(1, sizeof(*in));

    if (!in) {
        free(path);
        return err_set(err, -ENOMEM, "out of memory");
    }
    in->path = path;
    in->fd = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    int rc = in->fd < 0 ? -errno : 0;
    bool gone = rc == -ENOENT;
    if (rc < 0 && !gone && !claim) { /* a listing by somebody who may only read */
        in->fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
        rc = in->fd < 0 ? -errno : 0;
    }
    bool live = rc == 0 && claim && flock(in->fd, LOCK_EX | LOCK_NB) < 0;
    if (rc < 0 && !gone)
        rc = err_errno(err, rc, "open '%s'", path);
    else if (!gone)
        rc = read_intent(in->fd, in, err);
    gone |= in->fd >= 0 &&
            !intent_fd_is_named(in->fd, path); /* after reading: the spare may be another's */
    if (rc == 0 && (live || !claim))
        close(TAKE_FD(in->fd));
    if (rc < 0 || gone) {
        intent_leave(in);
        in = NULL;
    }
    *ret = in;
    return gone ? 0 : rc;
}

static int file_claim(const char *images, const char *id, struct intent **ret, struct err *err)
{
    char *path = NULL;

    if (asprintf(&path, "%s/" OWN_DIR "/intent-%s.json", images, id) < 0)
        return err_set(err, -ENOMEM, "out of memory");
    return load_one(path, true, ret, err);
}

SUSPENDS_UNCHECKED int intent_claim(const char *images, const char *id, struct intent **ret,
                                    bool *ret_live, struct err *err)
{
    struct lvm_store *vg = lvm_store_of(images);
    struct intent *in = NULL;

    *ret = NULL;
    *ret_live = false;
    if (strchr(id, '/'))
        return err_set(err, -EUCLEAN, "the intent is damaged");
    int rc = vg ? tags_claim(vg, id, &in, err) : file_claim(images, id, &in, err);
    *ret_live = rc == 0 && in && intent_life(in, PROOF_NONE) == INTENT_LIVE;
    if (*ret_live)
        intent_leave(TAKE_PTR(in));
    *ret = in;
    return rc;
}

/* A file left from between creating and naming an intent: nothing was done under it. */
static void drop_unnamed(char *path)
{
    int fd = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);

    if (fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) == 0)
        unlink(path);
    if (fd >= 0)
        close(fd);
    free(path);
}

static int load_all(DIR *d, const char *dir, bool claim, struct intents *ret, struct err *err)
{
    for (struct dirent *e; (e = readdir(d));) {
        bool named = strncmp(e->d_name, "intent-", 7) == 0;

        if (!named && strncmp(e->d_name, "new-", 4) != 0)
            continue;
        struct intent *in = NULL;
        char *path = path_join(dir, e->d_name);
        int rc = path ? 0 : err_set(err, -ENOMEM, "out of memory");
        if (rc == 0 && !named) {
            if (claim)
                drop_unnamed(path);
            else
                free(path);
            continue;
        }
        if (rc == 0)
            rc = load_one(path, claim, &in, err);
        if (rc == 0 && in && vec_push(&ret->list, in) < 0) {
            intent_leave(in);
            rc = err_set(err, -ENOMEM, "out of memory");
        }
        if (rc < 0)
            return rc;
    }
    return 0;
}

static int file_load(const char *images, bool claim, struct intents *ret, struct err *err)
{
    _cleanup_(freep) char *dir = path_join(images, OWN_DIR);
    struct intents list = {0};
    DIR *d = dir ? opendir(dir) : NULL;

    if (!dir)
        return err_set(err, -ENOMEM, "out of memory");
    if (!d && errno != ENOENT)
        return err_errno(err, -errno, "open '%s'", dir);
    int rc = d ? load_all(d, dir, claim, &list, err) : 0;
    if (d)
        closedir(d);
    if (rc < 0)
        intents_fini(&list);
    else
        *ret = list;
    return rc;
}

SUSPENDS_UNCHECKED int intents_load(const char *images, bool claim, struct intents *ret,
                                    struct err *err)
{
    struct lvm_store *vg = lvm_store_of(images);

    return vg ? tags_load(vg, claim, ret, err) : file_load(images, claim, ret, err);
}

static bool file_any(const char *images)
{
    _cleanup_(freep) char *dir = path_join(images, OWN_DIR);
    DIR *d = dir ? opendir(dir) : NULL;
    bool found = false;

    for (struct dirent *e; d && !found && (e = readdir(d));)
        found = strncmp(e->d_name, "intent-", 7) == 0 || strncmp(e->d_name, "new-", 4) == 0;
    if (d)
        closedir(d);
    return found;
}

SUSPENDS_UNCHECKED bool intents_any(const char *images)
{
    struct lvm_store *vg = lvm_store_of(images);

    return vg ? tags_any(vg) : file_any(images);
}

void intents_fini(struct intents *list)
{
    vec_for_each(it, &list->list)
        intent_leave(*it);
    vec_free(&list->list);
}
