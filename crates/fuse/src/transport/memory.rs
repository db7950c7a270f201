//! The memory that ring entries share with the kernel.
//!
//! Every entry is a page for its header and a megabyte for its payload. All are mapped once per
//! queue, and touched only as far as requests need it. A [`RingEntry`] owns its part; while the
//! kernel has it, no other code does.

use crate::proto::init::MAX_WRITE;
use crate::proto::{InHeader, OutHeader, RingEntryInOut};
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;
use zerocopy::{FromBytes, IntoBytes};

/// Bytes of the header that the kernel shares: request or reply head, operation header, ring
/// header.
const HEADER_SIZE: usize = 288;
/// Offset of the operation header.
const ARG_AT: usize = 128;
/// Offset of the ring header.
const RING_AT: usize = 256;
/// A page, for alignment.
const HEADER_ROOM: usize = 4096;
/// Bytes of an entry's payload.
pub(super) const PAYLOAD: usize = MAX_WRITE as usize;

/// A mapping; unmapped when its last entry is gone.
struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is plain memory. `RingEntry` governs the access to its part, and there is one
// for each part.
unsafe impl Send for Mapping {}
// SAFETY: as above; the struct itself gives no access.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `entries` with this length, and no entry is left.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// One ring entry's memory.
pub(super) struct RingEntry {
    header: NonNull<u8>,
    payload: NonNull<u8>,
    /// Header and payload, as REGISTER passes them.
    iovecs: Box<[libc::iovec; 2]>,
    /// Slot in the queue, and user data of its submissions.
    pub(super) index: usize,
    /// Number of the request that the entry carries.
    pub(super) commit_id: u64,
    /// No request has been fetched yet.
    pub(super) registering: bool,
    /// Bytes of the payload that may be in memory.
    touched: usize,
    /// Bytes of the last reply.
    replied: usize,
    _mapping: Arc<Mapping>,
}

// SAFETY: the pointers lead to a part of the mapping that this entry alone uses.
unsafe impl Send for RingEntry {}

/// Maps memory for `count` entries.
pub(super) fn entries(count: usize) -> io::Result<Vec<RingEntry>> {
    let stride = HEADER_ROOM + PAYLOAD;
    let len = count * stride;
    // SAFETY: a new anonymous mapping; nothing existing is touched.
    let start = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let Some(start) = NonNull::new(start.cast::<u8>()) else {
        return Err(io::Error::other("mapped at address zero"));
    };
    let mapping = Arc::new(Mapping { start, len });
    Ok((0..count)
        .map(|index| {
            // SAFETY: index < count, so both lie within the mapping.
            let (header, payload) =
                unsafe { (start.add(index * stride), start.add(index * stride + HEADER_ROOM)) };
            RingEntry {
                header,
                payload,
                iovecs: Box::new([
                    libc::iovec { iov_base: header.as_ptr().cast(), iov_len: HEADER_SIZE },
                    libc::iovec { iov_base: payload.as_ptr().cast(), iov_len: PAYLOAD },
                ]),
                index,
                commit_id: 0,
                registering: true,
                touched: 0,
                replied: 0,
                _mapping: Arc::clone(&mapping),
            }
        })
        .collect())
}

impl RingEntry {
    /// Address of the iovec pair, for REGISTER. Valid as long as the entry lives.
    pub(super) fn iovecs_address(&self) -> u64 {
        self.iovecs.as_ptr().expose_provenance() as u64
    }

    fn header(&self) -> &[u8] {
        // SAFETY: 288 bytes of this entry's own page; the kernel writes only while it has the
        // entry, when no method is called.
        unsafe { std::slice::from_raw_parts(self.header.as_ptr(), HEADER_SIZE) }
    }
    fn header_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `header`, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.header.as_ptr(), HEADER_SIZE) }
    }
    /// The payload: names and data of the request, data of the reply.
    pub(super) fn payload(&self) -> &[u8] {
        // SAFETY: the payload part of this entry; see `header`.
        unsafe { std::slice::from_raw_parts(self.payload.as_ptr(), PAYLOAD) }
    }
    /// The payload, for the reply.
    pub(super) fn payload_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `payload`, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.payload.as_ptr(), PAYLOAD) }
    }

    /// Head of the request that arrived, and how many bytes of payload it has.
    pub(super) fn fetched(&mut self) -> (InHeader, usize) {
        let read = |bytes: &[u8]| {
            RingEntryInOut::read_from_prefix(bytes).map(|(v, _)| v).unwrap_or_default()
        };
        let ring = read(&self.header()[RING_AT..]);
        self.commit_id = ring.commit_id;
        self.registering = false;
        let head = InHeader::read_from_prefix(self.header()).map(|(v, _)| v).unwrap_or_default();
        let len = (ring.payload_size as usize).min(PAYLOAD);
        self.touched = self.touched.max(len);
        (head, len)
    }
    /// Gives the payload's memory back, except its first `keep` bytes and the reply.
    pub(super) fn forget_beyond(&mut self, keep: usize) {
        let keep = keep.max(self.replied).next_multiple_of(HEADER_ROOM);
        if self.touched <= keep {
            return;
        }
        // SAFETY: pages of this entry's own payload, behind what the kernel will read of it. No
        // other code uses them, and they read as zeros from then on.
        unsafe {
            libc::madvise(
                self.payload.as_ptr().add(keep).cast(),
                self.touched - keep,
                libc::MADV_DONTNEED,
            )
        };
        self.touched = keep;
    }
    /// The fixed structure of the request, `len` bytes.
    pub(super) fn arg(&self, len: usize) -> &[u8] {
        &self.header()[ARG_AT..ARG_AT + len.min(RING_AT - ARG_AT)]
    }
    /// Fills in the reply's head: `len` bytes of payload or an errno (positive).
    pub(super) fn answer(&mut self, unique: u64, outcome: Result<usize, i32>) {
        let (error, len) = match outcome {
            Ok(len) => (0, len),
            Err(e) => (-e, 0),
        };
        self.replied = len;
        self.touched = self.touched.max(len);
        let head = OutHeader { len: (size_of::<OutHeader>() + len) as u32, error, unique };
        let at = RING_AT + std::mem::offset_of!(RingEntryInOut, payload_size);
        let header = self.header_mut();
        header[..size_of::<OutHeader>()].copy_from_slice(head.as_bytes());
        header[at..at + 4].copy_from_slice(&(len as u32).to_ne_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_back_is_not_the_reply() {
        let mut e = entries(1).unwrap().pop().unwrap();
        e.payload_mut().fill(7);
        e.answer(1, Ok(PAYLOAD));
        e.forget_beyond(4096);
        assert!(e.payload().iter().all(|b| *b == 7), "all of it is the reply");
        e.answer(2, Ok(100_000));
        e.forget_beyond(4096);
        assert!(e.payload()[..100_000].iter().all(|b| *b == 7));
        assert!(e.payload()[102_400..].iter().all(|b| *b == 0), "gone");
        e.answer(3, Err(5));
        e.forget_beyond(8192);
        assert!(e.payload()[..8192].iter().all(|b| *b == 7) && e.payload()[8192] == 0);
    }

    #[test]
    fn entries_do_not_overlap_and_outlive_each_other() {
        let mut all = entries(3).unwrap();
        for (i, e) in all.iter_mut().enumerate() {
            e.payload_mut().fill(i as u8 + 1);
            e.answer(i as u64, Ok(5));
        }
        let last = all.pop().unwrap();
        drop(all);
        assert!(last.payload().iter().all(|b| *b == 3));
        let (head, _) = OutHeader::read_from_prefix(last.header()).unwrap();
        assert_eq!((head.len, head.error, head.unique), (21, 0, 2));
    }

    #[test]
    fn a_request_is_taken_apart() {
        let mut e = entries(1).unwrap().pop().unwrap();
        let head = InHeader { opcode: 16, unique: 9, nodeid: 5, ..InHeader::default() };
        let ring =
            RingEntryInOut { commit_id: 77, payload_size: u32::MAX, ..RingEntryInOut::default() };
        e.header_mut()[..40].copy_from_slice(head.as_bytes());
        e.header_mut()[128..132].copy_from_slice(&[1, 2, 3, 4]);
        e.header_mut()[256..].copy_from_slice(ring.as_bytes());
        let (got, len) = e.fetched();
        assert_eq!((got.opcode, got.nodeid, e.commit_id, len), (16, 5, 77, PAYLOAD));
        assert_eq!(e.arg(4), [1, 2, 3, 4]);
        assert_eq!(e.arg(4096).len(), 128);
        e.answer(9, Err(5));
        let (head, _) = OutHeader::read_from_prefix(e.header()).unwrap();
        assert_eq!((head.len, head.error), (16, -5));
    }
}
