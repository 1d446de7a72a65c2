/* `varve help`, `varve COMMAND --help`: text made from the description of the commands. */
#include <stdio.h>
#include <string.h>
#include "cli/help.h"

void synopsis_print(FILE *out, const struct command *cmd)
{
    fprintf(out, "varve %s", cmd->name);
    if (cmd->options && cmd->options->help)
        fprintf(out, " [OPTIONS]");
    for (const struct operand *op = cmd->operands; op && op->name; op++)
        fprintf(out, " %s", op->name);
    fputc('\n', out);
}

void option_print(FILE *out, const struct option *opt)
{
    if (opt->letter)
        fprintf(out, "-%c", opt->letter);
    if (opt->letter && opt->name)
        fprintf(out, ", ");
    if (opt->name)
        fprintf(out, "--%s", opt->name);
    if (opt->value)
        fprintf(out, "%s%s", opt->name ? "=" : " ", opt->value);
}

/* One line an option, help behind the longest left column. */
static void options_print(const struct option *opts)
{
    for (; opts && opts->help; opts++) {
        char left[80];
        FILE *f = fmemopen(left, sizeof(left), "w");

        if (!f)
            return;
        option_print(f, opts);
        fclose(f);
        printf("  %-32s %s\n", left, opts->help);
    }
}

void usage_print(const struct command *cmd)
{
    printf("%s - %s\n\nusage: ", cmd->name, cmd->summary);
    synopsis_print(stdout, cmd);
    if (cmd->text)
        printf("\n%s\n", cmd->text);
    printf("\noptions:\n");
    options_print(cmd->options);
    options_print(common_options);
    if (cmd->example)
        printf("\nexamples:\n%s\n", cmd->example);
}

void help_print(void)
{
    printf("varve %s: snapshot chains for virtual-machine disks\n\nusage: varve COMMAND ...\n\n",
           VARVE_VERSION);
    for (const struct command *const *cmd = commands; *cmd; cmd++)
        printf("  %-16s %s\n", (*cmd)->name, (*cmd)->summary);
    printf("\nA volume is POOL:[VMID/]NAME, a snapshot POOL:[VMID/]NAME@SNAPSHOT.\n"
           "varve COMMAND --help tells more, as does the man page varve-COMMAND(1).\n");
}
