//! A disk in memory that counts what a request costs.
//!
//! In contrast to [`crate::device::SimDevice`] nothing is recorded, and a request with more
//! accesses than `limits::ACCESSES` is stopped by a panic in its own thread. So an endless
//! loop that reads ends where it is, with a stack to look at.

use super::limits::ACCESSES;
use crate::image::{Image, PAGE, Page};
use larder_format::Physical;
use larder_volume::Device;
use parking_lot::RwLock;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The disk.
#[derive(Debug)]
pub struct HostileDevice {
    image: RwLock<Image>,
    size: u64,
    allowed: u64,
    accesses: AtomicU64,
    written: AtomicU64,
}

impl HostileDevice {
    /// A writable disk with this content.
    #[must_use]
    pub fn new(mut image: Image) -> Self {
        image.freeze();
        let size = image.size();
        Self {
            image: RwLock::new(image),
            size,
            allowed: ACCESSES,
            accesses: AtomicU64::new(0),
            written: AtomicU64::new(0),
        }
    }
    /// The same, with another number of accesses for each request.
    #[must_use]
    pub fn allowing(mut self, accesses: u64) -> Self {
        self.allowed = accesses;
        self
    }
    /// What it holds now.
    #[must_use]
    pub fn image(&self) -> Image {
        self.image.read().clone()
    }
    /// A new request begins.
    pub fn begin(&self) {
        self.accesses.store(0, Relaxed);
    }
    /// Bytes that were written: they lie in memory, too, and are not the engine's.
    #[must_use]
    pub fn written(&self) -> u64 {
        self.written.load(Relaxed)
    }
    fn access(&self, at: Physical, len: usize) -> io::Result<()> {
        let n = self.accesses.fetch_add(1, Relaxed);
        assert!(
            n != self.allowed,
            "hostile: a request that reads and writes the device without end"
        );
        if n > self.allowed {
            return Err(io::Error::other("too many accesses for one request"));
        }
        if at.0.checked_add(len as u64).is_none_or(|end| end > self.size) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(())
    }
}

impl Device for HostileDevice {
    fn name(&self) -> String {
        "hostile".into()
    }
    fn size(&self) -> u64 {
        self.size
    }
    fn is_read_only(&self) -> bool {
        false
    }
    fn read_at(&self, at: Physical, buf: &mut [u8]) -> io::Result<()> {
        self.access(at, buf.len())?;
        self.image.read().read(at.0, buf);
        Ok(())
    }
    fn write_at(&self, at: Physical, data: &[u8]) -> io::Result<()> {
        self.access(at, data.len())?;
        self.written.fetch_add(data.len() as u64, Relaxed);
        self.image.write().write(at.0, data);
        Ok(())
    }
    fn flush(&self) -> io::Result<()> {
        Ok(())
    }
    /// Discarded bytes are gone: a read of a range that is still in use shows.
    fn discard(&self, at: Physical, len: u64) -> io::Result<()> {
        self.access(at, 0)?;
        let end = at.0.saturating_add(len).min(self.size) / PAGE as u64;
        let (nothing, mut image) = (Page::new([0; PAGE]), self.image.write());
        for number in at.0.div_ceil(PAGE as u64)..end {
            if image.page(number).is_some() {
                image.set_page(number, nothing.clone());
            }
        }
        Ok(())
    }
}
