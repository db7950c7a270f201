//! A read-only subvolume, read by inode numbers.
//!
//! What is asked for is taken from the tree as it lies there, without an inode in memory, because
//! a reader of a whole tree asks once for each inode. Data is the exception: it is read as that of
//! any file, so that copies are tried and checksums verified.
//!
//! As long as there is such a reader, the subvolume cannot be deleted or made writable, so it does
//! not change between two calls. The exception is an inode without a name: a snapshot may have one,
//! where a program had a file open that had been deleted, and it may go at any time. So it does not
//! exist for this reader.

use crate::api::InodeId;
use crate::engine::{Core, Inode, WholeReader};
use crate::error::{Error, Place, Result};
use crate::file::extents::{Content, ExtentCursor};
use crate::subvolume::SubvolInfo;
use crate::tree::{Item, Version};
use larder_format::items::dir::{find_entry, single_entry};
use larder_format::items::inode_ref::{ExtRefs, InodeRefs};
use larder_format::items::keys::{dir_index_key, dir_item_key, inode_key};
use larder_format::items::{Compression, DirEntries, ExtentRecord, FileType, InodeItem};
use larder_format::{FormatError, Generation, Key, KeyType, ObjectId, TreeId};
use std::sync::Arc;

/// A subvolume that is read-only, and stays as it is for as long as this lives: deleting it, and
/// making it writable, fail with `Busy`.
#[derive(Debug)]
pub struct Frozen {
    pub(super) core: Arc<Core>,
    subvol: WholeReader,
    info: SubvolInfo,
    end: Option<End>,
}

/// Says that a reader should end.
struct End(Box<dyn Fn() -> bool + Send + Sync>);

impl std::fmt::Debug for End {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("End")
    }
}

/// A name of an inode.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FrozenName {
    /// The directory.
    pub dir: ObjectId,
    /// The name in it.
    pub name: Vec<u8>,
}

/// What a name leads to. Entries of subvolumes are not among them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrozenEntry {
    /// The inode.
    pub ino: ObjectId,
    /// Its type.
    pub kind: FileType,
}

/// A part of a file that has an extent. What lies between two parts is a hole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExtentPart {
    /// First byte.
    pub start: u64,
    /// First byte behind the part, which is the end of a sector.
    pub end: u64,
    /// What is there.
    pub content: PartContent,
}

/// What an [`ExtentPart`] has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PartContent {
    /// Data in the tree.
    Inline {
        /// Unpacked bytes.
        len: u64,
        /// How `data` is packed.
        compression: Compression,
        /// The bytes as they lie there.
        data: Vec<u8>,
    },
    /// A part of an extent on the device, or space that is only reserved.
    Stored(ExtentRecord),
}

impl Frozen {
    /// Takes a subvolume. Before it is read, the caller makes durable what was changed, and asks
    /// for the [facts](Self::with_facts) again.
    ///
    /// # Errors
    /// `NotFound`; `Invalid` if it can be written to; reading, corruption.
    pub(crate) fn new(core: Arc<Core>, id: TreeId) -> Result<Self> {
        let subvol = WholeReader::new(&core, id)?;
        let info = core.subvol_info(id)?;
        Ok(Self { core, subvol, info, end: None })
    }

    /// With the facts as they are now.
    ///
    /// # Errors
    /// Reading, corruption.
    pub(crate) fn with_facts(mut self) -> Result<Self> {
        self.info = self.core.subvol_info(self.info.id)?;
        Ok(self)
    }

    /// With calls that fail with `Busy` as soon as `end` says so. It is asked often.
    #[must_use]
    pub fn ending_when(mut self, end: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        self.end = Some(End(Box::new(end)));
        self
    }

    /// Facts about it.
    #[must_use]
    pub fn info(&self) -> &SubvolInfo {
        &self.info
    }

    /// Its number.
    #[must_use]
    pub fn id(&self) -> TreeId {
        self.info.id
    }

    /// Number of its root directory.
    #[must_use]
    pub fn root_dir(&self) -> ObjectId {
        ObjectId(self.subvol.root_dir)
    }

    pub(super) fn version(&self) -> Result<Version> {
        match &self.end {
            Some(End(end)) if end() => Err(Error::Busy("its reader has been told to end")),
            _ => Ok(self.subvol.version(&self.core)),
        }
    }

    fn bad(&self, key: Key) -> impl Fn(FormatError) -> Error {
        let tree = self.id();
        move |e| Error::corrupt(Place::item(tree, key), e.0)
    }

    /// The item of an inode that has a name.
    ///
    /// # Errors
    /// Reading, corruption; `Busy`. So are those of the other calls.
    pub fn inode(&self, ino: ObjectId) -> Result<Option<InodeItem>> {
        let key = inode_key(ino);
        let Some(item) = self.version()?.get(&key)? else { return Ok(None) };
        let inode = InodeItem::parse(item.data()).map_err(self.bad(key))?;
        Ok((inode.nlink.get() > 0).then_some(*inode))
    }

    /// All names of an inode, sorted.
    ///
    /// # Errors
    /// As [`Frozen::inode`].
    pub fn names(&self, ino: ObjectId) -> Result<Vec<FrozenName>> {
        let mut names = Vec::new();
        let (from, to) =
            (Key::new(ino, KeyType::INODE_REF, 0), Key::new(ino, KeyType::INODE_EXTREF, u64::MAX));
        self.version()?.scan(&from, &to, |item| {
            self.names_of(item, &mut names)?;
            Ok(true)
        })?;
        names.sort();
        Ok(names)
    }

    fn names_of(&self, item: &Item, names: &mut Vec<FrozenName>) -> Result<()> {
        let bad = self.bad(item.key);
        match item.key.kind {
            KeyType::INODE_REF => {
                let dir = ObjectId(item.key.offset);
                for found in InodeRefs::new(item.data()) {
                    names.push(FrozenName { dir, name: found.map_err(&bad)?.name.to_vec() });
                }
            }
            KeyType::INODE_EXTREF => {
                for found in ExtRefs::new(item.data()) {
                    let found = found.map_err(&bad)?;
                    names.push(FrozenName { dir: found.parent, name: found.name.to_vec() });
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// What a name in a directory leads to.
    ///
    /// # Errors
    /// As [`Frozen::inode`].
    pub fn lookup(&self, dir: ObjectId, name: &[u8]) -> Result<Option<FrozenEntry>> {
        let key = dir_item_key(dir, name);
        let Some(item) = self.version()?.get(&key)? else { return Ok(None) };
        let entry = find_entry(item.data(), name).map_err(self.bad(key))?;
        let inode = entry.filter(|e| e.location.kind == KeyType::INODE_ITEM);
        Ok(inode.map(|e| FrozenEntry { ino: e.location.objectid, kind: e.kind }))
    }

    /// At most `limit` entries of a directory from the position `from` on. The second value is the
    /// position behind them, or `None` at the end.
    ///
    /// # Errors
    /// As [`Frozen::inode`].
    pub fn entries(
        &self,
        dir: ObjectId,
        from: u64,
        limit: usize,
    ) -> Result<(Vec<FrozenEntry>, Option<u64>)> {
        let mut out = Vec::new();
        let mut next = None;
        let (first, last) = (dir_index_key(dir, from), dir_index_key(dir, u64::MAX));
        self.version()?.scan(&first, &last, |item| {
            if out.len() == limit {
                next = Some(item.key.offset);
                return Ok(false);
            }
            let entry = single_entry(item.data()).map_err(self.bad(item.key))?;
            if entry.location.kind == KeyType::INODE_ITEM {
                out.push(FrozenEntry { ino: entry.location.objectid, kind: entry.kind });
            }
            Ok(true)
        })?;
        Ok((out, next))
    }

    /// All extended attributes of an inode, by name.
    ///
    /// # Errors
    /// As [`Frozen::inode`].
    pub fn xattrs(&self, ino: ObjectId) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
        let mut out = Vec::new();
        let (from, to) =
            (Key::new(ino, KeyType::XATTR_ITEM, 0), Key::new(ino, KeyType::XATTR_ITEM, u64::MAX));
        self.version()?.scan(&from, &to, |item| {
            for entry in DirEntries::new(item.data()) {
                let entry = entry.map_err(self.bad(item.key))?;
                out.push((entry.name.to_vec(), entry.data.to_vec()));
            }
            Ok(true)
        })?;
        out.sort();
        Ok(out)
    }

    /// At most `limit` parts of a file that end behind `from`.
    ///
    /// # Errors
    /// As [`Frozen::inode`].
    pub fn parts(&self, ino: ObjectId, from: u64, limit: usize) -> Result<Vec<ExtentPart>> {
        let version = self.version()?;
        let mut cursor = ExtentCursor::new(&version, ino, from)?;
        let mut out = Vec::new();
        while out.len() < limit {
            let Some(extent) = cursor.next()? else { break };
            let content = match extent.content {
                Content::Stored(record) if record.is_hole() => continue,
                Content::Stored(record) => PartContent::Stored(record),
                Content::Inline { ram_bytes, compression } => PartContent::Inline {
                    len: ram_bytes,
                    compression,
                    data: extent.inline_data().to_vec(),
                },
            };
            out.push(ExtentPart { start: extent.start, end: extent.end, content });
        }
        Ok(out)
    }

    fn file(&self, ino: ObjectId) -> Result<Arc<Inode>> {
        self.version()?;
        self.core.inode(InodeId { subvol: self.id(), ino: ino.0 })
    }

    /// Target of a symbolic link.
    ///
    /// # Errors
    /// As [`Frozen::inode`].
    pub fn target(&self, ino: ObjectId) -> Result<Vec<u8>> {
        crate::inode::create::readlink(&self.core, &*self.file(ino)?)
    }

    /// Reads bytes of a file. Returns how many there were.
    ///
    /// # Errors
    /// As [`Filesystem::read`](crate::Filesystem::read).
    pub fn read(&self, ino: ObjectId, offset: u64, buf: &mut [u8]) -> Result<usize> {
        crate::file::read(&self.core, &self.file(ino)?, offset, buf)
    }

    /// Reads all of an extent of a file, packed as it lies on the device.
    ///
    /// # Errors
    /// As [`Filesystem::read`](crate::Filesystem::read).
    pub fn read_packed(&self, ino: ObjectId, record: &ExtentRecord) -> Result<Vec<u8>> {
        crate::file::read::read_stored(&self.core, &*self.file(ino)?, record)
    }

    /// The transaction in which an inode was made, if it exists.
    ///
    /// # Errors
    /// As [`Frozen::inode`].
    pub fn generation(&self, ino: ObjectId) -> Result<Option<Generation>> {
        Ok(self.inode(ino)?.map(|inode| inode.created()))
    }
}
