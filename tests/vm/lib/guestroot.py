"""What a test guest boots: a Debian kernel, a small initial ram disk and a userland, all from packages.

The userland is a plain folder that guests share with the host read-only, so there is no disk image to make. Everything
is made once and kept in a cache folder ($VARVE_TEST_CACHE, else /var/cache/varve-test, else ~/.cache/varve-test), under a
name that follows from the exact packages (name, version) and from the files that make it. No package's own scripts
run, nothing is installed on the host, and no rights are needed.
"""
import fcntl, glob, hashlib, json, lzma, os, shutil, stat, subprocess, time

HERE = os.path.dirname(os.path.abspath(__file__))
GUEST = os.path.join(HERE, '..', 'guest')
PACKAGES = '''busybox-static bash coreutils util-linux mount findutils grep sed gawk tar procps kmod libc-bin base-passwd base-files
  netbase iproute2 python3 strace e2fsprogs xfsprogs gfs2-utils ocfs2-tools nfs-kernel-server nfs-common nbd-client qemu-utils
  qemu-system-common fio lvm2 lvm2-lockd dmsetup thin-provisioning-tools sanlock dlm-controld corosync fuse3
  liburing2 zlib1g libzstd1 libjansson4 libnbd0'''.split()
# In the ram disk: what reaches the root. In the root: the rest, loaded by modprobe.
BOOT_MODULES = '9pnet_virtio 9p overlay virtio_pci virtio_blk virtio_net virtio_console virtio_scsi sd_mod'.split()
MODULES = '''dm-mod dm-thin-pool dm-snapshot dm-flakey dm-delay dm-log-writes dm-zero dm-mirror ublk_drv nbd loop null_blk
  scsi_debug fuse dlm gfs2 ocfs2 ocfs2_stack_o2cb ocfs2_stack_user ocfs2_dlmfs ext4 xfs btrfs nfs nfsv3 nfsv4 nfsd configfs sctp
  dummy softdog virtio_rng'''.split()
DROPPED = '''usr/share/doc usr/share/man usr/share/info usr/share/locale usr/share/lintian usr/share/zoneinfo usr/share/icons
  usr/share/bash-completion usr/lib/udev/hwdb.d usr/include'''.split()
LISTS_DAYS = 7       # package lists older than this are fetched again
UNUSED_DAYS = 21     # what nobody booted for so long is removed when something new is made


class NoGuest(Exception):
    """the packages cannot be had; the text says why"""


def cache_folder():
    choice = os.environ.get('VARVE_TEST_CACHE')
    for path in [choice] if choice else ['/var/cache/varve-test', os.path.expanduser('~/.cache/varve-test')]:
        try:
            os.makedirs(path, exist_ok=True)
            if os.access(path, os.W_OK):
                return path
        except OSError:
            pass
    raise NoGuest('no cache folder can be written (VARVE_TEST_CACHE)')


def call(*argv, timeout=600, **kw):
    p = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=timeout, **kw)
    if p.returncode:
        raise NoGuest('%s: %s' % (' '.join(argv[:4]), p.stderr.decode('utf-8', 'replace').strip()[-600:]))
    return p.stdout


class Apt:
    """apt with a state of its own: the host's release, as if nothing were installed, and a newer kernel"""

    def __init__(self, folder):
        self.folder = folder
        with open('/etc/os-release') as f:
            release = dict(line.replace('"', '').strip().split('=', 1) for line in f if '=' in line)
        if release.get('ID') != 'debian':
            raise NoGuest('this is no Debian: its programs would not run in the guest')
        self.suite = release['VERSION_CODENAME']
        # the first release whose own kernel has ublk is 13
        self.kernel_suite = 'bookworm-backports' if self.suite == 'bookworm' else self.suite
        for d in ('lists/partial', 'archives/partial'):
            os.makedirs(os.path.join(folder, d), exist_ok=True)
        open(os.path.join(folder, 'status'), 'w').close()
        self.options = []
        for key, value in {'Dir::State::lists': folder + '/lists', 'Dir::State::status': folder + '/status',
                           'Dir::State::extended_states': folder + '/extended', 'Dir::Cache': folder,
                           'Dir::Cache::archives': folder + '/archives', 'Dir::Etc::sourcelist': folder + '/sources.list',
                           'Dir::Etc::sourceparts': '/dev/null', 'Dir::Etc::preferences': '/dev/null',
                           'Dir::Etc::preferencesparts': '/dev/null', 'Acquire::Languages': 'none', 'Acquire::Retries': '3',
                           'APT::Install-Recommends': 'false', 'APT::Sandbox::User': '', 'Dir::Log': folder}.items():
            self.options += ['-o', '%s=%s' % (key, value)]

    def get(self, *argv, timeout=900):
        return call('apt-get', '-q', '-y', *self.options, *argv, timeout=timeout).decode()

    def write_sources(self):
        """the mirrors that the host itself uses for its release"""
        text = call('apt-get', 'indextargets', '--format', '$(REPO_URI) $(RELEASE)', 'Created-By: Packages').decode()
        sources = sorted({tuple(line.split()) for line in text.splitlines()
                          if len(line.split()) == 2 and line.split()[1].split('-')[0] == self.suite})
        main = [uri for uri, suite in sources if suite == self.suite]
        if not main:
            raise NoGuest('apt has no source for %s' % self.suite)
        if self.kernel_suite != self.suite:
            sources.append((main[0], self.kernel_suite))
        text = ''.join('deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] %s %s main\n' % s for s in sources)
        path = self.folder + '/sources.list'
        old = open(path).read() if os.path.exists(path) else ''
        if text != old:
            with open(path, 'w') as f:
                f.write(text)
            return True
        return False

    def update(self, force=False):
        stamp = self.folder + '/updated'
        fresh = os.path.exists(stamp) and time.time() - os.stat(stamp).st_mtime < LISTS_DAYS * 86400
        if self.write_sources() or force or not fresh:
            try:
                self.get('update', '--error-on=any')
                open(stamp, 'w').close()
            except NoGuest:
                if force or not os.path.exists(stamp):
                    raise

    def closure(self, packages):
        """file names of all packages needed, and of the kernel's; nothing is fetched. Kept until the lists change."""
        lists = '%s %s' % (os.stat(self.folder + '/updated').st_mtime_ns, ' '.join(packages))
        kept = '%s/closure-%s' % (self.folder, hashlib.sha256(lists.encode()).hexdigest()[:16])
        if os.path.exists(kept):
            with open(kept) as f:
                return json.load(f)
        lines = self.get('install', '--print-uris', *packages).splitlines()
        names = [line.split()[1] for line in lines if line.startswith("'")]
        lines = self.get('install', '--print-uris', '-t', self.kernel_suite, 'linux-image-amd64').splitlines()
        kernel = [line.split()[1] for line in lines if line.startswith("'")]
        out = sorted(names), sorted(n for n in kernel if n.startswith('linux-'))
        for path in glob.glob(self.folder + '/closure-*'):
            if time.time() - os.stat(path).st_mtime > LISTS_DAYS * 86400:
                os.unlink(path)
        with open(kept, 'w') as f:
            json.dump(out, f)
        return out

    def fetch(self, packages):
        self.get('install', '--download-only', *packages, timeout=1800)
        self.get('install', '--download-only', '-t', self.kernel_suite, 'linux-image-amd64', timeout=1800)


def unpack(deb, root):
    drop = ['--exclude=./' + d for d in DROPPED]
    p = subprocess.Popen(['dpkg-deb', '--fsys-tarfile', deb], stdout=subprocess.PIPE)
    call('tar', '-x', '--keep-directory-symlink', '--no-same-owner', '-C', root, *drop, stdin=p.stdout)
    p.stdout.close()
    if p.wait():
        raise NoGuest('cannot unpack ' + deb)


# ---- kernel ----

def elf_kernel(image):
    """the program inside a bzImage: it starts seconds sooner under emulation than the packed one"""
    if image[0x202:0x206] != b'HdrS':
        return image
    start = (image[0x1f1] + 1) * 512 + int.from_bytes(image[0x248:0x24c], 'little')
    packed = image[start:start + int.from_bytes(image[0x24c:0x250], 'little') - 4]
    if packed[:4] == b'\x28\xb5\x2f\xfd':
        p = subprocess.run(['zstd', '-dqc'], input=packed, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        plain = p.stdout
    elif packed[:6] == b'\xfd7zXZ\0':
        plain = lzma.decompress(packed)
    else:
        return image
    return plain if plain[:4] == b'\x7fELF' else image


def module_files(tree, version, names):
    """paths of the modules and all they need, in the order of loading; an unknown one is an error"""
    out = []
    for name in names:
        text = call('modprobe', '-d', tree, '-S', version, '--show-depends', name).decode()
        for line in text.splitlines():
            if line.startswith('insmod') and line.split()[1] not in out:
                out.append(line.split()[1])
    return out


def plain_module(path):
    with open(path, 'rb') as f:
        data = f.read()
    if path.endswith('.xz'):
        return os.path.basename(path)[:-3], lzma.decompress(data)
    if path.endswith('.zst'):
        return os.path.basename(path)[:-4], call('zstd', '-dqc', path)
    return os.path.basename(path), data


class Cpio:
    """an archive that the kernel unpacks as its first root; made here so that nodes need no rights"""

    def __init__(self):
        self.data, self.ino = bytearray(), 0

    def add(self, name, mode, data=b'', dev=(0, 0)):
        self.ino += 1
        fields = (self.ino, mode, 0, 0, 1, 0, len(data), 0, 0, *dev, len(name) + 1, 0)
        self.data += b'070701' + b''.join(b'%08X' % f for f in fields) + name.encode() + b'\0'
        self.data += b'\0' * (-len(self.data) % 4) + data
        self.data += b'\0' * (-len(self.data) % 4)

    def end(self):
        self.add('TRAILER!!!', 0)
        return bytes(self.data)


def make_ram_disk(root, tree, version):
    c = Cpio()
    for d in ('bin', 'modules', 'proc', 'dev', 'run', 'lower'):
        c.add(d, stat.S_IFDIR | 0o755)
    c.add('dev/console', stat.S_IFCHR | 0o600, dev=(5, 1))
    c.add('dev/null', stat.S_IFCHR | 0o666, dev=(1, 3))
    with open(root + '/usr/bin/busybox', 'rb') as f:
        c.add('bin/busybox', stat.S_IFREG | 0o755, f.read())
    with open(GUEST + '/stage1.sh', 'rb') as f:
        c.add('init', stat.S_IFREG | 0o755, f.read())
    order = []
    for path in module_files(tree, version, BOOT_MODULES):
        name, data = plain_module(path)
        c.add('modules/' + name, stat.S_IFREG | 0o644, data)
        order.append(name)
    c.add('modules/order', stat.S_IFREG | 0o644, '\n'.join(order).encode() + b'\n')
    return c.end()


# ---- userland ----

def make_root(root, debs):
    os.makedirs(root + '/usr')
    for d in ('bin', 'sbin', 'lib', 'lib64'):
        os.mkdir(root + '/usr/' + d)
        os.symlink('usr/' + d, root + '/' + d)
    for deb in debs:
        unpack(deb, root)
    for d in 'proc sys dev run tmp h mnt root var/lib/nfs/v4recovery var/lib/nfs/rpc_pipefs var/log etc/lvm etc/ocfs2 srv'.split():
        os.makedirs(os.path.join(root, d), exist_ok=True)
    shutil.rmtree(root + '/var/run', ignore_errors=True)
    if not os.path.islink(root + '/var/run'):
        os.symlink('/run', root + '/var/run')
    configure_root(root)
    if os.geteuid() == 0:
        call('ldconfig', '-r', root)     # else the loader looks in its own folders, which will do


def put(path, text, mode=0o644):
    with open(path, 'w') as f:
        f.write(text)
    os.chmod(path, mode)


def configure_root(root):
    """what the packages' own scripts would have done, as far as the guests need it"""
    for name in ('passwd', 'group'):
        shutil.copy('%s/usr/share/base-passwd/%s.master' % (root, name), '%s/etc/%s' % (root, name))
    with open(root + '/etc/passwd', 'a') as f:
        f.write('sanlock:x:105:105::/run/sanlock:/bin/false\nstatd:x:106:65534::/var/lib/nfs:/bin/false\n'
                '_rpc:x:107:65534::/run/rpcbind:/bin/false\n')
    with open(root + '/etc/group', 'a') as f:
        f.write('sanlock:x:105:\n')
    put(root + '/etc/hosts', '127.0.0.1 localhost\n' + ''.join('10.77.0.%d host%d\n' % (i, i) for i in range(1, 10)))
    put(root + '/etc/nsswitch.conf', 'passwd: files\ngroup: files\nhosts: files\nservices: files\nprotocols: files\n')
    put(root + '/etc/exports', '')
    for name in ('awk', 'gawk'):
        if not os.path.lexists(root + '/usr/bin/' + name):
            os.symlink('/usr/bin/gawk', root + '/usr/bin/' + name)
    if os.path.lexists(root + '/etc/mtab'):
        os.unlink(root + '/etc/mtab')
    os.symlink('/proc/self/mounts', root + '/etc/mtab')
    # LVM without udevd: it makes its own nodes
    put(root + '/etc/lvm/lvmlocal.conf',
        'activation { udev_sync = 0  udev_rules = 0  verify_udev_operations = 1  monitoring = 0 }\n'
        'devices { obtain_device_list_from_udev = 0  external_device_info_source = "none"\n'
        '  multipath_component_detection = 0  md_component_detection = 0 }\n'
        'backup { backup = 0  archive = 0 }\n')
    for source, name, mode in (('init.sh', 'init', 0o755), ('agent.sh', 'etc/bench-agent.sh', 0o644)):
        shutil.copy(os.path.join(GUEST, source), os.path.join(root, name))
        os.chmod(os.path.join(root, name), mode)
    # busybox gives whatever small tools no package brought
    for name in call(root + '/usr/bin/busybox', '--list').decode().split():
        if name not in ('init', 'sh') and not any(os.path.lexists('%s/usr/%s/%s' % (root, d, name)) for d in ('bin', 'sbin')):
            os.symlink('/usr/bin/busybox', root + '/usr/bin/' + name)
    if not os.path.lexists(root + '/usr/bin/sh'):
        os.symlink('bash', root + '/usr/bin/sh')


def make_modules(root, tree, version, names):
    top = '%s/usr/lib/modules/%s' % (root, version)
    for path in module_files(tree, version, names):
        name, data = plain_module(path)
        folder = os.path.join(top, os.path.dirname(path.split('/modules/%s/' % version)[1]))
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, name), 'wb') as f:
            f.write(data)
    for name in ('modules.builtin', 'modules.order', 'modules.builtin.modinfo'):
        found = glob.glob('%s/**/modules/%s/%s' % (tree, version, name), recursive=True)
        if found:
            shutil.copy(found[0], top)
    call('depmod', '-b', root, version)


# ---- the cache ----

def own_files():
    out = []
    for path in sorted(glob.glob(GUEST + '/*.sh')) + [os.path.abspath(__file__)]:
        with open(path, 'rb') as f:
            out.append(f.read())
    return b'\0'.join(out)


def remove_unused(cache, keep):
    for path in glob.glob(cache + '/guest-*'):
        if path != keep and ('.new' in path or time.time() - os.stat(path).st_mtime > UNUSED_DAYS * 86400):
            shutil.rmtree(path, ignore_errors=True)


def build(out, apt, packages, debs, kernel_debs, modules):
    new, tree = out + '.new', out + '.new/kernel-tree'
    shutil.rmtree(new, ignore_errors=True)
    os.makedirs(tree)
    print('making the guest: %d packages' % (len(debs) + len(kernel_debs)), flush=True)
    try:
        apt.fetch(packages)
    except NoGuest:
        apt.update(force=True)
        raise NoGuest('the mirror has newer packages than the lists; the lists are fetched now: run it again')
    for d in kernel_debs:
        unpack(os.path.join(apt.folder, 'archives', d), tree)
    if not os.path.exists(tree + '/lib'):
        os.symlink('usr/lib', tree + '/lib')
    version = os.path.basename(glob.glob(tree + '/lib/modules/*')[0])
    call('depmod', '-b', tree, version)
    make_root(new + '/root', [os.path.join(apt.folder, 'archives', d) for d in debs])
    make_modules(new + '/root', tree, version, modules)
    with open((glob.glob(tree + '/boot/vmlinuz-*') + glob.glob(tree + '/lib/modules/*/vmlinuz'))[0], 'rb') as f:
        kernel = elf_kernel(f.read())
    with open(new + '/kernel', 'wb') as f:
        f.write(kernel)
    with open(new + '/ram-disk', 'wb') as f:
        f.write(make_ram_disk(new + '/root', tree, version))
    put(new + '/packages', '\n'.join(debs + kernel_debs) + '\n')
    put(new + '/kernel-version', version + '\n')
    shutil.rmtree(tree)
    shutil.rmtree(apt.folder + '/archives')
    os.rename(new, out)


def guest_root(packages=(), modules=()):
    """the folder with kernel, ram-disk and root/, made if it is not there. packages, modules: what a test wants beyond the
    lists above. NoGuest tells why it cannot be had."""
    for tool in ('apt-get', 'dpkg-deb', 'tar', 'zstd', 'modprobe', 'depmod'):
        if not shutil.which(tool):
            raise NoGuest(tool + ' is not installed')
    cache = cache_folder()
    packages, modules = sorted({*PACKAGES, *packages}), sorted({*MODULES, *BOOT_MODULES, *modules})
    with open(cache + '/lock', 'w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        apt = Apt(cache + '/apt')
        apt.update()
        debs, kernel_debs = apt.closure(packages)
        if not kernel_debs:
            raise NoGuest('%s has no kernel package' % apt.kernel_suite)
        text = '\n'.join([*debs, *kernel_debs, '', *modules, '']).encode() + own_files()
        out = '%s/guest-%s' % (cache, hashlib.sha256(text).hexdigest()[:16])
        if not os.path.exists(out):
            remove_unused(cache, out)
            build(out, apt, packages, debs, kernel_debs, modules)
        os.utime(out)
    return out


if __name__ == '__main__':
    print(guest_root())
