/* Negotiation: every way into transmission, every option, and what broken clients send. */
#include <errno.h>
#include "nbd_client.h"
#include "rt/reactor.h"
#include "test.h"

#define LEN (1u << 20)

/* Enters with EXPORT_NAME; checks what comes back, zeroes included. */
SUSPENDS static void enter_old_way(struct client *c, bool no_zeroes)
{
    be64 len;
    be16 flags;
    uint8_t zeroes[124];

    CHECK_EQ(client_option_raw(c, NBD_MAGIC_OPTION, NBD_OPT_EXPORT_NAME, "disk", 4, 4), 0);
    CHECK_EQ(client_recv(c, &len, sizeof(len)), 0);
    CHECK_EQ(client_recv(c, &flags, sizeof(flags)), 0);
    c->len = be64_get(len);
    c->flags = be16_get(flags);
    if (no_zeroes)
        return;
    CHECK_EQ(client_recv(c, zeroes, sizeof(zeroes)), 0);
    for (unsigned i = 0; i < sizeof(zeroes); i++)
        CHECK_EQ(zeroes[i], 0);
}

SUSPENDS static void enter(struct rig *rig, unsigned flags, bool structured, bool go)
{
    struct client c;

    client_open(&c, rig->server);
    CHECK_EQ(client_hello(&c, flags), 0);
    if (structured) {
        CHECK_EQ(client_option(&c, NBD_OPT_STRUCTURED_REPLY, NULL, 0, NULL), NBD_REP_ACK);
        c.structured = true;
    }
    if (go)
        CHECK_EQ(client_go(&c, "disk"), 0);
    else
        enter_old_way(&c, flags & NBD_FLAG_NO_ZEROES);
    CHECK_EQ(c.len, LEN);
    CHECK(c.flags & NBD_FLAG_CAN_MULTI_CONN);
    CHECK_EQ(!!(c.flags & NBD_FLAG_SEND_DF), structured);
    CHECK_EQ(c.flags & NBD_FLAG_READ_ONLY, 0);
    CHECK(client_alive(&c));
    client_close(&c);
}

CO_TEST(every_way_into_transmission)
{
    struct rig rig;

    rig_start(&rig, LEN, NULL);
    enter(&rig, 0, false, false);
    enter(&rig, NBD_FLAG_NO_ZEROES, false, false);
    for (unsigned i = 0; i < 8; i++)
        enter(&rig, NBD_FLAG_FIXED_NEWSTYLE | (i & 1 ? NBD_FLAG_NO_ZEROES : 0), i & 2, i & 4);
    rig_await_conns(&rig, 0);
    rig_stop(&rig);
}

SUSPENDS static void say_hello(struct client *c, struct rig *rig)
{
    client_open(c, rig->server);
    CHECK_EQ(client_hello(c, NBD_FLAG_FIXED_NEWSTYLE | NBD_FLAG_NO_ZEROES), 0);
}

SUSPENDS static bool is_closed(struct client *c)
{
    char byte;
    int rc = client_recv(c, &byte, 1);

    return rc == -ECONNRESET || rc == -EPIPE;
}

CO_TEST(unknown_client_flags_and_old_clients_options_close)
{
    struct rig rig;
    struct client c;

    rig_start(&rig, LEN, NULL);
    client_open(&c, rig.server);
    CHECK_EQ(client_hello(&c, 0x8001), 0);
    CHECK(is_closed(&c));
    client_close(&c);
    client_open(&c, rig.server);
    CHECK_EQ(client_hello(&c, 0), 0);
    CHECK_EQ(client_option_raw(&c, NBD_MAGIC_OPTION, NBD_OPT_LIST, NULL, 0, 0), 0);
    CHECK(is_closed(&c));
    client_close(&c);
    rig_stop(&rig);
}

CO_TEST(list_names_every_export)
{
    struct nbd_export_opts more = {.name = "", .writable = true};
    struct option_replies r;
    struct rig rig;
    struct client c;

    rig_start(&rig, LEN, NULL);
    more.chain = rig.chain;
    CHECK_EQ(nbd_export_add(rig.server, &more, NULL, NULL), 0);
    CHECK_EQ(nbd_export_add(rig.server, &more, NULL, NULL), -EEXIST);
    say_hello(&c, &rig);
    CHECK_EQ(client_option(&c, NBD_OPT_LIST, NULL, 0, &r), NBD_REP_ACK);
    CHECK_EQ(r.nr, 3);
    CHECK_EQ(r.at[0].type, NBD_REP_SERVER);
    CHECK(r.at[0].len == 4 + 4 + 9 && memcmp(r.at[0].data, "\0\0\0\4disktest disk", 17) == 0);
    CHECK(r.at[1].len == 4 && memcmp(r.at[1].data, "\0\0\0", 4) == 0);
    client_close(&c);
    rig_stop(&rig);
}

CO_TEST(info_tells_all_and_stays_in_negotiation)
{
    static const uint16_t infos[] = {NBD_INFO_BLOCK_SIZE, NBD_INFO_NAME, NBD_INFO_DESCRIPTION, 77};
    static const uint8_t blocks[] = {0, 3, 0, 0, 0, 1, 0, 0, 16, 0, 2, 0, 0, 0};
    struct option_replies r;
    uint8_t data[64];
    struct rig rig;
    struct client c;

    rig_start(&rig, LEN, NULL);
    say_hello(&c, &rig);
    CHECK_EQ(client_option(&c, NBD_OPT_INFO, data, client_go_data(data, "disk", 4, infos), &r),
             NBD_REP_ACK);
    CHECK_EQ(r.nr, 5);
    CHECK(r.at[0].len == 6 && memcmp(r.at[0].data, "\0\1disk", 6) == 0);
    CHECK(r.at[1].len == 11 && memcmp(r.at[1].data, "\0\2test disk", 11) == 0);
    CHECK(r.at[2].len == sizeof(blocks) && memcmp(r.at[2].data, blocks, sizeof(blocks)) == 0);
    CHECK_EQ(r.at[3].len, 12);
    CHECK_EQ(nbd_export_writers(rig.exp), 0);
    CHECK_EQ(client_go(&c, "disk"), 0);
    CHECK(client_alive(&c));
    CHECK_EQ(nbd_export_writers(rig.exp), 1);
    client_close(&c);
    rig_stop(&rig);
}

CO_TEST(unsupported_options_are_answered_and_skipped)
{
    static const char data[1000];
    struct rig rig;
    struct client c;

    rig_start(&rig, LEN, NULL);
    say_hello(&c, &rig);
    CHECK_EQ(client_option(&c, NBD_OPT_STARTTLS, NULL, 0, NULL), (uint32_t)NBD_REP_ERR_UNSUP);
    CHECK_EQ(client_option(&c, 4 /* PEEK_EXPORT */, "x", 1, NULL), (uint32_t)NBD_REP_ERR_UNSUP);
    for (uint32_t i = 0; i < 300; i++)
        CHECK_EQ(client_option(&c, 0x7000 + i, data, sizeof(data), NULL),
                 (uint32_t)NBD_REP_ERR_UNSUP);
    CHECK_EQ(client_go(&c, "disk"), 0);
    CHECK(client_alive(&c));
    client_close(&c);
    rig_stop(&rig);
}

CO_TEST(abort_is_acknowledged)
{
    struct rig rig;
    struct client c;

    rig_start(&rig, LEN, NULL);
    say_hello(&c, &rig);
    CHECK_EQ(client_option(&c, NBD_OPT_ABORT, NULL, 0, NULL), NBD_REP_ACK);
    CHECK(is_closed(&c));
    client_close(&c);
    rig_stop(&rig);
}

/* ---- abuse ---- */

struct abuse {
    const char *what;
    uint64_t magic;
    uint32_t type;
    const char *data;
    uint32_t data_len, len;
    uint32_t reply; /* 0: the server closes */
};
#define M NBD_MAGIC_OPTION

static const struct abuse abuses[] = {
    {"option of 4 GiB", M, NBD_OPT_LIST, "xxx", 3, UINT32_MAX, 0},
    {"LIST with data", M, NBD_OPT_LIST, "xxx", 3, 3, NBD_REP_ERR_INVALID},
    {"STRUCTURED_REPLY with data", M, NBD_OPT_STRUCTURED_REPLY, "x", 1, 1, NBD_REP_ERR_INVALID},
    {"EXPORT_NAME too long", M, NBD_OPT_EXPORT_NAME, NULL, 5000, 5000, 0},
    {"EXPORT_NAME of 64 KiB", M, NBD_OPT_EXPORT_NAME, NULL, 65536, 65536, 0},
    {"EXPORT_NAME unknown", M, NBD_OPT_EXPORT_NAME, "nope", 4, 4, 0},
    {"option of 40 KiB", M, NBD_OPT_GO, NULL, 40960, 40960, NBD_REP_ERR_TOO_BIG},
    {"option of 1 MiB", M, 0x1234, NULL, 1 << 20, 1 << 20, NBD_REP_ERR_TOO_BIG},
    {"GO without data", M, NBD_OPT_GO, NULL, 0, 0, NBD_REP_ERR_INVALID},
    {"GO: name longer than option", M, NBD_OPT_GO,
     "\xff\xff\xff\xf0"
     "abc",
     7, 7, NBD_REP_ERR_INVALID},
    {"GO: more infos than data", M, NBD_OPT_GO, "\0\0\0\4disk\xff\xff", 10, 10,
     NBD_REP_ERR_INVALID},
    {"GO: bytes behind the infos", M, NBD_OPT_GO, "\0\0\0\4disk\0\0zz", 12, 12,
     NBD_REP_ERR_INVALID},
    {"GO: unknown export", M, NBD_OPT_GO, "\0\0\0\3non\0\0", 9, 9, NBD_REP_ERR_UNKNOWN},
    {"GO: name of 16 KiB", M, NBD_OPT_GO, NULL, 16390, 16390, NBD_REP_ERR_INVALID},
    {"META before structured", M, NBD_OPT_SET_META_CONTEXT, "\0\0\0\4disk\0\0\0\0", 12, 12,
     NBD_REP_ERR_INVALID},
    {"wrong magic", 0x1111111111111111ull, NBD_OPT_LIST, NULL, 0, 0, 0},
};

SUSPENDS static void abuse_once(struct rig *rig, const struct abuse *a, bool structured)
{
    static char fill[1 << 20];
    struct client c;

    memset(fill, 'a', sizeof(fill));
    say_hello(&c, rig);
    if (structured)
        CHECK_EQ(client_option(&c, NBD_OPT_STRUCTURED_REPLY, NULL, 0, NULL), NBD_REP_ACK);
    client_option_raw(&c, a->magic, a->type, a->data ? a->data : fill, a->data_len, a->len);
    int64_t last = client_replies(&c, NULL);
    if (a->reply == 0 ? last >= 0 : last != a->reply)
        test_fail(__FILE__, __LINE__, "%s: answered %lld, not %lld", a->what, (long long)last,
                  (long long)a->reply);
    if (a->reply) { /* and goes on */
        CHECK_EQ(client_go(&c, "disk"), 0);
        c.structured = structured;
        CHECK(client_alive(&c));
    }
    client_close(&c);
}

CO_TEST(broken_options_hurt_nobody)
{
    static const struct abuse structured[] = {
        {"META without data", M, NBD_OPT_SET_META_CONTEXT, NULL, 0, 0, NBD_REP_ERR_INVALID},
        {"META: 2^32-1 queries", M, NBD_OPT_SET_META_CONTEXT,
         "\0\0\0\4disk\xff\xff\xff\xff\0\0\0\0\0\0\0\0", 20, 20, NBD_REP_ERR_INVALID},
        {"META: query longer than option", M, NBD_OPT_LIST_META_CONTEXT,
         "\0\0\0\4disk\0\0\0\1\xff\xff\xff\0", 16, 16, NBD_REP_ERR_INVALID},
        {"META: bytes behind the queries", M, NBD_OPT_LIST_META_CONTEXT, "\0\0\0\4disk\0\0\0\0zz",
         14, 14, NBD_REP_ERR_INVALID},
        {"META: unknown export", M, NBD_OPT_LIST_META_CONTEXT, "\0\0\0\1x\0\0\0\0", 9, 9,
         NBD_REP_ERR_UNKNOWN},
    };
    struct rig rig;
    struct client keep;

    rig_start(&rig, LEN, NULL);
    client_enter(&keep, rig.server, "disk", true);
    for (unsigned i = 0; i < ARRAY_SIZE(abuses); i++) {
        abuse_once(&rig, &abuses[i], false);
        CHECK(client_alive(&keep));
    }
    for (unsigned i = 0; i < ARRAY_SIZE(structured); i++) {
        abuse_once(&rig, &structured[i], true);
        CHECK(client_alive(&keep));
    }
    client_close(&keep);
    rig_await_conns(&rig, 0);
    rig_stop(&rig);
}

CO_TEST(names_of_4096_bytes_are_names)
{
    static char name[NBD_MAX_NAME_LEN + 2];
    static uint8_t data[NBD_MAX_NAME_LEN + 64];
    struct nbd_export_opts opts = {.name = name};
    struct rig rig;
    struct client c;

    rig_start(&rig, LEN, NULL);
    opts.chain = rig.chain;
    memset(name, 'n', NBD_MAX_NAME_LEN + 1);
    CHECK_EQ(nbd_export_add(rig.server, &opts, NULL, NULL), -EINVAL);
    name[NBD_MAX_NAME_LEN] = 0;
    CHECK_EQ(nbd_export_add(rig.server, &opts, NULL, NULL), 0);
    say_hello(&c, &rig);
    CHECK_EQ(client_option(&c, NBD_OPT_GO, data, client_go_data(data, name, 0, NULL), NULL),
             NBD_REP_ACK);
    CHECK(client_alive(&c));
    client_close(&c);
    rig_stop(&rig);
}

/* ---- metadata contexts ---- */

SUSPENDS static unsigned contexts(struct client *c, uint32_t option, const char *export,
                                  unsigned nr, const char *const *queries)
{
    struct option_replies r;
    uint8_t data[300];

    CHECK_EQ(client_option(c, option, data, client_meta_data(data, export, nr, queries), &r),
             NBD_REP_ACK);
    unsigned found = 0;
    for (unsigned i = 0; i + 1 < r.nr; i++) {
        CHECK_EQ(r.at[i].type, NBD_REP_META_CONTEXT);
        found |= 1u << r.at[i].data[3];
    }
    return found;
}

CO_TEST(metadata_contexts_are_listed_and_set)
{
    enum { BASE = 1 << NBD_CONTEXT_BASE, DEPTH = 1 << NBD_CONTEXT_DEPTH };
    static const char *const all[] = {"base:allocation", "qemu:allocation-depth"};
    static const char *const spaces[] = {"base:", "qemu:"};
    static const char *const others[] = {"base:alloc", "qemu:dirty-bitmap:x", "", "x-y:z"};
    struct nbd_export_opts plain = {.name = "plain"};
    struct rig rig;
    struct client c;

    rig_start(&rig, LEN, NULL);
    plain.chain = rig.chain;
    CHECK_EQ(nbd_export_add(rig.server, &plain, NULL, NULL), 0);
    say_hello(&c, &rig);
    CHECK_EQ(client_option(&c, NBD_OPT_STRUCTURED_REPLY, NULL, 0, NULL), NBD_REP_ACK);
    c.structured = true;
    CHECK_EQ(contexts(&c, NBD_OPT_LIST_META_CONTEXT, "disk", 0, NULL), BASE | DEPTH);
    CHECK_EQ(contexts(&c, NBD_OPT_LIST_META_CONTEXT, "disk", 1, spaces), BASE);
    CHECK_EQ(contexts(&c, NBD_OPT_LIST_META_CONTEXT, "disk", 2, spaces), BASE | DEPTH);
    CHECK_EQ(contexts(&c, NBD_OPT_LIST_META_CONTEXT, "disk", 4, others), 0);
    CHECK_EQ(contexts(&c, NBD_OPT_LIST_META_CONTEXT, "plain", 0, NULL), BASE);
    CHECK_EQ(contexts(&c, NBD_OPT_SET_META_CONTEXT, "disk", 2, spaces), 0);
    CHECK_EQ(contexts(&c, NBD_OPT_SET_META_CONTEXT, "plain", 2, all), BASE);
    CHECK_EQ(contexts(&c, NBD_OPT_SET_META_CONTEXT, "disk", 1, all + 1), DEPTH);
    CHECK_EQ(client_go(&c, "disk"), 0);
    struct answer a = {0};
    CHECK_EQ(client_request(&c, NBD_CMD_BLOCK_STATUS, 0, 0, 4096), 0);
    CHECK_EQ(client_answer(&c, NBD_CMD_BLOCK_STATUS, 0, &a), 0);
    CHECK_EQ(a.error, 0);
    CHECK_EQ(a.chunks, 1);
    CHECK_EQ(a.nr_extents[NBD_CONTEXT_DEPTH], 1);
    client_close(&c);
    rig_stop(&rig);
}

CO_TEST(contexts_of_another_export_do_not_count)
{
    static const char *const all[] = {"base:allocation"};
    struct nbd_export_opts other = {.name = "other"};
    struct rig rig;
    struct client c;

    rig_start(&rig, LEN, NULL);
    other.chain = rig.chain;
    CHECK_EQ(nbd_export_add(rig.server, &other, NULL, NULL), 0);
    say_hello(&c, &rig);
    CHECK_EQ(client_option(&c, NBD_OPT_STRUCTURED_REPLY, NULL, 0, NULL), NBD_REP_ACK);
    c.structured = true;
    contexts(&c, NBD_OPT_SET_META_CONTEXT, "other", 1, all);
    CHECK_EQ(client_go(&c, "disk"), 0);
    CHECK_EQ(client_do(&c, NBD_CMD_BLOCK_STATUS, 0, 0, 4096, NULL), NBD_EINVAL);
    client_close(&c);
    rig_stop(&rig);
}

/* ---- time ---- */

CO_TEST(a_silent_peer_is_closed)
{
    struct rig rig;
    struct client silent, half, served;

    rig_start(&rig, LEN, NULL);
    rig.server->handshake_ns = 100 * NSEC_PER_MSEC;
    client_enter(&served, rig.server, "disk", false);
    client_open(&silent, rig.server);
    say_hello(&half, &rig);
    CHECK_EQ(client_send(&half, "IHAVE", 5), 0);
    rig_await_conns(&rig, 1);
    CHECK(is_closed(&half));
    CHECK(client_alive(&served));
    client_close(&silent);
    client_close(&half);
    client_close(&served);
    rig_stop(&rig);
}

CO_TEST(a_handshake_may_come_byte_by_byte)
{
    static const uint8_t bytes[] = "\0\0\0\3IHAVEOPT\0\0\0\7\0\0\0\12\0\0\0\4disk\0";
    struct option_replies r;
    struct rig rig;
    struct client c;
    uint8_t greeting[18];

    rig_start(&rig, LEN, NULL);
    client_open(&c, rig.server);
    for (unsigned i = 0; i < sizeof(bytes); i++) {
        CHECK_EQ(client_send(&c, bytes + i, 1), 0);
        reactor_yield();
    }
    CHECK_EQ(client_recv(&c, greeting, sizeof(greeting)), 0);
    CHECK_EQ(client_replies(&c, &r), NBD_REP_ACK);
    CHECK(client_alive(&c));
    client_close(&c);
    rig_stop(&rig);
}
