//! Memory for long transfers past the page cache.
//!
//! A device takes what lies together in memory as one piece. Of ordinary pages a transfer of a
//! mebibyte is 256 pieces, which a virtual disk may need twice as long for. So memory that lives
//! long, and is used for long transfers again and again, is in huge pages where the kernel has any.
//! The first use of such a page fills it with zeros, so this is nothing for memory that is used
//! once.
//!
//! A process that wants huge pages for nothing else gets them here nevertheless since Linux 6.18
//! (`larder_fuse::without_huge_pages`).

use super::aligned::ALIGN;
use memmap2::MmapMut;
use std::ops::{Deref, DerefMut};

/// A huge page.
const HUGE: usize = 2 << 20;

/// Zeros, aligned for direct transfers, which a transfer may overwrite.
#[derive(Debug)]
pub struct TransferMemory {
    bytes: Bytes,
    start: usize,
    len: usize,
}

#[derive(Debug)]
enum Bytes {
    /// Of its own, in huge pages if there are any.
    Huge(MmapMut),
    Heap(Vec<u8>),
}

impl TransferMemory {
    /// So many bytes. They take up room only once they are used.
    #[must_use]
    pub fn new(len: usize) -> Self {
        let mapped = if len < HUGE / 2 { None } else { mapped(len) };
        let (bytes, align) = match mapped {
            Some(mapped) => (Bytes::Huge(mapped), HUGE),
            None => (Bytes::Heap(vec![0; len + ALIGN]), ALIGN),
        };
        let at = bytes.all().as_ptr().addr();
        Self { bytes, start: at.next_multiple_of(align) - at, len }
    }

    /// Makes it so many bytes long, of which nothing is known then.
    pub fn resize(&mut self, len: usize) {
        if self.bytes.all().len() - self.start < len {
            *self = Self::new(len);
        }
        self.len = len;
    }
}

impl Default for TransferMemory {
    fn default() -> Self {
        Self::new(0)
    }
}

impl Deref for TransferMemory {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.bytes.all()[self.start..self.start + self.len]
    }
}

impl DerefMut for TransferMemory {
    fn deref_mut(&mut self) -> &mut [u8] {
        let bytes = match &mut self.bytes {
            Bytes::Huge(mapped) => &mut mapped[..],
            Bytes::Heap(bytes) => bytes,
        };
        &mut bytes[self.start..self.start + self.len]
    }
}

impl Bytes {
    fn all(&self) -> &[u8] {
        match self {
            Self::Huge(mapped) => mapped,
            Self::Heap(bytes) => bytes,
        }
    }
}

/// A mapping in which so many bytes lie in whole huge pages. `None`: the process may have no more
/// mappings, and the heap is asked.
fn mapped(len: usize) -> Option<MmapMut> {
    let mapped = MmapMut::map_anon(len.next_multiple_of(HUGE) + HUGE).ok()?;
    // Without huge pages it does as well.
    #[cfg(target_os = "linux")]
    let _ = mapped.advise(memmap2::Advice::HugePage);
    Some(mapped)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_aligned_and_as_long_as_it_was_asked_for() {
        for (len, align) in [(0, ALIGN), (4096, ALIGN), (HUGE / 2, HUGE), (3 * HUGE + 1, HUGE)] {
            let mut memory = TransferMemory::new(len);
            assert_eq!(memory.len(), len);
            assert!(memory.as_ptr().addr().is_multiple_of(align));
            assert!(memory.iter().all(|byte| *byte == 0));
            memory.fill(7);
        }
        let mut memory = TransferMemory::default();
        for len in [10, HUGE, 5, 2 * HUGE] {
            memory.resize(len);
            memory.fill(8);
            assert_eq!(memory.len(), len);
            assert!(memory.as_ptr().addr().is_multiple_of(ALIGN));
        }
    }
}
