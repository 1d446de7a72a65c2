"""varve stats: figures of served disks, totals and intervals, JSON and OpenMetrics, against requests counted by their sender."""
import json, os, re, signal, socket, subprocess, sys, time
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'lib'))
from killmodel import *

need('qemu-io')
D = folder()
os.environ.update(VARVE_RUNTIME=D + '/run', VARVE_CONFIG=D + '/storage.cfg')
VOL, SOCK = 'p:100/vm-100-disk-0', D + '/s'


def requests(nr):
    """nr writes, twice as many reads, three flushes"""
    c = Client(SOCK)
    for i in range(nr):
        c.send(1, i * 4096, 4096, bytes([i % 250 + 1]) * 4096)
        c.answer()
    for i in range(2 * nr):
        c.send(0, i * 512, 512)
        c.answer()
        c.need(512)
    for _ in range(3):
        c.send(3, 0, 0)
        c.answer()


def parse_metrics(text):
    if not text.endswith('# EOF\n'):
        raise Failed('no end: ' + text[-200:])
    out, types = {}, {}
    for line in text.splitlines():
        if line.startswith('# TYPE '):
            types[line.split()[2]] = line.split()[3]
        elif line[0] != '#':
            m = re.fullmatch(r'([a-z_]+)(\{[^}]*\}) ([0-9.]+)', line)
            if not m:
                raise Failed('not OpenMetrics: ' + line)
            out[m[1] + m[2]] = float(m[3])
            if not any(m[1].startswith(t) for t in types):
                raise Failed('no type before ' + line)
    return out


def is_near(what, got, want):
    if got != want:
        raise Failed('%s is %s, not %s' % (what, got, want))


def hung(server):
    """a server that does not answer: told, in time, also when others wait for it already"""
    os.kill(server.p.pid, signal.SIGSTOP)
    try:
        sockets = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) for _ in range(40)]
        path = json.loads(varve('info', VOL, '--json'))['qmp']
        for n in (0, 40):
            for s in sockets[:n]:
                try:
                    s.connect(path)
                except BlockingIOError:
                    break
            began = time.time()
            rc, out = run(VARVE, 'stats', rc=None)
            if rc != 1 or VOL.split(':')[1] not in out:
                raise Failed('stats of a hung server ended with %d: %s' % (rc, out))
            if time.time() - began > 15:
                raise Failed('a hung server was waited for %.0f s' % (time.time() - began))
        for s in sockets:
            s.close()
    finally:
        os.kill(server.p.pid, signal.SIGCONT)
    rc, out = run(VARVE, 'stats', path, env={'VARVE_CONFIG': D + '/none'}, rc=None)
    if rc:
        raise Failed('stats of a socket wants a configuration: ' + out)


def main():
    os.makedirs(D + '/pool')
    with open(D + '/storage.cfg', 'w') as f:
        f.write('dir: p\n\tpath %s/pool\n\tcontent images\n\tsnapext 1\n' % D)
    varve('create', VOL, '64M')
    for argv, rc in ((['stats', VOL], 1), (['stats', '-i', 'x'], 1), (['stats', '-c', '3'], 1), (['stats', '-x'], 2)):
        is_near(' '.join(argv), run(VARVE, *argv, rc=None)[0], rc)
    is_near('nothing served', json.loads(varve('stats', '--json')), [])
    with Server(VOL, SOCK) as server:
        requests(500)
        one = json.loads(varve('stats', VOL, '--json'))
        is_near('disks', [d['disk'] for d in one], [VOL + '.qcow2'])
        lat = one[0]['stats']['exports'][0]['latency']
        for kind, nr in (('read', 1000), ('write', 500), ('flush', 3)):
            is_near(kind + ' latencies', sum(lat[kind]['counts']), nr)
            if not 0 < lat[kind]['sum-ns'] < 60e9:
                raise Failed('%s took %d ns' % (kind, lat[kind]['sum-ns']))
        m = parse_metrics(varve('stats', '--openmetrics'))
        label = '{disk="%s.qcow2"' % VOL
        is_near('reads', m['varve_reads_total%s}' % label], 1000)
        is_near('bytes written', m['varve_written_bytes_total%s}' % label], 500 * 4096)
        is_near('durations', m['varve_write_duration_seconds_count%s}' % label], 500)
        is_near('all durations', m['varve_read_duration_seconds_bucket%s,le="+Inf"}' % label], 1000)
        buckets = [v for k, v in m.items() if k.startswith('varve_read_duration_seconds_bucket')]
        is_near('order of buckets', buckets, sorted(buckets))
        p = subprocess.Popen([VARVE, 'stats', '-i', '2', '-c', '2'], stdout=subprocess.PIPE, text=True)
        time.sleep(.5)
        requests(50)
        lines = [re.split(r'\s{2,}', l.strip()) for l in p.communicate(timeout=30)[0].splitlines() if l.startswith('p:')]
        is_near('lines', len(lines), 2)
        rate = sum(float(l[1]) for l in lines)
        if not 25 < rate < 100: # 100 reads, in one of two intervals of two seconds
            raise Failed('reads a second: %s' % lines)
        if not re.fullmatch(r'[0-9.]+(us|ms)/[0-9.]+(us|ms)', [l for l in lines if float(l[1])][0][5]):
            raise Failed('latencies: %s' % lines)
        hung(server)
        server.stop()
    done('ok')


main()
