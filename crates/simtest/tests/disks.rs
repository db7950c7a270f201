//! The crash simulation on several disks: each loses what is open independently of the others, some
//! are lost, old or damaged afterwards, and some fail in the midst of the work. `make torture
//! ARGS='--disks all'` does the same without end.

use larder_simtest::crash::Limits;
use larder_simtest::data::data;
use larder_simtest::disks::{KINDS, Kind, Plan};
use larder_simtest::faults::run_plan;
use larder_simtest::judge::Depth;
use larder_simtest::oracle::{Need, need};
use larder_simtest::runner::{Config, Outcome, run};
use larder_simtest::workload::random;
use rand::SeedableRng;
use rand::rngs::StdRng;

const SHALLOW: Depth = Depth { emptied: 0.05, recovered: 0.05, checked: 0.0, kernel: 0.0 };

fn config(kind: Kind, states: usize, depth: Depth, share: f64) -> Config {
    let mut config = Config::new(1).expect("a new file system");
    config.limits = Limits { samples: 8, seed: 1, ..Limits::default() };
    config.max_states = states;
    config.depth = depth;
    kind.config(&config, share).expect("mkfs")
}

#[test]
fn every_kind_survives_every_crash_and_mishap() {
    let mut outcome = Outcome::default();
    for (n, kind) in (0..).zip(KINDS) {
        let config = config(kind, 24, SHALLOW, 0.5);
        for (workload, config) in
            [(random(100 + n, 24), config.clone()), (data(200 + n, 20), config.whole())]
        {
            let mut one = run(&config, &workload);
            for failure in &mut one.failures {
                failure.workload = format!("{}: {}", kind.name(), failure.workload);
            }
            outcome.add(one);
        }
    }
    println!("{outcome}");
    outcome.assert_sound();
    assert!(outcome.distinct.len() > 700 && outcome.done.hurt > 200, "{outcome}");
}

#[test]
fn a_disk_that_fails_in_the_midst_of_the_work_is_not_needed() {
    let (mut struck, mut states) = (0, 0);
    for (n, kind) in (0..).zip(KINDS) {
        let mut config = config(kind, 4, Depth::LOOK, 0.0);
        config.mishaps.tolerated = kind.tolerated();
        let mut rng = StdRng::seed_from_u64(n);
        for round in 0..6 {
            let workload = random(1000 * n + round, 16);
            let ops = &workload.segments[0].threads[0];
            let plan = Plan::random(&mut rng, kind.disks, 20);
            let report = run_plan(&config, ops, plan)
                .unwrap_or_else(|e| panic!("{}: {}: {e}", kind.name(), workload.text()));
            struck += u64::from(report.struck);
            states += report.states;
        }
    }
    println!("{struck} plans struck, {states} states");
    assert!(struck > 25 && states > 300, "{struck} plans struck, {states} states");
}

#[test]
fn linux_sees_the_same_in_crash_states_of_several_disks() {
    if !need(&[Need::KernelBtrfs, Need::BtrfsProgs]) {
        return;
    }
    let depth = Depth { emptied: 0.0, recovered: 0.0, checked: 0.3, kernel: 1.0 };
    let mut outcome = Outcome::default();
    for (n, kind) in (0..).zip(KINDS) {
        let config = config(kind, 3, depth, 0.0);
        outcome.add(run(&config, &random(300 + n, 20)));
    }
    println!("{outcome}");
    outcome.assert_sound();
    assert!(outcome.done.kernel >= 30, "{outcome}");
}

#[test]
fn a_kind_has_a_name() {
    for kind in KINDS {
        assert_eq!(Kind::parse(&kind.name()), Some(kind));
    }
    assert_eq!(Kind::parse("raid1-raid7-2"), None);
}
