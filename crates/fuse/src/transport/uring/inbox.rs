//! What other threads leave for a mount's queue, and how they wake its thread.

use super::super::Permits;
use super::super::drain::{Drain, FenceSender, Participants, Then};
use super::super::memory::RingEntry;
use parking_lot::Mutex;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Wakes the thread that listens to this.
pub(super) fn wake(event: &OwnedFd) {
    // The only error is a full counter: then the thread is being woken already.
    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
}

/// What other threads leave for a mount's queue: entries that workers have finished, to be
/// committed, and news about drains.
pub(super) struct QueueInbox {
    entries: Mutex<Vec<RingEntry>>,
    news: Mutex<DrainNews>,
    /// Wakes the queue's thread, which looks here then.
    event: Arc<OwnedFd>,
    /// Bounds the entries that wait for the kernel; it needs others meanwhile.
    pub(super) kernel_waits: Permits,
    /// Bounds the entries that a drain holds back; its fences come through the others.
    pub(super) held_back: Permits,
}

#[derive(Default)]
pub(super) struct DrainNews {
    pub(super) begun: Vec<Arc<Drain>>,
    /// Numbers of drains whose fence came out of another queue, because the sender was not on this
    /// CPU.
    pub(super) fences: Vec<u32>,
    /// Numbers of drains whose fence could not be sent, because the kernel has no files or the
    /// mount is gone.
    pub(super) needless: Vec<u32>,
    /// The queue has ended.
    over: bool,
}

impl std::fmt::Debug for QueueInbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("QueueInbox").finish_non_exhaustive()
    }
}

impl QueueInbox {
    /// For a queue of `large` entries that keep their memory, and `most` in all.
    pub(super) fn new(event: Arc<OwnedFd>, large: usize, most: usize) -> Self {
        let (kernel_waits, held_back) = (Permits::new(large / 2), Permits::new((most / 4).max(1)));
        Self { entries: Mutex::default(), news: Mutex::default(), event, kernel_waits, held_back }
    }
    fn wake(&self) {
        wake(&self.event);
    }
    pub(super) fn give(&self, entry: RingEntry) {
        let mut entries = self.entries.lock();
        entries.push(entry);
        if entries.len() == 1 {
            self.wake();
        }
    }
    pub(super) fn take(&self) -> Vec<RingEntry> {
        std::mem::take(&mut self.entries.lock())
    }
    pub(super) fn take_news(&self) -> DrainNews {
        std::mem::take(&mut *self.news.lock())
    }
    /// The queue has ended. Returns the drains that it has not taken part in yet.
    pub(super) fn end(&self) -> Vec<Arc<Drain>> {
        std::mem::replace(&mut *self.news.lock(), DrainNews { over: true, ..DrainNews::default() })
            .begun
    }
    /// Makes the queue take part in a drain.
    fn drain(&self, drain: &Arc<Drain>) {
        let mut news = self.news.lock();
        if news.over {
            drop(news);
            return drain.queue_done();
        }
        news.begun.push(Arc::clone(drain));
        drop(news);
        self.wake();
    }
    pub(super) fn needs_no_fence(&self, drain: u32) {
        self.news.lock().needless.push(drain);
        self.wake();
    }
    pub(super) fn fence_came_out(&self, drain: u32) {
        self.news.lock().fences.push(drain);
        self.wake();
    }
}

/// The inboxes of all queues of a mount, and the sender of their fences.
#[derive(Debug)]
pub(super) struct MountInboxes {
    pub(super) queues: Vec<Arc<QueueInbox>>,
    pub(super) fences: FenceSender,
}

impl Participants for MountInboxes {
    fn drain(self: Arc<Self>, before: u64, then: Then) {
        let drain = Arc::new(Drain::new(before, self.queues.len(), then));
        self.queues.iter().for_each(|queue| queue.drain(&drain));
    }
    fn finish(&self) {
        self.fences.finish();
    }
}
