/*
 * The test program's frame. A test file is a list of TEST(name) { ... } and CO_TEST(name) { ... }
 * (the body runs as the main coroutine of a real reactor); tests/lib/test.c has main().
 * A failed CHECK prints file:line and both values and ends the test program with status 1.
 * Exit 77 = skipped (a tool is missing).
 */
#ifndef VARVE_TESTS_TEST_H
#define VARVE_TESTS_TEST_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "rt/co.h"

struct test {
    const char *name;
    void (*fn)(void);
    bool in_co;
    struct test *next;
};
void test_register(struct test *t);
_Noreturn void test_fail(const char *file, int line, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
/* A fresh directory, removed when the program ends well; the same one for all tests of a program.
 */
const char *test_dir(void);
/* Runs a shell command; fails the test unless it exits with 0. The text is printed on failure. */
void test_sh(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
/* The same, returning the exit status. */
int test_sh_rc(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
/* Ends the program with 77 unless the tool is in PATH. */
void test_need(const char *tool);
/* Seed of this run: $VARVE_SEED or a fixed default; printed on failure. */
uint64_t test_seed(void);

#define TEST_(test_name, co, attr)                                                                 \
    attr static void test_name##_body(void);                                                       \
    static struct test test_name##_test = {#test_name, test_name##_body, co, NULL};                \
    __attribute__((constructor)) static void test_name##_reg(void)                                 \
    {                                                                                              \
        test_register(&test_name##_test);                                                          \
    }                                                                                              \
    attr static void test_name##_body(void)
#define TEST(name)    TEST_(name, false, )
#define CO_TEST(name) TEST_(name, true, SUSPENDS)

#define CHECK(cond)                                                                                \
    do {                                                                                           \
        if (!(cond))                                                                               \
            test_fail(__FILE__, __LINE__, "%s", #cond);                                            \
    } while (0)
#define CHECK_EQ(a, b)                                                                             \
    do {                                                                                           \
        long long check_a_ = (long long)(a), check_b_ = (long long)(b);                            \
        if (check_a_ != check_b_)                                                                  \
            test_fail(__FILE__, __LINE__, "%s == %s: %lld (%#llx) != %lld (%#llx)", #a, #b,        \
                      check_a_, check_a_, check_b_, check_b_);                                     \
    } while (0)
#define CHECK_STR(a, b)                                                                            \
    do {                                                                                           \
        const char *check_sa_ = (a), *check_sb_ = (b);                                             \
        if (strcmp(check_sa_, check_sb_) != 0)                                                     \
            test_fail(__FILE__, __LINE__, "%s: \"%s\" != \"%s\"", #a, check_sa_, check_sb_);       \
    } while (0)

#endif
