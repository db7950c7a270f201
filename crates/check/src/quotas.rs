//! Quota groups: their counts against what their subvolumes reach.
//!
//! A group counts bytes of whole extents, tree nodes and data alike: those that any of its
//! subvolumes reaches, and those that no subvolume outside of it reaches. So the set of subvolumes
//! that reach it must be known for each extent.
//!
//! Sets flow from parents to children. A node lies exactly one level above its children, so once
//! all nodes above a level have been read, the sets of that level are complete: each node is read
//! once, however many snapshots share it. There are few different sets, which are kept once each
//! ([`Sets`]). Data extents are collected in windows of addresses, so that memory stays bounded;
//! for each window but the first, the leaves are read again.
//!
//! Subvolumes that are deleted count until they are gone, as far as they are not yet.

use crate::finding::{Finding, Kind};
use crate::roots::Roots;
use crate::source::Edge;
use crate::walk::{Dropped, scan};
use crate::world::World;
use larder_format::items::quota::{QUOTA_INCONSISTENT, QUOTA_RESCAN};
use larder_format::items::{FileExtent, QgroupId, QgroupInfo, QgroupStatus};
use larder_format::{FormatError, Key, KeyType, Logical, MAX_LEVEL, ObjectId};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::ControlFlow;

/// Most nodes of a level, data extents in a window, and members of all sets together.
const NODES: usize = 2_000_000;
const EXTENTS: usize = 2_000_000;
const MEMBERS: usize = 16_000_000;
/// Most steps of adding sets up to groups.
const STEPS: usize = 500_000_000;

/// Compares the counts of all groups.
pub(crate) fn check(world: &World<'_>, roots: &Roots) {
    let Some(tree) = roots.edge(ObjectId::QUOTA_TREE) else { return };
    let groups = Groups::load(world, &tree);
    groups.check_relations(world);
    if groups.flags & (QUOTA_RESCAN | QUOTA_INCONSISTENT) != 0 {
        let what = format!("the status has flags {:#x}", groups.flags);
        return world.add(Finding::new(Kind::QuotasOutOfDate, what).tree(tree.tree));
    }
    let subvolumes: Vec<Reach> = roots
        .trees
        .iter()
        .filter(|root| root.edge.tree.is_subvolume())
        .map(|root| Reach { edge: root.edge, dropped: root.dropped() })
        .collect();
    let counts = Usage::of(world, &subvolumes).and_then(|usage| groups.count(&subvolumes, &usage));
    match counts {
        Ok(counts) => groups.compare(world, &counts),
        Err(TooMuch) => {
            let what = "there is too much to count for the quotas";
            world.add(Finding::new(Kind::NotChecked, what).tree(tree.tree));
        }
    }
}

/// A bound is reached.
#[derive(Debug)]
struct TooMuch;

/// A subvolume, and how far its deletion has got.
struct Reach {
    edge: Edge,
    dropped: Option<Dropped>,
}

type Relations = BTreeMap<QgroupId, BTreeSet<QgroupId>>;

/// What the quota tree says.
#[derive(Default)]
struct Groups {
    flags: u64,
    infos: BTreeMap<QgroupId, QgroupInfo>,
    /// Groups that a group belongs to, as it says itself and as they do.
    above: Relations,
    below: Relations,
}

/// Bytes that a group's subvolumes reach, and those of them that no other subvolume reaches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Count {
    referenced: u64,
    exclusive: u64,
}

fn info_key(group: QgroupId) -> Key {
    Key::new(ObjectId(0), KeyType::QGROUP_INFO, group.0)
}

impl Groups {
    fn load(world: &World<'_>, tree: &Edge) -> Self {
        let mut groups = Self::default();
        scan(&world.source, tree, Key::MIN, Key::MAX, &mut |key, data| {
            let read = match key.kind {
                KeyType::QGROUP_STATUS | KeyType::QGROUP_INFO | KeyType::QGROUP_LIMIT
                    if key.objectid != ObjectId(0) =>
                {
                    Err(FormatError::new("its key's object id is not 0"))
                }
                KeyType::QGROUP_STATUS => {
                    QgroupStatus::parse(data).map(|status| groups.flags = status.flags.get())
                }
                KeyType::QGROUP_INFO => QgroupInfo::parse(data).map(|info| {
                    groups.infos.insert(QgroupId(key.offset), *info);
                }),
                KeyType::QGROUP_RELATION => {
                    let (of, other) = (QgroupId(key.objectid.0), QgroupId(key.offset));
                    // Linux goes by those from the member to its group.
                    let (list, below, above) = match of < other {
                        true => (&mut groups.above, of, other),
                        false => (&mut groups.below, other, of),
                    };
                    list.entry(below).or_default().insert(above);
                    Ok(())
                }
                _ => Ok(()),
            };
            if let Err(e) = read {
                let finding = Finding::new(Kind::QuotaItemInvalid, e.to_string());
                world.add(finding.tree(tree.tree).key(key));
            }
            ControlFlow::Continue(())
        });
        groups
    }

    fn check_relations(&self, world: &World<'_>) {
        let lost = world.lost.part_of(ObjectId::QUOTA_TREE);
        let pairs = |relations: &Relations| -> BTreeSet<(QgroupId, QgroupId)> {
            relations
                .iter()
                .flat_map(|(below, all)| all.iter().map(|above| (*below, *above)))
                .collect()
        };
        let (above, below) = (pairs(&self.above), pairs(&self.below));
        for (member, group) in above.union(&below) {
            let unknown = [member, group].into_iter().find(|g| !self.infos.contains_key(g));
            let one_sided =
                above.contains(&(*member, *group)) != below.contains(&(*member, *group));
            let what = match unknown {
                Some(unknown) => {
                    format!("group {member} belongs to {group}, and there is no group {unknown}")
                }
                None if one_sided => {
                    format!(
                        "only one of group {member} and group {group} says that they belong \
                            together"
                    )
                }
                None => continue,
            };
            let key = Key::new(ObjectId(member.0), KeyType::QGROUP_RELATION, group.0);
            let finding = Finding::new(Kind::QuotaRelation, what).tree(ObjectId::QUOTA_TREE);
            world.add(finding.key(key).follow_up_if(lost));
        }
    }

    /// All groups that a subvolume counts for, itself included.
    fn all_of(&self, subvolume: QgroupId) -> Vec<QgroupId> {
        let mut all = BTreeSet::from([subvolume]);
        let mut next = vec![subvolume];
        while let Some(group) = next.pop() {
            for above in self.above.get(&group).into_iter().flatten() {
                if all.insert(*above) {
                    next.push(*above);
                }
            }
        }
        all.into_iter().collect()
    }

    /// What each group's counts must be; groups without any are left out.
    fn count(
        &self,
        subvolumes: &[Reach],
        usage: &Usage,
    ) -> Result<HashMap<QgroupId, Count>, TooMuch> {
        let groups: Vec<_> =
            subvolumes.iter().map(|s| self.all_of(QgroupId(s.edge.tree.0))).collect();
        let mut counts: HashMap<QgroupId, Count> = HashMap::new();
        let mut steps = 0;
        for (set, bytes) in &usage.bytes {
            let members = usage.sets.members(*set);
            let mut reached: HashMap<QgroupId, usize> = HashMap::new();
            for group in members.iter().flat_map(|m| &groups[*m as usize]) {
                *reached.entry(*group).or_default() += 1;
                steps += 1;
            }
            if steps > STEPS {
                return Err(TooMuch);
            }
            for (group, times) in reached {
                let count = counts.entry(group).or_default();
                count.referenced = count.referenced.saturating_add(*bytes);
                if times == members.len() {
                    count.exclusive = count.exclusive.saturating_add(*bytes);
                }
            }
        }
        Ok(counts)
    }

    fn compare(&self, world: &World<'_>, counts: &HashMap<QgroupId, Count>) {
        let lost = world.lost.uses();
        for (group, info) in &self.infos {
            let counted = counts.get(group).copied().unwrap_or_default();
            let said = Count { referenced: info.referenced.get(), exclusive: info.exclusive.get() };
            if said != counted {
                let what = format!(
                    "group {group}: referenced {} and exclusive {}, counted {} and {}",
                    said.referenced, said.exclusive, counted.referenced, counted.exclusive
                );
                let finding = Finding::new(Kind::QuotaCount, what).tree(ObjectId::QUOTA_TREE);
                world.add(finding.key(info_key(*group)).follow_up_if(lost));
            }
        }
    }
}

/// A set of subvolumes, by its place among [`Sets`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct SetId(u32);

/// Different sets of subvolumes, each kept once.
#[derive(Debug, Default)]
struct Sets {
    all: Vec<Box<[u32]>>,
    ids: HashMap<Box<[u32]>, SetId>,
    unions: HashMap<(SetId, SetId), SetId>,
    members: usize,
}

impl Sets {
    fn members(&self, id: SetId) -> &[u32] {
        &self.all[id.0 as usize]
    }

    /// The set with these members, ascending.
    fn set(&mut self, members: Box<[u32]>) -> Result<SetId, TooMuch> {
        if let Some(id) = self.ids.get(&members) {
            return Ok(*id);
        }
        // Twice: as a set and as a key.
        self.members += 2 * members.len();
        let id = SetId(u32::try_from(self.all.len()).map_err(|_| TooMuch)?);
        if self.members > MEMBERS {
            return Err(TooMuch);
        }
        self.all.push(members.clone());
        self.ids.insert(members, id);
        Ok(id)
    }

    fn union(&mut self, a: SetId, b: SetId) -> Result<SetId, TooMuch> {
        if a == b {
            return Ok(a);
        }
        let pair = if a.0 < b.0 { (a, b) } else { (b, a) };
        if let Some(id) = self.unions.get(&pair) {
            return Ok(*id);
        }
        let mut members = [self.members(a), self.members(b)].concat();
        members.sort_unstable();
        members.dedup();
        let id = self.set(members.into())?;
        if self.unions.len() >= MEMBERS / 8 {
            self.unions.clear();
        }
        self.unions.insert(pair, id);
        Ok(id)
    }
}

/// A node, and the subvolumes that reach it.
struct Reached {
    edge: Edge,
    set: SetId,
    /// The way that the deletion of its one subvolume has taken leads through it.
    dropped: Option<Dropped>,
}

/// Data extents of a window of addresses: their bytes, and the subvolumes that reach them.
struct Window {
    from: Logical,
    /// First address behind.
    end: Logical,
    extents: BTreeMap<Logical, (u64, SetId)>,
}

impl Window {
    fn add(&mut self, at: Logical, bytes: u64, set: SetId, sets: &mut Sets) -> Result<(), TooMuch> {
        if at < self.from || at >= self.end {
            return Ok(());
        }
        match self.extents.get_mut(&at) {
            Some((_, known)) => *known = sets.union(*known, set)?,
            None => {
                self.extents.insert(at, (bytes, set));
            }
        }
        if self.extents.len() > EXTENTS
            && let Some((last, _)) = self.extents.pop_last()
        {
            self.end = last;
        }
        Ok(())
    }
}

/// What is used by exactly which subvolumes.
#[derive(Default)]
struct Usage {
    sets: Sets,
    bytes: HashMap<SetId, u64>,
}

impl Usage {
    fn of(world: &World<'_>, subvolumes: &[Reach]) -> Result<Self, TooMuch> {
        let mut usage = Self::default();
        let mut levels: Vec<HashMap<u64, Reached>> =
            (0..=MAX_LEVEL).map(|_| HashMap::new()).collect();
        for (reach, n) in subvolumes.iter().zip(0..) {
            let set = usage.sets.set([n].into())?;
            let level = levels.get_mut(usize::from(reach.edge.level)).ok_or(TooMuch)?;
            usage.reach(level, Reached { edge: reach.edge, set, dropped: reach.dropped })?;
        }
        let nodesize = u64::from(world.source.nodesize());
        while let Some(nodes) = levels.pop() {
            for node in nodes.values() {
                usage.add(node.set, nodesize);
            }
            match levels.last_mut() {
                Some(below) => usage.descend(world, &nodes, below)?,
                None => usage.data(world, &nodes)?,
            }
        }
        Ok(usage)
    }

    fn add(&mut self, set: SetId, bytes: u64) {
        let sum = self.bytes.entry(set).or_default();
        *sum = sum.saturating_add(bytes);
    }

    fn reach(&mut self, level: &mut HashMap<u64, Reached>, node: Reached) -> Result<(), TooMuch> {
        if let Some(known) = level.get_mut(&node.edge.at.0) {
            known.set = self.sets.union(known.set, node.set)?;
            // Another subvolume reaches all of it.
            known.dropped = known.dropped.and(node.dropped);
            return Ok(());
        }
        level.insert(node.edge.at.0, node);
        if level.len() > NODES { Err(TooMuch) } else { Ok(()) }
    }

    fn descend(
        &mut self,
        world: &World<'_>,
        nodes: &HashMap<u64, Reached>,
        below: &mut HashMap<u64, Reached>,
    ) -> Result<(), TooMuch> {
        for node in nodes.values() {
            let Some(read) = world.source.read_quietly(&node.edge) else { continue };
            let view = read.view();
            let way = node.dropped.filter(|d| view.level() >= d.level);
            let first = way.map_or(0, |d| d.first_left(view));
            for slot in first..view.pointers().len() {
                if let Some(edge) = node.edge.child(view, slot) {
                    let dropped = way.filter(|d| slot == first && view.level() > d.level);
                    self.reach(below, Reached { edge, set: node.set, dropped })?;
                }
            }
        }
        Ok(())
    }

    fn data(&mut self, world: &World<'_>, leaves: &HashMap<u64, Reached>) -> Result<(), TooMuch> {
        const END: Logical = Logical(u64::MAX);
        let mut from = Logical(0);
        loop {
            let mut window = Window { from, end: END, extents: BTreeMap::new() };
            for leaf in leaves.values() {
                let Some(read) = world.source.read_quietly(&leaf.edge) else { continue };
                let view = read.view();
                for slot in 0..view.items().len() {
                    let Some(data) = view.data(slot) else { continue };
                    if view.key(slot).is_none_or(|key| key.kind != KeyType::EXTENT_DATA) {
                        continue;
                    }
                    if let Ok(FileExtent::Stored(extent)) = FileExtent::parse(data)
                        && !extent.is_hole()
                    {
                        let (at, bytes) = (extent.disk_bytenr, extent.disk_num_bytes);
                        window.add(at, bytes, leaf.set, &mut self.sets)?;
                    }
                }
            }
            for (bytes, set) in window.extents.values() {
                self.add(*set, *bytes);
            }
            if window.end == END {
                return Ok(());
            }
            from = window.end;
        }
    }
}
