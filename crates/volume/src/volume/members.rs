//! The members of a volume: devices in a list that changes while transfers go on.
//!
//! A transfer takes its member out of the list and keeps it until it has ended. A change puts
//! another list in the place of the old one, so the lock is held for a look only, as that of the
//! map is. A member that is in no list any more is in use as long as transfers have it: each of
//! them has a reference, and the end of the last one tells ([`Leaving::wait`]).

use super::errors::Errors;
use super::unflushed::Unflushed;
use super::{Counters, ErrorKind};
use crate::device::Device;
use crate::error::VolumeError;
use larder_format::{DeviceId, Generation, Physical};
use parking_lot::RwLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock, mpsc};

/// A device of the volume.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) id: DeviceId,
    pub(super) device: Arc<dyn Device>,
    /// It is a device of another file system as well, and nothing is written to it.
    pub(super) is_seed: AtomicBool,
    /// Something did not reach it after this commit. It was away meanwhile, or a power cut came
    /// between its superblock and the others' (`assembly`). [`WHOLE`] where it has everything.
    behind: AtomicU64,
    /// A write or flush of it has failed, and nothing is written to it any more. What it has may be
    /// older than what the others have.
    pub(super) failed: AtomicBool,
    /// It is coming or going, and no new chunk is to lie on it.
    pub(super) closed: AtomicBool,
    /// What it has taken and not made durable yet. Shared with the target that it was.
    pub(super) unflushed: Arc<Unflushed>,
    pub(super) counters: Counters,
    pub(super) errors: Errors,
    /// Goes with the member. The other end waits for that.
    in_use: OnceLock<mpsc::Sender<()>>,
}

/// The device has all commits.
const WHOLE: u64 = u64::MAX;

/// All members at one moment.
pub(super) type Snapshot = Arc<[Arc<Member>]>;

/// The list.
#[derive(Debug)]
pub(super) struct Members(RwLock<Snapshot>);

/// A member that is in the list no more. Transfers that began before may still use it.
#[derive(Debug)]
#[must_use]
pub(super) struct Leaving(Arc<Member>);

impl Members {
    pub(super) fn new(members: Vec<Arc<Member>>) -> Self {
        Self(RwLock::new(members.into()))
    }

    pub(super) fn all(&self) -> Snapshot {
        self.0.read().clone()
    }

    pub(super) fn get(&self, id: DeviceId) -> Option<Arc<Member>> {
        self.0.read().iter().find(|m| m.id == id).cloned()
    }

    /// Changes the list. No other change comes in between.
    pub(super) fn change<T>(&self, change: impl FnOnce(&mut Vec<Arc<Member>>) -> T) -> T {
        let mut list = self.0.write();
        let mut next = list.to_vec();
        let result = change(&mut next);
        *list = next.into();
        result
    }
}

impl Leaving {
    /// A member that the caller has taken out of the list.
    pub(super) fn new(member: Arc<Member>) -> Self {
        Self(member)
    }

    /// Waits for the transfers that use the member, and returns its device.
    pub(super) fn wait(self) -> Arc<dyn Device> {
        let (in_use, ended) = mpsc::channel();
        let device = self.0.device.clone();
        let first = self.0.in_use.set(in_use).is_ok();
        drop(self);
        if first {
            // Nothing is ever sent: the other end goes together with the member.
            let _ = ended.recv();
        }
        device
    }
}

impl Member {
    pub(super) fn new(id: DeviceId, device: Arc<dyn Device>) -> Arc<Self> {
        Self::with_unflushed(id, device, Arc::default())
    }

    /// The member that a target becomes. What is on its way to the target still is noted for both.
    pub(super) fn promoted(target: &Self, id: DeviceId) -> Arc<Self> {
        let this = Self::with_unflushed(id, target.device.clone(), target.unflushed.clone());
        // The counts that are kept are of the old device.
        this.errors.reset();
        this
    }

    fn with_unflushed(
        id: DeviceId,
        device: Arc<dyn Device>,
        unflushed: Arc<Unflushed>,
    ) -> Arc<Self> {
        Arc::new(Self {
            id,
            device,
            unflushed,
            is_seed: AtomicBool::new(false),
            behind: AtomicU64::new(WHOLE),
            failed: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            counters: Counters::default(),
            errors: Errors::default(),
            in_use: OnceLock::new(),
        })
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failed.load(Relaxed)
    }

    pub(super) fn is_behind(&self) -> bool {
        self.lacks_since().is_some()
    }

    /// The last commit that it has as a whole, if it lacks something.
    pub(super) fn lacks_since(&self) -> Option<Generation> {
        let since = self.behind.load(Relaxed);
        (since != WHOLE).then_some(Generation(since))
    }

    pub(super) fn set_behind(&self, since: Option<Generation>) {
        self.behind.store(since.map_or(WHOLE, |since| since.0), Relaxed);
    }

    pub(super) fn is_seed(&self) -> bool {
        self.is_seed.load(Relaxed)
    }

    pub(super) fn takes_writes(&self) -> bool {
        !self.is_seed() && !self.has_failed()
    }

    pub(super) fn takes_chunks(&self) -> bool {
        self.takes_writes() && !self.closed.load(Relaxed)
    }

    /// Can the others not do without a further device because of this one?
    pub(super) fn is_no_help(&self) -> bool {
        self.has_failed() || self.is_behind()
    }

    /// Counts an error, since the opening and over the device's life.
    pub(super) fn went_wrong(&self, what: ErrorKind) {
        let counter = match what {
            ErrorKind::Write => Some(&self.counters.write_errors),
            ErrorKind::Read => Some(&self.counters.read_errors),
            ErrorKind::Flush => Some(&self.counters.flush_errors),
            ErrorKind::Corruption | ErrorKind::Generation => None,
        };
        if let Some(counter) = counter {
            counter.fetch_add(1, Relaxed);
        }
        self.errors.count(what);
    }

    pub(super) fn error(
        &self,
        op: &'static str,
        at: Physical,
        len: u64,
        source: std::io::Error,
    ) -> VolumeError {
        VolumeError::Io { device: self.device.name(), op, at, len, source }
    }
}
