//! Writes to a file while its data is in flight: a later write must not take back what a sync has
//! promised.

use larder_fs::Filesystem;
use larder_simtest::device::{Access, SimDevice};
use larder_simtest::model::{Domain, History};
use larder_simtest::ops::parse;
use larder_simtest::runner::{Config, Run, judge_run, perform, show};
use larder_simtest::workload::prefix;
use std::sync::Arc;
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(60);

/// Thread 0 does `before`; thread 1's COMMIT is held at its write number `held`; thread 0 does
/// `during`; then all goes on, and the power goes everywhere.
fn overtaken(before: &str, held: u64, during: &str) {
    let config = Config::new(1).expect("a new file system");
    let world = show(&config.base, &config.options).expect("a fresh file system");
    let device = Arc::new(SimDevice::new(config.base.clone()));
    let fs = Filesystem::open(device.clone(), config.options.clone()).expect("open");
    let ops = |text: &str| parse(text).expect("a workload").remove(0);
    let first = Domain::new(prefix(0), world.clone());
    let second = Domain::new(prefix(1), world);
    let (first, _) = perform(&fs, &device, first, &ops(before)).expect(before);
    let gate = device.gate(Access::is_write);
    gate.let_through(held - 1);
    let (first, second) = std::thread::scope(|scope| {
        let commit = scope.spawn(|| perform(&fs, &device, second, &ops("COMMIT")));
        assert!(gate.wait_for(held, PATIENCE), "the commit writes");
        let (first, _) = perform(&fs, &device, first, &ops(during)).expect(during);
        gate.open();
        let second = commit.join().expect("no panic").expect("commit");
        (first, second.0)
    });
    drop(gate);
    let mut history = History { domains: vec![first, second] };
    let begin = device.mark();
    fs.close().expect("close");
    history.close(begin, device.mark());
    let run = Run { recording: device.recording(), history };
    judge_run(&config, &format!("{before} || COMMIT || {during}"), &run).assert_sound();
}

#[test]
fn an_overwrite_in_flight_does_not_cut_the_file() {
    overtaken("new t0_x; t0_x[0,160000)=a", 1, "t0_x[12287,23811)=t");
    overtaken("new t0_x; t0_x+14658=a; t0_x[90110,167935)=b", 1, "t0_x[12287,23811)=t");
    overtaken(
        "new t0_x; t0_x+14658=a; t0_x[90110,167935)=b",
        2,
        "t0_x[12287,23811)=t; t0_x[40000,50000)=u",
    );
}

#[test]
fn growth_in_flight_does_not_show_what_is_not_there() {
    overtaken(
        "new t0_x; t0_x[0,160000)=a",
        1,
        "t0_x+5000=b; t0_x[300000,310000)=c; t0_x[12287,23811)=t",
    );
    overtaken(
        "new t0_x; t0_x[0,8192)=a; new t0_y; t0_y+100=y",
        1,
        "trunc t0_x 20000; t0_y+9000=z; t0_x+1=q",
    );
}

#[test]
fn names_that_change_in_flight() {
    overtaken(
        "new t0_x; t0_x[0,160000)=a",
        1,
        "mv t0_x t0_z; ln t0_z t0_l; t0_l[100,200)=q; rm t0_z",
    );
    overtaken("new t0_x; t0_x[0,160000)=a", 1, "mv t0_x t0_z; new t0_x; t0_x[0,70000)=b");
}

#[test]
fn a_file_that_grows_by_truncation_in_flight() {
    let during = "trunc t0_g 151553; t0_g[35697,36465)=x; mode t0_g 670";
    overtaken("new t0_g; trunc t0_g 186; t0_g[0,929)=v", 1, during);
}
