//! The mounts of one file system: how they come and go, and which of them overlap.
//!
//! An image is opened once, by one daemon, however often it is mounted. Each mount is a connection
//! to the kernel of its own, with its own [front end](Filesystem::another) of the engine, inode
//! numbers, options and counters. All mounts share the engine with its one cache, and the
//! [threads](crate::transport) of FUSE over io_uring. This module hides how they know of each
//! other:
//!
//! - **Coming and going.** A mount [joins](MountGroup::join) before it is made, and
//!   [leaves](MountGroup::leave) when its session has ended. When the last one leaves, no other can
//!   join any more, so that the engine can be closed. A mount that comes too late waits for the
//!   daemon's end and becomes a first one.
//! - **Overlap.** Two mounts overlap if the root of one is the root of the other, or above it. What
//!   one of them changes, the kernel of the other may have cached: see `server::changes`. Mounts of
//!   different subvolumes, like `@` and `@home`, have no inode in common. They pay for all this
//!   with one load of a flag.
//! - **`-o writeback`.** Such a mount lets its kernel keep what was written, and believe its own
//!   sizes and times rather than ours. That cannot be made to agree with another mount of the same
//!   files. So a mount with this option overlaps with no other. No later step can make two mounts
//!   overlap that did not: to move the subvolume of one below the other takes a third mount that
//!   shows both, and that one overlaps with both.

use crate::nodes::Nodes;
use crate::notify::Notifier;
use crate::server::Server;
use crate::transport::Host;
use larder_fs::{Filesystem, InodeId};
use parking_lot::{Mutex, RwLock};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// All mounts of one file system.
#[derive(Debug, Default)]
pub struct MountGroup {
    pub(crate) host: Host<Server>,
    /// Two of the members overlap.
    overlap: AtomicBool,
    members: RwLock<Members>,
    /// What the kernel waits for, once it has waited for that (`fuseblk`).
    pub(crate) closed: Mutex<Option<larder_fs::Result<()>>>,
    /// Inodes about which some member is waiting for other members' kernels: see `server::changes`.
    waited_for: Mutex<HashMap<InodeId, Waiting>>,
}

#[derive(Debug, Default)]
struct Members {
    list: Vec<Arc<Member>>,
    /// How many have ever joined.
    joined: u64,
    /// Nobody may join any more.
    closing: bool,
}

/// Which member waits about an inode, and for how many of its requests.
#[derive(Debug)]
struct Waiting {
    number: u64,
    requests: u32,
}

/// One mount.
#[derive(Debug)]
pub struct Member {
    /// Its own among all that have ever joined.
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
    /// The front end that it shows.
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
    /// It overlaps with another, and this cannot be: `-o writeback`.
    #[error(
        "{} shows files that this mount would show, too, and a mount with -o writeback shares its \
            files with no other",
        mountpoint.display()
    )]
    Writeback {
        /// Where the other is mounted.
        mountpoint: PathBuf,
        /// The new mount has the option, not the other.
        mine: bool,
    },
}

/// What is left when a mount has gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// Other mounts.
    Others,
    /// Nobody, and nobody can come.
    Nobody,
}

impl MountGroup {
    /// One more mount, of this front end; it will be made with these options.
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

    /// The session of a mount has ended, or it has not come to one. Unless it was the last one,
    /// what it held is given back.
    pub fn leave(&self, member: &Arc<Member>) -> Left {
        let mut members = self.members.write();
        members.list.retain(|m| !Arc::ptr_eq(m, member));
        if members.list.is_empty() {
            members.closing = true;
            return Left::Nobody;
        }
        self.look_for_overlap(&members.list);
        drop(members);
        member.fs.leave();
        Left::Others
    }

    /// Nobody shall join any more.
    pub fn close(&self) {
        self.members.write().closing = true;
    }

    /// Is there no other mount? Then there will be none.
    pub(crate) fn is_last(&self) -> bool {
        let mut members = self.members.write();
        let last = members.list.len() <= 1;
        members.closing |= last;
        last
    }

    /// The mounts that there are.
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

    /// A change by a member waits for the kernels of others about something, unless another member
    /// waits about it already.
    pub(crate) fn begin_to_wait(&self, member: &Member, about: InodeId) -> bool {
        let mut waited_for = self.waited_for.lock();
        let waiting =
            waited_for.entry(about).or_insert(Waiting { number: member.number, requests: 0 });
        let may = waiting.number == member.number;
        waiting.requests += u32::from(may);
        may
    }

    /// It has waited.
    pub(crate) fn end_to_wait(&self, about: InodeId) {
        let mut waited_for = self.waited_for.lock();
        if let Some(waiting) = waited_for.get_mut(&about) {
            waiting.requests -= 1;
            if waiting.requests == 0 {
                waited_for.remove(&about);
            }
        }
    }

    /// What was answered to the kernel that waits for the end of the last mount, if any did.
    pub fn take_closed(&self) -> Option<larder_fs::Result<()>> {
        self.closed.lock().take()
    }
}

/// Where it cannot be found out, it is so.
fn overlap(a: &Filesystem, b: &Filesystem) -> bool {
    a.overlaps(b).unwrap_or(true)
}
