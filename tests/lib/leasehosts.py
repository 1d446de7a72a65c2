"""Two "hosts" on one machine for tests of leases: a sanlock daemon each, with a folder and a host name of its own.

Their daemons have no watchdog: a host that loses its storage is a matter for tests on hosts of their own (tests/vm)."""
import atexit, os, shutil, signal, subprocess, sys, time
from proc import VARVE, Failed, need

IO_TIMEOUT = 1      # seconds; joining takes three


class LeaseHost:
    def __init__(self, base, n, config, more=None):
        self.n, self.home = n, os.path.join(base, 'host%d' % n)
        for d in ('run', 'runtime'):
            os.makedirs(os.path.join(self.home, d))
        self.env = dict(os.environ, SANLOCK_RUN_DIR=self.home + '/run', SANLOCK_PRIVILEGED='0', VARVE_HOST_ID=str(n),
                        VARVE_RUNTIME=self.home + '/runtime', VARVE_LOCK_DIR=self.home + '/locks', VARVE_CONFIG=config, **(more or {}))
        # -w 0: no watchdog; -g: seconds between SIGTERM and SIGKILL for those that lose their leases
        self.daemon = subprocess.Popen(['setpriv', '--pdeathsig', 'KILL', 'sanlock', 'daemon', '-D', '-w', '0', '-U', 'root', '-G', 'root',
                                        '-e', 'daemon%d' % n, '-g', '2'], env=self.env, stdin=subprocess.DEVNULL,
                                       stdout=open(self.home + '/daemon', 'wb'), stderr=subprocess.STDOUT)
        atexit.register(self.stop)
        end = time.monotonic() + 20
        while not os.path.exists(self.home + '/run/sanlock.sock'):
            if time.monotonic() > end or self.daemon.poll() is not None:
                raise Failed('the sanlock daemon does not start: ' + open(self.home + '/daemon').read()[-800:])
            time.sleep(.05)

    def argv(self, *argv):
        return ['unshare', '-u', 'sh', '-c', 'hostname host%d && exec "$@"' % self.n, '-', *argv]

    def call(self, *argv, rc=0, timeout=60):
        try:
            p = subprocess.run(self.argv(*argv), env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout)
        except subprocess.TimeoutExpired as e:
            raise Failed('host %d: %s: goes on after %d s: %s' % (self.n, ' '.join(argv), timeout, (e.stdout or b'')[-500:]))
        out = p.stdout.decode('utf-8', 'replace')
        if rc is not None and p.returncode != rc:
            raise Failed('host %d: %s: ended with %d, not %d: %s' % (self.n, ' '.join(argv), p.returncode, rc, out[-1500:]))
        return out

    def varve(self, *args, **kw):
        return self.call(VARVE, *args, **kw)

    def spawn(self, *argv, **kw):
        return subprocess.Popen(['setpriv', '--pdeathsig', 'KILL', *self.argv(*argv)], env=self.env, **kw)

    def stop(self):
        if self.daemon.poll() is None:
            self.daemon.kill()
        self.daemon.wait()


def two_hosts(base, config):
    """exit 77 (skipped) where two daemons cannot run"""
    need('sanlock', 'unshare', 'setpriv')
    if os.geteuid() != 0 or subprocess.run(['unshare', '-u', 'true'], stderr=subprocess.DEVNULL).returncode:
        print('SKIP: two hosts on one machine need root')
        sys.exit(77)
    return LeaseHost(base, 1, config), LeaseHost(base, 2, config)


class Steps:
    """lock_prog of a host: one line, one answer"""

    def __init__(self, host, prog, pool='p'):
        self.p = host.spawn(prog, pool, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __call__(self, line, want='ok', text=''):
        self.p.stdin.write(line.encode() + b'\n')
        self.p.stdin.flush()
        answer = self.p.stdout.readline().decode().strip()
        if answer.split(':')[0].split(' ')[0] != want or text not in answer:
            raise Failed('%s: %r, not %s%s' % (line, answer, want, ' with "%s"' % text if text else ''))
        return answer

    def kill(self):
        self.p.kill()
        self.p.wait()

    def end(self):
        self.p.stdin.close()
        if self.p.wait(20):
            raise Failed('lock_prog ended with %d' % self.p.returncode)
