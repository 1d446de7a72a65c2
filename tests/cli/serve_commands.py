"""Every QMP command of a served disk once right and once wrong, with QEMU's texts where QEMU has the command."""
import os, sys
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'lib'))
from proc import *
from qmpclient import Qmp, QmpError
from nbdclient import Nbd, NbdError
from serveprog import Serve

need('qemu-img', 'qemu-io')
D = folder()
MB = 1 << 20


def image(name, size='16M', below=None, *ops):
    path = '%s/%s.qcow2' % (D, name)
    run('qemu-img', 'create', '-q', '-f', 'qcow2', *(['-b', below, '-F', 'qcow2'] if below else []), path,
        *([size] if size else []))
    if ops:
        qio(path, *ops)
    return path


def refused(q, text, command, arguments=None, cls='GenericError', **more):
    """the command must fail, with `text` in the description"""
    try:
        got = q.execute(command, arguments, **more)
    except QmpError as e:
        if text not in e.desc or e.cls != cls:
            raise Failed('%s %r %r: %s, not %s: %s' % (command, arguments, more, e, cls, text))
        return
    raise Failed('%s %r %r: done (%r), not refused with: %s' % (command, arguments, more, got, text))


def equal(got, want, what):
    if got != want:
        raise Failed('%s: %r, not %r' % (what, got, want))


def commands(s):
    q = s.qmp
    names = {c['name'] for c in q.execute('query-commands')}
    for must in ('qmp_capabilities query-version query-commands query-named-block-nodes query-block-exports blockdev-add '
                 'blockdev-del blockdev-snapshot block-commit block-stream query-jobs query-block-jobs job-pause '
                 'job-resume job-cancel job-complete job-finalize job-dismiss block-job-cancel block-job-pause '
                 'block-job-resume block-job-complete block-job-set-speed block_resize transaction nbd-server-start '
                 'nbd-server-stop block-export-add block-export-del x-varve-stats x-varve-rollback x-varve-rename quit').split():
        if must not in names:
            raise Failed('query-commands lacks ' + must)
    for name in names - {'quit', 'qmp_capabilities'}:
        try:
            q.execute(name, {'no such': 1})
        except QmpError as e:
            if e.cls == 'CommandNotFound':
                raise Failed('query-commands shows %s, which is not there' % name)
        else:
            raise Failed('%s takes an unknown argument' % name)
    if 'varve' not in q.execute('query-version')['package']:
        raise Failed('query-version does not say varve')
    refused(q, 'The command nope has not been found', 'nope', cls='CommandNotFound')
    refused(q, "Invalid parameter type for 'flat', expected: boolean", 'query-named-block-nodes', {'flat': 1})


def nodes(s, base, mid, top):
    got = s.qmp.execute('query-named-block-nodes')
    equal([n['file'] for n in got], [top, mid, base], 'order of the nodes')
    equal(len({n['node-name'] for n in got}), 3, 'different node names')
    equal([n['ro'] for n in got], [False, True, True], 'ro')
    equal([n['backing_file_depth'] for n in got], [2, 1, 0], 'backing_file_depth')
    t = got[0]
    equal((t['drv'], t['image']['virtual-size'], t['image']['format'], t['image']['cluster-size']),
          ('qcow2', 16 * MB, 'qcow2', 65536), 'image')
    equal(t['image']['backing-filename'], mid, 'backing-filename')
    equal(t['image']['full-backing-filename'], mid, 'full-backing-filename')
    equal(t['image']['backing-image']['backing-image']['filename'], base, 'nested backing images')
    equal(t['cache'], {'writeback': True, 'direct': True, 'no-flush': False}, 'cache')
    equal(t['x-varve-volume'], 'p:vol', 'volume id')
    equal(set(json.loads(run('qemu-img', 'info', '-U', '--output=json', base))) - {'snapshots', 'children'} - set(got[2]['image']), set(),
          'fields of qemu-img info that are missing')
    if 'backing-image' in s.qmp.execute('query-named-block-nodes', flat=True)[0]['image']:
        raise Failed('flat shows backing images')


def blockdev(s, top):
    q = s.qmp
    ov = image('ov', '16M', top)
    f = {'driver': 'file', 'filename': ov}
    refused(q, "Parameter 'driver' is missing", 'blockdev-add', {'node-name': 'a'})
    refused(q, "Parameter 'driver' does not accept value 'vmdk'", 'blockdev-add', {'driver': 'vmdk', 'node-name': 'a', 'file': f})
    refused(q, "'node-name' must be specified for the root node", 'blockdev-add', {'driver': 'qcow2', 'file': f})
    refused(q, "Invalid node-name: '1a'", 'blockdev-add', {'driver': 'qcow2', 'node-name': '1a', 'file': f})
    refused(q, "Parameter 'file.x' is unexpected", 'blockdev-add', {'driver': 'qcow2', 'node-name': 'a', 'file': dict(f, x=1)})
    refused(q, "Parameter 'file.filename' is missing", 'blockdev-add', {'driver': 'qcow2', 'node-name': 'a', 'file': {'driver': 'file'}})
    refused(q, "does not accept value 'nbd'", 'blockdev-add', {'driver': 'qcow2', 'node-name': 'a', 'file': dict(f, driver='nbd')})
    refused(q, 'No such file or directory', 'blockdev-add', {'driver': 'qcow2', 'node-name': 'a', 'file': dict(f, filename=D + '/none')})
    refused(q, "not 'zzz'", 'blockdev-add', {'driver': 'qcow2', 'node-name': 'a', 'file': f, 'backing': 'zzz'})
    refused(q, 'no-flush', 'blockdev-add', {'driver': 'qcow2', 'node-name': 'a', 'file': f, 'cache': {'no-flush': True}})
    with open(D + '/text', 'w') as t:
        t.write('no image' * 1000)
    refused(q, 'not a qcow2 image', 'blockdev-add', {'driver': 'qcow2', 'node-name': 'a', 'file': {'driver': 'file', 'filename': D + '/text'}})
    for name, value in ('discard', 'keep'), ('detect-zeroes', 'maybe'):
        refused(q, "Parameter '%s' does not accept value '%s'" % (name, value), 'blockdev-add',
                {'driver': 'qcow2', 'node-name': 'a', 'file': f, name: value})
    refused(q, 'use discard=unmap, or detect-zeroes=on', 'blockdev-add',
            {'driver': 'qcow2', 'node-name': 'a', 'file': f, 'discard': 'ignore', 'detect-zeroes': 'unmap'})
    for want in 'on', 'unmap', 'off':
        s.add(ov, 'ov', **{'backing': None, 'detect-zeroes': want, 'discard': 'on', 'discard-no-unref': want == 'on'})
        equal(s.nodes()[ov]['detect_zeroes'], want, 'detect_zeroes')
        q.execute('blockdev-del', node_name='ov')
    s.add(ov, 'ov', backing=None, cache={'direct': True}, discard='unmap')
    refused(q, "Duplicate nodes with node-name='ov'", 'blockdev-add', {'driver': 'qcow2', 'node-name': 'ov', 'file': f})
    equal(s.nodes()[ov]['node-name'], 'ov', 'node name')
    rc, out = run('qemu-io', '-c', 'write 0 4k', ov, rc=None)
    if rc == 0:
        raise Failed('an added writable node is not locked')
    refused(q, "Failed to find node with node-name='zz'", 'blockdev-del', node_name='zz')
    refused(q, 'is in use', 'blockdev-del', node_name=s.top())
    q.execute('blockdev-del', node_name='ov')
    if ov in s.nodes():
        raise Failed('blockdev-del leaves the node')
    raw = D + '/disk.raw'
    with open(raw, 'wb') as r:
        r.truncate(16 * MB)
    q.execute('blockdev-add', {'driver': 'raw', 'node-name': 'r', 'file': {'driver': 'file', 'filename': raw}, 'read-only': True})
    equal(s.nodes()[raw]['ro'], True, 'a read-only node')
    refused(q, 'does not support backing images', 'blockdev-snapshot', node=s.top(), overlay='r')
    q.execute('blockdev-del', node_name='r')
    return ov


def snapshot(s, ov):
    q, top = s.qmp, s.top()
    refused(q, "Cannot find device='zz' nor node-name='zz'", 'blockdev-snapshot', node='zz', overlay='ov')
    refused(q, "Cannot find device='zz' nor node-name='zz'", 'blockdev-snapshot', node=top, overlay='zz')
    refused(q, 'The overlay already has a backing image', 'blockdev-snapshot', node=top, overlay=top)
    refused(q, 'being written', 'blockdev-add',
            {'driver': 'qcow2', 'node-name': 'a', 'file': {'driver': 'file', 'filename': ov}})  # it would open the top again
    s.add(image('side', '16M', mid), 'chained')
    refused(q, 'The overlay already has a backing image', 'blockdev-snapshot', node=top, overlay='chained')
    q.execute('blockdev-del', node_name='chained')
    s.add(ov, 'ro', **{'backing': None, 'read-only': True})
    refused(q, 'read-only', 'blockdev-snapshot', node=top, overlay='ro')
    q.execute('blockdev-del', node_name='ro')
    small = image('small', '8M')
    s.add(small, 'small', backing=None)
    refused(q, 'shorter', 'blockdev-snapshot', node=top, overlay='small')
    q.execute('blockdev-del', node_name='small')
    action = {'type': 'blockdev-snapshot', 'data': {'node': top, 'overlay': 'ov'}}
    refused(q, "Parameter 'type' does not accept value 'x'", 'transaction', {'actions': [dict(action, type='x')]})
    refused(q, "Cannot find device='ov' nor node-name='ov'", 'transaction', {'actions': [action]})
    refused(q, "Parameter 'overlay' is missing", 'transaction', {'actions': [dict(action, data={'node': top})]})
    refused(q, 'expected: object', 'transaction', {'actions': [1]})
    s.add(ov, 'ov', backing=top)
    second = {'type': 'blockdev-snapshot', 'data': {'node': top, 'overlay': 'nope'}}
    refused(q, 'nope', 'transaction', {'actions': [action, second]})
    equal(s.top(), top, 'the top after a refused transaction')
    q.execute('transaction', {'actions': []})
    q.execute('transaction', {'actions': [action]})
    equal(s.top(), 'ov', 'the top after a snapshot')
    e = q.wait_event('X_VARVE_PIVOT', 5, overlay='ov', node=top)
    if not e or not 0 < e['data']['gate-closed-ns'] < 10**10:
        raise Failed('pivot event: %r' % e)
    equal(q.execute('x-varve-stats')['last-pivot']['gate-closed-ns'], e['data']['gate-closed-ns'], 'last-pivot')


def jobs(s, base):
    q, top = s.qmp, s.top()
    names = [n['node-name'] for n in q.execute('query-named-block-nodes', flat=True)]
    refused(q, 'An explicit job ID is required for this node', 'block-commit', device=top)
    refused(q, "Device 'zz' not found", 'block-commit', device='zz', job_id='j', cls='DeviceNotFound')
    refused(q, 'Need a root block node', 'block-commit', device=names[1], job_id='j')
    refused(q, "Invalid job ID '1 j'", 'block-commit', device=top, job_id='1 j')
    refused(q, "nor node-name='xx'", 'block-commit', device=top, job_id='j', top_node='xx')
    refused(q, 'cannot commit an image into itself', 'block-commit', device=top, job_id='j', base_node=top)
    refused(q, 'is not a backing image of', 'block-commit', device=top, job_id='j', top_node=names[2], base_node=names[1])
    refused(q, "Parameter 'speed' expects a non-negative value", 'block-commit', device=top, job_id='j', speed=-1)
    refused(q, "Parameter 'on-error' does not accept value 'stop'", 'block-commit', {'on-error': 'stop'}, device=top, job_id='j')
    refused(q, "Can't find 'none'", 'block-commit', device=top, job_id='j', top='none')
    refused(q, "nor node-name='zz'", 'block-stream', device='zz', job_id='j')
    refused(q, 'is not a backing image of', 'block-stream', device=names[1], job_id='j', base_node=names[0])
    refused(q, 'streaming the entire chain', 'block-stream', {'backing-file': 'x'}, device=top, job_id='j')
    for verb in 'pause resume cancel complete finalize dismiss'.split():
        refused(q, 'Job not found', 'job-' + verb, id='zz')
    for verb in 'pause resume cancel complete'.split():
        refused(q, "Block job 'zz' not found", 'block-job-' + verb, device='zz', cls='DeviceNotActive')
    refused(q, "Block job 'zz' not found", 'block-job-set-speed', device='zz', speed=1, cls='DeviceNotActive')

    q.execute('block-commit', {'job-id': 'j1', 'device': top, 'top-node': names[1], 'base-node': names[2], 'speed': 65536,
                               'auto-finalize': False, 'auto-dismiss': False})
    refused(q, "Job ID 'j1' already in use", 'block-commit', device=top, job_id='j1')
    refused(q, 'busy', 'block_resize', node_name=top, size=32 * MB)
    j, = q.execute('query-block-jobs')
    equal({k: j[k] for k in ('device', 'type', 'speed', 'ready', 'auto-finalize', 'auto-dismiss', 'io-status')},
          {'device': 'j1', 'type': 'commit', 'speed': 65536, 'ready': False, 'auto-finalize': False, 'auto-dismiss': False,
           'io-status': 'ok'}, 'query-block-jobs')
    equal(set(j) >= {'len', 'offset', 'busy', 'paused', 'status'}, True, 'fields of query-block-jobs')
    q.execute('job-pause', id='j1')
    equal(bool(q.wait_event('JOB_STATUS_CHANGE', 10, id='j1', status='paused')), True, 'paused event')
    refused(q, 'already paused', 'job-pause', id='j1')
    refused(q, "in state 'paused' cannot accept command verb 'complete'", 'job-complete', id='j1')
    refused(q, "cannot accept command verb 'dismiss'", 'job-dismiss', id='j1')
    refused(q, "cannot accept command verb 'finalize'", 'job-finalize', id='j1')
    refused(q, "Parameter 'speed' expects a non-negative value", 'block-job-set-speed', device='j1', speed=-1)
    q.execute('block-job-set-speed', device='j1', speed=0)
    q.execute('block-job-resume', device='j1')
    equal(bool(q.wait_event('BLOCK_JOB_PENDING', 30, id='j1')), True, 'pending event')
    equal(q.execute('query-jobs')[0]['status'], 'pending', 'query-jobs')
    q.execute('job-finalize', id='j1')
    equal(bool(q.wait_event('JOB_STATUS_CHANGE', 30, id='j1', status='concluded')), True, 'concluded event')
    equal('error' in q.execute('query-jobs')[0], False, 'error of a good job')
    q.execute('job-dismiss', id='j1')
    equal(q.execute('query-jobs'), [], 'query-jobs after dismiss')
    equal(len(q.execute('query-named-block-nodes')), len(names) - 1, 'layers after the commit')

    q.execute('block-stream', {'job-id': 's1', 'device': top, 'speed': 65536})
    q.execute('block-job-cancel', device='s1')
    equal(bool(q.wait_event('BLOCK_JOB_CANCELLED', 30, device='s1')), True, 'cancelled event')
    equal(bool(q.wait_event('JOB_STATUS_CHANGE', 30, id='s1', status='null')), True, 'null event')
    q.execute('block-stream', {'job-id': 's2', 'device': top, 'base': base})
    equal(bool(q.wait_event('BLOCK_JOB_COMPLETED', 30, device='s2')), True, 'completed event')
    q.execute('block-stream', {'job-id': 's3', 'device': top})
    equal(bool(q.wait_event('BLOCK_JOB_COMPLETED', 30, device='s3')), True, 'completed event')
    equal(len(q.execute('query-named-block-nodes')), 1, 'layers after streaming everything')


def resize(s):
    q, top = s.qmp, s.top()
    refused(q, "Cannot find device='' nor node-name=''", 'block_resize', size=1)
    refused(q, "Cannot find device='' nor node-name='zz'", 'block_resize', size=1, node_name='zz')
    refused(q, "Parameter 'size' expects a >0 size", 'block_resize', size=-1, node_name=top)
    refused(q, 'only one of', 'block_resize', size=1, node_name=top, device=top)
    q.execute('block_resize', node_name=top, size=20 * MB)
    with Nbd(s.nbd) as n:
        equal(n.size, 20 * MB, 'size after block_resize')


def exports(s):
    q, top = s.qmp, s.top()
    addr = {'type': 'unix', 'data': {'path': D + '/nbd2'}}
    refused(q, 'NBD server not running', 'nbd-server-stop')
    refused(q, "Parameter 'type' does not accept value 'zz'", 'nbd-server-start', {'addr': dict(addr, type='zz')})
    refused(q, "Parameter 'addr.data.path' is missing", 'nbd-server-start', {'addr': dict(addr, data={})})
    refused(q, "Parameter 'addr.data.port' is missing", 'nbd-server-start', {'addr': {'type': 'inet', 'data': {'host': 'x'}}})
    refused(q, 'in use', 'nbd-server-start', {'addr': {'type': 'unix', 'data': {'path': s.nbd}}})
    q.execute('nbd-server-start', {'addr': addr})
    refused(q, 'NBD server already running', 'nbd-server-start', {'addr': addr})
    refused(q, "Parameter 'type' does not accept value 'zz'", 'block-export-add', {'type': 'zz', 'id': 'e', 'node-name': top})
    refused(q, "nor node-name='zz'", 'block-export-add', {'type': 'nbd', 'id': 'e', 'node-name': 'zz'})
    refused(q, 'Invalid block export id', 'block-export-add', {'type': 'nbd', 'id': '1', 'node-name': top})
    q.execute('block-export-add', {'type': 'nbd', 'id': 'e', 'node-name': top, 'name': 'n', 'writable': True})
    refused(q, "Block export id 'e' is already in use", 'block-export-add', {'type': 'nbd', 'id': 'e', 'node-name': top})
    refused(q, "already has export named 'n'", 'block-export-add', {'type': 'nbd', 'id': 'e2', 'node-name': top, 'name': 'n'})
    e = {x['id']: x for x in q.execute('query-block-exports')}
    equal(set(e), {'#disk', 'vol', 'e'}, 'exports')
    equal((e['e']['type'], e['e']['node-name'], e['e']['shutting-down']), ('nbd', top, False), 'query-block-exports')
    with Nbd(D + '/nbd2', 'n') as a, Nbd(s.nbd, 'vol') as b, Nbd(s.nbd, 'n') as c:
        a.write(0, b'Z' * 4096)
        equal(b.read(0, 4096), b'Z' * 4096, 'two exports of one disk')
        refused(q, 'in use', 'block-export-del', id='e')
        refused(q, "Parameter 'mode' does not accept value 'zz'", 'block-export-del', id='e', mode='zz')
        refused(q, "Export 'zz' is not found", 'block-export-del', id='zz')
        q.execute('block-export-del', id='e', mode='hard')
        equal(bool(q.wait_event('BLOCK_EXPORT_DELETED', 5, id='e')), True, 'deleted event')
        for dropped in (a, c):
            try:
                dropped.read(0, 512)
                raise Failed('a client of a deleted export still reads')
            except (EOFError, OSError):
                pass
        b.flush()
    q.execute('nbd-server-stop')
    refused(q, 'NBD server not running', 'nbd-server-stop')
    q.execute('nbd-server-start', {'addr': {'type': 'inet', 'data': {'host': '127.0.0.1', 'port': '0'}}})
    q.execute('nbd-server-stop')


def rename(s):
    q, top = s.qmp, s.top()
    path = s.qmp.execute('query-named-block-nodes')[0]['file']
    refused(q, "Failed to find node with node-name='zz'", 'x-varve-rename', node_name='zz', filename=D + '/x')
    refused(q, 'must be an absolute path', 'x-varve-rename', node_name=top, filename='x')
    os.rename(path, D + '/renamed.qcow2')
    q.execute('x-varve-rename', node_name=top, filename=D + '/renamed.qcow2')
    equal(list(s.nodes()), [D + '/renamed.qcow2'], 'file after a rename')
    stats = q.execute('x-varve-stats')
    equal(stats['layers'][0]['file'], D + '/renamed.qcow2', 'file in the figures')
    if not stats['chain']['writes'] or not stats['exports'] or not stats['layers'][0]['image']['clusters_allocated']:
        raise Failed('figures are missing: %r' % stats)


def rollback_errors(s):
    q = s.qmp
    refused(q, "Failed to find node with node-name='zz'", 'x-varve-rollback', node_name='zz')
    refused(q, 'expected: boolean', 'x-varve-rollback', node_name='zz', force=1)


base = image('base', '16M', None, 'write -P 1 0 4M')
mid = image('mid', '16M', base, 'write -P 2 2M 4M')
top = image('top', '16M', mid, 'write -P 3 5M 2M')
with Serve(top, D, '--volume', 'vol', '--volume-id', 'p:vol') as s:
    commands(s)
    nodes(s, base, mid, top)
    ov = blockdev(s, top)
    snapshot(s, ov)
    jobs(s, base)
    resize(s)
    exports(s)
    rollback_errors(s)
    rename(s)
    s.qmp.execute('quit')
    e = s.qmp.wait_event('SHUTDOWN', 10)
    equal(e['data'], {'guest': False, 'reason': 'host-qmp-quit'}, 'SHUTDOWN')
    s.ended()
    if os.path.exists(s.nbd) or os.path.exists(s.qmp_path):
        raise Failed('sockets are left behind')
for path in (base, mid, top, D + '/renamed.qcow2'):
    check(path)
qio(D + '/renamed.qcow2', 'read -P 0x5a 0 4k', 'read -P 1 4k 2044k', 'read -P 2 2M 3M', 'read -P 3 5M 2M', 'read -P 0 7M 13M')
done('all commands')
