#!/usr/bin/env python3
"""Instructions a request, counted by callgrind: the same on a busy machine as on an idle one.

usage: profile.py VARVE --label NAME [--json bench.json] [--loads RE] [--qsd PROGRAM]

A load is run twice, with 3000 requests and with 7000 (what is cold is over by then); what differs, divided by the
difference of the requests, is what a request costs in user code of the server. Where valgrind has no io_uring, varve's
threads stand in for it, in all columns alike. The result becomes a column of docs/performance.md (one of the same name is
replaced): run it before a change and after it.
"""
import argparse, collections, json, os, re, shutil, subprocess, sys, tempfile
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from images import MIB, chain, fill, qcow2, raw
from servers import Qemu, Varve

SIZE = 512 * MIB
LOADS = {
    'read, raw': ('raw', {'rw': 'randread'}),
    'read, base': ('base', {'rw': 'randread'}),
    'read, base, depth 1': ('base', {'rw': 'randread', 'depth': 1}),
    'read, 8 layers': ('chain', {'rw': 'randread', 'span': 64 * MIB}),
    'write, raw': ('raw', {'rw': 'randwrite'}),
    'write, base': ('base', {'rw': 'randwrite'}),
    'write, new subcluster': ('overlay', {'rw': 'randwrite', 'once': True}),
    'write, new cluster, copying': ('plain', {'rw': 'randwrite', 'once': True, 'slots': SIZE // 65536, 'slot-len': 4096}),
    'write and flush': ('overlay', {'rw': 'randwrite', 'fsync': 1, 'depth': 4}),
}


def image(folder, kind):
    p = folder + '/image'
    if kind == 'raw':
        return raw(p, SIZE, True)
    if kind == 'base':
        return fill(qcow2(p, SIZE, 'preallocation=metadata'), SIZE)
    if kind == 'chain':
        return chain(folder, 'c', SIZE, 8)[-1]
    base = fill(qcow2(folder + '/base', SIZE, 'preallocation=metadata'), SIZE)
    return qcow2(p, SIZE, 'cluster_size=128k,extended_l2=on,preallocation=metadata' if kind == 'overlay' else '', base)


class Grinder:
    """a server's program, run under callgrind"""

    def __init__(self, program, folder):
        self.program, self.folder = program, folder

    def run(self, kind, args, count, nbdload):
        """({function: instructions}, requests)"""
        for f in os.listdir(self.folder):
            os.unlink(os.path.join(self.folder, f))
        img, out = image(self.folder, kind), self.folder + '/callgrind.out'
        plain = subprocess.Popen
        tool = ['valgrind', '--tool=callgrind', '--callgrind-out-file=' + out, '--error-limit=no']
        subprocess.Popen = lambda argv, **kw: plain(tool + argv, **kw)          # whatever start() runs
        try:
            s = self.program.start(img, self.folder, 's')
        finally:
            subprocess.Popen = plain
        argv = [nbdload, s.sock, '--secs', '0', '--count', str(count), '--no-final-flush']
        for k, v in args.items():
            argv += ['--' + k] + ([] if v is True else [str(v)])
        r = json.loads(subprocess.run(argv, stdout=subprocess.PIPE, check=True, text=True, timeout=300).stdout)
        s.stop()
        text = subprocess.run(['callgrind_annotate', '--threshold=100', '--auto=no', out], stdout=subprocess.PIPE, text=True).stdout
        functions = collections.Counter()
        for n, name in re.findall(r'^\s*([\d,]+) (?:\([ \d.]+%\)\s+)?\S*?:(\S+)', text, re.M):
            functions[name] += int(n.replace(',', ''))
        return functions, r['ios']


def cost(g, kind, args, nbdload):
    few, n = g.run(kind, args, 3000, nbdload)
    many, m = g.run(kind, args, 7000, nbdload)
    each = {f: (many[f] - few[f]) / (m - n) for f in many | few}
    top = sorted(((f, round(v)) for f, v in each.items() if v >= 1), key=lambda x: -x[1])
    return {'instructions': round(sum(each.values())), 'top': top[:20]}


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument('varve')
    a.add_argument('--label', required=True)
    a.add_argument('--json', default=os.environ.get('BENCH_JSON', 'bench.json'))
    a.add_argument('--loads', default='.')
    a.add_argument('--nbdload', help='the client (default: bench/nbdload beside VARVE)')
    a.add_argument('--qsd', help='profile this qemu-storage-daemon instead ("" for the one in PATH)')
    A = a.parse_args()
    if not shutil.which('valgrind'):
        sys.exit('valgrind is not installed')
    program = Varve(A.varve) if A.qsd is None else Qemu(A.qsd or None)
    nbdload = A.nbdload or os.path.join(os.path.dirname(os.path.abspath(A.varve)), '..', '..', 'bench', 'nbdload')
    with tempfile.TemporaryDirectory(prefix='varve-bench-', dir='/var/tmp') as folder:
        out = {}
        for name, (kind, args) in LOADS.items():
            if re.search(A.loads, name):
                out[name] = cost(Grinder(program, folder), kind, args, nbdload)
                print('%-30s %7d instructions a request: %s' % (name, out[name]['instructions'], ', '.join('%s %d' % t for t in out[name]['top'][:6])), flush=True)
    r = json.load(open(A.json)) if os.path.exists(A.json) else {
        'quick': False, 'done': [], 'cells': [], 'skipped': {}, 'failed': {}, 'problems': [], 'included': [], 'about': {}}
    old = [p for p in r.get('profiles', []) if p['label'] == A.label]
    if old:
        old[0]['loads'].update(out)
    else:
        r.setdefault('profiles', []).append({'label': A.label, 'loads': out})
    with open(A.json + '.new', 'w') as f:
        json.dump(r, f, indent=0, separators=(',', ':'))
    os.replace(A.json + '.new', A.json)


if __name__ == '__main__':
    main()
