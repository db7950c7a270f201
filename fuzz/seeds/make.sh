#!/bin/bash
# Makes the seeds that Linux contributes: fuzz/seeds/make.sh (root, btrfs-progs, the kernel's btrfs, zstd).
#
# Small images with everything the format can say: snapshots changed on both sides, shared, compressed, inline and
# preallocated extents, holes, many links, extended attributes, orphans, free-space bitmaps, and a log that waits to be
# replayed. Uuids and times differ with each run, so what stands here is made once and kept: inputs of the corpus name
# blocks and items by number.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
if [ "${1:-}" != inside ]; then
    exec unshare --mount --propagation private "$0" inside
fi
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

make bgt noatime -O block-group-tree
fill 150
done_with bgt

make small nodatasum -n 4096 -m single --csum xxhash -O ^block-group-tree
fill 300
done_with small

make mixed compress=zstd --mixed --csum sha256
fill 60
done_with mixed

make old nospace_cache -O ^no-holes,^free-space-tree,^block-group-tree
fill 40
done_with old

# Data in every other block, so that free space is kept as bitmaps.
make bitmaps noatime -n 4096 --csum blake2 -O block-group-tree
text data 2000000 >"$m/fragments"
sync
for ((i = 0; i < 400; i += 2)); do fallocate -p -o $((i * 4096)) -l 4096 "$m/fragments"; done
for ((i = 0; i < 60; i++)); do text $i 5000 >"$m/file-$i"; done
sync
for ((i = 0; i < 60; i += 3)); do rm "$m/file-$i"; done
sync
done_with bitmaps

# Taken while mounted: a file without names is open, and a log waits.
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

ls -l "$here"/*.zst
