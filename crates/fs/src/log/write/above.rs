//! What leads to a subvolume lies in other trees than those that its log covers.
//!
//! A log of a subvolume says where files are within it. The subvolume itself may have moved since
//! the last commit, or a directory above it, in the subvolume in which it hangs. Then replaying
//! would bring the files back in another place. Such an `fsync` commits.

use super::Result;
use super::collect::Pair;
use super::names::items_of;
use crate::engine::{Core, Subvolume};
use crate::transaction::Txn;
use crate::tree::Version;
use larder_format::{Key, KeyType, ObjectId};
use std::sync::atomic::Ordering;

/// Directories above each other that are examined. More of them are taken for a loop.
const MOST: usize = 10_000;

/// May a subvolume be in another place than in the last commit? `txn` is running, and the caller
/// keeps it from being sealed.
///
/// # Errors
/// Reading or corruption.
pub(super) fn moved(core: &Core, subvol: &Subvolume, txn: &Txn) -> Result<bool> {
    let dirs_moved = txn.moves.load(Ordering::Relaxed) > 0;
    if subvol.id == ObjectId::FS_TREE || !dirs_moved && core.links.is_empty() {
        return Ok(false);
    }
    let (mut at, mut steps) = (subvol.id, 0);
    while at != ObjectId::FS_TREE {
        if core.links.get(at).is_some() {
            return Ok(true);
        }
        let Some(link) = core.link_of(at)? else { break };
        if dirs_moved {
            let parent = core.subvol(link.parent)?;
            let versions = Pair::of(core, &parent, txn)?;
            let mut dir = link.dir;
            while dir != ObjectId(parent.root_dir) {
                let now = names_of(&versions.now, dir)?;
                steps += 1;
                if now.is_empty() || steps > MOST || now != names_of(&versions.base, dir)? {
                    return Ok(true);
                }
                dir = ObjectId(now[0].0.offset);
            }
        }
        steps += 1;
        if steps > MOST {
            return Ok(true);
        }
        at = link.parent;
    }
    Ok(false)
}

/// Where a directory hangs, in a version.
fn names_of(version: &Version, dir: ObjectId) -> Result<Vec<(Key, Vec<u8>)>> {
    let keys = items_of(dir, KeyType::INODE_REF, KeyType::INODE_REF);
    let mut out = Vec::new();
    version.scan(keys.start(), keys.end(), |item| {
        out.push((item.key, item.data().to_vec()));
        Ok(out.len() < 2)
    })?;
    Ok(out)
}
