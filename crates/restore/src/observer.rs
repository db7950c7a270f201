//! How the caller learns what happens.
//!
//! Losses come one by one, as they are found, so that nothing has to be kept: an image may have
//! millions. The rest of the crate decides *what* is lost; the observer decides how that is shown,
//! and whether it is remembered.

use larder_format::{ObjectId, TreeId};

/// What is being done; for progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Looking at every block of the device for nodes; counted in bytes.
    Scan,
    /// Reading the names of a subvolume; counted in inodes, without a total.
    Names,
    /// Writing files; counted in inodes.
    Files,
}

/// Something that could not be restored, or not as it was.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loss {
    /// Subvolume or other tree.
    pub tree: TreeId,
    /// Inode, where one is concerned.
    pub inode: Option<ObjectId>,
    /// Path below the destination, where one is known.
    pub path: Option<Vec<u8>>,
    /// What was lost, as a phrase.
    pub what: String,
}

/// A file, directory or other entry that was restored (or would be).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry<'a> {
    /// Subvolume.
    pub tree: TreeId,
    /// Inode.
    pub inode: ObjectId,
    /// Path below the destination.
    pub path: &'a [u8],
    /// Mode with type.
    pub mode: u32,
    /// Size in bytes.
    pub size: u64,
}

/// Listens. Every method does nothing unless it is overridden.
pub trait Observer: Sync {
    /// So much of a step is done, of a total if that is known.
    fn progress(&self, step: Step, done: u64, total: Option<u64>) {
        let _ = (step, done, total);
    }
    /// What was done about damage, or is worth knowing: nothing is lost by it.
    fn note(&self, text: &str) {
        let _ = text;
    }
    /// Something is lost.
    fn loss(&self, loss: &Loss) {
        let _ = loss;
    }
    /// Something was restored.
    fn entry(&self, entry: Entry<'_>) {
        let _ = entry;
    }
    /// Is it to end before everything is done? Once it says so it does not take it back.
    fn is_over(&self) -> bool {
        false
    }
}

/// Listens to nothing.
#[derive(Clone, Copy, Debug)]
pub struct Quiet;

impl Observer for Quiet {}
