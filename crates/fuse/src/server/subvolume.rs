//! IOCTL about subvolumes, as Linux's btrfs answers them ([`crate::subvolumes`]).
//!
//! The kernel does not check whether a caller may make or remove a name by an ioctl. So that is
//! checked here, also on mounts where the kernel checks everything else. A caller may delete a
//! subvolume if it could remove a directory in its place and write in it: what Linux allows under
//! `user_subvol_rm_allowed`.

use super::Server;
use super::ioctl::{Answer, Ioctl};
use super::names::Wanted;
use super::report::text;
use crate::control::TEXT_LEN;
use crate::errno::Errno;
use crate::handler::{Failure, Request};
use crate::perm::{self, Caller};
use crate::proto::NodeId;
use crate::subvolumes::{
    BY_ID, CREATE, CREATE_V2, DEFAULT, DESTROY, DESTROY_V2, GETFLAGS, INFO, INO_LOOKUP,
    IOC_FIND_NEW, IOC_SNAPSHOT, IOC_SUBVOLS, NAME, NAME_V2, RDONLY, ROOTREF, SET_RECEIVED,
    SETFLAGS, SNAP_CREATE_V2, describe, describe_new,
};
use larder_format::ids::{Generation, ObjectId};
use larder_fs::{InodeId, Received, Timestamp};
use larder_proc::Status;
use serde_json::{Value, json};

/// Number of the root directory of a subvolume.
const TOP: u64 = 256;
/// Most bytes of an extent in a list, without its path.
const NEW_LINE: usize = 400;
/// Most bytes of a subvolume in a list, without its path.
const LINE: usize = 1000;
/// Most bytes that JSON takes for one of a path.
const ESCAPED: usize = 6;

/// Does this ioctl preserve the contents that files have at that moment?
pub(super) fn keeps(cmd: u32) -> bool {
    matches!(cmd, IOC_SNAPSHOT | SNAP_CREATE_V2 | SETFLAGS)
}

impl Server {
    /// The answer to an ioctl about subvolumes; `None` for any other.
    pub(super) fn subvolume_ioctl(&self, call: &Ioctl<'_>) -> Answer {
        let id = call.id;
        let answer = match call.command {
            CREATE => self.create_subvolume(call, name_at(call.arg, NAME)?)?,
            CREATE_V2 if call.word(16)? == 0 => {
                self.create_subvolume(call, name_at(call.arg, NAME_V2)?)?
            }
            DESTROY => self.delete_subvolume(call, id, name_at(call.arg, NAME)?)?,
            DESTROY_V2 if call.word(16)? == 0 => {
                self.delete_subvolume(call, id, name_at(call.arg, NAME_V2)?)?
            }
            DESTROY_V2 if call.word(16)? == BY_ID => {
                let found = self.fs.subvolume(ObjectId(call.word(NAME_V2)?))?;
                let (subvol, ino, name) = found.parent.ok_or(Errno::INVAL)?;
                self.delete_subvolume(call, InodeId { subvol, ino }, &name)?
            }
            IOC_SNAPSHOT => {
                let source = self.me.nodes.id(NodeId(call.word(0)?)).ok_or(Errno::STALE)?;
                self.snapshot(call, source)?
            }
            SNAP_CREATE_V2 => {
                let source = self.open_of_caller(call.request, call.word(0)?)?;
                self.snapshot(call, source)?
            }
            GETFLAGS => {
                top(id)?;
                let flags = if self.fs.subvolume(id.subvol)?.read_only { RDONLY } else { 0 };
                flags.to_ne_bytes().to_vec()
            }
            SETFLAGS => self.set_subvolume_flags(call)?,
            SET_RECEIVED => self.set_received(call)?,
            DEFAULT => {
                self.must_be_privileged(call.request)?;
                let wanted = match call.word(0)? {
                    0 => ObjectId::FS_TREE,
                    id => ObjectId(id),
                };
                self.fs.set_default_subvolume(wanted)?;
                Vec::new()
            }
            INFO => self.subvolume_info(id)?,
            ROOTREF => self.subvolumes_in(id, call.word(0)?)?,
            INO_LOOKUP => self.ino_lookup(call)?,
            IOC_SUBVOLS => self.subvolume_page(call.word(0)?)?,
            IOC_FIND_NEW => self.find_new_page(call)?,
            CREATE_V2 | DESTROY_V2 => return Err(Errno::OPNOTSUPP.into()),
            _ => return Ok(None),
        };
        Ok(Some(answer))
    }

    fn set_subvolume_flags(&self, call: &Ioctl<'_>) -> Result<Vec<u8>, Failure> {
        top(call.id)?;
        let read_only = is_read_only(call.word(0)?)?;
        perm::owns(call.caller(), &self.fs.getattr(call.id)?)?;
        self.fs.set_subvolume_read_only(call.id.subvol, read_only, false)?;
        Ok(Vec::new())
    }

    /// `struct btrfs_ioctl_received_subvol_args`. The transaction and the time here are the answer.
    fn set_received(&self, call: &Ioctl<'_>) -> Result<Vec<u8>, Failure> {
        top(call.id)?;
        perm::owns(call.caller(), &self.fs.getattr(call.id)?)?;
        if self.fs.subvolume(call.id.subvol)?.read_only {
            return Err(Errno(libc::EROFS).into());
        }
        let uuid = *call.arg.first_chunk().ok_or(Errno::INVAL)?;
        let stransid = Generation(call.word(16)?);
        let nsec = u32::try_from(call.word(40)? & u64::from(u32::MAX)).unwrap_or_default();
        let stime = Timestamp { sec: call.word(32)?.cast_signed(), nsec };
        let rtime = Timestamp::now();
        let received = Received { uuid, stransid, rtransid: Generation(0), stime, rtime };
        let rtransid = self.fs.set_subvolume_received(call.id.subvol, received)?;
        let mut out = call.arg.to_vec();
        out[24..32].copy_from_slice(&rtransid.0.to_ne_bytes());
        out[48..56].copy_from_slice(&rtime.sec.to_ne_bytes());
        out[56..60].copy_from_slice(&rtime.nsec.to_ne_bytes());
        Ok(out)
    }

    /// Checks what an ioctl needs, also where the kernel checks everything else.
    pub(super) fn may(&self, request: &Request<'_>, id: InodeId, want: u8) -> Result<(), Failure> {
        let caller = Caller::from(&request.header);
        let acl = self.access_acl(id)?;
        let allowed = perm::allows(caller, &self.fs.getattr(id)?, acl.as_ref(), want);
        if allowed { Ok(()) } else { Err(Errno::ACCES.into()) }
    }

    fn create_subvolume(&self, call: &Ioctl<'_>, name: &[u8]) -> Result<Vec<u8>, Failure> {
        let (dir, request) = (call.id, call.request);
        let announcement = self.begin_name_change(call.context, &[dir])?;
        self.may(request, dir, perm::WRITE | perm::EXECUTE)?;
        let wanted = Wanted::directory(0o777, umask(request.header.pid));
        self.with_new(dir, request, &wanted, |new| {
            Ok(self.fs.create_subvolume(dir, name, new).map(drop)?)
        })?;
        self.name_changed(announcement, dir, name);
        Ok(Vec::new())
    }

    fn delete_subvolume(
        &self,
        call: &Ioctl<'_>,
        dir: InodeId,
        name: &[u8],
    ) -> Result<Vec<u8>, Failure> {
        let announcement = self.begin_name_change(call.context, &[dir])?;
        self.may(call.request, dir, perm::WRITE | perm::EXECUTE)?;
        let (parent, victim) = (self.fs.getattr(dir)?, self.fs.lookup(dir, name)?);
        top(victim.id)?;
        if !call.caller().is_root() {
            self.may(call.request, victim.id, perm::WRITE | perm::EXECUTE)?;
            if !perm::may_remove(call.caller(), &parent, &victim) {
                return Err(Errno::PERM.into());
            }
        }
        self.fs.delete_subvolume(dir, name)?;
        self.name_changed(announcement, dir, name);
        Ok(Vec::new())
    }

    fn snapshot(&self, call: &Ioctl<'_>, source: InodeId) -> Result<Vec<u8>, Failure> {
        let dir = call.id;
        let announcement = self.begin_name_change(call.context, &[dir])?;
        let (flags, name) = (call.word(16)?, name_at(call.arg, NAME_V2)?);
        let read_only = is_read_only(flags)?;
        top(source)?;
        self.may(call.request, dir, perm::WRITE | perm::EXECUTE)?;
        perm::owns(call.caller(), &self.fs.getattr(source)?)?;
        self.fs.snapshot(source.subvol, dir, name, read_only)?;
        self.name_changed(announcement, dir, name);
        Ok(Vec::new())
    }

    /// `struct btrfs_ioctl_get_subvol_info_args`.
    fn subvolume_info(&self, id: InodeId) -> Result<Vec<u8>, Failure> {
        let s = self.fs.subvolume(id.subvol)?;
        let (parent, dir, name) = s.parent.unwrap_or((ObjectId(0), 0, Vec::new()));
        let mut out = s.id.0.to_ne_bytes().to_vec();
        out.extend_from_slice(&name);
        out.resize(264, 0);
        // The flag is written as the root item has it.
        for word in [parent.0, dir, s.generation.0, u64::from(s.read_only)] {
            out.extend_from_slice(&word.to_ne_bytes());
        }
        for uuid in [s.uuid, s.parent_uuid, s.received_uuid] {
            out.extend_from_slice(&uuid);
        }
        for transaction in [s.ctransid, s.otransid, s.stransid, s.rtransid] {
            out.extend_from_slice(&transaction.0.to_ne_bytes());
        }
        for t in [s.ctime, s.otime, s.stime, s.rtime] {
            out.extend_from_slice(&t.sec.to_ne_bytes());
            out.extend_from_slice(&t.nsec.to_ne_bytes());
            out.extend_from_slice(&[0; 4]);
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
    fn ino_lookup(&self, call: &Ioctl<'_>) -> Result<Vec<u8>, Failure> {
        let (tree, ino) = (call.word(0)?, call.word(8)?);
        let subvol = if tree == 0 { call.id.subvol } else { ObjectId(tree) };
        let mut out = subvol.0.to_ne_bytes().to_vec();
        out.extend_from_slice(&ino.to_ne_bytes());
        if ino != TOP || tree != 0 {
            self.must_be_privileged(call.request)?;
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
    fn find_new_page(&self, call: &Ioctl<'_>) -> Result<Vec<u8>, Failure> {
        self.must_be_privileged(call.request)?;
        let subvol = call.id.subvol;
        let since = Generation(call.word(0)?);
        let beginning = InodeId { subvol, ino: 0 }.at(0);
        let from = InodeId { subvol, ino: call.word(8)? }.at(call.word(16)?);
        if from == beginning {
            self.fs.sync()?;
        }
        let generation = self.fs.info().generation.0;
        let mut found = Vec::new();
        self.fs.find_new(from, since, &mut |e| {
            found.push(*e);
            found.len() < TEXT_LEN / NEW_LINE
        })?;
        let (mut page, mut next) = (Page::default(), None);
        for e in &found {
            // It may have no path any more. An inode with several names has one of them.
            let path = self.fs.path_of(InodeId { subvol, ino: e.ino }).ok();
            let need = NEW_LINE + ESCAPED * path.as_ref().map_or(0, Vec::len);
            if !page.push(need, || describe_new(e, path.as_deref())) {
                next = Some([e.ino, e.start]);
                break;
            }
        }
        if next.is_none() && found.len() >= TEXT_LEN / NEW_LINE {
            next = found.last().map(|e| [e.ino, e.start + 1]);
        }
        Ok(text(&json!({ "extents": page.lines, "next": next, "generation": generation })))
    }

    /// Subvolumes from an id on, as many as fit.
    fn subvolume_page(&self, first: u64) -> Result<Vec<u8>, Failure> {
        let (mut page, mut next) = (Page::default(), None);
        for s in self.fs.subvolumes()?.iter().filter(|s| s.id.0 >= first) {
            let path = self.fs.subvolume_path(s.id)?;
            if !page.push(LINE + ESCAPED * path.len(), || describe(s, &path)) {
                next = Some(s.id.0);
                break;
            }
        }
        let default = self.fs.default_subvolume()?.0;
        Ok(text(&json!({ "subvolumes": page.lines, "next": next, "default": default })))
    }
}

/// Lines of a list, as many as an answer has room for.
struct Page {
    lines: Vec<Value>,
    room: usize,
}

impl Default for Page {
    fn default() -> Self {
        Self { lines: Vec::new(), room: TEXT_LEN - LINE }
    }
}

impl Page {
    /// Adds a line of at most `need` bytes. False if it does not fit; the first one always does.
    fn push(&mut self, need: usize, line: impl FnOnce() -> Value) -> bool {
        if need > self.room && !self.lines.is_empty() {
            return false;
        }
        self.room = self.room.saturating_sub(need);
        self.lines.push(line());
        true
    }
}

/// The flags of an argument, of which only one is known.
fn is_read_only(flags: u64) -> Result<bool, Errno> {
    if flags & !RDONLY == 0 { Ok(flags & RDONLY != 0) } else { Err(Errno::OPNOTSUPP) }
}

/// Fails for anything but the root directory of a subvolume.
fn top(id: InodeId) -> Result<(), Errno> {
    if id.ino == TOP { Ok(()) } else { Err(Errno::INVAL) }
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
    let mask = |status: Status| u32::from_str_radix(status.field("Umask")?, 8).ok();
    Status::of(pid).ok().and_then(mask).unwrap_or(0o022)
}
