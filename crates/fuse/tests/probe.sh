# What is left out because FUSE makes it different: an immutable file can be opened for writing (the kernel does not know the
# flag; the write is refused), and read times (Larder mounts are noatime).
#
# Everything that a file system says to the commands of a shell, as text: run in an empty directory of each of two file
# systems, the outputs must be equal. Needs root; $1 is a user id without rights of its own.
exec 2>&1
LC_ALL=C; export LC_ALL
umask 022
N=$1
run() { echo "\$ $*"; "$@"; echo "= $?"; }
as_nobody() { echo "\$ (nobody) $*"; setpriv --reuid="$N" --regid="$N" --clear-groups "$@"; echo "= $?"; }
show() { stat -c '%n %F %a %u:%g %h links %s bytes %t:%T' "$@"; }
chmod 755 .

echo "## creation, umask, types"
run mkdir d; run touch d/f; umask 077; run mkdir d/private; run touch d/secret; umask 022
run mknod d/null c 1 3; run mknod d/block b 259 1048575; run mkfifo d/fifo; run ln -s target d/link
run python3 -c 'import socket; s = socket.socket(socket.AF_UNIX); s.bind("d/socket")'
show d d/*; run readlink d/link
run mkdir d/f/x; run touch d/f/x; run mkdir d; run mkdir missing/x; run ln -s t d/link
long=$(printf 'n%.0s' $(seq 255)); run touch "d/$long"; run touch "d/${long}n"; run rm "d/$long"
run ln -s "$(printf 't%.0s' $(seq 4000))" d/longlink; run readlink d/longlink | wc -c
run touch "$(printf 'd/\377\n\t')"; run ls -b d; run rm "$(printf 'd/\377\n\t')"

echo "## links, removal, rename"
echo content > a; run ln a b; show a b; run rm a; show b; run ln b d/f; run ln d d2; run ln missing x
run rmdir d; run rmdir missing; run rmdir b; run unlink d; run rm -r d/private; run rmdir .; run rmdir d/..
mkdir e e/sub; run mv -T b e; run mv -T e b; run mv e/sub .; show e sub; run mv -T sub e; show e; run mv e e/inside
echo 1 > one; echo 2 > two; run mv -n one two; run mv one two; cat two; run mv missing y; run mv -T two d/link; show d/link
run python3 - <<'PY'
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
def renameat2(a, b, flags):
    r = libc.renameat2(-100, a.encode(), -100, b.encode(), flags)
    print("renameat2", a, b, flags, "ok" if r == 0 else errno.errorcode[ctypes.get_errno()])
def link(fd, name):
    r = libc.linkat(-100, b"/proc/self/fd/%d" % fd, -100, name.encode(), 0x400)
    print("linkat", name, "ok" if r == 0 else errno.errorcode[ctypes.get_errno()])
open("p", "w").write("p"); open("q", "w").write("q"); os.mkdir("pd"); open("pd/in", "w").close()
renameat2("p", "q", 1); renameat2("p", "q", 2); print(open("p").read(), open("q").read())
renameat2("p", "pd", 2); print(os.path.isdir("p"), os.listdir("p"), open("pd").read())
renameat2("p", "none", 2); renameat2("pd", "w", 4)
s = os.stat("pd"); print(oct(s.st_mode), s.st_rdev, s.st_uid, os.path.exists("w"))
renameat2("w", "w2", 1); renameat2("w2", "q", 3); renameat2("w2", "q", 6)
fd = os.open(".", os.O_TMPFILE | os.O_RDWR, 0o640)
os.write(fd, b"nameless"); s = os.fstat(fd); print(oct(s.st_mode), s.st_nlink, s.st_size)
link(fd, "named"); print(os.fstat(fd).st_nlink, open("named").read())
fd = os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_EXCL, 0o640)
link(fd, "named2")
os.mkdir("cwd"); d = os.open("cwd", os.O_RDONLY); os.rmdir("cwd")
for f in (lambda: os.open("x", os.O_CREAT, dir_fd=d), lambda: os.listdir(d), lambda: os.mkdir("x", dir_fd=d)):
    try: print(f())
    except OSError as e: print(errno.errorcode[e.errno])
PY

echo "## modes, owners, special bits"
touch m; for mode in 0 7777 4755 2755 1644 600; do run chmod $mode m; show m; done
chmod 6755 m; run chown 5:6 m; show m; chmod 6755 m; run chown :7 m; show m; chmod 2745 m; run chown 5 m; show m
mkdir g; chmod 2775 g; chown 0:42 g; touch g/f; mkdir g/sub; ln -s t g/l; show g/*; mkdir g6; chmod 6777 g6; run chown 3:3 g6; show g6
echo data > s; chmod 6777 s; as_nobody sh -c 'echo more >> s'; show s; chmod 6777 s; as_nobody truncate -s 2 s; show s
chmod 6777 s; run sh -c 'echo root >> s'; show s; chmod 2767 s; as_nobody sh -c 'echo x >> s'; show s
big() { for mode in 6777 6666; do for who in as_nobody run; do big_as $who $mode "$@"; done; done; }
big_as() { truncate -s 4096 s; chmod $2 s; $1 python3 -c "import ctypes, mmap, os
fd = os.open('s', os.O_RDWR | $4); page = mmap.mmap(-1, 4096); $3"; show s; }
big 'os.writev(fd, [page])' os.O_DIRECT; big 'os.writev(fd, [page])' 0; big 'os.posix_fallocate(fd, 0, 8192)' 0; big 'os.ftruncate(fd, 1)' 0
big 'os.copy_file_range(fd, fd, 1000, 0, 2000)' 0; big 'ctypes.CDLL(None).fallocate(fd, 3, ctypes.c_long(0), ctypes.c_long(4096))' 0; truncate -s 2 s
chown "$N" s; as_nobody chmod 2777 s; show s; as_nobody chown 0 s; as_nobody chgrp 77 s; as_nobody chmod 700 m

echo "## who may do what"
mkdir -p kept/full/inside; for flag in i a; do chattr +$flag kept; run rmdir kept/full; run rmdir kept/none; run mv kept/full x; chattr -$flag kept; done
mkdir sticky open closed; chmod 1777 sticky; chmod 777 open; chmod 700 closed; touch sticky/root open/root closed/f
as_nobody touch sticky/mine; as_nobody rm -f sticky/root; as_nobody mv sticky/root sticky/x; as_nobody rm sticky/mine
as_nobody rm -f open/root; as_nobody ls closed; as_nobody cat closed/f; as_nobody touch closed/x; as_nobody mkdir x; as_nobody touch m
as_nobody touch -d 2001-01-01 s; as_nobody touch s; as_nobody touch -d 2001-01-01 open; chmod 444 s; as_nobody sh -c 'echo x > s'
as_nobody cat s; chmod 000 s; as_nobody cat s; chmod 111 d; as_nobody ls d; as_nobody stat -c %n d/f; chmod 755 d

echo "## access control lists"
touch acl; run setfacl -m u:5:rw,g:6:r acl; run getfacl -c acl; show acl; run chmod 640 acl; run getfacl -c acl; run setfacl -b acl; run getfacl -c acl
show acl; run setfacl -m m::x acl; show acl; run getfacl -c acl; run setfacl -d -m u:5:r acl; run setfacl -m u:5:r d/link
mkdir da; run setfacl -d -m u:5:rwx,g::r,o::- da; run getfacl -c da; umask 000; touch da/f; mkdir da/sub; (umask 077; touch da/g); mkfifo da/p; ln -s t da/l
run getfacl -c da/f da/sub da/g da/p; show da/*; umask 022; chmod 750 da/f; run getfacl -c da/f
run setfacl -m u:"$N":r closed/f; chmod 711 closed; as_nobody cat closed/f; as_nobody sh -c 'echo x > closed/f'; run setfacl -k da; run getfacl -c da
chown "$N":9 acl; chmod 2775 acl; as_nobody setfacl -m u:5:r acl; show acl; as_nobody setfacl -m u:5:r m

echo "## extended attributes"
touch x; run setfattr -n user.a -v 1 x; run setfattr -n user.empty x; run setfattr -n trusted.t -v 2 x; run setfattr -n security.s -v 3 x
run getfattr -d -m - x; as_nobody getfattr -d -m - x; run setfattr -n system.nothing -v 1 x; run setfattr -n nothing.x -v 1 x; run setfattr -n user. -v 1 x
run getfattr -n user.missing x; run setfattr -x user.missing x; run setfattr -x user.a x; run getfattr -d -m - x; as_nobody setfattr -n user.b -v 1 x
run setfattr -h -n user.x -v 1 d/link; run setfattr -h -n trusted.x -v 1 d/link; run getfattr -h -d -m - d/link; run setfattr -n user.x -v 1 d/fifo
run setfattr -n btrfs.nothing -v 1 x; run setfattr -n btrfs.compression -v lzo x; run getfattr -n btrfs.compression x; run setfattr -n btrfs.compression -v bad x
run python3 - <<'PY'
import errno, os
def attempt(what, f):
    try: print(what, f())
    except OSError as e: print(what, errno.errorcode[e.errno])
attempt("create", lambda: os.setxattr("x", "user.c", b"1", os.XATTR_CREATE))
attempt("create again", lambda: os.setxattr("x", "user.c", b"1", os.XATTR_CREATE))
attempt("replace", lambda: os.setxattr("x", "user.c", b"22", os.XATTR_REPLACE))
attempt("replace nothing", lambda: os.setxattr("x", "user.d", b"1", os.XATTR_REPLACE))
for size in (3900, 16000, 17000, 65536, 65537):
    attempt(size, lambda: os.setxattr("x", "user.size%d" % size, b"v" * size))
attempt("long name", lambda: os.setxattr("x", "user." + "n" * 250, b"1"))
attempt("too long a name", lambda: os.setxattr("x", "user." + "n" * 251, b"1"))
attempt("list", lambda: sorted(os.listxattr("x"))); attempt("size", lambda: len(os.getxattr("x", "user.size16000")))
PY

echo "## flags"
touch fl; run chattr +i fl; run lsattr fl; run rm -f fl; run chmod 600 fl; run mv fl fl2; run ln fl fl3; run setfattr -n user.x -v 1 fl; run chattr -i fl
run chattr +a fl; run sh -c 'echo 1 >> fl'; run sh -c 'echo 2 > fl'; run rm -f fl; run chattr -a fl; run chattr +dAS fl; run lsattr fl; run chattr = fl; run lsattr fl
run chattr +C fl; run lsattr fl; touch nc; run chattr +C nc; run lsattr nc; mkdir cd; run chattr +c cd; run lsattr -d cd; touch cd/f; run lsattr cd/f; run chattr +j fl; run chattr +cC nc
run chattr -c +C cd; run chattr -c cd; run lsattr -d cd; run chattr +m cd; mkdir cd/d; ln -s x cd/l; run lsattr -d cd cd/d; run chattr +c cd; run chattr +cm cd
property() { run getfattr --only-values -n btrfs.compression "$1"; echo; run lsattr -d "$1"; }
mkdir prd; touch prf
for v in zlib zlib:9 zlibx lzo lzo:1 zstd zstd:16 zstd:-5 zstd: none no "" nox none:1 ZLIB zst; do run setfattr -n btrfs.compression -v "$v" prf; property prf; done
for v in zstd:5 lzo none zlib; do run setfattr -n btrfs.compression -v "$v" prd; touch prd/f; mkdir prd/d; property prd/f; property prd/d; rm -r prd/f prd/d; done
run chattr -c prd; property prd; run chattr +c prd; property prd; run setfattr -x btrfs.compression prd; property prd; run setfattr -x btrfs.compression prd; run setfattr -x btrfs.other prd; run setfattr -n btrfs.other -v 1 prd
ln -s prf prl; mkfifo prp; for f in prl prp; do run setfattr -h -n btrfs.compression -v zstd $f; run getfattr -h -n btrfs.compression $f; run setfattr -h -x btrfs.compression $f; done
mkdir ncd; run chattr +C ncd; touch ncd/f; mkdir ncd/d; run lsattr -d ncd/f ncd/d; for f in ncd ncd/f ncd/d; do run setfattr -n btrfs.compression -v zstd $f; run setfattr -n btrfs.compression -v none $f; run chattr +c $f; done; as_nobody chattr +d fl; run rm -f fl nc

echo "## times"
run python3 - <<'PY'
import errno, os, time
def times(p): s = os.lstat(p); return s.st_atime_ns, s.st_mtime_ns, s.st_ctime_ns
def changed(what, path, f):
    before = times(path); time.sleep(0.02)
    try: f()
    except OSError as e: print(what, errno.errorcode[e.errno])
    after = times(path); print(what, path, "mtime" if before[1] != after[1] else "-", "ctime" if before[2] != after[2] else "-")
os.mkdir("t"); open("t/f", "w").write("12345"); os.mkdir("t/sub"); os.symlink("x", "t/l")
changed("create", "t", lambda: open("t/g", "w").close()); changed("unlink", "t", lambda: os.unlink("t/g"))
changed("mkdir", "t", lambda: os.mkdir("t/d")); changed("rmdir", "t", lambda: os.rmdir("t/d"))
changed("rename", "t", lambda: os.rename("t/f", "t/h")); os.rename("t/h", "t/f")
changed("link", "t/f", lambda: os.link("t/f", "t/f2")); changed("unlink", "t/f", lambda: os.unlink("t/f2"))
changed("write", "t/f", lambda: open("t/f", "r+").write("x")); changed("append", "t/f", lambda: open("t/f", "a").write("x"))
changed("nothing written", "t/f", lambda: open("t/f", "a").close()); changed("truncate", "t/f", lambda: os.truncate("t/f", 2))
changed("grow", "t/f", lambda: os.truncate("t/f", 20)); changed("O_TRUNC", "t/f", lambda: open("t/f", "w").close())
changed("chmod", "t/f", lambda: os.chmod("t/f", 0o600)); changed("chown", "t/f", lambda: os.chown("t/f", 1, 1))
changed("chown to nobody new", "t/f", lambda: os.chown("t/f", -1, -1)); changed("xattr", "t/f", lambda: os.setxattr("t/f", "user.x", b"1"))
changed("chattr", "t/f", lambda: os.system("chattr +d t/f")); changed("chattr", "t/sub", lambda: os.system("chattr +d t/sub"))
changed("setfacl", "t/f", lambda: os.system("setfacl -m u:7:r t/f")); changed("stat", "t/f", lambda: os.stat("t/f")); changed("read", "t/f", lambda: open("t/f").read()); changed("subdir", "t/sub", lambda: os.rename("t/sub", "t/sub2") or os.rename("t/sub2", "t/sub"))
for ns in (0, 1, -1, 999999999, -10**18, 2**33 * 10**9, 1234567890123456789):
    os.utime("t/f", ns=(ns, ns)); print(times("t/f")[:2]); os.utime("t/l", ns=(ns, ns), follow_symlinks=False); print(times("t/l")[1])
PY

echo "## contents"
run python3 - <<'PY'
import errno, os
def attempt(what, f):
    try: print(what, f())
    except OSError as e: print(what, errno.errorcode[e.errno])
fd = os.open("data", os.O_CREAT | os.O_RDWR)
os.pwrite(fd, b"a" * 8192, 65536); os.pwrite(fd, b"b" * 5000, 200000); os.ftruncate(fd, 300000); os.fsync(fd)
for what in (os.SEEK_DATA, os.SEEK_HOLE):
    for at in (0, 65536, 70000, 73728, 199999, 204999, 299999, 300000, 400000):
        attempt((what, at), lambda: os.lseek(fd, at, what))
print(os.pread(fd, 20, 65530), os.pread(fd, 10, 299995), os.pread(fd, 10, 300000))
to = os.open("copy", os.O_CREAT | os.O_RDWR)
attempt("copy", lambda: os.copy_file_range(fd, to, 1 << 20, 0, 0)); print(os.fstat(to).st_size, os.pread(to, 4, 65534), os.pread(to, 300000, 0) == os.pread(fd, 300000, 0))
attempt("copy inside", lambda: os.copy_file_range(to, to, 4096, 65536, 0)); attempt("overlapping", lambda: os.copy_file_range(to, to, 8192, 0, 4096))
attempt("copy past the end", lambda: os.copy_file_range(fd, to, 10, 300000, 0))
attempt("shrink", lambda: os.ftruncate(fd, 65540)); attempt("grow", lambda: os.ftruncate(fd, 70000)); print(os.pread(fd, 10, 65536))
attempt("huge", lambda: os.ftruncate(fd, 2**63 - 1)); print(os.fstat(fd).st_size); attempt("write there", lambda: os.pwrite(fd, b"x", 2**63 - 2))
attempt("too far", lambda: os.pwrite(fd, b"xx", 2**63 - 2)); attempt("negative", lambda: os.ftruncate(fd, -1)); attempt("directory", lambda: os.truncate("d", 0))
attempt("read a directory", lambda: os.read(os.open("d", os.O_RDONLY), 1)); attempt("open for writing", lambda: os.open("d", os.O_RDWR))
ro = os.open("data", os.O_RDONLY); attempt("write to a reader", lambda: os.write(ro, b"x")); os.ftruncate(fd, 10)
d = os.open("direct", os.O_CREAT | os.O_RDWR | os.O_SYNC); attempt("sync write", lambda: os.write(d, b"z" * 100000)); attempt("append", lambda: os.write(os.open("direct", os.O_WRONLY | os.O_APPEND), b"end"))
print(os.fstat(d).st_size, os.pread(d, 10, 99998)); attempt("fsync a directory", lambda: os.fsync(os.open("d", os.O_RDONLY)))
PY
echo first > o; echo 2 > o; cat o; run sh -c 'printf abc | dd of=o bs=1 seek=5 conv=notrunc status=none'; od -c o
