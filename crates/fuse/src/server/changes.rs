//! What one mount changes, as the others learn it.
//!
//! A kernel may believe names, attributes and contents for a day, because only its own requests
//! change them. With overlapping mounts ([`crate::mount_group`]) that is not so. For them this
//! holds: **when a change has been answered, every system call that begins then on another mount
//! sees it.** Three means serve this. None of them is used where no two mounts overlap.
//!
//! 1. **No time.** An inode may be *known* to several mounts: each of them holds look-ups of it
//!    ([`Filesystem::hold`]). What is answered about such an inode is valid for no time at all, and
//!    so are the names in such a directory, absent ones included: the kernel asks again. A hold is
//!    taken before attributes are read, so of a change and a look-up at the same time one sees the
//!    other.
//! 2. **Telling.** A kernel may have got something while no other mount knew the inode; and
//!    contents and listings have no time. So before a change is answered, each other mount that
//!    knows the inode is told to drop what it has. Contents are told of before the change, too:
//!    pages that were changed through a mapping are then written before the change, not over it.
//! 3. **Again.** A kernel may not know an inode although it has look-ups of it: the answer is still
//!    on its way. It is told again until it knows the inode, or has given the look-ups back.
//!
//! **Waiting.** A kernel that is told waits until no request works in that directory, or on those
//! pages. These are requests to us. So a change that has to be told of goes to a thread that no
//! other request needs ([`Patience::Kernel`]) before it is begun. Two such changes on two mounts
//! could each keep what the other waits for. Therefore not every change waits
//! ([`begin_to_wait`](crate::mount_group::MountGroup)):
//!
//! - *Contents:* of each inode, changes of one mount at a time wait. The pages of a file are locked
//!   by reads, which wait for nothing, and by writes to this file, which then do not wait.
//! - *Names:* of all directories together, changes of one mount at a time wait. A kernel takes the
//!   locks of several directories, and of files in them, one after the other. So a rename on each
//!   of two mounts can tie directories together that have nothing else to do with each other. A
//!   change of names may wait for one of contents, never the other way round.
//!
//! A change that must not wait is answered first, which lets the other one go on, and told of by
//! another thread. An `fsync` comes after what is still to be told of contents. It does not wait
//! for names, because its own file is locked meanwhile.
//!
//! **What does not hold:**
//!
//! - Two changes through two mounts at the same time, of one file or of names: one of them may be
//!   seen a moment after its answer.
//! - Pages that a kernel writes back by itself are never waited about. What a program stores
//!   through a shared mapping is seen by others after `msync`, `fsync` or the last close. Of a page
//!   that is stored to in one place and written in another at the same time, one version stays.
//! - A kernel may drop a page because of a change elsewhere while a program writes to it. The page
//!   may then be read again before the write has come to us. The kernel is told to drop it once
//!   more after the answer, so such a page is old for a moment only.
//! - Two appends at the same time may go to the same offset. A program that keeps a file open for
//!   appending goes on at the old end if the file is cut short elsewhere.
//! - Locks (`flock`, `fcntl`) of one mount are not seen by another: each kernel has its own. On
//!   Linux's btrfs all mounts of a file system share these and the offsets.
//! - A kernel takes one link off its count when a removal is answered, even if it has just asked
//!   for the new count; here it asks often. So where threads link and remove names of one file on
//!   one mount at the same time, a `link` may fail with `ENOENT`.
//! - A daemon that is killed while one of its threads waits for a kernel in this way may not come
//!   to its end: the lock is held by a request that nothing answers any more. `larder umount` and
//!   `umount -f` of the mount end that request.
//!
//! [`Filesystem::hold`]: larder_fs::Filesystem::hold

use super::Server;
use crate::handler::{Failure, Patience};
use crate::mount_group::Member;
use crate::notify::Fate;
use crate::records::TIMEOUT;
use larder_format::ids::ObjectId;
use larder_fs::{Attr, Error, InodeId};
use parking_lot::Mutex;
use std::ops::Range;
use std::sync::Arc;

/// What is not as it was.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// A name in a directory, with the listing and attributes of that.
    Name(InodeId, Vec<u8>),
    /// Attributes, ACLs among them.
    Attributes(InodeId),
    /// Contents in a range, and attributes.
    Contents(InodeId, Range<u64>),
}

/// All of a file.
pub(super) const ALL: Range<u64> = 0..u64::MAX;

impl Change {
    fn of(&self) -> InodeId {
        match self {
            Change::Name(id, _) | Change::Attributes(id) | Change::Contents(id, _) => *id,
        }
    }

    /// Tells a mount. False if its kernel does not know the inode.
    fn tell(&self, to: &Member) -> bool {
        let node = to.nodes.node(self.of());
        match self {
            Change::Name(_, name) => to.notify.name_changed(node, name, Fate::AskedAgain),
            Change::Attributes(_) => to.notify.attributes_changed(node),
            Change::Contents(id, range) => {
                let mut last = [0];
                if let Ok(size) = to.fs.getattr(*id).map(|attr| attr.size)
                    && (1..=range.end).contains(&size)
                    && matches!(to.fs.read(*id, size - 1, &mut last), Ok(1))
                {
                    to.notify.has_grown(node, size - 1, last[0]);
                }
                to.notify.range_changed(node, range.clone())
            }
        }
    }

    /// Tells a mount, once its kernel knows the inode of which it holds look-ups.
    fn tell_surely(&self, to: &Member) {
        /// An answer that is on its way arrives at the next turn of a thread, or of a few.
        const TURNS: u32 = 2000;
        for _ in 0..TURNS {
            if self.tell(to) || to.notify.is_over() || !to.fs.knows(self.of()) {
                return;
            }
            std::thread::yield_now();
        }
        // Its FORGET waits behind very many others.
    }
}

/// Stands for all names, where something is waited about; no inode has this number.
const NAMES: InodeId = InodeId { subvol: ObjectId(0), ino: 0 };

/// How others are told of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    /// Before it is answered.
    Before,
    /// By another thread.
    Later,
    /// The same, and by what has been put together until then: for changes that come in great
    /// numbers.
    Together,
}

/// A change that has been begun.
pub(super) struct Telling<'a> {
    server: &'a Server,
    how: How,
    /// With [`How::Before`]: what is waited about.
    about: Option<InodeId>,
}

impl Server {
    /// To be called before contents or attributes of an inode are changed.
    ///
    /// # Errors
    /// [`Failure::WaitForKernel`] if this thread must not wait for what has to be waited for.
    pub(super) fn about_to_change(
        &self,
        patience: Patience,
        id: InodeId,
    ) -> Result<Telling<'_>, Failure> {
        self.begin(patience, &[id], id)
    }

    /// To be called before names are changed, with the directories and the inodes that they lead
    /// to.
    ///
    /// # Errors
    /// As [`about_to_change`](Self::about_to_change).
    pub(super) fn about_to_change_names(
        &self,
        patience: Patience,
        touched: &[InodeId],
    ) -> Result<Telling<'_>, Failure> {
        self.begin(patience, touched, NAMES)
    }

    fn begin(
        &self,
        patience: Patience,
        touched: &[InodeId],
        about: InodeId,
    ) -> Result<Telling<'_>, Failure> {
        let telling = |how, about| Telling { server: self, how, about };
        if !self.group.overlaps() || !touched.iter().any(|id| self.fs.is_known_elsewhere(*id)) {
            return Ok(telling(How::Later, None));
        }
        match patience {
            Patience::Queue | Patience::Worker => Err(Failure::WaitForKernel),
            Patience::Kernel if self.group.begin_to_wait(&self.me, about) => {
                Ok(telling(How::Before, Some(about)))
            }
            Patience::Kernel | Patience::Afterwards => Ok(telling(How::Later, None)),
        }
    }

    /// The same, for pages that the kernel writes back by itself: others wait for these pages, so
    /// this change waits for nothing.
    pub(super) fn about_to_write_back(&self) -> Telling<'_> {
        Telling { server: self, how: How::Together, about: None }
    }

    /// The inode behind a name, if others might have to be told of what becomes of it.
    pub(super) fn named(&self, dir: InodeId, name: &[u8]) -> Result<Option<InodeId>, Failure> {
        if !self.group.overlaps() {
            return Ok(None);
        }
        match self.fs.lookup(dir, name) {
            Ok(attr) => Ok(Some(attr.id)),
            Err(Error::NotFound) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    /// Has a name in a directory asked for again or dropped by this mount's own kernel, which did
    /// not see it change, and by all others.
    pub(super) fn name_changed(&self, telling: Telling<'_>, dir: InodeId, name: &[u8]) {
        self.me.notify.name_changed(self.me.nodes.node(dir), name, Fate::Dropped);
        telling.tell(|| vec![Change::Name(dir, name.to_vec())]);
    }

    /// For how long the kernel may believe what it is told about an inode.
    pub(super) fn time_of(&self, id: InodeId) -> u64 {
        if self.group.overlaps() && self.fs.is_known_elsewhere(id) { 0 } else { TIMEOUT }
    }

    /// Takes a hold on what was found, for the kernel. Returns it as it is from then on.
    pub(super) fn hold(&self, found: Attr) -> Result<Attr, Error> {
        self.fs.hold(found.id);
        if !self.group.overlaps() {
            return Ok(found);
        }
        self.fs.getattr(found.id).inspect_err(|_| self.fs.release(found.id, 1))
    }

    /// Do others have to be told of what was written to this file before it counts as synced?
    pub(super) fn is_shared(&self, id: InodeId) -> bool {
        self.group.overlaps() && self.fs.is_known_elsewhere(id)
    }

    /// Calls `then` when all have been told of contents that were changed before; on any thread.
    pub(super) fn when_told(&self, then: impl FnOnce() + Send + 'static) {
        let last = Arc::new(Finally(Mutex::new(Some(Box::new(then)))));
        for member in self.group.members() {
            let last = Arc::clone(&last);
            member.notify.run(move || drop(last));
        }
    }
}

/// Does something when it goes.
struct Finally(Mutex<Option<Box<dyn FnOnce() + Send>>>);

impl Drop for Finally {
    fn drop(&mut self) {
        if let Some(then) = self.0.get_mut().take() {
            then();
        }
    }
}

impl Telling<'_> {
    /// Contents are about to be replaced: others write what only they have of them.
    pub(super) fn before(&self, id: InodeId, range: Range<u64>) {
        if self.how == How::Before {
            self.others(id, |other| {
                other.notify.range_changed(other.nodes.node(id), range.clone());
            });
        }
    }

    /// It is done.
    pub(super) fn tell(self, changes: impl FnOnce() -> Vec<Change>) {
        if !self.server.group.overlaps() {
            return;
        }
        for change in changes() {
            self.others(change.of(), |other| match (self.how, &change) {
                (How::Before, _) => change.tell_surely(other),
                (How::Together, Change::Contents(id, range)) => {
                    other.notify.range_changed_later(other.nodes.node(*id), range.clone());
                }
                _ => {
                    let (change, to) = (change.clone(), Arc::clone(other));
                    let is_name = matches!(change, Change::Name(..));
                    let tell = move || change.tell_surely(&to);
                    if is_name { other.notify.run_for_name(tell) } else { other.notify.run(tell) }
                }
            });
        }
    }

    fn others(&self, id: InodeId, each: impl Fn(&Arc<Member>)) {
        let all = self.server.group.members();
        all.iter().filter(|m| !Arc::ptr_eq(m, &self.server.me) && m.fs.knows(id)).for_each(each);
    }
}

impl Drop for Telling<'_> {
    fn drop(&mut self) {
        if let Some(about) = self.about {
            self.server.group.end_to_wait(about);
        }
    }
}
