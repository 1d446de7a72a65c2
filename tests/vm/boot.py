"""The bench of hosts itself: two guests boot, share a disk and a network, run programs, lose power and come back."""
import os, sys, time
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE + '/lib')
from bench import Bench, Failed


def fails(what, part, call):
    try:
        call()
    except Failed as e:
        if part not in str(e):
            raise Failed('%s: the error does not say "%s": %s' % (what, part, e))
        return
    raise Failed(what + ': no error')


def commands(b):
    h = b[1]
    r = h.run('cat; echo problem >&2; exit 3', rc=None, inp=b'some input')
    if (r.rc, r.out, r.err) != (3, 'some input', 'problem\n'):
        raise Failed('status, output or errors were lost: %s' % vars(r))
    fails('a wrong status', 'ended with 3', lambda: h.run('exit 3'))
    fails('a command without an end', 'its time was up', lambda: h.run('sleep 300', limit=2))
    slow = h.spawn('echo begun; sleep 300')
    h.wait_for('grep -qx begun /h/*.out')
    if not slow.running():
        raise Failed('a command in the background ended')
    slow.stop()
    if slow.wait(None).rc == 0:
        raise Failed('a stopped command ended well')


def programs(b):
    h, folder = b[1], b.folder
    if 'varve' not in h.run('varve --version'):
        raise Failed('varve does not run')
    with open(folder + '/in', 'wb') as f:
        f.write(os.urandom(300000))
    h.put(folder + '/in', '/root/deep/in')
    h.run('cp /root/deep/in /root/out')
    h.get('/root/out', folder + '/out')
    if open(folder + '/in', 'rb').read() != open(folder + '/out', 'rb').read():
        raise Failed('a file changed on its way')


def file_systems(b):
    h = b[1]
    h.run('modprobe -a dm-mod dm-thin-pool ublk_drv nbd gfs2 dlm ocfs2 nfs nfsd xfs && test -e /dev/ublk-control && '
          'type lvm sanlock lvmlockd dlm_controld corosync mkfs.gfs2 mkfs.ocfs2 rpc.nfsd qemu-storage-daemon fio >/dev/null')
    h.run('pvcreate -q /dev/bench/scratch && vgcreate -q vg /dev/bench/scratch && lvcreate -q -L 32M -n lv vg '
          '&& mkfs.ext4 -q /dev/vg/lv && vgchange -q -an vg', limit=120)


def clock(b):
    """a guest's seconds are the host's: its own measure of a busy host's processor would be off by a factor"""
    def now():
        b[1].run('true')
        begin = time.monotonic()
        guest = float(b[1].run('cut -d" " -f1 /proc/uptime'))
        return guest, begin, time.monotonic()
    first = now()
    time.sleep(4)
    last = now()
    passed = last[0] - first[0]
    if not last[1] - first[2] - .2 < passed < last[2] - first[1] + .2:
        raise Failed('the guest counted %.2f s, the host %.2f to %.2f' % (passed, last[1] - first[2], last[2] - first[1]))


def network(b):
    b[1].wait_for('ping -c 1 -W 2 host2')
    b.cut(1, 2)
    b[1].run('! ping -c 2 -W 1 host2 >/dev/null')
    b.heal()
    b[1].wait_for('ping -c 1 -W 2 host2')


def power(b):
    """what one host wrote, the other reads; a host without power is gone, its disks stay"""
    b[1].run('echo from one | dd of=/dev/bench/san bs=4k conv=sync oflag=direct status=none; echo mark >/root/mark')
    if b[2].run('dd if=/dev/bench/san bs=4k count=1 iflag=direct status=none | head -c 8') != 'from one':
        raise Failed('the shared disk is not shared')
    b[1].kill()
    b[2].run('true')
    b[1].start()
    b[1].run('test ! -e /root/mark && dd if=/dev/bench/san bs=4k count=1 iflag=direct status=none | grep -aqx "from one"')
    b[2].spawn('echo c >/proc/sysrq-trigger')
    fails('a crash of the guest', 'is gone', lambda: b[2].run('sleep 60'))


def main():
    begin = time.monotonic()
    with Bench(hosts=2, san=64 << 20, scratch=128 << 20) as b:
        print('two hosts after %.1f s' % (time.monotonic() - begin), flush=True)
        for step in (commands, programs, clock, file_systems, network, power):
            step(b)
            print('%s after %.1f s' % (step.__name__, time.monotonic() - begin), flush=True)
        pids, folder = [h.p.pid for h in b if h.p], b.folder
    if os.path.exists(folder) or any(os.path.exists('/proc/%d' % p) for p in pids):
        raise Failed('something was left behind')


main()
