//! File data: delayed writes, extents, checksums, compression.

use crate::api::Seek;
use crate::core::Core;
use crate::error::{Error, Result};
use crate::inode::Inode;
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

impl FileData {
    /// Bytes that are not in extents yet.
    pub(crate) fn delayed_bytes(&self) -> u64 {
        0
    }
    /// Size that may stand on disk while everybody sees `size`.
    pub(crate) fn disk_size(&self, size: u64) -> u64 {
        size
    }
}

/// Reads into `buf`. Takes `op`.
pub(crate) fn read(_core: &Core, _inode: &Arc<Inode>, _offset: u64, _buf: &mut [u8]) -> Result<usize> {
    Err(Error::NotSupported("read"))
}
/// Writes all of `data`. Takes `op`.
pub(crate) fn write(_core: &Core, _inode: &Arc<Inode>, _offset: u64, _data: &[u8]) -> Result<()> {
    Err(Error::NotSupported("write"))
}
/// Copies a range. Takes `op` of both.
pub(crate) fn copy_range(
    _core: &Core,
    _from: &Arc<Inode>,
    _from_offset: u64,
    _to: &Arc<Inode>,
    _to_offset: u64,
    _len: u64,
) -> Result<u64> {
    Err(Error::NotSupported("copy_range"))
}
/// Next data or hole. Takes `op`.
pub(crate) fn seek(_core: &Core, _inode: &Arc<Inode>, _offset: u64, _what: Seek) -> Result<Option<u64>> {
    Err(Error::NotSupported("seek"))
}
/// Makes one inode durable.
pub(crate) fn fsync(core: &Core, _inode: &Arc<Inode>, _data_only: bool) -> Result<()> {
    core.commit()
}
/// Sets the size of a regular file and takes away what lies behind it, delayed data and extents beyond the end included,
/// also where the size stays. The caller holds `op` exclusively, has checked flags and subvolume, and sets the times.
pub(crate) fn truncate(core: &Core, inode: &Arc<Inode>, size: u64) -> Result<()> {
    let mut handle = core.begin(1)?;
    inode.change(&mut handle, |state| state.size = size);
    Ok(())
}
