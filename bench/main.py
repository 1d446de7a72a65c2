#!/usr/bin/env python3
"""Measures varve side by side with qemu-storage-daemon and raw: every row of the design's measures.

usage: main.py VARVE --json OUT [--quick] [--rows RE] [--rounds N] [--secs S] [--qsd PROGRAM-OR-TREE]... [--dir DIR] ...

The result is one JSON file, written after every round of a row. Run again with the same file, what is there is not measured
again: a run that was interrupted goes on, `--rounds 5` after `--rounds 3` adds two. report.py makes the page of it.

--quick    every kind of row, fewer of each, small disks, short loads
--rows     only rows whose `kind/name` matches the regular expression; --list shows them
--qsd      a further qemu-storage-daemon: a program, or a tree with a system's files; the one in PATH is always measured
           unless --no-default-qsd
--include  a JSON file with results made elsewhere (counts of allocations on NFS, GFS2, OCFS2 in guests): {"title", "about",
           "columns": [...], "rows": [[...], ...]}; the report shows it as a table
"""
import argparse, json, os, platform, re, signal, sys, time, traceback
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import rows_big, rows_chain, rows_device, rows_disk, rows_pool, rows_stall
from images import GIB, MIB, NoRoom, need_room
from measure import Context, empty
from servers import Failed, Qemu, Varve


def arguments():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument('varve')
    a.add_argument('--json', default='bench.json')
    a.add_argument('--quick', action='store_true')
    a.add_argument('--rows', default='.')
    a.add_argument('--loads', default='.', help='only loads that match (for a closer look; use a result file of its own)')
    a.add_argument('--list', action='store_true')
    a.add_argument('--rounds', type=int)
    a.add_argument('--secs', type=float, help='length of one load')
    a.add_argument('--turns', type=int, help='how often a load that can be repeated is, within a round')
    a.add_argument('--size', type=int, help='bytes of an ordinary disk')
    a.add_argument('--qsd', action='append', default=[])
    a.add_argument('--no-default-qsd', action='store_true')
    a.add_argument('--varve-option', action='append', default=[], help='one more option for every `varve serve`')
    a.add_argument('--nbdload', help='the client (default: bench/nbdload beside VARVE)')
    a.add_argument('--dir', default='/var/tmp/varve-bench', help='a folder of its own on the disk to measure; emptied')
    a.add_argument('--minutes', type=float, help='begin no further row after so many minutes (--quick: 24)')
    a.add_argument('--include', action='append', default=[])
    return a.parse_args()


def load_results(path, quick):
    if os.path.exists(path):
        r = json.load(open(path))
        if r['quick'] != quick:
            sys.exit('%s was made %s --quick: name another file' % (path, 'with' if r['quick'] else 'without'))
        return r
    return {'quick': quick, 'done': [], 'cells': [], 'skipped': {}, 'took': {}, 'failed': {}, 'problems': [], 'included': [], 'about': {}}


def store(path, results):
    with open(path + '.new', 'w') as f:
        json.dump(results, f, indent=0, separators=(',', ':'))
    os.replace(path + '.new', path)


def about(ctx):
    return {'cpus': os.cpu_count(), 'kernel': platform.release().split('-')[0], 'machine': platform.machine(), 'varve': ctx.varve.version(),
            'qemu': {q.label: q.version() for q in ctx.qemus}, 'size': ctx.size, 'secs': ctx.secs, 'turns': ctx.turns, 'date': time.strftime('%Y-%m-%d'),
            'fs': os.popen('stat -f -c %%T %s' % ctx.folder).read().strip(), 'options': ctx.varve.options}


def all_rows(ctx):
    for m in (rows_disk, rows_big, rows_chain, rows_device, rows_stall, rows_pool):
        yield from m.rows(ctx)


def one_round(ctx, row, nr, results):
    key = '%s/%s' % (row.kind, row.name)
    empty(ctx.folder)
    try:
        need_room(ctx.folder, row.room)
        results['cells'] += row.run(ctx, nr)
        results['failed'].pop(key, None)
        results['done'].append('%s#%d' % (key, nr))
    except (NoRoom, rows_device.Skipped) as e:
        results['skipped'][key] = str(e)
        ctx.say('%s: skipped: %s' % (key, e))
    except Exception as e:                      # one row's failure is a result, too; the others are measured
        results['failed'][key] = '%s: %s' % (type(e).__name__, str(e)[-600:])
        print('FAILED %s: %s' % (key, results['failed'][key]), file=sys.stderr, flush=True)
        if not isinstance(e, Failed):
            traceback.print_exc()
    finally:
        t = time.monotonic()
        empty(ctx.folder)
        ctx.say('%s: removed in %.1f s' % (key, time.monotonic() - t))


def main():
    A = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))      # servers, mounts and loop devices go on every way out
    varve = Varve(A.varve, A.varve_option)
    qemus = ([] if A.no_default_qsd else [Qemu()]) + [Qemu(w) for w in A.qsd]
    os.makedirs(A.dir, exist_ok=True)
    nbdload = A.nbdload or os.path.join(os.path.dirname(os.path.abspath(A.varve)), '..', '..', 'bench', 'nbdload')
    secs, size = A.secs or (.3 if A.quick else .7), A.size or (512 * MIB if A.quick else 2 * GIB)
    ctx = Context(varve, qemus, nbdload, A.dir, secs, A.turns or (2 if A.quick else 3), size, A.quick)
    rows = [r for r in all_rows(ctx) if re.search(A.rows, '%s/%s' % (r.kind, r.name)) and (r.quick or not A.quick)]
    if A.list:
        for r in rows:
            print('%s/%s%s' % (r.kind, r.name, '  (quick)' if r.quick else ''))
        return 0
    for r in rows:
        r.loads = [l for l in r.loads if l.phase == 'prep' or re.search(A.loads, l.name)]
    results = load_results(A.json, A.quick)
    results['about'], begin = about(ctx), time.monotonic()
    results['included'] = [json.load(open(p)) for p in A.include] or results['included']
    rounds, minutes = A.rounds or (2 if A.quick else 3), A.minutes or (24 if A.quick else 0)
    for nr in range(rounds):                    # a round of all rows, then the next: what drifts, drifts for all
        for row in rows:
            if '%s/%s#%d' % (row.kind, row.name, nr) in results['done']:
                continue
            if minutes and time.monotonic() - begin > minutes * 60:
                ctx.say('%g minutes are over; run again to go on' % minutes)
                return 0
            t = time.monotonic()
            one_round(ctx, row, nr, results)
            results['took']['%s/%s' % (row.kind, row.name)] = round(time.monotonic() - t, 1)
            results['problems'] = sorted(set(results['problems'] + ctx.problems))
            store(A.json, results)
    ctx.say('%d rows, %d failed, %d skipped, %.1f minutes: %s' % (len(rows), len(results['failed']), len(results['skipped']),
            (time.monotonic() - begin) / 60, A.json))
    return 1 if results['failed'] else 0


if __name__ == '__main__':
    sys.exit(main())
