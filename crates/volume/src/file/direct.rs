//! Transfers past the page cache.
//!
//! What lies in the page cache of the machine is there twice for a mount: as the mounted file and
//! as a part of the image. A write through it also holds the image's inode, so that a write that
//! meets pages on their way to the disk keeps all others waiting. Direct writes do neither.
//!
//! Two things stay with the page cache of a single device, and the kernel keeps both ways coherent:
//!
//! - Reads. The kernel reads ahead in larger pieces than a mount asks for, and what lies beside a
//!   node or a small file is read next. Contents of files are dropped from there behind the reader
//!   ([`super::passing`]).
//! - A short write while no other is on its way. A single caller of `fsync` writes data, nodes and
//!   a superblock one after another; past the page cache it would wait for the device each time,
//!   and not only in the flush.
//!
//! Where a file system is spread over several devices, transfers of all of them are on their way
//! together, and all of these are direct ([`super::overlap`]). Reading ahead would do harm there:
//! what lies ahead on one device may be parity, or another mirror's turn.

use super::aligned::{BOUNCE, is_aligned, is_aligned_memory, with_bounce};
#[cfg(target_os = "linux")]
use super::batch::{self, Rings};
use super::passing::Passing;
use super::{aligned::Gather, os};
use crate::device::Write;
use std::fs::{File, OpenOptions};
use std::io::{self, IoSlice};
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

/// Writes up to this length go through it while no other is on its way.
const SHORT_WRITE: u64 = 64 << 10;

/// A descriptor for direct transfers, beside the one for all others.
#[derive(Debug)]
pub(super) struct Direct {
    file: File,
    /// Reads and short writes, too.
    all: bool,
    /// Writes that are on their way, whichever they take.
    writing: AtomicU32,
    /// What reads need no longer.
    pub(super) passing: Passing,
    #[cfg(target_os = "linux")]
    rings: Option<Rings>,
}

impl Direct {
    /// Opens `path`, and tries a read: some file systems refuse only that.
    ///
    /// # Errors
    /// The platform, or the file system that the image lies on, has no direct I/O.
    pub(super) fn open(path: &Path, write: bool, size: u64, all: bool) -> io::Result<Self> {
        let file = open(path, write)?;
        if size >= super::aligned::ALIGN as u64 {
            with_bounce(super::aligned::ALIGN, |buf| os::read_exact_at(&file, buf, 0))?;
        }
        #[cfg(target_os = "linux")]
        let rings = write.then(|| Rings::new(&file)).transpose().unwrap_or_else(|error| {
            tracing::info!(%error, "no io_uring for the image: its writes go one after another");
            None
        });
        Ok(Self {
            #[cfg(target_os = "linux")]
            rings,
            file,
            all,
            writing: AtomicU32::new(0),
            passing: Passing::default(),
        })
    }

    #[cfg(unix)]
    /// Of a file that was opened so by another process, which cannot hand over its ring.
    pub(super) fn of(file: File) -> Self {
        Self {
            #[cfg(target_os = "linux")]
            rings: None,
            file,
            all: false,
            writing: AtomicU32::new(0),
            passing: Passing::default(),
        }
    }

    #[cfg(unix)]
    pub(super) fn into_file(self) -> File {
        self.file
    }

    /// For transfers that are on their way together with those of other devices.
    #[cfg(target_os = "linux")]
    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Does a read of this place go past the page cache?
    pub(super) fn reads(&self, at: u64, len: usize) -> bool {
        self.all && is_aligned(at, len)
    }

    /// Do reads go through the page cache?
    pub(super) fn uses_cache(&self) -> bool {
        !self.all
    }

    /// A write of so many bytes begins: does it go past the page cache?
    pub(super) fn begin_write(&self, len: u64) -> Writing<'_> {
        let alone = self.writing.fetch_add(1, Ordering::Relaxed) == 0;
        Writing { writing: &self.writing, past_cache: self.all || !alone || len > SHORT_WRITE }
    }

    /// Fills `buf`, which is whole blocks.
    ///
    /// # Errors
    /// What the file says.
    pub(super) fn read(&self, buf: &mut [u8], at: u64) -> io::Result<()> {
        if is_aligned_memory(buf) {
            return os::read_exact_at(&self.file, buf, at);
        }
        with_bounce(buf.len().min(BOUNCE), |bounce| {
            let mut at = at;
            for piece in buf.chunks_mut(bounce.len()) {
                let bounce = &mut bounce[..piece.len()];
                os::read_exact_at(&self.file, bounce, at)?;
                piece.copy_from_slice(bounce);
                at += piece.len() as u64;
            }
            Ok(())
        })
    }

    /// Writes buffers that lie behind each other and are whole blocks together.
    ///
    /// # Errors
    /// What the file says.
    pub(super) fn write(&self, data: &[IoSlice<'_>], at: u64) -> io::Result<()> {
        if data.iter().all(|d| is_aligned_memory(d) && is_aligned(0, d.len())) {
            return os::write_vectored_at(&self.file, data, at);
        }
        // Gathered into one buffer: one large transfer beats several small ones.
        let len = data.iter().map(|d| d.len()).sum::<usize>();
        with_bounce(len.min(BOUNCE), |bounce| {
            let (mut source, mut at) = (Gather::new(data), at);
            loop {
                let n = source.take(bounce);
                if n == 0 {
                    return Ok(());
                }
                os::write_all_at(&self.file, &bounce[..n], at)?;
                at += n as u64;
            }
        })
    }

    /// Writes a batch of whole blocks, on their way together where that can be done; for each how
    /// it ended.
    pub(super) fn write_batch(&self, writes: &[Write<'_>]) -> Vec<io::Result<()>> {
        #[cfg(target_os = "linux")]
        if let Some(rings) = self.rings.as_ref().filter(|_| worth_a_ring(writes)) {
            let pieces: Vec<_> =
                writes.iter().map(|w| batch::Write { at: w.at.0, data: w.data }).collect();
            if let Some(results) = rings.write(&self.file, &pieces) {
                return results;
            }
        }
        writes.iter().map(|w| self.write(w.data, w.at.0)).collect()
    }
}

/// A write that is on its way until this is dropped.
pub(super) struct Writing<'a> {
    writing: &'a AtomicU32,
    pub(super) past_cache: bool,
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        self.writing.fetch_sub(1, Ordering::Relaxed);
    }
}

/// One short write is as quick without.
#[cfg(target_os = "linux")]
fn worth_a_ring(writes: &[Write<'_>]) -> bool {
    writes.len() > 1 || writes.iter().any(|w| w.len() > BOUNCE as u64)
}

#[cfg(target_os = "linux")]
fn open(path: &Path, write: bool) -> io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;
    OpenOptions::new().read(true).write(write).custom_flags(libc::O_DIRECT).open(path)
}
#[cfg(not(target_os = "linux"))]
fn open(_: &Path, _: bool) -> io::Result<File> {
    Err(io::Error::new(io::ErrorKind::Unsupported, "direct I/O is not supported on this platform"))
}
