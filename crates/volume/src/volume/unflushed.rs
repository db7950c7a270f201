//! What a device has taken since its last flush, by chunk.
//!
//! A device that has failed gets nothing any more while others have the bytes, and is not asked to
//! flush either. But it may have taken bytes before that no other device has: data of profile
//! single, say, when it refuses metadata, of which there is another copy. And it still gets what no
//! other device can take. A flush that leaves it out would promise what nobody has. So each device
//! remembers the chunks of what it has taken, and a failed one is asked as long as one of these
//! cannot do without it.

use larder_format::Logical;
use parking_lot::Mutex;
use smallvec::SmallVec;

/// The chunks of the writes of a device that no flush has covered yet.
#[derive(Debug, Default)]
pub(super) struct Unflushed(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    /// Goes up with each note.
    clock: u64,
    /// Each chunk with the time of its last note. They are few: those that are written at a time.
    chunks: SmallVec<[(Logical, u64); 4]>,
}

/// A flush that begins now covers what was noted until then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Moment(u64);

impl Unflushed {
    /// A write to a chunk has completed. To be called before those who wait for it are told.
    pub(super) fn note(&self, chunk: Logical) {
        let mut inner = self.0.lock();
        inner.clock += 1;
        let now = inner.clock;
        match inner.chunks.iter_mut().find(|(known, _)| *known == chunk) {
            Some((_, at)) => *at = now,
            None => inner.chunks.push((chunk, now)),
        }
    }

    pub(super) fn now(&self) -> Moment {
        Moment(self.0.lock().clock)
    }

    /// A flush that began at this moment has succeeded.
    pub(super) fn flushed(&self, began: Moment) {
        self.0.lock().chunks.retain(|(_, at)| *at > began.0);
    }

    /// Is there a chunk like that among them?
    pub(super) fn any(&self, is_like: impl Fn(Logical) -> bool) -> bool {
        let chunks = self.0.lock().chunks.clone();
        chunks.iter().any(|(chunk, _)| is_like(*chunk))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flush_covers_what_was_noted_before_it_began() {
        let unflushed = Unflushed::default();
        let (a, b) = (Logical(1 << 20), Logical(2 << 20));
        let holds = |chunk| unflushed.any(|c| c == chunk);
        unflushed.note(a);
        unflushed.note(b);
        let began = unflushed.now();
        unflushed.note(a);
        unflushed.flushed(began);
        assert!(holds(a) && !holds(b), "a was written again while the flush was under way");
        unflushed.flushed(unflushed.now());
        assert!(!unflushed.any(|_| true));
        // A flush that began earlier and ends later says nothing of what came in between.
        unflushed.note(b);
        unflushed.flushed(began);
        assert!(holds(b));
    }
}
