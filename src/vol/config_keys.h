/* The keys of a storage.cfg section: which are read here, and which are known to belong to others.
 */
#ifndef VARVE_VOL_CONFIG_KEYS_H
#define VARVE_VOL_CONFIG_KEYS_H

enum config_key {
    KEY_UNKNOWN, /* warned about */
    KEY_OTHER,   /* known, of no meaning here */
    KEY_PATH,
    KEY_VGNAME,
    KEY_CONTENT,
    KEY_DISABLE,
    KEY_SNAPEXT,
    KEY_MOUNTPOINT,
    KEY_CLUSTER_SIZE,
    KEY_SNAPSHOT_CLUSTER_SIZE,
    KEY_EXTENDED_L2,
    KEY_CACHE_SIZE,
    KEY_PREALLOCATION,
    KEY_LOCK,
    KEY_LOCK_LEASES,
    KEY_LEASE_TIMEOUT,
    KEY_THIN_CHUNK,
    KEY_BWLIMIT,
    KEY_SAFEREMOVE,
    KEY_SAFEREMOVE_RATE,
    KEY_SAFEREMOVE_STEP,
};
enum config_key config_key_find(const char *name);

#endif
