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
    Compression, ExtentKind, ExtentRecord, ExtentRef, FileExtent, TreeBlockInfo, parse_keyed_refs,
};
use larder_format::{Key, KeyType, Logical, ObjectId, TreeId};
use std::collections::{BTreeMap, BTreeSet};

/// References of an extent that are looked at.
const MOST_REFS: usize = 10_000;
/// Items of files that use an extent, and are looked at.
const MOST_USES: usize = 100_000;
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
}

/// An item of a file that uses an extent.
#[derive(Clone, Copy, Debug)]
struct Use {
    file: (TreeId, ObjectId),
    offset: u64,
    record: ExtentRecord,
}

impl Use {
    /// Where in the file an address is.
    fn at(&self, at: Logical) -> Option<u64> {
        if self.record.compression != Compression::None {
            return Some(self.offset);
        }
        let into = at.0.checked_sub(self.record.disk_bytenr.0)?.checked_sub(self.record.offset)?;
        (into < self.record.num_bytes).then(|| self.offset.saturating_add(into))
    }
}

/// What uses an extent. Damage comes in stretches, so it is kept for the next sector.
#[derive(Debug)]
pub(super) struct Uses {
    extent: Extent,
    uses: Vec<Use>,
    /// Were some left out?
    cut: bool,
    paths: BTreeMap<(TreeId, ObjectId), Option<String>>,
}

impl Uses {
    /// What uses the extent that `at` lies in.
    ///
    /// # Errors
    /// Reading, corruption.
    pub(super) fn of(core: &Core, view: &View, at: Logical) -> Result<Option<Self>> {
        let Some(extent) = view.extent_at(at)? else { return Ok(None) };
        let mut this = Self { extent, uses: Vec::new(), cut: false, paths: BTreeMap::new() };
        if !this.extent.is_data() {
            return Ok(Some(this));
        }
        let (hints, cut) = hints(core, view, &this.extent)?;
        this.cut = cut;
        for info in core.all_subvols()? {
            for hint in &hints {
                let searched = search(core, info.id, hint, &this.extent, &mut this.uses);
                // A subvolume may have been deleted just now.
                if !matches!(searched, Ok(()) | Err(Error::NotFound)) {
                    searched?;
                }
            }
        }
        Ok(Some(this))
    }

    /// Does an address lie in this extent?
    pub(super) fn has(&self, at: Logical) -> bool {
        self.extent.start <= at && at < self.extent.start.plus(self.extent.len)
    }

    /// Does a file have data there, and not only space?
    pub(super) fn is_written(&self, at: Logical) -> bool {
        let is_data = |u: &Use| u.record.kind == ExtentKind::Regular && u.at(at).is_some();
        self.uses.iter().any(is_data)
    }

    /// What uses an address.
    pub(super) fn at(&mut self, core: &Core, at: Logical) -> Users {
        let places: BTreeSet<((TreeId, ObjectId), u64)> =
            self.uses.iter().filter_map(|u| Some((u.file, u.at(at)?))).collect();
        let more = self.cut || places.len() > MOST_FILES;
        let paths = &mut self.paths;
        let named = places.into_iter().take(MOST_FILES).map(|(file, offset)| {
            let (subvolume, ino) = file;
            let found = paths.entry(file).or_insert_with(|| path(core, subvolume, ino.0));
            ScrubFile { subvolume: subvolume.0, inode: ino.0, offset, path: found.clone() }
        });
        let files = named.collect();
        let tree = if self.extent.is_data() { None } else { tree_of(&self.extent) };
        Users { extent: Some(self.extent.start), files, more, tree }
    }
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
                if let Ok(leaf) = core.store.at_address(parent, None) {
                    users_in(&leaf, extent.start, MOST_REFS, &mut hints);
                }
            }
            _ => {}
        }
    }
    Ok((hints.into_iter().collect(), cut))
}

/// Adds the items of an inode that use an extent.
fn search(
    core: &Core,
    subvolume: TreeId,
    hint: &ExtentUser,
    extent: &Extent,
    uses: &mut Vec<Use>,
) -> Result<()> {
    let version = core.subvol(subvolume)?.version(core);
    let to = hint.base.wrapping_add(extent.len);
    // The extent may begin before the file does.
    let from = if to < hint.base { 0 } else { hint.base };
    let key = |offset| Key::new(hint.ino, KeyType::EXTENT_DATA, offset);
    version.scan(&key(from), &key(to), |item| {
        if let Ok(FileExtent::Stored(record)) = FileExtent::parse(item.data())
            && record.disk_bytenr == extent.start
        {
            uses.push(Use { file: (subvolume, hint.ino), offset: item.key.offset, record });
        }
        Ok(uses.len() < MOST_USES)
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
