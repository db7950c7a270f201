//! A crash together with the loss of a device, of two with RAID6, costs nothing that was durable.

use larder_fs::{Fault, Tuning};
use larder_simtest::disks::Kind;
use larder_simtest::rows::{Plan, run};

/// Profile of data and of metadata, and disks.
const KINDS: [&str; 4] = ["raid5-raid5-3", "raid5-raid1-4", "raid6-raid6-4", "raid6-raid1c3-5"];

/// `LARDER_ROW_STATES`: so many states of each kind, instead of a few.
fn states() -> usize {
    std::env::var("LARDER_ROW_STATES").ok().and_then(|n| n.parse().ok()).unwrap_or(160)
}

/// A plan on new disks; every plan has a seed of its own.
fn plan(kind: &str, tuning: Tuning) -> Plan {
    let kind = Kind::parse(kind).expect("a kind");
    let base = kind.fresh().expect("mkfs");
    Plan { base, tolerated: kind.tolerated(), seed: 0, steps: 60, rounds: 2, states: 80, tuning }
}

#[test]
fn nothing_durable_is_lost_with_a_device() {
    for kind in KINDS {
        let plan = plan(kind, Tuning::default());
        let (mut looked_at, mut seed) = (0, 1);
        while looked_at < states() {
            let ran = run(&Plan { seed, ..plan.clone() });
            looked_at += ran.unwrap_or_else(|e| panic!("{kind}, seed {seed}: {e}")).max(1);
            seed += 1;
        }
        println!("{kind}: {looked_at} states");
    }
}

/// A broken engine is caught within a few runs.
fn is_noticed(fault: Fault) {
    for kind in [KINDS[0], KINDS[2]] {
        let broken = plan(kind, fault.into());
        let failed = (1..80).find_map(|seed| run(&Plan { seed, ..broken.clone() }).err());
        let failed = failed.unwrap_or_else(|| panic!("{fault:?} on {kind} went unnoticed"));
        println!("{fault:?} on {kind}: {failed}");
    }
}

#[test]
fn rows_that_are_shared_are_noticed() {
    is_noticed(Fault::RowsShared);
}

#[test]
fn parity_that_is_not_written_is_noticed() {
    is_noticed(Fault::NoParity);
}

/// A power cut leaves the newest superblock on one device, which is lost with the next one.
#[test]
fn superblocks_that_differ_are_noticed() {
    is_noticed(Fault::SuperblockOnSome);
}
