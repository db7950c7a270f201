#!/bin/bash
# Fails if a program has faults compiled in, which are for tests: no-faults.sh PROGRAM
#
# Their names are strings in each program that was built with the feature `faults` of `larder-fs`.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

names=$(sed -n 's/^    \([A-Z][A-Za-z]*\),$/\1/p' crates/fs/src/base/tuning/faults.rs)
[ -n "$names" ] && [ -f "$1" ] || {
    echo "no-faults.sh: $1: no such program, or no names of faults to look for" >&2
    exit 2
}
found=$(grep -aoF "$names" "$1" | sort -u | tr '\n' ' ')
[ -z "$found" ] || {
    echo "$1 was built for tests and has faults: ${found% }. \`make build\` builds it without."
    exit 1
}
