#!/bin/bash
# Every test, and at the end what was skipped: `make test`.
#
# Installs what the tests need where it may. The last line is `N passed, N failed`.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

scripts/deps.sh test

target=${CARGO_TARGET_DIR:-target}
mkdir -p "$target"
log=$target/test.log
skipped=$target/test-skipped.log
: >"$log"
: >"$skipped"
export LARDER_SKIP_LOG
LARDER_SKIP_LOG=$(realpath "$skipped")

failed=0
passed=0

# Seconds in which no test ends and nothing is compiled, after which the tests count as hanging.
HANGING=${HANGING:-600}

# Ends each test program that hangs, and shows first where its threads are. So a hang is a failure
# that says what hung, and the tests that follow still run.
end_what_hangs() {
    local program pid
    while sleep 10; do
        [ $(($(date +%s) - $(stat -c %Y "$log"))) -lt "$HANGING" ] && continue
        program=$(sed -n 's/^ *Running .* (\(.*\))$/\1/p' "$log" | tail -n 1)
        for pid in $(pgrep -f -- "^$(realpath "${program:-/none}")"); do
            echo "test $program hangs: nothing in $HANGING s"
            eu-stack -p "$pid" 2>&1 || grep -H . "/proc/$pid/task/"*/{comm,wchan}
            kill -ABRT "$pid"
        done 2>&1 | tee -a "$log"
        echo "hang: looked for ${program:-a program}" >>"$log"
    done
}
end_what_hangs &
watcher=$!
trap 'kill $watcher 2>/dev/null' EXIT

# Not through a pipe: whatever a test leaves behind would keep it open. A shell has what runs beside
# it ignore Ctrl-C, and tests send such signals.
signals=
env --default-signal=INT true 2>/dev/null && signals="env --default-signal=INT,QUIT"
$signals cargo test --workspace --no-fail-fast "$@" >>"$log" 2>&1 &
cargo=$!
tail -n +1 -f --pid=$cargo "$log"
wait $cargo || cargo_failed=yes
kill $watcher

read -r passed failed < <(awk '
    /^test result: / {
        for (i = 1; i < NF; i++) {
            if ($(i + 1) ~ /^passed/) passed += $i
            if ($(i + 1) ~ /^failed/) failed += $i
        }
    }
    END { print passed + 0, failed + 0 }' "$log")
# What does not compile has no result line of its own.
if [ -n "${cargo_failed:-}" ] && [ "$failed" = 0 ]; then
    failed=1
fi

# The two commands a new user types, on an image and mount point of their own.
demo() {
    local dir status
    dir=$(mktemp -d)
    timeout "$HANGING" make --no-print-directory run PROFILE=dev IMAGE="$dir/demo.img" MNT="$dir/mnt" | tee "$dir/out" &&
        timeout "$HANGING" make --no-print-directory stop PROFILE=dev IMAGE="$dir/demo.img" MNT="$dir/mnt" | tee -a "$dir/out" &&
        grep -qE '[oi]n it: .*hello.txt' "$dir/out" &&
        grep -qE 'durable: [0-9.]+ ms by fsync, [0-9.]+ ms by a commit|^No mount: ' "$dir/out" &&
        grep -q '^larder check: no errors' "$dir/out" &&
        grep -qE '^btrfs check: no error found|^Not checked by btrfs' "$dir/out"
    status=$?
    if [ $status != 0 ]; then
        # Whatever failed, nothing stays mounted.
        umount -l "$dir/mnt" 2>/dev/null || fusermount3 -uz "$dir/mnt" 2>/dev/null
    fi
    rm -rf --one-file-system "$dir"
    return $status
}
if demo >"$target/demo.log" 2>&1; then
    echo "test make run, make stop ... ok"
    passed=$((passed + 1))
else
    cat "$target/demo.log"
    echo "test make run, make stop ... FAILED"
    failed=$((failed + 1))
fi

# `make run` has just built what users get. What the tests ran has faults: else this proves nothing.
no_faults() {
    local tested
    tested=$(sed -n 's/.*Running tests\/must_fail.rs (\(.*\))$/\1/p' "$log")
    scripts/no-faults.sh "$target/debug/larder" || return
    [ -n "$tested" ] || return 0
    scripts/no-faults.sh "$tested"
    [ $? = 1 ]
}
if no_faults >"$target/no-faults.log" 2>&1; then
    echo "test no faults in larder ... ok"
    passed=$((passed + 1))
else
    cat "$target/no-faults.log"
    echo "test no faults in larder ... FAILED"
    failed=$((failed + 1))
fi

if [ -s "$skipped" ]; then
    echo
    echo "skipped:"
    sort -u "$skipped" | sed 's/^/  /'
fi
grep -E '^test .* FAILED$' "$log" | sort -u
echo
echo "$passed passed, $failed failed" | tee "$target/test-result"
[ "$failed" = 0 ]
