//! `FIDEDUPERANGE`, which no library has.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;

const FIDEDUPERANGE: libc::c_ulong = 0xc018_9436;

/// `struct file_dedupe_range` of the kernel's interface with one `struct file_dedupe_range_info`.
#[repr(C)]
#[derive(Default)]
struct Request {
    src_offset: u64,
    src_length: u64,
    dest_count: u16,
    reserved: [u16; 3],
    dest_fd: i64,
    dest_offset: u64,
    bytes_deduped: u64,
    status: i32,
    reserved2: u32,
}

const _: () = assert!(size_of::<Request>() == 24 + 32);

/// Asks the kernel to let the range at `at` of `to` share the extents of a range of `from`. Returns
/// how many bytes share, or `None` if the ranges differ.
///
/// # Errors
/// What the file system says, for the call or for the range.
pub fn dedupe_range(from: &File, range: Range<u64>, to: &File, at: u64) -> io::Result<Option<u64>> {
    let mut request = Request {
        src_offset: range.start,
        src_length: range.end - range.start,
        dest_count: 1,
        dest_fd: to.as_raw_fd().into(),
        dest_offset: at,
        ..Request::default()
    };
    // SAFETY: the structure is what FIDEDUPERANGE takes with one target, and outlives the call.
    if unsafe { libc::ioctl(from.as_raw_fd(), FIDEDUPERANGE, &raw mut request) } != 0 {
        return Err(io::Error::last_os_error());
    }
    match request.status {
        0 => Ok(Some(request.bytes_deduped)),
        1.. => Ok(None),
        error => Err(io::Error::from_raw_os_error(-error)),
    }
}
