"""`varve serve` of a pool's volume for tests, beside the model of volmodel."""
import os, subprocess, time
from volmodel import MIB
from proc import Failed
from nbdclient import Nbd


class Served:
    """`varve serve` of a volume of a pool, with a client that writes through NBD and into the model"""

    def __init__(self, pool, vol, sock='nbd'):
        self.pool, self.vol = pool, vol
        self.sock = os.path.join(os.path.dirname(pool.path), sock)
        self.start()

    def start(self):
        if os.path.exists(self.sock):
            os.unlink(self.sock)
        self.log = open(self.sock + '.log', 'ab')
        self.p = subprocess.Popen(self.pool.argv('serve', self.pool.id(self.vol), '--export', 'nbd,unix=' + self.sock),
                                  stdout=self.log, stderr=self.log, env=self.pool.env())
        for _ in range(500):
            try:
                Nbd(self.sock).close()
                return
            except (OSError, EOFError):
                if self.p.poll() is not None:
                    raise Failed('varve serve ended with %d: %s' % (self.p.returncode, self.said()))
                time.sleep(.02)
        raise Failed('varve serve does not listen: ' + self.said())

    def said(self):
        with open(self.sock + '.log', 'rb') as f:
            return f.read()[-1500:].decode('utf-8', 'replace')

    def write(self, off, length, pattern):
        data = bytes([pattern]) * length
        with Nbd(self.sock) as n:
            n.write(off, data)
            n.flush()
        cur = bytearray(self.pool.vols[self.vol][None])
        cur[off:off + length] = data
        self.pool.vols[self.vol][None] = bytes(cur)

    def read(self, export=''):
        with Nbd(self.sock, export) as n:
            return b''.join(n.read(o, min(MIB, n.size - o)) for o in range(0, n.size, MIB))

    def stop(self):
        self.p.terminate()
        if self.p.wait(60):
            raise Failed('varve serve ended with %d: %s' % (self.p.returncode, self.said()))

    def kill(self):
        self.p.kill()
        self.p.wait()
        self.wait_unlocked()

    def wait_unlocked(self):
        """the kernel closes the files of a ring a moment after its process has ended"""
        for _ in range(300):
            inodes = self.pool.inodes()
            with open('/proc/locks') as f:
                # an open file's locks: of processes that live they are the manager's, and soon over
                if not any(int(x.split()[-3].split(':')[2]) in inodes for x in f if 'OFDLCK' in x):
                    return
            time.sleep(.01)
