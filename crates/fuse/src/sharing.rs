//! Sharing extents on a mount, for other processes: Linux passes none of its own requests for that (`FICLONERANGE`,
//! `FIDEDUPERANGE`) on to FUSE, so these are Larder's.
//!
//! | request | number | words of 8 bytes |
//! |---|---|---|
//! | clone, to the target | [`IOC_CLONE`] | source's descriptor, offset in it, length (0: to its end), offset in the target |
//! | deduplicate, to the source | [`IOC_DEDUPE`] | target's descriptor, offset in the source, length, offset in the target; out: 0 or, where they differ, 1; bytes; bytes that are shared only now |
//!
//! Plain `cp` needs none of this: `copy_file_range` shares what can be shared.

use crate::control::{LARDER, READ, WRITE, call, ioc};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// Give a file the content of a range of another by sharing extents.
pub const IOC_CLONE: u32 = ioc(WRITE, LARDER, 18, 32);
/// Give a range of a file the extents of another that has the same bytes.
pub const IOC_DEDUPE: u32 = ioc(READ | WRITE, LARDER, 19, 56);

/// What the kernel keeps of a file, written by a mount with write-back caching, goes to the daemon.
fn hand_over(file: &File) {
    const ALL: libc::c_uint =
        libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    // SAFETY: takes numbers only. If it fails, the write that failed says so at the next fsync.
    unsafe { libc::sync_file_range(file.as_raw_fd(), 0, 0, ALL) };
}

fn words<const N: usize>(words: [u64; N]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_ne_bytes()).collect()
}

fn word(bytes: &[u8], n: usize) -> u64 {
    bytes[8 * n..].first_chunk().map_or(0, |b| u64::from_ne_bytes(*b))
}

/// Gives `to` what `from` has in a range by sharing extents, as Linux's `FICLONERANGE`: offsets are multiples of 4096, and so
/// is `len` unless the range ends where both files do. `len` 0: up to the source's end.
///
/// # Errors
/// `Unsupported` if `to` is not on a Larder mount, `CrossesDevices` if `from` is not on the same; `InvalidInput` for ranges
/// that cannot be shared; what the engine says otherwise. A first part of the range may be done then.
pub fn clone(from: &File, from_offset: u64, to: &File, to_offset: u64, len: u64) -> io::Result<()> {
    hand_over(from);
    hand_over(to);
    let source = from.as_raw_fd().cast_unsigned().into();
    call(to, IOC_CLONE, &mut words([source, from_offset, len, to_offset]))
}

/// What came of [`dedupe`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deduped {
    /// The ranges have the same bytes; so many had extents of their own before.
    Same(u64),
    /// They have not; nothing was changed.
    Differs,
}

/// Gives a range of `to` the extents of a range of `from` if both have the same bytes, as Linux's `FIDEDUPERANGE`.
///
/// # Errors
/// As [`clone`]; `PermissionDenied` for who may not write to `to` and does not own it.
pub fn dedupe(from: &File, from_offset: u64, to: &File, to_offset: u64, len: u64) -> io::Result<Deduped> {
    hand_over(from);
    hand_over(to);
    let target = to.as_raw_fd().cast_unsigned().into();
    let mut args = words([target, from_offset, len, to_offset, 0, 0, 0]);
    call(from, IOC_DEDUPE, &mut args)?;
    Ok(if word(&args, 4) == 0 { Deduped::Same(word(&args, 6)) } else { Deduped::Differs })
}
