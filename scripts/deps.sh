#!/bin/sh
# Installs the system packages that Larder needs: scripts/deps.sh [build|run|test|bench|posix]
#
# Each level includes the one before it (posix: test). As root on a Debian-like system whatever is missing is installed with apt;
# anywhere else the missing things are named, and the script succeeds all the same: what can be done without them is
# done, and each test that needs one says so. Where nothing is missing, apt is not called at all.
#
# `mkfs.btrfs` has to know the block-group tree, which the version in Debian 12 does not: there the package comes from
# Debian's backports, whose address is taken from the machine's own sources, so that a mirror stays in use.
set -eu

level=${1:-test}
case $level in build | run | test | bench | posix) ;; *) echo "usage: $0 [build|run|test|bench|posix]" >&2; exit 2 ;; esac

PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
export PATH
say() { echo "deps: $*"; }
have() { command -v "$1" >/dev/null 2>&1; }

# "program package" pairs, one per line.
wanted() {
    echo "cc gcc"
    echo "cc libc6-dev"
    echo "make make"
    [ "$level" = build ] && return
    echo "fusermount3 fuse3"
    [ "$level" = run ] && return
    cat <<PAIRS
getfattr attr
setfacl acl
chattr e2fsprogs
mkfs.ext4 e2fsprogs
mkfs.xfs xfsprogs
mkswap util-linux
losetup mount
mount mount
umount mount
modprobe kmod
sqlite3 sqlite3
stdbuf coreutils
eu-stack elfutils
pgrep procps
pip3 python3-pip
fio fio
dbench dbench
chromium chromium
rsvg-convert librsvg2-bin
umoci umoci
bsdtar libarchive-tools
PAIRS
    [ "$level" = bench ] || return
    echo "xz xz-utils"
    echo "bonnie++ bonnie++"
}

# A Linux source tree to unpack: any that Debian packages.
source_package() {
    for tar in /usr/src/linux-source-*.tar.xz; do
        [ ! -f "$tar" ] || return 0
    done
    if have apt-cache && apt-cache show linux-source-6.1 >/dev/null 2>&1; then
        echo linux-source-6.1
    else
        echo linux-source
    fi
}

# Does the installed mkfs.btrfs know the block-group tree?
btrfs_progs_ok() {
    have btrfs && have mkfs.btrfs && mkfs.btrfs -O list-all 2>&1 | grep -q block-group-tree
}

missing_programs() {
    {
        wanted | while read -r program package; do
            have "$program" || echo "$package"
        done
        [ "$level" != bench ] || source_package
        [ "$level" != posix ] || [ -f /usr/include/sys/acl.h ] || echo libacl1-dev
    } | sort -u
}

# udev gives /dev/fuse to everybody; a system without udev may not, and then ordinary users cannot mount.
case $level in test | posix)
    if [ "$(id -u)" = 0 ] && [ -c /dev/fuse ] && [ "$(stat -c %a /dev/fuse)" != 666 ]; then
        chmod 0666 /dev/fuse && say "/dev/fuse is for everybody now (0666), as udev makes it: the tests mount as an ordinary user"
    fi
    ;;
esac

needs_btrfs=no
[ "$level" = build ] || btrfs_progs_ok || needs_btrfs=yes
missing=$(missing_programs | tr '\n' ' ')

if [ -z "$missing" ] && [ $needs_btrfs = no ]; then
    exit 0
fi

explain() {
    [ -z "$missing" ] || say "missing packages (Debian's names): $missing"
    [ $needs_btrfs = no ] || say "missing: a btrfs-progs that knows the block-group tree (6.14 does; Debian 12 has it in bookworm-backports)"
}

if [ "$(id -u)" != 0 ] || ! have apt-get; then
    explain
    [ "$(id -u)" = 0 ] || say "not root, so nothing is installed; with root: sudo $0 $level"
    have apt-get || say "no apt-get here, so nothing is installed"
    exit 0
fi

apt() {
    DEBIAN_FRONTEND=noninteractive apt-get -q -o Acquire::Retries=3 -o DPkg::Lock::Timeout=300 "$@" >&2
}

updated=no
update() {
    [ $updated = yes ] && return 0
    updated=yes
    apt update || say "apt-get update failed; trying with the lists that are there"
}

# Prints an apt source for the backports of the running release, made from the source this machine has for the release.
backports_source() {
    codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
    [ -n "$codename" ] || return 1
    for file in /etc/apt/sources.list.d/*.sources; do
        [ -f "$file" ] || continue
        # deb822: paragraphs end at a blank line; the right one lists the plain release among its suites.
        stanza=$(grep -v '^[[:space:]]*#' "$file" | awk -v suite="$codename" '
            BEGIN { RS = ""; FS = "\n" }
            {
                plain = 0; skip = 0; out = ""
                for (i = 1; i <= NF; i++) {
                    if (tolower($i) ~ /^suites:/) {
                        n = split($i, word, /[ \t]+/)
                        for (j = 2; j <= n; j++) if (word[j] == suite) plain = 1
                        $i = "Suites: " suite "-backports"
                    }
                    if (tolower($i) ~ /^enabled:[ \t]*(no|false|0)/) skip = 1
                    if (tolower($i) ~ /^types:/) $i = "Types: deb"
                    out = out $i "\n"
                }
                if (plain && !skip) { printf "%s", out; exit }
            }')
        if [ -n "$stanza" ]; then echo "$stanza"; return 0; fi
    done
    for file in /etc/apt/sources.list /etc/apt/sources.list.d/*.list; do
        [ -f "$file" ] || continue
        # One line: deb [options] address suite components...
        stanza=$(awk -v suite="$codename" '
            $1 == "deb" {
                options = ""; i = 2
                if ($2 ~ /^\[/) { while ($i !~ /\]$/) options = options $(i++) " "; options = options $(i++) }
                if ($(i + 1) != suite) next
                if (match(options, /signed-by=[^] ]+/)) key = substr(options, RSTART + 10, RLENGTH - 10)
                print "Types: deb\nURIs: " $i "\nSuites: " suite "-backports"
                printf "Components:"
                for (j = i + 2; j <= NF; j++) printf " %s", $j
                print ""
                if (key != "") print "Signed-By: " key
                exit
            }' "$file")
        if [ -n "$stanza" ]; then echo "$stanza"; return 0; fi
    done
    return 1
}

if [ -n "$missing" ]; then
    say "installing: $missing"
    update
    # shellcheck disable=SC2086 # a list of words
    apt install -y --no-install-recommends $missing || say "apt-get install failed"
fi

if [ $needs_btrfs = yes ]; then
    say "installing: btrfs-progs"
    update
    apt install -y --no-install-recommends btrfs-progs || say "apt-get install failed"
    if ! btrfs_progs_ok && [ "$(. /etc/os-release && echo "${ID:-}")" = debian ]; then
        codename=$(. /etc/os-release && echo "$VERSION_CODENAME")
        added=/etc/apt/sources.list.d/larder-backports.sources
        if apt-cache policy 2>/dev/null | grep -q "a=[a-z]*-backports,n=$codename-backports"; then
            :
        elif source=$(backports_source); then
            printf '%s\n' "$source" >"$added"
            say "added $added"
            if ! apt update -o Dir::Etc::sourceparts=/dev/null -o Dir::Etc::sourcelist="$added" \
                -o APT::Get::List-Cleanup=0 --error-on=any; then
                say "no backports at this machine's mirror; removing $added again"
                rm -f "$added"
            fi
        else
            say "found no Debian source to derive the backports from"
        fi
        apt install -y --no-install-recommends -t "$codename-backports" btrfs-progs || say "apt-get install failed"
    fi
fi

# What is still missing is said, not fatal: tests say what they skip, and CI makes a skipped oracle a failure.
missing=$(missing_programs | tr '\n' ' ')
needs_btrfs=no
[ "$level" = build ] || btrfs_progs_ok || needs_btrfs=yes
explain
