"""A served volume that grows: ahead of a stream, told and counted; with no room writes wait, everything else goes on, they
continue by themselves or fail when the server, or the export, ends."""
import os, signal, struct, subprocess, sys, threading, time
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'lib'))
from proc import *
from nbdclient import Nbd, NbdError
from serveprog import Serve

need('qemu-img')
D = folder()
MB = 1 << 20
ROOM = D + '/room'
FILE = D + '/.vol.file'


def room(n):
    with open(ROOM + '.new', 'w') as f:
        f.write(str(n))
    os.rename(ROOM + '.new', ROOM)


def make():
    run('qemu-img', 'create', '-q', '-f', 'qcow2', FILE, '512M')
    os.truncate(FILE, 16 * MB)
    room(1 << 40)


def serve(*options):
    try:
        return Serve(D + '/vol', D, '--format', 'qcow2', '--grow', str(16 * MB), '--room-file', ROOM, *options)
    except Failed as e:
        if 'ended with 77' in str(e):
            sys.exit(77)
        raise


def figures(s):
    return s.qmp.execute('x-varve-stats')['layers'][0]['image']


class Writer(threading.Thread):
    """fills the disk until told, or until an error"""

    def __init__(self, sock, off):
        super().__init__()
        self.nbd, self.off, self.error, self.stopped = Nbd(sock, timeout=120), off, None, False
        self.start()

    def run(self):
        try:
            while not self.stopped:
                self.nbd.write(self.off, self.off.to_bytes(8, 'little') * (MB // 8))
                self.off += MB
        except (NbdError, OSError, EOFError) as e:
            self.error = e

    def wait_stuck(self):
        last = -1
        for _ in range(600):
            if self.off == last and self.is_alive():
                return
            last = self.off
            time.sleep(.5)
        raise Failed('the writer does not stop')


def written(nbd, upto, start=0):
    for off in range(start, upto, MB):
        if nbd.read(off, MB) != off.to_bytes(8, 'little') * (MB // 8):
            raise Failed('%d MiB is not what was written' % (off // MB))


def expect(what, ok):
    if not ok:
        raise Failed(what)


# ---- a stream, then no room ----

make()
with serve('--on-full', 'wait') as s:
    with Nbd(s.nbd) as n:
        for off in range(0, 96 * MB, MB):
            n.write(off, off.to_bytes(8, 'little') * (MB // 8))
            time.sleep(.01)
        f = figures(s)
        print('  stream: %(extensions)d extensions, %(extensions_ahead)d ahead, %(room_waits)d waits' % f)
        expect('nothing was asked for ahead', f['extensions_ahead'] > 2)
        expect('the stream waited', f['room_waits'] <= 1)
    room(os.stat(FILE).st_size)
    w = Writer(s.nbd, 96 * MB)
    e = s.qmp.wait_event('X_VARVE_ROOM', room='full')
    expect('the event does not say that writes wait: %r' % e, e['data']['writes-wait'] and 'room for' in e['data']['msg'])
    w.wait_stuck()
    with Nbd(s.nbd) as n:
        slowest = 0
        for i in range(50):
            t = time.monotonic()
            n.write(i * MB, i.to_bytes(1, 'little') * 4096)
            n.read(i * MB, 4096)
            n.flush()
            slowest = max(slowest, time.monotonic() - t)
        print('  with no room: slowest write, read and flush %.0f ms' % (slowest * 1000))
        expect('other requests wait', slowest < 2)
        for i in range(50):
            n.write(i * MB, (i * MB).to_bytes(8, 'little') * 512)
    expect('a write came through', w.is_alive() and not w.error)
    room(1 << 40)
    s.qmp.wait_event('X_VARVE_ROOM', room='ok')
    at = w.off
    for _ in range(100):
        if w.off > at + 4 * MB:
            break
        time.sleep(.1)
    expect('writes do not go on', w.off > at + 4 * MB)
    w.stopped = True
    w.join()
    with Nbd(s.nbd) as n:
        written(n, w.off)
    f = figures(s)
    expect('waits are not counted: %r' % f, f['room_waits'] >= 1 and f['room_wait_ns'] > 10 ** 9 and f['extend_failures'] > 0)
    # the export goes while a write waits
    room(os.stat(FILE).st_size)
    w = Writer(s.nbd, w.off)
    s.qmp.wait_event('X_VARVE_ROOM', room='full')
    w.wait_stuck()
    s.qmp.execute('block-export-del', id='#disk', mode='hard')
    w.join(20)
    expect('the waiting write holds its export', not w.is_alive())
    s.stop()
expect('what is told: ' + s.errors(), 'writes that need it wait' in s.errors() and 'there is room again' in s.errors())
run('qemu-img', 'check', '-q', '-f', 'qcow2', FILE)

# ---- SIGTERM while writes wait ----

with serve('--on-full', 'wait') as s:
    room(os.stat(FILE).st_size)
    w = Writer(s.nbd, 300 * MB)
    s.qmp.wait_event('X_VARVE_ROOM', room='full')
    w.wait_stuck()
    s.p.send_signal(signal.SIGTERM)
    s.ended(timeout=30)
    w.join(20)
    expect('the waiting write was answered: %r' % w.error, not w.is_alive() and w.error is not None)
run('qemu-img', 'check', '-q', '-f', 'qcow2', FILE)

# ---- writes that are to fail ----

with serve('--on-full', 'fail') as s:
    room(os.stat(FILE).st_size)
    w = Writer(s.nbd, 400 * MB)
    w.join(60)
    expect('the write does not fail: %r' % w.error, isinstance(w.error, NbdError) and '28' in repr(w.error))
    e = s.qmp.wait_event('X_VARVE_ROOM', room='full')
    expect('the event says that writes wait', not e['data']['writes-wait'])
    with Nbd(s.nbd) as n:
        written(n, w.off, 400 * MB)
        room(1 << 40)
        time.sleep(1.2)
        n.write(w.off, w.off.to_bytes(8, 'little') * (MB // 8))
    s.stop()
run('qemu-img', 'check', '-q', '-f', 'qcow2', FILE)
done('serve_grow')
