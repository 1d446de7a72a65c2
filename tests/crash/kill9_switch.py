"""kill -9 of a served volume while an operation on it is half done: what was answered is there afterwards.

The volume's manager is killed at each of its crash points, more is written without a flush, and the server is killed. Then
the idle volume is brought to the next owner in each way there is: read through varve, served again, snapshotted, rolled back to the
snapshot. After all but the first QEMU, which knows no journal, must read every answered write.
"""
import os, random, sys, time
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'lib'))
from killmodel import *

SIZE = 64 << 20
need('qemu-img')
D = folder()
os.environ.update(VARVE_RUNTIME=D + '/run', VARVE_CONFIG=D + '/storage.cfg')
SOCK, RAW = D + '/s', D + '/raw'
rnd = random.Random(SEED)
POINTS = ['snapshot-linked', 'snapshot-node-added', 'snapshot-switched', 'snapshot-pivoted', None]
WAYS = ['view', 'server', 'snapshot', 'rollback']


def killed_in_snapshot(vol, disk, point, way):
    with Server(vol, SOCK, '--durability', 'ack') as server:
        disk.run(SOCK, time.time() + .2, flushes=0)
        rc, out = run(VARVE, 'snapshot', vol + '@s', env=dict(os.environ, VARVE_CRASH_AT=point or ''), rc=None)
        if (rc != 0) != bool(point):
            raise Failed('the manager ended with %d at %s: %s' % (rc, point, out))
        if way != 'rollback' or point in POINTS[:3]: # else it throws away what is written now
            before = list(disk.answered)
            disk.run(SOCK, time.time() + .2, flushes=0)
            disk.answered = before + disk.answered
        server.kill()


def bring_back(vol, top, way):
    if way == 'server':
        with Server(vol, SOCK) as server:
            server.stop()
    elif way == 'snapshot':
        varve('snapshot', vol + '@after')
    elif way == 'rollback':
        varve('rollback', vol + '@s')
    to_raw(top, RAW, 'varve' if way == 'view' else 'qemu-img')


def main():
    os.makedirs(D + '/pool')
    with open(D + '/storage.cfg', 'w') as f:
        f.write('dir: p\n\tpath %s/pool\n\tcontent images\n\tsnapext 1\n' % D)
    number, hit = 0, 0
    for point in POINTS:
        for way in WAYS:
            if way == 'rollback' and point in POINTS[:2]:
                continue # there is no snapshot
            number += 1
            vol, top = 'p:109/vm-109-disk-%d' % number, D + '/pool/images/109/vm-109-disk-%d.qcow2' % number
            varve('create', vol, str(SIZE))
            disk = Disk(SIZE, rnd)
            killed_in_snapshot(vol, disk, point, way)
            wait_unlocked(top)
            to_raw(top, RAW)
            missed = disk.verify(RAW, 'QEMU')
            hit += missed > 0
            bring_back(vol, top, way)
            lost = disk.verify(RAW, 'varve, ' + way)
            print('%-20s %-9s %5d sectors answered that the files did not have, %d lost' % (point, way, missed, lost))
            if lost:
                raise Failed('%d answered sectors are not there' % lost)
            for e in varve_json('info', vol, '--json')['elements']:
                check(e['path'], (0, 3))
    if hit < number // 2:
        raise Failed('only %d of %d kills met answered writes that were not in the files' % (hit, number))
    done('%d kills, %d of them with answered writes that the files did not have' % (number, hit))


main()
