"""Leases between two hosts on one volume group: a disk is open on one of them, moves to the other, and a host that is cut off
from the storage has lost its server before the other gets the disk.

The path to the disk is a device of device-mapper that can be made to fail all requests: what a host sees whose last path is
gone. There is no watchdog: it would end the host, with the test.

  locks.py [--lockd]      --lockd: a VG under lvmlockd instead, where LVM's locks are the disks' and operations have leases
"""
import os, sys, time
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE + '/lib')
from bench import Bench, Failed
from proc import VARVE

SAN = 768 << 20
IO_TIMEOUT = 2                          # seconds, of an access to a lease
DEAD = 8 * IO_TIMEOUT + 60              # after its last renewal a host's leases are free
DISK = 'vm-100-disk-0'
CONFIG = 'lvm: san\\n\\tvgname san\\n\\tcontent images\\n\\tlock-leases 40\\n\\tlease-timeout %d\\n' % IO_TIMEOUT
PATH_TABLE = '0 %d linear /dev/bench/san 0' % (SAN // 512)
URI = "'nbd+unix:///?socket=/run/disk.sock'"


def varve(host, args, rc=0, text='', limit=180):
    r = host.run('varve %s' % args, rc=None, limit=limit)
    if r.rc != rc or text not in r.out + r.err:
        raise Failed('host %d: varve %s: status %d, not %d with "%s": %s%s' % (host.id, args, r.rc, rc, text, r.out, r.err))
    return r.out + r.err


def prepare(host, lockd):
    host.run('modprobe dm-mod; mkdir -p /etc/varve; echo %d >/etc/varve/host-id; dmsetup create path --table "%s"; '
             'printf \'devices { filter=["a|^/dev/mapper/path$|","r|.*|"] }\\n\' >>/etc/lvm/lvmlocal.conf; '
             'printf \'%s%s\' >/etc/varve/storage.cfg; '
             'sanlock daemon -w 0 -U root -G root -g 5 -e host%d; sleep 1'
             % (host.id, PATH_TABLE, CONFIG, '' if lockd else '\\tlock sanlock\\n', host.id))


def serve(host, *options):
    host.run('rm -f /run/disk.sock; setsid varve serve san:%s --export nbd,unix=/run/disk.sock %s </dev/null >/run/serve.log 2>&1 & '
             'echo $! >/run/serve.pid' % (DISK, ' '.join(options)))
    host.run('for i in $(seq 600); do [ -S /run/disk.sock ] && exit 0; kill -0 $(cat /run/serve.pid) || break; sleep .2; done; '
             'cat /run/serve.log >&2; exit 1', limit=180)


def write(host, pattern):
    host.run('qemu-io -f raw -c "write -P %d 0 1M" -c flush %s' % (pattern, URI))


def reads(host, pattern):
    out = host.run('qemu-io -f raw -c "read -P %d 0 1M" %s' % (pattern, URI))
    if 'verification failed' in out:
        raise Failed('host %d reads something else: %s' % (host.id, out))


def open_on_one(a, b):
    varve(a, 'create san:%s 64M' % DISK, rc=1, text='varve pool init-locks san')
    varve(a, 'pool init-locks san', text='made 40 leases')
    begin = time.monotonic()
    varve(a, 'create san:%s 64M' % DISK, text='joins its lockspace')
    print('  joined, and created, in %.0f s' % (time.monotonic() - begin))
    serve(a)
    write(a, 1)
    varve(b, 'serve san:' + DISK, rc=1, text='is open on host host1')
    varve(b, 'snapshot san:%s@s' % DISK, rc=1, text='is open on host host1')
    varve(b, 'destroy san:' + DISK, rc=1, text='is open on host host1')
    varve(a, 'snapshot san:%s@s' % DISK)
    reads(a, 1)
    print('  ' + varve(b, 'pool status san').strip().splitlines()[-1])


def moves(a, b):
    """a disk goes to the other host with its guest, and is not free for a moment"""
    serve(b, '--incoming')
    varve(b, 'takeover san:' + DISK, rc=1, text='is open on host host1')
    begin = time.monotonic()
    varve(a, 'handover san:' + DISK)
    varve(b, 'takeover san:' + DISK)
    print('  handed over in %.1f s' % (time.monotonic() - begin))
    reads(b, 1)
    write(b, 2)
    varve(a, 'serve san:' + DISK, rc=1, text='is open on host host2')
    stop(b)
    serve(a)
    reads(a, 2)


def stop(host):
    host.run('kill $(cat /run/serve.pid); while kill -0 $(cat /run/serve.pid) 2>/dev/null; do sleep .1; done')


def killed(a, b):
    """what a killed operation has begun is finished or undone by the other host, without being told to: it has its locks"""
    stop(a)
    varve(a, 'list san')
    a.run('VARVE_CRASH_AT=snapshot-linked varve snapshot san:%s@k' % DISK, rc=128 + 9)
    varve(b, 'snapshot san:%s@b' % DISK)
    names = [w.split()[0] for w in varve(b, 'list san').splitlines()[1:]]
    if 'san:%s.qcow2@b' % DISK not in names or 'operation' in varve(b, 'pool status san'):
        raise Failed('after a killed operation: %r' % names)
    serve(a)
    reads(a, 2)


def cut_off(a, b):
    """the server of a host without its storage is gone before another host gets the disk"""
    write(a, 3)
    gone = a.spawn('while kill -0 $(cat /run/serve.pid) 2>/dev/null; do sleep .1; done', limit=300)
    cut = time.monotonic()
    a.run('dmsetup suspend --noflush path; dmsetup load path --table "0 %d error"; dmsetup resume path' % (SAN // 512))
    taken = b.spawn('until varve snapshot san:%s@after; do sleep .5; done' % DISK, limit=300)
    gone_at = taken_at = None
    while gone_at is None or taken_at is None:
        if gone_at is None and not gone.running():
            gone_at = time.monotonic() - cut
            print('  the server without storage is gone after %.1f s' % gone_at, flush=True)
        if taken_at is None and not taken.running():
            taken_at = time.monotonic() - cut
            print('  the other host has changed its disk after %.1f s' % taken_at, flush=True)
        time.sleep(.1)
        if time.monotonic() - cut > 290:
            raise Failed('gone after %r s, taken after %r s: %s' % (gone_at, taken_at, taken.read('err')[-800:]))
    r = taken.wait()
    if 'is open on host host1' not in r.err or 'does not renew' not in r.err:
        raise Failed('what the other host was told: ' + r.err[-800:])
    if gone_at + 5 > taken_at:
        raise Failed('two hosts had the disk: gone after %.1f s, taken after %.1f s' % (gone_at, taken_at))
    if taken_at < DEAD - 3 * IO_TIMEOUT - 10:
        raise Failed('taken after %.1f s, before its leases ran out' % taken_at)
    serve(b)
    reads(b, 3)
    varve(b, 'snapshot san:%s@again' % DISK)


def under_lockd(a, b):
    """LVM's lockspace is used: no number of a host, no joining; an LV's own lock is the disk's"""
    for h in (a, b):
        h.run('echo "global { use_lvmlockd = 1 }" >>/etc/lvm/lvmlocal.conf; lvmlockd --host-id %d -g sanlock -o %d; sleep 1' % (h.id, IO_TIMEOUT))
    a.run('vgcreate -q --shared san /dev/mapper/path', limit=180)
    b.run('vgchange --lock-start san; vgchange --lock-start san', limit=180)
    varve(a, 'create san:%s 64M' % DISK, rc=1, text='varve pool init-locks san')
    varve(a, 'pool init-locks san', text='made 40 leases')
    varve(a, 'create san:%s 64M' % DISK)
    print('  ' + ' | '.join(varve(b, 'pool status san').strip().splitlines()[-2:]))
    serve(a)
    write(a, 1)
    print('  refused: ' + varve(b, 'snapshot san:%s@s' % DISK, rc=1).strip())
    varve(b, 'serve san:' + DISK, rc=1)
    varve(a, 'snapshot san:%s@s' % DISK)
    varve(b, 'create san:vm-100-disk-1 64M')
    varve(b, 'destroy san:vm-100-disk-1')
    stop(a)
    varve(b, 'snapshot san:%s@t' % DISK)
    serve(b)
    reads(b, 1)


def main():
    lockd = '--lockd' in sys.argv
    with Bench(hosts=2, san=SAN, memory=600) as bench:
        a, b = bench[1], bench[2]
        for h in (a, b):
            prepare(h, lockd)
        a.run('pvcreate -q /dev/mapper/path' + ('' if lockd else ' && vgcreate -q san /dev/mapper/path'), limit=120)
        for part in [under_lockd] if lockd else [open_on_one, moves, killed, cut_off]:
            part(a, b)
            print('ok %s' % part.__name__, flush=True)


main()
