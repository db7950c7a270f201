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
use larder_volume::TransferMemory;
use std::io::IoSlice;
use std::sync::Arc;

/// Bytes that are copied at once.
const PIECE: u64 = 4 << 20;

/// Checksums, by the address of the first sector.
pub(crate) type Sums = Vec<(Logical, Vec<u8>)>;

/// Copies the bytes of extents to a new place, where they lie behind each other, by way of some
/// memory. Sectors with a checksum are verified. Returns the checksums for the new place. Where
/// there is parity, nothing else may lie in the rows of the new place.
///
/// # Errors
/// `Corrupt` for a sector that matches its checksum in no copy; the device.
pub(crate) fn copy_extents(
    core: &Core,
    extents: &[Run],
    to: Run,
    memory: &mut TransferMemory,
) -> Result<Sums> {
    let view = View::new(core);
    let stripes = core.space.groups.find(to.start).and_then(|group| group.stripes());
    let mut sums = Vec::new();
    let mut sources = Sources { extents, done: 0 };
    let mut at = to.start;
    while at < to.end() {
        let piece = Run::new(at, PIECE.min(to.end().0 - at.0));
        // All that lies in a row is written in one step.
        let piece = stripes.map_or(piece, |stripes| stripes.up_to_a_border(piece, to.end()));
        memory.resize(index(piece.len));
        while at < piece.end() {
            let source = sources.next(piece.end().0 - at.0);
            let found = view.pieces(core, source)?;
            let part = index(at.0 - piece.start.0)..index(at.0 - piece.start.0 + source.len);
            read::read_moving(core, &view, source, &found, &mut memory[part])?;
            let moved = |from: Logical| at.plus(from.0 - source.start.0);
            sums.extend(found.into_iter().map(|(from, sum)| (moved(from), sum)));
            at = at.plus(source.len);
        }
        let slices = [IoSlice::new(memory)];
        core.write_fresh(&[(piece.start, &slices[..])]).pop().unwrap_or(Ok(()))?;
        core.volume.start_writeback(piece.start, piece.len);
    }
    core.flushes.written();
    Ok(sums)
}

/// Extents that are read one after the other. Neighbours are read together.
struct Sources<'a> {
    extents: &'a [Run],
    /// Bytes of the first extent that were read.
    done: u64,
}

impl Sources<'_> {
    /// The next run to read, of so many bytes at most. The caller knows that something is left.
    fn next(&mut self, most: u64) -> Run {
        let mut run = Run::new(self.extents[0].start.plus(self.done), 0);
        while let Some(extent) = self.extents.first()
            && extent.start.plus(self.done) == run.end()
            && run.len < most
        {
            let some = (extent.len - self.done).min(most - run.len);
            run.len += some;
            self.done += some;
            if self.done == extent.len {
                (self.extents, self.done) = (&self.extents[1..], 0);
            }
        }
        run
    }
}

fn index(n: u64) -> usize {
    usize::try_from(n).expect("a few megabytes")
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
    let _extents = inode.lock_extents();
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
    inode.subvol.note_move();
    Ok(true)
}
