"""kill -9 of the manager at every step of an operation on idle volumes; then recovery by the next operation, or by
pool check --repair: the pool must be what it was before or what the operation makes of it, nothing between."""
import collections, os, re, sys
from volmodel import KINDS, LVM, MIB, make_pool, sha, short
from proc import Failed, LONG, SEED, done, folder

BASE = folder()
NAMES = [a for a in sys.argv[1:] if a not in ('all', 'few', *KINDS)]
ALL, FEW = LONG or 'all' in sys.argv, 'few' in sys.argv    # steps at which to kill
SOURCES = os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..', 'src', 'vol')
KEYS = '\tthin-chunk 4M\n' if LVM else ''
seen = set()


def points(path):
    """[(name, n-th pass)] in order"""
    seen, out = collections.Counter(), []
    with open(path) as f:
        for name in f.read().split():
            seen[name] += 1
            out.append((name, seen[name]))
    return out


def thin(list_):
    """repeated points: the first two and the last pass of each tell"""
    total = collections.Counter(n for n, _ in list_)
    return list_ if LONG else [(n, i) for n, i in list_ if i <= 2 or i == total[n]]


def recover(pool, how, vols):
    """by pool check, or by an operation: any will do, here one that changes nothing but a size"""
    names = [pool.name] + ([pool.other] if pool.other else [])
    vols = [v for v in vols if '/base-' not in v]
    if how % 2 == 0 or not vols:
        for name in names if how % 4 else reversed(names):
            pool.varve('pool', 'check', name, '--repair')
        return []
    grown = [v for v in vols[:1] + [v for v in vols if ':' in v][:1]]
    for vol in grown if how % 4 == 1 else reversed(grown):
        pool.varve('resize', pool.id(vol), '+1M')
    return grown


def matches(pool, got, want, grown):
    want = {v: dict(e) for v, e in want.items()}
    for vol in grown:
        if None in want.get(vol, {}):
            want[vol][None] = want[vol][None] + bytes(MIB)
    return got == {v: {s: sha(d) for s, d in e.items()} for v, e in want.items()}


def reads(pool, vol, data):
    try:
        return pool.read(pool.file(vol)) == data
    except Failed:
        return False


def current_is_there(pool, before, after, name):
    """no moment without a current volume that reads right, without any recovery"""
    gone, new = [v for v in before if v not in after], [v for v in after if v not in before]
    if len(gone) == len(new) == 1:
        # renamed: by its old name or its new one
        if not any(reads(pool, v, before[gone[0]][None]) for v in gone + new):
            raise Failed('%s: %s does not read by its old name nor by its new one' % (name, gone))
    for vol in before:
        if vol not in after:
            continue
        try:
            data = pool.read(pool.file(vol))
        except Failed as e:
            raise Failed('%s: no current volume %s: %s' % (name, vol, e))
        if data not in (before[vol][None], after[vol][None]):
            raise Failed('%s: the current volume %s reads neither as before nor as after' % (name, vol))


def kill_at(template, argv, model, point, nr):
    name = '%s:%d' % point
    # an LV grows in the middle of writing: what was allocated for that may leak
    allowed = (0, 3) if point[0].startswith('lvm-grow') else (0,)
    kill(template, argv, model, name, {'VARVE_CRASH_AT': name}, (-9,), nr, allowed)


def kill_command(template, argv, model, command, nr):
    """the n-th LVM command and the manager die together, some time after the command has begun"""
    log, wait = os.path.join(BASE, 'commands'), nr * 0.017 % 0.12
    open(log, 'w').close()
    before = '[ $(wc -l <%s) != %d ] || { (sleep %.3f; kill -9 $PPID -$$) >/dev/null 2>&1 & }' % (log, command, wait)
    # the command may have been the last one, and over
    kill(template, argv, model, 'LVM command %d after %.3f s' % (command, wait),
         {'VARVE_TEST_LVM_LOG': log, 'VARVE_TEST_LVM_BEFORE': before}, (-9, 0), nr, (0, 3))    # in the middle of writing


def kill(template, argv, model, name, env, codes, nr, allowed=(0,)):
    pool = template.copy(os.path.join(BASE, 'try'))
    before = {v: dict(e) for v, e in pool.vols.items()}
    argv = [a for a in argv]
    rc, out = pool.varve(*argv, rc=None, env=env)
    if rc not in codes:
        raise Failed('at %s: not killed, ended with %d: %s' % (name, rc, out))
    model(pool)
    after = pool.vols
    if 'repair' not in ' '.join(argv):
        current_is_there(pool, before, after, name)
    grown = recover(pool, nr, [v for v in before if v in after and argv[0] != 'pool'])
    got = pool.state()
    if not matches(pool, got, after, grown) and not matches(pool, got, before, grown):
        pool.vols = before
        was = short(pool.expected())
        pool.vols = after
        raise Failed('killed at %s: the pool is\n  %s\nbefore\n  %s\nafter\n  %s' % (name, short(got), was,
                                                                                 short(pool.expected())))
    try:
        pool.check_images(allowed)
    except Failed as e:
        raise Failed('killed at %s: %s' % (name, e))
    for n in [pool.name] + ([pool.other] if pool.other else []):
        pool.varve('pool', 'check', n)
    # a lock file of the killed one may stay: nobody holds it
    if [h for h in pool.hidden() if not os.path.basename(h).startswith(('vol-', 'pool'))]:
        raise Failed('killed at %s: left behind: %s' % (name, pool.hidden()))


def run_scenario(f, parts):
    home = os.path.join(BASE, f.__name__)
    os.makedirs(home)
    pool = make_pool(home, other='q' if f.__name__.startswith('move') else None, keys=KEYS, other_keys=KEYS)
    argv, model = f(pool)
    if argv[0] != 'pool':
        pool.verify()
    whole = pool.copy(os.path.join(BASE, 'whole'))
    listing = os.path.join(BASE, 'points')
    open(listing, 'w').close()
    log = os.path.join(BASE, 'commands')
    open(log, 'w').close()
    whole.varve(*argv, env={'VARVE_CRASH_LIST': listing, 'VARVE_TEST_LVM_LOG': log})
    with open(log) as lines:
        commands = len(lines.readlines())
    model(whole)
    whole.verify()
    if whole.hidden():
        raise Failed('%s left behind: %s' % (f.__name__, whole.hidden()))
    todo = thin(points(listing))
    seen.update(name for name, _ in points(listing))
    kills = chosen(todo, parts)
    for nr, point in enumerate(kills):
        kill_at(pool, argv, model, point, nr)
    text = ''
    if pool.is_lvm:
        died = chosen(range(1, commands + 1), 1 if LONG else 3 if ALL else 9)
        for nr in died:
            kill_command(pool, argv, model, nr, nr + SEED)
        text = ', with %d of %d LVM commands' % (len(died), commands)
    pool.release()
    print('%-24s killed at %d of %d points%s' % (f.__name__, len(kills), len(todo), text), flush=True)
    if not kills:
        raise Failed('%s: too few crash points' % f.__name__)


def chosen(list_, parts):
    """every n-th, by the seed; of few, three"""
    parts = max(parts, len(list_) // 3) if FEW else parts
    return [x for nr, x in enumerate(list_) if nr % parts == SEED % parts]


def check_points():
    """every step of volume groups was met"""
    want = set()
    for name in os.listdir(SOURCES):
        if name in ('lvm_dir.c', 'lvm_used.c', 'store_lvm.c', 'intent_tags.c'):
            with open(os.path.join(SOURCES, name)) as f:
                want.update(re.findall(r'crash_point\("([^"]+)"\)', f.read()))
    want = {p for p in want if not p.startswith(('intent-take', 'lvm-wipe'))}    # of other hosts, of saferemove: elsewhere
    if len(want) < 8 or want - seen:
        raise Failed('no operation passed the steps %s' % sorted(want - seen))


def run_all(scenarios, parts=1):
    """all of them, or those named on the command line; a part of the steps unless `all` is given, by VARVE_SEED"""
    for s in scenarios:
        if not NAMES or s.__name__ in NAMES:
            try:
                run_scenario(s, 1 if ALL else parts)
            except Failed as e:
                raise Failed('%s: %s' % (s.__name__, e))
    if LVM and not NAMES and 'create' in [s.__name__ for s in scenarios]:
        check_points()
    done('ok')
