"""Space of a volume group: what a thin volume took ahead is given back, what is deleted is wiped first, what pool status says.

Which clusters an image has is checked by contents: each cut is followed by reading everything and by qemu-img check.
"""
import json, os, random, subprocess, sys, time
from volmodel import MIB
from lvmpool import LvmPool, release_all
import volserver
from nbdclient import Nbd
from proc import Failed, SEED, done, folder, need, run

need('qemu-img', 'qemu-io', 'lvm', 'losetup', 'blkdiscard')
if os.getuid():
    print('SKIP: not root')
    sys.exit(77)
CHUNK, VOL = 8 * MIB, '100/vm-100-disk-0'
THIN = '\tthin-chunk %d' % CHUNK


class Served(volserver.Served):
    """none is left behind by a test that fails"""
    all = []

    def start(self):
        super().start()
        self.all.append(self.p)


def pool_in(base, name, keys=THIN, **kw):
    home = os.path.join(base, name)
    os.makedirs(home)
    return LvmPool(home, keys=keys, **kw)


def length(pool, snap=None):
    name = 'snap_vm-100-disk-0_%s.qcow2' % snap if snap else 'vm-100-disk-0.qcow2'
    found = [n for lv, _, _, n in pool.lvs() if lv == name]
    if not found:
        raise Failed('there is no LV %s: %s' % (name, pool.lvs()))
    return found[0]


def check(what, got, least, most):
    if not least <= got <= most:
        raise Failed('%s has %.2f MiB, not %.2f to %.2f' % (what, got / MIB, least / MIB, most / MIB))


# ---- tails ----

def changes_of_100_mib(base):
    """a snapshot with 100 MiB of changes takes 100 MiB and its metadata, and no more than a chunk over that before it is one"""
    pool = pool_in(base, 'hundred')
    pool.create(VOL, 256 * MIB)
    server = Served(pool, VOL)
    server.write(0, 4 * MIB, 1)
    pool.snapshot(VOL, 'aa')
    check('the first snapshot', length(pool, 'aa'), 4 * MIB, 6 * MIB)
    for k in range(5):
        server.write((32 + 20 * k) * MIB, 20 * MIB, 2)
    check('the current image', length(pool), 100 * MIB, 100 * MIB + 6 * CHUNK)    # taken ahead by rate
    pool.snapshot(VOL, 'bb')
    check('a snapshot with 100 MiB', length(pool, 'bb'), 100 * MIB, 102 * MIB)
    check('a new current image', length(pool), MIB, CHUNK)
    # a snapshot that was cut grows again while things are merged into it, and is cut again
    pool.destroy(VOL, 'aa')
    check('what was merged', length(pool, 'bb'), 104 * MIB, 107 * MIB)
    if server.read() != pool.vols[VOL][None]:
        raise Failed('the served disk reads otherwise')
    server.stop()
    pool.verify()
    # deleting what is idle: down into the snapshot, which becomes the disk
    pool.write(VOL, 200 * MIB, MIB, 3)
    pool.destroy(VOL, 'bb')
    check('the disk', length(pool), 105 * MIB, 108 * MIB + 2 * CHUNK)
    pool.verify()
    if pool.hidden():
        raise Failed('left: %s' % pool.hidden())


def scattered(base):
    """clusters in no order, some given up again, the server killed with its journal: nothing that is needed is cut off"""
    rnd = random.Random(SEED)
    pool = pool_in(base, 'scattered')
    pool.create(VOL, 32 * MIB)
    server = Served(pool, VOL)
    for turn in range(3):
        with Nbd(server.sock) as n:
            for off in rnd.sample(range(0, 32 * MIB, 65536), 120):
                n.write(off, bytes([rnd.randrange(1, 255)]) * 65536)
            for off in rnd.sample(range(0, 32 * MIB, 262144), 40):
                n.trim(off, 262144)
        pool.vols[VOL][None] = server.read()
        if turn == 1:
            pool.snapshot(VOL, 'served')
        server.write(turn * MIB, 65536, 77)
        server.kill()
        pool.snapshot(VOL, 'killed%d' % turn)
        pool.verify()
        server = Served(pool, VOL)
    server.write(30 * MIB, MIB, 78)
    for snap in 'killed0', 'killed2', 'served', 'killed1':
        pool.destroy(VOL, snap)
        if server.read() != pool.vols[VOL][None]:
            raise Failed('after the deletion of %s the disk reads otherwise' % snap)
    server.stop()
    pool.verify()


def preallocated(base):
    """an image whose clusters are all in use is as long as its LV"""
    pool = pool_in(base, 'preallocated')
    pool.create(VOL, 32 * MIB, '-o', 'preallocation=metadata')
    pool.write(VOL, 30 * MIB, MIB, 9)
    before = length(pool)
    pool.snapshot(VOL, 'full')
    check('a preallocated snapshot', length(pool, 'full'), min(before, 32 * MIB), before)
    pool.verify()
    pool.rollback(VOL, 'full', keep='kept')
    check('what a rollback kept', length(pool, 'kept'), MIB, 2 * MIB)
    pool.verify()


def closed(base):
    """a server's end gives back more than two chunks; less stays"""
    pool = pool_in(base, 'closed')
    pool.create(VOL, 128 * MIB)
    server = Served(pool, VOL)
    for k in range(4):
        server.write(16 * k * MIB, 16 * MIB, 4)
    with Nbd(server.sock) as n:
        n.trim(8 * MIB, 56 * MIB)
        n.flush()
    pool.vols[VOL][None] = server.read()
    check('a served disk', length(pool), 64 * MIB, 64 * MIB + 6 * CHUNK)    # taken ahead by rate
    server.stop()
    check('a disk that was closed', length(pool), 8 * MIB + CHUNK, 8 * MIB + 2 * CHUNK + MIB)
    pool.verify()
    at = length(pool)
    server = Served(pool, VOL)
    server.write(64 * MIB, MIB, 5)
    server.stop()
    check('a disk with a little free', length(pool), at, at)
    pool.verify()


def full_length(base):
    """thin-chunk 0: nothing is cut"""
    pool = pool_in(base, 'full', keys='\tthin-chunk 0')
    pool.create(VOL, 32 * MIB)
    pool.snapshot(VOL, 'aa')
    check('a snapshot', length(pool, 'aa'), 32 * MIB, 36 * MIB)


# ---- saferemove ----

def waiting(pool):
    return [(n, uuid, tags, size) for n, uuid, tags, size in pool.lvs() if n.startswith('.varve-wipe-')]


def until_gone(pool, secs=60):
    for _ in range(secs * 5):
        if not waiting(pool):
            return
        time.sleep(.2)
    raise Failed('still there: %s' % waiting(pool))


def content(pool, uuid):
    """the bytes of an LV that is not active, behind what lies on the PV"""
    with open('%s/.lv/%s/%s' % (pool.dev, pool.vgs['p'], uuid), 'rb') as f:
        return f.read()


def status(pool):
    return json.loads(pool.varve('pool', 'status', 'p', '--json'))[0]


def until_dead(pool):
    """a wiper that kills itself at its crash point"""
    for _ in range(300):
        if not status(pool)['volume-group']['wiping']:
            return
        time.sleep(.1)
    raise Failed('it is still being wiped')


def wiped(base):
    pool = pool_in(base, 'wiped', keys=THIN + '\n\tsaferemove 1\n\tsaferemove_throughput 20m')
    pool.lvm('lvcreate', '-q', '-y', '-an', '-Zn', '-Wn', '--size', '1m', '--name', 'del-vm-100-disk-9', '--addtag', 'pve-vm-100', pool.vgs['p'])
    pool.create(VOL, 60 * MIB)
    server = Served(pool, VOL)
    for k in range(3):
        server.write(20 * k * MIB, 20 * MIB, 0xAB)
    server.stop()
    # the wiper is killed when it has noted how far it came; the name is free at once
    pool.varve('destroy', pool.id(VOL), env={'VARVE_CRASH_AT': 'wipe-noted'})
    pool.vols.clear()
    until_dead(pool)
    lv = waiting(pool)
    if len(lv) != 1 or not [t for t in lv[0][2] if t.startswith('varve-wiped=')]:
        raise Failed('not noted: %s' % lv)
    name, uuid, tags, size = lv[0]
    done_bytes = int([t for t in tags if t.startswith('varve-wiped=')][0][12:])
    data = content(pool, uuid)
    if not 0 < done_bytes < size or data[:done_bytes].strip(b'\0') or b'\xab' * 65536 not in data[done_bytes:]:
        raise Failed('%d of %d bytes are noted as wiped, which is not so' % (done_bytes, size))
    st = status(pool)
    if [w['wiped'] for w in st['volume-group']['to-wipe']] != [done_bytes] or not any('wait to be wiped' in w for w in st['warnings']):
        raise Failed('pool status: %s' % st)
    # a look starts nothing, goes nowhere; the next one goes on from there
    with open('%s/.lv/%s/%s' % (pool.dev, pool.vgs['p'], uuid), 'r+b') as f:
        f.seek(MIB)
        f.write(b'mark')
    rc = subprocess.run(pool.argv('pool', 'wipe', 'p', '-q'), env=pool.env(VARVE_CRASH_AT='wipe-remove')).returncode
    data = content(pool, uuid)
    if rc != -9 or data[MIB:MIB + 4] != b'mark' or (data[:MIB] + data[MIB + 4:]).strip(b'\0'):
        raise Failed('it ended with %d, and did not go on where it was' % rc)
    # any operation starts it again
    pool.create(VOL, 16 * MIB)
    until_gone(pool)
    if 'del-vm-100-disk-9' in pool.varve('list', 'p', '-t', 'vol'):
        raise Failed('what Proxmox is removing is listed as a volume')
    pool.varve('destroy', pool.id(VOL), env={'VARVE_CRASH_AT': 'wipe-remove'})
    pool.vols.clear()
    until_dead(pool)
    if not waiting(pool):
        raise Failed('it was not left')
    pool.varve('pool', 'check', 'p', '--repair')
    until_gone(pool)
    if [n for n, _, _, _ in pool.lvs()] != ['del-vm-100-disk-9']:
        raise Failed('left: %s' % pool.lvs())
    until_dead(pool)
    if pool.active():
        raise Failed('active: %s' % pool.active())


def open_ones(base):
    """an LV that is still open is left; the command says so; --dry-run changes nothing"""
    pool = pool_in(base, 'open', keys=THIN + '\n\tsaferemove 1')
    pool.create(VOL, 16 * MIB)
    pool.varve('destroy', pool.id(VOL), env={'VARVE_CRASH_AT': 'wipe-remove'})
    pool.vols.clear()
    until_dead(pool)
    name = waiting(pool)[0][0]
    if 'would wipe and remove' not in pool.varve('pool', 'wipe', 'p', '--dry-run') or not waiting(pool):
        raise Failed('--dry-run')
    pool.lvm('lvchange', '-q', '-ay', '%s/%s' % (pool.vgs['p'], name))
    user = subprocess.Popen(['qemu-io', '-f', 'raw', os.path.join(pool.images, name)], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    for _ in range(100):
        with open('/proc/locks') as f:
            if any('OFDLCK' in line for line in f) and subprocess.run(
                    ['qemu-img', 'info', '-f', 'raw', os.path.join(pool.images, name)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode:
                break
        time.sleep(.05)
    out = pool.varve('pool', 'wipe', 'p', rc=1)
    if 'is left for later' not in out or not waiting(pool):
        raise Failed('an open one: ' + out)
    user.communicate(b'quit\n')
    got = json.loads(pool.varve('pool', 'wipe', 'p', '--json'))
    if (got['wiped'], got['left']) != (1, 0) or waiting(pool):
        raise Failed('%s %s' % (got, waiting(pool)))
    if 'is no volume group' not in pool_dir(base).varve('pool', 'wipe', 'd', rc=1):
        raise Failed('a directory was wiped')


def pool_dir(base):
    from volmodel import Pool
    home = os.path.join(base, 'dir')
    os.makedirs(home, exist_ok=True)
    return Pool(home, name='d')


def tail_is_zeroed(base):
    """what a cut gives back is zeroed too"""
    pool = pool_in(base, 'tailzero', keys='\tthin-chunk 16m\n\tsaferemove 1', size=64 * MIB, extent='1m')
    vg = pool.vgs['p']
    pool.create(VOL, 32 * MIB)
    uuid = [u for n, u, _, _ in pool.lvs() if n == 'vm-100-disk-0.qcow2'][0]
    path = '%s/.lv/%s/%s' % (pool.dev, vg, uuid)
    with open(path, 'r+b') as f:    # what was there before
        f.seek(12 * MIB)
        f.write(b'\xcd' * 2 * MIB)
    subprocess.run(pool.argv('snapshot', pool.id(VOL, 'aa')), env=pool.env(VARVE_CRASH_AT='tail-reduce'), stdout=subprocess.DEVNULL)
    if b'\xcd' in content(pool, uuid):
        raise Failed('the tail was not zeroed before it is cut off')


# ---- status, lists ----

def told(base):
    pool = pool_in(base, 'told', size=256 * MIB)
    pool.create(VOL, 128 * MIB)
    st = status(pool)
    vg = st['volume-group']
    want = {'volumes': 1, 'snapshots': 0, 'served': 0, 'promised': 128 * MIB, 'allocated': CHUNK}
    if {k: st[k] for k in want} != want or vg['active'] or vg['missing'] or vg['extent-size'] != MIB or vg['physical-volumes'] != 1:
        raise Failed('pool status: %s' % st)
    check('what it may grow', st['may-grow'], 120 * MIB, 124 * MIB)
    server = Served(pool, VOL)
    st = status(pool)
    if st['served'] != 1 or st['volume-group']['active'] != 1 or any('one more chunk' in w for w in st['warnings']):
        raise Failed('pool status of a served one: %s' % st)
    free = st['available']
    pool.create('101/vm-101-disk-0.raw', free - 4 * MIB, '--format', 'raw')
    text = pool.varve('pool', 'status', 'p')
    for want in 'less than a tenth is free', 'could not have one more chunk each', 'metadata area', 'active here: 1':
        if want not in text:
            raise Failed('pool status does not say "%s": %s' % (want, text))
    server.stop()
    subprocess.run(pool.argv('snapshot', pool.id(VOL, 'cut')), env=pool.env(VARVE_CRASH_AT='overlay-create'), stdout=subprocess.DEVNULL)
    st = status(pool)
    if [(o['operation'], o['volume'], o['state']) for o in st['operations']] != [('snapshot', 'vm-100-disk-0@cut', 'cut off')]:
        raise Failed('operations: %s' % st['operations'])
    if not any('was cut off' in w for w in st['warnings']):
        raise Failed('warnings: %s' % st['warnings'])


def listed(base):
    """one report, and no other program, for any number of volumes; a metadata area that is nearly full is told"""
    import bigpool
    VOLS = 234
    pool = pool_in(base, 'listed', size=16 << 30, extent='4m', metadata='512k')
    vg, log, text = pool.vgs['p'], os.path.join(base, 'log'), os.path.join(base, 'bak')
    pool.lvm('vgcfgbackup', '-f', text, vg)
    with open(text) as f:
        text, names = bigpool.metadata(f.read(), VOLS, 5)
    with open(os.path.join(base, 'new'), 'w') as f:
        f.write(text)
    env = pool.env(VARVE_TEST_LVM_LOOPS='')
    subprocess.run(['lvm', 'vgcfgrestore', '-q', '--force', '-f', f.name, vg], env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    start = int(pool.lvm('pvs', '--noheadings', '--units', 'b', '--nosuffix', '-o', 'pe_start', pool.devices[0]))
    bigpool.heads(pool.devices[0], start, 4 * MIB, names)
    argv = pool.argv('list', 'p', '-t', 'vol,snap')
    counted = ['strace', '-f', '-qq', '-e', 'trace=execve', '-o', log + '.exec'] if run('sh', '-c', 'command -v strace', rc=None)[0] == 0 else []
    out = subprocess.run(counted + argv, env=dict(env, VARVE_TEST_LVM_LOG=log), stdout=subprocess.PIPE, timeout=100).stdout.decode()
    if len(out.splitlines()) != 1 + VOLS * 6:
        raise Failed('%d lines: %s' % (len(out.splitlines()), out[:1000]))
    with open(log) as f:
        if [line.split()[0] for line in f] != ['fullreport']:
            raise Failed('more than a report')
    if counted:
        with open(log + '.exec') as f:
            if len([line for line in f if ' = 0' in line]) > 6:    # varve, lvm, what stands for it
                raise Failed('other programs ran')
    st = json.loads(subprocess.run(pool.argv('pool', 'status', 'p', '--json'), env=env, stdout=subprocess.PIPE).stdout)[0]
    if st['snapshots'] != VOLS * 5 or not any('metadata area has room' in w for w in st['warnings']):
        raise Failed('a metadata area that is nearly full: %s' % st)


base = folder()
tests = [changes_of_100_mib, scattered, preallocated, closed, full_length, wiped, open_ones, tail_is_zeroed, told, listed]
try:
    for test in tests:
        if len(sys.argv) < 2 or test.__name__ in sys.argv:
            test(base)
            release_all()
            print('ok', test.__name__)
finally:
    for p in Served.all:
        p.kill()
        p.wait()
    release_all()
done('%d tests of space' % len(tests))
