/* Who has a pool's locks, for people: what was true a moment ago. */
#include <stdio.h>
#include <string.h>
#include "rt/offload.h"
#include "vol/internal.h"

void lock_list_fini(struct lock_list *list)
{
    vec_for_each(it, &list->list)
        free(it->name);
    vec_free(&list->list);
}

/* Takes the name. */
static int add(struct lock_list *list, char *name, const char *what, const struct lease_owner *who)
{
    struct lock_info info = {.name = name, .what = what, .here = true};

    if (!name)
        return -ENOMEM;
    if (who) {
        info.here = who->here;
        info.shared = who->shared;
        info.silent = who->silent;
        snprintf(info.host, sizeof(info.host), "%s", who->name);
    } else if (gethostname(info.host, sizeof(info.host) - 1) < 0) {
        snprintf(info.host, sizeof(info.host), "this host");
    }
    if (vec_push(&list->list, info) == 0)
        return 0;
    free(name);
    return -ENOMEM;
}

static int list_here(const struct catalog *cat, struct lock_list *ret)
{
    int rc = 0;

    if (lock_is_held(cat->pool, cat->images, NULL, NULL))
        rc = add(ret, strdup(cat->pool->id), "pool", NULL);
    vec_for_each(it, &cat->vols)
        if (rc == 0 && lock_is_held(cat->pool, cat->images, (*it)->vmid, (*it)->stem))
            rc = add(ret, cvol_id(cat, *it), "operation", NULL);
    return rc;
}

struct list_call {
    const struct catalog *cat;
    struct lease_space *space;
    bool disks;
    struct lock_list *ret;
    struct err *err;
};

static int add_owners(const struct list_call *c, const char *lease, const struct cvol *vol,
                      const char *what)
{
    struct lease_owner *owners;
    unsigned nr;
    int rc = lease_owners(c->space, lease, &owners, &nr, c->err);

    for (unsigned i = 0; i < nr && rc == 0; i++)
        rc = add(c->ret, vol ? cvol_id(c->cat, vol) : strdup(c->cat->pool->id), what, &owners[i]);
    free(owners);
    return rc;
}

static int call_list(void *arg)
{
    const struct list_call *c = arg;
    int rc = add_owners(c, LEASE_POOL, NULL, "pool");
    char name[LEASE_NAME_MAX + 1];

    vec_for_each(it, &c->cat->vols) {
        lease_name("op", (*it)->vmid, (*it)->stem, name);
        if (rc == 0)
            rc = add_owners(c, name, *it, "operation");
        lease_name("disk", (*it)->vmid, (*it)->stem, name);
        if (rc == 0 && c->disks)
            rc = add_owners(c, name, *it, "disk");
        lease_name("copy", (*it)->vmid, (*it)->stem, name);
        if (rc == 0 && c->disks)
            rc = add_owners(c, name, *it, "copy");
    }
    return rc;
}

int locks_list(const struct catalog *cat, struct lock_list *ret, struct err *err)
{
    struct locking how;

    *ret = (struct lock_list){0};
    int rc = lock_provider_of(cat->pool, &ret->by, err);
    if (rc < 0 || ret->by == BY_NONE)
        return rc;
    ret->joined = ret->by == BY_FLOCK || lock_provider_joined(cat->pool, cat->images, ret->by);
    if (ret->by == BY_FLOCK)
        rc = list_here(cat, ret);
    if (ret->by == BY_FLOCK || !ret->joined)
        return rc;
    rc = locking_of(cat->pool, cat->images, &how, err);
    if (rc < 0)
        return rc;
    struct list_call call = {cat, how.space, how.disks, ret, err};
    return offload(call_list, &call);
}

int locks_list_of(const struct pool *pool, struct lock_list *ret, struct err *err)
{
    _cleanup_(catalog_freep) struct catalog *cat = NULL;
    int rc = catalog_scan(pool, &cat, err);

    return rc < 0 ? rc : locks_list(cat, ret, err);
}

const char *lock_provider_name(enum lock_provider by)
{
    static const char *const names[] = {"none", "flock", "sanlock", "lvmlockd"};

    return names[by];
}

const char *lock_provider_reach(const struct pool *pool, enum lock_provider by)
{
    if (by == BY_NONE)
        return "nobody is excluded";
    if (by == BY_FLOCK)
        return pool->type == POOL_LVM ? "processes of this host only: no other host may use it"
               : pool->type == POOL_DIR
                   ? "processes of all hosts that share the file system's locks"
                   : "processes of all hosts, if its mounts share locks";
    return "all hosts";
}
