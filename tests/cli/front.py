"""Help, man pages, completion and the systemd unit: what is made from the description of the commands."""
import os, re, shutil, subprocess, sys
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'lib'))
from proc import *

D = folder()
TOP = os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..')
MAN, COMPLETION = sys.argv[1], sys.argv[2]
os.environ.update(VARVE_CONFIG=D + '/storage.cfg', VARVE_RUNTIME=D + '/run')


def helps():
    names = [re.split(r'  +', l.strip())[0] for l in varve('help').splitlines() if l.startswith('  ')]
    if len(names) < 15:
        raise Failed('too few commands in the help: %s' % names)
    for n in names:
        out = varve(*n.split(), '--help')
        if 'usage: varve %s' % n not in out or '--help' not in out:
            raise Failed('%s --help: %s' % (n, out))
        if out != varve('help', *n.split()):
            raise Failed('help %s is not %s --help' % (n, n))
    varve('img', rc=2)
    varve('--version')
    varve(rc=2)
    return names


def pages(names):
    for n in ['varve'] + ['varve-' + n.replace(' ', '-') for n in names]:
        page = os.path.join(MAN, n + '.1')
        text = open(page).read()
        if not text.startswith('.TH') or '.SH NAME' not in text:
            raise Failed(page + ': no man page')
        if shutil.which('groff'):
            p = subprocess.run(['groff', '-man', '-Tutf8', '-ww', '-z', page], stderr=subprocess.PIPE, text=True)
            if p.stderr:
                raise Failed(page + ': ' + p.stderr)
    return len(names) + 1


def complete(*words):
    """what bash offers behind these words"""
    script = '''
    _get_comp_words_by_ref() { cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} words=("${COMP_WORDS[@]}") cword=$COMP_CWORD; }
    __ltrim_colon_completions() { :; }
    compopt() { :; }
    varve() { %s "$@"; }
    source %s
    COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _varve; printf '%%s\\n' "${COMPREPLY[@]}"''' % (VARVE, COMPLETION)
    return run('bash', '-c', script, 'bash', *words).split()


def completion():
    os.makedirs(D + '/pool')
    open(D + '/storage.cfg', 'w').write('dir: p1\n\tpath %s/pool\n\tcontent images\n' % D)
    varve('create', 'p1:100/vm-100-disk-0', '1M')
    varve('snapshot', 'p1:100/vm-100-disk-0@s1')
    open(D + '/file.raw', 'w').close()
    for words, want in ((['varve', 'sn'], 'snapshot'), (['varve', 'img', ''], 'convert'), (['varve', 'pool', 'ch'], 'check'),
                        (['varve', 'info', '--j'], '--json'), (['varve', 'list', ''], 'p1'),
                        (['varve', 'info', 'p1'], 'p1:100/vm-100-disk-0.qcow2@s1'),
                        (['varve', 'snapshot', 'p1'], 'p1:100/vm-100-disk-0.qcow2'),
                        (['varve', 'img', 'info', '-f', ''], 'qcow2'), (['varve', 'serve', '--discard', 'i'], 'ignore'), (['varve', 'serve', '--detect-zeroes', 'u'], 'unmap'),
                        (['varve', 'serve', '--on-full', 'w'], 'wait'),
                        (['varve', 'img', 'info', D + '/fi'], D + '/file.raw')):
        got = complete(*words)
        if want not in got:
            raise Failed('completion of %s: %s, without %s' % (words, got, want))


def unit():
    if not shutil.which('systemd-analyze'):
        print('no systemd-analyze: the unit was not looked at')
        return
    shutil.copy(TOP + '/systemd/varve@.service', D + '/varve@x.service')
    out = run('systemd-analyze', 'verify', D + '/varve@x.service', rc=None)[1]
    if 'varve@' in out:
        raise Failed('unit: ' + out)


names = helps()
n = pages(names)
completion()
unit()
done('%d commands with help, %d man pages, completion and unit' % (len(names), n))
