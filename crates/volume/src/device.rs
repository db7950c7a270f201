//! The seam between the engine and what keeps its bytes.
//!
//! Everything durable goes through [`Device`], and nothing else does: that is what lets the crash
//! simulation stand in for the disk and enumerate every state a power cut can leave. The contract
//! is that of a disk with a volatile write cache:
//!
//! - a write is *completed* when the call returns, and *durable* only when a flush that was issued
//!   **after** that completion has returned;
//! - between two flushes, completed writes may become durable in any order, or not at all, and each
//!   may tear at 512 bytes — except a write of 4096 aligned bytes, which the engine uses for
//!   superblocks only and takes to be atomic;
//! - reads see completed writes at once;
//! - calls may come from any number of threads at the same time; writes that overlap each other and
//!   are in flight together leave either content.
//!
//! A failed flush is final: what it should have covered may be lost for good, however often a later
//! flush succeeds. The engine therefore never retries one.

use larder_format::{Physical, SECTOR_SIZE};
use std::fmt;
use std::io;

/// A write of a batch: buffers that lie behind each other, beginning at `at`.
#[derive(Clone, Copy, Debug)]
pub struct Write<'a> {
    /// First byte.
    pub at: Physical,
    /// What is written.
    pub data: &'a [io::IoSlice<'a>],
}

impl Write<'_> {
    /// Bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.data.iter().map(|d| d.len() as u64).sum()
    }
    /// Nothing at all?
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A read of a batch: buffers that are filled one behind the other, beginning at `at`.
#[derive(Debug)]
pub struct Read<'a> {
    /// First byte.
    pub at: Physical,
    /// What is filled.
    pub into: Vec<io::IoSliceMut<'a>>,
}

impl Read<'_> {
    /// Bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.into.iter().map(|buf| buf.len() as u64).sum()
    }
    /// Nothing at all?
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// What one of several devices has to do, while the others do the same.
#[derive(Debug)]
pub enum Work<'a> {
    /// Fill several ranges with bytes that will not be wanted from here again.
    Read(&'a [Read<'a>]),
    /// Write several ranges that do not touch each other.
    Write(&'a [Write<'a>]),
    /// Make durable what was written.
    Flush,
}

/// A store of bytes with a volatile write cache. See the module's text for the contract.
pub trait Device: Send + Sync + fmt::Debug {
    /// Name for messages: a path, or what a test calls it.
    fn name(&self) -> String;

    /// Size in bytes.
    fn size(&self) -> u64;

    /// Looks up the size anew, which another program may have changed. Returns it.
    ///
    /// # Errors
    /// What the device says.
    fn measure(&self) -> io::Result<u64> {
        Ok(self.size())
    }

    /// May it be written? A read-only device refuses writes with an error.
    fn is_read_only(&self) -> bool;

    /// Fills `buf` from `at`.
    ///
    /// # Errors
    /// Reading past the end is an error of kind `UnexpectedEof`; otherwise what the device says.
    fn read_at(&self, at: Physical, buf: &mut [u8]) -> io::Result<()>;

    /// Fills `buf` with what the medium has, past the machine's page cache where that can be done:
    /// for bytes that are read once, or judged.
    ///
    /// # Errors
    /// As [`Device::read_at`].
    fn read_medium(&self, at: Physical, buf: &mut [u8]) -> io::Result<()> {
        self.read_at(at, buf)
    }

    /// Fills `buf` from `at` if that can be done without waiting, because the bytes are in memory.
    /// False, and `buf` holds anything, where it cannot, and where that is not known.
    fn read_at_once(&self, at: Physical, buf: &mut [u8]) -> bool {
        let _ = (at, buf);
        false
    }

    /// These bytes were read and will not be wanted from here again: they need not stay in memory.
    /// A hint; never waits.
    fn passed(&self, at: Physical, len: u64) {
        let _ = (at, len);
    }

    /// The file by which this can be on its way together with what other devices do (`file`).
    /// `None` where that cannot be done, and where the page cache of the machine is faster: then it
    /// is for the other calls.
    fn file_for(&self, work: &Work<'_>) -> Option<&std::fs::File> {
        let _ = work;
        None
    }

    /// Writes all of `data` at `at`.
    ///
    /// # Errors
    /// What the device says. Any part may have been written.
    fn write_at(&self, at: Physical, data: &[u8]) -> io::Result<()>;

    /// Writes several buffers that lie behind each other, beginning at `at`.
    ///
    /// # Errors
    /// As [`Device::write_at`].
    fn write_vectored_at(&self, at: Physical, data: &[io::IoSlice<'_>]) -> io::Result<()> {
        let mut at = at;
        for d in data {
            self.write_at(at, d)?;
            at = at.plus(d.len() as u64);
        }
        Ok(())
    }

    /// Writes several ranges that do not touch each other: in flight together where the device can
    /// do that, in any order. The call returns when all have ended, with a result for each.
    fn write_batch(&self, writes: &[Write<'_>]) -> Vec<io::Result<()>> {
        writes.iter().map(|w| self.write_vectored_at(w.at, w.data)).collect()
    }

    /// Makes every write durable that had completed when the call began.
    ///
    /// # Errors
    /// What the device says; then nothing can be said about those writes, now or later.
    fn flush(&self) -> io::Result<()>;

    /// Writes `data` and makes it durable, and only it, if the device can do that without a flush
    /// (FUA). `None` when it cannot: then write and flush.
    fn write_fua(&self, at: Physical, data: &[u8]) -> Option<io::Result<()>> {
        let _ = (at, data);
        None
    }

    /// Tells the device that a range holds nothing of value; it may read as anything afterwards.
    /// Ignored where it is not supported, and for blocks of which the range has only a part.
    ///
    /// # Errors
    /// What the device says; callers may go on.
    fn discard(&self, at: Physical, len: u64) -> io::Result<()> {
        let _ = (at, len);
        Ok(())
    }

    /// Does it take discards, as far as is known by now? Where it does not, [`Device::discard`]
    /// does nothing.
    fn can_discard(&self) -> bool {
        true
    }

    /// Bytes below which a discard gives nothing back, as far as that is known.
    fn discard_granularity(&self) -> u64 {
        u64::from(SECTOR_SIZE)
    }

    /// Do writes go past the machine's page cache?
    fn is_direct(&self) -> bool {
        false
    }

    /// First address from `at` on that may hold anything but zeros; `at` itself where that is not
    /// known. Lets a search of a sparse image pass over its holes.
    fn data_from(&self, at: Physical) -> Physical {
        at
    }

    /// Starts write-back of completed writes without waiting, where the device has such a thing.
    fn start_writeback(&self, at: Physical, len: u64) {
        let _ = (at, len);
    }
}

/// Fills the buffers of a read, one call for each.
pub(crate) fn read_in_turn<D: Device + ?Sized>(device: &D, read: &mut Read<'_>) -> io::Result<()> {
    let mut at = read.at;
    for buf in &mut read.into {
        device.read_at(at, buf)?;
        at = at.plus(buf.len() as u64);
    }
    Ok(())
}
