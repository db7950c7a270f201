//! One node: from every place where it may lie, judged by how good it is.
//!
//! The decision hidden here is when a node is good enough. In order of preference: it passes every
//! rule; its checksum says that it is what was written, though some item breaks a rule (each item
//! is judged again where it is used); it passes every rule but for its checksum, which happens when
//! a bit of a name or number has rotted. The last is reported as a loss, for something in it is not
//! what was written. Whatever is taken has the address, level and generation that were asked for,
//! and keys in order between those of its neighbours, so that no walk can run in circles.
//!
//! Places are the copies that the chunk map gives, then those that a scan of the devices found. The
//! scan is made when it is first needed.

use crate::error::Result;
use crate::members;
use crate::observer::{Loss, Observer};
use crate::scan::{Found, Looks, Scan};
use larder_format::check::{Expect, check_node};
use larder_format::node::NodeView;
use larder_format::{Generation, Key, Logical, MAX_LEVEL, ObjectId, Superblock, TreeId};
use larder_volume::{Device, Stripe, Volume, unflattened};
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Bytes of nodes kept in memory.
const CACHE: usize = 64 << 20;

/// Where to start, and how far to go.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Superblock copy to start from; the best one if `None`.
    pub super_copy: Option<usize>,
    /// May the whole device be searched for nodes when something is missing?
    pub scan: bool,
}

/// Why a node cannot be had: what was wrong with the last copy that was tried.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct NodeError(pub String);

/// A node that is pointed to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Want {
    pub(crate) tree: TreeId,
    pub(crate) at: Logical,
    pub(crate) level: Option<u8>,
    pub(crate) generation: Option<Generation>,
    /// No key of it is smaller.
    pub(crate) low: Key,
    /// No key of it is larger.
    pub(crate) high: Key,
    pub(crate) is_root: bool,
    /// May the device be scanned for it?
    pub(crate) scan: bool,
}

/// A node's bytes.
pub(crate) type Bytes = Arc<[u8]>;

/// Reads an image without the engine.
pub struct Reader<'o> {
    volume: Volume,
    /// The one that the superblock is from.
    device: Arc<dyn Device>,
    superblock: Box<Superblock>,
    super_copy: usize,
    others: Vec<Box<Superblock>>,
    scan: OnceLock<Scan>,
    may_scan: bool,
    cache: quick_cache::sync::Cache<(u64, u64), Bytes>,
    told: Mutex<BTreeSet<u64>>,
    observer: &'o dyn Observer,
}

impl std::fmt::Debug for Reader<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reader").field("device", &self.device).finish_non_exhaustive()
    }
}

enum Judgement {
    Good,
    /// What was written, but against a rule.
    Written(String),
    /// Sound but for its checksum.
    Rotten(String),
    Bad(String),
}

impl<'o> Reader<'o> {
    /// Chooses a superblock. Where addresses lie is not known yet.
    ///
    /// # Errors
    /// [`crate::Error::NoSuperblock`]; nothing else stops it.
    pub(crate) fn without_chunks(
        devices: Vec<Arc<dyn Device>>,
        options: Options,
        observer: &'o dyn Observer,
    ) -> Result<Self> {
        let devices = devices.into_iter().map(unflattened).collect();
        let members = members::choose(devices, options.super_copy, observer)?;
        let volume = Volume::new(members.devices)?.with_missing();
        let chosen = members.chosen;
        let nodes = CACHE / chosen.superblock.nodesize() as usize;
        Ok(Self {
            volume,
            device: members.first,
            superblock: chosen.superblock,
            super_copy: chosen.copy,
            others: chosen.others,
            scan: OnceLock::new(),
            may_scan: options.scan,
            cache: quick_cache::sync::Cache::new(nodes),
            told: Mutex::default(),
            observer,
        })
    }

    /// Takes a scan that was made before chunks were known.
    pub(crate) fn keep_scan(&self, found: Scan) {
        let home = found.keep_at_home(self.volume.map());
        let _ = self.scan.set(home);
    }

    /// The superblock everything starts from.
    #[must_use]
    pub fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    /// Which copy that is.
    #[must_use]
    pub fn super_copy(&self) -> usize {
        self.super_copy
    }

    /// Other intact copies.
    pub(crate) fn other_superblocks(&self) -> &[Box<Superblock>] {
        &self.others
    }

    /// Addresses and devices.
    #[must_use]
    pub fn volume(&self) -> &Volume {
        &self.volume
    }

    /// The device that the superblock is from.
    #[must_use]
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    pub(crate) fn observer(&self) -> &'o dyn Observer {
        self.observer
    }

    /// What lies on the device; searched if that has not been done yet and is allowed.
    pub(crate) fn scan(&self) -> Option<&Scan> {
        if !self.may_scan {
            return self.scan.get();
        }
        Some(self.scan.get_or_init(|| {
            let found = self.scan_everything();
            found.keep_at_home(self.volume.map())
        }))
    }

    /// Scans, without asking whether what is found lies where it belongs.
    pub(crate) fn scan_everything(&self) -> Scan {
        let sb = &self.superblock;
        let looks = |device| Looks {
            device,
            fsid: sb.metadata_fsid(),
            nodesize: sb.nodesize(),
            csum: sb.csum_type(),
            newest: sb.generation(),
        };
        self.observer.note("searching the whole device for tree nodes");
        let on =
            |(id, device): (_, Arc<dyn Device>)| Scan::run(&*device, &looks(id), self.observer);
        let scan = Scan::join(self.volume.devices().map(on));
        self.observer.note(&format!("{} nodes found", scan.len()));
        scan
    }

    pub(crate) fn may_scan(&self) -> bool {
        self.may_scan
    }

    /// The node that was found in a place; `None` if it is not there any more.
    pub(crate) fn found(&self, found: &Found) -> Option<Bytes> {
        let key = (found.at.0, found.generation.0);
        if let Some(bytes) = self.cache.get(&key) {
            return Some(bytes);
        }
        let mut bytes = vec![0; self.superblock.nodesize() as usize];
        self.read_place(found.place, &mut bytes).ok()?;
        let view = NodeView(&bytes);
        let same = view.bytenr() == found.at && view.generation() == found.generation;
        if !same || !view.csum_matches(self.superblock.csum_type()) || !ascends(view) {
            return None;
        }
        let bytes: Bytes = bytes.into();
        self.cache.insert(key, bytes.clone());
        Some(bytes)
    }

    fn read_place(&self, place: Stripe, bytes: &mut [u8]) -> std::io::Result<()> {
        let device = self.volume.device(place.device).ok_or(std::io::ErrorKind::NotFound)?;
        device.read_at(place.at, bytes)
    }

    /// A node by its address alone, from the best of its copies.
    ///
    /// # Errors
    /// No copy is good enough.
    pub fn block(&self, at: Logical) -> std::result::Result<Arc<[u8]>, NodeError> {
        self.node(&Want {
            tree: ObjectId(0),
            at,
            level: None,
            generation: None,
            low: Key::MIN,
            high: Key::MAX,
            is_root: true,
            scan: false,
        })
    }

    /// The node that is pointed to.
    pub(crate) fn node(&self, want: &Want) -> std::result::Result<Bytes, NodeError> {
        if let Some(generation) = want.generation
            && let Some(bytes) = self.cache.get(&(want.at.0, generation.0))
            && fits(NodeView(&bytes), want)
        {
            return Ok(bytes);
        }
        let mut last = match self.volume.copies(want.at) {
            Ok(copies) => {
                let tries = (0..copies).map(|copy| {
                    let mut bytes = vec![0; self.superblock.nodesize() as usize];
                    self.volume
                        .read_block(want.at, &mut bytes, copy)
                        .map(|()| bytes)
                        .map_err(|e| e.to_string())
                });
                match self.best(tries, want) {
                    Ok(bytes) => return Ok(bytes),
                    Err(e) => e,
                }
            }
            Err(e) => e.to_string(),
        };
        let scan = if want.scan { self.scan() } else { self.scan.get() };
        if let Some(scan) = scan {
            let places = scan
                .at(want.at)
                .iter()
                .filter(|f| want.generation.is_none_or(|g| g == f.generation));
            let tries = places.map(|f| {
                let mut bytes = vec![0; self.superblock.nodesize() as usize];
                self.read_place(f.place, &mut bytes).map(|()| bytes).map_err(|e| e.to_string())
            });
            match self.best(tries, want) {
                Ok(bytes) => return Ok(bytes),
                Err(e) if last.is_empty() => last = e,
                Err(_) => {}
            }
        }
        Err(NodeError(format!("block {}: {last}", want.at)))
    }

    /// The best of some copies.
    fn best(
        &self,
        tries: impl Iterator<Item = std::result::Result<Vec<u8>, String>>,
        want: &Want,
    ) -> std::result::Result<Bytes, String> {
        let mut last = String::from("there is no copy");
        let (mut written, mut rotten) = (None, None);
        for bytes in tries {
            let bytes = match bytes {
                Ok(b) => b,
                Err(e) => {
                    last = e;
                    continue;
                }
            };
            match self.judge(&bytes, want) {
                Judgement::Good => return Ok(self.keep(bytes)),
                Judgement::Written(why) => written = Some((bytes, why)),
                Judgement::Rotten(why) => rotten = Some((bytes, why)),
                Judgement::Bad(why) => last = why,
            }
        }
        if let Some((bytes, why)) = written {
            if self.tell(want.at) {
                self.observer.note(&format!(
                    "block {} breaks a rule and is used all the same: {why}",
                    want.at
                ));
            }
            return Ok(self.keep(bytes));
        }
        if let Some((bytes, why)) = rotten {
            if self.tell(want.at) {
                let what = format!(
                    "block {}: {why}; it is used all the same, something in it is wrong",
                    want.at
                );
                self.observer.loss(&Loss { tree: want.tree, inode: None, path: None, what });
            }
            return Ok(self.keep(bytes));
        }
        Err(last)
    }

    fn keep(&self, bytes: Vec<u8>) -> Bytes {
        let bytes: Bytes = bytes.into();
        let view = NodeView(&bytes);
        self.cache.insert((view.bytenr().0, view.generation().0), bytes.clone());
        bytes
    }

    /// Has this address not been talked about yet?
    pub(crate) fn tell(&self, at: Logical) -> bool {
        self.told.lock().unwrap_or_else(PoisonError::into_inner).insert(at.0)
    }

    fn judge(&self, bytes: &[u8], want: &Want) -> Judgement {
        let sb = &self.superblock;
        let expect = Expect {
            nodesize: sb.nodesize(),
            fsid: sb.metadata_fsid(),
            bytenr: want.at,
            level: want.level,
            generation: want.generation,
            owner: None,
            is_root: want.is_root,
            first_key: None,
            csum: Some(sb.csum_type()),
            super_generation: sb.generation(),
            names_hidden: sb.metadata_dump().is_some(),
        };
        let strict = check_node(bytes, &expect);
        let view = NodeView(bytes);
        if view.bytenr() == want.at && !fits(view, want) {
            return Judgement::Bad("its keys do not lie between those of its neighbours".into());
        }
        let Err(why) = strict else {
            return Judgement::Good;
        };
        let itself = view.bytenr() == want.at
            && view.level() < MAX_LEVEL
            && (view.nritems() > 0 || want.is_root)
            && fits(view, want);
        if itself && view.csum_matches(sb.csum_type()) {
            return Judgement::Written(why.to_string());
        }
        if itself && check_node(bytes, &Expect { csum: None, ..expect }).is_ok() {
            return Judgement::Rotten(why.to_string());
        }
        Judgement::Bad(why.to_string())
    }
}

/// Are level and generation those that were asked for, and the keys in order and within their
/// bounds?
fn fits(view: NodeView<'_>, want: &Want) -> bool {
    let n = view.nritems();
    want.level.is_none_or(|l| l == view.level())
        && want.generation.is_none_or(|g| g == view.generation())
        && (n == 0
            || view.key(0).is_some_and(|k| k >= want.low)
                && view.key(n - 1).is_some_and(|k| k <= want.high)
                && ascends(view))
}

/// Are the keys in order, each larger than the one before?
fn ascends(view: NodeView<'_>) -> bool {
    (1..view.nritems()).all(|i| view.key(i - 1) < view.key(i))
}
