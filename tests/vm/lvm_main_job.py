"""The main job on a volume group with real device-mapper and udevd: `varve serve` on LVs, its load, snapshots, rollback, deletions under
load, kill -9 of the server; then the same disk under fio with verification while a snapshot comes and goes.

After each step only LVs that somebody has open are active, and at the end none is; names and tags are Proxmox's, images are sound
to qemu-img, LVs have grown with what was written to them.

  lvm_main_job.py [--json FILE]     VARVE_LONG=1: longer
"""
import json, os, sys
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE + '/lib')
from bench import Bench, Failed
from proc import LONG, SEED
from lvmhost import CHUNK, active, elements_ok, expect, expect_lvs, lvs, no_traces, only_open, prepare, serve, sh, spawn, stop

MIB = 1 << 20
SIZE = (128 if LONG else 40) * MIB
DISK = 'vm-100-disk-0'
# nothing is active that nobody has open, nothing is suspended
ONLY_OPEN = 'dmsetup info -c --noheadings --separator " " -o open,suspended,name | grep -v "^No dev" | ' \
            'while read -r n s name; do [ $n -gt 0 -a $s = Active ] || { echo "$name: open $n, $s"; exit 1; }; done'
FIO = 'fio --name=v --ioengine=nbd --uri=nbd+unix:///?socket=/run/disk.sock --rw=randwrite --bs=4k --size=%d --io_size=%d --iodepth=4 ' \
      '--rate_iops=150 --verify=crc32c --verify_fatal=1 --randseed=%d --output-format=terse --minimal'


def main_job(host):
    for name in ('guest/main_job.py', '../lib/nbdclient.py'):
        host.put('%s/%s' % (HERE, name), '/root/' + os.path.basename(name))
    options = {'volume': 'p:' + DISK, 'size': SIZE, 'seconds': 8 if LONG else 1, 'outside': [], 'seed': SEED, 'after': ONLY_OPEN,
               'pause': .02, 'short': not LONG}
    job, shown = spawn(host, "python3 /root/main_job.py '%s'" % json.dumps(options), limit=1500), 0
    while job.running():
        host.listen(1)
        text = job.read('out')
        print(''.join(line for line in text[shown:].splitlines(True) if line[:1] != '['), end='', flush=True)
        shown = len(text)
    rows = json.loads(job.wait().out.splitlines()[-1])
    expect('active at the end', active(host), {})
    return rows


def judge_lvs(host, *snaps):
    now = expect_lvs(host, DISK + '.qcow2', *('snap_%s_%s.qcow2' % (DISK, s) for s in snaps))
    elements_ok(host, *now)
    no_traces(host)
    return now


def under_fio(host):
    """fio verifies what it has written at the end; meanwhile a snapshot is taken and deleted"""
    serve(host, 'p:' + DISK)
    fio = spawn(host, FIO % (SIZE, (32 if LONG else 8) * MIB, SEED % 100000), limit=900)
    sh(host, 'varve snapshot p:%s@f1' % DISK)
    only_open(host)
    during = fio.running()
    sh(host, 'varve destroy p:%s@f1' % DISK)
    fio.wait()
    only_open(host)
    stop(host)
    expect('active when the server has ended', active(host), {})
    print('fio: verified%s' % ('' if during else ' (the snapshot came later)'), flush=True)


def main():
    with Bench(san=3 << 30, memory=700, packages=('udev',)) as b:
        host = b[1]
        prepare(b, udev=True)
        rows = main_job(host)
        longest = max((r for r in rows if r['longest']), key=lambda r: r['longest'])
        print('longest request: %.3f s, at "%s"' % (longest['longest'], longest['what']), flush=True)
        now = judge_lvs(host, *(['kept', 's1'] if LONG else ['s1']))
        if now['snap_%s_s1.qcow2' % DISK][0] <= CHUNK:
            raise Failed('an LV with %d MiB of data has not grown: %s' % (SIZE / 2 / MIB, now))
        under_fio(host)
        judge_lvs(host, *(['kept', 's1'] if LONG else ['s1']))
        sh(host, 'varve destroy p:%s' % DISK)
        expect('LVs when all is destroyed', lvs(host), {})
    if '--json' in sys.argv:
        with open(sys.argv[sys.argv.index('--json') + 1], 'w') as f:
            json.dump(rows, f, indent=1)


main()
