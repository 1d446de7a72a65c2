"""Random operations on volumes of two pools, each idle or served, against a model of every element: contents, and what
stands on what. What must be refused is tried, too. VARVE_SEED repeats."""
import collections, random, sys
from volmodel import LVM, MIB, based, make_pool, moved
from proc import Failed, LONG, SEED, done, folder, need
from volserver import Served

need('qemu-img', 'qemu-io')
HOME = folder()
SIZE = 4 * MIB
ALL = LONG or 'all' in sys.argv
ROUNDS = (150 if ALL else 12) if LVM else 500 if LONG else 110
VOLUMES = 6


class Run:
    def __init__(self, seed):
        self.rng, self.log = random.Random(seed), []
        self.pool = make_pool(HOME, other='q')
        # (volume, snapshot or None) -> the same of what it stands on, or None
        self.servers, self.parents, self.made = {}, {}, 0
        for vol, suffix in (('100/vm-100-disk-0', ''), ('data', '.raw'), ('q:100/vm-100-disk-9', '')):
            self.pool.create(vol + suffix, SIZE)
            self.parents[vol, None] = None

    # ---- questions ----
    def names(self, vol):
        return [s for s in self.pool.vols[vol] if s]

    def kids(self, elem):
        return [k for k, p in self.parents.items() if p == elem]

    def users(self, vol):
        """elements of other volumes that stand on this one's"""
        return [k for k, p in self.parents.items() if p and p[0] == vol and k[0] != vol]

    def grounds(self, vol):
        """what it stands on outside of itself"""
        return [p for k, p in self.parents.items() if k[0] == vol and p and p[0] != vol]

    def open_elsewhere(self, elem):
        """a served disk of another volume stands on it"""
        for vol in self.servers:
            e = (vol, None)
            while e and vol != elem[0]:
                if e == elem:
                    return True
                e = self.parents[e]
        return False

    def is_base(self, vol):
        return '/base-' in vol

    def new_name(self, pool):
        self.made += 1
        return pool + self.rng.choice(('c%d', '%d/vm-%d-disk-0')).replace('%d', str(200 + self.made))

    def refused(self, *args, text=''):
        out = self.pool.varve(*args, rc=1)
        if text not in out:
            raise Failed('varve %s: refused without "%s": %s' % (' '.join(args), text, out))

    def rekey(self, old, new):
        """the volume has another name"""
        change = lambda e: (new, e[1]) if e and e[0] == old else e
        self.parents = {change(k): change(p) for k, p in self.parents.items()}

    # ---- operations ----
    def write(self, vol):
        off = self.rng.randrange(SIZE // 4096) * 4096
        length = min(self.rng.choice((4096, 65536, MIB)), SIZE - off)
        pattern = self.rng.randrange(1, 256)
        if vol in self.servers:
            self.servers[vol].write(off, length, pattern)
        else:
            self.pool.write(vol, off, length, pattern)

    def snapshot(self, vol):
        if len(self.names(vol)) > 5:
            return self.destroy(vol)
        self.made += 1
        s = 's%d' % self.made
        self.pool.snapshot(vol, s)
        self.parents[vol, s] = self.parents[vol, None]
        self.parents[vol, None] = (vol, s)

    def rollback(self, vol):
        if not self.names(vol):
            return
        to = self.rng.choice(self.names(vol))
        keep = None
        if self.rng.random() < .5:
            self.made += 1
            keep = 'k%d' % self.made
            self.parents[vol, keep] = self.parents[vol, None]
        self.pool.rollback(vol, to, keep)
        self.parents[vol, None] = (vol, to)

    def destroy(self, vol):
        if not self.names(vol):
            return
        s = self.rng.choice(self.names(vol))
        kids = self.kids((vol, s))
        if any(self.is_base(k[0]) for k in kids):
            return self.refused('destroy', self.pool.id(vol, s), '--flatten', text='base')
        if len(kids) > 1 or any(k[0] != vol for k in kids):
            self.refused('destroy', self.pool.id(vol, s), text='--flatten')
        if any(self.open_elsewhere(k) for k in kids):
            return self.refused('destroy', self.pool.id(vol, s), '--flatten', text='in use')
        self.pool.destroy(vol, s, '--flatten')
        for k in kids:
            self.parents[k] = self.parents[vol, s]
        del self.parents[vol, s]

    def destroy_volume(self, vol):
        if vol in self.servers:
            return self.refused('destroy', self.pool.id(vol), text='served' if not self.users(vol) else 'based on')
        if self.users(vol):
            return self.refused('destroy', self.pool.id(vol), text='based on')
        if len(self.pool.vols) < 4:
            return
        self.pool.destroy(vol)
        self.parents = {k: p for k, p in self.parents.items() if k[0] != vol}

    def clone(self, vol):
        snap = self.rng.choice(self.names(vol)) if self.names(vol) else None
        if len(self.pool.vols) >= VOLUMES:
            return
        to = self.new_name('q:' if ':' in vol else '')
        if not snap and not self.is_base(vol):
            return self.refused('clone', self.pool.id(vol), self.pool.id(to), text='snapshot')
        self.pool.clone(vol, snap, to)
        self.parents[to, None] = (vol, snap)

    def clone_full(self, vol):
        snap = self.rng.choice([*self.pool.vols[vol]])
        if len(self.pool.vols) >= VOLUMES:
            return
        to = self.new_name(self.rng.choice(('', 'q:')))
        if not snap and vol in self.servers:
            return self.refused('clone', self.pool.id(vol), self.pool.id(to), '--full', text='snapshot')
        self.pool.clone(vol, snap, to, '--full', '--format', self.rng.choice(('raw', 'qcow2')))
        self.parents[to, None] = None

    def rename(self, vol):
        to = self.new_name('q:' if ':' in vol else '')
        if self.users(vol) or vol in self.servers:
            return self.refused('rename', self.pool.id(vol), to.rpartition(':')[2])
        self.pool.rename(vol, to)
        self.rekey(vol, to)

    def template(self, vol):
        if self.names(vol) or vol in self.servers or '/vm-' not in vol:
            return self.refused('template', self.pool.id(vol))
        self.rekey(vol, self.pool.template(vol))

    def move(self, vol):
        to, where = moved(self.pool, vol), ('p:' if ':' in vol else 'q:')
        if to in self.pool.vols or vol in self.servers:
            return self.refused('move', self.pool.id(vol), where)
        options = ['--delete'] if self.rng.random() < .7 or len(self.pool.vols) >= VOLUMES else []
        if options and self.users(vol):
            self.refused('move', self.pool.id(vol), where, *options, text='based on')
            if len(self.pool.vols) >= VOLUMES:
                return
            options = []
        outside = self.grounds(vol)
        if outside and any(not self.same_there(g) for g in outside):
            self.refused('move', self.pool.id(vol), where, *options)
            options.append('--flatten')
        self.pool.move(vol, *options)
        there = {g: (moved(self.pool, g[0]), g[1]) if '--flatten' not in options else None for g in outside}
        new = {(to, k[1]): there[p] if p in there else (to, p[1]) if p else None
               for k, p in self.parents.items() if k[0] == vol}
        if '--delete' in options:
            self.parents = {k: p for k, p in self.parents.items() if k[0] != vol}
        self.parents.update(new)

    def same_there(self, elem):
        """the other pool has this base image or snapshot, too"""
        vol, snap = moved(self.pool, elem[0]), elem[1]
        return (snap or self.is_base(vol)) and self.pool.vols.get(vol, {}).get(snap) == self.pool.vols[elem[0]][snap]

    def serve(self, vol):
        if vol in self.servers:
            self.servers.pop(vol).stop()
        else:
            self.servers[vol] = Served(self.pool, vol, sock='nbd-' + vol.replace('/', '-').replace(':', '-'))

    def step(self):
        vol = self.rng.choice(list(self.pool.vols))
        each = [self.clone, self.destroy_volume] + [self.clone_full, self.move] * 2
        if not self.is_base(vol):
            each += [self.write] * 6 + [self.snapshot] * 4 + [self.rollback] * 2 + [self.destroy] * 3
            each += [self.serve, self.serve, self.clone, self.template] + [self.rename] * 2
        what = self.rng.choice(each)
        self.log.append((what.__name__, vol, vol in self.servers))
        what(vol)
        for v, s in self.servers.items():
            if s.read() != self.pool.vols[v][None]:
                raise Failed('the served disk %s does not read as it should' % v)

    def settle(self):
        for v in list(self.servers):
            self.servers.pop(v).stop()
        self.pool.verify()
        for name in 'p', 'q':
            self.pool.varve('pool', 'check', name)
        if self.pool.hidden():
            raise Failed('left behind: %s' % self.pool.hidden())


run = Run(SEED)
try:
    for i in range(ROUNDS):
        run.step()
        if i % 20 == 19:
            run.settle()
    run.settle()
except Exception as e:
    raise Failed('seed %d, step %d: %s\nlast steps: %s' % (SEED, len(run.log), e, run.log[-8:]))
finally:
    for s in run.servers.values():
        s.kill()
counts = collections.Counter(name for name, _, _ in run.log)
done('ok: %d steps, seed %d: %s' % (len(run.log), SEED, ', '.join('%s %d' % c for c in sorted(counts.items()))))
