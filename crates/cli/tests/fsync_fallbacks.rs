//! How often an `fsync` on a mount has to be a commit, by cause, under three loads. Work is
//! counted, not timed, and nothing commits by itself meanwhile. In the end the daemon is killed, so
//! that its last log, which is a large one, has to be replayed.
//!
//! `LARDER_SCALE=20` with `--nocapture` does 20 times as much and prints the figures that stand in
//! `docs/LOG.md`.

mod common;

use common::crash::{Stage, ready};
use common::larder;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

const THREADS: u64 = 16;

/// Runs the rounds in all threads. Returns what the daemon counts about logs afterwards.
fn load(
    stage: &Stage,
    rounds: u64,
    each: impl Fn(u64, u64) -> io::Result<()> + Sync,
) -> serde_json::Value {
    let scale: u64 = std::env::var("LARDER_SCALE").ok().and_then(|s| s.parse().ok()).unwrap_or(1);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let each = &each;
            scope.spawn(move || {
                for round in 0..rounds * scale {
                    each(thread, round)
                        .unwrap_or_else(|e| panic!("thread {thread}, round {round}: {e}"));
                }
            });
        }
    });
    stage.log_stats()
}

/// Prints and returns the number of calls, and how many of them were commits.
fn commits(what: &str, log: &serde_json::Value) -> (u64, u64) {
    let count = |name: &str| log[name].as_u64().unwrap_or_else(|| panic!("no {name} in {log}"));
    let causes: Vec<(&String, u64)> = log
        .as_object()
        .unwrap()
        .iter()
        .filter(|(name, _)| name.starts_with("commits_"))
        .map(|(name, n)| (name, n.as_u64().unwrap()))
        .collect();
    let all: u64 = causes.iter().map(|(_, n)| n).sum();
    let fsyncs = count("fsyncs");
    println!(
        "{what}: {fsyncs} fsyncs, {} with nothing to do, {} logged, {all} commits ({:.2} %): \
         {:?}; {} batches of up to {}",
        count("fsyncs_with_nothing_to_do"),
        count("fsyncs_logged"),
        100.0 * all as f64 / fsyncs as f64,
        causes.iter().filter(|(_, n)| *n > 0).collect::<Vec<_>>(),
        count("batches"),
        count("largest_batch"),
    );
    assert_eq!(count("fsyncs_with_nothing_to_do") + count("fsyncs_logged") + all, fsyncs, "{log}");
    (fsyncs, all)
}

/// Kills the daemon and looks at what Linux and Larder make of its log.
fn crash(stage: &mut Stage, look: &dyn Fn(&Path)) {
    stage.death()();
    stage.bury();
    stage.afterwards(look);
}

fn directories(stage: &Stage) -> impl Fn(u64) -> PathBuf + use<> {
    let top = stage.point();
    (0..THREADS).for_each(|n| fs::create_dir(top.join(format!("{n}"))).unwrap());
    larder(args!["sync", &top]).ok();
    move |n| top.join(format!("{}", n % THREADS))
}

fn write_new(path: PathBuf, pieces: usize, len: usize) -> io::Result<File> {
    let mut file = File::create(path)?;
    (0..pieces).try_for_each(|n| file.write_all(&vec![n as u8; len]))?;
    Ok(file)
}

#[test]
fn files_that_are_made_written_synced_renamed_and_removed() {
    if !ready(&[]) {
        return;
    }
    let mut stage = Stage::new("2G");
    let dir = directories(&stage);
    // A file system that has been in use: what is freed now comes back with the next commit only.
    write_new(stage.at("before"), 256, 1 << 20).unwrap();
    larder(args!["sync", stage.point()]).ok();
    fs::remove_file(stage.at("before")).unwrap();
    larder(args!["sync", stage.point()]).ok();
    let earlier = stage.log_stats()["fsyncs"].as_u64().unwrap();
    assert_eq!(earlier, 0, "a sync of everything is none of a file");
    // As dbench's clients: each in its own directory, with a few files at any time.
    let log = load(&stage, 300, |thread, n| {
        let at = |kind: &str, n: u64| dir(thread).join(format!("{kind}{n}"));
        let file = write_new(at("new", n), 4, 8192)?;
        file.sync_all()?;
        fs::rename(at("new", n), at("done", n))?;
        if n >= 4 {
            fs::remove_file(at("done", n - 4))?;
        }
        Ok(())
    });
    let (fsyncs, commits) = commits("mix", &log);
    assert!(fsyncs >= 300 * THREADS && commits * 100 < fsyncs, "{log}");
    crash(&mut stage, &|top| {
        // The last one of each was synced under the name that it was made with.
        for dir in (0..THREADS).map(|thread| top.join(format!("{thread}"))) {
            let whole = fs::read_dir(&dir)
                .unwrap()
                .filter(|e| e.as_ref().unwrap().metadata().unwrap().len() == 32 << 10);
            assert!(whole.count() > 0, "{}", dir.display());
        }
    });
}

#[test]
fn files_that_are_made_and_synced_while_the_file_system_grows() {
    if !ready(&[]) {
        return;
    }
    let mut stage = Stage::new("16G");
    let dir = directories(&stage);
    let log = load(&stage, 60, |thread, n| {
        write_new(dir(thread).join(format!("{n}")), 2, 128 << 10)?.sync_all()
    });
    let (fsyncs, commits) = commits("growth", &log);
    assert!(fsyncs >= 60 * THREADS && commits * 10 < fsyncs, "{log}");
    crash(&mut stage, &|top| {
        let each = |thread| {
            fs::read_dir(top.join(format!("{thread}"))).unwrap().map(|e| e.unwrap().metadata())
        };
        let sizes: Vec<u64> = (0..THREADS).flat_map(each).map(|m| m.unwrap().len()).collect();
        assert!(sizes.len() as u64 == fsyncs && sizes.iter().all(|len| *len == 256 << 10));
    });
}

#[test]
fn files_that_change_their_names_and_directories_and_are_synced() {
    if !ready(&[]) {
        return;
    }
    let mut stage = Stage::new("2G");
    let dir = directories(&stage);
    for thread in 0..THREADS {
        for n in 0..8 {
            write_new(dir(thread).join(format!("{thread}-{n}")), 1, 3000).unwrap();
        }
    }
    larder(args!["sync", stage.point()]).ok();
    let log = load(&stage, 150, |thread, n| {
        // Each file goes from directory to directory, and now and then takes the place of another.
        let name = format!("{thread}-{}", n % 8);
        let (from, to) = (dir(thread + n / 8), dir(thread + n / 8 + 1));
        fs::rename(from.join(&name), to.join(&name))?;
        if n % 8 == 7 {
            // Others may be doing the same.
            let temporary = to.join(format!("temporary-{thread}"));
            write_new(temporary.clone(), 1, 1000)?.sync_all()?;
            fs::rename(temporary, to.join("current"))?;
        }
        if n % 2 == 0 {
            File::open(to.join(&name))?.sync_all()
        } else {
            File::open(&to)?.sync_all()
        }
    });
    let (fsyncs, commits) = commits("renames", &log);
    assert!(fsyncs >= 150 * THREADS && commits * 100 < fsyncs, "{log}");
    crash(&mut stage, &|top| {
        // Wherever they are, there are as many as before: each directory was synced, or the file
        // itself, after each move.
        let names = (0..THREADS).flat_map(|n| fs::read_dir(top.join(format!("{n}"))).unwrap());
        let names: Vec<String> =
            names.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        let own: BTreeSet<&String> =
            names.iter().filter(|n| n.as_bytes()[0].is_ascii_digit()).collect();
        assert_eq!(own.len() as u64, 8 * THREADS, "{names:?}");
        assert_eq!(
            names.iter().filter(|n| n.as_bytes()[0].is_ascii_digit()).count(),
            own.len(),
            "{names:?}"
        );
    });
}
