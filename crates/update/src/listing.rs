//! What a directory of the image holds, in the order of paths.

use larder_fs::{FileKind, Filesystem, InodeId};

/// A name in a directory, and what is there.
#[derive(Clone, Debug)]
pub(crate) struct Name {
    pub(crate) name: Vec<u8>,
    pub(crate) id: InodeId,
    pub(crate) kind: FileKind,
}

impl Name {
    /// Is it the root of a subvolume, or what a snapshot shows in its place?
    pub(crate) fn is_subvolume(&self, dir: InodeId) -> bool {
        self.id.subvol != dir.subvol || self.id.ino == SUBVOLUME_STUB
    }
}

/// Number of the empty directory that a snapshot shows where its source had a subvolume.
const SUBVOLUME_STUB: u64 = 2;

/// All names of `dir`, sorted.
pub(crate) fn of(fs: &Filesystem, dir: InodeId) -> larder_fs::Result<Vec<Name>> {
    let mut names = Vec::new();
    fs.readdir(dir, 0, &mut |entry| {
        if entry.name != b"." && entry.name != b".." {
            names.push(Name { name: entry.name.to_vec(), id: entry.id, kind: entry.kind });
        }
        true
    })?;
    names.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    Ok(names)
}
