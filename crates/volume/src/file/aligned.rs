//! Memory and places as direct I/O wants them: whole blocks, in memory that is aligned to blocks.

use std::cell::RefCell;
use std::io::{self, IoSlice};

/// Alignment that direct transfers are given: address, length and memory.
pub(super) const ALIGN: usize = 4096;
/// Largest piece that is moved through the bounce buffer at once.
pub(super) const BOUNCE: usize = 1 << 20;

/// Are these whole blocks of the device?
pub(super) fn is_aligned(at: u64, len: usize) -> bool {
    at.is_multiple_of(ALIGN as u64) && len.is_multiple_of(ALIGN)
}

pub(super) fn is_aligned_memory(buf: &[u8]) -> bool {
    buf.as_ptr().addr().is_multiple_of(ALIGN)
}

/// Lends an aligned buffer of `len` bytes (a multiple of the alignment, at most [`BOUNCE`]) that
/// belongs to the thread.
pub(super) fn with_bounce<T>(
    len: usize,
    f: impl FnOnce(&mut [u8]) -> io::Result<T>,
) -> io::Result<T> {
    thread_local! {
        static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    }
    debug_assert!(len <= BOUNCE && len.is_multiple_of(ALIGN));
    if len == 0 {
        return f(&mut []);
    }
    BUFFER.with_borrow_mut(|buffer| {
        if buffer.len() < len + ALIGN {
            *buffer = vec![0; len + ALIGN];
        }
        let start = buffer.as_ptr().addr().next_multiple_of(ALIGN) - buffer.as_ptr().addr();
        f(&mut buffer[start..start + len])
    })
}

/// Bytes of several buffers, one after the other.
pub(super) struct Gather<'a> {
    left: std::slice::Iter<'a, IoSlice<'a>>,
    rest: &'a [u8],
}

impl<'a> Gather<'a> {
    pub(super) fn new(data: &'a [IoSlice<'a>]) -> Self {
        Self { left: data.iter(), rest: &[] }
    }
    /// Leaves out the next `bytes`.
    pub(super) fn skip(&mut self, mut bytes: usize) {
        while bytes > 0 {
            if self.rest.is_empty() {
                let Some(next) = self.left.next() else { break };
                self.rest = next;
            }
            let n = self.rest.len().min(bytes);
            (bytes, self.rest) = (bytes - n, &self.rest[n..]);
        }
    }
    /// Fills `buf` as far as there are bytes; how many there were.
    pub(super) fn take(&mut self, buf: &mut [u8]) -> usize {
        let mut filled = 0;
        while filled < buf.len() {
            if self.rest.is_empty() {
                let Some(next) = self.left.next() else { break };
                self.rest = next;
            }
            let n = self.rest.len().min(buf.len() - filled);
            let (now, later) = self.rest.split_at(n);
            buf[filled..filled + n].copy_from_slice(now);
            (filled, self.rest) = (filled + n, later);
        }
        filled
    }
}
