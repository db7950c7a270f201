//! IOCTL about shared extents ([`crate::sharing`]).
//!
//! A request names a second file by a descriptor of its caller, which the mount helper looks up.
//! The open descriptor proves that the caller could reach the file. What the caller may do with it
//! is checked here, since an ioctl needs no particular way of opening.

use super::Server;
use super::changes::{ALL, Change};
use crate::errno::Errno;
use crate::handler::{ExecContext, Failure, Request};
use crate::perm::{self, Caller};
use crate::proto::NodeId;
use crate::sharing::{IOC_CLONE, IOC_DEDUPE, IOC_EXTENTS, MOST_EXTENTS, encode};
use larder_fs::{Deduped, InodeId};

impl Server {
    /// The answer to an ioctl about shared extents; `None` for any other.
    pub(super) fn sharing_ioctl(
        &self,
        id: InodeId,
        request: &Request<'_>,
        command: u32,
        arg: &[u8],
        context: ExecContext,
    ) -> Result<Option<Vec<u8>>, Failure> {
        let word = |n: usize| super::subvolume::word(arg, 8 * n);
        match command {
            IOC_CLONE => {
                let from = self.open_of_caller(request, word(0)?)?;
                self.may(request, from, perm::READ)?;
                self.may(request, id, perm::WRITE)?;
                let announcement = self.begin_change(context, id)?;
                self.changes_contents(id, request, ExecContext::Worker)?;
                announcement.publish_before(id, ALL);
                let done = self.fs.clone_range(from, word(1)?, id, word(3)?, word(2)?);
                // Whatever came of it: a part may be done.
                self.me.notify.content_changed(self.me.nodes.node(id));
                announcement.publish(|| vec![Change::Contents(id, ALL)]);
                done?;
                Ok(Some(Vec::new()))
            }
            IOC_DEDUPE => {
                let to = self.open_of_caller(request, word(0)?)?;
                self.may(request, id, perm::READ)?;
                if self.may(request, to, perm::WRITE).is_err() {
                    perm::owns(Caller::from(&request.header), &self.fs.getattr(to)?)?;
                }
                let (differs, bytes, shared) =
                    match self.fs.dedupe_range(id, word(1)?, to, word(3)?, word(2)?)? {
                        Deduped::Same { bytes, shared } => (0, bytes, shared),
                        Deduped::Differs => (1, 0, 0),
                    };
                let out = [word(0)?, word(1)?, word(2)?, word(3)?, differs, bytes, shared];
                Ok(Some(out.iter().flat_map(|w: &u64| w.to_ne_bytes()).collect()))
            }
            IOC_EXTENTS => {
                self.may(request, id, perm::READ)?;
                let mut extents = Vec::new();
                let (mut end, mut more) = (0, false);
                self.fs.map_extents(id, word(0)?, &mut |e| {
                    more = extents.len() == MOST_EXTENTS;
                    if !more {
                        extents.push(encode(e));
                        end = e.start + e.len;
                    }
                    !more
                })?;
                let head = [if more { end } else { 0 }, extents.len() as u64];
                let words = head.iter().chain(extents.iter().flatten());
                Ok(Some(words.flat_map(|w| w.to_ne_bytes()).collect()))
            }
            _ => Ok(None),
        }
    }

    /// The inode that a client of the mount has open as this descriptor.
    pub(super) fn open_of_caller(
        &self,
        request: &Request<'_>,
        fd: u64,
    ) -> Result<InodeId, Failure> {
        let fd = i32::try_from(fd).map_err(|_| Errno(libc::EBADF))?;
        let helper = self.helper.as_ref().ok_or(Errno::OPNOTSUPP)?;
        let found = helper.resolve_fd(request.header.pid, fd);
        let number = found.map_err(|e| Errno(e.raw_os_error().unwrap_or(libc::EIO)))?;
        Ok(self.me.nodes.id(NodeId(number)).ok_or(Errno::STALE)?)
    }
}
