//! How logged extents and checksums become those of files.
//!
//! An extent that the log has of a file replaces what the file has in its range. Checksums come
//! with it for the part that the file uses.

use super::inodes::Replay;
use super::logged_data::{Delta, RefChange};
use crate::error::{Error, Place, Result};
use crate::file::{MAX_FILE_SIZE, SECTOR, has_no_holes, property};
use crate::space::{Run, csum_tree};
use larder_format::items::keys::extent_data_key;
use larder_format::items::{Compression, ExtentKind, ExtentRecord, FileExtent, InodeFlags};
use larder_format::{FileOffset, Key, Logical, ObjectId};
use std::ops::Range;

/// Parses an extent item, with the checks that replaying needs, and returns where its range ends.
fn parse(key: Key, data: &[u8]) -> larder_format::FormatResult<(FileExtent<'_>, u64)> {
    let bad = |what: &str| larder_format::FormatError::new(what);
    let extent = FileExtent::parse(data)?;
    let start = key.offset;
    if !start.is_multiple_of(SECTOR) {
        return Err(bad("file extent does not begin at a sector"));
    }
    let len = match &extent {
        FileExtent::Inline(i) if start == 0 => i.ram_bytes.max(1).checked_next_multiple_of(SECTOR),
        FileExtent::Inline(_) => return Err(bad("inline extent is not at the start of its file")),
        FileExtent::Stored(r) => Some(r.num_bytes),
    };
    let end = len.and_then(|len| start.checked_add(len)).filter(|end| *end <= MAX_FILE_SIZE + 1);
    Ok((extent, end.ok_or_else(|| bad("file extent leaves the range of files"))?))
}

impl Replay<'_> {
    /// Removes a range of a file, in whole sectors.
    pub(super) fn cut(&mut self, ino: ObjectId, range: Range<u64>) -> Result<()> {
        let (start, end) = (range.start, range.end);
        let key = |at: u64| extent_data_key(ino, FileOffset(at));
        let before = self.tree.last(key(0), key(start))?;
        let mut next = Some(before.map_or(key(start), |(key, _)| key));
        let last = key(end - 1);
        let (mut freed, mut refs) = (0u64, Vec::new());
        while let Some((at, data)) = match next {
            Some(from) if from <= last => self.tree.first(from, last)?,
            _ => None,
        } {
            next = at.successor();
            let (extent, to) = parse(at, &data).map_err(|e| self.corrupt(at, e))?;
            let from = at.offset;
            if to <= start {
                continue;
            }
            self.tree.remove(at);
            let r = match extent {
                FileExtent::Inline(i) if start <= from && to <= end => {
                    freed += i.ram_bytes;
                    continue;
                }
                FileExtent::Inline(_) => {
                    let place = Place::item(self.subvol.id, at);
                    return Err(Error::corrupt(place, "inline extent is longer than a sector"));
                }
                FileExtent::Stored(r) => r,
            };
            let (left, right) = (from < start, to > end);
            if left {
                self.tree.set(at, r.part(0..start - from).encode().to_vec());
            }
            if right {
                self.tree.set(key(end), r.part(end - from..to - from).encode().to_vec());
            }
            if r.is_hole() {
                continue;
            }
            freed += to.min(end) - from.max(start);
            match (left, right) {
                (false, false) => refs.push(RefChange::new(ino, from, &r, Delta::Drop)),
                (true, true) => refs.push(RefChange::new(ino, from, &r, Delta::Add)),
                _ => {}
            }
        }
        if freed > 0 || !refs.is_empty() {
            self.refs.append(&mut refs);
            self.change(ino, |item| item.nbytes = item.nbytes.get().saturating_sub(freed).into())?;
        }
        Ok(())
    }

    /// Replays an extent that the log has of a file.
    pub(super) fn replay_extent(&mut self, key: Key, data: &[u8]) -> Result<()> {
        let ino = key.objectid;
        let (extent, end) = parse(key, data).map_err(|e| self.damaged(key, e))?;
        if matches!(extent, FileExtent::Stored(_)) && self.tree.get(&key)?.as_deref() == Some(data)
        {
            return Ok(());
        }
        self.cut(ino, key.offset..end)?;
        let (bytes, compression) = match &extent {
            FileExtent::Inline(i) => (i.ram_bytes, i.compression),
            FileExtent::Stored(r) if r.is_hole() => {
                if !has_no_holes(self.core) {
                    self.tree.set(key, data.to_vec());
                }
                return Ok(());
            }
            FileExtent::Stored(r) => {
                let run = Run::new(r.disk_bytenr, r.disk_num_bytes);
                let new = self.claims.claim(self.core, run)?;
                let delta = if new { Delta::Create } else { Delta::Add };
                self.refs.push(RefChange::new(ino, key.offset, r, delta));
                if r.kind == ExtentKind::Regular {
                    self.take_sums(ino, key, r)?;
                }
                (r.num_bytes, r.compression)
            }
        };
        self.incompat |= property::incompat(compression).bits();
        self.tree.set(key, data.to_vec());
        self.change(ino, |item| item.nbytes = item.nbytes.get().saturating_add(bytes).into())
    }

    /// Takes the checksums of an extent's data from the log: for the part that the file uses, or
    /// for all of it if it is compressed.
    fn take_sums(&mut self, ino: ObjectId, key: Key, r: &ExtentRecord) -> Result<()> {
        let flags = self.inode(ino)?.map(|k| k.item.inode_flags()).unwrap_or_default();
        if flags.contains(InodeFlags::NODATASUM) {
            return Ok(());
        }
        let whole = Run::new(r.disk_bytenr, r.disk_num_bytes);
        let run = if r.compression == Compression::None {
            let start = r.disk_bytenr.0.checked_add(r.offset).map(Logical);
            let part = start.map(|start| Run { start, len: r.num_bytes }).filter(|part| {
                part.start.0.checked_add(part.len).is_some_and(|end| end <= whole.end().0)
            });
            part.ok_or_else(|| self.damaged(key, "file extent reaches out of its extent"))?
        } else {
            whole
        };
        let mut log = self.log.clone();
        let sums = &mut self.sums.0;
        csum_tree::read(&mut log, self.core.csum, run, &mut |at, sum| {
            if let Some(sum) = sum {
                sums.insert(at, sum.to_vec());
            }
        })
    }
}
