//! Moving blocks of trees that only the committer edits.
//!
//! A relocation notes which blocks are to move. To copy a block to another place is what every edit
//! does with the blocks on its path, so all that a move takes is a path that is made writable. A
//! few trees have nothing that Larder edits, such as that in which Linux keeps data that it
//! relocates. They are opened for this commit, and their ROOT_ITEMs follow.

use super::Committer;
use super::roots::point_to;
use crate::error::{Error, Place, Result};
use crate::transaction::{GlobalMove, find_root, root_pointer};
use crate::tree::{OnPath, Tree, TreeOps};
use larder_format::items::keys::inode_key;
use larder_format::items::{ExtentRef, FileExtent, InodeItem};
use larder_format::{FileOffset, FormatError, Generation, Key, KeyType, ObjectId, TreeId};
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, IntoBytes};

impl Committer<'_> {
    /// Moves what was noted, as far as it is still where it was.
    pub(super) fn carry_out_moves(&mut self) -> Result<()> {
        let moves = std::mem::take(&mut *self.txn.global_moves.lock());
        for what in moves {
            match what {
                GlobalMove::Block(tree, block) => self.move_block(tree, &block)?,
                GlobalMove::Cache(ino) => self.empty_cache(ino)?,
            }
        }
        self.write_moved_roots()
    }

    fn move_block(&mut self, id: TreeId, block: &OnPath) -> Result<()> {
        let ground = self.ground;
        match ground.roots.all().find(|t| t.id() == id) {
            Some(tree) => tree.move_block(&mut self.ops(tree).source, block).map(drop),
            None => self.move_of_other(id, block),
        }
    }

    /// Removes what a space cache of the first version holds. Nothing reads it any more.
    fn empty_cache(&mut self, ino: ObjectId) -> Result<()> {
        let roots = &self.ground.roots.root;
        let first = Key::new(ino, KeyType::EXTENT_DATA, 0);
        while let Some((key, data)) = self.ops(roots).at_or_after(&first)? {
            if key.objectid != ino || key.kind != KeyType::EXTENT_DATA {
                break;
            }
            let corrupt = |e: FormatError| Error::corrupt(Place::item(roots.id(), key), e.0);
            if let FileExtent::Stored(r) = FileExtent::parse(&data).map_err(corrupt)?
                && !r.is_hole()
            {
                let user = ExtentRef::data(roots.id(), ino, FileOffset(key.offset), r.offset);
                self.pending.drop_data(r.disk_bytenr, r.disk_num_bytes, user)?;
            }
            self.ops(roots).delete(&key)?;
        }
        let key = inode_key(ino);
        let found = self.ops(roots).get(&key)?;
        if let Some(mut item) = found.and_then(|data| InodeItem::read_from_bytes(&data).ok()) {
            (item.size, item.nbytes) = (U64::new(0), U64::new(0));
            self.ops(roots).update(&key, item.as_bytes())?;
        }
        Ok(())
    }

    /// Moves a block of a tree that is not open.
    fn move_of_other(&mut self, id: TreeId, block: &OnPath) -> Result<()> {
        let ground = self.ground;
        let mut trees = std::mem::take(&mut self.moved_trees);
        if !trees.iter().any(|t| t.id() == id) {
            let version = ground.roots.root.version(ground.epochs.enter());
            if let Some((_, item)) = find_root(&version, id)? {
                let (store, stats) = (ground.store.clone(), ground.tree_stats.clone());
                trees.push(Tree::new(id, store, root_pointer(&item), Generation(0), stats));
            }
        }
        let moved = match trees.iter().find(|t| t.id() == id) {
            Some(tree) => tree.move_block(&mut self.ops(tree).source, block).map(drop),
            None => Ok(()),
        };
        self.moved_trees = trees;
        moved
    }

    /// Writes the ROOT_ITEMs of trees that were opened for a move.
    fn write_moved_roots(&mut self) -> Result<()> {
        let ground = self.ground;
        let generation = self.txn.generation;
        let roots = self.moved_trees.iter().map(|t| (t.id(), t.root()));
        let moved: Vec<_> = roots.filter(|r| r.1.ptr.generation == generation).collect();
        for (id, root) in moved {
            let version = ground.roots.root.version(ground.epochs.enter());
            let Some((key, mut item)) = find_root(&version, id)? else { continue };
            drop(version);
            point_to(&mut item, &root, generation);
            self.ops(&ground.roots.root).update(&key, item.as_bytes())?;
        }
        Ok(())
    }
}
