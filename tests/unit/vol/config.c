/* storage.cfg as people have it: sections, keys, errors that take one section only. */
#include "test.h"
#include "vol/vol.h"

static const char *write_cfg(const char *text, size_t len)
{
    static char path[256];

    snprintf(path, sizeof(path), "%s/storage.cfg", test_dir());
    FILE *f = fopen(path, "w");
    CHECK(f && fwrite(text, 1, len, f) == len && fclose(f) == 0);
    return path;
}

static struct config *load(const char *text)
{
    struct config *cfg;
    struct err err = {0};

    if (config_load(write_cfg(text, strlen(text)), &cfg, &err) < 0)
        test_fail(__FILE__, __LINE__, "%s", err_text(&err));
    return cfg;
}

/* One broken section: an error with this text and line; the pool cannot be used. */
static void check_bad(const char *text, unsigned line, const char *part)
{
    char place[32];
    struct config *cfg = load(text);
    const struct pool *pool;
    struct err err = {0};

    CHECK_EQ(cfg->nb_errors, 1);
    snprintf(place, sizeof(place), ".cfg:%u: ", line);
    if (!strstr(cfg->errors[0], place) || !strstr(cfg->errors[0], part))
        test_fail(__FILE__, __LINE__, "'%s' has no '%s' or no '%s'", cfg->errors[0], place, part);
    if (cfg->nb_pools) {
        unsigned last = cfg->nb_pools - 1;

        CHECK(cfg->pools[last].disabled && cfg->pools[last].error);
        CHECK(config_pool(cfg, cfg->pools[last].id, &pool, &err) < 0 || last > 0);
    }
    config_free(cfg);
}

TEST(sections_and_keys)
{
    struct config *cfg =
        load("# pools\n\ndir: local2\n        path /p/x\n        content snippets,images,rootdir\n"
             "        snapext 1\n\nlvmqcow2:test\n\tvgname test\n\tcontent images\n\n"
             "nfs: n\n\tserver s\n\texport /e\n\nDIR:  up \n\tpath   /p   \n\tdisable\n");
    const struct pool *pool;
    struct err err = {0};

    CHECK_EQ(cfg->nb_errors, 0);
    CHECK_EQ(cfg->nb_warnings, 0);
    CHECK_EQ(cfg->nb_pools, 4);
    CHECK_EQ(config_pool(cfg, "local2", &pool, &err), 0);
    CHECK_STR(pool->path, "/p/x");
    CHECK(pool->images && pool->rootdir && pool->snapext && !pool->mountpoint);
    CHECK_EQ(cfg->pools[1].type, POOL_LVM);
    CHECK_STR(cfg->pools[1].vgname, "test");
    CHECK_EQ(config_pool(cfg, "test", &pool, &err), 0);
    CHECK_EQ(config_pool(cfg, "n", &pool, &err), 0);
    CHECK_STR(pool->path, "/mnt/pve/n");
    CHECK_STR(pool->mountpoint, "/mnt/pve/n");
    CHECK_EQ(config_pool(cfg, "up", &pool, &err), -EINVAL);
    CHECK(strstr(err.text, "disabled"));
    CHECK_EQ(config_pool(cfg, "none", &pool, &err), -ENOENT);
    config_free(cfg);
}

TEST(keys_of_removal)
{
    struct config *cfg = load("lvm: a\n\tvgname a\n\tsaferemove 1\n"
                              "\tsaferemove_throughput -10485760\n\tsaferemove-stepsize 8\n\n"
                              "lvm: b\n\tvgname b\n\tsaferemove 0\n\tsaferemove_throughput 50m\n\n"
                              "lvm: c\n\tvgname c\n");

    CHECK_EQ(cfg->nb_errors, 0);
    CHECK_EQ(cfg->nb_warnings, 0);
    CHECK(cfg->pools[0].saferemove && !cfg->pools[1].saferemove && !cfg->pools[2].saferemove);
    CHECK_EQ(cfg->pools[0].saferemove_rate, 10485760);
    CHECK_EQ(cfg->pools[0].saferemove_step, 8u << 20);
    CHECK_EQ(cfg->pools[1].saferemove_rate, 50u << 20);
    CHECK_EQ(cfg->pools[1].saferemove_step, 0);
    CHECK_EQ(cfg->pools[2].saferemove_rate, 0);
    config_free(cfg);
    check_bad("lvm: a\n\tvgname a\n\tsaferemove maybe\n", 3, "neither 0 nor 1");
    check_bad("lvm: a\n\tvgname a\n\tsaferemove_throughput fast\n", 3, "bytes a second");
    check_bad("lvm: a\n\tvgname a\n\tsaferemove-stepsize 3\n", 3, "1, 2, 4, 8, 16, 32");
}

TEST(own_keys)
{
    struct config *cfg = load(
        "dir: a\n\tpath /p\n\tcluster-size 128k\n\tsnapshot-cluster-size 1M\n\textended-l2 0\n"
        "\tcache-size 64M\n\tpreallocation falloc\n\tlock none\n\tbwlimit move=1,default=1024\n"
        "\tsnapshot-as-volume-chain\n\tis_mountpoint yes\n");
    const struct pool *p = &cfg->pools[0];

    CHECK_EQ(cfg->nb_errors + cfg->nb_warnings, 0);
    CHECK_EQ(p->cluster_size, 128 << 10);
    CHECK_EQ(p->snapshot_cluster_size, 1 << 20);
    CHECK_EQ(p->extended_l2, 0);
    CHECK_EQ(p->cache_size, 64 << 20);
    CHECK_STR(p->preallocation, "falloc");
    CHECK_STR(p->lock, "none");
    CHECK_EQ(p->bwlimit, 1 << 20);
    CHECK(p->snapext);
    CHECK_STR(p->mountpoint, "/p");
    config_free(cfg);
    cfg = load("dir: a\n\tpath /p\n\tlock sanlock\n\tlock-leases 64\n\tlease-timeout 2\n");
    p = &cfg->pools[0];
    CHECK_EQ(cfg->nb_errors + cfg->nb_warnings, 0);
    CHECK_STR(p->lock, "sanlock");
    CHECK_EQ(p->lock_leases, 64);
    CHECK_EQ(p->lease_timeout, 2);
    config_free(cfg);
    cfg = load("dir: a\r\n\tpath /p\r\n\r\n");
    CHECK_STR(cfg->pools[0].path, "/p");
    CHECK_EQ(cfg->pools[0].extended_l2, -1);
    config_free(cfg);
}

TEST(errors_name_file_and_line)
{
    check_bad("dir: a\n\tpath /p\n\ndir: a\n\tpath /q\n", 4, "twice");
    check_bad("dir: a\n\tpath /p\n\tpath /q\n", 3, "path");
    check_bad("dir: a\n\tcontent images\n", 1, "path");
    check_bad("lvm: a\n\tcontent images\n", 1, "vgname");
    check_bad("dir: a\n\tpath pool\n", 2, "path");
    check_bad("dir: ../x\n\tpath /p\n", 1, "id");
    check_bad("dir: 1a\n\tpath /p\n", 1, "id");
    check_bad("\tpath /p\n", 1, "line 1");
    check_bad("dir: a\n\tpath /p\n\tsnapext maybe\n", 3, "snapext");
    check_bad("dir: a\n\tpath /p\n\tcontent images,stuff\n", 3, "stuff");
    check_bad("lvm: a\n\tvgname x;reboot\n", 2, "vgname");
    check_bad("dir: a\n\tpath /p\n\tcluster-size 3k\n", 3, "cluster-size");
    check_bad("dir: a\n\tpath /p\ndir: b\n", 3, "neither indented");
    check_bad("dir: a\n\tpath /p\n\tlock command\n", 3, "not supported");
    check_bad("dir: a\n\tpath /p\n\tlock maybe\n", 3, "lock");
    check_bad("dir: a\n\tpath /p\n\tlock-leases 3\n", 3, "lock-leases");
    check_bad("dir: a\n\tpath /p\n\tlease-timeout 10s\n", 3, "lease-timeout");
    check_bad("dir a\n\tpath /p\n\tx y\n", 1, "header");
}

TEST(a_broken_section_leaves_the_others)
{
    struct config *cfg = load("dir: a\n\tpath rel\n\ndir: b\n\tpath /b\n");
    const struct pool *pool;
    struct err err = {0};

    CHECK_EQ(cfg->nb_errors, 1);
    CHECK_EQ(config_pool(cfg, "a", &pool, &err), -EINVAL);
    CHECK(strstr(err.text, ".cfg:2:"));
    CHECK_EQ(config_pool(cfg, "b", &pool, &err), 0);
    config_free(cfg);
    /* of two sections with one id the first counts */
    cfg = load("dir: a\n\tpath /1\n\ndir: a\n\tpath /2\n");
    CHECK_EQ(config_pool(cfg, "a", &pool, &err), 0);
    CHECK_STR(pool->path, "/1");
    config_free(cfg);
}

TEST(unknown_things_warn)
{
    struct config *cfg = load("dir: a\n\tpath /p\n\tshiny 7\n\nzfspool: z\n\tpool rpool\n");
    const struct pool *pool;
    struct err err = {0};

    CHECK_EQ(cfg->nb_errors, 0);
    CHECK_EQ(cfg->nb_warnings, 2);
    CHECK(strstr(cfg->warnings[0], ".cfg:3: warning: ") && strstr(cfg->warnings[0], "shiny"));
    CHECK(strstr(cfg->warnings[1], "zfspool"));
    CHECK_EQ(config_pool(cfg, "a", &pool, &err), 0);
    CHECK_EQ(config_pool(cfg, "z", &pool, &err), -ENOTSUP);
    config_free(cfg);
}

TEST(bytes_that_do_not_belong)
{
    static const char nul[] = "dir: a\n\tpath /tmp/\0evil\n";
    struct config *cfg;
    struct err err = {0};
    size_t len = 17u << 20;

    CHECK_EQ(config_load(write_cfg(nul, sizeof(nul) - 1), &cfg, &err), 0);
    CHECK_EQ(cfg->nb_errors, 1);
    CHECK(strstr(cfg->errors[0], ".cfg:2:") && strstr(cfg->errors[0], "line 2"));
    config_free(cfg);

    char *big = malloc(len);
    memset(big, 'x', len);
    memcpy(big, "dir: a\n\tpath /p\n\tcomment ", 25);
    big[1 << 20] = '\n';
    CHECK_EQ(config_load(write_cfg(big, 1 << 20), &cfg, &err), 0); /* one line of a megabyte */
    CHECK_EQ(cfg->nb_errors, 1);
    CHECK(strstr(cfg->errors[0], "longer than"));
    config_free(cfg);
    CHECK_EQ(config_load(write_cfg(big, len), &cfg, &err), -EFBIG);
    free(big);
    CHECK_EQ(config_load("/nonexistent/storage.cfg", &cfg, &err), -ENOENT);
    CHECK(strstr(err.text, "/nonexistent/storage.cfg"));
}

TEST(every_prefix_of_a_file_is_read)
{
    static const char text[] =
        "dir: a\n\tpath /p\n\tcontent images\n\nlvm: b\n\tvgname v\n\n# end\n";

    for (size_t len = 0; len < sizeof(text); len++) {
        struct config *cfg;
        struct err err = {0};

        CHECK_EQ(config_load(write_cfg(text, len), &cfg, &err), 0);
        CHECK(cfg->nb_pools <= 2);
        config_free(cfg);
    }
}
