//! An `fsync` as the log sees it: an inode contributes, and the caller's completion is called when
//! the log or a commit has made that durable.

use super::batch::TxnLog;
use super::contribute::{Awaited, contribute};
use super::queue::leave_to_commit;
use crate::completion::Completion;
use crate::engine::{Core, Inode};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Makes an inode durable whose data has been written back, and then completes `done`. This thread
/// does not wait for others, but it may write the log, for other callers as well.
///
/// `done` gets errors of reading, corruption, and `ReadOnly` when writing has ended.
pub(crate) fn sync(core: &Arc<Core>, inode: &Arc<Inode>, done: Completion) {
    core.log.fsyncs.fetch_add(1, Ordering::Relaxed);
    let awaited = match contribute(core, inode) {
        Ok(_) if fault!(core.options.tuning, FsyncDoesNotWait) => Awaited::Nothing,
        Ok(awaited) => awaited,
        Err(e) => return done.complete(Err(e)),
    };
    match awaited {
        Awaited::Nothing => {
            core.log.nothing.fetch_add(1, Ordering::Relaxed);
            done.complete(Ok(()));
        }
        Awaited::Publication(generation) => {
            core.log.nothing.fetch_add(1, Ordering::Relaxed);
            core.txns.when_published(generation, done);
        }
        Awaited::Ticket(txn, ticket) => TxnLog::of(&txn).when_durable(core, &txn, ticket, done),
        Awaited::Commit(generation, cause) => leave_to_commit(core, generation, cause, done),
    }
}
