//! The engine: a btrfs file system on a [`larder_volume::Device`], as a library.
//!
//! [`Filesystem`] is the one door. It is synchronous, `Send + Sync`, and knows inodes, not paths and
//! not FUSE. Everything behind it is private to the crate's modules.

pub mod api;
pub mod error;
pub mod filesystem;
pub mod mkfs;
pub mod space;
pub mod tree;

pub use api::*;
pub use error::{Error, Result};
pub use filesystem::Filesystem;
