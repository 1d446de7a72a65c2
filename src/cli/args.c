/*
 * Parsing of options and operands by a command's description. GNU habits: options anywhere,
 * --name VALUE and --name=VALUE, -xVALUE and -x VALUE, grouped flags, `--` ends options.
 */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include "base/vec.h"
#include "cli/command.h"

int usage_error(const struct command *cmd, const char *fmt, ...)
{
    va_list ap;

    fprintf(stderr, "varve %s: ", cmd->name);
    va_start(ap, fmt);
    vfprintf(stderr, fmt, ap);
    va_end(ap);
    fprintf(stderr, " (see varve %s --help)\n", cmd->name);
    return EXIT_USAGE;
}

static const struct option *find_in(const struct option *opts, char letter, const char *name,
                                    size_t len)
{
    for (; opts && opts->help; opts++) {
        if (letter ? opts->letter == letter
                   : opts->name && strlen(opts->name) == len && !strncmp(opts->name, name, len))
            return opts;
    }
    return NULL;
}

static const struct option *find_option(const struct command *cmd, char letter, const char *name,
                                        size_t len)
{
    const struct option *opt = find_in(cmd->options, letter, name, len);

    return opt ? opt : find_in(common_options, letter, name, len);
}

static int add_value(struct args *args, const struct option *opt, const char *value)
{
    struct args_value *grown =
        reallocarray(args->values, args->nb_values + 1, sizeof(*args->values));

    if (!grown)
        abort();
    args->values = grown;
    args->values[args->nb_values++] = (struct args_value){opt, value};
    return EXIT_DONE;
}

static int parse_long(const struct command *cmd, char **argv, int argc, int *pos, struct args *args)
{
    const char *name = argv[*pos] + 2;
    const char *eq = strchr(name, '=');
    size_t len = eq ? (size_t)(eq - name) : strlen(name);
    const struct option *opt = find_option(cmd, 0, name, len);

    if (!opt)
        return usage_error(cmd, "unknown option --%.*s", (int)len, name);
    if (!opt->value)
        return eq ? usage_error(cmd, "option --%s takes no value", opt->name)
                  : add_value(args, opt, NULL);
    if (eq)
        return add_value(args, opt, eq + 1);
    if (*pos + 1 >= argc)
        return usage_error(cmd, "option --%s needs a value", opt->name);
    return add_value(args, opt, argv[++*pos]);
}

static int parse_letters(const struct command *cmd, char **argv, int argc, int *pos,
                         struct args *args)
{
    for (const char *p = argv[*pos] + 1; *p; p++) {
        const struct option *opt = find_option(cmd, *p, NULL, 0);

        if (!opt)
            return usage_error(cmd, "unknown option -%c", *p);
        if (!opt->value) {
            add_value(args, opt, NULL);
            continue;
        }
        if (p[1])
            return add_value(args, opt, p + 1);
        if (*pos + 1 >= argc)
            return usage_error(cmd, "option -%c needs a value", *p);
        return add_value(args, opt, argv[++*pos]);
    }
    return EXIT_DONE;
}

static int check_operands(const struct command *cmd, const struct args *args)
{
    unsigned least = 0, most = 0;
    bool rest = false;

    for (const struct operand *op = cmd->operands; op && op->name; op++) {
        size_t len = strlen(op->name);

        rest |= strstr(op->name, "...") != NULL;
        least += op->name[0] != '[';
        most++;
        if (args->nb_operands < least && op->name[0] != '[')
            return usage_error(cmd, "%.*s is missing", (int)len, op->name);
    }
    if (!rest && args->nb_operands > most)
        return usage_error(cmd, "'%s' is too much", args->operands[most]);
    return EXIT_DONE;
}

int args_parse(const struct command *cmd, int argc, char **argv, struct args *ret)
{
    bool no_more = false;
    int rc = EXIT_DONE;

    *ret = (struct args){.command = cmd};
    ret->operands = calloc((size_t)argc + 1, sizeof(*ret->operands));
    if (!ret->operands)
        abort();
    for (int i = 0; i < argc && rc == EXIT_DONE; i++) {
        if (no_more || argv[i][0] != '-' || !argv[i][1])
            ret->operands[ret->nb_operands++] = argv[i];
        else if (!strcmp(argv[i], "--"))
            no_more = true;
        else if (argv[i][1] == '-')
            rc = parse_long(cmd, argv, argc, &i, ret);
        else
            rc = parse_letters(cmd, argv, argc, &i, ret);
    }
    if (rc == EXIT_DONE && !args_flag(ret, "help"))
        rc = check_operands(cmd, ret);
    return rc;
}

void args_fini(struct args *args)
{
    free(args->values);
    free(args->operands);
}

static bool is_named(const struct option *opt, const char *name)
{
    return opt->name ? !strcmp(opt->name, name) : opt->letter == name[0] && !name[1];
}

const char *args_nth(const struct args *args, const char *name, unsigned n)
{
    for (unsigned i = 0; i < args->nb_values; i++)
        if (is_named(args->values[i].option, name) && n-- == 0)
            return args->values[i].value ? args->values[i].value : "";
    return NULL;
}

const char *args_value(const struct args *args, const char *name, const char *otherwise)
{
    const char *found = otherwise;

    for (unsigned i = 0; i < args->nb_values; i++)
        if (is_named(args->values[i].option, name))
            found = args->values[i].value;
    return found;
}

bool args_flag(const struct args *args, const char *name)
{
    return args_nth(args, name, 0) != NULL;
}

const char *args_operand(const struct args *args, unsigned n)
{
    return n < args->nb_operands ? args->operands[n] : NULL;
}
