//! Commits alone under power cuts: the label is the one thing that changes.

use larder_fs::{Fault, Filesystem, OpenOptions, Tuning};
use larder_simtest::crash::{Crashes, Limits};
use larder_simtest::device::{Seq, SimDevice};
use larder_simtest::oracle::{Need, btrfs_check, need, scratch};
use larder_simtest::runner::Config;
use std::sync::Arc;

/// Commits labels "1", "2" and so on; returns how many crash states there were, and what was wrong
/// first.
fn commits(commits: u64, tuning: Tuning) -> (usize, Option<String>) {
    let config = Config::new(1).expect("a new file system");
    let options = OpenOptions { tuning: Tuning { fake_clock: true, ..tuning }, ..config.options };
    let device = Arc::new(SimDevice::new(config.base));
    let fs = Filesystem::open(device.clone(), options.clone()).expect("open");
    let mut times: Vec<(Seq, Seq)> = Vec::new();
    for label in 1..=commits {
        let begin = device.mark();
        fs.set_label(label.to_string().as_bytes()).expect("label");
        fs.sync().expect("sync");
        times.push((begin, device.mark()));
    }
    fs.close().expect("close");
    let crashes = Crashes::of(&device.recording(), &Limits { samples: 16, ..Limits::default() });
    println!("{} states, {:?}", crashes.states.len(), crashes.by_kind());
    let dir = scratch();
    let path = dir.path().join("state.img");
    let can_check = need(&[Need::BtrfsProgs]);
    for (i, state) in crashes.states.iter().enumerate() {
        let image = crashes.image(state);
        let promised = times.iter().filter(|t| t.1 <= state.latest).count();
        let begun = times.iter().filter(|t| t.0 < state.earliest).count();
        let device = Arc::new(SimDevice::new(image.clone()).unrecorded());
        let verdict = (|| {
            let fs =
                Filesystem::open(device.clone(), options.clone()).map_err(|e| e.to_string())?;
            let label = String::from_utf8(fs.info().label).map_err(|e| e.to_string())?;
            let label: usize =
                if label.is_empty() { 0 } else { label.parse().map_err(|_| label)? };
            if label < promised || label > begun {
                return Err(format!("label {label}, promised {promised}, begun {begun}"));
            }
            fs.sync().map_err(|e| e.to_string())?;
            fs.close().map_err(|e| e.to_string())?;
            if can_check && i % 16 == 0 {
                for (when, image) in [("before", &image), ("after", &device.image())] {
                    image.write_sparse(&path).map_err(|e| e.to_string())?;
                    let report = btrfs_check(&path, true);
                    if !report.is_clean() {
                        return Err(format!("btrfs check {when}: {report}"));
                    }
                }
            }
            Ok::<(), String>(())
        })();
        if let Err(e) = verdict {
            return (crashes.states.len(), Some(format!("{e}\n{}", crashes.describe(state))));
        }
    }
    (crashes.states.len(), None)
}

#[test]
fn a_commit_is_there_or_not() {
    let (states, wrong) = commits(6, Tuning::default());
    assert_eq!(wrong, None);
    assert!(states > 50, "{states}");
}

#[test]
fn broken_commits_are_caught() {
    for tuning in [
        Tuning::from(Fault::NoFlushBeforeSuper),
        Tuning::from(Fault::NoFlushAfterSuper),
        Tuning::from(Fault::SuperFirst),
        Tuning::from(Fault::StaleFreeSpace),
    ] {
        let (states, wrong) = commits(6, tuning.clone());
        assert!(wrong.is_some(), "{tuning:?} went unnoticed in {states} states");
    }
}
