/* Error values: text, prefix, cut at the end, NULL. */
#include "base/err.h"
#include "test.h"

TEST(err_set_formats_and_returns_the_code)
{
    struct err e = {0};

    CHECK_EQ(err_set(&e, -EINVAL, "bad %s %d", "thing", 7), -EINVAL);
    CHECK_EQ(e.rc, -EINVAL);
    CHECK_STR(err_text(&e), "bad thing 7");
}

TEST(err_errno_explains_the_code)
{
    struct err e = {0};

    CHECK_EQ(err_errno(&e, -ENOENT, "open '%s'", "a"), -ENOENT);
    CHECK_STR(err_text(&e), "open 'a': No such file or directory");
}

TEST(err_prefix_keeps_what_was_said)
{
    struct err e = {0};

    err_set(&e, -EIO, "sector 5");
    CHECK_EQ(err_prefix(&e, -EIO, "read %s", "header"), -EIO);
    CHECK_EQ(err_prefix(&e, -EINVAL, "open"), -EINVAL);
    CHECK_STR(err_text(&e), "open: read header: sector 5");
    CHECK_EQ(e.rc, -EINVAL);
}

TEST(err_prefix_explains_when_nothing_was_said)
{
    struct err e = {0};

    err_prefix(&e, -ENOSPC, "write");
    CHECK_STR(err_text(&e), "write: No space left on device");
}

TEST(err_text_falls_back_to_the_code)
{
    struct err e = {.rc = -EPERM};

    CHECK_STR(err_text(&e), "Operation not permitted");
}

TEST(err_long_text_is_cut)
{
    static char longer[2000];
    struct err e = {0};

    memset(longer, 'x', sizeof(longer) - 1);
    longer[sizeof(longer) - 1] = 0;
    err_set(&e, -EIO, "%s", longer);
    CHECK_EQ(strlen(e.text), sizeof(e.text) - 1);
    err_errno(&e, -EIO, "%s", longer);
    CHECK_EQ(strlen(e.text), sizeof(e.text) - 1);
    err_prefix(&e, -EIO, "start");
    CHECK_EQ(strlen(e.text), sizeof(e.text) - 1);
    CHECK(strncmp(e.text, "start: xxx", 10) == 0);
}

TEST(err_takes_null)
{
    CHECK_EQ(err_set(NULL, -EIO, "x"), -EIO);
    CHECK_EQ(err_errno(NULL, -EIO, "x"), -EIO);
    CHECK_EQ(err_prefix(NULL, -EIO, "x"), -EIO);
}
