#!/usr/bin/env python3
"""The NBD server against other people's clients, and block status against qemu-nbd's.
   nbd_tools.py NBD_SERVE"""
import json, os, random, shutil, signal, socket, subprocess, sys, time
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..', 'lib'))
from proc import Failed, check, done, folder, need, qio, run

need('qemu-nbd', 'qemu-img', 'qemu-io', 'nbdinfo', 'nbdcopy')
SERVE = os.path.abspath(sys.argv[1])
DIR = folder()
os.chdir(DIR)
MIB = 1 << 20


class Server:
    """with Server(image, format, *options) as uri"""

    def __init__(self, image, fmt, *options, program=None):
        self.sock = os.path.join(DIR, 'nbd.sock')
        self.argv = program or [SERVE, '-f', fmt, *options, image, self.sock]

    def __enter__(self):
        if os.path.exists(self.sock):
            os.unlink(self.sock)
        self.proc = subprocess.Popen(self.argv, stdout=subprocess.DEVNULL)
        for _ in range(500):
            k = socket.socket(socket.AF_UNIX)
            try:
                k.connect(self.sock) # the file is there a moment before somebody listens
                return 'nbd+unix:///disk?socket=' + self.sock
            except OSError:
                if self.proc.poll() is not None:
                    raise Failed('server ended with %d' % self.proc.returncode)
                time.sleep(0.02)
            finally:
                k.close()
        raise Failed('the server does not listen')

    def __exit__(self, *exc):
        self.proc.send_signal(signal.SIGTERM)
        rc = self.proc.wait(30)
        if rc not in (0, -signal.SIGTERM) and not exc[0]:
            raise Failed('server ended with %d' % rc)


def qemu_nbd(image, fmt):
    sock = os.path.join(DIR, 'nbd.sock')
    return Server(image, fmt, program=['qemu-nbd', '-r', '-t', '-e', '0', '-A', '-f', fmt, '-x', 'disk',
                                       '-k', sock, image])


def status(uri, context):
    """[(offset, end, value)] with equal neighbours merged"""
    ret = []
    for e in json.loads(run('nbdinfo', '--no-content', '--json', '--map=' + context, uri)):
        off, end, kind = e['offset'], e['offset'] + e['length'], e['type']
        if ret and ret[-1][1] == off and ret[-1][2] == kind:
            off = ret.pop()[0]
        ret.append((off, end, kind))
    return ret


def same_status(image, fmt, what):
    answers = []
    for server in Server(image, fmt, '-r'), qemu_nbd(image, fmt):
        with server as uri:
            answers.append([status(uri, 'base:allocation'), status(uri, 'qemu:allocation-depth')])
    for ours, theirs, name in zip(*answers, ('base:allocation', 'qemu:allocation-depth')):
        if ours != theirs:
            raise Failed('%s, %s:\n ours   %s\n theirs %s' % (what, name, ours[:40], theirs[:40]))
    print('ok status', what, len(answers[0][0]), len(answers[0][1]))


def random_file(path, size):
    with open(path, 'wb') as f:
        f.truncate(size)
        for _ in range(40):
            f.seek(random.randrange(size // 4096) * 4096)
            f.write(random.randbytes(random.randrange(1, 200000)))
        f.truncate(size)


def raw_tests():
    size = 64 * MIB + 512
    random_file('a.raw', size)
    same_status('a.raw', 'raw', 'raw file with holes')
    with Server('a.raw', 'raw', '-r') as uri: # multi-conn whether it can be written or not
        assert json.loads(run('nbdinfo', '--no-content', '--json', uri))['exports'][0]['can_multi_conn']
    with Server('a.raw', 'raw') as uri:
        info = json.loads(run('nbdinfo', '--no-content', '--json', uri))['exports'][0]
        assert info['export-size'] == size and info['can_multi_conn'] and not info['is_read_only'], info
        assert info['block_size_minimum'] == 1 and info['block_size_maximum'] == 32 * MIB, info
        names = {e['export-name'] for e in json.loads(run('nbdinfo', '--no-content', '--json', '--list', uri))['exports']}
        assert names == {'', 'disk'}, names
        run('qemu-img', 'compare', '-f', 'raw', '-F', 'raw', 'a.raw', uri)
        run('nbdcopy', '--connections=4', uri, 'b.raw')
        run('cmp', 'a.raw', 'b.raw')
        run('qemu-img', 'convert', '-f', 'raw', '-O', 'qcow2', uri, 'c.qcow2')
        run('qemu-img', 'compare', 'a.raw', 'c.qcow2')
    random_file('d.raw', size)
    with Server('a.raw', 'raw') as uri:
        run('nbdcopy', '--connections=4', '--flush', 'd.raw', uri)
    run('cmp', 'a.raw', 'd.raw')
    random_file('e.raw', size)
    with Server('a.raw', 'raw') as uri:
        run('qemu-img', 'convert', '-n', '-f', 'raw', '-O', 'raw', 'e.raw', uri)
    run('cmp', 'a.raw', 'e.raw')
    print('ok raw copies')


def little_memory_tests():
    size = 64 * MIB
    random_file('f.raw', size)
    with Server('f.raw', 'raw', '-n', '2', '-m', str(MIB)) as uri:
        run('nbdcopy', '--request-size=%d' % (32 * MIB), uri, 'g.raw')
        qio(uri, 'write -P 7 512 31M', 'read -P 7 512 31M', fmt='raw')
    run('cmp', '-n', '512', 'f.raw', 'g.raw')
    qio('f.raw', 'read -P 7 512 31M', fmt='raw', opts=('-r',))
    print('ok little memory')


def make_chain():
    run('qemu-img', 'create', '-q', '-f', 'qcow2', 'base.qcow2', '64M')
    qio('base.qcow2', 'write -P 1 0 8M', 'write -P 2 20M 100k', 'write -z 30M 2M', 'write -P 3 40M 1M')
    run('qemu-img', 'create', '-q', '-f', 'qcow2', '-o', 'extended_l2=on,cluster_size=128k', '-b', 'base.qcow2',
        '-F', 'qcow2', 'mid.qcow2')
    qio('mid.qcow2', 'write -P 4 1M 4k', 'write -P 4 2M 300k', 'write -z 3M 8k', 'write -P 5 50M 4k',
        'discard 4M 1M')
    run('qemu-img', 'create', '-q', '-f', 'qcow2', '-b', 'mid.qcow2', '-F', 'qcow2', 'top.qcow2', '96M')
    qio('top.qcow2', 'write -P 6 5M 1M', 'write -z -u 6M 1M', 'write -P 6 90M 64k')


def make_preallocated():
    """mapped everywhere, written here and there: the rest is data that reads as zero"""
    run('qemu-img', 'create', '-q', '-f', 'qcow2', '-o', 'preallocation=metadata', 'pre.qcow2', '256M')
    qio('pre.qcow2', 'write -P 1 0 8M', 'write -P 2 20M 100k', 'write -P 3 100M 4k', 'write -z 30M 2M', 'write -P 4 255M 1M')
    run('qemu-img', 'create', '-q', '-f', 'qcow2', '-o', 'extended_l2=on,cluster_size=128k,preallocation=metadata',
        '-b', 'pre.qcow2', '-F', 'qcow2', 'pre-mid.qcow2')
    qio('pre-mid.qcow2', 'write -P 5 1M 4k', 'write -P 5 12M 300k', 'write -z 3M 8k')
    run('qemu-img', 'create', '-q', '-f', 'qcow2', '-b', 'pre-mid.qcow2', '-F', 'qcow2', 'pre-top.qcow2')
    qio('pre-top.qcow2', 'write -P 6 5M 1M', 'write -P 6 200M 64k')


def qcow2_tests():
    make_chain()
    make_preallocated()
    for image in 'base.qcow2', 'mid.qcow2', 'top.qcow2', 'pre.qcow2', 'pre-mid.qcow2', 'pre-top.qcow2':
        same_status(image, 'qcow2', image)
    with Server('pre.qcow2', 'qcow2', '-r') as uri:
        data = sum(b - a for a, b, kind in status(uri, 'base:allocation') if kind == 0)
        assert 9 * MIB < data < 10 * MIB, data
    run('qemu-img', 'convert', '-O', 'raw', 'top.qcow2', 'top.raw')
    with Server('top.qcow2', 'qcow2') as uri:
        run('qemu-img', 'compare', '-f', 'raw', '-F', 'raw', uri, 'top.raw')
        run('nbdcopy', '--connections=4', uri, 'copy.raw')
        run('cmp', 'copy.raw', 'top.raw')
        qio(uri, 'write -P 9 1000 100000', 'write -z 10M 64k', 'discard 5M 512k', 'write -z -u 2M 1M',
            'write -f -P 8 70M 3M', 'flush', fmt='raw')
    check('top.qcow2')
    qio('top.qcow2', 'read -P 9 1000 100000', 'read -P 0 10M 64k', 'read -P 0 2M 1M', 'read -P 8 70M 3M',
        opts=('-r',))
    print('ok qcow2 chain')


def threads_tests():
    """many connections, their sessions on one thread and on several"""
    size = 64 * MIB
    for threads in '1', '2', '4':
        random_file('t.raw', size)
        run('qemu-img', 'create', '-q', '-f', 'qcow2', 't-base.qcow2', str(size))
        run('qemu-img', 'create', '-q', '-f', 'qcow2', '-b', 't-base.qcow2', '-F', 'qcow2', 't.qcow2')
        with Server('t.qcow2', 'qcow2', '-t', threads) as uri:
            assert subprocess.run(['nbdinfo', '--can', 'multi-conn', uri]).returncode == 0
            run('nbdcopy', '--connections=4', '--threads=4', '--flush', 't.raw', uri)
            run('qemu-img', 'compare', '-f', 'raw', '-F', 'raw', 't.raw', uri)
            run('nbdcopy', '--connections=8', '--threads=8', uri, 't-copy.raw')
            run('cmp', 't.raw', 't-copy.raw')
            if shutil.which('fio') and 'nbd' in run('fio', '--enghelp').split():
                run('fio', '--name=j', '--ioengine=nbd', '--uri=' + uri, '--rw=randwrite', '--bs=4k', '--iodepth=32',
                    '--numjobs=4', '--thread', '--size=8m', '--offset_increment=16m', '--verify=crc32c',
                    '--do_verify=1', '--fsync=64', '--output=fio.txt')
            run('qemu-img', 'convert', '-n', '-f', 'raw', '-O', 'raw', 't.raw', uri)
        check('t.qcow2')
        run('qemu-img', 'compare', '-f', 'raw', '-F', 'qcow2', 't.raw', 't.qcow2')
    print('ok threads')


def stop_tests():
    """SIGTERM in the middle of a copy: the server ends in time, with 0, and the client sees an error"""
    random_file('big.raw', 256 * MIB)
    run('qemu-img', 'create', '-q', '-f', 'raw', 'target.raw', '256M')
    server = Server('target.raw', 'raw')
    with server as uri:
        copy = subprocess.Popen(['nbdcopy', 'big.raw', uri], stderr=subprocess.DEVNULL)
        time.sleep(0.1)
        start = time.time()
        server.proc.send_signal(signal.SIGTERM)
        assert server.proc.wait(30) == 0
        assert time.time() - start < 12
        copy.wait(30)
    assert not os.path.exists(server.sock)
    print('ok stop')


random.seed(int(os.environ.get('VARVE_SEED', '20261130')))
for test in sys.argv[2:] or ('raw', 'little_memory', 'stop', 'threads', 'qcow2'):
    globals()[test + '_tests']()
done('all NBD clients agree')
