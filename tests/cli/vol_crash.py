"""kill -9 of the manager at every step of every operation on idle volumes; then recovery by the next operation, or by
pool check --repair: the pool must be what it was before or what the operation makes of it, nothing between."""
import os
from volmodel import MIB, Pool
from crashpoints import BASE, run_all
from proc import need

need('qemu-img', 'qemu-io')
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
def import_large(pool):
    """in a volume group the LV grows meanwhile"""
    one(pool, W)
    src = os.path.join(BASE, 'large.raw')
    data = os.urandom(9 * MIB)
    with open(src, 'wb') as f:
        f.write(data)
    return ['import', src, pool.id(V)], lambda p: p.vols.update({V: {None: data}})


@scenario
def import_stream(pool):
    """what is spooled has a length of its own"""
    one(pool, W)
    data = os.urandom(3 * MIB) + bytes(MIB)
    Pool.stdin = data
    return ['import', '-', pool.id(V)], lambda p: p.vols.update({V: {None: data}})


@scenario
def resize_raw(pool):
    one(pool, V, 4 * MIB, '.raw')
    return ['resize', pool.id(V), '8M'], lambda p: p.vols[V].update({None: p.vols[V][None] + bytes(4 * MIB)})


@scenario
def resize(pool):
    line(pool)
    return ['resize', pool.id(V), '8M'], lambda p: p.vols[V].update({None: p.vols[V][None] + bytes(4 * MIB)})


@scenario
def repair(pool):
    line(pool)
    pool.lose(V)
    pool.vols[V][None] = pool.vols[V]['s2']
    return ['pool', 'check', pool.name, '--repair'], lambda p: None


run_all(SCENARIOS)
