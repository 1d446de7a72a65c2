/*
 * The NBD wire: numbers and structs of the protocol document (doc/proto.md of the NBD project),
 * sections "Fixed newstyle negotiation", "Transmission", "Structured replies", "Metadata querying".
 * No code. Structs are as on the wire, without padding.
 */
#ifndef VARVE_EXPORT_NBD_PROTO_H
#define VARVE_EXPORT_NBD_PROTO_H

#include <assert.h>
#include "base/be.h"

#define NBD_MAGIC_INIT       0x4e42444d41474943ull /* "NBDMAGIC" */
#define NBD_MAGIC_OPTION     0x49484156454f5054ull /* "IHAVEOPT" */
#define NBD_MAGIC_OPTREPLY   0x0003e889045565a9ull
#define NBD_MAGIC_REQUEST    0x25609513u
#define NBD_MAGIC_SIMPLE     0x67446698u
#define NBD_MAGIC_STRUCTURED 0x668e33efu

/* handshake flags; the client answers with those it takes */
enum {
    NBD_FLAG_FIXED_NEWSTYLE = 1 << 0,
    NBD_FLAG_NO_ZEROES = 1 << 1,
};

enum nbd_option_type {
    NBD_OPT_EXPORT_NAME = 1,
    NBD_OPT_ABORT = 2,
    NBD_OPT_LIST = 3,
    NBD_OPT_STARTTLS = 5,
    NBD_OPT_INFO = 6,
    NBD_OPT_GO = 7,
    NBD_OPT_STRUCTURED_REPLY = 8,
    NBD_OPT_LIST_META_CONTEXT = 9,
    NBD_OPT_SET_META_CONTEXT = 10,
};

#define NBD_REP_ERROR 0x80000000u
enum nbd_option_reply {
    NBD_REP_ACK = 1,
    NBD_REP_SERVER = 2,
    NBD_REP_INFO = 3,
    NBD_REP_META_CONTEXT = 4,
    NBD_REP_ERR_UNSUP = (int)(NBD_REP_ERROR | 1),
    NBD_REP_ERR_INVALID = (int)(NBD_REP_ERROR | 3),
    NBD_REP_ERR_UNKNOWN = (int)(NBD_REP_ERROR | 6),
    NBD_REP_ERR_TOO_BIG = (int)(NBD_REP_ERROR | 9),
};

enum nbd_info {
    NBD_INFO_EXPORT = 0,
    NBD_INFO_NAME = 1,
    NBD_INFO_DESCRIPTION = 2,
    NBD_INFO_BLOCK_SIZE = 3,
};

/* transmission flags */
enum {
    NBD_FLAG_HAS_FLAGS = 1 << 0,
    NBD_FLAG_READ_ONLY = 1 << 1,
    NBD_FLAG_SEND_FLUSH = 1 << 2,
    NBD_FLAG_SEND_FUA = 1 << 3,
    NBD_FLAG_SEND_TRIM = 1 << 5,
    NBD_FLAG_SEND_WRITE_ZEROES = 1 << 6,
    NBD_FLAG_SEND_DF = 1 << 7,
    NBD_FLAG_CAN_MULTI_CONN = 1 << 8,
    NBD_FLAG_SEND_CACHE = 1 << 10,
    NBD_FLAG_SEND_FAST_ZERO = 1 << 11,
};

enum nbd_command {
    NBD_CMD_READ = 0,
    NBD_CMD_WRITE = 1,
    NBD_CMD_DISC = 2,
    NBD_CMD_FLUSH = 3,
    NBD_CMD_TRIM = 4,
    NBD_CMD_CACHE = 5,
    NBD_CMD_WRITE_ZEROES = 6,
    NBD_CMD_BLOCK_STATUS = 7,
};

enum nbd_command_flag {
    NBD_CMD_FLAG_FUA = 1 << 0,
    NBD_CMD_FLAG_NO_HOLE = 1 << 1,
    NBD_CMD_FLAG_DF = 1 << 2,
    NBD_CMD_FLAG_REQ_ONE = 1 << 3,
    NBD_CMD_FLAG_FAST_ZERO = 1 << 4,
};

#define NBD_REPLY_FLAG_DONE 1u
enum nbd_reply_type {
    NBD_REPLY_NONE = 0,
    NBD_REPLY_OFFSET_DATA = 1,
    NBD_REPLY_OFFSET_HOLE = 2,
    NBD_REPLY_BLOCK_STATUS = 5,
    NBD_REPLY_ERROR = 0x8001,
};

/* errors on the wire: Linux numbers, fixed by the protocol */
enum nbd_error {
    NBD_OK = 0,
    NBD_EPERM = 1,
    NBD_EIO = 5,
    NBD_ENOMEM = 12,
    NBD_EINVAL = 22,
    NBD_ENOSPC = 28,
    NBD_EOVERFLOW = 75,
    NBD_ENOTSUP = 95,
    NBD_ESHUTDOWN = 108,
};

/* base:allocation */
enum {
    NBD_STATE_HOLE = 1 << 0,
    NBD_STATE_ZERO = 1 << 1,
};

struct nbd_wire_greeting {
    be64 init_magic, option_magic;
    be16 flags;
} __attribute__((packed));
static_assert(sizeof(struct nbd_wire_greeting) == 18, "wire");

struct nbd_wire_option {
    be64 magic;
    be32 type, len;
} __attribute__((packed));
static_assert(sizeof(struct nbd_wire_option) == 16, "wire");

struct nbd_wire_option_reply {
    be64 magic;
    be32 option, type, len;
} __attribute__((packed));
static_assert(sizeof(struct nbd_wire_option_reply) == 20, "wire");

struct nbd_wire_request {
    be32 magic;
    be16 flags, type;
    be64 cookie, off;
    be32 len;
} __attribute__((packed));
static_assert(sizeof(struct nbd_wire_request) == 28, "wire");

struct nbd_wire_simple {
    be32 magic, error;
    be64 cookie;
} __attribute__((packed));
static_assert(sizeof(struct nbd_wire_simple) == 16, "wire");

struct nbd_wire_chunk {
    be32 magic;
    be16 flags, type;
    be64 cookie;
    be32 len; /* of what follows */
} __attribute__((packed));
static_assert(sizeof(struct nbd_wire_chunk) == 20, "wire");

struct nbd_wire_data { /* OFFSET_DATA; then the data */
    struct nbd_wire_chunk chunk;
    be64 off;
} __attribute__((packed));
static_assert(sizeof(struct nbd_wire_data) == 28, "wire");

struct nbd_wire_hole { /* OFFSET_HOLE */
    struct nbd_wire_chunk chunk;
    be64 off;
    be32 len;
} __attribute__((packed));
static_assert(sizeof(struct nbd_wire_hole) == 32, "wire");

struct nbd_wire_error { /* ERROR without a message */
    struct nbd_wire_chunk chunk;
    be32 error;
    be16 text_len;
} __attribute__((packed));
static_assert(sizeof(struct nbd_wire_error) == 26, "wire");

struct nbd_wire_status { /* BLOCK_STATUS; then extents */
    struct nbd_wire_chunk chunk;
    be32 context;
} __attribute__((packed));
static_assert(sizeof(struct nbd_wire_status) == 24, "wire");

struct nbd_wire_extent {
    be32 len, flags;
};
static_assert(sizeof(struct nbd_wire_extent) == 8, "wire");

#endif
