"""Serves one image with serve_prog, the test program around serve_run()."""
import os, resource, signal, socket, subprocess, sys, tempfile, time
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'lib'))
from proc import Failed
from qmpclient import Qmp

PROG = os.environ.get('SERVE_PROG', 'serve_prog')


class Serve:
    """with Serve(image, folder) as s: s.qmp.execute(...). s.nbd is the NBD socket's path."""

    def __init__(self, image, folder, *options, export=True, qmp=True, env=None, max_file=None):
        self.nbd, self.qmp_path = folder + '/nbd', folder + '/qmp'
        argv = [PROG, image, *options]
        if export:
            argv += ['--export', 'nbd,unix=' + self.nbd]
        if qmp:
            argv += ['--qmp', self.qmp_path]
        self.log = tempfile.TemporaryFile()
        self.out = tempfile.TemporaryFile()
        limit = (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (max_file, max_file))) if max_file else None
        # python ignores SIGXFSZ; passed on, a write past the limit is an error and no signal
        self.p = subprocess.Popen(argv, stdout=self.out, stderr=self.log, env=dict(os.environ, **(env or {})),
                                  preexec_fn=limit, restore_signals=not max_file)
        self.qmp = None
        if qmp:
            self.wait_socket(self.qmp_path)
            self.qmp = Qmp(self.qmp_path)
        elif export:
            self.wait_socket(self.nbd)

    def wait_socket(self, path):
        for _ in range(1000):
            if self.p.poll() is not None:
                raise Failed('serve_prog ended with %d: %s' % (self.p.returncode, self.errors()))
            k = socket.socket(socket.AF_UNIX)
            try:
                k.connect(path)
                return
            except OSError:
                time.sleep(.02)
            finally:
                k.close()
        raise Failed('serve_prog does not listen on %s: %s' % (path, self.errors()))

    def errors(self):
        self.log.seek(0)
        return self.log.read().decode('utf-8', 'replace')

    def printed(self):
        self.out.seek(0)
        return self.out.read().decode()

    def nodes(self):
        """file -> query-named-block-nodes entry"""
        return {n['file']: n for n in self.qmp.execute('query-named-block-nodes', flat=True)}

    def top(self):
        return self.qmp.execute('query-named-block-nodes', flat=True)[0]['node-name']

    def add(self, path, name, **more):
        self.qmp.execute('blockdev-add', {'driver': 'qcow2', 'node-name': name,
                                          'file': {'driver': 'file', 'filename': path}, **more})

    def ended(self, rc=0, timeout=60):
        """waits for the end; a hang or another status is an error"""
        got = self.p.wait(timeout)
        if got != rc:
            raise Failed('serve_prog ended with %d, not %d: %s' % (got, rc, self.errors()))

    def stop(self):
        self.p.send_signal(signal.SIGTERM)
        self.ended()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        if self.p.poll() is None:
            self.p.kill()
            self.p.wait()
            if exc[0] is None:
                raise Failed('serve_prog still runs at the end of the test')
        if exc[0] is not None:
            print('serve_prog said: ' + self.errors(), file=sys.stderr)
