/*
 * The few fields of a qcow2 header that a listing needs, from its first bytes: no locks, no
 * coroutine, no engine. Opening an image for I/O goes through qcow2/header.c, which checks
 * everything; here only what is used is checked. Spec: "Header", "Header extensions", "Backing file
 * format name".
 */
#include <stdio.h>
#include <string.h>
#include "base/bits.h"
#include "qcow2/format.h"
#include "qcow2/header.h"
#include "vol/internal.h"

#define NAME_CUT "the name of the backing file is cut off"

struct raw_head {
    const uint8_t *data;
    size_t len;
    unsigned version;
    uint64_t cluster_size;
};

static int read_backing_name(const struct raw_head *raw, struct head *ret, size_t *ret_need,
                             struct err *err)
{
    const struct qcow2_disk_header *disk = (const void *)raw->data;
    uint64_t off = be64_get(disk->backing_off);
    uint32_t len = be32_get(disk->backing_len);

    if (off == 0)
        return 0;
    if (len == 0 || len > QCOW2_BACKING_NAME_MAX || !range_ok(off, len, raw->cluster_size))
        return err_set(err, -EUCLEAN, "the name of the backing file is out of place");
    if (!range_ok(off, len, raw->len)) {
        *ret_need = off + len;
        return err_set(err, -ENOBUFS, NAME_CUT);
    }
    char *name = ret->backing = calloc(1, len + 1);
    if (!name)
        return err_set(err, -ENOMEM, "out of memory");
    memcpy(name, raw->data + off, len);
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

static int check_raw(struct raw_head *raw, struct err *err)
{
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
    return 0;
}

int head_parse(const void *data, size_t len, struct head *ret, size_t *ret_need, struct err *err)
{
    struct raw_head raw = {.data = data, .len = len};
    struct head head = {0};
    int rc = check_raw(&raw, err);

    if (rc < 0)
        return rc;
    head.virtual_len = be64_get(((const struct qcow2_disk_header *)data)->size);
    head.special = find_special(&raw);
    rc = check_tables(&raw, &head, err);
    if (rc == 0)
        rc = read_backing_name(&raw, &head, ret_need, err);
    if (rc == 0 && read_backing_format(&raw, &head) < 0)
        rc = err_set(err, -ENOMEM, "out of memory");
    if (rc < 0) {
        head_fini(&head);
        return rc;
    }
    *ret = head;
    return 0;
}

int head_read(int fd, struct head *ret, struct err *err)
{
    size_t want = HEAD_LEN, need = 0;

    for (;;) {
        _cleanup_(freep) void *data = malloc(want);
        if (!data)
            return err_set(err, -ENOMEM, "out of memory");
        ssize_t n = pread(fd, data, want, 0);
        if (n < 0)
            return err_errno(err, -errno, "read header");
        int rc = head_parse(data, (size_t)n, ret, &need, err);
        if (rc != -ENOBUFS)
            return rc;
        if ((size_t)n < want || need <= want)
            return err_set(err, -EUCLEAN, NAME_CUT);
        want = need;
    }
}

void head_fini(struct head *head)
{
    free(head->backing);
    free(head->backing_format);
    *head = (struct head){0};
}
