//! Workloads on shared extents and logs: files clone from each other what was written just now, and
//! are synced one by one with no commit in between.
//!
//! [`cloning`] is a seeded walk over three files. It tries cases that matter to a log but not to a
//! commit: sectors that were written back together and now belong to several files; extents that
//! could still grow when a log or another file had them; bytes that are overwritten in place
//! although an earlier log shows them elsewhere. A clone must not commit by itself, so these walks
//! are for [`Config::whole`](crate::runner::Config::whole). They begin with a committed data chunk:
//! without one every `fsync` of data commits.

use crate::data::SETTINGS;
use crate::ops::{Alloc, Bytes, Op, parse};
use crate::workload::Workload;
use crate::world::{Body, World};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

/// The files.
const NAMES: [&str; 3] = ["f", "g", "h"];
const BEGIN: &str = "new z; z[0,64K)=Z; COMMIT";
const PAGE: u64 = 4096;
/// Pieces of this size are joined with what comes before them.
const PIECE: u64 = 256 << 10;
/// Longer files are only cut.
const MOST: u64 = 3 << 19;

/// A walk of `length` operations; every second one on plain data, the others with the
/// [`crate::data::settings`] in their name.
#[must_use]
pub fn cloning(seed: u64, length: usize) -> Workload {
    let mut rng = StdRng::seed_from_u64(seed ^ 0x636c_6f6e);
    let mut world = World::empty(0o755, 256);
    let mut ops = parse(BEGIN).expect("a workload").remove(0);
    for op in &ops {
        world.apply(op).expect("it is possible");
    }
    // A file that is overwritten in place can clone only from another such file.
    let in_place = *[0.0, 0.2, 1.0].choose(&mut rng).expect("not empty");
    let mut at = NAMES[0];
    while ops.len() < length {
        if rng.random_ratio(1, 3) {
            at = NAMES.choose(&mut rng).expect("not empty");
        }
        for op in next(&mut rng, &world, at, in_place) {
            let mut after = world.clone();
            if after.apply(&op).is_ok() {
                world = after;
                ops.push(op);
            }
        }
    }
    let settings = if seed.is_multiple_of(2) { 0 } else { seed / 2 % SETTINGS };
    Workload::simple(format!("cloning-{seed}-{length} (--settings {settings})"), ops)
}

/// What is done next to a file: one operation, or a few that belong together.
fn next(rng: &mut StdRng, world: &World, name: &str, in_place: f64) -> Vec<Op> {
    let path = name.to_owned();
    let content = world.resolve(name).ok().and_then(|ino| match &world.node(ino)?.body {
        Body::File(content) => Some(content.clone()),
        _ => None,
    });
    let Some(content) = content else {
        let mut ops = vec![Op::Create(path.clone())];
        ops.extend(rng.random_bool(in_place).then_some(Op::NoCow(path)));
        return ops;
    };
    let size = content.size;
    let fill = *b"aAbBcC".choose(rng).expect("not empty");
    let near = |rng: &mut StdRng| PAGE * rng.random_range(0..12);
    match rng.random_range(0..100) {
        0..18 if size >= MOST => vec![Op::Truncate { path, size: 0 }],
        // A stream goes on.
        0..18 if size.is_multiple_of(PAGE) => {
            vec![Op::Append { path, len: PIECE * rng.random_range(1..=2), fill }]
        }
        0..32 => scattered(rng, name, fill),
        32..34 => vec![Op::Truncate { path, size: if rng.random() { 0 } else { near(rng) } }],
        34..39 => {
            let (how, _) = *Alloc::ALL.choose(rng).expect("not empty");
            let from = if rng.random() { size.next_multiple_of(PAGE) } else { near(rng) };
            let len = if rng.random() { PAGE * rng.random_range(1..6) } else { PIECE };
            vec![Op::Allocate { path, how, range: Bytes { from, to: from + len } }]
        }
        39..73 => shared(rng, world, name, size),
        73..76 => vec![Op::Unlink(path)],
        76..78 => vec![Op::Fdatasync(path)],
        78..98 => vec![Op::Fsync(path)],
        _ => vec![Op::Sync],
    }
}

/// Writes here and there, to be written back together.
fn scattered(rng: &mut StdRng, name: &str, fill: u8) -> Vec<Op> {
    let mut write = |_| {
        let from = PAGE * rng.random_range(0..12);
        let range = Bytes { from, to: from + PAGE * rng.random_range(1..4) };
        Op::Write { path: name.to_owned(), range, fill }
    };
    (0..3).map(&mut write).collect()
}

/// Another file gets the extents of a file, or of some of its sectors, at the same place or
/// elsewhere. They may have been written just now. Mostly one of the two files is synced; the other
/// may be deleted, and the first one be changed.
fn shared(rng: &mut StdRng, world: &World, name: &str, size: u64) -> Vec<Op> {
    let others: Vec<&str> = NAMES.into_iter().filter(|n| *n != name).collect();
    let to = (*others.choose(rng).expect("not empty")).to_owned();
    let nocow = world.resolve(name).ok().and_then(|i| world.node(i)).is_some_and(|n| n.nocow);
    let mut ops = Vec::new();
    if world.resolve(&to).is_err() {
        ops.push(Op::Create(to.clone()));
        ops.extend(nocow.then(|| Op::NoCow(to.clone())));
    }
    let fill = *b"dD".choose(rng).expect("not empty");
    let mut range = Bytes { from: 0, to: size };
    match rng.random_range(0..6) {
        0..2 => {
            let writes = scattered(rng, name, fill);
            if let Some(Op::Write { range: last, .. }) = writes.last() {
                range = *last;
            }
            ops.extend(writes);
        }
        // A stream that goes on behind what is in a log.
        2 if size.is_multiple_of(PAGE) => {
            let append = Op::Append { path: name.to_owned(), len: 2 * PIECE, fill };
            ops.extend([append.clone(), Op::Fsync(name.to_owned()), append]);
            range.to += 4 * PIECE;
        }
        2 => {
            range.from = PAGE * rng.random_range(0..12);
            range.to = range.from + PAGE * rng.random_range(1..6);
        }
        _ => {}
    }
    let at = if rng.random_ratio(2, 3) { range.from } else { PAGE * rng.random_range(0..12) };
    ops.push(Op::Copy { from: name.to_owned(), range, to: to.clone(), at });
    let (this, other) = (Op::Fsync(name.to_owned()), Op::Fsync(to.clone()));
    match rng.random_range(0..8) {
        0 => {}
        1 => ops.push(this),
        2..5 => ops.push(other),
        _ => {
            let path = name.to_owned();
            let goes_on = size.is_multiple_of(PAGE) && rng.random_ratio(1, 2);
            let change = match goes_on {
                true => Op::Append { path, len: 2 * PIECE, fill },
                false => Op::Write { path, range, fill: fill + 1 },
            };
            let durable = if rng.random_ratio(1, 4) { Op::Sync } else { other };
            ops.extend([durable, Op::Unlink(to), change, this]);
        }
    }
    ops
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn the_walks_clone_what_no_commit_has() {
        let mut done: BTreeMap<String, usize> = BTreeMap::new();
        let mut fresh = 0;
        for seed in 0..40 {
            let workload = cloning(seed, 40);
            assert_eq!(workload, cloning(seed, 40));
            let mut written = false;
            for op in &workload.segments[0].threads[0] {
                match op {
                    Op::Write { .. } | Op::Append { .. } => written = true,
                    Op::Sync => written = false,
                    Op::Copy { .. } => fresh += usize::from(written),
                    _ => {}
                }
                let word = op.to_string().split(' ').next().unwrap_or_default().to_owned();
                *done.entry(word).or_default() += 1;
            }
        }
        assert!(fresh > 100, "{fresh}");
        for word in ["copy", "nocow", "rm", "F", "FD", "trunc", "alloc", "zero", "punch", "COMMIT"]
        {
            assert!(done.get(word).is_some_and(|n| *n > 3), "{word}: {done:?}");
        }
    }
}
