/* Paths as text, and durable steps on files. */
#include <sys/stat.h>
#include "test.h"
#include "../../../src/vol/internal.h"

static void check_normal(const char *path, const char *want)
{
    char *got = path_normal(path);

    CHECK_STR(got, want);
    free(got);
}

static void check_relative(const char *dir, const char *path, const char *want)
{
    char *got = path_relative(dir, path);

    CHECK_STR(got, want);
    /* and back again */
    char *joined = path_join(dir, got), *back = path_normal(joined);
    CHECK_STR(back, path);
    free(joined);
    free(back);
    free(got);
}

TEST(normal_paths)
{
    check_normal("/", "/");
    check_normal("/a/b", "/a/b");
    check_normal("//a///b/", "/a/b");
    check_normal("/a/./b/../c", "/a/c");
    check_normal("/a/../..", "/");
    check_normal("/../x", "/x");
    check_normal("/a/..b/.c", "/a/..b/.c");
}

TEST(relative_paths)
{
    check_relative("/p/images/100", "/p/images/100/snap-a.qcow2", "snap-a.qcow2");
    check_relative("/p/images/101", "/p/images/100/base.qcow2", "../100/base.qcow2");
    check_relative("/p/images", "/p/images/100/x.qcow2", "100/x.qcow2");
    check_relative("/p/images/100", "/p/images/1000/x", "../1000/x");
    check_relative("/p/images/1000", "/p/images/100/x", "../100/x");
    check_relative("/p/images/100", "/p/images/x", "../x");
    check_relative("/a/b", "/c", "../../c");
}

TEST(steps_on_files)
{
    char a[256], b[256], c[256];
    struct err err = {0};

    snprintf(a, sizeof(a), "%s/a", test_dir());
    snprintf(b, sizeof(b), "%s/b", test_dir());
    snprintf(c, sizeof(c), "%s/c", test_dir());
    test_sh("echo 1 >%s; echo 3 >%s", a, c);
    CHECK_EQ(store_link(a, b, &err), 0);
    CHECK(store_same_file(a, b) && !store_same_file(a, c));
    CHECK_EQ(store_link(a, c, &err), -EEXIST);
    CHECK_EQ(store_publish(a, c, &err), -EEXIST); /* never over another */
    CHECK(store_exists(a));
    CHECK_EQ(store_rename(a, b, &err), 0); /* of one file: the old name goes all the same */
    CHECK(!store_exists(a) && store_exists(b));
    CHECK_EQ(store_rename(c, b, &err), 0);
    test_sh("grep -q 3 %s", b);
    CHECK_EQ(store_publish(b, a, &err), 0);
    CHECK(store_exists(a) && !store_exists(b));
    CHECK_EQ(store_unlink(a, &err), 0);
    CHECK_EQ(store_unlink(a, &err), 0);
    CHECK_EQ(store_mkdir(a, &err), 0);
    CHECK_EQ(store_mkdir(a, &err), 0);
    CHECK_EQ(store_rename(b, c, &err), -ENOENT);
    CHECK(strstr(err.text, b));
}

TEST(a_pool_must_be_mounted)
{
    char dir[256];
    struct pool pool = {.id = "p", .path = dir};
    struct err err = {0};
    char *images;

    snprintf(dir, sizeof(dir), "%s", test_dir());
    CHECK_EQ(store_open(&pool, &images, &err), 0);
    CHECK(strstr(images, "/images"));
    free(images);
    pool.mountpoint = dir;
    CHECK_EQ(store_open(&pool, &images, &err), -ENODEV);
    CHECK(strstr(err.text, "mounted"));
    pool.mountpoint = "/proc";
    CHECK_EQ(store_open(&pool, &images, &err), 0);
    free(images);
    strcat(dir, "/missing");
    pool.path = dir;
    CHECK_EQ(store_open(&pool, &images, &err), -ENOENT);
}
