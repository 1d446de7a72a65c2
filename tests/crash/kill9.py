"""kill -9 of `varve serve` under random writes, again and again on the same image.

  kill9.py [RUNS [flush|ack]]

A client keeps 16 requests in flight: 4k and unaligned writes, zeroes, discards, and a flush now and
then. After each kill the image must open, `qemu-img check` must give 0 or 3, and every sector
must hold what was last flushed or something written to it later. The last line says how many of the kills
hit a server with unwritten metadata: where an answered write is not in the image afterwards.
"""
import os, random, socket, struct, sys, time
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'lib'))
from proc import *

RUNS = int(sys.argv[1]) if len(sys.argv) > 1 else (200 if LONG else 25)
MODE = sys.argv[2] if len(sys.argv) > 2 else 'flush'
SIZE, SECTOR = 64 << 20, 512
need('qemu-img', 'qemu-io')
D = folder()
rnd = random.Random(SEED)


class Client:
    """NBD with fixed newstyle and simple replies, many requests in flight"""

    def __init__(self, path):
        self.k = socket.socket(socket.AF_UNIX)
        self.k.settimeout(20)
        self.k.connect(path)
        self.need(18)
        self.k.sendall(struct.pack('>I', 3) + b'IHAVEOPT' + struct.pack('>II', 1, 0))
        self.need(10)
        self.handle = 0

    def need(self, n):
        b = b''
        while len(b) < n:
            c = self.k.recv(n - len(b))
            if not c:
                raise ConnectionError
            b += c
        return b

    def send(self, cmd, off, n, data=b'', flags=0):
        self.handle += 1
        self.k.sendall(struct.pack('>IHHQQI', 0x25609513, flags, cmd, self.handle, off, n) + data)
        return self.handle

    def answer(self):
        magic, error, handle = struct.unpack('>IIQ', self.need(16))
        assert magic == 0x67446698, hex(magic)
        return handle, error


class Disk:
    """what each sector may hold: the flushed content, and every later content in order"""

    def __init__(self):
        self.may = {}      # sector -> list of possible stamps, oldest (flushed) first
        self.count = 0

    def stamp(self, n):
        return struct.pack('<QQ', n, n ^ 0x5555) * (SECTOR // 16) if n else bytes(SECTOR)

    def note(self, off, n, stamp):
        for s in range(off // SECTOR, (off + n) // SECTOR):
            self.may.setdefault(s, [0]).append(stamp)


def one_run(disk, image, sock, options):
    """Serves, writes, kills. Returns the number of answered, unflushed changes at the kill."""
    with Server(image, sock, *options) as server:
        c = Client(sock)
        inflight, answered = {}, []
        end = time.time() + rnd.uniform(.02, .35)
        try:
            while time.time() < end or not answered:
                while len(inflight) < 16:
                    x = rnd.random()
                    if x < .01 and not any(v[0] == 'flush' for v in inflight.values()):
                        # covers what was answered when it was sent
                        inflight[c.send(3, 0, 0)] = ('flush', list(answered))
                        continue
                    n = rnd.choice([8, 8, 8, 8, 1, 3, 40]) * SECTOR
                    off = rnd.randrange((SIZE - n) // SECTOR) * SECTOR
                    if n == 8 * SECTOR:
                        off -= off % n
                    # one request a sector at a time: the order of two in flight is open
                    if any(v[0] != 'flush' and off < v[1] + v[2] and v[1] < off + n for v in inflight.values()):
                        continue
                    if x < .9:
                        disk.count += 1
                        stamp, data = disk.count, disk.stamp(disk.count) * (n // SECTOR)
                        h = c.send(1, off, n, data)
                    elif x < .96:
                        stamp, h = 0, c.send(6, off, n)
                    else:
                        stamp, h = -1, c.send(4, off, n)
                    inflight[h] = ('change', off, n, stamp)
                    for s in ([0, None] if stamp == -1 else [stamp]):
                        if s is not None:
                            disk.note(off, n, s)
                h, error = c.answer()
                what = inflight.pop(h)
                if error:
                    raise Failed('request failed with %d' % error)
                if what[0] == 'flush':
                    settle(disk, what[1])
                    answered = [a for a in answered if a not in set(what[1])]
                else:
                    answered.append(what[1:])
        finally:
            server.kill()
    return answered


def settle(disk, changes):
    """The flush covers these changes: what a sector held before them is no longer possible."""
    for off, n, stamp in changes:
        for s in range(off // SECTOR, (off + n) // SECTOR):
            may = disk.may[s]
            want = 0 if stamp == -1 else stamp
            # the newest occurrence of this change; a discard may also have kept what was there
            for i in range(len(may) - 1, -1, -1):
                if may[i] == want:
                    if stamp != -1:
                        del may[:i]
                    break


def verify(disk, image, raw, answered, tool='qemu-img', keep=True):
    """Every sector holds one of its possible contents. Returns how many answered changes are missing."""
    if tool == 'qemu-img':
        run('qemu-img', 'convert', '-f', 'qcow2', '-O', 'raw', image, raw)
    else:
        run(VARVE, 'img', 'convert', '-q', '-f', 'qcow2', '-O', 'raw', image, raw)
    last = {}
    for off, n, stamp in answered:
        for s in range(off // SECTOR, (off + n) // SECTOR):
            last[s] = stamp
    missing = 0
    with open(raw, 'rb') as f:
        for s, may in disk.may.items():
            f.seek(s * SECTOR)
            got = f.read(SECTOR)
            found = [v for v in may if disk.stamp(v) == got]
            if not found:
                raise Failed('%s: sector %d holds %d, not one of %s' % (tool, s, int.from_bytes(got[:8], 'little'), may))
            newest = max(i for i, v in enumerate(may) if v in found)
            if last.get(s, -1) >= 0 and newest < max(i for i, v in enumerate(may) if v == last[s]):
                missing += 1
            if keep:
                disk.may[s] = [found[-1]]
    return missing


def wait_unlocked(image):
    """The kernel ends a killed process's I/O, and its locks with it, a moment after the process."""
    for _ in range(100):
        rc, out = run('qemu-img', 'check', '-f', 'qcow2', image, rc=None)
        if 'lock' not in out:
            return
        time.sleep(.02)
    raise Failed('the image stays locked: ' + out)


def main():
    kinds = [['preallocation=metadata,extended_l2=on,cluster_size=128k', True], ['cluster_size=64k', True],
             ['cluster_size=4k', False], ['preallocation=metadata', False]]
    hit = lost = 0
    states = {0: 0, 3: 0}
    for k, (options, overlay) in enumerate(kinds):
        image, disk = '%s/i%d.qcow2' % (D, k), Disk()
        argv = ['qemu-img', 'create', '-q', '-f', 'qcow2', '-o', options]
        if overlay:
            base = '%s/b%d.qcow2' % (D, k)
            run('qemu-img', 'create', '-q', '-f', 'qcow2', base, str(SIZE))
            argv += ['-b', base, '-F', 'qcow2']
        run(*argv, image, str(SIZE))
        for r in range(RUNS // len(kinds) + 1):
            answered = one_run(disk, image, D + '/s', ['--durability', MODE])
            wait_unlocked(image)
            states[check(image, (0, 3))] += 1
            missing = verify(disk, image, D + '/raw', answered, keep=MODE == 'flush')   # QEMU: what was flushed
            hit += missing > 0
            lost += missing
            if MODE == 'ack' and verify(disk, image, D + '/raw', answered, 'varve'):
                raise Failed('answered sectors are not there (image %s)' % image)
    total = (RUNS // len(kinds) + 1) * len(kinds)
    print('%d kills: %d with unwritten metadata (%d answered, unflushed sectors were not in the image)' % (total, hit, lost))
    print('qemu-img check: %d clean, %d with leaked clusters' % (states[0], states[3]))
    if hit * 2 < total:
        raise Failed('most kills met nothing unwritten: this run shows little')
    done('ok')


main()
