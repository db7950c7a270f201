//! How long trees were locked for editing, what held them, and whether it waited meanwhile.
//!
//! An edit computes under its tree's lock and waits for nothing. So a hold of milliseconds has one
//! of three reasons: it had that much to do, the scheduler took its processor away, or it waited
//! after all, for memory or for a lock. Only the last one is a fault. The kernel counts for each
//! thread how often it gave its processor up by itself, and how often it lost it. What these counts
//! gain during a hold tells the three reasons apart; page faults say whether memory was the cause.
//! A thread that the hypervisor stops looks as if it computed.
//!
//! Reading the counts costs about as much as a small edit. So what a thread read a moment ago
//! ([`FRESH`]) is used again, and the second reading is made for long holds only. A hold is
//! therefore charged with what its thread did since that first reading.
//!
//! [`doing`] names the operation of the calling thread. That costs next to nothing.

use crate::lock::{self, Mutex};
use larder_format::TreeId;
use nix::sys::resource::{UsageWho, getrusage};
use serde::Serialize;
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A hold from here on is long.
const LONG: Duration = Duration::from_millis(1);
/// How long what a thread has read of its counts is used again.
const FRESH: Duration = Duration::from_micros(20);

thread_local! {
    static DOING: Cell<&'static str> = const { Cell::new("other") };
    static LATEST: Cell<Option<(Instant, Counts)>> = const { Cell::new(None) };
}

/// Names what the calling thread does, until the guard is dropped. The innermost name counts.
pub(crate) fn doing(what: &'static str) -> Doing {
    Doing(DOING.replace(what))
}

/// See [`doing`].
#[derive(Debug)]
pub(crate) struct Doing(&'static str);

impl Drop for Doing {
    fn drop(&mut self) {
        DOING.set(self.0);
    }
}

/// What the kernel has counted for a thread.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Counts {
    waits: u64,
    preemptions: u64,
    faults: u64,
}

impl Counts {
    fn read() -> Self {
        // The call cannot fail. If a sandbox forbids it, nothing is known.
        let Ok(usage) = getrusage(UsageWho::RUSAGE_THREAD) else { return Self::default() };
        Self {
            waits: usage.voluntary_context_switches().cast_unsigned(),
            preemptions: usage.involuntary_context_switches().cast_unsigned(),
            faults: (usage.minor_page_faults() + usage.major_page_faults()).cast_unsigned(),
        }
    }
    fn since(&self, before: &Self) -> Self {
        Self {
            waits: self.waits.saturating_sub(before.waits),
            preemptions: self.preemptions.saturating_sub(before.preemptions),
            faults: self.faults.saturating_sub(before.faults),
        }
    }
}

/// One hold of a tree's lock.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Hold {
    /// How long it lasted.
    pub us: u64,
    /// What held it: the operation, or the thread's task.
    pub by: &'static str,
    /// The tree's number.
    pub tree: u64,
    /// How often the thread gave its processor up by itself: it waited.
    pub waits: u64,
    /// How often it lost its processor to another thread.
    pub preemptions: u64,
    /// Pages that the kernel had to find for it.
    pub page_faults: u64,
}

/// Long holds, since the file system was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct LongHolds {
    /// Holds of 1 ms and more, and how many of them took 4 and 16 ms and more.
    pub from_1ms: u64,
    /// See `from_1ms`.
    pub from_4ms: u64,
    /// See `from_1ms`.
    pub from_16ms: u64,
    /// Of those from 1 ms on: how many waited, and how many did not, but lost their processor.
    pub waited: u64,
    /// See `waited`.
    pub preempted: u64,
    /// The longest of all, also if it took less than 1 ms.
    pub longest: Hold,
    /// The longest of those that waited.
    pub longest_waited: Hold,
}

/// Counts holds of all trees together.
#[derive(Debug, Default)]
pub(crate) struct Holds {
    total_ns: AtomicU64,
    longest_ns: AtomicU64,
    long: Mutex<LongHolds, lock::LongHolds>,
}

/// A hold that has begun.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Begun {
    at: Instant,
    before: Counts,
}

fn nanos(d: Duration) -> u64 {
    u64::try_from(d.as_nanos()).unwrap_or(u64::MAX)
}

/// The calling thread has waited for a tree's lock. No hold is charged with that wait.
pub(crate) fn waited() {
    LATEST.set(None);
}

/// The calling thread has got the lock of a tree.
pub(crate) fn begin() -> Begun {
    let mut at = Instant::now();
    let before = match LATEST.get() {
        Some((then, counts)) if at.duration_since(then) < FRESH => counts,
        _ => {
            let counts = Counts::read();
            at = Instant::now();
            LATEST.set(Some((at, counts)));
            counts
        }
    };
    Begun { at, before }
}

/// A hold that ends. It is made before the lock is given back, because a thread that wakes up for
/// the lock may get the processor at once.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Over {
    took: Duration,
    /// By how much the thread's counts have grown. They are read for long holds only.
    grown: Option<Counts>,
}

impl Holds {
    /// The lock is about to be given back. [`Holds::note`] follows when it has been.
    pub(crate) fn over(&self, begun: &Begun) -> Over {
        let took = begun.at.elapsed();
        let interesting = took >= LONG || nanos(took) > self.longest_ns.load(Ordering::Relaxed);
        Over { took, grown: interesting.then(|| Counts::read().since(&begun.before)) }
    }
    /// Counts a hold. The caller has given the lock back.
    pub(crate) fn note(&self, tree: TreeId, over: &Over) {
        self.total_ns.fetch_add(nanos(over.took), Ordering::Relaxed);
        if let Some(grown) = &over.grown {
            self.note_long(over.took, tree, grown);
        }
    }
    #[cold]
    fn note_long(&self, took: Duration, tree: TreeId, grown: &Counts) {
        self.longest_ns.fetch_max(nanos(took), Ordering::Relaxed);
        let hold = Hold {
            us: nanos(took) / 1000,
            by: DOING.get(),
            tree: tree.0,
            waits: grown.waits,
            preemptions: grown.preemptions,
            page_faults: grown.faults,
        };
        let mut long = self.long.lock();
        if hold.us > long.longest.us {
            long.longest = hold;
        }
        if took < LONG {
            return;
        }
        long.from_1ms += 1;
        long.from_4ms += u64::from(took >= 4 * LONG);
        long.from_16ms += u64::from(took >= 16 * LONG);
        if hold.waits > 0 {
            long.waited += 1;
            if hold.us > long.longest_waited.us {
                long.longest_waited = hold;
            }
        } else if hold.preemptions > 0 {
            long.preempted += 1;
        }
    }
    /// Length of all holds together, in microseconds.
    pub(crate) fn total_us(&self) -> u64 {
        self.total_ns.load(Ordering::Relaxed) / 1000
    }
    /// The long ones.
    pub(crate) fn long(&self) -> LongHolds {
        *self.long.lock()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_format::ObjectId;

    /// A hold that lasts until `f` has run and 1 ms is over, whatever that takes.
    fn hold(holds: &Holds, f: impl FnOnce()) {
        let begun = begin();
        f();
        while begun.at.elapsed() < LONG {
            std::hint::spin_loop();
        }
        holds.note(ObjectId::FS_TREE, &holds.over(&begun));
    }

    #[test]
    fn the_longest_says_what_it_was() {
        let holds = Holds::default();
        assert_eq!(holds.long(), LongHolds::default());
        {
            let _outer = doing("outer");
            drop(doing("inner"));
            let begun = begin();
            holds.note(ObjectId::FS_TREE, &holds.over(&begun));
            let long = holds.long();
            // The hold may have taken less than a microsecond, which counts as zero.
            assert!(long.longest.us == 0 || long.longest.by == "outer", "{long:?}");
            hold(&holds, || ());
        }
        let long = holds.long();
        assert_eq!((long.longest.by, long.longest.tree), ("outer", ObjectId::FS_TREE.0));
        assert!(long.from_1ms >= 1 && long.longest.us >= 1000, "{long:?}");
        assert!(long.waited + long.preempted <= long.from_1ms, "{long:?}");
        assert!(holds.total_us() >= long.longest.us);
        assert_eq!(DOING.get(), "other");
    }

    #[test]
    fn who_waits_is_told_from_who_computes() {
        let holds = Holds::default();
        {
            let _doing = doing("waiting");
            hold(&holds, || std::thread::sleep(LONG));
        }
        let long = holds.long();
        assert_eq!((long.from_1ms, long.waited, long.preempted), (1, 1, 0));
        assert_eq!(long.longest_waited, long.longest);
        assert_eq!(long.longest_waited.by, "waiting");
        // A thread that computes may be preempted, but it does not wait.
        hold(&holds, || ());
        assert_eq!(holds.long().waited, 1);
    }

    #[test]
    fn counts_are_read_again_only_after_a_moment() {
        let first = begin();
        let (read, _) = LATEST.get().expect("just read");
        LATEST
            .set(Some((read + Duration::from_secs(1), Counts { waits: u64::MAX, ..first.before })));
        assert_eq!(begin().before.waits, u64::MAX, "what was read is used");
        let long_ago = read.checked_sub(FRESH).expect("the machine runs for longer");
        LATEST.set(Some((long_ago, Counts { waits: u64::MAX, ..first.before })));
        assert_ne!(begin().before.waits, u64::MAX);
    }
}
