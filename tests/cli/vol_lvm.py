"""What only volume groups have: their names, LVs of others, no room, missing PVs, a full metadata area, LVs that are open."""
import json, os, subprocess, sys, time
sys.argv.append('lvm')
from volmodel import KINDS, MIB, release
from proc import Failed, done, folder, need
from voltools import fresh_in, info, refused
from lvmpool import HAS_DM, LvmPool, attach
from volserver import Served

need('qemu-img', 'qemu-io')
BASE = folder()
NAMES = [a for a in sys.argv[1:] if a not in KINDS]
V, W = '100/vm-100-disk-0', '100/vm-100-disk-1'


def fresh(name, **kw):
    return fresh_in(BASE, name, **kw)


def bare(pool):
    """[(name, tags, bytes)] of the VG, and its tags"""
    return sorted((n, sorted(t), size) for n, _, t, size in pool.lvs()), sorted(pool.vg_tags())


def nothing_left(p):
    if p.hidden():
        raise Failed('left behind: %s' % p.hidden())


def layout():
    """names, tags and lengths are those that Proxmox expects"""
    p = fresh('layout', extent='4m', keys='\tthin-chunk 8M\n')
    p.create(V, 64 * MIB)
    p.create(W + '.raw', 4 * MIB)
    p.create('data')
    p.snapshot(V, 's1')
    p.snapshot(W, 's1')
    lvs = {n: (t, size) for n, _, t, size in p.lvs()}
    want = {'vm-100-disk-0.qcow2', 'snap_vm-100-disk-0_s1.qcow2', 'vm-100-disk-1.qcow2', 'snap_vm-100-disk-1_s1', 'data.qcow2'}
    if set(lvs) != want:
        raise Failed('the LVs are %s' % sorted(lvs))
    for n in want:
        tags = lvs[n][0]
        if ('pve-vm-100' in tags) != ('vm-100' in n) or not n.startswith('data') and 'varve' in tags:
            raise Failed('%s has the tags %s' % (n, tags))
    for name, size in (('vm-100-disk-0.qcow2', 8 * MIB), ('vm-100-disk-1.qcow2', 8 * MIB), ('snap_vm-100-disk-1_s1', 4 * MIB)):
        if lvs[name][1] != size:
            raise Failed('%s has %d bytes' % (name, lvs[name][1]))
    p.clone(V, 's1', '101/vm-101-disk-0', '--full')
    p.template('101/vm-101-disk-0')
    nothing_left(p)
    p.verify()


def names():
    p = fresh('names')
    p.create('a')
    p.create('a_b')
    room = 127 - 3 - len(p.vgs['p'])
    long = 'x' * (room - len('.qcow2'))
    for name in ('vm-100-cloudinit', 'vm-100-state-s1', 'x.y', 'x+y', 'x_y', long):
        p.create(name, MIB)
        if '/' not in name and name.startswith('vm-'):
            p.vols['100/' + name] = p.vols.pop(name)
    p.verify()
    # LVM's own words, and what is no name
    for name in ('x' + long, 'snapshot1', 'pvmove0', 'x_mimage', 'a_cdata', 'a_tmeta', 'a_vorigin', 'base-100-disk-0', 'del-1',
                 'snap_a_x', 'snap-x-a', '101/vm-100-disk-7', '100/disk', '.x', '-x', '+x', 'a b', 'x@y', 'é'):
        refused(p, 'create', 'p:' + name, '1M')
    # dashes count twice in the kernel's name
    refused(p, 'create', 'p:v' + '-' * (len(long) - 1), '1M')
    # the name of the snapshot's LV is longer than that of the volume
    refused(p, 'snapshot', p.id(long, 's1'), text='too long')
    refused(p, 'rename', p.id('a'), 'x' + long)
    refused(p, 'rename', p.id('a'), 'snapshot1')
    refused(p, 'clone', p.id('a'), p.id('pvmove1'), '--full')
    refused(p, 'create', p.id('a.raw'), '1M', '--format', 'raw', text='exists')
    nothing_left(p)


def ambiguous():
    """snap_a_b_c is a snapshot b_c of a, or c of a_b: no name is made that could be both"""
    p = fresh('ambiguous')
    p.create('a')
    p.write('a', 0, 4096, 1)
    p.create('a_b')
    refused(p, 'snapshot', 'p:a_b@c')    # the shorter volume's name counts
    refused(p, 'rollback', 'p:a@b_c')
    p.varve('snapshot', 'p:a@b_c')
    refused(p, 'snapshot', 'p:a_b@c')
    refused(p, 'rollback', 'p:a_b@c')
    for vol, want in ('a', ['b_c']), ('a_b', []):
        if [e['snapshot'] for e in info(p, vol)['elements'] if e['snapshot']] != want:
            raise Failed('the snapshots of %s are %s' % (vol, info(p, vol)['elements']))
    p.destroy('a_b')
    p.varve('destroy', 'p:a@b_c')
    p.verify()
    # a volume that would take over what is another's
    p.create('d_e')
    p.varve('snapshot', 'p:d_e@f')
    for args in (['create', 'p:d', '1M'], ['clone', 'p:a', 'p:d', '--full'], ['clone', 'p:d_e@f', 'p:d'], ['rename', 'p:a', 'd']):
        refused(p, *args)
    p.varve('destroy', 'p:d_e@f')
    p.verify()
    nothing_left(p)


def others():
    """LVs without a tag of ours are not listed and never touched; their names are taken"""
    p = fresh('others')
    p.create(V)
    names = ['theirs', 'vm-100-disk-7.qcow2', 'vm-100-disk-8', 'snap_vm-100-disk-0_s1.qcow2', 'base-100-disk-0.qcow2', '.varve-x-0']
    for n in names[:-1]:
        p.lvm('lvcreate', '-q', '-an', '-Zn', '-Wn', '-L', '1m', '-n', n, p.vgs['p'])
    kept = [lv for lv in p.lvs() if lv[0] in names]
    for args in (['create', 'p:theirs.raw', '1M', '--format', 'raw'], ['create', 'p:vm-100-disk-7', '1M'],
                 ['create', 'p:vm-100-disk-8', '1M', '--format', 'raw'], ['snapshot', p.id(V, 's1')], ['template', p.id(V)],
                 ['rename', p.id(V), 'vm-100-disk-7'], ['destroy', 'p:theirs'], ['destroy', 'p:vm-100-disk-7'],
                 ['info', 'p:theirs'], ['resize', 'p:vm-100-disk-8', '+1M'], ['clone', 'p:theirs', 'p:c', '--full'],
                 ['clone', p.id(V), 'p:vm-100-disk-7', '--full']):
        refused(p, *args)
    listed = p.varve('list', 'p', '--json')
    if [n for n in names if n in listed]:
        raise Failed('LVs of others are listed: ' + listed)
    p.varve('pool', 'check', 'p', '--repair', rc=None)
    p.snapshot(V, 's2')
    p.destroy(V)
    if [lv for lv in p.lvs() if lv[0] in names] != kept:
        raise Failed('LVs of others have changed: %s, not %s' % (p.lvs(), kept))
    nothing_left(p)


def no_room():
    """the VG is full: the operation is undone, and says so"""
    p = fresh('room', size=64 * MIB)
    p.create(V, 8 * MIB)
    p.write(V, 0, MIB, 1)
    p.snapshot(V, 's1')
    src = os.path.join(BASE, 'src')
    with open(src, 'wb') as f:
        f.write(b'\1' * (60 * MIB))
    for args in (['create', p.id(W), '60M'], ['create', p.id(W + '.raw'), '60M', '--format', 'raw'], ['import', src, p.id(W)]):
        refused(p, *args, text='free space')
        nothing_left(p)
    p.create('fill.raw', 1 * MIB)
    free = int(p.lvm('vgs', '--noheadings', '--units', 'm', '--nosuffix', '-o', 'vg_free', p.vgs['p']).strip().split('.')[0])
    p.lvm('lvcreate', '-q', '-an', '-Zn', '-Wn', '-L', '%dm' % free, '-n', 'theirs', p.vgs['p'])
    for args in (['snapshot', p.id(V, 's2')], ['rollback', p.id(V, 's1')], ['rollback', p.id(V, 's1'), '--keep', 'k'],
                 ['clone', p.id(V, 's1'), 'p:c'], ['clone', p.id(V), 'p:c', '--full'], ['snapshot', p.id('fill', 's1')],
                 ['resize', p.id('fill'), '+8M'], ['snapshot', p.id(V, 's2'), p.id('fill', 's2')]):
        out = p.varve(*args, rc=None)
    
        nothing_left(p)
        refused(p, *args, text='ree space')
    p.verify()
    p.destroy(V, 's1')
    p.verify()
    p.destroy(V)
    p.destroy('fill')
    nothing_left(p)


def missing():
    """a PV is missing: everything is refused, nothing changes"""
    p = fresh('missing')
    path = os.path.join(p.home, 'pv-more')
    with open(path, 'wb') as f:
        f.truncate(64 * MIB)
    p.create(V)
    p.write(V, 0, MIB, 1)
    p.snapshot(V, 's1')
    p.create(W)
    dev = attach(path)
    p.devices.append(dev)
    p.lvm('pvcreate', '-q', '-ff', '--yes', dev)
    p.lvm('vgextend', '-q', p.vgs['p'], dev)
    before = p.digest()
    p.devices.remove(dev)
    subprocess.run(['losetup', '-d', dev], check=True)
    for args in (['snapshot', p.id(V, 's2')], ['rollback', p.id(V, 's1')], ['destroy', p.id(V, 's1')], ['destroy', p.id(W)],
                 ['create', 'p:x', '1M'], ['clone', p.id(V, 's1'), 'p:x'], ['clone', p.id(V, 's1'), 'p:x', '--full'],
                 ['rename', p.id(W), 'x'], ['template', p.id(W)], ['resize', p.id(W), '+64M']):
        out = p.varve(*args, rc=1)
        if 'missing' not in out:
            raise Failed('varve %s with a missing PV: %s' % (args, out))
    p.varve('list', 'p')
    p.varve('info', p.id(V))
    p.devices.append(attach(path))
    if p.digest() != before:
        raise Failed('something has changed while a PV was missing')
    p.snapshot(V, 's2')
    p.verify()
    nothing_left(p)


def metadata_full():
    """no room for an intent, a name or a tag: nothing is changed, and deletions work"""
    p = fresh('metadata', metadata='128k')
    p.create(V)
    p.write(V, 0, MIB, 1)
    p.snapshot(V, 's1')
    p.create(W)
    n, step = 0, 64
    while step:
        tags = ['t%d.%s' % (n + i, 'x' * 900) for i in range(step)]
        p.lvm('vgchange', '-q', *[w for t in tags for w in ('--addtag', t)], p.vgs['p'], rc=None)
        if tags[-1] in p.vg_tags():
            n += step
        else:
            step //= 2
    for args in (['snapshot', p.id(V, 's2')], ['create', 'p:x', '1M'], ['clone', p.id(V, 's1'), 'p:x'], ['rename', p.id(W), 'x'],
                 ['rollback', p.id(V, 's1')], ['template', p.id(W)]):
        refused(p, *args, text='metadata')
        nothing_left(p)
    p.destroy(W)
    p.destroy(V)
    nothing_left(p)


def hold(path, *how):
    q = subprocess.Popen(['qemu-io', *how, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    q.stdin.write(b'read 0 512\n')
    q.stdin.flush()
    q.stdout.readline()
    return q


def open_elsewhere():
    """an LV that another program has open is left alone"""
    p = fresh('open')
    p.create(V)
    p.write(V, 0, MIB, 1)
    p.snapshot(V, 's1')
    with p.opened(V) as path:
        q = hold(path, '-f', 'qcow2')
        try:
            before = bare(p)
            for args in (['snapshot', p.id(V, 's2')], ['rollback', p.id(V, 's1')], ['destroy', p.id(V, 's1')], ['destroy', p.id(V)],
                         ['resize', p.id(V), '8M'], ['rename', p.id(V), 'x']):
                out = p.varve(*args, rc=1)
                if bare(p) != before:
                    raise Failed('%s on an open volume changed it: %s' % (args, out))
        finally:
            q.stdin.close()
            q.wait()
    p.snapshot(V, 's2')
    p.verify()
    nothing_left(p)


def open_and_gone():
    """an LV that is open without a lock is removed when it is closed"""
    p = fresh('gone')
    p.create(V + '.raw')
    p.write(V, 0, MIB, 1)
    p.create(W)
    with p.opened(V) as path:
        fd = os.open(path, os.O_RDONLY)
        try:
            p.destroy(V)
            if [n for n, _, _, _ in p.lvs() if not n.startswith('.varve-gone-')] != ['vm-100-disk-1.qcow2']:
                raise Failed('the LVs are %s' % p.lvs())
            p.verify()
            listed = p.varve('list', 'p')
            if 'gone' in listed or 'disk-0' in listed:
                raise Failed('what is gone is listed: ' + listed)
            p.varve('pool', 'check', 'p')
            if os.pread(fd, 16, 0) != b'\1' * 16:
                raise Failed('an open LV has lost its content')
        finally:
            os.close(fd)
        p.ours = []
    p.snapshot(W, 's1')
    p.verify()
    nothing_left(p)


def looked_at():
    """somebody looks what is on an LV that is to be deactivated: the next operation does it"""
    p = fresh('looked')
    p.create(V)
    flag = os.path.join(BASE, 'flag')
    before = 'case "$verb $*" in lvchange*-an*) [ -e %s ] || { touch %s; echo "  in use." >&2; exit 5; };; esac' % (flag, flag)
    p.varve('snapshot', p.id(V, 's1'), env={'VARVE_TEST_LVM_BEFORE': before})
    p.vols[V]['s1'] = p.vols[V][None]
    if not os.path.exists(flag) or not p.active():
        raise Failed('no LV stayed active')
    p.create(W)
    p.verify()
    nothing_left(p)


def renamed_over():
    """rollback and commit rename an LV over one that the server of the volume has open"""
    p = fresh('over')
    p.create(V + '.raw')
    p.write(V, 0, MIB, 1)
    p.snapshot(V, 's1')
    s = Served(p, V)
    s.write(MIB, 65536, 2)
    p.snapshot(V, 's2')
    s.write(2 * MIB, 65536, 3)
    p.rollback(V, 's1', 'k')
    s.write(3 * MIB, 65536, 4)
    p.rollback(V, 's2')
    s.write(0, 65536, 5)
    for snap in 'k', 's2', 's1':
        p.destroy(V, snap)
        s.write(65536, 4096, 6)
        if s.read() != p.vols[V][None]:
            raise Failed('after the deletion of %s the disk does not read as it should' % snap)
    s.stop()
    p.verify()
    p.varve('pool', 'check', 'p', '--repair')
    nothing_left(p)
    if [n for n, _, _, _ in p.lvs()] != ['vm-100-disk-0']:
        raise Failed('the LVs are %s' % p.lvs())


def odd_lengths():
    """a raw LV is as long as its extents; what is made of it is, too"""
    p = fresh('odd', extent='4m')
    p.create(V + '.raw', MIB)
    p.vols[V] = {None: p.read(p.file(V))}
    if len(p.vols[V][None]) != 4 * MIB:
        raise Failed('the LV has %d bytes' % len(p.vols[V][None]))
    p.snapshot(V, 's1')
    p.write(V, 3 * MIB, MIB, 1)
    p.destroy(V, 's1')
    p.verify()
    src = os.path.join(BASE, 'odd.src')
    with open(src, 'wb') as f:
        f.write(b'\7' * (5 * MIB + 777))
    p.varve('import', src, p.id(W), '--format', 'raw')
    p.vols[W] = {None: (b'\7' * (5 * MIB + 777)).ljust(8 * MIB, b'\0')}
    p.verify()
    nothing_left(p)


def grown_in_the_middle():
    """a snapshot of a raw volume is committed into an LV that is shorter than the volume by now"""
    p = fresh('grown')
    p.create(V + '.raw')
    p.write(V, 0, MIB, 1)
    p.snapshot(V, 's1')
    p.varve('resize', p.id(V), '9M')
    p.vols[V][None] = p.vols[V][None].ljust(9 * MIB, b'\0')
    p.write(V, 8 * MIB, MIB, 2)
    p.snapshot(V, 's2')
    p.write(V, 6 * MIB, 65536, 3)
    p.destroy(V, 's2')
    p.verify()
    p.destroy(V, 's1')
    p.verify()
    nothing_left(p)


TESTS = [layout, names, ambiguous, others, no_room, missing, metadata_full, open_elsewhere, open_and_gone, looked_at, renamed_over, odd_lengths,
         grown_in_the_middle]
for test in TESTS:
    if not NAMES or test.__name__ in NAMES:
        t = time.monotonic()
        try:
            test()
        except Failed as e:
            raise Failed('%s: %s' % (test.__name__, e))
        release()
        print('%-20s %.1f s' % (test.__name__, time.monotonic() - t), flush=True)
done('ok')
