//! Transactions are pipelined: while one is written, the next one takes changes. Gates on the
//! device hold the commit at each of its stages, so that the overlap is there each time and not by
//! luck; then the power goes everywhere.

use larder_fs::Filesystem;
use larder_simtest::device::{Access, AccessKind, SimDevice};
use larder_simtest::judge::Depth;
use larder_simtest::model::{Domain, History};
use larder_simtest::ops::parse;
use larder_simtest::runner::{Config, Run, judge_run, perform, show};
use larder_simtest::workload::prefix;
use std::sync::Arc;
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(60);

fn ops(text: &str) -> Vec<larder_simtest::ops::Op> {
    parse(text).expect("a workload").remove(0)
}

/// A commit of thread 0's changes is held at the first access that matches. Thread 1 works
/// meanwhile; its fsync begins while the first commit is still held.
fn overlap(holds: fn(&Access) -> bool) {
    let mut config = Config::new(1).expect("a new file system");
    config.depth = Depth { emptied: 0.0, recovered: 0.1, ours: 0.0, checked: 0.02, kernel: 0.0 };
    if !larder_simtest::oracle::need(&[larder_simtest::oracle::Need::BtrfsProgs]) {
        config.depth.checked = 0.0;
    }
    let world = show(&config.base, &config.options).expect("a fresh file system");
    let device = Arc::new(SimDevice::new(config.base.clone()));
    let fs = Filesystem::open(device.clone(), config.options.clone()).expect("open");
    let first = Domain::new(prefix(0), world.clone());
    let second = Domain::new(prefix(1), world);
    let (first, _) =
        perform(&fs, &device, first, &ops("mk t0_A; new t0_A/f; xa t0_A/f user.k=v; new t0_g"))
            .expect("before");
    let gate = device.gate(holds);
    let (first, second) = std::thread::scope(|scope| {
        let commit =
            scope.spawn(|| perform(&fs, &device, first, &ops("COMMIT; mv t0_g t0_A/h; F t0_A")));
        assert!(gate.wait_for(1, PATIENCE), "the commit arrives at the gate");
        // Held where it is, the commit must not stop anybody.
        let text = "mk t1_B; new t1_B/f; ln t1_B/f t1_l; mode t1_B/f 600; mv t1_B/f t1_B/g; rm \
            t1_l; new t1_h";
        let (second, _) =
            perform(&fs, &device, second, &ops(text)).expect("changes during a commit");
        let fsync =
            scope.spawn(|| perform(&fs, &device, second, &ops("F t1_B/g; new t1_i; F t1_i")));
        gate.open();
        let first = commit.join().expect("no panic").expect("the first thread");
        let second = fsync.join().expect("no panic").expect("the second thread");
        (first.0, second.0)
    });
    drop(gate);
    let mut history = History { domains: vec![first, second] };
    let begin = device.mark();
    fs.close().expect("close");
    history.close(begin, device.mark());
    let outcome = judge_run(&config, "pipeline", &Run { recording: device.recording(), history });
    outcome.assert_sound();
    assert!(outcome.distinct.len() > 40, "{outcome}");
}

#[test]
fn changes_while_nodes_are_written() {
    overlap(|a| a.is_write() && !a.is_superblock());
}

#[test]
fn changes_while_the_superblock_is_written() {
    overlap(|a| a.is_write() && a.is_superblock());
}

#[test]
fn changes_while_the_device_flushes() {
    overlap(|a| a.kind == AccessKind::Flush);
}
