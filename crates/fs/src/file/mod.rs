//! File data: delayed writes, extents, checksums, compression.

use crate::core::Core;
use crate::error::Result;
use parking_lot::Mutex;
use std::sync::Arc;

/// Data of one file that is not in extents yet.
#[derive(Debug, Default)]
pub(crate) struct FileData {
    _inner: Mutex<()>,
}

/// Data of all files that is not in extents yet.
#[derive(Debug, Default)]
pub(crate) struct DataState {}

impl DataState {
    /// Bytes that wait for write-back.
    pub(crate) fn delayed_bytes(&self) -> u64 {
        0
    }
    /// Ends the threads that write back.
    pub(crate) fn stop(&self) {}
}

/// Starts the threads that write back.
pub(crate) fn start(_core: &Arc<Core>) -> Result<()> {
    Ok(())
}

/// Writes all delayed data back.
pub(crate) fn flush_all(_core: &Core) -> Result<()> {
    Ok(())
}
