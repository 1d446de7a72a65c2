#!/bin/busybox sh
# First process of a guest, from the initial ram disk: loads the modules that reach the root, mounts it
# (a folder of the host, read-only, under a layer in memory) and goes on with its /init.
B=/bin/busybox
$B mount -t proc proc /proc
$B mount -t devtmpfs dev /dev
while read -r m; do $B insmod "/modules/$m"; done </modules/order
mount_9p() { $B mount -t 9p -o "trans=virtio,version=9p2000.L,msize=512000,$3" "$1" "$2"; }
mount_9p root /lower cache=loose,ro || { echo "BENCH: no root" >/dev/console; $B poweroff -f; }
$B mount -t tmpfs layer /run
$B mkdir /run/upper /run/work /run/root
$B mount -t overlay -o lowerdir=/lower,upperdir=/run/upper,workdir=/run/work root /run/root
$B umount /proc
$B mount --move /dev /run/root/dev
exec $B switch_root /run/root /init
