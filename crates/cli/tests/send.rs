//! `larder send`: from an image, and from a mount by its daemon.

mod common;

use common::places::Places;
use common::scene::{Scene, is_alive, wait_for_end};
use common::{Run, command, inside, larder};
use larder_simtest::oracle::{Aspects, StdTree, compare_sources};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// More than pipes and sockets hold.
const BIG: usize = 4 << 20;
const NOBODY: u32 = 65534;

/// Bytes that do not pack.
fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let step = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..len).map(step).collect()
}

/// A mounted image with the subvolume `home` and its snapshots `monday` and `tuesday`.
fn mounted() -> Option<Scene> {
    let s = Scene::new()?;
    s.mount();
    larder(args!["subvolume", "create", s.at("home")]).ok();
    fs::create_dir_all(s.at("home/a/b")).unwrap();
    for n in 0..100_usize {
        fs::write(s.at(&format!("home/a/f{n}")), "text ".repeat(n * 7)).unwrap();
    }
    fs::write(s.at("home/big"), noise(BIG, 5)).unwrap();
    std::os::unix::fs::symlink("a/b", s.at("home/link")).unwrap();
    snapshot(&s, "monday");
    fs::rename(s.at("home/a"), s.at("home/moved")).unwrap();
    fs::remove_file(s.at("home/moved/f7")).unwrap();
    fs::write(s.at("home/new"), "more ".repeat(100_000)).unwrap();
    snapshot(&s, "tuesday");
    Some(s)
}

fn snapshot(s: &Scene, name: &str) {
    larder(args!["subvolume", "snapshot", "-r", s.at("home"), s.at(name)]).ok();
}

#[track_caller]
fn assert_undisturbed(s: &Scene) {
    let stats = larder(args!["stats", "--json", s.point()]).ok().json();
    assert_eq!(stats["sandbox"]["refused_system_calls"], serde_json::json!([]));
    assert_eq!(stats["sandbox"]["seccomp"], true);
}

/// A stream that nobody reads yet; the daemon waits.
fn unread(path: &Path) -> Child {
    let mut child = command()
        .arg("send")
        .arg(path)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // It has begun.
    child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
    child
}

fn end_of(child: Child) -> Run {
    child.wait_with_output().unwrap().into()
}

#[test]
fn a_mount_sends_the_bytes_that_its_image_sends() {
    let Some(s) = mounted() else { return };
    let all = |at: &dyn Fn(&str) -> PathBuf| -> Vec<Run> {
        let (old, new) = (&at("monday"), &at("tuesday"));
        vec![
            larder(args!["send", old]).ok(),
            larder(args!["send", "-p", old, new]).ok(),
            larder(args!["send", "-c", old, new]).ok(),
            larder(args!["send", "--proto", "2", "--compressed-data", old, new]).ok(),
            larder(args!["send", "--no-data", new]).ok(),
        ]
    };
    let live = all(&|name| s.at(name));
    let file = s.dir().join("stream");
    let summary =
        |path: PathBuf| larder(args!["send", "--json", "-f", &file, path]).ok().json()[0].clone();
    let told = summary(s.at("monday"));
    assert_eq!(told["subvolume"], s.at("monday").to_str().unwrap());
    assert!(fs::read(&file).unwrap() == live[0].out);
    assert_undisturbed(&s);
    larder(args!["umount", s.point()]).ok();
    let image = all(&|name| inside(&s.image(), name));
    for (n, (live, image)) in live.iter().zip(&image).enumerate() {
        assert!(!live.out.is_empty() && live.out == image.out, "stream {n}");
    }
    let at_rest = summary(inside(&s.image(), "monday"));
    for figure in ["commands", "inodes", "data", "cloned"] {
        assert_eq!(told[figure], at_rest[figure], "{figure}");
    }
}

#[test]
fn what_a_mount_sends_is_received_on_a_mount() {
    let Some(s) = mounted() else { return };
    let to = s.at("received");
    fs::create_dir(&to).unwrap();
    let streams = [
        args!["send", s.at("monday")].to_vec(),
        args!["send", "-p", s.at("monday"), s.at("tuesday")].to_vec(),
    ];
    for stream in streams {
        let mut child = command().args(stream).stdout(Stdio::piped()).spawn().unwrap();
        let stream = child.stdout.take().unwrap();
        let run = command().arg("receive").arg(&to).stdin(stream).output().unwrap();
        Run::from(run).ok();
        assert!(child.wait().unwrap().success());
    }
    for name in ["monday", "tuesday"] {
        let (sent, got) = (StdTree::new(&s.at(name)), StdTree::new(&to.join(name)));
        let found = compare_sources(&sent, &got, Aspects::copy()).unwrap();
        assert!(found.is_empty(), "{name}: {found:?}");
    }
    larder(args!["umount", s.point()]).ok();
    larder(args!["check", s.image()]).ok();
}

#[test]
fn what_cannot_be_sent_is_named() {
    let Some(s) = mounted() else { return };
    let one = |path: &dyn AsRef<Path>| larder(args!["send", path.as_ref()]);
    one(&s.at("home")).fails(1, "the subvolume is not read-only\nhint: make a snapshot that is");
    one(&s.at("monday/a")).fails(1, "is not a subvolume");
    one(&s.at("monday/big")).fails(1, "is not a subvolume");
    one(&s.at("nothing")).fails(2, "No such file");
    one(&s.dir()).fails(2, "not on a Larder mount");
    let (old, new) = (s.at("monday"), s.at("tuesday"));
    larder(args!["send", "-p", inside(&s.image(), "monday"), &new]).fails(2, "is not on a mount");
    larder(args!["send", "-p", &new, &new]).fails(1, "cannot be its own parent");
    one(&inside(&s.image(), "monday")).fails(2, "it is mounted on");
    // Another image of the same name and with the same ids.
    let (copy, point) = (s.dir().join("copy"), s.dir().join("mnt2"));
    fs::create_dir(&point).unwrap();
    larder(args!["sync", s.point()]).ok();
    fs::copy(s.image(), &copy).unwrap();
    larder(args!["mount", &copy, &point]).ok();
    let mixed = larder(args!["send", "-p", &old, point.join("tuesday")]);
    larder(args!["umount", &point]).ok();
    mixed.fails(2, "all subvolumes of a stream are in one image");
    larder(args!["umount", s.point()]).ok();
    larder(args!["send", "-p", &old, inside(&s.image(), "tuesday")]).fails(2, "is not IMAGE:PATH");
    one(&inside(&s.image(), "home")).fails(1, "the subvolume is not read-only");
}

#[test]
fn a_slow_reader_keeps_only_its_subvolume() {
    let Some(s) = mounted() else { return };
    let child = unread(&s.at("monday"));
    // Everything else goes on.
    fs::write(s.at("home/during"), noise(1 << 20, 9)).unwrap();
    larder(args!["sync", s.point()]).ok();
    snapshot(&s, "wednesday");
    larder(args!["send", "-p", s.at("tuesday"), s.at("wednesday")]).ok();
    larder(args!["subvolume", "delete", s.at("tuesday")]).ok();
    larder(args!["subvolume", "delete", s.at("monday")]).fails(1, "it is being sent");
    larder(args!["property", "set", s.at("monday"), "ro", "false"]).fails(1, "it is being sent");
    assert_eq!(fs::read(s.at("monday/big")).unwrap().len(), BIG);
    let run = end_of(child).ok();
    assert!(run.out.len() > BIG);
    larder(args!["subvolume", "delete", s.at("monday")]).ok();
    assert_undisturbed(&s);
    larder(args!["umount", s.point()]).ok();
    larder(args!["check", s.image()]).ok();
}

#[test]
fn unmounting_ends_a_stream_with_an_error() {
    let Some(s) = mounted() else { return };
    let child = unread(&s.at("monday"));
    let daemon = s.daemon();
    larder(args!["umount", s.point()]).ok();
    assert!(!is_alive(daemon));
    let run = end_of(child).fails(1, "unmounted before the stream was complete");
    assert!(run.out.len() < BIG);
    larder(args!["check", s.image()]).ok();
}

#[test]
fn a_signal_to_the_daemon_ends_a_stream_with_an_error() {
    let Some(s) = mounted() else { return };
    let child = unread(&s.at("monday"));
    let daemon = s.daemon();
    kill_process(daemon, Signal::TERM).unwrap();
    wait_for_end(daemon);
    end_of(child).fails(1, "unmounted before the stream was complete");
    larder(args!["check", s.image()]).ok();
}

#[test]
fn a_killed_daemon_is_noticed() {
    let Some(s) = mounted() else { return };
    let child = unread(&s.at("monday"));
    kill_process(s.daemon(), Signal::KILL).unwrap();
    end_of(child).fails(1, "the daemon ended before the stream was complete");
}

#[test]
fn a_killed_program_leaves_its_subvolume() {
    let Some(s) = mounted() else { return };
    let child = unread(&s.at("monday"));
    let busy = || larder(args!["subvolume", "delete", s.at("monday")]);
    busy().fails(1, "it is being sent");
    kill_process(Pid::from_child(&child), Signal::KILL).unwrap();
    end_of(child);
    // The daemon learns of it by its next write.
    while busy().code != 0 {
        std::thread::yield_now();
    }
    assert_undisturbed(&s);
}

#[test]
fn a_reader_that_has_enough_is_no_error() {
    let Some(s) = mounted() else { return };
    let mut child = unread(&s.at("monday"));
    drop(child.stdout.take());
    end_of(child).ok();
}

#[test]
fn subvolumes_of_two_mounts_of_an_image_make_one_stream() {
    let Some(p) = Places::new() else { return };
    let (top, home) = (p.mount(0, "subvolid=5").to_owned(), p.mount(1, "subvol=@home").to_owned());
    fs::write(home.join("f"), "one").unwrap();
    let (old, new) = (top.join("old"), home.join("new"));
    larder(args!["subvolume", "snapshot", "-r", top.join("@home"), &old]).ok();
    fs::write(home.join("f"), "two").unwrap();
    larder(args!["subvolume", "snapshot", "-r", &home, &new]).ok();
    let stream = larder(args!["send", "-p", &old, &new]).ok().out;
    // A mount that goes while others stay does not end the stream.
    fs::write(home.join("big"), noise(BIG, 3)).unwrap();
    larder(args!["subvolume", "snapshot", "-r", &home, home.join("newer")]).ok();
    let child = unread(&home.join("newer"));
    p.umount(1);
    assert!(end_of(child).ok().out.len() > BIG);
    // A mount that is bound to another place is of the same daemon.
    let bound = p.place(2);
    let bind = Command::new("mount").arg("--bind").args([&top, bound]).status().unwrap();
    assert!(bind.success());
    let again = larder(args!["send", "-p", &old, bound.join("@home/new")]);
    assert!(Command::new("umount").arg(bound).status().unwrap().success());
    assert!(again.ok().out == stream);
    p.assert_undisturbed(0);
    p.umount(0);
    p.assert_sound();
}

#[test]
fn only_the_user_of_the_mount_and_root_may_send() {
    let Some(s) = Scene::new() else { return };
    let program = s.dir().join("program");
    assert!(
        Command::new("cp")
            .arg(env!("CARGO_BIN_EXE_larder"))
            .arg(&program)
            .status()
            .unwrap()
            .success()
    );
    let as_user = |args: &[&Path]| -> Run {
        let mut c = Command::new(&program);
        c.args(args).uid(NOBODY).gid(NOBODY).env_remove("XDG_RUNTIME_DIR").stdin(Stdio::null());
        c.output().unwrap().into()
    };
    let word = Path::new;
    // Everybody may look at root's mount.
    fs::set_permissions(s.dir(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    larder(args!["mount", "-o", "allow_other", s.image(), s.point()]).ok();
    larder(args!["subvolume", "create", s.at("home")]).ok();
    fs::write(s.at("home/f"), "text").unwrap();
    snapshot(&s, "snap");
    as_user(&[word("send"), &s.at("snap")]).fails(2, "only root and user 0");
    let stream = larder(args!["send", s.at("snap")]).ok().out;
    larder(args!["umount", s.point()]).ok();
    // A user's own mount.
    for path in [s.dir(), &s.image(), &s.point()] {
        std::os::unix::fs::chown(path, Some(NOBODY), Some(NOBODY)).unwrap();
    }
    let (image, point) = (s.image(), s.point());
    let mount =
        |options: &str| as_user(&[word("mount"), word("-o"), word(options), &image, &point]);
    let run = mount("subvolid=5");
    if run.code != 0 && ["fusermount3", "/dev/fuse"].iter().any(|w| run.err.contains(w)) {
        assert!(!larder_simtest::oracle::required(), "{}", run.err);
        eprintln!("skipped: needs fusermount3 and /dev/fuse for ordinary users: {}", run.err);
        return;
    }
    run.ok();
    assert!(as_user(&[word("send"), &s.at("snap")]).ok().out == stream);
    larder(args!["send", s.at("snap")]).fails(1, "only user 65534");
    as_user(&[word("umount"), &point]).ok();
    // Where root is let in, root may send. This namespace has a setting for it.
    let setting = s.dir().join("fuse.conf");
    fs::write(&setting, "user_allow_other\n").unwrap();
    std::os::unix::fs::chown(&setting, Some(0), Some(0)).unwrap();
    let bind = |args: &[&str]| {
        Command::new("mount").args(args).arg(&setting).arg("/etc/fuse.conf").status()
    };
    assert!(bind(&["--bind"]).unwrap().success());
    let run = mount("subvolid=5,allow_other");
    let unbound = Command::new("umount").arg("/etc/fuse.conf").status().unwrap();
    run.ok();
    assert!(unbound.success() && larder(args!["send", s.at("snap")]).ok().out == stream);
    as_user(&[word("umount"), &point]).ok();
}
