/* Shared inside blk/: pages of memory, the file device, changes of image locks. */
#ifndef VARVE_BLK_INTERNAL_H
#define VARVE_BLK_INTERNAL_H

#include "base/table.h"
#include "blk/blk.h"

/* ---- mem.c: sparse content; a page that is not there is zero ---- */
#define MEM_PAGE_LEN ((uint64_t)64 << 10)

struct mem_pages {
    struct table table; /* page number -> page, owned */
};
void mem_pages_fini(struct mem_pages *m);
void mem_pages_read(const struct mem_pages *m, uint64_t off, uint64_t len, struct iov_iter *iov);
int mem_pages_write(struct mem_pages *m, uint64_t off, uint64_t len, struct iov_iter *iov);
void mem_pages_zero(struct mem_pages *m, uint64_t off, uint64_t len);
/* dst is empty. */
int mem_pages_copy(struct mem_pages *dst, const struct mem_pages *src);
/* Bytes from off, at most len, that are all in pages or all not. */
uint64_t mem_pages_status(const struct mem_pages *m, uint64_t off, uint64_t len, bool *ret_data);
/* The pages of a device of blk_mem_new. */
struct mem_pages *mem_pages_of(struct blk *blk);
/* blk_close for plain code, of such a device. */
void mem_free(struct blk *blk);
/* The simulation was stopped: the power is off. */
bool mem_stopped(void);
/* Where a request to memory waits; -EIO once the simulation was stopped. */
SUSPENDS int mem_point(void);

/* ---- file.c, file_open.c ---- */
/* The kind of a range of the file, as its file system said. end 0: nothing is known. */
struct file_seen {
    uint64_t off, end;
    bool data;
};

enum file_place { PLACE_UNKNOWN /* until asked about holes */, PLACE_LOCAL, PLACE_NETWORK };

struct file_blk {
    struct blk blk;
    int fd;
    char *handle;            /* the provider's; owned; NULL: it is not one of its devices */
    uint64_t id_dev, id_ino; /* of a logical volume without one; 0: it is none */
    enum blk_lock lock;      /* what we hold on fd */
    bool is_dev;
    bool direct;
    enum file_place place;
    struct file_seen seen; /* the last answer; dropped by whatever could make a hole of it data */
    uint32_t writes;       /* that have ended */
    uint64_t hole_bytes, hole_bytes_at; /* as of then; 0: never looked */
    /* learnt: the file system refused it once */
    bool no_zero_range, no_punch, no_seek, no_discard;
};
extern const struct blk_ops file_ops;
static inline struct file_blk *file_of(const struct blk *blk)
{
    return container_of((struct blk *)(uintptr_t)blk, struct file_blk, blk);
}

/* ---- provider.c ---- */
bool provider_owns(const char *path);
SUSPENDS int provider_provide(const char *path, char **ret_node, char **ret_handle,
                              struct err *err);
SUSPENDS int provider_extend(struct blk *blk, uint64_t len, uint64_t *ret_len, struct err *err);

/* As blk_handle_identity() of the logical volume that device-mapper calls so; false: it is none. */
bool provider_dm_identity(const char *dm_uuid, uint64_t *ret_dev, uint64_t *ret_ino);
bool provider_find_identity(dev_t rdev, uint64_t *ret_dev, uint64_t *ret_ino);

/* ---- lock.c ---- */
/* From what fd holds now to another lock: 0, or -errno and nothing changed. */
int lock_change(int fd, enum blk_lock from, enum blk_lock to, const char *name, struct err *err);
/* Takes the bytes of a lock on a further descriptor of a file whose first one holds it. */
int lock_copy(int fd, enum blk_lock lock);

#endif
