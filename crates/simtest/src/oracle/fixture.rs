//! A tree with everything that the format can hold, made through the kernel's btrfs.
//!
//! The decision hidden here is what "everything" is: for each feature the sizes and shapes at which
//! the format changes its representation (inline or not, one inode-ref item or extrefs, one extent
//! or pieces of a shared one). Contents and times are fixed by the knobs alone, so two runs make
//! the same tree (though not the same blocks).

use anyhow::{Context, Result, ensure};
use rustix::fs::{AtFlags, CWD, FallocateFlags, FileType, Mode, Timespec, Timestamps, XattrFlags};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt, chown, lchown, symlink};
use std::path::{Path, PathBuf};

/// How much of everything to make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fixture {
    /// Entries of the large directory.
    pub entries: usize,
    /// Bytes of the large regular file, written in pieces with fsyncs.
    pub large_file: u64,
    /// Separate 4 KiB extents of which every other one is freed: more than about 160 per block
    /// group turn the free-space tree to bitmaps.
    pub fragments: u64,
    /// Hard links, with names of 200 bytes, of one file in one directory.
    pub links: usize,
}

impl Fixture {
    /// About 10 MiB and 1,500 entries; needs an image of 256 MiB.
    #[must_use]
    pub fn small() -> Self {
        Self { entries: 300, large_file: 3 << 20, fragments: 500, links: 450 }
    }
}

/// Names with the same directory hash: 2^`rounds` of them, each `7 * rounds` bytes. They collide as
/// xattr names, too, behind any common prefix.
#[must_use]
pub fn colliding_names(rounds: u32) -> Vec<Vec<u8>> {
    // The difference of two crc values depends only on the difference of the messages, so names
    // made of colliding pieces of equal length collide from any start value.
    const PAIR: [&[u8; 7]; 2] = [b"TTqGO4p", b"snNzDoq"];
    (0..1usize << rounds)
        .map(|n| (0..rounds).flat_map(|bit| *PAIR[n >> bit & 1]).collect())
        .collect()
}

/// Makes the tree in `dir`, an empty directory on a btrfs that the kernel has mounted; needs root.
/// Ends with a sync.
///
/// # Errors
/// Whatever the file system answers.
pub fn populate(dir: &Path, knobs: &Fixture) -> Result<()> {
    type Make = fn(&Path, &Fixture) -> Result<()>;
    let parts: [(&str, Make); 14] = [
        ("inline", inline),
        ("regular", regular),
        ("prealloc", prealloc),
        ("sparse", sparse),
        ("compressed", compressed),
        ("reflink", reflink),
        ("nodatacow", nodatacow),
        ("links", links),
        ("names", names),
        ("special", special),
        ("xattr", xattrs),
        ("modes", modes),
        ("many", many),
        ("fragments", fragments),
    ];
    for (name, make) in parts {
        let part = dir.join(name);
        std::fs::create_dir(&part)?;
        make(&part, knobs).with_context(|| format!("fixture {name}"))?;
    }
    subvolumes(dir).context("fixture subvolumes")?;
    rustix::fs::syncfs(File::open(dir)?)?;
    Ok(())
}

/// Bytes without pattern.
fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    bytes
}

/// Bytes that compress well but are nowhere equal.
fn text(seed: u64, len: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(len + 64);
    let mut line = seed;
    while out.len() < len {
        out.extend_from_slice(
            format!("line {line:012} of a text that a compressor likes\n").as_bytes(),
        );
        line += 1;
    }
    out.truncate(len);
    out
}

fn write(path: impl AsRef<Path>, data: &[u8]) -> Result<()> {
    std::fs::write(&path, data).with_context(|| format!("{}", path.as_ref().display()))
}

fn create(path: &Path) -> Result<File> {
    File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(path)
        .with_context(|| format!("{}", path.display()))
}

fn sync(path: &Path) -> Result<()> {
    Ok(File::open(path)?.sync_all()?)
}

fn inline(dir: &Path, _: &Fixture) -> Result<()> {
    for len in [0usize, 1, 2, 100, 2047, 2048, 2049, 3000, 4095] {
        write(dir.join(format!("{len}")), &noise(len as u64, len))?;
    }
    // Inline when it is committed, then grown past that form, and one that shrank.
    for name in ["grown", "shrunk"] {
        write(dir.join(name), &noise(7, 1000))?;
    }
    sync(dir)?;
    File::options().write(true).open(dir.join("grown"))?.write_all_at(&noise(8, 9000), 1000)?;
    File::options().write(true).open(dir.join("shrunk"))?.set_len(10)?;
    Ok(())
}

fn regular(dir: &Path, knobs: &Fixture) -> Result<()> {
    for len in [4096usize, 4097, 8192, 65_537, 200_000] {
        write(dir.join(format!("{len}")), &noise(len as u64, len))?;
    }
    write(dir.join("zeros"), &[0; 20_000])?;
    // One extent of which only the ends are left in use, around a newer one.
    let path = dir.join("overwritten");
    write(&path, &noise(21, 256 << 10))?;
    sync(&path)?;
    File::options().write(true).open(&path)?.write_all_at(&noise(22, 70_000), 30_000)?;
    sync(&path)?;
    // A tail beyond the end of the file, on disk, that must read as a hole when the file grows
    // again.
    let path = dir.join("cut-and-grown");
    write(&path, &noise(23, 50_000))?;
    sync(&path)?;
    let file = File::options().write(true).open(&path)?;
    file.set_len(10_001)?;
    file.set_len(90_000)?;
    // Many extents: written in pieces, out of order, each made durable.
    let file = create(&dir.join("large"))?;
    const PIECE: u64 = 128 << 10;
    let pieces = knobs.large_file / PIECE;
    for n in 0..pieces {
        let at = if n % 2 == 0 { n } else { pieces - 1 - (pieces - 1 - n) / 2 * 2 };
        file.write_all_at(&noise(1000 + at, usize::try_from(PIECE)?), at * PIECE)?;
        if n % 8 == 0 {
            file.sync_data()?;
        }
    }
    Ok(())
}

fn prealloc(dir: &Path, _: &Fixture) -> Result<()> {
    let file = create(&dir.join("untouched"))?;
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, 300_000)?;
    let file = create(&dir.join("beyond-the-end"))?;
    rustix::fs::fallocate(&file, FallocateFlags::KEEP_SIZE, 0, 1 << 20)?;
    file.write_all_at(&noise(31, 5000), 0)?;
    // Written in the middle: three items over one extent.
    let file = create(&dir.join("partly-written"))?;
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, 512 << 10)?;
    file.sync_all()?;
    file.write_all_at(&noise(32, 40_000), 100_000)?;
    file.sync_all()?;
    file.write_all_at(&noise(33, 4096), 400_000)?;
    Ok(())
}

fn sparse(dir: &Path, _: &Fixture) -> Result<()> {
    let file = create(&dir.join("only-a-hole"))?;
    file.set_len(10 << 20)?;
    let file = create(&dir.join("islands"))?;
    for (n, at) in [(1u64, 1u64 << 20), (2, 3 << 20), (3, (3 << 20) + 8192), (4, 40 << 20)] {
        file.write_all_at(&noise(40 + n, 6000), at)?;
    }
    file.set_len(100 << 20)?;
    let file = create(&dir.join("punched"))?;
    file.write_all_at(&noise(45, 300_000), 0)?;
    file.sync_all()?;
    rustix::fs::fallocate(
        &file,
        FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
        50_000,
        100_000,
    )?;
    // As far out as a file offset goes.
    let file = create(&dir.join("huge"))?;
    let end = i64::MAX.cast_unsigned();
    file.write_all_at(b"start", 0)?;
    file.write_all_at(&noise(46, 5000), 1 << 50)?;
    file.write_all_at(&noise(47, 4000), end - 8000)?;
    Ok(())
}

/// Sets `btrfs.compression`, as `btrfs property set` does.
fn set_compression(path: &Path, algorithm: &str) -> Result<()> {
    rustix::fs::setxattr(path, "btrfs.compression", algorithm.as_bytes(), XattrFlags::empty())
        .with_context(|| format!("compression {algorithm} for {}", path.display()))
}

fn compressed(dir: &Path, _: &Fixture) -> Result<()> {
    for algorithm in ["zlib", "lzo", "zstd"] {
        let dir = dir.join(algorithm);
        std::fs::create_dir(&dir)?;
        // New entries inherit it.
        set_compression(&dir, algorithm)?;
        write(dir.join("inline"), &text(1, 1500))?;
        write(dir.join("inline-nearly-a-sector"), &text(2, 4095))?;
        write(dir.join("inline-sector"), &text(3, 4096))?;
        write(dir.join("one-extent"), &text(4, 128 << 10))?;
        write(dir.join("odd-length"), &text(5, 300_001))?;
        write(dir.join("zeros"), &[0; 400_000])?;
        write(dir.join("does-not-shrink"), &noise(6, 200_000))?;
        let mut mixed = text(7, 150_000);
        mixed.extend(noise(8, 150_000));
        mixed.extend(text(9, 150_000));
        write(dir.join("mixed"), &mixed)?;
        // Pieces of compressed extents.
        let path = dir.join("overwritten");
        write(&path, &text(10, 256 << 10))?;
        sync(&path)?;
        File::options().write(true).open(&path)?.write_all_at(&text(11, 20_000), 60_000)?;
        let path = dir.join("cut");
        write(&path, &text(12, 200_000))?;
        sync(&path)?;
        File::options().write(true).open(&path)?.set_len(70_000)?;
    }
    Ok(())
}

const FICLONERANGE: libc::c_ulong = 0x4020_940d;

/// Makes `to` share all of `from`.
fn clone(from: &File, to: &File) -> Result<()> {
    // A length of 0 means up to the end.
    clone_range(from, 0..0, to, 0)
}

/// Makes the range at `at` of `to` share a range of `from`.
fn clone_range(from: &File, range: Range<u64>, to: &File, at: u64) -> Result<()> {
    #[repr(C)]
    struct Request {
        fd: i64,
        offset: u64,
        length: u64,
        dest: u64,
    }
    let request = Request {
        fd: from.as_raw_fd().into(),
        offset: range.start,
        length: range.end - range.start,
        dest: at,
    };
    // SAFETY: the request reads one `struct file_clone_range` of 32 bytes.
    let done = unsafe { libc::ioctl(to.as_raw_fd(), FICLONERANGE, &raw const request) };
    ensure!(done == 0, "FICLONERANGE: {}", std::io::Error::last_os_error());
    Ok(())
}

fn reflink(dir: &Path, _: &Fixture) -> Result<()> {
    write(dir.join("source"), &noise(51, 256 << 10))?;
    sync(&dir.join("source"))?;
    let source = File::open(dir.join("source"))?;
    let whole = create(&dir.join("whole"))?;
    clone(&source, &whole)?;
    let pieces = create(&dir.join("pieces"))?;
    for n in 0..8u64 {
        let from = n * 32_768 % (64 << 10);
        clone_range(&source, from..from + 16_384, &pieces, n * 65_536)?;
    }
    // A file that shares with itself, then is written over in part.
    let own = File::options().read(true).write(true).open(dir.join("whole"))?;
    clone_range(&own, 0..65_536, &own, 1 << 20)?;
    own.sync_all()?;
    own.write_all_at(&noise(52, 10_000), (1 << 20) + 20_000)?;
    // Pieces of a compressed extent, and of a preallocated one.
    std::fs::create_dir(dir.join("zstd"))?;
    set_compression(&dir.join("zstd"), "zstd")?;
    write(dir.join("zstd/source"), &text(53, 128 << 10))?;
    sync(&dir.join("zstd/source"))?;
    let source = File::open(dir.join("zstd/source"))?;
    let target = create(&dir.join("zstd/pieces"))?;
    for n in (0..16u64).rev() {
        clone_range(&source, n * 8192..n * 8192 + 4096, &target, (15 - n) * 12_288)?;
    }
    write(dir.join("inline"), &noise(54, 900))?;
    sync(&dir.join("inline"))?;
    let source = File::open(dir.join("inline"))?;
    clone(&source, &create(&dir.join("inline-copy"))?)?;
    let source = create(&dir.join("prealloc"))?;
    rustix::fs::fallocate(&source, FallocateFlags::empty(), 0, 128 << 10)?;
    source.write_all_at(&noise(55, 8192), 16_384)?;
    source.sync_all()?;
    let copy = create(&dir.join("prealloc-copy"))?;
    clone(&source, &copy)?;
    // A clone lacks the inode flag that says "has preallocated extents", and without it Linux's
    // SEEK_HOLE takes them for data. Allocating a little behind the end sets it.
    Ok(rustix::fs::fallocate(&copy, FallocateFlags::KEEP_SIZE, 1 << 20, 4096)?)
}

fn nodatacow(dir: &Path, _: &Fixture) -> Result<()> {
    const FS_IOC_SETFLAGS: libc::c_ulong = 0x4008_6602;
    const FS_NOCOW_FL: libc::c_int = 0x0080_0000;
    let file = create(&dir.join("file"))?;
    let flags = FS_NOCOW_FL;
    // SAFETY: the request reads one int.
    let done = unsafe { libc::ioctl(file.as_raw_fd(), FS_IOC_SETFLAGS, &raw const flags) };
    ensure!(done == 0, "chattr +C: {}", std::io::Error::last_os_error());
    file.write_all_at(&noise(61, 100_000), 0)?;
    file.sync_all()?;
    file.write_all_at(&noise(62, 10_000), 50_000)?;
    Ok(())
}

fn links(dir: &Path, knobs: &Fixture) -> Result<()> {
    // Enough names in one directory that they do not fit one INODE_REF item, whatever the node
    // size.
    write(dir.join("file"), &noise(71, 3000))?;
    for n in 0..knobs.links {
        std::fs::hard_link(dir.join("file"), dir.join(format!("{n:0>200}")))?;
    }
    // A second file with names in several directories, and a linked symlink.
    for n in 0..3 {
        std::fs::create_dir(dir.join(format!("dir{n}")))?;
    }
    write(dir.join("dir0/a"), &noise(72, 70_000))?;
    std::fs::hard_link(dir.join("dir0/a"), dir.join("dir1/b"))?;
    std::fs::hard_link(dir.join("dir0/a"), dir.join("dir2/c"))?;
    std::fs::hard_link(dir.join("dir0/a"), dir.join("dir2/d"))?;
    symlink("a", dir.join("dir0/symlink"))?;
    std::fs::hard_link(dir.join("dir0/symlink"), dir.join("dir1/symlink"))?;
    Ok(())
}

fn names(dir: &Path, _: &Fixture) -> Result<()> {
    for (n, name) in colliding_names(4).into_iter().enumerate() {
        let path = dir.join(OsStr::from_bytes(&name));
        if n % 5 == 0 {
            std::fs::create_dir(&path)?
        } else {
            write(&path, &noise(n as u64, 10 * n))?
        }
    }
    let long = [b'n'; 255];
    let other_long: Vec<u8> =
        (0..255u8).map(|n| if matches!(n, 0 | b'/') { b'x' } else { n }).collect();
    let odd: [&[u8]; 12] = [
        &long,
        &other_long,
        b"with space",
        b"with\nnewline",
        b"with:colon",
        b"with\\backslash",
        b"-dash",
        b"..dots",
        b"...",
        b"not utf-8 \xff\xfe",
        "größer 🗄️".as_bytes(),
        b"\x01",
    ];
    for name in odd {
        write(dir.join(OsStr::from_bytes(name)), name)?;
    }
    let mut deep = dir.join("deep");
    for n in 0..60 {
        deep.push(format!("{n}"));
    }
    std::fs::create_dir_all(&deep)?;
    write(deep.join("bottom"), b"here")?;
    // Entries that came and went: gaps in the index.
    std::fs::create_dir(dir.join("gaps"))?;
    for n in 0..200 {
        write(dir.join(format!("gaps/{n}")), b"")?;
    }
    for n in (0..200).filter(|n| n % 3 != 0) {
        std::fs::remove_file(dir.join(format!("gaps/{n}")))?;
    }
    for n in (0..200).step_by(6) {
        std::fs::rename(dir.join(format!("gaps/{n}")), dir.join(format!("gaps/renamed-{n}")))?;
    }
    Ok(())
}

fn special(dir: &Path, _: &Fixture) -> Result<()> {
    symlink("target", dir.join("symlink"))?;
    symlink("/", dir.join("absolute"))?;
    symlink("a/b/c/does/not/exist", dir.join("dangling"))?;
    // The longest target that the node size allows: the kernel refuses more.
    let longest = [4095usize, 3900]
        .into_iter()
        .find(|len| symlink("t".repeat(*len), dir.join("long-symlink")).is_ok());
    ensure!(longest.is_some(), "no long symlink");
    let mode = Mode::from_raw_mode(0o640);
    for (name, kind, major, minor) in [
        ("null", FileType::CharacterDevice, 1, 3),
        ("whiteout", FileType::CharacterDevice, 0, 0),
        ("block", FileType::BlockDevice, 8, 1),
        ("large-numbers", FileType::BlockDevice, 259, 70_000),
        ("fifo", FileType::Fifo, 0, 0),
        ("socket", FileType::Socket, 0, 0),
    ] {
        rustix::fs::mknodat(CWD, dir.join(name), kind, mode, rustix::fs::makedev(major, minor))
            .with_context(|| format!("mknod {name}"))?;
    }
    Ok(())
}

fn set_xattr(path: &Path, name: &[u8], value: &[u8]) -> rustix::io::Result<()> {
    rustix::fs::lsetxattr(path, name, value, XattrFlags::empty())
}

/// A POSIX ACL in the form that the kernel takes and stores: version 2, then (tag, permissions,
/// id).
fn acl(entries: &[(u16, u16, u32)]) -> Vec<u8> {
    let mut out = 2u32.to_le_bytes().to_vec();
    for (tag, perm, id) in entries {
        out.extend(tag.to_le_bytes());
        out.extend(perm.to_le_bytes());
        out.extend(id.to_le_bytes());
    }
    out
}

fn xattrs(dir: &Path, _: &Fixture) -> Result<()> {
    const NO_ID: u32 = u32::MAX;
    let file = dir.join("file");
    write(&file, b"with attributes")?;
    set_xattr(&file, b"user.empty", b"")?;
    set_xattr(&file, b"user.binary", &noise(81, 300))?;
    set_xattr(&file, b"trusted.one", b"for root")?;
    set_xattr(&file, b"security.other", b"label")?;
    for n in 0..40 {
        set_xattr(&file, format!("user.number{n}").as_bytes(), format!("value {n}").as_bytes())?;
    }
    // Sharing one item, as colliding file names do.
    for (n, name) in colliding_names(3).into_iter().enumerate() {
        set_xattr(&file, &[b"user.", &name[..]].concat(), format!("colliding {n}").as_bytes())?;
    }
    let long = [b"user.".to_vec(), vec![b'x'; 250]].concat();
    set_xattr(&file, &long, b"255 bytes of name")?;
    // The largest value that the node size allows, or nearly.
    let large = dir.join("large-value");
    write(&large, b"")?;
    let mut stored = false;
    for len in [65_000, 32_000, 16_000, 8000, 3800] {
        match set_xattr(&large, b"user.large", &noise(82, len)) {
            Ok(()) => {
                stored = true;
                break;
            }
            Err(Errno::NOSPC | Errno::RANGE | Errno::TOOBIG) => {}
            Err(e) => return Err(e).context("large xattr"),
        }
    }
    ensure!(stored, "no large xattr fits");
    let changed = dir.join("changed");
    write(&changed, b"")?;
    set_xattr(&changed, b"user.a", b"first")?;
    set_xattr(&changed, b"user.b", b"gone soon")?;
    sync(&changed)?;
    set_xattr(&changed, b"user.a", b"second, and longer")?;
    rustix::fs::removexattr(&changed, "user.b")?;
    symlink("file", dir.join("symlink"))?;
    set_xattr(&dir.join("symlink"), b"trusted.on-a-symlink", b"yes")?;
    // user: rw, uid 1000: r, group: r, mask: r, other: nothing
    let access = acl(&[(1, 6, NO_ID), (2, 4, 1000), (4, 4, NO_ID), (16, 4, NO_ID), (32, 0, NO_ID)]);
    let default = acl(&[(1, 7, NO_ID), (4, 5, NO_ID), (8, 7, 100), (16, 7, NO_ID), (32, 0, NO_ID)]);
    let with_acl = dir.join("acl-file");
    write(&with_acl, b"")?;
    set_xattr(&with_acl, b"system.posix_acl_access", &access).context("ACL")?;
    let heirs = dir.join("acl-dir");
    std::fs::create_dir(&heirs)?;
    set_xattr(&heirs, b"system.posix_acl_default", &default).context("default ACL")?;
    write(heirs.join("heir"), b"")?;
    std::fs::create_dir(heirs.join("heir-dir"))?;
    Ok(())
}

fn set_mtime(path: &Path, sec: i64, nsec: i64) -> Result<()> {
    let time = Timespec { tv_sec: sec, tv_nsec: nsec };
    let times = Timestamps { last_access: time, last_modification: time };
    rustix::fs::utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW)?;
    Ok(())
}

fn modes(dir: &Path, _: &Fixture) -> Result<()> {
    for mode in [0o000, 0o400, 0o644, 0o777, 0o1777, 0o2755, 0o4755, 0o7777] {
        let path = dir.join(format!("mode-{mode:04o}"));
        write(&path, b"mode")?;
        chown(&path, Some(mode + 1), Some(u32::MAX - 1 - mode))?;
        std::fs::set_permissions(&path, PermissionsExt::from_mode(mode))?;
    }
    for (name, sec, nsec) in [
        ("epoch", 0, 0),
        ("before-1970", -86_400 * 365 * 30, 999_999_999),
        ("just-before-1970", -1, 1),
        ("after-2038", 1 << 33, 123_456_789),
        ("far", 1 << 40, 1),
    ] {
        let path = dir.join(name);
        write(&path, b"time")?;
        set_mtime(&path, sec, nsec)?;
    }
    symlink("x", dir.join("symlink"))?;
    lchown(dir.join("symlink"), Some(12), Some(34))?;
    set_mtime(&dir.join("symlink"), 1_000_000_000, 5)?;
    Ok(())
}

fn many(dir: &Path, knobs: &Fixture) -> Result<()> {
    for n in 0..knobs.entries {
        match n % 50 {
            0 => std::fs::create_dir(dir.join(format!("directory number {n}")))?,
            1 => write(dir.join(format!("small-{n}")), &noise(n as u64, n % 2000))?,
            _ => drop(create(&dir.join(format!("e{n}")))?),
        }
    }
    Ok(())
}

fn fragments(dir: &Path, knobs: &Fixture) -> Result<()> {
    const SECTOR: usize = 4096;
    let path = dir.join("every-other");
    let file =
        File::options().write(true).create_new(true).custom_flags(libc::O_DIRECT).open(&path)?;
    // Direct I/O needs an aligned buffer: an aligned piece of a larger one.
    let mut store = vec![0u8; 2 * SECTOR];
    let skip = store.as_ptr().align_offset(SECTOR);
    for n in 0..knobs.fragments {
        store[skip..skip + SECTOR].copy_from_slice(&noise(n + 1, SECTOR));
        file.write_all_at(&store[skip..skip + SECTOR], n * SECTOR as u64)?;
    }
    for n in (0..knobs.fragments).step_by(2) {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&file, flags, n * SECTOR as u64, SECTOR as u64)?;
    }
    Ok(())
}

/// Issues an ioctl that takes a `struct btrfs_ioctl_vol_args` (fd, name) on a directory.
fn volume_ioctl(dir: &Path, request: libc::c_ulong, fd: i64, name: &str) -> Result<()> {
    #[repr(C)]
    struct Arguments {
        fd: i64,
        name: [u8; 4088],
    }
    let mut arguments = Arguments { fd, name: [0; 4088] };
    arguments.name[..name.len()].copy_from_slice(name.as_bytes());
    let dir = File::open(dir)?;
    // SAFETY: the requests used here read 4096 bytes, the size of `Arguments`.
    let done = unsafe { libc::ioctl(dir.as_raw_fd(), request, &raw const arguments) };
    ensure!(done == 0, "ioctl {request:#x} for {name}: {}", std::io::Error::last_os_error());
    Ok(())
}

fn subvolume_create(dir: &Path, name: &str) -> Result<PathBuf> {
    volume_ioctl(dir, 0x5000_940e, 0, name)?;
    Ok(dir.join(name))
}

fn snapshot(source: &Path, dir: &Path, name: &str) -> Result<PathBuf> {
    let opened = File::open(source)?;
    volume_ioctl(dir, 0x5000_9401, opened.as_raw_fd().into(), name)?;
    Ok(dir.join(name))
}

fn subvolume_delete(dir: &Path, name: &str) -> Result<()> {
    volume_ioctl(dir, 0x5000_940f, 0, name)
}

fn set_read_only(subvolume: &Path) -> Result<()> {
    const BTRFS_IOC_SUBVOL_SETFLAGS: libc::c_ulong = 0x4008_941a;
    let read_only: u64 = 2;
    let opened = File::open(subvolume)?;
    // SAFETY: the request reads one u64.
    let done =
        unsafe { libc::ioctl(opened.as_raw_fd(), BTRFS_IOC_SUBVOL_SETFLAGS, &raw const read_only) };
    ensure!(done == 0, "read-only flag: {}", std::io::Error::last_os_error());
    Ok(())
}

fn subvolumes(dir: &Path) -> Result<()> {
    let top = dir.join("volumes");
    std::fs::create_dir(&top)?;
    let origin = subvolume_create(&top, "origin")?;
    for n in 0..120 {
        write(origin.join(format!("file{n}")), &noise(500 + n, 500 * usize::try_from(n)?))?;
    }
    std::fs::create_dir(origin.join("dir"))?;
    write(origin.join("dir/inside"), &text(91, 100_000))?;
    let nested = subvolume_create(&origin, "nested")?;
    write(nested.join("in-nested"), b"nested")?;
    let deeper = subvolume_create(&nested, "deeper")?;
    write(deeper.join("in-deeper"), &noise(92, 9000))?;

    // Snapshots, and changes on both sides of each afterwards. A nested subvolume shows as an empty
    // directory there.
    let frozen = snapshot(&origin, &top, "frozen")?;
    let copy = snapshot(&origin, &top, "copy")?;
    for (side, seed) in [(&origin, 600u64), (&copy, 700)] {
        for n in (0..120u64).filter(|n| n % 7 == seed / 100 % 7) {
            std::fs::remove_file(side.join(format!("file{n}")))?;
        }
        for n in (0..120u64).filter(|n| n % 11 == 5) {
            let path = side.join(format!("file{n}"));
            if path.exists() {
                File::options()
                    .write(true)
                    .open(path)?
                    .write_all_at(&noise(seed + n, 5000), 3000)?;
            }
        }
        for n in 0..30 {
            write(side.join(format!("new{n}")), &noise(seed + 1000 + n, 3000))?;
        }
        std::fs::rename(side.join("dir/inside"), side.join("moved"))?;
    }
    set_read_only(&frozen)?;
    let second = snapshot(&copy, &top, "copy-of-copy")?;
    write(second.join("file1"), b"rewritten in the second snapshot")?;
    snapshot(&frozen, &nested, "frozen-below")?;

    // One that is gone again, with everything that only it held.
    let gone = snapshot(&origin, &top, "gone")?;
    write(gone.join("only-here"), &noise(93, 50_000))?;
    sync(&gone)?;
    subvolume_delete(&top, "gone")
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_format::csum::name_hash;
    use std::collections::BTreeSet;

    #[test]
    fn names_collide_with_each_other_and_behind_a_prefix() {
        let names = colliding_names(4);
        assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), 16);
        let hashes: BTreeSet<u64> = names.iter().map(|n| name_hash(n)).collect();
        assert_eq!(hashes.len(), 1);
        let hashes: BTreeSet<u64> =
            names.iter().map(|n| name_hash(&[b"user.", &n[..]].concat())).collect();
        assert_eq!(hashes.len(), 1);
    }
}
