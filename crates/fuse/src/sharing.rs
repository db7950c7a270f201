//! Sharing extents on a mount, for other processes. Linux does not pass its own requests for that
//! (`FICLONERANGE`, `FIDEDUPERANGE`) on to FUSE, so these are Larder's. Payloads are words of 8
//! bytes:
//!
//! - [`IOC_CLONE`], to the target: the source's descriptor, the offset in it, the length (0: to its
//!   end), the offset in the target.
//! - [`IOC_DEDUPE`], to the source: the target's descriptor, the offset in the source, the length,
//!   the offset in the target. The answer follows: 0 or, if they differ, 1; bytes; bytes that are
//!   shared only now.
//! - [`IOC_EXTENTS`]: an offset. The answer: where to go on (0: nowhere), how many extents follow,
//!   and of each where it begins in the file, its length there, its address, the length and offset
//!   in it, and flags.
//!
//! Plain `cp` needs none of this: `copy_file_range` shares what can be shared.

use crate::control::{LARDER, READ, TEXT_LEN, WRITE, call, ioc};
use larder_format::ids::Logical;
use larder_fs::{ExtentPlace, MappedExtent};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// Give a file the content of a range of another by sharing extents.
pub const IOC_CLONE: u32 = ioc(WRITE, LARDER, 18, 32);
/// Give a range of a file the extents of another that has the same bytes.
pub const IOC_DEDUPE: u32 = ioc(READ | WRITE, LARDER, 19, 56);

/// Where a file's extents are.
pub const IOC_EXTENTS: u32 = ioc(READ | WRITE, LARDER, 20, TEXT_LEN);
/// Words of an extent in the answer to [`IOC_EXTENTS`].
const WORDS: usize = 6;
/// Extents in an answer at most.
pub(crate) const MOST_EXTENTS: usize = (TEXT_LEN / 8 - 2) / WORDS;
const IN_LEAF: u64 = 1;
const WRITTEN: u64 = 2;
const COMPRESSED: u64 = 4;
const SHARED: u64 = 8;

/// An extent as words of an answer.
pub(crate) fn encode(extent: &MappedExtent) -> [u64; WORDS] {
    let flag = |is: bool, flag| if is { flag } else { 0 };
    match extent.place {
        ExtentPlace::Leaf => [extent.start, extent.len, 0, 0, 0, IN_LEAF],
        ExtentPlace::Device { at, len, offset, written, compressed, shared } => {
            let flags =
                flag(written, WRITTEN) | flag(compressed, COMPRESSED) | flag(shared, SHARED);
            [extent.start, extent.len, at.0, len, offset, flags]
        }
    }
}

fn decode([start, len, at, on_device, offset, flags]: [u64; WORDS]) -> MappedExtent {
    let has = |flag| flags & flag != 0;
    let place = if has(IN_LEAF) {
        ExtentPlace::Leaf
    } else {
        ExtentPlace::Device {
            at: Logical(at),
            len: on_device,
            offset,
            written: has(WRITTEN),
            compressed: has(COMPRESSED),
            shared: has(SHARED),
        }
    };
    MappedExtent { start, len, place }
}

/// Calls `each` for the extents of a file, by rising offset, holes left out.
///
/// # Errors
/// `Unsupported` if the file is not on a Larder mount; `PermissionDenied` if the caller may not
/// read it.
pub fn extents(file: &File, each: &mut dyn FnMut(&MappedExtent)) -> io::Result<()> {
    write_back_pages(file);
    let mut from = 0;
    let mut buffer = vec![0; TEXT_LEN];
    loop {
        buffer[..8].copy_from_slice(&u64::to_ne_bytes(from));
        call(file, IOC_EXTENTS, &mut buffer)?;
        let (next, count) = (word(&buffer, 0), word(&buffer, 1));
        for n in 0..usize::try_from(count).unwrap_or(0).min(MOST_EXTENTS) {
            each(&decode(std::array::from_fn(|w| word(&buffer, 2 + n * WORDS + w))));
        }
        if next <= from {
            return Ok(());
        }
        from = next;
    }
}

/// Is the file on a Larder mount?
#[must_use]
pub fn is_shareable(file: &File) -> bool {
    call(file, crate::control::IOC_DF, &mut vec![0; TEXT_LEN]).is_ok()
}

/// Has the kernel write the pages of a file that it keeps on a mount with write-back caching.
fn write_back_pages(file: &File) {
    const ALL: libc::c_uint = libc::SYNC_FILE_RANGE_WAIT_BEFORE
        | libc::SYNC_FILE_RANGE_WRITE
        | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    // SAFETY: takes numbers only. If a write fails, the next fsync reports it.
    unsafe { libc::sync_file_range(file.as_raw_fd(), 0, 0, ALL) };
}

fn words<const N: usize>(words: [u64; N]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_ne_bytes()).collect()
}

fn word(bytes: &[u8], n: usize) -> u64 {
    bytes[8 * n..].first_chunk().map_or(0, |b| u64::from_ne_bytes(*b))
}

/// A place in a file, where a range begins.
#[derive(Clone, Copy, Debug)]
pub struct FileAt<'a> {
    /// The file.
    pub file: &'a File,
    /// Offset in it, in bytes.
    pub offset: u64,
}

/// Gives `to` what `from` has in a range by sharing extents, as Linux's `FICLONERANGE`: offsets are
/// multiples of 4096, and so is `len` unless the range ends where both files do. `len` 0: up to the
/// source's end.
///
/// # Errors
/// `Unsupported` if `to` is not on a Larder mount, `CrossesDevices` if `from` is not on the same;
/// `InvalidInput` for ranges that cannot be shared; other errors of the engine. The first part of
/// the range may be done then.
pub fn clone(from: FileAt<'_>, to: FileAt<'_>, len: u64) -> io::Result<()> {
    write_back_pages(from.file);
    write_back_pages(to.file);
    let source = from.file.as_raw_fd().cast_unsigned().into();
    call(to.file, IOC_CLONE, &mut words([source, from.offset, len, to.offset]))?;
    let len = if len == 0 { from.file.metadata()?.len().saturating_sub(from.offset) } else { len };
    let end = to.offset.saturating_add(len);
    // With write-back caching the kernel believes only its own sizes.
    if len > 0 && to.file.metadata()?.len() < end { to.file.set_len(end) } else { Ok(()) }
}

/// Outcome of [`dedupe`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deduped {
    /// The ranges have the same bytes. This many bytes are shared only now.
    Same(u64),
    /// The ranges differ; nothing was changed.
    Differs,
}

/// Gives a range of `to` the extents of a range of `from` if both have the same bytes, as Linux's
/// `FIDEDUPERANGE`.
///
/// # Errors
/// As [`clone`]; `PermissionDenied` if the caller may not write to `to` and does not own it.
pub fn dedupe(from: FileAt<'_>, to: FileAt<'_>, len: u64) -> io::Result<Deduped> {
    write_back_pages(from.file);
    write_back_pages(to.file);
    let target = to.file.as_raw_fd().cast_unsigned().into();
    let mut args = words([target, from.offset, len, to.offset, 0, 0, 0]);
    call(from.file, IOC_DEDUPE, &mut args)?;
    Ok(if word(&args, 4) == 0 { Deduped::Same(word(&args, 6)) } else { Deduped::Differs })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extents_cross_as_they_are() {
        let device = |written, compressed, shared| ExtentPlace::Device {
            at: Logical(1 << 30),
            len: 8192,
            offset: 4096,
            written,
            compressed,
            shared,
        };
        for place in [
            ExtentPlace::Leaf,
            device(true, false, false),
            device(false, true, false),
            device(false, false, true),
        ] {
            let extent = MappedExtent { start: 12288, len: 4096, place };
            assert_eq!(decode(encode(&extent)), extent);
        }
    }

    #[test]
    fn other_file_systems_do_not_share() {
        let file = tempfile::tempfile().unwrap();
        assert!(!is_shareable(&file));
        assert_eq!(extents(&file, &mut |_| ()).unwrap_err().kind(), io::ErrorKind::Unsupported);
        let at = |offset| FileAt { file: &file, offset };
        assert!(clone(at(0), at(4096), 4096).is_err());
    }
}
