//! An open device on its way to another process: from a command, which may open files, to a daemon,
//! which may not.
//!
//! Descriptors of the same open files go along, and with them the lock: it belongs to the open
//! file. What a process has to look up outside of a sandbox goes along as well.

use super::{Direct, FileDevice};
use larder_format::SECTOR_SIZE;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

/// A device that is open for writing, and what has to be known of it.
#[derive(Debug)]
pub struct Handover {
    /// Path that it was opened by.
    pub path: PathBuf,
    /// Its size in bytes.
    pub size: u64,
    /// A block device?
    pub is_block_device: bool,
    /// Bytes below which a discard gives nothing back, where that is known; 0 without discards.
    pub discard_granularity: Option<u64>,
    /// For transfers through the page cache, and then for those past it, if there are any.
    pub files: Vec<OwnedFd>,
}

impl FileDevice {
    /// Gives the device away. It stays locked as long as one of the descriptors is open anywhere.
    #[must_use]
    pub fn hand_over(self) -> Handover {
        let can_discard = self.can_discard.load(Relaxed);
        if let Some(lock) = self.lock {
            lock.leave();
        }
        let files = [Some(self.file), self.direct.map(Direct::into_file)];
        Handover {
            path: self.path,
            size: self.size.load(Relaxed),
            is_block_device: self.block_device,
            discard_granularity: can_discard.then_some(self.discard_granularity).or(Some(0)),
            files: files.into_iter().flatten().map(OwnedFd::from).collect(),
        }
    }

    /// A device that another process has opened. `None` without a descriptor of it.
    #[must_use]
    pub fn take_over(device: Handover) -> Option<Self> {
        let mut files = device.files.into_iter().map(File::from);
        let (file, direct) = (files.next()?, files.next());
        let granularity = device.discard_granularity;
        Some(Self {
            path: device.path,
            file,
            direct: direct.map(Direct::of),
            size: AtomicU64::new(device.size),
            read_only: false,
            block_device: device.is_block_device,
            size_changed: AtomicBool::new(true),
            can_discard: AtomicBool::new(granularity != Some(0)),
            discard_granularity: granularity.unwrap_or(u64::from(SECTOR_SIZE)),
            // The descriptors have it.
            lock: None,
        })
    }
}
