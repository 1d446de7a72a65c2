"""Hosts whose storage `p` is a volume group on the shared disk: real device-mapper, with udevd or without."""
import re
from bench import Failed

VG = 'san'
CHUNK = 16 << 20
STORAGE = 'lvm: p\n\tvgname san\n\tcontent images\n\tsnapext 1\n\tthin-chunk 16M\n'
# the ways of a real host: udevd makes the nodes, LVM waits for it, udev looks into every device that appears or was written to
UDEV = ('mkdir -p /run/udev; /lib/systemd/systemd-udevd --daemon && udevadm trigger --action=add && udevadm settle '
        '&& printf "activation { udev_sync = 1 udev_rules = 1 monitoring = 0 }\\nbackup { backup = 0 archive = 0 }\\n" >/etc/lvm/lvmlocal.conf')


def prepare(bench, udev=False, more=''):
    """the group is made by the first host; all know the storage"""
    for h in bench:
        h.udev = udev
        h.run('modprobe -a dm-mod; mkdir -p /etc/varve; cat >/etc/varve/storage.cfg; %s' % (UDEV if udev else 'true'), limit=120,
              inp=(STORAGE + more).encode())
    bench[1].run('pvcreate -q --metadatasize 8m /dev/bench/san && vgcreate -q -s 4m %s /dev/bench/san' % VG, limit=120)


def sh(host, text, rc=0, limit=180, **kw):
    """a command on a host as the kernel and udev of that host want it"""
    return host.run(('unset DM_DISABLE_UDEV; ' if host.udev else '') + text, rc=rc, limit=limit, **kw)


def spawn(host, text, limit=300):
    return host.spawn(('unset DM_DISABLE_UDEV; ' if host.udev else '') + text, limit=limit)


def lvs(host):
    """{name: (bytes, tags)} of the group as LVM says"""
    out = {}
    for line in sh(host, 'lvs --noheadings --units b --nosuffix --separator "|" -o lv_name,lv_size,lv_tags %s' % VG).splitlines():
        name, size, tags = line.strip().split('|')
        out[name] = int(size), set(tags.split(',')) - {''}
    return out


def active(host):
    """{LV: how often it is open} of what the kernel of a host has; nothing may be suspended"""
    out = {}
    for line in sh(host, 'dmsetup info -c --noheadings --separator "|" -o name,open,suspended').splitlines():
        if '|' not in line:
            continue        # "No devices found"
        name, opened, suspended = line.split('|')
        if suspended.strip() != 'Active':
            raise Failed('host %d: %s is %s' % (host.id, name, suspended))
        if name.startswith(VG + '-'):
            out[name[len(VG) + 1:].replace('--', '-')] = int(opened)
    return out


def expect(what, got, want):
    if got != want:
        raise Failed('%s: %r, not %r' % (what, got, want))


def only_open(host):
    """of the LVs that are active each is open"""
    idle = [n for n, opened in active(host).items() if not opened]
    if idle:
        raise Failed('host %d: active, but nobody has them open: %s' % (host.id, ', '.join(idle)))


def expect_lvs(host, *names, exactly=()):
    """these LVs and no others are there, each with its guest's tag and without one of an operation under way"""
    now = lvs(host)
    expect('LVs', sorted(now), sorted(names))
    for name, (_, tags) in now.items():
        guest = 'pve-vm-' + re.search(r'(?:vm|base)-(\d+)-', name).group(1)
        odd = {t for t in tags if not t.startswith(('pve-', 'varve-taken='))}
        if guest not in tags or odd:
            raise Failed('tags of %s: %s' % (name, ', '.join(sorted(tags))))
    return now


def no_traces(host):
    """no intent, nothing hidden, no second names; the metadata is sound"""
    tags = sh(host, 'vgs --noheadings -o vg_tags %s' % VG).strip()
    names = [n for n, (_, tags_of) in lvs(host).items() if n.startswith('.varve')
             or any(t.startswith(('varve-also', 'varve-takes')) for t in tags_of)]
    if tags or names:
        raise Failed('left behind: %s %s' % (tags, names))
    sh(host, 'vgck %s' % VG)


def elements_ok(host, *names):
    """qemu-img check and reading through the LVs, activated for it as QEMU's own host would"""
    paths = ['/dev/%s/%s' % (VG, n) for n in names]
    sh(host, 'lvchange -ay %s && { for f in %s; do case $f in *.qcow2) qemu-img check -q -f qcow2 $f || exit 9;; esac; done; }; rc=$?; '
       'lvchange -an %s; exit $rc' % (' '.join('%s/%s' % (VG, n) for n in names), ' '.join(paths),
                                      ' '.join('%s/%s' % (VG, n) for n in names)))


def contents(host, top, patterns, below=(), fmt='qcow2'):
    """what QEMU reads through a chain of LVs. patterns: {offset in MiB: byte}, each for one MiB"""
    names = ' '.join('%s/%s' % (VG, n) for n in (top, *below))
    reads = ' '.join("-c 'read -P %d %dM 1M'" % (byte, at) for at, byte in sorted(patterns.items()))
    out = sh(host, 'lvchange -ay %s && qemu-io -r -f %s %s /dev/%s/%s; rc=$?; lvchange -an %s; exit $rc'
             % (names, fmt, reads, VG, top, names))
    if 'verification failed' in out:
        raise Failed('%s: %s' % (top, out))


SERVE = '''rm -f /run/{name}.sock
varve serve {volume} --export nbd,unix=/run/{name}.sock >/run/{name}.log 2>&1 </dev/null &
echo $! >/run/{name}.pid
for i in $(seq 600); do
    [ -S /run/{name}.sock ] && exit 0
    kill -0 $(cat /run/{name}.pid) 2>/dev/null || {{ cat /run/{name}.log >&2; exit 1; }}
    sleep .1
done
exit 1
'''
STOP = '''p=$(cat /run/{name}.pid); kill -{signal} $p
for i in $(seq 600); do kill -0 $p 2>/dev/null || exit 0; sleep .1; done; exit 1
'''


def serve(host, volume, name='disk'):
    """starts a server that outlives the command; it listens on /run/NAME.sock"""
    sh(host, 'setsid bash -c \'%s\'' % SERVE.format(name=name, volume=volume), limit=120)


def stop(host, name='disk', signal='TERM'):
    sh(host, STOP.format(name=name, signal=signal), limit=90)


def qio(host, *ops, name='disk', rc=0, export=''):
    out = sh(host, "qemu-io %s -f raw %s 'nbd+unix:///%s?socket=/run/%s.sock'"
             % ('-r' if export else '', ' '.join("-c '%s'" % o for o in ops), export, name), rc=rc)
    if rc == 0 and 'verification failed' in out:
        raise Failed(out)
    return out


def write(host, volume, *ops):
    """a server for as long as these commands of qemu-io take"""
    serve(host, volume, 'short')
    qio(host, *ops, 'flush', name='short')
    stop(host, 'short')
