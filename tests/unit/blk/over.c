/* Writes over a device that is not changed. */
#include "base/bits.h"
#include "blk/blk.h"
#include "rt/sim.h"
#include "test.h"

#define LEN (100 * 1024u)
#define END (120 * 1024u) /* what is written behind the child's end is kept, too */

CO_TEST(memory_over_a_child)
{
    static uint8_t model[END], below[LEN], buf[END];
    uint64_t rng = test_seed();
    struct blk *child, *over;

    CHECK_EQ(blk_mem_new(0, 1, &child), 0);
    for (unsigned i = 0; i < LEN; i++)
        model[i] = below[i] = (uint8_t)(i * 7 >> 3);
    CHECK_EQ(blk_write(child, 0, below, LEN), 0);
    CHECK_EQ(blk_over_new(child, &over), 0);
    for (unsigned i = 0; i < 2000; i++) {
        uint64_t off = rng_below(&rng, END), len = 1 + rng_below(&rng, MIN(END - off, 20000ull));

        if (rng_below(&rng, 8) == 0) {
            memset(model + off, (int)i, len);
            CHECK_EQ(blk_write(over, off, model + off, len), 0);
            CHECK_EQ(blk_flush(over), 0);
        }
        len = MIN(len, over->len > off ? over->len - off : 0);
        CHECK_EQ(blk_read(over, off, buf, len), 0);
        CHECK(memcmp(buf, model + off, len) == 0);
    }
    CHECK(over->len > LEN && child->len == LEN);
    CHECK_EQ(blk_read(child, 0, buf, LEN), 0);
    CHECK(memcmp(buf, below, LEN) == 0);
    blk_close(over);
    blk_close(child);
}
