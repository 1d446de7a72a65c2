/*
 * Names, device nodes and lengths of LVs.
 *
 * A node is believed only if the kernel says that its device is this LV: without udev, links of an
 * LV that was deactivated elsewhere stay, and its number is given to the next. A plain file under
 * /dev, which a careless dd leaves behind, is not a disk.
 */
#include <ctype.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include "base/bits.h"
#include "qcow2/image.h"
#include "rt/reactor.h"
#include "rt/timer.h"
#include "vol/lvm_run.h"

#define JOINED_EXTRA 3u /* LVM itself counts VG, LV and so much more against LVM_NAME_MAX */

/* ---- names ---- */

static bool is_name(const char *name)
{
    if (!*name || *name == '-' || strcmp(name, ".") == 0 || strcmp(name, "..") == 0)
        return false;
    for (const char *c = name; *c; c++)
        if (!isascii(*c) || !(isalnum(*c) || strchr("._-+", *c)))
            return false;
    return strlen(name) <= LVM_NAME_MAX;
}

static size_t count_dashes(const char *s)
{
    size_t nr = 0;

    for (; *s; s++)
        nr += *s == '-';
    return nr;
}

bool lvm_vg_name_ok(const char *vg)
{
    return is_name(vg);
}

bool lvm_lv_name_ok(const char *vg, const char *name)
{
    /* names of LVM's own hidden LVs */
    static const char *const starts[] = {"pvmove", "snapshot"};
    static const char *const parts[] = {
        "_cdata",  "_cmeta", "_corig",  "_cpool",   "_cvol",    "_wcorig",
        "_mimage", "_mlog",  "_rimage", "_rmeta",   "_tdata",   "_tmeta",
        "_vdata",  "_imeta", "_iorig",  "_pmspare", "_vorigin",
    };
    size_t joined = strlen(vg) + strlen(name);

    if (!is_name(name))
        return false;
    for (size_t i = 0; i < ARRAY_SIZE(starts); i++)
        if (strncmp(name, starts[i], strlen(starts[i])) == 0)
            return false;
    for (size_t i = 0; i < ARRAY_SIZE(parts); i++)
        if (strstr(name, parts[i]))
            return false;
    return joined + JOINED_EXTRA <= LVM_NAME_MAX &&
           joined + 1 + count_dashes(vg) + count_dashes(name) <= LVM_NAME_MAX;
}

bool lvm_tag_ok(const char *tag)
{
    if (!*tag || *tag == '-')
        return false;
    for (const char *c = tag; *c; c++)
        if (!isascii(*c) || !(isalnum(*c) || strchr("._-+/=!:&#", *c)))
            return false;
    return strlen(tag) <= LVM_TAG_MAX;
}

static char *put_doubled(char *to, const char *s)
{
    for (; *s; s++) {
        *to++ = *s;
        if (*s == '-')
            *to++ = '-';
    }
    return to;
}

char *lvm_dm_name(const char *vg, const char *name)
{
    char *ret = malloc(2 * (strlen(vg) + strlen(name)) + 2);

    if (!ret)
        return NULL;
    char *end = put_doubled(ret, vg);
    *end++ = '-';
    end = put_doubled(end, name);
    *end = 0;
    return ret;
}

/* ---- device nodes ---- */

const char *lvm_other_dev_dir(void)
{
    const char *dir = getenv("DM_DEV_DIR");

    return dir && *dir ? dir : NULL;
}

const char *lvm_dev_dir(void)
{
    const char *dir = lvm_other_dev_dir();

    return dir ? dir : "/dev";
}

/* The device-mapper name of a device, "" if it has none. false: the kernel does not tell. */
static bool read_dm_name(dev_t dev, char *name, size_t name_len)
{
    char path[64];

    name[0] = 0;
    if (access("/sys/dev/block", F_OK) < 0)
        return false;
    snprintf(path, sizeof(path), "/sys/dev/block/%u:%u/dm/name", major(dev), minor(dev));
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return true;
    ssize_t n = read(fd, name, name_len - 1);
    close(fd);
    name[MAX(n, (ssize_t)0)] = 0;
    name[strcspn(name, "\n")] = 0;
    return true;
}

static bool is_node_of(const char *path, const char *dm_name)
{
    char name[LVM_NAME_MAX + 2];
    struct stat st;

    if (stat(path, &st) < 0)
        return false;
    if (lvm_other_dev_dir())
        return S_ISBLK(st.st_mode) || S_ISREG(st.st_mode);
    if (!S_ISBLK(st.st_mode))
        return false;
    return !read_dm_name(st.st_rdev, name, sizeof(name)) || strcmp(name, dm_name) == 0;
}

struct nodes {
    char *dm_name, *path, *dm_path;
};

static int nodes_init(struct nodes *n, const char *vg, const char *name)
{
    const char *dir = lvm_dev_dir();

    *n = (struct nodes){.dm_name = lvm_dm_name(vg, name)};
    if (!n->dm_name || asprintf(&n->path, "%s/%s/%s", dir, vg, name) < 0) {
        n->path = NULL;
        return -ENOMEM;
    }
    if (asprintf(&n->dm_path, "%s/mapper/%s", dir, n->dm_name) < 0) {
        n->dm_path = NULL;
        return -ENOMEM;
    }
    return 0;
}

static void nodes_fini(struct nodes *n)
{
    free(n->dm_name);
    free(n->path);
    free(n->dm_path);
}

static bool take_node(struct nodes *n, char **ret)
{
    if (is_node_of(n->path, n->dm_name))
        *ret = TAKE_PTR(n->path);
    else if (is_node_of(n->dm_path, n->dm_name))
        *ret = TAKE_PTR(n->dm_path);
    else
        return false;
    return true;
}

static SUSPENDS bool wait_for_node(struct nodes *n, unsigned wait_ms, char **ret)
{
    uint64_t until = reactor_now() + wait_ms * NSEC_PER_MSEC;

    for (uint64_t pause = NSEC_PER_MSEC; !take_node(n, ret);
         pause = MIN(pause * 2, 50 * NSEC_PER_MSEC)) {
        if (reactor_now() >= until)
            return false;
        timer_sleep(pause);
    }
    return true;
}

static SUSPENDS int make_node(struct lvm *lvm, const char *name, struct err *err)
{
    struct lvm_cmd cmd;

    lvm_cmd_init(&cmd, lvm, "vgmknodes");
    lvm_cmd_addf(&cmd, "%s/%s", lvm->vg, name);
    int rc = lvm_cmd_run(&cmd, lvm, NULL, NULL, err);
    lvm_cmd_fini(&cmd);
    return rc;
}

int lvm_device(struct lvm *lvm, const char *name, unsigned wait_ms, char **ret, struct err *err)
{
    _cleanup_(nodes_fini) struct nodes n;
    int rc = nodes_init(&n, lvm->vg, name);

    if (rc < 0)
        return err_errno(err, rc, "find the device of '%s/%s'", lvm->vg, name);
    if (!lvm_lv_name_ok(lvm->vg, name))
        return err_set(err, -EINVAL, "'%s' cannot be a logical volume's name in VG '%s'", name,
                       lvm->vg);
    if (wait_for_node(&n, lvm_udev_runs() ? wait_ms : 0, ret))
        return 0;
    rc = make_node(lvm, name, err);
    if (rc < 0)
        return err_prefix(err, rc, "make the device node of '%s/%s'", lvm->vg, name);
    if (take_node(&n, ret))
        return 0;
    return err_set(err, -ENOENT,
                   "'%s/%s' has no device node: not active on this host (volume_list in lvm.conf?)",
                   lvm->vg, name);
}

/* ---- lengths ---- */

int lvm_image_len_of(const struct image_create_opts *opts, uint64_t *ret, struct err *err)
{
    struct image_create_opts alone = *opts;
    uint64_t required;

    alone.backing_name = alone.backing_format = NULL;
    return image_measure(&alone, 0, &required, ret, err);
}

int lvm_image_len(uint64_t virtual_len, bool overlay, uint64_t *ret, struct err *err)
{
    const struct image_create_opts opts = {
        .virtual_len = virtual_len,
        .cluster_size = overlay ? 128 * KIB : 64 * KIB,
        .extended_l2 = overlay,
    };

    return lvm_image_len_of(&opts, ret, err);
}

int lvm_round_up(uint64_t len, uint64_t extent_len, uint64_t *ret, struct err *err)
{
    uint64_t rounded;

    if (extent_len == 0)
        return err_set(err, -EINVAL, "extents of no length");
    if (__builtin_mul_overflow(div_up(len, extent_len), extent_len, &rounded))
        return err_set(err, -EOVERFLOW, "%llu bytes are too many to be rounded up to extents",
                       (unsigned long long)len);
    *ret = rounded;
    return 0;
}
