/* main() of every unit test program: runs the registered tests in order of their definition. */
#include <stdarg.h>
#include <sys/wait.h>
#include <unistd.h>
#include "rt/reactor.h"
#include "test.h"

static struct test *first, **tail = &first;
static const struct test *running;
static char dir[64];

void test_register(struct test *t)
{
    *tail = t;
    tail = &t->next;
}

void test_fail(const char *file, int line, const char *fmt, ...)
{
    va_list ap;

    fflush(stdout);
    fprintf(stderr, "FAIL %s (seed %llu) %s:%d: ", running ? running->name : "?",
            (unsigned long long)test_seed(), file, line);
    va_start(ap, fmt);
    vfprintf(stderr, fmt, ap);
    va_end(ap);
    fprintf(stderr, "%s%s\n", dir[0] ? "\n  files kept in " : "", dir);
    _exit(1);
}

const char *test_dir(void)
{
    if (!dir[0]) {
        snprintf(dir, sizeof(dir), "/var/tmp/varve-test-XXXXXX");
        if (!mkdtemp(dir))
            test_fail(__FILE__, __LINE__, "mkdtemp failed");
    }
    return dir;
}

static int run_sh(const char *fmt, va_list ap)
{
    static char cmd[4096];

    vsnprintf(cmd, sizeof(cmd), fmt, ap);
    fflush(stdout);
    int st = system(cmd);
    return WIFEXITED(st) ? WEXITSTATUS(st) : 128 + WTERMSIG(st);
}

void test_sh(const char *fmt, ...)
{
    va_list ap;

    va_start(ap, fmt);
    int rc = run_sh(fmt, ap);
    va_end(ap);
    if (rc != 0) {
        static char cmd[3500];

        va_start(ap, fmt);
        vsnprintf(cmd, sizeof(cmd), fmt, ap);
        va_end(ap);
        test_fail(__FILE__, __LINE__, "exit %d: %s", rc, cmd);
    }
}

int test_sh_rc(const char *fmt, ...)
{
    va_list ap;

    va_start(ap, fmt);
    int rc = run_sh(fmt, ap);
    va_end(ap);
    return rc;
}

void test_need(const char *tool)
{
    if (test_sh_rc("command -v %s >/dev/null 2>&1", tool) != 0) {
        printf("SKIP: %s is not installed\n", tool);
        exit(77);
    }
}

uint64_t test_seed(void)
{
    const char *s = getenv("VARVE_SEED");

    return s ? strtoull(s, NULL, 0) : 20261130;
}

static int call_body(void *arg)
{
    const struct test *t = arg;

    t->fn();
    return 0;
}

int main(int argc, char **argv)
{
    unsigned nr = 0;

    for (const struct test *t = first; t; t = t->next) {
        if (argc > 1 && strcmp(argv[1], t->name) != 0)
            continue;
        running = t;
        if (t->in_co)
            reactor_run(call_body, (void *)(uintptr_t)t);
        else
            t->fn();
        printf("ok %s\n", t->name);
        nr++;
    }
    if (dir[0])
        test_sh("rm -rf %s", dir);
    printf("%u tests\n", nr);
    return nr ? 0 : 1;
}
