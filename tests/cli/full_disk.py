"""A full file system: what was answered reaches the image, which then is whole and opens again.

Writes go to a new place of the disk each, so that each needs a new L2 table, until the file system is full and on; then the
server ends. Tables must have had their room when the writes were answered.
"""
import os, subprocess, sys
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'lib'))
from killmodel import *

need('qemu-io', 'qemu-img', 'mkfs.ext4')
if os.geteuid() != 0:
    print('SKIP: mounting needs root')
    sys.exit(77)
D = folder()
os.environ['VARVE_RUNTIME'] = D + '/run'
MNT, IMG, SOCK = D + '/m', D + '/m/a.qcow2', D + '/s'
STEP = 512 << 20 # what one L2 table maps


def mount():
    os.makedirs(MNT, exist_ok=True)
    run('truncate', '-s', '64M', D + '/fs')
    run('mkfs.ext4', '-q', '-F', D + '/fs')
    rc, out = run('mount', '-o', 'loop', D + '/fs', MNT, rc=None)
    if rc:
        print('SKIP: no loop mount: ' + out)
        folder.bad = False
        sys.exit(77)


def fill():
    """writes until the first one is refused, then some more; the numbers of those that were answered"""
    c, answered, refused = Client(SOCK), [], 0
    for i in range(190):
        c.send(1, i * STEP, 1 << 20, bytes([i + 1]) * (1 << 20))
        if c.answer()[1]:
            refused += 1
        else:
            answered.append(i)
        if refused >= 5:
            break
    if not refused or len(answered) < 20:
        raise Failed('%d writes were answered, %d refused' % (len(answered), refused))
    return answered


def scenario(how, kill):
    if how == 'varve':
        varve('img', 'create', '-q', '-f', 'qcow2', IMG, '100G')
    else:
        run('qemu-img', 'create', '-q', '-f', 'qcow2', IMG, '100G')
    with Server(IMG, SOCK) as server:
        answered = fill()
        free = os.statvfs(MNT).f_bfree * os.statvfs(MNT).f_bsize
        if kill:
            server.kill()
        else:
            server.stop()
    wait_unlocked(IMG)
    with Server(IMG, SOCK) as server: # replays
        server.stop()
    check(IMG, (0, 3))
    for i in answered:
        qio(IMG, 'read -P %d %d 1M' % (i + 1, i * STEP), opts=('-r',))
    print('%s, %s: %d answered, %d KiB free then' % (how, 'killed' if kill else 'stopped', len(answered), free >> 10))
    os.unlink(IMG)


def main():
    mount()
    try:
        for how in ('varve', 'qemu-img'):
            for kill in (False, True):
                scenario(how, kill)
    finally:
        run('umount', MNT, rc=None)
    done('ok')


main()
