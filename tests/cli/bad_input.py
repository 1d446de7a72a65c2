"""Bad input: one clear line on stderr, exit status 1 (2 for wrong usage), and nothing changed on disk."""
import hashlib, os, resource, signal, struct, subprocess, sys, time
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'lib'))
from proc import *

need('qemu-img', 'qemu-io')
D = folder()
os.chdir(D)
os.environ.update(VARVE_CONFIG=D + '/storage.cfg', VARVE_RUNTIME=D + '/run')
cases = 0


def tree():
    """names and contents of everything in the folder but sockets"""
    out = {}
    for folder_, dirs, files in os.walk(D):
        dirs[:] = [d for d in dirs if d != 'run']
        for f in files:
            p = os.path.join(folder_, f)
            if os.path.isfile(p) and not f.startswith('.varve'):
                st = os.stat(p)
                out[p] = (st.st_size, hashlib.sha256(open(p, 'rb').read()).hexdigest())
    return out


def bad(*argv, says=(), rc=1, limit=None, same=True):
    """the command must fail with `rc`, say one line that holds every word of `says`, and change nothing"""
    global cases
    before = tree()

    def limits():
        if limit is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    p = subprocess.run([VARVE, *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=60, preexec_fn=limits)
    err = p.stderr.decode('utf-8', 'replace')
    what = 'varve ' + ' '.join(argv)
    if p.returncode != rc:
        raise Failed('%s: exit status %d, not %d: %s' % (what, p.returncode, rc, err))
    lines = [l for l in err.splitlines() if 'warning' not in l and 'not used' not in l]
    if len(lines) != 1 or not lines[0].startswith('varve'):
        raise Failed('%s: not one line: %r' % (what, err))
    for s in says:
        if s.lower() not in lines[0].lower():
            raise Failed('%s: "%s" is missing in: %s' % (what, s, lines[0]))
    after = tree()
    if same and after != before:
        raise Failed('%s: changed %s' % (what, [k for k in set(before) | set(after) if before.get(k) != after.get(k)]))
    cases += 1


def poke(path, off, fmt, *values):
    with open(path, 'r+b') as f:
        f.seek(off)
        f.write(struct.pack(fmt, *values))


def images():
    run('qemu-img', 'create', '-q', '-f', 'qcow2', 'good.qcow2', '64M')
    qio('good.qcow2', 'write -P 1 0 1M')
    open('text', 'w').write('no image at all\n')
    open('empty', 'w').close()
    data = open('good.qcow2', 'rb').read()
    for n in (3, 50, 100, 400, 65536, 196608, 262144, 300000):
        open('cut%d.qcow2' % n, 'wb').write(data[:n])
    reading = [('img', 'info'), ('img', 'map'), ('img', 'check'), ('img', 'convert')]
    for group, verb in reading:
        target = ['out.raw'] if verb == 'convert' else []
        bad(group, verb, 'missing.qcow2', *target, says=['missing.qcow2', 'no such file'])
        bad(group, verb, '.', *target, says=["'.'"])
        bad(group, verb, '-f', 'qcow2', 'text', *target, says=['text', 'not a qcow2'])
        bad(group, verb, '-f', 'qcow2', 'empty', *target, says=['empty'])
        bad(group, verb, '-f', 'vmdk', 'good.qcow2', *target, says=['vmdk', 'format'])
        for n in (3, 50):
            bad(group, verb, '-f', 'qcow2', 'cut%d.qcow2' % n, *target, says=['cut'])
    for n in (100, 400, 65536, 196608):
        bad('img', 'convert', '-f', 'qcow2', 'cut%d.qcow2' % n, 'out.raw', says=['cut'])
        bad('serve', 'cut%d.qcow2' % n, '-f', 'qcow2', says=['cut'])
    for name, off, fmt, value in (('version', 4, '>I', 9), ('cluster_bits', 20, '>I', 40), ('size', 24, '>Q', 1 << 63),
                                  ('l1_size', 36, '>I', 0x7fffffff), ('l1_off', 40, '>Q', 1 << 40), ('rt_off', 48, '>Q', 12345),
                                  ('incompat', 72, '>Q', 1 << 40), ('refcount_order', 96, '>I', 9), ('header_length', 100, '>I', 7)):
        f = 'bad-%s.qcow2' % name
        open(f, 'wb').write(data)
        poke(f, off, fmt, value)
        bad('serve', f, '-f', 'qcow2', says=[f])
        if name not in ('rt_off',):
            bad('img', 'convert', '-f', 'qcow2', f, 'out.raw', says=[f])


def chains():
    run('qemu-img', 'create', '-q', '-f', 'qcow2', 'a.qcow2', '1M')
    run('qemu-img', 'create', '-q', '-f', 'qcow2', 'b.qcow2', '1M')
    run('qemu-img', 'rebase', '-u', '-f', 'qcow2', '-b', 'b.qcow2', '-F', 'qcow2', 'a.qcow2')
    run('qemu-img', 'rebase', '-u', '-f', 'qcow2', '-b', 'a.qcow2', '-F', 'qcow2', 'b.qcow2')
    run('qemu-img', 'create', '-q', '-f', 'qcow2', 'self.qcow2', '1M')
    run('qemu-img', 'rebase', '-u', '-f', 'qcow2', '-b', 'self.qcow2', '-F', 'qcow2', 'self.qcow2')
    run('qemu-img', 'create', '-q', '-u', '-f', 'qcow2', '-b', 'gone.qcow2', '-F', 'qcow2', 'orphan.qcow2', '1M')
    for f in ('a.qcow2', 'self.qcow2'):
        bad('img', 'map', f, says=[f.split('.')[0]])
        bad('img', 'convert', f, 'out.raw')
        bad('serve', f, '-f', 'qcow2')
        bad('img', 'info', '--backing-chain', f)
        varve('img', 'info', f)
    bad('img', 'map', 'orphan.qcow2', says=['gone.qcow2'])
    bad('serve', 'orphan.qcow2', says=['gone.qcow2'])
    bad('img', 'create', '-b', 'gone.qcow2', '-F', 'qcow2', 'new.qcow2', says=['gone.qcow2'])
    bad('img', 'create', '-b', 'good.qcow2', 'new.qcow2', says=['-F'])
    bad('img', 'create', '-b', 'good.qcow2', '-F', 'qcow2', '-o', 'preallocation=metadata', 'new.qcow2', says=['extended'])


def options():
    for o, word in (('cluster_size=3k', 'cluster'), ('cluster_size=4M', 'cluster'), ('cluster_size=4k,extended_l2=on', 'extended'),
                    ('refcount_bits=7', 'refcount'), ('compat=3', 'compat'), ('shiny=1', 'shiny'), ('preallocation=some', 'some'),
                    ('compat=0.10,extended_l2=on', 'extended'), ('compat=0.10,refcount_bits=8', 'refcount'),
                    ('compat=0.10,compression_type=zstd', 'compression'), ('compat=0.10,lazy_refcounts=on', 'lazy')):
        bad('img', 'create', '-o', o, 'new.qcow2', '1M', says=[word])
    bad('img', 'create', 'new.qcow2', says=['size'])
    bad('img', 'create', 'new.qcow2', '10X', says=['10X'])
    bad('img', 'create', 'no/such/dir.qcow2', '1M', says=['no/such/dir.qcow2'])
    bad('img', 'resize', 'good.qcow2', '32M', says=['shrink'])
    bad('img', 'convert', 'good.qcow2', 'good.qcow2', says=['same file'])
    bad('img', 'info', rc=2, says=['FILE'])
    bad('img', 'info', '--nonsense', 'good.qcow2', rc=2, says=['nonsense'])
    bad('nonsense', rc=2, says=['nonsense'])


def full_and_read_only():
    """a file that cannot grow (as on a full file system), and one that may not be written"""
    bad('img', 'create', 'new.qcow2', '8M', '-o', 'preallocation=full', limit=2 << 20, says=['new.qcow2'])
    bad('img', 'create', 'new.qcow2', '8M', '-o', 'preallocation=falloc', limit=2 << 20, says=['new.qcow2'])
    bad('img', 'convert', '-O', 'qcow2', 'good.qcow2', 'new.qcow2', limit=500000)
    bad('img', 'create', 'good.qcow2', '8M', '-o', 'preallocation=full', limit=2 << 20)   # the old one stays
    loop = D + '/mnt'
    if os.geteuid() == 0 and run('sh', '-c', 'mkdir mnt; truncate -s 8M fs; mkfs.ext4 -q fs && mount -o loop fs mnt', rc=None)[0] == 0:
        try:
            run('cp', 'good.qcow2', 'mnt/g.qcow2')
            run('qemu-img', 'create', '-q', '-f', 'qcow2', 'big.qcow2', '32M')
            qio('big.qcow2', 'write -P 7 0 32M')
            bad('img', 'convert', '-O', 'raw', 'big.qcow2', 'mnt/full.raw', says=['space'], same=False)
            if os.path.exists('mnt/full.raw') or [f for f in os.listdir('mnt') if 'part' in f]:
                raise Failed('a failed conversion left a file behind')
            run('mount', '-o', 'remount,ro', 'mnt')
            bad('img', 'resize', 'mnt/g.qcow2', '128M', says=['read-only'], same=False)
            bad('serve', 'mnt/g.qcow2', says=['read-only'], same=False)
            bad('img', 'create', 'mnt/new.qcow2', '1M', says=['read-only'], same=False)
        finally:
            run('umount', 'mnt')
            run('rm', '-rf', 'mnt', 'fs')
    else:
        print('no loop mounts here: full and read-only file systems only by limits')


def in_use():
    """two servers on one image, a server and QEMU: the second one is refused"""
    run('cp', 'good.qcow2', 'used.qcow2')
    with Server('used.qcow2', D + '/s') as server:
        bad('serve', 'used.qcow2', says=['used.qcow2'], same=False)
        bad('img', 'resize', 'used.qcow2', '128M', says=['used.qcow2'], same=False)
        bad('img', 'create', 'used.qcow2', '1M', says=['used.qcow2'], same=False)
        bad('img', 'check', 'used.qcow2', says=['used.qcow2'], same=False)
        for fmt in ('raw', 'qcow2'):
            bad('img', 'convert', '-O', fmt, 'good.qcow2', 'used.qcow2', says=['used.qcow2'], same=False)
        varve('img', 'info', '-U', 'used.qcow2')
        rc, out = run('qemu-io', '-f', 'qcow2', '-c', 'write 0 64k', 'used.qcow2', rc=None)
        if rc == 0 or 'lock' not in out:
            raise Failed('QEMU could open a served image for writing: ' + out)
        server.stop()
    q = subprocess.Popen(['qemu-io', '-f', 'qcow2', 'used.qcow2'], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    inode = ':%d ' % os.stat('used.qcow2').st_ino
    while inode not in open('/proc/locks').read():     # until QEMU has its locks
        time.sleep(.02)
    time.sleep(.2)
    bad('serve', 'used.qcow2', says=['used.qcow2'], same=False)
    bad('img', 'resize', 'used.qcow2', '128M', same=False)
    q.communicate()
    varve('img', 'resize', 'used.qcow2', '128M')


def interrupted():
    """ctrl-C leaves no half image behind"""
    run('qemu-img', 'create', '-q', '-f', 'qcow2', 'long.qcow2', '512M')
    qio('long.qcow2', 'write -P 3 0 512M')
    p = subprocess.Popen([VARVE, 'img', 'convert', '-O', 'raw', 'long.qcow2', 'long.raw'], stderr=subprocess.DEVNULL)
    while not [f for f in os.listdir('.') if f.startswith('long.raw.part')] and p.poll() is None:
        time.sleep(.001)
    met = p.poll() is None
    p.send_signal(signal.SIGINT)
    p.wait()
    left = [f for f in os.listdir('.') if f.startswith('long.raw')]
    if met and (p.returncode != -signal.SIGINT or left):
        raise Failed('interrupted conversion: status %s, left %s' % (p.returncode, left))
    print('a conversion was interrupted' if met else 'the conversion was too fast to be interrupted')


def config():
    bad('list', '--config', 'missing.cfg', says=['missing.cfg'])
    open('storage.cfg', 'w').write('dir: ok\n\tpath %s/pool\n\tcontent images\n\ndir: ok2\n\tcontent images\n\n\tpath /x\n' % D)
    os.makedirs('pool')
    bad('list', 'ok2', says=['storage.cfg:5', 'path'])
    bad('list', 'nothere', says=['nothere'])
    varve('create', 'ok:a', '1M')
    bad('create', 'ok:a', '1M', says=['exists'])
    bad('create', 'ok2:a', '1M', says=['path'])
    bad('create', 'ok:../a', '1M')
    bad('create', 'ok:a b', '1M')
    bad('create', 'a', '1M')
    bad('info', 'ok:nothere', says=['nothere'])
    bad('snapshot', 'ok:a', says=['@'])
    bad('snapshot', 'ok:nothere@s', says=['nothere'])
    bad('rollback', 'ok:a@nope', says=['nope'])
    bad('destroy', 'ok:a@nope', says=['nope'])
    bad('resize', 'ok:a', '512k')
    bad('create', 'ok:b', '1M', '-o', 'cluster_size=0', says=['cluster'])
    bad('serve', 'ok:a', '-f', 'raw', says=['--format'])
    bad('serve', 'good.qcow2', '--cache-size', '0', says=['--cache-size'])
    bad('import', 'missing', 'ok:b', says=['missing'])
    bad('import', 'orphan.qcow2', 'ok:b', says=['backing'])


def longer_than_files():
    """a disk longer than the file system's files: made without preallocation, unless that was asked for"""
    if os.statvfs(D).f_bsize and run('truncate', '-s', '20T', 'probe', rc=None)[0] == 0:
        print('this file system has files of 20 TiB')
    else:
        bad('create', 'ok:huge', '20T', '-o', 'preallocation=metadata', says=['preallocation'])
    if os.path.exists('probe'):
        os.unlink('probe')
    varve('create', 'ok:huge', '20T')
    varve('snapshot', 'ok:huge@s')
    varve('destroy', 'ok:huge@s')
    varve('destroy', 'ok:huge')


images()
chains()
options()
full_and_read_only()
in_use()
interrupted()
config()
longer_than_files()
done('%d bad inputs refused' % cases)
