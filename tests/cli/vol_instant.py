"""Snapshots of several served disks show one instant.

Each of some writers puts a growing number on disk A, waits for the answer, then puts it on disk B. So at any instant A is
equal to B or one ahead. Snapshots of both are taken in one command while they write, and each must show that, too. Then
a hold by itself: it stops the answers, ends in time, and refuses a snapshot that comes too late.
"""
import os, struct, sys, threading, time
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'lib'))
from killmodel import *
from qmpclient import *

LVM = 'lvm' in sys.argv[1:]    # in a volume group
LANES, ROUNDS = 4, 8 if LVM else 25
need('qemu-io')
D = folder()
os.environ.update(VARVE_RUNTIME=D + '/run', VARVE_CONFIG=D + '/storage.cfg')
pool = None
VOLS = ['p:100/vm-100-disk-%d' % i for i in (0, 1)]
SOCKS = [D + '/s%d' % i for i in (0, 1)]
stop = threading.Event()
written = [0] * LANES
errors = []


def write(client, lane, number):
    client.send(1, lane << 16, 512, struct.pack('<Q', number) * 64)
    h, error = client.answer()
    if error:
        raise Failed('write failed with %d' % error)


def writer(lane):
    try:
        clients = [Client(s) for s in SOCKS]
        while not stop.is_set():
            for c in clients:
                write(c, lane, written[lane] + 1)
            written[lane] += 1
    except Exception as e:
        errors.append(e)


def numbers(i, snap):
    """what the lanes' sectors hold in a snapshot, as QEMU reads it"""
    raw = D + '/raw'
    if LVM:
        with pool.opened('100/vm-100-disk-%d' % i, snap) as path:
            to_raw(path, raw)
    else:
        to_raw('%s/pool/images/100/snap-%s-vm-100-disk-%d.qcow2' % (D, snap, i), raw)
    with open(raw, 'rb') as f:
        return [struct.unpack('<Q', os.pread(f.fileno(), 8, lane << 16))[0] for lane in range(LANES)]


def one_instant():
    threads = [threading.Thread(target=writer, args=(lane,)) for lane in range(LANES)]
    for t in threads:
        t.start()
    for n in range(ROUNDS):
        time.sleep(.05)
        varve('snapshot', *[v + '@s%d' % n for v in VOLS])
    stop.set()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]
    before, moved, behind, ahead = [0] * LANES, 0, 0, 0
    for n in range(ROUNDS):
        a, b = numbers(0, 's%d' % n), numbers(1, 's%d' % n)
        for lane in range(LANES):
            if not b[lane] <= a[lane] <= b[lane] + 1:
                raise Failed('snapshot s%d: writer %d had %d on A and %d on B: no instant' % (n, lane, a[lane], b[lane]))
            moved += a[lane] > before[lane]
            ahead += a[lane] > b[lane]
            before[lane] = a[lane]
    if moved < ROUNDS * LANES // 2 or not ahead:
        raise Failed('writers moved between %d snapshots, A was ahead in %d: too few' % (moved, ahead))
    return '%d snapshots of two disks, %d numbers written meanwhile; A was one ahead %d times' % (ROUNDS, sum(written), ahead)


def refused(control, text, name, args):
    try:
        control.execute(name, args)
    except QmpError as e:
        if text in e.desc:
            return
        raise
    raise Failed('%s was not refused' % name)


def holds():
    paths = [os.path.join(r, f) for r, _, fs in os.walk(os.environ['VARVE_RUNTIME']) for f in fs if f.endswith('disk-0.qmp')]
    control = Qmp(paths[0])
    client = Client(SOCKS[0])
    write(client, 0, 1)
    control.execute('x-varve-hold', {'timeout-ms': 600})
    for name, args in (('x-varve-hold', {}), ('block_resize', {'node-name': 'vm-100-disk-0', 'size': 128 << 20})):
        refused(control, 'held', name, args)
    began = time.time()
    write(client, 0, 2)
    waited = time.time() - began
    if not .3 < waited < 5:
        raise Failed('a write waited %.2f s for a hold of 0.6 s' % waited)
    refused(control, 'not held', 'x-varve-release', {})
    control.execute('x-varve-hold', {'timeout-ms': 9000})
    client.send(1, 0, 512, bytes(512))
    time.sleep(.1)
    began = time.time()
    control.execute('x-varve-release', {})
    client.answer()
    if time.time() - began > 4:
        raise Failed('a released disk went on waiting')
    D2 = D + '/late.qcow2'
    run('qemu-img', 'create', '-q', '-f', 'qcow2', D2, '64M')
    control.execute('blockdev-add', {'driver': 'qcow2', 'node-name': 'late', 'backing': None, 'file': {'driver': 'file', 'filename': D2}})
    refused(control, 'not held any more', 'blockdev-snapshot', {'node': 'vm-100-disk-0', 'overlay': 'late', 'x-varve-held': True})
    control.execute('x-varve-hold', {'timeout-ms': 10000}) # the server is stopped in it


def main():
    global pool
    if LVM:
        from lvmpool import LvmPool
        pool = LvmPool(D + '/pool')
        os.environ.update(pool.env(), VARVE_CONFIG=pool.cfg)
    else:
        os.makedirs(D + '/pool')
        with open(D + '/storage.cfg', 'w') as f:
            f.write('dir: p\n\tpath %s/pool\n\tcontent images\n\tsnapext 1\n' % D)
    for v in VOLS:
        varve('create', v, '64M')
    with Server(VOLS[0], SOCKS[0]) as a, Server(VOLS[1], SOCKS[1]) as b:
        text = one_instant()
        holds()
        began = time.time()
        a.stop()
        b.stop()
        if time.time() - began > 5:
            raise Failed('the server waited for a hold to end')
    done(text)


main()
