//! Giving up capabilities.
//!
//! The daemon needs none: what only root may do is done before (opening), or by the mount helper
//! (mounting, unmounting, the read-ahead of the mount).

use caps::{CapSet, Capability};
use std::io;

/// Takes all capabilities from this thread and those that it will start.
pub(super) fn drop_all() -> io::Result<()> {
    // Those that a program with file capabilities could still bring; taking them needs one itself.
    if caps::has_cap(None, CapSet::Effective, Capability::CAP_SETPCAP).map_err(io::Error::other)? {
        for capability in caps::runtime::thread_all_supported() {
            caps::drop(None, CapSet::Bounding, capability).map_err(io::Error::other)?;
        }
    }
    if caps::runtime::ambient_set_supported().is_ok() {
        caps::clear(None, CapSet::Ambient).map_err(io::Error::other)?;
    }
    for set in [CapSet::Effective, CapSet::Inheritable, CapSet::Permitted] {
        caps::clear(None, set).map_err(io::Error::other)?;
    }
    Ok(())
}
