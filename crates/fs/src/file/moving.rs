//! Moving extents of files to another place, for a relocation.
//!
//! An extent is copied as it lies on the device, packed or not, with the checksums that it has. Its
//! block group is frozen, so nothing changes the bytes or the checksums meanwhile. Then every item
//! that refers to the extent is made to refer to the copy. Nothing else in the item changes, and
//! nothing in the inode: for a reader of the file nothing has happened.

use super::extents::{Content, Extent, SECTOR};
use super::read;
use super::sums::View;
use crate::engine::{Core, Inode};
use crate::error::Result;
use crate::space::Run;
use crate::transaction::Handle;
use larder_format::items::{ExtentRecord, ExtentRef};
use larder_format::{FileOffset, Key, Logical};
use std::io::IoSlice;
use std::sync::Arc;

/// Bytes that are copied at once.
const PIECE: u64 = 4 << 20;

/// Checksums, by the address of the first sector.
pub(crate) type Sums = Vec<(Logical, Vec<u8>)>;

/// Copies the bytes of an extent to another place. Sectors with a checksum are verified. Returns
/// the checksums for the new place.
///
/// # Errors
/// `Corrupt` for a sector that matches its checksum in no copy; the device.
pub(crate) fn copy_extent(core: &Core, from: Run, to: Logical) -> Result<Sums> {
    let view = View::new(core);
    let mut sums = Vec::new();
    let mut done = 0;
    while done < from.len {
        let piece = Run::new(from.start.plus(done), PIECE.min(from.len - done));
        let found = view.pieces(core, piece)?;
        let mut bytes = vec![0; usize::try_from(piece.len).expect("a few megabytes")];
        read::read_moving(core, &view, piece, &found, &mut bytes)?;
        core.volume.write_vectored(to.plus(done), &[IoSlice::new(&bytes)])?;
        let moved = |at: Logical| to.plus(at.0 - from.start.0);
        sums.extend(found.into_iter().map(|(at, sum)| (moved(at), sum)));
        done += piece.len;
    }
    core.volume.start_writeback(to, from.len);
    Ok(sums)
}

/// Makes an item refer to the copy of its extent at `to`, if it still refers to the extent. Returns
/// whether it did.
///
/// # Errors
/// Reading, corruption, no space; `NotFound` for a subvolume that was deleted. Nothing has changed
/// then.
pub(crate) fn point_to(
    core: &Core,
    h: &mut Handle<'_>,
    inode: &Arc<Inode>,
    key: &Key,
    from: Run,
    to: Logical,
) -> Result<bool> {
    let _extents = inode.data.lock_extents();
    let Some(item) = inode.subvol.get(core, key)? else { return Ok(false) };
    let Content::Stored(record) = Extent::parse(inode.id.subvol, item)?.content else {
        return Ok(false);
    };
    if record.disk_bytenr != from.start || record.disk_num_bytes != from.len {
        return Ok(false);
    }
    debug_assert!(from.len.is_multiple_of(SECTOR));
    let (tree, ino) = (inode.id.subvol, inode.object());
    let user = ExtentRef::data(tree, ino, FileOffset(key.offset), record.offset);
    let copy = Run::new(to, from.len);
    h.add_data_ref(copy, user)?;
    if let Err(e) = h.drop_data_ref(from, user) {
        h.drop_data_ref(copy, user)?;
        return Err(e);
    }
    let moved = ExtentRecord { disk_bytenr: to, ..record }.encode();
    let edited = h.edit_unnoticed(&inode.subvol, key, |e| e.update(key, &moved));
    if let Err(e) = edited {
        h.add_data_ref(from, user)?;
        h.drop_data_ref(copy, user)?;
        return Err(e);
    }
    Ok(true)
}
