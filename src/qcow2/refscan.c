/*
 * Counting of references.
 *
 * A cluster's byte: bit 7 metadata, bit 6 L2 table, bits 0-5 the count; 63 there means that the
 * count is in `more`. A cluster gets into `more` after 63 references only, so that table is
 * never larger than the tables that were read.
 *
 * 1. No offset from a table is used before it was held against the file's length.
 * 2. A wrong entry is reported once and not followed.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/bits.h"
#include "base/own.h"
#include "qcow2/format.h"
#include "qcow2/refscan.h"
#include "qcow2/snapshots.h"

#define MARK_METADATA 0x80u
#define MARK_L2       0x40u
#define COUNT_MASK    0x3fu
#define CLUSTERS_MAX  (1ull << 33)
#define PIECE_LEN     ((size_t)1 << 20) /* tables are read in pieces of this length */

/* ---- findings ---- */

static void say(struct refscan *s, const char *fmt, va_list ap)
{
    char line[256];

    if (!s->report)
        return;
    vsnprintf(line, sizeof(line), fmt, ap);
    s->report(s->ctx, line);
}

void refscan_say(struct refscan *s, const char *fmt, ...)
{
    va_list ap;

    va_start(ap, fmt);
    say(s, fmt, ap);
    va_end(ap);
}

void refscan_corrupt(struct refscan *s, const char *fmt, ...)
{
    va_list ap;

    s->res->corruptions++;
    va_start(ap, fmt);
    say(s, fmt, ap);
    va_end(ap);
}

void refscan_unreadable(struct refscan *s, const char *what, uint64_t off, int rc)
{
    s->res->check_errors++;
    refscan_say(s, "%s at 0x%llx cannot be read: %s", what, (unsigned long long)off, strerror(-rc));
}

/* ---- counters ---- */

int refscan_init(struct refscan *s, struct blk *blk, const struct qcow2_header *hdr,
                 struct image_check *res, struct err *err)
{
    *s = (struct refscan){.blk = blk, .hdr = hdr, .res = res};
    s->nr_clusters = div_up(blk->len, hdr->cluster_size);
    if (s->nr_clusters > CLUSTERS_MAX)
        return err_set(err, -EFBIG, "the file has too many clusters to check (%llu)",
                       (unsigned long long)s->nr_clusters);
    s->counts = calloc(s->nr_clusters ? s->nr_clusters : 1, 1);
    return s->counts ? 0 : err_set(err, -ENOMEM, "out of memory");
}

void refscan_fini(struct refscan *s)
{
    free(s->counts);
    free(s->stored_one);
    table_fini(&s->more);
    *s = (struct refscan){0};
}

int refscan_grow(struct refscan *s, uint64_t nr_clusters)
{
    uint8_t *grown = realloc(s->counts, nr_clusters);

    if (!grown)
        return -ENOMEM;
    memset(grown + s->nr_clusters, 0, nr_clusters - s->nr_clusters);
    s->counts = grown;
    s->nr_clusters = nr_clusters;
    return 0;
}

uint64_t refscan_count(const struct refscan *s, uint64_t cluster)
{
    unsigned packed = s->counts[cluster] & COUNT_MASK;

    return packed < COUNT_MASK ? packed : (uintptr_t)table_get(&s->more, cluster);
}

static int count_up(struct refscan *s, uint64_t cluster)
{
    unsigned packed = s->counts[cluster] & COUNT_MASK;
    uint64_t count = refscan_count(s, cluster) + 1;

    if (packed + 1 < COUNT_MASK) {
        s->counts[cluster]++;
        return 0;
    }
    int rc = table_put(&s->more, cluster, (void *)(uintptr_t)count);

    if (rc == 0)
        s->counts[cluster] |= COUNT_MASK;
    return rc;
}

/* Does a further reference of this kind contradict what the cluster is known to be? */
static bool is_overlap(const struct refscan *s, enum ref_kind kind, uint64_t cluster)
{
    unsigned mark = s->counts[cluster];

    if (kind == REF_METADATA)
        return mark != 0;
    if (mark & MARK_METADATA)
        return true;
    return (mark & COUNT_MASK) && (kind == REF_L2) != !!(mark & MARK_L2);
}

int refscan_add(struct refscan *s, enum ref_kind kind, uint64_t off, uint64_t len, const char *what)
{
    static const uint8_t marks[] = {0, MARK_L2, MARK_METADATA};
    unsigned bits = s->hdr->cluster_bits;

    if (len == 0)
        return 0;
    uint64_t first = off >> bits, last = (off + len - 1) >> bits;

    if (off + len < off || last >= s->nr_clusters) {
        refscan_corrupt(s, "%s at 0x%llx lies beyond the end of the file", what,
                        (unsigned long long)off);
        return 0;
    }
    for (uint64_t i = first; i <= last; i++) {
        if (is_overlap(s, kind, i))
            refscan_corrupt(s, "%s at 0x%llx overlaps with other metadata or data", what,
                            (unsigned long long)(i << bits));
        s->counts[i] |= marks[kind];
        int rc = count_up(s, i);

        if (rc < 0)
            return rc;
    }
    return 0;
}

/* ---- flags ---- */

static void check_copied(struct refscan *s, const char *what, uint64_t host_off, uint64_t word)
{
    uint64_t cluster = host_off >> s->hdr->cluster_bits;

    if (!s->stored_one || cluster >= s->nr_clusters)
        return;
    bool one = s->stored_one[cluster >> 3] >> (cluster & 7) & 1;

    if (one != !!(word & ENTRY_COPIED))
        refscan_corrupt(s, "%s at 0x%llx: copied flag is %d, refcount is %s one", what,
                        (unsigned long long)host_off, !one, one ? "" : "not");
}

/* ---- L2 ---- */

/* One walk over an L1 table. */
struct walk {
    bool active;        /* not a snapshot's: flags and fragmentation count */
    uint64_t guest_off; /* of the L2 table at hand */
    uint64_t next_off;  /* host offset that would continue the previous cluster; 0: none */
    unsigned char *buf; /* PIECE_LEN or a cluster, the larger */
    size_t buf_len;
    uint8_t *seen; /* bit a cluster: an L2 table that this L1 table named already */
};

static int scan_compressed(struct refscan *s, struct walk *w, struct l2_entry e)
{
    uint64_t off, len;

    l2_compressed_range(s->hdr, e, &off, &len);
    if (s->hdr->incompatible & QCOW2_INCOMPAT_DATA_FILE) {
        refscan_corrupt(s, "compressed cluster at 0x%llx in an image with a data file",
                        (unsigned long long)off);
        return 0;
    }
    if (e.word & ENTRY_COPIED)
        refscan_corrupt(s, "compressed cluster at 0x%llx has the copied flag",
                        (unsigned long long)off);
    if (e.bits)
        refscan_corrupt(s, "compressed cluster at 0x%llx has a subcluster bitmap",
                        (unsigned long long)off);
    if (w->active) {
        s->res->allocated_clusters++;
        s->res->compressed_clusters++;
        s->res->fragmented_clusters++; /* shares sectors with its neighbours: never sequential */
    }
    return refscan_add(s, REF_DATA, off, len, "compressed cluster");
}

/* An entry with a host cluster. */
static int scan_mapped(struct refscan *s, struct walk *w, struct l2_entry e, uint64_t guest_off)
{
    uint64_t off = l2_host_off(e);

    if (!is_aligned(off, s->hdr->cluster_size)) {
        refscan_corrupt(s, "data cluster at 0x%llx is not aligned", (unsigned long long)off);
        return 0;
    }
    if (w->active) {
        s->res->allocated_clusters++;
        if (w->next_off && w->next_off != off)
            s->res->fragmented_clusters++;
        w->next_off = off + s->hdr->cluster_size;
    }
    if (s->hdr->incompatible & QCOW2_INCOMPAT_DATA_FILE) {
        if (off != guest_off)
            refscan_corrupt(s, "data cluster at 0x%llx must lie at 0x%llx of the data file",
                            (unsigned long long)off, (unsigned long long)guest_off);
        return 0;
    }
    if (w->active)
        check_copied(s, "data cluster", off, e.word);
    return refscan_add(s, REF_DATA, off, s->hdr->cluster_size, "data cluster");
}

static int scan_entry(struct refscan *s, struct walk *w, struct l2_entry e, uint64_t guest_off)
{
    const struct qcow2_header *hdr = s->hdr;

    if (e.word == 0 && l2_alloc_bits(e) == 0)
        return 0;
    if (l2_is_compressed(e))
        return scan_compressed(s, w, e);
    uint64_t reserved = hdr->extended_l2 ? QCOW2_L2_EXT_RESERVED_MASK : QCOW2_L2_STD_RESERVED_MASK;

    if (e.word & reserved || (hdr->version < 3 && e.word & L2_ZERO_FLAG))
        refscan_corrupt(s, "L2 entry of guest offset 0x%llx has reserved bits set (0x%llx)",
                        (unsigned long long)guest_off, (unsigned long long)e.word);
    if (l2_alloc_bits(e) & l2_zero_bits(e))
        refscan_corrupt(s, "L2 entry of guest offset 0x%llx: a subcluster is both data and zero",
                        (unsigned long long)guest_off);
    bool mapped =
        l2_host_off(e) || (hdr->incompatible & QCOW2_INCOMPAT_DATA_FILE && e.word & ENTRY_COPIED);

    if (mapped)
        return scan_mapped(s, w, e, guest_off);
    if (l2_alloc_bits(e))
        refscan_corrupt(s, "L2 entry of guest offset 0x%llx: subclusters without a cluster",
                        (unsigned long long)guest_off);
    return 0;
}

static int scan_l2(struct refscan *s, struct walk *w, const void *table)
{
    unsigned nr = 1u << s->hdr->l2_bits;

    w->next_off = 0;
    for (unsigned i = 0; i < nr; i++) {
        int rc = scan_entry(s, w, l2_get(s->hdr, table, i),
                            w->guest_off + ((uint64_t)i << s->hdr->cluster_bits));

        if (rc < 0)
            return rc;
    }
    return 0;
}

/* ---- L1 ---- */

/* A usable L2 offset, or 0. */
static uint64_t l1_entry_off(struct refscan *s, const struct walk *w, uint64_t word, uint64_t index)
{
    uint64_t off = word & L1_OFFSET_MASK;

    if (word & QCOW2_L1_RESERVED_MASK)
        refscan_corrupt(s, "L1 entry %llu has reserved bits set (0x%llx)",
                        (unsigned long long)index, (unsigned long long)word);
    if (off == 0)
        return 0;
    if (!is_aligned(off, s->hdr->cluster_size)) {
        refscan_corrupt(s, "L1 entry %llu: L2 table at 0x%llx is not aligned",
                        (unsigned long long)index, (unsigned long long)off);
        return 0;
    }
    if (!range_ok(off, 1, s->blk->len)) {
        refscan_corrupt(s, "L2 table at 0x%llx lies beyond the end of the file",
                        (unsigned long long)off);
        return 0;
    }
    uint64_t cluster = off >> s->hdr->cluster_bits;

    /* Also what keeps a hostile table from naming one L2 table millions of times. */
    if (w->seen[cluster >> 3] >> (cluster & 7) & 1) {
        refscan_corrupt(s, "L1 entry %llu: L2 table at 0x%llx is named twice",
                        (unsigned long long)index, (unsigned long long)off);
        return 0;
    }
    w->seen[cluster >> 3] |= (uint8_t)(1u << (cluster & 7));
    if (w->active)
        check_copied(s, "L2 table", off, word);
    return off;
}

/* L2 tables [off, off + n clusters), one after the other in file and L1. */
SUSPENDS
static int scan_l2_run(struct refscan *s, struct walk *w, uint64_t off, unsigned n,
                       uint64_t l1_index)
{
    unsigned bits = s->hdr->cluster_bits;
    int rc = refscan_add(s, REF_L2, off, (uint64_t)n << bits, "L2 table");

    if (rc < 0)
        return rc;
    rc = blk_read(s->blk, off, w->buf, (size_t)n << bits);
    if (rc < 0) {
        refscan_unreadable(s, "L2 table", off, rc);
        return 0;
    }
    for (unsigned i = 0; i < n; i++) {
        w->guest_off = (l1_index + i) << (bits + s->hdr->l2_bits);
        rc = scan_l2(s, w, w->buf + ((size_t)i << bits));
        if (rc < 0)
            return rc;
    }
    return 0;
}

/* A piece of an L1 table. Neighbours in the table that are neighbours in the file are read at once,
 * as those of preallocated images are. */
SUSPENDS
static int scan_l1_piece(struct refscan *s, struct walk *w, const be64 *piece, unsigned nr,
                         uint64_t index)
{
    uint64_t cs = s->hdr->cluster_size, run_off = 0;
    unsigned run = 0, run_max = (unsigned)(w->buf_len >> s->hdr->cluster_bits);

    for (unsigned i = 0; i <= nr; i++) {
        uint64_t off = i < nr ? l1_entry_off(s, w, be64_get(piece[i]), index + i) : 0;

        if (run && off == run_off + run * cs && run < run_max) {
            run++;
            continue;
        }
        if (run) {
            int rc = scan_l2_run(s, w, run_off, run, index + i - run);

            if (rc < 0)
                return rc;
        }
        run = off != 0;
        run_off = off;
    }
    return 0;
}

SUSPENDS
static int walk_l1(struct refscan *s, struct walk *w, uint64_t off, uint64_t entries, be64 *piece)
{
    for (uint64_t i = 0; i < entries;) {
        unsigned n = (unsigned)MIN(entries - i, PIECE_LEN / 8);
        int rc = blk_read(s->blk, off + i * 8, piece, n * 8ul);

        if (rc < 0) {
            refscan_unreadable(s, "L1 table", off, rc);
            return 0;
        }
        rc = scan_l1_piece(s, w, piece, n, i);
        if (rc < 0)
            return rc;
        i += n;
    }
    return 0;
}

/* The table lies in the file. */
SUSPENDS
static int scan_l1(struct refscan *s, uint64_t off, uint64_t entries, bool active)
{
    size_t buf_len = MAX(PIECE_LEN, (size_t)s->hdr->cluster_size);
    _cleanup_(buf_drop) struct buf buf = {buf_get(buf_len), buf_len};
    _cleanup_(buf_drop) struct buf piece = {buf_get(PIECE_LEN), PIECE_LEN};
    _cleanup_(freep) uint8_t *seen = calloc(s->nr_clusters / 8 + 1, 1);
    struct walk w = {.active = active, .buf = buf.data, .buf_len = buf_len, .seen = seen};
    uint64_t before = s->res->corruptions;

    if (!buf.data || !piece.data || !seen)
        return -ENOMEM;
    int rc = refscan_add(s, REF_METADATA, off, entries * 8, "L1 table");

    /* What overlaps is no L1 table. */
    if (rc < 0 || s->res->corruptions != before)
        return rc;
    return walk_l1(s, &w, off, entries, piece.data);
}

SUSPENDS
static int scan_active(struct refscan *s)
{
    const struct qcow2_header *hdr = s->hdr;

    if (!range_ok(hdr->l1_off, (uint64_t)hdr->l1_entries * 8, s->blk->len)) {
        refscan_corrupt(s, "the L1 table lies beyond the end of the file");
        return 0;
    }
    return scan_l1(s, hdr->l1_off, hdr->l1_entries, true);
}

/* ---- snapshots ---- */

SUSPENDS
static int scan_snapshots(struct refscan *s)
{
    struct qcow2_snapshots snaps;
    struct err err = {0};
    int rc = qcow2_snapshots_read(s->blk, s->hdr, &snaps, &err);

    if (rc == -ENOMEM)
        return rc;
    if (rc < 0) {
        refscan_corrupt(s, "%s", err_text(&err));
        return 0;
    }
    rc = refscan_add(s, REF_METADATA, s->hdr->snapshots_off, snaps.table_len, "snapshot table");
    for (unsigned i = 0; i < snaps.nr && rc == 0; i++) {
        const struct qcow2_snapshot *snap = &snaps.list[i];

        if (qcow2_snapshot_check_l1(s->hdr, snap, s->blk->len, &err) < 0)
            refscan_corrupt(s, "%s", err_text(&err));
        else
            rc = scan_l1(s, snap->l1_off, snap->l1_entries, false);
    }
    qcow2_snapshots_fini(&snaps);
    return rc;
}

/* ---- bitmaps and encryption ---- */

static int scan_bitmap_word(struct refscan *s, uint64_t word)
{
    uint64_t off = word & QCOW2_BITMAP_OFFSET_MASK;

    if (word & QCOW2_BITMAP_RESERVED_MASK || (off && word & QCOW2_BITMAP_ALL_ONES) ||
        !is_aligned(off, s->hdr->cluster_size)) {
        refscan_corrupt(s, "bitmap table entry 0x%llx is invalid", (unsigned long long)word);
        return 0;
    }
    return off ? refscan_add(s, REF_METADATA, off, s->hdr->cluster_size, "bitmap data") : 0;
}

SUSPENDS
static int scan_bitmap_table(struct refscan *s, uint64_t off, uint64_t entries)
{
    _cleanup_(buf_drop) struct buf piece = {buf_get(PIECE_LEN), PIECE_LEN};

    if (!piece.data)
        return -ENOMEM;
    int rc = refscan_add(s, REF_METADATA, off, entries * 8, "bitmap table");

    for (uint64_t i = 0; i < entries && rc == 0; i += PIECE_LEN / 8) {
        size_t n = MIN(entries - i, PIECE_LEN / 8);
        const be64 *words = piece.data;

        rc = blk_read(s->blk, off + i * 8, piece.data, n * 8);
        if (rc < 0) {
            refscan_unreadable(s, "bitmap table", off, rc);
            return 0;
        }
        for (size_t k = 0; k < n && rc == 0; k++)
            rc = scan_bitmap_word(s, be64_get(words[k]));
    }
    return rc;
}

/* One directory entry at *off of dir; moves *off to the next one. 0, 1 when the directory is
 * broken from here on, or -ENOMEM. */
SUSPENDS
static int scan_bitmap(struct refscan *s, const uint8_t *dir, uint64_t dir_len, uint64_t *off)
{
    struct qcow2_disk_bitmap disk;

    if (!range_ok(*off, sizeof(disk), dir_len))
        return 1;
    memcpy(&disk, dir + *off, sizeof(disk));
    uint64_t len = sizeof(disk) + (uint64_t)be32_get(disk.extra_len) + be16_get(disk.name_len);
    uint64_t table_off = be64_get(disk.table_off);
    uint64_t entries = be32_get(disk.table_entries);

    len = align_up(len, 8);
    if (!range_ok(*off, len, dir_len))
        return 1;
    *off += len;
    if (!is_aligned(table_off, s->hdr->cluster_size) ||
        !range_ok(table_off, entries * 8, s->blk->len)) {
        refscan_corrupt(s, "bitmap table at 0x%llx is misplaced", (unsigned long long)table_off);
        return 0;
    }
    return scan_bitmap_table(s, table_off, entries);
}

SUSPENDS
static int scan_bitmap_dir(struct refscan *s, uint64_t off, uint64_t len, uint32_t nr)
{
    _cleanup_(buf_drop) struct buf dir = {buf_get(len), len};
    uint64_t pos = 0;

    if (!dir.data)
        return -ENOMEM;
    int rc = refscan_add(s, REF_METADATA, off, len, "bitmap directory");

    if (rc < 0)
        return rc;
    rc = blk_read(s->blk, off, dir.data, len);
    if (rc < 0) {
        refscan_unreadable(s, "bitmap directory", off, rc);
        return 0;
    }
    for (uint32_t i = 0; i < nr; i++) {
        rc = scan_bitmap(s, dir.data, len, &pos);
        if (rc < 0)
            return rc;
        if (rc > 0)
            break;
    }
    if (rc > 0 || pos != len)
        refscan_corrupt(s, "the bitmap directory contradicts its length or count");
    return 0;
}

/* Bitmaps count only while the autoclear bit vouches for them. */
SUSPENDS
static int scan_bitmaps(struct refscan *s)
{
    const struct qcow2_ext *ext = qcow2_header_ext(s->hdr, QCOW2_EXT_BITMAPS);
    struct qcow2_disk_bitmaps_ext disk;

    if (!ext || !(s->hdr->autoclear & QCOW2_AUTOCLEAR_BITMAPS))
        return 0;
    if (ext->len != sizeof(disk)) {
        refscan_corrupt(s, "the bitmaps extension has %u bytes", ext->len);
        return 0;
    }
    memcpy(&disk, ext->data, sizeof(disk));
    uint64_t off = be64_get(disk.dir_off), len = be64_get(disk.dir_len);
    uint32_t nr = be32_get(disk.nb_bitmaps);

    if (nr == 0 || nr > QCOW2_BITMAPS_MAX || !is_aligned(off, s->hdr->cluster_size) ||
        !range_ok(off, len, s->blk->len) ||
        len > (uint64_t)nr * (sizeof(struct qcow2_disk_bitmap) + UINT16_MAX + 1)) {
        refscan_corrupt(s, "the bitmaps extension is invalid");
        return 0;
    }
    s->res->bitmap_clusters_seen = true;
    return scan_bitmap_dir(s, off, len, nr);
}

static int scan_crypt_header(struct refscan *s)
{
    const struct qcow2_ext *ext = qcow2_header_ext(s->hdr, QCOW2_EXT_CRYPT);
    struct qcow2_disk_crypt_ext disk;

    if (!ext)
        return 0;
    if (ext->len < sizeof(disk)) {
        refscan_corrupt(s, "the encryption header's extension has %u bytes", ext->len);
        return 0;
    }
    memcpy(&disk, ext->data, sizeof(disk));
    if (!is_aligned(be64_get(disk.off), s->hdr->cluster_size)) {
        refscan_corrupt(s, "the encryption header is not aligned");
        return 0;
    }
    return refscan_add(s, REF_METADATA, be64_get(disk.off), be64_get(disk.len),
                       "encryption header");
}

int refscan_all(struct refscan *s)
{
    int rc = refscan_add(s, REF_METADATA, 0, s->hdr->cluster_size, "header");

    if (rc == 0)
        rc = scan_active(s);
    if (rc == 0)
        rc = scan_snapshots(s);
    if (rc == 0)
        rc = scan_bitmaps(s);
    if (rc == 0)
        rc = scan_crypt_header(s);
    return rc;
}
