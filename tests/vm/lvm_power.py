"""Loss of power in the middle of operations on LVs of a shared disk: a host is gone at a chosen step; the next one that works on the pool, be it the
same host after its boot or another one, finishes or undoes what was begun. The volume is as before or as after, nothing is left over.

The host that comes back does so by its next operation. Another one is told whose operation it is and does nothing, until somebody who knows that
the host is down says `pool check --repair`.
"""
import os, sys, time
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE + '/lib')
from bench import Bench, Failed
from proc import LONG
from lvmhost import STORAGE, active, contents, elements_ok, expect, lvs, no_traces, prepare, sh, write

DISK = 'vm-100-disk-0'


def power_off_in(host, words, point):
    """the command is killed at a crash point, and the host has no power at the next instant"""
    host.spawn('VARVE_CRASH_AT=%s varve %s; echo $? >/h/ended; echo b >/proc/sysrq-trigger; sleep 60' % (point, words))
    end = time.monotonic() + 120
    while host.p.poll() is None:
        if time.monotonic() > end:
            raise Failed('host %d still has power: %s' % (host.id, host.console()))
        time.sleep(.1)
    with open(host.share + '/ended') as f:
        status = f.read().strip()
    os.unlink(host.share + '/ended')
    host.kill()
    if status != '137':
        raise Failed('%s: ended with %s, not at %s' % (words, status, point))


def next_operation(host, volume):
    """one that is refused for its own sake, after what was left of the volume was finished or undone"""
    return sh(host, 'varve rollback p:%s@nosuch' % volume, rc=None).err


def recover(down, up, volume, by_other):
    """the report of whoever put it right"""
    listed = sh(up, 'varve list')   # a name that a volume is about to get may be there, without a current image
    rows = [r for r in listed.splitlines() if r.startswith('p:%s.qcow2' % volume)]
    if any('broken' in r for r in rows) or 'idle' not in listed:
        raise Failed('host %d sees, before anything is put right:\n%s' % (up.id, listed))
    if by_other:
        said = next_operation(up, volume)
        if 'host%d' % down.id not in said:
            raise Failed('host %d is not told of host %d: %s' % (up.id, down.id, said))
        sh(up, 'varve pool check p --repair', rc=None)
        down.start()
        boot(down)
        return up
    down.start()
    boot(down)
    next_operation(down, volume)
    return down


def boot(host):
    host.run('modprobe dm-mod; mkdir -p /etc/varve; cat >/etc/varve/storage.cfg', inp=STORAGE.encode())


def snapshots(host, volume):
    """the snapshots by the LVs' names; nothing may be left of the operation"""
    no_traces(host)
    names = list(lvs(host))
    if volume + '.qcow2' not in names:
        raise Failed('%s is gone: %s' % (volume, names))
    return {n.split('_')[2].split('.')[0] for n in names if n.startswith('snap_%s_' % volume)}


def judge(hosts, host, volume, may_have, patterns):
    """may_have: the sets of snapshots that are right; patterns: the contents that are, all of them or those of the given set"""
    snaps = snapshots(host, volume)
    if snaps not in may_have:
        raise Failed('snapshots %s, not one of %s' % (snaps, may_have))
    below = ['snap_%s_%s.qcow2' % (volume, s) for s in snaps]
    for n, one in enumerate(patterns):
        try:
            contents(host, volume + '.qcow2', one, below)
            break
        except Failed:
            if n == len(patterns) - 1:
                raise
    elements_ok(host, volume + '.qcow2', *below)
    for h in hosts:
        expect('active on host %d' % h.id, active(h), {})
    print('      snapshots %s, contents %d of %d' % (sorted(snaps), n + 1, len(patterns)), flush=True)
    return snaps


def case(b, words, point, crashed, by_other, volume=DISK):
    print('%s, at %s, host %d; put right by %s' % (words, point, crashed, 'the other' if by_other else 'itself'), flush=True)
    down, up = b[crashed], b[3 - crashed]
    power_off_in(down, words, point)
    return recover(down, up, volume, by_other)


def snapshot_and_merge(b, points):
    before = {0: 2, 1: 3, 5: 1}
    snaps = {'s1'}
    for n, (crashed, point, other) in enumerate(points):
        new = 't%d' % n
        host = case(b, 'snapshot p:%s@%s' % (DISK, new), point, crashed, other)
        snaps = judge(b, host, DISK, (snaps, snaps | {new}), [before])
    host = case(b, 'destroy p:%s@s1' % DISK, MERGE, 2, False)
    return judge(b, host, DISK, (snaps, snaps - {'s1'}), [before])


def rollback(b, snaps, points):
    write(b[1], 'p:' + DISK, 'write -P 4 2M 1M')
    to = sorted(snaps)[-1]
    was, now = {0: 2, 1: 3, 2: 4}, {0: 2, 1: 3, 2: 1}
    for crashed, point, other in points:
        host = case(b, 'rollback p:%s@%s' % (DISK, to), point, crashed, other)
        judge(b, host, DISK, (snaps,), [was, now])


def rename_and_create(b, points):
    volume, new = DISK, 'vm-101-disk-0'
    for crashed, point, other in points:
        host = case(b, 'rename p:%s %s' % (volume, new), point, crashed, other, volume)
        names = [n for n in lvs(host) if n in (volume + '.qcow2', new + '.qcow2')]
        expect('volumes after the rename', len(names), 1)
        if names[0] == new + '.qcow2':
            volume, new = new, volume
        judge(b, host, volume, (snapshots(host, volume),), [{0: 2, 1: 3}])
    host = case(b, 'create p:vm-102-disk-0 16M', 'lvm-dir-rename', 1, True, 'vm-102-disk-0')
    no_traces(host)
    for v in (volume, 'vm-102-disk-0'):
        sh(host, 'varve destroy p:' + v, rc=None)
    expect('LVs in the end', lvs(host), {})


def main():
    with Bench(hosts=2, san=2 << 30, memory=512) as b:
        prepare(b)
        sh(b[1], 'varve create p:%s 24M' % DISK)
        write(b[1], 'p:' + DISK, 'write -P 1 0 8M')   # more than what is changed: s1 is merged by a commit
        sh(b[1], 'varve snapshot p:%s@s1' % DISK)
        write(b[1], 'p:' + DISK, 'write -P 2 0 1M', 'write -P 3 1M 1M')
        snaps = snapshot_and_merge(b, SNAPSHOTS)
        rollback(b, snaps, ROLLBACKS)
        rename_and_create(b, RENAMES)


# host that loses power, crash point (and which passage of it), is it put right by the other one
SNAPSHOTS = [(1, 'lvm-dir-rename', True)]
MERGE = 'lvm-dir-rename'
ROLLBACKS = [(2, 'lvm-dir-rename:2', False)]
RENAMES = [(1, 'lvm-dir-tags:2', False)]
if LONG:
    SNAPSHOTS += [(2, 'intent-written', False), (1, 'lvm-dir-rename:2', False), (2, 'intent-remove', True)]
    ROLLBACKS += [(1, 'intent-written', True), (2, 'intent-remove', False)]
    RENAMES += [(2, 'intent-written', True), (1, 'intent-remove', True)]
main()
