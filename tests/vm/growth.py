"""What growing files cost a file system: allocations while a guest writes to a new qcow2 image, with and without growth
in steps, on ext4, xfs, NFS 3 and 4.2, GFS2 and OCFS2, by varve and by QEMU.

Counted by the file systems' own tracepoints, never timed. On a shared file system each allocation and each growth of
a file takes a lock that all hosts agree on, so their number is what steps are for. Must hold for varve: with
steps a few allocations a step at most; without, several times as many. (NFS 3 has no allocation ahead: there
both are the same.)

  growth.py [--json FILE]    prints a table; VARVE_LONG=1: sequential writes, the default step, more data
  growth.py --markdown FILE  prints what an earlier run left in FILE as the table of docs/growth.md
"""
import json, os, sys
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE + '/lib')
from bench import Bench, Failed
from proc import LONG, SEED

MIB = 1 << 20
STEP = (8 if LONG else 4) * MIB
AMOUNT = (128 if LONG else 16) * MIB
ALLOCATED = {'ext4': ['ext4/ext4_allocate_blocks'], 'xfs': ['xfs/xfs_iomap_alloc', 'xfs/xfs_alloc_file_space'],
             'gfs2': ['gfs2/gfs2_block_alloc'], 'ocfs2': ['ocfs2/ocfs2_add_clusters_in_btree']}
MAKE = {'ext4': 'mkfs.ext4 -q -F', 'xfs': 'mkfs.xfs -q -f', 'gfs2': 'mkfs.gfs2 -q -O -p lock_nolock -j 1 -J 8',
        'ocfs2': 'mkfs.ocfs2 -q -x -F -b 4K -C 4K -J size=8M -N 1 -M local'}
FILE_SYSTEMS = ['ext4', 'xfs', 'gfs2', 'ocfs2', 'nfs4', 'nfs3']
# What a file system may need: allocations a step (in pieces that its groups allow), and for the image's tables and its own;
# and how many times as many there are without steps (XFS takes space ahead by itself)
MOST = {'ext4': (2, 8, 4), 'xfs': (1, 6, 2), 'gfs2': (6, 12, 4), 'ocfs2': (1, 8, 4), 'nfs4': (2, 8, 4)}


def serve_nfs(host):
    host.run('modprobe -a nfsd nfs nfsv3 nfsv4; mkdir -p /srv/share /mnt && mount -t nfsd nfsd /proc/fs/nfsd '
             '&& mount -t rpc_pipefs rpc /var/lib/nfs/rpc_pipefs && echo 10 >/proc/fs/nfsd/nfsv4leasetime '
             '&& echo 10 >/proc/fs/nfsd/nfsv4gracetime && rpcbind && rpc.nfsd 4 && rpc.mountd && echo Y >/proc/fs/nfsd/v4_end_grace '
             '&& echo "/srv/share *(rw,no_root_squash,no_subtree_check,fsid=0,insecure)" >/etc/exports')


def mount(host, kind):
    """mounts a fresh file system at /mnt; the folder in which its files really are"""
    lower = kind if kind in MAKE else 'ext4'
    place = '/mnt' if kind in MAKE else '/srv/share'
    host.run('modprobe %s; mkdir -p %s; mount -t configfs c /sys/kernel/config 2>/dev/null; umount -q /mnt /srv/share; '
             '%s /dev/bench/scratch </dev/null && mount -t %s /dev/bench/scratch %s'
             % (lower, place, MAKE[lower], lower, place), limit=90)
    if place != '/mnt':
        host.run('exportfs -ra && mount -t nfs -o %s /mnt'
                 % ('vers=4.2 127.0.0.1:/' if kind == 'nfs4' else 'vers=3,nolock 127.0.0.1:/srv/share'))
    return place


def unmount(host, kind):
    host.run('umount /mnt; if mountpoint -q /srv/share; then exportfs -ua; exportfs -f; umount /srv/share; fi')


def cases():
    for kind in FILE_SYSTEMS:
        for writes in ('random', 'seq') if LONG else ('random',):
            for server, steps in (('varve', (0, STEP, 128 * MIB) if LONG else (0, STEP)), ('qemu', (0, STEP))):
                for step in steps:
                    yield kind, writes, server, step


def judge(rows):
    """what must hold for varve, by counts alone"""
    bad = []
    for kind, (a_step, more, times) in MOST.items():
        for writes in {r['writes'] for r in rows}:
            of = {r['step']: r for r in rows if (r['fs'], r['writes'], r['server']) == (kind, writes, 'varve')}
            for step in of:
                most = -(-AMOUNT // step) * a_step + more if step else 0
                if step and of[step]['allocations'] > most:
                    bad.append('%s %s, step %d MiB: %d allocations, more than %d'
                               % (kind, writes, step // MIB, of[step]['allocations'], most))
                if step and of[0]['allocations'] < times * of[step]['allocations']:
                    bad.append('%s %s: %d allocations without steps, %d with steps of %d MiB: too few to tell them apart'
                               % (kind, writes, of[0]['allocations'], of[step]['allocations'], step // MIB))
    if bad:
        raise Failed('\n'.join(bad))


def markdown(rows):
    """the table of docs/growth.md"""
    print('| on | writes | by | step | allocations | pieces | held, MiB | after close, MiB | NFS operations |\n|---|---|---|---:|---:|---:|---:|---:|---|')
    for r in rows:
        print('| %s | %s | %s | %s | %d | %d | %.1f | %.1f | %s |'
              % (r['fs'], r['writes'], r['server'], '%d MiB' % (r['step'] // MIB) if r['step'] else 'off', r['allocations'], r['pieces'],
                 r['held'] / MIB, r['closed'] / MIB, operations(r)))


def operations(r):
    return ', '.join('%s %d' % (k.lower(), r['nfs'][k]) for k in ('WRITE', 'ALLOCATE', 'SETATTR') if r['nfs'].get(k))


def main():
    if '--markdown' in sys.argv:
        with open(sys.argv[sys.argv.index('--markdown') + 1]) as f:
            return markdown(json.load(f)['rows'])
    rows = []
    with Bench(scratch=2 << 30, memory=640) as b:
        host = b[1]
        host.put(HERE + '/guest/growth_side.py', '/root/growth_side.py')
        host.put(HERE + '/../lib/nbdclient.py', '/root/nbdclient.py')
        serve_nfs(host)
        print('%-6s %-7s %-6s %9s  %11s %7s %9s %9s  %s' % ('on', 'writes', 'by', 'step MiB', 'allocations', 'pieces',
                                                           'held MiB', 'left MiB', 'NFS operations'))
        mounted = None
        for kind, writes, server, step in cases():
            if kind != mounted:
                if mounted:
                    unmount(host, mounted)
                place, mounted = mount(host, kind), kind
            case = {'folder': '/mnt', 'backing': place, 'server': server, 'step': step, 'writes': writes, 'amount': AMOUNT,
                    'seed': SEED, 'events': ALLOCATED[kind if kind in ALLOCATED else 'ext4']}
            r = json.loads(host.run("python3 /root/growth_side.py '%s'" % json.dumps(case), limit=120))
            r.update(fs=kind, writes=writes, server=server, step=step, allocations=sum(r['events'].values()))
            rows.append(r)
            print('%-6s %-7s %-6s %9s  %11d %7d %9.1f %9.1f  %s'
                  % (kind, writes, server, step // MIB or '-', r['allocations'], r['pieces'], r['held'] / MIB, r['closed'] / MIB,
                     operations(r)),
                  flush=True)
        unmount(host, mounted)
        if '--json' in sys.argv:
            with open(sys.argv[sys.argv.index('--json') + 1], 'w') as f:
                json.dump({'amount': AMOUNT, 'rows': rows}, f, indent=1)
        judge(rows)


main()
