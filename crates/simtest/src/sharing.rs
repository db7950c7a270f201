//! Workloads on shared extents and blocks: subvolumes, snapshots, clones, deduplication, and syncs
//! of files on either side of a snapshot.
//!
//! [`sharing`] is a seeded walk over a handful of subvolumes and the files in them. Mostly it
//! deduplicates ranges that the model knows to be equal. Files have equal ranges because of copies,
//! and because written bytes depend on letter and place alone. A third of the operations are those
//! of [`crate::workload::random`].

use crate::ops::{Bytes, Move, Op};
use crate::workload::{Workload, random_op};
use crate::world::{Body, Content, Ino, ROOT, Refusal, Top, World};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use std::collections::BTreeMap;

const PAGE: u64 = 4096;
/// Subvolumes at most, the top-level one not counted.
const MOST: usize = 5;

/// What the walks begin with, or with a first part of it.
const BEGIN: &str =
    "sub S; new S/f; S/f[0,72K)=a; new S/g; copy S/f[0,40K)>S/g@4K; S/g[0,8K)=b; COMMIT; snap S>T";

/// A walk of `length` operations.
#[must_use]
pub fn sharing(seed: u64, length: usize) -> Workload {
    let mut rng = StdRng::seed_from_u64(seed ^ 0x7368_6172);
    let mut world = World::empty(0o755, 256);
    let mut ops = crate::ops::parse(BEGIN).expect("a workload").remove(0);
    ops.truncate(length.min(rng.random_range(1..=ops.len())));
    for op in &ops {
        world.apply(op).expect("it is possible");
    }
    let mut tries = 0;
    while ops.len() < length && tries < length * 20 {
        tries += 1;
        let op = if rng.random_ratio(1, 3) {
            random_op(&mut rng, &world, "")
        } else {
            sharing_op(&mut rng, &world)
        };
        let mut after = world.clone();
        match after.apply(&op) {
            Ok(_) => world = after,
            // Borders and read-only subvolumes refuse more than others do.
            Err(Refusal::NotModelled) => continue,
            Err(_) if op.is_sync() || !rng.random_ratio(1, 10) => continue,
            Err(_) => {}
        }
        ops.push(op);
    }
    Workload::simple(format!("sharing-{seed}-{length}"), ops)
}

/// Every file: its path and what is in it.
fn files(world: &World) -> Vec<(String, Ino, &Content)> {
    let file = |(path, _, _, ino): (String, Ino, String, Ino)| match &world.node(ino)?.body {
        Body::File(content) => Some((path, ino, &**content)),
        _ => None,
    };
    world.names().into_iter().filter_map(file).collect()
}

/// Two places with the same bytes, as an operation that deduplicates them.
fn same(rng: &mut StdRng, world: &World) -> Option<Op> {
    let files = files(world);
    let mut places: BTreeMap<&[u8; PAGE as usize], Vec<(usize, u64)>> = BTreeMap::new();
    for (i, (_, ino, content)) in files.iter().enumerate() {
        // One name of each file.
        if files[..i].iter().all(|f| f.1 != *ino) {
            for n in content.page_numbers() {
                places.entry(content.page(n)?).or_default().push((i, n));
            }
        }
    }
    let several: Vec<_> = places.into_values().filter(|p| p.len() > 1).collect();
    let places = several.choose(rng)?;
    let (a, b) = (*places.choose(rng)?, *places.choose(rng)?);
    let ((from, _, here), (to, _, there)) = (&files[a.0], &files[b.0]);
    let most = rng.random_range(1..40);
    let is_same =
        |n: &u64| here.page(a.1 + n).is_some() && here.page(a.1 + n) == there.page(b.1 + n);
    let pages = (0..most).take_while(is_same).count() as u64;
    let range = Bytes { from: a.1 * PAGE, to: ((a.1 + pages) * PAGE).min(here.size) };
    let at = b.1 * PAGE;
    (a != b).then(|| Op::Dedupe { from: from.clone(), range, to: to.clone(), at })
}

pub(crate) fn sharing_op(rng: &mut StdRng, world: &World) -> Op {
    const TOPS: [&str; 7] = ["S", "T", "U", "A/V", "S/W", "T/X", "Y"];
    const NAMES: [&str; 3] = ["f", "g", "d/h"];
    let tops: Vec<String> = world
        .names()
        .into_iter()
        .filter(|n| world.node(n.3).is_some_and(|node| node.top != Top::No))
        .map(|n| n.0)
        .collect();
    let new_top = |rng: &mut StdRng| (*TOPS.choose(rng).expect("not empty")).to_owned();
    let top = |rng: &mut StdRng| tops.choose(rng).cloned().unwrap_or_else(|| "S".into());
    let all = files(world);
    let shared: Vec<&String> = all
        .iter()
        .filter(|f| world.node(f.1).is_some_and(|n| n.home != ROOT))
        .map(|f| &f.0)
        .collect();
    let inside =
        |rng: &mut StdRng| format!("{}/{}", top(rng), NAMES.choose(rng).expect("not empty"));
    let file = |rng: &mut StdRng| match shared.choose(rng) {
        Some(path) if rng.random_ratio(4, 5) => (*path).clone(),
        _ => inside(rng),
    };
    let placeholder = |rng: &mut StdRng| {
        let is_one = |ino| world.node(ino).is_some_and(|n| n.placeholder);
        let all: Vec<String> =
            world.names().into_iter().filter(|n| is_one(n.3)).map(|n| n.0).collect();
        all.choose(rng).cloned().unwrap_or_else(|| "A".into())
    };
    // Few letters and places: what is written in two files is often the same.
    let letter = |rng: &mut StdRng| *b"abAB".choose(rng).expect("not empty");
    let place = |rng: &mut StdRng| PAGE * rng.random_range(0..24);
    let len = |rng: &mut StdRng| match rng.random_range(0..4) {
        0 => rng.random_range(1..3000),
        1 => PAGE * rng.random_range(1..32) + rng.random_range(1..4000),
        _ => PAGE * rng.random_range(1..32),
    };
    match rng.random_range(0..100) {
        0..18 if tops.len() >= MOST => Op::DeleteSubvolume(top(rng)),
        0..3 => Op::Subvolume(new_top(rng)),
        3..18 => {
            Op::Snapshot { from: top(rng), to: new_top(rng), read_only: rng.random_ratio(1, 3) }
        }
        18..24 => Op::DeleteSubvolume(top(rng)),
        24..26 => Op::Rename { from: top(rng), to: new_top(rng), mode: Move::Replace },
        26..28 => Op::DefaultSubvolume(if rng.random() { String::new() } else { top(rng) }),
        28 => Op::Mkdir(format!("{}/d", top(rng))),
        29 => Op::Rmdir(placeholder(rng)),
        30..37 => Op::Create(inside(rng)),
        37..49 => {
            let from = if rng.random() { 0 } else { place(rng) };
            Op::Write {
                path: file(rng),
                range: Bytes { from, to: from + len(rng) },
                fill: letter(rng),
            }
        }
        49..51 => Op::Append { path: file(rng), len: len(rng), fill: letter(rng) },
        51..53 => Op::Truncate { path: file(rng), size: place(rng) + rng.random_range(0..2) * 777 },
        53..55 => Op::Unlink(file(rng)),
        55..64 => {
            let from = place(rng);
            let (range, at) = (Bytes { from, to: from + len(rng) }, place(rng));
            Op::Copy { from: file(rng), range, to: file(rng), at }
        }
        64..76 => same(rng, world).unwrap_or_else(|| Op::Create(inside(rng))),
        76..77 => {
            let from = place(rng);
            let (range, at) = (Bytes { from, to: from + len(rng) }, place(rng));
            Op::Dedupe { from: file(rng), range, to: file(rng), at }
        }
        77..92 => Op::Fsync(file(rng)),
        92..94 => Op::Fdatasync(file(rng)),
        94..97 => Op::Fsync(top(rng)),
        _ => Op::Sync,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn the_walks_share_in_every_way() {
        let mut done: BTreeMap<String, usize> = BTreeMap::new();
        let mut fsynced_beside = BTreeSet::new();
        let mut nested = 0;
        for seed in 0..40 {
            let workload = sharing(seed, 40);
            assert_eq!(workload, sharing(seed, 40));
            let mut world = World::empty(0o755, 256);
            for op in &workload.segments[0].threads[0] {
                let word = op.to_string().split(' ').next().unwrap_or_default().to_owned();
                if let Op::Fsync(path) = op
                    && let Some(node) = world.resolve(path).ok().and_then(|i| world.node(i))
                {
                    fsynced_beside.insert(world.node(node.home).map(|n| n.top == Top::ReadOnly));
                }
                if let Op::Snapshot { from, .. } = op {
                    nested +=
                        usize::from(world.resolve(from).is_ok_and(|top| world.has_nested(top)));
                }
                if world.apply(op).is_ok() {
                    *done.entry(word).or_default() += 1;
                }
            }
        }
        for word in ["sub", "snap", "snap=", "sub-", "default", "dedupe", "copy", "mv", "F"] {
            assert!(done.get(word).is_some_and(|n| *n > 5), "{word}: {done:?}");
        }
        assert_eq!(fsynced_beside.len(), 2);
        assert!(nested > 10, "{nested} snapshots of what has subvolumes");
    }
}
