"""Operations on idle volumes of a VG with real device-mapper and udevd: a raw volume as the oldest element, template, linked clone, rename,
destruction; what a snapshot takes; what a killed server and a killed tool of LVM leave. After each nothing is active.
"""
import os, sys, time
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE + '/lib')
from bench import Bench, Failed
from lvmhost import (CHUNK, active, contents, elements_ok, expect, expect_lvs, lvs, no_traces, prepare, qio, serve, sh, stop, write)

MIB = 1 << 20


def op(host, words, rc=0):
    """one command of varve; nothing stays active"""
    begin = time.monotonic()
    r = sh(host, 'varve ' + words, rc=None)
    if r.rc != rc:
        raise Failed('varve %s: status %d: %s%s' % (words, r.rc, r.out, r.err))
    print('%5.1f s  %s' % (time.monotonic() - begin, words), flush=True)
    expect('active after ' + words, active(host), {})
    return r.out + r.err


def raw(host):
    disk = 'vm-101-disk-0'
    op(host, 'create p:%s 24M --format raw' % disk)
    write(host, 'p:' + disk, 'write -P 1 0 1M', 'write -P 1 20M 1M')
    op(host, 'snapshot p:%s@s1' % disk)
    expect_lvs(host, disk + '.qcow2', 'snap_%s_s1' % disk)
    write(host, 'p:' + disk, 'write -P 2 0 1M')
    contents(host, disk + '.qcow2', {0: 2, 20: 1}, ['snap_%s_s1' % disk])
    contents(host, 'snap_%s_s1' % disk, {0: 1, 20: 1}, fmt='raw')
    op(host, 'destroy p:%s@s1' % disk)
    expect_lvs(host, disk)
    contents(host, disk, {0: 2, 20: 1}, fmt='raw')
    op(host, 'destroy p:' + disk)


def clone(host):
    base, disk, new = 'base-102-disk-0', 'vm-103-disk-0', 'vm-104-disk-5'
    op(host, 'create p:vm-102-disk-0 32M')
    write(host, 'p:vm-102-disk-0', 'write -P 3 0 2M')
    op(host, 'template p:vm-102-disk-0')
    op(host, 'clone p:%s p:%s' % (base, disk))
    write(host, 'p:' + disk, 'write -P 4 1M 1M')
    op(host, 'destroy p:' + base, rc=1)
    op(host, 'rename p:%s %s' % (disk, new))
    now = expect_lvs(host, base + '.qcow2', new + '.qcow2')
    contents(host, new + '.qcow2', {0: 3, 1: 4}, [base + '.qcow2'])
    elements_ok(host, *now)
    op(host, 'destroy p:' + new)
    op(host, 'destroy p:' + base)


def space_and_kills(host):
    """40 MiB of changes; then a server and a tool of LVM are killed, which deactivate and resume nothing themselves"""
    disk = 'vm-105-disk-0'
    op(host, 'create p:%s 64M' % disk)
    op(host, 'snapshot p:%s@s' % disk)
    write(host, 'p:' + disk, 'write -P 5 8M 40M')
    length = lvs(host)[disk + '.qcow2'][0]
    print('         an LV of %d MiB for 40 MiB of changes' % (length / MIB), flush=True)
    if not 40 * MIB < length <= 2 * CHUNK + 42 * MIB:
        raise Failed('that is not at most two chunks more')
    serve(host, 'p:' + disk)
    stop(host, signal='KILL')
    expect('active after kill -9', sorted(active(host)), sorted([disk + '.qcow2', 'snap_%s_s.qcow2' % disk]))
    sh(host, 'dmsetup suspend --noflush san-%s.qcow2' % disk.replace('-', '--'))
    sh(host, 'timeout -k 1 60 varve list', limit=90)
    op(host, 'snapshot p:%s@t' % disk)
    length = lvs(host)['snap_%s_t.qcow2' % disk][0]
    if not 40 * MIB < length <= 42 * MIB + 4 * MIB:     # its end, in extents
        raise Failed('an LV of %d MiB for a snapshot of 40 MiB' % (length / MIB))
    contents(host, disk + '.qcow2', {8: 5, 47: 5, 50: 0}, ['snap_%s_s.qcow2' % disk, 'snap_%s_t.qcow2' % disk])
    op(host, 'destroy p:' + disk)


def main():
    with Bench(san=2 << 30, memory=700, packages=('udev',)) as b:
        prepare(b, udev=True)
        for part in (raw, clone, space_and_kills):
            part(b[1])
            expect('LVs after ' + part.__name__, lvs(b[1]), {})
            no_traces(b[1])


main()
