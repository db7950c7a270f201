//! Contents of files: READ, WRITE, FALLOCATE, LSEEK, COPY_FILE_RANGE.

use super::Server;
use super::changes::{ALL, Change};
use crate::errno::Errno;
use crate::handler::{Failure, Outcome, Patience, Reply, Request};
use crate::proto::{self, Opcode};
use larder_fs::{Fallocate, InodeId, Seek};

const KEEP_SIZE: u32 = libc::FALLOC_FL_KEEP_SIZE.cast_unsigned();
const PUNCH_HOLE: u32 = libc::FALLOC_FL_PUNCH_HOLE.cast_unsigned();
/// Of a file's flags: past the page cache.
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
            self.cached.reads(request.header.nodeid);
        }
        let out = reply.buffer(read.size as usize)?;
        Ok(self.fs.read(id, read.offset, out)?)
    }

    pub(super) fn write(
        &self,
        id: InodeId,
        request: &Request<'_>,
        reply: &mut Reply<'_>,
        patience: Patience,
    ) -> Outcome {
        let write: proto::WriteIn = request.arg()?;
        let data = request.data.get(..write.size as usize).ok_or(Errno::INVAL)?;
        let range = write.offset..write.offset.saturating_add(write.size.into());
        let write_back = write.write_flags & proto::WRITE_CACHE != 0;
        let telling = if write_back {
            self.about_to_write_back()
        } else {
            self.about_to_change(patience, id)?
        };
        if write.write_flags & proto::WRITE_KILL_SUIDGID != 0 {
            self.remove_privileges(id, request, patience)?;
        }
        let node = request.header.nodeid;
        let direct = write.write_flags & proto::WRITE_CACHE == 0 && write.flags & DIRECT != 0;
        let must_say = || direct && self.cached.may_have(node);
        let may_say = matches!(patience, Patience::Kernel | Patience::Afterwards);
        if must_say() && !may_say {
            return Err(Failure::WaitForKernel);
        }
        telling.before(id, range.clone());
        self.fs.write(id, write.offset, data)?;
        // Asked again: somebody may have read what has just been replaced. Writing it twice is as
        // good as once, because nobody has been told yet that it is written.
        if must_say() {
            match patience {
                Patience::Queue | Patience::Worker => return Err(Failure::WaitForKernel),
                Patience::Kernel => drop(self.me.notify.range_changed(node, range.clone())),
                Patience::Afterwards => self.me.notify.range_changed_later(node, range.clone()),
            }
        }
        if !write_back && self.is_shared(id) {
            self.me.notify.range_changed_later(node, range.clone());
        }
        telling.tell(|| vec![Change::Contents(id, range)]);
        reply.value(&proto::WriteOut { size: write.size, padding: 0 })
    }

    pub(super) fn fallocate(
        &self,
        id: InodeId,
        request: &Request<'_>,
        patience: Patience,
    ) -> Outcome {
        let wanted: proto::FallocateIn = request.arg()?;
        // Those that Linux's btrfs has; the kernel lets no others through either.
        let keep_size = wanted.mode & KEEP_SIZE != 0;
        let how = match wanted.mode & !KEEP_SIZE {
            0 => Fallocate::Allocate { keep_size },
            ZERO_RANGE => Fallocate::Zero { keep_size },
            PUNCH_HOLE if keep_size => Fallocate::Punch,
            _ => return Err(Errno::OPNOTSUPP.into()),
        };
        if patience == Patience::Queue {
            return Err(Failure::Wait);
        }
        let telling = self.about_to_change(patience, id)?;
        self.changes_contents(id, request, patience)?;
        telling.before(id, ALL);
        let done = self.fs.fallocate(id, how, wanted.offset, wanted.length);
        // Whatever came of it: a part may be done.
        telling.tell(|| vec![Change::Contents(id, ALL)]);
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
        patience: Patience,
    ) -> Outcome {
        /// The older form answers with 32 bits; whole sectors below that.
        const SHORT_MAX: u64 = u32::MAX as u64 & !4095;
        let copy: proto::CopyFileRangeIn = request.arg()?;
        if copy.flags != 0 {
            return Err(Errno::INVAL.into());
        }
        let to = self.me.nodes.id(copy.nodeid_out).ok_or(Errno::STALE)?;
        let telling = self.about_to_change(patience, to)?;
        self.changes_contents(to, request, Patience::Worker)?;
        let long = request.opcode == Opcode::CopyFileRange64;
        let len = if long { copy.len } else { copy.len.min(SHORT_MAX) };
        telling.before(to, ALL);
        let copied = self.fs.copy_range(from, copy.off_in, to, copy.off_out, len);
        telling.tell(|| vec![Change::Contents(to, ALL)]);
        let copied = copied?;
        if long {
            reply.value(&proto::CopyFileRangeOut { bytes_copied: copied })
        } else {
            reply.value(&proto::WriteOut { size: copied as u32, padding: 0 })
        }
    }
}
