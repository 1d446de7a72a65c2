"""A directory pool for tests, beside a model of what every element must read as."""
import hashlib, os, shutil, subprocess, sys
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'lib'))
from proc import Failed, VARVE, run, qio

MIB = 1 << 20


def sha(data):
    return hashlib.sha256(data).hexdigest()


class Pool:
    """<folder>/<name> with storage.cfg; `vols`: name -> {None: bytes of the current state, snapshot: bytes}"""

    def __init__(self, folder, name='p', keys=''):
        self.name, self.path = name, os.path.join(folder, name)
        self.cfg = os.path.join(folder, name + '.cfg')
        self.runtime = os.path.join(folder, name + '.run')
        self.images = os.path.join(self.path, 'images')
        self.vols = {}
        os.makedirs(self.path)
        with open(self.cfg, 'w') as f:
            f.write('dir: %s\n\tpath %s\n\tcontent images\n\tsnapext 1\n%s' % (name, self.path, keys))

    def copy(self, folder):
        """the same pool, files and model, elsewhere"""
        new = object.__new__(Pool)
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder)
        new.name, new.path = self.name, os.path.join(folder, self.name)
        new.cfg, new.runtime = os.path.join(folder, 'cfg'), os.path.join(folder, 'run')
        new.images = os.path.join(new.path, 'images')
        new.vols = {v: dict(e) for v, e in self.vols.items()}
        run('cp', '-a', '--sparse=always', self.path, new.path)
        with open(self.cfg) as f, open(new.cfg, 'w') as t:
            t.write(f.read().replace(self.path, new.path))
        return new

    def argv(self, *args):
        return [VARVE, args[0], *args[1:], '--config', self.cfg]

    def env(self, **more):
        return dict(os.environ, VARVE_RUNTIME=self.runtime, **more)

    def varve(self, *args, rc=0, env=None, inp=None, timeout=120):
        """runs varve; rc: the status it must end with (None: any)"""
        p = subprocess.run(self.argv(*args), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, input=inp,
                           timeout=timeout, env=self.env(**(env or {})))
        out = p.stdout.decode('utf-8', 'replace')
        if rc is not None and p.returncode != rc:
            raise Failed('varve %s: ended with %d, not %d: %s' % (' '.join(args), p.returncode, rc, out[-1500:]))
        return out if rc is not None else (p.returncode, out)

    def id(self, vol, snap=None):
        return '%s:%s%s' % (self.name, vol, '@' + snap if snap else '')

    # ---- changes of both ----
    def create(self, vol, size=4 * MIB, *options):
        self.varve('create', self.id(vol), str(size), *options)
        self.vols[vol.rsplit('.', 1)[0] if vol.endswith(('.raw', '.qcow2')) else vol] = {None: bytes(size)}

    def write(self, vol, off, length, pattern):
        path = self.file(vol)
        qio(path, 'write -P %d %d %d' % (pattern, off, length), fmt=path.rsplit('.', 1)[1])
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

    # ---- what is there ----
    def file(self, vol, snap=None):
        """the element's file, by the layout"""
        folder, _, stem = vol.rpartition('/')
        if snap:
            stem = 'snap-%s-%s' % (snap, stem)
        paths = [os.path.join(self.images, folder, stem + s) for s in ('.qcow2', '.raw')]
        for p in paths:
            if os.path.exists(p):
                return p
        raise Failed('there is no file of %s' % self.id(vol, snap))

    def elements(self):
        """{vol: {snap or None: path}} by the names of the files"""
        out = {}
        for folder, _, names in os.walk(self.images):
            sub = os.path.relpath(folder, self.images)
            for n in names:
                stem, dot, fmt = n.rpartition('.')
                if n.startswith('.') or '/.varve' in folder or fmt not in ('raw', 'qcow2'):
                    continue
                snap = None
                if stem.startswith('snap-'):
                    # the tests' snapshot names have no '-'
                    snap, _, stem = stem[5:].partition('-')
                vol = stem if sub == '.' else sub + '/' + stem
                out.setdefault(vol, {})
                if snap in out[vol]:
                    raise Failed('%s: two files: %s, %s' % (self.id(vol, snap), out[vol][snap], os.path.join(folder, n)))
                out[vol][snap] = os.path.join(folder, n)
        return out

    def read(self, path):
        """what the element shows, by qemu-img"""
        tmp = os.path.join(os.path.dirname(self.path), 'read.tmp')
        run('qemu-img', 'convert', '-f', path.rsplit('.', 1)[1], '-O', 'raw', path, tmp)
        with open(tmp, 'rb') as f:
            data = f.read()
        os.unlink(tmp)
        return data

    def state(self):
        """{vol: {snap or None: sha}}"""
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
        for e in self.elements().values():
            for p in e.values():
                if p.endswith('.qcow2'):
                    rc, out = run('qemu-img', 'check', '-f', 'qcow2', p, rc=None)
                    if rc not in allowed:
                        raise Failed('qemu-img check %s: %d %s' % (p, rc, out))

    def hidden(self):
        """what operations leave while they run: must be gone afterwards"""
        out = []
        for folder, _, names in os.walk(self.images):
            out += [os.path.join(folder, n) for n in names if n.startswith('.varve-') or
                    ('/.varve' in folder and n not in ('lock', 'spare'))]
        return out


def short(state):
    return {v: {s: h[:8] for s, h in e.items()} for v, e in state.items()}
