//! The front ends of one engine, and what each of them holds.
//!
//! A file system is opened once and may be shown in several places. Each mount of an image is a
//! front end of its own, with its own root and its own holds on inodes; a
//! [`Filesystem`](crate::Filesystem) is such a front end. This module hides how they are told
//! apart. The engine below knows one set of inodes, and asks only three things:
//!
//! - Is an inode held by *any* front end? Then it survives its last name.
//! - Is it held by *another* front end ([`Filesystem::is_known_elsewhere`])? Then that one may have
//!   to learn of a change.
//! - Is a subvolume the root of *any* front end? Then it cannot be deleted.
//!
//! A front end may end without giving its holds back one by one: a kernel sends no FORGET at the
//! end of a mount. It then gives them all back at once ([`Filesystem::leave`]). What only this
//! front end kept is deleted, and the others go on. Numbers of front ends are used again. An inode
//! table has one map of holds for each number, so a single front end pays for one map.
//!
//! [`Filesystem::is_known_elsewhere`]: crate::Filesystem::is_known_elsewhere
//! [`Filesystem::leave`]: crate::Filesystem::leave

use crate::api::InodeId;
use crate::hash::NumberMap;
use crate::lock::{self, RwLock};
use larder_format::{ObjectId, TreeId};

/// Number of a front end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FrontId(usize);

/// The front ends that there are.
#[derive(Debug, Default)]
pub(crate) struct Fronts(RwLock<Vec<Option<InodeId>>, lock::Fronts>);

impl Fronts {
    /// Adds a front end, which sees what is below this directory.
    pub(crate) fn join(&self, root: InodeId) -> FrontId {
        let mut all = self.0.write();
        let free = all.iter().position(Option::is_none).unwrap_or(all.len());
        if free == all.len() {
            all.push(None);
        }
        all[free] = Some(root);
        FrontId(free)
    }
    /// Removes a front end, which holds nothing any more. Returns false if it has left already.
    pub(crate) fn leave(&self, front: FrontId) -> bool {
        self.0.write()[front.0].take().is_some()
    }
    /// Is this front end still there?
    pub(crate) fn is_here(&self, front: FrontId) -> bool {
        self.0.read()[front.0].is_some()
    }
    /// Is this subvolume the root of any front end?
    pub(crate) fn is_root(&self, subvol: TreeId) -> bool {
        self.0.read().iter().flatten().any(|root| root.subvol == subvol)
    }
    /// Is this directory the root of another front end?
    pub(crate) fn is_root_elsewhere(&self, front: FrontId, id: InodeId) -> bool {
        self.0.read().iter().enumerate().any(|(n, root)| n != front.0 && *root == Some(id))
    }
}

/// How often each front end holds each inode of a subvolume.
#[derive(Debug, Default)]
pub(crate) struct Holds(Vec<NumberMap<ObjectId, u64>>);

impl Holds {
    /// Adds one hold.
    pub(crate) fn add(&mut self, front: FrontId, ino: ObjectId) {
        if self.0.len() <= front.0 {
            self.0.resize_with(front.0 + 1, NumberMap::default);
        }
        *self.0[front.0].entry(ino).or_default() += 1;
    }
    /// Takes `n` holds back. Returns true if the inode was held, and no front end holds it any
    /// more.
    pub(crate) fn give_back(&mut self, front: FrontId, ino: ObjectId, n: u64) -> bool {
        let Some(map) = self.0.get_mut(front.0) else { return false };
        let Some(count) = map.get_mut(&ino) else { return false };
        *count = count.saturating_sub(n);
        if *count > 0 {
            return false;
        }
        map.remove(&ino);
        !self.has(ino)
    }
    /// Does any front end hold it?
    pub(crate) fn has(&self, ino: ObjectId) -> bool {
        self.0.iter().any(|map| map.contains_key(&ino))
    }
    /// Does this front end hold it?
    pub(crate) fn has_of(&self, front: FrontId, ino: ObjectId) -> bool {
        self.0.get(front.0).is_some_and(|map| map.contains_key(&ino))
    }
    /// Does another front end hold it?
    pub(crate) fn has_elsewhere(&self, front: FrontId, ino: ObjectId) -> bool {
        self.0.iter().enumerate().any(|(n, map)| n != front.0 && map.contains_key(&ino))
    }
    /// Up to `most` inodes that this front end holds.
    pub(crate) fn of(&self, front: FrontId, most: usize) -> Vec<ObjectId> {
        self.0.get(front.0).map_or_else(Vec::new, |map| map.keys().take(most).copied().collect())
    }
    /// Takes all holds of this front end back.
    pub(crate) fn end(&mut self, front: FrontId) {
        if let Some(map) = self.0.get_mut(front.0) {
            *map = NumberMap::default();
        }
    }
    /// Takes all holds back.
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(subvol: u64) -> InodeId {
        InodeId { subvol: ObjectId(subvol), ino: 256 }
    }

    #[test]
    fn numbers_are_given_again_and_roots_go_with_them() {
        let fronts = Fronts::default();
        let [a, b] = [id(5), id(256)].map(|root| fronts.join(root));
        assert!(a != b && fronts.is_root(ObjectId(5)) && fronts.is_root(ObjectId(256)));
        assert!(fronts.is_root_elsewhere(a, id(256)) && !fronts.is_root_elsewhere(b, id(256)));
        assert!(fronts.leave(a) && !fronts.leave(a), "once");
        assert!(!fronts.is_root(ObjectId(5)) && !fronts.is_here(a) && fronts.is_here(b));
        assert_eq!(fronts.join(id(257)), a);
    }

    #[test]
    fn each_counts_for_itself_and_the_last_one_is_known() {
        let (a, b) = (FrontId(0), FrontId(2));
        let [seven, eight, nine] = [7, 8, 9].map(ObjectId);
        let mut holds = Holds::default();
        holds.add(a, seven);
        assert!(holds.has(seven) && holds.has_elsewhere(b, seven));
        assert!(!holds.has_elsewhere(a, seven));
        holds.add(b, seven);
        holds.add(b, seven);
        assert!(!holds.give_back(b, seven, 1) && !holds.give_back(a, seven, 1));
        assert!(!holds.has_of(a, seven) && holds.has_of(b, seven));
        assert!(!holds.give_back(a, seven, 1), "it had none");
        assert!(holds.give_back(b, seven, 9), "the last one");
        assert!(!holds.give_back(b, seven, 1) && !holds.has(seven));
        [eight, nine].into_iter().for_each(|ino| holds.add(b, ino));
        holds.add(a, eight);
        holds.end(b);
        assert_eq!((holds.of(a, 9), holds.of(b, 9)), (vec![eight], vec![]));
    }
}
