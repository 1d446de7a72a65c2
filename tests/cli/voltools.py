"""What tests of operations on pools share: refusals, digests of a whole pool, figures of a volume."""
import json, os
from volmodel import make_pool
from proc import Failed, run


def fresh_in(base, name, **kw):
    home = os.path.join(base, name)
    os.makedirs(home)
    return make_pool(home, **kw)


def digest(pool):
    """names and contents of all that is in the pool"""
    return pool.digest()


def refused(pool, *args, text='', same=True):
    """one clear line, status 1, nothing changed"""
    before = digest(pool)
    out = pool.varve(*args, rc=1)
    if text not in out:
        raise Failed('varve %s: refused without "%s": %s' % (' '.join(args), text, out))
    if len(out.strip().splitlines()) > 2:
        raise Failed('varve %s: more than a line: %s' % (' '.join(args), out))
    if same and digest(pool) != before:
        raise Failed('varve %s was refused and changed the pool' % ' '.join(args))


def info(pool, vol):
    return json.loads(pool.varve('info', pool.id(vol), '--json'))


def backing(pool, vol, snap=None):
    """the backing name as recorded; None: there is none"""
    path = pool.file(vol, snap)
    with pool.reading():
        return json.loads(run('qemu-img', 'info', '-U', '-f', pool.fmt(path), '--output=json', path)).get('backing-filename')
