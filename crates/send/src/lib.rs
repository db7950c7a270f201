//! From read-only subvolumes to a send stream: what `btrfs receive` and `larder receive` apply.
//!
//! A stream is made in one pass over what differs ([`larder_fs::Comparison`]), with memory that
//! does not grow with the tree. What is remembered are numbers of directories, and names of inodes
//! that had to make way. The same subvolumes give the same bytes.
//!
//! Only this crate knows in which order commands can be applied. It knows no file names of a host,
//! and prints nothing.
//!
//! # Modules
//!
//! A module uses only those above it.
//!
//! | module | decision it hides |
//! |---|---|
//! | `error` | what callers see |
//! | `inodes` | sets of inode numbers |
//! | `pair` | which inodes both subvolumes have |
//! | `output` | what is counted of a stream |
//! | `inherited` | what a new inode must not take from its directory |
//! | `places` | where each inode hangs while the stream is applied |
//! | `attributes` | which attributes are sent, and in which order |
//! | `clones` | which bytes the receiver has already |
//! | `contents` | by which commands the bytes of a file get there |
//! | `stream` | the order of all that |
//! | `diff` | what differs, for people |

mod attributes;
mod clones;
mod contents;
mod diff;
mod error;
mod inherited;
mod inodes;
mod output;
mod pair;
mod places;
mod stream;

pub use diff::{Change, Changes, Sort, diff};
pub use error::{Error, Result};
pub use output::Summary;
pub use stream::{Options, Source, send};
