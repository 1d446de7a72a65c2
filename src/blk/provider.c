/*
 * Devices that a volume manager looks after: they are made ready before they are opened, and can be
 * made longer.
 *
 * A device has a name, a number, and a handle. Names change with every snapshot, numbers are used
 * again when volumes come and go; the handle is what stays. So it also is the device's identity:
 * what a journal beside it says is found again by the same volume only.
 *
 * Two lengths: what the device has, and blk->len, which is what its user sees. They are the same
 * but for a disk that was resized: an extension may give more than was asked for, in units of its
 * own, and a disk has the length that was asked for. When it is opened again it has all of it.
 */
#include <linux/fs.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/sysmacros.h>
#include "base/bits.h"
#include "blk/internal.h"

#define FNV_PRIME  0x100000001b3ull
#define FNV_BASIS  0xcbf29ce484222325ull
#define FNV_BASIS2 0x6c62272e07bb0142ull

#define LVM_UUID_LEN 32u

static const struct blk_provider *provider;

static uint64_t hash(uint64_t h, const char *text)
{
    for (; *text; text++)
        h = (h ^ (uint8_t)*text) * FNV_PRIME;
    return h;
}

void blk_set_provider(const struct blk_provider *p)
{
    provider = p;
}

bool blk_path_is_provided(const char *path, uint64_t *ret_id)
{
    if (!provider || !provider->owns(path))
        return false;
    *ret_id = hash(FNV_BASIS, path);
    return true;
}

bool blk_is_extendable(const struct blk *blk)
{
    return blk->extendable;
}

int blk_extend(struct blk *blk, uint64_t len, struct err *err)
{
    uint64_t now = 0;

    if (!blk->extendable)
        return err_set(err, -ENOTSUP, "'%s' cannot be made longer", blk->name);
    int rc = blk->ops->extend(blk, len, &now, err);
    if (rc == 0 && now < len)
        rc = err_set(err, -EIO, "'%s' has %llu bytes and not %llu after it was made longer",
                     blk->name, (unsigned long long)now, (unsigned long long)len);
    if (rc == 0) {
        blk->len = now;
        blk->ready_len = 0;
    }
    return rc;
}

/* ---- files ---- */

bool provider_owns(const char *path)
{
    return provider && provider->owns(path);
}

int provider_provide(const char *path, char **ret_node, char **ret_handle, struct err *err)
{
    return provider->provide(path, ret_node, ret_handle, err);
}

int provider_extend(struct blk *blk, uint64_t len, uint64_t *ret_len, struct err *err)
{
    struct file_blk *f = file_of(blk);
    int rc = len && provider ? provider->extend(f->handle, len, err) : 0;

    if (rc < 0)
        return rc;
    if (ioctl(f->fd, BLKGETSIZE64, ret_len) < 0)
        return err_errno(err, -errno, "length of '%s'", blk->name);
    return 0;
}

/* ---- identity ---- */

/* Of what stands behind the last slash, less the dashes that only its printed form has. */
static uint64_t hash_id(uint64_t h, const char *handle)
{
    const char *slash = strrchr(handle, '/');

    for (const char *p = slash ? slash + 1 : handle; *p; p++)
        if (*p != '-')
            h = (h ^ (uint8_t)*p) * FNV_PRIME;
    return h;
}

/* The top bit tells it from the number of any file system; one bit less than all of them, from that
 * of a device without handle. */
void blk_handle_identity(const char *handle, uint64_t *ret_dev, uint64_t *ret_ino)
{
    *ret_dev = (hash_id(FNV_BASIS2, handle) | 1ull << 63) & ~1ull;
    *ret_ino = hash_id(FNV_BASIS, handle);
}

/* LVM: "LVM-", the group's 32 letters, the volume's; what is part of a volume has more. */
bool provider_dm_identity(const char *dm_uuid, uint64_t *ret_dev, uint64_t *ret_ino)
{
    if (strncmp(dm_uuid, "LVM-", 4) != 0 || strlen(dm_uuid) != 4 + 2 * LVM_UUID_LEN)
        return false;
    blk_handle_identity(dm_uuid + 4 + LVM_UUID_LEN, ret_dev, ret_ino);
    return true;
}

bool provider_find_identity(dev_t rdev, uint64_t *ret_dev, uint64_t *ret_ino)
{
    char path[80], text[160] = "";

    snprintf(path, sizeof(path), "/sys/dev/block/%u:%u/dm/uuid", major(rdev), minor(rdev));
    FILE *f = fopen(path, "re");
    bool ok = f && fscanf(f, "%159s", text) == 1 && provider_dm_identity(text, ret_dev, ret_ino);
    if (f)
        fclose(f);
    return ok;
}
