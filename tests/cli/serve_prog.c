/* serve_run() from a command line, with what `varve serve` takes from a pool's catalog. */
#include <getopt.h>
#include <stdio.h>
#include <string.h>
#include <stdlib.h>
#include "../model/loopvol.h"
#include "rt/reactor.h"
#include "serve/serve.h"

static const struct option options[] = {
    {"qmp", 1, NULL, 'q'},       {"export", 1, NULL, 'e'},
    {"volume", 1, NULL, 'v'},    {"volume-id", 1, NULL, 'i'},
    {"snapshot", 1, NULL, 's'},  {"format", 1, NULL, 'f'},
    {"read-only", 0, NULL, 'r'}, {"detect-zeroes", 1, NULL, 'z'},
    {"discard", 1, NULL, 'd'},   {"discard-no-unref", 0, NULL, 'k'},
    {"grow", 1, NULL, 'g'},      /* the path is a volume (loopvol.h); its chunk */
    {"room-file", 1, NULL, 'R'}, /* how long it may become */
    {"on-full", 1, NULL, 'o'},   {NULL},
};

struct program {
    struct serve_opts opts;
    const char *exports[8];
    struct serve_snapshot snapshots[8];
    const char *room_file;
};

static void take(struct program *p, int option, char *value)
{
    switch (option) {
    case 'q':
        p->opts.qmp_path = value;
        break;
    case 'e':
        p->exports[p->opts.nb_exports++ % 8] = value;
        break;
    case 'v':
        p->opts.volume = value;
        break;
    case 'i':
        p->opts.volume_id = value;
        break;
    case 'f':
        p->opts.format = value;
        break;
    case 'r':
        p->opts.read_only = true;
        break;
    case 'z':
        if (space_parse_detect_zeroes(value, &p->opts.space) < 0)
            exit(2);
        break;
    case 'd':
        if (space_parse_discard(value, &p->opts.space) < 0)
            exit(2);
        break;
    case 'k':
        p->opts.space.discard = IMAGE_DISCARD_KEEP;
        break;
    case 'g':
        p->opts.grow_chunk = strtoull(value, NULL, 10);
        break;
    case 'R':
        p->room_file = value;
        break;
    case 'o':
        p->opts.on_full = strcmp(value, "wait") ? IMAGE_FULL_FAIL : IMAGE_FULL_WAIT;
        break;
    case 's': /* NAME=PATH */
        p->snapshots[p->opts.nb_snapshots++ % 8] =
            (struct serve_snapshot){strtok(value, "="), strtok(NULL, "")};
        break;
    default:
        exit(2);
    }
}

/* 77: loop devices cannot be made. */
static void attach_volume(const struct program *p)
{
    char *folder = strdup(p->opts.path), *slash = strrchr(folder, '/');
    struct loopvol *v;

    *slash = 0;
    if (!loopvol_attach(folder, slash + 1, &v))
        exit(77);
    v->room_file = p->room_file;
    free(folder);
}

SUSPENDS static int serve_main(void *arg)
{
    struct program *p = arg;
    struct err err = {0};
    int rc = serve_run(&p->opts, &err);

    if (rc < 0)
        fprintf(stderr, "serve_prog: %s\n", err_text(&err));
    return rc < 0;
}

int main(int argc, char **argv)
{
    struct program p = {0};
    int option;

    while ((option = getopt_long(argc, argv, "", options, NULL)) >= 0)
        take(&p, option, optarg);
    if (optind + 1 != argc)
        return 2;
    p.opts.path = argv[optind];
    p.opts.exports = p.exports;
    p.opts.snapshots = p.snapshots;
    if (p.opts.grow_chunk)
        attach_volume(&p);
    return reactor_run(serve_main, &p);
}
