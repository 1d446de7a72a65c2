"""What a server process and a device have used: CPU, bytes, memory, flushes."""
import os, re, time


def cpu_ns(pid):
    """user and system time of all threads, ended ones and io_uring's workers included, to the nanosecond"""
    return time.clock_gettime_ns((~pid << 3) | 2)      # the process's CPU clock (clock_getcpuclockid)


def io_bytes(pid):
    """(read, written) to storage"""
    text = open('/proc/%d/io' % pid).read()
    return tuple(int(re.search(r'^%s: (\d+)' % k, text, re.M)[1]) for k in ('read_bytes', 'write_bytes'))


def memory(pid):
    """{'rss', 'hwm', 'pss'} in bytes. hwm: the most since reset_peak(); what it maps from libraries counts by share in pss"""
    status = open('/proc/%d/status' % pid).read()
    rollup = open('/proc/%d/smaps_rollup' % pid).read()
    kib = lambda text, k: int(re.search(r'^%s:\s+(\d+)' % k, text, re.M)[1]) << 10
    return {'rss': kib(status, 'VmRSS'), 'hwm': kib(status, 'VmHWM'), 'pss': kib(rollup, 'Pss')}


def reset_peak(pid):
    with open('/proc/%d/clear_refs' % pid, 'w') as f:
        f.write('5')


def device(name):
    """{'reads', 'read', 'writes', 'written', 'flushes', 'discards'} of a block device; bytes for read and written"""
    f = [int(x) for x in open('/sys/block/%s/stat' % name).read().split()]
    return {'reads': f[0], 'read': f[2] * 512, 'writes': f[4], 'written': f[6] * 512,
            'discards': f[11] if len(f) > 11 else 0, 'flushes': f[15] if len(f) > 15 else None}


class Usage:
    """used between its making and `done(ios)`: per request"""

    def __init__(self, pid, dev=None):
        self.pid, self.dev = pid, dev
        self.cpu, self.io, self.stat = cpu_ns(pid), io_bytes(pid), device(dev) if dev else None

    def done(self, ios):
        n = max(ios, 1)
        io = io_bytes(self.pid)
        out = {'cpu_us': (cpu_ns(self.pid) - self.cpu) / 1e3 / n,
               'read_b': (io[0] - self.io[0]) / n, 'write_b': (io[1] - self.io[1]) / n}
        if self.stat:
            now = device(self.dev)
            out.update(dev_read_b=(now['read'] - self.stat['read']) / n, dev_write_b=(now['written'] - self.stat['written']) / n,
                       dev_writes=(now['writes'] - self.stat['writes']) / n)
            if now['flushes'] is not None:
                out['dev_flushes'] = now['flushes'] - self.stat['flushes']
        return out
