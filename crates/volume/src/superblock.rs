//! Superblocks on devices: which copies exist, which one counts, how they are written.
//!
//! Up to three copies lie at fixed places of every device. As in Linux only the first one counts
//! for mounting: the others may be older by design, for a log commit writes the first alone, so
//! picking "the newest that is intact" could silently drop what an `fsync` promised. When the first
//! is damaged its mirrors are mentioned in the error, and it is for a person to decide.

use crate::device::Device;
use crate::error::{VolumeError, VolumeResult};
use larder_format::superblock::{Superblock, looks_like_btrfs};
use larder_format::{Physical, SUPER_OFFSETS, SUPER_SIZE};
use std::io;

/// Which copies of a superblock to write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SuperCopies {
    /// The first: a log commit.
    Primary,
    /// Every one that fits on the device: a transaction commit.
    All,
}

/// One copy of a device's superblock, as far as it can be read.
#[derive(Debug)]
pub struct SuperCopy {
    /// Where it lies.
    pub at: Physical,
    /// The copy, or what is wrong with it.
    pub content: VolumeResult<Box<Superblock>>,
}

/// Places of the superblock copies on a device of `size` bytes. Linux wants a copy to end before
/// the last byte.
pub fn copies_within(size: u64) -> impl Iterator<Item = Physical> {
    SUPER_OFFSETS.into_iter().take_while(move |at| at.0 + (SUPER_SIZE as u64) < size)
}

/// Reads the superblock that counts: the first copy.
///
/// It is intact then, but may still be one that Larder must not use: see [`Superblock::support`].
///
/// # Errors
/// [`VolumeError::Io`] when it cannot be read; [`VolumeError::Corrupt`] when there is no btrfs or
/// the copy is damaged, with a word about mirrors that are intact.
pub fn read_superblock(device: &dyn Device) -> VolumeResult<Box<Superblock>> {
    let primary = SUPER_OFFSETS[0];
    let corrupt = |what: String| VolumeError::Corrupt { device: device.name(), what };
    if device.size() < primary.0 + SUPER_SIZE as u64 {
        return Err(corrupt(format!(
            "not a btrfs file system: {} bytes are too few to hold a superblock",
            device.size()
        )));
    }
    let error = match read_copy(device, primary) {
        Ok(sb) => return Ok(sb),
        Err(e) => e,
    };
    let healthy: Vec<String> = copies_within(device.size())
        .skip(1)
        .filter_map(|at| read_copy(device, at).ok().map(|sb| (at, sb.generation())))
        .map(|(at, generation)| format!("the mirror at {at} is intact (generation {generation})"))
        .collect();
    Err(match error {
        VolumeError::Corrupt { what, .. } if !healthy.is_empty() => corrupt(format!(
            "{what}; {}. Linux does not mount from a mirror either: \
             `btrfs rescue super-recover` restores the first copy",
            healthy.join(", ")
        )),
        other => other,
    })
}

/// Reads every copy that fits on the device.
#[must_use]
pub fn read_all_superblocks(device: &dyn Device) -> Vec<SuperCopy> {
    copies_within(device.size())
        .map(|at| SuperCopy { at, content: read_copy(device, at) })
        .collect()
}

fn read_copy(device: &dyn Device, at: Physical) -> VolumeResult<Box<Superblock>> {
    let mut bytes = vec![0; SUPER_SIZE];
    device.read_at(at, &mut bytes).map_err(|e| failed(device, "read", at, e))?;
    if !looks_like_btrfs(&bytes) && bytes[0x40..0x48] != *b"!BHRfS_M" {
        return Err(VolumeError::Corrupt {
            device: device.name(),
            what: format!("not a btrfs file system (no superblock at {at})"),
        });
    }
    Superblock::parse(&bytes, at)
        .map_err(|e| VolumeError::Corrupt { device: device.name(), what: e.to_string() })
}

fn failed(device: &dyn Device, op: &'static str, at: Physical, source: io::Error) -> VolumeError {
    VolumeError::Io { device: device.name(), op, at, len: SUPER_SIZE as u64, source }
}

/// Writes the superblock's copies to a device, each with its own address and checksum. Not durable
/// before a flush.
///
/// # Errors
/// What the device says; the first copy is written first.
pub fn write_superblocks(
    device: &dyn Device,
    superblock: &Superblock,
    which: SuperCopies,
) -> VolumeResult<()> {
    let mut copy = *superblock;
    let size = device.size().min(superblock.dev_item.total_bytes.get());
    for at in copies_within(size).take(if which == SuperCopies::Primary {
        1
    } else {
        SUPER_OFFSETS.len()
    }) {
        device.write_at(at, &copy.seal(at)).map_err(|e| failed(device, "write", at, e))?;
    }
    Ok(())
}

/// Overwrites every copy of a device that is to belong to nothing any more, and makes that durable.
///
/// # Errors
/// What the device says.
pub fn erase_superblocks(device: &dyn Device) -> VolumeResult<()> {
    for at in copies_within(device.size()) {
        device.write_at(at, &[0; SUPER_SIZE]).map_err(|e| failed(device, "write", at, e))?;
    }
    device.flush().map_err(|e| VolumeError::flush(device, e))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::FileDevice;
    use crate::volume::Volume;
    use larder_format::dev_item::DevItem;
    use larder_format::superblock::MAGIC;
    use larder_format::{CsumType, DeviceId, Generation, Logical};
    use std::sync::Arc;
    use zerocopy::FromZeros;

    const SIZE: u64 = 80 << 20;

    fn sample(generation: u64) -> Superblock {
        let mut sb = Superblock::new_zeroed();
        sb.magic = MAGIC;
        sb.fsid = [5; 16];
        sb.set_generation(Generation(generation));
        sb.set_root(Logical(1 << 20), 0);
        sb.set_chunk_root(Logical(2 << 20), 0, Generation(generation));
        sb.set_total_bytes(SIZE);
        sb.set_bytes_used(10 * 4096);
        sb.num_devices.set(1);
        for field in [&mut sb.sectorsize, &mut sb.nodesize, &mut sb.leafsize, &mut sb.stripesize] {
            field.set(4096);
        }
        sb.set_csum_type(CsumType::Crc32c);
        sb.dev_item = DevItem::new_zeroed();
        sb.dev_item.devid.set(1);
        sb.dev_item.total_bytes.set(SIZE);
        sb.dev_item.fsid = sb.fsid;
        sb.set_sys_chunk_bytes(&[0; 97]).unwrap();
        sb
    }

    fn device(dir: &tempfile::TempDir, size: u64) -> FileDevice {
        FileDevice::create(dir.path().join("img"), size).unwrap()
    }

    #[test]
    fn copies_are_written_where_they_fit_and_read_back() {
        let dir = tempfile::tempdir().unwrap();
        let v = Volume::new(vec![(DeviceId(1), Arc::new(device(&dir, SIZE)))]).unwrap();
        let d = v.device(DeviceId(1)).unwrap().clone();
        let write = |generation, which| {
            v.write_superblocks(&|_| Some(Box::new(sample(generation))), which).unwrap();
        };
        write(7, SuperCopies::All);
        assert_eq!(read_superblock(&*d).unwrap().generation(), Generation(7));
        write(8, SuperCopies::Primary);
        let generations: Vec<_> = read_all_superblocks(&*d)
            .into_iter()
            .map(|c| c.content.unwrap().generation().0)
            .collect();
        assert_eq!(generations, [8, 7], "a log commit leaves the mirrors alone");
        let stats = v.stats()[0].1;
        assert_eq!((stats.writes, stats.written_bytes), (3, 3 * 4096));
        assert_eq!(copies_within(64 << 10).count(), 0);
        assert_eq!(copies_within((64 << 20) + 4096).count(), 1);
        assert_eq!(copies_within(1 << 40).count(), 3);
    }

    #[test]
    fn errors_say_what_is_there_and_what_could_help() {
        let dir = tempfile::tempdir().unwrap();
        for size in [0, 4096, 69631] {
            let text = read_superblock(&device(&dir, size)).unwrap_err().to_string();
            assert!(text.contains("too few"), "{text}");
        }
        let d = device(&dir, SIZE);
        let text = read_superblock(&d).unwrap_err().to_string();
        assert!(text.contains("not a btrfs file system") && !text.contains("mirror"), "{text}");
        write_superblocks(&d, &sample(7), SuperCopies::All).unwrap();
        d.write_at(Physical(65536 + 200), b"garbage").unwrap();
        let text = read_superblock(&d).unwrap_err().to_string();
        assert!(
            text.contains("checksum") && text.contains("mirror at 67108864 is intact"),
            "{text}"
        );
        d.write_at(Physical(67108864 + 200), b"garbage").unwrap();
        let text = read_superblock(&d).unwrap_err().to_string();
        assert!(text.contains("checksum") && !text.contains("intact"), "{text}");
    }
}
