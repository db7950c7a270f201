//! How an image is to be made, and what of that follows from what.
//!
//! Defaults are those of a current mkfs.btrfs. Hidden here: which options exclude each other, and
//! that all uuids follow from that of the file system.

use crate::error::{Error, Result};
use larder_codec::Packing;
use larder_format::items::BlockGroupFlags;
use larder_format::items::Timespec;
use larder_format::node::max_item_size;
use larder_format::{CsumType, SECTOR_SIZE};
use larder_fs::Timestamp;
use larder_fs::mkfs::{Features, Profile, derived_uuid};
use std::path::PathBuf;

/// How to make an image. The default is what mkfs.btrfs does without options.
#[derive(Clone, Debug)]
pub struct BuildOptions {
    /// Name, up to 255 bytes without NUL and newline.
    pub label: Vec<u8>,
    /// Uuid of the file system. `None`: a random one. If it is given, the other uuids are derived
    /// from it.
    pub uuid: Option<[u8; 16]>,
    /// Uuid of the device. `None`: it is derived, too.
    pub device_uuid: Option<[u8; 16]>,
    /// Copies of metadata. `None`: two, or one with mixed groups.
    pub metadata: Option<Profile>,
    /// Copies of data. `None`: one, or as for metadata with mixed groups.
    pub data: Option<Profile>,
    /// Checksum of metadata and data.
    pub csum: CsumType,
    /// Bytes of a tree node. `None`: 16384, or 4096 with mixed groups.
    pub nodesize: Option<u32>,
    /// Features.
    pub features: Features,
    /// Time of what no source has a time for. `None`: now.
    pub time: Option<Timestamp>,
    /// Compress contents.
    pub compress: Option<Compress>,
    /// Files of up to so many bytes lie in the tree.
    pub max_inline: u32,
    /// Equal contents share extents, wherever they come from.
    pub dedupe: bool,
    /// How large the image becomes.
    pub size: ImageSize,
    /// Bytes of memory, about.
    pub memory: u64,
    /// Threads that read and compress. `None`: as many as there are processors.
    pub threads: Option<usize>,
    /// Where data goes that finds no place in memory. `None`: where the image lies.
    pub scratch: Option<PathBuf>,
}

impl Default for BuildOptions {
    fn default() -> Self {
        Self {
            label: Vec::new(),
            uuid: None,
            device_uuid: None,
            metadata: None,
            data: None,
            csum: CsumType::Crc32c,
            nodesize: None,
            features: Features::default(),
            time: None,
            compress: None,
            max_inline: 2048,
            dedupe: false,
            size: ImageSize::Auto,
            memory: 256 << 20,
            threads: None,
            scratch: None,
        }
    }
}

/// How contents are compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compress {
    /// Method and level.
    pub packing: Packing,
    /// Also what does not look compressible.
    pub force: bool,
}

/// How large an image becomes. An existing device or image that is written in place keeps its size;
/// the file system on it is as large, unless `Exactly`, `Free` or `Shrink` make it smaller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageSize {
    /// As large as the contents, and some room to work in.
    Auto,
    /// So many bytes.
    Exactly(u64),
    /// As large as the contents, and at least so many bytes.
    AtLeast(u64),
    /// As large as the contents, and so many bytes free.
    Free(u64),
    /// As small as it gets, a multiple of so many bytes. It has to grow before it can be changed.
    Shrink {
        /// The unit; a multiple of 4096.
        align: u64,
    },
}

impl ImageSize {
    /// Does it also change the size of a file that is written in place?
    pub(crate) fn resizes(self) -> bool {
        matches!(self, Self::AtLeast(_) | Self::Shrink { .. })
    }
}

/// All that is decided before the first byte is made.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) fsid: [u8; 16],
    pub(crate) device_uuid: [u8; 16],
    pub(crate) chunk_tree_uuid: [u8; 16],
    pub(crate) label: Vec<u8>,
    pub(crate) nodesize: u32,
    pub(crate) csum: CsumType,
    pub(crate) features: Features,
    pub(crate) metadata: Profile,
    pub(crate) data: Profile,
    pub(crate) time: Timespec,
    pub(crate) compress: Option<Compress>,
    /// Longest file in a leaf, and longest packed form of one.
    pub(crate) max_inline: usize,
    pub(crate) dedupe: bool,
    pub(crate) memory: usize,
    pub(crate) threads: usize,
}

/// Least memory that the sorters can work with.
const LEAST_MEMORY: u64 = 16 << 20;

impl Plan {
    /// Checks the options.
    pub(crate) fn new(options: &BuildOptions) -> Result<Self> {
        let refuse = |what: String| Err(Error::Unsupported(what));
        let features = options.features;
        features.check()?;
        let nodesize = options.nodesize.unwrap_or(if features.mixed { 4096 } else { 16384 });
        if !nodesize.is_power_of_two() || !(4096..=65536).contains(&nodesize) {
            return refuse(format!(
                "node size {nodesize} is none of 4096, 8192, 16384, 32768, 65536"
            ));
        }
        if features.mixed && nodesize != 4096 {
            return refuse(format!("mixed block groups need nodes of 4096 bytes, not {nodesize}"));
        }
        let (metadata, data) = profiles(options)?;
        if let ImageSize::Shrink { align } = options.size
            && (align == 0 || !align.is_multiple_of(u64::from(SECTOR_SIZE)))
        {
            return refuse(format!("an alignment of {align} bytes is no multiple of 4096"));
        }
        let fsid = options.uuid.unwrap_or_else(|| uuid::Uuid::new_v4().into_bytes());
        if fsid == [0; 16] {
            return refuse("a file system's uuid must not be all zero".into());
        }
        if options.label.len() > 255 || options.label.iter().any(|b| matches!(b, 0 | b'\n')) {
            return refuse("a label has at most 255 bytes, and no NUL or newline".into());
        }
        let time = options.time.unwrap_or_else(Timestamp::now);
        let threads = options.threads.unwrap_or_else(|| {
            std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
        });
        let memory = options.memory.max(LEAST_MEMORY);
        Ok(Self {
            fsid,
            device_uuid: options.device_uuid.unwrap_or_else(|| derived_uuid(fsid, b"device")),
            chunk_tree_uuid: derived_uuid(fsid, b"chunk tree"),
            label: options.label.clone(),
            nodesize,
            csum: options.csum,
            features,
            metadata,
            data,
            time: Timespec::new(time.sec, time.nsec),
            compress: options.compress,
            max_inline: usize::try_from(options.max_inline)
                .unwrap_or(usize::MAX)
                .min(longest_inline(nodesize)),
            dedupe: options.dedupe,
            memory: usize::try_from(memory).unwrap_or(usize::MAX),
            threads: threads.max(1),
        })
    }

    /// Uuid of a subvolume.
    pub(crate) fn subvolume_uuid(&self, id: u64) -> [u8; 16] {
        if id == 5 {
            return derived_uuid(self.fsid, b"top subvolume");
        }
        derived_uuid(self.fsid, format!("subvolume {id}").as_bytes())
    }

    /// Type and profile of the groups for data.
    pub(crate) fn data_flags(&self) -> BlockGroupFlags {
        let kind = if self.features.mixed {
            BlockGroupFlags::DATA | BlockGroupFlags::METADATA
        } else {
            BlockGroupFlags::DATA
        };
        kind | self.data.flag()
    }

    /// Type and profile of the groups for metadata.
    pub(crate) fn metadata_flags(&self) -> BlockGroupFlags {
        if self.features.mixed {
            return self.data_flags();
        }
        BlockGroupFlags::METADATA | self.metadata.flag()
    }

    /// Type and profile of the group for the chunk tree.
    pub(crate) fn system_flags(&self) -> BlockGroupFlags {
        BlockGroupFlags::SYSTEM | self.metadata.flag()
    }
}

/// Longest data that fits into a leaf, and is less than a sector.
pub(crate) fn longest_inline(nodesize: u32) -> usize {
    let header = larder_format::items::file_extent::INLINE_HEADER_SIZE;
    (max_item_size(nodesize) - header).min(SECTOR_SIZE as usize - 1)
}

fn profiles(options: &BuildOptions) -> Result<(Profile, Profile)> {
    let mixed = options.features.mixed;
    let default = if mixed { Profile::Single } else { Profile::Dup };
    let metadata = options.metadata.or(if mixed { options.data } else { None }).unwrap_or(default);
    let data = options.data.unwrap_or(if mixed { metadata } else { Profile::Single });
    if mixed && metadata != data {
        return Err(Error::Unsupported(format!(
            "mixed block groups need equal profiles, not {} for metadata and {} for data",
            metadata.name(),
            data.name()
        )));
    }
    for profile in [metadata, data] {
        if !matches!(profile, Profile::Single | Profile::Dup) {
            let name = profile.name();
            return Err(Error::Unsupported(format!(
                "an image is built on one device, so its profiles are single and dup, not {name}"
            )));
        }
    }
    Ok((metadata, data))
}
