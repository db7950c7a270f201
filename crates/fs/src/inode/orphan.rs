//! Inodes without names.

use crate::core::Core;
use crate::error::Result;
use std::sync::Arc;

/// Deletes what a crash left without names.
pub(crate) fn clean_up_after_crash(_core: &Arc<Core>) -> Result<()> {
    Ok(())
}
/// Deletes what only holds kept.
pub(crate) fn delete_held(_core: &Arc<Core>) -> Result<()> {
    Ok(())
}
