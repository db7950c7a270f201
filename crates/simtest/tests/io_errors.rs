//! Every read, write and flush of a workload fails in turn: nothing panics or hangs, nothing
//! acknowledged is lost.

use larder_fs::{Error, FileKind, Filesystem, NewInode};
use larder_simtest::data;
use larder_simtest::device::{Access, AccessKind, Effect, Fault, SimDevice};
use larder_simtest::faults::{self, FaultReport};
use larder_simtest::formats::Format;
use larder_simtest::judge::Depth;
use larder_simtest::ops::{Op, line, parse};
use larder_simtest::oracle::{Need, need};
use larder_simtest::runner::Config;
use std::sync::{Arc, mpsc};
use std::time::Duration;

const WORKLOAD: &str = "mk A; new A/f; A/f[0,20K)=a; F A/f; new g; g[0,100K)=b; xa g user.k=v; mv \
    A/f A/h; F g; A/h[4K,12K)=c; rm g; COMMIT; new A/i; A/i+300=d; ln A/i j; trunc A/h 5000; F \
    A/i; mk B; mv A/h B/h; COMMIT";

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
    each_of(&config(), &ops(), count, faults, step)
}

/// As [`each`], of another workload.
fn each_of(
    config: &Config,
    ops: &[Op],
    count: u64,
    faults: impl Fn(u64) -> Fault + Sync,
    step: usize,
) -> Vec<FaultReport> {
    let all: Vec<u64> = (0..count).step_by(step).collect();
    let halves: Vec<&[u64]> = all.chunks(all.len().div_ceil(2).max(1)).collect();
    std::thread::scope(|scope| {
        let work = |part: &[u64]| {
            part.iter()
                .map(|n| {
                    let fault = faults(*n);
                    let shown = format!("{fault:?}");
                    faults::run(config, ops, &[fault])
                        .unwrap_or_else(|e| panic!("number {n}, {shown}: {e}\n{}", line(ops)))
                })
                .collect::<Vec<_>>()
        };
        let running: Vec<_> =
            halves.into_iter().map(|part| scope.spawn(move || work(part))).collect();
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

/// Data that could not be written leaves a hole, which has its item where holes have items.
#[test]
fn what_could_not_be_written_is_a_sound_hole() {
    if !need(&[Need::BtrfsProgs]) {
        return;
    }
    let format = Format::named("explicit-holes").expect("a kind of image");
    let mut config = config().on(&format).expect("a new file system");
    config.depth = Depth { checked: 1.0, ..Depth::LOOK };
    config.max_states = 4;
    let ops = "new f; f[0,64K)=a; COMMIT; f[64K,128K)=b; F f; f[200K,300K)=c; COMMIT; new g; \
        g[5000,9000)=d; g[100K,120K)=e; COMMIT; g[120K,130K)=f; F g; trunc g 1M; COMMIT";
    let ops = parse(ops).expect("a workload").remove(0);
    let writes = faults::accesses(&config, &ops).expect("runs without faults").writes;
    let reports = each_of(
        &config,
        &ops,
        writes,
        |n| Fault::nth(n, Access::is_write).with_effect(Effect::None),
        1,
    );
    assert!(reports.iter().all(|r| r.struck));
}

/// In-place writes, reserved space and every method of compression: each access fails in turn, or
/// panics.
#[test]
fn every_access_fails_however_data_is_stored() {
    let in_place = "new f; nocow f; f[0,64K)=a; F f; f[5000,30K)=b; F f; new g; alloc g[0,100K); \
        F g; g[0,20K)=c; F g; g[9K,50001)=D; F g; alloc= f[64K,128K); f+9000=e; F f; zero \
        g[4K,80K); g[0,30K)=f; COMMIT; punch g[5000,20K); trunc f 12K; F f; g[0,100K)=h; rm f; \
        COMMIT";
    let packed = "new f; f[0,200K)=a; F f; f[100K,180K)=B; f[50K,60K)=c; F f; new g; g[0,3000)=d; \
        F g; g+3000=e; F g; trunc f 148K; F f; trunc g 4K; F g; f[10,20)=g; punch f[30K,140K); F \
        f; rm g; COMMIT";
    let mut failed = 0;
    for (text, settings) in
        [(in_place, 0), (in_place, 3), (packed, 1), (packed, 2), (packed, 3), (packed, 5)]
    {
        let mut config = config();
        data::settings(settings, &mut config.options);
        let ops = parse(text).expect("a workload").remove(0);
        let counts = faults::accesses(&config, &ops).expect("runs without faults");
        let nth = |n, effect| Fault::nth(n, Access::is_write).with_effect(effect);
        let mut reports = each_of(&config, &ops, counts.writes, |n| nth(n, Effect::None), 1);
        reports.extend(each_of(&config, &ops, counts.writes, |n| nth(n, Effect::Half), 3));
        reports.extend(each_of(&config, &ops, counts.writes, |n| nth(n, Effect::All), 3));
        reports.extend(each_of(
            &config,
            &ops,
            counts.writes,
            |n| nth(n, Effect::None).panicking(),
            2,
        ));
        assert!(reports.iter().all(|r| r.struck));
        let is = |kind: AccessKind| move |a: &Access| a.kind == kind;
        each_of(&config, &ops, counts.reads, |n| Fault::nth(n, is(AccessKind::Read)), 3);
        each_of(&config, &ops, counts.discards, |n| Fault::nth(n, is(AccessKind::Discard)), 3);
        failed += reports.iter().filter(|r| r.failed.is_some()).count();
    }
    assert!(failed > 100, "{failed}");
}

#[test]
fn every_flush_fails_and_is_final() {
    let flushes = faults::accesses(&config(), &ops()).expect("runs without faults").flushes;
    assert!(flushes > 5, "{flushes}");
    let reports = each(flushes, |n| Fault::nth(n, |a| a.kind == AccessKind::Flush), 1);
    assert!(reports.iter().all(|r| r.struck && r.failed.is_some()), "{reports:?}");
    each(flushes, |n| Fault::nth(n, |a| a.kind == AccessKind::Flush).forever(), 2);
}

/// So does one that no caller has asked for: the next flush may be reported as good.
#[test]
fn a_flush_ahead_that_fails_is_final_too() {
    let mut config = config();
    config.options.tuning.early_flush_bytes = Some(4096);
    let is_flush = |a: &Access| a.kind == AccessKind::Flush;
    let needed = faults::accesses(&self::config(), &ops()).expect("runs without faults").flushes;
    // How many there are depends on how fast the thread is that flushes ahead.
    let counts: Vec<u64> = (0..5)
        .map(|_| faults::accesses(&config, &ops()).expect("runs without faults").flushes)
        .collect();
    let most = *counts.iter().max().expect("five");
    assert!(most > needed, "none was ahead: {counts:?}, {needed} needed");
    let mut reports = each_of(&config, &ops(), most, |n| Fault::nth(n, is_flush), 1);
    reports.extend(each_of(&config, &ops(), most, |n| Fault::nth(n, is_flush).panicking(), 1));
    reports.extend(each_of(&config, &ops(), most, |n| Fault::nth(n, is_flush).forever(), 2));
    assert!(reports.iter().filter(|r| r.struck).count() > reports.len() / 2);
    assert!(reports.iter().all(|r| !r.struck || r.failed.is_some()), "{reports:?}");
}

#[test]
fn every_read_fails_once_or_for_ever() {
    let reads = faults::accesses(&config(), &ops()).expect("runs without faults").reads;
    assert!(reads > 5, "{reads}");
    let step = usize::try_from(reads / 60).expect("small") + 1;
    each(reads, |n| Fault::nth(n, |a| a.kind == AccessKind::Read), step);
    each(reads, |n| Fault::nth(n, |a| a.kind == AccessKind::Read).forever(), step * 2);
}

/// A panic anywhere (in write-back, in the committer, in a caller) ends like a failure: each waiter
/// is told, what was acknowledged is there, and after a write that panicked nothing is written any
/// more.
#[test]
fn every_access_may_panic() {
    let counts = faults::accesses(&config(), &ops()).expect("runs without faults");
    let writes = each(counts.writes, |n| Fault::nth(n, Access::is_write).panicking(), 1);
    assert!(writes.iter().all(|r| r.struck && r.failed.is_some()));
    assert!(writes.iter().filter(|r| r.turned_read_only).count() > writes.len() / 2);
    let flushes =
        each(counts.flushes, |n| Fault::nth(n, |a| a.kind == AccessKind::Flush).panicking(), 1);
    assert!(flushes.iter().all(|r| r.struck && r.failed.is_some()));
    let step = usize::try_from(counts.reads / 60).expect("small") + 1;
    each(counts.reads, |n| Fault::nth(n, |a| a.kind == AccessKind::Read).panicking(), step);
}

/// Write-back on its own threads panics: the fsync and the unmount that wait for it end.
#[test]
fn nobody_waits_for_a_write_back_that_panicked() {
    let mut config = config();
    config.options.cache_size = 8 << 20;
    let device = Arc::new(SimDevice::new(config.base.clone()));
    let fs = Filesystem::open(device.clone(), config.options).expect("open");
    let kind = FileKind::Regular;
    let new = NewInode { kind, perm: 0o644, uid: 0, gid: 0, rdev: 0, target: &[], xattrs: &[] };
    let id = fs.create(fs.root(), b"f", &new).expect("create").id;
    fs.sync().expect("sync");
    let gate = device.gate(Access::is_write);
    device.inject(Fault::nth(0, Access::is_write).panicking());
    let piece = vec![0x5a; 600 << 10];
    // Nearly all that may be delayed: the threads of write-back begin, and nobody else does.
    for n in 0..5 {
        fs.write(id, n * piece.len() as u64, &piece).expect("write");
    }
    assert!(gate.wait_for(1, Duration::from_secs(60)), "a thread of write-back is at the device");
    let (done, ended) = mpsc::channel();
    let waiting = {
        let fs = fs.clone();
        std::thread::spawn(move || {
            let synced = fs.fsync(id, false);
            let closed = fs.close();
            done.send((synced, closed)).expect("the test listens");
        })
    };
    gate.open();
    let (synced, closed) =
        ended.recv_timeout(Duration::from_secs(60)).expect("neither fsync nor unmount hangs");
    assert!(matches!(synced, Err(Error::DataLost | Error::ReadOnly(_))), "{synced:?}");
    assert!(matches!(closed, Err(Error::ReadOnly(_))), "{closed:?}");
    waiting.join().expect("no panic");
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
