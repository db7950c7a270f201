//! Mounts and processes, as Linux's `/proc` shows them.
//!
//! Hidden here is how these tables are written. They are bytes, not text: a mount point may have
//! any name, and the name of a process is cut after 15 bytes, which may be in the middle of a
//! letter. A reader that expects UTF-8 then gets an error instead of the whole table.
//!
//! The crate `procfs` is such a reader (0.18). It fails for a mount table with one path that is not
//! UTF-8, whichever mount is asked for. It also leaves the escapes of blanks in the paths. So these
//! two tables are read here. Files of numbers, such as `/proc/meminfo`, need no crate.

mod mounts;
mod status;

pub use mounts::{Mount, mounts, mounts_of};
pub use status::Status;
