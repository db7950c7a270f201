//! Where space comes from while a balance converts chunks to another profile.
//!
//! [`Targets`](crate::space::targets::Targets) has the profiles. Before space is looked for, a
//! chunk with the new profile is made if those that there are have no room. If that is not
//! possible, the old ones serve: what was promised has to be kept, and the balance comes back to
//! them.
//!
//! A conversion to parity is announced first. Data is charged for whole rows from then on, and only
//! when all that was reserved before has got its place, chunks with parity are made.

use super::{Allocator, ChunkOutcome, Room, Running, Seen};
use crate::error::Result;
use crate::space::SpaceKind;
use larder_format::items::Profile;

/// What chunks of each kind are to become, if anything.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct NewProfiles {
    pub(crate) data: Option<Profile>,
    pub(crate) metadata: Option<Profile>,
    pub(crate) system: Option<Profile>,
}

impl Allocator {
    /// Has data charged as it will have to be once its chunks are converted. See the module's text.
    pub(crate) fn announce(&self, to: NewProfiles) {
        let row = to.data.map_or(1, |profile| match profile.parity() {
            0 => 1,
            parity => self.device_count().saturating_sub(parity.into()),
        });
        let now = self.accounts.charge(SpaceKind::Data);
        self.accounts.set_data_charge(row.max(now));
    }

    /// From now on new chunks get these profiles.
    pub(crate) fn convert_to(&self, to: NewProfiles) {
        // No chunk is planned meanwhile.
        let device = self.device.lock();
        let both = if self.accounts.is_mixed() { to.data } else { to.metadata };
        self.groups.convert_to(SpaceKind::Data, to.data);
        self.groups.convert_to(SpaceKind::Metadata, both);
        self.groups.convert_to(SpaceKind::System, to.system);
        drop(device);
        self.charge_for_rows();
        self.note_device_space();
    }

    /// Charges data as the widest row needs it.
    pub(super) fn charge_for_rows(&self) {
        self.accounts.set_data_charge(self.groups.widest_row(SpaceKind::Data, self.device_count()));
    }

    /// Makes a chunk by `make` if chunks are converted and those with the new profile have no room.
    pub(super) fn prepare_target(
        &self,
        kind: SpaceKind,
        room: Room,
        make: impl FnOnce(Seen) -> Result<ChunkOutcome>,
    ) -> Result<()> {
        if self.groups.targets().get(kind).is_none() {
            return Ok(());
        }
        let seen = self.seen(kind);
        if !self.groups.target_has_room(kind, room.newest, room.least) {
            make(seen)?;
        }
        Ok(())
    }

    /// Makes chunks until those with the new profile have so many free bytes. False if the devices
    /// have no room for that.
    ///
    /// # Errors
    /// `ReadOnly`; broken accounts.
    pub(crate) fn make_room_in_target(
        &self,
        txns: &impl Running,
        kind: SpaceKind,
        bytes: u64,
    ) -> Result<bool> {
        loop {
            let seen = self.seen(kind);
            if self.groups.free_in_target(kind) >= bytes {
                return Ok(true);
            }
            if self.chunk_in_running(txns, kind, seen)? != ChunkOutcome::Granted {
                return Ok(false);
            }
        }
    }
}
