/*
 * The few fields of a qcow2 header that a listing needs, read with one pread from a plain
 * descriptor: no locks, no coroutine, no engine. Opening an image for I/O goes through
 * qcow2/header.c, which checks everything; here only what is used is checked. Spec: "Header",
 * "Header extensions", "Backing file format name".
 */
#include <stdio.h>
#include <string.h>
#include "base/bits.h"
#include "qcow2/format.h"
#include "qcow2/header.h"
#include "vol/internal.h"

#define HEAD_BYTES 4096u /* holds header, extensions and backing name of nearly every image */

struct raw_head {
    uint8_t data[HEAD_BYTES];
    size_t len;
    unsigned version;
    uint64_t cluster_size;
};

static int read_backing_name(int fd, const struct raw_head *raw, struct head *ret, struct err *err)
{
    const struct qcow2_disk_header *disk = (const void *)raw->data;
    uint64_t off = be64_get(disk->backing_off);
    uint32_t len = be32_get(disk->backing_len);

    if (off == 0)
        return 0;
    if (len == 0 || len > QCOW2_BACKING_NAME_MAX || !range_ok(off, len, raw->cluster_size))
        return err_set(err, -EUCLEAN, "the name of the backing file is out of place");
    char *name = calloc(1, len + 1);
    if (!name)
        return err_set(err, -ENOMEM, "out of memory");
    ret->backing = name;
    if (range_ok(off, len, raw->len))
        memcpy(name, raw->data + off, len);
    else if (pread(fd, name, len, (off_t)off) != (ssize_t)len)
        return err_set(err, -EUCLEAN, "the name of the backing file is cut off");
    if (strlen(name) != len)
        return err_set(err, -EUCLEAN, "the name of the backing file holds a NUL byte");
    return 0;
}

static int read_backing_format(const struct raw_head *raw, struct head *ret)
{
    const struct qcow2_disk_header *disk = (const void *)raw->data;
    size_t pos = raw->version == 2 ? QCOW2_V2_HEADER_LEN : be32_get(disk->header_len);

    while (range_ok(pos, sizeof(struct qcow2_disk_ext), raw->len)) {
        struct qcow2_disk_ext ext; /* a wrong header length puts it anywhere */
        memcpy(&ext, raw->data + pos, sizeof(ext));
        uint32_t magic = be32_get(ext.magic), len = be32_get(ext.len);

        pos += sizeof(ext);
        if (magic == QCOW2_EXT_END || !range_ok(pos, len, raw->len))
            return 0;
        if (magic == QCOW2_EXT_BACKING_FORMAT) {
            ret->backing_format = strndup((const char *)raw->data + pos, MIN(len, 15u));
            return ret->backing_format ? 0 : -ENOMEM;
        }
        pos += align_up(len, 8);
    }
    return 0;
}

static int check_tables(const struct raw_head *raw, struct head *ret, struct err *err)
{
    const struct qcow2_disk_header *disk = (const void *)raw->data;
    uint64_t l1 = be64_get(disk->l1_off), l1_len = (uint64_t)be32_get(disk->l1_size) * 8;
    uint64_t reft = be64_get(disk->reftable_off);
    uint64_t reft_len = (uint64_t)be32_get(disk->reftable_clusters) * raw->cluster_size;

    if (l1 > QCOW2_HOST_OFF_MAX || reft > QCOW2_HOST_OFF_MAX)
        return err_set(err, -EUCLEAN, "its tables lie outside of any file");
    ret->tables_end = MAX(l1 + l1_len, reft + MIN(reft_len, 8ull));
    ret->first_guest = l1 ? l1 : raw->cluster_size;
    return 0;
}

/* An overlay would hold in the clear what is encrypted below; a data file's place is told nowhere
 * else. */
static const char *find_special(const struct raw_head *raw)
{
    const struct qcow2_disk_header *disk = (const void *)raw->data;

    if (be32_get(disk->crypt_method))
        return "is encrypted";
    if (raw->version >= 3 && be64_get(disk->incompatible) & QCOW2_INCOMPAT_DATA_FILE)
        return "keeps its data in an external file";
    return NULL;
}

int head_read(int fd, struct head *ret, struct err *err)
{
    _cleanup_(freep) struct raw_head *raw = malloc(sizeof(*raw));
    struct head head = {0};

    if (!raw)
        return err_set(err, -ENOMEM, "out of memory");
    ssize_t n = pread(fd, raw->data, sizeof(raw->data), 0);
    if (n < 0)
        return err_errno(err, -errno, "read header");
    raw->len = (size_t)n;
    const struct qcow2_disk_header *disk = (const void *)raw->data;
    if (raw->len < QCOW2_V2_HEADER_LEN || be32_get(disk->magic) != QCOW2_MAGIC)
        return err_set(err, -EINVAL, "not a qcow2 image");
    raw->version = be32_get(disk->version);
    unsigned bits = be32_get(disk->cluster_bits);
    if (raw->version < 2 || raw->version > 3)
        return err_set(err, -ENOTSUP, "qcow2 version %u is not known", raw->version);
    if (bits < QCOW2_CLUSTER_BITS_MIN || bits > QCOW2_CLUSTER_BITS_MAX)
        return err_set(err, -EUCLEAN, "cluster_bits %u is out of range", bits);
    if (raw->version == 3 && raw->len < QCOW2_V3_HEADER_LEN)
        return err_set(err, -EUCLEAN, "the header is cut off");
    raw->cluster_size = 1ull << bits;
    head.virtual_len = be64_get(disk->size);
    head.special = find_special(raw);
    int rc = check_tables(raw, &head, err);
    if (rc == 0)
        rc = read_backing_name(fd, raw, &head, err);
    if (rc == 0 && read_backing_format(raw, &head) < 0)
        rc = err_set(err, -ENOMEM, "out of memory");
    if (rc < 0) {
        head_fini(&head);
        return rc;
    }
    *ret = head;
    return 0;
}

void head_fini(struct head *head)
{
    free(head->backing);
    free(head->backing_format);
    *head = (struct head){0};
}
