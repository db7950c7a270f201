//! Walking through two trees together.
//!
//! Each side is a path of nodes. Its head is an item, or a pointer to a block that has not been
//! entered. The head with the lower key goes first; of equal keys, the one that stands higher in
//! its tree. So two pointers to the same block meet, and the block is left out on both sides
//! without being read. What is read grows with the number of blocks that only one side has.
//!
//! A step ends after a bounded amount of work, and the next step finds its place again by key. Keys
//! that do not rise are damage: without that check a walk over a damaged tree might not end.

use super::frozen::Frozen;
use crate::error::{Error, Place, Result};
use crate::tree::{Node, Pointer, Version, child_pointer, child_slot};
use larder_format::{Key, KeyType, MAX_LEVEL, ObjectId};
use std::cmp::Ordering;
use std::sync::Arc;

/// Bytes of items after which a step ends.
const BYTES_PER_STEP: usize = 512 << 10;
/// Heads after which a step ends.
const HEADS_PER_STEP: usize = 1 << 16;

/// An item that only one of two trees has, or that differs between them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ItemChange {
    /// Its key.
    pub key: Key,
    /// What the older tree has.
    pub old: Option<Vec<u8>>,
    /// What the newer tree has.
    pub new: Option<Vec<u8>>,
}

/// A comparison of two subvolumes, or of nothing and a subvolume. Entries of directories are left
/// out, because inodes have their names as well.
#[derive(Debug)]
pub struct Comparison<'a> {
    old: Option<&'a Frozen>,
    new: &'a Frozen,
    /// The lowest key that has not been looked at; `None` when all have been.
    next: Option<Key>,
}

impl<'a> Comparison<'a> {
    /// Of `old`, or nothing, and `new`.
    #[must_use]
    pub fn new(old: Option<&'a Frozen>, new: &'a Frozen) -> Self {
        Self { old, new, next: Some(Key::MIN) }
    }

    /// The next changes by rising key, perhaps none. `None` is the end.
    ///
    /// # Errors
    /// Reading, corruption; `Busy` when the reader of a subvolume has been told to end.
    pub fn step(&mut self) -> Result<Option<Vec<ItemChange>>> {
        let Some(from) = self.next else { return Ok(None) };
        let mut old = match self.old {
            Some(old) => Side::seek(old.version()?, &from)?,
            None => Side::nothing(self.new.version()?),
        };
        let mut new = Side::seek(self.new.version()?, &from)?;
        let mut out = Vec::new();
        let mut bytes = 0;
        for _ in 0..HEADS_PER_STEP {
            if bytes >= BYTES_PER_STEP {
                break;
            }
            let Some(change) = advance(&mut old, &mut new)? else { continue };
            let Change::Item(item) = change else {
                self.next = None;
                return Ok(Some(out));
            };
            let len = |side: &Option<Vec<u8>>| side.as_ref().map_or(0, Vec::len);
            bytes += len(&item.old) + len(&item.new) + size_of::<ItemChange>();
            out.push(item);
        }
        let heads = [old.head()?, new.head()?];
        self.next = heads.iter().flatten().map(|head| head.key).min();
        Ok(Some(out))
    }
}

enum Change {
    Item(ItemChange),
    End,
}

/// Leaves out, enters or takes what comes first; `None` if that is no change.
fn advance(old: &mut Side, new: &mut Side) -> Result<Option<Change>> {
    let (a, b) = (old.head()?, new.head()?);
    let order = match (&a, &b) {
        (None, None) => return Ok(Some(Change::End)),
        (Some(_), None) => Ordering::Less,
        (None, Some(_)) => Ordering::Greater,
        // The higher one first, where the keys are equal.
        (Some(a), Some(b)) => a.key.cmp(&b.key).then(b.level.cmp(&a.level)),
    };
    match (order, a, b) {
        (Ordering::Equal, Some(a), Some(b)) => both(old, new, &a, &b),
        (Ordering::Less, Some(a), _) => one(old, &a, true),
        (Ordering::Greater, _, Some(b)) => one(new, &b, false),
        _ => unreachable!("a head that comes first exists"),
    }
}

fn both(old: &mut Side, new: &mut Side, a: &Head, b: &Head) -> Result<Option<Change>> {
    if a.level > 0 {
        let (p, q) = (old.pointer(), new.pointer());
        if (p.at, p.generation) == (q.at, q.generation) {
            old.skip();
            new.skip();
        } else {
            old.enter()?;
            new.enter()?;
        }
        return Ok(None);
    }
    let change = (old.data() != new.data() && is_wanted(&a.key)).then(|| {
        Change::Item(ItemChange {
            key: b.key,
            old: Some(old.data().to_vec()),
            new: Some(new.data().to_vec()),
        })
    });
    old.skip();
    new.skip();
    Ok(change)
}

fn one(side: &mut Side, head: &Head, is_old: bool) -> Result<Option<Change>> {
    if head.level > 0 {
        side.enter()?;
        return Ok(None);
    }
    let change = is_wanted(&head.key).then(|| {
        let data = Some(side.data().to_vec());
        let (old, new) = if is_old { (data, None) } else { (None, data) };
        Change::Item(ItemChange { key: head.key, old, new })
    });
    side.skip();
    Ok(change)
}

fn is_wanted(key: &Key) -> bool {
    let inodes = ObjectId::FIRST_FREE..=ObjectId::LAST_FREE;
    inodes.contains(&key.objectid) && !matches!(key.kind, KeyType::DIR_ITEM | KeyType::DIR_INDEX)
}

/// What comes next on a side: an item at level 0, or else a pointer of a node of that level.
struct Head {
    key: Key,
    level: u8,
}

/// A tree, and where the walk is in it.
struct Side {
    version: Version,
    /// Nodes from the root down, each with the slot that comes next.
    path: Vec<(Arc<Node>, usize)>,
    /// The last head.
    last: Option<(Key, u8)>,
}

impl Side {
    /// The side that has nothing. The version is not looked at.
    fn nothing(version: Version) -> Self {
        Self { version, path: Vec::new(), last: None }
    }

    /// A side whose first head is the first that may have keys from `key` on.
    fn seek(version: Version, key: &Key) -> Result<Self> {
        let mut node = version.root_node()?;
        let mut path = Vec::new();
        while node.level() > 0 {
            let slot = child_slot(&node, key);
            let child = version.child(&node, slot)?;
            path.push((node, slot + 1));
            node = child;
        }
        let slot = node.view().search(key).unwrap_or_else(|slot| slot);
        path.push((node, slot));
        Ok(Self { version, path, last: None })
    }

    fn head(&mut self) -> Result<Option<Head>> {
        while let Some((node, slot)) = self.path.last() {
            if let Some(key) = node.view().key(*slot) {
                let level = node.level();
                self.check_order(key, level)?;
                return Ok(Some(Head { key, level }));
            }
            self.path.pop();
        }
        Ok(None)
    }

    /// Keys rise; a block's first key is that of the pointer to it.
    fn check_order(&mut self, key: Key, level: u8) -> Result<()> {
        if let Some((last, last_level)) = self.last
            && (key < last || (key == last && level > last_level))
        {
            let place = Place { tree: Some(self.version.tree()), ..Place::default() };
            return Err(Error::corrupt(place, format!("keys do not rise: {last} and {key}")));
        }
        self.last = Some((key, level));
        Ok(())
    }

    fn top(&self) -> (&Arc<Node>, usize) {
        let (node, slot) = self.path.last().expect("there is a head");
        (node, *slot)
    }

    fn pointer(&self) -> Pointer {
        let (node, slot) = self.top();
        child_pointer(node, slot)
    }

    fn data(&self) -> &[u8] {
        let (node, slot) = self.top();
        node.view().data(slot).unwrap_or_default()
    }

    fn skip(&mut self) {
        self.path.last_mut().expect("there is a head").1 += 1;
    }

    fn enter(&mut self) -> Result<()> {
        if self.path.len() >= usize::from(MAX_LEVEL) {
            let place = Place { tree: Some(self.version.tree()), ..Place::default() };
            return Err(Error::corrupt(place, "tree higher than eight levels"));
        }
        let (node, slot) = self.top();
        let child = self.version.child(node, slot)?;
        self.skip();
        self.path.push((child, 0));
        Ok(())
    }
}
