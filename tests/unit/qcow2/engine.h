/* An image on memory behind a device that counts, fails and stops requests. */
#ifndef VARVE_TESTS_QCOW2_ENGINE_H
#define VARVE_TESTS_QCOW2_ENGINE_H

#include "blk/blk.h"
#include "qcow2/internal.h"
#include "test.h"

struct engine {
    struct blk *mem, *fault; /* fault is in front of mem; it outlives the image */
    struct image *img;
    struct image_opts opts;
    bool fixed_len;
};

/* Creates and opens it. fixed_len: a volume of this length, full of 0xdd; 0: a file. */
SUSPENDS void engine_start(struct engine *e, const struct image_create_opts *create,
                           uint64_t fixed_len);
SUSPENDS void engine_close(struct engine *e); /* must work */
SUSPENDS void engine_open(struct engine *e);
SUSPENDS void engine_reopen(struct engine *e);
/* Forgets the image without a word, as a kill does; then opens the file anew. */
SUSPENDS void engine_kill(struct engine *e);
SUSPENDS void engine_end(struct engine *e); /* closes, checks: no corruption, no leaks */
/* Leaks of the closed or flushed image; any corruption fails the test. */
SUSPENDS uint64_t engine_leaks(struct engine *e);

SUSPENDS int engine_write(struct engine *e, uint64_t off, uint64_t len, uint8_t value,
                          unsigned flags, const struct image_below *below);
/* All bytes of the range are `value`. */
SUSPENDS void engine_expect(struct engine *e, uint64_t off, uint64_t len, uint8_t value,
                            const struct image_below *below);
SUSPENDS int engine_read(struct engine *e, uint64_t off, uint64_t len);
struct image_stats engine_stats(const struct engine *e);

/* Something below that is 0xbb throughout, and counts what is read from it. */
struct engine_below {
    struct image_below below;
    uint64_t reads, read_bytes;
};
void engine_below_init(struct engine_below *b);

#endif
