//! Which operations are tried: every short sequence, named scenarios, and random long ones.
//!
//! A [`Workload`] is a list of segments with a power cut after each; a segment is one list of
//! operations for each of its threads. Four sources:
//!
//! - [`Sequences`]: all sequences of one, two or three *core operations* over a few names
//!   (directories A, B, A/C, files f, g, A/f, A/g, fixed arguments), with every choice of a sync
//!   after every operation. What they need is made before them, committed or not. Sequences that
//!   are equal up to swapping f and g are one;
//! - [`scenarios`](crate::scenarios): shapes that broke file systems before;
//! - [`random`]: a seeded walk over everything the model can do;
//! - [`threads`]: several of those at the same time, each thread under names of its own in the same
//!   directory.

use crate::ops::{Alloc, Bytes, Move, Op, Special, line, parse};
use crate::world::{Body, Ino, ROOT, Refusal, World};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use std::collections::HashSet;

/// What runs between two power cuts: the operations of each thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// One list per thread. With more than one, thread `i` works on names in the root that begin
    /// with [`prefix`]`(i)`.
    pub threads: Vec<Vec<Op>>,
}

/// Something to run and to crash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Workload {
    /// For messages.
    pub name: String,
    /// In order; a power cut after each.
    pub segments: Vec<Segment>,
}

/// What the names of a thread begin with.
#[must_use]
pub fn prefix(thread: usize) -> String {
    format!("t{thread}_")
}

impl Workload {
    /// One thread, one segment.
    #[must_use]
    pub fn simple(name: impl Into<String>, ops: Vec<Op>) -> Self {
        Self { name: name.into(), segments: vec![Segment { threads: vec![ops] }] }
    }

    /// From the notation.
    ///
    /// # Errors
    /// The part that is not understood.
    pub fn script(name: impl Into<String>, text: &str) -> Result<Self, String> {
        let segments = parse(text)?.into_iter().map(|ops| Segment { threads: vec![ops] }).collect();
        Ok(Self { name: name.into(), segments })
    }

    /// The operations in the notation; threads are separated by `|`, which the notation cannot
    /// express.
    #[must_use]
    pub fn text(&self) -> String {
        let segment =
            |s: &Segment| s.threads.iter().map(|t| line(t)).collect::<Vec<_>>().join(" | ");
        self.segments.iter().map(segment).collect::<Vec<_>>().join("; ✂; ")
    }

    /// Can [`Workload::text`] be run again as it is?
    #[must_use]
    pub fn is_single(&self) -> bool {
        self.segments.iter().all(|s| s.threads.len() == 1)
    }
}

fn p(path: &str) -> String {
    path.to_owned()
}

/// The operations that sequences are made of.
#[must_use]
pub(crate) fn core_ops() -> Vec<Op> {
    const FILES: [&str; 4] = ["f", "g", "A/f", "A/g"];
    let write =
        |path: &str, from, to, fill| Op::Write { path: p(path), range: Bytes { from, to }, fill };
    let mut ops = Vec::new();
    for file in FILES {
        ops.push(Op::Create(p(file)));
        ops.push(Op::Unlink(p(file)));
        for other in FILES.into_iter().filter(|o| *o != file) {
            ops.push(Op::Link { from: p(file), to: p(other) });
            ops.push(Op::Rename { from: p(file), to: p(other), mode: Move::Replace });
        }
    }
    ops.extend(["A", "B", "A/C"].map(|d| Op::Mkdir(p(d))));
    ops.extend(["B", "A/C"].map(|d| Op::Rmdir(p(d))));
    let mv = |from: &str, to: &str, mode| Op::Rename { from: p(from), to: p(to), mode };
    ops.push(mv("A", "B", Move::Replace));
    ops.push(mv("B", "A/C", Move::Replace));
    ops.push(mv("f", "g", Move::Exchange));
    ops.push(mv("f", "A/f", Move::Exchange));
    ops.push(mv("A", "f", Move::Exchange));
    ops.push(mv("f", "A/g", Move::Whiteout));
    for file in ["f", "A/f"] {
        ops.push(Op::Mknod(Special::Fifo, p(file)));
        ops.push(Op::Symlink { target: p("target"), path: p(file) });
        ops.push(write(file, 0, 16 << 10, b'a'));
        ops.push(write(file, 4096, 12 << 10, b'b'));
        ops.push(write(file, 1000, 3000, b'c'));
        ops.push(write(file, 0, 100, b'd'));
        ops.push(write(file, 1 << 20, (1 << 20) + 5000, b'e'));
        ops.push(Op::Append { path: p(file), len: 5000, fill: b'f' });
        for size in [0, 3000, 64 << 10] {
            ops.push(Op::Truncate { path: p(file), size });
        }
        for (how, from, to) in [
            (Alloc::Reserve, 5000, 64 << 10),
            (Alloc::ReserveKeepSize, 0, 32 << 10),
            (Alloc::Zero, 1000, 20_000),
            (Alloc::Punch, 1000, 9000),
        ] {
            ops.push(Op::Allocate { path: p(file), how, range: Bytes { from, to } });
        }
        ops.push(Op::SetXattr { path: p(file), name: p("user.k"), value: p("v") });
        ops.push(Op::RemoveXattr { path: p(file), name: p("user.k") });
        ops.push(Op::Chmod { path: p(file), perm: 0o600 });
        ops.push(Op::Copy {
            from: p(file),
            range: Bytes { from: 0, to: 8192 },
            to: p("g"),
            at: 4096,
        });
    }
    ops.push(Op::SetXattr { path: p("A"), name: p("user.k"), value: p("v") });
    ops.push(Op::Chmod { path: p("A"), perm: 0o700 });
    ops.push(Op::Copy { from: p("f"), range: Bytes { from: 1000, to: 6000 }, to: p("A/g"), at: 0 });
    ops
}

/// Paths that have to exist before the operation, and paths whose parents have to.
fn needs(op: &Op) -> (Vec<&str>, Vec<&str>) {
    match op {
        Op::Create(to) | Op::Mkdir(to) | Op::Mknod(_, to) | Op::Symlink { path: to, .. } => {
            (vec![], vec![to])
        }
        Op::Link { from, to } | Op::Rename { from, to, mode: Move::Replace | Move::Whiteout } => {
            (vec![from], vec![to])
        }
        Op::Rename { from, to, mode: Move::Exchange }
        | Op::Copy { from, to, .. }
        | Op::Dedupe { from, to, .. } => (vec![from, to], vec![]),
        Op::Snapshot { from, to, .. } => (vec![from], vec![to]),
        Op::Subvolume(to) => (vec![], vec![to]),
        Op::Unlink(at)
        | Op::Rmdir(at)
        | Op::Write { path: at, .. }
        | Op::Append { path: at, .. }
        | Op::Truncate { path: at, .. }
        | Op::Allocate { path: at, .. }
        | Op::NoCow(at)
        | Op::SetXattr { path: at, .. }
        | Op::RemoveXattr { path: at, .. }
        | Op::Chmod { path: at, .. }
        | Op::Fsync(at)
        | Op::Fdatasync(at)
        | Op::DeleteSubvolume(at)
        | Op::DefaultSubvolume(at)
        | Op::Open { path: at, .. } => (vec![at], vec![]),
        Op::Sync | Op::Unnamed { .. } | Op::Close { .. } => (vec![], vec![]),
    }
}

/// What to do first so that `op` is possible in `world`.
fn prepare(world: &World, op: &Op) -> Vec<Op> {
    let mut out: Vec<Op> = Vec::new();
    let (exist, parents) = needs(op);
    for path in exist.iter().chain(&parents) {
        if let Some((dir, _)) = path.rsplit_once('/')
            && world.resolve(dir).is_err()
            && !out.contains(&Op::Mkdir(p(dir)))
        {
            out.push(Op::Mkdir(p(dir)));
        }
    }
    for path in exist.iter().filter(|path| world.resolve(path).is_err()) {
        let is_dir = matches!(op, Op::Rmdir(_)) || ["A", "B", "A/C"].contains(path);
        if is_dir {
            if !out.contains(&Op::Mkdir(p(path))) {
                out.push(Op::Mkdir(p(path)));
            }
        } else {
            out.push(Op::Create(p(path)));
            out.push(Op::Write { path: p(path), range: Bytes { from: 0, to: 8192 }, fill: b'i' });
        }
    }
    if let Op::RemoveXattr { path, name } = op {
        let has = |ino| world.node(ino).is_some_and(|n| n.xattrs.contains_key(name));
        if !world.resolve(path).is_ok_and(has) {
            out.push(Op::SetXattr { path: path.clone(), name: name.clone(), value: p("old") });
        }
    }
    out
}

/// The core operations with what has to be there first; `None` where they make no sense together.
fn complete(core: &[Op]) -> Option<(Vec<Op>, Vec<Op>)> {
    let mut first: Vec<Op> = Vec::new();
    'again: for _ in 0..6 {
        let mut world = World::empty(0o755, 256);
        for op in &first {
            world.apply(op).ok()?;
        }
        for op in core {
            match world.apply(op) {
                Ok(_) => {}
                Err(Refusal::NotFound | Refusal::NoAttribute) => {
                    let more = prepare(&world, op);
                    if more.is_empty() || more.iter().any(|m| first.contains(m)) {
                        return None;
                    }
                    first.extend(more);
                    continue 'again;
                }
                Err(_) => return None,
            }
        }
        return Some((first, core.to_vec()));
    }
    None
}

/// Renamings under which sequences count as equal.
fn renamings() -> [fn(&str) -> String; 3] {
    fn root(path: &str) -> String {
        match path {
            "f" => p("g"),
            "g" => p("f"),
            other => p(other),
        }
    }
    fn below(path: &str) -> String {
        match path {
            "A/f" => p("A/g"),
            "A/g" => p("A/f"),
            other => p(other),
        }
    }
    fn both(path: &str) -> String {
        below(&root(path))
    }
    [root, below, both]
}

fn canonical(ops: &[Op]) -> String {
    let renamed =
        |r: fn(&str) -> String| line(&ops.iter().map(|op| op.map_paths(&r)).collect::<Vec<_>>());
    renamings().into_iter().map(renamed).chain([line(ops)]).min().expect("at least itself")
}

/// Bounded sequences. The skeletons are made at once, the placements of syncs when asked for.
#[derive(Debug)]
pub struct Sequences {
    /// What comes first, and the core operations.
    pub skeletons: Vec<(Vec<Op>, Vec<Op>)>,
}

impl Sequences {
    /// All sequences of `length` (1 or 2) core operations.
    #[must_use]
    pub fn all(length: usize) -> Self {
        let ops = core_ops();
        let mut seen = HashSet::new();
        let mut skeletons = Vec::new();
        let mut indices = vec![0; length];
        loop {
            let core: Vec<Op> = indices.iter().map(|i: &usize| ops[*i].clone()).collect();
            if let Some(skeleton) = complete(&core)
                && seen.insert(canonical(&core))
            {
                skeletons.push(skeleton);
            }
            let Some(at) = indices.iter().rposition(|i| *i + 1 < ops.len()) else { break };
            indices[at] += 1;
            indices[at + 1..].fill(0);
        }
        Self { skeletons }
    }

    /// A seeded sample of `count` sequences of `length` core operations.
    #[must_use]
    pub fn sample(length: usize, count: usize, seed: u64) -> Self {
        let ops = core_ops();
        let mut rng = StdRng::seed_from_u64(seed);
        let mut seen = HashSet::new();
        let mut skeletons = Vec::new();
        for _ in 0..count * 40 {
            if skeletons.len() == count {
                break;
            }
            let core: Vec<Op> = (0..length)
                .map(|_| ops.choose(&mut rng).expect("there are operations").clone())
                .collect();
            if let Some(skeleton) = complete(&core)
                && seen.insert(canonical(&core))
            {
                skeletons.push(skeleton);
            }
        }
        Self { skeletons }
    }

    /// Every placement of syncs in one skeleton, with what comes first committed and not.
    #[must_use]
    pub fn workloads(&self, skeleton: usize) -> Vec<Workload> {
        let (first, core) = &self.skeletons[skeleton];
        let mut world = World::empty(0o755, 256);
        for op in first {
            world.apply(op).expect("was possible before");
        }
        let mut placed: Vec<Vec<Op>> = vec![Vec::new()];
        for (i, op) in core.iter().enumerate() {
            world.apply(op).expect("was possible before");
            let mut choices = sync_choices(&world, op);
            if i + 1 < core.len() {
                choices.push(None);
            }
            placed = placed
                .iter()
                .flat_map(|ops| {
                    choices.iter().map(move |sync| {
                        let mut ops = ops.clone();
                        ops.push(op.clone());
                        ops.extend(sync.clone());
                        ops
                    })
                })
                .collect();
        }
        let mut seen = HashSet::new();
        placed.retain(|ops| seen.insert(canonical(ops)));
        let mut out = Vec::new();
        for committed in [true, false] {
            if first.is_empty() && !committed {
                continue;
            }
            for ops in &placed {
                let mut all = first.clone();
                if committed && !first.is_empty() {
                    all.push(Op::Sync);
                }
                all.extend(ops.iter().cloned());
                out.push(Workload::simple(format!("seq-{}", core.len()), all));
            }
        }
        out
    }
}

/// The syncs that can follow an operation: of everything, of each file it names, of each directory
/// around them.
fn sync_choices(world: &World, op: &Op) -> Vec<Option<Op>> {
    let (mut paths, more) = needs(op);
    paths.extend(more);
    let mut out = vec![Some(Op::Sync)];
    let mut add = |sync: Op| {
        if !out.contains(&Some(sync.clone())) {
            out.push(Some(sync));
        }
    };
    for path in paths {
        if let Some(node) = world.resolve(path).ok().and_then(|i| world.node(i)) {
            if matches!(node.body, Body::File(_) | Body::Dir(_)) {
                add(Op::Fsync(p(path)));
            }
            if matches!(
                op,
                Op::Write { .. } | Op::Append { .. } | Op::Truncate { .. } | Op::Allocate { .. }
            ) {
                add(Op::Fdatasync(p(path)));
            }
        }
        let dir = path.rsplit_once('/').map_or("", |(dir, _)| dir);
        if world.resolve(dir).is_ok() {
            add(Op::Fsync(p(dir)));
        }
    }
    out
}

/// A seeded walk of `length` operations over names that begin with `prefix` in the root of `base`.
#[must_use]
pub fn random_ops(seed: u64, length: usize, prefix: &str, base: &World) -> Vec<Op> {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut world = base.clone();
    let mut out = Vec::new();
    let mut tries = 0;
    while out.len() < length && tries < length * 20 {
        tries += 1;
        let op = random_op(&mut rng, &world, prefix);
        // Operations that are refused are tried as well, but seldom: they must change nothing.
        let mut after = world.clone();
        if after.apply(&op).is_ok() {
            world = after;
        } else if op.is_sync() || !rng.random_bool(0.1) {
            continue;
        }
        out.push(op);
    }
    out
}

pub(crate) fn random_op(rng: &mut StdRng, world: &World, prefix: &str) -> Op {
    let names = world.names().into_iter().filter(|n| n.0.starts_with(prefix));
    let mine = names.map(|(path, _, _, ino)| (path, ino)).collect();
    Chooser { world, prefix, mine }.op(rng)
}

/// Chooses operations and their arguments. The order of the choices is what a seed stands for.
struct Chooser<'a> {
    world: &'a World,
    prefix: &'a str,
    /// Paths of the walk's own names, and their inodes.
    mine: Vec<(String, Ino)>,
}

impl Chooser<'_> {
    fn op(&self, rng: &mut StdRng) -> Op {
        let handle = format!("{}h{}", self.prefix, rng.random_range(0..2));
        match rng.random_range(0..100) {
            0..8 => Op::Create(self.fresh(rng)),
            8..10 => self.nocow(rng),
            10..16 => Op::Mkdir(self.dir(rng)),
            16..18 => {
                let kinds = [Special::Fifo, Special::Socket, Special::Device];
                Op::Mknod(kinds[rng.random_range(0..3)], self.fresh(rng))
            }
            18..20 => {
                let target = "t".repeat(rng.random_range(1..300));
                Op::Symlink { target, path: self.fresh(rng) }
            }
            20..25 => Op::Link { from: self.file(rng), to: self.fresh(rng) },
            25..31 => Op::Unlink(self.any(rng)),
            31..33 => Op::Rmdir(self.dir(rng)),
            33..42 => self.rename(rng),
            42..57 => {
                let from = start(rng);
                let path = self.file(rng);
                let range = Bytes { from, to: from + size(rng) };
                Op::Write { path, range, fill: letter(rng) }
            }
            57..60 => {
                let from = start(rng);
                let (how, _) = *Alloc::ALL.choose(rng).expect("not empty");
                let path = self.file(rng);
                Op::Allocate { path, how, range: Bytes { from, to: from + size(rng) } }
            }
            60..62 => Op::Append { path: self.file(rng), len: size(rng), fill: letter(rng) },
            62..68 => {
                let path = self.file(rng);
                Op::Truncate { path, size: if rng.random_bool(0.2) { 0 } else { size(rng) } }
            }
            68..72 => self.set_xattr(rng),
            72..74 => {
                let path = self.any(rng);
                Op::RemoveXattr { path, name: format!("user.{}", rng.random_range(0..3)) }
            }
            74..77 => Op::Chmod { path: self.any(rng), perm: rng.random_range(0..0o1000) },
            77..79 => self.copy(rng),
            79..82 if self.world.handles().contains_key(&handle) => Op::Close { handle },
            79..82 if rng.random_bool(0.3) => Op::Unnamed { handle },
            79..82 => Op::Open { path: self.file(rng), handle },
            82..90 => Op::Fsync(self.file(rng)),
            90..93 => Op::Fdatasync(self.file(rng)),
            93..96 => Op::Fsync(self.dir(rng)),
            _ => Op::Sync,
        }
    }

    fn dir(&self, rng: &mut StdRng) -> String {
        const DIRS: [&str; 4] = ["A", "B", "A/C", "B/D"];
        format!("{}{}", self.prefix, DIRS.choose(rng).expect("not empty"))
    }

    fn fresh(&self, rng: &mut StdRng) -> String {
        const NAMES: [&str; 5] =
            ["f", "g", "h", "a-rather-long-name-that-makes-items-of-other-sizes", "x"];
        let name = *NAMES.choose(rng).expect("not empty");
        if rng.random_bool(0.4) {
            format!("{}{name}", self.prefix)
        } else {
            format!("{}/{name}", self.dir(rng))
        }
    }

    fn any(&self, rng: &mut StdRng) -> String {
        self.mine.choose(rng).map_or_else(|| self.fresh(rng), |n| n.0.clone())
    }

    /// One of the walk's own names whose inode is of the right kind, if there is one.
    fn one_of(&self, rng: &mut StdRng, right: impl Fn(&Body) -> bool) -> Option<String> {
        let is_right = |ino| self.world.node(ino).is_some_and(|n| right(&n.body));
        let right: Vec<_> = self.mine.iter().filter(|n| is_right(n.1)).collect();
        right.choose(rng).map(|n| n.0.clone())
    }

    fn file(&self, rng: &mut StdRng) -> String {
        let handles: Vec<String> = self.world.handles().keys().map(|h| format!("@{h}")).collect();
        if !handles.is_empty() && rng.random_bool(0.1) {
            return handles.choose(rng).expect("not empty").clone();
        }
        let file = self.one_of(rng, |body| matches!(body, Body::File(_)));
        file.unwrap_or_else(|| self.fresh(rng))
    }

    fn nocow(&self, rng: &mut StdRng) -> Op {
        // Most of the files that are overwritten in place are empty when they become so.
        let empty = self.one_of(rng, |body| matches!(body, Body::File(c) if c.size == 0));
        empty.map_or_else(|| Op::Create(self.fresh(rng)), Op::NoCow)
    }

    fn rename(&self, rng: &mut StdRng) -> Op {
        let mode = match rng.random_range(0..8) {
            0 => Move::Exchange,
            1 => Move::Whiteout,
            _ => Move::Replace,
        };
        let to = if rng.random_bool(0.4) { self.any(rng) } else { self.fresh(rng) };
        Op::Rename { from: self.any(rng), to, mode }
    }

    fn set_xattr(&self, rng: &mut StdRng) -> Op {
        // Linux has no user xattrs on anything but files and directories.
        let able = self.one_of(rng, |body| matches!(body, Body::File(_) | Body::Dir(_)));
        let path = able.unwrap_or_else(|| self.fresh(rng));
        let name = format!("user.{}", rng.random_range(0..3));
        Op::SetXattr { path, name, value: "v".repeat(rng.random_range(0..400)) }
    }

    fn copy(&self, rng: &mut StdRng) -> Op {
        // Whole sectors share their extents, others are copied.
        let unit = if rng.random_ratio(2, 3) { 4096 } else { 1 };
        let start = (size(rng) - 1) / unit * unit;
        let from = self.file(rng);
        let range = Bytes { from: start, to: start + size(rng).next_multiple_of(unit) };
        Op::Copy { from, range, to: self.file(rng), at: (size(rng) - 1) / unit * unit }
    }
}

/// A number of bytes, at least 1.
fn size(rng: &mut StdRng) -> u64 {
    match rng.random_range(0..6) {
        0 => rng.random_range(1..200),
        1 => rng.random_range(1..5000),
        2 => 4096 * rng.random_range(1..8),
        3 => rng.random_range(1..70_000),
        4 => 4096 * rng.random_range(1..40) + rng.random_range(0..3) - 1,
        _ => rng.random_range(1..300_000),
    }
}

/// Where a range begins.
fn start(rng: &mut StdRng) -> u64 {
    if rng.random_bool(0.4) { 0 } else { size(rng) - 1 }
}

fn letter(rng: &mut StdRng) -> u8 {
    rng.random_range(b'a'..=b'z')
}

/// One thread's random walk on an empty file system.
#[must_use]
pub fn random(seed: u64, length: usize) -> Workload {
    let ops = random_ops(seed, length, "", &World::empty(0o755, 256));
    Workload::simple(format!("random-{seed}-{length}"), ops)
}

/// Random walks of several threads at once.
#[must_use]
pub fn threads(seed: u64, count: usize, length: usize) -> Workload {
    let base = World::empty(0o755, 256);
    let ops = |i: usize| {
        random_ops(seed.wrapping_mul(1000).wrapping_add(i as u64), length, &prefix(i), &base)
    };
    let threads = (0..count).map(ops).collect();
    Workload {
        name: format!("threads-{seed}-{count}-{length}"),
        segments: vec![Segment { threads }],
    }
}

/// Is nothing but the root there?
#[must_use]
pub fn is_empty(world: &World) -> bool {
    world.entries(ROOT).is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences_of_one_operation_cover_all_core_operations_up_to_renaming() {
        let all = Sequences::all(1);
        assert!(all.skeletons.len() > core_ops().len() / 2, "{}", all.skeletons.len());
        assert!(all.skeletons.len() < core_ops().len());
        let mut workloads = 0;
        for i in 0..all.skeletons.len() {
            for workload in all.workloads(i) {
                workloads += 1;
                let ops = &workload.segments[0].threads[0];
                assert!(ops.last().unwrap().is_sync());
                let mut world = World::empty(0o755, 256);
                for op in ops {
                    world
                        .apply(op)
                        .unwrap_or_else(|e| panic!("{op} in {}: {e:?}", workload.text()));
                }
                assert_eq!(parse(&workload.text()).unwrap().remove(0), *ops);
            }
        }
        assert!(workloads > 200, "{workloads}");
    }

    #[test]
    fn equal_up_to_renaming_is_counted_once() {
        let a = parse("new f; ln A/f g").unwrap().remove(0);
        let b = parse("new g; ln A/g f").unwrap().remove(0);
        let c = parse("new g; ln A/g g").unwrap().remove(0);
        assert_eq!(canonical(&a), canonical(&b));
        assert_ne!(canonical(&a), canonical(&c));
    }

    #[test]
    fn the_same_seed_gives_the_same_walk_and_another_one_another() {
        assert_eq!(random(7, 40), random(7, 40));
        assert_ne!(random(7, 40), random(8, 40));
        assert_eq!(random(7, 40).segments[0].threads[0].len(), 40);
        let several = threads(3, 4, 10);
        for (i, ops) in several.segments[0].threads.iter().enumerate() {
            assert!(!ops.is_empty());
            assert!(line(ops).contains(&prefix(i)));
        }
        assert_eq!(Sequences::sample(3, 20, 1).skeletons, Sequences::sample(3, 20, 1).skeletons);
    }
}
