/* Loads the disk's map beside requests; begins anew with the chain that a rollback brings. */
#include "serve/internal.h"

SUSPENDS static int preload_main(void *arg)
{
    struct serve *s = arg;

    return chain_preload(s->chain, &s->preload.stop);
}

void serve_preload_start(struct serve *s)
{
    s->preload.stop = false;
    if (s->opts->preload && co_group_spawn(&s->preload.group, preload_main, s) < 0)
        serve_warn(s, "the map is not loaded ahead: no memory");
}

void serve_preload_end(struct serve *s)
{
    s->preload.stop = true;
    co_group_wait(&s->preload.group);
}
