//! `fsync`: a file's data first, then the log.

use super::write::sync;
use crate::api::may_wait;
use crate::completion::Completion;
use crate::engine::{Core, Inode};
use crate::error::Result;
use crate::file::fsync_data;
use crate::watch::Logging;
use std::sync::Arc;

/// Makes one inode durable, its data, metadata and names, and then completes `done`. This thread
/// waits for the inode's data to be written, and for nothing that other threads do.
///
/// `done` gets `DataLost` while data of the file could not be written, although the rest is made
/// durable all the same; `ReadOnly` after a failed commit; `WouldBlock`.
pub(crate) fn fsync(core: &Arc<Core>, inode: &Arc<Inode>, done: Completion) {
    if core.read_only.is_some() {
        return done.complete(Ok(()));
    }
    if let Err(e) = may_wait() {
        return done.complete(Err(e));
    }
    let done = done.after(fsync_data(core, inode));
    let _logging = Logging::begin();
    match provoke(core, inode) {
        Ok(()) => sync(core, inode, done),
        Err(e) => done.complete(Err(e)),
    }
}

/// Changes what a test that breaks the engine has to notice.
///
/// # Errors
/// Those of the device.
fn provoke(core: &Core, inode: &Inode) -> Result<()> {
    let tuning = &core.options.tuning;
    if fault!(tuning, LogCopiesLocked) {
        inode
            .subvol
            .tree
            .locked(|| drop(std::hint::black_box(vec![0u8; core.nodesize() as usize])));
    }
    if fault!(tuning, LogWaitsLocked) {
        inode.subvol.tree.locked(|| core.volume.flush())?;
    }
    Ok(())
}
