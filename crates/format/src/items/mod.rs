//! Items: what stands in the leaves, one module per family.
//!
//! The modules hide the byte layouts. Fixed structures are `zerocopy` views with little-endian
//! fields (`parse` gives a reference into the leaf, `as_bytes` the bytes back); structures that
//! carry names, payloads or lists are parsed into a type of their own with an `encode` that gives
//! exactly the same bytes. Names and payloads stay raw `&[u8]`: the format knows no encoding.
//!
//! A parser checks what the item's own bytes can tell: sizes, known numbers, alignment, arithmetic
//! that must not overflow. Rules that need the key, the neighbours, the superblock or another tree
//! belong to the node checker. Nothing here panics, whatever the bytes.

use crate::{FormatError, FormatResult};
use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

pub mod balance;
pub mod block_group;
pub mod chunk;
pub mod dev;
pub mod dir;
pub mod extent;
pub mod file_extent;
pub mod free_space;
pub mod inode;
pub mod inode_ref;
pub mod keys;
pub mod quota;
pub mod root;
pub mod space_cache;

pub use crate::DevItem;
pub use balance::{BalanceFilters, BalanceFlags, BalanceItem, FilterFlags};
pub use block_group::{BlockGroupFlags, BlockGroupItem, Profile};
pub use chunk::{Chunk, Stripe, encode_sys_array, parse_sys_array};
pub use dev::{DevExtent, DevReplace, DevStats, ReplaceState};
pub use dir::{DirEntries, DirEntryRef, DirLogIndex, FileType};
pub use extent::{ExtentFlags, ExtentItem, ExtentRef, TreeBlockInfo, parse_keyed_refs};
pub use file_extent::{Compression, ExtentKind, ExtentRecord, FileExtent, InlineExtent};
pub use free_space::FreeSpaceInfo;
pub use inode::{InodeFlags, InodeItem, Timespec};
pub use inode_ref::{ExtRef, ExtRefs, InodeRef, InodeRefs};
pub use quota::{QgroupId, QgroupInfo, QgroupStatus};
pub use root::{RootFlags, RootItem, RootRef};
pub use space_cache::{CacheError, SpaceCacheItem, parse_space_cache};

/// The item as a `T` of exactly its size.
fn exact<'a, T>(bytes: &'a [u8], what: &str) -> FormatResult<&'a T>
where
    T: FromBytes + KnownLayout + Immutable + Unaligned,
{
    T::ref_from_bytes(bytes).map_err(|_| {
        FormatError::new(format!("{what} has {} bytes, expected {}", bytes.len(), size_of::<T>()))
    })
}

/// A `T` from the start of `bytes`, and the rest.
fn prefix<'a, T>(bytes: &'a [u8], what: &str) -> FormatResult<(&'a T, &'a [u8])>
where
    T: FromBytes + KnownLayout + Immutable + Unaligned,
{
    T::ref_from_prefix(bytes).map_err(|_| {
        FormatError::new(format!(
            "{what} is cut off: {} bytes left, {} needed",
            bytes.len(),
            size_of::<T>()
        ))
    })
}

/// The first `n` bytes and the rest.
fn take<'a>(bytes: &'a [u8], n: usize, what: &str) -> FormatResult<(&'a [u8], &'a [u8])> {
    bytes.split_at_checked(n).ok_or_else(|| {
        FormatError::new(format!(
            "{what} of {n} bytes reaches past the item, which has {} left",
            bytes.len()
        ))
    })
}

/// Checks the length of a name as it stands in a header.
fn name_len(len: u16, what: &str) -> FormatResult<usize> {
    let len = usize::from(len);
    if len == 0 || len > crate::NAME_MAX {
        return Err(FormatError::new(format!(
            "{what} has a name of {len} bytes, expected 1 to 255"
        )));
    }
    Ok(len)
}

/// Length of a name for a header.
///
/// # Panics
/// If the name has not 1 to 255 bytes: callers refuse such names where they come in.
fn name_len_to_disk(name: &[u8]) -> u16 {
    assert!(!name.is_empty() && name.len() <= crate::NAME_MAX, "name of {} bytes", name.len());
    u16::try_from(name.len()).expect("at most 255")
}

/// Checks that `value` is a multiple of the sector size.
fn aligned(value: u64, what: &str, field: &str) -> FormatResult<()> {
    if !value.is_multiple_of(u64::from(crate::SECTOR_SIZE)) {
        return Err(FormatError::new(format!(
            "{what} has {field} {value}, expected a multiple of 4096"
        )));
    }
    Ok(())
}
