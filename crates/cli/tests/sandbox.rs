//! The mount daemon in its sandbox, and the process beside it: which rights the daemon has given
//! up, that it works as without a sandbox, and what happens when either process is killed.
//! `crates/fuse/tests/sandbox.rs` tries what is forbidden, from inside.

mod common;

use common::scene::{Scene, is_alive, wait_for_end};
use common::{command, inside, larder};
use larder_simtest::oracle::{LoopDevice, Need, need};
use rustix::fs::Advice;
use rustix::process::{Pid, Signal, kill_process};
use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

fn status(pid: Pid) -> HashMap<String, String> {
    status_if_there(pid).expect("the process is there")
}

/// `None` for a process or thread that has ended.
fn status_if_there(pid: Pid) -> Option<HashMap<String, String>> {
    let text = std::fs::read_to_string(format!("/proc/{}/status", pid.as_raw_nonzero())).ok()?;
    let pair = |line: &str| line.split_once(':').map(|(a, b)| (a.to_owned(), b.trim().to_owned()));
    Some(text.lines().filter_map(pair).collect())
}

/// The mount helper of a daemon.
fn helper_of(daemon: Pid) -> Pid {
    let path = format!("/proc/{0}/task/{0}/children", daemon.as_raw_nonzero());
    let children = std::fs::read_to_string(path).unwrap();
    let pids: Vec<i32> = children.split_whitespace().map(|p| p.parse().unwrap()).collect();
    assert_eq!(pids.len(), 1, "one process beside the daemon");
    Pid::from_raw(pids[0]).unwrap()
}

/// Anonymous memory of a process.
fn memory_kib(pid: Pid) -> u64 {
    status(pid)["RssAnon"].trim_end_matches(" kB").parse().unwrap()
}

/// Every thread of a process has given up what the documentation says.
#[track_caller]
fn assert_confined(daemon: Pid) {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", daemon.as_raw_nonzero())).unwrap();
    let mut seen = 0;
    for task in tasks {
        let task = task.unwrap().file_name().into_string().unwrap();
        let task = Pid::from_raw(task.parse().unwrap()).unwrap();
        let Some(status) = status_if_there(task) else { continue };
        let name = &status["Name"];
        assert_eq!(status["NoNewPrivs"], "1", "{name}");
        assert_eq!(status["Seccomp"], "2", "{name}");
        for set in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
            assert_eq!(status[set], "0000000000000000", "{name}: {set}");
        }
        seen += 1;
    }
    assert!(seen > 2, "threads were looked at");
}

/// Files of several kinds are made, changed and read through the mount.
fn work(s: &Scene) {
    let dir = s.at("work");
    std::fs::create_dir(&dir).unwrap();
    for i in 0..200 {
        std::fs::write(dir.join(format!("f{i}")), vec![i as u8; i * 97]).unwrap();
    }
    let big = dir.join("big");
    // Long enough that the daemon drops what has been read from the page cache.
    std::fs::write(&big, vec![7; 32 << 20]).unwrap();
    std::fs::File::open(&big).unwrap().sync_all().unwrap();
    std::fs::rename(dir.join("f7"), dir.join("g7")).unwrap();
    std::fs::remove_file(dir.join("f8")).unwrap();
    assert_eq!(std::fs::read(dir.join("f199")).unwrap(), vec![199; 199 * 97]);
    assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 200);
    let opened = std::fs::File::open(&big).unwrap();
    rustix::fs::fadvise(&opened, 0, None, Advice::DontNeed).unwrap();
    assert_eq!(std::fs::read(&big).unwrap().len(), 32 << 20);
    std::fs::remove_dir_all(&dir).unwrap();
}

/// Nothing was refused to the daemon, and everything is in force.
#[track_caller]
fn assert_undisturbed(s: &Scene) {
    let stats = larder(args!["stats", "--json", s.point()]).ok().json();
    let sandbox = &stats["sandbox"];
    assert_eq!(sandbox["refused_system_calls"], serde_json::json!([]), "{sandbox}");
    assert_eq!(
        (&sandbox["seccomp"], &sandbox["capabilities_dropped"]),
        (&true.into(), &true.into())
    );
    assert!(stats["memory"]["anonymous"].as_u64() > Some(0), "its own memory can be read");
}

#[test]
fn the_daemon_has_given_up_what_it_does_not_need() {
    let Some(s) = Scene::new() else { return };
    for options in ["transport=auto", "transport=dev", "direct", "writeback", "allow_other"] {
        larder(args!["mount", "-o", options, s.image(), s.point()]).ok();
        let daemon = s.daemon();
        work(&s);
        assert_confined(daemon);
        assert_undisturbed(&s);
        let helper = helper_of(daemon);
        assert!(
            memory_kib(helper) < 2048,
            "{options}: the helper takes {} KiB",
            memory_kib(helper)
        );
        larder(args!["umount", s.point()]).ok();
        assert!(!is_alive(daemon) && !is_alive(helper), "{options}: both have gone");
        larder(args!["umount", s.point()]).fails(2, "not mounted");
    }
    larder(args!["check", s.image()]).ok();
    // Read-only, where nothing may be written to either.
    larder(args!["mount", "-o", "ro", s.image(), s.point()]).ok();
    assert!(std::fs::write(s.at("x"), b"").is_err());
    assert_undisturbed(&s);
    larder(args!["umount", s.point()]).ok();
}

#[test]
fn a_sandbox_can_be_switched_off() {
    let Some(s) = Scene::new() else { return };
    larder(args!["mount", "-o", "nosandbox", s.image(), s.point()]).ok();
    let daemon = s.daemon();
    assert_eq!(status(daemon)["Seccomp"], "0");
    let stats = larder(args!["stats", "--json", s.point()]).ok().json();
    assert!(stats["sandbox"].is_null());
    work(&s);
    kill_process(daemon, Signal::TERM).unwrap();
    wait_for_end(daemon);
    assert!(!s.is_mounted());
}

#[test]
fn a_block_device_is_served_from_the_sandbox() {
    let Some(s) = Scene::new() else { return };
    if !need(&[Need::LoopDevices]) {
        return;
    }
    let device = LoopDevice::attach(&s.image()).unwrap();
    for end in ["umount", "signal"] {
        larder(args!["mount", device.path(), s.point()]).ok();
        let table = std::fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
        assert!(table.contains("fuseblk.larder"));
        let daemon = Scene::daemon_of(device.path());
        assert_confined(daemon);
        work(&s);
        assert_undisturbed(&s);
        std::fs::write(s.at(end), end).unwrap();
        if end == "umount" {
            larder(args!["umount", s.point()]).ok();
        } else {
            kill_process(daemon, Signal::TERM).unwrap();
            wait_for_end(daemon);
        }
        assert!(!s.is_mounted() && !is_alive(daemon));
        assert_eq!(larder(args!["cat", inside(device.path(), end)]).ok().text(), end);
    }
}

#[test]
fn without_its_helper_a_daemon_ends_cleanly() {
    let Some(s) = Scene::new() else { return };
    let start = |name: &str| {
        s.mount();
        let daemon = s.daemon();
        let helper = helper_of(daemon);
        kill_process(helper, Signal::KILL).unwrap();
        wait_for_end(helper);
        // It goes on as before.
        std::fs::write(s.at(name), name).unwrap();
        assert_eq!(std::fs::read_to_string(s.at(name)).unwrap(), name);
        daemon
    };
    // Unmounted from outside.
    let daemon = start("first");
    larder(args!["umount", s.point()]).ok();
    assert!(!s.is_mounted() && !is_alive(daemon));
    assert_eq!(larder(args!["cat", inside(&s.image(), "first")]).ok().text(), "first");
    // Ended by a signal: everything is durable, and no process hangs in what is left of the mount.
    let daemon = start("second");
    kill_process(daemon, Signal::TERM).unwrap();
    wait_for_end(daemon);
    assert!(s.is_mounted(), "nobody could unmount");
    assert!(
        larder_fuse::mount::is_dead(&s.point()),
        "a process that enters gets an error, and does not hang"
    );
    assert_eq!(larder(args!["cat", inside(&s.image(), "second")]).ok().text(), "second");
    larder(args!["umount", s.point()]).ok();
    assert!(!s.is_mounted());
}

#[test]
fn a_killed_daemon_takes_its_helper_along() {
    let Some(s) = Scene::new() else { return };
    s.mount();
    let daemon = s.daemon();
    let helper = helper_of(daemon);
    kill_process(daemon, Signal::KILL).unwrap();
    wait_for_end(daemon);
    wait_for_end(helper);
    assert!(s.is_mounted(), "dead, but there: nobody shall write beneath it unawares");
    assert!(
        larder_fuse::mount::is_dead(&s.point()),
        "a process that enters gets an error, and does not hang"
    );
    larder(args!["umount", s.point()]).fails(1, "had been killed");
    assert!(!s.is_mounted());
}

/// A service manager stops a service by a signal to all of its processes.
#[test]
fn a_signal_to_both_processes_unmounts() {
    let Some(s) = Scene::new() else { return };
    let mut child = command()
        .args(args!["mount", "--foreground", s.image(), s.point()])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.contains("is mounted on"), "{line}");
    let daemon = Pid::from_child(&child);
    assert_confined(daemon);
    work(&s);
    let helper = helper_of(daemon);
    // Ctrl-C of a terminal does not even reach it.
    assert_eq!(rustix::process::getsid(Some(helper)).unwrap(), helper);
    kill_process(helper, Signal::TERM).unwrap();
    kill_process(daemon, Signal::TERM).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(String::from_utf8_lossy(&output.stderr), "", "nothing was refused");
    assert!(!s.is_mounted() && !is_alive(helper));
}

/// What fails before there is a mount leaves nothing behind.
#[test]
fn a_failed_start_leaves_no_trace() {
    let Some(s) = Scene::new() else { return };
    std::fs::write(s.image(), vec![0; 1 << 20]).unwrap();
    larder(args!["mount", s.image(), s.point()]).fails(2, "");
    larder(args!["umount", s.point()]).fails(2, "not mounted");
    larder(args!["mkfs", "--force", "--size", "128M", s.image()]).ok();
    larder(args!["mount", "-o", "subvol=none", s.image(), s.point()]).fails(2, "subvolid=5");
    larder(args!["umount", s.point()]).fails(2, "not mounted");
    s.mount();
    larder(args!["umount", s.point()]).ok();
}

#[test]
fn an_ordinary_users_daemon_is_confined_too() {
    let Some(s) = Scene::new() else { return };
    const NOBODY: u32 = 65534;
    for path in [s.dir(), &s.image(), &s.point()] {
        std::os::unix::fs::chown(path, Some(NOBODY), Some(NOBODY)).unwrap();
    }
    let program = s.dir().join("larder");
    std::fs::copy(env!("CARGO_BIN_EXE_larder"), &program).unwrap();
    let as_user = |program: &Path, args: &[&Path]| -> common::Run {
        let mut c = Command::new(program);
        c.args(args).uid(NOBODY).gid(NOBODY).env_remove("XDG_RUNTIME_DIR").stdin(Stdio::null());
        c.output().unwrap().into()
    };
    let (image, point) = (s.image(), s.point());
    let larder_as_user = |args: &[&Path]| as_user(&program, args);
    let run = larder_as_user(&[Path::new("mount"), &image, &point]);
    if run.code != 0 && ["fusermount3", "/dev/fuse"].iter().any(|w| run.err.contains(w)) {
        assert!(!larder_simtest::oracle::required(), "{}", run.err);
        eprintln!("skipped: needs fusermount3 and /dev/fuse for ordinary users: {}", run.err);
        return;
    }
    run.ok();
    let daemon = s.daemon();
    assert_eq!(status(daemon)["Uid"].split_whitespace().next(), Some("65534"));
    assert_confined(daemon);
    let seen = as_user(Path::new("stat"), &[Path::new("-f"), &point]);
    assert_eq!(seen.code, 0, "{}", seen.err);
    // A signal unmounts through the setuid program `fusermount3`, which the daemon itself could not
    // start any more.
    kill_process(daemon, Signal::TERM).unwrap();
    wait_for_end(daemon);
    assert!(!s.is_mounted());
    larder_as_user(&[Path::new("mount"), &image, &point]).ok();
    let daemon = s.daemon();
    kill_process(daemon, Signal::KILL).unwrap();
    wait_for_end(daemon);
    assert!(s.is_mounted());
    larder_as_user(&[Path::new("umount"), &point]).fails(1, "had been killed");
    assert!(!s.is_mounted());
}
