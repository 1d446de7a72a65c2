"""LVM's tools on hosts of their own: real devices on one, lvmlockd with sanlock between two.

What must hold: an LV that one host has exclusively cannot be activated, renamed, extended or removed on the other, which is told
-EBUSY; shared, it is extended only as such, and the other host has to refresh; without its lock manager a host changes
nothing (-EAGAIN) and knows that what it reads may be half done.

  lvm.py [PROGRAMS] [--lockd]     folder of vol_lvm_dm, vol_lvm_heads and lvm_prog (else beside $VARVE); --lockd: the second part alone
"""
import os, sys
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE + '/lib')
from bench import Bench, Failed
from proc import VARVE

MIB = 1 << 20
VG = 'san'
WORDS = [a for a in sys.argv[1:] if a != '--lockd']
PROGRAMS = WORDS[0] if WORDS else os.path.join(os.path.dirname(VARVE), '../../tests/unit/vol')


def call(host, words, want=None, flags='-s'):
    """one call; want: the name of the error that is expected"""
    r = host.run('lvm_prog %s %s %s' % (flags, VG, words), rc=None, limit=120)
    got = r.out.split(':')[0] if r.rc == 1 else None
    if r.rc not in (0, 1) or got != want:
        raise Failed('host %d: %s: %s%s (status %d), not %s' % (host.id, words, r.out, r.err, r.rc, want or 'done'))
    return r.out


def lv(host, name, flags='-s'):
    """length and activity as a host reports them"""
    for line in call(host, 'report', flags=flags).splitlines()[1:]:
        words = line.split()
        if words[0] == name:
            return int(words[1]), int(words[2].split('=')[1])
    return None


def check(what, got, want):
    if got != want:
        raise Failed('%s: %r, not %r' % (what, got, want))


NO, YES, UNKNOWN = 0, 1, 2


def length(host, name):
    return int(host.run('blockdev --getsize64 /dev/%s/%s' % (VG, name)))


def real_devices():
    with Bench(memory=700, programs=[PROGRAMS + '/vol_lvm_dm', PROGRAMS + '/vol_lvm_heads']) as b:
        b[1].put(HERE + '/../lib/lvm', '/root/lvm')
        b[1].run('modprobe -a dm-mod loop; mkdir -p /var/tmp')
        for program in 'vol_lvm_dm', 'vol_lvm_heads':
            print(b[1].run('VARVE_TEST_LVM_DIR=/root/lvm ' + program, limit=400).strip())


def start_lockd(host):
    host.run('modprobe dm-mod; echo "global { use_lvmlockd = 1 }" >>/etc/lvm/lvmlocal.conf; sanlock daemon -w 0 -U root -G root; '
             'lvmlockd --host-id %d -g sanlock -o 2; sleep 1' % host.id)


def exclusive(a, b):
    call(a, 'create x %d exclusive' % (8 * MIB))
    check('made exclusively', lv(a, 'x'), (8 * MIB, YES))
    check('seen elsewhere', lv(b, 'x'), (8 * MIB, NO))
    for words in ('activate exclusive x', 'activate shared x', 'activate plain x', 'extend x %d' % (12 * MIB), 'remove x',
                  'rename x y'):
        print('  refused on the other host: %s' % call(b, words, 'EBUSY').strip())
    call(a, 'extend x %d' % (12 * MIB))
    check('extended where it is', length(a, 'x'), 12 * MIB)
    call(a, 'deactivate x')
    call(b, 'activate exclusive x')
    check('handed over', (lv(b, 'x'), length(b, 'x')), ((12 * MIB, YES), 12 * MIB))
    call(a, 'activate exclusive x', 'EBUSY')
    call(b, 'deactivate x')


def shared(a, b):
    call(a, 'activate shared x')
    call(b, 'activate shared x')
    call(a, 'activate exclusive x', 'EBUSY')
    print('  refused while shared: %s' % call(a, 'extend x %d' % (16 * MIB), 'EBUSY').strip())
    call(a, 'extend x %d shared' % (16 * MIB))
    check('extended while shared', (length(a, 'x'), length(b, 'x')), (16 * MIB, 12 * MIB))
    check('before the refresh', lv(b, 'x'), (16 * MIB, UNKNOWN))
    call(b, 'refresh x')
    check('after the refresh', (lv(b, 'x'), length(b, 'x')), ((16 * MIB, YES), 16 * MIB))
    for h in (a, b):
        call(h, 'deactivate x')


def hand_over(a, b):
    """from one host to the other without a moment in which a third could have it"""
    def holding(h):
        return h.spawn('exec 5<>/dev/%s/x; echo; exec sleep 300' % VG, limit=300)

    call(a, 'activate exclusive x')
    one = holding(a)
    call(a, 'activate shared x')
    call(b, 'activate shared x')
    two = holding(b)
    b.wait_for('test "$(dmsetup info -c --noheadings -o open %s-x)" = 1' % VG)
    print('  refused while both have it: %s' % call(b, 'activate exclusive x', 'EBUSY').strip())
    print('  refused while it is open: %s' % call(a, 'deactivate x', 'EBUSY').strip())
    one.stop()
    one.wait(None)
    call(a, 'deactivate x')
    call(b, 'activate exclusive x')
    for words in ('activate shared x', 'activate exclusive x'):
        call(a, words, 'EBUSY')
    call(b, 'extend x %d' % (20 * MIB))
    check('extended by the new owner', length(b, 'x'), 20 * MIB)
    two.stop()
    two.wait(None)
    call(b, 'deactivate x')


def no_lock_manager(a, b):
    b.run('vgchange --lock-stop %s' % VG)
    print('  refused without a lockspace: %s' % call(b, 'create z %d no' % MIB, 'EAGAIN').strip())
    call(b, 'activate exclusive x', 'EAGAIN')
    check('read without a lock', call(b, 'report').splitlines()[0], '%s shared=1 unlocked=1 missing=0' % VG)
    check('read with one', call(a, 'report').splitlines()[0], '%s shared=1 unlocked=0 missing=0' % VG)
    call(a, 'tag x +a +b')
    call(a, 'rename x y')
    call(a, 'remove y gone', 'ENOENT')
    check('removed', lv(a, 'y'), None)


def lock_managers():
    with Bench(hosts=2, san=2048 * MIB, programs=[PROGRAMS + '/lvm_prog']) as b:
        for h in b:
            start_lockd(h)
        b[1].run('pvcreate -q /dev/bench/san; vgcreate -q --shared %s /dev/bench/san' % VG, limit=120)
        # without udev the node of the VG's lock volume appears only when the first of these ends
        b[2].run('vgchange --lock-start %s; vgchange --lock-start %s' % (VG, VG), limit=120)
        for part in (exclusive, shared, hand_over, no_lock_manager):
            part(b[1], b[2])
            print('ok %s' % part.__name__)
        b[1].run('vgchange --lock-stop %s' % VG, rc=None)


if '--lockd' not in sys.argv:
    real_devices()
lock_managers()
