//! The life of an open file system: opening, its threads, syncing, facts, closing.

use super::stats::Stats;
use crate::api::{FsInfo, InodeId, OpenOptions, StatFs, SubvolChoice};
use crate::balance::Reclaim;
use crate::engine::Core;
use crate::engine::fronts::FrontId;
use crate::error::{Error, Result};
use crate::lock::{self, Mutex};
use crate::transaction::commit;
use larder_format::{Generation, TreeId};
use larder_volume::Device;
use std::sync::Arc;
use std::sync::atomic::Ordering;
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
    threads: Mutex<Vec<JoinHandle<()>>, lock::Threads>,
    reclaim: Mutex<Option<Reclaim>, lock::Threads>,
}

impl Filesystem {
    /// Opens the file system on `device`. If it may be written, orphans are cleaned up, and the
    /// threads that commit and write back are started; [`Filesystem::close`] ends them.
    ///
    /// # Errors
    /// Not btrfs, damaged, unsupported (the error names the feature), in need of a log replay, or a
    /// device error.
    pub fn open(device: Arc<dyn Device>, options: OpenOptions) -> Result<Arc<Self>> {
        Self::open_devices(vec![device], options)
    }

    /// The same for a file system on several devices, given in any order.
    ///
    /// # Errors
    /// As [`Filesystem::open`]; devices that do not belong together, and missing ones, are named.
    pub fn open_devices(devices: Vec<Arc<dyn Device>>, options: OpenOptions) -> Result<Arc<Self>> {
        Self::on(Core::open(devices, options)?)
    }

    /// Puts an engine to work.
    pub(crate) fn on(core: Arc<Core>) -> Result<Arc<Self>> {
        if !core.options.no_log_replay {
            crate::log::replay(&core)?;
        }
        let root = core.mount_root(&core.options.subvol)?;
        let engine = Arc::new(Engine {
            core: core.clone(),
            threads: Mutex::default(),
            reclaim: Mutex::default(),
        });
        let fs = Arc::new(Self { core: core.clone(), root, front: core.fronts.join(root), engine });
        if core.read_only.is_none() {
            fs.start_threads()?;
            crate::inode::orphan::clean_up_after_crash(&core)?;
            crate::relocate::clean_leftovers(&core)?;
            // Until there is a mark, a device that is behind gets no superblock.
            if core.items_changed.load(Ordering::Acquire) {
                core.touch()?;
                core.commit()?;
            }
            if let (Some(percent), Some(interval)) =
                (core.options.reclaim, core.options.commit_interval)
            {
                *fs.engine.reclaim.lock() = Some(Reclaim::start(&core, percent, interval)?);
            }
        }
        Ok(fs)
    }

    /// Starts the threads of a file system that may be written.
    fn start_threads(&self) -> Result<()> {
        let core = &self.core;
        self.engine.start("larder-commit", |core| commit::run(core))?;
        crate::engine::delalloc::start(core)?;
        crate::subvolume::drop::queue_earlier(core)?;
        self.engine.start("larder-drop", crate::subvolume::drop::run)?;
        self.engine.start("larder-flush", |core| {
            while !core.txns.pause(core.options.commit_interval) {
                if let Err(e) = crate::file::flush_all(core) {
                    tracing::warn!("periodic write-back: {e}");
                }
                core.txns.request();
            }
        })?;
        self.engine.start("larder-early", |core| core.flushes.run(|why| core.txns.fail(why)))
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
        if self.core.volume.errors_have_changed() {
            self.core.touch()?;
        }
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
        // They look at the map of the devices, which comes before the superblock.
        let (missing_devices, lost_chunks) = (core.missing_devices().collect(), core.lost_chunks());
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
            missing_devices,
            stale_devices: self.devices_behind(),
            lost_chunks,
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

    /// Which of the long operations on chunks and devices runs, of which there is one at a time.
    #[must_use]
    pub fn exclusive_operation(&self) -> crate::Exclusive {
        self.core.exclusive.now()
    }

    /// Counters.
    #[must_use]
    pub fn stats(&self) -> Stats {
        Stats::of(&self.core)
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

    /// Reads everything that is stored, on all devices, and repairs what is bad from what is good.
    /// Returns when everything was read, or when `control` says that it has to end. What came of it
    /// is in the state of `control`; a scrub goes on from a state that was not finished. `each` is
    /// called now and then, so that the state can be kept.
    ///
    /// A file system that was opened read-only is repaired as well, if its devices can be written:
    /// nothing that is written changes what it says.
    ///
    /// # Errors
    /// Reading the trees that say what is allocated; `Busy` when it was told to end; `ReadOnly`
    /// when it is to repair devices that cannot be written.
    pub fn scrub(
        &self,
        options: crate::ScrubOptions,
        control: &crate::ScrubControl,
        each: &(dyn Fn(&crate::ScrubState) + Sync),
    ) -> Result<()> {
        crate::scrub::run(&self.core, options, control, each)
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
        self.engine.stop_reclaim();
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
    /// Starts a thread of this name.
    fn start(&self, name: &str, body: fn(&Core)) -> Result<()> {
        let core = self.core.clone();
        let thread = std::thread::Builder::new()
            .name(name.into())
            .spawn(move || body(&core))
            .map_err(|e| Error::Unsupported(format!("cannot start a thread: {e}")))?;
        self.threads.lock().push(thread);
        Ok(())
    }
    fn stop_reclaim(&self) {
        let reclaim = self.reclaim.lock().take();
        reclaim.into_iter().for_each(Reclaim::end);
    }
    fn stop_threads(&self) {
        self.stop_reclaim();
        self.core.drops.stop();
        self.core.txns.stop();
        self.core.data.stop();
        self.core.flushes.stop();
        let threads = std::mem::take(&mut *self.threads.lock());
        for t in threads {
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
