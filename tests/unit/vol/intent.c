/* Intents and locks: whose they are, what a dead one leaves. */
#include <fcntl.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>
#include "test.h"
#include "../../../src/vol/internal.h"

static const char *images(void)
{
    static char path[256];

    snprintf(path, sizeof(path), "%s/images", test_dir());
    test_sh("rm -rf %s && mkdir -p %s/.varve", path, path);
    return path;
}

TEST(an_intent_is_there_until_its_end)
{
    const char *dir = images();
    struct intents list = {0};
    struct intent *in;
    struct err err = {0};

    CHECK_EQ(intent_begin(dir, "0123456789abcdef", "snapshot", json_pack("{s:s}", "vmid", "100"),
                          &in, &err),
             0);
    CHECK_EQ(intents_load(dir, false, &list, &err), 0);
    CHECK_EQ(list.list.len, 1);
    CHECK_STR(intent_op(list.list.data[0]), "snapshot");
    CHECK_STR(list.list.data[0]->id, "0123456789abcdef");
    CHECK_STR(intent_str(list.list.data[0]->json, "vmid"), "100");
    intents_fini(&list);
    CHECK_EQ(intent_end(in, &err), 0);
    list = (struct intents){0};
    CHECK_EQ(intents_load(dir, true, &list, &err), 0);
    CHECK_EQ(list.list.len, 0);
    intents_fini(&list);
}

/* Claiming: only what belongs to nobody that lives. */
TEST(a_dead_owners_intent_is_claimed)
{
    const char *dir = images();
    struct intents list = {0}, again = {0};
    struct err err = {0};
    int up[2];

    CHECK_EQ(pipe(up), 0);
    pid_t pid = fork();
    if (pid == 0) {
        struct intent *in;

        intent_begin(dir, "1", "rollback", json_object(), &in, NULL);
        (void)!write(up[1], "x", 1);
        pause();
    }
    char c;
    CHECK_EQ(read(up[0], &c, 1), 1);
    CHECK_EQ(intents_load(dir, true, &list, &err), 0);
    CHECK_EQ(list.list.len, 1);
    CHECK_EQ(list.list.data[0]->fd, -1); /* it lives */
    intents_fini(&list);
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    list = (struct intents){0};
    CHECK_EQ(intents_load(dir, true, &list, &err), 0);
    CHECK(list.list.data[0]->fd >= 0);
    CHECK_EQ(intents_load(dir, true, &again, &err), 0);
    CHECK_EQ(again.list.data[0]->fd, -1); /* claimed already */
    intents_fini(&again);
    intents_fini(&list);
}

TEST(one_intent_is_claimed_by_its_id)
{
    const char *dir = images();
    struct intent *mine, *got;
    struct err err = {0};
    bool live;

    CHECK_EQ(intent_claim(dir, "77", &got, &live, &err), 0);
    CHECK(!got && !live); /* there is none */
    CHECK_EQ(intent_begin(dir, "77", "move-in", json_pack("{s:s}", "source", "p"), &mine, &err), 0);
    CHECK_EQ(intent_claim(dir, "77", &got, &live, &err), 0);
    CHECK(!got && live); /* its operation runs */
    intent_leave(mine);
    CHECK_EQ(intent_claim(dir, "77", &got, &live, &err), 0);
    CHECK(got && !live);
    CHECK_STR(intent_str(got->json, "source"), "p");
    CHECK_EQ(intent_end(got, &err), 0);
    CHECK_EQ(intent_claim(dir, "77", &got, &live, &err), 0);
    CHECK(!got && !live);
    CHECK_EQ(intent_claim(dir, "../77", &got, &live, &err), -EUCLEAN);
}

TEST(damaged_intents_are_errors)
{
    const char *dir = images();
    struct intents list = {0};
    struct err err = {0};

    test_sh("echo '{' >%s/.varve/intent-1.json", dir);
    CHECK_EQ(intents_load(dir, true, &list, &err), -EUCLEAN);
    CHECK(strstr(err.text, "intent-1.json"));
    test_sh("echo '{\"version\": 2}' >%s/.varve/intent-1.json", dir);
    CHECK_EQ(intents_load(dir, true, &list, &err), -ENOTSUP);
    test_sh("rm %s/.varve/intent-1.json; echo x >%s/.varve/new-2", dir, dir);
    CHECK_EQ(intents_load(dir, true, &list, &err), 0); /* never named: nothing was done under it */
    intents_fini(&list);
    test_sh("test ! -e %s/.varve/new-2", dir);
}

TEST(names_in_intents_stay_in_the_pool)
{
    json_t *o =
        json_pack("{s:s, s:s, s:s, s:s}", "a", "x.qcow2", "b", "../x", "c", "..", "vmid", "../etc");

    CHECK_STR(intent_name(o, "a"), "x.qcow2");
    CHECK(!intent_name(o, "b") && !intent_name(o, "c") && !intent_name(o, "none"));
    CHECK(!intent_dir("/p/images", o));
    json_decref(o);
}

CO_TEST(locks_exclude_and_need_no_file_of_their_own)
{
    const char *dir = images();
    struct pool pool = {.id = "p"}, free_pool = {.id = "p", .lock = "none"};
    struct pool_lock a, b;
    struct err err = {0};

    CHECK_EQ(lock_volume(&pool, dir, "100", "vm-100-disk-0", &a, &err), 0);
    CHECK_EQ(lock_volume(&pool, dir, "100", "vm-100-disk-0", &b, &err), -EBUSY);
    CHECK(strstr(err.text, "p:100/vm-100-disk-0"));
    CHECK_EQ(lock_volume(&pool, dir, "100", "vm-100-disk-1", &b, &err), 0);
    lock_release(&b);
    CHECK_EQ(lock_volume(&free_pool, dir, "100", "vm-100-disk-0", &b, &err), 0);
    lock_release(&b);
    lock_release(&a);
    CHECK_EQ(lock_pool(&pool, dir, &a, &err), 0);
    lock_release(&a);
    lock_release(&a);
    test_sh("test \"$(ls %s/.varve)\" = lock && test ! -s %s/.varve/lock", dir, dir);
}

/* One file for a volume group, whatever storages name it. */
CO_TEST(volume_groups_are_locked_on_the_host)
{
    struct pool pool = {.id = "p", .type = POOL_LVM, .vgname = "vg"};
    struct pool other = {.id = "q", .type = POOL_LVM, .vgname = "vg"};
    struct pool free_pool = {.id = "r", .type = POOL_LVM, .vgname = "vg", .lock = "none"};
    struct pool_lock a, b;
    struct err err = {0};
    char dir[256];
    int status;

    snprintf(dir, sizeof(dir), "%s/locks", test_dir());
    setenv("VARVE_LOCK_DIR", dir, 1);
    CHECK_EQ(lock_volume(&pool, "/dev/vg", "", "vm-100-disk-0", &a, &err), 0);
    CHECK_EQ(lock_volume(&other, "/dev/vg", "", "vm-100-disk-0", &b, &err), -EBUSY);
    CHECK(strstr(err.text, "q:vm-100-disk-0"));
    CHECK_EQ(lock_volume(&free_pool, "/dev/vg", "", "vm-100-disk-0", &b, &err), 0);
    lock_release(&b);
    lock_release(&a);

    CHECK_EQ(lock_pool(&pool, "/dev/vg", &b, &err), 0);
    pid_t pid = fork();
    if (pid == 0) { /* another process */
        struct flock fl = {.l_type = F_WRLCK, .l_len = 1};
        int fd = open(strcat(dir, "/vg.lock"), O_RDWR);

        _exit(fcntl(fd, F_OFD_SETLK, &fl) < 0 && errno == EAGAIN ? 0 : 1);
    }
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    CHECK_EQ(status, 0);
    lock_release(&b);
    test_sh("test \"$(ls %s)\" = vg.lock && test ! -s %s/vg.lock && flock -n %s/vg.lock true", dir,
            dir, dir);
    test_sh("chmod 777 %s", dir);
    CHECK_EQ(lock_pool(&pool, "/dev/vg", &a, &err), -EPERM);
    CHECK(strstr(err.text, dir));
    unsetenv("VARVE_LOCK_DIR");
}
