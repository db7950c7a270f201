//! Which files may lie in their leaf.

use crate::base::sectors::SECTOR;
use crate::engine::compression;
use crate::transaction::Ground;
use larder_format::items::InodeFlags;

/// Bytes of a file that may lie in its leaf at most, as they lie there.
pub(crate) fn max_inline(ground: &Ground) -> u64 {
    let room = larder_format::node::max_item_size(ground.nodesize()) as u64 / 2;
    ground.options.max_inline.min(room).min(SECTOR - 1)
}

/// May a file of this size lie in its leaf as it is?
pub(crate) fn may_be_inline(ground: &Ground, size: u64) -> bool {
    size > 0 && size <= max_inline(ground)
}

/// May a file of this size and with these flags lie in its leaf, as it is or compressed?
pub(crate) fn may_be_inline_somehow(ground: &Ground, size: u64, flags: InodeFlags) -> bool {
    may_be_inline(ground, size)
        || (size > 0 && size <= SECTOR && compression::wanted(ground, flags))
}
