/* Argument tables. See schema.h. */
#include "qmp/schema.h"

#include <ctype.h>
#include <string.h>

static const struct {
    char type;
    const char *name;
} type_names[] = {
    {'s', "string"}, {'i', "integer"}, {'b', "boolean"},
    {'o', "object"}, {'a', "array"},   {'n', "string or null"},
};

static bool has_type(const json_t *value, char type)
{
    switch (type) {
    case 's':
        return json_is_string(value);
    case 'i':
        return json_is_integer(value);
    case 'b':
        return json_is_boolean(value);
    case 'o':
        return json_is_object(value);
    case 'a':
        return json_is_array(value);
    case 'n':
        return json_is_string(value) || json_is_null(value);
    default:
        return false;
    }
}

static int bad_type(const struct qmp_arg *arg, struct err *err)
{
    char type = (char)tolower(arg->type);

    for (size_t i = 0; i < ARRAY_SIZE(type_names); i++)
        if (type_names[i].type == type)
            return err_set(err, -EINVAL, "Invalid parameter type for '%s', expected: %s", arg->name,
                           type_names[i].name);
    return err_set(err, -EINVAL, "Invalid parameter type for '%s'", arg->name);
}

static const struct qmp_arg *find_arg(const struct qmp_arg *schema, const char *name,
                                      bool *ret_open)
{
    for (; schema && schema->name; schema++) {
        if (tolower(schema->type) == 'd')
            *ret_open = true;
        else if (strcmp(schema->name, name) == 0)
            return schema;
    }
    return NULL;
}

int qmp_check_args(const struct qmp_arg *schema, const json_t *args, struct err *err)
{
    for (const struct qmp_arg *arg = schema; arg && arg->name; arg++) {
        const json_t *value = json_object_get(args, arg->name);
        char type = (char)tolower(arg->type);

        if (type == 'd')
            continue;
        if (!value && islower(arg->type))
            return err_set(err, -EINVAL, "Parameter '%s' is missing", arg->name);
        if (value && !has_type(value, type))
            return bad_type(arg, err);
    }
    const char *key;
    const json_t *value;
    json_object_foreach((json_t *)(uintptr_t)args, key, value)
    {
        bool open = false;

        if (!find_arg(schema, key, &open) && !open)
            return err_set(err, -EINVAL, "Parameter '%s' is unexpected", key);
    }
    return 0;
}
