//! The devices of an image: which files or block devices the word IMAGE of a command line means.
//!
//! IMAGE is one name, or several with commas between them (`A,B,C`). A name that exists as a whole
//! is one name, whatever is in it. A file system on several devices is named by any of them: the
//! others are looked for. Those of a block device are block devices with the same file system's id.
//! Those of an image file are files in its directory, and nowhere else, since a copy that lies
//! somewhere else is not meant. Where two could be meant, the caller has to name one.
//!
//! The seeds upon which a file system is built are looked for in the same places. They are opened
//! to be read, because others may use them at the same time.

use crate::failure::Advise;
use crate::print;
use anyhow::anyhow;
use larder_format::{DeviceId, Physical, SUPER_OFFSETS, SUPER_SIZE, SuperFlags, Superblock};
use larder_volume::{Device, FileDevice, meant, read_superblock};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Most files of a directory that are looked at.
const MOST_FILES: usize = 10_000;

/// The names in IMAGE.
pub(crate) fn names(image: &Path) -> Vec<PathBuf> {
    let bytes = image.as_os_str().as_bytes();
    if !bytes.contains(&b',') || image.symlink_metadata().is_ok() {
        return vec![image.to_owned()];
    }
    let parts = bytes.split(|b| *b == b',').filter(|part| !part.is_empty());
    parts.map(|part| PathBuf::from(OsStr::from_bytes(part))).collect()
}

/// Does every name in IMAGE exist, and is none a directory?
pub(crate) fn are_there(image: &Path) -> bool {
    // A directory cannot be an image, but saying so is better than "no such file".
    names(image).iter().all(|name| name.metadata().is_ok_and(|m| !m.is_dir()))
}

/// One word for several names.
pub(crate) fn join(names: &[PathBuf]) -> PathBuf {
    let words: Vec<&OsStr> = names.iter().map(|name| name.as_os_str()).collect();
    PathBuf::from(words.join(OsStr::new(",")))
}

/// What a device is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// It belongs to the file system that is meant.
    Own,
    /// It is a seed, which is only read.
    Seed,
}

impl Part {
    fn of(superblock: &Superblock) -> Self {
        let is_seed = superblock.super_flags().contains(SuperFlags::SEEDING);
        if is_seed { Self::Seed } else { Self::Own }
    }
}

/// Are all of these devices seeds, upon which others are built?
pub(crate) fn are_seeds(devices: &[PathBuf]) -> bool {
    let is_seed =
        |path: &PathBuf| superblock_of(path).is_some_and(|sb| Part::of(&sb) == Part::Seed);
    !devices.is_empty() && devices.iter().all(is_seed)
}

/// Opens the devices that are named, and then those that are not.
///
/// # Errors
/// Those of `open`; a device that is not named, and could be one of two.
pub(crate) fn open(
    named: Vec<PathBuf>,
    open: impl Fn(&Path, Part) -> anyhow::Result<FileDevice>,
) -> anyhow::Result<Vec<Arc<FileDevice>>> {
    let part = |name: &Path| superblock_of(name).map_or(Part::Own, |sb| Part::of(&sb));
    open_as(named, open, part)
}

/// The same, of a file system that may be a seed itself and is written nevertheless. The seeds upon
/// which it is built in turn are left out.
///
/// # Errors
/// As [`open`].
pub(crate) fn open_own(
    named: Vec<PathBuf>,
    open: impl Fn(&Path) -> anyhow::Result<FileDevice>,
) -> anyhow::Result<Vec<Arc<FileDevice>>> {
    let own = |path: &Path, _| open(path);
    open_as(named, own, |_| Part::Own)
}

fn open_as(
    named: Vec<PathBuf>,
    open: impl Fn(&Path, Part) -> anyhow::Result<FileDevice>,
    part: impl Fn(&Path) -> Part,
) -> anyhow::Result<Vec<Arc<FileDevice>>> {
    let mut devices = Vec::with_capacity(named.len());
    let names = named.len();
    for name in named {
        devices.push(Arc::new(open(&name, part(&name))?));
    }
    // What is wrong with a superblock is for others to say.
    let read = devices.iter().map(|device| read_superblock(&**device));
    let Ok(superblocks) = read.collect::<Result<Vec<_>, _>>() else { return Ok(devices) };
    let Some(first) = meant(superblocks.iter().map(|sb| &**sb)) else { return Ok(devices) };
    if first.num_devices() <= devices.len() as u64 {
        return Ok(devices);
    }
    let own = superblocks.iter().position(|sb| sb.fsid == first.fsid).unwrap_or(0);
    let known: Vec<DeviceId> = superblocks.iter().map(|sb| sb.device_id()).collect();
    for sibling in siblings(&devices[own], first, &known)? {
        tracing::info!(device = %sibling.display(), "a device of the same file system");
        devices.push(Arc::new(open(&sibling, part(&sibling))?));
    }
    if first.num_devices() > devices.len() as u64 && part(devices[own].path()) == Part::Own {
        for seed in seeds(&devices, own)? {
            tracing::info!(device = %seed.display(), "a seed of the file system");
            devices.push(Arc::new(open(&seed, Part::Seed)?));
        }
    }
    leave_out_former(&mut devices, names);
    Ok(devices)
}

/// Leaves devices out that have left the file system but still say that they belong to it, unless
/// they are among the first ones, which were named.
fn leave_out_former(devices: &mut Vec<Arc<FileDevice>>, names: usize) {
    if devices.len() == names {
        return;
    }
    // What is wrong with the file system is for others to say.
    let former = larder_fs::former_devices(as_devices(devices)).unwrap_or_default();
    let mut at = 0;
    devices.retain(|device| {
        let is_named = at < names;
        at += 1;
        let id = read_superblock(&**device).map(|sb| sb.device_id());
        let is_left_out = !is_named && id.is_ok_and(|id| former.contains(&id));
        if is_left_out {
            tracing::warn!(
                device = %device.path().display(),
                "has left the file system that it lies beside, and is not used"
            );
        }
        !is_left_out
    });
}

fn as_devices(devices: &[Arc<FileDevice>]) -> Vec<Arc<dyn Device>> {
    devices.iter().map(|device| Arc::clone(device) as Arc<dyn Device>).collect()
}

/// The devices of seeds that a file system needs and that are not among these, as far as they lie
/// beside `own`.
fn seeds(devices: &[Arc<FileDevice>], own: usize) -> anyhow::Result<Vec<PathBuf>> {
    // What is wrong with the file system is for others to say.
    let missing = larder_fs::missing_devices(as_devices(devices)).unwrap_or_default();
    let candidates: Vec<(PathBuf, Box<Superblock>)> = candidates(&devices[own])
        .into_iter()
        .filter_map(|path| superblock_of(&path).map(|sb| (path, sb)))
        .filter(|(_, sb)| Part::of(sb) == Part::Seed)
        .collect();
    let mut found = Vec::new();
    for device in missing {
        let is_it = |sb: &Superblock| {
            device.seed == Some(sb.metadata_fsid()) && sb.dev_item.uuid == device.uuid
        };
        let mut those = candidates.iter().filter(|(_, sb)| is_it(sb)).map(|(path, _)| path);
        match (those.next(), those.next()) {
            (Some(a), Some(b)) => return Err(one_of_two(device.id, a, b)).could_not_run(),
            (first, _) => found.extend(first.cloned()),
        }
    }
    Ok(found)
}

fn one_of_two(id: DeviceId, a: &Path, b: &Path) -> anyhow::Error {
    let shown = |path: &Path| match superblock_of(path) {
        Some(sb) => format!("{} (generation {})", print::path(path), sb.generation()),
        None => print::path(path),
    };
    let what = anyhow!("device {id} of the file system could be {} or {}", shown(a), shown(b));
    let hint = "name every device that is meant, with commas between them: `A,B`";
    Err::<(), _>(what).hint(hint).unwrap_err()
}

/// Where the other devices of a file system may be.
fn candidates(device: &FileDevice) -> Vec<PathBuf> {
    if device.is_block_device() { block_devices() } else { neighbours(device.path()) }
}

/// Other devices of the file system that a device belongs to, as far as they can be looked at: a
/// daemon is found by the device that it was given.
pub(crate) fn others(device: &Path) -> Vec<PathBuf> {
    let Some(superblock) = superblock_of(device).filter(|sb| sb.num_devices() > 1) else {
        return Vec::new();
    };
    let is_block = device.metadata().is_ok_and(|m| m.file_type().is_block_device());
    let mut all = if is_block { block_devices() } else { neighbours(device) };
    all.retain(|path| {
        path != device && superblock_of(path).is_some_and(|other| other.fsid == superblock.fsid)
    });
    all
}

/// The devices of the same file system that are not known yet, by number.
fn siblings(
    device: &FileDevice,
    superblock: &Superblock,
    known: &[DeviceId],
) -> anyhow::Result<Vec<PathBuf>> {
    let mut found: BTreeMap<DeviceId, PathBuf> = BTreeMap::new();
    for path in candidates(device) {
        let Some(other) = superblock_of(&path) else { continue };
        let id = other.device_id();
        if other.fsid != superblock.fsid || known.contains(&id) {
            continue;
        }
        if let Some(first) = found.insert(id, path.clone()) {
            return Err(one_of_two(id, &first, &path)).could_not_run();
        }
    }
    Ok(found.into_values().collect())
}

/// The superblock of a file or block device, without a lock.
pub(crate) fn superblock_of(path: &Path) -> Option<Box<Superblock>> {
    let kind = path.metadata().ok()?.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        return None;
    }
    let Physical(at) = SUPER_OFFSETS[0];
    let mut bytes = vec![0; SUPER_SIZE];
    File::open(path).ok()?.read_exact_at(&mut bytes, at).ok()?;
    Superblock::parse(&bytes, SUPER_OFFSETS[0]).ok()
}

/// The files beside an image file, by name.
fn neighbours(path: &Path) -> Vec<PathBuf> {
    let dir = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    // A link leads to a file that is met by its own name, or lies elsewhere.
    let files = entries.filter(|e| e.file_type().is_ok_and(|kind| kind.is_file()));
    let mut all: Vec<PathBuf> = files.map(|e| dir.join(e.file_name())).take(MOST_FILES).collect();
    all.sort();
    all
}

/// All block devices of this machine, by name.
fn block_devices() -> Vec<PathBuf> {
    let entries = std::fs::read_dir("/sys/class/block").into_iter().flatten().flatten();
    let device = |name: &OsStr| {
        // In names of devices sysfs writes a slash as this.
        let name: Vec<u8> =
            name.as_bytes().iter().map(|b| if *b == b'!' { b'/' } else { *b }).collect();
        Path::new("/dev").join(OsStr::from_bytes(&name))
    };
    let mut all: Vec<PathBuf> = entries.map(|e| device(&e.file_name())).collect();
    all.sort();
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commas_separate_names_unless_the_whole_exists() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        for name in ["a", "b", "c,d"] {
            std::fs::write(path(name), b"").unwrap();
        }
        let both = join(&[path("a"), path("b")]);
        assert_eq!(names(&both), [path("a"), path("b")]);
        assert!(are_there(&both));
        assert_eq!(names(&path("c,d")), [path("c,d")]);
        let missing = join(&[path("a"), path("x")]);
        assert_eq!(names(&missing), [path("a"), path("x")]);
        assert!(!are_there(&missing));
        assert!(!are_there(dir.path()));
    }
}
