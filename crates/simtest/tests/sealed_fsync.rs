//! `fsync` around a seal: what an inode has in a transaction that is being committed is durable
//! when it returns, whether or not the next transaction has changed the inode again. A gate on the
//! device holds the commit at one access, so that the overlap is there each time; then the power
//! goes everywhere, also at the moment at which `fsync` returned.
//!
//! The same with random walks: one thread's commit is held while another one works and syncs, so
//! that the next transaction's log is written, and waits, between any two steps of a commit.
//! `LARDER_SCALE=20` takes 20 times as many.

use larder_fs::{Fault, Filesystem};
use larder_simtest::device::{Access, AccessKind, Gate, SimDevice};
use larder_simtest::judge::Depth;
use larder_simtest::model::{Domain, History};
use larder_simtest::ops::{Op, line, parse};
use larder_simtest::runner::{Config, Outcome, Run, judge_run, perform, show};
use larder_simtest::workload::{prefix, random_ops};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(60);

fn ops(text: &str) -> Vec<Op> {
    parse(text).expect("a workload").remove(0)
}

/// Holds the access that is number `n` (from 0) of those that match, and no other.
fn hold(device: &Arc<SimDevice>, n: u64, matches: fn(&Access) -> bool) -> Gate {
    let seen = AtomicU64::new(0);
    device.gate(move |a| matches(a) && seen.fetch_add(1, Ordering::Relaxed) == n)
}

/// Returns when something has happened, which it is bound to.
fn until(what: &str, mut happened: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !happened() {
        assert!(begin.elapsed() < PATIENCE, "never: {what}");
        std::thread::yield_now();
    }
}

struct Stage {
    config: Config,
    device: Arc<SimDevice>,
    fs: Arc<Filesystem>,
    domains: Vec<Domain>,
}

impl Stage {
    fn new(domains: usize, change: impl FnOnce(&mut Config)) -> Self {
        let mut config = Config::new(1).expect("a new file system");
        config.max_states = 150;
        change(&mut config);
        let world = show(&config.base, &config.options).expect("a fresh file system");
        let device = Arc::new(SimDevice::new(config.base.clone()));
        let fs = Filesystem::open(device.clone(), config.options.clone()).expect("open");
        let domains = (0..domains).map(|i| Domain::new(prefix(i), world.clone())).collect();
        Self { config, device, fs, domains }
    }
    fn perform(&self, domain: Domain, text: &str) -> Domain {
        perform(&self.fs, &self.device, domain, &ops(text)).expect("it is done").0
    }
    fn judge(self, name: &str) {
        let outcome = self.outcome(name);
        outcome.assert_sound();
        assert!(outcome.distinct.len() > 20, "{outcome}");
    }
    fn outcome(self, name: &str) -> Outcome {
        let mut history = History { domains: self.domains };
        let begin = self.device.mark();
        self.fs.close().expect("close");
        history.close(begin, self.device.mark());
        let run = Run { recording: self.device.recording(), history };
        judge_run(&self.config, name, &run)
    }
}

/// Makes `before` in a transaction, holds its commit at an access, makes `meanwhile` in the next
/// one, and calls `fsync`. Did it return although the commit was held?
fn early(
    stage: &mut Stage,
    held: (u64, fn(&Access) -> bool),
    before: &str,
    meanwhile: &str,
) -> bool {
    let [first, second] = [0, 1].map(|i| stage.domains[i].clone());
    let second = stage.perform(second, before);
    let gate = hold(&stage.device, held.0, held.1);
    let (first, second, early) = std::thread::scope(|scope| {
        let stage = &*stage;
        let commit = scope.spawn(|| stage.perform(first, "COMMIT"));
        let arrived = gate.wait_for(1, PATIENCE);
        let second = stage.perform(second, meanwhile);
        let waits = stage.fs.stats().commit_waits;
        let fsync = scope.spawn(|| stage.perform(second, "F t1_d/f"));
        // Either it has to wait, or it returns.
        until("fsync waits or returns", || {
            stage.fs.stats().commit_waits > waits || fsync.is_finished()
        });
        let early = fsync.is_finished();
        gate.open();
        let (first, second) = (commit.join().expect("no panic"), fsync.join().expect("no panic"));
        assert!(arrived, "the commit arrives at the gate");
        (first, second, early)
    });
    stage.domains = vec![first, second];
    early
}

const NODES: (u64, fn(&Access) -> bool) = (0, |a| a.is_write() && !a.is_superblock());
const FIRST_FLUSH: (u64, fn(&Access) -> bool) = (0, |a| a.kind == AccessKind::Flush);
const SUPERBLOCK: (u64, fn(&Access) -> bool) = (0, |a| a.is_write() && a.is_superblock());
const LAST_FLUSH: (u64, fn(&Access) -> bool) = (1, |a| a.kind == AccessKind::Flush);

/// Metadata only: the sync itself writes delayed data before it seals.
const BEFORE: &str = "mk t1_d; new t1_d/f; xa t1_d/f user.k=v; ln t1_d/f t1_l; mode t1_d/f 600";
const MEANWHILE: &str =
    "t1_d/f[0,20000)=b; xa t1_d/f user.k=w; mv t1_d/f t1_d/g; mv t1_d/g t1_d/f; rm t1_l";

fn waits_for(held: (u64, fn(&Access) -> bool), meanwhile: &str) {
    let mut stage = Stage::new(2, |_| ());
    // The sync of a clean file system would be no commit, and its wait none to tell from others.
    let early = early(&mut stage, held, BEFORE, meanwhile);
    assert!(!early, "fsync returned while the commit was held");
    stage.judge("sealed");
}

#[test]
fn an_inode_of_a_sealed_transaction_waits_for_its_superblock() {
    for held in [NODES, FIRST_FLUSH, SUPERBLOCK, LAST_FLUSH] {
        waits_for(held, "");
    }
}

#[test]
fn an_inode_of_both_transactions_waits_for_the_superblock_of_the_first() {
    for held in [NODES, FIRST_FLUSH, SUPERBLOCK, LAST_FLUSH] {
        waits_for(held, MEANWHILE);
    }
}

/// The inode itself has not changed since the last commit, but the way to it has.
#[test]
fn a_directory_above_that_moved_in_the_sealed_transaction_is_waited_for() {
    for held in [FIRST_FLUSH, SUPERBLOCK, LAST_FLUSH] {
        let mut stage = Stage::new(2, |_| ());
        let second = stage.domains[1].clone();
        stage.domains[1] = stage.perform(second, "mk t1_e; new t1_e/f; COMMIT");
        let early = early(&mut stage, held, "mv t1_e t1_d", "");
        assert!(!early, "fsync returned while the commit was held");
        stage.judge("moved");
    }
}

/// A walk without handles, which end with the call that does it.
fn steps(domain: &Domain, seed: u64, length: usize, thread: usize) -> Vec<Op> {
    let mut ops = random_ops(seed, length, &prefix(thread), domain.now());
    ops.retain(|op| !matches!(op, Op::Open { .. } | Op::Unnamed { .. } | Op::Close { .. }));
    ops
}

/// One thread's commit is held; another one, which has changed something that it holds, goes on
/// until it has to wait. How often it synced by a log, and what came of it.
fn overlapping(seed: u64) -> (u64, Outcome) {
    let held = [FIRST_FLUSH, SUPERBLOCK, LAST_FLUSH][(seed % 3) as usize];
    let mut stage = Stage::new(2, |c| {
        *c = c.clone().whole();
        c.max_states = 60;
        c.depth = Depth { emptied: 0.05, recovered: 0.05, ..Depth::LOOK };
    });
    let [first, second] = [0, 1].map(|i| stage.domains[i].clone());
    // A chunk for data that a commit has, without which no log is written.
    let first = stage.perform(first, "new t0_z; t0_z[0,64K)=z; COMMIT");
    let before = steps(&second, 2 * seed, 8, 1);
    let second = stage.perform(second, &line(&before));
    // The walk may have ended with a commit: then there is something for the next one.
    let first = stage.perform(first, "mode t0_z 600");
    let meanwhile = steps(&second, 2 * seed + 1, 12, 1);
    let logged = stage.fs.stats().log.fsyncs_logged;
    let gate = hold(&stage.device, held.0, held.1);
    stage.domains = std::thread::scope(|scope| {
        let stage = &stage;
        let commit = scope.spawn(|| stage.perform(first, "COMMIT"));
        let arrived = gate.wait_for(1, PATIENCE);
        let waits = stage.fs.stats().commit_waits;
        let text = format!("{}; new t1_end; t1_end[0,9000)=e; F t1_end", line(&meanwhile));
        let other = scope.spawn(move || stage.perform(second, &text));
        until("it waits or is done", || {
            stage.fs.stats().commit_waits > waits || other.is_finished()
        });
        gate.open();
        let domains = [commit, other].map(|t| t.join().expect("no panic"));
        assert!(arrived, "the commit arrives at the gate");
        domains.into()
    });
    let logged = stage.fs.stats().log.fsyncs_logged - logged;
    (logged, stage.outcome(&format!("overlapping-{seed}")))
}

#[test]
fn a_log_is_written_between_the_steps_of_the_commit_before_it() {
    let scale: u64 = std::env::var("LARDER_SCALE").ok().and_then(|s| s.parse().ok()).unwrap_or(1);
    let (mut outcome, mut logs) = (Outcome::default(), 0);
    for seed in 0..12 * scale {
        let (logged, one) = overlapping(seed);
        logs += u64::from(logged > 0);
        outcome.add(one);
        outcome.assert_sound();
    }
    println!("{logs} runs with logs; {outcome}");
    assert!(logs > 6, "{logs} runs with logs");
    assert!(outcome.distinct.len() > 300, "{outcome}");
}

#[test]
fn an_fsync_that_does_not_wait_is_noticed() {
    let mut stage = Stage::new(2, |c| c.options.tuning.fault = Some(Fault::FsyncDoesNotWait));
    assert!(early(&mut stage, SUPERBLOCK, BEFORE, MEANWHILE));
}

/// A seal comes between the moment at which an inode was collected and that at which the leader
/// takes it.
#[test]
fn a_seal_between_collecting_and_merging() {
    let mut stage = Stage::new(3, |_| ());
    let [first, second, third] = [0, 1, 2].map(|i| stage.domains[i].clone());
    let second = stage.perform(second, "new t1_f; xa t1_f user.k=v");
    let third = stage.perform(third, "new t2_f; xa t2_f user.k=v");
    // The first write is the leader's: a node of the log.
    let gate = hold(&stage.device, 0, Access::is_write);
    stage.domains = std::thread::scope(|scope| {
        let stage = &stage;
        let leader = scope.spawn(|| stage.perform(second, "F t1_f"));
        let arrived = gate.wait_for(1, PATIENCE);
        let late = scope.spawn(|| stage.perform(third, "F t2_f; t2_f[0,5000)=c; F t2_f"));
        until("the second one has begun", || stage.fs.stats().log.fsyncs > 1);
        let waits = stage.fs.stats().commit_waits;
        let commit = scope.spawn(|| stage.perform(first, "new t0_f; COMMIT"));
        let done = || late.is_finished() || commit.is_finished();
        until("both wait", || stage.fs.stats().commit_waits > waits + 1 || done());
        gate.open();
        let domains = [commit, leader, late].map(|t| t.join().expect("no panic"));
        assert!(arrived, "the log arrives at the gate");
        domains.into()
    });
    stage.judge("sealed between");
}
