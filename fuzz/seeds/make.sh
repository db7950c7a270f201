#!/bin/bash
# Makes the seeds that Linux contributes: fuzz/seeds/make.sh (root, btrfs-progs, the kernel's btrfs, zstd).
#
# Small images with everything the format can say: snapshots changed on both sides, shared, compressed, inline and
# preallocated extents, holes, many links, extended attributes, orphans, free-space bitmaps, and logs that wait to be
# replayed. Uuids and times differ with each run, so what stands here is made once and kept: inputs of the corpus name
# blocks and items by number. `make.sh NAME...` makes only some.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
if [ "${1:-}" != inside ]; then
    exec unshare --mount --propagation private "$0" inside "$@"
fi
shift
work=$(mktemp -d /dev/shm/larder-seeds.XXXXXX)
trap 'umount -l "$work/mnt" 2>/dev/null || :; rm -rf --one-file-system "$work"' EXIT
mkdir "$work/mnt"
m=$work/mnt

text() { yes "larder $1" | head -c "$2" || :; }

# NAME OPTIONS-OF-MOUNT MKFS-OPTIONS...
make() {
    local name=$1 options=$2
    shift 2
    truncate -s 128M "$work/$name.img"
    mkfs.btrfs -q "$@" "$work/$name.img"
    mount -o loop,noatime,"$options" "$work/$name.img" "$m"
}
done_with() {
    umount "$m"
    zstd -q -19 --long=27 -f "$work/$1.img" -o "$here/$1.img.zst"
}

# ENTRIES of the large directory
fill() {
    local i
    btrfs -q subvolume create "$m/sub"
    mkdir -p "$m/many" "$m/deep/a/b/c"
    for ((i = 0; i < $1; i++)); do : >"$m/many/entry-with-a-name-of-some-length-$i"; done
    echo small >"$m/inline"
    text shared 40000 >"$m/sub/plain"
    cp --reflink=always "$m/sub/plain" "$m/sub/clone"
    ln -s some/where "$m/sub/symlink"
    ln -s "$(printf 'x%.0s' {1..3000})" "$m/long-symlink"
    for ((i = 0; i < 12; i++)); do ln "$m/inline" "$m/deep/link-$i"; done
    mknod "$m/deep/null" c 1 3
    mkfifo "$m/deep/fifo"
    setfattr -n user.short -v value "$m/sub/plain"
    setfattr -n user.long -v "$(printf 'v%.0s' {1..900})" "$m/sub/plain"
    setfattr -n user.other -v y "$m/deep"
    fallocate -l 200000 "$m/prealloc"
    text inside 9000 | dd of="$m/prealloc" bs=9000 seek=3 conv=notrunc status=none
    truncate -s 10M "$m/sparse"
    echo end >>"$m/sparse"
    for i in zlib lzo zstd; do
        mkdir "$m/$i"
        btrfs property set "$m/$i" compression $i
        text $i 150000 >"$m/$i/file"
        text $i 1500 >"$m/$i/inline"
    done
    touch "$m/nocow"; chattr +C "$m/nocow"; text nocow 9000 >"$m/nocow"
    sync
    btrfs -q subvolume snapshot -r "$m/sub" "$m/snapshot"
    btrfs -q subvolume snapshot "$m/sub" "$m/deep/writable"
    echo changed | dd of="$m/sub/plain" bs=4096 seek=4 conv=notrunc status=none
    echo changed >"$m/deep/writable/symlink-not"
    rm "$m/sub/clone"
    sync
}

seed_bgt() {
    make bgt noatime -O block-group-tree
    fill 150
    done_with bgt
}

seed_small() {
    make small nodatasum -n 4096 -m single --csum xxhash -O ^block-group-tree
    fill 300
    done_with small
}

seed_mixed() {
    make mixed compress=zstd --mixed --csum sha256
    fill 60
    done_with mixed
}

seed_old() {
    make old nospace_cache -O ^no-holes,^free-space-tree,^block-group-tree
    fill 40
    done_with old
}

# Data in every other block, so that free space is kept as bitmaps.
seed_bitmaps() {
    make bitmaps noatime -n 4096 --csum blake2 -O block-group-tree
    text data 2000000 >"$m/fragments"
    sync
    for ((i = 0; i < 400; i += 2)); do fallocate -p -o $((i * 4096)) -l 4096 "$m/fragments"; done
    for ((i = 0; i < 60; i++)); do text $i 5000 >"$m/file-$i"; done
    sync
    for ((i = 0; i < 60; i += 3)); do rm "$m/file-$i"; done
    sync
    done_with bitmaps
}

# Taken while mounted: a file without names is open, and a log waits.
seed_log() {
    make log commit=1000
    fill 20
    text orphan 30000 >"$m/orphan"
    mkdir "$m/d"; echo gone >"$m/d/removed"
    exec 8<"$m/orphan"
    rm "$m/orphan"
    sync
    text logged 20000 >"$m/logged"
    mv "$m/deep/link-1" "$m/d/renamed"
    rm "$m/d/removed"
    sync "$m/logged"
    sync "$m/d/renamed"
    cp --sparse=always "$work/log.img" "$work/log-copy.img"
    exec 8<&-
    umount "$m"
    mv "$work/log-copy.img" "$work/log.img"
    zstd -q -19 --long=27 -f "$work/log.img" -o "$here/log.img.zst"
}

# The power goes after many an fsync: files made, changed, moved, renamed, linked and removed, with every kind of extent, in
# two subvolumes; besides, a deleted subvolume that is still there in full, and one that was received.
cut() {
    local name=$1 i
    make "$name" commit=1000 "${@:2}"
    fill 30
    btrfs -q subvolume create "$m/gone"
    for ((i = 0; i < 40; i++)); do text "gone $i" $((i * 200)) >"$m/gone/file-$i"; done
    btrfs -q subvolume snapshot "$m/gone" "$m/gone-too"
    text received 9000 >"$m/gone/changed"
    mkdir "$m/old" "$m/old/inner"
    for i in punched cut grown cloned packed zeroed mapped; do text $i 60000 >"$m/old/$i"; done
    for ((i = 0; i < 25; i++)); do echo "$i" >"$m/old/entry-$i"; done
    setfattr -n user.gone -v 1 "$m/old/grown"
    setfattr -n user.kept -v 1 "$m/old/grown"
    text orphan 30000 >"$m/orphan"
    sync
    mkdir "$m/in"
    btrfs -q send "$m/snapshot" | btrfs -q receive "$m/in"
    exec 7<"$m/gone/file-39" 8<"$m/orphan"
    rm "$m/orphan"
    btrfs -q subvolume delete "$m/gone" >/dev/null
    sync
    btrfs property set "$m/old/packed" compression zstd
    text again 70000 >"$m/old/packed"
    fallocate -p -o 8192 -l 20000 "$m/old/punched"
    fallocate -z -o 4096 -l 30000 "$m/old/zeroed"
    truncate -s 12345 "$m/old/cut"
    text more 30000 >>"$m/old/grown"
    setfattr -x user.gone "$m/old/grown"
    setfattr -n user.new -v "$(printf 'n%.0s' {1..500})" "$m/old/grown"
    cp --reflink=always "$m/old/mapped" "$m/old/cloned"
    fallocate -l 90000 "$m/old/reserved"
    text part 5000 | dd of="$m/old/reserved" bs=5000 seek=4 conv=notrunc status=none
    for i in punched zeroed cut grown cloned packed reserved; do sync "$m/old/$i"; done
    for ((i = 0; i < 25; i += 2)); do rm "$m/old/entry-$i"; done
    mkdir "$m/new" "$m/new/deeper"
    for ((i = 0; i < 20; i++)); do text "new $i" $((i * 300)) >"$m/new/deeper/file-with-a-name-$i"; done
    ln "$m/old/entry-1" "$m/new/link"
    ln -s "$m/old" "$m/new/symlink"
    mkfifo "$m/new/fifo"
    mv "$m/old/entry-3" "$m/new/entry"
    mv "$m/old/entry-5" "$m/old/entry-7"
    sync "$m/new/link" "$m/new/entry" "$m/old"
    for ((i = 0; i < 20; i++)); do sync "$m/new/deeper/file-with-a-name-$i"; done
    sync "$m/new/deeper" "$m/new"
    text inner 20000 >>"$m/sub/plain"
    ln "$m/sub/plain" "$m/sub/plain-too"
    rm "$m/sub/symlink"
    sync "$m/sub/plain-too" "$m/sub"
    cp --sparse=always "$work/$name.img" "$work/copy.img"
    exec 7<&- 8<&-
    umount "$m"
    mv "$work/copy.img" "$work/$name.img"
    zstd -q -19 --long=27 -f "$work/$name.img" -o "$here/$name.img.zst"
}

seed_cut() {
    cut cut -O block-group-tree
}

# Small nodes, so that logs have more than a root, and the features of old.
seed_cut_old() {
    cut cut_old -n 4096 --csum xxhash -O ^no-holes,^free-space-tree,^block-group-tree
}

[ $# -gt 0 ] || set -- bgt small mixed old bitmaps log cut cut_old
for name; do "seed_$name"; done

ls -l "$here"/*.zst
