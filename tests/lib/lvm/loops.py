"""Active LVs without device-mapper, for `lvm` beside: what makes an LV active is a loop device, linked as VG/NAME.

  .lv/VG/UUID      the LV's content: it goes with the LV when it is renamed, and its length follows the metadata
  .lv/VG/UUID.on   the LV is active; where its first bytes are on a physical volume: "DEVICE OFFSET LENGTH"
  .lv/VG/busy      a command changes the VG; found by the next one, it was killed, and what it left is put right first

The first 64 KiB (of one segment or stripe) are where they would be in reality: on the PV while the LV is inactive, so that others can
read and write them there. Activation fetches them, deactivation and removal put them back; a new LV begins with what the PV
has there, and old bytes. One host only. One command at a time (a lock on .lv/lock); what is done twice does no harm.

It costs what Python needs to start: no modules but small ones, no process but LVM's.
"""
import _signal as signal, fcntl, mmap, os, sys, time    # signal itself is slow to load

D = os.environ['VARVE_TEST_LVM_LOOPS']
DEVICES = os.environ['VARVE_TEST_LVM_DEVICES']
HEAD = 64 << 10
WITH_VALUE = ('--config --devices --devicesfile --lockopt --fs --driverloaded -n --name -L --size -l --extents -a --activate --addtag '
              '--deltag -i --stripes -I --stripesize -o --options --units --configreport --reportformat --separator -S --select').split()
LOOP_SET_FD, LOOP_CLR_FD, LOOP_SET_CAPACITY, LOOP_CTL_GET_FREE = 0x4c00, 0x4c01, 0x4c07, 0x4c82
IN_USE = 5    # ECMD_FAILED of LVM


# ---- LVM ----

def run(verb, args, out=None):
    """The real tool, which is killed when this process is; SIGTERM is for it to handle."""
    words = os.environ.get('VARVE_TEST_LVM_UNDER', '').split() if out is None else []
    words += ['lvm', verb, '--devices', DEVICES] + args
    pipe = os.pipe() if out is not None else None
    actions = [(os.POSIX_SPAWN_DUP2, pipe[1], 1)] if pipe else []
    child = []
    signal.signal(signal.SIGTERM, lambda *_: [os.kill(pid, signal.SIGTERM) for pid in child])
    child.append(os.posix_spawnp('setpriv', ['setpriv', '--pdeathsig', 'KILL'] + words, os.environ, file_actions=actions))
    if pipe:
        os.close(pipe[1])
        with open(pipe[0]) as f:
            out.append(f.read())
    status = os.waitstatus_to_exitcode(os.waitpid(child.pop(), 0)[1])
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return status if status >= 0 else 128 - status


class Lv:
    place = None    # (device, offset, length) of its first bytes

    def __init__(self, row):
        self.uuid, self.name, self.len = row['lv_uuid'], row['lv_name'], int(row['lv_size'])


def rows(text):
    """Each line of LVM's JSON that is a row; no value that is asked for here holds a quote."""
    for line in text.splitlines():
        line = line.strip().rstrip(',')
        if line.startswith('{"') and line.endswith('"}'):
            yield dict(field.split('":"', 1) for field in line[2:-2].split('", "'))


def report(vg):
    """The VG's LVs by UUID; None: LVM does not answer."""
    fields = {'vg': 'vg_extent_size', 'pv': 'pv_name,pe_start', 'lv': 'lv_uuid,lv_name,lv_size', 'pvseg': 'pvseg_start',
              'seg': 'lv_uuid,segtype,seg_start_pe,seg_size_pe,stripe_size,devices'}
    args = ['--driverloaded', 'n', '--config', 'report/list_item_separator="," report/compact_output=0', '--reportformat=json', '--units=b', '--nosuffix']
    for key in fields:
        args += ['--configreport', key, '--options', fields[key]]
    out = []
    quiet = os.dup(2)
    os.dup2(os.open('/dev/null', os.O_WRONLY | os.O_CLOEXEC), 2)
    rc = run('fullreport', args + [vg], out)
    os.dup2(quiet, 2)
    os.close(quiet)
    if rc != 0 or '"vg_extent_size"' not in out[0]:
        return None
    extent, starts, lvs = 0, {}, {}
    for r in rows(out[0]):
        if 'vg_extent_size' in r:
            extent = int(r['vg_extent_size'])
        elif 'pe_start' in r and r['pv_name'].startswith('/'):
            starts[r['pv_name']] = int(r['pe_start'])
        elif 'lv_size' in r:
            lvs[r['lv_uuid']] = Lv(r)
        elif r.get('seg_start_pe') == '0' and r['lv_uuid'] in lvs and r['segtype'] in ('linear', 'striped'):
            device, _, first = r['devices'].split(',')[0].partition('(')
            whole = int(r['stripe_size']) or int(r['seg_size_pe']) * extent
            lv = lvs[r['lv_uuid']]
            if device in starts:
                lv.place = device, starts[device] + int(first[:-1]) * extent, min(HEAD, whole, lv.len)
    return lvs


# ---- devices ----

def loops(folder):
    """The loop device of each file in the folder."""
    found = {}
    for dev in os.listdir('/sys/block'):
        if dev.startswith('loop'):
            try:
                with open('/sys/block/%s/loop/backing_file' % dev) as f:
                    path = f.read().rstrip('\n')
            except OSError:
                continue
            if path.startswith(folder + '/'):
                found[path[len(folder) + 1:]] = '/dev/' + dev
    return found


def only_looks(pid):
    """Who looks for a free loop device has another's open for an instant."""
    try:
        with open('/proc/%s/cmdline' % pid, 'rb') as f:
            words = f.read().split(b'\0')
    except OSError:
        return True     # it has ended
    return os.path.basename(words[0]) in (b'losetup', b'lvm', b'blkid') or any(w.endswith(b'/loops.py') for w in words)


def in_use(devices):
    """Those that a process has open."""
    used = set()
    for pid in os.listdir('/proc') if devices else []:
        has = set()
        try:
            for fd in os.listdir('/proc/%s/fd' % pid) if pid.isdigit() else []:
                try:
                    has.add(os.readlink('/proc/%s/fd/%s' % (pid, fd)))
                except OSError:
                    pass
        except OSError:
            pass
        has.intersection_update(devices)
        if has and not only_looks(pid):
            used |= has
    return used


def attach(path):
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    control = os.open('/dev/loop-control', os.O_RDWR | os.O_CLOEXEC)
    for _ in range(1000):
        dev = '/dev/loop%d' % fcntl.ioctl(control, LOOP_CTL_GET_FREE)
        loop = os.open(dev, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.ioctl(loop, LOOP_SET_FD, fd)
            break
        except OSError:    # somebody else was faster
            time.sleep(0.002)
        finally:
            os.close(loop)
    os.close(fd)
    os.close(control)
    return dev


def detach(dev):
    loop = os.open(dev, os.O_RDWR | os.O_CLOEXEC)
    os.fsync(loop)
    try:
        fcntl.ioctl(loop, LOOP_CLR_FD)
    except OSError:
        pass
    os.close(loop)
    for _ in range(500):    # it is gone when the last one who looked at it has closed it
        if not os.path.exists('/sys/block/%s/loop/backing_file' % dev[5:]):
            return
        time.sleep(0.002)


def set_capacity(dev, nb_bytes):
    with open('/sys/block/%s/size' % dev[5:]) as f:
        if int(f.read()) * 512 == nb_bytes:
            return
    loop = os.open(dev, os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(loop, LOOP_SET_CAPACITY)
    os.close(loop)


# ---- first bytes ----

def fetch(path, place):
    """from the PV to the file: past the page cache of the PV, which others change underneath"""
    if not place or not place[2]:
        return
    pv = os.open(place[0], os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    buf = mmap.mmap(-1, place[2])
    os.preadv(pv, [buf], place[1])
    os.close(pv)
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    os.pwrite(file, buf, 0)
    os.close(file)


def put_back(path, place):
    if not place or not place[2]:
        return
    buf = mmap.mmap(-1, place[2])
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    os.preadv(file, [buf], 0)
    os.close(file)
    try:
        pv = os.open(place[0], os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
    except FileNotFoundError:    # the PV is gone, and who had it active is not told either
        return
    os.pwritev(pv, [buf], place[1])
    os.close(pv)


class Vg:
    """What is there of a VG, by UUID."""

    def __init__(self, name):
        self.name, self.folder, self.links = name, '%s/.lv/%s' % (D, name), '%s/%s' % (D, name)
        self.loops = loops(self.folder)
        self.busy = self.folder + '/busy'

    def file(self, uuid):
        return '%s/%s' % (self.folder, uuid)

    def activate(self, lv):
        file = self.file(lv.uuid)
        if lv.uuid in self.loops:
            return
        fetch(file, lv.place)
        with open(file + '.new', 'w') as f:
            f.write('%s %d %d' % lv.place if lv.place else '')
        os.rename(file + '.new', file + '.on')
        self.loops[lv.uuid] = attach(file)

    def deactivate(self, uuid):
        """also of one that lost its device by other means"""
        file = self.file(uuid)
        if not os.path.exists(file + '.on'):
            return
        if uuid in self.loops:
            detach(self.loops.pop(uuid))
        with open(file + '.on') as f:
            place = f.read().split()
        if place:
            put_back(file, (place[0], int(place[1]), int(place[2])))
        os.unlink(file + '.on')

    def fit(self, lv):
        """the file has the LV's length, its device too"""
        file = self.file(lv.uuid)
        if not os.path.exists(file):
            with open(file, 'wb') as f:
                f.write(b'\245' * min(1 << 20, lv.len))
            fetch(file, lv.place)
        if os.path.getsize(file) != lv.len:
            os.truncate(file, lv.len)
        if lv.uuid in self.loops:
            set_capacity(self.loops[lv.uuid], lv.len)

    def drop(self, uuid):
        self.deactivate(uuid)
        os.unlink(self.file(uuid))

    def links_there(self):
        """(name, device) of each"""
        for name in os.listdir(self.links) if os.path.isdir(self.links) else []:
            path = '%s/%s' % (self.links, name)
            if os.path.islink(path):
                yield name, os.readlink(path)

    def link(self, lvs):
        want = {lvs[uuid].name: dev for uuid, dev in self.loops.items() if uuid in lvs}
        for name, dev in self.links_there():
            if want.get(name) == dev:
                del want[name]
            else:
                os.unlink('%s/%s' % (self.links, name))
        os.makedirs(self.links, exist_ok=True)
        for name, dev in want.items():
            os.symlink(dev, '%s/%s' % (self.links, name))

    def match(self, lvs, wish=None, names=None):
        """becomes what the metadata says; of the named LVs (None: all) the wish is done"""
        for file in os.listdir(self.folder):
            if file.count('-') == 6 and '.' not in file and file not in lvs:
                self.drop(file)
        for lv in lvs.values():
            self.fit(lv)
            if os.path.exists(self.file(lv.uuid) + '.on') and lv.uuid not in self.loops:
                self.deactivate(lv.uuid)
            if wish and (names is None or lv.name in names):
                if wish == 'on':
                    self.activate(lv)
                else:
                    self.deactivate(lv.uuid)
        self.link(lvs)

    def catch_up(self):
        if os.path.exists(self.busy):
            self.match_report()

    def match_report(self, wish=None, names=None):
        """without an answer nothing is thrown away"""
        lvs = report(self.name)
        if lvs is None:
            return
        os.makedirs(self.folder, exist_ok=True)
        open(self.busy, 'w').close()
        self.match(lvs, wish, names)
        os.unlink(self.busy)

    def used(self, names):
        """those of the named LVs (None: all) that somebody has open"""
        devs = {name: dev for name, dev in self.links_there() if names is None or name in names}
        used = in_use(set(devs.values()))
        return sorted(name for name in devs if devs[name] in used)


# ---- commands ----

class Command:
    def __init__(self, verb, words):
        self.verb, self.words, self.vg, self.names, self.wish = verb, words, None, [], None
        before = None
        for word in words:
            if before in WITH_VALUE:
                self.option(before, word)
                before = None
                continue
            before = word
            if word.startswith('--') and '=' in word:
                self.option(*word.split('=', 1))
            elif word.startswith('-') and word not in WITH_VALUE:
                self.option(word[:2], word[2:])
            elif not word.startswith('-') and not word.startswith('/'):
                self.operand(word)
        if verb == 'lvcreate' and self.wish is None:
            self.wish = 'on'

    def option(self, key, value):
        if key in ('-n', '--name') and self.verb == 'lvcreate':
            self.names.append(value)
        elif key in ('-a', '--activate') and value:
            self.wish = 'off' if value.endswith('n') else 'on'

    def operand(self, word):
        vg, slash, name = word.partition('/')
        if slash:
            self.vg = vg
            self.names.append(name)
        elif self.vg is None:
            self.vg = word

    def targets(self):
        return None if self.verb == 'vgchange' or not self.names else self.names

    def takes_down(self):
        return self.verb in ('lvremove', 'vgremove') or self.wish == 'off' and self.verb != 'lvcreate'

    def refuse(self, used):
        """What is open is not taken down: LVM leaves those LVs, and a VG with one as a whole. True: nothing is left to do."""
        if self.verb.startswith('vg'):
            sys.stderr.write('  Can\'t deactivate volume group "%s" with %d open logical volume(s)\n' % (self.vg, len(used)))
            return True
        for name in used:
            sys.stderr.write('  Logical volume %s/%s in use.\n' % (self.vg, name))
            self.words = [w for w in self.words if w != '%s/%s' % (self.vg, name)]
        self.names = [n for n in self.names if n not in used]
        return not self.names

    def change(self, vg):
        vg.catch_up()
        used = vg.used(self.targets()) if self.takes_down() else []
        if used and self.refuse(used):
            return IN_USE
        if self.verb in ('lvchange', 'vgchange') and not self.wish:    # tags and the like
            return run(self.verb, self.words)
        if os.path.isdir(vg.folder):
            open(vg.busy, 'w').close()
        rc = run(self.verb, self.words)
        if self.verb == 'vgremove':
            if rc == 0 and os.path.isdir(vg.folder):
                vg.match({})
                os.unlink(vg.busy)
            return rc
        # with one that is not there, the others are done
        some = self.verb == 'lvchange' and rc != 0 and len(self.names) > 1
        vg.match_report(self.wish if rc == 0 or some else None, self.targets())
        return rc or (IN_USE if used else 0)

    def show(self, vg):
        """The kernel's part of a report: "X" is what is not known without it."""
        vg.catch_up()
        out = []
        rc = run(self.verb, self.words, out)
        used = in_use(set(vg.loops.values()))
        for line in out[0].splitlines(True):
            key = '"lv_attr":"'
            at = line.find(key) + len(key) + 4
            if at >= len(key) + 4 and line[at:at + 2] == 'XX':
                dev = self.device(vg, line)
                line = line[:at] + ('--' if not dev else 'ao' if dev in used else 'a-') + line[at + 2:]
            sys.stdout.write(line)
        return rc

    @staticmethod
    def device(vg, line):
        row = next(rows(line), {})
        if 'lv_uuid' in row:
            return vg.loops.get(row['lv_uuid'])
        return dict(vg.links_there()).get(row.get('lv_name'))


def main():
    command = Command(sys.argv[1], sys.argv[2:])
    os.makedirs(D + '/.lv', exist_ok=True)
    lock = os.open(D + '/.lv/lock', os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_EX)
    if not command.vg:
        return run(command.verb, command.words)
    if command.verb == 'fullreport':
        return command.show(Vg(command.vg))
    if command.verb == 'vgmknodes':
        Vg(command.vg).match_report()
        return 0
    if command.verb in ('lvcreate', 'lvremove', 'lvrename', 'lvextend', 'lvreduce', 'lvresize', 'lvchange', 'vgchange', 'vgremove'):
        return command.change(Vg(command.vg))
    return run(command.verb, command.words)


sys.exit(main())
