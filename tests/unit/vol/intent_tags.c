/*
 * Intents of a volume group, on LVM's own metadata: whose they are, and what is left of them when a
 * process is killed, a host is started anew, or another host is at work. Other processes are this
 * program again; hosts, boots and machines are told apart in namespaces of their own.
 */
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <unistd.h>
#include "lvm_bench.h"
#include "../../../src/vol/intent_tags.h"

static struct pool pool = {.id = "san", .type = POOL_LVM, .type_name = "lvm", .vgname = "vt"};
static struct lvm_store *store;
static char no_locks[] = "none";

static void open_store(void)
{
    CHECK_RC(lvm_store_open(&pool, &store, &err), 0);
}

SUSPENDS static void begin(void)
{
    char path[256];

    bench_begin();
    test_sh("rm -rf %s/run %s/locks; mkdir %s/run", test_dir(), test_dir(), test_dir());
    snprintf(path, sizeof(path), "%s/run", test_dir());
    setenv("VARVE_RUNTIME", path, 1);
    snprintf(path, sizeof(path), "%s/locks", test_dir());
    setenv("VARVE_LOCK_DIR", path, 1);
    open_store();
    lvm_dir_forget(&store->dir);
}

static json_t *body(size_t len)
{
    _cleanup_(freep) char *text = malloc(len + 1);

    for (size_t i = 0; i < len; i++)
        text[i] = (char)('a' + i % 26);
    text[len] = '\0';
    return json_pack("{s:s, s:[{s:s, s:s}]}", "text", text, "vols", "vmid", "", "stem",
                     "vm-100-disk-0");
}

static size_t text_len(const struct intent *in)
{
    return strlen(intent_str(in->json, "text"));
}

/* ---- other processes ---- */

struct proc {
    pid_t pid;
    FILE *to, *from;
};
struct where { /* NULL: as here */
    const char *host, *boot, *machine, *runtime, *crash, *before;
    bool no_locks;
};

static void set(const char *name, const char *value)
{
    if (value)
        setenv(name, value, 1);
    else
        unsetenv(name);
}

/* Each host has one of its own. */
static void put_runtime(const char *host)
{
    char path[256];

    snprintf(path, sizeof(path), "%s/run-%s", test_dir(), host);
    setenv("VARVE_RUNTIME", path, 1);
}

static struct proc start(const char *role, struct where w)
{
    int up[2], down[2];

    CHECK(pipe2(up, O_CLOEXEC) == 0 && pipe2(down, O_CLOEXEC) == 0);
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        dup2(down[0], 0);
        dup2(up[1], 1);
        set("TEST_ROLE", role);
        set("TEST_HOST", w.host);
        set("TEST_BOOT", w.boot);
        set("TEST_MACHINE", w.machine);
        set("VARVE_CRASH_AT", w.crash);
        set("TEST_NO_LOCKS", w.no_locks ? "1" : NULL);
        set("TEST_DIR", test_dir());
        if (w.runtime)
            setenv("VARVE_RUNTIME", w.runtime, 1);
        else if (w.host)
            put_runtime(w.host);
        if (w.before)
            setenv("VARVE_TEST_LVM_BEFORE", w.before, 1);
        execl("/proc/self/exe", "process", "a_process_of_its_own", NULL);
        _exit(127);
    }
    CHECK(pid > 0);
    close(down[0]);
    close(up[1]);
    return (struct proc){pid, fdopen(down[1], "w"), fdopen(up[0], "r")};
}

/* The next line it says; "" when it has ended. */
static const char *hear(struct proc *p)
{
    static char line[800];

    if (!fgets(line, sizeof(line), p->from))
        line[0] = '\0';
    line[strcspn(line, "\n")] = '\0';
    return line;
}

static void tell(struct proc *p, const char *word)
{
    fprintf(p->to, "%s\n", word);
    fflush(p->to);
}

static int finish(struct proc *p)
{
    int status;

    fclose(p->to);
    while (*hear(p))
        ;
    fclose(p->from);
    CHECK(waitpid(p->pid, &status, 0) == p->pid);
    return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

static void kill_it(struct proc *p)
{
    kill(p->pid, SIGKILL);
    CHECK_EQ(finish(p), -SIGKILL);
}

/* A text in place of a file of the system, for this process alone. */
static void replace(const char *path, const char *text)
{
    char from[300];

    if (!text)
        return;
    snprintf(from, sizeof(from), "%s/replaced-%d-%s", getenv("TEST_DIR"), getpid(),
             strrchr(path, '/') + 1);
    FILE *f = fopen(from, "w");
    CHECK(f && fprintf(f, "%s\n", text) > 0 && fclose(f) == 0);
    CHECK(unshare(CLONE_NEWNS) == 0 && mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0);
    CHECK(mount(from, path, NULL, MS_BIND, NULL) == 0);
}

static void say(const char *fmt, ...) PRINTF_LIKE(1, 2);
static void say(const char *fmt, ...)
{
    va_list ap;

    va_start(ap, fmt);
    vprintf(fmt, ap);
    va_end(ap);
    printf("\n");
    fflush(stdout);
}

static const char *wait_for_word(void)
{
    static char line[80];

    if (!fgets(line, sizeof(line), stdin))
        line[0] = '\0';
    line[strcspn(line, "\n")] = '\0';
    return line;
}

/* "begin ID LEN": until told to end it, or killed. */
SUSPENDS static void role_begin(const char *args)
{
    char id[24];
    size_t len;
    struct intent *in;

    CHECK(sscanf(args, "%23s %zu", id, &len) == 2);
    err = (struct err){0};
    int rc = intent_begin(store->root, id, "snapshot", body(len), &in, &err);
    if (rc < 0) {
        say("%s: %s", strerrorname_np(-rc), err_text(&err));
        return;
    }
    say("begun");
    if (strcmp(wait_for_word(), "end") != 0) { /* who has started it is no more */
        intent_leave(in);
        return;
    }
    rc = intent_end(in, &err);
    say("%s", rc < 0 ? strerrorname_np(-rc) : "ended");
}

static const char *life_of(const struct intent *in)
{
    static const char *const names[] = {"live", "dead", "unknown"};

    return names[intent_life(in, PROOF_NONE)];
}

/* "claim": when told to, all that can be had; kept until told to end them. */
SUSPENDS static void role_claim(void)
{
    struct intents list = {0};

    say("ready");
    wait_for_word();
    int rc = intents_load(store->root, true, &list, &err);
    say("%d %zu", rc, list.list.len);
    vec_for_each(it, &list.list)
        say("%s %s", (*it)->id, life_of(*it));
    const char *word = wait_for_word();
    vec_for_each(it, &list.list)
        if (strcmp(word, "end") == 0 && (*it)->fd >= 0)
            CHECK_RC(intent_end(TAKE_PTR(*it), &err), 0);
    say("done");
    intents_fini(&list);
}

/* "take ID": as one who says that no other host is at work. */
SUSPENDS static void role_take(const char *id)
{
    struct intent *in;
    bool live, gone;

    CHECK_RC(intent_claim(store->root, id, &in, &live, &err), 0);
    CHECK(in);
    int rc = intent_take_over(in, PROOF_USER, &gone, &err);
    say("%s%s", rc < 0 ? strerrorname_np(-rc) : "taken", gone ? ", gone" : "");
    if (strcmp(wait_for_word(), "end") == 0) {
        rc = intent_end(in, &err);
        say("%s", rc < 0 ? strerrorname_np(-rc) : "ended");
    }
}

CO_TEST(a_process_of_its_own)
{
    const char *role = getenv("TEST_ROLE"), *host = getenv("TEST_HOST");

    char path[256];

    if (!role)
        return;
    snprintf(path, sizeof(path), "%s:%s", VARVE_TEST_LVM_DIR, getenv("PATH"));
    setenv("PATH", path, 1);
    if (host)
        CHECK(unshare(CLONE_NEWUTS) == 0 && sethostname(host, strlen(host)) == 0);
    replace("/proc/sys/kernel/random/boot_id", getenv("TEST_BOOT"));
    replace("/etc/machine-id", getenv("TEST_MACHINE"));
    if (getenv("TEST_NO_LOCKS"))
        pool.lock = no_locks;
    open_store();
    if (strncmp(role, "begin ", 6) == 0)
        role_begin(role + 6);
    else if (strcmp(role, "claim") == 0)
        role_claim();
    else
        role_take(role + 5);
}

/* ---- what is there ---- */

SUSPENDS static struct intents load(bool claim)
{
    struct intents list = {0};

    if (!claim)
        lvm_dir_forget(&store->dir);
    CHECK_RC(intents_load(store->root, claim, &list, &err), 0);
    return list;
}

/* The only one there is, loaded to be claimed. */
SUSPENDS static struct intent *only_one(void)
{
    struct intents list = load(true);

    CHECK_EQ(list.list.len, 1);
    struct intent *in = TAKE_PTR(list.list.data[0]);
    intents_fini(&list);
    return in;
}

static unsigned nb_files(void)
{
    return (unsigned)test_sh_rc("exit $(ls %s/run/.intents 2>/dev/null | wc -l)", test_dir());
}

/* Commands that change something. */
static unsigned nb_changes(void)
{
    return store->dir.lvm.counts.commands - store->dir.lvm.counts.reports;
}

SUSPENDS static unsigned nb_tags(void)
{
    lvm_dir_forget(&store->dir);
    CHECK_RC(lvm_dir_load(&store->dir, &err), 0);
    return (unsigned)store->dir.vg->tags.len;
}

SUSPENDS static void check_nothing_left(void)
{
    struct intents list = load(true);

    CHECK_EQ(list.list.len, 0);
    CHECK_EQ(nb_tags(), 0);
    CHECK_EQ(nb_files(), 0);
    CHECK(!intents_any(store->root));
    intents_fini(&list);
}

CO_TEST(an_intent_is_there_until_its_end)
{
    struct intents list = {0};
    struct intent *in;

    begin();
    CHECK(!intents_any(store->root));
    unsigned before = nb_changes();
    CHECK_RC(intent_begin(store->root, "0123456789abcdef", "snapshot", body(3000), &in, &err), 0);
    CHECK_EQ(nb_changes() - before, 1); /* all tags at once */
    CHECK_STR(in->path, "vt: intent 0123456789abcdef");
    CHECK_EQ(nb_files(), 1);
    CHECK(nb_tags() > 3);
    before = store->dir.lvm.counts.commands;
    CHECK(intents_any(store->root));
    CHECK_RC(intents_load(store->root, false, &list, &err), 0);
    CHECK_EQ(store->dir.lvm.counts.commands, before); /* a look needs none */
    CHECK_EQ(list.list.len, 1);
    const struct intent *seen = list.list.data[0];
    CHECK_STR(intent_op(seen), "snapshot");
    CHECK_STR(seen->id, "0123456789abcdef");
    CHECK_EQ(text_len(seen), 3000);
    CHECK(intent_concerns(seen, "", "vm-100-disk-0") && !seen->foreign && seen->fd < 0);
    CHECK(seen->begun.tv_sec == in->begun.tv_sec && seen->begun.tv_nsec == in->begun.tv_nsec);
    CHECK(in->begun.tv_sec > time(NULL) - 60 && in->begun.tv_sec <= time(NULL));
    intents_fini(&list);
    before = nb_changes();
    CHECK_RC(intent_end(in, &err), 0);
    CHECK_EQ(nb_changes() - before, 1);
    check_nothing_left();
}

CO_TEST(a_killed_operations_intent_is_claimed)
{
    bool gone, live;
    struct intent *in, *again;

    begin();
    struct proc p = start("begin 77 2000", (struct where){0});
    CHECK_STR(hear(&p), "begun");
    in = only_one();
    CHECK_EQ(in->fd, -1);
    CHECK_EQ(intent_life(in, PROOF_USER), INTENT_LIVE); /* whatever somebody says */
    CHECK_RC(intent_take_over(in, PROOF_USER, &gone, &err), -EBUSY);
    intent_leave(in);
    CHECK_RC(intent_claim(store->root, "77", &in, &live, &err), 0);
    CHECK(!in && live);
    kill_it(&p);
    CHECK(nb_tags() > 2);
    in = only_one();
    CHECK(in->fd >= 0);
    CHECK_EQ(intent_life(in, PROOF_NONE), INTENT_DEAD);
    CHECK_EQ(text_len(in), 2000);
    again = only_one();
    CHECK_EQ(intent_life(again, PROOF_NONE), INTENT_LIVE); /* claimed already */
    intent_leave(again);
    CHECK_RC(intent_take_over(in, PROOF_NONE, &gone, &err), 0);
    CHECK(!gone);
    intent_leave(in);
    CHECK_RC(intent_claim(store->root, "77", &in, &live, &err), 0);
    CHECK(in && in->fd >= 0);
    CHECK_RC(intent_end(in, &err), 0);
    CHECK_RC(intent_claim(store->root, "77", &in, &live, &err), 0);
    CHECK(!in && !live);
    check_nothing_left();
}

/* The file's flock is all that is needed: somebody may have tidied the runtime folder. */
CO_TEST(a_missing_file_is_as_good_as_a_free_one)
{
    begin();
    struct proc p = start("begin 1 10", (struct where){0});
    CHECK_STR(hear(&p), "begun");
    kill_it(&p);
    test_sh("rm -r %s/run", test_dir());
    struct intent *in = only_one();
    CHECK_EQ(intent_life(in, PROOF_NONE), INTENT_DEAD);
    CHECK_RC(intent_end(in, &err), 0);
    check_nothing_left();
}

/* ---- killed within ---- */

CO_TEST(a_file_without_tags_means_nothing)
{
    begin();
    struct proc p = start("begin 5 10", (struct where){.crash = "intent-locked"});
    CHECK_STR(hear(&p), "");
    CHECK_EQ(finish(&p), -SIGKILL);
    CHECK_EQ(nb_files(), 1);
    CHECK_EQ(nb_tags(), 0);
    CHECK(intents_any(store->root)); /* to tidy up */
    check_nothing_left();
    p = start("begin 6 2000", (struct where){.crash = "intent-untagged"});
    CHECK_STR(hear(&p), "begun");
    CHECK(nb_tags() > 0);
    tell(&p, "end");
    CHECK_EQ(finish(&p), -SIGKILL);
    CHECK_EQ(nb_files(), 1);
    CHECK_EQ(nb_tags(), 0);
    check_nothing_left();
}

/* An operation that has its file and is about to write the tags keeps the file. */
CO_TEST(a_file_that_is_in_use_is_not_tidied_away)
{
    char hook[300];

    begin();
    snprintf(hook, sizeof(hook),
             "case $verb in vgchange) [ -e %s/was ] || touch %s/was %s/at; "
             "while [ -e %s/at ]; do sleep 0.02; done;; esac",
             test_dir(), test_dir(), test_dir(), test_dir());
    struct proc p = start("begin 5 10", (struct where){.before = hook, .no_locks = true});
    test_sh("for i in $(seq 500); do [ ! -e %s/at ] || exit 0; sleep 0.02; done; exit 1",
            test_dir());
    pool.lock = no_locks;
    struct intents list = load(true);
    pool.lock = NULL;
    CHECK_EQ(list.list.len, 0);
    CHECK_EQ(nb_files(), 1);
    test_sh("rm %s/at", test_dir());
    CHECK_STR(hear(&p), "begun");
    struct intent *in = only_one();
    CHECK_EQ(intent_life(in, PROOF_NONE), INTENT_LIVE);
    intent_leave(in);
    tell(&p, "end");
    CHECK_STR(hear(&p), "ended");
    CHECK_EQ(finish(&p), 0);
    check_nothing_left();
}

/* Before each command of LVM's, and a moment after it has begun: whole, or not there at all. */
CO_TEST(a_kill_leaves_it_whole_or_not_at_all)
{
    unsigned whole = 0, nr = 0;
    bool survived = false;

    for (unsigned n = 1; !survived; n++) {
        char hook[400];

        begin();
        test_sh("echo 0 >%s/count", test_dir());
        snprintf(hook, sizeof(hook),
                 "n=$(($(cat %s/count) + 1)); echo $n >%s/count; [ $n != %u ] || "
                 "case %u in 0) kill -9 $PPID;; *) (sleep 0.0%u; kill -9 $PPID) & esac",
                 test_dir(), test_dir(), (n + 3) / 4, (n + 3) % 4, (n + 3) % 4 * 3);
        struct proc p = start("begin 9 5000", (struct where){.before = hook});
        if (strcmp(hear(&p), "begun") == 0) {
            signal(SIGPIPE, SIG_IGN);
            test_sh("sleep 0.1");
            tell(&p, "end");
            survived = strcmp(hear(&p), "ended") == 0;
        }
        test_sh("sleep 0.15"); /* a command that was left behind */
        fclose(p.to);
        fclose(p.from);
        waitpid(p.pid, NULL, 0);
        bench_before(":");
        struct intents list = load(true);
        CHECK(list.list.len <= 1);
        if (list.list.len) {
            CHECK_EQ(text_len(list.list.data[0]), 5000);
            CHECK_EQ(intent_life(list.list.data[0], PROOF_NONE), INTENT_DEAD);
            CHECK_RC(intent_end(TAKE_PTR(list.list.data[0]), &err), 0);
            whole++;
        }
        intents_fini(&list);
        check_nothing_left();
        nr++;
    }
    printf("killed %u times, %u intents were whole\n", nr - 1, whole);
    CHECK(nr > 8);
}

/* LVM itself is killed: what it has done is looked up. */
CO_TEST(a_command_that_was_killed_is_looked_up)
{
    unsigned done = 0;

    for (unsigned i = 0; i < 12; i++) {
        char hook[200];
        struct intent *in = NULL;

        begin();
        snprintf(hook, sizeof(hook), "case $verb in vgchange) (sleep 0.0%02u; kill -9 $$) & esac",
                 i * 4);
        bench_before(hook);
        int rc = intent_begin(store->root, "9", "snapshot", body(5000), &in, &err);
        bench_before(":");
        CHECK(rc == 0 || rc == -EIO);
        CHECK_EQ(nb_tags() > 0, rc == 0);
        done += rc == 0;
        if (rc == 0)
            CHECK_RC(intent_end(in, &err), 0);
        check_nothing_left();
    }
    printf("12 commands were killed, %u had done their work\n", done);
}

/* ---- hosts and boots ---- */

#define BOOT "01234567-89ab-cdef-0123-456789abcdef"

CO_TEST(a_boot_ends_what_was_begun_before)
{
    char other[300];

    begin();
    /* a runtime folder that is no more: its files would tell nothing */
    snprintf(other, sizeof(other), "%s/run-then", test_dir());
    struct proc p = start("begin 1 10", (struct where){.boot = BOOT, .runtime = other});
    CHECK_STR(hear(&p), "begun");
    struct intent *in = only_one();
    CHECK(!in->foreign);
    CHECK_EQ(intent_life(in, PROOF_NONE), INTENT_DEAD);
    intent_leave(in);
    kill_it(&p);
    /* on this boot it would be one that cannot be asked */
    in = only_one();
    CHECK_RC(intent_end(in, &err), 0);
    check_nothing_left();
    p = start("begin 1 10", (struct where){.runtime = other});
    CHECK_STR(hear(&p), "begun");
    in = only_one();
    CHECK(in->foreign);
    CHECK_EQ(intent_life(in, PROOF_NONE), INTENT_UNKNOWN);
    intent_leave(in);
    tell(&p, "end");
    CHECK_STR(hear(&p), "ended");
    CHECK_EQ(finish(&p), 0);
    check_nothing_left();
}

CO_TEST(another_hosts_intent_is_not_claimed)
{
    struct intent *in;
    bool live, gone;

    begin();
    struct proc p = start("begin 1 900", (struct where){.host = "pve-2", .boot = BOOT});
    CHECK_STR(hear(&p), "begun");
    for (unsigned i = 0; i < 2; i++) { /* while it lives, and dead: nothing tells */
        in = only_one();
        CHECK(in->foreign && in->fd < 0);
        CHECK_EQ(intent_life(in, PROOF_NONE), INTENT_UNKNOWN);
        CHECK_EQ(intent_life(in, PROOF_LOCKS), INTENT_DEAD);
        CHECK_RC(intent_take_over(in, PROOF_NONE, &gone, &err), -EBUSY);
        CHECK_RC(intent_refuse(in, "san", "", "vm-100-disk-0", &err), -EBUSY);
        CHECK(strstr(err_text(&err), "san:vm-100-disk-0: ") == err_text(&err));
        CHECK(strstr(err_text(&err), "'snapshot' on host 'pve-2' since 20") != NULL);
        CHECK(strstr(err_text(&err), "varve pool check san --repair") != NULL);
        intent_leave(in);
        CHECK_RC(intent_claim(store->root, "1", &in, &live, &err), 0);
        CHECK(in && in->foreign && in->fd < 0 && !live);
        intent_leave(in);
        if (i == 0)
            kill_it(&p);
    }
    /* for itself it is dead */
    p = start("claim", (struct where){.host = "pve-2", .boot = BOOT});
    CHECK_STR(hear(&p), "ready");
    tell(&p, "go");
    CHECK_STR(hear(&p), "0 1");
    CHECK_STR(hear(&p), "1 dead");
    tell(&p, "end");
    CHECK_STR(hear(&p), "done");
    CHECK_EQ(finish(&p), 0);
    check_nothing_left();
}

/* Cloned hosts share names, not machine ids. */
CO_TEST(a_host_of_the_same_name_is_another)
{
    begin();
    struct proc p = start("begin 1 10", (struct where){.boot = BOOT, .machine = "00ff"});
    CHECK_STR(hear(&p), "begun");
    struct intent *in = only_one();
    CHECK_EQ(intent_life(in, PROOF_NONE), INTENT_UNKNOWN);
    intent_leave(in);
    tell(&p, "end");
    CHECK_STR(hear(&p), "ended");
    CHECK_EQ(finish(&p), 0);
    check_nothing_left();
}

CO_TEST(a_taken_over_intent_is_the_takers)
{
    struct intent *in;
    bool gone;

    begin();
    struct proc theirs = start("begin 1 3000", (struct where){.host = "pve-2", .boot = BOOT});
    CHECK_STR(hear(&theirs), "begun");
    in = only_one();
    struct timespec begun = in->begun;
    unsigned before = nb_changes();
    CHECK_RC(intent_take_over(in, PROOF_LOCKS, &gone, &err), 0);
    CHECK_EQ(nb_changes() - before, 1);
    CHECK(!gone && !in->foreign && in->fd >= 0);
    /* whose it was hears of it, and removes nothing */
    tell(&theirs, "end");
    CHECK_STR(hear(&theirs), "ESTALE");
    CHECK_EQ(finish(&theirs), 0);
    /* it lives here, for us and for others */
    struct intents list = load(true);
    CHECK_EQ(list.list.len, 1);
    CHECK_EQ(intent_life(list.list.data[0], PROOF_USER), INTENT_LIVE);
    CHECK_EQ(text_len(list.list.data[0]), 3000);
    CHECK_EQ(list.list.data[0]->begun.tv_sec, begun.tv_sec);
    intents_fini(&list);
    theirs = start("claim", (struct where){.host = "pve-2", .boot = BOOT});
    CHECK_STR(hear(&theirs), "ready");
    tell(&theirs, "go");
    CHECK_STR(hear(&theirs), "0 1");
    CHECK_STR(hear(&theirs), "1 unknown");
    CHECK(finish(&theirs) == 0);
    CHECK_RC(intent_end(in, &err), 0);
    check_nothing_left();
}

/* Somebody else was faster than who has looked before. */
CO_TEST(what_was_looked_at_may_have_changed)
{
    const struct where other = {.host = "pve-2", .boot = BOOT}, third = {.host = "pve-3"};
    struct intent *in;
    bool gone;

    begin();
    struct proc p = start("begin 1 3000", other);
    CHECK_STR(hear(&p), "begun");
    kill_it(&p);
    in = only_one();
    p = start("take 1", third);
    CHECK_STR(hear(&p), "taken");
    CHECK_RC(intent_take_over(in, PROOF_USER, &gone, &err), -EBUSY);
    CHECK(strstr(err_text(&err), "taken over") != NULL);
    tell(&p, "end");
    CHECK_STR(hear(&p), "ended");
    CHECK_EQ(finish(&p), 0);
    CHECK_RC(intent_take_over(in, PROOF_USER, &gone, &err), 0);
    CHECK(gone);
    CHECK_RC(intent_end(in, &err), 0);
    check_nothing_left();
}

/* Tags that are the same before and after have to stay: hosts with names of one length share most.
 */
CO_TEST(hosts_may_have_tags_in_common)
{
    struct utsname uts;
    bool gone;

    begin();
    uname(&uts);
    uts.nodename[0] = uts.nodename[0] == 'x' ? 'y' : 'x';
    struct proc p = start("begin 1 3000", (struct where){.host = uts.nodename, .boot = BOOT});
    CHECK_STR(hear(&p), "begun");
    kill_it(&p);
    unsigned tags = nb_tags();
    struct intent *in = only_one();
    CHECK_RC(intent_take_over(in, PROOF_USER, &gone, &err), 0);
    CHECK_EQ(nb_tags(), tags);
    intent_leave(in);
    in = only_one();
    CHECK_EQ(intent_life(in, PROOF_NONE), INTENT_DEAD);
    CHECK_EQ(text_len(in), 3000);
    CHECK_RC(intent_end(in, &err), 0);
    check_nothing_left();
}

/* It is of the one host or of the other, whoever is killed. */
CO_TEST(a_kill_while_taking_over_leaves_it_to_one_host)
{
    begin();
    struct proc p = start("begin 1 3000", (struct where){.host = "pve-2", .boot = BOOT});
    CHECK_STR(hear(&p), "begun");
    kill_it(&p);
    p = start("take 1", (struct where){.crash = "intent-take-over"});
    CHECK_EQ(finish(&p), -SIGKILL);
    struct intent *in = only_one();
    CHECK_EQ(intent_life(in, PROOF_NONE), INTENT_UNKNOWN);
    intent_leave(in);
    p = start("take 1", (struct where){.crash = "intent-taken-over"});
    CHECK_EQ(finish(&p), -SIGKILL);
    in = only_one();
    CHECK_EQ(intent_life(in, PROOF_NONE), INTENT_DEAD);
    CHECK_EQ(text_len(in), 3000);
    CHECK_RC(intent_end(in, &err), 0);
    check_nothing_left();
}

/* Without the pool's lock, so that they do meet. */
CO_TEST(one_of_two_claimers_gets_it)
{
    for (unsigned round = 0; round < 4; round++) {
        struct proc p[2];
        unsigned dead = 0, live = 0;

        begin();
        struct proc owner = start("begin 1 10", (struct where){0});
        CHECK_STR(hear(&owner), "begun");
        kill_it(&owner);
        if (round % 2) /* after a boot */
            test_sh("rm -r %s/run", test_dir());
        for (unsigned i = 0; i < 2; i++) {
            p[i] = start("claim", (struct where){.no_locks = true});
            CHECK_STR(hear(&p[i]), "ready");
        }
        for (unsigned i = 0; i < 2; i++)
            tell(&p[i], "go");
        for (unsigned i = 0; i < 2; i++) {
            CHECK_STR(hear(&p[i]), "0 1");
            const char *word = hear(&p[i]);
            dead += strcmp(word, "1 dead") == 0;
            live += strcmp(word, "1 live") == 0;
        }
        CHECK(dead == 1 && live == 1);
        for (unsigned i = 0; i < 2; i++) {
            tell(&p[i], "end");
            CHECK_STR(hear(&p[i]), "done");
            CHECK_EQ(finish(&p[i]), 0);
        }
        check_nothing_left();
    }
}

/* ---- damage and limits ---- */

CO_TEST(an_intent_with_a_tag_missing_is_damaged)
{
    struct intents list = {0};
    struct intent *in, *other, *got;
    char text[100];
    bool live;

    begin();
    CHECK_RC(intent_begin(store->root, "1", "snapshot", body(2000), &in, &err), 0);
    CHECK_RC(intent_begin(store->root, "2", "snapshot", body(20), &other, &err), 0);
    CHECK(in->tags.list.len > 2);
    snprintf(text, sizeof(text), "vt: intent 1 is damaged: part 2 of %zu is missing",
             in->tags.list.len);
    CHECK_RC(lvm_change_tags(&lvm, NULL, NULL, NAMES(in->tags.list.data[1]), &err), 0);
    CHECK_RC(intents_load(store->root, true, &list, &err), -EUCLEAN);
    CHECK(strstr(err_text(&err), text) != NULL);
    CHECK(strstr(err_text(&err), "vgchange --deltag") != NULL);
    lvm_dir_forget(&store->dir);
    CHECK_RC(intents_load(store->root, false, &list, &err), -EUCLEAN);
    CHECK_RC(intent_claim(store->root, "1", &got, &live, &err), -EUCLEAN);
    CHECK(!got && !live);
    CHECK_RC(intent_end(in, &err), 0); /* its own operation knows what it was */
    CHECK_RC(intents_load(store->root, false, &list, &err), 0);
    CHECK_EQ(list.list.len, 1);
    intents_fini(&list);
    CHECK_RC(intent_end(other, &err), 0);
}

static double now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* A rename of 200 snapshots is some 50 KiB; the most that is taken, also by another host. */
CO_TEST(large_intents_work)
{
    static const size_t lens[] = {50000, (INTENT_TAGS_MAX - 1) * INTENT_TAG_BYTES};

    for (size_t i = 0; i < ARRAY_SIZE(lens); i++) {
        char role[64];
        bool gone;

        begin();
        snprintf(role, sizeof(role), "begin 1 %zu", lens[i]);
        double t0 = now();
        struct proc p = start(role, (struct where){.host = "pve-2"});
        CHECK_STR(hear(&p), "begun");
        kill_it(&p);
        unsigned tags = nb_tags();
        double t1 = now();
        struct intent *in = only_one();
        CHECK_EQ(text_len(in), lens[i]);
        CHECK_RC(intent_take_over(in, PROOF_USER, &gone, &err), 0);
        double t2 = now();
        CHECK_EQ(nb_tags(), tags);
        double t3 = now();
        CHECK_RC(intent_end(in, &err), 0);
        printf("%u tags: begun in %.0f ms, taken over in %.0f, ended in %.0f\n", tags,
               1e3 * (t1 - t0), 1e3 * (t2 - t1), 1e3 * (now() - t3));
        check_nothing_left();
    }
    struct intent *in;
    CHECK_RC(intent_begin(store->root, "1", "rename", body(lens[1] + 1000), &in, &err), -E2BIG);
    CHECK(strstr(err_text(&err), "so many") != NULL);
    check_nothing_left();
}

CO_TEST(a_full_metadata_area_is_told)
{
    struct pool small = {.id = "small", .type = POOL_LVM, .vgname = "vsmall"};
    struct lvm_store *s;
    struct intent *in, *first;
    char tag[LVM_TAG_MAX];
    unsigned nr = 0;
    int rc;

    begin();
    bench_use(bench_devices[1]);
    test_sh("(lvm pvcreate -ffy -q --metadatasize 128k %s && lvm vgcreate -q vsmall %s) >/dev/null "
            "2>&1",
            bench_devices[1], bench_devices[1]);
    CHECK_RC(lvm_store_open(&small, &s, &err), 0);
    CHECK_RC(intent_begin(s->root, "1", "snapshot", body(1000), &first, &err), 0);
    do {
        memset(tag, 'x', sizeof(tag) - 1);
        snprintf(tag, 8, "%u", nr);
        tag[strlen(tag)] = '-';
        tag[sizeof(tag) - 1] = '\0';
        err = (struct err){0};
        rc = lvm_change_tags(&s->dir.lvm, NULL, NAMES(tag), NULL, &err);
    } while (rc == 0 && ++nr < 1000);
    CHECK_EQ(rc, -ENOSPC);
    CHECK_RC(intent_begin(s->root, "2", "snapshot", body(1000), &in, &err), -ENOSPC);
    CHECK(strstr(err_text(&err), "metadata area of volume group 'vsmall' is full") != NULL);
    CHECK_EQ(nb_files(), 1);
    CHECK_RC(intent_end(first, &err), 0);
    CHECK_EQ(nb_files(), 0);
    test_sh("lvm vgremove -q -f vsmall >/dev/null 2>&1");
}
