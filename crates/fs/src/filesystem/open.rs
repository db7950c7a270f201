//! Opening a file system: from a superblock to a [`Core`] with everything in place.
//!
//! The order follows from what maps what. The superblock has the system chunks, which lead to the
//! chunk tree, which maps everything else; the root tree names the other roots. Everything that
//! would make writing unsafe is found here. It becomes a refusal, or a read-only file system that
//! says the reason.

use super::commit_source::gathered;
use super::devices::{Compared, Members, go_on_counting, lost_chunks};
use super::left::Left;
use crate::api::{InodeId, MissingDevice, OpenOptions, SubvolChoice};
use crate::balance;
use crate::budget::Budget;
use crate::engine::Core;
use crate::error::{Error, Place, Result};
use crate::file::reclaim::Reclaimer;
use crate::lock::Mutex;
use crate::space::Pinned;
use crate::space::alloc::Allocator;
use crate::space::chunks::mapped;
use crate::space::device_items;
use crate::transaction::early_flush::Flushes;
use crate::transaction::{
    Ground, SuperblockWritten, Superblocks, Transactions, find_root, root_pointer,
};
use crate::tree::{
    BlockReader, Epoch, Epochs, NodeFormat, NodeStore, Pointer, Roots, Tree, TreeStats, Version,
};
use larder_format::features::CompatRo;
use larder_format::items::{Chunk, DirEntries};
use larder_format::node::NodeView;
use larder_format::{
    CsumType, DevItem, DeviceId, Generation, Key, KeyType, Logical, ObjectId, Superblock, Support,
    TreeId, csum,
};
use larder_volume::{
    Assembly, Device, ErrorKind, Volume, VolumeError, VolumeResult, read_superblock, unflattened,
};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, OnceLock, Weak};
use uuid::Uuid;

#[derive(Debug)]
struct VolumeReader(Arc<Volume>);
impl BlockReader for VolumeReader {
    fn copies(&self, at: Logical) -> usize {
        self.0.copies(at).unwrap_or(1)
    }
    fn read(&self, at: Logical, buf: &mut [u8], copy: usize) -> VolumeResult<()> {
        self.0.read_block(at, buf, copy)
    }
    fn read_at_once(&self, at: Logical, buf: &mut [u8]) -> bool {
        self.0.read_block_at_once(at, buf)
    }
    fn repair(&self, at: Logical, data: &[u8], copy: usize) -> VolumeResult<()> {
        self.0.write_one_copy(at, data, copy)
    }
    fn found_bad(&self, at: Logical, copy: usize, what: ErrorKind) {
        self.0.found_bad(at, copy, what);
    }
}

fn superblock_error(device: &dyn Device, what: impl std::fmt::Display) -> Error {
    Error::corrupt(Place::default(), format!("{}: {what}", device.name()))
}

/// Makes the map know a chunk.
fn add_chunk(volume: &Volume, start: Logical, chunk: &Chunk) -> Result<()> {
    chunk.check_at(start).map_err(|e| {
        let key = Key::new(ObjectId::FIRST_CHUNK_TREE, KeyType::CHUNK_ITEM, start.0);
        Error::corrupt(Place::item(ObjectId::CHUNK_TREE, key), e.0)
    })?;
    volume.add_chunk(mapped(start, chunk))?;
    Ok(())
}

/// Decides whether the image may be opened as asked. Returns the reason why it must not be written,
/// if there is one.
fn writability(
    device: &dyn Device,
    sb: &Superblock,
    options: &OpenOptions,
) -> Result<Option<String>> {
    let mut read_only = None;
    match sb.support() {
        Support::ReadWrite => {}
        Support::ReadOnly { why } => read_only = Some(why),
        Support::MetadataOnly { why } if options.metadata_dump && options.read_only => {
            read_only = Some(why)
        }
        Support::MetadataOnly { why } => {
            return Err(Error::Unsupported(format!("{}: {why}", device.name())));
        }
        Support::Refused { why } => {
            return Err(Error::Unsupported(format!("{}: {why}", device.name())));
        }
    }
    if sb.log_root.get() != 0 && options.no_log_replay && !options.read_only {
        return Err(Error::Unsupported(format!(
            "{}: a log waits to be replayed; without replaying it the file system can only be \
                opened read-only",
            device.name()
        )));
    }
    if let Some(why) = &read_only
        && !options.read_only
    {
        return Err(Error::Unsupported(format!(
            "{}: {why}; it can be opened read-only (-o ro)",
            device.name()
        )));
    }
    if options.read_only {
        read_only.get_or_insert_with(|| "opened read-only".into());
    } else if device.is_read_only() {
        return Err(Error::Unsupported(format!(
            "{}: the device is read-only; open the file system read-only (-o ro)",
            device.name()
        )));
    }
    Ok(read_only)
}

fn chunk_root(sb: &Superblock) -> Pointer {
    Pointer {
        at: Logical(sb.chunk_root.get()),
        generation: Generation(sb.chunk_root_generation.get()),
        level: sb.chunk_root_level,
        first_key: None,
    }
}

/// What the nodes of this image have in common. The chunk tree's uuid is only in nodes, so the root
/// of the chunk tree is read for it.
fn node_format(
    volume: &Volume,
    sb: &Superblock,
    csum: CsumType,
    seeds: Vec<[u8; 16]>,
) -> Result<NodeFormat> {
    let root = chunk_root(sb).at;
    let mut head = vec![0u8; sb.nodesize.get() as usize];
    let mut readable = volume.read_block(root, &mut head, 0);
    for copy in 1..volume.copies(root)? {
        if readable.is_ok() && NodeView(&head).csum_matches(csum) {
            break;
        }
        readable = volume.read_block(root, &mut head, copy);
    }
    readable?;
    Ok(NodeFormat {
        nodesize: sb.nodesize.get(),
        fsid: sb.metadata_fsid(),
        seeds,
        chunk_tree_uuid: NodeView(&head).header().chunk_tree_uuid,
        names_hidden: sb.metadata_dump().is_some(),
    })
}

/// What the trees of an image have in common.
struct Trees<'a> {
    store: &'a Arc<NodeStore>,
    stats: &'a Arc<TreeStats>,
    epochs: &'a Epochs<Pinned>,
}

impl Trees<'_> {
    fn at(&self, id: TreeId, root: Pointer) -> Tree {
        Tree::new(id, self.store.clone(), root, Generation(0), self.stats.clone())
    }
    /// Maps all chunks of the chunk tree. Returns which devices are missing or behind.
    fn map_chunks(&self, volume: &Volume, sb: &Superblock, members: &Members) -> Result<Compared> {
        let chunks = self.at(ObjectId::CHUNK_TREE, chunk_root(sb)).version(self.epochs.enter());
        let compared = members.compare(&chunks, sb)?;
        compared.stale.iter().for_each(|stale| volume.set_behind(stale.id, stale.generation));
        read_chunks(volume, &chunks)?;
        members.suffice(volume)?;
        Ok(compared)
    }
    /// The global trees. All chunks are mapped, because the root tree lies in them.
    fn load(&self, sb: &Superblock) -> Result<Roots> {
        let chunk = self.at(ObjectId::CHUNK_TREE, chunk_root(sb));
        let pointer = Pointer {
            at: Logical(sb.root.get()),
            generation: Generation(sb.generation.get()),
            level: sb.root_level,
            first_key: None,
        };
        let root = self.at(ObjectId::ROOT_TREE, pointer);
        let names = root.version(self.epochs.enter());
        let optional = |id| -> Result<Option<Tree>> {
            Ok(find_root(&names, id)?.map(|(_, item)| self.at(id, root_pointer(&item))))
        };
        let required = |id| -> Result<Tree> {
            optional(id)?.ok_or_else(|| {
                let what = format!("the root of tree {id} is missing");
                Error::corrupt(Place::tree(ObjectId::ROOT_TREE), what)
            })
        };
        let compat_ro = CompatRo::from_bits_retain(sb.compat_ro_flags.get());
        let with = |features, id| compat_ro.contains(features).then(|| required(id)).transpose();
        let free_space = CompatRo::FREE_SPACE_TREE | CompatRo::FREE_SPACE_TREE_VALID;
        let extent = required(ObjectId::EXTENT_TREE)?;
        let dev = required(ObjectId::DEV_TREE)?;
        let csum = required(ObjectId::CSUM_TREE)?;
        let uuid = optional(ObjectId::UUID_TREE)?;
        let free_space = with(free_space, ObjectId::FREE_SPACE_TREE)?;
        let block_group = with(CompatRo::BLOCK_GROUP_TREE, ObjectId::BLOCK_GROUP_TREE)?;
        drop(names);
        Ok(Roots { root, chunk, extent, dev, csum, uuid, free_space, block_group })
    }
}

/// The fsids of the seeds among these devices.
fn seeds_of(found: &Assembly) -> Vec<[u8; 16]> {
    found.seeds().filter_map(|f| f.seed).map(Uuid::into_bytes).collect()
}

/// Devices that a file system has and that are not among these. What says so is its chunk tree, so
/// those that have it must be there.
///
/// # Errors
/// As [`crate::Filesystem::open_devices`].
pub fn missing_devices(devices: Vec<Arc<dyn Device>>) -> Result<Vec<MissingDevice>> {
    let (members, items, sb) = listed_devices(devices)?;
    Ok(members.missing_of(&items, &sb))
}

/// Those of these devices that have left their file system, by their numbers: its chunk tree does
/// not have them any more, and their superblocks are older. A removal that a power cut has ended
/// leaves such a device.
///
/// # Errors
/// As [`crate::Filesystem::open_devices`].
pub fn former_devices(devices: Vec<Arc<dyn Device>>) -> Result<Vec<DeviceId>> {
    let (members, items, sb) = listed_devices(devices)?;
    Ok(members.former(&items, &sb))
}

/// What devices say, and the items of the chunk tree that they have.
fn listed_devices(
    devices: Vec<Arc<dyn Device>>,
) -> Result<(Members, Vec<DevItem>, Box<Superblock>)> {
    let found = Assembly::of(devices)?;
    let (sb, seeds) = (found.superblock.clone(), seeds_of(&found));
    let members = Members::new(&found, true);
    let csum = CsumType::from_disk(sb.csum_type.get())
        .map_err(|e| superblock_error(&*found.first().device, e))?;
    let volume = Arc::new(Volume::open(found, true)?);
    members.suffice(&volume)?;
    let store = Arc::new(NodeStore::new(
        Arc::new(VolumeReader(volume.clone())),
        node_format(&volume, &sb, csum, seeds)?,
        csum,
        Generation(sb.generation.get()),
        Budget::of(0).nodes,
        false,
    ));
    let (stats, epochs) = (Arc::new(TreeStats::default()), Epochs::new());
    let trees = Trees { store: &store, stats: &stats, epochs: &epochs };
    let chunks = trees.at(ObjectId::CHUNK_TREE, chunk_root(&sb)).version(epochs.enter());
    let items = device_items(&chunks)?;
    Ok((members, items, sb))
}

impl Core {
    /// Opens the file system on these devices.
    pub(crate) fn open(devices: Vec<Arc<dyn Device>>, options: OpenOptions) -> Result<Arc<Self>> {
        let options = Arc::new(options);
        let whole = |device| if options.metadata_dump { unflattened(device) } else { device };
        let devices = devices.into_iter().map(whole).map(crate::watch::device);
        let is_deaf = fault!(options.tuning, MirrorErrors);
        let devices =
            devices.map(|device| if is_deaf { crate::tuning::deaf(device) } else { device });
        let mut found = Assembly::of(devices)?;
        if fault!(options.tuning, StaleSuperblock) {
            found.superblock = read_superblock(&*found.first().device)?;
        }
        let members = Members::new(&found, options.degraded);
        Self::open_assembly(found, members, options)
    }

    /// Opens a file system that is being built upon seeds. Its first commit has to make it known to
    /// the trees.
    pub(crate) fn open_new(found: Assembly, options: OpenOptions) -> Result<Arc<Self>> {
        let members = Members::of_new(&found);
        Self::open_assembly(found, members, Arc::new(options))
    }

    fn open_assembly(
        mut found: Assembly,
        members: Members,
        options: Arc<OpenOptions>,
    ) -> Result<Arc<Self>> {
        let left = Left::of(&mut found, options.degraded);
        let sb = found.superblock.clone();
        let seeds = seeds_of(&found);
        let first = found.first().device.clone();
        let device = first.as_ref();
        let read_only = writability(device, &sb, &options)?;
        let csum =
            CsumType::from_disk(sb.csum_type.get()).map_err(|e| superblock_error(device, e))?;
        let volume = Arc::new(Volume::open(found, members.are_several())?);
        members.suffice(&volume)?;
        let generation = Generation(sb.generation.get());
        let store = Arc::new(NodeStore::new(
            Arc::new(VolumeReader(volume.clone())),
            node_format(&volume, &sb, csum, seeds)?,
            csum,
            generation,
            Budget::of(options.cache_size).nodes,
            read_only.is_none(),
        ));
        let epochs = Arc::new(Epochs::new());
        let tree_stats = Arc::new(TreeStats::default());
        let trees = Trees { store: &store, stats: &tree_stats, epochs: &epochs };
        let compared = trees.map_chunks(&volume, &sb, &members)?;
        let roots = trees.load(&sb)?;
        go_on_counting(&roots.dev.version(epochs.enter()), &volume)?;
        if read_only.is_none() {
            volume.may_be_written().map_err(how_to_read)?;
            check_finished(device, &roots, &epochs.enter())?;
        }
        let replacement =
            left.replacement(&roots.dev.version(epochs.enter()), &volume, read_only.is_none())?;
        let space = Allocator::load(&sb, &options, &volume, &roots, &epochs)?;
        let balance_is_paused =
            go_on_converting(&roots.root.version(epochs.enter()), &space, &options)?;
        let txns = Transactions::new(generation, roots.extent.root(), roots.csum.root(), gathered);
        let chunks = roots.chunk.version(epochs.enter());
        let behind = compared.stale.iter().map(|s| (s.id, s.generation)).collect();
        let superblocks = if members.is_new() {
            Superblocks::of_new(sb.clone())
        } else {
            Superblocks::new(sb.clone(), &chunks, behind)?
        };
        let superblocks = superblocks.with_target(replacement.target());
        drop(chunks);
        let superblock_written = SuperblockWritten { generation, superblocks, logs: 0 };
        let lost_chunks = lost_chunks(&volume);
        let flushes = Flushes::new(volume.clone(), options.tuning.early_flush_bytes);
        let ground = Ground {
            csum,
            space,
            txns,
            epochs,
            roots,
            tree_stats,
            store,
            volume,
            options,
            read_only,
            missing_devices: compared.missing,
            stale_devices: compared.stale,
            replacement,
            items_changed: AtomicBool::new(compared.outdated),
            lost_chunks,
            superblock: Mutex::new(sb),
            fake_time: AtomicU64::new(0),
            published: AtomicU64::new(generation.0),
            wrote_shared_in: AtomicU64::new(0),
            superblock_written: Mutex::new(superblock_written),
            flushes,
            above: OnceLock::new(),
        };
        if !members.is_new() {
            ground.agree_on_superblock()?;
        }
        Ok(Self::on_ground(ground, balance_is_paused))
    }

    /// An engine on this ground, to which both what commits need from above and the reclaimer
    /// belong.
    fn on_ground(ground: Ground, balance_is_paused: bool) -> Arc<Self> {
        let core = Arc::new(Self::new(ground, crate::file::one_batch));
        let above: Weak<Self> = Arc::downgrade(&core);
        core.above.set(above).expect("a new ground has nothing above it");
        if core.replacement.under_way().is_some() {
            core.exclusive.found_suspended_replacement();
        }
        core.space.accounts.set_reclaim(Box::new(Reclaimer::new(&core)));
        if balance_is_paused {
            core.exclusive.found_paused_balance();
        }
        core
    }

    /// The directory that is the root of a mount.
    pub(crate) fn mount_root(&self, choice: &SubvolChoice) -> Result<InodeId> {
        let id = match choice {
            SubvolChoice::Default => self.default_subvol()?,
            SubvolChoice::Id(id) => ObjectId(if *id == 0 { ObjectId::FS_TREE.0 } else { *id }),
            SubvolChoice::Path(path) => return self.resolve_subvol(path),
        };
        let subvol = self.subvol(id).map_err(|e| match e {
            Error::NotFound => Error::Unsupported(format!("there is no subvolume with id {id}")),
            e => e,
        })?;
        Ok(InodeId { subvol: id, ino: subvol.root_dir })
    }

    /// The subvolume that is mounted if none is named.
    pub(crate) fn default_subvol(&self) -> Result<ObjectId> {
        if let Some(id) = *self.new_default.lock() {
            return Ok(id);
        }
        let roots = self.roots.root.version(self.epochs.enter());
        let key = Key::new(ObjectId::ROOT_TREE_DIR, KeyType::DIR_ITEM, csum::name_hash(b"default"));
        let Some(item) = roots.get(&key)? else { return Ok(ObjectId::FS_TREE) };
        for entry in DirEntries::new(item.data()) {
            let entry = entry.map_err(|e| {
                Error::corrupt(Place::item(ObjectId::ROOT_TREE, key), e.to_string())
            })?;
            if entry.name == b"default" {
                return Ok(entry.location.objectid);
            }
        }
        Ok(ObjectId::FS_TREE)
    }

    /// Walks a path of names from the top-level subvolume; it must end at a subvolume.
    fn resolve_subvol(&self, path: &[u8]) -> Result<InodeId> {
        let missing = || {
            Error::Unsupported(format!(
                "there is no subvolume at {}",
                String::from_utf8_lossy(path)
            ))
        };
        let top = self.subvol(ObjectId::FS_TREE)?;
        let mut at = InodeId { subvol: top.id, ino: top.root_dir };
        for name in path.split(|b| *b == b'/').filter(|n| !n.is_empty()) {
            at = match self.lookup_id(at, name) {
                Ok(found) => found,
                Err(Error::NotFound | Error::NotDirectory) => return Err(missing()),
                Err(e) => return Err(e),
            };
        }
        let subvol = self.subvol(at.subvol)?;
        if at.ino == subvol.root_dir { Ok(at) } else { Err(missing()) }
    }
}

/// Is a balance under way? Then new chunks get the profiles to which it converts.
fn go_on_converting(names: &Version, space: &Allocator, options: &OpenOptions) -> Result<bool> {
    let paused = match balance::stored(names) {
        // It says nothing about what can be read.
        Err(e) if options.read_only => {
            tracing::warn!("what is said about a balance is not understood: {e}");
            None
        }
        other => other?,
    };
    let remembered = paused.as_ref().filter(|_| !fault!(options.tuning, BalanceForgetsProfiles));
    remembered.inspect(|wish| balance::go_on_converting(space, wish));
    Ok(paused.is_some())
}

/// Maps all chunks of the chunk tree.
fn read_chunks(volume: &Volume, chunks: &Version) -> Result<()> {
    let from = Key::new(ObjectId::FIRST_CHUNK_TREE, KeyType::CHUNK_ITEM, 0);
    let to = Key::new(ObjectId::FIRST_CHUNK_TREE, KeyType::CHUNK_ITEM, u64::MAX);
    chunks.scan(&from, &to, |item| {
        let place = || Place::item(ObjectId::CHUNK_TREE, item.key);
        let chunk = Chunk::parse(item.data()).map_err(|e| Error::corrupt(place(), e.0))?;
        let start = Logical(item.key.offset);
        if volume.map().chunk_at(start).is_some_and(|known| known == mapped(start, &chunk)) {
            return Ok(true);
        }
        add_chunk(volume, start, &chunk)?;
        Ok(true)
    })
}

/// What can still be done with a volume that may not be written.
fn how_to_read(why: VolumeError) -> Error {
    match why {
        VolumeError::Missing { .. } => why.into(),
        why => Error::Unsupported(format!("{why}; it can be opened read-only (-o ro)")),
    }
}

/// Refuses to write where Linux has left work half done that Larder cannot continue, or keeps
/// accounts that Larder does not keep.
fn check_finished(device: &dyn Device, roots: &Roots, epoch: &Epoch) -> Result<()> {
    let name = device.name();
    match unfinished(roots, epoch)? {
        Some(why) => {
            Err(Error::Unsupported(format!("{name}: {why}; it can be opened read-only (-o ro)")))
        }
        None => Ok(()),
    }
}

/// Work that Linux has left half done and Larder cannot continue, or accounting that it does not
/// keep.
fn unfinished(roots: &Roots, epoch: &Epoch) -> Result<Option<String>> {
    let names = &roots.root.version(epoch.clone());
    if let Some((_, item)) = find_root(names, ObjectId::QUOTA_TREE)? {
        let quota = Version { tree: ObjectId::QUOTA_TREE, ..names.at_root(root_pointer(&item)) };
        let status = quota.get(&Key::new(ObjectId(0), KeyType::QGROUP_STATUS, 0))?;
        // The flags are the third word; bit 0 says that quotas are on.
        let on = status.and_then(|i| i.data().get(16).copied()).is_none_or(|flags| flags & 1 != 0);
        if on {
            return Ok(Some("quotas are enabled, and Larder does not keep their accounts".into()));
        }
    }
    Ok(None)
}
