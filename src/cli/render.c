/* Rendering: see render.h. */
#include <ctype.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include "base/bits.h"
#include "cli/render.h"

static const char unit_letters[] = "BKMGTPE";

const char *render_size(uint64_t bytes, char *buf, size_t len)
{
    unsigned unit = 0;

    /* the next unit from 1000 of the smaller one on, so that three digits are enough */
    while (unit < 6 && (double)bytes / (double)(1ull << (10 * unit)) >= 999.5)
        unit++;
    double v = (double)bytes / (double)(1ull << (10 * unit));
    if (unit == 0)
        snprintf(buf, len, "%.3g B", v);
    else
        snprintf(buf, len, "%.3g %ciB", v, unit_letters[unit]);
    return buf;
}

int parse_size(const char *text, uint64_t *ret, struct err *err)
{
    char *end;
    long double v = strtold(text, &end);

    if (end == text || !(isdigit((unsigned char)text[0]) || text[0] == '.'))
        return err_set(err, -EINVAL, "'%s' is no size (such as 512, 64k, 10G)", text);
    if (text[0] == '0' && (text[1] == 'x' || text[1] == 'X')) {
        unsigned long long hex = strtoull(text, &end, 16);
        v = (long double)hex;
    }
    const char *at = *end ? strchr(unit_letters, toupper((unsigned char)*end)) : unit_letters;
    if (!at || (*end && end[1] && strcmp(end + 1, "iB") != 0))
        return err_set(err, -EINVAL, "'%s' is no size: unit '%s' is unknown", text, end);
    v *= (long double)(1ull << (10 * (at - unit_letters)));
    if (v >= 0x1p63L)
        return err_set(err, -ERANGE, "size '%s' is too large", text);
    if (v != floorl(v))
        return err_set(err, -EINVAL, "size '%s' is no whole number of bytes", text);
    *ret = (uint64_t)v;
    return 0;
}

int parse_cluster_size(const char *text, uint64_t *ret, struct err *err)
{
    int rc = parse_size(text, ret, err);

    return rc == 0 && !*ret ? err_set(err, -EINVAL, "a cluster has at least 512 bytes") : rc;
}

int parse_bool(const char *text, bool *ret, struct err *err)
{
    static const char *const words[] = {"off", "on", "false", "true", "no", "yes", "0", "1"};

    for (unsigned i = 0; i < ARRAY_SIZE(words); i++) {
        if (!strcmp(text, words[i])) {
            *ret = i & 1;
            return 0;
        }
    }
    return err_set(err, -EINVAL, "'%s' is neither on nor off", text);
}

void render_json(json_t *value)
{
    json_dumpf(value, stdout, JSON_INDENT(4) | JSON_PRESERVE_ORDER | JSON_ENCODE_ANY);
    putchar('\n');
    json_decref(value);
}

int fail(const struct args *args, const struct err *err)
{
    fprintf(stderr, "varve %s: %s\n", args->command->name, err_text(err));
    return EXIT_FAILED;
}

void table_out_row(struct table_out *t, ...)
{
    va_list ap;

    t->cells = reallocarray(t->cells, (size_t)(t->nb + 1) * t->cols, sizeof(*t->cells));
    if (!t->cells)
        abort();
    va_start(ap, t);
    for (unsigned c = 0; c < t->cols; c++) {
        const char *cell = va_arg(ap, const char *);

        t->cells[t->nb * t->cols + c] = strdup(cell ? cell : "-");
    }
    va_end(ap);
    t->nb++;
}

void table_out_print(const struct table_out *t, const char *align)
{
    _cleanup_(freep) int *width = calloc(t->cols, sizeof(*width));

    if (!width)
        abort();
    for (unsigned i = 0; i < t->nb * t->cols; i++)
        width[i % t->cols] = MAX(width[i % t->cols], (int)strlen(t->cells[i]));
    for (unsigned r = 0; r < t->nb; r++) {
        for (unsigned c = 0; c < t->cols; c++) {
            const char *cell = t->cells[r * t->cols + c];

            if (align[c] == 'r')
                printf("%*s", width[c], cell);
            else if (c + 1 < t->cols)
                printf("%-*s", width[c], cell);
            else
                printf("%s", cell);
            printf("%s", c + 1 < t->cols ? "  " : "\n");
        }
    }
}

void table_out_fini(struct table_out *t)
{
    for (unsigned i = 0; i < t->nb * t->cols; i++)
        free(t->cells[i]);
    free(t->cells);
    *t = (struct table_out){0};
}

static uint64_t now_ns(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000ull + (uint64_t)ts.tv_nsec;
}

void progress_init(struct progress *p, const char *what, const struct args *args, bool force)
{
    *p = (struct progress){.what = what, .started_ns = now_ns()};
    p->on = !args_flag(args, "quiet") && (force || isatty(STDERR_FILENO));
}

void progress_update(void *progress, uint64_t done, uint64_t total)
{
    struct progress *p = progress;
    uint64_t now = now_ns();
    char size[32], rate[32];

    if (!p->on || (p->drawn && now - p->drawn_ns < 100000000ull && done < total))
        return;
    double secs = (double)(now - p->started_ns) / 1e9;
    double speed = secs > 0 ? (double)done / secs : 0;
    int filled = total ? (int)((long double)done * 30 / (long double)total) : 30;
    fprintf(
        stderr, "\r%s [%.*s%*s] %5.1f%% %s %s/s", p->what, filled, "##############################",
        30 - filled, "", total ? 100.0 * (double)done / (double)total : 100.0,
        render_size(done, size, sizeof(size)), render_size((uint64_t)speed, rate, sizeof(rate)));
    if (speed > 0 && done < total)
        fprintf(stderr, " %.0fs left", (double)(total - done) / speed);
    fprintf(stderr, "\033[K");
    p->drawn = true;
    p->drawn_ns = now;
}

void progress_end(struct progress *p)
{
    if (p->drawn)
        fputc('\n', stderr);
}
