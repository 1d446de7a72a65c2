/*
 * Blocking calls on helper threads: ioctl, open on NFS, exec, compression, fcntl locks.
 *
 * offload(fn, arg) suspends the caller, runs fn(arg) on a thread of a small shared pool, and
 * returns its result. fn must not touch the reactor, coroutines or pools.
 * In the simulator fn runs at once on this thread.
 */
#ifndef VARVE_RT_OFFLOAD_H
#define VARVE_RT_OFFLOAD_H

#include "rt/co.h"

SUSPENDS int offload(int (*fn)(void *arg), void *arg);
/* Runs a program and waits: argv NULL-terminated, stdout and stderr collected up to `max` bytes
 * each (NULL: discarded). Returns the exit status (128 + signal if killed) or -errno. The
 * caller frees *ret_out and *ret_err. */
SUSPENDS int offload_exec(const char *const argv[], char **ret_out, char **ret_err, size_t max);

#endif
