"""Rows whose device is a loop device of their own, so that what reaches it can be counted: flushes between writes, and
files that grow. The kernel counts flushes of a block device in the 16th field of /sys/block/NAME/stat.
"""
import os, re, shutil
from images import GIB, KIB, MIB, Loop, fill, loops_work, qcow2, raw, run
from measure import Contender, Load, Row, measure, turn
from rows_disk import META


def fsync_loads(size):
    part = size // 16
    out = []
    for every in (1, 32):
        for i, d in enumerate((1, 16)):
            at = {'from': (4 * (every == 32) + 2 * i) * part, 'span': 2 * part}
            out.append(Load('first fsync=%d d%d' % (every, d), 'first', rw='randwrite', depth=d, fsync=every, once=True, **at))
    out.append(Load('prep', 'prep', rw='randwrite', once=True, secs=0, **{'from': 12 * part}, span=min(4 * part, 32 * MIB)))
    for every in (1, 32):
        for d in (1, 16):
            out.append(Load('fsync=%d d%d' % (every, d), rw='randwrite', depth=d, fsync=every, **{'from': 12 * part}, span=min(4 * part, 32 * MIB)))
    return out


NO_STEPS = ('--preallocate', 'off')


class DeviceRow(Row):
    def run(self, ctx, nr):
        why = loops_work(ctx.folder)
        if why:
            raise Skipped(why)
        return super().run(ctx, nr)


class Skipped(Exception):
    pass


def fsync_device_row(ctx):
    """qcow2 on a block device, as on a logical volume: nothing but the server's own flushes reaches the device"""
    def build(ctx, folder, places):
        base = fill(qcow2(folder + '/base.qcow2', ctx.chain_size, META), ctx.chain_size)
        out = []
        for label, program in ctx.pair():
            dev = Loop(folder, label, ctx.chain_size + 128 * MIB)
            places.append(dev)
            qcow2(dev.path, ctx.chain_size, 'cluster_size=128k,extended_l2=on', base)
            out.append(Contender(label, program, dev.path, place=dev.name))
        dev = Loop(folder, 'raw', ctx.chain_size)
        places.append(dev)
        return out + [Contender('raw', ctx.varve, dev.path, place=dev.name)]
    return DeviceRow('fsync', 'overlay on a block device', build, fsync_loads(ctx.chain_size), True, room=6 * ctx.chain_size)


def fsync_file_row(ctx, fs, quick):
    """files: the file system's journal may flush as well, alike for all"""
    def build(ctx, folder, places):
        base = fill(qcow2(folder + '/base.qcow2', ctx.chain_size, META), ctx.chain_size)
        out = []
        for label, program in ctx.pair() + [('raw', ctx.varve)]:
            dev = Loop(folder, label, 2 * ctx.chain_size + GIB, fs)
            places.append(dev)
            path = dev.path + '/image'
            if label == 'raw':
                raw(path, ctx.chain_size, False)
            else:
                qcow2(path, ctx.chain_size, 'cluster_size=128k,extended_l2=on,' + META, base)
            out.append(Contender(label, program, path, place=dev.name))
        return out
    return DeviceRow('fsync', 'overlay as a file on ' + fs, build, fsync_loads(ctx.chain_size), quick, room=8 * ctx.chain_size)


def extents(path):
    m = re.search(r'(\d+) extents? found', run('filefrag', path))
    return int(m[1]) if m else None


class GrowRow(Row):
    """an image without preallocation is written for the first time; then its file's extents are counted"""

    def __init__(self, ctx, fs, quick):
        super().__init__('grow', fs, None, [], quick, room=8 * ctx.size)
        self.fs = fs

    def run(self, ctx, nr):
        why = loops_work(ctx.folder) or (None if shutil.which('mkfs.' + self.fs) else 'mkfs.%s is not installed' % self.fs)
        if why:
            raise Skipped(why)
        who = [('varve', ctx.varve, ()), ('varve/no-steps', ctx.varve, NO_STEPS)] + [(q.label, q, ()) for q in ctx.qemus]
        cells = []
        for name, args in (('first randwrite d16', {'rw': 'randwrite', 'depth': 16}), ('first write 64k d16', {'rw': 'write', 'bs': 64 * KIB, 'depth': 16})):
            load = Load(name, 'first', once=True, **args)
            for label, program, options in turn(who, nr):
                dev = Loop(ctx.folder, 'grow', 2 * ctx.size + GIB, self.fs)
                try:
                    path = qcow2(dev.path + '/image', ctx.size)
                    c = Contender(label, program, path, options=options, place=dev.name)
                    s = program.start(path, ctx.folder, label.replace('/', '_'), options=options)
                    try:
                        cell = measure(ctx, self, load, c, s, nr * 100)[0]
                        cell['extents'] = extents(path)
                        cell['file_mb'] = os.stat(path).st_blocks >> 11
                    finally:
                        s.stop()
                    cell['extents_closed'], cell['file_closed_mb'] = extents(path), os.stat(path).st_blocks >> 11
                    cells.append(cell)
                finally:
                    dev.close()
        return cells


class NfsRow(Row):
    """the kernel's NFS server, exporting a folder to this machine"""

    def __init__(self, ctx):
        super().__init__('grow', 'nfs', None, [], True)

    def run(self, ctx, nr):
        mount = os.environ.get('BENCH_NFS')
        if not mount:
            raise Skipped('BENCH_NFS names no folder on an NFS mount; counts of allocations on NFS, GFS2 and OCFS2 come from guests (--include)')
        cells = []
        who = [('varve', ctx.varve, ()), ('varve/no-steps', ctx.varve, NO_STEPS)] + [(q.label, q, ()) for q in ctx.qemus]
        for label, program, options in turn(who, nr):
            path = qcow2('%s/varve-bench-%s.qcow2' % (mount, label.replace('/', '_')), ctx.size)
            s = program.start(path, ctx.folder, label.replace('/', '_'), options=options)
            try:
                cells += measure(ctx, self, Load('first randwrite d16', 'first', once=True, rw='randwrite', depth=16),
                                 Contender(label, program, path, options=options), s, nr * 100)
            finally:
                s.stop()
                os.unlink(path)
        return cells


def rows(ctx):
    yield fsync_device_row(ctx)
    yield fsync_file_row(ctx, 'ext4', False)
    yield fsync_file_row(ctx, 'xfs', False)
    yield GrowRow(ctx, 'ext4', True)
    yield GrowRow(ctx, 'xfs', True)
    yield NfsRow(ctx)
