/* Replay of a map journal: see replay.h. */
#include <stdarg.h>
#include <stdio.h>
#include "base/bits.h"
#include "base/table.h"
#include "base/vec.h"
#include "qcow2/replay.h"

/* Keys of entries: guest clusters for those of L2 tables; indices with a bit for the others. */
#define KEY_L1    (1ull << 63)
#define KEY_BLOCK (1ull << 62)
#define KEY_KIND  (KEY_L1 | KEY_BLOCK)

/* An entry that records name. */
struct touch {
    uint64_t key;
    struct l2_entry stands; /* in the image */
    struct l2_entry last;   /* behind the records so far */
    bool is_known;          /* what stands is a value of the chain */
};

struct replay {
    const struct qcow2_header *hdr;
    const struct replay_map *map;
    struct replay_result *res;
    VEC(struct touch) touches;
    struct table by_key;  /* key -> its number in touches, plus 1 */
    VEC(uint64_t) left;   /* host clusters that an entry left */
    struct table by_host; /* host clusters of the last entries -> anything */
    struct table tables;  /* L1 entries of the image that were looked at -> anything */
};

static bool same(struct l2_entry a, struct l2_entry b)
{
    return a.word == b.word && a.bits == b.bits;
}

PRINTF_LIKE(2, 3) static int give_up(struct replay *r, const char *fmt, ...)
{
    va_list ap;

    if (r->res->is_void)
        return 0;
    va_start(ap, fmt);
    vsnprintf(r->res->why, sizeof(r->res->why), fmt, ap);
    va_end(ap);
    r->res->is_void = true;
    return 0;
}

static int by_key(const void *a, const void *b)
{
    uint64_t x = ((const struct touch *)a)->key, y = ((const struct touch *)b)->key;

    return x < y ? -1 : x > y;
}

/* ---- looking ---- */

static struct touch *find(const struct replay *r, uint64_t key)
{
    uintptr_t nr = (uintptr_t)table_get(&r->by_key, key);

    return nr ? &r->touches.data[nr - 1] : NULL;
}

static const char *kind_name(uint64_t key)
{
    return key & KEY_L1 ? "L1 entry" : key & KEY_BLOCK ? "refcount table entry" : "guest cluster";
}

/* The word that points to an L2 table or a refcount block, as the records leave it. */
SUSPENDS static int word_of(struct replay *r, uint64_t key, uint64_t *ret)
{
    const struct touch *t = find(r, key);
    uint64_t index = key & ~KEY_KIND;

    if (t)
        *ret = t->last.word;
    if (t)
        return 0;
    return key & KEY_L1 ? r->map->get_l1(r->map->ctx, index, ret)
                        : r->map->get_block(r->map->ctx, index, ret);
}

SUSPENDS static int l1_word_of(struct replay *r, uint64_t guest_cluster, uint64_t *ret)
{
    return word_of(r, KEY_L1 | guest_cluster >> r->hdr->l2_bits, ret);
}

static uint64_t reftable_entries(const struct replay *r)
{
    return ((uint64_t)r->hdr->reftable_clusters << r->hdr->cluster_bits) / 8;
}

SUSPENDS static int count_of(struct replay *r, uint64_t host, uint64_t *ret)
{
    uint64_t index = host >> r->hdr->refcount_block_bits, word = 0;
    int rc = 0;

    *ret = 0;
    if (index < reftable_entries(r))
        rc = word_of(r, KEY_BLOCK | index, &word);
    if (rc == 0 && word & L1_OFFSET_MASK)
        rc = r->map->refcount(r->map->ctx, word, host, ret);
    return rc;
}

/* A table that the image names is looked at: it may lie behind the file's end, if it is counted. */
SUSPENDS static int check_counted(struct replay *r, uint64_t key, uint64_t word)
{
    uint64_t index = key >> r->hdr->l2_bits, count;

    if (find(r, KEY_L1 | index) || table_get(&r->tables, index))
        return 0;
    int rc = table_put(&r->tables, index, r);
    if (rc == 0)
        rc = count_of(r, (word & L1_OFFSET_MASK) >> r->hdr->cluster_bits, &count);
    if (rc == 0 && !count)
        return give_up(r, "the L2 table of guest cluster %llu is not counted",
                       (unsigned long long)key);
    return rc;
}

SUSPENDS static int read_entry(struct replay *r, uint64_t key, struct l2_entry *ret)
{
    uint64_t word = 0;

    *ret = (struct l2_entry){0, 0};
    if (key & KEY_KIND)
        return word_of(r, key, &ret->word);
    int rc = l1_word_of(r, key, &word);
    if (rc < 0 || !(word & L1_OFFSET_MASK))
        return rc;
    rc = check_counted(r, key, word);
    return rc < 0 || r->res->is_void ? rc : r->map->get(r->map->ctx, word, key, ret);
}

SUSPENDS static int add_touch(struct replay *r, uint64_t key, struct l2_entry old,
                              struct touch **ret)
{
    struct touch t = {.key = key, .last = old};
    int rc = read_entry(r, key, &t.stands);

    t.is_known = same(t.stands, old);
    if (rc == 0)
        rc = vec_push(&r->touches, t);
    if (rc == 0)
        rc = table_put(&r->by_key, key, (void *)(uintptr_t)r->touches.len);
    if (rc == 0)
        *ret = &r->touches.data[r->touches.len - 1];
    return rc;
}

/* Its host cluster, if it has one for itself alone; 0. */
static uint64_t own_host(const struct replay *r, struct l2_entry e)
{
    if (l2_is_compressed(e) || !(e.word & ENTRY_COPIED))
        return 0;
    return l2_host_off(e) >> r->hdr->cluster_bits;
}

SUSPENDS static int add_change(struct replay *r, uint64_t key, struct l2_entry old,
                               struct l2_entry new)
{
    struct touch *t = find(r, key);
    int rc = t ? 0 : add_touch(r, key, old, &t);

    if (rc < 0)
        return rc;
    if (!same(t->last, old))
        return give_up(r, "its records contradict each other at %s %llu", kind_name(key),
                       (unsigned long long)(key & ~KEY_KIND));
    t->last = new;
    t->is_known |= same(t->stands, new);
    uint64_t host = own_host(r, old);
    return host ? vec_push(&r->left, host) : 0;
}

static bool entry_is_valid(const struct replay *r, struct l2_entry e)
{
    for (unsigned sub = 0; sub < r->hdr->subclusters; sub += l2_run(r->hdr, e, sub))
        if (l2_kind(r->hdr, e, sub) == CLUSTER_INVALID)
            return false;
    return !l2_is_compressed(e); /* no write ever makes one */
}

/* A pointer to a table or a block. */
static bool pointer_is_valid(const struct replay *r, const struct journal_rec *rec)
{
    uint64_t limit = rec->kind == JOURNAL_TABLE ? r->hdr->l1_entries : reftable_entries(r);
    uint64_t off = rec->new.word &L1_OFFSET_MASK;

    return rec->nr == 1 && rec->first < limit && off && is_aligned(off, r->hdr->cluster_size) &&
           !rec->new.bits && !rec->old.bits;
}

static bool record_is_valid(const struct replay *r, const struct journal_rec *rec)
{
    uint64_t clusters = (uint64_t)r->hdr->l1_entries << r->hdr->l2_bits;

    if (rec->kind == JOURNAL_TABLE || rec->kind == JOURNAL_BLOCK)
        return pointer_is_valid(r, rec);
    return rec->kind == JOURNAL_ENTRIES && rec->nr > 0 && range_ok(rec->first, rec->nr, clusters);
}

static uint64_t key_of(const struct journal_rec *rec, uint32_t i)
{
    uint64_t kind = rec->kind == JOURNAL_TABLE   ? KEY_L1
                    : rec->kind == JOURNAL_BLOCK ? KEY_BLOCK
                                                 : 0;

    return kind | (rec->first + i);
}

SUSPENDS static int add_record(struct replay *r, const struct journal_rec *rec)
{
    if (!record_is_valid(r, rec))
        return give_up(r, "record %llu is none", (unsigned long long)rec->seq);
    for (uint32_t i = 0; i < rec->nr && !r->res->is_void; i++) {
        struct l2_entry new = journal_new(rec, r->hdr, i);

        if (rec->kind == JOURNAL_ENTRIES && !entry_is_valid(r, new))
            return give_up(r, "record %llu has an invalid entry", (unsigned long long)rec->seq);
        int rc = add_change(r, key_of(rec, i), journal_old(rec, r->hdr, i), new);
        if (rc < 0)
            return rc;
    }
    return 0;
}

/* ---- judging ---- */

/* An entry to be set has a table to be set in. */
SUSPENDS static int check_table(struct replay *r, const struct touch *t)
{
    uint64_t word = 0;

    if (t->key & KEY_KIND || same(t->stands, t->last))
        return 0;
    int rc = l1_word_of(r, t->key, &word);
    if (rc == 0 && !(word & L1_OFFSET_MASK))
        return give_up(r, "guest cluster %llu has no L2 table", (unsigned long long)t->key);
    return rc;
}

/* Rule 4, for the last value of one entry. */
SUSPENDS static int check_host(struct replay *r, const struct touch *t)
{
    uint64_t host = l2_host_off(t->last) >> r->hdr->cluster_bits, count;

    if (!host)
        return 0;
    if (table_get(&r->by_host, host))
        return give_up(r, "host cluster %llu is mapped twice", (unsigned long long)host);
    int rc = table_put(&r->by_host, host, r);
    if (rc < 0 || same(t->stands, t->last))
        return rc;
    rc = count_of(r, host, &count);
    if (rc == 0 && (count == 0 || (count > 1 && t->last.word & ENTRY_COPIED)))
        return give_up(r, "host cluster %llu is counted %llu times", (unsigned long long)host,
                       (unsigned long long)count);
    return rc;
}

SUSPENDS static int judge(struct replay *r)
{
    for (size_t i = 0; i < r->touches.len && !r->res->is_void; i++) {
        const struct touch *t = &r->touches.data[i];

        if (!t->is_known)
            return give_up(r, "%s %llu was changed by others", kind_name(t->key),
                           (unsigned long long)(t->key & ~KEY_KIND));
        int rc = check_table(r, t);
        if (rc == 0 && !r->res->is_void)
            rc = check_host(r, t);
        if (rc < 0)
            return rc;
    }
    return 0;
}

/* ---- changing ---- */

SUSPENDS static int set(struct replay *r, const struct touch *t)
{
    const struct replay_map *map = r->map;
    uint64_t word = 0;

    if (t->key & KEY_BLOCK)
        return map->set_block(map->ctx, t->key & ~KEY_KIND, t->last.word);
    if (t->key & KEY_L1)
        return map->set_l1(map->ctx, t->key & ~KEY_KIND, t->last.word);
    int rc = l1_word_of(r, t->key, &word);
    return rc < 0 ? rc : map->set(map->ctx, word, t->key, t->last);
}

/* Entries of one kind, then a flush if there were any. */
SUSPENDS static int apply(struct replay *r, uint64_t kind)
{
    uint64_t before = r->res->nr_set;
    int rc = 0;

    for (size_t i = 0; i < r->touches.len && rc == 0; i++) {
        const struct touch *t = &r->touches.data[i];

        if ((t->key & KEY_KIND) != kind || same(t->stands, t->last))
            continue;
        r->res->nr_set++;
        rc = set(r, t);
    }
    return rc < 0 || r->res->nr_set == before ? rc : r->map->flush(r->map->ctx);
}

SUSPENDS static int apply_all(struct replay *r)
{
    int rc = r->map->flush(r->map->ctx);

    if (rc == 0)
        rc = apply(r, KEY_BLOCK);
    if (rc == 0)
        rc = apply(r, 0);
    if (rc == 0)
        rc = apply(r, KEY_L1);
    return rc;
}

/* Neighbours in a table one behind the other; by_key follows. */
static int sort_touches(struct replay *r)
{
    int rc = 0;

    if (r->touches.len)
        qsort(r->touches.data, r->touches.len, sizeof(struct touch), by_key);
    for (size_t i = 0; i < r->touches.len && rc == 0; i++)
        rc = table_put(&r->by_key, r->touches.data[i].key, (void *)(uintptr_t)(i + 1));
    return rc;
}

static int by_value(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

    return x < y ? -1 : x > y;
}

/* Of what entries left: each once, without what another entry has now. */
static void list_unused(struct replay *r)
{
    size_t kept = 0;

    if (r->left.len)
        sort_items(r->left.data, r->left.len, sizeof(uint64_t), by_value);
    for (size_t i = 0; i < r->left.len; i++) {
        uint64_t host = r->left.data[i];

        if ((kept && r->left.data[kept - 1] == host) || table_get(&r->by_host, host))
            continue;
        r->left.data[kept++] = host;
    }
    r->res->nr_unused = kept;
    r->res->unused = TAKE_PTR(r->left.data);
}

SUSPENDS static int run(struct replay *r, const struct journal_rec *recs, size_t nr)
{
    int rc = 0;

    for (size_t i = 0; i < nr && rc == 0 && !r->res->is_void; i++)
        rc = add_record(r, &recs[i]);
    if (rc == 0 && !r->res->is_void)
        rc = judge(r);
    if (rc == 0 && !r->res->is_void)
        rc = sort_touches(r);
    if (rc < 0 || r->res->is_void)
        return rc;
    rc = apply_all(r);
    if (rc == 0)
        list_unused(r);
    return rc;
}

int replay_run(const struct qcow2_header *hdr, const struct journal_rec *recs, size_t nr,
               const struct replay_map *map, struct replay_result *ret)
{
    struct replay r = {.hdr = hdr, .map = map, .res = ret};

    *ret = (struct replay_result){0};
    int rc = run(&r, recs, nr);
    vec_free(&r.touches);
    vec_free(&r.left);
    table_fini(&r.by_key);
    table_fini(&r.by_host);
    table_fini(&r.tables);
    return rc;
}

void replay_result_fini(struct replay_result *res)
{
    free(res->unused);
    *res = (struct replay_result){0};
}
