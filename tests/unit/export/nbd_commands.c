/* Transmission: every command, what is refused, and that the stream stays in step. */
#include <errno.h>
#include "nbd_client.h"
#include "base/bits.h"
#include "rt/reactor.h"
#include "test.h"

#define LEN (8 * MIB + 512)

static void fill(uint8_t *buf, size_t len, uint64_t seed)
{
    for (size_t i = 0; i < len; i++)
        buf[i] = (uint8_t)(hash64(seed + i / 8) >> (i % 8 * 8));
}

static uint8_t *get(size_t len)
{
    uint8_t *buf = malloc(len);

    CHECK(buf);
    return buf;
}

SUSPENDS static void try_all_commands(bool structured)
{
    _cleanup_(freep) uint8_t *out = get(LEN), *in = get(LEN);
    struct rig rig;
    struct client c;

    rig_start(&rig, LEN, NULL);
    client_enter(&c, rig.server, "disk", structured);
    fill(out, LEN, 1);
    CHECK_EQ(client_do(&c, NBD_CMD_WRITE, 0, 0, LEN, out), 0);
    CHECK_EQ(client_do(&c, NBD_CMD_READ, 0, 0, LEN, in), 0);
    CHECK(memcmp(out, in, LEN) == 0);
    CHECK_EQ(client_do(&c, NBD_CMD_WRITE, 0, 1000, 1, "Q"), 0);
    CHECK_EQ(client_do(&c, NBD_CMD_READ, 0, 999, 3, in), 0);
    CHECK(in[0] == out[999] && in[1] == 'Q' && in[2] == out[1001]);
    CHECK_EQ(client_do(&c, NBD_CMD_WRITE_ZEROES, 0, 4096, 100000, NULL), 0);
    CHECK_EQ(client_do(&c, NBD_CMD_WRITE_ZEROES, NBD_CMD_FLAG_NO_HOLE, 200001, 7, NULL), 0);
    CHECK_EQ(client_do(&c, NBD_CMD_READ, 0, 0, 300000, in), 0);
    CHECK(buf_is_zero(in + 4096, 100000) && in[4095] == out[4095] && in[104096] == out[104096]);
    CHECK(buf_is_zero(in + 200001, 7) && in[200008] == out[200008]);
    CHECK_EQ(client_do(&c, NBD_CMD_TRIM, 0, 0, LEN, NULL), 0);
    CHECK_EQ(client_do(&c, NBD_CMD_CACHE, 0, 0, LEN, NULL), 0);
    CHECK_EQ(client_do(&c, NBD_CMD_FLUSH, 0, 0, 0, NULL), 0);
    CHECK_EQ(client_do(&c, NBD_CMD_READ, 0, LEN - 512, 512, in), 0);
    client_close(&c);
    rig_await_conns(&rig, 0);
    struct export_stats st;
    nbd_export_get_stats(rig.exp, &st);
    CHECK_EQ(st.reads, 4);
    CHECK_EQ(st.writes, 2);
    CHECK_EQ(st.write_bytes, LEN + 1);
    CHECK_EQ(st.zeroes, 2);
    CHECK_EQ(st.errors, 0);
    rig_stop(&rig);
}

CO_TEST(all_commands_simple)
{
    try_all_commands(false);
}

CO_TEST(all_commands_structured)
{
    try_all_commands(true);
}

/* ---- refusals ---- */

struct refusal {
    unsigned type, flags;
    uint64_t off;
    uint32_t len;
    unsigned error;
};

static const struct refusal refusals[] = {
    {NBD_CMD_READ, 0, LEN - 512, 1024, NBD_EINVAL},
    {NBD_CMD_READ, 0, 1ull << 63, 512, NBD_EINVAL},
    {NBD_CMD_READ, 0, UINT64_MAX - 511, 1024, NBD_EINVAL},
    {NBD_CMD_READ, 0, 0, 64u << 20, NBD_EINVAL},
    {NBD_CMD_READ, 0x100, 0, 512, NBD_EINVAL},
    {NBD_CMD_READ, NBD_CMD_FLAG_NO_HOLE, 0, 512, NBD_EINVAL},
    {NBD_CMD_WRITE, 0, LEN - 512, 1024, NBD_ENOSPC},
    {NBD_CMD_WRITE, 0, UINT64_MAX, 1024, NBD_ENOSPC},
    {NBD_CMD_WRITE, 0, 0, 40u << 20, NBD_ENOSPC},
    {NBD_CMD_WRITE, NBD_CMD_FLAG_REQ_ONE, 0, 1024, NBD_EINVAL},
    {NBD_CMD_WRITE_ZEROES, 0, LEN, 1, NBD_ENOSPC},
    {NBD_CMD_WRITE_ZEROES, 0, 0, UINT32_MAX, NBD_ENOSPC},
    {NBD_CMD_WRITE_ZEROES, NBD_CMD_FLAG_FAST_ZERO, 0, 65536, NBD_ENOTSUP}, /* raw */
    {NBD_CMD_TRIM, 0, LEN - 512, 1024, NBD_EINVAL},
    {NBD_CMD_CACHE, 0, LEN - 512, 1024, NBD_EINVAL},
    {NBD_CMD_BLOCK_STATUS, 0, LEN, 1, NBD_EINVAL},
    {NBD_CMD_BLOCK_STATUS, 0, 0, 0, NBD_EINVAL},
    {8, 0, 0, 0, NBD_EINVAL},
    {99, 0, 0, 0, NBD_EINVAL},
    {0xffff, 0, 0, 512, NBD_EINVAL},
};

SUSPENDS static void try_refusals(bool structured)
{
    _cleanup_(freep) uint8_t *payload = get(40 * MIB);
    struct rig rig;
    struct client c;

    memset(payload, 'z', 40 * MIB);
    rig_start(&rig, LEN, NULL);
    client_enter(&c, rig.server, "disk", structured);
    for (unsigned i = 0; i < ARRAY_SIZE(refusals); i++) {
        const struct refusal *r = &refusals[i];
        unsigned error = client_do(&c, r->type, r->flags, r->off, r->len, payload);

        if (error != r->error)
            test_fail(__FILE__, __LINE__, "refusal %u: error %u, not %u", i, error, r->error);
        CHECK(client_alive(&c));
    }
    CHECK_EQ(blk_fault_count(rig.blk, BLK_REQ_WRITE | BLK_REQ_ZERO | BLK_REQ_DISCARD), 0);
    client_close(&c);
    rig_stop(&rig);
}

CO_TEST(refused_requests_leave_the_stream_in_step)
{
    try_refusals(false);
    try_refusals(true);
}

CO_TEST(block_status_needs_a_context_and_df_structured_replies)
{
    uint8_t buf[512];
    struct rig rig;
    struct client c;

    rig_start(&rig, LEN, NULL);
    client_enter(&c, rig.server, "disk", false);
    CHECK_EQ(client_do(&c, NBD_CMD_BLOCK_STATUS, 0, 0, 4096, NULL), NBD_EINVAL);
    CHECK_EQ(client_do(&c, NBD_CMD_READ, NBD_CMD_FLAG_DF, 0, 512, buf), NBD_EINVAL);
    client_close(&c);
    rig_stop(&rig);
}

CO_TEST(requests_of_no_length)
{
    struct rig rig;
    struct client c;

    rig_start(&rig, LEN, NULL);
    for (unsigned structured = 0; structured < 2; structured++) {
        client_enter(&c, rig.server, "disk", structured);
        for (unsigned type = NBD_CMD_READ; type < NBD_CMD_BLOCK_STATUS; type++)
            if (type != NBD_CMD_DISC)
                CHECK_EQ(client_do(&c, type, 0, 4096, 0, NULL), 0);
        CHECK(client_alive(&c));
        client_close(&c);
    }
    rig_stop(&rig);
}

CO_TEST(a_read_only_export_refuses_changes)
{
    struct nbd_export_opts ro = {.name = "ro"};
    uint8_t buf[512] = {0};
    struct rig rig;
    struct client c;

    rig_start(&rig, LEN, NULL);
    ro.chain = rig.chain;
    CHECK_EQ(nbd_export_add(rig.server, &ro, NULL, NULL), 0);
    client_enter(&c, rig.server, "ro", true);
    CHECK(c.flags & NBD_FLAG_READ_ONLY);
    CHECK(!(c.flags & (NBD_FLAG_SEND_TRIM | NBD_FLAG_SEND_WRITE_ZEROES)));
    CHECK_EQ(client_do(&c, NBD_CMD_WRITE, 0, 0, 512, buf), NBD_EPERM);
    CHECK_EQ(client_do(&c, NBD_CMD_TRIM, 0, 0, 512, NULL), NBD_EPERM);
    CHECK_EQ(client_do(&c, NBD_CMD_WRITE_ZEROES, 0, 0, 512, NULL), NBD_EPERM);
    CHECK_EQ(client_do(&c, NBD_CMD_FLUSH, 0, 0, 0, NULL), 0);
    CHECK(client_alive(&c));
    CHECK_EQ(blk_fault_count(rig.blk, BLK_REQ_ANY & ~BLK_REQ_READ), 0);
    client_close(&c);
    rig_stop(&rig);
}

CO_TEST(wrong_request_magic_closes)
{
    static const char garbage[28] = "this is not a request......";
    struct rig rig;
    struct client c;
    char byte;

    rig_start(&rig, LEN, NULL);
    client_enter(&c, rig.server, "disk", false);
    CHECK_EQ(client_send(&c, garbage, sizeof(garbage)), 0);
    CHECK_EQ(client_recv(&c, &byte, 1), -ECONNRESET);
    client_close(&c);
    rig_stop(&rig);
}

/* ---- pieces ---- */

/* With little memory a long request is served in pieces; the client cannot tell but by chunks. */
SUSPENDS static void long_requests(bool structured, unsigned read_flags, unsigned chunks)
{
    struct nbd_server_opts opts = {.max_connections = 1, .buffer_bytes = MIB};
    _cleanup_(freep) uint8_t *out = get(LEN), *in = get(LEN);
    struct answer a = {.data = in};
    struct rig rig;
    struct client c;

    rig_start(&rig, LEN, &opts);
    client_enter(&c, rig.server, "disk", structured);
    fill(out, LEN, 5);
    CHECK_EQ(client_do(&c, NBD_CMD_WRITE, 0, 0, LEN, out), 0);
    CHECK_EQ(client_request(&c, NBD_CMD_READ, read_flags, 0, LEN), 0);
    CHECK_EQ(client_answer(&c, NBD_CMD_READ, LEN, &a), 0);
    CHECK_EQ(a.error, 0);
    CHECK_EQ(a.data_got, LEN);
    if (chunks)
        CHECK_EQ(a.chunks, chunks);
    else
        CHECK(a.chunks > 8);
    CHECK(memcmp(out, in, LEN) == 0);
    CHECK(client_alive(&c));
    CHECK(rig.server->memory.used_max <= MIB);
    client_close(&c);
    rig_stop(&rig);
}

CO_TEST(long_requests_in_pieces)
{
    long_requests(true, 0, 0);
    long_requests(true, NBD_CMD_FLAG_DF, 1);
}

CO_TEST(long_simple_reads_are_streamed)
{
    struct nbd_server_opts opts = {.max_connections = 1, .buffer_bytes = MIB};
    _cleanup_(freep) uint8_t *out = get(LEN), *in = get(LEN);
    struct rig rig;
    struct client c;

    rig_start(&rig, LEN, &opts);
    client_enter(&c, rig.server, "disk", false);
    fill(out, LEN, 9);
    CHECK_EQ(client_do(&c, NBD_CMD_WRITE, 0, 0, LEN, out), 0);
    /* two at once, and a short one that must not fall into their middle */
    CHECK_EQ(client_request(&c, NBD_CMD_READ, 0, 0, LEN), 0);
    CHECK_EQ(client_request(&c, NBD_CMD_READ, 0, 1, LEN - 1), 0);
    CHECK_EQ(client_request(&c, NBD_CMD_READ, 0, 7, 1), 0);
    for (unsigned i = 0; i < 3; i++) {
        be32 head[4];

        CHECK_EQ(client_recv(&c, head, sizeof(head)), 0);
        CHECK_EQ(be32_get(head[0]), NBD_MAGIC_SIMPLE);
        CHECK_EQ(be32_get(head[1]), 0);
        unsigned cookie = be32_get(head[3]) - (unsigned)c.cookie + 3;
        uint64_t off = cookie == 1 ? 0 : cookie == 2 ? 1 : 7;
        uint32_t len = cookie == 3 ? 1 : (uint32_t)(LEN - off);
        CHECK_EQ(client_recv(&c, in, len), 0);
        CHECK(memcmp(out + off, in, len) == 0);
    }
    client_close(&c);
    rig_stop(&rig);
}

CO_TEST(an_error_inside_a_streamed_read_breaks_the_connection)
{
    struct nbd_server_opts opts = {.max_connections = 2, .buffer_bytes = MIB};
    struct answer a = {0};
    struct rig rig;
    struct client c, other;

    rig_start(&rig, LEN, &opts);
    client_enter(&c, rig.server, "disk", false);
    client_enter(&other, rig.server, "disk", false);
    blk_fault_fail(rig.blk, BLK_REQ_READ, 1, -EIO, true);
    CHECK_EQ(client_do(&c, NBD_CMD_READ, 0, 0, LEN, NULL), NBD_EIO);
    blk_fault_clear(rig.blk);
    blk_fault_fail(rig.blk, BLK_REQ_READ, 3, -EIO, false);
    CHECK_EQ(client_request(&c, NBD_CMD_READ, 0, 0, LEN), 0);
    CHECK(client_answer(&c, NBD_CMD_READ, LEN, &a) < 0);
    blk_fault_clear(rig.blk);
    CHECK(client_alive(&other));
    client_close(&c);
    client_close(&other);
    rig_stop(&rig);
}

/* ---- errors of the device ---- */

CO_TEST(device_errors_are_answered)
{
    static const struct {
        int rc;
        unsigned error;
    } cases[] = {{-EIO, NBD_EIO},      {-ENOSPC, NBD_ENOSPC}, {-ENOMEM, NBD_ENOMEM},
                 {-EUCLEAN, NBD_EIO},  {-ESTALE, NBD_EIO},    {-EROFS, NBD_EPERM},
                 {-ECANCELED, NBD_EIO}};
    static uint8_t buf[4096] = {1};
    struct rig rig;
    struct client c;

    rig_start(&rig, LEN, NULL);
    client_enter(&c, rig.server, "disk", true);
    for (unsigned i = 0; i < ARRAY_SIZE(cases); i++) {
        blk_fault_fail(rig.blk, BLK_REQ_READ | BLK_REQ_WRITE, 1, cases[i].rc, true);
        CHECK_EQ(client_do(&c, NBD_CMD_READ, 0, 0, 4096, buf), cases[i].error);
        CHECK_EQ(client_do(&c, NBD_CMD_WRITE, 0, 0, 4096, buf), cases[i].error);
        blk_fault_clear(rig.blk);
        CHECK(client_alive(&c));
    }
    client_close(&c);
    rig_stop(&rig);
}

/* A device that counts writes by whether they must be durable. */
struct counter {
    struct blk blk;
    struct blk *mem;
    unsigned plain, fua, flushes;
};

SUSPENDS static int counter_readv(struct blk *blk, uint64_t off, uint64_t len, struct iov_iter *iov)
{
    return blk_readv(container_of(blk, struct counter, blk)->mem, off, len, iov);
}

SUSPENDS static int counter_writev(struct blk *blk, uint64_t off, uint64_t len,
                                   struct iov_iter *iov, unsigned flags)
{
    struct counter *counter = container_of(blk, struct counter, blk);

    if (flags & BLK_FUA)
        counter->fua++;
    else
        counter->plain++;
    return blk_writev(counter->mem, off, len, iov, flags);
}

SUSPENDS static int counter_flush(struct blk *blk)
{
    struct counter *counter = container_of(blk, struct counter, blk);

    counter->flushes++;
    return blk_flush(counter->mem);
}

SUSPENDS_UNCHECKED static void counter_close(struct blk *blk)
{
    struct counter *counter = container_of(blk, struct counter, blk);

    blk_close(counter->mem);
    free(counter);
}

SUSPENDS static struct counter *counter_new(void)
{
    static const struct blk_ops ops = {
        .name = "counter",
        .readv = counter_readv,
        .writev = counter_writev,
        .flush = counter_flush,
        .close = counter_close,
    };
    struct counter *counter = calloc(1, sizeof(*counter));

    CHECK(counter);
    CHECK_EQ(blk_init(&counter->blk, &ops, "counter"), 0);
    CHECK_EQ(blk_mem_new(LEN, 1, &counter->mem), 0);
    counter->blk.len = LEN;
    counter->blk.writable = true;
    return counter;
}

CO_TEST(fua_is_passed_on_for_what_asks_for_it)
{
    struct counter *counter = counter_new();
    static uint8_t buf[4096] = {1};
    struct rig rig;
    struct client c;

    rig_start_on(&rig, &counter->blk, NULL);
    client_enter(&c, rig.server, "disk", true);
    CHECK_EQ(client_do(&c, NBD_CMD_WRITE, 0, 0, 4096, buf), 0);
    CHECK(counter->plain == 1 && counter->fua == 0);
    CHECK_EQ(client_do(&c, NBD_CMD_WRITE, NBD_CMD_FLAG_FUA, 0, 4096, buf), 0);
    CHECK(counter->plain == 1 && counter->fua == 1 && counter->flushes == 0);
    CHECK_EQ(client_do(&c, NBD_CMD_WRITE_ZEROES, NBD_CMD_FLAG_FUA, 0, 512, NULL), 0);
    CHECK(counter->fua == 2 || counter->flushes == 1); /* zeroes may be flushed instead */
    client_close(&c);
    rig_stop(&rig);
}

CO_TEST(flushes_reach_the_device_and_their_failure_the_client)
{
    static uint8_t buf[4096] = {1};
    struct rig rig;
    struct client c;

    rig_start(&rig, LEN, NULL);
    client_enter(&c, rig.server, "disk", true);
    uint64_t before = blk_fault_count(rig.blk, BLK_REQ_FLUSH);
    CHECK_EQ(client_do(&c, NBD_CMD_WRITE, 0, 0, 4096, buf), 0);
    CHECK_EQ(client_do(&c, NBD_CMD_READ, NBD_CMD_FLAG_FUA, 0, 4096, buf), 0);
    CHECK_EQ(blk_fault_count(rig.blk, BLK_REQ_FLUSH), before);
    CHECK_EQ(client_do(&c, NBD_CMD_FLUSH, 0, 0, 0, NULL), 0);
    CHECK_EQ(blk_fault_count(rig.blk, BLK_REQ_FLUSH), before + 1);
    CHECK_EQ(client_do(&c, NBD_CMD_TRIM, NBD_CMD_FLAG_FUA, 0, 65536, NULL), 0);
    CHECK_EQ(blk_fault_count(rig.blk, BLK_REQ_FLUSH), before + 2);
    blk_fault_fail(rig.blk, BLK_REQ_FLUSH, 1, -EIO, true);
    CHECK_EQ(client_do(&c, NBD_CMD_FLUSH, 0, 0, 0, NULL), NBD_EIO);
    client_close(&c);
    nbd_server_stop(rig.server);
    rig_free_reactors(&rig);
    CHECK_EQ(chain_close(rig.chain, NULL), -EIO);
}

/* ---- block status ---- */

CO_TEST(block_status_tells_data_and_holes)
{
    static uint8_t buf[65536];
    struct answer a = {0}, one = {0};
    struct rig rig;
    struct client c;

    memset(buf, 3, sizeof(buf));
    rig_start(&rig, LEN, NULL);
    client_enter(&c, rig.server, "disk", true);
    CHECK_EQ(client_do(&c, NBD_CMD_WRITE, 0, MIB, sizeof(buf), buf), 0);
    CHECK_EQ(client_request(&c, NBD_CMD_BLOCK_STATUS, 0, 4096, 2 * MIB), 0);
    CHECK_EQ(client_answer(&c, NBD_CMD_BLOCK_STATUS, 0, &a), 0);
    CHECK_EQ(a.error, 0);
    CHECK_EQ(a.chunks, 2);
    CHECK_EQ(a.nr_extents[NBD_CONTEXT_BASE], 3);
    CHECK_EQ(a.extents[NBD_CONTEXT_BASE][0].len, MIB - 4096);
    CHECK_EQ(a.extents[NBD_CONTEXT_BASE][0].flags, NBD_STATE_HOLE | NBD_STATE_ZERO);
    CHECK_EQ(a.extents[NBD_CONTEXT_BASE][1].len, sizeof(buf));
    CHECK_EQ(a.extents[NBD_CONTEXT_BASE][1].flags, 0);
    CHECK_EQ(a.extents[NBD_CONTEXT_BASE][2].len, MIB + 4096 - sizeof(buf));
    CHECK_EQ(client_request(&c, NBD_CMD_BLOCK_STATUS, NBD_CMD_FLAG_REQ_ONE, MIB - 1, 2 * MIB), 0);
    CHECK_EQ(client_answer(&c, NBD_CMD_BLOCK_STATUS, 0, &one), 0);
    for (unsigned id = 0; id < NBD_CONTEXTS; id++)
        CHECK_EQ(one.nr_extents[id], 1);
    CHECK_EQ(one.extents[NBD_CONTEXT_BASE][0].len, 1);
    client_close(&c);
    rig_stop(&rig);
}

/* More extents than an answer holds: it covers a part, and asking on reaches the end. */
CO_TEST(block_status_of_a_fragmented_disk_goes_on)
{
    enum { STEP = 128 << 10, NR = 5000 };
    uint8_t byte = 9;
    uint64_t off = 0, holes = 0, answers = 0;
    struct rig rig;
    struct client c;

    rig_start(&rig, (uint64_t)STEP * NR, NULL);
    client_enter(&c, rig.server, "disk", true);
    for (uint64_t i = 0; i < NR; i++)
        CHECK_EQ(blk_write(rig.blk, i * STEP, &byte, 1), 0);
    while (off < (uint64_t)STEP * NR) {
        struct answer a = {0};
        struct nbd_wire_chunk head;
        be32 context;

        CHECK_EQ(client_request(&c, NBD_CMD_BLOCK_STATUS, 0, off, (uint32_t)(STEP * NR - off)), 0);
        CHECK_EQ(client_recv(&c, &head, sizeof(head)), 0);
        CHECK_EQ(be16_get(head.type), NBD_REPLY_BLOCK_STATUS);
        CHECK_EQ(client_recv(&c, &context, sizeof(context)), 0);
        unsigned nr = be32_get(head.len) / sizeof(struct nbd_wire_extent);
        CHECK(nr > 0);
        for (unsigned i = 0; i < nr; i++) {
            struct nbd_wire_extent x;

            CHECK_EQ(client_recv(&c, &x, sizeof(x)), 0);
            off += be32_get(x.len);
            holes += be32_get(x.flags) != 0;
        }
        CHECK_EQ(client_answer(&c, NBD_CMD_BLOCK_STATUS, 0, &a), 0); /* the other context */
        answers++;
    }
    CHECK_EQ(off, (uint64_t)STEP * NR);
    CHECK_EQ(holes, NR);
    CHECK(answers > 1 && answers < 10);
    client_close(&c);
    rig_stop(&rig);
}

/* ---- many at once ---- */

SUSPENDS_UNCHECKED static int send_reads(void *arg)
{
    struct client *c = arg;

    for (unsigned i = 0; i < 1000; i++)
        CHECK_EQ(client_request(c, NBD_CMD_READ, 0, i * 512, 512), 0);
    return 0;
}

/* More than slots and buffers hold, and nobody reads answers until all is sent. */
CO_TEST(a_thousand_requests_in_flight)
{
    static bool seen[1000];
    uint8_t buf[512], want[512];
    struct co_group group;
    struct rig rig;
    struct client c;

    memset(seen, 0, sizeof(seen));
    rig_start(&rig, LEN, NULL);
    client_enter(&c, rig.server, "disk", true);
    for (unsigned i = 0; i < 1000; i++) {
        memset(buf, (int)i, sizeof(buf));
        CHECK_EQ(blk_write(rig.blk, i * 512, buf, 512), 0);
    }
    co_group_init(&group);
    CHECK_EQ(co_group_spawn(&group, send_reads, &c), 0);
    for (unsigned i = 0; i < 1000; i++) {
        struct nbd_wire_data head;

        CHECK_EQ(client_recv(&c, &head, sizeof(head)), 0);
        CHECK_EQ(be16_get(head.chunk.type), NBD_REPLY_OFFSET_DATA);
        CHECK_EQ(client_recv(&c, buf, sizeof(buf)), 0);
        unsigned nr = (unsigned)(be64_get(head.off) / 512);
        CHECK(nr < 1000 && !seen[nr]);
        seen[nr] = true;
        memset(want, (int)nr, sizeof(want));
        CHECK(memcmp(buf, want, sizeof(buf)) == 0);
    }
    co_group_wait(&group);
    client_close(&c);
    rig_stop(&rig);
}
