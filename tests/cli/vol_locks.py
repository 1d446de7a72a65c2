"""Leases between two hosts: who is refused, and whom the refusal names; what goes with a process, with a volume.

The hosts are two sanlock daemons on this machine (tests/lib/leasehosts.py)."""
import json, os, signal, sys, time
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'lib'))
from leasehosts import IO_TIMEOUT, Steps, two_hosts
from nbdclient import Nbd
from proc import VARVE, Failed, done, folder

PROG = os.environ.get('LOCK_PROG') or os.path.join(os.path.dirname(VARVE), '../../tests/unit/vol/lock_prog')
DISK = '100/vm-100-disk-0'


def refused(host, *args, text):
    out = host.varve(*args, rc=1)
    if text not in out:
        raise Failed('varve %s: refused without "%s": %s' % (' '.join(args), text, out))


def held(host):
    """(lock, volume, host, mode) as pool status tells them"""
    locks = json.loads(host.varve('pool', 'status', 'p', '--json'))[0]['locks']
    if not locks['joined'] or locks['by'] != 'sanlock':
        raise Failed('pool status: %r' % locks)
    return sorted((x['what'], x['name'], x['host'], x['mode']) for x in locks['held'])


def named(host):
    """leases that have a name"""
    out = host.varve('pool', 'init-locks', 'p')
    if 'nothing done' not in out:
        raise Failed('init-locks made leases that are there: ' + out)
    return int(out.split('of which ')[1].split()[0])


class Server:
    def __init__(self, host, disk, *options):
        self.host, self.sock = host, host.home + '/nbd'
        if os.path.exists(self.sock):
            os.unlink(self.sock)
        self.log = open(host.home + '/serve', 'wb')
        self.p = host.spawn(VARVE, 'serve', 'p:' + disk, '--export', 'nbd,unix=' + self.sock, *options, stdout=self.log,
                            stderr=self.log)
        end = time.monotonic() + 20
        while True:
            try:
                Nbd(self.sock).close()
                return
            except (OSError, EOFError):
                if self.p.poll() is not None or time.monotonic() > end:
                    raise Failed('varve serve: ' + self.said())
                time.sleep(.02)

    def said(self):
        with open(self.host.home + '/serve') as f:
            return f.read()[-1000:]

    def stop(self, how=signal.SIGTERM):
        if self.p.poll() is not None:
            return
        self.p.send_signal(how)
        self.p.wait(30)


def making(a, b):
    """none, made once, joined by both"""
    refused(a, 'create', 'p:' + DISK, '16M', text="varve pool init-locks p")
    refused(a, 'pool', 'init-locks', 'q', text="lock sanlock")
    if 'made 60 leases' not in a.varve('pool', 'init-locks', 'p'):
        raise Failed('no leases were made')
    begin = time.monotonic()
    if 'joins its lockspace' not in a.varve('create', 'p:' + DISK, '16M'):
        raise Failed('joining is not told')
    print('  joined and created in %.1f s (io timeout %d s)' % (time.monotonic() - begin, IO_TIMEOUT))
    b.varve('snapshot', 'p:%s@a' % DISK)
    if named(b) != 1 or held(a):    # the volume's for operations: nobody has served it
        raise Failed('after two operations: %d leases, held %r' % (named(b), held(a)))


def operations(a, b):
    """one at a time, wherever it runs; a dead one is none"""
    one, two = Steps(a, PROG), Steps(b, PROG)
    one('op ' + DISK)
    two('op ' + DISK, 'EBUSY', 'is being changed on host host1')
    two('op 100/vm-100-disk-1')
    if held(b) != [('operation', 'p:%s.qcow2' % DISK, 'host1', 'exclusive')]:
        raise Failed('during an operation: %r' % held(b))
    refused(b, 'snapshot', 'p:%s@b' % DISK, text='is being changed on host host1')
    refused(a, 'snapshot', 'p:%s@b' % DISK, text='another operation on it is under way')
    refused(b, 'serve', 'p:' + DISK, text='is being changed on host host1')
    one('pool')
    begin = time.monotonic()
    two('pool', 'EBUSY', "is locked by host host1")
    print('  the pool: refused after %.1f s' % (time.monotonic() - begin))
    one.kill()
    end = time.monotonic() + 10
    while held(b)[:1] == [('operation', 'p:%s.qcow2' % DISK, 'host1', 'exclusive')]:
        if time.monotonic() > end:
            raise Failed('a killed process keeps its leases')
    two('release')
    two('op ' + DISK)
    two('pool')
    two('release')
    print('  the pool, taken and given back: %s us (median, longest)' % two('times 50')[3:])
    two.end()


def served(a, b):
    """a disk is open on one host; what that host changes goes through its server"""
    server = Server(a, DISK)
    try:
        with Nbd(server.sock) as n:
            n.write(0, b'x' * 65536)
            n.flush()
        if held(b) != [('disk', 'p:%s.qcow2' % DISK, 'host1', 'exclusive')]:
            raise Failed('while it is served: %r' % held(b))
        for args in (['serve', 'p:' + DISK], ['snapshot', 'p:%s@c' % DISK], ['destroy', 'p:' + DISK], ['resize', 'p:' + DISK, '+1M'],
                     ['rename', 'p:' + DISK, '100/vm-100-disk-7']):
            refused(b, *args, text='p:%s is open on host host1' % DISK)
        a.varve('snapshot', 'p:%s@c' % DISK)
        a.varve('destroy', 'p:%s@a' % DISK)
        server.stop(signal.SIGKILL)
        server = Server(a, DISK)        # its lease goes with it
    finally:
        server.stop()
    if held(b):
        raise Failed('after the server: %r' % held(b))
    server = Server(b, DISK)
    try:
        with Nbd(server.sock) as n:
            if n.read(0, 65536) != b'x' * 65536:
                raise Failed('the other host reads something else')
        refused(a, 'serve', 'p:' + DISK, text='is open on host host2')
    finally:
        server.stop()


def shared(a, b):
    """for reading, on both"""
    one = Server(a, DISK, '--read-only')
    try:
        two = Server(b, DISK, '--read-only')
        try:
            if [h[2:] for h in held(a)] != [('host1', 'shared'), ('host2', 'shared')]:
                raise Failed('served twice for reading: %r' % held(a))
            refused(a, 'snapshot', 'p:%s@d' % DISK, text='is open on host host2')
        finally:
            two.stop()
        refused(b, 'serve', 'p:' + DISK, text='is open on host host1')
    finally:
        one.stop()


def hand_over(a, b):
    """from one server to the other without a moment in which a third could have it"""
    one, two = Steps(a, PROG), Steps(b, PROG)
    one('disk %s exclusive' % DISK)
    two('disk %s shared' % DISK, 'EBUSY', 'is open on host host1')
    one('change shared')
    two('disk %s shared' % DISK)
    two('change exclusive', 'EBUSY')
    one('change exclusive', 'EBUSY')
    one('release')
    two('change exclusive')
    one('disk %s shared' % DISK, 'EBUSY', 'is open on host host2')
    two('change shared')
    two('release')
    one('disk %s exclusive' % DISK)
    for s in (one, two):
        s.end()


def copied(a, b):
    """for hours, without its lock: other hosts change nothing of it, this one goes on"""
    one, again, two = Steps(a, PROG), Steps(a, PROG), Steps(b, PROG)
    one('copy ' + DISK)
    again('copy ' + DISK)
    two('op ' + DISK, 'EBUSY', 'is being copied on host host1')
    refused(b, 'snapshot', 'p:%s@e' % DISK, text='is being copied on host host1')
    two('copy ' + DISK, 'EBUSY')
    one('release')
    two('op ' + DISK, 'EBUSY', 'is being copied on host host1')
    again('op ' + DISK)
    again('release')
    two('op ' + DISK)
    for s in (one, again, two):
        s.end()
    a.varve('snapshot', 'p:%s@copied' % DISK)
    b.varve('clone', 'p:%s@copied' % DISK, 'p:100/vm-100-disk-9', '--full')
    a.varve('destroy', 'p:100/vm-100-disk-9')


def moved(a, b):
    """with its guest: the other host's server takes it when the first has given it up"""
    one = Server(a, DISK)
    two = Server(b, DISK, '--incoming')
    try:
        out = b.varve('takeover', 'p:' + DISK, rc=1)
        if 'is open on host host1' not in out:
            raise Failed('takeover of a disk that is open elsewhere: ' + out)
        with Nbd(one.sock) as n:
            n.write(0, b'y' * 4096)
        a.varve('handover', 'p:' + DISK)
        b.varve('takeover', 'p:' + DISK)
        with Nbd(two.sock) as n:
            if n.read(0, 4096) != b'y' * 4096:
                raise Failed('the disk that came is not the one that was given up')
        if [h[2:] for h in held(a)] != [('host2', 'exclusive')]:
            raise Failed('after a takeover: %r' % held(a))
        one.p.wait(20)
    finally:
        one.stop()
        two.stop()


def given_back(a, b):
    """names take leases, and what is gone has none"""
    long = '100/vm-100-' + 'x' * 120
    a.varve('create', 'p:' + long, '1M')
    before = named(a)
    b.varve('rename', 'p:' + long, '100/vm-100-short')
    if named(a) != before:
        raise Failed('renamed: %d leases, not %d' % (named(a), before))
    a.varve('destroy', 'p:100/vm-100-short')
    b.varve('destroy', 'p:' + DISK)
    for i in range(20):     # more than there is room for, were they kept
        for host in (a, b):
            host.varve('create', 'p:100/vm-100-disk-%d' % i, '1M')
            host.varve('destroy', 'p:100/vm-100-disk-%d' % i)
    if named(a) > 1:        # of vm-100-disk-1, which never was
        raise Failed('%d leases are left' % named(a))


def all_at_once(a, b):
    """both make the same new leases at the same moment: only one may have each"""
    one, two = Steps(a, PROG), Steps(b, PROG)
    for i in range(15):
        for s in (one, two):
            s.p.stdin.write(b'op 100/vm-100-race-%d\n' % i)
            s.p.stdin.flush()
        answers = sorted(s.p.stdout.readline().decode().split(':')[0].strip() for s in (one, two))
        if answers != ['EBUSY', 'ok']:
            raise Failed('race %d: %r' % (i, answers))
        for s in (one, two):
            s('release')
    for s in (one, two):
        s.end()


def no_room(a, b):
    """an error that says what to do, and nothing left behind"""
    steps, n = Steps(a, PROG), 0
    while True:
        steps.p.stdin.write(b'op 100/vm-100-full-%d\n' % n)
        steps.p.stdin.flush()
        answer = steps.p.stdout.readline().decode().strip()
        if answer != 'ok':
            break
        steps('release')
        n += 1
        if n > 100:
            raise Failed('there is room for more leases than were made')
    if not answer.startswith('ENOSPC') or 'lock-leases' not in answer:
        raise Failed('without room: ' + answer)
    steps.end()


def main():
    base = folder()
    config = base + '/storage.cfg'
    with open(config, 'w') as f:
        f.write('dir: p\n\tpath %s/pool\n\tcontent images\n\tlock sanlock\n\tlock-leases 60\n\tlease-timeout %d\n\n'
                'dir: q\n\tpath %s/pool2\n\tcontent images\n' % (base, IO_TIMEOUT, base))
    for d in ('pool', 'pool2'):
        os.makedirs(os.path.join(base, d))
    a, b = two_hosts(base, config)
    for part in (making, operations, served, shared, hand_over, copied, moved, given_back, all_at_once, no_room):
        part(a, b)
        print('ok %s' % part.__name__, flush=True)
    done('leases of two hosts')


main()
