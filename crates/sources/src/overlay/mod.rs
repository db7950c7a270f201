//! Sources over each other: from what each says about paths to one tree.
//!
//! Readers tell a [`Collector`] what a source holds, in any order of paths. It writes [`record`]s,
//! sorts them by path and time, and so brings together what all sources say about one path.
//! [`scan`] walks through the sorted records with the state of the path at hand, and knows for each
//! moment what is visible there. Two questions cannot be answered at the path where they come up,
//! and are answered by scans of their own before: what is at the other end of a hard link
//! ([`links`]), and where a path leads that goes through a symbolic link ([`redirect`]). [`merged`]
//! is the result.
//!
//! Nothing here keeps a whole tree in memory. What grows with the number of entries is sorted on
//! disk.

mod collector;
mod links;
mod merged;
mod record;
mod redirect;
mod scan;

pub(crate) use collector::{Collector, LeftOut, implicit_time};
pub use merged::Entries;
pub(crate) use merged::Merged;
pub(crate) use record::{Expected, Moment, Node, Patch, read_name, write_name};

#[cfg(test)]
mod tests;
