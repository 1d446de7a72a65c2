"""Rows, loads, and the one way in which they are measured: all contenders of a row are open at the same time and
take turns at every load, in an order that changes. Several short turns are better than a long one: the pairs lie closer
together. A cell is one turn; its `round` is 100 * round + turn.
"""
import json, os, subprocess, sys, time
from counters import Usage, memory, reset_peak
from servers import Failed


class Load:
    """one load of nbdload. phase: cold (the first requests after opening), first (places never written before in this
    image), steady, lookup (reads of holes: no device), prep (not measured). copies: bytes of the (sub)cluster that a write of it has to fill up, 0: nothing"""

    def __init__(self, name, phase='steady', copies=0, only=None, **args):
        self.name, self.phase, self.copies, self.only = name, phase, copies, only
        self.args = dict({'rw': 'randread', 'bs': 4096, 'depth': 32}, **args)

    def part(self, k, n):
        """the k-th of n loads on as many parts of the same places: what can be done only once to each place"""
        a = dict(self.args, span=self.args['span'] // n // self.args['bs'] * self.args['bs'])
        a['from'] = self.args['from'] + k * a['span']
        if 'slots' in a:
            a['slots'] = max(a['slots'] // n, 1)
        return Load(self.name, self.phase, self.copies, self.only, **a)

    def argv(self, ctx, sock):
        out = [ctx.nbdload, sock]
        args = dict({'secs': ctx.secs}, **self.args)
        for k, v in args.items():
            if v is True:
                out.append('--' + k.replace('_', '-'))
            elif v not in (None, False):
                out += ['--' + k.replace('_', '-'), str(v)]
        return out

    def run(self, ctx, sock):
        p = subprocess.run(self.argv(ctx, sock), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=180)
        if p.returncode:
            raise Failed('nbdload: ' + p.stderr.strip()[-500:])
        return json.loads(p.stdout)


class Contender:
    """what is opened for a row: a program, an image, options. place: the loop device whose counters matter, if any"""

    def __init__(self, label, program, image, cache=None, options=(), place=None):
        self.label, self.program, self.image, self.cache, self.options, self.place = label, program, image, cache, options, place


class Row:
    """build(ctx, folder, places) -> [Contender]; made anew for every round. Loop devices go into places. quick: part of --quick;
    room: bytes of disk that it takes at most; turns: a row that needs more of them"""

    def __init__(self, kind, name, build, loads, quick=False, room=0, turns=1):
        self.kind, self.name, self.build, self.loads, self.quick, self.room, self.turns = kind, name, build, loads, quick, room, turns

    def run(self, ctx, nr):
        places, servers, begin = [], {}, time.monotonic()
        try:
            contenders = self.build(ctx, ctx.folder, places)
            os.sync()
            built = time.monotonic()
            for c in contenders:
                servers[c.label] = c.program.start(c.image, ctx.folder, c.label.replace('/', '_'), c.cache, control=c.program is ctx.varve, options=c.options)
            cells = []
            for load in self.loads:
                turns = ctx.turns * self.turns if load.phase in ('steady', 'lookup', 'first') else 1
                for k in range(turns):
                    some = load.part(k, turns) if load.phase == 'first' else load
                    for c in turn(contenders, nr * turns + k):
                        if not load.only or load.only(c.label):
                            cells += measure(ctx, self, some, c, servers[c.label], nr * 100 + k)
            ctx.say('%s: images %.1f s, loads %.1f s' % (self.name, built - begin, time.monotonic() - built))
            return cells
        finally:
            for s in servers.values():
                s.stop()
            for p in places:
                p.close()


def turn(things, nr):
    """the order of round nr: rotated, every other time backwards"""
    k = nr // 2 % len(things)
    order = things[k:] + things[:k]
    return order[::-1] if nr % 2 else order


def measure(ctx, row, load, c, server, nr):
    reset_peak(server.pid)
    before = lookups(server)
    use = Usage(server.pid, c.place)
    r = load.run(ctx, server.sock)
    if load.phase == 'prep':
        return []
    cell = {'kind': row.kind, 'row': row.name, 'load': load.name, 'server': c.label, 'round': nr, 'phase': load.phase,
            'copies': load.copies, 'depth': r['depth'], 'conns': r['conns'], 'bs': r['bs'], 'rw': r['rw'], 'iops': r['iops'], 'ios': r['ios'],
            'secs': r['secs'], 'errors': r['errors'], 'fsync': load.args.get('fsync', 0), 'flushes': r['flush']['count'] + (r['final_flush_us'] > 0),
            'p50_us': r['lat']['p50_us'], 'p99_us': r['lat']['p99_us'], 'p999_us': r['lat']['p999_us'], 'max_us': r['lat']['max_us'],
            'gap_us': r['gap_us'], 'flush_p50_us': r['flush']['p50_us'], 'flush_p99_us': r['flush']['p99_us'], 'final_flush_us': r['final_flush_us']}
    cell.update(use.done(r['ios']))
    cell.update(memory(server.pid))
    if c.cache:
        cell['cache'] = c.cache
    if before:
        hits, misses = (b - a for a, b in zip(before, lookups(server)))
        cell['hit_rate'] = hits / (hits + misses) if hits + misses else None
    if r['errors']:
        ctx.problem('%s, %s, %s: %d requests were answered with an error' % (row.name, load.name, c.label, r['errors']))
    ctx.say('%-30s %-22s %-12s %9.0f /s  p99 %8.0f us  cpu %6.1f us  r %6.0f w %6.0f B  hwm %4d MiB%s' % (
        row.name, load.name, c.label, r['iops'], cell['p99_us'], cell['cpu_us'], cell['read_b'], cell['write_b'], cell['hwm'] >> 20,
        '  %d flushes for %d' % (cell['dev_flushes'], cell['flushes']) if cell.get('dev_flushes') is not None else ''))
    return [cell]


def lookups(server):
    """varve's own count of its metadata cache: (hits, misses)"""
    if not server.control:
        return None
    with server.qmp() as q:
        chain = q.execute('x-varve-stats')['chain']
    return chain['cache_hits'], chain['cache_misses']


class Context:
    """what every row gets"""

    def __init__(self, varve, qemus, nbdload, folder, secs, turns, size, quick):
        self.varve, self.qemus, self.nbdload, self.folder = varve, qemus, nbdload, folder
        self.secs, self.turns, self.size, self.quick, self.problems = secs, turns, size, quick, []
        self.chain_size, self.stall_size = size // 2, size if quick else 2 * size

    def say(self, text):
        print(text, flush=True)

    def problem(self, text):
        self.problems.append(text)
        print('PROBLEM ' + text, file=sys.stderr, flush=True)

    def pair(self):
        """[(label, program)]: varve and every QEMU"""
        return [('varve', self.varve)] + [(q.label, q) for q in self.qemus]


def empty(folder):
    """nothing of an earlier round is left; logs and sockets go as well"""
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if os.path.isfile(path) or os.path.islink(path):
            os.unlink(path)
    os.sync()                           # freeing may send discards for many extents: not into the next row
