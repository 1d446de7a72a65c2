/* Which host this is. */
#include <ctype.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/own.h"
#include "vol/lock_host.h"

#define LVM_LOCAL "/etc/lvm/lvmlocal.conf"

static int parse_id(const char *text, const char *where, uint64_t *ret, struct err *err)
{
    char *end;
    unsigned long id = strtoul(text, &end, 10);

    end += strspn(end, " \t\r\n");
    if (!isdigit((unsigned char)*text) || *end || id < 1 || id > HOST_ID_MAX)
        return err_set(err, -EINVAL, "%s: a host id is a number from 1 to %u", where, HOST_ID_MAX);
    *ret = id;
    return 0;
}

/* The line "host_id = 7"; section names are not looked at: there is one host_id in that file. */
static bool read_lvm(char *buf, size_t len)
{
    FILE *f = fopen(LVM_LOCAL, "re");
    bool found = false;

    while (f && !found && fgets(buf, (int)len, f)) {
        char *s = strstr(buf, "host_id"), *hash = strchr(buf, '#');

        if (!s || (hash && hash < s))
            continue;
        s += strlen("host_id");
        s += strspn(s, " \t");
        if (*s++ != '=')
            continue;
        s += strspn(s, " \t");
        memmove(buf, s, strlen(s) + 1);
        buf[strspn(buf, "0123456789")] = '\0';
        found = *buf;
    }
    if (f)
        fclose(f);
    return found;
}

int host_id(uint64_t *ret, struct err *err)
{
    const char *env = getenv("VARVE_HOST_ID");
    char buf[200];

    if (env && *env)
        return parse_id(env, "$VARVE_HOST_ID", ret, err);
    FILE *f = fopen(HOST_ID_FILE, "re");
    bool read = f && fgets(buf, sizeof(buf), f);
    if (f)
        fclose(f);
    if (read)
        return parse_id(buf, HOST_ID_FILE, ret, err);
    if (read_lvm(buf, sizeof(buf)))
        return parse_id(buf, LVM_LOCAL, ret, err);
    return err_set(err, -EINVAL,
                   "this host has no number for its leases: write one, from 1 to %u, that no other "
                   "host of the storage has, into %s",
                   HOST_ID_MAX, HOST_ID_FILE);
}
