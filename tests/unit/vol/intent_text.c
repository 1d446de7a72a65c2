/* Texts as tags of a volume group: every text comes back, and none of which something is missing.
 */
#include "test.h"
#include "../../../src/vol/intent_tags.h"

static struct err err;

static char *make_text(size_t len, uint64_t seed)
{
    char *text = malloc(len + 1);

    for (size_t i = 0; i < len; i++) {
        seed = seed * 6364136223846793005ull + 1442695040888963407ull;
        text[i] = (char)(1 + (seed >> 33) % 255);
    }
    text[len] = '\0';
    return text;
}

/* As LVM may give them: in another order, among others. */
static void put_into_vg(struct lvm_vg *vg, const struct intent_tags *tags)
{
    *vg = (struct lvm_vg){.name = "vt"};
    vec_push(&vg->tags, strdup("somebody"));
    for (size_t i = tags->list.len; i-- > 0;)
        vec_push(&vg->tags, strdup(tags->list.data[i]));
    vec_push(&vg->tags, strdup("varve-intents"));
}

static void drop_vg(struct lvm_vg *vg)
{
    vec_for_each(tag, &vg->tags)
        free(*tag);
    vec_free(&vg->tags);
}

static int decode_vg(const struct lvm_vg *vg, const char *id, char **ret)
{
    struct intent_tags found = {0};

    err = (struct err){0};
    CHECK_EQ(intent_tags_of(vg, id, &found), 0);
    int rc = intent_tags_decode(&found, ret, &err);
    intent_tags_fini(&found);
    return rc;
}

TEST(every_length_comes_back)
{
    const size_t edge = INTENT_TAG_BYTES;
    const size_t lens[] = {1,
                           2,
                           3,
                           4,
                           5,
                           edge - 1,
                           edge,
                           edge + 1,
                           edge + 2,
                           2 * edge - 1,
                           2 * edge,
                           70000,
                           512 * edge - 1,
                           512 * edge};

    for (size_t i = 0; i < ARRAY_SIZE(lens); i++) {
        _cleanup_(freep) char *text = make_text(lens[i], i), *back = NULL;
        struct intent_tags tags = {0}, ids = {0};
        struct lvm_vg vg;

        CHECK_EQ(intent_tags_encode("0123456789abcdef", text, &tags), 0);
        CHECK_EQ(tags.list.len, (lens[i] + edge - 1) / edge);
        vec_for_each(tag, &tags.list)
            CHECK(lvm_tag_ok(*tag) && !strchr(*tag, ','));
        put_into_vg(&vg, &tags);
        CHECK_EQ(decode_vg(&vg, "0123456789abcdef", &back), 0);
        CHECK_STR(back, text);
        CHECK_EQ(intent_tags_ids(&vg, &ids, &err), 0);
        CHECK_EQ(ids.list.len, 1);
        CHECK_STR(ids.list.data[0], "0123456789abcdef");
        intent_tags_fini(&ids);
        intent_tags_fini(&tags);
        drop_vg(&vg);
    }
}

TEST(what_does_not_fit_is_refused)
{
    _cleanup_(freep) char *text = make_text(512 * INTENT_TAG_BYTES + 1, 1);
    static const char *const ids[] = {"",        "a/b", "a b", "-", "123456789012345678901234",
                                      "\303\244"};
    struct intent_tags tags = {0};

    CHECK_EQ(intent_tags_encode("1", text, &tags), -E2BIG);
    for (size_t i = 0; i < ARRAY_SIZE(ids); i++)
        CHECK_EQ(intent_tags_encode(ids[i], "x", &tags), -EINVAL);
    CHECK_EQ(intent_tags_encode("1", "", &tags), -EINVAL);
    CHECK_EQ(tags.list.len, 0);
}

/* Two intents, and one id that begins like the other. */
TEST(intents_are_told_apart)
{
    struct intent_tags tags = {0}, ids = {0};
    _cleanup_(freep) char *a = make_text(2000, 1), *b = make_text(900, 2), *back = NULL;
    struct lvm_vg vg;

    CHECK_EQ(intent_tags_encode("12", a, &tags), 0);
    CHECK_EQ(intent_tags_encode("1", b, &tags), 0);
    put_into_vg(&vg, &tags);
    CHECK_EQ(intent_tags_ids(&vg, &ids, &err), 0);
    CHECK_EQ(ids.list.len, 2);
    CHECK_EQ(decode_vg(&vg, "1", &back), 0);
    CHECK_STR(back, b);
    free(TAKE_PTR(back));
    CHECK_EQ(decode_vg(&vg, "12", &back), 0);
    CHECK_STR(back, a);
    intent_tags_fini(&ids);
    intent_tags_fini(&tags);
    drop_vg(&vg);
}

/* Each part taken away, given twice, cut, or changed so that it is none any more. */
TEST(a_damaged_intent_is_never_read)
{
    _cleanup_(freep) char *text = make_text(3 * INTENT_TAG_BYTES + 10, 3);
    static const char *const wrong[] = {
        "1/1/",
        "1/1/AAA",
        "1/1/AA=A",
        "1/1/A===",
        "1/1/AA A",
        "0/1/AAAA",
        "2/1/AAAA",
        "01/1/AAAA",
        "1/01/AAAA",
        "1/1",
        "1",
        "",
        "/",
        "1/513/AAAA",
        "-1/1/AAAA",
        "1/0/AAAA",
        "1//AAAA",
        "1/1/AAAA/",
        "1/9999999999999999999/AAAA",
    };

    for (unsigned part = 0; part < 4; part++) {
        struct intent_tags tags = {0};
        char *back = NULL;

        CHECK_EQ(intent_tags_encode("1", text, &tags), 0);
        CHECK_EQ(tags.list.len, 4);
        char *gone = tags.list.data[part];
        vec_remove_at(&tags.list, part);
        CHECK_EQ(intent_tags_decode(&tags, &back, &err), -EUCLEAN);
        CHECK(strstr(err_text(&err), "is missing") != NULL);
        vec_push(&tags.list, gone);
        CHECK_EQ(intent_tags_decode(&tags, &back, &err), 0);
        free(TAKE_PTR(back));
        vec_push(&tags.list, strdup(gone));
        tags.list.data[4][strlen(gone) - 1] = 'B';
        CHECK_EQ(intent_tags_decode(&tags, &back, &err), -EUCLEAN);
        CHECK(strstr(err_text(&err), "twice") != NULL);
        free(tags.list.data[4]);
        tags.list.len = 4;
        gone[strlen(gone) - 4] =
            '\0'; /* a whole part that is short, or a last one of another end */
        if (part < 3)
            CHECK_EQ(intent_tags_decode(&tags, &back, &err), -EUCLEAN);
        intent_tags_fini(&tags);
    }
    for (size_t i = 0; i < ARRAY_SIZE(wrong); i++) {
        struct lvm_vg vg = {.name = "vt"};
        struct intent_tags ids = {0};
        char *tag = NULL, *back = NULL;

        CHECK(asprintf(&tag, INTENT_TAG "1/%s", wrong[i]) > 0);
        vec_push(&vg.tags, tag);
        CHECK_EQ(intent_tags_ids(&vg, &ids, &err), 0);
        if (decode_vg(&vg, "1", &back) != -EUCLEAN)
            test_fail(__FILE__, __LINE__, "'%s' is read", tag);
        intent_tags_fini(&ids);
        drop_vg(&vg);
    }
}

TEST(tags_that_only_look_like_ours_are_told)
{
    static const char *const odd[] = {"", "1", "/1/1/AAAA", "a.b/1/1/AAAA",
                                      "1234567890123456789012345/1/1/AAAA"};

    for (size_t i = 0; i < ARRAY_SIZE(odd); i++) {
        struct lvm_vg vg = {.name = "vt"};
        struct intent_tags ids = {0};
        char *tag = NULL;

        CHECK(asprintf(&tag, INTENT_TAG "%s", odd[i]) > 0);
        vec_push(&vg.tags, tag);
        CHECK_EQ(intent_tags_ids(&vg, &ids, &err), -EUCLEAN);
        CHECK(strstr(err_text(&err), "vt") != NULL);
        intent_tags_fini(&ids);
        drop_vg(&vg);
    }
}
