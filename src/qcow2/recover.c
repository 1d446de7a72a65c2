/* Replay into a file or over it: see recover.h. */
#include <stdio.h>
#include <string.h>
#include "base/bits.h"
#include "base/vec.h"
#include "qcow2/format.h"
#include "qcow2/recover.h"
#include "qcow2/refbits.h"
#include "qcow2/replay.h"

#define UNIT_BYTES 4096u /* of the file in memory; no entry crosses its border */

struct change {   /* of a read-only image */
    uint64_t key; /* guest cluster or L1 index */
    struct l2_entry value;
};
struct recover_view {
    VEC(struct change) l1, l2; /* by key */
};

struct recover {
    struct blk *blk;
    const struct qcow2_header *hdr;
    struct recover_view *view; /* NULL: into the file */
    uint8_t *unit;             /* UNIT_BYTES at unit_off */
    uint64_t unit_off;
    bool unit_dirty;
};

/* ---- the file, a unit at a time ---- */

SUSPENDS static int put_unit(struct recover *r)
{
    int rc = r->unit_dirty ? blk_write(r->blk, r->unit_off, r->unit,
                                       MIN((uint64_t)UNIT_BYTES, r->hdr->cluster_size))
                           : 0;

    if (rc == 0)
        r->unit_dirty = false;
    return rc;
}

/* Bytes at off, in memory until the next call. */
SUSPENDS static int get_bytes(struct recover *r, uint64_t off, uint8_t **ret)
{
    uint64_t unit = MIN((uint64_t)UNIT_BYTES, r->hdr->cluster_size);
    uint64_t start = align_down(off, unit);

    if (start != r->unit_off) {
        int rc = put_unit(r);

        r->unit_off = UINT64_MAX;
        if (rc == 0)
            rc = blk_read(r->blk, start, r->unit, unit);
        if (rc < 0)
            return rc;
        r->unit_off = start;
    }
    *ret = r->unit + (off - start);
    return 0;
}

SUSPENDS static int get_word(struct recover *r, uint64_t off, uint64_t *ret)
{
    uint8_t *at;
    be64 disk;
    int rc = get_bytes(r, off, &at);

    if (rc < 0)
        return rc;
    memcpy(&disk, at, sizeof(disk));
    *ret = be64_get(disk);
    return 0;
}

SUSPENDS static int set_word(struct recover *r, uint64_t off, uint64_t word)
{
    uint8_t *at;
    be64 disk = be64_make(word);
    int rc = get_bytes(r, off, &at);

    if (rc < 0)
        return rc;
    memcpy(at, &disk, sizeof(disk));
    r->unit_dirty = true;
    return 0;
}

/* ---- the map for replay_run ---- */

/* A table or block that an entry names. A new one that nobody wrote yet may lie behind the end. */
static int check_pointer(const struct recover *r, uint64_t off)
{
    uint64_t limit = r->blk->fixed_len ? r->blk->len : QCOW2_HOST_OFF_MAX;

    return is_aligned(off, r->hdr->cluster_size) && off < limit ? 0 : -EUCLEAN;
}

SUSPENDS static int map_get_l1(void *ctx, uint64_t index, uint64_t *ret)
{
    struct recover *r = ctx;

    return get_word(r, r->hdr->l1_off + index * 8, ret);
}

SUSPENDS static int map_get_block(void *ctx, uint64_t index, uint64_t *ret)
{
    struct recover *r = ctx;

    return get_word(r, r->hdr->reftable_off + index * 8, ret);
}

static uint64_t l2_off(const struct recover *r, uint64_t l1_word, uint64_t guest_cluster)
{
    uint64_t index = guest_cluster & ((1ull << r->hdr->l2_bits) - 1);

    return (l1_word & L1_OFFSET_MASK) + index * r->hdr->l2_entry_size;
}

SUSPENDS static int map_get(void *ctx, uint64_t l1_word, uint64_t guest_cluster,
                            struct l2_entry *ret)
{
    struct recover *r = ctx;
    uint8_t *at;
    int rc = check_pointer(r, l1_word & L1_OFFSET_MASK);

    if (rc == 0)
        rc = get_bytes(r, l2_off(r, l1_word, guest_cluster), &at);
    if (rc == 0)
        *ret = l2_get(r->hdr, at, 0);
    return rc;
}

SUSPENDS static int map_refcount(void *ctx, uint64_t block_word, uint64_t host_cluster,
                                 uint64_t *ret)
{
    struct recover *r = ctx;
    uint64_t off = block_word & QCOW2_REFTABLE_OFFSET_MASK;
    uint64_t index = host_cluster & ((1ull << r->hdr->refcount_block_bits) - 1);
    uint64_t bits = index << r->hdr->refcount_order;
    uint8_t *at;
    int rc = check_pointer(r, off);

    /* eight bytes that have it; narrow refcounts stand in them as in a whole block */
    if (rc == 0)
        rc = get_bytes(r, off + bits / 64 * 8, &at);
    if (rc == 0)
        *ret = refbits_get(at, r->hdr->refcount_order, bits % 64 >> r->hdr->refcount_order);
    return rc;
}

SUSPENDS static int map_set_block(void *ctx, uint64_t index, uint64_t word)
{
    struct recover *r = ctx;

    return r->view ? 0 : set_word(r, r->hdr->reftable_off + index * 8, word);
}

SUSPENDS static int map_set(void *ctx, uint64_t l1_word, uint64_t guest_cluster,
                            struct l2_entry entry)
{
    struct recover *r = ctx;
    uint8_t *at;

    if (r->view)
        return vec_push(&r->view->l2, {guest_cluster, entry});
    int rc = check_pointer(r, l1_word & L1_OFFSET_MASK);
    if (rc == 0)
        rc = get_bytes(r, l2_off(r, l1_word, guest_cluster), &at);
    if (rc < 0)
        return rc;
    l2_put(r->hdr, at, 0, entry);
    r->unit_dirty = true;
    return 0;
}

SUSPENDS static int map_set_l1(void *ctx, uint64_t index, uint64_t word)
{
    struct recover *r = ctx;

    if (r->view)
        return vec_push(&r->view->l1, {index, {word, 0}});
    return set_word(r, r->hdr->l1_off + index * 8, word);
}

SUSPENDS static int map_flush(void *ctx)
{
    struct recover *r = ctx;
    int rc = r->view ? 0 : put_unit(r);

    return rc < 0 || r->view ? rc : blk_flush(r->blk);
}

/* ---- unused host clusters ---- */

SUSPENDS static int is_counted_once(struct recover *r, uint64_t host, bool *ret)
{
    uint64_t index = host >> r->hdr->refcount_block_bits, word = 0, count = 0;
    int rc = 0;

    if (index < ((uint64_t)r->hdr->reftable_clusters << r->hdr->cluster_bits) / 8)
        rc = map_get_block(r, index, &word);
    if (rc == 0 && word & QCOW2_REFTABLE_OFFSET_MASK)
        rc = map_refcount(r, word, host, &count);
    *ret = count == 1;
    return rc;
}

static int by_first(const void *a, const void *b)
{
    const struct journal_run *x = a, *y = b;

    return x->first < y->first ? -1 : x->first > y->first;
}

/* What runs had left, and what the records took out of the map. */
static int list_candidates(const struct journal *j, const struct replay_result *res,
                           struct journal_run **ret, size_t *ret_nr)
{
    struct journal_run *runs = calloc(JOURNAL_RUNS + res->nr_unused, sizeof(*runs));
    size_t nr = 0;

    if (!runs)
        return -ENOMEM;
    for (unsigned i = 0; i < JOURNAL_RUNS; i++) {
        runs[nr] = journal_run_get(j, i);
        nr += runs[nr].nr > 0;
    }
    for (size_t i = 0; i < res->nr_unused; i++)
        runs[nr++] = (struct journal_run){res->unused[i], 1};
    qsort(runs, nr, sizeof(*runs), by_first);
    *ret = runs;
    *ret_nr = nr;
    return 0;
}

SUSPENDS static int list_unused(struct recover *r, const struct journal *j,
                                const struct replay_result *res, struct recovery *ret)
{
    _cleanup_(freep) struct journal_run *from = NULL;
    VEC(struct journal_run) to = {0};
    size_t nr = 0;
    uint64_t next = 0; /* below all is done */
    int rc = list_candidates(j, res, &from, &nr);

    for (size_t i = 0; i < nr && rc == 0; i++) {
        for (uint64_t c = MAX(from[i].first, next); c < from[i].first + from[i].nr && rc == 0;
             c++) {
            struct journal_run *last = to.len ? &to.data[to.len - 1] : NULL;
            bool ok;

            next = c + 1;
            rc = is_counted_once(r, c, &ok);
            if (rc < 0 || !ok)
                continue;
            if (last && last->first + last->nr == c)
                last->nr++;
            else
                rc = vec_push(&to, {c, 1});
        }
    }
    ret->runs = to.data;
    ret->nr_runs = to.len;
    return rc;
}

/* ---- all of it ---- */

static int say_void(struct recovery *ret, const char *why)
{
    ret->is_void = true;
    snprintf(ret->why, sizeof(ret->why), "the journal is void: %s", why);
    return 0;
}

SUSPENDS static int recover(struct recover *r, const struct journal *j, const struct journal_id *id,
                            struct recovery *ret)
{
    struct replay_map map = {map_get_l1,   map_get_block, map_get,
                             map_refcount, map_set_block, map_set,
                             map_set_l1,   map_flush,     r};
    _cleanup_(freep) struct journal_rec *recs = NULL;
    struct replay_result res;
    const char *why;

    if (journal_match(j, id, &why) < 0)
        return say_void(ret, why);
    int rc = journal_records(j, &recs, &ret->nr_records);
    if (rc < 0)
        return rc;
    rc = replay_run(r->hdr, recs, ret->nr_records, &map, &res);
    if (rc == -EUCLEAN) /* met on the way to what stands there: before any change */
        rc = say_void(ret, "the image's tables are damaged");
    else if (rc == 0 && res.is_void)
        rc = say_void(ret, res.why);
    else if (rc == 0 && !r->view)
        rc = list_unused(r, j, &res, ret);
    ret->nr_set = res.nr_set;
    replay_result_fini(&res);
    return rc;
}

SUSPENDS static int run(struct blk *blk, const struct qcow2_header *hdr, const struct journal *j,
                        const struct journal_id *id, struct recover_view *view,
                        struct recovery *ret, struct err *err)
{
    struct recover r = {.blk = blk, .hdr = hdr, .view = view, .unit_off = UINT64_MAX};

    *ret = (struct recovery){0};
    r.unit = buf_get(UNIT_BYTES);
    int rc = r.unit ? recover(&r, j, id, ret) : -ENOMEM;
    buf_put(r.unit, UNIT_BYTES);
    if (rc < 0) {
        recovery_fini(ret);
        return err_errno(err, rc, "replay the journal");
    }
    return 0;
}

int recover_image(struct blk *blk, const struct qcow2_header *hdr, const struct journal *j,
                  const struct journal_id *id, struct recovery *ret, struct err *err)
{
    return run(blk, hdr, j, id, NULL, ret, err);
}

void recovery_fini(struct recovery *r)
{
    free(r->runs);
    *r = (struct recovery){0};
}

/* ---- read-only ---- */

int recover_view_new(struct blk *blk, const struct qcow2_header *hdr, const struct journal *j,
                     const struct journal_id *id, struct recovery *ret_recovery,
                     struct recover_view **ret, struct err *err)
{
    struct recover_view *view = calloc(1, sizeof(*view));

    if (!view)
        return err_errno(err, -ENOMEM, "replay the journal");
    int rc = run(blk, hdr, j, id, view, ret_recovery, err);
    if (rc < 0 || (!view->l1.len && !view->l2.len)) {
        recover_view_free(view);
        view = NULL;
    }
    if (rc == 0)
        *ret = view;
    return rc;
}

void recover_view_free(struct recover_view *view)
{
    if (!view)
        return;
    vec_free(&view->l1);
    vec_free(&view->l2);
    free(view);
}

void recover_view_l1(const struct recover_view *view, uint64_t *l1, uint64_t entries)
{
    vec_for_each(c, &view->l1) {
        if (c->key < entries)
            l1[c->key] = c->value.word;
    }
}

void recover_view_l2(const struct recover_view *view, const struct qcow2_header *hdr, void *table,
                     uint64_t first, unsigned nr)
{
    size_t lo = 0, hi = view->l2.len;

    while (lo < hi) { /* replay sets them in ascending order */
        size_t mid = (lo + hi) / 2;

        if (view->l2.data[mid].key < first)
            lo = mid + 1;
        else
            hi = mid;
    }
    for (; lo < view->l2.len && view->l2.data[lo].key < first + nr; lo++)
        l2_put(hdr, table, (unsigned)(view->l2.data[lo].key - first), view->l2.data[lo].value);
}
