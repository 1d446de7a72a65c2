/*
 * `varve serve`: one process, one disk: its engine, its exports, its QMP control socket.
 */
#ifndef VARVE_SERVE_SERVE_H
#define VARVE_SERVE_SERVE_H

#include <stdbool.h>
#include <stdint.h>
#include "base/err.h"
#include "chain/chain.h"
#include "rt/co.h"

enum serve_durability { SERVE_ACK, SERVE_FLUSH }; /* what an answered, unflushed write survives */

struct serve_snapshot { /* a layer that is also exported read-only */
    const char *name;   /* export name, "<volume>@<snapshot>" */
    const char *path;   /* of the layer's file */
};
struct serve_opts {
    const char *path;   /* the top's file */
    const char *format; /* NULL: probe by rules of layer_open */
    const char *volume; /* export name beside "", NULL: none */
    const char
        *volume_id; /* "POOL:VOL" for messages and query-named-block-nodes; NULL: a plain file */
    const char *qmp_path; /* control socket; NULL: none */
    bool read_only;
    bool buffered;
    bool preload; /* loads the map in the background after the start */
    enum serve_durability durability;
    struct space_opts space;
    uint64_t cache_bytes;       /* 0 default */
    uint64_t prealloc_step;     /* 0 default */
    uint64_t grow_chunk;        /* of a volume that grows: image_grow_opts; 0 default */
    enum image_on_full on_full; /* likewise */
    const char *const *exports; /* "nbd,unix=PATH[,name=N]" or "nbd,host=H,port=P[,name=N]" */
    unsigned nb_exports;
    const struct serve_snapshot *snapshots;
    unsigned nb_snapshots;
    unsigned max_connections;
    unsigned threads; /* reactors that connections are spread over, ours among them; 0: 1 */
    /* > 0: the disk, so many bytes long, is another host's until x-varve-takeover; path and format
     * are not used before. take() then gets the disk for this host (it may wait) and puts them, and
     * snapshots, right in the options; opened() ends what it has begun, also after a failure. Needs
     * qmp_path. */
    uint64_t incoming_len;
    int (*take)(void *ctx, struct err *err);
    /* Called once when the disk is open and locked and the control socket can be connected to,
     * before any client is let in; ctx is of both. May be NULL. */
    void (*opened)(void *ctx);
    void *opened_ctx;
};
/* Opens, exports, sends READY=1 to sd_notify's socket, prints one line per export on stdout, serves
 * until SIGTERM/SIGINT or QMP quit, then closes cleanly (STOPPING=1 first). 0 or -errno. */
SUSPENDS int serve_run(const struct serve_opts *opts, struct err *err);

#endif
