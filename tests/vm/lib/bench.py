"""Real hosts for tests: guests booted by QEMU in seconds, with a shared disk (the SAN), disks of their own, a private network.

    with Bench(hosts=2, san=2 << 30) as b:
        b[1].run('mkfs.ext4 -q /dev/bench/san')
        b[2].kill()                     # power failure
        b[2].start()

A guest is Host: run() and spawn() give a shell command to it and bring back status, output and errors, put() and get()
copy files. Programs named in `programs` are in every guest's PATH, with their libraries. Every wait has a limit; a
guest that stops by itself is an error that shows the end of its console. When the runner goes, however, its
guests go with it; its folder is removed, or kept and named if the test failed.
"""
import atexit, fcntl, glob, os, re, select, shutil, socket, struct, subprocess, sys, tempfile, threading, time
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..', 'lib'))
from guestroot import NoGuest, guest_root
from proc import Failed, VARVE, need

QEMU = os.environ.get('VARVE_TEST_QEMU', 'qemu-system-x86_64').split()
ACCEL = os.environ.get('VARVE_TEST_ACCEL', 'tcg')
# under load of other tests a guest is three times as slow; limits are multiplied by this
PATIENCE = float(os.environ.get('VARVE_TEST_PATIENCE', '1'))
BOOT_LIMIT = 120


class Switch:
    """the network between the guests: hands datagrams from one to the others, but for pairs that are cut"""

    def __init__(self, folder, n):
        self.folder, self.n, self.cut, self.ports = folder, n, set(), []
        for i in range(1, n + 1):
            s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            s.bind('%s/switch%d' % (folder, i))
            # A full receiver is waited for, else TCP in the guests would crawl; but not for ever
            s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack('ll', 0, 500000))
            s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            self.ports.append(s)
            threading.Thread(target=self.work, args=(s, i), daemon=True).start()

    def work(self, port, source):
        while True:
            try:
                frame = port.recv(1 << 17)
            except OSError:
                return
            if not frame:
                return
            # a guest's address ends with its number; all others are for everybody
            only = frame[5] if frame[:5] == MAC else None
            for i in range(1, self.n + 1):
                if i != source and only in (None, i) and not {(source, i), (i, source)} & self.cut:
                    try:
                        port.sendto(frame, '%s/net%d' % (self.folder, i))
                    except OSError:
                        pass    # a network may lose what it likes

    def stop(self):
        for s in self.ports:
            s.shutdown(socket.SHUT_RDWR)


MAC = bytes([0x52, 0x54, 0, 0x77, 0])


class Result:
    def __init__(self, rc, out, err):
        self.rc, self.out, self.err = rc, out, err


class Command:
    """a command that runs in a guest"""

    def __init__(self, host, n, text, limit):
        self.host, self.n, self.text = host, n, text
        self.end = time.monotonic() + limit * PATIENCE + 20     # the guest's own limit comes first

    def running(self):
        self.host.listen(0)
        return self.n not in self.host.ended

    def stop(self):
        self.host.send('stop %d 0' % self.n)

    def wait(self, rc=0):
        """waits for the end; rc: the status it must have, None: any"""
        while self.n not in self.host.ended:
            left = self.end - time.monotonic()
            if left <= 0:
                raise Failed('host %d does not answer: %s\n%s' % (self.host.id, self.text[:200], self.host.console()))
            self.host.listen(left)
        r = Result(self.host.ended[self.n], self.read('out'), self.read('err'))
        if rc is not None and r.rc != rc:
            raise Failed('host %d: %s\n  ended with %d%s, not %d: %s%s' % (self.host.id, self.text[:400], r.rc,
                         ' (its time was up)' if r.rc == 124 else '', rc, r.out[-2000:], r.err[-2000:]))
        return r

    def read(self, kind):
        """what it has written so far"""
        try:
            with open('%s/%d.%s' % (self.host.share, self.n, kind), 'rb') as f:
                return f.read().decode('utf-8', 'replace')
        except FileNotFoundError:
            return ''       # the guest has not begun


class Host:
    def __init__(self, bench, id):
        self.bench, self.id = bench, id
        self.folder = '%s/host%d' % (bench.folder, id)
        self.share = self.folder + '/share'
        os.makedirs(self.share)
        for d in ('bin', 'lib'):
            shutil.copytree(bench.folder + '/' + d, self.share + '/' + d, copy_function=os.link)
        self.boots, self.nr, self.p, self.text = 0, 0, None, b''
        self.ended = {}
        self.lock = threading.RLock()

    def arguments(self):
        b, path = self.bench, self.folder
        cpu = 'host' if ACCEL == 'kvm' else 'max,la57=off,cx16=off'   # both have made guests crash under emulation
        args = ['-nodefaults', '-no-user-config', '-display', 'none', '-no-reboot', '-M', 'q35', '-accel', ACCEL, '-cpu', cpu,
                '-smp', '1', '-m', str(b.memory), '-rtc', 'base=utc,clock=host', '-serial', 'file:%s/console%d' % (path, self.boots),
                '-kernel', b.root + '/kernel', '-initrd', b.root + '/ram-disk', '-append',
                # not the TSC: its frequency is measured at boot, and wrong by any factor when the host is busy
                'console=ttyS0 quiet panic=-1 oops=panic clocksource=hpet tsc=unstable mitigations=off bench.id=%d bench.boot=%d'
                % (self.id, self.boots), '-device', 'virtio-serial-pci', '-chardev',
                'socket,id=port,path=%s/port,server=on,wait=off' % path, '-device', 'virtserialport,chardev=port',
                '-device', 'virtio-rng-pci']
        for tag, where, more in (('root', b.root + '/root', ',readonly=on'), ('share', self.share, '')):
            args += ['-fsdev', 'local,id=%s,path=%s,security_model=none,multidevs=remap%s' % (tag, where, more),
                     '-device', 'virtio-9p-pci,fsdev=%s,mount_tag=%s' % (tag, tag)]
        for name, file, shared in b.disks_of(self):
            args += ['-blockdev', 'driver=raw,node-name=%s,discard=unmap,file.driver=file,file.filename=%s,file.aio=threads%s'
                     % (name, file, ',file.locking=off,cache.direct=on' if shared else ''),
                     '-device', 'virtio-blk-pci,drive=%s,serial=%s%s' % (name, name, ',share-rw=on' if shared else '')]
        if b.switch:
            args += ['-netdev', 'dgram,id=net,local.type=unix,local.path=%s/net%d,remote.type=unix,remote.path=%s/switch%d'
                     % (b.folder, self.id, b.folder, self.id),
                     '-device', 'virtio-net-pci,netdev=net,romfile=,mac=' + ':'.join('%02x' % x for x in MAC + bytes([self.id]))]
        return args + b.more

    def power_on(self):
        self.boots += 1
        self.ended, self.text = {}, b''
        for path in ('%s/port' % self.folder, '%s/net%d' % (self.bench.folder, self.id)):
            if os.path.exists(path):
                os.unlink(path)
        for path in glob.glob(self.share + '/*.*'):
            shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)
        with open(self.folder + '/qemu', 'ab') as log:
            self.p = subprocess.Popen(['setpriv', '--pdeathsig', 'KILL', *QEMU, *self.arguments()], stdin=subprocess.DEVNULL,
                                      stdout=log, stderr=log)
        self.port = socket.socket(socket.AF_UNIX)
        end = time.monotonic() + 30
        while True:
            try:
                self.port.connect(self.folder + '/port')
                return
            except OSError:
                if self.p.poll() is not None or time.monotonic() > end:
                    raise Failed('host %d: QEMU does not start: %s' % (self.id, self.console()))
                time.sleep(.02)

    def wait_up(self):
        end = time.monotonic() + BOOT_LIMIT * PATIENCE
        while self.up != self.boots:
            if time.monotonic() > end:
                raise Failed('host %d does not come up: %s' % (self.id, self.console()))
            self.listen(1)

    up = 0

    def start(self):
        """boots after kill() or off(), with the disks as they are"""
        self.power_on()
        self.wait_up()

    def listen(self, timeout):
        """takes what the guest reports, waiting up to `timeout` seconds for it"""
        with self.lock:
            if not select.select([self.port], [], [], max(0, min(timeout, 1)))[0]:
                return
            try:
                data = self.port.recv(4096)
            except OSError:
                data = b''
            if not data:
                raise Failed('host %d is gone: %s' % (self.id, self.console()))
            self.text += data
            *lines, self.text = self.text.split(b'\n')
            for line in lines:
                words = line.decode().split()
                if words[0] == 'up':
                    self.up = int(words[1])
                elif words[0] == 'end':
                    self.ended[int(words[1])] = int(words[2])

    def send(self, line):
        with self.lock:
            self.port.sendall(line.encode() + b'\n')

    def spawn(self, text, limit=600, inp=b''):
        """starts a shell command (bash); it is stopped after `limit` seconds"""
        with self.lock:
            self.nr += 1
            n = self.nr
        for kind, data in (('cmd', text.encode()), ('in', inp)):
            with open('%s/%d.%s' % (self.share, n, kind), 'wb') as f:
                f.write(data)
        self.send('run %d %d' % (n, limit * PATIENCE))
        return Command(self, n, text, limit)

    def run(self, text, rc=0, limit=60, inp=b''):
        """runs a shell command; its standard output. rc: the status it must end with; None: any, and a Result is returned"""
        r = self.spawn(text, limit, inp).wait(rc)
        return r if rc is None else r.out

    def wait_for(self, text, limit=60):
        """waits until a command succeeds"""
        self.run('until { %s; } >/dev/null 2>&1; do sleep .2; done' % text, limit=limit)

    def put(self, source, target):
        """copies a file or folder into the guest"""
        name = 'put.%d' % time.monotonic_ns()
        self.bench.copy(source, '%s/%s' % (self.share, name))
        self.run("mkdir -p \"$(dirname '%s')\" && cp -rT /h/%s '%s' && rm -r /h/%s" % (target, name, target, name), limit=300)

    def get(self, source, target):
        """copies a file or folder out of the guest"""
        name = 'get.%d' % time.monotonic_ns()
        self.run("cp -r '%s' /h/%s" % (source, name), limit=300)
        shutil.move('%s/%s' % (self.share, name), target)

    def kill(self):
        """power failure: nothing is flushed, nobody is told"""
        if self.p:
            self.p.kill()
            self.p.wait()
            self.port.close()
            self.p = None

    def off(self):
        """an orderly end"""
        self.send('off 0 0')
        try:
            self.p.wait(60 * PATIENCE)
        except subprocess.TimeoutExpired:
            pass
        self.kill()

    def console(self):
        """the end of what its kernel and QEMU said"""
        out = ''
        for name in ('console%d' % self.boots, 'qemu'):
            try:
                with open('%s/%s' % (self.folder, name), 'rb') as f:
                    text = f.read().decode('utf-8', 'replace').strip()
                if text:
                    out += '\n-- %s:\n%s' % (name, text[-3000:])
            except OSError:
                pass
        return out or 'it said nothing'


class Bench:
    """hosts   1 to 9 guests, b[1] and on         san      bytes of the disk that all have, /dev/bench/san
    scratch   bytes of the disk each has of its own, /dev/bench/scratch
    memory    MiB a guest                        programs    host programs to be in their PATH
    packages, modules: Debian packages and kernel modules beyond those of guestroot.py; qemu: further arguments"""

    def __init__(self, hosts=1, san=0, scratch=0, memory=512, programs=(VARVE,), packages=(), modules=(), qemu=()):
        need(QEMU[0], 'setpriv')
        try:
            self.root = guest_root(packages, modules)
        except NoGuest as e:
            print('SKIP: no guest can be made: %s' % e)
            sys.exit(77)
        sweep()
        self.folder = tempfile.mkdtemp(prefix='varve-vm-', dir=os.environ.get('TMPDIR', '/var/tmp'))
        self.owner = open(self.folder + '/owner', 'w')
        fcntl.flock(self.owner, fcntl.LOCK_EX)
        self.memory, self.more, self.ok, self.closed = memory, list(qemu), False, False
        for name, length in [('san', san)] + [('scratch%d' % i, scratch) for i in range(1, hosts + 1)]:
            if length:
                with open('%s/%s' % (self.folder, name), 'wb') as f:
                    f.truncate(length)
        self.carry(programs)
        self.switch = Switch(self.folder, hosts) if hosts > 1 else None
        self.hosts = [Host(self, i + 1) for i in range(hosts)]
        atexit.register(self.close)

    def __getitem__(self, i):
        return self.hosts[i - 1]

    def __iter__(self):
        return iter(self.hosts)

    def disks_of(self, host):
        for name, file in (('san', 'san'), ('scratch', 'scratch%d' % host.id)):
            if os.path.exists('%s/%s' % (self.folder, file)):
                yield name, '%s/%s' % (self.folder, file), name == 'san'

    @staticmethod
    def copy(source, target):
        if os.path.isdir(source):
            shutil.copytree(source, target)
        else:
            shutil.copy(source, target)

    def carry(self, programs):
        """copies programs and the libraries they need, but the C library: the guest has the same"""
        for d in ('bin', 'lib'):
            os.mkdir('%s/%s' % (self.folder, d))
        for p in programs:
            path = shutil.which(p)
            if not path:
                raise Failed(p + ' is not there')
            shutil.copy(path, self.folder + '/bin')
            text = subprocess.run(['ldd', path], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout.decode()
            for lib in re.findall(r'=> (/\S+)', text):
                if not re.match(r'(libc|libm|libdl|librt|libpthread|ld-linux.*)\.so', os.path.basename(lib)):
                    shutil.copy(lib, self.folder + '/lib')

    def cut(self, a, b):
        """cuts the network between two hosts"""
        self.switch.cut.add((a, b))

    def heal(self):
        self.switch.cut.clear()

    def __enter__(self):
        for h in self.hosts:
            h.power_on()
        for h in self.hosts:
            h.wait_up()
        return self

    def __exit__(self, kind, *_):
        self.ok = kind is None
        self.close()

    def close(self):
        if self.closed:
            return
        self.closed = True
        for h in self.hosts:
            h.kill()
        if self.switch:
            self.switch.stop()
        if self.ok:
            shutil.rmtree(self.folder, ignore_errors=True)
        else:
            open(self.folder + '/kept', 'w').close()
            print('files kept in ' + self.folder, file=sys.stderr)


def sweep():
    """removes what killed runners left, and what was kept for a day"""
    for path in glob.glob(os.path.join(os.environ.get('TMPDIR', '/var/tmp'), 'varve-vm-*')):
        try:
            with open(path + '/owner') as f:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not os.path.exists(path + '/kept') or time.time() - os.stat(path + '/kept').st_mtime > 86400:
                    shutil.rmtree(path, ignore_errors=True)
        except OSError:
            pass    # its owner lives, or another sweeps it
