//! Owner, permissions, extended attributes, flags and times: which are sent, and in which order.
//!
//! The order matters, because the receiver's kernel changes attributes on its own. A new owner
//! takes set-user-id bits and capabilities away, and so may data. An ACL changes permissions. So an
//! attribute goes before the data, when it is certainly there; then come data, owner, permissions,
//! attributes, and at last the times. What decides how data is stored comes before the data.
//!
//! Times of directories, and what is inherited from them, come at the end of the stream.

use crate::error::Result;
use crate::inherited::is_inherited;
use crate::output::Output;
use crate::pair::{Pair, kind_of};
use crate::places::Places;
use larder_format::ObjectId;
use larder_format::items::{FileType, InodeItem, inode::PERMISSIONS};
use larder_stream::{Command, Protocol};

/// An attribute that is lost with a change of owner or of data.
const CAPABILITY: &[u8] = b"security.capability";
/// Attributes of the file system itself, which say how data is stored.
const STORAGE: &[u8] = b"btrfs.";
/// Set-user-id and set-group-id.
const SET_ID: u32 = 0o6000;

type Xattrs = Vec<(Vec<u8>, Vec<u8>)>;

/// An inode of the newer subvolume, and what it was.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Change {
    pub(crate) ino: ObjectId,
    /// The same inode in the older subvolume.
    pub(crate) old: Option<InodeItem>,
    pub(crate) new: InodeItem,
    /// Do extended attributes differ?
    pub(crate) xattrs: bool,
}

/// The extended attributes of both sides: none of the older one for a new inode.
fn xattrs_of(pair: &Pair<'_>, change: &Change) -> Result<(Xattrs, Xattrs)> {
    let old = match (change.old, pair.old) {
        (Some(_), Some(old)) => old.xattrs(change.ino)?,
        _ => Vec::new(),
    };
    Ok((old, pair.new.xattrs(change.ino)?))
}

fn value<'a>(xattrs: &'a Xattrs, name: &[u8]) -> Option<&'a [u8]> {
    let at = xattrs.binary_search_by(|(n, _)| n[..].cmp(name)).ok()?;
    Some(&xattrs[at].1)
}

/// Does this attribute of an inode come at the end of the stream?
fn is_late(change: &Change, name: &[u8]) -> bool {
    change.new.is_dir() && is_inherited(name)
}

/// What comes before the data: attributes that go, and those about storage.
pub(crate) fn before_data(
    pair: &Pair<'_>,
    out: &mut Output<'_>,
    path: &[u8],
    change: &Change,
) -> Result<()> {
    if !change.xattrs {
        return Ok(());
    }
    let (old, new) = xattrs_of(pair, change)?;
    for (name, _) in &old {
        if value(&new, name).is_none() && !is_late(change, name) {
            out.write(&Command::RemoveXattr { path, name })?;
        }
    }
    for (name, data) in &new {
        let early = name.starts_with(STORAGE) && !is_late(change, name);
        if early && value(&old, name) != Some(data) {
            out.write(&Command::SetXattr { path, name, value: data })?;
        }
    }
    Ok(())
}

/// What comes behind the data. `wrote` says that there was some.
pub(crate) fn after_data(
    places: &mut Places<'_>,
    pair: &Pair<'_>,
    out: &mut Output<'_>,
    path: &[u8],
    change: &Change,
    wrote: bool,
) -> Result<()> {
    let (old, new) = (change.old, change.new);
    let owner = old.is_none_or(|old| (old.uid, old.gid) != (new.uid, new.gid));
    if owner {
        let (uid, gid) = (u64::from(new.uid.get()), u64::from(new.gid.get()));
        out.write(&Command::Chown { path, uid, gid })?;
    }
    let lost = owner || wrote;
    let mode = new.mode.get() & PERMISSIONS;
    let differs = old.is_none_or(|old| old.mode.get() & PERMISSIONS != mode);
    if kind_of(&new)? != FileType::Symlink && (differs || (lost && mode & SET_ID != 0)) {
        out.write(&Command::Chmod { path, mode: u64::from(mode) })?;
    }
    set_xattrs(places, pair, out, path, change, lost)?;
    if out.protocol() >= Protocol::V2
        && let Some(old) = old
        && old.flags != new.flags
    {
        out.write(&Command::Fileattr { path, attr: new.flags.get() })?;
    }
    if new.is_dir() {
        places.touched.insert(change.ino);
        return Ok(());
    }
    times(out, path, &new)
}

fn set_xattrs(
    places: &mut Places<'_>,
    pair: &Pair<'_>,
    out: &mut Output<'_>,
    path: &[u8],
    change: &Change,
    lost: bool,
) -> Result<()> {
    // A new inode without attributes needs no look.
    if !change.xattrs && (change.old.is_none() || !lost) {
        return Ok(());
    }
    let (old, new) = xattrs_of(pair, change)?;
    let names = old.iter().chain(&new).map(|(name, _)| &name[..]);
    if names.clone().any(|name| is_late(change, name) && value(&old, name) != value(&new, name)) {
        places.inherited.give_later(change.ino);
    }
    for (name, data) in &new {
        let gone = lost && name == CAPABILITY;
        let early = name.starts_with(STORAGE) || is_late(change, name);
        if !early && (gone || value(&old, name) != Some(data)) {
            out.write(&Command::SetXattr { path, name, value: data })?;
        }
    }
    Ok(())
}

fn times(out: &mut Output<'_>, path: &[u8], inode: &InodeItem) -> Result<()> {
    let otime = (out.protocol() >= Protocol::V2).then_some(inode.otime);
    let (atime, mtime, ctime) = (inode.atime, inode.mtime, inode.ctime);
    out.write(&Command::Utimes { path, atime, mtime, ctime, otime })
}

/// What directories get when nothing is made in them any more.
pub(crate) fn finish_directories(
    places: &mut Places<'_>,
    pair: &Pair<'_>,
    out: &mut Output<'_>,
) -> Result<()> {
    let late: Vec<ObjectId> = places.inherited.late().collect();
    for dir in late {
        places.touched.insert(dir);
        inherited(places, pair, out, dir)?;
    }
    let touched = std::mem::take(&mut places.touched);
    for dir in touched.iter() {
        if let Some(inode) = pair.new.inode(dir)? {
            let path = places.path(out, dir)?;
            times(out, &path, &inode)?;
        }
    }
    Ok(())
}

/// Gives a directory what is inherited from it.
fn inherited(
    places: &mut Places<'_>,
    pair: &Pair<'_>,
    out: &mut Output<'_>,
    dir: ObjectId,
) -> Result<()> {
    let Some(new) = pair.new.inode(dir)? else { return Ok(()) };
    let old = if pair.is_same(dir)? { pair.old_inode(dir)? } else { None };
    let (old, new) = xattrs_of(pair, &Change { ino: dir, old, new, xattrs: true })?;
    let there = if places.inherited.is_suspended(dir) { Vec::new() } else { old };
    let path = places.path(out, dir)?;
    for (name, _) in there.iter().filter(|(name, _)| is_inherited(name)) {
        if value(&new, name).is_none() {
            out.write(&Command::RemoveXattr { path: &path, name })?;
        }
    }
    for (name, data) in new.iter().filter(|(name, _)| is_inherited(name)) {
        if value(&there, name) != Some(data) {
            out.write(&Command::SetXattr { path: &path, name, value: data })?;
        }
    }
    Ok(())
}
