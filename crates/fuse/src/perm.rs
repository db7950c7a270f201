//! Permission checks in the daemon.
//!
//! If other users than root can enter a mount, the kernel checks permissions: files are opened
//! without a request, so there is no moment at which the daemon could refuse. If only root can
//! enter, the kernel does not check, which saves requests. Then only callers that act as another
//! user (`setfsuid`) are left to check, and that is done here. It is no security border: the kernel
//! uses names and attributes that it has cached without asking.

use crate::acl;
use crate::errno::Errno;
use crate::proto::InHeader;
use larder_format::acl::Acl;
use larder_fs::{Attr, FileKind};
use larder_proc::Status;

/// Read, write and execute (search, for directories), as bits of `want`.
pub(crate) const READ: u8 = 4;
/// See [`READ`].
pub(crate) const WRITE: u8 = 2;
/// See [`READ`].
pub(crate) const EXECUTE: u8 = 1;

/// The process that sent a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Caller {
    /// User that counts for file access.
    pub(crate) uid: u32,
    /// Group that counts for file access.
    pub(crate) gid: u32,
    /// Thread id; 0 if it has none in this pid namespace.
    pub(crate) pid: u32,
}

impl From<&InHeader> for Caller {
    fn from(h: &InHeader) -> Self {
        Self { uid: h.uid, gid: h.gid, pid: h.pid }
    }
}

impl Caller {
    /// Root has every capability that matters here.
    #[must_use]
    pub(crate) fn is_root(self) -> bool {
        self.uid == 0
    }
    /// Is the caller in this group? Supplementary groups come from `/proc`; a caller that is not
    /// there has none.
    #[must_use]
    pub(crate) fn is_in(self, group: u32) -> bool {
        self.gid == group
            || (self.pid != 0
                && Status::of(self.pid).is_ok_and(|status| groups(&status).any(|g| g == group)))
    }
}

fn groups(status: &Status) -> impl Iterator<Item = u32> {
    let groups = status.field("Groups").unwrap_or_default();
    groups.split_ascii_whitespace().filter_map(|g| g.parse().ok())
}

/// May the caller do all of `want` with the inode?
#[must_use]
pub(crate) fn allows(caller: Caller, attr: &Attr, acl: Option<&Acl>, want: u8) -> bool {
    if caller.is_root() {
        // Root may execute a file only if any class may.
        return want & EXECUTE == 0 || attr.kind == FileKind::Directory || attr.perm & 0o111 != 0;
    }
    let has = |shift: u32| (attr.perm >> shift) as u8 & want == want;
    if caller.uid == attr.uid {
        return has(6);
    }
    if let Some(acl) = acl {
        return acl::allows(acl, caller.uid, &mut |g| caller.is_in(g), attr.uid, attr.gid, want);
    }
    // Most inodes treat group and others alike: then the caller's groups do not matter.
    let alike = (attr.perm >> 3 ^ attr.perm) & 7 == 0;
    if !alike && caller.is_in(attr.gid) { has(3) } else { has(0) }
}

/// Does the sticky bit allow the caller to remove the name of `victim` from `dir`?
#[must_use]
pub(crate) fn may_remove(caller: Caller, dir: &Attr, victim: &Attr) -> bool {
    dir.perm & libc::S_ISVTX == 0
        || caller.is_root()
        || caller.uid == victim.uid
        || caller.uid == dir.uid
}

/// Is the caller the owner, or root?
///
/// # Errors
/// `EPERM` if not.
pub(crate) fn owns(caller: Caller, attr: &Attr) -> Result<(), Errno> {
    if caller.is_root() || caller.uid == attr.uid { Ok(()) } else { Err(Errno::PERM) }
}

/// The permission bits after chmod by this caller: set-group-id stays only for members of the
/// group.
#[must_use]
pub(crate) fn chmod(caller: Caller, attr: &Attr, perm: u32) -> u32 {
    let keeps = perm & libc::S_ISGID == 0 || caller.is_root() || caller.is_in(attr.gid);
    if keeps { perm } else { perm & !libc::S_ISGID }
}

/// May the caller give the inode this owner and group?
#[must_use]
pub(crate) fn may_chown(caller: Caller, attr: &Attr, uid: Option<u32>, gid: Option<u32>) -> bool {
    caller.is_root()
        || (caller.uid == attr.uid
            && uid.is_none_or(|u| u == attr.uid)
            && gid.is_none_or(|g| g == attr.gid || caller.is_in(g)))
}

/// The permission bits after `caller` writes, truncates or gives away the file: no set-user-id, and
/// no set-group-id if the group may execute or the caller is not in it.
#[must_use]
pub(crate) fn without_suid(caller: Caller, perm: u32, group: u32) -> u32 {
    let kept = perm & !libc::S_ISUID;
    let keeps_sgid = kept & libc::S_ISGID == 0
        || (kept & libc::S_IXGRP == 0 && (caller.is_root() || caller.is_in(group)));
    if keeps_sgid { kept } else { kept & !libc::S_ISGID }
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_format::ids::{Generation, ObjectId};
    use larder_fs::{InodeId, Timestamp};

    fn attr(kind: FileKind, perm: u32) -> Attr {
        let t = Timestamp::default();
        Attr {
            id: InodeId { subvol: ObjectId(5), ino: 300 },
            generation: Generation(1),
            kind,
            perm,
            nlink: 1,
            uid: 1000,
            gid: 100,
            rdev: 0,
            size: 0,
            bytes: 0,
            atime: t,
            mtime: t,
            ctime: t,
            otime: t,
            flags: 0,
        }
    }
    fn caller(uid: u32, gid: u32) -> Caller {
        Caller { uid, gid, pid: 0 }
    }

    #[test]
    fn classes_do_not_add_up() {
        let f = attr(FileKind::Regular, 0o046);
        assert!(
            !allows(caller(1000, 100), &f, None, READ),
            "the owner has nothing, whatever the group has"
        );
        assert!(allows(caller(1, 100), &f, None, READ) && !allows(caller(1, 100), &f, None, WRITE));
        assert!(allows(caller(1, 1), &f, None, READ | WRITE));
        assert!(
            allows(caller(0, 0), &f, None, READ | WRITE)
                && !allows(caller(0, 0), &f, None, EXECUTE)
        );
        assert!(allows(caller(0, 0), &attr(FileKind::Directory, 0), None, EXECUTE));
        assert!(allows(caller(0, 0), &attr(FileKind::Regular, 0o010), None, EXECUTE));
    }

    #[test]
    fn sticky_directories_protect_names() {
        let mut dir = attr(FileKind::Directory, 0o1777);
        dir.uid = 1;
        let victim = attr(FileKind::Regular, 0o666);
        assert!(
            may_remove(caller(1000, 0), &dir, &victim) && may_remove(caller(1, 0), &dir, &victim)
        );
        assert!(
            may_remove(caller(0, 0), &dir, &victim) && !may_remove(caller(2, 0), &dir, &victim)
        );
        dir.perm = 0o777;
        assert!(may_remove(caller(2, 0), &dir, &victim));
    }

    #[test]
    fn owners_give_away_groups_only() {
        let f = attr(FileKind::Regular, 0o666);
        assert!(
            may_chown(caller(1000, 5), &f, None, Some(5))
                && may_chown(caller(1000, 5), &f, None, Some(100))
        );
        assert!(
            !may_chown(caller(1000, 5), &f, None, Some(6))
                && !may_chown(caller(1000, 5), &f, Some(1), None)
        );
        assert!(
            may_chown(caller(0, 0), &f, Some(1), Some(1))
                && !may_chown(caller(7, 7), &f, None, Some(7))
        );
        assert_eq!(chmod(caller(1000, 5), &f, 0o2755), 0o755);
        assert_eq!(chmod(caller(1000, 100), &f, 0o2755), 0o2755);
    }

    #[test]
    fn set_ids_go_as_linux_takes_them() {
        let (root, member, other) = (caller(0, 0), caller(5, 100), caller(5, 5));
        for who in [root, member, other] {
            assert_eq!(without_suid(who, 0o6755, 100), 0o755);
            assert_eq!(without_suid(who, 0o1777, 100), 0o1777);
        }
        // If the group may not execute, set-group-id means mandatory locks, which members may keep.
        assert_eq!(
            [root, member, other].map(|who| without_suid(who, 0o6745, 100)),
            [0o2745, 0o2745, 0o745]
        );
    }

    #[test]
    fn groups_are_read_from_status() {
        let status = Status::from(&b"Name:\t\xff\nGroups:\t4 24 1000 \nNgid:\t0\n"[..]);
        assert_eq!(groups(&status).collect::<Vec<_>>(), [4, 24, 1000]);
        assert_eq!(groups(&Status::from(&b""[..])).count(), 0);
        let me = Caller { uid: 1, gid: u32::MAX, pid: std::process::id() };
        for group in rustix::process::getgroups().unwrap() {
            assert!(me.is_in(group.as_raw()));
        }
        assert!(!me.is_in(u32::MAX - 1));
    }
}
