//! Log trees: can the next mount replay them?
//!
//! A log hangs on the superblock, not on the root tree; its nodes and the data that only it knows
//! are in no extent tree. So it is checked by itself: its nodes, the types of its items, its data
//! ([`data`]). What replaying it would give is not checked.

mod data;

use self::data::{LoggedData, damaged};
use crate::finding::{Finding, Kind};
use crate::source::{Edge, Node};
use crate::sums::verify;
use crate::walk::{Memory, Visit, Walk};
use crate::world::Pass;
use larder_format::items::keys::csum_key;
use larder_format::items::{
    DirEntries, DirLogIndex, ExtRefs, FileExtent, InodeItem, InodeRefs, RootItem,
};
use larder_format::node::NodeView;
use larder_format::{
    FormatError, FormatResult, Key, KeyType, Logical, LogicalRange, ObjectId, SECTOR_SIZE,
};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Checks the log, if there is one.
pub(crate) fn check(pass: &Pass<'_>, extent_root: Option<&Edge>) {
    let sb = &pass.world.superblock;
    let Some(at) = sb.log_root() else { return };
    let what = format!("there is a log at {at}, of transaction {}", sb.generation().next());
    pass.world.add(Finding::new(Kind::LogPresent, what).tree(ObjectId::TREE_LOG).address(at));
    let top = Edge::root(ObjectId::TREE_LOG, at, sb.log_root_level, sb.generation().next());
    let visitor = Log::new(pass, true);
    walk(pass, &visitor, &top);
    let mut lost = visitor.lost.into_inner();
    let mut roots = visitor.roots.into_inner();
    roots.sort_unstable_by_key(|(key, _)| *key);
    for (key, item) in roots {
        let edge = Edge::root(ObjectId::TREE_LOG, item.root(), item.level, item.root_generation());
        if item.root_generation() != sb.generation().next() {
            let what = format!(
                "the log of tree {} has generation {}, expected {}",
                ObjectId(key.offset),
                item.root_generation(),
                sb.generation().next()
            );
            damaged(pass, key, what);
        }
        let visitor = Log::new(pass, false);
        walk(pass, &visitor, &edge);
        let part_lost = visitor.lost.into_inner();
        lost |= part_lost;
        data::check(pass, extent_root, visitor.data.into_inner(), part_lost);
    }
    if lost {
        let what = "part of the log cannot be read";
        pass.world.add(Finding::new(Kind::LogDamaged, what).tree(ObjectId::TREE_LOG).address(at));
    }
}

fn walk(pass: &Pass<'_>, visitor: &Log<'_>, edge: &Edge) {
    let memory = Memory::new();
    let walk = Walk {
        source: &pass.world.source,
        seen: &pass.seen,
        memory: &memory,
        visitor,
        report: pass.first,
    };
    walk.tree(edge, None);
}

struct Log<'a> {
    pass: &'a Pass<'a>,
    /// The tree of log roots, or one of the logs?
    top: bool,
    roots: Mutex<Vec<(Key, RootItem)>>,
    data: Mutex<LoggedData>,
    lost: AtomicBool,
}

impl Visit for Log<'_> {
    /// From the first checksums to the last ones: replaying overlapping ones fails.
    type Piece = Option<LogicalRange>;
    const SHARED: bool = false;

    fn empty(&self) -> Self::Piece {
        None
    }
    fn lost(&self, _: &Edge) -> Self::Piece {
        self.lost.store(true, Relaxed);
        None
    }
    fn child(&self, _: NodeView<'_>, _: &Edge) {}
    fn join(&self, _: &Edge, left: Self::Piece, right: Self::Piece, _: bool) -> Self::Piece {
        let (Some(left), Some(right)) = (left, right) else { return left.or(right) };
        let (end, next) = (left.end, right.start);
        if end > next {
            let what = format!("checksums up to {end} are followed by checksums from {next} on");
            damaged(self.pass, csum_key(next), what);
        }
        Some(LogicalRange::between(left.start, right.end.max(end)))
    }
    fn leaf(&self, edge: &Edge, node: &Node, _: bool) -> Self::Piece {
        let view = node.view();
        let size = self.pass.world.superblock.csum_type().size();
        let mut piece = None;
        let mut sums = Vec::new();
        for slot in 0..view.items().len() {
            let (Some(key), Some(data)) = (view.key(slot), view.data(slot)) else { continue };
            let done = if self.top { self.root(key, data) } else { self.item(key, data) };
            if let Err(e) = done {
                damaged(self.pass, key, e.to_string());
            }
            if key.kind == KeyType::EXTENT_CSUM {
                let range = self.range_of_sums(key, data);
                piece = self.join(edge, piece, Some(range), true);
                sums.push((range.start, data));
            }
        }
        if let Some(check) = self.pass.data.filter(|_| self.pass.first) {
            verify(self.pass, check, &sums, size);
        }
        piece
    }
}

impl<'a> Log<'a> {
    fn new(pass: &'a Pass<'a>, top: bool) -> Self {
        Self {
            pass,
            top,
            roots: Mutex::default(),
            data: Mutex::default(),
            lost: AtomicBool::new(false),
        }
    }

    /// What the checksums of an item are for.
    fn range_of_sums(&self, key: Key, data: &[u8]) -> LogicalRange {
        let sectors = (data.len() / self.pass.world.superblock.csum_type().size()) as u64;
        LogicalRange::new(Logical(key.offset), sectors * u64::from(SECTOR_SIZE))
    }

    fn root(&self, key: Key, data: &[u8]) -> FormatResult<()> {
        if key.kind != KeyType::ROOT_ITEM || key.objectid != ObjectId::TREE_LOG {
            return Err(FormatError::new(format!("{key} has no place in the tree of logs")));
        }
        self.roots.lock().push((key, RootItem::parse(data)?));
        Ok(())
    }

    fn item(&self, key: Key, data: &[u8]) -> FormatResult<()> {
        match key.kind {
            KeyType::INODE_ITEM => InodeItem::parse(data).map(|item| {
                self.data.lock().inode(key.objectid, item.inode_flags());
            }),
            KeyType::INODE_REF => InodeRefs::new(data).try_for_each(|r| r.map(drop)),
            KeyType::INODE_EXTREF => ExtRefs::new(data).try_for_each(|r| r.map(drop)),
            KeyType::XATTR_ITEM | KeyType::DIR_ITEM | KeyType::DIR_INDEX => {
                DirEntries::new(data).try_for_each(|r| r.map(drop))
            }
            KeyType::DIR_LOG_INDEX => DirLogIndex::parse(data).map(drop),
            KeyType::EXTENT_CSUM => {
                self.data.lock().sums(self.range_of_sums(key, data));
                Ok(())
            }
            KeyType::DIR_LOG_ITEM => Ok(()),
            KeyType::EXTENT_DATA => {
                if let FileExtent::Stored(r) = FileExtent::parse(data)?
                    && !r.is_hole()
                {
                    let extent = LogicalRange::new(r.disk_bytenr, r.disk_num_bytes);
                    let chunk = self.pass.world.chunks.find(r.disk_bytenr);
                    if chunk.is_none_or(|c| extent.end > c.end()) {
                        let what = format!(
                            "data at {} (+{}) lies in no chunk",
                            r.disk_bytenr, r.disk_num_bytes
                        );
                        return Err(FormatError::new(what));
                    }
                    self.data.lock().extent(key, &r);
                }
                Ok(())
            }
            _ => Err(FormatError::new(format!("{key} has no place in a log"))),
        }
    }
}
