"""A real guest boots from a disk served over NBD and stays up through a snapshot, a delete, and a kill -9
and restart of the server. It writes files, drops its caches and reads them back all the time.

The server is killed while the guest writes: what it had answered must be there, flushed or not, for the guest reads back what its
cache has long dropped.
"""
import json, os, select, subprocess, sys, time
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'lib'))
from proc import *

need('qemu-system-x86_64', 'qemu-img', 'extlinux')
if os.geteuid() != 0:
    print('SKIP: building the guest image needs root')
    sys.exit(77)
D = folder()
os.environ.update(VARVE_CONFIG=D + '/storage.cfg', VARVE_RUNTIME=D + '/run')
VOL, SOCK = 'p:100/vm-100-disk-0', D + '/nbd'
TOOLS = os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..', 'tools')


class Guest:
    def __init__(self, sock):
        node = {'driver': 'nbd', 'node-name': 'd', 'server': {'type': 'unix', 'path': sock}, 'reconnect-delay': 60}
        self.p = subprocess.Popen(['qemu-system-x86_64', '-nodefaults', '-display', 'none', '-no-reboot', '-M', 'q35',
                                   '-accel', 'tcg', '-cpu', 'max,la57=off,cx16=off', '-m', '256', '-serial', 'stdio',
                                   '-blockdev', json.dumps(node), '-device', 'virtio-blk-pci,drive=d'],
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.text, self.ticks = b'', 0

    def ticks_more(self, n, what, limit=120):
        """waits until the guest has done n further rounds, each verified"""
        want, end = self.ticks + n, time.time() + limit
        while self.ticks < want:
            ready, _, _ = select.select([self.p.stdout], [], [], max(0, end - time.time()))
            data = os.read(self.p.stdout.fileno(), 65536) if ready else b''
            if not data:
                raise Failed('%s: the guest stopped after %d rounds: %s' % (what, self.ticks, self.text[-800:].decode('latin1')))
            self.text += data
            self.ticks = self.text.count(b'\ntick ')
            if b'BAD' in self.text:
                raise Failed('%s: the guest says %s' % (what, self.text[self.text.index(b'BAD'):][:200].decode('latin1')))
        print('%s: %d verified rounds' % (what, self.ticks), flush=True)


def main():
    os.makedirs(D + '/pool')
    with open(D + '/storage.cfg', 'w') as f:
        f.write('dir: p\n\tpath %s/pool\n\tcontent images\n\tsnapext 1\n' % D)
    run(os.path.join(TOOLS, 'guest-image'), D + '/guest.raw', timeout=300)
    varve('import', D + '/guest.raw', VOL)
    server = Server(VOL, SOCK)
    guest = Guest(SOCK)
    try:
        guest.ticks_more(5, 'booted')
        for name in ('s1', 's2'):
            varve('snapshot', VOL + '@' + name)
            guest.ticks_more(5, 'snapshot ' + name)
        varve('destroy', VOL + '@s1')
        guest.ticks_more(5, 'deleted s1')
        varve('destroy', VOL + '@s2')
        guest.ticks_more(5, 'deleted s2')
        for i in range(3):
            guest.ticks_more(1, 'before kill %d' % (i + 1))
            time.sleep(.1 + .15 * i)
            server.kill()
            server = Server(VOL, SOCK)
            guest.ticks_more(4, 'server killed and restarted')
    finally:
        guest.p.kill()
        guest.p.wait()
    server.stop()
    check(D + '/pool/images/100/vm-100-disk-0.qcow2')
    done('the guest did %d rounds without an error' % guest.ticks)


main()
