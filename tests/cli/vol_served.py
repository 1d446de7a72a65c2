"""Volumes that are served while they are changed: contents through NBD and afterwards in the files; then kill -9 of the
manager at every step, with the server alive or killed too, and recovery. Whatever was flushed must be there.

  vol_served.py [all] [SCENARIO ...]     all: every step; else every third one, by VARVE_SEED
"""
import os, subprocess, sys, time
from volmodel import MIB, clear, make_pool, sha, short
from proc import Failed, LONG, SEED, VARVE, done, need, run
from crashpoints import BASE, NAMES, points, thin
from volserver import Served

need('qemu-img', 'qemu-io')
V, C = '100/vm-100-disk-0', '101/vm-101-disk-0'
PARTS = 1 if LONG or 'all' in sys.argv else 3
SCENARIOS = []


def scenario(f):
    SCENARIOS.append(f)
    return f


def exports(s):
    """what the server shows is what the model says, for the disk and every snapshot below it"""
    name = s.vol.split('/')[-1]
    info = __import__('json').loads(s.pool.varve('info', s.pool.id(s.vol), '--json'))
    if s.read() != s.pool.vols[s.vol][None] or s.read(name) != s.pool.vols[s.vol][None]:
        raise Failed('the served disk does not read as it should')
    for snap, data in s.pool.vols[s.vol].items():
        if snap and on_line(info, snap) and s.read('%s@%s' % (name, snap)) != data:
            raise Failed('the export of snapshot %s does not read as it should' % snap)


def on_line(info, snap):
    for e in info['elements']:
        if e.get('snapshot') == snap:
            return e['in-current']
    raise Failed('info does not list snapshot %s: %s' % (snap, info))


# ---- each: prepares pool and server, returns (arguments, model) ----
def line(pool, small_top=True, suffix=''):
    pool.create(V + suffix, 4 * MIB)
    pool.write(V, 0, MIB, 0x11)
    pool.snapshot(V, 's1')
    pool.write(V, MIB, MIB, 0x22)
    pool.snapshot(V, 's2')
    s = Served(pool, V)
    s.write(2 * MIB, 65536 if small_top else 2 * MIB, 0x33)
    return s


@scenario
def snapshot(pool):
    s = line(pool)
    return s, ['snapshot', pool.id(V, 's3')], lambda p: p.vols[V].update(s3=p.vols[V][None])


@scenario
def snapshot_of_raw(pool):
    pool.create(V + '.raw', 4 * MIB)
    s = Served(pool, V)
    s.write(MIB, MIB, 0x33)
    return s, ['snapshot', pool.id(V, 's1')], lambda p: p.vols[V].update(s1=p.vols[V][None])


@scenario
def rollback(pool):
    s = line(pool)
    return s, ['rollback', pool.id(V, 's1')], lambda p: p.vols[V].update({None: p.vols[V]['s1']})


@scenario
def rollback_keep(pool):
    s = line(pool)
    return (s, ['rollback', pool.id(V, 's1'), '--keep', 'k'],
            lambda p: p.vols[V].update({'k': p.vols[V][None], None: p.vols[V]['s1']}))


@scenario
def destroy_commit_current(pool):
    s = line(pool)
    return s, ['destroy', pool.id(V, 's2')], lambda p: p.vols[V].pop('s2')


@scenario
def destroy_stream_current(pool):
    s = line(pool, small_top=False)
    return s, ['destroy', pool.id(V, 's2')], lambda p: p.vols[V].pop('s2')


@scenario
def destroy_middle(pool):
    s = line(pool)
    return s, ['destroy', pool.id(V, 's1')], lambda p: p.vols[V].pop('s1')


@scenario
def destroy_commit_middle(pool):
    pool.create(V, 4 * MIB)
    pool.write(V, 0, 3 * MIB, 0x11)
    pool.snapshot(V, 's1')
    pool.write(V, MIB, 65536, 0x22)
    pool.snapshot(V, 's2')
    s = Served(pool, V)
    s.write(2 * MIB, 65536, 0x33)
    return s, ['destroy', pool.id(V, 's1')], lambda p: p.vols[V].pop('s1')


@scenario
def destroy_raw_middle(pool):
    pool.create(V + '.raw', 4 * MIB)
    pool.write(V, 0, 3 * MIB, 0x11)
    pool.snapshot(V, 's1')
    pool.write(V, MIB, 65536, 0x22)
    pool.snapshot(V, 's2')
    s = Served(pool, V)
    s.write(2 * MIB, 65536, 0x33)
    return s, ['destroy', pool.id(V, 's1')], lambda p: p.vols[V].pop('s1')


@scenario
def destroy_side_branch(pool):
    """the server has neither of the merged files open"""
    pool.create(V, 4 * MIB)
    pool.write(V, 0, MIB, 0x11)
    pool.snapshot(V, 'root')
    pool.write(V, MIB, 2 * MIB, 0x22)
    pool.snapshot(V, 'a')
    pool.write(V, MIB, 65536, 0x33)
    pool.snapshot(V, 'b')
    pool.rollback(V, 'root')
    s = Served(pool, V)
    s.write(2 * MIB, 65536, 0x44)
    return s, ['destroy', pool.id(V, 'a')], lambda p: p.vols[V].pop('a')


@scenario
def destroy_flatten(pool):
    s = line(pool)
    s.stop()
    pool.rollback(V, 's1', 'k')
    s.start()
    s.write(3 * MIB, 65536, 0x44)
    return s, ['destroy', pool.id(V, 's1'), '--flatten'], lambda p: p.vols[V].pop('s1')


@scenario
def destroy_last_of_raw(pool):
    pool.create(V + '.raw', 4 * MIB)
    pool.write(V, 0, 2 * MIB, 0x11)
    pool.snapshot(V, 's1')
    s = Served(pool, V)
    s.write(MIB, MIB, 0x33)
    return s, ['destroy', pool.id(V, 's1')], lambda p: p.vols[V].pop('s1')


def clone_model(p):
    p.vols[C] = {None: p.vols[V]['s1']}


@scenario
def clone(pool):
    s = line(pool)
    return s, ['clone', pool.id(V, 's1'), pool.id(C)], clone_model


@scenario
def clone_full(pool):
    s = line(pool)
    return s, ['clone', pool.id(V, 's1'), pool.id(C), '--full', '--format', 'raw'], clone_model


@scenario
def destroy_flatten_clone(pool):
    s = line(pool)
    pool.clone(V, 's1', C)
    return s, ['destroy', pool.id(V, 's1'), '--flatten'], lambda p: p.vols[V].pop('s1')


@scenario
def resize(pool):
    s = line(pool)
    return s, ['resize', pool.id(V), '8M'], lambda p: p.vols[V].update({None: p.vols[V][None] + bytes(4 * MIB)})


def fresh(f):
    home = os.path.join(BASE, 'try')
    clear(home)
    return f(make_pool(home))


def whole(f):
    """the operation undisturbed; returns its crash points"""
    s, argv, model = fresh(f)
    pool, listing = s.pool, os.path.join(BASE, 'points')
    open(listing, 'w').close()
    try:
        pool.varve(*argv, env={'VARVE_CRASH_LIST': listing})
        model(pool)
        exports(s)
        s.write(3 * MIB + 4096, 8192, 0x77)
        exports(s)
        s.stop()
        pool.verify()
        if pool.hidden():
            raise Failed('left behind: %s' % pool.hidden())
        pool.varve('pool', 'check', pool.name)
        s.start()
        exports(s)
        s.stop()
    finally:
        s.kill()
    return thin(points(listing))


def states(before, after):
    """what the pool may be: as before, as after, with what the guest wrote since in the current volume; a snapshot that
    is finished by recovery holds that too"""
    out = [before, after]
    for snap in set(after[V]) - set(before[V]):
        out.append({V: dict(after[V], **{snap: after[V][None]})})
    return [{v: {s: sha(d) for s, d in e.items()} for v, e in st.items()} for st in out]


def kill_at(f, point, nr):
    """three endings: the server lives; it dies too and is started anew; it dies and the pool is repaired"""
    name, ending = '%s:%d' % point, nr % 3
    s, argv, model = fresh(f)
    pool = s.pool
    try:
        rc, out = pool.varve(*argv, rc=None, env={'VARVE_CRASH_AT': name})
        if rc != -9:
            raise Failed('not killed, ended with %d: %s' % (rc, out))
        before = {v: dict(e) for v, e in pool.vols.items()}
        model(pool)
        after = pool.vols
        seen = s.read()
        if seen not in (before[V][None], after[V][None]):
            raise Failed('the served disk reads neither as before nor as after')
        rolled_back = seen == after[V][None]
        s.write(3 * MIB, 4096, 0x70)
        before[V][None] = patch(before[V][None])
        if ending:
            s.kill()
            if ending == 1:
                s.start()
                seen = s.read()
                if seen not in (before[V][None], after[V][None]):
                    raise Failed('started anew the disk reads neither as before nor as after')
        pool.varve('pool', 'check', pool.name, '--repair')
        if ending != 2:
            s.write(3 * MIB + 4096, 4096, 0x71)
            before[V][None] = patch(before[V][None], 4096, 0x71)
            if s.read() not in (before[V][None], after[V][None]):
                raise Failed('after recovery the disk reads neither as before nor as after')
            s.stop()
        got = pool.state()
        allowed = states(before, after)
        if got not in allowed and not late_snapshot(got, before, after):
            raise Failed('the pool is\n  %s\nand may be\n  %s' % (short(got), '\n  '.join(str(short(a)) for a in allowed)))
        pool.check_images((0, 3) if ending else (0,))
        pool.varve('pool', 'check', pool.name)
        left = [h for h in pool.hidden() if not os.path.basename(h).startswith(('vol-', 'pool'))]
        if left:
            raise Failed('left behind: %s' % left)
    except (Failed, EOFError, OSError) as e:
        raise Failed('killed at %s, ending %d: %s\n%s' % (name, ending, e, s.said()))
    finally:
        s.kill()


def kill_server_at(f, point_nr):
    """the server dies at the n-th step of the manager, which lives on: whatever that answers, nothing flushed is lost"""
    s, argv, model = fresh(f)
    pool, fifo = s.pool, os.path.join(BASE, 'fifo')
    if os.path.exists(fifo):
        os.unlink(fifo)
    os.mkfifo(fifo)
    before = {v: dict(e) for v, e in pool.vols.items()}
    p = subprocess.Popen(pool.argv(*argv), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                         env=pool.env(VARVE_CRASH_LIST=fifo))
    nr, name, out = 0, '-', ''
    try:
        # the manager stands at a point until its name is read
        while p.poll() is None:
            fd = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
            got = b''
            while p.poll() is None and not got:
                try:
                    got = os.read(fd, 4096)
                except BlockingIOError:
                    pass
                time.sleep(.0005)
            os.close(fd)
            for n in got.decode().split():
                nr += 1
                if nr == point_nr:
                    name = n
                    s.kill()
        out = p.stdout.read().decode()
        model(pool)
        s.kill()
        s.start()
        if s.read() not in (before[V][None], pool.vols[V][None]):
            raise Failed('started anew the disk reads neither as before nor as after')
        pool.varve('pool', 'check', pool.name, '--repair')
        s.stop()
        got = pool.state()
        if got not in states(before, pool.vols) or p.returncode == 0 and got != pool.expected():
            raise Failed('the manager ended with %d; the pool is\n  %s\nbefore, after\n  %s' % (
                p.returncode, short(got), '\n  '.join(str(short(a)) for a in states(before, pool.vols))))
        pool.check_images((0, 3))
        pool.varve('pool', 'check', pool.name)
    except (Failed, EOFError, OSError) as e:
        raise Failed('server killed at %s (%d): %s\n%s\n%s' % (name, point_nr, e, s.said(), out))
    finally:
        p.kill()
        s.kill()


def patch(data, at=0, pattern=0x70):
    data = bytearray(data)
    data[3 * MIB + at:3 * MIB + at + 4096] = bytes([pattern]) * 4096
    return bytes(data)


def late_snapshot(got, before, after):
    """the snapshot was finished between the writes that followed the kill"""
    for snap in set(after[V]) - set(before[V]):
        for data in (after[V][snap], patch(after[V][snap])):
            if got == {V: {s: sha(d) for s, d in dict(after[V], **{snap: data}).items()}}:
                return True
    return False


def run_scenario(f):
    todo, kills = whole(f), 0
    for nr, point in enumerate(todo):
        if nr % PARTS == SEED % PARTS:
            for e in range(3) if LONG else [nr // PARTS]:
                kill_at(f, point, e)
                kills += 1
    for nr in range(1 + SEED % (2 * PARTS), len(todo) + 1, 1 if LONG else 2 * PARTS):
        kill_server_at(f, nr)
        kills += 1
    print('%-24s killed %d times at %d points' % (f.__name__, kills, len(todo)), flush=True)
    if len(todo) < 2:
        raise Failed('%s: too few crash points' % f.__name__)


for sc in SCENARIOS:
    if not NAMES or sc.__name__ in NAMES:
        try:
            run_scenario(sc)
        except Failed as e:
            raise Failed('%s: %s' % (sc.__name__, e))
done('ok')
