"""Operations on a volume group that another host, or this one before its last boot, has begun and not ended: what they keep
from being done, who finishes them, and that a kill at any step leaves a volume as before or as after."""
import collections, os, subprocess, sys
sys.argv.append('lvm')
from lvmpool import LvmPool
from volmodel import MIB
from proc import Failed, VARVE, done, folder, need

need('lvm', 'losetup', 'unshare', 'qemu-img', 'qemu-io')
if os.geteuid():
    print('SKIP: needs root')
    sys.exit(77)
BASE = folder()
BOOT = os.path.join(BASE, 'boot_id')
V, W = '100/vm-100-disk-0', '100/vm-100-disk-1'
with open(BOOT, 'w') as boot:
    boot.write('01234567-89ab-cdef-0123-456789abcdef\n')


def elsewhere(pool, *args, crash=None, host='pve-2', rc=0):
    """varve on another host; host None: on this one, before a boot. Its output"""
    # the status of a shell's command that was killed is 128 + 9
    env = pool.env(**({'VARVE_CRASH_AT': crash} if crash else {}))
    way = 'mount --bind %s /proc/sys/kernel/random/boot_id && ' % BOOT
    if host:
        way += 'hostname %s && ' % host
        for name in 'VARVE_RUNTIME', 'VARVE_LOCK_DIR':
            env[name] = os.path.join(pool.home, name + host)
            os.makedirs(env[name], mode=0o700, exist_ok=True)
    p = subprocess.run(['unshare', '--uts', '--mount', 'sh', '-c', way + '"$@"', 'sh', *pool.argv(*args)], env=env, timeout=120,
                       stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    out = p.stdout.decode()
    if p.returncode != (137 if crash else rc):
        raise Failed('varve %s elsewhere: ended with %d: %s' % (' '.join(args), p.returncode, out))
    return out


def want(text, *parts):
    for part in parts:
        if part not in text:
            raise Failed('%r is not in: %s' % (part, text))


def tags(pool):
    return [t for t in pool.vg_tags() if t.startswith('varve-intent=')]


def check_whole(pool, vol, snap, name):
    """with the snapshot or without it; it reads right, and nothing is left"""
    has = snap in pool.elements()[vol]
    model = dict(pool.vols[vol])
    if has:
        model[snap] = model[None]
    with pool.reading():
        for s, data in model.items():
            if pool.read(pool.file(vol, s)) != data:
                raise Failed('%s: %s reads wrong' % (name, pool.id(vol, s)))
    left = [x for x in pool.hidden() if not x.startswith('active')]
    if left:
        raise Failed('%s: left: %s' % (name, left))
    return has


def refused_until_taken_over():
    pool = LvmPool(os.path.join(BASE, 'refused'), keys='\tthin-chunk 0\n')
    for vol in V, W:
        pool.create(vol)
    pool.write(V, 0, MIB, 1)
    elsewhere(pool, 'snapshot', pool.id(V, 's1'), crash='intent-written')
    before = tags(pool)
    if not before:
        raise Failed('no intent')
    for args in ('snapshot', pool.id(V, 's2')), ('resize', pool.id(V), '+1M'), ('destroy', pool.id(V)), \
                ('serve', pool.id(V), '--export', 'nbd,unix=' + os.path.join(BASE, 'sock')):
        out = pool.varve(*args, rc=1)
        want(out, "p:", "'snapshot' on host 'pve-2' since 20", 'if that host is down: varve pool check p --repair')
    want(pool.varve('list', 'p'), 'vm-100-disk-0', 'vm-100-disk-1')
    pool.varve('snapshot', pool.id(W, 's1'))    # others are not concerned
    want(pool.varve('pool', 'check', 'p'), "note: an operation on vm-100-disk-0 is under way, 'snapshot' on host 'pve-2'",
         'if that host is down: --repair')
    if tags(pool) != before:
        raise Failed('somebody has changed the intent')
    want(pool.varve('pool', 'check', 'p', '--repair'), "taking over an operation that was begun elsewhere: 'snapshot' on host")
    check_whole(pool, V, 's1', 'taken over')
    pool.snapshot(V, 's2')
    check_whole(pool, V, 's1', 'after')
    pool.release()


def its_own_host_finishes_it(host, name):
    """also after a boot, whoever else has looked"""
    pool = LvmPool(os.path.join(BASE, name), keys='\tthin-chunk 0\n')
    pool.create(V)
    pool.write(V, 0, MIB, 1)
    elsewhere(pool, 'snapshot', pool.id(V, 's1'), crash='intent-written', host=host)
    if host:
        elsewhere(pool, 'resize', pool.id(V), '+1M', host=host)
    else:
        pool.varve('resize', pool.id(V), '+1M')
    pool.vols[V][None] += bytes(MIB)
    check_whole(pool, V, 's1', name)
    pool.release()


def killed_anywhere():
    """a host that goes at any step of an operation; another one takes it over, and is killed at that, too"""
    template = LvmPool(os.path.join(BASE, 'template'), keys='\tthin-chunk 0\n')
    template.create(V)
    template.write(V, 0, MIB, 1)
    log, pool = os.path.join(BASE, 'points'), template.copy(os.path.join(BASE, 'walk'))
    pool.varve('snapshot', pool.id(V, 's1'), env={'VARVE_CRASH_LIST': log})
    pool.release()
    with open(log) as f:
        points = list(collections.Counter(f.read().split()).items())
    ends = collections.Counter()
    for i, (point, nr) in enumerate(points):
        pool = template.copy(os.path.join(BASE, 'try'))
        elsewhere(pool, 'snapshot', pool.id(V, 's1'), crash='%s:%d' % (point, nr if i % 2 else 1))
        if tags(pool) and i % 3 == 0:
            # the taker is killed as well: then it is its own, for any operation
            pool.varve('pool', 'check', 'p', '--repair', rc=-9, env={'VARVE_CRASH_AT': 'intent-taken-over'})
            pool.varve('resize', pool.id(V), '+1M')
            pool.vols[V][None] += bytes(MIB)
        else:
            pool.varve('pool', 'check', 'p', '--repair')
        ends[check_whole(pool, V, 's1', point) if i % 3 or len(pool.vols[V][None]) == 4 * MIB else 'grown'] += 1
        pool.release()
    print('killed at %d points: undone %d, finished %d, by a second taker %d' % (len(points), ends[False], ends[True], ends['grown']))
    if not ends[False] or not ends[True]:
        raise Failed('all ended the same way')
    template.release()


refused_until_taken_over()
its_own_host_finishes_it('pve-2', 'own')
its_own_host_finishes_it(None, 'boot')
killed_anywhere()
done('operations of other hosts wait for them, or for who says that they are down')
