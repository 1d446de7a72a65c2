/* Names: volume ids, snapshots, files. */
#include "test.h"
#include "../../../src/vol/internal.h"

static void check_parse(const char *text, const char *pool, const char *vmid, const char *name,
                        const char *format, const char *snap, const char *base)
{
    struct vol_name n;
    struct err err = {0};

    if (vol_parse(text, &n, &err) < 0)
        test_fail(__FILE__, __LINE__, "'%s': %s", text, err_text(&err));
    CHECK_STR(n.pool, pool);
    CHECK_STR(n.vmid, vmid);
    CHECK_STR(n.name, name);
    CHECK_STR(n.format, format);
    CHECK_STR(n.snap, snap);
    CHECK_STR(n.base, base);
}

TEST(ids_of_volumes)
{
    check_parse("p:100/vm-100-disk-0", "p", "100", "vm-100-disk-0", "", "", "");
    check_parse("p:100/vm-100-disk-0.qcow2", "p", "100", "vm-100-disk-0", "qcow2", "", "");
    check_parse("p:100/vm-100-disk-0.raw@s1", "p", "100", "vm-100-disk-0", "raw", "s1", "");
    check_parse("local-2.x:data", "local-2.x", "", "data", "", "", "");
    check_parse("p:data.disk@a-b_c", "p", "", "data.disk", "", "a-b_c", "");
    check_parse("p:100/base-100-disk-0.qcow2/101/vm-101-disk-0.qcow2@s", "p", "101",
                "vm-101-disk-0", "qcow2", "s", "100/base-100-disk-0.qcow2");
}

TEST(ids_that_are_refused)
{
    static const char *const bad[] = {
        "",
        ":",
        "p:",
        ":x",
        "p",
        "p:/x",
        "p:100/",
        "p:99/vm-99-disk-0",
        "p:0100/vm-0100-x",
        "p:a/vm-100-x",
        "p:100/../x",
        "p:../../../etc/x.qcow2",
        "p:100/vm-100-a;id.qcow2",
        "p:100/vm-100-$(id).qcow2",
        "p:-rf.qcow2",
        "p:100/-rf.qcow2",
        "p:100/.qcow2",
        "p:.hidden",
        "p:a b",
        "p:a@",
        "p:a@b c",
        "p:a@@b",
        "p:a@current",
        "p:a@1st",
        "p:100/snap-a-vm-100-disk-0.qcow2",
        "p:snap_x",
        "p:100/vm-100-disk-0.vmdk",
        "p:\xc3\xbc",
        "p:1/2/3",
        "p:100/vm-100-x/101/vm-101-x",
        "p:1/2/3/4/5",
        "1p:x",
        "p/q:x",
        "p:a\nb",
        "p:a%b",
    };
    char text[300];
    struct vol_name n;
    struct err err;

    for (unsigned i = 0; i < ARRAY_SIZE(bad); i++) {
        err = (struct err){0};
        if (vol_parse(bad[i], &n, &err) != -EINVAL)
            test_fail(__FILE__, __LINE__, "'%s' was taken", bad[i]);
        CHECK(err.text[0]);
    }
    memset(text, 'x', sizeof(text));
    memcpy(text, "p:", 2);
    text[2 + STEM_MAX] = '\0';
    CHECK_EQ(vol_parse(text, &n, &err), 0);
    text[2 + STEM_MAX] = 'x';
    text[3 + STEM_MAX] = '\0';
    CHECK_EQ(vol_parse(text, &n, &err), -EINVAL);
}

TEST(names_of_snapshots)
{
    static const char *const good[] = {
        "a", "S1", "a_b", "a-b", "before-upgrade", "x234567890123456789012345678901234567890"};
    static const char *const bad[] = {
        "",        ".",       "..",      "a/b",      "a b",
        "-n",      "_n",      "1st",     "\xc3\xbc", "a%n",
        "current", "Current", "pending", "a.b",      "x2345678901234567890123456789012345678901"};

    for (unsigned i = 0; i < ARRAY_SIZE(good); i++)
        CHECK_EQ(vol_snap_name_check(good[i], NULL), 0);
    for (unsigned i = 0; i < ARRAY_SIZE(bad); i++)
        if (vol_snap_name_check(bad[i], NULL) != -EINVAL)
            test_fail(__FILE__, __LINE__, "'%s' was taken", bad[i]);
}

TEST(names_of_new_volumes)
{
    CHECK_EQ(stem_check_new("/d", "100", "vm-100-disk-0", NULL), 0);
    CHECK_EQ(stem_check_new("/d", "100", "vm-101-disk-0", NULL), -EINVAL);
    CHECK_EQ(stem_check_new("/d", "100", "vm-100-", NULL), -EINVAL);
    CHECK_EQ(stem_check_new("/d", "100", "data", NULL), -EINVAL);
    CHECK_EQ(stem_check_new("/d", "100", "base-100-disk-0", NULL), -EINVAL);
    CHECK_EQ(stem_check_new("/d", "", "data", NULL), 0);
    CHECK_EQ(stem_check_new("/d", "", "vm-data", NULL), 0);
    CHECK_EQ(stem_check_new("/d", "", "vm-100-disk-0", NULL), -EINVAL);
    CHECK_EQ(stem_check_new("/d", "", "base-x", NULL), -EINVAL);
    CHECK_EQ(stem_check_new("/d", "", "del-x", NULL), -EINVAL);
}

TEST(longest_names_fit_into_a_file_name)
{
    char stem[STEM_MAX + 1], snap[SNAP_NAME_MAX + 1];

    memset(stem, 'v', STEM_MAX);
    memset(snap, 's', SNAP_NAME_MAX);
    stem[STEM_MAX] = snap[SNAP_NAME_MAX] = '\0';
    char *file = snap_file("/d", snap, stem, "qcow2");
    CHECK(strlen(file) <= 255);
    free(file);
}

static struct pool *vg_pool(void)
{
    static struct pool pool = {.id = (char *)"san", .type = POOL_LVM, .vgname = (char *)"vg"};

    return &pool;
}

/* The directory of a volume group, which then goes by its own rules. */
static char *vg_dir(void)
{
    char *images = NULL;

    CHECK_EQ(store_open(vg_pool(), &images, NULL), 0);
    CHECK_EQ(name_form(images), FORM_LV);
    return images;
}

TEST(names_of_logical_volumes)
{
    char *vg = vg_dir(), stem[256];
    const char *format = NULL;

    char *raw = file_join(vg, "vm-1-disk-0", "raw"), *q = file_join(vg, "vm-1-disk-0", "qcow2");
    CHECK_STR(raw, "vm-1-disk-0");
    CHECK_STR(q, "vm-1-disk-0.qcow2");
    free(raw);
    free(q);
    raw = snap_file(vg, "s", "vm-1-disk-0", "raw");
    q = snap_file(vg, "s_1", "vm-1-disk-0", "qcow2");
    CHECK_STR(raw, "snap_vm-1-disk-0_s");
    CHECK_STR(q, "snap_vm-1-disk-0_s_1.qcow2");
    CHECK(file_split(FORM_LV, q, stem, sizeof(stem), &format));
    CHECK_STR(stem, "snap_vm-1-disk-0_s_1");
    CHECK_STR(format, "qcow2");
    CHECK(file_split(FORM_LV, raw, stem, sizeof(stem), &format));
    CHECK_STR(format, "raw");
    CHECK(!file_split(FORM_LV, "x.raw", stem, sizeof(stem), &format));
    CHECK(stem_is_snap(FORM_LV, stem) && !stem_is_snap(FORM_LV, "snap-x-y"));
    free(raw);
    free(q);
    CHECK_EQ(stem_check_new(vg, "", "vm-100-disk-0", NULL), 0);
    CHECK_EQ(stem_check_new(vg, "", "data", NULL), 0);
    CHECK_EQ(stem_check_new(vg, "", "base-100-disk-0", NULL), -EINVAL);
    CHECK_EQ(stem_check_new(vg, "", "x_tmeta", NULL), -EINVAL); /* LVM's own */
    memset(stem, 'v', STEM_MAX);
    stem[STEM_MAX] = '\0';
    CHECK_EQ(stem_check_new(vg, "", stem, NULL), -EINVAL);
    free(vg);
}

/* "snap_a_b_c": from the shortest volume name on */
TEST(readings_of_a_snapshots_name)
{
    char buf[256], snap[SNAP_NAME_MAX + 1];
    size_t pos = 0;

    CHECK_STR(snap_reading(FORM_LV, "snap_a_b_c", &pos, buf, snap), "a");
    CHECK_STR(snap, "b_c");
    CHECK_STR(snap_reading(FORM_LV, "snap_a_b_c", &pos, buf, snap), "a_b");
    CHECK_STR(snap, "c");
    CHECK(!snap_reading(FORM_LV, "snap_a_b_c", &pos, buf, snap));
    pos = 0;
    CHECK_STR(snap_reading(FORM_FILE, "snap-a-b-c", &pos, buf, snap), "c");
    CHECK_STR(snap, "a-b");
    CHECK_STR(snap_reading(FORM_FILE, "snap-a-b-c", &pos, buf, snap), "b-c");
    CHECK_STR(snap, "a");
    CHECK(!snap_reading(FORM_FILE, "snap-a-b-c", &pos, buf, snap));
    pos = 0;
    CHECK(!snap_reading(FORM_LV, "snap_a_1", &pos, buf,
                        snap)); /* a snapshot's name begins with a letter */
}

TEST(a_guests_number_before_the_name_is_no_part_of_it_in_a_volume_group)
{
    struct config cfg = {.pools = vg_pool(), .nb_pools = 1};
    struct vol_name n;

    CHECK_EQ(vol_parse_in(&cfg, "san:100/vm-100-disk-0.qcow2", &n, NULL), 0);
    CHECK_STR(n.vmid, "");
    CHECK_STR(n.name, "vm-100-disk-0");
    CHECK_EQ(vol_parse_in(&cfg, "san:101/vm-100-disk-0", &n, NULL), -EINVAL);
    CHECK_EQ(vol_parse_in(&cfg, "san:100/base-100-disk-0.raw/101/vm-101-disk-0", &n, NULL), 0);
    CHECK_STR(n.base, "/base-100-disk-0");
    CHECK_EQ(vol_parse_in(&cfg, "san:100/base-102-disk-0/101/vm-101-disk-0", &n, NULL), -EINVAL);
    CHECK_EQ(vol_parse_in(&cfg, "other:100/vm-100-disk-0", &n, NULL), 0);
    CHECK_STR(n.vmid, "100");
}

TEST(control_sockets)
{
    struct vol_name n = {.pool = "p", .vmid = "100", .name = "vm-100-disk-0", .format = "raw"};
    struct vol_name longer = {.pool = "p"};

    setenv("VARVE_RUNTIME", "/run/x", 1);
    char *a = vol_qmp_path(&n);
    CHECK_STR(a, "/run/x/p/100%2fvm-100-disk-0.qmp");
    free(a);
    unsetenv("VARVE_RUNTIME");
    a = vol_qmp_path(&n);
    CHECK_STR(a, "/run/varve/p/100%2fvm-100-disk-0.qmp");
    free(a);
    memset(longer.name, 'x', 200);
    a = vol_qmp_path(&longer);
    longer.name[199] = 'y';
    char *b = vol_qmp_path(&longer);
    CHECK(strlen(a) < 108 && strlen(b) < 108 && strcmp(a, b) != 0);
    free(a);
    free(b);
}
