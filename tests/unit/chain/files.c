/* Chains of real files, made and checked with QEMU's tools: names, probing, loops, locks, depth. */
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/bits.h"
#include "chain/internal.h"
#include "rig.h"

static const char *at(const char *name)
{
    static char path[4][512];
    static unsigned turn;

    turn = (turn + 1) % 4;
    snprintf(path[turn], sizeof(path[turn]), "%s/%s", test_dir(), name);
    return path[turn];
}

SUSPENDS static struct chain *open_chain(const char *name, bool writable)
{
    struct chain_opts opts = {.writable = writable};
    struct chain *chain;
    struct err err = {0};

    if (chain_open(at(name), &opts, &chain, &err) < 0)
        test_fail(__FILE__, __LINE__, "%s", err_text(&err));
    return chain;
}

/* Opening fails with this code, the text is one line and names the file. */
SUSPENDS static void check_refused(const char *name, bool writable, int rc, const char *named)
{
    struct chain_opts opts = {.writable = writable};
    struct chain *chain;
    struct err err = {0};

    CHECK_EQ(chain_open(at(name), &opts, &chain, &err), rc);
    if (!strstr(err_text(&err), named) || strchr(err_text(&err), '\n'))
        test_fail(__FILE__, __LINE__, "text does not name '%s': %s", named, err_text(&err));
}

static unsigned open_descriptors(void)
{
    unsigned nr = 0;

    for (int fd = 0; fd < 256; fd++)
        nr += fcntl(fd, F_GETFD) >= 0;
    return nr;
}

CO_TEST(loops_are_refused_under_any_name)
{
    unsigned before = open_descriptors();

    test_need("qemu-img");
    test_sh("cd %s && qemu-img create -q -f qcow2 self.qcow2 1M"
            " && qemu-img rebase -u -f qcow2 -b self.qcow2 -F qcow2 self.qcow2"
            " && qemu-img create -q -f qcow2 a.qcow2 1M && qemu-img create -q -f qcow2 b.qcow2 1M"
            " && qemu-img rebase -u -f qcow2 -b b.qcow2 -F qcow2 a.qcow2"
            " && qemu-img rebase -u -f qcow2 -b a.qcow2 -F qcow2 b.qcow2"
            " && mkdir d && qemu-img create -q -f qcow2 alias.qcow2 1M"
            " && ln -s ../alias.qcow2 d/other.qcow2"
            " && qemu-img rebase -u -f qcow2 -b ./d/../d/other.qcow2 -F qcow2 alias.qcow2",
            test_dir());
    static const char *const names[] = {"self.qcow2", "a.qcow2", "alias.qcow2"};
    for (unsigned i = 0; i < 3; i++)
        for (unsigned writable = 0; writable < 2; writable++)
            check_refused(names[i], writable, -ELOOP, names[i]);
    CHECK_EQ(open_descriptors(), before);
}

CO_TEST(what_is_wrong_is_told_with_its_file)
{
    test_sh("cd %s && qemu-img create -q -f qcow2 gone.qcow2 1M"
            " && qemu-img create -q -f qcow2 -b gone.qcow2 -F qcow2 over.qcow2"
            " && qemu-img create -q -f qcow2 -b over.qcow2 -F qcow2 over2.qcow2 && rm gone.qcow2"
            " && qemu-img create -q -f qcow2 json.qcow2 1M"
            " && qemu-img rebase -u -f qcow2 -b 'json:{\"driver\":\"null-co\"}' -F raw json.qcow2"
            " && qemu-img create -q -f qcow2 nbd.qcow2 1M"
            " && qemu-img rebase -u -f qcow2 -b nbd://localhost/x -F raw nbd.qcow2"
            " && qemu-img create -q -f qcow2 vmdk.qcow2 1M"
            " && qemu-img create -q -f raw x.img 1M"
            " && qemu-img rebase -u -f qcow2 -b x.img -F vmdk vmdk.qcow2",
            test_dir());
    check_refused("nothing.qcow2", false, -ENOENT, "nothing.qcow2");
    check_refused("over2.qcow2", false, -ENOENT, "gone.qcow2");
    check_refused("json.qcow2", false, -ENOTSUP, "json.qcow2");
    check_refused("nbd.qcow2", false, -ENOTSUP, "nbd.qcow2");
    check_refused("vmdk.qcow2", false, -ENOTSUP, "x.img");
    test_sh("cd %s && mkdir dir.qcow2", test_dir());
    struct chain_opts opts = {0};
    struct chain *chain;
    struct err err = {0};
    CHECK(chain_open(at("dir.qcow2"), &opts, &chain, &err) < 0);
    CHECK(strstr(err_text(&err), "dir.qcow2"));
    opts.format = "qcow2";
    test_sh("cd %s && head -c 100000 /dev/zero > zero.img", test_dir());
    CHECK_EQ(chain_open(at("zero.img"), &opts, &chain, &err), -EINVAL);
    CHECK(strstr(err_text(&err), "zero.img"));
}

/* A guest wrote a qcow2 header into its raw disk: the recorded format and the name count. */
CO_TEST(recorded_format_and_name_go_before_the_content)
{
    struct chain *chain;

    test_sh("cd %s && qemu-img create -q -f qcow2 t.qcow2 1M && cp t.qcow2 evil.raw"
            " && cp t.qcow2 evil.img && truncate -s 2M evil.raw evil.img"
            " && qemu-img create -q -f qcow2 -b evil.img -F raw on_evil.qcow2",
            test_dir());
    chain = open_chain("evil.raw", false);
    CHECK_STR(layer_format(chain_layer(chain, 0)), "raw");
    CHECK_EQ(chain_len(chain), 2 * MIB);
    CHECK_EQ(chain_close(chain, NULL), 0);
    chain = open_chain("on_evil.qcow2", false);
    CHECK_STR(layer_format(chain_layer(chain, 1)), "raw");
    CHECK_EQ(chain_close(chain, NULL), 0);
    chain = open_chain("t.qcow2", false);
    CHECK_STR(layer_format(chain_layer(chain, 0)), "qcow2");
    CHECK_EQ(chain_close(chain, NULL), 0);
}

CO_TEST(raw_length_is_rounded_up_to_a_sector)
{
    struct chain *chain;
    char buf[1024];

    test_sh("cd %s && (head -c 1048576 /dev/zero | tr '\\0' '\\21'; printf '\\42') > odd.raw",
            test_dir());
    chain = open_chain("odd.raw", false);
    CHECK_EQ(chain_len(chain), 1049088);
    CHECK_EQ(rig_read(chain, 1048064, buf, 1024), 0);
    CHECK_EQ(buf[511], 0x11);
    CHECK_EQ(buf[512], 0x22);
    CHECK_EQ(buf[513], 0);
    CHECK_EQ(buf[1023], 0);
    CHECK_EQ(chain_close(chain, NULL), 0);
}

/* Read as QEMU reads it: 64 layers of different cluster sizes, each with data, zeroes, holes. */
CO_TEST(depth_64_reads_as_in_qemu)
{
    static const char *const shapes[] = {
        "cluster_size=64k", "cluster_size=4k", "cluster_size=128k,extended_l2=on",
        "cluster_size=512", "compat=0.10",     "cluster_size=1M"};
    uint64_t rng = test_seed();

    test_need("qemu-io");
    test_sh("cd %s && qemu-img create -q -f raw l0 7M && qemu-io -f raw -c 'write -P 1 0 7M' l0 >"
            " /dev/null",
            test_dir());
    for (unsigned i = 1; i < 64; i++) {
        unsigned a = (unsigned)rng_below(&rng, 6 * MIB) & ~511u;
        unsigned b = (unsigned)rng_below(&rng, 6 * MIB) & ~511u;

        test_sh(
            "cd %s && qemu-img create -q -f qcow2 -o %s -b l%u -F %s l%u %uk"
            " && qemu-io -f qcow2 %s -c 'write -P %u %u 70k' -c 'write -z %u 100k' l%u >/dev/null",
            test_dir(), shapes[i % 6], i - 1, i == 1 ? "raw" : "qcow2", i,
            7168u - (i % 7 == 3 ? 512u : 0), i % 5 == 0 ? "-c 'write -c -P 77 1M 1M'" : "", i, a, b,
            i);
    }
    test_sh("cd %s && qemu-img convert -f qcow2 -O raw l63 want.raw", test_dir());
    struct chain *chain = open_chain("l63", false);
    CHECK_EQ(chain_depth(chain), 64);
    for (unsigned round = 0; round < 2; round++) {
        uint8_t *view = rig_view(chain, NULL);
        FILE *f = fopen(at("got.raw"), "w");

        CHECK(f);
        CHECK_EQ(fwrite(view, 1, chain_len(chain), f), chain_len(chain));
        CHECK_EQ(fclose(f), 0);
        free(view);
        test_sh("cmp %s/got.raw %s/want.raw", test_dir(), test_dir());
    }
    CHECK_EQ(chain_close(chain, NULL), 0);
}

CO_TEST(one_writer_and_no_reader_beside_it)
{
    struct chain *chain;
    struct layer *layer;
    struct err err = {0};

    test_sh("cd %s && qemu-img create -q -f qcow2 base.qcow2 2M"
            " && qemu-img create -q -f qcow2 -b base.qcow2 -F qcow2 top.qcow2",
            test_dir());
    chain = open_chain("top.qcow2", true);
    check_refused("top.qcow2", true, -EBUSY, "top.qcow2");
    CHECK(test_sh_rc("qemu-io -f qcow2 -c 'write 0 64k' %s > /dev/null 2>&1", at("top.qcow2")));
    CHECK(test_sh_rc("qemu-io -f qcow2 -c 'write 0 64k' %s > /dev/null 2>&1", at("base.qcow2")));
    test_sh("qemu-img info %s > /dev/null", at("base.qcow2")); /* others may read what we read */
    /* after a push the old top is readable for others, the new one is not theirs to write */
    test_sh("cd %s && qemu-img create -q -f qcow2 -u -b top.qcow2 -F qcow2 new.qcow2 2M",
            test_dir());
    struct layer_opts opts = {.writable = true};
    CHECK_EQ(layer_open(at("new.qcow2"), &opts, &layer, &err), 0);
    CHECK_EQ(rig_write(chain, 0, 64 * KIB, 5), 0);
    if (chain_push(chain, layer, NULL, &err) < 0)
        test_fail(__FILE__, __LINE__, "push: %s", err_text(&err));
    test_sh("qemu-img check -q %s", at("top.qcow2"));
    CHECK(test_sh_rc("qemu-io -f qcow2 -c 'write 0 64k' %s > /dev/null 2>&1", at("new.qcow2")));
    CHECK(test_sh_rc("qemu-io -f qcow2 -c 'write 0 64k' %s > /dev/null 2>&1", at("top.qcow2")));
    rig_expect(chain, 0, 64 * KIB, 5);
    CHECK_EQ(rig_write(chain, 0, 4096, 6), 0);
    CHECK_EQ(chain_close(chain, NULL), 0);
    test_sh("qemu-img check -q %s", at("new.qcow2"));
}

/* ---- backing names ---- */

SUSPENDS static void check_relative(const char *from, const char *to, const char *want)
{
    struct layer a = {.path = (char *)(uintptr_t)from}, b = {.path = (char *)(uintptr_t)to};
    char *got;

    CHECK_EQ(layer_relative_name(&a, &b, &got), 0);
    CHECK_STR(got, want);
    free(got);
}

CO_TEST(recorded_names_are_relative)
{
    char from[600], to[600];

    test_sh("cd %s && mkdir -p images/100 images/1 images/100/deep", test_dir());
    snprintf(from, sizeof(from), "%s/images/100/vm.qcow2", test_dir());
    snprintf(to, sizeof(to), "%s/images/100/snap.qcow2", test_dir());
    check_relative(from, to, "snap.qcow2");
    snprintf(to, sizeof(to), "%s/images/1/base.raw", test_dir());
    check_relative(from, to, "../1/base.raw");
    snprintf(to, sizeof(to), "%s/images/base.raw", test_dir());
    check_relative(from, to, "../base.raw");
    snprintf(to, sizeof(to), "%s/images/100/deep/x", test_dir());
    check_relative(from, to, "deep/x");
    check_relative(to, from, "../vm.qcow2");
    snprintf(to, sizeof(to), "%s/images/1/../100/snap.qcow2", test_dir());
    check_relative(from, to, "snap.qcow2");
}

CO_TEST(file_protocol_and_relative_names_are_followed)
{
    struct chain *chain;

    test_sh("cd %s && mkdir sub && qemu-img create -q -f raw sub/r.img 1M"
            " && qemu-img create -q -f qcow2 -b r.img -F raw sub/m.qcow2"
            " && qemu-img create -q -f qcow2 -b file:sub/m.qcow2 -F qcow2 f.qcow2",
            test_dir());
    chain = open_chain("f.qcow2", false);
    CHECK_EQ(chain_depth(chain), 3);
    CHECK(strstr(layer_path(chain_layer(chain, 2)), "/sub/r.img"));
    char *path;
    CHECK_EQ(layer_backing_path(chain_layer(chain, 0), &path, NULL), 0);
    CHECK_STR(path, layer_path(chain_layer(chain, 1)));
    free(path);
    CHECK_EQ(layer_backing_path(chain_layer(chain, 2), &path, NULL), 0);
    CHECK(!path);
    CHECK_EQ(chain_close(chain, NULL), 0);
}
