"""varve img info, map and convert against qemu-img's on images made with every creation option."""
import errno, hashlib, itertools, json, os, random, subprocess, sys
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'lib'))
from proc import *

need('qemu-img', 'qemu-io')
D = folder()
os.chdir(D)
rnd = random.Random(SEED)
SIZE = 3 * (1 << 20) + 512 * 7


def digest(path):
    h = hashlib.sha256()
    with open(path, 'rb') as f:
        for b in iter(lambda: f.read(1 << 20), b''):
            h.update(b)
    return h.hexdigest()


def scribble(image, cluster, compressed, v3):
    """random data, zeroes, discards and compressed clusters, written by QEMU"""
    ops = []
    for _ in range(40):
        kind = rnd.choice(['w', 'w', 'w', 'z', 'u', 'd'] + ['c'] * (3 if compressed else 0))
        off = rnd.randrange(SIZE // 512) * 512
        n = min(rnd.choice([512, 4096, 70 * 512, 65536, 300 * 1024]), SIZE - off)
        if kind == 'w':
            ops.append('write -q -P %d %d %d' % (rnd.randrange(1, 255), off, n))
        elif kind == 'z':
            ops.append('write -q -z %d %d' % (off, n))
        elif kind == 'u':
            ops.append('write -q -z -u %d %d' % (off, n))
        elif kind == 'd':
            ops.append('discard -q %d %d' % (off, n))
        else:
            off = rnd.randrange(SIZE // cluster) * cluster if SIZE > cluster else 0
            ops.append('write -q -c -P %d %d %d' % (rnd.randrange(1, 255), off, min(cluster, SIZE - off)))
    # an already written cluster refuses a compressed write: that is fine here
    subprocess.run(['qemu-io', '-f', 'qcow2', image], input='\n'.join(ops).encode(), stdout=subprocess.DEVNULL,
                   stderr=subprocess.DEVNULL, check=False)


def same_info(image):
    ours, theirs = varve_json('img', 'info', '--output=json', image), json.loads(run('qemu-img', 'info', '--output=json', image))
    theirs.pop('children', None)        # newer QEMU also describes the file that the image lies in
    for o in (ours, theirs):
        for s in o.get('snapshots', []):
            s.pop('icount', None)
    # an absolute path is ours, QEMU's is relative to the working directory
    for o in (ours, theirs):
        if 'full-backing-filename' in o:
            o['full-backing-filename'] = os.path.realpath(o['full-backing-filename'])
    if ours != theirs:
        raise Failed('info of %s:\n%s\n%s' % (image, ours, theirs))


def is_hole(path, off, n):
    with open(path, 'rb') as f:
        try:
            return os.lseek(f.fileno(), off, os.SEEK_DATA) >= off + n
        except OSError as e:
            return e.errno == errno.ENXIO


def take_holes(ours, theirs, files):
    """Whether data lies in a hole of the host's file is asked by QEMU only of images that it takes for
    preallocated. Where it did ask, and said zero, so must we; what we say beyond that must be true."""
    asked = any(e['zero'] and e['data'] for e in theirs)
    told = [(e['start'], e['start'] + e['length']) for e in theirs if e['zero'] and e['data']]
    for e in ours:
        if not (e['zero'] and e['data']):
            continue
        if asked and not any(a <= e['start'] and e['start'] + e['length'] <= b for a, b in told):
            raise Failed('QEMU calls it data: %s' % e)
        if not is_hole(files[e['depth']], e['offset'], e['length']):
            raise Failed('no hole: %s' % e)
    for a, b in told:
        seen = sum(min(b, e['start'] + e['length']) - max(a, e['start']) for e in ours
                   if e['zero'] and e['data'] and e['start'] < b and a < e['start'] + e['length'])
        if seen != b - a:
            raise Failed('QEMU calls %d to %d zero, we only %d bytes of it' % (a, b, seen))
    for e in ours + theirs:
        e['zero'] &= not e['data']
    return len(told)


def same_map(image, holes=None):
    ours, theirs = varve_json('img', 'map', '--output=json', image), json.loads(run('qemu-img', 'map', '--output=json', image))
    files = [e['filename'] for e in json.loads(run('qemu-img', 'info', '--backing-chain', '--output=json', image))]
    told = take_holes(ours, theirs, files)
    if holes and not told:
        raise Failed('QEMU sees no holes in %s' % image)
    keys = ('start', 'length', 'depth', 'zero', 'data', 'offset', 'present')

    def split(extents):
        """neighbours that say the same, put together: the two programs need not merge alike"""
        out = []
        for e in extents:
            e = {k: e[k] for k in keys if k in e}
            if not e['present']:
                e.pop('offset', None)   # QEMU also tells where an unallocated subcluster would lie
            if out:
                p = out[-1]
                same = all(p.get(k) == e.get(k) for k in ('depth', 'zero', 'data', 'present'))
                if same and ('offset' in p) == ('offset' in e) and ('offset' not in e or p['offset'] + p['length'] == e['offset']):
                    p['length'] += e['length']
                    continue
            out.append(e)
        return out
    a, b = split(ours), split(theirs)
    if a != b:
        for x, y in itertools.zip_longest(a, b):
            if x != y:
                raise Failed('map of %s:\n  ours   %s\n  theirs %s' % (image, x, y))


def same_data(image):
    run('qemu-img', 'convert', '-O', 'raw', image, 'theirs.raw')
    varve('img', 'convert', '-O', 'raw', image, 'ours.raw')
    if digest('ours.raw') != digest('theirs.raw'):
        raise Failed('content of %s differs' % image)
    varve('img', 'convert', '-O', 'qcow2', image, 'ours.qcow2')
    check('ours.qcow2')
    run('qemu-img', 'compare', '-f', 'qcow2', '-F', 'raw', 'ours.qcow2', 'theirs.raw')


def all_options():
    for bits in range(9, 22):
        yield {'cluster_size': 1 << bits}
        if bits >= 14:
            yield {'cluster_size': 1 << bits, 'extended_l2': 'on'}
    for rb in (1, 2, 4, 8, 32, 64):
        yield {'refcount_bits': rb}
    yield {'compat': '0.10'}
    yield {'compat': '0.10', 'cluster_size': 4096}
    yield {'lazy_refcounts': 'on'}
    yield {'compression_type': 'zstd'}
    yield {'compression_type': 'zstd', 'extended_l2': 'on'}
    for p in ('metadata', 'falloc', 'full'):
        yield {'preallocation': p}
        yield {'preallocation': p, 'extended_l2': 'on', 'cluster_size': 131072}


def main():
    n = 0
    for o in all_options():
        cluster = int(o.get('cluster_size', 65536))
        run('qemu-img', 'create', '-q', '-f', 'qcow2', '-o', ','.join('%s=%s' % kv for kv in o.items()), 't.qcow2', str(SIZE))
        for scribbled in (False, True):
            if scribbled:
                scribble('t.qcow2', cluster, o.get('refcount_bits') != 1, o.get('compat') != '0.10')
            try:
                same_info('t.qcow2')
                same_map('t.qcow2', not scribbled and o == {'preallocation': 'metadata'})
                same_data('t.qcow2')
            except Failed as e:
                raise Failed('%s%s: %s' % (o, ' written' if scribbled else '', e))
            n += 1
    # chains: layers of different formats, sizes and cluster sizes, raw at the bottom
    for r in range(12 if LONG else 5):
        base = rnd.choice(['raw', 'qcow2'])
        size = rnd.choice([SIZE, SIZE // 2 // 512 * 512, SIZE + (1 << 20)])
        run('qemu-img', 'create', '-q', '-f', base, 'l0', str(size))
        qio('l0', *['write -q -P %d %d %d' % (rnd.randrange(1, 255), k * 131072, 100 * 512) for k in range(8)], fmt=base)
        back, fmt = 'l0', base
        for k in range(1, rnd.choice([2, 3, 6])):
            name, cs = 'l%d' % k, 1 << rnd.randrange(9, 22)
            opts = 'cluster_size=%d' % cs + (',extended_l2=on' if cs >= 16384 and rnd.random() < .5 else '')
            size = rnd.choice([SIZE, SIZE // 2 // 512 * 512, SIZE + (1 << 20)])
            run('qemu-img', 'create', '-q', '-f', 'qcow2', '-o', opts, '-b', back, '-F', fmt, name, str(size))
            subprocess.run(['qemu-io', '-f', 'qcow2', name], stdout=subprocess.DEVNULL, input='\n'.join(
                'write -q -P %d %d %d' % (rnd.randrange(1, 255), rnd.randrange(size // 512 - 600) * 512, rnd.randrange(1, 500) * 512)
                for _ in range(10)).encode(), check=True)
            back, fmt = name, 'qcow2'
        same_info(back)
        same_map(back)
        same_data(back)
        ours = varve_json('img', 'info', '--backing-chain', '--output=json', back)
        theirs = json.loads(run('qemu-img', 'info', '--backing-chain', '--output=json', back))
        if [(o['format'], o['virtual-size']) for o in ours] != [(o['format'], o['virtual-size']) for o in theirs]:
            raise Failed('info --backing-chain of %s differs' % back)
        n += 1
    done('%d images read as QEMU reads them' % n)


main()
