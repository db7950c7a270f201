//! One batch of a relocation: some extents, in one transaction.
//!
//! A batch holds a transaction handle, so it is bounded: by the bytes that are copied before, and
//! by the notes that it leaves. An extent with more users than that is divided into parts, which
//! get the same copy one after the other. While a batch runs, no snapshot is made, and no step of
//! dropping a tree. It begins in a transaction before which everything is published: reference
//! counts then come from the published extent tree and from the notes of this transaction alone.

use super::copies::{Copies, HalfMoved, How};
use super::region::Region;
use super::survey::{Extent, Owner, Survey, User, Users};
use crate::engine::Core;
use crate::error::{Error, Place, Result};
use crate::file::moving::point_to;
use crate::transaction::{BlocksAndNotes, GlobalMove, Handle};
use larder_format::{Generation, Logical, ObjectId, TreeId};
use std::collections::{HashMap, HashSet};

/// Notes of a batch at most, apart from those of its first extent.
const NOTES: usize = 100_000;
/// Blocks of a batch at most.
const BLOCKS: usize = 2048;
/// Notes that moving an item takes, and copies of blocks on the way to it.
const OF_AN_ITEM: usize = 8;
/// Users of one extent in a batch at most.
pub(super) const USERS: usize = NOTES / OF_AN_ITEM;

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
    /// Leaves that these are in.
    leaves: HashSet<Logical>,
    /// How each extent moves. The batch is for as many of the list as are in here.
    hows: Vec<How>,
}

impl Plan {
    /// Plans for as many extents as a batch may have.
    fn of(survey: &mut Survey<'_>, list: &[Extent]) -> Result<Self> {
        let mut plan = Self::default();
        for extent in list {
            if plan.notes() >= NOTES {
                break;
            }
            let how = plan.add(survey, extent)?;
            plan.hows.push(how);
        }
        Ok(plan)
    }
    fn add(&mut self, survey: &mut Survey<'_>, extent: &Extent) -> Result<How> {
        if extent.is_data {
            return self.add_data(survey, extent);
        }
        let at = extent.run.start;
        match survey.owner(at)? {
            Owner::Private(tree) => self.private.push((tree, at)),
            Owner::Global(tree) => self.global.push((tree, at)),
            Owner::Shared => self.region.add(survey, at)?,
            Owner::Dying => {}
        }
        Ok(How::Not)
    }
    fn add_data(&mut self, survey: &mut Survey<'_>, extent: &Extent) -> Result<How> {
        let Users { items, private, shared, has_data, caches, foreign } = survey.users(extent)?;
        if let Some(tree) = foreign {
            return Err(foreign_data(extent, tree));
        }
        let how = match (items.is_empty() && shared.is_empty(), has_data || extent.is_part) {
            (true, _) => How::Not,
            (false, true) => How::Copy,
            (false, false) => How::Reserve,
        };
        let n = self.hows.len();
        self.caches.extend(caches);
        self.items.extend(items.into_iter().map(|user| (n, user)));
        self.leaves.extend(private);
        for leaf in shared {
            self.region.add(survey, leaf)?;
        }
        Ok(how)
    }
    fn notes(&self) -> usize {
        self.region.notes() + OF_AN_ITEM * (self.private.len() + self.items.len())
    }
    /// What has to be reserved: each block that has to be copied counts once, however much is
    /// changed in it.
    fn cost(&self, survey: &mut Survey<'_>) -> Result<BlocksAndNotes> {
        let mut trees: HashSet<TreeId> = self.items.iter().map(|(_, user)| user.tree).collect();
        trees.extend(self.private.iter().map(|(tree, _)| *tree));
        let mut blocks = HashSet::new();
        for at in self.leaves.iter().chain(self.private.iter().map(|(_, at)| at)) {
            survey.way_up(*at, &mut blocks)?;
        }
        self.region.ways_up(survey, &mut trees, &mut blocks)?;
        Ok(BlocksAndNotes {
            blocks: (blocks.len() + self.region.blocks()) as u64,
            paths: trees.len() as u64,
            notes: (self.notes() + 4 * self.hows.len() + self.caches.len()) as u64,
        })
    }
}

/// A list of extents.
#[derive(Clone, Copy)]
pub(super) struct List<'a> {
    pub(super) extents: &'a [Extent],
    /// The transaction of the extent tree that it is from.
    pub(super) base: Generation,
}

/// Moves the first extents of a list: blocks, or data. Returns how many were dealt with.
/// `half_moved` is the extent of which the last batch has moved some users, and then the one of
/// which this batch has.
///
/// # Errors
/// Reading, corruption, no space; the device; `ReadOnly`.
pub(super) fn move_some(
    core: &Core,
    List { extents: list, base }: List<'_>,
    half_moved: &mut Option<HalfMoved>,
) -> Result<usize> {
    // Looked at twice. The first time reads what is needed, and says what has to be reserved: the
    // second time there is a handle, and a seal waits for it. Mostly nothing has changed until
    // then.
    let (plan, cost, earlier) = {
        let mut survey = Survey::new(core);
        let plan = Plan::of(&mut survey, list)?;
        let cost = plan.cost(&mut survey)?;
        (plan, cost, survey.remember())
    };
    let list = &list[..plan.hows.len()];
    let mut copies = Copies::make(core, list, &plan.hows, half_moved.as_ref())?;
    let _shared = core.shared_blocks.lock();
    let mut h = match begin(core, cost) {
        Ok(h) => h,
        Err(e) => {
            copies.give_back(core);
            return Err(e);
        }
    };
    copies.note(core, &mut h)?;
    let mut survey = Survey::new(core);
    // The copy may have lost its users since then. Then its place may be somebody else's by now.
    let trusts = fault!(core.options.tuning, RelocationTrustsCopy);
    *half_moved = half_moved.filter(|half| trusts || survey.has(half.copy, half.made));
    if let Some(half) = half_moved {
        copies.go_on_with(half);
    }
    let is_old = fault!(core.options.tuning, RelocationOldUsers);
    let (list, plan) = if survey.base() == base && survey.recall(earlier)? {
        (list.to_vec(), plan)
    } else {
        let list = if is_old { list.to_vec() } else { survey.as_now(list)? };
        let plan = Plan::of(&mut survey, &list)?;
        (list, plan)
    };
    let list = &list[..];
    carry_out(core, &mut h, &mut survey, (plan, list), &copies)?;
    let last = list.last().filter(|extent| extent.is_part).map(|extent| extent.run.start);
    let copied = last.and_then(|from| Some((from, copies.copy_of(from)?)));
    if let Some((from, copy)) = copied {
        *half_moved = Some(HalfMoved { from, copy, made: h.generation() });
    }
    Ok(list.len())
}

/// Joins a transaction before which everything is published.
fn begin(core: &Core, cost: BlocksAndNotes) -> Result<Handle<'_>> {
    loop {
        let h = core.begin_with_blocks(cost)?;
        let before = Generation(h.generation().0 - 1);
        if core.txns.published() == before {
            return Ok(h);
        }
        drop(h);
        core.txns.wait(before)?;
    }
}

/// Data that Linux was moving when it was interrupted belongs to a tree of its own.
fn foreign_data(extent: &Extent, tree: TreeId) -> Error {
    let what = format!("data of tree {tree} cannot be moved: files of that tree are not known");
    Error::corrupt(Place::block(extent.run.start), what)
}

fn carry_out(
    core: &Core,
    h: &mut Handle<'_>,
    survey: &mut Survey<'_>,
    (plan, list): (Plan, &[Extent]),
    copies: &Copies,
) -> Result<()> {
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
        // An extent that was not in the plan at first has no copy. A later pass moves it.
        if let Some(extent) = list.get(n) {
            move_item(core, h, survey, (extent.run, user), copies.places())?;
        }
    }
    plan.region.carry_out(core, h, copies.places().clone())?;
    Ok(())
}

/// Makes an item refer to the copy of its extent, if there is one, and if the item is as it was.
fn move_item(
    core: &Core,
    h: &mut Handle<'_>,
    survey: &mut Survey<'_>,
    (from, user): (crate::space::Run, User),
    places: &HashMap<Logical, Logical>,
) -> Result<()> {
    let Some(to) = places.get(&from.start) else { return Ok(()) };
    let Some((subvol, _)) = survey.tree(user.tree)? else { return Ok(()) };
    let inode = match subvol.inodes.get(core, subvol, user.key.objectid.0) {
        Ok(inode) => inode,
        Err(Error::NotFound) => return Ok(()),
        Err(e) => return Err(e),
    };
    match point_to(core, h, &inode, &user.key, from, *to) {
        Ok(_) | Err(Error::NotFound) => Ok(()),
        Err(e) => Err(e),
    }
}

/// Extents that may be in one batch: so much data is copied before it is joined.
pub(super) fn first_batch(list: &[Extent], bytes: u64) -> usize {
    let (mut total, mut blocks) = (0, 0);
    let fits = |extent: &&Extent| {
        match extent.is_data {
            true => total += extent.run.len,
            false => blocks += 1,
        }
        total <= bytes && blocks <= BLOCKS
    };
    list.iter().take_while(fits).count().max(1)
}
