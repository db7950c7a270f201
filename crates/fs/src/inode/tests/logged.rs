//! What an `fsync` costs, and when it has to be a commit.

use super::{Memory, World, new, options};
use crate::mkfs::{MkfsOptions, mkfs};
use crate::older::{LogCopies, LogEntry, LogStart};
use crate::{Error, FileKind, Filesystem, LogStats, Tuning};
use larder_format::Physical;
use larder_volume::Device;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

fn log(w: &World) -> LogStats {
    w.fs.stats().log
}

/// Opens what a power cut leaves.
fn cut(w: &World) -> World {
    let device = w.device.copy();
    let fs = Filesystem::open(device.clone(), super::options()).unwrap();
    World { device, fs }
}

fn content(w: &World, name: &str) -> Vec<u8> {
    let attr = w.find(w.root(), name).unwrap();
    let mut data = vec![0; attr.size as usize];
    let n = w.fs.read(attr.id, 0, &mut data).unwrap();
    data.truncate(n);
    data
}

#[test]
fn an_fsync_is_no_commit_and_survives() {
    let w = World::new();
    let before = w.fs.stats();
    let f = w.file(w.root(), "f");
    for n in 0..20u8 {
        w.fs.write(f, u64::from(n) * 10_000, &[n + 1; 10_000]).unwrap();
        w.fs.fsync(f, false).unwrap();
        let there = content(&cut(&w), "f");
        assert_eq!(there.len(), (usize::from(n) + 1) * 10_000);
        assert!(
            there
                .chunks(10_000)
                .enumerate()
                .all(|(i, c)| c.iter().all(|b| usize::from(*b) == i + 1))
        );
    }
    let after = w.fs.stats();
    assert_eq!(after.commits, before.commits);
    let s = after.log;
    assert_eq!((s.fsyncs, s.fsyncs_logged, s.batches), (20, 20, 20));
    // One after the other, each takes two flushes and one superblock.
    assert_eq!((s.flushes, s.superblocks), (40, 20));
    w.check();
    let w = w.reopen();
    assert_eq!(content(&w, "f").len(), 200_000);
}

#[test]
fn what_is_durable_costs_nothing() {
    let w = World::new();
    let f = w.file(w.root(), "f");
    let g = w.file(w.root(), "g");
    w.fs.write(f, 0, b"something").unwrap();
    w.fs.fsync(f, false).unwrap();
    let before = (w.fs.stats().device_writes, w.fs.stats().device_flushes);
    w.fs.fsync(f, false).unwrap();
    w.fs.fsync(f, true).unwrap();
    assert_eq!((w.fs.stats().device_writes, w.fs.stats().device_flushes), before);
    w.fs.sync().unwrap();
    let before = (w.fs.stats().device_writes, w.fs.stats().device_flushes);
    for id in [f, g, w.root()] {
        w.fs.fsync(id, false).unwrap();
    }
    assert_eq!((w.fs.stats().device_writes, w.fs.stats().device_flushes), before);
    assert_eq!(log(&w).fsyncs_with_nothing_to_do, 3);
    // A new name is a change.
    w.fs.link(f, w.root(), b"h").unwrap();
    w.fs.fsync(f, false).unwrap();
    assert!(w.fs.stats().device_flushes > before.1);
    assert_eq!(content(&cut(&w), "h"), b"something");
}

#[test]
fn a_new_subvolume_is_committed() {
    let w = World::new();
    let s = w.fs.create_subvolume(w.root(), b"s", &new(FileKind::Directory)).unwrap();
    let f = w.file(s.id, "f");
    w.fs.fsync(f, false).unwrap();
    let c = cut(&w);
    let s = c.find(c.root(), "s").unwrap();
    assert!(c.find(s.id, "f").is_ok());
    // The subvolume has a log from the next transaction on.
    let logged = log(&w).fsyncs_logged;
    w.fs.write(f, 0, b"x").unwrap();
    w.fs.fsync(f, false).unwrap();
    assert_eq!(log(&w).fsyncs_logged, logged + 1);
}

#[test]
fn many_threads_share_batches() {
    let w = World::new();
    let files: Vec<_> = (0..8).map(|n| w.file(w.root(), format!("f{n}"))).collect();
    w.fs.sync().unwrap();
    std::thread::scope(|s| {
        for f in &files {
            s.spawn(|| {
                for n in 0..50u64 {
                    w.fs.write(*f, n * 4096, &[n as u8 + 1; 4096]).unwrap();
                    w.fs.fsync(*f, false).unwrap();
                }
            });
        }
    });
    let s = log(&w);
    assert_eq!(s.fsyncs_logged, 400);
    assert!(s.batches <= 400 && s.superblocks <= s.batches);
    let c = cut(&w);
    for n in 0..files.len() {
        let data = content(&c, &format!("f{n}"));
        assert_eq!(data.len(), 50 * 4096);
        assert!(
            data.chunks(4096).enumerate().all(|(i, c)| c.iter().all(|b| usize::from(*b) == i + 1))
        );
    }
    c.check();
    w.check();
    assert_eq!(w.fs.stats().metadata_reserved, 0);
}

#[test]
fn a_log_that_was_given_up_is_not_written_any_more() {
    let w = World::new();
    let (f, g) = (w.file(w.root(), "f"), w.file(w.root(), "g"));
    w.fs.sync().unwrap();
    for id in [f, g] {
        w.fs.write(id, 0, b"something").unwrap();
    }
    let core = &w.fs.core;
    let inodes = [core.inode(f).unwrap(), core.inode(g).unwrap()];
    for inode in &inodes {
        crate::file::fsync_data(core, inode).unwrap();
    }
    let before = log(&w);
    crate::log::lead_after_giving_up(core, &inodes);
    // The log's content may be incomplete.
    assert_eq!(log(&w), before);
    // A caller that waits for it gets a commit.
    let commits = w.fs.stats().commits;
    w.fs.fsync(f, false).unwrap();
    assert_eq!(w.fs.stats().commits, commits + 1);
    assert_eq!(content(&cut(&w), "g"), b"something");
}

/// A device whose reads can be made to fail.
#[derive(Debug)]
struct Unreadable {
    memory: Arc<Memory>,
    fails: AtomicBool,
}

impl Device for Unreadable {
    fn name(&self) -> String {
        self.memory.name()
    }
    fn size(&self) -> u64 {
        self.memory.size()
    }
    fn is_read_only(&self) -> bool {
        false
    }
    fn read_at(&self, at: Physical, buf: &mut [u8]) -> std::io::Result<()> {
        if self.fails.load(Ordering::Relaxed) {
            return Err(std::io::Error::other("as a test"));
        }
        self.memory.read_at(at, buf)
    }
    fn write_at(&self, at: Physical, data: &[u8]) -> std::io::Result<()> {
        self.memory.write_at(at, data)
    }
    fn flush(&self) -> std::io::Result<()> {
        self.memory.flush()
    }
}

#[test]
fn an_fsync_after_one_that_could_not_read_has_everything() {
    let device =
        Arc::new(Unreadable { memory: Memory::new(256 << 20), fails: AtomicBool::new(false) });
    mkfs(&*device, &MkfsOptions::default()).unwrap();
    let fs = Filesystem::open(device.clone(), options()).unwrap();
    // The extents of each fill several leaves.
    let [f, _] = [b"f", b"g"].map(|name| {
        let id = fs.create(fs.root(), name, &new(FileKind::Regular)).unwrap().id;
        for n in 0..600 {
            fs.write(id, n * 8192, &[1; 4096]).unwrap();
        }
        id
    });
    fs.close().unwrap();
    let fs = Filesystem::open(device.clone(), options()).unwrap();
    fs.write(f, 0, &[2; 4096]).unwrap();
    crate::file::fsync_data(&fs.core, &fs.core.inode(f).unwrap()).unwrap();
    // The last leaf of its extents has not been read yet.
    device.fails.store(true, Ordering::Relaxed);
    assert!(matches!(fs.fsync(f, false), Err(Error::Volume(_))));
    device.fails.store(false, Ordering::Relaxed);
    fs.write(f, 8192, &[3; 4096]).unwrap();
    fs.fsync(f, false).unwrap();
    let w = World { device: device.memory.clone(), fs };
    let there = content(&cut(&w), "f");
    let has = |at: usize, byte: u8| there[at..at + 4096].iter().all(|b| *b == byte);
    assert!(has(0, 2) && has(8192, 3) && has(16384, 1));
}

#[test]
fn switched_back_to_what_linux_once_did_it_is_as_durable() {
    for tuning in [
        Tuning { log_copies: LogCopies::Locked, ..Tuning::default() },
        Tuning { log_start: LogStart::AfterCommit, ..Tuning::default() },
        Tuning { log_entry: LogEntry::Alone, ..Tuning::default() },
    ] {
        let w = World::tuned(tuning);
        let ids = [0u8, 1, 2].map(|n| w.file(w.root(), format!("f{n}")));
        w.fs.sync().unwrap();
        for round in 0..12u8 {
            std::thread::scope(|threads| {
                for (n, id) in ids.into_iter().enumerate() {
                    let fs = &w.fs;
                    threads.spawn(move || {
                        // Data that is overwritten again and again has had checksums in the log
                        // before.
                        let at = u64::from(round % 4) * 10_000;
                        fs.write(id, at, &[round * 3 + n as u8 + 1; 10_000]).unwrap();
                        fs.fsync(id, false).unwrap();
                    });
                }
            });
            if round == 7 {
                w.fs.sync().unwrap();
            }
            let after = cut(&w);
            for n in 0..3u8 {
                let there = content(&after, &format!("f{n}"));
                let last = there.chunks(10_000).nth(usize::from(round % 4)).unwrap();
                assert!(last.iter().all(|b| *b == round * 3 + n + 1), "round {round}");
            }
            after.check();
        }
        assert_eq!(log(&w).fsyncs_logged, 36, "{:?}", log(&w));
        w.check();
    }
}
