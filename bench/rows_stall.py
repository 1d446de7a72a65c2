"""Snapshots and their deletion while a guest writes: what the guest sees, and how fast the job gets on.

The guest reads and writes 4 KiB, half and half, at 30 % of what the server can do (arrivals are scheduled, so every request
that a stall holds up counts) or as fast as it can. Deletion merges a layer that holds a third of the data, in pieces of
1 MiB: down into a full base (commit) or up into the top (stream). Both speak QMP; the commands are the same.
"""
import json, os, signal, subprocess, time
from images import MIB, chain, raw, remove, run
from measure import Load, Row, turn
from servers import Failed

LOADS = ('30%', 'full')


class Guest:
    """the load in the background, until stop()"""

    def __init__(self, ctx, server, rate, seed=11):
        args = {'rw': 'randrw', 'depth': 32, 'secs': 0, 'seed': seed, 'rate': rate or None, 'no_final_flush': True}
        self.p = subprocess.Popen(Load('guest', **args).argv(ctx, server.sock), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def stop(self):
        self.p.send_signal(signal.SIGINT)
        out, err = self.p.communicate(timeout=120)
        if self.p.returncode:
            raise Failed('nbdload: ' + err.strip()[-300:])
        return json.loads(out)


def sight(r):
    """what a guest saw"""
    out = {k: r['lat'][k] for k in ('p50_us', 'p99_us', 'p999_us', 'max_us', 'octaves')}
    return dict(out, iops=r['iops'], ios=r['ios'], gap_us=r['gap_us'], errors=r['errors'])


def node_of(q, path):
    for n in q.execute('query-named-block-nodes'):
        if n['drv'] in ('qcow2', 'raw') and os.path.basename(path) in (os.path.basename(n['file']), os.path.basename(n.get('image', {}).get('filename', ''))):
            return n['node-name']
    raise Failed('no node for ' + path)


def copy_rate(ctx, size, fresh):
    """bytes a second of the disk itself: the faster of two ways to copy a file past the page cache"""
    size = size // MIB * MIB
    src, dst = raw(ctx.folder + '/copy.src', size, True), ctx.folder + '/copy.dst'
    best = 0
    for argv in (['qemu-img', 'convert', '-n', '-W', '-m', '8', '-f', 'raw', '-O', 'raw', '-t', 'none', '-T', 'none', src, dst],
                 ['dd', 'if=' + src, 'of=' + dst, 'bs=4M', 'iflag=direct', 'oflag=direct', 'conv=notrunc,fdatasync']):
        raw(dst, size, not fresh)
        t = time.monotonic()
        run(*argv)
        best = max(best, size / (time.monotonic() - t))
    remove(src), remove(dst)
    return best


class StallRow(Row):
    def __init__(self, ctx, what, quick):
        super().__init__('stall', what, None, [], quick, room=4 * ctx.stall_size)
        self.what = what

    def run(self, ctx, nr):
        cells = []
        rate = copy_rate(ctx, ctx.stall_size // 3, self.what == 'stream') if self.what != 'snapshot' else 0
        for label, program in turn(ctx.pair(), nr):
            layers = chain(ctx.folder, label, ctx.stall_size, 3, piece=MIB, full_base=True)
            try:
                for guest in (() if self.what == 'snapshot' else ('none',)) + LOADS:
                    mine = layers
                    cells.append(self.one(ctx, label, program, mine, guest, nr, rate))
                    layers = mine if self.what == 'snapshot' else chain(ctx.folder, label, ctx.stall_size, 3, piece=MIB, full_base=True)
            finally:
                for p in layers:
                    remove(p)
        return [c for c in cells if c]

    def one(self, ctx, label, program, layers, guest, nr, copy_bps):
        """idle first, then with the job; both with the same load"""
        os.sync()
        s = program.start(layers[-1], ctx.folder, label, control=True)
        cell = {'kind': 'stall', 'row': self.what, 'load': guest, 'server': label, 'round': nr * 100, 'copy_bps': copy_bps}
        try:
            rate = 0
            if guest != 'none':
                Load('prep', 'prep', rw='randrw', secs=min(ctx.secs, 1)).run(ctx, s.sock)          # what is cold is warm now
                most = Load('most', rw='randrw').run(ctx, s.sock)['iops']
                rate = most * .3 if guest == '30%' else 0
                g = Guest(ctx, s, rate, seed=5)
                time.sleep(2 * ctx.secs)
                cell['idle'] = sight(g.stop())
            with s.qmp() as q:
                g = Guest(ctx, s, rate) if guest != 'none' else None
                if g:
                    time.sleep(.2)
                try:
                    cell.update(self.snapshots(ctx, q, program, layers, label) if self.what == 'snapshot' else self.merge(ctx, q, layers))
                finally:
                    if g:
                        cell['busy'] = sight(g.stop())
        finally:
            s.stop()
        tell(ctx, cell)
        return cell

    def snapshots(self, ctx, q, program, layers, label):
        took, gate, flush = [], [], []
        for i in range(3 if ctx.quick else 10):
            name, path = 'o%s%d' % (os.path.basename(layers[-1])[:1], len(layers)), '%s/%s-s%d.qcow2' % (ctx.folder, label, len(layers))
            run('qemu-img', 'create', '-q', '-f', 'qcow2', '-o', 'cluster_size=128k,extended_l2=on,preallocation=metadata', '-b', layers[-1], '-F', 'qcow2', path)
            top = node_of(q, layers[-1])
            q.execute('blockdev-add', added(program, path, name))
            t = time.monotonic()
            q.execute('blockdev-snapshot', {'node': top, 'overlay': name})
            took.append((time.monotonic() - t) * 1e3)
            if program is ctx.varve:
                e = q.wait_event('X_VARVE_PIVOT', 10)['data']
                gate.append(e['gate-closed-ns'] / 1e6)
                flush.append(e['flush-ns'] / 1e6)
            layers.append(path)
            time.sleep(.3)
        out = {'took_ms': took}
        if gate:
            out.update(gate_ms=gate, gate_flush_ms=flush)
        return out

    def merge(self, ctx, q, layers):
        base, mid, top = (node_of(q, p) for p in layers)
        nbytes = os.stat(layers[1]).st_blocks * 512
        args = {'job-id': 'j', 'device': top, 'auto-dismiss': False, 'base-node': base}
        if self.what == 'commit':
            args['top-node'] = mid
        t = time.monotonic()
        q.execute('block-' + self.what, args)
        progress, still, last, end = 0, 0, t, None
        while not end:
            time.sleep(.01)
            now = time.monotonic()
            j = [j for j in q.execute('query-jobs') if j['id'] == 'j'][0]
            if j['current-progress'] != progress or j['status'] == 'concluded':
                progress, last = j['current-progress'], now
            still = max(still, now - last)
            if j['status'] == 'concluded':
                end = now
                if j.get('error'):
                    raise Failed('block-%s: %s' % (self.what, j['error']))
            elif now - t > 300:
                raise Failed('block-%s is not done after 300 s (%d of %d)' % (self.what, progress, j['total-progress']))
        out = {'job_s': end - t, 'job_bytes': nbytes, 'job_bps': nbytes / (end - t), 'standstill_ms': still * 1e3,
               'job_stall_ms': j.get('x-varve-max-stall-ns', 0) / 1e6}
        q.execute('job-dismiss', id='j')
        return out


def added(program, path, name):
    """blockdev-add of an overlay that nothing is below yet"""
    if hasattr(program, 'node'):
        return program.node(path, name, backing=None)
    return {'driver': 'qcow2', 'node-name': name, 'backing': None, 'discard': 'unmap',
            'file': {'driver': 'file', 'filename': path}, 'cache': {'direct': True, 'no-flush': False}}


def tell(ctx, c):
    text = '%-30s %-22s %-12s' % (c['kind'] + ' ' + c['row'], 'guest ' + c['load'], c['server'])
    for k in ('idle', 'busy'):
        if k in c:
            text += '  %s %6.0f /s p99 %.2f p99.9 %.2f max %.1f ms' % (k, c[k]['iops'], c[k]['p99_us'] / 1e3, c[k]['p999_us'] / 1e3, c[k]['max_us'] / 1e3)
    if 'job_bps' in c:
        text += '  job %.0f MB/s of %.0f, still %.0f ms' % (c['job_bps'] / 1e6, c['copy_bps'] / 1e6, c['standstill_ms'])
    if 'gate_ms' in c:
        text += '  gate %.1f ms (flush %.1f)' % (max(c['gate_ms']), max(c['gate_flush_ms']))
    ctx.say(text)


def rows(ctx):
    for what in ('snapshot', 'commit', 'stream'):
        yield StallRow(ctx, what, True)
