/*
 * One report of a VG: `lvm fullreport` reads the metadata once, under one lock, and prints VG, PVs
 * and LVs of that same reading, each field as text in JSON. Only the fields below are asked for:
 * all of them would be six times as long.
 */
#include <inttypes.h>
#include <jansson.h>
#include <string.h>
#include "vol/lvm_run.h"

#define ATTR_LEN 9u /* letters of lv_attr that are looked at */
#define VG_FIELDS                                                                                  \
    "vg_name,vg_uuid,vg_seqno,vg_extent_size,vg_size,vg_free,vg_attr,vg_lock_type,vg_tags,"        \
    "vg_mda_size,vg_mda_free"
#define LV_FIELDS  "lv_name,lv_uuid,lv_size,lv_attr,lv_layout,lv_tags,lv_time"
#define PV_FIELDS  "pv_name,pv_missing,pe_start"
#define SEG_FIELDS "lv_name,segtype,seg_start_pe,seg_size_pe,stripe_size,devices"

typedef VEC(char *) tag_list;

/* ---- fields ---- */

static const char *text_of(const json_t *row, const char *key)
{
    const char *text = json_string_value(json_object_get(row, key));

    return text ? text : "";
}

/* A field that must be there as a whole number. */
static int number_of(const json_t *row, const char *key, uint64_t *ret, struct err *err)
{
    const char *text = text_of(row, key);
    char *end;

    errno = 0;
    unsigned long long v = strtoull(text, &end, 10);
    if (errno || end == text || *end || *text == '-')
        return err_set(err, -EUCLEAN, "LVM's report has '%s' for %s", text, key);
    *ret = v;
    return 0;
}

static int64_t time_of(const json_t *row, const char *key)
{
    const char *text = text_of(row, key);
    char *end;
    long long v = strtoll(text, &end, 10);

    return end != text && !*end && v > 0 ? v : 0;
}

/* "a,b,c": no tag holds a comma. */
static int tags_of(const json_t *row, const char *key, void *ret)
{
    tag_list *list = ret;

    for (const char *s = text_of(row, key); *s;) {
        size_t len = strcspn(s, ",");
        char *tag = strndup(s, len);

        if (!tag || vec_push(list, tag) < 0) {
            free(tag);
            return -ENOMEM;
        }
        s += len + (s[len] == ',');
    }
    return 0;
}

/* ---- rows ---- */

/* Fifth and sixth letter: "a" and "o"; "X" where the kernel was not asked or does not agree with
 * the metadata, as for an LV that another host has made longer. */
static void read_attr(struct lvm_lv *lv)
{
    char active = lv->attr[4], open = lv->attr[5];

    lv->suspended = active == 's' || active == 'S';
    lv->active = active == '-' ? LVM_NO : active == 'X' || active == 'h' ? LVM_UNKNOWN : LVM_YES;
    lv->open = open == 'o' ? LVM_YES : open == '-' ? LVM_NO : LVM_UNKNOWN;
    lv->partial = lv->attr[8] == 'p';
}

static int read_lv(struct lvm_vg *vg, const json_t *row, struct err *err)
{
    struct lvm_lv lv = {
        .name = text_of(row, "lv_name"),
        .uuid = text_of(row, "lv_uuid"),
        .attr = text_of(row, "lv_attr"),
        .layout = text_of(row, "lv_layout"),
        .made = time_of(row, "lv_time"),
    };
    int rc = number_of(row, "lv_size", &lv.len, err);

    if (rc < 0)
        return rc;
    if (!*lv.name || strlen(lv.attr) < ATTR_LEN)
        return err_set(err, -EUCLEAN, "LVM's report has an LV '%s' with attributes '%s'", lv.name,
                       lv.attr);
    read_attr(&lv);
    rc = vec_push(&vg->lvs, lv);
    if (rc == 0)
        rc = tags_of(row, "lv_tags", &vg->lvs.data[vg->lvs.len - 1].tags);
    return rc < 0 ? err_errno(err, rc, "read LVM's report") : 0;
}

static int read_pv(struct lvm_vg *vg, const json_t *row, struct err *err)
{
    struct lvm_pv pv = {
        .name = text_of(row, "pv_name"),
        .missing = *text_of(row, "pv_missing") != 0,
    };

    int rc = pv.missing ? 0 : number_of(row, "pe_start", &pv.data_off, err);

    if (rc < 0)
        return rc;
    vg->nb_missing += pv.missing;
    rc = vec_push(&vg->pvs, pv);
    return rc < 0 ? err_errno(err, rc, "read LVM's report") : 0;
}

/* The first of "/dev/sda(12),/dev/sdb(0)": a PV that is there, and the extent on it. Areas that are
 * LVs themselves (pvmove, RAID) have names without a slash. */
static const struct lvm_pv *first_area(const struct lvm_vg *vg, const char *areas,
                                       uint64_t *ret_extent)
{
    vec_for_each(pv, &vg->pvs) {
        size_t len = strlen(pv->name);
        char *end;

        if (pv->missing || strncmp(areas, pv->name, len) != 0 || areas[len] != '(')
            continue;
        errno = 0;
        *ret_extent = strtoull(areas + len + 1, &end, 10);
        return errno || end == areas + len + 1 || *end != ')' ? NULL : pv;
    }
    return NULL;
}

/* Its bytes are those of the PV at the same place. Not so a snapshot of LVM's own, nor an origin
 * that one is merged into. */
static bool is_plain(const struct lvm_lv *lv, const char *segtype)
{
    return (lv->attr[0] == '-' || lv->attr[0] == 'o') &&
           (strcmp(segtype, "linear") == 0 || strcmp(segtype, "striped") == 0);
}

/* The segment that an LV begins with tells where its first bytes are. */
static int read_seg(struct lvm_vg *vg, const json_t *row, struct err *err)
{
    struct lvm_lv *lv = lvm_vg_find(vg, text_of(row, "lv_name"));
    const char *segtype = text_of(row, "segtype");
    uint64_t start, nb_extents, stripe, extent, off;

    if (!lv || !is_plain(lv, segtype))
        return 0;
    int rc = number_of(row, "seg_start_pe", &start, err);
    if (rc < 0 || start != 0)
        return rc;
    rc = number_of(row, "seg_size_pe", &nb_extents, err);
    if (rc == 0)
        rc = number_of(row, "stripe_size", &stripe, err);
    if (rc < 0)
        return rc;
    const struct lvm_pv *pv = first_area(vg, text_of(row, "devices"), &extent);
    if (!pv)
        return 0;
    if (strcmp(segtype, "linear") == 0)
        stripe = MIN(nb_extents, UINT64_MAX / vg->extent_len) * vg->extent_len;
    if (__builtin_mul_overflow(extent, vg->extent_len, &off) ||
        __builtin_add_overflow(off, pv->data_off, &off))
        return err_set(err, -EUCLEAN, "LVM's report has LV '%s' behind the end of any device",
                       lv->name);
    lv->head_pv = pv->name;
    lv->head_off = off;
    lv->head_len = MIN(stripe, lv->len);
    return 0;
}

static int read_vg(struct lvm_vg *vg, const json_t *row, struct err *err)
{
    const struct {
        const char *key;
        uint64_t *to;
    } numbers[] = {
        {"vg_seqno", &vg->seqno},
        {"vg_extent_size", &vg->extent_len},
        {"vg_size", &vg->len},
        {"vg_free", &vg->free},
        {"vg_mda_size", &vg->metadata_len},
        {"vg_mda_free", &vg->metadata_free},
    };

    vg->name = text_of(row, "vg_name");
    vg->uuid = text_of(row, "vg_uuid");
    vg->attr = text_of(row, "vg_attr");
    vg->lock_type = text_of(row, "vg_lock_type");
    vg->shared = *vg->lock_type && strcmp(vg->lock_type, "none") != 0;
    for (size_t i = 0; i < ARRAY_SIZE(numbers); i++) {
        int rc = number_of(row, numbers[i].key, numbers[i].to, err);

        if (rc < 0)
            return rc;
    }
    if (vg->extent_len == 0)
        return err_set(err, -EUCLEAN, "LVM's report has extents of no length");
    int rc = tags_of(row, "vg_tags", &vg->tags);
    return rc < 0 ? err_errno(err, rc, "read LVM's report") : 0;
}

static int read_rows(struct lvm_vg *vg, const json_t *rows,
                     int (*read)(struct lvm_vg *vg, const json_t *row, struct err *err),
                     struct err *err)
{
    const json_t *row;
    size_t i;

    json_array_foreach(rows, i, row)
    {
        int rc = read(vg, row, err);

        if (rc < 0)
            return rc;
    }
    return 0;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct lvm_lv *)a)->name, ((const struct lvm_lv *)b)->name);
}

static int read_report(struct lvm_vg *vg, const json_t *report, struct err *err)
{
    int rc = read_rows(vg, json_object_get(report, "vg"), read_vg, err);

    if (rc == 0)
        rc = read_rows(vg, json_object_get(report, "pv"), read_pv, err);
    if (rc == 0)
        rc = read_rows(vg, json_object_get(report, "lv"), read_lv, err);
    if (rc == 0)
        sort_items(vg->lvs.data, vg->lvs.len, sizeof(*vg->lvs.data), by_name);
    return rc < 0 ? rc : read_rows(vg, json_object_get(report, "seg"), read_seg, err);
}

int lvm_report_parse(const char *text, const char *name, struct lvm_vg **ret, struct err *err)
{
    _cleanup_(lvm_vg_freep) struct lvm_vg *vg = calloc(1, sizeof(*vg));
    json_error_t bad;

    if (!vg)
        return err_errno(err, -ENOMEM, "read LVM's report");
    json_t *root = json_loads(text, JSON_REJECT_DUPLICATES, &bad);
    vg->source = root;
    const json_t *report = json_array_get(json_object_get(root, "report"), 0);
    if (!report)
        return err_set(err, -EUCLEAN, "LVM's report cannot be read: %s (line %d)",
                       root ? "nothing in it" : bad.text, root ? 1 : bad.line);
    int rc = read_report(vg, report, err);
    if (rc < 0)
        return rc;
    if (!vg->name || strcmp(vg->name, name) != 0)
        return err_set(err, -ENOENT, "volume group '%s' not found", name);
    *ret = TAKE_PTR(vg);
    return 0;
}

int lvm_report(struct lvm *lvm, struct lvm_vg **ret, struct err *err)
{
    static const char *const fields[][2] = {
        {"vg", VG_FIELDS},   {"pv", PV_FIELDS},
        {"lv", LV_FIELDS},   {"pvseg", "pvseg_start"}, /* which cannot be left out */
        {"seg", SEG_FIELDS},
    };
    struct lvm_cmd cmd;
    _cleanup_(freep) char *out = NULL;
    _cleanup_(freep) char *said = NULL;
    int rc;

    if (!lvm_vg_name_ok(lvm->vg))
        return err_set(err, -EINVAL, "'%s' cannot be a volume group's name", lvm->vg);
    lvm_cmd_init(&cmd, lvm, "fullreport");
    lvm_cmd_addf(&cmd, "--reportformat=json");
    lvm_cmd_addf(&cmd, "--units=b");
    lvm_cmd_addf(&cmd, "--nosuffix");
    for (size_t i = 0; i < ARRAY_SIZE(fields); i++) {
        lvm_cmd_addf(&cmd, "--configreport=%s", fields[i][0]);
        lvm_cmd_addf(&cmd, "--options=%s", fields[i][1]);
    }
    lvm_cmd_add(&cmd, lvm->vg);
    rc = lvm_cmd_run(&cmd, lvm, &out, &said, err);
    lvm_cmd_fini(&cmd);
    lvm->counts.reports++;
    if (rc < 0)
        return rc;
    rc = lvm_report_parse(out, lvm->vg, ret, err);
    if (rc < 0)
        return rc;
    (*ret)->unlocked = strstr(said, "without a lock") != NULL;
    lvm->nb_missing = (*ret)->nb_missing;
    return 0;
}

void lvm_vg_free(struct lvm_vg *vg)
{
    if (!vg)
        return;
    vec_for_each(lv, &vg->lvs) {
        vec_for_each(tag, &lv->tags)
            free(*tag);
        vec_free(&lv->tags);
    }
    vec_for_each(tag, &vg->tags)
        free(*tag);
    vec_free(&vg->tags);
    vec_free(&vg->lvs);
    vec_free(&vg->pvs);
    json_decref(vg->source);
    free(vg);
}

/* ---- questions ---- */

int lvm_vg_check(const struct lvm_vg *vg, struct err *err)
{
    if (vg->nb_missing == 0)
        return 0;
    return err_set(err, -ENODEV,
                   "%u of %zu physical volumes of VG '%s' are missing; bring them back first",
                   vg->nb_missing, vg->pvs.len, vg->name);
}

struct lvm_lv *lvm_vg_find(const struct lvm_vg *vg, const char *name)
{
    const struct lvm_lv key = {.name = name};

    return vg->lvs.len ? bsearch(&key, vg->lvs.data, vg->lvs.len, sizeof(key), by_name) : NULL;
}

bool lvm_lv_has_tag(const struct lvm_lv *lv, const char *tag)
{
    vec_for_each(t, &lv->tags)
        if (strcmp(*t, tag) == 0)
            return true;
    return false;
}
