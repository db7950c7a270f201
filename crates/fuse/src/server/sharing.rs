//! IOCTL about shared extents ([`crate::sharing`]).
//!
//! A request names a second file by a descriptor of its caller, which the mount helper looks up.
//! The open descriptor proves that the caller could reach the file. What the caller may do with it
//! is checked here, since an ioctl needs no particular way of opening.

use super::Server;
use super::changes::{ALL, Change};
use super::ioctl::{Answer, Ioctl};
use crate::errno::Errno;
use crate::handler::{ExecContext, Failure, Request};
use crate::perm;
use crate::proto::NodeId;
use crate::sharing::{IOC_CLONE, IOC_DEDUPE, IOC_EXTENTS, MOST_EXTENTS, encode};
use larder_fs::{Deduped, InodeId};

impl Server {
    /// The answer to an ioctl about shared extents; `None` for any other.
    pub(super) fn sharing_ioctl(&self, call: &Ioctl<'_>) -> Answer {
        let words = match call.command {
            IOC_CLONE => self.clone_range(call)?,
            IOC_DEDUPE => self.dedupe_range(call)?,
            IOC_EXTENTS => self.extents(call)?,
            _ => return Ok(None),
        };
        Ok(Some(words.iter().flat_map(|w| w.to_ne_bytes()).collect()))
    }

    fn clone_range(&self, call: &Ioctl<'_>) -> Result<Vec<u64>, Failure> {
        let (to, from) = (call.id, self.open_of_caller(call.request, call.word(0)?)?);
        self.may(call.request, from, perm::READ)?;
        self.may(call.request, to, perm::WRITE)?;
        let announcement = self.begin_change(call.context, to)?;
        self.changes_contents(to, call.request, ExecContext::Worker)?;
        announcement.publish_before(to, ALL);
        let [from_offset, len, to_offset] = [call.word(8)?, call.word(16)?, call.word(24)?];
        let done = self.fs.clone_range(from.at(from_offset), to.at(to_offset), len);
        // Even after an error: a part may be done.
        self.me.notify.content_changed(self.me.nodes.node(to));
        announcement.publish(|| vec![Change::Contents(to, ALL)]);
        done?;
        Ok(Vec::new())
    }

    fn dedupe_range(&self, call: &Ioctl<'_>) -> Result<Vec<u64>, Failure> {
        let (from, to) = (call.id, self.open_of_caller(call.request, call.word(0)?)?);
        self.may(call.request, from, perm::READ)?;
        if self.may(call.request, to, perm::WRITE).is_err() {
            perm::owns(call.caller(), &self.fs.getattr(to)?)?;
        }
        let [fd, from_offset, len, to_offset] =
            [call.word(0)?, call.word(8)?, call.word(16)?, call.word(24)?];
        let (differs, bytes, shared) =
            match self.fs.dedupe_range(from.at(from_offset), to.at(to_offset), len)? {
                Deduped::Same { bytes, shared } => (0, bytes, shared),
                Deduped::Differs => (1, 0, 0),
            };
        Ok(vec![fd, from_offset, len, to_offset, differs, bytes, shared])
    }

    fn extents(&self, call: &Ioctl<'_>) -> Result<Vec<u64>, Failure> {
        self.may(call.request, call.id, perm::READ)?;
        let mut extents = Vec::new();
        let (mut end, mut more) = (0, false);
        self.fs.map_extents(call.id, call.word(0)?, &mut |e| {
            more = extents.len() == MOST_EXTENTS;
            if !more {
                extents.push(encode(e));
                end = e.start + e.len;
            }
            !more
        })?;
        let head = [if more { end } else { 0 }, extents.len() as u64];
        Ok(head.into_iter().chain(extents.into_iter().flatten()).collect())
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
