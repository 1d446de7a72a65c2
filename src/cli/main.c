/* varve: finds the command, parses its arguments, runs it. */
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "cli/help.h"

/* Words of the command line that name the command: "snapshot", or "img info". */
static const struct command *find_command(int argc, char **argv, int *ret_words)
{
    for (const struct command *const *cmd = commands; *cmd; cmd++) {
        const char *space = strchr((*cmd)->name, ' ');
        size_t len = space ? (size_t)(space - (*cmd)->name) : strlen((*cmd)->name);

        if (argc < 2 || strlen(argv[1]) != len || strncmp(argv[1], (*cmd)->name, len) != 0)
            continue;
        if (space && (argc < 3 || strcmp(argv[2], space + 1) != 0))
            continue;
        *ret_words = space ? 2 : 1;
        return *cmd;
    }
    return NULL;
}

/* `varve img` alone, or with a verb there is none of: says which there are. */
static int unknown_command(int argc, char **argv)
{
    bool group = false;
    size_t len = strlen(argv[1]);

    for (const struct command *const *cmd = commands; *cmd; cmd++)
        group |= !strncmp((*cmd)->name, argv[1], len) && (*cmd)->name[len] == ' ';
    if (!group) {
        fprintf(stderr, "varve: there is no command '%s' (see varve help)\n", argv[1]);
        return EXIT_USAGE;
    }
    bool asked = argc > 2 && (!strcmp(argv[2], "--help") || !strcmp(argv[2], "-h"));
    FILE *out = asked ? stdout : stderr;
    if (argc > 2 && !asked)
        fprintf(out, "varve %s: there is no command '%s'\n", argv[1], argv[2]);
    fprintf(out, "usage: varve %s COMMAND ..., one of:\n", argv[1]);
    for (const struct command *const *cmd = commands; *cmd; cmd++)
        if (!strncmp((*cmd)->name, argv[1], len) && (*cmd)->name[len] == ' ')
            fprintf(out, "  %-11s %s\n", (*cmd)->name + len + 1, (*cmd)->summary);
    return asked ? EXIT_DONE : EXIT_USAGE;
}

static int help_command(int argc, char **argv)
{
    int words;

    if (argc < 3) {
        help_print();
        return EXIT_DONE;
    }
    const struct command *cmd = find_command(argc - 1, argv + 1, &words);
    if (!cmd)
        return unknown_command(argc - 1, argv + 1);
    usage_print(cmd);
    return EXIT_DONE;
}

/* A full pipe, disk or closed descriptor must not pass as success. */
static int finish_output(int status)
{
    if (fflush(stdout) == 0 && !ferror(stdout))
        return status;
    fprintf(stderr, "varve: %s, but the output could not be written: %s\n",
            status == EXIT_DONE ? "done" : "failed", strerror(errno));
    return status == EXIT_DONE ? EXIT_FAILED : status;
}

/* A descriptor that was closed for us would be the next file we open, and an image be read as the
 * input or take our messages. What stands there instead fails as the closed one would: the input
 * can be written only, the outputs be read only. */
static void fill_standard_fds(void)
{
    for (int fd = 0; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) < 0 && errno == EBADF &&
            open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY) != fd)
            abort();
}

int main(int argc, char **argv)
{
    struct args args;
    int words = 0;

    fill_standard_fds();
    signal(SIGPIPE, SIG_IGN);
    if (argc < 2) {
        help_print();
        return EXIT_USAGE;
    }
    if (!strcmp(argv[1], "help") || !strcmp(argv[1], "--help") || !strcmp(argv[1], "-h"))
        return finish_output(help_command(argc, argv));
    if (!strcmp(argv[1], "--version") || !strcmp(argv[1], "version")) {
        printf("varve %s\n", VARVE_VERSION);
        return finish_output(EXIT_DONE);
    }
    const struct command *cmd = find_command(argc, argv, &words);
    if (!cmd)
        return unknown_command(argc, argv);
    int status = args_parse(cmd, argc - 1 - words, argv + 1 + words, &args);
    if (status == EXIT_DONE && args_flag(&args, "help"))
        usage_print(cmd);
    else if (status == EXIT_DONE)
        status = cmd->run(&args);
    args_fini(&args);
    return finish_output(status);
}
