//! What an image is to hold: a tree of entries, from directories, archives, layers and manifests.
//!
//! A source may be anything that knows files. All of them become the same: a stream of [`Entry`]
//! in the order of [`TreePath`], in which a later source lies over an earlier one, and every
//! directory comes before what it holds. The contents of a file are not in the stream. An entry has
//! a [`Locator`] for them, and [`Contents`] reads what it names.

mod entry;
mod path;
pub mod spill;

pub use entry::{Attributes, Contents, Entry, Kind, LinkGroup, Locator, SourceNumber, Time};
pub use path::TreePath;
