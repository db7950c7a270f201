//! The offline checker: reads an image, compares everything in it with everything else, and says
//! what is wrong.
//!
//! It shares no code with the engine that it checks: this crate knows the format, how to read
//! devices and to unpack, nothing more, and its manifest keeps it so. It only reads.
//!
//! # How it works
//!
//! A file system says most things twice: an extent's references and the pointers that make them, a
//! directory's entries and the names that inodes record, allocated space and free space. A checker
//! has to compare the two sides of tens of millions of facts, in bounded memory and at the speed of
//! the disk. Here each node is read once, by any thread, in any order, and each fact adds a keyed
//! hash to the sum of its side. Where the sums agree, so do the facts. Where they do not, a second
//! walk collects the facts about the few places in question, and they are compared one by one. A
//! sound image costs one pass and some tens of MiB, whatever its size; damage costs another pass or
//! two, and so do quotas, for no sum tells which subvolumes reach an extent.
//!
//! # Modules
//!
//! A module uses only those above it.
//!
//! | module | decision it hides |
//! |---|---|
//! | [`finding`] | what can be found, and what it means; how a flood of findings is kept readable |
//! | [`progress`] | how callers learn how far the check is |
//! | `run` | how objects whose items span leaves are put together |
//! | `sets` | how facts are compared through sums; sets of addresses |
//! | `coverage` | which sectors hold data, have checksums, need them |
//! | `owners` | which file a range of addresses belongs to |
//! | `source` | when a node can still be used, of all its copies |
//! | `walk` | how every node is looked at once, in parallel, and pieces are joined |
//! | `lost` | what could not be read, and thus what merely follows from that |
//! | `refs` | uses of extents, against the references that are recorded |
//! | `chunks` | the chunks, and what is counted in each |
//! | `data` | file data against its checksums |
//! | `dump` | what a metadata dump lacks; of one, everything is checked that it has |
//! | `report` | options, errors, the result |
//! | `world` | what all parts of the check share: the image, a pass over it |
//! | `supers` | which superblock to start from; whether the others agree |
//! | `unpack` | whether compressed data can be unpacked |
//! | `links` | what names, entries and inodes add to the sums of a subvolume |
//! | `inode` | what one inode's items say about each other |
//! | `files` | the leaves of subvolumes |
//! | `names` | what is wrong with names that do not add up |
//! | `roots` | which trees there are, and where subvolumes hang |
//! | `extents`, `sums`, `plain` | the extent tree, the checksum tree, all other trees |
//! | `log` | whether the next mount can replay the log |
//! | `tables` | chunks, block groups, device extents and devices |
//! | `free_space`, `space_cache` | free space, in either form, against the extent tree |
//! | `quotas` | counts of quota groups |
//! | `stages` | the order of things |
//!
//! Not checked: the contents of verity items, and what replaying a log would give.

mod chunks;
mod coverage;
mod data;
mod dump;
mod extents;
mod files;
pub mod finding;
mod free_space;
mod inode;
mod links;
mod log;
mod lost;
mod names;
mod owners;
mod plain;
pub mod progress;
mod quotas;
mod refs;
mod report;
mod roots;
mod run;
mod sets;
mod source;
mod space_cache;
mod stages;
mod sums;
mod supers;
mod tables;
mod unpack;
mod walk;
mod world;

pub use dump::Dump;
pub use finding::{Count, Finding, Kind, Severity};
pub use progress::{Phase, Progress, Watcher};
pub use report::{Error, Options, Report, Stats};

use larder_volume::Device;
use std::sync::Arc;

/// Checks the file system on these devices, which are only read.
///
/// `watcher` is told of the progress now and then, from any thread.
///
/// # Errors
/// There is nothing to check, or nothing that is known how to. Damage is no error but in the
/// report, however bad.
pub fn check(
    devices: &[Arc<dyn Device>],
    options: &Options,
    watcher: Watcher<'_>,
) -> Result<Report, Error> {
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(options.threads)
        .thread_name(|n| format!("larder-check-{n}"))
        // Walks recurse, and a thread that waits takes up other subtrees on top of its own.
        .stack_size(16 << 20)
        .build()
        .map_err(|e| Error::Threads(e.to_string()))?;
    pool.install(|| stages::run(devices, options, watcher))
}
