"""The programs that are compared: each gives one image to clients over NBD on a unix socket.

A contender is a name, a program and its options; `start()` gives a Server, of which many may run at
a time (only the one that is measured has work to do).
"""
import glob, json, os, re, shutil, socket, struct, subprocess, sys, time
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'tests', 'lib'))
from qmpclient import Qmp


class Failed(Exception):
    pass


class Server:
    """a running one: .pid, .sock; .qmp() when started with control=True"""

    def __init__(self, argv, folder, name, control):
        self.name, self.sock, self.control = name, '%s/%s.nbd' % (folder, name), '%s/%s.qmp' % (folder, name) if control else None
        self.log = open('%s/%s.log' % (folder, name), 'w+')
        env = dict(os.environ, VARVE_RUNTIME=runtime())
        self.p = subprocess.Popen(argv(self.sock, self.control), stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, env=env)
        self.pid = self.p.pid
        end = time.time() + 60
        while True:
            k = socket.socket(socket.AF_UNIX)
            try:
                k.connect(self.sock)
                break
            except OSError:
                if self.p.poll() is not None or time.time() > end:
                    self.stop()
                    raise Failed('%s does not serve: %s' % (name, self.text()))
                time.sleep(.01)
            finally:
                k.close()

    def qmp(self):
        return Qmp(self.control)

    def text(self):
        self.log.flush()
        self.log.seek(0)
        return self.log.read()[-1500:]

    def stop(self):
        if self.p.poll() is None:
            self.p.terminate()
            try:
                self.p.wait(60)
            except subprocess.TimeoutExpired:
                self.p.kill()
                self.p.wait()
                print('%s did not end within 60 s of SIGTERM' % self.name, file=sys.stderr)
        for s in (self.sock, self.control):
            if s and os.path.exists(s):
                os.unlink(s)


def runtime():
    """where varve's journals and sockets are: memory, as /run"""
    d = os.environ.get('BENCH_RUNTIME') or ('/run/varve-bench' if os.access('/run', os.W_OK) else '/dev/shm/varve-bench')
    os.makedirs(d, exist_ok=True)
    return d


def is_device(path):
    return path.startswith('/dev/')


def is_qcow2(path):
    with open(path, 'rb') as f:
        return f.read(4) == b'QFI\xfb'


def backing_of(image):
    """path of the backing file, or None"""
    with open(image, 'rb') as f:
        h = f.read(20)
        off, length = struct.unpack('>QI', h[8:20])
        if h[:4] != b'QFI\xfb' or not off:
            return None
        f.seek(off)
        return os.path.join(os.path.dirname(image), f.read(length).decode())


class Varve:
    def __init__(self, program, options=()):
        self.program, self.options = os.path.abspath(program), list(options)
        self.label = 'varve'

    def version(self):
        return subprocess.run([self.program, '--version'], stdout=subprocess.PIPE, text=True).stdout.strip()

    def has(self, option):
        """does this build know the option of `serve`?"""
        text = subprocess.run([self.program, 'serve', '--help'], stdout=subprocess.PIPE, text=True).stdout
        return '--%s' % option in text

    def start(self, image, folder, name, cache=None, control=False, options=()):
        def argv(sock, qmp):
            more = list(options) + (['--cache-size', str(cache)] if cache else []) + (['--qmp', qmp] if qmp else [])
            fmt = [] if is_qcow2(image) else ['--format', 'raw']
            return [self.program, 'serve', image, '--export', 'nbd,unix=' + sock, *fmt, *self.options, *more]
        return Server(argv, folder, name, control)


class Qemu:
    """qemu-storage-daemon: a program, or that of a tree with another system's files (run by its own loader)"""

    def __init__(self, where=None):
        where = where or shutil.which('qemu-storage-daemon')
        if not where:
            raise Failed('qemu-storage-daemon is not installed')
        if os.path.isdir(where):
            loader = glob.glob(where + '/lib64/ld-linux*.so.*') + glob.glob(where + '/lib/ld-linux*.so.*')
            libs = [d for d in glob.glob(where + '/usr/lib/*-linux-gnu') + [where + '/usr/lib'] if os.path.isdir(d)]
            if not loader:
                raise Failed('%s: no loader (lib64/ld-linux*) in this tree' % where)
            self.argv = [loader[0], '--library-path', ':'.join(libs), where + '/usr/bin/qemu-storage-daemon']
        else:
            self.argv = [where]
        out = subprocess.run(self.argv + ['--version'], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout
        m = re.search(r'version (\d+)\.(\d+)', out)
        if not m:
            raise Failed('%s: %s' % (where, out.strip()[-300:]))
        self.text, self.label = out.split('\n')[0], 'qemu%s.%s' % m.groups()

    def version(self):
        return self.text

    def has(self, option):
        return False

    def node(self, image, name, cache=None, **more):
        """options of blockdev-add for an image on top of what its header names. The files below get the same ones:
        their caches, direct I/O and io_uring are not inherited from the top"""
        proto = {'driver': 'host_device' if is_device(image) else 'file', 'filename': image, 'aio': 'io_uring',
                 'cache': {'direct': True, 'no-flush': False}}
        if not is_qcow2(image):
            return {'driver': 'raw', **({'node-name': name} if name else {}), 'discard': 'unmap', 'file': proto, **more}
        opts = {'driver': 'qcow2', 'node-name': name, 'discard': 'unmap', 'file': proto, **more}
        below = backing_of(image)
        if below and 'backing' not in more:
            opts['backing'] = self.node(below, None, cache)
        if not name:
            del opts['node-name']
        if cache:
            opts.update({'l2-cache-size': cache, 'cache-size': cache + (4 << 20)})
        return opts

    def start(self, image, folder, name, cache=None, control=False, options=()):
        def argv(sock, qmp):
            ctl = ['--chardev', 'socket,path=%s,server=on,wait=off,id=c' % qmp, '--monitor', 'chardev=c'] if qmp else []
            return [*self.argv, *ctl, '--blockdev', json.dumps(self.node(image, 'top', cache)),
                    '--nbd-server', 'addr.type=unix,addr.path=%s,max-connections=0' % sock,
                    '--export', 'type=nbd,id=e,node-name=top,name=,writable=on']
        return Server(argv, folder, name, control)
