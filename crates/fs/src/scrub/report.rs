//! What a scrub says, and what it needs to go on later.

use larder_format::DeviceId;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Places with damage that are listed. More are counted.
const MOST_LISTED: usize = 1000;

/// How to scrub.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScrubOptions {
    /// Only look: nothing is repaired.
    pub read_only: bool,
}

/// How far a scrub is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScrubStatus {
    /// It works, or its daemon was killed while it did.
    #[default]
    Running,
    /// Everything was read.
    Finished,
    /// It was told to end, and can go on.
    Canceled,
    /// The file system was closed, and it can go on.
    Interrupted,
    /// It could not go on.
    Failed,
}

macro_rules! counts {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// What was read of a device, and what was wrong there.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(default)]
        pub struct ScrubCounts {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl std::ops::AddAssign for ScrubCounts {
            fn add_assign(&mut self, other: Self) {
                $(self.$name += other.$name;)*
            }
        }
    };
}
counts! {
    /// Bytes of data.
    data_bytes,
    /// Bytes of tree blocks.
    tree_bytes,
    /// Bytes of parity.
    parity_bytes,
    /// Tree blocks.
    tree_blocks,
    /// Sectors without a checksum.
    no_csum,
    /// Sectors that could not be read.
    read_errors,
    /// Sectors that do not match their checksums.
    csum_errors,
    /// Tree blocks that are damaged, or are another block.
    verify_errors,
    /// Copies of the superblock that are damaged.
    super_errors,
    /// Sectors of parity that do not fit what they cover.
    parity_errors,
    /// Sectors without a checksum that differ between copies.
    differing,
    /// Sectors, blocks and superblocks that were repaired; without repairing, that could be.
    corrected,
    /// Those of which nothing good is left.
    uncorrectable,
}

impl ScrubCounts {
    /// Everything that was read, in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.data_bytes + self.tree_bytes + self.parity_bytes
    }

    /// Everything that was wrong.
    #[must_use]
    pub fn errors(&self) -> u64 {
        let reading = self.read_errors + self.csum_errors + self.verify_errors;
        reading + self.super_errors + self.parity_errors + self.differing
    }
}

/// What is wrong with a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Damage {
    /// The device does not read it, and no other copy is good.
    Unreadable,
    /// Data without a good copy.
    Data,
    /// A tree block without a good copy.
    TreeBlock,
    /// Copies of data without checksums that differ.
    CopiesDiffer,
    /// Parity that does not fit data without checksums.
    ParityDiffers,
    /// Parity of which something else in its row is lost.
    Parity,
}

/// A file that uses damaged data.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ScrubFile {
    /// The subvolume.
    pub subvolume: u64,
    /// The inode in it.
    pub inode: u64,
    /// Where in the file.
    pub offset: u64,
    /// A path from the top of the file system, if it has one.
    pub path: Option<String>,
}

/// A place that could not be repaired.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScrubDamage {
    /// What is wrong.
    pub what: Damage,
    /// Its address.
    pub address: u64,
    /// Bytes.
    pub length: u64,
    /// The device.
    pub device: u64,
    /// Where on it.
    pub offset: u64,
    /// The extent that it belongs to.
    pub extent: Option<u64>,
    /// The files that use it, in every subvolume.
    pub files: Vec<ScrubFile>,
    /// Were there more files than are listed?
    pub more_files: bool,
    /// The tree that a block belongs to, and its level.
    pub tree: Option<(u64, u8)>,
}

/// All that is known of a scrub. It is enough to go on with it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ScrubState {
    /// The file system.
    pub fsid: String,
    /// How far it is.
    pub status: ScrubStatus,
    /// Why it failed.
    pub why: Option<String>,
    /// Does it only look?
    pub read_only: bool,
    /// When it was started and, if it was, resumed: seconds since the epoch.
    pub started: u64,
    /// See `started`.
    pub resumed: Option<u64>,
    /// Seconds that it worked.
    pub seconds: f64,
    /// Bytes per second that it may read, of all devices together; 0 for any number.
    pub limit: u64,
    /// About how many bytes there are to read.
    pub total: u64,
    /// Chunks that are done, by address.
    pub chunks: BTreeSet<u64>,
    /// Where to go on in others.
    pub positions: BTreeMap<u64, u64>,
    /// Counts by device.
    pub devices: BTreeMap<u64, ScrubCounts>,
    /// Devices that had been away, and are up to date now.
    pub brought_up_to_date: Vec<u64>,
    /// Places that could not be repaired.
    pub damage: Vec<ScrubDamage>,
    /// How many such places are not listed.
    pub more_damage: u64,
}

impl ScrubState {
    /// Counts of all devices.
    #[must_use]
    pub fn sum(&self) -> ScrubCounts {
        let mut sum = ScrubCounts::default();
        self.devices.values().for_each(|counts| sum += *counts);
        sum
    }

    /// Bytes that can still be expected.
    #[must_use]
    pub fn left(&self) -> u64 {
        self.total.saturating_sub(self.sum().bytes())
    }

    /// Seconds that it will take, at the rate so far.
    #[must_use]
    pub fn seconds_left(&self) -> Option<f64> {
        let rate = self.sum().bytes() as f64 / self.seconds;
        (rate.is_finite() && rate > 0.0).then(|| self.left() as f64 / rate)
    }

    /// Can it go on?
    #[must_use]
    pub fn can_resume(&self) -> bool {
        self.status != ScrubStatus::Finished
    }

    pub(super) fn of(&mut self, device: DeviceId) -> &mut ScrubCounts {
        self.devices.entry(device.0).or_default()
    }

    /// Lists a place, together with the one before it if it goes on there.
    pub(super) fn note(&mut self, found: ScrubDamage) {
        if let Some(last) = self.damage.last_mut()
            && (last.what, last.device, last.extent) == (found.what, found.device, found.extent)
            && found.extent.is_some()
            && last.address + last.length == found.address
            && last.offset + last.length == found.offset
        {
            last.length += found.length;
        } else if self.damage.len() < MOST_LISTED {
            self.damage.push(found);
        } else {
            self.more_damage += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn damage(address: u64, extent: Option<u64>) -> ScrubDamage {
        ScrubDamage {
            what: Damage::Data,
            address,
            length: 4096,
            device: 1,
            offset: address + (1 << 20),
            extent,
            files: Vec::new(),
            more_files: false,
            tree: None,
        }
    }

    #[test]
    fn damage_side_by_side_is_one_place() {
        let mut state = ScrubState::default();
        for (address, extent) in [(8192, Some(0)), (12288, Some(0)), (16384, Some(16384))] {
            state.note(damage(address, extent));
        }
        let places: Vec<(u64, u64)> = state.damage.iter().map(|d| (d.address, d.length)).collect();
        assert_eq!(places, [(8192, 8192), (16384, 4096)]);
        for n in 0..2 * MOST_LISTED as u64 {
            state.note(damage(n << 20, None));
        }
        assert_eq!(state.damage.len(), MOST_LISTED);
        assert_eq!(state.more_damage, MOST_LISTED as u64 + 2);
    }

    #[test]
    fn a_state_is_kept_as_text() {
        let mut state = ScrubState { fsid: "f".into(), total: 100, ..ScrubState::default() };
        state.of(DeviceId(2)).data_bytes = 40;
        state.positions.insert(1 << 30, 65536);
        let text = serde_json::to_string(&state).unwrap();
        let back: ScrubState = serde_json::from_str(&text).unwrap();
        assert_eq!((back.left(), back.positions.clone()), (60, state.positions));
        assert!(back.can_resume() && back.seconds_left().is_none());
        // A version that knows less.
        let back: ScrubState = serde_json::from_str("{}").unwrap();
        assert_eq!(back.sum(), ScrubCounts::default());
    }
}
