#include "util.h"
#include "base/be.h"
#include "base/own.h"
#include "qcow2/refscan.h"

const char *t_path(const char *name)
{
    static char paths[4][256];
    static unsigned next;
    char *path = paths[next++ % 4];

    snprintf(path, sizeof(paths[0]), "%s/%s", test_dir(), name);
    return path;
}

SUSPENDS static struct blk *open_with(const char *name, bool create)
{
    struct blk_file_opts opts = {
        .writable = true, .create = create, .truncate = create, .lock = BLK_LOCK_NONE};
    struct err err = {0};
    struct blk *blk = NULL;

    if (blk_file_open(t_path(name), &opts, &blk, &err) < 0)
        test_fail(__FILE__, __LINE__, "open %s: %s", name, err_text(&err));
    return blk;
}

struct blk *t_open(const char *name)
{
    return open_with(name, false);
}

struct blk *t_create(const char *name)
{
    return open_with(name, true);
}

void t_image(const char *name, const struct image_create_opts *opts)
{
    struct blk *blk = t_create(name);
    struct err err = {0};

    if (image_create(blk, opts, &err) < 0)
        test_fail(__FILE__, __LINE__, "create %s: %s", name, err_text(&err));
    blk_close(blk);
}

void t_qemu_check(const char *name, int rc1, int rc2)
{
    int rc = test_sh_rc("qemu-img check -f qcow2 %s > %s 2>&1", t_path(name), t_path("check.out"));

    if (rc == rc1 || rc == rc2)
        return;
    test_sh("head -20 %s", t_path("check.out"));
    test_fail(__FILE__, __LINE__, "qemu-img check %s gave %d", name, rc);
}

uint64_t t_get64(struct blk *blk, uint64_t off)
{
    be64 word;

    CHECK_EQ(blk_read(blk, off, &word, sizeof(word)), 0);
    return be64_get(word);
}

void t_put(struct blk *blk, uint64_t off, unsigned bytes, uint64_t value)
{
    be64 word = be64_make(value << (64 - 8 * bytes));

    CHECK_EQ(blk_write(blk, off, &word, bytes), 0);
}

uint64_t t_l2_pos(struct blk *blk, const struct qcow2_header *hdr, uint64_t guest_off)
{
    uint64_t cluster = guest_off >> hdr->cluster_bits;
    uint64_t l2 = t_get64(blk, hdr->l1_off + 8 * (cluster >> hdr->l2_bits)) & L1_OFFSET_MASK;

    CHECK(l2 != 0);
    return l2 + hdr->l2_entry_size * (cluster & ((1ull << hdr->l2_bits) - 1));
}

int t_check(const char *name, struct image_check *ret)
{
    struct blk *blk = t_open(name);
    struct qcow2_header hdr;
    struct err err = {0};

    if (qcow2_header_read(blk, &hdr, &err) < 0)
        test_fail(__FILE__, __LINE__, "%s: %s", name, err_text(&err));
    int rc = qcow2_check(blk, &hdr, ret, NULL, NULL, &err);

    qcow2_header_fini(&hdr);
    blk_close(blk);
    return rc;
}
