//! One batch of a relocation: some extents, in one transaction.
//!
//! A batch holds a transaction handle, so it is bounded. While it runs, no snapshot is made, and no
//! step of dropping a tree. It begins in a transaction before which everything is published:
//! reference counts then come from the published extent tree and from the notes of this transaction
//! alone.

use super::region::Region;
use super::survey::{Extent, Owner, Survey, User, Users};
use crate::engine::Core;
use crate::error::{Error, Place, Result};
use crate::file::moving::{Sums, copy_extent, point_to};
use crate::space::free_index::Lengths;
use crate::space::{Run, SpaceKind};
use crate::transaction::{GlobalMove, Handle};
use larder_format::{Generation, Logical, ObjectId, TreeId};
use std::collections::HashMap;

/// Notes of a batch at most, apart from those of its first extent.
const NOTES: usize = 50_000;

/// What a batch is going to do.
#[derive(Default)]
struct Plan {
    /// Blocks that are private to a subvolume.
    private: Vec<(TreeId, Logical)>,
    /// Blocks of trees that only the committer edits.
    global: Vec<(TreeId, Logical)>,
    region: Region,
    /// Space caches of the first version, by their inodes in the root tree.
    caches: Vec<ObjectId>,
    /// Items to change: the extent, by its place in the list, and the item.
    items: Vec<(usize, User)>,
    /// How many extents of the list it is for.
    extents: usize,
}

impl Plan {
    /// Plans for as many extents as a batch may have.
    fn of(survey: &mut Survey<'_>, list: &[Extent]) -> Result<Self> {
        let mut plan = Self::default();
        for (n, extent) in list.iter().enumerate() {
            if plan.notes() >= NOTES {
                break;
            }
            if extent.is_data {
                let Users { items, shared, caches, .. } = survey.users(extent)?;
                plan.caches.extend(caches);
                plan.items.extend(items.into_iter().map(|user| (n, user)));
                for leaf in shared {
                    plan.region.add(survey, leaf)?;
                }
            } else {
                let at = extent.run.start;
                match survey.owner(at)? {
                    Owner::Private(tree) => plan.private.push((tree, at)),
                    Owner::Global(tree) => plan.global.push((tree, at)),
                    Owner::Shared => plan.region.add(survey, at)?,
                    Owner::Dying => {}
                }
            }
            plan.extents = n + 1;
        }
        Ok(plan)
    }
    fn notes(&self) -> usize {
        self.region.notes() + 8 * (self.private.len() + self.items.len())
    }
    /// Item changes that cost as much metadata.
    fn items_to_reserve(&self) -> u64 {
        let (blocks, swaps) = self.region.size();
        (self.private.len() + self.items.len() + swaps + blocks / 4 + 4) as u64
    }
}

/// The place of a data extent that was copied.
struct Copied {
    from: Run,
    to: Logical,
    sums: Sums,
}

/// Moves the first extents of a list: blocks, or data. Returns how many were dealt with.
///
/// # Errors
/// Reading, corruption, no space; the device; `ReadOnly`.
pub(super) fn move_some(core: &Core, list: &[Extent]) -> Result<usize> {
    // Looked at twice. The first time reads what is needed, and says what has to be reserved: the
    // second time there is a handle, and a seal waits for it.
    let (plan, kinds) = {
        let mut survey = Survey::new(core);
        let plan = Plan::of(&mut survey, list)?;
        let kinds = kinds(&mut survey, &list[..plan.extents])?;
        (plan, kinds)
    };
    let list = &list[..plan.extents];
    let copied = copy_data(core, list, &kinds)?;
    let items = plan.items_to_reserve();
    drop(plan);
    let _shared = core.shared_blocks.lock();
    let mut h = match begin(core, items) {
        Ok(h) => h,
        Err(e) => {
            copied.iter().for_each(|c| core.space.give_back(Run::new(c.to, c.from.len), None));
            return Err(e);
        }
    };
    let mut survey = Survey::new(core);
    create(core, &mut h, &copied)?;
    let plan = Plan::of(&mut survey, list)?;
    let done = carry_out(core, &mut h, &mut survey, (plan, list), copied);
    drop(survey);
    done?;
    Ok(list.len())
}

/// Joins a transaction before which everything is published.
fn begin(core: &Core, items: u64) -> Result<Handle<'_>> {
    loop {
        let h = core.begin(items)?;
        let before = Generation(h.generation().0 - 1);
        if core.txns.published() == before {
            return Ok(h);
        }
        drop(h);
        core.txns.wait(before)?;
    }
}

/// How a data extent moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    /// It is no data extent, or nothing that stays refers to it.
    Not,
    /// It has bytes.
    Copy,
    /// It is merely reserved.
    Reserve,
}

fn kinds(survey: &mut Survey<'_>, list: &[Extent]) -> Result<Vec<How>> {
    let mut kinds = Vec::with_capacity(list.len());
    for extent in list {
        kinds.push(if extent.is_data {
            let users = survey.users(extent)?;
            if let Some(tree) = users.foreign {
                return Err(foreign(extent, tree));
            }
            match (users.items.is_empty() && users.shared.is_empty(), users.has_data) {
                (true, _) => How::Not,
                (false, true) => How::Copy,
                (false, false) => How::Reserve,
            }
        } else {
            How::Not
        });
    }
    Ok(kinds)
}

/// Data that Linux was moving when it was interrupted belongs to a tree of its own.
fn foreign(extent: &Extent, tree: TreeId) -> Error {
    let what = format!(
        "data of tree {tree} cannot be moved: Linux was moving it, and cleans up at its next mount"
    );
    Error::corrupt(Place::block(extent.run.start), what)
}

/// Copies data to new places.
fn copy_data(core: &Core, list: &[Extent], kinds: &[How]) -> Result<Vec<Copied>> {
    let mut copied: Vec<Copied> = Vec::new();
    for (extent, how) in list.iter().zip(kinds).filter(|(_, how)| **how != How::Not) {
        let done = copy_one(core, extent.run, *how);
        match done {
            Ok(one) => copied.push(one),
            Err(e) => {
                copied.iter().for_each(|c| core.space.give_back(Run::new(c.to, c.from.len), None));
                return Err(e);
            }
        }
    }
    Ok(copied)
}

fn copy_one(core: &Core, from: Run, how: How) -> Result<Copied> {
    let mut space = core.space.accounts.reserve(SpaceKind::Data, from.len)?;
    let run = core.space.allocate_data(&core.txns, Lengths::exactly(from.len), &mut space)?;
    let sums = match how {
        How::Copy => copy_extent(core, from, run.start),
        _ => Ok(Sums::new()),
    };
    match sums {
        Ok(sums) => Ok(Copied { from, to: run.start, sums }),
        Err(e) => {
            core.space.give_back(run, None);
            Err(e)
        }
    }
}

/// Notes the copies. A copy that nothing will refer to is freed by the commit.
fn create(core: &Core, h: &mut Handle<'_>, copied: &[Copied]) -> Result<()> {
    for copy in copied {
        core.note_data(&h.txn, Run::new(copy.to, copy.from.len))?;
        for (at, sums) in &copy.sums {
            h.add_csums(*at, sums.clone());
        }
    }
    h.noted_refs(copied.len() as u64);
    Ok(())
}

fn carry_out(
    core: &Core,
    h: &mut Handle<'_>,
    survey: &mut Survey<'_>,
    (plan, list): (Plan, &[Extent]),
    copied: Vec<Copied>,
) -> Result<()> {
    let places: HashMap<Logical, Logical> = copied.iter().map(|c| (c.from.start, c.to)).collect();
    for (tree, at) in plan.private {
        let (Some(block), Some((subvol, _))) = (survey.block(at)?, survey.tree(tree)?) else {
            continue;
        };
        match h.move_block(subvol, &block.on_path()) {
            Ok(_) | Err(Error::NotFound) => {}
            Err(e) => return Err(e),
        }
    }
    for (tree, at) in plan.global {
        if let Some(block) = survey.block(at)? {
            h.move_global(GlobalMove::Block(tree, block.on_path()));
        }
    }
    for cache in plan.caches {
        h.move_global(GlobalMove::Cache(cache));
    }
    for (n, user) in plan.items {
        let from = list[n].run;
        let Some(to) = places.get(&from.start) else { continue };
        let Some((subvol, _)) = survey.tree(user.tree)? else { continue };
        let inode = match subvol.inodes.get(core, subvol, user.key.objectid.0) {
            Ok(inode) => inode,
            Err(Error::NotFound) => continue,
            Err(e) => return Err(e),
        };
        match point_to(core, h, &inode, &user.key, from, *to) {
            Ok(_) | Err(Error::NotFound) => {}
            Err(e) => return Err(e),
        }
    }
    plan.region.carry_out(core, h, places)?;
    Ok(())
}

/// Data extents that may be in one batch: so much data is copied before it is joined.
pub(super) fn first_batch(list: &[Extent], bytes: u64) -> usize {
    let mut total = 0;
    let fits = |extent: &&Extent| {
        total += extent.run.len;
        total <= bytes
    };
    list.iter().take_while(fits).count().max(1)
}
