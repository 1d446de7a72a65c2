"""`varve list` of a pool of 1000 volumes with 5 snapshots each: how long, and what it takes.

The volume group is on a loop device; its metadata are made as text and restored, the images' heads written where they lie. Nothing
is active. Page cache and LVM's own files are warm; the headers on the device are read past any cache, each time.
"""
import contextlib, os, shutil, subprocess, sys, time
from measure import Row
from rows_device import Skipped
from servers import Failed

HERE = os.path.dirname(os.path.abspath(__file__))
LIB = os.path.join(HERE, '..', 'tests', 'lib')
sys.path.append(LIB)
import bigpool

VOLUMES, SNAPSHOTS, VG, EXTENT = 1000, 5, 'varvebench', 4 << 20


def out(*argv, env=None):
    p = subprocess.run(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if p.returncode:
        raise Failed('%s: %s' % (' '.join(argv), p.stderr.strip()[-300:]))
    return p.stdout


@contextlib.contextmanager
def volume_group(folder):
    """(the environment for LVM's tools, the section of storage.cfg)"""
    if os.geteuid() or not shutil.which('lvm') or not shutil.which('losetup'):
        raise Skipped('volume groups on loop devices need root and lvm2')
    with open(folder + '/pv', 'wb') as f:
        f.truncate((VOLUMES * (SNAPSHOTS + 1) + 100) * EXTENT + (100 << 20))
    try:
        dev = out('losetup', '-f', '--show', f.name).strip()
    except Failed as e:
        raise Skipped(str(e))
    try:
        etc = folder + '/etc'
        os.makedirs(etc)
        with open(etc + '/lvm.conf', 'w') as f:
            f.write('global { locking_dir="%s" }\ndevices { hints="none" }\n' % etc)
        env = dict(os.environ, VARVE_TEST_LVM_DEVICES=dev, VARVE_TEST_LVM_LOG=folder + '/commands', LVM_SYSTEM_DIR=etc, LVM_SUPPRESS_FD_WARNINGS='1',
                   VARVE_LOCK_DIR=etc, VARVE_RUNTIME=etc, PATH=os.path.join(LIB, 'lvm') + ':' + os.environ['PATH'])
        out('lvm', 'pvcreate', '-q', '-ff', '--yes', '--metadatasize', '64m', dev, env=env)
        out('lvm', 'vgcreate', '-q', VG, dev, env=env)
        out('lvm', 'vgcfgbackup', '-f', folder + '/empty', VG, env=env)
        with open(folder + '/empty') as f:
            text, names = bigpool.metadata(f.read(), VOLUMES, SNAPSHOTS)
        with open(folder + '/full', 'w') as f:
            f.write(text)
        out('lvm', 'vgcfgrestore', '-q', '--force', '-f', f.name, VG, env=env)
        start = int(out('lvm', 'pvs', '--noheadings', '--units', 'b', '--nosuffix', '-o', 'pe_start', dev, env=env))
        bigpool.heads(dev, start, EXTENT, names)
        yield env, 'lvm: p\n\tvgname %s\n\tsnapext 1\n' % VG
    finally:
        subprocess.run(['losetup', '-d', dev])


@contextlib.contextmanager
def directory(folder):
    os.makedirs(folder + '/d/images')
    bigpool.files(folder + '/d', VOLUMES, SNAPSHOTS)
    yield dict(os.environ, VARVE_RUNTIME=folder), 'dir: p\n\tpath %s/d\n\tsnapext 1\n' % folder


def opens(argv, env, folder):
    """(opened files of the pool, other programs) of one run; None without strace"""
    if not shutil.which('strace'):
        return None, None
    log = folder + '/strace'
    out('strace', '-f', '-qq', '-z', '-e', 'trace=openat,execve', '-o', log, *argv, env=env)
    with open(log) as f:
        lines = f.readlines()
    return sum('.qcow2"' in line for line in lines), sum('execve(' in line and ' = 0' in line for line in lines) - 1


class ListRow(Row):
    def __init__(self, what, make):
        super().__init__('list', what, None, [], True, room=256 << 20)
        self.make = make

    def run(self, ctx, nr):
        folder = ctx.folder + '/pool'
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder)
        try:
            with self.make(folder) as (env, section):
                return self.measure(ctx, nr, folder, env, section)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def measure(self, ctx, nr, folder, env, section):
        with open(folder + '/cfg', 'w') as f:
            f.write(section)
        argv = [ctx.varve.program, 'list', 'p', '--config', f.name]
        cells = []
        for k in range(ctx.turns + 1):
            log, before = folder + '/commands', os.times()
            if os.path.exists(log):
                os.unlink(log)
            t = time.monotonic()
            text = out(*argv, env=env)
            secs, now = time.monotonic() - t, os.times()
            if len(text.splitlines()) != 1 + VOLUMES * (SNAPSHOTS + 1):
                raise Failed('%d lines of %s' % (len(text.splitlines()), self.name))
            if k:                               # the first one warms caches
                cells.append({'kind': 'list', 'row': self.name, 'load': '%d volumes, %d snapshots each' % (VOLUMES, SNAPSHOTS), 'server': 'varve',
                              'round': nr * 100 + k, 'secs': secs, 'cpu_s': now[2] + now[3] - before[2] - before[3],
                              'commands': sum(1 for _ in open(log)) if os.path.exists(log) else 0})
        cells[0]['opens'], cells[0]['programs'] = opens(argv, env, folder)
        ctx.say('%-30s %.2f s, CPU %.2f s, %d LVM commands, %s images opened, %s programs' % (
            self.name, cells[0]['secs'], cells[0]['cpu_s'], cells[0]['commands'], cells[0]['opens'], cells[0]['programs']))
        return cells


def rows(ctx):
    yield ListRow('volume group', volume_group)
    yield ListRow('directory', directory)
