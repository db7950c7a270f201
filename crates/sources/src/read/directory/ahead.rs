//! Threads that list directories before the walk comes to them.
//!
//! Reading the names and attributes of a source takes longer than all that is done with them, and
//! on a disk most of it is waiting. So each directory that is found waits in the order of paths,
//! and threads take the first. The walk takes each listing when it comes to it. What no thread has
//! begun then, the walk lists itself, so it never waits for a thread that has nothing to do.
//!
//! Errors are kept in the listings, and the walk meets them in the order of paths. So neither the
//! number of threads nor their speed shows in what is read. Listings that wait are bounded by what
//! they take in memory. The names of a very large directory are sorted on disk, and what is behind
//! them is looked at by the walk, one by one.

use super::look::{Looker, Seen};
use crate::spill::{Records, Sorter};
use crate::{Error, Options, Result, TreePath};
use rustix::fs::Dir;
use std::collections::{BTreeMap, HashMap};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Memory for sorting the names of one directory.
const NAMES: usize = 1 << 20;
/// A directory with more names is not looked through ahead of the walk.
const MOST_NAMES: u64 = 4096;
/// What a name costs in memory beside its bytes, about.
const OVERHEAD: usize = 300;
/// What a directory costs beside its names. So few are open at once.
const OPEN: usize = 64 << 10;
/// The part of the memory for sorting that listings ahead of the walk may take.
const SHARE: usize = 8;
/// Threads beside the walk: enough that a disk has something to choose from.
const THREADS: usize = 4;

/// The names of a directory.
#[derive(Debug)]
pub(super) struct Listing {
    pub(super) fd: Arc<OwnedFd>,
    pub(super) names: Names,
    /// Memory that it takes, about.
    cost: usize,
}

/// Names in their order, with what is behind them where that was looked at.
#[derive(Debug)]
pub(super) enum Names {
    Seen(std::vec::IntoIter<(Vec<u8>, Result<Seen>)>),
    Many(Records),
}

impl Iterator for Names {
    type Item = Result<(Vec<u8>, Option<Result<Seen>>)>;

    fn next(&mut self) -> Option<Self::Item> {
        match self {
            Self::Seen(names) => names.next().map(|(name, seen)| Ok((name, Some(seen)))),
            Self::Many(records) => {
                records.next().map(|record| Ok((record.map_err(Error::from)?.0, None)))
            }
        }
    }
}

/// Listings ahead of the walk.
pub(super) struct Ahead<'a> {
    looker: &'a Looker<'a>,
    options: &'a Options,
    state: Mutex<State>,
    /// There is something to list, something was listed, or the walk has ended.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Directories that wait, and the directories that they are in.
    waiting: BTreeMap<TreePath, Arc<OwnedFd>>,
    /// Directories that threads have taken. `None`: it is being listed.
    taken: HashMap<TreePath, Option<Result<Listing>>>,
    /// Memory of the listings that the walk has not come to.
    cost: usize,
    ended: bool,
}

/// Runs `walk` with threads that list ahead of it.
pub(super) fn with<T>(
    looker: &Looker<'_>,
    options: &Options,
    walk: impl FnOnce(&Ahead<'_>) -> T,
) -> T {
    let (state, changed) = (Mutex::default(), Condvar::new());
    let ahead = Ahead { looker, options, state, changed };
    std::thread::scope(|scope| {
        let _end = End(&ahead);
        for _ in 0..THREADS {
            // Without threads the walk lists everything itself.
            if std::thread::Builder::new().spawn_scoped(scope, || ahead.help()).is_err() {
                break;
            }
        }
        walk(&ahead)
    })
}

/// Ends the threads when the walk ends, and the walk when a thread does.
struct End<'a>(&'a Ahead<'a>);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.lock().ended = true;
        self.0.changed.notify_all();
    }
}

impl Ahead<'_> {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A thread that panics ends the others by `End`.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// The listing of a directory that is in `parent`.
    pub(super) fn take(&self, parent: &OwnedFd, path: &TreePath) -> Result<Listing> {
        let mut state = self.lock();
        while let Some(None) = state.taken.get(path) {
            assert!(!state.ended, "a thread that lists directories has panicked");
            state = self.wait(state);
        }
        if let Some(listing) = state.taken.remove(path).flatten() {
            if let Ok(listing) = &listing {
                state.cost -= listing.cost;
                self.changed.notify_all();
            }
            return listing;
        }
        state.waiting.remove(path);
        drop(state);
        self.list(self.looker.open(parent, path)?, path)
    }

    /// Lists directories until the walk ends.
    fn help(&self) {
        let _end = End(self);
        let mut state = self.lock();
        while !state.ended {
            let next = match state.cost < self.options.memory / SHARE {
                true => state.waiting.pop_first(),
                false => None,
            };
            let Some((path, parent)) = next else {
                state = self.wait(state);
                continue;
            };
            state.taken.insert(path.clone(), None);
            drop(state);
            let listing = self.looker.open(&parent, &path).and_then(|fd| self.list(fd, &path));
            state = self.lock();
            if let Ok(listing) = &listing {
                state.cost += listing.cost;
            }
            state.taken.insert(path, Some(listing));
            self.changed.notify_all();
        }
    }

    /// Lists a directory. The directories in it wait from then on.
    pub(super) fn list(&self, fd: OwnedFd, path: &TreePath) -> Result<Listing> {
        let mut sorter = Sorter::new(NAMES, &self.options.temporary);
        let list = Dir::read_from(&fd).map_err(|e| self.looker.io(path)(e.into()))?;
        for entry in list {
            let entry = entry.map_err(|e| self.looker.io(path)(e.into()))?;
            let name = entry.file_name().to_bytes();
            if !matches!(name, b"." | b"..") {
                sorter.push(name, b"")?;
            }
        }
        let sorted = sorter.finish()?;
        let (fd, names) = (Arc::new(fd), sorted.records()?);
        if sorted.count() > MOST_NAMES {
            return Ok(Listing { fd, names: Names::Many(names), cost: NAMES });
        }
        self.look_through(fd, path, names)
    }

    fn look_through(&self, fd: Arc<OwnedFd>, dir: &TreePath, names: Records) -> Result<Listing> {
        let (mut seen, mut below, mut cost) = (Vec::new(), Vec::new(), OPEN);
        for record in names {
            let (name, _) = record?;
            let mut path = dir.clone();
            path.push(&name);
            let found = self.looker.look(&fd, &path);
            cost += OVERHEAD + name.len() + found.as_ref().map_or(0, Seen::cost);
            if found.as_ref().is_ok_and(Seen::leads_on) {
                below.push(path);
            }
            seen.push((name, found));
        }
        if !below.is_empty() {
            let mut state = self.lock();
            state.waiting.extend(below.into_iter().map(|path| (path, Arc::clone(&fd))));
            drop(state);
            self.changed.notify_all();
        }
        Ok(Listing { fd, names: Names::Seen(seen.into_iter()), cost })
    }
}
