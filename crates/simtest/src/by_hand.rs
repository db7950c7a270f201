//! Short ways for tests that use an engine by hand: a file with some bytes, what it holds, and what
//! `larder check` has against the devices.

use larder_check::{Finding, Options};
use larder_fs::{FileKind, Filesystem, InodeId, NewInode, Result};
use larder_volume::Device;
use std::sync::Arc;

/// A new inode of root's.
#[must_use]
pub fn new(kind: FileKind) -> NewInode<'static> {
    NewInode { kind, perm: 0o755, uid: 0, gid: 0, rdev: 0, target: b"", xattrs: &[] }
}

/// Writes `data` to the beginning of a file, which is made if there is none.
///
/// # Errors
/// Those of the engine.
pub fn put(fs: &Filesystem, dir: InodeId, name: &str, data: &[u8]) -> Result<InodeId> {
    let id = match fs.lookup(dir, name.as_bytes()) {
        Ok(found) => found.id,
        Err(_) => fs.create(dir, name.as_bytes(), &new(FileKind::Regular))?.id,
    };
    fs.write(id, 0, data)?;
    Ok(id)
}

/// What a file holds.
///
/// # Panics
/// It cannot be read.
#[must_use]
pub fn content(fs: &Filesystem, id: InodeId) -> Vec<u8> {
    let mut data = vec![0; usize::try_from(fs.getattr(id).expect("an inode").size).expect("short")];
    assert_eq!(fs.read(id, 0, &mut data).expect("readable"), data.len());
    data
}

/// Bytes that depend on a number, of some length.
#[must_use]
pub fn bytes(n: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (n * 31 + i / 7) as u8 ^ (i >> 8) as u8).collect()
}

/// What `larder check --data` has against a file system, of the findings that matter.
///
/// # Errors
/// The first finding; it cannot be checked.
pub fn complaints(
    devices: &[Arc<dyn Device>],
    matters: impl Fn(&Finding) -> bool,
) -> std::result::Result<(), String> {
    let options = Options { data: true, ..Options::default() };
    let report = larder_check::check(devices, &options, &|_| ()).map_err(|e| e.to_string())?;
    match report.findings.iter().find(|finding| matters(finding)) {
        Some(f) => Err(format!("check: {}: {:?} {:?}: {}", f.kind, f.tree, f.key, f.what)),
        None => Ok(()),
    }
}
