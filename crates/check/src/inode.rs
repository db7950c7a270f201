//! One inode: what its items say, and whether they agree.
//!
//! All items of an inode stand behind each other, so most rules are about one [`Inode`] alone: its
//! link count against its names, its size against a directory's entries, its bytes against its
//! extents. Rules between inodes — an entry and the inode that it leads to — are in
//! [`crate::links`].

use crate::finding::{Finding, Kind};
use crate::run::Part;
use crate::world::World;
use larder_format::items::inode::{S_IFDIR, S_IFLNK, S_IFMT, S_IFREG};
use larder_format::items::{Compression, ExtentKind, FileExtent, FileType, InodeFlags, InodeItem};
use larder_format::{Incompat, Key, KeyType, ObjectId, SECTOR_SIZE, TreeId};

const SECTOR: u64 = SECTOR_SIZE as u64;

/// What the inode item says.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stat {
    pub(crate) generation: u64,
    pub(crate) transid: u64,
    pub(crate) size: u64,
    pub(crate) nbytes: u64,
    pub(crate) nlink: u32,
    pub(crate) mode: u32,
    pub(crate) flags: InodeFlags,
}

impl Stat {
    pub(crate) fn of(item: &InodeItem) -> Self {
        Self {
            generation: item.generation.get(),
            transid: item.transid.get(),
            size: item.size.get(),
            nbytes: item.nbytes.get(),
            nlink: item.nlink.get(),
            mode: item.mode.get(),
            flags: item.inode_flags(),
        }
    }
    pub(crate) fn is_dir(&self) -> bool {
        self.mode & S_IFMT == S_IFDIR
    }
    /// Number of the file type as directory entries have it.
    pub(crate) fn file_type(&self) -> u8 {
        match self.mode & S_IFMT {
            S_IFREG => FileType::Regular as u8,
            S_IFDIR => FileType::Directory as u8,
            S_IFLNK => FileType::Symlink as u8,
            0o020_000 => FileType::CharDevice as u8,
            0o060_000 => FileType::BlockDevice as u8,
            0o010_000 => FileType::Fifo as u8,
            0o140_000 => FileType::Socket as u8,
            _ => 0,
        }
    }
}

/// File extents of a range of a file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    first: u64,
    end: u64,
    /// What they add to the inode's bytes.
    bytes: u64,
    /// Where the first gap begins.
    gap: Option<u64>,
    /// Where two of them overlap.
    overlap: Option<u64>,
    /// Length of an inline extent, and whether it is compressed.
    inline: Option<(u64, bool)>,
    stored: bool,
    compressed: bool,
    /// Where the last one begins that holds data.
    last_data: Option<u64>,
}

impl Span {
    /// Of one item.
    pub(crate) fn of(at: u64, extent: &FileExtent<'_>) -> Self {
        let mut span = Self {
            first: at,
            end: at
                .saturating_add(extent.len().checked_next_multiple_of(SECTOR).unwrap_or(u64::MAX)),
            bytes: 0,
            gap: None,
            overlap: None,
            inline: None,
            stored: false,
            compressed: false,
            last_data: None,
        };
        match extent {
            FileExtent::Inline(i) => {
                let compressed = i.compression != Compression::None;
                span.bytes = i.ram_bytes;
                span.inline = Some((i.ram_bytes, compressed));
                span.compressed = compressed;
            }
            FileExtent::Stored(r) => {
                span.stored = true;
                if !r.is_hole() {
                    span.bytes = r.num_bytes;
                    span.compressed = r.compression != Compression::None;
                    span.last_data = (r.kind == ExtentKind::Regular).then_some(at);
                }
            }
        }
        span
    }
    fn merge(&mut self, behind: Self) {
        if self.end > behind.first {
            self.overlap = self.overlap.or(Some(behind.first));
        } else if self.end < behind.first {
            self.gap = self.gap.or(Some(self.end));
        }
        self.end = self.end.max(behind.end);
        self.bytes = self.bytes.saturating_add(behind.bytes);
        self.gap = self.gap.or(behind.gap);
        self.overlap = self.overlap.or(behind.overlap);
        self.inline = self.inline.or(behind.inline);
        self.stored |= behind.stored;
        self.compressed |= behind.compressed;
        self.last_data = behind.last_data.or(self.last_data);
    }
}

/// What is known of an inode from some of its items.
#[derive(Clone, Debug)]
pub(crate) struct Inode {
    pub(crate) ino: ObjectId,
    pub(crate) first_key: Key,
    pub(crate) incomplete: bool,
    pub(crate) stat: Option<Stat>,
    /// Names that it records.
    pub(crate) names: u32,
    /// Those of them that a directory has: not a top directory's own.
    pub(crate) linked: u32,
    /// Bytes of names in its DIR_ITEM items, and in its DIR_INDEX items.
    pub(crate) item_bytes: u64,
    pub(crate) index_bytes: u64,
    /// Sum over its DIR_ITEMs minus that over its DIR_INDEXes: zero if they are the same entries.
    pub(crate) entries: u64,
    pub(crate) extents: Option<Span>,
}

impl Inode {
    pub(crate) fn new(key: Key) -> Self {
        Self {
            ino: key.objectid,
            first_key: key,
            incomplete: false,
            stat: None,
            names: 0,
            linked: 0,
            item_bytes: 0,
            index_bytes: 0,
            entries: 0,
            extents: None,
        }
    }
    pub(crate) fn add_extent(&mut self, at: u64, extent: &FileExtent<'_>) {
        let span = Span::of(at, extent);
        match &mut self.extents {
            Some(all) => all.merge(span),
            None => self.extents = Some(span),
        }
    }
}

impl Part for Inode {
    fn id(&self) -> u64 {
        self.ino.0
    }
    fn merge(&mut self, behind: Self) {
        self.incomplete |= behind.incomplete;
        self.stat = self.stat.or(behind.stat);
        self.names = self.names.saturating_add(behind.names);
        self.linked = self.linked.saturating_add(behind.linked);
        self.item_bytes = self.item_bytes.saturating_add(behind.item_bytes);
        self.index_bytes = self.index_bytes.saturating_add(behind.index_bytes);
        self.entries = self.entries.wrapping_add(behind.entries);
        match (&mut self.extents, behind.extents) {
            (Some(all), Some(more)) => all.merge(more),
            (none, more) => *none = none.or(more),
        }
    }
    fn set_incomplete(&mut self) {
        self.incomplete = true;
    }
}

/// Checks what can be seen of an inode alone.
pub(crate) fn check(world: &World<'_>, tree: TreeId, inode: &Inode) {
    let key = Key::new(inode.ino, KeyType::INODE_ITEM, 0);
    let add = |kind, what: String| world.add(Finding::new(kind, what).tree(tree).key(key));
    let Some(stat) = inode.stat else {
        if !inode.incomplete {
            let what = format!(
                "inode {} has items (first {}), but no inode item",
                inode.ino, inode.first_key
            );
            add(Kind::InodeMissing, what);
        }
        return;
    };
    let newest = world.generation();
    for (name, value) in [("generation", stat.generation), ("transid", stat.transid)] {
        if value > newest {
            add(Kind::InodeGeneration, format!("{name} is {value}, the superblock's is {newest}"));
        }
    }
    if inode.incomplete {
        return;
    }
    if stat.nlink != inode.names {
        add(
            Kind::InodeLinkCount,
            format!("nlink is {}, but it has {} names", stat.nlink, inode.names),
        );
    }
    if stat.is_dir() {
        directory(inode, &stat, &add);
    } else if inode.item_bytes + inode.index_bytes > 0 {
        add(Kind::ItemMisplaced, format!("it has mode {:o} and directory entries", stat.mode));
    }
    let in_place =
        stat.flags & (InodeFlags::NODATACOW | InodeFlags::NODATASUM) == InodeFlags::NODATACOW;
    if stat.mode & S_IFMT == S_IFREG && in_place {
        add(
            Kind::InodeFlags,
            "it has the flag for writing in place, but not that for no checksums".into(),
        );
    }
    match (stat.mode & S_IFMT, &inode.extents) {
        (S_IFLNK, None) => add(Kind::InodeSize, "the symbolic link has no target".into()),
        (S_IFREG, None) if stat.nbytes != 0 => {
            add(Kind::InodeBytes, format!("nbytes is {}, but it has no extents", stat.nbytes));
        }
        (S_IFREG, None) => {
            if !world.has(Incompat::NO_HOLES) && stat.size > 0 {
                add(Kind::FileExtentHole, format!("it has {} bytes and no extents", stat.size));
            }
        }
        (S_IFREG, Some(span)) => contents(world, &stat, span, &add),
        (S_IFLNK, Some(span)) => symlink(&stat, span, &add),
        (_, Some(_)) => {
            add(Kind::FileExtentMisplaced, format!("it has mode {:o} and file extents", stat.mode));
        }
        (_, None) => {}
    }
}

fn directory(inode: &Inode, stat: &Stat, add: &dyn Fn(Kind, String)) {
    if inode.names > 1 {
        add(Kind::DirLinks, format!("the directory has {} names", inode.names));
    }
    let names = inode.item_bytes.saturating_add(inode.index_bytes);
    if stat.size != names {
        add(
            Kind::DirectorySize,
            format!("size is {}, but the names in it make {names}", stat.size),
        );
    }
}

fn contents(world: &World<'_>, stat: &Stat, span: &Span, add: &dyn Fn(Kind, String)) {
    if stat.nbytes != span.bytes {
        add(
            Kind::InodeBytes,
            format!("nbytes is {}, but its extents have {}", stat.nbytes, span.bytes),
        );
    }
    if let Some(at) = span.overlap {
        add(Kind::FileExtentOverlap, format!("two of its extents overlap at offset {at}"));
    }
    let end = stat.size.checked_next_multiple_of(SECTOR).unwrap_or(u64::MAX);
    if !world.has(Incompat::NO_HOLES) {
        let gap = if span.first > 0 {
            Some(0)
        } else {
            span.gap.or((span.end < end).then_some(span.end))
        };
        if let Some(at) = gap.filter(|at| *at < end) {
            add(
                Kind::FileExtentHole,
                format!("nothing stands for what lies at offset {at} (size {})", stat.size),
            );
        }
    }
    // Without no-holes a crash can leave data behind the end, which Linux then still moves.
    if let Some(at) = span.last_data.filter(|at| *at >= end && world.has(Incompat::NO_HOLES)) {
        add(
            Kind::FileExtentBeyondEnd,
            format!("size is {}, but data is kept for offset {at}", stat.size),
        );
    }
    if let Some((len, compressed)) = span.inline {
        if len > SECTOR {
            add(
                Kind::FileExtentInline,
                format!("an inline extent has {len} bytes, more than a sector"),
            );
        }
        if !compressed && len > stat.size {
            add(Kind::InodeSize, format!("size is {}, but {len} bytes stand inline", stat.size));
        }
    }
    if stat.flags.contains(InodeFlags::NODATACOW) && span.compressed {
        let what = "it is marked to be written in place, and has compressed extents";
        add(Kind::FileExtentCompression, what.into());
    }
}

fn symlink(stat: &Stat, span: &Span, add: &dyn Fn(Kind, String)) {
    match span.inline {
        Some((len, _)) if !span.stored => {
            if stat.size != len {
                add(
                    Kind::InodeSize,
                    format!("size is {}, but the target has {len} bytes", stat.size),
                );
            }
            if stat.nbytes != len {
                add(
                    Kind::InodeBytes,
                    format!("nbytes is {}, but the target has {len} bytes", stat.nbytes),
                );
            }
        }
        _ => add(
            Kind::FileExtentInline,
            "the target of the symbolic link does not stand inline".into(),
        ),
    }
}

/// Is it an inode of the kind that subvolumes have?
pub(crate) fn is_file_id(id: ObjectId) -> bool {
    (ObjectId::FIRST_FREE..=ObjectId::LAST_FREE).contains(&id)
}
