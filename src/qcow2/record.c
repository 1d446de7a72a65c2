/* Changes of the map into the journal: see journal.h. */
#include "base/bits.h"
#include "base/check.h"
#include "qcow2/internal.h"

int room_take(struct image *img, uint64_t guest_off, uint64_t len, struct room *ret)
{
    uint64_t end = MIN(guest_off + len, slice_end(img, guest_off));
    unsigned want = (unsigned)(guest_cluster(img, end - 1) - guest_cluster(img, guest_off)) + 2;

    ret->left = 0;
    while (img->ack.is_on && !journal_reserve(img->ack.journal, want)) {
        /* full: a flush empties it, or those who hold the rest give it back */
        if (journal_oldest(img->ack.journal) == journal_next(img->ack.journal)) {
            wait_queue_sleep(&img->journal_room);
            continue;
        }
        int rc = image_flush(img);
        if (rc < 0)
            return rc;
    }
    ret->left = img->ack.is_on ? want : 0;
    return 0;
}

void room_drop(struct image *img, struct room *room)
{
    if (room->left && img->ack.is_on)
        journal_unreserve(img->ack.journal, room->left);
    room->left = 0;
    wait_queue_wake_all(&img->journal_room);
}

static void append(struct image *img, struct room *room, const struct journal_rec *rec)
{
    DEBUG_CHECK(room->left > 0);
    room->left--;
    journal_append(img->ack.journal, rec);
}

void record_put(struct image *img, struct room *room, struct journal_rec *rec)
{
    if (rec->nr)
        append(img, room, rec);
    rec->nr = 0;
}

void record_entry(struct image *img, struct room *room, struct journal_rec *rec, uint64_t guest_off,
                  struct l2_entry old, struct l2_entry new)
{
    uint64_t cluster = guest_cluster(img, guest_off);

    if (!img->ack.is_on || (flush_mutation == ACK_SKIP_ENTRY && cluster % 8 == 3))
        return;
    if (rec->nr && rec->first + rec->nr == cluster && journal_extend(rec, &img->hdr, old, new))
        return;
    record_put(img, room, rec);
    *rec = (struct journal_rec){
        .kind = JOURNAL_ENTRIES, .nr = 1, .first = cluster, .old = old, .new = new};
}

void record_table(struct image *img, struct room *room, uint64_t index, uint64_t old, uint64_t new)
{
    struct journal_rec rec = {.kind = JOURNAL_TABLE, .nr = 1, .first = index};

    if (!img->ack.is_on || flush_mutation == ACK_SKIP_TABLE)
        return;
    rec.old.word = old & ~L1_MEMORY_BITS;
    rec.new.word = new & ~L1_MEMORY_BITS;
    append(img, room, &rec);
}

/* A place of those that room_take leaves free: what waits for alloc_lock cannot give any back. */
int room_for_block(struct image *img)
{
    while (img->ack.is_on && !journal_reserve_spare(img->ack.journal)) {
        int rc = flush_to_disk(img);

        if (rc < 0)
            return rc;
    }
    return 0;
}

void record_block(struct image *img, uint64_t index, uint64_t old)
{
    struct journal_rec rec = {.kind = JOURNAL_BLOCK, .nr = 1, .first = index};

    if (!img->ack.is_on)
        return;
    rec.old.word = old;
    rec.new.word = img->reftable[index];
    if (flush_mutation == ACK_SKIP_BLOCK)
        journal_unreserve(img->ack.journal, 1);
    else
        journal_append(img->ack.journal, &rec);
}

void record_run(struct image *img, struct host_run *run)
{
    if (!img->ack.is_on || (flush_mutation == ACK_STALE_RUNS && run->place && run->nr))
        return;
    if (run->place)
        journal_run_set(img->ack.journal, (int)run->place - 1, run->first, run->nr);
    else if (run->nr)
        run->place = (unsigned)(journal_run_add(img->ack.journal, run->first, run->nr) + 1);
    if (!run->nr)
        run->place = 0;
}

void record_trim(struct image *img, uint64_t seq)
{
    if (!img->ack.is_on)
        return;
    journal_trim(img->ack.journal, seq);
    wait_queue_wake_all(&img->journal_room);
}

/* A flush that began behind the last call is done, or will be: nothing is as old as that. A guest
 * that flushes often enough takes no flush more. */
static bool is_flushed_since(const struct image *img)
{
    return img->flush_started > img->old_run && (img->flush_running || img->flush_rc == 0);
}

/* Something that was there at the last call still is. With a journal data counts too: what was
 * answered survives power loss as well, once it is old enough. */
static bool has_old(const struct image *img)
{
    if (is_flushed_since(img))
        return false;
    if (img->ack.is_on && journal_oldest(img->ack.journal) < img->old_seq)
        return true;
    return img->was_unwritten && (image_is_unwritten(img) || (img->ack.is_on && img->unflushed));
}

int image_write_back_old(struct image *img)
{
    int rc = 0;

    if (!img->writable)
        return 0;
    if (has_old(img))
        rc = image_write_back(img);
    img->old_seq = img->ack.is_on ? journal_next(img->ack.journal) : 0;
    img->old_run = img->flush_started;
    img->was_unwritten = image_is_unwritten(img) || img->unflushed;
    return rc;
}
