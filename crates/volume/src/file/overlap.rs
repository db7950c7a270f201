//! Transfers of several devices that are on their way together.
//!
//! What several devices have to do goes to one ring of the kernel, and its caller waits for all of
//! that at once. So all of them work at the same time. It takes no further thread, and one system
//! call as a rule.
//!
//! The kernel fills the caller's memory, and what it writes lies in memory of the batch. Whatever
//! happens, a batch does not end before all of its transfers have: [`OnTheirWay`] waits for them
//! when it is dropped.
//!
//! Rings are made when a volume is opened, because a confined daemon can make none later. None of
//! them is made for one device. So a device that joins a file system in use is as fast as the
//! others. A ring can do to open files what a confined daemon can do with system calls as well:
//! read, write, flush.
//!
//! The memory does not depend on how many devices there are: [`RINGS`] batches of [`SHORT`] bytes,
//! and [`LONG_BATCHES`] of [`LONG`] bytes, 24 MiB together. Beside them each device has what
//! [`super::batch`] says.

mod memory;

use super::aligned::{Gather, is_aligned, is_aligned_memory};
use crate::device::{Read, Write};
use io_uring::register::Restriction;
use io_uring::squeue::Entry;
use io_uring::types::{Fd, FsyncFlags};
use io_uring::{IoUring, opcode};
use larder_format::Physical;
use memory::{Lent, Memory};
use parking_lot::Mutex;
use std::fs::File;
use std::io;
use std::ops::RangeInclusive;
use std::os::fd::AsRawFd;

/// Batches that can be on their way at once.
const RINGS: usize = 16;
/// Transfers of a batch that can be on their way at once.
const ENTRIES: usize = 64;
/// Memory of a ring for what it writes.
const SHORT: usize = 512 << 10;
/// Memory of a batch that writes more, and how many of these can be on their way at once. A further
/// one makes do with that of its ring.
const LONG: usize = 4 << 20;
const LONG_BATCHES: usize = 4;
/// Bytes of a transfer at most, for writes.
const PIECE: usize = 256 << 10;

/// A ring, and memory for what it writes.
struct Ring {
    ring: IoUring,
    memory: Memory,
}

/// Rings for the transfers of several files.
#[derive(Default)]
pub(crate) struct Rings {
    rings: Mutex<Vec<Ring>>,
    long: Mutex<Vec<Memory>>,
}

impl std::fmt::Debug for Rings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Rings").field(&self.rings.lock().len()).finish()
    }
}

/// How a transfer ended.
#[derive(Debug, Default)]
pub(crate) enum Ended {
    /// All of it was done.
    #[default]
    Whole,
    /// It was interrupted, and has to be done again.
    InPart,
    Failed(io::Error),
}

impl Ended {
    fn of(result: i32, len: u64) -> Self {
        match usize::try_from(result) {
            Ok(done) if done as u64 == len => Self::Whole,
            Ok(_) => Self::InPart,
            Err(_) if matches!(-result, libc::EINTR | libc::EAGAIN) => Self::InPart,
            Err(_) => Self::Failed(io::Error::from_raw_os_error(-result)),
        }
    }
    /// Another part of the same has ended so. An error counts most.
    fn join(&mut self, result: i32, len: u64) {
        match Self::of(result, len) {
            Self::Whole => {}
            Self::InPart if matches!(self, Self::Failed(_)) => {}
            worse => *self = worse,
        }
    }
}

impl Rings {
    /// Makes the rings.
    ///
    /// # Errors
    /// The kernel has no io_uring, or does not let this process use it.
    pub(crate) fn make(&self) -> io::Result<()> {
        let rings = (0..RINGS).map(|_| Ring::new()).collect::<io::Result<_>>()?;
        *self.rings.lock() = rings;
        *self.long.lock() = (0..LONG_BATCHES).map(|_| Memory::new(LONG)).collect();
        Ok(())
    }

    fn begin(&self, bytes: usize) -> Option<OnTheirWay<'_>> {
        let ring = self.rings.lock().pop()?;
        let long = if bytes > SHORT { self.long.lock().pop() } else { None };
        Some(OnTheirWay { home: self, ring: Some(ring), long, left: 0, pieces: Vec::new() })
    }

    /// Has each file read its share, and calls `meanwhile` while that goes on; for each read how it
    /// ended. `None`, and nothing is done, while every ring is in use.
    pub(crate) fn read(
        &self,
        shares: &mut [(&File, &mut [Read<'_>])],
        meanwhile: Option<&mut dyn FnMut()>,
    ) -> Option<Vec<Vec<Ended>>> {
        let mut batch = self.begin(0)?;
        let most = shares.iter().map(|(_, reads)| reads.len()).max().unwrap_or(0);
        for n in 0..most {
            for (file, reads) in &mut *shares {
                if let Some(read) = reads.get_mut(n) {
                    batch.push(entry_of(file, read), None);
                }
            }
        }
        batch.end(meanwhile);
        let mut ended: Vec<Vec<Ended>> = shares.iter().map(|_| Vec::new()).collect();
        let mut results = batch.pieces.iter();
        for n in 0..most {
            for ((_, reads), ended) in shares.iter().zip(&mut ended) {
                if let Some(read) = reads.get(n) {
                    let piece = results.next().expect("all were pushed");
                    ended.push(Ended::of(piece.result, read.len()));
                }
            }
        }
        Some(ended)
    }

    /// Has each file write its share, and calls `meanwhile` while that goes on; for each write how
    /// it ended. `None`, and nothing is done, while every ring is in use.
    pub(crate) fn write(
        &self,
        shares: &[(&File, &[Write<'_>])],
        meanwhile: Option<&mut dyn FnMut()>,
    ) -> Option<Vec<Vec<Ended>>> {
        let cuts: Vec<Vec<Cut>> = shares.iter().map(|(_, writes)| cut(writes)).collect();
        let bytes = cuts.iter().flatten().map(|cut| cut.len).sum();
        let mut batch = self.begin(bytes)?;
        let mut order = Vec::new();
        // In turn, so that all of them have something to do from the start.
        for n in 0..cuts.iter().map(Vec::len).max().unwrap_or(0) {
            for (share, (file, writes)) in shares.iter().enumerate() {
                if let Some(cut) = cuts[share].get(n) {
                    batch.push_write(file, writes, cut);
                    order.push((share, cut));
                }
            }
            if bytes > SHORT {
                batch.submit(0);
            }
        }
        batch.end(meanwhile);
        let mut ended: Vec<Vec<Ended>> = Vec::with_capacity(shares.len());
        ended
            .extend(shares.iter().map(|(_, writes)| writes.iter().map(|_| Ended::Whole).collect()));
        for ((share, cut), piece) in order.into_iter().zip(&batch.pieces) {
            for ended in &mut ended[share][cut.writes.clone()] {
                ended.join(piece.result, cut.len as u64);
            }
        }
        Some(ended)
    }

    /// Makes durable what was written to each file, and calls `meanwhile` while that goes on.
    /// `None`, and nothing is done, while every ring is in use.
    pub(crate) fn flush(
        &self,
        files: &[&File],
        meanwhile: Option<&mut dyn FnMut()>,
    ) -> Option<Vec<io::Result<()>>> {
        let mut batch = self.begin(0)?;
        for file in files {
            let entry = opcode::Fsync::new(Fd(file.as_raw_fd())).flags(FsyncFlags::DATASYNC);
            batch.push(entry.build(), None);
        }
        batch.end(meanwhile);
        // It is not tried again, whatever the error.
        let ended = |piece: &Piece| match piece.result {
            0 => Ok(()),
            error => Err(io::Error::from_raw_os_error(-error)),
        };
        Some(batch.pieces.iter().map(ended).collect())
    }
}

/// Can a read be done past the page cache: whole blocks, in memory that is aligned to blocks?
pub(super) fn fits(read: &Read<'_>) -> bool {
    let whole = |buf: &io::IoSliceMut<'_>| is_aligned_memory(buf) && is_aligned(0, buf.len());
    is_aligned(read.at.0, 0) && read.into.iter().all(whole)
}

fn entry_of(file: &File, read: &mut Read<'_>) -> Entry {
    let count = u32::try_from(read.into.len()).expect("a few buffers");
    let file = Fd(file.as_raw_fd());
    // An `IoSliceMut` is an `iovec`, as the standard library promises for Unix.
    opcode::Readv::new(file, read.into.as_mut_ptr().cast(), count).offset(read.at.0).build()
}

/// A transfer of writes that lie behind each other, or of a part of a long one.
#[derive(Debug)]
struct Cut {
    at: Physical,
    len: usize,
    writes: RangeInclusive<usize>,
    /// It begins so far into the first of them.
    skip: usize,
}

fn cut(writes: &[Write<'_>]) -> Vec<Cut> {
    let mut cuts: Vec<Cut> = Vec::with_capacity(writes.len());
    for (n, write) in writes.iter().enumerate() {
        let len = write.data.iter().map(|d| d.len()).sum::<usize>();
        if let Some(before) = cuts.last_mut()
            && before.at.plus(before.len as u64) == write.at
            && before.len + len <= PIECE
        {
            before.len += len;
            before.writes = *before.writes.start()..=n;
            continue;
        }
        for skip in (0..len).step_by(PIECE) {
            let at = write.at.plus(skip as u64);
            cuts.push(Cut { at, len: PIECE.min(len - skip), writes: n..=n, skip });
        }
    }
    cuts
}

impl Ring {
    fn new() -> io::Result<Self> {
        let ring: IoUring = IoUring::builder()
            .dontfork()
            .setup_r_disabled()
            .build(u32::try_from(ENTRIES).unwrap_or(u32::MAX))?;
        // What a ring does passes no filter of system calls: it shall be able to do just what is
        // done here.
        ring.submitter().register_restrictions(&mut [
            Restriction::sqe_op(opcode::Readv::CODE),
            Restriction::sqe_op(opcode::Write::CODE),
            Restriction::sqe_op(opcode::Fsync::CODE),
        ])?;
        ring.submitter().register_enable_rings()?;
        Ok(Self { ring, memory: Memory::new(SHORT) })
    }
}

/// A transfer that was pushed.
struct Piece {
    /// Memory that it writes from.
    memory: Option<Lent>,
    /// Its bytes or its negative error.
    result: i32,
}

/// Transfers that the kernel may be carrying out. The memory that they use must outlive this.
struct OnTheirWay<'r> {
    home: &'r Rings,
    /// Until the end of this.
    ring: Option<Ring>,
    /// In the place of the ring's own memory.
    long: Option<Memory>,
    left: usize,
    pieces: Vec<Piece>,
}

impl OnTheirWay<'_> {
    fn ring(&mut self) -> &mut Ring {
        self.ring.as_mut().expect("it is there until the end")
    }

    fn memory(&mut self) -> &mut Memory {
        let Self { ring, long, .. } = self;
        long.as_mut().or(ring.as_mut().map(|ring| &mut ring.memory)).expect("the ring has some")
    }

    fn push_write(&mut self, file: &File, writes: &[Write<'_>], cut: &Cut) {
        let lent = loop {
            match self.memory().lend(cut.len) {
                Some(lent) => break lent,
                None => self.submit(1),
            }
        };
        let room = self.memory().bytes(&lent);
        let (mut filled, mut skip) = (0, cut.skip);
        for write in &writes[cut.writes.clone()] {
            let mut source = Gather::new(write.data);
            source.skip(std::mem::take(&mut skip));
            filled += source.take(&mut room[filled..]);
        }
        let len = u32::try_from(cut.len).expect("no longer than a piece");
        let entry = opcode::Write::new(Fd(file.as_raw_fd()), room.as_ptr(), len);
        self.push(entry.offset(cut.at.0).build(), Some(lent));
    }

    fn push(&mut self, entry: Entry, memory: Option<Lent>) {
        while self.left == ENTRIES {
            self.submit(1);
        }
        let entry = entry.user_data(self.pieces.len() as u64);
        // SAFETY: the memory of reads, and the list of its parts, are borrowed by the caller of
        // `Rings::read`, which does not return, or unwind, before this batch was dropped. The
        // memory of writes is lent until the completion was seen, and its owner stays as long as
        // the batch. Files are borrowed by the callers. When the batch is dropped, the kernel has
        // done with all of it.
        let pushed = unsafe { self.ring().ring.submission().push(&entry) };
        pushed.expect("there are as many entries as transfers");
        self.pieces.push(Piece { memory, result: 0 });
        self.left += 1;
    }

    /// Hands over what was pushed, waits for so many completions, and takes all that there are.
    fn submit(&mut self, wait_for: usize) {
        while let Err(error) = self.ring().ring.submit_and_wait(wait_for) {
            if !matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)) {
                // What is on its way would be written to memory that holds something else by then.
                tracing::error!(%error, "a ring of the kernel failed with transfers on their way");
                std::process::abort();
            }
        }
        self.take_completions();
    }

    fn take_completions(&mut self) {
        let Self { ring, long, left, pieces, .. } = self;
        let Some(Ring { ring, memory }) = ring else { return };
        let memory = long.as_mut().unwrap_or(memory);
        for entry in ring.completion() {
            let piece = &mut pieces[usize::try_from(entry.user_data()).expect("a number")];
            piece.result = entry.result();
            if let Some(lent) = piece.memory.take() {
                memory.give_back(lent);
            }
            *left -= 1;
        }
    }

    /// Hands over what was pushed, calls `meanwhile`, and waits for everything.
    fn end(&mut self, meanwhile: Option<&mut dyn FnMut()>) {
        if let Some(meanwhile) = meanwhile {
            self.submit(0);
            meanwhile();
            self.take_completions();
        }
        self.wait_for_all();
    }

    fn wait_for_all(&mut self) {
        while self.left > 0 {
            self.submit(self.left);
        }
    }
}

impl Drop for OnTheirWay<'_> {
    fn drop(&mut self) {
        self.wait_for_all();
        self.home.long.lock().extend(self.long.take());
        self.home.rings.lock().extend(self.ring.take());
    }
}
