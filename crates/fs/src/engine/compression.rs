//! What compressing and unpacking share among all files, and which files are compressed.
//!
//! [`crate::file::compress`] does the work itself.

use crate::lock::{self, Mutex};
use crate::space::Run;
use crate::transaction::Ground;
use larder_codec::Packer;
use larder_format::Logical;
use larder_format::items::InodeFlags;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// How many unpacked extents are kept. They are kept when a reader wanted only a part of one.
const KEPT_EXTENTS: usize = 16;

/// What all files share.
#[derive(Debug, Default)]
pub(crate) struct CompressionState {
    /// Packers that nothing uses at the moment.
    pub(crate) packers: Mutex<Vec<Packer>, lock::Packers>,
    pub(crate) stats: Stats,
    unpacked: Mutex<VecDeque<Kept>, lock::Unpacked>,
}

/// Counters of bytes.
#[derive(Debug, Default)]
pub(crate) struct Stats {
    /// Bytes that went into packed extents, before and after packing.
    pub(crate) raw: AtomicU64,
    pub(crate) packed: AtomicU64,
    /// Bytes that were tried and did not shrink.
    pub(crate) failed: AtomicU64,
    /// Bytes that did not look promising.
    pub(crate) skipped: AtomicU64,
    /// Bytes of packed data in memory, in flight.
    pub(crate) held: AtomicU64,
}

/// May data of an inode with these flags be compressed?
pub(crate) fn wanted(ground: &Ground, flags: InodeFlags) -> bool {
    let mount = &ground.options.compress;
    let forced = mount.is_some_and(|m| m.force);
    !flags.intersects(InodeFlags::NODATACOW | InodeFlags::NODATASUM)
        && (forced
            || !flags.contains(InodeFlags::NOCOMPRESS)
                && (mount.is_some() || flags.contains(InodeFlags::COMPRESS)))
}

/// An unpacked extent of which more may be wanted.
#[derive(Debug)]
struct Kept {
    at: Logical,
    data: Arc<[u8]>,
}

impl CompressionState {
    /// An extent's bytes, if they are kept.
    pub(crate) fn kept(&self, at: Logical) -> Option<Arc<[u8]>> {
        let mut kept = self.unpacked.lock();
        let i = kept.iter().rposition(|k| k.at == at)?;
        let found = kept.remove(i)?;
        let data = found.data.clone();
        kept.push_back(found);
        Some(data)
    }
    /// Keeps an extent's bytes. The caller has been in an epoch since before it read them, so
    /// nothing else has been written to the extent's space since.
    pub(crate) fn keep(&self, at: Logical, data: Arc<[u8]>) {
        let mut kept = self.unpacked.lock();
        kept.retain(|k| k.at != at);
        if kept.len() >= KEPT_EXTENTS {
            kept.pop_front();
        }
        kept.push_back(Kept { at, data });
    }
    /// Space is about to be written. What was there is forgotten.
    pub(crate) fn forget(&self, run: Run) {
        self.unpacked.lock().retain(|k| k.at < run.start || k.at >= run.end());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kept_extents_go_when_their_space_is_written() {
        let state = CompressionState::default();
        let data: Arc<[u8]> = Arc::from(vec![1; 8]);
        for i in 0..40u64 {
            state.keep(Logical(i * 4096), data.clone());
        }
        assert!(state.kept(Logical(0)).is_none());
        assert!(state.kept(Logical(39 * 4096)).is_some());
        state.forget(Run::new(Logical(38 * 4096), 4096));
        assert!(state.kept(Logical(38 * 4096)).is_none());
        assert!(state.kept(Logical(39 * 4096)).is_some());
    }
}
