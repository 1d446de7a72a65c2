"""Runs in a guest: writes to a qcow2 image through a server, counts what the file system had to allocate for it.

  growth_side.py CASE-JSON    prints one JSON line with the counts

CASE: folder (where the image is), backing (the folder under an NFS export, else the same), server (varve, qemu),
step (bytes, 0: none), writes (seq, random), amount (bytes), events (tracepoints that say "allocated").
"""
import json, os, random, re, signal, socket, subprocess, sys, time
from nbdclient import Nbd

EVENTS = '/sys/kernel/tracing/events/'
SOCK = '/run/growth.sock'
CLUSTER = 65536


class Hits:
    """counts tracepoints in the kernel: nothing is copied out, none is lost"""

    def __init__(self, events):
        self.paths = [EVENTS + e for e in events]

    def __enter__(self):
        for p in self.paths:
            with open(p + '/trigger', 'w') as f:
                f.write('hist:keys=common_pid')
        return self

    def __exit__(self, *_):
        for p in self.paths:
            with open(p + '/trigger', 'w') as f:
                f.write('!hist:keys=common_pid')

    def read(self):
        out = {}
        for p in self.paths:
            with open(p + '/hist') as f:
                found = re.search(r'Hits: (\d+)', f.read())
            out[os.path.basename(p)] = int(found.group(1)) if found else 0
        return out


def nfs_operations(folder):
    """operations sent so far by the mount: name -> count"""
    out, here = {}, False
    with open('/proc/self/mountstats') as f:
        for line in f:
            words = line.split()
            if line.startswith('device'):
                here = len(words) > 4 and folder.startswith(words[4]) and 'nfs' in line
            elif here and len(words) > 5 and re.match(r'[A-Z_]+:$', words[0]):
                out[words[0][:-1]] = int(words[1])
    return out


def pieces(path):
    """physically separate parts of a file (FIEMAP): neighbours that differ in their flags count as one"""
    text = subprocess.run(['filefrag', '-v', path], stdout=subprocess.PIPE, check=True).stdout.decode()
    n, end = 0, None
    for m in re.finditer(r'^\s*\d+:\s*(\d+)\.\.\s*(\d+):\s*(\d+)\.\.\s*(\d+):', text, re.M):
        logical, start, last = int(m[1]), int(m[3]), int(m[4])
        n += end != (logical, start)
        end = (int(m[2]) + 1, last + 1)
    return n


def start_server(case, image):
    if case['server'] == 'varve':
        argv = ['varve', 'serve', image, '--export', 'nbd,unix=' + SOCK, '--preallocate', str(case['step'] or 'off')]
    else:
        node = {'driver': 'file', 'filename': image, 'cache': {'direct': True}, 'aio': 'io_uring', 'discard': 'unmap'}
        if case['step']:
            node = {'driver': 'preallocate', 'prealloc-size': case['step'], 'prealloc-align': 1 << 20, 'file': node}
        argv = ['qemu-storage-daemon', '--blockdev', json.dumps({'driver': 'qcow2', 'node-name': 'disk', 'file': node}),
                '--nbd-server', 'addr.type=unix,addr.path=' + SOCK, '--export', 'nbd,id=e,node-name=disk,name=disk,writable=on']
    if os.path.exists(SOCK):
        os.unlink(SOCK)
    p = subprocess.Popen(argv, stdout=sys.stderr)
    for _ in range(600):
        try:
            with Nbd(SOCK, '' if case['server'] == 'varve' else 'disk'):
                return p
        except OSError:
            if p.poll() is not None:
                sys.exit('the server ended with %d' % p.returncode)
            time.sleep(.05)
    sys.exit('the server does not listen')


def write(case):
    """first touches: 64 KiB after another, or 4 KiB in clusters of a random order over four times the amount"""
    clusters = case['amount'] // CLUSTER
    with Nbd(SOCK, '' if case['server'] == 'varve' else 'disk') as disk:
        if case['writes'] == 'seq':
            data = os.urandom(CLUSTER)
            for i in range(clusters):
                disk.write(i * CLUSTER, data)
        else:
            data = os.urandom(4096)
            for i in random.Random(case['seed']).sample(range(4 * clusters), clusters):
                disk.write(i * CLUSTER + 8192, data)
        disk.flush()


def main():
    case = json.loads(sys.argv[1])
    image, real = case['folder'] + '/disk.qcow2', case['backing'] + '/disk.qcow2'
    subprocess.run(['qemu-img', 'create', '-q', '-f', 'qcow2', image, str(8 * case['amount'])], check=True)
    os.sync()
    server = start_server(case, image)
    before = nfs_operations(case['folder'])
    begin = time.monotonic()
    with Hits(case['events']) as hits:
        write(case)
        count = hits.read()
    seconds = time.monotonic() - begin
    after = nfs_operations(case['folder'])
    os.sync()
    held = os.stat(real)
    server.send_signal(signal.SIGTERM)
    rc = server.wait(60)
    if rc:
        sys.exit('the server ended with %d' % rc)
    subprocess.run(['qemu-img', 'check', '-q', image], check=True)
    os.sync()
    out = {'events': count, 'pieces': pieces(real), 'held': held.st_blocks * 512, 'seconds': round(seconds, 2),
           'closed': os.stat(real).st_blocks * 512, 'nfs': {k: v - before.get(k, 0) for k, v in after.items() if v > before.get(k, 0)}}
    os.unlink(image)
    print(json.dumps(out))


main()
