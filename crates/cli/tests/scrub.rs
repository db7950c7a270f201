//! `larder scrub` and `btrfs scrub`: of images, and of mounts by their daemon.

mod common;

use common::scene::{Scene, wait_for_end};
use common::{Run, command, larder};
use larder_simtest::oracle::sum_of_image;
use rustix::process::{Signal, kill_process};
use serde_json::Value;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

/// A scene whose scrubs are kept beside its image.
struct Scrubs(Scene);

impl Scrubs {
    fn new() -> Option<Self> {
        Scene::new().map(Self)
    }

    fn run<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Run {
        let mut command = command();
        command.env("XDG_STATE_HOME", self.0.dir());
        command.args(args).output().unwrap().into()
    }

    /// As `btrfs`, with these words and the mount.
    fn habit(&self, words: &str) -> Run {
        let mut command = Command::new(env!("CARGO_BIN_EXE_larder"));
        command.arg0("btrfs").env("XDG_STATE_HOME", self.0.dir());
        command.arg("scrub").args(words.split_whitespace()).arg(self.0.point());
        command.output().unwrap().into()
    }

    fn status(&self) -> Value {
        self.run(args!["scrub", "status", "--json", self.0.point()]).ok().json()
    }

    fn fill(&self, len: usize) {
        let noise: Vec<u8> =
            (0..len as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 9) as u8).collect();
        fs::write(self.0.at("long"), noise).unwrap();
        fs::write(self.0.at("short"), [0xb7; 8192]).unwrap();
        larder(args!["sync", self.0.point()]).ok();
    }
}

/// Writes garbage over the place of a sector with this content, wherever it lies.
fn spoil(image: &Path, content: u8, most: usize) -> usize {
    let file = fs::OpenOptions::new().read(true).write(true).open(image).unwrap();
    let bytes = fs::read(image).unwrap();
    let found = bytes.chunks(4096).enumerate().filter(|(_, c)| *c == [content; 4096]);
    let places: Vec<u64> = found.map(|(n, _)| n as u64 * 4096).take(most).collect();
    for at in &places {
        file.write_all_at(&[1; 512], *at).unwrap();
    }
    places.len()
}

#[test]
fn an_image_is_scrubbed_and_what_is_lost_is_named() {
    let Some(s) = Scrubs::new() else { return };
    s.0.mount();
    s.fill(3 << 20);
    larder(args!["subvolume", "snapshot", "-r", s.0.point(), s.0.at("kept")]).ok();
    larder(args!["umount", s.0.point()]).ok();
    let image = s.0.image();
    let text = s.run(args!["scrub", &image]).ok().text();
    assert!(text.contains("is complete") && text.contains("No errors"), "{text}");

    // A superblock mirror can be repaired.
    let file = fs::OpenOptions::new().write(true).open(&image).unwrap();
    file.write_all_at(&[3; 100], (64 << 20) + 300).unwrap();
    let before = sum_of_image(&image).unwrap();
    let run = s.run(args!["scrub", "-r", "--json", &image]).fails(1, "1 error left");
    let value = run.json();
    assert_eq!((&value["sum"]["super_errors"], &value["sum"]["corrected"]), (&1.into(), &1.into()));
    assert_eq!(sum_of_image(&image).unwrap(), before, "a look writes nothing");
    let text = s.run(args!["scrub", &image]).ok().text();
    assert!(
        text.contains("1 damaged superblocks") && text.contains("1 repaired, 0 left"),
        "{text}"
    );
    s.run(args!["scrub", "-r", &image]).ok();

    // The only copy of data cannot.
    assert_eq!(spoil(&image, 0xb7, 1), 1);
    let run = s.run(args!["scrub", &image]).fails(1, "1 error left");
    let text = run.text();
    for says in ["data without a good copy", "    short at 0 (subv", "    kept/short at 0 (subv"] {
        assert!(text.contains(says), "{says:?} in {text}");
    }
    s.run(args!["scrub", s.0.dir()]).fails(2, "larder scrub start DIR");
    s.run(args!["scrub", s.0.dir().join("none")]).fails(2, "No such file");
}

#[test]
fn a_mount_is_scrubbed_by_its_daemon() {
    let Some(s) = Scrubs::new() else { return };
    s.0.mount();
    s.fill(3 << 20);
    let point = s.0.point();
    s.run(args!["scrub", "cancel", &point]).fails(2, "no scrub is running");
    s.run(args!["scrub", "resume", &point]).fails(2, "no scrub that could be resumed");
    assert_eq!(s.status(), Value::Null);
    assert!(s.habit("status").ok().text().contains("no stats available"));
    s.habit("cancel").fails(2, "not running");
    assert!(s.habit("resume").fails(2, "").text().contains("nothing to resume"));

    let text = s.run(args!["scrub", "start", "--wait", &point]).ok().text();
    assert!(text.contains("is complete") && text.contains("No errors"), "{text}");
    assert_eq!(s.status()["status"], "finished");
    let text = s.habit("start -B").ok().text();
    assert!(
        text.contains("Status:           finished") && text.contains("no errors found"),
        "{text}"
    );
    assert!(s.habit("status -R").ok().text().contains("\tuncorrectable_errors: 0"));

    assert_eq!(spoil(&s.0.image(), 0xb7, 1), 1);
    let run = s.run(args!["scrub", "start", "--wait", "--json", &point]).fails(1, "1 error left");
    let damage = &run.json()["damage"][0];
    assert_eq!((&damage["what"], &damage["files"][0]["path"]), (&"data".into(), &"short".into()));
    let run = s.habit("start -B").fails(3, "uncorrectable");
    assert!(
        run.text().contains("Error summary:    csum=1\n  Corrected:      0\n  Uncorrectable:  1")
    );
    let stats = larder(args!["stats", "--json", &point]).ok().json();
    assert_eq!(stats["sandbox"]["refused_system_calls"], serde_json::json!([]));
    larder(args!["umount", &point]).ok();

    larder(args!["mount", "-o", "ro", s.0.image(), &point]).ok();
    s.run(args!["scrub", "start", &point]).fails(2, "-r only looks");
    s.run(args!["scrub", "start", "-r", "--wait", &point]).fails(1, "1 error left");
    larder(args!["umount", &point]).ok();
}

/// Cancelled, unmounted, or with its daemon killed: a scrub goes on where it was.
#[test]
fn a_scrub_survives_its_daemon() {
    let Some(s) = Scrubs::new() else { return };
    s.0.mount();
    s.fill(40 << 20);
    let point = s.0.point();
    let whole = s.run(args!["scrub", "start", "--wait", "--json", &point]).ok().json();
    let done = |value: &Value| value["done"].as_u64().unwrap();

    s.run(args!["scrub", "start", "--limit", "4M", &point]).ok();
    s.run(args!["scrub", "start", &point]).fails(2, "a scrub is running already");
    s.habit("start").fails(1, "Scrub is already running");
    while done(&s.status()) < 4 << 20 {}
    assert!(s.habit("limit").ok().text().contains("4.00MiB"));
    s.run(args!["scrub", "cancel", &point]).ok();
    let canceled = s.status();
    assert_eq!(canceled["status"], "canceled");

    // Unmounting interrupts it.
    s.run(args!["scrub", "resume", "--limit", "4M", &point]).ok();
    larder(args!["umount", &point]).ok();
    s.0.mount();
    let interrupted = s.status();
    assert_eq!(interrupted["status"], "interrupted");
    assert!(done(&interrupted) >= done(&canceled) && done(&interrupted) < done(&whole));

    s.run(args!["scrub", "resume", &point]).ok();
    while done(&s.status()) <= done(&interrupted) {}
    let daemon = s.0.daemon();
    kill_process(daemon, Signal::KILL).unwrap();
    wait_for_end(daemon);
    larder(args!["umount", &point]).fails(1, "had been killed");
    s.0.mount();
    let killed = s.status();
    assert_eq!(killed["status"], "interrupted");
    assert!(done(&killed) >= done(&interrupted));

    s.run(args!["scrub", "resume", &point]).ok();
    s.run(args!["scrub", "limit", "0", &point]).ok();
    let state = loop {
        let state = s.status();
        if state["status"] != "running" {
            break state;
        }
    };
    assert_eq!(state["status"], "finished");
    // What was judged since it was last kept is judged again. The tree that says what is allocated
    // has changed with each mount.
    let (least, most) = (done(&whole) - (1 << 20), done(&whole) + (16 << 20));
    assert!((least..most).contains(&done(&state)), "{state} after {whole}");
    larder(args!["umount", &point]).ok();
}
