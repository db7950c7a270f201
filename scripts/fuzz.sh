#!/bin/bash
# Fuzzing: scripts/fuzz.sh [SECONDS] [TARGET...] - each target for so long, one after the other; all of them without names.
#
# Needs a nightly compiler and cargo-fuzz, and says how to get them. What is new goes to target/fuzz-corpus; what breaks
# something ends up in fuzz/artifacts, and the script ends with 1.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

seconds=${1:-600}
shift || :
if ! cargo +nightly fuzz --version >/dev/null 2>&1; then
    echo "fuzzing needs: rustup toolchain install nightly --profile minimal; cargo install cargo-fuzz" >&2
    exit 2
fi
targets=("$@")
[ ${#targets[@]} -gt 0 ] || mapfile -t targets < <(cargo +nightly fuzz list)

status=0
for target in "${targets[@]}"; do
    found=target/fuzz-corpus/$target
    mkdir -p "$found"
    options=(-max_total_time="$seconds" -max_len=4097 -rss_limit_mb=4096 -print_final_stats=1)
    # What commands print is nobody's business, and more than the fuzzer's own report.
    [ "$target" != printers ] || options+=(-close_fd_mask=1)
    # AddressSanitizer has little to find in safe code, and makes everything several times slower.
    cargo +nightly fuzz run --sanitizer "${FUZZ_SANITIZER:-none}" "$target" "$found" "fuzz/corpus/$target" -- \
        "${options[@]}" || status=1
done
exit $status
