"""Two hosts with one shared disk as the SAN, a third that lists.

A disk is served on host 1 to a client elsewhere, gets a snapshot, is handed over to host 2 under load; the client goes on there,
where the disk gets another snapshot and loses the first. Host 3 lists the pool over and over: whatever it sees must have been true. Then what
a killed server left active on one host, while another host moved, renamed and extended it: nothing old is read.
"""
import json, os, sys, time
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE + '/lib')
from bench import Bench, Failed
from proc import LONG, SEED
from lvmhost import VG, active, contents, elements_ok, expect, expect_lvs, lvs, no_traces, prepare, qio, serve, sh, spawn, stop, write

MIB = 1 << 20
SIZE = (96 if LONG else 24) * MIB
DISK = 'vm-100-disk-0'
LIST = 'mkdir -p /root/lists; i=0; while [ ! -e /root/lists.stop ]; do varve list >/root/lists/$i 2>/root/lists/$i.err ' \
       '|| echo "status $?" >>/root/lists/$i.err; i=$((i+1)); sleep .2; done'


def op(host, words):
    begin = time.monotonic()
    sh(host, 'varve ' + words)
    print('%5.1f s  host %d: %s' % (time.monotonic() - begin, host.id, words), flush=True)


def serve_to_all(host, *options):
    serve(host, ' '.join(['p:%s --export nbd,host=10.77.0.%d,port=10809' % (DISK, host.id), *options]))


def judge_lists(host, stages):
    """each list shows the volume, sound, with the snapshots of one stage, and no stage comes back"""
    text = sh(host, 'cd /root/lists; for i in $(ls | grep -v err | sort -n); do cat $i $i.err; echo =; done')
    at, seen = 0, []
    for n, one in enumerate(text.split('=\n')[:-1]):
        rows = [line.split() for line in one.splitlines()[1:]]
        got = {(r[0] + '@').split('@')[1] for r in rows}
        sound = all(r[0].split('@')[0] == 'p:%s.qcow2' % DISK and r[-1] in (('-', 'deleted') if '@' in r[0] else ('idle',)) for r in rows)
        while at < len(stages) and got != stages[at]:
            at += 1
        if not sound or at == len(stages):
            raise Failed('list %d of host %d (after %s):\n%s' % (n, host.id, seen[-3:], one))
        seen.append(sorted(got))
    if len(seen) < 10 or at != len(stages) - 1:
        raise Failed('only %d lists, the last one at stage %d' % (len(seen), at))
    print('  %d lists of host %d, all true' % (len(seen), host.id), flush=True)


def moved(a, b, c):
    op(a, 'create p:%s %d' % (DISK, SIZE))
    for name in ('guest/moved.py', '../lib/nbdclient.py'):
        c.put('%s/%s' % (HERE, name), '/root/' + os.path.basename(name))
    lister = spawn(c, LIST, limit=900)
    serve_to_all(a)
    client = spawn(c, "python3 /root/moved.py '%s'" % json.dumps(
        {'addresses': [['10.77.0.1', 10809], ['10.77.0.2', 10809]], 'size': SIZE, 'seed': SEED}), limit=900)
    op(a, 'snapshot p:%s@s1' % DISK)
    serve_to_all(b, '--incoming')
    expect('active on host 2', active(b), {})    # nothing of the disk is looked at before it comes
    op(a, 'handover p:' + DISK)
    expect('active on host 1', active(a), {})
    op(b, 'takeover p:' + DISK)
    op(b, 'snapshot p:%s@s2' % DISK)
    op(b, 'destroy p:%s@s1' % DISK)
    c.run('touch /root/lists.stop')
    lister.wait()
    c.run('touch /root/moved.stop')
    result = json.loads(client.wait().out.splitlines()[-1])
    print('  %(writes)d writes at %(connections)s, longest %(longest).2f s' % result, flush=True)
    if result['connections'][:1] != ['10.77.0.1'] or result['connections'][-1] != '10.77.0.2':
        raise Failed('the client was not at both hosts: %s' % result)
    stop(b)
    expect('active on host 2', active(b), {})
    judge_lists(c, [{''}, {'', 's1'}, {'', 's1', 's2'}, {'', 's2'}])
    now = expect_lvs(a, DISK + '.qcow2', 'snap_%s_s2.qcow2' % DISK)
    elements_ok(a, *now)
    no_traces(a)


def left_active(a, b):
    """host 1's kernel has an LV that host 2 puts elsewhere, as long as before; then one that host 2 renames and extends"""
    raw = 'vm-201-disk-0'
    op(a, 'create p:%s 16M --format raw' % raw)
    serve(a, 'p:' + raw)
    qio(a, 'write -P 1 0 16M', 'flush')
    stop(a, signal='KILL')
    expect('left active', active(a), {raw: 0})
    sh(b, 'lvreduce -q -f -L 8M {0}/{1} && lvcreate -q -y -an -Zn -Wn -L 8M -n filler {0} && lvextend -q -L 16M {0}/{1}'.format(VG, raw))
    serve(b, 'p:' + raw)
    qio(b, 'read -P 1 0 8M', 'write -P 2 8M 8M', 'flush')
    stop(b)
    serve(a, 'p:' + raw)
    qio(a, 'read -P 1 0 8M', 'read -P 2 8M 8M', 'write -P 3 8M 8M', 'flush')
    stop(a, signal='KILL')
    op(b, 'rename p:%s vm-202-disk-0' % raw)
    op(b, 'resize p:vm-202-disk-0 24M')
    write(b, 'p:vm-202-disk-0', 'read -P 3 8M 8M', 'write -P 4 16M 8M')
    serve(a, 'p:vm-202-disk-0')
    qio(a, 'read -P 1 0 8M', 'read -P 3 8M 8M', 'read -P 4 16M 8M')
    stop(a)
    expect('active in the end', (active(a), active(b)), ({}, {}))
    sh(b, 'lvremove -q -y %s/filler' % VG)
    op(b, 'destroy p:vm-202-disk-0')


def names_taken_over(a, b):
    """host 1's kernel has an LV under a name that is another LV's now, and one that is gone"""
    disk = 'vm-203-disk-0'
    op(a, 'create p:%s 16M' % disk)
    serve(a, 'p:' + disk)
    qio(a, 'write -P 1 0 2M', 'flush')
    stop(a, signal='KILL')
    op(b, 'snapshot p:%s@s1' % disk)
    write(b, 'p:' + disk, 'write -P 2 0 1M')
    serve(a, 'p:' + disk)
    qio(a, 'read -P 2 0 1M', 'read -P 1 1M 1M')
    stop(a, signal='KILL')
    op(b, 'destroy p:' + disk)
    op(b, 'create p:%s 16M' % disk)
    write(b, 'p:' + disk, 'write -P 3 0 1M')
    serve(a, 'p:' + disk)
    qio(a, 'read -P 3 0 1M', 'read -P 0 1M 1M')
    stop(a)
    expect('active in the end', (active(a), active(b)), ({}, {}))
    op(a, 'destroy p:' + disk)


def main():
    with Bench(hosts=3, san=2 << 30, memory=512) as b:
        prepare(b)
        left_active(b[1], b[2])
        names_taken_over(b[1], b[2])
        moved(b[1], b[2], b[3])


main()
