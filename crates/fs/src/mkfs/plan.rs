//! What is decided before the first byte is made: defaults for what the options leave open, and
//! which options do not go together.

use super::features::Features;
use super::layout::{self, FIRST_DEVICE, Layout};
use crate::{Error, Result, Timestamp};
use larder_format::items::Profile;
use larder_format::{CsumType, DeviceId, Generation};

/// Transaction that everything in a new file system belongs to.
pub(super) const GENERATION: Generation = Generation(1);

/// How to make a file system. The default is what mkfs.btrfs does without options.
#[derive(Clone, Debug)]
pub struct MkfsOptions {
    /// Name, up to 255 bytes without NUL and newline.
    pub label: Vec<u8>,
    /// Uuid of the file system. `None`: a random one. If it is given, the other uuids are derived
    /// from it.
    pub uuid: Option<[u8; 16]>,
    /// Uuid of the first device. `None`: it is derived from that of the file system, as those of
    /// the others are.
    pub device_uuid: Option<[u8; 16]>,
    /// Use only so many bytes of each device. `None`: all of it.
    pub bytes: Option<u64>,
    /// Copies of metadata. `None`: two, on two devices if there are several, or one with mixed
    /// groups.
    pub metadata: Option<Profile>,
    /// Copies of data. `None`: one, or as for metadata with mixed groups.
    pub data: Option<Profile>,
    /// Checksum of metadata and data.
    pub csum: CsumType,
    /// Bytes of a tree node. `None`: 16384, or 4096 with mixed groups.
    pub nodesize: Option<u32>,
    /// Features.
    pub features: Features,
    /// Time of the first inodes. `None`: now.
    pub time: Option<Timestamp>,
    /// User and group that own the root directory.
    pub root_owner: (u32, u32),
    /// Overwrite what [`recognise`](crate::mkfs::recognise) finds instead of refusing.
    pub force: bool,
    /// Tell the devices beforehand that all of them is free.
    pub discard: bool,
}

impl Default for MkfsOptions {
    fn default() -> Self {
        Self {
            label: Vec::new(),
            uuid: None,
            device_uuid: None,
            bytes: None,
            metadata: None,
            data: None,
            csum: CsumType::Crc32c,
            nodesize: None,
            features: Features::default(),
            time: None,
            root_owner: (0, 0),
            force: false,
            discard: true,
        }
    }
}

/// A device of the new file system.
#[derive(Clone, Copy, Debug)]
pub(super) struct PlannedDevice {
    pub(super) id: DeviceId,
    pub(super) uuid: [u8; 16],
    /// Bytes that are used of it.
    pub(super) bytes: u64,
}

/// All that is decided before the first byte is made.
pub(super) struct Plan {
    pub(super) fsid: [u8; 16],
    pub(super) devices: Vec<PlannedDevice>,
    pub(super) chunk_tree_uuid: [u8; 16],
    pub(super) subvol_uuid: [u8; 16],
    pub(super) nodesize: u32,
    pub(super) csum: CsumType,
    pub(super) features: Features,
    pub(super) metadata: Profile,
    pub(super) data: Profile,
    pub(super) time: Timestamp,
    pub(super) root_owner: (u32, u32),
    pub(super) layout: Layout,
}

impl Plan {
    /// Fails for options that do not go together, for too few devices, and for one that is too
    /// small.
    pub(super) fn new(sizes: &[u64], options: &MkfsOptions) -> Result<Self> {
        let features = options.features;
        features.check()?;
        let nodesize = nodesize(options)?;
        let (metadata, data) = profiles(sizes.len(), options)?;
        let sizes = sizes.iter().map(|size| used_bytes(*size, options));
        let sizes = sizes.collect::<Result<Vec<u64>>>()?;
        let fsid = options.uuid.unwrap_or_else(|| uuid::Uuid::new_v4().into_bytes());
        if fsid == [0; 16] {
            return Err(Error::Unsupported("a file system's uuid must not be all zero".into()));
        }
        Ok(Self {
            root_owner: options.root_owner,
            fsid,
            devices: devices(fsid, &sizes, options),
            chunk_tree_uuid: derived_uuid(fsid, b"chunk tree"),
            subvol_uuid: derived_uuid(fsid, b"top subvolume"),
            nodesize,
            csum: options.csum,
            features,
            metadata,
            data,
            time: options.time.unwrap_or_else(Timestamp::now),
            layout: layout::plan(&sizes, metadata, data, features.mixed)?,
        })
    }

    /// Bytes of all devices.
    pub(super) fn total_bytes(&self) -> u64 {
        self.devices.iter().map(|device| device.bytes).sum()
    }

    /// A device that the layout has.
    pub(super) fn device(&self, id: DeviceId) -> &PlannedDevice {
        &self.devices[usize::try_from(id.0 - FIRST_DEVICE.0).expect("one of the devices")]
    }
}

/// A uuid that follows from the file system's. It is of version 8, "custom", as in RFC 9562.
#[must_use]
pub fn derived_uuid(fsid: [u8; 16], of: &[u8]) -> [u8; 16] {
    let hash = CsumType::Blake2b.compute(&[&fsid[..], of].concat());
    uuid::Builder::from_custom_bytes(hash[..16].try_into().expect("half of a hash"))
        .into_uuid()
        .into_bytes()
}

/// The devices, in the order in which they were given.
fn devices(fsid: [u8; 16], sizes: &[u64], options: &MkfsOptions) -> Vec<PlannedDevice> {
    let device = |(id, bytes): (u64, &u64)| {
        let uuid = match id {
            1 => options.device_uuid.unwrap_or_else(|| derived_uuid(fsid, b"device")),
            _ => derived_uuid(fsid, format!("device {id}").as_bytes()),
        };
        PlannedDevice { id: DeviceId(id), uuid, bytes: *bytes }
    };
    (FIRST_DEVICE.0..).zip(sizes).map(device).collect()
}

/// Bytes of a device that are used.
fn used_bytes(size: u64, options: &MkfsOptions) -> Result<u64> {
    if let Some(bytes) = options.bytes.filter(|bytes| *bytes > size) {
        return Err(Error::Unsupported(format!(
            "it is smaller than requested: {size} bytes instead of {bytes}"
        )));
    }
    Ok(options.bytes.unwrap_or(size) & !4095)
}

/// Bytes of a tree node.
fn nodesize(options: &MkfsOptions) -> Result<u32> {
    let features = options.features;
    let nodesize = options.nodesize.unwrap_or(if features.mixed { 4096 } else { 16384 });
    if !nodesize.is_power_of_two() || !(4096..=65536).contains(&nodesize) {
        return Err(Error::Unsupported(format!(
            "node size {nodesize} is none of 4096, 8192, 16384, 32768, 65536"
        )));
    }
    if features.mixed && nodesize != 4096 {
        return Err(Error::Unsupported(format!(
            "mixed block groups need nodes of 4096 bytes, not {nodesize}"
        )));
    }
    Ok(nodesize)
}

/// Profiles of metadata and of data.
fn profiles(devices: usize, options: &MkfsOptions) -> Result<(Profile, Profile)> {
    let features = options.features;
    let default = match devices {
        _ if features.mixed => Profile::Single,
        0 | 1 => Profile::Dup,
        _ => Profile::Raid1,
    };
    let metadata =
        options.metadata.or(if features.mixed { options.data } else { None }).unwrap_or(default);
    let data = options.data.unwrap_or(if features.mixed { metadata } else { Profile::Single });
    if features.mixed && metadata != data {
        return Err(Error::Unsupported(format!(
            "mixed block groups need equal profiles, not {} for metadata and {} for data",
            metadata.name(),
            data.name()
        )));
    }
    Ok((metadata, data))
}
