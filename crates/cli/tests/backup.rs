//! `larder backup`: image to image, onto a mount, to another machine; interrupted anywhere.

mod common;

use common::{Run, command, inside, is_mounted, larder};
use larder_simtest::oracle::{Need, btrfs_check, enter_private_namespace, need, scratch};
use serde_json::Value;
use std::collections::HashSet;
use std::ffi::OsString;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

/// Two images: `a.img` with the subvolume `home` and a file in it, and `b.img` with `/in`.
struct Pair {
    dir: tempfile::TempDir,
}

impl Pair {
    fn new() -> Self {
        let pair = Self { dir: scratch() };
        for image in [pair.a(), pair.b()] {
            larder(args!["mkfs", "--size", "256M", &image]).ok();
        }
        larder(args!["subvolume", "create", pair.in_a("/home")]).ok();
        larder(args!["mkdir", pair.in_b("/in")]).ok();
        pair.write("file", b"first");
        pair
    }
    fn path(&self) -> &Path {
        self.dir.path()
    }
    fn a(&self) -> PathBuf {
        self.path().join("a.img")
    }
    fn b(&self) -> PathBuf {
        self.path().join("b.img")
    }
    fn in_a(&self, path: &str) -> PathBuf {
        inside(&self.a(), path)
    }
    fn in_b(&self, path: &str) -> PathBuf {
        inside(&self.b(), path)
    }
    /// Puts a file into `home`.
    fn write(&self, name: &str, bytes: &[u8]) {
        let file = self.path().join("a file");
        std::fs::write(&file, bytes).unwrap();
        larder(args!["cp", "--force", &file, self.in_a(&format!("/home/{name}"))]).ok();
    }
    /// Makes a snapshot as a run at this time would have.
    fn snapshot(&self, name: &str) {
        let dir = self.in_a("/.snapshots");
        if larder(args!["ls", &dir]).code != 0 {
            larder(args!["mkdir", &dir]).ok();
        }
        let to = self.in_a(&format!("/.snapshots/{name}"));
        larder(args!["subvolume", "snapshot", "-r", self.in_a("/home"), to]).ok();
    }
    fn backup(&self, options: &[&str]) -> Run {
        let mut all: Vec<OsString> = vec!["backup".into(), "--json".into()];
        all.extend(options.iter().map(OsString::from));
        all.extend(args![self.in_a("/home"), self.in_b("/in")]);
        larder(all)
    }
    fn list(&self, place: PathBuf) -> Vec<Value> {
        let list = larder(args!["backup", "--json", "--list", place]).ok().json();
        list.as_array().unwrap().clone()
    }
    /// Names and states of the target.
    fn target(&self) -> Vec<(String, String)> {
        let text = |v: &Value| v.as_str().unwrap().to_owned();
        let list = self.list(self.in_b("/in"));
        list.iter().map(|s| (text(&s["name"]), text(&s["state"]))).collect()
    }
    fn source(&self) -> Vec<String> {
        let list = self.list(self.in_a("/.snapshots"));
        list.iter().map(|s| s["name"].as_str().unwrap().to_owned()).collect()
    }
    #[track_caller]
    fn check(&self) {
        for image in [self.a(), self.b()] {
            if need(&[Need::BtrfsProgs]) {
                btrfs_check(&image, true).assert_clean(&image.display().to_string());
            }
        }
    }
    /// A file of a snapshot in the target.
    #[track_caller]
    fn received(&self, snapshot: &str, name: &str) -> Vec<u8> {
        larder(args!["cat", self.in_b(&format!("/in/{snapshot}/{name}"))]).ok().out
    }
}

#[track_caller]
fn made(run: &Run) -> String {
    run.json()["made"].as_str().unwrap().to_owned()
}

fn complete(names: &[&str]) -> Vec<(String, String)> {
    names.iter().map(|name| ((*name).to_owned(), "complete".to_owned())).collect()
}

#[test]
fn the_first_is_whole_and_later_ones_are_what_changed() {
    let pair = Pair::new();
    let before = (std::fs::read(pair.a()).unwrap(), std::fs::read(pair.b()).unwrap());
    let dry = pair.backup(&["--dry-run"]).ok().json();
    assert_eq!(dry["dry_run"], true);
    assert_eq!(dry["snapshots"][0]["target"], "sent");
    let after = (std::fs::read(pair.a()).unwrap(), std::fs::read(pair.b()).unwrap());
    assert!(before == after, "a dry run writes nothing");

    let first = pair.backup(&[]).ok();
    assert!(first.err.contains(": everything"), "{}", first.err);
    pair.write("file", b"second");
    let second = pair.backup(&[]).ok();
    let (first, second, says) = (made(&first), made(&second), second.err);
    assert!(says.contains(&format!("Sending {second}: what changed since {first}")), "{says}");
    assert!(first < second, "two runs in one second have two names");
    assert_eq!(pair.received(&first, "file"), b"first");
    assert_eq!(pair.received(&second, "file"), b"second");
    assert_eq!(pair.target(), complete(&[&first, &second]));

    let table = larder(args!["backup", "-n", pair.in_a("/home"), pair.in_b("/in")]).ok().text();
    let lines: Vec<&str> = table.lines().collect();
    assert!(lines[0].starts_with("SNAPSHOT") && lines[0].ends_with("KEPT AS"), "{table}");
    let words: Vec<&str> = lines[1].split_whitespace().collect();
    assert_eq!(words, [&first[..], "yes", "yes", "last"]);
    let words: Vec<&str> = lines[3].split_whitespace().collect();
    assert_eq!(words[1..], ["new", "sent", "newest,", "parent,", "last"]);
    let list = larder(args!["backup", "--list", pair.in_b("/in")]).ok().text();
    assert_eq!(list.lines().count(), 3, "{list}");
    assert!(list.lines().nth(1).unwrap().ends_with("  complete"), "{list}");
    pair.check();
}

#[test]
fn both_sides_are_pruned_by_the_policy() {
    let pair = Pair::new();
    let old = ["20200101T000000Z", "20200101T120000Z", "20200102T000000Z", "20200102T230000Z"];
    for (n, stamp) in old.iter().enumerate() {
        pair.write("file", &[u8::try_from(n).unwrap(); 5000]);
        pair.snapshot(&format!("home.{stamp}"));
    }
    // Others are not touched.
    pair.snapshot("home.old");
    pair.snapshot("other.20190101T000000Z");
    pair.backup(&[]).ok();
    assert_eq!(pair.target().len(), 5);
    let run = pair.backup(&["--keep", "daily=3"]).ok();
    let rows = run.json()["snapshots"].clone();
    let of = |n: usize| {
        let row = &rows[n];
        [&row["source"], &row["target"], &row["kept_as"]].map(ToString::to_string)
    };
    assert_eq!(of(0), ["\"yes\"", "\"yes\"", "[\"daily\"]"]);
    assert_eq!(of(1), ["\"deleted\"", "\"deleted\"", "[]"]);
    let left: Vec<String> = pair.target().into_iter().map(|(name, _)| name).collect();
    let (first, last) = (format!("home.{}", old[0]), made(&run));
    assert_eq!(left.len(), 4, "two of 2020, the first of today, the newest: {left:?}");
    assert!(left[0] == first && left[1] == format!("home.{}", old[2]) && left[3] == last);
    let mut source = pair.source();
    source.retain(|name| name.starts_with("home."));
    assert_eq!(source, left);
    assert_eq!(pair.received(&left[1], "file"), [2; 5000]);
    larder(args!["ls", pair.in_a("/.snapshots/home.old")]).ok();
    larder(args!["ls", pair.in_a("/.snapshots/other.20190101T000000Z")]).ok();
    pair.check();
}

#[test]
fn what_was_received_in_part_is_finished_first() {
    let pair = Pair::new();
    let first = made(&pair.backup(&[]).ok());
    let bytes: Vec<u8> = (0..3_000_000u32).map(|n| n.wrapping_mul(n) as u8).collect();
    pair.write("large", &bytes);
    // As a run that was cut off left it.
    let part = "home.20200101T000000Z";
    pair.snapshot(part);
    let stream = pair.path().join("stream");
    let snapshot = |name: &str| pair.in_a(&format!("/.snapshots/{name}"));
    let parent = snapshot(&first);
    larder(args![
        "send",
        "-q",
        "--proto",
        "2",
        "--compressed-data",
        "-p",
        &parent,
        "-f",
        &stream,
        snapshot(part)
    ])
    .ok();
    let whole = std::fs::read(&stream).unwrap();
    std::fs::write(&stream, &whole[..whole.len() / 2]).unwrap();
    larder(args!["receive", "-f", &stream, pair.in_b("/in")]).fails(1, "cut off");
    assert_eq!(pair.target()[0], (part.to_owned(), "part".to_owned()));
    // The policy would not keep it: it is finished, and deleted then.
    let dry = pair.backup(&["--dry-run", "--keep", "last=1"]).ok().json();
    assert_eq!(dry["snapshots"][0]["target"], "deleted", "{dry}");
    let run = pair.backup(&["--keep", "last=1"]).ok();
    let goes_on = format!("Going on with {part}: what changed since {first}");
    assert!(run.err.contains(&goes_on), "{}", run.err);
    assert!(run.err.contains("what changed since home.2"), "{}", run.err);
    assert_eq!(pair.received(&made(&run), "large"), bytes);
    assert_eq!(pair.target(), complete(&[&made(&run)]));
    // Of a snapshot that is gone, nothing can be finished.
    let lost = "home.20200102T000000Z";
    pair.snapshot(lost);
    larder(args!["send", "-q", "--proto", "2", "-f", &stream, snapshot(lost)]).ok();
    let whole = std::fs::read(&stream).unwrap();
    std::fs::write(&stream, &whole[..whole.len() / 2]).unwrap();
    larder(args!["receive", "-f", &stream, pair.in_b("/in")]).fails(1, "cut off");
    larder(args!["subvolume", "delete", snapshot(lost)]).ok();
    let run = pair.backup(&["--keep", "last=1"]).ok();
    assert!(run.err.contains(&format!("Deleting {lost} in the target")), "{}", run.err);
    assert_eq!(pair.target(), complete(&[&made(&run)]));
    // A run that was killed right after it had made the subvolume leaves it without a record.
    let begun = "/in/home.20200103T000000Z";
    let parent = pair.in_b(&format!("/in/{}", made(&run)));
    larder(args!["subvolume", "snapshot", &parent, pair.in_b(begun)]).ok();
    // One with something in it is no such thing.
    let other = "home.20200104T000000Z";
    let in_other = pair.in_b(&format!("/in/{other}"));
    larder(args!["subvolume", "snapshot", &parent, &in_other]).ok();
    larder(args!["mkdir", pair.in_b(&format!("/in/{other}/new"))]).ok();
    let run = pair.backup(&["--keep", "last=1"]).ok();
    assert!(run.err.contains(&format!("{other} was not received")), "{}", run.err);
    let left = [(other.to_owned(), "writable".to_owned()), (made(&run), "complete".to_owned())];
    assert_eq!(pair.target(), left);
    pair.check();
}

#[test]
fn a_received_source_has_snapshots_that_can_be_told_apart() {
    let pair = Pair::new();
    let first = made(&pair.backup(&[]).ok());
    let c = pair.path().join("c.img");
    larder(args!["mkfs", "--size", "256M", &c]).ok();
    let from = pair.in_b(&format!("/in/{first}"));
    for n in 1..3 {
        larder(args!["backup", "--name", "again", &from, inside(&c, "/")]).ok();
        let list = pair.list(inside(&c, "/"));
        assert_eq!(list.len(), n);
        let ids: HashSet<&str> =
            list.iter().map(|s| s["received_uuid"].as_str().unwrap()).collect();
        assert_eq!(ids.len(), n);
    }
    pair.check();
}

/// After the loss of the source, its last snapshot comes back from the target.
#[test]
fn a_source_that_was_lost_goes_on_from_its_backup() {
    let pair = Pair::new();
    pair.backup(&[]).ok();
    pair.write("file", b"second");
    let last = made(&pair.backup(&[]).ok());
    std::fs::remove_file(pair.a()).unwrap();
    larder(args!["mkfs", "--size", "256M", pair.a()]).ok();
    larder(args!["mkdir", pair.in_a("/.snapshots")]).ok();
    let stream = pair.path().join("stream");
    larder(args!["send", "-q", "-f", &stream, pair.in_b(&format!("/in/{last}"))]).ok();
    larder(args!["receive", "-f", &stream, pair.in_a("/.snapshots")]).ok();
    let snapshot = pair.in_a(&format!("/.snapshots/{last}"));
    larder(args!["subvolume", "snapshot", snapshot, pair.in_a("/home")]).ok();
    pair.write("new", b"new");
    let run = pair.backup(&["--keep", "last=2"]).ok();
    assert!(run.err.contains(&format!("what changed since {last}")), "{}", run.err);
    assert_eq!(pair.target(), complete(&[&last, &made(&run)]));
    assert_eq!(pair.source(), [last, made(&run)]);
    assert_eq!(pair.received(&made(&run), "file"), b"second");
    assert_eq!(pair.received(&made(&run), "new"), b"new");
    pair.check();
}

#[test]
fn what_does_not_fit_together_is_refused() {
    let pair = Pair::new();
    let home = pair.in_a("/home");
    let to = pair.in_b("/in");
    let run = |from: &Path, to: &Path| larder(args!["backup", from, to]);
    run(&home, &pair.in_a("/")).fails(2, "one image");
    run(&pair.a(), &to).fails(2, "whole image");
    run(&home, &pair.b()).fails(2, "whole image");
    run(&home, &pair.in_b("/nowhere")).fails(1, "nowhere");
    run(&pair.in_a("/nothing"), &to).fails(1, "nothing");
    run(pair.path(), &to).fails(2, "not on a Larder mount");
    run(&home, pair.path()).fails(2, "not on a Larder mount");
    run(&home, Path::new("ssh://-oProxyCommand=x/y")).fails(2, "no host that could be one");
    run(Path::new("ssh://nas/x"), &to).fails(2, "run `larder backup` there");
    larder(args!["backup", "--keep", "dayly=7", &home, &to]).fails(2, "is no rule");
    larder(args!["backup", "--rate", "0", &home, &to]).fails(2, "nothing would be sent");
    larder(args!["backup", "--name", "a/b", &home, &to]).fails(2, "cannot be the name");
    larder(args!["backup", "--list", &to, &home]).fails(2, "cannot be used");
    // Another source with this name, of which the target has a part, or a snapshot.
    larder(args!["subvolume", "create", pair.in_a("/srv"), pair.in_a("/srv/home")]).ok();
    let other = pair.in_a("/srv/home");
    pair.snapshot("home.20200101T000000Z");
    let stream = pair.path().join("stream");
    let snapshot = pair.in_a("/.snapshots/home.20200101T000000Z");
    larder(args!["send", "-q", "--proto", "2", "--compressed-data", "-f", &stream, snapshot]).ok();
    let whole = std::fs::read(&stream).unwrap();
    std::fs::write(&stream, &whole[..whole.len() - 1]).unwrap();
    larder(args!["receive", "-f", &stream, &to]).fails(1, "cut off");
    run(&other, &to).fails(2, "--full");
    pair.backup(&["--keep", "last=1"]).ok();
    assert_eq!(pair.target().len(), 1);
    run(&other, &to).fails(2, "--full");
    assert_eq!(pair.target().len(), 1);
    larder(args!["backup", "--full", &other, &to]).ok();
    assert_eq!(pair.target().len(), 2);
    larder(args!["backup", "--name", "srv", &other, &to]).ok();
    // What is in the source, but not in a snapshot of it, is said.
    let note = run(&pair.in_a("/srv"), &pair.in_b("/")).ok();
    assert!(note.err.contains("each on its own: srv/home\n"), "{}", note.err);
    pair.snapshot("home.29990101T000000Z");
    run(&home, &to).fails(2, "from the future");
    pair.check();
}

#[test]
fn a_snapshot_that_was_changed_is_no_parent() {
    let pair = Pair::new();
    let first = made(&pair.backup(&[]).ok());
    let second = made(&pair.backup(&[]).ok());
    let snapshot = pair.in_a(&format!("/.snapshots/{second}"));
    larder(args!["subvolume", "read-only", &snapshot, "off"]).ok();
    larder(args!["mkdir", pair.in_a(&format!("/.snapshots/{second}/new"))]).ok();
    larder(args!["subvolume", "read-only", &snapshot, "on"]).ok();
    let run = pair.backup(&["--keep", "last=1"]).ok();
    assert!(run.err.contains(&format!("{second} was changed")), "{}", run.err);
    assert!(run.err.contains(&format!("what changed since {first}")), "{}", run.err);
    assert_eq!(pair.target(), complete(&[&second, &made(&run)]), "it is left alone");
    pair.check();
}

#[test]
fn a_rate_bounds_the_bytes_of_a_second() {
    let pair = Pair::new();
    let mut noise = vec![0; 600_000];
    std::fs::File::open("/dev/urandom").unwrap().read_exact(&mut noise).unwrap();
    pair.write("noise", &noise);
    let start = Instant::now();
    let run = pair.backup(&["--rate", "500K"]).ok();
    assert!(start.elapsed() > Duration::from_secs(1), "{:?}", start.elapsed());
    assert_eq!(pair.received(&made(&run), "noise"), noise);
}

/// Unmounts when a test fails, too.
struct Unmount<'a>(&'a Path);

impl Drop for Unmount<'_> {
    fn drop(&mut self) {
        if is_mounted(self.0) {
            let _ = larder(args!["umount", "--lazy", self.0]);
        }
    }
}

#[test]
fn a_mount_is_a_target() {
    if !need(&[Need::Fuse, Need::Root]) {
        return;
    }
    enter_private_namespace().unwrap();
    let pair = Pair::new();
    let mnt = pair.path().join("mnt");
    std::fs::create_dir(&mnt).unwrap();
    larder(args!["mount", pair.b(), &mnt]).ok();
    let unmount = Unmount(&mnt);
    let to = mnt.join("in");
    let backup =
        |keep: &str| larder(args!["backup", "--json", "--keep", keep, pair.in_a("/home"), &to]);
    let first = made(&backup("last=all").ok());
    pair.write("file", b"second");
    let run = backup("last=all").ok();
    assert!(run.err.contains(&format!("what changed since {first}")), "{}", run.err);
    assert_eq!(std::fs::read(to.join(made(&run)).join("file")).unwrap(), b"second");
    let last = made(&backup("last=1").ok());
    let listed = larder(args!["backup", "--json", "--list", &to]).ok().json();
    assert_eq!(listed.as_array().unwrap().len(), 1, "{listed}");
    assert_eq!(listed[0]["name"], last.as_str());
    larder(args!["umount", &mnt]).ok();
    drop(unmount);
    assert_eq!(pair.target(), complete(&[&last]));
    pair.check();
}

#[test]
fn a_mount_is_a_source() {
    if !need(&[Need::Fuse, Need::Root]) {
        return;
    }
    enter_private_namespace().unwrap();
    let pair = Pair::new();
    let mnt = pair.path().join("mnt");
    std::fs::create_dir(&mnt).unwrap();
    // What a run on the image made, a run on the mount goes on from, and the other way round.
    let first = made(&pair.backup(&[]).ok());
    larder(args!["mount", pair.a(), &mnt]).ok();
    let unmount = Unmount(&mnt);
    let home = mnt.join("home");
    std::fs::create_dir(home.join("dir")).unwrap();
    let backup = |options: &[&str]| {
        let mut all: Vec<OsString> = vec!["backup".into(), "--json".into()];
        all.extend(options.iter().map(OsString::from));
        all.extend(args![&home, pair.in_b("/in")]);
        larder(all)
    };
    std::fs::write(home.join("file"), b"second").unwrap();
    backup(&["--dry-run"]).ok();
    let run = backup(&[]).ok();
    assert!(run.err.contains(&format!("what changed since {first}")), "{}", run.err);
    assert_eq!(pair.received(&made(&run), "file"), b"second");
    std::fs::write(home.join("file"), b"third").unwrap();
    let third = made(&backup(&["--keep", "last=1"]).ok());
    assert_eq!(pair.target(), complete(&[&third]));
    assert_eq!(std::fs::read_dir(mnt.join(".snapshots")).unwrap().count(), 1);
    larder(args!["backup", &home, &mnt]).fails(2, "one image");
    larder(args!["backup", home.join("dir"), pair.in_b("/in")]).fails(2, "not a subvolume");
    larder(args!["backup", &home, pair.in_a("/")]).fails(2, "mounted on");
    let other = std::fs::File::open(mnt.join(".snapshots")).unwrap();
    rustix::fs::flock(&other, rustix::fs::FlockOperation::LockExclusive).unwrap();
    backup(&[]).fails(2, "another backup of it is running");
    drop(other);
    larder(args!["umount", &mnt]).ok();
    drop(unmount);
    let run = pair.backup(&["--keep", "last=1"]).ok();
    assert!(run.err.contains(&format!("what changed since {third}")), "{}", run.err);
    assert_eq!(pair.received(&made(&run), "file"), b"third");
    pair.check();
}

/// A program `ssh` that runs the command here. It counts its runs in `count`. In the run whose
/// number is in `die`, `larder` dies before or after that command, or its stream is cut off.
const SSH: &str = r#"#!/bin/sh
cd "$(dirname "$0")" || exit 255
echo "$*" >> said
while [ "$1" != -- ]; do shift; done
[ "$2" = me@nas ] || exit 255
n=$(($(cat count 2>/dev/null || echo 0) + 1))
echo $n > count
[ "$(cat die 2>/dev/null)" = "before $n" ] && { kill -9 $PPID; exit 255; }
if [ "$(cat die 2>/dev/null)" = "cut $n" ]; then
    head -c 40000 | sh -c "$3"
    exit 255
fi
sh -c "$3"
code=$?
[ "$(cat die 2>/dev/null)" = "after $n" ] && kill -9 $PPID
exit $code
"#;

/// Another machine, which is this one.
struct Remote {
    pair: Pair,
    to: String,
}

impl Remote {
    fn new() -> Self {
        let pair = Pair::new();
        let ssh = pair.path().join("ssh");
        std::fs::write(&ssh, SSH).unwrap();
        std::fs::set_permissions(&ssh, PermissionsExt::from_mode(0o755)).unwrap();
        // A name that a shell would take apart.
        larder(args!["mkdir", pair.in_b("/it's $in")]).ok();
        let to = format!("ssh://me@nas:2222{}:/it's $in", pair.b().display());
        Self { pair, to }
    }
    fn backup(&self, options: &[&str]) -> Run {
        let path = std::env::var("PATH").unwrap_or_default();
        let mut run = command();
        run.env("PATH", format!("{}:{path}", self.pair.path().display()));
        run.args(["backup", "--json", "--remote-larder", env!("CARGO_BIN_EXE_larder")]);
        run.args(options).arg(self.pair.in_a("/home")).arg(&self.to).output().unwrap().into()
    }
    fn die(&self, when: &str) {
        std::fs::write(self.pair.path().join("die"), when).unwrap();
        let _ = std::fs::remove_file(self.pair.path().join("count"));
    }
    fn runs(&self) -> u32 {
        let count = std::fs::read_to_string(self.pair.path().join("count")).unwrap();
        count.trim().parse().unwrap()
    }
    fn list(&self) -> Vec<(String, String)> {
        let text = |v: &Value| v.as_str().unwrap().to_owned();
        let list = self.pair.list(self.pair.in_b("/it's $in"));
        list.iter().map(|s| (text(&s["name"]), text(&s["state"]))).collect()
    }
}

#[test]
fn another_machine_is_a_target() {
    let there = Remote::new();
    let first = made(&there.backup(&[]).ok());
    there.pair.write("file", b"second");
    let run = there.backup(&[]).ok();
    let second = made(&run);
    assert!(run.err.contains(&format!("what changed since {first}")), "{}", run.err);
    assert_eq!(there.list(), complete(&[&first, &second]));
    let file = there.pair.in_b(&format!("/it's $in/{second}/file"));
    assert_eq!(larder(args!["cat", file]).ok().text(), "second");
    let third = made(&there.backup(&["--keep", "last=1"]).ok());
    assert_eq!(there.list(), complete(&[&third]));
    let said = std::fs::read_to_string(there.pair.path().join("said")).unwrap();
    assert!(said.starts_with("-p 2222 -- me@nas '"), "{said}");
    there.backup(&["--remote-larder", "/no/larder"]).fails(2, "--remote-larder");
    there.pair.check();
}

#[test]
fn a_stream_that_is_cut_off_goes_on() {
    let there = Remote::new();
    let mut noise = vec![0; 300_000];
    std::fs::File::open("/dev/urandom").unwrap().read_exact(&mut noise).unwrap();
    there.pair.write("noise", &noise);
    there.die("cut 2");
    there.backup(&[]).fails(2, "ssh failed");
    let list = there.list();
    assert_eq!(list[0].1, "part");
    there.die("never");
    let run = there.backup(&["--keep", "last=1"]).ok();
    assert!(run.err.contains(&format!("Going on with {}", list[0].0)), "{}", run.err);
    assert_eq!(there.list(), complete(&[&made(&run)]));
    let file = there.pair.in_b(&format!("/it's $in/{}/noise", made(&run)));
    assert_eq!(larder(args!["cat", file]).ok().out, noise);
    there.pair.check();
}

/// Killed before and after everything that it does at the other side, it goes on.
#[test]
fn it_can_be_started_again_wherever_it_was_killed() {
    let there = Remote::new();
    for stamp in ["20200101T000000Z", "20200102T000000Z"] {
        there.pair.snapshot(&format!("home.{stamp}"));
    }
    there.die("never");
    there.backup(&[]).ok();
    for n in 1.. {
        for when in ["before", "after"] {
            there.pair.write("file", format!("{when} {n}").as_bytes());
            there.die(&format!("{when} {n}"));
            let run = there.backup(&["--keep", "last=2"]);
            if n > there.runs() {
                assert!(n > 3, "a list, a stream, a deletion");
                run.ok();
                there.pair.check();
                return;
            }
            assert_eq!(run.code, -1, "killed: {}", run.err);
            there.die("never");
            let run = there.backup(&["--keep", "last=2"]).ok();
            let list = there.list();
            assert_eq!(list.len(), 2, "{list:?}");
            assert_eq!(list[1], (made(&run), "complete".to_owned()));
            assert_eq!(there.pair.source(), [&list[0].0[..], &list[1].0]);
            let file = there.pair.in_b(&format!("/it's $in/{}/file", made(&run)));
            assert_eq!(larder(args!["cat", file]).ok().text(), format!("{when} {n}"));
        }
    }
}

/// A signal ends a run in order: what was received stays, and the next run goes on with it.
#[test]
fn a_signal_ends_it_in_order() {
    let pair = Pair::new();
    let mut noise = vec![0; 2_000_000];
    std::fs::File::open("/dev/urandom").unwrap().read_exact(&mut noise).unwrap();
    pair.write("noise", &noise);
    let mut run = command();
    run.args(["backup", "--rate", "100K"]).arg(pair.in_a("/home")).arg(pair.in_b("/in"));
    let mut child = run.stderr(Stdio::piped()).spawn().unwrap();
    // It says so when the stream begins.
    let mut says = [0; 7];
    child.stderr.as_mut().unwrap().read_exact(&mut says).unwrap();
    assert_eq!(&says, b"Sending");
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let end = child.wait_with_output().unwrap();
    assert_eq!(end.status.signal(), Some(15), "{}", String::from_utf8_lossy(&end.stderr));
    let run = pair.backup(&[]).ok();
    assert_eq!(pair.target().len(), 2);
    assert_eq!(pair.received(&made(&run), "noise"), noise);
    pair.check();
}
