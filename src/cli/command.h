/*
 * The one description of the commands: help, usage errors, man pages and bash completion are
 * made from it, and arguments are parsed by it.
 */
#ifndef VARVE_CLI_COMMAND_H
#define VARVE_CLI_COMMAND_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "base/err.h"

enum { EXIT_DONE = 0, EXIT_FAILED = 1, EXIT_USAGE = 2 };

/* What the shell completes for a value. */
enum complete {
    COMPLETE_NONE,
    COMPLETE_FILE,
    COMPLETE_POOL,
    COMPLETE_VOLUME,
    COMPLETE_SNAPSHOT,
    COMPLETE_WORDS
};

struct option {
    char letter;       /* 0: long only */
    const char *name;  /* NULL: letter only */
    const char *value; /* name of its value in help; NULL: a flag */
    const char *help;
    enum complete complete;
    const char *words; /* COMPLETE_WORDS: separated by spaces */
};

struct operand {
    const char *name; /* as in the synopsis; "[NAME]" is optional, "NAME..." takes the rest */
    enum complete complete;
    const char *words;
};

struct args;

struct command {
    const char *name;               /* "snapshot", or "img info" */
    const char *summary;            /* one line, no full stop */
    const char *text;               /* paragraphs of the man page, separated by an empty line */
    const char *example;            /* lines: "command\n  what it does" */
    const struct operand *operands; /* ends with name NULL */
    const struct option *options;   /* ends with help NULL */
    int (*run)(const struct args *args); /* exit status */
};

/* All commands, ends with name NULL; the order of the help. */
extern const struct command *const commands[];
/* Options that every command takes. */
extern const struct option common_options[];

struct args_value {
    const struct option *option;
    const char *value; /* NULL for a flag */
};
struct args {
    const struct command *command;
    struct args_value *values; /* in the order given */
    unsigned nb_values;
    const char **operands;
    unsigned nb_operands;
};

/* Parses argv behind the command's name. Usage errors are printed; returns EXIT_USAGE then,
 * EXIT_DONE with *ret filled otherwise. Memory of argv is borrowed. */
int args_parse(const struct command *cmd, int argc, char **argv, struct args *ret);
void args_fini(struct args *args);
/* By long name, or by letter for options without one ("f"). The last one given wins. */
bool args_flag(const struct args *args, const char *name);
const char *args_value(const struct args *args, const char *name, const char *otherwise);
/* n-th use of a repeatable option, NULL when there are no more. */
const char *args_nth(const struct args *args, const char *name, unsigned n);
const char *args_operand(const struct args *args, unsigned n); /* NULL when not given */

void usage_print(const struct command *cmd); /* `varve COMMAND --help` */
/* "varve snapshot: what", status EXIT_USAGE. */
int usage_error(const struct command *cmd, const char *fmt, ...) PRINTF_LIKE(2, 3);

#endif
