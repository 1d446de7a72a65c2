/* Coroutines by hand, without a reactor: stacks, alignment, recycling. */
#include <alloca.h>
#include "base/own.h"
#include "test.h"

static unsigned steps;

SUSPENDS static void three_steps(void *arg)
{
    unsigned *count = arg;

    for (unsigned i = 0; i < 3; i++) {
        ++*count;
        co_suspend();
    }
    steps++;
}

TEST(co_runs_in_steps)
{
    unsigned count = 0;
    struct co *co = co_new(three_steps, &count);

    CHECK(co && !co_ended(co) && co_self() == NULL);
    steps = 0;
    for (unsigned i = 1; i <= 3; i++) {
        co_enter(co);
        CHECK_EQ(count, i);
        CHECK(!co_ended(co));
    }
    co_enter(co);
    CHECK(co_ended(co));
    CHECK_EQ(steps, 1);
    co_free(co);
}

TEST(co_free_takes_one_never_entered)
{
    co_free(co_new(three_steps, NULL));
    co_pool_trim();
}

static void check_alignment(void *arg)
{
    struct {
        _Alignas(16) char data[16];
    } local;

    /* By hand: the compiler would fold a check of what it may assume. */
    uintptr_t frame = (uintptr_t)__builtin_frame_address(0);
    __asm__("" : "+r"(frame));
    *(bool *)arg = frame % 16 == 0;
    local.data[0] = 0;
    __asm__ volatile("" : : "r"(&local) : "memory");
}

/* Also when the coroutine is a recycled one. */
TEST(co_stack_is_aligned_at_entry)
{
    for (unsigned i = 0; i < 100; i++) {
        bool aligned = false;
        struct co *co = co_new(check_alignment, &aligned);

        co_enter(co);
        CHECK(aligned);
        co_free(co);
    }
}

/* vararg floating point saves SSE registers with aligned moves on x86-64 */
static void print_double(void *arg)
{
    char text[32];

    snprintf(text, sizeof(text), "%.3f", *(double *)arg);
    CHECK_STR(text, "2.500");
}

TEST(co_calls_the_c_library)
{
    double d = 2.5;
    struct co *co = co_new(print_double, &d);

    co_enter(co);
    CHECK(co_ended(co));
    co_free(co);
}

static void use_stack(void *arg)
{
    size_t len = *(size_t *)arg;
    char *p = alloca(len);

    for (size_t i = 0; i < len; i += 512)
        ((volatile char *)p)[i] = 1;
}

TEST(co_stack_has_the_promised_length)
{
    for (unsigned i = 0; i < 64; i++) {
        size_t len = CO_STACK_LEN - 2048;
        struct co *co = co_new(use_stack, &len);

        co_enter(co);
        CHECK(co_ended(co));
        co_free(co);
    }
}

struct keeper {
    uint64_t seed;
    bool ok;
};

/* Values in registers and on the stack survive other coroutines' turns. */
SUSPENDS static void keep_values(void *arg)
{
    struct keeper *k = arg;
    uint64_t a = k->seed, b = a * 3, c = a * 5, d = a * 7, e = a * 11, f = a * 13;
    double x = (double)a, y = x * 2;

    for (unsigned i = 0; i < 10; i++) {
        __asm__ volatile("" : "+r"(a), "+r"(b), "+r"(c), "+r"(d), "+r"(e), "+r"(f));
        co_suspend();
    }
    k->ok = b == a * 3 && c == a * 5 && d == a * 7 && e == a * 11 && f == a * 13 && y == 2 * x;
}

TEST(co_many_at_once_keep_their_values)
{
    enum { NR = 200 };
    static struct keeper keepers[NR];
    static struct co *cos[NR];

    for (unsigned i = 0; i < NR; i++) {
        keepers[i].seed = i * 1000003u + 17;
        cos[i] = co_new(keep_values, &keepers[i]);
        CHECK(cos[i]);
    }
    for (bool left = true; left;) {
        left = false;
        for (unsigned i = 0; i < NR; i++) {
            if (co_ended(cos[i]))
                continue;
            co_enter(cos[i]);
            left = true;
        }
    }
    for (unsigned i = 0; i < NR; i++) {
        CHECK(keepers[i].ok);
        co_free(cos[i]);
    }
    co_pool_trim();
}

static void note_self(void *arg)
{
    *(struct co **)arg = co_self();
}

TEST(co_self_is_the_running_one)
{
    struct co *seen = NULL;
    struct co *co = co_new(note_self, &seen);

    co_enter(co);
    CHECK(seen == co && co_self() == NULL);
    co_free(co);
}
