"""A small blocking NBD client for tests: one request at a time, simple replies."""
import socket, struct, threading, random

OPT_GO, REP_ACK, REP_INFO, INFO_EXPORT = 7, 1, 3, 0
READ, WRITE, DISC, FLUSH, TRIM, ZEROES = 0, 1, 2, 3, 4, 6


class NbdError(Exception):
    pass


class Nbd:
    """with Nbd(socket_path, export) as n: n.write(off, data). A host and a port may be given in place of the path."""

    def __init__(self, path, export='', timeout=60):
        self.sock = socket.socket(socket.AF_UNIX if isinstance(path, str) else socket.AF_INET)
        self.sock.settimeout(timeout)
        self.sock.connect(path if isinstance(path, str) else tuple(path))
        self.cookie = 0
        magic, opt, flags = struct.unpack('>8s8sH', self.get(18))
        if magic != b'NBDMAGIC' or opt != b'IHAVEOPT':
            raise NbdError('not an NBD server')
        self.sock.sendall(struct.pack('>I', flags & 3))
        name = export.encode()
        data = struct.pack('>I', len(name)) + name + struct.pack('>H', 0)
        self.sock.sendall(struct.pack('>8sII', b'IHAVEOPT', OPT_GO, len(data)) + data)
        while True:
            _, _, kind, length = struct.unpack('>QIII', self.get(20))
            data = self.get(length)
            if kind == REP_INFO and struct.unpack('>H', data[:2])[0] == INFO_EXPORT:
                self.size, self.flags = struct.unpack('>QH', data[2:12])
            elif kind == REP_ACK:
                break
            elif kind & 0x80000000:
                raise NbdError('export %r: %#x %s' % (export, kind, data.decode('utf-8', 'replace')))
        self.read_only = bool(self.flags & 2)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def get(self, n):
        out = b''
        while len(out) < n:
            data = self.sock.recv(n - len(out))
            if not data:
                raise EOFError('the NBD server closed the connection')
            out += data
        return out

    def request(self, kind, off=0, length=0, data=b'', flags=0):
        self.cookie += 1
        self.sock.sendall(struct.pack('>IHHQQI', 0x25609513, flags, kind, self.cookie, off, length) + data)
        magic, error, cookie = struct.unpack('>IIQ', self.get(16))
        if magic != 0x67446698 or cookie != self.cookie:
            raise NbdError('bad reply')
        if error:
            raise NbdError('errno %d' % error)
        return self.get(length) if kind == READ else None

    def read(self, off, length):
        return self.request(READ, off, length)

    def read_all(self):
        return b''.join(self.read(off, min(1 << 20, self.size - off)) for off in range(0, self.size, 1 << 20))

    def write(self, off, data):
        self.request(WRITE, off, len(data), data)

    def zero(self, off, length):
        self.request(ZEROES, off, length)

    def trim(self, off, length):
        self.request(TRIM, off, length)

    def flush(self):
        self.request(FLUSH)

    def close(self):
        try:
            self.sock.sendall(struct.pack('>IHHQQI', 0x25609513, 0, DISC, 0, 0, 0))
        except OSError:
            pass
        self.sock.close()


class Load:
    """Random writes and verified reads in a thread, against an array of what must be there."""

    def __init__(self, path, size, seed, export='', pause=0):
        self.nbd, self.rng, self.pause = Nbd(path, export), random.Random(seed), pause
        self.model, self.ops, self.error = bytearray(size), 0, None
        for off in range(0, size, 1 << 20):
            self.model[off:off + (1 << 20)] = self.nbd.read(off, min(1 << 20, size - off))
        self.enough = threading.Event()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def step(self):
        length = self.rng.choice((512, 4096, 4096, 4096, 65536, 5000, 200000))
        off = self.rng.randrange(len(self.model) - length)
        what = self.rng.random()
        if what < .55:
            data = bytes([self.rng.randrange(1, 256)]) * length
            self.nbd.write(off, data)
            self.model[off:off + length] = data
        elif what < .62:
            self.nbd.zero(off, length)
            self.model[off:off + length] = bytes(length)
        elif what < .66:
            self.nbd.flush()
        elif self.nbd.read(off, length) != self.model[off:off + length]:
            raise NbdError('wrong data at %d, %d bytes' % (off, length))

    def run(self):
        try:
            while not self.enough.is_set():
                self.step()
                self.ops += 1
                if self.pause:
                    self.enough.wait(self.pause)
        except Exception as e:
            self.error = e

    def wait_ops(self, n):
        """until n further requests are done"""
        want = self.ops + n
        while self.ops < want and not self.error and self.thread.is_alive():
            self.thread.join(.01)
        if self.error:
            raise self.error

    def stop(self):
        """ends the load, reads all back; the array"""
        self.enough.set()
        self.thread.join()
        if self.error:
            raise self.error
        for off in range(0, len(self.model), 1 << 20):
            n = min(1 << 20, len(self.model) - off)
            if self.nbd.read(off, n) != self.model[off:off + n]:
                raise NbdError('wrong data in the MiB at %d' % off)
        self.nbd.close()
        return bytes(self.model)
