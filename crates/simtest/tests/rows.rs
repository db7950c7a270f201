//! A crash together with the loss of a device, of two with RAID6, costs nothing that was durable.

use larder_fs::{Fault, Tuning};
use larder_simtest::image::Image;
use larder_simtest::oracle::{DeviceSet, Need, need, scratch};
use larder_simtest::rows::{Plan, run};

const NEEDS: [Need; 2] = [Need::MkfsBtrfs, Need::KernelBtrfs];
const MIB: u64 = 1 << 20;

/// Profile of data and of metadata, devices, and how many of them may be lost.
const KINDS: [(&str, &str, usize, usize); 4] = [
    ("raid5", "raid5", 3, 1),
    ("raid5", "raid1", 4, 1),
    ("raid6", "raid6", 4, 2),
    ("raid6", "raid1c3", 5, 2),
];

fn made(data: &str, metadata: &str, devices: usize) -> Vec<Image> {
    let dir = scratch();
    let set = DeviceSet::make(dir.path(), &vec![256 * MIB; devices], &["-d", data, "-m", metadata]);
    let set = set.unwrap();
    set.images().iter().map(|path| Image::from_file(path).unwrap()).collect()
}

/// `LARDER_ROW_STATES`: so many states of each kind, instead of a few.
fn states() -> usize {
    std::env::var("LARDER_ROW_STATES").ok().and_then(|n| n.parse().ok()).unwrap_or(160)
}

fn plan(base: &[Image], tolerated: usize, seed: u64) -> Plan {
    Plan {
        base: base.to_vec(),
        tolerated,
        seed,
        steps: 60,
        rounds: 2,
        states: 80,
        tuning: Tuning::default(),
    }
}

#[test]
fn nothing_durable_is_lost_with_a_device() {
    if !need(&NEEDS) {
        return;
    }
    for (data, metadata, devices, tolerated) in KINDS {
        let base = made(data, metadata, devices);
        let (mut looked_at, mut seed) = (0, 1);
        while looked_at < states() {
            let name = format!("{data}/{metadata} on {devices}, seed {seed}");
            looked_at +=
                run(&plan(&base, tolerated, seed)).unwrap_or_else(|e| panic!("{name}: {e}")).max(1);
            seed += 1;
        }
        println!("{data}/{metadata} on {devices}: {looked_at} states");
    }
}

/// A broken engine is caught within a few runs.
fn is_noticed(fault: Fault) {
    if !need(&NEEDS) {
        return;
    }
    for (data, metadata, devices, tolerated) in [KINDS[0], KINDS[2]] {
        let base = made(data, metadata, devices);
        let broken = |seed| Plan { tuning: fault.into(), ..plan(&base, tolerated, seed) };
        let failed = (1..20).find_map(|seed| run(&broken(seed)).err());
        let failed = failed.unwrap_or_else(|| panic!("{fault:?} on {data} went unnoticed"));
        println!("{fault:?} on {data}: {failed}");
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
