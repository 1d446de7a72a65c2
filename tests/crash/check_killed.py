"""What a user sees of an image whose server was killed: `varve img check` looks at it as replay will make it, and says so. Journals that
are nobody's go."""
import os, random, sys
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'lib'))
from proc import *
from nbdclient import Nbd

need('qemu-img')
D = folder()
os.environ['VARVE_RUNTIME'] = D + '/run'
SIZE = 64 << 20
rnd = random.Random(SEED)


def journals():
    return os.listdir(D + '/run/journal')


def killed(name, options):
    path = '%s/%s' % (D, name)
    run('qemu-img', 'create', '-q', '-f', 'qcow2', '-o', options, path, str(SIZE))
    with Server(path, D + '/s') as server:
        with Nbd(D + '/s') as n:
            for i in range(60):
                n.write(rnd.randrange(SIZE >> 12) << 12, bytes([i + 1]) * 4096)
                if i % 20 == 7:
                    n.trim(rnd.randrange(SIZE >> 20) << 20, 1 << 20)
            server.kill()
    for _ in range(250): # the kernel gives its locks back a moment later
        rc, out = run('qemu-img', 'check', '-f', 'qcow2', path, rc=None)
        if 'lock' not in out:
            return path, rc
        time.sleep(.02)


def content(path):
    with open(path, 'rb') as f:
        return f.read()


def checked(path, rc, *argv):
    p = subprocess.run([VARVE, 'img', 'check', '--output=json', *argv, path], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if p.returncode != rc:
        raise Failed('img check %s: %d, not %d: %s %s' % (argv, p.returncode, rc, p.stdout, p.stderr))
    return json.loads(p.stdout), p.stderr.decode()


def seen_as_replayed(name, options):
    path, as_it_is = killed(name, options)
    if as_it_is != (0 if 'metadata' in options else 3):
        raise Failed('the kill left nothing to see: %d' % as_it_is)
    before, journal = content(path), content(D + '/run/journal/' + journals()[0])
    new, said = checked(path, 0)
    if new['journal-changes'] < 10 or 'as the next open for writing' not in said:
        raise Failed('%r %s' % (new, said))
    old, said = checked(path, as_it_is, '-U')
    if 'journal-changes' in old or 'as it is' not in said:
        raise Failed('%r %s' % (old, said))
    if content(path) != before or content(D + '/run/journal/' + journals()[0]) != journal:
        raise Failed('a check changed something')
    with Server(path, D + '/s') as server:
        server.stop()
    after, said = checked(path, 0)
    if said or after.get('allocated-clusters') != new.get('allocated-clusters') or 'journal-changes' in after:
        raise Failed('%r was foreseen, %r came: %s' % (new, after, said))
    check(path)


def journal_is_gone():
    path, _ = killed('gone', 'cluster_size=64k')
    for j in journals():
        os.unlink(D + '/run/journal/' + j)
    seen, said = checked(path, 3)
    if 'journal-changes' in seen or 'its journal is gone; checked as it is' not in said:
        raise Failed('%r %s' % (seen, said))


def stale_journals_go():
    """of an earlier boot: when a server starts; of a destroyed volume: with it. Others stay."""
    path, _ = killed('stays', 'cluster_size=64k')
    mine, = journals()
    with open('/proc/sys/kernel/random/boot_id', 'rb') as f:
        boot = f.read().strip()
    old = content(D + '/run/journal/' + mine).replace(boot, b'0' * 8 + boot[8:])
    for name in 'abc-1.map', 'abc-2.map':
        with open(D + '/run/journal/' + name, 'wb') as f:
            f.write(old)
    os.environ['VARVE_CONFIG'] = D + '/storage.cfg'
    os.makedirs(D + '/pool')
    with open(D + '/storage.cfg', 'w') as f:
        f.write('dir: p\n\tpath %s/pool\n\tcontent images\n\tsnapext 1\n' % D)
    varve('create', 'p:v', '64M', '--format', 'qcow2')
    with Server('p:v', D + '/s') as server:
        if len(journals()) != 2 or mine not in journals():
            raise Failed('a server started over %r' % journals())
        with Nbd(D + '/s') as n:
            n.write(0, b'x' * 65536)
        server.kill()
    for _ in range(100): # the kernel gives its locks back a moment later
        rc, out = run(VARVE, 'destroy', 'p:v', rc=None)
        if rc == 0:
            break
        time.sleep(.05)
    if rc or journals() != [mine]:
        raise Failed('after destroy: %r %s' % (journals(), out))
    new, _ = checked(path, 0)
    if new['journal-changes'] < 10:
        raise Failed('%r' % new)


for i, options in enumerate(['cluster_size=64k', 'cluster_size=4k', 'extended_l2=on,cluster_size=128k,preallocation=metadata',
                             'cluster_size=16k,refcount_bits=64']):
    seen_as_replayed('i%d' % i, options)
journal_is_gone()
stale_journals_go()
done('checks of killed images')
