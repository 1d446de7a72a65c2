/* Devices of every kind for the tests of blk/, and the checks that all of them pass. */
#ifndef VARVE_TESTS_BLK_DEVICES_H
#define VARVE_TESTS_BLK_DEVICES_H

#include "blk/blk.h"
#include "test.h"

/* A new file of this length under dir (the test's own directory if NULL). */
SUSPENDS struct blk *new_file(const char *dir, const char *name, uint64_t len, bool direct);
/* A loop device of this length and sector size; NULL where they cannot be made. */
SUSPENDS struct blk *new_loop(uint64_t len, unsigned sector);
void drop_loop(void); /* after its blk_close */

/* Random reads, writes, zeroes, discards and resizes against a plain array. */
SUSPENDS void check_against_array(struct blk *blk, unsigned nr_ops);
/* Many coroutines write neighbouring pieces of the same blocks at once: no write may be lost. */
SUSPENDS void check_neighbours(struct blk *blk);

#endif
