//! Early flushes: a commit does not have to wait for what was written seconds before.
//!
//! A flush takes as long as writing what has gathered since the last one. A disk's cache, a
//! hypervisor's, and the page cache that an image lies in are in no hurry to empty themselves.
//! After a gigabyte written within one commit interval, the commit or the next caller of `fsync`
//! would wait for all of it. So the device is flushed whenever [`MOST`] bytes have gathered, by a
//! thread of its own, while writers go on.
//!
//! An early flush promises nothing. What must be durable is still flushed by the thread that needs
//! it. But a failed early flush is as final as any other ([`larder_volume::Device::flush`]). What
//! it should have covered may be lost although the next flush succeeds, and a superblock would then
//! lead to what is not there. So a failed one ends writing. The device may also report a failure to
//! the early flush alone. So another flush counts as successful only when the early flushes that
//! were under way have ended well ([`crate::transaction::Ground::flush`]).

use crate::lock::{self, Condvar, Mutex};
use larder_volume::Volume;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Bytes that wait for a flush at most, as long as the device keeps up. A disk that writes a
/// gigabyte or more in a second needs a twentieth of a second for them. Flushes are rare enough
/// with this that it does not matter if one takes ten milliseconds by itself.
pub(crate) const MOST: u64 = 64 << 20;

/// What writers share with the thread that flushes.
#[derive(Debug)]
pub(crate) struct Flushes {
    volume: Arc<Volume>,
    /// Bytes that wait for a flush at most.
    most: u64,
    /// An early flush is wanted or under way: a writer needs to look no further.
    wanted: AtomicBool,
    state: Mutex<FlushState, lock::EarlyFlush>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct FlushState {
    go: bool,
    stop: bool,
    /// How many early flushes have begun and ended.
    begun: u64,
    ended: u64,
    failed: bool,
}

impl Flushes {
    /// Flushes whenever `most` bytes have gathered; `None` stands for [`MOST`].
    pub(crate) fn new(volume: Arc<Volume>, most: Option<u64>) -> Self {
        Self {
            volume,
            most: most.unwrap_or(MOST),
            wanted: AtomicBool::new(false),
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }
    /// Something was written that no flush covers yet.
    pub(crate) fn written(&self) {
        if self.much_unflushed() && !self.wanted.swap(true, Ordering::AcqRel) {
            self.state.lock().go = true;
            self.changed.notify_all();
        }
    }
    fn much_unflushed(&self) -> bool {
        self.volume.unflushed() >= self.most
    }
    /// Ends [`Self::run`].
    pub(crate) fn stop(&self) {
        self.state.lock().stop = true;
        self.changed.notify_all();
    }
    /// Waits for the early flushes that have begun. Returns false if one has failed, now or
    /// earlier.
    pub(super) fn settle(&self) -> bool {
        let mut state = self.state.lock();
        let begun = state.begun;
        while state.ended < begun {
            self.changed.wait_for_device(&mut state);
        }
        !state.failed
    }
    /// Waits until a flush is wanted, and begins it. False means that none will be wanted.
    fn begin(&self) -> bool {
        let mut state = self.state.lock();
        while !state.go && !state.stop {
            self.changed.wait(&mut state);
        }
        if state.stop {
            return false;
        }
        state.go = false;
        state.begun += 1;
        true
    }
    fn end(&self, failed: bool) {
        let mut state = self.state.lock();
        state.ended += 1;
        state.failed |= failed;
        drop(state);
        self.changed.notify_all();
        self.wanted.store(false, Ordering::Release);
    }

    /// Body of the thread that flushes early. A flush that fails ends writing: `fail` is called
    /// with the reason, once.
    pub(crate) fn run(&self, fail: impl FnOnce(&str)) {
        while self.begin() {
            // Another thread may have flushed meanwhile. A thread that flushes from now on sees
            // that this flush has begun, and waits for it.
            let flush = || if self.much_unflushed() { self.volume.flush() } else { Ok(()) };
            let why = match catch_unwind(AssertUnwindSafe(flush)) {
                Ok(Ok(())) => None,
                Ok(Err(e)) => Some(format!("what was written could not be made durable: {e}")),
                Err(_) => Some(
                    "making durable what was written hit a broken invariant; see the log".into(),
                ),
            };
            if let Some(why) = why {
                fail(&why);
                self.end(true);
                return;
            }
            self.end(false);
            // What was written meanwhile may be enough for the next flush.
            self.written();
        }
    }
}
