#!/bin/sh
# Runs a command in a root directory as if it were a machine: its own mounts and processes, the network of this one.
#
#   unshare --mount --pid --fork --kill-child sh enter.sh ROOT COMMAND...
#
# With pivot_root, because in a chroot the kernel lets nobody make a user namespace.
set -e
root=$1
shift
mount --make-rprivate /
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
cp /etc/resolv.conf /etc/hosts "$root/etc/"
cd "$root"
mkdir -p .before
pivot_root . .before
umount -l /.before
rmdir /.before
cd /
exec "$@"
