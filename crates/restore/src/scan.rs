//! Finding nodes when nothing leads to them: every block of the device is looked at.
//!
//! A node says itself which file system, tree, address and generation it belongs to, and carries a
//! checksum. That is enough to find all that were not overwritten. It is *not* enough to believe
//! them: file data can hold a copy of a node, put there to be found. Once chunks are known,
//! [`Scan::keep_at_home`] therefore drops what lies elsewhere than its address says.
//!
//! Nodes lie on sector boundaries. Windows of the device are read by several threads; memory is
//! about 100 bytes for each node found.

use crate::observer::{Observer, Step};
use larder_format::node::NodeView;
use larder_format::{
    CsumType, DeviceId, Generation, Key, Logical, MAX_LEVEL, Physical, SECTOR_SIZE, TreeId,
};
use larder_volume::{ChunkMap, Device, Stripe};
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes that a thread takes at once.
const WINDOW: u64 = 8 << 20;
const SECTOR: usize = SECTOR_SIZE as usize;
/// Most threads: more only wait for the device.
const THREADS: usize = 8;

/// Nodes before a range that are looked at for reaching into it.
const NEAREST: usize = 64;

/// A node that was found.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Found {
    /// Where it lies.
    pub(crate) place: Stripe,
    pub(crate) at: Logical,
    pub(crate) generation: Generation,
    pub(crate) owner: TreeId,
    pub(crate) first: Key,
    pub(crate) last: Key,
    pub(crate) level: u8,
}

/// What to look for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Looks {
    /// Where this is looked for.
    pub(crate) device: DeviceId,
    pub(crate) fsid: [u8; 16],
    pub(crate) nodesize: u32,
    pub(crate) csum: CsumType,
    /// Nodes of later transactions were never committed.
    pub(crate) newest: Generation,
}

/// All nodes found, by address, then newest first.
#[derive(Debug, Default)]
pub(crate) struct Scan {
    nodes: Vec<Found>,
    /// By owner and level: positions in `nodes`, by first key.
    by_owner: BTreeMap<(TreeId, u8), Vec<u32>>,
}

impl Scan {
    /// Looks at a whole device. Places that cannot be read are passed over.
    pub(crate) fn run(device: &dyn Device, looks: &Looks, observer: &dyn Observer) -> Self {
        let size = device.size();
        let next = AtomicU64::new(0);
        let done = AtomicU64::new(0);
        let all = Mutex::new(Vec::new());
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(THREADS);
        std::thread::scope(|s| {
            for _ in 0..threads {
                s.spawn(|| {
                    let mut found = Vec::new();
                    let mut buf = Vec::new();
                    loop {
                        let at = next.fetch_add(WINDOW, Ordering::Relaxed);
                        if at >= size || observer.is_over() {
                            break;
                        }
                        if device.data_from(Physical(at)).0 < at.saturating_add(WINDOW) {
                            window(device, at, looks, &mut buf, &mut found);
                        }
                        let n = done.fetch_add(WINDOW, Ordering::Relaxed) + WINDOW;
                        observer.progress(Step::Scan, n.min(size), Some(size));
                    }
                    all.lock()
                        .unwrap_or_else(std::sync::PoisonError::into_inner)
                        .append(&mut found);
                });
            }
        });
        let nodes = all.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        Self::new(nodes)
    }

    /// What was found on several devices.
    pub(crate) fn join(scans: impl IntoIterator<Item = Self>) -> Self {
        Self::new(scans.into_iter().flat_map(|scan| scan.nodes).collect())
    }

    fn new(mut nodes: Vec<Found>) -> Self {
        let place = |n: &Found| (n.place.device, n.place.at);
        nodes.sort_unstable_by_key(|n| (n.at, std::cmp::Reverse(n.generation), place(n)));
        nodes.truncate(u32::MAX as usize);
        let mut by_owner: BTreeMap<(TreeId, u8), Vec<u32>> = BTreeMap::new();
        for (i, n) in (0u32..).zip(&nodes) {
            // The second copy of a node says nothing new.
            let again = (i as usize).checked_sub(1).map(|b| &nodes[b]);
            if again.is_some_and(|b| (b.at, b.generation) == (n.at, n.generation)) {
                continue;
            }
            by_owner.entry((n.owner, n.level)).or_default().push(i);
        }
        for list in by_owner.values_mut() {
            list.sort_unstable_by_key(|i| nodes[*i as usize].first);
        }
        Self { nodes, by_owner }
    }

    /// Drops nodes that lie where, by what is known of the chunks, no node of that address can lie.
    pub(crate) fn keep_at_home(self, map: &ChunkMap) -> Self {
        const METADATA: u64 = 2 | 4;
        let home = |n: &Found| match map.lookup(n.at, 1) {
            Ok(located) => located.stripes.contains(&n.place),
            // Not in a known chunk: then at least not in one that holds only data, or another's
            // metadata.
            Err(_) => map.chunk_on(n.place).is_none(),
        };
        let kind = |n: &Found| map.chunk_at(n.at).is_none_or(|c| c.kind & METADATA != 0);
        Self::new(self.nodes.into_iter().filter(|n| home(n) && kind(n)).collect())
    }

    /// Number of nodes, copies included.
    pub(crate) fn len(&self) -> usize {
        self.nodes.len()
    }

    /// All copies of what was found at an address, newest first.
    pub(crate) fn at(&self, at: Logical) -> &[Found] {
        let from = self.nodes.partition_point(|n| n.at < at);
        let to = self.nodes.partition_point(|n| n.at <= at);
        &self.nodes[from..to]
    }

    /// Every node that names this tree as its owner, once.
    pub(crate) fn of(&self, owner: TreeId) -> impl Iterator<Item = &Found> {
        let levels = self.by_owner.range((owner, 0)..=(owner, u8::MAX));
        levels.flat_map(|(_, list)| list).map(|i| &self.nodes[*i as usize])
    }

    /// Nodes of an owner and level with keys between `low` and `high`. Of those that begin before
    /// `low`, which may be any number, only the nearest are looked at.
    pub(crate) fn between(
        &self,
        owner: TreeId,
        level: u8,
        low: Key,
        high: Key,
    ) -> impl Iterator<Item = &Found> {
        let list = self.by_owner.get(&(owner, level)).map_or(&[][..], |l| &l[..]);
        let first = |i: &u32| self.nodes[*i as usize].first;
        let from = list.partition_point(|i| first(i) < low);
        let to = list.partition_point(|i| first(i) <= high).max(from);
        let before = list[from.saturating_sub(NEAREST)..from].iter();
        let reaches =
            before.map(|i| &self.nodes[*i as usize]).filter(move |f| f.last >= low || level > 0);
        reaches.chain(list[from..to].iter().map(|i| &self.nodes[*i as usize]))
    }

    /// Every tree that was found.
    pub(crate) fn owners(&self) -> impl Iterator<Item = TreeId> + '_ {
        let mut owners: Vec<TreeId> = self.by_owner.keys().map(|(o, _)| *o).collect();
        owners.dedup();
        owners.into_iter()
    }
}

fn window(device: &dyn Device, at: u64, looks: &Looks, buf: &mut Vec<u8>, found: &mut Vec<Found>) {
    let node = looks.nodesize as usize;
    let end = device.size().min(at.saturating_add(WINDOW + looks.nodesize as u64 - SECTOR as u64));
    let len = usize::try_from(end.saturating_sub(at)).unwrap_or(0);
    buf.resize(len, 0);
    if device.read_at(Physical(at), buf).is_err() {
        // A bad sector: what is around it may still be read.
        for (i, sector) in buf.chunks_mut(SECTOR).enumerate() {
            if device.read_at(Physical(at + (i * SECTOR) as u64), sector).is_err() {
                sector.fill(0);
            }
        }
    }
    for offset in (0..len.min(usize::try_from(WINDOW).unwrap_or(usize::MAX))).step_by(SECTOR) {
        let Some(bytes) = buf.get(offset..offset + node) else { break };
        if bytes[32..48] == looks.fsid
            && let Some(n) = recognise(bytes, Physical(at + offset as u64), looks)
        {
            found.push(n);
        }
    }
}

fn recognise(bytes: &[u8], physical: Physical, looks: &Looks) -> Option<Found> {
    let view = NodeView(bytes);
    let sane = view.level() < MAX_LEVEL
        && view.nritems() > 0
        && view.bytenr().0.is_multiple_of(u64::from(SECTOR_SIZE))
        && view.generation() <= looks.newest;
    if !sane || !view.csum_matches(looks.csum) {
        return None;
    }
    Some(Found {
        place: Stripe { device: looks.device, at: physical },
        at: view.bytenr(),
        generation: view.generation(),
        owner: view.owner(),
        first: view.key(0)?,
        last: view.key(view.nritems() - 1)?,
        level: view.level(),
    })
}
