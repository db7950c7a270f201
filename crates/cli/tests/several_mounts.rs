//! One image, several mounts: each with its own subvolume and options, served by one daemon, which
//! the last one ends; and what one of them changes is what the others see.

mod common;

use common::scene::{Scene, is_alive, wait_for_end};
use common::{Run, command, inside, larder};
use larder_simtest::oracle::{LoopDevice, Need, btrfs_check, need};
use rustix::fs::{AtFlags, XattrFlags};
use rustix::process::{Pid, Signal, kill_process};
use std::fs::{self, File};
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

/// An image with the subvolumes `@` and `@home`, and places to mount it on.
struct Places {
    scene: Scene,
    all: Vec<PathBuf>,
}

impl Places {
    fn new() -> Option<Self> {
        let scene = Scene::new()?;
        for subvolume in ["/@", "/@home"] {
            larder(args!["subvolume", "create", inside(&scene.image(), subvolume)]).ok();
        }
        let all: Vec<PathBuf> = (0..6).map(|n| scene.dir().join(format!("p{n}"))).collect();
        all.iter().for_each(|place| fs::create_dir(place).unwrap());
        Some(Self { scene, all })
    }
    fn image(&self) -> PathBuf {
        self.scene.image()
    }
    fn place(&self, n: usize) -> &Path {
        &self.all[n]
    }
    fn at(&self, n: usize, path: &str) -> PathBuf {
        self.all[n].join(path)
    }
    fn try_mount(&self, n: usize, options: &str) -> Run {
        larder(args!["mount", "-o", options, self.image(), self.place(n)])
    }
    /// Mounts, and tells where.
    #[track_caller]
    fn mount(&self, n: usize, options: &str) -> &Path {
        self.try_mount(n, options).ok();
        assert!(self.is_mounted(n));
        self.place(n)
    }
    #[track_caller]
    fn umount(&self, n: usize) {
        larder(args!["umount", self.place(n)]).ok();
        assert!(!self.is_mounted(n));
    }
    fn is_mounted(&self, n: usize) -> bool {
        common::is_mounted(self.place(n))
    }
    fn daemon(&self) -> Pid {
        self.scene.daemon()
    }
    /// What the mount table says of a place, after the path.
    fn shown(&self, n: usize) -> String {
        let table = fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
        let path = format!(" {} ", self.place(n).display());
        table.lines().rev().find_map(|line| line.split_once(&path)).unwrap().1.to_owned()
    }
    #[track_caller]
    fn assert_undisturbed(&self, n: usize) {
        let sandbox = larder(args!["stats", "--json", self.place(n)]).ok().json()["sandbox"].clone();
        assert_eq!(sandbox["refused_system_calls"], serde_json::json!([]), "{sandbox}");
        assert_eq!(sandbox["seccomp"], true);
    }
    /// The image, when nobody uses it any more.
    #[track_caller]
    fn assert_sound(&self) {
        larder(args!["check", self.image()]).ok();
        if need(&[Need::BtrfsProgs]) {
            btrfs_check(&self.image(), true).assert_clean("after several mounts");
        }
    }
}

impl Drop for Places {
    fn drop(&mut self) {
        // The last ones first: they may lie within others.
        for n in (0..self.all.len()).rev() {
            if self.is_mounted(n) {
                let _ = command().args(["umount", "--lazy"]).arg(self.place(n)).output();
            }
        }
    }
}

/// A helper of mount(8) or umount(8).
fn helper(name: &str, args: &[&Path]) -> Run {
    let mut c = Command::new(env!("CARGO_BIN_EXE_larder"));
    c.arg0(format!("/sbin/{name}")).args(args).stdin(Stdio::null());
    c.output().unwrap().into()
}

#[track_caller]
fn errno<T: std::fmt::Debug>(result: std::io::Result<T>) -> i32 {
    result.unwrap_err().raw_os_error().unwrap()
}

#[test]
fn each_mount_has_its_subvolume_and_its_options() {
    let Some(p) = Places::new() else { return };
    let root = p.mount(0, "subvol=@");
    let daemon = p.daemon();
    let home = p.mount(1, "subvol=/@home,nosuid,nodev,noexec,fsname=elsewhere,allow_other");
    let both = p.mount(2, "ro,subvolid=5,noatime,default_permissions");
    assert_eq!(p.daemon(), daemon, "one daemon");
    assert!(p.shown(0).starts_with("rw,noatime ") && p.shown(2).starts_with("ro,noatime "));
    let shown = p.shown(1);
    assert!(shown.starts_with("rw,nosuid,nodev,noexec,noatime ") && shown.contains(" elsewhere "), "{shown}");
    assert!(shown.contains("allow_other") && !p.shown(0).contains("allow_other"));
    fs::write(root.join("r"), "in @").unwrap();
    fs::write(home.join("h"), "in @home").unwrap();
    assert_eq!(fs::read_to_string(both.join("@/r")).unwrap(), "in @");
    assert_eq!(fs::read_to_string(both.join("@home/h")).unwrap(), "in @home");
    assert_eq!(errno(fs::write(both.join("@/r"), "no")), libc::EROFS);
    // For renames and links two mounts are two file systems.
    assert_eq!(errno(fs::rename(root.join("r"), home.join("r"))), libc::EXDEV);
    assert_eq!(errno(fs::hard_link(root.join("r"), home.join("r"))), libc::EXDEV);
    // Requests to the daemon go through any of them.
    for place in [root, home, both] {
        larder(args!["sync", place]).ok();
        larder(args!["df", place]).ok();
        assert_eq!(larder(args!["label", place]).ok().text(), "stage\n");
        let list = larder(args!["subvolume", "list", place]).ok().text();
        assert!(list.contains("path @home\n"), "{list}");
        let stats = larder(args!["stats", "--json", place]).ok().json();
        assert!(stats["requests"]["total"].as_u64().unwrap() > 0 && stats["engine"]["commits"].is_u64());
        let points = stats["mounts"].as_array().unwrap().iter().map(|m| m["mountpoint"].as_str().unwrap());
        assert_eq!(points.collect::<Vec<_>>(), [root, home, both].map(|p| p.to_str().unwrap()));
    }
    let requests = |place: &Path| -> u64 {
        let stats = larder(args!["stats", "--json", place]).ok().json();
        stats["requests"]["by_kind"]["mknod"].as_u64().unwrap_or(0)
    };
    assert_eq!([root, home, both].map(requests), [1, 1, 0], "each counts its own");
    larder(args!["trim", root]).ok();
    larder(args!["subvolume", "snapshot", home, home.join("snap")]).ok();
    assert_eq!(fs::read_to_string(both.join("@home/snap/h")).unwrap(), "in @home");
    // The root of a mount cannot be deleted through another one.
    p.mount(3, "subvol=/");
    larder(args!["subvolume", "delete", p.at(3, "@")]).fails(1, "busy");
    // Nobody else opens the image, and a place is mounted on once.
    larder(args!["ls", p.image()]).fails(2, "in use");
    larder(args!["mkdir", inside(&p.image(), "/d")]).fails(2, "in use");
    p.try_mount(1, "subvol=@home").fails(2, "in use");
    p.try_mount(4, "subvol=none").fails(2, "subvolid=5");
    assert!(!p.is_mounted(4));
    larder(args!["umount", p.place(4)]).fails(2, "not mounted");
    p.assert_undisturbed(0);
    [3, 0, 2, 1].into_iter().for_each(|n| p.umount(n));
    assert!(!is_alive(daemon));
    p.assert_sound();
}

#[test]
fn one_that_goes_leaves_the_others_and_the_last_one_ends_the_daemon() {
    let Some(p) = Places::new() else { return };
    p.mount(0, "subvol=@");
    p.mount(1, "subvol=@home");
    let daemon = p.daemon();
    let read = |path: &str| larder(args!["cat", "--force", inside(&p.image(), path)]).ok().text();
    fs::write(p.at(0, "first"), "written before its mount went").unwrap();
    // The first one goes before the others, and what was written to it is durable.
    p.umount(0);
    assert!(is_alive(daemon));
    assert_eq!(read("/@/first"), "written before its mount went");
    fs::write(p.at(1, "second"), "goes on").unwrap();
    p.mount(0, "subvol=@");
    assert_eq!(p.daemon(), daemon);
    fs::write(p.at(0, "third"), "again").unwrap();
    // In use, it stays, and out of sight it is waited for.
    let held = File::open(p.at(0, "third")).unwrap();
    larder(args!["umount", p.place(0)]).fails(1, "fuser -vm");
    let mut lazy = command().args(["umount", "--lazy"]).arg(p.place(0)).spawn().unwrap();
    while p.is_mounted(0) {
        std::thread::yield_now();
    }
    assert!(lazy.try_wait().unwrap().is_none());
    drop(held);
    assert!(lazy.wait().unwrap().success());
    assert_eq!(read("/@/third"), "again");
    // Through mount(8)'s helpers, too.
    let words = [Path::new("-o"), Path::new("rw,subvol=@,noauto,x-systemd.automount")];
    helper("mount.fuse.larder", &[&p.image(), p.place(0), words[0], words[1]]).ok();
    fs::write(p.at(0, "fourth"), "by helper").unwrap();
    helper("umount.fuse.larder", &[p.place(0)]).ok();
    assert_eq!(read("/@/fourth"), "by helper");
    assert!(is_alive(daemon) && !p.is_mounted(0));
    fs::write(p.at(1, "second"), "to the end").unwrap();
    p.umount(1);
    assert!(!is_alive(daemon), "the daemon has exited when the last umount returns");
    assert_eq!(larder(args!["cat", inside(&p.image(), "/@home/second")]).ok().text(), "to the end");
    p.assert_sound();
}

#[test]
fn what_only_a_mount_has_kept_goes_with_it() {
    let Some(p) = Places::new() else { return };
    const SIZE: u64 = 16 << 20;
    let (top, sub) = (p.mount(0, "subvolid=5"), p.mount(1, "subvol=@"));
    let free = || {
        larder(args!["sync", top]).ok();
        let space = rustix::fs::statvfs(top).unwrap();
        space.f_bfree * space.f_frsize
    };
    let empty = free();
    fs::write(top.join("@/big"), vec![7; SIZE as usize]).unwrap();
    // Open in one, deleted in the other.
    let open = File::open(sub.join("big")).unwrap();
    fs::remove_file(top.join("@/big")).unwrap();
    assert_eq!(errno(fs::metadata(sub.join("big"))), libc::ENOENT);
    let mut page = [0; 4096];
    open.read_exact_at(&mut page, SIZE - 4096).unwrap();
    assert!(page.iter().all(|b| *b == 7) && free() < empty - SIZE / 2);
    assert_eq!(open.metadata().unwrap().nlink(), 0);
    drop(open);
    // Looked at in one, deleted in the other: the kernel of the first keeps it, as long as it is
    // there.
    fs::write(top.join("@/other"), vec![8; SIZE as usize]).unwrap();
    fs::metadata(sub.join("other")).unwrap();
    fs::remove_file(top.join("@/other")).unwrap();
    p.umount(1);
    assert!(free() >= empty - SIZE / 4, "both are gone");
    p.umount(0);
    p.assert_sound();
}

#[test]
fn a_signal_ends_all_mounts() {
    let Some(p) = Places::new() else { return };
    let mount_both = || {
        p.mount(0, "subvol=@");
        p.mount(1, "subvol=@home");
        p.daemon()
    };
    let daemon = mount_both();
    fs::write(p.at(0, "a"), "a").unwrap();
    fs::write(p.at(1, "b"), "b").unwrap();
    kill_process(daemon, Signal::TERM).unwrap();
    wait_for_end(daemon);
    assert!(!p.is_mounted(0) && !p.is_mounted(1));
    assert_eq!(larder(args!["cat", inside(&p.image(), "/@/a")]).ok().text(), "a");
    assert_eq!(larder(args!["cat", inside(&p.image(), "/@home/b")]).ok().text(), "b");
    // One that is in use ends with its last user; nobody comes to it meanwhile.
    let daemon = mount_both();
    let mut held = File::options().append(true).open(p.at(1, "b")).unwrap();
    kill_process(daemon, Signal::TERM).unwrap();
    while p.is_mounted(0) || p.is_mounted(1) {
        std::thread::yield_now();
    }
    assert!(is_alive(daemon));
    held.write_all(b" and more").unwrap();
    drop(held);
    wait_for_end(daemon);
    assert_eq!(larder(args!["cat", inside(&p.image(), "/@home/b")]).ok().text(), "b and more");
    // In the foreground, a further mount lives as long as its command.
    let daemon = mount_both();
    let mut child = command()
        .args(args!["mount", "--foreground", "-o", "subvolid=5", p.image(), p.place(2)])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.contains("is mounted on") && p.is_mounted(2), "{line}");
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    assert!(child.wait().unwrap().success());
    assert!(!p.is_mounted(2) && p.is_mounted(0) && is_alive(daemon));
    p.umount(0);
    p.umount(1);
    p.assert_sound();
}

#[test]
fn a_killed_daemon_leaves_each_of_its_mounts_to_be_cleared() {
    let Some(p) = Places::new() else { return };
    p.mount(0, "subvol=@");
    p.mount(1, "subvol=@home");
    fs::write(p.at(1, "kept"), "synced through the other one").unwrap();
    larder(args!["sync", p.place(0)]).ok();
    let daemon = p.daemon();
    kill_process(daemon, Signal::KILL).unwrap();
    wait_for_end(daemon);
    // A new mount elsewhere does not mind the dead.
    p.mount(2, "subvolid=5");
    assert_eq!(fs::read_to_string(p.at(2, "@home/kept")).unwrap(), "synced through the other one");
    for n in [0, 1] {
        assert!(p.is_mounted(n) && larder_fuse::mount::is_dead(p.place(n)));
        p.try_mount(n, "rw").fails(2, "larder umount");
        larder(args!["umount", p.place(n)]).fails(1, "had been killed");
        assert!(!p.is_mounted(n));
    }
    p.mount(1, "subvol=@home");
    assert!(p.at(1, "kept").exists());
    p.umount(2);
    p.umount(1);
    p.assert_sound();
}

#[test]
fn options_of_the_whole_file_system_are_those_of_the_first_mount() {
    let Some(p) = Places::new() else { return };
    p.mount(0, "subvol=@,commit=7,compress=zstd,cache_size=64M,max_inline=0");
    let daemon = p.daemon();
    for (options, said, is) in [
        ("commit=8", "commit=8", "commit=7"),
        ("compress=lzo", "compress=lzo", "compress=zstd:3"),
        ("compress-force=zstd", "compress-force=zstd:3", "compress=zstd:3"),
        ("nodatacow", "nodatacow", "datacow"),
        ("nodatasum", "nodatasum", "datasum"),
        ("cache_size=32M", "cache_size=32M", "cache_size=64M"),
        ("max_inline=2048", "max_inline=2048", "max_inline=0"),
        ("nodiscard", "nodiscard", "discard"),
        ("direct", "direct", "no direct"),
        ("notreelog", "notreelog", "treelog"),
        ("nosandbox", "nosandbox", "the sandbox"),
        ("ro,nologreplay", "nologreplay", "its log replayed"),
        ("tuning=log-alone", "Tuning", "Tuning"),
    ] {
        let run = p.try_mount(1, &format!("subvol=@home,{options}")).fails(2, said);
        assert!(run.err.contains(&format!("with {is}")) && run.err.contains("hint: leave"), "{}", run.err);
        assert!(run.err.contains(p.place(0).to_str().unwrap()), "where it is mounted: {}", run.err);
        assert!(!p.is_mounted(1));
    }
    let cache = larder(args!["mount", "--cache-size", "32M", p.image(), p.place(1)]);
    cache.fails(2, "cache_size=32M");
    // The same may be said again, and what is of a mount is each one's own.
    p.mount(1, "subvol=@home,commit=7,compress=zstd:3,cache_size=65536K,datacow,nosuid,transport=dev");
    p.mount(2, "ro");
    assert_eq!(p.daemon(), daemon);
    fs::write(p.at(1, "file"), "through another transport").unwrap();
    assert_eq!(fs::read_to_string(p.at(2, "@home/file")).unwrap(), "through another transport");
    // What a kernel keeps to itself nobody else may show.
    p.try_mount(3, "subvol=@,writeback").fails(2, "leave writeback out");
    [0, 1, 2].into_iter().for_each(|n| p.umount(n));
    p.mount(0, "subvol=@,transport=dev");
    p.try_mount(1, "subvol=@home,transport=uring").fails(2, "leave out transport=uring");
    larder(args!["umount", p.place(1)]).fails(2, "not mounted");
    p.mount(1, "subvol=@home");
    [0, 1].into_iter().for_each(|n| p.umount(n));
    p.mount(0, "subvol=@,writeback");
    p.try_mount(1, "subvolid=5").fails(2, "mount it without writeback");
    p.mount(1, "subvol=@home,writeback");
    fs::write(p.at(1, "delayed"), "by the kernel").unwrap();
    p.umount(1);
    let read = larder(args!["cat", "--force", inside(&p.image(), "/@home/delayed")]).ok();
    assert_eq!(read.text(), "by the kernel");
    p.assert_undisturbed(0);
    p.umount(0);
}

#[test]
fn read_only_is_a_matter_of_each_mount_but_for_the_first() {
    let Some(p) = Places::new() else { return };
    p.mount(0, "subvolid=5");
    fs::write(p.at(0, "@/file"), "old").unwrap();
    let ro = p.mount(1, "ro,subvol=@").to_owned();
    let refused = || {
        let file = File::open(ro.join("file")).unwrap();
        let flags: libc::c_long = 0x10;
        // SAFETY: the ioctl reads one long from the pointer, which lives through the call.
        let set = unsafe { libc::ioctl(file.as_raw_fd(), 0x4008_6602, &raw const flags) };
        assert_eq!((set, std::io::Error::last_os_error().raw_os_error()), (-1, Some(libc::EROFS)));
        larder(args!["label", &ro, "changed"]).fails(1, "Read-only");
        larder(args!["subvolume", "create", ro.join("sub")]).fails(1, "Read-only");
        larder(args!["subvolume", "snapshot", &ro, ro.join("snap")]).fails(1, "Read-only");
        larder(args!["trim", &ro]).fails(1, "Read-only");
        for path in ["new", "file"] {
            assert_eq!(errno(fs::write(ro.join(path), "x")), libc::EROFS);
        }
        assert_eq!(errno(fs::remove_file(ro.join("file"))), libc::EROFS);
        assert_eq!(
            errno(fs::set_permissions(ro.join("file"), fs::Permissions::from_mode(0o600))),
            libc::EROFS
        );
        larder(args!["sync", &ro]).ok();
    };
    refused();
    // Not even if the kernel is told to forget about it.
    let forgets = Command::new("mount").args(["-i", "-o", "remount,rw"]).arg(&ro).status().unwrap();
    assert!(forgets.success());
    refused();
    let remount = [Path::new("-o"), Path::new("remount,rw")];
    helper("mount.fuse.larder", &[&p.image(), &ro, remount[0], remount[1]]).fails(2, "for reading only");
    fs::write(p.at(0, "@/file"), "new").unwrap();
    assert_eq!(fs::read_to_string(ro.join("file")).unwrap(), "new");
    p.umount(0);
    p.umount(1);
    // The first one says how the image is opened.
    p.mount(0, "ro,subvol=@");
    let run = p.try_mount(1, "subvol=@home").fails(2, "open for reading only");
    assert!(run.err.contains("hint: mount this one with -o ro") && !p.is_mounted(1), "{}", run.err);
    p.mount(1, "ro,subvol=@home");
    assert_eq!(fs::read_to_string(p.at(0, "file")).unwrap(), "new");
    larder(args!["mkdir", inside(&p.image(), "/d")]).fails(2, "in use");
    larder(args!["ls", p.image()]).ok();
    p.umount(0);
    p.umount(1);
    p.assert_sound();
}

/// A page of a file, mapped.
struct Mapped(*mut u8);

impl Mapped {
    fn of(file: &File, writable: bool) -> Self {
        let access = libc::PROT_READ | if writable { libc::PROT_WRITE } else { 0 };
        // SAFETY: a new mapping, at a place that the kernel chooses.
        let at =
            unsafe { libc::mmap(std::ptr::null_mut(), 4096, access, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        assert_ne!(at, libc::MAP_FAILED);
        Self(at.cast())
    }
    fn text(&self, len: usize) -> String {
        // SAFETY: within the page, which is mapped as long as this lives; each byte is read once.
        let byte = |n| unsafe { self.0.add(n).read_volatile() };
        String::from_utf8((0..len).map(byte).collect()).unwrap()
    }
    fn store(&self, at: usize, text: &str) {
        for (n, byte) in text.bytes().enumerate() {
            // SAFETY: as above.
            unsafe { self.0.add(at + n).write_volatile(byte) };
        }
        // SAFETY: the range is the mapping.
        assert_eq!(unsafe { libc::msync(self.0.cast(), 4096, libc::MS_SYNC) }, 0);
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: mapped by `of`, and nobody else has it.
        unsafe { libc::munmap(self.0.cast(), 4096) };
    }
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn xattr(path: &Path, name: &str) -> Option<String> {
    let mut value = [0; 64];
    let len = rustix::fs::getxattr(path, name, &mut value[..]).ok()?;
    Some(String::from_utf8(value[..len].to_vec()).unwrap())
}

/// Everything that is changed in `here` is seen in `there`, the same directory on another mount, at
/// once; after `there` had looked at what was before.
fn sees(here: &Path, there: &Path) {
    let (f, g) = (here.join("f"), there.join("f"));
    let gone = |path: &Path| assert_eq!(errno(fs::metadata(path)), libc::ENOENT);
    // Names, and absent ones.
    gone(&g);
    assert_eq!(names(there), [""; 0]);
    fs::write(&f, "one").unwrap();
    assert_eq!(fs::read_to_string(&g).unwrap(), "one");
    assert_eq!(names(there), ["f"]);
    // Contents and sizes, also of a file that is open or mapped.
    let open = File::options().read(true).append(true).open(&g).unwrap();
    let mapped = Mapped::of(&open, false);
    assert_eq!(mapped.text(3), "one");
    let mut write = File::options().read(true).write(true).open(&f).unwrap();
    for text in ["two", "six"] {
        write.write_all_at(text.as_bytes(), 0).unwrap();
        assert_eq!((mapped.text(3), fs::read_to_string(&g).unwrap().as_str()), (text.to_owned(), text));
    }
    write.write_all_at(b" and longer", 3).unwrap();
    assert_eq!((open.metadata().unwrap().len(), mapped.text(14)), (14, "six and longer".to_owned()));
    (&open).write_all(b", appended").unwrap();
    assert_eq!(fs::read_to_string(&f).unwrap(), "six and longer, appended");
    write.set_len(3).unwrap();
    assert_eq!((open.metadata().unwrap().len(), fs::read_to_string(&g).unwrap().as_str()), (3, "six"));
    write.write_all(b"ten").unwrap();
    let by_mapping = Mapped::of(&write, true);
    by_mapping.store(1, "OO");
    assert_eq!((mapped.text(3), fs::read_to_string(&g).unwrap().as_str()), ("tOO".to_owned(), "tOO"));
    drop(by_mapping);
    // Stored in one place and written in the other, within a page.
    let theirs = File::options().read(true).write(true).open(&g).unwrap();
    let theirs = Mapped::of(&theirs, true);
    write.write_all_at(b"written", 3).unwrap();
    theirs.store(1, "oo");
    assert_eq!(fs::read_to_string(&f).unwrap(), "toowritten");
    drop((theirs, mapped));
    // Attributes.
    let meta = fs::metadata(&g).unwrap();
    fs::set_permissions(&f, fs::Permissions::from_mode(0o640)).unwrap();
    std::os::unix::fs::chown(&f, Some(7), Some(8)).unwrap();
    let now = fs::metadata(&g).unwrap();
    assert_eq!((now.mode() & 0o777, now.uid(), now.gid()), (0o640, 7, 8));
    assert!((now.ctime(), now.ctime_nsec()) > (meta.ctime(), meta.ctime_nsec()));
    assert_eq!(now.mtime(), meta.mtime());
    assert_eq!(xattr(&g, "user.x"), None);
    rustix::fs::setxattr(&f, "user.x", b"value", XattrFlags::empty()).unwrap();
    assert_eq!(xattr(&g, "user.x").as_deref(), Some("value"));
    rustix::fs::removexattr(&f, "user.x").unwrap();
    assert_eq!(xattr(&g, "user.x"), None);
    // Links, renames, removals.
    fs::hard_link(&f, here.join("link")).unwrap();
    assert_eq!((fs::metadata(&g).unwrap().nlink(), names(there)), (2, vec!["f".into(), "link".to_owned()]));
    gone(&there.join("new"));
    fs::rename(here.join("link"), here.join("new")).unwrap();
    gone(&there.join("link"));
    assert_eq!(fs::read_to_string(there.join("new")).unwrap(), "toowritten");
    fs::write(here.join("other"), "replaced").unwrap();
    assert_eq!(fs::read_to_string(there.join("other")).unwrap(), "replaced");
    fs::rename(here.join("other"), here.join("new")).unwrap();
    assert_eq!(fs::read_to_string(there.join("new")).unwrap(), "replaced");
    assert_eq!(fs::metadata(&g).unwrap().nlink(), 1);
    fs::remove_file(here.join("new")).unwrap();
    gone(&there.join("new"));
    // Directories that move, with somebody in them.
    fs::create_dir_all(here.join("d/deep")).unwrap();
    fs::write(here.join("d/deep/leaf"), "leaf").unwrap();
    let inside = File::open(there.join("d/deep")).unwrap();
    fs::create_dir(here.join("e")).unwrap();
    assert_eq!(names(&there.join("e")), [""; 0]);
    fs::rename(here.join("d/deep"), here.join("e/moved")).unwrap();
    gone(&there.join("d/deep"));
    assert_eq!(fs::read_to_string(there.join("e/moved/leaf")).unwrap(), "leaf");
    let seen = rustix::fs::statat(&inside, "leaf", AtFlags::empty()).unwrap();
    assert_eq!(seen.st_ino, fs::metadata(there.join("e/moved/leaf")).unwrap().ino());
    assert_eq!(names(&there.join("d")), [""; 0]);
    fs::remove_dir(here.join("d")).unwrap();
    gone(&there.join("d"));
    // What is open in one and removed in the other.
    fs::remove_file(&f).unwrap();
    gone(&g);
    assert_eq!(open.metadata().unwrap().nlink(), 0);
    // The same name, another file; a symlink in its place.
    fs::write(&f, "another").unwrap();
    assert_eq!(fs::read_to_string(&g).unwrap(), "another");
    fs::remove_file(&f).unwrap();
    std::os::unix::fs::symlink("e/moved/leaf", &f).unwrap();
    assert_eq!(fs::read_to_string(&g).unwrap(), "leaf");
    // Preallocated, punched, copied.
    let target =
        File::options().read(true).write(true).create(true).truncate(true).open(here.join("t")).unwrap();
    target.write_all_at(&[9; 8192], 0).unwrap();
    assert_eq!(fs::read(there.join("t")).unwrap(), [9; 8192]);
    let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&target, punch, 0, 4096).unwrap();
    assert_eq!(fs::read(there.join("t")).unwrap(), [[0; 4096], [9; 4096]].concat());
    let (mut from, mut to) = (4096, 0);
    assert_eq!(
        rustix::fs::copy_file_range(&target, Some(&mut from), &target, Some(&mut to), 4096).unwrap(),
        4096
    );
    assert_eq!(fs::read(there.join("t")).unwrap(), [9; 8192]);
    fs::remove_file(here.join("t")).unwrap();
    fs::remove_file(&f).unwrap();
    fs::remove_dir_all(here.join("e")).unwrap();
    assert_eq!(names(there), [""; 0]);
}

#[test]
fn what_one_mount_changes_the_others_see() {
    let Some(p) = Places::new() else { return };
    // The top level, a subvolume, and that once more, by another transport and in the other.
    let top = p.mount(0, "subvolid=5");
    // What the first one has cached while it was alone.
    fs::create_dir(top.join("@/d")).unwrap();
    fs::write(top.join("@/early"), "while alone").unwrap();
    let early = File::open(top.join("@/early")).unwrap();
    let page = Mapped::of(&early, false);
    assert_eq!((page.text(11).as_str(), names(&top.join("@")).len()), ("while alone", 2));
    assert_eq!(errno(fs::metadata(top.join("@/late"))), libc::ENOENT);
    let sub = p.mount(1, "subvol=@");
    fs::write(sub.join("late"), "").unwrap();
    fs::write(sub.join("early"), "in company").unwrap();
    fs::hard_link(sub.join("early"), sub.join("more")).unwrap();
    assert_eq!((page.text(10).as_str(), early.metadata().unwrap().nlink()), ("in company", 2));
    assert_eq!(names(&top.join("@")), ["d", "early", "late", "more"]);
    assert_eq!(fs::metadata(top.join("@/late")).unwrap().len(), 0);
    drop((page, early));
    ["early", "late", "more"].into_iter().for_each(|name| fs::remove_file(top.join("@").join(name)).unwrap());
    assert_eq!(names(sub), ["d"]);
    p.mount(2, "subvol=@,transport=dev,default_permissions");
    let in_top = top.join("@/d");
    let places = [in_top, sub.join("d"), p.at(2, "d")];
    for (here, there) in [(0, 1), (1, 0), (1, 2), (2, 1), (2, 0), (0, 2)] {
        sees(&places[here], &places[there]);
    }
    // Subvolumes come and go by ioctls.
    let made = sub.join("d/snap");
    assert!(!places[2].join("snap").exists() && !places[0].join("snap").exists());
    larder(args!["subvolume", "create", &made]).ok();
    assert!(places[2].join("snap").is_dir() && places[0].join("snap").is_dir());
    larder(args!["subvolume", "delete", places[0].join("snap")]).ok();
    assert!(!made.exists() && !places[2].join("snap").exists());
    p.assert_undisturbed(1);
    // One alone is as before.
    p.umount(1);
    p.umount(2);
    fs::write(places[0].join("last"), "x").unwrap();
    let lookups =
        || larder(args!["stats", "--json", top]).ok().json()["requests"]["by_kind"]["lookup"].clone();
    fs::metadata(places[0].join("last")).unwrap();
    let before = lookups();
    (0..10).for_each(|_| assert!(places[0].join("last").exists()));
    assert_eq!(lookups(), before, "names are believed again");
    p.umount(0);
    p.assert_sound();
}

/// Changes of the same directory and the same files through two mounts at the same time: nobody
/// waits for ever, and nothing is lost.
#[test]
fn two_mounts_change_the_same_things_at_the_same_time() {
    let Some(p) = Places::new() else { return };
    let (top, sub) = (p.mount(0, "subvolid=5").join("@"), p.mount(1, "subvol=@"));
    const FILES: usize = 150;
    fs::write(top.join("shared"), vec![b'.'; 64 * 100]).unwrap();
    fs::create_dir(top.join("sub")).unwrap();
    let over = AtomicBool::new(false);
    std::thread::scope(|threads| {
        let workers: Vec<_> = [&*top, sub]
            .into_iter()
            .enumerate()
            .flat_map(|(side, dir)| (0..2).map(move |worker| (side, worker, dir)))
            .map(|(side, worker, dir)| {
                threads.spawn(move || {
                    let shared = File::options().read(true).write(true).open(dir.join("shared")).unwrap();
                    let mine = 2 * side + worker;
                    for n in 0..FILES {
                        let name = dir.join(format!("{mine}-{n}"));
                        fs::write(&name, format!("{mine} {n}")).unwrap();
                        // Parts of the same pages.
                        let record = format!("<{mine}:{n:03}>");
                        shared.write_all_at(record.as_bytes(), ((n % 100) * 64 + mine * 16) as u64).unwrap();
                        fs::rename(&name, dir.join(format!("{mine}+{n}"))).unwrap();
                        if n % 3 == 0 {
                            fs::remove_file(dir.join(format!("{mine}+{n}"))).unwrap();
                        }
                        // Locks of directories and files, one after the other: across directories and back,
                        // and of a file that others sync. One thread of each mount: in a kernel that asks for
                        // attributes while another removes a name, the count of links is wrong for a moment.
                        if worker == 0 {
                            let link = dir.join(format!("l{mine}"));
                            let moved = dir.join(format!("sub/m{mine}"));
                            fs::hard_link(dir.join("shared"), &link).unwrap();
                            fs::rename(&link, &moved).unwrap();
                            fs::rename(&moved, &link).unwrap();
                            fs::remove_file(&link).unwrap();
                        }
                        if n % 5 == 0 {
                            shared.sync_all().unwrap();
                        }
                    }
                })
            })
            .collect();
        // Somebody lists and maps meanwhile.
        let reader = threads.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                for dir in [&*top, sub] {
                    names(dir);
                    Mapped::of(&File::open(dir.join("shared")).unwrap(), false).text(64);
                }
            }
        });
        let ended: Vec<_> = workers.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
        over.store(true, Ordering::Relaxed);
        reader.join().unwrap();
        ended.into_iter().for_each(|end| end.unwrap());
    });
    assert_eq!(names(&top), names(sub));
    assert_eq!(names(sub).len(), 2 + 4 * (FILES - FILES / 3));
    assert_eq!(fs::metadata(sub.join("shared")).unwrap().nlink(), 1);
    for dir in [&*top, sub] {
        File::open(dir.join("shared")).unwrap().sync_all().unwrap();
    }
    let shared = fs::read_to_string(top.join("shared")).unwrap();
    assert_eq!(fs::read_to_string(sub.join("shared")).unwrap(), shared);
    for mine in 0..4 {
        for n in FILES - 100..FILES {
            let at = (n % 100) * 64 + mine * 16;
            assert_eq!(shared[at..at + 7], format!("<{mine}:{n:03}>"));
        }
    }
    p.assert_undisturbed(0);
    p.umount(1);
    p.umount(0);
    p.assert_sound();
}

#[test]
fn one_mount_lies_within_another() {
    let Some(p) = Places::new() else { return };
    p.mount(0, "subvol=@");
    fs::create_dir(p.at(0, "home")).unwrap();
    let home = p.at(0, "home");
    larder(args!["mount", "-o", "subvol=@home", p.image(), &home]).ok();
    p.mount(1, "subvolid=5");
    fs::write(home.join("f"), "in @home").unwrap();
    assert_eq!(fs::read_to_string(p.at(1, "@home/f")).unwrap(), "in @home");
    assert_eq!(names(&p.at(1, "@/home")), [""; 0], "another mount shows what is beneath");
    // What lies in the way of the mount stays mounted, whatever happens around it.
    fs::write(p.at(1, "@/beside"), "").unwrap();
    assert_eq!(names(p.place(0)), ["beside", "home"]);
    fs::set_permissions(p.at(1, "@/home"), fs::Permissions::from_mode(0o700)).unwrap();
    assert_eq!(fs::read_to_string(home.join("f")).unwrap(), "in @home");
    larder(args!["umount", p.place(0)]).fails(1, "fuser -vm");
    let daemon = p.daemon();
    kill_process(daemon, Signal::TERM).unwrap();
    wait_for_end(daemon);
    assert!(!p.is_mounted(0) && !p.is_mounted(1) && !common::is_mounted(&home));
    p.assert_sound();
}

/// However many come at the same time, and while the last one is just going.
#[test]
fn whoever_comes_at_the_wrong_moment_gets_its_mount() {
    let Some(p) = Places::new() else { return };
    for round in 0..3 {
        let all: Vec<_> =
            (0..6).map(|n| command().args(args!["mount", p.image(), p.place(n)]).spawn().unwrap()).collect();
        all.into_iter().for_each(|mut child| assert!(child.wait().unwrap().success()));
        let daemon = p.daemon();
        fs::write(p.at(round, &format!("r{round}")), vec![7; 1 << 20]).unwrap();
        let ends: Vec<_> =
            (0..6).map(|n| command().args(["umount"]).arg(p.place(n)).spawn().unwrap()).collect();
        ends.into_iter().for_each(|mut child| assert!(child.wait().unwrap().success()));
        wait_for_end(daemon);
    }
    let mut daemons = Vec::new();
    for n in 0..12 {
        p.mount(n % 2, "rw");
        fs::write(p.at(n % 2, "f"), vec![n as u8; 2 << 20]).unwrap();
        daemons.push(p.daemon());
        // Without waiting.
        assert!(Command::new("umount").arg("-i").arg(p.place(n % 2)).status().unwrap().success());
    }
    p.mount(0, "rw");
    assert_eq!(fs::read(p.at(0, "f")).unwrap(), vec![11; 2 << 20]);
    p.umount(0);
    daemons.into_iter().for_each(wait_for_end);
    p.assert_sound();
}

/// Files that tell of mounts of this test, as long as any is there.
fn traces(places: &Places) -> Vec<PathBuf> {
    let image = places.image();
    let all = fs::read_dir("/run/larder").into_iter().flatten().flatten().map(|f| f.path());
    all.filter(|f| fs::read_to_string(f).is_ok_and(|text| text.contains(image.to_str().unwrap()))).collect()
}

#[test]
fn a_mount_that_is_given_up_half_way_leaves_nothing() {
    let Some(p) = Places::new() else { return };
    p.mount(0, "subvol=@");
    let daemon = p.daemon();
    let attempt = || {
        let mut c = command();
        // In a group of its own, so that all of it can be killed.
        c.args(args!["mount", "-o", "subvol=@home", p.image(), p.place(1)]).process_group(0);
        c.stderr(Stdio::null()).spawn().unwrap()
    };
    // The daemon does not come to it: killed after asking.
    kill_process(daemon, Signal::STOP).unwrap();
    let mut asks = attempt();
    while traces(&p).len() < 2 {
        assert!(asks.try_wait().unwrap().is_none());
        std::thread::yield_now();
    }
    rustix::process::kill_process_group(Pid::from_child(&asks), Signal::KILL).unwrap();
    asks.wait().unwrap();
    kill_process(daemon, Signal::CONT).unwrap();
    // Whether the daemon had the message or not, and whatever it did then: the next one gets its
    // mount.
    let mounted = (0..100_000).any(|_| {
        let run = p.try_mount(1, "subvol=@home");
        assert!(run.code == 0 || run.err.contains("in use"), "{}", run.err);
        run.code == 0
    });
    assert!(mounted);
    fs::write(p.at(1, "f"), "x").unwrap();
    p.umount(1);
    // The daemon is killed while it is asked: the mount is a first one.
    kill_process(daemon, Signal::STOP).unwrap();
    let mut asks = attempt();
    while traces(&p).len() < 2 {
        std::thread::yield_now();
    }
    kill_process(daemon, Signal::KILL).unwrap();
    assert!(asks.wait().unwrap().success());
    assert!(p.is_mounted(1) && p.daemon() != daemon);
    larder(args!["umount", p.place(0)]).fails(1, "had been killed");
    p.umount(1);
    assert!(traces(&p).is_empty());
    p.assert_sound();
}

/// The kernel has one mount of a block device; further ones are plain, and wait for the daemon all
/// the same.
#[test]
fn a_block_device_is_mounted_several_times() {
    let Some(p) = Places::new() else { return };
    if !need(&[Need::LoopDevices]) {
        return;
    }
    let device = LoopDevice::attach(&p.image()).unwrap();
    let mount = |n: usize, options: &str| {
        larder(args!["mount", "-o", options, device.path(), p.place(n)]).ok();
    };
    let read = |path: &str| larder(args!["cat", "--force", inside(device.path(), path)]).ok().text();
    for first_goes in [true, false] {
        mount(0, "subvol=@");
        mount(1, "subvol=@home");
        assert!(p.shown(0).contains("fuseblk.larder") && p.shown(1).contains("fuse.larder"));
        let daemon = Scene::daemon_of(device.path());
        fs::write(p.at(0, "f"), format!("block {first_goes}")).unwrap();
        fs::write(p.at(1, "g"), format!("plain {first_goes}")).unwrap();
        let (first, last) = if first_goes { (0, 1) } else { (1, 0) };
        if first_goes {
            // The kernel itself waits for us here.
            assert!(Command::new("umount").arg("-i").arg(p.place(0)).status().unwrap().success());
            assert_eq!(read("/@/f"), "block true");
        } else {
            p.umount(first);
            assert_eq!(read("/@home/g"), "plain false");
        }
        assert!(is_alive(daemon));
        p.assert_undisturbed(last);
        p.umount(last);
        assert!(!is_alive(daemon));
        assert_eq!(read("/@/f"), format!("block {first_goes}"));
        assert_eq!(read("/@home/g"), format!("plain {first_goes}"));
    }
}

#[test]
fn an_ordinary_user_has_several_mounts_and_nobody_elses() {
    let Some(p) = Places::new() else { return };
    const NOBODY: u32 = 65534;
    for path in [p.scene.dir(), &p.image(), p.place(0), p.place(1)] {
        std::os::unix::fs::chown(path, Some(NOBODY), Some(NOBODY)).unwrap();
    }
    let program = p.scene.dir().join("larder");
    let copied = Command::new("cp").arg(env!("CARGO_BIN_EXE_larder")).arg(&program).status();
    assert!(copied.unwrap().success());
    let as_user = |args: &[&Path]| -> Run {
        let mut c = Command::new(&program);
        c.args(args).uid(NOBODY).gid(NOBODY).env_remove("XDG_RUNTIME_DIR").stdin(Stdio::null());
        c.output().unwrap().into()
    };
    let (image, word) = (p.image(), Path::new);
    let mount =
        |n: usize, options: &str| as_user(&[word("mount"), word("-o"), word(options), &image, p.place(n)]);
    let run = mount(0, "subvolid=5");
    if run.code != 0 && ["fusermount3", "/dev/fuse"].iter().any(|w| run.err.contains(w)) {
        assert!(!larder_simtest::oracle::required(), "{}", run.err);
        eprintln!("skipped: needs fusermount3 and /dev/fuse for ordinary users: {}", run.err);
        return;
    }
    run.ok();
    mount(1, "subvol=@home").ok();
    let daemon = p.daemon();
    assert!(p.shown(1).contains("user_id=65534"));
    // Another user's daemon lets nobody in, not even root.
    p.try_mount(2, "subvol=@").fails(2, "in use");
    as_user(&[word("sync"), p.place(1)]).ok();
    as_user(&[word("umount"), p.place(0)]).ok();
    assert!(is_alive(daemon) && !p.is_mounted(0) && p.is_mounted(1));
    mount(0, "ro,subvol=@").ok();
    let stats = as_user(&[word("stats"), word("--json"), p.place(0)]).ok().json();
    assert_eq!(stats["sandbox"]["refused_system_calls"], serde_json::json!([]));
    kill_process(daemon, Signal::TERM).unwrap();
    wait_for_end(daemon);
    assert!(!p.is_mounted(0) && !p.is_mounted(1));
    p.assert_sound();
}

/// A mount lives in the mount namespace of the program that asked for it.
#[test]
fn a_mount_in_another_namespace_is_of_the_same_daemon() {
    let Some(p) = Places::new() else { return };
    p.mount(0, "subvol=@");
    let script = "\"$0\" mount -o subvol=@home \"$1\" \"$2\" && echo inside > \"$2/f\" && cat \"$2/f\" \
                  && \"$0\" umount \"$2\" && echo gone";
    let run: Run = Command::new("unshare")
        .args(["-m", "sh", "-c", script])
        .args(args![env!("CARGO_BIN_EXE_larder"), p.image(), p.place(1)])
        .stdin(Stdio::null())
        .output()
        .unwrap()
        .into();
    assert_eq!(run.ok().text(), "inside\ngone\n");
    assert!(!p.is_mounted(1));
    p.mount(1, "subvol=@home");
    assert_eq!(fs::read_to_string(p.at(1, "f")).unwrap(), "inside\n");
    p.umount(0);
    p.umount(1);
    assert_eq!(fs::read(p.at(1, "f")).unwrap_err().kind(), ErrorKind::NotFound);
}
