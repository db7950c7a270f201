//! `larder receive`: into an image, onto a mount, interrupted, and what it says of a stream.

mod common;

use common::{Run, command, inside, is_mounted, larder};
use larder_simtest::oracle::{
    Aspects, Need, StdTree, btrfs_check, compare_sources, enter_private_namespace, need, scratch,
};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Stdio;

fn kept(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../stream/tests/linux").join(name)
}

/// A new image, in a directory of its own.
fn image(dir: &Path) -> PathBuf {
    let image = dir.join("a.img");
    larder(args!["mkfs", "--size", "256M", &image]).ok();
    image
}

#[track_caller]
fn check(image: &Path) {
    if need(&[Need::BtrfsProgs]) {
        btrfs_check(image, true).assert_clean(&image.display().to_string());
    }
}

#[test]
fn a_dump_has_the_lines_of_btrfs_receive() {
    for (stream, dump) in [
        ("full.v2", "full.dump2"),
        ("increment.v1", "increment.dump1"),
        ("increment.v2", "increment.dump2"),
        ("removed.v1", "removed.dump1"),
        ("two-without-data.v1", "two-without-data.dump1"),
    ] {
        let shown = larder(args!["receive", "--dump", "-f", kept(stream)]).ok().text();
        assert_eq!(shown, std::fs::read_to_string(kept(dump)).unwrap(), "{stream}");
    }
    let lines = larder(args!["receive", "--dump", "--json", "-f", kept("removed.v1")]).ok().text();
    let commands: Vec<serde_json::Value> =
        lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(commands.len(), 6);
    assert_eq!(commands[1]["to"], "o268-12-0");
    assert_eq!(commands[5]["command"], "end");
}

#[test]
fn generations_into_an_image() {
    let dir = scratch();
    let image = image(dir.path());
    let at = inside(&image, "/");
    let stream = |name| args!["receive", "-f", kept(name), &at];
    larder(stream("increment.v2")).fails(1, "receive that one first");
    larder(stream("full.v2")).ok();
    larder(stream("full.v2")).fails(1, "received before");
    for name in ["increment.v2", "removed.v1"] {
        larder(stream(name)).ok();
    }
    let summary = larder(args!["receive", "--resume", "--json", "-f", kept("full.v2"), &at]);
    let summary = summary.ok().json();
    assert_eq!(summary["subvolumes"][0]["commands"], 0);
    assert_eq!(summary["subvolumes"][0]["name"], "one");
    let show = larder(args!["subvolume", "show", "--json", inside(&image, "/three")]).ok().json();
    assert_eq!(show["read_only"], true);
    assert_eq!(show["received_uuid"], "1cf9554f-2e16-a74e-9bd4-c7478b20e5ac");
    assert_eq!(larder(args!["cat", inside(&image, "/two/e/hard")]).ok().text(), "hi\n");
    check(&image);
}

#[test]
fn a_stream_that_is_cut_off_goes_on_when_it_is_whole() {
    let dir = scratch();
    let image = image(dir.path());
    let at = inside(&image, "/");
    let whole = std::fs::read(kept("full.v2")).unwrap();
    let part = dir.path().join("part");
    std::fs::write(&part, &whole[..40_000]).unwrap();
    larder(args!["receive", "-f", &part, &at])
        .fails(1, "cut off at byte 40000")
        .fails(1, "--resume");
    larder(args!["receive", "-f", kept("full.v2"), &at]).fails(1, "in part before");
    larder(args!["receive", "--resume", "-f", kept("full.v2"), &at]).ok();
    let show = larder(args!["subvolume", "show", "--json", inside(&image, "/one")]).ok().json();
    assert_eq!(show["read_only"], true);
    check(&image);
}

#[test]
fn what_is_no_stream_is_said_to_be_none() {
    let dir = scratch();
    let image = image(dir.path());
    let at = inside(&image, "/");
    let piped = |bytes: &[u8]| -> Run {
        let mut child = command()
            .args(args!["receive", &at])
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // It may have ended before it has read everything.
        let _ = child.stdin.take().unwrap().write_all(bytes);
        child.wait_with_output().unwrap().into()
    };
    piped(b"").fails(1, "the stream is empty");
    piped(b"PK\x03\x04 something else").fails(1, "at byte 0");
    let mut damaged = std::fs::read(kept("full.v2")).unwrap();
    damaged[150] ^= 1;
    piped(&damaged).fails(1, "checksum");
    larder(args!["receive", "-f", dir.path().join("nothing"), &at]).fails(2, "nothing");
    larder(args!["receive", "--dump", "--resume", "-f", kept("full.v2")]).fails(2, "--resume");
    check(&image);
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
fn a_mount_receives_the_same_as_an_image() {
    if !need(&[Need::Fuse, Need::Root]) {
        return;
    }
    enter_private_namespace().unwrap();
    let dir = scratch();
    let image = image(dir.path());
    let mnt = dir.path().join("mnt");
    std::fs::create_dir(&mnt).unwrap();
    for name in ["/in", "/on"] {
        larder(args!["mkdir", inside(&image, name)]).ok();
    }
    for name in ["full.v2", "increment.v1"] {
        larder(args!["receive", "-f", kept(name), inside(&image, "/in")]).ok();
    }
    larder(args!["mount", &image, &mnt]).ok();
    let unmount = Unmount(&mnt);
    let on = mnt.join("on");
    let part = dir.path().join("part");
    std::fs::write(&part, &std::fs::read(kept("full.v2")).unwrap()[..40_000]).unwrap();
    larder(args!["receive", "-f", &part, &on]).fails(1, "cut off");
    larder(args!["receive", "--resume", "-f", kept("full.v2"), &on]).ok();
    larder(args!["receive", "-f", kept("increment.v1"), &on]).ok();
    for name in ["one", "two"] {
        let (a, b) = (mnt.join("in").join(name), on.join(name));
        let differences =
            compare_sources(&StdTree::new(&a), &StdTree::new(&b), Aspects::copy()).unwrap();
        assert!(differences.is_empty(), "{name}: {differences:#?}");
        let show = |path: &Path| larder(args!["subvolume", "show", "--json", path]).ok().json();
        let (a, b) = (show(&a), show(&b));
        for fact in ["received_uuid", "sent_in", "read_only"] {
            assert_eq!(a[fact], b[fact], "{name}: {fact}");
        }
    }
    larder(args!["receive", "-f", kept("full.v2"), dir.path()]).fails(2, "not on a Larder mount");
    larder(args!["umount", &mnt]).ok();
    drop(unmount);
    check(&image);
}
