//! Which disks a power cut can leave, worked out from what a
//! [`SimDevice`](crate::device::SimDevice) recorded.
//!
//! At a cut some writes are *durable*: a flush that was submitted after their completion has
//! returned (or they were written with FUA and have returned). All others that were submitted are
//! *open*: each may be there, not there, or torn at 512 bytes, independently. The set of durable
//! writes changes only when a flush or FUA write returns. So time falls into *epochs* between these
//! moments, and all cuts of one epoch are treated at once: a state made of a subset of the epoch's
//! open writes can appear from the moment the last of them was submitted until the epoch ends. A
//! [`CrashState`] therefore carries an interval of the clock. A check must demand what was promised
//! by its *latest* moment, and accept only what had begun by its *earliest*: both hold for these
//! same bytes.
//!
//! Of the subsets of an epoch, these are made: none, all, every prefix (in order of submission and
//! in order of address), all but one, and only one; every subset if at most eight writes are open,
//! and otherwise a seeded sample. Prefixes come with their last write torn, samples with any of
//! them torn. Overlapping writes that were in flight together appear in both orders. Superblock
//! writes (4096 bytes at their fixed places) never tear. Equal disks are one state: their intervals
//! are joined, which is sound for the same reason.
//!
//! Several disks of one file system lose what is open independently of each other. A flush is one
//! of its own disk. Each disk alone having all that is open, and each alone having none of it, are
//! among the states.
//!
//! A write that failed may have done anything; it stays open for ever. So does a write that a
//! failed flush should have covered.

use crate::device::{Op, OpKind, Recording, Seq, disk_of, is_super};
use crate::image::{Image, Piece, STRIDE};
use larder_format::SUPER_OFFSETS;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;

/// What was open when the power went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// Nothing: all writes were durable.
    Quiet,
    /// File data only.
    Data,
    /// Nodes only.
    Nodes,
    /// File data and nodes.
    Mixed,
    /// Superblocks of a commit, perhaps with other writes.
    Commit,
    /// A superblock with a log root.
    Log,
    /// Anything, while a mount recovered from an earlier crash.
    Recovery,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Quiet => "quiet",
            Self::Data => "data",
            Self::Nodes => "nodes",
            Self::Mixed => "mixed",
            Self::Commit => "commit",
            Self::Log => "log",
            Self::Recovery => "recovery",
        })
    }
}

/// How much is enumerated.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Every subset is made where at most this many writes are open.
    pub exhaustive: usize,
    /// Random subsets of each epoch beyond that.
    pub samples: usize,
    /// Most states of one epoch before duplicates are removed; chosen at random, "none" and "all"
    /// always among them.
    pub per_epoch: usize,
    /// Seed of everything random.
    pub seed: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { exhaustive: 8, samples: 32, per_epoch: 2000, seed: 0 }
    }
}

/// How a write is torn: seen in sectors of 512 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tear {
    /// Only the first sectors.
    Prefix(u32),
    /// Each sector by the toss of a coin with this seed.
    Scattered(u64),
}

/// One subset of an epoch's open writes.
#[derive(Clone, Debug)]
struct Choice {
    /// Indices into the epoch's open writes, ascending.
    chosen: Vec<u32>,
    torn: Option<(u32, Tear)>,
    reversed: bool,
}

#[derive(Debug)]
struct Epoch {
    kind: Kind,
    from: Seq,
    to: Seq,
    /// All durable writes applied.
    base: Image,
    /// Open writes in order of submission: indices into the recording.
    open: Vec<u32>,
    /// Parts of open writes that a later durable write has covered for good: (index in `open`,
    /// pages).
    covered: HashMap<u32, Vec<u64>>,
    /// Do any two open writes overlap in time and place?
    racing: bool,
}

/// A disk that a power cut can leave.
#[derive(Clone, Debug)]
pub struct CrashState {
    /// Hash of the whole disk: names the state in messages and for replays.
    pub id: u64,
    /// What was open.
    pub kind: Kind,
    /// The first moment at which the cut can have been.
    pub earliest: Seq,
    /// The last one.
    pub latest: Seq,
    epoch: u32,
    choice: Choice,
}

/// All crash states of a recording.
#[derive(Debug)]
pub struct Crashes {
    ops: Vec<Op>,
    epochs: Vec<Epoch>,
    /// The states, without duplicates, in the order they were found (which only depends on
    /// recording and limits).
    pub states: Vec<CrashState>,
}

impl Crashes {
    /// Enumerates the crash states of a recording.
    #[must_use]
    pub fn of(recording: &Recording, limits: &Limits) -> Self {
        let epochs = epochs(recording);
        let mut crashes = Self { ops: recording.ops.clone(), epochs, states: Vec::new() };
        let mut known: HashMap<u64, usize> = HashMap::new();
        for index in 0..crashes.epochs.len() {
            let mut rng = StdRng::seed_from_u64(
                limits.seed ^ (index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15),
            );
            for choice in crashes.choices(&crashes.epochs[index], limits, &mut rng) {
                let epoch = &crashes.epochs[index];
                let id = crashes.build(epoch, &choice).content_hash();
                let last = choice
                    .chosen
                    .iter()
                    .map(|c| crashes.ops[epoch.open[*c as usize] as usize].submitted);
                let earliest = last.max().unwrap_or(epoch.from).max(epoch.from);
                if let Some(old) = known.get(&id) {
                    let old = &mut crashes.states[*old];
                    old.earliest = old.earliest.min(earliest);
                    old.latest = old.latest.max(epoch.to);
                } else {
                    known.insert(id, crashes.states.len());
                    let kind = if choice.chosen.is_empty() { Kind::Quiet } else { epoch.kind };
                    let (latest, epoch) = (epoch.to, index as u32);
                    crashes.states.push(CrashState { id, kind, earliest, latest, epoch, choice });
                }
            }
        }
        crashes
    }

    /// The disk of a state.
    #[must_use]
    pub fn image(&self, state: &CrashState) -> Image {
        self.build(&self.epochs[state.epoch as usize], &state.choice)
    }

    /// The disk with all writes that were submitted up to the end.
    #[must_use]
    pub fn everything(&self) -> Image {
        let epoch = self.epochs.last().expect("there is always one epoch");
        let chosen = (0..epoch.open.len() as u32).collect();
        self.build(epoch, &Choice { chosen, torn: None, reversed: false })
    }

    /// How many epochs there are.
    #[must_use]
    pub fn epoch_count(&self) -> usize {
        self.epochs.len()
    }

    /// States by kind.
    #[must_use]
    pub fn by_kind(&self) -> BTreeMap<Kind, usize> {
        let mut out = BTreeMap::new();
        for s in &self.states {
            *out.entry(s.kind).or_default() += 1;
        }
        out
    }

    /// In words: what survived in a state and what did not.
    #[must_use]
    pub fn describe(&self, state: &CrashState) -> String {
        let epoch = &self.epochs[state.epoch as usize];
        let mut out = format!(
            "state {:016x}: epoch {} of {} ({}), {} of {} open writes survive{}\n",
            state.id,
            state.epoch,
            self.epochs.len(),
            state.kind,
            state.choice.chosen.len(),
            epoch.open.len(),
            if state.choice.reversed { ", racing ones in reverse" } else { "" },
        );
        for (i, op) in epoch.open.iter().enumerate() {
            let i = i as u32;
            let verdict = match state.choice.torn {
                Some((t, tear)) if t == i => format!("torn, {tear:?} sectors"),
                _ if state.choice.chosen.contains(&i) => "survives".into(),
                _ => "lost".into(),
            };
            if let OpKind::Write { at, len, .. } | OpKind::Discard { at, len, .. } =
                self.ops[*op as usize].kind
            {
                let what = WriteClass::of(&self.ops[*op as usize], &epoch.base);
                out += &format!("  #{op} {what:?} {at:#x}+{len:#x}: {verdict}\n");
            }
            if i > 60 {
                out += "  …\n";
                break;
            }
        }
        out
    }

    fn build(&self, epoch: &Epoch, choice: &Choice) -> Image {
        let mut image = epoch.base.clone();
        let mut order: Vec<u32> = choice.chosen.clone();
        if choice.reversed {
            order.clear();
            for c in &choice.chosen {
                let mut at = order.len();
                while at > 0 && self.concurrent(epoch, order[at - 1], *c) {
                    at -= 1;
                }
                order.insert(at, *c);
            }
        }
        for c in order {
            let op = &self.ops[epoch.open[c as usize] as usize];
            let covered = epoch.covered.get(&c);
            let tear = choice.torn.and_then(|(t, tear)| (t == c).then_some(tear));
            let (OpKind::Write { at, pieces, .. } | OpKind::Discard { at, pieces, .. }) = &op.kind
            else {
                continue;
            };
            for piece in pieces.iter().filter(|p| covered.is_none_or(|c| !c.contains(&p.page))) {
                match tear {
                    None => image.put(piece),
                    Some(tear) => torn(piece, *at, tear).iter().for_each(|p| image.put(p)),
                }
            }
        }
        image
    }

    fn concurrent(&self, epoch: &Epoch, a: u32, b: u32) -> bool {
        let (a, b) = (
            &self.ops[epoch.open[a as usize] as usize],
            &self.ops[epoch.open[b as usize] as usize],
        );
        in_flight_together(a, b)
    }

    /// The subsets of an epoch that become states.
    fn choices(&self, epoch: &Epoch, limits: &Limits, rng: &mut StdRng) -> Vec<Choice> {
        let n = epoch.open.len() as u32;
        let plain = |chosen: Vec<u32>| Choice { chosen, torn: None, reversed: false };
        let mut out = vec![plain(Vec::new())];
        if n == 0 {
            return out;
        }
        out.push(plain((0..n).collect()));
        let disk = |c: &u32| disk_of(extent_of(&self.ops[epoch.open[*c as usize] as usize]).0);
        let disks: BTreeSet<usize> = (0..n).map(|c| disk(&c)).collect();
        if disks.len() > 1 {
            for one in disks {
                out.push(plain((0..n).filter(|c| disk(c) == one).collect()));
                out.push(plain((0..n).filter(|c| disk(c) != one).collect()));
            }
        }
        let must = out.len();
        let mut by_address: Vec<u32> = (0..n).collect();
        by_address.sort_by_key(|c| extent_of(&self.ops[epoch.open[*c as usize] as usize]).0);
        if n as usize <= limits.exhaustive {
            out.extend(
                (1..(1u32 << n) - 1)
                    .map(|bits| plain((0..n).filter(|c| bits >> c & 1 == 1).collect())),
            );
        } else {
            for i in 0..n {
                out.push(plain(vec![i]));
                out.push(plain((0..n).filter(|c| *c != i).collect()));
                out.push(plain((0..i).collect()));
                let mut prefix = by_address[..i as usize].to_vec();
                prefix.sort_unstable();
                out.push(plain(prefix));
            }
            for _ in 0..limits.samples {
                let share = rng.random_range(0.05..0.95);
                out.push(plain((0..n).filter(|_| rng.random_bool(share)).collect()));
            }
        }
        // Torn: the last of each prefix, and one of each of some random subsets.
        // Few but long writes, as of neighbouring nodes, tear in more ways than many short ones.
        let ways = (limits.samples / n as usize).clamp(1, 6);
        for i in (0..n).flat_map(|i| std::iter::repeat_n(i, ways)) {
            if let Some(tear) = self.tear(epoch, i, rng) {
                out.push(Choice {
                    chosen: (0..=i).collect(),
                    torn: Some((i, tear)),
                    reversed: false,
                });
            }
        }
        for _ in 0..limits.samples.min(n as usize) {
            let victim = rng.random_range(0..n);
            if let Some(tear) = self.tear(epoch, victim, rng) {
                let chosen = (0..n).filter(|c| *c == victim || rng.random_bool(0.5)).collect();
                out.push(Choice { chosen, torn: Some((victim, tear)), reversed: false });
            }
        }
        if epoch.racing {
            let reversed: Vec<_> = out.iter().filter(|c| c.chosen.len() > 1).cloned().collect();
            out.extend(reversed.into_iter().map(|c| Choice { reversed: true, ..c }));
        }
        if out.len() > limits.per_epoch {
            out[must..].shuffle(rng);
            out.truncate(limits.per_epoch.max(must));
        }
        out
    }

    /// A way to tear a write, if it can tear.
    fn tear(&self, epoch: &Epoch, c: u32, rng: &mut StdRng) -> Option<Tear> {
        let op = &self.ops[epoch.open[c as usize] as usize];
        let (at, len) = extent_of(op);
        if len <= 512 || is_super(&(at..at + len)) || matches!(op.kind, OpKind::Discard { .. }) {
            return None;
        }
        Some(if rng.random_bool(0.5) {
            let sectors = u32::try_from(len.div_ceil(512)).unwrap_or(u32::MAX);
            Tear::Prefix(rng.random_range(1..sectors))
        } else {
            Tear::Scattered(rng.random())
        })
    }
}

fn extent_of(op: &Op) -> (u64, u64) {
    match op.kind {
        OpKind::Write { at, len, .. } | OpKind::Discard { at, len, .. } => (at, len),
        OpKind::Flush { .. } => (0, 0),
    }
}

fn in_flight_together(a: &Op, b: &Op) -> bool {
    let (first, second) = if a.submitted < b.submitted { (a, b) } else { (b, a) };
    first.completed.is_none_or(|c| second.submitted < c.at)
}

/// The sectors of a piece that survive the tearing of its write, which begins at `at`.
fn torn(piece: &Piece, at: u64, tear: Tear) -> Vec<Piece> {
    match tear {
        Tear::Prefix(sectors) => {
            let end = at - at % 512 + u64::from(sectors) * 512;
            piece.clip(at..end).into_iter().collect()
        }
        Tear::Scattered(seed) => {
            let mut rng = StdRng::seed_from_u64(seed ^ piece.page);
            let start = piece.page * crate::image::PAGE as u64;
            (0..8u64)
                .filter(|_| rng.random_bool(0.5))
                .filter_map(|s| piece.clip(start + s * 512..start + (s + 1) * 512))
                .collect()
        }
    }
}

/// The flushes of a disk.
struct Flushes {
    /// When each was submitted, and when and how it ended.
    flushes: Vec<(Seq, Option<(Seq, bool)>)>,
    /// For each: when the first good one that was submitted at or after it returned.
    good: Vec<Option<Seq>>,
}

impl Flushes {
    fn of(recording: &Recording, disk: usize) -> Self {
        let mine = |o: &&Op| matches!(o.kind, OpKind::Flush { disk: of } if of == disk);
        let times = |o: &Op| (o.submitted, o.completed.map(|c| (c.at, c.ok)));
        let flushes: Vec<_> = recording.ops.iter().filter(mine).map(times).collect();
        let mut good = vec![None; flushes.len() + 1];
        for i in (0..flushes.len()).rev() {
            let own = flushes[i].1.filter(|(_, ok)| *ok).map(|(at, _)| at);
            good[i] = match (own, good[i + 1]) {
                (Some(a), Some(b)) => Some(Seq::min(a, b)),
                (a, b) => a.or(b),
            };
        }
        Self { flushes, good }
    }
}

/// When each operation became durable for good; `None` for never.
fn durable_at(recording: &Recording) -> Vec<Option<Seq>> {
    let disks = recording.base.sizes().len();
    let flushes: Vec<Flushes> = (0..disks).map(|disk| Flushes::of(recording, disk)).collect();
    recording
        .ops
        .iter()
        .map(|op| {
            let completed = op.completed.filter(|c| c.ok)?.at;
            if matches!(op.kind, OpKind::Flush { .. }) {
                return None;
            }
            let Flushes { flushes, good } = &flushes[disk_of(extent_of(op).0)];
            let next = flushes.partition_point(|f| f.0 < completed);
            let flushed = good[next].filter(|at| {
                // A flush that failed takes with it what it should have covered.
                !flushes[next..].iter().any(|f| f.0 < *at && f.1.is_some_and(|(_, ok)| !ok))
            });
            match op.kind {
                OpKind::Write { fua: true, .. } => Some(completed),
                _ => flushed,
            }
        })
        .collect()
}

fn epochs(recording: &Recording) -> Vec<Epoch> {
    let ops = &recording.ops;
    let durable = durable_at(recording);
    let mut borders: Vec<Seq> = durable.iter().flatten().copied().collect();
    borders.sort_unstable();
    borders.dedup();
    borders.insert(0, Seq(0));
    let fsid = fsid_of(&recording.base);
    let mut base = recording.base.clone();
    base.content_hash();
    base.freeze();
    // For each page the last durable write that touched it.
    let mut owner: HashMap<u64, usize> = HashMap::new();
    let mut becoming: HashMap<Seq, Vec<usize>> = HashMap::new();
    for (index, at) in durable.iter().enumerate() {
        if let Some(at) = at {
            becoming.entry(*at).or_default().push(index);
        }
    }
    let mut pending: BTreeSet<u32> = BTreeSet::new();
    let mut submitted = 0;
    let mut out = Vec::with_capacity(borders.len());
    for (i, from) in borders.iter().copied().enumerate() {
        let to = borders.get(i + 1).map_or(recording.end, |next| Seq(next.0 - 1));
        for index in becoming.remove(&from).unwrap_or_default() {
            pending.remove(&(index as u32));
            let op = &ops[index];
            let (OpKind::Write { pieces, .. } | OpKind::Discard { pieces, .. }) = &op.kind else {
                continue;
            };
            for piece in pieces.iter() {
                let newer =
                    owner.get(&piece.page).is_some_and(|o| ops[*o].submitted > op.submitted);
                if !newer {
                    base.put(piece);
                    owner.insert(piece.page, index);
                }
            }
        }
        base.freeze_if_large();
        while submitted < ops.len() && ops[submitted].submitted <= to {
            if !matches!(ops[submitted].kind, OpKind::Flush { .. }) {
                pending.insert(submitted as u32);
            }
            submitted += 1;
        }
        let open: Vec<u32> = pending.iter().copied().collect();
        let covered = covered_parts(ops, &open, &owner);
        let racing = open.iter().enumerate().any(|(i, a)| {
            open[i + 1..].iter().any(|b| {
                let (a, b) = (&ops[*a as usize], &ops[*b as usize]);
                let ((a_at, a_len), (b_at, b_len)) = (extent_of(a), extent_of(b));
                a_at < b_at + b_len && b_at < a_at + a_len && in_flight_together(a, b)
            })
        });
        let kind = kind_of(ops, &open, fsid.as_ref(), from);
        out.push(Epoch { kind, from, to, base: base.clone(), open, covered, racing });
    }
    out
}

/// Pages of open writes that later writes, which are durable, have replaced.
fn covered_parts(ops: &[Op], open: &[u32], owner: &HashMap<u64, usize>) -> HashMap<u32, Vec<u64>> {
    let mut out: HashMap<u32, Vec<u64>> = HashMap::new();
    for (c, index) in open.iter().enumerate() {
        let op = &ops[*index as usize];
        let (OpKind::Write { pieces, .. } | OpKind::Discard { pieces, .. }) = &op.kind else {
            continue;
        };
        for piece in pieces.iter() {
            let replaced = owner.get(&piece.page).is_some_and(|o| {
                ops[*o].submitted > op.submitted && !in_flight_together(op, &ops[*o])
            });
            if replaced {
                out.entry(c as u32).or_default().push(piece.page);
            }
        }
    }
    out
}

/// What a write holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum WriteClass {
    Super,
    LogSuper,
    Node,
    Data,
    Discard,
}

impl WriteClass {
    /// What a recorded write holds, on a disk with the file system that `image` shows.
    #[must_use]
    pub fn of(op: &Op, image: &Image) -> Self {
        class_with(op, fsid_of(image).as_ref())
    }
}

fn fsid_of(image: &Image) -> Option<[u8; 16]> {
    (0..image.sizes().len() as u64).find_map(|disk| {
        let mut fsid = [0; 16];
        image.read(disk * STRIDE + SUPER_OFFSETS[0].0 + 0x20, &mut fsid);
        (fsid != [0; 16]).then_some(fsid)
    })
}

/// A superblock by its place, a node by the file system's id in its header.
fn class_with(op: &Op, fsid: Option<&[u8; 16]>) -> WriteClass {
    let OpKind::Write { at, len, pieces, .. } = &op.kind else { return WriteClass::Discard };
    let Some(first) = pieces.first() else { return WriteClass::Data };
    let bytes = &first.data.bytes()[first.start..first.end];
    if is_super(&(*at..at + len)) {
        let has_log = bytes.get(0x60..0x68).is_some_and(|b| b != [0; 8]);
        return if has_log { WriteClass::LogSuper } else { WriteClass::Super };
    }
    let is_node = *len >= 4096 && fsid.is_some_and(|fsid| bytes.get(0x20..0x30) == Some(&fsid[..]));
    if is_node { WriteClass::Node } else { WriteClass::Data }
}

/// The kind of a state, by its newest writes: writes that failed long ago stay open, and do not
/// count.
fn kind_of(ops: &[Op], open: &[u32], fsid: Option<&[u8; 16]>, from: Seq) -> Kind {
    let is_new = |i: &&u32| ops[**i as usize].completed.is_none_or(|c| c.at > from);
    let mut classes: Vec<WriteClass> =
        open.iter().filter(is_new).map(|i| class_with(&ops[*i as usize], fsid)).collect();
    if classes.is_empty() {
        classes = open.iter().map(|i| class_with(&ops[*i as usize], fsid)).collect();
    }
    let has = |c| classes.contains(&c);
    if classes.is_empty() {
        Kind::Quiet
    } else if has(WriteClass::LogSuper) {
        Kind::Log
    } else if has(WriteClass::Super) {
        Kind::Commit
    } else if has(WriteClass::Node) {
        if has(WriteClass::Data) { Kind::Mixed } else { Kind::Nodes }
    } else {
        Kind::Data
    }
}
