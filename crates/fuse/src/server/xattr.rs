//! Extended attributes, and the ACLs and properties among them.

use super::Server;
use super::changes::Change;
use crate::acl;
use crate::errno::Errno;
use crate::handler::{ExecContext, Failure, Outcome, Reply, Request};
use crate::perm;
use crate::proto::{self, GetxattrIn, SetxattrIn};
use crate::records::sized;
use larder_format::acl::{ACCESS, DEFAULT};
use larder_fs::{FileKind, InodeId, SetAttr, XattrMode};

/// What a name means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    User,
    Trusted,
    Security,
    AccessAcl,
    DefaultAcl,
    Property,
}

/// The name spaces that Linux's btrfs knows; it refuses others.
fn kind(name: &[u8]) -> Result<Kind, Errno> {
    match name {
        ACCESS => return Ok(Kind::AccessAcl),
        DEFAULT => return Ok(Kind::DefaultAcl),
        _ => {}
    }
    for (prefix, kind) in [
        (&b"user."[..], Kind::User),
        (b"trusted.", Kind::Trusted),
        (b"security.", Kind::Security),
        (b"btrfs.", Kind::Property),
    ] {
        if let Some(rest) = name.strip_prefix(prefix) {
            return if rest.is_empty() { Err(Errno::INVAL) } else { Ok(kind) };
        }
    }
    Err(Errno::OPNOTSUPP)
}

impl Server {
    pub(super) fn getxattr(
        &self,
        id: InodeId,
        request: &Request<'_>,
        reply: &mut Reply<'_>,
    ) -> Outcome {
        let room = request.arg::<GetxattrIn>()?.size;
        let name = request.name()?;
        if kind(name)? == Kind::User {
            self.check(request, id, perm::READ)?;
        }
        sized(reply, room, &self.fs.getxattr(id, name)?)
    }

    pub(super) fn listxattr(
        &self,
        id: InodeId,
        request: &Request<'_>,
        reply: &mut Reply<'_>,
    ) -> Outcome {
        let room = request.arg::<GetxattrIn>()?.size;
        // Trusted attributes are listed for everybody, as on Linux's btrfs; only root can read
        // their values.
        let mut list = Vec::new();
        for name in self.fs.listxattr(id)? {
            list.extend_from_slice(&name);
            list.push(0);
        }
        sized(reply, room, &list)
    }

    pub(super) fn setxattr(
        &self,
        id: InodeId,
        request: &Request<'_>,
        context: ExecContext,
    ) -> Outcome {
        let set: SetxattrIn = request.arg()?;
        let (name, value) = request.name_and_rest()?;
        let value = value.get(..set.size as usize).ok_or(Errno::INVAL)?;
        let mode = match set.flags.cast_signed() {
            0 => XattrMode::Set,
            libc::XATTR_CREATE => XattrMode::Create,
            libc::XATTR_REPLACE => XattrMode::Replace,
            _ => return Err(Errno::INVAL.into()),
        };
        let kind = kind(name)?;
        let announcement = self.begin_change(context, id)?;
        self.may_change(request, id, kind)?;
        match kind {
            Kind::User | Kind::Trusted | Kind::Security => {
                self.fs.setxattr(id, name, value, mode)?
            }
            // The others also change the mode or flags.
            _ if context == ExecContext::Queue => return Err(Failure::Wait),
            Kind::AccessAcl => self.set_access_acl(id, value, set.setxattr_flags)?,
            Kind::DefaultAcl => self.set_default_acl(id, value)?,
            Kind::Property => self.set_property(id, name, value, mode)?,
        }
        announcement.publish(|| vec![Change::Attributes(id)]);
        Ok(0)
    }

    pub(super) fn removexattr(
        &self,
        id: InodeId,
        request: &Request<'_>,
        context: ExecContext,
    ) -> Outcome {
        let name = request.name()?;
        let kind = kind(name)?;
        let announcement = self.begin_change(context, id)?;
        self.may_change(request, id, kind)?;
        if kind == Kind::Property && name != b"btrfs.compression" {
            return Err(Errno::INVAL.into());
        }
        self.fs.removexattr(id, name)?;
        announcement.publish(|| vec![Change::Attributes(id)]);
        Ok(0)
    }

    fn may_change(&self, request: &Request<'_>, id: InodeId, kind: Kind) -> Result<(), Failure> {
        let Some(caller) = self.checked(request) else { return Ok(()) };
        match kind {
            Kind::User => self.check(request, id, perm::WRITE),
            Kind::Trusted | Kind::Security => Err(Errno::PERM.into()),
            Kind::AccessAcl | Kind::DefaultAcl | Kind::Property => {
                Ok(perm::owns(caller, &self.fs.getattr(id)?)?)
            }
        }
    }

    /// An access list contains the mode. So the mode follows it, and a list that is no more than a
    /// mode is not stored.
    fn set_access_acl(&self, id: InodeId, value: &[u8], flags: u32) -> Result<(), Failure> {
        let attr = self.fs.getattr(id)?;
        if attr.kind == FileKind::Symlink {
            return Err(Errno::OPNOTSUPP.into());
        }
        if value.is_empty() {
            return self.remove_if_any(id, ACCESS);
        }
        let list = acl::parse(value)?;
        let mut perm = attr.perm & 0o7000 | list.mode();
        if flags & proto::SETXATTR_ACL_KILL_SGID != 0 {
            perm &= !libc::S_ISGID;
        }
        if list.is_mode() {
            self.remove_if_any(id, ACCESS)?;
        } else {
            self.fs.setxattr(id, ACCESS, &list.to_bytes(), XattrMode::Set)?;
        }
        if perm != attr.perm {
            self.fs.setattr(id, &SetAttr { perm: Some(perm), ..SetAttr::default() })?;
        }
        Ok(())
    }

    fn set_default_acl(&self, id: InodeId, value: &[u8]) -> Result<(), Failure> {
        let directory = self.fs.getattr(id)?.kind == FileKind::Directory;
        if value.is_empty() {
            return if directory { self.remove_if_any(id, DEFAULT) } else { Ok(()) };
        }
        if !directory {
            return Err(Errno::ACCES.into());
        }
        let list = acl::parse(value)?;
        Ok(self.fs.setxattr(id, DEFAULT, &list.to_bytes(), XattrMode::Set)?)
    }

    fn set_property(
        &self,
        id: InodeId,
        name: &[u8],
        value: &[u8],
        mode: XattrMode,
    ) -> Result<(), Failure> {
        if name != b"btrfs.compression" {
            return Err(Errno::INVAL.into());
        }
        // The engine changes the flags that belong to it.
        Ok(self.fs.setxattr(id, name, value, mode)?)
    }

    fn remove_if_any(&self, id: InodeId, name: &[u8]) -> Result<(), Failure> {
        match self.fs.removexattr(id, name) {
            Err(larder_fs::Error::NoAttribute) => Ok(()),
            other => Ok(other?),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_spaces_are_those_of_the_kernel() {
        assert_eq!(kind(b"user.x"), Ok(Kind::User));
        assert_eq!(kind(b"security.capability"), Ok(Kind::Security));
        assert_eq!(kind(b"system.posix_acl_access"), Ok(Kind::AccessAcl));
        assert_eq!(kind(b"btrfs.compression"), Ok(Kind::Property));
        assert_eq!(kind(b"user."), Err(Errno::INVAL));
        for unknown in [&b"system.x"[..], b"nothing", b"", b"system.posix_acl_accessx", b"USER.x"] {
            assert_eq!(kind(unknown), Err(Errno::OPNOTSUPP));
        }
    }
}
