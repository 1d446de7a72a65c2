/*
 * The map journal: a ring of mapping changes in shared memory, so that an answered write outlives
 * a kill of the process. docs/durability.md has the argument, replay.h the way back.
 *
 * A journal is a file in the runtime directory, mapped: an append is a few stores, no system call,
 * no allocation, and what was stored survives the process (not the machine: that is the boot id's
 * part).
 *
 *   file:   | head: session, head, tail, 2 banks | records, a ring |
 *   record: |<-- 64 bytes: number, checksum, place, old entry, new entry -->|
 *
 *   head <= records of this session that are not yet in the image <= tail
 *
 *  1. A record counts from the moment the tail has passed it; it is whole before. One store of 8
 * bytes each publishes a record, trims, or changes the session: a kill falls before or behind it.
 *  2. What belongs to a session (guard, first record, unused runs) lies in one of two banks; a new
 *     session is prepared in the other one.
 *  3. Room is reserved before anything of a change is done, so an append cannot fail.
 *  4. Only a journal whose guard is that of the image says anything about it.
 *
 * One process at a time writes (a lock on the file says so), from one reactor. Nothing here waits
 * for I/O of the image; open and close call the file system of the runtime directory, which is
 * memory.
 */
#ifndef VARVE_QCOW2_JOURNAL_H
#define VARVE_QCOW2_JOURNAL_H

#include <assert.h>
#include <stdbool.h>
#include <stdint.h>
#include "base/err.h"
#include "qcow2/entry.h"
#include "qcow2/guard.h"

struct journal;

#define JOURNAL_RECORDS     32768u /* 2 MiB */
#define JOURNAL_RECORDS_MAX 65536u
#define JOURNAL_RUNS        256u
#define JOURNAL_SPARE_PART  64u /* one in so many places is spare */

enum journal_kind {
    JOURNAL_ENTRIES = 1, /* L2 entries of guest clusters */
    JOURNAL_TABLE = 2,   /* an L1 entry: words in old.word and new.word */
    JOURNAL_BLOCK = 3,   /* an entry of the refcount table, likewise */
};
/* The n-th cluster's entry has a host cluster n further on than the first one's. */
#define JOURNAL_OLD_STEPS 1u
#define JOURNAL_NEW_STEPS 2u

/* As it lies in the file, in the host's order: it never leaves the host. */
struct journal_rec {
    uint64_t seq, check; /* journal_append fills them */
    uint64_t first;      /* guest cluster; TABLE, BLOCK: index in the table */
    uint32_t nr;         /* clusters; TABLE, BLOCK: 1 */
    uint16_t kind;       /* enum journal_kind */
    uint16_t steps;      /* JOURNAL_OLD_STEPS, JOURNAL_NEW_STEPS */
    struct l2_entry old, new;
};
static_assert(sizeof(struct journal_rec) == 64, "a record is a cache line");

/* Whose journal it is: a file or device (blk_identity), and the epoch in its header. */
struct journal_id {
    uint64_t dev, ino;
    struct guard_epoch epoch;
};
/* "DIR/DEV-INO.map". -ENAMETOOLONG. */
int journal_path(const char *dir, const struct journal_id *id, char *ret, size_t size);

struct journal_opts {
    bool readonly; /* for images that are opened so; the file must exist (-ENOENT) */
    uint32_t
        nr_records; /* of a new file; a power of two, at most JOURNAL_RECORDS_MAX; 0: default */
    const char *boot_id; /* NULL: the kernel's */
};
/* Opens or makes the file. A file that is no journal of this version is made anew: it says nothing.
 * -EBUSY while another process has it. All of its space is there afterwards: no store can fail. */
int journal_open(const char *path, const struct journal_opts *opts, struct journal **ret,
                 struct err *err);
/* The file stays, with what is in it; NULL is fine. */
void journal_close(struct journal *j);
/* After everything in it is in the image: the file goes, too. */
void journal_remove(struct journal *j);
/* The image is gone, and its number may come again: its journal goes too, unless a process has it. */
void journal_forget(const char *dir, const struct journal_id *id);
/* Journals of earlier boots say nothing any more: they go. */
void journal_sweep(const char *dir);

/* ---- what a dead process left ---- */
/* 0: this journal is of this image, this epoch, this boot, and whole. -ESTALE: it is not, *ret_why
 * (static text) says what differs; -EUCLEAN: it is damaged. */
int journal_match(const struct journal *j, const struct journal_id *id, const char **ret_why);
/* All records, oldest first; the caller frees. -EUCLEAN. */
int journal_records(const struct journal *j, struct journal_rec **ret, size_t *ret_nr);

/* ---- a session ---- */
/* Host clusters that were counted but not used: what is left of runs. */
struct journal_run {
    uint64_t first, nr;
};
/* The journal is empty and of `id` from here on, with these runs in places 0, 1, ...; those that
 * do not fit are left out. Everything that was in it must be in the image and flushed. */
void journal_begin(struct journal *j, const struct journal_id *id, const struct journal_run *runs,
                   size_t nr);
/* It says nothing any more: a flush failed, nobody knows what the disk holds. */
void journal_void(struct journal *j);

/* Room for nr records, kept for the caller. False: full; after a flush (journal_trim) there is
 * room. */
bool journal_reserve(struct journal *j, unsigned nr);
void journal_unreserve(struct journal *j, unsigned nr);
/* One place of those that journal_reserve leaves free: for who cannot wait for a flush. */
bool journal_reserve_spare(struct journal *j);
/* Publishes a record, in a reserved place. The data it maps has been written. */
void journal_append(struct journal *j, const struct journal_rec *rec);
/* The number that the next record will have. */
uint64_t journal_next(const struct journal *j);
/* Records below `seq` are in the image and flushed. */
void journal_trim(struct journal *j, uint64_t seq);
/* The oldest number not trimmed; equal to journal_next() when it is empty. */
uint64_t journal_oldest(const struct journal *j);

/* One cluster more at the end of a record: true if its old and new entry go on as the ones before.
 * The record's nr is counted up then. */
bool journal_extend(struct journal_rec *rec, const struct qcow2_header *hdr, struct l2_entry old,
                    struct l2_entry new);
/* The entry of a record's i-th cluster. */
struct l2_entry journal_old(const struct journal_rec *rec, const struct qcow2_header *hdr,
                            uint32_t i);
struct l2_entry journal_new(const struct journal_rec *rec, const struct qcow2_header *hdr,
                            uint32_t i);

/* ---- unused runs ---- */
/* Notes a run; its place, or -1 when all are taken (a kill then leaks it). */
int journal_run_add(struct journal *j, uint64_t first, uint64_t nr);
/* The run in a place is now so: before a cluster that leaves it is used, behind one that came back.
 * nr 0 frees the place; place -1 is ignored. */
void journal_run_set(struct journal *j, int place, uint64_t first, uint64_t nr);
/* Runs of the session that is there; place by place, nr 0 where there is none. */
struct journal_run journal_run_get(const struct journal *j, unsigned place);

#endif
