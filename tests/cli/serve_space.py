"""Zeroes and discards of a served disk: what they take in the image, and that it never outgrows its measured size."""
import json, os, random, shutil, sys
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'lib'))
from proc import *
from nbdclient import Nbd, NbdError

need('qemu-img')
D = folder()
MB = 1 << 20
SIZE = 48 * MB
SOCK = D + '/nbd'


def create(name, opts='', backing=None, fmt='qcow2', size=SIZE):
    path = D + '/' + name
    run('qemu-img', 'create', '-q', '-f', fmt, *(['-o', opts] if opts else []),
        *(['-b', backing, '-F', 'qcow2'] if backing else []), path, str(size))
    return path


def refused(text, *options):
    image = create('refused.qcow2')
    rc, out = run(VARVE, 'serve', image, '--export', 'nbd,unix=' + SOCK, *options, rc=None)
    if rc == 0 or text not in out:
        raise Failed('serve %s: %d %s' % (' '.join(options), rc, out))


def data_bytes(image, fmt='qcow2'):
    """what the image itself holds as data"""
    if fmt == 'raw':
        return os.stat(image).st_blocks * 512
    out = json.loads(run('qemu-img', 'map', '-f', fmt, '--output=json', image))
    return sum(e['length'] for e in out if e['data'] and e['depth'] == 0)


def same(image, model, fmt='qcow2'):
    with open(D + '/model.raw', 'wb') as f:
        f.write(model)
    rc, out = run('qemu-img', 'compare', '-f', fmt, '-F', 'raw', image, D + '/model.raw', rc=None)
    if rc:
        raise Failed('%s is not what was written: %s' % (image, out))


def noise(rng, n):
    return rng.randbytes(n - 1) + b'\1'


# ---- detect-zeroes ----

def zeroes(mode, fmt, opts, backing):
    """16M of data; then zeroes as data over the first 8M, over 16M never written, and in small pieces"""
    rng = random.Random(SEED)
    image = create('z.' + fmt, opts, backing, fmt)
    model = bytearray(SIZE)
    if backing:
        model[:] = b'\x5a' * SIZE
    with Server(image, SOCK, '--detect-zeroes', mode, '-f', fmt) as s, Nbd(SOCK) as n:
        def put(off, data):
            n.write(off, data)
            model[off:off + len(data)] = data
        for off in range(0, 16 * MB, MB):
            put(off, noise(rng, MB))
        for off in list(range(0, 8 * MB, MB)) + list(range(20 * MB, 36 * MB, MB)):
            put(off, bytes(MB))
        for off in range(40 * MB, 41 * MB, 12288):  # no whole clusters
            put(off, bytes(4096))
        put(45 * MB + 512, bytes(100000) + b'\1' + bytes(100000))
        n.flush()
        s.stop()
    same(image, model, fmt)
    if fmt == 'qcow2':
        check(image)
    return data_bytes(image, fmt), os.stat(image).st_blocks * 512


def detect():
    refused("--detect-zeroes takes off, on or unmap, not 'maybe'", '--detect-zeroes', 'maybe')
    refused('use discard=unmap, or detect-zeroes=on', '--detect-zeroes', 'unmap', '--discard', 'ignore')
    refused("--discard takes unmap or ignore, not 'keep'", '--discard', 'keep')
    refused("--on-full takes wait or fail, not 'maybe'", '--on-full', 'maybe')
    base = create('base.qcow2')
    run('qemu-io', '-f', 'qcow2', '-c', 'write -P 0x5a 0 %d' % SIZE, base)
    most = {}  # data in the image
    for fmt, opts, below in (('qcow2', '', None), ('qcow2', 'compat=0.10', None), ('qcow2', '', base),
                             ('qcow2', 'extended_l2=on,cluster_size=128k', base), ('raw', '', None)):
        for mode in 'off', 'on', 'unmap':
            most[mode] = zeroes(mode, fmt, opts, below)
        what = '%s %s %s' % (fmt, opts, 'overlay' if below else '')
        print('%-44s data (and file) with zeroes: %s' %
              (what, ', '.join('%s %.1fM (%.1fM)' % (m, most[m][0] / MB, most[m][1] / MB) for m in most)))
        slack = 2 * MB if fmt == 'qcow2' and below and '128k' not in opts else MB  # parts of clusters over a base are data
        if most['off'][0] < 32 * MB:
            raise Failed('%s: zeroes are not written at all' % what)
        if opts != 'compat=0.10':
            for mode in 'on', 'unmap':
                if most[mode][0] > 8 * MB + slack and not (fmt == 'raw' and mode == 'on'):
                    raise Failed('%s: zeroes take space: %r' % (what, most))
        if most['unmap'][1] > most['off'][1] - 20 * MB:
            raise Failed('%s: no space is given back: %r' % (what, most))


# ---- discards ----

def full_size(opts):
    out = json.loads(run('qemu-img', 'measure', '--output=json', '-O', 'qcow2', *(['-o', opts] if opts else []), '--size', str(SIZE)))
    return out['fully-allocated']


def places(image):
    """guest offset -> place in the file, of every 4k of data"""
    out = json.loads(run('qemu-img', 'map', '-f', 'qcow2', '--output=json', image))
    return {e['start'] + i: e['offset'] + i for e in out if 'offset' in e for i in range(0, e['length'], 4096)}


def fill(n, rng):
    model = bytearray(rng.randbytes(SIZE))
    for off in range(0, SIZE, MB):
        n.write(off, model[off:off + MB])
    return model


def rewrite(n, rng, rounds, model, look=lambda: None):
    """discards and writes at random, for long"""
    for i in range(rounds):
        length = rng.choice((4096, 16384, 65536, 131072, 262144, 1000000))
        off = rng.randrange(0, (SIZE - length) // 4096) * 4096
        if rng.random() < .5:
            n.trim(off, length)
            model[off:off + length] = n.read(off, length)  # edges of clusters stay
        else:
            data = noise(rng, length)
            n.write(off, data)
            model[off:off + length] = data
        if i % 500 == 499:
            n.flush()
        if i % 100 == 0:
            look()


def extents(path):
    return int(run('filefrag', path).rsplit(':', 1)[1].split()[0]) if shutil.which('filefrag') else 0


def stays_in_its_size(opts):
    rng = random.Random(SEED + 1)
    image, most = create('d.qcow2', opts), full_size(opts)

    def look():
        if os.stat(image).st_size > most:
            raise Failed('%s: the image has %d bytes, more than measured (%d)' % (opts, os.stat(image).st_size, most))
    options = '--discard-no-unref', '--preallocate', 'off'
    with Server(image, SOCK, *options) as s, Nbd(SOCK) as n:
        model = fill(n, rng)
        s.stop()
    look()
    before, pieces = places(image), extents(image)
    with Server(image, SOCK, *options) as s, Nbd(SOCK) as n:
        rewrite(n, rng, 3000, model, look)
        s.stop()
    look()
    check(image)
    same(image, model)
    moved = {at for at, place in places(image).items() if before[at] != place}
    if moved:
        raise Failed('%s: %d pieces of 4k have moved, the first at %d' % (opts, len(moved), min(moved)))
    print('%-40s %d bytes, measured %d; %d lines in the image, nothing moved; extents in the file system: %d, then %d' %
          (opts or 'plain', os.stat(image).st_size, most, len({place - at for at, place in before.items()}), pieces, extents(image)))


def without_it():
    """clusters are freed then: the space goes, the image is sound"""
    rng = random.Random(SEED + 2)
    image = create('e.qcow2')
    with Server(image, SOCK) as s, Nbd(SOCK) as n:
        model = fill(n, rng)
        rewrite(n, rng, 500, model)
        n.trim(0, 40 * MB)
        model[:40 * MB] = bytes(40 * MB)
        s.stop()
    check(image)
    same(image, model)
    if os.stat(image).st_blocks * 512 > 16 * MB:
        raise Failed('discarded space is not given back: %d' % (os.stat(image).st_blocks * 512))


def overlay():
    """a discarded cluster of an overlay reads as zero, however it is discarded"""
    base = D + '/base.qcow2'
    for options in (), ('--discard-no-unref',):
        for opts in '', 'extended_l2=on,cluster_size=128k':
            image = create('o.qcow2', opts, base)
            model = bytearray(b'\x5a' * SIZE)
            with Server(image, SOCK, *options) as s, Nbd(SOCK) as n:
                n.write(0, b'\7' * (4 * MB))
                n.trim(2 * MB, 4 * MB)  # half of it has clusters here, half lies below
                n.write(3 * MB + 4096, b'\10' * 4096)
                s.stop()
            model[:2 * MB], model[2 * MB:6 * MB] = b'\7' * (2 * MB), bytes(4 * MB)
            model[3 * MB + 4096:3 * MB + 8192] = b'\10' * 4096
            check(image)
            same(image, model)


def on_a_volume():
    """a block device that has just the measured size: no write may fail for want of space"""
    if os.geteuid() != 0 or not shutil.which('losetup'):
        print('no loop devices here: left out')
        return
    with open(D + '/volume', 'wb') as f:
        f.truncate((full_size('') + 4095) // 4096 * 4096)
    rc, dev = run('losetup', '-f', '--show', D + '/volume', rc=None)
    if rc:
        print('no loop devices here: left out')
        return
    dev = dev.strip()
    try:
        for options in ('--discard-no-unref',), ():
            run('qemu-img', 'create', '-q', '-f', 'qcow2', dev, str(SIZE))
            with Server(dev, SOCK, *options) as s, Nbd(SOCK) as n:
                rng = random.Random(SEED + 3)
                model = fill(n, rng)
                rewrite(n, rng, 1000, model)
                s.stop()
            check(dev)
            same(dev, model)
    finally:
        run('losetup', '-d', dev)


detect()
for opts in '', 'cluster_size=4k', 'cluster_size=128k,extended_l2=on', 'cluster_size=1M':
    stays_in_its_size(opts)
without_it()
overlay()
on_a_volume()
done('zeroes and discards take what they should')
