//! Programs that rely on `fsync`, and a daemon that is killed in the middle of their work: whatever
//! was acknowledged is there after the log was replayed, by Larder and by Linux.
//!
//! `LARDER_SCALE=20` kills each of them at 20 different points.

mod common;

use common::crash::{Acknowledged, KillPoints, Stage, ready};
use larder_simtest::oracle::Need;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Mutex, mpsc};

/// A script of transactions, each of which prints its number once it is durable.
fn transactions(journal: &str, synchronous: &str, count: u64) -> String {
    let mut script = format!(
        ".bail on\nPRAGMA journal_mode={journal};\nPRAGMA synchronous={synchronous};\nPRAGMA \
            wal_autocheckpoint=20;\n\
         CREATE TABLE t (n INTEGER PRIMARY KEY, len INTEGER, text TEXT);\nCREATE TABLE total (n \
         INTEGER, len INTEGER);\n\
         INSERT INTO total VALUES (0, 0);\n"
    );
    for n in 1..=count {
        let len = 10 + n * 397 % 3000;
        script += &format!(
            "BEGIN; INSERT INTO t VALUES ({n}, {len}, printf('%0{len}d', {n})); UPDATE total SET \
             n = n + 1, len = len + {len}; COMMIT;\n.print done {n}\n"
        );
    }
    script
}

fn sqlite(database: &Path, question: &str) -> String {
    let out = Command::new("sqlite3")
        .args(["-bail", "-batch"])
        .arg(database)
        .arg(question)
        .output()
        .unwrap();
    assert!(out.status.success(), "{question}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap().trim().to_owned()
}

/// Kills the daemon under a database with this kind of journal. Of the last transactions `missing`
/// may be missing.
fn database(journal: &str, synchronous: &str, missing: u64) {
    if !ready(&[Need::Sqlite]) {
        return;
    }
    for at in (KillPoints { first: 40, step: 17 }).all() {
        let mut stage = Stage::new("256M");
        let script = stage.image().with_extension("sql");
        fs::write(&script, transactions(journal, synchronous, 5000)).unwrap();
        // Line by line, so that each transaction counts at once.
        let mut program = Command::new("stdbuf")
            .args(["-oL", "sqlite3", "-batch"])
            .arg(stage.at("db"))
            .stdin(File::open(&script).unwrap())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(program.stdout.take().unwrap()).lines();
        assert_eq!(lines.next().unwrap().unwrap(), journal);
        let (death, mut last) = (stage.death(), 0);
        for line in lines.map(Result::unwrap) {
            let Some(n) = line.strip_prefix("done ") else { continue };
            last = n.parse().unwrap();
            if last == at / 2 {
                let log = stage.log_stats();
                assert!(log["fsyncs_logged"].as_u64() > Some(0), "{log}");
            }
            if last == at {
                death();
            }
        }
        let out = program.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(
            !out.status.success() && last >= at,
            "{last} transactions, then {}: {said}",
            out.status
        );
        stage.bury();
        println!("{journal} {synchronous}, killed after {at}, {last} acknowledged");
        stage.afterwards(&|top| {
            let db = top.join("db");
            assert_eq!(sqlite(&db, "PRAGMA integrity_check"), "ok");
            assert_eq!(
                sqlite(&db, "SELECT count(*) FROM t WHERE text != printf('%0' || len || 'd', n)"),
                "0"
            );
            let found = sqlite(&db, "SELECT count(*), max(n), sum(len) FROM t");
            assert_eq!(found, sqlite(&db, "SELECT n, n, len FROM total"));
            let count: u64 = found.split('|').next().unwrap().parse().unwrap();
            // The one after the last may have become durable without anybody having been told.
            assert!(
                (last - missing..=last + 1).contains(&count),
                "{count} rows, {last} acknowledged"
            );
        });
    }
}

#[test]
fn a_database_with_a_write_ahead_log_has_all_it_acknowledged() {
    database("wal", "FULL", 0);
}

#[test]
fn a_database_with_a_rollback_journal_has_all_it_acknowledged() {
    database("truncate", "FULL", 0);
    database("persist", "FULL", 0);
    database("delete", "EXTRA", 0);
    // Here the program does not sync the directory from which it has removed the journal: found
    // again, it is rolled back.
    database("delete", "FULL", 1);
}

/// How far a message has come, as far as was acknowledged.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fate {
    Delivered,
    BeingRemoved,
    Removed,
}

/// Which message of which thread.
type Number = (u64, u64);

type Mailbox = Mutex<BTreeMap<Number, Fate>>;

fn message((thread, n): Number) -> Vec<u8> {
    let len = (n * 797 + thread * 1311) % 20_000;
    (0..len).map(|i| (i / 7 * 31 + n * 5 + thread) as u8).collect()
}

/// Delivers messages: each is whole under its name, or not there.
fn deliver(stage: &Stage, thread: u64, mailbox: &Mailbox, acknowledged: &Acknowledged<'_>) {
    let path = |dir: &str, n: u64| stage.at(&format!("{dir}/{thread}-{n}"));
    let sync_dir = || File::open(stage.at("new"))?.sync_all();
    acknowledged.until_the_end(|n| {
        let mut file = File::create(path("tmp", n))?;
        file.write_all(&message((thread, n)))?;
        file.sync_all()?;
        fs::rename(path("tmp", n), path("new", n))?;
        sync_dir()?;
        mailbox.lock().unwrap().insert((thread, n), Fate::Delivered);
        acknowledged.one();
        if n % 5 == 4 {
            let old = n - 2;
            mailbox.lock().unwrap().insert((thread, old), Fate::BeingRemoved);
            fs::remove_file(path("new", old))?;
            sync_dir()?;
            mailbox.lock().unwrap().insert((thread, old), Fate::Removed);
            acknowledged.one();
        }
        Ok(())
    });
}

/// Four threads deliver until the daemon's end, which `end` brings about after `at`
/// acknowledgements; then what is there.
fn mail(mut stage: Stage, at: u64, end: &(dyn Fn() + Sync)) {
    for dir in ["tmp", "new"] {
        fs::create_dir(stage.at(dir)).unwrap();
    }
    let mailbox = Mailbox::default();
    let halfway = || {
        let log = stage.log_stats();
        assert!(log["fsyncs_logged"].as_u64() > Some(0), "{log}");
        // Nothing shares extents here.
        assert!(log["csum_items"].as_u64() > Some(0) && log["csum_ranges_searched"] == 0, "{log}");
    };
    let acknowledged = Acknowledged::new(at, &halfway, end);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (stage, mailbox, acknowledged) = (&stage, &mailbox, &acknowledged);
            scope.spawn(move || deliver(stage, thread, mailbox, acknowledged));
        }
    });
    println!("killed after {at}, {} acknowledged", acknowledged.count());
    stage.bury();
    let mailbox = mailbox.into_inner().unwrap();
    stage.afterwards(&|top| {
        let mut found = BTreeMap::new();
        for dir in ["new", "tmp"] {
            for entry in fs::read_dir(top.join(dir)).unwrap().map(Result::unwrap) {
                let name = entry.file_name().into_string().unwrap();
                let (thread, n) = name.split_once('-').unwrap();
                let key = (thread.parse().unwrap(), n.parse().unwrap());
                // Its data was durable before it got its name.
                if dir == "new" {
                    assert!(fs::read(entry.path()).unwrap() == message(key), "{name} is not whole");
                }
                assert_eq!(found.insert(key, dir), None, "{name} is there twice");
            }
        }
        for (key, fate) in &mailbox {
            match fate {
                Fate::Delivered => assert_eq!(found.get(key), Some(&"new"), "{key:?}"),
                Fate::BeingRemoved => assert_ne!(found.get(key), Some(&"tmp"), "{key:?}"),
                Fate::Removed => assert_eq!(found.get(key), None, "{key:?}"),
            }
        }
    });
}

#[test]
fn delivered_mail_is_there_after_the_daemon_was_killed() {
    if !ready(&[]) {
        return;
    }
    for at in (KillPoints { first: 200, step: 61 }).all() {
        let stage = Stage::new("256M");
        let death = stage.death();
        mail(stage, at, &death);
    }
}

#[test]
fn delivered_mail_is_there_after_the_daemon_had_too_little_memory() {
    if !ready(&[Need::MemoryCgroup]) {
        return;
    }
    for at in (KillPoints { first: 100, step: 61 }).all() {
        let stage = Stage::with_limit("1G", 160 << 20);
        // What is written counts as the daemon's, and is more than it may have.
        let glutton = stage.at("glutton");
        let (start, started) = mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                if started.recv().is_ok() {
                    let Ok(file) = File::create(glutton) else { return };
                    let block = vec![7; 1 << 20];
                    let wrote =
                        (0..600).take_while(|n| file.write_all_at(&block, n << 20).is_ok()).count();
                    println!("{wrote} MiB were too much");
                }
            });
            // The sender goes with this, whatever happens.
            mail(stage, at, &move || start.send(()).expect("it waits"));
        });
    }
}
