/*
 * One call of vol/lvm.h from the command line, for tests on hosts of their own:
 *
 *   lvm_prog [-s] VG report | device LV | create LV BYTES MODE | remove LV... | rename LV NEW
 *            | extend LV BYTES [shared] | reduce LV BYTES | tag LV|- +TAG|-TAG...
 *            | activate MODE LV... | deactivate LV... | refresh LV...
 *
 * -s: the VG is under lvmlockd. MODE: no, plain, exclusive, shared. Prints the error's name and
 * text, exit status 1 then.
 */
#include <stdio.h>
#include <string.h>
#include "rt/reactor.h"
#include "../../../src/vol/lvm.h"

static struct lvm lvm;
static char **args; /* after the verb; NULL-terminated */

static enum lvm_mode mode_of(const char *text)
{
    static const char *const names[] = {"no", "plain", "exclusive", "shared"};

    for (unsigned i = 0; i < 4; i++)
        if (strcmp(text, names[i]) == 0)
            return (enum lvm_mode)i;
    fprintf(stderr, "no such mode: %s\n", text);
    exit(2);
}

static const char *const *list(char **from)
{
    return (const char *const *)from;
}

static SUSPENDS int print_report(struct err *err)
{
    struct lvm_vg *vg;
    int rc = lvm_report(&lvm, &vg, err);

    if (rc < 0)
        return rc;
    printf("%s shared=%d unlocked=%d missing=%u\n", vg->name, vg->shared, vg->unlocked,
           vg->nb_missing);
    vec_for_each(lv, &vg->lvs) {
        printf("%s %llu active=%d open=%d", lv->name, (unsigned long long)lv->len, lv->active,
               lv->open);
        vec_for_each(tag, &lv->tags)
            printf(" %s", *tag);
        printf("\n");
    }
    lvm_vg_free(vg);
    return 0;
}

static SUSPENDS int print_device(struct err *err)
{
    char *path;
    int rc = lvm_device(&lvm, args[0], 1000, &path, err);

    if (rc == 0) {
        printf("%s\n", path);
        free(path);
    }
    return rc;
}

static SUSPENDS int tag(struct err *err)
{
    const char *names[] = {args[0], NULL}, *add[64] = {NULL}, *del[64] = {NULL};
    unsigned nr_add = 0, nr_del = 0;

    for (char **t = args + 1; *t && nr_add + nr_del < 63; t++) {
        if (**t == '+')
            add[nr_add++] = *t + 1;
        else
            del[nr_del++] = *t + 1;
    }
    return lvm_change_tags(&lvm, strcmp(names[0], "-") ? names : NULL, add, del, err);
}

static SUSPENDS int call(const char *verb, unsigned nr, struct err *err)
{
    uint64_t len = nr > 1 ? strtoull(args[1], NULL, 10) : 0;

    if (strcmp(verb, "report") == 0)
        return print_report(err);
    if (strcmp(verb, "device") == 0 && nr == 1)
        return print_device(err);
    if (strcmp(verb, "create") == 0 && nr == 3)
        return lvm_create(
            &lvm, &(struct lvm_new){.name = args[0], .len = len, .mode = mode_of(args[2])}, err);
    if (strcmp(verb, "remove") == 0)
        return lvm_remove(&lvm, list(args), err);
    if (strcmp(verb, "rename") == 0 && nr == 2)
        return lvm_rename(&lvm, args[0], args[1], err);
    if (strcmp(verb, "extend") == 0 && nr >= 2)
        return lvm_extend(&lvm, args[0], len, nr > 2, err);
    if (strcmp(verb, "reduce") == 0 && nr == 2)
        return lvm_reduce(&lvm, args[0], len, err);
    if (strcmp(verb, "tag") == 0 && nr >= 2)
        return tag(err);
    if (strcmp(verb, "activate") == 0 && nr >= 2)
        return lvm_activate(&lvm, list(args + 1), mode_of(args[0]), err);
    if (strcmp(verb, "deactivate") == 0)
        return lvm_deactivate(&lvm, list(args), err);
    if (strcmp(verb, "refresh") == 0)
        return lvm_refresh(&lvm, list(args), err);
    return err_set(err, -EINVAL, "what is '%s'?", verb);
}

struct order {
    const char *verb;
    unsigned nr;
};

static SUSPENDS int run(void *arg)
{
    const struct order *order = arg;
    struct err err = {0};
    int rc = call(order->verb, order->nr, &err);

    if (rc < 0)
        printf("%s: %s\n", strerrorname_np(-rc), err_text(&err));
    return rc < 0;
}

int main(int argc, char **argv)
{
    int i = 1;

    if (i < argc && strcmp(argv[i], "-s") == 0) {
        lvm.shared = true;
        i++;
    }
    if (argc - i < 2) {
        fprintf(stderr, "lvm_prog [-s] VG VERB ...\n");
        return 2;
    }
    lvm.vg = argv[i];
    args = argv + i + 2;
    return reactor_run(run, &(struct order){argv[i + 1], (unsigned)(argc - i - 2)});
}
