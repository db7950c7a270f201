//! Deleted subvolumes that still take space and wait to be dropped ([`crate::subvolume::drop`]).

use crate::error::{Error, Place, Result};
use crate::lock::{self, Condvar, Mutex, Wait};
use crate::transaction::Ground;
use larder_format::{Generation, TreeId};
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
    waiting: BTreeMap<TreeId, Generation>,
    /// Trees that could not be dropped. They stay for the next mount.
    given_up: Vec<TreeId>,
    stop: bool,
}

impl Drops {
    /// The tree is dead from this transaction on.
    pub(crate) fn add(&self, id: TreeId, since: Generation) {
        self.queue.lock().waiting.insert(id, since);
        self.changed.notify_all();
    }
    /// How many subvolumes are deleted and still take space.
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
    /// if the thread is to end.
    pub(crate) fn next(&self) -> Option<(TreeId, Generation)> {
        let mut queue = self.queue.lock();
        loop {
            if queue.stop {
                return None;
            }
            if let Some((id, since)) = queue.waiting.iter().next() {
                return Some((*id, *since));
            }
            self.changed.wait(&mut queue);
        }
    }
    /// What came of dropping a tree: `Some(true)` if it was dropped, `Some(false)` if the thread is
    /// to end first, `None` if it cannot be dropped.
    pub(crate) fn done(&self, id: TreeId, dropped: Option<bool>) {
        let mut queue = self.queue.lock();
        if dropped != Some(false) {
            queue.waiting.remove(&id);
        }
        if dropped.is_none() {
            queue.given_up.push(id);
        }
        self.changed.notify_all();
    }
    /// Waits until there is nothing left to drop.
    ///
    /// # Errors
    /// `ReadOnly` when writing has ended; `Corrupt` when some tree cannot be dropped.
    pub(crate) fn wait(&self, ground: &Ground) -> Result<()> {
        lock::before_waiting(Wait::Commit);
        let mut queue = self.queue.lock();
        while !queue.waiting.is_empty() && !queue.stop {
            ground.check_writable()?;
            self.changed.wait(&mut queue);
        }
        match queue.given_up.first() {
            None => Ok(()),
            Some(id) => {
                Err(Error::corrupt(Place::tree(*id), "the deleted subvolume cannot be dropped"))
            }
        }
    }
}
