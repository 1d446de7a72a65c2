/* Growing a volume: one change of the top image's header (or of a raw file's length), so no intent.
 */
#include <string.h>
#include "base/bits.h"
#include "base/check.h"
#include "chain/chain.h"
#include "vol/internal.h"

static int new_len(const struct cvol *vol, uint64_t len, bool relative, uint64_t *ret,
                   struct err *err)
{
    uint64_t now = vol->current->virtual_len;

    if (relative && len > INT64_MAX - now)
        return err_set(err, -EFBIG, "the size is too large");
    if (relative)
        len += now;
    if (len > INT64_MAX - 512)
        return err_set(err, -EFBIG, "the size is too large");
    len = align_up(len, 512);
    if (len < now)
        return err_set(err, -EINVAL, "the volume is %llu bytes long: volumes are only made larger",
                       (unsigned long long)now);
    *ret = len;
    return 0;
}

SUSPENDS static int resize_idle(const struct pool *pool, const struct cvol *vol, uint64_t len,
                                struct err *err)
{
    struct chain_opts opts = {
        .format = vol->format, .writable = true, .grow = store_grow_opts(pool)};
    struct chain *chain;
    int rc = chain_open(vol->current->path, &opts, &chain, err);

    if (rc < 0)
        return rc;
    crash_point("resize-begin");
    rc = chain_resize(chain, len, err);
    crash_point("resize-done");
    int close_rc = chain_close(chain, rc < 0 ? NULL : err);
    return rc < 0 ? rc : close_rc;
}

SUSPENDS static int resize_served(struct remote *r, const struct cvol *vol, uint64_t len,
                                  struct err *err)
{
    _cleanup_(freep) char *node = NULL;
    int rc = remote_node(r, vol->current->path, NULL, &node, err);

    if (rc == 0 && !node)
        rc = err_set(err, -ENOENT, "the volume's server does not have '%s' open",
                     vol->current->path);
    if (rc < 0)
        return rc;
    crash_point("resize-begin");
    rc = remote_command(r, "block_resize",
                        json_pack("{s:s, s:I}", "node-name", node, "size", (json_int_t)len), NULL,
                        err);
    crash_point("resize-done");
    return rc;
}

int vol_resize(const struct vol_ctx *ctx, const struct vol_name *name, uint64_t len, bool relative,
               struct err *err)
{
    _cleanup_(remote_closep) struct remote *remote = NULL;
    struct cvol *vol = NULL;
    uint64_t bytes = 0;
    struct op op;
    int rc = op_begin(ctx, name->pool, name, 1, &op, err);

    if (rc < 0)
        return rc;
    if (*name->snap)
        rc = err_set(err, -EINVAL, "a snapshot keeps its size");
    if (rc == 0)
        rc = op_volume_to_change(&op, name, "resized", &vol, err);
    if (rc == 0)
        rc = new_len(vol, len, relative, &bytes, err);
    if (rc == 0 && !ctx->dry_run) {
        pool_let_go(&op.pool_lock);
        rc = remote_open(op.cat, vol, &remote, err);
        if (rc == 0)
            rc = remote ? resize_served(remote, vol, bytes, err)
                        : resize_idle(op.pool, vol, bytes, err);
    }
    if (rc == 0)
        op_say(ctx, "%s %s: %llu bytes", vol->stem, ctx->dry_run ? "would be resized" : "resized",
               (unsigned long long)bytes);
    op_end(&op);
    return rc;
}
