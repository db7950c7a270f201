//! Free space on its way to be discarded.
//!
//! What is being discarded must not be handed out meanwhile, or the discard would take away what
//! was just written. Such space counts as *pinned*: freed space is still so when its turn comes,
//! and free space is pinned for the time that it takes, if it is promised to nobody.
//!
//! Discarding a few sectors costs as much as discarding many and helps little: what the host gives
//! back are its own blocks. So space is discarded by *granules*. The last bytes of a granule that
//! become free take the rest of it along, which was free before; nothing has to remember what was
//! not discarded when it was freed.

use super::{BlockGroup, Groups};
use crate::space::Run;
use larder_format::{Logical, SECTOR_SIZE};
use std::sync::Arc;

fn between(from: u64, to: u64) -> Option<Run> {
    (from < to).then(|| Run::new(Logical(from), to - from))
}

impl Groups {
    /// A pinned run becomes free, but for the granules of `granule` bytes that are free with it:
    /// they are pinned as a whole and returned, to be discarded and given to [`Groups::discarded`].
    ///
    /// # Panics
    /// When the run was not pinned.
    pub fn pin_granules(&self, run: Run, granule: u64) -> Option<Run> {
        let group = self.find_run(run).expect("space of a known group");
        let base = group.run.start.0;
        let floor = |at: u64| base + (at - base) / granule * granule;
        let ceil =
            |at: u64| (base + (at - base).div_ceil(granule) * granule).min(group.run.end().0);
        let (start, end) = (run.start.0, run.end().0);
        let mut s = group.state.lock();
        let free = |from, to| match between(from, to) {
            Some(part) => !s.read_only && s.free.is_free(part),
            None => true,
        };
        let mut from = if free(floor(start), start) { floor(start) } else { ceil(start) };
        let mut to = if free(end, ceil(end)) { ceil(end) } else { floor(end) };
        if from < to {
            let more = start.saturating_sub(from) + to.saturating_sub(end);
            if more > 0 && !self.space.try_pin(group.kind(), more) {
                // Promised to somebody: without what was free before.
                (from, to) = (from.max(ceil(start)), to.min(floor(end)));
            }
        }
        let found = between(from, to);
        if let Some(found) = found {
            for part in [between(from, start), between(end, to)].into_iter().flatten() {
                s.free.remove_range(part);
                s.pinned += part.len;
            }
            group.check(&s);
            drop(s);
            // What sticks out belongs to granules that are not free.
            for part in
                [between(start, found.start.0.min(end)), between(found.end().0.max(start), end)]
            {
                part.into_iter().for_each(|part| self.unpin(part));
            }
        } else {
            drop(s);
            self.unpin(run);
        }
        found
    }

    /// The first free run of `group` of which at least `min` bytes lie in `range`: the part that
    /// does.
    pub fn next_free(&self, group: &BlockGroup, range: Run, min: u64) -> Option<Run> {
        let s = group.state.lock();
        if s.read_only || s.removed {
            return None;
        }
        let mut at = range.start;
        loop {
            let run = s.free.next_from(at)?.intersect(range)?;
            if run.len >= min {
                return Some(run);
            }
            at = run.end();
        }
    }

    /// Pins free space of `group` within `range`: the first `most` bytes of its first run of at
    /// least `min` bytes, fewer where less is promised to nobody. `None`: there is no more. Sectors
    /// that `range` has only a part of are pinned whole: nothing else is ever free.
    pub fn pin_free(&self, group: &BlockGroup, range: Run, min: u64, most: u64) -> Option<Run> {
        let mut s = group.state.lock();
        let mut at = range.start;
        loop {
            let run = s.free.next_from(at)?.intersect(range)?;
            at = run.end();
            if s.read_only || s.removed {
                return None;
            }
            if run.len < min {
                continue;
            }
            let sector = u64::from(SECTOR_SIZE);
            let whole = s.free.next_from(Logical(run.start.0 / sector * sector))?;
            let mut len =
                (run.end().0.next_multiple_of(sector) - whole.start.0).min(whole.len).min(most);
            while len > 0 && !self.space.try_pin(group.kind(), len) {
                len = len / 2 / sector * sector;
            }
            if len == 0 {
                return None;
            }
            let part = Run::new(whole.start, len);
            s.free.remove_range(part);
            s.pinned += len;
            group.check(&s);
            return Some(part);
        }
    }

    /// What was pinned and has been discarded is free.
    ///
    /// # Panics
    /// When the run was not pinned.
    pub fn discarded(&self, run: Run) {
        self.unpinned(run, true);
    }

    /// Groups in which space was freed and not discarded since this was last asked.
    #[must_use]
    pub fn take_undiscarded(&self) -> Vec<Arc<BlockGroup>> {
        let all = self.all().into_iter();
        all.filter(|g| std::mem::take(&mut g.state.lock().undiscarded)).collect()
    }
}
