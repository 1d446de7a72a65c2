#!/bin/busybox sh
# Second stage, in the guest's userland: file systems, names of disks, network, then the agent.
# /h is the folder that the guest shares with the bench (read and written by both).
B=/bin/busybox
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TERM=dumb LC_ALL=C.UTF-8
export DM_DISABLE_UDEV=1        # nobody runs udevd here: libdevmapper and LVM make the nodes themselves
export LD_LIBRARY_PATH=/usr/local/lib/bench
$B mount -t proc proc /proc
$B mount -t sysfs sys /sys
for t in run tmp; do $B mount -t tmpfs $t /$t; done
$B mkdir -p /dev/pts /dev/shm /dev/misc /dev/bench /run/lock/lvm /run/lvm /run/udev /run/sanlock /var/lib/nfs/sm
$B mount -t devpts pts /dev/pts
$B mount -t tmpfs shm /dev/shm
$B mount -t debugfs debug /sys/kernel/debug 2>/dev/null
$B mount -t tracefs trace /sys/kernel/tracing 2>/dev/null
[ -e /dev/fd ] || $B ln -s /proc/self/fd /dev/fd
for m in dlm-control dlm-monitor dlm_plock; do $B ln -s ../$m /dev/misc/$m; done   # where dlm_controld looks
for w in $($B cat /proc/cmdline); do
    case $w in bench.id=*) id=${w#*=} ;; bench.boot=*) boot=${w#*=} ;; esac
done
$B hostname "host$id"
for d in /sys/block/vd*; do
    [ -e "$d/serial" ] && $B ln -s "../${d##*/}" "/dev/bench/$($B cat "$d/serial")"
done
$B ip link set lo up
if [ -e /sys/class/net/eth0 ]; then
    $B ip addr add "10.77.0.$id/24" dev eth0
    $B ip link set eth0 mtu 32000 up     # few large frames: each one costs an emulated host milliseconds
fi
if $B mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=none share /h; then
    $B mkdir -p /usr/local/bin /usr/local/lib/bench
    [ -d /h/bin ] && $B cp /h/bin/* /usr/local/bin/
    [ -d /h/lib ] && $B cp /h/lib/* /usr/local/lib/bench/
    cd /root && BENCH_BOOT=$boot BENCH_ID=$id /bin/bash /etc/bench-agent.sh
fi
$B sync
$B poweroff -f
