"""kill -9 at the steps of what makes volumes from others, renames and moves them; see crashpoints.py.

  vol_crash_copy.py [all] [lvm | up | down] [SCENARIO ...]

all: at every step; else at a part of them, by VARVE_SEED. lvm: in volume groups; up, down: from a directory to one and back.
"""
import sys
from volmodel import LVM, MIB, MIXED, based
from crashpoints import run_all
from proc import need

need('qemu-img', 'qemu-io')
V, W, C, D = '100/vm-100-disk-0', '100/vm-100-disk-1', '101/vm-101-disk-0', '102/vm-102-disk-0'
SCENARIOS = []


def scenario(f):
    SCENARIOS.append(f)
    return f


def tree(pool, vol=V, suffix=''):
    """current on s2 on s1, s3 beside, each with its own data; another volume"""
    pool.create(vol + suffix, 4 * MIB)
    pool.create(W, MIB)
    pool.write(vol, 0, MIB, 0x11)
    pool.snapshot(vol, 's1')
    pool.write(vol, 65536, 65536, 0x21)
    pool.snapshot(vol, 's3')
    pool.rollback(vol, 's1')
    pool.write(vol, 131072, 65536, 0x22)
    pool.snapshot(vol, 's2')
    pool.write(vol, 2 * MIB, 65536, 0x30)


def base(pool, suffix=''):
    pool.create(V + suffix, 4 * MIB)
    pool.create(W, MIB)
    pool.write(V, 0, MIB, 0x11)
    return pool.template(V)


def add(to, vol, snap=None):
    return lambda p: p.vols.update({to: {None: p.vols[vol][snap]}})


@scenario
def clone_base(pool):
    b = base(pool)
    return ['clone', pool.id(b), pool.id(C)], add(C, b)


@scenario
def clone_snapshot(pool):
    tree(pool)
    return ['clone', pool.id(V, 's3'), pool.id(C)], add(C, V, 's3')


@scenario
def clone_full(pool):
    tree(pool)
    return ['clone', pool.id(V), pool.id(C), '--full'], add(C, V)


@scenario
def clone_full_file(pool):
    b = base(pool, '.raw')
    return ['clone', pool.id(b), pool.id(C), '--full', '--format', 'raw'], add(C, b)


@scenario
def template(pool):
    pool.create(V, 4 * MIB)
    pool.create(W, MIB)
    pool.write(V, 0, MIB, 0x11)
    return ['template', pool.id(V)], lambda p: p.vols.update({based(V): p.vols.pop(V)})


@scenario
def rename(pool):
    tree(pool)
    return ['rename', pool.id(V), C], lambda p: p.vols.update({C: p.vols.pop(V)})


@scenario
def rename_here(pool):
    pool.create(V + '.raw', MIB)
    pool.create(W, MIB)
    pool.write(V, 0, 65536, 0x11)
    pool.snapshot(V, 's1')
    pool.snapshot(V, 's2')
    new = '100/vm-100-disk-9'
    return ['rename', pool.id(V), new], lambda p: p.vols.update({new: p.vols.pop(V)})


@scenario
def rename_clone_of_raw(pool):
    b = base(pool, '.raw')
    pool.clone(b, None, C)
    pool.snapshot(C, 's1')
    return ['rename', pool.id(C), 'free'], lambda p: p.vols.update({'free': p.vols.pop(C)})


def two_pools(pool):
    pool.create('q:' + W, MIB)


@scenario
def move(pool):
    tree(pool)
    two_pools(pool)
    return ['move', pool.id(V), 'q:'], lambda p: p.vols.update({'q:' + V: dict(p.vols[V])})


@scenario
def move_delete(pool):
    tree(pool, V, '.raw')
    two_pools(pool)
    return ['move', pool.id(V), 'q:', '--delete'], lambda p: p.vols.update({'q:' + V: p.vols.pop(V)})


@scenario
def move_clone(pool):
    b = base(pool)
    pool.move(b)
    pool.clone(b, None, C)
    pool.snapshot(C, 's1')
    two_pools(pool)
    return ['move', pool.id(C), 'q:', '--delete'], lambda p: p.vols.update({'q:' + C: p.vols.pop(C)})


@scenario
def move_flatten(pool):
    b = base(pool)
    pool.clone(b, None, C)
    two_pools(pool)
    return ['move', pool.id(C), 'q:', '--delete', '--flatten'], lambda p: p.vols.update({'q:' + C: p.vols.pop(C)})


@scenario
def move_full_clone(pool):
    """a copy in another storage"""
    b = base(pool, '.raw')
    pool.clone(b, None, C)
    pool.write(C, MIB, 65536, 0x12)
    two_pools(pool)
    return ['clone', pool.id(C), 'q:' + D, '--full', '--format', 'raw'], lambda p: p.vols.update({'q:' + D: dict(p.vols[C])})


# a command of LVM takes its time
across = any(a in MIXED for a in sys.argv[1:])
run_all([s for s in SCENARIOS if not across or s.__name__.startswith('move')], 16 if LVM else 4)
