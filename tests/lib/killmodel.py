"""What the tests that kill a server share: a client with many requests in flight, and what each sector
of its disk may hold afterwards."""
import socket, struct, time
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
        b = bytearray(n)
        view = memoryview(b)
        while view:
            got = self.k.recv_into(view)
            if not got:
                raise ConnectionError
            view = view[got:]
        return b

    def send(self, cmd, off, n, data=b'', flags=0):
        self.handle += 1
        self.k.sendall(struct.pack('>IHHQQI', 0x25609513, flags, cmd, self.handle, off, n) + data)
        return self.handle

    def answer(self):
        magic, error, handle = struct.unpack('>IIQ', self.need(16))
        assert magic == 0x67446698, hex(magic)
        return handle, error

    def read_all(self, size, piece=1 << 20):
        """the whole disk, by a client that did nothing before"""
        out, ahead = bytearray(size), 4
        for at in range(0, min(size, ahead * piece), piece):
            self.send(0, at, min(piece, size - at))
        for at in range(0, size, piece):
            handle, error = self.answer()
            if error:
                raise Failed('a read failed with %d' % error)
            off = (handle - 1) * piece
            n = min(piece, size - off)
            out[off:off + n] = self.need(n)
            nxt = at + ahead * piece
            if nxt < size:
                self.send(0, nxt, min(piece, size - nxt))
        return out


class Disk:
    """What each sector may hold: the content last seen for good, and every later content in order. Each change has a
    stamp of its own: above 0 for data, below 0 for zeroes; a discard leaves zeroes or what was there."""

    SEEN = 0 # stamp of what is in self.seen

    def __init__(self, size, rnd):
        self.size, self.rnd = size, rnd
        self.seen = bytearray(size)
        self.may = {}      # sector -> list of possible stamps, oldest (flushed) first; absent: SEEN alone
        self.count, self.discards = 0, set()
        self.answered = [] # changes (off, len, stamp) that were answered and not flushed

    def stamp(self, n):
        return struct.pack('<QQ', n, n ^ 0x5555) * (SECTOR // 16) if n > 0 else bytes(SECTOR)

    def sectors(self, off, n):
        return range(off // SECTOR, (off + n) // SECTOR)

    def note(self, off, n, stamp):
        for s in self.sectors(off, n):
            self.may.setdefault(s, [self.SEEN]).append(stamp)

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
            if x > .98: # discards that make room for new clusters
                n = min(1 << 20, self.size >> 5)
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
            while inflight or time.time() < end or not self.answered: # none may land later
                while len(inflight) < depth and (time.time() < end or not self.answered):
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

    def newest(self, s, got):
        """the last of a sector's possible contents that this is; -1: none"""
        n, may = int.from_bytes(got[:8], 'little'), self.may[s]
        if got == self.stamp(n):
            for i in range(len(may) - 1, -1, -1):
                if may[i] == n if n else may[i] < 0:
                    return i
        return 0 if may[0] == self.SEEN and got == self.seen[s * SECTOR:(s + 1) * SECTOR] else -1

    def verify(self, data, who, keep=False):
        """The disk, as bytes or a raw file, has in every sector one of its possible contents. Returns how many sectors
        are older than what was last answered. keep: this is what they hold from now on. `data` is used up."""
        last, missing = {}, 0
        if isinstance(data, str):
            with open(data, 'rb') as f:
                data = bytearray(f.read())
        for off, n, stamp in self.answered:
            if stamp not in self.discards:
                last.update(dict.fromkeys(self.sectors(off, n), stamp))
        new = []
        for s, may in self.may.items():
            at = s * SECTOR
            got = data[at:at + SECTOR]
            i = self.newest(s, got)
            if i < 0:
                raise Failed('%s: sector %d holds %d, not one of %s' % (who, s, int.from_bytes(got[:8], 'little'), may))
            if s in last and i < may.index(last[s]):
                missing += 1
            new.append((at, got))
            data[at:at + SECTOR] = self.seen[at:at + SECTOR]
        if data != self.seen: # sectors that nobody changed
            at = next(i for i in range(0, self.size, SECTOR) if data[i:i + SECTOR] != self.seen[i:i + SECTOR])
            raise Failed('%s: sector %d changed by itself' % (who, at // SECTOR))
        if keep:
            for at, got in new:
                self.seen[at:at + SECTOR] = got
            self.may, self.answered = {}, []
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
