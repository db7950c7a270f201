//! Long operations on chunks and devices exclude each other.
//!
//! A balance, adding, removing or replacing a device, and a resize all rely on chunks and devices
//! that nobody else changes. So there is one slot, and an operation has a [`Claim`] on it as long
//! as it lasts. A balance that is paused keeps the slot, because it goes on later. Only a device
//! may be added beside it, as on Linux: a balance that lacks space is paused for that. A
//! replacement that is suspended keeps the slot as well, and nothing else may come.

use crate::error::{Error, Result};
use crate::lock::{self, Mutex};

/// An operation that excludes others of its kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExclusiveOperation {
    /// Block groups are relocated by a balance.
    Balance,
    /// A device is added.
    DeviceAdd,
    /// A device is removed.
    DeviceRemove,
    /// A device is replaced by another.
    DeviceReplace,
    /// A device gets larger or smaller.
    Resize,
}

impl ExclusiveOperation {
    /// Why nothing else may begin while it runs.
    fn is_running(self) -> &'static str {
        match self {
            Self::Balance => "a balance is running; pause or cancel it, or wait for its end",
            Self::DeviceAdd => "a device is being added; wait for its end",
            Self::DeviceRemove => "a device is being removed; wait for its end",
            Self::DeviceReplace => "a device is being replaced; cancel that, or wait for its end",
            Self::Resize => "a device is being resized; wait for its end",
        }
    }
}

const IS_SUSPENDED: &str = "the replacement of a device is suspended; resume or cancel it first";
const IS_PAUSED: &str = "a balance is paused; resume or cancel it first";

/// What has the slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Exclusive {
    /// Nothing.
    #[default]
    Free,
    /// An operation that runs.
    Runs(ExclusiveOperation),
    /// A balance that is paused.
    BalanceIsPaused,
    /// A replacement that is suspended.
    ReplaceIsSuspended,
}

/// The slot.
#[derive(Debug, Default)]
pub(crate) struct Slot(Mutex<Exclusive, lock::ExclusiveSlot>);

impl Slot {
    /// Takes the slot.
    ///
    /// # Errors
    /// `Busy`, which names what has it.
    pub(crate) fn claim(&self, operation: ExclusiveOperation) -> Result<Claim<'_>> {
        use ExclusiveOperation::{Balance, DeviceAdd, DeviceReplace};
        let mut now = self.0.lock();
        let after = match (*now, operation) {
            (Exclusive::Runs(other), _) => return Err(Error::Busy(other.is_running())),
            (Exclusive::BalanceIsPaused, Balance | DeviceAdd) => Exclusive::BalanceIsPaused,
            (Exclusive::BalanceIsPaused, _) => return Err(Error::Busy(IS_PAUSED)),
            (Exclusive::ReplaceIsSuspended, DeviceReplace) => Exclusive::ReplaceIsSuspended,
            (Exclusive::ReplaceIsSuspended, _) => return Err(Error::Busy(IS_SUSPENDED)),
            (Exclusive::Free, _) => Exclusive::Free,
        };
        *now = Exclusive::Runs(operation);
        Ok(Claim { slot: self, after })
    }

    /// What has it.
    pub(crate) fn now(&self) -> Exclusive {
        *self.0.lock()
    }

    /// There is a balance that is paused, from before the file system was opened.
    pub(crate) fn found_paused_balance(&self) {
        *self.0.lock() = Exclusive::BalanceIsPaused;
    }

    /// The same for a replacement that is suspended.
    pub(crate) fn found_suspended_replacement(&self) {
        *self.0.lock() = Exclusive::ReplaceIsSuspended;
    }
}

/// An operation has the slot. It is given back when this is dropped.
#[derive(Debug)]
pub(crate) struct Claim<'a> {
    slot: &'a Slot,
    after: Exclusive,
}

impl Claim<'_> {
    /// The balance that ends now is paused, or is gone for good.
    pub(crate) fn leave_paused_balance(&mut self, paused: bool) {
        self.after = if paused { Exclusive::BalanceIsPaused } else { Exclusive::Free };
    }
}

impl Claim<'_> {
    /// The replacement that ends now is suspended, or is gone for good.
    pub(crate) fn leave_suspended_replacement(&mut self, suspended: bool) {
        self.after = if suspended { Exclusive::ReplaceIsSuspended } else { Exclusive::Free };
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        *self.slot.0.lock() = self.after;
    }
}

#[cfg(test)]
mod tests {
    use super::ExclusiveOperation::{Balance, DeviceAdd, DeviceRemove, DeviceReplace, Resize};
    use super::*;

    #[test]
    fn one_operation_runs_and_is_named() {
        let slot = Slot::default();
        let claim = slot.claim(Resize).unwrap();
        assert_eq!(slot.now(), Exclusive::Runs(Resize));
        let said = slot.claim(DeviceRemove).unwrap_err().to_string();
        assert!(said.contains("resized"), "{said}");
        drop(claim);
        assert_eq!(slot.now(), Exclusive::Free);
        slot.claim(DeviceRemove).unwrap();
    }

    #[test]
    fn a_suspended_replacement_lets_nothing_else_come() {
        let slot = Slot::default();
        slot.claim(DeviceReplace).unwrap().leave_suspended_replacement(true);
        assert!(slot.claim(Balance).unwrap_err().to_string().contains("suspended"));
        drop(slot.claim(DeviceReplace).unwrap());
        assert_eq!(slot.now(), Exclusive::ReplaceIsSuspended);
        slot.claim(DeviceReplace).unwrap().leave_suspended_replacement(false);
        assert_eq!(slot.now(), Exclusive::Free);
        slot.found_suspended_replacement();
        assert!(slot.claim(DeviceAdd).is_err());
    }

    #[test]
    fn a_paused_balance_lets_only_devices_come() {
        let slot = Slot::default();
        slot.claim(Balance).unwrap().leave_paused_balance(true);
        assert!(slot.claim(DeviceRemove).unwrap_err().to_string().contains("paused"));
        drop(slot.claim(DeviceAdd).unwrap());
        assert_eq!(slot.now(), Exclusive::BalanceIsPaused);
        slot.claim(Balance).unwrap().leave_paused_balance(false);
        assert_eq!(slot.now(), Exclusive::Free);
        slot.found_paused_balance();
        assert!(slot.claim(Resize).is_err());
    }
}
