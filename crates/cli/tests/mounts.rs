//! The life of a mount: ready when the command returns, durable and gone when `umount` returns,
//! cleared when its daemon was killed.

mod common;

use common::scene::{Scene, is_alive, wait_for_end};
use common::{Run, command, inside, larder};
use larder_simtest::oracle::{KernelMount, Need, btrfs, btrfs_check, kernel_images, need};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

#[test]
fn a_mount_is_ready_at_once_and_durable_and_gone_after_umount() {
    let Some(s) = Scene::new() else { return };
    s.mount();
    assert!(s.is_mounted());
    std::fs::create_dir_all(s.at("some/where")).unwrap();
    std::os::unix::fs::symlink("some", s.at("link")).unwrap();
    let daemon = s.daemon();
    assert!(is_alive(daemon));
    // Writers are refused, and so are readers.
    larder(args!["ls", s.image()]).fails(2, "in use");
    larder(args!["ls", "--force", s.image()]).ok();
    larder(args!["mkfs", "--force", s.image()]).fails(2, "in use");
    larder(args!["mount", s.image(), s.point()]).fails(2, "in use");
    // Requests to the daemon.
    assert_eq!(larder(args!["label", s.point()]).ok().text(), "stage\n");
    larder(args!["label", s.at("some"), "finale"]).ok();
    larder(args!["sync", s.point()]).ok();
    let stats = larder(args!["stats", "--json", s.point()]).ok().json();
    assert!(stats["requests"]["total"].as_u64().unwrap() > 0);
    let df = larder(args!["df", "--json", s.point()]).ok().json();
    assert_eq!(
        (&df["file_system"]["label"], &df["total"]),
        (&"finale".into(), &(128u64 << 20).into())
    );
    larder(args!["umount", s.point()]).ok();
    assert!(!s.is_mounted() && !is_alive(daemon), "the daemon has exited when umount returns");
    let names = larder(args!["ls", s.image()]).ok().text();
    assert_eq!(names, "link\nsome\n");
    assert_eq!(larder(args!["label", s.image()]).ok().text(), "finale\n");
    larder(args!["umount", s.point()]).fails(2, "not mounted");
}

#[test]
fn a_mount_in_use_stays_and_says_so() {
    let Some(s) = Scene::new() else { return };
    s.mount();
    std::fs::create_dir(s.at("d")).unwrap();
    let held = std::fs::File::open(s.at("d")).unwrap();
    larder(args!["umount", s.point()]).fails(1, "fuser -vm");
    assert!(s.is_mounted());
    let daemon = s.daemon();
    // Lazily: out of sight at once, waited for until the last user goes.
    let mut lazy = command().args(["umount", "--lazy"]).arg(s.point()).spawn().unwrap();
    while s.is_mounted() {
        assert!(lazy.try_wait().unwrap().is_none(), "it waits");
        std::thread::yield_now();
    }
    assert!(is_alive(daemon));
    drop(held);
    assert!(lazy.wait().unwrap().success());
    assert!(!is_alive(daemon));
    assert_eq!(larder(args!["ls", s.image()]).ok().text(), "d\n");
}

#[test]
fn the_mount_of_a_killed_daemon_is_cleared() {
    let Some(s) = Scene::new() else { return };
    s.mount();
    std::fs::create_dir(s.at("kept")).unwrap();
    larder(args!["sync", s.point()]).ok();
    let daemon = s.daemon();
    rustix::process::kill_process(daemon, rustix::process::Signal::KILL).unwrap();
    wait_for_end(daemon);
    assert!(s.is_mounted(), "dead, but there");
    larder(args!["mount", s.image(), s.point()]).fails(2, "larder umount");
    larder(args!["sync", s.point()]).fails(2, "larder umount");
    larder(args!["umount", s.point()]).fails(1, "had been killed");
    assert!(!s.is_mounted());
    assert_eq!(larder(args!["ls", s.image()]).ok().text(), "kept\n", "what was synced is there");
    s.mount();
    larder(args!["umount", s.point()]).ok();
}

#[test]
fn signals_unmount() {
    let Some(s) = Scene::new() else { return };
    for (i, signal) in
        [rustix::process::Signal::TERM, rustix::process::Signal::INT].into_iter().enumerate()
    {
        s.mount();
        std::fs::create_dir(s.at(&format!("d{i}"))).unwrap();
        let daemon = s.daemon();
        rustix::process::kill_process(daemon, signal).unwrap();
        wait_for_end(daemon);
        assert!(!s.is_mounted());
    }
    assert_eq!(larder(args!["ls", s.image()]).ok().text(), "d0\nd1\n");
    // In the foreground, too, where the exit code tells.
    let mut child = command()
        .args(args!["mount", "--foreground", s.image(), s.point()])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.contains("is mounted on") && s.is_mounted(), "{line}");
    std::fs::create_dir(s.at("d2")).unwrap();
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert_eq!(larder(args!["ls", s.image()]).ok().text(), "d0\nd1\nd2\n");
}

#[test]
fn a_signal_ends_a_mount_that_is_in_use_with_its_last_user() {
    let Some(s) = Scene::new() else { return };
    s.mount();
    std::fs::write(s.at("f"), b"before").unwrap();
    let mut held = std::fs::OpenOptions::new().append(true).open(s.at("f")).unwrap();
    let daemon = s.daemon();
    rustix::process::kill_process(daemon, rustix::process::Signal::TERM).unwrap();
    while s.is_mounted() {
        std::thread::yield_now();
    }
    // Out of sight, but a process with an open file can finish.
    assert!(is_alive(daemon));
    held.write_all(b" and after").unwrap();
    drop(held);
    wait_for_end(daemon);
    assert_eq!(larder(args!["cat", inside(&s.image(), "/f")]).ok().text(), "before and after");
}

#[test]
fn options_are_honoured() {
    let Some(s) = Scene::new() else { return };
    let with = |options: &str| larder(args!["mount", "-o", options, s.image(), s.point()]);
    with("ro,noauto,x-test,defaults,ro").ok();
    let error = std::fs::create_dir(s.at("d")).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    // Readers share.
    larder(args!["ls", s.image()]).ok();
    larder(args!["mkdir", inside(&s.image(), "/d")]).fails(2, "in use");
    larder(args!["umount", s.point()]).ok();
    with("nosuid,nodev,noexec,transport=dev,commit=1,cache_size=32M,fsname=store").ok();
    let table = std::fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
    let line = table.lines().find(|l| l.contains(s.point().to_str().unwrap())).unwrap();
    assert!(
        line.contains("nosuid,nodev,noexec,noatime") && line.contains("fuse.larder store"),
        "{line}"
    );
    larder(args!["umount", s.point()]).ok();
    with("subvol=/none").fails(2, "subvolid=5");
    with("subvolid=4711").fails(2, "hint");
    with("subvolid=5").ok();
    larder(args!["umount", s.point()]).ok();
    // mount(8) remounts, with the helper or without.
    s.mount();
    std::fs::write(s.at("before"), b"kept").unwrap();
    with("remount,ro").fails(2, "mount -o remount,ro");
    let by_helper = |how: &str| {
        helper("mount.fuse.larder", &[&s.image(), &s.point(), Path::new("-o"), Path::new(how)])
    };
    by_helper("rw,noatime,user_id=0,group_id=0,remount,ro,nosuid").ok();
    let table = std::fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
    let line = table.lines().find(|l| l.contains(s.point().to_str().unwrap())).unwrap();
    assert!(line.contains(" ro,nosuid,noatime "), "{line}");
    // Nothing is left to be written.
    assert_eq!(larder(args!["cat", "--force", inside(&s.image(), "/before")]).ok().text(), "kept");
    std::fs::write(s.at("no"), b"").unwrap_err();
    let note = by_helper("remount,rw,commit=10").ok().err;
    assert!(note.contains("leaves commit=10 as it was"), "{note}");
    std::fs::write(s.at("yes"), b"").unwrap();
    let remount = |how: &str| {
        let status = Command::new("mount").args(["-i", "-o", how]).arg(s.point()).status().unwrap();
        assert!(status.success(), "{how}");
    };
    remount("remount,ro");
    let error = std::fs::create_dir(s.at("d")).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    remount("remount,rw");
    std::fs::create_dir(s.at("d")).unwrap();
    remount("remount,ro");
    larder(args!["umount", s.point()]).ok();
    assert_eq!(larder(args!["cat", inside(&s.image(), "/before")]).ok().text(), "kept");
    with("ro").ok();
    by_helper("remount,rw").fails(2, "opened for reading only");
    larder(args!["umount", s.point()]).ok();
    by_helper("remount,rw").fails(2, "not a Larder mount");
    let file = s.dir().join("file");
    std::fs::write(&file, b"").unwrap();
    larder(args!["mount", s.image(), &file]).fails(2, "not a directory");
    larder(args!["mount", s.image(), s.dir().join("none")]).fails(2, "No such file");
    assert!(!s.is_mounted());
}

/// The command under the name by which mount(8) calls it.
fn helper(name: &str, args: &[&Path]) -> Run {
    Command::new(env!("CARGO_BIN_EXE_larder"))
        .arg0(format!("/sbin/{name}"))
        .args(args)
        .stdin(Stdio::null())
        .output()
        .unwrap()
        .into()
}

#[test]
fn the_mount_helper_follows_mount_8() {
    let Some(s) = Scene::new() else { return };
    let (image, point) = (s.image(), s.point());
    let p = Path::new;
    let mount = |options: &str| {
        helper(
            "mount.fuse.larder",
            &[&image, &point, p("-n"), p("-o"), p(options), p("-t"), p("fuse.larder")],
        )
    };
    mount("rw,noauto,user,nosuid").ok();
    assert!(s.is_mounted());
    let daemon = s.daemon();
    helper("umount.fuse.larder", &[&point]).ok();
    assert!(!s.is_mounted() && !is_alive(daemon));
    mount("rw,compres=zstd").fails(1, "unknown mount option");
    helper("mount.fuse.larder", &[&image, &point, p("-s"), p("-o"), p("rw,compres=zstd")]).ok();
    helper("umount.fuse.larder", &[&point, p("-v")]).ok();
    helper("mount.fuse.larder", &[&image, &point, p("-f")]).ok();
    assert!(!s.is_mounted(), "-f does everything but mount");
    helper("mount.fuse.larder", &[&image]).fails(1, "usage");
    helper("mount.fuse.larder", &[p("/nonexistent"), &point]).fails(32, "No such file");
    helper("umount.fuse.larder", &[&point]).fails(32, "not mounted");
}

const NOBODY: u32 = 65534;

/// An ordinary user, with a program of the same user's.
struct OrdinaryUser {
    scene: Scene,
    program: PathBuf,
}

impl OrdinaryUser {
    /// Owns the scene. `None` where ordinary users cannot mount.
    fn of(scene: Scene) -> Option<Self> {
        for path in [scene.dir(), &scene.image(), &scene.point()] {
            std::os::unix::fs::chown(path, Some(NOBODY), Some(NOBODY)).unwrap();
        }
        // The command itself may lie where only root can look.
        let program = scene.dir().join("larder");
        // Not by this process: what another thread starts meanwhile would hold it open for writing,
        // and it could not be run.
        let copied = Command::new("cp").arg(env!("CARGO_BIN_EXE_larder")).arg(&program).status();
        assert!(copied.unwrap().success());
        let reachable = scene.dir().ancestors().all(|p| {
            use std::os::unix::fs::MetadataExt;
            p == scene.dir() || std::fs::metadata(p).is_ok_and(|m| m.mode() & 0o001 != 0)
        });
        assert!(reachable, "the scratch directory can be reached by everybody");
        let user = Self { scene, program };
        let run = user.larder(&[Path::new("mount"), &user.scene.image(), &user.scene.point()]);
        if run.code != 0 && ["fusermount3", "/dev/fuse"].iter().any(|w| run.err.contains(w)) {
            assert!(!larder_simtest::oracle::required(), "{}", run.err);
            eprintln!("skipped: needs fusermount3 and /dev/fuse for ordinary users: {}", run.err);
            return None;
        }
        run.ok();
        Some(user)
    }

    fn larder(&self, args: &[&Path]) -> Run {
        let mut c = Command::new(&self.program);
        c.args(args).uid(NOBODY).gid(NOBODY).env_remove("XDG_RUNTIME_DIR").stdin(Stdio::null());
        c.output().unwrap().into()
    }

    fn host(&self, command: &str, args: &[&Path]) -> Output {
        Command::new(command).args(args).uid(NOBODY).gid(NOBODY).output().unwrap()
    }

    fn own(&self, name: &str) -> PathBuf {
        self.scene.dir().join(name)
    }

    /// A directory on the host with a file and a program that sets its user id.
    fn make_tree(&self) {
        std::fs::create_dir(self.own("tree")).unwrap();
        std::fs::write(self.own("tree/file"), b"from a directory").unwrap();
        let program = self.own("tree/program");
        std::fs::write(&program, b"#!/bin/sh\n").unwrap();
        for path in [&self.own("tree"), &self.own("tree/file"), &program] {
            std::os::unix::fs::chown(path, Some(NOBODY), Some(NOBODY)).unwrap();
        }
        std::fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o4755))
            .unwrap();
    }
}

#[test]
fn an_ordinary_user_mounts_and_unmounts() {
    let Some(user) = Scene::new().and_then(OrdinaryUser::of) else { return };
    let (image, point) = (user.scene.image(), user.scene.point());
    let table = std::fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
    let line = table.lines().find(|l| l.contains(point.to_str().unwrap())).unwrap();
    assert!(line.contains("nosuid,nodev") && line.contains("user_id=65534"), "{line}");
    user.larder(&[Path::new("sync"), &point]).ok();
    user.larder(&[Path::new("umount"), &point]).ok();
    assert!(!user.scene.is_mounted());
    // Root finds the daemon of another user's mount.
    user.larder(&[Path::new("mount"), &image, &point]).ok();
    let daemon = user.scene.daemon();
    // It may not enter it, which FUSE grants nobody else.
    larder(args!["sync", &point]).fails(1, "only user 65534");
    larder(args!["umount", &point]).ok();
    assert!(!is_alive(daemon));
    user.scene.mount();
    user.larder(&[Path::new("sync"), &point]).fails(1, "-o allow_other");
    user.larder(&[Path::new("df"), &point]).fails(2, "only user 0, who mounted it");
    larder(args!["umount", &point]).ok();
    larder(args!["mount", "-o", "allow_other", &image, &point]).ok();
    user.larder(&[Path::new("sync"), &point]).ok();
    user.larder(&[Path::new("df"), &point]).ok();
    larder(args!["umount", &point]).ok();
}

/// From nothing to files that go in and out, without any right of root's.
#[test]
fn an_ordinary_user_makes_an_image_and_fills_it() {
    let Some(user) = Scene::new().and_then(OrdinaryUser::of) else { return };
    let (point, at) = (user.scene.point(), |path: &str| user.scene.at(path));
    user.larder(&[Path::new("umount"), &point]).ok();
    let mine = user.own("mine.img");
    user.larder(&[Path::new("mkfs"), Path::new("--size"), Path::new("128M"), &mine]).ok();
    user.make_tree();
    user.larder(&[Path::new("cp"), Path::new("-r"), &user.own("tree"), &inside(&mine, "/tree")])
        .ok();
    user.larder(&[Path::new("mount"), &mine, &point]).ok();
    // The top is the user's, and what was copied in keeps its owner.
    for copy in ["tree/copy", "copy"] {
        let copied = user.host("cp", &[&at("tree/file"), &at(copy)]);
        assert!(copied.status.success(), "{copied:?}");
    }
    assert_eq!(user.host("cat", &[&at("tree/copy")]).stdout, b"from a directory");
    let null = at("tree/null");
    let device: [&Path; 4] = [&null, Path::new("c"), Path::new("1"), Path::new("3")];
    assert!(!user.host("mknod", &device).status.success(), "device nodes are root's to make");
    let mode = user.host("stat", &[Path::new("-c"), Path::new("%a %u"), &at("tree/program")]);
    let mode = String::from_utf8_lossy(&mode.stdout).into_owned();
    assert_eq!(mode, "4755 65534\n", "kept, though not honoured here");
    // Not even root may look in, unless asked for.
    let refused = std::fs::read(at("tree/copy")).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::PermissionDenied);
    user.larder(&[Path::new("umount"), &point]).ok();
    assert_eq!(user.larder(&[Path::new("ls"), &mine]).ok().text(), "copy\ntree\n");
    user.larder(&[Path::new("cp"), &inside(&mine, "/tree/copy"), &user.own("tree/back")]).ok();
    assert_eq!(std::fs::read(user.own("tree/back")).unwrap(), b"from a directory");
}

/// `umount -i`, and programs that call umount(2), return before the daemon has written everything.
#[test]
fn commands_after_a_hasty_unmount_wait_for_the_daemon() {
    let Some(s) = Scene::new() else { return };
    let hasty = || {
        let unmounted = Command::new("umount").arg("-i").arg(s.point()).status().unwrap();
        assert!(unmounted.success());
    };
    let fill = |name: &str| {
        s.mount();
        std::fs::write(s.at(name), vec![7; 4 << 20]).unwrap();
        hasty();
    };
    fill("a");
    // The next mount of the image.
    s.mount();
    assert_eq!(std::fs::metadata(s.at("a")).unwrap().len(), 4 << 20);
    hasty();
    // Commands that read or write it.
    larder(args!["ls", s.image()]).ok();
    fill("b");
    larder(args!["mkdir", inside(&s.image(), "/d")]).ok();
    // Another image on the same directory.
    fill("c");
    let other = s.dir().join("other.img");
    larder(args!["mkfs", "--size", "128M", &other]).ok();
    larder(args!["mount", &other, s.point()]).ok();
    hasty();
    larder(args!["mkfs", "--force", &other]).ok();
    assert_eq!(larder(args!["ls", s.image()]).ok().text(), "a\nb\nc\nd\n");
    // A process with open files keeps the file system, out of sight.
    s.mount();
    let held = std::fs::File::open(s.at("a")).unwrap();
    let daemon = s.daemon();
    assert!(Command::new("umount").arg("-il").arg(s.point()).status().unwrap().success());
    assert!(is_alive(daemon));
    drop(held);
    larder(args!["ls", s.image()]).ok();
}

#[test]
fn a_mount_bound_to_another_place_lives_until_that_goes() {
    let Some(s) = Scene::new() else { return };
    s.mount();
    std::fs::write(s.at("f"), b"").unwrap();
    let second = s.dir().join("second");
    std::fs::create_dir(&second).unwrap();
    rustix::mount::mount_bind(s.point(), &second).unwrap();
    let daemon = s.daemon();
    // Neither waits for an end that does not come.
    larder(args!["umount", s.point()]).ok();
    assert!(is_alive(daemon) && second.join("f").exists());
    let said = helper("umount.fuse.larder", &[&second]).ok().err;
    assert!(said.contains("left no trace"), "the last one: {said}");
    wait_for_end(daemon);
    s.mount();
    rustix::mount::mount_bind(s.point(), &second).unwrap();
    let said = helper("umount.fuse.larder", &[&second]).ok().err;
    assert_eq!(said, "", "the first one is still there");
    larder(args!["umount", s.point()]).ok();
}

/// umount(8) looks for a helper of the whole type only if libmount's table knows the directory.
#[test]
fn libmount_knows_the_mount() {
    let Some(s) = Scene::new() else { return };
    let known = || {
        let target = format!("TARGET={} ", s.point().display());
        std::fs::read_to_string("/run/mount/utab").unwrap_or_default().contains(&target)
    };
    s.mount();
    assert!(known());
    larder(args!["umount", s.point()]).ok();
    assert!(!known());
    s.mount();
    let daemon = s.daemon();
    rustix::process::kill_process(daemon, rustix::process::Signal::KILL).unwrap();
    wait_for_end(daemon);
    assert!(known());
    larder(args!["umount", s.point()]).fails(1, "had been killed");
    assert!(!known());
}

#[test]
fn the_daemon_keeps_nothing_of_its_starter() {
    let Some(s) = Scene::new() else { return };
    // If the daemon kept our pipes, reading them to their end would never return.
    let mut child = command()
        .args(args!["mount", s.image(), s.point()])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut text = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut text).unwrap();
    child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    assert!(child.wait().unwrap().success());
    // Nor anything else that was open.
    larder(args!["umount", s.point()]).ok();
    let mut child = Command::new("sh")
        .args(["-c", "exec 9>&1 >/dev/null; exec \"$0\" mount \"$1\" \"$2\""])
        .args(args![env!("CARGO_BIN_EXE_larder"), s.image(), s.point()])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
    assert!(child.wait().unwrap().success());
    let daemon = s.daemon();
    let cwd = std::fs::read_link(format!("/proc/{}/cwd", daemon.as_raw_nonzero())).unwrap();
    assert_eq!(cwd, Path::new("/"));
    larder(args!["umount", s.point()]).ok();
}

/// Fields of `/proc/…/stat` behind the name, the first being the state.
fn stat(of: &str) -> Vec<String> {
    let text = std::fs::read_to_string(format!("/proc/{of}/stat")).unwrap();
    text.rsplit_once(')').unwrap().1.split_whitespace().map(str::to_owned).collect()
}

#[test]
fn a_terminal_that_goes_and_its_interrupts_are_not_for_the_daemon() {
    let Some(s) = Scene::new() else { return };
    // A terminal of its own, which is hung up at the end.
    let call = format!(
        "{} mount {} {}",
        env!("CARGO_BIN_EXE_larder"),
        s.image().display(),
        s.point().display()
    );
    let done = Command::new("script")
        .args(["-qec", &call, "/dev/null"])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(done.status.success(), "{done:?}");
    std::fs::write(s.at("f"), "after the terminal").unwrap();
    larder(args!["umount", s.point()]).ok();
    assert_eq!(larder(args!["cat", inside(&s.image(), "/f")]).ok().text(), "after the terminal");
    // What is sent to the group that it was started in does not reach it.
    let mut child =
        command().args(args!["mount", s.image(), s.point()]).process_group(0).spawn().unwrap();
    let group = rustix::process::Pid::from_child(&child);
    assert!(child.wait().unwrap().success());
    let sent = rustix::process::kill_process_group(group, rustix::process::Signal::INT);
    assert_eq!(sent, Err(rustix::io::Errno::SRCH), "nobody is left in it");
    assert!(is_alive(s.daemon()) && s.is_mounted());
    larder(args!["umount", s.point()]).ok();
}

/// The scheduler compares callers with the daemon's threads only within a session, and the daemon's
/// threads have to take precedence.
#[test]
fn those_who_answer_have_precedence_in_the_same_session() {
    let Some(s) = Scene::new() else { return };
    const SESSION: usize = 3;
    const NICE: usize = 16;
    const CAP_SYS_NICE: u64 = 1 << 23;
    let nice = |of: &str| stat(of)[NICE].parse::<i32>().unwrap();
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let rights = status.lines().find_map(|l| l.strip_prefix("CapEff:")).unwrap().trim();
    let may = u64::from_str_radix(rights, 16).unwrap() & CAP_SYS_NICE != 0;
    let uring = std::fs::read_to_string("/sys/module/fuse/parameters/enable_uring");
    let uring = uring.is_ok_and(|on| on.trim() == "Y");
    // Without the sandbox no right has to be kept.
    for options in ["rw", "rw,nosandbox"] {
        larder(args!["mount", "-o", options, s.image(), s.point()]).ok();
        let daemon = s.daemon().as_raw_nonzero().to_string();
        assert_eq!(stat(&daemon)[SESSION], stat("self")[SESSION]);
        let mut queues = 0;
        for task in std::fs::read_dir(format!("/proc/{daemon}/task")).unwrap() {
            let task = format!("{daemon}/task/{}", task.unwrap().file_name().display());
            // The thread that has started the queues' threads is about to end.
            let Ok(name) = std::fs::read_to_string(format!("/proc/{task}/comm")) else { continue };
            if name.trim() == "larder-starter" {
                continue;
            }
            let is_queue = name.starts_with("larder-ring-");
            let steps = if is_queue && may { 4 } else { 0 };
            assert_eq!(nice(&task), (nice("self") - steps).max(-20), "{options}: {name}");
            queues += usize::from(is_queue);
        }
        assert_eq!(queues > 0, uring, "{options}");
        larder(args!["umount", s.point()]).ok();
    }
}

/// A process may look at the mount point at any moment, also before the daemon is ready.
#[test]
fn a_client_that_comes_too_early_waits_and_is_served() {
    let Some(s) = Scene::new() else { return };
    for i in 0..25 {
        let mut daemon = command()
            .args(args!["mount", "--foreground", s.image(), s.point()])
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        while !s.is_mounted() {
            assert!(daemon.try_wait().unwrap().is_none(), "it serves");
        }
        let mut early = Command::new("mkdir").arg(s.at(&format!("d{i}"))).spawn().unwrap();
        let fd = rustix::process::pidfd_open(
            rustix::process::Pid::from_child(&early),
            rustix::process::PidfdFlags::empty(),
        )
        .unwrap();
        let mut fds = [rustix::event::PollFd::new(&fd, rustix::event::PollFlags::IN)];
        let patience = rustix::event::Timespec { tv_sec: 20, tv_nsec: 0 };
        let served = rustix::event::poll(&mut fds, Some(&patience)).unwrap() == 1;
        if !served {
            // Ends the mount, and wakes the process that hangs in it.
            daemon.kill().unwrap();
        }
        assert!(served, "round {i}: the request was lost");
        assert!(early.wait().unwrap().success());
        rustix::process::kill_process(
            rustix::process::Pid::from_child(&daemon),
            rustix::process::Signal::TERM,
        )
        .unwrap();
        assert!(daemon.wait().unwrap().success());
    }
    let names = larder(args!["ls", s.image()]).ok().text();
    assert_eq!(names.lines().count(), 25);
}

/// A block device as root: the kernel waits for the daemon at unmount, and claims the device
/// meanwhile.
#[test]
fn a_block_device_is_mounted_too() {
    let Some(s) = Scene::new() else { return };
    if !need(&[Need::LoopDevices]) {
        return;
    }
    let device = larder_simtest::oracle::LoopDevice::attach(&s.image()).unwrap();
    larder(args!["mount", s.image(), s.point()]).fails(2, "attached to");
    larder(args!["mount", device.path(), s.point()]).ok();
    let table = std::fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
    let line = table.lines().find(|l| l.contains(s.point().to_str().unwrap())).unwrap();
    assert!(line.contains("fuseblk.larder"), "{line}");
    std::fs::write(s.at("f"), b"block").unwrap();
    larder(args!["ls", device.path()]).fails(2, "in use");
    larder(args!["ls", s.image()]).fails(2, "in use");
    larder(args!["mkfs", "--force", device.path()]).fails(2, "in use");
    // Even umount(8) without our helper waits until everything is durable; the process ends a
    // moment later.
    let daemon = Scene::daemon_of(device.path());
    assert!(Command::new("umount").arg("-i").arg(s.point()).status().unwrap().success());
    assert_eq!(larder(args!["cat", "--force", inside(device.path(), "/f")]).ok().text(), "block");
    wait_for_end(daemon);
    assert_eq!(larder(args!["cat", inside(device.path(), "/f")]).ok().text(), "block");
    larder(args!["mount", "-o", "nofuseblk,direct", device.path(), s.point()]).ok();
    assert_eq!(std::fs::read(s.at("f")).unwrap(), b"block");
    larder(args!["umount", s.point()]).ok();
}

/// A file with these bytes at the very end of what a file can have.
fn write_far(path: &Path, text: &[u8]) {
    let file = std::fs::File::create(path).unwrap();
    file.write_all_at(text, i64::MAX.cast_unsigned() - text.len() as u64).unwrap();
    file.write_all_at(text, 1 << 40).unwrap();
}

fn assert_far(path: &Path, text: &[u8], context: &str) {
    let file =
        std::fs::File::open(path).unwrap_or_else(|e| panic!("{context}: {}: {e}", path.display()));
    let end = file.metadata().unwrap().len();
    assert_eq!(end, i64::MAX.cast_unsigned(), "{context}");
    let mut buf = vec![0; text.len() + 8];
    for at in [1 << 40, end - text.len() as u64] {
        file.read_exact_at(&mut buf, at - 8).unwrap();
        assert_eq!((&buf[..8], &buf[8..]), (&[0; 8][..], text), "{context}: at {at}");
    }
}

#[test]
fn subvolumes_and_far_ends_of_every_kind_of_image() {
    let Some(s) = Scene::new() else { return };
    if !need(&[Need::MkfsBtrfs, Need::BtrfsProgs, Need::KernelBtrfs]) {
        return;
    }
    for variant in kernel_images() {
        let name = &variant.name;
        std::fs::remove_file(s.image()).unwrap();
        variant.make(&s.image(), 256 << 20).unwrap();
        let mount = KernelMount::image(&s.image(), &variant.mount).expect(name);
        let (one, two) = (mount.join("one"), mount.join("one/dir/two"));
        write_far(&mount.join("top"), b"in the top-level subvolume");
        btrfs(&["subvolume".as_ref(), "create".as_ref(), one.as_os_str()]).unwrap();
        write_far(&one.join("one"), b"in the first");
        std::fs::create_dir(one.join("dir")).unwrap();
        btrfs(&["subvolume".as_ref(), "create".as_ref(), two.as_os_str()]).unwrap();
        write_far(&two.join("two"), b"in the second");
        let id = |path: &Path| {
            let text =
                btrfs(&["inspect-internal".as_ref(), "rootid".as_ref(), path.as_os_str()]).unwrap();
            text.trim().parse::<u64>().unwrap()
        };
        let (one, two) = (id(&one), id(&two));
        mount.unmount_clean().expect(name);

        let see = |options: &str, file: &str, text: &[u8], write: bool| {
            larder(args!["mount", "-o", options, s.image(), s.point()]).ok();
            let context = format!("{name}, {options}");
            assert_far(&s.at(file), text, &context);
            if write {
                write_far(&s.at("new"), text);
                assert_far(&s.at("new"), text, &context);
            }
            larder(args!["umount", s.point()]).ok();
        };
        see("ro,subvolid=5", "top", b"in the top-level subvolume", false);
        see("subvol=/one", "one", b"in the first", true);
        see(&format!("subvolid={two}"), "two", b"in the second", true);
        see(&format!("ro,subvolid={one}"), "dir/two/two", b"in the second", false);
        see("ro,subvol=one/dir/two/", "new", b"in the second", false);

        btrfs_check(&s.image(), true).assert_clean(name);
        let mount = KernelMount::image(&s.image(), "subvol=/one").expect(name);
        assert_far(&mount.join("new"), b"in the first", name);
        assert_far(&mount.join("dir/two/new"), b"in the second", name);
        mount.unmount_clean().expect(name);
    }
}
