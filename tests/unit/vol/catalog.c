/* The catalog against files made by qemu-img: volumes, snapshots, parents, clones, strays, broken
 * chains. */
#include <time.h>
#include <unistd.h>
#include "test.h"
#include "../../../src/vol/internal.h"

#define V "vm-100-disk-0"

static struct pool pool;

static void make_pool(void)
{
    static char path[256];

    test_need("qemu-img");
    snprintf(path, sizeof(path), "%s/pool", test_dir());
    pool = (struct pool){.id = "p", .path = path, .images = true};
    test_sh("rm -rf %s; mkdir -p %s/images/100 %s/images/101", path, path, path);
}

static void mk(const char *args)
{
    test_sh("cd %s/images/100 && qemu-img create -q -f qcow2 %s", pool.path, args);
}

static struct catalog *scan(void)
{
    struct catalog *cat;
    struct err err = {0};

    if (catalog_scan(&pool, &cat, &err) < 0)
        test_fail(__FILE__, __LINE__, "%s", err_text(&err));
    return cat;
}

static struct cvol *find(const struct catalog *cat, const char *id)
{
    struct vol_name name;
    struct cvol *vol;
    struct err err = {0};

    if (vol_parse(id, &name, &err) < 0 || catalog_find(cat, &name, &vol, &err) < 0)
        test_fail(__FILE__, __LINE__, "%s: %s", id, err_text(&err));
    return vol;
}

TEST(a_line_of_snapshots)
{
    make_pool();
    mk("snap-s1-" V ".qcow2 1M");
    mk("-b snap-s1-" V ".qcow2 -F qcow2 snap-s2-" V ".qcow2");
    mk("-b snap-s2-" V ".qcow2 -F qcow2 " V ".qcow2");
    struct catalog *cat = scan();
    struct cvol *v = find(cat, "p:100/" V);

    CHECK(!v->broken);
    CHECK_EQ(v->snaps.len, 2);
    CHECK(v->current->parent == cvol_snap(v, "s2"));
    CHECK(cvol_snap(v, "s2")->parent == cvol_snap(v, "s1"));
    CHECK(!cvol_snap(v, "s1")->parent);
    CHECK_EQ(v->current->virtual_len, 1 << 20);
    CHECK_STR(v->current->backing_format, "qcow2");
    CHECK_EQ(cat->strays.len, 0);
    catalog_free(cat);
}

TEST(clones_and_bases)
{
    struct vol_name name;
    struct cvol *vol;
    struct err err = {0};

    make_pool();
    mk("base-100-disk-0.qcow2 1M");
    test_sh("cd %s/images/101 && qemu-img create -q -f qcow2 -b ../100/base-100-disk-0.qcow2 -F "
            "qcow2 vm-101-disk-0.qcow2",
            pool.path);
    struct catalog *cat = scan();
    struct cvol *v = find(cat, "p:101/vm-101-disk-0"),
                *b = find(cat, "p:100/base-100-disk-0.qcow2");
    char *id = cvol_id(cat, v);

    CHECK(b->base && !v->base && v->current->parent == b->current);
    CHECK_EQ(b->current->nb_children, 1);
    CHECK_STR(id, "p:100/base-100-disk-0.qcow2/101/vm-101-disk-0.qcow2");
    CHECK(find(cat, id) == v);
    free(id);
    CHECK_EQ(vol_parse("p:100/base-100-disk-1.qcow2/101/vm-101-disk-0", &name, &err), 0);
    CHECK_EQ(catalog_find(cat, &name, &vol, &err), -ENOENT);
    catalog_free(cat);
}

TEST(names_that_read_in_several_ways)
{
    struct err err = {0};

    make_pool();
    mk("snap-a-b-" V ".qcow2 1M");
    mk("-b snap-a-b-" V ".qcow2 -F qcow2 " V ".qcow2");
    mk("b-" V ".qcow2 1M");
    struct catalog *cat = scan();
    struct cvol *v = find(cat, "p:100/" V), *b = find(cat, "p:100/b-" V);

    CHECK(cvol_snap(v, "a-b") && v->snaps.len == 1 && b->snaps.len == 0);
    CHECK_EQ(catalog_check_new_snap(cat, v, "a-b", &err), -EEXIST);
    CHECK_EQ(catalog_check_new_snap(cat, v, "c-b", &err), 0);
    CHECK_EQ(catalog_check_new_snap(cat, b, "c", &err), -EEXIST); /* reads as c-b of V */
    CHECK(strstr(err.text, "c-b"));
    CHECK_EQ(catalog_check_new_vol(cat, "100", V, &err), -EEXIST);
    CHECK_EQ(catalog_check_new_vol(cat, "101", V, &err), 0);
    catalog_free(cat);
    /* the same file, but it is what b-V stands on */
    test_sh("cd %s/images/100 && rm *.qcow2", pool.path);
    mk("snap-a-b-" V ".qcow2 1M");
    mk("-b snap-a-b-" V ".qcow2 -F qcow2 b-" V ".qcow2");
    mk(V ".qcow2 1M");
    cat = scan();
    CHECK(cvol_snap(find(cat, "p:100/b-" V), "a"));
    CHECK_EQ(find(cat, "p:100/" V)->snaps.len, 0);
    catalog_free(cat);
    /* a new volume must not adopt a stray snapshot */
    test_sh("cd %s/images/100 && rm *.qcow2", pool.path);
    mk("snap-x-" V ".qcow2 1M");
    cat = scan();
    CHECK_EQ(catalog_check_new_vol(cat, "100", V, &err), -EEXIST);
    catalog_free(cat);
}

TEST(the_raw_name_is_an_alias)
{
    struct vol_name name;
    struct cvol *vol;
    struct err err = {0};

    make_pool();
    test_sh("truncate -s 1M %s/images/100/snap-s1-" V ".raw", pool.path);
    mk("-b snap-s1-" V ".raw -F raw " V ".qcow2");
    struct catalog *cat = scan();
    struct cvol *v = find(cat, "p:100/" V);

    CHECK(!v->broken && find(cat, "p:100/" V ".raw") == v);
    CHECK_STR(cvol_snap(v, "s1")->format, "raw");
    catalog_free(cat);
    test_sh("cd %s/images/100 && rm snap* && qemu-img create -q -f qcow2 " V ".qcow2 1M",
            pool.path);
    cat = scan();
    CHECK_EQ(vol_parse("p:100/" V ".raw", &name, &err), 0);
    CHECK_EQ(catalog_find(cat, &name, &vol, &err), -ENOENT);
    catalog_free(cat);
    test_sh("truncate -s 1M %s/images/100/" V ".raw", pool.path);
    cat = scan();
    CHECK_EQ(vol_parse("p:100/" V, &name, &err), 0);
    CHECK_EQ(catalog_find(cat, &name, &vol, &err), -EINVAL); /* both are there */
    CHECK_STR(find(cat, "p:100/" V ".raw")->format, "raw");
    catalog_free(cat);
}

/* Makes a pool by a shell line in images/100, and returns what is broken about V. */
static char *broken(const char *line)
{
    make_pool();
    mk("snap-s1-" V ".qcow2 4M");
    test_sh("cd %s/images/100 && %s", pool.path, line);
    struct catalog *cat = scan();
    struct cvol *v = catalog_vol(cat, "100", V, "qcow2");
    CHECK(v);
    char *text = strdup(v->broken ? v->broken : "");
    CHECK(!v->broken || cvol_last_leaf(cat, v) == cvol_snap(v, "s1") || strstr(text, "loop"));
    catalog_free(cat);
    return text;
}

TEST(broken_volumes)
{
    static const struct {
        const char *line, *want;
    } cases[] = {
        {"true", "missing"},
        {": >" V ".qcow2", "empty"},
        {"truncate -s 4k " V ".qcow2", "not a qcow2"},
        {"qemu-img create -q -f qcow2 -b snap-s1-" V ".qcow2 -F qcow2 " V
         ".qcow2; truncate -s 70000 " V ".qcow2",
         "tables"},
        {"qemu-img create -q -f qcow2 -u -b gone.qcow2 -F qcow2 " V ".qcow2 4M", "gone.qcow2"},
        {"qemu-img create -q -f qcow2 -u -b nbd://h/x -F raw " V ".qcow2 4M", "protocol"},
        {"qemu-img create -q -f qcow2 -u -b " V ".qcow2 -F qcow2 x.qcow2 4M; "
         "qemu-img create -q -f qcow2 -u -b x.qcow2 -F qcow2 " V ".qcow2 4M",
         "loop"},
        {"qemu-img create -q -f qcow2 -b snap-s1-" V ".qcow2 -F qcow2 " V ".qcow2", ""},
    };

    for (unsigned i = 0; i < ARRAY_SIZE(cases); i++) {
        char *got = broken(cases[i].line);

        if (*cases[i].want ? !strstr(got, cases[i].want) : *got)
            test_fail(__FILE__, __LINE__, "%s: '%s'", cases[i].line, got);
        free(got);
    }
}

TEST(strays_are_told_and_own_files_are_not)
{
    make_pool();
    mk(V ".qcow2 1M");
    test_sh("cd %s/images/100 && : >old.tmp && : >.varve-1-0 && ln -s /etc/passwd l.raw && : "
            ">snap-x-foo.qcow2 && "
            ": >../vm-100-disk-9.raw && mkdir ../.varve sub",
            pool.path);
    struct catalog *cat = scan();

    CHECK_EQ(cat->strays.len, 4);
    CHECK_EQ(cat->leftovers.len, 1);
    CHECK_EQ(cat->vols.len, 1);
    catalog_free(cat);
}

TEST(a_listing_reads_headers_only)
{
    struct timespec a, b;

    make_pool();
    mk("vm-100-disk-0.qcow2 1M");
    test_sh("cd %s/images/100 && for i in $(seq 1 199); do cp vm-100-disk-0.qcow2 "
            "vm-100-disk-$i.qcow2; done",
            pool.path);
    catalog_free(scan());
    clock_gettime(CLOCK_MONOTONIC, &a);
    struct catalog *cat = scan();
    clock_gettime(CLOCK_MONOTONIC, &b);
    CHECK_EQ(cat->vols.len, 200);
    printf("200 images: %.1f ms\n",
           (double)(b.tv_sec - a.tv_sec) * 1e3 + (double)(b.tv_nsec - a.tv_nsec) / 1e6);
    catalog_free(cat);
}

/* Headers with any byte changed are read without harm. */
TEST(headers_with_wrong_bytes)
{
    uint64_t seed = test_seed();
    char path[300];

    make_pool();
    mk("snap-s1-" V ".qcow2 1M");
    mk("-b snap-s1-" V ".qcow2 -F qcow2 " V ".qcow2");
    snprintf(path, sizeof(path), "%s/images/100/" V ".qcow2", pool.path);
    for (unsigned i = 0; i < 600; i++) {
        unsigned char old, byte;
        FILE *f = fopen(path, "r+");
        long at = i % 200;

        seed = seed * 6364136223846793005ull + 1;
        byte = (unsigned char)(i < 200 ? 0xff : seed >> 56);
        CHECK(f && fseek(f, at, SEEK_SET) == 0 && fread(&old, 1, 1, f) == 1);
        CHECK(fseek(f, at, SEEK_SET) == 0 && fwrite(&byte, 1, 1, f) == 1 && fflush(f) == 0);
        catalog_free(scan());
        CHECK(fseek(f, at, SEEK_SET) == 0 && fwrite(&old, 1, 1, f) == 1 && fclose(f) == 0);
    }
}
