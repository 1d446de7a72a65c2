"""varve serve --incoming, handover, takeover: a disk goes to another host with its guest. Two runtime directories are two
hosts here; the guest is a client that writes, is paused, and goes on at the other server."""
import os, subprocess, sys, time
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'lib'))
from killmodel import *
from nbdclient import Nbd, NbdError

need('qemu-io', 'qemu-img')
D = folder()
VOL, MIB = 'p:100/vm-100-disk-0', 1 << 20


class Host:
    def __init__(self, name):
        self.name, self.sock = name, '%s/%s.nbd' % (D, name)
        self.env = dict(os.environ, VARVE_RUNTIME='%s/%s.run' % (D, name), VARVE_CONFIG=D + '/storage.cfg')

    def varve(self, *argv, rc=0):
        p = subprocess.run([VARVE, *argv], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=self.env, timeout=60)
        out = p.stdout.decode()
        if p.returncode != rc:
            raise Failed('varve %s on %s ended with %d: %s' % (' '.join(argv), self.name, p.returncode, out))
        return out

    def serve(self, *options):
        if os.path.exists(self.sock):
            os.unlink(self.sock)
        self.log = open('%s.log' % self.sock, 'ab')
        self.p = subprocess.Popen([VARVE, 'serve', VOL, '--export', 'nbd,unix=' + self.sock, *options], env=self.env,
                                  stdout=self.log, stderr=self.log)
        for _ in range(500):
            if os.path.exists(self.sock):
                try:
                    return self.client().close()
                except (OSError, EOFError):
                    pass
            if self.p.poll() is not None:
                with open('%s.log' % self.sock) as f:
                    raise Failed('varve serve on %s: %s' % (self.name, f.read()))
            time.sleep(.02)
        raise Failed('no server on ' + self.name)

    def client(self, export=''):
        return Nbd(self.sock, export)


def refused(what, f):
    try:
        f()
    except (NbdError, OSError, EOFError) as e:
        return str(e)
    raise Failed(what + ' was answered')


def check_image(host):
    if not os.path.exists(D + '/pool/images/100/vm-100-disk-0.qcow2'):
        raise Failed('the image has gone')
    run('qemu-img', 'check', '-U', '-f', 'qcow2', D + '/pool/images/100/vm-100-disk-0.qcow2')


def main():
    os.makedirs(D + '/pool')
    with open(D + '/storage.cfg', 'w') as f:
        f.write('dir: p\n\tpath %s/pool\n\tcontent images\n' % D)
    a, b = Host('a'), Host('b')
    a.varve('create', VOL, '64M')
    a.varve('snapshot', VOL + '@old')
    a.serve()
    b.varve('serve', VOL, rc=1)  # it is open there
    b.serve('--incoming')
    with a.client() as n, b.client() as early:
        if early.size != 64 * MIB:
            raise Failed('the disk that is to come is %d bytes long' % early.size)
        for i in range(32):
            n.write(i * MIB, bytes([i + 1]) * MIB)  # not flushed: handing over does it
        why = refused('a read of a disk that has not come', lambda: early.read(0, 4096))
        refused('a write', lambda: early.write(0, bytes(4096)))
        b.varve('snapshot', VOL + '@never', rc=1)
        # a takeover before the handover waits, and fails; nothing changes
        t = time.monotonic()
        out = b.varve('takeover', VOL, rc=1)
        if time.monotonic() - t < 9:
            raise Failed('a disk in use was not waited for: ' + out)
        n.write(40 * MIB, b'\x77' * MIB)
    a.varve('snapshot', VOL + '@taken-meanwhile')
    with a.client() as n:
        n.write(0, b'\x99' * MIB)
    t = time.monotonic()
    a.varve('handover', VOL)
    if a.p.wait(1) != 0:
        raise Failed('the server on a ended with %d' % a.p.returncode)
    handed = time.monotonic() - t
    check_image(a)
    refused('a read after the handover', lambda: b.client().read(0, 4096))
    b.varve('takeover', VOL)
    taken = time.monotonic() - t - handed
    b.varve('takeover', VOL, rc=1)  # it has it
    with b.client() as n:
        for i in range(1, 32):
            if n.read(i * MIB, MIB) != bytes([i + 1]) * MIB:
                raise Failed('MiB %d is not what was written on a' % i)
        if n.read(0, MIB) != b'\x99' * MIB or n.read(40 * MIB, MIB) != b'\x77' * MIB:
            raise Failed('writes behind the snapshot are missing')
        n.write(50 * MIB, b'\x55' * MIB)
    with b.client('vm-100-disk-0@taken-meanwhile') as n:
        if n.read(0, MIB) != b'\x01' * MIB:
            raise Failed('the snapshot is not exported')
    b.varve('snapshot', VOL + '@here')
    b.varve('destroy', VOL + '@taken-meanwhile')
    # and back, after b's server was killed: nothing was handed over, but nobody has it open
    a.serve('--incoming')
    b.p.kill()
    b.p.wait()
    time.sleep(.2)
    a.varve('takeover', VOL)
    with a.client() as n:
        if n.read(50 * MIB, MIB) != b'\x55' * MIB:
            raise Failed('a write on b is missing')
    a.varve('handover', VOL)
    check_image(a)
    done('handed over in %.0f ms, taken over in %.0f ms; refused before: %s' % (handed * 1e3, taken * 1e3, why))


main()
