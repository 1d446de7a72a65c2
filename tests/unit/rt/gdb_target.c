/* What the test of tools/gdb/co.py looks at: coroutines in known places when co_gdb_stop() is met.
 */
#include <sys/socket.h>
#include <unistd.h>
#include "rt/reactor.h"
#include "rt/timer.h"
#include "rt/wait.h"

void co_gdb_stop(void);
__attribute__((noinline)) void co_gdb_stop(void)
{
    __asm__ volatile("");
}

__attribute__((noinline)) SUSPENDS static int inner_receive(int fd)
{
    char c;
    int rc = (int)io_recv(fd, &c, 1);

    __asm__ volatile("");
    return rc;
}

SUSPENDS static int outer_receive(void *arg)
{
    int rc = inner_receive(*(int *)arg);

    __asm__ volatile("");
    return rc;
}

SUSPENDS static int sleep_in_queue(void *arg)
{
    wait_queue_sleep(arg);
    __asm__ volatile("");
    return 0;
}

SUSPENDS static int target_main(void *arg)
{
    struct wait_queue q;
    struct co_group g;
    int sp[2];

    if (socketpair(AF_UNIX, SOCK_STREAM, 0, sp) < 0)
        return 1;
    wait_queue_init(&q);
    co_group_init(&g);
    co_group_spawn(&g, outer_receive, &sp[0]);
    co_group_spawn(&g, sleep_in_queue, &q);
    timer_sleep(NSEC_PER_MSEC);
    co_gdb_stop();
    wait_queue_wake_one(&q);
    close(sp[1]);
    return co_group_wait(&g);
}

int main(void)
{
    return reactor_run(target_main, NULL);
}
