//! One image, several mounts: each has its own subvolume and options. One daemon serves them all,
//! and ends with the last one. What one of them changes, the others see.

mod common;

use common::places::{Places, errno, names};
use common::scene::{Scene, is_alive, wait_for_end};
use common::{Run, command, inside, larder};
use larder_simtest::oracle::{LoopDevice, Need, need};
use rustix::process::{Pid, Signal, kill_process};
use std::fs::{self, File};
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A helper of mount(8) or umount(8).
fn helper(name: &str, args: &[&Path]) -> Run {
    let mut c = Command::new(env!("CARGO_BIN_EXE_larder"));
    c.arg0(format!("/sbin/{name}")).args(args).stdin(Stdio::null());
    c.output().unwrap().into()
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
    assert!(
        shown.starts_with("rw,nosuid,nodev,noexec,noatime ") && shown.contains(" elsewhere "),
        "{shown}"
    );
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
        assert!(
            stats["requests"]["total"].as_u64().unwrap() > 0 && stats["engine"]["commits"].is_u64()
        );
        let points =
            stats["mounts"].as_array().unwrap().iter().map(|m| m["mountpoint"].as_str().unwrap());
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
    // No other process opens the image, and a place is mounted on once.
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
    // Looked at in one, deleted in the other: the kernel keeps the inode as long as the first mount
    // lasts.
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
    // A mount that is in use ends with its last user; it takes no new ones meanwhile.
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
        ("direct", "direct", "neither direct nor buffered"),
        ("notreelog", "notreelog", "treelog"),
        ("nosandbox", "nosandbox", "the sandbox"),
        ("ro,nologreplay", "nologreplay", "its log replayed"),
        ("tuning=log-alone", "Tuning", "Tuning"),
    ] {
        let run = p.try_mount(1, &format!("subvol=@home,{options}")).fails(2, said);
        assert!(
            run.err.contains(&format!("with {is}")) && run.err.contains("hint: leave"),
            "{}",
            run.err
        );
        assert!(run.err.contains(p.place(0).to_str().unwrap()), "where it is mounted: {}", run.err);
        assert!(!p.is_mounted(1));
    }
    let cache = larder(args!["mount", "--cache-size", "32M", p.image(), p.place(1)]);
    cache.fails(2, "cache_size=32M");
    // The same options may be given again, and options of a mount are each one's own.
    p.mount(
        1,
        "subvol=@home,commit=7,compress=zstd:3,cache_size=65536K,datacow,nosuid,transport=dev",
    );
    p.mount(2, "ro");
    assert_eq!(p.daemon(), daemon);
    fs::write(p.at(1, "file"), "through another transport").unwrap();
    assert_eq!(fs::read_to_string(p.at(2, "@home/file")).unwrap(), "through another transport");
    // Pages that only the kernel has must not show in the other mount.
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
    helper("mount.fuse.larder", &[&p.image(), &ro, remount[0], remount[1]])
        .fails(2, "for reading only");
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
    // A mount that is in the way stays, whatever happens around it.
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

/// Many mounts begin at the same time, and while the last one is just ending.
#[test]
fn a_mount_that_comes_at_the_wrong_moment_gets_its_mount() {
    let Some(p) = Places::new() else { return };
    for round in 0..3 {
        let all: Vec<_> = (0..6)
            .map(|n| command().args(args!["mount", p.image(), p.place(n)]).spawn().unwrap())
            .collect();
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
    all.filter(|f| fs::read_to_string(f).is_ok_and(|text| text.contains(image.to_str().unwrap())))
        .collect()
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
    let read =
        |path: &str| larder(args!["cat", "--force", inside(device.path(), path)]).ok().text();
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
    let mount = |n: usize, options: &str| {
        as_user(&[word("mount"), word("-o"), word(options), &image, p.place(n)])
    };
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
    let script = "\"$0\" mount -o subvol=@home \"$1\" \"$2\" && echo inside > \"$2/f\" && cat \
        \"$2/f\" && \"$0\" umount \"$2\" && echo gone";
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
