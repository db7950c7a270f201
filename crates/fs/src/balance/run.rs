//! A balance from its start to its end.
//!
//! The item comes first: when the first chunk moves, a durable superblock says what is under way.
//! From then on new chunks have the profile to which they are converted. The item goes last, when
//! everything has been moved. So a file system without it has no half of a conversion, and one with
//! it goes on making the right chunks as soon as it is opened.

use super::allowed::{self, DataMay};
use super::control::{BalanceControl, BalanceState, BalanceStatus, Early};
use super::filters::{BalanceWish, Candidate, Filters};
use super::{groups, item};
use crate::engine::Core;
use crate::engine::exclusive::{Claim, ExclusiveOperation};
use crate::error::{Error, Result};
use crate::relocate::{Relocated, relocate};
use crate::space::SpaceKind;
use crate::space::alloc::{Allocator, NewProfiles};
use std::ops::ControlFlow;

/// How often chunks are looked for that were not converted, because others took the room that was
/// made for what they hold.
const PASSES: u32 = 4;

/// Balances what the wish says. Returns when that is done, or when `control` has ended it.
///
/// # Errors
/// `Busy` while another operation has the slot; `Unsupported` for a wish that cannot be carried
/// out; those of relocating. A chunk without room elsewhere is no error: it is counted.
pub(crate) fn start(
    core: &Core,
    wish: &BalanceWish,
    data: DataMay,
    control: &BalanceControl,
) -> Result<()> {
    let begun = begin(core, wish, data);
    let (mut claim, chunks) = told(control, begun)?;
    run(core, &mut claim, wish, &chunks, control)
}

/// Goes on with a balance that is paused.
///
/// # Errors
/// `Invalid` if none is; those of [`start`].
pub(crate) fn resume(core: &Core, control: &BalanceControl) -> Result<()> {
    let again = || -> Result<_> {
        core.check_writable()?;
        let claim = core.exclusive.claim(ExclusiveOperation::Balance)?;
        let wish = item::published(core)?.ok_or(Error::Invalid("no balance is paused"))?;
        Ok((claim, wish.resumed()))
    };
    let (mut claim, wish) = told(control, again())?;
    run(core, &mut claim, &wish, &groups::all(core), control)
}

/// Ends a balance that is paused.
///
/// # Errors
/// `Invalid` if none is; `Busy`; those of a commit.
pub(crate) fn cancel_paused(core: &Core) -> Result<()> {
    core.check_writable()?;
    let mut claim = core.exclusive.claim(ExclusiveOperation::Balance)?;
    if item::published(core)?.is_none() {
        return Err(Error::Invalid("no balance is paused"));
    }
    end(core, &mut claim)
}

/// The balance that is paused.
///
/// # Errors
/// Reading; `Corrupt`.
pub(crate) fn paused(core: &Core) -> Result<Option<BalanceWish>> {
    item::published(core)
}

/// A file system is opened on which such a balance is under way: new chunks get its profiles.
pub(crate) fn go_on_converting(space: &Allocator, wish: &BalanceWish) {
    space.convert_to(new_profiles(wish));
}

/// A balance that does not begin has failed.
fn told<T>(control: &BalanceControl, result: Result<T>) -> Result<T> {
    result.inspect_err(|e| control.ended(BalanceStatus::Failed, Some(e)))
}

/// Everything that comes before the first chunk moves.
fn begin<'a>(
    core: &'a Core,
    wish: &BalanceWish,
    data: DataMay,
) -> Result<(Claim<'a>, Vec<Candidate>)> {
    core.check_writable()?;
    let claim = core.exclusive.claim(ExclusiveOperation::Balance)?;
    if item::published(core)?.is_some() {
        return Err(Error::Busy("a balance is paused; resume or cancel it first"));
    }
    let chunks = groups::all(core);
    allowed::check(wish, &chunks, core.volume.devices_for_chunks(), data)?;
    let profiles = new_profiles(wish);
    core.space.announce(profiles);
    if profiles != NewProfiles::default() {
        // What is delayed was charged as before.
        crate::file::flush_all(core)?;
        core.commit_now()?;
    }
    // Without the item nothing is converted.
    if !fault!(core.options.tuning, BalanceNotedLate) {
        item::keep(core, Some(wish))
            .inspect_err(|_| core.space.convert_to(NewProfiles::default()))?;
    }
    core.space.convert_to(profiles);
    Ok((claim, chunks))
}

fn new_profiles(wish: &BalanceWish) -> NewProfiles {
    let of = |set: &Option<Filters>| set.as_ref()?.convert.map(|convert| convert.profile);
    NewProfiles { data: of(&wish.data), metadata: of(&wish.metadata), system: of(&wish.system) }
}

/// Moves what the wish says, and leaves behind what its end asks for.
fn run(
    core: &Core,
    claim: &mut Claim<'_>,
    wish: &BalanceWish,
    chunks: &[Candidate],
    control: &BalanceControl,
) -> Result<()> {
    let words = |set: &Option<Filters>| set.as_ref().map(ToString::to_string);
    control.begin(|state| {
        (state.data, state.metadata) = (words(&wish.data), words(&wish.metadata));
        state.system = words(&wish.system);
        state.considered = chunks.len() as u64;
    });
    if fault!(core.options.tuning, BalanceEndsEarly) {
        item::keep(core, None)?;
    }
    let result = move_chunks(core, wish, control);
    // A balance that was ended goes on later unless it was cancelled.
    let (status, why) = match &result {
        Ok(ControlFlow::Continue(())) => (BalanceStatus::Finished, None),
        Ok(ControlFlow::Break(Early::Pause)) => (BalanceStatus::Paused, None),
        Ok(ControlFlow::Break(Early::Cancel)) => (BalanceStatus::Canceled, None),
        Err(e) => (BalanceStatus::Failed, Some(e)),
    };
    let kept = status == BalanceStatus::Paused || core.check_writable().is_err();
    claim.leave_paused_balance(kept);
    let ended = if kept { Ok(()) } else { end(core, claim) };
    control.ended(status, why.or(ended.as_ref().err()));
    result.and(ended)
}

/// Takes the item away: the balance is over.
fn end(core: &Core, claim: &mut Claim<'_>) -> Result<()> {
    item::keep(core, None)?;
    core.space.convert_to(NewProfiles::default());
    claim.leave_paused_balance(false);
    Ok(())
}

fn move_chunks(
    core: &Core,
    wish: &BalanceWish,
    control: &BalanceControl,
) -> Result<ControlFlow<Early>> {
    let mut wish = wish.clone();
    for _ in 0..PASSES {
        let chosen = wish.choose(&groups::all(core));
        control.with(|state| {
            state.expected += chosen.len() as u64;
            state.total += chosen.iter().map(|c| c.used).sum::<u64>();
            // Those that were left are looked at again.
            state.left = 0;
        });
        let mut moved = false;
        for chunk in &chosen {
            if let Some(early) = control.told() {
                return Ok(ControlFlow::Break(early));
            }
            match move_chunk(core, &wish, chunk, control) {
                Ok(Relocated::Done) => {
                    moved = true;
                    if fault!(core.options.tuning, BalanceNotedLate) {
                        item::keep(core, Some(&wish))?;
                    }
                    control.dealt_with(|state| {
                        state.completed += 1;
                        state.moved += chunk.used;
                    });
                }
                // `told` says how.
                Ok(Relocated::Stopped) => {}
                Err(e @ (Error::NoSpace | Error::Unsupported(_))) => {
                    control.dealt_with(|state| left(state, chunk, &e));
                }
                Err(e) => return Err(e),
            }
        }
        if let Some(early) = control.told() {
            return Ok(ControlFlow::Break(early));
        }
        wish = unconverted(&wish);
        if !moved || wish.sets().next().is_none() {
            break;
        }
    }
    Ok(ControlFlow::Continue(()))
}

/// A chunk stays as it is.
fn left(state: &mut BalanceState, chunk: &Candidate, why: &Error) {
    let (start, kind) = (chunk.start, chunk.flags.type_name());
    tracing::info!("the chunk at {start} ({kind}) is left: {why}");
    state.left += 1;
    state.expected = state.expected.saturating_sub(1);
    state.total = state.total.saturating_sub(chunk.used);
    state.why = Some(format!("the chunk at {start} ({kind}): {why}"));
}

/// The wish for what is not converted yet. A limit has been used up.
fn unconverted(wish: &BalanceWish) -> BalanceWish {
    let of = |set: &Option<Filters>| {
        let set = set.clone().filter(|set| set.convert.is_some() && set.limit.is_none());
        set.map(Filters::resumed)
    };
    BalanceWish {
        data: of(&wish.data),
        metadata: of(&wish.metadata),
        system: of(&wish.system),
        force: wish.force,
    }
}

/// Moves all that a chunk holds, to chunks of another profile if that is wished.
fn move_chunk(
    core: &Core,
    wish: &BalanceWish,
    chunk: &Candidate,
    control: &BalanceControl,
) -> Result<Relocated> {
    let is_there = |flags| flags == chunk.flags;
    if !core.space.groups.find(chunk.start).is_some_and(|g| is_there(g.flags())) {
        // A commit has taken it out.
        return Ok(Relocated::Done);
    }
    let converts = wish.set_for(chunk.flags).is_some_and(|set| set.convert.is_some());
    if converts && !make_room(core, chunk)? {
        return Err(Error::NoSpace);
    }
    let watch = &mut |now| {
        control.moving(now);
        if control.told().is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    match relocate(core, chunk.start, watch) {
        Err(Error::NotFound) => Ok(Relocated::Done),
        other => other,
    }
}

/// Has chunks made for what this one holds. Those of the wished profile may have room already, of
/// which this one's own is none.
fn make_room(core: &Core, chunk: &Candidate) -> Result<bool> {
    let kind = groups::kind_of(chunk.flags);
    let is_target = core.space.groups.targets().is_met(kind, chunk.flags);
    let own = if is_target { chunk.len - chunk.used } else { 0 };
    let least = match kind {
        // The last chunk of the old profile goes even if it is empty, so there has to be another.
        SpaceKind::Data => 1,
        _ => u64::from(core.nodesize()),
    };
    core.space.make_room_in_target(&core.txns, kind, chunk.used.max(least) + own)
}
