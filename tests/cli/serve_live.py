"""Snapshots, merges and a rollback while a client writes and checks what it reads."""
import os, resource, sys, time
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'lib'))
from proc import *
from qmpclient import QmpError
from nbdclient import Nbd, NbdError, Load
from serveprog import Serve

need('qemu-img')
D = folder()
SIZE = 64 << 20
OPTS = ('cluster_size=64k', 'extended_l2=on,cluster_size=128k')


def image(name, below=None, opts=OPTS[0]):
    path = '%s/%s.qcow2' % (D, name)
    run('qemu-img', 'create', '-q', '-f', 'qcow2', '-o', opts, *(['-b', below, '-F', 'qcow2'] if below else []), path, str(SIZE))
    return path


def snapshot(s, path, name):
    s.add(path, name, backing=None)
    s.qmp.execute('blockdev-snapshot', node=s.top(), overlay=name)


def same(path, data, what):
    """the image, read by qemu-img, holds these bytes"""
    raw = D + '/compare.raw'
    with open(raw, 'wb') as f:
        f.write(data)
    rc, out = run('qemu-img', 'compare', '-f', 'qcow2', '-F', 'raw', path, raw, rc=None)
    if rc:
        raise Failed('%s: %s' % (what, out))


def job(s, load, id, speed_ops=100):
    """waits for the job's end under load"""
    load.wait_ops(speed_ops)
    e = s.qmp.wait_event('JOB_STATUS_CHANGE', 120, id=id, status='null')
    if not e:
        raise Failed('job %s does not end: %r' % (id, s.qmp.execute('query-jobs')))
    done_event = [x for x in s.qmp.events if x['event'] == 'BLOCK_JOB_COMPLETED' and x['data']['device'] == id]
    if len(done_event) != 1 or 'error' in done_event[0]['data']:
        raise Failed('job %s: %r' % (id, s.qmp.events))


def chain_under_load(seed):
    """base <- s1 <- s2 <- s3 <- top grows under load, is merged in both directions, and stays right"""
    files = [image('base%d' % seed)]
    with Serve(files[0], D) as s:
        load = Load(s.nbd, SIZE, SEED + seed)
        load.wait_ops(300)
        for i in range(1, 5):
            files.append(image('l%d-%d' % (seed, i), files[-1], OPTS[i % 2]))
            snapshot(s, files[-1], 'l%d' % i)
            load.wait_ops(150)
        names = [n['node-name'] for n in s.qmp.execute('query-named-block-nodes', flat=True)]
        top, l3, l2, l1, base = names
        s.qmp.execute('block-commit', {'job-id': 'c1', 'device': top, 'top-node': l2, 'base-node': l1})
        job(s, load, 'c1')
        s.qmp.execute('block-stream', {'job-id': 's1', 'device': l3, 'base-node': base})
        job(s, load, 's1')
        s.qmp.execute('block-stream', {'job-id': 's2', 'device': top, 'base-node': base})
        job(s, load, 's2')
        s.qmp.execute('block-commit', {'job-id': 'c2', 'device': top})
        if not s.qmp.wait_event('BLOCK_JOB_READY', 120, device='c2'):
            raise Failed('active commit is never ready')
        load.wait_ops(200)
        s.qmp.execute('job-complete', id='c2')
        job(s, load, 'c2')
        left = [n['file'] for n in s.qmp.execute('query-named-block-nodes', flat=True)]
        if left != [files[0]]:
            raise Failed('after all merges the chain is %r' % left)
        data = load.stop()
        print('chain %d: %d requests, longest gate %.1f ms' %
              (seed, load.ops, s.qmp.execute('x-varve-stats')['chain']['max_gate_closed_ns'] / 1e6))
        s.stop()
    for f in files:
        check(f)
    same(files[0], data, 'base after all merges')


def rate_pause_cancel_quit():
    base = image('rbase')
    top = image('rtop', base)
    with Serve(base, D) as s:
        with Nbd(s.nbd) as n:
            for off in range(0, SIZE, 1 << 20):
                n.write(off, bytes([off >> 20 | 1]) * (1 << 20))
        snapshot(s, top, 't')
        load = Load(s.nbd, SIZE, SEED + 77, pause=.05)   # slow: what it writes need not be copied any more
        start = time.time()
        s.qmp.execute('block-stream', {'job-id': 'j', 'device': 't', 'speed': 8 << 20})
        load.wait_ops(10)
        time.sleep(max(0, 2 - (time.time() - start)))
        j, = s.qmp.execute('query-block-jobs')
        passed = time.time() - start
        # a burst of a few copies at once is allowed on top of the rate
        if not (4 << 20) < j['offset'] < (8 << 20) * passed + (24 << 20) or j['len'] != SIZE:
            raise Failed('rate of 8 MiB/s for %.1f s: %r' % (passed, j))
        s.qmp.execute('job-pause', id='j')
        s.qmp.wait_event('JOB_STATUS_CHANGE', 20, id='j', status='paused')
        time.sleep(.3)
        first = s.qmp.execute('query-block-jobs')[0]['offset']
        load.wait_ops(10)
        time.sleep(.7)
        if s.qmp.execute('query-block-jobs')[0]['offset'] != first:
            raise Failed('a paused job goes on')
        s.qmp.execute('job-resume', id='j')
        s.qmp.wait_event('JOB_STATUS_CHANGE', 20, id='j', status='running')
        s.qmp.execute('job-cancel', id='j')
        if not s.qmp.wait_event('BLOCK_JOB_CANCELLED', 20, device='j'):
            raise Failed('no cancelled event')
        load.wait_ops(10)
        s.qmp.execute('block-stream', {'job-id': 'k', 'device': 't', 'speed': 1 << 20})
        load.wait_ops(10)
        data = load.stop()
        s.qmp.execute('quit')
        if not s.qmp.wait_event('BLOCK_JOB_CANCELLED', 20, device='k'):
            raise Failed('quit does not cancel the job')
        s.ended()
    check(base)
    check(top)
    same(top, data, 'top after a cancelled job')


def snapshot_exports():
    """a snapshot stays as it was; deleting it is refused while somebody reads it"""
    base = image('ebase')
    s1 = image('es1', base)
    top = image('etop', s1)
    with Serve(base, D) as s:
        load = Load(s.nbd, SIZE, SEED + 5)
        load.wait_ops(300)
        load.enough.set()
        load.thread.join()
        frozen = bytes(load.model)
        load.stop()
        snapshot(s, s1, 's1')
        snapshot(s, top, 'top')
        load = Load(s.nbd, SIZE, SEED + 6)
        node = s.nodes()[base]['node-name']
        s.qmp.execute('block-export-add', {'type': 'nbd', 'id': 'vol@a', 'node-name': node, 'name': 'vol@a'})
        for extra in ({'writable': True}, {}):
            try:
                s.qmp.execute('block-export-add', {'type': 'nbd', 'id': 'x', 'node-name': node, 'name': 'vol@a', **extra})
                raise Failed('a second export vol@a, or a writable one of a snapshot')
            except QmpError:
                pass
        load.wait_ops(200)
        with Nbd(s.nbd, 'vol@a') as n:
            if not n.read_only or n.read(0, 1 << 20) != frozen[:1 << 20]:
                raise Failed('export of a snapshot shows something else')
            try:
                n.write(0, bytes(512))
                raise Failed('a snapshot was written')
            except NbdError:
                pass
            commit = {'job-id': 'c', 'device': 'top', 'top-node': 's1', 'base-node': node}
            for refused, args in (('block-commit', commit), ('block-export-del', {'id': 'vol@a'})):
                try:
                    s.qmp.execute(refused, args)
                    raise Failed(refused + ' of a snapshot in use is done')
                except QmpError as e:
                    if 'in use' not in e.desc:
                        raise
            for off in range(0, SIZE, 1 << 20):
                if n.read(off, 1 << 20) != frozen[off:off + (1 << 20)]:
                    raise Failed('the snapshot changed at %d' % off)
        for _ in range(100):
            if not [e for e in s.qmp.execute('query-block-exports') if e['id'] == 'vol@a'][0]['x-varve-connections']:
                break
            time.sleep(.02)
        s.qmp.execute('block-export-del', id='vol@a')
        s.qmp.execute('block-commit', commit)
        job(s, load, 'c')
        data = load.stop()
        s.stop()
    for f in (base, s1, top):
        check(f)
    same(top, data, 'top after deleting a snapshot')


def rollback():
    base = image('bbase')
    cur = image('bcur', base)
    again = image('bagain', base)
    third = image('bthird', base)
    with Serve(base, D, '--volume', 'vol') as s:
        with Nbd(s.nbd) as n:
            n.write(0, b'A' * (8 << 20))
            n.flush()
        snapshot(s, cur, 'cur')
        node = s.nodes()[base]['node-name']
        s.qmp.execute('block-export-add', {'type': 'nbd', 'id': 'vol@s', 'node-name': node, 'name': 'vol@s'})
        s.add(again, 'again')
        with Nbd(s.nbd) as n:
            n.write(1 << 20, b'B' * (1 << 20))
            try:
                s.qmp.execute('x-varve-rollback', node_name='again')
                raise Failed('rollback under a writing client')
            except QmpError as e:
                if 'in use' not in e.desc:
                    raise
            n.write(3 << 20, b'C' * (1 << 20))
            s.qmp.execute('x-varve-rollback', node_name='again', force=True)
            try:
                n.read(0, 512)
                raise Failed('the client was not dropped')
            except (EOFError, OSError):
                pass
        if s.top() != 'again' or set(s.nodes()) != {again, base}:
            raise Failed('after a rollback the chain is %r' % list(s.nodes()))
        for export in ('', 'vol', 'vol@s'):
            with Nbd(s.nbd, export) as n:
                if n.read(0, 8 << 20) != b'A' * (8 << 20):
                    raise Failed('export %r after the rollback' % export)
        check(cur)                    # closed and unlocked: it may be dropped now
        os.unlink(cur)
        with Nbd(s.nbd) as n:
            n.write(0, b'D' * 4096)
        # another one without a client; the export of the old top's layer moves along
        s.add(third, 'third')
        for _ in range(100):
            try:
                s.qmp.execute('x-varve-rollback', node_name='third')
                break
            except QmpError:          # the server may not have seen yet that the client left
                time.sleep(.02)
        with Nbd(s.nbd) as n:
            if n.read(0, 4096) != b'A' * 4096:
                raise Failed('second rollback')
            n.write(0, b'E' * 4096)
        s.stop()
    for f in (base, again, third):
        check(f)
    with open(base, 'rb') as f:
        if b'E' * 4096 in f.read():
            raise Failed('the snapshot was written')


def job_fails():
    """the base cannot grow: the job ends with an error, the disk reads as before, and the next job goes well"""
    base = image('fbase')
    top = image('ftop', base)
    run('qemu-io', '-f', 'qcow2', '-c', 'write -P 9 0 24M', top)
    with Serve(top, D, max_file=(26 << 20)) as s:
        names = [n['node-name'] for n in s.qmp.execute('query-named-block-nodes', flat=True)]
        ov = image('fov', top)
        snapshot(s, ov, 'ov')
        with Nbd(s.nbd) as n:
            n.write(24 << 20, b'x' * 65536)
            s.qmp.execute('block-commit', {'job-id': 'good', 'device': 'ov', 'top-node': names[0], 'base-node': names[1],
                                           'speed': 1 << 20})
            s.qmp.execute('job-cancel', id='good')
            if not s.qmp.wait_event('JOB_STATUS_CHANGE', 30, id='good', status='null'):
                raise Failed('cancelled job does not end')
            before = n.read_all()
            resource.prlimit(s.p.pid, resource.RLIMIT_FSIZE, (4 << 20, 26 << 20))
            s.qmp.execute('block-commit', {'job-id': 'bad', 'device': 'ov', 'top-node': names[0], 'base-node': names[1],
                                           'auto-dismiss': False})
            e = s.qmp.wait_event('BLOCK_JOB_ERROR', 30, device='bad')
            if not e or e['data'] != {'device': 'bad', 'operation': 'write', 'action': 'report'}:
                raise Failed('error event: %r' % e)
            e = s.qmp.wait_event('BLOCK_JOB_COMPLETED', 30, device='bad')
            if not e or 'File too large' not in e['data'].get('error', ''):
                raise Failed('completed event: %r' % e)
            j, = s.qmp.execute('query-jobs')
            if j['status'] != 'concluded' or 'File too large' not in j['error']:
                raise Failed('failed job: %r' % j)
            s.qmp.execute('job-dismiss', id='bad')
            if n.read_all() != before:
                raise Failed('a failed job changed the disk')
            resource.prlimit(s.p.pid, resource.RLIMIT_FSIZE, (26 << 20, 26 << 20))
            s.qmp.execute('block-commit', {'job-id': 'again', 'device': 'ov', 'top-node': names[0], 'base-node': names[1]})
            e = s.qmp.wait_event('BLOCK_JOB_COMPLETED', 30, device='again')
            if not e or 'error' in e['data'] or n.read_all() != before:
                raise Failed('the job after a failed one: %r' % e)
        s.stop()
        if s.errors().count("job 'bad' failed") != 1:
            raise Failed('the failed job is not logged once: ' + s.errors())
    for f in (base, top, ov):
        check(f)
    same(ov, before, 'disk after a failed and a good commit')


for seed in range(6 if LONG else 2):
    chain_under_load(seed)
rate_pause_cancel_quit()
snapshot_exports()
rollback()
job_fails()
done('live changes')
