//! Listing: READDIR and READDIRPLUS.

use super::{Server, kind_bits};
use crate::handler::{Failure, Outcome, Reply, Request};
use crate::perm;
use crate::proto::{self, EntryOut};
use crate::records::{Record, Records};
use larder_fs::{Error, FileKind, InodeId};

/// An entry, remembered until the engine is done listing.
struct Found {
    id: InodeId,
    kind: FileKind,
    next: u64,
    name: Vec<u8>,
}

impl Server {
    pub(super) fn readdir(
        &self,
        dir: InodeId,
        request: &Request<'_>,
        reply: &mut Reply<'_>,
    ) -> Outcome {
        let read: proto::ReadIn = request.arg()?;
        if read.offset == 0 {
            self.check(request, dir, perm::READ)?;
        }
        let mut records = Records::new(reply, read.size)?;
        let listed = self.fs.readdir_page(dir, read.offset, &mut |e| {
            let ino = self.me.nodes.ino(e.id);
            records.push(
                None,
                Record { ino, next: e.next, kind: kind_bits(e.kind) >> 12, name: e.name },
            )
        });
        done(listed, &records)
    }

    /// As READDIR, and each entry is looked up as well. The kernel counts a look-up for each but
    /// `.` and `..`.
    pub(super) fn readdirplus(
        &self,
        dir: InodeId,
        request: &Request<'_>,
        reply: &mut Reply<'_>,
    ) -> Outcome {
        let read: proto::ReadIn = request.arg()?;
        if read.offset == 0 {
            self.check(request, dir, perm::READ)?;
        }
        let mut records = Records::new(reply, read.size)?;
        let mut room = read.size as usize;
        let mut found = Vec::new();
        let listed = self.fs.readdir_page(dir, read.offset, &mut |e| {
            let Some(rest) = room.checked_sub(Records::record_len(e.name.len(), true)) else {
                return false;
            };
            room = rest;
            found.push(Found { id: e.id, kind: e.kind, next: e.next, name: e.name.to_vec() });
            true
        });
        if found.is_empty() {
            return done(listed, &records);
        }
        let mut handed_out = Vec::new();
        for e in found {
            // An entry without a node id is a plain record, and no look-up.
            let mut entry = EntryOut::default();
            let mut held = false;
            if e.name != b"." && e.name != b".." {
                match self.fs.getattr(e.id).and_then(|attr| self.hold(attr)) {
                    Ok(attr) => {
                        entry = self.entry_of(dir, &attr);
                        held = true;
                    }
                    // It was removed after it was listed.
                    Err(Error::NotFound) => continue,
                    // After a short answer the kernel would look the rest up one by one. A worker
                    // gives a full one.
                    Err(Error::WouldBlock) => {
                        handed_out.into_iter().for_each(|id| self.fs.release(id, 1));
                        return Err(Failure::Wait);
                    }
                    // A look-up will report the error; the others are listed.
                    Err(_) => {}
                }
            }
            let ino = self.me.nodes.ino(e.id);
            let record = Record { ino, next: e.next, kind: kind_bits(e.kind) >> 12, name: &e.name };
            let pushed = records.push(Some(&entry), record);
            if !pushed {
                if held {
                    self.fs.release(e.id, 1);
                }
                break;
            }
            handed_out.extend(held.then_some(e.id));
        }
        Ok(records.len())
    }
}

/// What was listed before an error is returned. The error comes again at the next call.
fn done(listed: larder_fs::Result<()>, records: &Records<'_>) -> Outcome {
    match listed {
        Err(e) if records.is_empty() => Err(e.into()),
        _ => Ok(records.len()),
    }
}
