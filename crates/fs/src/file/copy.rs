//! Copying a range: whole sectors share their extents where that is possible, and other bytes are
//! read and written.

use super::clone::{self, clone_range};
use super::dirty::index;
use super::position::Position;
use crate::engine::Core;
use crate::error::{Error, Result};

/// Bytes that a copy holds in memory.
const COPY_PIECE: u64 = 1 << 20;

/// Copies a range. Returns the bytes that were copied: 0 at the source's end.
///
/// # Errors
/// `Invalid` for ranges of one file that overlap; the errors of reading and writing, when nothing
/// was copied.
pub(crate) fn copy_range(
    core: &Core,
    from: Position<'_>,
    to: Position<'_>,
    len: u64,
) -> Result<u64> {
    super::expect_regular(from.inode)?;
    super::expect_regular(to.inode)?;
    // Checked even if there is nothing to copy: a file there cannot even be opened for writing.
    to.inode.check_changeable(core)?;
    let size = from.inode.state.lock().size;
    let len = len.min(size.saturating_sub(from.offset));
    if len == 0 {
        return Ok(0);
    }
    let end = to.offset.checked_add(len).ok_or(Error::FileTooBig)?;
    if from.is_in_file_of(to) && from.offset < end && to.offset < from.offset + len {
        return Err(Error::Invalid("the ranges overlap"));
    }
    let mut copy = Copy { core, from, to, done: 0 };
    match copy.run(len) {
        Err(e) if copy.done == 0 => Err(e),
        _ => Ok(copy.done),
    }
}

/// A copy under way.
struct Copy<'a> {
    core: &'a Core,
    from: Position<'a>,
    to: Position<'a>,
    /// Bytes that are copied.
    done: u64,
}

impl Copy<'_> {
    fn run(&mut self, len: u64) -> Result<()> {
        if let Some(part) = clone::part(self.core, self.from, self.to, len) {
            self.bytes_up_to(part.skip)?;
            if self.done < part.skip {
                return Ok(());
            }
            let (from, to) = (self.from.plus(part.skip), self.to.plus(part.skip));
            match clone_range(self.core, from, to, part.len) {
                Ok(n) => self.done += n,
                // A size or a flag has changed since: bytes can be copied all the same.
                Err(Error::Invalid(_)) => {}
                Err(e) => return Err(e),
            }
        }
        self.bytes_up_to(len)
    }
    /// Copies bytes until `len` of the range are copied. Ends early at the source's end.
    fn bytes_up_to(&mut self, len: u64) -> Result<()> {
        let mut buf = vec![0; index((len - self.done).min(COPY_PIECE))];
        while self.done < len {
            let want = index((len - self.done).min(COPY_PIECE));
            let (from, to) = (self.from.plus(self.done), self.to.plus(self.done));
            let n = super::read(self.core, from.inode, from.offset, &mut buf[..want])?;
            if n == 0 {
                break;
            }
            super::write(self.core, to.inode, to.offset, &buf[..n])?;
            self.done += n as u64;
        }
        Ok(())
    }
}
