#!/usr/bin/env python3
"""Makes docs/performance.md and docs/performance.svg from the result of main.py.

usage: report.py RESULTS.json [--out DIR] [--notes FILE]
"""
import argparse, json, os, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import plots
from targets import checks, groups, median, split

HERE = os.path.dirname(os.path.abspath(__file__))
KINDS = {
    'base': ('Base images', 'Disks whose clusters are all there and filled with data.'),
    'fresh': ('Images that are written for the first time', 'Nothing in them, nothing below them. raw: space allocated, never written.'),
    'clone': ('Linked clones', 'An overlay on a filled base. `first`: places that the clone does not have; where its (sub)cluster is larger than 4 KiB, every write copies.'),
    'internal': ('Snapshots inside the image and outside', 'One snapshot of a filled image: QEMU\'s internal one (`/internal`), or an overlay (128k, extended L2).'),
    '1T': ('1 TiB with little memory', 'Metadata caches bounded to 32 MiB and to 1 GiB (QEMU: l2-cache-size of each layer). `lookup`: reads everywhere, of places never written, which cost the lookup and no device; `cold`: the first 4000. Other loads meet data at places all over the disk.'),
    'fragmented': ('1 TiB, clusters in no order', '64 KiB clusters at random places of the file.'),
    'memory': ('Memory', 'Bound 32 MiB; the most that the process held (VmHWM), libraries and shared memory included.'),
    'chain': ('Chains with data in every layer', 'Every block is in one of 1, 8 or 64 layers (`/1`, `/8`, `/64`), at random; `/64+preload`: `--preload`.'),
    'ack': ('Answered writes that survive a kill', 'varve with `--durability ack` against `--durability flush`, extended L2, data in every layer.'),
    'fsync': ('Flushes between writes', 'Each of the depth\'s programs flushes behind every write (fsync=1) or every 32 writes. Device flushes are the kernel\'s count for the loop device that holds the disk.'),
    'grow': ('Files that grow', 'An image without preallocation on a file system of its own; `varve/no-steps`: `--preallocate off`. Extents of the file while it is served.'),
    'multi': ('Several connections', '1, 2 and 4 connections (`c1`, `c2`, `c4`) at depth 32 each; `/threads2`: `--threads 2`.'),
    'fio': ('The same with fio', 'fio\'s nbd engine (libnbd) as client: slower than the client of the other rows, known to everybody.'),
}


def num(v, digits=0):
    return '-' if v is None else '%.*f' % (digits, v)


def ratio_cell(cs, what):
    for c in cs:
        if c.what.startswith(what):
            mark = {'BELOW': ' **below**', 'ABOVE': ' **above**', 'noise': ' (noise)'}.get(c.verdict, '')
            return c.text() + mark
    return '-'


def by_row(all_checks):
    out = {}
    for c in all_checks:
        out.setdefault((c.kind, c.row, c.load), []).append(c)
    return out


def kind_table(kind, gs, cs):
    """a line for each load and each variant of the contenders"""
    qemu = sorted({split(l)[0] for g in gs for l in g.labels('qemu')})
    lines = ['| row | load | varve /s | %s | raw /s | of QEMU | of raw | CPU us | QEMU us | of QEMU\'s CPU | read, written a request | p99 ms | QEMU ms |' % ' | '.join(q + ' /s' for q in qemu),
             '|---|---|---:|%s---:|---:|---:|---:|---:|---:|---:|---:|---:|' % ('---:|' * len(qemu))]
    for g in gs:
        if g.load == 'raw copy':
            continue
        for ours in g.labels('varve'):
            v = split(ours)[1]
            c = cs.get((g.kind, g.row, g.load + v), [])
            q0 = qemu[0] + (v if kind != "multi" else "") if qemu else ''
            lines.append('| %s | %s | %s | %s | %s | %s | %s | %s | %s | %s | %s, %s | %s | %s |' % (
                g.row, g.load + (' ' + v if v else ''), num(g.med(ours, 'iops')), ' | '.join(num(g.med(q + (v if kind != "multi" else ""), "iops")) for q in qemu),
                num(g.med(g.raw(), 'iops')) if g.raw() else '-', ratio_cell(c, 'of QEMU'), ratio_cell(c, 'of raw'), num(g.med(ours, 'cpu_us'), 1),
                num(g.med(q0, 'cpu_us'), 1), ratio_cell(c, 'CPU'), num(g.med(ours, 'read_b')), num(g.med(ours, 'write_b')),
                num(g.med(ours, 'p99_us') / 1e3, 2), num(g.med(q0, 'p99_us') / 1e3 if g.med(q0, 'p99_us') is not None else None, 2)))
    return lines


def ack_table(gs, cs):
    lines = ['| chain | load | flush /s | ack /s | ack of flush | CPU us, flush | ack |', '|---|---|---:|---:|---:|---:|---:|']
    for g in gs:
        lines.append('| %s | %s | %s | %s | %s | %s | %s |' % (g.row, g.load, num(g.med('flush', 'iops')), num(g.med('ack', 'iops')),
                     ratio_cell(cs.get((g.kind, g.row, g.load), []), 'ack'), num(g.med('flush', 'cpu_us'), 1), num(g.med('ack', 'cpu_us'), 1)))
    return lines


def extra_table(kind, gs, cs):
    """what only one kind has"""
    lines = []
    if kind == 'fsync':
        lines = ['', '| row | load | guest flushes a device flush | | | varve of QEMU |', '|---|---|---:|---:|---:|---:|',
                 '| | | varve | QEMU | raw | (device flushes a guest flush) |']
        for g in gs:
            each = lambda l: median([x['dev_flushes'] / max(x['flushes'], 1) for x in g.cells[l].values()]) if l in g.cells else None
            q = (g.labels('qemu') or [''])[0]
            lines.append('| %s | %s | %s | %s | %s | %s |' % (g.row, g.load, num(each('varve'), 2), num(each(q), 2), num(each('raw'), 2),
                         ratio_cell(cs.get((g.kind, g.row, g.load), []), 'device flushes')))
        lines[1] = '| row | load | varve | QEMU | raw | varve of QEMU |'
        lines[3:4] = []
        lines[0:1] = ['', 'Device flushes for each flush of the guest:', '']
    if kind == 'grow':
        lines = ['', '| file system | load | server | extents, served | closed | MiB, served | closed | device writes a request |', '|---|---|---|---:|---:|---:|---:|---:|']
        for g in gs:
            for l in g.cells:
                lines.append('| %s | %s | %s | %s | %s | %s | %s | %s |' % (g.row, g.load, l, num(g.med(l, 'extents')), num(g.med(l, 'extents_closed')),
                             num(g.med(l, 'file_mb')), num(g.med(l, 'file_closed_mb')), num(g.med(l, 'dev_writes'), 2)))
    if kind == 'memory':
        lines = ['', '| row | load | server | most memory MiB | PSS | over the bound |', '|---|---|---|---:|---:|---:|']
        for g in gs:
            for l in g.cells:
                lines.append('| %s | %s | %s | %s | %s | %s |' % (g.row, g.load, l, num(g.med(l, 'hwm') / 2**20), num(g.med(l, 'pss') / 2**20),
                             ratio_cell(cs.get((g.kind, g.row, g.load + split(l)[1]), []), 'memory') if l.startswith('varve') else ''))
    return lines


def pair_table(gs, cs, what, head):
    lines = []
    for g in gs:
        found = [c for c in cs.get((g.kind, g.row, g.load), []) if c.what.endswith(what) and 'of QEMU' not in c.what]
        if found:
            lines.append('| %s | %s | %s | %s |' % (g.row, g.load, ', '.join('%s: %s' % (c.what, ratio_cell([c], c.what)) for c in found), found[0].note))
    return ['', head, '', '| row | load | | |', '|---|---|---|---|', *lines] if lines else []


def stall_tables(cells, all_checks):
    st = [c for c in cells if c['kind'] == 'stall']
    if not st:
        return []
    lines = ['## Snapshots and their deletion under load', '',
             'The guest reads and writes 4 KiB, half and half, at depth 32: at 30 % of what the server can do (latencies from the scheduled moment) or as fast as it can.',
             'Deletion merges a layer with a third of the data down (commit) or up (stream).', '',
             '| what | guest | server | /s idle, busy | p50 ms idle, busy | p99 | p99.9 | max | job MB/s (of the copy rate) | longest standstill ms | gate ms (of it flush) |',
             '|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|']
    for key in dict.fromkeys((c['row'], c['load'], c['server']) for c in st):
        v = [c for c in st if (c['row'], c['load'], c['server']) == key]
        two = lambda f, s=1e3: '-' if 'busy' not in v[0] else '%.2f, %.2f' % tuple(median([c[k][f] for c in v]) / s for k in ('idle', 'busy'))
        job = '%.0f (%.2f)' % (median([c['job_bps'] for c in v]) / 1e6, median([c['job_bps'] / c['copy_bps'] for c in v])) if 'job_bps' in v[0] else '-'
        gate = '%.1f (%.1f)' % (median([max(c['gate_ms']) for c in v]), median([max(c['gate_flush_ms']) for c in v])) if 'gate_ms' in v[0] else '-'
        lines.append('| %s | %s | %s | %s | %s | %s | %s | %s | %s | %s | %s |' % (*key, two('iops', 1).replace('.00', ''), two('p50_us'), two('p99_us'), two('p999_us'), two('max_us'),
                     job, num(median([c['standstill_ms'] for c in v])) if 'standstill_ms' in v[0] else '-', gate))
    return lines + ['']


def list_table(cells):
    mine = [c for c in cells if c['kind'] == 'list']
    if not mine:
        return []
    lines = ['## Lists', '', '`varve list` of %s. Nothing of a volume group is active; its headers are read from the device each time.' % mine[0]['load'], '',
             '| pool | s | CPU s, with LVM\'s | LVM commands | images opened |', '|---|---:|---:|---:|---:|']
    for row in dict.fromkeys(c['row'] for c in mine):
        v = [c for c in mine if c['row'] == row]
        opened = [c['opens'] for c in v if c.get('opens') is not None]
        lines.append('| %s | %s | %s | %s | %s |' % (row, num(median([c['secs'] for c in v]), 2), num(median([c['cpu_s'] for c in v]), 2),
                     num(median([c['commands'] for c in v])), num(median(opened)) if opened else '-'))
    return lines + ['']


def summary(all_checks):
    lines = ['## Targets', '', '| target | | figures | ok | noise | missed |', '|---|---|---:|---:|---:|---:|']
    names = dict.fromkeys((c.what, c.op, c.target, c.unit) for c in all_checks if c.target is not None)
    for what, op, target, unit in names:
        v = [c for c in all_checks if (c.what, c.op, c.target) == (what, op, target)]
        n = lambda k: sum(c.verdict in k for c in v)
        lines.append('| %s | %s %g%s | %d | %d | %d | %d |' % (what, op, target, unit, len(v), n(('ok',)), n(('noise',)), n(('BELOW', 'ABOVE'))))
    missed = [c for c in all_checks if c.verdict in ('BELOW', 'ABOVE')]
    lines += ['', 'A figure is the median of the ratios, each taken within one turn, ± half the distance of the quartiles. *noise*: that is more than its distance from the target.', '']
    if missed:
        lines += ['### Missed', '', '| row | load | target | | figure | |', '|---|---|---|---|---:|---|']
        lines += ['| %s: %s | %s | %s | %s %g%s | **%s** | %s |' % (c.kind, c.row, c.load, c.what, c.op, c.target, c.unit, c.text(), c.note) for c in missed]
        lines.append('')
    return lines


def profile_tables(profiles):
    if not profiles:
        return []
    loads = list(dict.fromkeys(k for p in profiles for k in p['loads']))
    lines = ['## Instructions a request', '', 'callgrind, user code of the server only: the difference between a long and a short run (`bench/profile.py`; under valgrind threads stand in for io_uring).', '',
             '| load | %s |' % ' | '.join(p['label'] for p in profiles), '|---|%s' % ('---:|' * len(profiles))]
    for k in loads:
        lines.append('| %s | %s |' % (k, ' | '.join(num(p['loads'].get(k, {}).get('instructions')) for p in profiles)))
    last = profiles[-1]
    for k, v in last['loads'].items():
        if v.get('top'):
            lines += ['', '%s, %s, instructions a request by function: %s' % (last['label'], k, ', '.join('`%s` %d' % (f, n) for f, n in v['top'][:12]))]
    return lines + ['']


def included(tables):
    lines = []
    for t in tables:
        lines += ['## ' + t['title'], '', t.get('about', ''), '', '| %s |' % ' | '.join(t['columns']), '|%s' % ('---|' * len(t['columns']))]
        lines += ['| %s |' % ' | '.join(str(x) for x in r) for r in t['rows']] + ['']
    return lines


def head(r):
    a = r['about']
    rounds = len({c['round'] // 100 for c in r['cells']})
    return ['# Performance', '', 'Made by `make bench%s`: %d round%s of %d turns, loads of %g s, disks of %d MiB on %s, %d cores, Linux %s, %s.' % (
                '-quick' if r['quick'] else '', rounds, '' if rounds == 1 else 's', a['turns'], a['secs'], a['size'] >> 20, a['fs'], a['cpus'], a['kernel'], a['date']),
            '%s; %s. All contenders of a row are open at once and take turns at every load,' % (a['varve'], '; '.join('%s: %s' % kv for kv in a['qemu'].items())),
            'over NBD on a unix socket with one client (`bench/nbdload.c`), direct I/O, io_uring. 4 KiB requests unless the load says otherwise; `d32` is the depth.',
            '"raw" is varve over a raw file, filled where the others are. CPU is user and system time of the server. Ratios say more than numbers: machines are noisy.', '',
            '![ratios](performance.svg)', '']


def page(r, notes):
    all_checks, gs = checks(r['cells']), groups(r['cells'])
    cs, text = by_row(all_checks), head(r) + summary(all_checks)
    for kind, (title, about) in KINDS.items():
        mine = [g for g in gs.values() if g.kind == kind]
        if not mine:
            continue
        text += ['## ' + title, '', about, '']
        text += ack_table(mine, cs) if kind == 'ack' else kind_table(kind, mine, cs)
        text += extra_table(kind, mine, cs)
        text += pair_table(mine, cs, 'of 1 GiB', '32 MiB of memory against 1 GiB:') + pair_table(mine, cs, 'of depth 1', 'Deep against flat, warm:')
        text.append('')
    text += stall_tables(r['cells'], all_checks) + list_table(r['cells']) + included(r.get('included', [])) + profile_tables(r.get('profiles', []))
    if r['skipped'] or r['failed'] or r['problems']:
        text += ['## Not measured', '']
        text += ['- %s: %s' % (k, v.replace('\n', ' ')) for k, v in {**r['skipped'], **r['failed']}.items()] + ['- ' + p for p in r['problems']] + ['']
    if os.path.exists(notes):
        text += open(notes).read().rstrip('\n').split('\n') + ['']
    return '\n'.join(text), all_checks


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument('results')
    a.add_argument('--out', default=os.path.join(HERE, '..', 'docs'))
    a.add_argument('--notes', default=os.path.join(HERE, 'notes.md'))
    A = a.parse_args()
    r = json.load(open(A.results))
    text, all_checks = page(r, A.notes)
    with open(os.path.join(A.out, 'performance.md'), 'w') as f:
        f.write(text)
    with open(os.path.join(A.out, 'performance.svg'), 'w') as f:
        f.write(plots.page(r['cells'], all_checks))
    missed = [c for c in all_checks if c.verdict in ('BELOW', 'ABOVE')]
    print('%d figures with a target, %d missed, %d noise' % (sum(c.target is not None for c in all_checks), len(missed), sum(c.verdict == 'noise' for c in all_checks)))


if __name__ == '__main__':
    main()
