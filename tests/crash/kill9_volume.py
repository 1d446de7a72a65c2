"""kill -9 of a served volume under random writes while snapshots are taken and deleted.

  kill9_volume.py [RUNS]

One round: the server of a volume with 8 or more layers, a client with 16 changes in flight, and, in most rounds, a
`varve snapshot` or `varve destroy` of a snapshot (merged up or down, the top's own too). The server is killed at any moment
of that, or the program that manages the operation first. Then every answered write is there: in what a new server shows, or, after another
snapshot of the idle volume, in the converted image.
"""
import os, random, subprocess, sys, time
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'lib'))
from killmodel import *

RUNS = int(sys.argv[1]) if len(sys.argv) > 1 else (300 if LONG else 12)
SIZE = 256 << 20
need('qemu-img')
D = folder()
os.environ.update(VARVE_RUNTIME=D + '/run', VARVE_CONFIG=D + '/storage.cfg')
SOCK, RAW, VOL = D + '/s', D + '/raw', 'p:100/vm-100-disk-0'
TOP = D + '/pool/images/100/vm-100-disk-0.qcow2'
rnd = random.Random(SEED)
# where the manager dies first, with the server left in between: the disk's name is on one file, its writes go to two
POINTS = {'destroy': ['commit-job-started', 'commit-old-linked', 'commit-published', 'commit-complete-asked',
                      'commit-completed', 'stream-job-started', 'stream-merged'],
          'snapshot': ['snapshot-linked', 'snapshot-node-added', 'snapshot-switched', 'snapshot-pivoted']}
count = {'snapshot': 0, 'destroy': 0, 'cut': 0, 'idle': 0}


def serve():
    return Server(VOL, SOCK, '--durability', 'ack')


def snapshots():
    return [e['snapshot'] for e in varve_json('info', VOL, '--json')['elements'] if e['snapshot'] and not e['deleting']]


def start_operation(names):
    """a random operation on the served volume, beside the writes; None: this round has none"""
    if rnd.random() < .15:
        return None
    if len(names) > 7 and rnd.random() < .7:
        # the newest one is merged into the top's place: the disk itself changes its file
        op = ['destroy', VOL + '@' + (names[-1] if rnd.random() < .6 else rnd.choice(names))]
    else:
        op = ['snapshot', VOL + '@n%d' % (count['snapshot'] + 100)]
    count[op[0]] += 1
    env = dict(os.environ, VARVE_CRASH_AT=rnd.choice(POINTS[op[0]])) if rnd.random() < .6 else None
    return subprocess.Popen([VARVE, *op], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)


def killed_round(disk, names):
    with serve() as server:
        pid = os.fork()
        if pid == 0:
            time.sleep(rnd.uniform(.05, .8))
            os.kill(server.p.pid, 9)
            os._exit(0)
        op = start_operation(names)
        disk.run(SOCK, time.time() + 60)
        os.waitpid(pid, 0)
        server.kill()
    if op and op.wait(120):
        count['cut'] += 1
    wait_unlocked(TOP)


def read_back():
    """Reads the whole disk into RAW in one of several ways, and returns which."""
    way = rnd.choice(['server', 'snapshot', 'view'])
    if way == 'server':
        with serve() as server:
            server.stop()
    elif way == 'snapshot':
        varve('snapshot', VOL + '@i%d' % count['idle'])
        count['idle'] += 1
    to_raw(TOP, RAW, 'varve' if way == 'view' else 'qemu-img')
    return way


def thin(names):
    """Idle: not more than about a dozen layers, and nothing left of what was cut off."""
    while len(names) > 12:
        varve('destroy', VOL + '@' + names.pop(rnd.randrange(len(names))))
    for e in varve_json('info', VOL, '--json')['elements']:
        check(e['path'], (0, 3))


def main():
    os.makedirs(D + '/pool')
    with open(D + '/storage.cfg', 'w') as f:
        f.write('dir: p\n\tpath %s/pool\n\tcontent images\n\tsnapext 1\n' % D)
    varve('create', VOL, str(SIZE))
    disk, hit = Disk(SIZE, rnd), 0
    for i in range(7):
        with serve() as server:
            disk.run(SOCK, time.time() + .03)
            server.stop()
        varve('snapshot', VOL + '@s%d' % i)
    to_raw(TOP, RAW)
    disk.verify(RAW, 'lower layers', keep=True)
    for _ in range(RUNS):
        killed_round(disk, snapshots())
        to_raw(TOP, RAW)
        hit += disk.verify(RAW, 'QEMU') > 0
        way = read_back()
        lost = disk.verify(RAW, 'varve, ' + way, keep=True)
        if lost:
            raise Failed('%d answered sectors are not there (%s)' % (lost, way))
        thin(snapshots())
    print('%d kills, %d of them with answered writes that the image did not have yet; during them %d snapshots and %d '
          'deletions, %d cut off' % (RUNS, hit, count['snapshot'], count['destroy'], count['cut']))
    done('ok')


main()
