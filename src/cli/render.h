/* What commands print: sizes, tables, JSON, progress, errors. */
#ifndef VARVE_CLI_RENDER_H
#define VARVE_CLI_RENDER_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>
#include "base/err.h"
#include "cli/command.h"

/* "1.5 GiB", three significant digits; buf holds at least 32 bytes. Returns buf. */
const char *render_size(uint64_t bytes, char *buf, size_t len);
/* "128M", "1.5G", "4096": bytes. -EINVAL, -ERANGE with text. */
int parse_size(const char *text, uint64_t *ret, struct err *err);
/* The same, and not 0, which would mean the default. */
int parse_cluster_size(const char *text, uint64_t *ret, struct err *err);
/* on|off|true|false|yes|no|1|0 */
int parse_bool(const char *text, bool *ret, struct err *err);
/* Prints pretty JSON and a newline to stdout; takes the reference. */
void render_json(json_t *value);
/* "varve COMMAND: text" on stderr; returns EXIT_FAILED. */
int fail(const struct args *args, const struct err *err);

/* Table with columns aligned: rows of cells, header first; numbers right-aligned where `right` says
 * 'r'. */
struct table_out {
    unsigned cols;
    char **cells; /* nb * cols, owned */
    unsigned nb;
};
void table_out_row(struct table_out *t, ...);                       /* cols strings, copied */
void table_out_print(const struct table_out *t, const char *align); /* 'l' or 'r' a column */
void table_out_fini(struct table_out *t);

/* A progress bar on a terminal: bytes, rate, time left; nothing elsewhere or with -q. */
struct progress {
    const char *what;
    uint64_t started_ns, drawn_ns;
    bool on, drawn;
};
void progress_init(struct progress *p, const char *what, const struct args *args, bool force);
void progress_update(void *progress, uint64_t done, uint64_t total); /* fits the callbacks */
void progress_end(struct progress *p);

#endif
