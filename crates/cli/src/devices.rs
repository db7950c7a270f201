//! The devices of an image: which files or block devices the word IMAGE of a command line means.
//!
//! IMAGE is one name, or several with commas between them (`A,B,C`). A name that exists as a whole
//! is one name, whatever is in it. A file system on several devices is named by any of them: the
//! others are looked for. Those of a block device are block devices with the same file system's id.
//! Those of an image file are files in its directory, and nowhere else, since a copy that lies
//! somewhere else is not meant. Where two could be meant, the caller has to name one.

use crate::failure::Advise;
use crate::print;
use anyhow::anyhow;
use larder_format::{DeviceId, Physical, SUPER_OFFSETS, SUPER_SIZE, Superblock};
use larder_volume::{FileDevice, read_superblock};
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

/// Opens the devices that are named, and then those that are not.
///
/// # Errors
/// Those of `open`; a device that is not named, and could be one of two.
pub(crate) fn open(
    named: Vec<PathBuf>,
    open: impl Fn(&Path) -> anyhow::Result<FileDevice>,
) -> anyhow::Result<Vec<Arc<FileDevice>>> {
    let mut devices = Vec::with_capacity(named.len());
    for name in named {
        devices.push(Arc::new(open(&name)?));
    }
    // What is wrong with a superblock is for others to say.
    let read = devices.iter().map(|device| read_superblock(&**device));
    let Ok(superblocks) = read.collect::<Result<Vec<_>, _>>() else { return Ok(devices) };
    let Some(first) = superblocks.first() else { return Ok(devices) };
    if first.num_devices() > devices.len() as u64 {
        let known: Vec<DeviceId> = superblocks.iter().map(|sb| sb.device_id()).collect();
        for sibling in siblings(&devices[0], first, &known)? {
            tracing::info!(device = %sibling.display(), "a device of the same file system");
            devices.push(Arc::new(open(&sibling)?));
        }
    }
    Ok(devices)
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
    let candidates =
        if device.is_block_device() { block_devices() } else { neighbours(device.path()) };
    let mut found: BTreeMap<DeviceId, PathBuf> = BTreeMap::new();
    for path in candidates {
        let Some(other) = superblock_of(&path) else { continue };
        let id = other.device_id();
        if other.fsid != superblock.fsid || known.contains(&id) {
            continue;
        }
        if let Some(first) = found.insert(id, path.clone()) {
            let (a, b) = (print::path(&first), print::path(&path));
            return Err(anyhow!("device {id} of the file system could be {a} or {b}"))
                .hint("name every device that is meant, with commas between them: `A,B`")
                .could_not_run();
        }
    }
    Ok(found.into_values().collect())
}

/// The superblock of a file or block device, without a lock.
fn superblock_of(path: &Path) -> Option<Box<Superblock>> {
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
