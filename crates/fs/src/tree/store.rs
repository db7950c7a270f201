//! Where clean nodes come from: a bounded cache over verified reads.
//!
//! The cache is keyed by (logical address, generation), so a block that was freed, reused and
//! written again can never answer for its predecessor. Everything that enters the cache has been
//! checked: checksum, identity, layout, items. If one copy fails, the next one is read, and where
//! that is allowed its good bytes are written over the bad copy.

use crate::error::{Error, Place, Result};
use crate::tree::image::NodeFormat;
use crate::tree::node::Node;
use larder_format::check::{Expect, check_node, owner_fits};
use larder_format::node::NodeView;
use larder_format::{CsumType, Generation, Key, Logical, TreeId};
use larder_volume::{ErrorKind, VolumeResult};
use quick_cache::Weighter;
use quick_cache::sync::Cache;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Reads of blocks by logical address, one copy at a time.
pub(crate) trait BlockReader: Send + Sync + std::fmt::Debug {
    /// Number of copies that the chunk at `at` keeps.
    fn copies(&self, at: Logical) -> usize;
    /// Reads one copy.
    ///
    /// # Errors
    /// The device's, or `Unmapped`.
    fn read(&self, at: Logical, buf: &mut [u8], copy: usize) -> VolumeResult<()>;
    /// Reads the first copy if that needs no waiting. Returns false otherwise; `buf` then holds
    /// anything.
    fn read_at_once(&self, at: Logical, buf: &mut [u8]) -> bool {
        let _ = (at, buf);
        false
    }
    /// A copy that could be read is bad.
    fn found_bad(&self, at: Logical, copy: usize, what: ErrorKind) {
        let _ = (at, copy, what);
    }
    /// Writes one copy anew from good bytes. It is called only where the file system is writable.
    ///
    /// # Errors
    /// The device's; the caller goes on.
    fn repair(&self, at: Logical, data: &[u8], copy: usize) -> VolumeResult<()>;
}

/// What a parent says about a child, or what a root item or a superblock says about a root.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pointer {
    /// Where.
    pub(crate) at: Logical,
    /// Which transaction wrote it.
    pub(crate) generation: Generation,
    /// Its height.
    pub(crate) level: u8,
    /// The parent's key for it; `None` for a root.
    pub(crate) first_key: Option<Key>,
}

impl Pointer {
    /// Is `node`, which was found at the pointer's address and generation, what a pointer of tree
    /// `owner` expects there? A damaged tree may use one block in several places, and each of them
    /// expects something else of it. So a block that fits in one place is not trusted in another.
    /// Descents end only because levels do fall.
    pub(crate) fn means(&self, node: &Node, owner: TreeId) -> bool {
        node.level() == self.level
            && self.first_key.is_none_or(|k| node.first_key() == Some(k))
            && owner_fits(node.view().owner(), owner, self.first_key.is_none())
    }
}

/// Counters of the store.
#[derive(Debug, Default)]
pub(crate) struct StoreStats {
    /// Nodes found in the cache.
    pub(crate) hits: AtomicU64,
    /// Nodes read.
    pub(crate) reads: AtomicU64,
    /// Transfers that read them. One may read several.
    pub(crate) transfers: AtomicU64,
    /// Copies that were bad and had a good sibling.
    pub(crate) bad_copies: AtomicU64,
}

#[derive(Clone)]
struct ByBytes;
impl Weighter<(Logical, Generation), Arc<Node>> for ByBytes {
    fn weight(&self, _: &(Logical, Generation), node: &Arc<Node>) -> u64 {
        node.bytes().len() as u64 + 128
    }
}

/// Bytes that are read in one transfer at most.
const TOGETHER: usize = 1 << 20;

/// The cache and the way to what is not in it.
#[derive(Debug)]
pub(crate) struct NodeStore {
    reader: Arc<dyn BlockReader>,
    format: NodeFormat,
    csum: CsumType,
    /// Generation of the last superblock: nothing on the device may be newer than the one after it.
    super_generation: AtomicU64,
    cache: Cache<(Logical, Generation), Arc<Node>, ByBytes>,
    repair: bool,
    stats: StoreStats,
}

impl NodeStore {
    /// A store over `reader` that keeps about `budget` bytes of clean nodes.
    pub(crate) fn new(
        reader: Arc<dyn BlockReader>,
        format: NodeFormat,
        csum: CsumType,
        super_generation: Generation,
        budget: u64,
        repair: bool,
    ) -> Self {
        let items =
            usize::try_from(budget / u64::from(format.nodesize)).unwrap_or(usize::MAX).max(64);
        Self {
            reader,
            format,
            csum,
            super_generation: AtomicU64::new(super_generation.0),
            cache: Cache::with_weighter(items, budget, ByBytes),
            repair,
            stats: StoreStats::default(),
        }
    }
    /// What all nodes have in common.
    pub(crate) fn format(&self) -> &NodeFormat {
        &self.format
    }
    /// Counters.
    pub(crate) fn stats(&self) -> &StoreStats {
        &self.stats
    }
    /// Bytes that the cache holds.
    pub(crate) fn cached_bytes(&self) -> u64 {
        self.cache.weight()
    }
    /// Tells the store that a later transaction was published.
    pub(crate) fn set_super_generation(&self, generation: Generation) {
        self.super_generation.store(generation.0, Ordering::Relaxed);
    }
    /// The node that a pointer of tree `owner` means, if it is in the cache.
    pub(crate) fn peek(&self, ptr: &Pointer, owner: TreeId) -> Option<Arc<Node>> {
        self.cache.get(&(ptr.at, ptr.generation)).filter(|node| ptr.means(node, owner))
    }
    /// Enters a node that was just written.
    pub(crate) fn put(&self, node: Arc<Node>) {
        self.cache.insert((node.address(), node.generation()), node.stripped());
    }
    /// A node, from the cache or the device. Waits for the device.
    ///
    /// # Errors
    /// `Corrupt` when no copy is good; the device's error when none could be read.
    pub(crate) fn get(&self, ptr: &Pointer, owner: TreeId) -> Result<Arc<Node>> {
        if let Some(node) = self.peek(ptr, owner) {
            self.stats.hits.fetch_add(1, Ordering::Relaxed);
            return Ok(node);
        }
        let bytes = match crate::api::may_wait() {
            Ok(()) => {
                crate::lock::before_waiting(crate::lock::Wait::Device);
                self.read(ptr, owner)?
            }
            Err(would_block) => self.read_at_once(ptr, owner).ok_or(would_block)?,
        };
        Ok(self.keep(ptr, bytes))
    }

    /// Enters what was read and is good.
    fn keep(&self, ptr: &Pointer, bytes: Arc<[u8]>) -> Arc<Node> {
        let node = Arc::new(Node::clean(bytes));
        self.cache.insert((ptr.at, ptr.generation), node.clone());
        node
    }

    /// Reads blocks that will be wanted, each given by its address and by the transaction that
    /// wrote it, in the order of addresses. Those that lie behind each other are read in one
    /// transfer. What cannot be had in this way is left to the caller that wants it.
    pub(crate) fn read_ahead(&self, blocks: &[(Logical, Generation)]) {
        crate::lock::before_waiting(crate::lock::Wait::Device);
        let nodesize = u64::from(self.format.nodesize);
        let missing: Vec<(Logical, Generation)> =
            blocks.iter().filter(|block| self.cache.get(*block).is_none()).copied().collect();
        let follow = |a: &(Logical, _), b: &(Logical, _)| a.0.plus(nodesize) == b.0;
        for run in missing.chunk_by(follow).filter(|run| run.len() > 1) {
            run.chunks(TOGETHER / self.format.nodesize as usize).for_each(|run| self.read_run(run));
        }
    }

    fn read_run(&self, run: &[(Logical, Generation)]) {
        let nodesize = self.format.nodesize as usize;
        let mut all = vec![0; run.len() * nodesize];
        self.stats.transfers.fetch_add(1, Ordering::Relaxed);
        if self.reader.read(run[0].0, &mut all, 0).is_err() {
            return;
        }
        for ((at, written), bytes) in run.iter().zip(all.chunks(nodesize)) {
            let (ptr, owner) = of_itself(*at, bytes);
            let is_good = || check_node(bytes, &self.expect(&ptr, owner, bytes)).is_ok();
            if ptr.generation == *written && is_good() {
                self.stats.reads.fetch_add(1, Ordering::Relaxed);
                self.keep(&ptr, bytes.into());
            }
        }
    }

    /// The node at an address that something other than a pointer names, such as a reference of an
    /// extent. `written` is the transaction that wrote it, where the caller knows that. Its level
    /// and its owner are what the first good copy says.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    pub(crate) fn at_address(&self, at: Logical, written: Option<Generation>) -> Result<Arc<Node>> {
        if let Some(node) = written.and_then(|generation| self.cache.get(&(at, generation))) {
            self.stats.hits.fetch_add(1, Ordering::Relaxed);
            return Ok(node);
        }
        crate::api::may_wait()?;
        crate::lock::before_waiting(crate::lock::Wait::Device);
        let (pointer, owner, bytes) = self.described_at(at)?;
        let is_good = || check_node(&bytes, &self.expect(&pointer, owner, &bytes)).is_ok();
        if self.peek(&pointer, owner).is_none() && is_good() {
            self.stats.reads.fetch_add(1, Ordering::Relaxed);
            return Ok(self.keep(&pointer, bytes));
        }
        self.get(&pointer, owner)
    }

    /// What a block says of itself, and the block: a pointer to it, its owner, its bytes. A copy
    /// with the right checksum is believed before one without.
    fn described_at(&self, at: Logical) -> Result<(Pointer, TreeId, Arc<[u8]>)> {
        let mut buf = self.buffer();
        let bytes = Arc::get_mut(&mut buf).expect("a new buffer has one owner");
        let (mut failed, mut doubtful) = (None, None);
        for copy in 0..self.reader.copies(at).max(1) {
            self.stats.transfers.fetch_add(1, Ordering::Relaxed);
            if let Err(e) = self.reader.read(at, bytes, copy) {
                failed.get_or_insert(e);
                continue;
            }
            let (pointer, owner) = of_itself(at, bytes);
            let found = NodeView(bytes);
            if found.csum_matches(self.csum) && found.bytenr() == at {
                return Ok((pointer, owner, buf));
            }
            doubtful.get_or_insert((pointer, owner));
        }
        match (doubtful, failed) {
            // Reading it says what is wrong with it.
            (Some((pointer, owner)), _) => Ok((pointer, owner, buf)),
            (None, Some(e)) => Err(e.into()),
            (None, None) => Err(Error::corrupt(Place::block(at), "the block has no copy")),
        }
    }

    /// Reads a node whose first copy is good and lies in memory below us. After `None`, the caller
    /// has to read it in the way that may wait.
    fn read_at_once(&self, ptr: &Pointer, owner: TreeId) -> Option<Arc<[u8]>> {
        let mut buf = self.buffer();
        let bytes = Arc::get_mut(&mut buf).expect("a new buffer has one owner");
        let good = self.reader.read_at_once(ptr.at, bytes)
            && check_node(bytes, &self.expect(ptr, owner, bytes)).is_ok();
        good.then(|| {
            self.stats.reads.fetch_add(1, Ordering::Relaxed);
            self.stats.transfers.fetch_add(1, Ordering::Relaxed);
            buf
        })
    }

    /// What must be at a pointer of tree `owner`, where these bytes were read.
    fn expect(&self, ptr: &Pointer, owner: TreeId, bytes: &[u8]) -> Expect {
        Expect {
            nodesize: self.format.nodesize,
            fsid: self.format.fsid_of(bytes),
            bytenr: ptr.at,
            level: Some(ptr.level),
            generation: Some(ptr.generation),
            owner: Some(owner),
            is_root: ptr.first_key.is_none(),
            first_key: ptr.first_key,
            csum: Some(self.csum),
            super_generation: Generation(self.super_generation.load(Ordering::Relaxed)),
            names_hidden: self.format.names_hidden,
        }
    }

    fn read(&self, ptr: &Pointer, owner: TreeId) -> Result<Arc<[u8]>> {
        self.stats.reads.fetch_add(1, Ordering::Relaxed);
        self.stats.transfers.fetch_add(1, Ordering::Relaxed);
        let mut buf = self.buffer();
        let bytes = Arc::get_mut(&mut buf).expect("a new buffer has one owner");
        let copies = self.reader.copies(ptr.at).max(1);
        let mut first_error = None;
        let mut bad = Vec::new();
        for copy in 0..copies {
            let error = match self.reader.read(ptr.at, bytes, copy) {
                Ok(()) => match check_node(bytes, &self.expect(ptr, owner, bytes)) {
                    Ok(()) => {
                        for b in bad {
                            self.stats.bad_copies.fetch_add(1, Ordering::Relaxed);
                            tracing::warn!(address = %ptr.at, copy = b, "damaged copy of a block; \
                                another copy is good");
                            if self.repair
                                && let Err(e) = self.reader.repair(ptr.at, bytes, b)
                            {
                                tracing::warn!(address = %ptr.at, copy = b, error = %e, "repair \
                                    failed");
                            }
                        }
                        return Ok(buf);
                    }
                    Err(e) => {
                        self.reader.found_bad(ptr.at, copy, self.kind_of_error(bytes, ptr));
                        Error::corrupt(
                            Place { tree: Some(owner), address: Some(ptr.at), ..Place::default() },
                            e.to_string(),
                        )
                    }
                },
                Err(e) => e.into(),
            };
            bad.push(copy);
            first_error.get_or_insert(error);
        }
        Err(first_error.expect("at least one copy was tried"))
    }

    /// What is wrong with a block? One that is right in itself may be an older one.
    fn kind_of_error(&self, bytes: &[u8], ptr: &Pointer) -> ErrorKind {
        let found = NodeView(bytes);
        if found.csum_matches(self.csum) && found.generation() != ptr.generation {
            ErrorKind::Generation
        } else {
            ErrorKind::Corruption
        }
    }

    /// A buffer of the size of a node. Nothing else refers to it.
    pub(crate) fn buffer(&self) -> Arc<[u8]> {
        std::iter::repeat_n(0u8, self.format.nodesize as usize).collect()
    }
}

/// What a block says of itself: a pointer to it, and its owner.
fn of_itself(at: Logical, bytes: &[u8]) -> (Pointer, TreeId) {
    let found = NodeView(bytes);
    let (generation, level) = (found.generation(), found.level());
    (Pointer { at, generation, level, first_key: None }, found.owner())
}
