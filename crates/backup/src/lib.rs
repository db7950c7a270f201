//! What a backup sends, keeps and prunes: decisions about lists of snapshots, without any I/O.
//!
//! A backup makes a read-only snapshot of its source, sends it to its target, and prunes both
//! sides. It may end at any point, by a crash or because the other machine is gone, and is then
//! started again. So it keeps no state of its own. Each run looks at the snapshots that there are
//! on both sides, and [`plan()`] says what is still to be done. What is done already does not show
//! up again.
//!
//! A snapshot is known by its [`Name`], which has the time in it, and by its uuid. The target's
//! uuid is another one, and its received uuid is that of the source. Two snapshots are the same if
//! these are equal, whatever they are called.
//!
//! [`Keep`] is the policy: which of a list of times stay. Nothing here knows trees, streams or
//! paths.

mod calendar;
mod keep;
mod name;
mod plan;

pub use keep::{Keep, KeepError, Reasons, Rule};
pub use name::Name;
pub use plan::{Plan, Row, Send, Snapshot, plan};
