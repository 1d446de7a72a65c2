/*
 * Changes of a VG: one command of LVM's each. Names and tags are checked before, so that nothing
 * that somebody typed is ever read as an option, a tag or another VG.
 */
#include <fcntl.h>
#include <glob.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "base/bits.h"
#include "vol/lvm_run.h"

#define SECTOR 512u /* LVM takes no other lengths */

static int check_lv(const struct lvm *lvm, const char *name, struct err *err)
{
    if (!lvm_vg_name_ok(lvm->vg))
        return err_set(err, -EINVAL, "'%s' cannot be a volume group's name", lvm->vg);
    if (!lvm_lv_name_ok(lvm->vg, name))
        return err_set(err, -EINVAL, "'%s' cannot be a logical volume's name in VG '%s'", name,
                       lvm->vg);
    return 0;
}

static int check_tags(const char *const *tags, struct err *err)
{
    for (; tags && *tags; tags++)
        if (!lvm_tag_ok(*tags))
            return err_set(err, -EINVAL, "'%s' cannot be an LVM tag", *tags);
    return 0;
}

/* "VG/LV" for each name. */
static int add_names(struct lvm_cmd *cmd, const struct lvm *lvm, const char *const *names,
                     struct err *err)
{
    for (; *names; names++) {
        int rc = check_lv(lvm, *names, err);

        if (rc < 0)
            return rc;
        lvm_cmd_addf(cmd, "%s/%s", lvm->vg, *names);
    }
    return 0;
}

/* Ends it; runs it before, unless it could not be put together. */
static SUSPENDS int finish_any(struct lvm_cmd *cmd, struct lvm *lvm, int rc, struct err *err)
{
    if (rc == 0)
        rc = lvm_cmd_run(cmd, lvm, NULL, NULL, err);
    lvm_cmd_fini(cmd);
    return rc;
}

/* The same of a command that changes the metadata. */
static SUSPENDS int finish(struct lvm_cmd *cmd, struct lvm *lvm, int rc, struct err *err)
{
    if (rc == 0 && lvm->nb_missing)
        rc = err_set(err, -ENODEV,
                     "%s: %u physical volumes of VG '%s' are missing; bring them back first",
                     cmd->verb, lvm->nb_missing, lvm->vg);
    return finish_any(cmd, lvm, rc, err);
}

/* Without lvmlockd the modes mean nothing, and old tools would ask for clustered locks. */
static const char *mode_flag(const struct lvm *lvm, enum lvm_mode mode)
{
    if (mode == LVM_INACTIVE)
        return "-an";
    if (!lvm->shared || mode == LVM_PLAIN)
        return "-ay";
    return mode == LVM_SHARED ? "-asy" : "-aey";
}

static int add_len(struct lvm_cmd *cmd, uint64_t len, struct err *err)
{
    if (len == 0 || len > INT64_MAX - SECTOR)
        return err_set(err, -EINVAL, "%s: a length of %llu bytes", cmd->verb,
                       (unsigned long long)len);
    lvm_cmd_addf(cmd, "--size=%llub", (unsigned long long)align_up(len, SECTOR));
    return 0;
}

/* ---- coming and going ---- */

int lvm_create(struct lvm *lvm, const struct lvm_new *lv, struct err *err)
{
    struct lvm_cmd cmd;
    int rc = check_lv(lvm, lv->name, err);

    if (rc == 0)
        rc = check_tags(lv->tags, err);
    if (rc < 0)
        return rc;
    lvm_cmd_init(&cmd, lvm, "lvcreate");
    lvm_cmd_add(&cmd, "--yes");
    lvm_cmd_add(&cmd, "-Zn"); /* the two that would write to it, and need it active */
    lvm_cmd_add(&cmd, "-Wn");
    lvm_cmd_add(&cmd, "--setautoactivation=n");
    lvm_cmd_add(&cmd, mode_flag(lvm, lv->mode));
    rc = add_len(&cmd, lv->len, err);
    for (const char *const *t = lv->tags; t && *t; t++)
        lvm_cmd_addf(&cmd, "--addtag=%s", *t);
    lvm_cmd_addf(&cmd, "--name=%s", lv->name);
    lvm_cmd_add(&cmd, lvm->vg);
    return finish(&cmd, lvm, rc, err);
}

int lvm_remove(struct lvm *lvm, const char *const *names, struct err *err)
{
    struct lvm_cmd cmd;

    if (!*names)
        return 0;
    lvm_cmd_init(&cmd, lvm, "lvremove");
    lvm_cmd_add(&cmd, "--yes");
    return finish(&cmd, lvm, add_names(&cmd, lvm, names, err), err);
}

int lvm_rename(struct lvm *lvm, const char *name, const char *new_name, struct err *err)
{
    struct lvm_cmd cmd;
    int rc = check_lv(lvm, name, err);

    if (rc == 0)
        rc = check_lv(lvm, new_name, err);
    if (rc < 0)
        return rc;
    lvm_cmd_init(&cmd, lvm, "lvrename");
    lvm_cmd_add(&cmd, lvm->vg);
    lvm_cmd_add(&cmd, name);
    lvm_cmd_add(&cmd, new_name);
    return finish(&cmd, lvm, 0, err);
}

/* ---- length ---- */

int lvm_extend(struct lvm *lvm, const char *name, uint64_t len, bool held_shared, struct err *err)
{
    const char *const names[] = {name, NULL};
    struct lvm_cmd cmd;

    lvm_cmd_init(&cmd, lvm, "lvextend");
    int rc = add_len(&cmd, len, err);
    if (lvm->shared && held_shared) {
        lvm_cmd_add(&cmd, "--lockopt");
        lvm_cmd_add(&cmd, "shupdate");
    }
    if (rc == 0)
        rc = add_names(&cmd, lvm, names, err);
    return finish(&cmd, lvm, rc, err);
}

static SUSPENDS int reduce(struct lvm *lvm, const char *name, uint64_t len, bool say_fs,
                           struct err *err)
{
    const char *const names[] = {name, NULL};
    struct lvm_cmd cmd;

    lvm_cmd_init(&cmd, lvm, "lvreduce");
    lvm_cmd_add(&cmd, "--yes");
    lvm_cmd_add(&cmd, "--force");
    if (say_fs) {
        lvm_cmd_add(&cmd, "--fs");
        lvm_cmd_add(&cmd, "ignore");
    }
    int rc = add_len(&cmd, len, err);
    if (rc == 0)
        rc = add_names(&cmd, lvm, names, err);
    return finish(&cmd, lvm, rc, err);
}

int lvm_reduce(struct lvm *lvm, const char *name, uint64_t len, struct err *err)
{
    /* From 2.03.17 on a file system is looked for, which needs an active LV, unless told not to;
     * before, there was no such option. Which it is, is found out once. */
    static _Atomic bool without_fs;
    struct err why = {0};

    if (without_fs)
        return reduce(lvm, name, len, false, err);
    int rc = reduce(lvm, name, len, true, &why);
    if (rc == -EINVAL && strstr(err_text(&why), "--fs")) {
        without_fs = true;
        return reduce(lvm, name, len, false, err);
    }
    return rc < 0 ? err_set(err, rc, "%s", err_text(&why)) : rc;
}

/* ---- tags ---- */

static void add_each(struct lvm_cmd *cmd, const char *option, const char *const *tags)
{
    for (; tags && *tags; tags++)
        lvm_cmd_addf(cmd, "%s=%s", option, *tags);
}

int lvm_change_tags(struct lvm *lvm, const char *const *names, const char *const *add,
                    const char *const *del, struct err *err)
{
    struct lvm_cmd cmd;
    int rc = check_tags(add, err);

    if (rc == 0)
        rc = check_tags(del, err);
    if (rc == 0 && !lvm_vg_name_ok(lvm->vg))
        rc = err_set(err, -EINVAL, "'%s' cannot be a volume group's name", lvm->vg);
    if (rc < 0)
        return rc;
    if ((names && !*names) || ((!add || !*add) && (!del || !*del)))
        return 0;
    lvm_cmd_init(&cmd, lvm, names ? "lvchange" : "vgchange");
    add_each(&cmd, "--addtag", add);
    add_each(&cmd, "--deltag", del);
    if (names)
        rc = add_names(&cmd, lvm, names, err);
    else
        lvm_cmd_add(&cmd, lvm->vg);
    return finish(&cmd, lvm, rc, err);
}

/* ---- activation ---- */

static SUSPENDS int change(struct lvm *lvm, const char *const *names, const char *what,
                           struct err *err)
{
    struct lvm_cmd cmd;

    if (!*names)
        return 0;
    lvm_cmd_init(&cmd, lvm, "lvchange");
    lvm_cmd_add(&cmd, what);
    return finish_any(&cmd, lvm, add_names(&cmd, lvm, names, err), err);
}

int lvm_activate(struct lvm *lvm, const char *const *names, enum lvm_mode mode, struct err *err)
{
    return change(lvm, names, mode_flag(lvm, mode), err);
}

int lvm_deactivate(struct lvm *lvm, const char *const *names, struct err *err)
{
    return change(lvm, names, "-an", err);
}

int lvm_refresh(struct lvm *lvm, const char *const *names, struct err *err)
{
    return change(lvm, names, "--refresh", err);
}

/* ---- a device without an LV ---- */

static bool read_word(const char *dm_dir, const char *file, char *to, size_t len)
{
    char path[128];

    snprintf(path, sizeof(path), "%s/%s", dm_dir, file);
    _cleanup_(closep) int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd >= 0 ? read(fd, to, len - 1) : -1;
    to[MAX(n, (ssize_t)0)] = 0;
    to[strcspn(to, "\n")] = 0;
    return n > 0;
}

/* The kernel knows an LV as "LVM-" and both UUIDs without dashes. */
static void dm_uuid(char *to, size_t len, const char *vg_uuid, const char *lv_uuid)
{
    size_t n = (size_t)snprintf(to, len, "LVM-");

    for (const char *c = vg_uuid; *c && n + 1 < len; c++)
        if (*c != '-')
            to[n++] = *c;
    for (const char *c = lv_uuid; *c && n + 1 < len; c++)
        if (*c != '-')
            to[n++] = *c;
    to[n] = 0;
}

static bool find_device(const char *uuid, char *name, size_t name_len)
{
    char here[128];
    bool found = false;
    glob_t all;

    if (glob("/sys/block/dm-*/dm", 0, NULL, &all) != 0)
        return false;
    for (size_t i = 0; i < all.gl_pathc && !found; i++)
        found = read_word(all.gl_pathv[i], "uuid", here, sizeof(here)) && strcmp(here, uuid) == 0 &&
                read_word(all.gl_pathv[i], "name", name, name_len);
    globfree(&all);
    return found;
}

int lvm_drop_device(struct lvm *lvm, const char *vg_uuid, const char *lv_uuid, struct err *err)
{
    struct lvm_cmd cmd = {.verb = "dmsetup"};
    char uuid[128], name[LVM_NAME_MAX + 2];

    dm_uuid(uuid, sizeof(uuid), vg_uuid, lv_uuid);
    if (!find_device(uuid, name, sizeof(name)))
        return 0;
    lvm_cmd_add(&cmd, "dmsetup");
    lvm_cmd_add(&cmd, "remove");
    lvm_cmd_add(&cmd, "--retry"); /* udev may be looking into it */
    lvm_cmd_add(&cmd, name);
    return finish_any(&cmd, lvm, 0, err);
}
