//! A device becomes larger or smaller.

use super::clear::{Outcome, Part, clear};
use super::compact::{compact, lengthen};
use super::fit::STEP;
use super::tight::Tight;
use super::{SMALLEST_DEVICE, Watch, fit};
use crate::engine::Core;
use crate::engine::exclusive::ExclusiveOperation;
use crate::error::{Error, Result};
use crate::space::DeviceChange;
use larder_format::{DeviceId, Physical, SECTOR_SIZE};

/// Times that all is moved to the front of a device that is made as small as it can be.
const PASSES: usize = 4;

/// Gives a device another size: `size` bytes, in whole sectors. What lies behind a smaller size is
/// moved first.
///
/// # Errors
/// `Unsupported` if there is no such device, or it is missing; `DoesNotFit` if it has fewer bytes,
/// or if what lies behind its new end fits nowhere else; `Busy` while another such operation runs;
/// `ReadOnly`; those of a relocation. The size is as before, then.
pub(crate) fn resize(core: &Core, id: DeviceId, size: u64, watch: Watch<'_>) -> Result<Outcome> {
    core.check_writable()?;
    let _claim = core.exclusive.claim(ExclusiveOperation::Resize)?;
    let size = size / u64::from(SECTOR_SIZE) * u64::from(SECTOR_SIZE);
    let before = fit::is_there(core, id)?.size;
    fit::may_have(core, id, size)?;
    if size >= before {
        if size > before {
            core.change_devices(DeviceChange::Resize(id, size))?;
        }
        return Ok(Outcome::Done);
    }
    let mut cleared = clear_to(core, id, size, (None, watch))?;
    if cleared == Cleared::Full {
        let tight = Tight::new(core);
        if compact(core, &tight, watch)? == Outcome::Stopped {
            return Ok(Outcome::Stopped);
        }
        cleared = clear_to(core, id, size, (Some(&tight), watch))?;
    }
    match cleared {
        Cleared::Done => cut(core, id, size, watch),
        Cleared::Full => Err(fit::not_so_small(core, id, size)),
        Cleared::Stopped => Ok(Outcome::Stopped),
    }
}

/// Makes a device as small as it can be, and returns its size.
///
/// What moves to the front leaves loose chunks again, so this is done again where much more is left
/// than the figures say.
///
/// # Errors
/// As [`resize`].
pub(crate) fn shrink(core: &Core, id: DeviceId, watch: Watch<'_>) -> Result<(u64, Outcome)> {
    core.check_writable()?;
    let _claim = core.exclusive.claim(ExclusiveOperation::Resize)?;
    let before = fit::is_there(core, id)?.size;
    let tight = Tight::with_room(core);
    let mut size = before;
    for _ in 0..PASSES {
        if move_to_front(core, id, &tight, watch)? == Outcome::Stopped {
            return Ok((before, Outcome::Stopped));
        }
        let now = end_of(core, id)?;
        let gained = size.saturating_sub(now);
        size = now;
        let least = fit::smallest(core, id)?.bytes;
        if gained < 2 * STEP || size < least + least / 32 + 2 * STEP {
            break;
        }
    }
    if lengthen(core, &tight, watch)? == Outcome::Stopped {
        return Ok((before, Outcome::Stopped));
    }
    size = end_of(core, id)?.min(before);
    let outcome = if size < before { cut(core, id, size, watch)? } else { Outcome::Done };
    Ok((if outcome == Outcome::Stopped { before } else { size }, outcome))
}

/// The smallest size that a device can have with the chunks that are on it.
fn end_of(core: &Core, id: DeviceId) -> Result<u64> {
    let end = fit::is_there(core, id)?.end.0.max(SMALLEST_DEVICE);
    Ok(end.next_multiple_of(u64::from(SECTOR_SIZE)))
}

/// Makes loose chunks tight, and moves all to the front of a device as far as it fits there.
///
/// What is tried is what fits by the figures, and then a little more each time, since they leave
/// out what is lost between chunks. In the end the device loses one chunk after another, until one
/// does not fit any more.
fn move_to_front(
    core: &Core,
    id: DeviceId,
    tight: &Tight<'_>,
    watch: Watch<'_>,
) -> Result<Outcome> {
    if compact(core, tight, watch)? == Outcome::Stopped {
        return Ok(Outcome::Stopped);
    }
    let target = fit::smallest(core, id)?.bytes;
    let more = [0, target / 64, target / 32, target / 16, target / 8];
    let sizes = more.into_iter().map(|more| (target + more).next_multiple_of(STEP));
    let mut cleared = Cleared::Full;
    for size in sizes {
        if cleared != Cleared::Full || size >= fit::is_there(core, id)?.end.0 {
            break;
        }
        cleared = clear_to(core, id, size, (Some(tight), watch))?;
    }
    if cleared == Cleared::Full {
        cleared = clear_step_by_step(core, id, target, (tight, watch))?;
    }
    Ok(if cleared == Cleared::Stopped { Outcome::Stopped } else { Outcome::Done })
}

/// Makes a device end where no chunk lies behind. One that came there meanwhile is moved.
fn cut(core: &Core, id: DeviceId, size: u64, watch: Watch<'_>) -> Result<Outcome> {
    let full = |e| fit::named(e, || fit::not_so_small(core, id, size));
    let part = Part::close(core, id, Physical(size)).map_err(full)?;
    let outcome = clear(&part, None, watch).map_err(full)?;
    if outcome == Outcome::Done {
        core.change_devices(DeviceChange::Resize(id, size))?;
    }
    Ok(outcome)
}

/// Takes the last chunk away from a device as long as it fits elsewhere.
fn clear_step_by_step(
    core: &Core,
    id: DeviceId,
    target: u64,
    (tight, watch): (&Tight<'_>, Watch<'_>),
) -> Result<Cleared> {
    loop {
        let last = core.space.chunks_beyond(id, Physical(target)).first().copied();
        let start = last.and_then(|at| core.space.last_stripe_on(id, at));
        let Some(start) = start.filter(|start| start.0 > target) else { return Ok(Cleared::Done) };
        let cleared = clear_to(core, id, start.0, (Some(tight), watch))?;
        if cleared != Cleared::Done {
            return Ok(cleared);
        }
    }
}

/// What came of an attempt.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Cleared {
    Done,
    Full,
    Stopped,
}

fn clear_to(
    core: &Core,
    id: DeviceId,
    size: u64,
    (tight, watch): (Option<&Tight<'_>>, Watch<'_>),
) -> Result<Cleared> {
    let part = Part::close(core, id, Physical(size));
    let cleared = part.and_then(|part| clear(&part, tight, watch));
    match cleared {
        Ok(Outcome::Done) => Ok(Cleared::Done),
        Ok(Outcome::Stopped) => Ok(Cleared::Stopped),
        Err(Error::NoSpace) => Ok(Cleared::Full),
        Err(e) => Err(e),
    }
}
