//! Flushes ahead of need: the device does not keep a commit waiting for what was written seconds
//! before.
//!
//! A flush takes as long as what was written since the last one: a disk's cache, a hypervisor's,
//! the page cache that an image lies in are in no hurry to empty themselves. After a gigabyte
//! written within one commit interval the commit, or whoever calls `fsync` next, would wait for all
//! of it. So the device is flushed whenever [`MOST`] bytes have gathered, by a thread of its own,
//! while whoever writes goes on.
//!
//! Such a flush promises nothing to anybody; what must be durable is still flushed by who needs it.
//! But a failed one is as final as any other ([`larder_volume::Device::flush`]): what it should
//! have covered may be lost, although the next one succeeds, and a superblock would lead to what is
//! not there. So it ends writing, and nobody's flush counts as one that succeeded while one of
//! these is on its way that may have been told of a failure in its place ([`Ground::flush`]).

use crate::transaction::Ground;
use parking_lot::{Condvar, Mutex};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};

/// Bytes that wait for a flush at most, as long as the device keeps up: a twentieth of a second for
/// a disk that writes a gigabyte and more in one. Few enough flushes that it does not matter if one
/// takes ten milliseconds by itself.
pub(crate) const MOST: u64 = 64 << 20;

/// Between those who write and the thread that flushes.
#[derive(Debug, Default)]
pub(crate) struct Flushes {
    /// One is wanted, or on its way: whoever writes needs to look no further.
    wanted: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    go: bool,
    stop: bool,
    /// How many have begun and ended.
    begun: u64,
    ended: u64,
    failed: bool,
}

impl Ground {
    /// Something was written that nobody flushes yet.
    pub(crate) fn flush_ahead(&self) {
        if self.much_unflushed() && !self.flushes.wanted.swap(true, Ordering::AcqRel) {
            self.flushes.state.lock().go = true;
            self.flushes.changed.notify_all();
        }
    }
    fn much_unflushed(&self) -> bool {
        self.volume.unflushed() >= self.options.tuning.flush_ahead.unwrap_or(MOST)
    }
}

impl Flushes {
    /// Ends [`run`].
    pub(crate) fn stop(&self) {
        self.state.lock().stop = true;
        self.changed.notify_all();
    }
    /// Waits for those that have begun. False when one has failed, now or earlier.
    pub(super) fn settle(&self) -> bool {
        let mut state = self.state.lock();
        let begun = state.begun;
        while state.ended < begun {
            self.changed.wait(&mut state);
        }
        !state.failed
    }
    /// Waits until a flush is wanted, which then has begun. False: none will be.
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
}

/// What the thread does.
pub(crate) fn run(ground: &Ground) {
    while ground.flushes.begin() {
        // Somebody may have done it meanwhile; who does it now sees that this one has begun, and
        // waits.
        let flush = || if ground.much_unflushed() { ground.volume.flush() } else { Ok(()) };
        let why = match catch_unwind(AssertUnwindSafe(flush)) {
            Ok(Ok(())) => None,
            Ok(Err(e)) => Some(format!("what was written could not be made durable: {e}")),
            Err(_) => {
                Some("making durable what was written hit a broken invariant; see the log".into())
            }
        };
        if let Some(why) = &why {
            ground.txns.fail(why);
        }
        ground.flushes.end(why.is_some());
        if why.is_some() {
            return;
        }
        // What has come meanwhile may be enough for the next one.
        ground.flush_ahead();
    }
}
