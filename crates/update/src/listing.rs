//! What a directory of the image holds, in the order of paths.
//!
//! Attributes are read for some names at a time, ahead of the walk. That is possible because an
//! inode with one name does not change before the walk comes to that name. Of an inode with more
//! names, another one may have been changed, so its attributes are read when they are needed.

use larder_fs::{FileKind, Filesystem, InodeId, Surveyed};
use std::collections::VecDeque;

/// Names whose attributes are read at once.
const AT_ONCE: usize = 512;

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

/// Names that the walk has not come to.
#[derive(Debug, Default)]
pub(crate) struct Left {
    names: std::vec::IntoIter<Name>,
    /// Attributes of the first of them. `None`: to be read when they are needed.
    surveyed: VecDeque<Option<Surveyed>>,
}

impl Left {
    /// The names of `dir`.
    pub(crate) fn of(fs: &Filesystem, dir: InodeId) -> larder_fs::Result<Self> {
        Ok(Self { names: of(fs, dir)?.into_iter(), surveyed: VecDeque::new() })
    }

    /// The next name, if `when` says so.
    pub(crate) fn next_if(&mut self, when: impl FnOnce(&Name) -> bool) -> Option<Name> {
        if !self.names.as_slice().first().is_some_and(when) {
            return None;
        }
        self.surveyed.pop_front();
        self.names.next()
    }

    /// The next name, if it is this one, with what is known of the inode.
    pub(crate) fn take(
        &mut self,
        fs: &Filesystem,
        dir: InodeId,
        name: &[u8],
    ) -> larder_fs::Result<Option<(Name, Surveyed)>> {
        if self.names.as_slice().first().is_none_or(|next| next.name != name) {
            return Ok(None);
        }
        if self.surveyed.is_empty() {
            self.survey(fs, dir)?;
        }
        let next = self.names.next().expect("it was there just now");
        let surveyed = match self.surveyed.pop_front().flatten() {
            Some(surveyed) => surveyed,
            None => one(fs, next.id)?,
        };
        Ok(Some((next, surveyed)))
    }

    /// Reads attributes of the names that come next.
    fn survey(&mut self, fs: &Filesystem, dir: InodeId) -> larder_fs::Result<()> {
        let next = &self.names.as_slice()[..AT_ONCE.min(self.names.len())];
        let within: Vec<_> = next.iter().filter(|name| !name.is_subvolume(dir)).collect();
        let inos: Vec<u64> = within.iter().map(|name| name.id.ino).collect();
        let mut surveyed = fs.survey(dir.subvol, &inos)?.into_iter();
        self.surveyed = next
            .iter()
            .map(|name| if name.is_subvolume(dir) { None } else { surveyed.next() })
            .map(|found| found.filter(|found| found.attr.nlink == 1))
            .collect();
        Ok(())
    }
}

/// Attributes of an inode as they are now.
pub(crate) fn one(fs: &Filesystem, id: InodeId) -> larder_fs::Result<Surveyed> {
    let mut surveyed = fs.survey(id.subvol, &[id.ino])?;
    Ok(surveyed.pop().expect("one was asked for"))
}

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
