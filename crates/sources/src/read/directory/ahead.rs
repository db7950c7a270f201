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
use rustix::fs::RawDir;
use std::collections::{BTreeMap, HashMap};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Memory for sorting the names of one directory.
const NAMES: usize = 1 << 20;
/// A directory with more names is not looked through ahead of the walk.
const MOST_NAMES: usize = 4096;
/// Bytes of names that are read at once.
const BUFFER: usize = 32 << 10;
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
    /// There is something to list, or the walk has ended.
    work: Condvar,
    /// What the walk waits for was listed, or a thread has ended.
    listed: Condvar,
}

#[derive(Default)]
struct State {
    /// Directories that wait, and the directories that they are in.
    waiting: BTreeMap<TreePath, Arc<OwnedFd>>,
    /// Directories that threads have taken. `None`: it is being listed.
    taken: HashMap<TreePath, Option<Result<Listing>>>,
    /// Memory of the listings that the walk has not come to.
    cost: usize,
    /// Threads that have nothing to do.
    idle: usize,
    /// What the walk waits for.
    awaited: Option<TreePath>,
    ended: bool,
}

/// Runs `walk` with threads that list ahead of it.
pub(super) fn with<T>(
    looker: &Looker<'_>,
    options: &Options,
    walk: impl FnOnce(&Ahead<'_>) -> T,
) -> T {
    let (state, work, listed) = (Mutex::default(), Condvar::new(), Condvar::new());
    let ahead = Ahead { looker, options, state, work, listed };
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
        self.0.work.notify_all();
        self.0.listed.notify_all();
    }
}

impl Ahead<'_> {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A thread that panics ends the others by `End`.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes threads for what waits. Waking is costly, so no more are woken than can go on.
    fn wake(&self, state: &State) {
        if state.cost < self.most() {
            for _ in 0..state.idle.min(state.waiting.len()) {
                self.work.notify_one();
            }
        }
    }

    /// The most that listings ahead of the walk may cost.
    fn most(&self) -> usize {
        self.options.memory / SHARE
    }

    /// The listing of a directory that is in `parent`.
    pub(super) fn take(&self, parent: &OwnedFd, path: &TreePath) -> Result<Listing> {
        let mut state = self.lock();
        while let Some(None) = state.taken.get(path) {
            assert!(!state.ended, "a thread that lists directories has panicked");
            state.awaited = Some(path.clone());
            state = self.listed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.awaited = None;
        if let Some(listing) = state.taken.remove(path).flatten() {
            if let Ok(listing) = &listing {
                state.cost -= listing.cost;
                self.wake(&state);
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
            let next = match state.cost < self.most() {
                true => state.waiting.pop_first(),
                false => None,
            };
            let Some((path, parent)) = next else {
                state.idle += 1;
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.idle -= 1;
                continue;
            };
            state.taken.insert(path.clone(), None);
            drop(state);
            let listing = self.looker.open(&parent, &path).and_then(|fd| self.list(fd, &path));
            state = self.lock();
            if let Ok(listing) = &listing {
                state.cost += listing.cost;
            }
            if state.awaited.as_ref() == Some(&path) {
                self.listed.notify_one();
            }
            state.taken.insert(path, Some(listing));
        }
    }

    /// Lists a directory. The directories in it wait from then on.
    pub(super) fn list(&self, fd: OwnedFd, path: &TreePath) -> Result<Listing> {
        match self.names(&fd, path)? {
            Unsorted::Few(mut names) => {
                names.sort_unstable();
                Ok(self.look_through(Arc::new(fd), path, names))
            }
            Unsorted::Many(sorter) => {
                let names = Names::Many(sorter.finish()?.records()?);
                Ok(Listing { fd: Arc::new(fd), names, cost: NAMES })
            }
        }
    }

    /// The names of a directory as they come.
    fn names(&self, fd: &OwnedFd, path: &TreePath) -> Result<Unsorted> {
        let mut names = Unsorted::Few(Vec::new());
        let mut buffer = [MaybeUninit::uninit(); BUFFER];
        let mut list = RawDir::new(fd, &mut buffer);
        while let Some(entry) = list.next() {
            let entry = entry.map_err(|e| self.looker.io(path)(e.into()))?;
            let name = entry.file_name().to_bytes();
            if !matches!(name, b"." | b"..") {
                names.push(name, self.options)?;
            }
        }
        Ok(names)
    }

    fn look_through(&self, fd: Arc<OwnedFd>, dir: &TreePath, names: Vec<Vec<u8>>) -> Listing {
        let mut seen = Vec::with_capacity(names.len());
        let (mut below, mut cost) = (Vec::new(), OPEN);
        for name in names {
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
            self.wake(&state);
        }
        Listing { fd, names: Names::Seen(seen.into_iter()), cost }
    }
}

/// The names of a directory in any order.
enum Unsorted {
    Few(Vec<Vec<u8>>),
    Many(Sorter),
}

impl Unsorted {
    fn push(&mut self, name: &[u8], options: &Options) -> Result<()> {
        match self {
            Self::Few(names) if names.len() < MOST_NAMES => names.push(name.to_vec()),
            Self::Few(names) => {
                let mut sorter = Sorter::new(NAMES, &options.temporary);
                names.iter().try_for_each(|name| sorter.push(name, b""))?;
                sorter.push(name, b"")?;
                *self = Self::Many(sorter);
            }
            Self::Many(sorter) => sorter.push(name, b"")?,
        }
        Ok(())
    }
}
