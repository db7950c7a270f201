//! `fsync`: a file's data first, then the log.

use super::{OnSynced, Synced, sync, sync_then};
use crate::api::may_wait;
use crate::engine::{Core, Inode};
use crate::error::Result;
use crate::file::fsync_data;
use std::sync::Arc;

/// Makes one inode durable: data, metadata and names.
///
/// # Errors
/// `DataLost` while data of the file could not be written; `ReadOnly` after a failed commit;
/// `WouldBlock`.
pub(crate) fn fsync(core: &Core, inode: &Arc<Inode>, _data_only: bool) -> Result<()> {
    if core.read_only.is_some() {
        return Ok(());
    }
    may_wait()?;
    let flushed = fsync_data(core, inode);
    let _logging = crate::watch::Logging::begin();
    provoke(core, inode)?;
    sync(core, inode)?;
    flushed
}

/// As [`fsync`], but does not wait for a batch that another thread writes. `then` is told the
/// result.
pub(crate) fn fsync_then(core: &Arc<Core>, inode: &Arc<Inode>, then: OnSynced) {
    if core.read_only.is_some() {
        return then(Synced::Done(Ok(())));
    }
    if let Err(e) = may_wait() {
        return then(Synced::Done(Err(e)));
    }
    let flushed = fsync_data(core, inode);
    let _logging = crate::watch::Logging::begin();
    if let Err(e) = provoke(core, inode) {
        return then(Synced::Done(Err(e)));
    }
    let then = match flushed {
        Ok(()) => then,
        // The rest is made durable all the same.
        Err(e) => Box::new(move |synced| {
            then(match synced {
                Synced::Done(Err(worse)) => Synced::Done(Err(worse)),
                Synced::Done(Ok(())) | Synced::Commit(_) => Synced::Done(Err(e)),
            });
        }),
    };
    sync_then(core, inode, then);
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
