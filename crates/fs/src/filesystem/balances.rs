//! Balances: starting one, and what is paused.

use super::Filesystem;
use crate::error::Result;
use crate::{BalanceControl, BalancePlan, BalanceWish, DataMay, balance};

impl Filesystem {
    /// Relocates the chunks that `wish` says, and converts them if it says so. Returns when that is
    /// done, or when `control` has ended it; its state says which. A balance that is paused, or
    /// that a crash ends, is remembered by the file system, and goes on with
    /// [`Self::resume_balance`], here or on Linux.
    ///
    /// # Errors
    /// `Busy` while another operation excludes this one, or a balance is paused; `Unsupported` for
    /// a profile that the devices do not allow, and for one that survives less than the present one
    /// unless the wish is forced; those of [`Filesystem::relocate`]. Chunks without room elsewhere
    /// are counted in the state.
    pub fn balance(
        &self,
        wish: &BalanceWish,
        data: DataMay,
        control: &BalanceControl,
    ) -> Result<()> {
        crate::api::may_wait()?;
        balance::start(&self.core, wish, data, control)
    }

    /// Goes on with the balance that is paused. What has been moved already is left alone.
    ///
    /// # Errors
    /// `Invalid` if none is paused; those of [`Self::balance`].
    pub fn resume_balance(&self, control: &BalanceControl) -> Result<()> {
        crate::api::may_wait()?;
        balance::resume(&self.core, control)
    }

    /// Ends the balance that is paused. What has been moved stays where it is.
    ///
    /// # Errors
    /// `Invalid` if none is paused; `Busy`; those of [`Filesystem::sync`].
    pub fn cancel_paused_balance(&self) -> Result<()> {
        crate::api::may_wait()?;
        balance::cancel_paused(&self.core)
    }

    /// The balance that is under way or paused, as the file system remembers it.
    ///
    /// # Errors
    /// `Corrupt` for an item that makes no sense.
    pub fn unfinished_balance(&self) -> Result<Option<BalanceWish>> {
        balance::paused(&self.core)
    }

    /// What a balance could free.
    #[must_use]
    pub fn balance_plan(&self) -> BalancePlan {
        balance::plan(&self.core)
    }
}
