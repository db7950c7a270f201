//! What other threads have for a mount's queue, and how its thread is woken to look.

use super::super::Loans;
use super::super::drain::Drain;
use super::super::memory::Entry;
use parking_lot::Mutex;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Wakes the thread that listens to this.
pub(super) fn wake(event: &OwnedFd) {
    // A full counter (the only error) means that the wake-up is already on its way.
    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
}

/// What other threads have for a mount's queue: entries that workers have finished, to be
/// committed, and news of drains.
pub(in super::super) struct Returned {
    entries: Mutex<Vec<Entry>>,
    news: Mutex<News>,
    /// Of the thread, which looks here when it is woken.
    event: Arc<OwnedFd>,
    /// Entries that may be away until the kernel has got something through the others.
    pub(super) loans: Loans,
    /// Entries that may be held back by a drain, whose marks come through the others.
    pub(super) held_back: Loans,
}

#[derive(Default)]
pub(super) struct News {
    pub(super) begun: Vec<Arc<Drain>>,
    /// Numbers of drains whose mark came out of another queue, because that queue's thread was not
    /// on its CPU.
    pub(super) marks: Vec<u32>,
    /// Numbers of drains whose mark could not be put in, because the kernel has no files or the
    /// mount is gone.
    pub(super) needless: Vec<u32>,
    /// The queue has ended.
    over: bool,
}

impl std::fmt::Debug for Returned {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Returned").finish_non_exhaustive()
    }
}

impl Returned {
    /// For a queue of so many entries that keep their memory, and at most so many in all.
    pub(super) fn new(event: Arc<OwnedFd>, large: usize, most: usize) -> Self {
        let (loans, held_back) = (Loans::new(large / 2), Loans::new((most / 4).max(1)));
        Self { entries: Mutex::default(), news: Mutex::default(), event, loans, held_back }
    }
    fn wake(&self) {
        wake(&self.event);
    }
    pub(super) fn give(&self, entry: Entry) {
        let mut entries = self.entries.lock();
        entries.push(entry);
        if entries.len() == 1 {
            self.wake();
        }
    }
    pub(super) fn take(&self) -> Vec<Entry> {
        std::mem::take(&mut self.entries.lock())
    }
    pub(super) fn take_news(&self) -> News {
        std::mem::take(&mut *self.news.lock())
    }
    /// The queue has ended. Returns the drains that it has not heard of.
    pub(super) fn end(&self) -> Vec<Arc<Drain>> {
        std::mem::replace(&mut *self.news.lock(), News { over: true, ..News::default() }).begun
    }
    /// Has the queue take part in a drain.
    pub(in super::super) fn drain(&self, drain: &Arc<Drain>) {
        let mut news = self.news.lock();
        if news.over {
            drop(news);
            return drain.through();
        }
        news.begun.push(Arc::clone(drain));
        drop(news);
        self.wake();
    }
    pub(super) fn needs_no_mark(&self, drain: u32) {
        self.news.lock().needless.push(drain);
        self.wake();
    }
    pub(super) fn mark_came_out(&self, drain: u32) {
        self.news.lock().marks.push(drain);
        self.wake();
    }
}
