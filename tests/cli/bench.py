#!/usr/bin/env python3
"""What the measures of bench/ rest on: images that are what they are said to be, a client that counts right, verdicts."""
import json, os, subprocess, sys
here = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(here, '..', 'lib'), os.path.join(here, '..', '..', 'bench')]
from proc import Failed, Server, check, done, folder, need, run
import images
from targets import Check

MIB = 1 << 20
LOAD = os.path.join(os.path.dirname(os.path.abspath(os.environ['VARVE'])), '..', '..', 'bench', 'nbdload')


def must(ok, what):
    if not ok:
        raise Failed(what)


def load(sock, *options):
    return json.loads(subprocess.run([LOAD, sock, *options], check=True, stdout=subprocess.PIPE).stdout)


def chains(d):
    """the layers are valid, each holds its share, and together they hold every block"""
    for sub in (False, True):
        layers = images.chain(d, 'sub' if sub else 'whole', 16 * MIB, 4, sub)
        for p in layers:
            check(p)
        found = json.loads(run('qemu-img', 'map', '--output=json', layers[-1]))
        unit = 4096 if sub else 65536
        share = [sum(e['length'] for e in found if e['depth'] == k and e['data']) // unit for k in range(4)]
        must(sum(share) == 16 * MIB // unit, 'blocks: %r' % share)
        must(min(share) > 16 * MIB // unit // 8, 'a layer holds too little: %r' % share)
    full = images.chain(d, 'full', 4 * MIB, 3, piece=MIB, full_base=True)
    found = json.loads(run('qemu-img', 'map', '--output=json', full[0]))
    must(sum(e['length'] for e in found if e['data']) == 4 * MIB, 'the base is not full')


def fragments(d):
    for among in (None, 4096):
        p = images.fragmented(d + '/frag', 1 << 30, 1024, among)
        check(p)
        found = [e for e in json.loads(run('qemu-img', 'map', '--output=json', p)) if 'offset' in e]
        must(sum(e['length'] for e in found) == 1024 * 65536, 'clusters: %d bytes' % sum(e['length'] for e in found))
        must(len(found) > 900, 'in order after all: %d runs' % len(found))


def client(d):
    """--once writes every place once; counts, flushes and bounds are kept"""
    raw = d + '/disk.raw'
    with open(raw, 'wb') as f:
        f.truncate(8 * MIB)
    with Server(raw, d + '/s', '--format', 'raw') as s:
        r = load(s.sock, '--rw', 'randwrite', '--once', '--secs', '0', '--from', str(MIB), '--span', str(4 * MIB), '--conns', '3', '--depth', '5')
        must((r['ios'], r['errors'], r['bytes']) == (1024, 0, 4 * MIB), 'once: %r' % r)
        must(r['lat']['count'] == 1024 and sum(r['lat']['octaves']) == 1024, 'histogram: %r' % r['lat'])
        r = load(s.sock, '--rw', 'randwrite', '--secs', '0', '--count', '64', '--depth', '4', '--fsync', '4', '--from', str(6 * MIB))
        must(r['ios'] == 64 and 12 <= r['flush']['count'] <= 16, 'fsync: %r' % r)
        r = load(s.sock, '--rw', 'randread', '--secs', '.3', '--rate', '200')
        must(40 <= r['ios'] <= 62, 'rate: %d requests' % r['ios'])
        s.stop()
    with open(raw, 'rb') as f:
        data = f.read()
    blocks = [any(data[o:o + 4096]) for o in range(0, 8 * MIB, 4096)]
    must(blocks[:256] == [False] * 256 and blocks[256:1280] == [True] * 1024 and not any(blocks[1280:1536]), 'wrong places were written')


def verdicts():
    v = lambda values, target, op='>=': Check('w', 'k', 'r', 'l', values, target, op).verdict
    must(v([1.0, 1.1, 1.2], .95) == 'ok', 'above')
    must(v([.8, .81, .79], .95) == 'BELOW', 'below')
    must(v([.7, 1.3], .95) == 'noise' and v([.9, .97, .95], .96) == 'noise', 'the spread hides the distance')
    must(v([3, 3.1], 2, '<=') == 'ABOVE' and v([1, 1.1], 2, '<=') == 'ok', 'at most')
    must(v([3], 2) == 'noise' and Check('w', 'k', 'r', 'l', [3], 2, '<=', ' KiB').verdict == 'ABOVE', 'one turn')
    must(v([1], None) == '', 'no target')


need('qemu-img')
d = folder()
chains(d)
fragments(d)
client(d)
verdicts()
done('images, client and verdicts')
