//! Delayed references: what a transaction did to extents, waiting for the committer.
//!
//! Running operations never touch the extent tree. They record `(extent, reference) -> delta` here;
//! opposite deltas cancel, so that what is left is the net change of the transaction. How many
//! references an extent has *now* is the sum of three parts that readers add up themselves: the
//! item in the last published extent tree, the [`DelayedRefs::delta`] of the sealed transaction,
//! and that of the running one.
//!
//! A head (all changes of one extent) stays even when its deltas cancel out, because of two facts
//! that outlive them: the extent was *created* here — with nothing left, it was created and dropped
//! in one transaction and never reaches the tree — or its FULL_BACKREF flag must be set.

use crate::error::{Error, Place, Result};
use larder_format::items::ExtentRef;
use larder_format::{Generation, Key, Logical, TreeId};
use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

/// What an extent holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ExtentKind {
    /// File data.
    Data,
    /// A tree block.
    TreeBlock {
        /// Its level: part of the key of its item.
        level: u8,
    },
}

impl ExtentKind {
    /// Is it file data?
    #[must_use]
    pub(crate) fn is_data(self) -> bool {
        self == Self::Data
    }
}

/// The references of one head: almost always one or two, sometimes (reflinks of one extent) very
/// many.
#[derive(Clone, Debug)]
enum RefMap {
    Few(SmallVec<[(ExtentRef, i64); 1]>),
    Many(BTreeMap<ExtentRef, i64>),
}

impl Default for RefMap {
    fn default() -> Self {
        Self::Few(SmallVec::new())
    }
}

/// Above this many references a head switches to a sorted map.
const FEW: usize = 16;

impl RefMap {
    fn add(&mut self, key: ExtentRef, delta: i64) {
        match self {
            Self::Few(v) => match v.binary_search_by_key(&key, |r| r.0) {
                Ok(i) => {
                    v[i].1 += delta;
                    if v[i].1 == 0 {
                        v.remove(i);
                    }
                }
                Err(i) if v.len() < FEW => v.insert(i, (key, delta)),
                Err(_) => {
                    let mut m: BTreeMap<_, _> = v.drain(..).collect();
                    m.insert(key, delta);
                    *self = Self::Many(m);
                }
            },
            Self::Many(m) => match m.entry(key) {
                Entry::Vacant(e) => {
                    e.insert(delta);
                }
                Entry::Occupied(mut e) => {
                    *e.get_mut() += delta;
                    if *e.get() == 0 {
                        e.remove();
                    }
                }
            },
        }
    }
    fn len(&self) -> usize {
        match self {
            Self::Few(v) => v.len(),
            Self::Many(m) => m.len(),
        }
    }
    fn iter(&self) -> impl Iterator<Item = (ExtentRef, i64)> + '_ {
        let (few, many) = match self {
            Self::Few(v) => (Some(v.iter().copied()), None),
            Self::Many(m) => (None, Some(m.iter().map(|(k, d)| (*k, *d)))),
        };
        few.into_iter().flatten().chain(many.into_iter().flatten())
    }
}

/// All changes of one extent in one transaction.
#[derive(Clone, Debug)]
pub(crate) struct RefHead {
    /// Length of the extent in bytes.
    pub(crate) num_bytes: u64,
    /// What it holds.
    pub(crate) kind: ExtentKind,
    /// Was it allocated in this transaction? Then the extent tree has no item for it yet.
    pub(crate) created: bool,
    /// Must the item get the FULL_BACKREF flag?
    pub(crate) set_full_backref: bool,
    /// Transaction that allocated it; meaningful with `created`.
    pub(crate) generation: Generation,
    /// First key of a created tree block, for images without skinny metadata. Informative on disk
    /// (Linux leaves it as it was at allocation, zero for an empty leaf), hence absent means zero.
    pub(crate) first_key: Option<Key>,
    refs: RefMap,
    added: Added,
}

/// Which references a data extent has got in this transaction, whether or not it still has them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Added {
    #[default]
    Nobody,
    One(ExtentRef),
    Several,
}

impl RefHead {
    /// An empty head of an extent that exists on disk.
    #[must_use]
    pub(crate) fn existing(num_bytes: u64, kind: ExtentKind) -> Self {
        Self {
            num_bytes,
            kind,
            created: false,
            set_full_backref: false,
            generation: Generation(0),
            first_key: None,
            refs: RefMap::default(),
            added: Added::Nobody,
        }
    }
    /// Has the data extent got another reference than `key` in this transaction, even if that is
    /// gone?
    #[must_use]
    pub(crate) fn was_given_to_others(&self, key: ExtentRef) -> bool {
        self.added != Added::Nobody && self.added != Added::One(key)
    }
    /// Records one more change. A reference of the wrong kind (data on a block) breaks an
    /// invariant, because the caller chose both.
    pub(crate) fn add(&mut self, key: ExtentRef, delta: i64) {
        assert_eq!(key.is_data(), self.kind.is_data(), "{key:?} on {:?}", self.kind);
        if delta != 0 {
            self.refs.add(key, delta);
        }
        if delta > 0 && key.is_data() {
            self.added = match self.added {
                Added::Nobody => Added::One(key),
                Added::One(other) if other == key => Added::One(key),
                _ => Added::Several,
            };
        }
    }
    /// Sum of all changes.
    #[must_use]
    pub(crate) fn total(&self) -> i64 {
        self.refs.iter().map(|r| r.1).sum()
    }
    /// The net changes, none of them zero, sorted (by [`ExtentRef`]'s order, not that of the disk).
    pub(crate) fn refs(&self) -> impl Iterator<Item = (ExtentRef, i64)> + '_ {
        self.refs.iter()
    }
    /// Number of references that change.
    #[must_use]
    pub(crate) fn len(&self) -> usize {
        self.refs.len()
    }
    /// Is there nothing to do for the extent tree?
    #[must_use]
    pub(crate) fn is_empty(&self) -> bool {
        self.refs.len() == 0 && !self.set_full_backref
    }
}

/// What a set of delayed refs says about one extent. All zero if it says nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RefDelta {
    /// Change of the reference count.
    pub(crate) total: i64,
    /// Is the FULL_BACKREF flag about to be set?
    pub(crate) set_full_backref: bool,
    /// Was the extent allocated in this transaction (so there is no item on disk)?
    pub(crate) created: bool,
}

/// Changes of extent references that are not in the extent tree yet, by address.
#[derive(Clone, Debug, Default)]
pub(crate) struct DelayedRefs {
    heads: BTreeMap<Logical, RefHead>,
}

fn conflict(bytenr: Logical, num_bytes: u64, kind: ExtentKind, head: &RefHead) -> Error {
    let what = format!(
        "extent of {num_bytes} bytes ({kind:?}) is also used as one of {} bytes ({:?})",
        head.num_bytes, head.kind
    );
    Error::corrupt(Place::block(bytenr), what)
}

impl DelayedRefs {
    /// An empty set.
    #[must_use]
    pub(crate) fn new() -> Self {
        Self::default()
    }

    fn head(&mut self, bytenr: Logical, num_bytes: u64, kind: ExtentKind) -> Result<&mut RefHead> {
        let head = self.heads.entry(bytenr).or_insert_with(|| RefHead::existing(num_bytes, kind));
        if head.num_bytes == num_bytes && head.kind == kind {
            return Ok(head);
        }
        Err(conflict(bytenr, num_bytes, kind, head))
    }

    /// Records `delta` more (or fewer) references `key` of the extent.
    ///
    /// # Errors
    /// `Corrupt` when the address was used as another extent in this transaction: two items on disk
    /// disagree.
    pub(crate) fn change(
        &mut self,
        bytenr: Logical,
        num_bytes: u64,
        kind: ExtentKind,
        key: ExtentRef,
        delta: i64,
    ) -> Result<()> {
        self.head(bytenr, num_bytes, kind)?.add(key, delta);
        Ok(())
    }

    /// Records that the extent was allocated in transaction `generation`. Its references follow by
    /// [`Self::change`].
    ///
    /// An address whose extent was created and dropped again in this transaction may be created
    /// anew.
    ///
    /// # Errors
    /// `Corrupt` when the address is in use: something on disk refers to space that is recorded as
    /// free.
    pub(crate) fn created(
        &mut self,
        bytenr: Logical,
        num_bytes: u64,
        kind: ExtentKind,
        generation: Generation,
        first_key: Option<Key>,
    ) -> Result<()> {
        self.check_new(bytenr)?;
        let head =
            RefHead { created: true, generation, first_key, ..RefHead::existing(num_bytes, kind) };
        self.heads.insert(bytenr, head);
        Ok(())
    }

    /// A new tree block of `root`, with its one reference. Errors as [`Self::created`].
    pub(crate) fn create_tree_block(
        &mut self,
        bytenr: Logical,
        nodesize: u32,
        level: u8,
        root: TreeId,
        generation: Generation,
        first_key: Option<Key>,
    ) -> Result<()> {
        let kind = ExtentKind::TreeBlock { level };
        self.created(bytenr, u64::from(nodesize), kind, generation, first_key)?;
        self.change(bytenr, u64::from(nodesize), kind, ExtentRef::TreeBlock { root }, 1)
    }

    /// One more reference to a tree block. Errors as [`Self::change`].
    #[cfg(test)]
    pub(crate) fn add_tree_block(
        &mut self,
        bytenr: Logical,
        nodesize: u32,
        level: u8,
        key: ExtentRef,
    ) -> Result<()> {
        self.change(bytenr, u64::from(nodesize), ExtentKind::TreeBlock { level }, key, 1)
    }

    /// One reference less to a tree block. Errors as [`Self::change`].
    pub(crate) fn drop_tree_block(
        &mut self,
        bytenr: Logical,
        nodesize: u32,
        level: u8,
        key: ExtentRef,
    ) -> Result<()> {
        self.change(bytenr, u64::from(nodesize), ExtentKind::TreeBlock { level }, key, -1)
    }

    /// A new data extent with its first reference. Errors as [`Self::created`].
    pub(crate) fn create_data(
        &mut self,
        bytenr: Logical,
        num_bytes: u64,
        key: ExtentRef,
        generation: Generation,
    ) -> Result<()> {
        self.created(bytenr, num_bytes, ExtentKind::Data, generation, None)?;
        self.change(bytenr, num_bytes, ExtentKind::Data, key, 1)
    }

    /// One more reference to a data extent. Errors as [`Self::change`].
    pub(crate) fn add_data(
        &mut self,
        bytenr: Logical,
        num_bytes: u64,
        key: ExtentRef,
    ) -> Result<()> {
        self.change(bytenr, num_bytes, ExtentKind::Data, key, 1)
    }

    /// One reference less to a data extent. Errors as [`Self::change`].
    pub(crate) fn drop_data(
        &mut self,
        bytenr: Logical,
        num_bytes: u64,
        key: ExtentRef,
    ) -> Result<()> {
        self.change(bytenr, num_bytes, ExtentKind::Data, key, -1)
    }

    /// The tree block's item gets the FULL_BACKREF flag. Errors as [`Self::change`].
    pub(crate) fn set_full_backref(
        &mut self,
        bytenr: Logical,
        nodesize: u32,
        level: u8,
    ) -> Result<()> {
        self.head(bytenr, u64::from(nodesize), ExtentKind::TreeBlock { level })?.set_full_backref =
            true;
        Ok(())
    }

    /// What this set says about an extent.
    #[must_use]
    pub(crate) fn delta(&self, bytenr: Logical) -> RefDelta {
        self.heads.get(&bytenr).map_or_else(RefDelta::default, |h| RefDelta {
            total: h.total(),
            set_full_backref: h.set_full_backref,
            created: h.created,
        })
    }

    /// The head of an extent, if it changed.
    #[must_use]
    pub(crate) fn get(&self, bytenr: Logical) -> Option<&RefHead> {
        self.heads.get(&bytenr)
    }

    /// A copy of the first head at `from` or behind it.
    #[must_use]
    pub(crate) fn at_or_after(&self, from: Logical) -> Option<(Logical, RefHead)> {
        self.heads.range(from..).next().map(|(at, head)| (*at, head.clone()))
    }

    /// Could a change of such an extent be recorded? See [`Self::change`].
    ///
    /// # Errors
    /// What `change` would say.
    pub(crate) fn check(&self, bytenr: Logical, num_bytes: u64, kind: ExtentKind) -> Result<()> {
        match self.heads.get(&bytenr) {
            Some(head) if head.num_bytes != num_bytes || head.kind != kind => {
                Err(conflict(bytenr, num_bytes, kind, head))
            }
            _ => Ok(()),
        }
    }

    /// Could an extent be created there? See [`Self::created`].
    ///
    /// # Errors
    /// What `created` would say.
    pub(crate) fn check_new(&self, bytenr: Logical) -> Result<()> {
        match self.heads.get(&bytenr) {
            Some(head) if !head.created || head.refs.len() > 0 => Err(Error::corrupt(
                Place::block(bytenr),
                "allocated although something refers to it",
            )),
            _ => Ok(()),
        }
    }

    /// All heads in address order.
    #[cfg(test)]
    pub(crate) fn iter(&self) -> impl Iterator<Item = (Logical, &RefHead)> + '_ {
        self.heads.iter().map(|(a, h)| (*a, h))
    }

    /// Takes the head with the lowest address out.
    pub(crate) fn pop_first(&mut self) -> Option<(Logical, RefHead)> {
        self.heads.pop_first()
    }

    /// Forgets an extent that was created in this transaction, with its references. For an extent
    /// that is older or unknown, returns false and changes nothing.
    pub(crate) fn forget_created(&mut self, bytenr: Logical) -> bool {
        let created = self.heads.get(&bytenr).is_some_and(|head| head.created);
        created && self.heads.remove(&bytenr).is_some()
    }

    /// Joins two data extents that were created in this transaction, the second behind the first.
    /// Each is given by address, length and its only reference. If one of them is anything else,
    /// returns false and changes nothing. With `forget`, references that others had and have no
    /// more do not count.
    pub(crate) fn join_created(
        &mut self,
        left: (Logical, u64, ExtentRef),
        right: (Logical, u64, ExtentRef),
        forget: bool,
    ) -> bool {
        assert_eq!(left.0.plus(left.1), right.0, "only neighbours can be joined");
        if ![left, right].iter().all(|e| self.is_created_with(e, forget)) {
            return false;
        }
        self.heads.remove(&right.0);
        self.heads.get_mut(&left.0).expect("just looked at").num_bytes += right.1;
        true
    }

    /// Undoes [`Self::join_created`].
    pub(crate) fn split_created(
        &mut self,
        left: (Logical, u64, ExtentRef),
        right: (Logical, u64, ExtentRef),
        generation: Generation,
    ) {
        self.heads.get_mut(&left.0).expect("it was joined").num_bytes = left.1;
        let empty = RefHead::existing(right.1, ExtentKind::Data);
        let mut head = RefHead { created: true, generation, ..empty };
        head.add(right.2, 1);
        self.heads.insert(right.0, head);
    }

    /// Was this data extent created here, and is `key` its only reference? It must not have had
    /// another one either, unless `forget` is set.
    fn is_created_with(&self, (at, len, key): &(Logical, u64, ExtentRef), forget: bool) -> bool {
        self.heads.get(at).is_some_and(|head| {
            let whole = head.created && head.kind.is_data() && head.num_bytes == *len;
            let alone = head.len() == 1 && head.refs().all(|r| r == (*key, 1));
            whole && alone && (forget || !head.was_given_to_others(*key))
        })
    }

    /// Number of extents that changed.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.heads.len()
    }

    /// Has nothing changed?
    #[must_use]
    pub(crate) fn is_empty(&self) -> bool {
        self.heads.is_empty()
    }
}

impl IntoIterator for DelayedRefs {
    type Item = (Logical, RefHead);
    type IntoIter = std::collections::btree_map::IntoIter<Logical, RefHead>;
    /// All heads in address order.
    fn into_iter(self) -> Self::IntoIter {
        self.heads.into_iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_format::{FileOffset, ObjectId};
    use proptest::prelude::*;

    const A: Logical = Logical(1 << 20);

    #[test]
    fn created_and_dropped_leaves_a_head_that_says_so() {
        let mut d = DelayedRefs::new();
        d.create_tree_block(A, 16384, 1, ObjectId(5), Generation(7), None).unwrap();
        assert_eq!(d.delta(A), RefDelta { total: 1, set_full_backref: false, created: true });
        d.drop_tree_block(A, 16384, 1, ExtentRef::TreeBlock { root: ObjectId(5) }).unwrap();
        assert_eq!(d.delta(A), RefDelta { total: 0, set_full_backref: false, created: true });
        assert!(d.get(A).unwrap().is_empty());
        // The address may be used anew, for something else.
        let key = ExtentRef::data(ObjectId(5), ObjectId(257), FileOffset(0), 0);
        d.create_data(A, 4096, key, Generation(7)).unwrap();
        assert_eq!(d.delta(A).total, 1);
        assert_eq!(d.len(), 1);
        let (addr, head) = d.pop_first().unwrap();
        assert_eq!((addr, head.num_bytes, head.kind), (A, 4096, ExtentKind::Data));
        assert!(d.is_empty());
    }

    #[test]
    fn an_address_in_two_roles_is_corrupt() {
        let mut d = DelayedRefs::new();
        d.create_tree_block(A, 16384, 0, ObjectId(5), Generation(7), None).unwrap();
        let key = ExtentRef::TreeBlock { root: ObjectId(5) };
        assert!(d.create_tree_block(A, 16384, 0, ObjectId(5), Generation(7), None).is_err());
        assert!(d.drop_tree_block(A, 16384, 1, key).is_err());
        assert!(d.drop_data(A, 16384, ExtentRef::SharedData { parent: A }).is_err());
        assert_eq!(d.delta(A).total, 1);
    }

    #[test]
    fn heads_come_in_address_order_with_their_flag() {
        let mut d = DelayedRefs::new();
        d.set_full_backref(Logical(3 << 20), 16384, 0).unwrap();
        d.add_tree_block(A, 16384, 0, ExtentRef::SharedBlock { parent: Logical(9) }).unwrap();
        let got: Vec<_> = d.iter().map(|(a, h)| (a, h.set_full_backref, h.total())).collect();
        assert_eq!(got, [(A, false, 1), (Logical(3 << 20), true, 0)]);
        assert!(d.delta(Logical(3 << 20)).set_full_backref);
    }

    proptest! {
        #[test]
        fn deltas_merge_as_in_a_map(
            changes in prop::collection::vec((0u64..40, -2i64..3), 0..200)
        ) {
            let mut d = DelayedRefs::new();
            let mut model = BTreeMap::new();
            for (n, delta) in changes {
                let key = if n % 2 == 0 {
                    ExtentRef::data(ObjectId(5), ObjectId(n), FileOffset(0), 0)
                } else {
                    ExtentRef::SharedData { parent: Logical(n) }
                };
                d.change(A, 4096, ExtentKind::Data, key, delta).unwrap();
                *model.entry(key).or_insert(0i64) += delta;
            }
            model.retain(|_, v| *v != 0);
            prop_assert_eq!(d.delta(A).total, model.values().sum::<i64>());
            if let Some(h) = d.get(A) {
                prop_assert_eq!(h.refs().collect::<Vec<_>>(),
                    model.into_iter().collect::<Vec<_>>());
            }
        }
    }
}
