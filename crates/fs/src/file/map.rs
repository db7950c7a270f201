//! Where a file's bytes lie, and which extents are shared.
//!
//! An extent is shared when something other than this file refers to it: another file by a
//! reference of its own, or a snapshot by a leaf (or a block above it) that both subvolumes have.
//! The first kind is in the references of the extent. The second kind is only in the references of
//! the blocks on the way from the root to the leaf, and only blocks that are old enough are
//! examined. References are counted as everywhere: the published extent tree plus the notes of the
//! sealed and the running transaction.

use super::extents::{Content, Extent, ExtentCursor};
use super::nocow;
use crate::api::{ExtentPlace, MappedExtent, may_wait};
use crate::engine::{Core, Inode};
use crate::error::{Error, Result};
use crate::tree::Version;
use larder_format::items::{Compression, ExtentKind};
use larder_format::{Logical, ObjectId};
use std::sync::Arc;

/// Calls `each` for the extents of a file that end behind `from`, without holes, until it says
/// false. Delayed data is written back first where the file system can be written to.
///
/// # Errors
/// `IsDirectory`, `Invalid` for other types; reading, corruption, `WouldBlock`.
pub(crate) fn map(
    core: &Core,
    inode: &Arc<Inode>,
    from: u64,
    each: &mut dyn FnMut(&MappedExtent) -> bool,
) -> Result<()> {
    super::expect_regular(inode)?;
    may_wait()?;
    let _op = super::lock_shared(inode)?;
    if core.check_writable().is_ok() {
        match super::fsync_data(core, inode) {
            Ok(()) | Err(Error::DataLost) => {}
            Err(e) => return Err(e),
        }
    }
    let version = inode.subvol.version(core);
    let mut paths = Paths {
        core,
        version: &version,
        last: None,
        older: inode.subvol.tree.last_snapshot().0 > 0,
    };
    let mut cursor = ExtentCursor::new(&version, ObjectId(inode.id.ino), from)?;
    while let Some(extent) = cursor.next()? {
        let (start, len) = (extent.start, extent.end - extent.start);
        let place = match extent.content {
            Content::Inline { .. } => ExtentPlace::Leaf,
            Content::Stored(r) if r.is_hole() => continue,
            Content::Stored(r) => {
                let shared = !nocow::has_no_others(core, inode, extent.start, &r)?.0
                    || paths.is_shared(&extent)?;
                ExtentPlace::Device {
                    at: r.disk_bytenr,
                    len: r.disk_num_bytes,
                    offset: r.offset,
                    written: r.kind == ExtentKind::Regular,
                    compressed: r.compression != Compression::None,
                    shared,
                }
            }
        };
        if !each(&MappedExtent { start, len, place }) {
            break;
        }
    }
    Ok(())
}

/// Which leaves of a subvolume are in other trees, too.
struct Paths<'a> {
    core: &'a Core,
    version: &'a Version,
    /// The last leaf that was looked at, and the answer.
    last: Option<(Logical, bool)>,
    /// Was there ever a snapshot of the subvolume?
    older: bool,
}

impl Paths<'_> {
    fn is_shared(&mut self, extent: &Extent) -> Result<bool> {
        if !self.older {
            return Ok(false);
        }
        let leaf = extent.leaf();
        if let Some((_, shared)) = self.last.filter(|(at, _)| *at == leaf) {
            return Ok(shared);
        }
        let mut shared = false;
        for block in self.version.blocks_above(&extent.key())? {
            if self.core.is_shared_block(block.at, block.level)? {
                shared = true;
                break;
            }
        }
        self.last = Some((leaf, shared));
        Ok(shared)
    }
}
