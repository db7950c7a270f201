//! SEEK_DATA and SEEK_HOLE.
//!
//! Data is what lies in extents or is delayed, in whole sectors. Preallocated extents without data
//! count as holes, as on Linux. The end of the file is a hole.

use super::extents::{ExtentCursor, ceil, floor};
use crate::api::{FileKind, Seek};
use crate::engine::{Core, Inode};
use crate::error::{Error, Result};
use larder_format::ObjectId;
use std::sync::Arc;

/// Finds the next data or hole at or after `offset`; `None` where there is none before the end of
/// the file.
///
/// # Errors
/// `Invalid` for anything but a regular file; reading, corruption, `WouldBlock`.
pub(crate) fn seek(
    core: &Core,
    inode: &Arc<Inode>,
    offset: u64,
    what: Seek,
) -> Result<Option<u64>> {
    if inode.kind != FileKind::Regular {
        return Err(Error::Invalid("only regular files have data and holes"));
    }
    let _op = super::lock_shared(inode)?;
    let size = inode.state.lock().size;
    if offset >= size {
        return Ok(None);
    }
    let mut at = offset;
    loop {
        // Delayed data is looked at first: it can only move from there into the extents.
        let delayed = inode.data.stretch(at).map(|r| (floor(r.start), ceil(r.end)));
        let version = inode.subvol.version(core);
        let mut stored = None;
        let mut cursor = ExtentCursor::new(&version, ObjectId(inode.id.ino), at)?;
        while let Some(extent) = cursor.next()? {
            if extent.content.is_data() {
                stored = Some((extent.start, extent.end));
                break;
            }
        }
        let next = delayed.into_iter().chain(stored).min();
        match (what, next) {
            (Seek::Data, Some((start, _))) if start.max(at) < size => {
                return Ok(Some(start.max(at)));
            }
            (Seek::Data, _) => return Ok(None),
            // Goes to the end of this stretch; another may follow directly.
            (Seek::Hole, Some((start, end))) if start <= at => {
                if end >= size {
                    return Ok(Some(size));
                }
                at = end;
            }
            (Seek::Hole, _) => return Ok(Some(at)),
        }
    }
}
