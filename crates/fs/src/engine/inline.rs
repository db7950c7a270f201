//! Which files may be in their leaf.

use crate::base::sectors::SECTOR;
use crate::engine::compression;
use crate::transaction::Ground;
use larder_format::items::InodeFlags;

/// Most bytes, as they lie there, that a file may have in its leaf.
pub(crate) fn max_inline(ground: &Ground) -> u64 {
    let room = larder_format::node::max_item_size(ground.nodesize()) as u64 / 2;
    ground.options.max_inline.min(room).min(SECTOR - 1)
}

/// May a file of this size be in its leaf, not compressed?
pub(crate) fn may_be_inline(ground: &Ground, size: u64) -> bool {
    size > 0 && size <= max_inline(ground)
}

/// May a file of this size and with these flags be in its leaf, compressed or not?
pub(crate) fn may_be_inline_somehow(ground: &Ground, size: u64, flags: InodeFlags) -> bool {
    may_be_inline(ground, size)
        || (size > 0 && size <= SECTOR && compression::wanted(ground, flags))
}
