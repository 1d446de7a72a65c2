"""kill -9 of `varve serve` under random changes, again and again on the same disks.

  kill9.py [ack|flush [RUNS]]

A client keeps 1 to 64 requests in flight: writes, overwrites, zeroes, discards, and a flush now and then. The chains have 1 to
64 layers with data in all of them. In many rounds snapshots are taken, merged down (into a lower layer, or the disk itself) and
streamed by QMP meanwhile. After each kill QEMU, on a copy, must find a sound image with all that was flushed, and may
write to it. In mode ack varve must then show every answered write: from a read-only open, and from the next server, or from one
behind another that was killed at a step of bringing them into the file. Now and then QEMU writes to the image first: then what was
flushed is there, and both programs see the same.

The last lines say how many kills met records in the journal, and how many answered writes that QEMU does not see.
"""
import os, random, struct, sys, threading, time
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'lib'))
from killmodel import *
from qmpclient import Qmp, QmpError

MODE = sys.argv[1] if len(sys.argv) > 1 else 'ack'
RUNS = int(sys.argv[2]) if len(sys.argv) > 2 else (1000 if LONG else 48)
A_CHAIN = 12 # kills of one chain of images
SIZE = 32 << 20
OPTIONS = ['cluster_size=64k', 'preallocation=metadata,extended_l2=on,cluster_size=128k', 'extended_l2=on,cluster_size=64k',
           'cluster_size=4k', 'cluster_size=16k']
DEPTHS = [1, 8, 2, 64, 1, 4, 16, 1, 3, 32]
POINTS = ['ack_recovered', 'ack_begun', 'ack_started', 'ack_cleared']
need('qemu-img', 'qemu-io')
D = folder()
os.environ['VARVE_RUNTIME'] = D + '/run'
SOCK, QMP, RAW = D + '/s', D + '/q', D + '/raw'
rnd = random.Random(SEED)
count = dict.fromkeys(['kills', 'with records', 'unseen by QEMU', 'clean', 'leaks', 'snapshot', 'commit', 'commit of the disk', 'stream',
                       'during a snapshot', 'during a job', 'between two disks', 'read-only', 'killed again', 'QEMU first'], 0)


class Layers:
    """Images in the folder, and which of them is the disk. What lies below it is read from the headers."""

    def __init__(self):
        self.nr, self.disk = 0, None
        self.bases = [self.make(o) for o in OPTIONS]
        # the backing name is there to be replaced
        self.templates = [self.make(o, '-u', '-b', 'L00000', '-F', 'qcow2') for o in OPTIONS]

    def make(self, options, *more):
        path = D + '/template'
        run('qemu-img', 'create', '-q', '-f', 'qcow2', '-o', options, *more, path, str(SIZE))
        with open(path, 'rb') as f:
            return f.read()

    def path(self, name):
        return '%s/%s' % (D, name)

    def begin(self):
        """a chain anew, of one image"""
        self.disk = None
        self.tidy()
        self.nr += 1
        self.disk = 'L%05d' % self.nr
        with open(self.path(self.disk), 'wb') as f:
            f.write(rnd.choice(self.bases))

    def overlay(self, below):
        self.nr += 1
        name, image = 'L%05d' % self.nr, rnd.choice(self.templates)
        at = int.from_bytes(image[8:16], 'big')
        with open(self.path(name), 'wb') as f:
            f.write(image[:at] + below.encode() + image[at + len(below):])
        return name

    def chain(self):
        """top first"""
        names, name = [], self.disk
        while name:
            names.append(name)
            with open(self.path(name), 'rb') as f:
                head = f.read(4096)
            at, n = int.from_bytes(head[8:16], 'big'), int.from_bytes(head[16:20], 'big')
            name = os.path.basename(head[at:at + n].decode()) if at else None
        return names

    def tidy(self):
        """what is in no chain any more goes; its journal too, as the name of the file may come again"""
        keep = self.chain() if self.disk else []
        for name in os.listdir(D):
            if name[0] == 'L' and name not in keep:
                os.unlink(self.path(name))


class Operator(threading.Thread):
    """Snapshots and merges until the server goes."""

    def __init__(self, layers, depth, grow_to=None):
        super().__init__()
        self.layers, self.depth, self.grow_to = layers, depth, grow_to
        self.doing, self.error = None, None
        self.rnd = random.Random(rnd.random())
        self.start()

    def run(self):
        try:
            with Qmp(QMP) as self.qmp:
                self.work()
        except (OSError, EOFError):
            pass
        except Exception as e:
            self.error = e

    def work(self):
        while True:
            nodes = self.qmp.execute('query-named-block-nodes', flat=True)
            if self.grow_to:
                if len(nodes) >= self.grow_to:
                    return
                time.sleep(.01)
                self.snapshot(nodes)
                continue
            time.sleep(self.rnd.uniform(0, .04))
            more = self.rnd.random() < (.7 if len(nodes) <= self.depth else .25)
            if more or len(nodes) == 1:
                self.snapshot(nodes)
            else:
                self.merge(nodes)

    def snapshot(self, nodes):
        below = os.path.basename(nodes[0]['file'])
        name = self.layers.overlay(below)
        self.qmp.execute('blockdev-add', {'driver': 'qcow2', 'node-name': name, 'backing': None,
                                          'file': {'driver': 'file', 'filename': self.layers.path(name)}})
        self.doing = 'during a snapshot'
        self.layers.disk = name # over an image that was not left yet it shows the same
        self.qmp.execute('blockdev-snapshot', node=nodes[0]['node-name'], overlay=name)
        self.doing = None
        count['snapshot'] += 1

    def merge(self, nodes):
        top = self.rnd.randrange(0, len(nodes) - 1) if self.rnd.random() < .6 else 0
        base = self.rnd.randrange(top + 1, min(len(nodes), top + 4))
        names = [n['node-name'] for n in nodes]
        self.doing, kind = 'during a job', 'commit' if top else 'commit of the disk'
        if top and base > top + 1 and self.rnd.random() < .5:
            kind = 'stream'
            self.qmp.execute('block-stream', {'job-id': 'j', 'device': names[top], 'base-node': names[base]})
        else:
            self.qmp.execute('block-commit', dict({'job-id': 'j', 'device': names[0], 'base-node': names[base]},
                                                  **({'top-node': names[top]} if top else {})))
        if top == 0:
            if not self.qmp.wait_event('BLOCK_JOB_READY', 20, device='j'):
                raise Failed('a commit does not get ready')
            time.sleep(self.rnd.choice([0, 0, .02]))
            self.doing = 'between two disks'
            self.layers.disk = os.path.basename(nodes[base]['file']) # both hold the same by now, and stay so
            self.qmp.execute('job-complete', id='j')
        e = self.qmp.wait_event('BLOCK_JOB_COMPLETED', 20, device='j')
        if not e or 'error' in e['data']:
            raise Failed('%s: %r' % (kind, e))
        self.qmp.wait_event('JOB_STATUS_CHANGE', 20, id='j', status='null')
        self.doing = None
        count[kind] += 1


def serve(layers, **kw):
    for path in SOCK, QMP: # a dead server's sockets may answer for a moment
        if os.path.exists(path):
            os.unlink(path)
    return Server(layers.path(layers.disk), SOCK, '--qmp', QMP, '--durability', MODE, **kw)


def grow(layers, depth):
    """a new chain with data in each layer; its server"""
    layers.begin()
    disk = Disk(SIZE, rnd)
    server = serve(layers)
    op = Operator(layers, depth, grow_to=depth)
    while True:
        disk.run(SOCK, time.time() + .05, depth=4)
        client = Client(SOCK)
        disk.verify(client.read_all(SIZE), 'a new chain', keep=True)
        client.send(3, 0, 0)
        client.answer()
        if not op.is_alive():
            break
    op.join()
    if op.error:
        raise op.error
    return disk, server


def kill_later(pid, disk, delay):
    begin = disk.count
    while disk.count < begin + 40:
        time.sleep(.001)
    time.sleep(delay)
    os.kill(pid, 9)


def has_records(path):
    """The disk's journal has changes that are not in its tables: its head, and the first record of its session."""
    st = os.stat(path)
    try:
        with open('%s/run/journal/%x-%x.map' % (D, st.st_dev, st.st_ino), 'rb') as f:
            head = f.read(8192)
    except FileNotFoundError:
        return False
    session, trimmed, tail = struct.unpack_from('=QQQ', head, 16)
    first, = struct.unpack_from('=Q', head, 40 + session % 2 * 2136 + 72)
    return tail > max(trimmed, first)


def strike(server, layers, disk, depth):
    """Changes, and a kill among them."""
    delay = 1.3 if rnd.random() < .04 else rnd.uniform(0, .12) # the long ones get to what is written back by age
    op = Operator(layers, depth) if rnd.random() < .5 else None
    killer = threading.Thread(target=kill_later, args=(server.p.pid, disk, delay))
    killer.start()
    disk.run(SOCK, time.time() + 60, flushes=.002, depth=rnd.choice([1, 2, 4, 16, 64]))
    killer.join()
    server.kill()
    count['kills'] += 1
    if op:
        op.join()
        if op.error:
            raise op.error
        if op.doing:
            count[op.doing] += 1


def qemu_looks(layers, disk):
    """QEMU instead of varve. Returns how many sectors it does not show that were answered."""
    copy, image = layers.path('copy'), layers.path(layers.disk)
    run('cp', '--sparse=always', image, copy)
    count['leaks' if check(image, (0, 3)) else 'clean'] += 1
    to_raw(copy, RAW)
    missing = disk.verify(RAW, 'QEMU', keep=MODE == 'flush')
    run('qemu-io', '-f', 'qcow2', '-c', 'write -P 7 %d 64k' % (rnd.randrange(SIZE >> 16) << 16), copy)
    check(copy, (0, 3))
    return missing


def qemu_writes(layers, disk):
    """QEMU opens the image to write before varve: the journal is void, what was flushed stays."""
    s = rnd.randrange(SIZE // SECTOR)
    disk.count += 1
    disk.may[s], disk.answered = [-disk.count], []
    run('qemu-io', '-f', 'qcow2', '-c', 'write -z %d %d' % (s * SECTOR, SECTOR), layers.path(layers.disk))
    to_raw(layers.path(layers.disk), RAW)
    disk.verify(RAW, 'QEMU, which writes', keep=True)
    count['QEMU first'] += 1


def expect_all(data, layers, disk, who):
    lost = disk.verify(data, who, keep=True)
    if lost and MODE == 'ack':
        raise Failed('%s: %d answered sectors are not there, disk %s' % (who, lost, layers.disk))


def killed_again(layers):
    """A server that dies on the way to an open disk."""
    try:
        serve(layers, env={'VARVE_CRASH_AT': rnd.choice(POINTS)}).kill()
    except Failed as e:
        if '-9' not in str(e):
            raise
        count['killed again'] += 1
    wait_unlocked(layers.path(layers.disk))


def read_back(layers, disk):
    """All that was answered is there. Returns the server that shows it."""
    if rnd.random() < .05 and len(layers.chain()) == 1:
        qemu_writes(layers, disk)
    if MODE == 'ack' and rnd.random() < .2:
        killed_again(layers)
    if rnd.random() < .3:
        to_raw(layers.path(layers.disk), RAW, 'varve')
        expect_all(RAW, layers, disk, 'varve, read-only')
        count['read-only'] += 1
    server = serve(layers)
    expect_all(Client(SOCK).read_all(SIZE), layers, disk, 'varve')
    return server


def main():
    layers, server = Layers(), None
    for i in range(RUNS):
        if i % A_CHAIN == 0:
            if server:
                server.stop()
            depth = DEPTHS[i // A_CHAIN % len(DEPTHS)]
            disk, server = grow(layers, depth)
        strike(server, layers, disk, depth)
        wait_unlocked(layers.path(layers.disk))
        count['with records'] += has_records(layers.path(layers.disk))
        count['unseen by QEMU'] += qemu_looks(layers, disk) > 0
        server = read_back(layers, disk)
        layers.tidy()
        if i % A_CHAIN == A_CHAIN - 1:
            print('%d kills, %d with records, %d unseen by QEMU; now %d layers' %
                  (count['kills'], count['with records'], count['unseen by QEMU'], len(layers.chain())), flush=True)
    server.stop()
    for name in layers.chain():
        check(layers.path(name), (0, 3))
    print(', '.join('%s %d' % i for i in count.items()))
    if MODE == 'ack' and count['with records'] * 10 < count['kills'] * 8:
        raise Failed('too few kills met something unwritten: this run shows little')
    done('%s: %d kills' % (MODE, count['kills']))


main()
