//! The crash simulation's share of `cargo test`: small enough for every run, the same states each
//! time. `make torture` does the same without end.

use larder_format::CsumType;
use larder_fs::mkfs::{MkfsOptions, Profile};
use larder_simtest::cloning::cloning;
use larder_simtest::crash::Limits;
use larder_simtest::judge::Depth;
use larder_simtest::oracle::{Need, need};
use larder_simtest::runner::{Config, Outcome, SIZE, fresh, run, run_in_turn};
use larder_simtest::sharing::sharing;
use larder_simtest::workload::{Sequences, Workload, random, threads};
use larder_simtest::{data, scenarios};

fn config(max_states: usize, depth: Depth) -> Config {
    let mut config = Config::new(1).expect("a new file system");
    config.limits = Limits { samples: 8, seed: 1, ..Limits::default() };
    config.max_states = max_states;
    config.depth = depth;
    if !need(&[Need::BtrfsProgs]) {
        config.depth.checked = 0.0;
        config.depth.kernel = 0.0;
    }
    config
}

/// Every second workload commits after each step of an operation, the others where the workload
/// does; see [`Config::whole`].
fn run_all(config: &Config, workloads: impl IntoIterator<Item = Workload>) -> Outcome {
    run_in_turn(&[config.clone(), config.clone().whole()], workloads)
}

const SHALLOW: Depth =
    Depth { emptied: 0.05, recovered: 0.05, ours: 0.05, checked: 0.01, kernel: 0.0 };

#[test]
fn named_scenarios_survive_every_crash() {
    let outcome = run_all(&config(40, SHALLOW), scenarios::all(false));
    assert!(outcome.distinct.len() > 1500, "{outcome}");
}

#[test]
fn sequences_of_one_operation_survive_every_crash() {
    let all = Sequences::all(1);
    let workloads: Vec<Workload> =
        (0..all.skeletons.len()).flat_map(|i| all.workloads(i)).collect();
    println!(
        "{} sequences of one operation, {} with their syncs",
        all.skeletons.len(),
        workloads.len()
    );
    let outcome = run_all(&config(8, SHALLOW), workloads.into_iter().step_by(2));
    assert!(outcome.distinct.len() > 800, "{outcome}");
}

#[test]
fn sampled_longer_sequences_survive_every_crash() {
    let two = Sequences::sample(2, 40, 1);
    let three = Sequences::sample(3, 20, 1);
    let pick = |s: &Sequences, i: usize| {
        let all = s.workloads(i);
        all[i * 7 % all.len()].clone()
    };
    let workloads = (0..40).map(|i| pick(&two, i)).chain((0..20).map(|i| pick(&three, i)));
    let workloads: Vec<Workload> = workloads.collect();
    run_all(&config(15, SHALLOW), workloads);
}

#[test]
fn random_walks_survive_every_crash() {
    run_all(&config(80, SHALLOW), (0..6).map(|seed| random(seed, 30)));
}

#[test]
fn what_files_hold_survives_every_crash_however_it_is_stored() {
    let mut outcome = Outcome::default();
    for seed in 0..2 * data::SETTINGS {
        let mut config = config(60, SHALLOW);
        if seed >= data::SETTINGS {
            config = config.whole();
        }
        data::settings(seed, &mut config.options);
        outcome.add(run_all(&config, [data::data(seed, 25)]));
    }
    assert!(outcome.distinct.len() > 700, "{outcome}");
}

#[test]
fn what_is_shared_survives_every_crash() {
    let workloads = scenarios::shared().into_iter().chain((0..8).map(|seed| sharing(seed, 30)));
    let outcome = run_all(&config(50, SHALLOW), workloads);
    assert!(outcome.distinct.len() > 700, "{outcome}");
    // Once more, so that the log gets what a commit has not.
    run_all(&config(50, SHALLOW).whole(), scenarios::shared());
}

#[test]
fn what_is_shared_before_a_commit_has_it_survives_every_crash() {
    let mut outcome = Outcome::default();
    for seed in 0..16 {
        let mut config = config(50, SHALLOW).whole();
        if seed % 2 == 1 {
            data::settings(seed / 2, &mut config.options);
        }
        outcome.add(run_all(&config, [cloning(seed, 30)]));
    }
    assert!(outcome.distinct.len() > 300, "{outcome}");
}

#[test]
fn several_threads_survive_every_crash() {
    run_all(&config(80, SHALLOW), (0..3).map(|seed| threads(seed, 3, 12)));
}

#[test]
fn other_formats_survive_every_crash() {
    let variants = [
        MkfsOptions { csum: CsumType::Sha256, nodesize: Some(4096), ..MkfsOptions::default() },
        MkfsOptions {
            csum: CsumType::XxHash64,
            metadata: Some(Profile::Single),
            ..MkfsOptions::default()
        },
        MkfsOptions { csum: CsumType::Blake2b, nodesize: Some(65536), ..MkfsOptions::default() },
    ];
    for options in variants {
        let mut config = config(25, Depth { checked: 0.05, ..SHALLOW });
        config.base = fresh(SIZE, &options).expect("mkfs");
        run_all(&config, (10..12).map(|seed| random(seed, 20)));
    }
}

#[test]
fn linux_sees_the_same_in_crash_states() {
    if !need(&[Need::KernelBtrfs, Need::BtrfsProgs]) {
        return;
    }
    let config =
        config(6, Depth { emptied: 0.5, recovered: 0.0, ours: 0.0, checked: 0.5, kernel: 1.0 });
    let workloads =
        (20..28).map(|seed| random(seed, 25)).chain((20..22).map(|seed| sharing(seed, 25)));
    let outcome = run_all(&config, workloads);
    assert!(outcome.done.kernel >= 24, "{outcome}");
    let outcome = run_all(&config.whole(), (0..4).map(|seed| cloning(2 * seed, 25)));
    assert!(outcome.done.kernel >= 10, "{outcome}");
}

#[test]
fn one_seed_gives_the_same_states_again() {
    let config = config(usize::MAX, Depth::LOOK);
    let once = run(&config, &random(5, 15));
    let again = run(&config, &random(5, 15));
    once.assert_sound();
    assert!(once.distinct.len() > 20);
    assert_eq!(once.distinct, again.distinct);
}

/// After every few operations a block group moves: of one thread, and beside others.
#[test]
fn what_moves_between_operations_survives_every_crash() {
    let one = (0..6).map(|seed| random(700 + seed, 14));
    let shared =
        (0..4).map(|seed| sharing(70 + seed, 14)).chain((0..3).map(|s| cloning(90 + s, 16)));
    let many = (0..3).map(|seed| threads(40 + seed, 3, 8));
    let config = Config { relocate_every: 3, ..config(60, SHALLOW) };
    let outcome = run_all(&config, one.chain(shared).chain(many));
    assert!(outcome.distinct.len() > 500, "{outcome}");
}
