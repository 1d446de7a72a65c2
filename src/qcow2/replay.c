/* Replay of a map journal: see replay.h. */
#include <stdarg.h>
#include <stdio.h>
#include "base/bits.h"
#include "base/table.h"
#include "base/vec.h"
#include "qcow2/replay.h"

#define KEY_L1 (1ull << 63) /* keys of L1 entries; the others are guest clusters */

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
};

static bool same(struct l2_entry a, struct l2_entry b)
{
    return a.word == b.word && a.bits == b.bits;
}

PRINTF_LIKE(2, 3) static int give_up(struct replay *r, const char *fmt, ...)
{
    va_list ap;

    va_start(ap, fmt);
    vsnprintf(r->res->why, sizeof(r->res->why), fmt, ap);
    va_end(ap);
    r->res->is_void = true;
    return 0;
}

/* ---- looking ---- */

static struct touch *find(const struct replay *r, uint64_t key)
{
    uintptr_t nr = (uintptr_t)table_get(&r->by_key, key);

    return nr ? &r->touches.data[nr - 1] : NULL;
}

static uint64_t l1_key(const struct replay *r, uint64_t guest_cluster)
{
    return KEY_L1 | guest_cluster >> r->hdr->l2_bits;
}

SUSPENDS static int read_entry(struct replay *r, uint64_t key, struct l2_entry *ret)
{
    const struct touch *table = find(r, l1_key(r, key));
    uint64_t word = table ? table->last.word : 0;
    int rc = 0;

    *ret = (struct l2_entry){0, 0};
    if (key & KEY_L1)
        return r->map->get_l1(r->map->ctx, key & ~KEY_L1, &ret->word);
    if (!table)
        rc = r->map->get_l1(r->map->ctx, key >> r->hdr->l2_bits, &word);
    if (rc == 0 && word & L1_OFFSET_MASK)
        rc = r->map->get(r->map->ctx, word, key, ret);
    return rc;
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
        return give_up(r, "its records contradict each other at %s %llu",
                       key & KEY_L1 ? "L1 entry" : "guest cluster",
                       (unsigned long long)(key & ~KEY_L1));
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

static bool record_is_valid(const struct replay *r, const struct journal_rec *rec)
{
    uint64_t clusters = (uint64_t)r->hdr->l1_entries << r->hdr->l2_bits;

    if (rec->kind == JOURNAL_TABLE)
        return rec->nr == 1 && rec->first < r->hdr->l1_entries &&
               is_aligned(rec->new.word &L1_OFFSET_MASK, r->hdr->cluster_size) &&
               rec->new.word &L1_OFFSET_MASK;
    return rec->kind == JOURNAL_ENTRIES && rec->nr > 0 && range_ok(rec->first, rec->nr, clusters);
}

SUSPENDS static int add_record(struct replay *r, const struct journal_rec *rec)
{
    uint64_t flag = rec->kind == JOURNAL_TABLE ? KEY_L1 : 0;

    if (!record_is_valid(r, rec))
        return give_up(r, "record %llu is none", (unsigned long long)rec->seq);
    for (uint32_t i = 0; i < rec->nr && !r->res->is_void; i++) {
        struct l2_entry new = journal_new(rec, r->hdr, i);

        if (!flag && !entry_is_valid(r, new))
            return give_up(r, "record %llu has an invalid entry", (unsigned long long)rec->seq);
        int rc = add_change(r, flag | (rec->first + i), journal_old(rec, r->hdr, i), new);
        if (rc < 0)
            return rc;
    }
    return 0;
}

/* ---- judging ---- */

/* Rule 4, for the last value of one entry. */
SUSPENDS static int check_host(struct replay *r, const struct touch *t)
{
    uint64_t host = l2_host_off(t->last) >> r->hdr->cluster_bits, count;

    if (!host)
        return 0;
    if (table_get(&r->by_host, host))
        return give_up(r, "host cluster %llu is mapped twice", (unsigned long long)host);
    int rc = table_put(&r->by_host, host, r);
    if (rc == 0 && !same(t->stands, t->last)) {
        rc = r->map->refcount(r->map->ctx, host, &count);
        if (rc == 0 && (count == 0 || (count > 1 && t->last.word & ENTRY_COPIED)))
            return give_up(r, "host cluster %llu is counted %llu times", (unsigned long long)host,
                           (unsigned long long)count);
    }
    return rc;
}

SUSPENDS static int judge(struct replay *r)
{
    for (size_t i = 0; i < r->touches.len && !r->res->is_void; i++) {
        const struct touch *t = &r->touches.data[i];

        if (!t->is_known)
            return give_up(r, "%s %llu was changed by others",
                           t->key & KEY_L1 ? "L1 entry" : "guest cluster",
                           (unsigned long long)(t->key & ~KEY_L1));
        int rc = check_host(r, t);
        if (rc < 0)
            return rc;
    }
    return 0;
}

/* ---- changing ---- */

/* Tables first: entries are set in them. */
SUSPENDS static int apply(struct replay *r, bool tables)
{
    int rc = 0;

    for (size_t i = 0; i < r->touches.len && rc == 0; i++) {
        const struct touch *t = &r->touches.data[i];

        if (tables != !!(t->key & KEY_L1) || same(t->stands, t->last))
            continue;
        r->res->nr_set++;
        rc = tables ? r->map->set_l1(r->map->ctx, t->key & ~KEY_L1, t->last.word)
                    : r->map->set(r->map->ctx, t->key, t->last);
    }
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
    if (rc < 0 || r->res->is_void)
        return rc;
    rc = apply(r, true);
    if (rc == 0)
        rc = apply(r, false);
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
    return rc;
}

void replay_result_fini(struct replay_result *res)
{
    free(res->unused);
    *res = (struct replay_result){0};
}
