"""Operations on volumes, idle and served: what they do, what they refuse, and that a refusal changes nothing."""
import os, signal, subprocess, sys, threading, time
from volmodel import KINDS, LVM, MIB, release
from proc import Failed, done, folder, need, run
from nbdclient import Load, Nbd
from qmpclient import Qmp
from volserver import Served
from voltools import digest, fresh_in, info, refused

need('qemu-img', 'qemu-io')
signal.signal(signal.SIGHUP, signal.SIG_DFL)   # under nohup it would be ignored, by the programs started here too
BASE = folder()
NAMES = [a for a in sys.argv[1:] if a not in KINDS]
V, W = '100/vm-100-disk-0', '100/vm-100-disk-1'


def fresh(name, keys=''):
    return fresh_in(BASE, name, keys=keys)


def refusals():
    p = fresh('refusals')
    p.create(V)
    p.write(V, 0, MIB, 1)
    p.snapshot(V, 's1')
    for name in ('current', '1st', 'a b', '-n', 'x' * 41, 'a.b'):
        refused(p, 'snapshot', p.id(V, name))
    refused(p, 'snapshot', p.id(V, 's1'), text='s1')
    refused(p, 'snapshot', p.id(V, 's2'), p.id(V, 's2'), text='twice')
    refused(p, 'snapshot', p.id(V, 's2'), p.id(W, 's2'), text='no volume')
    refused(p, 'rollback', p.id(V, 'none'), text='none')
    refused(p, 'rollback', p.id(V, 's1'), '--keep', 's1', text='s1')
    refused(p, 'destroy', p.id(V, 'none'), text='none')
    refused(p, 'create', p.id(V), '1M', text='exists')
    refused(p, 'create', p.id('100/vm-101-disk-0'), '1M')
    refused(p, 'create', p.id('base-x'), '1M')
    refused(p, 'create', p.id(W + '.raw'), '1M', '--format', 'qcow2')
    refused(p, 'create', p.id(W), '0')
    refused(p, 'create', p.id(W), '1M', '-o', 'preallocation=most')
    refused(p, 'create', p.id(W), '1M', '-o', 'cluster_size=3k')
    refused(p, 'resize', p.id(V), '1M', text='larger')
    refused(p, 'info', 'q:' + V, text='q')
    refused(p, 'resize', p.id(V, 's1'), '8M')
    for args in (['snapshot', p.id(V, 's2')], ['rollback', p.id(V, 's1')], ['destroy', p.id(V, 's1')], ['destroy', p.id(V)],
                 ['create', p.id(W), '1M'], ['resize', p.id(V), '8M']):
        before = digest(p)
        p.varve(*args, '--dry-run')
        if digest(p) != before:
            raise Failed('--dry-run of %s changed the pool' % args)
    p.verify()


def open_elsewhere():
    """a volume that QEMU has open is left alone"""
    p = fresh('open')
    p.create(V)
    p.snapshot(V, 's1')
    q = subprocess.Popen(['qemu-io', '-f', 'qcow2', p.file(V)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    q.stdin.write(b'write -P 7 0 4096\n')
    q.stdin.flush()
    q.stdout.readline()
    try:
        for args in (['snapshot', p.id(V, 's2')], ['rollback', p.id(V, 's1')], ['destroy', p.id(V, 's1')],
                     ['destroy', p.id(V)], ['resize', p.id(V), '8M']):
            files = sorted(os.listdir(os.path.dirname(p.file(V))))
            out = p.varve(*args, rc=1)
            if sorted(os.listdir(os.path.dirname(p.file(V)))) != files:
                raise Failed('%s on an open volume changed it: %s' % (args, out))
    finally:
        q.stdin.close()
        q.wait()
    p.varve('pool', 'check', p.name)
    p.vols[V][None] = b'\7' * 4096 + p.vols[V][None][4096:]
    p.snapshot(V, 's2')
    p.verify()


def open_merged():
    """the deletion of a snapshot is refused before anything is recorded when QEMU has one of the two images open"""
    p = fresh('open-merged')
    p.create(V, 16 * MIB)
    p.write(V, 0, 8 * MIB, 1)
    p.snapshot(V, 's1')
    p.write(V, 0, 65536, 2)
    points = os.path.join(BASE, 'points')
    for snap, how in (None, ['-r']), (None, []), ('s1', ['-r']), ('s1', []):
        with p.opened(V, snap) as path:
            refuse_merge(p, path, how, points)
        p.verify()
    p.destroy(V, 's1')
    p.verify()


def refuse_merge(p, path, how, points):
    q = subprocess.Popen(['qemu-io', *how, '-f', 'qcow2', path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    q.stdin.write(b'read 0 512\n')
    q.stdin.flush()
    q.stdout.readline()
    try:
        open(points, 'w').close()
        os.environ['VARVE_CRASH_LIST'] = points
        refused(p, 'destroy', p.id(V, 's1'), text='qemu-io', same=bool(how))
        del os.environ['VARVE_CRASH_LIST']
        with open(points) as f:
            said = f.read()
        if 'intent-written' in said:
            raise Failed('a deletion that could not begin was recorded (%s %s): %s' % (path, how, said))
        if info(p, V)['elements'][0]['deleting']:
            raise Failed('a refused deletion is listed as one')
    finally:
        q.stdin.close()
        q.wait()


def tree():
    """branches: rollback to any snapshot, several children, flatten, the alias of a raw volume"""
    p = fresh('tree')
    p.create(V + '.raw')
    p.write(V, 0, MIB, 1)
    for i in 1, 2, 3:
        p.snapshot(V, 's%d' % i)
        p.write(V, i * 65536, 65536, 0x10 + i)
    if p.fmt(p.file(V, 's1')) != 'raw':
        raise Failed('the raw volume is not the oldest element')
    if not p.is_lvm and os.stat(p.file(V, 's1')).st_mode & 0o777 != 0o444:
        raise Failed('the raw element can be written to')
    if info(p, V + '.raw')['id'] != p.id((os.path.basename(V) if p.is_lvm else V) + '.qcow2'):
        raise Failed('the old id is no alias')
    p.rollback(V, 's1', 'k')
    p.write(V, 3 * MIB, 4096, 0x33)
    p.verify()
    refused(p, 'destroy', p.id(V, 's1'), text='--flatten')
    parents = {e['snapshot']: e.get('parent-snapshot', e.get('parent')) for e in info(p, V)['elements']}
    if parents[None] != 's1' or parents['k'] != 's3':
        raise Failed('parents are %s' % parents)
    p.destroy(V, 's1', '--flatten')
    p.verify()
    p.rollback(V, 'k')
    for s in ('s2', 's3', 'k'):
        p.destroy(V, s)
        p.verify()
    p.destroy(V)
    p.verify()


def raw_restored():
    p = fresh('raw')
    p.create(V + '.raw')
    p.write(V, 0, MIB, 1)
    p.snapshot(V, 's1')
    p.write(V, MIB, 65536, 2)
    p.varve('resize', p.id(V + '.raw'), '+1M')
    p.vols[V][None] += bytes(MIB)
    p.destroy(V, 's1')
    if p.fmt(p.file(V)) != 'raw' or not p.is_lvm and os.stat(p.file(V)).st_mode & 0o600 != 0o600:
        raise Failed('the raw name is not restored: ' + p.file(V))
    p.verify()


def clones():
    p = fresh('clones')
    p.create(V)
    p.write(V, 0, MIB, 1)
    d = os.path.join(p.images, '101')
    os.makedirs(d)
    base = os.path.join(p.images, '100', 'base-100-disk-0.qcow2')
    os.rename(p.file(V), base)
    p.vols = {'100/base-100-disk-0': p.vols[V]}
    for n in 0, 1:
        run('qemu-img', 'create', '-q', '-f', 'qcow2', '-u', '-b', '../100/base-100-disk-0.qcow2', '-F', 'qcow2',
            d + '/vm-101-disk-%d.qcow2' % n, '4M')
        p.vols['101/vm-101-disk-%d' % n] = dict(p.vols['100/base-100-disk-0'])
    c = '101/vm-101-disk-0'
    long_id = '%s:100/base-100-disk-0.qcow2/%s.qcow2' % (p.name, c)
    if info(p, c)['id'] != long_id:
        raise Failed('the id of a linked clone is ' + info(p, c)['id'])
    b = p.id('100/base-100-disk-0')
    for args in (['destroy', b], ['snapshot', b + '@s'], ['resize', b, '8M']):
        refused(p, *args)
    refused(p, 'destroy', b, text='vm-101-disk-0')
    p.snapshot(c, 's1')
    p.write(c, MIB, MIB, 5)
    p.verify()
    p.varve('destroy', long_id + '@s1')
    del p.vols[c]['s1']
    p.verify()
    p.destroy(c)
    p.destroy('101/vm-101-disk-1')
    p.destroy('100/base-100-disk-0')
    p.verify()


def imports():
    p = fresh('imports')
    src = os.path.join(BASE, 'src')
    data = os.urandom(MIB) + bytes(MIB) + b'\5' * 777
    with open(src + '.raw', 'wb') as f:
        f.write(data)
    whole = data + bytes(-len(data) % 512)
    for i, fmt in enumerate(('qcow2', 'raw')):
        for j, inp in enumerate((src + '.raw', '-')):
            vol = '100/vm-100-disk-%d' % (2 * i + j)
            p.varve('import', inp, p.id(vol), '--format', fmt, inp=data if inp == '-' else None)
            # an LV has whole extents
            p.vols[vol] = {None: whole + bytes(-len(whole) % MIB) if p.is_lvm and fmt == 'raw' else whole}
    run('qemu-img', 'convert', '-c', '-O', 'qcow2', '-f', 'raw', src + '.raw', src + '.qcow2')
    p.varve('import', src + '.qcow2', p.id('data'))
    p.vols['data'] = {None: whole}
    p.verify()
    run('qemu-img', 'create', '-q', '-f', 'qcow2', '-b', src + '.qcow2', '-F', 'qcow2', src + '2.qcow2')
    refused(p, 'import', src + '2.qcow2', p.id('x'), text='backing file')
    run('qemu-img', 'create', '-q', '-f', 'qcow2', '-o', 'data_file=' + src + '.data', src + '3.qcow2', '1M')
    refused(p, 'import', src + '3.qcow2', p.id('x'))
    run('qemu-img', 'create', '-q', '-f', 'vmdk', src + '.vmdk', '1M')
    refused(p, 'import', src + '.vmdk', p.id('x'), text='vmdk')
    refused(p, 'import', src + '.none', p.id('x'), text='src.none')
    refused(p, 'import', src + '.raw', p.id('data'), text='exists')
    if subprocess.run(p.argv('import', '-', p.id('x')), input=b'', env=p.env(), stdout=subprocess.PIPE,
                      stderr=subprocess.STDOUT).returncode != 1:
        raise Failed('an empty stream was imported')
    # a raw disk whose guest wrote a qcow2 header stays raw
    with open(src + '4.raw', 'wb') as f, open(src + '2.qcow2', 'rb') as g:
        h = g.read(65536)
        f.write(h + bytes(MIB - len(h)))
    p.varve('import', src + '4.raw', p.id('guest'))
    p.vols['guest'] = {None: h + bytes(MIB - len(h))}
    p.verify()


def full_disk():
    """no room: the volume is as before"""
    p = fresh('full')
    p.create(V, 512 * MIB, '-o', 'preallocation=off')
    p.write(V, 0, MIB, 1)
    before = digest(p)
    sh = 'ulimit -f 64; trap "" XFSZ; exec "$@"'
    r = subprocess.run(['bash', '-c', sh, 'x'] + p.argv('snapshot', p.id(V, 's1')), env=p.env(), stdout=subprocess.PIPE,
                       stderr=subprocess.STDOUT)
    if r.returncode != 1 or digest(p) != before:
        raise Failed('snapshot without room: %d %s' % (r.returncode, r.stdout.decode()))
    p.snapshot(V, 's1')
    p.varve('pool', 'check', p.name)


def together():
    """several managers at once on one pool: every operation is done or refused as busy"""
    p = fresh('together')
    p.create(V)
    p.write(V, 0, MIB, 1)
    results = []

    def work(i):
        results.append(p.varve('snapshot', p.id(V, 'n%d' % i), rc=None) + (i,))
    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for rc, out, i in results:
        if rc == 0:
            p.vols[V]['n%d' % i] = p.vols[V][None]
        elif 'under way' not in out and 'lock' not in out and 'use' not in out:
            raise Failed('a snapshot beside others failed: ' + out)
    if len(p.vols[V]) < 2:
        raise Failed('none of the snapshots was taken')
    p.verify()


# ---- served ----

def served_rollback():
    p = fresh('served-rollback')
    p.create(V)
    p.write(V, 0, MIB, 1)
    p.snapshot(V, 's1')
    s = Served(p, V)
    s.write(MIB, MIB, 2)
    with Nbd(s.sock) as n:
        n.write(0, b'\3' * 4096)
        n.flush()
        out = p.varve('rollback', p.id(V, 's1'), rc=1)
        if 'connected' not in out and 'in use' not in out:
            raise Failed('rollback under a writer: ' + out)
        if n.read(0, 4096) != b'\3' * 4096:
            raise Failed('a refused rollback has changed the disk')
        p.vols[V][None] = b'\3' * 4096 + p.vols[V][None][4096:]
        p.varve('rollback', p.id(V, 's1'), '--keep', 'k', '--force')
        try:
            n.read(0, 4096)
            raise Failed('the client was not dropped')
        except (EOFError, OSError):
            pass
    p.vols[V]['k'] = p.vols[V][None]
    p.vols[V][None] = p.vols[V]['s1']
    if s.read() != p.vols[V][None]:
        raise Failed('the disk is not rolled back')
    s.write(2 * MIB, MIB, 4)
    refused(p, 'destroy', p.id(V), text='served', same=False)
    s.stop()
    p.verify()


def served_under_load():
    """snapshots and deletions while a client writes and verifies; the sums are right at the end"""
    p = fresh('served-load')
    p.create(V, 16 * MIB)
    s = Served(p, V)
    load = Load(s.sock, 16 * MIB, 3)
    for i in range(3):
        load.wait_ops(60)
        p.varve('snapshot', p.id(V, 's%d' % i))
    load.wait_ops(60)
    for i in (1, 0, 2):
        p.varve('destroy', p.id(V, 's%d' % i))
        load.wait_ops(60)
    p.vols[V][None] = bytes(load.stop() or load.model)
    s.stop()
    p.verify()


def served_readers():
    """a snapshot that a client reads is not deleted; its neighbours are; each stays what it was"""
    p = fresh('served-readers')
    p.create(V)
    p.write(V, 0, MIB, 1)
    p.snapshot(V, 's1')
    p.write(V, MIB, MIB, 2)
    p.snapshot(V, 's2')
    p.write(V, 2 * MIB, MIB, 3)
    p.snapshot(V, 's3')
    s = Served(p, V)
    s.write(0, 65536, 4)
    with Nbd(s.sock, 'vm-100-disk-0@s1') as n:
        out = p.varve('destroy', p.id(V, 's1'), rc=1)
        if n.read(0, 4 * MIB) != p.vols[V]['s1']:
            raise Failed('the read snapshot has changed: ' + out)
        p.varve('pool', 'check', p.name)
        p.destroy(V, 's2')
        if n.read(0, 4 * MIB) != p.vols[V]['s1']:
            raise Failed('a snapshot that is read has changed')
    for snap in 's1', 's3':
        if s.read('vm-100-disk-0@' + snap) != p.vols[V][snap]:
            raise Failed('the export of %s is wrong' % snap)
    p.snapshot(V, 's4')
    if s.read('vm-100-disk-0@s4') != p.vols[V]['s4']:
        raise Failed('the new snapshot is not exported')
    p.destroy(V, 's1')
    s.stop()
    p.verify()


def served_cancel():
    """a cancelled deletion leaves the disk right; doing it again ends it"""
    for small in True, False:
        p = fresh('served-cancel-%d' % small, keys='\tbwlimit 2048\n')
        p.create(V, 32 * MIB)
        p.write(V, 0, (20 if small else 1) * MIB, 1)
        p.snapshot(V, 's1')
        p.write(V, MIB, (16 if small else 24) * MIB, 2)
        s = Served(p, V)
        s.write(0, 65536, 3)
        m = subprocess.Popen(p.argv('destroy', p.id(V, 's1')), env=p.env(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        with Qmp(info(p, V)['qmp']) as q:
            for _ in range(500):
                jobs = q.execute('query-jobs')
                if jobs and jobs[0]['status'] == 'running' and jobs[0]['current-progress']:
                    break
                time.sleep(.01)
            q.execute('job-cancel', id=jobs[0]['id'])
        out = m.communicate(timeout=60)[0].decode()
        if m.returncode != 1:
            raise Failed('a cancelled deletion ended with %d: %s' % (m.returncode, out))
        if s.read() != p.vols[V][None]:
            raise Failed('after a cancelled deletion the disk is not what it was')
        s.write(65536, 65536, 4)
        with open(p.cfg) as f:
            text = f.read().replace('bwlimit 2048', 'bwlimit 0')
        with open(p.cfg, 'w') as f:
            f.write(text)
        p.destroy(V, 's1')
        s.stop()
        p.verify()


def served_interrupted():
    """the manager ends in the middle, its server goes on: the next operation finds the deletion finished or undone, and
    until then everybody is told of it"""
    for sig in signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL:
        for small in True, False:
            # on a busy machine the deletion may end before the signal comes: then a slower one
            if not any(interrupt_served(sig, small, limit) for limit in (16384, 4096, 1024)):
                raise Failed('signal %d never met a deletion' % sig)


def interrupt_served(sig, small, limit):
    """False: it was done before the signal came"""
    p = fresh('served-interrupted-%d-%d-%d' % (sig, small, limit), keys='\tbwlimit %d\n' % limit)
    p.create(V, 32 * MIB)
    p.write(V, 0, (20 if small else 1) * MIB, 1)
    p.snapshot(V, 's1')
    p.write(V, MIB, (16 if small else 24) * MIB, 2)
    s = Served(p, V)
    m = subprocess.Popen(p.argv('destroy', p.id(V, 's1')), env=p.env(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    with Qmp(info(p, V)['qmp']) as q:
        while m.poll() is None:
            jobs = q.execute('query-jobs')
            if jobs and jobs[0]['status'] == 'running' and jobs[0]['current-progress']:
                break
            time.sleep(.01)
        m.send_signal(sig)
        if m.wait() == 0:
            s.stop()
            return False
        marked(p, 's1')
        out = p.varve('snapshot', p.id(V, 's2'))
        if [j for j in q.execute('query-jobs') if j['status'] != 'null']:
            raise Failed('a job runs on: ' + out)
    p.vols[V]['s2'] = p.vols[V][None]
    gone = 's1' not in p.elements()[V]
    if ('finished' if gone else 'undone') not in out:
        raise Failed('the deletion is %s, and the next operation says %s' % ('done' if gone else 'undone', out))
    if gone:
        del p.vols[V]['s1']
    s.write(0, 65536, 4)
    s.stop()
    p.verify()
    return True


def marked(p, snap):
    """a snapshot whose deletion was cut off is shown as such"""
    e = [e for e in info(p, V)['elements'] if e['snapshot'] == snap]
    if not e or not e[0]['deleting']:
        raise Failed('not "deleting" in JSON: %s' % e)
    for args in ['tree', p.id(V)], ['info', p.id(V, snap)], ['list', p.name]:
        line = [x for x in p.varve(*args).splitlines() if '@' + snap in x]
        if not line or 'being deleted' not in line[0]:
            raise Failed('varve %s does not say that %s is being deleted: %s' % (args[0], snap, line))


def idle_interrupted():
    """the same without a server; a server that is started then does not export it; other volumes hear nothing"""
    p = fresh('idle-interrupted', keys='\tbwlimit 2048\n')
    p.create(V, 32 * MIB)
    p.create(W)
    p.write(V, 0, 20 * MIB, 1)
    p.snapshot(V, 's1')
    p.write(V, MIB, 16 * MIB, 2)
    m = subprocess.Popen(p.argv('destroy', p.id(V, 's1')), env=p.env(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    while m.poll() is None and not any(e['deleting'] for e in info(p, V)['elements']):
        pass
    time.sleep(.3)
    m.send_signal(signal.SIGINT)
    m.wait()
    marked(p, 's1')
    for out in p.varve('snapshot', p.id(W, 'x')), p.varve('rollback', p.id(W, 'x')):
        if 's1' in out:
            raise Failed('an operation on another volume says: ' + out)
    p.vols[W]['x'] = p.vols[W][None]
    if 's1' not in p.varve('pool', 'check', p.name, rc=1):
        raise Failed('pool check does not name the snapshot')
    s = Served(p, V)
    if '@s1' in s.said():
        raise Failed('a half deleted snapshot is exported: ' + s.said())
    marked(p, 's1')
    s.stop()
    with open(p.cfg) as f:
        text = f.read().replace('bwlimit 2048', 'bwlimit 0')
    with open(p.cfg, 'w') as f:
        f.write(text)
    p.destroy(V, 's1')
    p.verify()


def pool_check_counts():
    """what --repair can put right is counted apart from what it cannot, and from what is harmless"""
    p = fresh('counts')
    p.create(V)
    p.snapshot(V, 's1')
    p.create(W)
    p.snapshot(W, 's1')
    p.rollback(W, 's1', 's2')
    p.snapshot(W, 's3')
    p.varve('pool', 'check', p.name)
    for vol in V, W:
        os.unlink(p.file(vol))
    with open(os.path.join(p.images, 'x.txt'), 'w'):
        pass
    for want, args in ('1 to repair, 1 need a person, 1 harmless', []), ('0 to repair, 1 need a person, 1 harmless', ['--repair']):
        out = p.varve('pool', 'check', p.name, *args, rc=1)
        if want not in out:
            raise Failed('pool check does not say "%s": %s' % (want, out))


def taken(pool, vol):
    return {e['snapshot']: e['taken'] for e in info(pool, vol)['elements'] if e['snapshot']}


def dates():
    """a snapshot shows when it was taken, whatever was done to other snapshots since"""
    p = fresh('dates')
    p.create(V)
    p.write(V, 0, MIB, 1)
    os.utime(p.file(V), (1e9, 1e9))
    for snap in 's1', 's2':
        before = int(time.time())
        p.snapshot(V, snap)
        if not before <= taken(p, V)[snap] <= time.time():
            raise Failed('%s was taken at %d, says info' % (snap, taken(p, V)[snap]))
        os.utime(p.file(V), (1e9, 1e9))
    made = [e['created'] for e in info(p, V)['elements'] if not e['snapshot']]
    if not before <= made[0] <= time.time():
        raise Failed('the current element was made at %s, says info' % made)
    before = int(time.time())
    p.rollback(V, 's1', 'k')
    if not before <= taken(p, V)['k'] <= time.time():
        raise Failed('a kept state was taken at %d, says info' % taken(p, V)['k'])
    for args, label in ([p.id(V, 's1')], 'taken:'), ([p.id(V)], 'made:'):
        if label not in p.varve('info', *args):
            raise Failed('info %s has no "%s"' % (args[0], label))


def dates_kept():
    """merges write into files of snapshots, or rename them: the times stay, also when the manager is killed"""
    kinds = [(s, fmt, small, kill) for s in (False, True) for fmt in ('', '.raw') for small in (False, True)
             for kill in (None, 'stream-merged', 'commit-renamed', 'commit-child-unlinked', 'intent-remove')]
    for served, fmt, small, kill in kinds:
        p = fresh('dates-%d%s-%d-%s' % (served, fmt, small, kill))
        p.create(V + fmt)
        p.write(V, 0, (2 if small else 1) * MIB, 1)
        for i in 1, 2, 3:
            p.snapshot(V, 's%d' % i)
            p.write(V, MIB, 65536 if small else 2 * MIB, 0x10 + i)
        want = {}
        for i in 1, 2, 3:
            want['s%d' % i] = 10**9 + i
            os.utime(p.file(V, 's%d' % i), (10**9 + i, 10**9 + i))
        s = Served(p, V) if served else None
        rc, out = p.varve('destroy', p.id(V, 's1'), rc=None, env={'VARVE_CRASH_AT': kill} if kill else {})
        if rc and rc != -9:
            raise Failed('destroy failed: %d %s' % (rc, out))
        p.varve('pool', 'check', p.name, '--repair')
        if s:
            s.stop()
        got = taken(p, V)
        if got != {k: v for k, v in want.items() if k in got} or not {'s2', 's3'} <= set(got):
            raise Failed('%s: %s, killed at %s (%d): the snapshots were taken at %s' % (
                'served' if served else 'idle', out, kill, rc, got))
        if 's1' not in p.elements()[V]:
            del p.vols[V]['s1']
        p.verify()


def served_twice():
    p = fresh('served-twice')
    p.create(V)
    s = Served(p, V)
    out = p.varve('serve', p.id(V), rc=1)
    s.write(0, 4096, 1)
    s.stop()
    p.verify()


def served_together():
    """one snapshot of three volumes of a guest: two servers and an idle one"""
    p = fresh('served-together')
    vols = ['100/vm-100-disk-%d' % i for i in range(3)]
    for i, v in enumerate(vols):
        p.create(v + ('.raw' if i == 1 else ''))
        p.write(v, 0, MIB, i + 1)
    servers = [Served(p, v, sock='nbd%d' % i) for i, v in enumerate(vols[:2])]
    for i, s in enumerate(servers):
        s.write(MIB, 65536, 0x40 + i)
    p.varve('snapshot', *[p.id(v, 's1') for v in vols])
    for v in vols:
        p.vols[v]['s1'] = p.vols[v][None]
    for i, s in enumerate(servers):
        s.write(2 * MIB, 65536, 0x50 + i)
    # the name is taken on one of them: none gets it
    p.snapshot(vols[1], 's2')
    refused(p, 'snapshot', *[p.id(v, 's2') for v in vols], text='s2', same=False)
    for i, s in enumerate(servers):
        if s.read() != p.vols[vols[i]][None] or s.read(vols[i][4:] + '@s1') != p.vols[vols[i]]['s1']:
            raise Failed('a served volume does not read as it should')
        s.stop()
    p.verify()


tests = [refusals, open_merged, tree, raw_restored, imports, idle_interrupted, together, served_rollback, served_under_load,
         served_readers, served_cancel, served_interrupted, served_twice, served_together]
if not LVM:    # they look into the directory
    tests += [open_elsewhere, clones, pool_check_counts, full_disk, dates, dates_kept]
for t in tests:
    if not NAMES or t.__name__ in NAMES:
        try:
            t()
        except Failed as e:
            raise Failed('%s: %s' % (t.__name__, e))
        release()
        print('ok', t.__name__, flush=True)
done('ok')
