"""The figures of docs/performance.svg: plain SVG, one panel below the other."""
from math import log10
from xml.sax.saxutils import escape
from targets import groups, median, split

WIDTH, LEFT, RIGHT = 860, 300, 790
COLORS = ('#2a7', '#c54', '#46b', '#a63', '#888', '#849')


class Page:
    def __init__(self):
        self.out, self.y = [], 20

    def text(self, x, y, s, anchor='start', size=11, weight='normal', fill='black'):
        self.out.append('<text x="%.1f" y="%.1f" text-anchor="%s" font-size="%d" font-weight="%s" fill="%s">%s</text>' % (x, y, anchor, size, weight, fill, escape(s)))

    def line(self, x1, y1, x2, y2, color='black', dash='', width=1):
        self.out.append('<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" stroke="%s" stroke-width="%g"%s/>' % (
            x1, y1, x2, y2, color, width, ' stroke-dasharray="%s"' % dash if dash else ''))

    def title(self, s):
        self.text(10, self.y + 6, s, size=13, weight='bold')
        self.y += 22

    def svg(self):
        return ('<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif"><rect width="100%%" height="100%%" fill="white"/>\n%s\n</svg>\n'
                % (WIDTH, self.y + 10, '\n'.join(self.out)))


def dots(p, title, checks, most=3.0):
    """a line for each figure: the median as a dot, the rounds as a bar, the target as a dashed line"""
    if not checks:
        return
    p.title(title)
    x = lambda v: LEFT + min(v, most) / most * (RIGHT - LEFT)
    top = p.y
    for c in checks:
        p.y += 13
        color = {'ok': '#2a7', 'noise': '#999'}.get(c.verdict, '#c22')
        p.text(LEFT - 8, p.y + 4, '%s: %s, %s' % (c.kind, c.row, c.load), 'end', 10)
        p.line(x(min(c.values)), p.y, x(max(c.values)), p.y, color, width=3)
        p.out.append('<circle cx="%.1f" cy="%.1f" r="3.5" fill="%s"/>' % (x(c.median), p.y, color))
        p.text(x(min(max(c.values), most)) + 6, p.y + 4, '%.2f' % c.median, size=9)
    for t in sorted({c.target for c in checks if c.target is not None}):
        p.line(x(t), top, x(t), p.y + 8, '#000', '3 3')
        p.text(x(t), top + 2, '%g' % t, 'middle', 9)
    p.y += 28


def curves(p, title, series, ylabel, xs):
    """series: [(name, [(x index, value)])]; an even step for each x"""
    series = [(n, v) for n, v in series if v]
    if not series:
        return
    p.title(title)
    top, height = p.y, 150
    most = max(v for _, pts in series for _, v in pts) * 1.1
    x = lambda i: 80 + i * (520 / max(len(xs) - 1, 1))
    y = lambda v: top + height - v / most * height
    p.line(80, top + height, 600, top + height)
    p.line(80, top, 80, top + height)
    for f in (.25, .5, .75, 1):
        p.line(80, y(most * f), 600, y(most * f), '#ddd')
        p.text(76, y(most * f) + 4, '%.0f' % (most * f) if most > 10 else '%.2f' % (most * f), 'end', 9)
    for i, label in enumerate(xs):
        if len(xs) < 10 or i % 2:
            p.text(x(i), top + height + 14, str(label), 'middle', 10)
    for k, (name, pts) in enumerate(series):
        color = COLORS[k % len(COLORS)]
        p.out.append('<polyline fill="none" stroke="%s" stroke-width="2" points="%s"/>' % (color, ' '.join('%.1f,%.1f' % (x(i), y(v)) for i, v in pts)))
        p.text(615, top + 12 + 14 * k, name, fill=color)
    p.text(80, top - 4, ylabel, size=9)
    p.y += height + 40


def chain_curves(p, gs):
    for g in gs.values():
        if g.kind == 'chain' and g.load in ('randread d32', 'cold randread d32'):
            names = dict.fromkeys(split(l)[0] for l in g.cells)
            depths = [d for d in (1, 8, 64) if any('%s/%d' % (n, d) in g.cells for n in names)]
            curves(p, 'Chain, %s: %s' % (g.row, g.load), [(n, [(i, g.med('%s/%d' % (n, d), 'iops')) for i, d in enumerate(depths) if '%s/%d' % (n, d) in g.cells]) for n in names],
                   'requests a second by layers', depths)


def ack_curves(p, gs):
    for phase, title in (('first randwrite d', 'writes to new places'), ('randwrite d', 'writes in place')):
        found = {}
        for g in gs.values():
            if g.kind == 'ack' and g.load.startswith(phase):
                r = g.ratio('ack', 'flush')
                if r:
                    found.setdefault(g.row, []).append((int(g.load.rsplit('d', 1)[1]), median(r)))
        queue = sorted({q for v in found.values() for q, _ in v})
        curves(p, 'ack as a share of flush, %s' % title, [(row, [(queue.index(q), r) for q, r in sorted(v)]) for row, v in found.items()], 'ratio by queue depth', queue)


def stall_histograms(p, cells):
    """share of requests above a latency, idle and busy; x: powers of two of microseconds"""
    st = [c for c in cells if c['kind'] == 'stall' and 'busy' in c and c['load'] == '30%']
    for what in dict.fromkeys(c['row'] for c in st):
        series = []
        for server in dict.fromkeys(c['server'] for c in st):
            for k in ('idle', 'busy'):
                v = [c[k]['octaves'] for c in st if c['row'] == what and c['server'] == server]
                if not v:
                    continue
                total = [sum(o) for o in zip(*v)]
                n, above, pts = sum(total), sum(total), []
                for i, t in enumerate(total):
                    above -= t
                    if 5 <= i <= 19:
                        pts.append((i - 5, max(0, 6 + log10(above / n)) if n and above else 0))
                series.append(('%s, %s' % (server, k if k == 'idle' else what), pts))
        curves(p, 'Guest at 30 %%, %s: requests slower than ...' % what, series, '6: all, 4: one in 100, 3: one in 1000, 0: one in a million or none',
               ['%d us' % 2**i if i < 10 else '%d ms' % 2**(i - 10) for i in range(5, 20)])


def page(cells, checks):
    p, gs = Page(), groups(cells)
    kinds = ('base', 'fresh', 'clone', 'internal', 'multi', 'fio')
    pick = lambda what, kinds: [c for c in checks if c.what.startswith(what) and c.kind in kinds and ('d32' in c.load or 'c' in c.load[-2:] or '64k' in c.load)]
    dots(p, 'Requests a second as a multiple of QEMU\'s (depth 32 and sequential)', pick('of QEMU', kinds))
    dots(p, 'As a share of raw (rows that copy nothing)', pick('of raw', kinds), 2.0)
    dots(p, 'CPU a request as a share of QEMU\'s', pick('CPU', kinds), 1.5)
    dots(p, '1 TiB: as a multiple of QEMU\'s with the same bound', [c for c in checks if c.what.startswith('of QEMU') and c.kind in ('1T', 'fragmented') and 'd32' in c.load], 4.0)
    dots(p, '1 TiB: 32 MiB as a share of 1 GiB', [c for c in checks if c.what == '32 MiB of 1 GiB'], 1.5)
    dots(p, 'Flushes between writes, as a multiple of QEMU\'s', [c for c in checks if c.kind == 'fsync' and c.what == 'of QEMU'])
    chain_curves(p, gs)
    ack_curves(p, gs)
    stall_histograms(p, cells)
    return p.svg()
