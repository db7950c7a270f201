//! What has to be true of the devices that stay, and how small a device can be.
//!
//! The answers come from figures, before anything is moved. They are right about what cannot be:
//! profiles that need more devices, more bytes than there is room for. They leave out what is lost
//! between chunks, so a change that they allow may still end with "it does not fit".

use super::SMALLEST_DEVICE;
use crate::engine::Core;
use crate::error::{Error, Result};
use crate::relocate::{self, GroupFacts};
use crate::space::DeviceUsage;
use larder_format::features::Incompat;
use larder_format::items::{BlockGroupFlags, Profile};
use larder_format::{DEVICE_RESERVED, DeviceId, Physical};
use larder_volume::VolumeError;
use serde::Serialize;

/// Chunks consist of whole pieces of this length.
pub(super) const STEP: u64 = 1 << 20;
/// Blocks of metadata that are kept free for operations, beside what commits need. Linux makes no
/// file with less: it keeps some 350 for commits, and reserves as many to create a name.
const FOR_OPERATIONS: u64 = 896;

/// What decides how small a device can be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SmallestPart {
    /// `Data`, `Metadata`, `System`, `Data+Metadata`.
    pub kind: &'static str,
    /// Name of the profile.
    pub profile: &'static str,
    /// Copies of each byte.
    pub copies: u64,
    /// Bytes that it holds, and that are kept free for commits.
    pub bytes: u64,
    /// Bytes that this takes of devices, with all copies and parity.
    pub on_devices: u64,
}

/// How small a device can be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Smallest {
    /// Bytes that are needed by the figures. It may turn out to be a little more.
    pub bytes: u64,
    /// Bytes that it has.
    pub now: u64,
    /// Bytes that would fit on other devices.
    pub elsewhere: u64,
    /// What needs them.
    pub parts: Vec<SmallestPart>,
}

/// The device, if it is one of the file system's.
pub(super) fn known(core: &Core, id: DeviceId) -> Result<DeviceUsage> {
    let all = core.space.devices();
    let ids: Vec<String> = all.iter().map(|d| d.id.to_string()).collect();
    let what = || {
        let ids = ids.join(", ");
        Error::Unsupported(format!("there is no device {id}; the file system has these: {ids}"))
    };
    all.into_iter().find(|d| d.id == id).ok_or_else(what)
}

/// The same for a device that has to be there.
pub(super) fn is_there(core: &Core, id: DeviceId) -> Result<DeviceUsage> {
    let device = known(core, id)?;
    if core.volume.takes_writes(id) {
        return Ok(device);
    }
    let state = if core.volume.device(id).is_some() { "has failed" } else { "is missing" };
    Err(Error::Unsupported(format!("device {id} {state}, so its size cannot be changed")))
}

/// Bytes that a device has.
///
/// # Errors
/// `Unsupported`; those of the device.
pub(crate) fn bytes(core: &Core, id: DeviceId) -> Result<u64> {
    is_there(core, id)?;
    let Some(device) = core.volume.device(id) else { return Ok(0) };
    device.measure().map_err(|source| {
        let device = device.name();
        let error = VolumeError::Io { device, op: "measure", at: Physical(0), len: 0, source };
        Error::Volume(error)
    })
}

/// What stands in the items of devices as the file system's id.
pub(super) fn fsid_of_devices(core: &Core) -> [u8; 16] {
    let superblock = core.superblock.lock();
    let incompat = Incompat::from_bits_retain(superblock.incompat_flags.get());
    let other = incompat.contains(Incompat::METADATA_UUID);
    if other { superblock.metadata_uuid } else { superblock.fsid }
}

/// Can the file system do without this device, as far as profiles and figures say?
///
/// # Errors
/// `Unsupported`, `DoesNotFit`.
pub(super) fn may_leave(core: &Core, id: DeviceId) -> Result<()> {
    known(core, id)?;
    let others = core.volume.devices().filter(|(other, _)| *other != id);
    let left = others.filter(|(other, _)| core.volume.takes_chunks(*other)).count();
    if left == 0 {
        let what = format!("device {id} is the only one that can be written; it has to stay");
        return Err(Error::Unsupported(what));
    }
    for group in relocate::groups(core) {
        let profile = group.flags.profile().unwrap_or(Profile::Single);
        let needed = usize::from(profile.min_devices());
        if needed > left {
            let what = format!(
                "device {id} cannot leave: {} is {}, which needs {needed} devices, and {left} \
                    would be left; convert it to another profile, or add a device first",
                group.flags.type_name(),
                profile.name(),
            );
            return Err(Error::Unsupported(what));
        }
    }
    let smallest = smallest(core, id)?;
    if smallest.bytes > DEVICE_RESERVED { Err(does_not_fit(core, id)) } else { Ok(()) }
}

/// May a device have this size?
///
/// # Errors
/// `Unsupported`, `DoesNotFit`.
pub(super) fn may_have(core: &Core, id: DeviceId, size: u64) -> Result<()> {
    let Some(device) = core.volume.device(id) else { return known(core, id).map(drop) };
    // It may have become larger meanwhile.
    let there = device.measure().unwrap_or_else(|_| device.size());
    if size > there {
        let what =
            format!("device {id} ({}) has {there} bytes; it cannot have {size}", device.name());
        return Err(Error::DoesNotFit(what));
    }
    if size < SMALLEST_DEVICE.max(smallest(core, id)?.bytes) {
        return Err(not_so_small(core, id, size));
    }
    Ok(())
}

/// Gives "no space" a name.
pub(super) fn named(error: Error, name: impl FnOnce() -> Error) -> Error {
    if matches!(error, Error::NoSpace) { name() } else { error }
}

pub(super) fn does_not_fit(core: &Core, id: DeviceId) -> Error {
    let held: Vec<String> = held_by(core, id).iter().map(ToString::to_string).collect();
    let (what, elsewhere) = (held.join(", "), free_elsewhere(core, id));
    Error::DoesNotFit(format!(
        "device {id} cannot leave: it has {what}; the others have {elsewhere} bytes free, which \
            are too few, or not where they are needed"
    ))
}

pub(super) fn not_so_small(core: &Core, id: DeviceId, size: u64) -> Error {
    let least = smallest(core, id).map_or(SMALLEST_DEVICE, |s| s.bytes.max(SMALLEST_DEVICE));
    Error::DoesNotFit(format!(
        "device {id} cannot have {size} bytes: what is stored needs about {least} bytes of it, and \
            whole chunks"
    ))
}

/// What chunks of one kind have on a device.
struct Held {
    kind: &'static str,
    profile: &'static str,
    bytes: u64,
}

impl std::fmt::Display for Held {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes of chunks of {} ({})", self.bytes, self.kind, self.profile)
    }
}

fn held_by(core: &Core, id: DeviceId) -> Vec<Held> {
    let device = core.space.devices().into_iter().find(|d| d.id == id);
    let allocated = device.into_iter().flat_map(|d| d.allocated);
    allocated.map(|a| Held { kind: a.kind, profile: a.profile, bytes: a.bytes }).collect()
}

fn free_elsewhere(core: &Core, id: DeviceId) -> u64 {
    let others = core.space.devices().into_iter().filter(|d| d.id != id);
    others.filter(|d| core.volume.takes_chunks(d.id)).map(|d| d.unallocated).sum()
}

/// How small a device can be, by figures alone.
///
/// # Errors
/// `Unsupported` if there is no such device.
pub(crate) fn smallest(core: &Core, id: DeviceId) -> Result<Smallest> {
    let now = known(core, id)?.size;
    let parts = parts(core);
    let others: Vec<u64> = core
        .space
        .devices()
        .into_iter()
        .filter(|d| d.id != id && core.volume.takes_chunks(d.id))
        .map(|d| d.size.saturating_sub(DEVICE_RESERVED))
        .collect();
    let needed: u64 = parts.iter().map(|part| part.on_devices).sum();
    // Each device holds a byte once at most, unless its copies may lie on one.
    let once = parts.iter().all(|p| p.profile != Profile::Dup.name());
    let copy = |p: &SmallestPart| p.on_devices.div_ceil(p.copies);
    let most: u64 = if once { parts.iter().map(copy).sum() } else { u64::MAX };
    let elsewhere: u64 = others.iter().map(|bytes| (*bytes).min(most)).sum();
    let bytes = DEVICE_RESERVED + needed.saturating_sub(elsewhere);
    Ok(Smallest { bytes, now, elsewhere, parts })
}

/// What is stored, by type and profile.
fn parts(core: &Core) -> Vec<SmallestPart> {
    let mut sums: Vec<(BlockGroupFlags, u64, u64)> = Vec::new();
    let mut add = |group: &GroupFacts, bytes: u64| {
        let on_devices = of_devices(core, group, bytes);
        match sums.iter_mut().find(|(flags, ..)| *flags == group.flags) {
            Some((_, sum, raw)) => (*sum, *raw) = (*sum + bytes, *raw + on_devices),
            None => sums.push((group.flags, bytes, on_devices)),
        }
    };
    let groups = relocate::groups(core);
    groups.iter().for_each(|group| add(group, group.used));
    let part = |(flags, bytes, on_devices): (BlockGroupFlags, u64, u64)| {
        let profile = flags.profile().unwrap_or(Profile::Single);
        let spared = spare(core, flags, bytes);
        let like = groups.iter().find(|group| group.flags == flags);
        let on_devices = on_devices + like.map_or(0, |group| of_devices(core, group, spared));
        let bytes = bytes + spared;
        SmallestPart {
            kind: flags.type_name(),
            profile: profile.name(),
            copies: u64::from(profile.copies()),
            bytes,
            on_devices: on_devices.next_multiple_of(STEP),
        }
    };
    sums.into_iter().map(part).collect()
}

/// Bytes that chunks of a type need beside the `held` bytes in them.
pub(super) fn spare(core: &Core, flags: BlockGroupFlags, held: u64) -> u64 {
    if flags.contains(BlockGroupFlags::METADATA) {
        // Commits copy, and so do operations. Where data moves into the same chunk, what its moving
        // changes needs room in it too, and a chunk that does not do leaves a second, loose one.
        let times = if flags.contains(BlockGroupFlags::DATA) { 4 } else { 1 };
        times * (core.space.needed_by_commits() + FOR_OPERATIONS * u64::from(core.nodesize()))
    } else if flags.contains(BlockGroupFlags::SYSTEM) {
        // The tree may have to be copied as a whole.
        held + STEP
    } else {
        // The copy of the superblock takes a stripe, and what is written next has room. What it
        // replaces is free only after a commit.
        2 * STEP
    }
}

/// Bytes of devices that so many bytes take in a chunk like that of a group.
fn of_devices(core: &Core, group: &GroupFacts, bytes: u64) -> u64 {
    let chunk = core.volume.map().chunk_at(group.start);
    let on_devices = chunk.map_or(group.len, |chunk| chunk.device_bytes());
    let bytes = u128::from(bytes) * u128::from(on_devices) / u128::from(group.len.max(1));
    u64::try_from(bytes).unwrap_or(u64::MAX)
}
