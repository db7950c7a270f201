#!/bin/bash
# POSIX conformance, `make posix`: the crates pjdfstest and fsx on a Larder mount, with the kernel's btrfs as the measure.
#
#   scripts/posix.sh LARDER [FSX_OPERATIONS]
#
# FSX_SEED: the first of fsx's seeds (1). LARDER_POSIX_OPTIONS: further options of the Larder mount, such as writeback.
#
# A pjdfstest that passes on the kernel's btrfs and not on Larder fails the run, unless scripts/posix-expected.txt explains
# it. fsx must run clean, and btrfs check must be clean afterwards. Needs root (mounts, and tests that switch users), in a
# mount namespace of its own, so that nothing stays mounted.
set -euo pipefail

larder=$(realpath "${1:?usage: $0 LARDER [FSX_OPERATIONS]}")
operations=${2:-100000}
seed=${FSX_SEED:-1}
here=$(realpath "$(dirname "$0")")
target=$(realpath "${CARGO_TARGET_DIR:-$here/../target}")
tools=$target/tools

if [ "$(id -u)" != 0 ]; then
    echo "skipped: pjdfstest and fsx need root"
    exit 0
fi
"$here/deps.sh" posix
for tool in pjdfstest@0.2.2 fsx@0.3.2; do
    [ -x "$tools/bin/${tool%@*}" ] || cargo install --quiet --locked --root "$tools" "$tool"
done
if [ "${LARDER_POSIX_PRIVATE:-}" != yes ]; then
    LARDER_POSIX_PRIVATE=yes exec unshare --mount --propagation private "$0" "$larder" "$operations"
fi

work=$(mktemp -d)
chmod 755 "$work"
cleanup() {
    "$larder" umount "$work/larder" 2>/dev/null || umount -l "$work/larder" 2>/dev/null || true
    umount -l "$work/kernel" "$work/second" 2>/dev/null || true
    rm -rf --one-file-system "$work"
}
trap cleanup EXIT
# The two mount points have names of equal length: some tests build the longest possible path.
mkdir "$work/kernel" "$work/larder" "$work/second"
mount -t tmpfs none "$work/second"

cat >"$work/pjdfstest.toml" <<'TOML'
[features]
posix_fallocate = {}
rename_ctime = {}
utime_now = {}
utimensat = {}
[settings]
naptime = 0.01
[dummy_auth]
entries = [["nobody", "nogroup"], ["daemon", "daemon"]]
TOML
# The tests of a read-only file system need a process of their own: others leave files open for writing, and a remount would
# be refused. They remount with mount(8), which starts a helper for a FUSE file system unless told -i; Larder's mount itself
# has nothing to do with it.
sed 's/^naptime.*/&\nallow_remount = true/' "$work/pjdfstest.toml" >"$work/remount.toml"
mkdir "$work/bin"
cat >"$work/bin/mount" <<SH
#!/bin/sh
exec $(command -v mount) -i "\$@"
SH
chmod 755 "$work/bin/mount"
cat >"$work/fsx.toml" <<'TOML'
flen = 1048576
[opsize]
max = 131072
[weights]
close_open = 1
read = 10
write = 10
mapread = 5
mapwrite = 5
invalidate = 1
truncate = 3
fsync = 0.1
fdatasync = 0.1
copy_file_range = 3
posix_fallocate = 2
punch_hole = 2
posix_fadvise = 1
sendfile = 1
TOML

# Runs pjdfstest on a mount; leaves "TEST STATUS" lines in $work/NAME.results.
pjdfstest() {
    local run=("$tools/bin/pjdfstest" -p "$work/$1" -s "$work/second") pass
    (cd "$work/$1" && "${run[@]}" -c "$work/pjdfstest.toml") >"$work/$1.out" 2>&1 || true
    (cd "$work/$1" && PATH=$work/bin:$PATH "${run[@]}" -c "$work/remount.toml" erofs) >"$work/$1-erofs.out" 2>&1 || true
    {
        sed '/erofs/d' "$work/$1.out"
        cat "$work/$1-erofs.out"
    } | awk 'NF == 2 && $2 ~ /^(ok|FAILED|skipped)$/ { print $1, $2 }' | sort >"$work/$1.results"
    for pass in "$1" "$1-erofs"; do
        cp "$work/$pass.out" "$target/pjdfstest-$pass.log"
        grep -q '^Summary' "$work/$pass.out" || { tail -5 "$work/$pass.out"; return 1; }
    done
    awk -v name="$1" '{ n[$2]++ } END { printf "%s: %d ok, %d FAILED, %d skipped\n", name, n["ok"], n["FAILED"], n["skipped"] }' \
        "$work/$1.results"
}

truncate -s 1G "$work/kernel.img"
mkfs.btrfs -q "$work/kernel.img"
mount -o loop,noatime "$work/kernel.img" "$work/kernel"
pjdfstest kernel
umount "$work/kernel"

"$larder" mkfs --size 4G "$work/larder.img"
"$larder" mount -o "allow_other${LARDER_POSIX_OPTIONS:+,$LARDER_POSIX_OPTIONS}" "$work/larder.img" "$work/larder"
chmod 755 "$work/larder"
pjdfstest larder

failed=0
join -a 1 "$work/kernel.results" "$work/larder.results" >"$work/both"
passed=$(awk '$2 == "ok" && $3 == "ok"' "$work/both" | wc -l)
echo "failing on both: $(awk '$2 == "FAILED" && $3 == "FAILED" { printf "%s ", $1 }' "$work/both")"
echo "skipped on both: $(awk '$2 == "skipped" && $3 == "skipped" { printf "%s ", $1 }' "$work/both")"
while read -r name _ status; do
    if reason=$(grep "^$name: " "$here/posix-expected.txt"); then
        echo "differs, explained: $reason"
    else
        echo "test pjdfstest $name ... FAILED (${status:-did not run}; passes on the kernel's btrfs)"
        failed=$((failed + 1))
    fi
done < <(awk '$2 == "ok" && $3 != "ok"' "$work/both")

# In portions, each with the next seed: fsx 0.3.2 never unmaps what it maps to read, so that a long run becomes slower and
# slower, and ends at the kernel's limit of 65,530 mappings (vm.max_map_count) after some 600,000 operations.
portion=50000
for ((left = operations; left > 0; left -= portion, seed++)); do
    count=$((left < portion ? left : portion))
    if "$tools/bin/fsx" -f "$work/fsx.toml" -N "$count" -S "$seed" -P "$work" "$work/larder/fsx" >"$work/fsx.out" 2>&1; then
        echo "test fsx, $count operations, seed $seed ... ok"
        passed=$((passed + 1))
    else
        tail -40 "$work/fsx.out"
        echo "test fsx, $count operations, seed $seed ... FAILED"
        failed=$((failed + 1))
    fi
done

"$larder" umount "$work/larder"
if report=$(btrfs check --readonly --check-data-csum "$work/larder.img" 2>&1) && [[ $report == *", no error found"* ]]; then
    echo "test btrfs check afterwards ... ok"
    passed=$((passed + 1))
else
    echo "$report"
    echo "test btrfs check afterwards ... FAILED"
    failed=$((failed + 1))
fi
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
