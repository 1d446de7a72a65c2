/*
 * Volumes that can be made longer: loop devices, and a provider for them.
 *
 * A volume has the path <folder>/<name>, under which nothing is to be found: the provider gives the
 * device. Its handle is the name of its backing file.
 */
#ifndef VARVE_TESTS_LOOPVOL_H
#define VARVE_TESTS_LOOPVOL_H

#include <stdbool.h>
#include <stdint.h>

struct loopvol {
    char path[256], file[256], dev[32];
    uint64_t room;         /* bytes that it may have */
    const char *room_file; /* or what stands there; borrowed */
    uint64_t delay_ns;     /* an extension takes */
    unsigned extends, failed;
};

#define LOOPVOL_EXTENT ((uint64_t)4 << 20)

/* Makes one of len bytes, in `folder`, backed by a file there, and sets the provider. False: loop
 * devices cannot be made here. */
bool loopvol_new(const char *folder, const char *name, uint64_t len, struct loopvol **ret);
/* Of an existing backing file of this name. */
bool loopvol_attach(const char *folder, const char *name, struct loopvol **ret);
uint64_t loopvol_len(const struct loopvol *v);
/* To this length, rounded up to extents; nobody writes to what goes. */
void loopvol_set_len(struct loopvol *v, uint64_t len);
void loopvol_drop(struct loopvol *v); /* the device; frees v */

#endif
