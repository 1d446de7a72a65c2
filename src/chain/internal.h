/* What the files of this folder share. Private to src/chain (and its own tests). */
#ifndef VARVE_CHAIN_INTERNAL_H
#define VARVE_CHAIN_INTERNAL_H

#include <sys/types.h>
#include "base/vec.h"
#include "chain/chain.h"
#include "chain/fmap.h"
#include "chain/merge.h"
#include "qcow2/bound.h"
#include "rt/wait.h"

#define CHAIN_DEPTH_MAX 1024u

/* One open file. Owned by its chain, or by whoever opened it until a chain takes it. */
struct layer {
    char *path;
    char node_name[32];
    struct blk *blk;     /* raw: owned; qcow2: the image's */
    struct image *image; /* NULL: raw */
    bool writable;       /* as opened or reopened last */
    bool locked;         /* takes image locks */
    bool from_blk;       /* no file of our own opening */
    bool has_id;         /* dev and ino are known */
    dev_t dev;
    ino_t ino;
    unsigned users;          /* views that are read: snapshot exports */
    bool pinned;             /* a job merges it */
    struct space_opts space; /* fixed after open */

    /* while part of a chain; change only with both gates closed (push: the request gate) */
    struct chain *chain;
    struct layer *lower;             /* backing layer, NULL at the bottom */
    unsigned index;                  /* 0 = top */
    unsigned slot;                   /* in the flattened map */
    struct image_below below;        /* what a write to this layer reads to fill a (sub)cluster */
    struct image_below below_unsure; /* the same, never telling that something is zero already */
};

struct chain {
    VEC(struct layer *) layers; /* top first */
    VEC(struct layer *) slots;  /* by slot; NULL: free */
    bool keeps_ack;             /* whatever layer is the top has a journal */
    bool writable;
    struct bound bound; /* of the map and all layers' metadata together */
    uint64_t unit;      /* bytes of the smallest (sub)cluster */
    struct fmap fmap;
    struct gate gate;          /* guest requests */
    unsigned no_waits;         /* for room; depth */
    unsigned waits;            /* requests that wait for room, outside of the gate */
    struct wait_queue no_wait; /* until there is none */
    struct gate work;          /* steps of jobs; closed by changes of shape, not by a push */
    struct co_mutex shape;     /* one change of shape at a time */
    uint64_t frozen_at;        /* when the request gate began to close */
    struct chain_watch *watch; /* set with both gates closed */
    void (*walk_hook)(void *arg);
    void *walk_hook_arg;
    struct chain_stats stats;
};

/* ---- layer.c ---- */
struct file_id {
    dev_t dev;
    ino_t ino;
};
/* Identity of a file before it is opened: device and inode, or the device's own number. */
SUSPENDS int file_id_get(const char *path, struct file_id *ret);
const char *path_strip_protocol(const char *path);
#define HOLES_TO_TELL 1u /* as hole_unit: as fine as is good for a status */
/* ext is what the layer said of off: cut where data and holes of the file meet; *ret_hole tells
 * what is left. Only whole units, in the guest's count, are holes. */
SUSPENDS int layer_split_at_hole(struct layer *layer, uint64_t off, uint64_t unit,
                                 struct extent *ext, bool *ret_hole);

/* ---- read.c ---- */
/* Where a range lives as seen from `from` downwards; 0 < ret->len <= len. Inside a gate. */
SUSPENDS int chain_resolve(struct chain *chain, struct layer *from, uint64_t off, uint64_t len,
                           struct fmap_entry *ret);
/* Reads as seen from `from` (NULL: zeroes). Past a layer's end: zeroes. Inside a gate. */
SUSPENDS int chain_read_from(struct chain *chain, struct layer *from, uint64_t off, uint64_t len,
                             struct iov_iter *iov);
/* Whether the slices of all layers would fit: then the map, which can be made again from them,
 * gives way to them. Else slices of lower layers go first, and what the map says of them stays. */
void chain_weigh(struct chain *chain);
/* Fills layer->below. */
void layer_init_below(struct layer *layer);

static inline struct layer *chain_top(const struct chain *chain)
{
    return chain->layers.data[0];
}

/* ---- chain.c ---- */
void chain_free(struct chain *chain); /* no layers left in it */

/* ---- pivot.c ---- */
/* Attaches a layer at the given index: slot, links, unit. Room was reserved by chain_reserve. */
int chain_reserve(struct chain *chain);
void chain_attach(struct chain *chain, unsigned index, struct layer *layer);
void chain_detach(struct chain *chain, struct layer *layer);

#endif
