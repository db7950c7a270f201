//! The simulator against a store that is small enough to be right by inspection: the right one
//! passes in every crash state, and each way of breaking it is caught.
//!
//! The store is a chain of values. A commit writes the new value's block to a free place, flushes,
//! writes the superblock that names all blocks, flushes, and returns.

use larder_format::{Physical, SUPER_OFFSETS};
use larder_simtest::crash::{Crashes, Kind, Limits};
use larder_simtest::device::{Access, AccessKind, Fault, Seq, SimDevice};
use larder_simtest::image::Image;
use larder_volume::Device;
use std::sync::Arc;
use std::time::Duration;

const BLOCK: usize = 16384;
const FIRST: u64 = 1 << 20;
const SUPER: Physical = SUPER_OFFSETS[0];

#[derive(Clone, Copy, Debug, PartialEq)]
enum Broken {
    Nothing,
    NoFlushBeforeSuper,
    NoFlushAfterSuper,
    SuperFirst,
    OverwriteInPlace,
    FlushBeforeBlockReturned,
    SuperInTwoWrites,
}

struct Store {
    device: Arc<SimDevice>,
    broken: Broken,
    /// Place of each value's block; only the newest two values are kept, so that places are reused.
    live: Vec<(u64, u64)>,
}

fn block(value: u64) -> Vec<u8> {
    let mut b: Vec<u8> = (0..BLOCK)
        .map(|i| (value.wrapping_mul(31).wrapping_add(i as u64 / 7) % 251) as u8)
        .collect();
    b[..8].copy_from_slice(&value.to_le_bytes());
    b
}

impl Store {
    fn new(broken: Broken) -> Self {
        let mut image = Image::zeroed(8 << 20);
        image.write(SUPER.0, &[0; 4096]);
        Self { device: Arc::new(SimDevice::new(image)), broken, live: Vec::new() }
    }

    fn superblock(&self) -> Vec<u8> {
        let mut s = vec![0; 4096];
        s[0] = self.live.len() as u8;
        for (i, (value, at)) in self.live.iter().enumerate() {
            s[8 + i * 16..16 + i * 16].copy_from_slice(&value.to_le_bytes());
            s[16 + i * 16..24 + i * 16].copy_from_slice(&at.to_le_bytes());
        }
        // The end repeats the newest value: a torn superblock would show.
        s[4088..].copy_from_slice(&self.live.last().unwrap().0.to_le_bytes());
        s
    }

    fn commit(&mut self, value: u64) {
        let d = self.device.clone();
        let places = (0..8).map(|i| FIRST + i * BLOCK as u64);
        let free = places.filter(|p| self.live.iter().all(|(_, at)| at != p)).collect::<Vec<_>>();
        let at = match (self.broken, self.live.first()) {
            (Broken::OverwriteInPlace, Some((_, at))) if self.live.len() == 2 => *at,
            _ => free[value as usize % free.len()],
        };
        if self.live.len() == 2 {
            self.live.remove(0);
        }
        self.live.push((value, at));
        let sup = self.superblock();
        let write = |at, data: &[u8]| d.write_at(Physical(at), data).unwrap();
        match self.broken {
            Broken::SuperFirst => {
                write(SUPER.0, &sup);
                write(at, &block(value));
                d.flush().unwrap();
                return;
            }
            Broken::FlushBeforeBlockReturned => {
                // The flush is submitted while the block's write is still running: it does not
                // cover it.
                let gate = d.gate(Access::is_write);
                std::thread::scope(|s| {
                    s.spawn(|| write(at, &block(value)));
                    assert!(gate.wait_for(1, Duration::from_secs(10)));
                    d.flush().unwrap();
                    gate.open();
                });
            }
            _ => {
                write(at, &block(value));
                if self.broken != Broken::NoFlushBeforeSuper {
                    d.flush().unwrap();
                }
            }
        }
        if self.broken == Broken::SuperInTwoWrites {
            write(SUPER.0, &sup[..2048]);
            write(SUPER.0 + 2048, &sup[2048..]);
        } else {
            write(SUPER.0, &sup);
        }
        if self.broken != Broken::NoFlushAfterSuper {
            d.flush().unwrap();
        }
    }
}

/// The newest value of a disk; an error where the store's reader finds something wrong.
fn recover(image: &Image) -> Result<u64, String> {
    let mut s = [0; 4096];
    image.read(SUPER.0, &mut s);
    let number = |at: usize| u64::from_le_bytes(s[at..at + 8].try_into().unwrap());
    let mut newest = 0;
    for i in 0..usize::from(s[0]) {
        let (value, at) = (number(8 + i * 16), number(16 + i * 16));
        let mut b = vec![0; BLOCK];
        image.read(at, &mut b);
        if b != block(value) {
            return Err(format!("block of value {value} is damaged"));
        }
        newest = value;
    }
    if number(4088) != newest {
        return Err("torn superblock".into());
    }
    Ok(newest)
}

/// Runs seven commits and looks at every crash state: how many there are and what is wrong first.
fn run(broken: Broken) -> (Crashes, Option<String>) {
    let mut store = Store::new(broken);
    let mut times: Vec<(Seq, Seq)> = Vec::new();
    for value in 1..=7 {
        let begin = store.device.mark();
        store.commit(value);
        times.push((begin, store.device.mark()));
    }
    let crashes = Crashes::of(&store.device.recording(), &Limits::default());
    let mut wrong = None;
    for state in &crashes.states {
        let mut image = crashes.image(state);
        assert_eq!(image.content_hash(), state.id);
        let promised = times.iter().filter(|t| t.1 <= state.latest).count() as u64;
        let begun = times.iter().filter(|t| t.0 < state.earliest).count() as u64;
        let verdict = match recover(&image) {
            Ok(v) if v < promised => Err(format!("value {promised} was promised, {v} is there")),
            Ok(v) if v > begun => {
                Err(format!("value {v} comes from the future, {begun} had begun"))
            }
            Ok(_) => Ok(()),
            Err(e) => Err(e),
        };
        if let Err(e) = verdict {
            wrong.get_or_insert(format!("{e}\n{}", crashes.describe(state)));
        }
    }
    (crashes, wrong)
}

#[test]
fn the_right_store_survives_every_crash() {
    let (crashes, wrong) = run(Broken::Nothing);
    assert_eq!(wrong, None);
    // Each commit has two epochs, each with one write: blocks tear, superblocks do not.
    assert_eq!(crashes.epoch_count(), 15);
    let kinds = crashes.by_kind();
    assert!(
        kinds[&Kind::Quiet] == 1 && kinds[&Kind::Commit] == 7 && kinds[&Kind::Data] >= 14,
        "{kinds:?}"
    );
    let all = crashes.everything();
    assert_eq!(recover(&all), Ok(7));
}

#[test]
fn every_broken_store_is_caught() {
    for broken in [
        Broken::NoFlushBeforeSuper,
        Broken::NoFlushAfterSuper,
        Broken::SuperFirst,
        Broken::OverwriteInPlace,
        Broken::FlushBeforeBlockReturned,
        Broken::SuperInTwoWrites,
    ] {
        let (crashes, wrong) = run(broken);
        assert!(wrong.is_some(), "{broken:?} went unnoticed in {} states", crashes.states.len());
    }
}

#[test]
fn states_are_the_same_ones_in_each_run() {
    let ids =
        |_: u32| run(Broken::NoFlushBeforeSuper).0.states.iter().map(|s| s.id).collect::<Vec<_>>();
    assert_eq!(ids(1), ids(2));
}

fn small() -> Arc<SimDevice> {
    Arc::new(SimDevice::new(Image::zeroed(1 << 20)).with_fua())
}

fn firsts(d: &SimDevice, places: &[u64]) -> std::collections::BTreeSet<Vec<u8>> {
    let crashes = Crashes::of(&d.recording(), &Limits::default());
    let look = |s| {
        let image = crashes.image(s);
        places
            .iter()
            .map(|p| {
                let mut b = [0];
                image.read(*p, &mut b);
                b[0]
            })
            .collect()
    };
    crashes.states.iter().map(look).collect()
}

#[test]
fn subsets_cover_every_outcome_of_unflushed_writes() {
    let d = small();
    for i in 0..3u64 {
        d.write_at(Physical(i * 4096), &[1]).unwrap();
    }
    assert_eq!(firsts(&d, &[0, 4096, 8192]).len(), 8);
    d.flush().unwrap();
    d.write_at(Physical(0), &[2]).unwrap();
    d.write_at(Physical(0), &[3]).unwrap();
    let seen = firsts(&d, &[0]);
    assert_eq!(seen, [vec![0], vec![1], vec![2], vec![3]].into());
}

#[test]
fn a_fua_write_is_durable_without_the_writes_before_it() {
    let d = small();
    d.write_at(Physical(0), &[1]).unwrap();
    d.write_fua(Physical(4096), &[1]).unwrap().unwrap();
    d.write_at(Physical(8192), &[1]).unwrap();
    let seen = firsts(&d, &[0, 4096, 8192]);
    assert!(
        !seen.iter().any(|s| s[1] == 0 && s[2] == 1),
        "the third was submitted after the second was durable"
    );
    assert!(
        seen.contains(&vec![0, 1, 1])
            && seen.contains(&vec![0, 1, 0])
            && seen.contains(&vec![1, 0, 0])
    );
}

#[test]
fn racing_writes_appear_in_both_orders() {
    let d = small();
    let gate = d.gate(|a| a.at == 0);
    std::thread::scope(|s| {
        s.spawn(|| d.write_at(Physical(0), &[1; 8192]));
        assert!(gate.wait_for(1, Duration::from_secs(10)));
        d.write_at(Physical(4096), &[2; 8192]).unwrap();
        gate.open();
    });
    drop(gate);
    let seen = firsts(&d, &[0, 4096, 8192]);
    assert!(seen.contains(&vec![1, 1, 2]) && seen.contains(&vec![1, 2, 2]), "{seen:?}");
}

#[test]
fn what_a_failed_flush_should_have_covered_may_be_lost_for_good() {
    let d = small();
    d.write_at(Physical(0), &[1]).unwrap();
    d.inject(Fault::nth(0, |a| a.kind == AccessKind::Flush));
    assert!(d.flush().is_err());
    d.write_at(Physical(4096), &[1]).unwrap();
    d.flush().unwrap();
    d.write_at(Physical(8192), &[1]).unwrap();
    let seen = firsts(&d, &[0, 4096, 8192]);
    assert!(seen.contains(&vec![0, 1, 1]), "{seen:?}");
    assert!(!seen.contains(&vec![0, 0, 1]), "{seen:?}");
}

#[test]
fn an_old_write_does_not_come_back_over_a_newer_durable_one() {
    let d = small();
    d.write_at(Physical(0), &[1]).unwrap();
    d.write_fua(Physical(0), &[2]).unwrap().unwrap();
    d.write_at(Physical(4096), &[1]).unwrap();
    let seen = firsts(&d, &[0, 4096]);
    assert!(!seen.contains(&vec![1, 1]), "{seen:?}");
    assert!(seen.contains(&vec![2, 1]) && seen.contains(&vec![2, 0]));
}

#[test]
fn torn_writes_show_at_512_bytes_and_superblocks_never_tear() {
    let d = small();
    d.write_at(Physical(4096), &[1; 8192]).unwrap();
    d.write_at(SUPER, &[1; 4096]).unwrap();
    let crashes = Crashes::of(&d.recording(), &Limits { samples: 64, ..Limits::default() });
    let mut torn = 0;
    for state in &crashes.states {
        let image = crashes.image(state);
        let mut b = vec![0; 8192];
        image.read(4096, &mut b);
        for sector in b.chunks(512) {
            assert!(sector.iter().all(|x| *x == sector[0]), "torn inside of a sector");
        }
        torn += u32::from(b.contains(&0) && b.contains(&1));
        image.read(SUPER.0, &mut b[..4096]);
        assert!(b[..4096].iter().all(|x| *x == b[0]), "torn superblock");
    }
    assert!(torn >= 2, "{torn}");
}
