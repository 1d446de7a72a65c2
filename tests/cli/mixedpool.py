"""Two storages of different kinds for tests of moves, with the methods of volmodel.Pool: those named in `dirs` are directories,
the other ones volume groups."""
import contextlib, os, shutil
from volmodel import Pool
from lvmpool import LvmPool
from proc import run


class MixedPool(LvmPool):
    def __init__(self, folder, dirs=('p',), **kw):
        self.dirs = dirs
        super().__init__(folder, **{**kw, 'other': 'q'})
        self.write_config(kw)

    def write_config(self, keys):
        with open(self.cfg, 'w') as f:
            for n in 'p', 'q':
                k = keys.get('keys' if n == 'p' else 'other_keys', '')
                where = 'dir: %s\n\tpath %s' % (n, self.dir_of(n)) if n in self.dirs else \
                    'lvm: %s\n\tvgname %s\n\tsnapext 1' % (n, self.vgs[n])
                f.write('%s\n\tcontent images\n%s\n' % (where, k))

    def dir_of(self, name):
        return os.path.join(self.home, 'dir-' + name)

    def place(self, folder):
        super().place(folder)
        self.roots = {}
        for n in self.dirs:
            self.roots['' if n == self.name else n + ':'] = os.path.join(self.dir_of(n), 'images')
            os.makedirs(self.dir_of(n), exist_ok=True)

    def copy(self, folder):
        new = super().copy(folder)
        new.__class__, new.dirs = MixedPool, self.dirs
        new.roots = {p: r.replace(self.home + '/', new.home + '/') for p, r in self.roots.items()}
        for n in self.dirs:
            run('cp', '-a', '--sparse=always', self.dir_of(n), new.dir_of(n))
        with open(new.cfg) as f:
            text = f.read().replace(self.home + '/', new.home + '/')
        with open(new.cfg, 'w') as f:
            f.write(text)
        return new

    def is_dir(self, vol):
        return (vol.rpartition(':')[0] or self.name) in self.dirs

    # ---- of volume groups, where there is none ----
    def lvs(self, pool=None):
        return [] if (pool or self.name) in self.dirs else super().lvs(pool)

    def vg_tags(self, pool=None):
        return [] if (pool or self.name) in self.dirs else super().vg_tags(pool)

    # ---- both ----
    def file(self, vol, snap=None):
        return Pool.file(self, vol, snap) if self.is_dir(vol) else super().file(vol, snap)

    def opened(self, vol, snap=None):
        return contextlib.nullcontext(self.file(vol, snap)) if self.is_dir(vol) else super().opened(vol, snap)

    def set_taken(self, vol, snap, when):
        return Pool.set_taken(self, vol, snap, when) if self.is_dir(vol) else super().set_taken(vol, snap, when)

    def elements(self):
        return {**super().elements(), **Pool.elements(self)}

    def digest(self):
        return super().digest(), Pool.digest(self)

    def hidden(self):
        return super().hidden() + Pool.hidden(self)
