"""kill -9 of the manager at every step of every operation on idle volumes; then recovery by the next operation, or by
pool check --repair: the pool must be what it was before or what the operation makes of it, nothing between."""
import collections, os, sys
from volmodel import MIB, Pool, sha, short
from proc import Failed, LONG, done, folder, need, run

need('qemu-img', 'qemu-io')
BASE = folder()
V, W = '100/vm-100-disk-0', '100/vm-100-disk-1'
SCENARIOS = []


def scenario(f):
    SCENARIOS.append(f)
    return f


def one(pool, vol=V, size=4 * MIB, *options):
    pool.create(vol + (options[0] if options else ''), size)
    pool.write(vol, 0, MIB, 0x11)


def line(pool, vol=V, sizes=(MIB, MIB, MIB)):
    """current on s2 on s1, each with its own data"""
    one(pool, vol)
    for i, n in enumerate(sizes[:-1]):
        pool.write(vol, 65536 * i, n, 0x20 + i)
        pool.snapshot(vol, 's%d' % (i + 1))
    pool.write(vol, 2 * MIB, sizes[-1], 0x30)


# ---- each returns (arguments of varve, function that does the same to the model) ----
@scenario
def snapshot(pool):
    one(pool)
    return ['snapshot', pool.id(V, 's1')], lambda p: p.vols[V].update(s1=p.vols[V][None])


@scenario
def snapshot_of_raw(pool):
    one(pool, V, 4 * MIB, '.raw')
    return ['snapshot', pool.id(V, 's1')], lambda p: p.vols[V].update(s1=p.vols[V][None])


@scenario
def snapshot_of_two(pool):
    one(pool)
    one(pool, W, 4 * MIB, '.raw')

    def model(p):
        for v in V, W:
            p.vols[v]['s1'] = p.vols[v][None]
    return ['snapshot', pool.id(V, 's1'), pool.id(W, 's1')], model


@scenario
def rollback(pool):
    line(pool)
    return ['rollback', pool.id(V, 's1')], lambda p: p.vols[V].update({None: p.vols[V]['s1']})


@scenario
def rollback_keep(pool):
    line(pool)
    return (['rollback', pool.id(V, 's2'), '--keep', 'k'],
            lambda p: p.vols[V].update({'k': p.vols[V][None], None: p.vols[V]['s2']}))


def less(vol, snap):
    return lambda p: p.vols[vol].pop(snap)


@scenario
def destroy_commit_current(pool):
    line(pool, sizes=(MIB, 2 * MIB, 65536))
    return ['destroy', pool.id(V, 's2')], less(V, 's2')


@scenario
def destroy_commit_middle(pool):
    line(pool, sizes=(2 * MIB, 65536, MIB))
    return ['destroy', pool.id(V, 's1')], less(V, 's1')


@scenario
def destroy_stream(pool):
    line(pool, sizes=(MIB, 65536, 2 * MIB))
    return ['destroy', pool.id(V, 's2')], less(V, 's2')


@scenario
def destroy_leaf(pool):
    line(pool)
    pool.rollback(V, 's1')
    return ['destroy', pool.id(V, 's2')], less(V, 's2')


@scenario
def destroy_flatten(pool):
    line(pool)
    pool.rollback(V, 's1', 'k')
    pool.write(V, 3 * MIB, 65536, 0x44)
    return ['destroy', pool.id(V, 's1'), '--flatten'], less(V, 's1')


@scenario
def destroy_last_of_raw(pool):
    one(pool, V, 4 * MIB, '.raw')
    pool.snapshot(V, 's1')
    pool.write(V, 2 * MIB, 65536, 0x55)
    return ['destroy', pool.id(V, 's1')], less(V, 's1')


@scenario
def destroy_raw_middle(pool):
    one(pool, V, 4 * MIB, '.raw')
    pool.write(V, 0, 2 * MIB, 0x12)
    pool.snapshot(V, 's1')
    pool.write(V, 2 * MIB, 65536, 0x55)
    pool.snapshot(V, 's2')
    pool.write(V, 3 * MIB, 65536, 0x66)
    return ['destroy', pool.id(V, 's1')], less(V, 's1')


@scenario
def destroy_volume(pool):
    line(pool)
    one(pool, W)
    return ['destroy', pool.id(V)], lambda p: p.vols.pop(V)


@scenario
def create(pool):
    one(pool, W)
    return ['create', pool.id(V), '4M'], lambda p: p.vols.update({V: {None: bytes(4 * MIB)}})


@scenario
def create_raw(pool):
    one(pool, W)
    return ['create', pool.id(V), '4M', '--format', 'raw'], lambda p: p.vols.update({V: {None: bytes(4 * MIB)}})


@scenario
def import_file(pool):
    one(pool, W)
    src = os.path.join(BASE, 'import.raw')
    data = b'\x77' * MIB + bytes(MIB) + os.urandom(MIB)
    with open(src, 'wb') as f:
        f.write(data)
    return ['import', src, pool.id(V)], lambda p: p.vols.update({V: {None: data}})


@scenario
def resize(pool):
    line(pool)
    return ['resize', pool.id(V), '8M'], lambda p: p.vols[V].update({None: p.vols[V][None] + bytes(4 * MIB)})


@scenario
def repair(pool):
    line(pool)
    os.unlink(pool.file(V))
    pool.vols[V][None] = pool.vols[V]['s2']
    return ['pool', 'check', pool.name, '--repair'], lambda p: None


def points(path):
    """[(name, n-th pass)] in order"""
    seen, out = collections.Counter(), []
    with open(path) as f:
        for name in f.read().split():
            seen[name] += 1
            out.append((name, seen[name]))
    return out


def thin(list_):
    """repeated points: the first two and the last pass of each tell"""
    total = collections.Counter(n for n, _ in list_)
    return list_ if LONG else [(n, i) for n, i in list_ if i <= 2 or i == total[n]]


def recover(pool, how, vols):
    if how == 0 or not vols:
        pool.varve('pool', 'check', pool.name, '--repair')
        return None
    vol = vols[0]
    # any operation will do: here one that changes nothing but a size
    pool.varve('resize', pool.id(vol), '+1M')
    return vol


def matches(pool, got, want, grown):
    want = {v: dict(e) for v, e in want.items()}
    if grown and grown in want and None in want[grown]:
        want[grown][None] = want[grown][None] + bytes(MIB)
    return got == {v: {s: sha(d) for s, d in e.items()} for v, e in want.items()}


def current_is_there(pool, before, after, name):
    """no moment without a current volume that reads right, without any recovery"""
    for vol in before:
        if vol not in after:
            continue
        paths = [os.path.join(pool.images, vol + s) for s in ('.qcow2', '.raw')]
        paths = [p for p in paths if os.path.exists(p)]
        if not paths:
            raise Failed('%s: no current volume %s' % (name, vol))
        data = pool.read(paths[0])
        if data not in (before[vol][None], after[vol][None]):
            raise Failed('%s: the current volume %s reads neither as before nor as after' % (name, vol))


def kill_at(template, argv, model, point, nr):
    name = '%s:%d' % point
    pool = template.copy(os.path.join(BASE, 'try'))
    before = {v: dict(e) for v, e in pool.vols.items()}
    argv = [a for a in argv]
    rc, out = pool.varve(*argv, rc=None, env={'VARVE_CRASH_AT': name})
    if rc != -9:
        raise Failed('at %s: not killed, ended with %d: %s' % (name, rc, out))
    model(pool)
    after = pool.vols
    if 'repair' not in ' '.join(argv):
        current_is_there(pool, before, after, name)
    grown = recover(pool, nr % 2, [v for v in before if v in after and argv[0] != 'pool'])
    got = pool.state()
    if not matches(pool, got, after, grown) and not matches(pool, got, before, grown):
        pool.vols = before
        was = short(pool.expected())
        pool.vols = after
        raise Failed('killed at %s: the pool is\n  %s\nbefore\n  %s\nafter\n  %s' % (name, short(got), was,
                                                                                 short(pool.expected())))
    pool.check_images()
    pool.varve('pool', 'check', pool.name)
    # a lock file of the killed one may stay: nobody holds it
    if [h for h in pool.hidden() if not os.path.basename(h).startswith(('vol-', 'pool'))]:
        raise Failed('killed at %s: left behind: %s' % (name, pool.hidden()))


def run_scenario(f):
    home = os.path.join(BASE, f.__name__)
    os.makedirs(home)
    pool = Pool(home)
    argv, model = f(pool)
    if f is not repair:
        pool.verify()
    whole = pool.copy(os.path.join(BASE, 'whole'))
    listing = os.path.join(BASE, 'points')
    open(listing, 'w').close()
    whole.varve(*argv, env={'VARVE_CRASH_LIST': listing})
    model(whole)
    whole.verify()
    if whole.hidden():
        raise Failed('%s left behind: %s' % (f.__name__, whole.hidden()))
    todo = thin(points(listing))
    for nr, point in enumerate(todo):
        kill_at(pool, argv, model, point, nr)
    print('%-24s killed at %d points' % (f.__name__, len(todo)), flush=True)
    if not todo:
        raise Failed('%s: too few crash points' % f.__name__)


for s in SCENARIOS:
    if len(sys.argv) < 2 or s.__name__ in sys.argv[1:]:
        try:
            run_scenario(s)
        except Failed as e:
            raise Failed('%s: %s' % (s.__name__, e))
done('ok')
