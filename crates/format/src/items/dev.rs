//! DEV_EXTENT, the device's error counters, and the replacement of a device.
//!
//! A DEV_EXTENT is a chunk's stripe seen from the device; chunk tree and device tree must agree.
//! The counters are the item (0, PERSISTENT_ITEM, devid) of the device tree, the replacement is
//! (0, DEV_REPLACE, 0). There is one replacement at a time, and the item of the last one stays.

use super::{aligned, exact};
use crate::{
    DeviceId, FIRST_CHUNK_OBJECTID, FormatError, FormatResult, Key, KeyType, ObjectId, Physical,
};
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// DEV_EXTENT, 48 bytes; device and physical address stand in its key.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct DevExtent {
    /// 3, the chunk tree.
    pub chunk_tree: U64,
    /// 256.
    pub chunk_objectid: U64,
    /// Logical address of the chunk.
    pub chunk_offset: U64,
    /// Bytes on this device.
    pub length: U64,
    /// As in every node header.
    pub chunk_tree_uuid: [u8; 16],
}
const _: () = assert!(size_of::<DevExtent>() == 48);

impl DevExtent {
    /// From the item's bytes.
    ///
    /// # Errors
    /// A wrong size, another chunk tree, or an unaligned or empty range.
    pub fn parse(bytes: &[u8]) -> FormatResult<&Self> {
        const WHAT: &str = "device extent";
        let item: &Self = exact(bytes, WHAT)?;
        if item.chunk_tree.get() != ObjectId::CHUNK_TREE.0
            || item.chunk_objectid.get() != FIRST_CHUNK_OBJECTID
        {
            return Err(FormatError::new(format!(
                "device extent names chunk tree {} and object {}, expected 3 and 256",
                item.chunk_tree, item.chunk_objectid
            )));
        }
        aligned(item.chunk_offset.get(), WHAT, "chunk_offset")?;
        aligned(item.length.get(), WHAT, "length")?;
        if item.length.get() == 0 {
            return Err(FormatError::new("device extent has length 0, expected more"));
        }
        Ok(item)
    }
}

/// Errors seen on a device, counted over its life.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
    Unaligned,
)]
#[repr(C)]
pub struct DevStats {
    /// Failed writes.
    pub write_errors: U64,
    /// Failed reads.
    pub read_errors: U64,
    /// Failed flushes.
    pub flush_errors: U64,
    /// Wrong checksums.
    pub corruption_errors: U64,
    /// Wrong generations.
    pub generation_errors: U64,
}
const _: () = assert!(size_of::<DevStats>() == 40);

impl DevStats {
    /// From the item's bytes. Counters that a shorter item lacks are zero; what a longer one has
    /// beyond is not read.
    ///
    /// # Errors
    /// The size is no multiple of 8.
    pub fn parse(bytes: &[u8]) -> FormatResult<Self> {
        if !bytes.len().is_multiple_of(8) {
            return Err(FormatError::new(format!(
                "device statistics have {} bytes, expected a multiple of 8",
                bytes.len()
            )));
        }
        let mut out = Self::default();
        let n = bytes.len().min(size_of::<Self>());
        out.as_mut_bytes()[..n].copy_from_slice(&bytes[..n]);
        Ok(out)
    }
}

/// How far a replacement has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplaceState {
    /// There was none.
    Never,
    /// It is under way. It stays so on disk while it is suspended.
    Started,
    /// The target has taken the place of its source.
    Finished,
    /// It was given up.
    Canceled,
    /// It was suspended. Linux has this in memory only.
    Suspended,
}

impl ReplaceState {
    /// Is there a target that gets all that its source gets?
    #[must_use]
    pub fn is_under_way(self) -> bool {
        matches!(self, Self::Started | Self::Suspended)
    }
    fn from_disk(number: u64) -> Option<Self> {
        Some(match number {
            0 => Self::Never,
            1 => Self::Started,
            2 => Self::Finished,
            3 => Self::Canceled,
            4 => Self::Suspended,
            _ => return None,
        })
    }
}

/// DEV_REPLACE, 72 bytes: a device is copied to another one, the target, which then takes its id
/// and its uuid. Until then the target has the id [`DeviceId::REPLACE_TARGET`] and a uuid of its
/// own, in its superblock only.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct DevReplace {
    source: U64,
    cursor_left: U64,
    cursor_right: U64,
    mode: U64,
    state: U64,
    /// When it began, in seconds since 1970.
    pub started: U64,
    /// When it ended or was suspended.
    pub stopped: U64,
    /// Failed writes of the target.
    pub write_errors: U64,
    /// Sectors of which no copy was good.
    pub unreadable: U64,
}
const _: () = assert!(size_of::<DevReplace>() == 72);

/// Where a replacement has come that has just begun: no chunk ends there, and Linux does
/// not begin there.
const JUST_BEGUN: u64 = 1;

impl DevReplace {
    /// Where the item stands, in the device tree.
    #[must_use]
    pub fn key() -> Key {
        Key::new(ObjectId(0), KeyType::DEV_REPLACE, 0)
    }

    /// A replacement that begins at a time, in seconds since 1970. `avoid`: the source is read only
    /// where nothing else has its bytes.
    #[must_use]
    pub fn begun(source: DeviceId, avoid: bool, started: u64) -> Self {
        let zero = U64::new(0);
        let mut this = Self {
            source: U64::new(source.0),
            cursor_left: zero,
            cursor_right: U64::new(JUST_BEGUN),
            mode: U64::new(avoid.into()),
            state: zero,
            started: U64::new(started),
            stopped: zero,
            write_errors: zero,
            unreadable: zero,
        };
        this.set_state(ReplaceState::Started);
        this
    }

    /// From the item's bytes.
    ///
    /// # Errors
    /// A wrong size, a state or mode that does not exist.
    pub fn parse(bytes: &[u8]) -> FormatResult<&Self> {
        let item: &Self = exact(bytes, "device replacement")?;
        if ReplaceState::from_disk(item.state.get()).is_none() || item.mode.get() > 1 {
            return Err(FormatError::new(format!(
                "device replacement has state {} and mode {}, expected up to 4 and 1",
                item.state, item.mode
            )));
        }
        Ok(item)
    }

    /// The device that is replaced. Linux forgets it when the replacement has ended.
    #[must_use]
    pub fn source(&self) -> DeviceId {
        DeviceId(self.source.get())
    }

    /// Everything in front of it has been copied.
    #[must_use]
    pub fn cursor(&self) -> Physical {
        Physical(self.cursor_left.get())
    }

    /// Everything in front of it is being copied, or has been.
    #[must_use]
    pub fn cursor_right(&self) -> Physical {
        Physical(self.cursor_right.get())
    }

    /// Is it not known yet whether the target has a superblock? So it is in the commit with which
    /// Larder begins, which the target may not have survived.
    #[must_use]
    pub fn has_just_begun(&self) -> bool {
        self.cursor_right.get() == JUST_BEGUN
    }

    /// How far it is, and how far what is being copied reaches.
    pub fn set_cursor(&mut self, copied: Physical, copying: Physical) {
        self.cursor_left = U64::new(copied.0);
        self.cursor_right = U64::new(copying.0);
    }

    /// Is the source read only where nothing else has its bytes?
    #[must_use]
    pub fn avoids_source(&self) -> bool {
        self.mode.get() != 0
    }

    /// How far it has come.
    #[must_use]
    pub fn state(&self) -> ReplaceState {
        ReplaceState::from_disk(self.state.get()).unwrap_or(ReplaceState::Never)
    }

    /// Changes its state. Like Linux it forgets the source with the end.
    pub fn set_state(&mut self, state: ReplaceState) {
        self.state = U64::new(match state {
            ReplaceState::Never => 0,
            ReplaceState::Started => 1,
            ReplaceState::Finished => 2,
            ReplaceState::Canceled => 3,
            ReplaceState::Suspended => 4,
        });
        if matches!(state, ReplaceState::Finished | ReplaceState::Canceled) {
            self.source = U64::new(u64::MAX);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What Linux 6.18 wrote when a replacement of device 2 was suspended.
    const OF_LINUX: [u64; 9] = [2, 0x810_0000, 0xd10_0000, 0, 1, 0x6b07_5e17, 0, 0, 0];

    #[test]
    fn a_replacement_of_linux_is_understood() {
        let bytes: Vec<u8> = OF_LINUX.iter().flat_map(|word| word.to_le_bytes()).collect();
        let item = DevReplace::parse(&bytes).unwrap();
        assert_eq!((item.source(), item.cursor()), (DeviceId(2), Physical(135_266_304)));
        assert!(item.state() == ReplaceState::Started && !item.avoids_source());
        let mut ours = DevReplace::begun(DeviceId(2), false, 1_795_644_951);
        ours.set_cursor(Physical(135_266_304), Physical(219_152_384));
        assert_eq!(ours.as_bytes(), bytes);
        ours.set_state(ReplaceState::Finished);
        assert_eq!((ours.source().0, ours.state()), (u64::MAX, ReplaceState::Finished));
        for (word, value) in [(4, 5), (3, 2)] {
            let mut bad = bytes.clone();
            bad[word * 8] = value;
            assert!(DevReplace::parse(&bad).is_err());
        }
        assert!(DevReplace::parse(&bytes[..64]).is_err());
    }
}
