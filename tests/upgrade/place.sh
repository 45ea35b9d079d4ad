#!/bin/sh
# Puts the state of an earlier version where it was, in mounts of this process alone, and runs a command there:
#
#   unshare --mount sh place.sh STATE ENVIRONMENT COMMAND...
#
# STATE: the tar, or - for none. ENVIRONMENT: the virtual environment whose `runner` is the one that the state knows, at
# /srv/before/runner/.venv. Approvals, plans and wrapped entries hold absolute paths, so the place is always the same.
set -e
state=$1 environment=$2
shift 2
mount --make-rprivate /
# own FOLDER NAME: an empty folder NAME of this process in FOLDER. All else there stays: it may be the checkout.
own() (
    cd "$1"
    mount -t tmpfs -o mode=0755 before "$1"
    for each in * .[!.]*; do
        if [ "$each" = "$2" ]; then
            continue
        elif [ -L "$each" ]; then
            cp -P "$each" "$1"
        elif [ -e "$each" ]; then
            if [ -d "$each" ]; then mkdir "$1/$each"; else touch "$1/$each"; fi
            mount --no-canonicalize --rbind "$each" "$1/$each" # from the covered folder, where this shell still is
        fi
    done
    mkdir "$1/$2"
)
own /srv before
mkdir -p /srv/before/runner/.venv
[ "$state" = - ] || tar -xzpf "$state" --numeric-owner -C /srv/before
[ "$environment" = - ] || mount --bind "$environment" /srv/before/runner/.venv
# The state of root, with the uids of plugins. Those in use are locked in /run/runner, which stays the machine's.
own /var/lib runner
mkdir -p /srv/before/lib
chmod 0711 /var/lib/runner
mount --bind /srv/before/lib /var/lib/runner
# A wrapped entry finds its home in the password database.
{
    grep -v ':/srv/before/' /etc/passwd
    echo 'before:x:1900000000:1900000000::/srv/before/home:/bin/sh'
} >/srv/before/passwd
mount --bind /srv/before/passwd /etc/passwd
exec "$@"
