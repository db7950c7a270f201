//! What operations do to a file's delayed data: taking bytes in, and setting sizes.

use crate::engine::{Core, Inode};
use crate::space::reserve::Reservation;
use std::ops::Range;
use std::sync::Arc;

/// Space reserved for a write that is about to be taken in.
#[derive(Debug)]
pub(crate) struct Admitted {
    pub(crate) space: Reservation,
    pub(crate) items: Option<Reservation>,
}

/// Makes the file end at `size`, and forgets dirty bytes behind it. Returns the size that it had.
/// While bytes of the sectors behind are in flight, returns `None` and changes nothing.
pub(crate) fn cut(core: &Core, inode: &Inode, size: u64) -> Option<u64> {
    let file = &inode.data;
    let mut state = inode.state.lock();
    let mut inner = file.lock();
    let before = inner.dirty.counts();
    if !inner.cut(size) {
        return None;
    }
    let wanted = inner.dirty.footprint();
    let back = inner.space.as_mut().map(|space| space.split(space.bytes().saturating_sub(wanted)));
    core.data.count(file, before, inner.dirty.counts());
    let old = std::mem::replace(&mut state.size, size);
    drop((inner, state));
    drop(back);
    Some(old)
}

/// Adds these bytes to the end of the file. `tail`: zeros for the rest of what was its last sector
/// are about to be taken in.
pub(crate) fn grow(inode: &Inode, added: &Range<u64>, tail: bool) {
    let mut state = inode.state.lock();
    let mut inner = inode.data.lock();
    state.size = added.end;
    inner.grow(added, tail, inode.data.is_clean());
}

/// What lies in the range is not lost any more: other content has replaced what could not be
/// written.
pub(crate) fn rewritten(inode: &Inode, range: &Range<u64>) {
    inode.data.inner.lock().forget_lost(range);
}

/// Gives a file space that others did not need, as far as it has less than its dirty bytes may
/// take: writes that were admitted without space may be written back before others. Returns what is
/// over.
pub(crate) fn give_space(inode: &Inode, mut space: Reservation) -> Reservation {
    let mut inner = inode.data.lock();
    let held = inner.space.as_ref().map_or(0, Reservation::bytes);
    let lacking = inner.dirty.footprint().saturating_sub(held);
    if lacking > 0 {
        let more = space.split(lacking);
        match &mut inner.space {
            Some(held) => held.merge(more),
            none => *none = Some(more),
        }
    }
    space
}

/// Takes bytes in. The caller holds the inode's `op` exclusively. So that the file's size on disk
/// stays right, it also holds a transaction handle, in which it has set the file's new size
/// already. `size` is the one before.
pub(crate) fn take_in(
    core: &Core,
    inode: &Arc<Inode>,
    start: u64,
    data: &[u8],
    size: u64,
    admitted: Admitted,
) {
    let file = &inode.data;
    let mut back = (None, None);
    {
        let mut inner = file.lock_to_write();
        inner.begin_taking_in(size, file.is_clean());
        let age = core.data.tick();
        let before = inner.dirty.counts();
        inner.dirty.write(start, data, age, &core.data.buffers);
        core.data.count(file, before, inner.dirty.counts());
        let wanted = inner.dirty.footprint();
        let space = match inner.space.take() {
            Some(mut space) => {
                space.merge(admitted.space);
                space
            }
            None => admitted.space,
        };
        let space = inner.space.insert(space);
        let surplus = space.bytes().saturating_sub(wanted);
        back.0 = (surplus > 0).then(|| space.split(surplus));
        match &mut inner.items {
            Some(_) => back.1 = admitted.items,
            none => *none = admitted.items,
        }
        if inner.queued.is_none() {
            inner.queued = Some(age);
            core.data.enqueue(age, inode.clone());
        }
    }
    drop(back);
    core.data.wake_workers(core);
}
