//! Attributes: GETATTR, SETATTR, STATX, ACCESS.

use super::changes::{ALL, Change};
use super::{Server, mode};
use crate::errno::Errno;
use crate::handler::{ExecContext, Failure, Outcome, Reply, Request};
use crate::perm::{self, Caller};
use crate::proto::{self, SetattrIn, StatxAttr, StatxOut, StatxTime, fattr};
use larder_format::acl::ACCESS;
use larder_fs::{Attr, FileKind, InodeId, SetAttr, SetTime, Timestamp};

/// Bits of `statx` attributes, by the btrfs inode flags that they show.
const STATX_FLAGS: [(u64, u64); 4] = [
    (super::ioctl::COMPRESS, 0x4),
    (super::ioctl::IMMUTABLE, 0x10),
    (super::ioctl::APPEND, 0x20),
    (super::ioctl::NODUMP, 0x40),
];

impl Server {
    pub(super) fn getattr(&self, id: InodeId, reply: &mut Reply<'_>) -> Outcome {
        let attr = self.fs.getattr(id)?;
        self.attributes(&attr, reply)
    }

    pub(super) fn statx(&self, id: InodeId, reply: &mut Reply<'_>) -> Outcome {
        let a = self.fs.getattr(id)?;
        let time = |t: Timestamp| StatxTime { sec: t.sec, nsec: t.nsec, reserved: 0 };
        let stat = StatxAttr {
            mask: libc::STATX_BASIC_STATS | libc::STATX_BTIME,
            blksize: 4096,
            attributes: STATX_FLAGS
                .iter()
                .filter(|(flag, _)| a.flags & flag != 0)
                .map(|(_, bit)| bit)
                .sum(),
            attributes_mask: STATX_FLAGS.iter().map(|(_, bit)| bit).sum(),
            nlink: a.nlink,
            uid: a.uid,
            gid: a.gid,
            mode: mode(&a) as u16,
            ino: self.me.nodes.ino(a.id),
            size: a.size,
            blocks: a.bytes.div_ceil(512),
            atime: time(a.atime),
            btime: time(a.otime),
            ctime: time(a.ctime),
            mtime: time(a.mtime),
            rdev_major: (a.rdev >> 20) as u32,
            rdev_minor: (a.rdev & 0xf_ffff) as u32,
            ..StatxAttr::default()
        };
        reply.value(&StatxOut { attr_valid: self.time_of(a.id), stat, ..StatxOut::default() })
    }

    pub(super) fn access(&self, id: InodeId, request: &Request<'_>) -> Outcome {
        // Only root's requests get this far. They are of no use to it, and end with this answer.
        let Some(caller) = self.checked(request) else { return Err(Errno::NOSYS.into()) };
        let want = request.arg::<proto::AccessIn>()?.mask as u8 & 7;
        let attr = self.fs.getattr(id)?;
        let acl = self.access_acl(id)?;
        if perm::allows(caller, &attr, acl.as_ref(), want) {
            Ok(0)
        } else {
            Err(Errno::ACCES.into())
        }
    }

    pub(super) fn setattr(
        &self,
        id: InodeId,
        request: &Request<'_>,
        reply: &mut Reply<'_>,
        context: ExecContext,
    ) -> Outcome {
        let asked: SetattrIn = request.arg()?;
        let has = |bit| asked.valid & bit != 0;
        let mut change = wanted(&asked);
        let announcement = self.begin_change(context, id)?;
        if let Some(caller) = self.checked(request) {
            self.may_set(caller, id, request, &asked, &mut change)?;
        }
        if has(fattr::KILL_SUIDGID) && change.perm.is_none() {
            let attr = self.fs.getattr(id)?;
            change.perm = killed(Caller::from(&request.header), &attr);
        }
        if let Some(perm) = change.perm
            && let Some(mut acl) = self.access_acl(id)?
        {
            // These are two changes, so they do not run on a thread that may have to start over
            // between them.
            if context == ExecContext::Queue {
                return Err(Failure::Wait);
            }
            acl.chmod(perm);
            self.fs.setxattr(id, ACCESS, &acl.to_bytes(), larder_fs::XattrMode::Set)?;
        }
        // Even chown to the same owner is a change: the change time moves.
        let attr = self.fs.setattr(id, &change)?;
        announcement.publish(|| match change.size {
            Some(_) => vec![Change::Contents(id, ALL)],
            None => vec![Change::Attributes(id)],
        });
        self.attributes(&attr, reply)
    }

    /// Removes set-user-id and set-group-id from a file whose contents change. For WRITE the kernel
    /// says whether to; other changes of contents use [`Self::changes_contents`].
    pub(super) fn remove_privileges(
        &self,
        id: InodeId,
        request: &Request<'_>,
        context: ExecContext,
    ) -> Result<(), Failure> {
        let Some(perm) = killed(Caller::from(&request.header), &self.fs.getattr(id)?) else {
            return Ok(());
        };
        // This is a change besides the one that was asked for.
        if context == ExecContext::Queue {
            return Err(Failure::Wait);
        }
        self.fs.setattr(id, &SetAttr { perm: Some(perm), ..SetAttr::default() })?;
        // If the kernel leaves this to us, it does not ask for the mode afterwards.
        self.me.notify.attributes_changed(self.me.nodes.node(id));
        Ok(())
    }

    /// Requests other than WRITE do not say whether the file keeps its set-id bits. For root it
    /// does, as on Linux's own file systems.
    pub(super) fn changes_contents(
        &self,
        id: InodeId,
        request: &Request<'_>,
        context: ExecContext,
    ) -> Result<(), Failure> {
        if Caller::from(&request.header).is_root() {
            return Ok(());
        }
        self.remove_privileges(id, request, context)
    }

    /// POSIX's rules for changing attributes, for a caller that the kernel has not checked.
    fn may_set(
        &self,
        caller: Caller,
        id: InodeId,
        request: &Request<'_>,
        asked: &SetattrIn,
        change: &mut SetAttr,
    ) -> Result<(), Failure> {
        let attr = self.fs.getattr(id)?;
        if let Some(perm) = change.perm {
            perm::owns(caller, &attr)?;
            change.perm = Some(perm::chmod(caller, &attr, perm));
        }
        if (change.uid.is_some() || change.gid.is_some())
            && !perm::may_chown(caller, &attr, change.uid, change.gid)
        {
            return Err(Errno::PERM.into());
        }
        // A file handle was checked when it was opened. Without one, a change of size needs the
        // right to write.
        const FH: u32 = 1 << 6;
        if change.size.is_some() && asked.valid & FH == 0 {
            self.check(request, id, perm::WRITE)?;
        }
        let sets = |t: Option<SetTime>| matches!(t, Some(SetTime::To(_)));
        if sets(change.atime) || sets(change.mtime) {
            perm::owns(caller, &attr)?;
        } else if (change.atime.is_some() || change.mtime.is_some())
            && change.size.is_none()
            && perm::owns(caller, &attr).is_err()
        {
            // To set "now" takes only the right to write.
            self.check(request, id, perm::WRITE)?;
        }
        Ok(())
    }
}

/// The mode bits of a regular file after a write by `caller`, if they differ.
fn killed(caller: Caller, attr: &Attr) -> Option<u32> {
    let perm = perm::without_suid(caller, attr.perm, attr.gid);
    (attr.kind == FileKind::Regular && perm != attr.perm).then_some(perm)
}

/// The request as the engine takes it.
fn wanted(asked: &SetattrIn) -> SetAttr {
    let has = |bit| asked.valid & bit != 0;
    let time = |set, now, sec: u64, nsec| {
        has(set).then(|| {
            if has(now) {
                SetTime::Now
            } else {
                SetTime::To(Timestamp { sec: sec.cast_signed(), nsec })
            }
        })
    };
    let mut change = SetAttr {
        perm: has(fattr::MODE).then_some(asked.mode & 0o7777),
        uid: has(fattr::UID).then_some(asked.uid),
        gid: has(fattr::GID).then_some(asked.gid),
        size: has(fattr::SIZE).then_some(asked.size),
        atime: time(fattr::ATIME, fattr::ATIME_NOW, asked.atime, asked.atimensec),
        mtime: time(fattr::MTIME, fattr::MTIME_NOW, asked.mtime, asked.mtimensec),
        ctime: has(fattr::CTIME)
            .then_some(Timestamp { sec: asked.ctime.cast_signed(), nsec: asked.ctimensec }),
        flags: None,
    };
    // Truncation changes the modification time; the kernel does not say so.
    if change.size.is_some() && change.mtime.is_none() {
        change.mtime = Some(SetTime::Now);
    }
    change
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_valid_counts() {
        let asked = SetattrIn { mode: 0o100_755, uid: 7, size: 9, ..SetattrIn::default() };
        assert_eq!(wanted(&asked), SetAttr::default());
        let got = wanted(&SetattrIn { valid: fattr::MODE | fattr::UID, ..asked });
        assert_eq!((got.perm, got.uid, got.gid, got.size), (Some(0o755), Some(7), None, None));
        let got = wanted(&SetattrIn { valid: fattr::SIZE, ..asked });
        assert_eq!((got.size, got.mtime), (Some(9), Some(SetTime::Now)));
    }

    #[test]
    fn times_are_set_or_taken_from_the_clock() {
        let asked = SetattrIn {
            valid: fattr::ATIME | fattr::MTIME | fattr::MTIME_NOW,
            atime: (-5i64).cast_unsigned(),
            atimensec: 7,
            ..SetattrIn::default()
        };
        let got = wanted(&asked);
        assert_eq!(got.atime, Some(SetTime::To(Timestamp { sec: -5, nsec: 7 })));
        assert_eq!(got.mtime, Some(SetTime::Now));
        assert_eq!(got.ctime, None);
    }
}
