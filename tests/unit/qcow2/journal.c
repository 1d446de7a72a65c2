/*
 * The journal's ring, its guard, and replay's decisions.
 *
 * The writer is killed behind every single instruction (ptrace), and at random moments in full
 * speed.
 */
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include "base/own.h"
#include "base/vec.h"
#include "qcow2/format.h"
#include "qcow2/replay.h"
#include "util.h"

static const struct journal_id id_a = {1, 2, {3, 4}};

static struct journal *open_at(const char *path, uint32_t nr)
{
    struct journal_opts opts = {.nr_records = nr};
    struct journal *j;
    struct err err = {0};

    if (journal_open(path, &opts, &j, &err) < 0)
        test_fail(__FILE__, __LINE__, "%s", err_text(&err));
    return j;
}

static int match(const struct journal *j, struct journal_id id)
{
    const char *why;

    return journal_match(j, &id, &why);
}

/* A record that can be told from all others. */
static struct journal_rec rec_nr(uint64_t n)
{
    return (struct journal_rec){.kind = JOURNAL_ENTRIES,
                                .nr = 1,
                                .first = n,
                                .old = {n * 3, n * 5},
                                .new = {n * 7, n * 11}};
}

static void append_nr(struct journal *j, uint64_t n)
{
    struct journal_rec rec = rec_nr(n);

    CHECK(journal_reserve(j, 1));
    journal_append(j, &rec);
}

/* Its records are those with numbers [first, last). */
static void check_records(const struct journal *j, uint64_t first, uint64_t last)
{
    struct journal_rec *recs;
    size_t nr;

    CHECK_EQ(journal_records(j, &recs, &nr), 0);
    CHECK_EQ(nr, last - first);
    for (size_t i = 0; i < nr; i++) {
        struct journal_rec want = rec_nr(first + i);

        want.seq = recs[i].seq;
        want.check = recs[i].check;
        CHECK(memcmp(&want, &recs[i], sizeof(want)) == 0);
    }
    free(recs);
}

/* ---- the ring ---- */

TEST(records_come_back)
{
    const char *path = t_path("back.map");
    struct journal *j = open_at(path, 16);

    CHECK_EQ(match(j, id_a), -ESTALE); /* of nobody */
    journal_begin(j, &id_a, NULL, 0);
    check_records(j, 0, 0);
    for (uint64_t n = 0; n < 16; n++)
        append_nr(j, n);
    CHECK(!journal_reserve(j, 1));
    CHECK_EQ(match(j, id_a), 0);
    check_records(j, 0, 16);
    journal_trim(j, journal_oldest(j) + 5);
    CHECK(journal_reserve(j, 5) && !journal_reserve(j, 1));
    journal_unreserve(j, 5);
    for (uint64_t n = 16; n < 20; n++)
        append_nr(j, n);
    journal_close(j);
    j = open_at(path, 0);
    CHECK_EQ(match(j, id_a), 0);
    check_records(j, 5, 20);
    journal_close(j);
}

TEST(some_places_are_spare)
{
    struct journal *j = open_at(t_path("spare.map"), 128);

    journal_begin(j, &id_a, NULL, 0);
    CHECK(!journal_reserve(j, 127) && journal_reserve(j, 126) && !journal_reserve(j, 1));
    CHECK(journal_reserve_spare(j) && journal_reserve_spare(j) && !journal_reserve_spare(j));
    journal_unreserve(j, 128);
    CHECK(journal_reserve(j, 126));
    journal_unreserve(j, 126);
    journal_close(j);
}

TEST(many_laps)
{
    struct journal *j = open_at(t_path("laps.map"), 8);

    for (uint64_t n = 0, oldest = 0; n < 1000; n++) {
        if (n % 97 == 0) {
            journal_begin(j, &id_a, NULL, 0);
            oldest = n;
        }
        append_nr(j, n);
        if (n - oldest == 7) {
            oldest += 3;
            journal_trim(j, journal_next(j) - (n + 1 - oldest));
        }
        CHECK_EQ(match(j, id_a), 0);
        check_records(j, oldest, n + 1);
    }
    journal_close(j);
}

TEST(only_its_own_image_believes_it)
{
    const char *path = t_path("own.map");
    struct journal *j = open_at(path, 8);
    struct journal_opts other_boot = {.boot_id = "00000000-0000-0000-0000-000000000000"};
    struct journal_id id = id_a;
    const char *why;

    journal_begin(j, &id_a, NULL, 0);
    CHECK_EQ(match(j, id_a), 0);
    id.dev++;
    CHECK_EQ(match(j, id), -ESTALE);
    id = id_a;
    id.ino++;
    CHECK_EQ(match(j, id), -ESTALE);
    id = id_a;
    id.epoch.lo++;
    CHECK_EQ(match(j, id), -ESTALE);
    id = id_a;
    id.epoch.hi++;
    CHECK_EQ(match(j, id), -ESTALE);
    journal_void(j);
    CHECK_EQ(match(j, id_a), -ESTALE);
    journal_begin(j, &id_a, NULL, 0);
    CHECK_EQ(match(j, id_a), 0);
    journal_close(j);
    CHECK_EQ(journal_open(path, &other_boot, &j, NULL), 0);
    CHECK_EQ(journal_match(j, &id_a, &why), -ESTALE);
    CHECK_STR(why, "it is of an earlier boot");
    journal_close(j);
}

TEST(damage_is_seen)
{
    const char *path = t_path("damage.map");

    for (unsigned byte = 0; byte < 64; byte++) {
        struct journal *j = open_at(path, 8);
        uint8_t c;

        journal_begin(j, &id_a, NULL, 0);
        journal_trim(j, journal_next(j));
        while (journal_next(j) % 8 != 2)
            append_nr(j, journal_next(j));
        append_nr(j, 1); /* at place 2 */
        append_nr(j, 2);
        journal_close(j);
        _cleanup_(closep) int fd = open(path, O_RDWR);
        CHECK(pread(fd, &c, 1, 8192 + 2 * 64 + byte) == 1);
        c ^= 0x10;
        CHECK(pwrite(fd, &c, 1, 8192 + 2 * 64 + byte) == 1);
        j = open_at(path, 8);
        CHECK_EQ(match(j, id_a), -EUCLEAN);
        journal_close(j);
    }
}

TEST(a_strange_file_is_made_anew)
{
    const char *path = t_path("strange.map");

    test_sh("head -c 100000 /dev/urandom > %s", path);
    struct journal *j = open_at(path, 8);
    CHECK_EQ(match(j, id_a), -ESTALE);
    journal_begin(j, &id_a, NULL, 0);
    append_nr(j, 0);
    journal_close(j);
    test_sh("truncate -s -64 %s", path); /* cut short: not a journal any more */
    j = open_at(path, 8);
    CHECK_EQ(match(j, id_a), -ESTALE);
    journal_remove(j);
    struct journal_opts ro = {.readonly = true};
    CHECK_EQ(journal_open(path, &ro, &j, NULL), -ENOENT);
}

TEST(one_process_has_it)
{
    const char *path = t_path("one.map");
    struct journal *j = open_at(path, 8), *other;
    struct journal_opts rw = {0}, ro = {.readonly = true};

    CHECK_EQ(journal_open(path, &rw, &other, NULL), -EBUSY);
    CHECK_EQ(journal_open(path, &ro, &other, NULL), -EBUSY);
    journal_begin(j, &id_a, NULL, 0);
    append_nr(j, 0);
    journal_close(j);
    CHECK_EQ(journal_open(path, &ro, &j, NULL), 0);
    CHECK_EQ(journal_open(path, &ro, &other, NULL), 0); /* readers do not mind each other */
    CHECK_EQ(match(other, id_a), 0);
    check_records(other, 0, 1);
    journal_close(other);
    CHECK_EQ(journal_open(path, &rw, &other, NULL), -EBUSY);
    journal_close(j);
}

TEST(runs_are_kept)
{
    const char *path = t_path("runs.map");
    struct journal_run runs[] = {{100, 64}, {1ull << 40, 1}};
    struct journal *j = open_at(path, 8);

    journal_begin(j, &id_a, runs, 2);
    CHECK_EQ(journal_run_add(j, 7, 3), 2);
    journal_run_set(j, 0, 110, 54);
    journal_run_set(j, 1, 0, 0);
    journal_run_set(j, -1, 5, 5);
    CHECK_EQ(journal_run_add(j, 9, 9), 1);
    journal_close(j);
    j = open_at(path, 8);
    CHECK_EQ(journal_run_get(j, 0).first, 110);
    CHECK_EQ(journal_run_get(j, 0).nr, 54);
    CHECK_EQ(journal_run_get(j, 1).first, 9);
    CHECK_EQ(journal_run_get(j, 2).nr, 3);
    CHECK_EQ(journal_run_get(j, 3).nr, 0);
    for (int i = 3; i < (int)JOURNAL_RUNS; i++)
        CHECK_EQ(journal_run_add(j, 1, 1), i);
    CHECK_EQ(journal_run_add(j, 1, 1), -1);
    journal_begin(j, &id_a, NULL, 0);
    CHECK_EQ(journal_run_get(j, 0).nr, 0);
    journal_close(j);
}

/* ---- killed ---- */

struct shared {
    volatile uint64_t trimmed, begun, answered; /* by the writer, around each step */
    volatile uint64_t session;
};

static struct shared *shared_new(void)
{
    void *p = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    CHECK(p != MAP_FAILED);
    return p;
}

static struct journal_id id_of_session(uint64_t n)
{
    return (struct journal_id){1, 2, {n, n}};
}

/* Sessions, laps, trims; what it does is announced before and noted behind. Never ends by itself.
 */
static void writer_loop(struct journal *j, struct shared *sh, uint64_t steps)
{
    for (uint64_t n = 0; n < steps; n++) {
        sh->begun = n + 1;
        append_nr(j, n);
        sh->answered = n + 1;
        if (n % 5 == 4) {
            sh->trimmed = MAX(sh->trimmed, n - 1); /* at most */
            journal_trim(j, journal_next(j) - 2);
        }
        if (n % 13 == 12) {
            struct journal_id id = id_of_session(sh->session + 1);
            struct journal_run run = {n, 1};

            sh->trimmed = n + 1;
            journal_begin(j, &id, &run, 1);
            sh->session++;
        }
    }
}

/* Sound, and between what was noted and what was announced. */
static void check_left(const char *path, const struct shared *sh)
{
    struct journal *j = open_at(path, 8);
    struct journal_rec *recs;
    size_t nr;
    bool next = match(j, id_of_session(sh->session)) != 0;

    if (next)
        CHECK_EQ(match(j, id_of_session(sh->session + 1)), 0);
    CHECK_EQ(journal_records(j, &recs, &nr), 0);
    for (size_t i = 1; i < nr; i++)
        CHECK_EQ(recs[i].first, recs[i - 1].first + 1);
    if (nr) {
        CHECK(recs[0].first <= sh->trimmed);
        CHECK(recs[nr - 1].first + 1 >= sh->answered && recs[nr - 1].first + 1 <= sh->begun);
        check_records(j, recs[0].first, recs[nr - 1].first + 1);
    } else {
        CHECK(sh->trimmed >= sh->answered);
    }
    /* a session's run is there from its first moment */
    if (sh->session + next > 1)
        CHECK_EQ(journal_run_get(j, 0).nr, 1);
    free(recs);
    journal_close(j);
}

static struct journal *new_session(const char *path)
{
    struct journal_id id = id_of_session(1);

    (void)unlink(path);
    struct journal *j = open_at(path, 8);
    journal_begin(j, &id, NULL, 0);
    return j;
}

TEST(killed_at_random)
{
    const char *path = t_path("random.map");
    struct shared *sh = shared_new();
    uint64_t total = 0;

    for (unsigned i = 0; i < 60; i++) {
        *sh = (struct shared){.session = 1};
        pid_t pid = fork();

        CHECK(pid >= 0);
        if (pid == 0) {
            writer_loop(new_session(path), sh, UINT64_MAX);
            _exit(0);
        }
        while (sh->begun == 0)
            usleep(100);
        usleep(i * 37);
        kill(pid, SIGKILL);
        CHECK(waitpid(pid, NULL, 0) == pid);
        total += sh->begun;
        check_left(path, sh);
    }
    printf("%llu records\n", (unsigned long long)total);
    munmap(sh, 4096);
}

/* The state behind every instruction is what a kill there would leave. */
TEST(killed_at_every_instruction)
{
    const char *path = t_path("every.map"), *copy = t_path("copy.map");
    struct shared *sh = shared_new();
    uint64_t steps = 0;
    int status;

    *sh = (struct shared){.session = 1};
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        struct journal *j = new_session(path);

        if (ptrace(PTRACE_TRACEME, 0, 0, 0) < 0)
            _exit(77);
        raise(SIGSTOP);
        writer_loop(j, sh, 120);
        _exit(0);
    }
    CHECK(waitpid(pid, &status, 0) == pid);
    if (!WIFSTOPPED(status)) {
        printf("no ptrace here\n");
        return;
    }
    _cleanup_(closep) int from = open(path, O_RDONLY);
    static char buf[2][8192 + 8 * 64], old[sizeof(struct shared)];
    for (;;) {
        CHECK(ptrace(PTRACE_SINGLESTEP, pid, 0, 0) == 0);
        CHECK(waitpid(pid, &status, 0) == pid);
        if (WIFEXITED(status))
            break;
        CHECK(pread(from, buf[0], sizeof(buf[0]), 0) == (ssize_t)sizeof(buf[0]));
        if (memcmp(buf[0], buf[1], sizeof(buf[0])) == 0 && memcmp(old, sh, sizeof(old)) == 0)
            continue; /* nothing was stored */
        memcpy(buf[1], buf[0], sizeof(buf[0]));
        memcpy(old, sh, sizeof(old));
        steps++;
        _cleanup_(closep) int to = open(copy, O_WRONLY | O_CREAT, 0600);
        CHECK(write(to, buf[0], sizeof(buf[0])) == (ssize_t)sizeof(buf[0]));
        check_left(copy, sh);
    }
    CHECK_EQ(WEXITSTATUS(status), 0);
    printf("%llu different states\n", (unsigned long long)steps);
    CHECK(steps > 1000);
    munmap(sh, sizeof(*sh));
}

/* ---- runs of like changes ---- */

static const struct qcow2_header hdr_std = {
    .version = 3,
    .cluster_bits = 16,
    .cluster_size = 65536,
    .l1_entries = 2,
    .l2_entry_size = 8,
    .l2_bits = 13,
    .subclusters = 1,
    .subcluster_bits = 16,
    .reftable_clusters = 1,
    .refcount_block_bits = 15,
};
static const struct qcow2_header hdr_ext = {
    .version = 3,
    .cluster_bits = 17,
    .cluster_size = 131072,
    .l1_entries = 2,
    .extended_l2 = true,
    .l2_entry_size = 16,
    .l2_bits = 13,
    .subclusters = 32,
    .subcluster_bits = 12,
    .reftable_clusters = 1,
    .refcount_block_bits = 16,
};

static struct l2_entry at(uint64_t cluster)
{
    return (struct l2_entry){cluster ? cluster << 16 | ENTRY_COPIED : 0, 0};
}

TEST(like_changes_share_a_record)
{
    struct journal_rec r = {.kind = JOURNAL_ENTRIES, .nr = 1, .old = at(0), .new = at(50)};
    struct l2_entry zero = {L2_ZERO_FLAG, 0};

    CHECK(journal_extend(&r, &hdr_std, at(0), at(51)));
    CHECK(journal_extend(&r, &hdr_std, at(0), at(52)));
    CHECK(!journal_extend(&r, &hdr_std, at(0), at(54)));
    CHECK(!journal_extend(&r, &hdr_std, at(1), at(53)));
    CHECK(!journal_extend(&r, &hdr_std, zero, at(53)));
    CHECK_EQ(r.nr, 3);
    for (uint32_t i = 0; i < 3; i++) {
        CHECK_EQ(journal_old(&r, &hdr_std, i).word, 0);
        CHECK_EQ(journal_new(&r, &hdr_std, i).word, at(50 + i).word);
    }
    r = (struct journal_rec){.kind = JOURNAL_ENTRIES, .nr = 1, .old = at(7), .new = zero};
    CHECK(!journal_extend(&r, &hdr_std, at(9), zero));
    CHECK(journal_extend(&r, &hdr_std, at(8), zero));
    CHECK(!journal_extend(&r, &hdr_std, at(9), (struct l2_entry){L2_ZERO_FLAG, 1}));
    CHECK_EQ(journal_old(&r, &hdr_std, 1).word, at(8).word);
    CHECK_EQ(journal_new(&r, &hdr_std, 1).word, L2_ZERO_FLAG);
    r = (struct journal_rec){.kind = JOURNAL_TABLE, .nr = 1, .new = at(1)};
    CHECK(!journal_extend(&r, &hdr_std, at(0), at(2)));
}

/* ---- replay ---- */

#define CLUSTERS 64u
struct fake { /* a map: two tables' worth of entries; the second table is not there yet */
    uint64_t l1[2], block[2], count[CLUSTERS];
    struct l2_entry e[2][CLUSTERS];
    unsigned sets, fail_at; /* the fail_at-th set fails, from 1 */
    char order[64];         /* what was done: flush, block, entry, 1: L1 entry */
};

static int fake_get_l1(void *ctx, uint64_t i, uint64_t *ret)
{
    CHECK(i < 2);
    *ret = ((struct fake *)ctx)->l1[i];
    return 0;
}
static int fake_get_block(void *ctx, uint64_t i, uint64_t *ret)
{
    CHECK(i < 2);
    *ret = ((struct fake *)ctx)->block[i];
    return 0;
}
static int fake_get(void *ctx, uint64_t word, uint64_t g, struct l2_entry *ret)
{
    CHECK(word & L1_OFFSET_MASK);
    *ret = ((struct fake *)ctx)->e[g >> 13][g & 8191];
    return 0;
}
static int fake_refcount(void *ctx, uint64_t word, uint64_t c, uint64_t *ret)
{
    CHECK(word & L1_OFFSET_MASK);
    *ret = c < CLUSTERS ? ((struct fake *)ctx)->count[c] : 0;
    return 0;
}
static int fake_did(struct fake *f, char what)
{
    if (what != 'f' && ++f->sets == f->fail_at)
        return -EIO;
    CHECK(strlen(f->order) + 1 < sizeof(f->order));
    f->order[strlen(f->order)] = what;
    return 0;
}
static int fake_set_block(void *ctx, uint64_t i, uint64_t word)
{
    struct fake *f = ctx;
    int rc = fake_did(f, 'b');

    if (rc == 0)
        f->block[i] = word;
    return rc;
}
static int fake_set(void *ctx, uint64_t l1_word, uint64_t g, struct l2_entry e)
{
    struct fake *f = ctx;
    int rc = fake_did(f, 'e');

    CHECK(l1_word & L1_OFFSET_MASK);
    if (rc == 0)
        f->e[g >> 13][g & 8191] = e;
    return rc;
}
static int fake_set_l1(void *ctx, uint64_t i, uint64_t word)
{
    struct fake *f = ctx;
    int rc = fake_did(f, '1');

    if (rc == 0)
        f->l1[i] = word;
    return rc;
}
static int fake_flush(void *ctx)
{
    return fake_did(ctx, 'f');
}

/* One at a time. */
static struct fake *fake_new(void)
{
    static struct fake f;

    f = (struct fake){.l1 = {at(2).word, 0}, .block = {3ull << 16, 0}};
    for (unsigned i = 0; i < CLUSTERS; i++)
        f.count[i] = 1;
    return &f;
}

SUSPENDS static int run_as(const struct qcow2_header *hdr, struct fake *f,
                           const struct journal_rec *recs, size_t nr, struct replay_result *ret)
{
    struct replay_map map = {fake_get_l1,   fake_get_block, fake_get,
                             fake_refcount, fake_set_block, fake_set,
                             fake_set_l1,   fake_flush,     f};

    return replay_run(hdr, recs, nr, &map, ret);
}

SUSPENDS static int run(struct fake *f, const struct journal_rec *recs, size_t nr,
                        struct replay_result *ret)
{
    return run_as(&hdr_std, f, recs, nr, ret);
}

static struct journal_rec change(uint64_t g, struct l2_entry old, struct l2_entry new)
{
    return (struct journal_rec){
        .kind = JOURNAL_ENTRIES, .nr = 1, .first = g, .old = old, .new = new};
}

static struct l2_entry kept(uint64_t cluster)
{
    struct l2_entry e = at(cluster);

    e.word |= L2_ZERO_FLAG;
    return e;
}

/* A chain with a value that comes back; each of its values may stand in the image. */
CO_TEST(whatever_value_of_the_chain_stands)
{
    const struct l2_entry chain[] = {at(0), at(10), kept(10), at(10), {L2_ZERO_FLAG, 0}, at(11)};
    struct journal_rec recs[ARRAY_SIZE(chain) - 1];
    struct replay_result res;

    for (size_t i = 0; i + 1 < ARRAY_SIZE(chain); i++)
        recs[i] = change(5, chain[i], chain[i + 1]);
    for (size_t i = 0; i < ARRAY_SIZE(chain); i++) {
        struct fake *f = fake_new();

        f->e[0][5] = chain[i];
        CHECK_EQ(run(f, recs, ARRAY_SIZE(recs), &res), 0);
        CHECK(!res.is_void);
        CHECK_EQ(f->e[0][5].word, at(11).word);
        CHECK_EQ(res.nr_set, i + 1 < ARRAY_SIZE(chain));
        CHECK_EQ(res.nr_unused, 1);
        CHECK_EQ(res.unused[0], 10);
        for (unsigned c = 0; c < CLUSTERS; c++)
            CHECK_EQ(f->count[c], 1);
        replay_result_fini(&res);
    }
}

/* Two changes that fit and a third one; entry `g` of the image and the count of cluster 11 may not.
 */
SUSPENDS static void check_void(struct journal_rec third, uint64_t g, struct l2_entry stands,
                                uint64_t count11)
{
    struct journal_rec recs[] = {change(1, at(0), at(10)), change(2, at(0), at(11)), third};
    struct fake *f = fake_new();
    struct replay_result res;

    f->e[0][g] = stands;
    f->count[11] = count11;
    CHECK_EQ(run(f, recs, 3, &res), 0);
    CHECK(res.is_void && res.why[0]);
    CHECK_EQ(f->sets, 0); /* all or nothing */
    replay_result_fini(&res);
}

CO_TEST(anything_else_voids_all_of_it)
{
    struct journal_rec third = change(1, at(10), at(12)), table = {.kind = JOURNAL_TABLE, .nr = 1};
    struct l2_entry none = {0, 0}, uncounted = {10 << 16, 0};
    struct l2_entry compressed = {ENTRY_COMPRESSED | 10 << 16, 0}, reserved = at(12);

    reserved.word |= 2;
    check_void(third, 2, at(40), 1); /* changed by others */
    check_void(third, 1, at(40), 1);
    check_void(third, 1, kept(10), 1);
    check_void(third, 1, uncounted, 1);                 /* a flag differs */
    check_void(third, 63, none, 0);                     /* a cluster that is not counted */
    check_void(third, 63, none, 2);                     /* or not its alone */
    check_void(change(1, at(0), at(12)), 63, none, 1);  /* contradicts the first one */
    check_void(change(1, at(12), at(10)), 63, none, 1); /* out of order */
    check_void(change(3, at(0), at(11)), 63, none, 1);  /* mapped twice */
    check_void(change(3, at(0), compressed), 63, none, 1);
    check_void(change(3, at(0), reserved), 63, none, 1);
    check_void(change(16384, at(0), at(12)), 63, none, 1); /* behind the L1 table */
    check_void((struct journal_rec){.kind = 3, .nr = 1}, 63, none, 1);
    check_void((struct journal_rec){.kind = JOURNAL_ENTRIES, .nr = 0}, 63, none, 1);
    table.first = 1;
    check_void(table, 63, none, 1); /* to no table */
    table.new = at(9);
    table.first = 2;
    check_void(table, 63, none, 1);
    table.first = 0;
    check_void(table, 63, none, 1);                       /* another table stands there */
    check_void(change(8192, at(0), at(12)), 63, none, 1); /* no table for it */
    table.kind = JOURNAL_BLOCK;
    check_void(table, 63, none, 1); /* another block stands there */
    table.first = 8192;
    check_void(table, 63, none, 1);                       /* behind the refcount table */
    check_void(change(3, at(0), at(32768)), 63, none, 1); /* no block for it */
    third.old = at(10);
    struct fake *f = fake_new();
    struct journal_rec recs[] = {change(1, at(0), at(10)), third};
    struct replay_result res;
    CHECK_EQ(run(f, recs, 2, &res), 0);
    CHECK(!res.is_void); /* else the above would mean nothing */
    replay_result_fini(&res);
}

CO_TEST(a_new_table_is_linked_last)
{
    struct fake *f = fake_new();
    struct journal_rec recs[] = {
        {.kind = JOURNAL_TABLE, .nr = 1, .first = 1, .old = at(0), .new = at(20)},
        change(8192 + 3, at(0), at(21)),
        {.kind = JOURNAL_ENTRIES,
         .nr = 3,
         .steps = JOURNAL_NEW_STEPS,
         .first = 8192 + 8,
         .old = at(0),
         .new = at(30)},
    };
    struct replay_result res;

    f->e[1][9] = at(31); /* written back before */
    CHECK_EQ(run(f, recs, 3, &res), 0);
    CHECK(!res.is_void);
    CHECK_EQ(f->l1[1], at(20).word);
    CHECK_EQ(f->e[1][3].word, at(21).word);
    for (unsigned i = 0; i < 3; i++)
        CHECK_EQ(f->e[1][8 + i].word, at(30 + i).word);
    CHECK_EQ(res.nr_set, 4);
    CHECK_EQ(res.nr_unused, 0);
    CHECK_STR(f->order, "feeef1f"); /* entries in their order; nothing points to nothing */
    replay_result_fini(&res);
}

/* Cut off at each change; what is done is done, and the next time does the rest. */
CO_TEST(again_after_any_part_of_it)
{
    struct journal_rec recs[] = {
        {.kind = JOURNAL_TABLE, .nr = 1, .first = 1, .old = at(0), .new = at(20)},
        {.kind = JOURNAL_BLOCK, .nr = 1, .first = 1, .old = at(0), .new = {25 << 16, 0}},
        change(8192, at(0), at(21)),
        change(1, at(0), at(22)),
        change(2, at(23), at(24)),
        change(1, at(22), kept(22)),
        change(1, kept(22), at(22)),
    };
    unsigned cut = 0;
    int rc;

    do {
        struct fake *f = fake_new();
        struct replay_result res;

        f->e[0][2] = at(23);
        f->fail_at = ++cut;
        rc = run(f, recs, ARRAY_SIZE(recs), &res);
        replay_result_fini(&res);
        CHECK(rc == 0 || rc == -EIO);
        f->fail_at = 0;
        CHECK_EQ(run(f, recs, ARRAY_SIZE(recs), &res), 0);
        CHECK(!res.is_void);
        CHECK_EQ(f->l1[1], at(20).word);
        CHECK_EQ(f->block[1], 25 << 16);
        CHECK_EQ(f->e[1][0].word, at(21).word);
        CHECK_EQ(f->e[0][1].word, at(22).word);
        CHECK_EQ(f->e[0][2].word, at(24).word);
        CHECK_EQ(res.nr_unused, 1);
        CHECK_EQ(res.unused[0], 23);
        replay_result_fini(&res);
    } while (rc < 0);
    CHECK_EQ(cut, 6);
}

CO_TEST(extended_entries)
{
    struct fake *f = fake_new();
    struct l2_entry none = {0, 0}, part = l2_make_ext(10ull << 17 | ENTRY_COPIED, 1, 0);
    struct l2_entry more = l2_make_ext(part.word, 3, 0), both = l2_make_ext(part.word, 3, 2);
    struct journal_rec recs[] = {change(4, none, part), change(4, part, more),
                                 change(4, more, both)};
    struct replay_result res;

    f->e[0][4] = part;
    CHECK_EQ(run_as(&hdr_ext, f, recs, 2, &res), 0);
    CHECK(!res.is_void);
    CHECK_EQ(f->e[0][4].bits, 3);
    CHECK_EQ(res.nr_unused, 0);
    replay_result_fini(&res);
    CHECK_EQ(run_as(&hdr_ext, f, recs, 3, &res), 0); /* a subcluster in two states */
    CHECK(res.is_void);
    replay_result_fini(&res);
    f->e[0][4] = l2_make_ext(part.word, 2, 0); /* half of a value is none */
    CHECK_EQ(run_as(&hdr_ext, f, recs, 2, &res), 0);
    CHECK(res.is_void);
    replay_result_fini(&res);
}

/* ---- the guard in the header ---- */

static const struct guard_epoch epoch_a = {0x1122334455667788, 0x99aabbccddeeff00};

/* Sets it with our code: true if it is there afterwards. */
SUSPENDS static int set_guard(const char *name, struct guard_epoch epoch)
{
    struct blk *blk = t_open(name);
    struct qcow2_header hdr;
    struct guard_epoch got;

    CHECK_EQ(qcow2_header_read(blk, &hdr, NULL), 0);
    int rc = guard_set(blk, &hdr, epoch, NULL);
    CHECK_EQ(guard_get(&hdr, &got), rc == 0);
    CHECK_EQ(blk_flush(blk), 0);
    qcow2_header_fini(&hdr);
    blk_close(blk);
    return rc;
}

SUSPENDS static bool has_guard(const char *name, struct guard_epoch epoch)
{
    struct blk *blk = t_open(name);
    struct qcow2_header hdr;
    struct guard_epoch got = {0, 0};

    CHECK_EQ(qcow2_header_read(blk, &hdr, NULL), 0);
    bool has = guard_get(&hdr, &got);
    qcow2_header_fini(&hdr);
    blk_close(blk);
    return has && got.hi == epoch.hi && got.lo == epoch.lo;
}

CO_TEST(guard_of_an_image)
{
    struct guard_epoch other = {5, 6};
    struct qcow2_header hdr;

    t_image("guard.qcow2", &(struct image_create_opts){.virtual_len = 1 << 20});
    CHECK(!has_guard("guard.qcow2", epoch_a));
    CHECK_EQ(set_guard("guard.qcow2", epoch_a), 0);
    CHECK(has_guard("guard.qcow2", epoch_a));
    CHECK_EQ(set_guard("guard.qcow2", other), 0); /* in the same place */
    CHECK(has_guard("guard.qcow2", other));
    struct blk *blk = t_open("guard.qcow2");
    CHECK_EQ(qcow2_header_read(blk, &hdr, NULL), 0);
    CHECK_EQ(guard_clear(blk, &hdr), 0);
    CHECK_EQ(guard_clear(blk, &hdr), 0);
    qcow2_header_fini(&hdr);
    blk_close(blk);
    CHECK(!has_guard("guard.qcow2", other));
    t_image("v2.qcow2", &(struct image_create_opts){.virtual_len = 1 << 20, .version = 2});
    CHECK_EQ(set_guard("v2.qcow2", epoch_a), -ENOTSUP);
    CHECK(guard_epoch_make(&other) == 0 && (other.hi || other.lo));
}

/* No room: the header stays as it is, and is still what it was for others. */
CO_TEST(guard_without_room)
{
    char name[366];

    memset(name, 'n', sizeof(name) - 1);
    name[sizeof(name) - 1] = 0;
    t_image("tight.qcow2", &(struct image_create_opts){.virtual_len = 1 << 20,
                                                       .cluster_size = 512,
                                                       .backing_name = name,
                                                       .backing_format = "raw"});
    int rc = set_guard("tight.qcow2", epoch_a);
    CHECK_EQ(rc, -ENOSPC);
    CHECK(!has_guard("tight.qcow2", epoch_a));
    t_image("room.qcow2", &(struct image_create_opts){.virtual_len = 1 << 20,
                                                      .backing_name = name,
                                                      .backing_format = "raw"});
    CHECK_EQ(set_guard("room.qcow2", epoch_a), 0);
    CHECK(has_guard("room.qcow2", epoch_a));
}

/* What the argument says of QEMU, told by QEMU. */
CO_TEST(guard_and_qemu)
{
    static const struct {
        const char *cmd;
        bool keeps;
    } cases[] = {
        {"qemu-img check -q %1$s", true},
        {"qemu-io -r -c 'read -q 0 4k' %1$s", true},
        {"qemu-io -c 'write -q 64k 4k' %1$s.top && qemu-img commit -q %1$s.top", true},
        {"qemu-io -c 'read -q 0 4k' %1$s", false},
        {"qemu-io -c 'write -q 0 4k' %1$s", false},
        {"qemu-img check -q -r leaks %1$s", false},
        {"qemu-img check -q -r all %1$s", false},
        {"qemu-img resize -q %1$s +1M", false},
        {"qemu-img snapshot -c s %1$s", false},
        {"qemu-img amend -q -o lazy_refcounts=on %1$s", false},
        {"qemu-img rebase -q -u -b '' %1$s", false},
    };

    test_need("qemu-img");
    test_need("qemu-io");
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        char cmd[600];
        const char *path = t_path("qemu.qcow2");

        test_sh("rm -f %1$s %1$s.top; qemu-img create -q -f qcow2 %1$s 4M; "
                "qemu-img create -q -f qcow2 -b %1$s -F qcow2 %1$s.top",
                path);
        CHECK_EQ(set_guard("qemu.qcow2", epoch_a), 0);
        t_qemu_check("qemu.qcow2", 0, 0);
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
        snprintf(cmd, sizeof(cmd), cases[i].cmd, path);
#pragma GCC diagnostic pop
        test_sh("%s > /dev/null", cmd);
        if (has_guard("qemu.qcow2", epoch_a) != cases[i].keeps)
            test_fail(__FILE__, __LINE__, "the guard after: %s", cmd);
    }
}
