"""varve serve --preload: the map is in memory before it is asked for, within --cache-size; figures in x-varve-stats."""
import os, random, subprocess, sys, time
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'lib'))
from proc import *
from qmpclient import Qmp
from nbdclient import Nbd

need('qemu-img')
D = folder()
RND = random.Random(SEED)
SIZE, CLUSTER = 8 << 30, 65536


class Server:
    def __init__(self, image, *options):
        self.nbd = D + '/nbd'
        self.p = subprocess.Popen([VARVE, 'serve', image, '--export', 'nbd,unix=' + self.nbd, '--qmp', D + '/qmp', *options],
                                  stdout=subprocess.DEVNULL, env=dict(os.environ, VARVE_RUNTIME=D))
        self.qmp = Qmp(D + '/qmp')

    def stats(self):
        return self.qmp.execute('x-varve-stats')['chain']

    def preloaded(self):
        for _ in range(600):
            st = self.stats()
            if not st['preloading'] and st['preloaded_bytes']:
                return st
            time.sleep(.1)
        raise Failed('still loading: %r' % st)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.p.terminate()
        if self.p.wait(60) and not exc[0]:
            raise Failed('serve ended with %d' % self.p.returncode)


def fragments(image, nr):
    """writes in random order; returns {offset: byte}"""
    there = {}
    with Server(image) as s, Nbd(s.nbd) as b:
        for _ in range(nr):
            off = RND.randrange(SIZE // CLUSTER) * CLUSTER
            there[off] = RND.randrange(1, 256)
            b.write(off, bytes([there[off]]) * 4096)
    return there


def reads(s, there):
    with Nbd(s.nbd) as b:
        for off in RND.sample(sorted(there), 300):
            if b.read(off, 4096) != bytes([there[off]]) * 4096:
                raise Failed('other data at %d' % off)
        for _ in range(100):
            b.read(RND.randrange(SIZE // 4096) * 4096, 4096)


base, top = D + '/base.qcow2', D + '/top.qcow2'
run('qemu-img', 'create', '-q', '-f', 'qcow2', base, str(SIZE))
there = fragments(base, 1500)
run('qemu-img', 'create', '-q', '-f', 'qcow2', '-b', base, '-F', 'qcow2', top)
for image in base, top:
    if image == top:
        there.update(fragments(top, 500))
    with Server(image) as s:
        cold = s.stats()
        reads(s, there)
        if s.stats()['cache_misses'] == cold['cache_misses']:
            raise Failed('a cold start misses nothing')
        if s.stats()['preloading'] or s.stats()['preloaded_bytes']:
            raise Failed('it loads without being told to')
    with Server(image, '--preload', '--cache-size', '4M') as s:
        before = s.preloaded()
        reads(s, there)
        after = s.stats()
        for key in 'cache_misses', 'cache_evictions':
            if after[key] != before[key]:
                raise Failed('%s: %d, then %d' % (key, before[key], after[key]))
        if before['preloaded_bytes'] != SIZE or before['cache_limit'] != 4 << 20 or \
                not 0 < after['cache_bytes'] <= after['cache_bytes_max'] <= 4 << 20:
            raise Failed('figures: %r' % after)
        if image == top and after['map_misses'] != before['map_misses']:
            raise Failed('the flattened map was not loaded')
done('ok')
