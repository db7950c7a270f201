//! The mounts of one file system: how they come and go, and which of them overlap.
//!
//! An image is opened once, by one daemon, however often it is mounted. Each mount has its own
//! connection to the kernel, [front end](Filesystem::another) of the engine, inode numbers, options
//! and counters. All mounts share the engine with its one cache, and the
//! [threads](crate::transport) of FUSE over io_uring. This module hides how they know of each
//! other:
//!
//! - **Coming and going.** A mount [joins](MountGroup::join) before it is made, and
//!   [leaves](MountGroup::leave) when its session has ended. After the last one has left none can
//!   join, so the engine can be closed. A mount that comes too late waits for the daemon's end, and
//!   becomes a first one.
//! - **Overlap.** Two mounts overlap if the root of one is the root of the other, or above it. The
//!   kernel of one may have cached what the other changes: see `server::changes`. Mounts without
//!   common inodes, like `@` and `@home`, only load one flag because of it.
//!   common inodes, like `@` and `@home`, pay one load of a flag for it.
//! - **`-o writeback`.** A mount with this option overlaps with no other. `docs/FUSE.md` says why.

use crate::nodes::Nodes;
use crate::notify::Notifier;
use crate::transport::SharedTransport;
use larder_fs::{Filesystem, InodeId};
use parking_lot::{Mutex, RwLock};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// All mounts of one file system; `H` answers their requests.
#[derive(Debug)]
pub struct MountGroup<H> {
    pub(crate) transport: SharedTransport<H>,
    /// Two members overlap.
    overlap: AtomicBool,
    members: RwLock<Members>,
    /// The result of closing the engine, if a kernel waited for that (`fuseblk`).
    pub(crate) closed: Mutex<Option<larder_fs::Result<()>>>,
    /// Inodes about which a member is waiting for other members' kernels: see `server::changes`.
    waited_for: Mutex<HashMap<InodeId, WaitingMember>>,
}

#[derive(Debug, Default)]
struct Members {
    list: Vec<Arc<Member>>,
    /// How many have joined so far.
    joined: u64,
    /// No mount may join any more.
    closing: bool,
}

/// The member that waits about an inode, and for how many of its requests.
#[derive(Debug)]
struct WaitingMember {
    number: u64,
    requests: u32,
}

/// One mount.
#[derive(Debug)]
pub struct Member {
    /// Unique among all that have joined so far.
    number: u64,
    pub(crate) fs: Arc<Filesystem>,
    pub(crate) nodes: Nodes,
    pub(crate) notify: Notifier,
    mountpoint: PathBuf,
    writeback: bool,
    read_only: bool,
}

impl Member {
    /// Where it is mounted.
    #[must_use]
    pub fn mountpoint(&self) -> &Path {
        &self.mountpoint
    }
    /// The front end of the engine that it shows.
    #[must_use]
    pub fn filesystem(&self) -> &Arc<Filesystem> {
        &self.fs
    }
    /// Nothing may be changed through it.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }
}

/// Why a mount cannot join.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// The last mount has gone, or is being ended.
    #[error("the file system is being closed")]
    Closing,
    /// It overlaps with another mount, and one of them has `-o writeback`.
    #[error(
        "{} shows files that this mount would show, too, and a mount with -o writeback shares its \
            files with no other",
        mountpoint.display()
    )]
    Writeback {
        /// Where the other one is mounted.
        mountpoint: PathBuf,
        /// The new mount has the option, not the other.
        mine: bool,
    },
}

/// What is left when a mount has gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remaining {
    /// Other mounts are left.
    Others,
    /// No mount is left, and none can come.
    Nobody,
}

impl<H> Default for MountGroup<H> {
    fn default() -> Self {
        Self {
            transport: SharedTransport::default(),
            overlap: AtomicBool::default(),
            members: RwLock::default(),
            closed: Mutex::default(),
            waited_for: Mutex::default(),
        }
    }
}

impl<H> MountGroup<H> {
    /// Adds a mount of this front end, which will be made with these options.
    ///
    /// # Errors
    /// See [`JoinError`].
    pub fn join(
        &self,
        fs: Arc<Filesystem>,
        mountpoint: &Path,
        options: &crate::MountOptions,
    ) -> Result<Arc<Member>, JoinError> {
        let mut members = self.members.write();
        if members.closing {
            return Err(JoinError::Closing);
        }
        let mine = options.writeback;
        for other in members.list.iter().filter(|m| mine || m.writeback) {
            if overlap(&fs, &other.fs) {
                let mine = mine && !other.writeback;
                return Err(JoinError::Writeback { mountpoint: other.mountpoint.clone(), mine });
            }
        }
        let member = Arc::new(Member {
            number: members.joined,
            nodes: Nodes::new(fs.root()),
            notify: Notifier::default(),
            mountpoint: mountpoint.to_owned(),
            writeback: mine,
            read_only: options.read_only,
            fs,
        });
        members.joined += 1;
        members.list.push(Arc::clone(&member));
        self.look_for_overlap(&members.list);
        Ok(member)
    }

    /// The session of a mount has ended, or never began. Unless it was the last mount, its look-ups
    /// are given back.
    pub fn leave(&self, member: &Arc<Member>) -> Remaining {
        let mut members = self.members.write();
        members.list.retain(|m| !Arc::ptr_eq(m, member));
        if members.list.is_empty() {
            members.closing = true;
            return Remaining::Nobody;
        }
        self.look_for_overlap(&members.list);
        drop(members);
        member.fs.leave();
        Remaining::Others
    }

    /// Lets no further mount join.
    pub fn close(&self) {
        self.members.write().closing = true;
    }

    /// Is this the only mount? If so, no other one can join from now on.
    pub(crate) fn is_last(&self) -> bool {
        let mut members = self.members.write();
        let last = members.list.len() <= 1;
        members.closing |= last;
        last
    }

    /// The mounts at this moment.
    #[must_use]
    pub fn members(&self) -> Vec<Arc<Member>> {
        self.members.read().list.clone()
    }

    /// Can the same inode be reached through two mounts?
    pub(crate) fn overlaps(&self) -> bool {
        self.overlap.load(Ordering::Acquire)
    }

    fn look_for_overlap(&self, list: &[Arc<Member>]) {
        let pairs =
            || list.iter().enumerate().flat_map(|(n, a)| list[n + 1..].iter().map(move |b| (a, b)));
        self.overlap.store(pairs().any(|(a, b)| overlap(&a.fs, &b.fs)), Ordering::Release);
    }

    /// Begins to wait for other members' kernels about an inode. If another member waits about it
    /// already, returns false, and this one must not wait.
    pub(crate) fn begin_to_wait(&self, member: &Member, about: InodeId) -> bool {
        let mut waited_for = self.waited_for.lock();
        let waiting =
            waited_for.entry(about).or_insert(WaitingMember { number: member.number, requests: 0 });
        let may = waiting.number == member.number;
        waiting.requests += u32::from(may);
        may
    }

    /// Ends what [`begin_to_wait`](Self::begin_to_wait) began.
    pub(crate) fn end_to_wait(&self, about: InodeId) {
        let mut waited_for = self.waited_for.lock();
        if let Some(waiting) = waited_for.get_mut(&about) {
            waiting.requests -= 1;
            if waiting.requests == 0 {
                waited_for.remove(&about);
            }
        }
    }

    /// The result of closing the engine, if a kernel waited for that.
    pub fn take_closed(&self) -> Option<larder_fs::Result<()>> {
        self.closed.lock().take()
    }
}

/// If this cannot be found out, they count as overlapping.
fn overlap(a: &Filesystem, b: &Filesystem) -> bool {
    a.overlaps(b).unwrap_or(true)
}
