"""What the tests that kill a server share: a client with many requests in flight, and what each sector
of its disk may hold afterwards."""
import os, random, socket, struct, sys, time
from proc import *

SECTOR = 512


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
    """What each sector may hold: the flushed content, and every later content in order. Each change has a stamp of
    its own: above 0 for data, below 0 for zeroes; a discard leaves zeroes or what was there."""

    def __init__(self, size, rnd):
        self.size, self.rnd = size, rnd
        self.may = {}      # sector -> list of possible stamps, oldest (flushed) first
        self.count, self.discards = 0, set()
        self.answered = [] # changes (off, len, stamp) that were answered and not flushed

    def stamp(self, n):
        return struct.pack('<QQ', n, n ^ 0x5555) * (SECTOR // 16) if n > 0 else bytes(SECTOR)

    def sectors(self, off, n):
        return range(off // SECTOR, (off + n) // SECTOR)

    def note(self, off, n, stamp):
        for s in self.sectors(off, n):
            self.may.setdefault(s, [0]).append(stamp)

    def settle(self, changes):
        """A flush covers these changes: what a sector held before them is no longer possible."""
        for off, n, stamp in changes:
            if stamp in self.discards:
                continue
            for s in self.sectors(off, n):
                may = self.may[s]
                if stamp in may: # else a later one was settled before
                    del may[:may.index(stamp)]
        gone = set(changes)
        self.answered = [a for a in self.answered if a not in gone]

    def next_change(self, busy):
        """a random change that meets none in flight (whose order would be open): command, offset, length, stamp"""
        while True:
            x, n = self.rnd.random(), self.rnd.choice([8, 8, 8, 8, 1, 3, 40, 256]) * SECTOR
            off = self.rnd.randrange((self.size - n) // SECTOR) * SECTOR
            if n >= 8 * SECTOR:
                off -= off % (8 * SECTOR)
            if any(off < b[0] + b[1] and b[0] < off + n for b in busy):
                continue
            self.count += 1
            if x < .9:
                return 1, off, n, self.count
            if x >= .95:
                self.discards.add(-self.count)
            return 6 if x < .95 else 4, off, n, -self.count

    def run(self, sock, end, flushes=.003, depth=16):
        """Changes the disk until time `end`, or until the server goes. Whoever calls kills it."""
        c, inflight, flushed = Client(sock), {}, None
        self.answered = []
        try:
            while time.time() < end or not self.answered:
                while len(inflight) < depth:
                    if flushed is None and self.rnd.random() < flushes:
                        flushed = list(self.answered) # covers what was answered when it was sent
                        inflight[c.send(3, 0, 0)] = None
                        continue
                    cmd, off, n, stamp = self.next_change([v for v in inflight.values() if v])
                    self.note(off, n, stamp)
                    h = c.send(cmd, off, n, self.stamp(stamp) * (n // SECTOR) if cmd == 1 else b'')
                    inflight[h] = (off, n, stamp)
                h, error = c.answer()
                what = inflight.pop(h)
                if error:
                    raise Failed('request failed with %d' % error)
                if what is None:
                    self.settle(flushed)
                    flushed = None
                else:
                    self.answered.append(what)
        except (ConnectionError, BrokenPipeError):
            pass

    def verify(self, raw, who, keep=False):
        """The raw file has in every sector one of its possible contents. Returns how many sectors are older than
        what was last answered. keep: this is what they hold from now on."""
        last, missing = {}, 0
        for off, n, stamp in self.answered:
            if stamp not in self.discards:
                last.update(dict.fromkeys(self.sectors(off, n), stamp))
        with open(raw, 'rb') as f:
            for s, may in self.may.items():
                f.seek(s * SECTOR)
                got = f.read(SECTOR)
                at = max((i for i, v in enumerate(may) if self.stamp(v) == got), default=-1)
                if at < 0:
                    raise Failed('%s: sector %d holds %d, not one of %s' % (who, s, int.from_bytes(got[:8], 'little'), may))
                if s in last and at < may.index(last[s]):
                    missing += 1
                if keep:
                    self.may[s] = [may[at]]
        return missing


def to_raw(image, raw, tool='qemu-img'):
    argv = ['qemu-img', 'convert'] if tool == 'qemu-img' else [VARVE, 'img', 'convert', '-q']
    run(*argv, '-f', 'qcow2', '-O', 'raw', image, raw)


def wait_unlocked(image):
    """The kernel ends a killed process's I/O, and its locks with it, a moment after the process."""
    for _ in range(250):
        rc, out = run('qemu-img', 'check', '-f', 'qcow2', image, rc=None)
        if 'lock' not in out:
            return
        time.sleep(.02)
    raise Failed('the image stays locked: ' + out)
