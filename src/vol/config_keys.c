/* Table of configuration keys: see config_keys.h. */
#include <string.h>
#include "base/own.h"
#include "vol/config_keys.h"

static const struct {
    const char *name;
    enum config_key key;
} keys[] = {
    {"path", KEY_PATH},
    {"vgname", KEY_VGNAME},
    {"content", KEY_CONTENT},
    {"disable", KEY_DISABLE},
    {"snapext", KEY_SNAPEXT},
    {"snapshot-as-volume-chain", KEY_SNAPEXT},
    {"is_mountpoint", KEY_MOUNTPOINT},
    {"cluster-size", KEY_CLUSTER_SIZE},
    {"snapshot-cluster-size", KEY_SNAPSHOT_CLUSTER_SIZE},
    {"extended-l2", KEY_EXTENDED_L2},
    {"cache-size", KEY_CACHE_SIZE},
    {"preallocation", KEY_PREALLOCATION},
    {"lock", KEY_LOCK},
    {"lock-leases", KEY_LOCK_LEASES},
    {"lease-timeout", KEY_LEASE_TIMEOUT},
    {"thin-chunk", KEY_THIN_CHUNK},
    {"bwlimit", KEY_BWLIMIT},
    {"saferemove", KEY_SAFEREMOVE},
    {"saferemove_throughput", KEY_SAFEREMOVE_RATE},
    {"saferemove-stepsize", KEY_SAFEREMOVE_STEP},
};

static const char *const others[] = {
    "base",
    "blocksize",
    "comment",
    "content-dirs",
    "create-base-path",
    "create-subdirs",
    "domain",
    "export",
    "format",
    "fs-name",
    "fuse",
    "keyring",
    "max-protected-backups",
    "maxfiles",
    "mkdir",
    "monhost",
    "nodes",
    "options",
    "password",
    "port",
    "prune-backups",
    "server",
    "share",
    "shared",
    "smbversion",
    "subdir",
    "tagged_only",
    "username",
};

enum config_key config_key_find(const char *name)
{
    for (unsigned i = 0; i < ARRAY_SIZE(keys); i++)
        if (strcmp(keys[i].name, name) == 0)
            return keys[i].key;
    for (unsigned i = 0; i < ARRAY_SIZE(others); i++)
        if (strcmp(others[i], name) == 0)
            return KEY_OTHER;
    return KEY_UNKNOWN;
}
