//! Which names the two kinds of items have that refer from an inode to its directories.

use larder_format::items::{ExtRef, ExtRefs, InodeRef, InodeRefs};
use larder_format::{Key, KeyType, ObjectId};

/// A name as it is in a reference.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Reference {
    pub(super) dir: ObjectId,
    pub(super) index: u64,
    pub(super) name: Vec<u8>,
}

/// The names that an INODE_REF or INODE_EXTREF has.
///
/// # Errors
/// The item is not one.
pub(super) fn references(key: Key, data: &[u8]) -> larder_format::FormatResult<Vec<Reference>> {
    if key.kind == KeyType::INODE_REF {
        let dir = ObjectId(key.offset);
        let one = |r: InodeRef<'_>| Reference { dir, index: r.index, name: r.name.to_vec() };
        InodeRefs::new(data).map(|r| r.map(one)).collect()
    } else {
        let one =
            |r: ExtRef<'_>| Reference { dir: r.parent, index: r.index, name: r.name.to_vec() };
        ExtRefs::new(data).map(|r| r.map(one)).collect()
    }
}
