/* See lvm_seqno.h. Whatever is odd means that the PV does not tell. */
#include "vol/lvm_seqno.h"
#include <endian.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "base/bits.h"
#include "rt/offload.h"

#define SECTOR      512u
#define PIECE       4096u
#define NB_LABELS   4u  /* sectors in which the label may stand */
#define LOCN_LEN    16u /* offset, size */
#define RAW_IGNORED 1u  /* of a raw_locn's flags: the area is not in use */
#define MAX_LOCNS   16u

static const char mda_magic[16] = " LVM2 x[5A%r0N*>";

static uint32_t le32_get(const uint8_t *p)
{
    uint32_t v;

    memcpy(&v, p, sizeof(v));
    return le32toh(v);
}

static uint64_t le64_get(const uint8_t *p)
{
    uint64_t v;

    memcpy(&v, p, sizeof(v));
    return le64toh(v);
}

struct reader {
    const struct lvm_vg *vg;
    int fd;
    uint8_t *piece; /* PIECE bytes, aligned */
    uint64_t seqno;
};

/* The aligned piece around `off`; *ret points into it, with *ret_len bytes to its end. */
static bool read_at(struct reader *r, uint64_t off, const uint8_t **ret, size_t *ret_len)
{
    uint64_t from = align_down(off, PIECE);

    if (pread(r->fd, r->piece, PIECE, (off_t)from) != PIECE)
        return false;
    *ret = r->piece + (off - from);
    *ret_len = PIECE - (size_t)(off - from);
    return true;
}

/* Skips the list of data areas; the first metadata area follows it. */
static bool find_mda(struct reader *r, uint64_t *ret_off)
{
    const uint8_t *p;
    size_t len;

    if (!read_at(r, 0, &p, &len))
        return false;
    for (unsigned i = 0; i < NB_LABELS; i++) {
        const uint8_t *label = p + i * SECTOR;
        uint32_t header = le32_get(label + 20);

        if (memcmp(label, "LABELONE", 8) != 0 || memcmp(label + 24, "LVM2 001", 8) != 0 ||
            header < 32 || header > SECTOR - 40 - 2 * LOCN_LEN)
            continue;
        const uint8_t *locn = label + header + 40; /* behind UUID and size of the device */
        for (unsigned n = 0; n < MAX_LOCNS && locn + 2 * LOCN_LEN <= label + SECTOR; n++) {
            bool end = le64_get(locn) == 0;

            locn += LOCN_LEN;
            if (end) {
                *ret_off = le64_get(locn);
                return *ret_off > 0;
            }
        }
    }
    return false;
}

/* Where the text of the present metadata begins. */
static bool find_text(struct reader *r, uint64_t mda, uint64_t *ret_off)
{
    const uint8_t *p;
    size_t len;

    if (!read_at(r, mda, &p, &len) || len < SECTOR || memcmp(p + 4, mda_magic, 16) != 0)
        return false;
    uint64_t start = le64_get(p + 24), off = le64_get(p + 40);
    if (start != mda || off == 0 || off >= le64_get(p + 32) || le32_get(p + 60) & RAW_IGNORED)
        return false;
    *ret_off = start + off;
    return true;
}

/* "vg {\nid = \"...\"\nseqno = 7\n": within the first lines. */
static bool read_text(struct reader *r, uint64_t off)
{
    static const char key[] = "\nseqno = ";
    const uint8_t *p;
    char text[SECTOR + 1];
    size_t len, name = strlen(r->vg->name);

    if (!read_at(r, off, &p, &len))
        return false;
    size_t n = MIN(len, (size_t)SECTOR);
    memcpy(text, p, n);
    text[n] = '\0';
    if (strncmp(text, r->vg->name, name) != 0 || strncmp(text + name, " {", 2) != 0)
        return false;
    const char *found = strstr(text, key);
    char *end = NULL;
    if (!found)
        return false;
    r->seqno = strtoull(found + strlen(key), &end, 10);
    return *end == '\n';
}

static bool read_pv(struct reader *r, const char *path)
{
    uint64_t mda, text;

    r->fd = open(path, O_RDONLY | O_DIRECT | O_CLOEXEC);
    if (r->fd < 0)
        return false;
    bool ok = find_mda(r, &mda) && find_text(r, mda, &text) && read_text(r, text);
    close(r->fd);
    return ok;
}

static int read_any(void *arg)
{
    struct reader *r = arg;

    vec_for_each(pv, &r->vg->pvs)
        if (!pv->missing && read_pv(r, pv->name))
            return 0;
    return -ENODATA;
}

int lvm_seqno_read(const struct lvm_vg *vg, uint64_t *ret)
{
    _cleanup_(freep) uint8_t *piece = aligned_alloc(PIECE, PIECE);
    struct reader r = {.vg = vg, .piece = piece};
    int rc = piece ? offload(read_any, &r) : -ENOMEM;

    if (rc == 0)
        *ret = r.seqno;
    return rc;
}
