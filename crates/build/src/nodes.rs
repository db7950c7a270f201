//! How a tree is packed from sorted items.
//!
//! Leaves are filled to the last byte. Such a tree is read more often than it is changed, and a
//! small tree is read fastest. (Linux splits what is full when it has to.) A node is written as
//! soon as it is full, behind its children. Thus leaves lie in the order of their keys, with a node
//! between them now and then, and the root comes last.

use crate::error::{Error, Result};
use crate::options::Plan;
use crate::output::Sink;
use crate::space::Space;
use larder_format::items::BlockGroupFlags;
use larder_format::node::{FLAG_WRITTEN, HEADER_SIZE, Header, ITEM_SIZE, ItemHeader, KeyPointer};
use larder_format::node::{POINTER_SIZE, max_item_size, max_pointers};
use larder_format::{DiskKey, Generation, Key, Logical, MAX_LEVEL, ObjectId};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, IntoBytes};

/// Transaction that everything in a new image belongs to.
pub(crate) const GENERATION: Generation = Generation(1);

/// Where a tree's nodes are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Placed {
    pub(crate) root: Logical,
    pub(crate) level: u8,
    pub(crate) nodes: u64,
}

/// A node that has its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Note {
    pub(crate) at: u64,
    pub(crate) level: u8,
    pub(crate) owner: u64,
}

/// Gives nodes their places, and writes them. A rehearsal only gives places.
#[derive(Debug)]
pub(crate) struct Nodes<'a> {
    plan: &'a Plan,
    pub(crate) space: Space,
    /// The nodes so far.
    pub(crate) notes: Vec<Note>,
    /// `None` in a rehearsal.
    sink: Option<&'a Sink>,
    /// Nodes that lie behind each other on the device from `pending_at` on.
    pending: Vec<u8>,
    pending_at: u64,
}

/// Nodes are written in pieces of this size.
const PIECE: usize = 1 << 20;

impl<'a> Nodes<'a> {
    pub(crate) fn new(plan: &'a Plan, space: Space, sink: Option<&'a Sink>) -> Self {
        Self { plan, space, notes: Vec::new(), sink, pending: Vec::new(), pending_at: 0 }
    }

    /// The same, as far as it is known by now, and without writing.
    pub(crate) fn rehearsal(&self) -> Self {
        let mut nodes = Self::new(self.plan, self.space.clone(), None);
        nodes.notes.clone_from(&self.notes);
        nodes
    }

    fn put(
        &mut self,
        flags: BlockGroupFlags,
        level: u8,
        owner: ObjectId,
        node: &mut [u8],
    ) -> Result<Logical> {
        let size = u64::from(self.plan.nodesize);
        let at = if flags.contains(BlockGroupFlags::SYSTEM) {
            self.space.take_system(size)?
        } else {
            self.space.take(flags, size, true)?.start
        };
        self.notes.push(Note { at, level, owner: owner.0 });
        if self.sink.is_some() {
            self.seal(at, level, owner, node);
            self.write(at, node)?;
        }
        Ok(Logical(at))
    }

    fn seal(&self, at: u64, level: u8, owner: ObjectId, node: &mut [u8]) {
        let (header, _) = Header::mut_from_prefix(node).expect("longer than its header");
        header.fsid = self.plan.fsid;
        header.bytenr = U64::new(at);
        header.set_flags(FLAG_WRITTEN);
        header.chunk_tree_uuid = self.plan.chunk_tree_uuid;
        header.generation = U64::new(GENERATION.0);
        header.owner = U64::new(owner.0);
        header.level = level;
        let csum = self.plan.csum.compute(&node[32..]);
        node[..32].copy_from_slice(&csum);
    }

    fn write(&mut self, at: u64, node: &[u8]) -> Result<()> {
        let (first, second) = self.space.places(at);
        if first != self.pending_at + self.pending.len() as u64 || self.pending.len() >= PIECE {
            self.flush()?;
            self.pending_at = first;
        }
        self.pending.extend_from_slice(node);
        if let (Some(second), Some(sink)) = (second, self.sink) {
            sink.write(second, node)?;
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        if let Some(sink) = self.sink {
            sink.write(self.pending_at, &self.pending)?;
        }
        self.pending.clear();
        Ok(())
    }

    /// Writes what has not been written, also second copies of closed chunks.
    pub(crate) fn catch_up(&mut self) -> Result<()> {
        self.flush()?;
        let Some(sink) = self.sink else { return Ok(()) };
        self.space.second_copies().iter().try_for_each(|c| sink.copy(c.from, c.to, c.len))
    }
}

/// Takes the items of one tree in the order of their keys.
#[derive(Debug)]
pub(crate) struct TreeWriter {
    owner: ObjectId,
    flags: BlockGroupFlags,
    /// Of a rehearsal: the contents of nodes do not matter.
    rehearsal: bool,
    leaf: Vec<u8>,
    items: usize,
    /// Where the data of the last item begins.
    lowest: usize,
    first: Key,
    last: Option<Key>,
    /// From the lowest level above the leaves on: pointers that are in no node yet.
    levels: Vec<Vec<(Key, Logical)>>,
    nodes: u64,
}

impl TreeWriter {
    pub(crate) fn new(nodes: &Nodes<'_>, owner: ObjectId) -> Self {
        let flags = if owner == ObjectId::CHUNK_TREE {
            nodes.plan.system_flags()
        } else {
            nodes.plan.metadata_flags()
        };
        let size = nodes.plan.nodesize as usize;
        Self {
            owner,
            flags,
            rehearsal: nodes.sink.is_none(),
            leaf: vec![0; size],
            items: 0,
            lowest: size,
            first: Key::MIN,
            last: None,
            levels: Vec::new(),
            nodes: 0,
        }
    }

    /// Takes the next item.
    ///
    /// # Panics
    /// If it is larger than an item can be, or its key is not above the last one: a bug of the
    /// caller.
    pub(crate) fn push(&mut self, nodes: &mut Nodes<'_>, key: Key, data: &[u8]) -> Result<()> {
        assert!(self.last.is_none_or(|last| last < key), "{key} after {:?}", self.last);
        assert!(data.len() <= max_item_size(nodes.plan.nodesize), "{key}: {} bytes", data.len());
        if HEADER_SIZE + (self.items + 1) * ITEM_SIZE + data.len() > self.lowest {
            self.write_leaf(nodes)?;
        }
        if self.items == 0 {
            self.first = key;
        }
        self.last = Some(key);
        self.lowest -= data.len();
        if !self.rehearsal {
            self.leaf[self.lowest..self.lowest + data.len()].copy_from_slice(data);
            let header = ItemHeader {
                key: DiskKey::from(key),
                offset: U32::new(small(self.lowest - HEADER_SIZE)),
                size: U32::new(small(data.len())),
            };
            let at = HEADER_SIZE + self.items * ITEM_SIZE;
            self.leaf[at..at + ITEM_SIZE].copy_from_slice(header.as_bytes());
        }
        self.items += 1;
        Ok(())
    }

    fn write_leaf(&mut self, nodes: &mut Nodes<'_>) -> Result<()> {
        if !self.rehearsal {
            // Between the headers and the data lies what an older leaf had there.
            self.leaf[HEADER_SIZE + self.items * ITEM_SIZE..self.lowest].fill(0);
        }
        set_items(&mut self.leaf, self.items);
        let at = nodes.put(self.flags, 0, self.owner, &mut self.leaf)?;
        self.nodes += 1;
        (self.items, self.lowest) = (0, self.leaf.len());
        self.point(nodes, 0, self.first, at)
    }

    /// Notes a pointer to a node of `level`.
    fn point(&mut self, nodes: &mut Nodes<'_>, level: usize, key: Key, at: Logical) -> Result<()> {
        if self.levels.len() == level {
            self.levels.push(Vec::new());
        }
        // A node is written when the next pointer comes: the last child of a level may be the root.
        if self.levels[level].len() == max_pointers(nodes.plan.nodesize) {
            self.write_node(nodes, level)?;
        }
        self.levels[level].push((key, at));
        Ok(())
    }

    /// Writes the node whose children are of `level`.
    fn write_node(&mut self, nodes: &mut Nodes<'_>, level: usize) -> Result<()> {
        if level + 2 > usize::from(MAX_LEVEL) {
            return Err(Error::Unsupported("a tree would have more than eight levels".into()));
        }
        let pointers = std::mem::take(&mut self.levels[level]);
        let mut node = vec![0; self.leaf.len()];
        for (slot, (key, at)) in pointers.iter().enumerate() {
            let pointer = KeyPointer {
                key: DiskKey::from(*key),
                blockptr: U64::new(at.0),
                generation: U64::new(GENERATION.0),
            };
            let at = HEADER_SIZE + slot * POINTER_SIZE;
            node[at..at + POINTER_SIZE].copy_from_slice(pointer.as_bytes());
        }
        set_items(&mut node, pointers.len());
        let above = u8::try_from(level + 1).expect("eight levels at most");
        let at = nodes.put(self.flags, above, self.owner, &mut node)?;
        self.nodes += 1;
        self.point(nodes, level + 1, pointers[0].0, at)
    }

    /// All items have come. An empty tree has one leaf.
    pub(crate) fn finish(mut self, nodes: &mut Nodes<'_>) -> Result<Placed> {
        if self.items > 0 || self.nodes == 0 {
            self.write_leaf(nodes)?;
        }
        let mut level = 0;
        while level + 1 < self.levels.len() || self.levels[level].len() > 1 {
            self.write_node(nodes, level)?;
            level += 1;
        }
        let root = self.levels[level][0].1;
        let level = u8::try_from(level).expect("eight levels at most");
        Ok(Placed { root, level, nodes: self.nodes })
    }
}

fn set_items(node: &mut [u8], n: usize) {
    const AT: usize = std::mem::offset_of!(Header, nritems);
    node[AT..AT + 4].copy_from_slice(&small(n).to_le_bytes());
}

fn small(n: usize) -> u32 {
    u32::try_from(n).expect("within a node")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::BuildOptions;
    use crate::output::Output;
    use crate::space::Fit;
    use larder_format::KeyType;
    use larder_format::node::NodeView;

    fn key(n: u64) -> Key {
        Key::new(n / 3, KeyType(1), n)
    }

    fn data(n: u64) -> Vec<u8> {
        vec![n as u8; (n * 37 % 400) as usize]
    }

    /// Reads the items of a tree back.
    fn walk(image: &[u8], space: &Space, at: Logical, level: u8, out: &mut Vec<(Key, Vec<u8>)>) {
        let (first, second) = space.places(at.0);
        let node = |p: u64| &image[usize::try_from(p).unwrap()..][..4096];
        assert!(second.is_none_or(|p| node(p) == node(first)), "both copies");
        let view = NodeView(node(first));
        assert_eq!((view.bytenr(), view.level()), (at, level));
        assert!(view.csum_matches(larder_format::CsumType::Crc32c));
        if level == 0 {
            let item = |n| (view.key(n).unwrap(), view.data(n).unwrap().to_vec());
            out.extend((0..view.nritems()).map(item));
            return;
        }
        for p in view.pointers() {
            let mut below = Vec::new();
            walk(image, space, Logical(p.blockptr.get()), level - 1, &mut below);
            assert_eq!(below[0].0, Key::from(p.key));
            out.extend(below);
        }
    }

    #[test]
    fn trees_of_any_size_read_back_and_rehearsals_agree() {
        let options = BuildOptions { nodesize: Some(4096), ..BuildOptions::default() };
        let plan = Plan::new(&options).unwrap();
        let dir = tempfile::tempdir().unwrap();
        for n in [0u64, 1, 5, 40, 2000, 60_000] {
            let path = dir.path().join("img");
            let sink = Sink::open(
                &Output::File { path: path.clone(), force: true },
                crate::options::ImageSize::Auto,
            )
            .unwrap();
            let space = Space::new(None, Fit::tight(4096), plan.system_flags()).unwrap();
            let run = |sink| {
                let mut nodes = Nodes::new(&plan, space.clone(), sink);
                let mut tree = TreeWriter::new(&nodes, ObjectId::FS_TREE);
                for i in 0..n {
                    tree.push(&mut nodes, key(i), &data(i)).unwrap();
                }
                let placed = tree.finish(&mut nodes).unwrap();
                nodes.space.close(true).unwrap();
                nodes.catch_up().unwrap();
                (placed, nodes.notes, nodes.space)
            };
            let (placed, notes, space) = run(Some(&sink));
            let rehearsed = run(None);
            assert_eq!((rehearsed.0, &rehearsed.1), (placed, &notes));
            assert_eq!(notes.len() as u64, placed.nodes);
            sink.finish(space.end()).unwrap();
            let mut items = Vec::new();
            walk(&std::fs::read(&path).unwrap(), &space, placed.root, placed.level, &mut items);
            assert_eq!(items, (0..n).map(|i| (key(i), data(i))).collect::<Vec<_>>());
        }
    }
}
