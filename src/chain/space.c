/* The words for what becomes of space that a guest does not need any more. */
#include <string.h>
#include "chain/chain.h"

static const char *const detect_names[] = {
    [DETECT_ZEROES_OFF] = "off",
    [DETECT_ZEROES_ON] = "on",
    [DETECT_ZEROES_UNMAP] = "unmap",
};

int space_parse_discard(const char *word, struct space_opts *ret)
{
    if (!strcmp(word, "ignore") || !strcmp(word, "off"))
        ret->ignore_discard = true;
    else if (!strcmp(word, "unmap") || !strcmp(word, "on"))
        ret->ignore_discard = false;
    else
        return -EINVAL;
    return 0;
}

int space_parse_detect_zeroes(const char *word, struct space_opts *ret)
{
    for (size_t i = 0; i < ARRAY_SIZE(detect_names); i++) {
        if (strcmp(word, detect_names[i]) != 0)
            continue;
        ret->detect_zeroes = (enum detect_zeroes)i;
        return 0;
    }
    return -EINVAL;
}

const char *space_detect_zeroes_name(const struct space_opts *space)
{
    return detect_names[space->detect_zeroes];
}

int space_check(const struct space_opts *space, struct err *err)
{
    if (space->ignore_discard && space->detect_zeroes == DETECT_ZEROES_UNMAP)
        return err_set(err, -EINVAL,
                       "detect-zeroes=unmap gives space back, and discard=ignore does not: use "
                       "discard=unmap, or detect-zeroes=on");
    return 0;
}
