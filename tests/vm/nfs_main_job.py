"""The main job on an NFS mount: one host with `varve serve` and its load, another one that exports a folder (NFS 4.2).

Create, serve, write with verification, snapshots, rollback and back, deletions under load, a network that is gone for some
seconds, kill -9 of the server. Prints the longest request around each step; judges contents alone.

  nfs_main_job.py [--json FILE]     VARVE_LONG=1: longer, the filer loses power and comes back, and the same on NFS 3 without that
"""
import json, os, sys, time
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE + '/lib')
from bench import Bench, Failed
from proc import LONG, SEED

CUT = 4     # seconds without network
MOUNT = {'4.2': 'vers=4.2,timeo=50 host2:/', '3': 'vers=3,nolock,timeo=50 host2:/srv/share'}


def start_filer(filer, fresh):
    """what the server knows of its clients (nfsdcld) is on its disk, as it would be on a real one: else they lose their locks"""
    filer.run('modprobe -a ext4 nfsd && mkdir -p /srv/disk /srv/share && %s mount /dev/bench/scratch /srv/disk '
              '&& mkdir -p /srv/disk/share /srv/disk/state && mount --bind /srv/disk/share /srv/share '
              '&& mount -t nfsd nfsd /proc/fs/nfsd && mount -t rpc_pipefs rpc /var/lib/nfs/rpc_pipefs '
              '&& nfsdcld -s /srv/disk/state && echo 10 >/proc/fs/nfsd/nfsv4leasetime '
              '&& echo 10 >/proc/fs/nfsd/nfsv4gracetime && rpcbind '
              '&& echo "/srv/share *(rw,sync,no_root_squash,no_subtree_check,fsid=0,insecure)" >/etc/exports '
              '&& exportfs -a && rpc.nfsd 4 && rpc.mountd%s'
              % (('mkfs.ext4 -q /dev/bench/scratch &&', ' && { echo Y >/proc/fs/nfsd/v4_end_grace || true; }') if fresh else ('', '')),
              limit=120)


def prepare(host, version):
    host.run('modprobe -a nfs nfsv3 nfsv4; mkdir -p /mnt /etc/varve; mount -t nfs -o %s /mnt && mkdir -p /mnt/images '
             '&& printf "nfs: p\\n\\tpath /mnt\\n\\tserver host2\\n\\texport /srv/share\\n\\tcontent images\\n\\tsnapext 1\\n" '
             '>/etc/varve/storage.cfg' % MOUNT[version], limit=90)
    host.put(HERE + '/guest/main_job.py', '/root/main_job.py')
    host.put(HERE + '/../lib/nbdclient.py', '/root/nbdclient.py')


def act(bench, what):
    if what == 'network gone':
        bench.cut(1, 2)
        time.sleep(CUT)
        bench.heal()
    elif what == 'filer without power':
        bench[2].kill()
        bench[2].start()
        start_filer(bench[2], fresh=False)
    else:
        raise Failed('the job asks for "%s"' % what)


def follow(bench, job, limit):
    """does what the job asks for, shows what it says, until it ends"""
    shown, end, share = 0, time.monotonic() + limit, bench[1].share
    while job.running():
        for name in [n for n in os.listdir(share) if n.startswith('ask.')]:
            os.unlink('%s/%s' % (share, name))
            act(bench, name[4:])
            open('%s/did.%s' % (share, name[4:]), 'w').close()
        text = job.read('out')
        print(text[shown:], end='', flush=True)
        shown = len(text)
        if time.monotonic() > end:
            raise Failed('the job does not end')
        time.sleep(.2)
    return job.wait().out.splitlines()


def main_job(version, outside):
    with Bench(hosts=2, scratch=2 << 30) as b:
        start_filer(b[2], fresh=True)
        prepare(b[1], version)
        print('NFS ' + version, flush=True)
        options = {'volume': 'p:100/vm-100-disk-0', 'size': (128 if LONG else 32) << 20, 'seconds': 10 if LONG else 2,
                   'outside': outside, 'seed': SEED}
        lines = follow(b, b[1].spawn("python3 /root/main_job.py '%s'" % json.dumps(options), limit=1500), 1500)
        b[1].run('for f in /mnt/images/100/*.qcow2; do qemu-img check -q $f || exit; done', limit=120)
        rows = json.loads(lines[-1])
        longest = max((r for r in rows if r['longest'] and r['what'] not in outside), key=lambda r: r['longest'])
        print('longest request: %.3f s, at "%s"' % (longest['longest'], longest['what']), flush=True)
        return rows


def main():
    out = {'4.2': main_job('4.2', ['network gone'] + (['filer without power'] if LONG else []))}
    if LONG:
        out['3'] = main_job('3', ['network gone'])
    if '--json' in sys.argv:
        with open(sys.argv[sys.argv.index('--json') + 1], 'w') as f:
            json.dump(out, f, indent=1)


main()
