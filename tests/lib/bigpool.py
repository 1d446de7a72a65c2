"""A pool of many volumes with snapshots, made in a second: volume groups by the text of their metadata, heads of images as plain bytes."""
import os, re, struct

CLUSTER_BITS = 17


def head(virtual, backing=None, fmt='qcow2', cluster_bits=CLUSTER_BITS):
    """the first clusters of an empty qcow2 image of version 3: header, refcount table, refcount block, L1 table"""
    cluster = 1 << cluster_bits
    l1 = -(-virtual // (cluster * (cluster // 8)))
    ext = struct.pack('>II', 0xE2792ACA, len(fmt)) + fmt.encode().ljust(8, b'\0') if backing else b''
    ext += struct.pack('>II', 0, 0)
    name = backing.encode() if backing else b''
    off = 104 + len(ext)
    raw = struct.pack('>IIQIIQIIQQIIQQQQII', 0x514649FB, 3, off if name else 0, len(name), cluster_bits, virtual, 0, l1, 3 * cluster,
                      cluster, 1, 0, 0, 0, 0, 0, 4, 104)
    return (raw + ext + name).ljust(4096, b'\0')


def chain(n, snaps):
    """(stem, snapshot or None, the snapshot below) of one volume, lowest first"""
    stem = 'vm-%d-disk-0' % (100 + n)
    names = ['s%d' % k for k in range(snaps)]
    for k, s in enumerate(names + [None]):
        yield stem, s, names[k - 1] if k else None


def lv_name(stem, snap):
    return 'snap_%s_%s.qcow2' % (stem, snap) if snap else stem + '.qcow2'


def files(folder, nr, snaps, virtual=1 << 30):
    """a directory pool; the length is what a metadata-less empty image has"""
    for n in range(nr):
        sub = '%s/images/%d' % (folder, 100 + n)
        os.makedirs(sub)
        for stem, s, below in chain(n, snaps):
            name = lambda x: 'snap-%s-%s.qcow2' % (x, stem) if x else stem + '.qcow2'
            with open('%s/%s' % (sub, name(s)), 'wb') as f:
                f.write(head(virtual, name(below) if below else None))
                f.truncate(4 << CLUSTER_BITS)


def metadata(text, nr, snaps):
    """(text of a backup of an empty VG with one PV, filled with LVs of one extent; the name of each in the order of their extents)"""
    names, lvs = [], []
    for n in range(nr):
        for stem, s, below in chain(n, snaps):
            k = len(names)
            names.append((lv_name(stem, s), lv_name(stem, below) if below else None))
            uid = 'AAAAAA-AAAA-AAAA-AAAA-AAAA-AAAA-%06d' % k
            lvs.append('''%s {
id = "%s"
status = ["READ", "WRITE", "VISIBLE"]
flags = []
tags = ["pve-vm-%d"]
creation_time = 1700000000
creation_host = "bench"
segment_count = 1

segment1 {
start_extent = 0
extent_count = 1

type = "striped"
stripe_count = 1

stripes = [
"pv0", %d
]
}
}
''' % (names[-1][0], uid, 100 + n, k))
    text = text.rstrip()
    assert text.endswith('}'), text[-200:]
    at = re.search(r'\n}\s*(#[^\n]*\n|\w+ = [^\n]*\n|\s)*$', text).start()
    return text[:at] + '\n\nlogical_volumes {\n\n' + '\n'.join(lvs) + '}\n' + text[at:], names


def heads(device, pe_start, extent, names, virtual=1 << 30):
    """writes each LV's head where it lies"""
    with open(device, 'r+b', buffering=0) as f:
        for k, (_, below) in enumerate(names):
            f.seek(pe_start + k * extent)
            f.write(head(virtual, below))
        os.fsync(f.fileno())
