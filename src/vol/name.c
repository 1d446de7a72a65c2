/*
 * Names: volume ids, files of a directory pool, snapshots. Text only, no I/O.
 *
 *   POOL:[<vmid>/]<name>[.raw|.qcow2][@SNAP]
 *   POOL:<basevmid>/<base>[.fmt]/<vmid>/<name>[.fmt][@SNAP]     a linked clone
 *
 * A name holds letters, digits and _.+- only: what a shell, LVM, QMP and a URI all take as it is.
 */
#include <ctype.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include "base/bits.h"
#include "vol/store_lvm.h"

static bool all_of(const char *s, size_t len, const char *more)
{
    for (size_t i = 0; i < len; i++) {
        unsigned char c = (unsigned char)s[i];

        if (c >= 0x80 || !(isalnum(c) || (c && strchr(more, c))))
            return false;
    }
    return true;
}

static bool is_alpha(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

bool pool_id_ok(const char *id)
{
    size_t len = strlen(id);

    return len >= 1 && len < 64 && is_alpha(id[0]) && all_of(id, len, "-_.") &&
           isalnum((unsigned char)id[len - 1]);
}

bool vmid_ok(const char *vmid)
{
    size_t len = strlen(vmid);

    return len >= 3 && len <= 9 && vmid[0] != '0' && strspn(vmid, "0123456789") == len;
}

bool stem_ok(const char *stem)
{
    size_t len = strlen(stem);

    return len >= 1 && len <= STEM_MAX && stem[0] != '-' && stem[0] != '.' && stem[0] != '+' &&
           all_of(stem, len, "_.+-");
}

bool snap_name_ok(const char *snap)
{
    size_t len = strlen(snap);

    return len >= 1 && len <= SNAP_NAME_MAX && is_alpha(snap[0]) && all_of(snap, len, "_-") &&
           strcasecmp(snap, "current") != 0 && strcasecmp(snap, "pending") != 0;
}

int vol_snap_name_check(const char *snap, struct err *err)
{
    if (!*snap)
        return err_set(err, -EINVAL, "a snapshot needs a name");
    if (strcasecmp(snap, "current") == 0 || strcasecmp(snap, "pending") == 0)
        return err_set(err, -EINVAL, "the snapshot name '%s' is reserved", snap);
    if (!snap_name_ok(snap))
        return err_set(
            err, -EINVAL,
            "'%.48s' is not a valid snapshot name: a letter, then letters, digits, - and _, "
            "at most %u in all",
            snap, SNAP_NAME_MAX);
    return 0;
}

/* Length of "<word>-<digits>-" at the start of the stem, 0 if it does not start so. vmid NULL or
 * "": any. */
static size_t numbered_prefix(const char *stem, const char *word, const char *vmid)
{
    size_t n = strlen(word);

    if (strncmp(stem, word, n) != 0)
        return 0;
    size_t digits = strspn(stem + n, "0123456789");
    if (!digits || stem[n + digits] != '-')
        return 0;
    if (vmid && *vmid && (strlen(vmid) != digits || strncmp(stem + n, vmid, digits) != 0))
        return 0;
    return n + digits + 1;
}

bool stem_is_base(const char *stem)
{
    return strncmp(stem, "base-", 5) == 0;
}

bool stem_is_proxmox(const char *stem, const char *vmid)
{
    size_t n = numbered_prefix(stem, "vm-", vmid);

    if (!n)
        n = numbered_prefix(stem, "base-", vmid);
    return n && stem[n];
}

/* Whatever kind of storage it is. */
static bool is_snapshot_name(const char *stem)
{
    return strncmp(stem, "snap-", 5) == 0 || strncmp(stem, "snap_", 5) == 0;
}

int stem_check_new(const char *dir, const char *vmid, const char *stem, struct err *err)
{
    if (stem_is_base(stem) || strncmp(stem, "del-", 4) == 0)
        return err_set(err, -EINVAL,
                       "a new volume cannot be called '%s': base-* and del-* are reserved", stem);
    if (name_form(dir) == FORM_LV)
        return lvm_store_check_name(dir, stem, err);
    size_t n = numbered_prefix(stem, "vm-", *vmid ? vmid : NULL);
    if (*vmid && (!n || !stem[n]))
        return err_set(err, -EINVAL, "a volume of guest %s must be called vm-%s-..., not '%s'",
                       vmid, vmid, stem);
    if (!*vmid && n)
        return err_set(err, -EINVAL,
                       "'%s' is the name of a guest's volume: give the guest too, as %.*s/%s", stem,
                       (int)(n - 4), stem + 3, stem);
    return 0;
}

static const char *suffix_of(const char *file, const char *const *suffixes, unsigned nr)
{
    size_t len = strlen(file);

    for (unsigned i = 0; i < nr; i++) {
        size_t n = strlen(suffixes[i]);

        if (len > n + 1 && file[len - n - 1] == '.' && strcmp(file + len - n, suffixes[i]) == 0)
            return suffixes[i];
    }
    return NULL;
}

/* ---- names of images ---- */

enum name_form name_form(const char *dir)
{
    return lvm_store_of(dir) ? FORM_LV : FORM_FILE;
}

static const char *const formats[] = {"raw", "qcow2"};

bool file_split(enum name_form form, const char *file, char *stem, size_t stem_len,
                const char **ret_format)
{
    const char *format = suffix_of(file, formats, ARRAY_SIZE(formats));
    size_t n = strlen(file);

    if (form == FORM_LV && format == formats[0])
        return false; /* a raw LV has no suffix */
    if (form == FORM_FILE && !format)
        return false;
    if (format)
        n -= strlen(format) + 1;
    if (n >= stem_len)
        return false;
    memcpy(stem, file, n);
    stem[n] = '\0';
    *ret_format = format ? format : formats[0];
    return true;
}

char *file_join(const char *dir, const char *stem, const char *format)
{
    char *ret = NULL;

    if (name_form(dir) == FORM_LV && strcmp(format, "raw") == 0)
        return strdup(stem);
    return asprintf(&ret, "%s.%s", stem, format) < 0 ? NULL : ret;
}

char *snap_stem(enum name_form form, const char *snap, const char *stem)
{
    char *ret = NULL;
    int n = form == FORM_LV ? asprintf(&ret, "snap_%s_%s", stem, snap)
                            : asprintf(&ret, "snap-%s-%s", snap, stem);

    return n < 0 ? NULL : ret;
}

char *snap_file(const char *dir, const char *snap, const char *stem, const char *format)
{
    _cleanup_(freep) char *whole = snap_stem(name_form(dir), snap, stem);

    return whole ? file_join(dir, whole, format) : NULL;
}

bool stem_is_snap(enum name_form form, const char *stem)
{
    return strncmp(stem, form == FORM_LV ? "snap_" : "snap-", 5) == 0;
}

/* "snap_<stem>_<S>": from the front on */
static const char *lv_reading(const char *stem, size_t *pos, char buf[256],
                              char snap[SNAP_NAME_MAX + 1])
{
    size_t len = strlen(stem);

    for (*pos = MAX(*pos, (size_t)5); ++*pos < len;) {
        size_t n = *pos - 5;

        if (stem[*pos] != '_' || n >= 256 || len - *pos - 1 > SNAP_NAME_MAX)
            continue;
        memcpy(buf, stem + 5, n);
        buf[n] = '\0';
        memcpy(snap, stem + *pos + 1, len - *pos);
        if (snap_name_ok(snap) && stem_ok(buf))
            return buf;
    }
    return NULL;
}

/* "snap-<S>-<stem>": from the end on */
static const char *file_reading(const char *stem, size_t *pos, char snap[SNAP_NAME_MAX + 1])
{
    if (*pos == 0)
        *pos = strlen(stem);
    while (*pos > 5) {
        size_t i = --*pos;

        if (stem[i] != '-' || i - 5 > SNAP_NAME_MAX || i == 5)
            continue;
        memcpy(snap, stem + 5, i - 5);
        snap[i - 5] = '\0';
        if (snap_name_ok(snap) && stem_ok(stem + i + 1))
            return stem + i + 1;
    }
    return NULL;
}

const char *snap_reading(enum name_form form, const char *stem, size_t *pos, char buf[256],
                         char snap[SNAP_NAME_MAX + 1])
{
    return form == FORM_LV ? lv_reading(stem, pos, buf, snap) : file_reading(stem, pos, snap);
}

/* ---- ids ---- */

/* The name with its optional suffix, into name and format. */
static int parse_file(const char *text, struct vol_name *ret, struct err *err)
{
    static const char *const foreign[] = {"vmdk", "subvol", "vdi", "vhdx", "qed"};
    const char *format = NULL;

    if (suffix_of(text, foreign, ARRAY_SIZE(foreign)))
        return err_set(err, -EINVAL, "'%.64s': only .raw and .qcow2 volumes are supported", text);
    if (file_split(FORM_FILE, text, ret->name, sizeof(ret->name), &format))
        snprintf(ret->format, sizeof(ret->format), "%s", format);
    else
        snprintf(ret->name, sizeof(ret->name), "%s", text);
    if (!stem_ok(ret->name))
        return err_set(
            err, -EINVAL,
            "'%.64s' is not a valid volume name: letters, digits and _.+- only, not starting with "
            "a sign, at most %u",
            text, STEM_MAX);
    if (is_snapshot_name(ret->name))
        return err_set(err, -EINVAL,
                       "'%.64s' names a snapshot's file, not a volume: write VOLUME@SNAPSHOT",
                       text);
    return 0;
}

static int parse_vmid(const char *vmid, struct vol_name *ret, struct err *err)
{
    if (!vmid_ok(vmid))
        return err_set(err, -EINVAL, "'%.32s' is not a guest's number (3 to 9 digits)", vmid);
    snprintf(ret->vmid, sizeof(ret->vmid), "%s", vmid);
    return 0;
}

/* "<basevmid>/<base>" */
static int parse_base(const char *vmid, const char *base, struct vol_name *ret, struct err *err)
{
    char stem[256];
    const char *format;

    if (!file_split(FORM_FILE, base, stem, sizeof(stem), &format))
        snprintf(stem, sizeof(stem), "%s", base);
    if (!vmid_ok(vmid) || !stem_ok(stem) || !stem_is_base(stem))
        return err_set(err, -EINVAL, "'%.32s/%.64s' is not the name of a base image", vmid, base);
    snprintf(ret->base, sizeof(ret->base), "%.15s/%.230s", vmid, base);
    return 0;
}

static int parse_path(char *text, struct vol_name *ret, struct err *err)
{
    char *part[4] = {text};
    unsigned nr = 1;

    for (char *c = text; *c; c++)
        if (*c == '/') {
            if (nr == 4)
                return err_set(err, -EINVAL, "the volume's name has too many parts");
            *c = '\0';
            part[nr++] = c + 1;
        }
    if (nr == 3)
        return err_set(err, -EINVAL,
                       "a volume is called [<vmid>/]<name> or <basevmid>/<base>/<vmid>/<name>");
    int rc = nr == 4 ? parse_base(part[0], part[1], ret, err) : 0;
    if (rc == 0 && nr > 1)
        rc = parse_vmid(part[nr - 2], ret, err);
    return rc < 0 ? rc : parse_file(part[nr - 1], ret, err);
}

int vol_parse(const char *text, struct vol_name *ret, struct err *err)
{
    struct vol_name name = {0};
    _cleanup_(freep) char *copy = strdup(text);

    if (!copy)
        return err_set(err, -ENOMEM, "out of memory");
    if (strlen(text) > 1000)
        return err_set(err, -EINVAL, "the volume's name is too long");
    char *colon = strchr(copy, ':');
    if (!colon)
        return err_set(err, -EINVAL, "'%.64s' is not a volume: write POOL:VOLUME", text);
    *colon = '\0';
    if (!pool_id_ok(copy))
        return err_set(err, -EINVAL, "'%.64s' is not a valid storage id", copy);
    snprintf(name.pool, sizeof(name.pool), "%s", copy);
    char *at = strrchr(colon + 1, '@');
    if (at) {
        *at = '\0';
        int rc = vol_snap_name_check(at + 1, err);

        if (rc < 0)
            return rc;
        snprintf(name.snap, sizeof(name.snap), "%s", at + 1);
    }
    int rc = parse_path(colon + 1, &name, err);
    if (rc == 0)
        *ret = name;
    return rc;
}

/* "100/base-100-disk-0.raw" -> "/base-100-disk-0" */
static int take_guest_of_base(struct vol_name *name, struct err *err)
{
    char *slash = strchr(name->base, '/'), vmid[16];
    size_t n = strlen(name->base);

    if (!slash)
        return 0;
    snprintf(vmid, sizeof(vmid), "%.*s", (int)(slash - name->base), name->base);
    if (!stem_is_proxmox(slash + 1, vmid))
        return err_set(err, -EINVAL,
                       "a base image of guest %s must be called base-%s-..., not '%s'", vmid, vmid,
                       slash + 1);
    if (suffix_of(slash, formats, 1))
        name->base[n - 4] = '\0';
    memmove(name->base, slash, strlen(slash) + 1);
    return 0;
}

static int take_guest(struct vol_name *name, struct err *err)
{
    if (*name->vmid && !stem_is_proxmox(name->name, name->vmid))
        return err_set(err, -EINVAL, "a volume of guest %s must be called vm-%s-..., not '%s'",
                       name->vmid, name->vmid, name->name);
    name->vmid[0] = '\0';
    return take_guest_of_base(name, err);
}

int vol_parse_in(const struct config *cfg, const char *text, struct vol_name *ret, struct err *err)
{
    int rc = vol_parse(text, ret, err);

    for (unsigned i = 0; rc == 0 && i < cfg->nb_pools; i++)
        if (strcmp(cfg->pools[i].id, ret->pool) == 0 && cfg->pools[i].type == POOL_LVM)
            rc = take_guest(ret, err);
    return rc;
}
