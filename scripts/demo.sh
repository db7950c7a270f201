#!/bin/sh
# The demonstration behind `make run` and `make stop`:
#   scripts/demo.sh start|stop LARDER IMAGE MOUNTPOINT
#
# With FUSE the image is mounted, and ordinary programs put a small tree on it. Without FUSE the same tree goes in through
# the commands that need no mount. Either way a few lines say what was made, what it cost and what to try.
set -eu

[ $# = 4 ] || { echo "usage: $0 start|stop LARDER IMAGE MOUNTPOINT" >&2; exit 2; }
verb=$1 larder=$2 image=$3 mnt=$4
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
export PATH

# Small files that are made durable one by one, to see what that costs: half of them by an fsync, half by a commit.
FILES=50

die() { echo "demo: $*" >&2; exit 1; }

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
    mkdir -p "$1/letters"
    echo "Written through Larder." >"$1/hello.txt"
    n=0
    while [ $n -lt $FILES ]; do
        n=$((n + 1))
        echo "letter $n" >"$1/letters/$n.txt"
        # In turns: what the disk does meanwhile, and what the image takes of it for the first time, concerns both.
        if [ "$1" != "$mnt" ]; then
            continue
        elif [ $((n % 2)) = 0 ]; then
            "$larder" sync "$mnt"
        else
            sync "$1/letters/$n.txt"
        fi
    done
    ln -sf ../hello.txt "$1/letters/link"
}

# What was there, in one line: names as a listing shows them, one below the other.
in_a_line() { tr '\n' ' ' | sed 's/ $//'; }

start() {
    if [ -e "$mnt" ] && is_mounted; then
        echo "$image is mounted on $mnt already; 'make stop' unmounts it."
        return
    fi
    if [ -e "$image" ]; then
        made="was there already"
    else
        "$larder" mkfs --size 1G --label demo "$image" >/dev/null
        [ -s "$image" ] || die "mkfs made no $image"
        made="a btrfs image of 1 GiB was made; it takes $(du -h "$image" | cut -f1) of disk"
    fi
    problem=$(fuse_problem)
    if [ -n "$problem" ]; then
        start_without_fuse "$problem"
    else
        start_with_fuse
    fi
    echo "  make stop        the end; checks $image, too"
    echo "(larder is $larder; 'make install' puts it on your PATH.)"
}

start_with_fuse() {
    mkdir -p "$mnt"
    "$larder" mount "$image" "$mnt"
    is_mounted || die "mount has returned, but nothing is mounted on $mnt"
    make_tree "$mnt"
    times=$(what_it_took)
    cat <<TEXT
$image: $made.
Mounted on $mnt; on it: $(ls "$mnt" | in_a_line).
$times
Try:
  cp -a /usr/share/doc $mnt && ls $mnt/doc
  larder stats $mnt
TEXT
}

# How long it took until a small file was durable, alone and with everything else, as the daemon has counted it.
what_it_took() {
    "$larder" stats --json "$mnt" | awk -v files=$((FILES / 2)) '
        # Names are those of the JSON, which has each on a line of its own; of those that come again the first is meant.
        { gsub(/[",:]/, ""); if (!($1 in value)) value[$1] = $2 }
        END {
            commit = value["commits"] ? value["commit_total_us"] / value["commits"] : 0
            printf "Until a small file was durable: %.2f ms by fsync, %.2f ms by a commit (means of %d).\n",
                value["mean_us"] / 1000, commit / 1000, files
        }'
}

start_without_fuse() {
    tree=$(mktemp -d)
    trap 'rm -rf "$tree"' EXIT
    make_tree "$tree"
    "$larder" cp -r "$tree/" "$image:/"
    said=$("$larder" cat "$image:/hello.txt")
    [ "$said" = "Written through Larder." ] || die "$image:/hello.txt has not what was copied: $said"
    cat <<TEXT
$image: $made.
No mount: $1.
A tree was copied into it instead; in it: $("$larder" ls "$image" | in_a_line).
Try:
  larder cp -r /usr/share/doc $image:/ && larder ls -l $image:/doc
  larder df $image
TEXT
}

stop() {
    if [ ! -e "$image" ]; then
        echo "There is no $image; 'make run' makes one."
        return
    fi
    if [ -e "$mnt" ] && is_mounted; then
        "$larder" umount "$mnt"
        ! is_mounted || die "umount has returned, but $mnt is still mounted"
        rmdir "$mnt"
        echo "Unmounted $mnt: everything is durable, and the daemon is gone."
    else
        echo "$image is not mounted on $mnt."
    fi
    verdict=$("$larder" check --data "$image") || { echo "$verdict"; die "$image is damaged"; }
    echo "larder check: $verdict."
    if command -v btrfs >/dev/null; then
        verdict=$(btrfs check --readonly --check-data-csum "$image" 2>&1) || { echo "$verdict"; die "$image is damaged"; }
        case $verdict in
        *", no error found"*) echo "btrfs check: no error found." ;;
        *) echo "$verdict"; die "btrfs check is not content" ;;
        esac
    else
        echo "Not checked by btrfs, which is not installed (package btrfs-progs)."
    fi
    echo "Linux reads it, too: as root, mount -o loop $image /mnt"
}

case $verb in
start) start ;;
stop) stop ;;
*) echo "usage: $0 start|stop LARDER IMAGE MOUNTPOINT" >&2; exit 2 ;;
esac
