//! IOCTL about subvolumes, as Linux's btrfs answers them ([`crate::subvolumes`]).
//!
//! The kernel does not check whether a caller may make or remove a name by an ioctl. So that is
//! checked here, also on mounts where the kernel checks everything else. A caller may delete a
//! subvolume if it could remove a directory in its place and write in it: what Linux allows under
//! `user_subvol_rm_allowed`.

use super::Server;
use super::report::text;
use crate::acl::{self, inherit};
use crate::control::TEXT_LEN;
use crate::errno::Errno;
use crate::handler::{ExecContext, Failure, Request};
use crate::perm::{self, Caller};
use crate::proto::NodeId;
use crate::subvolumes::{
    BY_ID, CREATE, CREATE_V2, DEFAULT, DESTROY, DESTROY_V2, GETFLAGS, INFO, INO_LOOKUP,
    IOC_FIND_NEW, IOC_SNAPSHOT, IOC_SUBVOLS, NAME, NAME_V2, RDONLY, ROOTREF, SETFLAGS,
    SNAP_CREATE_V2, describe, describe_new,
};
use larder_format::ids::{Generation, ObjectId};
use larder_fs::{FileKind, InodeId, NewInode, Timestamp};
use serde_json::json;

/// Number of the root directory of a subvolume.
const TOP: u64 = 256;
/// Most bytes of an extent in a list, without its path.
const NEW_LINE: usize = 400;
/// Most bytes of a subvolume in a list, without its path.
const LINE: usize = 1000;

/// Does this ioctl preserve the contents that files have at that moment?
pub(super) fn keeps(cmd: u32) -> bool {
    matches!(cmd, IOC_SNAPSHOT | SNAP_CREATE_V2 | SETFLAGS)
}

impl Server {
    /// The answer to an ioctl about subvolumes; `None` for any other.
    pub(super) fn subvolume_ioctl(
        &self,
        id: InodeId,
        request: &Request<'_>,
        command: u32,
        arg: &[u8],
        context: ExecContext,
    ) -> Result<Option<Vec<u8>>, Failure> {
        let answer = match command {
            CREATE => self.create_subvolume(id, request, name_at(arg, NAME)?, context)?,
            CREATE_V2 if word(arg, 16)? == 0 => {
                self.create_subvolume(id, request, name_at(arg, NAME_V2)?, context)?
            }
            DESTROY => self.delete_subvolume(id, request, name_at(arg, NAME)?, context)?,
            DESTROY_V2 if word(arg, 16)? == 0 => {
                self.delete_subvolume(id, request, name_at(arg, NAME_V2)?, context)?
            }
            DESTROY_V2 if word(arg, 16)? == BY_ID => {
                let found = self.fs.subvolume(ObjectId(word(arg, NAME_V2)?))?;
                let (subvol, ino, name) = found.parent.ok_or(Errno::INVAL)?;
                self.delete_subvolume(InodeId { subvol, ino }, request, &name, context)?
            }
            IOC_SNAPSHOT => {
                let source = self.me.nodes.id(NodeId(word(arg, 0)?)).ok_or(Errno::STALE)?;
                self.snapshot(source, id, request, arg, context)?
            }
            SNAP_CREATE_V2 => {
                let source = self.open_of_caller(request, word(arg, 0)?)?;
                self.snapshot(source, id, request, arg, context)?
            }
            GETFLAGS => {
                top(id)?;
                let flags = if self.fs.subvolume(id.subvol)?.read_only { RDONLY } else { 0 };
                flags.to_ne_bytes().to_vec()
            }
            SETFLAGS => {
                top(id)?;
                let flags = word(arg, 0)?;
                if flags & !RDONLY != 0 {
                    return Err(Errno::OPNOTSUPP.into());
                }
                perm::owns(Caller::from(&request.header), &self.fs.getattr(id)?)?;
                self.fs.set_subvolume_read_only(id.subvol, flags & RDONLY != 0, false)?;
                Vec::new()
            }
            DEFAULT => {
                if !self.is_privileged(request) {
                    return Err(Errno::PERM.into());
                }
                let wanted = word(arg, 0)?;
                self.fs.set_default_subvolume(if wanted == 0 {
                    ObjectId::FS_TREE
                } else {
                    ObjectId(wanted)
                })?;
                Vec::new()
            }
            INFO => self.subvolume_info(id)?,
            ROOTREF => self.subvolumes_in(id, word(arg, 0)?)?,
            INO_LOOKUP => self.ino_lookup(id, request, arg)?,
            IOC_SUBVOLS => self.subvolume_page(word(arg, 0)?)?,
            IOC_FIND_NEW => self.find_new_page(id, request, arg)?,
            CREATE_V2 | DESTROY_V2 => return Err(Errno::OPNOTSUPP.into()),
            _ => return Ok(None),
        };
        Ok(Some(answer))
    }

    /// Checks what an ioctl needs, also where the kernel checks everything else.
    pub(super) fn may(&self, request: &Request<'_>, id: InodeId, want: u8) -> Result<(), Failure> {
        let caller = Caller::from(&request.header);
        let acl = self.access_acl(id)?;
        let allowed = perm::allows(caller, &self.fs.getattr(id)?, acl.as_ref(), want);
        if allowed { Ok(()) } else { Err(Errno::ACCES.into()) }
    }

    fn create_subvolume(
        &self,
        dir: InodeId,
        request: &Request<'_>,
        name: &[u8],
        context: ExecContext,
    ) -> Result<Vec<u8>, Failure> {
        let announcement = self.begin_name_change(context, &[dir])?;
        self.may(request, dir, perm::WRITE | perm::EXECUTE)?;
        let parent = self.fs.getattr(dir)?;
        let default = self.xattr_if_any(dir, acl::DEFAULT)?;
        let made = inherit(default.as_deref(), 0o777, umask(request.header.pid), true)?;
        let sgid = parent.perm & libc::S_ISGID;
        let new = NewInode {
            kind: FileKind::Directory,
            perm: made.perm | sgid,
            uid: request.header.uid,
            gid: if sgid != 0 { parent.gid } else { request.header.gid },
            rdev: 0,
            target: b"",
            xattrs: &made.xattrs,
        };
        self.fs.create_subvolume(dir, name, &new)?;
        self.name_changed(announcement, dir, name);
        Ok(Vec::new())
    }

    fn delete_subvolume(
        &self,
        dir: InodeId,
        request: &Request<'_>,
        name: &[u8],
        context: ExecContext,
    ) -> Result<Vec<u8>, Failure> {
        let announcement = self.begin_name_change(context, &[dir])?;
        let caller = Caller::from(&request.header);
        self.may(request, dir, perm::WRITE | perm::EXECUTE)?;
        let (parent, victim) = (self.fs.getattr(dir)?, self.fs.lookup(dir, name)?);
        if victim.id.ino != TOP {
            return Err(Errno::INVAL.into());
        }
        if !caller.is_root() {
            self.may(request, victim.id, perm::WRITE | perm::EXECUTE)?;
            if !perm::may_remove(caller, &parent, &victim) {
                return Err(Errno::PERM.into());
            }
        }
        self.fs.delete_subvolume(dir, name)?;
        self.name_changed(announcement, dir, name);
        Ok(Vec::new())
    }

    fn snapshot(
        &self,
        source: InodeId,
        dir: InodeId,
        request: &Request<'_>,
        arg: &[u8],
        context: ExecContext,
    ) -> Result<Vec<u8>, Failure> {
        let announcement = self.begin_name_change(context, &[dir])?;
        let (flags, name) = (word(arg, 16)?, name_at(arg, NAME_V2)?);
        if flags & !RDONLY != 0 {
            return Err(Errno::OPNOTSUPP.into());
        }
        top(source)?;
        self.may(request, dir, perm::WRITE | perm::EXECUTE)?;
        perm::owns(Caller::from(&request.header), &self.fs.getattr(source)?)?;
        self.fs.snapshot(source.subvol, dir, name, flags & RDONLY != 0)?;
        self.name_changed(announcement, dir, name);
        Ok(Vec::new())
    }

    /// `struct btrfs_ioctl_get_subvol_info_args`.
    fn subvolume_info(&self, id: InodeId) -> Result<Vec<u8>, Failure> {
        let s = self.fs.subvolume(id.subvol)?;
        let mut out = Vec::with_capacity(504);
        let word = |out: &mut Vec<u8>, n: u64| out.extend_from_slice(&n.to_ne_bytes());
        let (parent, dir, name) = s.parent.unwrap_or((ObjectId(0), 0, Vec::new()));
        word(&mut out, s.id.0);
        out.extend_from_slice(&name);
        out.resize(264, 0);
        word(&mut out, parent.0);
        word(&mut out, dir);
        word(&mut out, s.generation.0);
        // This is the flag as the root item has it.
        word(&mut out, u64::from(s.read_only));
        for uuid in [s.uuid, s.parent_uuid, s.received_uuid] {
            out.extend_from_slice(&uuid);
        }
        for transaction in [s.ctransid, s.otransid, s.stransid, s.rtransid] {
            word(&mut out, transaction.0);
        }
        let time = |out: &mut Vec<u8>, t: Timestamp| {
            out.extend_from_slice(&t.sec.to_ne_bytes());
            out.extend_from_slice(&t.nsec.to_ne_bytes());
            out.extend_from_slice(&[0; 4]);
        };
        for t in [s.ctime, s.otime, s.stime, s.rtime] {
            time(&mut out, t);
        }
        out.resize(504, 0);
        Ok(out)
    }

    /// `struct btrfs_ioctl_get_subvol_rootref_args`: the subvolumes inside this one.
    fn subvolumes_in(&self, id: InodeId, first: u64) -> Result<Vec<u8>, Failure> {
        const MOST: usize = 255;
        let mut out = first.to_ne_bytes().to_vec();
        let all = self.fs.subvolumes()?;
        let inside = all.iter().filter(|s| s.id.0 >= first);
        let inside = inside
            .filter_map(|s| s.parent.as_ref().filter(|p| p.0 == id.subvol).map(|p| (s.id, p.1)));
        let mut count = 0;
        for (child, dir) in inside {
            if count == MOST {
                return Err(Errno(libc::EOVERFLOW).into());
            }
            out.extend_from_slice(&child.0.to_ne_bytes());
            out.extend_from_slice(&dir.to_ne_bytes());
            count += 1;
        }
        out.resize(8 + MOST * 16, 0);
        out.push(count as u8);
        out.resize(4096, 0);
        Ok(out)
    }

    /// `struct btrfs_ioctl_ino_lookup_args`: the subvolume of this inode. Privileged callers also
    /// get paths, in any subvolume.
    fn ino_lookup(
        &self,
        id: InodeId,
        request: &Request<'_>,
        arg: &[u8],
    ) -> Result<Vec<u8>, Failure> {
        let (tree, ino) = (word(arg, 0)?, word(arg, 8)?);
        let subvol = if tree == 0 { id.subvol } else { ObjectId(tree) };
        let mut out = subvol.0.to_ne_bytes().to_vec();
        out.extend_from_slice(&ino.to_ne_bytes());
        if ino != TOP || tree != 0 {
            if !self.is_privileged(request) {
                return Err(Errno::PERM.into());
            }
            let path = self.fs.path_in_subvolume(InodeId { subvol, ino })?;
            if path.len() >= 4096 - 16 {
                return Err(Errno(libc::ENAMETOOLONG).into());
            }
            out.extend_from_slice(&path);
        }
        out.resize(4096, 0);
        Ok(out)
    }

    /// Extents that were written since some transaction, as many as fit.
    fn find_new_page(
        &self,
        id: InodeId,
        request: &Request<'_>,
        arg: &[u8],
    ) -> Result<Vec<u8>, Failure> {
        if !self.is_privileged(request) {
            return Err(Errno::PERM.into());
        }
        let (since, from) = (Generation(word(arg, 0)?), (word(arg, 8)?, word(arg, 16)?));
        if from == (0, 0) {
            self.fs.sync()?;
        }
        let generation = self.fs.info().generation.0;
        let mut found = Vec::new();
        self.fs.find_new(id.subvol, since, from, &mut |e| {
            found.push(*e);
            found.len() < TEXT_LEN / NEW_LINE
        })?;
        let (mut page, mut room, mut next) = (Vec::new(), TEXT_LEN - LINE, None);
        for e in &found {
            // It may have no path any more. An inode with several names has one of them.
            let path = self.fs.path_of(InodeId { subvol: id.subvol, ino: e.ino }).ok();
            let need = NEW_LINE + 6 * path.as_ref().map_or(0, Vec::len);
            if need > room && !page.is_empty() {
                next = Some([e.ino, e.start]);
                break;
            }
            room = room.saturating_sub(need);
            page.push(describe_new(e, path.as_deref()));
        }
        if next.is_none() && found.len() >= TEXT_LEN / NEW_LINE {
            next = found.last().map(|e| [e.ino, e.start + 1]);
        }
        Ok(text(&json!({ "extents": page, "next": next, "generation": generation })))
    }

    /// Subvolumes from an id on, as many as fit.
    fn subvolume_page(&self, first: u64) -> Result<Vec<u8>, Failure> {
        let (mut page, mut room, mut next) = (Vec::new(), TEXT_LEN - LINE, None);
        for s in self.fs.subvolumes()?.iter().filter(|s| s.id.0 >= first) {
            let path = self.fs.subvolume_path(s.id)?;
            // Escapes can take six bytes for one.
            let need = LINE + 6 * path.len();
            if need > room && !page.is_empty() {
                next = Some(s.id.0);
                break;
            }
            room = room.saturating_sub(need);
            page.push(describe(s, &path));
        }
        let default = self.fs.default_subvolume()?.0;
        Ok(text(&json!({ "subvolumes": page, "next": next, "default": default })))
    }
}

/// Fails for anything but the root directory of a subvolume.
fn top(id: InodeId) -> Result<(), Errno> {
    if id.ino == TOP { Ok(()) } else { Err(Errno::INVAL) }
}

pub(super) fn word(arg: &[u8], at: usize) -> Result<u64, Errno> {
    let bytes = arg.get(at..).and_then(|a| a.first_chunk::<8>()).ok_or(Errno::INVAL)?;
    Ok(u64::from_ne_bytes(*bytes))
}

/// The name in an argument, which must be terminated.
fn name_at(arg: &[u8], at: usize) -> Result<&[u8], Errno> {
    let rest = arg.get(at..).ok_or(Errno::INVAL)?;
    let name = &rest[..rest.iter().position(|b| *b == 0).ok_or(Errno::INVAL)?];
    match name {
        b"" | b"." | b".." => Err(Errno::INVAL),
        n if n.contains(&b'/') => Err(Errno::INVAL),
        n if n.len() > 255 => Err(Errno(libc::ENAMETOOLONG)),
        n => Ok(n),
    }
}

/// The caller's umask; the usual one if it cannot be read.
fn umask(pid: u32) -> u32 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let mask = status.lines().find_map(|l| l.strip_prefix("Umask:"));
    mask.and_then(|m| u32::from_str_radix(m.trim(), 8).ok()).unwrap_or(0o022)
}
