"""kill -9 of `varve serve` under random writes, again and again on the same image.

  kill9.py [ack|flush [RUNS]]

A client keeps 16 requests in flight: aligned and unaligned writes, zeroes, discards, and a flush now and then. The images
have 1, 8 and 64 layers with data in all of them. After each kill QEMU must find a sound image with all that was
flushed: on the image itself, and on a copy that it writes to. In mode ack varve must then show every answered write:
from a read-only open, from a server that brings them into the file, or from one that is killed while it does so. Now and
then QEMU writes to the image first: then what was flushed is there, and both programs see the same.

The last lines say how many kills met answered writes that were not in the image as QEMU reads it.
"""
import os, random, sys, time
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'lib'))
from killmodel import *

MODE = sys.argv[1] if len(sys.argv) > 1 else 'ack'
RUNS = int(sys.argv[2]) if len(sys.argv) > 2 else (1000 if LONG else 24)
SIZE = 512 << 20
KINDS = [('cluster_size=64k', 1), ('preallocation=metadata,extended_l2=on,cluster_size=128k', 8),
         ('extended_l2=on,cluster_size=64k', 64), ('cluster_size=4k', 1), ('preallocation=metadata', 1)]
POINTS = ['ack_recovered', 'ack_begun', 'ack_started', 'ack_cleared']
need('qemu-img', 'qemu-io')
D = folder()
os.environ['VARVE_RUNTIME'] = D + '/run'
SOCK, RAW = D + '/s', D + '/raw'
rnd = random.Random(SEED)


def create(path, options, below):
    argv = ['-b', below, '-F', 'qcow2'] if below else []
    run('qemu-img', 'create', '-q', '-f', 'qcow2', '-o', options, *argv, path, str(SIZE))


def serve(image, **kw):
    return Server(image, SOCK, '--durability', MODE, **kw)


def make_chain(k, options, depth):
    """layers with data in each; the lower ones are closed well"""
    disk, below = Disk(SIZE, rnd), None
    for i in range(depth):
        path = '%s/i%d-%d.qcow2' % (D, k, i)
        create(path, options if i == depth - 1 else 'cluster_size=64k', below)
        if i < depth - 1:
            with serve(path) as server:
                disk.run(SOCK, time.time() + .02)
                server.stop()
        below = path
    if depth > 1:
        to_raw('%s/i%d-%d.qcow2' % (D, k, depth - 2), RAW)
        disk.verify(RAW, 'lower layers', keep=True)
    return path, disk


def qemu_on_copy(image, disk):
    """Consistent for a writer, too; and the same disk."""
    copy = image + '.copy'
    run('cp', '--sparse=always', image, copy)
    run('qemu-io', '-f', 'qcow2', '-c', 'write -P 7 %d 64k' % (rnd.randrange(SIZE >> 16) << 16), copy)
    state = check(copy, (0, 3))
    os.unlink(copy)
    return state


def replay(image, disk):
    """Reads all with varve. Returns the name of the way it was done."""
    way = rnd.choice(['view', 'server', 'cut'])
    if way == 'cut':
        point = rnd.choice(POINTS)
        try:
            serve(image, env={'VARVE_CRASH_AT': point}).stop()
            if point != 'ack_cleared':
                raise Failed('the server passed %s' % point)
        except Failed as e:
            if '-9' not in str(e):
                raise
        wait_unlocked(image)
        way += ' at ' + point
    if way == 'view' or rnd.random() < .5:
        to_raw(image, RAW, 'varve')
    else:
        with serve(image) as server:
            server.stop()
        check(image, (0, 3))
        to_raw(image, RAW)
    return way


def meddle(image, disk):
    """QEMU writes first: the journal is void, what was flushed stays."""
    s = rnd.randrange(SIZE // SECTOR)
    run('qemu-io', '-f', 'qcow2', '-c', 'write -z %d %d' % (s * SECTOR, SECTOR), image)
    disk.may[s] = [0]
    to_raw(image, RAW)
    to_raw(image, RAW + '2', 'varve')
    run('cmp', RAW, RAW + '2')
    disk.answered = []
    disk.verify(RAW, 'varve behind QEMU', keep=True)


def one_run(image, disk, states):
    """True if the kill met something that the image does not have."""
    with serve(image) as server:
        delay = rnd.uniform(.02, .3)
        pid = os.fork()
        if pid == 0:
            time.sleep(delay)
            os.kill(server.p.pid, 9)
            os._exit(0)
        disk.run(SOCK, time.time() + 60)
        os.waitpid(pid, 0)
        server.kill()
    wait_unlocked(image)
    states[check(image, (0, 3))] += 1
    qemu_on_copy(image, disk)
    to_raw(image, RAW)
    missing = disk.verify(RAW, 'QEMU', keep=MODE == 'flush')
    if MODE == 'flush':
        return missing > 0
    if rnd.random() < .1:
        meddle(image, disk)
        return missing > 0
    way = replay(image, disk)
    lost = disk.verify(RAW, 'varve, ' + way, keep=True)
    if lost:
        raise Failed('%d answered sectors are not there (%s, image %s)' % (lost, way, image))
    return missing > 0


def main():
    hit = total = 0
    states = {0: 0, 3: 0}
    for k, (options, depth) in enumerate(KINDS):
        image, disk = make_chain(k, options, depth)
        for _ in range(-(-RUNS // len(KINDS))):
            hit += one_run(image, disk, states)
            total += 1
        print('%s, %d layers: %d kills' % (options, depth, total), flush=True)
        for name in os.listdir(D):
            if name.startswith('i%d-' % k):
                os.unlink(D + '/' + name)
    print('%s: %d kills, %d of them with answered writes that the image did not have yet' % (MODE, total, hit))
    print('qemu-img check: %d clean, %d with leaked clusters' % (states[0], states[3]))
    if hit * 10 < total * 8:
        raise Failed('too few kills met something unwritten: this run shows little')
    done('ok')


main()
