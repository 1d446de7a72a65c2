/* The guard in the header: see guard.h. */
#include <string.h>
#include <sys/random.h>
#include "base/own.h"
#include "qcow2/format.h"
#include "qcow2/guard.h"

static struct qcow2_disk_guard_ext encode(struct guard_epoch epoch)
{
    return (struct qcow2_disk_guard_ext){be64_make(epoch.hi), be64_make(epoch.lo)};
}

int guard_epoch_make(struct guard_epoch *ret)
{
    struct guard_epoch epoch;
    ssize_t n = getrandom(&epoch, sizeof(epoch), 0);

    if (n != (ssize_t)sizeof(epoch))
        return n < 0 ? -errno : -EIO;
    *ret = epoch;
    return 0;
}

bool guard_get(const struct qcow2_header *hdr, struct guard_epoch *ret)
{
    const struct qcow2_ext *ext = qcow2_header_ext(hdr, QCOW2_EXT_GUARD);
    struct qcow2_disk_guard_ext disk;

    if (hdr->version < 3 || !(hdr->autoclear & QCOW2_AUTOCLEAR_JOURNAL) || !ext ||
        ext->len != sizeof(disk))
        return false;
    memcpy(&disk, ext->data, sizeof(disk));
    *ret = (struct guard_epoch){be64_get(disk.hi), be64_get(disk.lo)};
    return true;
}

/* The header in memory as it was before. */
static void restore(struct qcow2_header *hdr, uint64_t autoclear, const struct qcow2_ext *old)
{
    hdr->autoclear = autoclear;
    if (old->data)
        (void)qcow2_header_set_ext(hdr, QCOW2_EXT_GUARD, old->data, old->len); /* same length */
    else
        qcow2_header_drop_ext(hdr, QCOW2_EXT_GUARD);
}

SUSPENDS static int write_guard(struct blk *blk, struct qcow2_header *hdr, struct guard_epoch epoch,
                                struct err *err)
{
    struct qcow2_disk_guard_ext disk = encode(epoch);
    int rc = qcow2_header_set_ext(hdr, QCOW2_EXT_GUARD, &disk, sizeof(disk));

    if (rc < 0)
        return err_errno(err, rc, "header");
    hdr->autoclear = QCOW2_AUTOCLEAR_JOURNAL;
    if (!qcow2_header_fits_sector(hdr))
        return err_set(err, -ENOSPC, "the header has no room for a journal's epoch");
    return qcow2_header_write(blk, hdr, err);
}

int guard_set(struct blk *blk, struct qcow2_header *hdr, struct guard_epoch epoch, struct err *err)
{
    const struct qcow2_ext *ext = qcow2_header_ext(hdr, QCOW2_EXT_GUARD);
    uint8_t kept[sizeof(struct qcow2_disk_guard_ext)];
    struct qcow2_ext old = {0};
    uint64_t autoclear = hdr->autoclear;

    if (hdr->version < 3)
        return err_set(err, -ENOTSUP, "version 2 images have no journal");
    if (ext && ext->len != sizeof(kept))
        return err_set(err, -ENOTSUP, "the header has a journal's epoch of another version");
    if (ext)
        old = (struct qcow2_ext){ext->magic, ext->len, memcpy(kept, ext->data, sizeof(kept))};
    int rc = write_guard(blk, hdr, epoch, err);
    if (rc < 0)
        restore(hdr, autoclear, &old);
    return rc;
}

int guard_clear(struct blk *blk, struct qcow2_header *hdr)
{
    be64 none = be64_make(0);

    if (hdr->version < 3 || !hdr->autoclear)
        return 0;
    int rc = blk_write(blk, offsetof(struct qcow2_disk_header, autoclear), &none, sizeof(none));
    if (rc == 0)
        hdr->autoclear = 0;
    return rc;
}
