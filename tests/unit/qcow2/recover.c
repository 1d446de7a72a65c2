/*
 * Replay into real images. An image is written and closed; then entries of its tables are put back
 * to what they were before, as if the process had been killed before it wrote them, and a journal
 * has the changes. Recovery must make the very same file again.
 */
#include "base/bits.h"
#include "base/own.h"
#include "qcow2/ack.h"
#include "qcow2/format.h"
#include "rt/buf.h"
#include "util.h"

static const struct journal_id id_a = {1, 2, {3, 4}};

struct kill {
    const struct image_create_opts *opts;
    struct journal *j;
    struct qcow2_header hdr;
    uint64_t rng;
};

/* Stays valid until the next one is asked for. */
static const char *kept_path(const char *name)
{
    static char path[256];

    snprintf(path, sizeof(path), "%s/%s", test_dir(), name);
    return path;
}

static uint64_t coin(struct kill *k)
{
    k->rng = hash64(k->rng + 0x9e3779b97f4a7c15ull);
    return k->rng & 1;
}

SUSPENDS static void write_image(const char *name, const struct image_create_opts *opts)
{
    static char data[8192];
    struct image *img;

    t_image(name, opts);
    CHECK_EQ(image_open(t_open(name), &(struct image_opts){.writable = true}, &img, NULL), 0);
    for (unsigned i = 0; i < 90; i++) {
        memset(data, (int)i + 1, sizeof(data));
        uint64_t off = i * 7919ull * 512 % (opts->virtual_len - sizeof(data));
        IOV_ITER_BUF(it, vec, data, sizeof(data));
        CHECK_EQ(image_write(img, off & ~511ull, sizeof(data), &it, 0, NULL), 0);
    }
    CHECK_EQ(image_close(img, NULL), 0);
}

static void append(struct kill *k, const struct journal_rec *rec)
{
    CHECK(journal_reserve(k->j, 1));
    journal_append(k->j, rec);
}

/* A pointer that was nothing before; put back or not. */
SUSPENDS static void undo_word(struct kill *k, struct blk *blk, enum journal_kind kind,
                               uint64_t table_off, uint64_t index)
{
    struct journal_rec rec = {.kind = (uint16_t)kind, .nr = 1, .first = index};

    rec.new.word = t_get64(blk, table_off + index * 8);
    if (!rec.new.word)
        return;
    append(k, &rec);
    if (coin(k))
        t_put(blk, table_off + index * 8, 8, 0);
}

SUSPENDS static void undo_entries(struct kill *k, struct blk *blk)
{
    unsigned size = k->hdr.l2_entry_size;
    uint64_t nr = div_up(k->hdr.virtual_len, k->hdr.cluster_size);
    struct journal_rec rec = {.kind = JOURNAL_ENTRIES};
    char zeroes[16] = {0}, raw[16];

    for (uint64_t g = 0; g < nr; g++) {
        uint64_t pos = t_l2_pos(blk, &k->hdr, g << k->hdr.cluster_bits);

        CHECK_EQ(blk_read(blk, pos, raw, size), 0);
        struct l2_entry e = l2_get(&k->hdr, raw, 0), old = {0, 0};
        if (!e.word && !e.bits)
            continue;
        if (rec.nr && rec.first + rec.nr == g && journal_extend(&rec, &k->hdr, old, e)) {
        } else {
            if (rec.nr)
                append(k, &rec);
            rec = (struct journal_rec){
                .kind = JOURNAL_ENTRIES, .nr = 1, .first = g, .old = old, .new = e};
        }
        if (coin(k))
            CHECK_EQ(blk_write(blk, pos, zeroes, size), 0);
    }
    append(k, &rec);
}

/* Makes `name`.done and, as a kill would have left it, `name` with a journal. */
SUSPENDS static void make_killed(struct kill *k, const char *name,
                                 const struct image_create_opts *opts, uint64_t seed)
{
    const char *path = kept_path(name);
    char map[300];

    *k = (struct kill){.opts = opts, .rng = seed};
    write_image(name, opts);
    t_qemu_check(name, 0, 0);
    test_sh("cp %s %s.done", path, path);
    snprintf(map, sizeof(map), "%s.map", path);
    CHECK_EQ(journal_open(map, &(struct journal_opts){0}, &k->j, NULL), 0);
    journal_begin(k->j, &id_a, NULL, 0);
    struct blk *blk = t_open(name);
    CHECK_EQ(qcow2_header_read(blk, &k->hdr, NULL), 0);
    /* entries first, while their tables can be found; their records come last */
    struct journal *j = k->j;
    snprintf(map, sizeof(map), "%s.map2", path);
    CHECK_EQ(journal_open(map, &(struct journal_opts){0}, &k->j, NULL), 0);
    journal_begin(k->j, &id_a, NULL, 0);
    undo_entries(k, blk);
    struct journal_rec *recs;
    size_t nr;
    CHECK_EQ(journal_records(k->j, &recs, &nr), 0);
    journal_remove(k->j);
    k->j = j;
    uint64_t blocks = ((uint64_t)k->hdr.reftable_clusters << k->hdr.cluster_bits) / 8;
    for (uint64_t i = 1; i < blocks; i++)
        undo_word(k, blk, JOURNAL_BLOCK, k->hdr.reftable_off, i);
    for (uint64_t i = 0; i < k->hdr.l1_entries; i++)
        undo_word(k, blk, JOURNAL_TABLE, k->hdr.l1_off, i);
    for (size_t i = 0; i < nr; i++)
        append(k, &recs[i]);
    free(recs);
    blk_close(blk);
}

static void kill_fini(struct kill *k)
{
    qcow2_header_fini(&k->hdr);
    journal_remove(k->j);
}

static const struct image_create_opts kinds[] = {
    {.virtual_len = 1 << 20},
    {.virtual_len = 1 << 20, .cluster_size = 512},
    {.virtual_len = 1 << 20, .cluster_size = 512, .refcount_bits = 1},
    {.virtual_len = 4 << 20, .cluster_size = 4096, .refcount_bits = 64},
    {.virtual_len = 8 << 20, .cluster_size = 16384, .extended_l2 = true},
};

CO_TEST(the_same_file_again)
{
    for (size_t i = 0; i < ARRAY_SIZE(kinds) * 4; i++) {
        struct kill k;
        struct recovery res;

        make_killed(&k, "same.qcow2", &kinds[i / 4], i);
        struct blk *blk = t_open("same.qcow2");
        CHECK_EQ(recover_image(blk, &k.hdr, k.j, &id_a, &res, NULL), 0);
        CHECK(!res.is_void && res.nr_set > 0 && res.nr_runs == 0);
        recovery_fini(&res);
        CHECK_EQ(recover_image(blk, &k.hdr, k.j, &id_a, &res, NULL), 0); /* and again */
        CHECK(!res.is_void && res.nr_set == 0);
        recovery_fini(&res);
        blk_close(blk);
        const char *path = kept_path("same.qcow2");
        test_sh("cmp %s %s.done", path, path);
        kill_fini(&k);
    }
}

/* Killed at the n-th request, then again from the start. */
CO_TEST(stopped_anywhere)
{
    for (size_t i = 0; i < ARRAY_SIZE(kinds); i += 2) {
        struct kill k;
        uint64_t nth = 0;
        int rc;

        make_killed(&k, "stop.qcow2", &kinds[i], i);
        const char *path = kept_path("stop.qcow2");
        test_sh("cp %s %s.killed", path, path);
        do {
            struct blk *fault;
            struct recovery res;

            test_sh("cp %s.killed %s", path, path);
            CHECK_EQ(blk_fault_new(t_open("stop.qcow2"), &fault), 0);
            blk_fault_fail(fault, BLK_REQ_WRITE | BLK_REQ_FLUSH, ++nth, -EIO, true);
            rc = recover_image(fault, &k.hdr, k.j, &id_a, &res, NULL);
            recovery_fini(&res);
            blk_close(fault);
            t_qemu_check("stop.qcow2", 0, 3); /* QEMU instead of varve */
            struct blk *blk = t_open("stop.qcow2");
            CHECK_EQ(recover_image(blk, &k.hdr, k.j, &id_a, &res, NULL), 0);
            CHECK(!res.is_void);
            recovery_fini(&res);
            blk_close(blk);
            test_sh("cmp %s %s.done", path, path);
        } while (rc < 0);
        CHECK(nth > 4);
        kill_fini(&k);
    }
}

CO_TEST(a_read_only_image_is_laid_over)
{
    for (size_t i = 0; i < ARRAY_SIZE(kinds); i++) {
        struct kill k;
        struct recovery res;
        struct recover_view *view;
        uint8_t table[16], want[16];

        make_killed(&k, "view.qcow2", &kinds[i], 77 + i);
        struct blk *blk = t_open("view.qcow2"), *done = t_open("view.qcow2.done");
        CHECK_EQ(recover_view_new(blk, &k.hdr, k.j, &id_a, &res, &view, NULL), 0);
        CHECK(!res.is_void && view);
        _cleanup_(freep) uint64_t *l1 = calloc(k.hdr.l1_entries, 8);
        for (uint64_t n = 0; n < k.hdr.l1_entries; n++)
            l1[n] = t_get64(blk, k.hdr.l1_off + n * 8);
        recover_view_l1(view, l1, k.hdr.l1_entries);
        for (uint64_t n = 0; n < k.hdr.l1_entries; n++)
            CHECK_EQ(l1[n], t_get64(done, k.hdr.l1_off + n * 8));
        for (uint64_t g = 0; g < k.hdr.virtual_len >> k.hdr.cluster_bits; g++) {
            uint64_t pos = t_l2_pos(done, &k.hdr, g << k.hdr.cluster_bits);

            CHECK_EQ(blk_read(blk, pos, table, k.hdr.l2_entry_size), 0);
            CHECK_EQ(blk_read(done, pos, want, k.hdr.l2_entry_size), 0);
            recover_view_l2(view, &k.hdr, table, g, 1);
            CHECK(memcmp(table, want, k.hdr.l2_entry_size) == 0);
        }
        recover_view_free(view);
        recovery_fini(&res);
        blk_close(blk);
        blk_close(done);
        kill_fini(&k);
    }
}

CO_TEST(void_means_untouched)
{
    struct journal_id other = id_a;
    struct recovery res;
    struct kill k;

    make_killed(&k, "void.qcow2", &kinds[0], 5);
    const char *path = kept_path("void.qcow2");
    struct blk *blk = t_open("void.qcow2");
    other.epoch.lo++;
    test_sh("cp %s %s.before", path, path);
    CHECK_EQ(recover_image(blk, &k.hdr, k.j, &other, &res, NULL), 0);
    CHECK(res.is_void && res.why[0]);
    recovery_fini(&res);
    test_sh("cmp %s %s.before", path, path);
    /* an L1 entry that leads out of the file */
    t_put(blk, k.hdr.l1_off, 8, 1ull << 40 | ENTRY_COPIED);
    test_sh("cp %s %s.before", path, path);
    CHECK_EQ(recover_image(blk, &k.hdr, k.j, &id_a, &res, NULL), 0);
    CHECK(res.is_void && res.why[0]);
    recovery_fini(&res);
    blk_close(blk);
    test_sh("cmp %s %s.before", path, path);
    kill_fini(&k);
}

/* What was reserved, or was taken out of the map, may be used again; nothing else. */
CO_TEST(unused_clusters_are_found)
{
    struct journal_run runs[] = {{0, 0}, {0, 0}};
    struct recovery res;
    struct kill k;

    make_killed(&k, "unused.qcow2", &kinds[0], 6);
    struct blk *blk = t_open("unused.qcow2");
    uint64_t block = t_get64(blk, k.hdr.reftable_off), end = blk->len >> 16;
    for (uint64_t c = end; c < end + 6; c++)
        t_put(blk, block + c * 2, 2, c == end + 3 ? 2 : c != end + 4);
    /* counted: end 1, end+1 1, end+2 1, end+3 2, end+4 0, end+5 1 */
    runs[0] = (struct journal_run){end + 1, 4};
    runs[1] = (struct journal_run){end, 2};
    CHECK_EQ(journal_run_add(k.j, runs[0].first, runs[0].nr), 0);
    CHECK_EQ(journal_run_add(k.j, runs[1].first, runs[1].nr), 1);
    struct journal_rec rec = {.kind = JOURNAL_ENTRIES, .nr = 1, .first = 15};
    /* replay once, then guest cluster 15 moves to nothing */
    CHECK_EQ(recover_image(blk, &k.hdr, k.j, &id_a, &res, NULL), 0);
    CHECK_EQ(res.nr_runs, 1);
    CHECK_EQ(res.runs[0].first, end);
    CHECK_EQ(res.runs[0].nr, 3);
    recovery_fini(&res);
    rec.old.word = t_get64(blk, t_l2_pos(blk, &k.hdr, 15 << 16));
    rec.new.word = L2_ZERO_FLAG;
    append(&k, &rec);
    CHECK_EQ(recover_image(blk, &k.hdr, k.j, &id_a, &res, NULL), 0);
    CHECK_EQ(res.nr_set, 1);
    CHECK_EQ(res.nr_runs, 2);
    CHECK_EQ(res.runs[0].first, (rec.old.word & L2_OFFSET_MASK) >> 16);
    CHECK_EQ(res.runs[0].nr, 1);
    recovery_fini(&res);
    blk_close(blk);
    kill_fini(&k);
}

/* ---- from open to close ---- */

SUSPENDS static struct blk *open_header(const char *name, struct qcow2_header *hdr)
{
    struct blk *blk = t_open(name);

    CHECK_EQ(qcow2_header_read(blk, hdr, NULL), 0);
    return blk;
}

static unsigned nr_journals(const char *dir)
{
    return (unsigned)test_sh_rc("exit $(ls %s 2> /dev/null | wc -l)", dir);
}

/* Opened, recorded, killed, and so on; then closed. */
CO_TEST(sessions_follow_each_other)
{
    const char *dir = kept_path("journals");
    struct journal_rec rec = {.kind = JOURNAL_ENTRIES, .nr = 1, .first = 3};
    struct ack a = {0};
    struct guard_epoch first, epoch;
    struct qcow2_header hdr;
    struct recovery res;

    write_image("ack.qcow2", &kinds[0]);
    struct blk *blk = open_header("ack.qcow2", &hdr);
    uint64_t pos = t_l2_pos(blk, &hdr, 3 << 16);
    CHECK_EQ(ack_recover(&a, dir, blk, &hdr, &res, NULL), 0);
    CHECK_EQ(ack_start(&a, dir, blk, &hdr, NULL, 0, NULL), 0);
    CHECK(a.is_on && guard_get(&hdr, &first) && nr_journals(dir) == 1);
    rec.old.word = t_get64(blk, pos);
    rec.new.word = L2_ZERO_FLAG;
    CHECK(journal_reserve(a.journal, 1));
    journal_append(a.journal, &rec);
    ack_fini(&a); /* as a kill leaves it */
    qcow2_header_fini(&hdr);
    blk_close(blk);

    blk = open_header("ack.qcow2", &hdr);
    struct recover_view *view;
    CHECK_EQ(ack_view(&a, dir, blk, &hdr, &view, NULL), 0);
    CHECK(view && !a.note[0]);
    recover_view_free(view);
    CHECK_EQ(t_get64(blk, pos), rec.old.word);
    CHECK_EQ(ack_recover(&a, dir, blk, &hdr, &res, NULL), 0);
    CHECK(!a.note[0] && res.nr_set == 1 && res.nr_runs == 1);
    CHECK_EQ(t_get64(blk, pos), L2_ZERO_FLAG);
    CHECK_EQ(ack_start(&a, dir, blk, &hdr, res.runs, res.nr_runs, NULL), 0);
    CHECK(a.is_on && guard_get(&hdr, &epoch) && epoch.lo != first.lo);
    CHECK_EQ(journal_run_get(a.journal, 0).first, (rec.old.word & L2_OFFSET_MASK) >> 16);
    recovery_fini(&res);
    CHECK_EQ(ack_stop(&a, blk, &hdr, NULL), 0);
    CHECK(!a.is_on && !guard_get(&hdr, &epoch) && nr_journals(dir) == 0);
    qcow2_header_fini(&hdr);
    blk_close(blk);
    t_qemu_check("ack.qcow2", 0, 3); /* the cluster that nothing uses now */
}

CO_TEST(what_cannot_be_recorded_is_told)
{
    struct qcow2_header hdr;
    struct recovery res;
    struct ack a = {0};

    t_image("old.qcow2", &(struct image_create_opts){.virtual_len = 1 << 20, .version = 2});
    struct blk *blk = open_header("old.qcow2", &hdr);
    CHECK_EQ(ack_start(&a, kept_path("journals"), blk, &hdr, NULL, 0, NULL), 0);
    CHECK(!a.is_on && !a.journal && strstr(a.note, "version 2"));
    qcow2_header_fini(&hdr);
    blk_close(blk);

    t_image("lost.qcow2", &kinds[0]);
    blk = open_header("lost.qcow2", &hdr);
    CHECK_EQ(ack_start(&a, "/dev/null/nowhere", blk, &hdr, NULL, 0, NULL), 0);
    CHECK(!a.is_on && a.note[0]);
    CHECK_EQ(ack_start(&a, kept_path("journals"), blk, &hdr, NULL, 0, NULL), 0);
    CHECK(a.is_on);
    ack_fini(&a);
    test_sh("rm %s/*", kept_path("journals"));
    CHECK_EQ(ack_recover(&a, kept_path("journals"), blk, &hdr, &res, NULL), 0);
    CHECK(strstr(a.note, "gone") != NULL);
    /* with the bit clear there was nothing to lose */
    CHECK_EQ(ack_stop(&a, blk, &hdr, NULL), 0);
    CHECK_EQ(ack_recover(&a, kept_path("journals"), blk, &hdr, &res, NULL), 0);
    CHECK(!a.note[0]);
    qcow2_header_fini(&hdr);
    blk_close(blk);
}
