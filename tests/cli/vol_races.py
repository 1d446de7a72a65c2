"""A volume's server starting while an operation changes the volume, pools that are full, volumes that are broken."""
import json, os, random, subprocess, sys, time
from volmodel import MIB, Pool
from proc import LONG, SEED, VARVE, Failed, done, folder, need, run
from nbdclient import Nbd
from volserver import Served

need('qemu-img', 'qemu-io')
BASE = folder()
V, W = '100/vm-100-disk-0', '100/vm-100-disk-1'
TRIES = 200 if LONG else 25
R = random.Random(SEED)


def fresh(name):
    home = os.path.join(BASE, name)
    os.makedirs(home)
    return Pool(home)


def start(pool, what, sock):
    return subprocess.Popen(pool.argv('serve', what, '--export', 'nbd,unix=' + sock), env=pool.env(),
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def up(p, sock):
    """waits until the server listens; False: it has ended"""
    for _ in range(1000):
        try:
            Nbd(sock).close()
            return True
        except (OSError, EOFError):
            if p.poll() is not None:
                return False
            time.sleep(.01)
    raise Failed('varve serve neither listens nor ends')


def stop(p):
    if p.poll() is None:
        p.terminate()
    out = p.communicate(timeout=60)[0].decode()
    if p.returncode:
        raise Failed('varve serve ended with %d: %s' % (p.returncode, out))


def written_inodes(pid):
    """the images that a process has open for writing"""
    out, fds = set(), '/proc/%d/fd' % pid
    for fd in os.listdir(fds):
        try:
            path = os.readlink(os.path.join(fds, fd))
            with open('/proc/%d/fdinfo/%s' % (pid, fd)) as f:
                flags = int(f.read().split('flags:')[1].split()[0], 8)
            if ('.qcow2' in path or '.raw' in path) and flags & 3 == 2:
                out.add(os.stat(os.path.join(fds, fd)).st_ino)
        except FileNotFoundError:
            pass  # a connection that has ended
    return out


def check_server(pool, p, what):
    if os.stat(pool.file(V)).st_ino not in written_inodes(p.pid):
        raise Failed('%s: the server writes to a file that is not the volume' % what)


# ---- a server that starts beside an operation ----
def race(name, prepare, args, model):
    """the operation may be refused and the server may be; who goes on is on the right files"""
    pool, both = fresh(name), 0
    pool.create(V)
    pool.write(V, 0, MIB, 1)
    pool.snapshot(V, 'base')
    for i in range(TRIES):
        prepare(pool, i)
        sock = os.path.join(BASE, name, 'nbd')
        p = start(pool, pool.id(V), sock)
        time.sleep(R.random() * .03)
        rc, out = pool.varve(*args(pool, i), rc=None)
        if rc == 0:
            model(pool, i)
        if up(p, sock):
            both += rc == 0
            check_server(pool, p, '%s (ended with %d: %s)' % (name, rc, out))
            with Nbd(sock) as n:
                n.write(65536 * i % (2 * MIB), bytes([i % 250 + 1]) * 4096)
                n.flush()
            data = bytearray(pool.vols[V][None])
            off = 65536 * i % (2 * MIB)
            data[off:off + 4096] = bytes([i % 250 + 1]) * 4096
            pool.vols[V][None] = bytes(data)
        stop(p)
    pool.verify()
    print('%s: %d of %d times both went on' % (name, both, TRIES), flush=True)
    if not both:
        raise Failed('%s: never did both go on' % name)


def serve_and_snapshot():
    def drop(pool, i):
        if i > 2:
            pool.destroy(V, 'n%d' % (i - 3)) if 'n%d' % (i - 3) in pool.vols[V] else None

    def model(pool, i):
        pool.vols[V]['n%d' % i] = pool.vols[V][None]
    race('snapshot', drop, lambda pool, i: ['snapshot', pool.id(V, 'n%d' % i)], model)


def serve_and_rollback():
    def model(pool, i):
        pool.vols[V][None] = pool.vols[V]['base']
    race('rollback', lambda pool, i: None, lambda pool, i: ['rollback', pool.id(V, 'base')], model)


def serve_and_destroy_snapshot():
    def take(pool, i):
        if 'x' not in pool.vols[V]:
            pool.snapshot(V, 'x')

    def model(pool, i):
        del pool.vols[V]['x']
    race('destroy-snapshot', take, lambda pool, i: ['destroy', pool.id(V, 'x')], model)


def serve_and_destroy():
    """never a server on files that are gone"""
    pool = fresh('destroy')
    sock = os.path.join(BASE, 'destroy', 'nbd')
    for i in range(TRIES):
        if V not in pool.vols:
            pool.create(V)
        p = start(pool, pool.id(V), sock)
        time.sleep(R.random() * .03)
        rc, out = pool.varve('destroy', pool.id(V), rc=None)
        alive = up(p, sock)
        if rc == 0:
            del pool.vols[V]
        if alive and rc == 0:
            raise Failed('the volume is destroyed and served')
        if alive:
            check_server(pool, p, 'destroy')
            stop(p)
        elif rc:
            raise Failed('both were refused: %s %s' % (out, p.stdout.read()))
        else:
            p.communicate()


def renamed_while_waited_for():
    """a file that got another's name while its opener waited for the lock: the name counts"""
    home = os.path.join(BASE, 'renamed')
    os.makedirs(home)
    old, new, sock = home + '/a.qcow2', home + '/b.qcow2', home + '/nbd'
    for path in old, new:
        run('qemu-img', 'create', '-q', '-f', 'qcow2', path, '4M')
    q = subprocess.Popen(['qemu-io', '-f', 'qcow2', old], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    q.stdin.write(b'write -P 7 0 4096\n')
    q.stdin.flush()
    q.stdout.readline()
    want = os.stat(new).st_ino
    p = subprocess.Popen([VARVE, 'serve', old, '--export', 'nbd,unix=' + sock], stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT)
    for _ in range(2000):
        fds = '/proc/%d/fd/' % p.pid
        if any(os.path.realpath(fds + fd) == old for fd in os.listdir(fds)):
            break
        time.sleep(.001)
    os.rename(new, old)
    q.stdin.close()
    q.wait()
    if not up(p, sock):
        raise Failed('not served: %s' % p.stdout.read())
    if written_inodes(p.pid) != {want}:
        raise Failed('the file that has lost its name is served')
    stop(p)


def at_once_after_start():
    """as soon as a client can connect, operations find the server"""
    pool = fresh('start')
    pool.create(V)
    sock = os.path.join(BASE, 'start', 'nbd')
    for i in range(TRIES):
        p = start(pool, pool.id(V), sock)
        if not up(p, sock):
            raise Failed('not served: %s' % p.stdout.read())
        pool.snapshot(V, 's')
        pool.destroy(V, 's')
        if i % 2:
            p.kill()
            p.communicate()
        else:
            stop(p)
    pool.check_images((0, 3))


def long_operation():
    """an operation of hours does not keep a killed server from starting again"""
    pool = fresh('long')
    pool.create(V)
    pool.write(V, 0, 4 * MIB, 1)
    pool.snapshot(V, 's1')
    lock = os.path.join(pool.images, '.varve', 'lock')
    holder = subprocess.Popen(
        ['python3', '-c', 'import fcntl,struct,sys;f=open(sys.argv[1],"r+b");'
         'fcntl.fcntl(f,37,struct.pack("hhqqi4x",1,0,1,(1<<62),0));print("held",flush=True);sys.stdin.read()', lock],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    holder.stdout.readline()
    out = pool.varve('snapshot', pool.id(V, 's2'), rc=1)
    if 'under way' not in out:
        raise Failed('the lock was not looked at: %s' % out)
    s = Served(pool, V)
    s.write(0, 4096, 5)
    holder.stdin.close()
    holder.wait()
    s.stop()
    pool.verify()


def opened_after_a_kill():
    """recovery does not take the name of an image that another program has opened since"""
    pool = fresh('opened')
    for v in V, W:
        pool.create(v)
        pool.write(v, 0, MIB, 1)
    pool.varve('snapshot', pool.id(V, 's'), pool.id(W, 's'), rc=-9, env={'VARVE_CRASH_AT': 'snapshot-switched:1'})
    q = subprocess.Popen(['qemu-io', '-f', 'qcow2', pool.file(W)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    q.stdin.write(b'write -P 7 0 4096\n')
    q.stdin.flush()
    q.stdout.readline()
    inode = os.stat(pool.file(W)).st_ino
    out = pool.varve('resize', pool.id(W), '+1M', rc=1)
    if os.stat(pool.file(W)).st_ino != inode:
        raise Failed('an open image has lost its name: ' + out)
    q.stdin.close()
    q.wait()
    pool.vols[W][None] = b'\7' * 4096 + pool.vols[W][None][4096:]
    pool.varve('pool', 'check', pool.name, '--repair')
    for v in V, W:
        pool.vols[v]['s'] = pool.vols[v][None]
    pool.verify()


# ---- volumes that are broken or not there ----
def broken():
    pool = fresh('broken')
    pool.create(V)
    rc, out = pool.varve('destroy', pool.id('100/vm-100-nothere'), rc=None)
    if rc != 1 or 'no volume' not in out:
        raise Failed('destroy of what is not there: %d %s' % (rc, out))

    def scribble(path, how):
        if how == 'empty':
            open(path, 'w').close()
        elif how == 'garbage':
            with open(path, 'r+b') as f:
                f.write(b'\xff' * 65536)
        elif how == 'loop':
            run('qemu-img', 'rebase', '-u', '-f', 'qcow2', '-F', 'qcow2', '-b', os.path.basename(path), path)
        elif how == 'missing base':
            run('qemu-img', 'rebase', '-u', '-f', 'qcow2', '-F', 'qcow2', '-b', 'none.qcow2', path)
        elif how == 'gone':
            os.unlink(path)
    for how in 'empty', 'garbage', 'loop', 'missing base', 'gone':
        pool.create(W)
        pool.snapshot(W, 's1')
        pool.snapshot(W, 's2')
        scribble(pool.file(W), how)
        marked = [v['id'] for v in json.loads(pool.varve('list', '--json')) if v['broken']]
        if len(marked) != 1 or W not in marked[0]:
            raise Failed('%s: marked as broken: %s' % (how, marked))
        out = pool.varve('destroy', pool.id(W, 's1'), rc=1)
        if 'broken' not in out:
            raise Failed('%s: destroy of a snapshot says %s' % (how, out))
        pool.varve('destroy', pool.id(W), '--dry-run')
        if how != 'gone':
            f = open(pool.file(W), 'r+b')
            q = subprocess.Popen(['python3', '-c', 'import fcntl,struct,sys;f=open(sys.argv[1],"r+b")\n'
                                  'for b in 100,101,103,201,202,203: '
                                  'fcntl.fcntl(f,37,struct.pack("hhqqi4x",0,0,b,1,0))\n'
                                  'print("held",flush=True);sys.stdin.read()', pool.file(W)],
                                 stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            q.stdout.readline()
            out = pool.varve('destroy', pool.id(W), rc=1)
            if not os.path.exists(pool.file(W)):
                raise Failed('%s: an open image was destroyed' % how)
            q.stdin.close()
            q.wait()
            f.close()
        pool.destroy(W)
        pool.verify()
        if pool.hidden():
            raise Failed('left behind: %s' % pool.hidden())
    pool.varve('pool', 'check', pool.name)
    # what stands on a broken volume keeps it
    pool.create(W)
    pool.snapshot(W, 's1')
    clone = os.path.join(os.path.dirname(pool.file(W)), 'vm-100-clone.qcow2')
    run('qemu-img', 'create', '-q', '-f', 'qcow2', '-F', 'qcow2', '-b', os.path.basename(pool.file(W, 's1')), clone)
    open(pool.file(W), 'w').close()
    out = pool.varve('destroy', pool.id(W), rc=1)
    if 'vm-100-clone' not in out:
        raise Failed('the clone is not named: %s' % out)


# ---- a pool without a free byte ----
def mounted(fs, name):
    home = os.path.join(BASE, name)
    os.makedirs(home + '/p')
    run('truncate', '-s', '400M', home + '/disk')
    run('mkfs.' + fs, '-q', home + '/disk')
    rc, out = run('mount', '-o', 'loop', home + '/disk', home + '/p', rc=None)
    if rc:
        print('SKIP full on %s: %s' % (fs, out.strip()))
        return None
    pool = object.__new__(Pool)
    pool.name, pool.path, pool.cfg, pool.runtime = 'p', home + '/p', home + '/p.cfg', home + '/p.run'
    pool.other, pool.vols = None, {}
    pool.place(home)
    with open(pool.cfg, 'w') as f:
        f.write('dir: p\n\tpath %s\n\tcontent images\n\tsnapext 1\n' % pool.path)
    return pool


def fill(path):
    """not a block, not an inode is left"""
    for size in MIB, 4096, 512:
        for n in range(4000):
            try:
                with open('%s/f%d-%d' % (path, size, n), 'wb', buffering=0) as f:
                    while f.write(bytes(size)) == size:
                        pass
            except OSError:
                if os.path.exists('%s/f%d-%d' % (path, size, n)) and os.path.getsize('%s/f%d-%d' % (path, size, n)):
                    continue
                break


def full(fs):
    if os.geteuid() != 0:
        print('SKIP full on %s: needs root to mount' % fs)
        return
    pool = mounted(fs, 'full-' + fs)
    if not pool:
        return
    try:
        pool.create(V, 8 * MIB, '-o', 'preallocation=off')
        pool.write(V, 0, 8 * MIB, 1)
        pool.snapshot(V, 'a')
        pool.write(V, 0, 4 * MIB, 2)
        pool.snapshot(V, 'b')
        pool.rollback(V, 'a')
        pool.create(W)
        run('umount', pool.path)
        run('mount', '-o', 'loop', os.path.dirname(pool.path) + '/disk', pool.path)
        fill(pool.path)
        pool.destroy(V, 'b')
        fill(pool.path)
        pool.destroy(W)
        fill(pool.path)
        # cut off in the middle of a deletion, and no room
        pool.varve('destroy', pool.id(V, 'a'), rc=-9, env={'VARVE_CRASH_AT': 'commit-begin:1'})
        fill(pool.path)
        s = Served(pool, V, 'full-%s.nbd' % fs)
        if s.read() != pool.vols[V][None]:
            raise Failed('the disk reads wrongly')
        s.stop()
        pool.varve('destroy', pool.id(V, 'a'))
        del pool.vols[V]['a']
        run('sh', '-c', 'rm -f %s/f*' % pool.path)
        pool.varve('pool', 'check', 'p')
        pool.verify()
        if pool.hidden():
            raise Failed('left behind: %s' % pool.hidden())
    finally:
        run('umount', '-l', pool.path)


def full_xfs():
    full('xfs')


def full_ext4():
    full('ext4')


def closed_stdin():
    pool = fresh('closed')
    pool.create(V)
    for shell in '<&-', '<&- >&-', '<&- >&- 2>&-':
        rc, out = run('timeout', '20', 'sh', '-c', 'exec "$0" "$@" ' + shell, *pool.argv('import', '-', pool.id(W)),
                      rc=None, env=pool.env())
        if rc != 1:
            raise Failed('import from a closed input: %d %s' % (rc, out))
        pool.verify()


def last_goes_while_one_comes():
    """a guest's folder goes with its last volume, just before the next one is made in it"""
    pool = fresh('last')
    for _ in range(TRIES):
        pool.create(V)
        p = subprocess.Popen(pool.argv('destroy', pool.id(V)), env=pool.env(), stdout=subprocess.DEVNULL)
        pool.create(W)
        if p.wait(60):
            raise Failed('destroy ended with %d' % p.returncode)
        del pool.vols[V]
        pool.destroy(W)
    pool.verify()


tests = [last_goes_while_one_comes, serve_and_snapshot, serve_and_rollback, serve_and_destroy_snapshot, serve_and_destroy, renamed_while_waited_for,
         at_once_after_start, long_operation, opened_after_a_kill,
         broken, full_xfs, full_ext4, closed_stdin]
for t in tests:
    if len(sys.argv) < 2 or t.__name__ in sys.argv[1:]:
        try:
            t()
        except Failed as e:
            raise Failed('%s: %s' % (t.__name__, e))
        print('ok', t.__name__, flush=True)
done('ok')
