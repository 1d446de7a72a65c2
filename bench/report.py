#!/usr/bin/env python3
"""Makes docs/performance.md and docs/performance.svg from the results of table.py.

usage: report.py RESULTS.json [--out DIR]
Medians of the runs; ratios within the one run that made RESULTS.json.
"""
import argparse, json, os, platform, subprocess


def median(v):
    return sorted(v)[len(v) // 2] if v else 0


def collect(results):
    """{(row, rw): {server: {'iops', 'cpu_us', 'p99us', 'rss_mb'}}} in the order of the results"""
    out = {}
    for r in results:
        out.setdefault((r['row'], r['rw']), {}).setdefault(r['server'], []).append(r)
    return {k: {s: {f: median([r[f] for r in rs]) for f in ('iops', 'cpu_us', 'p99us', 'rss_mb')} for s, rs in v.items()}
            for k, v in out.items()}


def ratio(a, b):
    return '%.2f' % (a / b) if b else '-'


def table(rows):
    raw = {rw: v for (row, rw), v in rows.items() if row == 'raw'}
    big = {rw: v for (row, rw), v in rows.items() if row == '1T,raw'}
    lines = ['| row | load | varve | QEMU | varve : QEMU | CPU a request, varve | QEMU | varve : raw | memory, varve | QEMU |',
             '|---|---|---:|---:|---:|---:|---:|---:|---:|---:|']
    for (row, rw), v in rows.items():
        a, b = v.get('varve'), v.get('qemu')
        if not a or not b:
            continue
        base = (big if row.startswith('1T') else raw).get(rw, {}).get('varve', {}).get('iops', 0)
        lines.append('| %s | %s | %d | %d | **%s** | %.1f us | %.1f us | %s | %d MB | %d MB |' % (
            row, rw, a['iops'], b['iops'], ratio(a['iops'], b['iops']), a['cpu_us'], b['cpu_us'], ratio(a['iops'], base),
            a['rss_mb'], b['rss_mb']))
    return lines


def svg(rows):
    """bars: requests a second of varve as a multiple of QEMU's; the line is 1"""
    bars = [('%s %s' % k, v['varve']['iops'] / v['qemu']['iops']) for k, v in rows.items()
            if 'varve' in v and v.get('qemu', {}).get('iops')]
    left, step, width, top = 270, 20, 420, 30
    most = max([r for _, r in bars] + [2])
    x = lambda r: left + r / most * width
    out = ['<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="12">'
           % (left + width + 60, top + step * len(bars) + 10), '<rect width="100%" height="100%" fill="white"/>',
           '<text x="%d" y="18">requests a second, varve as a multiple of qemu-storage-daemon</text>' % left]
    for i, (name, r) in enumerate(bars):
        y = top + i * step
        out += ['<text x="%d" y="%d" text-anchor="end">%s</text>' % (left - 8, y + 12, name),
                '<rect x="%d" y="%d" width="%.1f" height="14" fill="%s"/>' % (left, y, x(r) - left, '#2a7' if r >= 1 else '#c54'),
                '<text x="%.1f" y="%d">%.2f</text>' % (x(r) + 4, y + 12, r)]
    out += ['<line x1="%.1f" y1="%d" x2="%.1f" y2="%d" stroke="black" stroke-dasharray="3 3"/>' % (x(1), top - 4, x(1), top + step * len(bars)),
            '</svg>']
    return '\n'.join(out) + '\n'


def main():
    a = argparse.ArgumentParser()
    a.add_argument('results'); a.add_argument('--out', default=os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'docs'))
    A = a.parse_args()
    rows = collect(json.load(open(A.results)))
    qemu = subprocess.run(['qemu-storage-daemon', '--version'], stdout=subprocess.PIPE, text=True).stdout.split('\n')[0]
    text = ['# Performance', '', 'Made by `make bench` and `bench/report.py bench.json`. 4k random requests at depth 32 over NBD on a unix socket (fio\'s nbd',
            'engine), direct I/O, %d cores, Linux %s, %s.' % (os.cpu_count(), platform.release().split('-')[0], qemu),
            'Servers alternate in one run; figures are medians. Machines are shared and noisy: the ratios say more than the',
            'numbers. "CPU a request" is user and system time of the server process. "raw" is the same server over a raw file.', '',
            '![ratios](performance.svg)', '', *table(rows), '']
    notes = os.path.join(A.out, 'performance-notes.md')
    if os.path.exists(notes):
        text += open(notes).read().rstrip('\n').split('\n') + ['']
    open(os.path.join(A.out, 'performance.md'), 'w').write('\n'.join(text))
    open(os.path.join(A.out, 'performance.svg'), 'w').write(svg(rows))


if __name__ == '__main__':
    main()
