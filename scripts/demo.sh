#!/bin/sh
# The demonstration behind `make run` and `make stop`:
#   scripts/demo.sh start|stop LARDER IMAGE MOUNTPOINT
#
# With FUSE the image is mounted and ordinary programs put a small tree on it. Without FUSE the same tree goes in through
# the commands that need no mount.
set -eu

[ $# = 4 ] || { echo "usage: $0 start|stop LARDER IMAGE MOUNTPOINT" >&2; exit 2; }
verb=$1 larder=$2 image=$3 mnt=$4
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
export PATH

say() { echo; echo "== $*"; }
die() { echo "demo: $*" >&2; exit 1; }
# Shows a command as a person would type it, then runs it.
show() { echo "\$ $*" | sed "s|$larder|larder|"; "$@"; }

is_mounted() {
    where=$(cd "$mnt" 2>/dev/null && pwd -P) || return 1
    awk -v where="$where" '$2 == where { found = 1 } END { exit !found }' /proc/self/mounts
}

# Says why FUSE cannot be used; succeeds and says nothing where it can.
fuse_problem() {
    [ -e /dev/fuse ] || modprobe fuse 2>/dev/null || true
    if [ ! -e /dev/fuse ]; then
        echo "there is no /dev/fuse (module fuse not loaded, or not passed into this container)"
    elif ! ( : <>/dev/fuse ) 2>/dev/null; then
        echo "/dev/fuse may not be opened by this user"
    elif [ "$(id -u)" != 0 ] && ! command -v fusermount3 >/dev/null; then
        echo "fusermount3 is missing (package fuse3)"
    fi
}

make_tree() {
    mkdir -p "$1/letters" "$1/numbers"
    echo "Written through Larder." >"$1/hello.txt"
    for n in 1 2 3 4 5; do
        echo "letter $n" >"$1/letters/$n.txt"
    done
    head -c 1048576 /dev/urandom >"$1/numbers/random.bin"
    ln -sf ../hello.txt "$1/letters/link"
}

start() {
    if [ -e "$mnt" ] && is_mounted; then
        echo "$image is mounted on $mnt already; 'make stop' unmounts it."
        return
    fi
    if [ ! -e "$image" ]; then
        say "A 1 GiB image"
        show "$larder" mkfs --size 1G --label demo "$image"
        [ -s "$image" ] || die "mkfs made no $image"
        echo "$(du -h "$image" | cut -f1) of real disk"
    fi
    problem=$(fuse_problem)
    if [ -n "$problem" ]; then
        start_without_fuse "$problem"
    else
        start_with_fuse
    fi
}

start_with_fuse() {
    say "Mounting"
    mkdir -p "$mnt"
    show "$larder" mount "$image" "$mnt"
    is_mounted || die "mount has returned, but nothing is mounted on $mnt"

    say "A small tree, each file made durable with fsync"
    make_tree "$mnt"
    find "$mnt" -type f -exec sync {} +
    show ls -lR "$mnt"

    say "What happened"
    show "$larder" stats "$mnt"
    show "$larder" df "$mnt"

    cat <<TEXT

== $image is mounted on $mnt. Try:
   cp -a /usr/share/doc/. $mnt/doc     ordinary programs
   larder sync $mnt                    make everything durable
   larder stats $mnt --json            counters
   make stop                           unmount and check; then, as root, let Linux read it:
   mount -o loop $image /mnt
(larder is $larder; 'make install' puts it on your PATH.)
TEXT
}

start_without_fuse() {
    echo
    echo "No mount: $1."
    echo "The same through the commands that work on an image directly."
    tree=$(mktemp -d)
    trap 'rm -rf "$tree"' EXIT
    make_tree "$tree"

    say "A small tree; each command ends with everything durable"
    # From an earlier run.
    for entry in hello.txt letters numbers made-by-hand; do
        "$larder" rm -r "$image:/$entry" >/dev/null 2>&1 || true
    done
    show "$larder" mkdir "$image:/made-by-hand"
    for entry in hello.txt letters numbers; do
        show "$larder" cp -r "$tree/$entry" "$image:/$entry"
    done
    show "$larder" ls -lR "$image"
    show "$larder" cat "$image:/hello.txt"

    say "What happened"
    show "$larder" df "$image"
    show "$larder" inspect super "$image"

    cat <<TEXT

== Try:
   larder cp -r DIR $image:/DIR        copy in, attributes kept
   larder cp -r $image:/letters .      copy out
   larder inspect tree $image          its structures
   make stop                           check the image
(larder is $larder; 'make install' puts it on your PATH.)
TEXT
}

stop() {
    if [ ! -e "$image" ]; then
        echo "There is no $image; 'make run' makes one."
        return
    fi
    if [ -e "$mnt" ] && is_mounted; then
        show "$larder" umount "$mnt"
        ! is_mounted || die "umount has returned, but $mnt is still mounted"
        rmdir "$mnt"
    else
        echo "$image is not mounted on $mnt."
    fi
    show "$larder" check --data "$image"
    if command -v btrfs >/dev/null; then
        show btrfs check --readonly --check-data-csum "$image"
    fi
}

case $verb in
start) start ;;
stop) stop ;;
*) echo "usage: $0 start|stop LARDER IMAGE MOUNTPOINT" >&2; exit 2 ;;
esac
