//! A bulk loader: a whole btrfs image from sorted entries, each block written once, bottom up.
//!
//! An image that is made at one stroke needs no transactions. Entries come in path order, so inode
//! numbers rise with paths, and contents lie on the device in the order in which a reader of the
//! tree wants them. Items are sorted as they come. When all are known, each tree is packed from its
//! first leaf to its root, every node full, and written behind the data.
//!
//! Memory is bounded: sorters write runs to a scratch file, contents pass through a window. What is
//! read, compressed and hashed by many threads takes its place in the order of the entries. So the
//! same entries, uuid and time give the same bytes, whatever the number of threads.
//!
//! # Modules
//!
//! A module uses only those above it.
//!
//! | module | decision it hides |
//! |---|---|
//! | `error`, [`report`], `options` | what callers see; which options go together, and defaults |
//! | `input` | which subvolumes there are, and in which stream each comes |
//! | `output` | that an image appears under its name only when it is complete |
//! | `spool`, `sort` | what is kept in memory, and what in a scratch file |
//! | `space` | where chunks lie and how long they are; which address comes next |
//! | `nodes` | how a tree is packed from sorted items |
//! | `pipeline` | how threads work on contents while the order is kept |
//! | `content` | what of a file's contents is stored, and how: holes, compression, checksums |
//! | `store` | where contents go; which files share them |
//! | `links` | where the inodes that have several names are found again |
//! | `merge` | how sorted records become the items of a subvolume |
//! | `names` | how entries become inodes, directories, links and attributes |
//! | `global` | the trees that describe all others, and the superblock |
//! | `build` | the order of things |

mod build;
mod content;
mod error;
mod global;
mod input;
mod links;
mod merge;
mod names;
mod nodes;
mod options;
mod output;
mod pipeline;
pub mod report;
mod sort;
mod space;
mod spool;
mod store;

pub use build::build;
pub use error::{BoxError, Error, Result};
pub use input::{InnerSubvolume, OpenContents, Place, SourceResult, TreeInput};
pub use options::{BuildOptions, Compress, ImageSize};
pub use output::Output;
pub use report::{Progress, Report, Silent, Stage};
