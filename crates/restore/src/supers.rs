//! Which superblock to start from.
//!
//! The first copy counts if it is intact, as for mounting: mirrors may be older by design. When it
//! is not, the intact copy with the highest generation is the best that there is. The caller may
//! choose another.

use crate::error::{Error, Result};
use crate::observer::Observer;
use larder_format::{Superblock, Support};
use larder_volume::{Device, VolumeError, read_all_superblocks, read_superblock};

/// The superblock to start from, and backup roots of all that are intact.
pub(crate) struct Chosen {
    pub(crate) superblock: Box<Superblock>,
    /// Position among the copies.
    pub(crate) copy: usize,
    /// The other intact copies of the same file system.
    pub(crate) others: Vec<Box<Superblock>>,
}

/// Chooses: copy number `wanted`, or the best.
pub(crate) fn choose(
    device: &dyn Device,
    wanted: Option<usize>,
    observer: &dyn Observer,
) -> Result<Chosen> {
    let mut intact = Vec::new();
    let mut why = Vec::new();
    let mut foreign = true;
    for (i, copy) in read_all_superblocks(device).into_iter().enumerate() {
        match copy.content {
            Ok(sb) => {
                foreign = false;
                intact.push((i, sb));
            }
            Err(e) => {
                foreign &=
                    matches!(&e, VolumeError::Corrupt { what, .. } if what.contains("not a btrfs"));
                why.push((i, e.to_string()));
            }
        }
    }
    let found = match wanted {
        Some(n) => intact.iter().position(|(i, _)| *i == n),
        None if intact.first().is_some_and(|(i, _)| *i == 0) => Some(0),
        None => (0..intact.len()).max_by_key(|i| intact[*i].1.generation()),
    };
    let Some(found) = found else {
        if foreign && let Err(e) = read_superblock(device) {
            return Err(e.into());
        }
        let reasons: Vec<String> = why.iter().map(|(i, e)| format!("copy {i}: {e}")).collect();
        let text = match wanted {
            Some(n) => format!("superblock copy {n} cannot be used ({})", reasons.join("; ")),
            None if foreign => {
                format!("{}: not a btrfs file system: no superblock in any place", device.name())
            }
            None => format!("no superblock is intact ({})", reasons.join("; ")),
        };
        return Err(Error::NoSuperblock(text));
    };
    let (copy, superblock) = intact.swap_remove(found);
    if copy != 0 {
        if wanted.is_none() {
            for (_, e) in why.iter().filter(|(i, _)| *i == 0) {
                observer.note(&format!("first superblock: {e}"));
            }
        }
        observer.note(&format!(
            "using superblock copy {copy}, of generation {}",
            superblock.generation()
        ));
    }
    if let Support::Refused { why } = superblock.support() {
        observer
            .note(&format!("this file system is not fully supported: {why}; trying all the same"));
    }
    let others =
        intact.into_iter().map(|(_, sb)| sb).filter(|sb| sb.fsid == superblock.fsid).collect();
    Ok(Chosen { superblock, copy, others })
}
