//! Receives subvolumes: applies the commands of a send stream to an image or a mount.
//!
//! A subvolume is made, filled command by command, and when it is complete it gets the uuid that it
//! was sent under and becomes read-only. So either side can be the parent of the next stream. Until
//! then it is writable and has a [`record`], which tells a later run where to go on.
//!
//! A stream is hostile: its checksums are verified by the crate `stream`, its paths here
//! ([`StreamPath`]), and nothing but the new subvolume is changed.
//!
//! # Modules
//!
//! A module uses only those above it.
//!
//! | module | decision it hides |
//! |---|---|
//! | `error` | what callers see |
//! | `path` | which paths are refused |
//! | `destination` | what can receive |
//! | `record` | how a subvolume says how far it is |
//! | `image` | receiving into an image, through the engine |
//! | `mounted` | receiving into a directory of a mount, through system calls |
//! | `apply` | what each command does |
//! | `ahead` | how the stream is read while it is applied |
//! | `subvolume` | how a subvolume begins, goes on after an end, and becomes complete |
//! | `receiver` | the loop over commands; which errors end it |

mod ahead;
mod apply;
pub mod destination;
mod error;
mod image;
mod mounted;
mod path;
mod receiver;
pub mod record;
mod subvolume;

pub use error::{BoxError, Error, Failure, Refused, Taken};
pub use image::ImageDir;
pub use mounted::MountedDir;
pub use path::StreamPath;
pub use receiver::{Observer, Options, Received, Summary, receive};
pub use subvolume::{checkpoint_of, checkpoints};
