//! Reading tree nodes: every copy of them, and what is wrong with each.
//!
//! The decision hidden here is what counts as a node that can still be used. A node whose checksum,
//! address, level or layout is wrong says nothing, and its subtree is lost. A node with an older
//! generation than its parent wants, a wrong owner or an item that breaks a rule still says a lot:
//! it is reported and looked into, so that one wrong field does not hide everything below it. With
//! several copies the best one is used; the others are reported by the place where they lie.
//!
//! What is wrong with a node itself is reported when it is met first; what is wrong with the way
//! that led to it, on each way: snapshots share nodes.

use crate::finding::{Finding, Findings, Kind};
use crate::progress::Meter;
use larder_format::check::{Expect, check_unsealed};
use larder_format::csum::name_hash;
use larder_format::items::{BlockGroupFlags, DirEntries};
use larder_format::node::{
    BACKREF_REV, FLAG_RELOC, FLAG_WRITTEN, HEADER_SIZE, ITEM_SIZE, NodeView, leaf_capacity,
    max_pointers,
};
use larder_format::{
    CsumType, DeviceId, Generation, Key, KeyType, Logical, MAX_LEVEL, ObjectId, Superblock, TreeId,
};
use larder_volume::{Volume, VolumeError};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

/// Bytes at the beginning of a node that are its checksum's, however short that is.
const CSUM_FIELD: usize = 32;

/// A way to a node: what its parent, or its tree's root item, says about it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Edge {
    /// The tree that is being walked.
    pub(crate) tree: TreeId,
    pub(crate) at: Logical,
    pub(crate) level: u8,
    pub(crate) generation: Generation,
    /// Key in the parent's pointer.
    pub(crate) first_key: Option<Key>,
    /// Key in the parent's next pointer: what this node holds is below it.
    pub(crate) end: Option<Key>,
    pub(crate) is_root: bool,
    /// Tree that made the parent; for a root, the tree itself.
    pub(crate) parent_owner: TreeId,
    /// Younger nodes of the tree are not shared, as its root item says.
    pub(crate) last_snapshot: Generation,
}

impl Edge {
    pub(crate) fn root(tree: TreeId, at: Logical, level: u8, generation: Generation) -> Self {
        let last_snapshot = Generation(u64::MAX);
        Self {
            tree,
            at,
            level,
            generation,
            first_key: None,
            end: None,
            is_root: true,
            parent_owner: tree,
            last_snapshot,
        }
    }
    /// The way to the root tree.
    pub(crate) fn root_tree(sb: &Superblock) -> Self {
        Self::root(ObjectId::ROOT_TREE, sb.root(), sb.root_level, sb.generation())
    }
    /// The way to the chunk tree.
    pub(crate) fn chunk_tree(sb: &Superblock) -> Self {
        let generation = sb.chunk_root_generation();
        Self::root(ObjectId::CHUNK_TREE, sb.chunk_root(), sb.chunk_root_level, generation)
    }
    /// The way from `parent`, which this edge leads to, to the child in a slot.
    pub(crate) fn child(&self, parent: NodeView<'_>, slot: usize) -> Option<Self> {
        let pointers = parent.pointers();
        let pointer = pointers.get(slot)?;
        Some(Self {
            tree: self.tree,
            at: Logical(pointer.blockptr.get()),
            level: parent.level().checked_sub(1)?,
            generation: Generation(pointer.generation.get()),
            first_key: Some(pointer.key.into()),
            end: pointers.get(slot + 1).map(|p| p.key.into()).or(self.end),
            is_root: false,
            parent_owner: parent.owner(),
            last_snapshot: self.last_snapshot,
        })
    }
}

/// A node that can be looked into.
pub(crate) struct Node {
    pub(crate) bytes: Vec<u8>,
    /// Is it perhaps not what the tree should have here?
    pub(crate) doubtful: bool,
}

impl Node {
    pub(crate) fn view(&self) -> NodeView<'_> {
        NodeView(&self.bytes)
    }
}

/// Something wrong with one copy of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Fault {
    kind: Kind,
    what: String,
    key: Option<Key>,
    weight: Weight,
    /// About the way to the node rather than the node.
    of_edge: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Weight {
    /// The node can be used.
    Light,
    /// The node may be another one than the tree should have.
    Doubtful,
    /// The node says nothing.
    Fatal,
}

/// The nodes of an image.
pub(crate) struct Source<'a> {
    pub(crate) volume: Volume,
    pub(crate) findings: &'a Findings,
    pub(crate) meter: &'a Meter<'a>,
    nodesize: u32,
    fsid: [u8; 16],
    /// The same of seeds, whose nodes may be met as well.
    seeds: Vec<[u8; 16]>,
    csum: CsumType,
    generation: Generation,
    /// That of the chunk tree's root: no superblock has it.
    chunk_tree_uuid: OnceLock<[u8; 16]>,
    /// Devices that lack something: of course copies on them are not right.
    behind: Vec<DeviceId>,
    /// Nodes that were read once more.
    again: AtomicUsize,
    /// Names are not those that the keys of entries were made from.
    names_hidden: AtomicBool,
}

impl<'a> Source<'a> {
    pub(crate) fn new(
        volume: Volume,
        superblock: &Superblock,
        behind: Vec<DeviceId>,
        seeds: &BTreeMap<DeviceId, Box<Superblock>>,
        findings: &'a Findings,
        meter: &'a Meter<'a>,
    ) -> Self {
        Self {
            volume,
            findings,
            meter,
            nodesize: superblock.nodesize(),
            fsid: superblock.metadata_fsid(),
            seeds: seeds.values().map(|sb| sb.metadata_fsid()).collect(),
            csum: superblock.csum_type(),
            generation: superblock.generation(),
            chunk_tree_uuid: OnceLock::new(),
            behind,
            again: AtomicUsize::new(0),
            names_hidden: AtomicBool::new(false),
        }
    }

    /// From now on names count by their length alone, or not.
    pub(crate) fn hide_names(&self, yes: bool) {
        self.names_hidden.store(yes, Relaxed);
    }

    pub(crate) fn names_hidden(&self) -> bool {
        self.names_hidden.load(Relaxed)
    }

    /// A name as it is to be compared with others.
    pub(crate) fn name<'n>(&self, name: &'n [u8]) -> Cow<'n, [u8]> {
        if self.names_hidden() { vec![b'?'; name.len()].into() } else { name.into() }
    }

    pub(crate) fn nodesize(&self) -> u32 {
        self.nodesize
    }

    pub(crate) fn csum_type(&self) -> CsumType {
        self.csum
    }

    /// Reads and judges every copy of a node. `fresh`: met for the first time, so report its own
    /// faults and not only those of the way to it. `None` if it is lost, which is reported, too.
    pub(crate) fn read(&self, edge: &Edge, fresh: bool) -> Option<Node> {
        let (stored, others) = match self.volume.copies_to_check(edge.at) {
            Ok(copies) => copies,
            Err(e) => {
                self.report(edge, Kind::NodeUnmapped, &e.to_string(), None);
                return self.lost(edge);
            }
        };
        let mut best: Option<(Weight, Vec<u8>, Vec<Fault>)> = None;
        let mut judged: Vec<(usize, Vec<Fault>)> = Vec::with_capacity(stored.len());
        let known = stored.len();
        for (n, copy) in stored.into_iter().chain(others).enumerate() {
            // What parity gives in other ways is of interest only where nothing else is right.
            if n >= known && best.as_ref().is_some_and(|(_, _, faults)| faults.is_empty()) {
                break;
            }
            let (bytes, faults) = self.judge_copy(edge, copy);
            let weight = faults.iter().map(|f| f.weight).max();
            if faults.is_empty()
                && let Some((_, other, others)) = &best
                && others.is_empty()
                // A checksum that is shorter than its field leaves the rest undefined.
                && other[CSUM_FIELD..] != bytes[CSUM_FIELD..]
                && fresh
            {
                let what =
                    format!("copy {copy} of the node differs from others, and is valid, too");
                self.report(edge, Kind::NodeCopiesDiffer, &what, None);
            }
            let better = match (&best, weight) {
                (None, _) => true,
                (Some((_, _, faults)), None) => !faults.is_empty(),
                (Some((w, _, faults)), Some(weight)) => !faults.is_empty() && weight < *w,
            };
            if better {
                best = Some((weight.unwrap_or(Weight::Light), bytes, faults.clone()));
            }
            judged.push((copy, faults));
        }
        if judged.is_empty() {
            let what = "the devices that have it are missing";
            self.report(edge, Kind::NodeUnreadable, what, None);
        }
        self.report_faults(edge, &judged, fresh);
        let (weight, bytes, faults) = best?;
        if weight == Weight::Fatal && !faults.is_empty() {
            return self.lost(edge);
        }
        Some(Node { bytes, doubtful: weight >= Weight::Doubtful })
    }

    /// A node that was judged before; says nothing. The best copy that there is.
    pub(crate) fn read_quietly(&self, edge: &Edge) -> Option<Node> {
        let (stored, others) = self.volume.copies_to_check(edge.at).ok()?;
        let mut best: Option<(Weight, Node)> = None;
        for copy in stored.into_iter().chain(others) {
            let (bytes, faults) = self.judge_copy(edge, copy);
            let weight = faults.iter().map(|f| f.weight).max().unwrap_or(Weight::Light);
            let perfect = faults.is_empty();
            if weight < Weight::Fatal && best.as_ref().is_none_or(|(w, _)| weight < *w) {
                best = Some((weight, Node { bytes, doubtful: weight == Weight::Doubtful }));
            }
            if perfect {
                break;
            }
        }
        best.map(|(_, node)| node)
    }

    /// A node is met again on a way that should not be: reads it once more to say what is wrong
    /// with that, a number of times.
    pub(crate) fn read_again(&self, edge: &Edge) {
        const MOST: usize = 1000;
        if self.again.fetch_add(1, Relaxed) < MOST {
            self.read(edge, false);
        }
    }

    /// Compares what a way says with what is known of a node that was read before.
    pub(crate) fn check_edge(&self, edge: &Edge, known: &Facts) {
        for fault in edge_faults(edge, known, self.generation) {
            self.report(edge, fault.kind, &fault.what, fault.key);
        }
    }

    fn judge_copy(&self, edge: &Edge, copy: usize) -> (Vec<u8>, Vec<Fault>) {
        let mut bytes = vec![0; self.nodesize as usize];
        self.meter.read(bytes.len() as u64);
        if let Err(e) = self.volume.read_block(edge.at, &mut bytes, copy) {
            let kind = if matches!(e, VolumeError::Io { .. }) {
                Kind::NodeUnreadable
            } else {
                Kind::NodeUnmapped
            };
            let fault = Fault {
                kind,
                what: e.to_string(),
                key: None,
                weight: Weight::Fatal,
                of_edge: false,
            };
            return (bytes, vec![fault]);
        }
        let faults = self.judge(&bytes, edge);
        (bytes, faults)
    }

    /// Everything that is wrong with a node's bytes. A fatal fault ends the search.
    fn judge(&self, bytes: &[u8], edge: &Edge) -> Vec<Fault> {
        let view = NodeView(bytes);
        let fatal = |kind, what: String| {
            vec![Fault { kind, what, key: None, weight: Weight::Fatal, of_edge: false }]
        };
        if view.bytenr() != edge.at {
            let zeros = bytes.iter().all(|b| *b == 0);
            let what = if zeros {
                "the node is all zeros".to_owned()
            } else {
                format!("the header says node {}, expected {}", view.bytenr(), edge.at)
            };
            return fatal(Kind::NodeAddress, what);
        }
        if !view.csum_matches(self.csum) {
            return fatal(
                Kind::NodeChecksum,
                format!("the {} checksum does not match", self.csum.name()),
            );
        }
        if view.level() >= MAX_LEVEL || view.level() != edge.level {
            let what = format!("the level is {}, expected {}", view.level(), edge.level);
            // Another way to the same node may expect the level that it has.
            return vec![Fault {
                kind: Kind::NodeLevel,
                what,
                key: None,
                weight: Weight::Fatal,
                of_edge: true,
            }];
        }
        let mut faults = self.header_faults(view);
        let mut contents = self.content_faults(view, edge);
        if contents.iter().any(|f| f.weight == Weight::Fatal) {
            contents.append(&mut faults);
            return contents;
        }
        faults.append(&mut contents);
        faults.append(&mut edge_faults(edge, &Facts::of(view), self.generation));
        faults
    }

    fn header_faults(&self, view: NodeView<'_>) -> Vec<Fault> {
        let mut faults = Vec::new();
        let mut light = |kind, what: String| {
            faults.push(Fault { kind, what, key: None, weight: Weight::Light, of_edge: false });
        };
        let header = view.header();
        if header.fsid != self.fsid && !self.seeds.contains(&header.fsid) {
            let (is, expected) =
                (uuid::Uuid::from_bytes(header.fsid), uuid::Uuid::from_bytes(self.fsid));
            light(Kind::NodeFsid, format!("the header has fsid {is}, expected {expected}"));
        }
        let expected = self.chunk_tree_uuid.get_or_init(|| header.chunk_tree_uuid);
        if header.chunk_tree_uuid != *expected {
            let is = uuid::Uuid::from_bytes(header.chunk_tree_uuid);
            let expected = uuid::Uuid::from_bytes(*expected);
            light(
                Kind::NodeChunkTreeUuid,
                format!("the header has chunk tree uuid {is}, expected {expected}"),
            );
        }
        if view.flags() & FLAG_WRITTEN == 0 {
            light(Kind::NodeFlags, "the header lacks the flag WRITTEN".into());
        }
        let rev = (header.flags_and_rev.get() >> 56) as u8;
        if rev != BACKREF_REV {
            light(
                Kind::NodeFlags,
                format!("back reference revision is {rev}, expected {BACKREF_REV}"),
            );
        }
        faults
    }

    fn content_faults(&self, view: NodeView<'_>, edge: &Edge) -> Vec<Fault> {
        let mut faults = Vec::new();
        if let Ok(chunk) = self.volume.map().chunk_at(edge.at).ok_or(()) {
            let flags = BlockGroupFlags::from_bits_retain(chunk.kind);
            let wanted = if edge.tree == ObjectId::CHUNK_TREE {
                BlockGroupFlags::SYSTEM
            } else {
                BlockGroupFlags::METADATA
            };
            if !flags.contains(wanted) {
                let what = format!("the node lies in a {} block group", flags.type_name());
                let kind = Kind::NodeWrongBlockGroup;
                faults.push(Fault { kind, what, key: None, weight: Weight::Light, of_edge: false });
            }
        }
        // The rules of the format know no "tree that is walked" here: faults of the way are looked
        // for apart.
        let expect = Expect {
            nodesize: self.nodesize,
            fsid: view.header().fsid,
            bytenr: edge.at,
            level: None,
            generation: None,
            owner: None,
            is_root: edge.is_root,
            first_key: None,
            csum: None,
            super_generation: Generation(self.generation.0.max(view.generation().0)),
            names_hidden: self.names_hidden(),
        };
        let Err(error) = check_unsealed(view.0, &expect, self.csum) else {
            return faults;
        };
        if error.0.starts_with("header has back reference revision") {
            // Known already, and it hides the rest: look at the rest with the header as it should
            // be.
            let mut mended = view.0.to_vec();
            mended[63] = BACKREF_REV;
            if let Err(error) = check_unsealed(&mended, &expect, self.csum) {
                faults.push(content_fault(view, &error.0));
            }
            return faults;
        }
        faults.push(content_fault(view, &error.0));
        faults
    }

    fn report_faults(&self, edge: &Edge, judged: &[(usize, Vec<Fault>)], fresh: bool) {
        let Some(((_, first), rest)) = judged.split_first() else { return };
        let wanted = |f: &&Fault| fresh || f.of_edge;
        if rest.iter().all(|(_, other)| other == first) {
            for fault in first.iter().filter(wanted) {
                self.report(edge, fault.kind, &fault.what, fault.key);
            }
            return;
        }
        let found = self.volume.map().lookup(edge.at, u64::from(self.nodesize));
        for (copy, faults) in judged {
            let place =
                found.as_ref().ok().and_then(|l| l.stripes.get(*copy)).map(|s| (s.device, s.at));
            // With parity there are ways to read that are no place.
            let name = if place.is_some() { "copy" } else { "by parity, copy" };
            for fault in faults.iter().filter(wanted) {
                let what = format!("{name} {copy} of {}: {}", judged.len(), fault.what);
                let follows = self.is_behind(place.map(|(device, _)| device));
                let finding = self.finding(edge, fault.kind, &what, fault.key);
                let finding = Finding { device: place, ..finding };
                self.findings.add(finding.follow_up_if(follows));
            }
        }
    }

    /// Does a copy on this device lack something? What parity gives is of several devices.
    pub(crate) fn is_behind(&self, device: Option<DeviceId>) -> bool {
        match device {
            Some(id) => self.behind.contains(&id),
            None => !self.behind.is_empty(),
        }
    }

    fn report(&self, edge: &Edge, kind: Kind, what: &str, key: Option<Key>) {
        self.findings.add(self.finding(edge, kind, what, key));
    }

    fn finding(&self, edge: &Edge, kind: Kind, what: &str, key: Option<Key>) -> Finding {
        let mut finding = Finding::new(kind, what).tree(edge.tree).address(edge.at);
        finding.key = key.or(edge.first_key);
        finding
    }

    fn lost(&self, edge: &Edge) -> Option<Node> {
        let to = edge.end.map_or_else(|| "its end".to_owned(), |k| k.to_string());
        let from = edge.first_key.map_or_else(|| "its beginning".to_owned(), |k| k.to_string());
        let what = format!("tree {} cannot be read from {from} to {to}", edge.tree);
        self.report(edge, Kind::SubtreeLost, &what, None);
        None
    }
}

/// What a way can be compared with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Facts {
    pub(crate) level: u8,
    pub(crate) generation: Generation,
    pub(crate) owner: TreeId,
    pub(crate) first_key: Option<Key>,
    pub(crate) last_key: Option<Key>,
    pub(crate) relocated: bool,
}

impl Facts {
    pub(crate) fn of(view: NodeView<'_>) -> Self {
        let n = if view.level() == 0 { view.items().len() } else { view.pointers().len() };
        Self {
            level: view.level(),
            generation: view.generation(),
            owner: view.owner(),
            first_key: view.key(0),
            last_key: n.checked_sub(1).and_then(|last| view.key(last)),
            relocated: view.flags() & FLAG_RELOC != 0,
        }
    }
}

fn edge_faults(edge: &Edge, node: &Facts, newest: Generation) -> Vec<Fault> {
    let mut faults = Vec::new();
    let mut fault = |kind, what: String, key, weight| {
        faults.push(Fault { kind, what, key, weight, of_edge: true });
    };
    if node.level != edge.level {
        let what = format!("the level is {}, expected {}", node.level, edge.level);
        fault(Kind::NodeLevel, what, None, Weight::Doubtful);
    }
    let newest = if edge.tree == ObjectId::TREE_LOG { newest.next() } else { newest };
    if node.generation != edge.generation {
        let what = format!("the generation is {}, expected {}", node.generation, edge.generation);
        fault(Kind::NodeGeneration, what, None, Weight::Doubtful);
    } else if node.generation > newest {
        let what =
            format!("the generation is {}, newer than the superblock's {newest}", node.generation);
        fault(Kind::NodeGeneration, what, None, Weight::Light);
    }
    if !owner_fits(node.owner, edge) {
        let what =
            format!("the owner is tree {}, which has no nodes in tree {}", node.owner, edge.tree);
        fault(Kind::NodeOwner, what, None, Weight::Light);
    }
    let shared = edge.tree.is_subvolume()
        && !edge.is_root
        && node.owner != edge.tree
        && node.owner.is_subvolume();
    if shared
        && !node.relocated
        && node.generation > edge.last_snapshot
        && node.generation <= newest
    {
        let what = format!(
            "last_snapshot is {}, but a node of tree {} of generation {} is shared: it would be \
                written in place",
            edge.last_snapshot, node.owner, node.generation
        );
        fault(Kind::RootItemWrong, what, None, Weight::Light);
    }
    if let (Some(expected), Some(first)) = (edge.first_key, node.first_key)
        && expected != first
    {
        let what = format!("the first key is {first}, expected {expected}");
        fault(Kind::NodeFirstKey, what, Some(expected), Weight::Light);
    }
    if let (Some(end), Some(last)) = (edge.end, node.last_key)
        && last >= end
    {
        let what = format!("the last key is {last}, but the next node begins at {end}");
        fault(Kind::NodeKeyRange, what, Some(last), Weight::Light);
    }
    faults
}

/// May a node made by `owner` stand here? Snapshots share nodes below the root.
fn owner_fits(owner: TreeId, edge: &Edge) -> bool {
    if edge.tree == ObjectId::TREE_RELOC {
        owner.holds_files()
    } else if edge.tree.is_subvolume() && !edge.is_root {
        owner.is_subvolume()
    } else {
        owner == edge.tree
    }
}

/// Turns the checker's complaint about a node into a fault with a kind.
fn content_fault(view: NodeView<'_>, error: &str) -> Fault {
    let fatal =
        |kind, what: String, key| Fault { kind, what, key, weight: Weight::Fatal, of_edge: false };
    if let Some(what) = layout_fault(view) {
        return fatal(Kind::NodeLayout, what, None);
    }
    let n = if view.level() == 0 { view.items().len() } else { view.pointers().len() };
    let keys = || (0..n).filter_map(|slot| view.key(slot));
    if let Some((slot, (a, b))) = keys().zip(keys().skip(1)).enumerate().find(|(_, (a, b))| a >= b)
    {
        return fatal(
            Kind::NodeKeyOrder,
            format!("key {b} in slot {} does not follow {a}", slot + 1),
            Some(b),
        );
    }
    let slot = error.split(' ').nth(1).and_then(|s| s.trim_end_matches(':').parse::<usize>().ok());
    let key = slot.filter(|_| error.starts_with("item ")).and_then(|slot| view.key(slot));
    let kind = match key {
        Some(key) => item_kind(view, slot.unwrap_or(0), &key),
        None => Kind::NodeLayout,
    };
    Fault { kind, what: error.to_owned(), key, weight: Weight::Light, of_edge: false }
}

fn item_kind(view: NodeView<'_>, slot: usize, key: &Key) -> Kind {
    match key.kind {
        KeyType::INODE_ITEM => Kind::InodeInvalid,
        KeyType::DIR_ITEM | KeyType::XATTR_ITEM => {
            let data = view.data(slot).unwrap_or_default();
            let wrong_hash = DirEntries::new(data)
                .filter_map(Result::ok)
                .any(|e| name_hash(e.name) != key.offset);
            if wrong_hash { Kind::NameHash } else { Kind::NameInvalid }
        }
        KeyType::DIR_INDEX | KeyType::INODE_REF | KeyType::INODE_EXTREF => Kind::NameInvalid,
        KeyType::EXTENT_DATA => Kind::FileExtentInvalid,
        KeyType::EXTENT_CSUM => Kind::ChecksumItemInvalid,
        KeyType::ROOT_ITEM | KeyType::ROOT_REF | KeyType::ROOT_BACKREF => Kind::RootItemInvalid,
        KeyType::EXTENT_ITEM
        | KeyType::METADATA_ITEM
        | KeyType::TREE_BLOCK_REF
        | KeyType::SHARED_BLOCK_REF
        | KeyType::EXTENT_DATA_REF
        | KeyType::SHARED_DATA_REF => Kind::ExtentItemInvalid,
        KeyType::BLOCK_GROUP_ITEM => Kind::BlockGroupInvalid,
        KeyType::FREE_SPACE_INFO | KeyType::FREE_SPACE_EXTENT | KeyType::FREE_SPACE_BITMAP => {
            Kind::FreeSpaceItemInvalid
        }
        KeyType::DEV_EXTENT => Kind::DeviceExtentInvalid,
        KeyType::DEV_ITEM => Kind::DeviceItemWrong,
        KeyType::CHUNK_ITEM => Kind::ChunkInvalid,
        _ => Kind::ItemInvalid,
    }
}

/// Do the parts of a node lie where they can?
fn layout_fault(view: NodeView<'_>) -> Option<String> {
    let nodesize = u32::try_from(view.0.len()).ok()?;
    let n = view.nritems();
    if view.level() > 0 {
        let max = max_pointers(nodesize);
        return (n == 0 || n > max)
            .then(|| format!("the node has {n} pointers, expected 1 to {max}"));
    }
    let capacity = leaf_capacity(nodesize);
    if n > capacity / ITEM_SIZE {
        return Some(format!("the leaf says {n} items, at most {} fit", capacity / ITEM_SIZE));
    }
    debug_assert!(capacity + HEADER_SIZE == view.0.len());
    let mut end = capacity;
    for (slot, item) in view.items().iter().enumerate() {
        let (offset, size) = (item.offset.get() as usize, item.size.get() as usize);
        if offset.checked_add(size) != Some(end) {
            return Some(format!(
                "item {slot} has {size} bytes at {offset}, expected to end at {end}"
            ));
        }
        if offset < n * ITEM_SIZE {
            return Some(format!("the data of item {slot} overlaps the item headers"));
        }
        end = offset;
    }
    None
}
