"""What a user sees of an image whose server was killed: `varve img check` looks at it as replay will make it, and says so."""
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


for i, options in enumerate(['cluster_size=64k', 'cluster_size=4k', 'extended_l2=on,cluster_size=128k,preallocation=metadata',
                             'cluster_size=16k,refcount_bits=64']):
    seen_as_replayed('i%d' % i, options)
journal_is_gone()
done('checks of killed images')
