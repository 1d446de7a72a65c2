#include <fcntl.h>
#include <spawn.h>
#include <unistd.h>
#include "lvm_bench.h"

struct lvm lvm;
struct err err;
char bench_devices[3][32];

bool bench_has_dm(void)
{
    return access("/sys/class/misc/device-mapper", F_OK) == 0;
}

static _Noreturn void skip(const char *why)
{
    printf("SKIP: %s\n", why);
    test_sh("rm -rf %s", test_dir());
    exit(77);
}

#define DROP_LOOPS                                                                                 \
    "losetup -O NAME,BACK-FILE -n | grep %s/dev/.lv/ | while read -r l _; do losetup -d $l; done"

static void drop_loops(void)
{
    if (test_sh_rc(DROP_LOOPS, test_dir()) != 0)
        fprintf(stderr, "loop devices stay\n");
}

/* A test that fails ends at once, without atexit(): a shell does it then, whose input ends with
 * this process. */
static void watch_loops(void)
{
    char text[512];
    char *argv[] = {"sh", "-c", text, NULL};
    posix_spawn_file_actions_t actions;
    int ends[2];
    pid_t pid;

    snprintf(text, sizeof(text), "cat; " DROP_LOOPS, test_dir());
    CHECK_EQ(pipe2(ends, O_CLOEXEC), 0); /* the other end stays open */
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[0], 0);
    posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", O_WRONLY, 0);
    posix_spawn_file_actions_addopen(&actions, 2, "/dev/null", O_WRONLY, 0);
    CHECK_EQ(posix_spawnp(&pid, "sh", &actions, NULL, argv, environ), 0);
    posix_spawn_file_actions_destroy(&actions);
    close(ends[0]);
}

void bench_stand_in(void)
{
    static char dir[128];

    if (dir[0])
        return;
    snprintf(dir, sizeof(dir), "%s/dev", test_dir());
    setenv("DM_DEV_DIR", dir, 1);
    setenv("VARVE_TEST_LVM_LOOPS", dir, 1);
    watch_loops();
    atexit(drop_loops);
}

/* -d waits for our descriptor, which stays open. */
void bench_loop(unsigned i, const char *size)
{
    char path[128];

    if (test_sh_rc("cd %s && truncate -s %s pv%u && losetup -f --show pv%u >loop%u 2>/dev/null",
                   test_dir(), size, i, i, i) != 0)
        skip("no loop devices");
    snprintf(path, sizeof(path), "%s/loop%u", test_dir(), i);
    FILE *f = fopen(path, "r");
    CHECK(f && fscanf(f, "%31s", bench_devices[i]) == 1);
    fclose(f);
    int fd = open(bench_devices[i], O_RDONLY | O_CLOEXEC);
    CHECK(fd >= 0);
    test_sh("losetup -d %s", bench_devices[i]);
}

void bench_use(const char *list)
{
    setenv("VARVE_TEST_LVM_DEVICES", list, 1);
}

void bench_before(const char *text)
{
    setenv("VARVE_TEST_LVM_BEFORE", text, 1);
}

__attribute__((constructor)) static void find_tools(void)
{
    setenv("PATH", "/usr/sbin:/sbin:/usr/bin:/bin", 1);
}

/* With device-mapper the LVs must go too, or the loop device stays. */
static void clean_up(void)
{
    if (test_sh_rc("lvm vgchange -an vt >/dev/null 2>&1") != 0)
        fprintf(stderr, "vt stays active\n");
}

static void make_bench(void)
{
    const char *tools = getenv("VARVE_TEST_LVM_DIR");
    static bool made;
    char text[256];

    if (made)
        return;
    made = true;
    test_need("lvm");
    test_need("losetup");
    if (geteuid() != 0)
        skip("needs root");
    bench_loop(0, "2G");
    bench_loop(1, "200M");
    snprintf(text, sizeof(text), "%s:%s", tools ? tools : VARVE_TEST_LVM_DIR, getenv("PATH"));
    setenv("PATH", text, 1);
    snprintf(text, sizeof(text), "%s/lvm", test_dir());
    setenv("LVM_SYSTEM_DIR", text, 1);
    test_sh("cd %s && mkdir lvm && printf 'global { locking_dir=\"%s/lvm\" }\\n' >lvm/lvm.conf",
            test_dir(), test_dir());
    bench_use(bench_devices[0]);
    test_sh("(lvm pvcreate -q --metadatasize 8m %s && lvm vgcreate -q vt %s) >/dev/null 2>&1",
            bench_devices[0], bench_devices[0]);
    if (bench_has_dm())
        atexit(clean_up);
}

void bench_begin(void)
{
    make_bench();
    unsetenv("VARVE_TEST_LVM_BEFORE");
    unsetenv("VARVE_TEST_LVM_UNDER");
    bench_use(bench_devices[0]);
    lvm = (struct lvm){.vg = "vt"};
    struct lvm_vg *vg = bench_report();
    const char **names = calloc(vg->lvs.len + 1, sizeof(*names));
    for (size_t i = 0; i < vg->lvs.len; i++)
        names[i] = vg->lvs.data[i].name;
    CHECK_RC(lvm_remove(&lvm, names, &err), 0);
    const char **tags = calloc(vg->tags.len + 1, sizeof(*tags));
    for (size_t i = 0; i < vg->tags.len; i++)
        tags[i] = vg->tags.data[i];
    CHECK_RC(lvm_change_tags(&lvm, NULL, NULL, tags, &err), 0);
    free(names);
    free(tags);
    lvm_vg_free(vg);
    lvm.counts = (struct lvm_counts){0};
}

struct lvm_vg *bench_report(void)
{
    struct lvm_vg *vg;

    CHECK_RC(lvm_report(&lvm, &vg, &err), 0);
    return vg;
}

int bench_make(const char *name, uint64_t len)
{
    const struct lvm_new lv = {.name = name, .len = len};

    return lvm_create(&lvm, &lv, &err);
}

uint64_t bench_len_of(const char *name)
{
    struct lvm_vg *vg = bench_report();
    const struct lvm_lv *lv = lvm_vg_find(vg, name);
    uint64_t len = lv ? lv->len : 0;

    lvm_vg_free(vg);
    return len;
}
