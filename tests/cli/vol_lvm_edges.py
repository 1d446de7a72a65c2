"""Volume groups in odd states, as an administrator meets them: checks of all pools, damaged intents, operations under way,
times of snapshots whose taking was cut off, missing PVs, a server that waits for its disk."""
import json, os, subprocess, sys, time
sys.argv.append('lvm')
from volmodel import MIB
from proc import VARVE, Failed, done, folder, need
from voltools import fresh_in, info
from lvmpool import LvmPool, attach

need('qemu-img', 'qemu-io')
BASE = folder()
V = '100/vm-100-disk-0'


def fresh(name, **kw):
    return fresh_in(BASE, name, **kw)


def expect(text, out, absent=False):
    if (text in out) == absent:
        raise Failed('"%s" is %s in: %s' % (text, 'there' if absent else 'missing', out))


def all_pools_are_checked(p):
    p.create(V)
    p.lvm('vgchange', '-q', '--addtag', 'varve-intent=abc/0/1/xxx', p.vgs['p'])
    expect('damaged', p.varve('pool', 'check', rc=1))
    # no guest waits for what nobody can follow; changes do
    expect('damaged', p.varve('snapshot', p.id(V, 's'), rc=1))
    sock = os.path.join(p.home, 'n')
    log = open(os.path.join(p.home, 'log'), 'w+')
    s = subprocess.Popen(p.argv('serve', p.id(V), '--export', 'nbd,unix=' + sock), stdout=log, stderr=log, env=p.env())
    for _ in range(600):
        if os.path.exists(sock) or s.poll() is not None:
            break
        time.sleep(.05)
    if s.poll() is not None:
        log.seek(0)
        raise Failed('the disk does not start: ' + log.read())
    s.terminate()
    if s.wait(60):
        raise Failed('the server ended with %d' % s.returncode)
    log.seek(0)
    expect('damaged', log.read())
    p.lvm('vgchange', '-q', '--deltag', 'varve-intent=abc/0/1/xxx', p.vgs['p'])
    p.varve('pool', 'check')


def times_of_snapshots_cut_off(p):
    p.create(V)
    p.snapshot(V, 'a')
    time.sleep(2.1)
    at = time.time()
    p.varve('snapshot', p.id(V, 'b'), rc=None, env={'VARVE_CRASH_AT': 'snapshot-switched'})
    p.varve('pool', 'check', '--repair')
    taken = {e['snapshot']: e['taken'] for e in info(p, V)['elements'] if e.get('snapshot')}
    if set(taken) != {'a', 'b'}:
        raise Failed('the snapshot was not finished: %s' % taken)
    if not int(at) <= taken['b'] <= time.time() or taken['b'] <= taken['a']:
        raise Failed('b was taken at %s, and a at %s, now %s' % (taken['b'], taken['a'], at))
    print('  b was cut off, finished, and is %d s younger than a' % (taken['b'] - taken['a']))


def an_operation_under_way_is_no_finding(p):
    p.create(V)
    p.snapshot(V, 'a')
    p.snapshot(V, 'b')
    d = subprocess.Popen(p.argv('destroy', p.id(V)), env=p.env(VARVE_TEST_LVM_BEFORE='sleep 0.4'),
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    seen, looks = 0, []
    while d.poll() is None:
        rc, out = p.varve('pool', 'check', 'p', rc=None)
        looks.append(out)
        expect('can take its place', out, absent=True)
        seen += 'under way' in out
    if d.returncode or not seen:
        raise Failed('destroy ended with %d: %s; seen under way: %d of %s' % (d.returncode, d.stdout.read(), seen, looks))
    print('  looked at %d times while it went on' % seen)


def status_with_a_missing_pv(p):
    second = os.path.join(p.home, 'pv-second')
    with open(second, 'wb') as f:
        f.truncate(64 * MIB)
    p.devices.append(attach(second))
    p.lvm('pvcreate', '-q', '-ff', '--yes', p.devices[-1])
    p.lvm('vgextend', '-q', p.vgs['p'], p.devices[-1])
    gone = p.devices.pop()
    expect('missing', p.varve('pool', 'status', 'p'))
    if json.loads(p.varve('pool', 'status', 'p', '--json'))[0]['volume-group']['missing'] != 1:
        raise Failed('the missing PV is not counted')
    p.varve('create', p.id(V), '4M', rc=1)
    p.devices.append(gone)


def a_server_that_waits_hands_nothing_over(p):
    p.create(V)
    sock = os.path.join(p.home, 'n')
    s = subprocess.Popen(p.argv('serve', p.id(V), '--incoming', '--export', 'nbd,unix=' + sock), stdout=subprocess.DEVNULL,
                         env=p.env())
    for _ in range(600):
        if os.path.exists(sock):
            break
        time.sleep(.05)
    expect('waits for it', p.varve('handover', p.id(V), rc=1))
    p.varve('takeover', p.id(V))
    p.varve('handover', p.id(V))
    if s.wait(60):
        raise Failed('the server ended with %d' % s.returncode)
    if p.active():
        raise Failed('left active: %s' % p.active())


def a_vg_that_is_not_there(p):
    with open(p.cfg) as f:
        text = f.read()
    with open(p.cfg, 'w') as f:
        f.write(text.replace(p.vgs['p'], 'nosuchvg'))
    for what in (('list', 'p'), ('pool', 'status', 'p'), ('pool', 'check', 'p'), ('create', p.id(V), '4M')):
        expect('"nosuchvg" not found', p.varve(*what, rc=1))


for test in (all_pools_are_checked, times_of_snapshots_cut_off, an_operation_under_way_is_no_finding, status_with_a_missing_pv,
             a_server_that_waits_hands_nothing_over, a_vg_that_is_not_there):
    print(test.__name__)
    pool = fresh(test.__name__[:20])
    test(pool)
    pool.release()
done('ok')
