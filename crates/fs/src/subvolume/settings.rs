//! What a subvolume can tell about itself, and what can be set: facts, read-only, the default.

use crate::api::{Timestamp, from_timespec, may_wait};
use crate::engine::Core;
use crate::error::{Error, Result};
use crate::transaction::{Link, Received, parse_root_item};
use larder_format::features::Incompat;
use larder_format::items::{RootFlags, RootItem};
use larder_format::{Generation, Key, KeyType, ObjectId, TreeId};
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

/// Facts about a subvolume.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct SubvolInfo {
    /// Tree id.
    pub id: TreeId,
    /// Where it hangs: the subvolume, the directory there, the name. `None` for the top-level one.
    pub parent: Option<(TreeId, u64, Vec<u8>)>,
    pub read_only: bool,
    /// Transaction of the last commit with a change of the tree.
    pub generation: Generation,
    /// Transaction of the last change.
    pub ctransid: Generation,
    /// Transaction that made it.
    pub otransid: Generation,
    /// Transactions in which it was sent, and received; 0 if it was not.
    pub stransid: Generation,
    pub rtransid: Generation,
    pub uuid: [u8; 16],
    /// The subvolume of which it is a snapshot; zero if of none.
    pub parent_uuid: [u8; 16],
    /// The subvolume from which it was received; zero if from none.
    pub received_uuid: [u8; 16],
    pub ctime: Timestamp,
    pub otime: Timestamp,
    pub stime: Timestamp,
    pub rtime: Timestamp,
}

impl SubvolInfo {
    fn new(id: TreeId, item: &RootItem, link: Option<Link>, read_only: bool) -> Self {
        Self {
            id,
            parent: link.map(|l| (l.parent, l.dir.0, l.name)),
            read_only,
            generation: item.root_generation(),
            ctransid: Generation(item.ctransid.get()),
            otransid: Generation(item.otransid.get()),
            stransid: Generation(item.stransid.get()),
            rtransid: Generation(item.rtransid.get()),
            uuid: item.uuid,
            parent_uuid: item.parent_uuid,
            received_uuid: item.received_uuid,
            ctime: from_timespec(item.ctime),
            otime: from_timespec(item.otime),
            stime: from_timespec(item.stime),
            rtime: from_timespec(item.rtime),
        }
    }
}

impl Core {
    /// Facts about a subvolume.
    ///
    /// # Errors
    /// `NotFound`; reading; corruption.
    pub(crate) fn subvol_info(&self, id: TreeId) -> Result<SubvolInfo> {
        let subvol = self.subvol(id)?;
        let item = *subvol.item.lock();
        Ok(SubvolInfo::new(id, &item, self.link_of(id)?, subvol.read_only.load(Ordering::Relaxed)))
    }

    /// Facts about all subvolumes, in order of their ids.
    ///
    /// # Errors
    /// Reading, corruption.
    pub(crate) fn all_subvols(&self) -> Result<Vec<SubvolInfo>> {
        let mut items: BTreeMap<TreeId, RootItem> = BTreeMap::new();
        let first = Key::new(ObjectId::FS_TREE, KeyType::ROOT_ITEM, 0);
        let last = Key::new(ObjectId::LAST_FREE, KeyType::ROOT_ITEM, u64::MAX);
        self.roots.root.version(self.epochs.enter()).scan(&first, &last, |item| {
            if item.key.kind == KeyType::ROOT_ITEM && item.key.objectid.is_subvolume() {
                items.insert(item.key.objectid, parse_root_item(item)?);
            }
            Ok(true)
        })?;
        // What is in memory is newer than the root tree.
        for subvol in self.subvols.read().values() {
            items.insert(subvol.id, *subvol.item.lock());
            if subvol.is_dead() {
                items.remove(&subvol.id);
            }
        }
        let live = items.into_iter().filter(|(_, item)| item.refs.get() > 0);
        live.map(|(id, item)| {
            let loaded = self.subvols.read().get(&id).map(|s| s.read_only.load(Ordering::Relaxed));
            let read_only = loaded.unwrap_or_else(|| item.root_flags().contains(RootFlags::RDONLY));
            Ok(SubvolInfo::new(id, &item, self.link_of(id)?, read_only))
        })
        .collect()
    }

    /// Makes a subvolume read-only, or writable again. With `forget`, a received subvolume that
    /// becomes writable is no longer known as received. Without it, that is refused. It is also
    /// refused while the subvolume is read as a whole.
    ///
    /// # Errors
    /// `NotFound`; `Busy`; no space; read-only file system.
    pub(crate) fn set_subvol_read_only(
        &self,
        id: TreeId,
        read_only: bool,
        forget: bool,
    ) -> Result<()> {
        may_wait()?;
        self.check_writable()?;
        let _tree = self.subvol_tree.lock();
        let subvol = self.subvol(id)?;
        let mut h = self.begin(1)?;
        if subvol.read_only.load(Ordering::Relaxed) == read_only {
            return Ok(());
        }
        subvol.check_not_read_as_a_whole()?;
        let received = subvol.item.lock().received_uuid != [0; 16];
        if received && !read_only && !forget {
            return Err(Error::Busy(
                "the subvolume was received; as a writable one it is no longer what was sent",
            ));
        }
        h.noted_for_root_tree(1);
        let mut notes = h.txn.roots.lock();
        let change = notes.root(&subvol);
        change.read_only = Some(read_only);
        if received && !read_only {
            change.received = Some(Received::default());
        }
        subvol.read_only.store(read_only, Ordering::Relaxed);
        drop(notes);
        Ok(())
    }

    /// Notes from what a subvolume was received. `rtransid` becomes the transaction that notes it.
    ///
    /// # Errors
    /// `NotFound`; `SubvolumeReadOnly`; no space; read-only file system.
    pub(crate) fn set_subvol_received(
        &self,
        id: TreeId,
        mut received: Received,
    ) -> Result<Generation> {
        may_wait()?;
        let subvol = self.subvol(id)?;
        subvol.check_writable()?;
        let mut h = self.begin(1)?;
        received.rtransid = h.generation();
        h.noted_for_root_tree(3);
        h.txn.roots.lock().root(&subvol).received = Some(received);
        Ok(h.generation())
    }

    /// Makes a subvolume the one that is mounted if none is named.
    ///
    /// # Errors
    /// `NotFound`; no space; read-only file system.
    pub(crate) fn set_default_subvol(&self, id: TreeId) -> Result<()> {
        may_wait()?;
        self.check_writable()?;
        let _tree = self.subvol_tree.lock();
        self.subvol(id)?;
        let mut h = self.begin(1)?;
        h.noted_for_root_tree(1);
        h.need_incompat(Incompat::DEFAULT_SUBVOL.bits());
        h.txn.roots.lock().default = Some(id);
        *self.new_default.lock() = Some(id);
        Ok(())
    }
}
