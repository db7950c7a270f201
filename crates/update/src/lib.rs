//! Changes a subvolume of an image to what its sources say, moving only differences.
//!
//! Entries and the image are walked side by side, both in the order of paths. So only one listing
//! for each level of directories has to be in memory. What only the image has is removed, what only
//! the sources have is made, and what both have is compared. A file is taken as equal if its size
//! and the time of its last change are equal, as rsync does it, or if its bytes are ([`Compare`]).
//! Of a file that differs, only the blocks that differ are written.
//!
//! Subvolumes within the subvolume are never removed, nor the directories that lead to them: the
//! snapshot of the state before may hang there. Everything is changed through the engine. So after
//! a crash the file system is sound, and has a part of the changes.
//!
//! # Modules
//!
//! A module uses only those above it.
//!
//! | module | decision it hides |
//! |---|---|
//! | `error`, `report` | what callers see |
//! | `listing` | what a directory of the image holds, in the order of paths |
//! | `remove` | removing a tree, but no subvolume |
//! | `attributes` | which attributes are compared, and in which order they are set |
//! | `contents` | which bytes of a file are written |
//! | `links` | which inode may be kept where names share one |
//! | `walk` | the two trees side by side |

mod attributes;
mod contents;
mod error;
mod links;
mod listing;
mod remove;
mod report;
mod walk;

pub use error::{BoxError, Error, Result};
pub use report::{Change, Summary, What};

use larder_fs::{Filesystem, InodeId};
use larder_sources::{Contents, Entry, Locator};
use std::path::PathBuf;

/// How a file of the image is compared with that of the sources.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Compare {
    /// By size and time of the last change. If all times of a source were set to one value, files
    /// must not be compared this way.
    #[default]
    TimeAndSize,
    /// By their bytes, all of which are read on both sides.
    Contents,
}

/// How to update.
#[derive(Clone, Debug)]
pub struct Options {
    /// How files are compared.
    pub compare: Compare,
    /// Report what would be done, and do nothing.
    pub dry_run: bool,
    /// Memory for what is known of files with several names, in bytes.
    pub memory: usize,
    /// Where temporary files are made for what memory does not hold.
    pub temporary: PathBuf,
}

impl Default for Options {
    fn default() -> Self {
        let (compare, temporary) = (Compare::default(), std::env::temp_dir());
        Self { compare, dry_run: false, memory: 32 << 20, temporary }
    }
}

/// Opens the contents of a file.
pub type OpenContents<'a> = dyn Fn(&Locator) -> Result<Box<dyn Contents>, BoxError> + 'a;

/// Changes the tree at the directory `root` to what `entries` say. They come in the order of their
/// paths, each directory before what it holds. `each` is called for every change, and returns false
/// to end early. The changes are durable after [`Filesystem::sync`].
///
/// # Errors
/// [`Error`] names the entry. What was changed before it stays changed.
pub fn update<E: Into<BoxError>>(
    fs: &Filesystem,
    root: InodeId,
    entries: impl IntoIterator<Item = Result<Entry, E>>,
    open: &OpenContents<'_>,
    options: Options,
    each: &mut dyn FnMut(&Change<'_>) -> bool,
) -> Result<Summary> {
    let mut walk = walk::Walk::new(fs, root, open, options, each)?;
    for entry in entries {
        walk.entry(entry.map_err(|e| Error::Source(e.into()))?)?;
    }
    walk.finish()
}
