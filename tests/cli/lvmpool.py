"""Volume groups for tests, with the methods of volmodel.Pool: each storage a VG on a loop device of its own.

Where the kernel has no device-mapper, tests/lib/lvm stands for it. An element is looked at through a folder of links, `view`,
which has all names of an LV as lvm_dir.h means them, also those that are but tags; so it can be read by name after any kill.
"""
import atexit, contextlib, fcntl, json, os, shutil, subprocess, sys, time
from volmodel import MIB, Pool, clear
from proc import Failed, need, run

HERE = os.path.dirname(os.path.abspath(__file__))
STAND_IN = os.path.join(HERE, '..', 'lib', 'lvm')
HAS_DM = os.path.exists('/sys/class/misc/device-mapper')
LOOP_CLR_FD = 0x4C01
pools = []
os.environ['PATH'] += ':/usr/sbin:/sbin'
need('lvm', 'losetup')
if os.getuid() or not os.path.exists('/dev/loop-control'):
    print('SKIP: volume groups on loop devices need root')
    sys.exit(77)


def loops_in(folder):
    """the loop devices whose files lie in the folder"""
    for dev in os.listdir('/sys/block'):
        if dev.startswith('loop'):
            with contextlib.suppress(OSError):
                with open('/sys/block/%s/loop/backing_file' % dev) as f:
                    if f.read().startswith(folder + '/'):
                        yield '/dev/' + dev


def detach_loops(folder):
    for dev in loops_in(folder):
        with contextlib.suppress(OSError):
            fd = os.open(dev, os.O_RDWR)
            fcntl.ioctl(fd, LOOP_CLR_FD)
            os.close(fd)


def attach(path):
    for _ in range(100):
        rc, out = run('losetup', '-f', '--show', path, rc=None)
        if rc == 0:
            return out.strip()
        time.sleep(.02)   # another test was faster
    raise Failed('losetup: ' + out)


@atexit.register
def release_all(folder=None):
    """those in that folder, or all"""
    for pool in [p for p in pools if folder in (None, p.home)]:
        pool.release()


class LvmPool(Pool):
    SIZE = 2048 * MIB    # sparse
    is_lvm = True

    def __init__(self, folder, name='p', keys='', other=None, other_keys='', size=SIZE, extent='1m', metadata='4m'):
        self.name, self.other, self.vols = name, other, {}
        self.vgs = {n: 'vt%d%s' % (os.getpid(), n) for n in (name, other) if n}
        self.place(folder)
        self.prepare(folder)
        for n, vg in self.vgs.items():
            pv = os.path.join(folder, 'pv-' + n)
            with open(pv, 'wb') as f:
                f.truncate(size)
            self.devices.append(attach(pv))
            self.lvm('pvcreate', '-q', '-ff', '--yes', '--metadatasize', metadata, self.devices[-1])
            self.lvm('vgcreate', '-q', '-s', extent, vg, self.devices[-1])
        with open(self.cfg, 'w') as f:
            for n, k in ((name, keys), (other, other_keys)):
                if n:
                    f.write('lvm: %s\n\tvgname %s\n\tcontent images\n\tsnapext 1\n%s\n' % (n, self.vgs[n], k))

    def place(self, folder):
        self.home, self.path = folder, os.path.join(folder, self.name)
        self.cfg, self.runtime = os.path.join(folder, self.name + '.cfg'), os.path.join(folder, 'run')
        self.dev = os.path.join(folder, 'dev')
        self.view = os.path.join(folder, 'view')
        self.images = os.path.join('/dev' if HAS_DM else self.dev, self.vgs[self.name])
        self.devices, self.busy = [], 0

    def prepare(self, folder):
        """folders, and LVM's settings: its locks are the test's own"""
        for name in 'dev', 'run', 'lock', 'etc', 'view':
            os.makedirs(os.path.join(folder, name), exist_ok=True)
        with open(os.path.join(folder, 'etc', 'lvm.conf'), 'w') as f:
            f.write('global { locking_dir="%s/lock" use_lvmpolld=0 }\ndevices { hints="none" }\n' % folder)
        pools.append(self)

    def release(self):
        """its devices go; the files stay"""
        if self in pools:
            pools.remove(self)
        if HAS_DM:
            for vg in self.vgs.values():
                self.lvm('vgchange', '-q', '-an', vg, rc=None)
        detach_loops(self.home)
        self.devices = []

    def copy(self, folder):
        clear(folder)
        if self.active():
            raise Failed('active while nobody uses them: %s' % self.active())
        new = object.__new__(LvmPool)
        new.name, new.other, new.vgs = self.name, self.other, dict(self.vgs)
        new.vols = {v: dict(e) for v, e in self.vols.items()}
        new.place(folder)
        new.prepare(folder)
        for n in self.vgs:
            run('cp', '--sparse=always', os.path.join(self.home, 'pv-' + n), folder)
        if not HAS_DM:
            run('cp', '-a', '--sparse=always', os.path.join(self.dev, '.'), new.dev)
        new.devices = [attach(os.path.join(folder, 'pv-' + n)) for n in self.vgs]
        with open(self.cfg) as f, open(new.cfg, 'w') as t:
            text = f.read()
            for n, vg in self.vgs.items() if HAS_DM else ():
                # the kernel has one device of a name only
                new.vgs[n] = vg + 'c'
                new.lvm('vgimportclone', '--basevgname', new.vgs[n], new.devices[[*self.vgs].index(n)])
                text = text.replace('vgname %s\n' % vg, 'vgname %s\n' % new.vgs[n])
            t.write(text)
        if HAS_DM:
            new.images = os.path.join('/dev', new.vgs[self.name])
        return new

    def env(self, **more):
        env = dict(os.environ, VARVE_RUNTIME=self.runtime, VARVE_LOCK_DIR=os.path.join(self.home, 'lock'),
                   LVM_SYSTEM_DIR=os.path.join(self.home, 'etc'), VARVE_TEST_LVM_DEVICES=','.join(self.devices),
                   LVM_SUPPRESS_FD_WARNINGS='1', PATH=STAND_IN + ':' + os.environ['PATH'])
        if not HAS_DM:
            env.update(VARVE_TEST_LVM_LOOPS=self.dev, DM_DEV_DIR=self.dev)
        env.update(more)
        return env

    def lvm(self, *args, rc=0):
        env = self.env()
        for name in [n for n in env if n.startswith(('VARVE_TEST_LVM_BEFORE', 'VARVE_TEST_LVM_LOG', 'VARVE_CRASH'))]:
            del env[name]
        p = subprocess.run(['lvm', *args], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=120)
        if rc is not None and p.returncode != rc:
            raise Failed('lvm %s: %d %s' % (' '.join(args), p.returncode, p.stderr.decode()))
        return p.stdout.decode()

    # ---- what there is ----
    def lvs(self, pool=None):
        """LVM's own view: [(name, uuid, [tags], bytes)]"""
        out = self.lvm('lvs', '--reportformat', 'json', '--units', 'b', '--nosuffix', '-o', 'lv_name,lv_uuid,lv_tags,lv_size',
                       self.vgs[pool or self.name])
        return [(r['lv_name'], r['lv_uuid'], [t for t in r['lv_tags'].split(',') if t], int(r['lv_size']))
                for r in json.loads(out)['report'][0]['lv']]

    def vg_tags(self, pool=None):
        return [t for t in self.lvm('vgs', '--noheadings', '-o', 'vg_tags', self.vgs[pool or self.name]).strip().split(',') if t]

    def names(self, pool=None):
        """{name: (LVM's name, uuid)} with links, and with renames that are decided"""
        lvs, out = self.lvs(pool), {}
        takes = {t[12:]: uuid for _, uuid, tags, _ in lvs for t in tags if t.startswith('varve-takes=')}
        for name, uuid, tags, _ in lvs:
            if not any(t == 'varve' or t.startswith('pve-vm-') for t in tags):
                continue
            own = [n for n, u in takes.items() if u == uuid] or [name]
            own += [t[11:] for t in tags if t.startswith('varve-also=')]
            for n in own:
                if takes.get(n, uuid) == uuid:
                    out[n] = name, uuid
        return out

    def look(self, pool):
        """the view of a storage as it is now; its folder"""
        folder = os.path.join(self.view, pool)
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder)
        vg = self.vgs[pool]
        for name, (lv, uuid) in self.names(pool).items():
            os.symlink('/dev/%s/%s' % (vg, lv) if HAS_DM else '%s/.lv/%s/%s' % (self.dev, vg, uuid), os.path.join(folder, name))
        return folder

    def active(self):
        """LVs that are active, by LVM's names"""
        out = []
        for n, vg in self.vgs.items():
            if HAS_DM:
                out += self.lvm('lvs', '--noheadings', '-o', 'lv_name', '-S', 'lv_active=active', vg).split()
            else:
                folder = '%s/.lv/%s' % (self.dev, vg)
                on = [x[:-3] for x in os.listdir(folder) if x.endswith('.on')] if os.path.isdir(folder) else []
                out += [name for name, uuid, _, _ in self.lvs(n) if uuid in on] if on else []
        return out

    @contextlib.contextmanager
    def activated(self):
        """all LVs are active meanwhile"""
        if self.busy == 0:
            self.ours = []
            was = self.active()
            for n, vg in self.vgs.items():
                todo = ['%s/%s' % (vg, lv[0]) for lv in self.lvs(n) if lv[0] not in was]
                if todo:
                    self.lvm('lvchange', '-q', '-ay', *todo)
                    self.ours.append(todo)
        self.busy += 1
        try:
            yield
        finally:
            self.busy -= 1
            for todo in self.ours if self.busy == 0 else ():
                self.deactivate(todo)

    def deactivate(self, lvs):
        """another test that looks for a free loop device may have one open for an instant"""
        for _ in range(50):
            with contextlib.suppress(Failed):
                return self.lvm('lvchange', '-q', '-an', *lvs)
            time.sleep(.1)
        self.lvm('lvchange', '-q', '-an', *lvs)

    def reading(self):
        """the files of the view can be read"""
        return self.activated() if HAS_DM else contextlib.nullcontext()

    @contextlib.contextmanager
    def opened(self, vol, snap=None):
        """the path under which other programs open an element"""
        pool = vol.rpartition(':')[0] or self.name
        name = os.path.basename(self.file(vol, snap))
        with self.activated():
            yield os.path.join('/dev' if HAS_DM else self.dev, self.vgs[pool], self.names(pool)[name][0])

    def fmt(self, path):
        return 'qcow2' if path.endswith('.qcow2') else 'raw'

    def file(self, vol, snap=None):
        """the element in the view; its name is that of the LV"""
        pool, _, vol = vol.rpartition(':')
        stem = vol.rpartition('/')[2]
        if snap:
            stem = 'snap_%s_%s' % (stem, snap)
        folder = self.look(pool or self.name)
        for n in stem + '.qcow2', stem:
            if os.path.lexists(os.path.join(folder, n)):
                return os.path.join(folder, n)
        raise Failed('there is no LV of %s' % self.id(vol, snap))

    def elements(self):
        out = {}
        for pool in self.vgs:
            folder = self.look(pool)
            for n in os.listdir(folder):
                if n.startswith('.varve-'):
                    continue
                stem, snap = n[:-6] if n.endswith('.qcow2') else n, None
                if stem.startswith('snap_'):
                    stem, _, snap = stem[5:].rpartition('_')
                part = stem.split('-')
                vol = (pool + ':' if pool != self.name else '') + (part[1] + '/' if part[0] in ('vm', 'base') else '') + stem
                out.setdefault(vol, {})
                if snap in out[vol]:
                    raise Failed('%s: two LVs: %s, %s' % (self.id(vol, snap), out[vol][snap], n))
                out[vol][snap] = os.path.join(folder, n)
        return out

    def lose(self, vol, snap=None):
        """the element goes, by another program"""
        pool = vol.rpartition(':')[0] or self.name
        name = os.path.basename(self.file(vol, snap))
        self.lvm('lvremove', '-q', '-y', '%s/%s' % (self.vgs[pool], self.names(pool)[name][0]))

    def overlay(self, vol, on, size=4 * MIB):
        name = os.path.basename(vol) + '.qcow2'
        self.lvm('lvcreate', '-q', '-an', '-Zn', '-Wn', '--setautoactivation', 'n', '--addtag', 'varve', '-L', '%db' % (size + 2 * MIB),
                 '-n', name, self.vgs[self.name])
        self.vols[vol] = dict(self.vols[on])
        with self.opened(vol) as path:
            run('qemu-img', 'create', '-q', '-f', 'qcow2', '-u', '-b', os.path.basename(self.file(on)), '-F', 'qcow2', path, str(size))

    def set_taken(self, vol, snap, when):
        pool = vol.rpartition(':')[0] or self.name
        lv = self.names(pool)[os.path.basename(self.file(vol, snap))][0]
        old = [t for name, _, tags, _ in self.lvs(pool) for t in tags if name == lv and t.startswith('varve-taken=')]
        self.lvm('lvchange', '-q', '--addtag', 'varve-taken=%d' % when, *[w for t in old for w in ('--deltag', t)],
                 '%s/%s' % (self.vgs[pool], lv))

    def digest(self):
        """all names, tags, lengths and contents"""
        out = []
        with self.reading():
            for pool, vg in self.vgs.items():
                folder = self.look(pool)
                out.append((sorted(self.lvs(pool)), sorted(self.vg_tags(pool))))
                for n in sorted(os.listdir(folder)):
                    out.append((n, run('sha256sum', os.path.join(folder, n)).split()[0]))
        return out

    def inodes(self):
        """those that locks of images are on"""
        out = set()
        for vg in self.vgs.values():
            folder = os.path.join('/dev' if HAS_DM else self.dev, vg)
            for n in os.listdir(folder) if os.path.isdir(folder) else []:
                with contextlib.suppress(OSError):
                    out.add(os.stat(os.path.join(folder, n)).st_ino)
        return out

    def hidden(self):
        out = []
        for pool in self.vgs:
            for name, _, tags, _ in self.lvs(pool):
                out += ['LV ' + name] if name.startswith('.varve-') else []
                out += ['%s of LV %s' % (t, name) for t in tags if t.startswith(('varve-also=', 'varve-takes='))]
            out += ['VG tag ' + t for t in self.vg_tags(pool) if t.startswith('varve-intent')]
        out += ['active: ' + n for n in self.active()]
        out += ['what a process used: ' + n for n in os.listdir(os.path.join(self.home, 'lock')) if '.used-' in n]
        folder = os.path.join(self.runtime, '.intents')
        return out + (os.listdir(folder) if os.path.isdir(folder) else [])
