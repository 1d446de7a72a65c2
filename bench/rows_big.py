"""Rows of large disks with little memory: 1 TiB, the caches bounded alike, 32 MiB against 1 GiB; linear and fragmented
layouts; memory with many requests. Files are sparse: a row writes its tables and at most a few hundred MiB more.
"""
from images import GIB, KIB, MIB, TIB, copy, fragmented, qcow2, raw
from measure import Contender, Load, Row
from rows_disk import META, opts_of

CACHES = (('32M', 32 * MIB), ('1G', GIB))


def slots(ctx):
    """so many places of 4 KiB are written, evenly over the disk: some in every table of 512 MiB"""
    return 4096 if ctx.quick else 16384


def bounded(ctx, make, folder, rawlike=None, small_only=False):
    """every program with every bound, each on an image of its own; `make(path)` makes the first, the others are copies"""
    out, first = [], None
    for cname, cache in CACHES[:1 if small_only else 2]:
        for label, program in ctx.pair():
            path = '%s/%s-%s.qcow2' % (folder, label, cname)
            first = first or make(path)
            if path != first:
                copy(first, path)
            out.append(Contender('%s@%s' % (label, cname), program, path, cache))
    if rawlike:
        out.append(Contender('raw', ctx.varve, raw(folder + '/raw.raw', TIB, False)))
    return out


def warm(ctx, span=None):
    """touches every slice of the tables: a place in each 32 MiB; not for ever where the cache is too small for them"""
    span = span or TIB
    return Load('prep', 'prep', rw='randread', depth=32, secs=max(1.5, 2 * ctx.secs), once=True, slots=max(span // (32 * MIB), 1), slot_len=4096,
                **{'from': 0}, span=span)


def loads(ctx, copies, span=None):
    """lookup: reads of places that were never written, which cost the server its lookup and nothing else. The others meet data"""
    where = {'from': 0, 'span': span or TIB}
    some = dict(where, slots=slots(ctx), slot_len=4096)
    return [Load('cold lookup d32', 'cold', once=True, count=4000, seed=3, **where), warm(ctx, span),
            Load('lookup d32', 'lookup', **where), Load('lookup d1', 'lookup', depth=1, **where),
            Load('first randwrite d32', 'first', copies, rw='randwrite', once=True, secs=10 * ctx.secs, **some),
            Load('prep', 'prep', rw='randwrite', once=True, secs=0, **some)] + [
            Load('%s d%d' % (rw, d), rw=rw, depth=d, **some) for rw in ('randread', 'randwrite') for d in (1, 32)]


def base_row(ctx, cluster, ext, quick):
    def build(ctx, folder, places):
        return bounded(ctx, lambda p: qcow2(p, TIB, opts_of(cluster, ext, True)), folder, True)
    return Row('1T', 'base %s%s' % (cluster, ',ext' if ext else ''), build, loads(ctx, 0), quick, room=6 * GIB)


def snap_row(ctx, base_cluster, cluster, ext, quick):
    """an overlay, nothing below: what a guest writes is new"""
    def build(ctx, folder, places):
        base = qcow2(folder + '/base.qcow2', TIB, opts_of(base_cluster, False, True))
        return bounded(ctx, lambda p: qcow2(p, TIB, opts_of(cluster, ext, ext), base), folder)
    return Row('1T', 'base %s + snapshot %s%s' % (base_cluster, cluster, ',ext' if ext else ''), build, loads(ctx, 0), quick, room=8 * GIB)


def data_row(ctx, cluster, ext, quick):
    """an overlay on real data: 4 KiB at every place that is written, so that a write copies what is around them"""
    unit = {'64k': 64 * KIB, '128k': 128 * KIB, '1M': MIB}[cluster] // (32 if ext else 1)

    def build(ctx, folder, places):
        base = qcow2(folder + '/base.qcow2', TIB, opts_of('64k', False, True))
        s = ctx.qemus[0].start(base, folder, 'fill')
        try:
            Load('prep', 'prep', rw='randwrite', once=True, secs=0, slots=slots(ctx), slot_len=4096, **{'from': 0}, span=TIB).run(ctx, s.sock)
        finally:
            s.stop()
        return bounded(ctx, lambda p: qcow2(p, TIB, opts_of(cluster, ext, ext), base), folder)
    return Row('1T', 'data + snapshot %s%s' % (cluster, ',ext' if ext else ''), build, loads(ctx, unit if unit > 4096 else 0), quick,
               room=8 * GIB + 4 * slots(ctx) * unit)


def frag_row(ctx, name, clusters, among, quick):
    """64 KiB clusters in no order at all"""
    span = (among or clusters) * 64 * KIB

    def build(ctx, folder, places):
        return bounded(ctx, lambda p: fragmented(p, TIB, clusters, among), folder, True)
    return Row('fragmented', name, build, loads(ctx, 0, span), quick, room=6 * GIB)


def frag_overlay_row(ctx, clusters, quick):
    """the same below an overlay: flattened map and tables share the bound"""
    span = clusters * 64 * KIB

    def build(ctx, folder, places):
        base = fragmented(folder + '/base.qcow2', TIB, clusters)
        return bounded(ctx, lambda p: qcow2(p, TIB, opts_of('128k', True, True), base), folder)
    return Row('fragmented', '%dk clusters + snapshot 128k,ext' % (clusters >> 10), build, loads(ctx, 0, span), quick, room=6 * GIB)


def memory_row(ctx, conns, depth, clusters):
    """the most memory with all tables in use and many requests at once; bound 32 MiB"""
    def build(ctx, folder, places):
        return bounded(ctx, lambda p: fragmented(p, TIB, clusters), folder, small_only=True)
    where = {'from': 0, 'span': clusters * 64 * KIB}
    return Row('memory', '%dM clusters in no order, %d connections' % (clusters >> 20, conns), build,
               [warm(ctx, where['span']), Load('randread 4k', depth=depth, conns=conns, **where),
                Load('randread 64k', depth=depth, conns=conns, bs=64 * KIB, **where),
                Load('randrw 4k', rw='randrw', depth=depth, conns=conns, slots=slots(ctx), slot_len=4096, **where)], True, room=4 * GIB)


def rows(ctx):
    yield base_row(ctx, '64k', False, True)
    yield base_row(ctx, '1M', False, False)
    yield base_row(ctx, '1M', True, False)
    yield snap_row(ctx, '64k', '128k', True, False)
    yield snap_row(ctx, '1M', '128k', True, False)
    yield snap_row(ctx, '1M', '1M', True, False)
    yield data_row(ctx, '64k', False, False)
    yield data_row(ctx, '128k', True, True)
    yield data_row(ctx, '1M', True, False)
    yield frag_row(ctx, '1M clusters', 1 << 20, None, False)
    yield frag_row(ctx, '4M clusters', 1 << 22, None, True)
    yield frag_row(ctx, '4M clusters of 16M', 1 << 22, 1 << 24, False)
    yield frag_overlay_row(ctx, 1 << 20, False)
    yield memory_row(ctx, 1, 128, 1 << 20)
    yield memory_row(ctx, 4, 128, 1 << 22)
