//! Finding bytes that the receiver has already.
//!
//! An extent that is used more than once is looked up in the extent tree: its references say which
//! inodes use it, and where ([`larder_fs::ExtentUser`]). A user serves as a source if its bytes are
//! at the receiver at that moment:
//!
//! - in the newer subvolume, if its turn was before, or if it is a part of the same file that has
//!   been sent;
//! - in the parent or another given subvolume, always.
//!
//! Whatever a reference says, the file itself is looked at. Work is bounded: only some references
//! are examined, and answers are kept. If an extent has more, its first users may be such as come
//! later. So where an extent was sent last is kept as well, and a million clones of one extent are
//! one write and clones of the clone before.

use crate::error::Result;
use crate::output::Output;
use crate::pair::{Pair, path_in};
use crate::places::Places;
use larder_format::items::{ExtentKind, ExtentRecord};
use larder_format::{Generation, Logical, ObjectId};
use larder_fs::{ExtentUser, Frozen, PartContent};
use larder_stream::Command;
use std::collections::HashMap;

/// References of an extent that are examined.
const MOST_USERS: usize = 64;
/// Extents whose users are kept, twice over.
const KEPT: usize = 1 << 13;
const SECTOR: u64 = larder_format::SECTOR_SIZE as u64;

/// A place in a file, and how many bytes of it are wanted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    pub(crate) ino: ObjectId,
    pub(crate) at: u64,
    pub(crate) len: u64,
    /// Size of the file in the end.
    pub(crate) size: u64,
}

/// A source that was found.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Found {
    /// Index of the subvolume among the given ones; `None` is the newer subvolume itself.
    given: Option<usize>,
    ino: ObjectId,
    offset: u64,
    pub(crate) len: u64,
}

/// What is known of extents that are used more than once.
#[derive(Debug)]
pub(crate) struct Clones<'a> {
    pair: &'a Pair<'a>,
    /// The subvolumes that the receiver has.
    given: Vec<&'a Frozen>,
    young: HashMap<Logical, Users>,
    old: HashMap<Logical, Users>,
}

#[derive(Clone, Debug, Default)]
struct Users {
    hints: Vec<ExtentUser>,
    /// Where it was sent last.
    sent: Option<ExtentUser>,
}

impl<'a> Clones<'a> {
    /// `given` are the subvolumes from which may be cloned, besides the parent.
    pub(crate) fn new(pair: &'a Pair<'a>, given: &[&'a Frozen]) -> Self {
        let mut all: Vec<&Frozen> = pair.old.into_iter().collect();
        for tree in given {
            if all.iter().all(|other| other.id() != tree.id()) && tree.id() != pair.new.id() {
                all.push(tree);
            }
        }
        Self { pair, given: all, young: HashMap::new(), old: HashMap::new() }
    }

    /// The path of a source. To have one, it may have to be renamed before its turn, and
    /// directories with it.
    pub(crate) fn path(
        &self,
        places: &mut Places<'_>,
        out: &mut Output<'_>,
        found: &Found,
    ) -> Result<Vec<u8>> {
        match found.given {
            Some(i) => path_in(self.given[i], found.ino),
            None => places.path(out, found.ino),
        }
    }

    /// Writes the command for a source that was found.
    pub(crate) fn write(
        &self,
        out: &mut Output<'_>,
        path: &[u8],
        at: u64,
        found: &Found,
        from_path: &[u8],
    ) -> Result<()> {
        let (from_uuid, from_ctransid) =
            name_of(found.given.map_or(self.pair.new, |i| self.given[i]));
        out.write(&Command::Clone {
            offset: at,
            len: found.len,
            path,
            from_uuid,
            from_ctransid,
            from_path,
            from_offset: found.offset,
        })
    }

    /// A part of an extent is at the receiver now.
    pub(crate) fn sent(&mut self, record: &ExtentRecord, ino: ObjectId, base: u64) {
        if let Some(users) = self.young.get_mut(&record.disk_bytenr) {
            users.sent = Some(ExtentUser { ino, base });
        }
    }

    fn users(&mut self, record: &ExtentRecord) -> Result<&Users> {
        let at = record.disk_bytenr;
        if !self.young.contains_key(&at) {
            let users = match self.old.remove(&at) {
                Some(users) => users,
                None => {
                    let found =
                        self.pair.new.extent_users(at, record.disk_num_bytes, MOST_USERS)?;
                    Users { hints: found, sent: None }
                }
            };
            if self.young.len() >= KEPT {
                self.old = std::mem::take(&mut self.young);
            }
            self.young.insert(at, users);
        }
        Ok(&self.young[&at])
    }

    /// A source for bytes from the start of what is wanted, which is `skip` bytes into the extent.
    pub(crate) fn find(
        &mut self,
        record: &ExtentRecord,
        skip: u64,
        wanted: Wanted,
    ) -> Result<Option<Found>> {
        if !wanted.at.is_multiple_of(SECTOR) {
            return Ok(None);
        }
        let users = self.users(record)?;
        if users.hints.is_empty() {
            return Ok(None);
        }
        let users: Vec<ExtentUser> = users.sent.iter().chain(&users.hints).copied().collect();
        let mut best: Option<Found> = None;
        for user in users {
            for given in std::iter::once(None).chain((0..self.given.len()).map(Some)) {
                let Some(found) = self.try_user(record, skip, wanted, user, given)? else {
                    continue;
                };
                if found.len == wanted.len {
                    return Ok(Some(found));
                }
                if best.is_none_or(|best| found.len > best.len) {
                    best = Some(found);
                }
            }
        }
        Ok(best)
    }

    /// Has a user these bytes, in this subvolume and at this moment?
    fn try_user(
        &self,
        record: &ExtentRecord,
        skip: u64,
        wanted: Wanted,
        user: ExtentUser,
        given: Option<usize>,
    ) -> Result<Option<Found>> {
        let offset = user.base.wrapping_add(skip);
        if given.is_none() && user.ino > wanted.ino {
            return Ok(None);
        }
        let tree = given.map_or(self.pair.new, |i| self.given[i]);
        let len = has_bytes(tree, user, record, Span { offset, len: wanted.len })?;
        let Some(inode) = (if len > 0 { tree.inode(user.ino)? } else { None }) else {
            return Ok(None);
        };
        let size = inode.size.get();
        let mut len = len.min(size.saturating_sub(offset));
        let both_end = offset + len == size && wanted.at + len == wanted.size;
        if !both_end {
            len -= len % SECTOR;
        }
        let itself = given.is_none() && user.ino == wanted.ino;
        let sent = !itself || offset.checked_add(len).is_some_and(|end| end <= wanted.at);
        Ok((len > 0 && sent).then_some(Found { given, ino: user.ino, offset, len }))
    }
}

/// Bytes of a file.
#[derive(Clone, Copy, Debug)]
struct Span {
    offset: u64,
    len: u64,
}

/// How many bytes of a span a file has in the same extent, from the span's start on.
fn has_bytes(tree: &Frozen, user: ExtentUser, record: &ExtentRecord, span: Span) -> Result<u64> {
    let parts = tree.parts(user.ino, span.offset, 1)?;
    let Some(part) = parts.first().filter(|part| part.start <= span.offset) else { return Ok(0) };
    Ok(match &part.content {
        PartContent::Stored(r)
            if r.disk_bytenr == record.disk_bytenr
                && r.kind == ExtentKind::Regular
                && part.start.wrapping_sub(r.offset) == user.base =>
        {
            span.len.min(part.end - span.offset)
        }
        _ => 0,
    })
}

/// By what the receiver knows a subvolume: what it was received from, if it was.
pub(crate) fn name_of(tree: &Frozen) -> ([u8; 16], Generation) {
    let info = tree.info();
    let received = info.received_uuid != [0; 16];
    (if received { info.received_uuid } else { info.uuid }, info.ctransid)
}
