/*
 * A text as tags of a volume group, and back.
 *
 *   varve-intent=<id>/<i>/<n>/<base64>     part i of n, counted from 1
 *
 * A tag holds at most 1024 bytes of letters, digits and "_+.-/=!:&#", so the text is cut, and each
 * part written as base64. Only a text of which every part is there, once, is read at all.
 */
#include <assert.h>
#include <ctype.h>
#include <stdio.h>
#include <string.h>
#include "vol/intent_tags.h"

#define ID_MAX     (sizeof(((struct intent *)0)->id) - 1)
#define BASE64_LEN ((size_t)INTENT_TAG_BYTES / 3 * 4)
static_assert(sizeof(INTENT_TAG) - 1 + ID_MAX + sizeof("/512/512/") - 1 + BASE64_LEN <= LVM_TAG_MAX,
              "the longest tag is one that LVM takes");
static_assert(INTENT_TAG_BYTES % 3 == 0, "no part but the last ends with =");

static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

void intent_tags_fini(struct intent_tags *tags)
{
    vec_for_each(tag, &tags->list)
        free(*tag);
    vec_free(&tags->list);
}

static int push(struct intent_tags *tags, char *owned)
{
    if (owned && vec_push(&tags->list, owned) == 0)
        return 0;
    free(owned);
    return -ENOMEM;
}

static bool id_ok(const char *id, size_t len)
{
    for (size_t i = 0; i < len; i++)
        if (!isascii(id[i]) || !isalnum(id[i]))
            return false;
    return len > 0 && len <= ID_MAX;
}

/* ---- base64 ---- */

static void put_base64(const unsigned char *from, size_t len, char *to)
{
    for (; len; from += 3, to += 4) {
        size_t n = MIN(len, (size_t)3);
        unsigned bits = (unsigned)from[0] << 16 | (n > 1 ? (unsigned)from[1] << 8 : 0) |
                        (n > 2 ? (unsigned)from[2] : 0);

        to[0] = digits[bits >> 18];
        to[1] = digits[bits >> 12 & 63];
        to[2] = n > 1 ? digits[bits >> 6 & 63] : '=';
        to[3] = n > 2 ? digits[bits & 63] : '=';
        len -= n;
    }
    *to = '\0';
}

/* Returns the bytes written, at most 3/4 of the text; -EUCLEAN. */
static ssize_t get_base64(const char *from, unsigned char *to)
{
    size_t len = strlen(from), out = 0;
    size_t pad = len && from[len - 1] == '=' ? 1 + (len > 1 && from[len - 2] == '=') : 0;

    if (len == 0 || len % 4)
        return -EUCLEAN;
    for (size_t i = 0; i < len; i += 4) {
        unsigned bits = 0;

        for (size_t j = i; j < i + 4; j++) {
            const char *d = j >= len - pad ? digits : memchr(digits, from[j], sizeof(digits) - 1);

            if (!d)
                return -EUCLEAN;
            bits = bits << 6 | (unsigned)(d - digits);
        }
        for (unsigned shift = 24; shift; shift -= 8)
            to[out++] = (unsigned char)(bits >> (shift - 8));
    }
    return (ssize_t)(out - pad);
}

/* ---- writing ---- */

static char *make_tag(const char *id, size_t i, size_t n, const char *part, size_t len)
{
    char base64[BASE64_LEN + 1], *ret = NULL;

    put_base64((const unsigned char *)part, len, base64);
    return asprintf(&ret, INTENT_TAG "%s/%zu/%zu/%s", id, i, n, base64) < 0 ? NULL : ret;
}

int intent_tags_encode(const char *id, const char *text, struct intent_tags *ret)
{
    size_t len = strlen(text), n = (len + INTENT_TAG_BYTES - 1) / INTENT_TAG_BYTES;
    int rc = 0;

    if (!id_ok(id, strlen(id)) || n == 0)
        return -EINVAL;
    if (n > INTENT_TAGS_MAX)
        return -E2BIG;
    for (size_t i = 0; i < n && rc == 0; i++) {
        size_t pos = i * INTENT_TAG_BYTES;

        rc = push(ret, make_tag(id, i + 1, n, text + pos, MIN(len - pos, INTENT_TAG_BYTES)));
    }
    return rc;
}

/* ---- reading ---- */

/* The id that a tag begins with; 0: it is no tag of ours. */
static size_t id_len(const char *tag)
{
    const char *id = tag + sizeof(INTENT_TAG) - 1;

    if (strncmp(tag, INTENT_TAG, sizeof(INTENT_TAG) - 1) != 0 || !strchr(id, '/'))
        return 0;
    return strcspn(id, "/");
}

int intent_tags_of(const struct lvm_vg *vg, const char *id, struct intent_tags *ret)
{
    int rc = 0;

    vec_for_each(tag, &vg->tags)
        if (rc == 0 && id_len(*tag) == strlen(id) &&
            strncmp(*tag + sizeof(INTENT_TAG) - 1, id, strlen(id)) == 0)
            rc = push(ret, strdup(*tag));
    return rc;
}

static bool has(const struct intent_tags *tags, const char *text, size_t len)
{
    vec_for_each(it, &tags->list)
        if (strlen(*it) == len && memcmp(*it, text, len) == 0)
            return true;
    return false;
}

int intent_tags_ids(const struct lvm_vg *vg, struct intent_tags *ret, struct err *err)
{
    vec_for_each(tag, &vg->tags) {
        const char *id = *tag + sizeof(INTENT_TAG) - 1;
        size_t len = id_len(*tag);

        if (strncmp(*tag, INTENT_TAG, sizeof(INTENT_TAG) - 1) != 0 || has(ret, id, len))
            continue;
        if (!id_ok(id, len))
            return err_set(err, -EUCLEAN, "volume group '%s': '%.100s' is no tag of an operation",
                           vg->name, *tag);
        if (push(ret, strndup(id, len)) < 0)
            return err_set(err, -ENOMEM, "out of memory");
    }
    return 0;
}

/* A number as we write it: no sign, no zero before it. */
static bool get_number(const char **pos, unsigned *ret)
{
    unsigned n = 0;

    if (**pos < '1' || **pos > '9')
        return false;
    while (isdigit((unsigned char)**pos) && n <= INTENT_TAGS_MAX)
        n = n * 10 + (unsigned)(*(*pos)++ - '0');
    *ret = n;
    return n <= INTENT_TAGS_MAX && *(*pos)++ == '/';
}

/* Puts the base64 of each part into its place of parts[]. */
static int sort_parts(const struct intent_tags *tags, const char **parts, unsigned *ret_n,
                      struct err *err)
{
    vec_for_each(tag, &tags->list) {
        const char *pos = *tag + sizeof(INTENT_TAG) - 1 + id_len(*tag) + 1;
        unsigned i, n;

        if (!get_number(&pos, &i) || !get_number(&pos, &n) || i > n)
            return err_set(err, -EUCLEAN, "'%.60s' is no part of it", *tag);
        if ((*ret_n && *ret_n != n) || parts[i])
            return err_set(err, -EUCLEAN, "part %u of %u is there twice", i, n);
        *ret_n = n;
        parts[i] = pos;
    }
    for (unsigned i = 1; i <= *ret_n; i++)
        if (!parts[i])
            return err_set(err, -EUCLEAN, "part %u of %u is missing", i, *ret_n);
    return 0;
}

int intent_tags_decode(const struct intent_tags *tags, char **ret, struct err *err)
{
    _cleanup_(freep) const char **parts = calloc(INTENT_TAGS_MAX + 1, sizeof(*parts));
    _cleanup_(freep) char *text = malloc(tags->list.len * LVM_TAG_MAX + 1);
    size_t len = 0;
    unsigned n = 0;

    if (!parts || !text)
        return err_set(err, -ENOMEM, "out of memory");
    int rc = sort_parts(tags, parts, &n, err);
    if (rc < 0)
        return rc;
    for (unsigned i = 1; i <= n; i++) {
        ssize_t got = strlen(parts[i]) > BASE64_LEN
                          ? -EUCLEAN
                          : get_base64(parts[i], (unsigned char *)text + len);

        if (got < 0 || (i < n && got != INTENT_TAG_BYTES))
            return err_set(err, -EUCLEAN, "part %u of %u cannot be read", i, n);
        len += (size_t)got;
    }
    text[len] = '\0';
    *ret = TAKE_PTR(text);
    return 0;
}
