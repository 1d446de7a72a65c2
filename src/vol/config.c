/*
 * storage.cfg: sections "type: id" of indented "key value" lines, an empty line between them.
 *
 * 1. A broken section is disabled and named with file and line; the others are not touched.
 * 2. Unknown types and keys are kept with a warning: other programs own them.
 * 3. The file is never written. It is read up to CONFIG_BYTES_MAX, a line up to LINE_BYTES_MAX.
 */
#include <ctype.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include "base/bits.h"
#include "base/vec.h"
#include "vol/config_keys.h"
#include "vol/lock_sanlock.h"
#include "vol/internal.h"

#define CONFIG_BYTES_MAX (16u << 20)
#define LINE_BYTES_MAX   (64u << 10)

struct parser {
    const char *file;
    struct config *cfg;
    struct pool *section; /* being filled; NULL between sections */
    bool skipping; /* the lines up to the next empty one belong to a section without a name */
    unsigned line;
    uint64_t seen; /* bits of the known keys of this section */
};

static int add_text(char ***texts, unsigned *nr, char *text)
{
    char **grown = reallocarray(*texts, *nr + 1, sizeof(**texts));

    if (!grown || !text) {
        free(text);
        *texts = grown ? grown : *texts;
        return -ENOMEM;
    }
    grown[(*nr)++] = text;
    *texts = grown;
    return 0;
}

/* "file:line: text" */
static char *located(const struct parser *p, const char *fmt, va_list ap)
{
    char *text = NULL, *ret = NULL;

    if (vasprintf(&text, fmt, ap) < 0)
        return NULL;
    if (asprintf(&ret, "%s:%u: %s", p->file, p->line, text) < 0)
        ret = NULL;
    free(text);
    return ret;
}

static int PRINTF_LIKE(2, 3) add_warning(struct parser *p, const char *fmt, ...)
{
    va_list ap;

    va_start(ap, fmt);
    char *text = located(p, fmt, ap);
    va_end(ap);
    return add_text(&p->cfg->warnings, &p->cfg->nb_warnings, text);
}

/* Disables the section being read; only its first error is kept as the section's reason. */
static int PRINTF_LIKE(2, 3) add_error(struct parser *p, const char *fmt, ...)
{
    va_list ap;

    va_start(ap, fmt);
    char *text = located(p, fmt, ap);
    va_end(ap);
    if (!text)
        return -ENOMEM;
    if (p->section) {
        p->section->disabled = true;
        if (!p->section->error) {
            p->section->error = strdup(text);
            if (!p->section->error) {
                free(text);
                return -ENOMEM;
            }
        }
    }
    return add_text(&p->cfg->errors, &p->cfg->nb_errors, text);
}

/* ---- values ---- */

static int parse_bool(const char *value, bool *ret)
{
    static const char *const yes[] = {"", "1", "on", "yes", "true"};
    static const char *const no[] = {"0", "off", "no", "false"};

    for (unsigned i = 0; i < ARRAY_SIZE(yes); i++)
        if (strcasecmp(value, yes[i]) == 0)
            return *ret = true, 0;
    for (unsigned i = 0; i < ARRAY_SIZE(no); i++)
        if (strcasecmp(value, no[i]) == 0)
            return *ret = false, 0;
    return -EINVAL;
}

static int parse_bytes(const char *value, uint64_t *ret)
{
    static const char units[] = "kmgt";
    char *end;

    errno = 0;
    uint64_t v = strtoull(value, &end, 10);
    if (!isdigit((unsigned char)value[0]) || errno)
        return -EINVAL;
    const char *unit = *end ? strchr(units, tolower((unsigned char)*end)) : NULL;
    if (unit) {
        unsigned shift = 10 * (unsigned)(unit - units + 1);

        if (v > (UINT64_MAX >> shift))
            return -EINVAL;
        v <<= shift;
        end++;
    }
    if (*end)
        return -EINVAL;
    *ret = v;
    return 0;
}

static bool one_of(const char *value, const char *const *list)
{
    for (; *list; list++)
        if (strcmp(value, *list) == 0)
            return true;
    return false;
}

static int set_string(char **ret, const char *value)
{
    free(*ret);
    *ret = strdup(value);
    return *ret ? 0 : -ENOMEM;
}

static int set_cluster(struct parser *p, const char *key, const char *value, uint64_t *ret)
{
    uint64_t v;

    if (parse_bytes(value, &v) < 0 || !is_pow2(v) || v < 512 || v > 2 * MIB)
        return add_error(p, "%s '%s' is not a power of two from 512 to 2M", key, value);
    *ret = v;
    return 0;
}

static bool is_vg_name(const char *s)
{
    if (!*s || *s == '-' || strcmp(s, ".") == 0 || strcmp(s, "..") == 0 || strlen(s) > 127)
        return false;
    for (; *s; s++)
        if (!isalnum((unsigned char)*s) && !strchr("+_.-", *s))
            return false;
    return true;
}

static int set_path(struct parser *p, const char *value, char **ret)
{
    if (value[0] != '/')
        return add_error(p, "path '%s' is not absolute", value);
    for (const char *c = value; *c; c++)
        if (iscntrl((unsigned char)*c))
            return add_error(p, "path holds a control character");
    return set_string(ret, value);
}

static int set_content(struct parser *p, const char *value)
{
    static const char *const known[] = {"images",   "rootdir", "vztmpl", "iso", "backup",
                                        "snippets", "import",  "none",   NULL};
    _cleanup_(freep) char *copy = strdup(value);
    char *save = NULL;

    if (!copy || set_string(&p->section->content, value) < 0)
        return -ENOMEM;
    p->section->images = p->section->rootdir = false;
    for (char *w = strtok_r(copy, ", \t;", &save); w; w = strtok_r(NULL, ", \t;", &save)) {
        if (!one_of(w, known))
            return add_error(p, "content '%s' is not known", w);
        p->section->images |= strcmp(w, "images") == 0;
        p->section->rootdir |= strcmp(w, "rootdir") == 0;
    }
    return 0;
}

static int set_bool(struct parser *p, const char *key, const char *value, bool *ret)
{
    if (parse_bool(value, ret) < 0)
        return add_error(p, "%s '%s' is neither 0 nor 1", key, value);
    return 0;
}

static int set_choice(struct parser *p, const char *key, const char *value,
                      const char *const *choices, char **ret)
{
    if (!one_of(value, choices))
        return add_error(p, "%s '%s' is not known", key, value);
    return set_string(ret, value);
}

/* KiB a second, alone or as "default=N" in a list of operations. */
static int set_bwlimit(struct parser *p, const char *value)
{
    const char *v = strstr(value, "default=");
    uint64_t kib;
    char *end;

    v = v ? v + strlen("default=") : value;
    if (!isdigit((unsigned char)*v))
        return strchr(value, '=') ? 0 : add_error(p, "bwlimit '%s' is not a number", value);
    kib = strtoull(v, &end, 10);
    if ((*end && *end != ',' && *end != '.') || kib > UINT64_MAX / KIB)
        return add_error(p, "bwlimit '%s' is not a number", value);
    p->section->bwlimit = kib * KIB;
    return 0;
}

/* "yes" or a path; "no" asks for nothing. The path is known once the section has ended. */
static int set_mountpoint(struct parser *p, const char *value)
{
    bool on;

    if (value[0] == '/')
        return set_path(p, value, &p->section->mountpoint);
    if (parse_bool(value, &on) < 0)
        return add_error(p, "is_mountpoint '%s' is neither yes, no nor a path", value);
    return on ? set_string(&p->section->mountpoint, "") : 0;
}

static int set_thin_chunk(struct parser *p, const char *value)
{
    struct pool *s = p->section;

    if (parse_bytes(value, &s->thin_chunk) < 0)
        return add_error(p, "thin-chunk '%s' is not a size", value);
    if (s->thin_chunk && s->thin_chunk < 4 * MIB)
        return add_error(p, "thin-chunk '%s' is less than 4 MiB; 0 gives LVs their full size",
                         value);
    s->thin_given = true;
    return 0;
}

/* As the program that Proxmox gives it to reads it: bytes a second, a sign says how exactly. */
static int set_saferemove_rate(struct parser *p, const char *name, const char *value)
{
    const char *number = value + (*value == '-');

    if (parse_bytes(number, &p->section->saferemove_rate) < 0)
        return add_error(p, "%s '%s' is not a number of bytes a second", name, value);
    return 0;
}

/* MiB */
static int set_saferemove_step(struct parser *p, const char *name, const char *value)
{
    static const char *const steps[] = {"1", "2", "4", "8", "16", "32", NULL};

    if (!one_of(value, steps))
        return add_error(p, "%s '%s' is none of 1, 2, 4, 8, 16, 32 (MiB)", name, value);
    p->section->saferemove_step = strtoull(value, NULL, 10) * MIB;
    return 0;
}

static int set_lock(struct parser *p, const char *name, const char *value)
{
    static const char *const locks[] = {"none", "flock", "sanlock", NULL};

    if (strcmp(value, "command") == 0)
        return add_error(p, "lock 'command' is not supported: locks by a program of one's own "
                            "could not stop a host that has lost them; use flock or sanlock");
    return set_choice(p, name, value, locks, &p->section->lock);
}

static int set_count(struct parser *p, const char *name, const char *value, uint64_t min,
                     uint64_t max, uint64_t *ret)
{
    char *end;
    unsigned long long n = strtoull(value, &end, 10);

    if (!isdigit((unsigned char)*value) || *end || n < min || n > max)
        return add_error(p, "%s '%s' is not a number from %llu to %llu", name, value,
                         (unsigned long long)min, (unsigned long long)max);
    *ret = n;
    return 0;
}

static int set_key(struct parser *p, enum config_key key, const char *name, const char *value)
{
    static const char *const prealloc[] = {"off", "metadata", "falloc", "full", NULL};
    struct pool *s = p->section;
    bool on;
    int rc;

    switch (key) {
    case KEY_PATH:
        return set_path(p, value, &s->path);
    case KEY_VGNAME:
        if (!is_vg_name(value))
            return add_error(p, "vgname '%s' is not a name of a volume group", value);
        return set_string(&s->vgname, value);
    case KEY_CONTENT:
        return set_content(p, value);
    case KEY_DISABLE:
        rc = set_bool(p, name, value, &on);
        s->disabled |= on && rc == 0;
        return rc;
    case KEY_SNAPEXT:
        return set_bool(p, name, value, &s->snapext);
    case KEY_MOUNTPOINT:
        return set_mountpoint(p, value);
    case KEY_CLUSTER_SIZE:
        return set_cluster(p, name, value, &s->cluster_size);
    case KEY_SNAPSHOT_CLUSTER_SIZE:
        return set_cluster(p, name, value, &s->snapshot_cluster_size);
    case KEY_EXTENDED_L2:
        rc = set_bool(p, name, value, &on);
        s->extended_l2 = on;
        return rc;
    case KEY_CACHE_SIZE:
        return parse_bytes(value, &s->cache_size) < 0
                   ? add_error(p, "%s '%s' is not a size", name, value)
                   : 0;
    case KEY_PREALLOCATION:
        return set_choice(p, name, value, prealloc, &s->preallocation);
    case KEY_LOCK:
        return set_lock(p, name, value);
    case KEY_LOCK_LEASES:
        return set_count(p, name, value, LEASES_MIN, LEASES_MAX, &s->lock_leases);
    case KEY_LEASE_TIMEOUT:
        return set_count(p, name, value, 1, LEASE_TIMEOUT_MAX, &s->lease_timeout);
    case KEY_THIN_CHUNK:
        return set_thin_chunk(p, value);
    case KEY_BWLIMIT:
        return set_bwlimit(p, value);
    case KEY_SAFEREMOVE:
        return set_bool(p, name, value, &s->saferemove);
    case KEY_SAFEREMOVE_RATE:
        return set_saferemove_rate(p, name, value);
    case KEY_SAFEREMOVE_STEP:
        return set_saferemove_step(p, name, value);
    case KEY_OTHER:
    case KEY_UNKNOWN:
        break;
    }
    return 0;
}

/* ---- lines ---- */

static int section_end(struct parser *p)
{
    struct pool *s = p->section;
    bool dir_type = s && s->type <= POOL_CEPHFS;

    if (!s)
        return 0;
    unsigned line = p->line;
    int rc = 0;

    p->line = s->line; /* what is missing is reported at the section's header */
    if (dir_type && s->type != POOL_DIR && !s->path)
        rc = asprintf(&s->path, "/mnt/pve/%s", s->id) < 0 ? -ENOMEM : 0;
    if (rc == 0 && dir_type && !s->path && !s->error)
        rc = add_error(p, "%s '%s' has no path", s->type_name, s->id);
    if (rc == 0 && s->type == POOL_LVM && !s->vgname && !s->error)
        rc = add_error(p, "%s '%s' has no vgname", s->type_name, s->id);
    if (rc == 0 && dir_type && s->path && s->type != POOL_DIR && !s->mountpoint)
        rc = set_string(&s->mountpoint, "");
    if (rc == 0 && s->mountpoint && !*s->mountpoint)
        rc = s->path ? set_string(&s->mountpoint, s->path) : 0;
    p->section = NULL;
    p->line = line;
    return rc;
}

static enum pool_type find_type(const char *name)
{
    static const struct {
        const char *name;
        enum pool_type type;
    } types[] = {{"dir", POOL_DIR},       {"nfs", POOL_NFS}, {"cifs", POOL_CIFS},
                 {"cephfs", POOL_CEPHFS}, {"lvm", POOL_LVM}, {"lvmqcow2", POOL_LVM}};

    for (unsigned i = 0; i < ARRAY_SIZE(types); i++)
        if (strcasecmp(name, types[i].name) == 0)
            return types[i].type;
    return POOL_OTHER;
}

static int section_begin(struct parser *p, char *type, char *id)
{
    struct config *cfg = p->cfg;
    bool twice = false;

    for (unsigned i = 0; i < cfg->nb_pools; i++)
        twice |= strcmp(cfg->pools[i].id, id) == 0;
    struct pool *grown = reallocarray(cfg->pools, cfg->nb_pools + 1, sizeof(*grown));
    if (!grown)
        return -ENOMEM;
    cfg->pools = grown;
    struct pool *s = p->section = &grown[cfg->nb_pools++];
    *s = (struct pool){.line = p->line,
                       .type = find_type(type),
                       .extended_l2 = -1,
                       .images = true,
                       .rootdir = true};
    p->seen = 0;
    s->id = strdup(id);
    s->type_name = strdup(type);
    if (!s->id || !s->type_name)
        return -ENOMEM;
    if (!pool_id_ok(id))
        return add_error(p, "'%s' is not a valid storage id", id);
    if (twice)
        return add_error(p, "storage id '%s' is defined twice", id);
    if (s->type == POOL_OTHER)
        return add_warning(p, "warning: type '%s' of '%s' is not supported", type, id);
    return 0;
}

/* "type: id" */
static int header_line(struct parser *p, char *text)
{
    char *colon = strchr(text, ':');

    if (p->section)
        return add_error(p, "line is neither indented nor after an empty line");
    if (p->skipping)
        return 0;
    p->skipping = true; /* unless the header turns out to be one */
    if (!colon || colon == text)
        return add_error(p, "line %u is not a section header 'type: id'", p->line);
    *colon = '\0';
    char *id = colon + 1 + strspn(colon + 1, " \t");
    if (!*id || strpbrk(id, " \t") || strpbrk(text, " \t"))
        return add_error(p, "line %u is not a section header 'type: id'", p->line);
    p->skipping = false;
    return section_begin(p, text, id);
}

static int key_line(struct parser *p, char *text)
{
    char *key = text + strspn(text, " \t");
    char *end = key + strcspn(key, " \t");
    char *value = end + strspn(end, " \t");

    if (!p->section) {
        if (p->skipping)
            return 0;
        p->skipping = true;
        return add_error(p, "'%.64s' on line %u stands outside of a section", key, p->line);
    }
    *end = '\0';
    if (p->section->type == POOL_OTHER)
        return 0;
    enum config_key k = config_key_find(key);
    if (k == KEY_UNKNOWN)
        return add_warning(p, "warning: unknown key '%.64s' in '%s'", key, p->section->id);
    if (k == KEY_OTHER)
        return 0;
    if (p->seen & (1ull << k) && k != KEY_SNAPEXT) /* that one has two names */
        return add_error(p, "'%s' is given twice in '%s'", key, p->section->id);
    p->seen |= 1ull << k;
    return set_key(p, k, key, value);
}

static int one_line(struct parser *p, char *text, size_t len)
{
    p->line++;
    while (len && isspace((unsigned char)text[len - 1]))
        len--;
    text[len] = '\0';
    if (strlen(text) != len)
        return add_error(p, "line %u holds a NUL byte", p->line);
    const char *first = text + strspn(text, " \t");
    if (*first == '#')
        return 0;
    if (!*first) {
        p->skipping = false;
        return section_end(p);
    }
    if (len > LINE_BYTES_MAX)
        return add_error(p, "line %u is longer than %u bytes", p->line, LINE_BYTES_MAX);
    return first == text ? header_line(p, text) : key_line(p, text);
}

static int parse(struct parser *p, char *text, size_t len)
{
    int rc = 0;

    for (size_t pos = 0; pos < len && rc == 0;) {
        char *nl = memchr(text + pos, '\n', len - pos);
        size_t n = nl ? (size_t)(nl - (text + pos)) : len - pos;

        rc = one_line(p, text + pos, n);
        pos += n + 1;
    }
    return rc == 0 ? section_end(p) : rc;
}

/* ---- files ---- */

static int read_all(int fd, char **ret, size_t *ret_len)
{
    size_t len = 0, cap = 64u << 10;
    _cleanup_(freep) char *text = malloc(cap + 1);

    for (;;) {
        ssize_t n = text ? read(fd, text + len, cap - len) : -1;

        if (!text)
            return -ENOMEM;
        if (n < 0)
            return -errno;
        if (n == 0)
            break;
        len += (size_t)n;
        if (len > CONFIG_BYTES_MAX)
            return -EFBIG;
        if (len == cap) {
            char *grown = realloc(text, (cap *= 2) + 1);

            if (!grown)
                return -ENOMEM;
            text = grown;
        }
    }
    *ret_len = len;
    *ret = TAKE_PTR(text);
    return 0;
}

static int find_file(const char *path, const char **ret, struct err *err)
{
    static const char *const places[] = {"/etc/varve/storage.cfg", "/etc/pve/storage.cfg"};
    const char *env = getenv("VARVE_CONFIG");

    if (!path && env && *env)
        path = env;
    if (path) {
        *ret = path;
        return 0;
    }
    for (unsigned i = 0; i < ARRAY_SIZE(places); i++)
        if (access(places[i], F_OK) == 0) {
            *ret = places[i];
            return 0;
        }
    return err_set(err, -ENOENT,
                   "no storage configuration: neither --config nor $VARVE_CONFIG is given, "
                   "and neither %s nor %s is there",
                   places[0], places[1]);
}

int config_load(const char *path, struct config **ret, struct err *err)
{
    const char *file = NULL;
    _cleanup_(freep) char *text = NULL;
    size_t len = 0;
    int rc = find_file(path, &file, err);

    if (rc < 0)
        return rc;
    _cleanup_(closep) int fd = open(file, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return err_errno(err, -errno, "open '%s'", file);
    rc = read_all(fd, &text, &len);
    if (rc < 0)
        return err_errno(err, rc, "read '%s'", file);
    struct config *cfg = calloc(1, sizeof(*cfg));
    if (!cfg)
        return err_set(err, -ENOMEM, "out of memory");
    cfg->file = strdup(file);
    struct parser p = {.file = file, .cfg = cfg};
    rc = cfg->file ? parse(&p, text, len) : -ENOMEM;
    if (rc < 0) {
        config_free(cfg);
        return err_errno(err, rc, "read '%s'", file);
    }
    *ret = cfg;
    return 0;
}

static void free_texts(char **texts, unsigned nr)
{
    for (unsigned i = 0; i < nr; i++)
        free(texts[i]);
    free(texts);
}

static void pool_fini(struct pool *s)
{
    free(s->id);
    free(s->type_name);
    free(s->path);
    free(s->vgname);
    free(s->error);
    free(s->content);
    free(s->mountpoint);
    free(s->preallocation);
    free(s->lock);
}

void config_free(struct config *cfg)
{
    if (!cfg)
        return;
    for (unsigned i = 0; i < cfg->nb_pools; i++)
        pool_fini(&cfg->pools[i]);
    free(cfg->pools);
    free_texts(cfg->warnings, cfg->nb_warnings);
    free_texts(cfg->errors, cfg->nb_errors);
    free(cfg->file);
    free(cfg);
}

int config_pool(const struct config *cfg, const char *id, const struct pool **ret, struct err *err)
{
    const struct pool *found = NULL;

    for (unsigned i = 0; i < cfg->nb_pools && !found; i++)
        if (strcmp(cfg->pools[i].id, id) == 0)
            found = &cfg->pools[i];
    if (!found)
        return err_set(err, -ENOENT, "storage '%s' is not defined in %s", id, cfg->file);
    if (found->error)
        return err_set(err, -EINVAL, "storage '%s' is disabled by an error: %s", id, found->error);
    if (found->disabled)
        return err_set(err, -EINVAL, "storage '%s' is disabled in %s:%u", id, cfg->file,
                       found->line);
    if (found->type == POOL_OTHER)
        return err_set(err, -ENOTSUP, "storage '%s' has the type '%s', which is not supported", id,
                       found->type_name);
    *ret = found;
    return 0;
}
