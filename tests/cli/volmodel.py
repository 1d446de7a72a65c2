"""A pool for tests, beside a model of what every element must read as: a directory, or with `lvm` on the command line a VG;
with `up` and `down` a directory and a VG, that VG and that directory."""
import contextlib, hashlib, os, shutil, subprocess, sys
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'lib'))
from proc import Failed, VARVE, run, qio

MIB = 1 << 20
MIXED = {'up': ('p',), 'down': ('q',)}    # the one that is a directory
KINDS = ('lvm', 'dir', *MIXED)    # words of the command line that choose the kind of pools
LVM = any(k in sys.argv[1:] for k in ('lvm', *MIXED))


def sha(data):
    return hashlib.sha256(data).hexdigest()


class Pool:
    """<folder>/<name> with storage.cfg; `vols`: name -> {None: bytes of the current state, snapshot: bytes}.
    With `other` there is a second storage of that name; its volumes are called '<other>:<name>'."""
    is_lvm = False
    stdin = None    # what a command reads that has the operand "-"

    def __init__(self, folder, name='p', keys='', other=None, other_keys=''):
        self.name, self.other, self.path = name, other, os.path.join(folder, name)
        self.cfg = os.path.join(folder, name + '.cfg')
        self.runtime = os.path.join(folder, name + '.run')
        self.place(folder)
        self.vols = {}
        with open(self.cfg, 'w') as f:
            for n, k in ((name, keys), (other, other_keys)):
                if n:
                    os.makedirs(os.path.join(folder, n))
                    f.write('dir: %s\n\tpath %s\n\tcontent images\n\tsnapext 1\n%s\n' % (n, os.path.join(folder, n), k))

    def place(self, folder):
        self.images = os.path.join(self.path, 'images')
        self.roots = {'': self.images}
        if self.other:
            self.roots[self.other + ':'] = os.path.join(folder, self.other, 'images')

    def copy(self, folder):
        """the same pool, files and model, elsewhere"""
        new = object.__new__(Pool)
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder)
        new.name, new.other, new.path = self.name, self.other, os.path.join(folder, self.name)
        new.cfg, new.runtime = os.path.join(folder, 'cfg'), os.path.join(folder, 'run')
        new.place(folder)
        new.vols = {v: dict(e) for v, e in self.vols.items()}
        here = os.path.dirname(self.path)
        for name in self.name, self.other:
            if name:
                run('cp', '-a', '--sparse=always', os.path.join(here, name), os.path.join(folder, name))
        with open(self.cfg) as f, open(new.cfg, 'w') as t:
            t.write(f.read().replace(here + '/', folder + '/'))
        return new

    def argv(self, *args):
        return [VARVE, args[0], *args[1:], '--config', self.cfg]

    def env(self, **more):
        return dict(os.environ, VARVE_RUNTIME=self.runtime, **more)

    def varve(self, *args, rc=0, env=None, inp=None, timeout=120):
        """runs varve; rc: the status it must end with (None: any)"""
        inp = self.stdin if inp is None and '-' in args else inp
        p = subprocess.run(self.argv(*args), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, input=inp,
                           timeout=timeout, env=self.env(**(env or {})))
        out = p.stdout.decode('utf-8', 'replace')
        if rc is not None and p.returncode != rc:
            raise Failed('varve %s: ended with %d, not %d: %s' % (' '.join(args), p.returncode, rc, out[-1500:]))
        return out if rc is not None else (p.returncode, out)

    def id(self, vol, snap=None):
        return '%s%s%s' % ('' if ':' in vol else self.name + ':', vol, '@' + snap if snap else '')

    # ---- changes of both ----
    def create(self, vol, size=4 * MIB, *options):
        self.varve('create', self.id(vol), str(size), *options)
        self.vols[vol.rsplit('.', 1)[0] if vol.endswith(('.raw', '.qcow2')) else vol] = {None: bytes(size)}

    def write(self, vol, off, length, pattern):
        with self.opened(vol) as path:
            qio(path, 'write -P %d %d %d' % (pattern, off, length), fmt=self.fmt(path))
        data = bytearray(self.vols[vol][None])
        data[off:off + length] = bytes([pattern]) * length
        self.vols[vol][None] = bytes(data)

    def snapshot(self, vol, snap):
        self.varve('snapshot', self.id(vol, snap))
        self.vols[vol][snap] = self.vols[vol][None]

    def rollback(self, vol, snap, keep=None):
        self.varve('rollback', self.id(vol, snap), *(['--keep', keep] if keep else []))
        if keep:
            self.vols[vol][keep] = self.vols[vol][None]
        self.vols[vol][None] = self.vols[vol][snap]

    def destroy(self, vol, snap=None, *options):
        self.varve('destroy', self.id(vol, snap), *options)
        if snap:
            del self.vols[vol][snap]
        else:
            del self.vols[vol]

    def clone(self, vol, snap, to, *options):
        self.varve('clone', self.id(vol, snap), self.id(to), *options)
        self.vols[to] = {None: self.vols[vol][snap]}

    def template(self, vol):
        self.varve('template', self.id(vol))
        to = based(vol)
        self.vols[to] = self.vols.pop(vol)
        return to

    def rename(self, vol, to):
        self.varve('rename', self.id(vol), to.rpartition(':')[2])
        self.vols[to] = self.vols.pop(vol)

    def move(self, vol, *options):
        to = moved(self, vol)
        self.varve('move', self.id(vol), (self.name if ':' in vol else self.other) + ':', *options)
        self.vols[to] = dict(self.vols[vol])
        if '--delete' in options:
            del self.vols[vol]
        return to

    # ---- what is there ----
    def fmt(self, path):
        return path.rsplit('.', 1)[1]

    def opened(self, vol, snap=None):
        """the path under which other programs open an element"""
        return contextlib.nullcontext(self.file(vol, snap))

    def reading(self):
        """elements can be read meanwhile by their paths"""
        return contextlib.nullcontext()

    def lose(self, vol, snap=None):
        """the element goes, by another program"""
        os.unlink(self.file(vol, snap))

    def overlay(self, vol, on, size=4 * MIB):
        """an overlay made with other tools; `on`: the volume below it"""
        path = os.path.join(self.images, vol + '.qcow2')
        os.makedirs(os.path.dirname(path), exist_ok=True)
        run('qemu-img', 'create', '-q', '-f', 'qcow2', '-u', '-b', os.path.relpath(self.file(on), os.path.dirname(path)),
            '-F', 'qcow2', path, str(size))
        self.vols[vol] = dict(self.vols[on])

    def set_taken(self, vol, snap, when):
        os.utime(self.file(vol, snap), (when, when))

    def release(self):
        """it is not needed any more"""

    def digest(self):
        """names and contents of all files"""
        h = hashlib.sha256()
        for _, folder, names in sorted(self.folders()):
            for n in sorted(names):
                p = os.path.join(folder, n)
                h.update(p.encode())
                with open(p, 'rb') as f:
                    while b := f.read(1 << 20):
                        h.update(b)
        return h.hexdigest()

    def inodes(self):
        """those that locks of images are on"""
        out = set()
        for folder, _, names in os.walk(self.images):
            for n in names:
                with contextlib.suppress(OSError):
                    out.add(os.stat(os.path.join(folder, n)).st_ino)
        return out

    def file(self, vol, snap=None):
        """the element's file, by the layout"""
        pool, _, vol = vol.rpartition(':')
        folder, _, stem = vol.rpartition('/')
        if snap:
            stem = 'snap-%s-%s' % (snap, stem)
        root = self.roots[pool + ':' if pool else '']
        paths = [os.path.join(root, folder, stem + s) for s in ('.qcow2', '.raw')]
        for p in paths:
            if os.path.exists(p):
                return p
        raise Failed('there is no file of %s' % self.id(vol, snap))

    def folders(self):
        for prefix, root in self.roots.items():
            for folder, _, names in os.walk(root):
                yield prefix, folder, names

    def elements(self):
        """{vol: {snap or None: path}} by the names of the files"""
        out = {}
        for prefix, folder, names in self.folders():
            sub = os.path.relpath(folder, self.roots[prefix])
            for n in names:
                stem, dot, fmt = n.rpartition('.')
                if n.startswith('.') or '/.varve' in folder or fmt not in ('raw', 'qcow2'):
                    continue
                snap = None
                if stem.startswith('snap-'):
                    # the tests' snapshot names have no '-'
                    snap, _, stem = stem[5:].partition('-')
                vol = prefix + (stem if sub == '.' else sub + '/' + stem)
                out.setdefault(vol, {})
                if snap in out[vol]:
                    raise Failed('%s: two files: %s, %s' % (self.id(vol, snap), out[vol][snap], os.path.join(folder, n)))
                out[vol][snap] = os.path.join(folder, n)
        return out

    def read(self, path):
        """what the element shows, by qemu-img"""
        tmp = os.path.join(os.path.dirname(self.path), 'read.tmp')
        with self.reading():
            run('qemu-img', 'convert', '-f', self.fmt(path), '-O', 'raw', path, tmp)
        with open(tmp, 'rb') as f:
            data = f.read()
        os.unlink(tmp)
        return data

    def state(self):
        """{vol: {snap or None: sha}}"""
        with self.reading():
            return {v: {s: sha(self.read(p)) for s, p in e.items()} for v, e in self.elements().items()}

    def expected(self):
        return {v: {s: sha(d) for s, d in e.items()} for v, e in self.vols.items()}

    def verify(self):
        """the pool is what the model says, by names, contents and qemu-img check"""
        got, want = self.state(), self.expected()
        if got != want:
            raise Failed('the pool is\n  %s\nbut must be\n  %s' % (short(got), short(want)))
        self.check_images()

    def check_images(self, allowed=(0,)):
        with self.reading():
            for p in [p for e in self.elements().values() for p in e.values() if p.endswith('.qcow2')]:
                rc, out = run('qemu-img', 'check', '-f', 'qcow2', p, rc=None)
                if rc not in allowed:
                    raise Failed('qemu-img check %s: %d %s' % (p, rc, out))

    def hidden(self):
        """what operations leave while they run: must be gone afterwards"""
        out = []
        for _, folder, names in self.folders():
            out += [os.path.join(folder, n) for n in names if n.startswith('.varve-') or
                    ('/.varve' in folder and n not in ('lock', 'spare'))]
        return out


def based(vol):
    """the base image's name"""
    folder, _, stem = vol.rpartition('/')
    return folder + '/base-' + stem[3:]


def moved(pool, vol):
    """the volume's name in the other storage"""
    return vol.rpartition(':')[2] if ':' in vol else pool.other + ':' + vol


def short(state):
    return {v: {s: h[:8] for s, h in e.items()} for v, e in state.items()}


def release(folder=None):
    """devices of the pools that were there, or of all"""
    if LVM:
        from lvmpool import release_all
        release_all(folder)


def clear(folder):
    """an empty folder, whatever pool was there"""
    release(folder)
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)


def make_pool(*args, **kw):
    """of the kind that the command line wants"""
    if not LVM:
        return Pool(*args, **kw)
    for word, dirs in MIXED.items():
        if word in sys.argv[1:]:
            from mixedpool import MixedPool
            return MixedPool(*args, dirs=dirs, **kw)
    from lvmpool import LvmPool
    return LvmPool(*args, **kw)
