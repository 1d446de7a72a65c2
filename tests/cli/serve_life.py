"""Start and end of a server: what is refused, what the service manager hears, signals, sockets, several clients."""
import os, signal, socket, stat, subprocess, sys, threading, time
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'lib'))
from proc import *
from qmpclient import Qmp
from nbdclient import Nbd, NbdError
from serveprog import Serve, PROG

need('qemu-img', 'qemu-io')
D = folder()
MB = 1 << 20


def image(name, below=None, size='16M'):
    path = '%s/%s.qcow2' % (D, name)
    run('qemu-img', 'create', '-q', '-f', 'qcow2', *(['-b', below, '-F', 'qcow2'] if below else []), path, size)
    return path


def fails(text, *argv):
    """serve_prog must end at once with 1 and one line that holds text"""
    rc, out = run(PROG, *argv, rc=None, timeout=30)
    lines = out.strip().split('\n')
    if rc != 1 or len(lines) != 1 or text not in lines[0]:
        raise Failed('%r: %d %r, not one line with %r' % (argv, rc, out, text))


def bad_starts():
    img = image('bad')
    before = open(img, 'rb').read()
    fails('No such file', D + '/none')
    fails("'zzz' is unknown", '--export', 'nbd,zzz=1', img)
    fails("type 'ftp' is unknown", '--export', 'ftp,unix=x', img)
    fails('either unix=PATH or port=P', '--export', 'nbd', img)
    fails('either unix=PATH or port=P', '--export', 'nbd,unix=x,port=1', img)
    fails("'unix' is given twice", '--export', 'nbd,unix=x,unix=y', img)
    fails("'unix' is empty", '--export', 'nbd,unix=', img)
    fails('is not KEY=VALUE', '--export', 'nbd,unix', img)
    fails('No such file', '--export', 'nbd,unix=%s/none/nbd' % D, img)
    fails('No such file', '--qmp', D + '/none/qmp', img)
    fails('is not below the disk', '--snapshot', 'v@s=' + D + '/none', img)
    with open(D + '/file', 'w') as f:
        f.write('x')
    fails('in the way', '--qmp', D + '/file', img)
    fails("format 'foo' is not supported", '--format', 'foo', img)
    fails('not one of 0 to 65535', '--export', 'nbd,host=127.0.0.1,port=70000', img)
    # a guest could make it an image that names any file
    run('truncate', '-s', '1M', D + '/guess.img', D + '/named.raw')
    fails('--format raw', D + '/guess.img')
    for argv in ((D + '/guess.img', '--format', 'raw'), (D + '/guess.img', '--read-only'), (D + '/named.raw',)):
        with Serve(argv[0], D, *argv[1:]) as s:
            s.stop()
    if open(img, 'rb').read() != before:
        raise Failed('a refused start changed the image')
    if os.path.exists(D + '/nbd'):
        raise Failed('a refused start leaves a socket')


def second_one_is_refused():
    img = image('one')
    with Serve(img, D) as s:
        fails(img, img)
        rc, out = run('qemu-io', '-c', 'write 0 4k', img, rc=None)
        if rc == 0:
            raise Failed('qemu-io writes into a served image: ' + out)
        rc, out = run('qemu-img', 'check', img, rc=None)
        if rc == 0:
            raise Failed('qemu-img check opens a served image')
        run('qemu-img', 'info', '-U', img)
        other = image('other')
        fails('in use', '--qmp', s.qmp_path, other)
        fails('in use', '--export', 'nbd,unix=' + s.nbd, other)
        with Nbd(s.nbd) as n:
            n.write(0, b'x' * 4096)
        s.stop()
    q = subprocess.Popen(['qemu-io', img], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    q.stdin.write(b'read 0 4k\n')
    q.stdin.flush()
    q.stdout.readline()
    fails(img, img)
    q.stdin.close()
    q.wait()
    check(img)


def sockets():
    img = image('sock')
    with Serve(img, D) as s:
        if stat.S_IMODE(os.stat(s.qmp_path).st_mode) != 0o600:
            raise Failed('mode of the control socket')
        s.p.kill()                     # leaves both sockets behind
        s.p.wait()
    with Serve(img, D) as s:           # and they are replaced
        s.stop()
    check(img)
    name = D + '/a,b'
    with Serve(img, D, '--export', 'nbd,unix=%s,name=zweiter' % name.replace(',', ',,'), '--export', 'nbd,host=127.0.0.1,port=0') as s:
        with Nbd(name, 'zweiter') as n:
            if n.size != 16 * MB:
                raise Failed('size of the third export')
        out = s.printed()
        for want in ('nbd+unix:///?socket=' + s.nbd, 'nbd+unix:///zweiter?socket=' + D + '/a%2Cb', 'nbd://127.0.0.1:'):
            if want not in out:
                raise Failed('%r is not in what was printed: %r' % (want, out))
        tcp = [line for line in out.split('\n') if line.startswith('nbd://')][0]
        if '"virtual-size": 16777216' not in run('qemu-img', 'info', '--output=json', tcp):
            raise Failed('qemu-img info ' + tcp)
        s.stop()


def notify(abstract):
    img = image('note%d' % abstract)
    addr = '\0varve-test-%d' % os.getpid() if abstract else D + '/notify'
    k = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    k.bind(addr)
    k.settimeout(30)
    with Serve(img, D, env={'NOTIFY_SOCKET': addr.replace('\0', '@')}) as s:
        first = k.recv(4096).decode()
        if 'READY=1\n' not in first or 'STATUS=serving' not in first:
            raise Failed('first notification: %r' % first)
        s.stop()
        second = k.recv(4096).decode()
        if 'STOPPING=1' not in second:
            raise Failed('last notification: %r' % second)
    k.close()


def signals(which):
    """requests in flight are answered, the client is dropped, the image is clean"""
    img = image('sig%d' % which)
    with Serve(img, D) as s:
        n = Nbd(s.nbd)
        written = [0]

        def writer():
            try:
                for i in range(4000):
                    n.write(i * 4096, bytes([i % 255 + 1]) * 4096)
                    written[0] = i + 1
            except (OSError, EOFError, NbdError):
                pass
        t = threading.Thread(target=writer)
        t.start()
        while written[0] < 50:
            time.sleep(.001)
        s.p.send_signal(which)
        e = s.qmp.wait_event('SHUTDOWN', 20)
        if not e or e['data']['reason'] != 'host-signal':
            raise Failed('SHUTDOWN event: %r' % e)
        s.ended()
        t.join()
    check(img)
    with open(D + '/want', 'wb') as f:
        for i in range(written[0]):
            f.write(bytes([i % 255 + 1]) * 4096)
    got = D + '/got'
    run('qemu-img', 'convert', '-O', 'raw', img, got)
    with open(got, 'rb') as f, open(D + '/want', 'rb') as w:
        data = w.read()
        if f.read(len(data)) != data:
            raise Failed('an answered write is not in the image after signal %d' % which)


def read_only():
    base = image('robase')
    qio(base, 'write -P 7 0 1M')
    top = image('rotop', base)
    os.chmod(base, 0o444)
    with Serve(top, D, '--read-only', '--volume', 'v', '--snapshot', 'v@s=' + base) as s, \
            Nbd(s.nbd, 'v') as n, Nbd(s.nbd, 'v@s') as m:
        if not n.read_only or n.read(0, MB) != b'\7' * MB or m.read(0, MB) != b'\7' * MB:
            raise Failed('read-only export')
        for command, args in (('block_resize', {'node-name': s.top(), 'size': 32 * MB}),
                              ('block-commit', {'job-id': 'j', 'device': s.top()})):
            try:
                s.qmp.execute(command, args)
            except Exception as e:
                if 'read-only' not in str(e):
                    raise
            else:
                raise Failed(command + ' on a read-only disk')
        s.stop()


def many_control_clients():
    img = image('many')
    with Serve(img, D) as s:
        others = [Qmp(s.qmp_path) for _ in range(8)]
        answers = []

        def ask(q):
            for _ in range(30):
                answers.append(len(q.execute('query-named-block-nodes')))
        threads = [threading.Thread(target=ask, args=(q,)) for q in others]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        if answers != [1] * 240:
            raise Failed('answers of eight clients')
        silent = Qmp(s.qmp_path, negotiate=False)
        s.qmp.send(b'{"execute": "query-jobs"')       # half a command
        s.qmp.close()
        others[0].execute('quit')
        for q in others:
            if not q.wait_event('SHUTDOWN', 10):
                raise Failed('a client did not hear of the shutdown')
        try:
            early = silent.receive(10)
            raise Failed('a client that did not negotiate gets %r' % early)
        except EOFError:
            pass
        s.ended()
    check(img)


def damaged():
    """the refcounts say that an L2 table's cluster is free: the write that would take it fails, as all later ones, and
    it is said once"""
    img = image('damaged')
    qio(img, 'write -P 1 0 64k', 'write -P 1 1M 64k')
    with open(img, 'r+b') as f:
        def be64(off):
            f.seek(off)
            return int.from_bytes(f.read(8), 'big') & 0x00fffffffffffe00
        l2, block = be64(be64(40)), be64(be64(48))
        f.seek(block + (l2 >> 16) * 2)
        f.write(bytes(6))                      # the table's and both data clusters'
    with Serve(img, D) as s:
        with Nbd(s.nbd) as n:
            if n.read(0, 4096) != b'\1' * 4096:
                raise Failed('read of a sound cluster')
            for off in (5 * MB, 0):            # a new cluster, one in place
                try:
                    n.write(off, bytes(4096))
                    raise Failed('a damaged image was written at %d' % off)
                except NbdError:
                    pass
            if n.read(0, 4096) != b'\1' * 4096:
                raise Failed('read after the damage was found')
            e = s.qmp.wait_event('BLOCK_IMAGE_CORRUPTED', 10)
            if not e or e['data']['node-name'] != s.top() or not e['data']['fatal']:
                raise Failed('BLOCK_IMAGE_CORRUPTED: %r' % e)
            time.sleep(1.5)
        s.p.send_signal(signal.SIGTERM)
        s.p.wait(60)
        if s.errors().count('image is corrupt') != 1:
            raise Failed('said on stderr: ' + s.errors())


bad_starts()
second_one_is_refused()
sockets()
notify(False)
notify(True)
signals(signal.SIGTERM)
signals(signal.SIGINT)
read_only()
many_control_clients()
damaged()
done('start, end and locks')
