"""Random operations on two volumes of a pool, each idle or served, against a model of every element. VARVE_SEED repeats."""
import os, random, sys
from volmodel import MIB, Pool
from proc import Failed, LONG, SEED, done, folder, need
from volserver import Served

need('qemu-img', 'qemu-io')
HOME = folder()
SIZE = 4 * MIB
ROUNDS = 400 if LONG else 90


class Run:
    def __init__(self, seed):
        self.rng, self.log = random.Random(seed), []
        self.pool = Pool(HOME)
        self.servers, self.parents, self.made = {}, {}, 0
        for vol, suffix in (('100/vm-100-disk-0', ''), ('data', '.raw')):
            self.pool.create(vol + suffix, SIZE)
            self.parents[vol] = {None: None}

    def names(self, vol):
        return [s for s in self.pool.vols[vol] if s]

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
        self.parents[vol][s] = self.parents[vol][None]
        self.parents[vol][None] = s

    def rollback(self, vol):
        if not self.names(vol):
            return
        to = self.rng.choice(self.names(vol))
        keep = None
        if self.rng.random() < .5:
            self.made += 1
            keep = 'k%d' % self.made
            self.parents[vol][keep] = self.parents[vol][None]
        self.pool.rollback(vol, to, keep)
        self.parents[vol][None] = to

    def destroy(self, vol):
        if not self.names(vol):
            return
        s = self.rng.choice(self.names(vol))
        p = self.parents[vol]
        kids = [k for k in p if p[k] == s]
        if len(kids) > 1:
            out = self.pool.varve('destroy', self.pool.id(vol, s), rc=1)
            if '--flatten' not in out:
                raise Failed('several children: ' + out)
        self.pool.destroy(vol, s, '--flatten')
        for k in kids:
            p[k] = p[s]
        del p[s]

    def serve(self, vol):
        if vol in self.servers:
            self.servers.pop(vol).stop()
        else:
            self.servers[vol] = Served(self.pool, vol, sock='nbd-' + vol.replace('/', '-'))

    def step(self):
        vol = self.rng.choice(list(self.pool.vols))
        what = self.rng.choice([self.write] * 5 + [self.snapshot] * 3 + [self.rollback] * 2 + [self.destroy] * 3 + [self.serve])
        self.log.append((what.__name__, vol, vol in self.servers))
        what(vol)
        for v, s in self.servers.items():
            if s.read() != self.pool.vols[v][None]:
                raise Failed('the served disk %s does not read as it should' % v)

    def settle(self):
        for v in list(self.servers):
            self.servers.pop(v).stop()
        self.pool.verify()
        self.pool.varve('pool', 'check', self.pool.name)
        if self.pool.hidden():
            raise Failed('left behind: %s' % self.pool.hidden())


run = Run(SEED)
try:
    for i in range(ROUNDS):
        run.step()
        if i % 15 == 14:
            run.settle()
    run.settle()
except Exception as e:
    raise Failed('seed %d, step %d: %s\nlast steps: %s' % (SEED, len(run.log), e, run.log[-8:]))
finally:
    for s in run.servers.values():
        s.kill()
done('ok: %d steps, seed %d' % (len(run.log), SEED))
