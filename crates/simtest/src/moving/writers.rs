//! What is written beside moves.
//!
//! Everything lies under names with the prefix of its thread: small files, extents that clones and
//! snapshots share, reserved space, a file that is written in place. What snapshots share has more
//! than one leaf, since each snapshot has a root of its own. Then each thread takes a walk over
//! these, which is that of the other simulations and has more snapshots and clones.

use crate::ops::{Op, parse};
use crate::sharing::sharing_op;
use crate::workload::{prefix, random_op};
use crate::world::World;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::fmt::Write;

/// What a thread begins with.
pub(crate) fn beginning(prefix: &str) -> Vec<Op> {
    let p = prefix;
    let mut text = format!(
        "sub {p}S; new {p}S/f; {p}S/f[0,48K)=A; new {p}S/g; copy {p}S/f[0,24K)>{p}S/g@4K; \
         {p}S/g[0,8K)=b; new {p}S/h; alloc {p}S/h[0,32K); {p}S/h[8K,12K)=B; new {p}n; nocow {p}n; \
         {p}n[0,16K)=C; mk {p}d; "
    );
    for n in 0..6 {
        let len = n * 1397 % 5000 + 1;
        write!(text, "new {p}d/{n}; {p}d/{n}[0,{len})=d; ").expect("memory");
    }
    for n in 0..14 {
        write!(text, "new {p}S/{n}; {p}S/{n}[0,1500)=e; ").expect("memory");
    }
    write!(text, "COMMIT; snap {p}S>{p}T; snap= {p}S>{p}R; {p}S/f[16K,24K)=D; COMMIT")
        .expect("memory");
    parse(&text).expect("it is in the notation").remove(0)
}

/// The prefix of a thread of so many.
pub(crate) fn prefix_of(thread: usize, threads: usize) -> String {
    if threads > 1 { prefix(thread) } else { String::new() }
}

/// A walk over what is there.
pub(crate) fn walk(seed: u64, length: usize, prefix: &str, base: &World) -> Vec<Op> {
    let mut rng = StdRng::seed_from_u64(seed ^ 0x6d6f_7665);
    let mut world = base.clone();
    let mut out = Vec::new();
    for _ in 0..length * 20 {
        if out.len() >= length {
            break;
        }
        let op = match rng.random_range(0..10) {
            0..5 if prefix.is_empty() => sharing_op(&mut rng, &world),
            0..2 => subvolume_op(&mut rng, prefix),
            2 => Op::Fsync(format!("{prefix}d")),
            3 => Op::Fsync(format!("{prefix}n")),
            _ => random_op(&mut rng, &world, prefix),
        };
        let mut after = world.clone();
        if after.apply(&op).is_ok() {
            world = after;
            out.push(op);
        }
    }
    out
}

fn subvolume_op(rng: &mut StdRng, prefix: &str) -> Op {
    let name = |rng: &mut StdRng| format!("{prefix}{}", rng.random_range(b'P'..=b'U') as char);
    match rng.random_range(0..3) {
        0 => Op::DeleteSubvolume(name(rng)),
        _ => Op::Snapshot { from: name(rng), to: name(rng), read_only: rng.random_bool(0.3) },
    }
}
