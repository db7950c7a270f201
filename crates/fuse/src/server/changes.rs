//! How the other mounts of a file system learn what one mount changes.
//!
//! A kernel may believe names, attributes and contents for a day. With overlapping mounts
//! ([`crate::mount_group`]) this holds nevertheless: **when a change has been answered, every
//! system call that begins then on another mount sees it.** An inode that several mounts know is
//! valid for no time at all, so the kernel asks again. And before a change is answered, each other
//! mount that knows the inode has to drop what it has. Where no two mounts overlap, nothing of this
//! is done.
//!
//! A kernel that is notified waits until no request works in that directory, or on those pages. So
//! such a change runs on a thread that no other request needs ([`ExecContext::MayWaitForKernel`]).
//! Two changes must not wait for each other. So only one mount at a time waits about each inode's
//! contents, and one about names; other changes are announced after their reply.
//!
//! `docs/FUSE.md` ("Several mounts") says why nothing waits in a circle, and what does not hold.

use super::Server;
use crate::handler::{ExecContext, Failure};
use crate::mount_group::Member;
use crate::notify::NameInvalidation;
use crate::records::TIMEOUT;
use larder_format::ids::ObjectId;
use larder_fs::{Attr, Error, InodeId};
use parking_lot::Mutex;
use std::ops::Range;
use std::sync::Arc;

/// What has changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// A name in a directory, and the directory's listing and attributes.
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

    /// Notifies the kernel of a mount. False if it does not know the inode.
    fn notify(&self, to: &Member) -> bool {
        let node = to.nodes.node(self.of());
        match self {
            Change::Name(_, name) => {
                to.notify.name_changed(node, name, NameInvalidation::Revalidate)
            }
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

    /// Notifies the kernel of a mount, again until it knows the inode that it holds look-ups of.
    fn deliver(&self, to: &Member) {
        /// A reply that is on its way arrives after a thread or a few have run.
        const TURNS: u32 = 2000;
        for _ in 0..TURNS {
            if self.notify(to) || to.notify.is_over() || !to.fs.knows(self.of()) {
                return;
            }
            std::thread::yield_now();
        }
        // Its FORGET waits behind very many others.
    }
}

/// Stands for all names in [`MountGroup::begin_to_wait`]; no inode has this number.
const NAMES: InodeId = InodeId { subvol: ObjectId(0), ino: 0 };

/// When other mounts are notified of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Delivery {
    /// Before the reply.
    BeforeReply,
    /// By another thread, after the reply.
    Background,
    /// The same, but several changes of a file become one notification: for changes that come in
    /// great numbers.
    Coalesced,
}

/// A change that has begun, and that other mounts will be notified of.
pub(super) struct Announcement<'a> {
    server: &'a Server,
    delivery: Delivery,
    /// With [`Delivery::BeforeReply`]: the inode that this mount waits about.
    about: Option<InodeId>,
}

impl Server {
    /// To be called before contents or attributes of an inode are changed.
    ///
    /// # Errors
    /// [`Failure::WaitForKernel`] if the change has to wait for a kernel, and this thread must not.
    pub(super) fn begin_change(
        &self,
        context: ExecContext,
        id: InodeId,
    ) -> Result<Announcement<'_>, Failure> {
        self.begin(context, &[id], id)
    }

    /// To be called before names are changed, with the directories and the inodes that they lead
    /// to.
    ///
    /// # Errors
    /// As [`begin_change`](Self::begin_change).
    pub(super) fn begin_name_change(
        &self,
        context: ExecContext,
        touched: &[InodeId],
    ) -> Result<Announcement<'_>, Failure> {
        self.begin(context, touched, NAMES)
    }

    fn begin(
        &self,
        context: ExecContext,
        touched: &[InodeId],
        about: InodeId,
    ) -> Result<Announcement<'_>, Failure> {
        let announcement = |delivery, about| Announcement { server: self, delivery, about };
        if !self.group.overlaps() || !touched.iter().any(|id| self.fs.is_known_elsewhere(*id)) {
            return Ok(announcement(Delivery::Background, None));
        }
        match context {
            ExecContext::Queue | ExecContext::Worker => Err(Failure::WaitForKernel),
            ExecContext::MayWaitForKernel if self.group.begin_to_wait(&self.me, about) => {
                Ok(announcement(Delivery::BeforeReply, Some(about)))
            }
            ExecContext::MayWaitForKernel | ExecContext::NotifyAfterReply => {
                Ok(announcement(Delivery::Background, None))
            }
        }
    }

    /// The same for pages that the kernel writes back by itself. Others wait for these pages, so
    /// this change waits for nothing.
    pub(super) fn begin_write_back(&self) -> Announcement<'_> {
        Announcement { server: self, delivery: Delivery::Coalesced, about: None }
    }

    /// The inode behind a name, if other mounts might have to be notified about it.
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

    /// Notifies all kernels of a changed name, this mount's own included, which did not see the
    /// change.
    pub(super) fn name_changed(&self, announcement: Announcement<'_>, dir: InodeId, name: &[u8]) {
        self.me.notify.name_changed(self.me.nodes.node(dir), name, NameInvalidation::Drop);
        announcement.publish(|| vec![Change::Name(dir, name.to_vec())]);
    }

    /// For how many seconds the kernel may believe what a reply says about an inode.
    pub(super) fn time_of(&self, id: InodeId) -> u64 {
        if self.group.overlaps() && self.fs.is_known_elsewhere(id) { 0 } else { TIMEOUT }
    }

    /// Takes a hold on an inode for the kernel. Returns its attributes as they are from then on.
    pub(super) fn hold(&self, found: Attr) -> Result<Attr, Error> {
        self.fs.hold(found.id);
        if !self.group.overlaps() {
            return Ok(found);
        }
        self.fs.getattr(found.id).inspect_err(|_| self.fs.release(found.id, 1))
    }

    /// Must other mounts be notified of what was written to this file before it counts as synced?
    pub(super) fn is_shared(&self, id: InodeId) -> bool {
        self.group.overlaps() && self.fs.is_known_elsewhere(id)
    }

    /// Calls `then` when all announcements of contents so far have been sent; on any thread.
    pub(super) fn after_announcements(&self, then: impl FnOnce() + Send + 'static) {
        let last = Arc::new(OnDrop(Mutex::new(Some(Box::new(then)))));
        for member in self.group.members() {
            let last = Arc::clone(&last);
            member.notify.run(move || drop(last));
        }
    }
}

/// Calls something when it is dropped.
struct OnDrop(Mutex<Option<Box<dyn FnOnce() + Send>>>);

impl Drop for OnDrop {
    fn drop(&mut self) {
        if let Some(then) = self.0.get_mut().take() {
            then();
        }
    }
}

impl Announcement<'_> {
    /// Contents are about to be replaced: the kernels of other mounts write the pages that only
    /// they have.
    pub(super) fn publish_before(&self, id: InodeId, range: Range<u64>) {
        if self.delivery == Delivery::BeforeReply {
            self.others(id, |other| {
                other.notify.range_changed(other.nodes.node(id), range.clone());
            });
        }
    }

    /// The change is done. Notifies the others now, or later in the background.
    pub(super) fn publish(self, changes: impl FnOnce() -> Vec<Change>) {
        if !self.server.group.overlaps() {
            return;
        }
        for change in changes() {
            self.others(change.of(), |other| match (self.delivery, &change) {
                (Delivery::BeforeReply, _) => change.deliver(other),
                (Delivery::Coalesced, Change::Contents(id, range)) => {
                    other.notify.range_changed_later(other.nodes.node(*id), range.clone());
                }
                _ => {
                    let (change, to) = (change.clone(), Arc::clone(other));
                    let is_name = matches!(change, Change::Name(..));
                    let job = move || change.deliver(&to);
                    if is_name { other.notify.run_for_name(job) } else { other.notify.run(job) }
                }
            });
        }
    }

    fn others(&self, id: InodeId, each: impl Fn(&Arc<Member>)) {
        let all = self.server.group.members();
        all.iter().filter(|m| !Arc::ptr_eq(m, &self.server.me) && m.fs.knows(id)).for_each(each);
    }
}

impl Drop for Announcement<'_> {
    fn drop(&mut self) {
        if let Some(about) = self.about {
            self.server.group.end_to_wait(about);
        }
    }
}
