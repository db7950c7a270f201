//! The commit: from a sealed transaction to a durable superblock.
//!
//! The global trees describe each other. Inserting an extent item copies blocks of the extent tree,
//! whose references go into the extent tree; block group items and free space change with every
//! block; root items change with every root. But a block is copied to a new address at most once in
//! a transaction, so the circle closes. The committer applies notes, then what that caused, then
//! what that caused, until a round changes nothing. Normally that takes two or three rounds.
//!
//! What it writes into block groups and the free-space tree comes from *applied* references alone.
//! The allocator's own map is ahead of them: it already lacks blocks of the next transaction.

mod roots;

use crate::error::{Error, Place, Result};
use crate::space::alloc::{NewGroup, Pinned};
use crate::space::extent_tree::{self, Applied};
use crate::space::refs::{DelayedRefs, ExtentKind, RefHead};
use crate::space::reserve::Reservation;
use crate::space::{Run, SpaceKind, csum_tree, free_space_tree, groups};
use crate::transaction::{Ground, SubvolumeTree, Txn, find_root, writeout};
use crate::tree::{BlockSource, EditStop, Need, Node, Root, Tree, TreeOps, Version, doing};
use larder_format::features::{CompatRo, Incompat};
use larder_format::items::{BlockGroupItem, Chunk, DevExtent, ExtentRef, RootItem};
use larder_format::{Generation, Key, KeyType, Logical, ObjectId, Superblock, TreeId};
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;
use zerocopy::IntoBytes;
use zerocopy::little_endian::U64;

/// Body of the committer's thread.
pub(crate) fn run(ground: &Ground) {
    while ground.txns.next_seal().is_some() {
        let outcome =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| commit_once(ground)));
        match outcome {
            Ok(Ok(())) => {}
            Ok(Err(e)) => ground.txns.fail(&format!("a commit failed: {e}")),
            Err(_) => ground.txns.fail("a commit hit a broken invariant; see the log"),
        }
    }
}

/// Seals the running transaction and brings it to the device.
pub(crate) fn commit_once(ground: &Ground) -> Result<()> {
    let above = ground.above();
    let _doing = doing("items before the seal");
    above.before_seal();
    let _doing = doing("seal");
    let (txn, since) = ground.txns.close_running();
    let delayed = above.seal(&txn);
    let untouched = std::mem::take(&mut txn.roots.lock().untouched);
    let mut frozen: Vec<Frozen> = txn
        .subvols
        .lock()
        .values()
        .map(|s| Frozen {
            changed: !untouched.contains(&s.id),
            subvol: s.clone(),
            root: s.tree.root(),
            growth: s.tree.take_growth(),
        })
        .collect();
    // A tree is as it was if all its edits failed before they began.
    frozen.retain(|f| f.root.ptr.generation == txn.generation);
    // The next transaction logs what differs from this.
    for f in &frozen {
        f.subvol.set_base(txn.generation.next(), f.root.clone());
    }
    ground.txns.sealed(since);
    let _doing = doing("commit");
    let begin = Instant::now();
    delayed?;
    let mut committer = Committer::new(ground, txn.clone());
    committer.fixpoint(&frozen)?;
    let superblock = committer.superblock()?;
    let mut roots: Vec<(TreeId, Root)> =
        frozen.iter().map(|f| (f.subvol.id, f.root.clone())).collect();
    roots.extend(ground.roots.all().map(|t| (t.id(), t.root())));
    let nodes = writeout::write_nodes(ground, txn.generation, &roots)?;
    // Writing may have ended meanwhile, with a reason not to trust what is in memory.
    if let Some(why) = ground.txns.failure() {
        return Err(Error::ReadOnly(Some(why)));
    }
    ground.write_superblocks(txn.generation, superblock.clone())?;
    committer.freed.extend(above.superblock_durable(&txn)?);
    ground.txns.stats.nodes_written.fetch_add(nodes as u64, Ordering::Relaxed);
    committer.publish(&frozen, superblock);
    let ns = u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX);
    ground.txns.stats.commit_ns.fetch_add(ns, Ordering::Relaxed);
    ground.txns.stats.commit_max_ns.fetch_max(ns, Ordering::Relaxed);
    Ok(())
}

/// A subvolume as it was when the transaction was sealed.
struct Frozen {
    subvol: Arc<SubvolumeTree>,
    root: Root,
    /// Has anything in it changed? A snapshot that was taken does not count.
    changed: bool,
    /// By how many blocks its tree has grown.
    growth: i64,
}

/// One commit.
struct Committer<'a> {
    ground: &'a Ground,
    txn: Arc<Txn>,
    preallocated: Vec<Logical>,
    system_preallocated: Vec<Logical>,
    reserve: Reservation,
    system_reserve: Reservation,
    /// References of the global trees' own blocks, not applied yet.
    pending: DelayedRefs,
    /// Space that this transaction frees.
    freed: Pinned,
    /// Changes for the free-space tree, by address: length, and whether it became free.
    space_changes: BTreeMap<Logical, (u64, bool)>,
    /// Groups whose item is older than their `disk_used`.
    dirty_groups: BTreeSet<Logical>,
    /// Block groups that this commit removes.
    removed: Vec<(Run, Chunk)>,
}

/// The committer as the source of blocks for one of the global trees.
struct Source<'c, 'a> {
    committer: &'c mut Committer<'a>,
    system: bool,
}

impl BlockSource for Source<'_, '_> {
    fn generation(&self) -> Generation {
        self.committer.txn.generation
    }
    fn published(&self) -> Generation {
        self.committer.ground.published_hint()
    }
    fn available(&self) -> usize {
        if self.system {
            self.committer.system_preallocated.len()
        } else {
            self.committer.preallocated.len()
        }
    }
    fn take(&mut self) -> Logical {
        let preallocated = if self.system {
            &mut self.committer.system_preallocated
        } else {
            &mut self.committer.preallocated
        };
        preallocated.pop().expect("the edit asked for addresses first")
    }
    fn untake(&mut self, at: Logical) {
        let preallocated = if self.system {
            &mut self.committer.system_preallocated
        } else {
            &mut self.committer.preallocated
        };
        preallocated.push(at);
    }
    fn buffer(&mut self) -> Arc<[u8]> {
        self.committer.ground.store.buffer()
    }
    fn created(&mut self, tree: TreeId, at: Logical, level: u8, first_key: Key) {
        let nodesize = self.committer.ground.nodesize();
        let generation = self.committer.txn.generation;
        let done = self.committer.pending.create_tree_block(
            at,
            nodesize,
            level,
            tree,
            generation,
            Some(first_key),
        );
        self.committer.ground.noted(done);
    }
    fn copied(
        &mut self,
        tree: TreeId,
        old: &Node,
        new: Logical,
        maybe_shared: bool,
    ) -> Result<(), EditStop> {
        debug_assert!(!maybe_shared, "global trees are never shared");
        self.created(tree, new, old.level(), old.first_key().unwrap_or_default());
        let nodesize = self.committer.ground.nodesize();
        let mine = ExtentRef::TreeBlock { root: tree };
        self.committer.pending.drop_tree_block(old.address(), nodesize, old.level(), mine)?;
        Ok(())
    }
    fn snapshot(&mut self, _: TreeId, _: &Node, _: Logical) -> Result<(), EditStop> {
        unreachable!("only subvolumes have snapshots")
    }
    fn dropped(&mut self, tree: TreeId, at: Logical, level: u8) {
        // This commit made the block, no item has it and nothing uses it, so it is taken again.
        // Deleting checksums makes and drops a leaf with every extent, and a full disk does not
        // have that many.
        if self.committer.pending.forget_created(at) {
            return self.untake(at);
        }
        let nodesize = self.committer.ground.nodesize();
        let mine = ExtentRef::TreeBlock { root: tree };
        let done = self.committer.pending.drop_tree_block(at, nodesize, level, mine);
        self.committer.ground.noted(done);
    }
    fn half_done(&mut self, _: &Error) {
        // The error ends the commit.
    }
    fn provide(&mut self, need: &Need) -> Result<()> {
        let Need::Blocks(wanted) = *need else {
            unreachable!("the tree reads nodes itself, and global trees are never shared")
        };
        let system = self.system;
        let c = &mut *self.committer;
        let (preallocated, from) = if system {
            (&mut c.system_preallocated, &mut c.system_reserve)
        } else {
            (&mut c.preallocated, &mut c.reserve)
        };
        let mut more = Vec::new();
        while preallocated.len() + more.len() < wanted {
            more.push(c.ground.space.allocate_for_commit(&*c.txn, system, from)?);
        }
        // Addresses are taken from the end, so this order keeps them rising.
        more.reverse();
        more.append(preallocated);
        *preallocated = more;
        Ok(())
    }
}

/// A global tree with the committer behind it, as the logic of items wants to see it.
struct Ops<'c, 'a> {
    tree: &'c Tree,
    source: Source<'c, 'a>,
}

impl Ops<'_, '_> {
    fn version(&self) -> Version {
        self.tree.version(self.source.committer.ground.epochs.enter())
    }
}

impl TreeOps for Ops<'_, '_> {
    fn max_item_size(&self) -> usize {
        larder_format::node::max_item_size(self.source.committer.ground.nodesize())
    }
    fn get(&mut self, key: &Key) -> Result<Option<Vec<u8>>> {
        Ok(self.version().get(key)?.map(|i| i.data().to_vec()))
    }
    fn at_or_before(&mut self, key: &Key) -> Result<Option<(Key, Vec<u8>)>> {
        Ok(self.version().at_or_before(key)?.map(|i| (i.key, i.data().to_vec())))
    }
    fn at_or_after(&mut self, key: &Key) -> Result<Option<(Key, Vec<u8>)>> {
        Ok(self.version().at_or_after(key)?.map(|i| (i.key, i.data().to_vec())))
    }
    fn insert(&mut self, key: &Key, data: &[u8]) -> Result<()> {
        self.tree.edit(&mut self.source, &[*key], |e| e.insert(key, data))
    }
    fn update(&mut self, key: &Key, data: &[u8]) -> Result<()> {
        self.tree.edit(&mut self.source, &[*key], |e| e.update(key, data))
    }
    fn delete(&mut self, key: &Key) -> Result<()> {
        self.tree.edit(&mut self.source, &[*key], |e| e.delete(key))
    }
}

impl<'a> Committer<'a> {
    fn new(ground: &'a Ground, txn: Arc<Txn>) -> Self {
        let reserve =
            txn.take_reserved().unwrap_or_else(|| ground.space.accounts.empty(SpaceKind::Metadata));
        ground.space.kept_by_commit.store(reserve.bytes(), Ordering::Release);
        let freed = std::mem::take(&mut *txn.freed_log.lock());
        Self {
            ground,
            preallocated: Vec::new(),
            system_preallocated: Vec::new(),
            reserve,
            system_reserve: ground.space.accounts.empty(SpaceKind::System),
            pending: DelayedRefs::new(),
            freed,
            space_changes: BTreeMap::new(),
            dirty_groups: BTreeSet::new(),
            removed: Vec::new(),
            txn,
        }
    }

    fn ops<'c>(&'c mut self, tree: &'c Tree) -> Ops<'c, 'a> {
        let system = tree.id() == ObjectId::CHUNK_TREE;
        Ops { tree, source: Source { committer: self, system } }
    }

    /// Brings the global trees to a state that describes this transaction and the trees themselves.
    fn fixpoint(&mut self, frozen: &[Frozen]) -> Result<()> {
        let ground = self.ground;
        self.rebuild_free_space()?;
        self.write_new_groups()?;
        self.remove_empty_groups()?;
        for f in frozen {
            self.write_subvolume_root(f)?;
        }
        self.apply_root_notes()?;
        // Every superblock has a root tree of its own generation.
        let any = Key::new(ObjectId::FS_TREE, KeyType::ROOT_ITEM, 0);
        ground.roots.root.edit(&mut self.ops(&ground.roots.root).source, &[any], |_| Ok(()))?;
        let mut next = Some(Logical(0));
        while let Some((at, sums)) = next.and_then(|from| adjacent_csums(ground, &self.txn, from)) {
            csum_tree::insert(&mut self.ops(&ground.roots.csum), ground.csum, at, &sums)?;
            next = at.0.checked_add((sums.len() / ground.csum.size()) as u64 * SECTOR).map(Logical);
        }
        // The notes stay where they are: operations of the next transaction still count them.
        let txn = self.txn.clone();
        let mut next = Some(Logical(0));
        while let Some((at, head)) = next.and_then(|from| txn.refs.lock().at_or_after(from)) {
            self.apply(at, &head)?;
            next = at.0.checked_add(1).map(Logical);
        }
        let mut rounds = 0;
        loop {
            while let Some((at, head)) = self.pending.pop_first() {
                self.apply(at, &head)?;
            }
            self.write_new_groups()?;
            self.write_free_space()?;
            self.write_group_items()?;
            if self.pending.is_empty()
                && self.space_changes.is_empty()
                && self.dirty_groups.is_empty()
                && !self.write_global_roots()?
                && self.pending.is_empty()
            {
                return Ok(());
            }
            rounds += 1;
            assert!(rounds < 1000, "the global trees do not come to rest");
        }
    }

    /// Applies the changes of one extent, and what follows from them for space and checksums.
    fn apply(&mut self, at: Logical, head: &RefHead) -> Result<()> {
        let ground = self.ground;
        let features = ground.extent_features();
        let applied = extent_tree::apply(&mut self.ops(&ground.roots.extent), features, at, head)?;
        let run = Run::new(at, head.num_bytes);
        match applied {
            Applied::Added => self.space_changed(run, false)?,
            Applied::Freed => {
                self.space_changed(run, true)?;
                ground.space.groups.pin(run)?;
                self.freed.push(run);
                if head.kind == ExtentKind::Data {
                    csum_tree::delete(&mut self.ops(&ground.roots.csum), ground.csum, run)?;
                }
            }
            Applied::NeverUsed => {
                ground.space.groups.pin(run)?;
                self.freed.push(run);
                if head.kind == ExtentKind::Data {
                    csum_tree::delete(&mut self.ops(&ground.roots.csum), ground.csum, run)?;
                }
            }
            Applied::Changed => {}
        }
        if fault!(ground.options.tuning, DiscardEarly) && matches!(applied, Applied::Freed) {
            ground.volume.discard(run.start, run.len)?;
        }
        if fault!(ground.options.tuning, ReusePinned) && matches!(applied, Applied::Freed) {
            ground.space.groups.unpin(run);
            self.freed.pop();
        }
        Ok(())
    }

    fn space_changed(&mut self, run: Run, free: bool) -> Result<()> {
        let group = self.ground.space.groups.find_run(run)?;
        let len = run.len.cast_signed();
        group.apply_used(if free { -len } else { len })?;
        self.dirty_groups.insert(group.run().start);
        if self.ground.roots.free_space.is_some()
            && !fault!(self.ground.options.tuning, StaleFreeSpace)
        {
            // The tree never had a block that the commit itself made and dropped again within one
            // round.
            match self.space_changes.entry(run.start) {
                Entry::Occupied(e) if *e.get() == (run.len, !free) => {
                    e.remove();
                }
                Entry::Occupied(mut e) => {
                    e.insert((run.len, free));
                }
                Entry::Vacant(e) => {
                    e.insert((run.len, free));
                }
            }
        }
        Ok(())
    }

    /// Writes into the free-space tree what became free or used, neighbours together.
    fn write_free_space(&mut self) -> Result<()> {
        let ground = self.ground;
        let Some(tree) = &ground.roots.free_space else { return Ok(()) };
        let changes = std::mem::take(&mut self.space_changes);
        let mut changes = changes.into_iter().peekable();
        while let Some((start, (mut len, free))) = changes.next() {
            let group = ground.space.groups.find_run(Run::new(start, len))?.run();
            while let Some((_, (more, _))) = changes
                .next_if(|(s, (_, f))| *f == free && *s == start.plus(len) && *s < group.end())
            {
                len += more;
            }
            let run = Run::new(start, len);
            if free {
                free_space_tree::add(&mut self.ops(tree), group, run)?;
            } else {
                free_space_tree::remove(&mut self.ops(tree), group, run)?;
            }
        }
        Ok(())
    }

    /// Makes the free-space record of groups anew whose record was not what the extent tree says.
    /// This runs before anything else of this transaction is applied, so the extent tree is still
    /// that of the last commit.
    fn rebuild_free_space(&mut self) -> Result<()> {
        let ground = self.ground;
        let Some(tree) = &ground.roots.free_space else { return Ok(()) };
        for run in ground.space.take_rebuilds() {
            let mut extents = ground.roots.extent.version(ground.epochs.enter());
            let used = groups::scan_used(&mut extents, ground.nodesize(), run)?;
            drop(extents);
            free_space_tree::delete_group(&mut self.ops(tree), run)?;
            free_space_tree::new_group(&mut self.ops(tree), run, &used)?;
        }
        Ok(())
    }

    fn group_tree(&self) -> &'a Tree {
        self.ground.roots.block_group.as_ref().unwrap_or(&self.ground.roots.extent)
    }

    fn write_group_items(&mut self) -> Result<()> {
        let tree = self.group_tree();
        for start in std::mem::take(&mut self.dirty_groups) {
            let Some(group) = self.ground.space.groups.find(start) else { continue };
            let key = Key::new(start, KeyType::BLOCK_GROUP_ITEM, group.run().len);
            let item = BlockGroupItem::new(group.disk_used(), group.flags());
            self.ops(tree).update(&key, item.as_bytes())?;
        }
        Ok(())
    }

    /// Writes the items of block groups that were made in this transaction.
    fn write_new_groups(&mut self) -> Result<()> {
        // Writing the items may make further groups.
        loop {
            let new = std::mem::take(&mut *self.txn.new_groups.lock());
            if new.is_empty() {
                return Ok(());
            }
            for group in new {
                self.write_new_group(&group)?;
            }
        }
    }

    fn write_new_group(&mut self, group: &NewGroup) -> Result<()> {
        let ground = self.ground;
        let run = group.run;
        let key = Key::new(ObjectId(256), KeyType::CHUNK_ITEM, run.start.0);
        self.ops(&ground.roots.chunk).insert(&key, &group.chunk.encode())?;
        let format = *ground.store.format();
        for stripe in &group.chunk.stripes {
            let key = Key::new(ObjectId(stripe.devid.0), KeyType::DEV_EXTENT, stripe.offset.0);
            let item = DevExtent {
                chunk_tree: U64::new(ObjectId::CHUNK_TREE.0),
                chunk_objectid: U64::new(256),
                chunk_offset: U64::new(run.start.0),
                length: U64::new(run.len),
                chunk_tree_uuid: format.chunk_tree_uuid,
            };
            self.ops(&ground.roots.dev).insert(&key, item.as_bytes())?;
        }
        let key = Key::new(run.start, KeyType::BLOCK_GROUP_ITEM, run.len);
        let item = BlockGroupItem::new(0, group.chunk.flags);
        self.ops(self.group_tree()).insert(&key, item.as_bytes())?;
        if let Some(tree) = &ground.roots.free_space {
            free_space_tree::new_group(&mut self.ops(tree), run, &[])?;
        }
        let added: u64 = group.chunk.stripes.len() as u64 * run.len;
        self.change_device_bytes(i128::from(added))
    }

    /// Gives back block groups in which nothing is left.
    fn remove_empty_groups(&mut self) -> Result<()> {
        let ground = self.ground;
        for (run, chunk) in ground.space.take_empty_groups(self.txn.generation) {
            let key = Key::new(run.start, KeyType::BLOCK_GROUP_ITEM, run.len);
            self.ops(self.group_tree()).delete(&key)?;
            if let Some(tree) = &ground.roots.free_space {
                free_space_tree::delete_group(&mut self.ops(tree), run)?;
            }
            for stripe in &chunk.stripes {
                let key = Key::new(ObjectId(stripe.devid.0), KeyType::DEV_EXTENT, stripe.offset.0);
                self.ops(&ground.roots.dev).delete(&key)?;
            }
            let key = Key::new(ObjectId(256), KeyType::CHUNK_ITEM, run.start.0);
            self.ops(&ground.roots.chunk).delete(&key)?;
            let gone: u64 = chunk.stripes.len() as u64 * run.len;
            self.change_device_bytes(-i128::from(gone))?;
            self.removed.push((run, chunk));
        }
        Ok(())
    }

    /// Changes the device's `bytes_used`, in the chunk tree and in the superblock.
    fn change_device_bytes(&mut self, delta: i128) -> Result<()> {
        let ground = self.ground;
        let mut item = ground.superblock.lock().dev_item;
        let used = i128::from(item.bytes_used.get()) + delta;
        let used = u64::try_from(used).map_err(|_| {
            Error::corrupt(
                Place::tree(ObjectId::CHUNK_TREE),
                "more device space given back than was used",
            )
        })?;
        item.bytes_used = U64::new(used);
        ground.superblock.lock().dev_item = item;
        let key = Key::new(ObjectId::DEV_ITEMS, KeyType::DEV_ITEM, item.devid.get());
        self.ops(&ground.roots.chunk).update(&key, item.as_bytes())
    }

    fn write_subvolume_root(&mut self, frozen: &Frozen) -> Result<()> {
        let ground = self.ground;
        let Frozen { subvol, root, changed, growth } = frozen;
        let item = {
            let mut item = subvol.item.lock();
            point_to(&mut item, root, self.txn.generation);
            item.last_snapshot = U64::new(subvol.tree.last_snapshot().0);
            let growth = growth * i64::from(ground.nodesize());
            item.bytes_used = U64::new(item.bytes_used.get().saturating_add_signed(growth));
            if *changed {
                item.ctransid = U64::new(self.txn.generation.0);
                item.ctime = crate::api::to_timespec(ground.now());
            }
            self.txn.roots.lock().change(subvol.id, &mut item);
            *item
        };
        self.write_root_item(subvol.id, subvol.key_offset, &item)
    }

    /// Writes the ROOT_ITEMs of global trees whose roots moved. Returns true if any had moved.
    fn write_global_roots(&mut self) -> Result<bool> {
        let ground = self.ground;
        let mut moved = false;
        for tree in ground.roots.with_items() {
            let root = tree.root();
            if root.ptr.generation != self.txn.generation {
                continue;
            }
            let version = ground.roots.root.version(ground.epochs.enter());
            let (key, mut item) = find_root(&version, tree.id())?.ok_or_else(|| {
                Error::corrupt(
                    Place::tree(ObjectId::ROOT_TREE),
                    format!("tree {} has no root item", tree.id()),
                )
            })?;
            drop(version);
            let before = (item.bytenr, item.level, item.generation, item.bytes_used);
            point_to(&mut item, &root, self.txn.generation);
            let growth = tree.take_growth() * i64::from(ground.nodesize());
            item.bytes_used = U64::new(item.bytes_used.get().saturating_add_signed(growth));
            if before == (item.bytenr, item.level, item.generation, item.bytes_used) {
                continue;
            }
            moved = true;
            let bytes = item.as_bytes().to_vec();
            self.ops(&ground.roots.root).update(&key, &bytes)?;
        }
        Ok(moved || !self.txn.new_groups.lock().is_empty())
    }

    /// The superblock of this transaction.
    fn superblock(&self) -> Result<Box<Superblock>> {
        let ground = self.ground;
        let mut sb = ground.superblock.lock().clone();
        let generation = U64::new(self.txn.generation.0);
        let followed_uuids = sb.uuid_tree_generation == sb.generation;
        sb.generation = generation;
        let root = ground.roots.root.root().ptr;
        sb.root = U64::new(root.at.0);
        sb.root_level = root.level;
        let chunk = ground.roots.chunk.root().ptr;
        sb.chunk_root = U64::new(chunk.at.0);
        sb.chunk_root_generation = U64::new(chunk.generation.0);
        sb.chunk_root_level = chunk.level;
        sb.log_root = U64::new(0);
        sb.log_root_level = 0;
        sb.bytes_used = U64::new(ground.space.disk_used());
        // A v1 space cache would be out of date now. 0 never equals a generation, so Linux rebuilds
        // it.
        sb.cache_generation = U64::new(0);
        if ground.roots.free_space.is_none() {
            sb.compat_ro_flags =
                U64::new(sb.compat_ro_flags.get() & !CompatRo::FREE_SPACE_TREE_VALID.bits());
        }
        if followed_uuids {
            sb.uuid_tree_generation = generation;
        }
        let mut incompat = sb.incompat_flags.get() | self.txn.incompat.load(Ordering::Relaxed);
        if ground.nodesize() > 4096 {
            incompat |= Incompat::BIG_METADATA.bits();
        }
        sb.incompat_flags = U64::new(incompat);
        if let Some(label) = self.txn.label.lock().take() {
            sb.label = [0; 256];
            sb.label[..label.len()].copy_from_slice(&label);
        }
        if ground.space.system_chunks_changed() {
            let bytes = ground.space.system_chunk_array(&self.removed)?;
            sb.set_sys_chunk_bytes(&bytes).map_err(|e| Error::corrupt(Place::default(), e.0))?;
        }
        self.fill_backup_root(&mut sb);
        Ok(sb)
    }

    /// Notes the roots in the next of the four backup slots.
    fn fill_backup_root(&self, sb: &mut Superblock) {
        let ground = self.ground;
        let before = sb.generation.get() - 1;
        let newest =
            sb.backup_roots.iter().position(|b| b.tree_root_gen.get() == before && before != 0);
        let slot = newest.map_or(0, |i| (i + 1) % 4);
        let roots = &ground.roots;
        let pair = |t: &Tree| {
            let p = t.root().ptr;
            (U64::new(p.at.0), U64::new(p.generation.0), p.level)
        };
        let fs = ground.above().top_level_item();
        let mut b = sb.backup_roots[slot];
        (b.tree_root, b.tree_root_gen, b.tree_root_level) = pair(&roots.root);
        (b.chunk_root, b.chunk_root_gen, b.chunk_root_level) = pair(&roots.chunk);
        (b.extent_root, b.extent_root_gen, b.extent_root_level) = pair(&roots.extent);
        (b.dev_root, b.dev_root_gen, b.dev_root_level) = pair(&roots.dev);
        (b.csum_root, b.csum_root_gen, b.csum_root_level) = pair(&roots.csum);
        if let Some(fs) = fs {
            (b.fs_root, b.fs_root_gen, b.fs_root_level) = (fs.bytenr, fs.generation, fs.level);
        }
        b.total_bytes = sb.total_bytes;
        b.bytes_used = sb.bytes_used;
        b.num_devices = sb.num_devices;
        sb.backup_roots[slot] = b;
    }

    /// Makes the transaction the published one.
    fn publish(mut self, frozen: &[Frozen], superblock: Box<Superblock>) {
        let ground = self.ground;
        *ground.superblock.lock() = superblock;
        ground.store.set_super_generation(self.txn.generation);
        for f in frozen {
            f.subvol.tree.settle(&f.root);
            f.subvol.settle_base(&f.root);
        }
        for tree in ground.roots.all() {
            tree.settle(&tree.root());
        }
        let nodesize = u64::from(ground.nodesize());
        for at in self.preallocated.drain(..).chain(self.system_preallocated.drain(..)) {
            ground.space.groups.give_back(Run::new(at, nodesize), None);
        }
        self.reserve.shrink_to(0);
        ground.space.kept_by_commit.store(0, Ordering::Release);
        // A thread that finds no space once this is published waits for what is being discarded.
        let discarding = ground.space.is_discarding().then(|| ground.space.discards.busy.lock());
        if discarding.is_none() {
            ground.space.forget_removed(&self.removed);
        }
        if let Err(e) = ground.space.measure_global_trees(&ground.roots, &ground.epochs.enter()) {
            // The reserve stays as large as it was. The next commit will need the root and say what
            // is wrong.
            tracing::warn!("the size of the global trees is not known: {e}");
        }
        ground.space.groups.set_published(self.txn.generation);
        ground.set_published_hint(self.txn.generation);
        // The root tree has these links and is durable. They are forgotten before any waiter goes
        // on, because the next `fsync` would otherwise commit for them again.
        ground.above().publishing(self.txn.generation);
        let freed = std::mem::take(&mut self.freed);
        let roots = (ground.roots.extent.root(), ground.roots.csum.root());
        ground.txns.publish(self.txn.generation, roots, || ground.epochs.advance(freed));
        ground.space.release_expired();
        if discarding.is_some() {
            ground.space.forget_removed(&self.removed);
            ground.space.discard_freed();
        }
    }
}

/// Bytes of checksums that are put into their tree at once.
const CSUMS_AT_ONCE: usize = 64 << 10;
/// Bytes that one checksum is for.
const SECTOR: u64 = larder_format::SECTOR_SIZE as u64;

/// The first checksums that are noted for `from` or behind it, together with those that follow
/// without a gap: writing many small extents leaves a note for each, and the notes lie beside each
/// other.
fn adjacent_csums(ground: &Ground, txn: &Txn, from: Logical) -> Option<(Logical, Vec<u8>)> {
    let notes = txn.csums.lock();
    let mut found = notes.range(from..);
    let (at, first) = found.next()?;
    let end = |len: usize| at.plus((len / ground.csum.size()) as u64 * SECTOR);
    let mut sums = first.clone();
    while let Some((next, more)) = found.next().filter(|(next, _)| **next == end(sums.len()))
        && sums.len() < CSUMS_AT_ONCE
    {
        debug_assert!(next.0.is_multiple_of(SECTOR));
        sums.extend_from_slice(more);
    }
    Some((*at, sums))
}

/// Makes a root item point to a root that this transaction wrote.
fn point_to(item: &mut RootItem, root: &Root, generation: Generation) {
    item.bytenr = U64::new(root.ptr.at.0);
    item.level = root.ptr.level;
    item.set_generation(generation);
    // Callers only pass roots of this generation. A live root has one reference.
    debug_assert_eq!(root.ptr.generation, generation);
}
