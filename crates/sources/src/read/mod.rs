//! Readers: one for each sort of source. Each tells the collector what the source holds, and can
//! open the contents of files again later by what it wrote into their locators.

pub(crate) mod bytes;
pub(crate) mod directory;
pub(crate) mod image;
pub(crate) mod manifest;
pub(crate) mod oci;
pub(crate) mod spool;
pub(crate) mod tar;

use crate::Contents;
use std::io;

/// Where the contents of files are after a source was read.
pub(crate) trait Store: Send + Sync {
    /// Opens what a locator's key names.
    fn open(&self, key: &[u8]) -> io::Result<Box<dyn Contents>>;
}

/// The longest target of a symbolic link that Linux has.
pub(crate) const LONGEST_TARGET: usize = 4095;
/// The longest path in an archive or manifest: what Linux takes in one call.
pub(crate) const LONGEST_PATH: usize = 4096;
