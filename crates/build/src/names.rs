//! How entries become inodes, directories, links and attributes.
//!
//! Entries come in path order, so the directories that are open at a time are those on one path. An
//! inode gets the next number when its first name comes, an entry the next index of its directory.
//! A directory's own item is written when its last entry has come, because it has the sum of their
//! names. What is kept in memory is that path. The inodes that have several names are in [`Links`],
//! and for each further name there is a record of how many there are by then.
//!
//! A subvolume hangs in a directory like an entry. It is made of a stream of its own, or of a
//! directory of the stream around it and all that the directory holds. Directories on the way to it
//! that the stream does not have belong to root, and everybody may look into them.

use crate::content::File;
use crate::error::{Error, Result};
use crate::input::{Hang, Subvolume};
use crate::links::{Linked, Links};
use crate::merge::LINKS;
use crate::nodes::GENERATION;
use crate::options::{Compress, Plan};
use crate::report::{Inodes, Tallies};
use crate::sort::{ItemKey, Sorter};
use larder_codec::Packing;
use larder_format::csum::name_hash;
use larder_format::items::dir::ENTRY_HEADER_SIZE;
use larder_format::items::inode::{PERMISSIONS, type_to_mode};
use larder_format::items::{
    Compression, DirEntryRef, FileExtent, FileType, InlineExtent, InodeFlags, InodeItem, InodeRef,
    Timespec,
};
use larder_format::node::max_item_size;
use larder_format::{KeyType, LINK_MAX, NAME_MAX, ObjectId};
use larder_sources::{Attributes, Entry, Kind, LinkGroup, Locator, Time, TreePath};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::sync::Arc;
use zerocopy::IntoBytes;

/// Number of a subvolume's top directory, and the first index of an entry.
const TOP: u64 = 256;
const FIRST_INDEX: u64 = 2;
const PROPERTY: &[u8] = b"btrfs.compression";

/// Flags of an inode that can be taken over. The others follow from what is stored.
fn kept_flags() -> InodeFlags {
    InodeFlags::NODATASUM
        | InodeFlags::NODATACOW
        | InodeFlags::NOCOMPRESS
        | InodeFlags::SYNC
        | InodeFlags::IMMUTABLE
        | InodeFlags::APPEND
        | InodeFlags::NODUMP
        | InodeFlags::NOATIME
        | InodeFlags::DIRSYNC
        | InodeFlags::COMPRESS
}

/// A directory whose entries are coming.
#[derive(Debug)]
struct Open {
    path: TreePath,
    /// Place of its subvolume in the list.
    tree: u32,
    inode: u64,
    item: InodeItem,
    index: u64,
    /// Twice the length of all names.
    size: u64,
}

/// An inode that was just made.
struct Made {
    /// Place of its subvolume in the list.
    tree: u32,
    inode: u64,
    item: InodeItem,
}

/// Turns the entries of all streams into records.
pub(crate) struct Names<'a> {
    plan: &'a Plan,
    pub(crate) items: Sorter<ItemKey>,
    /// All subvolumes, in the order of their numbers.
    pub(crate) subvolumes: Vec<Subvolume>,
    /// The next inode number of each.
    next: Vec<u64>,
    open: Vec<Open>,
    last: Option<TreePath>,
    /// Subvolumes that hang in the stream and have not come yet.
    pending: BTreeMap<TreePath, u32>,
    links: Links,
    pub(crate) tallies: Tallies,
    pub(crate) inodes: Inodes,
    pub(crate) names: u64,
    /// Equal contents are recognised by their locators.
    identities: bool,
    /// Methods of compression that properties name.
    pub(crate) methods: Vec<Compression>,
}

/// Takes files whose contents are to be stored.
pub(crate) type Files<'f> = dyn FnMut(Arc<File>) -> Result<()> + 'f;

impl<'a> Names<'a> {
    pub(crate) fn new(
        plan: &'a Plan,
        items: Sorter<ItemKey>,
        links: Links,
        subvolumes: Vec<Subvolume>,
        identities: bool,
    ) -> Self {
        Self {
            plan,
            items,
            next: vec![TOP + 1; subvolumes.len()],
            subvolumes,
            open: Vec::new(),
            last: None,
            pending: BTreeMap::new(),
            links,
            tallies: Tallies::default(),
            inodes: Inodes::default(),
            names: 0,
            identities,
            methods: Vec::new(),
        }
    }

    /// The stream of a subvolume begins. `within` are the subvolumes that hang in it.
    pub(crate) fn begin(&mut self, tree: u32, within: BTreeMap<TreePath, u32>) {
        self.pending = within;
        self.last = None;
        let item = self.default_top();
        self.open_top(tree, TreePath::root(), item);
    }

    fn default_top(&self) -> InodeItem {
        let mut item = inode_item(FileType::Directory, &Attributes::default());
        item.mode.set(item.mode.get() | 0o755);
        for t in [&mut item.atime, &mut item.ctime, &mut item.mtime, &mut item.otime] {
            *t = self.plan.time;
        }
        item
    }

    fn directory(&mut self, attributes: &Attributes) -> InodeItem {
        let mut item = inode_item(FileType::Directory, attributes);
        if let Some(packing) = property(attributes, &mut item) {
            self.note_method(packing.method());
        }
        item
    }

    fn open_top(&mut self, tree: u32, path: TreePath, item: InodeItem) {
        let (inode, index, size) = (TOP, FIRST_INDEX, 0);
        self.open.push(Open { path, tree, inode, item, index, size });
    }

    /// The next entry of the stream.
    pub(crate) fn entry(&mut self, entry: Entry, files: &mut Files<'_>) -> Result<()> {
        self.in_order(&entry.path)?;
        if entry.path.is_root() {
            return self.top(&entry);
        }
        self.hang_before(Some(&entry.path))?;
        self.leave(&entry.path)?;
        let subvolume = self.pending.remove(&entry.path);
        self.last = Some(entry.path.clone());
        let name = name_of(&entry.path);
        if name.len() > NAME_MAX {
            let what =
                format!("its name has {} bytes, at most {NAME_MAX} are possible", name.len());
            return Err(Error::entry(&entry.path, what));
        }
        if let Some(tree) = subvolume {
            return self.subvolume(&entry, tree);
        }
        self.names += 1;
        let kind = file_type(&entry.kind);
        let dir = self.open.last().expect("the top is open");
        let tree = dir.tree;
        let group = entry.links.filter(|_| kind != FileType::Directory);
        if let Some(group) = group
            && let Some(linked) = self.links.get(tree, group)?
        {
            return self.further_name(&entry, tree, group, linked);
        }
        let inode = self.next[tree as usize];
        self.next[tree as usize] += 1;
        if let Some(group) = group {
            self.links.set(tree, group, Linked { inode, names: 1, kind })?;
        }
        self.name(inode, kind, name)?;
        self.xattrs(tree, inode, &entry)?;
        self.inode(tree, inode, kind, entry, files)
    }

    /// A name of an inode that an earlier entry made.
    fn further_name(
        &mut self,
        entry: &Entry,
        tree: u32,
        group: LinkGroup,
        before: Linked,
    ) -> Result<()> {
        let linked = Linked { names: before.names + 1, ..before };
        let Linked { inode, names, kind } = linked;
        if kind != file_type(&entry.kind) {
            return Err(Error::entry(&entry.path, "links of two types"));
        }
        if names > LINK_MAX {
            let what = format!(
                "a file of more than {LINK_MAX} hard links, which Linux does not allow; leave some \
                 out, or make copies of it"
            );
            return Err(Error::entry(&entry.path, what));
        }
        self.links.set(tree, group, linked)?;
        let key = ItemKey { tree, inode, kind: LINKS, offset: 0 };
        self.items.push(key, &names.to_le_bytes())?;
        self.name(inode, kind, name_of(&entry.path))
    }

    fn in_order(&self, path: &TreePath) -> Result<()> {
        if self.last.as_ref().is_some_and(|last| last >= path) {
            return Err(Error::entry(path, "the source has it twice, or out of order"));
        }
        Ok(())
    }

    /// Attributes of the top directory.
    fn top(&mut self, entry: &Entry) -> Result<()> {
        if entry.kind != Kind::Directory {
            return Err(Error::entry(&entry.path, "it is no directory"));
        }
        self.last = Some(entry.path.clone());
        let tree = self.open[0].tree;
        self.open[0].item = self.directory(&entry.attributes);
        self.xattrs(tree, TOP, entry)
    }

    /// Leaves the directories that do not have `path`.
    fn leave(&mut self, path: &TreePath) -> Result<()> {
        let parent = parent_of(path);
        while self.open.len() > 1 && self.open[self.open.len() - 1].path.as_bytes() != parent {
            self.close()?;
        }
        if self.open[self.open.len() - 1].path.as_bytes() != parent {
            return Err(Error::entry(path, "its directory is missing, or is none"));
        }
        Ok(())
    }

    /// Leaves the directories that do not have `path` and makes those that are missing on the way.
    fn make_way(&mut self, path: &TreePath) -> Result<()> {
        let has = |open: &Open, path: &TreePath| {
            let rest = path.as_bytes().strip_prefix(open.path.as_bytes());
            open.path.is_root() || rest.is_some_and(|rest| rest.starts_with(b"/"))
        };
        while self.open.len() > 1 && !has(&self.open[self.open.len() - 1], path) {
            self.close()?;
        }
        let mut way = self.open[self.open.len() - 1].path.clone();
        let depth = way.components().count();
        let names: Vec<&[u8]> = path.components().skip(depth).collect();
        for name in &names[..names.len() - 1] {
            way.push(name);
            if self.last.as_ref() == Some(&way) {
                return Err(Error::entry(path, "a subvolume is to be below what is no directory"));
            }
            self.implied(&way)?;
        }
        Ok(())
    }

    /// A directory that the stream does not have.
    fn implied(&mut self, path: &TreePath) -> Result<()> {
        let tree = self.open.last().expect("the top is open").tree;
        let inode = self.next[tree as usize];
        self.next[tree as usize] += 1;
        self.names += 1;
        self.last = Some(path.clone());
        self.name(inode, FileType::Directory, name_of(path))?;
        let (path, item, index, size) = (path.clone(), self.default_top(), FIRST_INDEX, 0);
        self.open.push(Open { path, tree, inode, item, index, size });
        Ok(())
    }

    /// Writes the item of the directory that was left.
    fn close(&mut self) -> Result<()> {
        let dir = self.open.pop().expect("one is open");
        let item = InodeItem { size: dir.size.into(), ..dir.item };
        self.inodes.directories += 1;
        self.put(dir.tree, dir.inode, KeyType::INODE_ITEM, 0, item.as_bytes())?;
        if dir.inode == TOP {
            let own = InodeRef { index: 0, name: b".." };
            let mut bytes = Vec::new();
            own.append_to(&mut bytes);
            self.put(dir.tree, TOP, KeyType::INODE_REF, TOP, &bytes)?;
        }
        Ok(())
    }

    /// The stream ends.
    pub(crate) fn finish(&mut self) -> Result<()> {
        self.hang_before(None)?;
        while !self.open.is_empty() {
            self.close()?;
        }
        self.links.clear();
        Ok(())
    }

    /// Makes the entries of subvolumes that come before `path` and have no entry in the stream.
    fn hang_before(&mut self, path: Option<&TreePath>) -> Result<()> {
        while let Some((first, _)) = self.pending.first_key_value() {
            if path.is_some_and(|p| first >= p) {
                return Ok(());
            }
            let (at, tree) = self.pending.pop_first().expect("there is one");
            self.make_way(&at)?;
            self.last = Some(at.clone());
            self.hang(&at, tree)?;
            if self.subvolumes[tree as usize].inner {
                // Nothing of it comes, but for subvolumes that hang in it.
                let item = self.default_top();
                self.open_top(tree, at, item);
            }
        }
        Ok(())
    }

    /// An entry at whose place a subvolume hangs.
    fn subvolume(&mut self, entry: &Entry, tree: u32) -> Result<()> {
        if entry.kind != Kind::Directory {
            return Err(Error::entry(
                &entry.path,
                "a subvolume is asked for here, and it is no directory",
            ));
        }
        self.hang(&entry.path, tree)?;
        if self.subvolumes[tree as usize].inner {
            let item = self.directory(&entry.attributes);
            self.open_top(tree, entry.path.clone(), item);
            self.xattrs(tree, TOP, entry)?;
        }
        Ok(())
    }

    /// Makes the entry of a subvolume in the directory that is open.
    fn hang(&mut self, path: &TreePath, tree: u32) -> Result<()> {
        let name = name_of(path);
        let id = ObjectId(self.subvolumes[tree as usize].id);
        let dir = self.open.last_mut().expect("the top is open");
        let (parent, inode, index) = (dir.tree, dir.inode, dir.index);
        dir.index += 1;
        dir.size += 2 * name.len() as u64;
        let entry = DirEntryRef::subvolume(id, GENERATION, name).encode();
        self.put(parent, inode, KeyType::DIR_ITEM, name_hash(name), &entry)?;
        self.put(parent, inode, KeyType::DIR_INDEX, index, &entry)?;
        let parent = self.subvolumes[parent as usize].id;
        self.subvolumes[tree as usize].hang =
            Some(Hang { parent, directory: inode, index, name: name.to_vec() });
        Ok(())
    }

    /// Makes an entry in the directory that is open.
    fn name(&mut self, inode: u64, kind: FileType, name: &[u8]) -> Result<()> {
        let dir = self.open.last_mut().expect("the top is open");
        let (tree, parent, index) = (dir.tree, dir.inode, dir.index);
        dir.index += 1;
        dir.size += 2 * name.len() as u64;
        let entry = DirEntryRef::inode(ObjectId(inode), GENERATION, kind, name);
        let mut bytes = Vec::with_capacity(ENTRY_HEADER_SIZE + name.len());
        entry.append_to(&mut bytes);
        self.put(tree, parent, KeyType::DIR_ITEM, name_hash(name), &bytes)?;
        self.put(tree, parent, KeyType::DIR_INDEX, index, &bytes)?;
        bytes.clear();
        InodeRef { index, name }.append_to(&mut bytes);
        self.put(tree, inode, KeyType::INODE_REF, parent, &bytes)
    }

    fn xattrs(&mut self, tree: u32, inode: u64, entry: &Entry) -> Result<()> {
        for (name, value) in &entry.attributes.xattrs {
            let most = max_item_size(self.plan.nodesize) - ENTRY_HEADER_SIZE;
            if name.is_empty() || name.len() > NAME_MAX || name.len() + value.len() > most {
                let what = format!(
                    "its attribute {} has a name of {} bytes and a value of {}; {NAME_MAX} and \
                     {most} together are possible",
                    name.escape_ascii(),
                    name.len(),
                    value.len()
                );
                return Err(Error::entry(&entry.path, what));
            }
            let bytes = DirEntryRef::xattr(GENERATION, name, value).encode();
            self.put(tree, inode, KeyType::XATTR_ITEM, name_hash(name), &bytes)?;
        }
        Ok(())
    }

    fn inode(
        &mut self,
        tree: u32,
        inode: u64,
        kind: FileType,
        entry: Entry,
        files: &mut Files<'_>,
    ) -> Result<()> {
        let mut item = inode_item(kind, &entry.attributes);
        let own = property(&entry.attributes, &mut item);
        if let Some(packing) = own {
            self.note_method(packing.method());
        }
        match entry.kind {
            Kind::Directory => {
                let (path, index, size) = (entry.path, FIRST_INDEX, 0);
                self.open.push(Open { path, tree, inode, item, index, size });
                return Ok(());
            }
            Kind::File { size, contents } => {
                self.inodes.files += 1;
                if size > i64::MAX.cast_unsigned() {
                    let what = format!("a file cannot have {size} bytes");
                    return Err(Error::entry(&entry.path, what));
                }
                item.size.set(size);
                let made = Made { tree, inode, item };
                let file = self.file(made, &entry.path, contents.filter(|_| size > 0), own);
                return files(Arc::new(file));
            }
            Kind::Symlink(target) => {
                self.inodes.symlinks += 1;
                self.symlink(tree, inode, &mut item, &entry.path, &target)?;
            }
            Kind::CharDevice { major, minor } | Kind::BlockDevice { major, minor } => {
                self.inodes.devices += 1;
                if major >= 1 << 12 || minor >= 1 << 20 {
                    let what = format!("device {major}:{minor} is beyond 4095:1048575");
                    return Err(Error::entry(&entry.path, what));
                }
                item.rdev.set(u64::from(major) << 20 | u64::from(minor));
            }
            Kind::Fifo | Kind::Socket => self.inodes.others += 1,
        }
        self.put(tree, inode, KeyType::INODE_ITEM, 0, item.as_bytes())
    }

    fn symlink(
        &mut self,
        tree: u32,
        inode: u64,
        item: &mut InodeItem,
        path: &TreePath,
        target: &[u8],
    ) -> Result<()> {
        let most = crate::options::longest_inline(self.plan.nodesize);
        if target.is_empty() || target.len() > most {
            let what = format!("its target has {} bytes, 1 to {most} are possible", target.len());
            return Err(Error::entry(path, what));
        }
        let length = target.len() as u64;
        (item.size, item.nbytes) = (length.into(), length.into());
        let compression = Compression::None;
        let inline =
            InlineExtent { generation: GENERATION, ram_bytes: length, compression, data: target };
        self.put(tree, inode, KeyType::EXTENT_DATA, 0, &FileExtent::Inline(inline).encode())
    }

    /// A file whose contents are to be stored; `own` is what its property asks for.
    fn file(
        &mut self,
        made: Made,
        path: &TreePath,
        contents: Option<Locator>,
        own: Option<Packing>,
    ) -> File {
        let Made { tree, inode, item } = made;
        let (size, flags) = (item.size.get(), item.inode_flags());
        let identity =
            contents.as_ref().filter(|_| self.identities).map(|c| identity(c, size, flags));
        File {
            tree,
            root: self.subvolumes[tree as usize].id,
            inode,
            item,
            size,
            path: path.as_bytes().to_vec(),
            contents,
            compress: self.compress(flags, own),
            sums: !flags.contains(InodeFlags::NODATASUM),
            tally: self.tallies.of(path.as_bytes()),
            identity,
        }
    }

    /// How a file is compressed, as on Linux; `own` is what its property asks for.
    fn compress(&self, flags: InodeFlags, own: Option<Packing>) -> Option<Compress> {
        let plan = self.plan.compress;
        if flags.intersects(InodeFlags::NODATASUM | InodeFlags::NODATACOW) {
            return None;
        }
        let force = plan.is_some_and(|p| p.force);
        if flags.contains(InodeFlags::NOCOMPRESS) && !force {
            return None;
        }
        // The level that was asked for is meant for its method.
        let packing = match (own, plan) {
            (Some(own), Some(plan)) if own.method() == plan.packing.method() => plan.packing,
            (Some(own), _) => own,
            (None, Some(plan)) => plan.packing,
            (None, None) if flags.contains(InodeFlags::COMPRESS) => Packing::default(),
            (None, None) => return None,
        };
        Some(Compress { packing, force })
    }

    fn note_method(&mut self, method: Compression) {
        if !self.methods.contains(&method) {
            self.methods.push(method);
        }
    }

    fn put(
        &mut self,
        tree: u32,
        inode: u64,
        kind: KeyType,
        offset: u64,
        value: &[u8],
    ) -> Result<()> {
        self.items.push(ItemKey { tree, inode, kind: kind.0, offset }, value)
    }
}

fn inode_item(kind: FileType, attributes: &Attributes) -> InodeItem {
    let mode = type_to_mode(kind).expect("a type that inodes have");
    let time = |t: Option<Time>| {
        let t = t.unwrap_or(attributes.modified);
        Timespec::new(t.seconds, t.nanoseconds.min(999_999_999))
    };
    let mut flags = InodeFlags::from_bits_truncate(attributes.inode_flags) & kept_flags();
    if flags.contains(InodeFlags::NODATACOW) {
        // As on Linux: one needs the other, and excludes the third.
        flags |= InodeFlags::NODATASUM;
        flags -= InodeFlags::COMPRESS;
    }
    if kind != FileType::Regular && kind != FileType::Directory {
        flags -= InodeFlags::NODATASUM | InodeFlags::NODATACOW;
    }
    let mut item = InodeItem {
        generation: GENERATION.0.into(),
        transid: GENERATION.0.into(),
        nlink: 1.into(),
        uid: attributes.uid.into(),
        gid: attributes.gid.into(),
        mode: (mode | attributes.permissions & PERMISSIONS).into(),
        atime: time(attributes.accessed),
        ctime: time(attributes.changed),
        mtime: time(Some(attributes.modified)),
        otime: time(attributes.created),
        ..InodeItem::default()
    };
    item.set_inode_flags(flags);
    item
}

fn file_type(kind: &Kind) -> FileType {
    match kind {
        Kind::Directory => FileType::Directory,
        Kind::File { .. } => FileType::Regular,
        Kind::Symlink(_) => FileType::Symlink,
        Kind::CharDevice { .. } => FileType::CharDevice,
        Kind::BlockDevice { .. } => FileType::BlockDevice,
        Kind::Fifo => FileType::Fifo,
        Kind::Socket => FileType::Socket,
    }
}

/// What the property of compression asks for. It sets the flag that goes with it, as on Linux.
fn property(attributes: &Attributes, item: &mut InodeItem) -> Option<Packing> {
    let (_, value) = attributes.xattrs.iter().find(|(name, _)| name == PROPERTY)?;
    let methods = [Compression::Zlib, Compression::Lzo, Compression::Zstd];
    let packing = methods
        .into_iter()
        .find(|m| value.starts_with(m.name().as_bytes()))
        .and_then(|m| Packing::new(m, None));
    let mut flags = item.inode_flags();
    flags -= InodeFlags::COMPRESS | InodeFlags::NOCOMPRESS;
    if !flags.contains(InodeFlags::NODATACOW) {
        let flag = if packing.is_some() { InodeFlags::COMPRESS } else { InodeFlags::NOCOMPRESS };
        item.set_inode_flags(flags | flag);
    }
    packing
}

/// Names contents. Files that are stored otherwise do not share them.
fn identity(locator: &Locator, size: u64, flags: InodeFlags) -> u128 {
    let stored = InodeFlags::NODATASUM | InodeFlags::COMPRESS | InodeFlags::NOCOMPRESS;
    let flags = flags & stored;
    let hash = Sha256::new()
        .chain_update(locator.source.0.to_le_bytes())
        .chain_update(size.to_le_bytes())
        .chain_update(flags.bits().to_le_bytes())
        .chain_update(&locator.key)
        .finalize();
    u128::from_le_bytes(hash[..16].try_into().expect("half of a hash"))
}

fn name_of(path: &TreePath) -> &[u8] {
    path.as_bytes().rsplit(|b| *b == b'/').next().unwrap_or_default()
}

fn parent_of(path: &TreePath) -> &[u8] {
    let bytes = path.as_bytes();
    bytes.iter().rposition(|b| *b == b'/').map_or(&[], |at| &bytes[..at])
}
