//! Scenarios and a share of the random walks on other kinds of image, with `btrfs check` as the
//! judge after replay.

use larder_simtest::cloning::cloning;
use larder_simtest::crash::Limits;
use larder_simtest::data;
use larder_simtest::formats::Format;
use larder_simtest::judge::Depth;
use larder_simtest::oracle::{Need, need};
use larder_simtest::runner::{Config, Outcome, run_in_turn};
use larder_simtest::scenarios;
use larder_simtest::sharing::sharing;
use larder_simtest::workload::{Workload, random};

/// `None` where nobody could judge.
fn config(format: &Format, max_states: usize, checked: f64) -> Option<Config> {
    if !need(&[Need::BtrfsProgs]) {
        return None;
    }
    let mut config =
        Config::new(1).and_then(|config| config.on(format)).expect("a new file system");
    config.limits = Limits { samples: 4, seed: 1, ..Limits::default() };
    config.max_states = max_states;
    config.depth = Depth { emptied: 0.1, recovered: 0.02, ours: 0.0, checked, kernel: 0.0 };
    Some(config)
}

/// Every second workload commits after each step of an operation, the others where the workload
/// does.
fn run_all(config: &Config, workloads: impl IntoIterator<Item = Workload>) -> Outcome {
    run_in_turn(&[config.clone().whole(), config.clone()], workloads)
}

/// Scenarios and walks of every kind, each walk stored in another way.
fn survive_on(name: &str, max_states: usize) {
    let format = Format::named(name).expect("a kind of image");
    let Some(config) = config(&format, max_states, 1.0) else { return };
    let walks = (40..42).flat_map(|seed| [random(seed, 25), sharing(seed, 25), cloning(seed, 25)]);
    let named = scenarios::all(true).into_iter().chain(scenarios::shared());
    let outcome = run_all(&config, named.chain(walks));
    assert!(outcome.done.checked > 300, "{outcome}");
    for seed in 0..data::SETTINGS {
        let mut config = config.clone();
        data::settings(seed, &mut config.options);
        run_all(&config, [data::data(40 + seed, 25)]);
    }
}

#[test]
fn images_with_explicit_holes_survive_every_crash() {
    survive_on("explicit-holes", 6);
}

#[test]
fn images_with_small_nodes_survive_every_crash() {
    survive_on("small-nodes", 3);
}

#[test]
fn images_with_large_nodes_survive_every_crash() {
    survive_on("large-nodes", 3);
}

#[test]
fn images_with_mixed_groups_survive_every_crash() {
    survive_on("mixed", 3);
}

#[test]
fn images_with_long_checksums_survive_every_crash() {
    survive_on("xxhash", 3);
}

#[test]
fn images_without_a_free_space_tree_survive_every_crash() {
    survive_on("no-free-space-tree", 3);
}
