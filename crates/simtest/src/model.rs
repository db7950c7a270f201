//! What a disk must show after a power cut, given what was done and which syncs had returned.
//!
//! A [`History`] keeps the world after every operation, and the moments at which the operation
//! began and returned. It does so for each thread of the workload (its *domain*: the names in the
//! root that begin with the thread's prefix). For a cut at a moment it follows that the operations
//! that had begun *may* be there, and that those which a returned sync covers *must* be:
//!
//! - `sync` covers everything that had returned when it began;
//! - `fsync` of an inode covers its content, attributes and names, and each directory needed to
//!   find it; of a directory, its entries too. No name that it had lost comes back. If the last
//!   commit still knew it by that name, the name belongs to its owner at the first such `fsync`;
//! - `fdatasync` the same without the attributes;
//! - a snapshot covers itself and its source, with everything in them.
//!
//! **Strict** is what holds while commits are the only way to become durable: the names and inodes
//! found equal the world after some prefix of the operations between the two. **Weak** is what any
//! log may do: every directory slot has a value, and every inode attributes and a link count, that
//! it had at or after the moment its own promise was given. The count is that of the names that are
//! there; it may be newer than the attributes, since replaying a removed name counts its inode
//! again and leaves the rest of it alone.
//!
//! Contents are the same in both. Buffered data may reach the disk before or after the names around
//! them, so each byte is one that it was at or after the last promise for that file, zero if it was
//! a hole at some such time (in a file that is overwritten in place also one from any operation
//! that had begun: such bytes need no commit); the size is one that the file had, or lies on the
//! way from one to a larger one that a write made.

mod linux;
#[cfg(test)]
mod tests;

use crate::device::Seq;
use crate::ops::Op;
use crate::world::{Body, Content, Ino, Node, ROOT, Touched, World};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

/// How much a promise-free operation may show of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Commits only: all names and inodes are those after some prefix of the operations.
    Strict,
    /// Logs: each object by itself.
    Weak,
}

/// One operation that was done.
#[derive(Clone, Debug)]
struct Done {
    op: Op,
    begin: Seq,
    /// `None`: it failed or never returned, and promises nothing.
    end: Option<Seq>,
    touched: Touched,
    /// For fsync and fdatasync: the inode.
    target: Option<Ino>,
    /// Something was committed by then that nobody had asked to be: see [`Domain::has_committed`].
    committed: bool,
}

/// A name as [`World::names`] gives it.
type Name = (String, Ino, String, Ino);

/// The operations of one thread, in order.
#[derive(Clone, Debug)]
pub struct Domain {
    prefix: String,
    /// `worlds[k]`: after `k` operations.
    worlds: Vec<World>,
    /// The names in each of them. Those that an operation did not change are shared.
    names: Vec<Arc<Vec<Name>>>,
    done: Vec<Done>,
    /// Somebody else commits at any time.
    others_commit: bool,
}

impl Domain {
    /// A domain that begins with `base` and works on the root's names that begin with `prefix`.
    #[must_use]
    pub fn new(prefix: impl Into<String>, base: World) -> Self {
        let names = vec![Arc::new(base.names())];
        let (worlds, done) = (vec![base], Vec::new());
        Self { prefix: prefix.into(), worlds, names, done, others_commit: false }
    }

    /// The same beside others, who do not belong to the workload and commit at any time.
    #[must_use]
    pub(crate) fn beside_others(mut self) -> Self {
        self.others_commit = true;
        self
    }

    /// The world after all operations.
    #[must_use]
    pub fn now(&self) -> &World {
        self.worlds.last().expect("there is a first world")
    }

    /// Records an operation that the model has applied: `after` is the world with it. `end` is when
    /// it returned with success; `None` when it failed on the way, so that it may be there but
    /// promises nothing.
    pub fn push(&mut self, op: &Op, after: World, touched: Touched, begin: Seq, end: Option<Seq>) {
        let target = match op {
            Op::Fsync(path) | Op::Fdatasync(path) => self.now().resolve(path).ok(),
            _ => None,
        };
        self.done.push(Done { op: op.clone(), begin, end, touched, target, committed: false });
        let names = after.names();
        let last = self.names.last().filter(|last| ***last == names).cloned();
        self.names.push(last.unwrap_or_else(|| Arc::new(names)));
        self.worlds.push(after);
    }

    /// Records that the last operation was not a sync of everything, but came with a commit: in one
    /// of its steps, or as an `fsync` that no log could do.
    pub(crate) fn has_committed(&mut self) {
        if let Some(last) = self.done.last_mut() {
            last.committed = true;
        }
    }

    /// How many operations were done.
    #[must_use]
    pub fn len(&self) -> usize {
        self.done.len()
    }
    /// Was nothing done?
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.done.is_empty()
    }

    fn begun(&self, at: Seq) -> usize {
        self.done.partition_point(|d| d.begin < at)
    }
    fn returned(&self, at: Seq) -> usize {
        self.done.iter().take_while(|d| d.end.is_some_and(|e| e <= at)).count()
    }

    /// The first index from which the world holds everything that mattered to an fsync of `ino` at
    /// `index`. Attributes of the directories above are not needed to find it; `data_only`: nor are
    /// its own.
    fn fsync_floor(&self, index: usize, ino: Ino, data_only: bool) -> usize {
        let parents = parents(&self.names[index]);
        let mut needed = BTreeSet::from([ino]);
        let mut todo = vec![ino];
        while let Some(i) = todo.pop() {
            for p in parents.get(&i).into_iter().flatten() {
                if needed.insert(*p) {
                    todo.push(*p);
                }
            }
        }
        let matters = |d: &Done| {
            let attributes =
                matches!(d.op, Op::Chmod { .. } | Op::SetXattr { .. } | Op::RemoveXattr { .. });
            let touches = |i: &Ino| needed.contains(i) && (!attributes || *i == ino && !data_only);
            d.touched.inodes.iter().any(touches) || d.touched.dirs.contains(&ino)
        };
        self.done[..index].iter().rposition(matters).map_or(0, |k| k + 1)
    }
}

fn parents(names: &[Name]) -> HashMap<Ino, Vec<Ino>> {
    let mut out: HashMap<Ino, Vec<Ino>> = HashMap::new();
    for (_, dir, _, ino) in names {
        out.entry(*ino).or_default().push(*dir);
    }
    out
}

/// What was done by all threads of a workload.
#[derive(Clone, Debug, Default)]
pub struct History {
    /// One per thread.
    pub domains: Vec<Domain>,
}

/// What the promises that hold at a moment demand of one domain.
struct Bounds {
    lo: usize,
    hi: usize,
    /// For each inode with a promise of its own: the index at which it was given.
    inodes: BTreeMap<Ino, usize>,
    /// The same, `fdatasync` included: for content and names.
    data: BTreeMap<Ino, usize>,
    /// The index that a sync of everything gives.
    all: usize,
}

impl History {
    fn bounds(&self, domain: &Domain, at: Seq) -> Bounds {
        let mut all = 0;
        for sync in self.domains.iter().flat_map(|d| &d.done).filter(|d| d.op == Op::Sync) {
            if sync.end.is_some_and(|e| e <= at) {
                all = all.max(domain.returned(sync.begin));
            }
        }
        let mut lo = all;
        let (mut inodes, mut data) = (BTreeMap::new(), BTreeMap::new());
        for (k, done) in domain.done.iter().enumerate() {
            if let (Op::Snapshot { from, .. }, Some(end)) = (&done.op, done.end)
                && end <= at
            {
                let world = &domain.worlds[k + 1];
                let tops = [world.resolve(from).ok(), done.touched.made];
                lo = lo.max(k + 1);
                for ino in tops.into_iter().flatten().flat_map(|top| world.inodes_of(top)) {
                    inodes.insert(ino, k + 1);
                    data.insert(ino, k + 1);
                }
            }
            if let (Some(ino), Some(end)) = (done.target, done.end)
                && end <= at
            {
                let data_only = matches!(done.op, Op::Fdatasync(_));
                lo = lo.max(domain.fsync_floor(k, ino, data_only));
                data.insert(ino, k);
                if !data_only {
                    inodes.insert(ino, k);
                }
            }
        }
        Bounds { lo, hi: domain.begun(at), inodes, data, all }
    }

    /// Is this exactly what a file system shows on which everything has returned and nothing has
    /// crashed?
    ///
    /// # Errors
    /// Where it differs.
    pub fn verify_now(&self, found: &World) -> Result<(), String> {
        for domain in &self.domains {
            let n = domain.done.len();
            let pairs = same_tree(domain, domain.now(), found)?;
            let all =
                Bounds { lo: n, hi: n, inodes: BTreeMap::new(), data: BTreeMap::new(), all: n };
            contents(domain, &all, n, &pairs, found)?;
        }
        Ok(())
    }

    /// Records that the file system was closed, which makes everything durable and lets all handles
    /// go.
    pub fn close(&mut self, begin: Seq, end: Seq) {
        for domain in &mut self.domains {
            let mut after = domain.now().clone();
            let handles: Vec<String> = after.handles().keys().cloned().collect();
            for handle in handles {
                after.apply(&Op::Close { handle }).expect("the handle is there");
            }
            domain.push(&Op::Sync, after, Touched::default(), begin, Some(end));
        }
    }

    /// Is there nothing in the root but what the threads have put there?
    fn no_strangers(&self, found: &World) -> Result<(), String> {
        let known: Vec<&str> = self.domains.iter().map(|d| d.prefix.as_str()).collect();
        match found.entries(ROOT).keys().find(|n| !known.iter().any(|p| n.starts_with(p))) {
            Some(stray) => Err(format!("{stray} is in the root, and nobody put it there")),
            None => Ok(()),
        }
    }

    /// Are the syncs of everything that a domain knows all commits that there were? Snapshots, and
    /// syncs in new subvolumes, commit.
    fn is_alone(&self, domain: &Domain) -> bool {
        let commits = |d: &Done| matches!(d.op, Op::Snapshot { .. } | Op::Subvolume(_));
        self.domains.len() == 1
            && !domain.others_commit
            && !domain.now().has_nested(ROOT)
            && !domain.done.iter().any(commits)
    }

    /// Is what was found on a disk allowed, if the power was cut at `at`?
    ///
    /// # Errors
    /// What is not allowed, in words.
    pub fn verify(&self, found: &World, at: Seq, mode: Mode) -> Result<(), String> {
        self.no_strangers(found)?;
        let mut fitting = Vec::new();
        for domain in &self.domains {
            let bounds = self.bounds(domain, at);
            let all = self.domains.len() > 1;
            let fits = match mode {
                Mode::Strict => strict(domain, &bounds, found, all),
                Mode::Weak => {
                    weak(domain, &bounds, self.is_alone(domain), found).map(|()| Vec::new())
                }
            };
            fitting.push(fits.map_err(|e| {
                let sync = |d: &&Done| d.op.is_sync() && d.end.is_some_and(|e| e <= at);
                let last =
                    domain.done.iter().rfind(sync).map_or("none".into(), |d| d.op.to_string());
                format!(
                    "{e}\n  (operations {}..{} of {} must / may be there; last sync that had \
                        returned: {last})",
                    bounds.lo,
                    bounds.hi,
                    domain.done.len(),
                )
            })?);
        }
        match mode {
            Mode::Strict => self.in_real_time(&fitting),
            Mode::Weak => Ok(()),
        }
    }

    /// Commits are of everything: where an operation is there, so is each of other threads that had
    /// returned before it began. `fitting` has the numbers of operations that each domain can show,
    /// ascending.
    fn in_real_time(&self, fitting: &[Vec<usize>]) -> Result<(), String> {
        // All demands have the form "if so many there, then so many here": raising the least
        // solution step by step finds one if there is any.
        let mut shown: Vec<usize> = fitting.iter().map(|f| f[0]).collect();
        loop {
            let mut changed = false;
            for (d, domain) in self.domains.iter().enumerate() {
                let Some(last) = shown[d].checked_sub(1).map(|k| &domain.done[k]) else { continue };
                for (e, other) in self.domains.iter().enumerate().filter(|(e, _)| *e != d) {
                    let needed = other.returned(last.begin);
                    if shown[e] < needed {
                        changed = true;
                        shown[e] = *fitting[e].iter().find(|p| **p >= needed).ok_or_else(|| {
                            format!(
                                "{} is there, but not {}, which had returned before it began",
                                last.op,
                                other.done[needed - 1].op
                            )
                        })?;
                    }
                }
            }
            if !changed {
                return Ok(());
            }
        }
    }
}

/// After how many operations the domain's worlds look like this, ascending; one of them is enough
/// unless `all` are wanted.
fn strict(
    domain: &Domain,
    bounds: &Bounds,
    found: &World,
    all: bool,
) -> Result<Vec<usize>, String> {
    let mut fits = Vec::new();
    let mut reasons: Vec<(usize, String)> = Vec::new();
    for p in (bounds.lo..=bounds.hi.max(bounds.lo)).rev() {
        match same_tree(domain, &domain.worlds[p], found) {
            Err(reason) => reasons.push((p, reason)),
            Ok(pairs) => match contents(domain, bounds, p, &pairs, found) {
                Ok(()) if all => fits.push(p),
                Ok(()) => return Ok(vec![p]),
                Err(reason) => reasons.push((p, reason)),
            },
        }
    }
    if !fits.is_empty() {
        fits.reverse();
        return Ok(fits);
    }
    let mut out = String::from("the tree is not that after any allowed number of operations:");
    // The latest first: what was done last is most often what is half there.
    for (p, reason) in reasons.iter().take(8) {
        let after = p.checked_sub(1).map_or("the start".into(), |k| domain.done[k].op.to_string());
        out += &format!("\n  not after {after} ({p}): {reason}");
    }
    Err(out)
}

/// Names of the domain in a world: path to inode.
fn names_of(domain: &Domain, world: &World) -> BTreeMap<String, Ino> {
    let mine = |path: &String| path.starts_with(&domain.prefix);
    world.names().into_iter().filter(|n| mine(&n.0)).map(|n| (n.0, n.3)).collect()
}

/// Compares everything but file contents. Returns which inode is which: (model's, found one).
fn same_tree(domain: &Domain, world: &World, found: &World) -> Result<BTreeMap<Ino, Ino>, String> {
    let (ours, theirs) = (names_of(domain, world), names_of(domain, found));
    if let Some(missing) = ours.keys().find(|n| !theirs.contains_key(*n)) {
        return Err(format!("{missing} is missing"));
    }
    if let Some(extra) = theirs.keys().find(|n| !ours.contains_key(*n)) {
        return Err(format!("{extra} should not be there"));
    }
    let mut pairs = BTreeMap::new();
    let mut back = BTreeMap::new();
    if domain.prefix.is_empty() {
        pairs.insert(ROOT, ROOT);
        back.insert(ROOT, ROOT);
    }
    for (path, ino) in &ours {
        let other = theirs[path];
        if *pairs.entry(*ino).or_insert(other) != other
            || *back.entry(other).or_insert(*ino) != *ino
        {
            return Err(format!("{path} is not a link of the same inode"));
        }
    }
    for (a, b) in &pairs {
        let (a, b) = (world.node(*a).expect("named"), found.node(*b).expect("named"));
        same_node(a, b, true).map_err(|e| {
            let path =
                ours.iter().find(|(_, i)| world.node(**i).is_some_and(|n| Arc::ptr_eq(n, a)));
            format!("{}: {e}", path.map_or("/", |p| p.0))
        })?;
    }
    if domain.prefix.is_empty()
        && pairs.get(&world.default_subvolume()) != Some(&found.default_subvolume())
    {
        return Err("another subvolume is the default one".into());
    }
    Ok(pairs)
}

fn same_node(ours: &Node, found: &Node, links: bool) -> Result<(), String> {
    if ours.body.kind() != found.body.kind() {
        return Err(format!("is a {:?}, not a {:?}", found.body.kind(), ours.body.kind()));
    }
    if ours.real != 0 && ours.real != found.real {
        return Err(format!("is inode {}, not {}", found.real, ours.real));
    }
    if ours.placeholder != found.placeholder {
        return Err("stands for a subvolume that is not there, or does not".into());
    }
    if ours.top != found.top {
        return Err(format!("as a subvolume it is {:?}, not {:?}", found.top, ours.top));
    }
    if ours.perm != found.perm {
        return Err(format!("mode {:o}, not {:o}", found.perm, ours.perm));
    }
    if links && ours.nlink != found.nlink {
        return Err(format!("link count {}, not {}", found.nlink, ours.nlink));
    }
    if ours.xattrs != found.xattrs {
        return Err(format!("xattrs {:?}, not {:?}", found.xattrs.keys(), ours.xattrs.keys()));
    }
    match (&ours.body, &found.body) {
        (Body::Symlink(a), Body::Symlink(b)) if a != b => {
            Err(format!("points to {b:?}, not {a:?}"))
        }
        (Body::Special(_, a), Body::Special(_, b)) if a != b => Err(format!("device {b}, not {a}")),
        _ => Ok(()),
    }
}

/// Are the contents of all files allowed, if the names are those after `p` operations?
fn contents(
    domain: &Domain,
    bounds: &Bounds,
    p: usize,
    pairs: &BTreeMap<Ino, Ino>,
    found: &World,
) -> Result<(), String> {
    for (ino, other) in pairs {
        let Body::File(there) = &found.node(*other).expect("paired").body else { continue };
        let from = bounds.data.get(ino).copied().unwrap_or(0).max(bounds.all).min(p);
        content(domain, *ino, (from, p, bounds.hi.max(p)), there).map_err(|e| {
            let names = names_of(domain, &domain.worlds[p]);
            let path = names.iter().find(|(_, i)| *i == ino).map_or("?", |(n, _)| n);
            format!("{path}: {e}")
        })?;
    }
    Ok(())
}

/// Blocks of a file from which on it may have more extents than one transaction drops.
const MANY_EXTENTS: usize = 16;

/// Is this content one that the inode can have, if everything up to operation `from` is there,
/// everything up to `to` may be, and nothing later is but for bytes that were overwritten in place
/// up to operation `begun`?
fn content(
    domain: &Domain,
    ino: Ino,
    (from, to, begun): (usize, usize, usize),
    found: &Content,
) -> Result<(), String> {
    let (mut versions, size_fits) = versions(domain, ino, (from, to), found);
    if versions.is_empty() {
        return Ok(());
    }
    // Also if the file is gone by then: its deletion need not be there, and what wrote in place
    // before the deletion may be.
    let nocow = domain.worlds[from..=to].iter().filter_map(|w| w.node(ino)).any(|n| n.nocow);
    if nocow {
        for k in to + 1..=begun.min(domain.worlds.len() - 1) {
            if let Some(Body::File(c)) = domain.worlds[k].node(ino).map(|n| &n.body) {
                versions.push(c);
            }
        }
    }
    if !size_fits {
        let sizes: Vec<u64> = versions.iter().map(|v| v.size).collect();
        return Err(format!("size {}, but it only ever had {sizes:?}", found.size));
    }
    let lost = domain.done.iter().any(|d| d.end.is_none());
    let mut pages: BTreeSet<u64> = found.page_numbers().collect();
    versions.iter().for_each(|v| pages.extend(v.page_numbers()));
    let whole = |n: u64| {
        let end = found.size.min((n + 1) * 4096);
        versions.iter().any(|v| v.page(n) == found.page(n) && v.size >= end)
    };
    let pages = pages.into_iter().filter(|n| n * 4096 < found.size);
    pages.filter(|n| !whole(*n)).try_for_each(|n| page(&versions, n, found, (lost, nocow)))
}

/// The contents that an inode had from operation `from` to `to`, and whether it can have the size
/// that was found.
fn versions<'a>(
    domain: &'a Domain,
    ino: Ino,
    (from, to): (usize, usize),
    found: &Content,
) -> (Vec<&'a Arc<Content>>, bool) {
    let mut versions: Vec<&Arc<Content>> = Vec::new();
    let mut size_fits = false;
    for k in from..=to {
        let Some(Body::File(c)) = domain.worlds[k].node(ino).map(|n| &n.body) else { continue };
        size_fits |= c.size == found.size;
        if let Some(last) = versions.last()
            && domain.worlds[k - 1].node(ino).is_some()
        {
            // Growing by a write: bytes hold the size on the disk back until they are there.
            // Setting the size is all or nothing.
            let set = matches!(domain.done[k - 1].op, Op::Truncate { .. } | Op::Allocate { .. });
            size_fits |= !set && (last.size..=c.size).contains(&found.size);
            // Cutting off many extents takes steps, each of which leaves a shorter file that ends
            // with a sector.
            let steps = set
                && last.page_numbers().nth(MANY_EXTENTS).is_some()
                && found.size.is_multiple_of(4096);
            size_fits |= steps && (c.size..last.size).contains(&found.size);
        }
        if versions.last().is_none_or(|last| !Arc::ptr_eq(last, c)) {
            versions.push(c);
        }
    }
    (versions, size_fits)
}

/// Is each byte of page `n` one that some version has there?
fn page(
    versions: &[&Arc<Content>],
    n: u64,
    found: &Content,
    (lost, nocow): (bool, bool),
) -> Result<(), String> {
    let zeros = [0; 4096];
    let there = found.page(n).unwrap_or(&zeros);
    let len = (found.size - n * 4096).min(4096) as usize;
    for (i, byte) in there[..len].iter().enumerate() {
        let at = n * 4096 + i as u64;
        // A version that ended before it says nothing: the size on the disk never covers what is
        // still to come. But data that was reported as lost is a hole, and zeros behind a new end
        // may be written in place before it is.
        let had = |v: &&Arc<Content>| v.page(n).filter(|_| v.size > at).map_or(0, |page| page[i]);
        let mut telling = versions
            .iter()
            .filter(|v| lost || v.size > at || nocow && v.size.next_multiple_of(4096) > at);
        if !telling.any(|v| had(v) == *byte) {
            let longer = versions.iter().filter(|v| v.size > at);
            let had: BTreeSet<u8> = longer.map(|v| v.page(n).map_or(0, |page| page[i])).collect();
            return Err(format!("byte {at} is {byte:#04x}, but only ever was one of {had:02x?}"));
        }
    }
    Ok(())
}

/// Every slot, inode and content by itself. See the module's text.
fn weak(domain: &Domain, bounds: &Bounds, alone: bool, found: &World) -> Result<(), String> {
    let hi = bounds.hi.max(bounds.lo);
    let floors = weak_floors(domain, bounds, alone);
    let names = Found::names(domain, hi, found)?;
    weak_default(domain, bounds, hi, found)?;
    weak_slots(domain, bounds, hi, &floors, &names)?;
    let worlds = domain.worlds[..=hi].iter();
    let inodes: BTreeSet<Ino> = worlds.flat_map(|w| w.nodes().map(|n| n.0)).collect();
    inodes.into_iter().try_for_each(|ino| weak_inode(domain, bounds, hi, ino, &names))
}

/// Names and inodes that were found, in the model's numbers.
struct Found<'a> {
    world: &'a World,
    slots: HashMap<(Ino, String), Ino>,
    /// The number of each inode in `world`.
    inodes: BTreeMap<Ino, Ino>,
    links: HashMap<Ino, u32>,
}

impl<'a> Found<'a> {
    fn names(domain: &Domain, hi: usize, world: &'a World) -> Result<Self, String> {
        // The same file system number is the same inode: numbers are not reused while a mount
        // lasts.
        let mut by_real: HashMap<u64, Ino> = HashMap::new();
        for world in &domain.worlds[..=hi] {
            by_real.extend(world.nodes().map(|(i, n)| (n.real, i)));
        }
        let model = |i: Ino| by_real.get(&world.node(i).expect("named").real).copied();
        let (slots, inodes, links) = (HashMap::new(), BTreeMap::new(), HashMap::new());
        let mut out = Self { world, slots, inodes, links };
        let mine = world.names().into_iter().filter(|n| n.0.starts_with(&domain.prefix));
        for (path, dir, name, ino) in mine {
            let dir = if dir == ROOT {
                ROOT
            } else {
                model(dir).ok_or("a directory that nobody made")?
            };
            let own = model(ino).ok_or_else(|| format!("{path} is an inode that nobody made"))?;
            out.slots.insert((dir, name), own);
            out.inodes.insert(own, ino);
            *out.links.entry(own).or_default() += 1;
        }
        Ok(out)
    }
}

/// Are these the names that were asked for last?
fn is_last<'a>(last: &mut Option<&'a Arc<Vec<Name>>>, names: &'a Arc<Vec<Name>>) -> bool {
    last.replace(names).is_some_and(|last| Arc::ptr_eq(last, names))
}

/// Every slot of a directory leads to an inode that it led to since its promise.
fn weak_slots(
    domain: &Domain,
    bounds: &Bounds,
    hi: usize,
    floors: &Floors,
    found: &Found<'_>,
) -> Result<(), String> {
    let mut slots: BTreeSet<(Ino, String)> = found.slots.keys().cloned().collect();
    let mut last = None;
    for names in domain.names[..=hi].iter().filter(|names| !is_last(&mut last, names)) {
        let mine = names.iter().filter(|n| n.0.starts_with(&domain.prefix));
        slots.extend(mine.map(|n| (n.1, n.2.clone())));
    }
    let slot_at = |k: usize, dir: Ino, name: &str| match domain.worlds[k].node(dir).map(|n| &n.body)
    {
        Some(Body::Dir(entries)) => entries.get(name).copied(),
        _ => None,
    };
    for slot in &slots {
        let (dir, name) = slot;
        let now = found.slots.get(slot).copied();
        let floor = floors.slots.get(slot).copied().unwrap_or(bounds.all);
        let floor = floor.max(floors.dirs.get(dir).copied().unwrap_or(0));
        if !(floor..=hi).any(|k| slot_at(k, *dir, name) == now) {
            return Err(format!(
                "entry {name} of inode {dir} leads to {now:?}, which it did at no time since it \
                 was promised"
            ));
        }
        let lost = floors.lost.get(slot).into_iter().flatten();
        for (ino, k) in lost.filter(|(ino, _)| now == Some(*ino)) {
            if !(*k..=hi).any(|k| slot_at(k, *dir, name) == now) {
                return Err(format!(
                    "entry {name} of inode {dir} leads to {ino}, which a sync after operation {k} \
                     says it has lost"
                ));
            }
        }
    }
    Ok(())
}

/// An inode has attributes, a link count and a content that it had since its promises.
fn weak_inode(
    domain: &Domain,
    bounds: &Bounds,
    hi: usize,
    ino: Ino,
    found: &Found<'_>,
) -> Result<(), String> {
    let floor = bounds.inodes.get(&ino).copied().unwrap_or(0).max(bounds.all);
    let versions: Vec<Option<&Arc<Node>>> =
        (floor..=hi).map(|k| domain.worlds[k].node(ino)).collect();
    let Some(other) = found.inodes.get(&ino).map(|o| found.world.node(*o).expect("found")) else {
        if ino != ROOT && versions.iter().all(|v| v.is_some_and(|n| n.nlink > 0)) {
            return Err(format!("inode {ino} had a name all the time and is gone"));
        }
        return Ok(());
    };
    let names = found.links.get(&ino).copied().unwrap_or(0);
    if !matches!(other.body, Body::Dir(_)) && names != other.nlink {
        return Err(format!("inode {ino} has {names} names, but link count {}", other.nlink));
    }
    let newest = versions.iter().flatten().next_back();
    if !versions.iter().flatten().any(|v| same_node(v, other, false).is_ok()) {
        let reason = newest.map_or_else(
            || "is not there".to_owned(),
            |n| format!("{:?}", same_node(n, other, false)),
        );
        return Err(format!("inode {ino} is in no state that it had since its promise: {reason}"));
    }
    if !versions.iter().flatten().any(|v| v.nlink == other.nlink) {
        let newest = newest.map_or(0, |v| v.nlink);
        return Err(format!(
            "inode {ino} has link count {}, not {newest}, which it had at no time since its \
             promise",
            other.nlink
        ));
    }
    if let Body::File(there) = &other.body {
        let floor = bounds.data.get(&ino).copied().unwrap_or(0).max(bounds.all);
        content(domain, ino, (floor, hi, hi), there).map_err(|e| format!("inode {ino}: {e}"))?;
    }
    Ok(())
}

/// The default subvolume, which a commit changes.
fn weak_default(domain: &Domain, bounds: &Bounds, hi: usize, found: &World) -> Result<(), String> {
    let real = |world: &World| world.node(world.default_subvolume()).map(|n| n.real);
    let fits = (bounds.all..=hi).any(|k| real(&domain.worlds[k]) == real(found));
    let fits = fits || !domain.prefix.is_empty();
    fits.then_some(()).ok_or_else(|| "the default subvolume is one that it never was".into())
}

struct Floors {
    /// Index since which a slot has a promise.
    slots: HashMap<(Ino, String), usize>,
    /// The same for all slots of a directory.
    dirs: HashMap<Ino, usize>,
    /// The inodes that have lost a slot, as a sync after so many operations promised.
    lost: HashMap<(Ino, String), Vec<(Ino, usize)>>,
}

/// `alone`: nobody else commits, so that the last commit is known to be the one that must be there.
fn weak_floors(domain: &Domain, bounds: &Bounds, alone: bool) -> Floors {
    let mut floors = Floors { slots: HashMap::new(), dirs: HashMap::new(), lost: HashMap::new() };
    let committed: HashMap<(Ino, &str), Ino> = domain.names[bounds.all]
        .iter()
        .map(|(_, dir, name, i)| ((*dir, name.as_str()), *i))
        .collect();
    // A snapshot promises much at once.
    let mut promised: BTreeMap<usize, Vec<Ino>> = BTreeMap::new();
    for (ino, k) in &bounds.data {
        promised.entry(*k).or_default().push(*ino);
    }
    for (k, inodes) in promised {
        let world = &domain.worlds[k];
        let up = parents(&domain.names[k]);
        let mut needed: BTreeSet<Ino> = inodes.iter().copied().collect();
        let mut todo = inodes.clone();
        while let Some(i) = todo.pop() {
            for p in up.get(&i).into_iter().flatten() {
                if needed.insert(*p) {
                    todo.push(*p);
                }
            }
        }
        for ino in &inodes {
            if matches!(world.node(*ino).map(|n| &n.body), Some(Body::Dir(_))) {
                floors.dirs.insert(*ino, k);
            }
        }
        // Names that these inodes have, and names that they had and lost: when they were seen there
        // last.
        let mut seen: HashMap<((Ino, &str), Ino), usize> = HashMap::new();
        for (at, names) in domain.names[..=k].iter().enumerate() {
            let names = names.iter().filter(|n| needed.contains(&n.3));
            seen.extend(names.map(|(_, dir, name, i)| (((*dir, name.as_str()), *i), at)));
        }
        for (((dir, name), i), at) in seen {
            let slot = (dir, name.to_owned());
            let mut promise = |since: usize| {
                let floor = floors.slots.entry(slot.clone()).or_default();
                *floor = (*floor).max(since);
            };
            if at == k {
                promise(k);
                continue;
            }
            if committed.get(&(dir, name)) == Some(&i) {
                // The first sync has freed it, and gave it to its owner then. Another commit may
                // have come between: then the name is free, or has a new owner since.
                let syncs =
                    |d: &Done| d.end.is_some() && d.target.is_some_and(|t| inodes.contains(&t));
                let first = domain.done[at..k].iter().position(syncs).map_or(k, |n| at + n);
                let alone =
                    alone && !domain.done[bounds.all.min(first)..first].iter().any(|d| d.committed);
                promise(if alone { first } else { at + 1 });
            }
            floors.lost.entry(slot).or_default().push((i, k));
        }
    }
    for floor in floors.slots.values_mut().chain(floors.dirs.values_mut()) {
        *floor = (*floor).max(bounds.all);
    }
    floors
}
