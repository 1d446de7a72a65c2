/* Growable arrays. */
#include "base/vec.h"
#include "test.h"

TEST(vec_grows_and_keeps_its_elements)
{
    VEC(unsigned) v = {0};

    for (unsigned i = 0; i < 1000; i++)
        CHECK_EQ(vec_push(&v, i * 3), 0);
    CHECK_EQ(v.len, 1000);
    CHECK(v.cap >= 1000);
    unsigned i = 0;
    vec_for_each(it, &v)
        CHECK_EQ(*it, 3 * i++);
    CHECK_EQ(i, 1000);
    vec_free(&v);
    CHECK(v.data == NULL && v.len == 0 && v.cap == 0);
}

TEST(vec_takes_structs_and_removes)
{
    struct pair {
        int a, b;
    };
    VEC(struct pair) v = {0};

    for (int i = 0; i < 5; i++)
        CHECK_EQ(vec_push(&v, {i, -i}), 0);
    vec_remove_at(&v, 0);
    vec_remove_at(&v, 3);
    vec_remove_at(&v, 1);
    CHECK_EQ(v.len, 2);
    CHECK(v.data[0].a == 1 && v.data[0].b == -1 && v.data[1].a == 3);
    vec_free(&v);
}

TEST(vec_reserve_leaves_the_length)
{
    VEC(char) v = {0};

    CHECK_EQ(vec_reserve(&v, 100), 0);
    CHECK(v.len == 0 && v.cap >= 100);
    CHECK_EQ(vec_reserve(&v, 50), 0);
    CHECK(v.cap >= 100);
    vec_free(&v);
}

/* A sanitizer's allocator must fail as the real one does, not stop the program. */
const char *__asan_default_options(void);
const char *__tsan_default_options(void);
const char *__asan_default_options(void)
{
    return "allocator_may_return_null=1";
}
const char *__tsan_default_options(void)
{
    return "allocator_may_return_null=1";
}

TEST(vec_refuses_what_does_not_fit)
{
    static volatile size_t most = SIZE_MAX; /* the compiler would object to a constant */
    VEC(uint64_t) v = {0};

    CHECK_EQ(vec_push(&v, 1), 0);
    CHECK_EQ(vec_reserve(&v, most / 4), -ENOMEM);
    CHECK(v.len == 1 && v.data[0] == 1);
    vec_free(&v);
}
