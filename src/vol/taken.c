/*
 * When a snapshot was taken: the time of the last change of its file, which nothing else records;
 * of an LV a tag, which goes with it.
 *
 * 1. Taking a snapshot sets it: the last write to an idle image may have been long before.
 * 2. A snapshot's file changes later only by the deletion of another one: data or a header are
 * written into it, or the file below takes its name. The deletion's intent has the times of all
 * files it will touch, under the names they will have, and whoever ends it sets them again.
 */
#include <fcntl.h>
#include <time.h>
#include "vol/store_lvm.h"

/* Not set on another user's file, and where there are no times: nothing depends on it. */
void taken_set(const char *path, struct timespec when) SUSPENDS_UNCHECKED
{
    struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, when};
    struct lvm_store *vg = lvm_store_of(path);

    if (vg) {
        lvm_store_set_taken(vg, lvm_store_name(vg, path), when.tv_sec);
        return;
    }
    (void)utimensat(AT_FDCWD, path, times, AT_SYMLINK_NOFOLLOW);
}

struct timespec taken_now(void)
{
    struct timespec now = {0};

    clock_gettime(CLOCK_REALTIME, &now);
    return now;
}

void taken_set_not_before(const char *path, const struct intent *intent)
{
    struct stat st;

    if (store_stat(path, &st) < 0)
        return;
    if (st.st_mtim.tv_sec < intent->begun.tv_sec)
        taken_set(path, intent->begun);
}

void taken_add(json_t *list, const struct cfile *f, const char *vmid, const char *name)
{
    if (f->snap)
        json_array_append_new(list, json_pack("{s:s, s:s, s:I, s:I}", "vmid", vmid, "file", name,
                                              "sec", (json_int_t)f->st.st_mtim.tv_sec, "nsec",
                                              (json_int_t)f->st.st_mtim.tv_nsec));
}

json_t *taken_record(const struct catalog *cat, struct cfile *const *kids, unsigned nr,
                     const char *final)
{
    json_t *list = json_array();

    for (unsigned i = 0; i < nr && list; i++) {
        unsigned nr_above = 0;

        taken_add(list, kids[i], kids[i]->vmid, final ? final : kids[i]->name);
        if (!final)
            continue;
        _cleanup_(freep) struct cfile **above = cfile_children(cat, kids[i], &nr_above);
        for (unsigned j = 0; above && j < nr_above; j++)
            taken_add(list, above[j], above[j]->vmid, above[j]->name);
    }
    return list;
}

void taken_restore(const char *images, const struct intent *intent)
{
    const json_t *list = json_object_get(intent->json, "taken"), *one;
    size_t i;

    json_array_foreach(list, i, one)
    {
        const char *file = intent_name(one, "file");
        _cleanup_(freep) char *dir = intent_dir(images, one);
        _cleanup_(freep) char *path = dir && file ? path_join(dir, file) : NULL;
        struct timespec when = {
            .tv_sec = (time_t)json_integer_value(json_object_get(one, "sec")),
            .tv_nsec = (long)json_integer_value(json_object_get(one, "nsec")),
        };

        if (path && when.tv_nsec >= 0 && when.tv_nsec < 1000000000)
            taken_set(path, when);
    }
}
