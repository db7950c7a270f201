//! Discarding: telling the device which space holds nothing any more.
//!
//! An image file gets a hole there; a block device may forget the bytes. This module hides when
//! that is done, and for which part of the freed space. `docs/SPACE.md` ("Discard") lists the
//! cases.
//!
//! Space is never discarded before the superblock that frees it is durable and no version can reach
//! it: it is discarded when it could also be overwritten. It stays pinned until the device has
//! answered. A commit discards no more than the [`MOST_PER_COMMIT`] longest runs of whole
//! [`GRANULE`]s, so that a commit that frees a million small files takes no longer for it. Tree
//! blocks wait until the file system is closed: discarding them with every commit would cost every
//! `fsync` for a few MiB.
//!
//! A caller that is short of space does not wait for freed space to be discarded
//! ([`Discards::hurry`]), only for a discard that is under way. A discard that fails is no reason
//! to fail anything else. After the first failure no more are tried.

use crate::api::OpenOptions;
use crate::lock::{self, Locked, Mutex};
use crate::space::free_index::Lengths;
use crate::space::groups::Groups;
use crate::space::{Pinned, Run, RunJoiner, SpaceKind};
use crate::tree::Epochs;
use larder_format::{DeviceId, Logical, Physical};
use larder_volume::Volume;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whole blocks of this size are discarded, and nothing smaller.
pub(crate) const GRANULE: u64 = 64 << 10;
/// Discards of freed data after one commit.
const MOST_PER_COMMIT: usize = 512;
/// Discards when a file system is closed.
const MOST_AT_CLOSE: usize = 16384;

/// What was freed and is given back, and what of it is discarded before.
#[derive(Debug)]
pub(crate) struct Discards {
    options: Arc<OpenOptions>,
    volume: Arc<Volume>,
    groups: Arc<Groups>,
    /// What keeps freed space from being used again.
    epochs: Arc<Epochs<Pinned>>,
    /// Freed data, still pinned.
    queue: Mutex<Vec<Run>, lock::DiscardQueue>,
    /// Held while space that no version can reach any more is given back. A second caller finds
    /// that space free when it gets the lock.
    releasing: Mutex<(), lock::Releasing>,
    /// Held while the device discards. Its holder waits for the device and for nothing else.
    busy: Mutex<(), lock::Discarding>,
    /// A discard has failed.
    given_up: AtomicBool,
}

impl Discards {
    pub(super) fn new(
        options: Arc<OpenOptions>,
        volume: Arc<Volume>,
        groups: Arc<Groups>,
        epochs: Arc<Epochs<Pinned>>,
    ) -> Self {
        Self {
            options,
            volume,
            groups,
            epochs,
            queue: Mutex::default(),
            releasing: Mutex::default(),
            busy: Mutex::default(),
            given_up: AtomicBool::new(false),
        }
    }
    /// How the file system was opened.
    pub(super) fn options(&self) -> &OpenOptions {
        &self.options
    }
    /// Is freed space discarded?
    pub(crate) fn are_on(&self) -> bool {
        self.options.discard && !self.given_up.load(Ordering::Relaxed)
    }
    /// The device is about to discard. Until the guard is dropped, callers that find no space wait.
    pub(crate) fn busy(&self) -> Locked<'_, ()> {
        self.busy.lock()
    }

    /// Gives back space that no version can reach any more. Data that is to be discarded first
    /// waits for the committer, or for [`Discards::hurry`].
    pub(crate) fn release_expired(&self) {
        let _releasing = self.releasing.lock();
        for pinned in self.epochs.expired() {
            let discards = self.are_on();
            let mut data = Vec::new();
            for run in pinned {
                if discards && self.options.tuning.discard_everything {
                    self.discard_run(run);
                    self.groups.discarded(run);
                } else if discards && self.is_data(run) {
                    data.push(run);
                } else {
                    self.groups.unpin(run);
                }
            }
            if !data.is_empty() {
                self.queue.lock().append(&mut data);
            }
        }
    }
    /// Does the run lie in a group for data alone?
    fn is_data(&self, run: Run) -> bool {
        let mixed = self.groups.space().is_mixed();
        !mixed && self.groups.find(run.start).is_some_and(|g| g.kind() == SpaceKind::Data)
    }
    /// Space is short. Gives back what can be given back without a discard, and waits for what is
    /// being discarded.
    pub(crate) fn hurry(&self) {
        self.release_expired();
        let runs = std::mem::take(&mut *self.queue.lock());
        runs.into_iter().for_each(|run| self.groups.unpin(run));
        self.wait();
    }

    /// Waits for what the committer is discarding.
    pub(crate) fn wait(&self) {
        drop(self.busy());
    }

    /// Discards freed data, and gives it back. The caller holds `busy`.
    pub(crate) fn discard_freed(&self) {
        let mut runs = std::mem::take(&mut *self.queue.lock());
        runs.sort_unstable_by_key(|r| r.start);
        let mut joiner = RunJoiner::default();
        let mut whole = Vec::new();
        for run in runs {
            let group = self.groups.find(run.start).map(|g| g.run().start);
            whole.extend(joiner.push(group, run));
        }
        whole.extend(joiner.finish());
        let groups = &self.groups;
        if fault!(self.options.tuning, DiscardBeyond) {
            for (_, run) in whole {
                let (start, end) =
                    (run.start.0 / GRANULE * GRANULE, run.end().0.next_multiple_of(GRANULE));
                self.discard_run(Run::new(Logical(start), end - start));
                groups.unpin(run);
            }
            return;
        }
        let mut parts: Vec<Run> =
            whole.into_iter().filter_map(|(_, run)| groups.pin_granules(run, GRANULE)).collect();
        // A granule that became free in pieces is found whole only with the last of them.
        parts.sort_unstable_by_key(|r| std::cmp::Reverse(r.len));
        for (i, run) in parts.into_iter().enumerate() {
            if i < MOST_PER_COMMIT {
                self.discard_run(run);
                groups.discarded(run);
            } else {
                groups.unpin(run);
            }
        }
    }

    /// Discards what was freed and left out until now. It is for the end, when nothing allocates
    /// any more.
    pub(crate) fn discard_left(&self) {
        if !self.are_on() {
            return;
        }
        self.release_expired();
        let _busy = self.busy();
        self.discard_freed();
        let wanted = Lengths { most: u64::MAX, least: GRANULE };
        let mut left = MOST_AT_CLOSE;
        for group in self.groups.take_undiscarded() {
            let mut range = group.run();
            while let Some(run) = self.groups.pin_free(&group, range, wanted) {
                self.discard_run(run);
                self.groups.discarded(run);
                range = Run::new(run.end(), range.end().0 - run.end().0);
                left -= 1;
                if left == 0 || !self.are_on() {
                    return;
                }
            }
        }
    }

    fn discard_run(&self, run: Run) {
        if self.are_on()
            && let Err(e) = self.volume.discard(run.start, run.len)
        {
            self.give_up_discarding(&e);
        }
    }
    /// Discards the device space of a chunk that was given back.
    pub(crate) fn discard_stripe(&self, device: DeviceId, at: Physical, len: u64) {
        if self.are_on()
            && let Err(e) = self.volume.discard_on(device, at, len)
        {
            self.give_up_discarding(&e);
        }
    }
    fn give_up_discarding(&self, why: &dyn std::fmt::Display) {
        if !self.given_up.swap(true, Ordering::Relaxed) {
            tracing::warn!("free space is not discarded any more: {why}");
        }
    }
}
