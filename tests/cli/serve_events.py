"""The same jobs on `varve serve` and on qemu-storage-daemon, both run here: the events must come in the same order with
the same data, and the images must hold the same bytes afterwards."""
import os, subprocess, sys
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'lib'))
from proc import *
from qmpclient import Qmp
from serveprog import Serve

need('qemu-img', 'qemu-io', 'qemu-storage-daemon')
D = folder()
LAYERS = ('base', 'mid', 'top')


def make(where):
    os.makedirs(where)
    below = None
    for i, name in enumerate(LAYERS):
        path = '%s/%s.qcow2' % (where, name)
        run('qemu-img', 'create', '-q', '-f', 'qcow2', *(['-b', below, '-F', 'qcow2', path] if below else [path, '16M']))
        qio(path, 'write -P %d %dM 4M' % (i + 1, i * 2))
        below = path


def shape(events):
    """what must agree: names, order, ids, states, types; not times and figures"""
    out = []
    for e in events:
        if e['event'].startswith('X_'):
            continue
        d = {k: v for k, v in e.get('data', {}).items() if k in ('status', 'id', 'device', 'type', 'error')}
        out.append((e['event'], tuple(sorted(d.items()))))
    return out


class Qsd:
    def __init__(self, where):
        nodes, below = [], None
        for name in LAYERS:
            node = {'driver': 'qcow2', 'node-name': name, 'file': {'driver': 'file', 'filename': '%s/%s.qcow2' % (where, name)},
                    'backing': below, 'read-only': name != 'top'}
            nodes += ['--blockdev', json.dumps(node)]
            below = name
        self.p = subprocess.Popen(['qemu-storage-daemon', '--chardev', 'socket,id=c,path=%s/qsd,server=on,wait=off' % where,
                                   '--monitor', 'chardev=c', *nodes])
        self.qmp, self.names = Qmp(where + '/qsd'), dict(zip(LAYERS, LAYERS))

    def stop(self):
        self.qmp.execute('quit')
        self.p.wait(60)


class Varve:
    def __init__(self, where):
        self.s = Serve(where + '/top.qcow2', where, export=False)
        self.qmp = self.s.qmp
        self.names = {os.path.basename(f)[:-6]: n['node-name'] for f, n in self.s.nodes().items()}

    def stop(self):
        self.qmp.execute('quit')
        self.s.ended()


def commit_middle(q, n):
    q.execute('block-commit', {'job-id': 'j', 'device': n['top'], 'top-node': n['mid'], 'base-node': n['base']})
    return q.drain(1)


def commit_active(q, n):
    q.execute('block-commit', {'job-id': 'j', 'device': n['top']})
    if not q.wait_event('BLOCK_JOB_READY', 30):
        raise Failed('never ready')
    q.execute('job-complete', id='j')
    return q.drain(1)


def commit_by_hand(q, n):
    """every step asked for"""
    q.execute('block-commit', {'job-id': 'j', 'device': n['top'], 'auto-finalize': False, 'auto-dismiss': False})
    out = q.drain(1)
    q.execute('job-pause', id='j')
    out += q.drain(.3)
    q.execute('job-resume', id='j')
    out += q.drain(.3)
    q.execute('job-complete', id='j')
    out += q.drain(1)
    q.execute('job-finalize', id='j')
    out += q.drain(1)
    q.execute('job-dismiss', id='j')
    return out + q.drain(.3)


def commit_cancelled(q, n):
    q.execute('block-commit', {'job-id': 'j', 'device': n['top']})
    out = q.drain(1)
    q.execute('job-cancel', id='j')
    return out + q.drain(.5)


def stream_all(q, n):
    q.execute('block-stream', {'job-id': 'j', 'device': n['top']})
    return q.drain(1)


def stream_part(q, n):
    q.execute('block-stream', {'job-id': 'j', 'device': n['top'], 'base-node': n['base']})
    return q.drain(1)


def stream_paused_and_cancelled(q, n):
    q.execute('block-stream', {'job-id': 'j', 'device': n['top'], 'speed': 100000})
    out = q.drain(.3)
    q.execute('job-pause', id='j')
    out += q.drain(.5)
    q.execute('job-resume', id='j')
    out += q.drain(.5)
    q.execute('block-job-cancel', device='j')
    return out + q.drain(.5)


def cancelled_at_the_end(q, n):
    q.execute('block-stream', {'job-id': 'j', 'device': n['top'], 'auto-finalize': False, 'auto-dismiss': False})
    out = q.drain(1)
    q.execute('job-cancel', id='j')
    out += q.drain(.5)
    q.execute('job-dismiss', id='j')
    return out + q.drain(.3)


for scene in (commit_middle, commit_active, commit_by_hand, commit_cancelled, stream_all, stream_part,
              stream_paused_and_cancelled, cancelled_at_the_end):
    results = []
    for kind in (Qsd, Varve):
        where = '%s/%s-%s' % (D, scene.__name__, kind.__name__)
        make(where)
        side = kind(where)
        results.append(shape(scene(side.qmp, side.names)))
        side.stop()
        for name in LAYERS:
            check('%s/%s.qcow2' % (where, name))
    if results[0] != results[1] or len(results[0]) < 4:
        raise Failed('%s: QEMU sends\n  %s\nvarve\n  %s' % (scene.__name__, '\n  '.join(map(str, results[0])),
                                                          '\n  '.join(map(str, results[1]))))
    # the disk reads the same: an active commit that was completed leaves it in the base
    last = 'base' if scene in (commit_active, commit_by_hand) else 'top'
    run('qemu-img', 'compare', *['%s/%s-%s/%s.qcow2' % (D, scene.__name__, k.__name__, last) for k in (Qsd, Varve)])
    print('%s: %d events alike' % (scene.__name__, len(results[0])))
done('events as from qemu-storage-daemon')
