/*
 * The map journal's file: see journal.h.
 *
 * The order of stores is what makes it hold against a kill at any instruction: a killed thread's
 * stores up to that instruction are in the mapping, later ones are not, so the compiler's order is
 * all that counts (release stores here). A record is whole before the tail passes it; a bank is
 * whole before the session names it; a file is whole before it has its magic number.
 */
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include "base/bits.h"
#include "base/check.h"
#include "qcow2/journal.h"

#define MAGIC      0x7661727665206d61ull
#define VERSION    1u
#define HEAD_BYTES 8192u
#define BOOT_BYTES 40u

/* A run in one word, so that one store changes it. */
#define RUN_NR_BITS 17u
#define RUN_NR_MAX  ((1ull << RUN_NR_BITS) - 1)

struct bank { /* what belongs to a session */
    struct journal_id id;
    char boot_id[BOOT_BYTES];
    uint64_t first_seq; /* records below are of an earlier session */
    uint64_t is_void;
    uint64_t runs[JOURNAL_RUNS];
};
struct head {
    uint64_t magic;
    uint32_t version;
    uint32_t nr_records;
    uint64_t session; /* 0: none yet; its bank is bank[session % 2] */
    uint64_t head, tail;
    struct bank bank[2];
};
static_assert(sizeof(struct head) <= HEAD_BYTES, "head");

struct journal {
    /* fixed after open */
    int fd;
    char *path;
    char boot_id[BOOT_BYTES];
    struct head *head; /* the mapping */
    struct journal_rec *recs;
    size_t bytes;
    bool readonly;
    uint32_t nr_records;
    /* copies of what the file says: nobody else changes it */
    uint64_t session, oldest, tail;
    uint32_t reserved;
};

static void store(uint64_t *to, uint64_t value)
{
    __atomic_store_n(to, value, __ATOMIC_RELEASE);
}

static struct bank *bank_of(const struct journal *j)
{
    return &j->head->bank[j->session % 2];
}

/* ---- names ---- */

int journal_path(const char *dir, const struct journal_id *id, char *ret, size_t size)
{
    int n = snprintf(ret, size, "%s/%llx-%llx.map", dir, (unsigned long long)id->dev,
                     (unsigned long long)id->ino);

    return n < 0 || (size_t)n >= size ? -ENAMETOOLONG : 0;
}

/* ---- opening ---- */

static size_t file_bytes(uint32_t nr_records)
{
    return HEAD_BYTES + nr_records * sizeof(struct journal_rec);
}

/* The file at `path` as it is now, locked: not one that was removed while we waited. */
static int open_locked(struct journal *j, struct err *err)
{
    for (;;) {
        struct stat st, named;
        _cleanup_(closep) int fd = open(
            j->path, (j->readonly ? O_RDONLY : O_RDWR | O_CREAT) | O_CLOEXEC | O_NOFOLLOW, 0600);

        if (fd < 0)
            return err_errno(err, -errno, "open journal '%s'", j->path);
        if (flock(fd, (j->readonly ? LOCK_SH : LOCK_EX) | LOCK_NB) < 0)
            return errno == EWOULDBLOCK ? err_set(err, -EBUSY, "journal '%s' is in use", j->path)
                                        : err_errno(err, -errno, "lock journal '%s'", j->path);
        if (fstat(fd, &st) < 0)
            return err_errno(err, -errno, "journal '%s'", j->path);
        if (!S_ISREG(st.st_mode))
            return err_set(err, -EINVAL, "journal '%s' is not a file", j->path);
        if (stat(j->path, &named) < 0 || named.st_ino != st.st_ino || named.st_dev != st.st_dev)
            continue;
        j->fd = TAKE_FD(fd);
        return 0;
    }
}

/* Records of the file that is there; 0: it is no journal of ours. */
static uint32_t existing_records(int fd)
{
    struct {
        uint64_t magic;
        uint32_t version, nr_records;
    } head; /* the first members of struct head */
    struct stat st;

    if (fstat(fd, &st) < 0 || pread(fd, &head, sizeof(head), 0) != (ssize_t)sizeof(head))
        return 0;
    if (head.magic != MAGIC || head.version != VERSION || !is_pow2(head.nr_records) ||
        head.nr_records > JOURNAL_RECORDS_MAX ||
        (uint64_t)st.st_size != file_bytes(head.nr_records))
        return 0;
    return head.nr_records;
}

/* Space for all of it: a store into a page that a full file system cannot give would be a SIGBUS.
 */
static int make_empty(struct journal *j, struct err *err)
{
    int rc = ftruncate(j->fd, 0) < 0 ? -errno : 0;

    if (rc == 0)
        rc = -posix_fallocate(j->fd, 0, (off_t)j->bytes);
    if (rc == -EOPNOTSUPP || rc == -EINVAL)
        rc = ftruncate(j->fd, (off_t)j->bytes) < 0 ? -errno : 0;
    return rc < 0 ? err_errno(err, rc, "make journal '%s'", j->path) : 0;
}

static int map_file(struct journal *j, struct err *err)
{
    int prot = PROT_READ | (j->readonly ? 0 : PROT_WRITE);
    void *map = mmap(NULL, j->bytes, prot, MAP_SHARED, j->fd, 0);

    if (map == MAP_FAILED)
        return err_errno(err, -errno, "map journal '%s'", j->path);
    j->head = map;
    j->recs = (struct journal_rec *)((char *)map + HEAD_BYTES);
    return 0;
}

static int read_boot_id(char *ret, const char *given, struct err *err)
{
    _cleanup_(closep) int fd = -1;

    memset(ret, 0, BOOT_BYTES);
    if (given) {
        strncpy(ret, given, BOOT_BYTES - 1);
        return 0;
    }
    fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, ret, BOOT_BYTES - 1);
    if (n <= 0)
        return err_errno(err, n < 0 ? -errno : -EIO, "read the boot id");
    ret[strcspn(ret, "\n")] = 0;
    return 0;
}

/* What the file says; values that cannot be mean that it says nothing. */
static void adopt_state(struct journal *j)
{
    const struct head *head = j->head;

    j->session = head->session;
    j->tail = head->tail;
    j->oldest = MAX(head->head, bank_of(j)->first_seq);
    if (j->session == 0 || j->oldest > j->tail || j->tail - j->oldest > j->nr_records)
        j->oldest = j->tail;
}

static int open_file(struct journal *j, uint32_t nr_new, struct err *err)
{
    int rc = open_locked(j, err);

    if (rc < 0)
        return rc;
    j->nr_records = existing_records(j->fd);
    bool is_new = j->nr_records == 0;
    if (is_new && j->readonly)
        return err_set(err, -ENOENT, "'%s' is no journal", j->path);
    if (is_new)
        j->nr_records = nr_new;
    j->bytes = file_bytes(j->nr_records);
    rc = is_new ? make_empty(j, err) : 0;
    if (rc == 0)
        rc = map_file(j, err);
    if (rc == 0 && is_new) {
        j->head->version = VERSION;
        j->head->nr_records = j->nr_records;
        store(&j->head->magic, MAGIC);
    }
    return rc;
}

int journal_open(const char *path, const struct journal_opts *opts, struct journal **ret,
                 struct err *err)
{
    uint32_t nr_new = opts->nr_records ? opts->nr_records : JOURNAL_RECORDS;
    struct journal *j = calloc(1, sizeof(*j));

    if (!is_pow2(nr_new) || nr_new > JOURNAL_RECORDS_MAX) {
        free(j);
        return err_set(err, -EINVAL, "a journal cannot have %u records", nr_new);
    }
    if (!j || !(j->path = strdup(path))) {
        free(j);
        return err_errno(err, -ENOMEM, "open journal");
    }
    j->fd = -1;
    j->readonly = opts->readonly;
    int rc = read_boot_id(j->boot_id, opts->boot_id, err);
    if (rc == 0)
        rc = open_file(j, nr_new, err);
    if (rc < 0) {
        journal_close(j);
        return rc;
    }
    adopt_state(j);
    *ret = j;
    return 0;
}

void journal_close(struct journal *j)
{
    if (!j)
        return;
    if (j->head)
        munmap(j->head, j->bytes);
    if (j->fd >= 0)
        close(j->fd);
    free(j->path);
    free(j);
}

void journal_remove(struct journal *j)
{
    if (j && !j->readonly)
        (void)unlink(j->path); /* under the lock: whoever waits for it opens another one */
    journal_close(j);
}

/* ---- journals that are nobody's ---- */

void journal_forget(const char *dir, const struct journal_id *id)
{
    char path[512];
    struct journal *j;

    if (journal_path(dir, id, path, sizeof(path)) < 0 || access(path, F_OK) < 0)
        return;
    if (journal_open(path, &(struct journal_opts){0}, &j, NULL) == 0)
        journal_remove(j);
}

static bool is_of_this_boot(const struct journal *j)
{
    return j->session && strncmp(bank_of(j)->boot_id, j->boot_id, BOOT_BYTES) == 0;
}

void journal_sweep(const char *dir)
{
    DIR *d = opendir(dir);
    struct dirent *e;

    while (d && (e = readdir(d))) {
        char path[512];
        struct journal *j;
        size_t len = strlen(e->d_name);

        if (len < 4 || strcmp(e->d_name + len - 4, ".map") != 0 ||
            (size_t)snprintf(path, sizeof(path), "%s/%s", dir, e->d_name) >= sizeof(path) ||
            journal_open(path, &(struct journal_opts){0}, &j, NULL) < 0)
            continue;
        if (is_of_this_boot(j))
            journal_close(j);
        else
            journal_remove(j);
    }
    if (d)
        closedir(d);
}

/* ---- records ---- */

static uint64_t mix(uint64_t h, uint64_t word)
{
    h = (h ^ word) * 0x9e3779b97f4a7c15ull;
    return h ^ h >> 32;
}

static uint64_t check_of(const struct journal_rec *r, uint64_t session)
{
    uint64_t h = mix(r->seq, session);

    h = mix(h, r->first);
    h = mix(h, (uint64_t)r->nr << 32 | (uint64_t)r->kind << 16 | r->steps);
    h = mix(mix(h, r->old.word), r->old.bits);
    h = mix(mix(h, r->new.word), r->new.bits);
    return h;
}

static struct journal_rec *place_of(const struct journal *j, uint64_t seq)
{
    return &j->recs[seq & (j->nr_records - 1)];
}

static bool is_whole(const struct journal *j, uint64_t seq)
{
    const struct journal_rec *r = place_of(j, seq);

    return r->seq == seq && r->check == check_of(r, j->session);
}

int journal_match(const struct journal *j, const struct journal_id *id, const char **ret_why)
{
    const struct head *head = j->head;
    const struct bank *bank = bank_of(j);
    uint64_t from = MAX(head->head, bank->first_seq);

    *ret_why = NULL;
    if (j->session == 0)
        *ret_why = "it was never used";
    else if (bank->is_void)
        *ret_why = "its writer had a failed flush";
    else if (strncmp(bank->boot_id, j->boot_id, BOOT_BYTES) != 0)
        *ret_why = "it is of an earlier boot";
    else if (bank->id.dev != id->dev || bank->id.ino != id->ino)
        *ret_why = "it is of another file";
    else if (bank->id.epoch.hi != id->epoch.hi || bank->id.epoch.lo != id->epoch.lo)
        *ret_why = "the image was opened by others since";
    if (*ret_why)
        return -ESTALE;
    *ret_why = "it is damaged";
    if (from > head->tail || head->tail - from > j->nr_records)
        return -EUCLEAN;
    for (uint64_t seq = from; seq < head->tail; seq++)
        if (!is_whole(j, seq))
            return -EUCLEAN;
    *ret_why = NULL;
    return 0;
}

int journal_records(const struct journal *j, struct journal_rec **ret, size_t *ret_nr)
{
    size_t nr = j->tail - j->oldest;
    _cleanup_(freep) struct journal_rec *recs = calloc(nr + 1, sizeof(*recs));

    if (!recs)
        return -ENOMEM;
    for (size_t i = 0; i < nr; i++) {
        if (!is_whole(j, j->oldest + i))
            return -EUCLEAN;
        recs[i] = *place_of(j, j->oldest + i);
    }
    *ret = TAKE_PTR(recs);
    *ret_nr = nr;
    return 0;
}

static bool reserve(struct journal *j, unsigned nr, uint32_t limit)
{
    if (j->tail - j->oldest + j->reserved + nr > limit)
        return false;
    j->reserved += nr;
    return true;
}

bool journal_reserve(struct journal *j, unsigned nr)
{
    return reserve(j, nr, j->nr_records - j->nr_records / JOURNAL_SPARE_PART);
}

bool journal_reserve_spare(struct journal *j)
{
    return reserve(j, 1, j->nr_records);
}

void journal_unreserve(struct journal *j, unsigned nr)
{
    DEBUG_CHECK(nr <= j->reserved);
    j->reserved -= nr;
}

void journal_append(struct journal *j, const struct journal_rec *rec)
{
    struct journal_rec *to = place_of(j, j->tail);

    journal_unreserve(j, 1);
    *to = *rec;
    to->seq = j->tail;
    to->check = check_of(to, j->session);
    store(&j->head->tail, ++j->tail);
}

uint64_t journal_next(const struct journal *j)
{
    return j->tail;
}

uint64_t journal_oldest(const struct journal *j)
{
    return j->oldest;
}

void journal_trim(struct journal *j, uint64_t seq)
{
    DEBUG_CHECK(seq <= j->tail);
    if (seq <= j->oldest)
        return;
    j->oldest = seq;
    store(&j->head->head, seq);
}

/* ---- runs of like changes in one record ---- */

static struct l2_entry step(const struct qcow2_header *hdr, struct l2_entry e, bool steps,
                            uint32_t i)
{
    if (steps)
        e.word += (uint64_t)i << hdr->cluster_bits;
    return e;
}

struct l2_entry journal_old(const struct journal_rec *rec, const struct qcow2_header *hdr,
                            uint32_t i)
{
    return step(hdr, rec->old, rec->steps & JOURNAL_OLD_STEPS, i);
}

struct l2_entry journal_new(const struct journal_rec *rec, const struct qcow2_header *hdr,
                            uint32_t i)
{
    return step(hdr, rec->new, rec->steps & JOURNAL_NEW_STEPS, i);
}

/* Does `e` go on where the record's entries end? The second one decides whether they step. */
static bool goes_on(const struct qcow2_header *hdr, const struct journal_rec *rec,
                    struct l2_entry first, struct l2_entry e, uint16_t flag, uint16_t *steps)
{
    if (e.bits != first.bits)
        return false;
    if (rec->nr == 1 && e.word != first.word)
        *steps |= flag;
    return e.word == step(hdr, first, *steps & flag, rec->nr).word;
}

bool journal_extend(struct journal_rec *rec, const struct qcow2_header *hdr, struct l2_entry old,
                    struct l2_entry new)
{
    uint16_t steps = rec->steps;

    if (rec->nr == 0 || rec->kind != JOURNAL_ENTRIES ||
        !goes_on(hdr, rec, rec->old, old, JOURNAL_OLD_STEPS, &steps) ||
        !goes_on(hdr, rec, rec->new, new, JOURNAL_NEW_STEPS, &steps))
        return false;
    rec->steps = steps;
    rec->nr++;
    return true;
}

/* ---- sessions ---- */

static uint64_t pack_run(uint64_t first, uint64_t nr)
{
    return first << RUN_NR_BITS | MIN(nr, (uint64_t)RUN_NR_MAX);
}

void journal_begin(struct journal *j, const struct journal_id *id, const struct journal_run *runs,
                   size_t nr)
{
    struct bank *bank = &j->head->bank[(j->session + 1) % 2];

    DEBUG_CHECK(!j->readonly && j->reserved == 0);
    memset(bank, 0, sizeof(*bank));
    bank->id = *id;
    memcpy(bank->boot_id, j->boot_id, BOOT_BYTES);
    /* numbers go on: a record of an earlier session never stands in the right place */
    bank->first_seq = j->tail;
    for (size_t i = 0; i < MIN(nr, (size_t)JOURNAL_RUNS); i++)
        bank->runs[i] = pack_run(runs[i].first, runs[i].nr);
    j->oldest = j->tail;
    store(&j->head->session, ++j->session);
}

void journal_void(struct journal *j)
{
    store(&bank_of(j)->is_void, 1);
}

/* ---- unused runs ---- */

int journal_run_add(struct journal *j, uint64_t first, uint64_t nr)
{
    uint64_t *runs = bank_of(j)->runs;

    for (int i = 0; i < (int)JOURNAL_RUNS; i++) {
        if (runs[i] & RUN_NR_MAX)
            continue;
        journal_run_set(j, i, first, nr);
        return i;
    }
    return -1;
}

void journal_run_set(struct journal *j, int place, uint64_t first, uint64_t nr)
{
    DEBUG_CHECK(place < (int)JOURNAL_RUNS);
    if (place >= 0)
        store(&bank_of(j)->runs[place], nr ? pack_run(first, nr) : 0);
}

struct journal_run journal_run_get(const struct journal *j, unsigned place)
{
    uint64_t word = bank_of(j)->runs[place];

    return (struct journal_run){word >> RUN_NR_BITS, word & RUN_NR_MAX};
}
