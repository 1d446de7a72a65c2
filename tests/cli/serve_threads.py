"""varve serve --threads: threads come with connections, and leave with the server, under load too."""
import os, signal, subprocess, sys, time
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'lib'))
from proc import *
from qmpclient import Qmp

need('qemu-img', 'nbdcopy')
V = os.path.abspath(os.environ['VARVE'])
D = folder()
os.chdir(D)
SOCK, QMP = D + '/nbd', D + '/qmp'
URI = 'nbd+unix:///?socket=' + SOCK


def refused():
    for bad in '0', '17', '-1', 'two', '':
        rc, out = run(V, 'serve', 'none.qcow2', '--threads', bad, rc=None, timeout=30)
        if rc == 0 or '--threads takes 1 to 16' not in out:
            raise Failed('--threads %r: %d %r' % (bad, rc, out))
    print('ok refused')


class Served:
    def __init__(self, threads):
        self.p = subprocess.Popen([V, 'serve', 'disk.qcow2', '--threads', str(threads), '--qmp', QMP,
                                   '--export', 'nbd,unix=' + SOCK], stdout=subprocess.PIPE, text=True)
        self.p.stdout.readline()
        self.qmp = Qmp(QMP)

    def threads(self):
        """reactors besides the first; offload and io workers have other names or short lives"""
        rings = 0
        for fd in os.listdir('/proc/%d/fd' % self.p.pid):
            try:
                rings += 'io_uring' in os.readlink('/proc/%d/fd/%s' % (self.p.pid, fd))
            except OSError:
                pass
        return rings - 1

    def stop(self):
        self.p.send_signal(signal.SIGTERM)
        if self.p.wait(60) != 0:
            raise Failed('the server ended with %d' % self.p.returncode)


def disk():
    run('qemu-img', 'create', '-q', '-f', 'qcow2', 'disk.qcow2', '64M')
    with open('data.raw', 'wb') as f:
        f.write(os.urandom(32 << 20))
        f.truncate(64 << 20)


def started_as_needed():
    disk()
    s = Served(3)
    ring = s.threads() >= 0 # not where threads do the I/O
    run('nbdcopy', '--connections=1', 'data.raw', URI)
    if ring and s.threads() != 0:
        raise Failed('one connection has started %d threads' % s.threads())
    run('nbdcopy', '--connections=8', '--threads=8', URI, 'copy.raw')
    run('cmp', 'data.raw', 'copy.raw')
    if ring and s.threads() != 2:
        raise Failed('8 connections have started %d threads, not 2' % s.threads())
    s.stop()
    run('qemu-img', 'check', '-q', 'disk.qcow2')
    print('ok started as needed')


def under_load():
    """snapshots while 4 connections copy, then a stop in the middle"""
    disk()
    s = Served(2)
    copy = subprocess.Popen('while nbdcopy --connections=4 --threads=4 data.raw "%s"; do :; done' % URI, shell=True,
                            stderr=subprocess.DEVNULL)
    for i in range(3):
        time.sleep(0.3)
        run('qemu-img', 'create', '-q', '-u', '-f', 'qcow2', '-b', 'disk.qcow2' if i == 0 else 's%d.qcow2' % (i - 1),
            '-F', 'qcow2', 's%d.qcow2' % i, '64M')
        s.qmp.execute('blockdev-add', **{'node-name': 'n%d' % i, 'driver': 'qcow2', 'backing': None, 'file': {
            'driver': 'file', 'filename': D + '/s%d.qcow2' % i}})
        top = s.qmp.execute('query-named-block-nodes', flat=True)[0]['node-name']
        s.qmp.execute('blockdev-snapshot', node=top, overlay='n%d' % i)
    time.sleep(0.3)
    s.stop()
    copy.wait(60)
    for name in 'disk', 's0', 's1', 's2':
        run('qemu-img', 'check', '-q', name + '.qcow2')
    print('ok under load')


refused()
started_as_needed()
under_load()
done('serve --threads')
