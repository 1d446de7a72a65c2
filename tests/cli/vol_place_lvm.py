"""Moves and full clones between directories and volume groups: names, contents, what each element has of its own, refusals."""
import json, os, stat, subprocess, sys, time
from volmodel import KINDS, MIB, moved
from lvmpool import LvmPool
from mixedpool import MixedPool
from proc import Failed, done, folder, need, qio, run
from voltools import info

os.environ['PATH'] += ':/usr/sbin:/sbin'
need('qemu-img', 'qemu-io', 'lvm', 'losetup')
BASE = folder()
V, W, C, D = '100/vm-100-disk-0', '100/vm-100-disk-1', '101/vm-101-disk-0', '102/vm-102-disk-0'
THICK = '\tthin-chunk 0\n'


def fresh(name, cls=MixedPool, **kw):
    home = os.path.join(BASE, name)
    os.makedirs(home)
    return cls(home, **kw) if cls is MixedPool else cls(home, other='q', **kw)


def qemu(p, vol, *ops):
    """qemu-io on the current element; the model is told by the caller"""
    with p.opened(vol) as path:
        qio(path, *ops, fmt=p.fmt(path))


def fill(p, vol, off, length, byte):
    data = bytearray(p.vols[vol][None])
    data[off:off + length] = bytes([byte]) * length
    p.vols[vol][None] = bytes(data)


def zero(p, vol, off, length, how='write -z'):
    qemu(p, vol, '%s %d %d' % (how, off, length))
    fill(p, vol, off, length, 0)


def tree(p, vol, suffix=''):
    """current on s2 on s1, s3 on s1, each with its own data; zeroes, written and discarded, over data below"""
    p.create(vol + suffix)
    p.write(vol, 0, 2 * MIB, 0x11)
    p.snapshot(vol, 's1')
    p.write(vol, 65536, 65536, 0x21)
    zero(p, vol, 256 << 10, 128 << 10)
    zero(p, vol, 512 << 10, 256 << 10, 'discard')
    p.write(vol, 1 * MIB, 4096, 0)           # data that is zero
    p.snapshot(vol, 's3')
    p.rollback(vol, 's1')
    p.write(vol, 131072 + 4096, 8192, 0x22)   # a part of a cluster
    zero(p, vol, MIB, 65536, 'write -z -u')
    p.snapshot(vol, 's2')
    zero(p, vol, 131072, 4096)
    p.write(vol, 3 * MIB + 512, 65536, 0x30)
    for i, s in enumerate(('s1', 's2', 's3')):
        p.set_taken(vol, s, 1600000000 + i)


def shape(p, vol):
    """what must survive"""
    return [(e['snapshot'], e['parent'], e['format'], e.get('taken') if e['snapshot'] else None) for e in info(p, vol)['elements']]


def own(p, vol):
    """from which level of the chain each part of each element comes: a zero is not a hole"""
    out = {}
    for s in p.vols[vol]:
        path = p.file(vol, s)
        levels = []
        with p.reading():
            for m in json.loads(run('qemu-img', 'map', '-U', '-f', p.fmt(path), '--output=json', path)):
                if levels and levels[-1][1] == m['depth']:
                    levels[-1][0] += m['length']
                else:
                    levels.append([m['length'], m['depth']])
        out[s] = levels
    return out


def one_move(p, suffix, vols=(V, 'data')):
    for vol in vols:
        tree(p, vol, suffix)
        was = shape(p, vol), own(p, vol)
        at = p.digest()
        out = p.varve('move', p.id(vol), 'q:', '--dry-run')
        if p.digest() != at or 'would copy' not in out:
            raise Failed('--dry-run moved: ' + out)
        move_three_times(p, vol, was)


def move_three_times(p, vol, was):
    for how in ((), ('--delete',)):
        src = vol
        to = p.move(src, *how)
        p.verify()
        check(p, to, was)
        if not how:
            p.varve('move', p.id(src), 'q:', rc=1)
            p.destroy(to)
    check(p, p.move(moved(p, vol), '--delete'), was)
    p.verify()
    if p.hidden():
        raise Failed('left behind: %s' % p.hidden())
    p.destroy(vol)


def check(p, vol, was):
    if shape(p, vol) != was[0]:
        raise Failed('moving has changed\n%s to\n%s' % (was[0], shape(p, vol)))
    if own(p, vol) != was[1]:
        raise Failed('%s: what the elements have was\n%s\nand became\n%s' % (vol, was[1], own(p, vol)))


def up():
    """from a directory to a VG and back"""
    p = fresh('up')
    one_move(p, '')


def up_raw():
    p = fresh('up-raw', other_keys=THICK)
    one_move(p, '.raw')
    p.create(W + '.raw', 4 * MIB)
    p.write(W, MIB, MIB, 7)
    os.chmod(p.file(W), 0o600)
    p.varve('snapshot', p.id(W, 'x'))
    p.vols[W]['x'] = p.vols[W][None]
    p.move(W, '--delete')
    p.move('q:' + W, '--delete')
    p.verify()
    if stat.S_IMODE(os.stat(p.file(W, 'x')).st_mode) != 0o444:
        raise Failed('the raw snapshot can be written to')


def between():
    """from a VG to another one"""
    p = fresh('between', LvmPool, keys=THICK)
    one_move(p, '', [V])


def geometry():
    """other clusters, version 2, compressed clusters; the geometry stays"""
    p = fresh('geometry', other_keys='\tthin-chunk 64M\n')
    for i, opts in enumerate(('cluster_size=4k', 'cluster_size=2M', 'cluster_size=16k,extended_l2=on', 'compat=0.10', 'cluster_size=512')):
        vol = '10%d/vm-10%d-disk-0' % (i, i)
        p.create(vol, 4 * MIB)
        path, raw = p.file(vol), os.path.join(p.home, 'raw')
        with open(raw, 'wb') as f:
            f.write(b'\x31' * MIB + bytes(MIB) + bytes(range(256)) * 4096 + bytes(MIB - 1024) + b'\x32' * 1024)
        run('qemu-img', 'convert', '-c', '-O', 'qcow2', '-o', opts, raw, path) if 'extended' not in opts else \
            run('qemu-img', 'convert', '-O', 'qcow2', '-o', opts, raw, path)
        with open(raw, 'rb') as f:
            p.vols[vol][None] = f.read()
        p.write(vol, 5 << 18, 512, 0x33)
        p.snapshot(vol, 's')
        zero(p, vol, 0, 512 << 10)
        top = p.file(vol)
        p.varve('info', p.id(vol))
        kind = [run('qemu-img', 'info', '--output=json', p.file(vol, s)) for s in ('s', None)]
        to = p.move(vol, '--delete')
        p.verify()
        p.move(to, '--delete')
        p.verify()
        again = [run('qemu-img', 'info', '--output=json', p.file(vol, s)) for s in ('s', None)]
        for a, b in zip(kind, again):
            a, b = json.loads(a), json.loads(b)
            if a['virtual-size'] != b['virtual-size'] or a['cluster-size'] != b['cluster-size'] or \
                    any(a['format-specific']['data'].get(k) != b['format-specific']['data'].get(k) for k in ('compat', 'extended-l2', 'refcount-bits')):
                raise Failed('%s: the image was %s and is %s' % (opts, a, b))
        p.destroy(vol)
    # internal snapshots would be lost
    p.create(V, MIB)
    run('qemu-img', 'snapshot', '-c', 'x', p.file(V))
    before = p.digest()
    if 'internal snapshots' not in p.varve('move', p.id(V), 'q:', rc=1) or p.digest() != before or p.hidden():
        raise Failed('internal snapshots were lost')


def lengths():
    """a raw LV is as long as its extents; nobody sees what was there before"""
    p = fresh('lengths', extent='4m')
    p.create(V + '.raw', 4 * MIB)
    os.truncate(p.file(V), 5 * MIB - 700)
    with open(p.file(V), 'r+b') as f:
        f.seek(5 * MIB - 1000)
        f.write(b'\x44' * 300)
    p.vols[V][None] = bytes(5 * MIB - 1000) + b'\x44' * 300 + bytes(3 * MIB + 700)
    p.move(V, '--delete')
    p.verify()
    p.move('q:' + V, '--delete')
    p.verify()
    if os.stat(p.file(V)).st_size != 8 * MIB or os.stat(p.file(V)).st_blocks * 512 > MIB:
        raise Failed('the file is %s' % (os.stat(p.file(V)),))
    # shorter than what the disk held before
    p.create('x.raw', 4 * MIB)
    os.truncate(p.file('x'), 300 << 10)
    p.vols['x'][None] = b'\x55' * 4096 + bytes(4 * MIB - 4096)
    with open(p.file('x'), 'r+b') as f:
        f.write(b'\x55' * 4096)
    p.clone('x', None, 'q:y', '--full', '--format', 'raw')
    p.move('x', '--delete')
    p.verify()
    # a base image that became longer, with zeroes, is the same one
    os.truncate(p.file(V), 5 * MIB)
    p.vols[V][None] = p.vols[V][None][:5 * MIB]
    base = p.template(V)
    p.clone(base, None, C)
    p.write(C, 0, 65536, 3)
    p.move(base)
    p.vols['q:' + base][None] += bytes(3 * MIB)
    p.move(C, '--delete')
    p.verify()
    p.move('q:' + C, '--delete')
    p.verify()
    with p.opened('q:' + base) as path, open(path, 'r+b') as f:
        f.seek(6 * MIB)
        f.write(b'x')
    if 'differ' not in p.varve('move', p.id(C), 'q:', rc=1):
        raise Failed('moved onto another base image')


def clones():
    p = fresh('clones', keys='\tpreallocation off\n')
    p.create(V, 4 * MIB)
    p.write(V, 0, 2 * MIB, 1)
    v = p.template(V)
    p.clone(v, None, C)
    p.write(C, MIB, 65536, 2)
    p.snapshot(C, 's1')
    p.write(C, 2 * MIB, 65536, 3)
    p.clone(C, 's1', D)
    p.write(D, 3 * MIB, 65536, 4)
    for args, text in ((['q:'], '--flatten'), (['q:', '--delete', '--flatten'], 'vm-102-disk-0')):
        before = p.digest()
        if text not in p.varve('move', p.id(C), *args, rc=1) or p.digest() != before:
            raise Failed('move %s was not refused' % args)
    to = p.move(C, '--flatten')
    p.verify()
    if info(p, to)['elements'][0]['parent']:
        raise Failed('flattened, it stands on something')
    p.destroy(to)
    p.move(v)
    before = p.digest()
    if '--flatten' not in p.varve('move', p.id(D), 'q:', rc=1) or p.digest() != before:
        raise Failed('a clone was moved without what it stands on')
    p.move(C)
    p.move(D, '--delete')
    p.verify()
    if 'based on it' not in p.varve('destroy', 'q:%s@s1' % C, rc=1) and p.hidden():
        raise Failed('what a clone needs was freed')
    p.move('q:' + D, '--delete')
    p.verify()
    p.move(D, '--delete', '--flatten')
    p.destroy('q:' + D)
    p.destroy('q:' + C)
    p.destroy('q:' + v)
    # another image under the base image's name
    p.create('q:' + V, 4 * MIB)
    p.write('q:' + V, 0, 2 * MIB, 1)
    p.write('q:' + V, 2 * MIB - 512, 512, 9)
    p.template('q:' + V)
    before = p.digest()
    if 'differ' not in p.varve('move', p.id(C), 'q:', '--delete', rc=1) or p.digest() != before:
        raise Failed('moved onto another base image')
    p.verify()


def names():
    p = fresh('names', dirs=('q',))
    for vol, text in (('vm-1-disk-0', '3 to 9 digits'), ('vm-1234567890-x', '3 to 9 digits')):
        p.varve('create', 'p:' + vol, '1M')
        if text not in p.varve('move', 'p:' + vol, 'q:', rc=1):
            raise Failed('%s was moved to a directory' % vol)
        p.varve('destroy', 'p:' + vol)
    long = 'a' * 150
    p.varve('create', 'q:' + long, '1M')
    if 'too long' not in p.varve('move', 'q:' + long, 'p:', rc=1):
        raise Failed('an LV got too long a name')
    for vol in 'vm-x', 'free':
        p.create(vol, MIB)
        p.move(vol, '--delete')
    p.varve('destroy', 'q:' + long)
    # snapshots of that name are there
    p.create('q:' + V, MIB)
    p.snapshot('q:' + V, 's')
    p.varve('create', p.id(V), '1M')
    if 'exists' not in p.varve('move', p.id(V), 'q:', rc=1):
        raise Failed('moved over another volume')
    p.varve('destroy', p.id(V))
    p.verify()


def no_room():
    """the VG is full in the middle: undone"""
    for i, (keys, text) in enumerate(((THICK, 'extents'), ('\tthin-chunk 4M\n', 'space'))):
        p = fresh('no-room-%d' % i, size=48 * MIB, metadata='1m', other_keys=keys)
        p.create(V, 32 * MIB)
        p.write(V, 0, 24 * MIB, 1)
        p.snapshot(V, 's1')
        p.write(V, 0, 24 * MIB, 2)
        for args in (['move', p.id(V), 'q:', '--delete'], ['clone', p.id(V), 'q:' + C, '--full'] if i else ['move', p.id(V), 'q:']):
            if args[0] == 'clone':
                p.varve('create', 'q:' + W, '30M', '--format', 'raw')
            before = p.digest()
            out = p.varve(*args, rc=1)
            if p.digest() != before or p.hidden() or text not in out or len(out.strip().splitlines()) > 2:
                raise Failed('%s without room said "%s", left %s' % (args, out, p.hidden()))
        p.verify() if not i else None


def thin():
    """what is moved to LVs that grow takes what it has, and a chunk where it goes on"""
    p = fresh('thin', other_keys='\tthin-chunk 8M\n')
    p.create(V, 512 * MIB)
    p.write(V, 0, 40 * MIB, 1)
    p.snapshot(V, 's1')
    p.write(V, 100 * MIB, 20 * MIB, 2)
    p.snapshot(V, 's2')
    p.move(V, '--delete')
    sizes = {n: size >> 20 for n, _, _, size in p.lvs('q')}
    want = {'snap_vm-100-disk-0_s1.qcow2': (40, 44), 'snap_vm-100-disk-0_s2.qcow2': (20, 24), 'vm-100-disk-0.qcow2': (1, 8)}
    if any(not a <= sizes[n] <= b for n, (a, b) in want.items()):
        raise Failed('LVs of %s MiB' % sizes)
    p.clone('q:' + V, None, 'q:' + C, '--full')
    sizes = {n: size >> 20 for n, _, _, size in p.lvs('q')}
    if not 60 <= sizes['vm-101-disk-0.qcow2'] <= 80:
        raise Failed('LVs of %s MiB' % sizes)
    p.verify()


def full_clones():
    for dirs in ('p',), ('q',):
        p = fresh('clone-' + dirs[0], dirs=dirs, extent='4m')
        tree(p, V)
        tree(p, 'data', '.raw')
        for n, (src, snap, fmt) in enumerate(((V, None, 'qcow2'), (V, 's3', 'raw'), ('data', None, 'qcow2'), ('data', 's1', 'raw'),
                                              ('data', 's2', 'raw'))):
            p.clone(src, snap, 'q:c%d' % n, '--full', '--format', fmt)
        p.verify()
        if p.hidden():
            raise Failed('left behind: %s' % p.hidden())


def killed(p, *args, at):
    rc, out = p.varve(*args, rc=None, env={'VARVE_CRASH_AT': at})
    if rc != -9:
        raise Failed('not killed at %s: %d %s' % (at, rc, out))


def unreachable():
    """a move is killed, and the target is away when the source is used"""
    for dirs in ('p',), ('q',):
        for at in 'move-published:%d' % (1 if dirs == ('p',) else 2), 'destroy-unlinked:1':
            p = fresh('unreachable-%s-%s' % (dirs[0], at.replace(':', '-')), dirs=dirs)
            p.create('q:' + W, MIB)
            p.create(V, 4 * MIB)
            p.write(V, 0, MIB, 1)
            p.snapshot(V, 's1')
            p.write(V, MIB, MIB, 2)
            killed(p, 'move', p.id(V), 'q:', '--delete', at=at)
            there = dict(p.vols[V])
            devices = list(p.devices)
            if dirs == ('p',):
                p.devices = devices[:1]
            else:
                os.rename(p.dir_of('q'), p.home + '/away')
            rc, out = p.varve('resize', p.id(V), '+1M', rc=None)
            if dirs == ('p',):
                p.devices = devices
            else:
                os.rename(p.home + '/away', p.dir_of('q'))
            if at.startswith('destroy'):      # a part of the source has gone: it waits for the target
                if rc != 1:
                    raise Failed('half a source was used: %d %s' % (rc, out))
                p.varve('pool', 'check', 'p', '--repair')
                p.vols['q:' + V] = p.vols.pop(V)
            else:                             # it is whole: it stays
                if rc != 0 or 'stays here' not in out:
                    raise Failed('what is said of the move: %d %s' % (rc, out))
                p.vols[V][None] += bytes(MIB)
                p.write(V, 0, 4096, 9)
                p.varve('pool', 'check', 'q', '--repair')
                if at.endswith('2'):
                    p.vols['q:' + V] = there
            p.verify()
            if p.hidden():
                raise Failed('left behind: %s' % p.hidden())


def rate():
    """at the smaller limit of the two, in bytes"""
    p = fresh('rate', keys='\tbwlimit 4096\n')
    p.create(V, 64 * MIB)
    p.write(V, 32 * MIB, 12 * MIB, 1)
    for to in 'q:', 'p:':
        t = time.monotonic()
        p.move(V if to == 'q:' else 'q:' + V, '--delete')
        if not 2 < time.monotonic() - t < 8:
            raise Failed('12 MiB at 4 MiB/s took %.1f s' % (time.monotonic() - t))
    p.verify()


TESTS = [up, up_raw, between, geometry, lengths, clones, names, no_room, thin, full_clones, unreachable, rate]
for test in TESTS:
    wanted = [a for a in sys.argv[1:] if a not in KINDS]
    if not wanted or test.__name__ in wanted:
        t = time.monotonic()
        try:
            test()
        except Failed as e:
            raise Failed('%s: %s' % (test.__name__, e))
        print('%-14s %.1f s' % (test.__name__, time.monotonic() - t), flush=True)
done('ok')
