/*
 * Blocking calls on helper threads: ioctl, open on NFS, exec, compression, fcntl locks.
 *
 * offload(fn, arg) suspends the caller, runs fn(arg) on a thread of a small shared pool, and
 * returns its result. fn must not touch the reactor, coroutines or pools.
 * In the simulator fn runs at once on this thread.
 */
#ifndef VARVE_RT_OFFLOAD_H
#define VARVE_RT_OFFLOAD_H

#include <stdbool.h>
#include <stddef.h>
#include "rt/co.h"

SUSPENDS int offload(int (*fn)(void *arg), void *arg);
/* Runs a program and waits: argv NULL-terminated, stdout and stderr collected up to `max` bytes
 * each (NULL: discarded). Returns the exit status (128 + signal if killed) or -errno. The
 * caller frees *ret_out and *ret_err. */
SUSPENDS int offload_exec(const char *const argv[], char **ret_out, char **ret_err, size_t max);
/* The same for programs that may hang, or that are to be told something by their environment.
 * -ETIMEDOUT: ended by the limit, or left behind because even SIGKILL did not end it; what it
 * has done is unknown. Then too *ret_out and *ret_err are set, with what it had said. */
struct exec_opts {
    const char *const
        *env;          /* "NAME=VALUE", NULL-terminated, over this process's own; may be NULL */
    unsigned limit_ms; /* 0: none. Then SIGTERM, and grace_ms later SIGKILL */
    unsigned grace_ms;
    bool own_group; /* a terminal's Ctrl-C is for us, not for the program */
};
SUSPENDS int offload_exec_with(const char *const argv[], const struct exec_opts *opts,
                               char **ret_out, char **ret_err, size_t max);

#endif
