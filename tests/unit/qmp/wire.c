/* Cutting the stream, checking arguments. */
#include "qmp/schema.h"
#include "qmp/wire.h"
#include "test.h"

static void add(struct qmp_framer *f, const char *data, size_t len)
{
    while (len > 0) {
        size_t n = MIN(len, QMP_RECV);
        char *room = qmp_framer_room(f);

        CHECK(room != NULL);
        memcpy(room, data, n);
        qmp_framer_added(f, n);
        data += n;
        len -= n;
    }
}

static void expect(struct qmp_framer *f, const char *want)
{
    const char *text;
    size_t len;

    CHECK_EQ(qmp_framer_next(f, &text, &len), 1);
    _cleanup_(freep) char *got = strndup(text, len);
    CHECK_STR(got, want);
}

static void expect_none(struct qmp_framer *f)
{
    const char *text;
    size_t len;

    CHECK_EQ(qmp_framer_next(f, &text, &len), 0);
}

TEST(texts_are_cut_wherever_the_stream_is_split)
{
    static const char stream[] =
        "{\"a\": \"}\\\"{\"}\r\n {}[1,[2]] garbage {\n\xff{\"b\":{\"c\":[]}}";
    size_t len = sizeof(stream) - 1;

    for (size_t step = 1; step <= len; step++) {
        struct qmp_framer f;
        char found[256] = "";

        qmp_framer_init(&f, 1000);
        for (size_t pos = 0; pos < len; pos += step) {
            const char *text;
            size_t text_len;

            add(&f, stream + pos, MIN(step, len - pos));
            while (qmp_framer_next(&f, &text, &text_len) == 1) {
                strncat(found, text, text_len);
                strcat(found, "|");
            }
        }
        CHECK_STR(found, "{\"a\": \"}\\\"{\"}|{}|[1,[2]]|garbage {\n|{\"b\":{\"c\":[]}}|");
        qmp_framer_fini(&f);
    }
}

TEST(one_text_after_the_other)
{
    struct qmp_framer f;

    qmp_framer_init(&f, 1000);
    add(&f, "{}{\"x\"", 6);
    expect(&f, "{}");
    expect_none(&f);
    add(&f, ":1}", 3);
    expect(&f, "{\"x\":1}");
    expect_none(&f);
    qmp_framer_fini(&f);
}

TEST(too_long_or_too_deep_ends_the_stream)
{
    struct qmp_framer f;
    const char *text;
    size_t len;

    qmp_framer_init(&f, 100);
    add(&f, "{\"", 2);
    for (int i = 0; i < 99; i++)
        add(&f, "x", 1);
    CHECK_EQ(qmp_framer_next(&f, &text, &len), -E2BIG);
    qmp_framer_fini(&f);

    qmp_framer_init(&f, 100000);
    for (unsigned i = 0; i < QMP_DEPTH_MAX; i++)
        add(&f, "[", 1);
    expect_none(&f);
    add(&f, "[", 1);
    CHECK_EQ(qmp_framer_next(&f, &text, &len), -E2BIG);
    qmp_framer_fini(&f);
}

TEST(bad_json_is_an_error)
{
    static const char *const bad[] = {"x\n", "{\"a\":1,\"a\":2}", "{'a':1}", "{]", "{\"a\"}"};
    struct err err;
    json_t *msg;

    for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
        err = (struct err){0};
        CHECK_EQ(qmp_parse(bad[i], strlen(bad[i]), &msg, &err), -EINVAL);
        CHECK(strncmp(err.text, "JSON parse error, ", 18) == 0);
    }
}

static void check_args(const char *args, const char *want)
{
    static const struct qmp_arg schema[] = {{"s", 's'}, {"i", 'I'}, {"b", 'B'}, {"o", 'O'},
                                            {"a", 'A'}, {"n", 'N'}, {NULL}};
    json_t *obj = json_loads(args, 0, NULL);
    struct err err = {0};
    int rc = qmp_check_args(schema, obj, &err);

    CHECK_EQ(rc, want ? -EINVAL : 0);
    if (want)
        CHECK_STR(err.text, want);
    json_decref(obj);
}

TEST(arguments_are_checked_in_qemus_words)
{
    check_args("{\"s\": \"x\"}", NULL);
    check_args("{\"s\": \"x\", \"i\": -1, \"b\": true, \"o\": {}, \"a\": [], \"n\": null}", NULL);
    check_args("{}", "Parameter 's' is missing");
    check_args("{\"s\": 1}", "Invalid parameter type for 's', expected: string");
    check_args("{\"s\": \"\", \"i\": \"1\"}", "Invalid parameter type for 'i', expected: integer");
    check_args("{\"s\": \"\", \"i\": 1.5}", "Invalid parameter type for 'i', expected: integer");
    check_args("{\"s\": \"\", \"b\": 1}", "Invalid parameter type for 'b', expected: boolean");
    check_args("{\"s\": \"\", \"o\": []}", "Invalid parameter type for 'o', expected: object");
    check_args("{\"s\": \"\", \"a\": {}}", "Invalid parameter type for 'a', expected: array");
    check_args("{\"s\": \"\", \"n\": 1}",
               "Invalid parameter type for 'n', expected: string or null");
    check_args("{\"s\": \"\", \"z\": 1}", "Parameter 'z' is unexpected");
}

TEST(open_tables_take_further_members)
{
    static const struct qmp_arg schema[] = {{"driver", 's'}, {"*", 'd'}, {NULL}};
    json_t *obj = json_loads("{\"driver\": \"x\", \"more\": 1}", 0, NULL);

    CHECK_EQ(qmp_check_args(schema, obj, NULL), 0);
    json_decref(obj);
}
