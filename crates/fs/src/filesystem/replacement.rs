//! Replacing a device of an open file system.

use super::Filesystem;
use crate::error::Result;
use crate::{ReplaceControl, ReplaceOptions, Replacing, replace};
use larder_volume::Device;
use std::sync::Arc;

impl Filesystem {
    /// Copies everything that a device holds to another one, which then takes its place, its number
    /// and its uuid. The file system is in use meanwhile, and what is written goes to both. Returns
    /// when the target has taken over, or when `control` has ended it. What came of it is in the
    /// state of `control`.
    ///
    /// What the target held is lost. The caller has made sure that it may be.
    ///
    /// # Errors
    /// `NotFound` for a device that the file system does not have; `Busy` while something else
    /// changes devices or chunks, and when it was told to end; `Unsupported` for a target that is
    /// too small or cannot be written, and for one that fails: then the replacement is given up.
    /// `ReadOnly`; reading.
    pub fn replace_device(
        &self,
        options: ReplaceOptions,
        target: Arc<dyn Device>,
        control: &ReplaceControl,
    ) -> Result<()> {
        crate::api::may_wait()?;
        let target = crate::watch::device(target);
        replace::start(&self.core, options, target, control)
    }

    /// Goes on with a replacement that was suspended, or that Linux began.
    ///
    /// # Errors
    /// `NotFound` when there is none; `Unsupported` when its target is not there; those of
    /// [`Filesystem::replace_device`].
    pub fn resume_replacement(&self, control: &ReplaceControl) -> Result<()> {
        crate::api::may_wait()?;
        replace::resume(&self.core, control)
    }

    /// Gives up a replacement that is suspended. One that runs ends through its control.
    ///
    /// # Errors
    /// `NotFound` when there is none; `Busy` when it runs; `ReadOnly`; those of a commit.
    pub fn cancel_replacement(&self) -> Result<()> {
        crate::api::may_wait()?;
        replace::cancel(&self.core)
    }

    /// The replacement that is suspended, or was the last. How far one is that runs, its control
    /// says.
    #[must_use]
    pub fn replacement(&self) -> Replacing {
        replace::status(&self.core)
    }
}
