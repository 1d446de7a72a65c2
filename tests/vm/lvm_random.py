"""Two hosts run random operations on one volume group at the same time, on the same volumes and on different ones, kept apart by sanlock alone; some
servers are killed. At the end each volume is what a model says, no operation is half done, and the group's metadata is sound.

The model knows one change of a volume at a time, so the runner lets a host at a volume only when the other is done with it, but for pairs of
snapshots that both hosts begin at once: of those one at least must be taken.

  lvm_random.py     for 75 seconds; VARVE_LONG=1: for 15 minutes. VARVE_SEED=N
"""
import json, os, random, sys, threading, time
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE + '/lib')
from bench import Bench, Failed
from proc import LONG, SEED
from lvmhost import active, expect, lvs, no_traces, prepare, qio, serve, sh, spawn, stop

SECONDS = 900 if LONG else 75
SIZE = 8          # MiB of a volume, each of one byte's value
VOLUMES = 4
LOCK = '\tlock sanlock\n\tlock-leases 40\n\tlease-timeout 1\n'
DAEMON = 'echo %d >/etc/varve/host-id; sanlock daemon -w 0 -U root -G root -g 5 -e host%d; sleep 1'


class Volume:
    def __init__(self, name):
        self.name, self.now, self.on, self.snaps = name, [0] * SIZE, None, {}   # snaps: name -> (contents, what it stands on)
        self.busy = threading.Lock()

    def children(self, snap):
        return [s for s, (_, on) in self.snaps.items() if on == snap] + (['the current state'] if self.on == snap else [])


class Worker:
    """what one host does; the volumes are everybody's"""
    vols, guard, number, counts = [], threading.Lock(), 0, {}

    def __init__(self, host, other):
        self.host, self.other, self.rnd, self.bad = host, other, random.Random(SEED * 10 + host.id), None

    def fresh(self):
        with Worker.guard:
            Worker.number += 1
            return Worker.number

    def varve(self, words, rc=0):
        r = sh(self.host, 'varve ' + words, rc=None)
        if r.rc != rc:
            raise Failed('host %d: varve %s: status %d, not %d: %s%s' % (self.host.id, words, r.rc, rc, r.out, r.err))

    def create(self, _):
        with Worker.guard:
            if len(Worker.vols) >= VOLUMES:
                return False
            Worker.number += 1
            v = Volume('vm-%d-disk-0' % (100 + Worker.number))
            v.busy.acquire()
            Worker.vols.append(v)
        self.varve('create p:%s %dM' % (v.name, SIZE))
        v.busy.release()
        return True

    def write(self, v):
        """right after the other host's last operation: what this one's kernel knows of the LVs must not matter"""
        at, byte, name = self.rnd.randrange(SIZE), self.rnd.randrange(1, 255), 'w%d' % self.fresh()
        serve(self.host, 'p:' + v.name, name)
        reads = ['read -P %d %dM 1M' % (v.now[i], i) for i in self.rnd.sample(range(SIZE), 3)]
        qio(self.host, *reads, 'write -P %d %dM 1M' % (byte, at), 'flush', name=name)
        stop(self.host, name, self.rnd.choice(('TERM', 'TERM', 'KILL')))
        v.now[at] = byte
        return True

    def snapshot(self, v):
        name = 's%d' % self.fresh()
        self.varve('snapshot p:%s@%s' % (v.name, name))
        v.snaps[name], v.on = (list(v.now), v.on), name
        return True

    def both(self, v):
        """one snapshot on each host, begun at once"""
        names = ['s%d' % self.fresh(), 's%d' % self.fresh()]
        runs = [spawn(h, 'varve snapshot p:%s@%s' % (v.name, n), limit=180) for h, n in zip((self.host, self.other), names)]
        ends = [c.wait(None) for c in runs]
        if all(r.rc for r in ends) or any(r.rc and 'under way' not in r.err and 'busy' not in r.err.lower() and 'host' not in r.err for r in ends):
            raise Failed('two snapshots of %s at once: %s' % (v.name, [(r.rc, r.err) for r in ends]))
        info = json.loads(sh(self.host, 'varve info --json p:' + v.name))
        for e in info['elements']:
            if e['snapshot'] in names:
                v.snaps[e['snapshot']] = (list(v.now), e['parent'])
            elif not e['snapshot']:
                v.on = e['parent']
        expect('snapshots begun on two hosts', {n for n, r in zip(names, ends) if not r.rc}, set(names) & set(v.snaps))
        return True

    def rollback(self, v):
        if not v.snaps:
            return False
        name = self.rnd.choice(sorted(v.snaps))
        self.varve('rollback p:%s@%s' % (v.name, name))
        v.now, v.on = list(v.snaps[name][0]), name
        return True

    def destroy_snapshot(self, v):
        if not v.snaps:
            return False
        name = self.rnd.choice(sorted(v.snaps))
        kids = v.children(name)
        self.varve('destroy p:%s@%s' % (v.name, name), rc=1 if len(kids) > 1 else 0)
        if len(kids) < 2:
            on = v.snaps.pop(name)[1]
            v.snaps = {s: (c, on if o == name else o) for s, (c, o) in v.snaps.items()}
            v.on = on if v.on == name else v.on
        return True

    def rename(self, v):
        new = 'vm-%d-disk-1' % (100 + self.fresh())
        self.varve('rename p:%s %s' % (v.name, new))
        v.name = new
        return True

    def destroy(self, v):
        with Worker.guard:
            if len(Worker.vols) < VOLUMES:
                return False
            Worker.vols.remove(v)
        self.varve('destroy p:' + v.name)
        return True

    def step(self):
        what = self.rnd.choice((self.create, self.write, self.write, self.snapshot, self.both, self.rollback, self.destroy_snapshot,
                                self.rename, self.destroy))
        with Worker.guard:
            v = self.rnd.choice(Worker.vols) if Worker.vols else None
        if what == self.create:
            done = what(None)
        elif v and v.busy.acquire(blocking=False):
            try:
                done = what(v)
            finally:
                v.busy.release()
        else:
            done = False
        if done:
            Worker.counts[what.__name__] = Worker.counts.get(what.__name__, 0) + 1
        else:
            time.sleep(.05)

    def work(self, end, all_workers):
        try:
            while time.monotonic() < end and not any(w.bad for w in all_workers):
                self.step()
        except Exception as e:
            self.bad = e


def verify(hosts):
    for n, v in enumerate(Worker.vols):
        host = hosts[n % 2]
        serve(host, 'p:' + v.name)
        qio(host, *('read -P %d %dM 1M' % (c, i) for i, c in enumerate(v.now)))
        for s, (contents, _) in sorted(v.snaps.items()):
            try:
                qio(host, *('read -P %d %dM 1M' % (c, i) for i, c in enumerate(contents)), export='%s@%s' % (v.name, s))
            except Failed as e:
                if 'verification failed' in str(e) or s in chain(v):
                    raise       # one of another branch has no export
        stop(host)
    lists = [sh(h, 'varve list') for h in hosts]
    expect('the list of the other host', lists[1], lists[0])
    shown = sorted(line.split()[0] for line in lists[0].splitlines()[1:])
    expect('volumes and snapshots', shown, sorted(['p:%s.qcow2' % v.name for v in Worker.vols]
                                                  + ['p:%s.qcow2@%s' % (v.name, s) for v in Worker.vols for s in v.snaps]))
    for h in hosts:     # the next operation tidies up after killed servers
        sh(h, 'varve rollback p:%s@nosuch' % Worker.vols[0].name, rc=None)
        expect('active on host %d' % h.id, set(active(h)), {'varve-leases'})
    no_traces(hosts[0])
    expect('LVs', len(lvs(hosts[0])), 1 + sum(1 + len(v.snaps) for v in Worker.vols))


def chain(v):
    out, at = [], v.on
    while at:
        out.append(at)
        at = v.snaps[at][1]
    return out


def main():
    with Bench(hosts=2, san=3 << 30, memory=512) as b:
        prepare(b, more=LOCK)
        for h in b:
            h.run(DAEMON % (h.id, h.id))
        sh(b[1], 'varve pool init-locks p')
        for h in b:
            sh(h, 'varve create p:vm-%d-disk-9 8M; varve destroy p:vm-%d-disk-9' % (h.id + 200, h.id + 200))    # joins
        workers = [Worker(b[1], b[2]), Worker(b[2], b[1])]
        end = time.monotonic() + SECONDS
        threads = [threading.Thread(target=w.work, args=(end, workers), daemon=True) for w in workers]
        for t in threads:
            t.start()
        for t in threads:
            t.join(SECONDS + 600)
        print('seed %d: %s' % (SEED, Worker.counts), flush=True)
        for w in workers:
            if w.bad:
                raise w.bad
        if not Worker.vols:
            workers[0].create(None)
        verify(list(b))
        print('%d volumes with %d snapshots as the model says' % (len(Worker.vols), sum(len(v.snaps) for v in Worker.vols)))


main()
