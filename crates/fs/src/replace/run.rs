//! How a replacement begins, goes on and ends.

use super::control::{ReplaceControl, ReplaceStatus, Replacing, Told};
use super::copy::Copying;
use crate::engine::Core;
use crate::engine::exclusive::{Claim, ExclusiveOperation};
use crate::error::{Error, Result};
use crate::lock::Mutex;
use larder_format::items::{DevReplace, ReplaceState};
use larder_format::{DEVICE_RESERVED, DeviceId, Physical};
use larder_volume::{Device, MappedChunk, superblock};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{SystemTime, UNIX_EPOCH};

/// How a device is replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplaceOptions {
    /// The device that is replaced. It may be missing.
    pub source: DeviceId,
    /// How it is read.
    pub read: ReplaceSource,
}

/// Whether the source is read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReplaceSource {
    /// It is, and other copies where it is bad.
    #[default]
    Use,
    /// Only where nothing else has its bytes.
    Avoid,
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Begins a replacement, and copies until it is complete or `control` ends it.
///
/// # Errors
/// See [`crate::Filesystem::replace_device`].
pub(crate) fn start(
    core: &Core,
    options: ReplaceOptions,
    target: Arc<dyn Device>,
    control: &ReplaceControl,
) -> Result<()> {
    let begun = begin(core, options, &target);
    let claim = begun.inspect_err(|e| control.refused(ReplaceStatus::Canceled, e))?;
    let known = core.commit_now().and_then(|()| note_target(core, &*target));
    let arrived = known.and_then(|()| arrive(core));
    run(core, claim, target, control, arrived)
}

/// Notes that the target has a superblock. Before that, it may be missing when the file system is
/// opened ([`DevReplace::has_just_begun`]).
fn note_target(core: &Core, target: &dyn Device) -> Result<()> {
    has_taken_everything(core, target)?;
    core.replacement.set_cursor(Physical(0), Physical(0));
    Ok(())
}

/// From here on the target gets what the source gets.
fn begin<'a>(
    core: &'a Core,
    options: ReplaceOptions,
    target: &Arc<dyn Device>,
) -> Result<Claim<'a>> {
    core.check_writable()?;
    let claim = core.exclusive.claim(ExclusiveOperation::DeviceReplace)?;
    if core.replacement.under_way().is_some() {
        return Err(Error::Busy("a replacement is suspended; resume or cancel it first"));
    }
    may_be_target(core, options.source, &**target)?;
    // It may say that it is a device of this file system, as one that was replaced before and could
    // not be erased. Once this replacement is written down, nothing tells that the other one ended.
    if !fault!(core.options.tuning, ReplaceUnerased) {
        superblock::erase_superblocks(&**target)?;
    }
    let avoid = options.read == ReplaceSource::Avoid;
    let (item, uuid) = (DevReplace::begun(options.source, avoid, now()), core.new_uuid());
    // No superblock is written meanwhile: that of a commit which was sealed before is not for this
    // target.
    let _unwritten = core.superblock_written.lock();
    if !fault!(core.options.tuning, ReplaceUnmirrored) {
        core.volume.set_target(options.source, target.clone())?;
    }
    core.replacement.begin(item, uuid);
    Ok(claim)
}

/// Goes on with the one that is suspended.
///
/// # Errors
/// See [`crate::Filesystem::resume_replacement`].
pub(crate) fn resume(core: &Core, control: &ReplaceControl) -> Result<()> {
    let found = begin_again(core);
    let (claim, target) = found.inspect_err(|e| control.refused(status(core).status, e))?;
    let arrived = arrive(core);
    run(core, claim, target, control, arrived)
}

fn begin_again(core: &Core) -> Result<(Claim<'_>, Arc<dyn Device>)> {
    core.check_writable()?;
    let claim = core.exclusive.claim(ExclusiveOperation::DeviceReplace)?;
    if core.replacement.under_way().is_none() {
        return Err(Error::NotFound);
    }
    let Some(target) = core.volume.target() else {
        let what = "the target of the replacement is not there: name it with the other devices";
        return Err(Error::Unsupported(what.into()));
    };
    core.replacement.change(|item| item.set_state(ReplaceState::Started));
    Ok((claim, target))
}

/// Refuses what cannot take the place of a device.
fn may_be_target(core: &Core, source: DeviceId, target: &dyn Device) -> Result<()> {
    let size = core.space.devices().into_iter().find(|d| d.id == source).map(|d| d.size);
    let size = size.ok_or(Error::NotFound)?;
    let refuse = |what: String| Err(Error::Unsupported(format!("{}: {what}", target.name())));
    if target.is_read_only() {
        return refuse("it cannot be written".into());
    }
    if target.size() < size.max(DEVICE_RESERVED) {
        return refuse(format!(
            "it has {} bytes, and the file system uses {size} of device {source}: a target is at \
                least as large",
            target.size()
        ));
    }
    Ok(())
}

/// What was written before the target got it is in the published trees afterwards.
fn arrive(core: &Core) -> Result<()> {
    if fault!(core.options.tuning, ReplaceWithoutFlush) {
        return Ok(());
    }
    crate::file::flush_all(core)?;
    // Operations that have stored data, and not yet entered its extent, are waited for.
    drop(core.storing.write());
    core.commit_now()
}

/// Copies, and ends in one of the ways.
fn run(
    core: &Core,
    mut claim: Claim<'_>,
    target: Arc<dyn Device>,
    control: &ReplaceControl,
    arrived: Result<()>,
) -> Result<()> {
    control.begin(status(core));
    let copied = arrived.and_then(|()| copy(core, target, control));
    let result = match (copied, control.told()) {
        (Ok(()), Some(Told::Cancel)) => give_up(core, None),
        (Ok(()), _) => take_over(core),
        (Err(Error::Busy(_)), Some(Told::Cancel)) => give_up(core, None),
        (Err(Error::Busy(_)), Some(Told::Suspend)) => core.commit_now().map(|()| None),
        // Nothing can be written any more. The next mount goes on.
        (Err(e), _) if core.check_writable().is_err() => Err(e),
        (Err(e), _) => give_up(core, Some(e)),
    };
    let under_way = core.replacement.under_way().is_some();
    claim.leave_suspended_replacement(under_way);
    let (status, stopped, why) = match (&result, core.replacement.item()) {
        (_, Some(_)) if under_way => (ReplaceStatus::Suspended, now(), None),
        (Ok(why), Some(item)) => {
            (status_of(item.state()), item.stopped.get(), why.as_ref().map(Error::to_string))
        }
        _ => (ReplaceStatus::Canceled, now(), None),
    };
    let why = why.or(result.as_ref().err().map(Error::to_string));
    control.ended(status, stopped, why);
    match result {
        // It may have been told to end when everything was done.
        Ok(None) if status == ReplaceStatus::Finished => Ok(()),
        Ok(None) => control.check(),
        Ok(Some(e)) | Err(e) => Err(e),
    }
}

fn copy(core: &Core, target: Arc<dyn Device>, control: &ReplaceControl) -> Result<()> {
    let Some(item) = core.replacement.under_way() else { return Err(Error::NotFound) };
    let copying = Copying {
        core,
        control,
        source: item.source(),
        target: target.clone(),
        avoid: item.avoids_source(),
        memory: Mutex::default(),
    };
    copying.run(item.cursor())?;
    if fault!(core.options.tuning, ReplaceUnmirrored) {
        core.volume.set_target(item.source(), target.clone())?;
    }
    has_taken_everything(core, &*target)
}

/// Fails if the target has refused something.
fn has_taken_everything(core: &Core, target: &dyn Device) -> Result<()> {
    if core.volume.target_takes_writes() {
        return Ok(());
    }
    core.replacement.change(|item| item.write_errors += 1);
    let what = format!("{}: the target has failed", target.name());
    Err(Error::Unsupported(what))
}

/// The target becomes the device.
fn take_over(core: &Core) -> Result<Option<Error>> {
    let was_behind = core
        .replacement
        .target()
        .is_some_and(|target| core.volume.behind().contains(&target.source));
    core.replacement.take_over(now());
    core.commit_now()?;
    if let Some(target) = core.volume.target()
        && let Err(e) = has_taken_everything(core, &*target)
    {
        return give_up(core, Some(e));
    }
    let old = {
        // No superblock is written meanwhile: from here on the device has that of a device.
        let mut written = core.superblock_written.lock();
        let old = core.volume.promote_target()?;
        written.superblocks = written.superblocks.clone().without_target();
        core.replacement.forget_target();
        old
    };
    core.space.come_back_to_devices();
    if let Some(old) = old
        && let Err(e) = superblock::erase_superblocks(&*old)
    {
        tracing::warn!("the device that was replaced still has a superblock: {e}");
    }
    if was_behind {
        core.items_changed.store(true, Ordering::Release);
        core.commit_now()?;
    }
    Ok(None)
}

/// Everything is as before. The reason is passed on.
fn give_up(core: &Core, why: Option<Error>) -> Result<Option<Error>> {
    core.replacement.give_up(now());
    core.commit_now()?;
    if let Some(target) = core.volume.drop_target()
        && let Err(e) = superblock::erase_superblocks(&*target)
    {
        tracing::warn!("the target of the replacement still has a superblock: {e}");
    }
    Ok(why)
}

/// Gives up the one that is suspended.
///
/// # Errors
/// See [`crate::Filesystem::cancel_replacement`].
pub(crate) fn cancel(core: &Core) -> Result<()> {
    core.check_writable()?;
    let mut claim = core.exclusive.claim(ExclusiveOperation::DeviceReplace)?;
    if core.replacement.under_way().is_none() {
        return Err(Error::NotFound);
    }
    give_up(core, None)?;
    claim.leave_suspended_replacement(false);
    Ok(())
}

/// What there is to say of the replacement that is suspended, or was the last.
pub(crate) fn status(core: &Core) -> Replacing {
    let Some(item) = core.replacement.item() else { return Replacing::default() };
    let under_way = item.state().is_under_way();
    let source = under_way.then(|| item.source());
    let usage = core.space.devices();
    let device = source.and_then(|id| usage.iter().find(|d| d.id == id));
    Replacing {
        status: status_of(item.state()),
        source: source.map(|id| id.0),
        target: core.volume.target().map(|device| device.name()),
        started: item.started.get(),
        stopped: item.stopped.get(),
        cursor: item.cursor().0,
        size: device.map_or(0, |d| d.size),
        total: source.map_or(0, |id| to_copy(core, id, item.cursor())),
        unreadable: item.unreadable.get(),
        write_errors: item.write_errors.get(),
        ..Replacing::default()
    }
}

fn status_of(state: ReplaceState) -> ReplaceStatus {
    match state {
        ReplaceState::Never => ReplaceStatus::Never,
        ReplaceState::Started | ReplaceState::Suspended => ReplaceStatus::Suspended,
        ReplaceState::Finished => ReplaceStatus::Finished,
        ReplaceState::Canceled => ReplaceStatus::Canceled,
    }
}

/// About how many bytes there are to copy, from a place of the device on.
fn to_copy(core: &Core, id: DeviceId, from: larder_format::Physical) -> u64 {
    let used = |chunk: &MappedChunk| {
        let used = core.space.groups.find(chunk.start).map_or(0, |g| g.usage().disk_used);
        let bytes = u128::from(used) * u128::from(chunk.stripe_bytes());
        u64::try_from(bytes / u128::from(chunk.length.max(1))).unwrap_or(u64::MAX)
    };
    let on = |chunk: &MappedChunk| {
        let here = chunk.stripes.iter().filter(|s| s.device == id && s.at >= from);
        here.count() as u64 * used(chunk)
    };
    core.volume.map().chunks().iter().map(on).sum()
}
