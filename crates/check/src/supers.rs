//! Superblocks: which one to start from, and whether the others agree with it.
//!
//! Linux starts from the first copy only, and so does the check as long as that can be used. When
//! it cannot, that is a finding, and the newest copy that can be used serves in its place, so that
//! people learn what else is wrong.

use crate::finding::{Finding, Findings, Kind};
use crate::report::Error;
use crate::source::Edge;
use crate::world::World;
use larder_format::{
    BackupRoot, CompatRo, DevItem, DeviceId, Incompat, MAX_LEVEL, ObjectId, SECTOR_SIZE,
    SUPER_OFFSETS, SuperFlags, Superblock,
};
use larder_volume::{Device, SuperCopy, Volume, VolumeError, meant, read_all_superblocks};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use zerocopy::{FromZeros, IntoBytes};

/// The superblock to go by, and which device is which.
pub(crate) struct Opened {
    pub(crate) superblock: Box<Superblock>,
    pub(crate) devices: Vec<(DeviceId, Arc<dyn Device>)>,
    /// The item that each device's superblock has of it.
    pub(crate) dev_items: BTreeMap<DeviceId, DevItem>,
    /// Devices that lack something that the others have.
    pub(crate) behind: Vec<DeviceId>,
    /// The superblocks of seeds, upon which the file system is built.
    pub(crate) seeds: BTreeMap<DeviceId, Box<Superblock>>,
}

/// Reads the superblocks of all devices. `None` if none can be used, which is reported.
pub(crate) fn open(
    devices: &[Arc<dyn Device>],
    findings: &Findings,
) -> Result<Option<Opened>, Error> {
    let mut found: Vec<(Box<Superblock>, Arc<dyn Device>)> = Vec::new();
    for device in devices {
        let copies = read_all_superblocks(&**device);
        if copies.iter().all(is_something_else) {
            let what = copies.into_iter().find_map(|c| c.content.err()).map_or_else(
                || {
                    format!(
                        "not a btrfs file system: {} bytes are too few to hold a superblock",
                        device.size()
                    )
                },
                |e| match e {
                    VolumeError::Corrupt { what, .. } => what,
                    e => e.to_string(),
                },
            );
            return Err(Error::NotBtrfs { device: device.name(), what });
        }
        if copies.iter().all(|c| matches!(c.content, Err(VolumeError::Io { .. }))) {
            let error = copies.into_iter().find_map(|c| c.content.err());
            return Err(error.map_or_else(
                || Error::Unsupported("no room for a superblock".into()),
                Into::into,
            ));
        }
        let Some(superblock) = best(&copies, findings) else { continue };
        if superblock.device_id() == DeviceId::REPLACE_TARGET && devices.len() > 1 {
            // It is going to take the place of a device, and nothing counts yet that it holds.
            continue;
        }
        found.push((superblock, device.clone()));
    }
    Ok(join(found, findings))
}

/// Puts the devices of one file system together, and those of its seeds. Others are findings.
fn join(found: Vec<(Box<Superblock>, Arc<dyn Device>)>, findings: &Findings) -> Option<Opened> {
    let fsid = meant(found.iter().map(|(sb, _)| &**sb))?.fsid;
    let (mut devices, mut dev_items) = (Vec::new(), BTreeMap::new());
    let (mut seeds, mut all) = (BTreeMap::new(), Vec::new());
    for (superblock, device) in found {
        let id = superblock.device_id();
        if superblock.fsid == fsid {
            dev_items.insert(id, superblock.dev_item);
            all.push(superblock);
        } else if superblock.super_flags().contains(SuperFlags::SEEDING) {
            seeds.insert(id, superblock);
        } else {
            let what = format!("{} belongs to another file system", device.name());
            findings.add(Finding::new(Kind::SuperMirrorDiffers, what));
            continue;
        }
        devices.push((id, device));
    }
    // Of several newest ones the first.
    let newest = all.iter().rev().max_by_key(|sb| sb.generation())?.clone();
    // What an older one says of its device was true when it was written.
    for older in all.iter().filter(|sb| sb.generation() != newest.generation()) {
        dev_items.remove(&older.device_id());
    }
    let behind = all.iter().filter(|sb| !is_current(&newest, sb, findings));
    let behind = behind.map(|sb| sb.device_id()).collect();
    Some(Opened { superblock: newest, devices, dev_items, behind, seeds })
}

/// Has a device everything? The superblocks of all devices say the same, but for the item of their
/// device. One that was away while the others were written has an older one, or a mark.
fn is_current(newest: &Superblock, other: &Superblock, findings: &Findings) -> bool {
    let (id, at) = (other.device_id(), SUPER_OFFSETS[0]);
    let add = |kind, what: String| findings.add(Finding::new(kind, what).device(id, at));
    let generation = newest.generation();
    if other.generation() != generation {
        let is = other.generation();
        let what = format!("device {id} is of generation {is}, the file system of {generation}");
        add(Kind::DeviceBehind, what);
        return false;
    }
    let shared = |sb: &Superblock| {
        (sb.root(), sb.root_level, sb.chunk_root(), sb.num_devices(), sb.history())
    };
    if shared(other) != shared(newest) || other.sys_chunk_bytes() != newest.sys_chunk_bytes() {
        let what = format!(
            "the superblock of device {id} differs from that of device {}",
            newest.device_id()
        );
        add(Kind::SuperMirrorDiffers, what);
    } else if let Some(since) = other.dev_item.mark(&newest.metadata_fsid()) {
        add(Kind::DeviceBehind, format!("device {id} lacks what was written after {since}"));
        return false;
    }
    true
}

fn is_something_else(copy: &SuperCopy) -> bool {
    matches!(&copy.content, Err(VolumeError::Corrupt { what, .. }) if what.starts_with("not a \
        btrfs"))
}

/// The copy to go by; the others are compared with it.
fn best(copies: &[SuperCopy], findings: &Findings) -> Option<Box<Superblock>> {
    let primary = copies.iter().find(|c| c.at == SUPER_OFFSETS[0]);
    if let Some(Err(e)) = primary.map(|c| &c.content) {
        let what = e.to_string();
        let unreadable =
            what.contains("checksum is") || what.contains("magic") || is_something_else(&copies[0]);
        let kind = if unreadable || matches!(e, VolumeError::Io { .. }) {
            Kind::SuperPrimary
        } else {
            Kind::SuperField
        };
        findings.add(Finding::new(kind, what));
    }
    let usable = copies.iter().filter_map(|c| c.content.as_ref().ok());
    let chosen = match primary.and_then(|c| c.content.as_ref().ok()) {
        Some(sb) => sb.clone(),
        None => usable.max_by_key(|sb| sb.generation())?.clone(),
    };
    let id = chosen.device_id();
    let size = chosen.dev_item.total_bytes.get();
    for copy in
        copies.iter().filter(|c| c.at != SUPER_OFFSETS[0] && c.at.0.saturating_add(4096) < size)
    {
        match &copy.content {
            Err(_) if chosen.metadata_dump().is_some() && is_something_else(copy) => {
                let what = format!("the dump has no copy of the superblock at {}", copy.at);
                findings.add(Finding::new(Kind::DumpWithoutMirror, what).device(id, copy.at));
            }
            Err(e) => {
                findings.add(Finding::new(Kind::SuperMirror, e.to_string()).device(id, copy.at))
            }
            Ok(other) => compare(&chosen, other, findings),
        }
    }
    Some(chosen)
}

/// A log commit writes the first copy alone, and a crash can come between two copies: then
/// generations differ.
fn compare(primary: &Superblock, mirror: &Superblock, findings: &Findings) {
    let id = primary.device_id();
    let at = larder_format::Physical(mirror.bytenr.get());
    if primary.fsid != mirror.fsid {
        let what = format!(
            "the copy at {at} belongs to file system {}",
            uuid::Uuid::from_bytes(mirror.fsid)
        );
        findings.add(Finding::new(Kind::SuperMirrorDiffers, what).device(id, at));
        return;
    }
    if primary.generation() != mirror.generation() {
        let what = format!(
            "the copy at {at} is of generation {}, the first copy of {}",
            mirror.generation(),
            primary.generation()
        );
        findings.add(Finding::new(Kind::SuperMirrorGeneration, what).device(id, at));
        return;
    }
    let comparable = |sb: &Superblock| {
        let mut sb = *sb;
        sb.csum.fill(0);
        sb.bytenr.set(0);
        sb.log_root.set(0);
        sb.log_root_transid.set(0);
        sb.log_root_level = 0;
        // A log's superblock, which is the first copy only, does not have it any more.
        sb.dev_item = sb.dev_item.with_arrival(false);
        sb
    };
    let (a, b) = (comparable(primary), comparable(mirror));
    if a != b {
        let first = a.as_bytes().iter().zip(b.as_bytes()).position(|(a, b)| a != b).unwrap_or(0);
        let what = format!("the copy at {at} differs from the first copy, from byte {first:#x} on");
        findings.add(Finding::new(Kind::SuperMirrorDiffers, what).device(id, at));
    }
}

/// Flags and features. `false` if the rest cannot be understood.
pub(crate) fn understand(sb: &Superblock, findings: &Findings) -> Result<bool, Error> {
    let flags = sb.super_flags();
    if flags.contains(SuperFlags::ERROR) {
        findings.add(Finding::new(Kind::SuperErrorFlag, "the superblock has the flag ERROR"));
    }
    if flags.unknown() != 0 {
        let what =
            format!("flags are {:#x}, of which {:#x} are unknown", flags.bits(), flags.unknown());
        findings.add(Finding::new(Kind::SuperField, what));
    }
    let changing = flags
        & (SuperFlags::CHANGING_FSID
            | SuperFlags::CHANGING_FSID_V2
            | SuperFlags::CHANGING_BG_TREE
            | SuperFlags::CHANGING_DATA_CSUM
            | SuperFlags::CHANGING_META_CSUM);
    if !changing.is_empty() {
        let what = format!("the superblock has the flags {}", changing.names().join(", "));
        findings.add(Finding::new(Kind::SuperInterrupted, what));
    }
    if sb.root_dir_objectid.get() != ObjectId::ROOT_TREE_DIR.0 {
        let what = format!("root_dir_objectid is {}, expected 6", sb.root_dir_objectid);
        findings.add(Finding::new(Kind::SuperField, what));
    }
    let incompat = sb.incompat();
    if incompat.unknown() != 0 {
        let what = format!(
            "unknown incompatible features {:#x}: the rest is not checked",
            incompat.unknown()
        );
        findings.add(Finding::new(Kind::SuperFeature, what));
        return Ok(false);
    }
    let unsupported = incompat
        & (Incompat::ZONED
            | Incompat::EXTENT_TREE_V2
            | Incompat::RAID_STRIPE_TREE
            | Incompat::REMAP_TREE);
    if !unsupported.is_empty() {
        let names = unsupported.names().join(", ");
        return Err(Error::Unsupported(format!("it uses {names}, which Larder does not know")));
    }
    Ok(true)
}

/// Refuses by name what needs devices that were not given even to find the chunk tree.
pub(crate) fn suffice(sb: &Superblock, volume: &Volume) -> Result<(), Error> {
    let Some((_, missing)) = volume.first_lost(|_| true) else { return Ok(()) };
    let names: Vec<String> = missing.iter().map(ToString::to_string).collect();
    Err(Error::Unsupported(format!(
        "it spans {} devices, and cannot be read without device {}",
        sb.num_devices(),
        names.join(" and ")
    )))
}

/// Do the feature bits describe what is there?
pub(crate) fn features(world: &World<'_>, roots: &[Edge]) {
    let sb = &world.superblock;
    let add = |what: String| world.add(Finding::new(Kind::SuperFeature, what));
    let compat_ro = sb.compat_ro();
    let has = |tree| roots.iter().any(|r| r.tree == tree);
    let rooted = !world.lost.part_of(ObjectId::ROOT_TREE);
    if compat_ro.contains(CompatRo::BLOCK_GROUP_TREE) {
        let needed = CompatRo::FREE_SPACE_TREE | CompatRo::FREE_SPACE_TREE_VALID;
        if !compat_ro.contains(needed) || !world.has(Incompat::NO_HOLES) {
            add("block-group-tree is set without free-space-tree (valid) and no-holes".into());
        }
    } else if has(ObjectId::BLOCK_GROUP_TREE) {
        add("there is a block-group tree, but its bit is not set".into());
    }
    if !compat_ro.contains(CompatRo::FREE_SPACE_TREE) {
        if compat_ro.contains(CompatRo::FREE_SPACE_TREE_VALID) {
            add("free-space-tree-valid is set without free-space-tree".into());
        }
        if has(ObjectId::FREE_SPACE_TREE) && rooted {
            add("there is a free-space tree, but its bit is not set".into());
        }
    }
    if compat_ro.unknown() != 0 {
        add(format!("unknown read-only-compatible features {:#x}", compat_ro.unknown()));
    }
    let seen = Incompat::from_bits_retain(world.features.load(Relaxed));
    let missing = seen & !sb.incompat();
    if !missing.is_empty() {
        add(format!("{} is in use, but not set", missing.names().join(", ")));
    }
    if !world.has(Incompat::MIXED_BACKREF) {
        add("mixed-backref is not set".into());
    }
}

/// The backup roots must be possible, and the one of this generation say what the superblock says.
pub(crate) fn backups(sb: &Superblock, findings: &Findings) {
    for (slot, backup) in sb.backup_roots.iter().enumerate() {
        let backup: &BackupRoot = backup;
        if *backup == BackupRoot::new_zeroed() {
            continue;
        }
        let mut wrong = Vec::new();
        let newest = sb.generation().0;
        let roots = [
            ("tree", backup.tree_root, backup.tree_root_gen, backup.tree_root_level),
            ("chunk", backup.chunk_root, backup.chunk_root_gen, backup.chunk_root_level),
            ("extent", backup.extent_root, backup.extent_root_gen, backup.extent_root_level),
            ("fs", backup.fs_root, backup.fs_root_gen, backup.fs_root_level),
            ("dev", backup.dev_root, backup.dev_root_gen, backup.dev_root_level),
            ("csum", backup.csum_root, backup.csum_root_gen, backup.csum_root_level),
        ];
        for (name, at, generation, level) in roots {
            if !at.get().is_multiple_of(u64::from(SECTOR_SIZE)) {
                wrong.push(format!("{name}_root is {at}"));
            }
            // Linux takes some of these from memory, where the next transaction may have begun.
            if generation.get() > newest.saturating_add(1) {
                wrong.push(format!("{name}_root_gen is {generation}, the generation {newest}"));
            }
            if level >= MAX_LEVEL {
                wrong.push(format!("{name}_root_level is {level}"));
            }
        }
        if !wrong.is_empty() {
            let what = format!("backup root {slot}: {}", wrong.join("; "));
            findings.add(Finding::new(Kind::SuperBackupRoot, what));
        }
    }
    // Linux takes the roots from memory, where the next transaction may have moved them already:
    // then the slot of this commit has the next generation, and one of this generation may be what
    // the commit before saw of it. Without such a slot, one must be right.
    let newest = sb.generation().0;
    let current: Vec<_> =
        sb.backup_roots.iter().filter(|b| b.tree_root_gen.get() == newest).collect();
    let agrees = |b: &&BackupRoot| {
        let same_chunks = b.chunk_root_gen.get() != sb.chunk_root_generation().0
            || (b.chunk_root.get(), b.chunk_root_level) == (sb.chunk_root().0, sb.chunk_root_level);
        (b.tree_root.get(), b.tree_root_level) == (sb.root().0, sb.root_level) && same_chunks
    };
    let overtaken =
        sb.backup_roots.iter().any(|b| b.tree_root_gen.get() == newest.saturating_add(1));
    if !current.is_empty() && !overtaken && !current.iter().any(agrees) {
        let what = format!("no backup root of generation {newest} has the superblock's roots");
        findings.add(Finding::new(Kind::SuperBackupRoot, what));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_format::Logical;

    /// Kinds found in backup roots of (address, generation), where the superblock of generation 10
    /// has its root at 1 MiB.
    fn found(slots: &[(Logical, u64)]) -> bool {
        let mut sb = Superblock::new_zeroed();
        sb.generation.set(10);
        sb.root.set(1 << 20);
        for (slot, (at, generation)) in sb.backup_roots.iter_mut().zip(slots) {
            slot.tree_root.set(at.0);
            slot.tree_root_gen.set(*generation);
            slot.chunk_root_gen.set(3);
        }
        let findings = Findings::new(10);
        backups(&sb, &findings);
        !findings.finish().0.is_empty()
    }

    #[test]
    fn backup_roots_that_linux_leaves_are_right() {
        const HERE: Logical = Logical(1 << 20);
        let at = Logical;
        assert!(!found(&[]));
        assert!(!found(&[(HERE, 10), (at(4096), 9), (at(8192), 8)]));
        assert!(found(&[(HERE.plus(4096), 10), (at(4096), 9)]));
        // The commit before saw this transaction's root before it was written, this one is right.
        assert!(!found(&[(at(8192), 10), (HERE, 10), (at(4096), 8)]));
        // As before, and this one saw that of the next.
        assert!(!found(&[(at(8192), 10), (at(12288), 11), (at(4096), 8)]));
        assert!(!found(&[(at(12288), 11), (at(4096), 9)]));
        assert!(found(&[(at(12288), 12)]));
        assert!(found(&[(HERE.plus(1), 9)]));
    }
}
