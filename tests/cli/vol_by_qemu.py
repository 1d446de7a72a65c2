"""A volume that QEMU itself has open: each operation on it is done, or refused with nothing changed (docs/volumes.md, the table)."""
import contextlib, os, subprocess, sys, time
from volmodel import KINDS, MIB
from proc import Failed, done, folder, need
from voltools import fresh_in, refused

need('qemu-img', 'qemu-io', 'qemu-storage-daemon')
BASE = folder()
V, NEW, RAW = '100/vm-100-disk-0', '101/vm-101-disk-0', '100/vm-100-disk-1'


@contextlib.contextmanager
def in_qemu(pool, vol):
    """opened for writing, with what is below it, as a guest's QEMU has it"""
    with pool.opened(vol) as path:
        sock = os.path.join(os.path.dirname(pool.path), 'qsd')
        fmt, kind = pool.fmt(path), 'host_device' if os.path.realpath(path).startswith('/dev/') else 'file'
        p = subprocess.Popen(['qemu-storage-daemon', '--blockdev', 'driver=%s,node-name=f,filename=%s' % (kind, path),
                              '--blockdev', 'driver=%s,node-name=d,file=f' % fmt,
                              '--nbd-server', 'addr.type=unix,addr.path=' + sock,
                              '--export', 'type=nbd,id=e,node-name=d,writable=on'], stderr=subprocess.PIPE)
        for _ in range(500):
            if os.path.exists(sock):
                break
            if p.poll() is not None:
                raise Failed('qemu-storage-daemon: %s' % p.stderr.read().decode())
            time.sleep(.02)
        try:
            yield
        finally:
            p.terminate()
            p.wait()
            os.unlink(sock)


def main(kind):
    pool = fresh_in(BASE, 'by-qemu-' + kind, other='q')
    pool.create(V)
    pool.write(V, 0, MIB, 1)
    pool.snapshot(V, 'a')
    pool.write(V, MIB, MIB, 2)
    pool.snapshot(V, 'b')
    pool.create(RAW + '.raw')
    pool.create('q:data')  # there is a folder of locks from then on
    with in_qemu(pool, V):
        for what in (['list'], ['info', pool.id(V)], ['tree', pool.id(V)]):
            pool.varve(*what)
        for what in (['snapshot', pool.id(V, 'c')], ['rollback', pool.id(V, 'a')], ['rollback', pool.id(V, 'a'), '--keep', 'k'],
                     ['destroy', pool.id(V, 'b')], ['destroy', pool.id(V)], ['resize', pool.id(V), '+1M'],
                     ['clone', pool.id(V), pool.id(NEW), '--full'], ['rename', pool.id(V), NEW],
                     ['move', pool.id(V), 'q:'], ['move', pool.id(V), 'q:', '--delete'], ['serve', pool.id(V)]):
            refused(pool, *what, text='by qemu-storage')
        # its snapshots do not change, and may be stood on and copied
        pool.clone(V, 'a', NEW)
        pool.clone(V, 'b', '102/vm-102-disk-0', '--full')
    pool.verify()
    with in_qemu(pool, RAW):
        for what in (['snapshot', pool.id(RAW, 'c')], ['template', pool.id(RAW)], ['destroy', pool.id(RAW)],
                     ['resize', pool.id(RAW), '+1M']):
            refused(pool, *what, text='by qemu-storage')
    pool.destroy(RAW)
    pool.verify()
    if pool.hidden():
        raise Failed('left behind: %s' % pool.hidden())


main('lvm' if 'lvm' in sys.argv[1:] else 'dir')
done('ok')
