//! Workloads on the contents of files: writes, appends, truncations and fallocate, with every way
//! of storing them.
//!
//! [`data`] is a seeded walk over few files, with hardly anything but operations on their contents.
//! Many of them hit what an earlier operation has left: reserved space, the middle of compressed
//! extents, a last sector that is half full, a file just small enough for its leaf. [`settings`]
//! are the ways of storing: each method of compression, files in leaves or never, no checksums,
//! space discarded to the last sector.

use crate::ops::{Alloc, Bytes, Move, Op};
use crate::workload::Workload;
use crate::world::{Body, Node, World};
use larder_format::items::Compression;
use larder_fs::{Compress, OpenOptions, Packing};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

/// How many settings there are.
pub const SETTINGS: u64 = 8;

/// Puts the settings of a number, modulo [`SETTINGS`], into what a file system is opened with.
pub fn settings(number: u64, options: &mut OpenOptions) {
    let packed = |method, level, force| {
        let packing = Packing::new(method, level).expect("a level that the method has");
        Some(Compress { packing, force })
    };
    options.compress = match number % SETTINGS {
        1 => packed(Compression::Zlib, Some(3), true),
        2 => packed(Compression::Lzo, None, true),
        3 => packed(Compression::Zstd, Some(1), true),
        4 => packed(Compression::Zstd, None, false),
        5 => packed(Compression::Zlib, None, true),
        _ => None,
    };
    options.max_inline = match number % SETTINGS {
        5 => 4095,
        6 => 0,
        _ => options.max_inline,
    };
    options.no_data_sum = number % SETTINGS == 7;
    options.tuning.discard_everything = number % 2 == 1;
}

/// A walk of `length` operations, to be run with the [`settings`] of the same number.
#[must_use]
pub fn data(seed: u64, length: usize) -> Workload {
    let mut rng = StdRng::seed_from_u64(seed ^ 0x6461_7461);
    let mut world = World::empty(0o755, 256);
    let mut ops = Vec::new();
    while ops.len() < length {
        let op = data_op(&mut rng, &world);
        let mut after = world.clone();
        // Other walks try operations that are refused.
        if after.apply(&op).is_ok() {
            world = after;
            ops.push(op);
        }
    }
    Workload::simple(format!("data-{seed}-{length} (--settings {})", seed % SETTINGS), ops)
}

fn data_op(rng: &mut StdRng, world: &World) -> Op {
    const NAMES: [&str; 4] = ["f", "g", "h", "i"];
    let name = |rng: &mut StdRng| (*NAMES.choose(rng).expect("not empty")).to_owned();
    let path = name(rng);
    let node: Option<&Node> =
        world.resolve(&path).ok().and_then(|ino| world.node(ino)).map(|n| &**n);
    let Some(Node { body: Body::File(content), nocow, .. }) = node else { return Op::Create(path) };
    let size = content.size;
    // Bytes that shrink and bytes that do not.
    let fill = if rng.random_bool(0.6) {
        rng.random_range(b'a'..=b'z')
    } else {
        rng.random_range(b'A'..=b'Z')
    };
    let len = |rng: &mut StdRng| match rng.random_range(0..6) {
        0 => rng.random_range(1..300),
        1 => rng.random_range(1..5000),
        2 => 4096 * rng.random_range(1..40),
        3 => 4096 * rng.random_range(1..40) + rng.random_range(0..3) - 1,
        4 => rng.random_range(1..300_000),
        _ => rng.random_range(100_000..600_000),
    };
    let place = |rng: &mut StdRng| match rng.random_range(0..5) {
        0 => 0,
        1 => size,
        2 => rng.random_range(0..=size) / 4096 * 4096,
        3 => rng.random_range(0..=size),
        _ => rng.random_range(0..700_000),
    };
    let range = |rng: &mut StdRng| {
        let from = place(rng);
        Bytes { from, to: from + len(rng) }
    };
    match rng.random_range(0..100) {
        // Most of the files that are overwritten in place are empty when they become so.
        0..15 if size == 0 && !nocow => Op::NoCow(path),
        0..36 => Op::Write { path, range: range(rng), fill },
        36..42 => Op::Append { path, len: len(rng), fill },
        42..52 => Op::Truncate { path, size: if rng.random_bool(0.2) { 0 } else { place(rng) } },
        52..72 => {
            let (how, _) = *Alloc::ALL.choose(rng).expect("not empty");
            Op::Allocate { path, how, range: range(rng) }
        }
        72..75 => Op::Copy { from: path, range: range(rng), to: name(rng), at: place(rng) },
        75..77 => Op::Unlink(path),
        77..79 => Op::Rename { from: path, to: name(rng), mode: Move::Replace },
        79..90 => Op::Fsync(path),
        90..94 => Op::Fdatasync(path),
        _ => Op::Sync,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn the_walks_do_everything_in_every_setting() {
        let mut words = HashSet::new();
        let mut stored = HashSet::new();
        for seed in 0..3 * SETTINGS {
            let workload = data(seed, 40);
            assert_eq!(workload, data(seed, 40));
            let ops = &workload.segments[0].threads[0];
            assert_eq!(ops.len(), 40);
            words.extend(
                ops.iter()
                    .map(|op| op.to_string().split(' ').next().unwrap_or_default().to_owned()),
            );
            let mut options = OpenOptions::default();
            settings(seed, &mut options);
            stored.insert(format!(
                "{:?} {} {}",
                options.compress, options.max_inline, options.no_data_sum
            ));
        }
        for word in [
            "nocow", "trunc", "alloc", "alloc=", "zero", "zero=", "punch", "F", "FD", "COMMIT",
            "copy",
        ] {
            assert!(words.contains(word), "{word} is never done");
        }
        assert_eq!(stored.len() as u64, SETTINGS);
    }
}
