//! Contents of files: READ, WRITE, FALLOCATE, LSEEK, COPY_FILE_RANGE.

use super::Server;
use super::changes::{ALL, Change};
use crate::errno::Errno;
use crate::handler::{ExecContext, Failure, Outcome, Reply, Request};
use crate::proto::{self, NodeId, Opcode};
use larder_fs::{Fallocate, InodeId, Seek};

const KEEP_SIZE: u32 = libc::FALLOC_FL_KEEP_SIZE.cast_unsigned();
const PUNCH_HOLE: u32 = libc::FALLOC_FL_PUNCH_HOLE.cast_unsigned();
/// A flag of the open file: past the page cache.
const DIRECT: u32 = libc::O_DIRECT.cast_unsigned();
const ZERO_RANGE: u32 = libc::FALLOC_FL_ZERO_RANGE.cast_unsigned();

impl Server {
    pub(super) fn read(
        &self,
        id: InodeId,
        request: &Request<'_>,
        reply: &mut Reply<'_>,
    ) -> Outcome {
        let read: proto::ReadIn = request.arg()?;
        if read.flags & DIRECT == 0 {
            self.cached.reads(request.header.node());
        }
        let out = reply.buffer(read.size as usize)?;
        Ok(self.fs.read(id, read.offset, out)?)
    }

    pub(super) fn write(
        &self,
        id: InodeId,
        request: &Request<'_>,
        reply: &mut Reply<'_>,
        context: ExecContext,
    ) -> Outcome {
        let write: proto::WriteIn = request.arg()?;
        let data = request.data.get(..write.size as usize).ok_or(Errno::INVAL)?;
        let range = write.offset..write.offset.saturating_add(write.size.into());
        let write_back = write.write_flags & proto::WRITE_CACHE != 0;
        let announcement =
            if write_back { self.begin_write_back() } else { self.begin_change(context, id)? };
        if write.write_flags & proto::WRITE_KILL_SUIDGID != 0 {
            self.remove_privileges(id, request, context)?;
        }
        let node = request.header.node();
        let direct = write.write_flags & proto::WRITE_CACHE == 0 && write.flags & DIRECT != 0;
        let must_say = || direct && self.cached.may_have(node);
        let may_say =
            matches!(context, ExecContext::MayWaitForKernel | ExecContext::NotifyAfterReply);
        if must_say() && !may_say {
            return Err(Failure::WaitForKernel);
        }
        announcement.publish_before(id, range.clone());
        self.fs.write(id, write.offset, data)?;
        // Asked again, because a read may have fetched what has just been replaced. Writing it
        // twice does no harm, because the write has not been answered yet.
        if must_say() {
            match context {
                ExecContext::Queue | ExecContext::Worker => return Err(Failure::WaitForKernel),
                ExecContext::MayWaitForKernel => {
                    let _ = self.me.notify.range_changed(node, range.clone());
                }
                ExecContext::NotifyAfterReply => {
                    self.me.notify.range_changed_later(node, range.clone())
                }
            }
        }
        if !write_back && self.is_shared(id) {
            self.me.notify.range_changed_later(node, range.clone());
        }
        announcement.publish(|| vec![Change::Contents(id, range)]);
        reply.value(&proto::WriteOut { size: write.size, padding: 0 })
    }

    pub(super) fn fallocate(
        &self,
        id: InodeId,
        request: &Request<'_>,
        context: ExecContext,
    ) -> Outcome {
        let wanted: proto::FallocateIn = request.arg()?;
        // The modes that Linux's btrfs has. The kernel lets no others through either.
        let keep_size = wanted.mode & KEEP_SIZE != 0;
        let how = match wanted.mode & !KEEP_SIZE {
            0 => Fallocate::Allocate { keep_size },
            ZERO_RANGE => Fallocate::Zero { keep_size },
            PUNCH_HOLE if keep_size => Fallocate::Punch,
            _ => return Err(Errno::OPNOTSUPP.into()),
        };
        if context == ExecContext::Queue {
            return Err(Failure::Wait);
        }
        let announcement = self.begin_change(context, id)?;
        self.changes_contents(id, request, context)?;
        announcement.publish_before(id, ALL);
        let done = self.fs.fallocate(id.at(wanted.offset), wanted.length, how);
        // Even after an error: a part may be done.
        announcement.publish(|| vec![Change::Contents(id, ALL)]);
        done?;
        Ok(0)
    }

    pub(super) fn lseek(
        &self,
        id: InodeId,
        request: &Request<'_>,
        reply: &mut Reply<'_>,
    ) -> Outcome {
        let seek: proto::LseekIn = request.arg()?;
        let what = match seek.whence.cast_signed() {
            libc::SEEK_DATA => Seek::Data,
            libc::SEEK_HOLE => Seek::Hole,
            _ => return Err(Errno::INVAL.into()),
        };
        let offset = self.fs.seek(id, seek.offset, what)?.ok_or(Errno::NXIO)?;
        reply.value(&proto::LseekOut { offset })
    }

    pub(super) fn copy(
        &self,
        from: InodeId,
        request: &Request<'_>,
        reply: &mut Reply<'_>,
        context: ExecContext,
    ) -> Outcome {
        /// The older form answers with 32 bits: the largest whole number of sectors below that.
        const SHORT_MAX: u64 = u32::MAX as u64 & !4095;
        let copy: proto::CopyFileRangeIn = request.arg()?;
        if copy.flags != 0 {
            return Err(Errno::INVAL.into());
        }
        let to = self.me.nodes.id(NodeId(copy.nodeid_out)).ok_or(Errno::STALE)?;
        let announcement = self.begin_change(context, to)?;
        self.changes_contents(to, request, ExecContext::Worker)?;
        let long = request.opcode == Opcode::CopyFileRange64;
        let len = if long { copy.len } else { copy.len.min(SHORT_MAX) };
        announcement.publish_before(to, ALL);
        let copied = self.fs.copy_range(from.at(copy.off_in), to.at(copy.off_out), len);
        announcement.publish(|| vec![Change::Contents(to, ALL)]);
        let copied = copied?;
        if long {
            reply.value(&proto::CopyFileRangeOut { bytes_copied: copied })
        } else {
            reply.value(&proto::WriteOut { size: copied as u32, padding: 0 })
        }
    }
}
