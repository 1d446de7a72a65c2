"""Clones and templates: linked and full, of bases and snapshots, idle and served; what is in use by clones is never freed."""
import hashlib, json, os, stat, subprocess, sys, time
from volmodel import KINDS, LVM, MIB, based, release
from proc import Failed, done, folder, need, run
from volserver import Served
from voltools import backing, digest, fresh_in, info, refused

need('qemu-img', 'qemu-io')
BASE = folder()
NAMES = [a for a in sys.argv[1:] if a not in KINDS]
V, W, C, D = '100/vm-100-disk-0', '100/vm-100-disk-1', '101/vm-101-disk-0', '102/vm-102-disk-0'


def fresh(name, **kw):
    return fresh_in(BASE, name, **kw)


def compare(a, b):
    run('qemu-img', 'compare', '-U', a, b)


def template():
    p = fresh('template')
    p.create(V)
    p.write(V, 0, MIB, 1)
    p.create(W + '.raw', MIB)
    p.write(W, 0, 4096, 2)
    p.snapshot(V, 's1')
    refused(p, 'template', p.id(V), text='snapshots')
    refused(p, 'template', p.id(V, 's1'), text='snapshot')
    p.destroy(V, 's1')
    p.create('data', MIB)
    refused(p, 'template', p.id('data'), text='rename')
    s = Served(p, V)
    refused(p, 'template', p.id(V), text='served', same=False)
    s.stop()
    before = digest(p)
    p.varve('template', p.id(V), '--dry-run')
    if digest(p) != before:
        raise Failed('--dry-run made a template')
    out = json.loads(p.varve('template', p.id(V), '--json'))
    p.vols[based(V)] = p.vols.pop(V)
    if os.path.basename(based(V)) not in ' '.join(out['messages']):
        raise Failed('what template says: %s' % out)
    p.template(W)
    p.verify()
    for v in V, W:
        if not p.is_lvm and stat.S_IMODE(os.stat(p.file(based(v))).st_mode) != 0o444:
            raise Failed('a base image can be written to')
    refused(p, 'template', p.id(based(V)), text='base image')
    for args in (['snapshot', p.id(based(V), 's')], ['resize', p.id(based(V)), '8M']):
        refused(p, *args, text='base image')
    p.create(V)
    refused(p, 'template', p.id(V), text='exists')   # base-100-disk-0 is taken
    kinds = {o['id']: o['kind'] for o in json.loads(p.varve('list', p.name, '--json'))}
    kinds = {os.path.basename(i).split(':')[-1]: kind for i, kind in kinds.items()}
    if kinds['base-100-disk-0.qcow2'] != 'base' or kinds['vm-100-disk-0.qcow2'] != 'vol':
        raise Failed('kinds are %s' % kinds)


def linked():
    p = fresh('linked')
    for vol, suffix in ((V, ''), (W, '.raw')):
        p.create(vol + suffix)
        p.write(vol, 65536, MIB, 7)
    refused(p, 'clone', p.id(V), p.id(C), text='snapshot')   # it goes on changing
    v, w = p.template(V), p.template(W)
    p.clone(v, None, C)
    p.clone(w, None, D)
    p.clone(v, None, 'free')
    p.verify()
    want = ['base-100-disk-0.qcow2', 'base-100-disk-1', 'base-100-disk-0.qcow2'] if p.is_lvm else [
        '../100/base-100-disk-0.qcow2', '../100/base-100-disk-1.raw', '100/base-100-disk-0.qcow2']
    if [backing(p, x) for x in (C, D, 'free')] != want:
        raise Failed('backing names are %s' % [backing(p, x) for x in (C, D, 'free')])
    with p.reading():
        j = json.loads(run('qemu-img', 'info', '-U', '--output=json', p.file(C)))
    if not j['format-specific']['data']['extended-l2'] or j['cluster-size'] != 131072:
        raise Failed('the clone is no overlay as snapshots are: %s' % j)
    long_id = p.id(os.path.basename(C) + '.qcow2') if p.is_lvm else '%s:100/base-100-disk-0.qcow2/%s.qcow2' % (p.name, C)
    if info(p, C)['id'] != long_id or info(p, long_id.split(':', 1)[1])['id'] != long_id:
        raise Failed('the id of the clone is ' + info(p, C)['id'])
    if info(p, 'free')['id'] != p.id('free.qcow2'):
        raise Failed('the id of a free clone is ' + info(p, 'free')['id'])
    if sorted(info(p, v)['clones']) != sorted([long_id, p.id('free.qcow2')]):
        raise Failed('clones of the base are %s' % info(p, v)['clones'])
    # Proxmox's form as the new name: the base has to be the one that is cloned
    other = '101/vm-101-disk-1'
    refused(p, 'clone', p.id(v), '%s:100/base-100-disk-1.raw/%s' % (p.name, other), text='based on')
    p.varve('clone', p.id(v), '%s:100/base-100-disk-0.qcow2/%s' % (p.name, other))
    p.vols[other] = dict(p.vols[v])
    p.write(C, 0, 2 * MIB, 9)
    compare(p.file(v), p.file(other))
    p.verify()
    for args in ([p.id(v), p.id(C)], [p.id(v), p.id('102/vm-103-disk-0')], [p.id(v), 'q:' + D], [p.id(v), p.id('x.raw')],
                 [p.id(v), p.id('base-1')], [p.id('none'), p.id('x')], [p.id(v, 'none'), p.id('x')],
                 [p.id(v), p.id('x'), '--format', 'raw'], [p.id(v), p.id('x'), '-o', 'preallocation=off']):
        refused(p, 'clone', *args)
    before = digest(p)
    for full in [], ['--full']:
        p.varve('clone', p.id(v), p.id('x'), '--dry-run', *full)
    if digest(p) != before:
        raise Failed('--dry-run made a clone')
    if p.varve('clone', p.id(v), p.id('quiet'), '-q'):
        raise Failed('clone -q says something')


def full():
    p = fresh('full', other='q')
    p.create(V, 8 * MIB)
    p.write(V, 0, 2 * MIB, 1)
    p.write(V, 5 * MIB, 65536, 2)
    p.snapshot(V, 's1')
    p.write(V, MIB, 2 * MIB, 3)
    p.snapshot(V, 's2')
    p.write(V, 3 * MIB, 65536, 4)
    n = 0
    for snap in None, 's1', 's2':
        for opts in [], ['--format', 'raw'], ['-o', 'cluster_size=16k,extended_l2=on,preallocation=off']:
            n += 1
            to = '%s%d/vm-%d-disk-0' % ('q:' if n % 2 else '', 200 + n, 200 + n)
            p.clone(V, snap, to, '--full', *opts)
            if backing(p, to):
                raise Failed('a full clone stands on ' + backing(p, to))
            compare(p.file(V, snap), p.file(to))
    p.verify()
    refused(p, 'clone', p.id(V), 'q:201/vm-201-disk-0', '--full', text='exists')
    # of one image: as a file, sparse
    p.create('big', 256 * MIB)
    p.write('big', 128 * MIB, MIB, 5)
    p.varve('clone', p.id('big'), 'q:big', '--full')
    compare(p.file('big'), p.file('q:big'))
    if os.stat(p.file('q:big')).st_blocks * 512 > os.stat(p.file('big')).st_blocks * 512 + MIB:
        raise Failed('the copy is not sparse')
    run('qemu-img', 'check', p.file('q:big'))
    p.create('r.raw', 64 * MIB)
    p.write('r', 32 * MIB, MIB, 6)
    p.clone('r', None, 'q:r', '--full', '--format', 'raw')
    if os.stat(p.file('q:r')).st_blocks * 512 > 2 * MIB:
        raise Failed('the raw copy is not sparse')
    compare(p.file('r'), p.file('q:r'))
    # the rate of the target holds
    with open(p.cfg, 'a') as f:
        f.write('dir: slow\n\tpath %s\n\tcontent images\n\tbwlimit 4096\n' % os.path.dirname(p.path))
    for vol in 'r', V:
        t = time.monotonic()
        p.varve('clone', p.id(vol), 'slow:' + vol, '--full', *(['--format', 'raw'] if vol == 'r' else []))
        spent = time.monotonic() - t
        if vol == V and spent < .4:
            raise Failed('4 MiB/s were copied in %.2f s' % spent)


def served():
    """snapshots of a served disk are cloned while it is written; its current state is not"""
    p = fresh('served', other='q')
    p.create(V)
    p.write(V, 0, MIB, 1)
    s = Served(p, V)
    refused(p, 'clone', p.id(V), p.id(C), '--full', text='snapshot', same=False)
    refused(p, 'clone', p.id(V), p.id(C), text='snapshot', same=False)
    s.write(MIB, MIB, 2)
    p.snapshot(V, 's1')
    s.write(0, 65536, 3)
    p.clone(V, 's1', C)
    p.clone(V, 's1', D, '--full')
    p.clone(V, 's1', 'q:' + D, '--full', '--format', 'raw')
    t = Served(p, C, sock='nbd2')
    t.write(0, 4096, 4)
    s.write(4096, 4096, 5)
    if t.read() != p.vols[C][None] or s.read() != p.vols[V][None]:
        raise Failed('a clone and its source do not read as they should')
    refused(p, 'destroy', p.id(V, 's1'), text='vm-101-disk-0', same=False)
    p.destroy(V, 's1', '--flatten')
    if t.read() != p.vols[C][None] or s.read() != p.vols[V][None]:
        raise Failed('after the deletion a clone or its source does not read as it should')
    t.write(8192, 4096, 6)
    s.stop()
    t.stop()
    p.verify()


def served_base():
    """a base image is served for reading only: it is cloned meanwhile, and stays"""
    p = fresh('served-base')
    p.create(V)
    p.write(V, 0, MIB, 1)
    v = p.template(V)
    s = Served(p, v)
    p.clone(v, None, C)
    p.clone(v, None, D, '--full')
    refused(p, 'destroy', p.id(v), same=False)
    t = Served(p, C, sock='nbd2')
    t.write(0, 4096, 4)
    s.stop()
    t.stop()
    p.verify()


def in_use():
    """bases and snapshots in use by clones, directly, by clones' snapshots and by clones of those, are never freed"""
    p = fresh('in-use')
    p.create(V)
    p.write(V, 0, MIB, 1)
    v = p.template(V)
    p.clone(v, None, C)
    p.snapshot(C, 'c1')
    p.write(C, MIB, 65536, 2)
    p.clone(C, 'c1', D)
    p.snapshot(D, 'd1')
    p.write(D, 2 * MIB, 65536, 3)
    e = '103/vm-103-disk-0'
    p.clone(D, 'd1', e)
    p.write(e, 3 * MIB, 65536, 4)
    p.verify()
    # the base: by a clone's snapshot only
    refused(p, 'destroy', p.id(v), text='vm-101-disk-0')
    p.rollback(C, 'c1')
    p.write(C, MIB, 65536, 5)
    refused(p, 'destroy', p.id(v), text='c1')
    for vol, snap, user in ((C, 'c1', 'vm-102-disk-0'), (D, 'd1', 'vm-103-disk-0')):
        refused(p, 'destroy', p.id(vol, snap), text='--flatten')
        refused(p, 'destroy', p.id(vol), text=user)
        refused(p, 'rename', p.id(vol), '109/vm-109-disk-0', text=user)
        refused(p, 'template', p.id(vol))
    # a snapshot whose only child is a clone
    p.snapshot(D, 'd2')
    p.rollback(D, 'd2')
    p.clone(D, 'd2', '104/vm-104-disk-0')
    p.rollback(D, 'd1')
    p.verify()
    refused(p, 'destroy', p.id(D, 'd2'), text='vm-104-disk-0')
    p.destroy(D, 'd2', '--flatten')
    p.verify()
    p.destroy('104/vm-104-disk-0')
    p.destroy(D, 'd1', '--flatten')
    p.verify()
    p.destroy(C, 'c1', '--flatten')
    p.verify()
    refused(p, 'destroy', p.id(v))
    for vol in C, D, e, v:
        p.destroy(vol)
    p.verify()


def beside():
    """a full clone that is under way keeps its source from being removed or written to, and from nothing else"""
    p = fresh('beside', other='q', other_keys='\tbwlimit 4096\n')
    p.create(V, 16 * MIB)
    p.write(V, 0, 8 * MIB, 1)
    p.snapshot(V, 's1')
    p.write(V, 0, MIB, 2)
    job = subprocess.Popen(p.argv('clone', p.id(V, 's1'), 'q:' + C, '--full', '-q'), env=p.env())
    for _ in range(200):
        if any(n.startswith('.varve-') for _, _, names in p.folders() for n in names):
            break
        time.sleep(.01)
    s = Served(p, V)
    s.write(2 * MIB, 65536, 3)
    p.snapshot(V, 's2')
    p.clone(V, 's1', D)
    out = p.varve('destroy', p.id(V, 's1'), '--flatten', rc=1)
    if job.poll() is not None:
        raise Failed('the clone was too fast for this test')
    s.stop()
    out = p.varve('destroy', p.id(V), rc=1)
    if job.wait():
        raise Failed('the clone ended with %d' % job.returncode)
    p.vols['q:' + C] = {None: p.vols[V]['s1']}
    p.verify()


def by_hand():
    """an overlay on a volume's current state, made with other tools: nothing changes what it stands on"""
    p = fresh('by-hand', other='q')
    p.create('q:x', MIB)
    p.create(V)
    p.write(V, 0, MIB, 1)
    p.snapshot(V, 's1')
    p.overlay(C, V)
    p.vols[C] = {None: p.vols[V][None]}
    for args in (['rollback', p.id(V, 's1')], ['snapshot', p.id(V, 's2')], ['resize', p.id(V), '8M'], ['destroy', p.id(V)],
                 ['rename', p.id(V), 'x'], ['template', p.id(V)], ['move', p.id(V), 'q:', '--delete']):
        refused(p, *args, text='vm-101-disk-0')
    refused(p, 'move', p.id(C), 'q:', text='--flatten')   # on something that may change
    p.move(V)
    refused(p, 'move', p.id(C), 'q:', text='--flatten')
    p.move(C, '--flatten')
    p.clone(C, None, D, '--full')
    p.verify()


def encrypted():
    p = fresh('encrypted', other='q')
    p.create('q:x', MIB)
    p.create(V, MIB)
    p.snapshot(V, 's1')
    for path in p.file(V, 's1'), os.path.join(p.images, '100', 'base-100-disk-9.qcow2'):
        if os.path.exists(path):
            os.unlink(path)
        run('qemu-img', 'create', '-q', '--object', 'secret,id=s,data=x', '-f', 'qcow2', '-o',
            'encrypt.format=aes,encrypt.key-secret=s', path, '1M')
    base = p.id('100/base-100-disk-9')
    for args in (['clone', p.id(V, 's1'), p.id(C)], ['clone', p.id(V, 's1'), p.id(C), '--full'], ['clone', base, p.id(C)],
                 ['move', p.id(V), 'q:'], ['move', base, 'q:']):
        refused(p, *args, text='is encrypted')


def steps(p, *args):
    """runs varve and yields the name of each step it stands at; the last one is its exit status"""
    fifo = os.path.join(BASE, 'fifo')
    if os.path.exists(fifo):
        os.unlink(fifo)
    os.mkfifo(fifo)
    job = subprocess.Popen(p.argv(*args), env=p.env(VARVE_CRASH_LIST=fifo), stdout=subprocess.DEVNULL)
    while job.poll() is None:
        fd = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        got = b''
        while not got and job.poll() is None:
            try:
                got = os.read(fd, 4096)
            except BlockingIOError:
                pass
        os.close(fd)
        yield from got.decode().split()
    yield job.returncode


def meanwhile():
    """while a linked clone is made, what it will stand on cannot go: no clone without its base, ever"""
    for source in 'base', 'snapshot':
        p = fresh('meanwhile-' + source)
        p.create(V)
        p.write(V, 0, MIB, 1)
        if source == 'base':
            vol, snap = p.template(V), None
        else:
            p.snapshot(V, 's1')
            vol, snap = V, 's1'
        seen = []
        for step in steps(p, 'clone', p.id(vol, snap), p.id(C)):
            seen.append(step)
            if step == 'create-durable':
                p.varve('destroy', p.id(vol, snap), rc=1)
        if 'create-durable' not in seen or seen[-1] != 0:
            raise Failed('a clone went through %s' % seen)
        p.vols[C] = {None: p.vols[vol][snap]}
        p.verify()


TESTS = [template, linked, full, served, served_base, in_use, by_hand, meanwhile]
TESTS += [] if LVM else [encrypted, beside]   # they write into the directory
for test in TESTS:
    if not NAMES or test.__name__ in NAMES:
        t = time.monotonic()
        try:
            test()
        except Failed as e:
            raise Failed('%s: %s' % (test.__name__, e))
        release()
        print('%-12s %.1f s' % (test.__name__, time.monotonic() - t), flush=True)
done('ok')
