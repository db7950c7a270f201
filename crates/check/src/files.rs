//! Subvolumes: a walk over their leaves.
//!
//! A leaf is looked at once, however many snapshots share it; the references that its file extents
//! make are by tree or by leaf, as the extent tree says of the leaf. What it holds of inodes joins
//! with its neighbours' into whole inodes ([`crate::inode`]), and the sums over names and entries
//! ([`crate::links`]) add up to those of the subvolume. So the cost of a thousand snapshots is that
//! of the nodes in which they differ.

use crate::coverage::Fact;
use crate::finding::{Finding, Kind};
use crate::inode::{Inode, Stat, check, is_file_id};
use crate::links::{LinkRecord, LinkSink, Totals, entry_value};
use crate::refs::Size;
use crate::run::{Close, Run};
use crate::source::{Edge, Node};
use crate::unpack;
use crate::walk::{Visit, find, scan};
use crate::world::Pass;
use larder_format::items::dir::is_plain_name;
use larder_format::items::keys::inode_key;
use larder_format::items::{
    BlockGroupFlags, Compression, DirEntries, ExtRefs, ExtentItem, ExtentKind, ExtentRecord,
    ExtentRef, FileExtent, InodeFlags, InodeItem, InodeRefs, parse_keyed_refs,
};
use larder_format::node::{FLAG_RELOC, NodeView};
use larder_format::{FileOffset, Incompat, Key, KeyType, LogicalRange, ObjectId};
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Walks one subvolume, or another tree that holds files.
pub(crate) struct Files<'a> {
    pub(crate) pass: &'a Pass<'a>,
    pub(crate) root: Edge,
    pub(crate) links: LinkSink<'a>,
    /// Do inodes and names mean something here? Not in relocation trees, nor in what is being
    /// deleted.
    pub(crate) whole: bool,
    /// Directories whose entries do not agree with each other.
    pub(crate) uneven_dirs: &'a Mutex<Vec<(Edge, ObjectId)>>,
    /// The inode whose flags were looked up last.
    pub(crate) looked_up: Mutex<Option<(ObjectId, Option<InodeFlags>)>>,
    /// Where to look up which trees are said to use a node.
    pub(crate) extent_root: Option<Edge>,
    /// How often that was done.
    pub(crate) owners_asked: AtomicUsize,
}

/// Most nodes of a tree whose owner is looked up.
const OWNERS: usize = 10_000;

/// Most directories that are looked at closely.
const DIRS: usize = 200;

/// What is known of a range of leaves.
#[derive(Clone, Debug)]
pub(crate) struct Piece {
    run: Run<Inode>,
    totals: Totals,
}

impl Piece {
    /// The sums, after the last open inodes are closed.
    pub(crate) fn finish(self, files: &Files<'_>) -> Totals {
        let mut closer = Closer { files, totals: self.totals, fresh: true };
        self.run.finish(&mut closer);
        closer.totals
    }
}

struct Closer<'a> {
    files: &'a Files<'a>,
    totals: Totals,
    fresh: bool,
}

impl Close<Inode> for Closer<'_> {
    fn close(&mut self, inode: Inode) {
        let files = self.files;
        let pass = files.pass;
        if !files.whole {
            return;
        }
        if self.fresh && pass.first {
            pass.world.counts.inodes.fetch_add(1, Relaxed);
            check(pass.world, files.root.tree, &inode);
            if inode.entries != 0 && !inode.incomplete {
                let mut dirs = files.uneven_dirs.lock();
                if dirs.len() < DIRS {
                    dirs.push((files.root, inode.ino));
                }
            }
        }
        if inode.incomplete {
            self.totals.broken = true;
        }
        let Some(stat) = inode.stat else { return };
        if inode.ino == ObjectId::FIRST_FREE && stat.is_dir() && inode.names > 0 {
            self.totals.has_top = true;
        }
        let hashing = &pass.world.hashing;
        let kind = hashing
            .of(&("type", inode.ino, stat.file_type()))
            .wrapping_mul(u64::from(inode.linked));
        let mut value = kind.wrapping_neg();
        if stat.nlink == 0 {
            value = value.wrapping_sub(hashing.of(&("orphan", inode.ino)));
        }
        self.totals.add(files.links, inode.ino, value, || LinkRecord::Inode {
            kind: stat.file_type(),
            nlink: stat.nlink,
        });
    }
}

impl Visit for Files<'_> {
    type Piece = Piece;
    const SHARED: bool = true;

    fn empty(&self) -> Piece {
        Piece { run: Run::empty(), totals: Totals::default() }
    }
    fn lost(&self, edge: &Edge) -> Piece {
        // What an interrupted deletion has passed already is not lost: it is meant to be gone.
        if self.whole {
            self.pass.lost(edge);
        }
        Piece { run: Run::lost(), totals: Totals { broken: true, ..Totals::default() } }
    }
    fn child(&self, parent: NodeView<'_>, edge: &Edge) {
        self.pass.uses_child(parent, edge);
    }
    /// A node that its maker has given up refers to others by address. One that refers to them by
    /// its maker is its maker's still: the extent tree must say so. It needs to be asked only where
    /// another tree's node leads here first.
    fn met(&self, edge: &Edge, node: NodeView<'_>) {
        let world = self.pass.world;
        let (at, owner) = (edge.at, node.owner());
        let strange =
            owner != edge.parent_owner && owner.is_subvolume() && edge.tree.is_subvolume();
        if !strange || !self.pass.first || edge.is_root || node.flags() & FLAG_RELOC != 0 {
            return;
        }
        let Some(extents) = &self.extent_root else { return };
        if world.full_backref.contains(at.0)
            || world.lost.extents_at(at)
            || self.owners_asked.fetch_add(1, Relaxed) >= OWNERS
        {
            return;
        }
        let (mut known, mut owned) = (false, false);
        let to = Key::new(at, KeyType(u8::MAX), u64::MAX);
        scan(&world.source, extents, Key::new(at, KeyType(0), 0), to, &mut |key, data| {
            let refs = match key.kind {
                KeyType::EXTENT_ITEM | KeyType::METADATA_ITEM => {
                    known = true;
                    ExtentItem::parse(key.kind, data).map(|item| item.inline)
                }
                KeyType::TREE_BLOCK_REF => parse_keyed_refs(&key, data),
                _ => return ControlFlow::Continue(()),
            };
            // What cannot be parsed is reported, and may have said it.
            owned |= refs.map_or(true, |refs| {
                refs.iter().any(|(by, _)| *by == ExtentRef::TreeBlock { root: owner })
            });
            if owned { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        if known && !owned {
            let what = format!("the owner is tree {owner}, which does not use the node");
            self.pass.add(|| Finding::new(Kind::NodeOwner, what).tree(edge.tree).address(at));
        }
    }
    fn worth_keeping(&self, leaf: NodeView<'_>) -> bool {
        leaf.generation().0 <= self.pass.world.last_snapshot.load(Relaxed)
    }
    fn join(&self, _: &Edge, left: Piece, right: Piece, fresh: bool) -> Piece {
        let mut closer = Closer { files: self, totals: left.totals.plus(right.totals), fresh };
        let run = left.run.join(right.run, &mut closer);
        Piece { run, totals: closer.totals }
    }
    fn leaf(&self, edge: &Edge, node: &Node, fresh: bool) -> Piece {
        let view = node.view();
        let by_leaf = self.pass.world.full_backref.contains(view.bytenr().0);
        let mut leaf = Leaf { files: self, edge, view, by_leaf, fresh, totals: Totals::default() };
        leaf.totals.broken |= node.doubtful;
        let mut run = Run::empty();
        let mut current: Option<Inode> = None;
        for slot in 0..view.items().len() {
            let (Some(key), Some(data)) = (view.key(slot), view.data(slot)) else { continue };
            if key.objectid == ObjectId::ORPHAN && key.kind == KeyType::ORPHAN_ITEM {
                let ino = ObjectId(key.offset);
                let value = self.pass.world.hashing.of(&("orphan", ino));
                leaf.totals.add(self.links, ino, value, || LinkRecord::Orphan);
                continue;
            }
            if !is_file_id(key.objectid) {
                // Caches of free inode numbers, which Linux no longer has.
                if key.objectid != ObjectId::FREE_INO
                    && key.objectid != ObjectId::FREE_SPACE
                    && fresh
                {
                    self.pass.misplaced(edge, key);
                }
                continue;
            }
            if current.as_ref().is_none_or(|inode| inode.ino != key.objectid)
                && let Some(done) = current.replace(Inode::new(key))
            {
                leaf.push(&mut run, done);
            }
            if let Some(inode) = &mut current {
                leaf.item(inode, key, data);
            }
        }
        if let Some(done) = current {
            leaf.push(&mut run, done);
        }
        Piece { run, totals: leaf.totals }
    }
}

/// A leaf that is being looked at.
struct Leaf<'a> {
    files: &'a Files<'a>,
    edge: &'a Edge,
    view: NodeView<'a>,
    /// Are its extents referred to by leaf?
    by_leaf: bool,
    fresh: bool,
    totals: Totals,
}

impl Leaf<'_> {
    fn push(&mut self, run: &mut Run<Inode>, inode: Inode) {
        let mut closer = Closer { files: self.files, totals: self.totals, fresh: self.fresh };
        run.push(inode, &mut closer);
        self.totals = closer.totals;
    }

    fn add(&self, kind: Kind, key: Key, what: impl FnOnce() -> String) {
        if self.fresh {
            self.files.pass.add(|| {
                Finding::new(kind, what()).tree(self.edge.tree).address(self.edge.at).key(key)
            });
        }
    }

    fn item(&mut self, inode: &mut Inode, key: Key, data: &[u8]) {
        let done = match key.kind {
            KeyType::INODE_ITEM => {
                InodeItem::parse(data).map(|item| inode.stat = Some(Stat::of(item)))
            }
            KeyType::INODE_REF => self.inode_ref(inode, key, data),
            KeyType::INODE_EXTREF => self.inode_extref(inode, key, data),
            KeyType::XATTR_ITEM => self.xattrs(key, data),
            KeyType::DIR_ITEM => self.dir_item(inode, key, data),
            KeyType::DIR_INDEX => self.dir_index(inode, key, data),
            KeyType::EXTENT_DATA => self.extent(inode, key, data),
            KeyType::VERITY_DESC | KeyType::VERITY_MERKLE => Ok(()),
            _ => {
                if self.fresh {
                    self.files.pass.misplaced(self.edge, key);
                }
                Ok(())
            }
        };
        if let Err(e) = done {
            inode.incomplete = true;
            let kind = match key.kind {
                KeyType::INODE_ITEM => Kind::InodeInvalid,
                KeyType::EXTENT_DATA => Kind::FileExtentInvalid,
                _ => Kind::NameInvalid,
            };
            if self.fresh {
                self.files.pass.invalid(kind, self.edge, key, &e);
            }
        }
    }

    /// The inode records a name.
    fn name(&mut self, inode: &mut Inode, dir: ObjectId, index: u64, name: &[u8]) {
        inode.names = inode.names.saturating_add(1);
        let source = &self.files.pass.world.source;
        let name = &*source.name(name);
        // A subvolume's top directory names itself, and no directory has that name.
        if inode.ino == dir && dir == ObjectId::FIRST_FREE {
            if (index, name) != (0, &*source.name(b"..")) {
                let key = Key::new(dir, KeyType::INODE_REF, dir.0);
                self.add(Kind::RootDirectory, key, || {
                    let shown = name.escape_ascii();
                    format!(
                        "the top directory calls itself \"{shown}\" (index {index}), \
                        expected \"..\" (0)"
                    )
                });
            }
            return;
        }
        inode.linked = inode.linked.saturating_add(1);
        let value = self.files.pass.world.hashing.of(&("name", inode.ino, dir, index, name));
        self.totals.add(self.files.links, inode.ino, value.wrapping_neg(), || LinkRecord::Name {
            dir,
            index,
            name: name.into(),
        });
    }

    fn inode_ref(
        &mut self,
        inode: &mut Inode,
        key: Key,
        data: &[u8],
    ) -> larder_format::FormatResult<()> {
        for entry in InodeRefs::new(data) {
            let entry = entry?;
            self.name(inode, ObjectId(key.offset), entry.index, entry.name);
        }
        Ok(())
    }

    fn inode_extref(
        &mut self,
        inode: &mut Inode,
        key: Key,
        data: &[u8],
    ) -> larder_format::FormatResult<()> {
        self.files.pass.world.uses(Incompat::EXTENDED_IREF);
        for entry in ExtRefs::new(data) {
            let entry = entry?;
            let filed = larder_format::csum::extref_hash(entry.parent, entry.name) == key.offset;
            if !filed && !self.files.pass.world.source.names_hidden() {
                self.add(Kind::NameHash, key, || {
                    format!("name \"{}\" is filed under another hash", entry.name.escape_ascii())
                });
            }
            self.name(inode, entry.parent, entry.index, entry.name);
        }
        Ok(())
    }

    fn xattrs(&mut self, key: Key, data: &[u8]) -> larder_format::FormatResult<()> {
        let mut seen = BTreeSet::new();
        for entry in DirEntries::new(data) {
            let entry = entry?;
            if !seen.insert(entry.name) {
                self.add(Kind::XattrDuplicate, key, || {
                    format!("attribute \"{}\" stands there twice", entry.name.escape_ascii())
                });
            }
        }
        Ok(())
    }

    fn dir_item(
        &mut self,
        inode: &mut Inode,
        key: Key,
        data: &[u8],
    ) -> larder_format::FormatResult<()> {
        let world = self.files.pass.world;
        let mut seen = BTreeSet::new();
        for entry in DirEntries::new(data) {
            let entry = entry?;
            if !seen.insert(entry.name) && !world.source.names_hidden() {
                self.add(Kind::DirNameDuplicate, key, || {
                    format!("name \"{}\" stands there twice", entry.name.escape_ascii())
                });
            }
            inode.item_bytes = inode.item_bytes.saturating_add(entry.name.len() as u64);
            let value = entry_value(world, &entry);
            inode.entries = inode.entries.wrapping_add(value);
        }
        Ok(())
    }

    fn dir_index(
        &mut self,
        inode: &mut Inode,
        key: Key,
        data: &[u8],
    ) -> larder_format::FormatResult<()> {
        let world = self.files.pass.world;
        let hashing = &world.hashing;
        if key.offset < 2 {
            self.add(Kind::DirIndexInvalid, key, || format!("index {} is never used", key.offset));
        }
        for (n, entry) in DirEntries::new(data).enumerate() {
            let entry = entry?;
            if n > 0 {
                self.add(Kind::NameInvalid, key, || "an index holds more than one entry".into());
            }
            if self.fresh && self.files.pass.first {
                self.files.pass.world.counts.names.fetch_add(1, Relaxed);
            }
            let name = world.source.name(entry.name);
            if !is_plain_name(&name) {
                self.add(Kind::NameInvalid, key, || {
                    format!("\"{}\" cannot be the name of a file", entry.name.escape_ascii())
                });
            }
            inode.index_bytes = inode.index_bytes.saturating_add(entry.name.len() as u64);
            inode.entries = inode.entries.wrapping_sub(entry_value(world, &entry));
            let child = entry.location.objectid;
            if entry.location.kind == KeyType::ROOT_ITEM {
                let value = hashing.of(&("subvolume", inode.ino, key.offset, &*name, child));
                self.totals.subvolumes = self.totals.subvolumes.wrapping_add(value);
                self.totals.newest_subvolume = self.totals.newest_subvolume.max(entry.transid.0);
                continue;
            }
            let kind = entry.kind as u8;
            let value = hashing
                .of(&("name", child, inode.ino, key.offset, &*name))
                .wrapping_add(hashing.of(&("type", child, kind)));
            self.totals.add(self.files.links, child, value, || LinkRecord::Entry {
                dir: inode.ino,
                index: key.offset,
                name: (&*name).into(),
                kind,
            });
        }
        Ok(())
    }

    fn extent(
        &mut self,
        inode: &mut Inode,
        key: Key,
        data: &[u8],
    ) -> larder_format::FormatResult<()> {
        let world = self.files.pass.world;
        let extent = FileExtent::parse(data)?;
        if extent.generation().0 > world.generation() {
            self.add(Kind::FileExtentGeneration, key, || {
                format!(
                    "generation is {}, the superblock's is {}",
                    extent.generation(),
                    world.generation()
                )
            });
        }
        inode.add_extent(key.offset, &extent);
        let compression = match &extent {
            FileExtent::Inline(i) => i.compression,
            FileExtent::Stored(r) => r.compression,
        };
        match compression {
            Compression::Lzo => world.uses(Incompat::COMPRESS_LZO),
            Compression::Zstd => world.uses(Incompat::COMPRESS_ZSTD),
            Compression::None | Compression::Zlib => {}
        }
        if !self.fresh {
            return Ok(());
        }
        match &extent {
            FileExtent::Inline(inline) => {
                if key.offset != 0 {
                    self.add(Kind::FileExtentInline, key, || {
                        format!("an inline extent stands at {}", key.offset)
                    });
                }
                unpack::inline(self.files.pass, self.edge, key, inline);
            }
            FileExtent::Stored(record) if !record.is_hole() => self.stored(inode, key, record),
            FileExtent::Stored(_) => {}
        }
        Ok(())
    }

    /// An extent item that refers to data.
    fn stored(&self, inode: &Inode, key: Key, r: &ExtentRecord) {
        let pass = self.files.pass;
        if pass.first {
            pass.world.counts.file_extents.fetch_add(1, Relaxed);
        }
        let by = if self.by_leaf {
            ExtentRef::SharedData { parent: self.view.bytenr() }
        } else {
            ExtentRef::data(self.view.owner(), key.objectid, FileOffset(key.offset), r.offset)
        };
        pass.refs.used(r.disk_bytenr, Size::Data(r.disk_num_bytes), by, self.edge.tree, Some(key));
        if r.compression == Compression::None && r.ram_bytes != r.disk_num_bytes {
            self.add(Kind::FileExtentRamBytes, key, || {
                format!(
                    "ram_bytes is {}, but the extent has {} bytes",
                    r.ram_bytes, r.disk_num_bytes
                )
            });
        }
        if r.kind == ExtentKind::Prealloc && r.compression != Compression::None {
            self.add(Kind::FileExtentCompression, key, || {
                "preallocated space, in which nothing was written yet, is marked as compressed"
                    .into()
            });
        }
        if let Some(owners) = pass.owners {
            let extent = LogicalRange::new(r.disk_bytenr, r.disk_num_bytes);
            owners.visit(extent, self.edge.tree, key);
        }
        let chunk = pass.world.chunks.find(r.disk_bytenr);
        let Some(chunk) = chunk.filter(|c| c.flags.contains(BlockGroupFlags::DATA)) else {
            self.add(Kind::FileExtentUnmapped, key, || {
                format!("the data should lie at {}, where there is no data chunk", r.disk_bytenr)
            });
            return;
        };
        unpack::stored(pass, self.edge, key, r);
        let Some(coverage) = pass.coverage else { return };
        let Some(flags) = self.flags(inode) else { return };
        let used = if r.compression == Compression::None {
            LogicalRange::new(r.disk_bytenr.plus(r.offset), r.num_bytes)
        } else {
            LogicalRange::new(r.disk_bytenr, r.disk_num_bytes)
        };
        let used = used.intersection(chunk.range());
        if r.kind == ExtentKind::Prealloc {
            coverage.add(Fact::Spare, used);
        } else if !flags.contains(InodeFlags::NODATASUM) {
            coverage.add(Fact::Need, used);
        } else if r.compression == Compression::None {
            coverage.add(Fact::Never, used);
        }
    }

    /// Flags of the inode whose items these are, even if its own item stands in a leaf before this
    /// one.
    fn flags(&self, inode: &Inode) -> Option<InodeFlags> {
        if let Some(stat) = inode.stat {
            return Some(stat.flags);
        }
        let last = *self.files.looked_up.lock();
        if let Some((ino, flags)) = last
            && ino == inode.ino
        {
            return flags;
        }
        let source = &self.files.pass.world.source;
        let item = find(source, &self.files.root, inode_key(inode.ino));
        let flags = item.and_then(|data| InodeItem::parse(&data).ok().map(InodeItem::inode_flags));
        *self.files.looked_up.lock() = Some((inode.ino, flags));
        flags
    }
}
