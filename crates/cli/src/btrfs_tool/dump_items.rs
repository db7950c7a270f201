//! Blocks of trees and their items in the lines of `btrfs inspect-internal dump-tree`.
//!
//! Programs look for these lines in a dump, so words, order and escapes are the same. What has no
//! lines of its own here (quotas, fs-verity) is shown by its key only. An item that cannot be
//! understood says why.

use crate::commands::receive::dump::escaped;
use crate::print;
use larder_format::dev_item::DevItem;
use larder_format::items::{
    BalanceItem, BlockGroupFlags, BlockGroupItem, Chunk, DevExtent, DevReplace, DevStats,
    DirEntries, DirLogIndex, ExtRefs, ExtentFlags, ExtentItem, ExtentRef, FileExtent, FileType,
    FreeSpaceInfo, InodeItem, InodeRefs, ReplaceState, RootItem, RootRef, SpaceCacheItem, Timespec,
    parse_keyed_refs,
};
use larder_format::node::NodeView;
use larder_format::{CsumType, FormatResult, Key, KeyType, ObjectId};
use std::fmt::Write as _;
use zerocopy::FromBytes;

/// What is shown of blocks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Look {
    pub(super) csum: CsumType,
    pub(super) csum_headers: bool,
    pub(super) csum_items: bool,
    pub(super) hide_names: bool,
    pub(super) sectorsize: u32,
    pub(super) nodesize: u32,
}

/// What stands for zero at the place of a key's type, where that is no type.
const UNTYPED: KeyType = KeyType(0);

/// A key in parentheses.
pub(super) fn key_text(key: Key) -> String {
    let kind = match (key.kind, key.objectid) {
        (UNTYPED, ObjectId::FREE_SPACE) => "UNTYPED".to_owned(),
        (KeyType::UUID_SUBVOL, _) => "UUID_KEY_SUBVOL".to_owned(),
        (KeyType::UUID_RECEIVED_SUBVOL, _) => "UUID_KEY_RECEIVED_SUBVOL".to_owned(),
        (kind, _) => kind.to_string(),
    };
    let (id, at) = (key.objectid, key.offset);
    match key.kind {
        KeyType::UUID_SUBVOL | KeyType::UUID_RECEIVED_SUBVOL => {
            format!("(0x{:016x} {kind} 0x{at:016x})", id.0)
        }
        KeyType::QGROUP_INFO | KeyType::QGROUP_LIMIT => {
            format!("({} {kind} {})", id.0, qgroup(at))
        }
        KeyType::QGROUP_RELATION => format!("({} {kind} {})", qgroup(id.0), qgroup(at)),
        KeyType::ROOT_ITEM if id == ObjectId::TREE_RELOC => {
            format!("({} {kind} {})", id_text(id, key.kind), id_text(ObjectId(at), key.kind))
        }
        _ => format!("({} {kind} {at})", id_text(id, key.kind)),
    }
}

fn qgroup(id: u64) -> String {
    format!("{}/{}", id >> 48, id & ((1 << 48) - 1))
}

/// The first field of a key of this type; numbers with a meaning are names.
pub(super) fn id_text(id: ObjectId, kind: KeyType) -> String {
    let name = match (id, kind) {
        (_, KeyType::DEV_EXTENT) => return id.0.to_string(),
        (ObjectId::DEV_STATS, KeyType::PERSISTENT_ITEM) => "DEV_STATS",
        (ObjectId::DEV_ITEMS, KeyType::DEV_ITEM) => "DEV_ITEMS",
        (ObjectId::FIRST_CHUNK_TREE, KeyType::CHUNK_ITEM) => "FIRST_CHUNK_TREE",
        (ObjectId::ROOT_TREE, _) => "ROOT_TREE",
        (ObjectId::EXTENT_TREE, _) => "EXTENT_TREE",
        (ObjectId::CHUNK_TREE, _) => "CHUNK_TREE",
        (ObjectId::DEV_TREE, _) => "DEV_TREE",
        (ObjectId::FS_TREE, _) => "FS_TREE",
        (ObjectId::ROOT_TREE_DIR, _) => "ROOT_TREE_DIR",
        (ObjectId::CSUM_TREE, _) => "CSUM_TREE",
        (ObjectId::QUOTA_TREE, _) => "QUOTA_TREE",
        (ObjectId::UUID_TREE, _) => "UUID_TREE",
        (ObjectId::FREE_SPACE_TREE, _) => "FREE_SPACE_TREE",
        (ObjectId::BLOCK_GROUP_TREE, _) => "BLOCK_GROUP_TREE",
        (ObjectId::BALANCE, _) => "BALANCE",
        (ObjectId::ORPHAN, _) => "ORPHAN",
        (ObjectId::TREE_LOG, _) => "TREE_LOG",
        (ObjectId::TREE_RELOC, _) => "TREE_RELOC",
        (ObjectId::DATA_RELOC_TREE, _) => "DATA_RELOC_TREE",
        (ObjectId::EXTENT_CSUM, _) => "EXTENT_CSUM",
        (ObjectId::FREE_SPACE, _) => "FREE_SPACE",
        (ObjectId::FREE_INO, _) => "FREE_INO",
        _ => return id.0.to_string(),
    };
    name.to_owned()
}

/// The id of a tree.
pub(super) fn tree_text(id: ObjectId) -> String {
    id_text(id, UNTYPED)
}

impl Look {
    /// A block with all that it holds.
    pub(super) fn block(&self, view: NodeView<'_>) -> String {
        let mut out = self.head(view);
        if view.level() > 0 {
            for pointer in view.pointers() {
                let (at, generation) = (pointer.blockptr.get(), pointer.generation.get());
                let key = key_text(pointer.key.into());
                let _ = writeln!(out, "\tkey {key} block {at} gen {generation}");
            }
            return out;
        }
        for (slot, item) in view.items().iter().enumerate() {
            let key = Key::from(item.key);
            let (offset, size) = (item.offset.get(), item.size.get());
            let shown = key_text(key);
            let _ = writeln!(out, "\titem {slot} key {shown} itemoff {offset} itemsize {size}");
            let lines = view.data(slot).map_or(Ok(String::new()), |data| self.item(key, data));
            match lines {
                Ok(lines) => out += &lines,
                Err(e) => {
                    let _ = writeln!(out, "\t\tdamaged: {}", print::harmless(&e.0));
                }
            }
        }
        out
    }

    fn head(&self, view: NodeView<'_>) -> String {
        let header = view.header();
        let (at, items, owner) = (view.bytenr(), view.nritems(), tree_text(view.owner()));
        let generation = view.generation();
        let mut out = String::new();
        let (kind, level, free) = match view.level() {
            0 => ("leaf", String::new(), view.leaf_free()),
            level => {
                let most = larder_format::node::max_pointers(self.nodesize);
                ("node", format!(" level {level}"), most.saturating_sub(items))
            }
        };
        let _ = writeln!(
            out,
            "{kind} {at}{level} items {items} free space {free} generation {generation} owner \
             {owner}"
        );
        let flags = named_bits(view.flags(), &[(1, "WRITTEN"), (2, "RELOC")]);
        let revision = header.flags_and_rev.get() >> 56;
        let _ = write!(out, "{kind} {at} flags {flags} backref revision {revision}");
        if self.csum_headers {
            let _ = write!(out, " csum {}", hex(&header.csum[..self.csum.size()]));
        }
        let _ = writeln!(out, "\nfs uuid {}", print::uuid(header.fsid));
        let _ = writeln!(out, "chunk uuid {}", print::uuid(header.chunk_tree_uuid));
        out
    }

    fn name(&self, name: &[u8]) -> String {
        if self.hide_names { "HIDDEN".to_owned() } else { escaped(name) }
    }

    /// The lines of an item.
    fn item(&self, key: Key, data: &[u8]) -> FormatResult<String> {
        match key.kind {
            KeyType::INODE_ITEM => InodeItem::parse(data).map(inode),
            KeyType::INODE_REF | KeyType::INODE_EXTREF => self.names(key.kind, data),
            KeyType::DIR_ITEM | KeyType::DIR_INDEX | KeyType::XATTR_ITEM => self.entries(data),
            KeyType::DIR_LOG_INDEX => {
                Ok(format!("\t\tdir log end {}\n", DirLogIndex::parse(data)?.last.get()))
            }
            KeyType::ORPHAN_ITEM => Ok("\t\torphan item\n".to_owned()),
            KeyType::EXTENT_DATA => FileExtent::parse(data).map(|e| file_extent(&e)),
            KeyType::EXTENT_CSUM => Ok(self.sums(key, data)),
            KeyType::ROOT_ITEM => RootItem::parse(data).map(|root| root_item(&root, data.len())),
            KeyType::ROOT_REF | KeyType::ROOT_BACKREF => self.root_ref(key.kind, data),
            KeyType::UUID_SUBVOL | KeyType::UUID_RECEIVED_SUBVOL => Ok(subvolume_ids(data)),
            UNTYPED if key.objectid == ObjectId::FREE_SPACE => {
                SpaceCacheItem::parse(data).map(space_cache)
            }
            _ => space_item(key, data),
        }
    }

    fn names(&self, kind: KeyType, data: &[u8]) -> FormatResult<String> {
        let mut out = String::new();
        if kind == KeyType::INODE_REF {
            for found in InodeRefs::new(data) {
                let found = found?;
                let (index, len) = (found.index, found.name.len());
                let name = self.name(found.name);
                let _ = writeln!(out, "\t\tindex {index} namelen {len} name: {name}");
            }
            return Ok(out);
        }
        for found in ExtRefs::new(data) {
            let found = found?;
            let (index, parent, len) = (found.index, found.parent.0, found.name.len());
            let name = self.name(found.name);
            let _ = writeln!(out, "\t\tindex {index} parent {parent} namelen {len} name: {name}");
        }
        Ok(out)
    }

    fn entries(&self, data: &[u8]) -> FormatResult<String> {
        let mut out = String::new();
        for entry in DirEntries::new(data) {
            let entry = entry?;
            let (location, kind) = (key_text(entry.location), kind_text(entry.kind));
            let _ = writeln!(out, "\t\tlocation key {location} type {kind}");
            let (transid, data_len, name_len) = (entry.transid, entry.data.len(), entry.name.len());
            let _ = writeln!(
                out,
                "\t\ttransid {transid} data_len {data_len} name_len {name_len}\n\t\tname: {}",
                self.name(entry.name)
            );
            if !entry.data.is_empty() {
                let _ = writeln!(out, "\t\tdata {}", self.name(entry.data));
            }
        }
        Ok(out)
    }

    fn root_ref(&self, kind: KeyType, data: &[u8]) -> FormatResult<String> {
        let found = RootRef::parse(data)?;
        let what = if kind == KeyType::ROOT_REF { "ref" } else { "backref" };
        let (dir, sequence, name) = (found.dirid.0, found.sequence, self.name(found.name));
        Ok(format!("\t\troot {what} key dirid {dir} sequence {sequence} name {name}\n"))
    }

    fn sums(&self, key: Key, data: &[u8]) -> String {
        /// Width of the lines.
        const ROOM: usize = 128;
        let size = self.csum.size();
        let sector = u64::from(self.sectorsize);
        let len = (data.len() / size) as u64 * sector;
        let (start, end) = (key.offset, key.offset.saturating_add(len));
        let mut out = format!("\t\trange start {start} end {end} length {len}");
        if self.csum_items {
            let per_line = (ROOM / (2 * size + 16)).clamp(1, 4);
            for (n, sum) in data.chunks_exact(size).enumerate() {
                let before = if n % per_line == 0 { "\n\t\t" } else { " " };
                let at = start.saturating_add(n as u64 * sector);
                let _ = write!(out, "{before}[{at}] {}", hex(sum));
            }
        }
        out + "\n"
    }
}

/// Bytes of a checksum, as they lie there.
fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold("0x".to_owned(), |mut out, byte| {
        let _ = write!(out, "{byte:02x}");
        out
    })
}

/// `0x3(WRITTEN|RELOC)`.
fn named_bits(bits: u64, names: &[(u64, &str)]) -> String {
    let set: Vec<&str> =
        names.iter().filter(|(bit, _)| bits & bit != 0).map(|(_, name)| *name).collect();
    let set = if set.is_empty() { "none".to_owned() } else { set.join("|") };
    format!("0x{bits:x}({set})")
}

fn time_line(name: &str, time: Timespec) -> String {
    let (sec, nsec) = (time.sec.get(), time.nsec.get());
    format!("\t\t{name} {sec}.{nsec} ({})\n", print::time(sec))
}

fn inode(i: &InodeItem) -> String {
    let flags: Vec<_> =
        i.inode_flags().iter_names().map(|(name, bit)| (bit.bits(), name)).collect();
    let mut out = format!(
        "\t\tgeneration {} transid {} size {} nbytes {}\n\
         \t\tblock group {} mode {:o} links {} uid {} gid {} rdev {}\n\
         \t\tsequence {} flags {}\n",
        i.generation.get(),
        i.transid.get(),
        i.size.get(),
        i.nbytes.get(),
        i.block_group.get(),
        i.mode.get(),
        i.nlink.get(),
        i.uid.get(),
        i.gid.get(),
        i.rdev.get(),
        i.sequence.get(),
        named_bits(i.flags.get(), &flags),
    );
    let times = [("atime", i.atime), ("ctime", i.ctime), ("mtime", i.mtime), ("otime", i.otime)];
    times.iter().for_each(|(name, time)| out += &time_line(name, *time));
    out
}

fn root_item(root: &RootItem, len: usize) -> String {
    let mut out = format!(
        "\t\tgeneration {} root_dirid {} bytenr {} byte_limit {} bytes_used {}\n\
         \t\tlast_snapshot {} flags {} refs {}\n\
         \t\tdrop_progress key {} drop_level {}\n",
        root.generation.get(),
        root.root_dirid.get(),
        root.bytenr.get(),
        root.byte_limit.get(),
        root.bytes_used.get(),
        root.last_snapshot.get(),
        named_bits(root.flags.get(), &[(1, "RDONLY"), (1 << 48, "DEAD")]),
        root.refs.get(),
        key_text(root.drop_progress.into()),
        root.drop_level,
    );
    let _ = writeln!(out, "\t\tlevel {} generation_v2 {}", root.level, root.root_generation());
    if len < size_of::<RootItem>() {
        return out;
    }
    for (name, id) in [
        ("uuid", root.uuid),
        ("parent_uuid", root.parent_uuid),
        ("received_uuid", root.received_uuid),
    ] {
        let _ = writeln!(out, "\t\t{name} {}", print::uuid(id));
    }
    let _ = writeln!(
        out,
        "\t\tctransid {} otransid {} stransid {} rtransid {}",
        root.ctransid.get(),
        root.otransid.get(),
        root.stransid.get(),
        root.rtransid.get()
    );
    let times = [
        ("ctime", root.ctime),
        ("otime", root.otime),
        ("stime", root.stime),
        ("rtime", root.rtime),
    ];
    times.iter().for_each(|(name, time)| out += &time_line(name, *time));
    out
}

fn kind_text(kind: FileType) -> &'static str {
    match kind {
        FileType::Regular => "FILE",
        FileType::Directory => "DIR",
        FileType::CharDevice => "CHRDEV",
        FileType::BlockDevice => "BLKDEV",
        FileType::Fifo => "FIFO",
        FileType::Socket => "SOCK",
        FileType::Symlink => "SYMLINK",
        FileType::Xattr => "XATTR",
        FileType::Unknown => "UNKNOWN",
    }
}

fn file_extent(extent: &FileExtent<'_>) -> String {
    let packed = |c: larder_format::items::Compression| format!("{} ({})", c.to_disk(), c.name());
    match extent {
        FileExtent::Inline(i) => format!(
            "\t\tgeneration {} type 0 (inline)\n\
             \t\tinline extent data size {} ram_bytes {} compression {}\n",
            i.generation,
            i.data.len(),
            i.ram_bytes,
            packed(i.compression)
        ),
        FileExtent::Stored(r) if r.kind == larder_format::items::ExtentKind::Prealloc => format!(
            "\t\tgeneration {} type 2 (prealloc)\n\
             \t\tprealloc data disk byte {} nr {}\n\
             \t\tprealloc data offset {} nr {}\n",
            r.generation, r.disk_bytenr, r.disk_num_bytes, r.offset, r.num_bytes
        ),
        FileExtent::Stored(r) => format!(
            "\t\tgeneration {} type 1 (regular)\n\
             \t\textent data disk byte {} nr {}\n\
             \t\textent data offset {} nr {} ram {}\n\
             \t\textent compression {}\n",
            r.generation,
            r.disk_bytenr,
            r.disk_num_bytes,
            r.offset,
            r.num_bytes,
            r.ram_bytes,
            packed(r.compression)
        ),
    }
}

fn subvolume_ids(data: &[u8]) -> String {
    data.chunks_exact(8).fold(String::new(), |mut out, id| {
        let id = u64::from_le_bytes(*id.first_chunk().expect("eight bytes"));
        let _ = writeln!(out, "\t\tsubvol_id {id}");
        out
    })
}

fn space_cache(item: &SpaceCacheItem) -> String {
    format!(
        "\t\tlocation key {}\n\t\tcache generation {} entries {} bitmaps {}\n",
        key_text(item.location.into()),
        item.generation.get(),
        item.entries.get(),
        item.bitmaps.get()
    )
}

/// Items about space.
fn space_item(key: Key, data: &[u8]) -> FormatResult<String> {
    Ok(match key.kind {
        KeyType::EXTENT_ITEM | KeyType::METADATA_ITEM => extent(key, data)?,
        KeyType::TREE_BLOCK_REF => "\t\ttree block backref\n".to_owned(),
        KeyType::SHARED_BLOCK_REF => "\t\tshared block backref\n".to_owned(),
        KeyType::EXTENT_DATA_REF | KeyType::SHARED_DATA_REF => {
            let refs = parse_keyed_refs(&key, data)?;
            let line = |(found, count): &(ExtentRef, u32)| match found {
                ExtentRef::SharedData { .. } => {
                    format!("\t\tshared data backref count {count}\n")
                }
                found => format!("\t\t{}\n", reference(found, *count)),
            };
            refs.iter().map(line).collect()
        }
        KeyType::BLOCK_GROUP_ITEM => {
            let group = BlockGroupItem::parse(key.offset, data)?;
            let (used, owner) = (group.used.get(), group.chunk_objectid.get());
            let flags = group_text(group.flags.get());
            format!("\t\tblock group used {used} chunk_objectid {owner} flags {flags}\n")
        }
        KeyType::FREE_SPACE_INFO => {
            let info = FreeSpaceInfo::parse(data)?;
            let (count, flags) = (info.extent_count.get(), info.flags.get());
            format!("\t\tfree space info extent count {count} flags {flags}\n")
        }
        KeyType::FREE_SPACE_EXTENT => "\t\tfree space extent\n".to_owned(),
        KeyType::FREE_SPACE_BITMAP => "\t\tfree space bitmap\n".to_owned(),
        KeyType::CHUNK_ITEM => chunk(&Chunk::parse(data)?),
        KeyType::DEV_ITEM => {
            DevItem::read_from_bytes(data).map_or_else(|_| String::new(), |item| device(&item))
        }
        KeyType::DEV_EXTENT => device_extent(DevExtent::parse(data)?),
        KeyType::PERSISTENT_ITEM => statistics(key, &DevStats::parse(data)?),
        KeyType::DEV_REPLACE => replacement(DevReplace::parse(data)?),
        KeyType::TEMPORARY_ITEM if key == BalanceItem::key() => balance(BalanceItem::parse(data)?),
        _ => String::new(),
    })
}

fn extent(key: Key, data: &[u8]) -> FormatResult<String> {
    let item = ExtentItem::parse(key.kind, data)?;
    let mut flags = Vec::new();
    for (flag, name) in [
        (ExtentFlags::DATA, "DATA"),
        (ExtentFlags::TREE_BLOCK, "TREE_BLOCK"),
        (ExtentFlags::FULL_BACKREF, "FULL_BACKREF"),
    ] {
        flags.extend(item.flags.contains(flag).then_some(name));
    }
    let (refs, generation) = (item.refs, item.generation);
    let mut out = format!("\t\trefs {refs} gen {generation} flags {}\n", flags.join("|"));
    if key.kind == KeyType::METADATA_ITEM {
        let _ = writeln!(out, "\t\ttree block skinny level {}", key.offset);
    } else if let Some(block) = &item.block {
        let (first, level) = (key_text(block.key.into()), block.level);
        let _ = writeln!(out, "\t\ttree block key {first} level {level}");
    }
    for (found, count) in &item.inline {
        let (kind, order) = (found.kind().0, found.sequence());
        let _ = writeln!(out, "\t\t({kind} 0x{order:x}) {}", reference(found, *count));
    }
    Ok(out)
}

fn reference(found: &ExtentRef, count: u32) -> String {
    match *found {
        ExtentRef::TreeBlock { root } => format!("tree block backref root {}", tree_text(root)),
        ExtentRef::SharedBlock { parent } => format!("shared block backref parent {parent}"),
        ExtentRef::Data { root, objectid, offset } => format!(
            "extent data backref root {} objectid {} offset {} count {count}",
            tree_text(root),
            objectid.0,
            offset.0
        ),
        ExtentRef::SharedData { parent } => {
            format!("shared data backref parent {parent} count {count}")
        }
        ExtentRef::Owner { root } => format!("extent owner root {}", root.0),
    }
}

/// `METADATA|DUP`; a profile without a bit is `single`.
fn group_text(bits: u64) -> String {
    let flags = BlockGroupFlags::from_bits_truncate(bits);
    let mut names: Vec<&str> = flags.iter_names().map(|(name, _)| name).collect();
    let kinds = BlockGroupFlags::DATA | BlockGroupFlags::SYSTEM | BlockGroupFlags::METADATA;
    if (flags - kinds).is_empty() {
        names.push("single");
    }
    names.join("|")
}

fn chunk(chunk: &Chunk) -> String {
    let mut out = format!(
        "\t\tlength {} owner {} stripe_len {} type {}\n\
         \t\tio_align {} io_width {} sector_size {}\n\
         \t\tnum_stripes {} sub_stripes {}\n",
        chunk.length,
        chunk.owner.0,
        chunk.stripe_len,
        group_text(chunk.flags.bits()),
        chunk.io_align,
        chunk.io_width,
        chunk.sector_size,
        chunk.stripes.len(),
        chunk.sub_stripes
    );
    for (n, stripe) in chunk.stripes.iter().enumerate() {
        let (device, offset) = (stripe.devid.0, stripe.offset.0);
        let _ = writeln!(out, "\t\t\tstripe {n} devid {device} offset {offset}");
        let _ = writeln!(out, "\t\t\tdev_uuid {}", print::uuid(stripe.dev_uuid));
    }
    out
}

fn device(d: &DevItem) -> String {
    format!(
        "\t\tdevid {} total_bytes {} bytes_used {}\n\
         \t\tio_align {} io_width {} sector_size {} type {}\n\
         \t\tgeneration {} start_offset {} dev_group {}\n\
         \t\tseek_speed {} bandwidth {}\n\
         \t\tuuid {}\n\t\tfsid {}\n",
        d.devid.get(),
        d.total_bytes.get(),
        d.bytes_used.get(),
        d.io_align.get(),
        d.io_width.get(),
        d.sector_size.get(),
        d.kind.get(),
        d.generation.get(),
        d.start_offset.get(),
        d.dev_group.get(),
        d.seek_speed,
        d.bandwidth,
        print::uuid(d.uuid),
        print::uuid(d.fsid)
    )
}

fn device_extent(e: &DevExtent) -> String {
    format!(
        "\t\tdev extent chunk_tree {}\n\
         \t\tchunk_objectid {} chunk_offset {} length {}\n\
         \t\tchunk_tree_uuid {}\n",
        e.chunk_tree.get(),
        e.chunk_objectid.get(),
        e.chunk_offset.get(),
        e.length.get(),
        print::uuid(e.chunk_tree_uuid)
    )
}

fn replacement(item: &DevReplace) -> String {
    let state = match item.state() {
        ReplaceState::Never => "NEVER_STARTED",
        ReplaceState::Started => "STARTED",
        ReplaceState::Finished => "FINISHED",
        ReplaceState::Canceled => "CANCELED",
        ReplaceState::Suspended => "SUSPENDED",
    };
    let time = |seconds: u64| format!("{seconds} ({})", print::time(seconds.cast_signed()));
    format!(
        "\t\tsrc devid {} cursor left {} cursor right {} mode {}\n\
         \t\tstate {state} write errors {} uncorrectable read errors {}\n\
         \t\tstart time {}\n\
         \t\tstop time {}\n",
        item.source().0.cast_signed(),
        item.cursor().0,
        item.cursor_right().0,
        if item.avoids_source() { "AVOID" } else { "ALWAYS" },
        item.write_errors.get(),
        item.unreadable.get(),
        time(item.started.get()),
        time(item.stopped.get()),
    )
}

fn balance(item: &BalanceItem) -> String {
    let mut out = format!(
        "\t\ttemporary item objectid BALANCE offset 0\n\
         \t\tbalance status flags {}\n",
        item.flags.get()
    );
    for (name, set) in [("DATA", item.data), ("METADATA", item.metadata), ("SYSTEM", item.system)] {
        let _ = write!(
            out,
            "\t\t{name}\n\
             \t\tprofiles {} devid {} target {} flags {}\n\
             \t\tusage_min {} usage_max {} pstart {} pend {}\n\
             \t\tvstart {} vend {} limit_min {} limit_max {}\n\
             \t\tstripes_min {} stripes_max {}\n",
            set.profiles.get(),
            set.devid.get(),
            set.target.get(),
            set.flags.get(),
            set.usage.low.get(),
            set.usage.high.get(),
            set.pstart.get(),
            set.pend.get(),
            set.vstart.get(),
            set.vend.get(),
            set.limit.low.get(),
            set.limit.high.get(),
            set.stripes_min.get(),
            set.stripes_max.get(),
        );
    }
    out
}

fn statistics(key: Key, s: &DevStats) -> String {
    format!(
        "\t\tpersistent item objectid {} offset {}\n\
         \t\tdevice stats\n\
         \t\twrite_errs {} read_errs {} flush_errs {} corruption_errs {} generation {}\n",
        id_text(key.objectid, key.kind),
        key.offset,
        s.write_errors.get(),
        s.read_errors.get(),
        s.flush_errors.get(),
        s.corruption_errors.get(),
        s.generation_errors.get()
    )
}
