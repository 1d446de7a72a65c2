"""Images in the states that rows need: filled, scattered over a chain, fragmented; and devices to put them on."""
import array, os, random, shutil, struct, subprocess, sys

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
COPIED = 1 << 63


class NoRoom(Exception):
    pass


def run(*argv):
    p = subprocess.run([str(a) for a in argv], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if p.returncode:
        raise RuntimeError('%s: %d %s' % (' '.join(str(a) for a in argv), p.returncode, p.stdout[-500:]))
    return p.stdout


def need_room(folder, nbytes):
    """what a row writes at most, and 8 GiB that always stay free"""
    free = shutil.disk_usage(folder).free
    if free < nbytes + 8 * GIB:
        raise NoRoom('%d GiB free, %d GiB and 8 to spare needed' % (free >> 30, (nbytes + GIB - 1) >> 30))


def qcow2(path, size, opts='', backing=None):
    run('qemu-img', 'create', '-q', '-f', 'qcow2', *(['-o', opts] if opts else []), *(['-b', backing, '-F', 'qcow2'] if backing else []), path, size)
    return path


def fill(path, size, fmt='qcow2'):
    """data over the whole disk, in order"""
    run('qemu-img', 'bench', '-w', '-c', max(size >> 20, 1), '-s', 1 << 20, '-d', 8, '-f', fmt, '-t', 'none', '--pattern=90', path)
    return path


def raw(path, size, filled):
    """filled with data, or only allocated; more than 64 GiB: a hole"""
    with open(path, 'wb') as f:
        if size > 64 * GIB:
            f.truncate(size)
        else:
            os.posix_fallocate(f.fileno(), 0, size)
    return fill(path, size, 'raw') if filled else path


def copy(src, dst):
    run('cp', '--sparse=always', '--reflink=auto', src, dst)
    return dst


def remove(path):
    if path and os.path.exists(path) and not path.startswith('/dev/'):
        os.unlink(path)


# ---- qcow2 files written table by table -------------------------------------------------------

class Layout:
    """where things lie in a file of `data_clusters` behind its metadata"""

    def __init__(self, size, cluster_bits, ext, data_clusters):
        self.cs, self.bits, self.ext = 1 << cluster_bits, cluster_bits, ext
        self.per_l2 = self.cs // (16 if ext else 8)
        guest = -(-size // self.cs)
        self.nb_l2 = -(-guest // self.per_l2)
        self.l1_clusters = -(-self.nb_l2 * 8 // self.cs)
        self.nb_blocks = self.table_clusters = 1
        while True:
            total = 1 + self.table_clusters + self.nb_blocks + self.l1_clusters + self.nb_l2 + data_clusters
            blocks = -(-total // (self.cs // 2))
            table = -(-blocks * 8 // self.cs)
            if (blocks, table) == (self.nb_blocks, self.table_clusters):
                break
            self.nb_blocks, self.table_clusters = blocks, table
        self.total = total
        self.table = 1
        self.blocks = self.table + self.table_clusters
        self.l1 = self.blocks + self.nb_blocks
        self.l2 = self.l1 + self.l1_clusters
        self.data = self.l2 + self.nb_l2


def be_bytes(words):
    a = array.array('Q', words)
    if sys.byteorder == 'little':
        a.byteswap()
    return a.tobytes()


def write_qcow2(path, size, cluster_bits, tables, data_clusters, ext=False, backing=None):
    """tables(layout): yields (index, array of entries in host order) of L2 tables that have any. Refcounts are 1 everywhere:
    every cluster of the data part must be mapped once. Returns the layout; data is not written"""
    lay = Layout(size, cluster_bits, ext, data_clusters)
    cs = lay.cs
    used = set()
    with open(path, 'wb') as f:
        f.truncate(lay.total * cs)
        for i, entries in tables(lay):
            f.seek((lay.l2 + i) * cs)
            f.write(be_bytes(entries))
            used.add(i)
        f.seek(lay.l1 * cs)
        f.write(be_bytes((lay.l2 + i) * cs | COPIED for i in range(lay.nb_l2)))    # empty tables exist, too
        f.seek(lay.table * cs)
        f.write(be_bytes((lay.blocks + i) * cs for i in range(lay.nb_blocks)))
        one = struct.pack('>H', 1) * (cs // 2)
        for i in range(lay.nb_blocks):
            f.seek((lay.blocks + i) * cs)
            f.write(one[:2 * min(cs // 2, lay.total - i * (cs // 2))])
        ext_fmt = struct.pack('>II', 0xe2792aca, 5) + b'qcow2\0\0\0' if backing else b''
        end = struct.pack('>II', 0, 0)
        name = os.fsencode(backing) if backing else b''
        name_off = 104 + len(ext_fmt) + len(end) if backing else 0
        f.seek(0)
        f.write(struct.pack('>4sIQIIQIIQQIIQQQQII', b'QFI\xfb', 3, name_off, len(name), cluster_bits, size, 0, lay.nb_l2,
                            lay.l1 * cs, lay.table * cs, lay.table_clusters, 0, 0, 16 if ext else 0, 0, 0, 4, 104) + ext_fmt + end + name)
    return lay


def fragmented(path, size, clusters, among=None, cluster_bits=16, seed=1):
    """the first `among` clusters of the disk (default: as many as there are data clusters) hold `clusters` clusters of data, at
    places of the file in no order. The data is a hole of the file: reads cost a lookup and nothing else"""
    rng = random.Random(seed)
    perm = list(range(clusters))
    rng.shuffle(perm)
    among = among or clusters
    every = among // clusters      # one of so many guest clusters is mapped
    where = None if every == 1 else (g + int(rng.random() * every) for g in range(0, clusters * every, every))

    def tables(lay):
        host = array.array('Q', ((lay.data + p) << cluster_bits | COPIED for p in perm))
        if where:
            spread = array.array('Q', bytes(8 * among))
            for g, h in zip(where, host):
                spread[g] = h
            host = spread
        for i in range(-(-len(host) // lay.per_l2)):
            yield i, host[i * lay.per_l2:(i + 1) * lay.per_l2]
    write_qcow2(path, size, cluster_bits, tables, clusters)
    return path


def chain(folder, name, size, depth, sub=False, seed=1, piece=0, full_base=False):
    """`depth` layers, the disk's data spread over all of them: every 64 KiB (sub: 4 KiB, extended L2 with clusters of 128 KiB; piece:
    so many bytes together) is in one layer chosen at random; full_base: and in the base as well. Paths from the base up"""
    rng = random.Random(seed)
    bits = 17 if sub else 16
    cs = 1 << bits
    unit = cs // 32 if sub else cs
    group = max(piece // unit, 1)
    owner = [rng.randrange(depth) for _ in range(-(-size // unit // group))]
    stuff = random.Random(seed).randbytes(1 << 20)
    paths = []
    for k in range(depth):
        mine = [u for u in range(size // unit) if owner[u // group] == k or (full_base and k == 0)]
        per = cs // unit
        guests = sorted({u // per for u in mine})
        at = {g: i for i, g in enumerate(guests)}

        def tables(lay, at=at, mine=mine, sub=sub, per=per):
            entries = {}
            for u in mine:
                g = u // per
                t = entries.setdefault(g // lay.per_l2, array.array('Q', bytes(cs)))
                j = g % lay.per_l2 * (2 if sub else 1)
                t[j] = (lay.data + at[g]) << bits | COPIED
                if sub:
                    t[j + 1] |= 1 << u % per      # allocated; nothing reads as zero
            yield from entries.items()
        path = '%s/%s-%d.qcow2' % (folder, name, k)
        lay = write_qcow2(path, size, bits, tables, len(guests), ext=sub, backing=paths[-1] if paths else None)
        with open(path, 'r+b') as f:
            for u in mine:
                g, s = divmod(u, per)
                f.seek(((lay.data + at[g]) << bits) + s * unit)
                o = (u * 4096 + k) % (len(stuff) - unit + 1)
                f.write(stuff[o:o + unit])
        paths.append(path)
    return paths


# ---- devices ----------------------------------------------------------------------------------

class Loop:
    """a file as a block device whose flushes are counted; with fs, a file system on it at .path"""

    def __init__(self, folder, name, size, fs=None):
        self.file, self.mount, self.dev = '%s/%s.loop' % (folder, name), None, None
        with open(self.file, 'wb') as f:
            f.truncate(size)
        self.dev = run('losetup', '--direct-io=on', '-f', '--show', self.file).strip()
        self.name, self.path = os.path.basename(self.dev), self.dev
        try:
            if fs:
                run('mkfs.' + fs, '-q', *(['-E', 'lazy_itable_init=0,lazy_journal_init=0'] if fs == 'ext4' else []), self.dev)
                m = '%s/%s.mnt' % (folder, name)
                os.makedirs(m, exist_ok=True)
                run('mount', self.dev, m)
                self.mount = self.path = m
        except Exception:
            self.close()
            raise

    def close(self):
        if self.mount:
            run('umount', self.mount)
            os.rmdir(self.mount)
            self.mount = None
        if self.dev:
            run('losetup', '-d', self.dev)
            self.dev = None
        remove(self.file)


def loops_work(folder):
    """None, or why not"""
    try:
        Loop(folder, 'probe', 16 * MIB).close()
    except (OSError, RuntimeError) as e:
        return 'no loop devices here: %s' % str(e)[-200:]
