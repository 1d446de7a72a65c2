/*
 * Broken promises of this code end the process; bad input never reaches an assertion.
 * Fault points: a test (or VARVE_FAULT=name:n in the environment) makes the n-th pass through
 * a named point kill the process (crash points) or return an error (error points).
 */
#ifndef VARVE_BASE_CHECK_H
#define VARVE_BASE_CHECK_H

#include <stdbool.h>
#include "base/own.h"

#define CHECK_THAT(cond)                                                                           \
    do {                                                                                           \
        if (__builtin_expect(!(cond), 0))                                                          \
            check_failed(#cond, __FILE__, __LINE__, __func__);                                     \
    } while (0)
#ifdef NDEBUG
#define DEBUG_CHECK(cond) ((void)sizeof(!(cond)))
#else
#define DEBUG_CHECK(cond) CHECK_THAT(cond)
#endif

_Noreturn void check_failed(const char *cond, const char *file, int line, const char *func);

/*
 * Named crash point: with VARVE_CRASH_AT="name" or "name:n" (n from 1) in the environment the
 * n-th pass ends the process at once with SIGKILL, as `kill -9` at that place would. Also
 * VARVE_CRASH_LIST=FILE appends the name of every point passed to FILE, for tests that walk all.
 */
void crash_point(const char *name);

#endif
