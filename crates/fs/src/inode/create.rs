//! Making inodes.
//!
//! A new inode, its first name, its attributes and, of a symlink, its target are written in one
//! edit. The object in memory is entered into the table before that edit, so every caller that
//! finds the name finds the same object.

use super::allowed::check_takes_names;
use super::draft::{Draft, Prepared, prepare};
use super::names::{self, Name, check_new_name, name_bytes};
use super::{Inode, attr, dir, to_file_type, xattr};
use crate::api::{Attr, FileKind, InodeId, NewInode, Timestamp, XattrMode, to_timespec};
use crate::engine::Core;
use crate::engine::fronts::FrontId;
use crate::error::{Error, Place, Result};
use crate::transaction::Handle;
use larder_format::items::file_extent::INLINE_HEADER_SIZE;
use larder_format::items::inode::{PERMISSIONS, type_to_mode};
use larder_format::items::keys::{extent_data_key, inode_key, xattr_key};
use larder_format::items::{Compression, FileExtent, InlineExtent, InodeFlags, InodeItem};
use larder_format::{FileOffset, Generation, ObjectId, SECTOR_SIZE};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use zerocopy::IntoBytes;

/// Longest target of a symlink, in bytes; shorter where nodes are small.
const TARGET_MAX: usize = SECTOR_SIZE as usize - 1;

/// An inode that is being made.
pub(super) struct Nascent<'a> {
    ino: u64,
    new: &'a NewInode<'a>,
    flags: InodeFlags,
    property: Option<(Vec<u8>, Vec<u8>)>,
    nlink: u32,
    now: Timestamp,
}

impl<'a> Nascent<'a> {
    /// Gives the inode a number, and what it inherits from the directory.
    pub(super) fn new(core: &Core, dir: &Inode, new: &'a NewInode<'a>, nlink: u32) -> Result<Self> {
        if new.kind == FileKind::Symlink {
            let max = TARGET_MAX
                .min(larder_format::node::max_item_size(core.nodesize()) - INLINE_HEADER_SIZE);
            match new.target.len() {
                0 => return Err(Error::Invalid("empty target")),
                n if n > max => return Err(Error::NameTooLong),
                _ => {}
            }
        }
        let property = xattr::inherited_property(core, dir, new.kind)?;
        let flags = inherited_flags(dir.flags(), new.kind) | mounted_flags(core, new.kind);
        Ok(Self { ino: dir.subvol.new_ino(core)?, new, flags, property, nlink, now: core.now() })
    }
    /// The root directory of a new subvolume. It inherits no flags. Its property is that of the
    /// root directory of the subvolume around it.
    pub(super) fn root_of_subvolume(
        core: &Core,
        above: &Inode,
        new: &'a NewInode<'a>,
    ) -> Result<Self> {
        let property = xattr::inherited_property(core, above, new.kind)?;
        let flags = InodeFlags::empty();
        Ok(Self { ino: ObjectId::FIRST_FREE.0, new, flags, property, nlink: 1, now: core.now() })
    }
    /// The time at which the inode is made.
    pub(super) fn time(&self) -> Timestamp {
        self.now
    }
    pub(super) fn object(&self) -> ObjectId {
        ObjectId(self.ino)
    }
    fn item(&self, generation: Generation) -> InodeItem {
        let time = to_timespec(self.now);
        let size = self.new.target.len() as u64;
        let (size, rdev) = match self.new.kind {
            FileKind::Symlink => (size, 0),
            FileKind::CharDevice | FileKind::BlockDevice => (0, self.new.rdev),
            _ => (0, 0),
        };
        let kind = type_to_mode(to_file_type(self.new.kind)).expect("every kind has type bits");
        let mut item = InodeItem {
            generation: generation.0.into(),
            transid: generation.0.into(),
            size: size.into(),
            nbytes: size.into(),
            nlink: self.nlink.into(),
            uid: self.new.uid.into(),
            gid: self.new.gid.into(),
            mode: (kind | (self.new.perm & PERMISSIONS)).into(),
            rdev: rdev.into(),
            atime: time,
            ctime: time,
            mtime: time,
            otime: time,
            ..InodeItem::default()
        };
        item.set_inode_flags(self.flags);
        item
    }
    /// Drafts everything but names.
    pub(super) fn draft(&self, d: &mut Draft<'_>) -> Result<()> {
        let generation = d.generation;
        d.insert_new(&inode_key(self.object()), self.item(generation).as_bytes().to_vec());
        for (name, value) in self.new.xattrs.iter().chain(&self.property) {
            xattr::put_item(d, xattr_key(self.object(), name), name, Some(value), XattrMode::Set)?;
        }
        if self.new.kind == FileKind::Symlink {
            let extent = FileExtent::Inline(InlineExtent {
                generation,
                ram_bytes: self.new.target.len() as u64,
                compression: Compression::None,
                data: self.new.target,
            });
            d.insert_new(&extent_data_key(self.object(), FileOffset(0)), extent.encode());
        }
        Ok(())
    }
    /// Writes what was drafted, with the inode in the table. `of` picks the new inode from the
    /// result of the draft.
    pub(super) fn write<'c, T>(
        dir: &Inode,
        prepared: Prepared<'c, T>,
        of: impl FnOnce(&T) -> &Self,
    ) -> Result<(Handle<'c>, T, Arc<Inode>)> {
        let inode = of(&prepared.found).enter(dir, prepared.handle.generation());
        let (handle, found) = Self::kept_if(Some(inode.clone()), prepared.write())?;
        Ok((handle, found, inode))
    }
    /// Puts the inode into the table, before it is written.
    pub(super) fn enter(&self, dir: &Inode, generation: Generation) -> Arc<Inode> {
        let item = self.item(generation);
        let inode = Arc::new(Inode::new(&dir.subvol, self.ino, self.new.kind, item, Generation(0)));
        let no_xattrs = self.new.xattrs.is_empty() && self.property.is_none();
        inode.no_xattrs.store(no_xattrs, Ordering::Release);
        dir.subvol.inodes.enter(&inode);
        inode
    }
    /// The result of writing the inode. If that failed, the inode leaves the table.
    pub(super) fn kept_if<T>(entered: Option<Arc<Inode>>, written: Result<T>) -> Result<T> {
        if let (Some(inode), Err(_)) = (entered, &written) {
            inode.state.lock().deleted = true;
            inode.subvol.inodes.remove(inode.id.ino);
        }
        written
    }
}

/// Flags that a new inode takes from its directory.
fn inherited_flags(dir: InodeFlags, kind: FileKind) -> InodeFlags {
    let mut flags = InodeFlags::empty();
    if dir.contains(InodeFlags::NOCOMPRESS) {
        flags |= InodeFlags::NOCOMPRESS;
    } else if dir.contains(InodeFlags::COMPRESS) {
        flags |= InodeFlags::COMPRESS;
    }
    if dir.contains(InodeFlags::NODATACOW) {
        flags |= InodeFlags::NODATACOW;
        if kind == FileKind::Regular {
            flags |= InodeFlags::NODATASUM;
        }
    }
    flags
}

/// Flags that a new inode gets from the mount options.
fn mounted_flags(core: &Core, kind: FileKind) -> InodeFlags {
    match kind {
        FileKind::Regular if core.options.no_data_cow => {
            InodeFlags::NODATACOW | InodeFlags::NODATASUM
        }
        FileKind::Regular if core.options.no_data_sum => InodeFlags::NODATASUM,
        _ => InodeFlags::empty(),
    }
}

/// Fails for attributes that no inode can have.
pub(super) fn check_new(new: &NewInode<'_>) -> Result<()> {
    for (name, value) in new.xattrs {
        match name.len() {
            0 => return Err(Error::Invalid("empty attribute name")),
            1..=larder_format::NAME_MAX => {}
            _ => return Err(Error::NameTooLong),
        }
        xattr::check_may_have(new.kind, name)?;
        if value.len() > usize::from(u16::MAX) {
            return Err(Error::TooBig);
        }
    }
    Ok(())
}

/// Makes an inode with a name.
///
/// # Errors
/// `Exists`; `NotFound` for a removed directory; `NotDirectory`; `NameTooLong`; `Overflow` when too
/// many names have this hash; `NotPermitted`; no space; read-only.
pub(crate) fn create(core: &Core, dir: InodeId, name: &[u8], new: &NewInode<'_>) -> Result<Attr> {
    let dir = core.inode(dir)?;
    dir.expect_dir()?;
    check_new_name(name)?;
    check_new(new)?;
    dir.check_changeable(core)?;
    let _guard = dir.lock_op()?;
    check_takes_names(&dir)?;
    let at = Name { dir: dir.object(), name };
    let index = dir::last_index(core, &dir)? + 1;
    let prepared = prepare(core, &dir.subvol, false, |d| {
        if names::find(d, at)?.is_some() {
            return Err(Error::Exists);
        }
        let nascent = Nascent::new(core, &dir, new, 1)?;
        nascent.draft(d)?;
        names::add_first(d, at, index, nascent.object(), to_file_type(new.kind))?;
        Ok(nascent)
    })?;
    let (mut handle, nascent, inode) = Nascent::write(&dir, prepared, |nascent| nascent)?;
    let now = nascent.now;
    dir.change(&mut handle, |state| {
        state.last_index = Some(index);
        state.entries_changed(name_bytes(name), now);
    });
    drop(handle);
    attr::get(&inode)
}

/// Makes a regular file without a name, held once.
///
/// # Errors
/// As [`create`].
pub(crate) fn create_unnamed(
    core: &Core,
    front: FrontId,
    dir: InodeId,
    new: &NewInode<'_>,
) -> Result<Attr> {
    let dir = core.inode(dir)?;
    dir.expect_dir()?;
    if new.kind != FileKind::Regular {
        return Err(Error::Invalid("only a regular file can be made without a name"));
    }
    check_new(new)?;
    dir.check_changeable(core)?;
    let keep_note = !fault!(core.options.tuning, NoOrphans);
    let prepared = prepare(core, &dir.subvol, false, |d| {
        let nascent = Nascent::new(core, &dir, new, 0)?;
        if keep_note {
            names::add_orphan(d, nascent.object())?;
        }
        nascent.draft(d)?;
        Ok(nascent)
    })?;
    let (handle, _, inode) = Nascent::write(&dir, prepared, |nascent| nascent)?;
    inode.state.lock().linkable = true;
    dir.subvol.inodes.hold(front, inode.object());
    dir.subvol.inodes.set_orphan(&inode);
    drop(handle);
    attr::get(&inode)
}

/// Target of a symlink.
///
/// # Errors
/// `Invalid` for anything else; reading; corruption.
pub(crate) fn readlink(core: &Core, inode: &Inode) -> Result<Vec<u8>> {
    if inode.kind != FileKind::Symlink {
        return Err(Error::Invalid("not a symlink"));
    }
    let key = extent_data_key(inode.object(), FileOffset(0));
    let corrupt = |what: String| Error::corrupt(Place::item(inode.subvol.id, key), what);
    let item =
        inode.subvol.get(core, &key)?.ok_or_else(|| corrupt("symlink has no target".into()))?;
    match FileExtent::parse(item.data()).map_err(|e| corrupt(e.0))? {
        FileExtent::Inline(InlineExtent { compression: Compression::None, data, .. })
            if !data.is_empty() && data.len() <= SECTOR_SIZE as usize =>
        {
            Ok(data.to_vec())
        }
        _ => Err(corrupt("target of a symlink is not plain inline data of 1 to 4096 bytes".into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_come_from_the_directory() {
        use InodeFlags as F;
        let of = inherited_flags;
        assert_eq!(of(F::empty(), FileKind::Regular), F::empty());
        assert_eq!(of(F::IMMUTABLE | F::APPEND | F::SYNC, FileKind::Regular), F::empty());
        assert_eq!(of(F::COMPRESS, FileKind::Directory), F::COMPRESS);
        assert_eq!(of(F::COMPRESS | F::NOCOMPRESS, FileKind::Regular), F::NOCOMPRESS);
        assert_eq!(of(F::NODATACOW, FileKind::Regular), F::NODATACOW | F::NODATASUM);
        assert_eq!(of(F::NODATACOW, FileKind::Directory), F::NODATACOW);
    }
}
