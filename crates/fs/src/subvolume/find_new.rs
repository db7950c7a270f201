//! What was written to a subvolume since some transaction.
//!
//! A block has the number of the transaction that wrote it, and so has the pointer to it. A change
//! below changes all blocks on the way up. So a walk that leaves out older blocks reads little more
//! than what it finds. It walks over one version of the tree, without a lock. It can be continued
//! later from any key, because keys only rise.

use crate::api::{FilePosition, NewExtent};
use crate::engine::Core;
use crate::error::{Error, Place, Result};
use larder_format::items::keys::extent_data_key;
use larder_format::items::{Compression, ExtentKind, FileExtent};
use larder_format::{FileOffset, Generation, KeyType};

/// Calls `each` for the file extents of a subvolume that were written in transaction `since` or
/// later, by rising inode and offset from a position on, until it returns false.
///
/// # Errors
/// `NotFound`; reading, corruption.
pub(crate) fn find_new(
    core: &Core,
    from: FilePosition,
    since: Generation,
    each: &mut dyn FnMut(&NewExtent) -> bool,
) -> Result<()> {
    let subvol = core.subvol(from.id.subvol)?;
    let version = subvol.version(core);
    let first = extent_data_key(from.id.object(), FileOffset(from.offset));
    version.scan_since(since, &first, |item| {
        if item.key.kind != KeyType::EXTENT_DATA || item.key < first {
            return Ok(true);
        }
        let corrupt =
            |e: larder_format::FormatError| Error::corrupt(Place::item(subvol.id, item.key), e.0);
        let found = match FileExtent::parse(item.data()).map_err(corrupt)? {
            FileExtent::Inline(i) => NewExtent {
                ino: item.key.objectid.0,
                start: item.key.offset,
                len: i.ram_bytes,
                at: None,
                offset: 0,
                generation: i.generation,
                in_leaf: true,
                reserved: false,
                compressed: i.compression != Compression::None,
            },
            FileExtent::Stored(r) => NewExtent {
                ino: item.key.objectid.0,
                start: item.key.offset,
                len: r.num_bytes,
                at: (!r.is_hole()).then_some(r.disk_bytenr),
                offset: r.offset,
                generation: r.generation,
                in_leaf: false,
                reserved: r.kind == ExtentKind::Prealloc,
                compressed: r.compression != Compression::None,
            },
        };
        Ok(found.generation < since || each(&found))
    })
}
