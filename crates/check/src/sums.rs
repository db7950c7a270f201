//! The checksum tree, and with [`crate::Options::data`] the data behind it.
//!
//! Each item holds the checksums of a range. The ranges go to [`crate::coverage`], where they meet
//! the extents and the files. Data is read where its checksums are, a leaf's worth at a time and in
//! parallel, every copy of it.

use crate::coverage::Fact;
use crate::data::Data;
use crate::finding::{Finding, Kind};
use crate::source::{Edge, Node};
use crate::walk::Visit;
use crate::world::Pass;
use larder_format::items::keys::csum_key;
use larder_format::node::NodeView;
use larder_format::{KeyType, Logical, LogicalRange, ObjectId, SECTOR_SIZE};

/// Walks the checksum tree.
pub(crate) struct Sums<'a> {
    pub(crate) pass: &'a Pass<'a>,
}

impl Visit for Sums<'_> {
    /// From the beginning of the first range to the end of the last one.
    type Piece = Option<LogicalRange>;
    const SHARED: bool = false;

    fn empty(&self) -> Self::Piece {
        None
    }
    fn lost(&self, edge: &Edge) -> Self::Piece {
        self.pass.lost(edge);
        None
    }
    fn child(&self, parent: NodeView<'_>, edge: &Edge) {
        self.pass.uses_child(parent, edge);
    }
    fn join(&self, edge: &Edge, left: Self::Piece, right: Self::Piece, _: bool) -> Self::Piece {
        match (left, right) {
            (Some(left), Some(right)) => {
                if left.end > right.start {
                    self.overlap(edge, left.end, right.start);
                }
                Some(LogicalRange::between(left.start, right.end.max(left.end)))
            }
            (some, none) => some.or(none),
        }
    }
    fn leaf(&self, edge: &Edge, node: &Node, _: bool) -> Self::Piece {
        let view = node.view();
        let size = self.pass.world.superblock.csum_type().size();
        let mut ranges = Vec::new();
        let mut piece: Self::Piece = None;
        for slot in 0..view.items().len() {
            let (Some(key), Some(data)) = (view.key(slot), view.data(slot)) else { continue };
            if key.kind != KeyType::EXTENT_CSUM || key.objectid != ObjectId::EXTENT_CSUM {
                self.pass.misplaced(edge, key);
                continue;
            }
            let len = (data.len() / size) as u64 * u64::from(SECTOR_SIZE);
            let at = Logical(key.offset);
            let range = LogicalRange::new(at, len);
            if let Some(before) = piece
                && before.end > at
            {
                self.overlap(edge, before.end, at);
            }
            piece = Some(LogicalRange { start: piece.map_or(at, |before| before.start), ..range });
            let inside = self.pass.world.chunks.covered(range);
            if let Some(coverage) = self.pass.coverage {
                coverage.add(Fact::Sums, LogicalRange::new(at, inside));
            }
            if inside < len {
                self.pass.add(|| {
                    let what =
                        format!("there are checksums for {len} bytes at {at}, not all in a chunk");
                    let finding = Finding::new(Kind::ChecksumWithoutExtent, what).tree(edge.tree);
                    finding.key(key).address(at)
                });
            }
            ranges.push((at, data));
        }
        if let Some(check) = self.pass.data.filter(|_| self.pass.first) {
            verify(self.pass, check, &ranges, size);
        }
        piece
    }
}

impl Sums<'_> {
    fn overlap(&self, edge: &Edge, end: Logical, next: Logical) {
        self.pass.add(|| {
            let what = format!("checksums up to {end} are followed by checksums from {next} on");
            let finding = Finding::new(Kind::ChecksumOverlap, what).tree(edge.tree);
            finding.key(csum_key(next)).address(next)
        });
    }
}

/// Compares data with its checksums, where several items of a leaf hold them.
pub(crate) fn verify(pass: &Pass<'_>, check: &Data, ranges: &[(Logical, &[u8])], size: usize) {
    // Items that lie behind each other are read together.
    let mut rest = ranges;
    while let Some(((at, _), _)) = rest.split_first() {
        let mut end = *at;
        let n = rest
            .iter()
            .take_while(|(from, data)| {
                let joins = *from == end;
                end = from.plus((data.len() / size) as u64 * u64::from(SECTOR_SIZE));
                joins
            })
            .count()
            .max(1);
        let sums: Vec<&[u8]> =
            rest[..n].iter().flat_map(|(_, data)| data.chunks_exact(size)).collect();
        check.verify(&pass.world.source, *at, &sums);
        rest = &rest[n..];
    }
}
