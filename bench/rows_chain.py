"""Rows of chains: data in every layer at depth 1, 8 and 64; answered writes that survive a kill against flushed ones."""
from images import KIB, MIB, chain, copy, qcow2
from measure import Contender, Load, Row

DEPTHS = (1, 8, 64)


def chains(ctx, folder, sub, users):
    """[(depth, label, path of a top of its own)] for each user of each depth"""
    out = []
    for d in DEPTHS:
        layers = chain(folder, 'c%d' % d, ctx.chain_size, d, sub)
        for u in users:
            out.append((d, u, copy(layers[-1], '%s/top%d-%s.qcow2' % (folder, d, u))))
    return out


def depth_row(ctx, sub, quick):
    programs = dict(ctx.pair())

    def build(ctx, folder, places):
        preload = ['varve+preload'] if ctx.varve.has('preload') else []
        out = []
        for d, u, path in chains(ctx, folder, sub, list(programs) + preload):
            if u != 'varve+preload':
                out.append(Contender('%s/%d' % (u, d), programs[u], path))
            elif d == max(DEPTHS):
                out.append(Contender('varve/%d+preload' % d, ctx.varve, path, options=['--preload']))
        return out
    part = ctx.chain_size // 4
    copies = 0 if sub else 64 * KIB
    loads = [Load('cold randread d32', 'cold', once=True, count=4000, seed=3),
             Load('prep', 'prep', rw='read', bs=64 * KIB, depth=16, secs=0, once=True),
             Load('randread d1', depth=1), Load('randread d32'), Load('randread d64', depth=64), Load('read 64k d16', rw='read', bs=64 * KIB, depth=16),
             Load('first randwrite d32', 'first', copies, rw='randwrite', once=True, **{'from': 0}, span=2 * part,
                  **({'slots': 2 * part // copies, 'slot_len': 4096} if copies else {})),
             Load('prep', 'prep', rw='randwrite', once=True, secs=0, **{'from': 2 * part}, span=min(part, 64 * MIB)),
             Load('randwrite d32', rw='randwrite', **{'from': 2 * part}, span=min(part, 64 * MIB))]
    return Row('chain', 'scattered by %s' % ('4k, extended L2' if sub else '64k'), build, loads, quick, room=(1 + len(DEPTHS)) * 3 * ctx.chain_size)


def ack_row(ctx, depth, quick):
    """the same server in both modes, queues of 1 to 64; the top of the `depth` layers is empty at first"""
    def build(ctx, folder, places):
        below = chain(folder, 'c', ctx.size, depth - 1, True, piece=64 * KIB)[-1] if depth > 1 else None
        return [Contender(m, ctx.varve, qcow2('%s/%s.qcow2' % (folder, m), ctx.size, 'cluster_size=128k,extended_l2=on', below), options=['--durability', m])
                for m in ('flush', 'ack')]
    queue = (1, 4, 16, 64)
    part = ctx.size // 8
    loads = [Load('first randwrite d%d' % q, 'first', rw='randwrite', depth=q, once=True, **{'from': i * part}, span=part) for i, q in enumerate(queue)]
    loads += [Load('prep', 'prep', rw='randwrite', once=True, secs=0, **{'from': 4 * part}, span=min(part, 64 * MIB))]
    loads += [Load('randwrite d%d' % q, rw='randwrite', depth=q, **{'from': 4 * part}, span=min(part, 64 * MIB)) for q in queue]
    loads += [Load('randrw d16', rw='randrw', depth=16, **{'from': 5 * part}, span=part)]
    return Row('ack', '%d layers' % depth, build, loads, quick, room=5 * ctx.size, turns=2)


def rows(ctx):
    yield depth_row(ctx, False, True)
    yield depth_row(ctx, True, False)
    for d in DEPTHS:
        yield ack_row(ctx, d, d in (1, 64))
