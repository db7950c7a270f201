//! An image file that fails as a device when it is told to: for tests in which Linux reads what is
//! left. [`crate::device`] has the disk in memory, which can do more.

use larder_format::Physical;
use larder_volume::{Device, FileDevice, OpenMode};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

/// What a device refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
#[allow(missing_docs)]
pub enum Refuses {
    Nothing,
    Reads,
    Everything,
}

/// The device.
#[derive(Debug)]
pub struct Fragile {
    device: FileDevice,
    refuses: AtomicU8,
}

impl Fragile {
    /// The device of an image file, which can be written and refuses nothing.
    ///
    /// # Panics
    /// The file cannot be opened.
    #[must_use]
    pub fn open(image: &Path) -> Arc<Self> {
        let device = FileDevice::open(image, OpenMode::Write).expect("an image file");
        Arc::new(Self { device, refuses: AtomicU8::new(Refuses::Nothing as u8) })
    }

    /// From now on it refuses this.
    pub fn refuse(&self, what: Refuses) {
        self.refuses.store(what as u8, Ordering::Relaxed);
    }

    /// An error, if at least this much is refused.
    fn check(&self, least: Refuses) -> io::Result<()> {
        let refuses = self.refuses.load(Ordering::Relaxed);
        if refuses >= least as u8 { Err(io::Error::other("gone")) } else { Ok(()) }
    }
}

impl Device for Fragile {
    fn name(&self) -> String {
        self.device.name()
    }
    fn size(&self) -> u64 {
        self.device.size()
    }
    fn is_read_only(&self) -> bool {
        false
    }
    fn read_at(&self, at: Physical, buf: &mut [u8]) -> io::Result<()> {
        self.check(Refuses::Reads)?;
        self.device.read_at(at, buf)
    }
    fn write_at(&self, at: Physical, data: &[u8]) -> io::Result<()> {
        self.check(Refuses::Everything)?;
        self.device.write_at(at, data)
    }
    fn flush(&self) -> io::Result<()> {
        self.check(Refuses::Everything)?;
        self.device.flush()
    }
}
