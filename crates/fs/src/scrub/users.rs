//! Which files use damaged data, in which subvolumes.
//!
//! References of an extent name an inode and a place in it. An inode has the same number in every
//! snapshot of its subvolume, and a snapshot that shares a leaf has no reference of its own. So
//! each subvolume is asked for each inode that is named.

use super::content::{Extent, View};
use super::report::ScrubFile;
use crate::compare::users::{ExtentUser, users_in};
use crate::engine::Core;
use crate::error::{Error, Place, Result};
use larder_format::items::{
    Compression, ExtentKind, ExtentRef, FileExtent, TreeBlockInfo, parse_keyed_refs,
};
use larder_format::{Key, KeyType, Logical, TreeId};
use std::collections::BTreeSet;

/// References of an extent that are looked at.
const MOST_REFS: usize = 10_000;
/// Files that are listed.
const MOST_FILES: usize = 200;

/// What uses an address.
#[derive(Debug, Default)]
pub(super) struct Users {
    /// The extent that it lies in.
    pub(super) extent: Option<Logical>,
    pub(super) files: Vec<ScrubFile>,
    pub(super) more: bool,
    /// Tree and level of a block.
    pub(super) tree: Option<(u64, u8)>,
    /// Does a file have data there, and not only space?
    pub(super) is_written: bool,
}

/// Finds what uses an address.
///
/// # Errors
/// Reading, corruption.
pub(super) fn of(core: &Core, view: &View, at: Logical) -> Result<Users> {
    let Some(extent) = view.extent_at(at)? else { return Ok(Users::default()) };
    let mut users = Users { extent: Some(extent.start), ..Users::default() };
    if !extent.is_data() {
        users.tree = tree_of(&extent);
        return Ok(users);
    }
    let (hints, cut) = hints(core, view, &extent)?;
    users.more = cut;
    let mut files = BTreeSet::new();
    for info in core.all_subvols()? {
        for hint in &hints {
            // A subvolume may have been deleted just now.
            let searched = search(core, info.id, hint, &extent, at, |offset, is_data| {
                users.is_written |= is_data;
                files.insert((info.id, hint.ino, offset));
            });
            if !matches!(searched, Ok(()) | Err(Error::NotFound)) {
                searched?;
            }
        }
    }
    users.more |= files.len() > MOST_FILES;
    let named = files.into_iter().take(MOST_FILES).map(|(subvolume, ino, offset)| ScrubFile {
        subvolume: subvolume.0,
        inode: ino.0,
        offset,
        path: path(core, subvolume, ino.0),
    });
    users.files = named.collect();
    Ok(users)
}

fn tree_of(extent: &Extent) -> Option<(u64, u8)> {
    let level = match &extent.item.block {
        Some(TreeBlockInfo { level, .. }) => *level,
        None => u8::try_from(extent.key.offset).ok()?,
    };
    extent.item.inline.iter().find_map(|(r, _)| match r {
        ExtentRef::TreeBlock { root } => Some((root.0, level)),
        _ => None,
    })
}

/// The inodes that references name, and whether some were left out.
fn hints(core: &Core, view: &View, extent: &Extent) -> Result<(BTreeSet<ExtentUser>, bool)> {
    let mut refs: Vec<ExtentRef> = extent.item.inline.iter().map(|(r, _)| *r).collect();
    let behind = Key::new(extent.start, KeyType::EXTENT_DATA_REF, 0);
    let last = Key::new(extent.start, KeyType::SHARED_DATA_REF, u64::MAX);
    view.extents.scan(&behind, &last, |item| {
        if matches!(item.key.kind, KeyType::EXTENT_DATA_REF | KeyType::SHARED_DATA_REF) {
            let corrupt = |what| Error::corrupt(Place::item(view.extents.tree(), item.key), what);
            let found = parse_keyed_refs(&item.key, item.data()).map_err(|e| corrupt(e.0))?;
            refs.extend(found.iter().map(|(r, _)| *r));
        }
        Ok(refs.len() < MOST_REFS)
    })?;
    let cut = refs.len() >= MOST_REFS;
    let mut hints = Vec::new();
    for found in refs {
        match found {
            ExtentRef::Data { objectid, offset, .. } => {
                hints.push(ExtentUser { ino: objectid, base: offset.0 });
            }
            ExtentRef::SharedData { parent } => {
                if let Ok(leaf) = core.store.at_address(parent) {
                    users_in(&leaf, extent.start, MOST_REFS, &mut hints);
                }
            }
            _ => {}
        }
    }
    Ok((hints.into_iter().collect(), cut))
}

/// Calls `each` for the places of an inode that show what lies at `at`: where in the file, and
/// whether that is data.
fn search(
    core: &Core,
    subvolume: TreeId,
    hint: &ExtentUser,
    extent: &Extent,
    at: Logical,
    mut each: impl FnMut(u64, bool),
) -> Result<()> {
    let version = core.subvol(subvolume)?.version(core);
    let to = hint.base.wrapping_add(extent.len);
    // The extent may begin before the file does.
    let from = if to < hint.base { 0 } else { hint.base };
    let key = |offset| Key::new(hint.ino, KeyType::EXTENT_DATA, offset);
    version.scan(&key(from), &key(to), |item| {
        let Ok(FileExtent::Stored(r)) = FileExtent::parse(item.data()) else { return Ok(true) };
        if r.disk_bytenr != extent.start {
            return Ok(true);
        }
        let is_data = r.kind == ExtentKind::Regular;
        let into = at.0 - extent.start.0;
        if r.compression != Compression::None {
            each(item.key.offset, is_data);
        } else if let Some(within) = into.checked_sub(r.offset).filter(|n| *n < r.num_bytes) {
            each(item.key.offset.saturating_add(within), is_data);
        }
        Ok(true)
    })
}

/// A path from the top of the file system.
fn path(core: &Core, subvolume: TreeId, ino: u64) -> Option<String> {
    let mut path = core.subvol_path(subvolume).ok()?;
    let mut within = crate::inode::path_within(core, subvolume, ino).ok()?;
    within.pop();
    if !path.is_empty() {
        path.push(b'/');
    }
    path.append(&mut within);
    Some(String::from_utf8_lossy(&path).into_owned())
}
