/*
 * Makes the man pages and the bash completion from the description of the commands:
 *   gendocs man DIR         varve.1 and varve-COMMAND.1 into DIR
 *   gendocs completion      the completion script on stdout
 */
#include <ctype.h>
#include <stdio.h>
#include <string.h>
#include "cli/help.h"

/* troff takes a leading . or ' and every \ and - for itself. */
static void put_text(FILE *out, const char *text)
{
    bool line_start = true;

    for (const char *p = text; *p; p++) {
        if (line_start && (*p == '.' || *p == '\''))
            fputs("\\&", out);
        line_start = *p == '\n';
        if (*p == '\\')
            fputs("\\e", out);
        else if (*p == '-')
            fputs("\\-", out);
        else if (*p == '\n' && p[1] == '\n')
            fputs("\n.PP", out);
        else
            fputc(*p, out);
    }
}

static void dashed(char *buf, size_t len, const char *name)
{
    snprintf(buf, len, "varve-%s", name);
    for (char *p = buf; *p; p++)
        if (*p == ' ')
            *p = '-';
}

static void man_head(FILE *out, const char *page, const char *summary)
{
    char upper[64] = "";

    for (size_t i = 0; page[i] && i + 1 < sizeof(upper); i++)
        upper[i] = (char)toupper((unsigned char)page[i]);
    fprintf(out, ".TH %s 1 \"\" \"varve %s\" \"varve\"\n.SH NAME\n%s \\- ", upper, VARVE_VERSION,
            page);
    put_text(out, summary);
    fputs("\n", out);
}

static void man_options(FILE *out, const struct option *opts)
{
    for (; opts && opts->help; opts++) {
        char *left = NULL;
        size_t len;
        FILE *f = open_memstream(&left, &len);

        if (!f)
            abort();
        option_print(f, opts);
        fclose(f);
        fputs(".TP\n.B ", out);
        put_text(out, left);
        fputc('\n', out);
        put_text(out, opts->help);
        fputc('\n', out);
        free(left);
    }
}

static void man_body(FILE *out, const struct command *cmd)
{
    fputs(".SH SYNOPSIS\n.B ", out);
    synopsis_print(out, cmd);
    fputs(".SH DESCRIPTION\n", out);
    put_text(out, cmd->text ? cmd->text : cmd->summary);
    fputs("\n.SH OPTIONS\n", out);
    man_options(out, cmd->options);
    man_options(out, common_options);
    fputs(".SH EXIT STATUS\n0 done, 1 failed, 2 wrong usage", out);
    fputs(strcmp(cmd->name, "img check") ? ".\n" : "; more in the description.\n", out);
    if (cmd->example) {
        fputs(".SH EXAMPLE\n.nf\n", out);
        put_text(out, cmd->example);
        fputs("\n.fi\n", out);
    }
    fputs(".SH SEE ALSO\n.BR varve (1)\n", out);
}

static FILE *open_page(const char *dir, const char *page)
{
    char path[512];

    snprintf(path, sizeof(path), "%s/%s.1", dir, page);
    FILE *out = fopen(path, "w");
    if (!out) {
        perror(path);
        exit(1);
    }
    return out;
}

static void man_main_page(const char *dir)
{
    FILE *out = open_page(dir, "varve");

    man_head(out, "varve", "snapshot chains for virtual-machine disks");
    fputs(".SH SYNOPSIS\n.B varve COMMAND ...\n.SH DESCRIPTION\n", out);
    put_text(out,
             "A volume is POOL:[VMID/]NAME, a snapshot POOL:[VMID/]NAME@SNAPSHOT. Pools are the "
             "sections of storage.cfg. A volume that is served is found by its control socket "
             "in the runtime directory, and every command works on it while the guest runs.\n");
    fputs(".SH COMMANDS\n", out);
    for (const struct command *const *cmd = commands; *cmd; cmd++) {
        char page[64];

        dashed(page, sizeof(page), (*cmd)->name);
        fputs(".TP\n.BR ", out);
        put_text(out, page);
        fputs(" (1)\n", out);
        put_text(out, (*cmd)->summary);
        fputc('\n', out);
    }
    fputs(".SH FILES\n.TP\n.I /etc/varve/storage.cfg, /etc/pve/storage.cfg\nThe pools.\n"
          ".TP\n.I /run/varve\nControl sockets of served volumes.\n"
          ".SH ENVIRONMENT\n.TP\n.B VARVE_CONFIG\nAnother storage.cfg.\n"
          ".TP\n.B VARVE_RUNTIME\nAnother runtime directory.\n"
          ".TP\n.B VARVE_IO\n\"uring\" or \"threads\": how files are read and written.\n",
          out);
    fclose(out);
}

static void man_pages(const char *dir)
{
    man_main_page(dir);
    for (const struct command *const *cmd = commands; *cmd; cmd++) {
        char page[64];

        dashed(page, sizeof(page), (*cmd)->name);
        FILE *out = open_page(dir, page);
        man_head(out, page, (*cmd)->summary);
        man_body(out, *cmd);
        fclose(out);
    }
}

static const char *completer(enum complete how)
{
    switch (how) {
    case COMPLETE_FILE:
        return "file";
    case COMPLETE_POOL:
        return "pool";
    case COMPLETE_VOLUME:
        return "volume";
    case COMPLETE_SNAPSHOT:
        return "snapshot";
    case COMPLETE_WORDS:
    case COMPLETE_NONE:
        break;
    }
    return "none";
}

static void option_words(const struct option *opts)
{
    for (; opts && opts->help; opts++) {
        if (opts->letter)
            printf(" -%c", opts->letter);
        if (opts->name)
            printf(" --%s", opts->name);
    }
}

static void option_values(const struct command *cmd)
{
    for (const struct option *o = cmd->options; o && o->help; o++) {
        if (!o->value)
            continue;
        if (o->letter)
            printf("    '%s -%c') ", cmd->name, o->letter);
        else
            printf("    '%s --%s') ", cmd->name, o->name);
        if (o->letter && o->name)
            printf("_varve_value %s '%s' ;;\n    '%s --%s') ", completer(o->complete),
                   o->words ? o->words : "", cmd->name, o->name);
        printf("_varve_value %s '%s' ;;\n", completer(o->complete), o->words ? o->words : "");
    }
}

static void completion_tables(void)
{
    printf("_varve_commands='");
    for (const struct command *const *cmd = commands; *cmd; cmd++)
        if (!strchr((*cmd)->name, ' '))
            printf("%s ", (*cmd)->name);
    printf("img pool help'\n_varve_verbs() { case $1 in\n");
    for (unsigned i = 0; i < 2; i++) {
        const char *group = i ? "pool" : "img";

        printf("    %s) echo '", group);
        for (const struct command *const *cmd = commands; *cmd; cmd++)
            if (!strncmp((*cmd)->name, group, strlen(group)) && strchr((*cmd)->name, ' '))
                printf("%s ", strchr((*cmd)->name, ' ') + 1);
        printf("' ;;\n");
    }
    printf("    esac; }\n_varve_options() { case $1 in\n");
    for (const struct command *const *cmd = commands; *cmd; cmd++) {
        printf("    '%s') echo '", (*cmd)->name);
        option_words((*cmd)->options);
        option_words(common_options);
        printf("' ;;\n");
    }
    printf("    esac; }\n_varve_operand() { case $1 in\n");
    for (const struct command *const *cmd = commands; *cmd; cmd++) {
        printf("    '%s') case $2 in", (*cmd)->name);
        unsigned n = 0;
        for (const struct operand *op = (*cmd)->operands; op && op->name; op++, n++)
            printf(" %s) echo %s ;;",
                   strstr(op->name, "...") ? "*" : (const char[]){(char)('0' + n), 0},
                   completer(op->complete));
        printf(" *) echo none ;; esac ;;\n");
    }
    printf("    esac; }\n_varve_option_value() { case \"$1 $2\" in\n");
    for (const struct command *const *cmd = commands; *cmd; cmd++)
        option_values(*cmd);
    printf("    *) return 1 ;; esac; }\n");
}

static const char completion_code[] =
    "_varve_names() { varve list -q --json \"$@\" 2>/dev/null |\n"
    "    sed -n 's/.*\"id\": \"\\([^\"]*\\)\".*/\\1/p'; }\n"
    "_varve_pools() { varve pool list -q --json 2>/dev/null |\n"
    "    sed -n 's/.*\"id\": \"\\([^\"]*\\)\".*/\\1/p'; }\n"
    "_varve_value() { case $1 in\n"
    "    file) compopt -o filenames; COMPREPLY=($(compgen -f -- \"$cur\")) ;;\n"
    "    pool) COMPREPLY=($(compgen -W \"$(_varve_pools)\" -- \"$cur\")) ;;\n"
    "    volume) COMPREPLY=($(compgen -W \"$(_varve_names -t vol,base)\" -- \"$cur\"))\n"
    "        __ltrim_colon_completions \"$cur\" ;;\n"
    "    snapshot) COMPREPLY=($(compgen -W \"$(_varve_names -t vol,base,snap)\" -- \"$cur\"))\n"
    "        __ltrim_colon_completions \"$cur\" ;;\n"
    "    none) COMPREPLY=($(compgen -W \"$2\" -- \"$cur\")) ;;\n"
    "    esac; }\n"
    "_varve() {\n"
    "    local cur prev words cword cmd first i n=0\n"
    "    _get_comp_words_by_ref -n : cur prev words cword\n"
    "    COMPREPLY=()\n"
    "    if [ \"$cword\" -eq 1 ]; then\n"
    "        COMPREPLY=($(compgen -W \"$_varve_commands\" -- \"$cur\")); return; fi\n"
    "    cmd=${words[1]} first=2\n"
    "    if [ -n \"$(_varve_verbs \"$cmd\")\" ]; then\n"
    "        if [ \"$cword\" -eq 2 ]; then\n"
    "            COMPREPLY=($(compgen -W \"$(_varve_verbs \"$cmd\")\" -- \"$cur\")); return; fi\n"
    "        cmd=\"$cmd ${words[2]}\" first=3; fi\n"
    "    _varve_option_value \"$cmd\" \"$prev\" && return\n"
    "    case $cur in -*) COMPREPLY=($(compgen -W \"$(_varve_options \"$cmd\")\" -- \"$cur\")); "
    "return ;; esac\n"
    "    for ((i = first; i < cword; i++)); do\n"
    "        case ${words[i]} in -*) ;; *) n=$((n + 1)) ;; esac; done\n"
    "    _varve_value \"$(_varve_operand \"$cmd\" $n)\" ''\n"
    "}\n"
    "complete -F _varve varve\n";

int main(int argc, char **argv)
{
    if (argc == 3 && !strcmp(argv[1], "man")) {
        man_pages(argv[2]);
        return 0;
    }
    if (argc == 2 && !strcmp(argv[1], "completion")) {
        completion_tables();
        fputs(completion_code, stdout);
        return fflush(stdout) == 0 ? 0 : 1;
    }
    fprintf(stderr, "usage: gendocs man DIR | gendocs completion\n");
    return EXIT_USAGE;
}
