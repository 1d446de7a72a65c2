/* file.c and file_open.c: regular files, direct and buffered, tmpfs, loop devices, errors. */
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/bits.h"
#include "devices.h"
#include "rt/reactor.h"

CO_TEST(direct_file_matches_an_array)
{
    struct blk *blk = new_file(NULL, "direct", 777777, true);

    CHECK(fcntl(blk_file_fd(blk), F_GETFL) & O_DIRECT);
    CHECK(blk->align >= 512 && blk->io_unit >= 512 && !blk->fixed_len && blk->fresh_zero);
    check_against_array(blk, 1200);
    CHECK(blk->stats.bounced > 100);
    blk_close(blk);
}

CO_TEST(buffered_file_matches_an_array)
{
    struct blk *blk = new_file(NULL, "buffered", 777777, false);

    CHECK_EQ(blk->align, 1);
    check_against_array(blk, 1200);
    CHECK_EQ(blk->stats.bounced, 0);
    blk_close(blk);
}

CO_TEST(tmpfs_file_matches_an_array)
{
    struct blk *blk = new_file("/dev/shm", "varve-test-blk", 777777, true);

    unlink("/dev/shm/varve-test-blk");
    check_against_array(blk, 1200);
    blk_close(blk);
}

CO_TEST(loop_device_matches_an_array)
{
    static const unsigned sectors[] = {512, 4096};

    for (size_t i = 0; i < ARRAY_SIZE(sectors); i++) {
        struct blk *blk = new_loop(2 * MIB, sectors[i]);

        if (!blk) {
            printf("  no loop devices here\n");
            return;
        }
        CHECK_EQ(blk->len, 2 * MIB);
        CHECK_EQ(blk->align, sectors[i]);
        CHECK(blk->io_unit >= sectors[i] && blk->fixed_len && !blk->fresh_zero);
        check_against_array(blk, 800);
        check_neighbours(blk);
        CHECK_EQ(blk_write(blk, 2 * MIB - 100, sectors, 101), -ENOSPC);
        CHECK_EQ(blk_resize(blk, MIB), -ENOTSUP);
        blk_close(blk);
        drop_loop();
    }
}

CO_TEST(neighbours_on_a_direct_file)
{
    struct blk *blk = new_file(NULL, "neighbours", 0, true);

    for (unsigned i = 0; i < 5; i++)
        check_neighbours(blk);
    blk_close(blk);
}
