"""What the whole-program tests share: running programs, serving a disk, a folder of one's own."""
import atexit, json, os, shutil, signal, socket, subprocess, sys, tempfile, time

VARVE = os.environ.get('VARVE', 'varve')
SEED = int(os.environ.get('VARVE_SEED', '20261130'))
LONG = bool(os.environ.get('VARVE_LONG'))


class Failed(Exception):
    pass


def need(*tools):
    """exit 77 (skipped) unless all tools are there"""
    for t in tools:
        if not shutil.which(t):
            print('SKIP: %s is not installed' % t)
            sys.exit(77)


def folder():
    """a fresh folder, removed at a good end, kept and named at a bad one"""
    path = tempfile.mkdtemp(prefix='varve-test-', dir=os.environ.get('TMPDIR', '/var/tmp'))
    owner = os.getpid()

    def leave():
        if os.getpid() != owner:
            return
        if getattr(folder, 'bad', True):
            print('files kept in ' + path, file=sys.stderr)
        else:
            shutil.rmtree(path, ignore_errors=True)
    atexit.register(leave)
    return path


def done(text):
    """the last line of a test that went well"""
    folder.bad = False
    print(text)


def run(*argv, rc=0, inp=None, timeout=120, env=None):
    """runs a program; its output (stdout and stderr together). rc: the status it must end with; None: any"""
    p = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, input=inp, timeout=timeout,
                       env=dict(os.environ, **env) if env else None)
    out = p.stdout.decode('utf-8', 'replace')
    if rc is not None and p.returncode != rc:
        raise Failed('%s\n  ended with %d, not %d: %s' % (' '.join(argv), p.returncode, rc, out[-2000:]))
    return out if rc is not None else (p.returncode, out)


def varve(*argv, **kw):
    return run(VARVE, *argv, **kw)


def varve_json(*argv):
    p = subprocess.run([VARVE, *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=120)
    if p.returncode:
        raise Failed('varve %s: %s' % (' '.join(argv), p.stderr.decode()))
    return json.loads(p.stdout)


def qio(image, *ops, fmt='qcow2', rc=0, opts=()):
    """qemu-io with one -c for each op; a failed pattern check is an error"""
    argv = ['qemu-io', '-f', fmt, *opts]
    for o in ops:
        argv += ['-c', o]
    out = run(*argv, image, rc=rc)
    if rc == 0 and 'verification failed' in out:
        raise Failed('%s: %s' % (image, out))
    return out


def check(image, allowed=(0,)):
    """qemu-img check; the exit status must be one of `allowed`"""
    rc, out = run('qemu-img', 'check', '-f', 'qcow2', image, rc=None)
    if rc not in allowed:
        raise Failed('qemu-img check %s: %d %s' % (image, rc, out))
    return rc


class Server:
    """`varve serve` with an NBD socket; kills it at the end of a with block if it still runs"""

    def __init__(self, target, sock, *options, env=None):
        self.sock, self.target = sock, target
        self.log = tempfile.TemporaryFile()
        self.p = subprocess.Popen([VARVE, 'serve', target, '--export', 'nbd,unix=' + sock, *options],
                                  stdout=self.log, stderr=self.log, env=dict(os.environ, **env) if env else None)
        for _ in range(600):
            try:
                k = socket.socket(socket.AF_UNIX)
                k.connect(sock)
                k.close()
                return
            except OSError:
                k.close()
            if self.p.poll() is not None:
                raise Failed('varve serve %s: ended with %d: %s' % (target, self.p.returncode, self.output()))
            time.sleep(.02)
        self.p.kill()
        raise Failed('varve serve does not listen: ' + self.output())

    def output(self):
        self.log.seek(0)
        return self.log.read().decode('utf-8', 'replace')[-2000:]

    def uri(self, export=''):
        return 'nbd+unix:///%s?socket=%s' % (export, self.sock)

    def stop(self):
        self.p.send_signal(signal.SIGTERM)
        if self.p.wait(60):
            raise Failed('varve serve ended with %d: %s' % (self.p.returncode, self.output()))

    def kill(self):
        self.p.kill()
        self.p.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.p.poll() is None:
            self.kill()
