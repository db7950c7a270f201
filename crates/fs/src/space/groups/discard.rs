//! Free space that is about to be discarded.
//!
//! Space that is being discarded must not be handed out meanwhile, or the discard would destroy
//! what was just written. So it counts as *pinned*. Freed space is still pinned when its turn
//! comes. Free space is pinned for as long as the discard takes, if it is promised to nothing.
//!
//! Discarding a few sectors costs as much as discarding many and helps little, because the host
//! gives back whole blocks of its own. So space is discarded by *granules*. The last bytes of a
//! granule that become free take along the rest of it, which was free before. So nothing has to
//! remember what was not discarded when it was freed.
//!
//! Where there is parity, only full stripes are discarded that are freed, or free, as a whole.

use super::{BlockGroup, Groups};
use crate::space::Run;
use crate::space::free_index::Lengths;
use larder_format::{Logical, SECTOR_SIZE};
use std::sync::Arc;

impl Groups {
    /// Makes a pinned run free, except the granules of `granule` bytes that are then free as a
    /// whole. These are pinned whole and returned, to be discarded and then given to
    /// [`Groups::discarded`].
    ///
    /// # Panics
    /// When the run was not pinned.
    pub(crate) fn pin_granules(&self, run: Run, granule: u64) -> Option<Run> {
        let group = self.find_run(run).expect("space of a known group");
        let base = group.run.start;
        let granule = group.stripes.map_or(granule, |s| granule.next_multiple_of(s.len()));
        let floor = |at: Logical| base.plus((at.0 - base.0) / granule * granule);
        let ceil = |at: Logical| {
            base.plus((at.0 - base.0).div_ceil(granule) * granule).min(group.run.end())
        };
        let (start, end) = (run.start, run.end());
        let mut s = group.state.lock();
        let free = |from, to| match Run::between(from, to) {
            Some(part) => !s.read_only && s.rows.is_none() && s.free.is_free(part),
            None => true,
        };
        let mut from = if free(floor(start), start) { floor(start) } else { ceil(start) };
        let mut to = if free(end, ceil(end)) { ceil(end) } else { floor(end) };
        if from < to {
            let more = start.0.saturating_sub(from.0) + to.0.saturating_sub(end.0);
            if more > 0 && !self.space.try_pin(group.kind(), more) {
                // What was free before is promised: it is left out.
                (from, to) = (from.max(ceil(start)), to.min(floor(end)));
            }
        }
        let Some(found) = Run::between(from, to) else {
            drop(s);
            self.unpin(run);
            return None;
        };
        for part in [Run::between(from, start), Run::between(end, to)].into_iter().flatten() {
            s.free.remove_range(part);
            s.pinned += part.len;
        }
        group.check(&s);
        drop(s);
        // The ends belong to granules that are not free.
        for rest in
            [Run::between(start, found.start.min(end)), Run::between(found.end().max(start), end)]
        {
            rest.into_iter().for_each(|rest| self.unpin(rest));
        }
        Some(found)
    }

    /// Finds the first free run of `group` of which at least `min` bytes lie in `range`. Returns
    /// the part that does.
    pub(crate) fn next_free(&self, group: &BlockGroup, range: Run, min: u64) -> Option<Run> {
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

    /// Pins free space of `group` within `range`: the start of its first run that is long enough,
    /// or less if less is promised to nothing. `None` means that there is no more. Sectors that lie
    /// in `range` only in part are pinned whole, because space is free by whole sectors only.
    pub(crate) fn pin_free(&self, group: &BlockGroup, range: Run, wanted: Lengths) -> Option<Run> {
        let mut s = group.state.lock();
        let mut at = range.start;
        loop {
            let run = s.free.next_from(at)?.intersect(range)?;
            at = run.end();
            if s.read_only || s.removed {
                return None;
            }
            if run.len < wanted.least {
                continue;
            }
            let (unit, room) = match group.stripes {
                None => {
                    let sector = u64::from(SECTOR_SIZE);
                    let whole = s.free.next_from(Logical(run.start.0 / sector * sector))?;
                    let len = run.end().0.next_multiple_of(sector) - whole.start.0;
                    (sector, Run::new(whole.start, len.min(whole.len)))
                }
                Some(stripes) => match stripes.whole(run) {
                    Some(whole) => (stripes.len(), whole),
                    None => continue,
                },
            };
            let most = (wanted.most / unit).max(1) * unit;
            let mut len = room.len.min(most);
            while len > 0 && !self.space.try_pin(group.kind(), len) {
                len = len / 2 / unit * unit;
            }
            if len == 0 {
                return None;
            }
            let part = Run::new(room.start, len);
            s.free.remove_range(part);
            s.pinned += len;
            group.check(&s);
            return Some(part);
        }
    }

    /// Makes space free that was pinned and has been discarded.
    ///
    /// # Panics
    /// When the run was not pinned.
    pub(crate) fn discarded(&self, run: Run) {
        self.unpinned(run, true);
    }

    /// Groups in which space was freed and not discarded since the last call.
    #[must_use]
    pub(crate) fn take_undiscarded(&self) -> Vec<Arc<BlockGroup>> {
        let all = self.all().into_iter();
        all.filter(|g| std::mem::take(&mut g.state.lock().undiscarded)).collect()
    }
}
