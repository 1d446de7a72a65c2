/* Text made from the description of the commands. */
#ifndef VARVE_CLI_HELP_H
#define VARVE_CLI_HELP_H

#include <stdio.h>
#include "cli/command.h"

void help_print(void);
void synopsis_print(FILE *out, const struct command *cmd);
void option_print(FILE *out, const struct option *opt); /* "-f, --format=FORMAT" */

#endif
