/* What needs no LVM: names, device-mapper names, lengths, what LVM's words mean, reports as text.
 */
#include "base/bits.h"
#include "qcow2/image.h"
#include "test.h"
#include "../../../src/vol/lvm_run.h"

static const char *repeat(char c, size_t nr)
{
    static char text[256];

    memset(text, c, nr);
    text[nr] = 0;
    return text;
}

TEST(names_that_lvm_takes)
{
    static const char *const good[] = {
        "vm-100-disk-0.qcow2",
        "snap_vm-100-disk-0_s1.qcow2",
        "+a",
        "_a",
        ".a",
        "a.b",
        "a__b",
        "lvol0",
        "a_tpool",
        "xpvmove0",
        "snap",
        "...",
        "a-",
        "rimage",
        "a_integ",
    };
    static const char *const bad[] = {
        "",         "-a",           "--a",       ".",      "..",      "a b",           "a@b",
        "a/b",      "a:b",          "a,b",       "a=b",    "a%b",     "@tag",          "\xc3\xa4",
        "snapshot", "snapshot1",    "pvmove0",   "a_mlog", "a_tdata", "a_tdata.qcow2", "a_rimage_0",
        "a_cvol",   "vm-1_pmspare", "a_vorigin", "a\n",
    };

    for (size_t i = 0; i < ARRAY_SIZE(good); i++)
        if (!lvm_lv_name_ok("vt", good[i]))
            test_fail(__FILE__, __LINE__, "'%s' is refused", good[i]);
    for (size_t i = 0; i < ARRAY_SIZE(bad); i++)
        if (lvm_lv_name_ok("vt", bad[i]))
            test_fail(__FILE__, __LINE__, "'%s' is taken", bad[i]);
    CHECK(lvm_vg_name_ok("snapshot") && !lvm_vg_name_ok("-x") && !lvm_vg_name_ok("a/b"));
    CHECK(lvm_vg_name_ok(repeat('x', 127)) && !lvm_vg_name_ok(repeat('x', 128)));
}

TEST(names_fit_together_with_their_vg)
{
    CHECK(lvm_lv_name_ok("vt", repeat('x', 122)));
    CHECK(!lvm_lv_name_ok("vt", repeat('x', 123)));
    CHECK(!lvm_lv_name_ok(repeat('v', 100), "vm1000000000000000000000x"));
    /* a dash counts twice in the kernel */
    char name[128] = "x";
    memset(name + 1, '-', 62);
    CHECK(lvm_lv_name_ok("v", name)); /* 1 + 1 + 1 + 124 */
    strcat(name, "-");
    CHECK(!lvm_lv_name_ok("v", name));
}

TEST(tags)
{
    CHECK(lvm_tag_ok("pve-vm-100") && lvm_tag_ok("varve-parent=a/b:c#d&e!f+g.h_i"));
    CHECK(!lvm_tag_ok("") && !lvm_tag_ok("-a") && !lvm_tag_ok("a b") && !lvm_tag_ok("a,b"));
    CHECK(!lvm_tag_ok("a\"b") && !lvm_tag_ok("@a") && !lvm_tag_ok("a{"));
}

static void check_dm(const char *vg, const char *lv, const char *want)
{
    char *name = lvm_dm_name(vg, lv);

    CHECK_STR(name, want);
    free(name);
}

TEST(device_mapper_names)
{
    check_dm("vt", "vm-100-disk-0.qcow2", "vt-vm--100--disk--0.qcow2");
    check_dm("a-b", "c", "a--b-c");
    check_dm("-", "-", "-----");
    check_dm("v_1", "x--y", "v_1-x----y");
}

static void check_len(uint64_t virtual_len, uint64_t base, uint64_t overlay)
{
    struct err err = {0};
    uint64_t len;

    CHECK_EQ(lvm_image_len(virtual_len, false, &len, &err), 0);
    CHECK_EQ(len, base);
    CHECK_EQ(lvm_image_len(virtual_len, true, &len, &err), 0);
    CHECK_EQ(len, overlay);
}

TEST(lengths_of_full_images)
{
    check_len(4 * MIB, 4521984, 4849664);
    check_len(8 * GIB, 8591507456, 8591638528);
    check_len(100 * GIB, 107390828544, 107389386752);
    check_len(TIB, 1099679662080, 1099663147008);
}

TEST(lengths_are_those_of_qemu_img)
{
    test_need("qemu-img");
    for (unsigned i = 0; i < 6; i++) {
        uint64_t virtual_len = 512 + (hash64(test_seed() + i) & ~511ull) % (64 * TIB), len;
        struct err err = {0};

        CHECK_EQ(lvm_image_len(virtual_len, i % 2, &len, &err), 0);
        test_sh("qemu-img measure --output json -O qcow2 -o %s --size %llu | grep -q "
                "'\"fully-allocated\": %llu'",
                i % 2 ? "cluster_size=128k,extended_l2=on" : "cluster_size=64k",
                (unsigned long long)virtual_len, (unsigned long long)len);
    }
}

TEST(lengths_that_are_too_long)
{
    struct image_create_opts opts = {.virtual_len = UINT64_MAX - 511, .backing_name = "x"};
    struct err err = {0};
    uint64_t len;

    CHECK_EQ(lvm_image_len_of(&opts, &len, &err), -EINVAL);
    CHECK_EQ(lvm_image_len(UINT64_MAX - 511, true, &len, &err), -EINVAL);
}

TEST(rounding_up_to_extents)
{
    struct err err = {0};
    uint64_t len;

    CHECK(lvm_round_up(1, 4 * MIB, &len, &err) == 0 && len == 4 * MIB);
    CHECK(lvm_round_up(8 * MIB, 4 * MIB, &len, &err) == 0 && len == 8 * MIB);
    CHECK(lvm_round_up(8 * MIB + 1, 3 * MIB, &len, &err) == 0 && len == 9 * MIB);
    CHECK(lvm_round_up(0, 4 * MIB, &len, &err) == 0 && len == 0);
    CHECK_EQ(lvm_round_up(UINT64_MAX, 4 * MIB, &len, &err), -EOVERFLOW);
    CHECK_EQ(lvm_round_up(1, 0, &len, &err), -EINVAL);
}

/* ---- LVM's words ---- */

TEST(complaints)
{
    static const struct {
        const char *said, *line;
        int rc;
    } cases[] = {
        {"  Logical Volume \"a\" already exists in volume group \"vt\"\n",
         "Logical Volume \"a\" already exists in volume group \"vt\"", -EEXIST},
        {"  WARNING: odd\n  Volume group \"vt\" has insufficient free space (9 extents): 10 "
         "required.\n",
         "Volume group \"vt\" has insufficient free space (9 extents): 10 required", -ENOSPC},
        {"  Insufficient free space: 3 extents needed, but only 1 available\n",
         "Insufficient free space: 3 extents needed, but only 1 available", -ENOSPC},
        {"  VG vt 7 metadata on /dev/a (999 bytes) too large for circular buffer (9 bytes with 9 "
         "used)\n"
         "  Failed to write VG vt.\n",
         "VG vt 7 metadata on /dev/a (999 bytes) too large for circular buffer (9 bytes with 9 "
         "used)",
         -ENOSPC},
        {"  VG vt 8 metadata on /dev/a (9 bytes) exceeds maximum metadata size (8 bytes)\n",
         "VG vt 8 metadata on /dev/a (9 bytes) exceeds maximum metadata size (8 bytes)", -ENOSPC},
        {"  Volume group \"x\" not found\n  Cannot process volume group x\n",
         "Volume group \"x\" not found", -ENOENT},
        {"  Failed to find logical volume \"vt/x\"\n", "Failed to find logical volume \"vt/x\"",
         -ENOENT},
        {"  Failed to find logical volume \"vt/x\"\n  Logical volume vt/y in use.\n",
         "Logical volume vt/y in use", -EBUSY},
        {"  Logical volume vt/y contains a filesystem in use.\n",
         "Logical volume vt/y contains a filesystem in use", -EBUSY},
        {"  LV locked by other host: vt/y\n  Failed to lock logical volume vt/y.\n",
         "LV locked by other host: vt/y", -EBUSY},
        {"  LV is already locked with incompatible mode: vt/y\n",
         "LV is already locked with incompatible mode: vt/y", -EBUSY},
        {"  Cannot access VG vt with system ID a with local system ID b.\n",
         "Cannot access VG vt with system ID a with local system ID b", -EBUSY},
        {"  VG vt lock failed: held by other host.\n", "VG vt lock failed: held by other host",
         -EAGAIN},
        {"  Global lock failed: check that lvmlockd is running.\n",
         "Global lock failed: check that lvmlockd is running", -EAGAIN},
        {"  Cannot access VG vt due to failed lock.\n", "Cannot access VG vt due to failed lock",
         -EAGAIN},
        {"  Cannot change VG vt while PVs are missing.\n  Consider vgreduce --removemissing.\n",
         "Cannot change VG vt while PVs are missing", -ENODEV},
        {"  Refusing activation of partial LV vt/a.  Use '--activationmode partial' to override.\n",
         "Refusing activation of partial LV vt/a.  Use '--activationmode partial' to override",
         -ENODEV},
        {"  /run/lock/lvm/P_global:aux: open failed: Permission denied\n",
         "/run/lock/lvm/P_global:aux: open failed: Permission denied", -EACCES},
        {"  New size (2 extents) matches existing size (2 extents).\n",
         "New size (2 extents) matches existing size (2 extents)", 0},
        {"  New size (2 extents) matches existing size (2 extents).\n  Failed to suspend vt/a.\n",
         "Failed to suspend vt/a", -EIO},
        {"  Failed to find logical volume \"vt/x\"\n  Failed to write VG vt.\n",
         "Failed to write VG vt", -EIO},
        {"  WARNING: /dev/x: open failed: Permission denied\n  Failed to find logical volume "
         "\"vt/x\"\n",
         "Failed to find logical volume \"vt/x\"", -ENOENT},
        {"lvm: 9: strace: not found\n", "lvm: 9: strace: not found", -EIO},
        {"  Logical volume nope not found in volume group vt.\n",
         "Logical volume nope not found in volume group vt", -ENOENT},
        {"", "no reason given", -EIO},
        {NULL, "no reason given", -EIO},
    };
    char line[300];

    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        int rc = lvm_complaint(cases[i].said, line, sizeof(line));

        if (rc != cases[i].rc)
            test_fail(__FILE__, __LINE__, "%d for: %s", rc, cases[i].said);
        CHECK_STR(line, cases[i].line);
    }
}

/* ---- reports as text ---- */

#define VG(more)                                                                                   \
    "{\"report\":[{\"vg\":[{\"vg_name\":\"vt\",\"vg_uuid\":\"u\",\"vg_seqno\":\"7\","              \
    "\"vg_extent_size\":\"4194304\",\"vg_size\":\"40000000\",\"vg_free\":\"0\",\"vg_attr\":"       \
    "\"wz--ns\",\"vg_lock_type\":\"sanlock\",\"vg_tags\":\"a,b\",\"vg_mda_size\":\"1\","           \
    "\"vg_mda_free\":\"1\"}]" more "}]}"
#define LV(name, size, attr)                                                                       \
    "{\"lv_name\":\"" name "\",\"lv_uuid\":\"u\",\"lv_size\":\"" size "\",\"lv_attr\":\"" attr     \
    "\",\"lv_layout\":\"linear\",\"lv_tags\":\"pve-vm-1\",\"lv_time\":\"1796065907\"}"

static int parse(const char *text, struct lvm_vg **ret)
{
    struct err err = {0};

    return lvm_report_parse(text, "vt", ret, &err);
}

TEST(a_report_is_read)
{
    struct lvm_vg *vg;

    CHECK_EQ(
        parse(
            VG(",\"pv\":[{\"pv_name\":\"/dev/a\",\"pv_missing\":\"\",\"pe_start\":"
               "\"1\"},{\"pv_name\":\"[unknown]\","
               "\"pv_missing\":\"missing\"}],\"lv\":[" LV("b", "8388608", "-wi-ao----") "," LV(
                   "a", "4194304",
                   "-wi-XX--X-") "," LV("c", "1", "-wi-s---p-") "," LV("d", "1", "-wi-------") "]"),
            &vg),
        0);
    CHECK(vg->seqno == 7 && vg->extent_len == 4 * MIB && vg->shared && vg->tags.len == 2);
    CHECK(vg->pvs.len == 2 && vg->nb_missing == 1 && vg->lvs.len == 4);
    const struct lvm_lv *a = lvm_vg_find(vg, "a"), *b = lvm_vg_find(vg, "b");
    const struct lvm_lv *c = lvm_vg_find(vg, "c"), *d = lvm_vg_find(vg, "d");
    CHECK(a && b && c && d && !lvm_vg_find(vg, "e") && !lvm_vg_find(vg, ""));
    CHECK(b->len == 8388608 && b->active == LVM_YES && b->open == LVM_YES && b->made == 1796065907);
    CHECK(lvm_lv_has_tag(b, "pve-vm-1") && !lvm_lv_has_tag(b, "pve-vm"));
    CHECK(a->active == LVM_UNKNOWN && a->open == LVM_UNKNOWN && !a->partial);
    CHECK(c->suspended && c->active == LVM_YES && c->open == LVM_NO && c->partial);
    CHECK(d->active == LVM_NO && d->open == LVM_NO && !d->suspended);
    struct err err = {0};
    CHECK_EQ(lvm_vg_check(vg, &err), -ENODEV);
    CHECK_STR(err_text(&err),
              "1 of 2 physical volumes of VG 'vt' are missing; bring them back first");
    lvm_vg_free(vg);
}

static int parse_lv(const char *attr, const char *segs, struct lvm_vg **ret)
{
    char text[2048];

    snprintf(text, sizeof(text),
             VG(",\"pv\":[{\"pv_name\":\"/dev/a\",\"pv_missing\":\"\",\"pe_start\":\"1048576\"},"
                "{\"pv_name\":\"/dev/ab\",\"pv_missing\":\"\",\"pe_start\":\"9437184\"},"
                "{\"pv_name\":\"[unknown]\",\"pv_missing\":\"missing\",\"pe_start\":\"\"}],"
                "\"lv\":[" LV("a", "16777216", "%s") "],\"seg\":[%s]"),
             attr, segs);
    return parse(text, ret);
}

#define SEG(type, start, stripe, devices)                                                          \
    "{\"lv_name\":\"a\",\"segtype\":\"" type "\",\"seg_start_pe\":\"" start                        \
    "\",\"seg_size_pe\":\"2\",\"stripe_size\":\"" stripe "\",\"devices\":\"" devices "\"}"

TEST(a_report_tells_where_an_lv_begins)
{
    static const struct {
        const char *attr, *segs, *pv;
        uint64_t off, len;
    } cases[] = {
        {"-wi-------", SEG("linear", "0", "0", "/dev/ab(7)"), "/dev/ab", 37 * MIB, 8 * MIB},
        {"-wi-a-----", SEG("linear", "0", "0", "/dev/a(0)"), "/dev/a", MIB, 8 * MIB},
        {"owi-------",
         SEG("linear", "2", "0", "/dev/ab(0)") "," SEG("linear", "0", "0", "/dev/a(3)"), "/dev/a",
         13 * MIB, 8 * MIB},
        {"-wi-------", SEG("striped", "0", "65536", "/dev/ab(1),/dev/a(0)"), "/dev/ab", 13 * MIB,
         64 * KIB},
        {"-wi-----p-", SEG("striped", "0", "65536", "/dev/a(1),[unknown](0)"), "/dev/a", 5 * MIB,
         64 * KIB},
        {"-wi-----p-", SEG("linear", "0", "0", "[unknown](0)"), NULL, 0, 0},
        {"swi-------", SEG("linear", "0", "0", "/dev/a(9)"), NULL, 0, 0}, /* differences alone */
        {"Owi-------", SEG("linear", "0", "0", "/dev/a(9)"), NULL, 0, 0},
        {"Vwi-------", SEG("thin", "0", "0", ""), NULL, 0, 0},
        {"rwi-------", SEG("raid1", "0", "0", "a_rimage_0(0),a_rimage_1(0)"), NULL, 0, 0},
        {"-wI-------", SEG("linear", "0", "0", "pvmove0(0)"), NULL, 0, 0},
        {"-wi-------", SEG("linear", "0", "0", "/dev/a(x)"), NULL, 0, 0},
        {"-wi-------", "", NULL, 0, 0},
    };
    struct lvm_vg *vg = NULL;

    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        CHECK_EQ(parse_lv(cases[i].attr, cases[i].segs, &vg), 0);
        const struct lvm_lv *lv = lvm_vg_find(vg, "a");
        if (lv->head_off != cases[i].off || lv->head_len != cases[i].len)
            test_fail(__FILE__, __LINE__, "%s: at %llu, %llu bytes", cases[i].segs,
                      (unsigned long long)lv->head_off, (unsigned long long)lv->head_len);
        CHECK(!lv->head_pv == !cases[i].pv);
        if (lv->head_pv)
            CHECK_STR(lv->head_pv, cases[i].pv);
        lvm_vg_free(vg);
    }
    vg = NULL;
    CHECK_EQ(parse_lv("-wi-------", SEG("linear", "x", "0", "/dev/a(0)"), &vg), -EUCLEAN);
    CHECK_EQ(parse_lv("-wi-------", SEG("linear", "0", "", "/dev/a(0)"), &vg), -EUCLEAN);
    CHECK_EQ(parse_lv("-wi-------", SEG("linear", "0", "0", "/dev/a(9999999999999999)"), &vg),
             -EUCLEAN);
    CHECK(!vg);
}

TEST(reports_that_are_none)
{
    struct lvm_vg *vg = NULL;

    CHECK_EQ(parse("", &vg), -EUCLEAN);
    CHECK_EQ(parse("{}", &vg), -EUCLEAN);
    CHECK_EQ(parse("[1]", &vg), -EUCLEAN);
    CHECK_EQ(parse("{\"report\":[{\"vg\":[", &vg), -EUCLEAN);
    CHECK_EQ(parse("{\"report\":[{}]}", &vg), -ENOENT);
    CHECK_EQ(parse("{\"report\":[{\"vg\":[{\"vg_name\":\"vt\"}]}]}", &vg), -EUCLEAN);
    CHECK_EQ(parse(VG(",\"lv\":[" LV("a", "-1", "-wi-------") "]"), &vg), -EUCLEAN);
    CHECK_EQ(parse(VG(",\"lv\":[" LV("a", "1x", "-wi-------") "]"), &vg), -EUCLEAN);
    CHECK_EQ(parse(VG(",\"lv\":[" LV("a", "1", "-wi") "]"), &vg), -EUCLEAN);
    CHECK_EQ(parse(VG(",\"lv\":[" LV("a", "99999999999999999999", "-wi-------") "]"), &vg),
             -EUCLEAN);
    CHECK(!vg);
    CHECK_EQ(parse(VG(""), &vg), 0);
    CHECK(vg->lvs.len == 0 && !lvm_vg_find(vg, "a"));
    lvm_vg_free(vg);
}
