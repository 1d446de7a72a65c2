"""Pools made by hand as Proxmox VE lays them out: listed, snapshotted, rolled back, merged; names, tags and backing names stay what it expects.
And what `pool check --proxmox` names."""
import json, os, sys
from volmodel import MIB, LVM, Pool
from proc import Failed, done, folder, need, qio, run

need('qemu-img', 'qemu-io', *(['lvm', 'losetup'] if LVM else []))
if LVM and os.getuid():
    print('SKIP: not root')
    sys.exit(77)
LEN = 16 * MIB
# bytes of an LV that holds a full image of 16 MiB: base with 64 KiB clusters; overlay with 128 KiB and extended L2
FULL = {False: 17 * MIB, True: 18 * MIB}
VOL, STEM = '100/vm-100-disk-0', 'vm-100-disk-0'


def snap_name(pool, snap):
    return 'snap_%s_%s.qcow2' % (STEM, snap) if LVM else 'snap-%s-%s.qcow2' % (snap, STEM)


def make(pool, name, below, patterns):
    """one element; below: the name it stands on"""
    opts = ['-o', 'preallocation=metadata' + (',extended_l2=on,cluster_size=128k' if below else '')]
    if LVM:
        vg = pool.vgs[pool.name]
        pool.lvm('lvcreate', '-q', '-y', '-aey', '-Zn', '-Wn', '--setautoactivation=n', '--size', '%db' % FULL[bool(below)], '--name', name,
                 '--addtag', 'pve-vm-100', '--addtag', 'pve-' + STEM + '.qcow2', vg)
        path = os.path.join(pool.images, name)
        run('blkdiscard', '-z', path)
    else:
        path = os.path.join(pool.images, '100', name)
    back = ['-b', below, '-F', 'qcow2'] if below else []
    run('qemu-img', 'create', '-q', '-f', 'qcow2', *back, *opts, path, str(LEN))
    for off, length, pattern in patterns:
        qio(path, 'write -P %d %d %d' % (pattern, off, length), fmt='qcow2')


def hand_made(base, name, keys=''):
    """vm-100-disk-0 with snapshots one and two, in both of which and in the current image something was written"""
    home = os.path.join(base, name)
    os.makedirs(home)
    if LVM:
        from lvmpool import LvmPool
        pool = LvmPool(home, keys=keys)
    else:
        pool = Pool(home, keys=keys)
        os.makedirs(os.path.join(pool.images, '100'))
    data, model = bytearray(LEN), {}
    steps = [('one', (0, 3 * MIB, 1)), ('two', (2 * MIB, 4 * MIB, 2)), (None, (5 * MIB, 3 * MIB, 3))]
    below = None
    for snap, (off, length, pattern) in steps:
        file = snap_name(pool, snap) if snap else STEM + '.qcow2'
        make(pool, file, below, [(off, length, pattern)])
        data[off:off + length] = bytes([pattern]) * length
        model[snap] = bytes(data)
        below = file
    if LVM:
        pool.lvm('lvchange', '-q', '-an', *['%s/%s' % (pool.vgs['p'], lv[0]) for lv in pool.lvs()])
    pool.vols[VOL] = model
    return pool


def backings(pool):
    """{file: (backing name, its format) as recorded}"""
    out = {}
    with pool.reading():
        for snap, path in pool.elements()[VOL].items():
            info = json.loads(run('qemu-img', 'info', '-U', '--output=json', '-f', 'qcow2', path))
            out[os.path.basename(path)] = info.get('backing-filename'), info.get('backing-filename-format')
    return out


def expect(pool, *line):
    """the elements, lowest first, each on the one before, as Proxmox names them"""
    names = [snap_name(pool, s) for s in line] + [STEM + '.qcow2']
    want = {n: (names[i - 1], 'qcow2') if i else (None, None) for i, n in enumerate(names)}
    if backings(pool) != want:
        raise Failed('the chain is %s, not %s' % (backings(pool), want))
    if LVM:
        for name, _, tags, length in pool.lvs():
            own = sorted(t for t in tags if not t.startswith('varve-taken='))
            if own != ['pve-vm-100', 'pve-' + STEM + '.qcow2']:
                raise Failed('LV %s has the tags %s' % (name, tags))
            if length < FULL[want[name][0] is not None] - MIB:
                raise Failed('LV %s has %d bytes' % (name, length))
    out = pool.varve('pool', 'check', 'p', '--proxmox', rc=None)
    if out[0] != 0 or 'Proxmox:' in out[1]:
        raise Failed('pool check --proxmox: %d %s' % out)
    pool.verify()


def taken_over(base):
    pool = hand_made(base, 'over', '\tthin-chunk 0' if LVM else '')
    expect(pool, 'one', 'two')
    names = pool.varve('list', 'p')
    for n in (STEM, '@one', '@two'):
        if n not in names:
            raise Failed('list does not show %s: %s' % (n, names))
    pool.snapshot(VOL, 'three')
    expect(pool, 'one', 'two', 'three')
    pool.write(VOL, 9 * MIB, 2 * MIB, 4)
    pool.destroy(VOL, 'two')
    expect(pool, 'one', 'three')
    pool.rollback(VOL, 'three')
    expect(pool, 'one', 'three')
    pool.write(VOL, 0, MIB, 5)
    pool.destroy(VOL, 'three')
    expect(pool, 'one')
    pool.destroy(VOL, 'one')
    expect(pool)
    if pool.hidden():
        raise Failed('left: %s' % pool.hidden())


def found(pool, *texts, none=()):
    rc, out = pool.varve('pool', 'check', 'p', '--proxmox', rc=None)
    for t in texts:
        if t not in out:
            raise Failed('pool check --proxmox does not say "%s": %s' % (t, out))
    for t in none:
        if t in out:
            raise Failed('pool check --proxmox says "%s": %s' % (t, out))
    if rc != 1:
        raise Failed('pool check --proxmox ends with %d: %s' % (rc, out))


def named(base):
    """each thing that Proxmox could not handle, by its own line"""
    pool = hand_made(base, 'named', '\tthin-chunk 4m' if LVM else '')
    pool.rollback(VOL, 'one', keep='keep')
    found(pool, "snapshot 'two' does not lie below the current image", "snapshot 'one' has 2 children: a branch",
          *(['it could not be written to its end'] if LVM else []), none=('no guest',))
    pool.clone(VOL, 'two', '101/vm-101-disk-0')
    found(pool, "it is a clone of a snapshot ('vm-100-disk-0@two')")
    pool.create('scratch', LEN)
    found(pool, 'scratch.qcow2: Proxmox: it belongs to no guest')
    pool.create('102/vm-102-disk-0.raw', LEN, '--format', 'raw')
    pool.snapshot('102/vm-102-disk-0', 'aa')
    found(pool, "the current image stands on a raw snapshot ('aa')")
    pool.snapshot('scratch', 's')
    found(pool, "'s' is too short as the name of a snapshot")
    pool.create('103/vm-103-disk-0', LEN)
    base_vol = pool.template('103/vm-103-disk-0')
    found(pool, *(['it is a base image, in a volume group'] if LVM else []))
    if LVM:
        lv = pool.names()['vm-101-disk-0.qcow2'][0]
        pool.lvm('lvchange', '-q', '--deltag', 'pve-vm-101-disk-0.qcow2', pool.vgs['p'] + '/' + lv)
        found(pool, "LV 'vm-101-disk-0.qcow2' lacks the tag 'pve-vm-101-disk-0.qcow2'")
    pool.verify()
    return base_vol


def renamed(base):
    """tags follow a volume's name"""
    pool = hand_made(base, 'renamed')
    pool.rename(VOL, '104/vm-104-disk-1')
    for name, _, tags, _ in pool.lvs():
        if sorted(t for t in tags if not t.startswith('varve-taken=')) != ['pve-vm-104', 'pve-vm-104-disk-1.qcow2']:
            raise Failed('LV %s has the tags %s' % (name, tags))
    pool.verify()


base = folder()
try:
    taken_over(base)
    named(base)
    if LVM:
        renamed(base)
finally:
    if LVM:
        from lvmpool import release_all
        release_all()
done('taken over and named')
