//! Delayed data: the budget that all files share, which file is written back next, and how
//! operations and write-back change what a file has in memory ([`super::file_data`]).
//!
//! | module | decision it hides |
//! |---|---|
//! | `scratch` | the memory that write-back takes in addition |
//! | `queue` | the order of write-back, the budget, and how callers wait for both |
//! | `workers` | how many threads write back, and when each has work |
//! | `change` | taking bytes in, and setting sizes |
//! | `submit` | how dirty bytes become runs in flight, and how these end |
//!
//! A file with dirty bytes stands in the queue under the tick of its oldest write. That is the
//! order of write-back. Space was reserved when the bytes were written, so write-back cannot run
//! out of it. A writer that has to wait for the budget writes the oldest data back itself.
//!
//! Locks: `Inode.state`, then the inner mutex of [`FileData`](super::file_data::FileData), then the
//! queue's. Each is held for instructions only (the extent lock: [`crate::file`]). A waiter for
//! bytes in flight holds none of them, and no handle.
//!
//! A module uses only what stands above it here.

mod change;
mod queue;
pub(crate) mod scratch;
mod submit;
mod workers;

pub(crate) use change::{Admitted, cut, give_space, grow, rewritten, take_in};
pub(crate) use queue::{DataState, Job, WriteBack};
pub(crate) use submit::{Limits, Submission, complete, is_in_flight, memory_needed, reuse, submit};
pub(crate) use workers::start;
