//! Tar archives, of all dialects that are in use: the old form, POSIX with extended headers, GNU,
//! and what star and libarchive add.
//!
//! [`header`] knows one block, [`pax`] the extended records, [`members`] how they make a member.
//! Here a member becomes what the tree has: its path, its attributes, its contents. Absolute paths
//! and `..` are refused. An archive for a container layer is read with the same code. There a
//! leading slash means the root of the tree, and `.wh.` names mean what they hide.
//!
//! What hostile archives state is bounded, or refused with the member's name.

mod header;
mod members;
mod pax;
#[cfg(test)]
mod tests;

use super::bytes::{Bytes, Mapped};
use super::{LONGEST_PATH, LONGEST_TARGET, Store};
use crate::entry::device_numbers;
use crate::error::{Error, Result};
use crate::overlay::{Collector, Node};
use crate::{Attributes, Contents, Kind, Locator, SourceNumber, Time, TreePath, acl, flags};
use larder_format::acl::{ACCESS, DEFAULT};
use members::{Member, Members};
use std::io;

/// What names that begin with `.wh.` are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Whiteouts {
    /// Names like others.
    Names,
    /// Those of container layers: what they hide of the layers below.
    Hide,
}

const WHITEOUT: &[u8] = b".wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";
/// Names with this beginning are bookkeeping of the file system that invented whiteouts.
const BOOKKEEPING: &[u8] = b".wh..wh.";

/// Tells the collector what an archive holds.
pub(crate) fn read(
    collector: &mut Collector,
    bytes: &Bytes,
    source: SourceNumber,
    whiteouts: Whiteouts,
) -> Result<()> {
    let mut members = Members::from(bytes, 0);
    while let Some(member) = members.next()? {
        Reading { collector, bytes, source, member: &member }.take(whiteouts)?;
    }
    Ok(())
}

/// Regular files of an archive that is not a tree but a box of files: their names, and where they
/// are. Links among them have what they lead to.
pub(crate) fn list(bytes: &Bytes) -> Result<Vec<(TreePath, Listed)>> {
    let mut members = Members::from(bytes, 0);
    let mut list = Vec::new();
    while let Some(member) = members.next()? {
        let Some(path) = TreePath::new(&member.name) else { continue };
        match member.header.kind() {
            b'0' | 0 | b'7' if !member.is_sparse => {
                let start = member.data.first().map_or(0, |segment| segment.at);
                list.push((path, Listed::File(start..start + member.size)));
            }
            b'1' => {
                let target = TreePath::new(&member.link_name);
                list.extend(target.map(|target| (path, Listed::Link(target))));
            }
            b'2' => {
                let (parent, _) = path.split().unwrap_or_default();
                let target = relative(&parent, &member.link_name);
                list.extend(target.map(|target| (path, Listed::Link(target))));
            }
            _ => {}
        }
    }
    Ok(list)
}

/// A file of a box of files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Listed {
    /// Where its bytes are.
    File(std::ops::Range<u64>),
    Link(TreePath),
}

/// The path of a link's target. `None` if it leads out.
fn relative(from: &TreePath, target: &[u8]) -> Option<TreePath> {
    let mut path = from.clone();
    for name in target.split(|&b| b == b'/') {
        match name {
            b"" | b"." => {}
            b".." => path = path.split()?.0,
            _ => path.push(name),
        }
    }
    Some(path)
}

/// The contents of an archive's files.
#[derive(Debug)]
pub(crate) struct TarStore(pub(crate) Bytes);

impl Store for TarStore {
    fn open(&self, key: &[u8]) -> io::Result<Box<dyn Contents>> {
        let begins = key.try_into().map(u64::from_le_bytes);
        let begins = begins.map_err(|_| io::Error::other("not a locator of an archive"))?;
        let member = Members::from(&self.0, begins).next().map_err(io::Error::other)?;
        let Some(Member { size, data, .. }) = member else {
            return Err(super::bytes::has_changed(self.0.name()));
        };
        Ok(Box::new(Mapped { bytes: self.0.clone(), size, segments: data }))
    }
}

/// A member that is read.
struct Reading<'a> {
    collector: &'a mut Collector,
    bytes: &'a Bytes,
    source: SourceNumber,
    member: &'a Member,
}

impl Reading<'_> {
    fn refused(&self, what: impl Into<String>) -> Error {
        Error::refused(self.bytes.name(), &self.member.name, what)
    }

    fn take(&mut self, whiteouts: Whiteouts) -> Result<()> {
        let path = self.path(&self.member.name, whiteouts)?;
        if whiteouts == Whiteouts::Hide && self.take_whiteout(&path)? {
            return Ok(());
        }
        let kind = match self.member.header.kind() {
            0 | b'0' | b'7' if self.member.name.ends_with(b"/") => Kind::Directory,
            0 | b'0' | b'7' | b'S' => self.file(),
            b'1' => return self.link(&path, whiteouts),
            b'2' => Kind::Symlink(self.target()?),
            b'3' => {
                let (major, minor) = self.device()?;
                Kind::CharDevice { major, minor }
            }
            b'4' => {
                let (major, minor) = self.device()?;
                Kind::BlockDevice { major, minor }
            }
            b'5' | b'D' => Kind::Directory,
            b'6' => Kind::Fifo,
            b'M' => return Err(self.refused("the rest of a file that begins in another archive")),
            kind => {
                let kind = crate::error::shown(&[kind]);
                return Err(self.refused(format!("a member of the unknown type {kind:?}")));
            }
        };
        if path.is_root() && kind != Kind::Directory {
            return Err(self.refused("a member without a name"));
        }
        let attributes = self.attributes()?;
        self.collector.put(&path, Node { attributes, kind, links: None })
    }

    /// A name of the archive as a path.
    fn path(&self, name: &[u8], whiteouts: Whiteouts) -> Result<TreePath> {
        if name.len() > LONGEST_PATH {
            let what = format!("a path of {} bytes; Linux takes {LONGEST_PATH}", name.len());
            let start = &name[..100];
            return Err(Error::refused(self.bytes.name(), start, what));
        }
        if is_absolute(name, whiteouts) {
            return Err(self.refused("an absolute path, which leads out of the tree"));
        }
        TreePath::new(name).ok_or_else(|| match name.contains(&0) {
            true => self.refused("a name with a NUL"),
            false => self.refused("a path with `..`, which leads out of the tree"),
        })
    }

    /// Hides what a whiteout hides. False if it is none.
    fn take_whiteout(&mut self, path: &TreePath) -> Result<bool> {
        let Some((parent, name)) = path.split() else { return Ok(false) };
        if parent.components().any(|name| name.starts_with(WHITEOUT)) {
            let inside = parent.components().any(|name| name.starts_with(BOOKKEEPING));
            return match inside {
                true => Ok(true),
                false => Err(self.refused("a whiteout, which can hold nothing")),
            };
        }
        let Some(hidden) = name.strip_prefix(WHITEOUT) else { return Ok(false) };
        if name == OPAQUE {
            self.collector.opaque(&parent)?;
        } else if !name.starts_with(BOOKKEEPING) {
            if matches!(hidden, b"" | b"." | b"..") {
                return Err(self.refused("a whiteout of nothing"));
            }
            let mut path = parent;
            path.push(hidden);
            self.collector.whiteout(&path)?;
        }
        Ok(true)
    }

    fn file(&self) -> Kind {
        let size = self.member.size;
        let key = self.member.begins.to_le_bytes().to_vec();
        let contents = (size > 0).then_some(Locator { source: self.source, key });
        Kind::File { size, contents }
    }

    fn link(&mut self, path: &TreePath, whiteouts: Whiteouts) -> Result<()> {
        let name = &self.member.link_name;
        let target =
            TreePath::new(name).filter(|target| !target.is_root() && !is_absolute(name, whiteouts));
        let shown = || crate::error::shown(name);
        let Some(target) = target else {
            return Err(self.refused(format!("a hard link to {}, out of the tree", shown())));
        };
        let is_whiteout = target.components().any(|name| name.starts_with(WHITEOUT));
        if whiteouts == Whiteouts::Hide && is_whiteout {
            return Err(self.refused(format!("a hard link to the whiteout {}", shown())));
        }
        self.collector.link(path, &target)
    }

    fn target(&self) -> Result<Vec<u8>> {
        let target = &self.member.link_name;
        if target.is_empty() || target.contains(&0) || target.len() > LONGEST_TARGET {
            return Err(self.refused("a symbolic link whose target Linux cannot have"));
        }
        Ok(target.clone())
    }

    fn device(&self) -> Result<(u32, u32)> {
        let numbers = self.member.header.device();
        let numbers =
            numbers.and_then(|(a, b)| device_numbers((a.try_into().ok()?, b.try_into().ok()?)));
        numbers.ok_or_else(|| self.refused("a device without valid numbers"))
    }

    fn attributes(&mut self) -> Result<Attributes> {
        let Member { header, extended, .. } = self.member;
        let time = |keyword: &[u8]| extended.time(keyword).map_err(|what| self.refused(what));
        let modified = match time(b"mtime")? {
            Some(time) => time,
            None => {
                let seconds = header.modified().ok_or_else(|| self.refused("no valid time"))?;
                Time { seconds, nanoseconds: 0 }
            }
        };
        let mode = header.mode().ok_or_else(|| self.refused("no valid mode"))?;
        Ok(Attributes {
            uid: self.id(b"uid", header.uid())?,
            gid: self.id(b"gid", header.gid())?,
            permissions: (mode & 0o7777) as u32,
            modified,
            accessed: time(b"atime")?,
            changed: time(b"ctime")?,
            created: time(b"LIBARCHIVE.creationtime")?,
            inode_flags: self.flags(),
            xattrs: self.xattrs()?,
        })
    }

    fn id(&self, keyword: &[u8], in_header: Option<i64>) -> Result<u32> {
        let said = self.member.extended.number(keyword).map_err(|what| self.refused(what))?;
        let id = said.or(in_header.and_then(|id| u64::try_from(id).ok()));
        // The highest number means "none" to Linux.
        let id = id.and_then(|id| u32::try_from(id).ok()).filter(|&id| id != u32::MAX);
        let what = || format!("no valid {}", crate::error::shown(keyword));
        id.ok_or_else(|| self.refused(what()))
    }

    fn flags(&mut self) -> u64 {
        let Some(names) = self.member.extended.get(b"SCHILY.fflags") else { return 0 };
        let (flags, unknown) = flags::from_names(names);
        for name in unknown {
            let what = format!("btrfs has no flag {name:?}; left out");
            self.collector.note(&self.member.name, &what);
        }
        flags
    }

    fn xattrs(&mut self) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
        let extended = &self.member.extended;
        let mut xattrs = std::collections::BTreeMap::new();
        if let Some(label) = extended.get(b"RHT.security.selinux") {
            xattrs.insert(b"security.selinux".to_vec(), label.to_vec());
        }
        for (name, value) in extended.with_prefix(b"SCHILY.xattr.") {
            let name = unescaped(&name);
            if crate::rules::check_xattr_name(&name).is_ok() {
                xattrs.insert(name, value);
            } else {
                let name = crate::error::shown(&name);
                let what = format!("Linux has no extended attribute {name}; left out");
                self.collector.note(&self.member.name, &what);
            }
        }
        for (keyword, name, is_default) in
            [(&b"SCHILY.acl.access"[..], ACCESS, false), (b"SCHILY.acl.default", DEFAULT, true)]
        {
            // The form of Linux, with numbers, is better than text, which may have names only.
            if let Some(text) = extended.get(keyword)
                && !xattrs.contains_key(name)
            {
                let acl = acl::from_text(text, is_default).map_err(|what| self.refused(what))?;
                xattrs.extend(acl.value.map(|value| (name.to_vec(), value)));
                for name in acl.left_out {
                    let what = format!(
                        "an ACL for {name:?} without a number; left out, for names mean nothing \
                         in an image (`tar --xattrs --xattrs-include='*'` stores numbers)"
                    );
                    self.collector.note(&self.member.name, &what);
                }
            }
        }
        Ok(xattrs.into_iter().collect())
    }
}

/// Does a name begin at the root of a machine? The root of a container layer is that of the tree.
fn is_absolute(name: &[u8], whiteouts: Whiteouts) -> bool {
    whiteouts == Whiteouts::Names && name.starts_with(b"/")
}

/// GNU tar writes `=` and `%` in names of attributes as `%3D` and `%25`.
fn unescaped(name: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(name.len());
    let mut rest = name;
    while let [first, tail @ ..] = rest {
        let (byte, tail) = match rest {
            [b'%', b'3', b'D', tail @ ..] => (b'=', tail),
            [b'%', b'2', b'5', tail @ ..] => (b'%', tail),
            _ => (*first, tail),
        };
        plain.push(byte);
        rest = tail;
    }
    plain
}
