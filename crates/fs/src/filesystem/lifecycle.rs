//! The life of an open file system: opening, its threads, syncing, facts and figures, closing.

use crate::api::{FsInfo, InodeId, OpenOptions, StatFs, SubvolChoice};
use crate::engine::Core;
use crate::engine::fronts::FrontId;
use crate::error::{Error, Result};
use crate::space::SpaceKind::{Data, Metadata};
use crate::transaction::commit;
use crate::tree::IMAGE_COPIES;
use larder_format::{Generation, TreeId};
use larder_volume::{Device, DeviceStats};
use parking_lot::Mutex;
use serde::Serialize;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;

/// An open file system, as one front end sees it (module `fronts`).
///
/// Dropping the last front end without [`Filesystem::close`] has the effect of a crash: the last
/// commit stays.
///
/// Every call can fail with the errors of reading: `Volume` for a device error, `Corrupt` for bytes
/// that are not what they must be. Every call that names an inode can fail with `NotFound`. Every
/// call that changes something can fail with `ReadOnly`, `SubvolumeReadOnly` and `NoSpace`. Under
/// [`crate::api::no_wait`] each can answer `WouldBlock`, and has changed nothing then. Calls name
/// the errors that they have beyond these.
#[derive(Debug)]
pub struct Filesystem {
    pub(crate) core: Arc<Core>,
    root: InodeId,
    pub(crate) front: FrontId,
    engine: Arc<Engine>,
}

/// What all front ends share. The last one ends it.
#[derive(Debug)]
struct Engine {
    core: Arc<Core>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// Counters since the file system was opened; shown by `larder stats`.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs)]
pub struct Stats {
    /// Last published transaction.
    pub generation: u64,
    pub commits: u64,
    /// Callers that had to wait until a transaction was published.
    pub commit_waits: u64,
    /// Longest time that operations waited for a seal, and the sum of these times.
    pub seal_max_us: u64,
    pub seal_total_us: u64,
    /// Longest time from seal to publication, and the sum of these times.
    pub commit_max_us: u64,
    pub commit_total_us: u64,
    pub nodes_written: u64,
    pub tree_edits: u64,
    /// Attempts to edit that first had to fetch something with the lock dropped.
    pub tree_retries: u64,
    /// The longest time that an edit held a tree's lock, the sum of these times, and what is known
    /// about the long ones.
    pub tree_lock_max_us: u64,
    pub tree_lock_total_us: u64,
    pub tree_lock_holds: crate::LongHolds,
    /// Nodes copied to a new address.
    pub node_copies: u64,
    /// Nodes copied in memory because a version can see them.
    pub image_copies: u64,
    pub cache_hits: u64,
    pub cache_reads: u64,
    pub cache_bytes: u64,
    pub damaged_copies: u64,
    pub device_reads: u64,
    pub device_read_bytes: u64,
    pub device_writes: u64,
    pub device_written_bytes: u64,
    pub device_flushes: u64,
    /// Do writes and long reads go past the machine's page cache?
    pub device_direct: bool,
    pub device_discards: u64,
    pub device_discarded_bytes: u64,
    /// Bytes written by callers that are not in extents yet.
    pub delayed_bytes: u64,
    /// Bytes that were compressed, and their length afterwards. Bytes that were tried and did not
    /// shrink, and bytes that did not look promising.
    pub compress_in_bytes: u64,
    pub compress_out_bytes: u64,
    pub compress_failed_bytes: u64,
    pub compress_skipped_bytes: u64,
    /// Compressed bytes in memory that are in flight to the device.
    pub compress_held_bytes: u64,
    pub inodes_in_memory: u64,
    /// Parts of the cache size.
    pub memory: MemoryStats,
    /// Bytes of data and metadata that running operations and the next commit have reserved,
    /// without the global reserve. 0 when nothing is left to commit.
    pub data_reserved: u64,
    pub metadata_reserved: u64,
    /// Bytes of data and metadata that were freed and wait for a commit or a reader.
    pub data_pinned: u64,
    pub metadata_pinned: u64,
    /// Bytes of metadata that were allocated beyond what was reserved, with what commits take from
    /// the global reserve.
    pub metadata_overdrawn: u64,
    /// Requests that had to wait for space, and requests that were refused.
    pub space_waits: u64,
    pub space_refusals: u64,
    pub reclaim: ReclaimStats,
    /// What `fsync` has done.
    pub log: crate::LogStats,
    /// Deleted subvolumes that still take space, and the number of their blocks that were looked
    /// at.
    pub subvolumes_to_drop: u64,
    pub blocks_dropped: u64,
    /// Why the file system is read-only, if it is.
    pub read_only: Option<String>,
}

/// What was done because space was short.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[allow(missing_docs)]
pub struct ReclaimStats {
    /// Calls of the reclaimer.
    pub rounds: u64,
    /// Rounds of writing delayed data; how much they were asked for, and how much they wrote. It is
    /// counted in bytes if data was short. If metadata was short, it is counted in runs of files,
    /// because delayed data reserves metadata for each of its files.
    pub writes: u64,
    pub asked_bytes: u64,
    pub written_bytes: u64,
    pub asked_runs: u64,
    pub written_runs: u64,
    /// Most bytes that a round wrote beyond what it was asked for: less than one piece of a file.
    pub excess_bytes: u64,
    /// Waits for data that was in flight already.
    pub settles: u64,
    pub chunks: u64,
    pub commits: u64,
}

/// What needs memory, and how much it may use, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[allow(missing_docs)]
pub struct MemoryUse {
    pub held: u64,
    pub budget: u64,
}

/// The parts of the memory that the engine may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryStats {
    /// Delayed data.
    pub delayed_data: MemoryUse,
    /// What writing it back needs in addition: the most so far.
    pub write_back: MemoryUse,
    /// Nodes that could be read again.
    pub clean_nodes: MemoryUse,
    /// What the running transaction has changed: nodes, inodes, notes for the commit. A sealed
    /// transaction may use as much.
    pub transaction: MemoryUse,
}

impl Filesystem {
    /// Opens the file system on `device`. If it may be written, orphans are cleaned up, and the
    /// threads that commit and write back are started; [`Filesystem::close`] ends them.
    ///
    /// # Errors
    /// Not btrfs, damaged, unsupported (the error names the feature), in need of a log replay, or a
    /// device error.
    pub fn open(device: Arc<dyn Device>, options: OpenOptions) -> Result<Arc<Self>> {
        let core = Core::open(device, options)?;
        if !core.options.no_log_replay {
            crate::log::replay(&core)?;
        }
        let root = core.mount_root(&core.options.subvol)?;
        let engine = Arc::new(Engine { core: core.clone(), threads: Mutex::default() });
        let fs = Arc::new(Self { core: core.clone(), root, front: core.fronts.join(root), engine });
        if core.read_only.is_some() {
            return Ok(fs);
        }
        let spawn = |name: &str, body: Box<dyn FnOnce() + Send>| {
            let thread = std::thread::Builder::new().name(name.into()).spawn(body);
            let thread =
                thread.map_err(|e| Error::Unsupported(format!("cannot start a thread: {e}")))?;
            fs.engine.threads.lock().push(thread);
            Ok::<_, Error>(())
        };
        let committer = core.clone();
        spawn("larder-commit", Box::new(move || commit::run(&committer)))?;
        crate::engine::delalloc::start(&core)?;
        crate::subvolume::drop::queue_earlier(&core)?;
        let dropper = core.clone();
        spawn("larder-drop", Box::new(move || crate::subvolume::drop::run(&dropper)))?;
        let flusher = core.clone();
        let body = move || {
            while !flusher.txns.pause(flusher.options.commit_interval) {
                if let Err(e) = crate::file::flush_all(&flusher) {
                    tracing::warn!("periodic write-back: {e}");
                }
                flusher.txns.request();
            }
        };
        spawn("larder-flush", Box::new(body))?;
        let early = core.clone();
        spawn("larder-early", Box::new(move || early.flushes.run(|why| early.txns.fail(why))))?;
        crate::inode::orphan::clean_up_after_crash(&core)?;
        Ok(fs)
    }

    /// One more front end of the same engine, with its own root and holds.
    ///
    /// # Errors
    /// Those of opening with this choice.
    pub fn another(&self, subvol: &SubvolChoice) -> Result<Arc<Self>> {
        let root = self.core.mount_root(subvol)?;
        let front = self.core.fronts.join(root);
        Ok(Arc::new(Self {
            core: self.core.clone(),
            root,
            front,
            engine: Arc::clone(&self.engine),
        }))
    }

    /// Ends this front end while others stay, and gives back all of its holds. Inodes that only
    /// these holds kept are deleted before the call returns. Afterwards only calls that concern the
    /// whole file system may be made on this front end.
    pub fn leave(&self) {
        if self.core.fronts.is_here(self.front) {
            crate::inode::orphan::delete_held_by(&self.core, self.front);
            self.core.fronts.leave(self.front);
        }
    }

    /// Was the device opened for reading only?
    #[must_use]
    pub fn is_opened_read_only(&self) -> bool {
        self.core.options.read_only
    }

    /// Can both front ends reach the same inode? They can if their roots are the same, or if one
    /// root is above the other.
    ///
    /// # Errors
    /// Those of every call, see [`Filesystem`].
    pub fn overlaps(&self, other: &Self) -> Result<bool> {
        let is_below = |at: TreeId, above: TreeId| -> Result<bool> {
            let mut at = at;
            loop {
                if at == above {
                    return Ok(true);
                }
                // A subvolume that hangs nowhere was deleted, and everything below it, too.
                let Some((up, ..)) = self.core.subvol_info(at)?.parent else { return Ok(false) };
                at = up;
            }
        };
        let (a, b) = (self.root.subvol, other.root.subvol);
        Ok(is_below(a, b)? || is_below(b, a)?)
    }

    /// Root directory of the mount, as `subvol` in the options chose it.
    #[must_use]
    pub fn root(&self) -> InodeId {
        self.root
    }

    /// Makes everything durable that was done before the call.
    ///
    /// # Errors
    /// `ReadOnly` after a failed commit (with its reason), `DataLost` when data of some file could
    /// not be written.
    pub fn sync(&self) -> Result<()> {
        if self.core.read_only.is_some() {
            return Ok(());
        }
        crate::api::may_wait()?;
        let flushed = crate::file::flush_all(&self.core);
        self.core.commit()?;
        // Afterwards the image shows that freed space was given back.
        self.core.space.discards.wait();
        flushed
    }

    /// Begins to make durable what was done before the call, and does not wait for it. For a caller
    /// that is about to [`Self::close`] and has something else to do first.
    pub fn start_sync(&self) {
        self.core.txns.hasten();
    }

    /// Facts about the file system.
    #[must_use]
    pub fn info(&self) -> FsInfo {
        let core = &self.core;
        let waiting = core.txns.running().label.lock().clone();
        let sb = core.superblock.lock();
        let end = sb.label.iter().position(|b| *b == 0).unwrap_or(sb.label.len());
        FsInfo {
            fsid: sb.fsid,
            label: waiting.unwrap_or_else(|| sb.label[..end].to_vec()),
            generation: Generation(sb.generation.get()),
            nodesize: sb.nodesize.get(),
            sectorsize: sb.sectorsize.get(),
            csum: core.csum,
            total_bytes: sb.total_bytes.get(),
            bytes_used: sb.bytes_used.get(),
            read_only: core.read_only.is_some() || core.txns.failure().is_some(),
            has_unreplayed_log: sb.log_root.get() != 0
                && !core.log_replayed.load(Ordering::Relaxed),
            metadata_dump: sb.metadata_dump().is_some(),
        }
    }

    /// Space as `df` shows it: how much data can still be written, at its profile. Nothing is
    /// available while metadata is full, even if data has room.
    ///
    /// # Errors
    /// None at present.
    pub fn statfs(&self) -> Result<StatFs> {
        let (total, free, available) = self.core.space.statfs_bytes(self.core.item_cost(8));
        let info = self.info();
        Ok(StatFs { total, free, available, block_size: info.sectorsize, fsid: info.fsid })
    }

    /// Where the space is, and what is full.
    #[must_use]
    pub fn space_usage(&self) -> crate::SpaceUsage {
        crate::SpaceUsage {
            delayed: self.core.data.delayed_bytes(),
            ..self.core.space.usage(self.core.item_cost(8))
        }
    }

    /// Counters.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let core = &self.core;
        let get = |a: &AtomicU64| a.load(Ordering::Relaxed);
        let accounts = &core.space.accounts;
        let (t, x, n) = (&core.tree_stats, &core.txns.stats, core.store.stats());
        let holds = t.holds.long();
        let c = &core.compression.stats;
        let r = &core.reclaims;
        let devices = core.volume.stats();
        let device = |of: fn(&DeviceStats) -> u64| devices.iter().map(|(_, s)| of(s)).sum::<u64>();
        Stats {
            generation: core.txns.published().0,
            commits: get(&x.commits),
            commit_waits: get(&x.waits),
            seal_max_us: get(&x.seal_max_ns) / 1000,
            seal_total_us: get(&x.seal_ns) / 1000,
            commit_max_us: get(&x.commit_max_ns) / 1000,
            commit_total_us: get(&x.commit_ns) / 1000,
            nodes_written: get(&x.nodes_written),
            tree_edits: get(&t.edits),
            tree_retries: get(&t.retries),
            tree_lock_max_us: holds.longest.us,
            tree_lock_total_us: t.holds.total_us(),
            tree_lock_holds: holds,
            node_copies: get(&t.cow),
            image_copies: get(&IMAGE_COPIES),
            cache_hits: get(&n.hits),
            cache_reads: get(&n.reads),
            cache_bytes: core.store.cached_bytes(),
            damaged_copies: get(&n.bad_copies),
            device_reads: device(|s| s.reads),
            device_read_bytes: device(|s| s.read_bytes),
            device_writes: device(|s| s.writes),
            device_written_bytes: device(|s| s.written_bytes),
            device_flushes: device(|s| s.flushes),
            device_direct: core.volume.devices().all(|(_, device)| device.is_direct()),
            device_discards: device(|s| s.discards),
            device_discarded_bytes: device(|s| s.discarded_bytes),
            delayed_bytes: core.data.delayed_bytes(),
            compress_in_bytes: get(&c.raw),
            compress_out_bytes: get(&c.packed),
            compress_failed_bytes: get(&c.failed),
            compress_skipped_bytes: get(&c.skipped),
            compress_held_bytes: get(&c.held),
            memory: {
                let budget = core.budget();
                let of = |held, budget| MemoryUse { held, budget };
                MemoryStats {
                    delayed_data: of(core.data.memory(), budget.data),
                    write_back: of(core.data.scratch.most(), budget.scratch),
                    clean_nodes: of(core.store.cached_bytes(), budget.nodes),
                    transaction: of(
                        core.txns.running().memory(core.nodesize()),
                        budget.transaction,
                    ),
                }
            },
            inodes_in_memory: core.subvols.read().values().map(|s| s.inodes.len() as u64).sum(),
            data_reserved: accounts.reserved_by_operations(Data),
            metadata_reserved: accounts.reserved_by_operations(Metadata),
            data_pinned: accounts.figures(Data).pinned,
            metadata_pinned: accounts.figures(Metadata).pinned,
            metadata_overdrawn: accounts.stats(Metadata).overdrawn,
            space_waits: accounts.stats(Data).tickets + accounts.stats(Metadata).tickets,
            space_refusals: accounts.stats(Data).refused + accounts.stats(Metadata).refused,
            reclaim: ReclaimStats {
                rounds: accounts.stats(Data).reclaims + accounts.stats(Metadata).reclaims,
                writes: get(&r.writes),
                asked_bytes: get(&r.asked_bytes),
                written_bytes: get(&r.written_bytes),
                asked_runs: get(&r.asked_runs),
                written_runs: get(&r.written_runs),
                excess_bytes: get(&r.excess_bytes),
                settles: get(&r.settles),
                chunks: get(&r.chunks),
                commits: get(&r.commits),
            },
            log: core.log.stats(),
            subvolumes_to_drop: core.drops.len() as u64,
            blocks_dropped: get(&core.drops.blocks),
            read_only: core.read_only.clone().or_else(|| core.txns.failure()),
        }
    }

    /// Discards all free space, that of deleted files too, or the free space in a range of
    /// addresses. See [`crate::TrimRange`].
    ///
    /// # Errors
    /// `ReadOnly`; `NotSupported` where the device takes no discards; those of
    /// [`Filesystem::sync`]; those of the device.
    pub fn trim(&self, range: crate::TrimRange) -> Result<crate::Trimmed> {
        self.core.check_writable()?;
        self.sync()?;
        self.core.space.trim(range)
    }

    /// Sets the label, up to 255 bytes. It is durable with the next commit.
    ///
    /// # Errors
    /// `Invalid` for a label that is too long or has a NUL or newline; `ReadOnly`.
    pub fn set_label(&self, label: &[u8]) -> Result<()> {
        if label.len() > 255 {
            return Err(Error::Invalid("a label has at most 255 bytes"));
        }
        if label.iter().any(|b| [0, b'\n'].contains(b)) {
            return Err(Error::Invalid("a label has no NUL and no newline"));
        }
        let handle = self.core.begin(1)?;
        *handle.txn.label.lock() = Some(label.to_vec());
        handle.txn.touch();
        Ok(())
    }

    /// Deletes the inodes that only holds kept, of all front ends, commits, and ends the threads.
    /// Later changes fail. When this returns everything is durable.
    ///
    /// # Errors
    /// Those of [`Filesystem::sync`]; the threads are ended in any case.
    pub fn close(&self) -> Result<()> {
        let done = match (&self.core.read_only, self.core.txns.failure()) {
            (Some(_), _) => Ok(()),
            (None, Some(why)) => Err(Error::ReadOnly(Some(why))),
            (None, None) => {
                crate::inode::orphan::delete_held(&self.core).and_then(|()| self.sync())
            }
        };
        if done.is_ok() && self.core.read_only.is_none() {
            self.core.space.discards.discard_left();
        }
        self.engine.stop_threads();
        self.core.txns.end("the file system was closed");
        done
    }
}

impl Engine {
    fn stop_threads(&self) {
        self.core.drops.stop();
        self.core.txns.stop();
        self.core.data.stop();
        self.core.flushes.stop();
        for t in std::mem::take(&mut *self.threads.lock()) {
            // If a thread panicked, the file system became read-only then.
            let _ = t.join();
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.core.txns.end("the file system was dropped");
        self.stop_threads();
    }
}
