//! Several direct writes in flight at once.
//!
//! A direct write waits for the device, and a caller with many would wait once for each. Here they
//! are copied into aligned memory piece by piece and handed to an io_uring; the caller waits until
//! all have completed. Rings are made when the device is opened: a confined daemon can make none. A
//! ring can write to the one file that it was made for, and nothing else.
//!
//! A batch that comes while every ring is in use writes one piece after another instead of waiting
//! for one.

use super::aligned::{ALIGN, Gather};
use super::memory::TransferMemory;
use super::os;
use io_uring::register::Restriction;
use io_uring::squeue::{self, SubmissionQueue};
use io_uring::types::Fixed;
use io_uring::{IoUring, opcode};
use parking_lot::Mutex;
use std::fs::File;
use std::io::{self, IoSlice};
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd;

/// Batches that can be on their way at once.
const RINGS: usize = 4;
/// Pieces of a batch that can be on their way at once.
const SLOTS: usize = 16;
/// Bytes of a piece at most.
const SLOT: usize = 256 << 10;

/// Rings for the writes of one file, and aligned memory for each.
#[derive(Debug)]
pub(super) struct Rings(Mutex<Vec<Ring>>);

/// A write of a batch: whole blocks, in buffers that lie behind each other.
pub(super) struct Write<'a> {
    pub(super) at: u64,
    pub(super) data: &'a [IoSlice<'a>],
}

impl Rings {
    /// Makes rings for `file`, which was opened for direct I/O.
    ///
    /// # Errors
    /// The kernel has no io_uring, or does not let this process use it.
    pub(super) fn new(file: &File) -> io::Result<Self> {
        (0..RINGS)
            .map(|_| Ring::new(file))
            .collect::<io::Result<_>>()
            .map(|rings| Self(Mutex::new(rings)))
    }

    /// Writes all of a batch; for each how it ended. `None`, and nothing is done, while every ring
    /// is in use.
    pub(super) fn write(&self, file: &File, writes: &[Write<'_>]) -> Option<Vec<io::Result<()>>> {
        // What is on its way reads from the ring's memory: unless all has ended, neither may be
        // used again.
        let mut ring = ManuallyDrop::new(self.0.lock().pop()?);
        let mut results: Vec<io::Result<()>> = writes.iter().map(|_| Ok(())).collect();
        match ring.write(file, writes, &mut results) {
            Ok(()) => self.0.lock().push(ManuallyDrop::into_inner(ring)),
            Err(e) => {
                for result in results.iter_mut().filter(|r| r.is_ok()) {
                    *result = Err(io::Error::new(e.kind(), e.to_string()));
                }
            }
        }
        Some(results)
    }
}

/// A piece on its way.
#[derive(Clone, Copy, Debug)]
struct Piece {
    /// Which write of the batch it belongs to.
    write: usize,
    at: u64,
    len: usize,
}

struct Ring {
    ring: IoUring,
    memory: TransferMemory,
    free: Vec<usize>,
    pieces: [Option<Piece>; SLOTS],
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring").field("free", &self.free).finish_non_exhaustive()
    }
}

impl Ring {
    fn new(file: &File) -> io::Result<Self> {
        let ring: IoUring = IoUring::builder()
            .dontfork()
            .setup_r_disabled()
            .build(u32::try_from(SLOTS).unwrap_or(u32::MAX))?;
        ring.submitter().register_files(&[file.as_raw_fd()])?;
        // What a ring does passes no filter of system calls: it shall be able to do just what is
        // done here.
        ring.submitter().register_restrictions(&mut [
            Restriction::sqe_op(opcode::Write::CODE),
            Restriction::sqe_flags_allowed(squeue::Flags::FIXED_FILE.bits()),
        ])?;
        ring.submitter().register_enable_rings()?;
        let memory = TransferMemory::new(SLOTS * SLOT);
        Ok(Self { ring, memory, free: (0..SLOTS).rev().collect(), pieces: [None; SLOTS] })
    }

    fn slot(&mut self, slot: usize, len: usize) -> &mut [u8] {
        &mut self.memory[slot * SLOT..][..len]
    }

    /// # Errors
    /// The ring itself failed: what is on its way is not known to have ended.
    fn write(
        &mut self,
        file: &File,
        writes: &[Write<'_>],
        results: &mut [io::Result<()>],
    ) -> io::Result<()> {
        for (n, write) in writes.iter().enumerate() {
            let mut source = Gather::new(write.data);
            let mut at = write.at;
            loop {
                let slot = self.free_slot(file, results)?;
                let len = source.take(self.slot(slot, SLOT));
                if len == 0 {
                    self.free.push(slot);
                    break;
                }
                self.push(slot, Piece { write: n, at, len });
                at += len as u64;
            }
        }
        while self.free.len() < SLOTS {
            self.complete_some(file, results)?;
        }
        Ok(())
    }

    fn free_slot(&mut self, file: &File, results: &mut [io::Result<()>]) -> io::Result<usize> {
        loop {
            if let Some(slot) = self.free.pop() {
                return Ok(slot);
            }
            self.complete_some(file, results)?;
        }
    }

    fn push(&mut self, slot: usize, piece: Piece) {
        self.pieces[slot] = Some(piece);
        let bytes = self.slot(slot, piece.len);
        let len = u32::try_from(piece.len).expect("no longer than a slot");
        let entry = opcode::Write::new(Fixed(0), bytes.as_ptr(), len)
            .offset(piece.at)
            .build()
            .user_data(slot as u64);
        let mut queue: SubmissionQueue<'_> = self.ring.submission();
        // SAFETY: the memory belongs to the ring and stays as it is until this entry's completion
        // was seen, or for ever.
        let pushed = unsafe { queue.push(&entry) };
        pushed.expect("there are as many entries as slots");
    }

    /// Hands over what was pushed, waits for at least one completion, and takes all that there are.
    fn complete_some(&mut self, file: &File, results: &mut [io::Result<()>]) -> io::Result<()> {
        while let Err(e) = self.ring.submit_and_wait(1) {
            if !matches!(e.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) {
                return Err(e);
            }
        }
        let ended: Vec<(u64, i32)> =
            self.ring.completion().map(|entry| (entry.user_data(), entry.result())).collect();
        for (slot, result) in ended {
            let slot = usize::try_from(slot).expect("a slot's number");
            let piece = self.pieces[slot].take().expect("what completes was pushed");
            let outcome = match usize::try_from(result) {
                Ok(done) if done == piece.len => Ok(()),
                // The rest, or all of it, as any other write: short transfers and interruptions are
                // carried on with there.
                Ok(done) => self.write_rest(file, slot, piece, done),
                Err(_) if matches!(-result, libc::EINTR | libc::EAGAIN) => {
                    self.write_rest(file, slot, piece, 0)
                }
                Err(_) => Err(io::Error::from_raw_os_error(-result)),
            };
            self.free.push(slot);
            if outcome.is_err() && results[piece.write].is_ok() {
                results[piece.write] = outcome;
            }
        }
        Ok(())
    }

    fn write_rest(
        &mut self,
        file: &File,
        slot: usize,
        piece: Piece,
        done: usize,
    ) -> io::Result<()> {
        // A disk may end a transfer within a block; a direct one cannot begin there.
        let done = done / ALIGN * ALIGN;
        os::write_all_at(file, &self.slot(slot, piece.len)[done..], piece.at + done as u64)
    }
}
