"""Rows of ordinary disks: base and linked clone x extended L2 x cluster size x preallocation; internal snapshots;
connections; fio as a second client.
"""
import json, subprocess
from counters import Usage
from images import KIB, MIB, fill, qcow2, raw, run
from measure import Contender, Load, Row, turn
from servers import Failed

META = 'preallocation=metadata'
RAW = lambda label: label == 'raw'


def name_of(cluster, ext, prealloc):
    return '%s%s%s' % (cluster, ',ext' if ext else '', ',prealloc' if prealloc else '')


def opts_of(cluster, ext, prealloc):
    return ','.join(['cluster_size=' + cluster] + ['extended_l2=on'] * ext + [META] * prealloc)


def steady_loads(span, count=None):
    more = dict({'span': span}, **({'count': count} if count else {}))
    out = [Load('randread d%d' % d, depth=d, **more) for d in (1, 16, 32)]
    out += [Load('read 64k d16', rw='read', bs=64 * KIB, depth=16, **more)]
    out += [Load('randwrite d%d' % d, rw='randwrite', depth=d, **more) for d in (1, 16, 32)]
    return out + [Load('write 64k d16', rw='write', bs=64 * KIB, depth=16, **more)]


def first_loads(size, copies):
    """writes to places that the image does not have yet: an eighth or a quarter of the disk for each load. Where a write copies, one
    place in each (sub)cluster, so that every write does"""
    part = size // 8

    def at(k, n):
        return dict({'from': k * part, 'span': n * part, 'once': True}, **({'slots': n * part // copies, 'slot_len': 4096} if copies else {}))
    out = [Load('first randwrite d%d' % d, 'first', copies, rw='randwrite', depth=d, **at(k, n)) for d, k, n in ((1, 0, 1), (16, 1, 2), (32, 3, 2))]
    if copies <= 64 * KIB:              # whole clusters: nothing to copy
        out.append(Load('first write 64k d16', 'first', 0, rw='write', bs=64 * KIB, depth=16, once=True, **{'from': 5 * part}, span=2 * part))
    return out


def cold_load():
    return Load('cold randread d32', 'cold', once=True, count=2000, seed=3)


def raw_copy(copies):
    """what raw does when it moves as many bytes: the measure for rows that copy"""
    return [Load('raw copy', bs=copies, rw='randrw', depth=32, only=RAW)] if copies else []


def base_row(ctx, cluster, ext, prealloc, quick):
    def build(ctx, folder, places):
        out = [Contender(l, p, fill(qcow2('%s/%s.qcow2' % (folder, l), ctx.size, opts_of(cluster, ext, prealloc)), ctx.size)) for l, p in ctx.pair()]
        return out + [Contender('raw', ctx.varve, raw(folder + '/raw.raw', ctx.size, True))]
    return Row('base', name_of(cluster, ext, prealloc), build, [cold_load()] + steady_loads(ctx.size), quick, room=4 * ctx.size)


def fresh_row(ctx, cluster, ext, prealloc, quick):
    def build(ctx, folder, places):
        out = [Contender(l, p, qcow2('%s/%s.qcow2' % (folder, l), ctx.size, opts_of(cluster, ext, prealloc))) for l, p in ctx.pair()]
        return out + [Contender('raw', ctx.varve, raw(folder + '/raw.raw', ctx.size, False))]
    return Row('fresh', name_of(cluster, ext, prealloc), build, first_loads(ctx.size, 0), quick, room=4 * ctx.size)


UNIT = {'64k': 64 * KIB, '128k': 128 * KIB, '1M': MIB}


def clone_row(ctx, cluster, ext, prealloc, quick):
    unit = UNIT[cluster] // (32 if ext else 1)
    copies = unit if unit > 4096 else 0
    last = ctx.size // 8

    def build(ctx, folder, places):
        base = fill(qcow2(folder + '/base.qcow2', ctx.size, 'cluster_size=64k,' + META), ctx.size)
        out = [Contender(l, p, qcow2('%s/%s.qcow2' % (folder, l), ctx.size, opts_of(cluster, ext, prealloc), base)) for l, p in ctx.pair()]
        return out + [Contender('raw', ctx.varve, raw(folder + '/raw.raw', ctx.size, False)),
                      Contender('raw-filled', ctx.varve, raw(folder + '/filled.raw', ctx.size, True))]
    filled = lambda l: l != 'raw'
    fresh = lambda l: l != 'raw-filled'
    loads = [cold_load()] + [Load('randread d%d' % d, depth=d) for d in (1, 16, 32)] + [Load('read 64k d16', rw='read', bs=64 * KIB, depth=16)]
    for l in loads:
        l.only = filled                     # what is below the clone is filled
    first = first_loads(ctx.size, copies)
    for l in first:
        l.only = fresh                      # the clone's own file is not
    steady = [Load('prep', 'prep', rw='randwrite', bs=4096, depth=32, once=True, secs=0, **{'from': 7 * last}, span=min(last, 64 * MIB))]
    steady += [Load('randwrite d%d' % d, rw='randwrite', depth=d, **{'from': 7 * last}, span=min(last, 64 * MIB)) for d in (1, 16, 32)]
    for l in steady:
        l.only = fresh
    steady += [Load('reread d32', depth=32, only=fresh, **{'from': 7 * last}, span=min(last, 64 * MIB))]
    copy = raw_copy(copies)
    for l in copy:
        l.only = lambda l: l == 'raw-filled'
    return Row('clone', name_of(cluster, ext, prealloc), build, loads + first + steady + copy, quick, room=7 * ctx.size)


def internal_row(ctx):
    """snapshots inside the image, which varve reads and writes but does not make, against an overlay"""
    def build(ctx, folder, places):
        out = []
        for l, p in ctx.pair():
            i = fill(qcow2('%s/%s-int.qcow2' % (folder, l), ctx.size, META), ctx.size)
            run('qemu-img', 'snapshot', '-c', 's1', i)
            b = fill(qcow2('%s/%s-base.qcow2' % (folder, l), ctx.size, META), ctx.size)
            e = qcow2('%s/%s-ext.qcow2' % (folder, l), ctx.size, 'cluster_size=128k,extended_l2=on,' + META, b)
            out += [Contender(l, p, e), Contender(l + '/internal', p, i)]
        return out
    loads = [Load('randread d32')] + [l for l in first_loads(ctx.size, 0) if l.args['depth'] != 1]
    last = ctx.size // 8
    return Row('internal', 'one snapshot', build,
               loads + [Load('prep', 'prep', rw='randwrite', once=True, secs=0, **{'from': 7 * last}, span=min(last, 64 * MIB)),
                        Load('randwrite d32', rw='randwrite', **{'from': 7 * last}, span=min(last, 64 * MIB))], True, room=8 * ctx.size)


def multi_row(ctx, name, base):
    def build(ctx, folder, places):
        out = []
        threads = [('varve/threads2', ctx.varve, ('--threads', '2'))] if ctx.varve.has('threads') else []
        for l, p, options in [(l, p, ()) for l, p in ctx.pair()] + threads:
            path = '%s/%s' % (folder, l.replace('/', '-'))
            b = fill(qcow2(path + '-b.qcow2', ctx.size, META), ctx.size)
            out.append(Contender(l, p, b if base else qcow2(path + '.qcow2', ctx.size, 'cluster_size=128k,extended_l2=on,' + META, b), options=options))
        return out + [Contender('raw', ctx.varve, raw(folder + '/raw.raw', ctx.size, True))]
    loads = []
    for rw in ('randread', 'randwrite'):
        loads += [Load('%s c%d' % (rw, c), rw=rw, depth=32, conns=c) for c in (1, 2, 4)]
    return Row('multi', name, build, loads, base, room=6 * ctx.size)


class FioRow(Row):
    """the same with another client: fio's nbd engine (libnbd)"""

    def run(self, ctx, nr):
        contenders, cells = self.build(ctx, ctx.folder, []), []
        for rw in ('randread', 'randwrite'):
            for c in turn(contenders, nr):
                s = c.program.start(c.image, ctx.folder, c.label)
                try:
                    use = Usage(s.pid)
                    j = fio(s.sock, rw, ctx.size, ctx.secs)
                    cell = {'kind': 'fio', 'row': self.name, 'load': rw + ' d32', 'server': c.label, 'round': nr * 100, 'phase': 'steady', 'copies': 0,
                            'depth': 32, 'conns': 1, 'bs': 4096, 'rw': rw, 'iops': j['iops'], 'ios': j['total_ios'], 'errors': 0,
                            'p99_us': j['clat_ns']['percentile']['99.000000'] / 1e3, **use.done(j['total_ios'])}
                    ctx.say('%-30s %-22s %-12s %9.0f /s  cpu %6.1f us' % ('fio', rw, c.label, j['iops'], cell['cpu_us']))
                    cells.append(cell)
                finally:
                    s.stop()
        return cells


def fio(sock, rw, size, secs):
    p = subprocess.run(['fio', '--name=t', '--ioengine=nbd', '--uri=nbd+unix:///?socket=' + sock, '--rw=' + rw, '--bs=4k', '--iodepth=32',
                        '--size=%d' % size, '--time_based', '--runtime=%d' % max(1, round(secs)), '--randseed=7', '--group_reporting',
                        '--output-format=json'], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
    if p.returncode:
        raise Failed('fio: ' + p.stdout[-500:])
    return json.loads(p.stdout[p.stdout.index('{'):])['jobs'][0]['read' if 'read' in rw else 'write']


def raw_row(ctx):
    """both servers over raw: what the protocol costs"""
    def build(ctx, folder, places):
        return [Contender(l, p, raw('%s/%s.raw' % (folder, l), ctx.size, True)) for l, p in ctx.pair()]
    return Row('base', 'raw', build, steady_loads(ctx.size), True, room=4 * ctx.size)


def rows(ctx):
    yield raw_row(ctx)
    for cluster in ('64k', '128k', '1M'):
        for ext in (False, True):
            for prealloc in (True, False):
                yield base_row(ctx, cluster, ext, prealloc, (cluster, ext, prealloc) in (('64k', False, True), ('128k', True, False)))
    for cluster, ext, prealloc in (('64k', False, False), ('64k', False, True), ('64k', True, True), ('128k', True, False), ('1M', False, False), ('1M', True, True)):
        yield fresh_row(ctx, cluster, ext, prealloc, (cluster, ext) == ('64k', False))
    for cluster in ('64k', '128k', '1M'):
        for ext, prealloc in ((False, False), (True, False), (True, True)):
            yield clone_row(ctx, cluster, ext, prealloc, (cluster, ext, prealloc) in (('64k', False, False), ('128k', True, True)))
    yield internal_row(ctx)
    yield multi_row(ctx, 'base 64k', True)
    yield multi_row(ctx, 'clone 128k,ext,prealloc', False)

    def fio_build(ctx, folder, places):
        out = [Contender(l, p, fill(qcow2('%s/%s.qcow2' % (folder, l), ctx.size, META), ctx.size)) for l, p in ctx.pair()]
        return out + [Contender('raw', ctx.varve, raw(folder + '/raw.raw', ctx.size, True))]
    yield FioRow('fio', 'base 64k,prealloc', fio_build, [], True, room=4 * ctx.size)
