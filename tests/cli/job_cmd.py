"""varve job: a deletion's merge on a served disk is listed, limited, paused, resumed and cancelled from outside."""
import json, os, subprocess, sys, time
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'lib'))
from killmodel import *

need('qemu-io', 'qemu-img')
D = folder()
os.environ.update(VARVE_RUNTIME=D + '/run', VARVE_CONFIG=D + '/storage.cfg')
VOL, SOCK = 'p:100/vm-100-disk-0', D + '/s'


def jobs(*argv):
    return json.loads(varve('job', 'list', *argv, '--json'))


def until(what, f):
    for _ in range(400):
        if f():
            return
        time.sleep(.02)
    raise Failed('not in time: ' + what)


def refused(text, *argv, status=1):
    rc, out = run(VARVE, *argv, rc=None)
    if rc != status or text not in out:
        raise Failed('varve %s ended with %d: %s' % (' '.join(argv), rc, out))


def begin_deletion():
    """a merge of 24 MiB or more at 1 MiB/s"""
    p = subprocess.Popen([VARVE, 'destroy', VOL + '@s'], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    until('a job', lambda: any(j['offset'] > 0 for j in jobs(VOL)))
    return p


def main():
    os.makedirs(D + '/pool')
    with open(D + '/storage.cfg', 'w') as f:
        f.write('dir: p\n\tpath %s/pool\n\tcontent images\n\tsnapext 1\n\tbwlimit 1024\n' % D)
    varve('create', VOL, '64M')
    refused('is not served', 'job', 'list', VOL)
    refused('set-speed', 'job', status=2)
    with Server(VOL, SOCK) as server:
        if jobs() or jobs(VOL):
            raise Failed('there are jobs')
        refused('has no jobs', 'job', 'pause', VOL)
        qio('nbd+unix:///?socket=' + SOCK, 'write -P 1 0 48M', fmt='raw')
        varve('snapshot', VOL + '@s')
        qio('nbd+unix:///?socket=' + SOCK, 'write -P 2 24M 40M', fmt='raw')
        p = begin_deletion()
        job = jobs(VOL)[0]
        if job['disk'] != VOL + '.qcow2' and job['disk'] != VOL or job['speed'] != 1 << 20 or jobs()[0]['device'] != job['device']:
            raise Failed('the job is shown as %s' % job)
        varve('job', 'pause', VOL)
        until('a pause', lambda: jobs(VOL)[0]['status'] == 'paused')
        at = jobs(VOL)[0]['offset']
        time.sleep(1.5)
        if jobs(VOL)[0]['offset'] != at or at > 40 << 20:
            raise Failed('a paused job went from %d to %d' % (at, jobs(VOL)[0]['offset']))
        refused('not found', 'job', 'resume', VOL, 'other')
        refused('soon', 'job', 'set-speed', VOL, 'soon')
        varve('job', 'resume', VOL, job['device'])
        varve('job', 'cancel', VOL)
        if p.wait(30) == 0 or b'cancel' not in p.stdout.read():
            raise Failed('a deletion whose merge was cancelled did not say so')
        until('no job', lambda: not jobs(VOL))
        if 's' not in [e['snapshot'] for e in varve_json('info', VOL, '--json')['elements']]:
            raise Failed('the snapshot is gone')
        p = begin_deletion()
        began = time.time()
        varve('job', 'set-speed', VOL, '0')
        if p.wait(60) or time.time() - began > 20:
            raise Failed('the merge did not go faster: %s' % p.stdout.read())
        qio('nbd+unix:///?socket=' + SOCK, 'read -P 1 0 24M', 'read -P 2 24M 40M', fmt='raw')
        server.stop()
    check(D + '/pool/images/100/vm-100-disk-0.qcow2')
    done('ok')


main()
