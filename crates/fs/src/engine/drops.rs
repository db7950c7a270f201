//! Trees that nothing needs any more and that wait to be dropped ([`crate::subvolume::drop`]):
//! deleted subvolumes, and what Linux has left of a relocation.

use crate::error::{Error, Place, Result};
use crate::lock::{self, Condvar, Mutex, Wait};
use crate::transaction::{DeadTree, Ground};
use larder_format::Generation;
use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;

/// The trees that wait to be dropped, each with the transaction since which it is dead.
#[derive(Debug, Default)]
pub(crate) struct Drops {
    queue: Mutex<Queue, lock::Drops>,
    changed: Condvar,
    /// Blocks let go of since the file system was opened.
    pub(crate) blocks: AtomicU64,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: BTreeMap<DeadTree, Generation>,
    /// Trees that could not be dropped. They stay for the next mount.
    given_up: Vec<DeadTree>,
    stop: bool,
}

impl Drops {
    /// The tree is dead from this transaction on.
    pub(crate) fn add(&self, tree: DeadTree, since: Generation) {
        self.queue.lock().waiting.insert(tree, since);
        self.changed.notify_all();
    }
    /// How many trees are dead and still take space.
    pub(crate) fn len(&self) -> usize {
        let queue = self.queue.lock();
        queue.waiting.len() + queue.given_up.len()
    }
    /// Ends the thread after the step that it is at.
    pub(crate) fn stop(&self) {
        self.queue.lock().stop = true;
        self.changed.notify_all();
    }
    /// Is the thread to end?
    pub(crate) fn stopped(&self) -> bool {
        self.queue.lock().stop
    }
    /// Waits for a tree to drop. Returns it and the transaction since which it is dead, or `None`
    /// if the thread is to end. The one that is dead for longest comes first: others may wait for
    /// the commit that makes their death durable.
    pub(crate) fn next(&self) -> Option<(DeadTree, Generation)> {
        let mut queue = self.queue.lock();
        loop {
            if queue.stop {
                return None;
            }
            if let Some((tree, since)) = queue.waiting.iter().min_by_key(|(_, since)| **since) {
                return Some((*tree, *since));
            }
            self.changed.wait(&mut queue);
        }
    }
    /// What came of dropping a tree: `Some(true)` if it was dropped, `Some(false)` if the thread is
    /// to end first, `None` if it cannot be dropped.
    pub(crate) fn done(&self, tree: DeadTree, dropped: Option<bool>) {
        let mut queue = self.queue.lock();
        if dropped != Some(false) {
            queue.waiting.remove(&tree);
        }
        if dropped.is_none() {
            queue.given_up.push(tree);
        }
        self.changed.notify_all();
    }
    /// Waits until nothing is left to drop that was dead with the transaction `until`, which is
    /// published or has been asked for.
    ///
    /// # Errors
    /// `ReadOnly` when writing has ended; `Corrupt` when some tree cannot be dropped.
    pub(crate) fn wait(&self, ground: &Ground, until: Generation) -> Result<()> {
        lock::before_waiting(Wait::Commit);
        let mut queue = self.queue.lock();
        while queue.waiting.values().any(|since| *since <= until) && !queue.stop {
            ground.check_writable()?;
            self.changed.wait(&mut queue);
        }
        match queue.given_up.first() {
            None => Ok(()),
            Some(tree) => {
                Err(Error::corrupt(Place::tree(tree.id()), format!("the {tree} cannot be dropped")))
            }
        }
    }
}
