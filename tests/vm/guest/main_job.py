"""Runs in a guest: the main job on whatever pool VARVE_CONFIG names: create, serve, write with verification, snapshots,
rollback, deletion under load, kill of the server, check.

  main_job.py OPTIONS-JSON    prints a line a step, the last line is JSON

OPTIONS: volume, size (bytes), seconds (of load around each step), outside (what to ask of the bench, each under load: the bench sees a
file /h/ask.NAME and answers with /h/did.NAME), seed; after (a shell command that must succeed after each step while the disk is
served), pause (seconds between two requests of a writer: where the load would leave an emulated processor to nothing else),
short (fewer snapshots, no --keep).

Every 4 KiB block that is written carries its number and a stamp that only rises, so any content can be judged: the disk
must hold the last stamp answered or a later one that was sent; a snapshot what was answered when it was asked for,
up to what was sent when it was there.
"""
import json, os, random, re, signal, struct, subprocess, sys, threading, time
from nbdclient import Nbd

SOCK = '/run/main-job.sock'
MIB, BLOCK = 1 << 20, 4096
SIZE = json.loads(sys.argv[1])['size']
BLOCKS = SIZE // BLOCK
WRITERS = 3


def run(*argv, rc=0):
    p = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300)
    if p.returncode != rc:
        raise SystemExit('%s ended with %d: %s' % (' '.join(argv), p.returncode, p.stdout.decode('utf-8', 'replace')[-1500:]))
    return p.stdout.decode()


def content(block, stamp):
    return struct.pack('>QQ', block, stamp) * (BLOCK // 16) if stamp else bytes(BLOCK)


class Model:
    """per block: the last stamp that was sent, the last one that was answered"""

    def __init__(self):
        self.sent, self.answered = [0] * BLOCKS, [0] * BLOCKS

    def copy(self):
        m = Model()
        m.sent, m.answered = list(self.sent), list(self.answered)
        return m


def judge(data, first, low, high, what):
    """what data (from block `first` on) holds must lie between the two; the stamps found"""
    out = []
    for i in range(len(data) // BLOCK):
        b, part = first + i, data[i * BLOCK:(i + 1) * BLOCK]
        stamp = struct.unpack('>QQ', part[:16])[1]
        if part != content(b, stamp):
            raise SystemExit('%s: block %d is torn or another block\'s: %s' % (what, b, part[:32].hex()))
        if not low[b] <= stamp <= high[b]:
            raise SystemExit('%s: block %d holds stamp %d, not %d to %d' % (what, b, stamp, low[b], high[b]))
        out.append(stamp)
    return out


class Load:
    """writers with their own connections and blocks; each reads back, now and then, what it knows"""

    def __init__(self, job):
        self.job, self.running, self.bad = job, True, None
        self.longest, self.writes, self.begin = 0, 0, time.monotonic()
        self.threads = [threading.Thread(target=self.work, args=(i,), daemon=True) for i in range(WRITERS)]
        for t in self.threads:
            t.start()

    def timed(self, call, *args):
        t = time.monotonic()
        out = call(*args)
        self.longest = max(self.longest, time.monotonic() - t)
        return out

    def work(self, nr):
        try:
            self.connect_and_write(nr)
        except SystemExit as e:
            self.bad = str(e)
        except Exception as e:
            self.bad = 'writer %d: %s: %s' % (nr, type(e).__name__, e)

    def connect_and_write(self, nr):
        rnd = random.Random(self.job.seed * 100 + nr + self.job.stamp)
        model = self.job.model
        while self.running:
            try:
                with Nbd(SOCK, timeout=120) as disk:
                    while self.running:
                        self.write_and_read(disk, rnd, model, nr)
                        time.sleep(self.job.pause)
            except (OSError, EOFError):
                if not self.job.restarting:
                    raise
                time.sleep(.1)      # the server was killed: another one comes, as a guest's QEMU would wait

    def write_and_read(self, disk, rnd, model, nr):
        first = rnd.randrange(BLOCKS // WRITERS - 8) + nr * (BLOCKS // WRITERS)
        blocks = range(first, first + rnd.choice((1, 1, 1, 4, 8)))
        stamp = self.job.next_stamp()
        for b in blocks:
            model.sent[b] = stamp
        self.timed(disk.write, first * BLOCK, b''.join(content(b, stamp) for b in blocks))
        for b in blocks:
            model.answered[b] = stamp
        self.writes += 1
        if rnd.randrange(8) == 0:
            self.timed(disk.flush)
        if rnd.randrange(4) == 0:
            b = rnd.randrange(BLOCKS // WRITERS) + nr * (BLOCKS // WRITERS)
            data = self.timed(disk.read, b * BLOCK, BLOCK)
            judge(data, b, model.answered, model.sent, 'read back')

    def stop(self):
        """ends the load; raises what a writer met"""
        self.running = False
        for t in self.threads:
            t.join(200)
        if self.bad or any(t.is_alive() for t in self.threads):
            raise SystemExit('load: ' + (self.bad or 'a request is not answered'))


class Job:
    def __init__(self, options):
        self.volume, self.seconds, self.seed = options['volume'], options['seconds'], options['seed']
        self.name = re.split('[:/]', self.volume)[-1]
        self.model, self.stamp, self.lock, self.restarting = Model(), 0, threading.Lock(), False
        self.rows, self.snapshots, self.outside = [], {}, options['outside']
        self.after, self.pause = options.get('after'), options.get('pause', 0)
        self.short = options.get('short')

    def next_stamp(self):
        with self.lock:
            self.stamp += 1
            return self.stamp

    def serve(self):
        self.server = subprocess.Popen(['varve', 'serve', self.volume, '--export', 'nbd,unix=' + SOCK], stdout=sys.stderr)
        for _ in range(1200):
            try:
                Nbd(SOCK).close()
                return
            except (OSError, EOFError):
                if self.server.poll() is not None:
                    raise SystemExit('the server ended with %d' % self.server.returncode)
                time.sleep(.05)
        raise SystemExit('the server does not listen')

    def row(self, what, seconds, load=None):
        self.rows.append({'what': what, 'seconds': round(seconds, 2), 'longest': load and round(load.longest, 3),
                          'writes': load and load.writes})
        print('%-26s %6.2f s%s' % (what, seconds, '' if not load else '   %6d writes, longest request %.3f s'
                                   % (load.writes, load.longest)), flush=True)
        if self.after:
            run('bash', '-c', self.after)

    def under_load(self, what, act, *args):
        load = Load(self)
        time.sleep(self.seconds / 2)
        begin = time.monotonic()
        act(*args)
        took = time.monotonic() - begin
        time.sleep(self.seconds / 2)
        load.stop()
        self.row(what, took, load)

    def read(self, export, low, high):
        stamps = []
        with Nbd(SOCK, export, timeout=120) as n:
            for off in range(0, SIZE, MIB):
                stamps += judge(n.read(off, MIB), off // BLOCK, low, high, 'export "%s"' % export)
        return stamps

    def snapshot(self, name):
        low = list(self.model.answered)
        run('varve', 'snapshot', '%s@%s' % (self.volume, name))
        self.snapshots[name] = (low, list(self.model.sent))

    def verify(self, *names):
        """the disk and the snapshots, all of each; afterwards exactly this must stay"""
        begin = time.monotonic()
        stamps = self.read('', self.model.answered, self.model.sent)
        self.model.sent, self.model.answered = list(stamps), list(stamps)
        for n in names:
            stamps = self.read('%s@%s' % (self.name, n), *self.snapshots[n])
            self.snapshots[n] = (stamps, stamps)
        self.row('verify ' + ', '.join(('disk',) + names), time.monotonic() - begin)

    def fill(self):
        with Nbd(SOCK, timeout=120) as n:
            stamp = self.next_stamp()
            for off in range(0, SIZE // 2, MIB):
                first = off // BLOCK
                n.write(off, b''.join(content(b, stamp) for b in range(first, first + MIB // BLOCK)))
            n.flush()
        self.model.sent[:BLOCKS // 2] = self.model.answered[:BLOCKS // 2] = [stamp] * (BLOCKS // 2)

    def rollback(self, name, keep=None):
        begin = time.monotonic()
        run('varve', 'rollback', '%s@%s' % (self.volume, name), *(['--keep', keep] if keep else []))
        if keep:
            self.snapshots[keep] = (list(self.model.answered), list(self.model.sent))
        self.model.answered, self.model.sent = (list(x) for x in self.snapshots[name])
        self.row('rollback to ' + name, time.monotonic() - begin)

    def kill_and_restart(self):
        self.restarting = True
        self.server.kill()
        self.server.wait()
        self.serve()

    def ask(self, what):
        open('/h/ask.' + what, 'w').close()
        for _ in range(3000):
            if os.path.exists('/h/did.' + what):
                return
            time.sleep(.1)
        raise SystemExit('the bench does not answer: ' + what)

    def main(self):
        run('varve', 'create', self.volume, str(SIZE))
        self.serve()
        self.fill()
        self.under_load('load alone', time.sleep, self.seconds)
        names = ('s1', 's2') if self.short else ('s1', 's2', 's3')
        for name in names:
            self.under_load('snapshot ' + name, self.snapshot, name)
        self.verify(*names)
        if self.short:
            self.rollback('s2')
        else:
            self.rollback('s1', 'kept')
            self.verify('s1')
            self.rollback('kept')
        self.under_load('delete s2', run, 'varve', 'destroy', self.volume + '@s2')
        for what in self.outside:
            self.under_load(what, self.ask, what)
        self.under_load('kill and restart', self.kill_and_restart)
        self.restarting = False
        if not self.short:
            self.under_load('delete s3', run, 'varve', 'destroy', self.volume + '@s3')
        self.verify('s1')
        self.server.send_signal(signal.SIGTERM)
        if self.server.wait(60):
            raise SystemExit('the server ended with %d' % self.server.returncode)
        run('varve', 'pool', 'check')
        self.serve()
        self.verify('s1')
        self.server.send_signal(signal.SIGTERM)
        self.server.wait(60)
        print(json.dumps(self.rows))


Job(json.loads(sys.argv[1])).main()
