"""Renaming and moving volumes with their snapshots: names, contents, times, and what is refused."""
import json, os, stat, subprocess, sys, time
from volmodel import MIB, Pool, moved
from proc import Failed, done, folder, need, qio, run
from volserver import Served
from voltools import backing, digest, fresh_in, info, refused

os.environ['PATH'] += ':/usr/sbin:/sbin'
need('qemu-img', 'qemu-io')
BASE = folder()
V, W, C, D = '100/vm-100-disk-0', '100/vm-100-disk-1', '101/vm-101-disk-0', '102/vm-102-disk-0'


def fresh(name, **kw):
    return fresh_in(BASE, name, **kw)


def tree(p, vol, suffix=''):
    """current on s2 on s1, s3 on s1, each with its own data"""
    p.create(vol + suffix)
    p.write(vol, 0, MIB, 0x11)
    p.snapshot(vol, 's1')
    p.write(vol, 65536, 65536, 0x21)
    p.snapshot(vol, 's3')
    p.rollback(vol, 's1')
    p.write(vol, 131072, 65536, 0x22)
    p.snapshot(vol, 's2')
    p.write(vol, 2 * MIB, 65536, 0x30)


def shape(p, vol):
    """what must survive: parents, times, formats, modes"""
    return [(e['snapshot'], e['parent'], e['format'], e.get('taken'), stat.S_IMODE(os.stat(e['path']).st_mode))
            for e in info(p, vol)['elements']]


def age(p, vol):
    """snapshots of some time ago: the time is kept"""
    for i, s in enumerate(s for s in p.vols[vol] if s):
        os.utime(p.file(vol, s), (1.6e9 + i, 1.6e9 + i))


def rename():
    p = fresh('rename')
    tree(p, V)
    tree(p, 'data', '.raw')
    age(p, V)
    age(p, 'data')
    was = shape(p, V), shape(p, 'data')
    for old, new in ((V, W), (W, C), (C, 'free'), ('data', V)):
        before = digest(p)
        p.varve('rename', p.id(old), new, '--dry-run')
        if digest(p) != before:
            raise Failed('--dry-run renamed')
        p.rename(old, new)
        p.verify()
        folder_, _, stem = new.rpartition('/')
        if backing(p, new) != 'snap-s2-%s.qcow2' % stem or not backing(p, new, 's3').startswith('snap-s1-%s.' % stem):
            raise Failed('backing names are %s, %s' % (backing(p, new), backing(p, new, 's3')))
    if (shape(p, 'free'), shape(p, V)) != was:
        raise Failed('renaming has changed\n%s to\n%s' % (was, (shape(p, 'free'), shape(p, V))))
    if os.path.exists(os.path.join(p.images, '101')):
        raise Failed('the old guest\'s directory is left')
    if info(p, V + '.raw')['id'] != p.id(V + '.qcow2'):
        raise Failed('the raw name is no alias any more')
    p.varve('rename', p.id(V), p.id(W), '-q')
    p.vols[W] = p.vols.pop(V)
    for new in (W, 'free', 'vm-100-disk-5', '103/vm-104-disk-0', 'base-1', 'q:x', 'x.raw', 'x@s', 'snap-a-b'):
        refused(p, 'rename', p.id(W), new)
    refused(p, 'rename', p.id(W, 's1'), 'x', text='snapshots')
    refused(p, 'rename', p.id('none'), 'x', text='none')
    s = Served(p, W)
    refused(p, 'rename', p.id(W), 'x', text='served', same=False)
    s.stop()
    # strays in the way, and a snapshot that would read as another volume's
    stray = os.path.join(p.images, '104')
    os.makedirs(stray)
    for stem in 'snap-s1-vm-104-disk-0', 'snap-x-vm-104-disk-0':
        with open(os.path.join(stray, stem + '.qcow2'), 'wb') as f, open(p.file(W, 's1'), 'rb') as g:
            f.write(g.read(65536))
        refused(p, 'rename', p.id(W), '104/vm-104-disk-0', text='104-disk-0')
        os.unlink(os.path.join(stray, stem + '.qcow2'))
    p.create('b-x')
    p.create('y')
    p.snapshot('y', 'a')
    refused(p, 'rename', p.id('y'), 'x-b-x', text='b-x')
    p.verify()


def rename_clones():
    p = fresh('rename-clones')
    p.create(V)
    p.write(V, 0, MIB, 1)
    v = p.template(V)
    p.clone(v, None, C)
    p.snapshot(C, 's1')
    p.write(C, MIB, 65536, 2)
    p.clone(C, 's1', D)
    refused(p, 'rename', p.id(v), '103/vm-103-disk-0', text='base image')
    refused(p, 'rename', p.id(C), '103/vm-103-disk-0', text='vm-102-disk-0')
    p.write(D, 0, 4096, 3)
    name = D
    for new in '103/vm-103-disk-0', 'free', '104/vm-104-disk-0':
        p.rename(name, new)
        p.verify()
        name = new
        if backing(p, name) != ('101/' if name == 'free' else '../101/') + 'snap-s1-vm-101-disk-0.qcow2':
            raise Failed('a renamed clone stands on ' + backing(p, name))
    p.destroy(name)
    p.rename(C, 'c')
    p.verify()
    if backing(p, 'c', 's1') != '100/base-100-disk-0.qcow2':
        raise Failed('a renamed clone stands on ' + backing(p, 'c', 's1'))
    refused(p, 'destroy', p.id(v), text='c.qcow2@s1')


def move():
    p = fresh('move', other='q')
    tree(p, V)
    tree(p, 'data', '.raw')
    for vol in V, 'data':
        age(p, vol)
        was = shape(p, vol)
        before = digest(p)
        p.varve('move', p.id(vol), 'q:', '--delete', '--dry-run')
        if digest(p) != before:
            raise Failed('--dry-run moved')
        to = p.move(vol)                       # a copy
        p.verify()
        if shape(p, to) != was:
            raise Failed('moving has changed\n%s to\n%s' % (was, shape(p, to)))
        for s in p.vols[vol]:
            if backing(p, vol, s) != backing(p, to, s):
                raise Failed('%s: the backing name became %s' % (s, backing(p, to, s)))
            used = [os.stat(p.file(v, s)).st_blocks * 512 for v in (vol, to)]
            if used[1] > used[0] + MIB:
                raise Failed('%s takes %d bytes, %d before: not its own data alone' % (s, used[1], used[0]))
        refused(p, 'move', p.id(vol), 'q:', text='exists')
        p.destroy(to)
        p.move(vol, '--delete')
        p.verify()
        if shape(p, to) != was:
            raise Failed('moving has changed\n%s to\n%s' % (was, shape(p, to)))
        p.move(to, '--delete')
        p.verify()
    if os.path.exists(os.path.join(p.roots['q:'], '100')):
        raise Failed('the old guest\'s directory is left')
    for args in ([p.id(V), 'p:'], [p.id(V), 'none:'], [p.id('none'), 'q:'], [p.id(V, 's1'), 'q:'], [p.id(V), 'q:x']):
        refused(p, 'move', *args)
    s = Served(p, V)
    refused(p, 'move', p.id(V), 'q:', text='served', same=False)
    s.stop()
    os.makedirs(os.path.join(p.roots['q:'], '100'))
    with open(os.path.join(p.roots['q:'], '100', 'snap-s1-vm-100-disk-0.qcow2'), 'wb') as f, open(p.file(V, 's1'), 'rb') as g:
        f.write(g.read())
    refused(p, 'move', p.id(V), 'q:', '--delete', text='vm-100-disk-0')
    os.unlink(os.path.join(p.roots['q:'], '100', 'snap-s1-vm-100-disk-0.qcow2'))
    out = json.loads(p.varve('move', p.id(V), 'q:', '--delete', '--json'))
    if 'q:%s.qcow2 and 3 snapshots moved' % V not in out['messages']:
        raise Failed('what move says: %s' % out)


def move_clones():
    p = fresh('move-clones', other='q')
    p.create('q:x', MIB)
    p.create(V, 8 * MIB)
    p.write(V, 0, 2 * MIB, 1)
    v = p.template(V)
    p.clone(v, None, C)
    p.write(C, MIB, 65536, 2)
    p.snapshot(C, 's1')
    p.write(C, 2 * MIB, 65536, 3)
    p.clone(C, 's1', D)
    p.write(D, 3 * MIB, 65536, 4)
    refused(p, 'move', p.id(C), 'q:', text='--flatten')
    refused(p, 'move', p.id(v), 'q:', '--delete', text='vm-101-disk-0')
    refused(p, 'move', p.id(C), 'q:', '--delete', text='vm-102-disk-0')
    # flattened: what it stands on is in it
    to = p.move(C, '--flatten')
    p.verify()
    if backing(p, to, 's1') or backing(p, to) != 'snap-s1-vm-101-disk-0.qcow2':
        raise Failed('flattened, it stands on %s' % backing(p, to, 's1'))
    p.destroy(to)
    # with its base there, clone and clone of the clone are moved as they are
    p.move(v)
    if stat.S_IMODE(os.stat(p.file(moved(p, v))).st_mode) != 0o444:
        raise Failed('the moved base image can be written to')
    refused(p, 'move', p.id(D), 'q:', text='--flatten')
    p.move(C)
    p.move(D, '--delete')
    p.verify()
    if info(p, 'q:' + C)['id'] != 'q:100/base-100-disk-0.qcow2/%s.qcow2' % C:
        raise Failed('the moved clone is called ' + info(p, 'q:' + C)['id'])
    if backing(p, 'q:' + D) != '../101/snap-s1-vm-101-disk-0.qcow2':
        raise Failed('the moved clone stands on ' + backing(p, 'q:' + D))
    refused(p, 'destroy', 'q:' + v, text='vm-101-disk-0')
    refused(p, 'destroy', 'q:%s@s1' % C, text='vm-102-disk-0')
    p.destroy('q:' + D)
    p.destroy('q:' + C)
    # another image under the base image's name
    p.destroy('q:' + v)
    p.create('q:' + V, 8 * MIB)
    p.write('q:' + V, 0, 2 * MIB, 1)
    p.write('q:' + V, 2 * MIB - 512, 512, 9)
    p.template('q:' + V)
    refused(p, 'move', p.id(C), 'q:', '--delete', text='differ')
    p.verify()
    p.move(C, '--delete', '--flatten')
    p.verify()
    p.destroy(v)


def no_room():
    """the target is too small: nothing is left there, and the source is as it was"""
    p = fresh('no-room', other='q')
    p.create('q:x', MIB)
    p.create(V, 4 * MIB, '-o', 'preallocation=off')
    p.write(V, 0, MIB, 1)
    p.snapshot(V, 's1')
    p.write(V, 0, 2 * MIB, 2)
    v = p.varve('tree', p.id(V))
    for args in (['move', p.id(V), 'q:', '--delete'], ['clone', p.id(V), 'q:' + C, '--full'],
                 ['clone', p.id(V, 's1'), 'q:' + C, '--full']):
        before = digest(p)
        r = subprocess.run(['bash', '-c', 'ulimit -f 700; trap "" XFSZ; exec "$@"', 'x'] + p.argv(*args), env=p.env(),
                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60)
        if r.returncode != 1 or digest(p) != before or p.hidden():
            raise Failed('%s without room: %d %s, left %s' % (args, r.returncode, r.stdout.decode(), p.hidden()))
    if p.varve('tree', p.id(V)) != v:
        raise Failed('the source has changed')
    p.move(V, '--delete')
    p.verify()


def killed(p, at):
    rc, out = p.varve('move', p.id(V), 'q:', '--delete', rc=None, env={'VARVE_CRASH_AT': at})
    if rc != -9:
        raise Failed('not killed at %s: %d %s' % (at, rc, out))


def unreachable():
    """a move is killed, and one of the storages is away when the other one is used"""
    for at in 'move-published:1', 'move-published:2':
        p = fresh('unreachable-' + at[-1], other='q')
        p.create('q:x', MIB)
        p.create(V)
        p.write(V, 0, MIB, 1)
        p.snapshot(V, 's1')
        p.write(V, MIB, MIB, 2)
        killed(p, at)
        there = dict(p.vols[V])
        os.rename(os.path.dirname(p.roots['q:']), p.path + '.away')
        # the source is whole: it stays, can be used, and what is written to it is never lost
        out = p.varve('resize', p.id(V), '+1M')
        p.vols[V][None] += bytes(MIB)
        if 'stays here' not in out:
            raise Failed('what is said of the move: ' + out)
        p.write(V, 0, 4096, 9)
        os.rename(p.path + '.away', os.path.dirname(p.roots['q:']))
        p.varve('pool', 'check', 'q', '--repair')
        if at.endswith('2'):
            p.vols['q:' + V] = there
        p.verify()
        if p.hidden():
            raise Failed('left behind: %s' % p.hidden())
    # a part of the source has gone: it waits for the target
    p = fresh('unreachable-3', other='q')
    p.create('q:x', MIB)
    p.create(V)
    p.write(V, 0, MIB, 1)
    p.snapshot(V, 's1')
    killed(p, 'destroy-unlinked:1')
    os.rename(os.path.dirname(p.roots['q:']), p.path + '.away')
    p.varve('resize', p.id(V), '+1M', rc=1)
    os.rename(p.path + '.away', os.path.dirname(p.roots['q:']))
    os.rename(p.path, p.path + '.away')
    p.varve('resize', 'q:' + V, '+1M', rc=1)
    p.varve('resize', 'q:x', '+1M')
    os.rename(p.path + '.away', p.path)
    p.varve('resize', 'q:' + V, '+1M')
    p.vols['q:x'][None] += bytes(MIB)
    p.vols['q:' + V] = p.vols.pop(V)
    p.vols['q:' + V][None] += bytes(MIB)
    p.verify()
    if p.hidden():
        raise Failed('left behind: %s' % p.hidden())


def reflink():
    """where the file system shares blocks, a copy of a file takes none"""
    home = os.path.join(BASE, 'reflink')
    os.makedirs(home + '/m')
    run('truncate', '-s', '400M', home + '/disk')
    if run('mkfs.xfs', '-q', '-m', 'reflink=1', home + '/disk', rc=None)[0] or \
            run('mount', '-o', 'loop', home + '/disk', home + '/m', rc=None)[0]:
        print('SKIP reflink: no XFS on a loop device here')
        return
    try:
        p = Pool(home + '/m', other='q')
        p.create(V, 16 * MIB)
        p.write(V, 0, 12 * MIB, 1)
        p.snapshot(V, 's1')
        p.write(V, MIB, 8 * MIB, 2)
        run('sync', '-f', home + '/m')
        free = os.statvfs(home + '/m').f_bfree
        p.move(V)
        p.clone(V, 's1', 'q:' + C, '--full')
        run('sync', '-f', home + '/m')
        taken = (free - os.statvfs(home + '/m').f_bfree) * os.statvfs(home + '/m').f_frsize
        if taken > 4 * MIB:
            raise Failed('copies of 32 MiB took %d KiB' % (taken >> 10))
        # of a chain the lowest image is shared; what is above it is copied, zeroes and added length too
        qio(p.file(V), 'write -z 4M 1M')
        cur = bytearray(p.vols[V][None])
        cur[4 * MIB:5 * MIB] = bytes(MIB)
        p.vols[V][None] = bytes(cur)
        p.varve('resize', p.id(V), '+1M')
        p.vols[V][None] += bytes(MIB)
        p.write(V, 16 * MIB, 65536, 5)
        p.clone(V, None, 'q:' + D, '--full')
        if backing(p, 'q:' + D):
            raise Failed('a full clone stands on ' + backing(p, 'q:' + D))
        run('sync', '-f', home + '/m')
        taken = (free - os.statvfs(home + '/m').f_bfree) * os.statvfs(home + '/m').f_frsize
        if taken > 14 * MIB:
            raise Failed('a copy of 8 MiB over 12 shared ones took %d KiB' % (taken >> 10))
        p.write(V, 0, MIB, 3)
        p.write('q:' + V, 0, 65536, 4)
        p.verify()
    finally:
        run('umount', home + '/m')


TESTS = [rename, rename_clones, move, move_clones, no_room, unreachable, reflink]
for test in TESTS:
    if len(sys.argv) < 2 or test.__name__ in sys.argv[1:]:
        t = time.monotonic()
        try:
            test()
        except Failed as e:
            raise Failed('%s: %s' % (test.__name__, e))
        print('%-14s %.1f s' % (test.__name__, time.monotonic() - t), flush=True)
done('ok')
