//! Finding items by tree and key, and changing them in their leaves.
//!
//! Trees are found as the format says: root tree, chunk tree and log root through the superblock,
//! all others through their root items, a subvolume's log through the log root. What is hidden here
//! is what a change to a leaf drags along: the packing, the keys in the nodes above when the first
//! item comes or goes, and room: what does not fit a leaf any more is shared with the one beside
//! it.

use super::{Damage, leaf, raw};
use anyhow::{Context, Result, anyhow, bail, ensure};
use larder_format::items::root::RootItem;
use larder_format::node::NodeView;
use larder_format::{Key, KeyType, Logical, ObjectId, TreeId};

/// Items with their keys, in the order of a tree.
pub type Items = Vec<(Key, Vec<u8>)>;

/// A node on the way from a root to a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Address of the node.
    pub at: Logical,
    /// Slot of the pointer that was followed; in the leaf, of the item, or where it would stand.
    pub slot: usize,
}

impl Damage {
    /// Address of the root node of a tree. [`ObjectId::TREE_LOG`] is the tree of log roots.
    ///
    /// # Errors
    /// The file system has no such tree.
    pub fn root(&self, tree: TreeId) -> Result<Logical> {
        match tree {
            ObjectId::ROOT_TREE => Ok(self.superblock().root()),
            ObjectId::CHUNK_TREE => Ok(self.superblock().chunk_root()),
            ObjectId::TREE_LOG => self.superblock().log_root().context("there is no log"),
            _ => {
                let (_, item) = self.root_item(tree)?;
                Ok(item.root())
            }
        }
    }

    /// Root of the log tree of a subvolume.
    ///
    /// # Errors
    /// There is none.
    pub fn log_root_of(&self, subvolume: TreeId) -> Result<Logical> {
        let key = Key::new(ObjectId::TREE_LOG, KeyType::ROOT_ITEM, subvolume.0);
        Ok(RootItem::parse(&self.get(ObjectId::TREE_LOG, key)?)?.root())
    }

    /// Key and content of a tree's root item.
    ///
    /// # Errors
    /// There is none.
    pub fn root_item(&self, tree: TreeId) -> Result<(Key, RootItem)> {
        let (key, data) = self
            .first(ObjectId::ROOT_TREE, |key, _| {
                key.objectid == tree && key.kind == KeyType::ROOT_ITEM
            })
            .with_context(|| format!("no root item of tree {tree}"))?;
        Ok((key, RootItem::parse(&data)?))
    }

    /// All items of a tree.
    ///
    /// # Errors
    /// There is no such tree, or a node is not where it should be.
    pub fn items(&self, tree: TreeId) -> Result<Items> {
        self.items_below(self.root(tree)?)
    }

    /// All items below a node.
    ///
    /// # Errors
    /// A node is not where it should be.
    pub fn items_below(&self, at: Logical) -> Result<Items> {
        let mut found = Items::new();
        for leaf in self.nodes_below(at, 0)? {
            found.extend(leaf::unpack(&self.node(leaf)?)?);
        }
        Ok(found)
    }

    /// Addresses of all nodes of a level of a tree, in the order of their keys.
    ///
    /// # Errors
    /// As [`Damage::items`].
    pub fn nodes(&self, tree: TreeId, level: u8) -> Result<Vec<Logical>> {
        self.nodes_below(self.root(tree)?, level)
    }

    /// Addresses of all nodes of a level below a node, in the order of their keys.
    ///
    /// # Errors
    /// As [`Damage::items_below`].
    pub(crate) fn nodes_below(&self, at: Logical, level: u8) -> Result<Vec<Logical>> {
        let mut nodes = vec![at];
        loop {
            let Some(first) = nodes.first() else { return Ok(nodes) };
            let here = NodeView(&self.node(*first)?).level();
            if here <= level {
                return Ok(if here == level { nodes } else { Vec::new() });
            }
            let mut below = Vec::new();
            for at in nodes {
                let node = self.node(at)?;
                below.extend(NodeView(&node).pointers().iter().map(|p| Logical(p.blockptr.get())));
            }
            nodes = below;
        }
    }

    /// The first item of a tree that is `wanted`.
    ///
    /// # Errors
    /// There is none.
    pub fn first(
        &self,
        tree: TreeId,
        mut wanted: impl FnMut(&Key, &[u8]) -> bool,
    ) -> Result<(Key, Vec<u8>)> {
        let found = self.items(tree)?.into_iter().find(|(key, data)| wanted(key, data));
        found.ok_or_else(|| anyhow!("tree {tree} has no such item"))
    }

    /// An item's bytes.
    ///
    /// # Errors
    /// It is not there.
    pub fn get(&self, tree: TreeId, key: Key) -> Result<Vec<u8>> {
        let path = self.path(tree, key)?;
        let step = path.last().expect("a path has a leaf");
        let items = leaf::unpack(&self.node(step.at)?)?;
        match items.into_iter().nth(step.slot) {
            Some((found, data)) if found == key => Ok(data),
            _ => Err(anyhow!("tree {tree} has no item {key}")),
        }
    }

    /// The way from the root to the leaf that holds `key`, or would hold it.
    ///
    /// # Errors
    /// There is no such tree, or a node is not where it should be.
    pub fn path(&self, tree: TreeId, key: Key) -> Result<Vec<Step>> {
        self.path_below(self.root(tree)?, key)
    }

    fn path_below(&self, root: Logical, key: Key) -> Result<Vec<Step>> {
        let mut at = root;
        let mut path = Vec::new();
        loop {
            let bytes = self.node(at)?;
            let node = NodeView(&bytes);
            let found = node.search(&key);
            if node.level() == 0 {
                path.push(Step { at, slot: found.unwrap_or_else(|slot| slot) });
                return Ok(path);
            }
            let slot = found.unwrap_or_else(|slot| slot.saturating_sub(1));
            path.push(Step { at, slot });
            let pointer =
                node.pointers().get(slot).with_context(|| format!("node {at} is empty"))?;
            at = Logical(pointer.blockptr.get());
        }
    }

    /// Address of the leaf that holds `key`, and the slot in it.
    ///
    /// # Errors
    /// As [`Damage::path`].
    pub fn leaf_of(&self, tree: TreeId, key: Key) -> Result<Step> {
        Ok(*self.path(tree, key)?.last().expect("a path has a leaf"))
    }

    /// An item, to be changed.
    pub fn item(&mut self, tree: TreeId, key: Key) -> ItemEdit<'_> {
        ItemEdit { damage: self, tree, key }
    }

    /// Adds an item where its key belongs.
    ///
    /// # Errors
    /// It is there already, or its leaf is full and those beside it are, too.
    pub fn insert(&mut self, tree: TreeId, key: Key, data: &[u8]) -> Result<()> {
        self.edit_leaf(tree, key, |items, slot| {
            ensure!(
                items.get(slot).is_none_or(|(k, _)| *k != key),
                "tree {tree} has an item {key} already"
            );
            items.insert(slot, (key, data.to_vec()));
            Ok(())
        })
    }

    /// Adds an item below a root that no root item leads to: in a subvolume's log.
    ///
    /// # Errors
    /// It is there already, or its leaf is full.
    pub fn insert_below(&mut self, root: Logical, key: Key, data: &[u8]) -> Result<()> {
        let path = self.path_below(root, key)?;
        let (step, above) = path.split_last().expect("a path has a leaf");
        let mut items = leaf::unpack(&self.node(step.at)?)?;
        ensure!(
            items.get(step.slot).is_none_or(|(k, _)| *k != key),
            "there is an item {key} already"
        );
        items.insert(step.slot, (key, data.to_vec()));
        self.put_leaf(step.at, above, &items)
    }

    fn edit_leaf(
        &mut self,
        tree: TreeId,
        key: Key,
        change: impl FnOnce(&mut Items, usize) -> Result<()>,
    ) -> Result<()> {
        let path = self.path(tree, key)?;
        let (step, above) = path.split_last().expect("a path has a leaf");
        let mut bytes = self.node(step.at)?;
        let mut items = leaf::unpack(&bytes)?;
        change(&mut items, step.slot)?;
        ensure!(
            !items.is_empty() || above.is_empty(),
            "{key} is alone in its leaf: choose another"
        );
        let Err(full) = leaf::pack(&mut bytes, &items) else {
            return self.put_leaf(step.at, above, &items);
        };
        // What a subvolume shares with its snapshots has to stay where it is.
        if tree != ObjectId::FS_TREE && tree.is_subvolume() {
            return Err(full);
        }
        self.put_with_neighbour(&path, items).context(full)
    }

    /// Writes a leaf, and its first key into the nodes above.
    fn put_leaf(&mut self, at: Logical, above: &[Step], items: &[(Key, Vec<u8>)]) -> Result<()> {
        let mut bytes = self.node(at)?;
        leaf::pack(&mut bytes, items)?;
        self.edit_node(at, |node| node.copy_from_slice(&bytes))?;
        let Some((first, _)) = items.first() else { return Ok(()) };
        for up in above.iter().rev() {
            self.edit_node(up.at, |node| raw::pointer(node, up.slot).key = (*first).into())?;
            if up.slot > 0 {
                break;
            }
        }
        Ok(())
    }

    /// Shares the items of a leaf that has become too small with a leaf beside it: look-ups find
    /// all of them as before.
    fn put_with_neighbour(&mut self, path: &[Step], items: Items) -> Result<()> {
        let [above @ .., parent, leaf] = path else { bail!("the tree is this one leaf") };
        let node = self.node(parent.at)?;
        let children: Vec<Logical> =
            NodeView(&node).pointers().iter().map(|p| Logical(p.blockptr.get())).collect();
        let step = |slot| Step { at: parent.at, slot };
        for beside in [parent.slot + 1, parent.slot.wrapping_sub(1)] {
            let Some(other) = children.get(beside) else { continue };
            let other_items = leaf::unpack(&self.node(*other)?)?;
            let (left_first, all) = if beside > parent.slot {
                (true, [items.clone(), other_items].concat())
            } else {
                (false, [other_items, items.clone()].concat())
            };
            let Some(cut) = leaf::balance(&all, node.len()) else { continue };
            let (left, right) = all.split_at(cut);
            let ways: [(Logical, usize); 2] = if left_first {
                [(leaf.at, parent.slot), (*other, beside)]
            } else {
                [(*other, beside), (leaf.at, parent.slot)]
            };
            for ((at, slot), part) in ways.into_iter().zip([left, right]) {
                self.put_leaf(at, &[above, &[step(slot)]].concat(), part)?;
            }
            return Ok(());
        }
        bail!("and the leaves beside it are full, too")
    }
}

/// An item that is about to be changed, on all copies of its leaf, whose checksum follows.
#[derive(Debug)]
#[must_use = "nothing changes without one of its methods"]
pub struct ItemEdit<'a> {
    damage: &'a mut Damage,
    tree: TreeId,
    key: Key,
}

impl ItemEdit<'_> {
    /// Changes the item's bytes, and their number as the caller likes.
    ///
    /// # Errors
    /// It is not there, or grows beyond its leaf.
    pub fn edit(self, change: impl FnOnce(&mut Vec<u8>)) -> Result<()> {
        let (tree, key) = (self.tree, self.key);
        self.damage.edit_leaf(tree, key, |items, slot| {
            let (_, data) = items
                .get_mut(slot)
                .filter(|(k, _)| *k == key)
                .with_context(|| format!("tree {tree} has no item {key}"))?;
            change(data);
            Ok(())
        })
    }

    /// Writes over bytes of the item.
    ///
    /// # Errors
    /// It is not there, or shorter; or it holds these bytes already, so that nothing would be
    /// damaged.
    pub fn set(self, at: usize, bytes: &[u8]) -> Result<()> {
        let (tree, key) = (self.tree, self.key);
        let old = self.damage.get(tree, key)?;
        let field = old.get(at..at + bytes.len()).with_context(|| format!("{key} is shorter"))?;
        ensure!(field != bytes, "{key} has {bytes:?} at {at} already");
        self.edit(|data| data[at..at + bytes.len()].copy_from_slice(bytes))
    }

    /// Sets one byte.
    ///
    /// # Errors
    /// As [`ItemEdit::set`].
    pub fn set_u8(self, at: usize, value: u8) -> Result<()> {
        self.set(at, &[value])
    }

    /// Sets a field of two bytes.
    ///
    /// # Errors
    /// As [`ItemEdit::set`].
    pub fn set_u16(self, at: usize, value: u16) -> Result<()> {
        self.set(at, &value.to_le_bytes())
    }

    /// Sets a field of four bytes.
    ///
    /// # Errors
    /// As [`ItemEdit::set`].
    pub fn set_u32(self, at: usize, value: u32) -> Result<()> {
        self.set(at, &value.to_le_bytes())
    }

    /// Sets a field of eight bytes.
    ///
    /// # Errors
    /// As [`ItemEdit::set`].
    pub fn set_u64(self, at: usize, value: u64) -> Result<()> {
        self.set(at, &value.to_le_bytes())
    }

    /// Adds to a field of eight bytes.
    ///
    /// # Errors
    /// As [`ItemEdit::set`].
    pub fn add_u64(self, at: usize, delta: i64) -> Result<()> {
        let old = self.damage.get(self.tree, self.key)?;
        let field = old.get(at..).and_then(<[u8]>::first_chunk).context("the item is shorter")?;
        self.set_u64(at, u64::from_le_bytes(*field).wrapping_add_signed(delta))
    }

    /// Takes the item away.
    ///
    /// # Errors
    /// It is not there, or alone in a leaf below a root.
    pub fn delete(self) -> Result<()> {
        let (tree, key) = (self.tree, self.key);
        self.damage.edit_leaf(tree, key, |items, slot| {
            ensure!(
                items.get(slot).is_some_and(|(k, _)| *k == key),
                "tree {tree} has no item {key}"
            );
            items.remove(slot);
            Ok(())
        })
    }

    /// Gives the item another key and puts it where that belongs.
    ///
    /// # Errors
    /// As [`ItemEdit::delete`] and [`Damage::insert`].
    pub fn rekey(self, to: Key) -> Result<()> {
        let data = self.damage.get(self.tree, self.key)?;
        let Self { damage, tree, key } = self;
        damage.item(tree, key).delete()?;
        damage.insert(tree, to, &data)
    }
}
