//! Removing a tree, but no subvolume.

use crate::error::At;
use crate::listing::{self, Name};
use larder_fs::{FileKind, Filesystem, InodeId, Result};
use larder_sources::TreePath;

/// A directory that is being emptied.
struct Emptied {
    /// The directory that has it, and its name there.
    parent: InodeId,
    name: Vec<u8>,
    id: InodeId,
    left: Vec<Name>,
    /// Something in it stays, so it stays as well.
    stays: bool,
}

/// Removes `name` from `dir`, with everything in it. Subvolumes stay, and so do the directories
/// that lead to them. Returns whether the name is gone.
pub(crate) fn remove(fs: &Filesystem, dir: InodeId, name: &Name) -> Result<bool> {
    let mut stack: Vec<Emptied> = Vec::new();
    let mut gone = take_away(fs, dir, name.clone(), &mut stack)?;
    while let Some(top) = stack.last_mut() {
        if let Some(next) = top.left.pop() {
            let parent = top.id;
            if take_away(fs, parent, next, &mut stack)? == Some(false) {
                stack.last_mut().expect("its directory is still being emptied").stays = true;
            }
            continue;
        }
        let done = stack.pop().expect("it was looked at just now");
        if !done.stays {
            fs.rmdir(done.parent, &done.name)?;
        }
        match stack.last_mut() {
            Some(above) => above.stays |= done.stays,
            None => gone = Some(!done.stays),
        }
    }
    Ok(gone == Some(true))
}

/// Calls `each` for every name of a file that [`remove`] would take away, and returns whether the
/// name itself would be gone.
pub(crate) fn would_remove(
    fs: &Filesystem,
    dir: InodeId,
    name: &Name,
    path: &TreePath,
    each: &mut dyn FnMut(InodeId) -> crate::Result<()>,
) -> crate::Result<bool> {
    let mut gone = true;
    let mut left = vec![(dir, name.clone())];
    while let Some((dir, name)) = left.pop() {
        if name.is_subvolume(dir) {
            gone = false;
        } else if name.kind == FileKind::Directory {
            let names = listing::of(fs, name.id).at(path, "look at it")?;
            left.extend(names.into_iter().map(|below| (name.id, below)));
        } else {
            each(name.id)?;
        }
    }
    Ok(gone)
}

/// Removes a name, or says that it stays; a directory is put on the stack, to be emptied first.
fn take_away(
    fs: &Filesystem,
    parent: InodeId,
    name: Name,
    stack: &mut Vec<Emptied>,
) -> Result<Option<bool>> {
    if name.is_subvolume(parent) {
        return Ok(Some(false));
    }
    if name.kind != FileKind::Directory {
        fs.unlink(parent, &name.name)?;
        return Ok(Some(true));
    }
    let left = listing::of(fs, name.id)?;
    stack.push(Emptied { parent, name: name.name, id: name.id, left, stays: false });
    Ok(None)
}
