"""Device flushes a guest flush: not more than qemu-storage-daemon's, with a flush behind each write and behind 32 of them, where
clusters are allocated and where all are there. Both are counted by strace, on one image each."""
import os, random, re, sys
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'lib'))
from proc import *
from nbdclient import Nbd

need('qemu-img', 'qemu-storage-daemon', 'strace')
D = folder()
os.environ.update(VARVE_RUNTIME=D + '/run', VARVE_IO='threads')
SIZE, FLUSHES = 256 << 20, 60
STRACE = ['strace', '-D', '-f', '-qq', '-e', 'trace=fsync,fdatasync,sync_file_range']


def image(name, options, below):
    path = '%s/%s' % (D, name)
    argv = ['-b', below, '-F', 'raw'] if below else []
    run('qemu-img', 'create', '-q', '-f', 'qcow2', '-o', options, *argv, path, str(SIZE))
    return path


def serve_varve(path, sock):
    return [VARVE, 'serve', path, '--export', 'nbd,unix=' + sock]


def serve_qemu(path, sock):
    return ['qemu-storage-daemon', '--blockdev', 'driver=file,node-name=f,filename=%s,cache.direct=on' % path,
            '--blockdev', 'driver=qcow2,node-name=d,file=f', '--nbd-server', 'addr.type=unix,addr.path=' + sock,
            '--export', 'type=nbd,id=e,node-name=d,writable=on,name=']


def flushed(log):
    with open(log) as f:
        return len(re.findall(r'\bf(?:data)?sync\(', f.read()))


def device_flushes(argv, log, per_flush, steady):
    """device flushes that FLUSHES guest flushes took, with so many random writes before each"""
    sock, rnd = log + '.sock', random.Random(SEED)
    for left in log, sock:
        if os.path.exists(left):
            os.unlink(left)
    server = subprocess.Popen(STRACE + ['-o', log] + argv(log.replace('.log', ''), sock), stdout=subprocess.DEVNULL)
    try:
        for _ in range(500):
            if os.path.exists(sock):
                break
            time.sleep(.02)
        with Nbd(sock) as n:
            if steady:
                for at in range(0, SIZE, 1 << 20):
                    n.write(at, b'x' * (1 << 20))
            n.flush()
            before = flushed(log)
            for _ in range(FLUSHES):
                for _ in range(per_flush):
                    n.write(rnd.randrange(SIZE >> 12) << 12, b'y' * 4096)
                n.flush()
            return flushed(log) - before
    finally:
        server.terminate()
        server.wait()


def main():
    below = D + '/below'
    with open(below, 'wb') as f:
        f.truncate(SIZE)
    bad = []
    for options, base in (('cluster_size=64k', None), ('cluster_size=128k,extended_l2=on', below)):
        for steady in (False, True):
            for per_flush in (1, 32):
                row = {}
                for name, argv in (('qemu', serve_qemu), ('varve', serve_varve)):
                    path = image(name, options, base)
                    row[name] = device_flushes(argv, path + '.log', per_flush, steady) / FLUSHES
                text = '%s, %s, %2d writes a flush: %.2f device flushes, qemu-storage-daemon %.2f' % (
                    options, 'steady' if steady else 'first touch', per_flush, row['varve'], row['qemu'])
                print(text, flush=True)
                if row['varve'] > row['qemu'] + .1: # the server's own write-back comes in between now and then
                    bad.append(text)
    if bad:
        raise Failed('more than qemu-storage-daemon: ' + '; '.join(bad))
    done('ok')


main()
