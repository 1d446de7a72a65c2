"""What the measures must show, and whether they do.

A figure is the median over the rounds of a ratio (or a plain value) taken within one turn; its spread is half the distance
of the quartiles. Verdicts: "ok"; "BELOW" and "ABOVE" (the target is missed); "noise" (the spread is greater than the distance
from the target: nothing is shown either way).
"""
KIB, MIB = 1 << 10, 1 << 20


def median(v):
    s = sorted(v)
    n = len(s)
    return (s[n // 2] + s[(n - 1) // 2]) / 2 if n else None


def split(label):
    """'varve@32M' -> ('varve', '@32M'); 'qemu7.2/64' -> ('qemu7.2', '/64')"""
    for i, ch in enumerate(label):
        if ch in '@/':
            return label[:i], label[i:]
    return label, ''


class Check:
    """values: one for each turn; target None: reported only. op: '>=' or '<='. With a unit it is a count, which one turn can show;
    times and ratios of times cannot be judged by one"""

    def __init__(self, what, kind, row, load, values, target, op='>=', unit='', note=''):
        self.counted = bool(unit)
        self.what, self.kind, self.row, self.load, self.note = what, kind, row, load, note
        self.values, self.target, self.op, self.unit = [v for v in values if v is not None], target, op, unit

    @property
    def median(self):
        return median(self.values)

    @property
    def spread(self):
        """half the distance of the quartiles; of fewer than four values, of the extremes"""
        s = sorted(self.values)
        if len(s) < 4:
            return (s[-1] - s[0]) / 2
        at = lambda q: s[int(q)] + (s[min(int(q) + 1, len(s) - 1)] - s[int(q)]) * (q % 1)
        return (at((len(s) - 1) * .75) - at((len(s) - 1) * .25)) / 2

    @property
    def verdict(self):
        if self.target is None:
            return ''
        if self.spread > abs(self.median - self.target) or (len(self.values) < 2 and not self.counted):
            return 'noise'
        good = self.median >= self.target if self.op == '>=' else self.median <= self.target
        return 'ok' if good else 'BELOW' if self.op == '>=' else 'ABOVE'

    def text(self):
        digits = 2 if abs(self.median) < 100 else 0
        return '%.*f%s' % (digits, self.median, self.unit) + (' ±%.*f' % (digits, self.spread) if len(self.values) > 1 else '')


class Group:
    """all cells of one load of one row: [label][round]"""

    def __init__(self, kind, row, load):
        self.kind, self.row, self.load, self.cells = kind, row, load, {}

    def add(self, cell):
        self.cells.setdefault(cell['server'], {})[cell['round']] = cell
        self.any = cell

    def labels(self, family):
        return [l for l in self.cells if split(l)[0].startswith(family)]

    def med(self, label, field):
        v = [c[field] for c in self.cells.get(label, {}).values() if c.get(field) is not None]
        return median(v)

    def ratio(self, a, b, field='iops'):
        """by rounds that both have"""
        ca, cb = self.cells.get(a, {}), self.cells.get(b, {})
        return [ca[n][field] / cb[n][field] for n in sorted(ca) if n in cb and cb[n].get(field) and ca[n].get(field) is not None]

    def raw(self):
        return 'raw-filled' if 'raw-filled' in self.cells else 'raw' if 'raw' in self.cells else None


def groups(cells):
    out = {}
    for c in cells:
        if c['kind'] not in ('stall', 'list'):
            out.setdefault((c['kind'], c['row'], c['load']), Group(c['kind'], c['row'], c['load'])).add(c)
    return out


def copy_bandwidth(all_groups, g):
    """bytes a second that raw moves in the row's blocks, by round"""
    c = all_groups.get((g.kind, g.row, 'raw copy'))
    return {n: v['iops'] * v['bs'] for n, v in c.cells[c.raw()].items()} if c and c.raw() else {}


def moved(cell):
    return cell['iops'] * (cell['read_b'] + cell['write_b'])


def speed_checks(all_groups, g):
    c = g.any
    queue = c['depth'] * c['conns']
    limit = copy_bandwidth(all_groups, g) if c['copies'] else {}
    for ours in g.labels('varve'):
        variant = split(ours)[1]
        if variant == '/no-steps':
            continue
        for theirs in g.labels('qemu'):
            if split(theirs)[1] != ('' if g.kind == 'multi' else variant):
                continue
            copying = c['copies'] and limit
            full = copying and all(moved(x) >= .9 * limit[n] for n, x in g.cells[theirs].items() if n in limit)
            note = 'QEMU is at the disk\'s bandwidth' if full else ''
            yield Check('of QEMU' if not copying or full else 'of QEMU, copying', g.kind, g.row, g.load + variant, g.ratio(ours, theirs), 2.0 if copying and not full else 1.0, note=note)
            if c['phase'] != 'cold' and (queue == 1 or queue >= 16):
                yield Check('CPU of QEMU\'s, depth %s' % ('1' if queue == 1 else '16 and more'), g.kind, g.row, g.load + variant, g.ratio(ours, theirs, 'cpu_us'),
                            1.0 if queue == 1 else .5, '<=')
        raw = g.raw()
        if raw and not c['copies'] and c['phase'] not in ('cold', 'lookup') and not (g.kind == 'fsync' and c['phase'] == 'first'):
            yield Check('of raw', g.kind, g.row, g.load + variant, g.ratio(ours, raw), .95)


def copy_checks(all_groups, g):
    c = g.any
    limit = copy_bandwidth(all_groups, g)
    for ours in g.labels('varve'):
        if not c['copies'] or split(ours)[1] == '/internal':
            continue
        cells = g.cells[ours].values()
        for what in 'write_b', 'read_b':
            yield Check('bytes %s a copying write' % ('written' if what == 'write_b' else 'read'), g.kind, g.row, g.load + split(ours)[1],
                        [x[what] / KIB for x in cells], (c['copies'] + 8 * KIB) / KIB, '<=', ' KiB')
        if limit and c['depth'] >= 16:
            yield Check('bandwidth of raw, copying', g.kind, g.row, g.load + split(ours)[1], [moved(x) / limit[x['round']] for x in cells if x['round'] in limit], .9)


def pair_checks(g):
    """varve against itself"""
    steady = g.any['phase'] in ('steady', 'lookup')
    if g.kind in ('1T', 'fragmented') and steady:
        entropy = g.row == '4M clusters of 16M'
        hit = g.med('varve@32M', 'hit_rate')
        yield Check('32 MiB of 1 GiB', g.kind, g.row, g.load, g.ratio('varve@32M', 'varve@1G'), None if entropy else .95,
                    note='' if hit is None else '%.2f %% of the lookups hit' % (100 * hit))
    if g.kind == 'chain' and steady and 'read' in g.load:
        for d in '8', '64':
            yield Check('depth %s of depth 1' % d, g.kind, g.row, g.load, g.ratio('varve/' + d, 'varve/1'), .95)
    if g.kind == 'ack':
        yield Check('ack of flush', g.kind, g.row, g.load, g.ratio('ack', 'flush'), .97)
    if g.kind == 'grow':
        yield Check('with steps of without', g.kind, g.row, g.load, g.ratio('varve', 'varve/no-steps'), None)


def count_checks(g):
    if g.kind == 'fsync' and g.any.get('dev_flushes') is not None:
        each = lambda l: {n: x['dev_flushes'] / max(x['flushes'], 1) for n, x in g.cells[l].items()}
        for theirs in g.labels('qemu'):
            a, b = each('varve'), each(theirs)
            yield Check('device flushes of QEMU\'s', g.kind, g.row, g.load, [a[n] / b[n] for n in a if b.get(n)], 1.0, '<=', ' times',
                        note='%.2f a guest flush, QEMU %.2f' % (median(list(a.values())), median(list(b.values()))))
    if g.kind == 'memory':
        for ours in g.labels('varve'):
            yield Check('memory over the bound', g.kind, g.row, g.load + split(ours)[1],
                        [(x['hwm'] - x['cache']) / MIB for x in g.cells[ours].values()], 16, '<=', ' MiB')


def stall_checks(cells):
    by = {}
    for c in cells:
        if c['kind'] == 'stall' and c['server'] == 'varve':
            by.setdefault((c['row'], c['load']), []).append(c)
    for (row, load), v in by.items():
        name = 'guest ' + load
        if row == 'snapshot':
            yield Check('gate without the flush', 'stall', row, name, [max(a - b for a, b in zip(c['gate_ms'], c['gate_flush_ms'])) for c in v], 10, '<=', ' ms')
            continue
        if load != 'full':
            yield Check('deletion of the copy rate, %s' % ('no guest' if load == 'none' else name), 'stall', row, name,
                        [c['job_bps'] / c['copy_bps'] for c in v], .8 if load == 'none' else .4)
        else:
            yield Check('longest standstill of a deletion', 'stall', row, name, [c['standstill_ms'] for c in v], 1000, '<=', ' ms')
        if load != 'none':
            yield Check('p99 of idle p99, deletion', 'stall', row, name, [c['busy']['p99_us'] / c['idle']['p99_us'] for c in v], 3, '<=')


def list_checks(cells):
    for row in dict.fromkeys(c['row'] for c in cells if c['kind'] == 'list'):
        v = [c for c in cells if c['kind'] == 'list' and c['row'] == row]
        yield Check('list of a pool', 'list', row, v[0]['load'], [c['secs'] for c in v], 1, '<=', ' s')
        if any(c['commands'] for c in v):
            yield Check('LVM commands of a list', 'list', row, v[0]['load'], [c['commands'] for c in v], 1, '<=', ' ')
        yield Check('programs that a list runs', 'list', row, v[0]['load'], [c.get('programs') for c in v if not c['commands']], 0, '<=', ' ')


def checks(cells):
    gs = groups(cells)
    out = []
    for g in gs.values():
        if g.load != 'raw copy':
            for some in speed_checks(gs, g), copy_checks(gs, g), pair_checks(g), count_checks(g):
                out += some
    return [c for c in out + list(stall_checks(cells)) + list(list_checks(cells)) if c.values]
