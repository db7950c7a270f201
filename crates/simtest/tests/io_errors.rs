//! Every read, write and flush of a workload fails in turn: nothing panics or hangs, nothing acknowledged is lost.

use larder_fs::{Error, FileKind, Filesystem, NewInode};
use larder_simtest::device::{Access, AccessKind, Effect, Fault, SimDevice};
use larder_simtest::faults::{self, FaultReport};
use larder_simtest::ops::{Op, parse};
use larder_simtest::runner::Config;
use std::sync::Arc;

const WORKLOAD: &str = "mk A; new A/f; A/f[0,20K)=a; F A/f; new g; g[0,100K)=b; xa g user.k=v; mv A/f A/h; F g; \
                        A/h[4K,12K)=c; rm g; COMMIT; new A/i; A/i+300=d; ln A/i j; trunc A/h 5000; F A/i; mk B; \
                        mv A/h B/h; COMMIT";

fn config() -> Config {
    let mut config = Config::new(1).expect("a new file system");
    config.max_states = 12;
    // Small, so that reads go to the device.
    config.options.cache_size = 1 << 20;
    config
}

fn ops() -> Vec<Op> {
    parse(WORKLOAD).expect("a workload").remove(0)
}

/// Fails each of `count` accesses in turn and returns the reports.
fn each(count: u64, faults: impl Fn(u64) -> Fault + Sync, step: usize) -> Vec<FaultReport> {
    let (config, ops) = (config(), ops());
    let all: Vec<u64> = (0..count).step_by(step).collect();
    let halves: Vec<&[u64]> = all.chunks(all.len().div_ceil(2).max(1)).collect();
    std::thread::scope(|scope| {
        let work = |part: &[u64]| {
            part.iter()
                .map(|n| {
                    let fault = faults(*n);
                    let shown = format!("{fault:?}");
                    faults::run(&config, &ops, &[fault])
                        .unwrap_or_else(|e| panic!("number {n}, {shown}: {e}"))
                })
                .collect::<Vec<_>>()
        };
        let running: Vec<_> = halves.into_iter().map(|part| scope.spawn(move || work(part))).collect();
        running.into_iter().flat_map(|t| t.join().expect("no panic")).collect()
    })
}

#[test]
fn every_write_fails_once_or_for_ever() {
    let writes = faults::accesses(&config(), &ops()).expect("runs without faults").writes;
    assert!(writes > 20, "{writes}");
    for effect in [Effect::None, Effect::Half, Effect::All] {
        let step = if effect == Effect::None { 1 } else { 3 };
        let reports = each(writes, |n| Fault::nth(n, Access::is_write).with_effect(effect), step);
        assert!(reports.iter().all(|r| r.struck));
        assert!(reports.iter().filter(|r| r.failed.is_some()).count() > reports.len() / 3);
        assert!(reports.iter().any(|r| r.turned_read_only));
    }
    each(writes, |n| Fault::nth(n, Access::is_write).forever(), 2);
}

#[test]
fn every_flush_fails_and_is_final() {
    let flushes = faults::accesses(&config(), &ops()).expect("runs without faults").flushes;
    assert!(flushes > 5, "{flushes}");
    let reports = each(flushes, |n| Fault::nth(n, |a| a.kind == AccessKind::Flush), 1);
    assert!(reports.iter().all(|r| r.struck && r.failed.is_some()), "{reports:?}");
    each(flushes, |n| Fault::nth(n, |a| a.kind == AccessKind::Flush).forever(), 2);
}

#[test]
fn every_read_fails_once_or_for_ever() {
    let reads = faults::accesses(&config(), &ops()).expect("runs without faults").reads;
    assert!(reads > 5, "{reads}");
    let step = usize::try_from(reads / 60).expect("small") + 1;
    each(reads, |n| Fault::nth(n, |a| a.kind == AccessKind::Read), step);
    each(reads, |n| Fault::nth(n, |a| a.kind == AccessKind::Read).forever(), step * 2);
}

#[test]
fn a_failed_data_write_is_told_at_fsync_until_the_data_are_written_again() {
    let config = config();
    let device = Arc::new(SimDevice::new(config.base.clone()));
    let fs = Filesystem::open(device.clone(), config.options).expect("open");
    let kind = FileKind::Regular;
    let new = NewInode { kind, perm: 0o644, uid: 0, gid: 0, rdev: 0, target: &[], xattrs: &[] };
    let id = fs.create(fs.root(), b"f", &new).expect("create").id;
    let other = fs.create(fs.root(), b"g", &new).expect("create").id;
    let data = vec![0x5a; 64 << 10];
    fs.write(id, 0, &data).expect("write");
    fs.fsync(id, false).expect("fsync");
    let lost = vec![0x77; 64 << 10];
    fs.write(id, 0, &lost).expect("a buffered write succeeds");
    fs.write(other, 0, &data).expect("write");
    // The next write of file data is the one that fails.
    device.inject(Fault::nth(0, Access::is_write));
    assert!(fs.fsync(id, false).is_err(), "the write of its data failed");
    device.heal();
    for _ in 0..2 {
        let again = fs.fsync(id, false);
        assert!(matches!(again, Err(Error::DataLost | Error::Volume(_))), "still lost: {again:?}");
    }
    assert!(!fs.info().read_only, "a failed data write does not stop the others");
    fs.fsync(other, false).expect("another file is not concerned");
    fs.write(id, 0, &lost).expect("write again");
    fs.fsync(id, false).expect("the range was written again");
    let mut back = vec![0; lost.len()];
    assert_eq!(fs.read(id, 0, &mut back).expect("read"), lost.len());
    assert_eq!(back, lost);
    fs.close().expect("close");
}

#[test]
fn a_failed_flush_turns_it_read_only_and_says_why() {
    let config = config();
    let device = Arc::new(SimDevice::new(config.base.clone()));
    let fs = Filesystem::open(device.clone(), config.options).expect("open");
    let kind = FileKind::Directory;
    let new = NewInode { kind, perm: 0o755, uid: 0, gid: 0, rdev: 0, target: &[], xattrs: &[] };
    fs.create(fs.root(), b"kept", &new).expect("create");
    fs.sync().expect("sync");
    fs.create(fs.root(), b"lost", &new).expect("create");
    device.inject(Fault::nth(0, |a| a.kind == AccessKind::Flush));
    assert!(fs.sync().is_err());
    device.heal();
    assert!(fs.info().read_only);
    assert!(fs.sync().is_err(), "a failed flush is final");
    match fs.create(fs.root(), b"more", &new) {
        Err(Error::ReadOnly(Some(why))) => assert!(why.contains("flush"), "{why}"),
        other => panic!("{other:?}"),
    }
    fs.lookup(fs.root(), b"kept").expect("what is durable can still be read");
}
