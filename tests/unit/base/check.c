/* Assertions abort; crash points end the process at the pass they are told to. */
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
#include "base/check.h"
#include "test.h"

/* Runs fn in a child process and returns its wait status. */
static int status_of(void (*fn)(void))
{
    pid_t pid = fork();
    int status;

    CHECK(pid >= 0);
    if (pid == 0) {
        if (!freopen("/dev/null", "w", stderr))
            _exit(3);
        fn();
        _exit(0);
    }
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    return status;
}

static void break_promise(void)
{
    CHECK_THAT(1 + 1 == 3);
}

static void keep_promise(void)
{
    CHECK_THAT(1 + 1 == 2);
    DEBUG_CHECK(true);
}

TEST(check_that_aborts)
{
    int status = status_of(break_promise);

    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    CHECK_EQ(status_of(keep_promise), 0);
}

/* Exits with the number of passes that were survived. */
static void pass_points(void)
{
    for (int i = 0; i < 5; i++) {
        crash_point("other");
        crash_point("here");
        if (i == 2)
            crash_point("once");
    }
}

TEST(crash_point_kills_at_the_nth_pass)
{
    int status;

    unsetenv("VARVE_CRASH_AT");
    CHECK_EQ(status_of(pass_points), 0);
    setenv("VARVE_CRASH_AT", "here", 1);
    status = status_of(pass_points);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    setenv("VARVE_CRASH_AT", "once:1", 1);
    status = status_of(pass_points);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    setenv("VARVE_CRASH_AT", "once:2", 1);
    CHECK_EQ(status_of(pass_points), 0);
    setenv("VARVE_CRASH_AT", "her:1", 1);
    CHECK_EQ(status_of(pass_points), 0);
    unsetenv("VARVE_CRASH_AT");
}

TEST(crash_points_can_be_listed)
{
    char path[100], line[32];
    unsigned lines = 0, once = 0;

    snprintf(path, sizeof(path), "%s/points", test_dir());
    setenv("VARVE_CRASH_LIST", path, 1);
    CHECK_EQ(status_of(pass_points), 0);
    unsetenv("VARVE_CRASH_LIST");
    FILE *f = fopen(path, "re");
    CHECK(f);
    while (fgets(line, sizeof(line), f)) {
        lines++;
        once += strcmp(line, "once\n") == 0;
    }
    fclose(f);
    CHECK_EQ(lines, 11);
    CHECK_EQ(once, 1);
}
